"""JavaScript that tests ask the page: expressions, as texts; and CPUs that are busy."""

import json
from collections.abc import Mapping
from pathlib import Path
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
MORE = "document.getElementById('more').textContent"
REJECTIONS = "document.getElementById('refusals').textContent"
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


def tick(root: Path, busy: Mapping[int, int], total: int) -> None:
    """The modelled kernel's count of each CPU's time, by its number."""
    lines = (f"cpu{cpu} {now} 0 0 {total - now} 0 0 0 0 0 0" for cpu, now in busy.items())
    file = root / "proc/stat"
    file.parent.mkdir(exist_ok=True)
    fresh = file.with_name("stat.new")
    fresh.write_text("\n".join(["cpu  1 1 1 1", *lines, ""]))
    fresh.rename(file)
