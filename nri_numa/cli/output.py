"""Output of every command: a document for programs, or lines and tables for people.

A terminal is narrower than 64 NUMA nodes and names of 253 characters. A table is narrowed in this
order: sentences are wrapped, lists of ids are broken at commas, optional columns are dropped, the
last one first, and names are broken over several lines. Nothing is cut: names are complete because
other commands take them, a word such as a policy's name is never broken, and no column becomes too
narrow for its names. Programs that read a pipe search for whole words: nothing is narrowed for
them, unless ``COLUMNS`` has a width, as with ``watch``; then a pipe is treated as a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Final, NamedTuple

import click

from nri_numa.text import escape_unprintable

DEFAULT_WIDTH_COLUMNS: Final = 80
_COLUMN_GAP: Final = "  "
TABLE_FORMATS: Final = "table", "wide"
"""Forms of ``-o`` for people; nothing is narrowed or left out in the second."""


def is_coloured() -> bool:
    """Return True if the output is a terminal that may get colours (no-color.org)."""
    if not sys.stdout.isatty():
        return False
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_document_or_lines(document: object, output: str, lines: Iterable[str]) -> None:
    """Write an answer in the form of ``-o``: the document, or the lines of a table."""
    if output in TABLE_FORMATS:
        click.echo("\n".join(lines), color=is_coloured())
    else:
        write_document(document, output)


def write_document(document: object, output: str) -> None:
    """Write a document as JSON or YAML.

    Letters of all scripts are written unchanged, unless the document has characters that control
    a terminal.
    """
    text = _serialize_document(document, output, ascii_only=False)
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    if not encoding.lower().startswith("utf") or not text.replace("\n", "").isprintable():
        text = _serialize_document(document, output, ascii_only=True)
    click.echo(text, nl=False)


def _serialize_document(document: object, output: str, *, ascii_only: bool) -> str:
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=ascii_only) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=not ascii_only))


# --- Widths -------------------------------------------------------------------------------------


def terminal_width() -> int:
    """Return the width for sentences: ``COLUMNS``, else the terminal's, 80 without one."""
    if sys.stdout.isatty():
        import shutil  # imports four compressors, which an agent never needs

        return shutil.get_terminal_size((DEFAULT_WIDTH_COLUMNS, 24)).columns
    return _columns_from_environment() or DEFAULT_WIDTH_COLUMNS


def max_table_width() -> int | None:
    """Return the maximum width of a table; None for no limit, as with ``-o wide``."""
    command = click.get_current_context(silent=True)
    if command is not None and command.params.get("output") == "wide":
        return None
    return terminal_width() if sys.stdout.isatty() else _columns_from_environment()


def _columns_from_environment() -> int | None:
    text = os.environ.get("COLUMNS", "")
    fine = text.isascii() and text.isdigit() and len(text) < 7
    return int(text) or None if fine else None


def cell_width(text: str) -> int:
    """Return the columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def clip_text(text: str, width: int) -> str:
    """Shorten ``text`` to ``width`` columns in its middle, because names differ at the ends."""
    clipped, size = text, width
    while cell_width(clipped) > width and size:
        size -= 1
        clipped = f"{text[: (size + 1) // 2]}…{text[len(text) - size // 2 :]}"
    return clipped


def wrap_text(
    text: str, indent: str = "", hanging_indent: str | None = None, *, width: int | None = None
) -> list[str]:
    """Wrap ``text`` to lines that fit, with the indent of the first line and of the others."""
    return textwrap.wrap(
        escape_unprintable(text),
        width or terminal_width(),
        initial_indent=indent,
        subsequent_indent=indent if hanging_indent is None else hanging_indent,
        break_on_hyphens=False,
    )


# --- Tables -------------------------------------------------------------------------------------


class CellWrapping(Enum):
    """Wrapping of the cells of a column, and its minimum width when narrowed."""

    UNBROKEN = "never broken", 0
    TEXT = "broken behind blanks", 26
    LIST = "broken behind commas and blanks", len("100-103,120")
    NAME = "broken anywhere, behind a hyphen where there is one", 8


class Column(NamedTuple):
    """One column.

    Attributes:
        drop_rank: 0 if it is never dropped; otherwise the largest is dropped first.
    """

    title: str
    kind: CellWrapping = CellWrapping.UNBROKEN
    drop_rank: int = 0


class FittedTable(NamedTuple):
    """Lines of heading and rows, some of several lines, and titles of the dropped columns."""

    lines: list[str]
    dropped_columns: list[str]


def render_table(columns: Sequence[Column | str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table that fits the output; a plain title is a column of names."""
    layout = [c if isinstance(c, Column) else Column(c, CellWrapping.NAME) for c in columns]
    return fit_table(layout, rows, max_table_width()).lines


def fit_table(
    columns: Sequence[Column], rows: Iterable[Sequence[object]], width: int | None
) -> FittedTable:
    """Lay a table out; it exceeds ``width`` only if words or names of minimum width do.

    None is no limit.

    Raises:
        ValueError: two columns have the same heading.
    """
    if len({column.title for column in columns}) < len(columns):
        raise ValueError(f"two columns of {[c.title for c in columns]} have one heading")
    cells = [[escape_unprintable(str(cell)) for cell in row] for row in rows]
    indexes = list(range(len(columns)))
    natural = [
        max(cell_width(column.title), *(cell_width(row[i]) for row in cells), 1)
        for i, column in enumerate(columns)
    ]
    widths = list(natural)

    def total_width(sizes: Sequence[int]) -> int:
        return sum(sizes[i] for i in indexes) + len(_COLUMN_GAP) * (len(indexes) - 1)

    def shrink_columns(kind: CellWrapping, min_width: int) -> None:
        """Narrow columns of a kind until the table fits, the widest first, then the last."""
        while total_width(widths) > (width or 0):
            able = [
                i
                for i in indexes
                if columns[i].kind is kind and widths[i] > max(min_width, len(columns[i].title))
            ]
            if not able:
                return
            widths[max(able, key=lambda i: (widths[i], i))] -= 1

    if width is not None:
        shrink_columns(CellWrapping.TEXT, CellWrapping.TEXT.value[1])
        shrink_columns(CellWrapping.LIST, CellWrapping.LIST.value[1])
        for i in sorted(indexes, key=lambda i: -columns[i].drop_rank):
            if not columns[i].drop_rank or total_width(widths) <= width:
                break
            indexes.remove(i)
            # Lists may fit now without wrapping.
            widths[:] = natural
            shrink_columns(CellWrapping.LIST, CellWrapping.LIST.value[1])
        shrink_columns(CellWrapping.NAME, CellWrapping.NAME.value[1])
    lines: list[str] = []
    for row in ([c.title for c in columns], *cells):
        parts = [_wrap_cell(row[i], widths[i], columns[i].kind) for i in indexes]
        for line in zip_longest(*parts, fillvalue=""):
            padded = (
                part + " " * (widths[i] - cell_width(part))
                for i, part in zip(indexes, line, strict=True)
            )
            lines.append(_COLUMN_GAP.join(padded).rstrip())
    return FittedTable(lines, [c.title for i, c in enumerate(columns) if i not in indexes])


def _wrap_cell(text: str, width: int, kind: CellWrapping) -> list[str]:
    """Wrap ``text`` to lines of ``width`` columns, unless its kind forbids breaking it."""
    if kind is CellWrapping.UNBROKEN or cell_width(text) <= width:
        return [text]
    if kind is CellWrapping.TEXT:
        return textwrap.wrap(text, width, break_on_hyphens=False)
    return wrap_list(text, width) if kind is CellWrapping.LIST else list(_wrap_name(text, width))


def wrap_list(text: str, width: int) -> list[str]:
    """Wrap a list to lines, broken after commas and blanks only."""
    lines: list[str] = []
    for part in text.replace(",", ",\0").replace(" ", " \0").split("\0"):
        if lines and cell_width((lines[-1] + part).rstrip()) <= width:
            lines[-1] += part
        else:
            lines.append(part)
    return [line.rstrip() for line in lines]


def _wrap_name(text: str, width: int) -> Iterator[str]:
    """Wrap a name to lines, broken after a hyphen if the line is long enough."""
    while cell_width(text) > width:
        cut = 1
        while cell_width(text[: cut + 1]) <= width:
            cut += 1
        hyphen = text.rfind("-", 0, cut) + 1
        if hyphen > cut // 2:
            cut = hyphen
        yield text[:cut]
        text = text[cut:]
    yield text


# --- Amounts ------------------------------------------------------------------------------------


def human_duration(seconds: float) -> str:
    """Format a duration: ``42s``, ``7m``, ``3h12m``, ``9d4h``."""
    total = max(0, int(seconds))
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if total >= size:
            minor = total % size // part
            return f"{total // size}{unit}{minor}{below}" if minor else f"{total // size}{unit}"
    return f"{total // 60}m" if total >= 60 else f"{total}s"


def human_age(moment: float, current_time: float) -> str:
    """Format the time since ``moment``; a dash for never."""
    return human_duration(current_time - moment) if moment else "-"
