"""Verdicts of all nodes for one Pending pod: ``GET /v1/verdicts/{namespace}/{pod}``.

Questions come through the API server's service proxy, which checks the caller's rights and passes
on nothing about the caller. So the pod's UID is the proof that the caller may read the pod. An
answer has no name of another pod, no label, and no value of a taint. Nodes are evaluated as in the
scheduler's extender (`nri_numa.scheduler.fit`), by this replica's watches, leading or not.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_facts import NODE_CONSTRAINTS, Exclusion, node_admits
from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.controller.stuck_pods import plugin_rejection
from nri_numa.kube.api import Watch, uid_of
from nri_numa.kube.requests import section_of, text_in_section
from nri_numa.model.reasons import RetryCondition
from nri_numa.scheduler.candidates import (
    ANSWER_STEP_WORK,
    MAX_QUESTION_WORK,
    VerdictCache,
    group_reasons,
)
from nri_numa.scheduler.fit import Fit, Unfit, WorkBudget
from nri_numa.web.protocol import APIError, HTTPRequest, Response, Route, not_ready_error

VERDICTS_PATH: Final = "/v1/verdicts/{namespace}/{pod}"
MAX_PENDING_PODS: Final = 10_000
"""Pending pods that are remembered."""
MAX_ANSWER_S: Final = 0.8
"""Seconds after which no further node is evaluated, so an answer takes at most a second."""
MAX_QUESTIONS_PER_S: Final = 5
MAX_ANSWER_BYTES: Final = 64 << 10
MAX_EXAMPLE_NODES: Final = 5
"""Nodes that an answer names for each reason."""
NOT_EVALUATED: Final = ("sums of requests", "volumes", "pod affinity")
_MAX_REASONS: Final = 20
_MAX_REASON_CHARS: Final = 1000
_YIELD_EVERY_NODES: Final = 100
_NAME_PATTERN: Final = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?")
_MAX_UID_CHARS: Final = 128


class PendingPod(Struct, frozen=True):
    """A pod in the phase Pending.

    Attributes:
        node: the node it was bound to; empty for a pod that waits for one.
        is_rejected: the agent of that node rejects it.
        constraints: the fields of its spec that say which nodes it may be put on.
    """

    request: PodRequest
    node: str
    is_rejected: bool
    constraints: Mapping[str, Any]


class VerdictKind(StrEnum):
    """Verdict of all nodes for a pod."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNCONSTRAINED = "unconstrained"
    INVALID = "invalid"
    REJECTED_BY_NODE = "rejected-by-node"


class TopologyProblem(StrEnum):
    """Reasons why a node cannot be evaluated."""

    NO_TOPOLOGY = "no-topology"
    UNREADABLE_TOPOLOGY = "unreadable-topology"
    AGENT_NOT_READY = "agent-not-ready"


class _Findings(Struct):
    fits: list[tuple[str, Fit]] = field(default_factory=list)
    unfit: list[tuple[str, Unfit]] = field(default_factory=list)
    excluded: dict[Exclusion | TopologyProblem, list[str]] = field(default_factory=dict)
    unread_nodes: int = 0


class PodVerdicts:
    """Remembers Pending pods by UID, and answers questions about them, one at a time.

    Args:
        watches: all must be synced before a question is answered.
    """

    def __init__(
        self,
        cluster: ClusterState,
        candidates: VerdictCache,
        reader: PodReader,
        watches: Sequence[Watch],
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._candidates, self._reader = cluster, candidates, reader
        self._watches, self._clock = watches, clock
        self._pods: dict[str, PendingPod] = {}
        self._asked_at: deque[float] = deque(maxlen=MAX_QUESTIONS_PER_S)
        self._answering = False

    def http_routes(self) -> Iterable[Route]:
        """Routes for the controller's server."""
        return [Route("GET", VERDICTS_PATH, self._get_verdict, query=("uid",))]

    def on_pod(self, document: Mapping[str, Any]) -> None:
        """Remember a new or changed Pending pod, up to `MAX_PENDING_PODS`."""
        uid = uid_of(document)
        if uid in self._pods or len(self._pods) < MAX_PENDING_PODS:
            spec = section_of(document, "spec")
            self._pods[uid] = PendingPod(
                self._reader.read_pod_request(document),
                text_in_section(document, "spec", "nodeName"),
                plugin_rejection(document) is not None,
                {key: spec.get(key) for key in NODE_CONSTRAINTS},
            )

    def on_pod_removed(self, uid: str) -> None:
        """Forget a pod that is no longer Pending."""
        self._pods.pop(uid, None)

    async def _get_verdict(self, request: HTTPRequest) -> Response:
        namespace, name, uid = *request.segments[2:4], request.query.get("uid", "")
        for key, value in (("namespace", namespace), ("pod", name)):
            if not _NAME_PATTERN.fullmatch(value):
                raise _bad_query(f"{key} is {ascii(value)[:80]}, expected a name of Kubernetes")
        if not 0 < len(uid) <= _MAX_UID_CHARS:
            expectation = f"expected the pod's metadata.uid of at most {_MAX_UID_CHARS} characters"
            raise _bad_query(f"uid is {ascii(uid)[:80]}, {expectation}")
        if not all(watch.synced.is_set() for watch in self._watches):
            raise not_ready_error(self._watch_problems() or "nodes and pods are not known yet")
        self._check_rate()
        pod = self._pods.get(uid)
        if pod is None or (pod.request.namespace, pod.request.name) != (namespace, name):
            problem = f"there is no Pending pod {namespace}/{name} with the uid {uid!a}"
            raise APIError(404, "NotFound", problem)
        self._answering = True
        try:
            findings = await self._judge_nodes(pod)
        finally:
            self._answering = False
        return Response(200, _encode_answer(_build_answer(pod, findings, self._watch_problems())))

    def _check_rate(self) -> None:
        now_s, times = self._clock(), self._asked_at
        if self._answering or (len(times) == MAX_QUESTIONS_PER_S and now_s - times[0] < 1):
            problem = f"expected one question at a time, and {MAX_QUESTIONS_PER_S} a second at most"
            raise APIError(429, "TooManyRequests", problem, [("Retry-After", "1")])
        times.append(now_s)

    def _watch_problems(self) -> str:
        return "; ".join(dict.fromkeys(watch.problem for watch in self._watches if watch.problem))

    async def _judge_nodes(self, pod: PendingPod) -> _Findings:
        """Evaluate all nodes but the pod's own, for at most `MAX_ANSWER_S`."""
        findings, work, pause = _Findings(), WorkBudget(MAX_QUESTION_WORK), ANSWER_STEP_WORK
        if pod.request.is_unconstrained or pod.request.invalid_reason:
            return findings
        deadline = self._clock() + MAX_ANSWER_S
        names = sorted(self._cluster.all_node_names - {pod.node})
        for index, name in enumerate(names):
            if work.done >= pause or index % _YIELD_EVERY_NODES == 0:
                pause = work.done + ANSWER_STEP_WORK
                await asyncio.sleep(0)
                if self._clock() >= deadline:
                    findings.unread_nodes = len(names) - index
                    break
            self._judge_node(pod, name, work, findings)
        return findings

    def _judge_node(
        self, pod: PendingPod, name: str, work: WorkBudget, findings: _Findings
    ) -> None:
        facts = self._cluster.node_facts(name)
        if facts is None:
            return  # without a Node object kube-scheduler does not know it
        reason = node_admits(facts, pod.constraints) or self._topology_problem(pod, name)
        if reason is not None:
            findings.excluded.setdefault(reason, []).append(name)
            return
        verdict = self._candidates.evaluate_node(pod.request, name, work)
        if isinstance(verdict, Fit):
            findings.fits.append((name, verdict))
        else:
            findings.unfit.append((name, verdict))

    def _topology_problem(self, pod: PendingPod, name: str) -> TopologyProblem | None:
        if not pod.request.has_placement_request:
            return None  # what the kubelet aligns fits on nodes without a topology
        room = self._cluster.free_resources(name)
        if isinstance(room, NodeResources):
            return TopologyProblem.AGENT_NOT_READY if room.agent_not_ready else None
        return TopologyProblem.NO_TOPOLOGY if room is None else TopologyProblem.UNREADABLE_TOPOLOGY


def _verdict_kind(pod: PendingPod, findings: _Findings) -> VerdictKind:
    if pod.is_rejected:
        return VerdictKind.REJECTED_BY_NODE
    if pod.request.invalid_reason:
        return VerdictKind.INVALID
    if pod.request.is_unconstrained:
        return VerdictKind.UNCONSTRAINED
    return VerdictKind.FEASIBLE if findings.fits else VerdictKind.INFEASIBLE


def _build_answer(pod: PendingPod, findings: _Findings, problem: str) -> dict[str, Any]:
    request, fits = pod.request, findings.fits
    if findings.unread_nodes:
        unread_text = f"{findings.unread_nodes} nodes were not evaluated within {MAX_ANSWER_S:g} s"
        problem = f"{problem}; {unread_text}" if problem else unread_text
    # The highest score first, as the extender has it; then the name.
    best_fit = min(fits, key=lambda fit: (-fit[1].score_key, fit[0]), default=None)
    # The largest group first, then by text.
    groups = sorted(group_reasons(findings.unfit), key=lambda g: (-len(g.nodes), g.text))
    return {
        "namespace": request.namespace,
        "pod": request.name,
        "uid": request.uid,
        "phase": "Pending",
        "node": pod.node,
        "requests": [
            {
                "container": c.container,
                "exclusiveCpus": c.exclusive_cpus,
                "sharedMilli": c.shared_milli,
                "amounts": dict(c.amounts),
                "policy": c.policy,
            }
            for c in request.containers or request.kubelet_aligned
        ],
        "verdict": _verdict_kind(pod, findings),
        "invalidReason": request.invalid_reason[:_MAX_REASON_CHARS],
        "feasibleNodes": len(fits),
        "evaluatedNodes": len(fits) + len(findings.unfit),
        "bestNode": best_fit[0] if best_fit else "",
        "numaNodes": {name: str(ids) for name, ids in best_fit[1].numa_nodes} if best_fit else {},
        "afterMoves": best_fit[1].requires_moves if best_fit else False,
        "reasons": [
            {
                "message": group.text[:_MAX_REASON_CHARS],
                "retryCondition": RetryCondition.NEVER
                if group.unresolvable
                else RetryCondition.ROOM,
                "nodes": len(group.nodes),
                "examples": group.nodes[:MAX_EXAMPLE_NODES],
            }
            for group in groups[:_MAX_REASONS]
        ],
        "excluded": [
            {"reason": exclusion, "nodes": len(nodes), "examples": nodes[:MAX_EXAMPLE_NODES]}
            for exclusion, nodes in sorted(findings.excluded.items())
        ],
        "notEvaluated": NOT_EVALUATED,
        "stale": problem,
    }


def _encode_answer(answer: dict[str, Any]) -> bytes:
    """Encode an answer, without the requests if it would be longer than `MAX_ANSWER_BYTES`."""
    body = msgspec.json.encode(answer)
    if len(body) > MAX_ANSWER_BYTES:
        body = msgspec.json.encode({**answer, "requests": []})
    return body


def _bad_query(problem: str) -> APIError:
    return APIError(400, "BadQuery", problem)
