"""The evictor: which pods leave, one after the other, and what is said of it. Pure.

What the selectors have in common is here: the Eviction API, so that disruption budgets hold, with
the pod's uid as a precondition; so many a minute; one workload only so often; an Event for each.
Two selectors empty NUMA nodes, `Drained` and `Stolen`; for pods that their node refuses see
`nri_numa.controller.refused`. Each is an output in the sense of `nri_numa.publisher.outbox`.

Who is on a NUMA node stands in the annotation ``assigned`` of pods (``publish.podAnnotation``); a
pod that has no pin of ours stays.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from nri_numa.kube.requests import Outcome, Request, Resource, Result, Verb, annotations_of, mapping
from nri_numa.model.offline_capacity import (
    DRAINED,
    LIMIT,
    MOST_CPUS,
    NUMA_IDS,
    BadCapacity,
    list_of,
    numa_nodes,
    zone,
)
from nri_numa.publisher.outbox import Bucket, Output, pause
from nri_numa.publisher.topology import MEASURED_FACTOR
from nri_numa.publisher.wanted import pod_event

INTERVAL: Final = 20.0
"""Seconds between two looks at the pods of a node that is emptied."""
WELL: Final = 0.9
"""A measured factor of this or more is well again."""
WOULD: Final = "would be evicted (dry run)"
AT_ONCE: Final = 4
"""Pods that are considered in one turn."""
REMEMBERED: Final = 65536
"""Evicted pods, and workloads; far more than are evicted in the time that is looked back on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How pods are evicted.

    Attributes:
        after: seconds until the first eviction for a new reason.
        per_minute: evictions in the whole cluster.
        dry_run: the API server says what it would do, and does nothing.
        per_workload, per: one workload is moved so often in so many seconds; 0 for no limit.
    """

    after: float
    per_minute: float
    dry_run: bool = False
    per_workload: int = 0
    per: float = 3600.0


@dataclass(slots=True, kw_only=True)
class Candidate:
    """A pod that is to leave.

    Attributes:
        workload: uid of the controller that makes another one.
        version: the resourceVersion that it must still have; empty for any.
        not_before: when it may be evicted.
    """

    namespace: str
    name: str
    uid: str
    node: str
    workload: str
    version: str = ""
    not_before: float = 0.0
    failures: int = 0


def movable(document: Mapping[str, Any]) -> bool:
    """Whether a pod's owner makes another one, which may go elsewhere.

    Static pods and those of a DaemonSet come back to the same node; a pod without a controller does
    not come back at all. Those of kube-system are not ours to move, and a policy refuses it.
    """
    metadata = mapping(document.get("metadata"))
    if metadata.get("deletionTimestamp") or metadata.get("namespace") == "kube-system":
        return False
    if mapping(document.get("status")).get("phase") in ("Succeeded", "Failed"):
        return False
    if "kubernetes.io/config.mirror" in annotations_of(document):
        return False
    made_by = _made_by(metadata)
    return bool(made_by) and made_by.get("kind") not in ("DaemonSet", "Node")


def workload_of(document: Mapping[str, Any]) -> str:
    """The uid of the controller that makes a pod again; empty for none."""
    return str(_made_by(mapping(document.get("metadata"))).get("uid", ""))


def _made_by(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reference to the controller; empty where there is none. Files may say anything."""
    listed = metadata.get("ownerReferences")
    references = [mapping(one) for one in listed] if isinstance(listed, list) else []
    return next((one for one in references if one.get("controller")), {})


C = TypeVar("C", bound=Candidate)


class Evictor(Output, Generic[C]):
    """Evicts the pods that a selector chose.

    Attributes:
        reason, end: of its Events: their reason, and the end of their names.
        pods: that are to leave, by uid.
    """

    reason = end = ""

    def __init__(self, name: str, prefix: str, rules: Rules, now: float) -> None:
        super().__init__(name)
        self.pods: dict[str, C] = {}
        self._prefix, self._rules = prefix, rules
        # One at once: the successor shows whether there is room.
        self._bucket, self._next = Bucket(rules.per_minute / 60, 1.0, now), now
        self._moves: dict[str, deque[float]] = {}
        self._evicted: dict[str, None] = {}
        # The pod that was asked for last; a watch may tell of its end before the answer comes.
        self._asked: C | None = None
        self._events: list[Request] = []
        self._wall = 0.0

    # --- what a selector says ---------------------------------------------------------------------

    def node(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists, new or changed."""

    def node_removed(self, name: str) -> None:
        """A Node does not exist any more."""

    def topology(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A NodeResourceTopology exists, new or changed."""

    def topology_removed(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""

    def tick(self, now: float, wall: float) -> None:
        """Time has passed; `wall` is Unix time in seconds, for Events."""
        self._wall = wall

    def _list(self, now: float) -> Request | None:
        """A list of pods that is due."""
        return None

    def _next_list(self) -> float:
        return float("inf")

    def _listed(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a list."""

    def _may(self, pod: C, now: float) -> bool:
        """Whether a pod may leave now; if not, `not_before` says when to consider it again."""
        return True

    def _why(self, pod: C, now: float) -> str:
        """Why a pod has to leave, for its Event."""
        raise NotImplementedError

    # --- what is done -----------------------------------------------------------------------------

    def waiting(self) -> int:
        """Pods that are still to leave."""
        return len(self.pods)

    def next_due(self) -> float:
        """When the next request may be made, at the earliest."""
        if self._events:
            return self.hold_until
        evictions = min(
            (max(one.not_before, self._next) for one in self.pods.values()), default=float("inf")
        )
        return max(self.hold_until, min(self._next_list(), evictions))

    def _due(self, now: float) -> Request | None:
        """An Event that is owed, the next eviction, or a list of pods."""
        if self._events:
            return self._events[0]
        if self._bucket.wait(now) > 0:
            return self._list(now)
        # A pod that was asked for without effect comes behind those that were not, or, at a low
        # rate, one whose budget says no would take every turn. Among equals by namespace and name.
        ready = sorted(
            (one for one in self.pods.values() if one.not_before <= now),
            key=lambda one: (one.not_before, one.namespace, one.name, one.uid),
        )
        for pod in ready[:AT_ONCE]:
            if (at := self._free_at(pod.workload, now)) > now:
                pod.not_before = at
            elif self._may(pod, now):
                self._asked = pod
                return self._eviction(pod)
        return self._list(now)

    def _done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        if request.resource is Resource.EVENTS:
            self._events.pop(0)  # once is enough, whatever came of it
            return
        if request.resource is Resource.PODS:
            self._listed(request, outcome, now, jitter)
            return
        self._bucket.take(now)
        self._next = now + self._bucket.wait(now)
        pod = self._asked
        assert pod is not None  # noqa: S101  # it is what the request was made of
        if outcome.result is Result.DONE:
            self.pods.pop(pod.uid, None)
            if len(self._evicted) >= REMEMBERED:
                del self._evicted[next(iter(self._evicted))]
            self._evicted[pod.uid] = None
            self._note_move(pod, now)
            self._events.append(self._event(pod, self._why(pod, now)))
        elif outcome.result is Result.MISSING:
            self.pods.pop(pod.uid, None)
        else:  # it changed meanwhile, or a budget speaks for it
            pod.failures += 1
            pod.not_before = now + pause(pod.failures, jitter)

    def _free_at(self, workload: str, now: float) -> float:
        """When a workload may be moved again: only so often, so that nothing circles."""
        moves = self._moves.get(workload)
        if moves is None:
            return now
        while moves and moves[0] + self._rules.per <= now:
            moves.popleft()
        if not moves:
            del self._moves[workload]
        return now if len(moves) < self._rules.per_workload else moves[0] + self._rules.per

    def _note_move(self, pod: C, now: float) -> None:
        """A pod was evicted."""
        if most := self._rules.per_workload:
            if len(self._moves) >= REMEMBERED:
                for one in list(self._moves):
                    self._free_at(one, now)
            self._moves.setdefault(pod.workload, deque(maxlen=most)).append(now)

    def _eviction(self, pod: C) -> Request:
        conditions = {"uid": pod.uid}
        if pod.version:
            conditions["resourceVersion"] = pod.version
        options: dict[str, Any] = {"preconditions": conditions}
        if self._rules.dry_run:
            options["dryRun"] = ["All"]
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"namespace": pod.namespace, "name": pod.name},
            "deleteOptions": options,
        }
        return self._create(Resource.EVICTIONS, body)

    def _event(self, pod: C, why: str) -> Request:
        would = WOULD if self._rules.dry_run else "evicted"
        body = pod_event(
            pod.namespace,
            pod.name,
            pod.uid,
            id=f"{pod.uid[:8]}.{self.end}",
            at=self._wall,
            text=f"{would}: {why}",
            reportingController=f"{self._prefix}/nri-numa-controller",
            reportingInstance="nri-numa-controller",
            action="Evicting",
            reason=self.reason,
            type="Normal",
        )
        return self._create(Resource.EVENTS, body)

    def _create(self, resource: Resource, body: Mapping[str, Any]) -> Request:
        metadata = body["metadata"]
        return self._request(
            Verb.CREATE, resource, metadata["name"], namespace=metadata["namespace"], body=body
        )


# --- NUMA nodes that are emptied ------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class OnNUMANodes(Candidate):
    """A pod whose pinned containers use NUMA nodes that are emptied, which are named."""

    numa_nodes: frozenset[int]


@dataclass(slots=True)
class _Emptied:
    numa_nodes: frozenset[int]
    due_at: float


def places_of(text: str, cpus: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The NUMA nodes in the text of ``assigned``, by their CPUs; none where it cannot be read."""
    try:
        found: set[int] = set()
        for one in json.loads(text).values():
            found |= numa_nodes(str(one.get("mems", "")))
            used = numa_nodes(str(one.get("cpus", "")), MOST_CPUS)
            found |= {i for i, there in cpus.items() if there & used}
    except (ValueError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(found)


class _Emptying(Evictor[OnNUMANodes]):
    """Evicts pods from NUMA nodes that are to be emptied."""

    def __init__(self, name: str, prefix: str, rules: Rules, now: float) -> None:
        super().__init__(name, prefix, rules, now)
        self._emptied: dict[str, _Emptied] = {}
        self._cpus: dict[str, dict[int, frozenset[int]]] = {}

    def emptied(self) -> int:
        """NUMA nodes that are to be emptied."""
        return sum(len(one.numa_nodes) for one in self._emptied.values())

    def node(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists; its publisher says which CPUs its NUMA nodes have, perhaps later."""
        annotations = annotations_of(document)
        ids = _numa_nodes(annotations.get(f"{self._prefix}/{NUMA_IDS}", ""))
        fields = annotations.get(f"{self._prefix}/numacpu", "").split("|")
        self._cpus[name] = {}
        if len(ids) == len(fields):
            each = zip(sorted(ids), fields, strict=True)
            self._cpus[name] = {i: _numa_nodes(cpus, MOST_CPUS) for i, cpus in each}

    def node_removed(self, name: str) -> None:
        """A Node does not exist any more."""
        self._cpus.pop(name, None)
        self._empty(name, frozenset(), 0.0)

    def _empty(self, node: str, numa_nodes: frozenset[int], at: float) -> None:
        """These NUMA nodes of a node are to be emptied, from a time on; none for no more."""
        known = self._emptied.get(node)
        if numa_nodes and (known is None or known.numa_nodes != numa_nodes):
            self._emptied[node] = _Emptied(numa_nodes, at)
        elif known is not None and not numa_nodes:
            del self._emptied[node]
            self._keep(node, {})

    def _keep(self, node: str, pods: Mapping[str, OnNUMANodes]) -> None:
        """These are all pods that are to leave a node."""
        for uid in [uid for uid, pod in self.pods.items() if pod.node == node and uid not in pods]:
            del self.pods[uid]
        self.pods.update(pods)

    def _next_list(self) -> float:
        return min((one.due_at for one in self._emptied.values()), default=float("inf"))

    def _list(self, now: float) -> Request | None:
        for name, one in sorted(self._emptied.items()):
            if one.due_at <= now:
                return self._list_pods(name, spec_nodeName=name)
        return None

    def _listed(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        name = str(request.key)
        if (node := self._emptied.get(name)) is None:
            return
        node.due_at = now + INTERVAL * (1 + 0.2 * jitter)
        if outcome.result is not Result.DONE:
            return
        found: dict[str, OnNUMANodes] = {}
        for document in filter(movable, outcome.documents):
            metadata = document["metadata"]
            uid = str(metadata.get("uid", ""))
            text = annotations_of(document).get(f"{self._prefix}/assigned", "")
            places = places_of(text, self._cpus.get(name, {})) & node.numa_nodes
            if not places or uid in self._evicted:
                continue
            found[uid] = OnNUMANodes(
                namespace=str(metadata.get("namespace")),
                name=str(metadata.get("name")),
                uid=uid,
                node=name,
                workload=workload_of(document),
                numa_nodes=places,
            )
            if (known := self.pods.get(uid)) is not None:
                found[uid].not_before, found[uid].failures = known.not_before, known.failures
        self._keep(name, found)


def _numa_nodes(text: str, most: int = LIMIT) -> frozenset[int]:
    """A list of ids; none where it cannot be read."""
    try:
        return numa_nodes(text, most)
    except BadCapacity:
        return frozenset()


class Drained(_Emptying):
    """NUMA nodes that an operator's annotation ``drained`` names.

    It keeps new containers away by itself. A factor of 0 that was measured moves no pod: a
    monitoring that errs must not empty a cluster.
    `Rules.after` counts from the annotation: the agent must know first, or the successor lands in
    the same place.
    """

    reason, end = "NUMANodeDrained", "drained"

    def __init__(self, prefix: str, rules: Rules, now: float) -> None:
        super().__init__("drain", prefix, rules, now)

    def node(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists; a list that cannot be read drains nothing."""
        super().node(name, document, now)
        named = _numa_nodes(annotations_of(document).get(f"{self._prefix}/{DRAINED}", ""))
        self._empty(name, named, now + self._rules.after)

    def _why(self, pod: OnNUMANodes, now: float) -> str:
        return f"NUMA node {list_of(pod.numa_nodes)} of node {pod.node} is drained"


@dataclass(slots=True)
class _Measured:
    factor: float
    since: float | None = None
    poor: bool = False


class Stolen(_Emptying):
    """NUMA nodes whose CPUs the host keeps taking away.

    What counts is the factor that the node's own agent measured and put in force
    (``measuredCapacity.mode: act``), which the publisher writes for each zone. What is said from
    outside (`nri_numa.controller.capacity`) moves no pod here either.

    A NUMA node that is low for a while (`Rules.after`) is *poor* until it is well again, which is
    another factor: so one that wavers about a limit does not begin again and again. Where many are
    poor at the same time no pod moves: there is no better place, or the measurement errs.

    Args:
        below: a factor lower than this is low.
        at_most: part of the cluster's NUMA nodes that may be poor; if more are, no pod moves.
    """

    reason, end = "NUMANodeStolen", "stolen"

    def __init__(
        self,
        prefix: str,
        rules: Rules,
        now: float,
        *,
        below: float,
        at_most: float,
    ) -> None:
        super().__init__("steal", prefix, rules, now)
        self._below, self._at_most = below, at_most
        self._attribute = f"{prefix}/{MEASURED_FACTOR}"
        self._measured: dict[str, dict[int, _Measured]] = {}

    def topology(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A NodeResourceTopology exists; what cannot be read of it is a whole factor."""
        known, found = self._measured.get(name, {}), dict[int, _Measured]()
        for i, factor in _factors(document, self._attribute):
            found[i] = known.get(i) or _Measured(factor)
            found[i].factor = factor
        self._measured[name] = found

    def topology_removed(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""
        self._measured.pop(name, None)
        self._empty(name, frozenset(), 0.0)

    def tick(self, now: float, wall: float) -> None:
        """Find out which NUMA nodes are poor."""
        super().tick(now, wall)
        for each in self._measured.values():
            for one in each.values():
                self._judge(one, now)
        many = self.poor() > self._at_most * sum(map(len, self._measured.values()))
        for node, each in self._measured.items():
            poor = frozenset(i for i, one in each.items() if one.poor and not many)
            self._empty(node, poor, now)

    def _judge(self, one: _Measured, now: float) -> None:
        if one.factor >= WELL:
            one.since, one.poor = None, False
        elif one.factor < self._below:
            one.since = now if one.since is None else one.since
            one.poor = one.poor or now >= one.since + self._rules.after
        elif not one.poor:
            one.since = None

    def poor(self) -> int:
        """NUMA nodes that are poor, whether pods move or not."""
        return sum(one.poor for each in self._measured.values() for one in each.values())

    def _why(self, pod: OnNUMANodes, now: float) -> str:
        known = self._measured.get(pod.node, {})
        factors = ", ".join(
            f"{i}: {known[i].factor:g}" for i in sorted(pod.numa_nodes) if i in known
        )
        return (
            f"the host takes away CPU time of NUMA node {list_of(pod.numa_nodes)} of node "
            f"{pod.node} (measured factor {factors or 'unknown'}, limit {self._below:g})"
        )


def _factors(document: Mapping[str, Any], attribute: str) -> Iterable[tuple[int, float]]:
    """NUMA nodes and their measured factors; 1 where there is none, or nothing that can be read."""
    found: dict[int, float] = {}
    try:
        for one in document.get("zones") or ():
            if one.get("type") != "Node":
                continue
            texts = [a["value"] for a in one.get("attributes") or () if a["name"] == attribute]
            found[zone(one["name"])] = _factor(texts[0]) if texts else 1.0
    except (BadCapacity, TypeError, KeyError, AttributeError):
        return ()
    return found.items()


def _factor(text: object) -> float:
    try:
        factor = float(text) if isinstance(text, str) and len(text) <= 32 else 1.0
    except ValueError:
        return 1.0
    return factor if 0 <= factor <= 1 else 1.0  # NaN is neither
