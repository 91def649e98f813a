// The page of the cluster: all nodes as a grid, the first ones as small machines, asked for again every
// two seconds, and less often where there are thousands.
// A document that did not change costs one answer without a body.

import "./theme.js";
import { el, harmless, plural, setText, showVerdict, size } from "./small.js";

const EVERY = 2000; // ms
const PAGE = 24, MOST = 480; // nodes in full; the controller gives at most 500
const $ = (id) => document.getElementById(id);
const cards = new Map(); // by name of the node: {key, card}
const state = { token: "", tag: "", asked: "", limit: PAGE, node: "", found: null, timer: 0, at: "", wrong: "", busy: false };

try { state.token = sessionStorage.getItem("nri-numa-cluster-token") || ""; } catch { /* private mode */ }

// === Asking ======================================================================================

const FIELDS = ["cpus", "memory", "policy", "name", "sort", "state"];

/** What is asked, as a query string; the policy matters only together with an amount. */
function question() {
  const query = new URLSearchParams();
  for (const id of FIELDS) if ($(id).value.trim()) query.set(id, $(id).value.trim());
  if (!query.has("cpus") && !query.has("memory")) query.delete("policy");
  if (query.get("sort") === "name") query.delete("sort");
  if ($("fittingOnly").checked) query.set("fittingOnly", "true");
  if (state.node) query.set("node", state.node);
  return query;
}

/** The whole query; what is shown of the answer is no part of the question. */
function wanted() {
  const query = new URLSearchParams(state.asked);
  query.set("limit", state.limit);
  query.set("grid", "true");
  return query;
}

/** The question stands behind the # of the address: a link keeps it, and no server sees it. */
function fromAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  for (const id of FIELDS) $(id).value = query.get(id) ?? { policy: "single-numa-node", sort: "name" }[id] ?? "";
  $("fittingOnly").checked = query.get("fittingOnly") === "true";
  state.node = query.get("node") || "";
}

async function ask() {
  clearTimeout(state.timer);
  if (state.busy) return;
  state.busy = true;
  const query = wanted();
  const headers = state.token ? { Authorization: `Bearer ${state.token}` } : {};
  if (state.tag) headers["If-None-Match"] = state.tag;
  const asked = `${query}`;
  try {
    const response = await fetch(`../v1/cluster?${query}`, { headers, cache: "no-store", signal: AbortSignal.timeout(20000) });
    if (response.status === 401) return login();
    if (response.status !== 304) {
      const found = await response.json().catch(() => ({}));
      if (response.status === 400) {
        state.tag = "";
        state.wrong = asked;
        setText($("answer"), found.error || "This cannot be asked.");
        $("answer").className = "problem";
        well();
        return;
      }
      if (!response.ok) throw new Error(found.error || `the controller answered ${response.status}`);
      state.tag = response.headers.get("ETag") || "";
      state.found = found;
      draw();
    }
    well();
  } catch (error) {
    lost(error.message || "no answer");
  } finally {
    state.busy = false;
    const now = wanted();
    const every = EVERY + (state.found?.total.nodes ?? 0);
    // Without delay where something else was asked meanwhile; not before there is a token, nor again
    // what cannot be asked.
    if ($("login").hidden && state.wrong !== `${now}`) state.timer = setTimeout(ask, `${now}` === asked ? every : 0);
  }
}

function askAnew(node = "", limit = PAGE) {
  state.node = node;
  state.asked = `${question()}`;
  state.limit = limit;
  state.tag = state.wrong = "";
  history.replaceState(null, "", location.pathname + (state.asked ? `#${state.asked}` : ""));
  ask();
}

function login() {
  $("login").hidden = false;
  $("main").hidden = true;
  setText($("login-problem"), state.token ? "The controller does not accept this token." : "");
  state.token = state.tag = "";
  $("link").className = "state wait";
  setText($("link"), "controller: token needed");
  $("token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) {
    setText($("login-problem"), "A token has only letters, digits and signs, without spaces.");
    return;
  }
  state.token = given;
  $("token").value = "";
  $("login").hidden = true;
  try { sessionStorage.setItem("nri-numa-cluster-token", given); } catch { /* private mode */ }
  ask();
});

function well() {
  state.at = new Date().toLocaleTimeString();
  const stale = state.found?.stale;
  document.body.classList.toggle("stale", Boolean(stale));
  $("link").className = `state ${stale ? "warn" : "good"}`;
  setText($("link"), stale ? "API server: link lost" : "controller: live");
  banner(stale ? `The controller cannot follow the nodes for now: ${stale}` : "");
}

function lost(why) {
  document.body.classList.add("stale");
  $("link").className = "state bad";
  setText($("link"), "controller: link lost");
  banner(state.at ? `The link to the controller is lost (${why}). What you see is from ${state.at}; trying again…`
    : `The controller does not answer: ${why}. Trying again…`);
}

function banner(text) {
  if ($("banners").textContent !== harmless(text)) {
    $("banners").replaceChildren(...text ? [el("p", { class: "banner bad" }, el("span", {}, text))] : []);
  }
}

// === Drawing =====================================================================================

const percent = (part) => `${Math.round(100 * part)} %`;

const VERDICTS = {
  unknown: (nodes) => `no data from ${nodes}`,
  "not-ready": (nodes) => `agent not ready on ${nodes}`,
  drained: (nodes) => `NUMA nodes drained on ${nodes}`,
  "reduced-capacity": (nodes) => `capacity reduced on ${nodes}`,
};
const STATES = { unknown: "unknown", "not-ready": "agent not ready", drained: "drained", "reduced-capacity": "capacity reduced" };

/** A link to the nodes in a state; without one, to nothing. */
const showing = (found, text) => found ? el("a", { href: `#state=${found}` }, text) : text;

function draw() {
  const { total, nodes, hasPodRequest, feasibleNodes, matchingNodes, problem } = state.found;
  $("login").hidden = true;
  $("main").hidden = false;
  const figures = [["Nodes", total.nodes.toLocaleString("en"), total.unknownNodes ? showing("unknown", `${total.unknownNodes} unknown`) : ""],
    ["CPUs free for exclusive use", total.freeExclusiveCpus.toLocaleString("en"), `of ${total.exclusiveCpus.toLocaleString("en")}`],
    ["Largest on one NUMA node", total.maxExclusiveRequest, "CPUs"],
    ["Fragmentation", percent(total.fragmentation), "the largest request that fits could be this much larger"],
    ["Drained NUMA nodes", total.drainedNumaNodes, total.states.drained ? showing("drained", "show them") : ""]];
  $("verdict").hidden = false;
  showVerdict($("verdict"), Object.keys(STATES).filter((one) => total.states[one]).map((one) =>
    [VERDICTS[one](plural(total.states[one], "node")), `#state=${one}`]));
  $("figures").replaceChildren(...figures.map(([title, value, more]) =>
    el("div", {}, el("dt", {}, title), el("dd", {}, el("b", {}, `${value}`), " ", el("span", { class: "quiet" }, more)))));
  $("answer").className = problem ? "problem" : "quiet";
  setText($("answer"), problem ? `It fits on no node: ${problem}` : hasPodRequest
    ? `It fits on ${feasibleNodes.toLocaleString("en")} of ${plural(total.nodes, "node")}, as published; assumed pods are not counted.` : "");
  setText($("summary"), plural(matchingNodes, "node") + (matchingNodes > nodes.length ? `, below ${state.node ? "one of them" : `the first ${nodes.length}`}` : "") + "; CPU: free for exclusive use");
  $("more").hidden = Boolean(state.node) || nodes.length >= Math.min(matchingNodes, MOST);
  $("all").hidden = !state.node;
  drawGrid();
  const there = new Set(nodes.map((n) => n.name));
  for (const name of cards.keys()) if (!there.has(name)) cards.delete(name);
  const shown = nodes.map((node) => {
    const key = JSON.stringify(node);
    if (cards.get(node.name)?.key !== key) cards.set(node.name, { key, card: machine(node) });
    return cards.get(node.name).card;
  });
  const list = $("machines");
  // What stays where it is is left alone: a reader or a selection may be there.
  if (list.children.length !== shown.length || shown.some((card, i) => list.children[i] !== card)) list.replaceChildren(...shown);
}

/** One square for each node, in the order that was asked for; those that stay the same are left alone. */
function drawGrid() {
  const { grid, hasPodRequest } = state.found;
  const box = $("grid"), by = $("sort").value;
  box.hidden = $("key").hidden = grid.length <= PAGE;
  if (box.hidden) return box.replaceChildren();
  box.className = `${grid.length > 600 ? "dense" : ""} ${by === "fragmentation" ? "fragmented" : ""}`;
  setText($("shade"), by === "fragmentation" ? "fragmented" : "allocated");
  $("fade").hidden = !hasPodRequest;
  const squares = grid.map((node, i) => {
    const square = box.children[i] || el("button", { type: "button", tabindex: -1 });
    const { cpus: all = 0, freeExclusiveCpus: free = 0, maxExclusiveRequest: max = 0, fragmentation = 0 } = node;
    const key = JSON.stringify([node, by, state.node]);
    if (square.dataset.key === key) return square;
    Object.assign(square.dataset, { key, node: node.name });
    square.className = `${node.state ?? ""} ${node.feasible === false ? "no" : ""} ${node.name === state.node ? "chosen" : ""}`;
    const part = by === "fragmentation" ? fragmentation : all ? 1 - free / all : 0;
    square.style.setProperty("--part", `${Math.round(4 + 96 * part)}%`);
    square.title = harmless([`${node.name}: ${node.state === "unknown" ? "unknown" : `${free} of ${all} CPUs free for exclusive use, largest ${max}`}`,
      fragmentation && `fragmentation ${percent(fragmentation)}`, node.state && node.state !== "unknown" && STATES[node.state],
      node.feasible === false ? "the pod does not fit" : node.feasible && "the pod fits"].filter(Boolean).join(", "));
    return square;
  });
  for (const square of [...box.children].slice(squares.length)) square.remove();
  box.append(...squares.slice(box.children.length));
  if (!box.querySelector('[tabindex="0"]')) squares[0].tabIndex = 0;
}

function moveTo(square) {
  for (const other of $("grid").querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
  square.tabIndex = 0;
  square.focus();
}

$("grid").addEventListener("keydown", (event) => {
  const squares = [...$("grid").children], at = squares.indexOf(event.target);
  const row = squares.findIndex((one) => one.offsetTop > squares[0].offsetTop);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -at, End: squares.length - 1 - at }[event.key];
  if (at < 0 || step === undefined) return;
  event.preventDefault();
  if (squares[at + step]) moveTo(squares[at + step]);
});
$("grid").addEventListener("click", ({ target }) => {
  if (!target.dataset.node) return;
  moveTo(target);
  askAnew(target.dataset.node);
});

function machine(node) {
  const places = new Set(idsOf(node.numaNodes));
  const fit = node.feasible === null ? null
    : el("span", { class: `fit${node.feasible ? "" : " not"}` }, node.feasible ? "fits" : "does not fit");
  return el("li", { class: `socket${node.feasible === false ? " no" : ""}${node.zones.length > 8 ? " whole" : ""}`, "data-node": node.name },
    el("h3", {}, node.page ? el("a", { href: node.page, title: `The page of ${node.name}` }, el("bdi", {}, node.name)) : el("bdi", {}, node.name), fit),
    node.zones.length > 0 && el("div", { class: "nodes" }, node.zones.map((zone) => numaNode(zone, places.has(zone.id)))),
    node.problem && el("p", { class: "why quiet" }, `${node.problem}.`),
    !node.problem && !node.agentReady && el("p", { class: "why problem" }, "Its agent does not place containers now."),
    node.feasible === false && !node.problem && el("p", { class: "why quiet" }, `${node.reason}.`),
    node.fragmentation > 0 && el("p", { class: "why quiet" }, `largest request ${plural(node.maxExclusiveRequest, "CPU")}, fragmentation ${percent(node.fragmentation)}`));
}

function numaNode(zone, chosen) {
  const word = zone.drained ? "drained" : zone.capacityFactor === 1 ? "" : `factor ${zone.capacityFactor}`;
  return el("div", { class: `node${chosen ? " chosen" : ""}` },
    el("h4", {}, el("span", {}, `NUMA ${zone.id}`), chosen && el("span", { class: "badge" }, "here")),
    el("div", { class: "bars" },
      bar("CPU", zone.freeExclusiveCpus, zone.exclusiveCpus, `${zone.freeExclusiveCpus}`, "CPUs free for exclusive use"),
      zone.memoryBytes > 0 && bar("Mem", zone.freeMemoryBytes, zone.memoryBytes, size(zone.freeMemoryBytes), "of memory free", size),
      word && el("p", { class: "factor" }, word)));
}

function bar(label, free, there, text, noun, shown = String) {
  const full = `${shown(free)} of ${shown(there)} ${noun}`;
  const track = el("span", { class: "track" }, el("span", { class: "taken" }));
  track.firstChild.style.width = `${there > 0 ? 100 * (1 - free / there) : 100}%`;
  return el("div", { class: "bar", role: "img", "aria-label": full, title: full }, el("span", {}, label), track, el("span", { class: "free" }, `${text} free`));
}

function idsOf(text) {
  return (text ? text.split(",") : []).flatMap((part) => {
    const [low, high = low] = part.split("-").map(Number);
    return Array.from({ length: high - low + 1 }, (_, i) => low + i);
  });
}

// === Beginning ===================================================================================

$("ask").addEventListener("submit", (event) => { event.preventDefault(); askAnew(); });
for (const id of ["policy", "fittingOnly", "sort", "state"]) $(id).addEventListener("change", () => askAnew());
$("name").addEventListener("input", () => askAnew());
$("clear").addEventListener("click", () => { $("ask").reset(); askAnew(); });
$("more").addEventListener("click", () => askAnew("", Math.min(MOST, state.limit + PAGE)));
$("all").addEventListener("click", () => askAnew());
addEventListener("hashchange", () => { fromAddress(); askAnew(state.node); });
fromAddress();
askAnew(state.node);
