"""What-if: pods placed one after another on a machine, by the engine that does it for real.

A `Simulator` stands where the agent and the runtime stand: it keeps the node state and what each
container was given, and calls `decide.admit`, `resize` and `decide.release` in the order in which a
kubelet would. Nothing is read, nothing is written.

Where this is simpler than life: the machine starts empty; init containers end at once, everything
else runs for ever; and a pod with a refused container gives everything back, as if it had been
deleted, where a kubelet would keep its other containers and try again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from nri_numa.cluster.manifests import ManifestError
from nri_numa.cluster.pods import (
    ContainerManifest,
    ContainerRole,
    PodManifest,
    Workload,
    container_id,
    container_of,
    pod_sandbox,
)
from nri_numa.engine import admit
from nri_numa.engine.decision import Admitted, DecisionTrace, Rejected
from nri_numa.engine.desired import NodeSnapshot, updates_between
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.pod_admission import (
    admit_by_releasing,
    admit_pod,
    reserve_for_sandbox,
)
from nri_numa.engine.pod_reservation import expired_reservations
from nri_numa.engine.rebalance import (
    MAX_DEFERRED_SEARCH_WORK,
    admit_by_moving,
    continued_move_search,
    state_after_migration,
)
from nri_numa.engine.resize import resize_container
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.model.workload import Container, ContainerUpdate, Resources
from nri_numa.simulate.devices import (
    DEVICE_REJECTION_REASON,
    DeviceInventory,
    DevicesByResource,
    KubeletDevices,
)

FIRST_UNIX_TIME_S: Final = 1.0
"""Unix time of the first pod; 0 would mean that nothing ended."""


class PodAction(StrEnum):
    """What happens to a pod."""

    CREATE = "create"
    RESIZE = "resize"
    REMOVE = "remove"


class PlannedAction(msgspec.Struct, frozen=True, kw_only=True):
    """One pod and what is to happen to it."""

    action: PodAction
    pod: PodManifest


class SimulatedOutcome(StrEnum):
    """How one container fared."""

    PLACED = "placed"
    MISALIGNED = "widened"
    SHORTFALL = "less"
    """It could not grow in place and keeps less than its new size."""
    UNPINNED = "unpinned"
    """It starts untouched, because what it needs cannot be had."""
    UNTOUCHED = "untouched"
    """Nothing was requested for it."""
    REJECTED = "refused"


class ContainerOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One container and what it got.

    CPUs and memory nodes are kernel lists at that moment, empty for an untouched container, and
    CPUs before a resize. There is no allocation of a refused one; the reason is the refusal's then.
    Warnings say what is probably not meant, one clause each.
    """

    container: str
    role: ContainerRole
    verdict: SimulatedOutcome
    cpus: str = ""
    mems: str = ""
    previous_cpus: str = ""
    allocation: Allocation | None = None
    reason: str = ""
    message: str = ""
    devices: DevicesByResource = msgspec.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    trace: DecisionTrace


class SimulatedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one pod.

    Attributes:
        changed_cpus: other containers whose CPUs changed with it, ``namespace/pod/container`` to
        list.
    """

    number: int
    action: PodAction
    pod: PodManifest
    outcomes: tuple[ContainerOutcome, ...] = ()
    changed_cpus: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def first_rejected_container(self) -> ContainerOutcome | None:
        """The first container that was refused."""
        return next((o for o in self.outcomes if o.verdict is SimulatedOutcome.REJECTED), None)


class NUMANodeFill(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How full one NUMA node is, as its document says it; ``cpus`` are those it has."""

    cpus: int
    exclusive: int
    idle_siblings: int = msgspec.field(name="idle")
    cpu_total_milli: int
    cpu_allocated_milli: int = msgspec.field(name="cpuBoundMilli")
    cpu_free_milli: int = msgspec.field(name="cpuLeftMilli")
    memory_bytes: int
    memory_allocated_bytes: int = msgspec.field(name="memoryBoundBytes")
    memory_free_bytes: int = msgspec.field(name="memoryLeftBytes")


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happened.

    Attributes:
        initial_fill, final_fill: how full each NUMA node is.
        running_containers: containers as they stand at the end with their CPUs, in the order of
        creation.
        skipped_pods: pods that were left after the first refusal.
    """

    machine: NodeModel
    initial_fill: Mapping[int, NUMANodeFill]
    final_fill: Mapping[int, NUMANodeFill]
    events: tuple[SimulatedEvent, ...]
    running_containers: tuple[tuple[Allocation, str], ...]
    skipped_pods: int = 0

    @property
    def first_refused(self) -> SimulatedEvent | None:
        """The first event with a refused container."""
        return next((e for e in self.events if e.first_rejected_container is not None), None)

    @property
    def count_by_outcome(self) -> Mapping[SimulatedOutcome, int]:
        """Containers by how they fared, init containers included."""
        counted = dict.fromkeys(SimulatedOutcome, 0)
        for event in self.events:
            for outcome in event.outcomes:
                counted[outcome.verdict] += 1
        return counted


# --- planning -------------------------------------------------------------------------------------


_POD_CHANGE_FIELDS: Final = (
    "containers",
    "annotations",
    "pod_requests",
    "pod_limits",
    "runtime_handler",
)
"""What makes another pod of a pod of the same name."""


def plan_actions(workloads: Iterable[Workload]) -> tuple[PlannedAction, ...]:
    """Work out what each document does to which pods.

    A later document of the same kind, namespace and name is a change: pods it has more of are
    created, pods it has less of are removed, and the others are resized in place where their
    resources differ.

    Raises:
        ManifestError: with everything that Kubernetes would not change in place.
    """
    problems: list[str] = []
    planned: list[PlannedAction] = []
    latest: dict[tuple[str, str, str], dict[str, PodManifest]] = {}
    owners: dict[str, Workload] = {}
    for workload in workloads:
        had = latest.get(workload.identity_key, {})
        has = {pod.name: pod for pod in workload.pods}
        latest[workload.identity_key] = has
        planned += [
            PlannedAction(action=PodAction.REMOVE, pod=had[name])
            for name in reversed(had)
            if name not in has
        ]
        for name, pod in has.items():
            owner = owners.setdefault(pod.full_name, workload)
            if owner.identity_key != workload.identity_key:
                problems.append(
                    f"{workload.source}: pod {pod.full_name} is made by {owner.source} already"
                )
            elif name not in had:
                planned.append(PlannedAction(action=PodAction.CREATE, pod=pod))
            elif any(getattr(had[name], key) != getattr(pod, key) for key in _POD_CHANGE_FIELDS):
                problems += [
                    f"{workload.source}: {why}" for why in _resize_obstacles(had[name], pod)
                ]
                planned.append(PlannedAction(action=PodAction.RESIZE, pod=pod))
    if problems:
        raise ManifestError(tuple(dict.fromkeys(problems)))
    return tuple(planned)


def _resize_obstacles(before: PodManifest, after: PodManifest) -> list[str]:
    """Why Kubernetes would not change the one into the other in place."""
    head = f"is a change of {before.source}, and"
    names = [(c.name, c.role) for c in before.containers]
    if names != [(c.name, c.role) for c in after.containers]:
        return [f"{head} containers cannot be added or removed in place; expected another name"]
    found = []
    if before.annotations != after.annotations:
        found.append(f"{head} annotations are read at creation only; expected the same ones")
    if before.runtime_handler != after.runtime_handler:
        found.append(f"{head} the runtime class cannot be changed; expected the same one")
    if before.qos is not after.qos:
        found.append(
            f"{head} the QoS class cannot change from {before.qos} to {after.qos} in place"
        )
    for old, new in zip(before.containers, after.containers, strict=True):
        found += [
            f"{head} container {new.name}: {text}" for text in _container_resize_obstacles(old, new)
        ]
    return found


def _container_resize_obstacles(old: ContainerManifest, new: ContainerManifest) -> list[str]:
    found = []
    if old.role is ContainerRole.INIT and old != new:
        found.append("an init container cannot be resized")
    if old.limits.hugepages != new.limits.hugepages:
        found.append("huge pages cannot be resized")
    if (old.devices, old.slots) != (new.devices, new.slots):
        found.append("extended resources cannot be resized")
    for label in ("requests", "limits"):
        a, b = getattr(old, label), getattr(new, label)
        for name, had, has in (("cpu", a.cpu_milli, b.cpu_milli), ("memory", a.memory, b.memory)):
            if had is not None and has is None:
                found.append(f"{name} {label} cannot be taken away")
    return found


# --- running --------------------------------------------------------------------------------------


def simulate_plan(
    machine: NodeModel,
    planned: Sequence[PlannedAction],
    *,
    reading: MeasuredFree | None = None,
    keep_going: bool = False,
    inventory: DeviceInventory | None = None,
) -> Simulation:
    """Run a plan on an empty machine, and go on after a refusal only with ``keep_going``.

    Without a reading of what the kernel has left all memory counts as free. The inventory is that
    of the plan's manifests.
    """
    simulator = _Simulator(machine, reading, inventory)
    before = simulator.numa_node_fill()
    events: list[SimulatedEvent] = []
    for number, step in enumerate(planned, 1):
        events.append(simulator.run_action(number, step))
        if events[-1].first_rejected_container is not None and not keep_going:
            break
    return Simulation(
        machine=machine,
        initial_fill=before,
        final_fill=simulator.numa_node_fill(),
        events=tuple(events),
        running_containers=simulator.running_containers(),
        skipped_pods=len(planned) - len(events),
    )


class _Simulator:
    """A node in memory, with the node state as the agent would have it."""

    def __init__(
        self, machine: NodeModel, reading: MeasuredFree | None, inventory: DeviceInventory | None
    ) -> None:
        self.state = NodeState()
        self._machine = machine
        self._reading = reading
        self._now = FIRST_UNIX_TIME_S
        self._live: dict[str, Container] = {}
        self._devices = KubeletDevices(inventory or {}, machine.alignable_nodes)

    def run_action(self, number: int, planned: PlannedAction) -> SimulatedEvent:
        """Do one thing to one pod."""
        pod, action = planned.pod, planned.action
        before = self.state
        outcomes: list[ContainerOutcome] = []
        if action is PodAction.REMOVE:
            self._remove_pod(pod)
        else:
            outcomes = (
                self._create_pod(pod) if action is PodAction.CREATE else self._resize_pod(pod)
            )
        updates = updates_between(
            NodeSnapshot(self._machine, before), NodeSnapshot(self._machine, self.state)
        )
        had = self._cpus_by_container(before, (one.container_id for one in updates))
        # A sidecar makes room for the containers of its own pod that start later.
        had |= {
            container_id(pod, outcome.container): outcome.cpus
            for outcome in outcomes
            if outcome.allocation is not None  # a refusal has none, and changes nothing
        }
        moved = {
            self.state.allocations[i].full_name: cpus or "any"
            for i, cpus in self._cpus_by_container(self.state, had).items()
            if had[i] != cpus
        }
        return SimulatedEvent(
            number=number, action=action, pod=pod, outcomes=tuple(outcomes), changed_cpus=moved
        )

    def numa_node_fill(self) -> dict[int, NUMANodeFill]:
        """How full each NUMA node is."""
        machine, state = self._machine, self.state
        node = self._snapshot()
        cpu_left, memory_left = node.free_cpu_milli, node.free_memory
        return {
            i: NUMANodeFill(
                cpus=len(numa_node.cpus & machine.topology.allowed),
                exclusive=len(numa_node.cpus & state.exclusive),
                idle_siblings=len(numa_node.cpus & state.idle_siblings),
                cpu_total_milli=machine.cpu_capacity_milli.get(i, 0),
                cpu_allocated_milli=state.allocated_on(i).cpu_milli,
                cpu_free_milli=cpu_left.get(i, 0),
                memory_bytes=numa_node.memory_bytes,
                memory_allocated_bytes=state.allocated_on(i).memory,
                memory_free_bytes=memory_left.get(i, 0),
            )
            for i, numa_node in sorted(machine.topology.numa_nodes.items())
        }

    def _snapshot(self) -> NodeSnapshot:
        return NodeSnapshot(self._machine, self.state, self._reading, self._now)

    def running_containers(self) -> tuple[tuple[Allocation, str], ...]:
        """What every container has now, in the order of creation."""
        cpus = self._cpus_by_container(self.state, self._live)
        return tuple((self.state.allocations[i], cpus[i]) for i in self._live)

    # --- one pod ----------------------------------------------------------------------------------

    def _create_pod(self, pod: PodManifest) -> list[ContainerOutcome]:
        sandbox = pod_sandbox(pod)
        outcomes: list[ContainerOutcome] = []
        too_few = self._devices.allocate_pod_or_find_shortage(pod)
        reading, free = self._reading, self._devices.total_free_by_numa_node()
        if free:
            reading = replace(reading or MeasuredFree(), devices=free)
        machine = self._machine
        if too_few is None:
            self.state = reserve_for_sandbox(self._snapshot(), sandbox).state
        for manifest in pod.containers:
            made = container_of(
                pod, manifest, machine.total_memory_bytes, machine.slots_annotation_key
            )
            if too_few is not None:
                if manifest.name != too_few.container:
                    continue  # none of them is made
                rule = "the kubelet gives devices before it asks"
                trace = DecisionTrace(pod=sandbox, container=made, rule=rule)
                outcomes.append(
                    _rejected_outcome(manifest, DEVICE_REJECTION_REASON, too_few.message, trace)
                )
                self._remove_pod(pod)
                break
            given = self._devices.devices_of(pod, manifest.name)
            made = self._devices.known_devices_of_container(pod, manifest.name).apply_to(made)
            node = NodeSnapshot(machine, self.state, reading, self._now)
            decision = admit_pod(node, sandbox, made)
            if isinstance(decision, Rejected):
                decision = admit_by_releasing(node, decision)
            if isinstance(decision, Rejected):
                decision = _admit_by_moving(node, decision)
            if isinstance(decision, Rejected):
                refusal = _rejected_outcome(
                    manifest, decision.reason, decision.message, decision.trace
                )
                outcomes.append(replace(refusal, devices=given))
                self._remove_pod(pod)
                break
            self.state = state_after_migration(decision)
            self._live[made.id] = _with_adjustment(made, decision)
            outcome = self._container_outcome(manifest, made.id, decision.trace)
            outcomes.append(replace(outcome, devices=given, warnings=decision.warnings))
            if manifest.role is ContainerRole.INIT:
                self._release_container(made.id, self._now)
        # All that the pod waits for has come by the time the next one does.
        self._now += machine.settings.reservation_seconds
        node = self._snapshot()
        self.state = admit.release_reservations(node, expired_reservations(node)).state
        return outcomes

    def _resize_pod(self, pod: PodManifest) -> list[ContainerOutcome]:
        sandbox = pod_sandbox(pod)
        outcomes: list[ContainerOutcome] = []
        for manifest in pod.containers:
            made = container_of(pod, manifest, self._machine.total_memory_bytes)
            live = self._live.get(made.id)
            if live is None:
                continue  # an init container, or one of a pod that was refused
            requested = replace(made.resources, hugepages={})
            before = self._cpus_by_container(self.state, [made.id])[made.id]
            found = resize_container(self._snapshot(), sandbox, live, requested)
            if isinstance(found, Rejected):
                refusal = _rejected_outcome(manifest, found.reason, found.message, found.trace)
                outcomes.append(replace(refusal, previous_cpus=before))
                break
            self.state = found.state
            # Our override is on top.
            changed = {
                **_nonempty_resource_fields(requested),
                **_nonempty_resource_fields(found.container_update),
            }
            self._live[made.id] = replace(live, resources=replace(live.resources, **changed))
            outcomes.append(
                replace(
                    self._container_outcome(manifest, made.id, found.trace), previous_cpus=before
                )
            )
        return outcomes

    def _remove_pod(self, pod: PodManifest) -> None:
        for manifest in reversed(pod.containers):
            self._release_container(container_id(pod, manifest.name))
        self.state = admit.forget_pod(self._snapshot(), pod.uid).state
        self._devices.release_pod_devices(pod)

    def _release_container(self, id: str, ended: float | None = None) -> None:
        self._live.pop(id, None)
        self.state = admit.release_container(self._snapshot(), id, ended).state

    def _container_outcome(
        self, manifest: ContainerManifest, id: str, trace: DecisionTrace
    ) -> ContainerOutcome:
        allocation = self.state.allocations[id]
        if not allocation.is_pinned:
            verdict = (
                SimulatedOutcome.UNTOUCHED if allocation.aligned else SimulatedOutcome.UNPINNED
            )
        elif allocation.has_shortfall:
            verdict = SimulatedOutcome.SHORTFALL
        else:
            verdict = SimulatedOutcome.PLACED if allocation.aligned else SimulatedOutcome.MISALIGNED
        return ContainerOutcome(
            container=manifest.name,
            role=manifest.role,
            verdict=verdict,
            cpus=self._cpus_by_container(self.state, [id])[id],
            mems=str(allocation.mems),
            allocation=allocation,
            reason=allocation.reason,
            trace=trace,
        )

    def _cpus_by_container(self, state: NodeState, ids: Iterable[str]) -> dict[str, str]:
        """What containers have in a state, of those that are in it."""
        desired = NodeSnapshot(self._machine, state)
        return {
            i: str(desired.cpuset_of(state.allocations[i])) for i in ids if i in state.allocations
        }


def _rejected_outcome(
    manifest: ContainerManifest, reason: str, message: str, trace: DecisionTrace
) -> ContainerOutcome:
    return ContainerOutcome(
        container=manifest.name,
        role=manifest.role,
        verdict=SimulatedOutcome.REJECTED,
        reason=reason,
        message=message,
        trace=trace,
    )


def _with_adjustment(made: Container, decision: Admitted) -> Container:
    """The container as the runtime keeps it after our answer."""
    adjustment = decision.adjustment
    changed = {"cpus": adjustment.cpus, "mems": adjustment.mems, "cpu_quota": adjustment.quota}
    return replace(
        made,
        annotations={**made.annotations, **adjustment.annotations},
        resources=replace(made.resources, **{k: v for k, v in changed.items() if v}),
    )


def _nonempty_resource_fields(change: Resources | ContainerUpdate | None) -> dict[str, Any]:
    """What a change says of resources; it leaves the others as they are."""
    names = ("cpus", "mems", "cpu_quota", "cpu_period", "cpu_shares", "memory_limit")
    return {name: value for name in names if (value := getattr(change, name, None))}


def _admit_by_moving(node: NodeSnapshot, refused: Rejected) -> Admitted | Rejected:
    """As the agent has it; where a search goes on after its answer, as at the next try."""
    found = admit_by_moving(node, refused)
    if isinstance(found, Admitted) or not found.is_search_spent:
        return found
    search = continued_move_search(node, refused, is_deferred=False)
    return search.run_steps(MAX_DEFERRED_SEARCH_WORK) or found
