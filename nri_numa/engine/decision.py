"""The values that go into a decision and come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from nri_numa.engine.align.policies import Alignment
from nri_numa.engine.cpus.index import AllocatorIndex, build_allocator_index
from nri_numa.engine.desired import DesiredState
from nri_numa.engine.request.annotations import OptionsResolver, longest_list_chars
from nri_numa.engine.request.demand import SLOTS_KEY, Demand
from nri_numa.engine.state import (
    Allocation,
    ContainerKind,
    NodeState,
    PodRecord,
    container_identity,
    withheld_isolated_bits,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import Topology, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import CPUOrder, IsolatedCPUs, Settings
from nri_numa.model.workload import (
    EVERY_MEMORY_POLICY,
    NO_ADJUSTMENT,
    NO_CHANGE,
    SMT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    CPUMode,
    MemoryPolicies,
    MemoryPolicySetting,
    OnFailure,
    PlacementOptions,
    PodSandbox,
    Policy,
    StateChange,
    container_subject,
)


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
    """Work out what may be used."""
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
    shortest = min(distances.values(), default=0)
    return NUMASet(i for i, distance in distances.items() if distance == shortest)


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
        charges = allocation.charges
        return replace(
            self,
            memory={
                i: max(0, free + (sign * charges[i].memory if i in charges else 0))
                for i, free in self.memory.items()
            },
            hugepages={
                i: {
                    size: max(
                        0, free + (sign * charges[i].hugepages.get(size, 0) if i in charges else 0)
                    )
                    for size, free in sizes.items()
                }
                for i, sizes in self.hugepages.items()
            },
        )


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
        model = copy(self)
        msgspec.structs.force_setattr(model, "memory_policies", policies)
        return model

    @cached_property
    def allocator_index(self) -> AllocatorIndex:
        """The CPU allocator's tables."""
        return build_allocator_index(self.topology)

    @cached_property
    def options_resolver(self) -> OptionsResolver:
        """Reads what a container asks for, as `engine.request.annotations` does."""
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
    def memory_total(self) -> int:
        """MemTotal of the machine in bytes."""
        return sum(n.memory_bytes for n in self.topology.numa_nodes.values())

    @cached_property
    def assignable_numa_nodes(self) -> NUMASet:
        """NUMA nodes that computed assignments may use: with CPUs, or memory tiers let in."""
        if self.settings.kubelet_memory:
            tiers = self.settings.memory_only_nodes & self.topology.memory_nodes
            return self.topology.cpu_nodes | tiers
        return self.topology.cpu_nodes | NUMASet(self.memory_only_nodes.attached)

    @cached_property
    def memory_only_nodes(self) -> MemoryOnlyNodes:
        """NUMA nodes without CPUs. The kubelet knows no such: by its rules all are alike."""
        settings = self.settings
        if settings.kubelet_memory:
            return MemoryOnlyNodes()
        return classify_memory_nodes(
            self.topology, settings.memory_only_nodes, settings.memory_tiers
        )

    @cached_property
    def alignable_nodes(self) -> NUMASet:
        """The NUMA nodes that alignment chooses from: what serves others is part of them."""
        return self.assignable_numa_nodes - NUMASet(self.memory_only_nodes.attached)

    @cached_property
    def usable_cpus_by_node(self) -> Mapping[int, CPUSet]:
        """By NUMA node, the CPUs that containers may use there."""
        allowed = self.topology.allowed
        return {i: self.topology.numa_nodes[i].cpus & allowed for i in self.assignable_numa_nodes}

    @cached_property
    def withheld_isolated_cpus(self) -> CPUSet:
        """Isolated CPUs that are kept out of the shared pool."""
        return CPUSet.from_bits(withheld_isolated_bits(self.topology, self.settings))

    @cached_property
    def shared_pool_milli_by_node(self) -> Mapping[int, int]:
        """By NUMA node, thousandths of a CPU that an empty machine has to share, oversale included.

        Without the NUMA nodes that have none.
        """
        shared = {
            i: self.shared_milli_of(len(cpus - self.withheld_isolated_cpus))
            for i, cpus in self.usable_cpus_by_node.items()
        }
        return {i: n for i, n in shared.items() if n}

    @cached_property
    def usable_cpu_count_by_node(self) -> Mapping[int, int]:
        """By NUMA node, the number of CPUs that containers may use there."""
        return {i: len(cpus) for i, cpus in self.usable_cpus_by_node.items()}

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
        if settings.reserved_cpus and not settings.strict_reserved:
            return 1
        return max(1, total // 20)

    @cached_property
    def node_pool_floors(self) -> Mapping[int, int]:
        """By NUMA node, CPUs that stay in the shared pool there; without those where none do."""
        of, isolated = self.settings.limits.numa_pool.cpus_of_total, self.withheld_isolated_cpus
        floors = {i: of(len(cpus - isolated)) for i, cpus in self.usable_cpus_by_node.items()}
        return {i: count for i, count in floors.items() if count}

    def avoided_isolated_cpus(self, count: int) -> CPUSet:
        """Isolated CPUs that a container of so many exclusive CPUs does not get.

        Under ``avoid`` they are for containers of one CPU: the kernel moves no process between
        them and others, so that several threads would all run on one.
        """
        is_avoiding = count > 1 and self.settings.isolated is IsolatedCPUs.AVOID
        return self.withheld_isolated_cpus if is_avoiding else NO_CPUS

    @cached_property
    def exclusive_capacity(self) -> Mapping[int, int]:
        """By NUMA node, the number of CPUs that may be owned there; without the empty."""
        isolated = self.settings.isolated is IsolatedCPUs.ONLY and self.withheld_isolated_cpus
        counts = {
            i: len(cpus & isolated if isolated else cpus)
            for i, cpus in self.usable_cpus_by_node.items()
        }
        return {i: count for i, count in counts.items() if count}

    def exclusive_capacity_for(self, count: int) -> Mapping[int, int]:
        """`exclusive_capacity` for a container of so many CPUs."""
        avoided = self.avoided_isolated_cpus(count)
        if not avoided:
            return self.exclusive_capacity
        counts = {i: len(cpus - avoided) for i, cpus in self.usable_cpus_by_node.items()}
        return {i: count for i, count in counts.items() if count}

    def shared_milli_of(self, cpus: int) -> int:
        """Thousandths of a CPU that so many CPUs of the shared pool can be promised as."""
        return int(cpus * 1000 * self.settings.cpu_overcommit)

    @cached_property
    def assignable_memory_nodes(self) -> NUMASet:
        """NUMA nodes that computed assignments may take memory from."""
        return self.assignable_numa_nodes & self.topology.memory_nodes

    @cached_property
    def cpu_capacity_milli(self) -> Mapping[int, int]:
        """By NUMA node, what can be allocated: CPUs × oversale × capacity factor, in milli-CPUs."""
        return self._compute_cpu_capacity(NO_CPUS)

    @cached_property
    def shared_capacity_milli(self) -> Mapping[int, int]:
        """By NUMA node, of `cpu_total` what containers without CPUs of their own could have."""
        return self._compute_cpu_capacity(self.withheld_isolated_cpus)

    def _compute_cpu_capacity(self, isolated: CPUSet) -> Mapping[int, int]:
        settings = self.settings
        if settings.strict_reserved:
            isolated = isolated | settings.reserved_cpus
        return {
            i: int(
                len(cpus - isolated)
                * 1000
                * settings.cpu_overcommit
                * settings.capacity_factor.get(i, 1.0)
            )
            for i, cpus in self.usable_cpus_by_node.items()
        }

    @cached_property
    def memory_capacity(self) -> Mapping[int, int]:
        """By NUMA node, bytes that can be allocated: total − huge pages − reserved memory.

        All NUMA nodes, also those that only a list (``numamem``) may name. Those whose memory our
        own cpuset withholds have none for anybody.
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

    def free_memory(self, state: NodeState, reading: MeasuredFree | None) -> dict[int, int]:
        """By NUMA node, bytes left: bookable, and never more than the kernel has.

        The kubelet's rules look neither at what the kernel has nor at what is not pinned.
        """
        kubelet_memory = self.settings.kubelet_memory
        free = {} if reading is None or kubelet_memory else reading.memory
        charges = {i: charge.memory for i, charge in state.charges.items()}
        if state.unpinned_memory and not kubelet_memory:
            for i, amount in self.unpinned_memory_by_node(state).items():
                charges[i] = charges.get(i, 0) + amount
        return _free_amounts(self.memory_capacity, charges, state.kubelet.memory, free)

    def unpinned_memory_by_node(self, state: NodeState) -> dict[int, int]:
        """By NUMA node, bytes to expect there of requests that nothing pins to a NUMA node.

        On the NUMA nodes of their containers' CPUs, where those are bound and have memory, else on
        all; in proportion to what these have.
        """
        capacity = {i: n for i, n in self.memory_capacity.items() if n}
        amounts = dict.fromkeys(capacity, 0)
        for bits, amount in state.unpinned_memory.items():
            nodes = [i for i in capacity if bits >> i & 1] or capacity
            total = sum(capacity[i] for i in nodes)
            for i in nodes:
                amounts[i] += amount * capacity[i] // total
        return amounts

    def free_hugepages(
        self, size: int, state: NodeState, reading: MeasuredFree | None
    ) -> dict[int, int]:
        """By NUMA node, bytes of huge pages of one size left; as with `memory_left`."""
        free: dict[int, int] = {}
        if reading is not None and not self.settings.kubelet_memory:
            free = {i: n[size] for i, n in reading.hugepages.items() if size in n}
        charges = {i: charge.hugepages.get(size, 0) for i, charge in state.charges.items()}
        granted = {i: pages.get(size, 0) for i, pages in state.kubelet.hugepages.items()}
        return _free_amounts(self.hugepages_capacity(size), charges, granted, free)


def _free_amounts(
    total: Mapping[int, int],
    charges: Mapping[int, int],
    granted: Mapping[int, int] = MappingProxyType({}),
    free: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """By NUMA node, what is neither booked nor granted, and never more than what is free."""
    amounts = {i: max(0, n - charges.get(i, 0) - granted.get(i, 0)) for i, n in total.items()}
    return {i: min(n, free.get(i, n)) for i, n in amounts.items()} if free else amounts


class DecisionTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The way to a decision; rendered by `engine.explain.explanation`, never logged whole."""

    pod: PodSandbox
    container: Container
    requested: PlacementOptions | None = None
    demand: Demand | None = None
    alignment: Alignment | None = None
    decision_steps: tuple[str, ...] = ()
    free_cpu_milli: Mapping[int, int] = msgspec.field(default_factory=dict)
    free_memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    pool_before: CPUSet = NO_CPUS
    pool_after: CPUSet = NO_CPUS
    rule: str = ""
    ignored: tuple[str, ...] = ()


class ContainerMove(msgspec.Struct, frozen=True):
    """One container that changes its place."""

    before: Allocation
    after: Allocation


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """The container gets this, once the agent swaps ``state`` in.

    Attributes:
        moves: running containers that make room for it, in the order in which they were placed.
        warnings: what was done as asked and is probably not meant.
    """

    state: NodeState
    change: StateChange
    allocation: Allocation
    adjustment: ContainerAdjustment = NO_ADJUSTMENT
    updates: tuple[ContainerUpdate, ...] = ()
    warnings: tuple[str, ...] = ()
    moves: tuple[ContainerMove, ...] = ()
    trace: DecisionTrace


class Rejected(msgspec.Struct, frozen=True):
    """The container cannot have what it asks for, and how that came about.

    Attributes:
        is_about_later_container: it fits, and another one of its pod that is to come does not.
        is_resize: it runs, and stays as it is.
        is_search_spent: whether room can be made for it, or what is in the way, is not known.
        room_text: what was found out about that; ends the message.
    """

    rejection: Rejection
    trace: DecisionTrace
    is_about_later_container: bool = False
    is_search_spent: bool = False
    is_resize: bool = False
    room_text: str = ""

    @property
    def reason(self) -> RejectionReason:
        """The refusal's."""
        return self.rejection.reason

    @property
    def message(self) -> str:
        """Who cannot have what, and what was found out about room."""
        subject = container_subject(self.trace.pod, self.trace.container)
        end = f"; {self.room_text}" if self.room_text else ""
        start = "resize refused: " if self.is_resize else ""
        return f"{start}{subject}: {self.rejection.detail}{end}"


class UnalignedRejection(Rejection, frozen=True, kw_only=True):
    """What a policy cannot place, with the alignment that was tried."""

    alignment: Alignment | None = None

    @classmethod
    def with_alignment(cls, rejection: Rejection, alignment: Alignment | None) -> Self:
        """The same rejection after an alignment that succeeded."""
        return cls(**msgspec.structs.asdict(rejection), alignment=alignment)

    @classmethod
    def alignment_of(cls, rejection: Rejection) -> Alignment | None:
        """The alignment that a rejection is about; None where none was tried."""
        return rejection.alignment if isinstance(rejection, cls) else None


Decision = Admitted | Rejected


class Released(msgspec.Struct, frozen=True, kw_only=True):
    """A container, or a whole pod, gave back what it had."""

    state: NodeState
    change: StateChange = NO_CHANGE
    updates: tuple[ContainerUpdate, ...] = ()


class Resized(msgspec.Struct, frozen=True, kw_only=True):
    """A live container's resources change.

    Attributes:
        container_update: what to answer for the container itself; None lets the request through as
        it is.
    """

    state: NodeState
    change: StateChange = NO_CHANGE
    container_update: ContainerUpdate | None
    updates: tuple[ContainerUpdate, ...] = ()
    trace: DecisionTrace


class RunningAdmission(msgspec.Struct, frozen=True, kw_only=True):
    """The state with a container whose creation was not reported.

    Attributes:
        decision: about it; a refused one stays unpinned.
    """

    decision: Decision
    state: NodeState
    change: StateChange
    updates: tuple[ContainerUpdate, ...] = ()


class Resynced(msgspec.Struct, frozen=True, kw_only=True):
    """The state after comparing notes with the runtime.

    Attributes:
        decisions: about strangers; one that changes nothing for others carries the state before
            all of them.
        unknown_cpusets: full names of containers with a cpuset that nothing explains.
        undecided: strangers for which no time was left, with their pods; they stay as they are
            until `nri_numa.engine.resync.admit_running`.
    """

    state: NodeState
    change: StateChange
    updates: tuple[ContainerUpdate, ...] = ()
    adopted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    missed_starts: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    unpinned: tuple[Allocation, ...] = ()
    resized: tuple[tuple[Allocation, DecisionTrace], ...] = ()
    rejected_annotations: tuple[str, ...] = ()
    unknown_cpusets: tuple[str, ...] = ()
    undecided: tuple[tuple[PodSandbox, Container], ...] = ()


class Placement(Allocation, frozen=True, kw_only=True):
    """An allocation on its way, with what is said of it and not kept.

    Attributes:
        affinity: NUMA nodes that the policy chose; None when any will do.
        pod_affinity: the same for the whole pod (scope ``pod``).
        warnings: of these, what is probably not meant.
        memory_policy: set before the program runs; None sets none.
    """

    affinity: NUMASet | None = None
    pod_affinity: NUMASet | None = None
    alignment: Alignment | None = None
    decision_steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    memory_policy: MemoryPolicySetting | None = None


NO_DEMAND: Final = Demand()
"""Of a container whose needs were not looked at, since it is not pinned or they make no sense."""


class PlacementRequest(msgspec.Struct, frozen=True, dict=True):
    """One container that is being placed, with everything that is looked at for it.

    Attributes:
        demand: what it needs; for a pod that is placed as a whole, what the pod needs.
        policy: to align by. The degrade ladder tries a weaker one than was asked for.
        current_cpus: CPUs that a running container has already and must keep.
        had_instance: it runs, or one of its name and pod did: a soft list may have given way
        already.
    """

    machine: NodeModel
    state: NodeState
    pod: PodSandbox
    container: Container
    requested: PlacementOptions
    demand: Demand = NO_DEMAND
    reading: MeasuredFree | None = None
    policy: Policy = Policy.NONE
    current_cpus: CPUSet = NO_CPUS
    had_instance: bool = False

    @property
    def initial_placement(self) -> Placement:
        """The container's allocation, before anything is chosen for it."""
        return Placement(
            **container_identity(self.pod, self.container), kind=ContainerKind.UNPINNED
        )

    @cached_property
    def message_subject(self) -> str:
        """The start of a message: pod and container."""
        return container_subject(self.pod, self.container)

    @cached_property
    def pod_record(self) -> PodRecord | None:
        """The record of the pod."""
        return self.state.pods.get(self.pod.uid)

    @cached_property
    def desired(self) -> DesiredState:
        """What the others should have."""
        return DesiredState(self.machine, self.state)

    @cached_property
    def free_memory(self) -> dict[int, int]:
        """By NUMA node, bytes of memory that can be allocated."""
        return self.machine.free_memory(self.state, self.reading)

    def free_hugepages(self) -> dict[int, Mapping[int, int]]:
        """By page size that is needed and NUMA node, bytes of huge pages that can be allocated."""
        free_bytes, state, reading = self.machine.free_hugepages, self.state, self.reading
        return {size: free_bytes(size, state, reading) for size in self.demand.hugepages}

    @cached_property
    def effective_smt(self) -> SMT:
        """The rule for siblings; with the kubelet's order none, unless asked for."""
        requested = self.requested
        if requested.smt is SMT.SPREAD and "smt" not in requested.explicit_keys:
            kubelet = self.machine.settings.cpu_order is CPUOrder.KUBELET
            return SMT.ANY if kubelet else SMT.SPREAD
        return requested.smt

    @cached_property
    def uses_kubelet_rules(self) -> bool:
        """As `uses_kubelet_rules` says."""
        return uses_kubelet_rules(self.machine, self.requested)

    @property
    def on_failure(self) -> OnFailure:
        """The degrade ladder's step, also where none was named."""
        requested = self.requested
        if requested.on_failure is not None:
            return requested.on_failure
        listed = requested.numacpu is not None or requested.numamem is not None
        if not listed and requested.policy is Policy.BEST_EFFORT:
            return OnFailure.BEST_EFFORT
        return OnFailure.REJECT


def uses_kubelet_rules(machine: NodeModel, requested: PlacementOptions) -> bool:
    """True if the kubelet's rules hold: none but exclusive CPUs are aligned.

    A container that asks to share the CPUs of its NUMA nodes gets that all the same.
    """
    is_sharing = requested.cpus is CPUMode.SHARED and "cpus" in requested.explicit_keys
    return machine.settings.kubelet_cpus and not is_sharing
