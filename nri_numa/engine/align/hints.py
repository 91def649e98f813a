"""Which NUMA masks suit each resource, and the one that suits them all: hints and their merge.

A *hint provider* states the facts of one resource: how much is needed, what each NUMA node could
give when empty (capacity) and what it can give now (free). It stands for a list of the kubelet's
*hints* without spelling the list out: a mask of NUMA nodes is a hint when it covers the need with
what is free, and a *preferred* one when it is also no wider than an empty machine would have
required.

The two kinds of empty answer of the kubelet's hint providers stay apart everywhere:

* *none* (a nil list): any placement suits; one hint without mask, preferred;
* *impossible* (an empty list): nothing suits; one hint without mask, not preferred.

The merge is the kubelet's: take one hint of each list in every possible way, intersect the masks,
call the result preferred when all hints are and all masks are equal, drop empty ones, and keep the
best. The best is the smallest by a total order (w width, d distance, t tie-break; *bnp*, the width
of the neediest list's narrowest mask):

===============================  ==================
result                           key
===============================  ==================
preferred (before all others)    (w, d, t)
not preferred, w = bnp           (0, 0, d, t)
not preferred, w < bnp           (1, -w, d, t)
not preferred, w > bnp           (2, w, d, t)
===============================  ==================

Up to `EXACT_MERGE_MAX_NODES` NUMA nodes every mask is looked at. Beyond, one search of bounded work
finds preferred results, and in place of the others the narrowest mask that has room for everything;
see docs/adr/0004-hint-merge.md. Masks are plain integers here, bit *i* for NUMA node *i*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations, compress, groupby
from operator import mul
from typing import NamedTuple, Protocol, Self, runtime_checkable

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet, ids_of
from nri_numa.model.machine import Unit, numa_text
from nri_numa.model.workload import DeviceRequest

EXACT_MERGE_MAX_NODES = 10
"""Up to this many NUMA nodes a merge is the kubelet's without exception."""

SEARCH_STEP_LIMIT = 400
"""NUMA nodes that one merge on a larger machine tries; the worst one takes milliseconds."""

_MIN_SEARCH_STEPS = 64  # steps any search gets: enough to walk straight to a mask on 64 NUMA nodes

AmountsByNode = Mapping[int, int]
"""Quantity by NUMA node; missing is none."""


def all_numa_masks(machine: int) -> list[int]:
    """Every set of the machine's NUMA nodes, by its index: bit *k* of it is the *k*-th of them."""
    masks = [0]
    for i in ids_of(machine):
        masks += [m | 1 << i for m in masks]
    return masks


def add_attached_to_cpu_nodes(
    attached: Mapping[int, NUMASet], amounts: AmountsByNode
) -> AmountsByNode:
    """Amounts by NUMA node with CPUs, each with what is attached to it."""
    if not attached:
        return amounts
    totals = {i: amount for i, amount in amounts.items() if i not in attached}
    for i, served in attached.items():
        for home in served:
            totals[home] = totals.get(home, 0) + max(0, amounts.get(i, 0))
    return totals


def _mask_of_nodes(numa_nodes: Iterable[int]) -> int:
    bits = 0
    for i in numa_nodes:
        if i >= 0:
            bits |= 1 << i
    return bits


# --- the search for a mask ------------------------------------------------------------------------


class SearchBudget:
    """The work of one merge on a large machine, and whether it sufficed (``exact``)."""

    __slots__ = ("exact", "used")

    def __init__(self) -> None:
        self.used = 0
        self.exact = True

    def next_search_step_limit(self) -> int:
        """Up to which count one search may go: half of what is left, so that none starves.

        Twice the limit and one such search is the most that a merge can take.
        """
        units = SEARCH_STEP_LIMIT - self.used
        return self.used + (max(units // 2, _MIN_SEARCH_STEPS) if units > -SEARCH_STEP_LIMIT else 0)


class MaskOrder:
    """The tie-break between masks of the same width and distance; smaller is better.

    Without ranks it is the mask's integer value, as in the kubelet: of two masks the one without
    the highest NUMA node in which they differ. With ranks it is the sorted tuple of the ranks of
    its NUMA nodes: of two masks the one with the best-ranked NUMA node in which they differ.
    NUMA nodes of equal rank, and those without one, are ordered by their number.
    """

    __slots__ = ("_place", "by_value", "nodes")

    def __init__(self, numa_nodes: Iterable[int], rank: Mapping[int, int] | None = None) -> None:
        self.by_value = rank is None
        self.nodes = sorted(numa_nodes)
        if rank is not None:
            last_rank = max(rank.values(), default=0) + 1
            # Order: rank, then number.
            self.nodes.sort(key={**dict.fromkeys(self.nodes, last_rank), **rank}.__getitem__)
        self._place = {i: position for position, i in enumerate(self.nodes)}

    def sort_key(self, mask: int) -> tuple[int, ...]:
        """Sort key; only to be compared between masks of one width."""
        positions = [self._place[i] for i in ids_of(mask)]
        positions.sort(reverse=self.by_value)
        return tuple(positions)

    def nodes_of(self, mask: int) -> list[int]:
        """The NUMA nodes of a mask, in order."""
        return [i for i in self.nodes if mask >> i & 1]


class DistanceSums:
    """Sums of SLIT distances, read once and only where needed; good for all merges of a machine.

    The kubelet compares averages over all ordered pairs of a mask, each node with itself included.
    Among masks of one width the sums order the same way and are exact.
    """

    __slots__ = ("_apart", "_between", "_distance", "_totals")

    def __init__(self, distance: Callable[[int, int], int]) -> None:
        self._distance = distance
        self._between: dict[tuple[int, int], int] = {}
        self._apart: dict[int, int] = {}
        self._totals: dict[int, int] = {}

    def self_distance(self, i: int) -> int:
        """Distance of a NUMA node to itself."""
        return self._distance(i, i)

    def round_trip(self, i: int, j: int) -> int:
        """Distance there and back (firmware may tell different ones); to itself once."""
        value = self._between.get((i, j))
        if value is None:
            value = self._distance(i, j) + (self._distance(j, i) if i != j else 0)
            self._between[i, j] = self._between[j, i] = value
        return value

    def min_distance(self, nodes: Sequence[int]) -> int:
        """The least distance there and back between two of some NUMA nodes."""
        mask = _mask_of_nodes(nodes)
        if mask not in self._apart:
            pairs = [self.round_trip(i, j) for i, j in combinations(nodes, 2)]
            self._apart[mask] = min(pairs, default=0)
        return self._apart[mask]

    def added_distance(self, mask: int, i: int) -> int:
        """Distance that one NUMA node adds to the total of a mask without it."""
        return self.round_trip(i, i) + sum(self.round_trip(i, j) for j in ids_of(mask))

    def total_distance(self, mask: int) -> int:
        """Sum over all ordered pairs of the mask."""
        total = self._totals.get(mask)
        if total is None:
            members = list(ids_of(mask))
            pairs = [self.round_trip(i, j) for i, j in combinations(members, 2)]
            total = sum(pairs) + sum([self.round_trip(i, i) for i in members])
            if not mask >> EXACT_MERGE_MAX_NODES:  # so many at most, whatever the machine has
                self._totals[mask] = total
        return total


class ResourceNeed(msgspec.Struct, frozen=True):
    """One amount that a mask must have.

    Attributes:
        amounts: by NUMA node, what it has by itself; positive ones.
        parts: masks and amounts, where some count for several NUMA nodes and once for a mask that
            holds any of these: a device on two of them, memory that serves two. Else None.
    """

    need: int
    amounts: AmountsByNode
    parts: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of_parts(cls, need: int, parts: Sequence[tuple[int, int]]) -> ResourceNeed:
        """A quantity whose parts belong to one or several NUMA nodes."""
        amounts: dict[int, int] = {}
        has_joint_parts = False
        for nodes, amount in parts:
            has_joint_parts = has_joint_parts or bool(nodes & (nodes - 1))
            for i in ids_of(nodes):
                amounts[i] = amounts.get(i, 0) + amount
        return cls(need, amounts, tuple(parts) if has_joint_parts else None)

    def amount_in(self, mask: int) -> int:
        """Amount on a mask."""
        if self.parts is not None:
            return sum([amount for nodes, amount in self.parts if nodes & mask])
        return sum([amount for i, amount in self.amounts.items() if mask >> i & 1])

    def sufficient_nodes(self) -> int:
        """The NUMA nodes that have enough by themselves."""
        need, mask = self.need, 0
        for i, amount in self.amounts.items():
            if amount >= need:
                mask |= 1 << i
        return mask


class MaskRequirement(msgspec.Struct, frozen=True, kw_only=True):
    """The NUMA nodes that a mask may and must have, the amounts it must have, and the rest."""

    allowed_mask: int
    quantities: tuple[ResourceNeed, ...]
    required: int = 0
    accept: Callable[[int], bool] | None = None

    def satisfied_by(self, mask: int) -> bool:
        """Say whether a mask within has everything."""
        for q in self.quantities:
            if q.amount_in(mask) < q.need:
                return False
        return self._is_acceptable(mask)

    def _is_acceptable(self, mask: int) -> bool:
        return not self.required & ~mask and (self.accept is None or self.accept(mask))

    def min_width(self) -> int:
        """A width below which no mask can do: for each quantity, the number of largest parts."""
        min_width = max(1, self.required.bit_count())
        for q in self.quantities:
            amount_sum = width = 0
            for amount in sorted(
                (a for i, a in q.amounts.items() if self.allowed_mask >> i & 1), reverse=True
            ):
                if amount_sum >= q.need:
                    break
                amount_sum += amount
                width += 1
            if amount_sum < q.need:
                return self.allowed_mask.bit_count() + 1
            min_width = max(min_width, width)
        return min_width

    def best_mask_of_width(
        self, width: int, order: MaskOrder, distances: DistanceSums | None, budget: SearchBudget
    ) -> int | None:
        """The best mask of exactly ``width`` NUMA nodes; None when there is none.

        Order: least distance first (with ``distances``), then ``order``.
        """
        if len(order.nodes) > EXACT_MERGE_MAX_NODES:
            nodes = order.nodes_of(self.allowed_mask & ~self.required)
            choose = width - self.required.bit_count()
            return self._search_mask(nodes, choose, distances, budget)
        masks = [
            m for m in self._sufficient_masks() if m.bit_count() == width and self._is_acceptable(m)
        ]
        return select_mask(masks, order, distances) if masks else None

    def narrowest_mask(
        self,
        order: MaskOrder,
        distances: DistanceSums | None,
        budget: SearchBudget,
        min_width: int = 1,
    ) -> int | None:
        """The best of the masks of the least width."""
        if len(order.nodes) <= EXACT_MERGE_MAX_NODES:
            sufficient_masks = sorted(self._sufficient_masks(), key=int.bit_count)
            for _, masks in groupby(sufficient_masks, key=int.bit_count):
                suiting = [m for m in masks if self._is_acceptable(m)]
                if suiting:
                    return select_mask(suiting, order, distances)
            return None
        for width in range(max(min_width, self.min_width()), self.allowed_mask.bit_count() + 1):
            mask = self.best_mask_of_width(width, order, distances, budget)
            if mask is not None:
                return mask
            if budget.used > SEARCH_STEP_LIMIT:
                break
        has_mask = self.allowed_mask and self.satisfied_by(self.allowed_mask)
        return self.allowed_mask if has_mask else None

    def satisfying_masks(self) -> list[int]:
        """Every mask that has everything, on a machine with few NUMA nodes."""
        return [m for m in self._sufficient_masks() if self._is_acceptable(m)]

    def _sufficient_masks(self) -> list[int]:
        """Every mask that has enough, all of them counted at once."""
        masks = all_numa_masks(self.allowed_mask)
        flags = [True] * len(masks)
        for q in self.quantities:
            sums = [0]
            if q.parts is None:
                for i in ids_of(self.allowed_mask):
                    amount = q.amounts.get(i, 0)
                    sums += [total + amount for total in sums]
            else:
                sums = [q.amount_in(m) for m in masks]
            need = q.need
            flags = [flag and total >= need for flag, total in zip(flags, sums, strict=True)]
        return [m for m in compress(masks, flags) if m]

    def _search_mask(  # noqa: C901 - mathematics, held to an oracle
        self, nodes: list[int], choose: int, distances: DistanceSums | None, budget: SearchBudget
    ) -> int | None:
        """Search a close mask on a machine with too many masks to examine each.

        Grow masks by the NUMA node nearest to them, the first of the order among equals, and drop a
        branch that can no longer hold enough or be closer than the best.
        """
        weights = [q.amounts for q in self.quantities]
        lacks = [q.need - q.amount_in(self.required) for q in self.quantities]
        limit = budget.next_search_step_limit()
        best_mask: int | None = None
        best_sum = 0
        pair_sum = distances.min_distance(nodes) if distances else 0

        def extend_mask(
            rest_nodes: list[int],
            choose: int,
            mask: int,
            lacks: list[int],
            mask_sum: int,
            node_sums: AmountsByNode,
        ) -> None:
            nonlocal best_mask, best_sum
            if not choose:
                if self.satisfied_by(mask):
                    best_mask, best_sum = mask, mask_sum
                return
            for lack, w in zip(lacks, weights, strict=True):
                if lack > 0 and lack > sum(sorted([w.get(i, 0) for i in rest_nodes])[-choose:]):
                    return
            if distances is not None:
                rest_nodes = sorted(rest_nodes, key=node_sums.__getitem__)  # stable: by the order
            for n, i in enumerate(rest_nodes[: len(rest_nodes) - choose + 1]):
                if best_mask is not None:
                    # What the nearest of the rest add, were they as near to one another as any.
                    min_sum = sum([node_sums[j] for j in rest_nodes[n : n + choose]])
                    if mask_sum + min_sum + pair_sum * choose * (choose - 1) // 2 >= best_sum:
                        return
                if budget.used >= limit:
                    budget.exact = False
                    return
                budget.used += 1
                next_nodes = rest_nodes[n + 1 :]
                next_lacks = [lack - w.get(i, 0) for lack, w in zip(lacks, weights, strict=True)]
                next_sums = node_sums
                if distances is not None:
                    next_sums = {j: node_sums[j] + distances.round_trip(i, j) for j in next_nodes}
                next_sum = mask_sum + node_sums[i]
                extend_mask(next_nodes, choose - 1, mask | 1 << i, next_lacks, next_sum, next_sums)

        sums = {i: distances.added_distance(self.required, i) if distances else 0 for i in nodes}
        if choose >= 0 and not self.required & ~self.allowed_mask:
            extend_mask(nodes, choose, self.required, lacks, 0, sums)
        return best_mask


def select_mask(masks: Sequence[int], order: MaskOrder, distances: DistanceSums | None) -> int:
    """The best of some masks of one width: least distance, then the tie-break."""
    if distances is not None and len(masks) > 1:
        totals = [distances.total_distance(m) for m in masks]
        min_distance = min(totals)
        masks = [m for m, total in zip(masks, totals, strict=True) if total == min_distance]
    return masks[0] if len(masks) == 1 else min(masks, key=order.sort_key)


# --- hints ----------------------------------------------------------------------------------------


class Hint(msgspec.Struct, frozen=True):
    """One hint: the NUMA nodes to use, and whether an empty machine would allow no narrower."""

    affinity: NUMASet = msgspec.field(name="numaNodes")
    preferred: bool


@dataclass(slots=True, eq=False)
class Hints:
    """The hints of one demand, or the one list that several demands share.

    Nearly every list is *upward closed*: with a mask it has every wider one, because needs are met
    by sums. The exceptions are the memory groups of the kubelet.

    Attributes:
        single_node_mask: NUMA nodes that are a mask of one.
        groups: group rule, NUMA node with assignments to its group's mask; None without the rule.
        sockets: with ``align-by-socket``, one mask for each socket.
        nil: there is a hint without mask: True preferred, False not preferred; None none.
    """

    universe: int = 0
    quantities: tuple[ResourceNeed, ...] = ()
    required: int = 0
    single_node_mask: int = 0
    groups: Mapping[int, int] | None = None
    sockets: tuple[int, ...] = ()
    nil: bool | None = None
    width: int = 0

    @property
    def max_preferred_sockets(self) -> int:
        """Number of sockets a preferred mask may touch; 0 without that rule.

        The kubelet divides the machine's counts; fewer NUMA nodes than sockets switches it off.
        """
        per_socket = self.universe.bit_count() // len(self.sockets) if self.sockets else 0
        return -(-self.width // per_socket) if per_socket else 0

    def contains_mask(self, mask: int) -> bool:
        """Say whether the mask is a hint, preferred or not."""
        if self.nil is not None or not mask or mask & ~self.universe or self.required & ~mask:
            return False
        return self.allows_mask_by_group_rule(mask) and all(
            q.amount_in(mask) >= q.need for q in self.quantities
        )

    def allows_mask_by_group_rule(self, mask: int) -> bool:
        """Say whether the group rule lets the mask be one."""
        if self.groups is None:
            return True
        if not mask & (mask - 1):
            return bool(mask & self.single_node_mask)
        return all(group == mask for i, group in self.groups.items() if mask >> i & 1)

    def prefers_width(self, mask: int) -> bool:
        """Say whether a hint of this mask would be preferred."""
        if mask.bit_count() == self.width:
            return True
        aligned = self.max_preferred_sockets
        return bool(aligned) and aligned == sum(1 for s in self.sockets if s & mask)

    def prefers_mask(self, mask: int) -> bool:
        """Say whether the mask is a preferred hint."""
        return self.prefers_width(mask) and self.contains_mask(mask)

    def mask_requirement(self) -> MaskRequirement:
        """Requirement for a mask to be a hint."""
        return MaskRequirement(
            allowed_mask=self.universe,
            quantities=self.quantities,
            required=self.required,
            accept=None if self.groups is None else self.allows_mask_by_group_rule,
        )

    def has_mask(self) -> bool:
        """Say whether there is any hint with a mask."""
        if self.single_node_mask or self.groups is None:
            return bool(self.single_node_mask) or self.contains_mask(self.universe)
        ungrouped = self.universe & ~_mask_of_nodes(self.groups)
        return any(map(self.contains_mask, [ungrouped, *self.groups.values()]))


class NodeAmount(msgspec.Struct, frozen=True, rename="camel"):
    """The amount of a resource on one NUMA node: free, and on an empty machine."""

    numa_node: int
    free: int
    capacity: int
    is_sufficient: bool = msgspec.field(name="sufficient")


class ObstacleKind(IntEnum):
    """Kinds of obstacles, in the order in which an alignment reports them."""

    CAPACITY = 0
    FREE_AMOUNT = 1
    DEVICES = 2
    SPREAD = 3


class Obstacle(NamedTuple):
    """The reason why no mask suits a resource; the text ends a clause."""

    kind: ObstacleKind
    text: str


@runtime_checkable
class HintProvider(Protocol):
    """One resource of a request: its hints, and the amounts that explain them.

    The kubelet's ``HintProvider`` (``pkg/kubelet/cm/topologymanager``) without ``Allocate``, which
    is the business of `nri_numa.engine.place`.
    """

    @property
    def resource(self) -> str:
        """Name of the resource: ``cpu``, ``hugepages-2Mi``, ``example.com/gpu``."""

    @property
    def need(self) -> int:
        """Amount needed; without a positive one any placement suits."""

    @property
    def amount_unit(self) -> Unit:
        """Unit of all amounts, for texts."""

    @property
    def joint_key(self) -> str | None:
        """Key of the providers, all of one class, that share a list of hints; None shares none."""

    def topology_hints(
        self, machine: int, joint_providers: Sequence[Self], budget: SearchBudget
    ) -> Hints:
        """The hints on a machine's NUMA nodes, the same list for all of ``joint_providers``."""

    def amounts_by_node(self, numa_ids: NUMASet) -> list[NodeAmount]:
        """Amount by NUMA node, for texts."""

    def max_amount_on(self, numa_ids: NUMASet, width: int, *, empty: bool) -> int | None:
        """Amount that the richest ``width`` of some NUMA nodes have, now or on an empty machine.

        None where the amounts of NUMA nodes do not add up.
        """

    def confined_to(self, numa_nodes: NUMASet) -> Self:
        """Return the provider with hints near listed memory; itself where that changes nothing."""

    def no_hint_text(self) -> str:
        """Say, as the end of a clause, why any placement suits although something is needed."""

    def find_obstacle(self, amounts: Sequence[NodeAmount]) -> Obstacle:
        """Say why no mask suits."""


class ResourceDemand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A need for a quantity that NUMA nodes add up to: CPUs, memory, huge pages.

    Attributes:
        capacity: by NUMA node, what an empty machine has; masks are made of these NUMA nodes.
        free_amounts: by NUMA node, what is free now plus what the container may reuse; negative
            ones mean none.
        required: NUMA nodes that must lie in every mask, because the container holds or reuses
            something there.
        sockets: NUMA node to socket; given, masks that touch as few sockets as the narrowest mask
            would are preferred too (the kubelet's ``align-by-socket``).
        groups: NUMA node to the group it is bound to, the kubelet's memory cells; None for no
            group rule. With it a node of a larger group is no mask of its own, and a wider mask
            may hold a node with assignments only if it is that node's group.
        joint_key: demands with the same key are judged together: a mask suits all or none of them,
            and they have one preferred width, as the memory types of the kubelet do.
        unit: for texts; None is `Unit.BYTES` for memory and huge pages and `Unit.NUMBER` for the
            rest.
        assigned: NUMA nodes with assignments, for the group rule.
        attached: NUMA nodes in ``capacity`` that are no part of masks themselves (memory without
            CPUs) to those that they serve: they count for a mask that holds any of these.
        confinement: the NUMA nodes near listed memory that ``free_amounts`` was cut down to, if it
            was.
        empty_is_nil: when no mask suits, answer *none* instead of *impossible*. The
            kubelet's memory manager does, and fails at allocation.
    """

    resource: str
    need: int
    capacity: Mapping[int, int]
    free_amounts: Mapping[int, int]
    required: NUMASet = NO_NUMA_NODES
    sockets: Mapping[int, int] | None = None
    groups: Mapping[int, NUMASet] | None = None
    assigned: NUMASet = NO_NUMA_NODES
    attached: Mapping[int, NUMASet] = msgspec.field(default_factory=dict)
    joint_key: str | None = None
    empty_is_nil: bool = False
    unit: Unit | None = None
    confinement: NUMASet = NO_NUMA_NODES

    @property
    def amount_unit(self) -> Unit:
        """Unit of all amounts."""
        if self.unit is not None:
            return self.unit
        return Unit.BYTES if self.resource.startswith(("memory", "hugepages")) else Unit.NUMBER

    def resource_need(self, amounts: AmountsByNode, universe: int) -> ResourceNeed:
        """The need against some amounts."""
        own_amounts = {i: v for i, v in amounts.items() if v > 0 and i >= 0 and universe >> i & 1}
        if not self.attached:
            return ResourceNeed(self.need, own_amounts)
        parts = [(1 << i, amount) for i, amount in own_amounts.items()]
        for i, served in self.attached.items():
            if (amount := amounts.get(i, 0)) > 0 and (mask := served.bits & universe):
                parts.append((mask, amount))
        return ResourceNeed.of_parts(self.need, parts)

    def topology_hints(
        self, machine: int, joint_providers: Sequence[ResourceDemand], budget: SearchBudget
    ) -> Hints:
        """Masks with enough free; preferred are those of the width that capacity needs."""
        universe, required = machine, 0
        for d in joint_providers:
            universe &= _mask_of_nodes(d.capacity)
            required |= d.required.bits
        resource_needs = tuple([d.resource_need(d.free_amounts, universe) for d in joint_providers])
        capacity = tuple([d.resource_need(d.capacity, universe) for d in joint_providers])
        hints = Hints(
            universe=universe,
            required=required,
            single_node_mask=_sufficient_nodes(universe, resource_needs, required),
            quantities=resource_needs,
            width=_preferred_width(universe, capacity, budget),
        )
        # Demands that share a list share its group rule: the first that states one.
        for d in joint_providers:
            if d.groups is not None:
                groups = {i: g.bits for i, g in d.groups.items() if universe >> i & 1}
                larger_groups = _mask_of_nodes(i for i, g in groups.items() if g & (g - 1))
                hints.single_node_mask &= ~larger_groups
                # A NUMA node with assignments and no group is a group of its own.
                hints.groups = {i: groups.get(i, 1 << i) for i in d.assigned if universe >> i & 1}
                break
        if self.sockets is not None:
            hints.sockets = self._socket_masks(self.sockets, universe)
        if not hints.has_mask():
            hints.nil = any(d.empty_is_nil for d in joint_providers)
        return hints

    @staticmethod
    def _socket_masks(sockets: Mapping[int, int], universe: int) -> tuple[int, ...]:
        masks: dict[int, int] = {}
        for i, socket in sockets.items():
            if universe >> i & 1:
                masks[socket] = masks.get(socket, 0) | 1 << i
        return tuple(masks.values())

    def amounts_by_node(self, numa_ids: NUMASet) -> list[NodeAmount]:
        """NUMA nodes without CPUs that serve others stand there for themselves."""
        return [
            NodeAmount(
                i,
                free_amount := max(0, self.free_amounts.get(i, 0)),
                capacity,
                free_amount >= self.need,
            )
            for i in numa_ids | NUMASet(self.attached)
            if (capacity := self.capacity.get(i)) is not None
        ]

    def max_amount_on(self, numa_ids: NUMASet, width: int, *, empty: bool) -> int:
        """Sum of the richest NUMA nodes, each with the memory that serves it."""
        amounts = self.capacity if empty else self.free_amounts
        by_node = add_attached_to_cpu_nodes(self.attached, amounts)
        return sum(sorted((max(0, by_node.get(i, 0)) for i in numa_ids), reverse=True)[:width])

    def confined_to(self, numa_nodes: NUMASet) -> ResourceDemand:
        """No wider than on an empty machine: inside, or all of ``numa_nodes`` and more."""
        if 0 < sum(self.capacity.get(i, 0) for i in numa_nodes) < self.need:
            return replace(self, required=self.required | numa_nodes)
        inside = {i: amount for i, amount in self.free_amounts.items() if i in numa_nodes}
        return replace(self, free_amounts=inside, confinement=numa_nodes)

    def no_hint_text(self) -> str:
        """The kubelet's memory manager answers so, see ``empty_is_nil``."""
        return "which no set of NUMA nodes has; its allocation decides"

    def find_obstacle(self, amounts: Sequence[NodeAmount]) -> Obstacle:
        """The machine has too little, too little is free, or it is not together."""
        unit = self.amount_unit
        capacity, free_amount = sum(n.capacity for n in amounts), sum(n.free for n in amounts)
        if capacity < self.need:
            text = f"all NUMA nodes that may serve it have {unit.amount_text(capacity, free=True)}"
            if self.resource == "cpu":
                count = unit.amount_text_without_cpu_noun(capacity, free=True)
                text = f"this machine has {count} for containers"
            return Obstacle(ObstacleKind.CAPACITY, text)
        free_text = unit.free_text(free_amount)
        if free_amount < self.need:
            nodes_text = "all NUMA nodes together"
            if self.confinement:
                nodes_text = f"{numa_text(self.confinement)}, near the listed memory"
            return Obstacle(ObstacleKind.FREE_AMOUNT, f"{free_text} on {nodes_text}")
        rule = "other containers tie its NUMA nodes to groups"
        if self.groups is None:
            rule = "not together with what it has already or with its other resources"
        return Obstacle(ObstacleKind.SPREAD, f"{free_text}, but {rule}")


class DeviceDemand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A need for devices, which may belong to no, one or several NUMA nodes.

    A device counts for a mask when *any* of its NUMA nodes lies in it. Devices without NUMA nodes
    count for no mask. When no device of the resource has a NUMA node there is no hint.
    """

    request: DeviceRequest
    joint_key: None = None
    unit: None = None

    @property
    def resource(self) -> str:
        """The resource's name, such as ``example.com/gpu``."""
        return self.request.resource

    @property
    def need(self) -> int:
        """The number of devices asked for."""
        return self.request.count

    @property
    def amount_unit(self) -> Unit:
        """Devices are a number, named by their resource."""
        return Unit.NUMBER

    def topology_hints(
        self, machine: int, joint_providers: Sequence[DeviceDemand], budget: SearchBudget
    ) -> Hints:
        """Masks with enough of the devices; devices share no list."""
        by_id = {d.id: d.numa_nodes for d in self.request.devices}
        counts: dict[int, int] = {}
        for numa_nodes in by_id.values():
            if numa_nodes:
                nodes = _mask_of_nodes(numa_nodes) & machine
                counts[nodes] = counts.get(nodes, 0) + 1
        if not counts or len(by_id) < self.need:
            return Hints(nil=not counts)
        resource_needs = (ResourceNeed.of_parts(self.need, list(counts.items())),)
        hints = Hints(
            universe=machine,
            single_node_mask=_sufficient_nodes(machine, resource_needs),
            quantities=resource_needs,
            width=_preferred_width(machine, resource_needs, budget),
        )
        if not hints.has_mask():
            hints.nil = False
        return hints

    def amounts_by_node(self, numa_ids: NUMASet) -> list[NodeAmount]:
        """Devices that the kubelet could give, or the container's own; only these suffice."""
        counts = [(i, sum(1 for d in self.request.devices if i in d.numa_nodes)) for i in numa_ids]
        if (stock := self.request.stock) is None:
            return [NodeAmount(i, count, count, count >= self.need) for i, count in counts]
        return [
            NodeAmount(i, stock.free.get(i, 0), stock.capacity.get(i, 0), count >= self.need)
            for i, count in counts
        ]

    @property
    def has_located_devices(self) -> bool:
        """True if as many devices as needed say which NUMA node they are on."""
        return sum(bool(d.numa_nodes) for d in self.request.devices) >= self.need

    def with_choices(self) -> DeviceDemand:
        """Return the demand before the kubelet chose, or itself if the choices are unknown."""
        stock = self.request.stock
        if stock is None:
            return self
        return replace(self, request=replace(self.request, devices=stock.choices))

    def max_amount_on(self, numa_ids: NUMASet, width: int, *, empty: bool) -> None:
        """A device on two NUMA nodes counts once."""

    def confined_to(self, numa_nodes: NUMASet) -> DeviceDemand:
        """Devices are where they are."""
        return self

    def no_hint_text(self) -> str:
        """Nobody knows where they are."""
        return "of devices that belong to no NUMA node"

    def find_obstacle(self, amounts: Sequence[NodeAmount]) -> Obstacle:
        """Without a NUMA node, or too few at all."""
        count = len(self.request.devices)
        if count < self.need:
            return Obstacle(ObstacleKind.DEVICES, f"more than the {count} on this node")
        located_count = sum(1 for d in self.request.devices if d.numa_nodes)
        text = f"but the NUMA node of only {located_count} of {count} devices is known"
        return Obstacle(ObstacleKind.DEVICES, text)


def _sufficient_nodes(universe: int, quantities: Iterable[ResourceNeed], required: int = 0) -> int:
    """The NUMA nodes that have enough of everything, and all that is required, by themselves."""
    if required:
        universe = required & universe if not required & (required - 1) else 0
    for quantity in quantities:
        universe &= quantity.sufficient_nodes()
    return universe


def _preferred_width(
    universe: int, capacity: tuple[ResourceNeed, ...], budget: SearchBudget
) -> int:
    """The least width at which an empty machine has enough on some mask; else all of it."""
    if _sufficient_nodes(universe, capacity):
        return 1
    cover = MaskRequirement(allowed_mask=universe, quantities=capacity)
    if len(capacity) == 1 and capacity[0].parts is None:
        return min(cover.min_width(), universe.bit_count())
    if universe.bit_count() <= EXACT_MERGE_MAX_NODES:
        return min(map(int.bit_count, cover.satisfying_masks()), default=universe.bit_count())
    mask = cover.narrowest_mask(MaskOrder(ids_of(universe)), None, budget, min_width=2)
    return (universe if mask is None else mask).bit_count()


def compute_hints(
    providers: Sequence[HintProvider],
    numa_ids: NUMASet,
    budget: SearchBudget,
    *,
    one_width: bool = False,
) -> list[Hints]:
    """The hints of each provider, in order; providers that share a list share the object.

    With ``one_width`` the width that the neediest of them needs on an empty machine is preferred by
    all, instead of each one's own, as the kubelet has it.
    """
    machine = numa_ids.bits
    shared_hints: dict[str, Hints] = {}
    hint_lists: list[Hints] = []
    for provider in providers:
        key = provider.joint_key
        if provider.need <= 0:
            hints = Hints(nil=True)
        elif key is None:
            hints = provider.topology_hints(machine, [provider], budget)
        elif key in shared_hints:
            hints = shared_hints[key]
        else:
            joint_providers = [p for p in providers if p.joint_key == key and p.need > 0]
            hints = shared_hints[key] = provider.topology_hints(machine, joint_providers, budget)
        hint_lists.append(hints)
    if one_width:
        width = max([f.width for f in hint_lists], default=0)
        for hints in hint_lists:
            hints.width = width
    return hint_lists


# --- the merge ------------------------------------------------------------------------------------


class HintMerge(msgspec.Struct, frozen=True, kw_only=True):
    """The hints of every resource, the machine's NUMA nodes, and the order to merge them in."""

    hint_lists: Sequence[Hints]
    all_nodes_mask: int
    order: MaskOrder
    distances: DistanceSums | None
    single: bool
    budget: SearchBudget

    def best_affinity(self) -> tuple[int, bool]:
        """The best mask, all of the machine where nothing restricts it; whether it is preferred."""
        mask = self.preferred_mask()
        if mask is not None:
            return mask, True
        lists = [f for f in self.hint_lists if f.nil is None]
        if not lists or self.single:
            return self.all_nodes_mask, False
        if len(self.order.nodes) > EXACT_MERGE_MAX_NODES:
            mask = self._merged_requirement(
                lists, lambda m: all(f.allows_mask_by_group_rule(m) for f in lists)
            ).narrowest_mask(self.order, self.distances, self.budget)
            return (self.all_nodes_mask if mask is None else mask), False
        masks, neediest = self.reachable_masks()
        if not masks:
            return self.all_nodes_mask, False
        # Order: the class of the result; one width has one class.
        width = min({m.bit_count() for m in masks}, key=lambda w: unpreferred_rank(w, neediest))
        narrowest_masks = [m for m in masks if m.bit_count() == width]
        return select_mask(narrowest_masks, self.order, self.distances), False

    def preferred_mask(  # noqa: C901 - mathematics, held to an oracle
        self, excluded: frozenset[int] = frozenset()
    ) -> int | None:
        """The best mask that every list prefers, but for the excluded ones; None without one.

        Preferred masks of a list have one width, with socket alignment several.
        """
        lists = [f for f in self.hint_lists if f.nil is not True]
        for f in lists:
            if f.nil is False:
                return None
        if not lists:
            return None if self.all_nodes_mask in excluded else self.all_nodes_mask
        widths = {f.width for f in lists if not (f.sockets and f.max_preferred_sockets)}
        if len(widths) > 1:
            return None
        if self.single or widths <= {1}:
            single_nodes = self.all_nodes_mask
            for f in lists:
                single_nodes &= f.single_node_mask
            node_ids = [i for i in self.order.nodes if single_nodes >> i & 1]
            for f in lists:
                if f.width != 1:
                    node_ids = [i for i in node_ids if f.prefers_width(1 << i)]
            if excluded:
                node_ids = [i for i in node_ids if 1 << i not in excluded]
            if node_ids:
                # Masks of one NUMA node have the order of the NUMA nodes.
                self_distances = (
                    [self.distances.self_distance(i) for i in node_ids] if self.distances else [0]
                )
                return 1 << node_ids[self_distances.index(min(self_distances))]
        has_plain_hints = not excluded and all(f.groups is None and not f.sockets for f in lists)

        def accept_mask(mask: int) -> bool:
            return mask not in excluded and all(
                f.prefers_width(mask) and f.allows_mask_by_group_rule(mask) for f in lists
            )

        # Of plain ones the width decides.
        cover = self._merged_requirement(lists, None if has_plain_hints else accept_mask)
        for width in () if self.single else widths or range(2, cover.allowed_mask.bit_count() + 1):
            mask = cover.best_mask_of_width(width, self.order, self.distances, self.budget)
            if mask is not None:
                return mask
        return None

    def reachable_masks(self) -> tuple[list[int], int]:
        """All intersections of one hint of each list but the empty one, and *bnp*.

        The number of ways to reach at least a mask, by taking from each list a hint that contains
        it, is a product of sums over supersets; the ways to reach exactly it follow by subtraction.
        For at most `EXACT_MERGE_MAX_NODES` NUMA nodes.
        """
        masks = all_numa_masks(self.all_nodes_mask)
        neediest = 0
        ways = [1] * len(masks)
        for hints in self.hint_lists:
            if hints.nil is None:  # without a mask it intersects nothing away
                hint_masks = set(hints.mask_requirement().satisfying_masks())
                neediest = max(neediest, min(m.bit_count() for m in hint_masks))
                counts = [1 if m in hint_masks else 0 for m in masks]
                ways = list(map(mul, ways, _sum_over_supersets(counts, 1)))
        ways = _sum_over_supersets(ways, -1)
        return [m for m, count in zip(masks, ways, strict=True) if m and count], neediest

    def _merged_requirement(
        self, lists: Sequence[Hints], accept: Callable[[int], bool] | None
    ) -> MaskRequirement:
        allowed_mask, required = self.all_nodes_mask, 0
        for f in lists:
            allowed_mask &= f.universe
            required |= f.required
        return MaskRequirement(
            allowed_mask=allowed_mask,
            quantities=tuple([q for f in lists for q in f.quantities]),
            required=required,
            accept=accept,
        )


def _sum_over_supersets(counts: list[int], sign: int) -> list[int]:
    """For each index the sum over all indexes that contain it; undone with ``sign=-1``."""
    bit = 1
    while bit < len(counts):
        for index in range(len(counts)):
            if not index & bit:
                counts[index] += sign * counts[index | bit]
        bit <<= 1
    return counts


def unpreferred_rank(width: int, neediest: int) -> tuple[int, int]:
    """First two parts of the key of a result that is not preferred."""
    if width == neediest:
        return (0, 0)
    return (1, -width) if width < neediest else (2, width)
