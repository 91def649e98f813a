"""How well a node suits a pod that fits there."""

from __future__ import annotations

from typing import Final

from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.verdict import Short, Verdict

MOST_SCORE: Final = 10
"""MaxExtenderPriority of kube-scheduler; it checks nothing."""


def score(found: Verdict, strategy: Strategy) -> int:
    """0 to 10, for a verdict; see `points`."""
    if isinstance(found, Short) or not found.width:
        return 0
    return points(found.width, found.wider, found.left, found.factor, strategy)


def points(width: int, wider: bool, left: int, factor: int, strategy: Strategy) -> int:
    """0 to 10: fewer NUMA nodes before all else, then how full they get, then their capacity.

    Six points for one NUMA node and two less for each more, one less where an empty machine would
    need fewer; up to three for NUMA nodes that are full afterwards (``pack``) or empty (otherwise);
    one for NUMA nodes with their whole capacity.

    Args:
        width: as in `nri_numa.scheduler.verdict.Fits`.
        wider: as there.
        left: as there.
        factor: as there.
        strategy: of the configuration.
    """
    wide = max(0, 6 - 2 * (width - 1) - wider)
    room = 1000 - left if strategy is Strategy.PACK else left
    return min(MOST_SCORE, (1000 * wide + 3 * room + factor + 500) // 1000)
