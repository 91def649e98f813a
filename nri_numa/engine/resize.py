"""A live container's resources change: in-place resize, or somebody else's cpuset.

A resize keeps the CPUs it can: growing adds to them, shrinking gives some of them back, and a
shared container stays on its NUMA nodes. A pin is never widened by accident: where the new size
does not fit, the degrade ladder decides, and its default for strict policies refuses the resize,
which leaves the container as it is.
"""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.allocator import Taken, TakeRequest, take_cpus
from nri_numa.engine.answers import NO_QUOTA, ContainerUpdate
from nri_numa.engine.decide import ladder, new_allocation, place, pool_updates
from nri_numa.engine.decision import Machine, Reading, Refused, Resized, Trace
from nri_numa.engine.demand import BadDemand, Demand, demand, limit_milli, request_milli
from nri_numa.engine.memory import widen_for_memory
from nri_numa.engine.placement import (
    Failed,
    Placed,
    human_bytes,
    human_milli,
    own_cpus,
    spread_charges,
)
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus
from nri_numa.engine.wishes import BadWish, resolve
from nri_numa.engine.workload import (
    Container,
    OnFailure,
    PodSandbox,
    Policy,
    Resources,
    Wishes,
)
from nri_numa.topology.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet


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
    if allocation is None or allocation.kind is Kind.FOREIGN:
        return Resized(state=state, own=None, trace=trace)
    if allocation.kind is Kind.UNBOUND and not allocation.mems:
        return _resize_unbound(machine, state, allocation, asked, trace)
    merged = _merged(container, allocation, asked)
    after: NodeState = state
    if _changes_size(asked):
        found = _resized(machine, state, pod, merged, allocation, reading, now)
        if isinstance(found, Refused):
            return found
        allocation, trace = found
        after = state.without(container.id).with_allocation(allocation)
    own = _own_update(machine, after, allocation, state.allocations[container.id], asked)
    updates = pool_updates(machine, state, after, skip=container.id)
    return Resized(state=after, own=own, updates=updates, trace=trace)


def resized_meanwhile(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: Reading | None,
    now: float,
) -> tuple[Allocation, Trace] | Refused | None:
    """Catch up with a resize that nobody told us of.

    Only the resources count: a rule that reads differently by now moves no running container.

    Args:
        machine: topology and settings.
        state: as it is, with the container.
        pod: the pod.
        container: as the runtime has it.
        reading: what the kernel has left, when known.
        now: Unix time in seconds.

    Returns:
        None when its size is as remembered, else as `resize` would have decided.
    """
    allocation = state.allocations[container.id]
    if allocation.kind is Kind.FOREIGN or (allocation.kind is Kind.UNBOUND and not allocation.mems):
        return None
    resources = container.resources
    if (resources.cpu_quota or 0) <= 0 and allocation.quota:
        # The quota was lifted, so the one it was created with still counts.
        resources = replace(resources, cpu_quota=allocation.quota)
    milli = limit_milli(resources, []) or request_milli(resources, [])
    memory = resources.memory_limit or 0
    if milli == allocation.cpu_milli and (
        memory <= 0 or not allocation.mems or memory == allocation.memory_bytes
    ):
        return None
    container = replace(container, resources=resources)
    return _resized(machine, state, pod, container, allocation, reading, now)


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


def _resize_unbound(
    machine: Machine, state: NodeState, allocation: Allocation, asked: Resources, trace: Trace
) -> Resized:
    """Somebody else's cpuset on an unbound container: let it, but never onto owned CPUs."""
    if not asked.cpus:
        return Resized(state=state, own=None, trace=trace)
    try:
        wanted = CPUSet.parse(asked.cpus)
    except ListFormatError:
        return Resized(state=state, own=None, trace=trace)  # the runtime will refuse it
    taken = wanted & (state.owned | state.idle)
    if taken:
        pool = state.pool(machine.topology, machine.settings)
        own = ContainerUpdate(container_id=allocation.container_id, cpus=str(pool))
        step = f"CPUs {taken} belong to others: {pool} instead of {asked.cpus}"
        return Resized(state=state, own=own, trace=replace(trace, steps=(step,)))
    foreign = replace(
        allocation,
        kind=Kind.FOREIGN,
        reason=f"pinned by somebody else to CPUs {asked.cpus}",
    )
    after = state.without(allocation.container_id).with_allocation(foreign)
    return Resized(state=after, own=None, trace=replace(trace, steps=(foreign.reason,)))


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
    wishes = resolve(machine.settings, pod, container)
    if isinstance(wishes, BadWish):
        # It was readable at creation; a rule changed under it. What it has stays valid.
        return allocation, replace(trace, steps=(wishes.message,))
    wanted = demand(pod, container, wishes, machine.memory_total)
    trace = replace(trace, wishes=wishes)
    if isinstance(wanted, BadDemand):
        return Refused(
            reason=wanted.reason,
            message=wanted.message,
            trace=replace(trace, rule=wanted.expected),
        )
    trace = replace(trace, demand=wanted)
    placed = _placed(machine, rest, pod, container, wishes, wanted, allocation, reading)
    if isinstance(placed, Failed):
        if ladder(wishes) is OnFailure.REJECT:
            return Refused(
                reason=placed.reason,
                message=f"resize refused: {placed.message}",
                trace=replace(trace, alignment=placed.alignment, rule=placed.rule),
            )
        return allocation, replace(
            trace, steps=(placed.message, "it keeps what it has, which is less than asked for")
        )
    resized = new_allocation(pod, container, wishes, wanted, placed, machine, now)
    return (
        replace(resized, since=allocation.since),
        replace(trace, alignment=placed.alignment, steps=placed.steps),
    )


def _placed(
    machine: Machine,
    rest: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    wanted: Demand,
    allocation: Allocation,
    reading: Reading | None,
) -> Placed | Failed:
    if allocation.kind is Kind.EXPLICIT or allocation.kind is Kind.UNBOUND:
        return place(machine, rest, pod, container, wishes, wanted, reading)
    count = len(allocation.cpus)
    if allocation.kind is Kind.EXCLUSIVE and wanted.exclusive_cpus > count:
        return place(machine, rest, pod, container, wishes, wanted, reading, held=allocation.cpus)
    if allocation.kind is Kind.EXCLUSIVE and wanted.exclusive_cpus:
        taken = take_cpus(
            machine.topology,
            TakeRequest(
                count=wanted.exclusive_cpus,
                available=NO_CPUS,
                held=allocation.cpus,
                smt=allocation.smt,
                load=allocation.load,
                busy=rest.owned | rest.idle,
                settings=machine.settings,
            ),
            machine.index,
        )
        if not isinstance(taken, Taken):
            return Failed(
                reason="SMTAlignmentError",
                message=f"pod {pod.full_name}, container {container.name}: {taken}",
                rule="smt: full-core gives whole cores only",
            )
        return _stay(machine, rest, wishes, wanted, allocation, reading, taken.cpus, taken.idle)
    if allocation.kind is Kind.SHARED and not wanted.exclusive_cpus:
        return _stay(machine, rest, wishes, wanted, allocation, reading, NO_CPUS, NO_CPUS)
    # From shared to whole CPUs of its own or back: decided anew, on the same NUMA nodes if it can.
    return place(machine, rest, pod, container, wishes, wanted, reading)


def _stay(
    machine: Machine,
    rest: NodeState,
    wishes: Wishes,
    wanted: Demand,
    allocation: Allocation,
    reading: Reading | None,
    cpus: CPUSet,
    idle: CPUSet,
) -> Placed | Failed:
    """Keep the NUMA nodes (and the CPUs ``cpus``) and book the new size there."""
    topology = machine.topology
    who = f"pod {allocation.namespace}/{allocation.pod}, container {allocation.container}"
    numa_nodes = topology.numa_of(cpus) if cpus else allocation.numa_nodes
    preferred, steps = allocation.preferred, [f"stays on NUMA node {allocation.numa_nodes}"]
    cpu_left = machine.cpu_left(rest)
    if not cpus and wanted.cpu_milli > allocation.cpu_milli:
        have = sum(cpu_left.get(i, 0) for i in numa_nodes)
        if have < wanted.cpu_milli:
            text = (
                f"{who}: needs {human_milli(wanted.cpu_milli)} on NUMA node {numa_nodes}, "
                f"which has {human_milli(have)} left"
            )
            if _strict(wishes):
                return Failed(reason="NotEnoughCPUs", message=text, rule="a resize stays in place")
            steps.append(text)
            preferred = False
    mems = allocation.mems
    memory_left = machine.memory_left(rest, reading)
    grows = wanted.memory_bytes > allocation.memory_bytes
    if mems and grows and sum(memory_left.get(i, 0) for i in mems) < wanted.memory_bytes:
        wider = widen_for_memory(
            mems,
            wanted.memory_bytes,
            memory_left,
            topology.distance,
            machine.numa_ids & topology.memory_nodes,
        )
        text = (
            f"{who}: needs {human_bytes(wanted.memory_bytes)} memory on NUMA node {mems}, which "
            f"has {human_bytes(sum(memory_left.get(i, 0) for i in mems))} left"
        )
        if wider is None or _strict(wishes):
            return Failed(reason="NotEnoughMemory", message=text, rule="a resize stays in place")
        steps += [text, f"memory widened to NUMA node {wider}"]
        mems, preferred = wider, False
    milli = {}
    if cpus:
        milli = {i: 1000 * len(topology.numa_nodes[i].cpus & cpus) for i in numa_nodes}
    else:
        each, odd = divmod(wanted.cpu_milli, len(numa_nodes))
        milli = {i: each + (1 if n < odd else 0) for n, i in enumerate(numa_nodes)}
    hugepages = wanted.hugepages if mems else {}
    charges = spread_charges(
        numa_nodes,
        milli,
        mems,
        wanted.memory_bytes if mems else 0,
        memory_left,
        hugepages,
        {size: machine.hugepages_left(size, rest, reading) for size in hugepages},
    )
    what = own_cpus(cpus) if cpus else "shared CPUs"
    return Placed(
        kind=allocation.kind,
        cpus=cpus,
        idle=idle,
        owned=allocation.owned,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        policy=allocation.policy,
        preferred=preferred,
        reason=f"{what} on NUMA node {numa_nodes}" + ("" if preferred else ", wider than ideal"),
        steps=tuple(steps),
    )


def _strict(wishes: Wishes) -> bool:
    return ladder(wishes) is OnFailure.REJECT and wishes.policy is not Policy.BEST_EFFORT


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
    wanted = effective_cpus(allocation, pool, machine.topology)
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
