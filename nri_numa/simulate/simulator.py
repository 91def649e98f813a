"""Simulation: pods are placed one after another on a machine, by the engine of the agent.

A `_Simulator` takes the part of agent and runtime: it holds the node state and the resources of
each container, and calls the engine in the order in which a kubelet would. It does no I/O.

Simplifications: the machine starts empty. Init containers end at once, and other containers run
without limit. A pod with a rejected container is removed; a kubelet would keep its other containers
and retry.
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
"""Unix time of the first pod; 0 would mean that no container has ended."""


class PodAction(StrEnum):
    """Action on a pod."""

    CREATE = "create"
    RESIZE = "resize"
    REMOVE = "remove"


class PlannedAction(msgspec.Struct, frozen=True, kw_only=True):
    """One pod and the action planned for it."""

    action: PodAction
    pod: PodManifest


class SimulatedOutcome(StrEnum):
    """Outcome of one container."""

    PLACED = "placed"
    MISALIGNED = "misaligned"
    SHORTFALL = "shortfall"
    """It could not grow in place and has less than its new size."""
    UNPINNED = "unpinned"
    """It starts without a pin, because its demand does not fit."""
    UNTOUCHED = "untouched"
    """Nothing was requested for it."""
    REJECTED = "rejected"


class ContainerOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One container and its assignment.

    CPUs (also those before a resize) and memory nodes are kernel lists at that moment, empty for an
    untouched container. A rejected container has no allocation, and the reason of its rejection.
    Each warning is one clause about a setting that is probably not intended.
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
    """Result of one action on a pod.

    Attributes:
        changed_cpus: CPU lists of other containers whose CPUs changed, by
        ``namespace/pod/container``.
    """

    number: int
    action: PodAction
    pod: PodManifest
    outcomes: tuple[ContainerOutcome, ...] = ()
    changed_cpus: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def first_rejected_container(self) -> ContainerOutcome | None:
        """The first rejected container; None without one."""
        return next((o for o in self.outcomes if o.verdict is SimulatedOutcome.REJECTED), None)


class NUMANodeFill(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Capacity, allocated and free amounts of one NUMA node, in the form of its document."""

    cpus: int
    exclusive: int
    idle_siblings: int
    cpu_total_milli: int
    cpu_allocated_milli: int
    cpu_free_milli: int
    memory_bytes: int
    memory_allocated_bytes: int
    memory_free_bytes: int


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a simulated plan.

    Attributes:
        initial_fill, final_fill: amounts by NUMA node.
        running_containers: containers at the end with their CPUs, in the order of creation.
        skipped_pods: number of actions that were not run after the first rejection.
    """

    machine: NodeModel
    initial_fill: Mapping[int, NUMANodeFill]
    final_fill: Mapping[int, NUMANodeFill]
    events: tuple[SimulatedEvent, ...]
    running_containers: tuple[tuple[Allocation, str], ...]
    skipped_pods: int = 0

    @property
    def first_rejected(self) -> SimulatedEvent | None:
        """The first event with a rejected container; None without one."""
        return next((e for e in self.events if e.first_rejected_container is not None), None)

    @property
    def count_by_outcome(self) -> Mapping[SimulatedOutcome, int]:
        """Number of containers by outcome, init containers included."""
        counts = dict.fromkeys(SimulatedOutcome, 0)
        for event in self.events:
            for outcome in event.outcomes:
                counts[outcome.verdict] += 1
        return counts


# --- planning -------------------------------------------------------------------------------------


_POD_CHANGE_FIELDS: Final = (
    "containers",
    "annotations",
    "pod_requests",
    "pod_limits",
    "runtime_handler",
)
"""Fields whose change makes a later pod of the same name a resize."""


def plan_actions(workloads: Iterable[Workload]) -> tuple[PlannedAction, ...]:
    """Plan the actions of each document on its pods.

    A later document of the same kind, namespace and name is a change: additional pods are created,
    missing pods are removed, and pods whose resources differ are resized in place.

    Raises:
        ManifestError: lists every change that Kubernetes would not make in place.
    """
    problems: list[str] = []
    planned: list[PlannedAction] = []
    latest: dict[tuple[str, str, str], dict[str, PodManifest]] = {}
    owners: dict[str, Workload] = {}
    for workload in workloads:
        prior = latest.get(workload.identity_key, {})
        pods = {pod.name: pod for pod in workload.pods}
        latest[workload.identity_key] = pods
        planned += [
            PlannedAction(action=PodAction.REMOVE, pod=prior[name])
            for name in reversed(prior)
            if name not in pods
        ]
        for name, pod in pods.items():
            owner = owners.setdefault(pod.full_name, workload)
            if owner.identity_key != workload.identity_key:
                problems.append(
                    f"{workload.source}: pod {pod.full_name} is made by {owner.source} already"
                )
            elif name not in prior:
                planned.append(PlannedAction(action=PodAction.CREATE, pod=pod))
            elif any(getattr(prior[name], key) != getattr(pod, key) for key in _POD_CHANGE_FIELDS):
                problems += [
                    f"{workload.source}: {text}" for text in _resize_obstacles(prior[name], pod)
                ]
                planned.append(PlannedAction(action=PodAction.RESIZE, pod=pod))
    if problems:
        raise ManifestError(tuple(dict.fromkeys(problems)))
    return tuple(planned)


def _resize_obstacles(old_pod: PodManifest, pod: PodManifest) -> list[str]:
    """List the reasons why Kubernetes would not change a pod in place."""
    head = f"is a change of {old_pod.source}, and"
    names = [(c.name, c.role) for c in old_pod.containers]
    if names != [(c.name, c.role) for c in pod.containers]:
        return [f"{head} containers cannot be added or removed in place; expected another name"]
    obstacles = []
    if old_pod.annotations != pod.annotations:
        obstacles.append(f"{head} annotations are read at creation only; expected the same ones")
    if old_pod.runtime_handler != pod.runtime_handler:
        obstacles.append(f"{head} the runtime class cannot be changed; expected the same one")
    if old_pod.qos is not pod.qos:
        obstacles.append(
            f"{head} the QoS class cannot change from {old_pod.qos} to {pod.qos} in place"
        )
    for prior, spec in zip(old_pod.containers, pod.containers, strict=True):
        obstacles += [
            f"{head} container {spec.name}: {text}"
            for text in _container_resize_obstacles(prior, spec)
        ]
    return obstacles


def _container_resize_obstacles(prior: ContainerManifest, spec: ContainerManifest) -> list[str]:
    obstacles = []
    if prior.role is ContainerRole.INIT and prior != spec:
        obstacles.append("an init container cannot be resized")
    if prior.limits.hugepages != spec.limits.hugepages:
        obstacles.append("huge pages cannot be resized")
    if (prior.devices, prior.slots) != (spec.devices, spec.slots):
        obstacles.append("extended resources cannot be resized")
    for label in ("requests", "limits"):
        a, b = getattr(prior, label), getattr(spec, label)
        for name, had, has in (("cpu", a.cpu_milli, b.cpu_milli), ("memory", a.memory, b.memory)):
            if had is not None and has is None:
                obstacles.append(f"{name} {label} cannot be taken away")
    return obstacles


# --- running --------------------------------------------------------------------------------------


def simulate_plan(
    machine: NodeModel,
    planned: Sequence[PlannedAction],
    *,
    reading: MeasuredFree | None = None,
    keep_going: bool = False,
    inventory: DeviceInventory | None = None,
) -> Simulation:
    """Run a plan on an empty machine; continue after a rejection only with ``keep_going``.

    Without a reading of the kernel's free memory all memory is free. ``inventory`` is the one that
    the manifests were read with.
    """
    simulator = _Simulator(machine, reading, inventory)
    initial_fill = simulator.numa_node_fill()
    events: list[SimulatedEvent] = []
    for number, action in enumerate(planned, 1):
        events.append(simulator.run_action(number, action))
        if events[-1].first_rejected_container is not None and not keep_going:
            break
    return Simulation(
        machine=machine,
        initial_fill=initial_fill,
        final_fill=simulator.numa_node_fill(),
        events=tuple(events),
        running_containers=simulator.running_containers(),
        skipped_pods=len(planned) - len(events),
    )


class _Simulator:
    """A node in memory, with the agent's node state."""

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
        """Run one action on its pod."""
        pod, action = planned.pod, planned.action
        prior = self.state
        outcomes: list[ContainerOutcome] = []
        if action is PodAction.REMOVE:
            self._remove_pod(pod)
        else:
            outcomes = (
                self._create_pod(pod) if action is PodAction.CREATE else self._resize_pod(pod)
            )
        updates = updates_between(
            NodeSnapshot(self._machine, prior), NodeSnapshot(self._machine, self.state)
        )
        old_cpus = self._cpus_by_container(prior, (u.container_id for u in updates))
        # A sidecar may lose CPUs to containers of its own pod that start later.
        old_cpus |= {
            container_id(pod, outcome.container): outcome.cpus
            for outcome in outcomes
            if outcome.allocation is not None  # a rejected container has none
        }
        changes = {
            self.state.allocations[i].full_name: cpus or "any"
            for i, cpus in self._cpus_by_container(self.state, old_cpus).items()
            if old_cpus[i] != cpus
        }
        return SimulatedEvent(
            number=number, action=action, pod=pod, outcomes=tuple(outcomes), changed_cpus=changes
        )

    def numa_node_fill(self) -> dict[int, NUMANodeFill]:
        """Return the amounts of each NUMA node."""
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
        """Return every container with its current CPUs, in the order of creation."""
        cpus = self._cpus_by_container(self.state, self._live)
        return tuple((self.state.allocations[i], cpus[i]) for i in self._live)

    # --- one pod ----------------------------------------------------------------------------------

    def _create_pod(self, pod: PodManifest) -> list[ContainerOutcome]:
        sandbox = pod_sandbox(pod)
        outcomes: list[ContainerOutcome] = []
        shortage = self._devices.allocate_pod_or_find_shortage(pod)
        reading, free_devices = self._reading, self._devices.total_free_by_numa_node()
        if free_devices:
            reading = replace(reading or MeasuredFree(), devices=free_devices)
        machine = self._machine
        if shortage is None:
            self.state = reserve_for_sandbox(self._snapshot(), sandbox).state
        for manifest in pod.containers:
            spec = container_of(
                pod, manifest, machine.total_memory_bytes, machine.slots_annotation_key
            )
            if shortage is not None:
                if manifest.name != shortage.container:
                    continue  # none of them is created
                rule = "the kubelet gives devices before it asks"
                trace = DecisionTrace(pod=sandbox, container=spec, rule=rule)
                outcomes.append(
                    _rejected_outcome(manifest, DEVICE_REJECTION_REASON, shortage.message, trace)
                )
                self._remove_pod(pod)
                break
            devices = self._devices.devices_of(pod, manifest.name)
            spec = self._devices.complete(pod, spec)
            node = NodeSnapshot(machine, self.state, reading, self._now)
            decision = admit_pod(node, sandbox, spec)
            if isinstance(decision, Rejected):
                decision = admit_by_releasing(node, decision)
            if isinstance(decision, Rejected):
                decision = _admit_by_moving(node, decision)
            if isinstance(decision, Rejected):
                rejection = _rejected_outcome(
                    manifest, decision.reason, decision.message, decision.trace
                )
                outcomes.append(replace(rejection, devices=devices))
                self._remove_pod(pod)
                break
            self.state = state_after_migration(decision)
            self._live[spec.id] = _with_adjustment(spec, decision)
            outcome = self._container_outcome(manifest, spec.id, decision.trace)
            outcomes.append(replace(outcome, devices=devices, warnings=decision.warnings))
            if manifest.role is ContainerRole.INIT:
                self._release_container(spec.id, self._now)
        # Reservations of this pod expire before the next pod comes.
        self._now += machine.settings.reservation_seconds
        node = self._snapshot()
        self.state = admit.release_reservations(node, expired_reservations(node)).state
        return outcomes

    def _resize_pod(self, pod: PodManifest) -> list[ContainerOutcome]:
        sandbox = pod_sandbox(pod)
        outcomes: list[ContainerOutcome] = []
        for manifest in pod.containers:
            spec = container_of(pod, manifest, self._machine.total_memory_bytes)
            live = self._live.get(spec.id)
            if live is None:
                continue  # an init container, or one of a rejected pod
            requested = replace(spec.resources, hugepages={})
            old_cpus = self._cpus_by_container(self.state, [spec.id])[spec.id]
            result = resize_container(self._snapshot(), sandbox, live, requested)
            if isinstance(result, Rejected):
                rejection = _rejected_outcome(manifest, result.reason, result.message, result.trace)
                outcomes.append(replace(rejection, previous_cpus=old_cpus))
                break
            self.state = result.state
            # The engine's update overrides the request.
            changed = {
                **_nonempty_resource_fields(requested),
                **_nonempty_resource_fields(result.container_update),
            }
            self._live[spec.id] = replace(live, resources=replace(live.resources, **changed))
            outcomes.append(
                replace(
                    self._container_outcome(manifest, spec.id, result.trace), previous_cpus=old_cpus
                )
            )
        return outcomes

    def _remove_pod(self, pod: PodManifest) -> None:
        for manifest in reversed(pod.containers):
            self._release_container(container_id(pod, manifest.name))
        self.state = admit.forget_pod(self._snapshot(), pod.uid).state
        self._devices.release_pod_devices(pod)

    def _release_container(self, id: str, ended_at: float | None = None) -> None:
        self._live.pop(id, None)
        self.state = admit.release_container(self._snapshot(), id, ended_at).state

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
        """Return the CPUs in a state of those containers that it has."""
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


def _with_adjustment(container: Container, decision: Admitted) -> Container:
    """Return the container as the runtime records it after the adjustment."""
    adjustment = decision.adjustment
    changed = {"cpus": adjustment.cpus, "mems": adjustment.mems, "cpu_quota": adjustment.quota}
    return replace(
        container,
        annotations={**container.annotations, **adjustment.annotations},
        resources=replace(container.resources, **{k: v for k, v in changed.items() if v}),
    )


def _nonempty_resource_fields(change: Resources | ContainerUpdate | None) -> dict[str, Any]:
    """Return the resource fields that a change sets."""
    names = ("cpus", "mems", "cpu_quota", "cpu_period", "cpu_shares", "memory_limit")
    return {name: value for name in names if (value := getattr(change, name, None))}


def _admit_by_moving(node: NodeSnapshot, rejected: Rejected) -> Admitted | Rejected:
    """Admit by moving containers, with the work of a deferred search if the first is spent."""
    decision = admit_by_moving(node, rejected)
    if isinstance(decision, Admitted) or not decision.is_search_spent:
        return decision
    search = continued_move_search(node, rejected, is_deferred=False)
    return search.run_steps(MAX_DEFERRED_SEARCH_WORK) or decision
