"""The node's state: who has which CPUs and memory nodes. The single source of truth.

Pools, all subsets of the CPUs that may be given to containers (`Topology.allowed`):

- *owned*: CPUs that belong to one container alone, or to those of one pod that have its list;
- *idle*: thread siblings kept idle for an owner (``smt: isolate``);
- *the kubelet's*: CPUs that its static CPU Manager granted exclusively; nobody else gets them;
- *shared pool*: everything else; with strict reservation, without the reserved CPUs too, and
  without the kernel's isolated CPUs (`isolated`). Containers without CPUs of their own run here.
  It is never empty.
- *reserved*: never owned; normally still part of the shared pool.

A `NodeState` is immutable. Every operation returns a new one, so a decision is an offer until the
agent swaps the state in. Containers of one *group* (shared ones with the same NUMA nodes; those
with the same soft list; all unbound ones) always have the same CPUs, which is why a changed pool is
answered group by group and what each of them has now is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypedDict

import msgspec
from msgspec.structs import replace

from nri_numa.engine.values.settings import CPUOrder, IsolatedCPUs, Settings
from nri_numa.engine.values.workload import (
    NO_GRANTS,
    SMT,
    Container,
    KubeletGrants,
    Load,
    MemoryPolicy,
    PodSandbox,
    Policy,
    QoSClass,
)
from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.machine.model import Topology, cpus_text


class Kind(StrEnum):
    """How a container's CPUs are determined."""

    EXPLICIT = "explicit"
    """Exactly the CPUs an annotation lists."""
    EXCLUSIVE = "exclusive"
    """Whole CPUs of its own, chosen by the engine."""
    SHARED = "shared"
    """The shared pool of its NUMA nodes."""
    UNBOUND = "unbound"
    """The whole shared pool."""
    FOREIGN = "foreign"
    """Pinned by somebody else (the kubelet's static policy): left alone."""


class Charge(msgspec.Struct, frozen=True):
    """What is booked on one NUMA node: CPU in thousandths, memory in bytes, huge pages by size."""

    cpu_milli: int = 0
    memory: int = 0
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)

    def plus(self, other: Charge, sign: int = 1) -> Charge:
        """Add ``other`` (or take it away with ``sign=-1``)."""
        hugepages = self.hugepages
        if other.hugepages:
            merged = dict(hugepages)
            for size, amount in other.hugepages.items():
                merged[size] = merged.get(size, 0) + sign * amount
            hugepages = {size: amount for size, amount in merged.items() if amount}
        return Charge(
            self.cpu_milli + sign * other.cpu_milli,
            self.memory + sign * other.memory,
            hugepages,
        )


NOTHING = Charge()


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has.

    Attributes:
        cpus: CPUs listed for or owned by it; empty for shared and unbound containers.
        idle: thread siblings kept idle for it.
        owned: no other container may use ``cpus``, but those of its pod that own the same list.
        soft: ``cpus`` are a list that gives way: it runs on those of them that no container owns.
        numa_nodes: the NUMA nodes a shared container's CPUs come from; for others where they lie.
        mems: cpuset.mems; empty means untouched.
        charges: what is booked for it, by NUMA node.
        preferred: False when a wider set than ideal had to be taken.
        reason: why it has what it has, one clause.
        pinned: CPUs that somebody else pinned a foreign container to, as far as we know.
        quota: the CFS quota that was asked for, kept while it is lifted; None when not lifted.
        slots: ids of the extended resource that it holds, separated by commas.
        mempolicy: the memory policy that the runtime was asked to start it with, if any.
        since: Unix time in seconds at which it was decided.
        ended: Unix time in seconds at which its container ended; its CPUs are kept for the pod.
            0 while it lives.
    """

    container_id: str
    pod_id: str
    pod_uid: str
    namespace: str
    pod: str
    container: str
    kind: Kind
    qos: QoSClass = QoSClass.BEST_EFFORT
    cpus: CPUSet = NO_CPUS
    idle: CPUSet = NO_CPUS
    owned: bool = False
    soft: bool = False
    numa_nodes: NUMASet = NO_NUMA_NODES
    mems: NUMASet = NO_NUMA_NODES
    charges: Mapping[int, Charge] = msgspec.field(default_factory=dict)
    cpu_milli: int = 0
    memory_bytes: int = 0
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)
    policy: Policy = Policy.NONE
    smt: SMT = SMT.ANY
    load: Load | None = None
    preferred: bool = True
    reason: str = ""
    pinned: CPUSet = NO_CPUS
    quota: int | None = None
    slots: str = ""
    mempolicy: MemoryPolicy = MemoryPolicy.DEFAULT
    since: float = 0.0
    ended: float = 0.0

    @property
    def keeps_list(self) -> bool:
        """Whether no container can own the CPUs that it lists and shares."""
        return self.kind is Kind.EXPLICIT and not (self.owned or self.soft)

    @property
    def full_name(self) -> str:
        """``namespace/pod/container``."""
        return f"{self.namespace}/{self.pod}/{self.container}"

    @property
    def exclusive_list(self) -> tuple[str, CPUSet] | None:
        """Its pod and the list that it owns: containers that agree in both own it together."""
        return (self.pod_uid, self.cpus) if self.owned and self.kind is Kind.EXPLICIT else None


class Identity(TypedDict):
    """Those fields of an `Allocation` that say whose it is."""

    container_id: str
    pod_id: str
    pod_uid: str
    namespace: str
    pod: str
    container: str
    qos: QoSClass


def identity(pod: PodSandbox, container: Container) -> Identity:
    """Whose an allocation for this container is."""
    return Identity(
        container_id=container.id,
        pod_id=pod.id,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        qos=pod.qos,
    )


class Former(msgspec.Struct, frozen=True):
    """What a stopped container of a pod had: it, or the next of its pod, gets it back if free."""

    cpus: CPUSet
    numa_nodes: NUMASet


class PodRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a pod.

    Attributes:
        containers: ids of its live containers.
        affinity: NUMA nodes chosen for the whole pod under scope ``pod``; None when none was.
        affinity_preferred: whether that choice was the ideal one.
        former: by container name.
    """

    uid: str
    pod_id: str
    containers: frozenset[str] = frozenset()
    affinity: NUMASet | None = None
    affinity_preferred: bool = True
    former: Mapping[str, Former] = msgspec.field(default_factory=dict)


ALL = "*"
"""Name of what is kept for all containers of a pod that are still to come."""
KEPT = "kept for its pod: the container ended"
UNBOUND_GROUP = -1
"""Group key of unbound containers; shared ones are grouped by the bits of their NUMA nodes, those
with a soft list by its bits inverted, which are below: the unbound ones list no CPU."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided on this node.

    Attributes:
        serial: grows by one with every change.
        allocations: by container id.
        pods: by pod UID.
        owned, idle: unions over the allocations.
        listed: CPUs of explicit lists that are neither owned nor soft, by container id.
        listed_cpus: their union; never given exclusively to somebody else.
        foreign: sets of CPUs that somebody else pinned containers to, as bits, and how many
            containers to each.
        charges: sums by NUMA node.
        groups: container ids by group key.
        kubelet: what the kubelet granted; not of our making, and never saved.
    """

    serial: int = 0
    allocations: Mapping[str, Allocation] = msgspec.field(default_factory=dict)
    pods: Mapping[str, PodRecord] = msgspec.field(default_factory=dict)
    owned: CPUSet = NO_CPUS
    idle: CPUSet = NO_CPUS
    listed: Mapping[str, CPUSet] = msgspec.field(default_factory=dict)
    listed_cpus: CPUSet = NO_CPUS
    foreign: Mapping[int, int] = msgspec.field(default_factory=dict)
    charges: Mapping[int, Charge] = msgspec.field(default_factory=dict)
    groups: Mapping[int, Mapping[str, None]] = msgspec.field(default_factory=dict)
    kubelet: KubeletGrants = NO_GRANTS

    def pool(self, topology: Topology, settings: Settings) -> CPUSet:
        """The shared pool.

        The kubelet knows nothing of owned CPUs and may grant all that are left. Containers must
        run somewhere, and then share with those it granted CPUs to rather than with owners.
        """
        bits = topology.allowed.bits & ~(self.owned.bits | self.idle.bits)
        if settings.strict_reserved:
            bits &= ~settings.reserved_cpus.bits
        free = bits & ~self.kubelet.taken.bits
        return CPUSet.from_bits(free & ~isolated(topology, settings).bits or free or bits)

    def grantable(self, topology: Topology, settings: Settings) -> CPUSet:
        """CPUs of which a container may own some: the pool's, and isolated ones nobody has."""
        apart = isolated(topology, settings).bits & ~self.withheld_bits
        return CPUSet.from_bits(self.pool(topology, settings).bits | apart)

    @property
    def withheld(self) -> CPUSet:
        """CPUs that nobody else may be given: owned, kept idle, or the kubelet's."""
        return CPUSet.from_bits(self.withheld_bits)

    @property
    def withheld_bits(self) -> int:
        """The bits of `withheld`, to compare two states without making sets."""
        return self.owned.bits | self.idle.bits | self.kubelet.taken.bits

    def with_kubelet(self, grants: KubeletGrants) -> NodeState:
        """The kubelet granted something else."""
        return replace(self, serial=self.serial + 1, kubelet=grants)

    def charge(self, numa_node: int) -> Charge:
        """What is booked on one NUMA node."""
        return self.charges.get(numa_node, NOTHING)

    def charge_of_pod(self, uid: str, but: str, listed: CPUSet = NO_CPUS) -> Charge:
        """What is booked for a pod's live containers, without one of them and an exclusive list."""
        total, record = NOTHING, self.pods.get(uid)
        lists = [listed]
        if record is not None:
            for container_id in record.containers - {but}:
                a = self.allocations[container_id]
                if a.ended:
                    continue
                charges = a.charges
                if a.kind is Kind.EXPLICIT and a.owned:
                    charges = without_cpus(charges) if a.cpus in lists else charges
                    lists.append(a.cpus)
                for charge in charges.values():
                    total = total.plus(charge)
        return total

    def owned_beside(self, allocation: Allocation) -> bool:
        """Whether another container of its pod owns the list that this one owns."""
        record = self.pods.get(allocation.pod_uid)
        mine = allocation.exclusive_list
        if mine is None or record is None:
            return False
        others = record.containers - {allocation.container_id}
        return any(self.allocations[i].exclusive_list == mine for i in others)

    def with_allocation(self, allocation: Allocation) -> NodeState:
        """Add one allocation; its container must not have one."""
        allocations = dict(self.allocations)
        allocations[allocation.container_id] = allocation
        pods = dict(self.pods)
        record = pods.get(allocation.pod_uid)
        containers = frozenset((allocation.container_id,))
        pods[allocation.pod_uid] = (
            PodRecord(uid=allocation.pod_uid, pod_id=allocation.pod_id, containers=containers)
            if record is None
            else replace(record, containers=record.containers | containers)
        )
        listed, listed_cpus = self.listed, self.listed_cpus
        owned, charges = self.owned, allocation.charges
        if allocation.owned:
            owned = owned | allocation.cpus
            if allocation.kind is Kind.EXPLICIT and self.owned_beside(allocation):
                charges = without_cpus(charges)
        elif allocation.keeps_list:
            listed = {**listed, allocation.container_id: allocation.cpus}
            listed_cpus = listed_cpus | allocation.cpus
        return NodeState(
            serial=self.serial + 1,
            allocations=allocations,
            pods=pods,
            owned=owned,
            idle=self.idle | allocation.idle if allocation.idle else self.idle,
            listed=listed,
            listed_cpus=listed_cpus,
            foreign=counted(self.foreign, allocation, 1)
            if allocation.kind is Kind.FOREIGN
            else self.foreign,
            charges=charged(self.charges, charges, 1),
            groups=grouped(self.groups, allocation, present=True),
            kubelet=self.kubelet,
        )

    def with_unbound(self, allocations: Iterable[Allocation]) -> NodeState:
        """Add many unbound allocations in one go; their containers must not have one."""
        every = dict(self.allocations)
        members = dict(self.groups.get(UNBOUND_GROUP, {}))
        containers: dict[str, set[str]] = {}
        pod_ids: dict[str, str] = {}
        for allocation in allocations:
            every[allocation.container_id] = allocation
            members[allocation.container_id] = None
            containers.setdefault(allocation.pod_uid, set()).add(allocation.container_id)
            pod_ids[allocation.pod_uid] = allocation.pod_id
        if not pod_ids:
            return self
        pods = dict(self.pods)
        for uid, ids in containers.items():
            record = pods.get(uid)
            pods[uid] = (
                PodRecord(uid=uid, pod_id=pod_ids[uid], containers=frozenset(ids))
                if record is None
                else replace(record, containers=record.containers | ids)
            )
        return replace(
            self,
            serial=self.serial + 1,
            allocations=every,
            pods=pods,
            groups={**self.groups, UNBOUND_GROUP: members},
        )

    def without(self, container_id: str) -> NodeState:
        """Take one allocation out; the pod keeps a memory of what an owner had."""
        allocation = self.allocations[container_id]
        beside = allocation.kind is Kind.EXPLICIT and self.owned_beside(allocation)
        allocations = dict(self.allocations)
        del allocations[container_id]
        pods = dict(self.pods)
        record = pods[allocation.pod_uid]
        former = record.former
        if allocation.kind is Kind.EXCLUSIVE or allocation.soft:
            former = {
                **former,
                allocation.container: Former(allocation.cpus, allocation.numa_nodes),
            }
        pods[allocation.pod_uid] = PodRecord(
            uid=record.uid,
            pod_id=record.pod_id,
            containers=record.containers - {container_id},
            affinity=record.affinity,
            affinity_preferred=record.affinity_preferred,
            former=former,
        )
        listed, listed_cpus = self.listed, self.listed_cpus
        if container_id in listed:
            # Lists may overlap, so what is left has to be looked through.
            listed = {i: cpus for i, cpus in listed.items() if i != container_id}
            listed_cpus = union(listed.values())
        return NodeState(
            serial=self.serial + 1,
            allocations=allocations,
            pods=pods,
            owned=self.owned - allocation.cpus if allocation.owned and not beside else self.owned,
            idle=self.idle - allocation.idle if allocation.idle else self.idle,
            listed=listed,
            listed_cpus=listed_cpus,
            foreign=counted(self.foreign, allocation, -1)
            if allocation.kind is Kind.FOREIGN
            else self.foreign,
            charges=charged(
                self.charges,
                without_cpus(allocation.charges) if beside else allocation.charges,
                -1,
            ),
            groups=grouped(self.groups, allocation, present=False),
            kubelet=self.kubelet,
        )

    def with_kept(self, container_id: str, now: float) -> NodeState:
        """Its container ended; its exclusive CPUs are kept for its pod, and nothing else."""
        allocation = self.allocations[container_id]
        kept = replace(
            allocation,
            mems=NO_NUMA_NODES,
            charges={i: Charge(c.cpu_milli) for i, c in allocation.charges.items() if c.cpu_milli},
            memory_bytes=0,
            hugepages={},
            quota=None,
            mempolicy=MemoryPolicy.DEFAULT,
            reason=KEPT,
            ended=now,
        )
        return self.without(container_id).with_allocation(kept)

    def kept_for(self, uid: str) -> tuple[Allocation, ...]:
        """What is kept for a pod of containers that ended, by container id."""
        record = self.pods.get(uid)
        ids = sorted(record.containers) if record is not None else ()
        return tuple(a for i in ids if (a := self.allocations[i]).ended)

    def with_pod(self, record: PodRecord) -> NodeState:
        """Replace what is remembered of one pod."""
        return replace(self, serial=self.serial + 1, pods={**self.pods, record.uid: record})

    def without_pod(self, uid: str) -> NodeState:
        """Forget a pod that has no containers left."""
        if uid not in self.pods:
            return self
        pods = dict(self.pods)
        del pods[uid]
        # Every pod ends so: asking a dataclass for its fields takes three times as long.
        return NodeState(
            serial=self.serial + 1,
            allocations=self.allocations,
            pods=pods,
            owned=self.owned,
            idle=self.idle,
            listed=self.listed,
            listed_cpus=self.listed_cpus,
            foreign=self.foreign,
            charges=self.charges,
            groups=self.groups,
            kubelet=self.kubelet,
        )


def isolated(topology: Topology, settings: Settings) -> CPUSet:
    """The kernel's isolated CPUs, where they are kept out of the shared pool.

    The kernel moves no process between them, so that all processes of a container that shares such
    CPUs would run on one. Where the pool could have no others, they are CPUs as any.
    """
    if settings.isolated is IsolatedCPUs.ANY or settings.cpu_order is CPUOrder.KUBELET:
        return NO_CPUS  # the kubelet knows none
    bits = topology.allowed.bits
    if settings.strict_reserved:
        bits &= ~settings.reserved_cpus.bits
    apart = topology.isolated.bits & bits
    return CPUSet.from_bits(apart) if bits & ~apart else NO_CPUS


def union(sets: Iterable[CPUSet]) -> CPUSet:
    """All CPUs of several sets."""
    bits = 0
    for cpus in sets:
        bits |= cpus.bits
    return CPUSet.from_bits(bits)


def counted(sets: Mapping[int, int], allocation: Allocation, sign: int) -> Mapping[int, int]:
    """How often each set is pinned by somebody else, with one container more (1) or less (-1)."""
    bits = allocation.pinned.bits
    if not bits:
        return sets
    count = sets.get(bits, 0) + sign
    return {**{b: n for b, n in sets.items() if b != bits}, **({bits: count} if count else {})}


def without_cpus(charges: Mapping[int, Charge]) -> dict[int, Charge]:
    """What a container adds to the sums where the CPUs of its list are counted already."""
    return {i: replace(charge, cpu_milli=0) for i, charge in charges.items()}


def charged(
    sums: Mapping[int, Charge], charges: Mapping[int, Charge], sign: int
) -> Mapping[int, Charge]:
    """What is booked on each NUMA node, with one container's charges more (1) or less (-1)."""
    if not charges:
        return sums
    result = dict(sums)
    for numa_node, charge in charges.items():
        total = result.get(numa_node, NOTHING).plus(charge, sign)
        if total.cpu_milli or total.memory or total.hugepages:
            result[numa_node] = total
        else:
            result.pop(numa_node, None)
    return result


def group_of(allocation: Allocation) -> int | None:
    """Key of the group whose CPUs follow the shared pool; None when it has CPUs of its own."""
    if allocation.kind is Kind.SHARED:
        return allocation.numa_nodes.bits
    if allocation.kind is Kind.UNBOUND:
        return UNBOUND_GROUP
    return ~allocation.cpus.bits if allocation.soft else None


def grouped(
    groups: Mapping[int, Mapping[str, None]], allocation: Allocation, *, present: bool
) -> Mapping[int, Mapping[str, None]]:
    """The members of each group, with one container more or less."""
    key = group_of(allocation)
    if key is None:
        return groups
    members = dict(groups.get(key, {}))
    if present:
        members[allocation.container_id] = None
    else:
        del members[allocation.container_id]
    result = dict(groups)
    if members:
        result[key] = members
    else:
        del result[key]
    return result


def group_cpus(key: int, pool: CPUSet, topology: Topology, withheld: int) -> CPUSet:
    """CPUs of a group: the pool, for shared containers cut down to their NUMA nodes; or its list.

    A group whose NUMA nodes or list have nothing left (the CPUs went offline, or are owned) falls
    back to the whole pool: an empty cpuset cannot be written and would mean *unchanged*.
    """
    if key >= 0:
        bits = pool.bits & topology.bits_of(key)
    else:
        bits = ~key & topology.online.bits & ~withheld
    return CPUSet.from_bits(bits) if bits else pool


def effective_cpus(
    allocation: Allocation, pool: CPUSet, topology: Topology, withheld: int
) -> CPUSet:
    """CPUs the container should really have now; empty means leave them alone.

    An unbound container is left alone while the pool is the whole machine, and a foreign one
    always. CPUs that went offline are left out, and come back when they do; those of a soft list
    that others own come back afterwards.
    """
    if allocation.kind is Kind.FOREIGN:
        return NO_CPUS
    key = group_of(allocation)
    if key is None:
        return pool if displaced(allocation, topology) else allocation.cpus & topology.online
    if key == UNBOUND_GROUP and pool == topology.allowed:
        return NO_CPUS
    return group_cpus(key, pool, topology, withheld)


def displaced(allocation: Allocation, topology: Topology) -> bool:
    """Whether a container is on the shared pool because all CPUs of its own are offline."""
    if group_of(allocation) is not None or not allocation.cpus:
        return False
    return not allocation.cpus & topology.online


_NOBODY: frozenset[str] = frozenset()


def build(
    allocations: Iterable[Allocation],
    pods: Iterable[PodRecord] = (),
    serial: int = 0,
    kubelet: KubeletGrants = NO_GRANTS,
) -> NodeState:
    """Put a state together from parts, as after a restart, in one pass over them.

    The containers of pods are worked out anew.
    """
    by_id: dict[str, Allocation] = {}
    members: dict[str, set[str]] = {}
    records = {p.uid: p for p in pods}
    owned = idle = 0
    listed: dict[str, CPUSet] = {}
    milli: dict[int, int] = {}
    memory: dict[int, int] = {}
    pages: dict[int, Charge] = {}
    foreign: Mapping[int, int] = {}
    groups: dict[int, dict[str, None]] = {}
    lists: set[tuple[str, CPUSet] | None] = set()
    for a in allocations:
        charges = a.charges
        by_id[a.container_id] = a
        members.setdefault(a.pod_uid, set()).add(a.container_id)
        if a.pod_uid not in records:
            records[a.pod_uid] = PodRecord(uid=a.pod_uid, pod_id=a.pod_id)
        if a.owned:
            owned |= a.cpus.bits
            if a.kind is Kind.EXPLICIT:
                charges = without_cpus(charges) if a.exclusive_list in lists else charges
                lists.add(a.exclusive_list)
        elif a.keeps_list:
            listed[a.container_id] = a.cpus
        idle |= a.idle.bits
        if a.pinned:
            foreign = counted(foreign, a, 1)
        # Added up as numbers: a thousand sums of charges would be a thousand values.
        for numa_node, charge in charges.items():
            milli[numa_node] = milli.get(numa_node, 0) + charge.cpu_milli
            memory[numa_node] = memory.get(numa_node, 0) + charge.memory
            if charge.hugepages:
                pages[numa_node] = pages.get(numa_node, NOTHING).plus(charge)
        key = group_of(a)
        if key is not None:
            groups.setdefault(key, {})[a.container_id] = None
    return NodeState(
        serial=serial + 1,
        allocations=by_id,
        pods={
            uid: record
            if record.containers == (of := members.get(uid, _NOBODY))
            else replace(record, containers=frozenset(of))
            for uid, record in records.items()
        },
        owned=CPUSet.from_bits(owned),
        idle=CPUSet.from_bits(idle),
        listed=listed,
        listed_cpus=union(listed.values()),
        foreign=foreign,
        charges={i: Charge(milli[i], memory[i], pages.get(i, NOTHING).hugepages) for i in milli},
        groups=groups,
        kubelet=kubelet,
    )


class Growing:
    """Does what `NodeState.with_allocation` does, in the mappings of the state it made last.

    Only that one is still true after the next: each state that comes out of here is gone with the
    call after it, unless `keep` is called between the two. States from elsewhere are never changed.
    What a decision works out late, the charges, is copied all the same.
    """

    def __init__(self) -> None:
        self._allocations: dict[str, Allocation] = {}
        self._pods: dict[str, PodRecord] = {}
        self._listed: dict[str, CPUSet] = {}
        self._groups: dict[int, dict[str, None]] = {}

    def keep(self) -> None:
        """Somebody keeps the state that was made last: it is not changed any more."""
        self._allocations, self._pods, self._listed, self._groups = {}, {}, {}, {}

    def add(self, state: NodeState, allocation: Allocation) -> NodeState:
        """Add one allocation; its container must not have one.

        A state that was made last must not be used afterwards.
        """
        container_id = allocation.container_id
        if state.allocations is not self._allocations:
            self._allocations = dict(state.allocations)
        if state.pods is not self._pods:
            self._pods = dict(state.pods)
        if state.groups is not self._groups:
            self._groups = {key: dict(members) for key, members in state.groups.items()}
        charges = allocation.charges
        if allocation.kind is Kind.EXPLICIT and state.owned_beside(allocation):
            charges = without_cpus(charges)
        self._allocations[container_id] = allocation
        record = self._pods.get(allocation.pod_uid)
        containers = frozenset((container_id,))
        self._pods[allocation.pod_uid] = (
            PodRecord(uid=allocation.pod_uid, pod_id=allocation.pod_id, containers=containers)
            if record is None
            else replace(record, containers=record.containers | containers)
        )
        key = group_of(allocation)
        if key is not None:
            self._groups.setdefault(key, {})[container_id] = None
        listed, listed_cpus, owned = state.listed, state.listed_cpus, state.owned
        if allocation.owned:
            owned = owned | allocation.cpus
        elif allocation.keeps_list:
            if listed is not self._listed:
                self._listed = dict(listed)
            self._listed[container_id] = allocation.cpus
            listed, listed_cpus = self._listed, listed_cpus | allocation.cpus
        return NodeState(
            serial=state.serial + 1,
            allocations=self._allocations,
            pods=self._pods,
            owned=owned,
            idle=state.idle | allocation.idle if allocation.idle else state.idle,
            listed=listed,
            listed_cpus=listed_cpus,
            foreign=counted(state.foreign, allocation, 1)
            if allocation.kind is Kind.FOREIGN
            else state.foreign,
            charges=charged(state.charges, charges, 1),
            groups=self._groups,
            kubelet=state.kubelet,
        )


def contradiction(a: Allocation) -> str:
    """Say what cannot be true of any allocation; empty when nothing is wrong.

    For allocations that were read back from somewhere: everything else relies on none of these.
    """
    if a.kind is Kind.EXCLUSIVE and not (a.owned and a.cpus):
        return "an exclusive container must own CPUs"
    if a.kind is Kind.SHARED and not a.numa_nodes:
        return "a shared container must have NUMA nodes"
    if a.owned and a.kind not in (Kind.EXCLUSIVE, Kind.EXPLICIT):
        return f"a container that is {a.kind} cannot own CPUs"
    if a.soft and (a.owned or a.kind is not Kind.EXPLICIT or not a.cpus):
        return "only a list of shared CPUs can be soft"
    if a.idle & a.cpus or (a.idle and not a.owned):
        return "only siblings of owned CPUs are kept idle"
    if a.kind is Kind.FOREIGN and a.mems:
        return "a foreign container has no memory nodes of ours"
    if a.pinned and a.kind is not Kind.FOREIGN:
        return "only a foreign container is pinned by somebody else"
    return ""


def step_violations(
    before: NodeState, after: NodeState, topology: Topology, settings: Settings
) -> list[str]:
    """Check what one step can break, at a cost that does not grow with the number of containers."""
    found: list[str] = []
    if not after.pool(topology, settings):
        found.append("the shared pool is empty")
    owned, reserved = after.owned.bits, settings.reserved_cpus.bits
    if owned & after.idle.bits:
        found.append(f"{cpus_text(after.owned & after.idle, 'is', 'are')} both owned and kept idle")
    if owned & ~topology.possible.bits:
        gone = after.owned - topology.possible
        found.append(f"{cpus_text(gone, 'is owned but does', 'are owned but do')} not exist")
    newly = owned & ~before.owned.bits & reserved
    if newly:
        taken = cpus_text(CPUSet.from_bits(newly), "was", "were")
        found.append(f"reserved {taken} given exclusively")
    return found


def violations(state: NodeState, topology: Topology, settings: Settings) -> list[str]:
    """Check every invariant, over all containers; one sentence for each that does not hold."""
    found = step_violations(state, state, topology, settings)
    owned, idle = NO_CPUS, NO_CPUS
    listed: dict[str, CPUSet] = {}
    charges: Mapping[int, Charge] = {}
    groups: Mapping[int, Mapping[str, None]] = {}
    foreign: Mapping[int, int] = {}
    lists: set[tuple[str, CPUSet]] = set()
    for container_id, allocation in sorted(state.allocations.items()):
        if allocation.container_id != container_id:
            found.append(f"{container_id} is filed under another id: {allocation.container_id}")
        exclusive_list = allocation.exclusive_list
        shared = exclusive_list in lists
        if exclusive_list is not None:
            lists.add(exclusive_list)
        if allocation.owned:
            if allocation.cpus & owned and not shared:
                both = cpus_text(allocation.cpus & owned)
                found.append(f"owned twice: {both} of {allocation.full_name}")
            owned = owned | allocation.cpus
        elif allocation.keeps_list:
            listed[container_id] = allocation.cpus
        if allocation.kind is Kind.EXCLUSIVE and not allocation.cpus:
            found.append(f"{allocation.full_name} is exclusive and has no CPUs")
        if allocation.kind is Kind.SHARED and not allocation.numa_nodes:
            found.append(f"{allocation.full_name} is shared and has no NUMA nodes")
        if allocation.kind is Kind.FOREIGN and allocation.mems:
            found.append(f"{allocation.full_name} is {allocation.kind} and has memory nodes")
        idle = idle | allocation.idle
        foreign = counted(foreign, allocation, 1)
        theirs = without_cpus(allocation.charges) if shared else allocation.charges
        charges = charged(charges, theirs, 1)
        groups = grouped(groups, allocation, present=True)
        record = state.pods.get(allocation.pod_uid)
        if record is None or container_id not in record.containers:
            found.append(f"{allocation.full_name} is missing from its pod's record")
    for container_id, cpus in listed.items():
        if cpus & owned:
            name = state.allocations[container_id].full_name
            both = cpus_text(cpus & owned)
            found.append(f"listed for {name}, but owned by another container: {both}")
    if owned != state.owned:
        found.append(f"owned CPUs are booked as {state.owned} and add up to {owned}")
    if idle != state.idle:
        found.append(f"idle CPUs are booked as {state.idle} and add up to {idle}")
    if listed != dict(state.listed) or union(listed.values()) != state.listed_cpus:
        found.append("explicit lists are booked differently from the allocations")
    if dict(foreign) != dict(state.foreign):
        found.append("foreign CPUs are booked differently from the allocations")
    if dict(charges) != dict(state.charges):
        found.append(f"charges are booked as {state.charges} and add up to {charges}")
    if {k: set(v) for k, v in groups.items()} != {k: set(v) for k, v in state.groups.items()}:
        found.append("groups are booked differently from the allocations")
    for uid, record in state.pods.items():
        missing = [i for i in record.containers if i not in state.allocations]
        if missing:
            found.append(f"pod {uid} remembers containers that are gone: {', '.join(missing)}")
    return found
