"""The fit of a pod on a node: its NUMA nodes, or the resource that is missing.

A container that fits on one NUMA node is placed on one under every policy; the strategy selects it
(`nri_numa.engine.place.computed.strategy_keys`). A wider container is aligned by
`nri_numa.engine.align.policies.align_demands`, as on the node. CPU numbers, which the node alone
knows, are replaced by counts: if free CPUs are scattered over cores, the node may still reject a
pod that fits here.

The cost is counted (`WorkBudget`). Containers beyond the work for one node are evaluated one by
one, by sums: that rejects no container that the node would admit, and the node decides.
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
)
from nri_numa.engine.place.computed import strategy_keys
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Unit, count_text, join_words
from nri_numa.model.workload import SMT, OnFailure, Policy, Scope, Strategy

STRICT_POLICIES: Final = (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
MAX_SCORE: Final = 10
"""MaxExtenderPriority of kube-scheduler; it checks nothing."""
SCORE_TOLERANCE: Final = 2
"""Score points, of the three for free resources, within which nodes count as equally good."""
BASE_WORK_PER_MERGE: Final = 10
"""Work of the smallest merge of hints; each 16 hints that are examined add one."""
MAX_NODE_WORK: Final = 2000
"""Work for one node, about 20 ms, after which its containers are evaluated by sums alone; enough
for 64 wide containers on eight NUMA nodes."""
_SCORE_KEY_WIDTH_BASE: Final = 128
"""Twice the NUMA nodes up to which fewer rank first; no machine on sale has so many."""


class WorkBudget:
    """The work of an evaluation: 1 for a container that sums decide, more for a merge of hints.

    A unit is about 10 µs (bench/extender.py).

    Attributes:
        done: work so far.
        limit: of a whole question; the nodes beyond it are evaluated by sums alone.
    """

    __slots__ = ("_until", "done", "limit")

    def __init__(self, limit: float = inf) -> None:
        self.done, self.limit = 0, limit
        self._until = limit

    @property
    def is_node_budget_spent(self) -> bool:
        """True if the next containers of this node are evaluated by sums alone."""
        return self.done >= self._until

    def begin_node(self) -> None:
        """Start the budget of another node."""
        self._until = min(self.limit, self.done + MAX_NODE_WORK)

    def add_merge(self, numa_nodes: int, search_steps: int) -> None:
        """Count a merge, which tries all sets of a few NUMA nodes, and searches among many."""
        hints = (
            1 << numa_nodes if numa_nodes <= EXACT_MERGE_MAX_NODES else search_steps * numa_nodes
        )
        self.done += BASE_WORK_PER_MERGE + hints // 16


class Fit(Struct, frozen=True, gc=False):
    """The pod fits.

    Attributes:
        request: of the pod, or of an equal one.
        assigned_nodes: placed containers in order, and the positions of their NUMA nodes.
        score_key: see `compute_score_key`; 0, the lowest, if nothing is aligned or the fit
            ``requires_moves``.
        requires_moves: movable containers have to move first, which the node decides.
        by_sums: some containers are not among ``assigned_nodes``: each fits by itself, and the node
            decides if all fit together.
    """

    room: NodeResources
    request: PodRequest
    assigned_nodes: tuple[tuple[ContainerRequest, Sequence[int]], ...] = ()
    score_key: int = 0
    requires_moves: bool = False
    by_sums: bool = False

    @property
    def numa_nodes(self) -> tuple[tuple[str, NUMASet], ...]:
        """NUMA nodes by container, in the order of their start."""
        ids, request = self.room.ids, self.request
        if not request.containers:
            return ()  # the kubelet chooses
        nodes_by_container = [
            (c.container, NUMASet(ids[position] for position in positions))
            for c, positions in self.assigned_nodes
        ]
        if request.pod_scope_request is None:
            return tuple(nodes_by_container)
        pod_nodes = nodes_by_container[0][1] if nodes_by_container else NUMASet()
        return tuple((c.container, pod_nodes) for c in request.containers)

    @property
    def pod_charge(self) -> ResourceCounts | None:
        """Resources that the pod takes; None if it takes no counted resource."""
        return self.room.charge_of_containers(self.assigned_nodes)

    @property
    def score(self) -> int:
        """Score of 0 to 10 for `prioritize`."""
        return self.score_key & 15


class Unfit(Struct, frozen=True, gc=False):
    """The pod does not fit: one class of reasons, and the best amount of this node.

    Attributes:
        need: the missing amount, such as ``needs 12 exclusive CPUs on one NUMA node``; the whole
            reason if there is no ``unit``.
        unit: of ``best_amount``.
        best_amount: largest amount free, or the capacity if ``unresolvable``.
        unresolvable: waiting does not help: an empty node has too little.
    """

    need: str
    unit: Unit | None = None
    best_amount: int = 0
    unresolvable: bool = False

    @property
    def reason_group(self) -> tuple[object, ...]:
        """Key that is equal for all reasons of one class."""
        return self.need, self.unresolvable

    def reason_text(self, max_amount: int) -> str:
        """Return the reason for a class of nodes; ``max_amount`` is the best of any of them."""
        unit = self.unit
        if unit is None:
            return self.need
        amount_text = unit.amount_text_without_cpu_noun(max_amount)
        if self.unresolvable:
            return f"{self.need}; an empty node has {amount_text}"
        return f"{self.need}; at most {amount_text} free{unit.use_text}"


Verdict = Fit | Unfit


def evaluate_fit(
    room: NodeResources,
    request: PodRequest,
    strategy: Strategy,
    evaluation_cost: WorkBudget | None = None,
) -> Verdict:
    """Evaluate a valid pod on a node's free resources, less those of its assumed pods.

    The cost is added to ``evaluation_cost``.
    """
    evaluation_cost = evaluation_cost or WorkBudget()
    evaluation_cost.begin_node()
    verdict = _evaluate_without_moves(room, request, strategy, evaluation_cost)
    if isinstance(verdict, Unfit) and room.exclusive_after_moves:
        moved_verdict = _evaluate_without_moves(
            room.with_exclusive_after_moves, request, strategy, evaluation_cost
        )
        # A movable container can make room only once.
        if isinstance(moved_verdict, Fit) and (
            moved_verdict.by_sums or [len(p) for _, p in moved_verdict.assigned_nodes] == [1]
        ):
            return replace(moved_verdict, room=room, score_key=0, requires_moves=True)
    return verdict


def _evaluate_without_moves(
    room: NodeResources, request: PodRequest, strategy: Strategy, work: WorkBudget
) -> Verdict:
    verdict: Verdict = Fit(room, request)
    if request.containers:
        verdict = _fit_all(
            room, request, request.plugin_aligned_requests, strategy, room.exclusive_limit, work
        )
        if isinstance(verdict, Unfit):
            return verdict
    if request.kubelet_aligned and room.policy is not Policy.NONE:
        kubelets: tuple[ContainerRequest, ...] = tuple(
            [_request_under_kubelet_policy(c, room) for c in request.kubelet_aligned]
        )
        if room.scope is Scope.POD and len(kubelets) > 1:
            kubelets = (peak_request(kubelets),)
        by_kubelet = _fit_all(room, request, kubelets, strategy, None, work)
        if isinstance(by_kubelet, Unfit) or not request.containers:
            return by_kubelet
        if by_kubelet.by_sums:
            return replace(verdict, by_sums=True)
    return verdict


def _request_under_kubelet_policy(
    request: ContainerRequest, room: NodeResources
) -> ContainerRequest:
    """Return a request as the kubelet of this node treats it."""
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
    max_exclusive: int | None,
    work: WorkBudget,
) -> Verdict:
    """Place containers in order; at most ``max_exclusive`` exclusive CPUs are free in all."""
    counts, width, misaligned, by_sums = room.free_counts, 0, False, False
    placements: list[tuple[ContainerRequest, Sequence[int]]] = []
    used: list[int] = []
    for container in containers:
        if container.amounts and EXTENDED_RESOURCE_MARK in container.amounts[-1][0]:
            # kube-scheduler counts extended resources that the node reports for no NUMA node.
            counted_amounts = [
                a
                for a in container.amounts
                if a[0] in room.capacity_by_resource or EXTENDED_RESOURCE_MARK not in a[0]
            ]
            container = replace(container, amounts=tuple(counted_amounts))
        work.done += 1
        by_sums = by_sums or work.is_node_budget_spent
        outcome = _select_nodes(
            room, room.free_counts if by_sums else counts, container, strategy, work
        )
        if isinstance(outcome, Unfit):
            if container.on_failure is not OnFailure.UNPINNED:
                return outcome
            misaligned = True
            continue
        if by_sums:
            continue
        positions, ideal = outcome
        used += positions
        width, misaligned = max(width, len(positions)), misaligned or not ideal
        placements.append((container, positions))
        if not container.is_init:
            counts = counts.with_container(
                container, room.cpus_with_idle_siblings(container), positions
            )
    if by_sums:
        return Fit(room, request, tuple(placements), by_sums=True)
    if not used:
        return Fit(room, request)
    if (
        max_exclusive is not None
        and (cpus := sum(room.free_counts.exclusive) - sum(counts.exclusive)) > max_exclusive
    ):
        return Unfit(f"needs {count_text(cpus, 'exclusive CPU')}", Unit.CPUS, max_exclusive)
    # Free thousandths afterwards of CPU time or memory, the lowest of all NUMA nodes used.
    min_permille, factor = 1000, 1000
    memory, capacity = (
        counts.other_resources.get("memory"),
        room.capacity_by_resource.get("memory", ()),
    )
    for i in used:
        cpu_milli, memory_bytes = room.cpu.capacity[i], capacity[i] if memory else 0
        permille = 1000 * counts.milli[i] // cpu_milli if cpu_milli else 1000 if memory_bytes else 0
        if memory and memory_bytes:
            permille = min(permille, 1000 * memory[i] // memory_bytes)
        min_permille, factor = min(min_permille, max(0, permille)), min(factor, room.factor[i])
    return Fit(
        room,
        request,
        tuple(placements),
        compute_score_key(width, misaligned, min_permille, factor, strategy),
    )


def _resource_rows(
    room: NodeResources, counts: ResourceCounts, request: ContainerRequest, cpus: int
) -> list[Any]:
    """Return amount, free amounts and capacities of each requested resource: CPUs first."""
    rows: list[tuple[int, AmountByPosition, AmountByPosition]]
    if request.exclusive_cpus:
        rows = [(cpus, counts.exclusive, room.exclusive.capacity)]
    else:
        rows = [(max(1, request.shared_milli), counts.milli, room.cpu.capacity)]
    for name, amount in request.amounts:
        if name in counts.other_resources:
            rows.append((amount, counts.other_resources[name], room.capacity_by_resource[name]))
        else:
            zeros = (0,) * len(room.ids)
            rows.append((amount, zeros, zeros))
    return rows


def _select_nodes(
    room: NodeResources,
    counts: ResourceCounts,
    request: ContainerRequest,
    strategy: Strategy,
    work: WorkBudget,
) -> tuple[Sequence[int], bool] | Unfit:
    """Select the positions of one container's NUMA nodes, the best first; and if they are ideal.

    No positions if the work is spent: the sums then allow some set of NUMA nodes.
    """
    if request.smt is SMT.FULL_CORE and request.exclusive_cpus % room.threads_per_core:
        cpus, threads = (
            count_text(request.exclusive_cpus, "exclusive CPU"),
            count_text(room.threads_per_core, "thread"),
        )
        return Unfit(f"needs {cpus} in whole cores of {threads}", unresolvable=True)
    rows = _resource_rows(room, counts, request, room.cpus_with_idle_siblings(request))
    fitting: Sequence[int] = range(len(room.ids))
    for amount, column, _ in rows:
        fitting = [position for position in fitting if column[position] >= amount]
    if len(fitting) > 1:
        fitting = (min(_rank_by_strategy(rows, fitting, strategy))[1],)
    if fitting:
        return fitting, True
    demand = _resolve_requirements(
        request, tuple([(amount, capacity) for amount, _, capacity in rows])
    )
    single = request.policy is Policy.SINGLE_NUMA_NODE
    if (single and request.on_failure is not OnFailure.BEST_EFFORT) or demand.exceeds_sums(rows):
        return demand.unfit_reason(rows)
    return (
        ((), False)
        if work.is_node_budget_spent
        else _align_nodes(room, request, rows, strategy, demand, work)
    )


def _rank_by_strategy(
    rows: list[Any], positions: Sequence[int], strategy: Strategy
) -> Iterable[tuple[tuple[int, ...], int]]:
    """Return positions with the engine's ranking keys; the lowest is tried first."""
    # A column is indexed by position as a mapping is by NUMA node.
    return zip(strategy_keys(rows, tuple(positions), strategy), positions, strict=True)


def _align_nodes(
    room: NodeResources,
    request: ContainerRequest,
    rows: list[Any],
    strategy: Strategy,
    demand: _Requirements,
    work: WorkBudget,
) -> tuple[Sequence[int], bool] | Unfit:
    """Align a container that fits on no single NUMA node, as the node's Topology Manager does."""
    ids = room.ids
    order = [position for _, position in sorted(_rank_by_strategy(rows, range(len(ids)), strategy))]
    demands = [
        ResourceDemand(
            resource=name,
            need=amount,
            capacity=dict(zip(ids, capacity, strict=True)),
            free_amounts=dict(zip(ids, column, strict=True)),
            joint_key="memory" if unit is Unit.BYTES else None,
            unit=unit,
        )
        for (name, unit), (amount, column, capacity) in zip(
            _requested_resources_with_units(request), rows, strict=True
        )
    ]
    problem = AlignmentRequest(
        demands=tuple(demands),
        numa_ids=NUMASet(ids),
        policy=Policy.BEST_EFFORT if request.policy is Policy.NONE else request.policy,
        distance=room.distance,
        rank={ids[position]: rank for rank, position in enumerate(order)},
        one_width=True,
    )
    distances = room.sums_of_distances
    alignment, policy = align_demands(problem, distances), problem.policy
    work.add_merge(len(ids), alignment.search_steps)
    ideal = alignment.preferred
    if not alignment.admitted:
        if request.on_failure is not OnFailure.BEST_EFFORT:
            return demand.unfit_reason(rows)
        policy, ideal = Policy.BEST_EFFORT, False
        alignment = align_demands(replace(problem, policy=policy), distances)
        work.add_merge(len(ids), alignment.search_steps)
    all_nodes = range(len(ids))
    positions = all_nodes if alignment.affinity is None else room.positions_of(alignment.affinity)
    for (_, unit), (amount, column, _) in zip(
        _requested_resources_with_units(request), rows, strict=True
    ):
        # CPU time is shared: a shortage slows the container, and rejects nothing.
        if unit is Unit.MILLI_CPUS or sum(column[position] for position in positions) >= amount:
            continue
        if policy in STRICT_POLICIES or sum(column) < amount:
            return demand.unfit_reason(rows)
        positions, ideal = all_nodes, False
    return [position for position in order if position in positions], ideal


def compute_score_key(
    width: int, misaligned: bool, free_permille: int, factor: int, strategy: Strategy
) -> int:
    """Compute the key that nodes are ranked by: fewer NUMA nodes first, then the score.

    The score, in the lowest four bits, is 0 to 10: six points for one NUMA node and two less for
    each more, one less if an empty machine would need fewer; up to three for NUMA nodes that are
    full afterwards (``pack``) or empty (otherwise); one for NUMA nodes with their whole capacity.

    Args:
        width: NUMA nodes of the widest container.
        misaligned: on more NUMA nodes than an empty machine would need, or not pinned.
        free_permille: free thousandths of the scarcest resource on its NUMA nodes afterwards.
        factor: lowest capacity factor of these, in thousandths.
        strategy: of the configuration.
    """
    width_points = max(0, 6 - 2 * (width - 1) - misaligned)
    room = 1000 - free_permille if strategy is Strategy.PACK else free_permille
    width_rank = max(0, _SCORE_KEY_WIDTH_BASE - 2 * width - misaligned)
    return width_rank << 4 | min(MAX_SCORE, (1000 * width_points + 3 * room + factor + 500) // 1000)


def min_near_best_score_key(best_key: int, strategy: Strategy) -> int:
    """Return the lowest score key that counts as equal to the best one.

    It has as many NUMA nodes and a score at most `SCORE_TOLERANCE` lower; with ``pack`` the same
    score, because kube-scheduler by itself prefers emptier nodes.
    """
    return max(best_key & ~15, best_key - (0 if strategy is Strategy.PACK else SCORE_TOLERANCE))


# --- what is missing ------------------------------------------------------------------------------


class _Requirements(Struct, frozen=True, gc=False):
    """A container's requirements on all machines with the same capacity.

    Attributes:
        enforced: of each row, True if a shortage rejects the container; shared CPU time does not.
        width: maximum NUMA nodes; None for all of them. Under ``restricted`` as many as an empty
            machine needs even if the smallest NUMA nodes are used.
        texts: of each row the need, its unit and its NUMA nodes; None if it is never named.
        joint_unfit: each resource is free by itself, but not together.
        capacity_unfit: the resource that an empty machine has too little of.
        is_unresolvable: sums of the capacity already rule it out.
    """

    enforced: tuple[bool, ...]
    width: int | None
    texts: tuple[tuple[str, Unit, int] | None, ...]
    joint_unfit: Unfit
    capacity_unfit: Unfit | None
    is_unresolvable: bool = False

    def exceeds_sums(self, rows: Iterable[Any]) -> bool:
        """Return True if sums alone rule out every set of NUMA nodes, as on a full node."""
        return self.is_unresolvable or any(
            count and _max_sum_over_nodes(column, self.width) < amount
            for count, (amount, column, _) in zip(self.enforced, rows, strict=True)
        )

    def unfit_reason(self, rows: Iterable[Any]) -> Unfit:
        """Return the first resource that is short by itself, else the joint reason."""
        if self.capacity_unfit is not None:
            return self.capacity_unfit
        for text, (amount, column, _) in zip(self.texts, rows, strict=True):
            if text is not None and (total := _max_sum_over_nodes(column, text[2])) < max(
                1, amount
            ):
                return Unfit(text[0], text[1], total)
        return self.joint_unfit


@lru_cache(maxsize=1024)
def _resolve_requirements(
    request: ContainerRequest, capacity_rows: tuple[tuple[int, AmountByPosition], ...]
) -> _Requirements:
    """Resolve the requirements from amounts and capacities, once for all nodes built alike."""
    single = request.policy is Policy.SINGLE_NUMA_NODE
    restricted = request.policy is Policy.RESTRICTED
    strict = restricted and request.on_failure is not OnFailure.BEST_EFFORT
    unfit, request_texts, limit = None, [], "one NUMA node"
    texts: list[tuple[str, Unit, int] | None] = []
    for (name, unit), (amount, capacity) in zip(
        _requested_resources_with_units(request), capacity_rows, strict=True
    ):
        texts.append(None)
        if unit is Unit.MILLI_CPUS and not request.shared_milli:
            continue
        request_text = _request_text(name, unit, amount, request.exclusive_cpus)
        request_texts.append(request_text)
        need, width = f"needs {request_text}", len(capacity)
        if single or restricted:
            # As many NUMA nodes as an empty machine would need.
            width = 1 if single else _required_node_count(capacity, amount)
        if width == 1 or width < len(capacity):
            limit = "one NUMA node" if width == 1 else count_text(width, "NUMA node")
            need += f" on {limit}"
        texts[-1] = need, unit, width
        if unfit is None and (total := _max_sum_over_nodes(capacity, width)) < max(1, amount):
            unfit = Unfit(need, unit, total, unresolvable=True)
    widths = [
        _required_node_count(capacity, amount, poorest=True)
        for amount, capacity in capacity_rows
        if strict
    ]
    joint_text = join_words(request_texts) or "a CPU"
    requirements = _Requirements(
        enforced=tuple(
            [
                strict or unit is not Unit.MILLI_CPUS
                for _, unit in _requested_resources_with_units(request)
            ]
        ),
        width=max(widths, default=None),
        texts=tuple(texts),
        joint_unfit=Unfit(f"needs {joint_text} on {limit}; each is free, but not together"),
        capacity_unfit=unfit,
    )
    empty = [(amount, capacity, capacity) for amount, capacity in capacity_rows]
    return replace(
        requirements,
        is_unresolvable=unfit is not None and requirements.exceeds_sums(empty),
    )


def _required_node_count(capacity: AmountByPosition, amount: int, *, poorest: bool = False) -> int:
    """Count the empty NUMA nodes that have the amount together: the largest, or the smallest."""
    sums = accumulate(sorted([max(0, n) for n in capacity], reverse=not poorest))
    return next((n for n, total in enumerate(sums, 1) if total >= amount), len(capacity))


def _requested_resources_with_units(request: ContainerRequest) -> list[tuple[str, Unit]]:
    """Return name and unit of each requested resource, in the order of `_resource_rows`."""
    units = [
        (name, Unit.DEVICES if EXTENDED_RESOURCE_MARK in name else Unit.BYTES)
        for name, _ in request.amounts
    ]
    return [("cpu", Unit.CPUS if request.exclusive_cpus else Unit.MILLI_CPUS), *units]


def _request_text(name: str, unit: Unit, amount: int, exclusive: int) -> str:
    """Return the text of a requested amount: ``12 exclusive CPUs``."""
    if unit is not Unit.CPUS:
        noun = {Unit.DEVICES: f" {name}", Unit.BYTES: f" of {name}"}.get(unit, "")
        return unit.amount_text(amount) + noun
    idle_text = f" with idle siblings ({amount} CPUs)" if amount != exclusive else ""
    return count_text(exclusive, "exclusive CPU") + idle_text


def _max_sum_over_nodes(column: AmountByPosition, width: int | None) -> int:
    """Sum the largest amounts of ``width`` NUMA nodes; None for all of them."""
    if width == 1:
        return max(0, *column)
    return sum([n for n in sorted(column, reverse=True)[:width] if n > 0])
