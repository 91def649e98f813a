"""What is counted, logged and noted about decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from nri_numa.engine.decision import Admitted, Move, Refused, Resynced, Trace
from nri_numa.engine.state import UNBOUND_GROUP, Allocation, Kind, group_cpus, group_of
from nri_numa.model.machine import Topology
from nri_numa.model.workload import Container, PodSandbox
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import DecidedRequests, Notices, What

log = get_logger("agent")

RUNNING: Final = "it was running already, so it stays unpinned until its pod is made anew"
"""Of a refused container that was started while the agent was away."""
UNDONE_TEXT: Final = (
    "admitted, and undone by the runtime before its start: another NRI plugin set the same, or the "
    "OCI runtime failed; the runtime's log says which"
)
NAMED: Final = 5
"""Neighbours of one line that are named; the others are counted."""


def fields_of(allocation: Allocation, cpus: str) -> dict[str, object]:
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


def neighbours_of(decision: Admitted, topology: Topology) -> str:
    """Whose CPUs a decision changed, with their old and new sets; the first few by name."""
    before, after = decision.trace.pool_before, decision.trace.pool_after
    takes, own = decision.state.withheld_bits, decision.allocation
    had = takes & ~(own.cpus | own.idle).bits if own.owned else takes
    named: list[str] = []
    for update in decision.updates[:NAMED]:
        allocation = decision.state.allocations.get(update.container_id)
        if allocation is None:
            continue
        key = group_of(allocation)
        key = UNBOUND_GROUP if key is None else key
        old = group_cpus(key, before, topology, had)
        new = group_cpus(key, after, topology, takes)
        named.append(f"{allocation.full_name} {old} -> {new}")
    more = len(decision.updates) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


class DecisionLog:
    """Counts and logs decisions, and notes what becomes a Kubernetes Event.

    Most of it is called once the reply has left.
    """

    def __init__(self, metrics: Metrics, notices: Notices, requests: DecidedRequests) -> None:
        self._metrics = metrics
        self._notices = notices
        self._requests = requests

    def ignored(self, trace: Trace) -> None:
        """Annotations that are not permitted, and that the operator wants ignored."""
        for what in trace.ignored:
            log.warning(
                "annotation ignored",
                pod=trace.pod.full_name,
                container=trace.container.name,
                ignored=what,
            )

    def admitted(self, decision: Admitted, topology: Topology, gap: bool) -> None:
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
        self.placed(allocation, decision.adjustment.cpus, updates, gap=gap)
        if updates:
            trace = decision.trace
            log.info(
                "neighbours moved",
                **{"for": allocation.full_name},
                pool_before=str(trace.pool_before),
                pool=str(trace.pool_after),
                containers=updates,
                neighbours=neighbours_of(decision, topology),
            )

    def moved(self, move: Move, where: str, for_whom: str) -> None:
        """A container is elsewhere; when its memory is, too, that is a notice of its own."""
        log.info("container moved", container=move.after.full_name, where=where, why=for_whom[1:])
        if not move.after.leaves:
            self._notices.about(move.after, What.MOVED, f"moved {where}{for_whom}")

    def placed(self, allocation: Allocation, cpus: str, updates: int, *, gap: bool = False) -> None:
        """A container has CPUs; ``gap`` where it started while we were away."""
        if allocation.kind is Kind.UNBOUND and not allocation.preferred:
            outcome, reason = "unpinned", allocation.reason.removeprefix("not pinned: ")
        elif allocation.preferred:
            outcome, reason = "admitted", str(allocation.kind)
        else:
            outcome, reason = "widened", str(allocation.kind)
        self._metrics.decision(outcome, reason, str(allocation.policy))
        self._decided(allocation, outcome, cpus)
        log.info(
            "container placed",
            outcome=outcome,
            updates=updates,
            **({"gap": True} if gap else {}),
            **fields_of(allocation, cpus),
        )

    def refused(self, decision: Refused, *, observed: bool) -> None:
        """A container was refused, or would have been while only observing."""
        trace = decision.trace
        policy = trace.requested.policy.value if trace.requested is not None else "none"
        self._metrics.decision("refused", decision.reason, policy)
        pod, container = trace.pod, trace.container
        self._requests.decided(
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

    def note_room(self, trace: Trace, text: str) -> None:
        """A refused container fits, or would, as a search found out that went on afterwards."""
        pod, name = trace.pod, trace.container.name
        log.info("room found", pod=pod.full_name, container=name, room=text)
        self._notices.add(
            What.ROOM,
            text,
            namespace=pod.namespace,
            pod=pod.name,
            pod_uid=pod.uid,
            container=name,
        )

    def notice_refused(self, decision: Refused, *, observed: bool, running: bool) -> None:
        """A notice of a refusal; none while only observing, when nothing is refused really."""
        if observed:
            return
        trace = decision.trace
        self._notices.add(
            What.UNPINNED if running else What.REFUSED,
            f"{RUNNING}: {decision.message}" if running else decision.message,
            namespace=trace.pod.namespace,
            pod=trace.pod.name,
            pod_uid=trace.pod.uid,
            container=trace.container.name,
            reason=decision.reason,
        )

    def notice_placed(self, allocation: Allocation, *, gap: bool, observed: bool) -> None:
        """Notices of a container that did not get the best, or got it after its start."""
        if observed:
            return
        unpinned = allocation.kind is Kind.UNBOUND
        if not allocation.preferred:
            what = What.UNPINNED if unpinned else What.WIDENED
            self._notices.about(allocation, what, allocation.reason)
        if gap and not unpinned:
            message = "started while the agent could not place it; placed afterwards: "
            message += allocation.reason
            self._notices.about(allocation, What.GAP, message)

    def resized(self, allocation: Allocation, cpus: str, before: Allocation | None) -> None:
        """A container has another size: CPU in thousandths, memory in bytes, as ``old -> new``."""
        fields = fields_of(allocation, cpus)
        for name in ("cpu_milli", "memory_bytes") if before is not None else ():
            old, new = getattr(before, name), getattr(allocation, name)
            if old != new:
                fields[name] = f"{old} -> {new}"
        self._decided(allocation, "resized", cpus)
        log.info("container resized", **fields)

    def released(self, allocation: Allocation, cpus: Callable[[Allocation], str]) -> None:
        """A container gave back what it had; ``cpus`` makes the kernel list of it."""
        had = cpus(allocation)
        self._decided(allocation, "released", had)
        log.info("container released", **fields_of(allocation, had))

    def undone(self, allocation: Allocation) -> None:
        """The runtime asked us, and went on to no start: it does not say why to a plugin."""
        self._metrics.undone_creations.inc()
        log.warning(
            "container admitted, and undone by the runtime before its start",
            **fields_of(allocation, str(allocation.cpus)),
        )
        self._notices.about(allocation, What.UNDONE, UNDONE_TEXT)

    def _decided(self, one: Allocation, outcome: str, cpus: str) -> None:
        if not self._requests.limit:
            return
        fields = {name: getattr(one, name) for name in ("kind", "mems", "policy", "reason")}
        who = (one.namespace, one.pod, one.pod_uid, one.container)
        self._requests.decided(one.container_id, who, {"outcome": outcome, "cpus": cpus, **fields})

    def let_go(self, allocation: Allocation) -> None:
        """Its pod kept CPUs of a container that ended, and does no more."""
        log.info("kept CPUs released", **fields_of(allocation, str(allocation.cpus)))

    def overridden(self, pod: PodSandbox, container: Container, asked: str, kept: str) -> None:
        """A request would have changed the cpuset, and did not."""
        log.info(
            "cpuset of a request overridden",
            asked=asked,
            kept=kept,
            pod=pod.full_name,
            container=container.name,
            id=container.id[:12],
        )

    def corrected(self, allocation: Allocation, cpus: str, problem: str) -> None:
        """The cgroup of a starting container was written, or could not be."""
        fields = fields_of(allocation, cpus)
        if problem:
            # Its start goes on; what it really has is read as soon as it runs.
            event = "cgroup of a starting container not written"
            log.warning(event, problem=problem, **fields)
        else:
            log.info("corrected before it runs", **fields)

    def synchronized(self, outcome: Resynced) -> None:
        """Notes were compared with the runtime."""
        # Others may have run on exclusive CPUs meanwhile; the undecided are counted when decided.
        other = {*outcome.adopted, *(container.id for _, container in outcome.undecided)}
        narrowed = {u.container_id for u in outcome.updates if u.container_id not in other}
        gap = len(narrowed.union(outcome.gap))
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
        self._requests.decided("", (), {"outcome": "synchronized", **counts})
        log.info("synchronized", **counts)

    def broken(self, sentences: Sequence[str]) -> None:
        """Broken invariants are counted and said, never a reason to stop."""
        for sentence in sentences:
            self._metrics.invariant_violations.inc()
            log.error("invariant violated", violation=sentence)
