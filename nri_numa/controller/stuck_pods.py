"""Pods that their node keeps rejecting, and the eviction of those that fit on another node. Pure.

A pod that the agent of its node rejects waits there with CreateContainerError: the kubelet retries
without limit, the pod is not rescheduled, and its workload creates no replacement. After a delay
the pod is evicted if its node still has no room by its published resources and another node has,
as the scheduler's extender evaluates it (`nri_numa.scheduler.fit`), within the pod's constraints on
Nodes. If some of its containers run, its node needs room for the others, and the other node for
all. Sums of requests, volumes and affinity among pods are not evaluated, so an eviction may be in
vain; the evictions of one workload are therefore limited.

Until a container has run, its pod is in the phase Pending (the kubelet's `getPhase`). A container
that ended and is to be restarted leaves its pod in the phase Running, like most pods of a cluster,
so watching Pending pods does not find it. But the kubelet writes an Event for each container that
it cannot create, with the runtime's error. The pod of such an Event is read while Events continue.

A pod with `DeviceAffinityError` is different: the kubelet allocated its devices for the pod's whole
life, and chooses anew for its successor. Such a pod is evicted if its own node, or another one, has
room as soon as its devices are free. The object of a node counts free devices and does not say
whose the others are. So as many as the pod requests count as free on each NUMA node, if there are
so many: the choice may be as bad again, and the tries of one workload are limited.
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
from nri_numa.cluster.pods import controller_uid, is_replaced_after_eviction
from nri_numa.controller.evictor import (
    MAX_EVICTION_RECORDS,
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
    section_of,
    text_in_section,
)
from nri_numa.model.reasons import DEVICE_REMEDY, RejectionReason, read_reason_and_detail
from nri_numa.scheduler.candidates import MAX_QUESTION_WORK, Cooperative, VerdictCache
from nri_numa.scheduler.fit import Fit, Unfit, WorkBudget

WAITING_REASON: Final = "CreateContainerError"
REJECTION_EVENT_SELECTOR: Final = "involvedObject.kind=Pod,reason=Failed"
"""Watched Events; the reason is the kubelet's (pkg/kubelet/events/event.go)."""
TARGET_SEARCH_STEP_WORK: Final = 1000
"""Work (`nri_numa.scheduler.fit.WorkBudget`) of one step of a target search, about 10 ms."""
STUCK_POD_CHECK_INTERVAL_S: Final = 10.0
"""Seconds between two target searches, and two reads of a pod in the phase Running; the kubelet
retries every 10 s or more."""
SUSPECT_TIMEOUT_S: Final = 60.0
"""Seconds for which a pod is read after its last Event; its status is written after the Event."""
TARGET_RESERVATION_S: Final = 60.0
"""Seconds for which the replacement's resources are not offered to another stuck pod."""
MAX_DEVICE_TRIES: Final = 3
"""Evictions of one workload for other devices, after which it rests."""
DEVICE_REST_S: Final = 1800.0
"""Seconds from the last of these evictions to the next one."""
RELEASED_EVENT_REASON: Final = "NUMADevicesReleased"
"""Reason of the Event about an eviction for other devices."""
MISALIGNED_EVENT_REASON: Final = "NUMADevicesMisaligned"
"""Reason of the Event about a pod that keeps its misaligned devices for now."""
MAX_STUCK_PODS: Final = 10_000
"""Stuck pods that are remembered."""
MAX_RUNNING_PODS: Final = 1000
"""Pods in the phase Running that are read, one after the other."""


@dataclass(slots=True, kw_only=True)
class StuckPod(EvictionCandidate):
    """A pod that its node rejects.

    Attributes:
        has_misaligned_devices: the devices that the kubelet chose are the reason.
        has_rest_event: an Event says that it is not evicted for now.
        pod_request, unstarted_request: requests of all containers, and of those that do not run.
        is_running: the pod is in the phase Running.
        target_search: search for a node with room, while it runs.
        target: node that was found, with the fit.
    """

    pod_request: PodRequest
    unstarted_request: PodRequest
    is_running: bool
    spec: Mapping[str, Any]
    rejection_text: str
    stuck_since: float
    has_misaligned_devices: bool = False
    has_rest_event: bool = False
    target_search: Cooperative[tuple[str, Fit] | None] | None = None
    target: tuple[str, Fit] | None = None


@dataclass(slots=True)
class _Suspect:
    due_at: float
    expires_at: float
    uid: str = ""


class DeviceTries:
    """Evictions of each workload's pods so that the kubelet chooses devices anew."""

    def __init__(self) -> None:
        self._tries: dict[str, tuple[int, float]] = {}

    def count_tries(self, workload: str, now_s: float) -> int:
        """Return the number of a workload's tries; after a rest there are none."""
        count, rest_ends_at = self._tries.get(workload, (0, 0.0))
        return count if now_s < rest_ends_at else 0

    def allowed_at(self, workload: str, now_s: float) -> float:
        """Return when the next try of a workload is allowed; not after ``now_s`` for now."""
        is_allowed = self.count_tries(workload, now_s) < MAX_DEVICE_TRIES
        return now_s if is_allowed else self._tries[workload][1]

    def record_try(self, workload: str, now_s: float) -> None:
        """Record a try."""
        if len(self._tries) >= MAX_EVICTION_RECORDS:
            self._tries = {w: tries for w, tries in self._tries.items() if now_s < tries[1]}
        self._tries[workload] = self.count_tries(workload, now_s) + 1, now_s + DEVICE_REST_S


class StuckPodEvictor(Evictor[StuckPod]):
    """Evicts pods that their node keeps rejecting.

    Args:
        nodes: state of the cluster; replacements are assumed there.
        candidates: evaluates nodes by that state.
        reader: reads the requests of pods.
    """

    name, reason, event_suffix = "stuck", "NUMAPodMoved", "moved"

    def __init__(
        self,
        prefix: str,
        budget: EvictionBudget,
        delay_s: float,
        nodes: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
        now_s: float,
    ) -> None:
        super().__init__(prefix, budget, delay_s, now_s)
        self._nodes, self._candidates, self._reader = nodes, candidates, reader
        self._suspects: dict[tuple[str, str], _Suspect] = {}
        self._looking: StuckPod | None = None
        self._device_tries = DeviceTries()

    def resting_count(self) -> int:
        """Return the number of pods with misaligned devices that are not evicted for now."""
        return sum(pod.has_rest_event for pod in self.pods.values())

    # --- pods -------------------------------------------------------------------------------------

    def on_pod(self, document: Mapping[str, Any], now_s: float) -> None:
        """Check a pod that is Pending, or that was read because one of its containers waits."""
        metadata, spec = document.get("metadata") or {}, document.get("spec") or {}
        uid, version = str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))
        rejection = plugin_rejection(document) if is_replaced_after_eviction(document) else None
        request = None
        if uid and rejection and uid not in self._evicted:
            request = self._reader.read_pod_request(document)
        if (
            rejection is None
            or request is None
            or not request.has_placement_request
            or request.invalid_reason
            or request.is_unconstrained
        ):
            # Not rejected; or no node would admit it, or only a node can tell: lists of CPUs.
            self.pods.pop(uid, None)
            return
        running, pod = _is_pod_running(document), self.pods.get(uid)
        misaligned = rejection[0] == RejectionReason.DEVICE_AFFINITY
        if pod is not None and pod.is_running == running:
            pod.version, pod.rejection_text = version, ": ".join(rejection)
            pod.has_misaligned_devices = misaligned
            pod.has_rest_event = pod.has_rest_event and misaligned
            pod.pod_request, pod.unstarted_request = request, unstarted_request(request, document)
        elif len(self.pods) < MAX_STUCK_PODS:
            self.pods[uid] = StuckPod(
                namespace=str(metadata.get("namespace", "")),
                name=str(metadata.get("name", "")),
                uid=uid,
                node=str(spec.get("nodeName", "")),
                workload=controller_uid(document),
                version=version,
                retry_at=now_s + self._delay_s,
                pod_request=request,
                unstarted_request=unstarted_request(request, document),
                is_running=running,
                spec={key: spec.get(key) for key in NODE_CONSTRAINTS},
                rejection_text=": ".join(rejection),
                stuck_since=now_s,
                has_misaligned_devices=misaligned,
            )

    def on_pod_removed(self, uid: str) -> None:
        """Drop a pod that is no longer Pending or no longer exists."""
        if (pod := self.pods.get(uid)) is not None and not pod.is_running:
            del self.pods[uid]

    def on_tick(self, now_s: float, wall: float) -> None:
        """Forget assumed replacements that are due."""
        super().on_tick(now_s, wall)
        for hold in self._nodes.due_assumed_pods(now_s):
            self._nodes.forget_pod(hold.uid)

    # --- pods in the phase Running ----------------------------------------------------------------

    def on_rejection_event(self, event: Mapping[str, Any], now_s: float) -> None:
        """Record the pod of an Event of `REJECTION_EVENT_SELECTOR` if the agent rejected it."""
        involved_object = mapping_or_empty(event.get("involvedObject"))
        pod = str(involved_object.get("namespace", "")), str(involved_object.get("name", ""))
        if f": pod {pod[0]}/{pod[1]}, container " not in str(event.get("message", "")):
            return
        if (suspect := self._suspects.get(pod)) is not None:
            suspect.expires_at = now_s + SUSPECT_TIMEOUT_S
        elif len(self._suspects) < MAX_RUNNING_PODS:
            self._suspects[pod] = _Suspect(due_at=now_s, expires_at=now_s + SUSPECT_TIMEOUT_S)

    def _next_list_at(self) -> float:
        return min((suspect.due_at for suspect in self._suspects.values()), default=float("inf"))

    def _next_pod_list_request(self, now_s: float) -> APIRequest | None:
        """Request a pod by its name with a list, which the evictor's Role allows."""
        for (namespace, name), suspect in self._suspects.items():
            if suspect.due_at <= now_s:
                return self._pod_list_request((namespace, name), namespace, metadata_name=name)
        return None

    def _on_pod_list(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        suspect = self._suspects[request.key]
        suspect.due_at = now_s + STUCK_POD_CHECK_INTERVAL_S
        if outcome.result is not OutcomeKind.SUCCEEDED:
            return
        document = outcome.documents[0] if outcome.documents else {}
        uid = str((document.get("metadata") or {}).get("uid", ""))
        is_stuck = _is_pod_running(document) and plugin_rejection(document) is not None
        if suspect.uid and (suspect.uid != uid or not is_stuck):
            self.pods.pop(suspect.uid, None)
        suspect.uid = uid if is_stuck else ""
        if is_stuck:
            suspect.expires_at = now_s + SUSPECT_TIMEOUT_S
            self.on_pod(document, now_s)
        elif not uid or suspect.expires_at <= now_s:
            del self._suspects[request.key]

    # --- evictions --------------------------------------------------------------------------------

    def _workload_allowed_at(self, pod: StuckPod, now_s: float) -> float:
        """Add the rest after the tries to choose devices anew, and an Event about it."""
        allowed_at = super()._workload_allowed_at(pod, now_s)
        if not pod.has_misaligned_devices:
            return allowed_at
        allowed_at = max(allowed_at, self._device_tries.allowed_at(pod.workload, now_s))
        if allowed_at > now_s and not pod.has_rest_event:
            note = (
                f"not evicted for {(allowed_at - now_s) / 60:.0f} min: its devices are misaligned "
                "after all evictions that its workload may have; the kubelet aligns devices with "
                f"{DEVICE_REMEDY}"
            )
            self._add_event(pod, MISALIGNED_EVENT_REASON, note, "misaligned")
        pod.has_rest_event = allowed_at > now_s
        return allowed_at

    def _event_reason(self, pod: StuckPod) -> str:
        return RELEASED_EVENT_REASON if pod.has_misaligned_devices else self.reason

    def _may_evict(self, pod: StuckPod, now_s: float) -> bool:
        """Run one step of a pod's target search; one pod's search runs at a time."""
        looking = self._looking
        if looking is not None and self.pods.get(looking.uid) is looking is not pod:
            return False
        search = pod.target_search = pod.target_search or self._find_target(pod)
        try:
            next(search)
        except StopIteration as end:
            self._looking = pod.target_search = None
            pod.target = end.value
            if pod.target is None:
                pod.retry_at = now_s + STUCK_POD_CHECK_INTERVAL_S
            return pod.target is not None
        self._looking = pod
        return False

    def _find_target(self, pod: StuckPod) -> Cooperative[tuple[str, Fit] | None]:
        """Find the first node by name with room if the pod's own node has none.

        Its own node counts if the kubelet can choose other devices there for its successor.
        A search that stops at the work limit is faster next time: verdicts are cached.
        """
        if pod.has_misaligned_devices and (fit := self._fit_with_devices_freed(pod)) is not None:
            return pod.node, fit
        work, pause = WorkBudget(), TARGET_SEARCH_STEP_WORK
        for name in sorted(self._nodes.node_names) if self._has_no_room(pod) else ():
            work.done += 1
            if work.done >= pause:
                pause = work.done + TARGET_SEARCH_STEP_WORK
                yield
            if work.done >= MAX_QUESTION_WORK:
                break
            facts = self._nodes.node_facts(name)
            if name == pod.node or facts is None or node_admits(facts, pod.spec) is not None:
                continue
            if not isinstance(self._nodes.free_resources(name), NodeResources):
                continue
            verdict = self._candidates.evaluate_node(pod.pod_request, name, work)
            if isinstance(verdict, Fit) and not verdict.requires_moves and not verdict.by_sums:
                return (name, verdict) if self._has_no_room(pod) else None
        return None

    def _fit_with_devices_freed(self, pod: StuckPod) -> Fit | None:
        """Return the fit on its own node once the pod's devices are free; None if there is none.

        A node that does not count all of these devices gives no verdict.
        """
        room, facts = self._nodes.free_resources(pod.node), self._nodes.node_facts(pod.node)
        devices = pod.unstarted_request.device_amounts
        if (
            not isinstance(room, NodeResources)
            or room.agent_not_ready
            or facts is None
            or node_admits(facts, pod.spec) is not None
            or not devices
            or not devices.keys() <= room.capacity_by_resource.keys()
        ):
            return None
        freed_room = room.with_devices_freed(devices)
        verdict = self._candidates.evaluate_room(pod.unstarted_request, freed_room)
        if isinstance(verdict, Unfit) or verdict.requires_moves or verdict.by_sums:
            return None
        return verdict

    def _has_no_room(self, pod: StuckPod) -> bool:
        """Return True if a pod's own node publishes too little room; else a replacement may return.

        A node without a readable topology gives no reason for its rejection.
        """
        resources = self._nodes.free_resources(pod.node)
        verdict = self._candidates.evaluate_node(pod.unstarted_request, pod.node)
        agent_ready = isinstance(resources, NodeResources) and not resources.agent_not_ready
        return agent_ready and (isinstance(verdict, Unfit) or verdict.requires_moves)

    def _record_eviction(self, pod: StuckPod, now_s: float) -> None:
        super()._record_eviction(pod, now_s)
        if pod.has_misaligned_devices:
            self._device_tries.record_try(pod.workload, now_s)
        assert pod.target is not None  # noqa: S101  # `_may` says so
        node, fits = pod.target
        self._nodes.assume_pod(
            AssumedPod(
                request=pod.pod_request,
                node=node,
                numa_nodes=dict(fits.numa_nodes),
                charge=fits.pod_charge,
                assumed_at=now_s,
                expires_at=now_s + TARGET_RESERVATION_S,
            )
        )

    def _eviction_reason(self, pod: StuckPod, now_s: float) -> str:
        node = pod.target[0] if pod.target else ""
        if pod.has_misaligned_devices:
            tries = self._device_tries.count_tries(pod.workload, now_s)
            return (
                f"the kubelet chose misaligned devices on {pod.node}, and chooses anew for its "
                f"successor (try {tries} of {MAX_DEVICE_TRIES}); {node} has room; "
                f"{pod.rejection_text}"
            )
        return (
            f"node {pod.node} has rejected it for {now_s - pod.stuck_since:.0f} s, and {node} has "
            f"room; {pod.rejection_text}"
        )


def plugin_rejection(document: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return reason and detail of the rejection of a waiting container; None if there is none.

    The runtime puts its own text before the plugin's, which begins with a reason and names the pod
    and the container.
    """
    metadata = document.get("metadata") or {}
    for status in _container_statuses(document):
        state = (status.get("state") or {}).get("waiting") or {}
        if state.get("reason") != WAITING_REASON:
            continue
        pod = f"{metadata.get('namespace')}/{metadata.get('name')}"
        texts = read_reason_and_detail(str(state.get("message", "")), pod, str(status.get("name")))
        if texts is not None:
            return texts
    return None


def unstarted_request(request: PodRequest, document: Mapping[str, Any]) -> PodRequest:
    """Return a pod's request without its running containers, which the node counts already.

    Containers that must be together with a running one are evaluated as if they could go anywhere.
    This errs towards a node with room, so the pod stays.
    """
    running = {
        status.get("name")
        for status in _container_statuses(document)
        if (status.get("state") or {}).get("running") is not None
    }
    if not running:
        return request
    return structs.replace(
        request,
        containers=tuple(c for c in request.containers if c.container not in running),
        kubelet_aligned=tuple(c for c in request.kubelet_aligned if c.container not in running),
        pod_scope_request=None,
    )


def _container_statuses(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = section_of(document, "status")
    keys = ("initContainerStatuses", "containerStatuses")
    return [entry for key in keys for entry in list_of_mappings(status.get(key))]


def _is_pod_running(document: Mapping[str, Any]) -> bool:
    return text_in_section(document, "status", "phase") == "Running"
