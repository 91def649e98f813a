"""Evictions that were answered, until the pods that they make room for are bound.

Between the deletion of the victims and the node's next object the pod still does not fit, and
kube-scheduler would evict again. So a pod with a pending eviction gets no further victims, and the
resources that these free are reserved from pods that are not more important.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from nri_numa.cluster.cluster_state import ClusterState, NodeInfo
from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.kube.api import uid_of
from nri_numa.kube.requests import text_in_section
from nri_numa.model.machine import count_text
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.candidates import FilterResult
from nri_numa.scheduler.metrics import SchedulerMetrics
from nri_numa.scheduler.protocol import ProposedVictims

log = get_logger("scheduler")

EVICTION_TIMEOUT_S: Final = 60.0
"""Seconds without a second eviction for one pod, and until its victims count as evicted in vain."""
MAX_TERMINATION_S: Final = 600.0
"""Seconds for which resources are reserved while victims end, and for which a reason is shown."""
_MAX_PENDING_PODS: Final = 1000
"""Pods whose evictions, or reasons against them, are remembered."""
_MAX_NAMED_VICTIMS: Final = 2
"""Victims that a reason names; kube-scheduler repeats it in the pod's condition."""
_MAX_NAMED_NODES: Final = 3
"""Nodes that an Event names; kube-scheduler chooses one of all."""
_WAITING_TEXT: Final = "waits for the eviction of"
_HOPELESS_TEXT: Final = "preemption cannot help: without the pods of lower priority"


class PreemptionEventReason(StrEnum):
    """Reason of an Event about a pod that preemption was tried for."""

    WAITS_FOR_EVICTION = "WaitsForEviction"
    PREEMPTION_CANNOT_HELP = "PreemptionCannotHelp"


class NodeEviction(Struct, frozen=True, kw_only=True):
    """Victims on one node, and the charge of the pod that replaces them.

    Attributes:
        names: of the victims, with their namespaces.
        marks: hashes of their containers, as the node's object lists them.
        published: numbers of the node at the time.
    """

    victims: ProposedVictims
    names: tuple[str, ...]
    marks: frozenset[str]
    published: NodeInfo | None
    charge: ResourceCounts | None

    @property
    def victims_text(self) -> str:
        """Names of the victims."""
        names, more_count = self.names[:_MAX_NAMED_VICTIMS], len(self.names) - _MAX_NAMED_VICTIMS
        more_text = f" and {more_count} more" if more_count > 0 else ""
        return f"{', '.join(names)}{more_text}"


class PendingEviction(Struct, kw_only=True):
    """The last answer for a pod.

    Attributes:
        nodes: victims by node; one node once its choice is known.
        hopeless_reason: why no eviction helps; empty if there are victims.
        is_node_freed: the chosen node no longer counts the victims.
    """

    request: PodRequest
    nodes: dict[str, NodeEviction]
    hopeless_reason: str
    answered_at: float
    expires_at: float
    is_node_freed: bool = False


class PendingEvictions:
    """Remembers answers, and reserves what their victims free."""

    def __init__(
        self,
        nodes: ClusterState,
        clock: Callable[[], float],
        metrics: SchedulerMetrics,
        wake_pods: Callable[[str], None],
    ) -> None:
        self._nodes, self._clock, self._metrics = nodes, clock, metrics
        self._wake_pods = wake_pods
        self._pending: dict[str, PendingEviction] = {}

    def waits_for_eviction(self, uid: str) -> bool:
        """Return True if victims of the last answer for a pod may still end."""
        pending = self._pending.get(uid)
        return (
            pending is not None
            and self._clock() - pending.answered_at < EVICTION_TIMEOUT_S
            and any(map(self._may_count_victims, pending.nodes, pending.nodes.values()))
        )

    def eviction_nodes(self, uid: str) -> list[str]:
        """Return the nodes of the last answer for a pod; one once its choice is known."""
        return list(self._pending[uid].nodes) if uid in self._pending else []

    def _may_count_victims(self, node: str, eviction: NodeEviction) -> bool:
        """Return True unless neither a node nor a reservation counts a victim any more."""
        if not self._nodes.assumed_pods.keys().isdisjoint(eviction.victims.uids):
            return True
        published = self._nodes.published_resources(node)
        if not isinstance(published, NodeResources):
            return True
        if published.counted_containers is None:
            return published == eviction.published
        return not eviction.marks.isdisjoint(published.counted_containers.split())

    def record_answer(
        self, request: PodRequest, nodes: dict[str, NodeEviction], hopeless_reason: str
    ) -> tuple[PreemptionEventReason, str] | None:
        """Remember an answer: the victims by node, or why there are none.

        Return reason and text of an Event if it is news for the pod.
        """
        earlier = self._pending.get(request.uid)
        if earlier is not None:
            self._forget_pod(request.uid)
        if not (nodes or hopeless_reason):
            return None
        if len(self._pending) >= _MAX_PENDING_PODS:
            # The oldest; those without victims first.
            self._forget_pod(min(self._pending, key=lambda uid: bool(self._pending[uid].nodes)))
        now_s = self._clock()
        self._pending[request.uid] = PendingEviction(
            request=request,
            nodes=nodes,
            hopeless_reason="" if nodes else hopeless_reason,
            answered_at=now_s,
            expires_at=now_s + (EVICTION_TIMEOUT_S if nodes else MAX_TERMINATION_S),
        )
        for node, eviction in nodes.items():
            if eviction.charge is not None:
                self._nodes.nominate_pod(request, node, eviction.charge)
        if nodes:
            return PreemptionEventReason.WAITS_FOR_EVICTION, _evictions_text(nodes)
        if earlier is not None and earlier.hopeless_reason == hopeless_reason:
            return None
        text = f"{_HOPELESS_TEXT} it {hopeless_reason}"
        return PreemptionEventReason.PREEMPTION_CANNOT_HELP, text

    def record_nomination(self, pod: Mapping[str, Any]) -> None:
        """Record the node that kube-scheduler has chosen for a pod, if it is known."""
        pending = self._pending.get(uid_of(pod))
        node = text_in_section(pod, "status", "nominatedNodeName")
        if pending is not None and node in pending.nodes:
            if not pending.is_node_freed:
                pending.expires_at = pending.answered_at + MAX_TERMINATION_S
            self._choose_node(pending, node)

    def select_leaving_pods(
        self, request: PodRequest, node: str, staying_uids: Set[str]
    ) -> Set[str] | None:
        """Return victims of pods as important as this one; None if the node may be one of theirs.

        If one of a pod's victims ends, its node is chosen.
        """
        leaving_uids: set[str] = set()
        for uid, pending in self._pending.items():
            eviction = pending.nodes.get(node)
            if (
                eviction is None
                or uid == request.uid
                or pending.request.priority < request.priority
            ):
                continue
            if not staying_uids >= set(eviction.victims.uids):
                self._choose_node(pending, node)
            if len(pending.nodes) > 1:
                return None
            leaving_uids.update(eviction.victims.uids)
        return leaving_uids

    def _choose_node(self, pending: PendingEviction, node: str) -> None:
        for other_node in pending.nodes.keys() - {node}:
            del pending.nodes[other_node]
            self._end_reservation(pending, other_node)

    def explain_rejections(self, uid: str, result: FilterResult) -> None:
        """Say of a pod's rejected nodes that it waits for an eviction, or that none helps."""
        pending = self._pending.get(uid)
        if pending is None:
            return
        for node, text in result.failed.items():
            if node in pending.nodes:
                result.failed[node] = f"{_WAITING_TEXT} {pending.nodes[node].victims_text}"
            elif pending.hopeless_reason:
                result.failed[node] = f"{text}; {_HOPELESS_TEXT} it {pending.hopeless_reason}"

    def on_bound(self, uid: str, node: str) -> None:
        """Forget the eviction for a pod that is bound."""
        if (pending := self._pending.get(uid)) is not None:
            pending.is_node_freed = pending.is_node_freed and node not in pending.nodes
            self._forget_pod(uid)

    def expire_evictions(self) -> None:
        """Record victims that their node no longer counts, and forget old answers."""
        now_s = self._clock()
        for uid, pending in list(self._pending.items()):
            if len(pending.nodes) == 1 and not pending.is_node_freed:
                ((node, eviction),) = pending.nodes.items()
                if not self._may_count_victims(node, eviction):
                    pending.is_node_freed, pending.expires_at = True, now_s + EVICTION_TIMEOUT_S
            if now_s >= pending.expires_at:
                self._forget_pod(uid)

    def _forget_pod(self, uid: str) -> None:
        """Forget a pod; victims that are gone were evicted in vain."""
        pending = self._pending.pop(uid)
        for node, eviction in pending.nodes.items():
            if pending.is_node_freed:
                self._metrics.pods_evicted_in_vain.inc(len(eviction.names))
                log.warning(
                    "pods evicted in vain",
                    pod=f"{pending.request.namespace}/{pending.request.name}",
                    node=node,
                    victims=", ".join(eviction.names)[:500],
                )
            self._end_reservation(pending, node)

    def _end_reservation(self, pending: PendingEviction, node: str) -> None:
        self._nodes.withdraw_nomination(pending.request.uid, node)
        self._wake_pods(node)


def _evictions_text(evictions: Mapping[str, NodeEviction]) -> str:
    """``waits for the eviction of a, b and 1 more from node x, or of c from node y``."""
    texts = [f"{eviction.victims_text} from node {node}" for node, eviction in evictions.items()]
    more_count = len(texts) - _MAX_NAMED_NODES
    more_text = f", or of pods of {count_text(more_count, 'other node')}" if more_count > 0 else ""
    return f"{_WAITING_TEXT} {', or of '.join(texts[:_MAX_NAMED_NODES])}{more_text}"
