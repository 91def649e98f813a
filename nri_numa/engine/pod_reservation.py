"""Pod reservations and pod pools: resources of a pod beside the container that is being placed.

The rest of a pod's sum is reserved for containers that ended or are to come: hard while one is
expected, soft after that (docs/adr/0015-init-containers.md). Containers without exclusive CPUs
share the pod's other CPUs, the pod pool, as under the kubelet. So a container may use resources
that are reserved for its pod, and the unused part is reserved again.
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
"""Seconds after a container's end for its first restart, which the kubelet does at once."""
BACK_OFF_TIME_S: Final = 330.0
"""Seconds for later restarts: the kubelet's longest back-off is 300 (MaxContainerBackOff)."""
NEW_SANDBOX_TIME_S: Final = 60.0
"""Seconds for the kubelet to create another sandbox after a pod's sandbox has died."""


class ReservationTerm(NamedTuple):
    """Unix times in seconds until which a reservation is hard, and at which it expires.

    In between it is soft: it is released for a request that would otherwise be rejected.
    """

    hard_until: float
    expires_at: float


def reservation_term(state: NodeState, reservation: Allocation, keep_s: float) -> ReservationTerm:
    """Compute the term of a reservation: hard while a container is expected, soft after that.

    The runtime does not report expected containers, so one is assumed after a sandbox, a creation
    or an end. ``keep_s`` is ``podReservationTimeout``.
    """
    record = state.pods[reservation.pod_uid]
    if record.stopped_at:
        return ReservationTerm(0.0, record.stopped_at + NEW_SANDBOX_TIME_S)
    members = state.allocations_of_pod(reservation.pod_uid)
    last_change = changed_at(members)
    is_named = reservation.is_expected and reservation.container != POD_RESERVATION_NAME
    if is_named or all(a.reserved_at for a in members):
        # The kubelet will create another; the end of the sandbox ends the term if it is watched.
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
    """List soft reservations of all pods but one: oldest first, then by container id."""
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
    """List expired reservations."""
    state, keep_s = node.state, node.machine.settings.reservation_seconds
    reservations = [a for a in state.allocations.values() if a.reserved_at]
    return [a for a in reservations if reservation_term(state, a, keep_s).expires_at <= node.now]


def reserved_text(reservation: Allocation) -> str:
    """Clause that names a reservation's pod and its CPUs, or its memory if it has no CPUs."""
    subject = f"memory of {numa_text(reservation.numa_nodes)}"
    if reservation.cpus:
        subject = cpus_text(reservation.cpus)
    pod = f"{reservation.namespace}/{reservation.pod}"
    if not reservation.reserved_at:
        return f"{subject} of {pod}, whose container was not created,"
    return f"{subject}, reserved for {pod},"


def entitled_milli(state: NodeState, uid: str, total_milli: int) -> int:
    """Thousandths of a CPU that a pod may have reserved: whole CPUs of its sum.

    CPUs of live containers do not count, unless the only one may be an init container.
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
    """Record the pending part of a pod's sum after one of its containers was created."""
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
    """Return the state with a record's pending amounts for its pod."""
    mine = state.pods[record.uid]
    return state.with_pod(
        replace(mine, pending_milli=record.pending_milli, may_be_init=record.may_be_init)
    )


def with_sandbox(state: NodeState, pod: PodSandbox) -> NodeState:
    """Transfer a pod's reservations to its newer sandbox."""
    record = state.pods[pod.uid]
    if record.pod_id == pod.id:
        return state
    reserved = state.reservations_of(pod.uid)
    state = state.without_allocation(*(a.container_id for a in reserved))
    state = state.with_allocation(*(replace(a, pod_id=pod.id) for a in reserved))
    record = replace(state.pods[pod.uid], pod_id=pod.id, sandbox_cgroup="", stopped_at=0.0)
    return state.with_pod(record)


class PodReservation(msgspec.Struct, frozen=True, kw_only=True):
    """Reservations and pod pool beside a container that is being placed.

    Attributes:
        reserved: reservations for ended or pending containers, by container id.
        sharers: containers of the pod pool, by container id.
        is_joining: the container joins the pod pool; else it takes CPUs from it.
    """

    reserved: tuple[Allocation, ...] = ()
    sharers: tuple[Allocation, ...] = ()
    is_joining: bool = False

    def open_node(self, case: PlacementRequest) -> tuple[PlacementRequest, PodReservation]:
        """Release reserved resources for the container; return them to be restored afterwards.

        A container with exclusive CPUs or a list may use all of them. A shared container leaves the
        CPUs; the first of its pod chooses the NUMA nodes, and later containers follow it.
        """
        state, reserved = case.node.state, self.reserved
        has_own_cpus = case.demand.exclusive_cpus > 0
        if reserved:
            has_one_member = len(state.pods[case.pod.uid].containers) == 1
            state = state.without_allocation(*(a.container_id for a in reserved))
            if not has_own_cpus and case.requested.numacpu is None:
                if has_one_member and reserved[0].container == POD_RESERVATION_NAME:
                    reserved = ()
                cpus_alone = [_reservation_without_memory(a) for a in reserved if a.exclusive]
                state = state.with_allocation(*cpus_alone)
        if has_own_cpus and not self.is_joining:
            state = state.without_allocation(*(a.container_id for a in self.sharers))
        return replace(case, node=case.node.with_state(state)), replace(self, reserved=reserved)

    def has_withheld_cpus(self, case: PlacementRequest) -> bool:
        """True if CPUs that are reserved for its pod were not open to a shared container."""
        is_sharer = not case.demand.exclusive_cpus and case.requested.numacpu is None
        return is_sharer and any(a.exclusive for a in self.reserved)

    def open_whole_node(self, case: PlacementRequest) -> tuple[PlacementRequest, PodReservation]:
        """Release the reserved CPUs too: a reservation must not block its own pod's containers."""
        ids = [a.container_id for a in self.reserved if a.exclusive]
        state = case.node.state.without_allocation(*ids)
        reserved = tuple(a for a in self.reserved if not a.exclusive)
        return replace(case, node=case.node.with_state(state)), replace(self, reserved=reserved)

    def restore(
        self, case: PlacementRequest, state: NodeState, allocation: Allocation
    ) -> tuple[NodeState, tuple[str, ...]]:
        """Restore for the pod what the container did not take after `open_node`.

        Also return the ids of pod pool members that have fewer CPUs now.
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
        # The pool shrinks by as many CPUs as the container took.
        ids = tuple(a.container_id for a in self.sharers)
        state = state.without_allocation(*(i for i in ids if i in state.allocations))
        node = case.node.with_state(state)
        return resize_pod_pool(node, self.sharers, case.pod_share.sum, None), ids


NO_POD_RESERVATION: Final = PodReservation()
"""Reservation of a pod with no other container on the node."""


def find_pod_reservation(case: PlacementRequest) -> PodReservation:
    """Find reservations of a container's pod, and the pod pool if it is placed by pod scope."""
    state, pod, requested = case.node.state, case.pod, case.requested
    if case.container.name == POD_RESERVATION_NAME:
        return NO_POD_RESERVATION  # reserved in addition to earlier reservations
    reserved = state.reservations_of(pod.uid)
    if requested.is_unpinned:
        return PodReservation(reserved=reserved)
    sharers = state.pod_pool(pod.uid) if requested.scope is Scope.POD else ()
    is_joining = bool(sharers) and is_in_pod_pool(pod, requested, case.pod_share)
    return PodReservation(reserved=reserved, sharers=sharers, is_joining=is_joining)


def sum_in_force(record: PodRecord | None, pod: PodSandbox) -> Charge:
    """Return the latest sum of a pod, reported by the runtime or known from a container's size.

    A repeated report is ignored: containerd sends the sum of the pod's creation in every message
    except UpdatePodSandbox, which exists since 2.3.
    """
    sums = told_sum(pod)
    is_news = record is None or record.sum_in_force is None or record.told_sum != sums
    return sums if is_news or record is None or record.sum_in_force is None else record.sum_in_force


def find_pod_share(case: PlacementRequest, prior: Allocation | None = None) -> PodShare:
    """Find a pod's sum and the part left for a new container, or one resized from ``prior``."""
    pod, resources, record = case.pod, case.container.resources, case.pod_record
    if record is None:
        return share_of_first_container(pod, resources)
    if prior is None:
        has_size = case.container.name in (*record.grown_container_names, POD_RESERVATION_NAME)
        pod_share = share_of_first_container(
            pod, resources, sum_in_force(record, pod), has_size=has_size
        )
        return _with_member_charges(case, pod_share)
    memory = resources.memory_limit or 0
    total = sum_told_by(case.node.state, pod, prior, cpu_size_milli(resources), memory)
    pod_share = PodShare(sum=total, uses_pod_resources=prior.uses_pod_resources)
    pod_share = _with_member_charges(case, pod_share)
    if pod_share.uses_pod_resources:
        return pod_share
    # Its current charge stays its own: sizes of the others may not be reported yet.
    milli = own_request_milli(pod.qos, resources)
    limit = pod_share.total_milli(milli) - min(milli, _sum_charges((prior,)).cpu_milli)
    charge = replace(pod_share.other_charge, cpu_milli=min(pod_share.other_charge.cpu_milli, limit))
    return replace(pod_share, other_charge=charge)


def _with_member_charges(case: PlacementRequest, pod_share: PodShare) -> PodShare:
    """Add the charges of other live containers of the pod."""
    requested = case.requested
    joins = is_in_pod_pool(case.pod, requested, pod_share)
    pods_list = requested.listed_cpus if requested.list_is_pods else NO_CPUS
    live = _live(case.node.state, case.pod.uid)
    members = _count_owned_cpus_once(
        [a for a in live if a.container_id != case.container.id], pods_list
    )
    own_charge = other_charge = _sum_charges([a for a in members if not a.uses_pod_resources])
    for a in [a for a in members if a.uses_pod_resources]:
        charge = _sum_charges((a,))
        if a.is_in_pod_pool and a.kind is ContainerKind.EXCLUSIVE:
            # The pod pool yields all but one CPU, and memory beyond its own.
            milli = 0 if joins else min(1000, charge.cpu_milli)
            charge = Charge(milli, charge.memory if pod_share.uses_pod_resources else 0)
        other_charge = other_charge.add(charge)
    return replace(pod_share, own_charge=own_charge, other_charge=other_charge)


def sum_told_by(
    state: NodeState, pod: PodSandbox, prior: Allocation, size: int, memory: int
) -> Charge:
    """Return a pod's sum after a resize; a container with the pod's resources tells the new sum."""
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
    """Record the sum after a resize, and a container whose own size has grown to it."""
    names = state.pods[pod.uid].grown_container_names
    if not allocation.uses_pod_resources and allocation.cpu_milli >= total.cpu_milli > 0:
        names |= {allocation.container}
    return _with_sum(state, pod, total, names)


def with_pod_resized(state: NodeState, pod: PodSandbox, resources: Resources) -> NodeState:
    """Record the sum that the runtime reports for a resized pod."""
    record = state.pods.get(pod.uid)
    if record is None:
        return state
    prior, update = sum_in_force(record, pod), told_sum(replace(pod, resources=resources))
    total = Charge(update.cpu_milli or prior.cpu_milli, update.memory or prior.memory)
    return _with_sum(state, pod, total, record.grown_container_names)


def _with_sum(state: NodeState, pod: PodSandbox, total: Charge, names: frozenset[str]) -> NodeState:
    record, reported = state.pods[pod.uid], told_sum(pod)
    is_reported = total == reported
    new_record = replace(
        record,
        told_sum=None if is_reported else reported,
        sum_in_force=None if is_reported else total,
        grown_container_names=names,
    )
    return state if new_record == record else state.with_pod(new_record)


def pod_pool_cpus(state: NodeState, uid: str, total_milli: int) -> int:
    """Count the CPUs that a pod's other containers leave to its pool, at least one."""
    other_charge = _sum_charges(a for a in _live(state, uid) if not a.uses_pod_resources)
    return max(1, (total_milli - other_charge.cpu_milli) // 1000)


def by_core(topology: Topology, cpus: CPUSet) -> list[int]:
    """Sort CPUs by core, then by id, so a pool is cut between cores; an offline CPU is a core."""
    cores = {cpu: entry.core for cpu, entry in topology.cpus.items()}
    return sorted(cpus, key=lambda cpu: (cores.get(cpu, cpu), cpu))


def resize_pod_pool(
    node: NodeSnapshot, pool: tuple[Allocation, ...], total: Charge, prior: Allocation | None
) -> NodeState:
    """Add a pod pool to a state without it, with the CPUs that exclusive containers leave.

    It grows only by CPUs that the ``prior`` allocation of an exclusive container had.
    """
    state, topology, template = node.state, node.machine.topology, pool[0]
    own_cpus, idle_siblings = template.cpus, template.idle_siblings
    freed_cpus = NO_CPUS
    if prior is not None and prior.kind is ContainerKind.EXCLUSIVE:
        freed_cpus, idle_siblings = prior.cpus, idle_siblings | prior.idle_siblings
    usable = by_core(topology, (own_cpus | freed_cpus) - state.unavailable_cpus)
    usable.sort(key=lambda cpu: cpu not in own_cpus)
    cpus = CPUSet(usable[: pod_pool_cpus(state, template.pod_uid, total.cpu_milli)])
    idle_siblings = (idle_siblings & topology.siblings_of(cpus)) - cpus - state.unavailable_cpus
    pool = _with_pool_memory(state, pool, total.memory, prior)
    return with_pod_pool(
        state, pool, replace(template, cpus=cpus, idle_siblings=idle_siblings), topology
    )


def _with_pool_memory(
    state: NodeState, pool: tuple[Allocation, ...], total: int, prior: Allocation | None
) -> tuple[Allocation, ...]:
    """Charge the pool with memory that exclusive containers of the pod released."""
    owners = _sum_charges(a for a in _live(state, pool[0].pod_uid) if not a.uses_pod_resources)
    change = max(0, total - owners.memory) - _sum_charges(pool).memory
    if total <= 0 or not change:
        return pool
    changed = []
    for member in pool:
        charges = dict(member.charges)
        for i in member.mems:  # by id
            charge = charges.get(i, NO_CHARGE)
            prior_charge = NO_CHARGE if prior is None else prior.charges.get(i, NO_CHARGE)
            delta = max(-charge.memory, min(change, prior_charge.memory))
            charges[i] = replace(charge, memory=charge.memory + delta)
            change -= delta
        changed.append(replace(member, charges=charges))
    return tuple(changed)


def is_for_pod_pool(state: NodeState, allocation: Allocation) -> bool:
    """True if the pod pool gets the CPUs of a live exclusive container when it ends."""
    is_owner = allocation.kind is ContainerKind.EXCLUSIVE and not allocation.uses_pod_resources
    return is_owner and not allocation.reserved_at and bool(state.pod_pool(allocation.pod_uid))


def give_to_pod_pool(node: NodeSnapshot, allocation: Allocation) -> NodeState:
    """Return the state with an exclusive container's CPUs in the pod pool."""
    state, uid = node.state, allocation.pod_uid
    pool, total = state.pod_pool(uid), _sum_charges(_count_owned_cpus_once(_live(state, uid)))
    ids = [allocation.container_id, *(a.container_id for a in pool)]
    return resize_pod_pool(node.with_state(state.without_allocation(*ids)), pool, total, allocation)


def _live(state: NodeState, uid: str) -> list[Allocation]:
    return [a for a in state.allocations_of_pod(uid) if not a.reserved_at]


def _count_owned_cpus_once(
    allocations: Iterable[Allocation], listed: CPUSet = NO_CPUS
) -> list[Allocation]:
    """Charge CPUs that several allocations share exclusively once; CPUs of ``listed`` never."""
    lists = {listed.bits}
    results = []
    for a in allocations:
        if a.exclusive and a.cpus.bits in lists:
            a = replace(a, charges=charges_with_cpu_removed(a.charges))
        elif a.exclusive:
            lists.add(a.cpus.bits)
        results.append(a)
    return results


def _sum_charges(allocations: Iterable[Allocation]) -> Charge:
    cpu_milli = memory = 0
    for a in allocations:
        for charge in a.charges.values():
            cpu_milli += charge.cpu_milli
            memory += charge.memory
    return Charge(cpu_milli, memory)


def with_pod_pool(
    state: NodeState, sharers: Iterable[Allocation], template: Allocation, topology: Topology
) -> NodeState:
    """Add containers of a pod pool with the CPUs of a template."""
    resized = []
    for sharer in sharers:
        charges = {i: replace(c, cpu_milli=0) for i, c in sharer.charges.items()}
        for i, count in topology.cpu_count_by_node(template.cpus).items():
            charges[i] = replace(charges.get(i, NO_CHARGE), cpu_milli=1000 * count)
        charges = {i: c for i, c in charges.items() if c != NO_CHARGE}
        cpus, idle_siblings = template.cpus, template.idle_siblings
        resized.append(
            replace(
                sharer, cpus=cpus, idle_siblings=idle_siblings,
                numa_nodes=topology.numa_of(cpus), charges=charges,
            )
        )  # fmt: skip
    return state.with_allocation(*resized)


def _reservation_without_memory(reserved: Allocation) -> Allocation:
    """Keep only the CPUs of a reservation: a shared container may use its memory."""
    charges = {i: Charge(c.cpu_milli) for i, c in reserved.charges.items() if c.cpu_milli}
    return replace(reserved, charges=charges, mems=NO_NUMA_NODES, memory_bytes=0, hugepages={})


def with_reservation_renewed(state: NodeState, uid: str, now: float) -> NodeState:
    """Restart the term of a reservation for pending containers."""
    pending = [a for a in state.reservations_of(uid) if a.container == POD_RESERVATION_NAME]
    if not pending:
        return state
    state = state.without_allocation(*(a.container_id for a in pending))
    return state.with_allocation(*(replace(a, reserved_at=now) for a in pending))


def with_sandbox_stopped(state: NodeState, uid: str, sandbox: str, now: float) -> NodeState:
    """Record that a pod's sandbox has stopped; unchanged if it is not the latest one."""
    record = state.pods.get(uid)
    if record is None or record.pod_id != sandbox or record.stopped_at:
        return state
    return state.with_pod(replace(record, stopped_at=now)) if state.reservations_of(uid) else state


def without_pending_reservation(state: NodeState, uid: str) -> NodeState:
    """Remove the reservation for all pending containers of a pod."""
    reserved = state.reservations_of(uid)
    ids = (a.container_id for a in reserved if a.container == POD_RESERVATION_NAME)
    return state.without_allocation(*ids)


def restore_pod_reservation(
    node: NodeSnapshot,
    reserved: Iterable[Allocation],
    used: Allocation,
    limit_milli: int | None = None,
) -> NodeState:
    """Reserve again what a pod's container did not take.

    The limit is ``limit_milli`` in whole CPUs, first for named containers. A reservation that
    violates a pool floor is dropped.
    """
    state, topology = node.state, node.machine.topology
    used_charges = dict(used.charges)  # not yet covered by a reservation
    ordered = sorted(
        reserved, key=lambda a: (a.container == POD_RESERVATION_NAME, not a.is_expected)
    )
    ids = [a.container_id for a in ordered if a.container_id in state.allocations]
    state = state.without_allocation(*ids)
    for reservation in ordered:
        cpus, idle_siblings = _unused_cpus(topology, state, reservation, used, limit_milli)
        is_exclusive, withheld = used.exclusive and reservation.exclusive, cpus | idle_siblings
        if is_exclusive and check_pool_floor(node.with_state(state), "", withheld):
            continue
        charges = _unused_charges(reservation, used_charges, topology.cpu_count_by_node(cpus))
        remainder = _reservation_of(reservation, cpus, idle_siblings, charges)
        if remainder is not None:
            state = state.with_allocation(remainder)
    return state


def _unused_cpus(
    topology: Topology, state: NodeState, one: Allocation, used: Allocation, limit_milli: int | None
) -> tuple[CPUSet, CPUSet]:
    """Return unused CPUs and idle siblings of a reservation, within its pod's limit."""
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
    prior: Allocation, used_charges: dict[int, Charge], cpu_counts: Mapping[int, int]
) -> dict[int, Charge]:
    """Return unused charges of a reservation; subtract the covered part of ``used_charges``."""
    charges = {}
    for i, unused in prior.charges.items():
        # Pending containers may be on any NUMA node, an ended one was on its own.
        for numa_node in tuple(used_charges) if prior.container == POD_RESERVATION_NAME else (i,):
            charge = used_charges.get(numa_node, NO_CHARGE)
            unused, used_charges[numa_node] = unused.subtract(charge), charge.subtract(unused)
        if prior.exclusive:
            unused = replace(unused, cpu_milli=1000 * cpu_counts.get(i, 0))
        if unused != NO_CHARGE:
            charges[i] = unused
    return charges


def _reservation_of(
    prior: Allocation, cpus: CPUSet, idle_siblings: CPUSet, charges: Mapping[int, Charge]
) -> Allocation | None:
    """Build a reservation of the unused part; None if nothing is left."""
    if cpus == prior.cpus and idle_siblings == prior.idle_siblings and charges == prior.charges:
        return prior
    if not cpus and (prior.exclusive or not charges):
        return None
    total = reduce(Charge.add, charges.values(), NO_CHARGE)
    mems = prior.mems if total.memory or total.hugepages else NO_NUMA_NODES
    return replace(
        prior, cpus=cpus, idle_siblings=idle_siblings, numa_nodes=NUMASet(charges), charges=charges,
        mems=mems, memory_bytes=total.memory, hugepages=total.hugepages,
    )  # fmt: skip
