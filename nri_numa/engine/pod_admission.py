"""A pod is admitted whole: its first container only where those that are still to come fit, too.

The kubelet gives every container of a pod its CPUs before it creates one. A runtime names them one
after another, so the others are known from elsewhere: by the annotation ``containers``, which the
scheduler extender writes with the binding, or else by the pod's sum, which the kubelet sends with
the sandbox and which does not say how many containers share it. What they need is kept for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
from nri_numa.engine.request.annotations import CONTAINERS_KEY, quote_value
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
from nri_numa.text import BadQuantity, milli_cpus, whole_bytes

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
    """Read an annotation by container; None where it is not of our form."""
    try:
        document = json.loads(text) if len(text) <= MAX_CONTAINERS_ANNOTATION_CHARS else None
        if not isinstance(document, dict) or len(document) > MAX_EXPECTED_CONTAINERS:
            return None
        found: dict[str, ExpectedContainer] = {}
        for name, one in document.items():
            if not isinstance(one, dict) or not one.keys() <= {"cpu", "memory", "ends"}:
                return None
            milli, memory = milli_cpus(one.get("cpu", 0)), whole_bytes(one.get("memory", 0))
            found[name] = ExpectedContainer(
                milli=milli, memory=memory, is_init=one.get("ends") is True
            )
    except (ValueError, BadQuantity, RecursionError):
        return None
    return found


def format_expected_containers(containers: Mapping[str, ExpectedContainer]) -> str:
    """The annotation's value; containers in the order in which they start."""
    document = {
        name: {"cpu": f"{one.milli}m", "memory": str(one.memory)}
        | ({"ends": True} if one.is_init else {})
        for name, one in containers.items()
    }
    return json.dumps(document, separators=(",", ":"))


def reserve_for_sandbox(node: NodeSnapshot, pod: PodSandbox) -> Released:
    """Keep the pod's sum of exclusive CPUs from its sandbox on, where all go to one place.

    Its devices are not known yet, so its first container decides about the place. What was
    reserved for a pod while it had another sandbox is this one's.
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
    all_of_it = _pending_containers(pod, pod.resources)
    requested = machine.options_resolver(pod, all_of_it)
    if isinstance(requested, Rejection) or requested.scope is not Scope.POD:
        return unchanged
    decided = admit(node.with_state(unchanged.state), pod, all_of_it, resolved=requested)
    if isinstance(decided, Rejected) or not decided.allocation.exclusive:
        return unchanged
    after = decided.state.with_reservation(all_of_it.id, node.now, PENDING_RESERVATION_CAPTION)
    record = after.pods[pod.uid]
    record = replace(
        record,
        affinity=None,
        affinity_is_preferred=True,
        pending_milli=decided.allocation.cpu_milli,
        may_be_init=True,
    )
    after = after.with_pod(record)
    return Released(state=after, change=decided.change, updates=decided.updates)


def admit_pod(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    resolved: PlacementOptions | None = None,
) -> Decision:
    """Decide about a container that is being created, and about those of its pod to come."""
    machine, pods = node.machine, node.state.pods
    if pod.uid in pods and pods[pod.uid].pod_id != pod.id:
        node = node.with_state(with_sandbox(node.state, pod))
    decided = admit(node, pod, container, resolved=resolved)
    if isinstance(decided, Rejected) or not machine.settings.reservation_seconds:
        return decided
    is_named = f"{machine.settings.prefix}/{CONTAINERS_KEY}" in pod.annotations
    if not (is_named or decided.state.pods[pod.uid].pending_milli):
        return decided
    is_first = pod.uid not in pods or (
        pods[pod.uid].affinity is None
        and all(a.container == POD_RESERVATION_NAME for a in node.state.allocations_of_pod(pod.uid))
    )
    expected = None
    if is_named:
        if not is_first:
            return decided
        expected, wrong = _expected_containers(machine, pod)
        if wrong:
            decided = replace(decided, warnings=(*decided.warnings, wrong))
    if expected is None:
        found = _reserve_pod_sum(node, pod, decided, is_first=is_first)
    else:
        found = _reserve_expected_containers(node, pod, container, decided, expected)
    if isinstance(found, Rejection):
        return Rejected(found, decided.trace, is_about_later_container=True)
    if found is decided.state:
        return decided
    after = node.with_state(found)
    return replace(
        decided,
        state=found,
        change=pod_state_change(node.state, found, pod.uid, container.id),
        adjustment=build_adjustment(after, decided.allocation, decided.adjustment.memory_policy),
        updates=updates_between(node, after, skip=container.id),
        trace=replace(decided.trace, pool_after=after.pool),
    )


def admit_by_releasing(node: NodeSnapshot, rejected: Rejected) -> Decision:
    """Have soft reservations of other pods give way to a container that was rejected.

    No more of them than it takes, oldest first. It is rejected as before where all would not do.
    """
    pod, container = rejected.trace.pod, rejected.trace.container
    if rejected.reason.retry is not RetryCondition.ROOM:
        return rejected
    soft = soft_reservations(node, but_uid=pod.uid)
    found = _admit_without(node, pod, container, soft) if soft else rejected
    if isinstance(found, Rejected):
        return rejected
    few, enough = 0, len(soft)
    while enough - few > 1:
        middle = (few + enough) // 2
        decided = _admit_without(node, pod, container, soft[:middle])
        if isinstance(decided, Rejected):
            few = middle
        else:
            enough, found = middle, decided
    return found


def _admit_without(
    node: NodeSnapshot, pod: PodSandbox, container: Container, released: Sequence[Allocation]
) -> Decision:
    """Decide about a container on the node without reservations that give way to it."""
    ids = tuple(a.container_id for a in released)
    decided = admit_pod(node.with_state(node.state.without_allocation(*ids)), pod, container)
    if isinstance(decided, Rejected):
        return decided
    after, change, trace = node.with_state(decided.state), decided.change, decided.trace
    allocations = after.state.allocations
    resized = [u.container_id for u in decided.updates]
    resized = [i for i in resized if shared_group_key(allocations[i]) is None]
    steps = [f"{reserved_text(a)} gave way" for a in released]
    return replace(
        decided,
        released=tuple(released),
        change=ChangedStateIds(
            (*change.containers, *ids),
            tuple(dict.fromkeys((*change.pods, *(a.pod_uid for a in released)))),
        ),
        updates=updates_between(node, after, skip=container.id, resized=resized),
        trace=replace(trace, decision_steps=(*steps, *trace.decision_steps), pool_before=node.pool),
    )


def admission_work(node: NodeSnapshot) -> int:
    """Units of work of one admission that is tried; a unit takes up to a microsecond."""
    masks = 1 << min(EXACT_MERGE_MAX_NODES, len(node.machine.alignable_nodes))
    return _ADMISSION_WORK + node.machine.cpu_count + 2 * (len(node.state.allocations) + masks)


def count_expected_containers(machine: NodeModel, pod: PodSandbox) -> int:
    """Count the containers that are admitted with the first; 0 where the pod names none."""
    return len(_expected_containers(machine, pod)[0] or ())


def _expected_containers(
    machine: NodeModel, pod: PodSandbox
) -> tuple[dict[str, ExpectedContainer] | None, str]:
    """The pod's containers by name; and what is wrong with the annotation."""
    key = f"{machine.settings.prefix}/{CONTAINERS_KEY}"
    text = pod.annotations.get(key)
    total = pod_cpu_request_milli(pod)
    if text is None or pod.qos is not QoSClass.GUARANTEED or total is None:
        return None, ""
    expected = parse_expected_containers(text)
    if expected is None:
        return (
            None,
            f"{CONTAINERS_KEY} is {quote_value(text)} (annotation {key}), expected "
            f"{_EXPECTED_CONTAINERS_TEXT}",
        )
    init = [c for c in expected.values() if c.is_init]
    main = [c for c in expected.values() if not c.is_init]
    milli = max([sum(c.milli for c in main), *(c.milli for c in init)])
    memory = max([sum(c.memory for c in main), *(c.memory for c in init)])
    total_memory = pod.resources.memory_limit or 0
    if milli > total or memory > total_memory:
        return None, (
            f"{CONTAINERS_KEY} has {human_milli(milli)} and {memory} bytes (annotation {key}), "
            f"expected no more than its pod, {human_milli(total)} and {total_memory} bytes"
        )
    return expected, ""


def _reserve_expected_containers(
    node: NodeSnapshot,
    pod: PodSandbox,
    first: Container,
    decided: Admitted,
    expected: Mapping[str, ExpectedContainer],
) -> NodeState | Rejection:
    """Place all others of the pod in their order, as if each were being created.

    For those that are more work than `MAX_EXPECTED_WORK` what is left of the pod's sum is kept.
    """
    base = node.with_state(without_pending_reservation(decided.state, pod.uid))
    own = expected.get(first.name)
    ends = own is not None and own.is_init
    plan = _with_container_ended(base, first.id) if ends else base
    count = MAX_EXPECTED_WORK // admission_work(node)
    others = {name: one for name, one in expected.items() if name != first.name}
    placed = dict(islice(others.items(), count))
    for name, one in placed.items():
        resources = _resources_of_guaranteed_limits(one.milli, one.memory)
        made = Container(id=f"{pod.id}/{name}", pod_id=pod.id, name=name, resources=resources)
        found = state_with_expected(plan, pod, made)
        if isinstance(found, Rejected):
            return replace(
                found.rejection,
                detail=f"its pod is admitted whole, and container {name} would be refused: "
                f"{found.rejection.detail}",
            )
        plan = plan.with_state(found)
        if one.is_init:
            plan = _with_container_ended(plan, made.id)
    ids = [f"{pod.id}/{name}" for name in placed]
    for i in ids:
        plan = _with_container_ended(plan, i)
    allocations = plan.state.allocations
    left = (allocations[i] for i in ids if i in allocations)
    kept = [replace(a, reason=PENDING_RESERVATION_CAPTION) for a in left]
    if ends:
        # What it has until it ends is no more than theirs that come after it.
        found = restore_pod_reservation(base, kept, decided.allocation)
    else:
        found = plan.state.without_allocation(*(a.container_id for a in kept))
        found = with_pending_of(found.with_allocation(*kept), base.state.pods[pod.uid])
    if len(placed) == len(others):
        return found
    return _reserve_pod_sum(node, pod, replace(decided, state=found), is_first=True)


def _with_container_ended(node: NodeSnapshot, container_id: str) -> NodeSnapshot:
    allocation = node.state.allocations.get(container_id)
    if allocation is None or allocation.reserved_at:
        return node
    return node.with_state(state_without_ended(node, allocation, node.now))


def _reserve_pod_sum(
    node: NodeSnapshot, pod: PodSandbox, decided: Admitted, *, is_first: bool
) -> NodeState | Rejection:
    """Keep whole CPUs of the pod's sum for others, if they are asked for and still to come."""
    requested, record = decided.trace.requested, decided.state.pods[pod.uid]
    if requested is None or not record.has_pending_containers:
        return decided.state
    if not _can_reserve_pod_sum(node, decided.allocation, requested):
        return decided.state
    total = sum_in_force(record, pod)
    milli = entitled_milli(decided.state, pod.uid, total.cpu_milli)
    had = sum(len(a.cpus) for a in decided.state.reservations_of(pod.uid))
    if not is_first and 1000 * had >= milli:
        return decided.state
    state = without_pending_reservation(decided.state, pod.uid)
    members = state.allocations_of_pod(pod.uid)
    milli -= sum(1000 * len(a.cpus) for a in members if a.reserved_at)
    if milli <= 0:
        return state
    if requested.scope is Scope.CONTAINER:
        # How many containers share it, and each has its own place: any place will do.
        requested = replace(requested, policy=Policy.BEST_EFFORT)
    memory = max(0, total.memory - sum(a.memory_bytes for a in members))
    container = _pending_containers(pod, _resources_of_guaranteed_limits(milli, memory))
    rest = node.with_state(state)
    decision = admit(rest, pod, container, resolved=requested)
    if isinstance(decision, Admitted):
        if not decision.allocation.exclusive:
            return state
        after = decision.state.with_reservation(container.id, node.now, PENDING_RESERVATION_CAPTION)
        return with_pending_of(after, record)
    left = sum(rest.free_cpu_milli.values())
    if not is_first:
        return decided.state
    if left >= milli or not decided.allocation.exclusive:
        return state  # fractions, perhaps, which need no CPUs of their own
    return Rejection(
        reason=RejectionReason.NOT_ENOUGH_CPUS,
        detail="its pod is admitted whole, and its other "
        "containers need "
        f"{human_milli(milli)} together; free beside it: {human_milli(left)}",
        rule="no container of a pod starts where another would be refused",
    )


def _can_reserve_pod_sum(
    node: NodeSnapshot, allocation: Allocation, requested: PlacementOptions
) -> bool:
    """True if others of a pod ask for what this container of it asks for."""
    is_placed = allocation.kind in COMPUTED_KINDS or allocation.mems
    if not is_placed or requested.numacpu is not None or requested.slots is not None:
        return False
    if any(
        requested.sources.get(key, DEFAULT_SOURCE).is_for_container for key in ("policy", "cpus")
    ):
        return False  # what the others ask for is not known
    # Under the kubelet's rules nor is how much of it is fractions, which do not count.
    return requested.scope is Scope.POD or not uses_kubelet_rules(node.machine, requested)


def _pending_containers(pod: PodSandbox, resources: Resources) -> Container:
    """All containers of a pod that are still to come, as one."""
    name = POD_RESERVATION_NAME
    return Container(id=f"{pod.id}/{name}", pod_id=pod.id, name=name, resources=resources)
