"""Choice of the drifting containers that are repaired, and of those that are left. Pure.

Repairs of a container that is rewritten repeatedly are abandoned (docs/adr/0012-drift.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nri_numa.engine.desired import Drift


class DriftRepairPlan(NamedTuple):
    """Plan for containers that differ from the node state.

    Attributes:
        drifted: containers that another program changed.
        abandoned: drifted containers that were repaired too often lately.
        writes: corrections to write, undelivered updates too.
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
) -> DriftRepairPlan:
    """Separate drift from ``undelivered`` and running updates, and choose what to write.

    Drift of ``exhausted`` containers, which were repaired too often lately, is left. Undelivered
    updates are written even if drift may not be repaired (``may_repair``), which is the case while
    the runtime cannot be reached. With ``observe`` nothing is written.
    """
    drifted = [d for d in drifts if d.container_id not in {*undelivered, *updating}]
    writable = [d for d in drifts if not (d.is_report_only or observe)]
    abandoned = [d for d in writable if d in drifted and d.container_id in exhausted]
    writes = [
        d for d in writable if d not in abandoned and (may_repair or d.container_id in undelivered)
    ]
    return DriftRepairPlan(drifted, abandoned, writes)
