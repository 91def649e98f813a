"""How every command answers: a document for programs, or lines and tables for people.

A terminal is narrower than 64 NUMA nodes and names of 253 characters. What gives way in a table, in
this order: sentences are wrapped; lists of ids are broken at their commas; columns that can be
missed are left out whole, the last of them first; names are broken over several lines. Nothing is
cut: a name that another command takes is there to its last letter, and a word such as a policy's
name is never broken, nor is a column made so narrow that its names cannot be read. What reads a
pipe looks for whole words: nothing is narrowed for it, unless it says by ``COLUMNS`` how wide it
is, as ``watch`` does; it is treated as a terminal then.
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
"""The forms of ``-o`` for people; nothing is narrowed or left out in the second."""


def is_coloured() -> bool:
    """Whether the output is a terminal that may get colours (no-color.org)."""
    if not sys.stdout.isatty():
        return False
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_document_or_lines(document: object, output: str, lines: Iterable[str]) -> None:
    """Write an answer in the form that ``-o`` says: the document, or the lines of a table."""
    if output in TABLE_FORMATS:
        click.echo("\n".join(lines), color=is_coloured())
    else:
        write_document(document, output)


def write_document(document: object, output: str) -> None:
    """Write a document as JSON or YAML.

    Letters of all scripts are written as they are, unless there is something among them that a
    terminal would act upon.
    """
    text = _serialize_document(document, output, plain=False)
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    if not encoding.lower().startswith("utf") or not text.replace("\n", "").isprintable():
        text = _serialize_document(document, output, plain=True)
    click.echo(text, nl=False)


def _serialize_document(document: object, output: str, *, plain: bool) -> str:
    if output == "json":
        return json.dumps(document, indent=2, ensure_ascii=plain) + "\n"
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=not plain))


# --- Widths -------------------------------------------------------------------------------------


def terminal_width() -> int:
    """Columns to wrap sentences at: ``COLUMNS``, else the terminal's, 80 where there is none."""
    if sys.stdout.isatty():
        import shutil  # with it come four compressors, which an agent never needs

        return shutil.get_terminal_size((DEFAULT_WIDTH_COLUMNS, 24)).columns
    return _columns_from_environment() or DEFAULT_WIDTH_COLUMNS


def max_table_width() -> int | None:
    """Columns that a table may take; None for as many as it needs, as with ``-o wide``."""
    command = click.get_current_context(silent=True)
    if command is not None and command.params.get("output") == "wide":
        return None
    return terminal_width() if sys.stdout.isatty() else _columns_from_environment()


def _columns_from_environment() -> int | None:
    text = os.environ.get("COLUMNS", "")
    fine = text.isascii() and text.isdigit() and len(text) < 7
    return int(text) or None if fine else None


def cell_width(text: str) -> int:
    """Columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def clip_text(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns; the middle goes, since names differ at either end."""
    shown, kept = text, width
    while cell_width(shown) > width and kept:
        kept -= 1
        shown = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return shown


def wrap_text(
    text: str, first: str = "", rest: str | None = None, *, width: int | None = None
) -> list[str]:
    """``text`` in lines that fit, with what stands before the first of them and the others."""
    return textwrap.wrap(
        escape_unprintable(text),
        width or terminal_width(),
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
    )


# --- Tables -------------------------------------------------------------------------------------


class CellWrapping(Enum):
    """What may be done to the cells of a column, and below how many columns it is not narrowed."""

    UNBROKEN = "never broken", 0
    TEXT = "broken behind blanks", 26
    LIST = "broken behind commas and blanks", len("100-103,120")
    NAME = "broken anywhere, behind a hyphen where there is one", 8


class Column(NamedTuple):
    """One column.

    Attributes:
        drop_rank: 0 when it must be there; of the others the largest is left out first.
    """

    title: str
    kind: CellWrapping = CellWrapping.UNBROKEN
    drop_rank: int = 0


class FittedTable(NamedTuple):
    """Heading and rows, of which one may take several lines, and titles that had no room."""

    lines: list[str]
    dropped_columns: list[str]


def render_table(columns: Sequence[Column | str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table that fits where it is written; a column that is a title holds names."""
    made = [one if isinstance(one, Column) else Column(one, CellWrapping.NAME) for one in columns]
    return fit_table(made, rows, max_table_width()).lines


def fit_table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    width: int | None,
) -> FittedTable:
    """Lay a table out; wider than ``width`` only where words are, and names at their least.

    None is as wide as it gets.
    """
    cells = [[escape_unprintable(str(cell)) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    natural = [
        max(cell_width(column.title), *(cell_width(row[i]) for row in cells), 1)
        for i, column in enumerate(columns)
    ]
    widths = list(natural)

    def total_width(of: Sequence[int]) -> int:
        return sum(of[i] for i in shown) + len(_COLUMN_GAP) * (len(shown) - 1)

    def shrink_columns(kind: CellWrapping, least: int) -> None:
        """Take columns of a kind down, the widest and of those the last first, until it fits."""
        while total_width(widths) > (width or 0):
            able = [
                i
                for i in shown
                if columns[i].kind is kind and widths[i] > max(least, len(columns[i].title))
            ]
            if not able:
                return
            widths[max(able, key=lambda i: (widths[i], i))] -= 1

    if width is not None:
        shrink_columns(CellWrapping.TEXT, CellWrapping.TEXT.value[1])
        shrink_columns(CellWrapping.LIST, CellWrapping.LIST.value[1])
        for i in sorted(shown, key=lambda i: -columns[i].drop_rank):
            if not columns[i].drop_rank or total_width(widths) <= width:
                break
            shown.remove(i)
            # There may be room again for a list as it is.
            widths[:] = natural
            shrink_columns(CellWrapping.LIST, CellWrapping.LIST.value[1])
        shrink_columns(CellWrapping.NAME, CellWrapping.NAME.value[1])
    lines: list[str] = []
    for row in ([c.title for c in columns], *cells):
        parts = [_wrap_cell(row[i], widths[i], columns[i].kind) for i in shown]
        for line in zip_longest(*parts, fillvalue=""):
            padded = (
                part + " " * (widths[i] - cell_width(part))
                for i, part in zip(shown, line, strict=True)
            )
            lines.append(_COLUMN_GAP.join(padded).rstrip())
    return FittedTable(lines, [c.title for i, c in enumerate(columns) if i not in shown])


def _wrap_cell(text: str, width: int, kind: CellWrapping) -> list[str]:
    """``text`` in lines of at most ``width`` columns, as far as its kind lets it be broken."""
    if kind is CellWrapping.UNBROKEN or cell_width(text) <= width:
        return [text]
    if kind is CellWrapping.TEXT:
        return textwrap.wrap(text, width, break_on_hyphens=False)
    return wrap_list(text, width) if kind is CellWrapping.LIST else list(_wrap_name(text, width))


def wrap_list(text: str, width: int) -> list[str]:
    """A list in lines, broken behind commas and blanks only."""
    lines: list[str] = []
    for part in text.replace(",", ",\0").replace(" ", " \0").split("\0"):
        if lines and cell_width((lines[-1] + part).rstrip()) <= width:
            lines[-1] += part
        else:
            lines.append(part)
    return [line.rstrip() for line in lines]


def _wrap_name(text: str, width: int) -> Iterator[str]:
    """A name in lines, broken behind a hyphen where that leaves a long one."""
    while cell_width(text) > width:
        end = 1
        while cell_width(text[: end + 1]) <= width:
            end += 1
        hyphen = text.rfind("-", 0, end) + 1
        if hyphen > end // 2:
            end = hyphen
        yield text[:end]
        text = text[end:]
    yield text


# --- Amounts ------------------------------------------------------------------------------------


def human_duration(seconds: float) -> str:
    """``42s``, ``7m``, ``3h12m``, ``9d4h``."""
    total = max(0, int(seconds))
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if total >= size:
            rest = total % size // part
            return f"{total // size}{unit}{rest}{below}" if rest else f"{total // size}{unit}"
    return f"{total // 60}m" if total >= 60 else f"{total}s"


def human_age(moment: float, now: float) -> str:
    """How long ago that was; a dash for never."""
    return human_duration(now - moment) if moment else "-"
