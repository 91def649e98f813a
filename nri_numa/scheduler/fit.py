"""The rule: does a pod fit on a node, on which of its NUMA nodes, and if not, what is missing?

A container that one NUMA node has room for goes to one under every policy; which one says the
strategy (`nri_numa.engine.place.computed.strategy_keys`). One that none has room for is merged and
judged by `nri_numa.engine.align.policies.align_demands`, as on the node. What the node alone knows,
the
numbers of the CPUs, is replaced by counts: where free CPUs are scattered over cores, a pod that
fits here can still be refused there.

What judging costs is counted (`Work`). Containers beyond what one node may cost are judged each by
itself, by sums: none of them is refused that the node would take, and the node decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from nri_numa.cluster.node_resources import AmountByPosition, NodeResources, ResourceCounts
from nri_numa.cluster.pod_request import (
    EXTENDED_RESOURCE_MARK,
    ContainerRequest,
    PodRequest,
    peak_request,
)
from nri_numa.engine.align.hints import EXACT_MERGE_MAX_NODES, ResourceDemand
from nri_numa.engine.align.policies import (
    AlignmentRequest,
    align_demands,
    numa_node_count_text,
)
from nri_numa.engine.place.computed import strategy_keys
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Unit, count_text
from nri_numa.model.workload import SMT, OnFailure, Policy, Scope, Strategy

STRICT_POLICIES: Final = (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
MAX_SCORE: Final = 10
"""MaxExtenderPriority of kube-scheduler; it checks nothing."""
SCORE_TOLERANCE: Final = 2
"""Of three points for room: as good is a node that is not left nearly full beside empty ones."""
BASE_WORK_PER_MERGE: Final = 10
"""Work of the smallest merge of hints; one for each 16 hints that are looked at comes to it."""
MAX_NODE_WORK: Final = 2000
"""Work for one node, about 20 ms, after which its containers are judged by sums alone. 64 wide ones
on eight NUMA nodes are below."""
_SCORE_KEY_WIDTH_BASE: Final = 128
"""Twice the NUMA nodes up to which fewer come first; no machine that is sold has so many."""


class WorkBudget:
    """What judging costs: one for a container that sums decide, more for a merge of hints.

    A unit is some 10 µs (bench/extender.py).

    Attributes:
        done: so far.
        limit: of a whole question; the nodes beyond are judged by sums alone.
    """

    __slots__ = ("_until", "done", "limit")

    def __init__(self, limit: float = inf) -> None:
        self.done, self.limit = 0, limit
        self._until = limit

    @property
    def is_node_budget_spent(self) -> bool:
        """Whether sums alone judge what comes next of this node."""
        return self.done >= self._until

    def begin_node(self) -> None:
        """Judge another node."""
        self._until = min(self.limit, self.done + MAX_NODE_WORK)

    def add_merge(self, numa_nodes: int, steps: int) -> None:
        """Count a merge, which looks at all sets of a few NUMA nodes, and searches among many."""
        hints = 1 << numa_nodes if numa_nodes <= EXACT_MERGE_MAX_NODES else steps * numa_nodes
        self.done += BASE_WORK_PER_MERGE + hints // 16


class Fit(Struct, frozen=True, gc=False):
    """The pod fits.

    Attributes:
        request: of the pod, or of one like it.
        assigned_nodes: what was placed, one after another, and positions of its NUMA nodes.
        score_key: see `compute_score_key`; 0 where nothing is aligned, and below all others where
        it ``requires_moves``.
        requires_moves: movable containers have to move for it, which the node decides.
        by_sums: some containers are not among ``assigned_nodes``: each has room by itself, and
            whether all have the node decides.
    """

    room: NodeResources
    request: PodRequest
    assigned_nodes: tuple[tuple[ContainerRequest, Sequence[int]], ...] = ()
    score_key: int = 0
    requires_moves: bool = False
    by_sums: bool = False

    @property
    def numa_nodes(self) -> tuple[tuple[str, NUMASet], ...]:
        """NUMA nodes by container, in the order in which they start."""
        ids, request = self.room.ids, self.request
        if not request.containers:
            return ()  # the kubelet chooses
        found = [
            (one.container, NUMASet(ids[place] for place in places))
            for one, places in self.assigned_nodes
        ]
        if request.pod_scope_request is None:
            return tuple(found)
        both = found[0][1] if found else NUMASet()
        return tuple((one.container, both) for one in request.containers)

    @property
    def pod_charge(self) -> ResourceCounts | None:
        """What the pod takes; None where that is nothing that is counted."""
        return self.room.charge_of_containers(self.assigned_nodes)

    @property
    def score(self) -> int:
        """0 to 10, for `prioritize`."""
        return self.score_key & 15


class Unfit(Struct, frozen=True, gc=False):
    """The pod does not fit: one class of reasons, and how near this node comes.

    Attributes:
        need: what is needed and where: ``needs 12 exclusive CPUs on one NUMA node``; the whole
            reason without ``unit``.
        unit: of ``best_amount``.
        best_amount: the most that is free there, or that there is at all.
        unresolvable: waiting does not help: an empty node has too little.
    """

    need: str
    unit: Unit | None = None
    best_amount: int = 0
    unresolvable: bool = False

    @property
    def reason_group(self) -> tuple[object, ...]:
        """What reasons of one class share."""
        return self.need, self.unresolvable

    def reason_text(self, most: int) -> str:
        """The reason for all nodes of a class; ``most`` is the most of any of them."""
        unit = self.unit
        if unit is None:
            return self.need
        label = "most there is" if self.unresolvable else f"most free{unit.use_text}"
        return f"{self.need}; {label}: {unit.amount_text_without_cpu_noun(most)}"


Verdict = Fit | Unfit


def evaluate_fit(
    room: NodeResources,
    request: PodRequest,
    strategy: Strategy,
    evaluation_cost: WorkBudget | None = None,
) -> Verdict:
    """Whether a pod that is not wrong fits into what a node has free, less all that is held.

    What it costs is added to ``work``.
    """
    evaluation_cost = evaluation_cost or WorkBudget()
    evaluation_cost.begin_node()
    found = _evaluate_without_moves(room, request, strategy, evaluation_cost)
    if isinstance(found, Unfit) and room.exclusive_after_moves:
        moved = _evaluate_without_moves(
            room.with_exclusive_after_moves, request, strategy, evaluation_cost
        )
        # What moves for one container is not there for the next.
        if isinstance(moved, Fit) and (
            moved.by_sums or [len(places) for _, places in moved.assigned_nodes] == [1]
        ):
            return replace(moved, room=room, score_key=0, requires_moves=True)
    return found


def _evaluate_without_moves(
    room: NodeResources, request: PodRequest, strategy: Strategy, work: WorkBudget
) -> Verdict:
    found: Verdict = Fit(room, request)
    if request.containers:
        found = _fit_all(
            room, request, request.plugin_aligned_requests, strategy, room.exclusive_limit, work
        )
        if isinstance(found, Unfit):
            return found
    if request.kubelet_aligned and room.policy is not Policy.NONE:
        kubelets: tuple[ContainerRequest, ...] = tuple(
            [_request_under_kubelet_policy(one, room) for one in request.kubelet_aligned]
        )
        if room.scope is Scope.POD and len(kubelets) > 1:
            kubelets = (peak_request(kubelets),)
        by_kubelet = _fit_all(room, request, kubelets, strategy, None, work)
        if isinstance(by_kubelet, Unfit) or not request.containers:
            return by_kubelet
        if by_kubelet.by_sums:
            return replace(found, by_sums=True)
    return found


def _request_under_kubelet_policy(
    request: ContainerRequest, room: NodeResources
) -> ContainerRequest:
    """A request as the kubelet of this node sees it."""
    amounts = tuple(
        [
            (name, n)
            for name, n in request.amounts
            if room.aligns_memory or EXTENDED_RESOURCE_MARK in name
        ]
    )
    return replace(
        request,
        policy=room.policy,
        exclusive_cpus=request.exclusive_cpus if room.aligns_cpus else 0,
        amounts=amounts,
        charged_amounts=amounts,
        on_failure=OnFailure.REJECT if room.policy in STRICT_POLICIES else OnFailure.BEST_EFFORT,
    )


def _fit_all(
    room: NodeResources,
    request: PodRequest,
    containers: Sequence[ContainerRequest],
    strategy: Strategy,
    most: int | None,
    work: WorkBudget,
) -> Verdict:
    """Place containers one after another; ``most`` exclusive CPUs are free in all."""
    free, width, wider, by_sums = room.free_counts, 0, False, False
    chosen: list[tuple[ContainerRequest, Sequence[int]]] = []
    used: list[int] = []
    for one in containers:
        if one.amounts and EXTENDED_RESOURCE_MARK in one.amounts[-1][0]:
            # kube-scheduler counts those that the node names for no NUMA node.
            known = [
                a
                for a in one.amounts
                if a[0] in room.capacity_by_resource or EXTENDED_RESOURCE_MARK not in a[0]
            ]
            one = replace(one, amounts=tuple(known))
        work.done += 1
        by_sums = by_sums or work.is_node_budget_spent
        found = _select_nodes(room, room.free_counts if by_sums else free, one, strategy, work)
        if isinstance(found, Unfit):
            if one.on_failure is not OnFailure.UNPINNED:
                return found
            wider = True
            continue
        if by_sums:
            continue
        places, ideal = found
        used += places
        width, wider = max(width, len(places)), wider or not ideal
        chosen.append((one, places))
        if not one.is_init:
            free = free.with_container(one, room.cpus_with_idle_siblings(one), places)
    if by_sums:
        return Fit(room, request, tuple(chosen), by_sums=True)
    if not used:
        return Fit(room, request)
    if most is not None and (cpus := sum(room.free_counts.exclusive) - sum(free.exclusive)) > most:
        return Unfit(f"needs {count_text(cpus, 'exclusive CPU')}", Unit.CPUS, most)
    # What is free afterwards of the scarcer one of CPU time and memory, where that is scarcest.
    left, factor = 1000, 1000
    memory, capacity = (
        free.other_resources.get("memory"),
        room.capacity_by_resource.get("memory", ()),
    )
    for place in used:
        whole, there = room.cpu.capacity[place], capacity[place] if memory else 0
        share = 1000 * free.milli[place] // whole if whole else 1000 if there else 0
        if memory and there:
            share = min(share, 1000 * memory[place] // there)
        left, factor = min(left, max(0, share)), min(factor, room.factor[place])
    return Fit(
        room, request, tuple(chosen), compute_score_key(width, wider, left, factor, strategy)
    )


def _resource_rows(
    room: NodeResources, free: ResourceCounts, request: ContainerRequest, kept: int
) -> list[Any]:
    """How much is asked of each resource, what is free and what there is: CPUs first."""
    asks: list[tuple[int, AmountByPosition, AmountByPosition]]
    if request.exclusive_cpus:
        asks = [(kept, free.exclusive, room.exclusive.capacity)]
    else:
        asks = [(max(1, request.shared_milli), free.milli, room.cpu.capacity)]
    for name, amount in request.amounts:
        if name in free.other_resources:
            asks.append((amount, free.other_resources[name], room.capacity_by_resource[name]))
        else:
            none = (0,) * len(room.ids)
            asks.append((amount, none, none))
    return asks


def _select_nodes(
    room: NodeResources,
    free: ResourceCounts,
    request: ContainerRequest,
    strategy: Strategy,
    work: WorkBudget,
) -> tuple[Sequence[int], bool] | Unfit:
    """Positions of the NUMA nodes for one container, the best first; and no wider than ideal.

    None of them where work is spent: then sums say that some set may do.
    """
    if request.smt is SMT.FULL_CORE and request.exclusive_cpus % room.threads_per_core:
        cpus, threads = (
            count_text(request.exclusive_cpus, "exclusive CPU"),
            count_text(room.threads_per_core, "thread"),
        )
        return Unfit(f"needs {cpus} in whole cores of {threads}", unresolvable=True)
    asks = _resource_rows(room, free, request, room.cpus_with_idle_siblings(request))
    fitting: Sequence[int] = range(len(room.ids))
    for least, column, _ in asks:
        fitting = [place for place in fitting if column[place] >= least]
    if len(fitting) > 1:
        fitting = (min(_rank_by_strategy(asks, fitting, strategy))[1],)
    if fitting:
        return fitting, True
    needs = _resolve_requirements(
        request, tuple([(least, capacity) for least, _, capacity in asks])
    )
    single = request.policy is Policy.SINGLE_NUMA_NODE
    if (single and request.on_failure is not OnFailure.BEST_EFFORT) or needs.exceeds_sums(asks):
        return needs.unfit_reason(asks)
    return (
        ((), False)
        if work.is_node_budget_spent
        else _align_nodes(room, request, asks, strategy, needs, work)
    )


def _rank_by_strategy(
    asks: list[Any], places: Sequence[int], strategy: Strategy
) -> Iterable[tuple[tuple[int, ...], int]]:
    """Places with what the engine ranks them by; the least is tried first."""
    # A column is read by place as a mapping is by NUMA node.
    return zip(strategy_keys(asks, tuple(places), strategy), places, strict=True)


def _align_nodes(
    room: NodeResources,
    request: ContainerRequest,
    asks: list[Any],
    strategy: Strategy,
    needs: _Requirements,
    work: WorkBudget,
) -> tuple[Sequence[int], bool] | Unfit:
    """The same where no NUMA node has room for all of it: as the node's Topology Manager does."""
    ids = room.ids
    order = [place for _, place in sorted(_rank_by_strategy(asks, range(len(ids)), strategy))]
    demands = [
        ResourceDemand(
            resource=name,
            need=least,
            capacity=dict(zip(ids, capacity, strict=True)),
            free_amounts=dict(zip(ids, free, strict=True)),
            joint_key="memory" if unit is Unit.BYTES else None,
            unit=unit,
        )
        for (name, unit), (least, free, capacity) in zip(
            _requested_resources_with_units(request), asks, strict=True
        )
    ]
    problem = AlignmentRequest(
        demands=tuple(demands),
        numa_ids=NUMASet(ids),
        policy=Policy.BEST_EFFORT if request.policy is Policy.NONE else request.policy,
        distance=room.distance,
        rank={ids[place]: rank for rank, place in enumerate(order)},
        one_width=True,
    )
    distances = room.sums_of_distances
    found, policy = align_demands(problem, distances), problem.policy
    work.add_merge(len(ids), found.search_steps)
    ideal = found.preferred
    if not found.admitted:
        if request.on_failure is not OnFailure.BEST_EFFORT:
            return needs.unfit_reason(asks)
        policy, ideal = Policy.BEST_EFFORT, False
        found = align_demands(replace(problem, policy=policy), distances)
        work.add_merge(len(ids), found.search_steps)
    everywhere = range(len(ids))
    chosen = everywhere if found.affinity is None else room.positions_of(found.affinity)
    for (_, unit), (least, free, _) in zip(
        _requested_resources_with_units(request), asks, strict=True
    ):
        # CPU time is shared: what is short makes it slow, and nothing is refused.
        if unit is Unit.MILLI_CPUS or sum(free[place] for place in chosen) >= least:
            continue
        if policy in STRICT_POLICIES or sum(free) < least:
            return needs.unfit_reason(asks)
        chosen, ideal = everywhere, False
    return [place for place in order if place in chosen], ideal


def compute_score_key(width: int, wider: bool, left: int, factor: int, strategy: Strategy) -> int:
    """What nodes are compared by: fewer NUMA nodes before all else, then the score.

    The score, in the lowest four bits, is 0 to 10: six points for one NUMA node and two less for
    each more, one less where an empty machine would need fewer; up to three for NUMA nodes that are
    full afterwards (``pack``) or empty (otherwise); one for NUMA nodes with their whole capacity.

    Args:
        width: NUMA nodes of the widest container.
        wider: wider than an empty machine would need, or not pinned.
        left: thousandths of the scarcest resource that are free on its NUMA nodes afterwards.
        factor: least capacity factor of these, in thousandths.
        strategy: of the configuration.
    """
    wide = max(0, 6 - 2 * (width - 1) - wider)
    room = 1000 - left if strategy is Strategy.PACK else left
    first = max(0, _SCORE_KEY_WIDTH_BASE - 2 * width - wider)
    return first << 4 | min(MAX_SCORE, (1000 * wide + 3 * room + factor + 500) // 1000)


def min_near_best_score_key(best: int, strategy: Strategy) -> int:
    """The least grade that is about as good as the best one.

    As many NUMA nodes, and a score at most `SCORE_TOLERANCE` lower; with ``pack`` the same score:
    what kube-scheduler prefers by itself are the emptier ones.
    """
    return max(best & ~15, best - (0 if strategy is Strategy.PACK else SCORE_TOLERANCE))


# --- what is missing ------------------------------------------------------------------------------


class _Requirements(Struct, frozen=True, gc=False):
    """What a container asks of all machines that have the same when they are empty.

    Attributes:
        enforced: of each ask whether the container is refused where it is short, as shared CPU time
            is not.
        width: NUMA nodes that it gets at most; None for all of them. Under ``restricted`` as many
            as an empty machine needs where even the poorest are taken.
        texts: of each ask what is said where it is short, and of how many NUMA nodes; None where
            nothing is.
        joint_unfit: what is said where each is free, but not together.
        capacity_unfit: what an empty machine has too little of.
        is_unresolvable: that alone decides.
    """

    enforced: tuple[bool, ...]
    width: int | None
    texts: tuple[tuple[str, Unit, int] | None, ...]
    joint_unfit: Unfit
    capacity_unfit: Unfit | None
    is_unresolvable: bool = False

    def exceeds_sums(self, asks: Iterable[Any]) -> bool:
        """Whether sums alone say that no set of NUMA nodes will do, as it does on a full node."""
        return self.is_unresolvable or any(
            count and _max_sum_over_nodes(free, self.width) < least
            for count, (least, free, _) in zip(self.enforced, asks, strict=True)
        )

    def unfit_reason(self, asks: Iterable[Any]) -> Unfit:
        """The first resource that is short by itself, else that none fit together."""
        if self.capacity_unfit is not None:
            return self.capacity_unfit
        for text, (least, free, _) in zip(self.texts, asks, strict=True):
            if text is not None and (most := _max_sum_over_nodes(free, text[2])) < max(1, least):
                return Unfit(text[0], text[1], most)
        return self.joint_unfit


@lru_cache(maxsize=1024)
def _resolve_requirements(
    request: ContainerRequest, asked: tuple[tuple[int, AmountByPosition], ...]
) -> _Requirements:
    """What is asked, and what there is; one for all nodes that are built alike."""
    single = request.policy is Policy.SINGLE_NUMA_NODE
    restricted = request.policy is Policy.RESTRICTED
    strict = restricted and request.on_failure is not OnFailure.BEST_EFFORT
    never, whats, limit = None, [], "one NUMA node"
    texts: list[tuple[str, Unit, int] | None] = []
    for (name, unit), (least, capacity) in zip(
        _requested_resources_with_units(request), asked, strict=True
    ):
        texts.append(None)
        if unit is Unit.MILLI_CPUS and not request.shared_milli:
            continue
        what = _request_text(name, unit, least, request.exclusive_cpus)
        whats.append(what)
        need, width = f"needs {what}", len(capacity)
        if single or restricted:
            # As many as an empty machine would need.
            width = 1 if single else _required_node_count(capacity, least)
        if width == 1 or width < len(capacity):
            limit = "one NUMA node" if width == 1 else numa_node_count_text(width)
            need += f" on {limit}"
        texts[-1] = need, unit, width
        if never is None and (most := _max_sum_over_nodes(capacity, width)) < max(1, least):
            never = Unfit(need, unit, most, unresolvable=True)
    widths = [
        _required_node_count(capacity, least, poorest=True) for least, capacity in asked if strict
    ]
    together = " and ".join(whats) or "a place to run"
    found = _Requirements(
        enforced=tuple(
            [
                strict or unit is not Unit.MILLI_CPUS
                for _, unit in _requested_resources_with_units(request)
            ]
        ),
        width=max(widths, default=None),
        texts=tuple(texts),
        joint_unfit=Unfit(f"needs {together} on {limit}; each is free, but not together"),
        capacity_unfit=never,
    )
    empty = [(least, capacity, capacity) for least, capacity in asked]
    return replace(found, is_unresolvable=never is not None and found.exceeds_sums(empty))


def _required_node_count(capacity: AmountByPosition, least: int, *, poorest: bool = False) -> int:
    """How many NUMA nodes have enough when they are empty: the richest, or the poorest ones."""
    sums = accumulate(sorted([max(0, n) for n in capacity], reverse=not poorest))
    return next((n for n, have in enumerate(sums, 1) if have >= least), len(capacity))


def _requested_resources_with_units(request: ContainerRequest) -> list[tuple[str, Unit]]:
    """Name and unit of what it asks, as `_resource_rows` lists it."""
    units = [
        (name, Unit.DEVICES if EXTENDED_RESOURCE_MARK in name else Unit.BYTES)
        for name, _ in request.amounts
    ]
    return [("cpu", Unit.CPUS if request.exclusive_cpus else Unit.MILLI_CPUS), *units]


def _request_text(name: str, unit: Unit, amount: int, exclusive: int) -> str:
    """Amount requested of one resource: ``12 exclusive CPUs``."""
    if unit is not Unit.CPUS:
        noun = {Unit.DEVICES: f" {name}", Unit.BYTES: f" of {name}"}.get(unit, "")
        return unit.amount_text(amount) + noun
    idle = f" with idle siblings ({amount} CPUs)" if amount != exclusive else ""
    return count_text(exclusive, "exclusive CPU") + idle


def _max_sum_over_nodes(column: AmountByPosition, width: int | None) -> int:
    """The most that so many NUMA nodes have; None for all of them."""
    if width == 1:
        return max(0, *column)
    return sum([n for n in sorted(column, reverse=True)[:width] if n > 0])
