// Draws sockets, NUMA nodes, L3 groups, cores and threads, and colours every thread by its owner.
// The skeleton is made once per topology; a change of state only touches threads that changed.

import { bar, cpus, el, formatList, parseList, size } from "./format.js";

// Okabe and Ito's colours stay apart for colour-blind eyes; with three fills each and a letter,
// neighbours stay apart without any colour too.
const COLOURS = 7;
const FILLS = 3;

export const STATES = [
  ["shared", "shared pool"],
  ["reserved", "reserved, shared pool"],
  ["own o0", "owned (a colour and a letter for each owner)"],
  ["listed", "named by an explicit list"],
  ["idle", "kept idle beside its owner"],
  ["unused", "reserved, used by nobody"],
  ["offline", "offline"],
];

export class Machine {
  constructor(root, choose) {
    this.root = root;
    this.choose = choose; // called with {cpu} or {numaNode}
    this.cells = new Map();
    this.bars = new Map();
    this.shown = new Map();
    this.letters = new Map();
    this.current = null;
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-cpu]");
      if (cell) this.focus(Number(cell.dataset.cpu), true);
    });
  }

  /** Make the skeleton. */
  build(topology) {
    this.topology = topology;
    this.cells.clear();
    this.bars.clear();
    this.shown.clear();
    this.cpuInfo = new Map();
    const l3Of = new Map();
    for (const group of topology.l3Groups) for (const cpu of parseList(group.cpus)) l3Of.set(cpu, group.id);
    for (const core of topology.cores) {
      for (const cpu of parseList(core.cpus)) {
        this.cpuInfo.set(cpu, { cpu, core: core.id, siblings: core.cpus, socket: core.socket,
          numaNode: core.numaNode, l3: l3Of.get(cpu), kind: core.kind });
      }
    }
    const count = this.cpuInfo.size;
    this.root.className = count > 512 ? "tiny" : count > 128 ? "small" : "";
    this.root.replaceChildren(...this.groups().map((group) => this.drawGroup(group)));
    const offline = parseList(topology.cpus.offline);
    if (offline.length) {
      const box = el("div", { class: "cores" });
      for (const cpu of offline) box.append(this.cell(cpu, "offline"));
      this.root.append(el("section", { class: "socket" }, el("h3", {}, "Offline"), box));
    }
    const first = this.cells.values().next().value;
    if (first) first.tabIndex = 0;
  }

  /** NUMA nodes by the sockets their CPUs are on: a socket may have many, a node several sockets. */
  groups() {
    const made = new Map();
    for (const node of this.topology.numaNodes) {
      const ids = new Set(parseList(node.cpus).map((cpu) => this.cpuInfo.get(cpu)?.socket));
      const key = [...ids].sort((a, b) => a - b).join("+");
      if (!made.has(key)) made.set(key, { key, nodes: [] });
      made.get(key).nodes.push(node);
    }
    const homeless = [...this.cpuInfo.values()].filter((info) => info.numaNode === null);
    if (homeless.length) made.set("?", { key: "?", nodes: [], homeless });
    return [...made.values()];
  }

  drawGroup({ key, nodes, homeless }) {
    const title = key === "" ? "Memory only" : key === "?" ? "No NUMA node" :
      key.includes("+") ? `Sockets ${key}` : `Socket ${key}`;
    const section = el("section", { class: "socket" }, el("h3", {}, title));
    const box = el("div", { class: "nodes" });
    for (const node of nodes) box.append(this.drawNode(node));
    if (homeless) box.append(this.drawCores(homeless.map((info) => info.cpu)));
    section.append(box);
    return section;
  }

  drawNode(node) {
    const bars = el("div", { class: "bars" });
    this.bars.set(node.id, bars);
    const ids = parseList(node.cpus);
    return el("article", { class: "node", "data-numa": node.id },
      el("h4", {}, el("button", { type: "button", class: "plain",
        onclick: () => this.choose({ numaNode: node.id }) }, `NUMA node ${node.id}`),
      el("span", { class: "quiet" }, ids.length ? `${ids.length} CPUs` : "no CPUs")),
      bars, ids.length ? this.drawCores(ids) : null);
  }

  /** Threads of a NUMA node, core by core, L3 group by L3 group. */
  drawCores(ids) {
    const groups = new Map();
    for (const id of ids) {
      const info = this.cpuInfo.get(id);
      if (!groups.has(info.l3)) groups.set(info.l3, new Map());
      const cores = groups.get(info.l3);
      if (!cores.has(info.core)) cores.set(info.core, []);
      cores.get(info.core).push(info);
    }
    const box = el("div", { class: "caches" });
    for (const [l3, cores] of [...groups].sort((a, b) => (a[0] ?? -1) - (b[0] ?? -1))) {
      const cache = el("div", { class: "cores", title: l3 === undefined ? "" : `L3 group ${l3}` });
      for (const [core, threads] of [...cores].sort((a, b) => a[0] - b[0])) {
        const box_ = el("span", { class: "core", title: `core ${core}` });
        for (const thread of threads) box_.append(this.cell(thread.cpu, "shared"));
        cache.append(box_);
      }
      box.append(cache);
    }
    return box;
  }

  cell(cpu, state) {
    const cell = el("button", { type: "button", class: `cpu ${state}`, tabindex: -1,
      "data-cpu": cpu, "aria-label": `CPU ${cpu}: ${state}` }, this.label(cpu, ""));
    this.cells.set(cpu, cell);
    return cell;
  }

  label(cpu, letter) {
    return this.root.className === "tiny" ? "" : this.root.className === "small" ? letter :
      letter ? `${cpu}${letter}` : String(cpu);
  }

  /** Colour threads and fill bars. */
  update(assignments) {
    const owners = this.owners(assignments.containers);
    const inPool = new Set(parseList(assignments.sharedPool));
    const reserved = new Set(assignments.numaNodes.flatMap((n) => parseList(n.reserved)));
    const idle = new Set(assignments.numaNodes.flatMap((n) => parseList(n.idle)));
    const offline = new Set(parseList(this.topology.cpus.offline));
    for (const [cpu, cell] of this.cells) {
      const owner = owners.get(cpu);
      let state = "unused", letter = "", text = "used by nobody";
      if (offline.has(cpu)) [state, text] = ["offline", "offline"];
      else if (owner && owner.kind !== "explicit") {
        const number = this.number(owner.id);
        letter = letterOf(number);
        state = `own o${number % COLOURS} f${Math.floor(number / COLOURS) % FILLS}`;
        text = `owned by ${owner.namespace}/${owner.pod}, ${owner.container}`;
      } else if (owner && !inPool.has(cpu)) {
        letter = letterOf(this.number(owner.id));
        [state, text] = ["own listed", `named by ${owner.namespace}/${owner.pod}`];
      } else if (owner) [state, text] = ["listed", `named by ${owner.namespace}/${owner.pod}`];
      else if (idle.has(cpu)) [state, text] = ["idle", "kept idle beside its owner"];
      else if (inPool.has(cpu)) {
        [state, text] = reserved.has(cpu) ? ["reserved", "shared pool, reserved"] : ["shared", "shared pool"];
      } else if (reserved.has(cpu)) text = "reserved";
      const key = `${state} ${letter} ${text}`;
      if (this.shown.get(cpu) === key) continue;
      this.shown.set(cpu, key);
      cell.className = `cpu ${state}`;
      cell.textContent = this.label(cpu, letter);
      cell.setAttribute("aria-label", `CPU ${cpu}: ${text}`);
      cell.title = `CPU ${cpu}: ${text}`;
    }
    for (const node of assignments.numaNodes) this.fill(node);
    this.mark();
  }

  /** CPU to the container that owns it, or whose explicit list names it. */
  owners(containers) {
    const owners = new Map();
    const alive = new Set();
    for (const one of containers) {
      if (one.kind !== "exclusive" && one.kind !== "explicit") continue;
      alive.add(one.id);
      for (const cpu of parseList(one.cpus)) owners.set(cpu, one);
    }
    for (const id of this.letters.keys()) if (!alive.has(id)) this.letters.delete(id);
    return owners;
  }

  /** The lowest number no living owner has: colours stay with their owners while they live. */
  number(id) {
    if (!this.letters.has(id)) {
      const used = new Set(this.letters.values());
      let number = 0;
      while (used.has(number)) number++;
      this.letters.set(id, number);
    }
    return this.letters.get(id);
  }

  fill(node) {
    const bars = this.bars.get(node.id);
    if (!bars) return;
    const rest = Math.max(0, node.memoryBytes - node.memoryAllocatedBytes - node.memoryAvailableBytes);
    const made = [];
    if (node.cpus) {
      made.push(bar("CPU", `${cpus(node.cpuAvailableMilli)} of ${cpus(node.cpuCapacityMilli)} left`,
        node.cpuCapacityMilli, [["taken", node.cpuAllocatedMilli]]));
    }
    if (node.memoryBytes) {
      made.push(bar("Memory", `${size(node.memoryAvailableBytes)} of ${size(node.memoryBytes)} left`,
        node.memoryBytes, [["taken", node.memoryAllocatedBytes], ["else", rest]]));
    }
    for (const pages of node.hugePages) {
      made.push(bar(`${size(pages.sizeBytes)} pages`, `${size(pages.totalBytes - pages.allocatedBytes)} of ` +
        `${size(pages.totalBytes)} left`, pages.totalBytes, [["taken", pages.allocatedBytes]]));
    }
    if (node.capacityFactor !== 1) {
      made.push(el("p", { class: "factor" }, node.capacityFactor === 0 ? "drained (capacity factor 0)" :
        `capacity factor ${node.capacityFactor}`));
    }
    bars.replaceChildren(...made);
  }

  /** Outline the CPUs of what is chosen. */
  highlight(ids) {
    this.marked = new Set(ids);
    this.mark();
  }

  mark() {
    for (const [cpu, cell] of this.cells) {
      const on = Boolean(this.marked && this.marked.has(cpu));
      if (cell.classList.contains("marked") !== on) cell.classList.toggle("marked", on);
    }
  }

  focus(cpu, chosen) {
    const cell = this.cells.get(cpu);
    if (!cell) return;
    for (const other of this.root.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
    if (chosen) this.choose({ cpu });
  }

  /** Arrow keys walk over the threads as they are drawn. */
  key(event) {
    const cell = event.target.closest("[data-cpu]");
    if (!cell) return;
    const order = [...this.root.querySelectorAll("[data-cpu]")];
    const at = order.indexOf(cell);
    let to = null;
    if (event.key === "ArrowRight") to = order[at + 1];
    else if (event.key === "ArrowLeft") to = order[at - 1];
    else if (event.key === "Home") to = order[0];
    else if (event.key === "End") to = order[order.length - 1];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") to = vertical(order, cell, event.key === "ArrowDown");
    else return;
    event.preventDefault();
    if (to) this.focus(Number(to.dataset.cpu), false);
  }
}

/** The nearest thread in the row below or above. */
function vertical(order, cell, down) {
  const from = cell.getBoundingClientRect();
  let best = null, bestCost = Infinity;
  for (const other of order) {
    const to = other.getBoundingClientRect();
    const dy = down ? to.top - from.top : from.top - to.top;
    if (dy < 2) continue;
    const cost = dy * 4 + Math.abs(to.left - from.left);
    if (cost < bestCost) [best, bestCost] = [other, cost];
  }
  return best;
}

export function letterOf(number) {
  const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  return number < 26 ? alphabet[number] : alphabet[Math.floor(number / 26 - 1) % 26] + alphabet[number % 26];
}

/** The matrix of distances, or the nearest of each where a matrix would be mush. */
export function distanceTable(topology) {
  const nodes = topology.numaNodes;
  const table = el("table", { class: "distances" });
  if (nodes.length <= 16) {
    table.append(el("tr", {}, el("td"), nodes.map((n) => el("th", { scope: "col" }, `${n.id}`))));
    for (const node of nodes) {
      table.append(el("tr", {}, el("th", { scope: "row" }, `${node.id}`),
        node.distances.map((d, i) => el("td", { class: nodes[i].id === node.id ? "self" : "" }, `${d}`))));
    }
    return table;
  }
  table.append(el("tr", {}, el("th", {}, "NUMA node"), el("th", {}, "from near to far")));
  for (const node of nodes) {
    const near = new Map();
    node.distances.forEach((d, i) => near.set(d, [...(near.get(d) || []), nodes[i].id]));
    const text = [...near].sort((a, b) => a[0] - b[0]).map(([d, ids]) => `${d}: ${formatList(ids)}`);
    table.append(el("tr", {}, el("th", { scope: "row" }, `${node.id}`), el("td", {}, text.join(" · "))));
  }
  return table;
}
