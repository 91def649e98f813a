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

from nri_numa.engine import admit
from nri_numa.engine.decision import Admitted, Machine, Reading, Refused, Trace
from nri_numa.engine.resize import LESS, resize
from nri_numa.engine.room import LATER_WORK_LIMIT, all_arrived, room_search, with_room
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus
from nri_numa.engine.whole import admit_whole
from nri_numa.model.workload import Container, ContainerUpdate, Resources
from nri_numa.simulate.devices import REASON, Given, Inventory, KubeletDevices
from nri_numa.simulate.manifests import ManifestError
from nri_numa.simulate.pods import (
    ContainerManifest,
    PodManifest,
    Role,
    Workload,
    container_id,
    container_of,
    pod_sandbox,
)

NOW: Final = 1.0
"""Unix time of everything; 0 would mean that nothing ended."""


class Action(StrEnum):
    """What happens to a pod."""

    CREATE = "create"
    RESIZE = "resize"
    REMOVE = "remove"


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One pod and what is to happen to it."""

    action: Action
    pod: PodManifest


class Verdict(StrEnum):
    """How one container fared."""

    PLACED = "placed"
    WIDENED = "widened"
    LESS = "less"
    """It could not grow in place and keeps less than its new size."""
    UNPINNED = "unpinned"
    """It starts untouched, because what it needs cannot be had."""
    UNTOUCHED = "untouched"
    """Nothing was requested for it."""
    REFUSED = "refused"


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One container and what it got.

    CPUs and memory nodes are kernel lists at that moment, empty for an untouched container, and
    CPUs before a resize. There is no allocation of a refused one; the reason is the refusal's then.
    Warnings say what is probably not meant, one clause each.
    """

    container: str
    role: Role
    verdict: Verdict
    cpus: str = ""
    mems: str = ""
    before: str = ""
    allocation: Allocation | None = None
    reason: str = ""
    message: str = ""
    devices: Given = msgspec.field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    trace: Trace


class SimulatedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one pod.

    Attributes:
        moved: other containers whose CPUs changed with it, ``namespace/pod/container`` to list.
    """

    number: int
    action: Action
    pod: PodManifest
    outcomes: tuple[Outcome, ...] = ()
    moved: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def refused(self) -> Outcome | None:
        """The first container that was refused."""
        return next((o for o in self.outcomes if o.verdict is Verdict.REFUSED), None)


class Room(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How full one NUMA node is, as its document says it; ``cpus`` are those it has."""

    cpus: int
    exclusive: int
    idle: int
    cpu_total_milli: int
    cpu_bound_milli: int
    cpu_left_milli: int
    memory_bytes: int
    memory_bound_bytes: int
    memory_left_bytes: int


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happened.

    Attributes:
        before, after: how full each NUMA node is.
        standing: containers as they stand at the end with their CPUs, in the order of creation.
        untried: pods that were left after the first refusal.
    """

    machine: Machine
    before: Mapping[int, Room]
    after: Mapping[int, Room]
    events: tuple[SimulatedEvent, ...]
    standing: tuple[tuple[Allocation, str], ...]
    untried: int = 0

    @property
    def first_refused(self) -> SimulatedEvent | None:
        """The first event with a refused container."""
        return next((e for e in self.events if e.refused is not None), None)

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Containers by how they fared, init containers included."""
        counted = dict.fromkeys(Verdict, 0)
        for event in self.events:
            for outcome in event.outcomes:
                counted[outcome.verdict] += 1
        return counted


# --- planning -------------------------------------------------------------------------------------


_CHANGES: Final = ("containers", "annotations", "pod_requests", "pod_limits", "runtime_handler")
"""What makes another pod of a pod of the same name."""


def plan(workloads: Iterable[Workload]) -> tuple[Planned, ...]:
    """Work out what each document does to which pods.

    A later document of the same kind, namespace and name is a change: pods it has more of are
    created, pods it has less of are removed, and the others are resized in place where their
    resources differ.

    Raises:
        ManifestError: with everything that Kubernetes would not change in place.
    """
    problems: list[str] = []
    planned: list[Planned] = []
    latest: dict[tuple[str, str, str], dict[str, PodManifest]] = {}
    owners: dict[str, Workload] = {}
    for workload in workloads:
        had = latest.get(workload.key, {})
        has = {pod.name: pod for pod in workload.pods}
        latest[workload.key] = has
        planned += [
            Planned(action=Action.REMOVE, pod=had[name])
            for name in reversed(had)
            if name not in has
        ]
        for name, pod in has.items():
            owner = owners.setdefault(pod.full_name, workload)
            if owner.key != workload.key:
                problems.append(
                    f"{workload.source}: pod {pod.full_name} is made by {owner.source} already"
                )
            elif name not in had:
                planned.append(Planned(action=Action.CREATE, pod=pod))
            elif any(getattr(had[name], key) != getattr(pod, key) for key in _CHANGES):
                problems += [f"{workload.source}: {why}" for why in _obstacles(had[name], pod)]
                planned.append(Planned(action=Action.RESIZE, pod=pod))
    if problems:
        raise ManifestError(tuple(dict.fromkeys(problems)))
    return tuple(planned)


def _obstacles(before: PodManifest, after: PodManifest) -> list[str]:
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
        found += [f"{head} container {new.name}: {text}" for text in _kept(old, new)]
    return found


def _kept(old: ContainerManifest, new: ContainerManifest) -> list[str]:
    found = []
    if old.role is Role.INIT and old != new:
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


def simulate(
    machine: Machine,
    planned: Sequence[Planned],
    *,
    reading: Reading | None = None,
    keep_going: bool = False,
    inventory: Inventory | None = None,
) -> Simulation:
    """Run a plan on an empty machine, and go on after a refusal only with ``keep_going``.

    Without a reading of what the kernel has left all memory counts as free. The inventory is that
    of the plan's manifests.
    """
    simulator = _Simulator(machine, reading, inventory)
    before = simulator.rooms()
    events: list[SimulatedEvent] = []
    for number, step in enumerate(planned, 1):
        events.append(simulator.step(number, step))
        if events[-1].refused is not None and not keep_going:
            break
    return Simulation(
        machine=machine,
        before=before,
        after=simulator.rooms(),
        events=tuple(events),
        standing=simulator.standing(),
        untried=len(planned) - len(events),
    )


class _Simulator:
    """A node in memory, with the node state as the agent would have it."""

    def __init__(
        self, machine: Machine, reading: Reading | None, inventory: Inventory | None
    ) -> None:
        self.state = NodeState()
        self._machine = machine
        self._reading = reading
        self._live: dict[str, Container] = {}
        self._devices = KubeletDevices(inventory or {}, machine.places)

    def step(self, number: int, planned: Planned) -> SimulatedEvent:
        """Do one thing to one pod."""
        pod, action = planned.pod, planned.action
        before = self.state
        outcomes: list[Outcome] = []
        if action is Action.REMOVE:
            self._remove(pod)
        else:
            outcomes = self._create(pod) if action is Action.CREATE else self._resize(pod)
        updates = admit.pool_updates(self._machine, before, self.state, skip="")
        had = self._cpus(before, (one.container_id for one in updates))
        # A sidecar makes room for the containers of its own pod that start later.
        had |= {container_id(pod, outcome.container): outcome.cpus for outcome in outcomes}
        moved = {
            self.state.allocations[i].full_name: cpus or "any"
            for i, cpus in self._cpus(self.state, had).items()
            if had[i] != cpus
        }
        return SimulatedEvent(
            number=number, action=action, pod=pod, outcomes=tuple(outcomes), moved=moved
        )

    def rooms(self) -> dict[int, Room]:
        """How full each NUMA node is."""
        machine, state = self._machine, self.state
        cpu_left = machine.cpu_left(state)
        memory_left = machine.memory_left(state, self._reading)
        return {
            i: Room(
                cpus=len(node.cpus & machine.topology.allowed),
                exclusive=len(node.cpus & state.owned),
                idle=len(node.cpus & state.idle),
                cpu_total_milli=machine.cpu_total.get(i, 0),
                cpu_bound_milli=state.charge(i).cpu_milli,
                cpu_left_milli=cpu_left.get(i, 0),
                memory_bytes=node.memory_bytes,
                memory_bound_bytes=state.charge(i).memory,
                memory_left_bytes=memory_left.get(i, 0),
            )
            for i, node in sorted(machine.topology.numa_nodes.items())
        }

    def standing(self) -> tuple[tuple[Allocation, str], ...]:
        """What every container has now, in the order of creation."""
        cpus = self._cpus(self.state, self._live)
        return tuple((self.state.allocations[i], cpus[i]) for i in self._live)

    # --- one pod ----------------------------------------------------------------------------------

    def _create(self, pod: PodManifest) -> list[Outcome]:
        sandbox = pod_sandbox(pod)
        outcomes: list[Outcome] = []
        too_few = self._devices.give(pod)
        reading, free = self._reading, self._devices.free_by_node()
        if free:
            reading = replace(reading or Reading(), devices=free)
        machine = self._machine
        for manifest in pod.containers:
            made = container_of(pod, manifest, machine.memory_total, machine.slots_key)
            if too_few is not None:
                if manifest.name != too_few.container:
                    continue  # none of them is made
                rule = "the kubelet gives devices before it asks"
                trace = Trace(pod=sandbox, container=made, rule=rule)
                outcomes.append(_refused(manifest, REASON, too_few.message, trace))
                self._remove(pod)
                break
            given = self._devices.of(pod, manifest.name)
            made = self._devices.known(pod, manifest.name).on(made)
            decision = admit_whole(machine, self.state, sandbox, made, reading, NOW)
            if isinstance(decision, Refused):
                decision = self._with_room(decision, reading)
            if isinstance(decision, Refused):
                refusal = _refused(manifest, decision.reason, decision.message, decision.trace)
                outcomes.append(replace(refusal, devices=given))
                self._remove(pod)
                break
            self.state = all_arrived(decision)
            self._live[made.id] = _adjusted(made, decision)
            outcome = self._outcome(manifest, made.id, decision.trace)
            outcomes.append(replace(outcome, devices=given, warnings=decision.warnings))
            if manifest.role is Role.INIT:
                self._release(made.id, NOW)
        # They all started, so nothing is kept for long.
        kept = self.state.kept_for(pod.uid)
        self.state = admit.let_go(machine, self.state, kept).state
        return outcomes

    def _with_room(self, refused: Refused, reading: Reading | None) -> Admitted | Refused:
        """As the agent has it; where a search goes on after its answer, as at the next try."""
        machine, state = self._machine, self.state
        found = with_room(machine, state, refused, reading, NOW)
        if isinstance(found, Admitted) or not found.is_search_spent:
            return found
        search = room_search(machine, state, refused, reading, NOW, is_deferred=False)
        return search.work(LATER_WORK_LIMIT) or found

    def _resize(self, pod: PodManifest) -> list[Outcome]:
        sandbox = pod_sandbox(pod)
        outcomes: list[Outcome] = []
        for manifest in pod.containers:
            made = container_of(pod, manifest, self._machine.memory_total)
            live = self._live.get(made.id)
            if live is None:
                continue  # an init container, or one of a pod that was refused
            requested = replace(made.resources, hugepages={})
            before = self._cpus(self.state, [made.id])[made.id]
            found = resize(self._machine, self.state, sandbox, live, requested, self._reading)
            if isinstance(found, Refused):
                refusal = _refused(manifest, found.reason, found.message, found.trace)
                outcomes.append(replace(refusal, before=before))
                break
            self.state = found.state
            # Our override is on top.
            changed = {**_given(requested), **_given(found.own)}
            self._live[made.id] = replace(live, resources=replace(live.resources, **changed))
            outcomes.append(replace(self._outcome(manifest, made.id, found.trace), before=before))
        return outcomes

    def _remove(self, pod: PodManifest) -> None:
        for manifest in reversed(pod.containers):
            self._release(container_id(pod, manifest.name))
        self.state = admit.forget_pod(self._machine, self.state, pod.uid).state
        self._devices.take_back(pod)

    def _release(self, id: str, ended: float | None = None) -> None:
        self._live.pop(id, None)
        self.state = admit.release(self._machine, self.state, id, ended).state

    def _outcome(self, manifest: ContainerManifest, id: str, trace: Trace) -> Outcome:
        allocation = self.state.allocations[id]
        if allocation.kind in (Kind.UNBOUND, Kind.FOREIGN) and not allocation.mems:
            verdict = Verdict.UNTOUCHED if allocation.preferred else Verdict.UNPINNED
        elif LESS in allocation.reason:
            verdict = Verdict.LESS
        else:
            verdict = Verdict.PLACED if allocation.preferred else Verdict.WIDENED
        return Outcome(
            container=manifest.name,
            role=manifest.role,
            verdict=verdict,
            cpus=self._cpus(self.state, [id])[id],
            mems=str(allocation.mems),
            allocation=allocation,
            reason=allocation.reason,
            trace=trace,
        )

    def _cpus(self, state: NodeState, ids: Iterable[str]) -> dict[str, str]:
        """What containers have in a state, of those that are in it."""
        topology = self._machine.topology
        pool, withheld = state.pool(topology, self._machine.settings), state.withheld_bits
        return {
            i: str(effective_cpus(state.allocations[i], pool, topology, withheld))
            for i in ids
            if i in state.allocations
        }


def _refused(manifest: ContainerManifest, reason: str, message: str, trace: Trace) -> Outcome:
    return Outcome(
        container=manifest.name,
        role=manifest.role,
        verdict=Verdict.REFUSED,
        reason=reason,
        message=message,
        trace=trace,
    )


def _adjusted(made: Container, decision: Admitted) -> Container:
    """The container as the runtime keeps it after our answer."""
    adjustment = decision.adjustment
    changed = {"cpus": adjustment.cpus, "mems": adjustment.mems, "cpu_quota": adjustment.quota}
    return replace(
        made,
        annotations={**made.annotations, **adjustment.annotations},
        resources=replace(made.resources, **{k: v for k, v in changed.items() if v}),
    )


def _given(change: Resources | ContainerUpdate | None) -> dict[str, Any]:
    """What a change says of resources; it leaves the others as they are."""
    names = ("cpus", "mems", "cpu_quota", "cpu_period", "cpu_shares", "memory_limit")
    return {name: value for name in names if (value := getattr(change, name, None))}
