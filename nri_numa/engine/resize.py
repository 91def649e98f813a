"""A live container's resources change: in-place resize, or somebody else's cpuset.

A resize keeps the CPUs it can: growing adds to them, shrinking gives some of them back, and NUMA
nodes and memory nodes stay (`nri_numa.engine.place.in_place`). Where the new size does not fit, the
degrade ladder decides, and its default for strict policies refuses the resize, which leaves the
container as it is.
"""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.admit import new_allocation, pool_updates
from nri_numa.engine.case import Case
from nri_numa.engine.decision import Machine, Reading, Refused, Resized, Trace
from nri_numa.engine.others.foreign import judged, pinned_to
from nri_numa.engine.others.kubelets import taken_back
from nri_numa.engine.place.in_place import place_in_place
from nri_numa.engine.place.kubelet_claims import Ours, whose
from nri_numa.engine.request.demand import Demand, demand, limit_milli, request_milli
from nri_numa.engine.request.slots import SLOTS, with_slots
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus
from nri_numa.engine.values.answers import NO_CHANGE, ContainerUpdate, StateChange
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import (
    Container,
    PodSandbox,
    Requested,
    Resources,
)
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet
from nri_numa.machine.model import NO_QUOTA, cpus_text


def resize(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    asked: Resources,
    reading: Reading | None = None,
    now: float = 0.0,
) -> Resized | Refused:
    """Decide about an UpdateContainer request.

    Args:
        machine: topology and settings.
        state: as it is.
        pod: the pod.
        container: as it was before the request.
        asked: the request; None or empty fields are not part of it.
        reading: what the kernel has left, when known.
        now: Unix time in seconds.
    """
    allocation = state.allocations.get(container.id)
    trace = Trace(pod=pod, container=container)
    if allocation is None:
        return Resized(state=state, own=None, trace=trace)
    granted = state.kubelet.cpus_of(pod.uid, container.name, container.id)
    wanted = pinned_to(asked.cpus) if granted and asked.cpus else NO_CPUS
    if wanted and (wanted <= granted or allocation.kind is Kind.FOREIGN):
        given_up = _given_up(machine, state, pod, container, asked, trace)
        if given_up is not None:
            return given_up
    if allocation.kind in (Kind.UNBOUND, Kind.FOREIGN) and not allocation.mems:
        return _set_by_others(machine, state, allocation, asked, trace)
    merged = _merged(container, allocation, asked)
    after, change = state, NO_CHANGE
    if _changes_size(asked):
        found = _resized(machine, state, pod, merged, allocation, reading, now)
        if isinstance(found, Refused):
            return found
        allocation, trace = found
        after = state.without(container.id).with_allocation(allocation)
        change = StateChange((container.id,), (pod.uid,))
    own = _own_update(machine, after, allocation, state.allocations[container.id], asked)
    updates = pool_updates(machine, state, after, skip=container.id)
    return Resized(state=after, change=change, own=own, updates=updates, trace=trace)


def resized_meanwhile(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    resources: Resources,
    reading: Reading | None,
    now: float,
) -> tuple[Allocation, Trace] | Refused:
    """Catch up with a resize that nobody told us of.

    Only the resources count: a rule that reads differently by now moves no running container.

    Args:
        machine: topology and settings.
        state: as it is, with the container.
        pod: the pod.
        container: as the runtime has it.
        resources: what it was resized to, by `other_size`.
        reading: what the kernel has left, when known.
        now: Unix time in seconds.

    Returns:
        As `resize` would have decided.
    """
    allocation = state.allocations[container.id]
    container = replace(container, resources=resources)
    return _resized(machine, state, pod, container, allocation, reading, now)


def other_size(allocation: Allocation, resources: Resources) -> Resources | None:
    """What a container is resized to, by what the runtime has; None when that is as remembered.

    Args:
        allocation: as it is.
        resources: as the runtime has them.
    """
    if allocation.kind is Kind.FOREIGN or (allocation.kind is Kind.UNBOUND and not allocation.mems):
        return None
    if (resources.cpu_quota or 0) <= 0 and allocation.quota:
        # The quota was lifted, so the one it was created with still counts.
        resources = replace(resources, cpu_quota=allocation.quota)
    milli = limit_milli(resources, []) or request_milli(resources, [])
    if (resources.cpu_quota or 0) <= 0 and allocation.quota == 0:
        # Lifted before the checkpoint was lost: nothing tells its size but the CPUs it has.
        milli = allocation.cpu_milli
    memory = resources.memory_limit or 0
    if milli == allocation.cpu_milli and (
        memory <= 0 or not allocation.mems or memory == allocation.memory_bytes
    ):
        return None
    return resources


def _changes_size(asked: Resources) -> bool:
    return bool(asked.cpu_quota or asked.cpu_shares or asked.memory_limit or asked.hugepages)


def _merged(container: Container, allocation: Allocation, asked: Resources) -> Container:
    """The container as the request wants it; a lifted quota counts as what was asked for once."""
    now = container.resources
    quota = allocation.quota if allocation.quota else now.cpu_quota
    return replace(
        container,
        resources=Resources(
            cpu_shares=asked.cpu_shares or now.cpu_shares,
            cpu_quota=asked.cpu_quota or quota,
            cpu_period=asked.cpu_period or now.cpu_period,
            memory_limit=asked.memory_limit or now.memory_limit,
            hugepages={**now.hugepages, **asked.hugepages},
            cpus=now.cpus,
            mems=now.mems,
        ),
    )


def _given_up(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    asked: Resources,
    trace: Trace,
) -> Resized | None:
    """Leave a container to the kubelet, which granted it CPUs and writes them now.

    The kubelet may do so with a container that we placed: its policy became static afterwards.
    Both would write for ever, so the configured side wins; None when that is ours.
    """
    allocation = state.allocations[container.id]
    requested = _with_what_it_holds(
        machine, pod, container, allocation, machine.resolve(pod, container)
    )
    if not isinstance(requested, Refusal):
        side = whose(machine.topology, machine.settings, state.kubelet, pod, container, requested)
        if isinstance(side, Ours):
            return None
    pinned = pinned_to(asked.cpus)
    if allocation.kind is Kind.FOREIGN and allocation.pinned == pinned:
        return Resized(state=state, own=None, trace=trace)
    theirs = taken_back(allocation, pinned)
    after = state.without(container.id).with_allocation(theirs)
    mems = ""
    if allocation.mems and not asked.mems:
        mems = str(machine.topology.memory_nodes)  # nobody else takes our pin back
    return Resized(
        state=after,
        change=StateChange((container.id,), (pod.uid,)),
        own=ContainerUpdate(container_id=container.id, mems=mems) if mems else None,
        updates=pool_updates(machine, state, after, skip=container.id),
        trace=replace(trace, steps=(theirs.reason,)),
    )


def _with_what_it_holds(
    machine: Machine,
    pod: PodSandbox,
    container: Container,
    allocation: Allocation,
    requested: Requested | Refusal,
) -> Requested | Refusal:
    """As many slots as at its creation: an extended resource is not resized, nor is a claim."""
    if not allocation.slots:
        return requested
    key = f"{machine.settings.prefix}/{SLOTS}"
    holding = replace(container, annotations={key: allocation.slots})
    return with_slots(machine.settings, pod, holding, requested)


def _set_by_others(
    machine: Machine, state: NodeState, allocation: Allocation, asked: Resources, trace: Trace
) -> Resized:
    """Somebody else's cpuset on a container that nothing of ours binds.

    It makes the container foreign, or unbound again when it holds the whole shared pool. It never
    takes an unbound container onto owned CPUs.
    """
    if not asked.cpus or not pinned_to(asked.cpus):
        return Resized(state=state, own=None, trace=trace)  # what is no list, the runtime refuses
    wanted = pinned_to(asked.cpus)
    pool = state.pool(machine.topology, machine.settings)
    taken = wanted & state.withheld
    after = allocation
    if allocation.kind is Kind.FOREIGN or not taken:
        after = judged(allocation, asked.cpus, pool, state.kubelet.shared)
    own, step, change = None, after.reason, NO_CHANGE
    if after.kind is Kind.UNBOUND and wanted != pool:
        own = ContainerUpdate(container_id=allocation.container_id, cpus=str(pool))
        step = f"{cpus_text(pool)}, which everybody shares, instead of {asked.cpus}"
        if taken:
            step += f": {cpus_text(taken, 'is', 'are')} exclusive to others"
    if after is not allocation:
        state = state.without(allocation.container_id).with_allocation(after)
        change = StateChange((allocation.container_id,), (allocation.pod_uid,))
    return Resized(state=state, change=change, own=own, trace=replace(trace, steps=(step,)))


def _resized(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    allocation: Allocation,
    reading: Reading | None,
    now: float,
) -> tuple[Allocation, Trace] | Refused:
    rest = state.without(container.id)
    trace = Trace(
        pod=pod,
        container=container,
        cpu_left=machine.cpu_left(rest),
        memory_left=machine.memory_left(rest, reading),
        pool_before=state.pool(machine.topology, machine.settings),
    )
    requested = machine.resolve(pod, container)
    if isinstance(requested, Refusal):
        # It was readable at creation; a rule changed under it. What it has stays valid.
        return allocation, replace(trace, steps=(requested.message,))
    requested = _with_what_it_holds(machine, pod, container, allocation, requested)
    if isinstance(requested, Refusal):
        return _resize_refused(requested, trace)
    pods_list = requested.listed_cpus if requested.pods_list else NO_CPUS
    others = rest.charge_of_pod(pod.uid, container.id, pods_list)
    wanted = demand(pod, container, requested, machine.memory_total, others)
    trace = replace(trace, requested=requested)
    if isinstance(wanted, Refusal):
        return Refused(wanted, replace(trace, rule=wanted.rule))
    trace = replace(trace, demand=wanted)
    wanted = _still_owned(allocation, wanted)
    case = Case(machine, rest, pod, container, requested, wanted, reading, allocation.policy)
    placed = place_in_place(case, allocation)
    if isinstance(placed, Refusal):
        return _resize_refused(placed, trace)
    resized = new_allocation(case, placed, now)
    return (
        replace(
            resized,
            since=allocation.since,
            mempolicy=allocation.mempolicy,  # that of its processes, which nobody changes
            smt=allocation.smt if allocation.owned and placed.owned else resized.smt,
        ),
        replace(trace, alignment=placed.alignment, steps=placed.steps),
    )


def _resize_refused(why: Refusal, trace: Trace) -> Refused:
    return Refused(
        replace(why, message=f"resize refused: {why.message}"),
        replace(trace, alignment=why.alignment, rule=why.rule),
    )


def _still_owned(allocation: Allocation, wanted: Demand) -> Demand:
    """Whole CPUs of an owner stay its own, whatever a rule that was changed says by now."""
    whole, fraction = divmod(wanted.cpu_milli, 1000)
    if allocation.kind is not Kind.EXCLUSIVE or wanted.exclusive_cpus or fraction:
        return wanted
    return replace(wanted, exclusive_cpus=whole)


def _own_update(
    machine: Machine,
    after: NodeState,
    allocation: Allocation,
    before: Allocation,
    asked: Resources,
) -> ContainerUpdate | None:
    """Override the request only where it would change what was decided.

    Any override makes containerd lose the request's swap limit, so none is sent without need.
    """
    pool = after.pool(machine.topology, machine.settings)
    wanted = effective_cpus(allocation, pool, machine.topology, after.withheld_bits)
    if not wanted and allocation.kind is Kind.UNBOUND and asked.cpus:
        wanted = pool  # its memory is bound by us, so nobody else's pin makes it foreign
    changed = allocation.cpus != before.cpus or allocation.kind is not before.kind
    cpus = ""
    if wanted and (changed or (asked.cpus and not _same_cpus(asked.cpus, wanted))):
        cpus = str(wanted)
    mems = ""
    if allocation.mems and (
        allocation.mems != before.mems
        or (asked.mems and not _same_mems(asked.mems, allocation.mems))
    ):
        mems = str(allocation.mems)
    quota: int | None = None
    if allocation.quota is not None and (asked.cpu_quota or 0) > 0:
        quota = NO_QUOTA
    elif before.quota is not None and allocation.quota is None and not asked.cpu_quota:
        quota = before.quota or None
    if not (cpus or mems or quota is not None):
        return None
    return ContainerUpdate(
        container_id=allocation.container_id, cpus=cpus, mems=mems, cpu_quota=quota
    )


def _same_cpus(text: str, wanted: CPUSet) -> bool:
    try:
        return CPUSet.parse(text) == wanted
    except ListFormatError:
        return False


def _same_mems(text: str, wanted: NUMASet) -> bool:
    try:
        return NUMASet.parse(text) == wanted
    except ListFormatError:
        return False
