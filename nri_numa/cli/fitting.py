"""Tables that fit a width without losing what somebody has to copy from them.

A terminal is narrower than 64 NUMA nodes and names of 253 characters. What gives way, in this
order: lists of ids are broken at their commas; columns that can be missed are left out whole, the
last of them first; names are broken over several lines. Nothing is cut: a name that another command
takes is there to its last letter, and a word such as a policy's name is never broken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Final, NamedTuple

from nri_numa.cli.common import cell_width
from nri_numa.text import harmless

_GAP: Final = 2
_LIST: Final = 11
"""Columns below which a list of ids is not narrowed: ``100-103,120``."""
_NAME: Final = 8
"""Columns below which a name is not narrowed, unless that is all there is room for."""


class Kind(Enum):
    """What may be done to the cells of a column."""

    WORD = "never broken"
    LIST = "broken behind commas"
    NAME = "broken anywhere, behind a hyphen where there is one"


class Column(NamedTuple):
    """One column.

    Attributes:
        title: its heading.
        kind: how its cells may be broken.
        spare: 0 when it must be there; of the others the largest is left out first.
    """

    title: str
    kind: Kind = Kind.WORD
    spare: int = 0


class Fitted(NamedTuple):
    """A table that was made.

    Attributes:
        lines: heading and rows; a row may take several lines.
        left_out: titles of the columns for which there was no room, in their order.
    """

    lines: list[str]
    left_out: list[str]


def fit(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    width: int | None,
    *,
    leave_out: bool,
) -> Fitted:
    """Lay a table out.

    Args:
        columns: what stands above the cells.
        rows: cells, as many in each as there are columns.
        width: columns of the terminal; None for as wide as it gets.
        leave_out: columns that can be missed may be left out.

    Returns:
        The lines; wider than ``width`` only where words alone are.
    """
    cells = [[harmless(str(cell)) for cell in row] for row in rows]
    shown = list(range(len(columns)))
    natural = [
        max(cell_width(column.title), *(cell_width(row[i]) for row in cells), 1)
        for i, column in enumerate(columns)
    ]
    widths = list(natural)
    if width is not None:
        _narrow(columns, widths, shown, width, Kind.LIST, _LIST)
        for i in sorted(shown, key=lambda i: -columns[i].spare):
            if not leave_out or not columns[i].spare or _total(widths, shown) <= width:
                break
            shown.remove(i)
            # There may be room again for a list as it is.
            widths = list(natural)
            _narrow(columns, widths, shown, width, Kind.LIST, _LIST)
        _narrow(columns, widths, shown, width, Kind.NAME, _NAME)
        spelt = [1 if columns[i].kind is Kind.NAME else w for i, w in enumerate(widths)]
        if _total(spelt, shown) <= width:  # else breaking them to pieces helps nobody
            _narrow(columns, widths, shown, width, Kind.NAME, 1)
    lines: list[str] = []
    for row in ([c.title for c in columns], *cells):
        parts = [_broken(row[i], widths[i], columns[i].kind) for i in shown]
        for line in zip_longest(*parts, fillvalue=""):
            padded = (
                part + " " * (widths[i] - cell_width(part))
                for i, part in zip(shown, line, strict=True)
            )
            lines.append((" " * _GAP).join(padded).rstrip())
    return Fitted(lines, [c.title for i, c in enumerate(columns) if i not in shown])


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[i] for i in shown) + _GAP * (len(shown) - 1)


def _narrow(
    columns: Sequence[Column],
    widths: list[int],
    shown: Sequence[int],
    width: int,
    kind: Kind,
    least: int,
) -> None:
    """Take columns of a kind down, the widest and of those the last first, until it fits."""
    while _total(widths, shown) > width:
        able = [
            i
            for i in shown
            if columns[i].kind is kind
            and widths[i] > (least if least == 1 else max(least, len(columns[i].title)))
        ]
        if not able:
            return
        widths[max(able, key=lambda i: (widths[i], i))] -= 1


def _broken(text: str, width: int, kind: Kind) -> list[str]:
    """``text`` in lines of at most ``width`` columns, as far as its kind lets it be broken."""
    if kind is Kind.WORD or cell_width(text) <= width:
        return [text]
    if kind is Kind.LIST:
        lines: list[str] = []
        for part in text.replace(",", ",\0").split("\0"):
            if lines and cell_width(lines[-1] + part) <= width:
                lines[-1] += part
            else:
                lines.append(part)
        return lines
    lines = []
    while cell_width(text) > width:
        end = 1
        while cell_width(text[: end + 1]) <= width:
            end += 1
        hyphen = text.rfind("-", 0, end) + 1
        if hyphen > end // 2:
            end = hyphen
        lines.append(text[:end])
        text = text[end:]
    return [*lines, text]
