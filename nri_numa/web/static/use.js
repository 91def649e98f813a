// What is really used, drawn: a sparkline of the last minutes at each NUMA node, a mark on each CPU.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 60, HEIGHT = 14; // one unit for each sample that the agent keeps

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

/** A line of percentages, oldest first, ending at the right; gaps where nothing is known. */
export function sparkline(history, label) {
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "spark", role: "img", "aria-label": label, preserveAspectRatio: "none" });
  let path = "", pen = "M";
  history.forEach((value, i) => {
    if (value === null) {
      pen = "M";
      return;
    }
    path += `${pen}${WIDTH - history.length + i + 0.5} ${(HEIGHT - 1) - (value / 100) * (HEIGHT - 2)}`;
    pen = "L";
  });
  picture.append(svg("path", { d: path, fill: "none", "vector-effect": "non-scaling-stroke" }));
  return picture;
}

const last = (history) => (history.length ? history[history.length - 1] : null);

/** What one NUMA node uses, in words. */
export function nodeWords(load, size) {
  return [load.cpuPercent !== null && `CPUs ${load.cpuPercent} % busy`, load.memoryBytes && `${size(load.memoryUsedBytes)} of ${size(load.memoryBytes)} memory used`,
    load.remotePercent !== null && `${load.remotePercent} % of new pages for other NUMA nodes`].filter(Boolean).join(", ");
}

/** Draw the loads into the NUMA nodes' places, and mark the CPUs. */
export function drawUse(use, places, cells, size) {
  for (const load of use.numaNodes) {
    const place = places.get(load.id);
    if (!place) continue;
    const history = load.cpuPercent === null ? load.memoryHistory : load.cpuHistory;
    const words = nodeWords(load, size);
    const text = document.createElement("span");
    text.textContent = load.cpuPercent === null ? `${last(load.memoryHistory) ?? 0} %` : `${load.cpuPercent} %`;
    const name = document.createElement("span");
    name.textContent = "Use";
    place.replaceChildren(name, sparkline(history, `Used: ${words}; the last minutes`), text);
    place.title = `Used: ${words}`;
    place.hidden = !history.some((value) => value !== null);
  }
  for (const [cpu, cell] of cells) {
    const busy = use.cpus[cpu];
    if (busy === undefined) cell.style.removeProperty("--busy");
    else if (cell.style.getPropertyValue("--busy") !== `${busy}%`) cell.style.setProperty("--busy", `${busy}%`);
  }
}
