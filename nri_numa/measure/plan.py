"""Which comparisons a machine can show, and with which CPUs and NUMA nodes. Pure.

Each sets a good placement against a bad one that differs in one thing only. What a machine cannot
show is said with its reason, and the others are shown all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology, cpus_text, numa_text

LoopName = Literal["bandwidth", "latency", "compute", "cache", "busy"]

MIB: Final = 1 << 20
MIN_BUFFER_BYTES: Final = 64 * MIB
MAX_BUFFER_BYTES: Final = 1024 * MIB
_BUFFER_L3_FACTOR: Final = 4
"""A buffer of so many last-level caches is read from memory, and hardly from the cache."""
MAX_RING_BYTES: Final = 192 * MIB
"""Bytes that the ring of objects has at most: four million take seconds to make."""
_FREE_DIVISOR: Final = 8
"""One part in so many of what is free on a NUMA node is taken at most."""


class LoopWorker(Struct, frozen=True, kw_only=True):
    """A process that runs one loop over so many bytes; ``busy`` only takes time from others.

    A NUMA node of None leaves it to the kernel where the memory is.
    """

    loop: LoopName
    cpu: int
    numa_node: int | None = None
    size: int = 0


class ComparisonSide(Struct, frozen=True, kw_only=True):
    """One of the two placements, in words, with workers that run at the same time.

    The figures of those that are not ``busy`` are added up.
    """

    placed: str
    workers: tuple[LoopWorker, ...]


class Comparison(Struct, frozen=True, kw_only=True):
    """Two placements that differ in one thing; more is not better for times."""

    name: str
    title: str
    unit: str
    higher_is_better: bool = True
    good_side: ComparisonSide
    bad: ComparisonSide


class ImpossibleComparison(Struct, frozen=True, kw_only=True):
    """A comparison that this machine cannot show."""

    name: str
    title: str
    because: str


PlannedComparison = Comparison | ImpossibleComparison

_COMPARISON_TITLES_AND_UNITS: Final = {
    "memory-bandwidth": ("Copying memory: local against remote", "GB/s"),
    "memory-latency": ("One access to memory after the other: local against remote", "ns"),
    "siblings": ("Two programs that calculate: on two cores against on one", "Gflop/s"),
    "shared-l3": (
        "Two programs that need the cache: an L3 cache each against one together",
        "GB/s",
    ),
    "busy-neighbour": (
        "A program that calculates: alone on its CPU against beside a busy one",
        "Gflop/s",
    ),
}
"""Title and unit by name, in the order in which they are shown."""

SidesOrReason = tuple[ComparisonSide, ComparisonSide] | str
"""The good and the bad placement, or why there are none."""


def plan_comparisons(
    topology: Topology,
    usable: CPUSet,
    *,
    available: Mapping[int, int],
    l3_bytes: int,
) -> tuple[PlannedComparison, ...]:
    """What to compare on a machine with the CPUs that this process may run on.

    ``available`` are bytes that are free by NUMA node, ``l3_bytes`` those of the largest last-level
    cache, 0 when not known.
    """
    usable = usable & topology.online
    found = (
        *_memory_sides(topology, usable, available, l3_bytes),
        _sibling_sides(topology, usable),
        _cache_sides(topology, usable, l3_bytes),
        _busy_cpu_sides(usable),
    )
    return tuple(
        ImpossibleComparison(name=name, title=title, because=sides)
        if isinstance(sides, str)
        else Comparison(
            name=name,
            title=title,
            unit=unit,
            higher_is_better=unit != "ns",
            good_side=sides[0],
            bad=sides[1],
        )
        for (name, (title, unit)), sides in zip(
            _COMPARISON_TITLES_AND_UNITS.items(), found, strict=True
        )
    )


def _memory_sides(
    topology: Topology, usable: CPUSet, available: Mapping[int, int], l3_bytes: int
) -> tuple[SidesOrReason, SidesOrReason]:
    memory = topology.memory_nodes
    if len(memory) < 2:
        return (f"this machine has one NUMA node with memory, {numa_text(memory)}",) * 2
    # The farthest pair shows most; of equally far ones the lowest ids.
    pairs = [
        (-topology.distance(home, away), home, away)
        for home in sorted(memory)
        if topology.numa_nodes[home].cpus & usable
        for away in sorted(memory)
        if away != home
    ]
    if not pairs:
        return ("no CPU that may be used here is on a NUMA node with memory",) * 2
    distance, home, away = min(pairs)
    cpu = min(topology.numa_nodes[home].cpus & usable)
    wanted = min(max(MIN_BUFFER_BYTES, _BUFFER_L3_FACTOR * l3_bytes), MAX_BUFFER_BYTES)
    size = min(wanted, min(available.get(i, 0) for i in (home, away)) // _FREE_DIVISOR)
    if size < max(MIN_BUFFER_BYTES // 4, 2 * l3_bytes):
        return (
            f"{numa_text(str(home))} and {numa_text(str(away))} have too little free memory: "
            f"{max(MIN_BUFFER_BYTES // 4, 2 * l3_bytes) * _FREE_DIVISOR // MIB} MiB on each "
            "are needed",
        ) * 2

    def memory_side(loop: LoopName, numa_node: int) -> ComparisonSide:
        return ComparisonSide(
            placed=f"CPU {cpu} of {numa_text(str(home))}, memory of {numa_text(str(numa_node))}"
            + (f" at distance {-distance}" if numa_node == away else ""),
            workers=(LoopWorker(loop=loop, cpu=cpu, numa_node=numa_node, size=size),),
        )

    bandwidth = memory_side("bandwidth", home), memory_side("bandwidth", away)
    if 2 * l3_bytes > MAX_RING_BYTES:
        held = f"{l3_bytes // MIB} MiB holds most of what the loop can go through"
        return bandwidth, f"the L3 cache of {held}"
    return bandwidth, (memory_side("latency", home), memory_side("latency", away))


def _sibling_sides(topology: Topology, usable: CPUSet) -> SidesOrReason:
    cores = [(core, core.cpus & usable) for _, core in sorted(topology.cores.items())]
    pairs = [(core, cpus) for core, cpus in cores if len(cpus) > 1]
    if not pairs:
        return "no core has two CPUs that may be used here (no hyperthreads)"
    for core, cpus in pairs:
        first, second = sorted(cpus)[:2]
        for other, others in cores:
            # Alike in all but the core, so that nothing else differs.
            if (
                other.id != core.id
                and others
                and other.numa_node == core.numa_node
                and other.kind is core.kind
            ):
                apart = min(others)
                return (
                    _two_cpu_side("compute", first, apart, "two cores"),
                    _two_cpu_side("compute", first, second, "siblings of one core"),
                )
    return "no NUMA node has two cores of a kind that may be used here"


def _two_cpu_side(
    loop: LoopName, first: int, second: int, what: str, size: int = 0
) -> ComparisonSide:
    cpus = CPUSet((first, second))
    return ComparisonSide(
        placed=f"{cpus_text(cpus)}, {what}",
        workers=tuple(LoopWorker(loop=loop, cpu=cpu, size=size) for cpu in (first, second)),
    )


def _cache_sides(topology: Topology, usable: CPUSet, l3_bytes: int) -> SidesOrReason:
    groups = [g for _, g in sorted(topology.l3_groups.items()) if g.cpus & usable]
    if not groups or not l3_bytes:
        return "the kernel reports no L3 cache here"
    if len(groups) == 1:
        return "all CPUs that may be used here share one L3 cache"
    for group in groups:
        # One CPU of each core: siblings would differ in more than the cache.
        firsts = sorted(
            {min(topology.siblings_of(CPUSet((i,))) & usable) for i in group.cpus & usable}
        )
        if len(firsts) < 2:
            continue
        home = topology.cpus[firsts[0]].numa_node
        others = [
            i
            for other in groups
            if other.id != group.id
            for i in sorted(other.cpus & usable)
            if topology.cpus[i].numa_node == home
        ]
        if others:
            # Three quarters: one fits, two do not.
            size = l3_bytes * 3 // 4
            return (
                _two_cpu_side("cache", firsts[0], others[0], "an L3 cache each", size),
                _two_cpu_side("cache", firsts[0], firsts[1], "one L3 cache", size),
            )
    return "no NUMA node has two L3 caches, and two cores at one of them, that may be used here"


def _busy_cpu_sides(usable: CPUSet) -> SidesOrReason:
    if not usable:
        return "no CPU may be used here"
    cpu = max(usable)  # the lowest ones serve interrupts more often
    alone = LoopWorker(loop="compute", cpu=cpu)
    beside = (alone, LoopWorker(loop="busy", cpu=cpu))
    return (
        ComparisonSide(placed=f"CPU {cpu}, alone", workers=(alone,)),
        ComparisonSide(placed=f"CPU {cpu}, beside a busy program", workers=beside),
    )
