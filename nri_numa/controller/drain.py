"""Drained NUMA nodes: which pods are moved away, one after the other. Pure.

An operator's annotation ``drained`` keeps new containers away by itself. What runs there is moved
by the Eviction API, where that is switched on: pods whose owner makes another one, as fast as
configured, and only as disruption budgets allow. A factor of 0 that somebody measured moves nobody:
a monitoring that errs must not empty a cluster.

An output in the sense of `nri_numa.cluster.outputs`. Who is where stands in the annotation
``assigned`` of pods (``publish.podAnnotation``); what has no pin of ours stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.cluster.outbox import Bucket, pause
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.controller.evictions import Ledger, Mover, movable, workload_of
from nri_numa.offline_capacity import DRAINED, NUMA_IDS, BadCapacity, list_of, numa_nodes

LOOK: Final = 20.0
"""Seconds between two looks at the pods of a drained node."""
MOST_CPUS: Final = 65536
"""CPU ids are below it."""
REASON: Final = "NUMANodeDrained"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRules:
    """How pods are moved.

    Attributes:
        after: seconds between the annotation and the first eviction; the agent must know first, or
            the successor lands in the same place.
        per_minute: evictions in the whole cluster.
        dry_run: the API server says what it would do, and does nothing.
    """

    after: float
    per_minute: float
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that may be moved.

    Attributes:
        zones: NUMA nodes that its pinned containers use, of those that are emptied.
        workload: uid of the controller that makes another one.
    """

    namespace: str
    name: str
    uid: str
    node: str
    zones: frozenset[int]
    workload: str = ""


@dataclass(slots=True)
class _Emptied:
    zones: frozenset[int]
    cpus: Mapping[int, frozenset[int]]
    look_at: float


def zones_of(text: str, cpus: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """The NUMA nodes in the text of ``assigned``; none where it cannot be read.

    Args:
        text: of the annotation.
        cpus: by NUMA node, its CPUs.
    """
    try:
        document = json.loads(text)
        found: set[int] = set()
        for one in document.values():
            found |= numa_nodes(str(one.get("mems", "")))
            taken = numa_nodes(str(one.get("cpus", "")), MOST_CPUS)
            found |= {i for i, there in cpus.items() if there & taken}
    except (ValueError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(found)


class Emptying:
    """Evictions from NUMA nodes that are to be emptied, and an Event for each.

    Attributes:
        evicted: pods that were told to go.
        blocked: refusals by disruption budgets.

    Args:
        mover: makes the requests.
        per_minute: evictions in the whole cluster.
        now: the time.
        ledger: how often one workload may be moved; None for as often as it lands there.
    """

    def __init__(
        self, mover: Mover, per_minute: float, now: float, ledger: Ledger | None = None
    ) -> None:
        self.name = mover.output
        self.dropped = 0
        self.hold_until = 0.0
        self.evicted = 0
        self.blocked = 0
        self._mover, self._prefix, self._ledger = mover, mover.prefix, ledger
        # One at once: the successor shows whether there is room.
        self._bucket = Bucket(per_minute / 60, 1.0, now)
        self._next = now
        self._nodes: dict[str, _Emptied] = {}
        self._pods: dict[str, Pod] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        self._done: set[str] = set()
        self._events: list[Request] = []
        self._wall = 0.0

    def empty(
        self, node: str, zones: frozenset[int], cpus: Mapping[int, frozenset[int]], at: float
    ) -> None:
        """These NUMA nodes of a node are to be emptied, from a time on; none for no more.

        Args:
            node: its name.
            zones: of it.
            cpus: by NUMA node, its CPUs; a publisher that starts tells them later.
            at: the time; it stays as it was for NUMA nodes that were named before.
        """
        if not zones:
            self.gone(node)
            return
        known = self._nodes.get(node)
        if known is not None and known.zones == zones:
            known.cpus = cpus
            return
        self._nodes[node] = _Emptied(zones, cpus, at)

    def cpus(self, annotations: Mapping[str, str]) -> dict[int, frozenset[int]]:
        """By NUMA node, its CPUs, from what the publisher tells."""
        try:
            ids = sorted(numa_nodes(annotations.get(f"{self._prefix}/{NUMA_IDS}", "")))
            fields = annotations.get(f"{self._prefix}/numacpu", "").split("|")
            if len(ids) != len(fields):
                return {}
            return {i: numa_nodes(f, MOST_CPUS) for i, f in zip(ids, fields, strict=True)}
        except BadCapacity:
            return {}

    def why(self, pod: Pod) -> str:
        """Why a pod has to go, for its Event."""
        raise NotImplementedError

    def gone(self, node: str) -> None:
        """A Node is away, or nothing of it is to be emptied any more."""
        self._nodes.pop(node, None)
        for uid in [uid for uid, pod in self._pods.items() if pod.node == node]:
            del self._pods[uid]

    def emptied(self) -> int:
        """NUMA nodes that are to be emptied."""
        return sum(len(one.zones) for one in self._nodes.values())

    def tell_time(self, wall: float) -> None:
        """Unix time in seconds, for Events."""
        self._wall = wall

    def due(self, now: float) -> Request | None:
        """An Event that is owed, a look at a node, or the next eviction."""
        if self.hold_until > now:
            return None
        if self._events:
            return self._events[0]
        for name, node in sorted(self._nodes.items()):
            if node.look_at <= now:
                return Request(
                    output=self.name,
                    verb=Verb.LIST,
                    resource=Resource.PODS,
                    field_selector={"spec.nodeName": name},
                    key=name,
                    whole=True,
                )
        if self._bucket.wait(now) > 0:
            return None
        # Who was asked for in vain comes behind those who were not, or, at a low rate, one whose
        # budget says no would take every turn. Among equals by namespace and name.
        for uid in sorted(self._pods, key=self._not_before):
            pod = self._pods[uid]
            if self._not_before(uid) <= now and self._may(pod, now):
                return self._mover.eviction(pod.namespace, pod.name, uid)
        return None

    def _not_before(self, uid: str) -> float:
        return self._failures.get(uid, (0, 0.0))[1]

    def _may(self, pod: Pod, now: float) -> bool:
        """Whether its workload was not moved too often; otherwise it waits."""
        if self._ledger is None or (at := self._ledger.free_at(pod.workload, now)) <= now:
            return True
        self._failures[pod.uid] = 0, at
        return False

    def next_due(self) -> float:
        """When the next request may be made, at the earliest."""
        if self._events:
            return self.hold_until
        looks = [node.look_at for node in self._nodes.values()]
        evictions = [max(self._not_before(uid), self._next) for uid in self._pods]
        return max(self.hold_until, min([*looks, *evictions], default=float("inf")))

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a request of ours."""
        if outcome.result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
        elif request.resource is Resource.EVENTS:
            self._events.pop(0)  # once is enough, whatever came of it
        elif request.resource is Resource.PODS:
            node = self._nodes.get(str(request.key))
            if node is not None:
                node.look_at = now + LOOK * (1 + 0.2 * jitter)
                if outcome.result is Result.DONE:
                    self._take(str(request.key), node, outcome.documents)
        else:
            self._evicted(str(request.key), outcome, now, jitter)

    def _take(self, name: str, node: _Emptied, documents: tuple[dict[str, Any], ...]) -> None:
        """These are all pods of a node."""
        found: dict[str, Pod] = {}
        for document in documents:
            metadata = document.get("metadata") or {}
            uid = str(metadata.get("uid", ""))
            if not movable(document) or uid in self._done:
                continue
            text = (metadata.get("annotations") or {}).get(f"{self._prefix}/assigned", "")
            zones = zones_of(text, node.cpus) & node.zones if text else frozenset[int]()
            if zones:
                space, pod = str(metadata.get("namespace")), str(metadata.get("name"))
                found[uid] = Pod(space, pod, uid, name, zones, workload_of(document))
        listed = {str((d.get("metadata") or {}).get("uid", "")) for d in documents}
        for uid in [uid for uid, pod in self._pods.items() if pod.node == name]:
            del self._pods[uid]
            if uid not in listed:
                self._failures.pop(uid, None)
        # In the order of their names, so that two leaders would do the same.
        self._pods.update(sorted(found.items(), key=lambda one: (one[1].namespace, one[1].name)))

    def _evicted(self, uid: str, outcome: Outcome, now: float, jitter: float) -> None:
        self._bucket.take(now)
        self._next = now + self._bucket.wait(now)
        pod = self._pods.get(uid)
        if outcome.result in (Result.DONE, Result.MISSING, Result.CONFLICT):
            # Gone, or another pod has its name.
            self._pods.pop(uid, None)
            self._failures.pop(uid, None)
            if outcome.result is Result.DONE:
                self.evicted += 1
                if len(self._done) > MOST_CPUS:
                    self._done.clear()
                self._done.add(uid)
                if pod is not None:
                    if self._ledger is not None:
                        self._ledger.moved(pod.workload, now)
                    why, wall = self.why(pod), self._wall
                    self._events.append(self._mover.event(pod.namespace, pod.name, uid, why, wall))
            return
        self.blocked += outcome.result is Result.BLOCKED
        failures = self._failures.get(uid, (0, 0.0))[0] + 1
        self._failures[uid] = failures, now + pause(failures, jitter)

    def waiting(self) -> int:
        """Pods that are still to go."""
        return len(self._pods)

    def resync(self) -> None:
        """Pods are listed again and again as it is."""


class DrainOutput(Emptying):
    """Evictions from drained NUMA nodes.

    Args:
        prefix: of the annotations.
        rules: how pods are moved.
        now: the time.
    """

    def __init__(self, prefix: str, rules: DrainRules, now: float) -> None:
        mover = Mover(
            output="drain", prefix=prefix, reason=REASON, end="drained", dry_run=rules.dry_run
        )
        super().__init__(mover, rules.per_minute, now)
        self._after = rules.after

    def see(self, node: str, annotations: Mapping[str, str], now: float) -> None:
        """A Node has these annotations; a list that cannot be read drains nothing."""
        try:
            zones = numa_nodes(annotations.get(f"{self._prefix}/{DRAINED}", ""))
        except BadCapacity:
            zones = frozenset()
        self.empty(node, zones, self.cpus(annotations), now + self._after)

    def why(self, pod: Pod) -> str:
        """The annotation."""
        return f"NUMA node {list_of(pod.zones)} of node {pod.node} is drained"
