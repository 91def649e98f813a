"""The verbs filter and prioritize: many nodes, one pod.

One text for each class of reasons, with the best number of all nodes of that class: kube-scheduler
counts texts by equality, and the condition of a pod that is shown to people is not cut.
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

NO_TOPOLOGY_TEXT: Final = "no NodeResourceTopology says what its NUMA nodes have"
AGENT_NOT_READY_TEXT: Final = "its agent does not place containers now"
UNREADABLE_TEXT: Final = "its NodeResourceTopology cannot be read"
_MAX_CACHED_STALE_ROOMS: Final = 1000
"""Rooms that are gone whose verdicts may be remembered for one kind of pods."""
_MAX_CACHED_REQUESTS: Final = 32
"""Kinds of pods for which verdicts are remembered."""
_MAX_VERDICTS: Final = 60_000
"""Verdicts of all these, some 20 MB."""
_MIN_FILTER_WORK: Final = 300
"""Work (`nri_numa.scheduler.fit.Work`) that a narrow filter may always do, 3 to 5 ms; of more than
600 nodes it may do half a unit for each."""
_MAX_FITTING_NODES: Final = 100
"""Nodes with room after which a narrow filter looks at no more: as many are enough for
kube-scheduler itself (minFeasibleNodesToFind), which scores each."""
_MAX_SCORE_WORK: Final = 1000
"""Work beyond a unit for each node that `prioritize` may do where nothing was judged before."""
MAX_QUESTION_WORK: Final = 60_000
"""Work for one question, 0.6 s: 5,000 nodes with four NUMA nodes and a merge each."""
_MAX_SUM_EVALUATIONS: Final = 30_000
"""Containers that are judged by sums beyond it, of all nodes together."""
ANSWER_STEP_WORK: Final = 100
"""Work after which others have their turn: a millisecond, so that a binding waits no longer."""

T = TypeVar("T")
Cooperative = Generator[None, None, T]
"""An answer in steps, between which other things may be done."""


class FilterResult(Struct):
    """The outcome of a filter.

    Attributes:
        feasible: in the order of the question; of a narrow filter those that suit best.
        failed: reason by node, where waiting or preemption may help.
        unresolvable: reason by node, where neither does.
        by_sums: nodes that passed without having been judged in full.
    """

    feasible: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unresolvable: dict[str, str] = field(default_factory=dict)
    by_sums: int = 0


class ReasonGroup(Struct, frozen=True):
    """Nodes that a pod does not fit on for one class of reasons, with one text for all of them."""

    text: str
    unresolvable: bool
    nodes: list[str]


def group_reasons(unfit: Iterable[tuple[str, Unfit]]) -> list[ReasonGroup]:
    """Group nodes by the class of their reason, in the order of the first of each class."""
    groups: dict[tuple[object, ...], list[tuple[str, Unfit]]] = {}
    for name, one in unfit:
        groups.setdefault(one.reason_group, []).append((name, one))
    return [
        ReasonGroup(
            members[0][1].reason_text(max(one.best_amount for _, one in members)),
            members[0][1].unresolvable,
            [name for name, _ in members],
        )
        for members in groups.values()
    ]


class VerdictCache:
    """Verdicts of nodes for pods. Each distinct room is judged once for equal pods.

    Args:
        unknown_fits: pods that ask for something may go to nodes of which nothing is known.
        narrow: of the nodes with room `filter` names those that suit best, where `prioritize` is
            not called (docs/adr/0059-sums-first.md).
    """

    def __init__(
        self,
        nodes: ClusterState,
        strategy: Strategy,
        *,
        unknown_fits: bool = False,
        narrow: bool = False,
    ) -> None:
        self._nodes, self._strategy = nodes, strategy
        self._unknown_fits, self._narrow = unknown_fits, narrow
        self._known: dict[tuple[object, ...], dict[NodeResources, Verdict]] = {}
        self._first = 0

    def evaluate_node(
        self, request: PodRequest, node: str, work: WorkBudget | None = None
    ) -> Verdict:
        """Whether a node has room for a pod now, and where; what it cost is added to ``work``."""
        (found,) = run_to_end(self._evaluate_nodes(request, (node,), inf, work or WorkBudget()))
        assert found is not None  # noqa: S101  # a single node is always judged
        return found

    def filter_nodes(self, request: PodRequest, names: Sequence[str]) -> FilterResult:
        """Which nodes have room, and why the others have not."""
        return run_to_end(self.filter_steps(request, names, inf))

    def filter_steps(
        self, request: PodRequest, names: Sequence[str], limit: float = MAX_QUESTION_WORK
    ) -> Cooperative[FilterResult]:
        """The same in steps.

        A narrow filter leaves it at the best of those judged so far where a hundred have room, or
        some have after enough work. The next question of a pod alike goes on from there. Where none
        has, nodes beyond the limit pass by sums alone.
        """
        if request.is_unconstrained:
            return FilterResult(feasible=list(names))
        if request.invalid_reason:
            return FilterResult(unresolvable=dict.fromkeys(names, request.invalid_reason))
        if again := self._assumed_node_if_it_fits(request, names):
            return FilterResult(feasible=[again])
        result = FilterResult()
        grades: list[int] = []
        unfit: list[tuple[str, Unfit]] = []
        narrow = self._narrow and request.has_placement_request
        enough = max(_MIN_FILTER_WORK, len(names) / 2) if narrow else inf
        most = _MAX_FITTING_NODES if narrow else inf
        verdicts = yield from self._evaluate_nodes(request, names, enough, WorkBudget(limit), most)
        for name, found in zip(names, verdicts, strict=True):
            if found is None:
                continue
            if isinstance(found, Unfit):
                unfit.append((name, found))
            else:
                result.feasible.append(name)
                grades.append(found.score_key)
                result.by_sums += found.by_sums
        if narrow and grades:
            least = min_near_best_score_key(max(grades), self._strategy)
            fits = zip(result.feasible, grades, strict=True)
            result.feasible = [name for name, grade in fits if grade >= least]
        for one in group_reasons(unfit):
            (result.unresolvable if one.unresolvable else result.failed).update(
                dict.fromkeys(one.nodes, one.text)
            )
        return result

    def _assumed_node_if_it_fits(self, request: PodRequest, names: Sequence[str]) -> str:
        """The node that holds room for this pod, if that is still enough; else empty.

        The API server did not say whether its binding was written. Its own room is in its way
        everywhere else, and must stay: the binding may still come.
        """
        held = self._nodes.assumed_pods.get(request.uid)
        if held is None or held.node not in names:
            return ""
        self._nodes.forget_pod(request.uid)
        found = self.evaluate_node(request, held.node)
        self._nodes.assume_pod(held)
        return held.node if isinstance(found, Fit) else ""

    def find_other_node(self, request: PodRequest, names: Sequence[str]) -> Cooperative[str]:
        """A node with room that is none of these, in steps; empty where there is none."""
        others = sorted(self._nodes.node_names.difference(names))
        found = yield from self._evaluate_nodes(request, others, 0, WorkBudget(MAX_QUESTION_WORK))
        verdicts = zip(others, found, strict=True)
        return next((name for name, one in verdicts if isinstance(one, Fit)), "")

    def prioritize_steps(
        self, request: PodRequest, names: Sequence[str]
    ) -> Cooperative[list[tuple[str, int]]]:
        """A score for each node, the larger the better, in steps; nothing for a pod without wishes.

        Nodes that are not judged have 0 as those that do not fit.
        """
        if request.is_unconstrained or request.invalid_reason:
            return []
        found = yield from self._evaluate_nodes(
            request, names, len(names) + _MAX_SCORE_WORK, WorkBudget()
        )
        verdicts = zip(names, found, strict=True)
        return [(name, found.score if isinstance(found, Fit) else 0) for name, found in verdicts]

    def unreadable_reason(self, node: str) -> str:
        """What cannot be read in a node's object; empty where all can."""
        known = self._nodes.published_resources(node)
        return known.reason if isinstance(known, UnreadableTopology) else ""

    def _evaluate_nodes(
        self,
        request: PodRequest,
        names: Sequence[str],
        enough: float,
        work: WorkBudget,
        most: float = inf,
    ) -> Cooperative[list[Verdict | None]]:
        """One for each node; None where enough work was done before, and some node has room.

        And from where on so many have (``most``).
        """
        known, asks = self._cached_verdicts(request), request
        verdicts: list[Verdict | None] = [None] * len(names)
        pause, fits = work.done + ANSWER_STEP_WORK, 0
        left: list[int] = []
        # Not always the same nodes first, where not all are judged.
        first = min(self._first, len(names)) if enough < inf else 0
        for place in (*range(first, len(names)), *range(first)):
            room = self._nodes.free_resources(names[place])
            if not isinstance(room, NodeResources) or (
                room.agent_not_ready and request.has_placement_request
            ):
                verdicts[place] = self._default_verdict(request, room)
                continue
            found = known.get(room)
            if found is None:
                if fits and work.done >= enough:
                    left.append(place)
                    continue
                if work.done >= work.limit and asks is request:
                    asks = request.without_duplicate_containers(
                        max(1, _MAX_SUM_EVALUATIONS // len(names))
                    )
                found = evaluate_fit(room, asks, self._strategy, work)
                if work.done < work.limit:
                    known[room] = found
                if work.done >= pause:
                    pause = work.done + ANSWER_STEP_WORK
                    yield
            verdicts[place] = found
            fits += isinstance(found, Fit) and not found.by_sums
            if fits >= most:
                left.append(place + 1)
                break
        if left:
            self._first = left[0]
        return verdicts

    def _cached_verdicts(self, request: PodRequest) -> dict[NodeResources, Verdict]:
        """Verdicts for pods that ask alike, by room; those of rooms that are gone go some day."""
        key = request.verdict_key
        known = self._known.pop(key, {})
        if len(known) >= len(self._nodes) + _MAX_CACHED_STALE_ROOMS:
            known = {room: known[room] for room in self._nodes.rooms() if room in known}
        while (
            len(self._known) >= _MAX_CACHED_REQUESTS
            or sum(map(len, self._known.values())) > _MAX_VERDICTS
        ):
            del self._known[next(iter(self._known))]  # the one that was not asked for the longest
        self._known[key] = known
        return known

    def _default_verdict(
        self, request: PodRequest, known: NodeResources | UnreadableTopology | None
    ) -> Verdict:
        if isinstance(known, NodeResources):
            return Unfit(AGENT_NOT_READY_TEXT)
        if self._unknown_fits or not request.has_placement_request:
            return Fit(NO_NODE_RESOURCES, request)
        return Unfit(NO_TOPOLOGY_TEXT if known is None else UNREADABLE_TEXT, unresolvable=True)


def run_to_end(steps: Cooperative[T]) -> T:
    """All steps of an answer, one after another."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
