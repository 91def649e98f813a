"""The imperative shell: owns the node state; one plain method for each NRI event.

Every method runs to its end without an ``await``: decide → persist → swap → answer. Nothing else
writes the state, so nothing needs a lock, and a reader between two requests sees a whole decision
or none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.loop import Clock
from nri_numa.agent.reconcile import DriftTable, observe_cgroup_batch
from nri_numa.agent.room_searches import DeferredRoomSearches
from nri_numa.engine import admit, pod_admission
from nri_numa.engine.assigned import ASSIGNED_KEY, encode_assignment, is_signed
from nri_numa.engine.decision import Admitted, DecisionTrace, Rejected, Resized, Resynced
from nri_numa.engine.desired import Drift, NodeSnapshot, updates_between
from nri_numa.engine.explain.explanation import StoredExplanation, stored_explanation
from nri_numa.engine.foreign_pins import foreign_overlaps
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.rebalance import (
    StepwiseSearch,
    admit_by_moving,
    continued_move_search,
    fits_after_moves_text,
    move_purpose_text,
    move_text,
    nodes_short_of_memory,
    plan_headroom_moves,
)
from nri_numa.engine.resize import resize_container
from nri_numa.engine.resync import (
    admit_running,
    rebuild_node_state,
    reclassify_repaired_as_missed_starts,
)
from nri_numa.engine.state import (
    STRICT_POLICIES,
    Allocation,
    ContainerKind,
    NodeState,
    shared_group_key,
    state_invariant_violations,
    union_cpus,
)
from nri_numa.machine.cgroups import CgroupPlace, CgroupWrite, CgroupWriter, WriteOutcome
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.workload import (
    NO_CHANGED_IDS,
    ChangedStateIds,
    Container,
    ContainerUpdate,
    KubeletGrants,
    PodSandbox,
    PodTable,
    Resources,
)
from nri_numa.observe import logs
from nri_numa.observe.decisions import REJECTED_RUNNING_TEXT, DecisionReporter
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import NoticeLog, RequestDecisions
from nri_numa.observe.traces import PackedTrace, pack_trace, unpack_explanation

if TYPE_CHECKING:
    from nri_numa.agent.kubelet_sync import KubeletSync
    from nri_numa.agent.reconcile import Reconciler

RELEASE_UNSTARTED_AFTER_S: Final = 120.0
"""A start that takes longer is given up by the kubelet (its ``runtimeRequestTimeout``)."""
TASK_BATCH: Final = 25
"""Deferred tasks done, or cgroups widened, in one go: one to two milliseconds."""
MAX_LOGGED_UNTRUSTED_ANNOTATIONS: Final = 10
"""Doubted annotations of one synchronisation that get a line each."""
MAX_NAMED_CONTAINERS: Final = 5
"""Containers that one line names; a node may have hundreds."""
_MAX_REJECTIONS: Final = 256
"""Refusals that are kept."""
_MAX_ENDED_IDS: Final = 256
"""Ended containers whose ids are kept; the news of their start can only be moments late."""
_UNKNOWN_CGROUP_PLACE: Final = CgroupPlace()

log = logs.get_logger("foreign")


class RejectedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A refused container, kept as long as its pod so that the pod's author can ask why.

    Attributes:
        last_time: Unix time in seconds of the last refusal.
        count: how often it was refused for this reason: the kubelet tries again and again.
    """

    pod_id: str
    namespace: str
    pod: str
    container: str
    reason: str
    message: str
    last_time: float
    trace: PackedTrace
    observed: bool = False
    count: int = 1

    @property
    def rejection_key(self) -> tuple[str, str, str, str]:
        """The same for all refusals of a container for one reason."""
        return self.namespace, self.pod, self.container, self.reason


def _rejection_key_of(refused: Rejected) -> tuple[str, str, str, str]:
    pod, container = refused.trace.pod, refused.trace.container
    return pod.namespace, pod.name, container.name, refused.reason


class StartingCpuset(msgspec.Struct):
    """A container on its way from creation to the end of its start.

    A runtime takes down an update of such a container and applies it to no cgroup: containerd
    writes its own record, and the OCI runtime goes on with the record of before
    (container_start.go and container_update_resources.go, the same in 1.7 and 2.1). Two moments are
    left to put the cgroup right before the first instruction: at StartContainer it exists and the
    program does not run yet; from then to PostStartContainer every change is written at once.

    Attributes:
        cpus: kernel list that its cgroup was made with, or was given since; empty for all.
        mems: the same of its memory nodes.
    """

    cpus: str
    mems: str


class DeferredTasks:
    """What no request waits for: done in small pieces once the reply has left.

    Log lines keep the ``op`` of the request that they come from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Context, Callable[[], object]]] = deque()
        self._is_scheduled = False

    def add(self, *functions: Callable[[], object]) -> None:
        """Do this when the reply has left; what is added meanwhile has its turn a round later."""
        context = copy_context()
        for function in functions:
            self._waiting.append((context, function))
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        if self._waiting:
            self._is_scheduled = True
            self._clock.call_soon(self._run_task_batch)

    def _run_task_batch(self) -> None:
        try:
            for _ in range(min(len(self._waiting), TASK_BATCH)):
                context, function = self._waiting.popleft()
                context.run(function)
        finally:
            self._is_scheduled = False
            self._schedule()


class Agent:
    """Owns the state of the node.

    Args:
        cgroups: writes cgroups, and marks them.

    Attributes:
        current: the node state, which nothing else replaces.
        refused: how many were refused so far.
        sees_starts: whether every start is reported; over CRI a short life is not.
        cgroup_places: where the cgroups of live containers are, by container id.
        write_counts: how often the cgroups of live containers were to be written, by container id.
        starting: containers between their creation and the end of their start.
        unconfirmed_ids: containers whose cpuset the runtime may be writing, with other resources.
        widening: containers that may have more than their cgroups say.
        moves_memory: whether pages of containers can be moved from here.
        moving: of containers whose pages are being moved, from where to where, and bytes so far.
        creations: how many pods and containers began to be created.
        differences: what containers really have, where it is not what is meant.
    """

    def __init__(
        self,
        current: CurrentState,
        *,
        metrics: Metrics,
        clock: Clock,
        cgroups: CgroupWriter,
    ) -> None:
        self.current = current
        self._refusals: dict[tuple[str, str, str, str], RejectedContainer] = {}
        self.refused = 0
        self.notices = NoticeLog(clock.time)
        self.decided = RequestDecisions(clock.time)
        self.sees_starts = True
        self.cgroup_places: dict[str, CgroupPlace] = {}
        self.write_counts = Counter[str]()
        self.starting: dict[str, StartingCpuset] = {}
        self._begun: dict[str, None] = {}  # those of them whose cgroup exists
        self.unconfirmed_ids: set[str] = set()
        self.widening: dict[str, None] = {}
        self.moves_memory = False
        self.moving: dict[str, tuple[NUMASet, int, int]] = {}
        self.creations = 0
        self.reconciler: Reconciler | None = None
        self.kubelet: KubeletSync | None = None
        self.differences = DriftTable(metrics, clock, self)
        self._metrics = metrics
        self._now = clock.time
        self._clock = clock
        self._cgroups = cgroups
        self._decision_log = DecisionReporter(metrics, self.notices, self.decided)
        self._foreign = ForeignPinReporter(metrics)
        self._is_overlap_check_due = False
        self._tasks = DeferredTasks(clock)
        self._room_searches = DeferredRoomSearches(self, self._tasks.add)
        self._traces: dict[str, DecisionTrace | PackedTrace] = {}
        self._undecided: deque[tuple[PodSandbox, Container]] = deque()
        self._ended: dict[str, None] = {}

    # --- events of the runtime --------------------------------------------------------------------

    def create_container(self, pod: PodSandbox, container: Container) -> Admitted | Rejected | None:
        """Decide about a container before it exists; None leaves it as it is."""
        self.creations += 1
        before = self.current.state.allocations
        if self.kubelet is not None:
            self.kubelet.refresh_kubelet_grants()
        decision = pod_admission.admit_pod(self.current.snapshot(), pod, container)
        if isinstance(decision, Rejected):
            decision = self._admit_by_moving(decision)
            if isinstance(decision, Rejected):
                self._on_rejected(decision)
                if self.current.observe:
                    return None
                if decision.is_search_spent:
                    self._room_searches.add(decision)
                return decision
        else:
            one = decision.allocation
            keeps = one.exclusive or one.policy in STRICT_POLICIES
            self._replace_state(decision.state, decision.change, pod if keeps else None)
        for container_id in decision.change.containers:
            if container_id not in self.current.state.allocations:
                self._log_if_never_started(before.get(container_id))
                self._forget_container(container_id)
        self.cgroup_places[container.id] = CgroupPlace(container.cgroups_path, container.pid)
        self._on_admitted(decision)
        self._ended.pop(container.id, None)
        mems = decision.adjustment.mems or container.resources.mems
        self.starting[container.id] = StartingCpuset(decision.adjustment.cpus, mems)
        if self.current.observe:
            return None
        updates = decision.updates
        if decision.moves or not updates:
            return decision  # written before
        return replace(decision, updates=self._write_updates(updates))

    def _admit_by_moving(self, refused: Rejected) -> Admitted | Rejected:
        """Have others make room that can now; refused as before where that is not enough."""
        node = self.current.snapshot()
        problems, still = self._cgroup_write_problems(), self._immovable_ids()
        decide = partial(admit_by_moving, node, refused)
        found = decide(still | problems.keys())
        made: tuple[ContainerUpdate, ...] | str
        if isinstance(found, Rejected):
            if not problems or isinstance(decide(still), Rejected):
                return found
            made = next(iter(problems.values()))
        else:
            self._replace_state(found.state, found.change, refused.trace.pod)
            made = self._apply_moves(node.state, found, "room")
        if isinstance(made, str):
            return replace(refused, room_text=f"no room could be made: {made}")
        return replace(found, updates=made)

    def is_retry_expected(self, refused: Rejected) -> bool:
        """Whether a refused container is still to come: its pod is there, and it is not."""
        uid, name = refused.trace.pod.uid, refused.trace.container.name
        there = [a.container for a in self.current.state.allocations_of_pod(uid)]
        return _rejection_key_of(refused) in self._refusals and name not in there

    def new_room_search(self, refused: Rejected) -> StepwiseSearch[Admitted | Rejected]:
        """A search for room, by what is there now."""
        return continued_move_search(
            self.current.snapshot(), refused, self.immovable_ids(), is_deferred=True
        )

    def finish_search(self, refused: Rejected, found: Admitted | Rejected) -> None:
        """What a search found that went on after a refusal: some move, and the refusal says it."""
        if isinstance(found, Rejected):
            text = found.room_text
        elif self.immovable_ids().isdisjoint(m.after.container_id for m in found.moves):
            problem = self._move_for_newcomer(found, "room")
            text = (
                f"no room could be made: {problem}"
                if problem
                else fits_after_moves_text(found.moves)
            )
        else:
            text = ""
        one = self._refusals.get(key := _rejection_key_of(refused))
        if text and one is not None:
            message = replace(refused, room_text=text).message
            self._refusals[key] = replace(one, message=message)
            self._decision_log.log_room_found(refused.trace, text)
            self.current.notify()

    def restore_headroom(self, most: int) -> int:
        """Have some move, ``most`` of them, so that a request of ``room_keep`` would fit.

        Returns how many were to.
        """
        found = plan_headroom_moves(self.current.snapshot(), self.immovable_ids(), most)
        if found is None:
            return 0
        self._move_for_newcomer(found, "keep")
        return len(found.moves)

    def _move_for_newcomer(self, found: Admitted, reason: str) -> str:
        """Have some move for a container that is to come; returns what was in the way of it."""
        before = self.current.state
        self._replace_state(found.state, found.change)
        made = self._apply_moves(before, found, reason)
        if isinstance(made, str):
            return made
        self._request_check_of_unsent(made)
        return ""

    def nodes_short_of_free_memory(self, used: Mapping[str, Mapping[int, int]]) -> NUMASet:
        """As `nri_numa.engine.rebalance.nodes_short_of_memory`, by what is free now."""
        return nodes_short_of_memory(self.current.snapshot(), used)

    def immovable_ids(self) -> set[str]:
        """Those that cannot move now; any thread may call this."""
        return self._immovable_ids() | self._cgroup_write_problems().keys()

    def _immovable_ids(self) -> set[str]:
        return {
            i
            for i, a in self.current.state.allocations.items()
            if self.current.observe
            or not self.is_cgroup_settled(i)
            or i in self.unconfirmed_ids
            or (a.mems and not self.moves_memory)
        }

    def _cgroup_write_problems(self) -> dict[str, str]:
        """Movable containers whose cgroups cannot be written, and why."""
        found = {
            i: self._cgroups.unwritable_cpuset_reason(
                self.cgroup_places.get(i, _UNKNOWN_CGROUP_PLACE)
            )
            for i, a in self.current.state.allocations.items()
            if a.movable
        }
        return {i: problem for i, problem in found.items() if problem}

    def _apply_moves(
        self, before: NodeState, decision: Admitted, reason: str
    ) -> tuple[ContainerUpdate, ...] | str:
        """Write those that make room, so that nobody is where another comes; or all go back.

        Returns what the runtime has to write, or why there is no room.

        Others leave the CPUs that are needed, then each goes to where none is any more, and only
        then what is left over is given to who shares it.
        """
        moves = {m.after.container_id: m for m in reversed(decision.moves)}
        left = union_cpus(m.before.cpus for m in decision.moves if m.before.exclusive)
        wanted = {u.container_id: u for u in decision.updates}
        others = [u for i, u in wanted.items() if i not in moves]
        less = [(u, CPUSet.parse(u.cpus) - left) for u in others]
        kept = self._write_updates([u._replace(cpus=str(cpus) or u.cpus) for u, cpus in less])
        done = self.write_cgroups(
            {i: CgroupWrite(self.cgroup_places[i], wanted[i].cpus, wanted[i].mems) for i in moves}
        )
        if problems := [one.problem for one in done.values() if one.problem]:
            self._replace_state(
                replace(before, serial=self.current.state.serial + 1), decision.change
            )
            self.repair_cgroups([i for i in wanted if self.is_cgroup_settled(i)])
            self._request_check(wanted)
            return problems[0]
        more = [u for u in others if CPUSet.parse(u.cpus) & left]
        self._metrics.moves.labels(reason).inc(len(moves))
        for move in decision.moves:
            self._tasks.add(partial(self._write_assignment_mark, move.after.container_id))
            self._tasks.add(
                partial(
                    self._decision_log.log_moved,
                    move,
                    move_text(move),
                    move_purpose_text(move.after),
                )
            )
        every = {u.container_id: u for u in (*kept, *self._schedule_cpu_return(more))}
        return tuple(every.values())

    def finish_migration(self, container_id: str) -> CgroupWrite:
        """The memory of one that moved is where its CPUs are; returns what its cgroup gets now.

        `post_update_container` is called when that was written. The kernel may take seconds for it,
        and CPUs, which it has by now, may change meanwhile.
        """
        self.unconfirmed_ids.add(container_id)
        self.write_counts[container_id] += 1
        there = self.current.state.allocations[container_id].with_migration_finished
        after = self.current.state.without_allocation(container_id).with_allocation(there)
        self._replace_state(after, ChangedStateIds((container_id,), (there.pod_uid,)))
        return CgroupWrite(self.cgroup_places[container_id], "", str(there.mems))

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        """The cgroup of a container is there, and its program does not run yet."""
        if container.id in self._ended:
            return
        self.cgroup_places[container.id] = CgroupPlace(container.cgroups_path, container.pid)
        if container.id not in self.current.state.allocations:
            self._admit_unreported(pod, container)
        if self.current.observe:
            return
        if container.id in self.starting:
            self._begun[container.id] = None
        self._correct_starting(container.id)

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        """A container runs: what it has from now on is its cgroup's."""
        if container.id in self._ended:
            return  # late news: a program may end before the runtime says that it runs
        self.cgroup_places[container.id] = CgroupPlace(container.cgroups_path, container.pid)
        if container.id not in self.current.state.allocations:
            self._admit_unreported(pod, container)
        self.starting.pop(container.id, None)
        self._begun.pop(container.id, None)
        if (a := self.current.state.allocations.get(container.id)) is not None and a.movable:
            self.current.notify()  # from now on it may move
        self._tell_systemd([container.id])  # it may have been written while it started
        self._tasks.add(partial(self._request_check, (container.id,)))

    def update_container(
        self, pod: PodSandbox, container: Container, requested: Resources
    ) -> Resized | Rejected:
        """Decide about new resources of a live container."""
        if self.kubelet is not None:
            self.kubelet.refresh_kubelet_grants()
        before = self.current.state.allocations.get(container.id)
        outcome = resize_container(self.current.snapshot(), pod, container, requested)
        if isinstance(outcome, Rejected):
            self._on_rejected(outcome)
            return (
                Resized(state=self.current.state, container_update=None, trace=outcome.trace)
                if self.current.observe
                else outcome
            )
        if outcome.state is not self.current.state:
            self._replace_state(outcome.state, outcome.change, pod)
            allocation = self.current.state.allocations[container.id]
            self._on_resized(allocation, outcome.trace, before)
            self._schedule_overlap_report(before)
            self._schedule_overlap_report(allocation)
        kept = outcome.container_update.cpus if outcome.container_update is not None else ""
        if requested.cpus and before is not None and self.kubelet is not None:
            after = self.current.state.allocations[container.id]
            rewritten = self.kubelet.on_cpuset_rewritten
            self._tasks.add(partial(rewritten, before, after, requested.cpus, kept))
        if requested.cpus and kept:
            self._tasks.add(
                partial(
                    self._decision_log.log_requested_cpuset_overridden,
                    pod,
                    container,
                    requested.cpus,
                    kept,
                )
            )
        if self.current.observe:
            return Resized(state=outcome.state, container_update=None, trace=outcome.trace)
        self.unconfirmed_ids.add(container.id)
        return replace(outcome, updates=self._write_updates(outcome.updates))

    def post_update_container(self, container_id: str) -> None:
        """The runtime is through with an update; it may have written what was meant before."""
        self.unconfirmed_ids.discard(container_id)
        self._tasks.add(partial(self._write_assignment_mark, container_id))
        if not self.current.observe:
            self.repair_cgroups([container_id])
            self._tell_systemd([container_id])

    def stop_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        """Take back what a container has; unknown ids are ordinary."""
        return self._schedule_cpu_return(self._release_container(container_id))

    def remove_container(self, container_id: str) -> None:
        """A container is gone; normally it gave everything back when it stopped."""
        self._request_check_of_unsent(
            self._schedule_cpu_return(self._release_container(container_id))
        )

    def run_pod(self, pod: PodSandbox) -> None:
        """A pod's sandbox starts: exclusive CPUs of a pod that is placed as a whole are kept."""
        self.creations += 1
        kept = pod_admission.reserve_for_sandbox(self.current.snapshot(), pod)
        if kept.state is not self.current.state or self.current.state.may_reserve_for_pod(pod.uid):
            self._replace_state(
                kept.state, ChangedStateIds(kept.change.containers, (pod.uid,)), pod
            )
            self._request_check_of_unsent(self._write_updates(kept.updates))

    def stop_pod(self, uid: str, sandbox: str) -> None:
        """A pod's sandbox stopped: none of its containers comes again, or starts any more."""
        every = self.current.state.allocations_of_pod(uid)
        over = [a for a in every if a.reserved_at or a.container_id in self.starting]
        self._release_reservations([a for a in over if a.pod_id == sandbox])

    def release_expired_reservations(self) -> None:
        """Give back what pods have kept for too long, or have no use for; called every few seconds.

        A runtime reports no stop of a sandbox that is older than itself, over CRI none at all, and
        none to an agent that is away: the cgroup of the pod's latest sandbox shows it. Nor does it
        report a failed start, whose cgroup is not there.
        """
        state, reader, seconds = (
            self.current.state,
            self._cgroups.reader,
            self.current.machine.settings.reservation_seconds,
        )
        kept = [a for a in state.allocations.values() if a.reserved_at]
        waiting = [
            a for i in self.starting
            if (a := state.allocations.get(i)) and reader.is_removed(self.cgroup_places[i])
        ]  # fmt: skip
        sandboxes = {a.pod_uid: state.pods[a.pod_uid].sandbox_cgroup for a in (*kept, *waiting)}
        gone = {
            uid for uid, path in sandboxes.items() if path and reader.is_removed(CgroupPlace(path))
        }
        latest = self._now() - seconds
        latest_start = self._now() - max(seconds, RELEASE_UNSTARTED_AFTER_S)
        late = [a for a in waiting if a.assigned_at <= latest_start or a.pod_uid in gone]
        self._release_reservations(
            [a for a in kept if a.reserved_at <= latest or a.pod_uid in gone] + late
        )
        for allocation in late:  # should it start after all, it is met then
            self._ended.pop(allocation.container_id, None)

    def _release_reservations(self, kept: Sequence[Allocation]) -> None:
        if not kept:
            return
        released = admit.release_reservations(self.current.desired, kept)
        self._replace_state(released.state, released.change)
        for allocation in kept:
            self._forget_container(allocation.container_id)
            self._decision_log.log_reservation_released(allocation)
        self._request_check_of_unsent(self._schedule_cpu_return(released.updates))

    def remove_pod(self, uid: str, sandbox: str) -> None:
        """A sandbox is gone, and with it containers that were never reported stopped."""
        self._filter_refusals(lambda one: one.pod_id != sandbox)
        before, released = self.current.state, admit.forget_pod(self.current.desired, uid, sandbox)
        if released.state is self.current.state:
            return
        self._replace_state(released.state, released.change)
        for container_id in released.change.containers:
            self._forget_container(container_id)
            self._schedule_overlap_report(before.allocations.get(container_id))
        self._request_check_of_unsent(self._schedule_cpu_return(released.updates))

    def synchronize(
        self, pods: PodTable | Iterable[PodSandbox], containers: Sequence[Container]
    ) -> tuple[ContainerUpdate, ...]:
        """Compare notes with the runtime; see `nri_numa.engine.resync`."""
        end = self._clock.monotonic() + self.current.synchronize_budget_s
        pods = pods if isinstance(pods, PodTable) else PodTable.from_pods(pods)
        self._filter_refusals(lambda one: one.pod_id in pods.uids)
        unmarked = [
            c.id for c in containers if self._assignment_annotation_key not in c.annotations
        ]
        containers = [self._with_annotation_from_cgroup(c) for c in containers]
        node = self.current.snapshot()
        outcome = rebuild_node_state(
            node, pods, containers, in_time=lambda: self._clock.monotonic() < end
        )
        before = self.current.state
        self._replace_state(self._with_sandbox_cgroups(outcome.state, pods), outcome.change)
        self.cgroup_places = {c.id: CgroupPlace(c.cgroups_path, c.pid) for c in containers}
        # Whose creation was decided and whose start we never saw: our answer may not have arrived.
        unsure = frozenset(self.starting)
        self.starting, self._begun = {}, {}
        if not self.current.observe:
            for container in containers:
                if container.starting:
                    self._track_unreported_start(container)
            self._correct_all_starting()
        self.unconfirmed_ids, self.widening = set(), {}
        if outcome.adopted:  # we may have narrowed them for an owner that is gone
            self.current.record_narrower_pool()
        updates, outcome = self._write_synchronized_cgroups(
            reclassify_repaired_as_missed_starts(outcome, unsure)
        )
        state, topology, settings = (
            outcome.state,
            self.current.machine.topology,
            self.current.machine.settings,
        )
        self._tasks.add(
            lambda: self._decision_log.log_invariant_violations(
                state_invariant_violations(state, topology, settings)
            )
        )
        self._on_synchronized(outcome, before.allocations)
        if (
            not self.current.synchronized
        ):  # an earlier process may have been killed before it told systemd
            self._tell_systemd(self.cgroup_places)
        self.current.set_synchronized()
        self._undecided = deque(outcome.undecided)
        if self._undecided:
            self._tasks.add(self._admit_next_undecided)
        later = {container.id for _, container in outcome.undecided}
        self._tasks.add(
            *(partial(self._write_assignment_mark, i) for i in unmarked if i not in later)
        )
        self._request_check(())
        return updates

    def _admit_next_undecided(self) -> None:
        """One stranger that Synchronize had no time for; the next one follows by itself."""
        if not self._undecided:
            return  # a later Synchronize had time for all of them
        pod, container = self._undecided.popleft()
        self._tasks.add(self._admit_next_undecided)
        known = self.current.state.allocations.get(container.id)
        if known is None or not known.is_undecided:
            return  # it is gone, or was decided about since
        met = admit_running(self.current.snapshot(), pod, container)
        decision = met.decision
        if isinstance(decision, Rejected):
            self._on_rejected(decision, running=True)
            return
        self._replace_state(decision.state, decision.change, pod)
        gap = decision.allocation.kind not in (ContainerKind.UNPINNED, ContainerKind.FOREIGN)
        if gap:
            self._metrics.gap_containers.inc()
        self._on_admitted(decision, gap=gap)
        self._request_check_of_unsent(self._write_updates(met.updates))
        self._write_assignment_mark(container.id)

    # --- changes of our own ----------------------------------------------------------------------

    def apply_grants(self, grants: KubeletGrants) -> None:
        """The kubelet granted something else: who shares CPUs makes room, or gets it back."""
        before = self.current.desired
        self._replace_state(self.current.state.with_kubelet(grants), NO_CHANGED_IDS)
        self._request_check_of_unsent(
            self._write_updates(updates_between(before, self.current.desired))
        )

    def record_enforced_quota(self, container_id: str, quota: int) -> None:
        """A refused resize has a CFS quota in force: another one than we lifted is left there."""
        allocation = self.current.state.allocations.get(container_id)
        if allocation is None or allocation.lifted_quota in (None, quota):
            return
        after = self.current.state.without_allocation(container_id)
        after = after.with_allocation(replace(allocation, lifted_quota=None))
        self._replace_state(after, ChangedStateIds((container_id,), (allocation.pod_uid,)))

    def apply_node_model(self, machine: NodeModel) -> tuple[ContainerUpdate, ...]:
        """CPUs went on- or offline, or settings changed: updates of containers with other CPUs."""
        before = self.current.desired
        self.current.replace_machine(machine)
        after = self.current.desired
        updates = sorted(updates_between(before, after))
        if before.pool != after.pool:
            # cgroup v1 takes CPUs that go offline out of every cpuset, and never puts them back.
            self.current.record_narrower_pool()
        self.current.notify()
        if self.current.observe:
            return ()
        self._correct_all_starting()
        self._request_check_of_unsent(self._write_updates(updates))
        return tuple(updates)

    # --- cgroups ----------------------------------------------------------------------------------

    def write_cgroups(self, wanted: Mapping[str, CgroupWrite]) -> dict[str, WriteOutcome]:
        """Write cgroups, by container; where systemd made them, it gets the same afterwards."""
        self.write_counts.update(wanted.keys())
        done = self._cgroups.write_cpusets(wanted)
        # What could not be written yet may still come to pass.
        self._tell_systemd(i for i, one in done.items() if one.changed or one.problem)
        return done

    def _tell_systemd(self, container_ids: Iterable[str]) -> None:
        if self.reconciler is not None:
            self.reconciler.queue_systemd_sync(container_ids)

    def find_corrections(self, container_ids: Iterable[str]) -> tuple[Drift, ...]:
        """Which of these containers that run have something else than is meant now."""
        places = [(i, self.cgroup_places[i]) for i in container_ids if self.is_cgroup_settled(i)]
        return observe_cgroup_batch(self._cgroups.reader, self.current.desired, places).corrections

    def repair_cgroups(self, container_ids: Iterable[str]) -> dict[str, WriteOutcome]:
        """Write the cgroups of those that have something else than is meant now."""
        return self.apply_corrections(
            c for c in self.find_corrections(container_ids) if not c.is_report_only
        )

    def apply_corrections(self, corrections: Iterable[Drift]) -> dict[str, WriteOutcome]:
        """Write the cgroups of these as is meant."""
        return self.write_cgroups(
            {
                c.container_id: CgroupWrite(
                    self.cgroup_places[c.container_id], str(c.cpus), str(c.mems)
                )
                for c in corrections
            }
        )

    def is_cgroup_settled(self, container_id: str) -> bool:
        """Whether a container is known, and its cgroup is meant to be as the state says by now."""
        under_way = container_id in self.starting or container_id in self.widening
        return container_id in self.cgroup_places and not under_way

    def _write_updates(self, updates: Sequence[ContainerUpdate]) -> tuple[ContainerUpdate, ...]:
        """Write what others are meant to have by now; returns what is left to the runtime.

        That is what cannot be written, and the record of those that have not started: should they
        start without us, they have what was meant.
        """
        if self.current.observe or not updates:
            return ()
        done = self.write_cgroups(
            {
                u.container_id: CgroupWrite(self.cgroup_places[u.container_id], u.cpus, u.mems)
                for u in updates
                if u.container_id in self.cgroup_places and u.container_id not in self.starting
            }
        )
        written = {i for i, one in done.items() if not (one.problem or one.missing)}
        left = [u for u in updates if u.container_id not in written]
        if self._cgroups.is_write_held_up:  # the runtime's writes would wait as well
            left = [u for u in left if u.container_id not in done]
        return tuple(left)

    def _schedule_cpu_return(
        self, updates: Sequence[ContainerUpdate]
    ) -> tuple[ContainerUpdate, ...]:
        """Give back what others lacked, once the reply has left; returns what it has to carry."""
        if self.current.observe or not updates:
            return ()
        waits = [u for u in updates if u.container_id not in self.starting]
        # What cannot be written goes with the reply; one stands for all.
        if waits and self._cgroups.unwritable_cpuset_reason(
            self.cgroup_places.get(waits[0].container_id, _UNKNOWN_CGROUP_PLACE)
        ):
            return self._write_updates(updates)
        idle = not self.widening
        self.widening.update(dict.fromkeys(u.container_id for u in waits))
        if idle and self.widening:
            self._tasks.add(self._return_cpus_batch)
        return tuple(u for u in updates if u.container_id in self.starting)

    def _return_cpus_batch(self) -> None:
        """Some of those that wait, each to what is meant at this moment."""
        ids = list(self.widening)[:TASK_BATCH]
        for container_id in ids:
            del self.widening[container_id]
        desired, known = self.current.desired, self.current.state.allocations
        meant = [
            ContainerUpdate(i, str(cpus))
            for i in ids
            if i in known and (cpus := desired.cpuset_with_pool_restored(known[i], has_cpuset=True))
        ]
        self._request_check_of_unsent(self._write_updates(meant))
        if self.widening:
            self._tasks.add(self._return_cpus_batch)

    def _write_synchronized_cgroups(
        self, outcome: Resynced
    ) -> tuple[tuple[ContainerUpdate, ...], Resynced]:
        """Write the cgroups of all that run; the updates left to the runtime, and what differed.

        What the runtime remembers of those that follow the shared pool is older than their cgroups.
        """
        reader = self._cgroups.reader
        if self.current.observe or not reader.detect_hierarchy():
            return (() if self.current.observe else outcome.updates), outcome
        done = self.repair_cgroups(self.cgroup_places)
        changed = {i for i, one in done.items() if one.changed}
        failed = {i for i, one in done.items() if one.problem}
        allocations = outcome.state.allocations
        left = [
            u
            for u in outcome.updates
            if shared_group_key(allocations[u.container_id]) is None
            or u.container_id in failed | self.starting.keys()
            or not reader.directory_of(self.cgroup_places[u.container_id])
        ]
        changed |= {u.container_id for u in left}.intersection(outcome.repaired)
        changed -= set(outcome.missed_starts)
        repaired = tuple(i for i in outcome.adopted if i in changed)
        return tuple(left), replace(outcome, repaired=repaired)

    def _request_check_of_unsent(self, left: Sequence[ContainerUpdate]) -> None:
        """No reply carries what is left; who has not started is put right at its start."""
        self._request_check([u.container_id for u in left if u.container_id not in self.starting])

    def _request_check(self, container_ids: Collection[str]) -> None:
        """Have these looked at: what we meant them to have may not have arrived."""
        if self.reconciler is not None and not self.current.observe:
            self.reconciler.request_check(container_ids)

    # --- looking ----------------------------------------------------------------------------------

    def explanation_of(self, container_id: str) -> StoredExplanation | None:
        """How the decision about a live container came about; None for an adopted one."""
        allocation, kept = (
            self.current.state.allocations.get(container_id),
            self._traces.get(container_id),
        )
        if allocation is None or kept is None:
            return None
        return (
            self._unpack_trace(kept, allocation)
            if isinstance(kept, PackedTrace)
            else stored_explanation(kept)
        )

    def explanation_of_refusal(self, refusal: RejectedContainer) -> StoredExplanation:
        """How a refusal came about."""
        return self._unpack_trace(refusal.trace, refusal)

    def _unpack_trace(
        self, trace: PackedTrace, of: Allocation | RejectedContainer
    ) -> StoredExplanation:
        who = of.namespace, of.pod, of.container
        return unpack_explanation(trace, who, self.current.machine.topology.distance)

    def packed_traces(self) -> dict[str, PackedTrace]:
        """What is kept of the decisions about live containers, by container id."""
        return {i: kept for i, kept in self._traces.items() if isinstance(kept, PackedTrace)}

    def restore_traces(
        self, traces: Mapping[str, PackedTrace], refusals: Iterable[RejectedContainer]
    ) -> None:
        """Know again what an earlier run of ours kept; only before the first event."""
        self._traces |= traces
        self._refusals.update((one.rejection_key, one) for one in refusals)

    @property
    def rejections(self) -> tuple[RejectedContainer, ...]:
        """The latest refused containers of pods that are there, oldest first."""
        return tuple(self._refusals.values())

    def _filter_refusals(self, wanted: Callable[[RejectedContainer], bool]) -> None:
        self._refusals = {one.rejection_key: one for one in self.rejections if wanted(one)}

    # --- inside -----------------------------------------------------------------------------------

    def _release_container(self, container_id: str) -> tuple[ContainerUpdate, ...]:
        allocation = self.current.state.allocations.get(container_id)
        if allocation is None or allocation.reserved_at:
            # Its successor in the pod took its place already, or its pod keeps its CPUs.
            self._forget_container(container_id)
            return ()
        self._log_if_never_started(allocation)
        released = admit.release_container(self.current.desired, container_id, self._now())
        self._replace_state(released.state, released.change)
        self._forget_container(container_id)
        self._schedule_overlap_report(allocation)
        self._tasks.add(
            partial(
                self._decision_log.log_released,
                allocation,
                partial(self._allocation_cpus_in_state, self.current.state),
            )
        )
        return released.updates

    def _replace_state(
        self, after: NodeState, change: ChangedStateIds, pod: PodSandbox | None = None
    ) -> None:
        """Put a decision on disk and in force; ``pod`` is the one that it is about."""
        current = self.current
        if pod is not None and after.may_reserve_for_pod(pod.uid):
            after = self._with_sandbox_cgroup(after, pod)
        violations, is_pool_changed = current.replace_state(after, change)
        if violations:
            self._decision_log.log_invariant_violations(violations)
        if is_pool_changed:
            self._schedule_overlap_check()
        if self._begun:
            self._correct_all_starting()
        current.notify()

    def _with_sandbox_cgroup(self, state: NodeState, pod: PodSandbox) -> NodeState:
        """Remember where the cgroup of a pod's sandbox is, if it is there.

        Not every runtime makes one for each sandbox: that one is not there proves something only
        where it was.
        """
        record, path = state.pods[pod.uid], pod.cgroups_path
        if path == record.sandbox_cgroup or not path:
            return state
        if not self._cgroups.reader.directory_of(CgroupPlace(path)):
            return state
        return state.with_pod(replace(record, sandbox_cgroup=path))

    def _with_sandbox_cgroups(self, state: NodeState, pods: PodTable) -> NodeState:
        """`_with_sandbox_cgroup` for sandboxes that are new to us."""
        known = self.current.state.pods if self.current.synchronized else {}
        keep = {
            a.pod_uid
            for a in state.allocations.values()
            if a.exclusive or a.policy in STRICT_POLICIES
        }
        for pod_id, uid in pods.uids.items():
            if uid in keep and (uid not in known or known[uid].pod_id != pod_id):
                state = self._with_sandbox_cgroup(state, pods[pod_id])
        return state

    def _schedule_overlap_report(self, allocation: Allocation | None) -> None:
        """A foreign pin came, changed or went: does it overlap with exclusive CPUs?"""
        if allocation is not None and allocation.kind is ContainerKind.FOREIGN:
            self._schedule_overlap_check()

    def _schedule_overlap_check(self) -> None:
        if not self._is_overlap_check_due:
            self._is_overlap_check_due = True
            self._tasks.add(self._report_foreign_overlaps)

    def _log_if_never_started(self, allocation: Allocation | None) -> None:
        """One ends, or another takes its place: was it created and did not come to its start?

        Another plugin may have wanted the same, or the OCI runtime failed. containerd reports an
        end, CRI-O nothing at all before the kubelet's next attempt. A pod that is deleted first
        stops its sandbox first.
        """
        if allocation is None or self.current.observe or not self.sees_starts:
            return
        container_id = allocation.container_id
        if container_id in self.starting and container_id not in self._begun:
            self._tasks.add(partial(self._decision_log.log_undone, allocation))

    def _report_foreign_overlaps(self) -> None:
        self._is_overlap_check_due = False
        self._foreign.report_overlaps(self.current.state)

    def _correct_all_starting(self) -> None:
        for container_id in tuple(self._begun):
            self._correct_starting(container_id)

    def _correct_starting(self, container_id: str) -> None:
        """Write the cgroup of a starting container that is meant to have other CPUs by now."""
        start = self.starting.get(container_id)
        allocation = self.current.state.allocations.get(container_id)
        if start is None or container_id not in self._begun or allocation is None:
            return
        if allocation.kind is ContainerKind.FOREIGN:
            return
        meant = self.current.desired.cpuset_with_pool_restored(
            allocation, has_cpuset=bool(start.cpus)
        )
        cpus, mems = str(meant), str(allocation.mems)
        new_cpus = "" if start.cpus == cpus else cpus
        new_mems = "" if start.mems == mems else mems
        if not (new_cpus or new_mems):
            return
        wanted = CgroupWrite(
            self.cgroup_places.get(container_id, _UNKNOWN_CGROUP_PLACE), new_cpus, new_mems
        )
        written = self.write_cgroups({container_id: wanted})[container_id]
        if not (written.problem or written.missing):
            start.cpus, start.mems = cpus or start.cpus, mems or start.mems
        if written.changed:
            self._metrics.start_corrections.inc()
        if written.changed or written.problem:
            self._tasks.add(
                partial(self._decision_log.log_start_correction, allocation, cpus, written.problem)
            )

    def _track_unreported_start(self, container: Container) -> None:
        """One that was created without us; it may be anywhere in its start."""
        has = container.resources
        self.starting[container.id] = StartingCpuset(has.cpus, has.mems)
        self._begun[container.id] = None

    @property
    def _assignment_annotation_key(self) -> str:
        return f"{self.current.machine.settings.prefix}/{ASSIGNED_KEY}"

    def _with_annotation_from_cgroup(self, container: Container) -> Container:
        """With what its cgroup carries, as if its annotations did: it was created without us.

        Or it moved since, and the runtime knows only where it was.
        """
        key, place = (
            self._assignment_annotation_key,
            CgroupPlace(container.cgroups_path, container.pid),
        )
        if container.id in self.current.state.allocations:
            return container
        text, resources = self._cgroups.reader.read_mark(place, key), container.resources
        if not text:
            return container
        if key in container.annotations:
            if not is_signed(text, container.id, self.current.machine.key):
                return container
            resources = replace(resources, cpus="", mems="")
        annotations = {**container.annotations, key: text}
        return replace(container, annotations=annotations, resources=resources)

    def _write_assignment_mark(self, container_id: str) -> None:
        """Write on its cgroup what no annotation of a running container can say."""
        allocation = self.current.state.allocations.get(container_id)
        place = self.cgroup_places.get(container_id, _UNKNOWN_CGROUP_PLACE)
        if allocation is not None and not self.current.observe:
            text = encode_assignment(
                allocation, self.current.cpus_of(allocation), self.current.machine.key
            )
            self._cgroups.write_mark(place, self._assignment_annotation_key, text)

    def _admit_unreported(self, pod: PodSandbox, container: Container) -> None:
        """Decide about one whose creation was not reported, or that was refused in vain."""
        met = admit_running(self.current.snapshot(), pod, container)
        self._replace_state(met.state, met.change, pod)
        if not self.current.observe:  # else it was refused in words only, and is no gap
            self._track_unreported_start(container)
            self._metrics.gap_containers.inc()
        self._request_check_of_unsent(self._write_updates(met.updates))
        last = self.rejections[-1] if self.rejections else None
        if isinstance(met.decision, Admitted):
            self._on_admitted(met.decision, gap=True)
        elif last is None or (last.pod_id, last.container) != (pod.id, container.name):
            self._on_rejected(met.decision, running=True)
        else:
            why = replace(met.decision.trace, decision_steps=(last.message,))
            self._hold_trace(self.current.state.allocations[container.id], why)
        self._tasks.add(partial(self._write_assignment_mark, container.id))

    def _forget_container(self, container_id: str) -> None:
        for known in (self._traces, self.starting, self._begun, self.widening, self.write_counts):
            known.pop(container_id, None)
        self.unconfirmed_ids.discard(container_id)
        self.cgroup_places.pop(container_id, None)
        if container_id in self.differences.known:
            self.differences.remove_repaired(container_id)
        self._ended[container_id] = None
        if len(self._ended) > _MAX_ENDED_IDS:
            del self._ended[next(iter(self._ended))]

    def _on_admitted(self, decision: Admitted, *, gap: bool = False) -> None:
        self._hold_trace(decision.allocation, decision.trace)
        if decision.allocation.kind is ContainerKind.FOREIGN:
            self._schedule_overlap_report(decision.allocation)
        if decision.trace.ignored:
            self._tasks.add(partial(self._decision_log.log_ignored_annotations, decision.trace))
        tell = partial(
            self._decision_log.log_placed_with_neighbours,
            decision,
            self.current.machine.topology,
            gap,
        )
        if gap or not decision.allocation.aligned:
            allocation, observed = decision.allocation, self.current.observe
            notice = partial(
                self._decision_log.notice_imperfect_placement,
                allocation,
                gap=gap,
                observed=observed,
            )
            self._tasks.add(tell, notice)
        else:
            self._tasks.add(tell)

    def _hold_trace(self, allocation: Allocation, trace: DecisionTrace) -> None:
        """Hold the trace of a decision, if it says more than one clause; packed soon after."""
        # Containers without any request would cost memory for an explanation of one clause.
        if allocation.is_pinned or not allocation.aligned:
            self._traces[allocation.container_id] = trace
            self._tasks.add(partial(self._pack_trace, allocation.container_id))

    def _pack_trace(self, container_id: str) -> None:
        trace = self._traces.get(container_id)
        if isinstance(trace, DecisionTrace):
            self._traces[container_id] = pack_trace(trace)

    def _on_rejected(self, decision: Rejected, *, running: bool = False) -> None:
        self.refused += 1
        if running:
            found = replace(
                decision.trace, decision_steps=(decision.message, REJECTED_RUNNING_TEXT)
            )
            self._hold_trace(self.current.state.allocations[found.container.id], found)
        one = RejectedContainer(
            pod_id=decision.trace.pod.id,
            namespace=decision.trace.pod.namespace,
            pod=decision.trace.pod.name,
            container=decision.trace.container.name,
            reason=decision.reason,
            message=decision.message,
            last_time=self._now(),
            trace=pack_trace(decision.trace),
            observed=self.current.observe,
        )
        before = self._refusals.pop(one.rejection_key, None)
        self._refusals[one.rejection_key] = replace(one, count=before.count + 1) if before else one
        if len(self._refusals) > _MAX_REJECTIONS:
            del self._refusals[next(iter(self._refusals))]
        self._decision_log.log_rejected(decision, observed=self.current.observe)
        notice = self._decision_log.notice_refused
        self._tasks.add(partial(notice, decision, observed=self.current.observe, running=running))
        self.current.notify()

    def _on_resized(
        self, allocation: Allocation, trace: DecisionTrace, before: Allocation | None = None
    ) -> None:
        self._hold_trace(allocation, trace)
        cpus = self._allocation_cpus_in_state(self.current.state, allocation)
        self._tasks.add(partial(self._decision_log.log_resized, allocation, cpus, before))

    def _on_synchronized(self, outcome: Resynced, known: Mapping[str, Allocation]) -> None:
        if outcome.unpinned:
            cpus = self._allocation_cpus_in_state(
                outcome.state, outcome.unpinned[0]
            )  # the same for all of them
            self._tasks.add(
                *(partial(self._decision_log.log_placed, one, cpus, 0) for one in outcome.unpinned)
            )
        gap = frozenset(outcome.missed_starts)
        for decision in outcome.decisions:
            if isinstance(decision, Admitted):
                self._on_admitted(decision, gap=decision.allocation.container_id in gap)
            else:
                self._on_rejected(decision, running=True)
        for allocation, trace in outcome.resized:
            self._on_resized(allocation, trace, known.get(allocation.container_id))
        for container_id in outcome.removed:
            self._forget_container(container_id)
        self._foreign.report_untrusted(outcome)
        self._schedule_overlap_check()
        self._decision_log.log_synchronized(outcome)

    def _allocation_cpus_in_state(self, state: NodeState, allocation: Allocation) -> str:
        return str(NodeSnapshot(self.current.machine, state).cpuset_of(allocation))


class ForeignPinReporter:
    """Says what is not ours and could hurt: pins that overlap with owners, doubtful annotations.

    Nothing is done about foreign pins (docs/adr/0018-foreign-containers.md), so an operator has to
    read of them. What was said is remembered, so that each overlap is said and counted once.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._said: dict[str, CPUSet] = {}

    def report_overlaps(self, state: NodeState) -> None:
        """Look at every container once; nothing that the runtime waits for calls this."""
        found = foreign_overlaps(state)
        self._metrics.foreign_on_owned.set(len(found))
        new = [i for i, cpus in found.items() if not cpus <= self._said.get(i, NO_CPUS)]
        self._said = dict(found)
        if not new:
            return
        self._metrics.foreign_overlaps.inc(len(new))
        shared = NO_CPUS
        for container_id in new:
            shared = shared | found[container_id]
        log.warning(
            "foreign containers may run on exclusive CPUs of others",
            containers=len(new),
            cpus=str(shared),
            names=names_text([state.allocations[i].full_name for i in new]),
        )

    def report_untrusted(self, outcome: Resynced) -> None:
        """Say which annotations were not believed, and which cpusets nothing explains."""
        disbelieved, unexplained = outcome.rejected_annotations, outcome.unknown_cpusets
        self._metrics.claims_disbelieved.inc(len(disbelieved))
        self._metrics.unexplained_pins.inc(len(unexplained))
        for sentence in disbelieved[:MAX_LOGGED_UNTRUSTED_ANNOTATIONS]:
            log.warning("annotation not believed", problem=sentence)
        if len(disbelieved) > MAX_LOGGED_UNTRUSTED_ANNOTATIONS:
            more = len(disbelieved) - MAX_LOGGED_UNTRUSTED_ANNOTATIONS
            log.warning("more annotations not believed", containers=more)
        if unexplained:
            log.warning(
                "the origin of these cpusets is unknown: they are treated as pins of others, "
                "and their CPUs may become exclusive to others",
                containers=len(unexplained),
                names=names_text(unexplained),
            )


def names_text(names: Sequence[str]) -> str:
    """The first few names, in order, and how many more there are."""
    shown = sorted(names)[:MAX_NAMED_CONTAINERS]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
