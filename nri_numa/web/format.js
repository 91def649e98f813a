// Small texts and elements. Names come from pods and are not trusted: they only ever become text.

/** Parse the kernel's list format: "0-3,8" to [0, 1, 2, 3, 8]. */
export function parseList(text) {
  const ids = [];
  for (const part of text ? text.split(",") : []) {
    const [low, high] = part.split("-").map(Number);
    for (let id = low; id <= (high === undefined ? low : high); id++) ids.push(id);
  }
  return ids;
}

/** Write ids in the kernel's list format. */
export function formatList(ids) {
  const sorted = [...ids].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === sorted[j] + 1) j++;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}-${sorted[j]}`);
    i = j + 1;
  }
  return parts.join(",");
}

/** Show control characters and direction marks instead of obeying them. */
export function harmless(text) {
  return String(text).replace(
    /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
    (c) => `\\u{${c.codePointAt(0).toString(16)}}`,
  );
}

export function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024) return `${value >= 100 || value % 1 === 0 ? value.toFixed(0) : value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(1)} PiB`;
}

export function cpus(milli) {
  return String(Math.round(milli) / 1000);
}

export function age(since, now = Date.now() / 1000) {
  if (!since) return "–";
  const s = Math.max(0, Math.floor(now - since));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** Make an element: el("p", {class: "quiet"}, "text", otherElement). */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === "") continue;
    made.append(child instanceof Node ? child : document.createTextNode(harmless(child)));
  }
  return made;
}

/** A bar of parts: [[class, amount, label], …] out of total. */
export function bar(label, text, total, parts) {
  const track = el("div", { class: "track", role: "img", "aria-label": `${label}: ${text}` });
  for (const [name, amount] of parts) {
    const part = el("span", { class: `part ${name}` });
    part.style.width = `${total > 0 ? Math.min(100, (100 * amount) / total) : 0}%`;
    track.append(part);
  }
  return el("div", { class: "bar" }, el("span", { class: "bar-label" }, label), track,
    el("span", { class: "bar-text" }, text));
}
