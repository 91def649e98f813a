// The drawing of the machine as an SVG file, for a ticket or a slide: what is seen, where it is seen.

const escape = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Cs}\uFFFE\uFFFF]/gu, "").replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" }[c]));

/** The text of an SVG file that shows an element's boxes and words. */
export function picture(map, title) {
  const at = map.getBoundingClientRect();
  const paint = getComputedStyle(document.documentElement).getPropertyValue("--card").trim() || "#fff";
  const parts = [];
  const box = (element, inside) => {
    const style = getComputedStyle(element), r = element.getBoundingClientRect();
    if (!r.width || !r.height) return;
    const hatched = style.backgroundImage !== "none" && /repeating/.test(style.backgroundImage);
    const border = parseFloat(style.borderTopWidth) ? ` stroke="${style.borderTopColor}"` : "";
    parts.push(`<rect x="${(r.left - at.left).toFixed(1)}" y="${(r.top - at.top).toFixed(1)}" width="${r.width.toFixed(1)}" height="${r.height.toFixed(1)}"`
      + ` rx="${parseFloat(style.borderTopLeftRadius) || 0}" fill="${style.backgroundColor}"${border}${hatched ? ' stroke-dasharray="2 1.5" stroke="#555"' : ""}>${inside}</rect>`);
  };
  for (const element of map.querySelectorAll(".socket, .node, .track, .track span, .core, .cpu")) {
    box(element, element.dataset.label ? `<title>${escape(element.dataset.label)}</title>` : "");
  }
  const walker = document.createTreeWalker(map, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const words = text.textContent.trim();
    const element = text.parentElement;
    if (!words || !element.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const r = range.getBoundingClientRect(), style = getComputedStyle(element);
    if (!r.width) continue;
    const [x, y] = [(r.left - at.left).toFixed(1), (r.bottom - at.top - 0.24 * r.height).toFixed(1)];
    const upright = style.writingMode.startsWith("vertical");
    parts.push(`<text x="${upright ? (r.right - at.left - 2).toFixed(1) : x}" y="${upright ? (r.bottom - at.top).toFixed(1) : y}"`
      + ` font-size="${parseFloat(style.fontSize)}" font-weight="${style.fontWeight}" fill="${style.color}"`
      + `${upright ? ` transform="rotate(-90 ${(r.right - at.left - 2).toFixed(1)} ${(r.bottom - at.top).toFixed(1)})"` : ""}>${escape(words)}</text>`);
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${at.width.toFixed(0)}" height="${at.height.toFixed(0)}" viewBox="0 0 ${at.width.toFixed(0)} ${at.height.toFixed(0)}"`
    + ` font-family="Noto Sans, Liberation Sans, sans-serif"><title>${escape(title)}</title><rect width="100%" height="100%" fill="${paint}"/>${parts.join("")}</svg>\n`;
}

/** Hand a text to the browser as a file to keep. */
export function keep(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
