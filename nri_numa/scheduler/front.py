"""NUMA nodes of one table that may come first for some pod: worked out once, not for each pod.

What is left and what there is belong to the node alone, so shares are divided when a table is first
looked at. What they say is what the engine says in whole parts of 2^40
(`nri_numa.engine.place.computed.measures`), or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from nri_numa.engine.values.workload import Strategy

_MARGIN: Final = 1e-11
"""Shares that differ by more differ in whole 2^-40 too; rounding of floats is far below."""
_EXACT: Final = 1 << 50
"""Up to here floats are exact; no machine has more."""


class Place(NamedTuple):
    """One NUMA node, in the order in which it is read.

    Attributes:
        free: CPUs that can be exclusive, or thousandths of CPUs: what the front is of.
        bytes_: of memory that is left.
        cpu_used: share of CPUs that is in use.
        cpu_each: share that one more is.
        memory_used: share of memory that is in use.
        memory_each: share that one more byte is.
        milli: thousandths of a CPU that are left.
        milli_there: that there are.
        bytes_there: bytes of memory that there are.
        factor: capacity factor in thousandths.
    """

    free: int
    bytes_: int
    cpu_used: float
    cpu_each: float
    memory_used: float
    memory_each: float
    milli: int
    milli_there: int
    bytes_there: int
    factor: int


Front = tuple[Place, ...]
Pair = tuple[Sequence[int], Sequence[int]]
"""What is left and what there is, by NUMA node."""
_STRATEGIES: Final = tuple(Strategy)
FRONTS: Final = 2 * len(_STRATEGIES)
"""Fronts of one table."""


def front_index(exclusive: bool, strategy: Strategy) -> int:
    """Which of the fronts of a table it is, of exclusive CPUs or of shared ones."""
    return 2 * _STRATEGIES.index(strategy) + exclusive


def front_of(
    cpus: Pair, milli: Pair, memory: Pair, factor: Sequence[int], strategy: Strategy
) -> Front | None:
    """NUMA nodes that come first for some pod that asks for CPUs and memory, ascending.

    Args:
        cpus: exclusive ones, or thousandths: what is asked for.
        milli: thousandths.
        memory: bytes.
        factor: in thousandths.
        strategy: which comes first. With ``pack`` any may; else one that has less than another one
            in every respect never does.

    Returns:
        None where the numbers are no machine's.
    """
    columns = (*cpus, *milli, *memory)
    if max(map(max, columns)) > _EXACT:
        return None
    rows = [  # with nothing of something no such pod fits
        (*row, share)
        for row, share in zip(zip(*columns, strict=True), factor, strict=True)
        if min(row) > 0
    ]
    kept: list[Place] = []
    for index, (free, of, left, whole, bytes_, there, share) in enumerate(rows):
        own = free, of, bytes_, there
        before = [(row[0], row[1], row[4], row[5]) for row in rows[:index]]
        after = [(row[0], row[1], row[4], row[5]) for row in rows[index + 1 :]]
        if strategy is Strategy.PACK:
            if own in before:
                continue
        elif any(_better(one, own) for one in before) or any(
            _better(one, own) and _clearly(one, own) for one in after
        ):
            continue
        kept.append(
            Place(
                free, bytes_, 1 - free / of, 1 / of, 1 - bytes_ / there, 1 / there,
                left, whole, there, share,
            )
        )  # fmt: skip
    return tuple(kept)


def first_of(fit: Sequence[Place], cpus: int, bytes_: int, strategy: Strategy) -> Place | None:
    """Which of those with room comes first; None where shares are too near to say it.

    Args:
        fit: some.
        cpus: that are asked for.
        bytes_: likewise.
        strategy: that `front_of` was asked with.
    """
    if strategy is Strategy.MOST_LEFT:
        return max(fit, key=lambda one: (one.bytes_, one.free))  # of equal ones the first
    found, pack = fit[0], strategy is Strategy.PACK
    used, each = found[2], found[3]
    cpu, memory = used + cpus * each, found[4] + bytes_ * found[5]
    for one in fit[1:]:
        its_used, its_each = one[2], one[3]
        its_cpu, its_memory = its_used + cpus * its_each, one[4] + bytes_ * one[5]
        if its_used == used and its_each == each:
            less = memory - its_memory
        else:
            less = (cpu if cpu > memory else memory) - (
                its_cpu if its_cpu > its_memory else its_memory
            )
        if -_MARGIN <= less <= _MARGIN:
            return None
        if (less < 0) is pack:
            found, used, each, cpu, memory = one, its_used, its_each, its_cpu, its_memory
    return found


_Four = tuple[int, int, int, int]
"""CPUs left and there, bytes left and there."""


def _better(one: _Four, other: _Four) -> bool:
    """Whether each share in use is as small or smaller, whatever is asked that both have.

    Shares grow evenly with what is asked, so they are compared where nothing is asked and where all
    is that the other one has.
    """
    free, of, bytes_, there = one
    its_free, its_of, its_bytes, its_there = other
    return (
        free >= its_free
        and bytes_ >= its_bytes
        and free * its_of >= its_free * of
        and bytes_ * its_there >= its_bytes * there
    )


def _clearly(one: _Four, other: _Four) -> bool:
    """Of one that is better: a share is smaller by so much that no rounding makes both equal."""
    free, of, bytes_, there = one
    its_free, its_of, its_bytes, its_there = other
    return (
        min(free / of - its_free / its_of, (free - its_free) / of) > _MARGIN
        or min(bytes_ / there - its_bytes / its_there, (bytes_ - its_bytes) / there) > _MARGIN
    )
