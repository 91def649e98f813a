"""The machine: topology, settings and derived tables that decisions are made on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import msgspec
from msgspec.structs import replace

from nri_numa.engine.cpus.index import AllocatorIndex, build_allocator_index
from nri_numa.engine.request.annotations import OptionsResolver, longest_list_chars
from nri_numa.engine.request.demand import SLOTS_KEY
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import NO_CHARGE, Allocation, withheld_isolated_bits
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import Topology, numa_text
from nri_numa.model.settings import IsolatedCPUs, Settings
from nri_numa.model.workload import EVERY_MEMORY_POLICY, CPUMode, MemoryPolicies


class MemoryOnlyNodes(msgspec.Struct, frozen=True, kw_only=True):
    """Uses of a machine's NUMA nodes without CPUs.

    CXL, HBM, the memory of a KNL in flat mode, the memory of GPUs and much of what virtual machines
    show are NUMA nodes with memory and no CPUs. Such a NUMA node *serves* the NUMA nodes with CPUs
    that it is near to: its initiators as the kernel names them (``access1``, then ``access0``),
    else those at the least distance. For alignment it is a part of what it serves and no place of
    its own. Another tier of memory is only for those who let it in. Two sorts need no leave,
    because for some CPUs there is nothing else: the memory nearest to CPUs whose NUMA node has
    none, and, where no NUMA node has both, all memory that the kernel puts in no other tier.

    Attributes:
        attached: NUMA node that may be used to the NUMA nodes with CPUs that it serves.
    """

    attached: Mapping[int, NUMASet] = msgspec.field(default_factory=dict)
    excluded: NUMASet = NO_NUMA_NODES

    def attached_to(self, numa_nodes: NUMASet) -> NUMASet:
        """The NUMA nodes without CPUs that serve any of these."""
        if not self.attached:
            return NO_NUMA_NODES
        return NUMASet(i for i, homes in self.attached.items() if homes & numa_nodes)


def classify_memory_nodes(
    topology: Topology, nodes: NUMASet, numbers: frozenset[int]
) -> MemoryOnlyNodes:
    """Classify NUMA nodes without CPUs as attached or excluded."""
    with_cpus, with_memory = topology.cpu_nodes, topology.memory_nodes
    memory_only = with_memory - with_cpus
    if not memory_only:
        return MemoryOnlyNodes()
    attached: dict[int, NUMASet] = {}
    for i in memory_only:
        if i in nodes or topology.numa_nodes[i].tier in numbers:
            attached[i] = cpu_nodes_of(topology, i)
    for cpu_node in with_cpus - with_memory:
        closest = _closest_memory(topology, cpu_node, with_memory)
        for i in closest if closest <= memory_only else NO_NUMA_NODES:
            attached[i] = attached.get(i, NO_NUMA_NODES) | NUMASet([cpu_node])
    if attached and not with_memory & with_cpus:
        usual = {topology.numa_nodes[i].tier for i in attached}
        for i in memory_only:
            if i not in attached and topology.numa_nodes[i].tier in usual:
                attached[i] = cpu_nodes_of(topology, i)
    return MemoryOnlyNodes(
        attached=dict(sorted(attached.items())), excluded=memory_only - NUMASet(attached)
    )


def cpu_nodes_of(topology: Topology, numa_node: int) -> NUMASet:
    """The NUMA nodes with CPUs that a NUMA node without CPUs is near to."""
    named = topology.numa_nodes[numa_node].initiators & topology.cpu_nodes
    return named or closest_nodes({i: topology.distance(i, numa_node) for i in topology.cpu_nodes})


def closest_nodes(distances: Mapping[int, int]) -> NUMASet:
    """The NUMA nodes at the least distance."""
    min_distance = min(distances.values(), default=0)
    return NUMASet(i for i, distance in distances.items() if distance == min_distance)


def _closest_memory(topology: Topology, cpu_node: int, with_memory: NUMASet) -> NUMASet:
    """The memory that is nearest to CPUs: what names them as initiators, else by distance."""
    named = NUMASet(i for i in with_memory if cpu_node in topology.numa_nodes[i].initiators)
    return named or closest_nodes({i: topology.distance(cpu_node, i) for i in with_memory})


def tier_text(topology: Topology, numa_nodes: NUMASet) -> str:
    """``memory-only NUMA nodes 2-3 (memory tier 22)``."""
    node_tiers = {topology.numa_nodes[i].tier for i in numa_nodes}
    tiers = sorted(t for t in node_tiers if t is not None)
    tier = f" (memory tier{'' if len(tiers) == 1 else 's'} {', '.join(map(str, tiers))})"
    return f"memory-only {numa_text(numa_nodes)}{tier if tiers else ''}"


class MeasuredFree(msgspec.Struct, frozen=True, kw_only=True):
    """Free memory by NUMA node at some moment, by the kernel and the kubelet.

    Attributes:
        devices: how many devices of all kinds the kubelet can still give; empty where unknown.
    """

    memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    hugepages: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)
    devices: Mapping[int, int] = msgspec.field(default_factory=dict)

    def with_own_charges_added(self, allocation: Allocation, sign: int = 1) -> MeasuredFree:
        """Free memory for a container that runs: what it was promised is its own.

        It uses some of that already, so only what it gets in addition has to be free. With
        ``sign=-1``, what is left for others once it uses all of that.
        """
        charges = {i: allocation.charges.get(i, NO_CHARGE) for i in {*self.memory, *self.hugepages}}
        memory = {i: max(0, n + sign * charges[i].memory) for i, n in self.memory.items()}
        hugepages = {
            i: {size: max(0, n + sign * charges[i].hugepages.get(size, 0)) for size, n in s.items()}
            for i, s in self.hugepages.items()
        }
        return replace(self, memory=memory, hugepages=hugepages)


class NodeModel(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The machine and how to use it; tables that many decisions need are worked out once.

    Attributes:
        key: signs what is written on containers (`nri_numa.engine.assigned`); empty signs
            nothing.
    """

    topology: Topology
    settings: Settings
    key: bytes = b""
    memory_policies: MemoryPolicies = EVERY_MEMORY_POLICY

    def with_memory_policies(self, policies: MemoryPolicies) -> NodeModel:
        """The same machine with its tables, none of which depends on memory policies."""
        if policies == self.memory_policies:
            return self
        model = replace(self, memory_policies=policies)
        model.__dict__.update(self.__dict__)
        return model

    @cached_property
    def allocator_index(self) -> AllocatorIndex:
        """The CPU allocator's tables."""
        return build_allocator_index(self.topology)

    @cached_property
    def options_resolver(self) -> OptionsResolver:
        """Resolver of a container's options, as in `engine.request.annotations`."""
        return OptionsResolver(self.settings, self.max_list_chars)

    @cached_property
    def slots_annotation_key(self) -> str:
        """The annotation of containers that says which slots they hold."""
        return f"{self.settings.prefix}/{SLOTS_KEY}"

    @cached_property
    def max_list_chars(self) -> int:
        """Characters of the longest list of CPUs or NUMA nodes that this machine can need."""
        return longest_list_chars(max([0, *self.topology.possible, *self.topology.numa_ids]) + 1)

    @cached_property
    def total_memory_bytes(self) -> int:
        """MemTotal of the machine in bytes."""
        return sum(n.memory_bytes for n in self.topology.numa_nodes.values())

    @cached_property
    def assignable_numa_nodes(self) -> NUMASet:
        """NUMA nodes that computed assignments may use: with CPUs, or memory tiers let in."""
        if self.settings.kubelet.memory:
            tiers = self.settings.memory_only_numa_nodes & self.topology.memory_nodes
            return self.topology.cpu_nodes | tiers
        return self.topology.cpu_nodes | NUMASet(self.memory_only_nodes.attached)

    @cached_property
    def memory_only_nodes(self) -> MemoryOnlyNodes:
        """NUMA nodes without CPUs. The kubelet knows no such: by its rules all are alike."""
        settings = self.settings
        if settings.kubelet.memory:
            return MemoryOnlyNodes()
        return classify_memory_nodes(
            self.topology, settings.memory_only_numa_nodes, settings.memory_tiers
        )

    @cached_property
    def alignable_nodes(self) -> NUMASet:
        """The NUMA nodes that alignment chooses from: what serves others is part of them."""
        return self.assignable_numa_nodes - NUMASet(self.memory_only_nodes.attached)

    @cached_property
    def allowed_cpus_by_node(self) -> Mapping[int, CPUSet]:
        """By NUMA node, the CPUs that containers may use there."""
        allowed = self.topology.allowed
        return {i: self.topology.numa_nodes[i].cpus & allowed for i in self.assignable_numa_nodes}

    @cached_property
    def withheld_isolated_cpus(self) -> CPUSet:
        """Isolated CPUs that are kept out of the shared pool."""
        return CPUSet.from_bits(withheld_isolated_bits(self.topology, self.settings))

    @cached_property
    def shared_pool_milli_by_node(self) -> Mapping[int, int]:
        """By NUMA node that has any, milli-CPUs to share when empty, overcommit included."""
        isolated = self.withheld_isolated_cpus
        return self._positive_by_node(lambda cpus: self.shared_milli_of(len(cpus - isolated)))

    def _positive_by_node(self, amount_of: Callable[[CPUSet], int]) -> dict[int, int]:
        """By NUMA node, an amount that its allowed CPUs make; without those where it is 0."""
        amounts = {i: amount_of(cpus) for i, cpus in self.allowed_cpus_by_node.items()}
        return {i: amount for i, amount in amounts.items() if amount}

    @cached_property
    def usable_cpu_count_by_node(self) -> Mapping[int, int]:
        """By NUMA node, the number of CPUs that containers may use there."""
        return {i: len(cpus) for i, cpus in self.allowed_cpus_by_node.items()}

    @cached_property
    def cpu_count(self) -> int:
        """The base of percentages: CPUs that containers may use, or could if they were online."""
        topology = self.topology
        return len(topology.present - (topology.online - topology.allowed))

    @cached_property
    def pool_floor(self) -> int:
        """CPUs that stay in the shared pool of the machine; isolated ones do not count.

        Unless it is configured: where reserved CPUs are part of the pool, the operator has said
        what the system needs, and one is enough; else a twentieth of the CPUs, at least one.
        """
        settings, total = self.settings, self.cpu_count - len(self.withheld_isolated_cpus)
        if settings.limits.pool is not None:
            return max(1, settings.limits.pool.cpus_of_total(total))
        if settings.reserved_cpus and not settings.strict_cpu_reservation:
            return 1
        return max(1, total // 20)

    @cached_property
    def node_pool_floors(self) -> Mapping[int, int]:
        """By NUMA node, CPUs that stay in the shared pool there; without those where none do."""
        floor, isolated = self.settings.limits.numa_pool, self.withheld_isolated_cpus
        return self._positive_by_node(lambda cpus: floor.cpus_of_total(len(cpus - isolated)))

    def avoided_isolated_cpus(self, count: int) -> CPUSet:
        """Isolated CPUs that a container of so many exclusive CPUs does not get.

        Under ``avoid`` they are for containers of one CPU: the kernel moves no process between
        them and others, so that several threads would all run on one.
        """
        is_avoiding = count > 1 and self.settings.isolated is IsolatedCPUs.AVOID
        return self.withheld_isolated_cpus if is_avoiding else NO_CPUS

    @cached_property
    def exclusive_capacity(self) -> Mapping[int, int]:
        """Maximum exclusive CPUs by NUMA node, without those that have none."""
        isolated = self.settings.isolated is IsolatedCPUs.ONLY and self.withheld_isolated_cpus
        return self._positive_by_node(lambda cpus: len(cpus & isolated if isolated else cpus))

    def exclusive_capacity_for(self, count: int) -> Mapping[int, int]:
        """`exclusive_capacity` for a container of so many CPUs."""
        avoided = self.avoided_isolated_cpus(count)
        if not avoided:
            return self.exclusive_capacity
        return self._positive_by_node(lambda cpus: len(cpus - avoided))

    def shared_milli_of(self, cpus: int) -> int:
        """Thousandths of a CPU that so many CPUs of the shared pool can be promised as."""
        return int(cpus * 1000 * self.settings.cpu_overcommit)

    @cached_property
    def assignable_memory_nodes(self) -> NUMASet:
        """NUMA nodes that computed assignments may take memory from."""
        return self.assignable_numa_nodes & self.topology.memory_nodes

    @cached_property
    def cpu_capacity_milli(self) -> Mapping[int, int]:
        """By NUMA node, allocatable milli-CPUs: CPUs × overcommit × capacity factor."""
        return self._compute_cpu_capacity(NO_CPUS)

    @cached_property
    def shared_capacity_milli(self) -> Mapping[int, int]:
        """Part of `cpu_capacity_milli` for shared containers, by NUMA node."""
        return self._compute_cpu_capacity(self.withheld_isolated_cpus)

    def _compute_cpu_capacity(self, isolated: CPUSet) -> Mapping[int, int]:
        settings = self.settings
        if settings.strict_cpu_reservation:
            isolated = isolated | settings.reserved_cpus
        overcommit, factors = settings.cpu_overcommit, settings.capacity_factor
        return {
            i: int(len(cpus - isolated) * 1000 * overcommit * factors.get(i, 1.0))
            for i, cpus in self.allowed_cpus_by_node.items()
        }

    @cached_property
    def memory_capacity(self) -> Mapping[int, int]:
        """By NUMA node, bytes that can be allocated: total − huge pages − reserved memory.

        All NUMA nodes, also those that only a list (``numamem``) may name. NUMA nodes outside the
        agent's own cpuset have none.
        """
        reserved = self.settings.reserved_memory
        withheld = self.topology.withheld_memory
        return {
            i: 0
            if i in withheld
            else max(0, n.memory_bytes - sum(n.hugepages.values()) - reserved.get(i, 0))
            for i, n in self.topology.numa_nodes.items()
        }

    @cached_property
    def usable_memory(self) -> Mapping[int, int]:
        """`memory_capacity` of the NUMA nodes that computed assignments may use."""
        return {i: self.memory_capacity[i] for i in self.assignable_numa_nodes}

    def hugepages_capacity(self, size: int) -> dict[int, int]:
        """By NUMA node, bytes of huge pages of one size that can be allocated: total − reserved."""
        withheld = self.topology.withheld_memory
        reserved = self.settings.reserved_hugepages
        return {
            i: 0
            if i in withheld
            else max(0, n.hugepages.get(size, 0) - reserved.get(i, {}).get(size, 0))
            for i, n in self.topology.numa_nodes.items()
        }


def uses_kubelet_rules(machine: NodeModel, requested: PlacementOptions) -> bool:
    """True if the kubelet's rules hold: none but exclusive CPUs are aligned.

    A container that asks to share the CPUs of its NUMA nodes gets that all the same.
    """
    is_sharing = requested.cpus is CPUMode.SHARED and "cpus" in requested.explicit_keys
    return machine.settings.kubelet.cpus and not is_sharing
