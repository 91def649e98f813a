"""Thread siblings: which cores may give a thread to a container, and in which order.

Three modes take single threads core by core (``spread``, ``isolate``, ``pair``): `next_threads`
says which cores are the best kind that is left. ``full-core`` takes whole cores: `whole_cores`
lists the kinds and `counts_that_fit` how many of each add up to the request. CPU sets are plain
integers, see `nri_numa.engine.cpus.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nri_numa.engine.cpus.index import AllocatorIndex
from nri_numa.engine.values.workload import HIGH, SMT, Load
from nri_numa.machine.cpuset import CPUSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Partners:
    """CPUs of other containers, by what their load means beside ours.

    Attributes:
        opposite: one of the two is idle whenever the other is busy, and at least one is ever busy.
        idle: both are never busy.
        same: busy at some same minute.
    """

    opposite: int = 0
    idle: int = 0
    same: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """What single threads are chosen from.

    Attributes:
        index: the machine.
        free: every CPU that is free for exclusive use, wherever.
        own: CPUs of this container, those taken a moment ago included.
        prefer: CPUs to take before others.
        good_tick: CPUs with the preferred timer tick; all CPUs when there is no preference.
        good_kind: CPUs of the preferred core kind; all CPUs when there is no preference.
        partners: see `Partners`; for ``pair``.
    """

    index: AllocatorIndex
    free: int
    own: int
    prefer: int
    good_tick: int
    good_kind: int
    partners: Partners


def partners(load: Load | None, loads: Mapping[int, Load]) -> Partners:
    """Sort the CPUs of other containers by their load against ours; ours unknown counts as high."""
    ours = HIGH if load is None else load
    # The CPUs of one container carry the same object: comparing identities first saves hashing
    # and comparing intervals CPU by CPU.
    groups: dict[int, tuple[Load, list[int]]] = {}
    for cpu, theirs in loads.items():
        groups.setdefault(id(theirs), (theirs, []))[1].append(cpu)
    opposite = idle = same = 0
    for theirs, cpus in groups.values():
        bits = CPUSet(cpus).bits
        if ours.overlaps(theirs):
            same |= bits
        elif ours.busy or theirs.busy:
            opposite |= bits
        else:
            idle |= bits
    return Partners(opposite=opposite, idle=idle, same=same)


def next_threads(smt: SMT, threads: Threads, zone: int) -> int:
    """The best kind of CPUs in a zone, one for each core that is equally good; 0 when none is left.

    Order of cores, for ``spread`` and ``pair``: fewest threads of this container; a preferred CPU;
    then by who has the other threads (``spread``: fewest taken by others; ``pair``: only opposite
    loads, nobody, only never busy ones, unknown ones, same hours); then the preferred timer
    tick; then the preferred core kind. ``isolate`` takes only cores that are wholly free,
    preferred CPUs, ticks and kinds first.
    """
    index = threads.index
    cores = index.touched(zone)
    if smt is SMT.ISOLATE:
        cores &= index.whole(threads.free)
    elif threads.own:
        cores = _best(cores, index.by_count(threads.own))
    preferred = cores & index.touched(zone & threads.prefer)
    if preferred:
        cores, zone = preferred, zone & threads.prefer
    others = index.all & ~threads.free & ~threads.own
    if smt is SMT.SPREAD:
        cores = _best(cores, index.by_count(others))
    elif smt is SMT.PAIR:
        cores = _best(cores, _pair_classes(index, others, threads.partners))
    if threads.good_tick != index.all:
        best = zone & index.members(cores) & threads.good_tick
        cores, zone = (index.touched(best), best) if best else (cores, zone)
    cores = cores & index.touched(threads.good_kind) or cores
    return index.lowest_threads(cores, zone)


def _pair_classes(index: AllocatorIndex, others: int, known: Partners) -> Sequence[int]:
    same = index.touched(others & known.same)
    unknown = index.touched(others & ~known.same & ~known.opposite & ~known.idle)
    quiet = index.firsts & ~same & ~unknown
    opposite = quiet & index.touched(others & known.opposite)
    nobody = index.firsts & ~index.touched(others)
    return (opposite, nobody, quiet & ~opposite & ~nobody, unknown & ~same, same)


def _best(cores: int, classes: Iterable[int]) -> int:
    return next((found for c in classes if (found := cores & c)), 0)


@dataclass(frozen=True, slots=True)
class CoreClass:
    """Equally good whole cores (as lowest threads), each of which adds ``size`` CPUs."""

    cores: int
    size: int


def whole_cores(
    index: AllocatorIndex, free: int, own: int, tiers: Sequence[Callable[[int], int]]
) -> list[CoreClass]:
    """Cores that would belong wholly to the container, best classes first.

    Order: cores that the container has a part of; then tier by tier (each tier says which of some
    cores are good, and is compared before the next); then larger before smaller.
    """
    whole = index.whole(free | own) & index.touched(free)
    mine = whole & index.touched(own)
    groups = [mine, whole & ~mine]
    for good in tiers:
        groups = [part for g in groups for part in (good(g), g & ~good(g)) if part]
    adds = index.by_count(free)
    return [
        CoreClass(cores, size)
        for g in groups
        for size in range(index.threads, 0, -1)
        if (cores := g & adds[size])
    ]


def counts_that_fit(classes: Sequence[CoreClass], n: int) -> list[int] | None:
    """How many cores of each class make exactly ``n`` CPUs, as many as can be of earlier ones.

    Returns:
        One number for each class, or None when whole cores cannot make ``n``.
    """
    # reach[i]: bit s is set when classes i and later can make s CPUs.
    reach = [1]
    for c in reversed(classes):
        reach.append(_add(reach[-1], c))
    reach.reverse()
    if not reach[0] >> n & 1:
        return None
    counts = []
    for c, after in zip(classes, reach[1:], strict=True):
        count = min(c.cores.bit_count(), n // c.size)
        while not after >> (n - count * c.size) & 1:
            count -= 1
        counts.append(count)
        n -= count * c.size
    return counts


def nearest_counts(classes: Sequence[CoreClass], n: int) -> tuple[int, ...]:
    """The next lower and the next higher number of CPUs that whole cores make, where there are."""
    reach = 1
    for c in classes:
        reach = _add(reach, c)
    lower = (reach & ((1 << n) - 1)).bit_length() - 1
    higher = reach >> n + 1
    found = (lower,) if lower > 0 else ()
    return (*found, n + (higher & -higher).bit_length()) if higher else found


def _add(reach: int, c: CoreClass) -> int:
    """Sums that can be made with up to all cores of a class added to those that could before."""
    left, step = c.cores.bit_count(), 1
    while left:
        step = min(step, left)
        reach |= reach << step * c.size
        left -= step
        step *= 2
    return reach
