"""History of decisions: rejections, traces, notices.

A request records them; they are packed, written and logged after the reply was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from nri_numa.agent.current_state import CurrentState
from nri_numa.agent.loop import DeferredTasks
from nri_numa.engine.decision import Admitted, ContainerMove, DecisionTrace, Rejected, Resynced
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain.explanation import StoredExplanation, stored_explanation
from nri_numa.engine.foreign_pins import foreign_overlaps
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.rebalance import move_purpose_text, move_text
from nri_numa.engine.state import (
    Allocation,
    ContainerKind,
    NodeState,
    state_invariant_violations,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, union_cpus
from nri_numa.observe import logs
from nri_numa.observe.decisions import REJECTED_RUNNING_TEXT, DecisionReporter
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import NoticeLog, Rejection, RequestDecisions
from nri_numa.observe.traces import PackedTrace, pack_trace, unpack_explanation

MAX_LOGGED_UNTRUSTED_ANNOTATIONS: Final = 10
"""Rejected annotations of one Synchronize that are logged one by one."""
MAX_NAMED_CONTAINERS: Final = 5
"""Containers named in one log line; a node may have hundreds."""
_MAX_REJECTIONS: Final = 256
"""Number of stored rejections."""

log = logs.get_logger("foreign")


def _rejection_key_of(rejected: Rejected) -> tuple[str, str, str, str]:
    pod, container = rejected.trace.pod, rejected.trace.container
    return pod.namespace, pod.name, container.name, rejected.reason


class DecisionHistory:
    """Outcomes of requests, stored for `explain`, Events and spans.

    Args:
        max_decided_requests: requests stored for spans; 0 if nobody reads them.

    Attributes:
        notices: notices about containers; Events are made from them.
        decided: requests with their decisions, for spans.
        reporter: logs and counts decisions.
        rejected_count: number of rejections so far.
    """

    def __init__(
        self,
        current: CurrentState,
        tasks: DeferredTasks,
        metrics: Metrics,
        *,
        max_decided_requests: int = 0,
    ) -> None:
        self._current, self._tasks, self._metrics = current, tasks, metrics
        time, changed = current.clock.time, current.notify
        self.notices = NoticeLog(time, changed=changed)
        self.decided = RequestDecisions(time, limit=max_decided_requests, changed=changed)
        self.reporter = DecisionReporter(metrics, self.notices, self.decided)
        self.rejected_count = 0
        self._rejections: dict[tuple[str, str, str, str], Rejection] = {}
        self._traces: dict[str, DecisionTrace | PackedTrace] = {}
        self._foreign = ForeignPinReporter(metrics)
        self._is_overlap_check_due = False

    def explanation_of(self, container_id: str) -> StoredExplanation | None:
        """Return the explanation of a live container; None for an adopted one."""
        allocation = self._current.state.allocations.get(container_id)
        trace = self._traces.get(container_id)
        if allocation is None or trace is None:
            return None
        if isinstance(trace, DecisionTrace):
            return stored_explanation(trace)
        return self._unpack_trace(trace, allocation)

    def explanation_of_rejection(self, rejection: Rejection) -> StoredExplanation:
        """Return the explanation of a rejection."""
        return self._unpack_trace(rejection.trace, rejection)

    def _unpack_trace(self, trace: PackedTrace, item: Allocation | Rejection) -> StoredExplanation:
        names = item.namespace, item.pod, item.container
        return unpack_explanation(trace, names, self._current.machine.topology.distance)

    def packed_traces(self) -> dict[str, tuple[PackedTrace, Allocation]]:
        """Return the traces of live containers, by container id."""
        live = self._current.state.allocations
        return {
            i: (trace, live[i])
            for i, trace in self._traces.items()
            if isinstance(trace, PackedTrace) and i in live
        }

    def restore_records(
        self, traces: Mapping[str, PackedTrace], rejections: Iterable[Rejection]
    ) -> None:
        """Restore the history of an earlier run; only before the first event."""
        self._traces |= traces
        self._rejections.update((r.key, r) for r in rejections)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Latest rejections of existing pods, oldest first."""
        return tuple(self._rejections.values())

    # --- records ---------------------------------------------------------------------------------

    def record_admitted(self, decision: Admitted, *, missed_start: bool = False) -> None:
        """Store its trace, and have it logged; a missed start gets a notice, too."""
        allocation, trace, observed = decision.allocation, decision.trace, self._current.observe
        reporter, topology = self.reporter, self._current.machine.topology
        self.hold_trace(allocation, trace)
        self.check_overlaps_of(allocation)
        if trace.ignored:
            self._tasks.add(partial(reporter.report_ignored_annotations, trace, observed=observed))
        for reservation in () if observed else decision.released:
            self._tasks.add(partial(reporter.report_reservation_taken, reservation, allocation))
        self._tasks.add(
            partial(reporter.log_placed_with_neighbours, decision, topology, missed_start)
        )
        if missed_start or not allocation.aligned:
            notice = reporter.notice_imperfect_placement
            self._tasks.add(
                partial(notice, allocation, missed_start=missed_start, observed=observed)
            )

    def hold_trace(self, allocation: Allocation, trace: DecisionTrace) -> None:
        """Store the trace of a decision, if it explains anything; it is packed later."""
        # Containers without any request would cost memory for an explanation of one clause.
        if allocation.is_pinned or not allocation.aligned:
            self._traces[allocation.container_id] = trace
            self._tasks.add(partial(self._pack_trace, allocation.container_id))

    def _pack_trace(self, container_id: str) -> None:
        trace = self._traces.get(container_id)
        if isinstance(trace, DecisionTrace):
            self._traces[container_id] = pack_trace(trace)

    def record_rejected(self, decision: Rejected, *, running: bool = False) -> None:
        """Count, log and store a rejection; ``running`` if the container runs nevertheless."""
        self.rejected_count += 1
        trace, observed = decision.trace, self._current.observe
        if running:
            steps = decision.message, REJECTED_RUNNING_TEXT
            allocation = self._current.state.allocations[trace.container.id]
            self.hold_trace(allocation, replace(trace, decision_steps=steps))
        entry = Rejection(
            pod_id=trace.pod.id,
            namespace=trace.pod.namespace,
            pod=trace.pod.name,
            container=trace.container.name,
            reason=decision.reason,
            message=decision.message,
            last_time=self._current.clock.time(),
            trace=pack_trace(trace),
            observed=observed,
        )
        prior = self._rejections.pop(entry.key, None)
        self._rejections[entry.key] = replace(entry, count=prior.count + 1) if prior else entry
        if len(self._rejections) > _MAX_REJECTIONS:
            del self._rejections[next(iter(self._rejections))]
        self.reporter.log_rejected(decision, observed=observed)
        notice = self.reporter.notice_rejected
        self._tasks.add(partial(notice, decision, observed=observed, running=running))
        self._current.notify()

    def record_resized(
        self, allocation: Allocation, trace: DecisionTrace, prior: Allocation | None = None
    ) -> None:
        """Store its trace, and have it logged."""
        self.hold_trace(allocation, trace)
        cpus = self._cpus_in_state(self._current.state, allocation)
        self._tasks.add(partial(self.reporter.log_resized, allocation, cpus, prior))

    def record_synchronized(self, outcome: Resynced, prior: Mapping[str, Allocation]) -> None:
        """Record all decisions of a Synchronize; ``prior`` are the allocations before it."""
        if outcome.unpinned:
            # The same for all of them.
            cpus = self._cpus_in_state(outcome.state, outcome.unpinned[0])
            self._tasks.add(
                *(partial(self.reporter.log_placed, a, cpus, 0) for a in outcome.unpinned)
            )
        missed_ids = frozenset(outcome.missed_starts)
        for decision in outcome.decisions:
            if isinstance(decision, Admitted):
                is_missed_start = decision.allocation.container_id in missed_ids
                self.record_admitted(decision, missed_start=is_missed_start)
            else:
                self.record_rejected(decision, running=True)
        for allocation, trace in outcome.resized:
            self.record_resized(allocation, trace, prior.get(allocation.container_id))
        self._foreign.report_untrusted(outcome)
        self.schedule_overlap_check()
        self.reporter.log_synchronized(outcome)

    def record_moves(self, container_moves: Sequence[ContainerMove]) -> None:
        """Count moves, and have them logged."""
        self._metrics.container_moves.inc(len(container_moves))
        for move in container_moves:
            purpose = move_purpose_text(move.after)
            self._tasks.add(partial(self.reporter.log_moved, move, move_text(move), purpose))

    def record_released(self, allocation: Allocation, state_after: NodeState) -> None:
        """Have a released container logged."""
        self.check_overlaps_of(allocation)
        cpus_of = partial(self._cpus_in_state, state_after)
        self._tasks.add(partial(self.reporter.log_released, allocation, cpus_of))

    def record_room_found(self, rejected: Rejected, text: str) -> None:
        """Add the result of a search that ended after the rejection to its message."""
        key = _rejection_key_of(rejected)
        if (rejection := self._rejections.get(key)) is not None:
            message = replace(rejected, room_text=text).message
            self._rejections[key] = replace(rejection, message=message)
            self.reporter.log_room_found(rejected.trace, text)
            self._current.notify()

    def check_invariants(self, state: NodeState, machine: NodeModel) -> None:
        """Log violated invariants of a whole state."""
        violations = state_invariant_violations(state, machine.topology, machine.settings)
        self.reporter.log_invariant_violations(violations)

    # --- forgetting -------------------------------------------------------------------------------

    def has_rejection(self, rejected: Rejected) -> bool:
        """True while a rejection is stored."""
        return _rejection_key_of(rejected) in self._rejections

    def drop_trace(self, container_id: str) -> None:
        """Drop the trace of a container."""
        self._traces.pop(container_id, None)

    def retain_rejections(self, is_retained: Callable[[Rejection], bool]) -> None:
        """Drop all other rejections."""
        self._rejections = {r.key: r for r in self.rejections if is_retained(r)}

    # --- foreign pins -----------------------------------------------------------------------------

    def check_overlaps_of(self, allocation: Allocation | None) -> None:
        """Schedule an overlap check if a foreign pin was added, changed or removed."""
        if allocation is not None and allocation.kind is ContainerKind.FOREIGN:
            self.schedule_overlap_check()

    def schedule_overlap_check(self) -> None:
        """Schedule a search for foreign pins on exclusive CPUs, once."""
        if not self._is_overlap_check_due:
            self._is_overlap_check_due = True
            self._tasks.add(self._report_overlaps)

    def _report_overlaps(self) -> None:
        self._is_overlap_check_due = False
        self._foreign.report_overlaps(self._current.state)

    def _cpus_in_state(self, state: NodeState, allocation: Allocation) -> str:
        return str(NodeSnapshot(self._current.machine, state).cpuset_of(allocation))


class ForeignPinReporter:
    """Reports foreign pins that overlap exclusive CPUs, and rejected annotations.

    Foreign pins are never changed (docs/adr/0018-foreign-containers.md), so the operator is told.
    Each overlap is logged and counted once.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._said: dict[str, CPUSet] = {}

    def report_overlaps(self, state: NodeState) -> None:
        """Check every container; not called while the runtime waits."""
        overlaps = foreign_overlaps(state)
        self._metrics.foreign_on_exclusive_cpus.set(len(overlaps))
        new_ids = [i for i, cpus in overlaps.items() if not cpus <= self._said.get(i, NO_CPUS)]
        self._said = dict(overlaps)
        if not new_ids:
            return
        self._metrics.foreign_overlaps.inc(len(new_ids))
        log.warning(
            "foreign containers found on exclusive CPUs",
            container_count=len(new_ids),
            cpus=str(union_cpus(overlaps[i] for i in new_ids)),
            containers=names_text([state.allocations[i].full_name for i in new_ids]),
        )

    def report_untrusted(self, outcome: Resynced) -> None:
        """Report rejected annotations, and cpusets of unknown origin."""
        disbelieved, unexplained = outcome.rejected_annotations, outcome.unknown_cpusets
        self._metrics.assigned_annotations_rejected.inc(len(disbelieved))
        self._metrics.unknown_cpusets.inc(len(unexplained))
        for sentence in disbelieved[:MAX_LOGGED_UNTRUSTED_ANNOTATIONS]:
            log.warning("assigned annotation rejected", problem=sentence)
        if len(disbelieved) > MAX_LOGGED_UNTRUSTED_ANNOTATIONS:
            unlogged_count = len(disbelieved) - MAX_LOGGED_UNTRUSTED_ANNOTATIONS
            log.warning("more assigned annotations rejected", container_count=unlogged_count)
        if unexplained:
            log.warning(
                "unknown cpusets found",
                container_count=len(unexplained),
                containers=names_text(unexplained),
                problem="they count as foreign pins, and their CPUs may become exclusive to others",
            )


def names_text(names: Sequence[str]) -> str:
    """Return the first few names, in order, and the number of the others."""
    shown_names = sorted(names)[:MAX_NAMED_CONTAINERS]
    unnamed_count = len(names) - len(shown_names)
    return ", ".join(shown_names) + (f" and {unnamed_count} more" if unnamed_count else "")
