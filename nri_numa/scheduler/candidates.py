"""The verbs filter and prioritize: many nodes, one pod.

Each class of reasons has one text, with the best amount of all nodes in the class: kube-scheduler
counts equal texts, and the pod's condition must not be truncated.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from math import inf
from typing import Final, TypeVar

from msgspec import Struct, field

from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.node_resources import NO_NODE_RESOURCES, NodeResources, UnreadableTopology
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.fit import (
    Fit,
    Unfit,
    Verdict,
    WorkBudget,
    evaluate_fit,
    min_near_best_score_key,
)

NO_TOPOLOGY_TEXT: Final = "no NodeResourceTopology object for this node"
AGENT_NOT_READY_TEXT: Final = "its agent does not place containers now"
UNREADABLE_TEXT: Final = "its NodeResourceTopology cannot be read"
_MAX_CACHED_STALE_ROOMS: Final = 1000
"""Outdated resources whose verdicts may be cached for one kind of pods."""
_MAX_CACHED_REQUESTS: Final = 32
"""Kinds of pods for which verdicts are cached."""
_MAX_VERDICTS: Final = 60_000
"""Cached verdicts for all kinds of pods, about 20 MB."""
_MIN_FILTER_WORK: Final = 300
"""Work (`nri_numa.scheduler.fit.WorkBudget`) that `filter_to_best` may always do, 3 to 5 ms; with
more than 600 nodes it may do half a unit for each."""
_MAX_FITTING_NODES: Final = 100
"""Feasible nodes after which `filter_to_best` stops: kube-scheduler itself stops at as many
(minFeasibleNodesToFind) and scores each."""
_MAX_SCORE_WORK: Final = 1000
"""Work beyond one unit for each node that `prioritize` may do if no verdict is cached."""
MAX_QUESTION_WORK: Final = 60_000
"""Work for one question, 0.6 s: 5,000 nodes with four NUMA nodes and a merge each."""
_MAX_SUM_EVALUATIONS: Final = 30_000
"""Containers of all nodes together that are evaluated by sums beyond `MAX_QUESTION_WORK`."""
ANSWER_STEP_WORK: Final = 100
"""Work after which other tasks may run: a millisecond, the longest that a binding waits."""

T = TypeVar("T")
Cooperative = Generator[None, None, T]
"""An answer computed in steps; other tasks may run between two steps."""


class FilterResult(Struct):
    """The outcome of a filter.

    Attributes:
        feasible: in the order of the question; with `filter_to_best` the best nodes alone.
        failed: reason by node, if waiting or preemption may help.
        unresolvable: reason by node, if neither does.
        by_sums: number of nodes that passed without a full evaluation.
    """

    feasible: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)
    by_sums: int = 0


class ReasonGroup(Struct, frozen=True):
    """Nodes that reject a pod for the same class of reasons, with one text for all of them."""

    text: str
    unresolvable: bool
    nodes: list[str]


def group_reasons(unfit: Iterable[tuple[str, Unfit]]) -> list[ReasonGroup]:
    """Group nodes by the class of their reason, in the order of the first of each class."""
    groups: dict[tuple[object, ...], list[tuple[str, Unfit]]] = {}
    for name, verdict in unfit:
        groups.setdefault(verdict.reason_group, []).append((name, verdict))
    return [
        ReasonGroup(
            members[0][1].reason_text(max(verdict.best_amount for _, verdict in members)),
            members[0][1].unresolvable,
            [name for name, _ in members],
        )
        for members in groups.values()
    ]


class VerdictCache:
    """Verdicts of nodes for pods; equal resources are evaluated once for equal pods.

    Args:
        unknown_fits: pods with a placement request may go to nodes without a topology.
        filter_to_best: `filter` names the best feasible nodes alone, because `prioritize` is not
            called (docs/adr/0059-sums-first.md).
    """

    def __init__(
        self,
        nodes: ClusterState,
        strategy: Strategy,
        *,
        unknown_fits: bool = False,
        filter_to_best: bool = False,
    ) -> None:
        self._nodes, self._strategy = nodes, strategy
        self._unknown_fits, self._filter_to_best = unknown_fits, filter_to_best
        self._known: dict[tuple[object, ...], dict[NodeResources, Verdict]] = {}
        self._first = 0

    def evaluate_node(
        self, request: PodRequest, node: str, work: WorkBudget | None = None
    ) -> Verdict:
        """Evaluate one node for a pod now; the cost is added to ``work``."""
        (verdict,) = run_to_end(self._evaluate_nodes(request, (node,), inf, work or WorkBudget()))
        assert verdict is not None  # noqa: S101  # a single node is always judged
        return verdict

    def evaluate_room(self, request: PodRequest, room: NodeResources) -> Verdict:
        """Evaluate resources that no node has at present; nothing is cached."""
        return evaluate_fit(room, request, self._strategy)

    def filter_nodes(self, request: PodRequest, names: Sequence[str]) -> FilterResult:
        """Return the feasible nodes, and the reasons of the others."""
        return run_to_end(self.filter_steps(request, names, inf))

    def filter_steps(
        self, request: PodRequest, names: Sequence[str], limit: float = MAX_QUESTION_WORK
    ) -> Cooperative[FilterResult]:
        """Filter nodes in steps.

        `filter_to_best` stops after `_MAX_FITTING_NODES`, or after sufficient work if a node is
        feasible. The next question of an equal pod continues at the next node. If no node is
        feasible, nodes beyond the limit are evaluated by sums alone.
        """
        if request.is_unconstrained:
            return FilterResult(feasible=list(names))
        if request.invalid_reason:
            return FilterResult(unresolvable=dict.fromkeys(names, request.invalid_reason))
        if assumed_node := self._assumed_node_if_it_fits(request, names):
            return FilterResult(feasible=[assumed_node])
        result = FilterResult()
        grades: list[int] = []
        unfit: list[tuple[str, Unfit]] = []
        selects_best = self._filter_to_best and request.has_placement_request
        sufficient_work = max(_MIN_FILTER_WORK, len(names) / 2) if selects_best else inf
        max_feasible = _MAX_FITTING_NODES if selects_best else inf
        verdicts = yield from self._evaluate_nodes(
            request, names, sufficient_work, WorkBudget(limit), max_feasible
        )
        for name, verdict in zip(names, verdicts, strict=True):
            if verdict is None:
                continue
            if isinstance(verdict, Unfit):
                unfit.append((name, verdict))
            else:
                result.feasible.append(name)
                grades.append(verdict.score_key)
                result.by_sums += verdict.by_sums
        if selects_best and grades:
            min_score_key = min_near_best_score_key(max(grades), self._strategy)
            fits = zip(result.feasible, grades, strict=True)
            result.feasible = [name for name, grade in fits if grade >= min_score_key]
        for group in group_reasons(unfit):
            (result.unresolvable if group.unresolvable else result.failed).update(
                dict.fromkeys(group.nodes, group.text)
            )
        return result

    def _assumed_node_if_it_fits(self, request: PodRequest, names: Sequence[str]) -> str:
        """Return the node of an assumed pod if the pod still fits there; else an empty name.

        The API server did not say if the pod's binding was written. The pod must stay assumed,
        because the binding may still be written.
        """
        assumed_pod = self._nodes.assumed_pods.get(request.uid)
        if assumed_pod is None or assumed_pod.node not in names:
            return ""
        self._nodes.forget_pod(request.uid)
        verdict = self.evaluate_node(request, assumed_pod.node)
        self._nodes.assume_pod(assumed_pod)
        return assumed_pod.node if isinstance(verdict, Fit) else ""

    def find_other_node(self, request: PodRequest, names: Sequence[str]) -> Cooperative[str]:
        """Find a feasible node that is not in ``names``, in steps; empty if no node is."""
        other_names = sorted(self._nodes.node_names.difference(names))
        outcomes = yield from self._evaluate_nodes(
            request, other_names, 0, WorkBudget(MAX_QUESTION_WORK)
        )
        verdicts = zip(other_names, outcomes, strict=True)
        return next((name for name, verdict in verdicts if isinstance(verdict, Fit)), "")

    def prioritize_steps(
        self, request: PodRequest, names: Sequence[str]
    ) -> Cooperative[list[tuple[str, int]]]:
        """Score each node in steps, the best highest; empty for a pod without constraints.

        Nodes that do not fit or were not evaluated score 0.
        """
        if request.is_unconstrained or request.invalid_reason:
            return []
        outcomes = yield from self._evaluate_nodes(
            request, names, len(names) + _MAX_SCORE_WORK, WorkBudget()
        )
        verdicts = zip(names, outcomes, strict=True)
        return [(name, v.score if isinstance(v, Fit) else 0) for name, v in verdicts]

    def unreadable_reason(self, node: str) -> str:
        """Return the reason why a node's object cannot be read; empty if it can."""
        resources = self._nodes.published_resources(node)
        return resources.reason if isinstance(resources, UnreadableTopology) else ""

    def _evaluate_nodes(
        self,
        request: PodRequest,
        names: Sequence[str],
        sufficient_work: float,
        work: WorkBudget,
        max_feasible: float = inf,
    ) -> Cooperative[list[Verdict | None]]:
        """Evaluate nodes in steps; None for those that were not reached.

        The evaluation stops after ``max_feasible`` fits, or after ``sufficient_work`` and one fit.
        """
        cached_verdicts, evaluated_request = self._cached_verdicts(request), request
        verdicts: list[Verdict | None] = [None] * len(names)
        pause, fits = work.done + ANSWER_STEP_WORK, 0
        resume_positions: list[int] = []
        # The nodes take turns at the front if not all of them are evaluated.
        first_position = min(self._first, len(names)) if sufficient_work < inf else 0
        for position in (*range(first_position, len(names)), *range(first_position)):
            room = self._nodes.free_resources_for(names[position], request)
            if not isinstance(room, NodeResources) or (
                room.agent_not_ready and request.has_placement_request
            ):
                verdicts[position] = self._default_verdict(request, room)
                continue
            verdict = cached_verdicts.get(room)
            if verdict is None:
                if fits and work.done >= sufficient_work:
                    resume_positions.append(position)
                    continue
                if work.done >= work.limit and evaluated_request is request:
                    evaluated_request = request.without_duplicate_containers(
                        max(1, _MAX_SUM_EVALUATIONS // len(names))
                    )
                verdict = evaluate_fit(room, evaluated_request, self._strategy, work)
                if work.done < work.limit:
                    cached_verdicts[room] = verdict
                if work.done >= pause:
                    pause = work.done + ANSWER_STEP_WORK
                    yield
            verdicts[position] = verdict
            fits += isinstance(verdict, Fit) and not verdict.by_sums
            if fits >= max_feasible:
                resume_positions.append(position + 1)
                break
        if resume_positions:
            self._first = resume_positions[0]
        return verdicts

    def _cached_verdicts(self, request: PodRequest) -> dict[NodeResources, Verdict]:
        """Return the verdicts for equal pods by resources; outdated ones are pruned."""
        key = request.verdict_key
        verdicts = self._known.pop(key, {})
        if len(verdicts) >= len(self._nodes) + _MAX_CACHED_STALE_ROOMS:
            verdicts = {room: verdicts[room] for room in self._nodes.rooms() if room in verdicts}
        while (
            len(self._known) >= _MAX_CACHED_REQUESTS
            or sum(map(len, self._known.values())) > _MAX_VERDICTS
        ):
            del self._known[next(iter(self._known))]  # the least recently used
        self._known[key] = verdicts
        return verdicts

    def _default_verdict(
        self, request: PodRequest, resources: NodeResources | UnreadableTopology | None
    ) -> Verdict:
        if isinstance(resources, NodeResources):
            return Unfit(AGENT_NOT_READY_TEXT)
        if self._unknown_fits or not request.has_placement_request:
            return Fit(NO_NODE_RESOURCES, request)
        return Unfit(NO_TOPOLOGY_TEXT if resources is None else UNREADABLE_TEXT, unresolvable=True)


def run_to_end(answer: Cooperative[T]) -> T:
    """Run all steps of an answer."""
    while True:
        try:
            next(answer)
        except StopIteration as end:
            result: T = end.value
            return result
