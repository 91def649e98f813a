"""Pods that their node refuses for ever, and which of them may go to another one. Pure.

A pod that a node of ours refuses waits there with CreateContainerError: the kubelet asks again and
again, it is not scheduled anew, and its workload makes no other one. A pod that has waited so for a
while is evicted, if its node still has no room by what it publishes and another one has, as the
scheduler's extender judges it (`nri_numa.scheduler.fit`), after the pod's own words about Nodes.
Where some of its containers run its node is asked for room for the others, and another node for
all. Sums of requests, volumes and affinity among pods are not looked at: a move may be without
effect. So the same workload is moved only so often.

As long as a container never ran its pod is in the phase Pending (the kubelet's `getPhase`). One
that ended and is to be started again leaves it in the phase Running, as most pods of a cluster are,
so it is not found by following pods. But the kubelet writes an Event for each container that it
cannot create, with the words of its runtime. The pod of such an Event is read as long as that goes
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import structs

from nri_numa.cluster.cluster_state import AssumedPod, ClusterState
from nri_numa.cluster.node_facts import NODE_CONSTRAINTS, node_admits
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.pods import controller_uid, is_recreated
from nri_numa.controller.evictor import (
    EvictionBudget,
    EvictionCandidate,
    Evictor,
)
from nri_numa.kube.requests import (
    APIRequest,
    Outcome,
    OutcomeKind,
    list_of_mappings,
    mapping_or_empty,
    text_in_section,
)
from nri_numa.model.reasons import read_reason_and_detail
from nri_numa.scheduler.candidates import MAX_QUESTION_WORK, Cooperative, VerdictCache
from nri_numa.scheduler.fit import Fit, Unfit, WorkBudget

WAITING_REASON: Final = "CreateContainerError"
REJECTION_EVENT_SELECTOR: Final = "involvedObject.kind=Pod,reason=Failed"
"""Which Events are followed; the reason is the kubelet's (pkg/kubelet/events/event.go)."""
TARGET_SEARCH_STEP_WORK: Final = 1000
"""Work (`nri_numa.scheduler.fit.Work`) of one turn of a look for another node, about 10 ms."""
STUCK_POD_CHECK_INTERVAL_S: Final = 10.0
"""Seconds between two looks for another node, and at a pod in the phase Running; the kubelet asks
its own node every ten or more."""
SUSPECT_TIMEOUT_S: Final = 60.0
"""Seconds for which a pod is looked at after the last sign; its status comes after the Event."""
TARGET_RESERVATION_S: Final = 60.0
"""Seconds for which the room of a successor is not offered to another refused pod."""
MAX_STUCK_PODS: Final = 10_000
"""Refused pods that are remembered."""
MAX_RUNNING_PODS: Final = 1000
"""Pods in the phase Running that are looked at, one after the other."""


@dataclass(slots=True, kw_only=True)
class StuckPod(EvictionCandidate):
    """A pod that its node refuses.

    Attributes:
        pod_request, unstarted_request: what all of its containers ask for, and those that do not
        run.
        is_running: it is in the phase Running.
        look: for a node with room, while that goes on.
        target: where it fits, as far as known.
    """

    pod_request: PodRequest
    unstarted_request: PodRequest
    is_running: bool
    spec: Mapping[str, Any]
    refusal: str
    stuck_since: float
    look: Cooperative[tuple[str, Fit] | None] | None = None
    target: tuple[str, Fit] | None = None


@dataclass(slots=True)
class _Suspect:
    due_at: float
    expires_at: float
    uid: str = ""


class StuckPodEvictor(Evictor[StuckPod]):
    """Pods that wait for their node without effect.

    Args:
        nodes: what is known of the cluster; room of successors is held there.
        candidates: judges by it.
        reader: reads what a pod asks for.
    """

    reason, event_suffix = "NUMAPodMoved", "moved"

    def __init__(
        self,
        prefix: str,
        budget: EvictionBudget,
        delay_s: float,
        nodes: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
        now: float,
    ) -> None:
        super().__init__("stuck", prefix, budget, delay_s, now)
        self._nodes, self._candidates, self._reader = nodes, candidates, reader
        self._suspects: dict[tuple[str, str], _Suspect] = {}
        self._looking: StuckPod | None = None

    # --- what is there ----------------------------------------------------------------------------

    def on_pod(self, document: Mapping[str, Any], now: float) -> None:
        """A pod is in the phase Pending, or was read because one of its containers waits."""
        metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        said = plugin_rejection(document) if is_recreated(document) else ""
        asks = None
        if uid and said and uid not in self._evicted:
            asks = self._reader.read_pod_request(document)
        if (
            asks is None
            or not asks.has_placement_request
            or asks.invalid_reason
            or asks.is_unconstrained
        ):
            # Not refused; or no node would take it, or only a node can say: lists of CPUs.
            self.pods.pop(uid, None)
            return
        running, known = _is_pod_running(document), self.pods.get(uid)
        if known is not None and known.is_running == running:
            known.version, known.refusal = version, said
            known.pod_request, known.unstarted_request = asks, unstarted_request(asks, document)
        elif len(self.pods) < MAX_STUCK_PODS:
            self.pods[uid] = StuckPod(
                namespace=str(metadata.get("namespace", "")),
                name=str(metadata.get("name", "")),
                uid=uid,
                node=str(spec.get("nodeName", "")),
                workload=controller_uid(document),
                version=version,
                retry_at=now + self._delay_s,
                pod_request=asks,
                unstarted_request=unstarted_request(asks, document),
                is_running=running,
                spec={key: spec.get(key) for key in NODE_CONSTRAINTS},
                refusal=said,
                stuck_since=now,
            )

    def on_pod_removed(self, uid: str) -> None:
        """A pod is not in the phase Pending any more, or does not exist."""
        if (known := self.pods.get(uid)) is not None and not known.is_running:
            del self.pods[uid]

    def on_tick(self, now: float, wall: float) -> None:
        """Time has passed."""
        super().on_tick(now, wall)
        for hold in self._nodes.due_assumed_pods(now):
            self._nodes.forget_pod(hold.uid)

    # --- pods in the phase Running ----------------------------------------------------------------

    def on_rejection_event(self, event: Mapping[str, Any], now: float) -> None:
        """Take an Event of `REJECTION_EVENT_SELECTOR` up; only those of our refusals count."""
        found = mapping_or_empty(event.get("involvedObject"))
        pod = str(found.get("namespace", "")), str(found.get("name", ""))
        if f": pod {pod[0]}/{pod[1]}, container " not in str(event.get("message", "")):
            return
        if (known := self._suspects.get(pod)) is not None:
            known.expires_at = now + SUSPECT_TIMEOUT_S
        elif len(self._suspects) < MAX_RUNNING_PODS:
            self._suspects[pod] = _Suspect(due_at=now, expires_at=now + SUSPECT_TIMEOUT_S)

    def _next_list_at(self) -> float:
        return min((one.due_at for one in self._suspects.values()), default=float("inf"))

    def _next_pod_list_request(self, now: float) -> APIRequest | None:
        """The pod of a name, by a list: who moves pods may list."""
        for (namespace, name), one in self._suspects.items():
            if one.due_at <= now:
                return self._pod_list_request((namespace, name), namespace, metadata_name=name)
        return None

    def _on_pod_list(
        self, request: APIRequest, outcome: Outcome, now: float, jitter: float
    ) -> None:
        one = self._suspects[request.key]
        one.due_at = now + STUCK_POD_CHECK_INTERVAL_S
        if outcome.result is not OutcomeKind.SUCCEEDED:
            return
        document = outcome.documents[0] if outcome.documents else {}
        uid = str((document.get("metadata") or {}).get("uid", ""))
        waits = _is_pod_running(document) and bool(plugin_rejection(document))
        if one.uid and (one.uid != uid or not waits):
            self.pods.pop(one.uid, None)
        one.uid = uid if waits else ""
        if waits:
            one.expires_at = now + SUSPECT_TIMEOUT_S
            self.on_pod(document, now)
        elif not uid or one.expires_at <= now:
            del self._suspects[request.key]

    # --- what is done -----------------------------------------------------------------------------

    def _may_evict(self, pod: StuckPod, now: float) -> bool:
        """One pod at a time is looked at, for a turn: the next goes on where this one ends."""
        looking = self._looking
        if looking is not None and self.pods.get(looking.uid) is looking is not pod:
            return False
        look = pod.look = pod.look or self._find_target(pod)
        try:
            next(look)
        except StopIteration as end:
            self._looking = pod.look = None
            pod.target = end.value
            if pod.target is None:
                pod.retry_at = now + STUCK_POD_CHECK_INTERVAL_S
            return pod.target is not None
        self._looking = pod
        return False

    def _find_target(self, pod: StuckPod) -> Cooperative[tuple[str, Fit] | None]:
        """The first node by name with room, where its own has none as it says itself.

        What one look leaves for the next is judged faster then: verdicts are remembered.
        """
        work, pause = WorkBudget(), TARGET_SEARCH_STEP_WORK
        for name in sorted(self._nodes.node_names) if self._has_no_room(pod) else ():
            work.done += 1
            if work.done >= pause:
                pause = work.done + TARGET_SEARCH_STEP_WORK
                yield
            if work.done >= MAX_QUESTION_WORK:
                break
            facts = self._nodes.facts(name)
            if name == pod.node or facts is None or node_admits(facts, pod.spec) is not None:
                continue
            if not isinstance(self._nodes.free_resources(name), NodeResources):
                continue
            verdict = self._candidates.evaluate_node(pod.pod_request, name, work)
            if isinstance(verdict, Fit) and not verdict.requires_moves and not verdict.by_sums:
                return (name, verdict) if self._has_no_room(pod) else None
        return None

    def _has_no_room(self, pod: StuckPod) -> bool:
        """Whether a pod's own node says itself that it has none: else a successor could come back.

        A node of which nothing is known says nothing of why it refuses.
        """
        own = self._nodes.free_resources(pod.node)
        here = self._candidates.evaluate_node(pod.unstarted_request, pod.node)
        known = isinstance(own, NodeResources) and not own.agent_not_ready
        return known and (isinstance(here, Unfit) or here.requires_moves)

    def _record_eviction(self, pod: StuckPod, now: float) -> None:
        super()._record_eviction(pod, now)
        assert pod.target is not None  # noqa: S101  # `_may` says so
        node, fits = pod.target
        self._nodes.assume_pod(
            AssumedPod(
                request=pod.pod_request,
                node=node,
                numa_nodes=dict(fits.numa_nodes),
                charge=fits.pod_charge,
                assumed_at=now,
                expires_at=now + TARGET_RESERVATION_S,
            )
        )

    def _eviction_reason(self, pod: StuckPod, now: float) -> str:
        node = pod.target[0] if pod.target else ""
        return (
            f"node {pod.node} has refused it for {now - pod.stuck_since:.0f} s, and {node} has "
            "room; "
            f"{pod.refusal}"
        )


def plugin_rejection(document: Mapping[str, Any]) -> str:
    """What our plugin said about a pod's container that waits for it; empty where nothing is ours.

    The runtime puts its own words before ours, which begin with a reason and name the pod and the
    container.
    """
    metadata = document.get("metadata") or {}
    for one in _container_statuses(document):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") != WAITING_REASON:
            continue
        pod = f"{metadata.get('namespace')}/{metadata.get('name')}"
        found = read_reason_and_detail(str(waiting.get("message", "")), pod, str(one.get("name")))
        if found is not None:
            return ": ".join(found)
    return ""


def unstarted_request(request: PodRequest, document: Mapping[str, Any]) -> PodRequest:
    """What a pod asks for without the containers of it that run, whose share its node counts.

    What is to be together with a container that runs is judged as if it could go anywhere: so the
    node is rather taken to have room, and the pod stays.
    """
    running = {
        one.get("name")
        for one in _container_statuses(document)
        if (one.get("state") or {}).get("running") is not None
    }
    if not running:
        return request
    return structs.replace(
        request,
        containers=tuple(need for need in request.containers if need.container not in running),
        kubelet_aligned=tuple(
            need for need in request.kubelet_aligned if need.container not in running
        ),
        pod_scope_request=None,
    )


def _container_statuses(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = mapping_or_empty(document.get("status"))
    keys = ("initContainerStatuses", "containerStatuses")
    return [one for key in keys for one in list_of_mappings(status.get(key))]


def _is_pod_running(document: Mapping[str, Any]) -> bool:
    return text_in_section(document, "status", "phase") == "Running"
