// The page: fetches, keeps up with changes, and shows who has what and why.

import { Unauthorized, follow, get, setToken } from "./api.js";
import { age, cpus, el, harmless, parseList, size } from "./format.js";
import { Machine, STATES, distanceTable, letterOf } from "./machine.js";

const ROWS = 200; // more rows only on demand: a table of thousands is no answer to anything
const COLUMNS = [
  ["Namespace", (c) => c.namespace],
  ["Pod", (c) => c.pod],
  ["Container", (c) => c.container],
  ["Kind", (c) => c.kind + (c.preferred ? "" : " (not preferred)")],
  ["CPUs", (c) => c.cpus || "any"],
  ["Memory nodes", (c) => c.mems || "any"],
  ["Policy", (c) => c.policy],
  ["Age", (c) => age(c.since)],
];

const $ = (id) => document.getElementById(id);
const state = { topology: null, topologyText: "", assignments: null, refusals: [], status: null,
  chosen: null, all: false, version: "", busy: false, again: false, lost: false, last: 0 };
const machine = new Machine($("sockets"), choose);

// --- keeping up ---------------------------------------------------------------------------------

async function refresh() {
  // One round at a time; whatever changes meanwhile makes one more round afterwards.
  if (state.busy) {
    state.again = true;
    return;
  }
  state.busy = true;
  try {
    const [status, topology, assignments, refusals] = await Promise.all(
      ["v1/status", "v1/topology", "v1/assignments", "v1/refusals"].map(get));
    Object.assign(state, { status, assignments, refusals: refusals.refusals, last: Date.now() });
    const text = JSON.stringify(topology);
    if (text !== state.topologyText) {
      Object.assign(state, { topology, topologyText: text });
      drawTopology();
    }
    $("main").hidden = false;
    $("login").hidden = true;
    draw();
  } finally {
    state.busy = false;
  }
  if (state.again) {
    state.again = false;
    await refresh();
  }
}

async function run() {
  let wait = 1000;
  for (;;) {
    try {
      await refresh();
      await follow((told) => {
        wait = 1000;
        state.lost = false;
        if (state.version && told.version !== state.version) upgraded();
        state.version = state.version || told.version;
        live();
        refresh().catch(lose);
      });
    } catch (error) {
      if (error instanceof Unauthorized) {
        await login();
        continue;
      }
      lose(error);
    }
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(wait * 2, 15000);
  }
}

function lose(error) {
  if (error instanceof Unauthorized) return;
  state.lost = true;
  live();
}

function live() {
  const pill = $("live");
  const status = state.status;
  let text = "live", kind = "good";
  if (state.lost) {
    const when = state.last ? `, shown as of ${new Date(state.last).toLocaleTimeString()}` : "";
    [text, kind] = [`no connection to the agent${when}; trying again`, "bad"];
  } else if (status && !status.ready) {
    [text, kind] = [`link to the runtime: ${status.link.state}`, "warn"];
  }
  text = harmless(text);
  if (pill.textContent !== text) pill.textContent = text;
  pill.className = `pill ${kind}`;
  document.body.classList.toggle("stale", state.lost);
}

function upgraded() {
  $("banner").hidden = false;
  $("banner").replaceChildren("The agent was upgraded. ",
    el("button", { type: "button", onclick: () => location.reload() }, "Reload this page"));
}

function login() {
  $("main").hidden = true;
  $("login").hidden = false;
  $("live").textContent = "token needed";
  $("token").focus();
  return new Promise((done) => {
    $("login").onsubmit = (event) => {
      event.preventDefault();
      setToken($("token").value.trim());
      $("token").value = "";
      done();
    };
  });
}

// --- drawing ------------------------------------------------------------------------------------

function drawTopology() {
  const counts = state.topology.counts;
  const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
  $("summary").textContent = [plural(counts.sockets, "socket"), plural(counts.numaNodes, "NUMA node"),
    plural(counts.cores, "core"), plural(counts.cpus, "CPU")].join(" · ");
  machine.build(state.topology);
  $("distances").querySelector("div").replaceChildren(distanceTable(state.topology));
  $("distances").hidden = state.topology.numaNodes.length < 2;
  $("warnings").replaceChildren(...state.topology.warnings.map((text) => el("li", {}, text)));
}

function draw() {
  const { status, assignments } = state;
  $("version").textContent = harmless(status.version);
  const link = status.link;
  $("runtime").textContent = harmless([
    link.runtime && `${link.runtime} ${link.runtimeVersion}`,
    status.observe && "observing only",
    status.checkpoint.problem && `state not saved: ${status.checkpoint.problem}`,
  ].filter(Boolean).join(" · "));
  machine.update(assignments);
  drawLegend();
  drawContainers();
  drawRefusals();
  highlightChosen();
  live();
}

function drawLegend() {
  const present = new Set([...machine.shown.values()].map((key) => key.split(" ")[0]));
  present.add("shared");
  const items = STATES.filter(([name]) => present.has(name.split(" ")[0])).map(([name, text]) =>
    el("li", {}, el("span", { class: `cpu ${name}`, "aria-hidden": "true" }, name.startsWith("own") ? "A" : ""), text));
  $("legend").replaceChildren(...items);
}

function drawContainers() {
  const wanted = $("filter").value.trim().toLowerCase();
  const all = state.assignments.containers;
  const found = wanted ? all.filter((c) => [c.namespace, c.pod, c.container, c.kind, c.policy]
    .some((text) => text.toLowerCase().includes(wanted))) : all;
  const rows = state.all ? found : found.slice(0, ROWS);
  $("containers-title").textContent = `Containers (${all.length})`;
  const head = $("list").tHead;
  if (!head.rows.length) head.append(el("tr", {}, COLUMNS.map(([name]) => el("th", { scope: "col" }, name))));
  const body = $("list").tBodies[0];
  const focused = document.activeElement?.closest?.("tr")?.dataset.id;
  // Rows stay where they are while nothing about them changed: focus and selection survive.
  const old = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  body.replaceChildren(...rows.map((c) => row(c, old.get(c.id))));
  if (focused) body.querySelector(`tr[data-id="${CSS.escape(focused)}"] button`)?.focus();
  $("more").replaceChildren();
  if (found.length > rows.length) {
    $("more").append(`${rows.length} of ${found.length} shown. `, el("button", { type: "button",
      onclick: () => { state.all = true; drawContainers(); } }, "Show all"));
  } else if (!found.length) {
    $("more").append(all.length ? "No container matches the filter." : "No containers on this node.");
  }
}

function row(c, old) {
  const texts = COLUMNS.map(([, text]) => text(c));
  const key = JSON.stringify(texts);
  const chosen = state.chosen?.id === c.id;
  const number = machine.letters.get(c.id);
  let made = old;
  if (!made || made.dataset.key !== key) {
    made = el("tr", { "data-id": c.id, "data-key": key }, texts.map((text, i) => el("td",
      { "data-label": COLUMNS[i][0], title: text },
      i === 1 ? el("button", { type: "button", class: "plain", onclick: () => choose({ id: c.id }) }, el("bdi", {}, text)) :
        el("bdi", {}, text))));
    if (number !== undefined) made.cells[3].append(" ", el("span", { class: "letter" }, letterOf(number)));
  }
  made.classList.toggle("chosen", chosen);
  return made;
}

function drawRefusals() {
  $("refused").hidden = !state.refusals.length;
  $("refusals").replaceChildren(...state.refusals.slice(0, 50).map((r) => el("li", {},
    el("strong", {}, r.reason), " ", el("button", { type: "button", class: "plain",
      onclick: () => choose({ namespace: r.namespace, pod: r.pod, container: r.container }) },
    el("bdi", {}, `${r.namespace}/${r.pod}, ${r.container}`)), " ",
    el("span", { class: "quiet" }, `${age(r.at)} ago`), el("p", {}, el("bdi", {}, r.message)))));
}

// --- details ------------------------------------------------------------------------------------

async function choose(what) {
  state.chosen = what;
  $("details").classList.add("open");
  if (what.cpu !== undefined) showCPU(what.cpu);
  else if (what.numaNode !== undefined) showNode(what.numaNode);
  else await showContainer(what);
  highlightChosen();
  drawContainers();
}

function highlightChosen() {
  const { chosen } = state;
  const c = chosen?.id && state.assignments.containers.find((one) => one.id === chosen.id);
  machine.highlight(c ? parseList(c.cpus) : chosen?.cpu !== undefined ? [chosen.cpu] : []);
}

function facts(pairs) {
  return el("dl", {}, pairs.filter(([, value]) => value !== "" && value !== undefined && value !== null)
    .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, el("bdi", {}, value))]));
}

function show(title, ...content) {
  $("details-title").textContent = harmless(title);
  $("details-body").className = "";
  $("details-body").replaceChildren(...content.filter(Boolean));
}

function links(containers) {
  return el("ul", { class: "links" }, containers.slice(0, 50).map((c) => el("li", {}, el("button",
    { type: "button", class: "plain", onclick: () => choose({ id: c.id }) },
    el("bdi", {}, `${c.namespace}/${c.pod}, ${c.container}`)))),
  containers.length > 50 ? el("li", {}, `and ${containers.length - 50} more`) : null);
}

function showCPU(cpu) {
  const info = machine.cpuInfo.get(cpu) || {};
  const label = machine.cells.get(cpu).getAttribute("aria-label").replace(/^CPU \d+: /, "");
  const here = state.assignments.containers.filter((c) => parseList(c.cpus).includes(cpu));
  show(`CPU ${cpu}`, facts([["State", label], ["Core", info.core], ["Threads of the core", info.siblings],
    ["L3 group", info.l3], ["NUMA node", info.numaNode], ["Socket", info.socket],
    ["Kind", info.kind === "standard" ? "" : info.kind]]),
  el("h3", {}, here.length ? `Containers that may run here (${here.length})` : "No container is bound to it"),
  links(here));
}

function showNode(id) {
  const node = state.topology.numaNodes.find((n) => n.id === id);
  const use = state.assignments.numaNodes.find((n) => n.id === id) || {};
  const here = state.assignments.containers.filter((c) => parseList(c.numaNodes).includes(id));
  const distances = state.topology.numaNodes.map((n, i) => [n.id, node.distances[i]])
    .sort((a, b) => a[1] - b[1] || a[0] - b[0]).map(([n, d]) => `${n} (${d})`).slice(0, 16).join(", ");
  show(`NUMA node ${id}`, facts([["CPUs", node.cpus], ["Exclusive", use.exclusive], ["Kept idle", use.idle],
    ["Shared pool", use.shared], ["Reserved", use.reserved],
    ["CPU", `${cpus(use.cpuAllocatedMilli)} of ${cpus(use.cpuCapacityMilli)} promised`],
    ["Memory", `${size(use.memoryAllocatedBytes)} of ${size(use.memoryBytes)} promised, ${size(use.memoryAvailableBytes)} left`],
    ["Capacity factor", use.capacityFactor], ["Nearest nodes (distance)", distances]]),
  el("h3", {}, `Containers (${here.length})`), links(here));
}

async function showContainer(what) {
  const c = what.id ? state.assignments.containers.find((one) => one.id === what.id) : what;
  if (!c) return show("Container", el("p", {}, "It is gone."));
  const title = `${c.namespace}/${c.pod}, ${c.container}`;
  show(title, el("p", { class: "quiet" }, "…"));
  let found;
  try {
    const path = ["v1/explain", c.namespace, c.pod, c.container].map((s, i) => i ? encodeURIComponent(s) : s).join("/");
    const all = (await get(path)).explanations;
    found = all.find((one) => !what.id || one.assignment?.id === what.id) || all[0];
  } catch (error) {
    return show(title, el("p", {}, error.message || "the agent does not answer"));
  }
  if (state.chosen !== what) return undefined;
  const a = found.assignment;
  show(title, a && facts([["CPUs", a.cpus || "any"], ["Memory nodes", a.mems || "any"], ["Kind", a.kind],
    ["Policy", a.policy], ["QoS class", a.qos], ["Hyperthreads", a.kind === "exclusive" ? a.smt : ""],
    ["Kept idle for it", a.idle], ["Asked for", `${cpus(a.cpuMilli)} CPUs, ${size(a.memoryBytes)}`],
    ["Preferred set", a.preferred ? "" : "no, a wider one had to do"],
    ["Since", new Date(a.since * 1000).toLocaleString()], ["Id", a.id.slice(0, 12)]]),
  found.refusal && el("p", { class: "refusal" }, el("strong", {}, `Refused: ${found.refusal.reason}`)),
  el("h3", {}, "Why"), el("p", {}, el("bdi", {}, found.summary)),
  found.steps.length ? el("ol", { class: "steps" }, found.steps.map((step) => el("li", {}, el("bdi", {}, step)))) :
    el("p", { class: "quiet" }, "How this came about is not kept: it was placed before the agent last started, or nothing was asked for it."));
  return undefined;
}

// --- start --------------------------------------------------------------------------------------

const saved = localStorage.getItem("nri-numa-theme");
if (saved) document.documentElement.dataset.theme = saved;
$("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" :
    matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("nri-numa-theme", document.documentElement.dataset.theme);
});
$("filter").addEventListener("input", () => { state.all = false; drawContainers(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("details").classList.remove("open");
});
// What the kernel has free changes without a change of ours, and ages grow.
setInterval(() => { if (!state.lost && !document.hidden && state.status) refresh().catch(lose); }, 15000);
run();
