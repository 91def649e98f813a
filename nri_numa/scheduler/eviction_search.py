"""The pods of lower priority to evict from one node, so that a pod fits there. Pure.

The node is evaluated as `filter` evaluates it, with the resources that the evicted pods give back.
Of all sets that suffice, the cheapest is selected: fewest evictions that a PodDisruptionBudget does
not allow, then as kube-scheduler ranks nodes (pickOneNodeForPreemption): the lowest highest
priority, the lowest sum of priorities, fewest pods; then the least memory.

Sets are extended pod by pod, the lowest priority first. A set is abandoned if every set that
contains it costs as much as the best one, or lacks resources. The work is counted; beyond the limit
the best set so far counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import add, sub
from typing import Final

from msgspec import Struct

from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.model.workload import OnFailure, Policy, Strategy
from nri_numa.scheduler.fit import Fit, Unfit, Verdict, WorkBudget, evaluate_fit

MAX_SEARCH_WORK: Final = 1000
"""Work for one node (`WorkBudget`), about 10 ms."""
_PRIORITY_OFFSET: Final = 1 << 31
"""Added to each priority of a sum, so that one more pod never lowers it (MaxInt32 + 1)."""

_EXCLUSIVE: Final = "exclusive"
_MILLI: Final = "milli"
RowKey = tuple[str, int | None]
"""Resource and position of a NUMA node; None for the sum of the Node, or of exclusive CPUs."""
EvictionCost = tuple[int, int, int, int, int]
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
    full_name: str = ""
    priority: int = 0
    released: ResourceCounts | None = None
    is_movable: bool = False
    sums: Mapping[str, int] = {}
    budgets: tuple[int, ...] = ()
    repels_others: bool = False

    @property
    def gains(self) -> dict[RowKey, int]:
        """Amounts that its end gives back, by row."""
        gains: dict[RowKey, int] = {(name, None): n for name, n in self.sums.items()}
        if (released := self.released) is not None:
            gains[_EXCLUSIVE, None] = sum(released.exclusive)
            columns = {_EXCLUSIVE: released.exclusive, _MILLI: released.milli}
            for name, column in (columns | dict(released.other_resources)).items():
                gains.update({(name, position): n for position, n in enumerate(column)})
        return gains

    @property
    def kind(self) -> str:
        """Text that is equal for pods that can replace each other."""
        flags = self.priority, self.is_movable, self.budgets, self.repels_others
        return repr((flags, sorted(f"{row}{n}" for row, n in self.gains.items() if n)))


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
    missing: Mapping[str, int] = {}
    allowed: tuple[int, ...] = ()
    proposed: tuple[EvictablePod, ...] = ()
    may_change: bool = True

    def evaluate_without(
        self, pods: Iterable[EvictablePod], strategy: Strategy, work: WorkBudget
    ) -> Verdict:
        """Evaluate the node as it is without some pods."""
        released = [(pod.released, pod.is_movable) for pod in pods if pod.released is not None]
        room = self.room.plus_pods(
            [charge for charge, movable in released if not movable],
            [charge for charge, movable in released if movable],
        )
        return evaluate_fit(room, self.request, strategy, work)

    def eviction_cost(self, pods: Sequence[EvictablePod]) -> EvictionCost:
        """Return the cost of an eviction; lower is better."""
        return (
            self.count_violations(pods),
            max((pod.priority for pod in pods), default=-_PRIORITY_OFFSET),
            sum(pod.priority + _PRIORITY_OFFSET for pod in pods),
            len(pods),
            sum(pod.sums.get("memory", 0) for pod in pods),
        )

    def count_violations(self, pods: Iterable[EvictablePod]) -> int:
        """Count the evictions beyond those that the budgets allow."""
        counts = [0] * len(self.allowed)
        for pod in pods:
            for budget in pod.budgets:
                counts[budget] += 1
        return sum(max(0, n - max(0, m)) for n, m in zip(counts, self.allowed, strict=True))

    @property
    def needed_sums(self) -> Mapping[str, int]:
        """Missing amounts, as far as the proposed pods give them: kube-scheduler knows better."""
        providers = self.proposed or self.pods
        return {
            name: min(amount, sum(pod.sums.get(name, 0) for pod in providers))
            for name, amount in self.missing.items()
        }

    @property
    def required(self) -> tuple[EvictablePod, ...]:
        """Proposed victims that sums do not explain: another filter of kube-scheduler needs them.

        kube-scheduler proposes no victim that it can do without.
        """
        totals = {name: sum(p.sums.get(name, 0) for p in self.proposed) for name in self.missing}

        def is_needed_by_sums(pod: EvictablePod) -> bool:
            return any(
                totals[name] - pod.sums.get(name, 0) < amount
                for name, amount in self.needed_sums.items()
            )

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
) -> Eviction | Unfit:
    """Select the pods to evict; the reason if the pod does not fit without any of them.

    Up to ``limit`` is added to ``work``, and then what completes the best set; without a limit that
    is above 0 the proposed victims alone are evaluated.
    """
    limit += work.done
    proposed = node.evaluate_without(node.proposed, strategy, work)
    if not node.may_change or limit <= work.done:
        return proposed if isinstance(proposed, Unfit) else _eviction(node, node.proposed, proposed)
    verdict = node.evaluate_without(node.pods, strategy, work)
    if isinstance(verdict, Unfit):
        return verdict
    search = _Search(node, strategy, work, limit)
    if isinstance(proposed, Fit):
        search.record_solution(node.proposed, proposed)
    search.run()
    if search.best is None:
        return _eviction(node, *search.drop_unneeded(node.pods, verdict))
    return _eviction(node, *search.best)


def _eviction(node: CandidateNode, pods: Sequence[EvictablePod], fit: Fit) -> Eviction:
    """Return an eviction; pods are ordered by priority, the highest first, then by uid."""
    ordered = tuple(sorted(pods, key=lambda pod: (-pod.priority, pod.uid)))
    return Eviction(ordered, node.count_violations(ordered), fit)


class _Item(Struct, frozen=True):
    """A pod in the order of a search.

    Attributes:
        gains: amounts that it gives to each lacking row.
        next_other: position of the next pod that cannot replace this one.
        totals, maxima: sum and maximum of the gains of this pod and those after it, by row.
        min_priority: the lowest priority of these.
    """

    pod: EvictablePod
    gains: tuple[int, ...]
    next_other: int
    totals: tuple[int, ...]
    maxima: tuple[int, ...]
    min_priority: int


class _Search:
    """Search for the cheapest set of pods of a node.

    Attributes:
        best: pods and fit of the best set so far.
    """

    def __init__(
        self, node: CandidateNode, strategy: Strategy, work: WorkBudget, limit: int
    ) -> None:
        self._node, self._strategy, self._work, self._limit = node, strategy, work, limit
        self.best: tuple[tuple[EvictablePod, ...], Fit] | None = None
        self._cost: EvictionCost = (1 << 62, 0, 0, 0, 0)

    def record_solution(self, pods: Sequence[EvictablePod], fit: Fit) -> None:
        """Record a set that suffices if it is the best one so far."""
        if (cost := self._node.eviction_cost(pods)) < self._cost:
            self._cost, self.best = cost, (tuple(pods), fit)

    def run(self) -> None:
        """Search for each NUMA node that the pod may be put on."""
        node = self._node
        required = node.required
        self._chosen = list(required)
        others = [pod for pod in node.pods if pod not in required]
        kinds = {pod.uid: pod.kind for pod in others}
        gains_by_row = {pod.uid: pod.gains for pod in node.pods}
        for lacks in _lacking_rows(node.room, node.request):
            lacks |= {(name, None): n for name, n in node.needed_sums.items()}
            rows = [row for row, n in lacks.items() if n > 0]
            gains = {
                uid: tuple([amounts.get(row, 0) for row in rows])
                for uid, amounts in gains_by_row.items()
            }
            # A set whose lacking rows are filled may fail for another reason, such as a policy.
            useful = [pod for pod in others if pod.released or any(gains[pod.uid])]
            self._items = _order_items(useful, gains, kinds, node.allowed)
            given = [sum(column) for column in zip(*(gains[p.uid] for p in required), strict=True)]
            lacking = [lacks[row] for row in rows]
            self._extend(0, tuple(map(sub, lacking, given or [0] * len(rows))))

    def _extend(self, first: int, lacks: tuple[int, ...]) -> None:
        """Complete the chosen set with pods from a position on."""
        self._work.done += 1
        if self._work.done >= self._limit:
            return
        cost = self._node.eviction_cost(self._chosen)
        if cost >= self._cost:
            return
        if max(lacks, default=0) <= 0:
            verdict = self._node.evaluate_without(self._chosen, self._strategy, self._work)
            if isinstance(verdict, Fit):
                return self.record_solution(self._chosen, verdict)
        position = first
        while position < len(self._items):
            item = self._items[position]
            if self._is_hopeless(item, lacks, cost) or self._work.done >= self._limit:
                return
            self._chosen.append(item.pod)
            self._extend(position + 1, tuple(map(sub, lacks, item.gains)))
            self._chosen.pop()
            position = item.next_other

    def _is_hopeless(self, item: _Item, lacks: tuple[int, ...], cost: EvictionCost) -> bool:
        """Return True if no pods from this one on complete the set at a lower cost."""
        count = 1
        for lack, total, maximum in zip(lacks, item.totals, item.maxima, strict=True):
            if lack > total:
                return True
            if lack > 0:
                count = max(count, -(-lack // maximum))
        violations, highest, priorities, pods, memory = cost
        least = item.min_priority
        bound = (
            violations,
            max(highest, least),
            priorities + count * (least + _PRIORITY_OFFSET),
            pods + count,
            memory,
        )
        return bound >= self._cost

    def drop_unneeded(
        self, pods: Sequence[EvictablePod], fit: Fit
    ) -> tuple[Sequence[EvictablePod], Fit]:
        """Drop pods of a set that suffices while it does, the highest priority first."""
        sums = self._node.needed_sums.items()
        needed = {pod.uid for pod in (*self._node.required, *self._node.proposed)}
        kept = sorted(pods, key=lambda pod: (pod.priority, pod.uid))
        for pod in reversed(list(kept)):
            if pod.uid in needed:
                continue
            rest = [other for other in kept if other is not pod]
            if any(sum(p.sums.get(name, 0) for p in rest) < n for name, n in sums):
                continue
            verdict = self._node.evaluate_without(rest, self._strategy, self._work)
            if isinstance(verdict, Fit):
                kept, fit = rest, verdict
        return kept, fit


def _order_items(
    pods: Iterable[EvictablePod],
    gains: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    allowed: Sequence[int],
) -> list[_Item]:
    """Order pods by priority, then those that no budget protects, the largest gains, and uid."""

    def order(pod: EvictablePod) -> tuple[object, ...]:
        spent = any(allowed[budget] <= 0 for budget in pod.budgets)
        gain_key = tuple([-gain for gain in gains[pod.uid]])
        memory = pod.sums.get("memory", 0)
        return pod.priority, spent, gain_key, memory, kinds[pod.uid], pod.uid

    items: list[_Item] = []
    ordered = sorted(pods, key=order)
    totals = maxima = (0,) * len(gains[ordered[0].uid]) if ordered else ()
    least, kind, next_other = _PRIORITY_OFFSET, "", len(ordered)
    for position in reversed(range(len(ordered))):
        pod = ordered[position]
        totals = tuple(map(add, totals, gains[pod.uid]))
        maxima = tuple(map(max, maxima, gains[pod.uid]))
        least = min(least, pod.priority)
        if kind != kinds[pod.uid]:
            kind, next_other = kinds[pod.uid], position + 1
        items.append(_Item(pod, gains[pod.uid], next_other, totals, maxima, least))
    return items[::-1]


def _lacking_rows(room: NodeResources, request: PodRequest) -> Iterator[dict[RowKey, int]]:
    """Yield the amounts that must be freed: once for each NUMA node that may get the pod.

    For a pod that may be on several NUMA nodes these are exclusive CPUs of all of them.
    """
    requests = request.plugin_aligned_requests
    strict = [c for c in requests if c.on_failure is OnFailure.REJECT and not c.is_init]
    moved = room.exclusive_after_moves
    free_cpus = tuple(map(max, room.exclusive.free, moved or room.exclusive.free))
    cpus, limit = sum(map(room.cpus_with_idle_siblings, strict)), room.exclusive_limit
    lack = cpus - min(sum(free_cpus), cpus if limit is None else limit)
    total: dict[RowKey, int] = {(_EXCLUSIVE, None): lack}
    if len(requests) != 1 or not strict or strict[0].policy is not Policy.SINGLE_NUMA_NODE:
        yield total
        return
    for position, free in enumerate(free_cpus):
        milli = max(room.cpu.free[position], 1000 * free if moved else 0)
        demand = 1000 * cpus if strict[0].exclusive_cpus else max(1, strict[0].shared_milli)
        rows: dict[RowKey, int] = {**total, (_MILLI, position): demand - milli}
        rows[_EXCLUSIVE, position] = cpus - free
        free_amounts = {r.name: r.free[position] for r in room.other_resources}
        for name, amount in strict[0].amounts:
            if name in free_amounts:
                rows[name, position] = amount - free_amounts[name]
        yield rows
