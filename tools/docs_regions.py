"""Generated parts of the documentation: what stands between two marks of a page.

    <!-- generated: python -m tools.docs_config -->
    ...
    <!-- end of generated -->

``python -m tools.docs_regions`` writes all of them, and the drawing of `tools.docs_rooms`; a test
keeps them fresh. The rest of a page is written by hand.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"

_REGION = re.compile(
    r"(<!-- generated: python -m (?P<tool>tools\.\w+) -->\n).*?(<!-- end of generated -->)",
    re.DOTALL,
)


def replaced(page: str, tool: str, text: str) -> str:
    """The page with the region of ``tool`` holding ``text``.

    Raises:
        ValueError: when the page has no such region.
    """
    found = [m for m in _REGION.finditer(page) if m["tool"] == tool]
    if len(found) != 1:
        raise ValueError(f"{len(found)} regions of {tool}, expected one")
    start, end = found[0].end(1), found[0].start(3)
    return f"{page[:start]}\n{text.strip()}\n\n{page[end:]}"


def cell(text: str) -> str:
    """``text`` as one cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def code(text: str) -> str:
    """``text`` as code in a cell; a bar would end the cell even there."""
    return f"`{text}`".replace("|", "\\|") if text else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the cells are Markdown already."""
    return [
        f"| {' | '.join(head)} |",
        f"|{'|'.join('---' for _ in head)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def generators() -> tuple[tuple[str, str, Callable[[], str]], ...]:
    """Page, module and what makes the text, for every region."""
    from tools import (
        docs_api,
        docs_cli,
        docs_config,
        docs_metrics,
        docs_options,
        docs_reasons,
        docs_rooms,
        licences,
    )

    return (
        ("annotations.md", "tools.docs_options", docs_options.text),
        ("configuration.md", "tools.docs_config", docs_config.text),
        ("troubleshooting.md", "tools.docs_reasons", docs_reasons.text),
        ("metrics.md", "tools.docs_metrics", docs_metrics.text),
        ("cli.md", "tools.docs_cli", docs_cli.text),
        ("http-api.md", "tools.docs_api", docs_api.text),
        ("architecture.md", "tools.docs_rooms", docs_rooms.text),
        ("../THIRD_PARTY.md", "tools.licences", licences.text),
    )


def write(page: str, tool: str, text: str) -> None:
    """Put ``text`` into its region of a page of docs/."""
    path = DOCS / page
    path.write_text(replaced(path.read_text(), tool, text))


def main() -> None:
    """Write every region, and the drawing that is made of the same."""
    from tools import docs_rooms, kubectl_plugin, remedies

    for page, tool, text in generators():
        write(page, tool, text())
        sys.stdout.write(f"docs/{page}\n")
    remedies.PAGE.write_text(remedies.text())
    plugin = kubectl_plugin.SOURCES / kubectl_plugin.PROGRAM
    plugin.write_text(kubectl_plugin.program_with_reasons(plugin.read_text()))
    docs_rooms.DRAWING.write_text(docs_rooms.svg())
    sys.stdout.write(f"docs/img/{docs_rooms.DRAWING.name}\n")


if __name__ == "__main__":
    main()
