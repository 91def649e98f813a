"""The arithmetic of the race bed: from what was seen of some processes to milliseconds and tables.

Pure: no clock, no files. Times are seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from nri_numa.model.cpuset import CPUSet
from tests.checks.churn_figures import seconds, union


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a process was allowed to run on at a moment.

    Attributes:
        at: when, in seconds.
    """

    at: float
    cpus: CPUSet


def wrong_intervals(
    track: Sequence[Sighting], owned: CPUSet, begin: float, end: float, *, sure: bool = False
) -> list[tuple[float, float]]:
    """When one process was allowed on owned CPUs.

    `sure`: count from one wrong sighting to the next wrong one, at least that long it was wrong.
    Otherwise a sighting holds until the next one, whatever that shows: at most that long.

    Returns:
        Intervals within `begin` and `end`, in order, none empty.
    """
    found = []
    for sighting, following in pairwise([*track, None]):
        assert sighting is not None
        if sure and (following is None or not following.cpus & owned):
            continue
        since = max(sighting.at, begin)
        until = end if following is None else min(following.at, end)
        if since < until and sighting.cpus & owned:
            found.append((since, until))
    return found


def overlap_ms(
    tracks: Iterable[Sequence[Sighting]],
    owned: CPUSet,
    begin: float,
    end: float,
    *,
    sure: bool = False,
) -> float:
    """Milliseconds during which at least one process was allowed on owned CPUs.

    `begin`: since when they are owned, in seconds.
    `end`: until when somebody looked, in seconds.
    `sure`: at least, instead of at most, as in `wrong_intervals`.
    """
    intervals = union(
        interval
        for track in tracks
        for interval in wrong_intervals(track, owned, begin, end, sure=sure)
    )
    return seconds(intervals) * 1000


def longest_gap_ms(track: Sequence[Sighting]) -> float:
    """The longest time without a look at a process, in milliseconds; 0 with fewer than two."""
    return max((b.at - a.at for a, b in pairwise(track)), default=0.0) * 1000


@dataclass(slots=True, kw_only=True)
class Round:
    """What one round showed.

    Attributes:
        wrong_ms: time a neighbour was allowed on owned CPUs, since the owner's first instruction;
            at most, a sighting holds until the next one.
        error: why it counts for nothing; empty when it counts.
    """

    series: str
    mode: str
    variant: str
    wrong_ms: float = 0.0
    sure_ms: float = 0.0
    first_lines_created_after: int = 0
    owner_wrong: bool = False
    gap_ms: float = 0.0
    seconds: float = 0.0
    error: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)


_HEAD: Final = (
    "containerd, mode",
    "rounds",
    "failed",
    "wrong at all",
    "created after the grant and wrong",
    "owner wrong",
    "most ms",
    "most sure ms",
)


def table(rounds: Sequence[Round]) -> str:
    """A Markdown table, a row for each series and mode, then for each variant of them."""
    groups: dict[str, list[Round]] = {}
    for one in rounds:
        groups.setdefault(f"{one.series}, {one.mode}", []).append(one)
    for one in rounds:
        groups.setdefault(f"{one.series}, {one.mode}: {one.variant}", []).append(one)
    lines = [_HEAD, ["---"] * len(_HEAD), *(_row(label, group) for label, group in groups.items())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _row(label: str, rounds: Sequence[Round]) -> list[str]:
    good = [one for one in rounds if not one.error]
    return [
        label,
        str(len(good)),
        str(len(rounds) - len(good)),
        str(sum(one.wrong_ms > 0 for one in good)),
        str(sum(one.first_lines_created_after > 0 for one in good)),
        str(sum(one.owner_wrong for one in good)),
        f"{max((one.wrong_ms for one in good), default=0.0):.0f}",
        f"{max((one.sure_ms for one in good), default=0.0):.0f}",
    ]
