"""Which NUMA masks suit each resource, and the one that suits them all: hints and their merge.

A *demand* states the facts: how much is needed, what each NUMA node could give when empty
(capacity) and what it can give now (available). It stands for a list of the kubelet's *hints*
without spelling the list out: a mask of NUMA nodes is a hint when it covers the need with what is
available, and a *preferred* one when it is also no wider than an empty machine would have required.

The two kinds of empty answer of the kubelet's hint providers stay apart everywhere:

* *no wish* (a nil list): any placement suits; one hint without mask, preferred;
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
finds preferred results, and in place of the others the narrowest mask that suits every resource;
see docs/adr/0004-hint-merge.md. Masks are plain integers here, bit *i* for NUMA node *i*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, compress, groupby
from operator import mul

import msgspec

from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet, ids_of
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


def sum_by_cpu_node(near: Mapping[int, NUMASet], amounts: AmountsByNode) -> AmountsByNode:
    """What each NUMA node by itself has of a resource, with what serves it (`near`)."""
    if not near:
        return amounts
    found = {i: amount for i, amount in amounts.items() if i not in near}
    for i, served in near.items():
        for home in served:
            found[home] = found.get(home, 0) + max(0, amounts.get(i, 0))
    return found


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
        left = SEARCH_STEP_LIMIT - self.used
        return self.used + (max(left // 2, _MIN_SEARCH_STEPS) if left > -SEARCH_STEP_LIMIT else 0)


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
            last = max(rank.values(), default=0) + 1
            # Order: rank, then number.
            self.nodes.sort(key={**dict.fromkeys(self.nodes, last), **rank}.__getitem__)
        self._place = {i: place for place, i in enumerate(self.nodes)}

    def sort_key(self, mask: int) -> tuple[int, ...]:
        """Sort key; only to be compared between masks of one width."""
        places = [self._place[i] for i in ids_of(mask)]
        places.sort(reverse=self.by_value)
        return tuple(places)

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
        """What one NUMA node adds to the total of a mask without it."""
        return self.round_trip(i, i) + sum(self.round_trip(i, j) for j in ids_of(mask))

    def total_distance(self, mask: int) -> int:
        """Sum over all ordered pairs of the mask."""
        found = self._totals.get(mask)
        if found is None:
            members = list(ids_of(mask))
            pairs = [self.round_trip(i, j) for i, j in combinations(members, 2)]
            found = sum(pairs) + sum([self.round_trip(i, i) for i in members])
            if not mask >> EXACT_MERGE_MAX_NODES:  # so many at most, whatever the machine has
                self._totals[mask] = found
        return found


class ResourceNeed(msgspec.Struct, frozen=True):
    """What a mask must have enough of.

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
        several = False
        for nodes, amount in parts:
            several = several or bool(nodes & (nodes - 1))
            for i in ids_of(nodes):
                amounts[i] = amounts.get(i, 0) + amount
        return cls(need, amounts, tuple(parts) if several else None)

    def amount_in(self, mask: int) -> int:
        """What a mask has."""
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
    """What a mask is made of (``allowed_mask``), holds (``required``), has enough of, must be."""

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
        least = max(1, self.required.bit_count())
        for q in self.quantities:
            have = width = 0
            for amount in sorted(
                (a for i, a in q.amounts.items() if self.allowed_mask >> i & 1), reverse=True
            ):
                if have >= q.need:
                    break
                have += amount
                width += 1
            if have < q.need:
                return self.allowed_mask.bit_count() + 1
            least = max(least, width)
        return least

    def best_mask_of_width(
        self, width: int, order: MaskOrder, distances: DistanceSums | None, steps: SearchBudget
    ) -> int | None:
        """The best mask of exactly ``width`` NUMA nodes; None when there is none.

        Order: least distance first (with ``distances``), then ``order``.
        """
        if len(order.nodes) > EXACT_MERGE_MAX_NODES:
            nodes, choose = (
                order.nodes_of(self.allowed_mask & ~self.required),
                self.required.bit_count(),
            )
            return self._search_mask(nodes, width - choose, distances, steps)
        found = [
            m for m in self._sufficient_masks() if m.bit_count() == width and self._is_acceptable(m)
        ]
        return select_mask(found, order, distances) if found else None

    def narrowest_mask(
        self,
        order: MaskOrder,
        distances: DistanceSums | None,
        steps: SearchBudget,
        at_least: int = 1,
    ) -> int | None:
        """The best of the masks of the least width."""
        if len(order.nodes) <= EXACT_MERGE_MAX_NODES:
            found = sorted(self._sufficient_masks(), key=int.bit_count)
            for _, masks in groupby(found, key=int.bit_count):
                suiting = [m for m in masks if self._is_acceptable(m)]
                if suiting:
                    return select_mask(suiting, order, distances)
            return None
        for width in range(max(at_least, self.min_width()), self.allowed_mask.bit_count() + 1):
            mask = self.best_mask_of_width(width, order, distances, steps)
            if mask is not None:
                return mask
            if steps.used > SEARCH_STEP_LIMIT:
                break
        return (
            self.allowed_mask
            if self.allowed_mask and self.satisfied_by(self.allowed_mask)
            else None
        )

    def satisfying_masks(self) -> list[int]:
        """Every mask that has everything, on a machine with few NUMA nodes."""
        return [m for m in self._sufficient_masks() if self._is_acceptable(m)]

    def _sufficient_masks(self) -> list[int]:
        """Every mask that has enough, all of them counted at once."""
        masks, enough = (
            all_numa_masks(self.allowed_mask),
            [True] * (1 << self.allowed_mask.bit_count()),
        )
        for q in self.quantities:
            sums = [0]
            if q.parts is None:
                for i in ids_of(self.allowed_mask):
                    amount = q.amounts.get(i, 0)
                    sums += [total + amount for total in sums]
            else:
                sums = [q.amount_in(m) for m in masks]
            need = q.need
            enough = [e and total >= need for e, total in zip(enough, sums, strict=True)]
        return [m for m in compress(masks, enough) if m]

    def _search_mask(  # noqa: C901 - mathematics, held to an oracle
        self, nodes: list[int], choose: int, distances: DistanceSums | None, steps: SearchBudget
    ) -> int | None:
        """A close mask on a machine with too many to look at each.

        Grows masks by the NUMA node that is nearest to what they hold, the first of the order among
        equals, and leaves a branch that cannot have enough any more, or come nearer than the best.
        """
        weights = [q.amounts for q in self.quantities]
        lacks = [q.need - q.amount_in(self.required) for q in self.quantities]
        until = steps.next_search_step_limit()
        best: int | None = None
        nearest = 0
        apart = distances.min_distance(nodes) if distances else 0

        def extend_mask(
            rest: list[int],
            choose: int,
            mask: int,
            lacks: list[int],
            far: int,
            adds: AmountsByNode,
        ) -> None:
            nonlocal best, nearest
            if not choose:
                if self.satisfied_by(mask):
                    best, nearest = mask, far
                return
            for lack, w in zip(lacks, weights, strict=True):
                if lack > 0 and lack > sum(sorted([w.get(i, 0) for i in rest])[-choose:]):
                    return
            if distances is not None:
                rest = sorted(rest, key=adds.__getitem__)  # stable: then by the order
            for n, i in enumerate(rest[: len(rest) - choose + 1]):
                if best is not None:
                    # What the nearest of the rest add, were they as near to one another as any.
                    least = sum([adds[j] for j in rest[n : n + choose]])
                    if far + least + apart * choose * (choose - 1) // 2 >= nearest:
                        return
                if steps.used >= until:
                    steps.exact = False
                    return
                steps.used += 1
                beyond = rest[n + 1 :]
                after = [lack - w.get(i, 0) for lack, w in zip(lacks, weights, strict=True)]
                further = adds
                if distances is not None:
                    further = {j: adds[j] + distances.round_trip(i, j) for j in beyond}
                extend_mask(beyond, choose - 1, mask | 1 << i, after, far + adds[i], further)

        first = {i: distances.added_distance(self.required, i) if distances else 0 for i in nodes}
        if choose >= 0 and not self.required & ~self.allowed_mask:
            extend_mask(nodes, choose, self.required, lacks, 0, first)
        return best


def select_mask(masks: Sequence[int], order: MaskOrder, distances: DistanceSums | None) -> int:
    """The best of some masks of one width: least distance, then the tie-break."""
    if distances is not None and len(masks) > 1:
        totals = [distances.total_distance(m) for m in masks]
        least = min(totals)
        masks = [m for m, total in zip(masks, totals, strict=True) if total == least]
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
        """How many sockets a preferred mask may touch; 0 without that rule.

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
        """What a mask must be to be a hint."""
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
        apart = self.universe & ~_mask_of_nodes(self.groups)
        return any(map(self.contains_mask, [apart, *self.groups.values()]))


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
        unit: for texts: ``bytes``, ``cpus``, ``millicpu``, or empty for a plain number; None is
            ``bytes`` for memory and huge pages and a plain number for the rest.
        assigned: NUMA nodes with assignments, for the group rule.
        attached: NUMA nodes in ``capacity`` that are no part of masks themselves (memory without
            CPUs)
            to those that they serve: they count for a mask that holds any of these.
        empty_is_nil: when no mask suits, answer *no wish* instead of *impossible*. The
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
    unit: str | None = None

    def resource_need(self, amounts: AmountsByNode, universe: int) -> ResourceNeed:
        """The need against some amounts."""
        own = {i: v for i, v in amounts.items() if v > 0 and i >= 0 and universe >> i & 1}
        if not self.attached:
            return ResourceNeed(self.need, own)
        parts = [(1 << i, amount) for i, amount in own.items()]
        for i, served in self.attached.items():
            if (amount := amounts.get(i, 0)) > 0 and (mask := served.bits & universe):
                parts.append((mask, amount))
        return ResourceNeed.of_parts(self.need, parts)

    def compute_hints(
        self, machine: int, among: Sequence[HintDemand], steps: SearchBudget
    ) -> Hints:
        """Masks with enough available; preferred are those of the width that capacity needs."""
        demands = [d for d in among if isinstance(d, ResourceDemand)]
        universe, required = machine, 0
        for d in demands:
            universe &= _mask_of_nodes(d.capacity)
            required |= d.required.bits
        free = tuple([d.resource_need(d.free_amounts, universe) for d in demands])
        capacity = tuple([d.resource_need(d.capacity, universe) for d in demands])
        found = Hints(
            universe=universe,
            required=required,
            single_node_mask=_sufficient_nodes(universe, free, required),
            quantities=free,
            width=_preferred_width(universe, capacity, steps),
        )
        # Demands that share a list share its group rule: the first that states one.
        for d in demands:
            if d.groups is not None:
                groups = {i: g.bits for i, g in d.groups.items() if universe >> i & 1}
                found.single_node_mask &= ~_mask_of_nodes(
                    i for i, g in groups.items() if g & (g - 1)
                )
                # A NUMA node with assignments and no group is a group of its own.
                found.groups = {i: groups.get(i, 1 << i) for i in d.assigned if universe >> i & 1}
                break
        if self.sockets is not None:
            by_socket: dict[int, int] = {}
            for i, socket in self.sockets.items():
                if universe >> i & 1:
                    by_socket[socket] = by_socket.get(socket, 0) | 1 << i
            found.sockets = tuple(by_socket.values())
        if not found.has_mask():
            found.nil = any(d.empty_is_nil for d in demands)
        return found

    def free_and_capacity(self, numa_ids: NUMASet) -> Iterable[tuple[int, int, int]]:
        """NUMA nodes without CPUs that serve others stand there for themselves."""
        return [
            (i, max(0, self.free_amounts.get(i, 0)), self.capacity[i])
            for i in numa_ids | NUMASet(self.attached)
            if i in self.capacity
        ]

    def shortage_clause(self) -> str:
        """Enough is free, and not together."""
        if self.groups is not None:
            return "its NUMA nodes are tied to groups of other containers"
        return "not together with what is held already or judged with it"


class DeviceDemand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A need for devices, which may belong to no, one or several NUMA nodes.

    A device counts for a mask when *any* of its NUMA nodes lies in it. Devices without NUMA nodes
    count for no mask. When no device of the resource has a NUMA node there is no wish.
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

    def compute_hints(
        self, machine: int, among: Sequence[HintDemand], steps: SearchBudget
    ) -> Hints:
        """Masks with enough of the devices."""
        by_id = {d.id: d.numa_nodes for d in self.request.devices}
        counts: dict[int, int] = {}
        for numa_nodes in by_id.values():
            if numa_nodes:
                nodes = _mask_of_nodes(numa_nodes) & machine
                counts[nodes] = counts.get(nodes, 0) + 1
        if not counts or len(by_id) < self.need:
            return Hints(nil=not counts)
        free = (ResourceNeed.of_parts(self.need, list(counts.items())),)
        width = _preferred_width(machine, free, steps)
        found = Hints(
            universe=machine,
            single_node_mask=_sufficient_nodes(machine, free),
            quantities=free,
            width=width,
        )
        if not found.has_mask():
            found.nil = False
        return found

    def free_and_capacity(self, numa_ids: NUMASet) -> Iterable[tuple[int, int, int]]:
        """All devices are the container's, so they are free for it."""
        on = [(i, sum(1 for d in self.request.devices if i in d.numa_nodes)) for i in numa_ids]
        return [(i, count, count) for i, count in on]

    def shortage_clause(self) -> str:
        """Without a NUMA node, or too few at all."""
        known = len(self.request.devices)
        if known < self.need:
            return f"more than the {known} there are"
        placed = sum(1 for d in self.request.devices if d.numa_nodes)
        return f"but only {placed} of {known} devices say which NUMA node they belong to"


HintDemand = ResourceDemand | DeviceDemand
"""The kinds of demands: each says by itself which hints it has, and how texts tell of it."""


def _sufficient_nodes(universe: int, quantities: Iterable[ResourceNeed], required: int = 0) -> int:
    """The NUMA nodes that have enough of everything, and all that is required, by themselves."""
    if required:
        universe = required & universe if not required & (required - 1) else 0
    for quantity in quantities:
        universe &= quantity.sufficient_nodes()
    return universe


def _preferred_width(universe: int, capacity: tuple[ResourceNeed, ...], steps: SearchBudget) -> int:
    """The least width at which an empty machine has enough on some mask; else all of it."""
    if _sufficient_nodes(universe, capacity):
        return 1
    cover = MaskRequirement(allowed_mask=universe, quantities=capacity)
    if len(capacity) == 1 and capacity[0].parts is None:
        return min(cover.min_width(), universe.bit_count())
    if universe.bit_count() <= EXACT_MERGE_MAX_NODES:
        return min(map(int.bit_count, cover.satisfying_masks()), default=universe.bit_count())
    mask = cover.narrowest_mask(MaskOrder(ids_of(universe)), None, steps, at_least=2)
    return (universe if mask is None else mask).bit_count()


def compute_hints(
    demands: Sequence[HintDemand],
    numa_ids: NUMASet,
    steps: SearchBudget,
    *,
    one_width: bool = False,
) -> list[Hints]:
    """The hints of each demand, in order; demands that share a list share the object.

    With ``one_width`` the width that the neediest of them needs on an empty machine is preferred by
    all, instead of each one's own, as the kubelet has it.
    """
    machine = numa_ids.bits
    shared: dict[str, Hints] = {}
    found: list[Hints] = []
    for demand in demands:
        if demand.need <= 0:
            hints = Hints(nil=True)
        elif demand.joint_key is None:
            hints = demand.compute_hints(machine, [demand], steps)
        elif demand.joint_key in shared:
            hints = shared[demand.joint_key]
        else:
            among = [d for d in demands if d.joint_key == demand.joint_key and d.need > 0]
            hints = shared[demand.joint_key] = demand.compute_hints(machine, among, steps)
        found.append(hints)
    if one_width:
        width = max((f.width for f in found), default=0)
        for hints in found:
            hints.width = width
    return found


# --- the merge ------------------------------------------------------------------------------------


class HintMerge(msgspec.Struct, frozen=True, kw_only=True):
    """What is merged: the hints of every resource, the machine's NUMA nodes, and the order."""

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
        among = [m for m in masks if m.bit_count() == width]
        return select_mask(among, self.order, self.distances), False

    def preferred_mask(  # noqa: C901 - mathematics, held to an oracle
        self, but: frozenset[int] = frozenset()
    ) -> int | None:
        """The best mask that every list prefers, None when there is none; without those in ``but``.

        Preferred masks of a list have one width, with socket alignment several.
        """
        lists = [f for f in self.hint_lists if f.nil is not True]
        for f in lists:
            if f.nil is False:
                return None
        if not lists:
            return None if self.all_nodes_mask in but else self.all_nodes_mask
        widths = {f.width for f in lists if not (f.sockets and f.max_preferred_sockets)}
        if len(widths) > 1:
            return None
        if self.single or widths <= {1}:
            alone = self.all_nodes_mask
            for f in lists:
                alone &= f.single_node_mask
            ones = [i for i in self.order.nodes if alone >> i & 1]
            for f in lists:
                if f.width != 1:
                    ones = [i for i in ones if f.prefers_width(1 << i)]
            if but:
                ones = [i for i in ones if 1 << i not in but]
            if ones:
                # Masks of one NUMA node have the order of the NUMA nodes.
                far = [self.distances.self_distance(i) for i in ones] if self.distances else [0]
                return 1 << ones[far.index(min(far))]
        plain = not but and all(f.groups is None and not f.sockets for f in lists)

        def accept(mask: int) -> bool:
            return mask not in but and all(
                f.prefers_width(mask) and f.allows_mask_by_group_rule(mask) for f in lists
            )

        cover = self._merged_requirement(
            lists, None if plain else accept
        )  # of plain ones the width decides
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
                found = set(hints.mask_requirement().satisfying_masks())
                neediest = max(neediest, min(m.bit_count() for m in found))
                counts = [1 if m in found else 0 for m in masks]
                ways = list(map(mul, ways, _sum_over_supersets(counts, 1)))
        ways = _sum_over_supersets(ways, -1)
        return [m for m, count in zip(masks, ways, strict=True) if m and count], neediest

    def _merged_requirement(
        self, lists: Sequence[Hints], accept: Callable[[int], bool] | None
    ) -> MaskRequirement:
        within, required = self.all_nodes_mask, 0
        for f in lists:
            within &= f.universe
            required |= f.required
        return MaskRequirement(
            allowed_mask=within,
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
