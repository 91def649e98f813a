"""The door into the engine: admit, release.

Everything is a pure function of machine, state and request; a decision is an offer until the
agent swaps its state in. `nri_numa.engine.resize` and `nri_numa.engine.resync` are the other two
doors, built from the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, reduce
from itertools import repeat
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.accounting import below_floor
from nri_numa.engine.adopt import ASSIGNED, assigned
from nri_numa.engine.decision import (
    NO_DEMAND,
    Admitted,
    Case,
    Decision,
    Machine,
    Placed,
    Reading,
    Refused,
    Released,
    Trace,
)
from nri_numa.engine.others import Kubelets, Ours, covers, pinned_to, whose
from nri_numa.engine.place.computed import place_computed
from nri_numa.engine.place.explicit import place_explicit
from nri_numa.engine.place.memory import with_memory_policy
from nri_numa.engine.place.needs import exclusive_text
from nri_numa.engine.request.annotations import by_annotation
from nri_numa.engine.request.demand import (
    Demand,
    demand,
    has_no_own,
    in_use,
    pod_milli,
    size_milli,
    with_slots,
    with_static_cpus,
)
from nri_numa.engine.state import (
    ALL,
    COMPUTED,
    NOTHING,
    Allocation,
    Charge,
    Kind,
    NodeState,
    PodRecord,
    displaced,
    effective_cpus,
    group_cpus,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import NO_QUOTA, cpus_text, numa_text
from nri_numa.model.workload import (
    SMT,
    Bind,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    CPUMode,
    KubeletGrants,
    MemoryPolicy,
    MemoryPolicySetting,
    OnFailure,
    PodSandbox,
    Policy,
    Refusal,
    Requested,
    Scope,
    StateChange,
)

LISTED: Final = "movable: true, which has no effect: a container with a list does not move"


def admit(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: Reading | None = None,
    now: float = 0.0,
    held: CPUSet = NO_CPUS,
    *,
    running: bool = False,
    resolved: Requested | Refusal | None = None,
) -> Decision:
    """Decide about one container that is being created.

    A container of the same pod and name that still has something (a failed start, a repeated
    request) gives it back first; its CPUs are preferred for this one. CPUs that a running stranger
    has (``held``) it keeps, as far as it can own them. For one that is ``running`` already nothing
    can be set that is set at the creation alone, and no annotation of ours is written. ``resolved``
    is what ``machine.resolve`` says of it, where that is known. Times are Unix times in seconds,
    here and in all that follows.
    """
    before, record = state, state.pods.get(pod.uid)
    pool_before = before.pool(machine.topology, machine.settings)
    state = _drop_leftovers(state, pod, container)
    requested = machine.resolve(pod, container) if resolved is None else resolved
    kept = state.kept_for(pod.uid)
    open_to_pod = without_each(state, kept)
    if container.annotations:
        requested = with_slots(machine.settings, pod, container, requested)
        requested = in_use(open_to_pod, pod, container, requested)
    requested = with_static_cpus(machine.settings, pod, container, requested)
    if isinstance(requested, Refusal):
        trace = Trace(pod=pod, container=container, pool_before=pool_before, rule=requested.rule)
        return Refused(requested, trace)
    grants = state.kubelet
    # Most nodes have none: nothing is asked then, of the many who would ask.
    side = None
    if not grants.nothing:
        side = whose(machine.topology, machine.settings, grants, pod, container, requested)
    others = state
    if isinstance(side, Ours):
        requested, held = side.requested, side.cpus or held
        # No other container may have what the kubelet granted it; it may.
        others = replace(
            state, kubelet=state.kubelet.without(pod.uid, container.name, container.id)
        )
    sharing: tuple[Allocation, ...] = ()
    joins = False
    needs: Demand | Refusal = NO_DEMAND
    alone = requested.leave_alone
    if not alone and (side is None or isinstance(side, Ours)):
        pods_list = requested.listed_cpus if requested.pods_list else NO_CPUS
        others_have = state.charge_of_pod(pod.uid, container.id, pods_list)
        needs = demand(pod, container, requested, machine.memory_total, others_have)
        if requested.scope is Scope.POD:
            sharing, joins = _pod_pool(state, pod, container, requested)
        if sharing:
            # It has theirs, or they give it all but one.
            give = len(sharing[0].cpus) - (0 if joins else 1)
            beside = others_have.less(Charge(cpu_milli=1000 * give))
            among = demand(pod, container, requested, machine.memory_total, beside)
            if isinstance(among, Demand) and among.exclusive_cpus:
                needs = among
    known = NO_DEMAND if isinstance(needs, Refusal) else needs
    if kept and (known.exclusive_cpus or requested.numacpu is not None):
        # What its pod kept is for it; a container that shares leaves it.
        state = open_to_pod
        others = replace(state, kubelet=others.kubelet)
    elif kept:
        if {a.container for a in kept} == {ALL} and len(state.pods[pod.uid].containers) == 1:
            # One that shares speaks for its pod: what is kept for others to come is not needed.
            kept = tuple(a for a in kept if a.container != ALL)
        state = open_to_pod.with_allocation(*(_cpus_alone(a) for a in kept if a.owned))
        others = replace(state, kubelet=others.kubelet)
    if not known.exclusive_cpus:
        sharing = ()
    elif sharing and not joins:
        state = without_each(state, sharing)
        others = replace(state, kubelet=others.kubelet)
    if held is not NO_CPUS and len(held) > known.exclusive_cpus:
        held = NO_CPUS
    case = Case(
        machine, others, pod, container, requested, known, reading, _policy(requested), held,
        again=running or (record is not None and container.name in state.pods[pod.uid].former),
    )  # fmt: skip
    if isinstance(side, Refusal):
        return Refused(side, _trace(case, side, pool_before, pool_before))
    if isinstance(side, Kubelets):
        placed: Placed | Refusal = _kubelets(case, side)
    elif alone:
        placed = _unbound(case, pool_before)
    elif isinstance(needs, Refusal):
        placed = needs
    elif sharing and joins:
        placed = _beside(case, sharing[0])
    else:
        placed = place(case)
    if requested.mempolicy is not MemoryPolicy.DEFAULT and isinstance(placed, Placed):
        placed = with_memory_policy(case, placed, running=running)
    listed = requested.numacpu is not None or requested.numamem is not None
    warned = listed and requested.movable and by_annotation(requested, "movable")
    if warned and isinstance(placed, Placed):
        warnings, steps = (*placed.warnings, LISTED), (*placed.steps, LISTED)
        placed = replace(placed, warnings=warnings, steps=steps)
    if isinstance(placed, Refusal) and case.on_failure is OnFailure.UNPINNED:
        placed = replace(
            _unbound(case, pool_before),
            reason=f"not pinned: {placed.reason}",
            preferred=False,
            alignment=placed.alignment,
            steps=(placed.message, "on-failure: unpinned, so it starts untouched"),
        )
    if isinstance(placed, Refusal):
        return Refused(placed, _trace(case, placed, pool_before, pool_before))
    if isinstance(side, Ours) and side.warnings:
        placed = replace(
            placed,
            warnings=(*side.warnings, *placed.warnings),
            steps=(*side.warnings, *placed.steps),
        )
    allocation = new_allocation(case, placed, now)
    after = state.with_allocation(allocation)
    if placed.pod_affinity is not None:
        grown = after.pods[pod.uid]
        if grown.affinity is None:
            after = after.with_pod(
                replace(grown, affinity=placed.pod_affinity, affinity_preferred=placed.preferred)
            )
    if kept:
        after = kept_again(machine, after, kept, allocation, pod_milli(pod))
    moved: tuple[ContainerUpdate, ...] = ()
    change = _change(record, after, pod.uid, container.id, kept)
    if sharing and not joins:
        # As many fewer are left to them as it took, wherever these were.
        milli = (pod_milli(pod) or 0) - after.charge_of_pod(pod.uid, "").cpu_milli
        fewer = CPUSet(sorted(sharing[0].cpus - allocation.cpus)[: milli // 1000])
        idle = sharing[0].idle & machine.topology.siblings_of(fewer)
        like = replace(sharing[0], cpus=fewer, idle=idle)
        after = after.with_pod_pool(sharing, like, machine.topology)
        moved = pod_pool_updates(sharing, fewer)
        change = replace(change, containers=change.containers + tuple(one[0] for one in moved))
    pool = after.pool(machine.topology, machine.settings)
    return Admitted(
        state=after,
        change=change,
        allocation=allocation,
        adjustment=adjustment(
            machine,
            allocation,
            effective_cpus(allocation, pool, machine.topology, after.withheld_bits),
            placed.memory_policy,
            marked=not running,
        ),
        updates=(*moved, *pool_updates(machine, before, after, skip=container.id)),
        warnings=placed.warnings,
        trace=_trace(case, placed, pool_before, pool),
    )


def pod_pool_updates(members: Iterable[Allocation], cpus: CPUSet) -> tuple[ContainerUpdate, ...]:
    """Updates of containers that share their pod's CPUs, when these change."""
    return tuple(ContainerUpdate(a.container_id, str(cpus), ignore_failure=True) for a in members)


def _pod_pool(
    state: NodeState, pod: PodSandbox, container: Container, requested: Requested
) -> tuple[tuple[Allocation, ...], bool]:
    """Who shares the CPUs of its pod, and whether it is one of them or takes some of its own."""
    if requested.slots is not None:
        return (), False
    if requested.numacpu is not None or requested.cpus is CPUMode.SHARED:
        return (), False
    whole = pod_milli(pod)
    joins = has_no_own(pod, requested, size_milli(container.resources))
    return state.pod_pool(pod.uid, whole), joins


def _beside(case: Case, member: Allocation) -> Placed:
    """The CPUs of its pod that another container has, which needed none of its own either."""
    where = f"on {numa_text(member.numa_nodes)}"
    why = f"{exclusive_text(len(member.cpus))} {where}, shared with others of its pod"
    charges = {i: Charge(1000 * n) for i, n in case.machine.topology.counts(member.cpus).items()}
    return replace(
        case.unplaced, kind=Kind.EXCLUSIVE, owned=True, cpus=member.cpus, idle=member.idle,
        numa_nodes=member.numa_nodes, mems=member.mems, policy=case.policy, charges=charges,
        preferred=member.preferred, reason=why, steps=(why,),
    )  # fmt: skip


_EMPTY_NODE: Final = NodeState()
"""Who else is there makes no difference to a container that nothing asks to pin."""


def left_alone(
    machine: Machine,
    grants: KubeletGrants,
    pod: PodSandbox,
    container: Container,
    now: float,
    resolved: Requested | Refusal,
) -> Allocation | None:
    """What `admit` gives a container that nothing pins or asks to pin; None for any other.

    Such a container has nothing and is allocated nothing, so it makes no difference to others, and
    a node full of them can be taken in without deciding about one after the other.
    """
    if container.resources.cpus:
        return None
    requested = resolved
    if container.annotations:
        requested = with_slots(machine.settings, pod, container, requested)
    requested = with_static_cpus(machine.settings, pod, container, requested)
    if isinstance(requested, Refusal) or not requested.leave_alone:
        return None
    if not grants.nothing and grants.cpus_of(pod.uid, container.name, container.id):
        return None
    case = Case(machine, _EMPTY_NODE, pod, container, requested)
    return new_allocation(case, _unbound(case, NO_CPUS), now)


def _trace(case: Case, placed: Placed | Refusal, pool_before: CPUSet, pool_after: CPUSet) -> Trace:
    known = case.demand is not NO_DEMAND
    ignored = case.requested.ignored
    if case.demand.ignored:
        ignored = (*ignored, case.demand.ignored)
    rule, steps = "", ignored
    if isinstance(placed, Placed):
        ignored += placed.ignored
        steps = (*ignored, *placed.steps)
    else:
        rule = placed.rule
    return Trace(
        pod=case.pod,
        container=case.container,
        requested=case.requested,
        demand=case.demand if known else None,
        alignment=placed.alignment,
        steps=steps,
        cpu_left=case.cpu_left if known else {},
        memory_left=case.memory_left if known else {},
        pool_before=pool_before,
        pool_after=pool_after,
        rule=rule,
        ignored=ignored,
    )


def _change(
    record: PodRecord | None,
    after: NodeState,
    uid: str,
    container_id: str,
    kept: tuple[Allocation, ...],
) -> StateChange:
    """The container, and those of its pod, as it was, whose place or CPUs it takes."""
    if record is None:
        return StateChange((container_id,), (uid,))
    gone = record.containers - after.pods[uid].containers | {a.container_id for a in kept}
    return StateChange((container_id, *sorted(gone - {container_id})), (uid,))


def without_each(state: NodeState, allocations: Iterable[Allocation]) -> NodeState:
    """The state without these allocations."""
    for allocation in allocations:
        state = state.without(allocation.container_id)
    return state


def kept_again(
    machine: Machine,
    state: NodeState,
    kept: Iterable[Allocation],
    used: Allocation,
    whole_milli: int | None = None,
) -> NodeState:
    """Keep for a pod what its next container did not take.

    For containers that are still to come no more than the pod's sum, ``whole_milli``, leaves them;
    and nothing of which the shared pool has to keep some by now.
    """
    topology = machine.topology
    cpus_used = NO_CPUS if used.soft else used.cpus | used.idle
    taken = dict(used.charges)  # what of it was not kept, as far as was looked
    for one in sorted(kept, key=lambda a: a.container == ALL):
        if one.container_id in state.allocations:
            state = state.without(one.container_id)
        cpus, idle = one.cpus - cpus_used, one.idle - cpus_used
        if one.container == ALL and whole_milli is not None:
            milli = whole_milli
            for a in (state.allocations[i] for i in state.pods[one.pod_uid].containers):
                has = sum(c.cpu_milli for c in a.charges.values())
                if not a.ended:
                    milli -= max(has, a.cpu_milli)
                elif used.owned:  # one that shares leaves to the next owner what ended
                    milli -= has
            cpus = CPUSet(sorted(cpus)[max(0, len(cpus) - max(0, milli) // 1000) :])
            idle = idle & topology.siblings_of(cpus)
        if used.owned and one.owned and below_floor(machine, state, "", cpus | idle):
            continue
        counts, charges = topology.counts(cpus), {}
        for i, rest in one.charges.items():
            # Others of the pod may be anywhere, a container that ended was in its place.
            for at in tuple(taken) if one.container == ALL else (i,):
                its = taken.get(at, NOTHING)
                rest, taken[at] = rest.less(its), its.less(rest)
            rest = replace(rest, cpu_milli=1000 * counts.get(i, 0)) if one.owned else rest
            if rest != NOTHING:
                charges[i] = rest
        if cpus == one.cpus and idle == one.idle and charges == one.charges:
            state = state.with_allocation(one)
        elif cpus or (charges and not one.owned):
            left = reduce(Charge.plus, charges.values(), NOTHING)
            mems = one.mems if left.memory or left.hugepages else NO_NUMA_NODES
            rest_of_it = replace(
                one, cpus=cpus, idle=idle, numa_nodes=NUMASet(charges), charges=charges, mems=mems,
                memory_bytes=left.memory, hugepages=left.hugepages,
            )  # fmt: skip
            state = state.with_allocation(rest_of_it)
    return state


def _cpus_alone(kept: Allocation) -> Allocation:
    """What a container that shares leaves to its pod; memory that is kept is for it, too."""
    charges = {i: Charge(c.cpu_milli) for i, c in kept.charges.items() if c.cpu_milli}
    return replace(kept, charges=charges, mems=NO_NUMA_NODES, memory_bytes=0, hugepages={})


def release(
    machine: Machine, state: NodeState, container_id: str, ended: float | None = None
) -> Released:
    """Take back what a container has; unknown ids change nothing (stop may come twice).

    Its pod keeps it from ``ended`` on, as far as another container could be refused it.
    """
    allocation = state.allocations.get(container_id)
    if allocation is None or allocation.ended:
        return Released(state=state)
    keeps = allocation.kept and machine.settings.kept_seconds
    if ended is not None and keeps and not state.mates(allocation):
        after = state.with_kept(container_id, ended)
    else:
        after = state.without(container_id)
    return Released(
        state=after,
        change=StateChange((container_id,), (allocation.pod_uid,)),
        updates=pool_updates(machine, state, after, skip=container_id),
    )


def let_go(machine: Machine, state: NodeState, kept: Iterable[Allocation]) -> Released:
    """Give back what was kept for pods."""
    kept = tuple(kept)
    after = without_each(state, kept)
    return Released(
        state=after,
        change=StateChange(tuple(a.container_id for a in kept), tuple({a.pod_uid for a in kept})),
        updates=pool_updates(machine, state, after, skip=""),
    )


def forget_pod(machine: Machine, state: NodeState, uid: str, sandbox: str = "") -> Released:
    """Forget a pod; containers of it that were never reported stopped are dropped too.

    With the id of a sandbox only that one: the kubelet makes another for a pod whose sandbox died,
    and removes the former one later.
    """
    record = state.pods.get(uid)
    if record is None:
        return Released(state=state)
    every = [state.allocations[i] for i in sorted(record.containers)]
    over = [a for a in every if a.pod_id == sandbox or not sandbox]
    after = without_each(state, over)
    if len(over) == len(every):
        after = after.without_pod(uid)
    return Released(
        state=after,
        change=StateChange(tuple(a.container_id for a in over), (uid,)),
        updates=pool_updates(machine, state, after, skip=""),
    )


def pool_updates(
    machine: Machine, before: NodeState, after: NodeState, *, skip: str
) -> tuple[ContainerUpdate, ...]:
    """Updates for the groups whose CPUs differ, one for each member, in id order.

    Then for the containers that are on the pool because their own CPUs are offline. The cost is in
    the groups and in the containers that really change, not in all containers.
    """
    if (
        before.owned is after.owned
        and before.idle is after.idle
        and before.kubelet is after.kubelet
    ):
        return ()  # nothing that the pool is made of
    topology, settings = machine.topology, machine.settings
    old, new = before.pool(topology, settings), after.pool(topology, settings)
    taken, takes = before.withheld_bits, after.withheld_bits
    if old == new and taken == takes:
        return ()
    found: list[ContainerUpdate] = []
    for key, members in sorted(after.groups.items()):
        cpus = group_cpus(key, new, topology, takes)
        if cpus == group_cpus(key, old, topology, taken):
            continue
        ids = sorted(members)
        if skip in members:
            ids.remove(skip)
        # A container that exits meanwhile must not fail another one's creation.
        # All fields but the id are the same: made in one go, in half the time.
        same = ContainerUpdate("", str(cpus), ignore_failure=True)[1:]
        found += map(_update, zip(ids, *map(repeat, same), strict=False))
    if not (after.owned | after.listed_cpus) <= topology.online:
        found += [
            ContainerUpdate(container_id, str(new), ignore_failure=True)
            for container_id, allocation in sorted(after.allocations.items())
            if displaced(allocation, topology) and container_id != skip
        ]
    return tuple(found)


_update: Final = partial(tuple.__new__, ContainerUpdate)
"""Makes a `ContainerUpdate` of a tuple with all its fields."""


def adjustment(
    machine: Machine,
    allocation: Allocation,
    cpus: CPUSet,
    memory_policy: MemoryPolicySetting | None = None,
    *,
    marked: bool = True,
) -> ContainerAdjustment:
    """What to tell the runtime about a container that is being created."""
    settings = machine.settings
    cpus_text, mems_text = str(cpus), str(allocation.mems)
    pinned = allocation.kind not in (Kind.UNBOUND, Kind.FOREIGN) or bool(allocation.mems)
    return ContainerAdjustment(
        cpus=cpus_text,
        mems=mems_text,
        quota=NO_QUOTA if allocation.quota is not None else None,
        annotations={f"{settings.prefix}/{ASSIGNED}": assigned(allocation, cpus_text, machine.key)}
        if marked
        else {},
        env={"NUMA_CPUS": cpus_text, "NUMA_MEMS": mems_text}
        if pinned and settings.set_environment
        else {},
        memory_policy=memory_policy,
    )


def _policy(requested: Requested) -> Policy:
    if requested.policy is Policy.NONE and requested.cpus is not CPUMode.EXCLUSIVE:
        # ``bind`` alone asks for a computed pin and names no policy: the mildest one.
        return Policy.BEST_EFFORT
    return requested.policy


def _unbound(case: Case, pool: CPUSet) -> Placed:
    cpus = case.container.resources.cpus
    if cpus and not covers(cpus, pool, case.state.kubelet.shared):
        # Another plugin before us owns this one, or a kubelet whose grants cannot be read.
        return replace(
            case.unplaced,
            kind=Kind.FOREIGN,
            reason=f"pinned by another component to {cpus_text(cpus)}",
            steps=("another component set its cpuset and the pod asks for nothing: left as it is",),
        )
    none = case.requested.bind is Bind.NONE
    why = "bind: none" if none else "no annotation and no rule asks for a pin"
    return replace(case.unplaced, reason=f"not pinned: {why}", steps=(why,))


def _kubelets(case: Case, side: Kubelets) -> Placed:
    return replace(
        case.unplaced,
        kind=Kind.FOREIGN,
        reason=side.reason,
        steps=("the kubelet pins it by its static policy: left to it", *side.warnings),
        warnings=side.warnings,
    )


def place(case: Case) -> Placed | Refusal:
    """Place one container by its lists or by its policy, going down the ladder to *widen*."""
    requested = case.requested
    listed_only = requested.policy is Policy.NONE and not case.demand.exclusive_cpus
    if requested.numacpu is not None or (requested.numamem is not None and listed_only):
        return place_explicit(case)
    placed = place_computed(case)
    if isinstance(placed, Placed) or case.on_failure is not OnFailure.WIDEN:
        return placed
    if not placed.widenable:
        return placed
    wider = place_computed(replace(case, policy=Policy.BEST_EFFORT))
    if isinstance(wider, Refusal):
        return placed
    return replace(
        wider,
        policy=case.policy,
        preferred=False,
        steps=(placed.message, "on-failure: widen, so the narrowest set that works", *wider.steps),
    )


def _drop_leftovers(state: NodeState, pod: PodSandbox, container: Container) -> NodeState:
    if container.id in state.allocations:
        state = state.without(container.id)
    record = state.pods.get(pod.uid)
    if record is not None:
        for other in sorted(record.containers):
            if state.allocations[other].container == container.name:
                state = state.without(other)
    return state


def _fixed(case: Case) -> bool:
    """Whether more than its policy says on which NUMA nodes a container is."""
    container, requested, said = case.container, case.requested, case.container.mentions
    return (
        requested.numamem is not None
        or requested.slots is not None
        or requested.mempolicy.on_nodes
        or bool(container.devices or container.device_notes or said.nodes or said.cdi)
    )


_kept = attrgetter(*Allocation.__struct_fields__)


def new_allocation(case: Case, placed: Placed, now: float) -> Allocation:
    """What the state keeps of a placement."""
    requested, needs = case.requested, case.demand
    quota = case.container.resources.cpu_quota
    lifted = placed.owned and case.machine.settings.lift_quota and quota is not None and quota > 0
    if lifted and requested.pods_list and needs.size_milli < 1000 * len(placed.cpus):
        lifted = False  # others of its pod run there too
    kept = dict(zip(Allocation.__struct_fields__, _kept(placed), strict=True)) | {
        "pinned": _pinned(case) if placed.kind is Kind.FOREIGN else NO_CPUS,
        "cpu_milli": needs.size_milli,
        "memory_bytes": needs.size_bytes,
        "hugepages": needs.hugepages,
        "smt": requested.smt if placed.owned else SMT.ANY,
        "load": requested.load,
        "quota": quota if lifted else None,
        "slots": requested.slots.ids if requested.slots is not None and placed.owned else "",
        "since": now,
        "fixed": placed.kind in COMPUTED and _fixed(case),
        "movable": placed.kind in COMPUTED and requested.movable,
    }
    if placed.memory_policy is not None:
        kept["mempolicy"] = placed.memory_policy.mode
    return Allocation(**kept)


def _pinned(case: Case) -> CPUSet:
    """What another program pinned it to, or is about to: a grant can come before the cpuset."""
    container = case.container
    grants = case.state.kubelet
    return pinned_to(container.resources.cpus) or grants.cpus_of(
        case.pod.uid, container.name, container.id
    )
