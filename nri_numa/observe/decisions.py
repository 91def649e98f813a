"""Reports of decisions: metrics, log lines and notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, ContainerMove, DecisionTrace, Rejected, Resynced
from nri_numa.engine.pod_reservation import reserved_text
from nri_numa.engine.resize import shared_again_text
from nri_numa.engine.state import (
    POD_RESERVATION_NAME,
    UNPINNED_GROUP_KEY,
    Allocation,
    ContainerKind,
    shared_group_cpus,
    shared_group_key,
)
from nri_numa.model.machine import Topology
from nri_numa.model.workload import Container, PodSandbox
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import (
    NoticedContainer,
    NoticedEventKind,
    NoticeLog,
    NoticeMessageReason,
    RequestDecisions,
    container_of_allocation,
)

log = get_logger("agent")

REJECTED_RUNNING_TEXT: Final = (
    "it was running already, so it stays unpinned until its pod is recreated"
)
"""Added to the rejection of a container that had started while the agent was not registered."""
UNDONE_TEXT: Final = (
    "admitted, but not started by the runtime: another NRI plugin set the same, or the "
    "OCI runtime failed; see the runtime's log"
)
MAX_NAMED_NEIGHBOURS: Final = 5
"""Neighbours named in one log line; the others are counted."""


def container_log_fields(allocation: Allocation) -> dict[str, object]:
    """Return the log fields that identify a container."""
    return {
        "pod": f"{allocation.namespace}/{allocation.pod}",
        "container": allocation.container,
        "id": allocation.container_id[:12],
    }


def _container_of_trace(trace: DecisionTrace) -> NoticedContainer:
    pod = trace.pod
    return NoticedContainer(pod.namespace, pod.name, pod.uid, trace.container.name)


def allocation_log_fields(allocation: Allocation, cpus: str) -> dict[str, object]:
    """Return the log fields of an allocation; ``cpus`` is the CPU list it should have now."""
    return {
        **container_log_fields(allocation),
        "kind": str(allocation.kind),
        "cpus": cpus,
        "mems": str(allocation.mems),
        "policy": str(allocation.policy),
        "reason": allocation.reason,
    }


def affected_neighbours(decision: Admitted, topology: Topology) -> str:
    """Return the containers whose CPUs a decision changed, old and new; the first few by name."""
    pool_before, pool_after = decision.trace.pool_before, decision.trace.pool_after
    new_allocation = decision.allocation
    unavailable_bits = unavailable_before = decision.state.unavailable_bits
    if new_allocation.exclusive:
        unavailable_before &= ~(new_allocation.cpus | new_allocation.idle_siblings).bits
    named: list[str] = []
    for update in decision.updates[:MAX_NAMED_NEIGHBOURS]:
        allocation = decision.state.allocations.get(update.container_id)
        if allocation is None:
            continue
        key = shared_group_key(allocation)
        key = UNPINNED_GROUP_KEY if key is None else key
        old_cpus = shared_group_cpus(key, pool_before, topology, unavailable_before)
        new_cpus = shared_group_cpus(key, pool_after, topology, unavailable_bits)
        named.append(f"{allocation.full_name} {old_cpus} -> {new_cpus}")
    unnamed_count = len(decision.updates) - len(named)
    return "; ".join(named) + (f"; and {unnamed_count} more" if unnamed_count else "")


class DecisionReporter:
    """Counts and logs decisions, and adds the notices that become Kubernetes Events.

    Most methods are called after the reply to the runtime was sent.
    """

    def __init__(self, metrics: Metrics, notices: NoticeLog, requests: RequestDecisions) -> None:
        self._metrics = metrics
        self._notices = notices
        self._requests = requests

    def report_ignored_annotations(self, trace: DecisionTrace, *, observed: bool) -> None:
        """Report annotations that are not permitted, or that do not apply to this container."""
        pod = trace.pod
        for annotation in trace.ignored:
            log.warning(
                "annotation ignored",
                pod=pod.full_name,
                container=trace.container.name,
                problem=annotation,
            )
        if not observed:
            self._notices.add_notice(
                _container_of_trace(trace), NoticedEventKind.IGNORED, "; ".join(trace.ignored)
            )

    def report_unmatched_annotations(
        self, pod: PodSandbox, reason: NoticeMessageReason, sentences: Sequence[str]
    ) -> None:
        """Report once, across restarts too, that annotations of a pod have no effect."""
        notices = self._notices.ignored_annotations_of(pod.uid)
        if not sentences or any(notice.reason == reason for notice in notices):
            return
        for sentence in sentences:
            log.warning(
                "annotation without effect", pod=pod.full_name, reason=reason, problem=sentence
            )
        self._notices.add_notice(
            NoticedContainer(pod.namespace, pod.name, pod.uid, ""),
            NoticedEventKind.IGNORED,
            "; ".join(sentences),
            reason=reason,
        )

    def withdraw_unknown_containers(self, pod: PodSandbox) -> None:
        """Withdraw the notice about a container that was unknown and has been created since."""
        for notice in self._notices.ignored_annotations_of(pod.uid):
            if notice.reason == NoticeMessageReason.UNKNOWN_CONTAINER:
                log.info("container named by annotation created", pod=pod.full_name)
                self._notices.withdraw_notice(notice)

    def log_placed_with_neighbours(
        self, decision: Admitted, topology: Topology, missed_start: bool
    ) -> None:
        """Log a placed container, and the containers whose CPUs changed because of it."""
        updates = len(decision.updates)
        allocation = decision.allocation
        for warning in decision.warnings:
            log.warning(
                "questionable list applied", **container_log_fields(allocation), problem=warning
            )
        self.log_placed(allocation, decision.adjustment.cpus, updates, missed_start=missed_start)
        if updates:
            trace = decision.trace
            log.info(
                "shared pool changed",
                **container_log_fields(allocation),
                pool_before=str(trace.pool_before),
                pool=str(trace.pool_after),
                update_count=updates,
                updated_containers=affected_neighbours(decision, topology),
            )

    def log_moved(self, move: ContainerMove, destination: str, purpose: str) -> None:
        """Log a move. The notice is added here only if no pages have to migrate."""
        log.info(
            "container moved", **container_log_fields(move.after), move=f"{destination}{purpose}"
        )
        if not move.after.migrating_from:
            self._notices.add_for_allocation(
                move.after, NoticedEventKind.MOVED, f"moved {destination}{purpose}"
            )

    def log_placed(
        self, allocation: Allocation, cpus: str, updates: int, *, missed_start: bool = False
    ) -> None:
        """Count and log a placed container; ``missed_start`` if it started unseen."""
        outcome, reason = "admitted" if allocation.aligned else "misaligned", str(allocation.kind)
        if allocation.kind is ContainerKind.UNPINNED and not allocation.aligned:
            outcome, reason = "unpinned", str(allocation.unpinned_for or allocation.kind)
        self._metrics.record_decision(outcome, reason, str(allocation.policy))
        self._record_request_decision(allocation, outcome, cpus)
        log.info(
            "container placed",
            outcome=outcome,
            update_count=updates,
            **({"missed_start": True} if missed_start else {}),
            **allocation_log_fields(allocation, cpus),
        )

    def log_rejected(self, decision: Rejected, *, observed: bool) -> None:
        """Count and log a rejection; with ``observed`` the container was left as it is."""
        trace = decision.trace
        policy = trace.requested.policy.value if trace.requested is not None else "none"
        self._metrics.record_decision("rejected", decision.reason, policy)
        self._requests.record_decision(
            trace.container.id,
            _container_of_trace(trace),
            {"outcome": "rejected", "policy": policy, "reason": decision.reason},
            "" if observed else decision.message,
        )
        log.warning(
            "container rejected",
            pod=trace.pod.full_name,
            container=trace.container.name,
            reason=decision.reason,
            problem=decision.message,
            observe=observed,
        )

    def log_room_found(self, trace: DecisionTrace, text: str) -> None:
        """Report that a search after the reply found room for a rejected container."""
        log.info("moves found", pod=trace.pod.full_name, container=trace.container.name, moves=text)
        self._notices.add_notice(_container_of_trace(trace), NoticedEventKind.ROOM, text)

    def notice_rejected(self, decision: Rejected, *, observed: bool, running: bool) -> None:
        """Add a notice of a rejection; none in observe mode, where nothing is rejected."""
        if observed:
            return
        self._notices.add_notice(
            _container_of_trace(decision.trace),
            NoticedEventKind.UNPINNED if running else NoticedEventKind.REJECTED,
            f"{REJECTED_RUNNING_TEXT}: {decision.message}" if running else decision.message,
            reason=decision.reason,
        )

    def notice_imperfect_placement(
        self, allocation: Allocation, *, missed_start: bool, observed: bool
    ) -> None:
        """Add notices of a misaligned or unpinned container, and of a missed start."""
        if observed:
            return
        unpinned = allocation.kind is ContainerKind.UNPINNED
        if not allocation.aligned:
            kind = NoticedEventKind.UNPINNED if unpinned else NoticedEventKind.MISALIGNED
            self._notices.add_for_allocation(allocation, kind, allocation.reason)
        if missed_start and not unpinned:
            message = "started while the agent could not place it; placed afterwards: "
            message += allocation.reason
            self._notices.add_for_allocation(allocation, NoticedEventKind.MISSED_START, message)

    def log_resized(
        self, allocation: Allocation, cpus: str, allocation_before: Allocation | None
    ) -> None:
        """Log a resize: millicores and bytes of memory, as ``old -> new``."""
        fields, text = allocation_log_fields(allocation, cpus), ""
        if allocation_before is not None:
            text = shared_again_text(allocation_before, allocation.cpu_milli)
            for name in ("cpu_milli", "memory_bytes"):
                old_amount, new_amount = getattr(allocation_before, name), getattr(allocation, name)
                if old_amount != new_amount:
                    fields[name] = f"{old_amount} -> {new_amount}"
        self._record_request_decision(allocation, "resized", cpus)
        log.info("container resized", **fields)
        if text and not allocation.exclusive:
            log.warning("exclusive CPUs lost", **fields, problem=text)
            self._notices.add_for_allocation(allocation, NoticedEventKind.SHARED_AGAIN, text)

    def log_released(self, allocation: Allocation, cpus: Callable[[Allocation], str]) -> None:
        """Log a released allocation; ``cpus`` returns its CPU list."""
        cpu_list = cpus(allocation)
        self._record_request_decision(allocation, "released", cpu_list)
        log.info("container released", **allocation_log_fields(allocation, cpu_list))

    def log_undone(self, allocation: Allocation) -> None:
        """Report an admitted container that never started; the runtime tells plugins no reason."""
        self._metrics.undone_creations.inc()
        log.warning(
            "container creation undone by runtime",
            **allocation_log_fields(allocation, str(allocation.cpus)),
        )
        self._notices.add_for_allocation(allocation, NoticedEventKind.UNDONE, UNDONE_TEXT)

    def _record_request_decision(self, allocation: Allocation, outcome: str, cpus: str) -> None:
        if not self._requests.limit:
            return
        fields = {name: getattr(allocation, name) for name in ("kind", "mems", "policy", "reason")}
        self._requests.record_decision(
            allocation.container_id,
            container_of_allocation(allocation),
            {"outcome": outcome, "cpus": cpus, **fields},
        )

    def log_reservation_released(self, allocation: Allocation) -> None:
        """Log the end of a pod reservation."""
        fields = allocation_log_fields(allocation, str(allocation.cpus))
        log.info("pod reservation released", **fields)

    def report_reservation_taken(self, reserved: Allocation, taker: Allocation) -> None:
        """Report that a pod reservation was released for a container of another pod."""
        fields = allocation_log_fields(reserved, str(reserved.cpus))
        log.info("pod reservation taken", taken_by=taker.full_name, **fields)
        is_pod_reservation = reserved.container == POD_RESERVATION_NAME
        self._notices.add_for_allocation(
            replace(reserved, container="") if is_pod_reservation else reserved,
            NoticedEventKind.RESERVATION_RELEASED,
            f"{reserved_text(reserved)} became free for {taker.full_name}",
        )

    def log_requested_cpuset_overridden(
        self, pod: PodSandbox, container: Container, requested_cpus: str, effective_cpus: str
    ) -> None:
        """Log a request whose cpuset was replaced by the desired one."""
        log.info(
            "requested cpuset overridden",
            requested_cpus=requested_cpus,
            actual_cpus=effective_cpus,
            pod=pod.full_name,
            container=container.name,
            id=container.id[:12],
        )

    def log_start_correction(self, allocation: Allocation, cpus: str, problem: str) -> None:
        """Log the write to the cgroup of a starting container; ``problem`` is empty on success."""
        fields = allocation_log_fields(allocation, cpus)
        if problem:
            # The start goes on; the actual cpuset is read as soon as the container runs.
            event = "starting container not corrected"
            log.warning(event, problem=problem, **fields)
        else:
            log.info("starting container corrected", **fields)

    def log_synchronized(self, outcome: Resynced) -> None:
        """Count and log the outcome of a Synchronize."""
        # These may have run on exclusive CPUs; undecided containers are counted when decided.
        excluded_ids = {*outcome.adopted, *(container.id for _, container in outcome.undecided)}
        narrowed = {u.container_id for u in outcome.updates if u.container_id not in excluded_ids}
        missed_starts = len(narrowed.union(outcome.missed_starts))
        self._metrics.missed_starts.inc(missed_starts)
        self._metrics.drift_found.inc(len(outcome.repaired))
        self._metrics.drift_repaired.inc(len(outcome.repaired))
        for problem in outcome.problems:
            log.warning("problem found while synchronizing", problem=problem)
        counts = {
            "container_count": len(outcome.state.allocations),
            "adopted": len(outcome.adopted),
            "missed_starts": missed_starts,
            "repaired": len(outcome.repaired),
            "removed": len(outcome.removed),
            "update_count": len(outcome.updates),
        }
        self._requests.record_decision("", (), {"outcome": "synchronized", **counts})
        log.info("synchronized", **counts)

    def log_invariant_violations(self, sentences: Sequence[str]) -> None:
        """Count and log broken invariants; they never stop the agent."""
        for sentence in sentences:
            self._metrics.invariant_violations.inc()
            log.error("invariant violated", problem=sentence)
