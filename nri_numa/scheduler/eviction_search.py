"""The pods of lower priority to evict from one node, so that a pod fits there. Pure.

The node is evaluated as `filter` evaluates it, with the resources that the evicted pods give back.
Of all sets that suffice, the cheapest is selected: fewest evictions that a PodDisruptionBudget does
not allow, then as kube-scheduler ranks nodes (pickOneNodeForPreemption): the lowest highest
priority, the lowest sum of priorities, fewest pods; then the least memory.

The first set is made as in kube-scheduler's dry run: each pod that need not go is spared. Then sets
are extended pod by pod. A set is abandoned if every set that contains it costs as much as the best
one. The work is counted; beyond the limit the best set so far counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from msgspec import Struct

from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.model.workload import OnFailure, Policy, Strategy
from nri_numa.scheduler.fit import Fit, Unfit, Verdict, WorkBudget, evaluate_fit

MAX_SEARCH_WORK: Final = 300
"""Work for one node (`WorkBudget`), about 3 ms."""
_PRIORITY_OFFSET: Final = 1 << 31
"""Added to each priority of a sum, so that one more pod never lowers it (MaxInt32 + 1)."""

EvictionCost = tuple[float, ...]
"""Evictions that no budget allows, highest priority, sum of priorities, pods, bytes of memory."""


class EvictablePod(Struct, frozen=True, kw_only=True):
    """A pod of lower priority.

    Attributes:
        released: resources that its end gives back on NUMA nodes; None if unknown.
        sums: its requests by resource.
        budgets: positions of the PodDisruptionBudgets that cover it.
        repels_others: its anti-affinity may keep other pods from the node.
    """

    uid: str
    full_name: str
    priority: int
    released: ResourceCounts | None
    is_movable: bool
    sums: Counter[str]
    budgets: tuple[int, ...]
    repels_others: bool


class CandidateNode(Struct, frozen=True, kw_only=True):
    """A node that a pod of higher priority may be put on.

    Attributes:
        room: its free resources, without pods that leave it anyway.
        missing: amounts that the pod lacks by the sums of the Node.
        allowed: evictions that each budget allows.
        proposed: victims that kube-scheduler proposes; its other filters need those of them that
            sums do not.
        may_change: other pods than the proposed ones may be evicted.
    """

    room: NodeResources
    request: PodRequest
    pods: tuple[EvictablePod, ...]
    missing: Mapping[str, int]
    allowed: tuple[int, ...]
    proposed: tuple[EvictablePod, ...]
    may_change: bool

    def eviction_cost(self, pods: Sequence[EvictablePod]) -> EvictionCost:
        """Return the cost of an eviction; lower is better."""
        counts = Counter(budget for pod in pods for budget in pod.budgets)
        return (
            sum(max(0, count - self.allowed[budget]) for budget, count in counts.items()),
            max((pod.priority for pod in pods), default=-inf),
            sum(pod.priority + _PRIORITY_OFFSET for pod in pods),
            len(pods),
            sum(pod.sums["memory"] for pod in pods),
        )

    @property
    def needed_sums(self) -> Mapping[str, int]:
        """Missing amounts, as far as the proposed pods give them: kube-scheduler knows better."""
        providers = self.proposed or self.pods
        return {
            name: min(amount, sum(pod.sums[name] for pod in providers))
            for name, amount in self.missing.items()
        }

    @property
    def required_victims(self) -> tuple[EvictablePod, ...]:
        """Proposed victims that sums do not explain: another filter of kube-scheduler needs them.

        kube-scheduler proposes no victim that it can do without.
        """
        totals = {name: sum(p.sums[name] for p in self.proposed) for name in self.missing}
        needed_sums = self.needed_sums

        def is_needed_by_sums(pod: EvictablePod) -> bool:
            return any(totals[name] - pod.sums[name] < n for name, n in needed_sums.items())

        return tuple(
            pod for pod in self.proposed if pod.repels_others or not is_needed_by_sums(pod)
        )


class Eviction(Struct, frozen=True):
    """Pods to evict, the highest priority first; none if the pod fits without evictions."""

    pods: tuple[EvictablePod, ...]
    violations: int
    fit: Fit


def select_victims(
    node: CandidateNode, strategy: Strategy, work: WorkBudget, *, limit: int = MAX_SEARCH_WORK
) -> Eviction | Unfit | None:
    """Select the pods to evict; the reason if the pod does not fit without any of them.

    Up to ``limit`` and two evaluations are added to ``work``; None if no set is known by then.
    """
    search = _Search(node, strategy, work, limit)
    proposed = search.evaluate_without(node.proposed)
    if isinstance(proposed, Fit):
        search.record_solution(node.proposed, proposed)
    if not node.may_change:
        return proposed if isinstance(proposed, Unfit) else search.best
    verdict = search.evaluate_without(node.pods)
    if isinstance(verdict, Unfit):
        return verdict
    search.spare_pods(verdict)
    search.extend_required()
    return search.best


class _Search:
    """Search for the cheapest set of pods of a node.

    Attributes:
        best: the best set so far.
    """

    def __init__(
        self, node: CandidateNode, strategy: Strategy, work: WorkBudget, limit: int
    ) -> None:
        self._node, self._strategy, self._work = node, strategy, work
        self._max_work = work.done + limit
        self._required, self._needed_sums = node.required_victims, node.needed_sums
        self._optional = sorted(
            [pod for pod in node.pods if pod not in self._required], key=self._eviction_order
        )
        self._min_count = _min_victim_count(node)
        self.best: Eviction | None = None
        self._cost: EvictionCost = (inf,)

    def _eviction_order(self, pod: EvictablePod) -> tuple[object, ...]:
        """Order pods without a spent budget first, then by priority, most CPUs, memory and uid."""
        has_spent_budget = any(self._node.allowed[budget] == 0 for budget in pod.budgets)
        cpu_milli, memory = pod.sums["cpu"], pod.sums["memory"]
        return has_spent_budget, pod.priority, -cpu_milli, memory, pod.uid

    def is_work_spent(self) -> bool:
        """Return True if no more work may be done."""
        return self._work.done >= self._max_work

    def evaluate_without(self, pods: Sequence[EvictablePod]) -> Verdict:
        """Evaluate the node as it is without some pods."""
        released = [(pod.released, pod.is_movable) for pod in pods if pod.released is not None]
        room = self._node.room.plus_pods(
            [charge for charge, is_movable in released if not is_movable],
            [charge for charge, is_movable in released if is_movable],
        )
        return evaluate_fit(room, self._node.request, self._strategy, self._work)

    def record_solution(self, pods: Sequence[EvictablePod], fit: Fit) -> None:
        """Record a set that suffices if it is the best one so far."""
        if (cost := self._node.eviction_cost(pods)) < self._cost:
            ordered = tuple(sorted(pods, key=lambda pod: (-pod.priority, pod.uid)))
            self._cost, self.best = cost, Eviction(ordered, int(cost[0]), fit)

    def spare_pods(self, fit: Fit) -> None:
        """Record the set without each pod that can be spared, from the end of the order."""
        victims = [*self._required, *self._optional]
        for pod in reversed(self._optional):
            if self.is_work_spent():
                return
            remaining = [victim for victim in victims if victim is not pod]
            if self._has_needed_sums(remaining):
                verdict = self.evaluate_without(remaining)
                if isinstance(verdict, Fit):
                    victims, fit = remaining, verdict
        self.record_solution(victims, fit)

    def _has_needed_sums(self, pods: Sequence[EvictablePod]) -> bool:
        return all(
            sum(pod.sums[name] for pod in pods) >= amount
            for name, amount in self._needed_sums.items()
        )

    def extend_required(self) -> None:
        """Extend the required victims by others."""
        self._extend_set(self._required, self._optional)

    def _extend_set(self, victims: tuple[EvictablePod, ...], pods: Sequence[EvictablePod]) -> None:
        """Complete a set with some of other pods."""
        self._work.done += 1
        cost = self._node.eviction_cost(victims)
        if cost >= self._cost:
            return
        missing_count = self._min_count - len(victims)
        if missing_count <= 0 and self._has_needed_sums(victims):
            verdict = self.evaluate_without(victims)
            if isinstance(verdict, Fit):
                return self.record_solution(victims, verdict)
        for position, pod in enumerate(pods):
            min_cost = _min_extended_cost(cost, max(1, missing_count), pods[position:])
            if min_cost >= self._cost or self.is_work_spent():
                return
            self._extend_set((*victims, pod), pods[position + 1 :])


def _min_extended_cost(
    cost: EvictionCost, pod_count: int, pods: Sequence[EvictablePod]
) -> EvictionCost:
    """Return the least cost of a set with at least so many more of these pods."""
    violations, max_priority, priorities, victim_count, memory = cost
    min_priority = min([pod.priority for pod in pods])
    return (
        violations,
        max(max_priority, min_priority),
        priorities + pod_count * (min_priority + _PRIORITY_OFFSET),
        victim_count + pod_count,
        memory + pod_count * min([pod.sums["memory"] for pod in pods]),
    )


def _min_victim_count(node: CandidateNode) -> int:
    """Return how many pods must go at least until one NUMA node has the pod's exclusive CPUs."""
    room, requests = node.room, node.request.plugin_aligned_requests
    container = requests[0] if len(requests) == 1 else None
    if (
        container is None
        or container.policy is not Policy.SINGLE_NUMA_NODE
        or container.on_failure is not OnFailure.REJECT
    ):
        return 0
    cpus = room.cpus_with_idle_siblings(container)
    exclusive_after_moves = room.exclusive_after_moves or room.exclusive.free
    counts: list[int] = []
    for position, free_cpus in enumerate(map(max, room.exclusive.free, exclusive_after_moves)):
        releases = [pod.released.exclusive[position] for pod in node.pods if pod.released]
        if cpus <= free_cpus:
            return 0
        if max_release := max(releases, default=0):
            counts.append(-(-(cpus - free_cpus) // max_release))
    return min(counts, default=0)
