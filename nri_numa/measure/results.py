"""Figures of repeated rounds, and what may be said of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import msgspec

from nri_numa.measure.plan import Comparison, ImpossibleComparison


class MeasuredComparison(msgspec.Struct, frozen=True):
    """A comparison with the figures of each round: as many of each side, one at least."""

    comparison: Comparison
    good_values: tuple[float, ...]
    bad: tuple[float, ...]

    @property
    def gain_factor(self) -> float:
        """How many times better the good placement is, by the medians."""
        good, bad = statistics.median(self.good_values), statistics.median(self.bad)
        better, worse = (good, bad) if self.comparison.higher_is_better else (bad, good)
        return better / worse if worse else float("inf")

    @property
    def is_conclusive(self) -> bool:
        """Whether every round of one placement is better than every round of the other."""
        return max(self.good_values) < min(self.bad) or max(self.bad) < min(self.good_values)


MeasuredOrImpossibleComparison = MeasuredComparison | ImpossibleComparison


def spread_percent(figures: Sequence[float]) -> float:
    """Per cent of the median that the rounds lie apart."""
    middle = statistics.median(figures)
    return 100 * (max(figures) - min(figures)) / middle if middle else 0.0


def results_document(
    outcomes: Sequence[MeasuredOrImpossibleComparison], noise: Sequence[str], at: str
) -> dict[str, Any]:
    """All of it as a document, with `noise_sentences` and the time of the measurement."""
    return {
        "at": at,
        "comparisons": [
            {
                "name": one.comparison.name,
                "title": one.comparison.title,
                "unit": one.comparison.unit,
                "moreIsBetter": one.comparison.higher_is_better,
                "good": _side_document(one.comparison.good_side.placed, one.good_values),
                "bad": _side_document(one.comparison.bad.placed, one.bad),
                "gain": round(one.gain_factor, 3),
                "clear": one.is_conclusive,
            }
            for one in outcomes
            if isinstance(one, MeasuredComparison)
        ],
        "notShown": [
            msgspec.to_builtins(one) for one in outcomes if isinstance(one, ImpossibleComparison)
        ],
        "noise": list(noise),
    }


def _side_document(placed: str, figures: Sequence[float]) -> dict[str, Any]:
    return {
        "placed": placed,
        "median": _round_to_four_digits(statistics.median(figures)),
        "least": _round_to_four_digits(min(figures)),
        "most": _round_to_four_digits(max(figures)),
        "spreadPercent": round(spread_percent(figures), 1),
        "rounds": [_round_to_four_digits(figure) for figure in figures],
    }


def _round_to_four_digits(value: float) -> float:
    """Four digits: more than any of these figures is worth."""
    return float(f"{value:.4g}")


def noise_sentences(
    *,
    load: float,
    cpus: int,
    steal: float | None,
    outcomes: Sequence[MeasuredOrImpossibleComparison],
    busy: float | None,
) -> tuple[str, ...]:
    """What makes the figures doubtful, as sentences; nothing when the machine was quiet.

    ``load`` is the load average of the last minute on so many CPUs. Parts of the CPU time that the
    host gave to others meanwhile (``steal``), and that others used just before, may not be known.
    """
    found = []
    if busy is not None and busy > 0.1:
        found.append(f"the CPUs that were used were {busy:.0%} busy with something else before")
    if load > 0.25 * cpus:
        found.append(f"the load average was {load:.1f} on {cpus} CPUs when it began")
    if steal is not None and steal > 0.005:
        found.append(f"the host took {steal:.1%} of the CPU time for others (steal)")
    for one in outcomes:
        if isinstance(one, MeasuredComparison):
            for side, figures in (("good", one.good_values), ("bad", one.bad)):
                if (apart := spread_percent(figures)) > 15:
                    found.append(
                        f"rounds of {one.comparison.name} ({side} side) differ by {apart:.0f} %"
                    )
    return tuple(found)


# --- Figures as a drawing: SVG text with bars that a person can paste. Pure -----------------------


_DRAWING_WIDTH_PX: Final = 760
_LEFT_MARGIN_PX: Final = 16
_BAR_HEIGHT_PX: Final = 18
_MAX_BAR_PX: Final = 420
"""Pixels of the longest bar."""
GOOD_COLOR: Final = "#2a6f4e"
BAD_COLOR: Final = "#b4532a"
_INK_COLOR, _QUIET_COLOR = "#1b1f23", "#57606a"


class Bar(NamedTuple):
    """One bar with its label below it, and the line from least to most over it."""

    label: str
    value: float
    min_value: float
    max_value: float
    colour: str


class Chart(NamedTuple):
    """Bars that are compared with each other, and a remark to the right of the last one."""

    title: str
    bars: Sequence[Bar]
    remark: str = ""


def render_charts_svg(
    charts: Sequence[Chart], notes: Iterable[tuple[str, str]], *, title: str, about: str, foot: str
) -> str:
    """Draw charts one below the other, then notes in their colours; a chart has one scale.

    Title and ``about`` are for those who cannot see it; ``foot`` says who made it, and when.
    """
    pieces: list[str] = []
    y = 34
    for chart in charts:
        longest = max((bar.max_value for bar in chart.bars), default=0) or 1
        pieces.append(_svg_text(_LEFT_MARGIN_PX, y, chart.title, 14, _INK_COLOR, bold=True))
        y += 12
        for bar in chart.bars:
            length, low, high = (
                _MAX_BAR_PX * x / longest for x in (bar.value, bar.min_value, bar.max_value)
            )
            middle = y + _BAR_HEIGHT_PX / 2
            pieces.append(
                f'<rect x="{_LEFT_MARGIN_PX}" y="{y}" width="{length:.1f}" '
                f'height="{_BAR_HEIGHT_PX}" fill="{bar.colour}"/>'
                f'<path d="M{_LEFT_MARGIN_PX + low:.1f} {middle:.1f}'
                f'H{_LEFT_MARGIN_PX + high:.1f}" stroke="{_INK_COLOR}" stroke-width="1.5"/>'
            )
            pieces.append(
                _svg_text(_LEFT_MARGIN_PX, y + _BAR_HEIGHT_PX + 13, bar.label, 12, _QUIET_COLOR)
            )
            y += _BAR_HEIGHT_PX + 20
        if chart.remark:
            pieces.append(
                _svg_text(
                    _LEFT_MARGIN_PX + _MAX_BAR_PX + 20,
                    y - 40,
                    chart.remark,
                    13,
                    _INK_COLOR,
                    bold=True,
                )
            )
        y += 28
    for text, colour in notes:
        for line in text.split("\n"):
            pieces.append(_svg_text(_LEFT_MARGIN_PX, y, line, 12, colour))
            y += 15
        y += 6
    pieces.append(_svg_text(_LEFT_MARGIN_PX, y + 4, foot, 11, _QUIET_COLOR))
    height = y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_DRAWING_WIDTH_PX} {height}" '
        f'width="{_DRAWING_WIDTH_PX}" height="{height}" font-family="sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f"<desc>{escape(about)}</desc>\n"
        f'<rect width="{_DRAWING_WIDTH_PX}" height="{height}" fill="#fff"/>\n'
        + "\n".join(pieces)
        + "\n</svg>\n"
    )


def gain_text(comparison: Mapping[str, Any]) -> str:
    """What may be said of a comparison in `results_document`."""
    if not comparison["clear"]:
        return "no clear difference: the rounds of the two overlap"
    return f"{comparison['gain']:.2f} times as {'much' if comparison['moreIsBetter'] else 'fast'}"


def render_results_svg(document: Mapping[str, Any]) -> str:
    """Draw what `nri_numa.measure.results.results_document` made; two bars with spread for each."""
    charts = []
    for one in document["comparisons"]:
        bars = [
            Bar(
                f"{one[side]['median']:g} {one['unit']}: {one[side]['placed']}",
                one[side]["median"],
                one[side]["least"],
                one[side]["most"],
                colour,
            )
            for side, colour in (("good", GOOD_COLOR), ("bad", BAD_COLOR))
        ]
        charts.append(Chart(one["title"], bars, gain_text(one)))
    notes = [
        *(
            (f"Not shown: {one['title']}\nbecause {one['because']}", _QUIET_COLOR)
            for one in document["notShown"]
        ),
        *((f"Noise: {sentence}", BAD_COLOR) for sentence in document["noise"]),
    ]
    return render_charts_svg(
        charts,
        notes,
        title="What placement gains on this machine",
        about="For each comparison a bar for the better and one for the worse placement.",
        foot=f"nri-numa measure, {document['at']}",
    )


def _svg_text(x: float, y: float, text: str, size: int, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>'
