"""What a pod has beside the container that is being placed: kept for it, shared in it, to come.

CPUs and memory of containers that ended or are still to come are kept for their pod
(docs/adr/0015-init-containers.md). Containers that need no CPUs of their own share those that the
pod has beside the exclusive ones, as under the kubelet. So a container may use more of the node
than one of another pod, and what it does not take goes back to its pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.accounting import check_pool_floor
from nri_numa.engine.decision import PlacementRequest
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.request.demand import cpu_size_milli, pod_cpu_request_milli, uses_pod_resources
from nri_numa.engine.state import (
    NO_CHARGE,
    POD_RESERVATION_NAME,
    Allocation,
    Charge,
    ContainerKind,
    NodeState,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.workload import CPUMode, Scope


class PodReservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod has beside a container that is being placed.

    Attributes:
        reserved: for containers of it that ended or are to come, by container id.
        booked: for its live containers, in sum.
        sharers: containers that share the pod's own CPUs, by container id.
        is_joining: the container shares these, too; else it takes some of them.
    """

    reserved: tuple[Allocation, ...] = ()
    booked: Charge = NO_CHARGE
    sharers: tuple[Allocation, ...] = ()
    is_joining: bool = False

    @property
    def booked_without_sharers(self) -> Charge:
        """`booked` without the sharers' CPUs that it has if it joins them, or else all but one."""
        count = len(self.sharers[0].cpus) - (0 if self.is_joining else 1)
        return self.booked.subtract(Charge(cpu_milli=1000 * count))

    def open_node(self, case: PlacementRequest) -> tuple[PlacementRequest, PodReservation]:
        """The node as the container may use it, and what is to be restored afterwards.

        A container with CPUs of its own, or a list, may use all that is reserved. One that shares
        leaves the CPUs; alone in its pod it speaks for it, and nothing more is to come.
        """
        state, reserved, sharers = case.node.state, self.reserved, self.sharers
        has_own_cpus = case.demand.exclusive_cpus > 0
        if reserved:
            is_first = len(state.pods[case.pod.uid].containers) == 1
            state = state.without_allocation(*(a.container_id for a in reserved))
            if not has_own_cpus and case.requested.numacpu is None:
                if is_first and reserved[0].container == POD_RESERVATION_NAME:
                    reserved = ()
                cpus_alone = [_reservation_without_memory(a) for a in reserved if a.exclusive]
                state = state.with_allocation(*cpus_alone)
        if not has_own_cpus:
            sharers = ()
        elif not self.is_joining:
            state = state.without_allocation(*(a.container_id for a in sharers))
        return replace(case, node=case.node.with_state(state)), replace(
            self, reserved=reserved, sharers=sharers
        )

    def restore(
        self, case: PlacementRequest, state: NodeState, allocation: Allocation
    ) -> tuple[NodeState, tuple[str, ...]]:
        """Give back to the pod what the container did not take of `open_node`.

        Returns the ids of those that share fewer CPUs now, too.
        """
        topology, total = case.node.machine.topology, pod_cpu_request_milli(case.pod)
        if self.reserved:
            node = case.node.with_state(state)
            state = restore_pod_reservation(node, self.reserved, allocation, total)
        if not self.sharers or self.is_joining:
            return state, ()
        # As many fewer are left to them as it took, wherever these were.
        milli = (total or 0) - state.charge_of_pod(case.pod.uid, "").cpu_milli
        like = self.sharers[0]
        cpus = CPUSet(sorted(like.cpus - allocation.cpus)[: milli // 1000])
        idle_siblings = like.idle_siblings & topology.siblings_of(cpus)
        like = replace(like, cpus=cpus, idle_siblings=idle_siblings)
        state = with_pod_pool(state, self.sharers, like, topology)
        return state, tuple(a.container_id for a in self.sharers)


NO_POD_RESERVATION: Final = PodReservation()
"""Of a pod with no other container on the node."""


def find_pod_reservation(case: PlacementRequest) -> PodReservation:
    """What the pod of a container has beside it; what is shared and booked, if it asks for some."""
    state, pod, requested = case.node.state, case.pod, case.requested
    reserved = state.reservations_of(pod.uid)
    if requested.is_unpinned:
        return PodReservation(reserved=reserved)
    own_list = requested.listed_cpus if requested.list_is_pods else NO_CPUS
    booked = state.charge_of_pod(pod.uid, case.container.id, own_list)
    sharers = _pod_pool_sharers(case)
    is_joining = bool(sharers) and uses_pod_resources(
        pod, requested, cpu_size_milli(case.container.resources)
    )
    return PodReservation(reserved=reserved, booked=booked, sharers=sharers, is_joining=is_joining)


def _pod_pool_sharers(case: PlacementRequest) -> tuple[Allocation, ...]:
    """The live containers that share the pod's own CPUs: by their size each could have all."""
    requested, total = case.requested, pod_cpu_request_milli(case.pod)
    if requested.scope is not Scope.POD or requested.slots is not None or total is None:
        return ()
    if requested.numacpu is not None or requested.cpus is CPUMode.SHARED:
        return ()
    return tuple(
        a for a in case.node.state.allocations_of_pod(case.pod.uid)
        if a.kind is ContainerKind.EXCLUSIVE and not a.reserved_at and a.cpu_milli >= total
    )  # fmt: skip


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


def without_pending_reservation(state: NodeState, uid: str) -> NodeState:
    """The state without what is kept for all containers of a pod that are still to come."""
    reserved = state.reservations_of(uid)
    ids = (a.container_id for a in reserved if a.container == POD_RESERVATION_NAME)
    return state.without_allocation(*ids)


def restore_pod_reservation(
    node: NodeSnapshot,
    reserved: Iterable[Allocation],
    used: Allocation,
    total_milli: int | None = None,
) -> NodeState:
    """Keep for a pod what its next container did not take.

    For containers that are still to come no more than the pod's sum, ``total_milli``, leaves them;
    and nothing of which the shared pool has to keep some by now.
    """
    state, topology = node.state, node.machine.topology
    taken = dict(used.charges)  # what of it was not reserved, as far as was looked
    for one in sorted(reserved, key=lambda a: a.container == POD_RESERVATION_NAME):
        if one.container_id in state.allocations:
            state = state.without_allocation(one.container_id)
        cpus, idle_siblings = _unused_cpus(topology, state, one, used, total_milli)
        is_exclusive, withheld = used.exclusive and one.exclusive, cpus | idle_siblings
        if is_exclusive and check_pool_floor(node.with_state(state), "", withheld):
            continue
        charges = _unused_charges(one, taken, topology.cpu_count_by_node(cpus))
        rest = _reservation_of(one, cpus, idle_siblings, charges)
        if rest is not None:
            state = state.with_allocation(rest)
    return state


def _unused_cpus(
    topology: Topology, state: NodeState, one: Allocation, used: Allocation, total_milli: int | None
) -> tuple[CPUSet, CPUSet]:
    """CPUs and idle siblings that are left of a reservation, within the sum of its pod."""
    used_cpus = NO_CPUS if used.yields_to_exclusive else used.cpus | used.idle_siblings
    cpus, idle_siblings = one.cpus - used_cpus, one.idle_siblings - used_cpus
    if one.container != POD_RESERVATION_NAME or total_milli is None:
        return cpus, idle_siblings
    milli = total_milli
    for a in state.allocations_of_pod(one.pod_uid):
        booked = sum(c.cpu_milli for c in a.charges.values())
        if not a.reserved_at:
            milli -= max(booked, a.cpu_milli)
        elif used.exclusive:  # one that shares leaves to the next owner what ended
            milli -= booked
    cpus = CPUSet(sorted(cpus)[max(0, len(cpus) - max(0, milli) // 1000) :])
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
