"""Which containers that are not as they should be are put right, and which are left. Pure.

One that is rewritten again and again is not fought for ever (docs/adr/0012-drift.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nri_numa.engine.desired import Drift


class RepairPlan(NamedTuple):
    """What is to be done about containers that are not as they should be.

    Attributes:
        drifted: what another program changed.
        abandoned: of these, those that were repaired so often lately that they are left.
        writes: what is to be written, late ones too.
    """

    drifted: list[Drift]
    abandoned: list[Drift]
    writes: list[Drift]


def plan_repairs(
    drifts: Sequence[Drift],
    *,
    undelivered: Collection[str],
    updating: Collection[str],
    exhausted: Collection[str],
    observe: bool,
    may_repair: bool,
) -> RepairPlan:
    """Tell drift from what is only ``late`` or being updated, and choose what to write.

    Drift of those that are ``exhausted``, because they were repaired so often lately, is left.
    Those that are late are written even where drift may not be repaired (``may_repair``): while the
    runtime cannot be reached. Nothing is with ``observe``.
    """
    excused = {*undelivered, *updating}
    drifted = [d for d in drifts if d.container_id not in excused]
    writable = [d for d in drifts if not (d.is_report_only or observe)]
    abandoned = [
        d for d in writable if d.container_id in exhausted and d.container_id not in excused
    ]
    ids = {d.container_id for d in abandoned}
    writes = [
        d
        for d in writable
        if d.container_id not in ids and (may_repair or d.container_id in undelivered)
    ]
    return RepairPlan(drifted, abandoned, writes)
