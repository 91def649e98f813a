"""The verb preempt: victims whose eviction frees the NUMA nodes that a pod needs.

kube-scheduler proposes victims by the sums of Nodes. Here the pods of a node are listed when it is
asked about, and `nri_numa.scheduler.eviction_search` selects those whose end makes room. A victim
gives back the NUMA nodes that the extender or the publisher wrote; a pod of which nothing is known
gives back nothing.

Between the deletion of the victims and the node's next object the pod still does not fit, and
kube-scheduler would evict again. So an eviction is remembered until the pod is bound, and its
resources are reserved from pods that are not more important.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final
from zlib import crc32

from msgspec import Struct, field
from msgspec.structs import replace
from prometheus_client import Counter

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.node_sums import (
    DisruptionBudget,
    allocatable_sums,
    has_neighbour_constraints,
    missing_sums,
    pod_sums,
    read_disruption_budget,
    repels_other_pods,
)
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.pods import pod_priority
from nri_numa.kube.api import uid_of
from nri_numa.kube.requests import (
    KubeClient,
    KubeError,
    Resource,
    annotations_of,
    text_in_section,
)
from nri_numa.model.counted_containers import counted_container_hash
from nri_numa.model.machine import count_text
from nri_numa.model.workload import ENDED_POD_PHASES, Strategy
from nri_numa.observe.logs import get_logger
from nri_numa.publisher.desired_objects import pod_event
from nri_numa.scheduler.candidates import Cooperative, FilterResult, VerdictCache
from nri_numa.scheduler.eviction_search import (
    MAX_SEARCH_WORK,
    CandidateNode,
    EvictablePod,
    Eviction,
    select_victims,
)
from nri_numa.scheduler.fit import Fit, Unfit, WorkBudget
from nri_numa.scheduler.protocol import PreemptionArgs, ProposedVictims
from nri_numa.service import run_in_turns

log = get_logger("scheduler")

MAX_LISTED_NODES: Final = 32
"""Nodes of one question whose pods are listed."""
LIST_TIMEOUT_S: Final = 2.0
"""Seconds for all lists of a question; kube-scheduler waits 5 (httpTimeout)."""
EVICTION_TIMEOUT_S: Final = 60.0
"""Seconds without a second eviction for one pod, and until its victims count as evicted in vain."""
MAX_TERMINATION_S: Final = 600.0
"""Seconds for which resources are reserved while victims end."""
_MAX_QUESTION_WORK: Final = 12_000
"""Work for one question (`WorkBudget`), 0.12 s; nodes beyond it are left out."""
_POD_WORK: Final = 20
"""Work of reading one pod."""
_MAX_EVICTIONS: Final = 1000
"""Pods whose evictions are remembered."""
_MAX_NAMED_VICTIMS: Final = 2
"""Victims that a reason names; kube-scheduler repeats it in the pod's condition."""
_MAX_NAMED_NODES: Final = 3
"""Nodes that an Event names; kube-scheduler chooses one of all."""
EVENT_TIMEOUT_S: Final = 1.0
"""Seconds without a byte for an Event, while kube-scheduler waits for the answer."""
_WAITING_TEXT: Final = "waits for the eviction of"
_HOPELESS_TEXT: Final = "preemption cannot help: without the pods of lower priority"


class PreemptionEventReason(StrEnum):
    """Reason of an Event about a pod that preemption was tried for."""

    WAITS_FOR_EVICTION = "WaitsForEviction"
    PREEMPTION_CANNOT_HELP = "PreemptionCannotHelp"


class NodeEviction(Struct, frozen=True, kw_only=True):
    """Victims on one node, and the charge of the pod that replaces them.

    Attributes:
        marks: hashes of their containers, as the node's object lists them.
        room: resources of the node at the time.
    """

    uids: frozenset[str]
    names: tuple[str, ...]
    marks: frozenset[str]
    room: NodeResources
    charge: ResourceCounts | None

    def is_counted_by(self, room: object) -> bool:
        """Return True if the numbers of the node count a victim, as far as its object says."""
        if not isinstance(room, NodeResources):
            return True
        if room.counted_containers is None:
            return room == self.room
        return not self.marks.isdisjoint(room.counted_containers.split())

    @property
    def victims_text(self) -> str:
        """Names of the victims."""
        listed, more = self.names[:_MAX_NAMED_VICTIMS], len(self.names) - _MAX_NAMED_VICTIMS
        return f"{', '.join(listed)}{f' and {more} more' if more > 0 else ''}"


class PendingEviction(Struct, kw_only=True):
    """An eviction that was answered; ``nodes`` has one node once its choice is known.

    Attributes:
        freed_at: time at which the node no longer counted the victims; None before.
        is_nominated: kube-scheduler has evicted the victims, as far as the pod says.
    """

    request: PodRequest
    nodes: dict[str, NodeEviction]
    answered_at: float
    freed_at: float | None = None
    is_nominated: bool = False

    @property
    def only_node(self) -> str:
        """The chosen node; empty if it is unknown."""
        return next(iter(self.nodes)) if len(self.nodes) == 1 else ""


class _ListedNode(Struct, frozen=True):
    """A Node and the pods on it, as documents."""

    node: Mapping[str, Any]
    pods: list[dict[str, Any]]


class PreemptionAnswer(Struct):
    """Victims by node, and the reason why the other nodes were left out."""

    victims: dict[str, ProposedVictims] = field(default_factory=dict)
    evictions: dict[str, NodeEviction] = field(default_factory=dict)
    reason: str = ""


class Preemption:
    """Selects victims, and remembers them until the pod that they make room for is bound."""

    def __init__(
        self,
        api: KubeClient,
        nodes: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
        strategy: Strategy,
        clock: Callable[[], float],
        *,
        prefix: str,
        nodes_left_out: Counter,
        victims_changed: Counter,
        evicted_in_vain: Counter,
        wake: Callable[[str], None],
    ) -> None:
        self._api, self._nodes, self._candidates = api, nodes, candidates
        self._reader, self._strategy, self._clock, self._wake = reader, strategy, clock, wake
        self._left_out, self._changed, self._in_vain = (
            nodes_left_out,
            victims_changed,
            evicted_in_vain,
        )
        self._prefix = prefix
        self._pending: dict[str, PendingEviction] = {}
        self._hopeless: dict[str, str] = {}
        self._first = 0

    # --- the verb ---------------------------------------------------------------------------------

    async def select_victims(self, question: PreemptionArgs) -> Mapping[str, ProposedVictims]:
        """Return the victims by node, without the nodes where no eviction helps."""
        request = self._reader.read_pod_request(question.pod)
        proposed = question.victims_by_node
        if request.is_unconstrained:
            return proposed
        self.record_nomination(question.pod)
        if request.invalid_reason or self._waits_for_eviction(request.uid):
            self._left_out.inc(len(proposed))
            return {}
        names, unknown = self._select_nodes(request, proposed)
        listed, budgets = await self._list(names)
        answer = await run_in_turns(self._answer_steps(question, request, listed, budgets))
        answer.victims |= unknown
        event = self._remember(request, answer)
        if event is not None:
            await self._create_event(request, *event)
        self._left_out.inc(len(proposed.keys() - answer.victims.keys()))
        log.info(
            "victims selected",
            pod=f"{request.namespace}/{request.name}",
            node_count=len(proposed),
            victim_node_count=len(answer.victims),
            problem=answer.reason,
        )
        return dict(answer.victims)

    def _select_nodes(
        self, request: PodRequest, proposed: Mapping[str, ProposedVictims]
    ) -> tuple[list[str], dict[str, ProposedVictims]]:
        """Select the nodes to list, fewest broken budgets first; and nodes without an object.

        Equally good ones take turns, by name, from question to question.
        """
        ordered = sorted(proposed)
        first = self._first % max(1, len(ordered))
        self._first += MAX_LISTED_NODES
        turns = sorted(ordered[first:] + ordered[:first], key=lambda n: proposed[n].violations)
        names: list[str] = []
        unknown: dict[str, ProposedVictims] = {}
        for name in turns:
            verdict = self._candidates.evaluate_node(request, name)
            if isinstance(self._nodes.published_resources(name), NodeResources):
                if isinstance(verdict, Fit) or not verdict.unresolvable:
                    names.append(name)
            elif isinstance(verdict, Fit) and proposed[name].uids:
                unknown[name] = proposed[name]
            if len(names) == MAX_LISTED_NODES:
                break
        return names, unknown

    async def _list(
        self, names: Iterable[str]
    ) -> tuple[dict[str, _ListedNode], list[DisruptionBudget] | None]:
        """Read Nodes with their pods, and budgets; those that are late or fail are missing."""
        budgets = asyncio.create_task(
            self._api.list_objects(Resource.DISRUPTION_BUDGETS.object_or_list_path())
        )
        tasks = {name: asyncio.create_task(self._list_node(name)) for name in names}
        everything: list[asyncio.Task[Any]] = [budgets, *tasks.values()]
        try:
            _, late = await asyncio.wait(everything, timeout=LIST_TIMEOUT_S)
        finally:
            for task in everything:
                task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task in everything:
            if task not in late and isinstance(task.exception(), KubeError):
                log.info("objects for preemption not read", problem=str(task.exception())[:300])
        listed = {name: task.result() for name, task in tasks.items() if _has_result(task)}
        if not _has_result(budgets):
            return listed, None
        return listed, [read_disruption_budget(document) for document in budgets.result()]

    async def _list_node(self, name: str) -> _ListedNode:
        selector = ",".join(f"status.phase!={phase}" for phase in sorted(ENDED_POD_PHASES))
        node, pods = await asyncio.gather(
            self._api.request_json("GET", Resource.NODES.object_or_list_path(name=name)),
            self._api.list_objects(
                Resource.PODS.object_or_list_path(), f"spec.nodeName={name},{selector}"
            ),
        )
        return _ListedNode(node, pods)

    def _answer_steps(
        self,
        question: PreemptionArgs,
        request: PodRequest,
        listed: Mapping[str, _ListedNode],
        budgets: list[DisruptionBudget] | None,
    ) -> Cooperative[PreemptionAnswer]:
        """Select the victims of each listed node, one node in each step."""
        answer, work = PreemptionAnswer(), WorkBudget()
        for name in listed:
            yield
            work.done += _POD_WORK * len(listed[name].pods)
            if work.done >= _MAX_QUESTION_WORK:
                break
            proposed = question.victims_by_node[name]
            node = self._read_candidate(
                question.pod, request, name, listed[name], budgets, proposed.uids
            )
            if node is None:
                continue
            limit = min(MAX_SEARCH_WORK, _MAX_QUESTION_WORK - work.done)
            outcome = select_victims(node, self._strategy, work, limit=limit)
            if isinstance(outcome, Unfit):
                answer.reason = answer.reason or outcome.reason_text(outcome.best_amount)
            elif outcome.pods:
                uids = tuple(pod.uid for pod in outcome.pods)
                # Without the budgets kube-scheduler's own count is the only one.
                violations = proposed.violations if budgets is None else outcome.violations
                answer.victims[name] = ProposedVictims(uids, violations)
                answer.evictions[name] = self._node_eviction(node, outcome, listed[name].pods)
                self._changed.inc({*uids} != {*proposed.uids})
        return answer

    # --- reading a node ---------------------------------------------------------------------------

    def _read_candidate(
        self,
        pod: Mapping[str, Any],
        request: PodRequest,
        name: str,
        listed: _ListedNode,
        budgets: list[DisruptionBudget] | None,
        proposed: Iterable[str],
    ) -> CandidateNode | None:
        """Read a node as it is without the pods that leave it; None if another pod may get it."""
        room, documents = self._nodes.free_resources(name), listed.pods
        published = self._nodes.published_resources(name)
        leaving = {uid_of(document) for document in documents if _is_terminating(document)}
        for other in self._more_important_evictions(request, name):
            self._narrow_if_begun(other, name, {uid_of(d) for d in documents} - leaving)
            if (eviction := other.nodes.get(name)) is not None:
                if other.only_node != name:
                    return None
                leaving |= eviction.uids
        if not isinstance(room, NodeResources) or not isinstance(published, NodeResources):
            return None
        sums = {uid_of(d): pod_sums(d) for d in documents if uid_of(d) not in leaving}
        release = _Release(self._reader, self._nodes, published)
        pods: dict[str, EvictablePod] = {}
        charges: list[ResourceCounts] = []
        for document in documents:
            uid = uid_of(document)
            if uid in leaving:
                charges += [c for c in (release.of_pod(document),) if c is not None]
            elif pod_priority(document) < request.priority and not _is_mirror(document):
                pods[uid] = release.evictable_pod(document, sums[uid], budgets or [])
        return CandidateNode(
            room=room.plus_pods(charges).minus_pods(self._nodes.nominated_charges(name, request)),
            request=request,
            pods=tuple(pods.values()),
            missing=missing_sums(pod_sums(pod), allocatable_sums(listed.node), sums.values()),
            allowed=tuple(budget.allowed for budget in budgets or ()),
            proposed=tuple(pods[uid] for uid in proposed if uid in pods),
            may_change=budgets is not None and not has_neighbour_constraints(pod),
        )

    def _more_important_evictions(
        self, request: PodRequest, node: str
    ) -> Iterable[PendingEviction]:
        return [
            pending
            for uid, pending in self._pending.items()
            if uid != request.uid
            and pending.request.priority >= request.priority
            and node in pending.nodes
        ]

    def _narrow_if_begun(self, pending: PendingEviction, node: str, staying: set[str]) -> None:
        """Record that a pod's node is chosen if one of its victims there ends."""
        if not pending.nodes[node].uids <= staying:
            self._choose_node(pending, node)

    def _node_eviction(
        self, node: CandidateNode, eviction: Eviction, pods: Iterable[Mapping[str, Any]]
    ) -> NodeEviction:
        uids = frozenset(pod.uid for pod in eviction.pods)
        requests = [self._reader.read_pod_request(d) for d in pods if uid_of(d) in uids]
        return NodeEviction(
            uids=uids,
            names=tuple(pod.full_name for pod in eviction.pods),
            marks=frozenset(
                counted_container_hash(r.uid, c.container) for r in requests for c in r.containers
            ),
            room=node.room,
            charge=eviction.fit.pod_charge,
        )

    # --- memory -----------------------------------------------------------------------------------

    def _waits_for_eviction(self, uid: str) -> bool:
        """Return True if the victims of the last answer may still end; else forget them."""
        pending = self._pending.get(uid)
        if pending is None:
            return False
        if self._clock() - pending.answered_at < EVICTION_TIMEOUT_S and any(
            eviction.is_counted_by(self._nodes.published_resources(node))
            for node, eviction in pending.nodes.items()
        ):
            return True
        self._forget(uid)
        return False

    def _remember(
        self, request: PodRequest, answer: PreemptionAnswer
    ) -> tuple[PreemptionEventReason, str] | None:
        """Remember an answer; return reason and text of an Event if it is news for the pod."""
        earlier = self._hopeless.pop(request.uid, None)
        if answer.evictions:
            while len(self._pending) >= _MAX_EVICTIONS:
                self._forget(next(iter(self._pending)))
            self._pending[request.uid] = PendingEviction(
                request=request, nodes=answer.evictions, answered_at=self._clock()
            )
            for node, eviction in answer.evictions.items():
                if eviction.charge is not None:
                    self._nodes.nominate_pod(request, node, eviction.charge)
            return PreemptionEventReason.WAITS_FOR_EVICTION, _evictions_text(answer.evictions)
        if answer.reason:
            while len(self._hopeless) >= _MAX_EVICTIONS:
                del self._hopeless[next(iter(self._hopeless))]
            self._hopeless[request.uid] = answer.reason
            if answer.reason != earlier:
                text = f"{_HOPELESS_TEXT} it {answer.reason}"
                return PreemptionEventReason.PREEMPTION_CANNOT_HELP, text
        return None

    async def _create_event(
        self, request: PodRequest, reason: PreemptionEventReason, text: str
    ) -> None:
        """Create an Event of the pod; one with the same text may exist already.

        kube-scheduler shows the reasons of `filter` only if the sums of a node suffice.
        """
        event = pod_event(
            request.namespace,
            request.name,
            request.uid,
            id=f"{request.uid[:8]}.{crc32(text.encode()):08x}",
            event_time=self._api.server_time(),
            text=text,
            reportingController=f"{self._prefix}/nri-numa-scheduler",
            reportingInstance="nri-numa-scheduler",
            action="Preempting",
            reason=reason,
            type="Normal",
        )
        path = Resource.EVENTS.object_or_list_path(request.namespace)
        try:
            await self._api.request_json("POST", path, event, seconds=EVENT_TIMEOUT_S)
        except KubeError as error:
            if error.code != 409:
                log.info("event not written", reason=reason, problem=str(error)[:300])

    def record_nomination(self, pod: Mapping[str, Any]) -> None:
        """Record the node that kube-scheduler has chosen for a pod, if it is known."""
        pending = self._pending.get(uid_of(pod))
        node = text_in_section(pod, "status", "nominatedNodeName")
        if pending is not None and node in pending.nodes:
            pending.is_nominated = True
            self._choose_node(pending, node)

    def _choose_node(self, pending: PendingEviction, node: str) -> None:
        for other in pending.nodes.keys() - {node}:
            del pending.nodes[other]
            self._end_reservation(pending, other)

    def explain_rejections(self, uid: str, result: FilterResult) -> None:
        """Say of a pod's rejected nodes that it waits for an eviction, or that none helps."""
        pending, reason = self._pending.get(uid), self._hopeless.get(uid)
        for node, text in result.failed.items():
            if pending is not None and node in pending.nodes:
                result.failed[node] = f"{_WAITING_TEXT} {pending.nodes[node].victims_text}"
            elif reason:
                result.failed[node] = f"{text}; {_HOPELESS_TEXT} it {reason}"

    def on_bound(self, uid: str, node: str) -> None:
        """Forget the eviction for a pod that is bound."""
        self._hopeless.pop(uid, None)
        if (pending := self._pending.get(uid)) is not None:
            if node in pending.nodes:
                pending.freed_at = None  # not in vain
            self._forget(uid)

    def expire(self) -> None:
        """Record victims that their node no longer counts, and forget old evictions."""
        now_s = self._clock()
        for uid, pending in list(self._pending.items()):
            node = pending.only_node
            if node and pending.freed_at is None:
                published = self._nodes.published_resources(node)
                if not pending.nodes[node].is_counted_by(published):
                    pending.freed_at = now_s
            timeout = MAX_TERMINATION_S if pending.is_nominated else EVICTION_TIMEOUT_S
            expires_at = pending.answered_at + timeout
            if pending.freed_at is not None:
                expires_at = pending.freed_at + EVICTION_TIMEOUT_S
            if now_s >= expires_at:
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        """Forget an eviction; victims that are gone were evicted in vain."""
        pending = self._pending.pop(uid)
        for node, eviction in pending.nodes.items():
            if pending.freed_at is not None:
                self._in_vain.inc(len(eviction.uids))
                log.warning(
                    "pods evicted in vain",
                    pod=f"{pending.request.namespace}/{pending.request.name}",
                    node=node,
                    victims=", ".join(eviction.names)[:500],
                )
            self._end_reservation(pending, node)

    def _end_reservation(self, pending: PendingEviction, node: str) -> None:
        self._nodes.withdraw_nomination(pending.request.uid, node)
        self._wake(node)


class _Release:
    """Resources that the pods of one node give back when they end."""

    def __init__(self, reader: PodReader, nodes: ClusterState, published: NodeResources) -> None:
        self._reader, self._assumed_pods, self._published = reader, nodes.assumed_pods, published
        listed = published.counted_containers
        self._counted = None if listed is None else frozenset(listed.split())

    def evictable_pod(
        self,
        document: Mapping[str, Any],
        sums: Mapping[str, int],
        budgets: Iterable[DisruptionBudget],
    ) -> EvictablePod:
        """Return a pod as the search has it."""
        request = self._reader.read_pod_request(document)
        return EvictablePod(
            uid=uid_of(document),
            full_name=f"{request.namespace}/{request.name}",
            priority=request.priority,
            released=self.of_pod(document),
            is_movable=any(c.is_movable for c in request.containers),
            sums=sums,
            budgets=tuple(n for n, budget in enumerate(budgets) if budget.covers(document)),
            repels_others=repels_other_pods(document),
        )

    def of_pod(self, document: Mapping[str, Any]) -> ResourceCounts | None:
        """Return what a pod gives back, of the containers that the node or a reservation counts.

        The extender's annotation is from the start of a pod; a movable one may be elsewhere.
        """
        request, hold = self._reader.read_pod_request(document), None
        placed = self._reader.assigned_numa_nodes(document)
        by_publisher = bool(placed)
        if not placed and not any(c.is_movable for c in request.containers):
            hold = self._assumed_pods.get(request.uid)
            placed = self._reader.scheduled_numa_nodes(document)
        if not placed:
            charge = None if hold is None else hold.charge
            fits = charge is not None and len(charge.exclusive) == len(self._published.ids)
            return charge if fits else None
        hold = self._assumed_pods.get(request.uid)
        uncounted = hold.uncounted_containers(self._published) if hold else frozenset()
        counted = self._counted
        containers = tuple(
            c
            for c in request.containers
            if (c.amounts or not by_publisher)  # the publisher names memory nodes
            and (
                counted is None
                or c.container in uncounted
                or counted_container_hash(request.uid, c.container) in counted
            )
        )
        if request.pod_scope_request is not None and len(containers) < len(request.containers):
            return None
        return self._published.min_release_of_pod(replace(request, containers=containers), placed)


def _evictions_text(evictions: Mapping[str, NodeEviction]) -> str:
    """``waits for the eviction of a, b and 1 more from node x, or of c from node y``."""
    texts = [f"{eviction.victims_text} from node {node}" for node, eviction in evictions.items()]
    more = len(texts) - _MAX_NAMED_NODES
    more_text = f", or of pods of {count_text(more, 'other node')}" if more > 0 else ""
    return f"{_WAITING_TEXT} {', or of '.join(texts[:_MAX_NAMED_NODES])}{more_text}"


def _is_terminating(document: Mapping[str, Any]) -> bool:
    return bool(text_in_section(document, "metadata", "deletionTimestamp"))


def _is_mirror(document: Mapping[str, Any]) -> bool:
    """Return True for a static pod: its file starts it again."""
    return "kubernetes.io/config.mirror" in annotations_of(document)


def _has_result(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
