"""Numbers out of samples, and tables out of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Least, middle and 99th of a hundred; in the unit of the samples."""

    least: float
    p50: float
    p99: float
    count: int


def summary(samples: Iterable[float]) -> Summary:
    ordered = sorted(samples)
    return Summary(
        least=ordered[0],
        p50=quantile(ordered, 0.5),
        p99=quantile(ordered, 0.99),
        count=len(ordered),
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """The nearest rank, so that a p99 is a value that was really seen."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, its columns aligned so that a terminal shows it well too."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max([len(name), 3, *(len(row[i]) for row in cells)]) for i, name in enumerate(head)]

    def line(parts: Sequence[str]) -> str:
        padded = [
            part.ljust(width) if i == 0 else part.rjust(width)
            for i, (part, width) in enumerate(zip(parts, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join(
        "-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)
    )
    return "\n".join([line(list(head)), f"|{rule}|", *map(line, cells)])


def us(seconds: float) -> str:
    """Seconds as whole microseconds."""
    return f"{seconds * 1e6:.0f}"


def ms(seconds: float, digits: int = 1) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.{digits}f}"
