"""Admission of whole pods: the first container is admitted only if the later ones fit too.

The kubelet allocates CPUs to all containers of a pod before it creates one. A runtime reports them
one by one, so later ones are known from the annotation ``container-resources``, which the scheduler
extender writes with the binding, or else from the pod's sum, which the kubelet sends with the
sandbox and without the number of containers. Their demand is reserved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.admit import (
    admit,
    build_adjustment,
    pod_state_change,
    state_with_expected,
    state_without_ended,
)
from nri_numa.engine.align.hints import EXACT_MERGE_MAX_NODES
from nri_numa.engine.captions import PENDING_RESERVATION_CAPTION
from nri_numa.engine.decision import Admitted, Decision, Rejected, Released
from nri_numa.engine.desired import NodeSnapshot, updates_between
from nri_numa.engine.node_model import NodeModel, uses_kubelet_rules
from nri_numa.engine.pod_reservation import (
    entitled_milli,
    reserved_text,
    restore_pod_reservation,
    soft_reservations,
    sum_in_force,
    with_pending_of,
    with_sandbox,
    without_pending_reservation,
)
from nri_numa.engine.request.annotations import (
    CONTAINER_RESOURCES_KEY,
    quote_value,
    written_annotation,
)
from nri_numa.engine.request.demand import (
    DEFAULT_CFS_PERIOD_US,
    SHARES_PER_CPU,
    pod_cpu_request_milli,
)
from nri_numa.engine.request.options import DEFAULT_SOURCE, PlacementOptions
from nri_numa.engine.state import (
    COMPUTED_KINDS,
    POD_RESERVATION_NAME,
    Allocation,
    NodeState,
    shared_group_key,
)
from nri_numa.model.machine import human_milli
from nri_numa.model.reasons import Rejection, RejectionReason, RetryCondition
from nri_numa.model.workload import (
    ChangedStateIds,
    Container,
    PodSandbox,
    Policy,
    QoSClass,
    Resources,
    Scope,
)
from nri_numa.text import milli_cpus, whole_bytes

MAX_CONTAINERS_ANNOTATION_CHARS: Final = 16_384
"""Characters of the annotation that are read."""
MAX_EXPECTED_CONTAINERS: Final = 64
"""Containers of one pod that are placed at once; one takes as long as its creation."""
MAX_EXPECTED_WORK: Final = 20_000
"""Units of work in which containers are placed with the first of their pod: less than 25 ms on 512
CPUs with 1,000 containers (`python -m bench --only room`). For the others their sum is kept."""
_ADMISSION_WORK: Final = 350
"""Units for an admission that is tried, beside one for each CPU, and two for each container and for
each set of NUMA nodes."""
_EXPECTED_CONTAINERS_TEXT: Final = (
    'containers in the order of their start, such as {"prepare": {"cpu": "4", "memory": "8Gi", '
    '"ends": true}, "main": {"cpu": "4", "memory": "8Gi"}}'
)


class ExpectedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A container as its pod's annotation names it; ``is_init`` ends before others start.

    Huge pages are left out: the pod's sum, which bounds what is kept, does not have them.
    """

    milli: int
    memory: int
    is_init: bool = False


def _resources_of_guaranteed_limits(milli: int, memory: int) -> Resources:
    """Resources that the kubelet makes of limits that are the requests."""
    return Resources(
        cpu_shares=max(2, milli * SHARES_PER_CPU // 1000),
        cpu_quota=milli * DEFAULT_CFS_PERIOD_US // 1000 or None,
        cpu_period=DEFAULT_CFS_PERIOD_US,
        memory_limit=memory or None,
    )


def parse_expected_containers(text: str) -> dict[str, ExpectedContainer] | None:
    """Parse an annotation by container; None if it is not valid."""
    try:
        document = json.loads(text) if len(text) <= MAX_CONTAINERS_ANNOTATION_CHARS else None
        if not isinstance(document, dict) or len(document) > MAX_EXPECTED_CONTAINERS:
            return None
        containers: dict[str, ExpectedContainer] = {}
        for name, entry in document.items():
            if not isinstance(entry, dict) or not entry.keys() <= {"cpu", "memory", "ends"}:
                return None
            containers[name] = ExpectedContainer(
                milli=milli_cpus(entry.get("cpu", 0)),
                memory=whole_bytes(entry.get("memory", 0)),
                is_init=entry.get("ends") is True,
            )
    except (ValueError, RecursionError):
        return None
    return containers


def format_expected_containers(containers: Mapping[str, ExpectedContainer]) -> str:
    """Format the annotation's value; containers are in the order of their start."""
    document = {
        name: {"cpu": f"{container.milli}m", "memory": str(container.memory)}
        | ({"ends": True} if container.is_init else {})
        for name, container in containers.items()
    }
    return json.dumps(document, separators=(",", ":"))


def reserve_for_sandbox(node: NodeSnapshot, pod: PodSandbox) -> Released:
    """Reserve the pod's sum of exclusive CPUs for a new sandbox, if its scope is the pod.

    The first container decides about the NUMA nodes, because devices are not known yet. A
    reservation of the pod's earlier sandbox is transferred.
    """
    machine, record = node.machine, node.state.pods.get(pod.uid)
    unchanged = Released(state=node.state)
    if not machine.settings.reservation_seconds:
        return unchanged
    if record is not None:
        change = ChangedStateIds(tuple(sorted(record.containers)), (pod.uid,))
        unchanged = Released(state=with_sandbox(node.state, pod), change=change)
        if record.containers:
            return unchanged
    container = _pending_container(pod, pod.resources)
    requested = machine.options_resolver(pod, container)
    if isinstance(requested, Rejection) or requested.scope is not Scope.POD:
        return unchanged
    decided = admit(node.with_state(unchanged.state), pod, container, resolved=requested)
    if isinstance(decided, Rejected) or not decided.allocation.exclusive:
        return unchanged
    state = decided.state.with_reservation(container.id, node.now, PENDING_RESERVATION_CAPTION)
    record = state.pods[pod.uid]
    record = replace(
        record,
        affinity=None,
        affinity_is_preferred=True,
        pending_milli=decided.allocation.cpu_milli,
        may_be_init=True,
    )
    state = state.with_pod(record)
    return Released(state=state, change=decided.change, updates=decided.updates)


def admit_pod(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    resolved: PlacementOptions | None = None,
) -> Decision:
    """Decide about a container that is being created, and about later containers of its pod."""
    machine, pods = node.machine, node.state.pods
    if pod.uid in pods and pods[pod.uid].pod_id != pod.id:
        node = node.with_state(with_sandbox(node.state, pod))
    decided = admit(node, pod, container, resolved=resolved)
    if isinstance(decided, Rejected) or not machine.settings.reservation_seconds:
        return decided
    is_named = _container_resources_annotation(machine, pod) is not None
    if not (is_named or decided.state.pods[pod.uid].pending_milli):
        return decided
    is_first_container = pod.uid not in pods or (
        pods[pod.uid].affinity is None
        and all(a.container == POD_RESERVATION_NAME for a in node.state.allocations_of_pod(pod.uid))
    )
    members = None
    if is_named:
        if not is_first_container:
            return decided
        members, problem = _expected_containers(machine, pod)
        if problem:
            decided = replace(decided, warnings=(*decided.warnings, problem))
    if members is None:
        outcome = _reserve_pod_sum(node, pod, decided, is_first_container=is_first_container)
    else:
        outcome = _reserve_expected_containers(node, pod, container, decided, members)
    if isinstance(outcome, Rejection):
        return Rejected(outcome, decided.trace, is_about_later_container=True)
    if outcome is decided.state:
        return decided
    desired = node.with_state(outcome)
    return replace(
        decided,
        state=outcome,
        change=pod_state_change(node.state, outcome, pod.uid, container.id),
        adjustment=build_adjustment(desired, decided.allocation, decided.adjustment.memory_policy),
        updates=updates_between(node, desired, skip=container.id),
        trace=replace(decided.trace, pool_after=desired.pool),
    )


def admit_by_releasing(
    node: NodeSnapshot, rejected: Rejected, failed_creations: Iterable[Allocation] = ()
) -> Decision:
    """Release allocations of failed creations and soft reservations of other pods.

    As few as possible, in this order, oldest first. The rejection is returned unchanged if all do
    not suffice.
    """
    pod, container = rejected.trace.pod, rejected.trace.container
    if rejected.reason.retry is not RetryCondition.ROOM:
        return rejected
    failed = [a for a in failed_creations if a.pod_uid != pod.uid]
    reservations = [*failed, *soft_reservations(node, but_uid=pod.uid)]
    decision = _admit_without(node, pod, container, reservations) if reservations else rejected
    if isinstance(decision, Rejected):
        return rejected
    lower, upper = 0, len(reservations)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        decided = _admit_without(node, pod, container, reservations[:middle])
        if isinstance(decided, Rejected):
            lower = middle
        else:
            upper, decision = middle, decided
    return decision


def _admit_without(
    node: NodeSnapshot, pod: PodSandbox, container: Container, released: Sequence[Allocation]
) -> Decision:
    """Decide about a container on the node without some reservations."""
    ids = tuple(a.container_id for a in released)
    decided = admit_pod(node.with_state(node.state.without_allocation(*ids)), pod, container)
    if isinstance(decided, Rejected):
        return decided
    desired, change, trace = node.with_state(decided.state), decided.change, decided.trace
    allocations = desired.state.allocations
    resized = [u.container_id for u in decided.updates]
    resized = [i for i in resized if shared_group_key(allocations[i]) is None]
    texts = [f"{reserved_text(a)} became free" for a in released]
    return replace(
        decided,
        released=tuple(released),
        change=ChangedStateIds(
            (*change.containers, *ids),
            tuple(dict.fromkeys((*change.pods, *(a.pod_uid for a in released)))),
        ),
        updates=updates_between(node, desired, skip=container.id, resized=resized),
        trace=replace(trace, decision_steps=(*texts, *trace.decision_steps), pool_before=node.pool),
    )


def admission_work(node: NodeSnapshot) -> int:
    """Units of work of one attempted admission; a unit takes up to a microsecond."""
    masks = 1 << min(EXACT_MERGE_MAX_NODES, len(node.machine.alignable_nodes))
    return _ADMISSION_WORK + node.machine.cpu_count + 2 * (len(node.state.allocations) + masks)


def count_expected_containers(machine: NodeModel, pod: PodSandbox) -> int:
    """Count the containers that are admitted with the first; 0 if the pod names none."""
    return len(_expected_containers(machine, pod)[0] or ())


def _container_resources_annotation(machine: NodeModel, pod: PodSandbox) -> str | None:
    return written_annotation(pod.annotations, machine.settings.prefix, CONTAINER_RESOURCES_KEY)


def _expected_containers(
    machine: NodeModel, pod: PodSandbox
) -> tuple[dict[str, ExpectedContainer] | None, str]:
    """Return the pod's containers by name, and the annotation's problem."""
    key = f"{machine.settings.prefix}/{CONTAINER_RESOURCES_KEY}"
    text = _container_resources_annotation(machine, pod)
    total = pod_cpu_request_milli(pod)
    if text is None or pod.qos is not QoSClass.GUARANTEED or total is None:
        return None, ""
    members = parse_expected_containers(text)
    if members is None:
        return None, (
            f"{CONTAINER_RESOURCES_KEY} is {quote_value(text)} (annotation {key}), expected "
            f"{_EXPECTED_CONTAINERS_TEXT}"
        )
    init = [c for c in members.values() if c.is_init]
    main = [c for c in members.values() if not c.is_init]
    milli = max([sum(c.milli for c in main), *(c.milli for c in init)])
    memory = max([sum(c.memory for c in main), *(c.memory for c in init)])
    total_memory = pod.resources.memory_limit or 0
    if milli > total or memory > total_memory:
        return None, (
            f"{CONTAINER_RESOURCES_KEY} has {human_milli(milli)} and {memory} bytes "
            f"(annotation {key}), expected no more than its pod, {human_milli(total)} and "
            f"{total_memory} bytes"
        )
    return members, ""


def _reserve_expected_containers(
    node: NodeSnapshot,
    pod: PodSandbox,
    newcomer: Container,
    decided: Admitted,
    members: Mapping[str, ExpectedContainer],
) -> NodeState | Rejection:
    """Place all later containers of the pod in their order, as if each were being created.

    For containers beyond `MAX_EXPECTED_WORK` the rest of the pod's sum is reserved.
    """
    base = node.with_state(without_pending_reservation(decided.state, pod.uid))
    entry = members.get(newcomer.name)
    is_init = entry is not None and entry.is_init
    plan = _with_container_ended(base, newcomer.id) if is_init else base
    count = MAX_EXPECTED_WORK // admission_work(node)
    other_members = {name: member for name, member in members.items() if name != newcomer.name}
    placed = dict(islice(other_members.items(), count))
    for name, member in placed.items():
        resources = _resources_of_guaranteed_limits(member.milli, member.memory)
        container = _pending_container(pod, resources, name)
        outcome = state_with_expected(plan, pod, container)
        if isinstance(outcome, Rejected):
            return replace(
                outcome.rejection,
                detail=f"its pod is admitted as a whole, and container {name} would be rejected: "
                f"{outcome.rejection.detail}",
            )
        plan = plan.with_state(outcome)
        if member.is_init:
            plan = _with_container_ended(plan, container.id)
    ids = [f"{pod.id}/{name}" for name in placed]
    for i in ids:
        plan = _with_container_ended(plan, i)
    allocations = plan.state.allocations
    remaining = (allocations[i] for i in ids if i in allocations)
    reservations = [replace(a, reason=PENDING_RESERVATION_CAPTION) for a in remaining]
    if is_init:
        # An init container uses CPUs of the reservation until it ends.
        outcome = restore_pod_reservation(base, reservations, decided.allocation)
    else:
        outcome = plan.state.without_allocation(*(a.container_id for a in reservations))
        outcome = with_pending_of(outcome.with_allocation(*reservations), base.state.pods[pod.uid])
    if len(placed) == len(other_members):
        return outcome
    return _reserve_pod_sum(node, pod, replace(decided, state=outcome), is_first_container=True)


def _with_container_ended(node: NodeSnapshot, container_id: str) -> NodeSnapshot:
    allocation = node.state.allocations.get(container_id)
    if allocation is None or allocation.reserved_at:
        return node
    return node.with_state(state_without_ended(node, allocation, node.now))


def _reserve_pod_sum(
    node: NodeSnapshot, pod: PodSandbox, decided: Admitted, *, is_first_container: bool
) -> NodeState | Rejection:
    """Reserve whole CPUs of the pod's sum for later containers that request them."""
    requested, record = decided.trace.requested, decided.state.pods[pod.uid]
    if requested is None or not record.has_pending_containers:
        return decided.state
    if not _can_reserve_pod_sum(node, decided.allocation, requested):
        return decided.state
    total = sum_in_force(record, pod)
    milli = entitled_milli(decided.state, pod.uid, total.cpu_milli)
    prior_count = sum(len(a.cpus) for a in decided.state.reservations_of(pod.uid))
    if not is_first_container and 1000 * prior_count >= milli:
        return decided.state
    state = without_pending_reservation(decided.state, pod.uid)
    members = state.allocations_of_pod(pod.uid)
    milli -= sum(1000 * len(a.cpus) for a in members if a.reserved_at)
    if milli <= 0:
        return state
    if requested.scope is Scope.CONTAINER:
        # The number of containers is unknown, and each is aligned by itself.
        requested = replace(requested, policy=Policy.BEST_EFFORT)
    memory = max(0, total.memory - sum(a.memory_bytes for a in members))
    container = _pending_container(pod, _resources_of_guaranteed_limits(milli, memory))
    base = node.with_state(state)
    decision = admit(base, pod, container, resolved=requested)
    if isinstance(decision, Admitted):
        if not decision.allocation.exclusive:
            return state
        after = decision.state.with_reservation(container.id, node.now, PENDING_RESERVATION_CAPTION)
        return with_pending_of(after, record)
    free_milli = sum(base.free_cpu_milli.values())
    if not is_first_container:
        return decided.state
    if free_milli >= milli or not decided.allocation.exclusive:
        return state  # later containers may request fractions, which need no exclusive CPUs
    return Rejection(
        reason=RejectionReason.NOT_ENOUGH_CPUS,
        detail="its pod is admitted as a whole, and its other containers need "
        f"{human_milli(milli)} together; free without this one: {human_milli(free_milli)}",
        rule="no container of a pod starts if another one would be rejected",
    )


def _can_reserve_pod_sum(
    node: NodeSnapshot, allocation: Allocation, requested: PlacementOptions
) -> bool:
    """True if later containers of a pod have the same placement options as this one."""
    is_placed = allocation.kind in COMPUTED_KINDS or allocation.mems
    if not is_placed or requested.numacpu is not None or requested.slots is not None:
        return False
    if any(
        requested.sources.get(key, DEFAULT_SOURCE).is_for_container for key in ("policy", "cpus")
    ):
        return False  # the options of the others are not known
    # Under the kubelet's rules fractions do not count, and their part is not known.
    return requested.scope is Scope.POD or not uses_kubelet_rules(node.machine, requested)


def _pending_container(
    pod: PodSandbox, resources: Resources, name: str = POD_RESERVATION_NAME
) -> Container:
    """Build a later container of a pod, or one that stands for all of them."""
    return Container(id=f"{pod.id}/{name}", pod_id=pod.id, name=name, resources=resources)
