"""Which containers that are not as they should be are put right, and which are left. Pure.

One that is rewritten again and again is not fought for ever (docs/adr/0012-drift.md): after a
number of repairs within `REPAIR_COUNT_WINDOW_S` it is left until the window has passed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from nri_numa.engine.desired import Drift

REPAIR_COUNT_WINDOW_S: Final = 600.0
"""Seconds in which repairs of one container are counted."""


class RepairHistory:
    """When containers were repaired, in monotonic seconds."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def add(self, container_id: str, now: float) -> None:
        """It was repaired now."""
        self._times[container_id] = [*self._recent(container_id, now), now]

    def count(self, container_id: str, now: float) -> int:
        """How often it was repaired within the window."""
        return len(self._recent(container_id, now))

    def retain(self, drifting: Collection[str], live: Collection[str], now: float) -> None:
        """Drop those that are right again for a whole window, or are gone."""
        self._times = {
            i: times
            for i, times in self._times.items()
            if i in drifting or (i in live and self._recent(i, now))
        }

    def _recent(self, container_id: str, now: float) -> list[float]:
        times = self._times.get(container_id, ())
        return [t for t in times if t > now - REPAIR_COUNT_WINDOW_S]

    def __contains__(self, container_id: str) -> bool:
        return container_id in self._times


class RepairPlan(msgspec.Struct, frozen=True):
    """What is to be done about containers that are not as they should be.

    Attributes:
        drifted: what another program changed.
        abandoned: of these, those that were repaired so often lately that they are left.
        writes: what is to be written, late ones too.
    """

    drifted: Sequence[Drift]
    abandoned: Sequence[Drift]
    writes: Sequence[Drift]


def plan_repairs(
    found: Sequence[Drift],
    history: RepairHistory,
    now: float,
    *,
    late: Collection[str],
    updating: Collection[str],
    max_repairs: int,
    observe: bool,
    may_repair: bool,
) -> RepairPlan:
    """Tell drift from what is only ``late`` or being updated, and choose what to write.

    Those that are late are written even where drift may not be repaired (``may_repair``): while the
    runtime cannot be reached. Nothing is with ``observe``.
    """
    excused = {*late, *updating}
    drifted = [d for d in found if d.container_id not in excused]
    writable = [d for d in found if not (d.is_report_only or observe)]
    abandoned = [
        d
        for d in writable
        if d.container_id not in excused and history.count(d.container_id, now) >= max_repairs
    ]
    ids = {d.container_id for d in abandoned}
    writes = [
        d for d in writable if d.container_id not in ids and (may_repair or d.container_id in late)
    ]
    return RepairPlan(drifted, abandoned, writes)
