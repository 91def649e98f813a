"""The rooms of docs/architecture.md and the drawing of who imports whom, from the code.

``python -m tools.docs_rooms`` writes both. Rows are the layers of the import contract in
pyproject.toml, arrows are imports. An arrow that follows from others (``cli`` imports ``node``,
which imports ``store``) is not drawn; the tables name every import.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import grimp

from tools.docs_regions import DOCS, cell, table, write

PACKAGE: Final = "nri_numa"
DRAWING: Final = DOCS / "img" / "rooms.svg"

COLUMNS: Final[Mapping[str, int]] = {
    "cli": 300, "demo": 600, "controller": 60, "agent": 300, "publisher": 60, "scheduler": 540,
    "web": 60, "kubelet": 180, "store": 300, "nri": 420, "simulate": 540, "cri": 660,
    "device_plugin": 900, "dra": 900, "devices": 480, "measure": 780, "runtime": 480,
    "config": 120, "observe": 300, "engine": 300, "machine": 300, "errors": 300,
    "safe_yaml": 180, "text": 420, "model": 300, "kube": 200, "cluster": 540,
    "service": 340, "runtime_profile": 480,
}  # fmt: skip
"""Where a room stands in its row, by its middle; a new room is given a place here."""

PURE: Final = ("cluster", "engine", "model")
WIDTH, ROW, BOX_WIDTH, BOX_HEIGHT, TOP = 968, 76, 112, 36, 16

_INK, _LINE, _GROUND = "#1f2933", "#5b6875", "#f6f8fa"


def layers(container: str = PACKAGE) -> list[list[str]]:
    """The rows of a container's contract, the highest first."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract.get("containers") == [container]:
            return [[name.strip() for name in row.split("|")] for row in contract["layers"]]
    raise ValueError(f"no import contract has the container {container}")


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, exclude_type_checking_imports=False, cache_dir=None)


def imports(container: str = PACKAGE) -> dict[str, set[str]]:
    """By room of a container, the other rooms of it that its modules import."""
    graph = _graph()
    rooms = {name for row in layers(container) for name in row}
    found: dict[str, set[str]] = {}
    for room in rooms:
        own = f"{container}.{room}"
        targets = {
            target.removeprefix(f"{container}.").split(".")[0]
            for module in (own, *graph.find_descendants(own))
            for target in graph.find_modules_directly_imported_by(module)
            if target.startswith(f"{container}.")
        }
        found[room] = (targets & rooms) - {room}
    return found


def drawn(arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from others."""

    def below(room: str) -> set[str]:
        return set().union(*({one} | below(one) for one in arrows[room]))

    return {
        room: {one for one in targets if not any(one in below(two) for two in targets - {one})}
        for room, targets in arrows.items()
    }


def _is_package(path: Path) -> bool:
    """Not every folder is: a checkout leaves some behind that hold compiled files only."""
    return (path / "__init__.py").is_file()


def holds(container: str, room: str) -> str:
    """What a room or a module says of itself in its first line."""
    path = DOCS.parent.joinpath(*container.split("."), room)
    file = path / "__init__.py" if _is_package(path) else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).rstrip(".:")


def text() -> str:
    """The tables: rooms of the package, and inside the engine."""
    lines: list[str] = []
    for container, title in ((PACKAGE, "Room"), (f"{PACKAGE}.engine", "In the engine")):
        arrows = imports(container)
        order = [name for row in layers(container) for name in row]
        rows = []
        for name in order:
            used = ", ".join(one for one in order if one in arrows[name]) or "nothing"
            path = DOCS.parent.joinpath(*container.split("."), name)
            label = f"{container}.{name}".removeprefix(f"{PACKAGE}.").replace(".", "/")
            label = f"`{label}/`" if _is_package(path) else f"`{label}.py`"
            rows.append((label, cell(holds(container, name)), used))
        lines += [*table((title, "What it holds", "Imports"), rows), ""]
    return "\n".join(lines)


def svg() -> str:
    """The drawing."""
    rows = layers()
    row_of = {name: n for n, row in enumerate(rows) for name in row}
    if missing := set(row_of) ^ set(COLUMNS):
        raise ValueError(f"rooms without a place in COLUMNS, or the reverse: {sorted(missing)}")
    arrows = drawn(imports())
    said = "; ".join(
        f"{room} imports {', '.join(sorted(arrows[room]))}" for room in row_of if arrows[room]
    )
    height = 2 * TOP + ROW * (len(rows) - 1) + BOX_HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            f' width="{WIDTH}" height="{height}" role="img" aria-labelledby="t d"'
            f' font-family="system-ui, sans-serif" font-size="14" fill="{_INK}">',
            '  <title id="t">The rooms of nri_numa and who imports whom</title>',
            f'  <desc id="d">{said}.</desc>',
            '  <defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7"'
            ' markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0 0 10 5 0 10z" fill="{_LINE}"/></marker></defs>',
            f'  <rect width="{WIDTH}" height="{height}" rx="8" fill="{_GROUND}"/>',
            *_lines(arrows, row_of),
            *_boxes(row_of),
            "</svg>",
            "",
        ]
    )


def _lines(arrows: Mapping[str, set[str]], row_of: Mapping[str, int]) -> Iterator[str]:
    for room in row_of:
        for target in sorted(arrows[room]):
            start = TOP + ROW * row_of[room] + BOX_HEIGHT
            end = TOP + ROW * row_of[target]
            yield (
                f'  <line x1="{COLUMNS[room]}" y1="{start}" x2="{COLUMNS[target]}" y2="{end}"'
                f' stroke="{_LINE}" stroke-width="1.5" marker-end="url(#a)"/>'
            )


def _boxes(row_of: Mapping[str, int]) -> Iterator[str]:
    for room, row in row_of.items():
        left, top = COLUMNS[room] - BOX_WIDTH // 2, TOP + ROW * row
        fill, edge = ("#e6f3f1", "#0f766e") if room in PURE else ("#ffffff", "#9aa7b4")
        yield (
            f'  <rect x="{left}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="4"'
            f' fill="{fill}" stroke="{edge}" stroke-width="1"/>'
        )
        yield (
            f'  <text x="{COLUMNS[room]}" y="{top + 23}" text-anchor="middle"'
            f' font-size="13" font-weight="600">{room}</text>'
        )


if __name__ == "__main__":
    write("architecture.md", "tools.docs_rooms", text())
    DRAWING.write_text(svg())
