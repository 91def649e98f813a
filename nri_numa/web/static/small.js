// Small things that the pages of the agent and of the controller share. Names come from pods and nodes
// and are not trusted: they only ever become text nodes and attribute values, never markup.

/** Show control characters and direction marks instead of obeying them. */
export function harmless(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu,
    (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
}

/** "512 B", "6 GiB", "1.5 TiB", as everywhere in nri-numa. */
export function size(bytes, round = Math.round) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = Math.max(0, bytes);
  for (; value >= 1024 && units.length > 1; value /= 1024) units.shift();
  return `${round(10 * value) / 10} ${units[0]}`;
}

/** The same of what is free, rounded down: 7.97 GiB do not hold 8. */
export const freeSize = (bytes) => size(bytes, Math.floor);

export const plural = (n, noun, nouns = `${noun}s`) => `${n.toLocaleString("en")} ${n === 1 ? noun : nouns}`;

/** Make an element: el("p", {class: "quiet"}, "text", otherElement). */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(name, name === "title" || name === "aria-label" ? harmless(value) : value);
    }
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false || child === "") continue;
    made.append(child instanceof Node ? child : document.createTextNode(harmless(child)));
  }
  return made;
}

/** One line for everything: that all is well, or a link to each thing that is not: [[text, href, action], …]. */
export function showVerdict(box, found) {
  const key = JSON.stringify(found);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.className = found.length ? "some" : "all";
  box.replaceChildren(...found.length ? ["Needs attention: ", ...found.flatMap(([text, href, action], i) => [i ? ", " : "", el("a", { href, onclick: (event) => {
    if (!action) return;
    event.preventDefault();
    action();
  } }, text)])] : ["All well"]);
}

/** Set a text only when it changed, so that screen readers and selections are left alone. */
export function setText(node, text) {
  const shown = harmless(text);
  if (node.textContent !== shown) node.textContent = shown;
}
