"""The verb preempt: victims whose eviction frees the NUMA nodes that a pod needs.

kube-scheduler proposes victims by the sums of Nodes. Here the pods of a node are listed when it is
asked about, and `nri_numa.scheduler.eviction_search` selects those whose end makes room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Final, TypeVar
from zlib import crc32

from msgspec import Struct

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.node_sums import (
    DisruptionBudget,
    allocatable_sums,
    claim_uses,
    has_neighbour_constraints,
    missing_sums,
    pod_sums,
    read_disruption_budget,
)
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.pods import pod_priority
from nri_numa.config import AgentConfig
from nri_numa.kube.api import uid_of
from nri_numa.kube.events import pod_event
from nri_numa.kube.requests import (
    KubeClient,
    KubeError,
    Resource,
    annotations_of,
    list_of_mappings,
    section_of,
    text_in_section,
)
from nri_numa.model.counted_containers import counted_container_hash
from nri_numa.model.workload import ENDED_POD_PHASES
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler.candidates import Cooperative, VerdictCache
from nri_numa.scheduler.eviction_search import (
    MAX_SEARCH_WORK,
    CandidateNode,
    Eviction,
    select_victims,
)
from nri_numa.scheduler.fit import Fit, Unfit, WorkBudget
from nri_numa.scheduler.metrics import SchedulerMetrics
from nri_numa.scheduler.pending_evictions import (
    NodeEviction,
    PendingEvictions,
    PreemptionEventReason,
)
from nri_numa.scheduler.protocol import PreemptionArgs, ProposedVictims
from nri_numa.scheduler.released_resources import ReleaseReader
from nri_numa.service import run_in_turns

log = get_logger("scheduler")

MAX_LISTED_NODES: Final = 32
"""Nodes of one question whose pods are listed."""
MAX_CLAIM_NAMESPACES: Final = 8
"""Namespaces of one question whose ResourceClaims are listed."""
LIST_TIMEOUT_S: Final = 2.0
"""Seconds for all lists of a question; kube-scheduler waits 5 (httpTimeout)."""
EVENT_TIMEOUT_S: Final = 1.0
"""Seconds without a byte for an Event, while kube-scheduler waits for the answer."""
_MAX_QUESTION_WORK: Final = 12_000
"""Work for one question (`WorkBudget`), 0.12 s; nodes beyond it are left out."""
_POD_WORK: Final = 20
"""Work of reading one pod."""

T = TypeVar("T")
Document = Mapping[str, Any]
Documents = list[dict[str, Any]]


class _ListedNode(Struct, frozen=True):
    """A Node, and the pods on it, as documents."""

    name: str
    node: Document
    pods: Documents


class _Listing(Struct, frozen=True):
    """Objects that were read for a question.

    Attributes:
        budgets: None if they cannot be read.
        claims_by_pod: ResourceClaims by UID of a pod that they are reserved for.
    """

    nodes: list[_ListedNode]
    budgets: list[DisruptionBudget] | None
    claims_by_pod: Mapping[str, Documents]


class Preemption:
    """Selects victims from the pods of the nodes that kube-scheduler asks about."""

    def __init__(
        self,
        api: KubeClient,
        nodes: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
        pending: PendingEvictions,
        config: AgentConfig,
        metrics: SchedulerMetrics,
    ) -> None:
        self._api, self._nodes, self._candidates = api, nodes, candidates
        self._reader, self._pending, self._metrics = reader, pending, metrics
        self._strategy, self._dra = config.strategy, config.dra
        self._first = 0

    async def select_victims(self, question: PreemptionArgs) -> Mapping[str, ProposedVictims]:
        """Return the victims by node, without the nodes where no eviction helps."""
        request = self._reader.read_pod_request(question.pod)
        proposed = question.victims_by_node
        if request.is_unconstrained:
            return proposed
        self._pending.record_nomination(question.pod)
        victims: dict[str, ProposedVictims] = {}
        if not (
            request.invalid_reason
            or self._pending.waits_for_eviction(request.uid)
            or self._fits_freed_node(request)
        ):
            names, victims = self._select_nodes(request, proposed)
            listing = await self._list_objects(names)
            evictions, reason = await run_in_turns(self._answer_steps(question, request, listing))
            if (event := self._pending.record_answer(request, evictions, reason)) is not None:
                await self._create_event(request, *event)
            victims |= {node: eviction.victims for node, eviction in evictions.items()}
            log.info(
                "victims selected",
                pod=f"{request.namespace}/{request.name}",
                node_count=len(proposed),
                victim_node_count=len(victims),
                problem=reason,
            )
        self._metrics.preemption_nodes_left_out.inc(len(proposed.keys() - victims.keys()))
        return victims

    def _fits_freed_node(self, request: PodRequest) -> bool:
        """Return True if the pod fits where its victims have ended: it was filtered before."""
        nodes = self._pending.eviction_nodes(request.uid)
        return any(isinstance(self._candidates.evaluate_node(request, n), Fit) for n in nodes)

    def _select_nodes(
        self, request: PodRequest, proposed: Mapping[str, ProposedVictims]
    ) -> tuple[list[str], dict[str, ProposedVictims]]:
        """Select the nodes to list, fewest broken budgets first; and nodes without an object.

        Equally good ones take turns, by name, from question to question.
        """
        names = sorted(proposed)
        start = self._first % max(1, len(names))
        self._first += MAX_LISTED_NODES
        ordered_names = sorted(
            names[start:] + names[:start], key=lambda name: proposed[name].violations
        )
        listed_names: list[str] = []
        victims_of_unknown: dict[str, ProposedVictims] = {}
        for name in ordered_names:
            verdict = self._candidates.evaluate_node(request, name)
            if isinstance(self._nodes.published_resources(name), NodeResources):
                if isinstance(verdict, Fit) or not verdict.unresolvable:
                    listed_names.append(name)
            elif isinstance(verdict, Fit) and proposed[name].uids:
                victims_of_unknown[name] = proposed[name]
            if len(listed_names) == MAX_LISTED_NODES:
                break
        return listed_names, victims_of_unknown

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
            reportingController=f"{self._reader.prefix}/nri-numa-scheduler",
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

    # --- reading objects --------------------------------------------------------------------------

    async def _list_objects(self, names: Iterable[str]) -> _Listing:
        """Read Nodes with their pods, and budgets; those that are late or fail are missing."""
        deadline = asyncio.get_running_loop().time() + LIST_TIMEOUT_S
        budgets_path = Resource.DISRUPTION_BUDGETS.object_or_list_path()
        budgets, nodes = await asyncio.gather(
            self._read_in_time(self._api.list_objects(budgets_path), deadline),
            asyncio.gather(*(self._read_in_time(self._list_node(n), deadline) for n in names)),
        )
        listed_nodes = [listed for listed in nodes if listed is not None]
        return _Listing(
            nodes=listed_nodes,
            budgets=None if budgets is None else list(map(read_disruption_budget, budgets)),
            claims_by_pod=await self._list_claims(listed_nodes, deadline),
        )

    async def _read_in_time(self, reading: Awaitable[T], deadline: float) -> T | None:
        try:
            async with asyncio.timeout_at(deadline):
                return await reading
        except KubeError as error:
            log.info("objects for preemption not read", problem=str(error)[:300])
        except TimeoutError:
            pass  # late
        return None

    async def _list_node(self, name: str) -> _ListedNode:
        selector = ",".join(f"status.phase!={phase}" for phase in sorted(ENDED_POD_PHASES))
        node, pods = await asyncio.gather(
            self._api.request_json("GET", Resource.NODES.object_or_list_path(name=name)),
            self._api.list_objects(
                Resource.PODS.object_or_list_path(), f"spec.nodeName={name},{selector}"
            ),
        )
        return _ListedNode(name, node, pods)

    async def _list_claims(
        self, nodes: Iterable[_ListedNode], deadline: float
    ) -> Mapping[str, Documents]:
        """Read the ResourceClaims of listed pods, by UID of a pod that they are reserved for."""
        namespaces = {
            text_in_section(pod, "metadata", "namespace")
            for listed in nodes
            for pod in listed.pods
            if self._dra.enabled and claim_uses(pod)
        }
        paths = [
            Resource.CLAIMS.object_or_list_path(namespace)
            for namespace in sorted(namespaces)[:MAX_CLAIM_NAMESPACES]
        ]
        lists = await asyncio.gather(
            *(self._read_in_time(self._api.list_objects(path), deadline) for path in paths)
        )
        claims_by_pod: dict[str, Documents] = {}
        for claim in (claim for claims in lists for claim in claims or ()):
            consumers = section_of(claim, "status").get("reservedFor")
            for consumer in list_of_mappings(consumers):
                claims_by_pod.setdefault(str(consumer.get("uid")), []).append(claim)
        return claims_by_pod

    # --- the answer -------------------------------------------------------------------------------

    def _answer_steps(
        self, question: PreemptionArgs, request: PodRequest, listing: _Listing
    ) -> Cooperative[tuple[dict[str, NodeEviction], str]]:
        """Select the victims of each listed node, one node in each step.

        Return them, and the reason why no eviction helps on the first of the other nodes.
        """
        evictions: dict[str, NodeEviction] = {}
        hopeless_reason, work = "", WorkBudget()
        for listed in listing.nodes:
            yield
            work.done += _POD_WORK * len(listed.pods)
            if work.done >= _MAX_QUESTION_WORK:
                break
            node = self._read_candidate(question, request, listed, listing)
            if node is None:
                continue
            limit = min(MAX_SEARCH_WORK, _MAX_QUESTION_WORK - work.done)
            outcome = select_victims(node, self._strategy, work, limit=limit)
            if isinstance(outcome, Unfit):
                hopeless_reason = hopeless_reason or outcome.reason_text(outcome.best_amount)
            elif outcome is not None and outcome.pods:
                proposed = question.victims_by_node[listed.name]
                uids = tuple(pod.uid for pod in outcome.pods)
                # Without the budgets kube-scheduler's own count is the only one.
                count = proposed.violations if listing.budgets is None else outcome.violations
                victims = ProposedVictims(uids, count)
                evictions[listed.name] = self._build_eviction(listed, victims, outcome)
                self._metrics.preemption_victims_changed.inc({*uids} != {*proposed.uids})
        return evictions, hopeless_reason

    def _build_eviction(
        self, listed: _ListedNode, victims: ProposedVictims, eviction: Eviction
    ) -> NodeEviction:
        return NodeEviction(
            victims=victims,
            names=tuple(pod.full_name for pod in eviction.pods),
            marks=frozenset(
                counted_container_hash(uid_of(document), str(container.get("name")))
                for document in listed.pods
                if uid_of(document) in victims.uids
                for container in list_of_mappings(document["spec"].get("containers"))
            ),
            published=self._nodes.published_resources(listed.name),
            charge=eviction.fit.pod_charge,
        )

    def _read_candidate(
        self, question: PreemptionArgs, request: PodRequest, listed: _ListedNode, listing: _Listing
    ) -> CandidateNode | None:
        """Read a node as it is without the pods that leave it; None if another pod may get it."""
        name, documents = listed.name, {uid_of(document): document for document in listed.pods}
        room, published = self._nodes.free_resources(name), self._nodes.published_resources(name)
        ending_uids = {
            uid
            for uid, document in documents.items()
            if text_in_section(document, "metadata", "deletionTimestamp")
        }
        evicted_uids = self._pending.select_leaving_pods(
            request, name, documents.keys() - ending_uids
        )
        if (
            evicted_uids is None
            or not isinstance(room, NodeResources)
            or not isinstance(published, NodeResources)
        ):
            return None
        release = ReleaseReader(
            self._reader, self._nodes, name, published, listing.claims_by_pod, self._dra.driver
        )
        leaving_uids = ending_uids | evicted_uids
        leaving = [documents[uid] for uid in documents.keys() & leaving_uids]
        staying = [document for uid, document in documents.items() if uid not in leaving_uids]
        charges = [charge for charge in map(release.read_release, leaving) if charge is not None]
        pods = {
            uid_of(document): release.read_evictable_pod(document, listing.budgets or ())
            for document in staying
            if pod_priority(document) < request.priority and not _is_mirror(document)
        }
        return CandidateNode(
            room=room.plus_pods(charges).minus_pods(self._nodes.nominated_charges(name, request)),
            request=request,
            pods=tuple(pods.values()),
            missing=missing_sums(
                pod_sums(question.pod), allocatable_sums(listed.node), map(pod_sums, staying)
            ),
            allowed=tuple(budget.allowed for budget in listing.budgets or ()),
            proposed=tuple(pods[uid] for uid in question.victims_by_node[name].uids if uid in pods),
            may_change=listing.budgets is not None and not has_neighbour_constraints(question.pod),
        )


def _is_mirror(document: Document) -> bool:
    """Return True for a static pod: its file starts it again."""
    return "kubernetes.io/config.mirror" in annotations_of(document)
