"""State of the node: CPUs, memory nodes and charges of all containers. The single source of truth.

Pools, all subsets of the CPUs that containers may use (`Topology.allowed`):

- *exclusive*: CPUs of one container, or of those containers of a pod that share its list;
- *idle siblings*: siblings that are kept idle beside exclusive CPUs (``smt: isolate``);
- *granted*: CPUs that the kubelet's static CPU Manager granted; no other container gets them;
- *shared pool*: all other CPUs, without reserved CPUs under strict reservation, and without the
  kernel's isolated CPUs (`withheld_isolated_bits`). Containers without exclusive CPUs run here. It
  is never empty.
- *reserved*: never exclusive; normally part of the shared pool.

A `NodeState` is immutable. Every operation returns a new one, and a decision takes effect when the
agent swaps the state in. Containers of one *group* (shared ones with the same NUMA nodes; those
with the same yielding list; all unpinned ones) always have the same CPUs. So updates for a changed
pool are computed by group, and current CPUs of their containers are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, Self, TypedDict

import msgspec
from msgspec.structs import replace

from nri_numa.engine.captions import RESERVATION_CAPTION
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet, union_cpus
from nri_numa.model.machine import Topology, cpus_text
from nri_numa.model.reasons import RejectionReason
from nri_numa.model.settings import IsolatedCPUs, Settings
from nri_numa.model.workload import (
    NO_GRANTS,
    SMT,
    BusySchedule,
    Container,
    KubeletGrants,
    MemoryPolicy,
    PodSandbox,
    Policy,
    QoSClass,
)

FORMER_KINDS: Final = {"explicit": "listed", "unbound": "unpinned"}
"""Kind by the name that it had in checkpoints and annotations of older versions."""


class ContainerKind(StrEnum):
    """The way in which a container's CPUs are determined."""

    LISTED = "listed"
    """Exactly the CPUs an annotation lists."""
    EXCLUSIVE = "exclusive"
    """Whole CPUs of its own, chosen by the engine."""
    SHARED = "shared"
    """The shared pool of its NUMA nodes."""
    UNPINNED = "unpinned"
    """The whole shared pool."""
    FOREIGN = "foreign"
    """Pinned by another program (the kubelet's static policy): left alone."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        """Find the member of a former kind."""
        current = FORMER_KINDS.get(str(value))
        return next((kind for kind in cls if kind == current), None)


COMPUTED_KINDS: Final = (ContainerKind.EXCLUSIVE, ContainerKind.SHARED)
"""Placed by a policy, and not by a list."""


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """Charges on one NUMA node: thousandths of a CPU, bytes of memory, huge pages by size."""

    cpu_milli: int = 0
    memory: int = 0
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)

    def add(self, charge: Charge, sign: int = 1) -> Charge:
        """Add a charge (or subtract it with ``sign=-1``)."""
        hugepages = self.hugepages
        if charge.hugepages:
            merged = dict(hugepages)
            for size, amount in charge.hugepages.items():
                merged[size] = merged.get(size, 0) + sign * amount
            hugepages = {size: amount for size, amount in merged.items() if amount}
        return Charge(
            self.cpu_milli + sign * charge.cpu_milli, self.memory + sign * charge.memory, hugepages
        )

    def subtract(self, charge: Charge) -> Charge:
        """Subtract a charge; no resource becomes negative."""
        hugepages = {size: n - charge.hugepages.get(size, 0) for size, n in self.hugepages.items()}
        return Charge(
            max(0, self.cpu_milli - charge.cpu_milli),
            max(0, self.memory - charge.memory),
            {size: n for size, n in hugepages.items() if n > 0},
        )


NO_CHARGE = Charge()


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs, memory nodes and charges of one container.

    Attributes:
        cpus: its listed or exclusive CPUs; empty for shared and unpinned containers.
        exclusive: no other container may use ``cpus``, except containers of its pod that share the
            list or the pod pool.
        yields_to_exclusive: ``cpus`` are a yielding list; it runs on those that are not exclusive
            to others.
        numa_nodes: NUMA nodes of its CPUs; for a shared container those of its group.
        aligned: False if the placement falls short of the request in any way.
        reason: caption for people, never read; see `nri_numa.engine.captions`.
        foreign_cpus: last known CPUs that another program pinned a foreign container to.
        lifted_quota: requested CFS quota while it is lifted; None if it is not lifted.
        immovable: devices or other facts beside the policy tie it to its NUMA nodes.
        movable: it may move while it runs, so another container fits.
        migrating_from: memory nodes, part of ``mems``, that its pages migrate from; charged until
            they have migrated.
        reserved_at: Unix time in seconds of its container's end, or of the reservation for a
            pending one; its resources are reserved for the pod. 0 for a live container.
        has_shortfall: it runs with less than its size, because it could not grow.
        is_misaligned: it is on more NUMA nodes than an empty machine would need.
        is_undecided: it ran when a synchronization had no time for it.
        moved_for: purpose of its last move, *make room for shop/web/app*; empty without a move.
        unpinned_for: reason why it runs without the requested pin; None for any other.
        unpinned_memory: requested bytes that are not charged, because its memory is not pinned.
        uses_pod_resources: its size is its pod's sum (KEP-2837), as decided at its creation.
        is_in_pod_pool: its exclusive CPUs are those of the pod pool.
        is_restarted: it ended, and so did an earlier container of its name.
    """

    container_id: str
    pod_id: str = msgspec.field(name="podID")
    pod_uid: str = msgspec.field(name="podUID")
    namespace: str
    pod: str
    container: str
    kind: ContainerKind
    qos: QoSClass = QoSClass.BEST_EFFORT
    cpus: CPUSet = NO_CPUS
    idle_siblings: CPUSet = msgspec.field(name="idleSiblings", default=NO_CPUS)
    exclusive: bool = False
    yields_to_exclusive: bool = msgspec.field(name="yieldingCPUs", default=False)
    numa_nodes: NUMASet = msgspec.field(name="numaNodes", default=NO_NUMA_NODES)
    mems: NUMASet = NO_NUMA_NODES
    charges: Mapping[int, Charge] = msgspec.field(default_factory=dict)
    cpu_milli: int = msgspec.field(name="cpuMilli", default=0)
    memory_bytes: int = msgspec.field(name="memory", default=0)
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)
    policy: Policy = Policy.NONE
    smt: SMT = SMT.ANY
    load: BusySchedule | None = None
    aligned: bool = True
    reason: str = ""
    foreign_cpus: CPUSet = msgspec.field(name="pinned", default=NO_CPUS)
    lifted_quota: int | None = msgspec.field(name="quota", default=None)
    slots: str = ""
    mempolicy: MemoryPolicy = MemoryPolicy.DEFAULT
    assigned_at: float = msgspec.field(name="since", default=0.0)
    immovable: bool = False
    movable: bool = False
    migrating_from: NUMASet = msgspec.field(name="migratingFrom", default=NO_NUMA_NODES)
    reserved_at: float = msgspec.field(name="ended", default=0.0)
    has_shortfall: bool = msgspec.field(name="shortfall", default=False)
    is_misaligned: bool = msgspec.field(name="misaligned", default=False)
    is_undecided: bool = msgspec.field(name="undecided", default=False)
    moved_for: str = msgspec.field(name="movedFor", default="")
    unpinned_for: RejectionReason | None = msgspec.field(name="unpinnedFor", default=None)
    unpinned_memory: int = msgspec.field(name="unpinnedMemory", default=0)
    uses_pod_resources: bool = msgspec.field(name="sum", default=False)
    is_in_pod_pool: bool = msgspec.field(name="pool", default=False)
    is_restarted: bool = msgspec.field(name="restarted", default=False)

    @property
    def is_pinned(self) -> bool:
        """True if the agent writes its CPUs or memory nodes."""
        return self.kind not in (ContainerKind.UNPINNED, ContainerKind.FOREIGN) or bool(self.mems)

    @property
    def blocks_exclusive(self) -> bool:
        """True if its listed CPUs cannot become exclusive to others."""
        return self.kind is ContainerKind.LISTED and not (
            self.exclusive or self.yields_to_exclusive
        )

    @property
    def is_reservable(self) -> bool:
        """True if the pod keeps this allocation after the container has ended."""
        is_sharing = self.kind in (ContainerKind.SHARED, ContainerKind.UNPINNED)
        is_strict = self.policy in STRICT_POLICIES
        return self.exclusive or (is_sharing and is_strict and bool(self.charges))

    @property
    def with_migration_finished(self) -> Allocation:
        """Return the allocation after its pages have migrated."""
        if not self.migrating_from:
            return self
        charges = {i: charge for i, charge in self.charges.items() if i not in self.migrating_from}
        return replace(
            self,
            mems=self.mems - self.migrating_from,
            migrating_from=NO_NUMA_NODES,
            charges=charges,
        )

    def with_migration_started(self, prior: Allocation) -> Allocation:
        """Return the allocation during a migration: memory is charged on both sides."""
        old_mems = prior.mems - self.mems
        if not old_mems:
            return self
        charges = dict(self.charges)
        for i, charge in prior.charges.items():
            if i in old_mems:
                charges[i] = charges.get(i, NO_CHARGE).add(replace(charge, cpu_milli=0))
        return replace(self, mems=self.mems | old_mems, migrating_from=old_mems, charges=charges)

    @property
    def full_name(self) -> str:
        """``namespace/pod/container``."""
        return f"{self.namespace}/{self.pod}/{self.container}"

    @property
    def is_expected(self) -> bool:
        """True if it is reserved for a container that was not created: ids have no slash."""
        return "/" in self.container_id

    @property
    def exclusive_owners_key(self) -> tuple[str, CPUSet] | None:
        """Pod and exclusive CPUs: containers with the same key share the CPUs; None without any."""
        return (self.pod_uid, self.cpus) if self.exclusive else None


class ContainerIdentity(TypedDict):
    """Fields of an `Allocation` that name its container."""

    container_id: str
    pod_id: str
    pod_uid: str
    namespace: str
    pod: str
    container: str
    qos: QoSClass


def container_identity(pod: PodSandbox, container: Container) -> ContainerIdentity:
    """Build the identity of a container's allocation."""
    return ContainerIdentity(
        container_id=container.id,
        pod_id=pod.id,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        qos=pod.qos,
    )


class PreviousCPUs(msgspec.Struct, frozen=True):
    """CPUs of a stopped container, preferred for it or the next container of its pod."""

    cpus: CPUSet
    numa_nodes: NUMASet


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a pod.

    Attributes:
        affinity: NUMA nodes of the whole pod under scope ``pod``; None if none were chosen.
        sandbox_cgroup: cgroupsPath of its latest sandbox, if its cgroup existed; empty if the pod
            would get no reservation, or no cgroup was found.
        told_sum, sum_in_force: the runtime's reported sum, in thousandths of a CPU and bytes, and
            the later one of a resized container; None if they are equal.
        grown_container_names: containers whose own size has grown to the reported sum.
        pending_milli: thousandths of a CPU of its sum that no container has had since the pod last
            had no live one: others are still to be created.
        may_be_init: its containers so far lived one at a time, each with less than its sum, so the
            live one may be an init container, and later ones may need the whole sum.
        stopped_at: Unix time in seconds at which its latest sandbox stopped; 0 while it runs.
    """

    uid: str
    pod_id: str
    containers: frozenset[str] = frozenset()
    affinity: NUMASet | None = None
    affinity_is_preferred: bool = True
    previous: Mapping[str, PreviousCPUs] = msgspec.field(default_factory=dict)
    sandbox_cgroup: str = ""
    told_sum: Charge | None = None
    sum_in_force: Charge | None = None
    grown_container_names: frozenset[str] = frozenset()
    pending_milli: int = 0
    may_be_init: bool = False
    stopped_at: float = 0.0

    @property
    def has_pending_containers(self) -> bool:
        """True if containers that need whole CPUs may still be created."""
        return self.pending_milli >= 1000 or self.may_be_init


POD_RESERVATION_NAME = "*"
"""Name of what is kept for all containers of a pod that are still to come."""
STRICT_POLICIES = (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
UNPINNED_GROUP_KEY = -1
"""Group key of unpinned containers; shared ones are grouped by the bits of their NUMA nodes, those
with a soft list by its bits inverted, which are below: the unpinned ones list no CPU."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """All allocations on this node, and their sums.

    Attributes:
        listed: CPUs of lists that are neither exclusive nor yielding, by container id.
        listed_cpus: their union; never exclusive to another container.
        foreign: sets of CPUs that other programs pinned containers to, as bits, and how many
            containers to each.
        uncharged_counts: shared containers that are charged with nothing, by the bits of their NUMA
            nodes.
        unpinned_memory: bytes that are requested and not charged, by the bits of the NUMA nodes
            that their containers' CPUs are on; 0 where these are not bound either.
        kubelet: grants of the kubelet; never saved.
    """

    serial: int = 0
    allocations: Mapping[str, Allocation] = msgspec.field(default_factory=dict)
    pods: Mapping[str, PodRecord] = msgspec.field(default_factory=dict)
    exclusive: CPUSet = NO_CPUS
    idle_siblings: CPUSet = NO_CPUS
    listed: Mapping[str, CPUSet] = msgspec.field(default_factory=dict)
    listed_cpus: CPUSet = NO_CPUS
    foreign: Mapping[int, int] = msgspec.field(default_factory=dict)
    charges: Mapping[int, Charge] = msgspec.field(default_factory=dict)
    shared_groups: Mapping[int, Mapping[str, None]] = msgspec.field(default_factory=dict)
    uncharged_counts: Mapping[int, int] = msgspec.field(default_factory=dict)
    unpinned_memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    kubelet: KubeletGrants = NO_GRANTS

    def pool_bits(self, topology: Topology, settings: Settings) -> int:
        """Return the bits of the shared pool.

        The kubelet does not know the agent's exclusive CPUs and may grant all others. Containers
        then share granted CPUs rather than exclusive ones.
        """
        bits = topology.allowed.bits & ~(self.exclusive.bits | self.idle_siblings.bits)
        if settings.strict_cpu_reservation:
            bits &= ~settings.reserved_cpus.bits
        free_bits = bits & ~self.kubelet.granted_cpus.bits
        return free_bits & ~withheld_isolated_bits(topology, settings) or free_bits or bits

    @property
    def unavailable_cpus(self) -> CPUSet:
        """CPUs that another container cannot get: exclusive, idle siblings and granted."""
        return CPUSet.from_bits(self.unavailable_bits)

    @property
    def unavailable_bits(self) -> int:
        """Bits of `unavailable_cpus`, to compare two states without building sets."""
        return self.exclusive.bits | self.idle_siblings.bits | self.kubelet.granted_cpus.bits

    def with_kubelet(self, grants: KubeletGrants) -> NodeState:
        """Return the state with other grants of the kubelet."""
        return replace(self, serial=self.serial + 1, kubelet=grants)

    def allocated_on(self, numa_node: int) -> Charge:
        """Charges on one NUMA node."""
        return self.charges.get(numa_node, NO_CHARGE)

    def shared_milli(self, numa_node: int, cpus: CPUSet) -> int:
        """Thousandths of a CPU on a NUMA node that are charged to shared containers.

        Exclusive containers are charged exactly their CPUs. An offline exclusive CPU counts as
        charged to shared containers, which is conservative.
        """
        owned = (cpus.bits & self.exclusive.bits).bit_count()
        return max(0, self.allocated_on(numa_node).cpu_milli - 1000 * owned)

    def allocations_of_pod(self, uid: str) -> list[Allocation]:
        """Allocations of a pod's containers and its reservations, by container id."""
        record = self.pods.get(uid)
        return [] if record is None else [self.allocations[i] for i in sorted(record.containers)]

    def pod_pool(self, uid: str) -> tuple[Allocation, ...]:
        """Live containers of a pod that share its pool of exclusive CPUs, by container id."""
        return tuple(
            a
            for a in self.allocations_of_pod(uid)
            if a.is_in_pod_pool and a.kind is ContainerKind.EXCLUSIVE and not a.reserved_at
        )

    def requested_memory_of_pod(self, uid: str, excluded_id: str) -> Charge:
        """Sum the memory of a pod's live containers except one, pinned or not."""
        memory = 0
        for a in self.allocations_of_pod(uid):
            if not a.reserved_at and a.container_id != excluded_id:
                memory += a.unpinned_memory + sum(c.memory for c in a.charges.values())
        return Charge(memory=memory)

    def has_cpu_sharer(self, allocation: Allocation) -> bool:
        """True if another container of the pod has the same exclusive CPUs."""
        record = self.pods[allocation.pod_uid]
        return allocation.exclusive and _is_list_shared_in_pod(self.allocations, record, allocation)

    def with_allocation(self, *allocations: Allocation) -> NodeState:
        """Add allocations; their containers must not have one."""
        builder = StateBuilder(self)
        for allocation in allocations:
            builder.add_allocation(allocation)
        return builder.build_state()

    def without_allocation(self, *container_ids: str) -> NodeState:
        """Remove allocations; the pod records their exclusive CPUs as preferred."""
        if not container_ids:
            return self
        builder = StateBuilder(self)
        for container_id in container_ids:
            builder.remove_allocation(container_id)
        return builder.build_state()

    def with_reservation(
        self, container_id: str, now: float, caption: str = RESERVATION_CAPTION
    ) -> NodeState:
        """Turn an allocation into a pod reservation: its container ended, or is pending."""
        allocation = self.allocations[container_id]
        reservation = replace(
            allocation.with_migration_finished,
            is_restarted=allocation.container in self.pods[allocation.pod_uid].previous,
            lifted_quota=None,
            mempolicy=MemoryPolicy.DEFAULT,
            reason=caption,
            reserved_at=now,
            has_shortfall=False,
            is_misaligned=False,
            moved_for="",
            unpinned_memory=0,
        )
        return self.without_allocation(container_id).with_allocation(reservation)

    def reservations_of(self, uid: str) -> tuple[Allocation, ...]:
        """Reservations of a pod for containers that ended or are to come, by container id."""
        return tuple(a for a in self.allocations_of_pod(uid) if a.reserved_at)

    def may_reserve_for_pod(self, uid: str) -> bool:
        """True if the pod has a reservation, or gets one when its containers end."""
        return any(a.is_reservable for a in self.allocations_of_pod(uid))

    def with_pod(self, record: PodRecord) -> NodeState:
        """Replace a pod's record."""
        return replace(self, serial=self.serial + 1, pods={**self.pods, record.uid: record})

    def without_pod(self, uid: str) -> NodeState:
        """Drop a pod without containers."""
        pods = {i: record for i, record in self.pods.items() if i != uid}
        return replace(self, serial=self.serial + 1, pods=pods)


class StateBuilder:
    """Builder of every node state that differs in allocations."""

    def __init__(self, state: NodeState) -> None:
        self._before = state
        self._allocations, self.pods = dict(state.allocations), dict(state.pods)
        self._owned, self._idle = state.exclusive, state.idle_siblings
        self._listed, self._foreign = dict(state.listed), dict(state.foreign)
        self._charges, self._groups = dict(state.charges), dict(state.shared_groups)
        self._members: dict[int, dict[str, None]] = {}  # of groups that differ already
        self._uncharged = dict(state.uncharged_counts)
        self._unpinned_memory = dict(state.unpinned_memory)

    def add_allocation(self, a: Allocation) -> None:
        """Add one allocation; its container must not have one."""
        record = self.pods.get(a.pod_uid) or PodRecord(
            uid=a.pod_uid, pod_id=a.pod_id, containers=frozenset({a.container_id})
        )
        self._update_sums(a, record, 1)
        self._allocations[a.container_id] = a
        if a.container_id not in record.containers:
            record = replace(record, containers=record.containers | {a.container_id})
        self.pods[a.pod_uid] = record

    def remove_allocation(self, container_id: str) -> None:
        """Remove one allocation; the pod records its exclusive CPUs as preferred."""
        a = self._allocations[container_id]
        record = self.pods[a.pod_uid]
        self._update_sums(a, record, -1)
        del self._allocations[container_id]
        previous = record.previous
        if a.kind is ContainerKind.EXCLUSIVE or a.yields_to_exclusive:
            previous = {**previous, a.container: PreviousCPUs(a.cpus, a.numa_nodes)}
        containers = record.containers - {container_id}
        self.pods[a.pod_uid] = replace(record, containers=containers, previous=previous)

    def build_state(self) -> NodeState:
        """Build the state."""
        prior, listed = self._before, self._listed
        return NodeState(
            serial=prior.serial + 1,
            allocations=self._allocations,
            pods=self.pods,
            exclusive=self._owned,
            idle_siblings=self._idle,
            listed=listed,
            # Lists may overlap, so their union is computed again.
            listed_cpus=prior.listed_cpus
            if listed == prior.listed
            else union_cpus(listed.values()),
            foreign=self._foreign,
            charges=self._charges,
            shared_groups=self._groups,
            uncharged_counts=self._uncharged,
            unpinned_memory=self._unpinned_memory,
            kubelet=prior.kubelet,
        )

    def _update_sums(self, a: Allocation, record: PodRecord, sign: int) -> None:
        """Add a container to every sum (1), or subtract it (-1)."""
        may_share_list = a.exclusive and (sign < 0 or a.cpus <= self._owned)
        is_list_counted = may_share_list and _is_list_shared_in_pod(self._allocations, record, a)
        if a.exclusive or a.kind is ContainerKind.LISTED:
            self._update_owned_and_listed_cpus(a, sign, is_list_counted=is_list_counted)
        if a.foreign_cpus:
            _add_amount(self._foreign, a.foreign_cpus.bits, sign)
        if a.unpinned_memory:
            _add_amount(self._unpinned_memory, a.numa_nodes.bits, sign * a.unpinned_memory)
        charges = charges_with_cpu_removed(a.charges) if is_list_counted else a.charges
        for numa_node, charge in charges.items():
            total = self._charges.get(numa_node, NO_CHARGE).add(charge, sign)
            self._charges[numa_node] = total
            if total == NO_CHARGE:
                del self._charges[numa_node]
        key = shared_group_key(a)
        if key is not None:
            members = self._members.get(key)
            if members is None:
                members = self._members[key] = dict(self._groups.get(key, {}))
            if sign > 0:
                members[a.container_id] = None
            else:
                del members[a.container_id]
            self._groups[key] = members
            if not members:
                del self._groups[key]
            if key >= 0 and not a.charges:
                _add_amount(self._uncharged, key, sign)

    def _update_owned_and_listed_cpus(
        self, a: Allocation, sign: int, *, is_list_counted: bool
    ) -> None:
        """Update exclusive CPUs that no other of its pod shares, idle siblings, and listed CPUs."""
        if a.exclusive:
            if not is_list_counted:
                self._owned = self._owned | a.cpus if sign > 0 else self._owned - a.cpus
            if a.idle_siblings:
                idle_cpus, siblings = self._idle, a.idle_siblings
                self._idle = idle_cpus | siblings if sign > 0 else idle_cpus - siblings
        elif not a.yields_to_exclusive:
            if sign > 0:
                self._listed[a.container_id] = a.cpus
            else:
                del self._listed[a.container_id]


def _add_amount(amounts: dict[int, int], key: int, amount: int) -> None:
    """Add to one of several sums, and drop it if it is 0."""
    amounts[key] = amounts.get(key, 0) + amount
    if not amounts[key]:
        del amounts[key]


def _is_list_shared_in_pod(
    allocations: Mapping[str, Allocation], record: PodRecord, allocation: Allocation
) -> bool:
    keys = [
        allocations[i].exclusive_owners_key
        for i in record.containers
        if i in allocations and i != allocation.container_id
    ]
    return allocation.exclusive_owners_key in keys


def withheld_isolated_bits(topology: Topology, settings: Settings) -> int:
    """The bits of the kernel's isolated CPUs, where they are kept out of the shared pool.

    The kernel moves no process between them, so that all processes of a container that shares such
    CPUs would run on one. Where the pool could have no others, they are CPUs as any.
    """
    if settings.isolated is IsolatedCPUs.ANY or settings.kubelet.cpu_order:
        return 0  # the kubelet knows none
    bits = topology.allowed.bits
    if settings.strict_cpu_reservation:
        bits &= ~settings.reserved_cpus.bits
    isolated = topology.isolated.bits & bits
    return isolated if bits & ~isolated else 0


def charges_with_cpu_removed(charges: Mapping[int, Charge]) -> dict[int, Charge]:
    """Remove CPUs from charges of a container whose list is counted already."""
    return {i: replace(charge, cpu_milli=0) for i, charge in charges.items()}


def shared_group_key(allocation: Allocation) -> int | None:
    """Key of the group whose CPUs follow the shared pool; None with own CPUs, or if not running."""
    if allocation.reserved_at:
        return None
    if allocation.kind is ContainerKind.SHARED:
        return allocation.numa_nodes.bits
    if allocation.kind is ContainerKind.UNPINNED:
        return UNPINNED_GROUP_KEY
    return ~allocation.cpus.bits if allocation.yields_to_exclusive else None


def shared_group_cpus(key: int, pool: CPUSet, topology: Topology, withheld: int) -> CPUSet:
    """CPUs of a group: the pool on its NUMA nodes, or its list.

    A group without usable CPUs there (offline, or exclusive to others) gets the whole pool, because
    an empty cpuset cannot be written and would mean *unchanged*.
    """
    if key >= 0:
        bits = pool.bits & topology.cpu_bits_of(key)
    else:
        bits = ~key & topology.online.bits & ~withheld
    return CPUSet.from_bits(bits) if bits else pool


def build_node_state(
    allocations: Iterable[Allocation],
    pods: Iterable[PodRecord] = (),
    serial: int = 0,
    kubelet: KubeletGrants = NO_GRANTS,
) -> NodeState:
    """Build a state from its parts, as after a restart; members of pods are computed again."""
    builder = StateBuilder(NodeState(serial=serial, kubelet=kubelet))
    allocations = list(allocations)
    members: dict[str, set[str]] = {}
    for a in allocations:
        members.setdefault(a.pod_uid, set()).add(a.container_id)
    for p in pods:
        containers = frozenset(members.get(p.uid, ()))
        builder.pods[p.uid] = p if p.containers == containers else replace(p, containers=containers)
    for a in allocations:
        builder.add_allocation(a)
    return builder.build_state()


def find_allocation_contradiction(a: Allocation) -> str:
    """Find a contradiction within one allocation; empty for none.

    For allocations that were read from outside; all other code relies on their consistency.
    """
    if a.kind is ContainerKind.EXCLUSIVE and not (a.exclusive and a.cpus):
        return "an exclusive container must own CPUs"
    if a.kind is ContainerKind.SHARED and not a.numa_nodes:
        return "a shared container must have NUMA nodes"
    if a.exclusive and a.kind not in (ContainerKind.EXCLUSIVE, ContainerKind.LISTED):
        return f"a container that is {a.kind} cannot own CPUs"
    if a.yields_to_exclusive and (a.exclusive or a.kind is not ContainerKind.LISTED or not a.cpus):
        return "only a list of shared CPUs can be soft"
    if a.idle_siblings & a.cpus or (a.idle_siblings and not a.exclusive):
        return "only siblings of owned CPUs are kept idle"
    if a.kind is ContainerKind.FOREIGN and a.mems:
        return "a foreign container has no memory nodes of ours"
    if a.foreign_cpus and a.kind is not ContainerKind.FOREIGN:
        return "only a foreign container is pinned by another program"
    return ""


def step_invariant_violations(
    prior: NodeState, state: NodeState, topology: Topology, settings: Settings
) -> list[str]:
    """Check invariants that one step can violate; the cost is independent of the containers."""
    violations: list[str] = []
    if not state.pool_bits(topology, settings):
        violations.append("the shared pool is empty")
    owned, reserved = state.exclusive.bits, settings.reserved_cpus.bits
    if owned & state.idle_siblings.bits:
        cpus = state.exclusive & state.idle_siblings
        violations.append(f"{cpus_text(cpus, 'is', 'are')} both owned and kept idle")
    if owned & ~topology.possible.bits:
        cpus = state.exclusive - topology.possible
        violations.append(f"{cpus_text(cpus, 'is owned but does', 'are owned but do')} not exist")
    new_reserved = owned & ~prior.exclusive.bits & reserved
    if new_reserved:
        text = cpus_text(CPUSet.from_bits(new_reserved), "was", "were")
        violations.append(f"reserved {text} given exclusively")
    return violations


def state_invariant_violations(
    state: NodeState, topology: Topology, settings: Settings
) -> list[str]:
    """Check every invariant, over all containers; one sentence for each that does not hold."""
    violations = step_invariant_violations(state, state, topology, settings)
    violations += [*_check_allocations(state), *_check_sums(state)]
    for uid, record in state.pods.items():
        missing = [i for i in record.containers if i not in state.allocations]
        if missing:
            violations.append(f"pod {uid} remembers containers that are gone: {', '.join(missing)}")
    return violations


def _check_allocations(state: NodeState) -> Iterator[str]:
    """Check each allocation: contradictions, its id, its pod's record, and exclusive CPUs."""
    lists: set[tuple[str, CPUSet]] = set()
    owned = NO_CPUS
    for container_id, allocation in sorted(state.allocations.items()):
        if allocation.container_id != container_id:
            yield f"{container_id} is filed under another id: {allocation.container_id}"
        if contradiction := find_allocation_contradiction(allocation):
            yield f"{allocation.full_name}: {contradiction}"
        exclusive_list = allocation.exclusive_owners_key
        if exclusive_list is not None and exclusive_list not in lists:
            if allocation.cpus & owned:
                yield f"owned twice: {cpus_text(allocation.cpus & owned)} of {allocation.full_name}"
            owned = owned | allocation.cpus
            lists.add(exclusive_list)
        record = state.pods.get(allocation.pod_uid)
        if record is None or container_id not in record.containers:
            yield f"{allocation.full_name} is missing from its pod's record"


def _check_sums(state: NodeState) -> Iterator[str]:
    """Check that incremental sums equal those of the allocations, and listed CPUs."""
    sums = build_node_state(state.allocations.values(), state.pods.values())
    for container_id, cpus in sums.listed.items():
        if cpus & sums.exclusive:
            text = f"owned by another container: {cpus_text(cpus & sums.exclusive)}"
            yield f"listed for {sums.allocations[container_id].full_name}, but {text}"
    for field in NodeState.__struct_fields__:
        if field not in ("serial", "allocations", "pods", "kubelet"):
            actual, total = getattr(state, field), getattr(sums, field)
            if actual != total:
                yield f"{field}: counted as {actual}, and the allocations add up to {total}"
