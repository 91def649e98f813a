"""How well a node suits a pod that fits there."""

from __future__ import annotations

from typing import Final

from nri_numa.engine.values.workload import Strategy
from nri_numa.scheduler.verdict import Short, Verdict

MOST_SCORE: Final = 10
"""MaxExtenderPriority of kube-scheduler; it checks nothing."""
_WIDEST: Final = 128
"""Twice the NUMA nodes up to which fewer come first; no machine that is sold has so many."""
ONE_NUMA_NODE: Final = (_WIDEST - 2) << 4
"""The grade of one NUMA node without its score."""
SLACK: Final = 2
"""Of three points for room: as good is a node that is not left nearly full beside empty ones."""


def score(found: Verdict, strategy: Strategy) -> int:
    """0 to 10, for a verdict; see `grade`."""
    return score_of(graded(found, strategy))


def graded(found: Verdict, strategy: Strategy) -> int:
    """The grade of a verdict; 0 for what does not fit, or has nothing that is aligned."""
    if isinstance(found, Short) or not found.width:
        return 0
    return grade(found.width, found.wider, found.left, found.factor, strategy)


def score_of(grade: int) -> int:
    """The score in a grade, 0 to 10."""
    return grade & 15


def narrowest(grade: int, strategy: Strategy) -> int:
    """The least grade that is about as good as this one, which is the best.

    As many NUMA nodes, and a score at most `SLACK` lower; with ``pack`` the same score: what
    kube-scheduler prefers by itself are the emptier ones.
    """
    slack = 0 if strategy is Strategy.PACK else SLACK
    return max(grade & ~15, grade - slack)


def grade(width: int, wider: bool, left: int, factor: int, strategy: Strategy) -> int:
    """What nodes are compared by: fewer NUMA nodes before all else, then the score.

    The score, in the lowest four bits, is 0 to 10: six points for one NUMA node and two less for
    each more, one less where an empty machine would need fewer; up to three for NUMA nodes that are
    full afterwards (``pack``) or empty (otherwise); one for NUMA nodes with their whole capacity.

    Args:
        width: as in `nri_numa.scheduler.verdict.Fits`.
        wider: as there.
        left: as there.
        factor: as there.
        strategy: of the configuration.
    """
    wide = max(0, 6 - 2 * (width - 1) - wider)
    room = 1000 - left if strategy is Strategy.PACK else left
    first = max(0, _WIDEST - 2 * width - wider)
    return first << 4 | min(MOST_SCORE, (1000 * wide + 3 * room + factor + 500) // 1000)
