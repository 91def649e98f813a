"""Figures of repeated rounds and the statements that they support. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final, NamedTuple

import msgspec

from nri_numa.measure.plan import Comparison, ImpossibleComparison


class MeasuredComparison(msgspec.Struct, frozen=True):
    """Comparison with the figures of each round: as many for each side, at least one."""

    comparison: Comparison
    good_values: tuple[float, ...]
    bad: tuple[float, ...]

    @property
    def gain_factor(self) -> float:
        """Factor by which the good placement is better, by the medians."""
        medians = statistics.median(self.good_values), statistics.median(self.bad)
        dividend, divisor = medians if self.comparison.higher_is_better else medians[::-1]
        return dividend / divisor if divisor else float("inf")

    @property
    def is_conclusive(self) -> bool:
        """True if every round of one placement is better than every round of the other."""
        return max(self.good_values) < min(self.bad) or max(self.bad) < min(self.good_values)


MeasuredOrImpossibleComparison = MeasuredComparison | ImpossibleComparison


def spread_percent(figures: Sequence[float]) -> float:
    """Return the range of the rounds in per cent of their median."""
    middle = statistics.median(figures)
    return 100 * (max(figures) - min(figures)) / middle if middle else 0.0


def results_document(
    outcomes: Sequence[MeasuredOrImpossibleComparison], noise: Sequence[str], measured_at: str
) -> dict[str, Any]:
    """Build the document of all outcomes, `noise_sentences` and the time of the measurement."""
    return {
        "at": measured_at,
        "comparisons": [
            {
                "name": outcome.comparison.name,
                "title": outcome.comparison.title,
                "unit": outcome.comparison.unit,
                "moreIsBetter": outcome.comparison.higher_is_better,
                "good": _side_document(outcome.comparison.good_side.placed, outcome.good_values),
                "bad": _side_document(outcome.comparison.bad.placed, outcome.bad),
                "gain": round(outcome.gain_factor, 3),
                "clear": outcome.is_conclusive,
            }
            for outcome in outcomes
            if isinstance(outcome, MeasuredComparison)
        ],
        "notShown": [
            msgspec.to_builtins(o) for o in outcomes if isinstance(o, ImpossibleComparison)
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
    """Round to four significant digits; no figure here is more precise."""
    return float(f"{value:.4g}")


def noise_sentences(
    *,
    load: float,
    cpus: int,
    steal: float | None,
    outcomes: Sequence[MeasuredOrImpossibleComparison],
    usage: float | None,
) -> tuple[str, ...]:
    """List what makes the figures doubtful, as sentences; empty if the machine was idle.

    ``load`` is the load average of the last minute on ``cpus`` CPUs. ``steal`` is the part of the
    CPU time that the host gave to other guests meanwhile, ``usage`` the part that other programs
    used just before; None if unknown.
    """
    noise = []
    if usage is not None and usage > 0.1:
        noise.append(f"the CPUs that were used were {usage:.0%} busy with something else before")
    if load > 0.25 * cpus:
        noise.append(f"the load average was {load:.1f} on {cpus} CPUs when it began")
    if steal is not None and steal > 0.005:
        noise.append(f"the host took {steal:.1%} of the CPU time for others (steal)")
    for o in outcomes:
        if isinstance(o, MeasuredComparison):
            for side, figures in (("good", o.good_values), ("bad", o.bad)):
                if (percent := spread_percent(figures)) > 15:
                    noise.append(
                        f"rounds of {o.comparison.name} ({side} side) differ by {percent:.0f} %"
                    )
    return tuple(noise)


# --- Figures as a drawing: an SVG text with bars. Pure --------------------------------------------


_DRAWING_WIDTH_PX: Final = 760
_LEFT_MARGIN_PX: Final = 16
_BAR_HEIGHT_PX: Final = 18
_MAX_BAR_PX: Final = 420
"""Pixels of the longest bar."""
GOOD_COLOR: Final = "#2a6f4e"
BAD_COLOR: Final = "#b4532a"
_INK_COLOR, _QUIET_COLOR = "#1b1f23", "#57606a"


class Bar(NamedTuple):
    """Bar with its label below it and a line from minimum to maximum across it."""

    label: str
    value: float
    min_value: float
    max_value: float
    colour: str


class Chart(NamedTuple):
    """Bars that are compared with each other, and a remark to the right of the last bar."""

    title: str
    bars: Sequence[Bar]
    remark: str = ""


def render_charts_svg(
    charts: Sequence[Chart], notes: Iterable[tuple[str, str]], *, title: str, about: str, foot: str
) -> str:
    """Draw charts one below the other, then notes in their colours; each chart has one scale.

    ``title`` and ``about`` are for readers who cannot see the drawing. ``foot`` names the program
    and the time.
    """
    elements: list[str] = []
    y = 34
    for chart in charts:
        max_value = max((bar.max_value for bar in chart.bars), default=0) or 1
        elements.append(_svg_text(_LEFT_MARGIN_PX, y, chart.title, 14, _INK_COLOR, bold=True))
        y += 12
        for bar in chart.bars:
            length, min_px, max_px = (
                _MAX_BAR_PX * x / max_value for x in (bar.value, bar.min_value, bar.max_value)
            )
            middle = y + _BAR_HEIGHT_PX / 2
            elements.append(
                f'<rect x="{_LEFT_MARGIN_PX}" y="{y}" width="{length:.1f}" '
                f'height="{_BAR_HEIGHT_PX}" fill="{bar.colour}"/>'
                f'<path d="M{_LEFT_MARGIN_PX + min_px:.1f} {middle:.1f}'
                f'H{_LEFT_MARGIN_PX + max_px:.1f}" stroke="{_INK_COLOR}" stroke-width="1.5"/>'
            )
            elements.append(
                _svg_text(_LEFT_MARGIN_PX, y + _BAR_HEIGHT_PX + 13, bar.label, 12, _QUIET_COLOR)
            )
            y += _BAR_HEIGHT_PX + 20
        if chart.remark:
            elements.append(
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
            elements.append(_svg_text(_LEFT_MARGIN_PX, y, line, 12, colour))
            y += 15
        y += 6
    elements.append(_svg_text(_LEFT_MARGIN_PX, y + 4, foot, 11, _QUIET_COLOR))
    height = y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_DRAWING_WIDTH_PX} {height}" '
        f'width="{_DRAWING_WIDTH_PX}" height="{height}" font-family="sans-serif" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f"<desc>{escape(about)}</desc>\n"
        f'<rect width="{_DRAWING_WIDTH_PX}" height="{height}" fill="#fff"/>\n'
        + "\n".join(elements)
        + "\n</svg>\n"
    )


def gain_text(comparison: Mapping[str, Any]) -> str:
    """State the gain of a comparison in `results_document`."""
    if not comparison["clear"]:
        return "no clear difference: the rounds of the two overlap"
    return f"{comparison['gain']:.2f} times as {'much' if comparison['moreIsBetter'] else 'fast'}"


def render_results_svg(document: Mapping[str, Any]) -> str:
    """Draw a `results_document`: two bars with their spread for each comparison."""
    charts = []
    for row in document["comparisons"]:
        bars = [
            Bar(
                f"{row[side]['median']:g} {row['unit']}: {row[side]['placed']}",
                row[side]["median"],
                row[side]["least"],
                row[side]["most"],
                colour,
            )
            for side, colour in (("good", GOOD_COLOR), ("bad", BAD_COLOR))
        ]
        charts.append(Chart(row["title"], bars, gain_text(row)))
    notes = [
        *(
            (f"Not shown: {row['title']}\nbecause {row['because']}", _QUIET_COLOR)
            for row in document["notShown"]
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
