"""The values that go into a decision and come out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nri_numa.engine.answers import NO_ADJUSTMENT, ContainerAdjustment, ContainerUpdate
from nri_numa.engine.cpu_index import AllocatorIndex, index
from nri_numa.engine.demand import Demand
from nri_numa.engine.policies import Alignment
from nri_numa.engine.settings import Settings
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.engine.wishes import Resolver
from nri_numa.engine.workload import Container, PodSandbox, Wishes
from nri_numa.topology.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.topology.model import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the kernel says is left, by NUMA node, at some moment.

    Attributes:
        memory: bytes free or reclaimable.
        hugepages: free bytes by page size.
    """

    memory: Mapping[int, int] = field(default_factory=dict)
    hugepages: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and how to use it; tables that many decisions need are worked out once."""

    topology: Topology
    settings: Settings

    @cached_property
    def index(self) -> AllocatorIndex:
        """The CPU allocator's tables."""
        return index(self.topology)

    @cached_property
    def resolve(self) -> Resolver:
        """Reads what a container asks for; see `nri_numa.engine.wishes.resolve`."""
        return Resolver(self.settings)

    @cached_property
    def memory_total(self) -> int:
        """MemTotal of the machine in bytes."""
        return sum(n.memory_bytes for n in self.topology.numa_nodes.values())

    @cached_property
    def numa_ids(self) -> NUMASet:
        """NUMA nodes that computed assignments may use: with CPUs, or memory tiers let in."""
        tiers = self.settings.memory_only_nodes & self.topology.memory_nodes
        return self.topology.cpu_nodes | tiers

    @cached_property
    def node_cpus(self) -> Mapping[int, CPUSet]:
        """By NUMA node, the CPUs that containers may use there."""
        allowed = self.topology.allowed
        return {i: self.topology.numa_nodes[i].cpus & allowed for i in self.numa_ids}

    @cached_property
    def cpu_capacity(self) -> Mapping[int, int]:
        """By NUMA node, thousandths of a CPU on an empty machine, oversale included."""
        oversale = self.settings.oversale
        return {i: int(len(cpus) * 1000 * oversale) for i, cpus in self.node_cpus.items()}

    @cached_property
    def cpu_milli(self) -> Mapping[int, int]:
        """`cpu_capacity` without the NUMA nodes that have none."""
        return {i: n for i, n in self.cpu_capacity.items() if n}

    @cached_property
    def whole_cpus(self) -> Mapping[int, int]:
        """By NUMA node, the number of CPUs that containers may use there; without the empty."""
        return {i: len(cpus) for i, cpus in self.node_cpus.items() if cpus}

    @cached_property
    def memory_nodes(self) -> NUMASet:
        """NUMA nodes that computed assignments may take memory from."""
        return self.numa_ids & self.topology.memory_nodes

    @cached_property
    def cpu_total(self) -> Mapping[int, int]:
        """By NUMA node, what can be booked: CPUs × oversale × capacity factor, in thousandths."""
        settings = self.settings
        strict = settings.reserved_cpus if settings.strict_reserved else NO_CPUS
        return {
            i: int(
                len(cpus - strict) * 1000 * settings.oversale * settings.capacity_factor.get(i, 1.0)
            )
            for i, cpus in self.node_cpus.items()
        }

    @cached_property
    def memory_capacity(self) -> Mapping[int, int]:
        """By NUMA node, bytes that can be booked: total − huge pages − reserved memory.

        NUMA nodes whose memory our own cpuset withholds have none for anybody.
        """
        reserved = self.settings.reserved_memory
        withheld = self.topology.withheld_memory
        return {
            i: 0
            if i in withheld
            else max(0, n.memory_bytes - sum(n.hugepages.values()) - reserved.get(i, 0))
            for i in self.numa_ids
            for n in (self.topology.numa_nodes[i],)
        }

    def hugepages_capacity(self, size: int) -> dict[int, int]:
        """By NUMA node, bytes of huge pages of one size on an empty machine."""
        withheld = self.topology.withheld_memory
        return {
            i: 0 if i in withheld else self.topology.numa_nodes[i].hugepages.get(size, 0)
            for i in self.numa_ids
        }

    def cpu_left(self, state: NodeState) -> dict[int, int]:
        """By NUMA node, bookable thousandths of a CPU left; never negative."""
        charges = state.charges
        left = dict(self.cpu_total)
        for i, charge in charges.items():
            if i in left:
                left[i] = max(0, left[i] - charge.cpu_milli)
        return left

    def memory_left(self, state: NodeState, reading: Reading | None) -> dict[int, int]:
        """By NUMA node, bytes left: bookable, and never more than the kernel has."""
        left = dict(self.memory_capacity)
        for i, charge in state.charges.items():
            if i in left:
                left[i] = max(0, left[i] - charge.memory)
        if reading is not None:
            for i, free in reading.memory.items():
                if i in left and free < left[i]:
                    left[i] = free
        return left

    def hugepages_left(
        self, size: int, state: NodeState, reading: Reading | None
    ) -> dict[int, int]:
        """By NUMA node, bytes of huge pages of one size left."""
        left: dict[int, int] = {}
        for i, total in self.hugepages_capacity(size).items():
            amount = max(0, total - state.charge(i).hugepages.get(size, 0))
            if reading is not None and i in reading.hugepages:
                amount = min(amount, reading.hugepages[i].get(size, amount))
            left[i] = amount
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """How a decision came about; rendered by `nri_numa.engine.explain`, never logged whole.

    Attributes:
        steps: plain sentences, in order.
        cpu_left, memory_left: by NUMA node before the decision, where they were looked at.
        pool_before, pool_after: the shared pool.
        rule: the rule that refused, empty when none did.
    """

    pod: PodSandbox
    container: Container
    wishes: Wishes | None = None
    demand: Demand | None = None
    alignment: Alignment | None = None
    steps: tuple[str, ...] = ()
    cpu_left: Mapping[int, int] = field(default_factory=dict)
    memory_left: Mapping[int, int] = field(default_factory=dict)
    pool_before: CPUSet = NO_CPUS
    pool_after: CPUSet = NO_CPUS
    rule: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The container gets this, once the agent swaps ``state`` in.

    Attributes:
        updates: changes to other live containers, at most one for each.
    """

    state: NodeState
    allocation: Allocation
    adjustment: ContainerAdjustment = NO_ADJUSTMENT
    updates: tuple[ContainerUpdate, ...] = ()
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The container cannot have what it asks for.

    Attributes:
        reason: CamelCase, bounded set; metric label and first word of the message.
        message: one line for the pod's author: what was needed, what there was, which rule.
    """

    reason: str
    message: str
    trace: Trace


Decision = Admitted | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A container gave back what it had."""

    state: NodeState
    updates: tuple[ContainerUpdate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """A live container's resources change.

    Attributes:
        own: what to answer for the container itself; None lets the request through as it is.
        updates: changes to other live containers.
    """

    state: NodeState
    own: ContainerUpdate | None
    updates: tuple[ContainerUpdate, ...] = ()
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Resynced:
    """The state after comparing notes with the runtime.

    Attributes:
        adopted: ids of containers that are known and are where they should be.
        repaired: ids of known containers that the runtime had elsewhere.
        gap: ids of containers that started while we were away.
        gone: ids of containers that we remembered and the runtime does not have.
        problems: sentences for the log, such as two containers claiming one CPU.
        decisions: about strangers.
        left_alone: strangers that nothing asks to pin.
        resized: known containers whose resources changed while we were away.
    """

    state: NodeState
    updates: tuple[ContainerUpdate, ...] = ()
    adopted: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    gap: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    left_alone: tuple[Allocation, ...] = ()
    resized: tuple[tuple[Allocation, Trace], ...] = ()
