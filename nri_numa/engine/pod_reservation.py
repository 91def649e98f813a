"""What a pod has beside the container that is being placed: kept for it, shared in it, to come.

What a pod's sum leaves is reserved for containers that ended or are still to come: hard while one
is on its way, soft after that (docs/adr/0015-init-containers.md). Containers that need no CPUs of
their own share those that the pod has beside the exclusive ones, as under the kubelet. So a
container may use more of the node than one of another pod, and what it does not take goes back to
its pod.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nri_numa.engine.accounting import check_pool_floor
from nri_numa.engine.decision import NO_DEMAND, PlacementRequest
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.request.demand import (
    PodShare,
    cpu_size_milli,
    is_in_pod_pool,
    own_request_milli,
    share_of_first_container,
    told_sum,
)
from nri_numa.engine.state import (
    NO_CHARGE,
    POD_RESERVATION_NAME,
    Allocation,
    Charge,
    ContainerKind,
    NodeState,
    PodRecord,
    charges_with_cpu_removed,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import Topology, cpus_text, numa_text
from nri_numa.model.workload import PodSandbox, QoSClass, Resources, Scope

RESTART_TIME_S: Final = 15.0
"""Seconds after its end in which the kubelet restarts a container for the first time: at once."""
BACK_OFF_TIME_S: Final = 330.0
"""Seconds in which it restarts one again: its longest back-off is 300 (MaxContainerBackOff)."""
NEW_SANDBOX_TIME_S: Final = 60.0
"""Seconds in which it makes another sandbox for a pod whose sandbox has died."""


class ReservationTerm(NamedTuple):
    """Unix times in seconds until which a reservation is hard, and at which it is given back.

    In between it is soft: it gives way to a request that would otherwise be rejected.
    """

    hard_until: float
    expires_at: float


def reservation_term(state: NodeState, reservation: Allocation, keep_s: float) -> ReservationTerm:
    """How long a pod keeps a reservation: hard while a container is on its way, soft after that.

    What the runtime does not tell is seen by what it does: a container is on its way after a
    sandbox, a creation or an end. ``keep_s`` is ``keepExclusiveCPUs``.
    """
    record = state.pods[reservation.pod_uid]
    if record.stopped_at:
        return ReservationTerm(0.0, record.stopped_at + NEW_SANDBOX_TIME_S)
    members = state.allocations_of_pod(reservation.pod_uid)
    last_change = changed_at(members)
    is_named = reservation.is_expected and reservation.container != POD_RESERVATION_NAME
    if is_named or all(a.reserved_at for a in members):
        # The kubelet knows of another. Its sandbox ends that, where it is seen to.
        end_time = math.inf if record.sandbox_cgroup else last_change + keep_s
        return ReservationTerm(end_time, end_time)
    if record.has_pending_containers:
        soft_time = last_change + keep_s
    else:
        soft_time = reservation.reserved_at + min(
            keep_s, BACK_OFF_TIME_S if reservation.is_restarted else RESTART_TIME_S
        )
    return ReservationTerm(soft_time, soft_time + keep_s)


def changed_at(members: Iterable[Allocation]) -> float:
    """Unix time in seconds of the last creation or end in a pod."""
    return max(a.reserved_at or a.assigned_at for a in members)


def soft_reservations(node: NodeSnapshot, but_uid: str = "") -> list[Allocation]:
    """Reservations that give way, of all pods but one: oldest first, then by container id."""
    state, keep_s = node.state, node.machine.settings.reservation_seconds
    reservations = [
        a
        for a in state.allocations.values()
        if a.reserved_at
        and a.pod_uid != but_uid
        and reservation_term(state, a, keep_s).hard_until <= node.now
    ]
    return sorted(
        reservations,
        key=lambda a: (changed_at(state.allocations_of_pod(a.pod_uid)), a.container_id),
    )


def expired_reservations(node: NodeSnapshot) -> list[Allocation]:
    """Reservations that pods have had long enough."""
    state, keep_s = node.state, node.machine.settings.reservation_seconds
    reservations = [a for a in state.allocations.values() if a.reserved_at]
    return [a for a in reservations if reservation_term(state, a, keep_s).expires_at <= node.now]


def reserved_text(reservation: Allocation) -> str:
    """What is reserved for which pod: its CPUs, or memory where it has none."""
    subject = (
        cpus_text(reservation.cpus)
        if reservation.cpus
        else f"memory of {numa_text(reservation.numa_nodes)}"
    )
    return f"{subject}, reserved for {reservation.namespace}/{reservation.pod},"


def entitled_milli(state: NodeState, uid: str, total_milli: int) -> int:
    """Thousandths of a CPU that a pod may have reserved: whole CPUs of its sum that it can need.

    What its live containers do not use; all whole ones, if the one that lives may be an init
    container that ends first.
    """
    live_milli = _live_milli(_live(state, uid))
    if state.pods[uid].may_be_init:
        return max(0, total_milli // 1000 - live_milli // 1000) * 1000
    return max(0, total_milli - live_milli) // 1000 * 1000


def _live_milli(live: list[Allocation]) -> int:
    own_milli = sum(a.cpu_milli for a in live if not a.uses_pod_resources)
    pods = [a.cpu_milli for a in live if a.uses_pod_resources]
    return max(_sum_charges(_count_owned_cpus_once(live)).cpu_milli, own_milli, *pods)


def with_creation(
    case: PlacementRequest, state: NodeState, *, is_first_container: bool
) -> NodeState:
    """Record what of a pod's sum is still to come after one of its containers was created."""
    is_placed = case.demand is not NO_DEMAND and case.pod.qos is QoSClass.GUARANTEED
    if not (is_placed and case.node.machine.settings.reservation_seconds):
        return state
    record, live = state.pods[case.pod.uid], _live(state, case.pod.uid)
    pending = max(0, case.pod_share.sum.cpu_milli - _live_milli(live))
    if len(live) > 1:
        pending = min(pending, record.pending_milli)
    may_be_init = bool(pending) and len(live) == 1 and (is_first_container or record.may_be_init)
    if (pending, may_be_init) == (record.pending_milli, record.may_be_init):
        return state
    return state.with_pod(replace(record, pending_milli=pending, may_be_init=may_be_init))


def with_pending_of(state: NodeState, record: PodRecord) -> NodeState:
    """The state in which no more of a pod was created than a record says."""
    mine = state.pods[record.uid]
    return state.with_pod(
        replace(mine, pending_milli=record.pending_milli, may_be_init=record.may_be_init)
    )


def with_sandbox(state: NodeState, pod: PodSandbox) -> NodeState:
    """The state in which a pod's newer sandbox has what was reserved for it."""
    record = state.pods[pod.uid]
    if record.pod_id == pod.id:
        return state
    reserved = state.reservations_of(pod.uid)
    state = state.without_allocation(*(a.container_id for a in reserved))
    state = state.with_allocation(*(replace(a, pod_id=pod.id) for a in reserved))
    record = replace(state.pods[pod.uid], pod_id=pod.id, sandbox_cgroup="", stopped_at=0.0)
    return state.with_pod(record)


class PodReservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod has beside a container that is being placed.

    Attributes:
        reserved: for containers of it that ended or are to come, by container id.
        sharers: containers that share the pod's own CPUs, by container id.
        is_joining: the container shares these, too; else it takes some of them.
    """

    reserved: tuple[Allocation, ...] = ()
    sharers: tuple[Allocation, ...] = ()
    is_joining: bool = False

    def open_node(self, case: PlacementRequest) -> tuple[PlacementRequest, PodReservation]:
        """The node as the container may use it, and what is to be restored afterwards.

        A container with CPUs of its own, or a list, may use all that is reserved. One that shares
        leaves the CPUs; alone in its pod it chooses its place, and what is to come follows it.
        """
        state, reserved = case.node.state, self.reserved
        has_own_cpus = case.demand.exclusive_cpus > 0
        if reserved:
            is_first = len(state.pods[case.pod.uid].containers) == 1
            state = state.without_allocation(*(a.container_id for a in reserved))
            if not has_own_cpus and case.requested.numacpu is None:
                if is_first and reserved[0].container == POD_RESERVATION_NAME:
                    reserved = ()
                cpus_alone = [_reservation_without_memory(a) for a in reserved if a.exclusive]
                state = state.with_allocation(*cpus_alone)
        if has_own_cpus and not self.is_joining:
            state = state.without_allocation(*(a.container_id for a in self.sharers))
        return replace(case, node=case.node.with_state(state)), replace(self, reserved=reserved)

    def has_left_cpus(self, case: PlacementRequest) -> bool:
        """True if a container that shares was kept off CPUs that its pod has reserved."""
        is_sharer = not case.demand.exclusive_cpus and case.requested.numacpu is None
        return is_sharer and any(a.exclusive for a in self.reserved)

    def open_whole_node(self, case: PlacementRequest) -> tuple[PlacementRequest, PodReservation]:
        """The node without these CPUs: no pod's reservation is in the way of its own containers."""
        ids = [a.container_id for a in self.reserved if a.exclusive]
        state = case.node.state.without_allocation(*ids)
        rest = tuple(a for a in self.reserved if not a.exclusive)
        return replace(case, node=case.node.with_state(state)), replace(self, reserved=rest)

    def restore(
        self, case: PlacementRequest, state: NodeState, allocation: Allocation
    ) -> tuple[NodeState, tuple[str, ...]]:
        """Give back to the pod what the container did not take of `open_node`.

        Returns the ids of those that share fewer CPUs now, too.
        """
        if self.reserved:
            limit = None
            if case.pod.qos is QoSClass.GUARANTEED and case.pod_share.sum.cpu_milli:
                milli = own_request_milli(case.pod.qos, case.container.resources)
                limit = entitled_milli(state, case.pod.uid, case.pod_share.total_milli(milli))
            node = case.node.with_state(state)
            state = restore_pod_reservation(node, self.reserved, allocation, limit)
        if not self.sharers or self.is_joining:
            return state, ()
        # As many fewer are left to them as it took, wherever these were.
        ids = tuple(a.container_id for a in self.sharers)
        state = state.without_allocation(*(i for i in ids if i in state.allocations))
        node = case.node.with_state(state)
        return resize_pod_pool(node, self.sharers, case.pod_share.sum, None), ids


NO_POD_RESERVATION: Final = PodReservation()
"""Of a pod with no other container on the node."""


def find_pod_reservation(case: PlacementRequest) -> PodReservation:
    """What the pod of a container has beside it; what is shared and booked, if it asks for some."""
    state, pod, requested = case.node.state, case.pod, case.requested
    if case.container.name == POD_RESERVATION_NAME:
        return NO_POD_RESERVATION  # it is kept beside what is reserved already
    reserved = state.reservations_of(pod.uid)
    if requested.is_unpinned:
        return PodReservation(reserved=reserved)
    sharers = state.pod_pool(pod.uid) if requested.scope is Scope.POD else ()
    is_joining = bool(sharers) and is_in_pod_pool(pod, requested, case.pod_share)
    return PodReservation(reserved=reserved, sharers=sharers, is_joining=is_joining)


def sum_in_force(record: PodRecord | None, pod: PodSandbox) -> Charge:
    """The sum of a pod that was told last, by the runtime or by a container that has it.

    What the runtime told before is no news: each message of containerd but UpdatePodSandbox, which
    comes from 2.3 on, tells the sum of the pod's creation for ever.
    """
    told = told_sum(pod)
    is_news = record is None or record.sum_in_force is None or record.told_sum != told
    return told if is_news or record is None or record.sum_in_force is None else record.sum_in_force


def find_pod_share(case: PlacementRequest, prior: Allocation | None = None) -> PodShare:
    """What a pod has, and leaves to a container that is created, or resized from ``prior``."""
    pod, resources, record = case.pod, case.container.resources, case.pod_record
    if record is None:
        return share_of_first_container(pod, resources)
    if prior is None:
        is_own = case.container.name in (*record.grown_container_names, POD_RESERVATION_NAME)
        share = share_of_first_container(pod, resources, sum_in_force(record, pod), is_own=is_own)
        return _with_member_charges(case, share)
    memory = resources.memory_limit or 0
    total = sum_told_by(case.node.state, pod, prior, cpu_size_milli(resources), memory)
    share = PodShare(sum=total, uses_pod_resources=prior.uses_pod_resources)
    share = _with_member_charges(case, share)
    if share.uses_pod_resources:
        return share
    # What it has already, nobody takes off it: the others were not told their size yet.
    milli = own_request_milli(pod.qos, resources)
    limit = share.total_milli(milli) - min(milli, _sum_charges((prior,)).cpu_milli)
    others = replace(share.other_charge, cpu_milli=min(share.other_charge.cpu_milli, limit))
    return replace(share, other_charge=others)


def _with_member_charges(case: PlacementRequest, share: PodShare) -> PodShare:
    """Add what other live containers of its pod have and leave a container."""
    requested = case.requested
    joins = is_in_pod_pool(case.pod, requested, share)
    pods_list = requested.listed_cpus if requested.list_is_pods else NO_CPUS
    live = _live(case.node.state, case.pod.uid)
    members = _count_owned_cpus_once(
        [a for a in live if a.container_id != case.container.id], pods_list
    )
    own = others = _sum_charges([a for a in members if not a.uses_pod_resources])
    for a in [a for a in members if a.uses_pod_resources]:
        booked = _sum_charges((a,))
        if a.is_in_pod_pool and a.kind is ContainerKind.EXCLUSIVE:
            # It gives all but one CPU, and memory that it only might use.
            milli = 0 if joins else min(1000, booked.cpu_milli)
            booked = Charge(milli, booked.memory if share.uses_pod_resources else 0)
        others = others.add(booked)
    return replace(share, own_charge=own, other_charge=others)


def sum_told_by(
    state: NodeState, pod: PodSandbox, prior: Allocation, size: int, memory: int
) -> Charge:
    """The sum of a pod once one of its containers has another size, which is the pod's if it is."""
    total = sum_in_force(state.pods.get(pod.uid), pod)
    if not prior.uses_pod_resources or pod.qos is not QoSClass.GUARANTEED:
        return total
    if size != prior.cpu_milli and total.cpu_milli:
        total = replace(total, cpu_milli=size)
    if memory != prior.memory_bytes >= total.memory > 0:
        total = replace(total, memory=memory)
    return total


def with_sum_told(
    state: NodeState, pod: PodSandbox, allocation: Allocation, total: Charge
) -> NodeState:
    """Remember which sum a resize told, and whose own size is that of its pod by now."""
    grown = state.pods[pod.uid].grown_container_names
    if not allocation.uses_pod_resources and allocation.cpu_milli >= total.cpu_milli > 0:
        grown |= {allocation.container}
    return _with_sum(state, pod, total, grown)


def with_pod_resized(state: NodeState, pod: PodSandbox, resources: Resources) -> NodeState:
    """Remember the sum that the runtime tells of a pod that is resized, as far as it does."""
    record = state.pods.get(pod.uid)
    if record is None:
        return state
    had, new = sum_in_force(record, pod), told_sum(replace(pod, resources=resources))
    total = Charge(new.cpu_milli or had.cpu_milli, new.memory or had.memory)
    return _with_sum(state, pod, total, record.grown_container_names)


def _with_sum(state: NodeState, pod: PodSandbox, total: Charge, grown: frozenset[str]) -> NodeState:
    record, told = state.pods[pod.uid], told_sum(pod)
    is_told = total == told
    after = replace(
        record,
        told_sum=None if is_told else told,
        sum_in_force=None if is_told else total,
        grown_container_names=grown,
    )
    return state if after == record else state.with_pod(after)


def pod_pool_cpus(state: NodeState, uid: str, total_milli: int) -> int:
    """The number of CPUs that a pod's other containers leave to its pool, at least one."""
    others = _sum_charges(a for a in _live(state, uid) if not a.uses_pod_resources)
    return max(1, (total_milli - others.cpu_milli) // 1000)


def by_core(topology: Topology, cpus: CPUSet) -> list[int]:
    """CPUs in the order of their cores, then of their ids, so that a pool is cut between cores.

    One that is offline is a core of its own.
    """
    cores = {cpu: one.core for cpu, one in topology.cpus.items()}
    return sorted(cpus, key=lambda cpu: (cores.get(cpu, cpu), cpu))


def resize_pod_pool(
    node: NodeSnapshot, pool: tuple[Allocation, ...], total: Charge, before: Allocation | None
) -> NodeState:
    """Add a pod's pool to a state without it, with what the pod's owners leave it by now.

    It grows by what an owner has no more that had ``before``, and by nobody else's CPUs.
    """
    state, topology, like = node.state, node.machine.topology, pool[0]
    own, idle_siblings = like.cpus, like.idle_siblings
    freed = NO_CPUS
    if before is not None and before.kind is ContainerKind.EXCLUSIVE:
        freed, idle_siblings = before.cpus, idle_siblings | before.idle_siblings
    usable = by_core(topology, (own | freed) - state.unavailable_cpus)
    usable.sort(key=lambda cpu: cpu not in own)
    cpus = CPUSet(usable[: pod_pool_cpus(state, like.pod_uid, total.cpu_milli)])
    idle_siblings = (idle_siblings & topology.siblings_of(cpus)) - cpus - state.unavailable_cpus
    pool = _with_pool_memory(state, pool, total.memory, before)
    return with_pod_pool(
        state, pool, replace(like, cpus=cpus, idle_siblings=idle_siblings), topology
    )


def _with_pool_memory(
    state: NodeState, pool: tuple[Allocation, ...], total: int, before: Allocation | None
) -> tuple[Allocation, ...]:
    """Book for a pool once the memory that its pod's owners leave, as far as they gave it back."""
    owners = _sum_charges(a for a in _live(state, pool[0].pod_uid) if not a.uses_pod_resources)
    change = max(0, total - owners.memory) - _sum_charges(pool).memory
    if total <= 0 or not change:
        return pool
    changed = []
    for one in pool:
        charges = dict(one.charges)
        for i in one.mems:  # by id
            charge = charges.get(i, NO_CHARGE)
            had = NO_CHARGE if before is None else before.charges.get(i, NO_CHARGE)
            step = max(-charge.memory, min(change, had.memory))
            charges[i] = replace(charge, memory=charge.memory + step)
            change -= step
        changed.append(replace(one, charges=charges))
    return tuple(changed)


def is_for_pod_pool(state: NodeState, ended: Allocation) -> bool:
    """True if a pod's pool gets what a live owner of the pod had."""
    is_owner = ended.kind is ContainerKind.EXCLUSIVE and not ended.uses_pod_resources
    return is_owner and not ended.reserved_at and bool(state.pod_pool(ended.pod_uid))


def give_to_pod_pool(node: NodeSnapshot, ended: Allocation) -> NodeState:
    """The state once a pod's pool has what an owner of the pod had."""
    state, uid = node.state, ended.pod_uid
    pool, total = state.pod_pool(uid), _sum_charges(_count_owned_cpus_once(_live(state, uid)))
    ids = [ended.container_id, *(a.container_id for a in pool)]
    return resize_pod_pool(node.with_state(state.without_allocation(*ids)), pool, total, ended)


def _live(state: NodeState, uid: str) -> list[Allocation]:
    return [a for a in state.allocations_of_pod(uid) if not a.reserved_at]


def _count_owned_cpus_once(
    allocations: Iterable[Allocation], listed: CPUSet = NO_CPUS
) -> list[Allocation]:
    """Allocations whose CPUs are counted once where several own the same; a list not at all."""
    lists = {listed.bits}
    found = []
    for a in allocations:
        if a.exclusive and a.cpus.bits in lists:
            a = replace(a, charges=charges_with_cpu_removed(a.charges))
        elif a.exclusive:
            lists.add(a.cpus.bits)
        found.append(a)
    return found


def _sum_charges(allocations: Iterable[Allocation]) -> Charge:
    """CPUs and memory of allocations, in sum."""
    cpu_milli = memory = 0
    for a in allocations:
        for charge in a.charges.values():
            cpu_milli += charge.cpu_milli
            memory += charge.memory
    return Charge(cpu_milli, memory)


def with_pod_pool(
    state: NodeState, sharers: Iterable[Allocation], like: Allocation, topology: Topology
) -> NodeState:
    """Add containers that share their pod's CPUs, with the CPUs of one of them."""
    resized = []
    for one in sharers:
        charges = {i: replace(c, cpu_milli=0) for i, c in one.charges.items()}
        for i, count in topology.cpu_count_by_node(like.cpus).items():
            charges[i] = replace(charges.get(i, NO_CHARGE), cpu_milli=1000 * count)
        charges = {i: c for i, c in charges.items() if c != NO_CHARGE}
        cpus, idle_siblings = like.cpus, like.idle_siblings
        resized.append(
            replace(
                one, cpus=cpus, idle_siblings=idle_siblings,
                numa_nodes=topology.numa_of(cpus), charges=charges,
            )
        )  # fmt: skip
    return state.with_allocation(*resized)


def _reservation_without_memory(reserved: Allocation) -> Allocation:
    """What a container that shares leaves to its pod; memory that is kept is for it, too."""
    charges = {i: Charge(c.cpu_milli) for i, c in reserved.charges.items() if c.cpu_milli}
    return replace(reserved, charges=charges, mems=NO_NUMA_NODES, memory_bytes=0, hugepages={})


def with_reservation_renewed(state: NodeState, uid: str, now: float) -> NodeState:
    """The state in which what is kept for containers to come is kept from now on."""
    pending = [a for a in state.reservations_of(uid) if a.container == POD_RESERVATION_NAME]
    if not pending:
        return state
    state = state.without_allocation(*(a.container_id for a in pending))
    return state.with_allocation(*(replace(a, reserved_at=now) for a in pending))


def with_sandbox_stopped(state: NodeState, uid: str, sandbox: str, now: float) -> NodeState:
    """The state in which a pod's sandbox has stopped; itself where that is not its latest one."""
    record = state.pods.get(uid)
    if record is None or record.pod_id != sandbox or record.stopped_at:
        return state
    return state.with_pod(replace(record, stopped_at=now)) if state.reservations_of(uid) else state


def without_pending_reservation(state: NodeState, uid: str) -> NodeState:
    """The state without what is kept for all containers of a pod that are still to come."""
    reserved = state.reservations_of(uid)
    ids = (a.container_id for a in reserved if a.container == POD_RESERVATION_NAME)
    return state.without_allocation(*ids)


def restore_pod_reservation(
    node: NodeSnapshot,
    reserved: Iterable[Allocation],
    used: Allocation,
    limit_milli: int | None = None,
) -> NodeState:
    """Keep for a pod what its next container did not take.

    In whole CPUs no more than ``limit_milli``, for containers with a name before all others; and
    nothing of which the shared pool has to keep some by now.
    """
    state, topology = node.state, node.machine.topology
    taken = dict(used.charges)  # what of it was not reserved, as far as was looked
    ordered = sorted(
        reserved, key=lambda a: (a.container == POD_RESERVATION_NAME, not a.is_expected)
    )
    ids = [a.container_id for a in ordered if a.container_id in state.allocations]
    state = state.without_allocation(*ids)
    for one in ordered:
        cpus, idle_siblings = _unused_cpus(topology, state, one, used, limit_milli)
        is_exclusive, withheld = used.exclusive and one.exclusive, cpus | idle_siblings
        if is_exclusive and check_pool_floor(node.with_state(state), "", withheld):
            continue
        charges = _unused_charges(one, taken, topology.cpu_count_by_node(cpus))
        rest = _reservation_of(one, cpus, idle_siblings, charges)
        if rest is not None:
            state = state.with_allocation(rest)
    return state


def _unused_cpus(
    topology: Topology, state: NodeState, one: Allocation, used: Allocation, limit_milli: int | None
) -> tuple[CPUSet, CPUSet]:
    """CPUs and idle siblings that are left of a reservation, within what its pod may reserve."""
    used_cpus = NO_CPUS if used.yields_to_exclusive else used.cpus | used.idle_siblings
    cpus, idle_siblings = one.cpus - used_cpus, one.idle_siblings - used_cpus
    if limit_milli is None:
        return cpus, idle_siblings
    count = 0
    if one.container != POD_RESERVATION_NAME or state.pods[one.pod_uid].has_pending_containers:
        reserved = sum(len(a.cpus) for a in state.reservations_of(one.pod_uid) if a.exclusive)
        count = max(0, limit_milli // 1000 - reserved)
    cpus = CPUSet(by_core(topology, cpus)[max(0, len(cpus) - count) :])
    return cpus, idle_siblings & topology.siblings_of(cpus)


def _unused_charges(
    one: Allocation, taken: dict[int, Charge], cpu_counts: Mapping[int, int]
) -> dict[int, Charge]:
    """Charges that are left of a reservation; what they cover of ``taken`` is taken off there."""
    charges = {}
    for i, rest in one.charges.items():
        # Others of the pod may be anywhere, a container that ended was in its place.
        for numa_node in tuple(taken) if one.container == POD_RESERVATION_NAME else (i,):
            charge = taken.get(numa_node, NO_CHARGE)
            rest, taken[numa_node] = rest.subtract(charge), charge.subtract(rest)
        if one.exclusive:
            rest = replace(rest, cpu_milli=1000 * cpu_counts.get(i, 0))
        if rest != NO_CHARGE:
            charges[i] = rest
    return charges


def _reservation_of(
    one: Allocation, cpus: CPUSet, idle_siblings: CPUSet, charges: Mapping[int, Charge]
) -> Allocation | None:
    """A reservation with what is left of it; None where that is nothing."""
    if cpus == one.cpus and idle_siblings == one.idle_siblings and charges == one.charges:
        return one
    if not cpus and (one.exclusive or not charges):
        return None
    total = reduce(Charge.add, charges.values(), NO_CHARGE)
    mems = one.mems if total.memory or total.hugepages else NO_NUMA_NODES
    return replace(
        one, cpus=cpus, idle_siblings=idle_siblings, numa_nodes=NUMASet(charges), charges=charges,
        mems=mems, memory_bytes=total.memory, hugepages=total.hugepages,
    )  # fmt: skip
