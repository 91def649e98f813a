// The page: draws the machine, lists who has what, says why, and keeps up with the agent.
// One file without a build step. Names come from pods and are not trusted: they only ever become
// text nodes and attribute values, never markup.

import "./theme.js";
import { announce } from "./announce.js";
import { keep, picture as pictureOf } from "./picture.js";
import { el, freeSize, harmless, plural, setText, showVerdict, size } from "./small.js";
import { drawUse, nodeWords } from "./use.js";

// === Small things ================================================================================

const $ = (id) => document.getElementById(id);
const collator = new Intl.Collator("en", { numeric: true });

/** Parse the kernel's list format: "0-3,8" to [0, 1, 2, 3, 8]. */
function parseList(text) {
  const ids = [];
  for (const part of text ? text.split(",") : []) {
    const [low, high = low] = part.split("-").map(Number);
    for (let id = low; id <= high; id++) ids.push(id);
  }
  return ids;
}

/** Write ids, ascending, in the kernel's list format. */
function formatList(ids) {
  const parts = [];
  for (let i = 0; i < ids.length; ) {
    let j = i;
    while (ids[j + 1] === ids[j] + 1) j++;
    parts.push(i === j ? `${ids[i]}` : `${ids[i]}-${ids[j]}`);
    i = j + 1;
  }
  return parts.join(",");
}

const cpuAmount = (milli) => String(Math.round(milli / 10) / 100);
const nameOf = (c) => `${c.namespace}/${c.pod}, ${c.container}`;

function age(since) {
  if (!since) return "–";
  const s = Math.max(0, Math.floor(Date.now() / 1000 - since));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** Text that a pod chose: its direction stays its own. */
const foreign = (text) => el("bdi", {}, text);

/** What the browser remembers; a browser that may not remember is fine too. */
const memory = {
  get(store, key) {
    try { return store().getItem(`nri-numa-${key}`) || ""; } catch { return ""; }
  },
  set(store, key, value) {
    try {
      if (value) store().setItem(`nri-numa-${key}`, value);
      else store().removeItem(`nri-numa-${key}`);
    } catch { /* private mode */ }
  },
};
const forTab = () => sessionStorage;
const forGood = () => localStorage;

// === Talking to the agent ========================================================================

const SILENCE = 40000; // ms; the stream says something at least every 15 s
let token = memory.get(forTab, "token");

class Unauthorized extends Error {}
class Busy extends Error {}
let stream = null; // the AbortController of the open event stream

async function request(path, signal) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (response.status === 401) throw new Unauthorized();
  return response;
}

/** The document at a path; an Error with the agent's own words when there is none. */
async function get(path) {
  const response = await request(path, AbortSignal.timeout(20000));
  const text = await response.text();
  let found = null;
  try { found = JSON.parse(text); } catch { /* not ours */ }
  if (!response.ok || found === null) {
    throw new Error(found?.error?.message || `the agent answered ${response.status}`);
  }
  return found;
}

/**
 * Call told() for every event until the stream ends or falls silent; then throw. fetch() carries
 * it, since an EventSource cannot send the Authorization header.
 */
async function follow(told) {
  const abort = stream = new AbortController();
  let watch = setTimeout(() => abort.abort(), SILENCE);
  try {
    const response = await request("v1/events", abort.signal);
    if (response.status === 503) throw new Busy();
    if (!response.ok) throw new Error(`the agent answered ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the agent closed the connection");
      clearTimeout(watch);
      watch = setTimeout(() => abort.abort(), SILENCE);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) told(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(watch);
    abort.abort();
  }
}

// === What is known ===============================================================================

const known = { status: null, topology: null, assignments: null, rejections: [], use: null };
const view = { chosen: null, kind: "", sort: "Pod", down: false, rows: 0 };
const link = { lost: "", heard: 0, version: "", upgraded: false, odd: "" };

/** What a thread's owner looks like: a number as long as it runs, the lowest that is free. */
const numbers = new Map();

function numberOwners(containers) {
  const owners = containers.filter((c) => ["exclusive", "listed"].includes(c.kind) || (c.kind === "reservation" && cpus.get(first(c.cpus))?.owners.includes(c)));
  const alive = new Set(owners.map((c) => c.id));
  for (const id of numbers.keys()) if (!alive.has(id)) numbers.delete(id);
  const used = new Set(numbers.values());
  const near_ = new Map(); // by NUMA node: looks that its owners have
  const looksAt = (c) => parseList(c.numaNodes).map((id) => near_.get(id) || near_.set(id, new Set()).get(id));
  for (const c of owners) if (numbers.has(c.id)) for (const seen of looksAt(c)) seen.add(numbers.get(c.id) % LOOKS);
  for (const c of owners) {
    if (numbers.has(c.id)) continue;
    // The lowest number whose look is another one than those of its NUMA nodes, as long as looks are left.
    const there = looksAt(c);
    const full = there.some((seen) => seen.size >= LOOKS);
    let number = 0;
    while (used.has(number) || (!full && there.some((seen) => seen.has(number % LOOKS)) && number < used.size + LOOKS)) number++;
    used.add(number);
    for (const seen of there) seen.add(number % LOOKS);
    numbers.set(c.id, number);
  }
}

/** A, B, … Z, AA, AB, … */
function letters(number) {
  let text = "";
  for (let n = number; n >= 0; n = Math.floor(n / 26) - 1) text = String.fromCharCode(65 + (n % 26)) + text;
  return text;
}

// Seven colours that colour-blind eyes tell apart (Okabe and Ito's), three textures each.
const LOOKS = 21;
const look = (number) => `o${number % 7} f${Math.floor(number / 7) % 3}`;

const STATES = {
  shared: "shared pool",
  exclusive: "exclusive",
  idle: "idle sibling",
  kubelet: "the kubelet's",
  listed: "listed",
  reserved: "reserved",
  unused: "not used",
  offline: "offline",
};

/** The state of every CPU: Map of {cpu, core, siblings, socket, numaNode, l3, type, state, owners…}. */
function picture() {
  const { topology, assignments } = known;
  const l3Of = new Map();
  for (const group of topology.l3Groups) for (const cpu of parseList(group.cpus)) l3Of.set(cpu, group.id);
  const found = new Map();
  const tickless = new Set(parseList(topology.cpus.nohzFull ?? ""));
  for (const core of topology.cores) {
    for (const cpu of parseList(core.cpus)) {
      found.set(cpu, { cpu, core: core.id, siblings: core.cpus, socket: core.socket, type: core.kind,
        numaNode: core.numaNode, l3: l3Of.get(cpu), tickless: tickless.has(cpu), state: "unused", owners: [], reserved: false, pool: false });
    }
  }
  const offline = new Set(parseList(topology.cpus.offline));
  for (const cpu of offline) {
    found.set(cpu, { ...found.get(cpu), cpu, state: "offline", owners: [], reserved: false, pool: false });
  }
  const each = (list, change) => {
    for (const cpu of parseList(list)) {
      const info = found.get(cpu);
      if (info && info.state !== "offline") change(info);
    }
  };
  each(assignments.sharedPool, (info) => Object.assign(info, { state: "shared", pool: true }));
  for (const node of assignments.numaNodes) {
    each(node.reserved, (info) => Object.assign(info, { state: "reserved", reserved: true }));
    each(node.exclusive, (info) => { info.state = "exclusive"; });
    each(node.idleSiblings, (info) => { info.state = "idle"; });
    each(node.kubelet, (info) => { info.state = "kubelet"; });
  }
  for (const c of assignments.containers) {
    if (["exclusive", "reservation"].includes(c.kind)) each(c.cpus, (info) => { if (info.state === "exclusive") info.owners.push(c); });
    else if (c.kind === "kubelet") each(c.foreignCPUs, (info) => { if (info.state === "kubelet") info.owners.push(c); });
    else if (c.kind === "listed") {
      each(c.cpus, (info) => {
        info.owners.push(c);
        if (!["exclusive", "idle", "kubelet"].includes(info.state)) info.state = "listed";
      });
    }
    each(c.idleSiblings, (info) => { if (info.state === "idle") info.owners.push(c); });
  }
  // The kernel's word where it is another one.
  for (const c of assignments.containers) {
    if (!c.actual?.desiredCPUs) continue;
    const [has, desired] = [c.actual.cpus, c.actual.desiredCPUs].map((list) => new Set(parseList(list)));
    each(c.actual.cpus, (info) => { if (!desired.has(info.cpu)) info.strangers = [...info.strangers || [], c]; });
    each(c.actual.desiredCPUs, (info) => { if (!has.has(info.cpu)) info.missing = [...info.missing || [], c]; });
  }
  return found;
}

/** A few names, and how many more. */
function some(containers) {
  const named = containers.slice(0, 3).map(nameOf).join("; ");
  return containers.length > 3 ? `${named}; and ${(containers.length - 3).toLocaleString("en")} more` : named;
}

/** What is not as meant about one CPU, in words; empty when all is. */
function wrong(info) {
  return [info.strangers && `DRIFT: can be used by ${some(info.strangers)}`,
    info.missing && `DRIFT: cannot be used by ${some(info.missing)}`].filter(Boolean).join("; ");
}

/** What a container really has beside what is meant, but for the time. */
function disturbs(actual) {
  const { holders } = actual;
  const named = holders.slice(0, 3).join(", ") + (holders.length > 3 ? ` and ${holders.length - 3} more` : "");
  return (actual.onExclusiveCPUs ? `, on exclusive CPUs of ${named || "others"}` : "")
    + (actual.repairsAbandoned ? "; repairs are abandoned, because another program rewrites it"
      : "");
}

/** True if a container is misaligned, or unpinned although it requested a placement. */
const isWide = (c) => !c.aligned && c.kind !== "reservation";
const wideWord = (c) => (c.kind === "unpinned" ? "unpinned" : "misaligned");
const wideBadge = (c) => el("span", { class: "wide", title: `${c.kind === "unpinned" ? "requested a placement and has none" : "misaligned"}: ${c.reason}` },
  wideWord(c));

/** What is marked of a container beside its kind. */
const badges = (c) => [isWide(c) && wideBadge(c), c.reserved && el("span", { class: "wide",
  title: `CPUs ${c.reserved} became reserved later, exclusive to it until it is recreated` }, "reserved")].filter(Boolean);

/** One CPU's state in words, also where it is not as meant. */
const words = (info) => [meant(info), info.tickless && "nohz_full", info.owners.some(isWide) && "misaligned",
  info.reserved && info.state === "exclusive" && "became reserved later", wrong(info)].filter(Boolean).join("; ");

/** Which cpuset partition keeps a CPU from containers. */
function partitionOf(cpu) {
  const one = (known.topology.partitions ?? []).find((p) => !p.problem && parseList(p.cpus).includes(cpu));
  return one && `of the cpuset partition ${one.cgroup}`;
}

function meant(info) {
  const { cpus } = known.topology;
  const owners = info.owners.map(nameOf);
  switch (info.state) {
    case "offline": return "offline";
    case "exclusive": return owners.length ? `exclusive to ${owners.join("; ")}` : "pinned by another program";
    case "idle": return `idle sibling of ${owners.join("; ") || "the other CPU of its core"}`;
    case "kubelet": return `exclusive by the kubelet's static policy${owners.length ? ` to ${owners.join("; ")}` : ""}`;
    case "listed": return `listed by ${owners.join("; ")}${info.pool ? "; shared pool" : ""}`;
    case "reserved": return info.pool ? "reserved for the system, also shared pool" : "reserved for the system";
    case "shared": return "shared pool";
    default: {
      const taker = partitionOf(info.cpu);
      if (taker) return `not used: ${taker}`;
      if (parseList(cpus.isolated).includes(info.cpu)) return "not used: isolated by the kernel";
      if (!parseList(cpus.allowed).includes(info.cpu)) return "not used: not allowed to containers";
      return "not used";
    }
  }
}

// === Keeping up ==================================================================================

/** From what each part of the page was drawn last, to leave it alone while that is the same. */
const drawn = { banners: "", kinds: "", rejections: "" };
const round = { running: false, again: false, denied: false, timer: 0, retry: 0, cost: 0, shape: "" };

/** Fetch everything and draw it; one round at a time, with a pause that grows with its cost. */
function refresh() {
  if (round.running || round.timer) {
    round.again = true;
    return;
  }
  refreshNow().catch(failed);
}

/** How many CPUs are anybody's: another number when a partition begins or ends, not when a container does. */
const inUse = ({ sharedPool, numaNodes }) => [sharedPool, ...numaNodes.flatMap((n) => [n.exclusive, n.idleSiblings, n.kubelet])]
  .reduce((sum, list) => sum + parseList(list).length, 0);

/** What the machine's drawing hangs on; it is large, so it is fetched only when this changes. */
const shapeOf = ({ status, assignments }) => JSON.stringify([status.startedAt, inUse(assignments), assignments.numaNodes.map((n) =>
  [n.id, n.cpus, n.reserved, n.memoryBytes, n.hugePages.map((p) => p.totalBytes)])]);

/** Do something with documents: when that fails they are not what this page knows. */
function understand(action) {
  try {
    const result = action();
    link.odd = "";
    return result;
  } catch (error) {
    console.error(error);
    link.odd = String(error.message);
    return undefined;
  }
}

async function refreshNow() {
  round.running = true;
  round.again = false;
  const begun = performance.now();
  try {
    const [status, assignments, { rejections }] = await Promise.all(["v1/status", "v1/assignments", "v1/rejections"].map(get));
    const shape = understand(() => shapeOf({ status, assignments }));
    const isNew = shape !== round.shape;
    const topology = shape && isNew ? await get("v1/topology") : known.topology;
    heard(String(status.version));
    if (shape && topology) {
      Object.assign(known, { status, assignments, rejections, topology });
      understand(() => draw(isNew));
      round.shape = shape;
    }
    drawLinks();
  } finally {
    round.running = false;
  }
  round.cost = performance.now() - begun;
  round.timer = setTimeout(() => {
    round.timer = 0;
    if (round.again) refresh();
  }, Math.max(200, 3 * round.cost));
}

let wake = () => {};

/** Wait, or until wake() is called. */
function pause(ms) {
  return new Promise((done) => {
    const timer = setTimeout(done, ms);
    wake = () => { clearTimeout(timer); done(); };
  });
}

async function run() {
  for (let wait = 500; ; wait = Math.min(wait * 1.6, 8000)) {
    try {
      if (!round.running) await refreshNow();
      await follow((told) => {
        wait = 500;
        heard(told.version);
        if (!document.hidden) refresh(); // else when the page is looked at
      });
    } catch (error) {
      if (error instanceof Unauthorized) {
        await askForToken();
        wait = 500;
        continue;
      }
      if (error instanceof Busy) wait = 5000; // too many tabs for one more stream: ask now and then
      else if (!round.denied) failed(error);
    }
    await pause(round.denied ? 0 : wait);
    round.denied = false;
  }
}

function heard(version) {
  Object.assign(link, { lost: "", heard: Date.now() });
  if (link.version && version !== link.version) link.upgraded = true;
  link.version = link.version || version;
  drawLinks();
}

function failed(error) {
  if (error instanceof Unauthorized) { // the token was changed: run() asks for the new one
    round.denied = true;
    stream?.abort();
    return;
  }
  link.lost = error.message || "no answer";
  // The stream may well be alive; then nothing else would ask again.
  clearTimeout(round.retry);
  round.retry = setTimeout(refresh, 3000);
  drawLinks();
}

let loginDone = null;

function askForToken() {
  $("main").hidden = true;
  $("login").hidden = false;
  setText($("login-problem"), token ? "The agent does not accept this token." : "");
  token = "";
  memory.set(forTab, "token", "");
  link.lost = "";
  drawLinks();
  $("token").focus();
  return new Promise((done) => { loginDone = done; });
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  // Header values are Latin-1 at most; fetch() would throw over anything else.
  if (!/^[\x21-\x7e]+$/.test(given)) {
    setText($("login-problem"), "A token has only letters, digits and signs, without spaces.");
    return;
  }
  token = given;
  memory.set(forTab, "token", token);
  $("token").value = "";
  loginDone?.();
});

// === Links and banners ===========================================================================

function drawLinks() {
  const { status } = known;
  const waiting = !$("login").hidden;
  const agent = $("link-agent"), runtime = $("link-runtime");
  const at = link.heard ? new Date(link.heard).toLocaleTimeString() : "";
  const active = Boolean(status?.link.state === "active");
  const silent = status?.link.pendingRegistration || "";
  const up = active && !silent;
  const named = status?.link.runtime ? `${status.link.runtime} ${status.link.runtimeVersion}` : "runtime";
  agent.className = `state ${link.lost ? "bad" : waiting || !status ? "wait" : "good"}`;
  setText(agent, link.lost ? "agent: link lost" : waiting ? "agent: token required" : status ? "agent: live" : "agent: connecting");
  runtime.className = `state ${!status || link.lost ? "wait" : up ? "good" : "warn"}`;
  setText(runtime, !status ? "runtime: unknown" : `${named}: ${link.lost ? "unknown" : silent ? "does not answer" : up ? "linked" : status.link.state}`);
  const banners = [];
  if (link.lost) {
    banners.push(["bad", at ? `The link to the agent is lost. What you see is from ${at} and may have changed; trying again…`
      : "The agent does not answer; trying again…", ["Try now", () => wake()]]);
  } else if (status && !waiting && !active) {
    const detail = status.link.detail ? ` (${status.link.detail})` : "";
    banners.push(["warn", `The agent has no link to the container runtime: ${status.link.state}${detail}. ` +
      "Running containers keep what they have; new ones are not placed until it is back."]);
  }
  if (silent && !link.lost && !waiting) {
    banners.push(["bad", `${silent[0].toUpperCase()}${silent.slice(1)}. If no container is in its grace period, ` +
      "restart the runtime; containers keep running."]);
  }
  if (status?.onExclusiveCPUs && !status.observe && !link.lost && !waiting) {
    const n = status.onExclusiveCPUs;
    banners.push(["warn", `${plural(n, "container")} can run on exclusive CPUs of ${n === 1 ? "another one" : "others"}.`,
      ["Show", () => filterBy("is:drifted")]]);
  }
  if (status?.kubeletConflicts && !link.lost && !waiting) {
    const n = status.kubeletConflicts;
    banners.push(["warn", `The kubelet writes the cpuset of ${plural(n, "container")} too; kubelet.overrideGrants says which applies. ` +
      "/v1/kubelet names them."]);
  }
  if (link.upgraded || link.odd) {
    banners.push(["info", link.upgraded ? "The agent was upgraded; this page is of the version before."
      : "This page does not understand the agent's answers.", ["Reload", () => location.reload()]]);
  }
  if (status?.observe) banners.push(["info", "Observing only: the agent decides and reports, and changes nothing."]);
  if (status?.checkpoint.problem) banners.push(["warn", `The agent cannot save its state: ${status.checkpoint.problem}`]);
  drawVerdict(waiting, up);
  const key = JSON.stringify(banners);
  if (drawn.banners !== key) {
    drawn.banners = key;
    $("banners").replaceChildren(...banners.map(([kind, text, action]) => el("p", { class: `banner ${kind}` },
      el("span", {}, text), action && el("button", { type: "button", onclick: action[1] }, action[0]))));
  }
  document.body.classList.toggle("stale", Boolean(link.lost));
  setText($("version"), status ? status.version : "");
  const name = status?.nodeName || location.hostname;
  setText($("node"), status?.nodeName || "");
  document.title = harmless(`${link.lost ? "✕ " : status && !up ? "▲ " : ""}${name} – nri-numa`);
}

/** One line for the whole node: that all is well, or a link to each thing that is not. */
function drawVerdict(waiting, up) {
  const { status, assignments, rejections, topology } = known;
  const box = $("verdict");
  box.hidden = waiting || !assignments;
  if (box.hidden) return;
  const wide = assignments.containers.filter(isWide).length;
  const found = link.lost ? [["the link to the agent is lost", "#banners"]] : [
    !up && ["no link to the container runtime", "#banners"],
    status.checkpoint.problem && ["the state cannot be saved", "#banners"],
    status.drifted && [`${plural(status.drifted, "container")} drifted`, "#containers", () => filterBy("is:drifted")],
    status.kubeletConflicts && [`${plural(status.kubeletConflicts, "cpuset")} also written by the kubelet`, "v1/kubelet"],
    rejections.length && [plural(groups(rejections).length, "rejection"), "#refused"],
    wide && [`${plural(wide, "container")} misaligned`, "#containers", () => filterBy("is:misaligned")],
    topology.warnings.length && [plural(topology.warnings.length, "warning about the machine", "warnings about the machine"), "#warnings"],
  ].filter(Boolean);
  showVerdict(box, found);
}

// === Drawing =====================================================================================

let cpus = new Map(); // by number: what picture() found
const cells = new Map(); // by CPU number
let order = []; // cells as they are drawn, for the arrow keys
const nodes = new Map(); // by NUMA node: {bars, badge}

function draw(isNew) {
  cpus = picture();
  numberOwners(known.assignments.containers);
  $("login").hidden = true;
  $("main").hidden = false;
  if (isNew) drawMachine();
  drawFigures();
  drawCells();
  for (const use of known.assignments.numaNodes) drawBars(use);
  drawPinned();
  showUse();
  drawContainers();
  drawRejections();
  announce($("said"), known);
  if (isNew) chooseFromAddress();
  updateDetails();
  drawLinks();
}

function drawFigures() {
  const { assignments, status, rejections, topology } = known;
  const sum = (field) => assignments.numaNodes.reduce((total, n) => total + n[field], 0);
  const count = { exclusive: 0, idle: 0, kubelet: 0, listed: 0, shared: 0, reserved: 0, unused: 0, offline: 0 };
  const all = topology.counts.cpus;
  let pool = 0, special = 0;
  for (const info of cpus.values()) {
    count[info.state]++;
    if (!info.pool) continue;
    pool++;
    if (info.state !== "shared") special++;
  }
  const kinds = KINDS.filter((kind) => status.containers[kind]).map((kind) => `${status.containers[kind]} ${kind}`);
  const figures = [
    ["Exclusive CPUs", `${count.exclusive}`, `of ${all}${count.idle ? `, ${plural(count.idle, "idle sibling")}` : ""}${count.kubelet ? `, ${count.kubelet} by the kubelet` : ""}`],
    ["Shared pool", `${pool}`, `of ${all}${special ? `, ${special} of them reserved or listed` : ""}`],
    ["Memory allocated", size(sum("memoryAllocatedBytes")), `of ${size(sum("memoryBytes"))}`],
    ["Containers", assignments.containers.filter((c) => c.kind !== "reservation").length.toLocaleString("en"), kinds.join(", ")],
    [status.observe ? "Would be rejected" : "Recent rejections", `${rejections.length}`, rejections.length ? `latest ${age(rejections[0].lastTime)} ago` : ""],
  ];
  const wide = assignments.containers.filter(isWide).length;
  figures.splice(3, 0, ["Misaligned", wide.toLocaleString("en"), wide ? el("button", { type: "button", class: "plain show",
    onclick: () => filterBy("is:misaligned") }, `Show ${wide === 1 ? "it" : "them"}`) : "all containers are on as few NUMA nodes as possible"]);
  if (status.drifted) {
    figures.push(["Drift", `! ${status.drifted.toLocaleString("en")}`,
      `${status.drifted === 1 ? "container" : "containers"}${status.onExclusiveCPUs ? `, ${status.onExclusiveCPUs} on exclusive CPUs of others` : ""}`]);
  }
  const inFigures = $("figures").contains(document.activeElement);
  $("figures").replaceChildren(...figures.map(([name, value, rest]) => el("div", {}, el("dt", {}, name),
    el("dd", {}, el("b", {}, value), " ", el("span", { class: "quiet" }, rest)))));
  if (inFigures) $("figures").querySelector("button")?.focus({ preventScroll: true });
  $("legend").replaceChildren(...Object.entries(STATES)
    .filter(([state]) => count[state] || state === "shared" || state === "exclusive")
    .map(([state, text]) => el("li", {},
      el("span", { class: `cpu ${state} ${state === "exclusive" || state === "listed" ? "o1" : ""}`, "aria-hidden": "true" },
        state === "exclusive" || state === "listed" ? "A" : ""),
      // A reserved or listed CPU may be in the pool too: the number is that of the pool, as above.
      el("span", {}, text), " ", el("b", {}, `${state === "shared" ? pool : count[state]}`))),
  el("li", { class: "bars-key" }, el("span", { class: "track", "aria-hidden": "true" }, el("span", { class: "taken" }), el("span", { class: "rest" })),
    el("span", {}, "bar: allocated / used otherwise / free (number = free)")));
}

function drawMachine() {
  const { topology } = known;
  const { counts } = topology;
  setText($("summary"), [plural(counts.sockets, "socket"), plural(counts.numaNodes, "NUMA node"),
    plural(counts.cores, "core"), plural(counts.cpus, "CPU")].join(" · "));
  const focused = document.activeElement?.dataset?.cpu;
  cells.clear();
  nodes.clear();
  const map = $("map");
  setDensity();
  map.replaceChildren(...sockets().map(drawSocket));
  const offline = [...cpus.values()].filter((info) => info.state === "offline" && info.numaNode === undefined);
  if (offline.length) {
    map.append(el("section", { class: "socket whole" }, el("h3", {}, "Offline", el("span", { class: "quiet" },
      "the kernel does not say where these are")), counted(offline.length, el("div", { class: "cache" }, el("div", { class: "cores" }, offline.map((info) =>
      el("span", { class: "core" }, drawCell(info))))))));
  }
  order = [...map.querySelectorAll("[data-cpu]")];
  balance();
  const first = cells.get(Number(focused)) || order[0];
  if (first) first.tabIndex = 0;
  if (focused !== undefined) first?.focus();
  drawDistances();
  drawDevices();
  $("warnings").replaceChildren(...topology.warnings.map((text) => el("li", {}, text)));
}

function setDensity() {
  const wanted = memory.get(forGood, "density") || "auto";
  const count = known.topology ? known.topology.counts.cpus : 0;
  $("density").value = wanted;
  $("map").className = wanted === "auto" ? (count > 384 ? "small" : count > 160 ? "medium" : "large") : wanted;
  const { numaNodes = 0, sockets: packages = 0 } = known.topology ? known.topology.counts : {};
  $("map").classList.toggle("many", numaNodes > 16 && packages < numaNodes);
  $("map").classList.toggle("flat", packages > 4 && packages >= numaNodes);
  balance();
}

/** As many sockets, and NUMA nodes of a socket, in a row as fit, but all rows equally long: 4 + 4, not 6 + 2. */
function balance() {
  const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const least = parseFloat(getComputedStyle($("map")).getPropertyValue("--node")) * rem;
  const share = (box, count, width_) => {
    const gap = parseFloat(getComputedStyle(box).columnGap);
    const fit = Math.max(1, Math.floor((box.clientWidth + gap) / (width_ + gap)));
    const wanted_ = count ? `repeat(${Math.ceil(count / Math.ceil(count / fit))}, minmax(0, 1fr))` : "";
    if (box.style.gridTemplateColumns !== wanted_) box.style.gridTemplateColumns = wanted_;
  };
  share($("map"), $("map").matches(".many, .flat") ? 0 : $("map").querySelectorAll(".socket:not(.whole)").length, 26 * rem);
  for (const box of $("map").querySelectorAll(".nodes")) share(box, box.childElementCount, least);
}
let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width === width) return;
  width = contentRect.width;
  balance();
}).observe($("map"));

/** NUMA nodes by the sockets their CPUs are on: a socket may have many, a node several sockets. */
function sockets() {
  const made = new Map();
  for (const node of known.topology.numaNodes) {
    const ids = new Set(parseList(node.cpus).map((cpu) => cpus.get(cpu)?.socket));
    const key = [...ids].sort((a, b) => a - b).join("+");
    if (!made.has(key)) made.set(key, { title: !key ? "Memory only" : key.includes("+") ? `Sockets ${key}` : `Socket ${key}`, nodes: [] });
    made.get(key).nodes.push(node);
  }
  const homeless = [...cpus.values()].filter((info) => info.numaNode === null);
  if (homeless.length) made.set("?", { title: "On no NUMA node", nodes: [], homeless });
  return [...made.values()];
}

function drawSocket({ title, nodes: members, homeless = [] }) {
  const count = members.reduce((n, node) => n + parseList(node.cpus).length, homeless.length);
  return el("section", { class: "socket" },
    el("h3", {}, title, el("span", { class: "quiet" }, [members.length > 1 && plural(members.length, "NUMA node"),
      count && plural(count, "CPU")].filter(Boolean).join(", "))),
    el("div", { class: "nodes" }, members.map(drawNode), homeless.length ? drawCores(homeless) : null));
}

function drawNode(node) {
  const bars = el("div", { class: "bars" });
  const badge = el("span", { class: "badge" });
  const wide = el("button", { type: "button", class: "wide", hidden: true, onclick: () => filterBy(`numa:${node.id} is:misaligned`) });
  const sharing = el("button", { type: "button", class: "plain sharing", hidden: true, onclick: () => filterBy(`numa:${node.id}`, "shared") });
  const use = el("div", { class: "use", hidden: true });
  nodes.set(node.id, { bars, badge, wide, sharing, use, key: "" });
  const infos = parseList(node.cpus).map((cpu) => cpus.get(cpu)).filter(Boolean);
  return el("article", { class: "node", "data-numa": node.id, "aria-label": `NUMA node ${node.id}` },
    el("h4", {}, el("button", { type: "button",  "aria-label": `NUMA node ${node.id}: details`, class: "plain", onclick: () => choose({ numaNode: node.id }, true) },
      `NUMA ${node.id}`), wide, badge),
    bars, use, infos.length ? drawCores(infos) : null, sharing);
}

/** Threads core by core, cores by the L3 they share. */
function drawCores(infos, draw_ = drawCell) {
  const groups = new Map();
  for (const info of infos) {
    if (!groups.has(info.l3)) groups.set(info.l3, new Map());
    const cores = groups.get(info.l3);
    if (!cores.has(info.core)) cores.set(info.core, []);
    cores.get(info.core).push(info);
  }
  const sorted = [...groups].sort((a, b) => (a[0] ?? -1) - (b[0] ?? -1));
  return el("div", { class: "caches" }, sorted.map(([l3, cores]) => counted(cores.size, el("div", { class: "cache" },
    sorted.length > 1 && el("span", { class: "l3", title: `CPUs that share a level 3 cache: group ${l3 ?? "unknown"}` }, `L3 ${l3 ?? "?"}`),
    el("div", { class: "cores" }, [...cores].sort((a, b) => a[0] - b[0]).map(([, threads]) =>
      el("span", { class: `core ${threads[0].type}` }, threads.map(draw_))))))));
}

/** Say to the style sheet how many cores a group has: they share its width. */
function counted(cores, group) {
  group.style.setProperty("--n", cores);
  return group;
}

function drawCell(info) {
  const cell = el("button", { type: "button", class: "cpu", tabindex: -1, "data-cpu": info.cpu },
    el("span", { class: "id" }, `${info.cpu}`), el("span", { class: "letter" }));
  cells.set(info.cpu, cell);
  return cell;
}

/** What a thread wears, [classes, letter]. */
function dressOf(info) {
  const number = info.owners.length ? numbers.get(info.owners[0].id) : undefined;
  const owned = info.state === "exclusive" || info.state === "listed" || info.state === "idle";
  const odd = info.strangers || info.missing;
  const letter = { offline: "✕", reserved: "R", kubelet: "K", idle: number === undefined ? "·" : letters(number).toLowerCase() }[info.state] ??
    (number !== undefined ? letters(number) : info.state === "exclusive" ? "?" : "");
  return [`${info.state}${owned && number !== undefined ? ` ${look(number)}` : ""}${odd ? " wrong" : ""}${info.owners.some(isWide) ? " wide" : ""}`,
    letter + (odd ? "!" : "")];
}

/** The threads of one NUMA node once more, large, for the details: their names stand in the list below. */
const zoomed = (node) => el("div", { class: "zoom large", "aria-hidden": "true" }, drawCores(parseList(node.cpus).map((cpu) => cpus.get(cpu)).filter(Boolean), (info) => {
  const [dress, letter] = dressOf(info);
  return el("span", { class: `cpu ${dress}`, title: words(info) }, el("span", { class: "id" }, `${info.cpu}`), el("span", { class: "letter" }, letter));
}));

/** Dress every thread that changed. */
function drawCells() {
  for (const [cpu, cell] of cells) {
    const info = cpus.get(cpu);
    if (!info) continue;
    const [dress, letter] = dressOf(info);
    const label = harmless(`CPU ${cpu}: ${words(info)}`);
    if (cell.dataset.dress !== dress) {
      for (const old of (cell.dataset.dress || "").split(" ")) if (old) cell.classList.remove(old);
      cell.classList.add(...dress.split(" "));
      cell.dataset.dress = dress;
    }
    if (cell.lastChild.textContent !== letter) cell.lastChild.textContent = letter;
    if (cell.dataset.label !== label) {
      cell.dataset.label = label;
      cell.setAttribute("aria-label", label);
    }
  }
  mark();
}

/** A bar: what is allocated, what is otherwise gone, and what is free of a total. */
function bar(label, free, full, total, taken, rest = 0) {
  const track = el("div", { class: "track" });
  for (const [kind, amount] of [["taken", taken], ["rest", rest]]) {
    const part = el("span", { class: kind });
    part.style.width = `${total > 0 ? Math.min(100, Math.max(0, (100 * amount) / total)) : 0}%`;
    track.append(part);
  }
  return el("div", { class: "bar", role: "img", "aria-label": `${label}: ${full}`, title: `${label}: ${full}` },
    el("span", {}, label), track, el("span", { class: "free" }, free, el("span", { class: "word" }, " free")));
}

function drawBars(use) {
  const node = nodes.get(use.id);
  if (!node) return;
  const key = JSON.stringify(use);
  if (node.key === key) return;
  node.key = key;
  const made = [];
  if (use.cpus) {
    const left = Math.max(0, use.cpuFreeMilli);
    made.push(bar("CPU", cpuAmount(left), `${cpuAmount(use.cpuAllocatedMilli)} of ${cpuAmount(use.cpuCapacityMilli)} CPUs allocated, ` +
      `${cpuAmount(left)} free, ${use.freeExclusiveCPUs} for exclusive use`, use.cpuCapacityMilli, use.cpuAllocatedMilli, use.cpuCapacityMilli - use.cpuAllocatedMilli - left));
  }
  if (use.memoryBytes) {
    const rest = use.memoryBytes - use.memoryAllocatedBytes - use.memoryFreeBytes;
    made.push(bar("Mem", freeSize(use.memoryFreeBytes), `${size(use.memoryAllocatedBytes)} of ${size(use.memoryBytes)} allocated, ` +
      `${size(rest)} in use by others or withheld, ${freeSize(use.memoryFreeBytes)} free`, use.memoryBytes, use.memoryAllocatedBytes, rest));
  }
  for (const pages of use.hugePages) {
    const name = size(pages.sizeBytes).replace(/ (.)iB$/, "$1");
    const left = pages.totalBytes - pages.allocatedBytes;
    made.push(bar(name, freeSize(left), `${size(pages.allocatedBytes)} of ${size(pages.totalBytes)} in huge pages of ` +
      `${size(pages.sizeBytes)} allocated, ${freeSize(left)} free`, pages.totalBytes, pages.allocatedBytes));
  }
  if (!use.cpus) {
    // Memory tiers are let in by configuration; nothing is free on one that is not.
    made.push(el("p", { class: "quiet" }, use.memoryFreeBytes || use.memoryAllocatedBytes ? "memory only" : "memory only, for lists (numamem)"));
  }
  if (use.capacityFactor !== 1) {
    made.push(el("p", { class: "factor" }, use.capacityFactor === 0 && "drained: ", el("span", { class: "word" }, "capacity "), `factor ${use.capacityFactor}`));
  }
  node.bars.replaceChildren(...made);
}

function showUse() {
  if (known.use) drawUse(known.use, new Map([...nodes].map(([id, { use }]) => [id, use])), cells, size);
}

/** Ask what is really used; an agent that does not tell is none the worse. */
async function askUse() {
  if (document.hidden || link.lost || !known.status || !$("login").hidden) return;
  try {
    known.use = await get("v1/use");
    showUse();
    updateDetails();
  } catch { /* the link tells by itself when it is lost */ }
}
setInterval(askUse, 5000);

/** Write at each NUMA node how many containers are misaligned, and which share its CPUs. */
function drawPinned() {
  const counts = new Map(), sharers = new Map();
  for (const c of known.assignments.containers) {
    for (const id of parseList(c.numaNodes)) {
      if (isWide(c)) counts.set(id, (counts.get(id) || 0) + 1);
      if (c.kind === "shared") sharers.set(id, [...sharers.get(id) || [], c]);
    }
  }
  for (const [id, { wide, sharing }] of nodes) {
    const n = counts.get(id) || 0, some_ = sharers.get(id) || [];
    sharing.hidden = !some_.length;
    sharing.title = `Pinned to this NUMA node, sharing its CPUs: ${some(some_)}`;
    setText(sharing, `${some_.length.toLocaleString("en")} sharing: ${some_.slice(0, 3).map((c) => c.pod).join(", ")}${some_.length > 3 ? ", …" : ""}`);
    wide.hidden = !n;
    setText(wide, n ? `${n.toLocaleString("en")} misaligned` : "");
    wide.title = `${plural(n, "container")} misaligned, on this and other NUMA nodes`;
  }
}

function drawDistances() {
  const list = known.topology.numaNodes;
  $("distances").hidden = list.length < 2;
  const table = el("table", { class: "grid distances" });
  if (list.length <= 16) {
    const far = [...new Set(list.flatMap((n) => n.distances))].sort((a, b) => a - b);
    const shade = (d) => `d${Math.round((4 * far.indexOf(d)) / Math.max(1, far.length - 1))}`;
    table.append(el("tr", {}, el("td"), list.map((n) => el("th", { scope: "col" }, `${n.id}`))), ...list.map((node) =>
      el("tr", {}, el("th", { scope: "row" }, `${node.id}`), node.distances.map((d) => el("td", { class: shade(d) }, `${d}`)))));
  } else {
    table.append(el("tr", {}, el("th", { scope: "col" }, "NUMA node"), el("th", { scope: "col" }, "distance: NUMA nodes, from near to far")));
    for (const node of list) {
      table.append(el("tr", {}, el("th", { scope: "row" }, `${node.id}`), el("td", { class: "far" }, near(node).join(" · "))));
    }
  }
  $("distances").querySelector("div").replaceChildren(table);
}

/** Cards, GPUs and disks: one row for each kind on each NUMA node, as `nri-numa topology` has them. */
function drawDevices() {
  const devices = known.topology.devices ?? [];
  $("devices").hidden = !devices.length;
  const groups = new Map();
  const place = (d) => d.numaNode ?? Infinity;
  for (const one of [...devices].sort((a, b) => a.kind.localeCompare(b.kind) || place(a) - place(b))) {
    const key = `${one.kind} ${one.numaNode}`;
    groups.set(key, [...(groups.get(key) || []), one]);
  }
  const head = ["device", "NUMA node", "count", "PCI addresses"].map((text) => el("th", { scope: "col" }, text));
  $("devices").querySelector("div").replaceChildren(el("table", { class: "grid" }, el("tr", {}, head),
    [...groups.values()].map((list) => el("tr", {}, el("th", { scope: "row" }, list[0].kind),
      el("td", { class: "far" }, list[0].numaNode === null ? "unknown" : `${list[0].numaNode}`),
      el("td", {}, `${list.length}`),
      el("td", { class: "far" }, list.map((d) => d.address).join(" "))))));
}

/** Who is how far: ["10: 0", "12: 1-3", …]. */
function near(node) {
  const by = new Map();
  known.topology.numaNodes.forEach((other, i) => by.set(node.distances[i], [...(by.get(node.distances[i]) || []), other.id]));
  return [...by].sort((a, b) => a[0] - b[0]).map(([d, ids]) => `${d}: ${formatList(ids)}`);
}

// --- the table ------------------------------------------------------------------------------------

const STEP = 100; // rows that are added when the last one comes into sight
const first = (list) => (list ? parseInt(list, 10) : -1);
/** The CPUs that a container has, by us or by another program; empty where it is not pinned. */
const cpusOf = (c) => c.cpus || c.foreignCPUs || "";
/** Whether a container can run on a CPU of the pool, as far as is known. */
const runsOn = (c, cpu) => (c.actual ? parseList(c.actual.cpus) : cpusOf(c) ? parseList(cpusOf(c)) : [cpu]).includes(cpu);
const COLUMNS = [
  { name: "Pod", by: (c) => [c.pod, c.namespace], text: (c) => c.pod },
  { name: "Namespace", by: (c) => [c.namespace, c.pod], text: (c) => c.namespace },
  { name: "Container", by: (c) => [c.container, c.namespace, c.pod], text: (c) => c.container },
  { name: "Kind", by: (c) => [c.kind, c.aligned ? 1 : 0], text: (c) => c.kind },
  { name: "CPUs", by: (c) => [cpusOf(c) ? parseList(cpusOf(c)).length : Infinity],
    text: (c) => (cpusOf(c) ? `${parseList(cpusOf(c)).length}` : "any") },
  { name: "CPU list", by: (c) => [first(cpusOf(c))], text: (c) => cpusOf(c) || "any" },
  { name: "Mems", by: (c) => [first(c.mems)], text: (c) => `${c.mems || "any"}${c.migration ? " \u2192" : ""}` },
  { name: "Policy", by: (c) => [c.policy], text: (c) => c.policy },
  { name: "Age", by: (c) => [-c.assignedAt], text: (c) => age(c.assignedAt) },
];

function compare(a, b) {
  for (let i = 0; i < a.length; i++) {
    const order_ = typeof a[i] === "number" ? (a[i] === b[i] ? 0 : a[i] - b[i]) : collator.compare(a[i], b[i]);
    if (order_) return order_;
  }
  return 0;
}

/** By old search term, the one that replaced it. Deleted with the first release. */
const NEW_TERM_OF = { "is:wider": "is:misaligned", "is:differs": "is:drifted" };

const searchTerms = () => $("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);

/** Why no container matches: an old search term, or nothing more to say. */
function noMatchText() {
  const old = searchTerms().find((term) => Object.hasOwn(NEW_TERM_OF, term));
  return old ? `${old} is gone, expected ${NEW_TERM_OF[old]}.` : "No container matches.";
}

/** Containers that the filter lets through, in the order that was chosen. */
function wanted() {
  const terms = searchTerms();
  const tests = terms.map((term) => {
    const [, key, value] = term.match(/^(cpu|numa):(\d+)$/) || [];
    if (term === "is:drifted") return (c) => Boolean(c.actual);
    if (term === "is:misaligned") return isWide;
    if (key === "cpu") return (c) => runsOn(c, Number(value));
    if (key === "numa") return (c) => parseList(c.numaNodes).includes(Number(value));
    return (c) => `${c.namespace}/${c.pod}/${c.container} ${c.kind} ${c.policy} ${c.qos} ${c.id}`.toLowerCase().includes(term);
  });
  const column = COLUMNS.find((one) => one.name === view.sort);
  // Equal ones by namespace, pod, container and id, so that the order is always the same.
  const keyed = known.assignments.containers
    .filter((c) => (!view.kind || c.kind === view.kind) && tests.every((test) => test(c)))
    .map((c) => [column.by(c), [c.namespace, c.pod, c.container, c.id], c]);
  keyed.sort((a, b) => (view.down ? -1 : 1) * compare(a[0], b[0]) || compare(a[1], b[1]));
  return keyed.map(([, , c]) => c);
}

function drawContainers() {
  const all = known.assignments.containers;
  const found = wanted();
  view.rows = Math.max(view.rows, STEP);
  drawHead();
  const same = folded(found);
  drawKinds(all);
  const body = $("list").tBodies[0];
  const focused = body.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.id : "";
  // A row stays as it is while its container does: focus and selected text survive.
  const old = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const rows = found.slice(0, view.rows).map((c) => drawRow(c, old.get(c.id)));
  arrange(body, rows);
  for (const row of [$("list").tHead.rows[0], ...rows]) {
    for (const cell of row.cells) cell.hidden = same.has(cell.dataset.name || cell.dataset.label);
  }
  setText($("same"), same.size ? `All of these: ${[...same].map(([name, value]) => `${name[0].toLowerCase()}${name.slice(1)} ${value || "none"}`).join(" · ")}` : "");
  const current = (focused && rows.find((row) => row.dataset.id === focused)) || rows[0];
  for (const stop of body.querySelectorAll('[tabindex="0"]')) stop.tabIndex = -1;
  const button = current?.querySelector("button");
  if (button) button.tabIndex = 0;
  if (focused && document.activeElement !== button) button?.focus({ preventScroll: true });
  $("list").setAttribute("aria-rowcount", found.length + 1);
  const shown = rows.length < found.length ? `${plural(rows.length, "container")} of ${found.length.toLocaleString("en")} shown; scroll for more.`
    : found.length ? "" : all.length ? noMatchText() : "No container runs on this node.";
  setText($("more"), shown);
  setText($("containers-title"), `Containers (${found.length === all.length ? "" : `${found.length.toLocaleString("en")} of `}${all.length.toLocaleString("en")})`);
}

/** Columns in which every container says the same, with what it says: one line says it for all. */
function folded(found) {
  const same = new Map();
  if (found.length < 2 || found.some((c) => c.actual)) return same;
  for (const { name, text } of COLUMNS) {
    const value = text(found[0]);
    if (!["Pod", "Age"].includes(name) && found.every((c) => text(c) === value && !(name === "Kind" && badges(c).length))) same.set(name, value);
  }
  return same;
}

/** Give an element these children; those that stay where they are cost nothing. */
function arrange(parent, children) {
  const staying = new Set(children);
  for (const child of [...parent.children]) if (!staying.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const child of children) {
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
}

function drawHead() {
  const head = $("list").tHead;
  if (!head.rows.length) {
    head.append(el("tr", {}, COLUMNS.map(({ name }) => el("th", { scope: "col", "data-name": name },
      el("button", { type: "button", class: "plain", onclick: () => sortBy(name) }, name)))));
    $("sort").append(...COLUMNS.map(({ name }) => el("option", {}, name)));
  }
  for (const cell of head.rows[0].cells) {
    const mine = cell.dataset.name === view.sort;
    if (mine) cell.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  }
  $("sort").value = view.sort;
}

function sortBy(name, turn = true) {
  view.down = turn && view.sort === name ? !view.down : false;
  view.sort = name;
  startOver();
}

/** Show the table from its beginning: another order, or other containers. */
function startOver() {
  view.rows = STEP;
  document.querySelector("#containers .rows").scrollTop = 0;
  drawContainers();
}

const KINDS = ["exclusive", "listed", "shared", "unpinned", "foreign", "kubelet"];

function drawKinds(all) {
  const counts = new Map([["", all.length], ...KINDS.map((kind) => [kind, 0])]);
  for (const c of all) counts.set(c.kind, (counts.get(c.kind) || 0) + 1);
  for (const [kind, n] of counts) if (!n && kind && kind !== view.kind) counts.delete(kind);
  const key = JSON.stringify([...counts, view.kind]);
  if (drawn.kinds === key) return;
  drawn.kinds = key;
  const focused = document.activeElement?.dataset?.kind;
  $("kinds").replaceChildren(...[...counts].map(([kind, n]) => el("button", { type: "button", class: "chip", "data-kind": kind,
    "aria-pressed": String(view.kind === kind), onclick: () => { view.kind = kind; startOver(); } },
  `${kind || "all"} `, el("b", {}, n.toLocaleString("en")))));
  if (focused !== undefined) $("kinds").querySelector(`[data-kind="${CSS.escape(focused)}"]`)?.focus();
}

function drawRow(c, old) {
  const number = numbers.get(c.id);
  const key = JSON.stringify([c.kind, cpusOf(c), c.mems, c.migration, c.policy, c.aligned, c.reserved, number, c.actual]);
  const is = isChosen(c);
  if (old && old.dataset.key === key) {
    setText(old.lastElementChild.firstChild, age(c.assignedAt));
    if (old.classList.contains("chosen") !== is) old.classList.toggle("chosen", is);
    return old;
  }
  return el("tr", { "data-id": c.id, "data-key": key, class: is ? "chosen" : "" }, COLUMNS.map(({ name, text }) => {
    const real = name === "CPU list" && c.actual?.desiredCPUs ? [c.actual.desiredCPUs, c.actual.cpus]
      : name === "Mems" && c.actual?.desiredMems ? [c.actual.desiredMems, c.actual.mems] : null;
    if (real) {
      const shown = `desired ${real[0]}, actual ${real[1] || "none"}`;
      return el("td", { "data-label": name, class: "both", title: `${shown}${disturbs(c.actual)}` }, el("span", { class: "differs" }, "! "), shown);
    }
    const value = text(c);
    const content = name === "Pod" ? el("button", { type: "button", class: "plain", tabindex: -1 }, foreign(value)) : foreign(value);
    return el(name === "Pod" ? "th" : "td", { "data-label": name, title: value, scope: name === "Pod" && "row" },
      name === "Pod" && el("span", { class: `cpu key ${number === undefined ? "none" : `${c.kind === "listed" ? "listed" : "exclusive"} ${look(number)}`}`,
        "aria-hidden": "true" }, number === undefined ? "" : letters(number)),
      content, name === "Kind" && badges(c).flatMap((badge) => [" ", badge]));
  }));
}

/** What a message says without the pod that it says it to: that is the same for all replicas. */
const gist = (r) => r.message.replace(`pod ${r.namespace}/${r.pod}, container ${r.container}: `, "");

/** Refusals that say the same, newest first: [{last, count, pods}]. */
function groups(rejections) {
  const made = new Map();
  for (const r of rejections) {
    const key = JSON.stringify([r.namespace, r.container, r.reason, gist(r), r.observed]);
    if (!made.has(key)) made.set(key, { last: r, count: 0, pods: new Set() });
    const group = made.get(key);
    group.count += r.count;
    group.pods.add(r.pod);
  }
  return [...made.values()];
}

function drawRejections() {
  setText($("refused-title"), known.status.observe ? "Recently would have been rejected" : "Recent rejections");
  document.body.classList.toggle("refusing", known.rejections.length > 0);
  const list = groups(known.rejections).slice(0, 100);
  $("refused").hidden = !list.length;
  const key = JSON.stringify([list, Math.floor(Date.now() / 15000)]);
  if (drawn.rejections === key || $("refusals").contains(document.activeElement)) return;
  drawn.rejections = key;
  $("refusals").replaceChildren(...list.map(({ last: r, count, pods }) => el("li", {},
    el("p", {}, remedyOf(r.reason), el("a", { href: addressOf(r), onclick: (event) => {
      event.preventDefault();
      choose({ namespace: r.namespace, pod: r.pod, container: r.container }, true);
    } }, foreign(nameOf(r))),
    pods.size > 1 && el("span", {}, `and ${plural(pods.size - 1, "more pod")}`),
    r.observed && el("span", { class: "observed" }, "would have been rejected"),
    el("span", { class: "quiet", title: new Date(r.lastTime * 1000).toLocaleString() },
      count > 1 ? `×${count.toLocaleString("en")}, last ${age(r.lastTime)} ago` : `${age(r.lastTime)} ago`)),
    el("p", { class: "message" }, foreign(r.message)))));
}

// === Details =====================================================================================

const detail = { key: "", explained: new Map(), used: new Map() };

const isChosen = (c) => Boolean(view.chosen && view.chosen.id === c.id);
const find = (id) => known.assignments.containers.find((c) => c.id === id);

/** A reason, as a link to what can be done about it. */
const remedyOf = (reason) => el("a", { class: "reason", href: `remedies.html#${encodeURIComponent(reason.toLowerCase())}`,
  title: `What ${reason} means, and what to do about it` }, reason);

/** The address of a refusal on this page. */
const addressOf = (c) => `#refused-${[c.namespace, c.pod, c.container].map(encodeURIComponent).join("/")}`;

/** Choose a CPU, a NUMA node or a container: {cpu}, {numaNode}, {id} or {namespace, pod, container}. */
function choose(what, open = false) {
  view.chosen = what;
  detail.explained.clear();
  detail.used.clear();
  detail.key = "";
  keepInSight(document.activeElement, () => document.body.classList.toggle("open", Boolean(what) && open));
  // The details lie over the drawing, on the side where what was chosen is not.
  const c = what?.id && find(what.id);
  const spot = what && (cells.get(c ? first(cpusOf(c)) : what.cpu) || nodes.get(what.numaNode)?.bars);
  document.body.classList.toggle("left", Boolean(spot) && spot.getBoundingClientRect().right > innerWidth / 2);
  const hash = !what ? "" : what.cpu !== undefined ? `#cpu-${what.cpu}` : what.numaNode !== undefined ? `#numa-${what.numaNode}`
    : what.id ? `#container-${what.id}` : addressOf(what);
  history.replaceState(null, "", hash || location.pathname + location.search);
  updateDetails();
  mark();
  for (const row of $("list").tBodies[0].rows) row.classList.toggle("chosen", Boolean(what?.id && row.dataset.id === what.id));
  if (what && open) {
    setText($("said"), `${$("details-title").textContent}: details are shown`);
    $("details").scrollTop = 0;
  }
}

/** Do what moves the rest of the page, and bring back to its place what was clicked or tapped. */
function keepInSight(element, change) {
  const near_ = element && element !== document.body && !$("details").contains(element) ? element : null;
  const here = near_?.closest("tr") ?? near_;
  const before = here?.getBoundingClientRect().top;
  change();
  balance();
  if (!here) return;
  const now = here.getBoundingClientRect();
  // Beside the table the details make it narrower; as a sheet they cover the lower part of the window.
  const sheet = document.body.classList.contains("open") && getComputedStyle($("details")).position === "fixed";
  const room = sheet ? 0.38 * innerHeight : Infinity; // what the sheet leaves when it is full
  scrollBy(0, before + now.height > room ? now.top - Math.max(8, (room - now.height) / 2) : now.top - before);
}

/** A link to this page may name what is to be shown. */
function chooseFromAddress() {
  const [, refused] = location.hash.match(/^#refused-(.+)$/) || [];
  if (refused && !view.chosen) {
    let parts = [];
    try { parts = refused.split("/").map(decodeURIComponent); } catch { /* not an address of ours */ }
    if (parts.length === 3) choose({ namespace: parts[0], pod: parts[1], container: parts[2] }, true);
    return;
  }
  const [, kind, id] = location.hash.match(/^#(cpu|numa|container)-([\w-]+)$/) || [];
  if (view.chosen || !kind) return;
  if (kind === "cpu" && cpus.has(Number(id))) choose({ cpu: Number(id) }, true);
  else if (kind === "numa" && nodes.has(Number(id))) choose({ numaNode: Number(id) }, true);
  else if (kind === "container" && find(id)) choose({ id }, true);
}

/** Outline the CPUs of what is chosen, and say how far the other NUMA nodes are. */
function mark(hovered = null, fade = true) {
  const { chosen } = view;
  for (const row of $("list").tBodies[0].rows) row.classList.toggle("hot", row.dataset.id === hovered?.id);
  const c = hovered || (chosen?.id && find(chosen.id));
  const marked = new Set(c ? [cpusOf(c), c.idleSiblings, c.actual?.desiredCPUs && c.actual.cpus].flatMap((list) => parseList(list || "")) : chosen?.cpu !== undefined ? [chosen.cpu] : []);
  for (const [cpu, cell] of cells) {
    const on = marked.has(cpu);
    if (cell.classList.contains("marked") !== on) cell.classList.toggle("marked", on);
  }
  // Fading the others helps to find a few; for all of a pool it would only be noise.
  $("map").classList.toggle("fade", fade && marked.size > 1 && marked.size < cells.size / 2);
  const from = chosen?.numaNode !== undefined && known.topology.numaNodes.find((n) => n.id === chosen.numaNode);
  const mems = new Set(c && c.mems ? parseList(c.mems) : []);
  known.topology.numaNodes.forEach((node, i) => {
    const shown = nodes.get(node.id);
    const [word, text, rest] = from ? (node === from ? ["chosen", "", ""] : ["distance ", `${from.distances[i]}`, ""])
      : mems.has(node.id) ? ["", "mem", " here"] : ["", "", ""];
    if (shown.badge.title !== word + text + rest) {
      shown.badge.title = word + text + rest;
      shown.badge.replaceChildren(el("span", { class: "word" }, word), text, el("span", { class: "word" }, rest));
    }
    shown.badge.parentElement.parentElement.classList.toggle("chosen", Boolean(from && node === from));
  });
}

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== undefined && value !== null && value !== false)
    .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value instanceof Node ? value : foreign(value))]));
}

function linkTo(c) {
  const number = numbers.get(c.id);
  return el("button", { type: "button", class: "plain", onclick: () => choose({ id: c.id }, true) },
    number !== undefined && el("span", { class: `cpu key ${c.kind === "listed" ? "listed" : "exclusive"} ${look(number)}`, "aria-hidden": "true" }, letters(number)),
    foreign(nameOf(c)));
}

/** Show containers that a filter lets through. */
function filterBy(filter, kind = "") {
  $("filter").value = filter;
  view.kind = kind;
  startOver();
  $("containers").scrollIntoView();
  $("filter").focus({ preventScroll: true });
}

function linksTo(list, filter) {
  const LIMIT = 12;
  return el("ul", { class: "plainlist" }, list.slice(0, LIMIT).map((c) => el("li", {}, linkTo(c))),
    list.length > LIMIT && el("li", {}, el("button", { type: "button", onclick: () => filterBy(filter) }, `all ${list.length.toLocaleString("en")} in the table`)));
}

/** Draw the details again when what they tell of changed. */
function updateDetails() {
  const { chosen } = view;
  const [title, content, key] = !chosen ? aboutNothing() : chosen.cpu !== undefined ? aboutCPU(chosen.cpu)
    : chosen.numaNode !== undefined ? aboutNode(chosen.numaNode) : aboutContainer(chosen);
  $("close").hidden = !chosen;
  const all = JSON.stringify([title, key]);
  for (const one of $("details-body").querySelectorAll("[data-since]")) setText(one, age(Number(one.dataset.since)));
  if (detail.key === all) return;
  detail.key = all;
  setText($("details-title"), title);
  $("details-body").replaceChildren(...content().flat().filter(Boolean));
}

function aboutNothing() {
  return ["Details", () => [], ""];
}

function aboutCPU(cpu) {
  const info = cpus.get(cpu);
  if (!info) return [`CPU ${cpu}`, () => [el("p", {}, "This CPU is gone.")], "gone"];
  const here = info.owners.length || !info.pool ? info.owners
    : known.assignments.containers.filter((c) => runsOn(c, cpu));
  const why = info.owners.length === 1 ? explained(info.owners[0]) : null;
  return [`CPU ${cpu}`, () => [
    facts([["State", words(info)], ["Core", info.core], ["Its threads", info.siblings], ["L3 group", info.l3],
      ["NUMA node", info.numaNode], ["Socket", info.socket], ["Core type", info.type === "standard" ? "" : info.type],
      ["Reserved", info.reserved && info.state !== "reserved" ? "yes" : ""],
      ["Used", known.use?.cpus[cpu] !== undefined && `${known.use.cpus[cpu]} % busy`]]),
    here.length ? el("h3", {}, info.state === "exclusive" ? "Its container" : info.state === "idle" ? "Idle sibling of" :
      `Containers that may run here (${here.length.toLocaleString("en")})`) : info.state === "offline" ? null :
      el("p", { class: "quiet" }, "No container that the agent knows runs here."),
    here.length ? linksTo(here, `cpu:${cpu}`) : null,
    info.strangers && [el("h3", {}, `Can run here and should not (${info.strangers.length.toLocaleString("en")})`), linksTo(info.strangers, `cpu:${cpu} is:drifted`)],
    info.missing && [el("h3", {}, `Should run here and cannot (${info.missing.length.toLocaleString("en")})`), linksTo(info.missing, "is:drifted")],
    why && [el("h3", {}, "Why it is there"), reasons(why)],
  ].flat(), [info, here.map((c) => c.id), why, known.use?.cpus[cpu]]];
}

function aboutNode(id) {
  const node = known.topology.numaNodes.find((n) => n.id === id);
  const use = known.assignments.numaNodes.find((n) => n.id === id);
  if (!node || !use) return [`NUMA node ${id}`, () => [el("p", {}, "This NUMA node is gone.")], "gone"];
  const here = known.assignments.containers.filter((c) => parseList(c.numaNodes).includes(id));
  const load = known.use?.numaNodes.find((n) => n.id === id);
  const used = load ? nodeWords(load, size) : "";
  return [`NUMA node ${id}`, () => [
    facts([["CPUs", node.cpus || "none"], ["Exclusive", use.exclusive], ["Idle siblings", use.idleSiblings], ["Shared pool", use.shared], ["Reserved", use.reserved],
      ["CPU", node.cpus && `${cpuAmount(use.cpuAllocatedMilli)} of ${cpuAmount(use.cpuCapacityMilli)} allocated, ${cpuAmount(use.cpuFreeMilli)} free, ${use.freeExclusiveCPUs} for exclusive use`],
      ["Memory", `${size(use.memoryAllocatedBytes)} of ${size(use.memoryBytes)} allocated, ${freeSize(use.memoryFreeBytes)} free`],
      ...use.hugePages.map((p) => [`${size(p.sizeBytes)} pages`, `${size(p.allocatedBytes)} of ${size(p.totalBytes)} allocated`]),
      ["Used", used],
      ["Capacity factor", String(use.capacityFactor)],
      ["Distances", el("span", {}, near(node).map((text) => el("span", { class: "line" }, text)))]]),
    node.cpus && zoomed(node),
    el("h3", {}, `Containers pinned to it (${here.length.toLocaleString("en")})`),
    here.length ? linksTo(here, `numa:${id}`) : el("p", { class: "quiet" }, "None."),
  ], [node, use, here.map((c) => [c.id, c.cpus]), used]];
}

function aboutContainer(what) {
  const c = what.id ? find(what.id) : what;
  const last = detail.last?.what === what ? detail.last.c : null;
  if (c) detail.last = { what, c };
  if (!c && !last) return ["Container", () => [el("p", {}, "This container is gone.")], "gone"];
  const shown = c || last;
  const why = explained(shown);
  const a = c && what.id ? c : null;
  const path = explainPath(shown);
  return [nameOf(shown), () => [
    !c && el("p", { class: "problem" }, "It is gone; this is what was last known."),
    a?.actual && el("p", { class: "problem", id: "differs" }, `! Drift: ${a.actual.text} since `,
      el("span", { "data-since": a.actual.observedAt }, age(a.actual.observedAt)), foreign(disturbs(a.actual))),
    a && facts([["CPUs", a.cpus ? `${a.cpus} (${parseList(a.cpus).length})` : a.foreignCPUs ? `${a.foreignCPUs} (pinned by ${a.kind === "kubelet" ? "the kubelet" : "another program"})` : "any"], ["Memory nodes", a.mems || "any"],
      ["Memory migrates", a.migration],
      ["Memory policy", a.mempolicy], ["NUMA nodes", a.numaNodes],
      ["Idle siblings", a.idleSiblings], ["Kind", a.kind], ["Policy", a.policy], ["QoS class", a.qos],
      ["Threads", a.kind === "exclusive" ? a.smt : ""],
      ["Allocated", `${cpuAmount(a.cpuMilli)} CPUs, ${size(a.memoryBytes)}`],
      ["Placement", a.aligned ? "" : a.kind === "unpinned" ? "requested, but the container is unpinned" : "misaligned: more NUMA nodes than preferred"],
      ["Became reserved", a.reserved],
      ["Memory", a.memory && (a.memory.problem ? `location unknown: ${a.memory.problem}` : `${a.memory.localPercent} % on its own NUMA nodes`)],
      ["CPU pressure", a.cpuPressure && waitsOf(a.cpuPressure)],
      ["Since", a.assignedAt ? new Date(a.assignedAt * 1000).toLocaleString() : ""], ["Id", a.id.slice(0, 12)]]),
    a && [el("h3", {}, "Actual usage"), ...usedBy(a)],
    el("h3", {}, why.rejection ? (why.rejection.observed ? "Why it would have been rejected" : "Why it was rejected") : "Why"), reasons(why),
    el("p", { class: "quiet foot" }, "As a document: ", el("a", { href: path }, path)),
  ].flat(), [shown, Boolean(c), why, detail.used.get(shown.id)]];
}

/** What is known of how much it waits for CPUs; what is not known is said, and is no zero. */
const waitsOf = (w) => [
  w.pressurePercent === null ? null : `${w.pressurePercent} % of the last minute`,
  w.waitingTasks === null ? null : `${plural(w.waitingTasks, "task")} on average`,
  w.problem && `unknown: ${w.problem}`].filter(Boolean).join("; ");

/** What a container uses is measured on request: that takes the agent half a second. */
function usedBy(c) {
  const found = detail.used.get(c.id);
  const again = el("button", { type: "button", id: "measure", disabled: found === "waiting", onclick: () => measure(c) }, found ? "Measure again" : "Measure now");
  if (!found) return [again];
  if (found === "waiting") return [el("p", { class: "quiet" }, "Measuring…"), again];
  const memory_ = Object.entries(found.memoryByNUMANode || {}).filter(([, bytes]) => bytes);
  return [found.problem && el("p", { class: "problem" }, `Not measured: ${found.problem}`), facts([
    ["CPU", found.cpuMilli !== null && found.cpuMilli !== undefined && `${cpuAmount(found.cpuMilli)} of ${cpuAmount(found.cpuSetMilli)} CPUs, ${Math.round((100 * found.cpuMilli) / Math.max(1, found.cpuSetMilli))} %`],
    ["Memory", memory_.map(([id, bytes]) => `${size(bytes)} on NUMA ${id}`).join(", ")],
    ["Local", found.localPercent !== null && found.localPercent !== undefined && `${found.localPercent} % on its own NUMA nodes`]]), again];
}

function measure(c) {
  const inside = document.activeElement?.id === "measure";
  detail.used.set(c.id, "waiting");
  updateDetails();
  get(["v1/use", ...[c.namespace, c.pod, c.container].map(encodeURIComponent)].join("/")).then((answer) => answer.containers[0])
    .catch((error) => ({ problem: error.message }))
    .then((found) => {
      if (detail.used.get(c.id) !== "waiting") return;
      detail.used.set(c.id, found);
      updateDetails();
      if (inside) $("measure")?.focus();
    });
}

const explainPath = (c) => ["v1/explain", ...[c.namespace, c.pod, c.container].map(encodeURIComponent)].join("/");

/** What the agent says about a container: at once when it was asked, else as soon as it answers. */
function explained(c) {
  const key = JSON.stringify([c.id, c.namespace, c.pod, c.container, cpusOf(c), c.mems, c.kind, c.actual]);
  const known_ = detail.explained.get(key);
  if (known_) return known_;
  const waiting = { waiting: true, summary: c.reason || "" };
  detail.explained.set(key, waiting);
  get(explainPath(c)).then((answer) => {
    const list = answer.explanations;
    return list.find((one) => c.id ? one.assignment?.id === c.id : one.outcome === "rejected") || list[0];
  }).catch((error) => {
    if (error instanceof Unauthorized) failed(error);
    return { summary: c.reason || "", problem: error instanceof Unauthorized ? "the agent requires a token" : error.message };
  }).then((found) => {
    if (detail.explained.get(key) !== waiting) return; // something else was chosen meanwhile
    detail.explained.set(key, found);
    updateDetails();
  });
  return waiting;
}

function reasons(why) {
  return [
    why.rejection && el("p", {}, remedyOf(why.rejection.reason), why.rejection.observed && "would have been rejected: the agent only observes"),
    why.summary && el("p", { class: "summary" }, foreign(why.summary)),
    why.waiting && el("p", { class: "quiet" }, "Asking the agent…"),
    why.problem && el("p", { class: "problem" }, `No explanation: ${why.problem}`),
    why.decisionSteps?.length ? el("ol", { class: "steps" }, why.decisionSteps.map((step) => el("li", {}, foreign(step))))
      : why.decisionSteps && el("p", { class: "quiet" }, "No steps are recorded: it requested no placement, or it was placed before the agent started."),
  ].filter(Boolean);
}

// === Hands =======================================================================================

/** Move the one tab stop of the drawing. */
function moveTo(cell) {
  for (const other of order) if (other.tabIndex === 0) other.tabIndex = -1;
  cell.tabIndex = 0;
  cell.focus();
}

/** The nearest thread in the row below or above. */
function vertical(cell, down) {
  const from = cell.getBoundingClientRect();
  let best = null, cost = Infinity;
  for (const other of order) {
    const to = other.getBoundingClientRect();
    const dy = down ? to.top - from.top : from.top - to.top;
    const c = dy * 3 + Math.abs(to.left - from.left);
    if (dy > 2 && c < cost) [best, cost] = [other, c];
  }
  return best;
}

$("map").addEventListener("keydown", (event) => {
  const cell = event.target.closest("[data-cpu]");
  if (!cell) return;
  const at = order.indexOf(cell);
  const to = { ArrowRight: () => order[at + 1], ArrowLeft: () => order[at - 1], Home: () => order[0], End: () => order[order.length - 1],
    ArrowDown: () => vertical(cell, true), ArrowUp: () => vertical(cell, false) }[event.key];
  if (!to) return;
  event.preventDefault();
  const next = to();
  if (next) moveTo(next);
});
$("map").addEventListener("click", (event) => {
  const cell = event.target.closest("[data-cpu]");
  if (!cell) return;
  moveTo(cell);
  tip(null);
  choose({ cpu: Number(cell.dataset.cpu) }, true);
});

function tip(cell) {
  const box = $("tip");
  box.hidden = !cell;
  if (!cell) return;
  const info = cpus.get(Number(cell.dataset.cpu));
  const place = [info.core !== undefined && `core ${info.core}`, info.l3 !== undefined && `L3 ${info.l3}`, typeof info.numaNode === "number" && `NUMA ${info.numaNode}`,
    info.socket !== undefined && `socket ${info.socket}`, info.type === "efficient" && "efficient core"].filter(Boolean).join(" · ");
  box.replaceChildren(el("b", {}, `CPU ${info.cpu}`), el("span", { class: "quiet" }, place), el("span", {}, foreign(words(info))));
  const at = cell.getBoundingClientRect();
  const room = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left, document.documentElement.clientWidth - room.width - 8))}px`;
  box.style.top = `${at.bottom + room.height + 8 > innerHeight ? at.top - room.height - 6 : at.bottom + 6}px`;
}

for (const [on, off] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
  $("map").addEventListener(on, (event) => {
    const cell = event.target.closest("[data-cpu]");
    if (!cell || event.pointerType === "touch" || (on === "focusin" && !cell.matches(":focus-visible"))) return;
    tip(cell);
    mark(cpus.get(Number(cell.dataset.cpu)).owners[0], false);
  });
  $("map").addEventListener(off, () => { tip(null); if (known.topology) mark(); });
}
addEventListener("scroll", () => { $("tip").hidden = true; }, { passive: true });

const body = $("list").tBodies[0];
body.addEventListener("click", (event) => {
  const row = event.target.closest("tr");
  // A click that ends a selection of text is for copying.
  if (!row || String(getSelection())) return;
  row.querySelector("button").focus({ preventScroll: true });
  choose({ id: row.dataset.id }, true);
});
body.addEventListener("keydown", (event) => {
  const row = event.target.closest("tr");
  const to = { ArrowDown: () => row.nextElementSibling, ArrowUp: () => row.previousElementSibling,
    Home: () => body.firstElementChild, End: () => body.lastElementChild }[event.key];
  if (!row || !to) return;
  event.preventDefault();
  if (event.key === "ArrowDown" && !row.nextElementSibling) more();
  const button = to()?.querySelector("button");
  if (!button) return;
  event.target.tabIndex = -1;
  button.tabIndex = 0;
  button.focus();
});
for (const [on, off] of [["pointerover", "pointerleave"], ["focusin", "focusout"]]) {
  body.addEventListener(on, (event) => {
    const row = event.target.closest("tr");
    if (row) mark(find(row.dataset.id));
  });
  $("list").addEventListener(off, () => { if (known.topology) mark(); });
}

/** More rows, once the end of those that are drawn is near. */
function more() {
  if (!known.assignments || view.rows >= known.assignments.containers.length) return;
  view.rows += STEP;
  drawContainers();
}
// On a telephone the table scrolls with the page.
addEventListener("scroll", () => {
  if ($("more").textContent && $("more").getBoundingClientRect().top < innerHeight + 400) more();
}, { passive: true });
document.querySelector("#containers .rows").addEventListener("scroll", (event) => {
  const box = event.currentTarget;
  if (box.scrollTop + box.clientHeight > box.scrollHeight - 400) more();
}, { passive: true });
addEventListener("beforeprint", () => {
  view.rows = Infinity;
  if (known.assignments) drawContainers();
});

$("filter").addEventListener("input", () => { if (known.assignments) startOver(); });
$("sort").addEventListener("change", () => sortBy($("sort").value, false));
$("density").addEventListener("change", () => {
  memory.set(forGood, "density", $("density").value === "auto" ? "" : $("density").value);
  setDensity();
});
$("keep").addEventListener("click", () => {
  const name = known.status?.nodeName || location.hostname;
  keep(`${name.replace(/[^\w.-]/g, "_")}.svg`, pictureOf($("map"), `${name}: who has which CPUs`));
});
$("close").addEventListener("click", close);
document.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });

function close() {
  const { chosen } = view;
  const inside = $("details").contains(document.activeElement);
  if (!chosen) return;
  choose(null);
  // Focus goes back to what was asked about.
  if (inside) {
    const row = chosen.id && body.querySelector(`tr[data-id="${CSS.escape(chosen.id)}"] button`);
    (cells.get(chosen.cpu) || row || $("map").querySelector('[tabindex="0"]'))?.focus();
  }
}

// === Start =======================================================================================

setText($("address"), location.host);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  if (link.lost) wake();
  else if (known.status) refresh();
});
addEventListener("online", () => wake());
// A page that the browser keeps for "back" would keep its stream, and six of them are all that a browser opens.
addEventListener("pagehide", () => stream?.abort());
addEventListener("pageshow", (event) => { if (event.persisted) wake(); });
// What the kernel has free changes without an event, and ages grow.
setInterval(() => { if (!document.hidden && !link.lost && known.status && $("login").hidden) refresh(); }, 15000);
run();
