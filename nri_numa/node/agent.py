"""The imperative shell: owns the node state; one plain method for each NRI event.

Every method runs to its end without an ``await``: decide → persist → swap → answer. Nothing else
writes the state, so nothing needs a lock, and whoever looks between two requests sees a whole
decision or none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from nri_numa.engine import admit
from nri_numa.engine.adopt import ASSIGNED, assigned
from nri_numa.engine.decision import Admitted, Machine, Reading, Refused, Resized, Resynced, Trace
from nri_numa.engine.explain.explanation import Grounds
from nri_numa.engine.resize import resize
from nri_numa.engine.resync import decide_late, resync, take_in, without_answer
from nri_numa.engine.state import (
    Allocation,
    Kind,
    NodeState,
    effective_cpus,
    step_violations,
    violations,
)
from nri_numa.engine.values.workload import (
    NO_CHANGE,
    Container,
    ContainerUpdate,
    KubeletGrants,
    Pods,
    PodSandbox,
    Resources,
    StateChange,
)
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.cpuset import CPUSet
from nri_numa.node.afterwards import Afterwards
from nri_numa.node.differences import Differences
from nri_numa.node.foreign_pins import ForeignWatch
from nri_numa.node.moved import moved
from nri_numa.node.pending import Pending
from nri_numa.node.refused import RefusedContainer, unpacked
from nri_numa.node.starting import Starts, Write
from nri_numa.node.traces_of import TracesOf
from nri_numa.observe.decisions import RUNNING, DecisionLog
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import Notices
from nri_numa.observe.traces import KeptTrace, TraceKeeper
from nri_numa.store.checkpoint import CheckpointStore

__all__ = ["Agent", "RefusedContainer"]

SYNCHRONIZE_SECONDS = 1.0
"""Time for decisions in a Synchronize; the runtime waits two seconds for all of it unless it tells
less (``plugin_request_timeout``), and then drops the plugin."""

START_SECONDS = 120.0
"""A start that takes longer is given up by the kubelet (its ``runtimeRequestTimeout``)."""

Rewritten = Callable[[Allocation, Allocation, str, str], object]

_NOWHERE = CgroupPlace()

_ENDED = 256
"""Ended containers whose ids are kept; the news of their start can only be moments late."""


class Agent:
    """Owns the state of the node.

    Attributes:
        machine: topology and settings in force.
        state: the node state; replaced as a whole.
        refused: how many were refused so far.
        notices: what happened to containers, for readers outside the node.
        synchronized: whether the runtime told what runs at least once.
        places: where the cgroups of live containers are, by container id.
        narrowed_at: when the shared pool was last narrower than it is now, as far as we know.
        pool_changes: how often the shared pool changed.
        starts: containers between their creation and the end of their start.
        concern: told, once the reply left, the ids of containers whose real cgroup is worth a
            look, and how many updates the runtime applies first.
        look_aside: called before a decision, for what the kubelet granted a moment ago.
        rewritten: told, once the reply left, of a cpuset that somebody sent: what the container
            was before, is now, what was asked for, and what it keeps (empty: what was asked for).
        differences: what containers really have, where it is not what is meant.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        metrics: Metrics,
        store: CheckpointStore,
        now: Callable[[], float],
        reading: Callable[[], Reading | None] = lambda: None,
        observe: bool = False,
        history: int = 256,
        later: Callable[[Callable[[], object]], object] | None = None,
        write: Write | None = None,
        mark_of: Callable[[CgroupPlace, str], str] = lambda place, name: "",
        mark: Callable[[CgroupPlace, str, str], object] = lambda place, name, text: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Make an agent with an empty state.

        Args:
            machine: topology and settings.
            metrics: counted into.
            store: keeps the state over a death of ours.
            now: Unix time in seconds.
            reading: what the kernel has left; must answer from memory, at once.
            observe: decide and report, but change nothing.
            history: how many refusals are kept.
            later: calls a function when the reply has left; at once if None.
            write: gives the cgroup of a container a kernel list of CPUs, at once; None where
                cgroups are nobody's business.
            mark_of: reads what ``mark`` wrote on the cgroup of a container, by its name.
            mark: writes a text on the cgroup of a container.
            clock: monotonic time in seconds; one that stands still sets no deadline.
        """
        self.machine = machine
        self.state = NodeState()
        self._refusals: dict[tuple[str, str, str, str], RefusedContainer] = {}
        self._history = history
        self.refused = 0
        self.notices = Notices(now)
        self.synchronized = False
        self.observe = observe
        self._metrics = metrics
        self._now = now
        self._tell = DecisionLog(metrics, self.notices)
        self.checkpoint = store
        self._reading = reading
        self._keeper = TraceKeeper()
        self._foreign = ForeignWatch(metrics, lambda: self.state)
        self._soon = Afterwards(later or (lambda function: function()))
        self._traces = TracesOf(self._keeper, self._soon)
        self._pending = Pending()
        self._mark_of, self._write_mark = mark_of, mark
        self._clock = clock
        self._synchronize_seconds = SYNCHRONIZE_SECONDS
        self._undecided: deque[tuple[PodSandbox, Container]] = deque()
        self._listeners: list[Callable[[], None]] = []
        self.places: dict[str, CgroupPlace] = {}
        self._sandboxes: dict[str, CgroupPlace] = {}
        self.starts = Starts(write)
        self._ended: dict[str, None] = {}
        self.concern: Callable[[Collection[str], int], object] = lambda ids, applying: None
        self.look_aside: Callable[[], object] = lambda: None
        self.rewritten: Rewritten = lambda before, after, asked, kept: None
        self.differences = Differences(metrics, now, self.notify)
        self.narrowed_at: float | None = None
        self.pool_changes = 0

    # --- events of the runtime --------------------------------------------------------------------

    def runtime_waits(self, seconds: float) -> None:
        """The runtime told how long it waits for an answer; 0 when it tells nothing."""
        self._synchronize_seconds = min(SYNCHRONIZE_SECONDS, seconds / 2 or SYNCHRONIZE_SECONDS)

    def create_container(self, pod: PodSandbox, container: Container) -> Admitted | Refused | None:
        """Decide about a container before it exists; None leaves it as it is."""
        self.look_aside()
        decision = admit.admit(
            self.machine, self.state, pod, container, self._reading(), self._now()
        )
        if isinstance(decision, Refused):
            self._refused(decision)
            return None if self.observe else decision
        self._swap(decision.state, decision.change)
        for container_id in decision.change.containers:
            if container_id not in self.state.allocations:
                self._forget(container_id)
        self.places[container.id] = CgroupPlace(container.cgroups_path, container.pid)
        self._admitted(decision)
        self._look_if_foreign(decision.allocation)
        self._ended.pop(container.id, None)
        self.starts.created(container, decision.adjustment)
        if self.observe:
            return None
        updates = self._with_pending(decision.updates)
        return decision if updates is decision.updates else replace(decision, updates=updates)

    def knows(self, container_id: str) -> bool:
        """Whether a container has been decided about, so that its start tells nothing new of it."""
        return container_id in self.state.allocations

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """The cgroup of a container is there, and its program does not run yet."""
        if container.id in self._ended:
            return
        self.places[container.id] = CgroupPlace(container.cgroups_path, container.pid)
        if self.observe:
            return
        if container.id not in self.state.allocations:
            self._meet(pod, container)
        self.starts.begin(container.id)
        self._settle(container.id)

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """A container runs; from now on the runtime applies updates to it."""
        if container.id in self._ended:
            return  # told late: a program may end before the runtime says that it runs
        self.places[container.id] = CgroupPlace(container.cgroups_path, container.pid)
        if not (self.observe or container.id in self.state.allocations):
            self._meet(pod, container)
        self.starts.end(container.id)
        if not self.observe:
            self._soon.do(partial(self.concern, (container.id,), 0))

    def update_container(
        self, pod: PodSandbox, container: Container, asked: Resources
    ) -> Resized | Refused:
        """Decide about new resources of a live container."""
        self.look_aside()
        before = self.state.allocations.get(container.id)
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
            self._swap(outcome.state, outcome.change)
            allocation = self.state.allocations[container.id]
            self._resized(allocation, outcome.trace, before)
            self._look_if_foreign(before)
            self._look_if_foreign(allocation)
        kept = outcome.own.cpus if outcome.own is not None else ""
        if asked.cpus and before is not None:
            after = self.state.allocations[container.id]
            self._soon.do(partial(self.rewritten, before, after, asked.cpus, kept))
        if asked.cpus and kept:
            self._soon.do(partial(self._tell.overridden, pod, container, asked.cpus, kept))
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

    def run_pod(self, pod: PodSandbox) -> None:
        """A pod's sandbox starts: exclusive CPUs of a pod that is placed as a whole are kept."""
        kept = admit.sandbox(self.machine, self.state, pod, self._reading(), self._now())
        if kept.state is not self.state:
            self._swap(kept.state, kept.change)
            self._remember(kept.updates)

    def stop_pod(self, uid: str, sandbox: str) -> None:
        """A pod's sandbox stopped: none of its containers comes again, or starts any more."""
        record = self.state.pods.get(uid)
        every = [self.state.allocations[i] for i in sorted(record.containers)] if record else []
        over = [a for a in every if a.ended or a.container_id in self.starts]
        self._let_go([a for a in over if a.pod_id == sandbox])

    def look_at_kept(self, reader: CgroupReader) -> None:
        """Give back what pods have kept for too long, or have no use for; called every few seconds.

        A runtime reports no stop of a sandbox that is older than itself, and over CRI none at all:
        the sandbox's cgroup shows it. Nor does it report a failed start, whose cgroup is not there.
        """
        seconds = self.machine.settings.kept_seconds
        latest = self._now() - seconds
        kept = [a for a in self.state.allocations.values() if a.ended]
        pods = {a.pod_id for a in kept}
        self._sandboxes = {i: place for i, place in self._sandboxes.items() if i in pods}
        gone = {i for i, place in self._sandboxes.items() if reader.is_gone(place)}
        waiting = [a for i in self.starts.ids() if (a := self.state.allocations.get(i))]
        latest_start = self._now() - max(seconds, START_SECONDS)
        late = [
            a for a in waiting
            if a.since <= latest_start and reader.is_gone(self.places[a.container_id])
        ]  # fmt: skip
        self._let_go([a for a in kept if a.ended <= latest or a.pod_id in gone] + late)
        for allocation in late:  # should it start after all, it is met then
            self._ended.pop(allocation.container_id, None)

    def _let_go(self, kept: Sequence[Allocation]) -> None:
        if not kept:
            return
        released = admit.let_go(self.machine, self.state, kept)
        self._swap(released.state, released.change)
        for allocation in kept:
            self._forget(allocation.container_id)
            self._tell.let_go(allocation)
        self._remember(released.updates)

    def remove_pod(self, uid: str, sandbox: str) -> None:
        """A sandbox is gone, and with it containers that were never reported stopped."""
        self._keep_refusals(lambda one: one.pod_id != sandbox)
        before, released = self.state, admit.forget_pod(self.machine, self.state, uid, sandbox)
        if released.state is self.state:
            return
        self._swap(released.state, released.change)
        for container_id in released.change.containers:
            self._forget(container_id)
            self._look_if_foreign(before.allocations.get(container_id))
        self._remember(released.updates)

    def synchronize(
        self, pods: Pods | Iterable[PodSandbox], containers: Sequence[Container]
    ) -> tuple[ContainerUpdate, ...]:
        """Compare notes with the runtime; see `nri_numa.engine.resync`."""
        end = self._clock() + self._synchronize_seconds
        pods = pods if isinstance(pods, Pods) else Pods.of(pods)
        self._keep_refusals(lambda one: one.pod_id in pods)
        unmarked = [c.id for c in containers if self._mark_key not in c.annotations]
        containers = [self._with_mark(c) for c in containers]
        outcome = resync(
            self.machine, self.state, pods, containers, self._reading(), self._now(),
            in_time=lambda: self._clock() < end,
        )  # fmt: skip
        before = self.state
        self._swap(outcome.state, outcome.change)
        self.places = {c.id: CgroupPlace(c.cgroups_path, c.pid) for c in containers}
        # Whose creation was decided and whose start we never saw: our answer may not have arrived.
        unsure = frozenset(self.starts.ids())
        self.starts.clear()
        if not self.observe:
            for container in containers:
                if container.starting:
                    self.starts.found(container)
            self._settle_all()
        self._soon.do(partial(self.concern, tuple(self.places), len(outcome.updates)))
        state, topology, settings = outcome.state, self.machine.topology, self.machine.settings
        self._soon.do(lambda: self._tell.broken(violations(state, topology, settings)))
        self._synchronized(without_answer(outcome, unsure), before.allocations)
        self.synchronized = True
        self._pending.clear()
        self._undecided = deque(outcome.undecided)
        if self._undecided:
            self._soon.do(self._decide_late)
        later = {container.id for _, container in outcome.undecided}
        self._soon.do(*(partial(self._mark, i) for i in unmarked if i not in later))
        return () if self.observe else outcome.updates

    def _decide_late(self) -> None:
        """One stranger that Synchronize had no time for; the next one follows by itself."""
        if not self._undecided:
            return  # a later Synchronize had time for all of them
        pod, container = self._undecided.popleft()
        self._soon.do(self._decide_late)
        known = self.state.allocations.get(container.id)
        if known is None or known.preferred:
            return  # it is gone, or was decided about since
        decision, updates = decide_late(
            self.machine, self.state, pod, container, self._reading(), self._now()
        )
        if isinstance(decision, Refused):
            self._refused(decision, running=True)
            return
        self._swap(decision.state, decision.change)
        gap = decision.allocation.kind not in (Kind.UNBOUND, Kind.FOREIGN)
        if gap:
            self._metrics.gap_containers.inc()
        self._admitted(decision, gap=gap)
        self._look_if_foreign(decision.allocation)
        self._remember(updates)
        self._mark(container.id)

    # --- changes of our own ----------------------------------------------------------------------

    def granted(self, grants: KubeletGrants) -> None:
        """The kubelet granted something else: whoever shares CPUs makes room, or gets it back."""
        before = self.state
        after = before.with_kubelet(grants)
        self._swap(after, NO_CHANGE)
        self._remember(admit.pool_updates(self.machine, before, after, skip=""))

    def limited(self, container_id: str, quota: int) -> None:
        """A refused resize has a CFS quota in force: another one than we lifted is left there."""
        allocation = self.state.allocations.get(container_id)
        if allocation is None or allocation.quota in (None, quota):
            return
        after = self.state.without(container_id)
        after = after.with_allocation(replace(allocation, quota=None))
        self._swap(after, StateChange((container_id,), (allocation.pod_uid,)))

    def restore(self, state: NodeState) -> None:
        """Start from a remembered state, before the runtime has said anything."""
        self.state = state

    def retopology(self, machine: Machine) -> tuple[ContainerUpdate, ...]:
        """CPUs went on- or offline, or settings changed: updates for who is concerned."""
        old = self.machine
        self.machine = machine = machine.with_memory_policies(old.memory_policies)
        updates, pool_changed = moved(self.state, old, machine)
        if pool_changed:
            # cgroup v1 takes CPUs that go offline out of every cpuset, and never puts them back.
            self.narrowed_at = self._now()
            self.pool_changes += 1
        self.notify()
        if self.observe:
            return ()
        self._settle_all()
        self._remember(updates)
        return tuple(updates)

    def take_pending(self) -> tuple[ContainerUpdate, ...]:
        """Updates that no reply could carry; whoever takes them must send them."""
        return self._pending.take_urgent()

    def put_back(self, updates: Iterable[ContainerUpdate]) -> None:
        """Updates that could not be sent; newer ones for the same container win."""
        for update in updates:
            if update.container_id in self.state.allocations:
                self._pending.put_back(update)

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
        return self._pending.urgent

    def is_pending(self, container_id: str) -> bool:
        """Whether an update of this container waits for a reply to ride on."""
        return self._pending.is_urgent(container_id)

    def ride(self, update: ContainerUpdate) -> None:
        """A cgroup was written; the runtime is told with the next reply."""
        if update.container_id in self.state.allocations:
            self._pending.ride([update])

    def is_overtaken(self, update: ContainerUpdate) -> bool:
        """Whether the container is gone, or meant to have other CPUs by now."""
        allocation = self.state.allocations.get(update.container_id)
        if allocation is None or allocation.kind is Kind.FOREIGN:
            return True
        meant = self.cpus_of(allocation) or str(self._pool())
        return bool(update.cpus) and update.cpus != meant

    # --- looking ----------------------------------------------------------------------------------

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def grounds_of(self, container_id: str) -> Grounds | None:
        """How the decision about a live container came about; None for an adopted one."""
        allocation = self.state.allocations.get(container_id)
        return self._traces.grounds_of(allocation, self.machine.topology)

    def kept_trace(self, container_id: str) -> KeptTrace | None:
        """Stands for a trace: the same object as long as the decision is the same."""
        return self._traces.kept(container_id)

    def packed_traces(self) -> dict[str, KeptTrace]:
        """What is kept of the decisions about live containers, by container id."""
        return self._traces.packed()

    def recall(self, traces: Mapping[str, KeptTrace], refusals: Iterable[RefusedContainer]) -> None:
        """Know again what an earlier run of ours kept; only before the first event."""
        self._traces.recall(traces)
        again = (replace(r, trace=self._keeper.again(r.trace)) for r in refusals)
        self._refusals.update((one.key, one) for one in again)

    @property
    def refusals(self) -> tuple[RefusedContainer, ...]:
        """The latest refused containers of pods that are there, oldest first."""
        return tuple(self._refusals.values())

    def _keep_refusals(self, wanted: Callable[[RefusedContainer], bool]) -> None:
        self._refusals = {one.key: one for one in self.refusals if wanted(one)}

    def grounds_of_refusal(self, refusal: RefusedContainer) -> Grounds:
        """How a refusal came about."""
        return unpacked(refusal.trace, refusal, self.machine.topology)

    def cpus_of(self, allocation: Allocation) -> str:
        """Kernel list of the CPUs a container should have; empty when it is left alone."""
        return self._cpus_in(self.state, allocation)

    # --- inside -----------------------------------------------------------------------------------

    def _release(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        allocation = self.state.allocations.get(container_id)
        if allocation is None or allocation.ended:
            # Its successor in the pod took its place already, or its pod keeps its CPUs.
            self._forget(container_id)
            return ()
        released = admit.release(self.machine, self.state, container_id, self._now())
        self._swap(released.state, released.change)
        self._forget(container_id)
        self._look_if_foreign(allocation)
        self._soon.do(partial(self._tell.released, allocation, partial(self._cpus_in, self.state)))
        return released.updates

    def _swap(self, after: NodeState, change: StateChange) -> None:
        before = self.state
        broken = step_violations(before, after, self.machine.topology, self.machine.settings)
        if broken:
            self._tell.broken(broken)
        self.checkpoint.write(before, after, change)
        self.state = after
        withheld = before.withheld_bits
        if withheld:
            self.narrowed_at = self._now()
        if withheld != after.withheld_bits:
            self.pool_changes += 1
            self._soon.do(self._foreign.look)
        if self.starts.begun:
            self._settle_all()
        self.notify()

    def _look_if_foreign(self, allocation: Allocation | None) -> None:
        """Somebody else's pin came, changed or went: does it overlap with exclusive CPUs?"""
        if allocation is not None and allocation.kind is Kind.FOREIGN:
            self._soon.do(self._foreign.look)

    def _settle_all(self) -> None:
        for container_id in tuple(self.starts.begun):
            self._settle(container_id)

    def _settle(self, container_id: str) -> None:
        """Write the cgroup of a starting container that is meant to have other CPUs by now."""
        allocation = self.state.allocations.get(container_id)
        if allocation is None or allocation.kind is Kind.FOREIGN:
            return
        place, cpus = self.places.get(container_id, _NOWHERE), self.cpus_of(allocation)
        mems, every = str(allocation.mems), str(self._pool())
        written = self.starts.settle(container_id, place, cpus, every, mems)
        if written.changed:
            self._metrics.start_corrections.inc()
        if written.changed or written.problem:
            self._soon.do(partial(self._tell.corrected, allocation, cpus, written.problem))

    @property
    def _mark_key(self) -> str:
        return f"{self.machine.settings.prefix}/{ASSIGNED}"

    def _with_mark(self, container: Container) -> Container:
        """With what its cgroup carries, as if its annotations did: it was created without us."""
        key, place = self._mark_key, CgroupPlace(container.cgroups_path, container.pid)
        if key in container.annotations or container.id in self.state.allocations:
            return container
        text = self._mark_of(place, key)
        if not text:
            return container
        return replace(container, annotations={**container.annotations, key: text})

    def _mark(self, container_id: str) -> None:
        """Write on its cgroup what no annotation of a running container can say."""
        allocation = self.state.allocations.get(container_id)
        place = self.places.get(container_id, _NOWHERE)
        if allocation is not None and not self.observe:
            text = assigned(allocation, self.cpus_of(allocation), self.machine.key)
            self._write_mark(place, self._mark_key, text)

    def _meet(self, pod: PodSandbox, container: Container) -> None:
        """Decide about one whose creation was not told us."""
        met = take_in(self.machine, self.state, pod, container, self._reading(), self._now())
        self._swap(met.state, met.change)
        self.starts.found(container)
        self._remember(met.updates)
        self._metrics.gap_containers.inc()
        if isinstance(met.decision, Admitted):
            self._admitted(met.decision, gap=True)
            self._look_if_foreign(met.decision.allocation)
        elif not (self.refusals and self.refusals[-1].tells_of(met.decision)):
            self._refused(met.decision, running=True)
        self._soon.do(partial(self.concern, tuple(u.container_id for u in met.updates), 0))
        self._soon.do(partial(self._mark, container.id))

    def _with_pending(self, updates: tuple[ContainerUpdate, ...]) -> tuple[ContainerUpdate, ...]:
        updates = self._pending.merged(updates)
        if updates:
            self._soon.do(lambda: self.concern([u.container_id for u in updates], len(updates)))
        return updates

    def _own_with_pending(
        self, container_id: str, own: ContainerUpdate | None
    ) -> ContainerUpdate | None:
        """An update that waits for this very container goes out with the answer, or is outdated."""
        waiting = self._pending.take(container_id)
        allocation = self.state.allocations.get(container_id)
        if waiting is None or allocation is None or allocation.kind is Kind.FOREIGN:
            return own
        if own is None:
            return waiting
        return own._replace(cpus=own.cpus or waiting.cpus, mems=own.mems or waiting.mems)

    def _remember(self, updates: Iterable[ContainerUpdate]) -> None:
        if not self.observe:
            self._pending.remember(updates)

    def _forget(self, container_id: str) -> None:
        self._traces.pop(container_id, None)
        self._pending.take(container_id)
        place, kept = self.places.pop(container_id, None), self.state.allocations.get(container_id)
        if place is not None and kept is not None:
            path = place.cgroups_path.replace(container_id, kept.pod_id)
            self._sandboxes[kept.pod_id] = CgroupPlace(path)
        self.starts.end(container_id)
        self.differences.forget(container_id)
        self._ended[container_id] = None
        if len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]

    def notify(self) -> None:
        """Tell listeners that something they show changed."""
        for listener in self._listeners:
            listener()

    def _admitted(self, decision: Admitted, *, gap: bool = False) -> None:
        self._traces.hold(decision.allocation, decision.trace)
        if decision.trace.ignored:
            self._soon.do(partial(self._tell.ignored, decision.trace))
        tell = partial(self._tell.admitted, decision, self.machine.topology, gap)
        if gap or not decision.allocation.preferred:
            allocation, observed = decision.allocation, self.observe
            notice = partial(self._tell.notice_placed, allocation, gap=gap, observed=observed)
            self._soon.do(tell, notice)
        else:
            self._soon.do(tell)

    def _refused(self, decision: Refused, *, running: bool = False) -> None:
        self.refused += 1
        if running:
            found = replace(decision.trace, steps=(decision.message, RUNNING))
            self._traces.hold(self.state.allocations[found.container.id], found)
        trace = self._keeper.keep(decision.trace)
        one = RefusedContainer.of(decision, at=self._now(), trace=trace, observed=self.observe)
        before = self._refusals.pop(one.key, None)
        self._refusals[one.key] = replace(one, count=before.count + 1) if before else one
        if len(self._refusals) > self._history:
            del self._refusals[next(iter(self._refusals))]
        self._tell.refused(decision, observed=self.observe)
        notice = partial(self._tell.notice_refused, observed=self.observe, running=running)
        self._soon.do(partial(notice, decision))
        self.notify()

    def _resized(
        self, allocation: Allocation, trace: Trace, before: Allocation | None = None
    ) -> None:
        self._traces.hold(allocation, trace)
        cpus = self._cpus_in(self.state, allocation)
        self._soon.do(partial(self._tell.resized, allocation, cpus, before))

    def _synchronized(self, outcome: Resynced, known: Mapping[str, Allocation]) -> None:
        if outcome.left_alone:
            cpus = self._cpus_in(outcome.state, outcome.left_alone[0])  # the same for all of them
            self._soon.do(*(partial(self._tell.placed, one, cpus, 0) for one in outcome.left_alone))
        gap = frozenset(outcome.gap)
        for decision in outcome.decisions:
            if isinstance(decision, Admitted):
                self._admitted(decision, gap=decision.allocation.container_id in gap)
            else:
                self._refused(decision, running=True)
        for allocation, trace in outcome.resized:
            self._resized(allocation, trace, known.get(allocation.container_id))
        for container_id in outcome.gone:
            self._forget(container_id)
        self._foreign.doubt(outcome)
        self._soon.do(self._foreign.look)
        self._tell.synchronized(outcome)

    def _pool(self) -> CPUSet:
        return self.state.pool(self.machine.topology, self.machine.settings)

    def _cpus_in(self, state: NodeState, allocation: Allocation) -> str:
        pool = state.pool(self.machine.topology, self.machine.settings)
        return str(effective_cpus(allocation, pool, self.machine.topology, state.withheld_bits))
