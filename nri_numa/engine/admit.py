"""Admission and release of containers.

Machine, state and request in, decision out. `nri_numa.engine.resize` and `nri_numa.engine.resync`
are the engine's other entry points.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.assigned import ASSIGNED_KEY, encode_assignment
from nri_numa.engine.captions import foreign_caption, unpinned_caption
from nri_numa.engine.decision import (
    NO_DEMAND,
    Admitted,
    Decision,
    DecisionTrace,
    Placement,
    PlacementRequest,
    Rejected,
    RejectionWithAlignment,
    Released,
)
from nri_numa.engine.desired import NodeSnapshot, updates_between
from nri_numa.engine.foreign_pins import is_shared_pool_cpuset, parse_foreign_cpuset
from nri_numa.engine.kubelet_grants import KeepGrant, OverrideGrant, keep_or_override_grant
from nri_numa.engine.place.computed import place_computed
from nri_numa.engine.place.listed_cpus import place_listed
from nri_numa.engine.place.memory import with_memory_policy
from nri_numa.engine.place.needs import exclusive_cpu_count_text
from nri_numa.engine.pod_reservation import (
    NO_POD_RESERVATION,
    PodReservation,
    find_pod_reservation,
    find_pod_share,
    give_to_pod_pool,
    is_for_pod_pool,
    with_creation,
    with_reservation_renewed,
)
from nri_numa.engine.request import options
from nri_numa.engine.request.demand import (
    check_added_cpus,
    check_claim_in_use,
    complete_options,
    compute_demand,
    is_in_pod_pool,
    unpinned_memory_request,
)
from nri_numa.engine.request.options import PlacementOptions, Retention
from nri_numa.engine.state import (
    COMPUTED_KINDS,
    NO_CHARGE,
    Allocation,
    Charge,
    ContainerKind,
    NodeState,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.machine import NO_CFS_QUOTA, numa_text
from nri_numa.model.reasons import Rejection
from nri_numa.model.workload import (
    Bind,
    ChangedStateIds,
    Container,
    ContainerAdjustment,
    MemoryPolicy,
    MemoryPolicySetting,
    OnFailure,
    PodSandbox,
    Policy,
    QoSClass,
)

MOVABLE_WITHOUT_EFFECT_WARNING: Final = (
    "movable: true has no effect, because a container with a list is not moved"
)


def admit(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    cpus: CPUSet = NO_CPUS,
    *,
    running: bool = False,
    resolved: PlacementOptions | Rejection | None = None,
) -> Decision:
    """Decide about one container that is being created.

    An allocation of the same pod and container name (a failed start, a repeated request) is
    released first, and its CPUs are preferred. An unknown container that runs already (``running``)
    keeps its ``cpus`` if they can be exclusive; it gets no annotation and no setting that can only
    be set at creation. ``resolved`` are its options if the caller has resolved them.
    """
    outcome = _place_request(node, pod, container, cpus, is_running=running, resolved=resolved)
    return outcome if isinstance(outcome, Rejected) else _book_placement(*outcome, node)


def state_with_expected(
    node: NodeSnapshot, pod: PodSandbox, container: Container
) -> NodeState | Rejected:
    """Return the state with a container to come, without updates or an explanation."""
    outcome = _place_request(node, pod, container)
    if isinstance(outcome, Rejected):
        return outcome
    case, placement, reservation = outcome
    return _booked_state(case, new_allocation(case, placement), placement, reservation, node)[0]


_PlacedRequest = tuple[PlacementRequest, Placement, PodReservation]


def _place_request(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    current_cpus: CPUSet = NO_CPUS,
    *,
    is_running: bool = False,
    resolved: PlacementOptions | Rejection | None = None,
) -> _PlacedRequest | Rejected:
    """Place one container of a pod, without allocating anything yet."""
    vacated = _vacate_previous(node, pod, container)
    requested = _read_request(vacated, pod, container, resolved)
    if isinstance(requested, Rejection):
        pool, rule = node.pool, requested.rule
        trace = DecisionTrace(pod=pod, container=container, pool_before=pool, rule=rule)
        return Rejected(requested, trace)
    case = PlacementRequest(
        vacated,
        pod,
        container,
        requested,
        current_cpus=current_cpus,
        is_running=is_running,
        prior_pool=node.pool,
    )
    case, grant = _resolve_kubelet_grant(case)
    record = vacated.state.pods.get(pod.uid)
    has_members = record is not None and record.containers
    total = pod.resources
    has_sum = record is not None or total.cpu_shares or total.cpu_quota or total.memory_limit
    if has_sum and not requested.is_unpinned:
        case = replace(case, pod_share=find_pod_share(case))
    reservation = find_pod_reservation(case) if has_members else NO_POD_RESERVATION
    case, demand_rejection = _with_demand(case, grant)
    if has_members:
        case, reservation = reservation.open_node(case)
    placement = _place_with_fallback(case, grant, demand_rejection, reservation)
    if isinstance(placement, Rejection) and reservation.has_withheld_cpus(case):
        case, reservation = reservation.open_whole_node(case)
        placement = _place_with_fallback(case, grant, demand_rejection, reservation)
    if isinstance(placement, Rejection):
        return Rejected(placement, _build_trace(case, placement, node.pool))
    return case, placement, reservation


def _vacate_previous(node: NodeSnapshot, pod: PodSandbox, container: Container) -> NodeSnapshot:
    """Remove allocations of a failed start or an earlier identical request."""
    state = node.state
    if container.id in state.allocations:
        state = state.without_allocation(container.id)
    for a in state.allocations_of_pod(pod.uid):
        if a.container == container.name:
            state = state.without_allocation(a.container_id)
    return node.with_state(state)


def _read_request(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    resolved: PlacementOptions | Rejection | None,
) -> PlacementOptions | Rejection:
    """Resolve annotations, rules, defaults, slots and ``staticCPUs``; reject a claim in use."""
    machine, state = node.machine, node.state
    requested = machine.options_resolver(pod, container) if resolved is None else resolved
    requested = complete_options(machine.settings, pod, container, requested)
    if isinstance(requested, Rejection) or requested.slots is None:
        return requested
    reserved = state.reservations_of(pod.uid)
    base = state.without_allocation(*(a.container_id for a in reserved))
    return check_claim_in_use(base, requested.slots) or requested


_GrantDecision = KeepGrant | OverrideGrant | Rejection | None
"""A grant to keep, one that the container overrides, a rejection, or None without a grant."""


def _resolve_kubelet_grant(case: PlacementRequest) -> tuple[PlacementRequest, _GrantDecision]:
    """Decide whether the kubelet's grant stands; if it is overridden, apply the options."""
    grants, pod, container = case.node.state.kubelet, case.pod, case.container
    if grants.is_empty:  # on most nodes
        return case, None
    grant = keep_or_override_grant(case)
    if not isinstance(grant, OverrideGrant):
        return case, grant
    # The kubelet's grant is unavailable to other containers, but not to this one.
    grants_of_others = grants.without_container(pod.uid, container.name, container.id)
    node = case.node.with_state(replace(case.node.state, kubelet=grants_of_others))
    current_cpus = grant.cpus or case.current_cpus
    return replace(case, node=node, requested=grant.requested, current_cpus=current_cpus), grant


def _with_demand(
    case: PlacementRequest, grant: _GrantDecision
) -> tuple[PlacementRequest, Rejection | None]:
    """Compute the demand of a container beside its pod's others, if it is to be placed.

    Its current CPUs are dropped unless all of them may be exclusive.
    """
    requested, current_cpus = case.requested, case.current_cpus
    if requested.is_unpinned or (grant is not None and not isinstance(grant, OverrideGrant)):
        return case, None
    demand = compute_demand(
        case.pod, case.container, requested, case.node.machine.total_memory_bytes, case.pod_share
    )
    if isinstance(demand, Rejection):
        return case, demand
    if problem := check_added_cpus(case.container, requested, demand):
        return case, problem
    if current_cpus is not NO_CPUS and len(current_cpus) > demand.exclusive_cpus:
        current_cpus = NO_CPUS
    policy = requested.effective_policy
    return replace(case, demand=demand, policy=policy, current_cpus=current_cpus), None


def _place_with_fallback(
    case: PlacementRequest,
    grant: _GrantDecision,
    demand_rejection: Rejection | None,
    reservation: PodReservation,
) -> Placement | Rejection:
    """Place a container, or leave it unpinned if that fails and ``on-failure`` allows it."""
    if isinstance(grant, Rejection):
        return grant
    placement = demand_rejection or _choose_placement(case, grant, reservation)
    if isinstance(placement, Rejection):
        if case.on_failure is not OnFailure.UNPINNED:
            return placement
        placement = _place_unpinned_after(case, placement)
    if isinstance(grant, OverrideGrant) and grant.warnings:
        return replace(
            placement,
            warnings=(*grant.warnings, *placement.warnings),
            decision_steps=(*grant.warnings, *placement.decision_steps),
        )
    return placement


def _choose_placement(
    case: PlacementRequest, grant: KeepGrant | OverrideGrant | None, reservation: PodReservation
) -> Placement | Rejection:
    """Place a container: by the kubelet's grant, unpinned, in the pod pool or by itself."""
    requested = case.requested
    if isinstance(grant, KeepGrant):
        placement: Placement | Rejection = _place_kubelet_pinned(case, grant)
    elif case.demand is NO_DEMAND:
        placement = _place_unpinned(case)
    elif reservation.sharers and reservation.is_joining:
        placement = _place_in_pod_pool(case, reservation.sharers[0])
    else:
        placement = place_container(case)
    if requested.mempolicy is not MemoryPolicy.DEFAULT and isinstance(placement, Placement):
        placement = with_memory_policy(case, placement)
    has_list = requested.numacpu is not None or requested.numamem is not None
    asks_to_move = requested.movable and requested.is_from_annotation("movable")
    if not (has_list and asks_to_move) or isinstance(placement, Rejection):
        return placement
    warning = (MOVABLE_WITHOUT_EFFECT_WARNING,)
    return replace(
        placement,
        warnings=placement.warnings + warning,
        decision_steps=placement.decision_steps + warning,
    )


def _place_unpinned_after(case: PlacementRequest, rejection: Rejection) -> Placement:
    """Leave a rejected container unpinned, as its ``on-failure`` demands."""
    return replace(
        _place_unpinned(case),
        reason=unpinned_caption(rejection.reason),
        unpinned_for=rejection.reason,
        aligned=False,
        alignment=RejectionWithAlignment.alignment_of(rejection),
        decision_steps=(
            f"{case.message_subject}: {rejection.detail}",
            "on-failure: unpinned, so it starts unpinned",
        ),
    )


def _book_placement(
    case: PlacementRequest, placement: Placement, reservation: PodReservation, prior: NodeSnapshot
) -> Admitted:
    """Allocate a placement, restore the pod's reservation, and update changed containers."""
    uid, container_id = case.pod.uid, case.container.id
    allocation = new_allocation(case, placement)
    state, resized_ids = _booked_state(case, allocation, placement, reservation, prior)
    node = prior.with_state(state)
    memory_policy, marked = placement.memory_policy, not case.is_running
    return Admitted(
        state=state,
        change=pod_state_change(prior.state, state, uid, container_id),
        allocation=allocation,
        adjustment=build_adjustment(node, allocation, memory_policy, marked=marked),
        updates=updates_between(prior, node, skip=container_id, resized=resized_ids),
        warnings=placement.warnings,
        trace=_build_trace(case, placement, node.pool),
    )


def _booked_state(
    case: PlacementRequest,
    allocation: Allocation,
    placement: Placement,
    reservation: PodReservation,
    prior: NodeSnapshot,
) -> tuple[NodeState, tuple[str, ...]]:
    """Return the state with an allocation, and ids of pod members whose size changed."""
    state = case.node.state.with_allocation(allocation)
    if state.kubelet is not prior.state.kubelet:
        state = replace(state, kubelet=prior.state.kubelet)
    record = state.pods[case.pod.uid]
    if placement.pod_affinity is not None and record.affinity is None:
        preferred = placement.aligned
        record = replace(record, affinity=placement.pod_affinity, affinity_is_preferred=preferred)
        state = state.with_pod(record)
    total = case.pod_share.sum.cpu_milli
    may_be_pending = record.pending_milli or case.demand.own_cpu_milli < total
    # With a pod pool its members are not in this state, and no container is to come.
    if total >= 1000 and may_be_pending and not reservation.sharers:
        is_first_container = case.pod.uid not in prior.state.pods
        state = with_creation(case, state, is_first_container=is_first_container)
    if reservation is not NO_POD_RESERVATION:
        return reservation.restore(case, state, allocation)
    return state, ()


def _place_in_pod_pool(case: PlacementRequest, member: Allocation) -> Placement:
    """Place a container on the CPUs of its pod pool, which a member has already."""
    nodes = f"on {numa_text(member.numa_nodes)}"
    reason = f"{exclusive_cpu_count_text(len(member.cpus))} {nodes}, shared within its pod"
    charges = {
        i: Charge(1000 * n)
        for i, n in case.node.machine.topology.cpu_count_by_node(member.cpus).items()
    }
    return replace(
        case.initial_placement, kind=ContainerKind.EXCLUSIVE, exclusive=True, cpus=member.cpus,
        idle_siblings=member.idle_siblings,
        numa_nodes=member.numa_nodes, mems=member.mems, policy=case.policy, charges=charges,
        aligned=member.aligned, reason=reason, decision_steps=(reason,),
    )  # fmt: skip


def unpinned_allocation(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    resolved: PlacementOptions | Rejection,
) -> Allocation | None:
    """Build the allocation of a container without pin or placement request; None for any other.

    Only its memory request affects other containers, so a node full of such containers can be
    admitted without one decision after the other.
    """
    if container.resources.cpus or node.state.kubelet.cpus_of(
        pod.uid, container.name, container.id
    ):
        return None
    requested = complete_options(node.machine.settings, pod, container, resolved)
    if isinstance(requested, Rejection) or not requested.is_unpinned:
        return None
    case = PlacementRequest(node, pod, container, requested)
    return new_allocation(case, _place_unpinned(case))


def _build_trace(
    case: PlacementRequest, placed: Placement | Rejection, pool_after: CPUSet
) -> DecisionTrace:
    has_demand, ignored = case.demand is not NO_DEMAND, case.requested.ignored
    if case.demand.ignored:
        ignored += (case.demand.ignored,)
    if isinstance(placed, Placement):
        alignment, rule, ignored = placed.alignment, "", ignored + placed.ignored
        texts = ignored + placed.decision_steps
    else:
        alignment, rule, texts = RejectionWithAlignment.alignment_of(placed), placed.rule, ignored
    return DecisionTrace(
        pod=case.pod,
        container=case.container,
        requested=case.requested,
        demand=case.demand if has_demand else None,
        alignment=alignment,
        decision_steps=texts,
        free_cpu_milli=case.node.free_cpu_milli if has_demand else {},
        free_memory=case.node.free_memory if has_demand else {},
        pool_before=case.prior_pool,
        pool_after=pool_after,
        rule=rule,
        ignored=ignored,
    )


def pod_state_change(
    prior: NodeState, state: NodeState, uid: str, container_id: str
) -> ChangedStateIds:
    """List a container and those of its pod whose allocation changed, was removed or is pending."""
    ids, prior_by_id, by_id = state.pods[uid].containers, prior.allocations, state.allocations
    if uid in prior.pods:
        ids |= prior.pods[uid].containers
    if ids == {container_id}:
        return ChangedStateIds((container_id,), (uid,))
    changed_ids = sorted(i for i in ids - {container_id} if prior_by_id.get(i) is not by_id.get(i))
    return ChangedStateIds((container_id, *changed_ids), (uid,))


def release_container(
    node: NodeSnapshot, container_id: str, ended_at: float | None = None
) -> Released:
    """Release a container; unknown ids change nothing, because a stop may be reported twice.

    Its pod keeps a reservation from ``ended_at`` (Unix seconds) if it may have one. A pod pool gets
    the CPUs instead.
    """
    state = node.state
    allocation = state.allocations.get(container_id)
    if allocation is None or allocation.reserved_at:
        return Released(state=state)
    result = state_without_ended(node, allocation, ended_at)
    ids: tuple[str, ...] = ()
    if is_for_pod_pool(state, allocation):
        ids = tuple(a.container_id for a in state.pod_pool(allocation.pod_uid))
    updates = updates_between(node, node.with_state(result), skip=container_id, resized=ids)
    if ended_at is not None and state.pods[allocation.pod_uid].pending_milli:
        result = with_reservation_renewed(result, allocation.pod_uid, ended_at)
        ids += tuple(a.container_id for a in result.reservations_of(allocation.pod_uid))
    change = ChangedStateIds((container_id, *ids), (allocation.pod_uid,))
    return Released(state=result, change=change, updates=updates)


def state_without_ended(
    node: NodeSnapshot, allocation: Allocation, ended_at: float | None
) -> NodeState:
    """Return the state after a container has ended; see `release_container`."""
    state, container_id = node.state, allocation.container_id
    may_reserve = allocation.is_reservable and node.machine.settings.reservation_seconds
    if is_for_pod_pool(state, allocation):
        return give_to_pod_pool(node, allocation)
    if ended_at is not None and may_reserve and not state.has_cpu_sharer(allocation):
        return state.with_reservation(container_id, ended_at)
    return state.without_allocation(container_id)


def release_reservations(node: NodeSnapshot, reserved: Iterable[Allocation]) -> Released:
    """Release reservations of pods."""
    uids = {a.container_id: a.pod_uid for a in reserved}
    state = node.state.without_allocation(*uids)
    return _released_outcome(node, state, ChangedStateIds(tuple(uids), tuple({*uids.values()})))


def forget_pod(node: NodeSnapshot, uid: str, sandbox: str = "") -> Released:
    """Drop a pod with all containers, also those that were never reported stopped.

    With a ``sandbox`` id only containers of that sandbox are dropped: the kubelet creates a new
    sandbox for a pod whose sandbox died, and removes the old one later.
    """
    state = node.state
    if uid not in state.pods:
        return Released(state=state)
    allocations = state.allocations_of_pod(uid)
    ids = [a.container_id for a in allocations if a.pod_id == sandbox or not sandbox]
    result = state.without_allocation(*ids)
    if len(ids) == len(allocations):
        result = result.without_pod(uid)
    return _released_outcome(node, result, ChangedStateIds(tuple(ids), (uid,)))


def _released_outcome(node: NodeSnapshot, state: NodeState, change: ChangedStateIds) -> Released:
    updates = updates_between(node, node.with_state(state))
    return Released(state=state, change=change, updates=updates)


def build_adjustment(
    desired: NodeSnapshot,
    allocation: Allocation,
    memory_policy: MemoryPolicySetting | None = None,
    *,
    marked: bool = True,
) -> ContainerAdjustment:
    """Build the runtime's adjustment for a container that is being created."""
    settings, annotations, env = desired.machine.settings, {}, {}
    cpuset = desired.cpuset_of(allocation)
    cpus, mems = str(cpuset), str(allocation.mems)
    if marked:
        text = encode_assignment(allocation, cpus, desired.machine.key)
        annotations = {f"{settings.prefix}/{ASSIGNED_KEY}": text}
    if settings.inject_environment and allocation.is_pinned:
        env = {"NUMA_CPUS": cpus, "NUMA_MEMS": mems}
        cpus_by_node = desired.machine.topology.cpus_by_node(cpuset)
        if len(cpus_by_node) > 1:
            env |= {f"NUMA_CPUS_{i}": str(node_cpus) for i, node_cpus in cpus_by_node.items()}
    return ContainerAdjustment(
        cpus=cpus,
        mems=mems,
        quota=NO_CFS_QUOTA if allocation.lifted_quota is not None else None,
        annotations=annotations,
        env=env,
        memory_policy=memory_policy,
    )


def _place_unpinned(case: PlacementRequest) -> Placement:
    cpus = case.container.resources.cpus
    if cpus and not is_shared_pool_cpuset(cpus, case.prior_pool, case.node.state.kubelet.shared):
        # Pinned by an earlier plugin, or by a kubelet whose grants cannot be read.
        return replace(
            case.initial_placement,
            kind=ContainerKind.FOREIGN,
            reason=foreign_caption(cpus),
            decision_steps=("another program set its cpuset, and the pod requests no placement",),
        )
    has_bind_none = case.requested.bind is Bind.NONE
    cause = "bind: none" if has_bind_none else "no annotation or rule requests a placement"
    return replace(case.initial_placement, reason=unpinned_caption(cause), decision_steps=(cause,))


def _place_kubelet_pinned(case: PlacementRequest, grant: KeepGrant) -> Placement:
    return replace(
        case.initial_placement,
        kind=ContainerKind.FOREIGN,
        reason=grant.reason,
        decision_steps=("the kubelet pins it by its static policy", *grant.warnings),
        warnings=grant.warnings,
    )


def place_container(case: PlacementRequest) -> Placement | Rejection:
    """Place one container by its lists or its policy; fall back to best-effort if allowed."""
    requested = case.requested
    listed_only = requested.policy is Policy.NONE and not case.demand.exclusive_cpus
    if requested.numacpu is not None or (requested.numamem is not None and listed_only):
        if requested.numacpu is None and requested.bind is Bind.CPU:
            return place_computed(replace(case, policy=Policy.NONE))  # as numactl --cpunodebind
        return place_listed(case)
    placed = place_computed(case)
    if isinstance(placed, Placement) or not placed.allows_best_effort:
        return placed
    if case.on_failure is not OnFailure.BEST_EFFORT:
        return placed
    fallback = place_computed(replace(case, policy=Policy.BEST_EFFORT))
    if isinstance(fallback, Rejection):
        return placed
    return replace(
        fallback,
        policy=case.policy,
        aligned=False,
        decision_steps=(
            f"{case.message_subject}: {placed.detail}",
            "on-failure: best-effort, so more NUMA nodes are allowed",
            *fallback.decision_steps,
        ),
    )


def _is_immovable(case: PlacementRequest) -> bool:
    """True if lists, slots, memory policy or devices tie a container to its NUMA nodes."""
    container, requested, mentions = case.container, case.requested, case.container.mentions
    return (
        requested.numamem is not None
        or requested.slots is not None
        or requested.mempolicy.needs_nodes
        or bool(container.devices or container.device_notes or mentions.nodes or mentions.cdi)
    )


_allocation_fields = attrgetter(*Allocation.__struct_fields__)


def new_allocation(case: PlacementRequest, placed: Placement) -> Allocation:
    """Build the allocation that the state keeps of a placement."""
    requested, demand = case.requested, case.demand
    quota = case.container.resources.cpu_quota or 0
    lifted = placed.exclusive and case.node.machine.settings.disable_cfs_quota and quota > 0
    if lifted and requested.list_is_pods and demand.own_cpu_milli < 1000 * len(placed.cpus):
        lifted = False  # others of its pod run on these CPUs too
    retention_applies = {
        Retention.ALWAYS: True,
        Retention.EXCLUSIVE: placed.exclusive,
        Retention.COMPUTED: placed.kind in COMPUTED_KINDS,
        Retention.SET: placed.memory_policy is not None,
    }
    fields = dict(zip(Allocation.__struct_fields__, _allocation_fields(placed), strict=True)) | {
        "cpu_milli": demand.own_cpu_milli,
        "memory_bytes": demand.own_memory_bytes,
        "hugepages": demand.hugepages,
        "lifted_quota": quota if lifted else None,
        "slots": requested.slots.ids if requested.slots is not None and placed.exclusive else "",
        "assigned_at": case.node.now,
        "immovable": placed.kind in COMPUTED_KINDS and _is_immovable(case),
        "uses_pod_resources": case.pod_share.uses_pod_resources,
        "is_in_pod_pool": case.pod_share.uses_pod_resources
        and is_in_pod_pool(case.pod, requested, case.pod_share),
    }
    for field, retention, value_of in options.TABLE.retained:
        if retention_applies[retention]:
            fields[field] = value_of(requested)
    if placed.kind is ContainerKind.FOREIGN:
        # The kubelet may have granted the CPUs without having written the cpuset yet.
        grants, container = case.node.state.kubelet, case.container
        cpus = parse_foreign_cpuset(container.resources.cpus)
        granted = grants.cpus_of(case.pod.uid, container.name, container.id)
        fields["foreign_cpus"] = cpus or granted
    if case.pod.qos is not QoSClass.BEST_EFFORT and not placed.mems:
        fields["unpinned_memory"] = _unpinned_memory(case)
    return Allocation(**fields)


def _unpinned_memory(case: PlacementRequest) -> int:
    """Bytes requested by a container without memory nodes and without a kubelet grant."""
    pod, container, state = case.pod, case.container, case.node.state
    if pod.qos is QoSClass.GUARANTEED and state.kubelet.memory_policy == "Static":
        return 0  # counted as granted, which the kubelet may report later
    if case.demand is not NO_DEMAND:
        return case.demand.memory_requested
    charge = NO_CHARGE
    if pod.resources.memory_limit:
        charge = state.requested_memory_of_pod(pod.uid, container.id)
    return unpinned_memory_request(pod, container, case.node.machine.total_memory_bytes, charge)
