"""Memory that is not where the CPUs are: which NUMA nodes without CPUs may be used, and from where.

CXL, HBM, the memory of a KNL in flat mode, the memory of GPUs and much of what virtual machines
show are NUMA nodes with memory and no CPUs. Such a NUMA node *serves* the NUMA nodes with CPUs that
it is near to: its initiators as the kernel tells them (``access1``, then ``access0``), else those
at the least distance. For alignment it is a part of what it serves and no place of its own.

Another tier of memory is only for those who let it in. Two sorts need no leave, because for some
CPUs there is nothing else: the memory nearest to CPUs whose NUMA node has none, and, where no NUMA
node has both, all memory that the kernel does not tell to be of another tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.machine.model import Topology, numa_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What a machine's NUMA nodes without CPUs are good for.

    Attributes:
        near: NUMA node that may be used to the NUMA nodes with CPUs that it serves.
        outside: NUMA nodes that nobody let in.
    """

    near: Mapping[int, NUMASet] = field(default_factory=dict)
    outside: NUMASet = NO_NUMA_NODES

    def serving(self, numa_nodes: NUMASet) -> NUMASet:
        """The NUMA nodes without CPUs that serve any of these."""
        if not self.near:
            return NO_NUMA_NODES
        return NUMASet(i for i, homes in self.near.items() if homes & numa_nodes)


def tiers(topology: Topology, nodes: NUMASet, numbers: frozenset[int]) -> Tiers:
    """Work out what may be used.

    Args:
        topology: the machine.
        nodes: NUMA nodes that are let in by number.
        numbers: memory tiers of the kernel that are let in.
    """
    with_cpus, with_memory = topology.cpu_nodes, topology.memory_nodes
    alone = with_memory - with_cpus
    if not alone:
        return Tiers()
    near: dict[int, NUMASet] = {}
    for i in alone:
        if i in nodes or topology.numa_nodes[i].tier in numbers:
            near[i] = homes(topology, i)
    for cpu_node in with_cpus - with_memory:
        nearest = _nearest(topology, cpu_node, with_memory)
        for i in nearest if nearest <= alone else NO_NUMA_NODES:
            near[i] = near.get(i, NO_NUMA_NODES) | NUMASet([cpu_node])
    if near and not with_memory & with_cpus:
        usual = {topology.numa_nodes[i].tier for i in near}
        for i in alone:
            if i not in near and topology.numa_nodes[i].tier in usual:
                near[i] = homes(topology, i)
    return Tiers(near=dict(sorted(near.items())), outside=alone - NUMASet(near))


def homes(topology: Topology, numa_node: int) -> NUMASet:
    """The NUMA nodes with CPUs that a NUMA node without CPUs is near to."""
    told = topology.numa_nodes[numa_node].initiators & topology.cpu_nodes
    if told:
        return told
    distances = {i: topology.distance(i, numa_node) for i in topology.cpu_nodes}
    least = min(distances.values(), default=0)
    return NUMASet(i for i, distance in distances.items() if distance == least)


def _nearest(topology: Topology, cpu_node: int, with_memory: NUMASet) -> NUMASet:
    """The memory that is nearest to CPUs: what names them as initiators, else by distance."""
    told = NUMASet(i for i in with_memory if cpu_node in topology.numa_nodes[i].initiators)
    if told:
        return told
    distances = {i: topology.distance(cpu_node, i) for i in with_memory}
    least = min(distances.values(), default=0)
    return NUMASet(i for i, distance in distances.items() if distance == least)


def tier_text(topology: Topology, numa_nodes: NUMASet) -> str:
    """``memory-only NUMA nodes 2-3 (memory tier 22)``."""
    found = {topology.numa_nodes[i].tier for i in numa_nodes}
    told = sorted(t for t in found if t is not None)
    tier = f" (memory tier{'' if len(told) == 1 else 's'} {', '.join(map(str, told))})"
    return f"memory-only {numa_text(numa_nodes)}{tier if told else ''}"
