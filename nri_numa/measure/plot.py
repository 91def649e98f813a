"""Figures as a drawing: SVG text with bars that a person can paste. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

_WIDTH: Final = 760
_LEFT: Final = 16
_BAR: Final = 18
_SCALE: Final = 420
"""Pixels of the longest bar."""
GOOD: Final = "#2a6f4e"
BAD: Final = "#b4532a"
OTHER: Final = "#4a6fa5"
_INK, _QUIET = "#1b1f23", "#57606a"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        label: written below it.
        value: its length.
        least, most: ends of the line over it, which shows the spread.
        colour: of SVG.
    """

    label: str
    value: float
    least: float
    most: float
    colour: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars that are compared with each other.

    Attributes:
        title: above them.
        bars: from the top.
        remark: to the right of the last one.
    """

    title: str
    bars: Sequence[Bar]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Lines below the panels, the last with some room after it."""

    lines: Sequence[str]
    warning: bool = False


def drawing(
    panels: Sequence[Panel], notes: Sequence[Note], *, title: str, about: str, foot: str
) -> str:
    """Draw panels one below the other; bars of one panel have one scale.

    Args:
        panels: from the top.
        notes: below them.
        title: for those who cannot see it.
        about: what it shows, in a sentence, for them too.
        foot: who made it, and when.
    """
    pieces: list[str] = []
    y = 34
    for panel in panels:
        longest = max((bar.most for bar in panel.bars), default=0) or 1
        pieces.append(_text(_LEFT, y, panel.title, 14, _INK, bold=True))
        y += 12
        for bar in panel.bars:
            length, low, high = (_SCALE * x / longest for x in (bar.value, bar.least, bar.most))
            middle = y + _BAR / 2
            pieces.append(
                f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" '
                f'fill="{bar.colour}"/>'
                f'<path d="M{_LEFT + low:.1f} {middle:.1f}H{_LEFT + high:.1f}" stroke="{_INK}" '
                'stroke-width="1.5"/>'
            )
            pieces.append(_text(_LEFT, y + _BAR + 13, bar.label, 12, _QUIET))
            y += _BAR + 20
        if panel.remark:
            pieces.append(_text(_LEFT + _SCALE + 20, y - 40, panel.remark, 13, _INK, bold=True))
        y += 28
    for note in notes:
        for line in note.lines:
            pieces.append(_text(_LEFT, y, line, 12, BAD if note.warning else _QUIET))
            y += 15
        y += 3 if note.warning else 8
    pieces.append(_text(_LEFT, y + 4, foot, 11, _QUIET))
    height = y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f"<desc>{escape(about)}</desc>\n"
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def svg(document: Mapping[str, Any]) -> str:
    """Draw what `nri_numa.measure.results.document` made; two bars with spread for each."""
    panels = []
    for one in document["comparisons"]:
        bars = [
            Bar(
                f"{one[side]['median']:g} {one['unit']}: {one[side]['placed']}",
                one[side]["median"],
                one[side]["least"],
                one[side]["most"],
                colour,
            )
            for side, colour in (("good", GOOD), ("bad", BAD))
        ]
        gain = (
            f"{one['gain']:.2f} times {'as much' if one['moreIsBetter'] else 'as fast'}"
            if one["clear"]
            else "no clear difference: the rounds overlap"
        )
        panels.append(Panel(one["title"], bars, gain))
    notes = [
        Note((f"Not shown: {one['title']}", f"because {one['because']}"))
        for one in document["notShown"]
    ]
    notes += [Note((f"Noise: {sentence}",), warning=True) for sentence in document["noise"]]
    return drawing(
        panels,
        notes,
        title="What placement gains on this machine",
        about="For each comparison a bar for the better and one for the worse placement.",
        foot=f"nri-numa measure, {document['at']}",
    )


def _text(x: float, y: float, text: str, size: int, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>'
