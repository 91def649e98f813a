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

import msgspec
from msgspec.structs import replace

from nri_numa.engine import admit
from nri_numa.engine.decision import Admitted, Machine, Reading, Refused, Resized, Trace
from nri_numa.engine.resize import LESS, resize
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus, group_of
from nri_numa.model.workload import Container, Resources
from nri_numa.simulate.devices import REASON, Given, Inventory, KubeletDevices
from nri_numa.simulate.manifests import ManifestError
from nri_numa.simulate.pods import (
    Amounts,
    ContainerManifest,
    PodManifest,
    Role,
    Workload,
    container_of,
    pod_sandbox,
)


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


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How full one NUMA node is, in CPUs, in thousandths of them, and in bytes of memory."""

    numa_node: int
    cpus: int
    owned: int
    idle: int
    cpu_total: int
    cpu_bound: int
    cpu_left: int
    memory_total: int
    memory_bound: int
    memory_left: int


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that happened.

    Attributes:
        standing: containers as they stand at the end with their CPUs, in the order of creation.
        untried: pods that were left after the first refusal.
    """

    machine: Machine
    before: tuple[Room, ...]
    after: tuple[Room, ...]
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
            elif had[name].containers != pod.containers or not _same(had[name], pod):
                found = _obstacles(had[name], pod)
                problems += [f"{workload.source}: {text}" for text in found]
                planned.append(Planned(action=Action.RESIZE, pod=pod))
    if problems:
        raise ManifestError(tuple(dict.fromkeys(problems)))
    return tuple(planned)


def _same(a: PodManifest, b: PodManifest) -> bool:
    return (a.annotations, a.pod_requests, a.pod_limits, a.runtime_handler) == (
        b.annotations,
        b.pod_requests,
        b.pod_limits,
        b.runtime_handler,
    )


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
    if old.devices != new.devices:
        found.append("the number of devices cannot be changed")
    for label, a, b in (
        ("requests", old.requests, new.requests),
        ("limits", old.limits, new.limits),
    ):
        found += [f"{name} {label} cannot be taken away" for name in _lost(a, b)]
    return found


def _lost(before: Amounts, after: Amounts) -> list[str]:
    lost = []
    if before.cpu_milli is not None and after.cpu_milli is None:
        lost.append("cpu")
    if before.memory is not None and after.memory is None:
        lost.append("memory")
    return lost


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
        self,
        machine: Machine,
        reading: Reading | None = None,
        inventory: Inventory | None = None,
    ) -> None:
        self.state = NodeState()
        self._machine = machine
        self._reading = reading
        self._live: dict[str, Container] = {}
        self._devices = KubeletDevices(inventory or {}, machine.places)

    def step(self, number: int, planned: Planned) -> SimulatedEvent:
        """Do one thing to one pod."""
        before = self._cpus_now()
        outcomes: tuple[Outcome, ...] = ()
        match planned.action:
            case Action.CREATE:
                outcomes = self._create(planned.pod)
            case Action.RESIZE:
                outcomes = self._resize(planned.pod)
            case Action.REMOVE:
                self._remove(planned.pod)
        after = self._cpus_now()
        shown = {outcome.container: outcome.cpus for outcome in outcomes}
        for container in planned.pod.containers:
            # A sidecar makes room for the containers of its own pod that start later.
            if container.name in shown:
                before[container_of(planned.pod, container, 1).id] = shown[container.name]
        moved = {
            self.state.allocations[i].full_name: cpus or "any"
            for i, cpus in after.items()
            if before.get(i, cpus) != cpus
        }
        return SimulatedEvent(
            number=number, action=planned.action, pod=planned.pod, outcomes=outcomes, moved=moved
        )

    def rooms(self) -> tuple[Room, ...]:
        """How full each NUMA node is."""
        machine, state = self._machine, self.state
        cpu_left = machine.cpu_left(state)
        memory_left = machine.memory_left(state, self._reading)
        return tuple(
            Room(
                numa_node=i,
                cpus=len(node.cpus & machine.topology.allowed),
                owned=len(node.cpus & state.owned),
                idle=len(node.cpus & state.idle),
                cpu_total=machine.cpu_total.get(i, 0),
                cpu_bound=state.charge(i).cpu_milli,
                cpu_left=cpu_left.get(i, 0),
                memory_total=node.memory_bytes,
                memory_bound=state.charge(i).memory,
                memory_left=memory_left.get(i, 0),
            )
            for i, node in sorted(machine.topology.numa_nodes.items())
        )

    def standing(self) -> tuple[tuple[Allocation, str], ...]:
        """What every container has now, in the order of creation."""
        cpus = self._cpus_now()
        return tuple((self.state.allocations[i], cpus[i]) for i in self._live)

    # --- one pod ----------------------------------------------------------------------------------

    def _create(self, pod: PodManifest) -> tuple[Outcome, ...]:
        sandbox = pod_sandbox(pod)
        outcomes: list[Outcome] = []
        too_few = self._devices.give(pod)
        reading, free = self._reading, self._devices.free_by_node()
        if free:
            reading = replace(reading or Reading(), devices=free)
        for manifest in pod.containers:
            machine = self._machine
            made = container_of(pod, manifest, machine.memory_total, machine.slots_key)
            if too_few is not None:
                if manifest.name != too_few.container:
                    continue  # none of them is made
                trace = Trace(
                    pod=sandbox, container=made, rule="the kubelet gives devices before it asks"
                )
                outcomes.append(_refused(manifest, REASON, too_few.message, trace))
                self._remove(pod)
                break
            given = self._devices.of(pod, manifest.name)
            own, together, notes = self._devices.hints(pod, manifest.name)
            made = replace(made, devices=own, pod_devices=together, device_notes=notes)
            decision = admit.admit(self._machine, self.state, sandbox, made, reading)
            if isinstance(decision, Refused):
                outcomes.append(replace(_refusal(manifest, decision), devices=given))
                self._remove(pod)
                break
            self.state = decision.state
            self._live[made.id] = _adjusted(made, decision)
            outcome = self._outcome(manifest, made.id, decision.trace)
            outcomes.append(replace(outcome, devices=given, warnings=decision.warnings))
            if manifest.role is Role.INIT:
                self._release(made.id)
        return tuple(outcomes)

    def _resize(self, pod: PodManifest) -> tuple[Outcome, ...]:
        sandbox = pod_sandbox(pod)
        outcomes: list[Outcome] = []
        for manifest in pod.containers:
            made = container_of(pod, manifest, self._machine.memory_total)
            container_id = made.id
            live = self._live.get(container_id)
            if live is None:
                continue  # an init container, or one of a pod that was refused
            wanted = made.resources
            requested = Resources(
                cpu_shares=wanted.cpu_shares,
                cpu_quota=wanted.cpu_quota,
                cpu_period=wanted.cpu_period,
                memory_limit=wanted.memory_limit,
            )
            before = self._cpus_now(container_id)[container_id]
            outcome = resize(self._machine, self.state, sandbox, live, requested, self._reading)
            if isinstance(outcome, Refused):
                outcomes.append(replace(_refusal(manifest, outcome), before=before))
                break
            self.state = outcome.state
            self._live[container_id] = _resized(live, requested, outcome)
            outcomes.append(self._outcome(manifest, container_id, outcome.trace, before=before))
        return tuple(outcomes)

    def _remove(self, pod: PodManifest) -> None:
        for manifest in reversed(pod.containers):
            self._release(container_of(pod, manifest, 1).id)
        self.state = admit.forget_pod(self._machine, self.state, pod.uid).state
        self._devices.take_back(pod)

    def _release(self, container_id: str) -> None:
        self._live.pop(container_id, None)
        self.state = admit.release(self._machine, self.state, container_id).state

    def _outcome(
        self, manifest: ContainerManifest, container_id: str, trace: Trace, *, before: str = ""
    ) -> Outcome:
        allocation = self.state.allocations[container_id]
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
            cpus=self._cpus_now(container_id)[container_id],
            mems=str(allocation.mems),
            before=before,
            allocation=allocation,
            reason=allocation.reason,
            trace=trace,
        )

    def _cpus_now(self, only: str | None = None) -> dict[str, str]:
        machine = self._machine
        pool = self.state.pool(machine.topology, machine.settings)
        withheld = self.state.withheld_bits
        # Containers of one group have the same CPUs, and the text is what costs.
        groups: dict[int, str] = {}
        found: dict[str, str] = {}
        for i in self._live if only is None else (only,):
            allocation = self.state.allocations[i]
            key = group_of(allocation)
            text = None if key is None else groups.get(key)
            if text is None:
                text = str(effective_cpus(allocation, pool, machine.topology, withheld))
                if key is not None:
                    groups[key] = text
            found[i] = text
        return found


def _refusal(manifest: ContainerManifest, decision: Refused) -> Outcome:
    return _refused(manifest, decision.reason, decision.message, decision.trace)


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
    now = made.resources
    return replace(
        made,
        annotations={**made.annotations, **adjustment.annotations},
        resources=replace(
            now,
            cpus=adjustment.cpus or now.cpus,
            mems=adjustment.mems or now.mems,
            cpu_quota=now.cpu_quota if adjustment.quota is None else adjustment.quota,
        ),
    )


def _resized(live: Container, requested: Resources, outcome: Resized) -> Container:
    """The container as the runtime keeps it after a resize, our override on top."""
    now, own = live.resources, outcome.own
    quota = own.cpu_quota if own is not None and own.cpu_quota is not None else requested.cpu_quota
    return replace(
        live,
        resources=replace(
            now,
            cpu_shares=requested.cpu_shares or now.cpu_shares,
            cpu_quota=quota or now.cpu_quota,
            cpu_period=requested.cpu_period or now.cpu_period,
            memory_limit=requested.memory_limit or now.memory_limit,
            cpus=(own.cpus if own is not None else "") or now.cpus,
            mems=(own.mems if own is not None else "") or now.mems,
        ),
    )
