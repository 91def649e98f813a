"""Figures of repeated rounds, and what may be said of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nri_numa.measure.plan import Comparison, NotShown


@dataclass(frozen=True, slots=True)
class Measured:
    """A comparison with its figures.

    Attributes:
        comparison: what was compared.
        good, bad: the figures of each round, in its unit; as many of each, one at least.
    """

    comparison: Comparison
    good: tuple[float, ...]
    bad: tuple[float, ...]

    @property
    def gain(self) -> float:
        """How many times better the good placement is, by the medians."""
        good, bad = statistics.median(self.good), statistics.median(self.bad)
        better, worse = (good, bad) if self.comparison.more_is_better else (bad, good)
        return better / worse if worse else float("inf")

    @property
    def clear(self) -> bool:
        """Whether every round of one placement is better than every round of the other."""
        return max(self.good) < min(self.bad) or max(self.bad) < min(self.good)


Outcome = Measured | NotShown


def spread(figures: Sequence[float]) -> float:
    """Per cent of the median that the rounds lie apart."""
    middle = statistics.median(figures)
    return 100 * (max(figures) - min(figures)) / middle if middle else 0.0


def document(outcomes: Sequence[Outcome], noise: Sequence[str], at: str) -> dict[str, Any]:
    """All of it as a document.

    Args:
        outcomes: in the order in which they are shown.
        noise: what disturbed the machine meanwhile, as sentences.
        at: date and time of the measurement.
    """
    shown = [one for one in outcomes if isinstance(one, Measured)]
    return {
        "at": at,
        "comparisons": [
            {
                "name": one.comparison.name,
                "title": one.comparison.title,
                "unit": one.comparison.unit,
                "moreIsBetter": one.comparison.more_is_better,
                "good": _side(one.comparison.good.placed, one.good),
                "bad": _side(one.comparison.bad.placed, one.bad),
                "gain": round(one.gain, 3),
                "clear": one.clear,
            }
            for one in shown
        ],
        "notShown": [
            {"name": one.name, "title": one.title, "because": one.because}
            for one in outcomes
            if isinstance(one, NotShown)
        ],
        "noise": list(noise),
    }


def _side(placed: str, figures: Sequence[float]) -> dict[str, Any]:
    return {
        "placed": placed,
        "median": _short(statistics.median(figures)),
        "least": _short(min(figures)),
        "most": _short(max(figures)),
        "spreadPercent": round(spread(figures), 1),
        "rounds": [_short(figure) for figure in figures],
    }


def _short(value: float) -> float:
    """Four digits: more than any of these figures is worth."""
    return float(f"{value:.4g}")


def noisy(
    *,
    load: float,
    cpus: int,
    steal: float | None,
    outcomes: Sequence[Outcome],
    busy: float | None,
) -> tuple[str, ...]:
    """What makes the figures doubtful, as sentences; nothing when the machine was quiet.

    Args:
        load: load average of the last minute before it began.
        cpus: CPUs of the machine.
        steal: part of the CPU time that the host gave to others meanwhile; None where the kernel
            does not tell.
        outcomes: whose rounds may differ.
        busy: part of the CPUs' time that others used just before it began; None when not known.
    """
    found = []
    if busy is not None and busy > 0.1:
        found.append(f"the CPUs that were used were {busy:.0%} busy with something else before")
    if load > 0.25 * cpus:
        found.append(f"the load average was {load:.1f} on {cpus} CPUs when it began")
    if steal is not None and steal > 0.005:
        found.append(f"the host took {steal:.1%} of the CPU time for others (steal)")
    for one in outcomes:
        if isinstance(one, Measured):
            for side, figures in (("good", one.good), ("bad", one.bad)):
                if (apart := spread(figures)) > 15:
                    found.append(
                        f"rounds of {one.comparison.name} ({side} side) differ by {apart:.0f} %"
                    )
    return tuple(found)
