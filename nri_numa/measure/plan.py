"""Plan of the comparisons that a machine can show, with their CPUs and NUMA nodes. Pure.

Each compares a good placement with a bad one that differs in one thing only. A comparison that the
machine cannot show has its reason in place of the figures.
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
"""Last-level caches that fit into a buffer, so that it is read from memory and not from cache."""
MAX_RING_BYTES: Final = 192 * MIB
"""Maximum bytes of the ring of objects; four million objects take seconds to create."""
_FREE_DIVISOR: Final = 8
"""A buffer takes at most one part in this many of a NUMA node's free memory."""


class LoopWorker(Struct, frozen=True, kw_only=True):
    """Process that runs one loop over ``size`` bytes; ``busy`` only takes CPU time from others.

    Without a NUMA node the kernel chooses where the memory is.
    """

    loop: LoopName
    cpu: int
    numa_node: int | None = None
    size: int = 0


class ComparisonSide(Struct, frozen=True, kw_only=True):
    """One of the two placements, in words, with workers that run at the same time.

    The figures of the workers that are not ``busy`` are added up.
    """

    placed: str
    workers: tuple[LoopWorker, ...]


class Comparison(Struct, frozen=True, kw_only=True):
    """Two placements that differ in one thing; for times, lower is better."""

    name: str
    title: str
    unit: str
    higher_is_better: bool = True
    good_side: ComparisonSide
    bad: ComparisonSide


class ImpossibleComparison(Struct, frozen=True, kw_only=True):
    """Comparison that this machine cannot show, with the reason."""

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
"""Title and unit by name, in the order of the report."""

SidesOrReason = tuple[ComparisonSide, ComparisonSide] | str
"""The good and the bad placement, or the reason why there are none."""


def plan_comparisons(
    topology: Topology, usable: CPUSet, *, available: Mapping[int, int], l3_bytes: int
) -> tuple[PlannedComparison, ...]:
    """Plan the comparisons of a machine, on the CPUs that this process may run on.

    ``available`` has the free bytes by NUMA node. ``l3_bytes`` is the size of the largest
    last-level cache, 0 if unknown.
    """
    usable = usable & topology.online
    side_pairs = (
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
            _COMPARISON_TITLES_AND_UNITS.items(), side_pairs, strict=True
        )
    )


def _memory_sides(
    topology: Topology, usable: CPUSet, available: Mapping[int, int], l3_bytes: int
) -> tuple[SidesOrReason, SidesOrReason]:
    memory = topology.memory_nodes
    if len(memory) < 2:
        return (f"this machine has one NUMA node with memory, {numa_text(memory)}",) * 2
    # The most distant pair shows the most; among equal distances, the lowest ids.
    pairs = [
        (-topology.distance(local_id, remote_id), local_id, remote_id)
        for local_id in sorted(memory)
        if topology.numa_nodes[local_id].cpus & usable
        for remote_id in sorted(memory)
        if remote_id != local_id
    ]
    if not pairs:
        return ("no CPU that may be used here is on a NUMA node with memory",) * 2
    distance, local_id, remote_id = min(pairs)
    cpu = min(topology.numa_nodes[local_id].cpus & usable)
    max_bytes = min(max(MIN_BUFFER_BYTES, _BUFFER_L3_FACTOR * l3_bytes), MAX_BUFFER_BYTES)
    size = min(max_bytes, min(available.get(i, 0) for i in (local_id, remote_id)) // _FREE_DIVISOR)
    if size < max(MIN_BUFFER_BYTES // 4, 2 * l3_bytes):
        return (
            f"{numa_text(str(local_id))} and {numa_text(str(remote_id))} have too little free "
            f"memory: {max(MIN_BUFFER_BYTES // 4, 2 * l3_bytes) * _FREE_DIVISOR // MIB} MiB "
            "on each are needed",
        ) * 2

    def memory_side(loop: LoopName, numa_node: int) -> ComparisonSide:
        return ComparisonSide(
            placed=f"CPU {cpu} of {numa_text(str(local_id))}, memory of {numa_text(str(numa_node))}"
            + (f" at distance {-distance}" if numa_node == remote_id else ""),
            workers=(LoopWorker(loop=loop, cpu=cpu, numa_node=numa_node, size=size),),
        )

    bandwidth = memory_side("bandwidth", local_id), memory_side("bandwidth", remote_id)
    if 2 * l3_bytes > MAX_RING_BYTES:
        cache_text = f"{l3_bytes // MIB} MiB holds most of what the loop can go through"
        return bandwidth, f"the L3 cache of {cache_text}"
    return bandwidth, (memory_side("latency", local_id), memory_side("latency", remote_id))


def _sibling_sides(topology: Topology, usable: CPUSet) -> SidesOrReason:
    cores = [(core, core.cpus & usable) for _, core in sorted(topology.cores.items())]
    pairs = [(core, cpus) for core, cpus in cores if len(cpus) > 1]
    if not pairs:
        return "no core has two CPUs that may be used here (no hyperthreads)"
    for core, cpus in pairs:
        cpu, sibling = sorted(cpus)[:2]
        for other_core, other_cpus in cores:
            # Equal in everything but the core, so that nothing else differs.
            if (
                other_core.id != core.id
                and other_cpus
                and other_core.numa_node == core.numa_node
                and other_core.kind is core.kind
            ):
                other_cpu = min(other_cpus)
                return (
                    _two_cpu_side("compute", cpu, other_cpu, "two cores"),
                    _two_cpu_side("compute", cpu, sibling, "siblings of one core"),
                )
    return "no NUMA node has two cores of a kind that may be used here"


def _two_cpu_side(
    loop: LoopName, first_cpu: int, second_cpu: int, label: str, size: int = 0
) -> ComparisonSide:
    cpus = CPUSet((first_cpu, second_cpu))
    return ComparisonSide(
        placed=f"{cpus_text(cpus)}, {label}",
        workers=tuple(LoopWorker(loop=loop, cpu=cpu, size=size) for cpu in (first_cpu, second_cpu)),
    )


def _cache_sides(topology: Topology, usable: CPUSet, l3_bytes: int) -> SidesOrReason:
    groups = [g for _, g in sorted(topology.l3_groups.items()) if g.cpus & usable]
    if not groups or not l3_bytes:
        return "the kernel reports no L3 cache here"
    if len(groups) == 1:
        return "all CPUs that may be used here share one L3 cache"
    for group in groups:
        # One CPU of each core: siblings would differ in more than the cache.
        core_cpus = sorted(
            {min(topology.siblings_of(CPUSet((i,))) & usable) for i in group.cpus & usable}
        )
        if len(core_cpus) < 2:
            continue
        numa_node = topology.cpus[core_cpus[0]].numa_node
        other_cpus = [
            i
            for other_group in groups
            if other_group.id != group.id
            for i in sorted(other_group.cpus & usable)
            if topology.cpus[i].numa_node == numa_node
        ]
        if other_cpus:
            # Three quarters: one fits, two do not.
            size = l3_bytes * 3 // 4
            return (
                _two_cpu_side("cache", core_cpus[0], other_cpus[0], "an L3 cache each", size),
                _two_cpu_side("cache", core_cpus[0], core_cpus[1], "one L3 cache", size),
            )
    return "no NUMA node has two L3 caches, and two cores at one of them, that may be used here"


def _busy_cpu_sides(usable: CPUSet) -> SidesOrReason:
    if not usable:
        return "no CPU may be used here"
    cpu = max(usable)  # low CPUs serve interrupts more often
    worker = LoopWorker(loop="compute", cpu=cpu)
    workers = (worker, LoopWorker(loop="busy", cpu=cpu))
    return (
        ComparisonSide(placed=f"CPU {cpu}, alone", workers=(worker,)),
        ComparisonSide(placed=f"CPU {cpu}, beside a busy program", workers=workers),
    )
