"""Tables about a machine that make choosing CPUs a matter of a few integer operations.

CPU sets are plain integers here, bit *i* for CPU *i*. A core is named by the bit of its lowest
thread. Cores whose threads lie at the same distances from that lowest thread have one *shape*, and
there are only a few shapes on a real machine, so that a question about every core ("which cores
are wholly free?") takes a handful of shifts instead of a walk over thousands of cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import CoreKind, Topology
from nri_numa.model.settings import IsolatedCPUs, Settings

NO_UNIT = -1
"""Id of the unit that holds the CPUs for which the kernel names no NUMA node or no L3 group."""


class TopologyUnit(msgspec.Struct, frozen=True):
    """A socket, an L3 group or a core: id and CPUs."""

    id: int
    bits: int


class NUMAUnit(TopologyUnit, frozen=True):
    """A NUMA node with CPUs.

    Attributes:
        sockets: bit *i* for the *i*-th socket of the index that has CPUs here.
        l3_groups: L3 groups cut down to this NUMA node, by id; then CPUs without one, by socket.
    """

    sockets: int
    l3_groups: tuple[TopologyUnit, ...]


class AllocatorIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Per-machine tables; `build_allocator_index` makes one when the machine was discovered.

    Attributes:
        first_threads: the lowest thread of every core.
        core_shapes: (lowest threads, offsets of all threads from them), in order of the first core.
        core_bits: CPUs of a core by its lowest thread.
        numa: NUMA nodes that have CPUs, by id; CPUs without one form a last unit `NO_UNIT`.
        distances: SLIT distance by positions in ``numa``.
        threads: largest number of online threads on one core.
    """

    all_cpus: int
    first_threads: int
    core_shapes: tuple[tuple[int, tuple[int, ...]], ...]
    core_bits: dict[int, int]
    numa: tuple[NUMAUnit, ...]
    sockets: tuple[TopologyUnit, ...]
    l3_groups: tuple[TopologyUnit, ...]
    distances: tuple[tuple[int, ...], ...]
    numa_cores: tuple[tuple[TopologyUnit, ...], ...]
    socket_cores: tuple[tuple[TopologyUnit, ...], ...]
    isolated: int
    nohz_full: int
    efficient: int
    performance: int
    threads: int

    def cpus_suiting_isolation(self, settings: Settings) -> int:
        """CPUs that come first by ``isolatedCPUs``. The kubelet knows no isolated CPUs."""
        if settings.kubelet.cpu_order or settings.isolated is IsolatedCPUs.ANY:
            return self.all_cpus
        avoid = settings.isolated is IsolatedCPUs.AVOID
        return self.all_cpus & ~self.isolated if avoid else self.isolated

    def cores_touched(self, cpus: int) -> int:
        """Cores with at least one thread in ``cpus``."""
        bits = 0
        for firsts, offsets in self.core_shapes:
            for offset in offsets:
                bits |= cpus >> offset & firsts
        return bits

    def whole_cores(self, cpus: int) -> int:
        """Cores with all their threads in ``cpus``."""
        return self.first_threads & ~self.cores_touched(self.all_cpus & ~cpus)

    def threads_of(self, cores: int) -> int:
        """All CPUs of these cores."""
        bits = 0
        for firsts, offsets in self.core_shapes:
            mine = cores & firsts
            for offset in offsets:
                bits |= mine << offset
        return bits

    def cores_by_thread_count(self, cpus: int) -> list[int]:
        """At position k, the cores with exactly k threads in ``cpus``."""
        exactly = [self.first_threads] + [0] * self.threads
        for firsts, offsets in self.core_shapes:
            for offset in offsets:
                matching_cores = cpus >> offset & firsts
                for k in range(self.threads, 0, -1):
                    exactly[k] = exactly[k] & ~matching_cores | exactly[k - 1] & matching_cores
                exactly[0] &= ~matching_cores
        return exactly

    def lowest_threads(self, cores: int, cpus: int) -> int:
        """One CPU for each core: its lowest-positioned thread that is in ``cpus``."""
        bits = 0
        for firsts, offsets in self.core_shapes:
            remaining = cores & firsts
            for offset in offsets:
                matching_cores = cpus >> offset & remaining
                bits |= matching_cores << offset
                remaining &= ~matching_cores
        return bits


def build_allocator_index(topology: Topology) -> AllocatorIndex:
    """Build the tables; costs about a microsecond per CPU, so keep the result with the machine."""
    shapes: dict[tuple[int, ...], int] = {}
    core_bits: dict[int, int] = {}
    kind_bits = dict.fromkeys(CoreKind, 0)
    for _, core in sorted(topology.cores.items()):
        if not core.cpus:
            continue
        first_id = core.cpus.first_id
        offsets = tuple(i - first_id for i in core.cpus)
        shapes[offsets] = shapes.get(offsets, 0) | 1 << first_id
        core_bits[first_id] = core.cpus.bits
        kind_bits[core.kind] |= core.cpus.bits
    sockets = tuple(
        TopologyUnit(i, s.cpus.bits) for i, s in sorted(topology.sockets.items()) if s.cpus
    )
    l3_groups = tuple(
        TopologyUnit(i, g.cpus.bits) for i, g in sorted(topology.l3_groups.items()) if g.cpus
    )
    all_bits = CPUSet(topology.cpus).bits
    nodes, unplaced = [], all_bits
    for i, numa_node in sorted(topology.numa_nodes.items()):
        # Firmware that lies may put a CPU into two NUMA nodes; the lower id keeps it, so that
        # counts per NUMA node add up.
        nodes.append((i, numa_node.cpus.bits & unplaced))
        unplaced &= ~numa_node.cpus.bits
    nodes.append((NO_UNIT, unplaced))
    numa = tuple(_numa_unit(i, bits, sockets, l3_groups) for i, bits in nodes if bits)
    cores = [TopologyUnit(first_cpu, bits) for first_cpu, bits in core_bits.items()]
    return AllocatorIndex(
        all_cpus=all_bits,
        first_threads=CPUSet(core_bits).bits,
        core_shapes=tuple((firsts, offsets) for offsets, firsts in shapes.items()),
        core_bits=core_bits,
        numa=numa,
        sockets=sockets,
        l3_groups=l3_groups,
        distances=tuple(tuple(_unit_distance(topology, a.id, b.id) for b in numa) for a in numa),
        numa_cores=_cores_by_unit(numa, cores),
        socket_cores=_cores_by_unit(sockets, cores),
        isolated=topology.isolated.bits & all_bits,
        nohz_full=topology.nohz_full.bits & all_bits,
        efficient=kind_bits[CoreKind.EFFICIENT],
        performance=kind_bits[CoreKind.PERFORMANCE],
        threads=max((len(offsets) for offsets in shapes), default=1),
    )


def _numa_unit(
    i: int, bits: int, sockets: Sequence[TopologyUnit], l3_groups: Sequence[TopologyUnit]
) -> NUMAUnit:
    groups: list[TopologyUnit] = []
    ungrouped = bits
    # Where no cache is known, what lies in one socket is nearer than neighbouring numbers.
    for group in (*l3_groups, *(TopologyUnit(NO_UNIT, socket.bits) for socket in sockets)):
        if group.bits & ungrouped:
            groups.append(TopologyUnit(group.id, group.bits & ungrouped))
            ungrouped &= ~group.bits
    touching = CPUSet(p for p, s in enumerate(sockets) if s.bits & bits).bits
    return NUMAUnit(i, bits, touching, tuple(groups))


def _unit_distance(topology: Topology, a: int, b: int) -> int:
    # A unit without a NUMA node has no row in the kernel's table: as far as anything can be.
    if NO_UNIT in (a, b):
        return 10 if a == b else 255
    return topology.distance(a, b)


def _cores_by_unit(
    units: Sequence[TopologyUnit], cores: Sequence[TopologyUnit]
) -> tuple[tuple[TopologyUnit, ...], ...]:
    # By the lowest thread: a core whose threads lie in two units is firmware's mistake and must
    # still be met exactly once.
    return tuple(tuple(c for c in cores if u.bits >> c.id & 1) for u in units)
