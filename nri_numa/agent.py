"""The imperative shell: owns the node state; one plain method for each NRI event.

Every method runs to its end without an ``await``: decide → persist → swap → answer. Nothing else
writes the state, so nothing needs a lock, and whoever looks between two requests sees a whole
decision or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from nri_numa import statedoc
from nri_numa.cgroups import Place
from nri_numa.engine import decide
from nri_numa.engine.answers import NO_ADJUSTMENT, ContainerAdjustment, ContainerUpdate
from nri_numa.engine.decision import (
    Admitted,
    Machine,
    Reading,
    Refused,
    Resized,
    Resynced,
    Trace,
)
from nri_numa.engine.resize import resize
from nri_numa.engine.resync import resync
from nri_numa.engine.state import (
    Allocation,
    Kind,
    NodeState,
    effective_cpus,
    step_violations,
    violations,
)
from nri_numa.engine.workload import Container, PodSandbox, Resources
from nri_numa.errors import CheckpointError
from nri_numa.logs import get_logger
from nri_numa.metrics import Metrics
from nri_numa.topology.cpuset import CPUSet
from nri_numa.traces import KeptTrace, TraceKeeper, unpack

log = get_logger("agent")

_AT_ONCE = 25
"""Things done in one go once the reply has left: one to two milliseconds."""


class Store(Protocol):
    """Where the state is made durable; see `nri_numa.checkpoint`."""

    def record(self, changes: Mapping[str, dict[str, Any] | None]) -> None:
        """Write what one request changed, before it is answered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refused container, kept for a while so that the pod's author can ask why."""

    namespace: str
    pod: str
    container: str
    reason: str
    message: str
    at: float
    trace: KeptTrace


@dataclass(frozen=True, slots=True)
class Answer:
    """What to tell the runtime about a container that is being created."""

    adjustment: ContainerAdjustment
    updates: tuple[ContainerUpdate, ...]


NOTHING = Answer(NO_ADJUSTMENT, ())


class Agent:
    """Owns the state of the node.

    Attributes:
        machine: topology and settings in force.
        state: the node state; replaced as a whole.
        refusals: the latest refused containers, oldest first.
        synchronized: whether the runtime told what runs at least once.
        places: where the cgroups of live containers are, by container id.
        narrowed_at: when the shared pool was last narrower than it is now, as far as we know.
        pool_changes: how often the shared pool changed.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        metrics: Metrics,
        store: Store | None,
        now: Callable[[], float],
        reading: Callable[[], Reading | None] = lambda: None,
        observe: bool = False,
        history: int = 256,
        later: Callable[[Callable[[], object]], object] | None = None,
    ) -> None:
        """Make an agent with an empty state.

        Args:
            machine: topology and settings.
            metrics: counted into.
            store: made durable in; None keeps everything in memory.
            now: Unix time in seconds.
            reading: what the kernel has left; must answer from memory, at once.
            observe: decide and report, but change nothing.
            history: how many refusals are kept.
            later: calls a function when the reply has left; at once if None.
        """
        self.machine = machine
        self.state = NodeState()
        self.refusals: deque[Refusal] = deque(maxlen=history)
        self.synchronized = False
        self.observe = observe
        self.checkpointed_at: float | None = None
        self._metrics = metrics
        self._store = store
        self._now = now
        self._reading = reading
        self._keeper = TraceKeeper()
        self._traces: dict[str, Trace | KeptTrace] = {}
        self._waiting: deque[tuple[Context, Callable[[], None]]] = deque()
        self._later = later or (lambda function: function())
        self._pending: dict[str, ContainerUpdate] = {}
        self._listeners: list[Callable[[], None]] = []
        self.store_problem = ""
        self._unwritten: dict[str, str] = {}
        self.places: dict[str, Place] = {}
        self.narrowed_at: float | None = None
        self.pool_changes = 0

    # --- events of the runtime --------------------------------------------------------------------

    def create_container(self, pod: PodSandbox, container: Container) -> Answer | Refused:
        """Decide about a container before it exists."""
        before = self.state
        decision = decide.admit(self.machine, before, pod, container, self._reading(), self._now())
        if isinstance(decision, Refused):
            self._refused(decision)
            if self.observe:
                return NOTHING
            return decision
        touched = {container.id: pod.uid}
        record = before.pods.get(pod.uid)
        if (
            record is not None
            and len(record.containers) > len(decision.state.pods[pod.uid].containers) - 1
        ):
            touched.update(dict.fromkeys(record.containers, pod.uid))
        self._swap(decision.state, touched)
        for container_id in touched:
            if container_id not in self.state.allocations:
                self._forget(container_id)
        self.places[container.id] = Place(container.cgroups_path, container.pid)
        self._admitted(decision)
        if self.observe:
            return NOTHING
        return Answer(decision.adjustment, self._with_pending(decision.updates))

    def update_container(
        self, pod: PodSandbox, container: Container, asked: Resources
    ) -> Resized | Refused:
        """Decide about new resources of a live container."""
        outcome = resize(
            self.machine, self.state, pod, container, asked, self._reading(), self._now()
        )
        if isinstance(outcome, Refused):
            self._refused(outcome)
            return (
                Resized(state=self.state, own=None, trace=outcome.trace)
                if self.observe
                else outcome
            )
        if outcome.state is not self.state:
            self._swap(outcome.state, {container.id: pod.uid})
            allocation = self.state.allocations[container.id]
            self._resized(allocation, outcome.trace)
        if self.observe:
            return Resized(state=outcome.state, own=None, trace=outcome.trace)
        own = self._own_with_pending(container.id, outcome.own)
        return replace(outcome, own=own, updates=self._with_pending(outcome.updates))

    def stop_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        """Take back what a container has; unknown ids are ordinary."""
        updates = self._release(container_id)
        return () if self.observe else self._with_pending(updates)

    def remove_container(self, container_id: str) -> None:
        """A container is gone; normally it gave everything back when it stopped."""
        self._remember(self._release(container_id))

    def remove_pod(self, uid: str) -> None:
        """A pod is gone, and with it containers that were never reported stopped."""
        before = self.state
        record = before.pods.get(uid)
        if record is None:
            return
        after = decide.forget_pod(before, uid)
        self._swap(after, dict.fromkeys(record.containers, uid) or {"": uid})
        for container_id in record.containers:
            self._forget(container_id)
        self._remember(decide.pool_updates(self.machine, before, after, skip=""))

    def synchronize(
        self, pods: Sequence[PodSandbox], containers: Sequence[Container]
    ) -> tuple[ContainerUpdate, ...]:
        """Compare notes with the runtime; see `nri_numa.engine.resync`."""
        outcome = resync(self.machine, self.state, pods, containers, self._reading(), self._now())
        before = self.state
        touched = {i: a.pod_uid for i, a in before.allocations.items()}
        touched.update((i, a.pod_uid) for i, a in outcome.state.allocations.items())
        for n, uid in enumerate(before.pods.keys() - outcome.state.pods.keys()):
            touched[f"\0{n}"] = uid
        self._swap(outcome.state, touched)
        self.places = {c.id: Place(c.cgroups_path, c.pid) for c in containers}
        self._soon(partial(self._check, outcome.state, self.machine))
        self._synchronized(outcome)
        self.synchronized = True
        self._pending.clear()
        return () if self.observe else outcome.updates

    # --- changes of our own ----------------------------------------------------------------------

    def restore(self, state: NodeState) -> None:
        """Start from a remembered state, before the runtime has said anything."""
        self.state = state

    def retopology(self, machine: Machine) -> tuple[ContainerUpdate, ...]:
        """CPUs went on- or offline, or settings changed: updates for who is concerned."""
        old, self.machine = self.machine, machine
        before = old.topology, self.state.pool(old.topology, old.settings)
        after = machine.topology, self.state.pool(machine.topology, machine.settings)
        updates: list[ContainerUpdate] = []
        for container_id, allocation in sorted(self.state.allocations.items()):
            had = effective_cpus(allocation, before[1], before[0])
            has = effective_cpus(allocation, after[1], after[0])
            if not has and had and allocation.kind is Kind.UNBOUND:
                has = after[1]
            if has and has != had:
                updates.append(
                    ContainerUpdate(container_id=container_id, cpus=str(has), ignore_failure=True)
                )
        if before[1] != after[1]:
            # cgroup v1 takes CPUs that go offline out of every cpuset, and never puts them back.
            self.narrowed_at = self._now()
            self.pool_changes += 1
        self.notify()
        if self.observe:
            return ()
        self._remember(updates)
        return tuple(updates)

    def take_pending(self) -> tuple[ContainerUpdate, ...]:
        """Updates that no reply could carry; whoever takes them must send them."""
        pending = tuple(self._pending.values())
        self._pending.clear()
        return pending

    def put_back(self, updates: Iterable[ContainerUpdate]) -> None:
        """Updates that could not be sent; newer ones for the same container win."""
        for update in updates:
            if update.container_id in self.state.allocations:
                self._pending.setdefault(update.container_id, update)

    def overtaken(self, updates: Iterable[ContainerUpdate]) -> None:
        """Updates went out by themselves: say again what a request changed meanwhile.

        The runtime may have applied the request's answer first, and the older set after it.
        """
        for update in updates:
            allocation = self.state.allocations.get(update.container_id)
            if allocation is None or not update.cpus or allocation.kind is Kind.FOREIGN:
                continue
            cpus = self.cpus_of(allocation) or str(self._pool())
            if cpus != update.cpus:
                again = update._replace(cpus=cpus)
                waiting = self._pending.get(update.container_id)
                self._remember([again if waiting is None else waiting._replace(cpus=cpus)])

    @property
    def has_pending(self) -> bool:
        """Whether updates wait for a reply to ride on."""
        return bool(self._pending)

    def is_pending(self, container_id: str) -> bool:
        """Whether an update of this container waits for a reply to ride on."""
        return container_id in self._pending

    def flush_store(self) -> None:
        """Try again to write what could not be written."""
        if self._unwritten:
            self._persist(NodeState(), self.state, {})

    # --- looking ----------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def trace_of(self, container_id: str) -> Trace | None:
        """How the decision about a live container came about; None for an adopted one."""
        kept, allocation = self._traces.get(container_id), self.state.allocations.get(container_id)
        if isinstance(kept, KeptTrace) and allocation is not None:
            return unpack(
                kept,
                namespace=allocation.namespace,
                pod=allocation.pod,
                container=allocation.container,
                distance=self.machine.topology.distance,
            )
        return kept if isinstance(kept, Trace) else None

    def kept_trace(self, container_id: str) -> KeptTrace | None:
        """Stands for a trace: the same object as long as the decision is the same."""
        kept = self._traces.get(container_id)
        return kept if isinstance(kept, KeptTrace) else None

    def trace_of_refusal(self, refusal: Refusal) -> Trace:
        """How a refusal came about."""
        return unpack(
            refusal.trace,
            namespace=refusal.namespace,
            pod=refusal.pod,
            container=refusal.container,
            distance=self.machine.topology.distance,
        )

    def cpus_of(self, allocation: Allocation) -> str:
        """Kernel list of the CPUs a container should have; empty when it is left alone."""
        return self._cpus_in(self.state, allocation)

    # --- inside -----------------------------------------------------------------------------------

    def _release(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        allocation = self.state.allocations.get(container_id)
        self._pending.pop(container_id, None)
        if allocation is None:
            # Its successor in the pod took its place already.
            self._forget(container_id)
            return ()
        released = decide.release(self.machine, self.state, container_id)
        self._swap(released.state, {container_id: allocation.pod_uid})
        self._forget(container_id)
        self._soon(partial(self._tell_released, allocation, self.state))
        return released.updates

    def _tell_released(self, allocation: Allocation, state: NodeState) -> None:
        cpus = self._cpus_in(state, allocation)
        self._note("info", "container released", **_fields(allocation, cpus))

    def _swap(self, after: NodeState, touched: Mapping[str, str]) -> None:
        before = self.state
        self._report(step_violations(before, after, self.machine.topology, self.machine.settings))
        self._persist(before, after, touched)
        self.state = after
        if before.owned or before.idle:
            self.narrowed_at = self._now()
        if before.owned != after.owned or before.idle != after.idle:
            self.pool_changes += 1
        self.notify()

    def _persist(self, before: NodeState, after: NodeState, touched: Mapping[str, str]) -> None:
        if self._store is None:
            return
        if self._unwritten:
            # An earlier write failed: what it held is written along, or it would be lost.
            documents = statedoc.changed_documents(before, after, touched)
            for key in self._unwritten:
                documents.setdefault(key, self._document(after, key))
        else:
            documents = statedoc.changed_documents(before, after, touched)
        if not documents:
            return
        try:
            self._store.record(documents)
        except CheckpointError as error:
            # A node without a checkpoint places containers as well as before; what is lost is the
            # intent after a crash, and that is what the metric and the line are for.
            self._metrics.checkpoint_errors.inc()
            if not self._unwritten:
                self._note("error", "checkpoint not written", error=str(error))
            self.store_problem = str(error)
            self._unwritten.update(dict.fromkeys(documents, ""))
            return
        if self._unwritten:
            self._note("info", "checkpoint written again")
            self._unwritten.clear()
            self.store_problem = ""
        self.checkpointed_at = self._now()

    @staticmethod
    def _document(state: NodeState, key: str) -> dict[str, Any] | None:
        if key.startswith(statedoc.CONTAINER):
            allocation = state.allocations.get(key.removeprefix(statedoc.CONTAINER))
            return None if allocation is None else statedoc.allocation_document(allocation)
        record = state.pods.get(key.removeprefix(statedoc.POD))
        return None if record is None else statedoc.pod_document(record)

    def _with_pending(self, updates: tuple[ContainerUpdate, ...]) -> tuple[ContainerUpdate, ...]:
        if not self._pending:
            return updates
        merged = self._pending | {u.container_id: u for u in updates}
        self._pending.clear()
        return tuple(merged.values())

    def _own_with_pending(
        self, container_id: str, own: ContainerUpdate | None
    ) -> ContainerUpdate | None:
        """An update that waits for this very container goes out with the answer, or is outdated."""
        waiting = self._pending.pop(container_id, None)
        allocation = self.state.allocations.get(container_id)
        if waiting is None or allocation is None or allocation.kind is Kind.FOREIGN:
            return own
        if own is None:
            return waiting
        return own._replace(cpus=own.cpus or waiting.cpus, mems=own.mems or waiting.mems)

    def _remember(self, updates: Iterable[ContainerUpdate]) -> None:
        if not self.observe:
            self._pending.update((u.container_id, u) for u in updates)

    def _forget(self, container_id: str) -> None:
        self._traces.pop(container_id, None)
        self._pending.pop(container_id, None)
        self.places.pop(container_id, None)

    def notify(self) -> None:
        """Tell listeners that something they show changed."""
        for listener in self._listeners:
            listener()

    def _trace(self, allocation: Allocation, trace: Trace) -> None:
        # Containers nobody asked anything for would cost memory for an explanation of one clause.
        if allocation.kind not in (Kind.UNBOUND, Kind.FOREIGN) or not allocation.preferred:
            self._traces[allocation.container_id] = trace
            self._soon(partial(self._pack, allocation.container_id))

    def _pack(self, container_id: str) -> None:
        """Make the trace of a decision small."""
        trace = self._traces.get(container_id)
        if isinstance(trace, Trace):
            self._traces[container_id] = self._keeper.keep(trace)

    def _soon(self, *functions: Callable[[], None]) -> None:
        """Do what nobody waits for when the reply has left; log lines keep their ``op``."""
        context, idle = copy_context(), not self._waiting
        self._waiting.extend((context, function) for function in functions)
        if idle:
            self._later(self._work)

    def _work(self) -> None:
        try:
            for _ in range(min(len(self._waiting), _AT_ONCE)):
                context, function = self._waiting.popleft()
                context.run(function)
        finally:
            if self._waiting:
                self._later(self._work)

    def _admitted(self, decision: Admitted) -> None:
        self._trace(decision.allocation, decision.trace)
        self._soon(partial(self._tell_admitted, decision))

    def _tell_admitted(self, decision: Admitted) -> None:
        updates = len(decision.updates)
        self._tell_placed(decision.allocation, decision.adjustment.cpus, updates)

    def _tell_placed(self, allocation: Allocation, cpus: str, updates: int) -> None:
        """Count and log a decision; nobody waits for that, so it comes after the reply."""
        if allocation.kind is Kind.UNBOUND and not allocation.preferred:
            outcome, reason = "unpinned", allocation.reason.removeprefix("not pinned: ")
        elif allocation.preferred:
            outcome, reason = "admitted", allocation.kind.value
        else:
            outcome, reason = "widened", allocation.kind.value
        self._metrics.decision(outcome, reason, allocation.policy.value)
        self._note(
            "info",
            "container placed",
            outcome=outcome,
            updates=updates,
            **_fields(allocation, cpus),
        )

    def _refused(self, decision: Refused) -> None:
        trace = decision.trace
        policy = trace.wishes.policy.value if trace.wishes is not None else "none"
        self._metrics.decision("refused", decision.reason, policy)
        self.refusals.append(
            Refusal(
                namespace=trace.pod.namespace,
                pod=trace.pod.name,
                container=trace.container.name,
                reason=decision.reason,
                message=decision.message,
                at=self._now(),
                trace=self._keeper.keep(trace),
            )
        )
        self._note(
            "warning",
            "container refused",
            pod=trace.pod.full_name,
            container=trace.container.name,
            reason=decision.reason,
            message=decision.message,
            observed=self.observe,
        )
        self.notify()

    def _resized(self, allocation: Allocation, trace: Trace) -> None:
        self._trace(allocation, trace)
        cpus = self._cpus_in(self.state, allocation)
        self._soon(partial(self._note, "info", "container resized", **_fields(allocation, cpus)))

    def _check(self, state: NodeState, machine: Machine) -> None:
        self._report(violations(state, machine.topology, machine.settings))

    def _synchronized(self, outcome: Resynced) -> None:
        if outcome.left_alone:
            cpus = self._cpus_in(outcome.state, outcome.left_alone[0])  # the same for all of them
            self._soon(*(partial(self._tell_placed, one, cpus, 0) for one in outcome.left_alone))
        for decision in outcome.decisions:
            if isinstance(decision, Admitted):
                self._admitted(decision)
            else:
                self._refused(decision)
        for allocation, trace in outcome.resized:
            self._resized(allocation, trace)
        for container_id in outcome.gone:
            self._forget(container_id)
        if outcome.gap:
            self._metrics.gap_containers.inc(len(outcome.gap))
        if outcome.repaired:
            self._metrics.drift_found.inc(len(outcome.repaired))
            self._metrics.drift_repaired.inc(len(outcome.repaired))
        for problem in outcome.problems:
            self._note("warning", "synchronize", problem=problem)
        self._note(
            "info",
            "synchronized",
            containers=len(outcome.state.allocations),
            adopted=len(outcome.adopted),
            gap=len(outcome.gap),
            repaired=len(outcome.repaired),
            gone=len(outcome.gone),
            updates=len(outcome.updates),
        )

    def _pool(self) -> CPUSet:
        return self.state.pool(self.machine.topology, self.machine.settings)

    def _cpus_in(self, state: NodeState, allocation: Allocation) -> str:
        machine = self.machine
        pool = state.pool(machine.topology, machine.settings)
        return str(effective_cpus(allocation, pool, machine.topology))

    def _report(self, broken: Sequence[str]) -> None:
        """Broken invariants are counted and said, never a reason to stop."""
        for sentence in broken:
            self._metrics.invariant_violations.inc()
            self._note("error", "invariant violated", violation=sentence)

    def _note(self, level: str, event: str, **fields: object) -> None:
        """Log a line; its text is made when the reply has left (see `nri_numa.logs.defer`)."""
        getattr(log, level)(event, **fields)


def _fields(allocation: Allocation, cpus: str) -> dict[str, object]:
    return {
        "pod": f"{allocation.namespace}/{allocation.pod}",
        "container": allocation.container,
        "id": allocation.container_id[:12],
        "kind": allocation.kind.value,
        "cpus": cpus,
        "mems": str(allocation.mems),
        "policy": allocation.policy.value,
        "reason": allocation.reason,
    }
