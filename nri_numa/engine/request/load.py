"""How busy a container is, and when: the text form of `nri_numa.engine.values.workload.Load`."""

from __future__ import annotations

import re

from nri_numa.engine.values.workload import HIGH, LOW, Load

_DAY = 1440  # minutes
_HOURS = re.compile(r"([0-9]{2}):([0-9]{2})-([0-9]{2}):([0-9]{2})", re.ASCII)
_EXPECTED = (
    "expected high, low, or daily peak hours such as 09:00-18:00, several separated by commas"
)


def parse_load(text: str) -> Load:
    """Read ``high``, ``low``, or peak hours: ``09:00-18:00``, ``22:00-06:00,12:00-13:00``.

    Hours are wall-clock times of the node. An interval that ends before it starts goes on past
    midnight; ``24:00`` may end one. Overlapping and touching intervals are joined, so equal hours
    give equal values however they were written.

    Raises:
        ValueError: names the offending part and what was expected.
    """
    if text == "high":
        return HIGH
    if text == "low":
        return LOW
    busy: list[tuple[int, int]] = []
    for item in text.split(","):
        start, end = _interval(item, text)
        if start < end:
            busy.append((start, end))
        else:
            busy += [(start, _DAY), (0, end)] if end else [(start, _DAY)]
    return Load(_joined(busy))


def format_load(load: Load) -> str:
    """Write a load so that `parse_load` reads the same value back."""
    if load == HIGH:
        return "high"
    if load == LOW:
        return "low"
    return ",".join(f"{a // 60:02}:{a % 60:02}-{b // 60:02}:{b % 60:02}" for a, b in load.busy)


def _interval(item: str, text: str) -> tuple[int, int]:
    match = _HOURS.fullmatch(item)
    if match is None:
        where = f" in {text!r}" if item != text else ""
        raise ValueError(f"load {item!r}{where}: {_EXPECTED}")
    h1, m1, h2, m2 = (int(g) for g in match.groups())
    start, end = h1 * 60 + m1, h2 * 60 + m2
    if m1 > 59 or m2 > 59 or start >= _DAY or end > _DAY:
        raise ValueError(f"load {item!r}: expected times from 00:00 to 24:00")
    if start == end:
        raise ValueError(f"load {item!r}: starts when it ends; expected high for the whole day")
    return start, end


def _joined(busy: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(busy):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return tuple(joined)
