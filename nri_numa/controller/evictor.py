"""The evictor: which pods leave, one after the other, and what is said of it. Pure.

What the selectors have in common is here: the Eviction API, so that disruption budgets hold, with
the pod's uid as a precondition; so many a minute; one workload only so often; an Event for each.
Two selectors empty NUMA nodes, `NUMANodeDrainEvictor` and `HostStealEvictor`; for pods that their
node refuses see `nri_numa.controller.stuck_pods`. Each is an output in the sense of
`nri_numa.publisher.outbox`.

Who is on a NUMA node stands in the annotation ``assigned`` of pods (``publish.podAnnotation``); a
pod that has no pin of ours stays.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from nri_numa.cluster.pods import controller_uid, is_recreated
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
from nri_numa.publisher.desired_objects import pod_event
from nri_numa.publisher.outbox import Output, backoff_seconds
from nri_numa.publisher.topology import MEASURED_FACTOR_ATTRIBUTE

WORKLOAD_WINDOW_S: Final = 3600.0
"""Seconds in which the evictions of one workload are counted."""
POD_LIST_INTERVAL_S: Final = 20.0
"""Seconds between two looks at the pods of a node that is emptied."""
RECOVERED_FACTOR: Final = 0.9
"""A measured factor of this or more is well again."""
DRY_RUN_TEXT: Final = "would be evicted (dry run)"
MAX_CANDIDATES_PER_TURN: Final = 4
"""Pods that are considered in one turn."""
MAX_EVICTION_RECORDS: Final = 65536
"""Evicted pods, and workloads; far more than are evicted in the time that is looked back on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionRules:
    """What holds for all evictors together.

    Attributes:
        max_per_minute: evictions in the whole cluster, one at once: the successor shows whether
            there is room.
        max_per_workload_per_hour: evictions of one workload's pods; drains are not counted.
        dry_run: the API server says what it would do, and does nothing.
    """

    max_per_minute: float = 6.0
    max_per_workload_per_hour: int = 3
    dry_run: bool = False


class EvictionBudget:
    """What is left of the rules.

    Attributes:
        next_at: when the next pod may be evicted.
    """

    def __init__(self, rules: EvictionRules, now: float) -> None:
        self.rules, self.next_at = rules, now
        self._evictions: dict[str, deque[float]] = {}

    def spend(self, now: float) -> None:
        """An eviction was requested."""
        self.next_at = now + 60 / self.rules.max_per_minute

    def workload_allowed_at(self, workload: str, now: float) -> float:
        """When a workload may lose a pod again: only so often, so that nothing circles."""
        evictions = self._evictions.get(workload)
        if evictions is None:
            return now
        while evictions and evictions[0] + WORKLOAD_WINDOW_S <= now:
            evictions.popleft()
        if not evictions:
            del self._evictions[workload]
        is_allowed = len(evictions) < self.rules.max_per_workload_per_hour
        return now if is_allowed else evictions[0] + WORKLOAD_WINDOW_S

    def record_workload(self, workload: str, now: float) -> None:
        """A pod of a workload was evicted."""
        if len(self._evictions) >= MAX_EVICTION_RECORDS:
            for one in list(self._evictions):
                self.workload_allowed_at(one, now)
        most = self.rules.max_per_workload_per_hour
        self._evictions.setdefault(workload, deque(maxlen=most)).append(now)


@dataclass(slots=True, kw_only=True)
class EvictionCandidate:
    """A pod that is to leave.

    Attributes:
        workload: uid of the controller that makes another one.
        version: the resourceVersion that it must still have; empty for any.
        retry_at: when it may be evicted.
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
    """Evicts the pods that a selector chose.

    Attributes:
        reason, event_suffix: of its Events: their reason, and the end of their names.
        counts_workload: a workload is limited; not where an operator's word empties a node.
        min_interval_s: seconds between two of its evictions, beside the rules of all.
        pods: that are to leave, by uid.

    Args:
        delay_s: seconds until the first eviction for a new reason.
    """

    reason = event_suffix = ""
    counts_workload = True
    min_interval_s = 0.0

    def __init__(
        self, name: str, prefix: str, budget: EvictionBudget, delay_s: float, now: float
    ) -> None:
        super().__init__(name)
        self.pods: dict[str, CandidateT] = {}
        self._prefix, self._budget, self._delay_s = prefix, budget, delay_s
        self._not_before = now
        self._evicted: dict[str, None] = {}
        # The pod that was asked for last; a watch may tell of its end before the answer comes.
        self._asked: CandidateT | None = None
        self._events: list[APIRequest] = []
        self._wall = 0.0

    # --- what a selector says ---------------------------------------------------------------------

    def on_tick(self, now: float, wall: float) -> None:
        """Time has passed; `wall` is Unix time in seconds, for Events."""
        self._wall = wall

    def _next_pod_list_request(self, now: float) -> APIRequest | None:
        """A list of pods that is due."""
        return None

    def _next_list_at(self) -> float:
        return float("inf")

    def _on_pod_list(
        self, request: APIRequest, outcome: Outcome, now: float, jitter: float
    ) -> None:
        """This came of a list."""

    def _may_evict(self, pod: CandidateT, now: float) -> bool:
        """Whether a pod may leave now; if not, `not_before` says when to consider it again."""
        return True

    def _eviction_reason(self, pod: CandidateT, now: float) -> str:
        """Why a pod has to leave, for its Event."""
        raise NotImplementedError

    # --- what is done -----------------------------------------------------------------------------

    def pending_count(self) -> int:
        """Pods that are still to leave."""
        return len(self.pods)

    def next_due_at(self) -> float:
        """When the next request may be made, at the earliest."""
        if self._events:
            return self.hold_until
        evictions = min(
            (max(one.retry_at, self._next_eviction_at()) for one in self.pods.values()),
            default=float("inf"),
        )
        return max(self.hold_until, min(self._next_list_at(), evictions))

    def _next_eviction_at(self) -> float:
        return max(self._budget.next_at, self._not_before)

    def _next_request(self, now: float) -> APIRequest | None:
        """An Event that is owed, the next eviction, or a list of pods."""
        if self._events:
            return self._events[0]
        if self._next_eviction_at() > now:
            return self._next_pod_list_request(now)
        # A pod that was asked for without effect comes behind those that were not, or, at a low
        # rate, one whose budget says no would take every turn. Among equals by namespace and name.
        ready = sorted(
            (one for one in self.pods.values() if one.retry_at <= now),
            key=lambda one: (one.retry_at, one.namespace, one.name, one.uid),
        )
        for pod in ready[:MAX_CANDIDATES_PER_TURN]:
            allowed_at = self._budget.workload_allowed_at(pod.workload, now)
            if self.counts_workload and allowed_at > now:
                pod.retry_at = allowed_at
            elif self._may_evict(pod, now):
                self._asked = pod
                return self._eviction_request(pod)
        return self._next_pod_list_request(now)

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        if request.resource is Resource.EVENTS:
            self._events.pop(0)  # once is enough, whatever came of it
            return
        if request.resource is Resource.PODS:
            self._on_pod_list(request, outcome, now, jitter)
            return
        self._budget.spend(now)
        self._not_before = now + self.min_interval_s
        pod = self._asked
        assert pod is not None  # noqa: S101  # it is what the request was made of
        if outcome.result is OutcomeKind.SUCCEEDED:
            self.pods.pop(pod.uid, None)
            if len(self._evicted) >= MAX_EVICTION_RECORDS:
                del self._evicted[next(iter(self._evicted))]
            self._evicted[pod.uid] = None
            self._record_eviction(pod, now)
            self._events.append(self._event_request(pod, self._eviction_reason(pod, now)))
        elif outcome.result is OutcomeKind.MISSING:
            self.pods.pop(pod.uid, None)
        else:  # it changed meanwhile, or a budget speaks for it
            pod.failures += 1
            pod.retry_at = now + backoff_seconds(pod.failures, jitter)

    def _record_eviction(self, pod: CandidateT, now: float) -> None:
        """A pod was evicted."""
        if self.counts_workload:
            self._budget.record_workload(pod.workload, now)

    def _eviction_request(self, pod: CandidateT) -> APIRequest:
        conditions = {"uid": pod.uid}
        if pod.version:
            conditions["resourceVersion"] = pod.version
        options: dict[str, Any] = {"preconditions": conditions}
        if self._budget.rules.dry_run:
            options["dryRun"] = ["All"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": options,
        }
        return self._create_request(Resource.EVICTIONS, body)

    def _event_request(self, pod: CandidateT, why: str) -> APIRequest:
        would = DRY_RUN_TEXT if self._budget.rules.dry_run else "evicted"
        body = pod_event(
            pod.namespace,
            pod.name,
            pod.uid,
            id=f"{pod.uid[:8]}.{self.event_suffix}",
            at=self._wall,
            text=f"{would}: {why}",
            reportingController=f"{self._prefix}/nri-numa-controller",
            reportingInstance="nri-numa-controller",
            action="Evicting",
            reason=self.reason,
            type="Normal",
        )
        return self._create_request(Resource.EVENTS, body)

    def _create_request(self, resource: Resource, body: Mapping[str, Any]) -> APIRequest:
        metadata = body["metadata"]
        return self._new_request(
            Verb.CREATE, resource, metadata["name"], namespace=metadata["namespace"], body=body
        )


# --- NUMA nodes that are emptied ------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class NUMANodePod(EvictionCandidate):
    """A pod whose pinned containers use NUMA nodes that are emptied, which are named."""

    numa_nodes: frozenset[int]


@dataclass(slots=True)
class _DrainingNUMANodes:
    numa_nodes: frozenset[int]
    due_at: float


def parse_assigned_numa_nodes(text: str, cpus: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The NUMA nodes in the text of ``assigned``, by their CPUs; none where it cannot be read."""
    try:
        found: set[int] = set()
        for one in json.loads(text).values():
            found |= parse_id_list(str(one.get("mems", "")))
            used = parse_id_list(str(one.get("cpus", "")), CPU_ID_LIMIT)
            found |= {i for i, there in cpus.items() if there & used}
    except (ValueError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(found)


class _NUMANodeEvictor(Evictor[NUMANodePod]):
    """Evicts pods from NUMA nodes that are to be emptied."""

    def __init__(
        self, name: str, prefix: str, budget: EvictionBudget, delay_s: float, now: float
    ) -> None:
        super().__init__(name, prefix, budget, delay_s, now)
        self._emptied: dict[str, _DrainingNUMANodes] = {}
        self._cpus: dict[str, dict[int, frozenset[int]]] = {}

    def draining_count(self) -> int:
        """NUMA nodes that are to be emptied."""
        return sum(len(one.numa_nodes) for one in self._emptied.values())

    def on_node_updated(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists; its publisher says which CPUs its NUMA nodes have, perhaps later."""
        annotations = annotations_of(document)
        ids = parse_ids_or_empty(
            annotations.get(f"{self._prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}", "")
        )
        fields = annotations.get(f"{self._prefix}/numacpu", "").split("|")
        self._cpus[name] = {}
        if len(ids) == len(fields):
            each = zip(sorted(ids), fields, strict=True)
            self._cpus[name] = {i: parse_ids_or_empty(cpus, CPU_ID_LIMIT) for i, cpus in each}

    def on_node_removed(self, name: str) -> None:
        """A Node does not exist any more."""
        self._cpus.pop(name, None)
        self._set_draining(name, frozenset(), 0.0)

    def _set_draining(self, node: str, numa_nodes: frozenset[int], at: float) -> None:
        """These NUMA nodes of a node are to be emptied, from a time on; none for no more."""
        known = self._emptied.get(node)
        if numa_nodes and (known is None or known.numa_nodes != numa_nodes):
            self._emptied[node] = _DrainingNUMANodes(numa_nodes, at)
        elif known is not None and not numa_nodes:
            del self._emptied[node]
            self._replace_pods(node, {})

    def _replace_pods(self, node: str, pods: Mapping[str, NUMANodePod]) -> None:
        """These are all pods that are to leave a node."""
        for uid in [uid for uid, pod in self.pods.items() if pod.node == node and uid not in pods]:
            del self.pods[uid]
        self.pods.update(pods)

    def _next_list_at(self) -> float:
        return min((one.due_at for one in self._emptied.values()), default=float("inf"))

    def _next_pod_list_request(self, now: float) -> APIRequest | None:
        for name, one in sorted(self._emptied.items()):
            if one.due_at <= now:
                return self._pod_list_request(name, spec_nodeName=name)
        return None

    def _on_pod_list(
        self, request: APIRequest, outcome: Outcome, now: float, jitter: float
    ) -> None:
        name = str(request.key)
        if (node := self._emptied.get(name)) is None:
            return
        node.due_at = now + POD_LIST_INTERVAL_S * (1 + 0.2 * jitter)
        if outcome.result is not OutcomeKind.SUCCEEDED:
            return
        found: dict[str, NUMANodePod] = {}
        for document in filter(is_recreated, outcome.documents):
            metadata = document["metadata"]
            uid = str(metadata.get("uid", ""))
            text = annotations_of(document).get(f"{self._prefix}/assigned", "")
            places = parse_assigned_numa_nodes(text, self._cpus.get(name, {})) & node.numa_nodes
            if not places or uid in self._evicted:
                continue
            found[uid] = NUMANodePod(
                namespace=str(metadata.get("namespace")),
                name=str(metadata.get("name")),
                uid=uid,
                node=name,
                workload=controller_uid(document),
                numa_nodes=places,
            )
            if (known := self.pods.get(uid)) is not None:
                found[uid].retry_at, found[uid].failures = known.retry_at, known.failures
        self._replace_pods(name, found)


class NUMANodeDrainEvictor(_NUMANodeEvictor):
    """NUMA nodes that an operator's annotation ``drained`` names.

    It keeps new containers away by itself. A factor of 0 that was measured moves no pod: a
    monitoring that errs must not empty a cluster.
    The delay counts from the annotation: the agent must know first, or the successor
    lands in the same place.
    """

    reason, event_suffix = "NUMANodeDrained", "drained"
    counts_workload = False

    def __init__(self, prefix: str, budget: EvictionBudget, delay_s: float, now: float) -> None:
        super().__init__("drain", prefix, budget, delay_s, now)

    def on_node_updated(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists; a list that cannot be read drains nothing."""
        super().on_node_updated(name, document, now)
        named = parse_ids_or_empty(
            annotations_of(document).get(f"{self._prefix}/{DRAINED_ANNOTATION}", "")
        )
        self._set_draining(name, named, now + self._delay_s)

    def _eviction_reason(self, pod: NUMANodePod, now: float) -> str:
        return f"NUMA node {format_id_list(pod.numa_nodes)} of node {pod.node} is drained"


@dataclass(slots=True)
class _MeasuredCapacityFactor:
    factor: float
    degraded_since: float | None = None
    is_degraded: bool = False


class HostStealEvictor(_NUMANodeEvictor):
    """NUMA nodes whose CPUs the host keeps taking away.

    What counts is the factor that the node's own agent measured and put in force
    (``measuredCapacity.mode: act``), which the publisher writes for each zone. What is said from
    outside (`nri_numa.controller.capacity`) moves no pod here either.

    A NUMA node that is low for the delay is *poor* until it is well again, which is another
    factor: so one that wavers about a limit does not begin again and again. Where many are
    poor at the same time no pod moves: there is no better place, or the measurement errs.

    Args:
        below: a factor lower than this is low.
        at_most: part of the cluster's NUMA nodes that may be poor; if more are, no pod moves.
    """

    reason, event_suffix = "NUMANodeStolen", "stolen"
    min_interval_s = 60.0  # a measurement may err

    def __init__(
        self,
        prefix: str,
        budget: EvictionBudget,
        delay_s: float,
        now: float,
        *,
        below: float,
        at_most: float,
    ) -> None:
        super().__init__("steal", prefix, budget, delay_s, now)
        self._below, self._at_most = below, at_most
        self._attribute = f"{prefix}/{MEASURED_FACTOR_ATTRIBUTE}"
        self._measured: dict[str, dict[int, _MeasuredCapacityFactor]] = {}

    def on_topology_updated(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A NodeResourceTopology exists; what cannot be read of it is a whole factor."""
        known, found = self._measured.get(name, {}), dict[int, _MeasuredCapacityFactor]()
        for i, factor in _measured_factors(document, self._attribute):
            found[i] = known.get(i) or _MeasuredCapacityFactor(factor)
            found[i].factor = factor
        self._measured[name] = found

    def on_topology_removed(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""
        self._measured.pop(name, None)
        self._set_draining(name, frozenset(), 0.0)

    def on_tick(self, now: float, wall: float) -> None:
        """Find out which NUMA nodes are poor."""
        super().on_tick(now, wall)
        for each in self._measured.values():
            for one in each.values():
                self._update_degraded(one, now)
        many = self.degraded_count() > self._at_most * sum(map(len, self._measured.values()))
        for node, each in self._measured.items():
            poor = frozenset(i for i, one in each.items() if one.is_degraded and not many)
            self._set_draining(node, poor, now)

    def _update_degraded(self, one: _MeasuredCapacityFactor, now: float) -> None:
        if one.factor >= RECOVERED_FACTOR:
            one.degraded_since, one.is_degraded = None, False
        elif one.factor < self._below:
            one.degraded_since = now if one.degraded_since is None else one.degraded_since
            one.is_degraded = one.is_degraded or now >= one.degraded_since + self._delay_s
        elif not one.is_degraded:
            one.degraded_since = None

    def degraded_count(self) -> int:
        """NUMA nodes that are poor, whether pods move or not."""
        return sum(one.is_degraded for each in self._measured.values() for one in each.values())

    def _eviction_reason(self, pod: NUMANodePod, now: float) -> str:
        known = self._measured.get(pod.node, {})
        factors = ", ".join(
            f"{i}: {known[i].factor:g}" for i in sorted(pod.numa_nodes) if i in known
        )
        return (
            f"the host takes away CPU time of NUMA node {format_id_list(pod.numa_nodes)} of node "
            f"{pod.node} (measured factor {factors or 'unknown'}, limit {self._below:g})"
        )


def _measured_factors(document: Mapping[str, Any], attribute: str) -> Iterable[tuple[int, float]]:
    """NUMA nodes and their measured factors; 1 where there is none, or nothing that can be read."""
    found: dict[int, float] = {}
    try:
        for one in document.get("zones") or ():
            if one.get("type") != "Node":
                continue
            texts = [a["value"] for a in one.get("attributes") or () if a["name"] == attribute]
            found[parse_zone_id(one["name"])] = _parse_measured_factor(texts[0]) if texts else 1.0
    except (BadCapacity, TypeError, KeyError, AttributeError):
        return ()
    return found.items()


def _parse_measured_factor(text: object) -> float:
    try:
        factor = float(text) if isinstance(text, str) and len(text) <= 32 else 1.0
    except ValueError:
        return 1.0
    return factor if 0 <= factor <= 1 else 1.0  # NaN is neither
