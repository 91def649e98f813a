"""A pod is admitted whole: its first container only where those that are still to come fit, too.

The kubelet gives every container of a pod its CPUs before it creates one. A runtime names them one
after another, so the others are known from elsewhere: by the annotation ``containers``, which the
scheduler extender writes with the binding, or else by the pod's sum, which the kubelet sends with
the sandbox and which does not say how many containers share it. What they need is kept for them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from nri_numa.engine.captions import PENDING_RESERVATION_CAPTION
from nri_numa.engine.decision import Admitted, Decision, Rejected, Released
from nri_numa.engine.desired import NodeSnapshot, updates_between
from nri_numa.engine.node_model import NodeModel, uses_kubelet_rules
from nri_numa.engine.pod_reservation import restore_pod_reservation, without_pending_reservation
from nri_numa.engine.request.annotations import CONTAINERS_KEY, quote_value
from nri_numa.engine.request.demand import (
    DEFAULT_CFS_PERIOD_US,
    SHARES_PER_CPU,
    pod_cpu_request_milli,
)
from nri_numa.engine.state import POD_RESERVATION_NAME, NodeState
from nri_numa.model.machine import human_milli
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import (
    DEFAULT_SOURCE,
    Container,
    PlacementOptions,
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


def resources_of_guaranteed_limits(milli: int, memory: int) -> Resources:
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

    Its devices are not known yet, so its first container decides about the place.
    """
    machine, state = node.machine, node.state
    all_of_it = _pending_containers(pod, pod.resources)
    if not machine.settings.reservation_seconds or pod.uid in state.pods:
        return Released(state=state)
    requested = machine.options_resolver(pod, all_of_it)
    if isinstance(requested, Rejection) or requested.scope is not Scope.POD:
        return Released(state=state)
    decided = admit(node, pod, all_of_it, resolved=requested)
    if isinstance(decided, Rejected) or not decided.allocation.exclusive:
        return Released(state=state)
    after = decided.state.with_reservation(all_of_it.id, node.now, PENDING_RESERVATION_CAPTION)
    after = after.with_pod(replace(after.pods[pod.uid], affinity=None, affinity_is_preferred=True))
    return Released(state=after, change=decided.change, updates=decided.updates)


def admit_pod(
    node: NodeSnapshot,
    pod: PodSandbox,
    container: Container,
    resolved: PlacementOptions | None = None,
) -> Decision:
    """Decide about a container that is being created, and with the first one about its pod."""
    machine, state = node.machine, node.state
    decided = admit(node, pod, container, resolved=resolved)
    if isinstance(decided, Rejected) or not machine.settings.reservation_seconds:
        return decided
    record = state.pods.get(pod.uid)
    is_placed = record is not None and record.affinity is not None
    others = state.allocations_of_pod(pod.uid)
    if is_placed or any(a.container != POD_RESERVATION_NAME for a in others):
        return decided
    expected, wrong = _expected_containers(machine, pod)
    if wrong:
        decided = replace(decided, warnings=(*decided.warnings, wrong))
    if expected is None:
        found = _reserve_pod_sum(node, pod, decided)
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
        change=pod_state_change(state, found, pod.uid, container.id),
        adjustment=build_adjustment(after, decided.allocation, decided.adjustment.memory_policy),
        updates=updates_between(node, after, skip=container.id),
        trace=replace(decided.trace, pool_after=after.pool),
    )


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
    """Place all others of the pod in their order, as if each were being created."""
    base = node.with_state(without_pending_reservation(decided.state, pod.uid))
    own = expected.get(first.name)
    ends = own is not None and own.is_init
    plan = _with_ended(base, first.id) if ends else base
    for name, one in expected.items():
        if name == first.name:
            continue
        resources = resources_of_guaranteed_limits(one.milli, one.memory)
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
            plan = _with_ended(plan, made.id)
    ids = [f"{pod.id}/{name}" for name in expected if name != first.name]
    for i in ids:
        plan = _with_ended(plan, i)
    allocations = plan.state.allocations
    left = (allocations[i] for i in ids if i in allocations)
    kept = [replace(a, reason=PENDING_RESERVATION_CAPTION) for a in left]
    if ends:
        # What it has until it ends is no more than theirs that come after it.
        return restore_pod_reservation(base, kept, decided.allocation)
    without_them = plan.state.without_allocation(*(a.container_id for a in kept))
    return without_them.with_allocation(*kept)


def _with_ended(node: NodeSnapshot, container_id: str) -> NodeSnapshot:
    allocation = node.state.allocations.get(container_id)
    if allocation is None or allocation.reserved_at:
        return node
    return node.with_state(state_without_ended(node, allocation, node.now))


def _reserve_pod_sum(
    node: NodeSnapshot, pod: PodSandbox, decided: Admitted
) -> NodeState | Rejection:
    """Keep what the pod's sum leaves for others, if it leaves whole CPUs and they are asked for."""
    state, requested = decided.state, decided.trace.requested
    total, memory = pod_cpu_request_milli(pod), pod.resources.memory_limit or 0
    if not decided.allocation.exclusive or requested is None or requested.slots is not None:
        return state
    if total is None or requested.numacpu is not None or pod.qos is not QoSClass.GUARANTEED:
        return state
    if any(
        requested.sources.get(key, DEFAULT_SOURCE).is_for_container for key in ("policy", "cpus")
    ):
        return state  # what the others ask for is not known
    if requested.scope is Scope.CONTAINER and uses_kubelet_rules(node.machine, requested):
        return state  # nor how much of it is fractions, which do not count
    state = without_pending_reservation(state, pod.uid)
    milli = (total - decided.allocation.cpu_milli) // 1000 * 1000
    if milli <= 0:
        return state
    if requested.scope is Scope.CONTAINER:
        # How many containers share it, and each has its own place: any place will do.
        requested = replace(requested, policy=Policy.BEST_EFFORT)
    resources = resources_of_guaranteed_limits(
        milli, max(0, memory - decided.allocation.memory_bytes)
    )
    container = _pending_containers(pod, resources)
    rest = node.with_state(state)
    decision = admit(rest, pod, container, resolved=requested)
    if isinstance(decision, Admitted):
        if not decision.allocation.exclusive:
            return state
        return decision.state.with_reservation(container.id, node.now, PENDING_RESERVATION_CAPTION)
    left = sum(rest.free_cpu_milli.values())
    if left >= milli:
        return state  # fractions, perhaps, which need no CPUs of their own
    return Rejection(
        reason=RejectionReason.NOT_ENOUGH_CPUS,
        detail="its pod is admitted whole, and its other "
        "containers need "
        f"{human_milli(milli)} together; free beside it: {human_milli(left)}",
        rule="no container of a pod starts where another would be refused",
    )


def _pending_containers(pod: PodSandbox, resources: Resources) -> Container:
    """All containers of a pod that are still to come, as one."""
    name = POD_RESERVATION_NAME
    return Container(id=f"{pod.id}/{name}", pod_id=pod.id, name=name, resources=resources)
