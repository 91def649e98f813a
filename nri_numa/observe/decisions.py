"""What is counted, logged and noted about decisions."""

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
    NoticedEventKind,
    NoticeLog,
    NoticeMessageReason,
    RequestDecisions,
)

log = get_logger("agent")

REJECTED_RUNNING_TEXT: Final = (
    "it was running already, so it stays unpinned until its pod is made anew"
)
"""Of a refused container that was started while the agent was away."""
UNDONE_TEXT: Final = (
    "admitted, and undone by the runtime before its start: another NRI plugin set the same, or the "
    "OCI runtime failed; the runtime's log says which"
)
MAX_NAMED_NEIGHBOURS: Final = 5
"""Neighbours of one line that are named; the others are counted."""


def allocation_log_fields(allocation: Allocation, cpus: str) -> dict[str, object]:
    """A container and what it has; ``cpus`` is the kernel list it should have now."""
    return {
        "pod": f"{allocation.namespace}/{allocation.pod}",
        "container": allocation.container,
        "id": allocation.container_id[:12],
        "kind": str(allocation.kind),
        "cpus": cpus,
        "mems": str(allocation.mems),
        "policy": str(allocation.policy),
        "reason": allocation.reason,
    }


def affected_neighbours(decision: Admitted, topology: Topology) -> str:
    """Whose CPUs a decision changed, with their old and new sets; the first few by name."""
    before, after = decision.trace.pool_before, decision.trace.pool_after
    takes, own = decision.state.unavailable_bits, decision.allocation
    had = takes & ~(own.cpus | own.idle_siblings).bits if own.exclusive else takes
    named: list[str] = []
    for update in decision.updates[:MAX_NAMED_NEIGHBOURS]:
        allocation = decision.state.allocations.get(update.container_id)
        if allocation is None:
            continue
        key = shared_group_key(allocation)
        key = UNPINNED_GROUP_KEY if key is None else key
        old = shared_group_cpus(key, before, topology, had)
        new = shared_group_cpus(key, after, topology, takes)
        named.append(f"{allocation.full_name} {old} -> {new}")
    more = len(decision.updates) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


class DecisionReporter:
    """Counts and logs decisions, and notes what becomes a Kubernetes Event.

    Most of it is called once the reply has left.
    """

    def __init__(self, metrics: Metrics, notices: NoticeLog, requests: RequestDecisions) -> None:
        self._metrics = metrics
        self._notices = notices
        self._requests = requests

    def report_ignored_annotations(self, trace: DecisionTrace, *, observed: bool) -> None:
        """Annotations that are not permitted, or not in force for this container of the pod."""
        pod = trace.pod
        for what in trace.ignored:
            log.warning(
                "annotation ignored",
                pod=pod.full_name,
                container=trace.container.name,
                ignored=what,
            )
        if not observed:
            self._notices.add_notice(
                NoticedEventKind.IGNORED,
                "; ".join(trace.ignored),
                namespace=pod.namespace,
                pod=pod.name,
                pod_uid=pod.uid,
                container=trace.container.name,
            )

    def report_unmatched_annotations(
        self, pod: PodSandbox, reason: NoticeMessageReason, sentences: Sequence[str]
    ) -> None:
        """Say once, over restarts too, that annotations of a pod have no effect."""
        known = self._notices.ignored_annotations_of(pod.uid)
        if not sentences or any(one.reason == reason for one in known):
            return
        for sentence in sentences:
            log.warning(
                "annotation without effect", pod=pod.full_name, reason=reason, problem=sentence
            )
        self._notices.add_notice(
            NoticedEventKind.IGNORED,
            "; ".join(sentences),
            namespace=pod.namespace,
            pod=pod.name,
            pod_uid=pod.uid,
            container="",
            reason=reason,
        )

    def withdraw_unknown_containers(self, pod: PodSandbox) -> None:
        """A container that an annotation names was created after all."""
        for one in self._notices.ignored_annotations_of(pod.uid):
            if one.reason == NoticeMessageReason.UNKNOWN_CONTAINER:
                log.info("the container that an annotation names was created", pod=pod.full_name)
                self._notices.withdraw_notice(one)

    def log_placed_with_neighbours(self, decision: Admitted, topology: Topology, gap: bool) -> None:
        """A container was placed, and whose CPUs that moved."""
        updates = len(decision.updates)
        allocation = decision.allocation
        for warning in decision.warnings:
            log.warning(
                "container placed as listed, which may not be meant",
                pod=f"{allocation.namespace}/{allocation.pod}",
                container=allocation.container,
                detail=warning,
            )
        self.log_placed(allocation, decision.adjustment.cpus, updates, gap=gap)
        if updates:
            trace = decision.trace
            log.info(
                "neighbours moved",
                **{"for": allocation.full_name},
                pool_before=str(trace.pool_before),
                pool=str(trace.pool_after),
                containers=updates,
                neighbours=affected_neighbours(decision, topology),
            )

    def log_moved(self, move: ContainerMove, where: str, for_whom: str) -> None:
        """A container is elsewhere; when its memory is, too, that is a notice of its own."""
        log.info("container moved", container=move.after.full_name, where=where, why=for_whom[1:])
        if not move.after.migrating_from:
            self._notices.add_for_allocation(
                move.after, NoticedEventKind.MOVED, f"moved {where}{for_whom}"
            )

    def log_placed(
        self, allocation: Allocation, cpus: str, updates: int, *, gap: bool = False
    ) -> None:
        """A container has CPUs; ``gap`` where it started while we were away."""
        if allocation.kind is ContainerKind.UNPINNED and not allocation.aligned:
            outcome, reason = "unpinned", str(allocation.unpinned_for or allocation.kind)
        elif allocation.aligned:
            outcome, reason = "admitted", str(allocation.kind)
        else:
            outcome, reason = "widened", str(allocation.kind)
        self._metrics.record_decision(outcome, reason, str(allocation.policy))
        self._record_request_decision(allocation, outcome, cpus)
        log.info(
            "container placed",
            outcome=outcome,
            updates=updates,
            **({"gap": True} if gap else {}),
            **allocation_log_fields(allocation, cpus),
        )

    def log_rejected(self, decision: Rejected, *, observed: bool) -> None:
        """A container was refused, or would have been while only observing."""
        trace = decision.trace
        policy = trace.requested.policy.value if trace.requested is not None else "none"
        self._metrics.record_decision("refused", decision.reason, policy)
        pod, container = trace.pod, trace.container
        self._requests.record_decision(
            container.id,
            (pod.namespace, pod.name, pod.uid, container.name),
            {"outcome": "refused", "policy": policy, "reason": decision.reason},
            "" if observed else decision.message,
        )
        log.warning(
            "container refused",
            pod=trace.pod.full_name,
            container=trace.container.name,
            reason=decision.reason,
            message=decision.message,
            observed=observed,
        )

    def log_room_found(self, trace: DecisionTrace, text: str) -> None:
        """A refused container fits, or would, as a search found out that went on afterwards."""
        pod, name = trace.pod, trace.container.name
        log.info("room found", pod=pod.full_name, container=name, room=text)
        self._notices.add_notice(
            NoticedEventKind.ROOM,
            text,
            namespace=pod.namespace,
            pod=pod.name,
            pod_uid=pod.uid,
            container=name,
        )

    def notice_refused(self, decision: Rejected, *, observed: bool, running: bool) -> None:
        """A notice of a refusal; none while only observing, when nothing is refused really."""
        if observed:
            return
        trace = decision.trace
        self._notices.add_notice(
            NoticedEventKind.UNPINNED if running else NoticedEventKind.REJECTED,
            f"{REJECTED_RUNNING_TEXT}: {decision.message}" if running else decision.message,
            namespace=trace.pod.namespace,
            pod=trace.pod.name,
            pod_uid=trace.pod.uid,
            container=trace.container.name,
            reason=decision.reason,
        )

    def notice_imperfect_placement(
        self, allocation: Allocation, *, gap: bool, observed: bool
    ) -> None:
        """Notices of a container that did not get the best, or got it after its start."""
        if observed:
            return
        unpinned = allocation.kind is ContainerKind.UNPINNED
        if not allocation.aligned:
            what = NoticedEventKind.UNPINNED if unpinned else NoticedEventKind.MISALIGNED
            self._notices.add_for_allocation(allocation, what, allocation.reason)
        if gap and not unpinned:
            message = "started while the agent could not place it; placed afterwards: "
            message += allocation.reason
            self._notices.add_for_allocation(allocation, NoticedEventKind.MISSED_START, message)

    def log_resized(self, allocation: Allocation, cpus: str, before: Allocation | None) -> None:
        """A container has another size: CPU in thousandths, memory in bytes, as ``old -> new``."""
        fields = allocation_log_fields(allocation, cpus)
        for name in ("cpu_milli", "memory_bytes") if before is not None else ():
            old, new = getattr(before, name), getattr(allocation, name)
            if old != new:
                fields[name] = f"{old} -> {new}"
        self._record_request_decision(allocation, "resized", cpus)
        log.info("container resized", **fields)
        text = "" if before is None else shared_again_text(before, allocation.cpu_milli)
        if text and not allocation.exclusive:
            log.warning("container no longer exclusive", **fields, problem=text)
            self._notices.add_for_allocation(allocation, NoticedEventKind.SHARED_AGAIN, text)

    def log_released(self, allocation: Allocation, cpus: Callable[[Allocation], str]) -> None:
        """A container gave back what it had; ``cpus`` makes the kernel list of it."""
        had = cpus(allocation)
        self._record_request_decision(allocation, "released", had)
        log.info("container released", **allocation_log_fields(allocation, had))

    def log_undone(self, allocation: Allocation) -> None:
        """The runtime asked us, and went on to no start: it does not say why to a plugin."""
        self._metrics.undone_creations.inc()
        log.warning(
            "container admitted, and undone by the runtime before its start",
            **allocation_log_fields(allocation, str(allocation.cpus)),
        )
        self._notices.add_for_allocation(allocation, NoticedEventKind.UNDONE, UNDONE_TEXT)

    def _record_request_decision(self, one: Allocation, outcome: str, cpus: str) -> None:
        if not self._requests.limit:
            return
        fields = {name: getattr(one, name) for name in ("kind", "mems", "policy", "reason")}
        who = (one.namespace, one.pod, one.pod_uid, one.container)
        self._requests.record_decision(
            one.container_id, who, {"outcome": outcome, "cpus": cpus, **fields}
        )

    def log_reservation_released(self, allocation: Allocation) -> None:
        """Its pod kept CPUs of a container that ended, and does no more."""
        log.info("kept CPUs released", **allocation_log_fields(allocation, str(allocation.cpus)))

    def report_reservation_taken(self, reserved: Allocation, taker: Allocation) -> None:
        """Say that what its pod had reserved gave way to a container of another pod."""
        fields = allocation_log_fields(reserved, str(reserved.cpus))
        log.info("reservation gave way", taken_by=taker.full_name, **fields)
        is_for_all = reserved.container == POD_RESERVATION_NAME
        self._notices.add_for_allocation(
            replace(reserved, container="") if is_for_all else reserved,
            NoticedEventKind.RESERVATION_RELEASED,
            f"{reserved_text(reserved)} gave way to {taker.full_name}",
        )

    def log_requested_cpuset_overridden(
        self, pod: PodSandbox, container: Container, asked: str, kept: str
    ) -> None:
        """A request would have changed the cpuset, and did not."""
        log.info(
            "cpuset of a request overridden",
            asked=asked,
            kept=kept,
            pod=pod.full_name,
            container=container.name,
            id=container.id[:12],
        )

    def log_start_correction(self, allocation: Allocation, cpus: str, problem: str) -> None:
        """The cgroup of a starting container was written, or could not be."""
        fields = allocation_log_fields(allocation, cpus)
        if problem:
            # Its start goes on; what it really has is read as soon as it runs.
            event = "cgroup of a starting container not written"
            log.warning(event, problem=problem, **fields)
        else:
            log.info("corrected before it runs", **fields)

    def log_synchronized(self, outcome: Resynced) -> None:
        """Notes were compared with the runtime."""
        # Others may have run on exclusive CPUs meanwhile; the undecided are counted when decided.
        other = {*outcome.adopted, *(container.id for _, container in outcome.undecided)}
        narrowed = {u.container_id for u in outcome.updates if u.container_id not in other}
        gap = len(narrowed.union(outcome.missed_starts))
        self._metrics.gap_containers.inc(gap)
        self._metrics.drift_found.inc(len(outcome.repaired))
        self._metrics.drift_repaired.inc(len(outcome.repaired))
        for problem in outcome.problems:
            log.warning("synchronize", problem=problem)
        counts = {
            "containers": len(outcome.state.allocations),
            "adopted": len(outcome.adopted),
            "gap": gap,
            "repaired": len(outcome.repaired),
            "gone": len(outcome.removed),
            "updates": len(outcome.updates),
        }
        self._requests.record_decision("", (), {"outcome": "synchronized", **counts})
        log.info("synchronized", **counts)

    def log_invariant_violations(self, sentences: Sequence[str]) -> None:
        """Broken invariants are counted and said, never a reason to stop."""
        for sentence in sentences:
            self._metrics.invariant_violations.inc()
            log.error("invariant violated", violation=sentence)
