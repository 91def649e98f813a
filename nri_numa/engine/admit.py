"""The door into the engine: admit, release.

Everything is a pure function of machine, state and request; a decision is an offer until the
agent swaps its state in. `nri_numa.engine.resize` and `nri_numa.engine.resync` are the other two
doors, built from the same parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.accounting import check_pool_floor
from nri_numa.engine.assigned import ASSIGNED_KEY, encode_assignment
from nri_numa.engine.captions import foreign_caption, unpinned_caption
from nri_numa.engine.decision import (
    NO_DEMAND,
    Admitted,
    Decision,
    DecisionTrace,
    MeasuredFree,
    NodeModel,
    Placement,
    PlacementRequest,
    Rejected,
    Released,
    UnalignedRejection,
)
from nri_numa.engine.desired import DesiredState, updates_between
from nri_numa.engine.foreign_pins import is_shared_pool_cpuset, parse_foreign_cpuset
from nri_numa.engine.kubelet_grants import KeepGrant, OverrideGrant, keep_or_override_grant
from nri_numa.engine.place.computed import place_computed
from nri_numa.engine.place.explicit import place_explicit
from nri_numa.engine.place.memory import with_memory_policy
from nri_numa.engine.place.needs import exclusive_cpu_count_text
from nri_numa.engine.request.demand import (
    Demand,
    check_claim_in_use,
    compute_demand,
    cpu_size_milli,
    pod_cpu_request_milli,
    unpinned_memory_request,
    uses_pod_resources,
    with_slots,
    with_static_cpus,
)
from nri_numa.engine.state import (
    COMPUTED_KINDS,
    NO_CHARGE,
    POD_RESERVATION_NAME,
    Allocation,
    Charge,
    ContainerKind,
    NodeState,
    PodRecord,
)
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import NO_CFS_QUOTA, numa_text
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import (
    SMT,
    Bind,
    Container,
    ContainerAdjustment,
    CPUMode,
    KubeletGrants,
    MemoryPolicy,
    MemoryPolicySetting,
    OnFailure,
    PlacementOptions,
    PodSandbox,
    Policy,
    QoSClass,
    Scope,
    StateChange,
)

MOVABLE_LIST_WARNING: Final = (
    "movable: true, which has no effect: a container with a list does not move"
)


def admit(  # noqa: C901 - not cut yet
    machine: NodeModel,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    reading: MeasuredFree | None = None,
    now: float = 0.0,
    held: CPUSet = NO_CPUS,
    *,
    running: bool = False,
    resolved: PlacementOptions | Rejection | None = None,
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
    desired_before = DesiredState(machine, before)
    state = _drop_replaced_allocations(state, pod, container)
    requested = machine.options_resolver(pod, container) if resolved is None else resolved
    kept = state.reservations_of(pod.uid)
    open_to_pod = without_allocations(state, kept)
    if container.annotations:
        requested = with_slots(machine.settings, pod, container, requested)
        requested = check_claim_in_use(open_to_pod, requested)
    requested = with_static_cpus(machine.settings, pod, container, requested)
    if isinstance(requested, Rejection):
        trace = DecisionTrace(
            pod=pod,
            container=container,
            pool_before=desired_before.pool,
            rule=requested.rule,
        )
        return Rejected(requested, trace)
    grants = state.kubelet
    # Most nodes have none: nothing is asked then, of the many who would ask.
    side = None
    if not grants.is_empty:
        side = keep_or_override_grant(
            machine.topology, machine.settings, grants, pod, container, requested
        )
    others = state
    if isinstance(side, OverrideGrant):
        requested, held = side.requested, side.cpus or held
        # No other container may have what the kubelet granted it; it may.
        others = replace(
            state, kubelet=state.kubelet.without_container(pod.uid, container.name, container.id)
        )
    sharing: tuple[Allocation, ...] = ()
    joins = False
    needs: Demand | Rejection = NO_DEMAND
    alone = requested.is_unpinned
    if not alone and (side is None or isinstance(side, OverrideGrant)):
        pods_list = requested.listed_cpus if requested.list_is_pods else NO_CPUS
        others_have = state.charge_of_pod(pod.uid, container.id, pods_list)
        needs = compute_demand(pod, container, requested, machine.memory_total, others_have)
        if requested.scope is Scope.POD:
            sharing, joins = _pod_pool_members(state, pod, container, requested)
        if sharing:
            # It has theirs, or they give it all but one.
            give = len(sharing[0].cpus) - (0 if joins else 1)
            beside = others_have.subtract(Charge(cpu_milli=1000 * give))
            among = compute_demand(pod, container, requested, machine.memory_total, beside)
            if isinstance(among, Demand) and among.exclusive_cpus:
                needs = among
    known = NO_DEMAND if isinstance(needs, Rejection) else needs
    if kept and (known.exclusive_cpus or requested.numacpu is not None):
        # What its pod kept is for it; a container that shares leaves it.
        state = open_to_pod
        others = replace(state, kubelet=others.kubelet)
    elif kept:
        if {a.container for a in kept} == {POD_RESERVATION_NAME} and len(
            state.pods[pod.uid].containers
        ) == 1:
            # One that shares speaks for its pod: what is kept for others to come is not needed.
            kept = tuple(a for a in kept if a.container != POD_RESERVATION_NAME)
        state = open_to_pod.with_allocation(*(_cpu_reservation(a) for a in kept if a.exclusive))
        others = replace(state, kubelet=others.kubelet)
    if not known.exclusive_cpus:
        sharing = ()
    elif sharing and not joins:
        state = without_allocations(state, sharing)
        others = replace(state, kubelet=others.kubelet)
    if held is not NO_CPUS and len(held) > known.exclusive_cpus:
        held = NO_CPUS
    case = PlacementRequest(
        machine, others, pod, container, requested, known, reading,
        _effective_policy(requested), held,
        had_instance=running
        or (record is not None and container.name in state.pods[pod.uid].previous),
    )  # fmt: skip
    if others is before:  # nothing was given back: its pool is worked out once
        desired_before = case.desired
    pool_before = desired_before.pool
    if isinstance(side, Rejection):
        return Rejected(side, _build_trace(case, side, pool_before, pool_before))
    if isinstance(side, KeepGrant):
        placed: Placement | Rejection = _place_kubelet_pinned(case, side)
    elif alone:
        placed = _place_unpinned(case, pool_before)
    elif isinstance(needs, Rejection):
        placed = needs
    elif sharing and joins:
        placed = _place_in_pod_pool(case, sharing[0])
    else:
        placed = place_container(case)
    if requested.mempolicy is not MemoryPolicy.DEFAULT and isinstance(placed, Placement):
        placed = with_memory_policy(case, placed, running=running)
    listed = requested.numacpu is not None or requested.numamem is not None
    warned = listed and requested.movable and requested.is_from_annotation("movable")
    if warned and isinstance(placed, Placement):
        warnings, steps = (
            (*placed.warnings, MOVABLE_LIST_WARNING),
            (*placed.decision_steps, MOVABLE_LIST_WARNING),
        )
        placed = replace(placed, warnings=warnings, decision_steps=steps)
    if isinstance(placed, Rejection) and case.on_failure is OnFailure.UNPINNED:
        placed = replace(
            _place_unpinned(case, pool_before),
            reason=unpinned_caption(placed.reason),
            unpinned_for=placed.reason,
            aligned=False,
            alignment=UnalignedRejection.alignment_of(placed),
            decision_steps=(
                f"{case.message_subject}: {placed.detail}",
                "on-failure: unpinned, so it starts untouched",
            ),
        )
    if isinstance(placed, Rejection):
        return Rejected(placed, _build_trace(case, placed, pool_before, pool_before))
    if isinstance(side, OverrideGrant) and side.warnings:
        placed = replace(
            placed,
            warnings=(*side.warnings, *placed.warnings),
            decision_steps=(*side.warnings, *placed.decision_steps),
        )
    allocation = new_allocation(case, placed, now)
    after = state.with_allocation(allocation)
    if placed.pod_affinity is not None:
        grown = after.pods[pod.uid]
        if grown.affinity is None:
            after = after.with_pod(
                replace(grown, affinity=placed.pod_affinity, affinity_is_preferred=placed.aligned)
            )
    if kept:
        after = restore_pod_reservation(
            machine, after, kept, allocation, pod_cpu_request_milli(pod)
        )
    resized: tuple[str, ...] = ()
    change = _state_change(record, after, pod.uid, container.id, kept)
    if sharing and not joins:
        # As many fewer are left to them as it took, wherever these were.
        milli = (pod_cpu_request_milli(pod) or 0) - after.charge_of_pod(pod.uid, "").cpu_milli
        fewer = CPUSet(sorted(sharing[0].cpus - allocation.cpus)[: milli // 1000])
        idle = sharing[0].idle_siblings & machine.topology.siblings_of(fewer)
        like = replace(sharing[0], cpus=fewer, idle_siblings=idle)
        after = after.with_pod_pool(sharing, like, machine.topology)
        resized = tuple(a.container_id for a in sharing)
        change = replace(change, containers=change.containers + resized)
    desired = DesiredState(machine, after)
    return Admitted(
        state=after,
        change=change,
        allocation=allocation,
        adjustment=build_adjustment(desired, allocation, placed.memory_policy, marked=not running),
        updates=updates_between(desired_before, desired, skip=container.id, resized=resized),
        warnings=placed.warnings,
        trace=_build_trace(case, placed, pool_before, desired.pool),
    )


def _pod_pool_members(
    state: NodeState, pod: PodSandbox, container: Container, requested: PlacementOptions
) -> tuple[tuple[Allocation, ...], bool]:
    """Who shares the CPUs of its pod, and whether it is one of them or takes some of its own."""
    if requested.slots is not None:
        return (), False
    if requested.numacpu is not None or requested.cpus is CPUMode.SHARED:
        return (), False
    whole = pod_cpu_request_milli(pod)
    joins = uses_pod_resources(pod, requested, cpu_size_milli(container.resources))
    return state.pod_pool(pod.uid, whole), joins


def _place_in_pod_pool(case: PlacementRequest, member: Allocation) -> Placement:
    """The CPUs of its pod that another container has, which needed none of its own either."""
    where = f"on {numa_text(member.numa_nodes)}"
    why = f"{exclusive_cpu_count_text(len(member.cpus))} {where}, shared with others of its pod"
    charges = {
        i: Charge(1000 * n) for i, n in case.machine.topology.cpu_count_by_node(member.cpus).items()
    }
    return replace(
        case.initial_placement, kind=ContainerKind.EXCLUSIVE, exclusive=True, cpus=member.cpus,
        idle_siblings=member.idle_siblings,
        numa_nodes=member.numa_nodes, mems=member.mems, policy=case.policy, charges=charges,
        aligned=member.aligned, reason=why, decision_steps=(why,),
    )  # fmt: skip


_EMPTY_NODE_STATE: Final = NodeState()
"""Who else is there makes no difference to a container that nothing asks to pin."""


def unpinned_allocation(
    machine: NodeModel,
    grants: KubeletGrants,
    pod: PodSandbox,
    container: Container,
    now: float,
    resolved: PlacementOptions | Rejection,
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
    if isinstance(requested, Rejection) or not requested.is_unpinned:
        return None
    if not grants.is_empty and grants.cpus_of(pod.uid, container.name, container.id):
        return None
    case = PlacementRequest(machine, _EMPTY_NODE_STATE, pod, container, requested)
    return new_allocation(case, _place_unpinned(case, NO_CPUS), now)


def _build_trace(
    case: PlacementRequest, placed: Placement | Rejection, pool_before: CPUSet, pool_after: CPUSet
) -> DecisionTrace:
    known = case.demand is not NO_DEMAND
    ignored = case.requested.ignored
    if case.demand.ignored:
        ignored = (*ignored, case.demand.ignored)
    rule, steps = "", ignored
    if isinstance(placed, Placement):
        alignment = placed.alignment
        ignored += placed.ignored
        steps = (*ignored, *placed.decision_steps)
    else:
        alignment, rule = UnalignedRejection.alignment_of(placed), placed.rule
    return DecisionTrace(
        pod=case.pod,
        container=case.container,
        requested=case.requested,
        demand=case.demand if known else None,
        alignment=alignment,
        decision_steps=steps,
        free_cpu_milli=case.desired.free_cpu_milli if known else {},
        free_memory=case.free_memory if known else {},
        pool_before=pool_before,
        pool_after=pool_after,
        rule=rule,
        ignored=ignored,
    )


def _state_change(
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


def without_allocations(state: NodeState, allocations: Iterable[Allocation]) -> NodeState:
    """The state without these allocations."""
    for allocation in allocations:
        state = state.without_allocation(allocation.container_id)
    return state


def restore_pod_reservation(  # noqa: C901 - not cut yet
    machine: NodeModel,
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
    cpus_used = NO_CPUS if used.yields_to_exclusive else used.cpus | used.idle_siblings
    taken = dict(used.charges)  # what of it was not kept, as far as was looked
    for one in sorted(kept, key=lambda a: a.container == POD_RESERVATION_NAME):
        if one.container_id in state.allocations:
            state = state.without_allocation(one.container_id)
        cpus, idle = one.cpus - cpus_used, one.idle_siblings - cpus_used
        if one.container == POD_RESERVATION_NAME and whole_milli is not None:
            milli = whole_milli
            for a in (state.allocations[i] for i in state.pods[one.pod_uid].containers):
                has = sum(c.cpu_milli for c in a.charges.values())
                if not a.reserved_at:
                    milli -= max(has, a.cpu_milli)
                elif used.exclusive:  # one that shares leaves to the next owner what ended
                    milli -= has
            cpus = CPUSet(sorted(cpus)[max(0, len(cpus) - max(0, milli) // 1000) :])
            idle = idle & topology.siblings_of(cpus)
        if (
            used.exclusive
            and one.exclusive
            and check_pool_floor(DesiredState(machine, state), "", cpus | idle)
        ):
            continue
        counts, charges = topology.cpu_count_by_node(cpus), {}
        for i, rest in one.charges.items():
            # Others of the pod may be anywhere, a container that ended was in its place.
            for at in tuple(taken) if one.container == POD_RESERVATION_NAME else (i,):
                its = taken.get(at, NO_CHARGE)
                rest, taken[at] = rest.subtract(its), its.subtract(rest)
            rest = replace(rest, cpu_milli=1000 * counts.get(i, 0)) if one.exclusive else rest
            if rest != NO_CHARGE:
                charges[i] = rest
        if cpus == one.cpus and idle == one.idle_siblings and charges == one.charges:
            state = state.with_allocation(one)
        elif cpus or (charges and not one.exclusive):
            left = reduce(Charge.add, charges.values(), NO_CHARGE)
            mems = one.mems if left.memory or left.hugepages else NO_NUMA_NODES
            rest_of_it = replace(
                one, cpus=cpus, idle_siblings=idle, numa_nodes=NUMASet(charges), charges=charges,
        mems=mems,
                memory_bytes=left.memory, hugepages=left.hugepages,
            )  # fmt: skip
            state = state.with_allocation(rest_of_it)
    return state


def _cpu_reservation(kept: Allocation) -> Allocation:
    """What a container that shares leaves to its pod; memory that is kept is for it, too."""
    charges = {i: Charge(c.cpu_milli) for i, c in kept.charges.items() if c.cpu_milli}
    return replace(kept, charges=charges, mems=NO_NUMA_NODES, memory_bytes=0, hugepages={})


def release_container(
    machine: NodeModel, state: NodeState, container_id: str, ended: float | None = None
) -> Released:
    """Take back what a container has; unknown ids change nothing (stop may come twice).

    Its pod keeps it from ``ended`` on, as far as another container could be refused it.
    """
    allocation = state.allocations.get(container_id)
    if allocation is None or allocation.reserved_at:
        return Released(state=state)
    keeps = allocation.is_reservable and machine.settings.reservation_seconds
    if ended is not None and keeps and not state.cpu_sharers(allocation):
        after = state.with_reservation(container_id, ended)
    else:
        after = state.without_allocation(container_id)
    return Released(
        state=after,
        change=StateChange((container_id,), (allocation.pod_uid,)),
        updates=updates_between(
            DesiredState(machine, state), DesiredState(machine, after), skip=container_id
        ),
    )


def release_reservations(
    machine: NodeModel, state: NodeState, kept: Iterable[Allocation]
) -> Released:
    """Give back what was kept for pods."""
    kept = tuple(kept)
    after = without_allocations(state, kept)
    return Released(
        state=after,
        change=StateChange(tuple(a.container_id for a in kept), tuple({a.pod_uid for a in kept})),
        updates=updates_between(DesiredState(machine, state), DesiredState(machine, after)),
    )


def forget_pod(machine: NodeModel, state: NodeState, uid: str, sandbox: str = "") -> Released:
    """Forget a pod; containers of it that were never reported stopped are dropped too.

    With the id of a sandbox only that one: the kubelet makes another for a pod whose sandbox died,
    and removes the former one later.
    """
    record = state.pods.get(uid)
    if record is None:
        return Released(state=state)
    every = [state.allocations[i] for i in sorted(record.containers)]
    over = [a for a in every if a.pod_id == sandbox or not sandbox]
    after = without_allocations(state, over)
    if len(over) == len(every):
        after = after.without_pod(uid)
    return Released(
        state=after,
        change=StateChange(tuple(a.container_id for a in over), (uid,)),
        updates=updates_between(DesiredState(machine, state), DesiredState(machine, after)),
    )


def build_adjustment(
    desired: DesiredState,
    allocation: Allocation,
    memory_policy: MemoryPolicySetting | None = None,
    *,
    marked: bool = True,
) -> ContainerAdjustment:
    """What to tell the runtime about a container that is being created."""
    machine, settings = desired.machine, desired.machine.settings
    cpus_text, mems_text = str(desired.cpuset_of(allocation)), str(allocation.mems)
    pinned = allocation.kind not in (ContainerKind.UNPINNED, ContainerKind.FOREIGN) or bool(
        allocation.mems
    )
    return ContainerAdjustment(
        cpus=cpus_text,
        mems=mems_text,
        quota=NO_CFS_QUOTA if allocation.lifted_quota is not None else None,
        annotations={
            f"{settings.prefix}/{ASSIGNED_KEY}": encode_assignment(
                allocation, cpus_text, machine.key
            )
        }
        if marked
        else {},
        env={"NUMA_CPUS": cpus_text, "NUMA_MEMS": mems_text}
        if pinned and settings.set_environment
        else {},
        memory_policy=memory_policy,
    )


def _effective_policy(requested: PlacementOptions) -> Policy:
    if requested.policy is Policy.NONE and requested.cpus is not CPUMode.EXCLUSIVE:
        # ``bind`` alone asks for a computed pin and names no policy: the mildest one.
        return Policy.BEST_EFFORT
    return requested.policy


def _place_unpinned(case: PlacementRequest, pool: CPUSet) -> Placement:
    cpus = case.container.resources.cpus
    if cpus and not is_shared_pool_cpuset(cpus, pool, case.state.kubelet.shared):
        # Another plugin before us owns this one, or a kubelet whose grants cannot be read.
        return replace(
            case.initial_placement,
            kind=ContainerKind.FOREIGN,
            reason=foreign_caption(cpus),
            decision_steps=(
                "another component set its cpuset and the pod asks for nothing: left as it is",
            ),
        )
    none = case.requested.bind is Bind.NONE
    why = "bind: none" if none else "no annotation and no rule asks for a pin"
    return replace(case.initial_placement, reason=unpinned_caption(why), decision_steps=(why,))


def _place_kubelet_pinned(case: PlacementRequest, side: KeepGrant) -> Placement:
    return replace(
        case.initial_placement,
        kind=ContainerKind.FOREIGN,
        reason=side.reason,
        decision_steps=("the kubelet pins it by its static policy: left to it", *side.warnings),
        warnings=side.warnings,
    )


def place_container(case: PlacementRequest) -> Placement | Rejection:
    """Place one container by its lists or by its policy, going down the ladder to *widen*."""
    requested = case.requested
    listed_only = requested.policy is Policy.NONE and not case.demand.exclusive_cpus
    if requested.numacpu is not None or (requested.numamem is not None and listed_only):
        return place_explicit(case)
    placed = place_computed(case)
    if isinstance(placed, Placement) or case.on_failure is not OnFailure.BEST_EFFORT:
        return placed
    if not placed.allows_best_effort:
        return placed
    wider = place_computed(replace(case, policy=Policy.BEST_EFFORT))
    if isinstance(wider, Rejection):
        return placed
    return replace(
        wider,
        policy=case.policy,
        aligned=False,
        decision_steps=(
            f"{case.message_subject}: {placed.detail}",
            "on-failure: widen, so the narrowest set that works",
            *wider.decision_steps,
        ),
    )


def _drop_replaced_allocations(
    state: NodeState, pod: PodSandbox, container: Container
) -> NodeState:
    if container.id in state.allocations:
        state = state.without_allocation(container.id)
    record = state.pods.get(pod.uid)
    if record is not None:
        for other in sorted(record.containers):
            if state.allocations[other].container == container.name:
                state = state.without_allocation(other)
    return state


def _is_immovable(case: PlacementRequest) -> bool:
    """Whether more than its policy says on which NUMA nodes a container is."""
    container, requested, said = case.container, case.requested, case.container.mentions
    return (
        requested.numamem is not None
        or requested.slots is not None
        or requested.mempolicy.needs_nodes
        or bool(container.devices or container.device_notes or said.nodes or said.cdi)
    )


_allocation_fields = attrgetter(*Allocation.__struct_fields__)


def new_allocation(case: PlacementRequest, placed: Placement, now: float) -> Allocation:
    """What the state keeps of a placement."""
    requested, needs = case.requested, case.demand
    quota = case.container.resources.cpu_quota
    lifted = (
        placed.exclusive
        and case.machine.settings.disable_cfs_quota
        and quota is not None
        and quota > 0
    )
    if lifted and requested.list_is_pods and needs.own_cpu_milli < 1000 * len(placed.cpus):
        lifted = False  # others of its pod run there too
    kept = dict(zip(Allocation.__struct_fields__, _allocation_fields(placed), strict=True)) | {
        "foreign_cpus": _foreign_pinned_or_granted_cpus(case)
        if placed.kind is ContainerKind.FOREIGN
        else NO_CPUS,
        "cpu_milli": needs.own_cpu_milli,
        "memory_bytes": needs.own_memory_bytes,
        "hugepages": needs.hugepages,
        "smt": requested.smt if placed.exclusive else SMT.ANY,
        "load": requested.load,
        "lifted_quota": quota if lifted else None,
        "slots": requested.slots.ids if requested.slots is not None and placed.exclusive else "",
        "assigned_at": now,
        "immovable": placed.kind in COMPUTED_KINDS and _is_immovable(case),
        "movable": placed.kind in COMPUTED_KINDS and requested.movable,
    }
    if not placed.mems and case.pod.qos is not QoSClass.BEST_EFFORT:
        kept["unpinned_memory"] = _unpinned_memory(case)
    if placed.memory_policy is not None:
        kept["mempolicy"] = placed.memory_policy.mode
    return Allocation(**kept)


def _unpinned_memory(case: PlacementRequest) -> int:
    """Bytes that a container without memory nodes requests, and the kubelet does not grant."""
    pod, container, state = case.pod, case.container, case.state
    if pod.qos is QoSClass.GUARANTEED and state.kubelet.memory_policy == "Static":
        return 0  # counted as granted, which the kubelet may report later
    if case.demand is not NO_DEMAND:
        return case.demand.memory_requested
    others = NO_CHARGE
    if pod.resources.memory_limit:
        others = state.requested_memory_of_pod(pod.uid, container.id)
    return unpinned_memory_request(pod, container, case.machine.memory_total, others)


def _foreign_pinned_or_granted_cpus(case: PlacementRequest) -> CPUSet:
    """What another program pinned it to, or is about to: a grant can come before the cpuset."""
    container = case.container
    grants = case.state.kubelet
    return parse_foreign_cpuset(container.resources.cpus) or grants.cpus_of(
        case.pod.uid, container.name, container.id
    )
