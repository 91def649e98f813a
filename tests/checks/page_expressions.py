"""JavaScript that tests ask the page: expressions, as texts."""

from __future__ import annotations

import json
from typing import Any

from tests.beds.browser import Page

LIVE = (
    "(document.getElementById('link-agent')?.textContent === 'agent: live'"
    " && !document.getElementById('main').hidden)"
)
DETAILS = "document.getElementById('details').textContent"
DETAILS_TITLE = "document.getElementById('details-title').textContent"
BANNERS = "document.getElementById('banners').textContent"
TITLE = "document.getElementById('containers-title').textContent"
LIST = "document.getElementById('list').textContent"
REFUSALS = "document.getElementById('refusals').textContent"
STEPS = "document.querySelectorAll('#details .steps li').length"
ROWS = "document.querySelectorAll('#list tbody tr').length"
PODS = (
    "[...document.querySelectorAll('#list tbody tr')].map(r => r.querySelector('bdi').textContent)"
)
LETTERS = (
    "[...document.querySelectorAll('#list tbody tr')]"
    ".map(r => r.dataset.id + r.querySelector('.key').textContent)"
)
CPUS = "[...document.querySelectorAll('#map [data-cpu]')].map(c => +c.dataset.cpu)"
NUMA_NODES = "[...document.querySelectorAll('[data-numa]')].map(c => +c.dataset.numa)"
MARKED = "[...document.querySelectorAll('.cpu.marked')].map(c => +c.dataset.cpu)"
STICKING_OUT = (
    "[...document.querySelectorAll('.node')].filter(n => n.scrollWidth > n.clientWidth).length"
)

SHAPES = """(() => {
  // What is left of every state's look when all colours are taken away.
  const plain = (text) => text.replace(/(rgba?|color)\\([^()]*\\)/g, 'colour');
  const found = {};
  for (const cell of document.querySelectorAll('#map .cpu')) {
    const style = getComputedStyle(cell), letter = cell.lastChild;
    const shown = getComputedStyle(letter).display === 'none' ? '' : letter.textContent;
    found[cell.dataset.dress.split(' ')[0]] =
      [plain(style.backgroundImage), plain(style.boxShadow), shown ? 'letter' : ''].join(' | ');
  }
  return found;
})()"""

WORST_CONTRAST = """(() => {
  // [ratio, class, text] of the visible text that is hardest to read, as WCAG 2 counts it.
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const painted = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => rgb.reduce((sum, v, i) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  let worst = [99];
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    if (!e.checkVisibility() || e.closest('.hidden, .skip')) continue;
    const grounds = [];
    for (let p = e; p; p = p.parentElement) grounds.unshift(getComputedStyle(p).backgroundColor);
    const ground = light(painted(grounds));
    const ink = light(painted([...grounds, getComputedStyle(e).color]));
    const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.className, e.textContent.slice(0, 30)];
  }
  return worst;
})()"""  # noqa: E501


def cell(cpu: int) -> str:
    return f"document.querySelector('[data-cpu=\"{cpu}\"]')"


def label(cpu: int) -> str:
    """What a screen reader says of a CPU."""
    return f"{cell(cpu)}.getAttribute('aria-label')"


def press_button(selector: str, text: str) -> str:
    """Presses the first button whose text holds ``text``."""
    return (
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        f".find(b => b.textContent.includes({json.dumps(text)})).click()"
    )


def fill(element: str, value: str, event: str = "input") -> str:
    """Sets the value of a field or a choice, as a hand would."""
    return (
        f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('{event}')); }})"
        f"(document.getElementById('{element}'))"
    )


def look(element: str) -> str:
    """Colour, texture and letter of a thread or of a row's key."""
    return (
        f"(e => {{ const s = getComputedStyle(e); return s.backgroundColor + s.backgroundImage"
        f" + (e.querySelector('.letter') ?? e).textContent; }})({element})"
    )


def visit(page: Page, bed: Any, fragment: str = "") -> None:
    """Open the page that a bed serves, until it is up to date."""
    page.open(bed.url + fragment)
    page.wait(f"location.href.startsWith('{bed.url}') && {LIVE}")
