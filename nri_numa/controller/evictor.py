"""Evictors: the pods to evict, their rate limits, and an Event for each. Pure.

All evictors use the Eviction API, which respects disruption budgets, with the pod's uid as a
precondition; a limit for each minute and for each workload; and an Event for each eviction.
`NUMANodeDrainEvictor` and `HostStealEvictor` empty NUMA nodes; for pods that their node rejects see
`nri_numa.controller.stuck_pods`. Each is an output in the sense of `nri_numa.publisher.outbox`.

The annotation ``assigned`` of pods (``publish.podAnnotation``) says which NUMA nodes a pod uses; a
pod that the agent has not pinned is not evicted.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from nri_numa.cluster.pods import controller_uid, is_replaced_after_eviction
from nri_numa.config.sections import CPUStealEviction, EvictionSection
from nri_numa.config.values import parse_duration
from nri_numa.kube.events import pod_event
from nri_numa.kube.requests import (
    APIRequest,
    Outcome,
    OutcomeKind,
    Resource,
    Verb,
    annotations_of,
)
from nri_numa.model.offline_capacity import (
    CPU_ID_LIMIT,
    DRAINED_ANNOTATION,
    NODE_EXISTING_NUMA_IDS_ANNOTATION,
    BadCapacity,
    format_id_list,
    parse_id_list,
    parse_ids_or_empty,
    parse_zone_id,
)
from nri_numa.publisher.outbox import Output, backoff_seconds
from nri_numa.publisher.topology import MEASURED_CAPACITY_FACTOR_ATTRIBUTE

WORKLOAD_WINDOW_S: Final = 3600.0
"""Seconds in which the evictions of one workload are counted."""
POD_LIST_INTERVAL_S: Final = 20.0
"""Seconds between two lists of the pods of a node that is emptied."""
RECOVERED_FACTOR: Final = 0.9
"""Measured factor at which a NUMA node is no longer degraded."""
DRY_RUN_TEXT: Final = "would be evicted (dry run)"
MAX_CANDIDATES_PER_TURN: Final = 4
"""Pods that are considered in one turn."""
MAX_EVICTION_RECORDS: Final = 65536
"""Evicted pods, and workloads; far more than are evicted in `WORKLOAD_WINDOW_S`."""


class EvictionBudget:
    """Evictions that the limits for all evictors together still allow.

    Evictions are one at a time: the replacement of a pod shows if another one fits.

    Attributes:
        next_at: time at which the next pod may be evicted.
    """

    def __init__(self, limits: EvictionSection, now_s: float) -> None:
        self.limits, self.next_at = limits, now_s
        self._evictions: dict[str, deque[float]] = {}

    def spend_eviction(self, now_s: float) -> None:
        """Count a requested eviction."""
        self.next_at = now_s + 60 / self.limits.max_per_minute

    def workload_allowed_at(self, workload: str, now_s: float) -> float:
        """Return when a workload's next pod may be evicted; the limit prevents eviction loops."""
        evictions = self._evictions.get(workload, deque[float]())
        is_allowed = len(evictions) < self.limits.max_per_workload_per_hour
        return now_s if is_allowed else max(now_s, evictions[0] + WORKLOAD_WINDOW_S)

    def record_workload(self, workload: str, now_s: float) -> None:
        """Record the eviction of a workload's pod."""
        if len(self._evictions) >= MAX_EVICTION_RECORDS:
            min_at = now_s - WORKLOAD_WINDOW_S
            self._evictions = {
                w: times for w, times in self._evictions.items() if times[-1] > min_at
            }
        max_evictions = self.limits.max_per_workload_per_hour
        self._evictions.setdefault(workload, deque(maxlen=max_evictions)).append(now_s)


@dataclass(slots=True, kw_only=True)
class EvictionCandidate:
    """A pod to evict.

    Attributes:
        workload: uid of the controller that creates the replacement.
        version: resourceVersion that the pod must still have; empty for any.
        retry_at: time at which the pod may be evicted.
    """

    namespace: str
    name: str
    uid: str
    node: str
    workload: str
    version: str = ""
    retry_at: float = 0.0
    failures: int = 0


CandidateT = TypeVar("CandidateT", bound=EvictionCandidate)


class Evictor(Output, Generic[CandidateT]):
    """Evicts the pods that a subclass selects.

    Attributes:
        reason, event_suffix: reason of the Events, and suffix of their names.
        counts_workload: the limit for a workload applies; it does not to an operator's drain.
        min_interval_s: seconds between two evictions of this evictor, beside the common rules.
        pods: pods to evict, by uid.

    Args:
        delay_s: seconds until the first eviction for a new reason.
    """

    reason = event_suffix = ""
    counts_workload = True
    min_interval_s = 0.0

    def __init__(self, prefix: str, budget: EvictionBudget, delay_s: float, now_s: float) -> None:
        super().__init__()
        self.pods: dict[str, CandidateT] = {}
        self._prefix, self._budget, self._delay_s = prefix, budget, delay_s
        self._not_before = now_s
        self._evicted: dict[str, None] = {}
        # The pod of the last request; a watch may report its end before the answer comes.
        self._asked: CandidateT | None = None
        self._events: list[APIRequest] = []
        self._wall = 0.0

    # --- what a subclass selects ------------------------------------------------------------------

    def on_tick(self, now_s: float, wall: float) -> None:
        """Update what depends on time; `wall` is Unix time in seconds, for Events."""
        self._wall = wall

    def _next_pod_list_request(self, now_s: float) -> APIRequest | None:
        """Return a request for a list of pods that is due."""
        return None

    def _next_list_at(self) -> float:
        return float("inf")

    def _on_pod_list(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        """Handle the outcome of a list of pods."""

    def _may_evict(self, pod: CandidateT, now_s: float) -> bool:
        """Return True if a pod may be evicted now; if not, `retry_at` is the next attempt."""
        return True

    def _eviction_reason(self, pod: CandidateT, now_s: float) -> str:
        """Return the reason for an eviction as a clause, for its Event."""
        raise NotImplementedError

    # --- requests ---------------------------------------------------------------------------------

    def pending_count(self) -> int:
        """Return the number of pods to evict."""
        return len(self.pods)

    def next_due_at(self) -> float:
        """Return the earliest time of the next request."""
        if self._events:
            return self.hold_until
        retry_at = min((pod.retry_at for pod in self.pods.values()), default=float("inf"))
        eviction_at = max(retry_at, self._next_eviction_at())
        return max(self.hold_until, min(self._next_list_at(), eviction_at))

    def _next_eviction_at(self) -> float:
        return max(self._budget.next_at, self._not_before)

    def _next_request(self, now_s: float) -> APIRequest | None:
        """Return a pending Event, the next eviction, or a list of pods."""
        if self._events:
            return self._events[0]
        if self._next_eviction_at() > now_s:
            return self._next_pod_list_request(now_s)
        # A pod whose eviction failed comes after the others, or at a low rate a pod with a
        # disruption budget would take every turn. Equal ones by namespace, name and uid.
        due_pods = sorted(
            (p for p in self.pods.values() if p.retry_at <= now_s),
            key=lambda p: (p.retry_at, p.namespace, p.name, p.uid),
        )
        for pod in due_pods[:MAX_CANDIDATES_PER_TURN]:
            allowed_at = self._workload_allowed_at(pod, now_s)
            if allowed_at > now_s:
                pod.retry_at = allowed_at
            elif self._may_evict(pod, now_s):
                self._asked = pod
                return self._eviction_request(pod)
        return self._next_pod_list_request(now_s)

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        if request.resource is Resource.EVENTS:
            self._events.pop(0)  # one attempt, whatever its outcome
            return
        if request.resource is Resource.PODS:
            self._on_pod_list(request, outcome, now_s, jitter)
            return
        self._budget.spend_eviction(now_s)
        self._not_before = now_s + self.min_interval_s
        pod = self._asked
        assert pod is not None  # noqa: S101  # the request was made from it
        if outcome.result is OutcomeKind.SUCCEEDED:
            self.pods.pop(pod.uid, None)
            if len(self._evicted) >= MAX_EVICTION_RECORDS:
                del self._evicted[next(iter(self._evicted))]
            self._evicted[pod.uid] = None
            self._record_eviction(pod, now_s)
            action_text = DRY_RUN_TEXT if self._budget.limits.dry_run else "evicted"
            note = f"{action_text}: {self._eviction_reason(pod, now_s)}"
            self._add_event(pod, self._event_reason(pod), note, self.event_suffix)
        elif outcome.result is OutcomeKind.MISSING:
            self.pods.pop(pod.uid, None)
        else:  # the pod has changed, or a disruption budget protects it
            pod.failures += 1
            pod.retry_at = now_s + backoff_seconds(pod.failures, jitter)

    def _workload_allowed_at(self, pod: CandidateT, now_s: float) -> float:
        """Return when a pod of this workload may be evicted; not after ``now_s`` for now."""
        if not self.counts_workload:
            return now_s
        return self._budget.workload_allowed_at(pod.workload, now_s)

    def _record_eviction(self, pod: CandidateT, now_s: float) -> None:
        if self.counts_workload:
            self._budget.record_workload(pod.workload, now_s)

    def _eviction_request(self, pod: CandidateT) -> APIRequest:
        conditions = {"uid": pod.uid}
        if pod.version:
            conditions["resourceVersion"] = pod.version
        options: dict[str, Any] = {"preconditions": conditions}
        if self._budget.limits.dry_run:
            options["dryRun"] = ["All"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": options,
        }
        return self._create_request(Resource.EVICTIONS, body)

    def _event_reason(self, pod: CandidateT) -> str:
        return self.reason

    def _add_event(self, pod: CandidateT, reason: str, note: str, suffix: str) -> None:
        body = pod_event(
            pod.namespace,
            pod.name,
            pod.uid,
            id=f"{pod.uid[:8]}.{suffix}",
            event_time=self._wall,
            text=note,
            reportingController=f"{self._prefix}/nri-numa-controller",
            reportingInstance="nri-numa-controller",
            action="Evicting",
            reason=reason,
            type="Normal",
        )
        self._events.append(self._create_request(Resource.EVENTS, body))

    def _create_request(self, resource: Resource, body: Mapping[str, Any]) -> APIRequest:
        metadata = body["metadata"]
        return self._new_request(
            Verb.CREATE, resource, metadata["name"], namespace=metadata["namespace"], body=body
        )


@dataclass(slots=True, kw_only=True)
class NUMANodePod(EvictionCandidate):
    """A pod whose pinned containers use the NUMA nodes `numa_nodes`, which are emptied."""

    numa_nodes: frozenset[int]


@dataclass(slots=True)
class _DrainingNUMANodes:
    numa_nodes: frozenset[int]
    due_at: float


def parse_assigned_numa_nodes(text: str, cpus: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Parse the NUMA nodes of ``assigned``, also those of its CPUs; empty if it is unreadable."""
    try:
        numa_nodes: set[int] = set()
        for assignment in json.loads(text).values():
            numa_nodes |= parse_id_list(str(assignment.get("mems", "")))
            used = parse_id_list(str(assignment.get("cpus", "")), CPU_ID_LIMIT)
            numa_nodes |= {i for i, node_cpus in cpus.items() if node_cpus & used}
    except (ValueError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(numa_nodes)


class _NUMANodeEvictor(Evictor[NUMANodePod]):
    """Evicts pods from NUMA nodes that are emptied."""

    def __init__(self, prefix: str, budget: EvictionBudget, delay_s: float, now_s: float) -> None:
        super().__init__(prefix, budget, delay_s, now_s)
        self._emptied: dict[str, _DrainingNUMANodes] = {}
        self._cpus: dict[str, dict[int, frozenset[int]]] = {}

    def draining_count(self) -> int:
        """Return the number of NUMA nodes that are emptied."""
        return sum(len(node.numa_nodes) for node in self._emptied.values())

    def on_node_updated(self, name: str, document: Mapping[str, Any], now_s: float) -> None:
        """Read the CPUs of a Node's NUMA nodes, which its publisher may add later."""
        annotations = annotations_of(document)
        key = f"{self._prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}"
        ids = sorted(parse_ids_or_empty(annotations.get(key)))
        fields = annotations.get(f"{self._prefix}/numacpu", "").split("|")
        pairs = zip(ids, fields, strict=True) if len(ids) == len(fields) else ()
        self._cpus[name] = {i: parse_ids_or_empty(cpus, CPU_ID_LIMIT) for i, cpus in pairs}

    def on_node_removed(self, name: str) -> None:
        """Drop a Node that no longer exists."""
        self._cpus.pop(name, None)
        self._set_draining(name, frozenset(), 0.0)

    def _set_draining(self, node: str, numa_nodes: frozenset[int], due_at: float) -> None:
        """Set the NUMA nodes of a node to empty, from a time on; an empty set ends it."""
        draining_node = self._emptied.get(node)
        if numa_nodes and (draining_node is None or draining_node.numa_nodes != numa_nodes):
            self._emptied[node] = _DrainingNUMANodes(numa_nodes, due_at)
        elif draining_node is not None and not numa_nodes:
            del self._emptied[node]
            self._replace_pods(node, {})

    def _replace_pods(self, node: str, pods: Mapping[str, NUMANodePod]) -> None:
        for uid in [uid for uid, pod in self.pods.items() if pod.node == node and uid not in pods]:
            del self.pods[uid]
        self.pods.update(pods)

    def _next_list_at(self) -> float:
        return min((node.due_at for node in self._emptied.values()), default=float("inf"))

    def _next_pod_list_request(self, now_s: float) -> APIRequest | None:
        for name, node in sorted(self._emptied.items()):
            if node.due_at <= now_s:
                return self._pod_list_request(name, spec_nodeName=name)
        return None

    def _on_pod_list(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        name = str(request.key)
        if (node := self._emptied.get(name)) is None:
            return
        node.due_at = now_s + POD_LIST_INTERVAL_S * (1 + 0.2 * jitter)
        if outcome.result is not OutcomeKind.SUCCEEDED:
            return
        pods: dict[str, NUMANodePod] = {}
        for document in filter(is_replaced_after_eviction, outcome.documents):
            metadata = document["metadata"]
            uid = str(metadata.get("uid", ""))
            text = annotations_of(document).get(f"{self._prefix}/assigned", "")
            numa_nodes = parse_assigned_numa_nodes(text, self._cpus.get(name, {})) & node.numa_nodes
            if not numa_nodes or uid in self._evicted:
                continue
            pods[uid] = NUMANodePod(
                namespace=str(metadata.get("namespace")),
                name=str(metadata.get("name")),
                uid=uid,
                node=name,
                workload=controller_uid(document),
                numa_nodes=numa_nodes,
            )
            if (earlier_pod := self.pods.get(uid)) is not None:
                pods[uid].retry_at, pods[uid].failures = earlier_pod.retry_at, earlier_pod.failures
        self._replace_pods(name, pods)


class NUMANodeDrainEvictor(_NUMANodeEvictor):
    """Empties NUMA nodes that an operator's annotation ``drained`` names.

    The agent itself keeps new containers away from them. A measured factor of 0 evicts no pod: a
    monitoring error must not empty a cluster. The delay starts at the annotation: the agent must
    know it first, or the replacement is placed on the same NUMA nodes.
    """

    name, reason, event_suffix = "drain", "NUMANodeDrained", "drained"
    counts_workload = False

    def on_node_updated(self, name: str, document: Mapping[str, Any], now_s: float) -> None:
        """Read the drained NUMA nodes of a Node; an unreadable list drains none."""
        super().on_node_updated(name, document, now_s)
        text = annotations_of(document).get(f"{self._prefix}/{DRAINED_ANNOTATION}")
        self._set_draining(name, parse_ids_or_empty(text), now_s + self._delay_s)

    def _eviction_reason(self, pod: NUMANodePod, now_s: float) -> str:
        return f"NUMA node {format_id_list(pod.numa_nodes)} of node {pod.node} is drained"


@dataclass(slots=True)
class _MeasuredCapacityFactor:
    factor: float
    degraded_since: float | None = None
    is_degraded: bool = False


class HostStealEvictor(_NUMANodeEvictor):
    """Empties NUMA nodes whose CPU time the hypervisor gives to other guests.

    The factor is the one that the node's own agent measured and applied
    (``measuredCapacity.mode: enforce``), which the publisher writes for each zone. Reports of
    external sources (`nri_numa.controller.capacity`) evict no pod.

    A NUMA node whose factor is low for the delay is *degraded* until `RECOVERED_FACTOR`, so a
    factor that wavers about the limit does not restart the delay. If too many are degraded at the
    same time, no pod is evicted: no node is better, or the measurement is wrong.
    """

    name, reason, event_suffix = "steal", "NUMANodeStolen", "stolen"
    min_interval_s = 60.0  # a measurement may err

    def __init__(
        self, prefix: str, budget: EvictionBudget, config: CPUStealEviction, now_s: float
    ) -> None:
        super().__init__(prefix, budget, parse_duration(config.delay), now_s)
        self._config = config
        self._attribute = f"{prefix}/{MEASURED_CAPACITY_FACTOR_ATTRIBUTE}"
        self._measured: dict[str, dict[int, _MeasuredCapacityFactor]] = {}

    def on_topology_updated(self, name: str, document: Mapping[str, Any], now_s: float) -> None:
        """Read the measured factors of a NodeResourceTopology; an unreadable factor counts as 1."""
        old_factors, factors = self._measured.get(name, {}), dict[int, _MeasuredCapacityFactor]()
        for i, factor in _measured_factors(document, self._attribute):
            factors[i] = old_factors.get(i) or _MeasuredCapacityFactor(factor)
            factors[i].factor = factor
        self._measured[name] = factors

    def on_topology_removed(self, name: str) -> None:
        """Drop the factors of a NodeResourceTopology that no longer exists."""
        self._measured.pop(name, None)
        self._set_draining(name, frozenset(), 0.0)

    def on_tick(self, now_s: float, wall: float) -> None:
        """Update which NUMA nodes are degraded."""
        super().on_tick(now_s, wall)
        for zones in self._measured.values():
            for zone in zones.values():
                self._update_degraded(zone, now_s)
        max_degraded = self._config.max_affected_fraction * sum(map(len, self._measured.values()))
        excess = self.degraded_count() > max_degraded
        for node, zones in self._measured.items():
            numa_ids = frozenset(i for i, zone in zones.items() if zone.is_degraded and not excess)
            self._set_draining(node, numa_ids, now_s)

    def _update_degraded(self, zone: _MeasuredCapacityFactor, now_s: float) -> None:
        if zone.factor >= RECOVERED_FACTOR:
            zone.degraded_since, zone.is_degraded = None, False
        elif zone.factor < self._config.below_factor:
            zone.degraded_since = now_s if zone.degraded_since is None else zone.degraded_since
            zone.is_degraded = zone.is_degraded or now_s >= zone.degraded_since + self._delay_s
        elif not zone.is_degraded:
            zone.degraded_since = None

    def degraded_count(self) -> int:
        """Return the number of degraded NUMA nodes, including those that evict no pod."""
        return sum(zone.is_degraded for zones in self._measured.values() for zone in zones.values())

    def _eviction_reason(self, pod: NUMANodePod, now_s: float) -> str:
        zones = self._measured.get(pod.node, {})
        factors = ", ".join(
            f"{i}: {zones[i].factor:g}" for i in sorted(pod.numa_nodes) if i in zones
        )
        return (
            f"the host steals CPU time of NUMA node {format_id_list(pod.numa_nodes)} of node "
            f"{pod.node} (measured factor {factors or 'unknown'}, limit "
            f"{self._config.below_factor:g})"
        )


def _measured_factors(document: Mapping[str, Any], attribute: str) -> Iterable[tuple[int, float]]:
    """Return NUMA nodes with their measured factors; 1 if a factor is missing or unreadable."""
    values: dict[int, float] = {}
    try:
        for zone in document.get("zones") or ():
            if zone.get("type") != "Node":
                continue
            texts = [a["value"] for a in zone.get("attributes") or () if a["name"] == attribute]
            values[parse_zone_id(zone["name"])] = _parse_measured_factor(texts[0]) if texts else 1.0
    except (BadCapacity, TypeError, KeyError, AttributeError):
        return ()
    return values.items()


def _parse_measured_factor(text: object) -> float:
    try:
        factor = float(text) if isinstance(text, str) and len(text) <= 32 else 1.0
    except ValueError:
        return 1.0
    return factor if 0 <= factor <= 1 else 1.0  # NaN is neither
