"""What a container asks of each resource, and which NUMA masks suit it.

A *demand* states the facts: how much is needed, what each NUMA node could give when empty
(capacity) and what it can give now (available). A demand stands for a list of the kubelet's *hints*
without spelling the list out: a mask of NUMA nodes is a hint when it covers the need with what is
available, and a *preferred* one when it is also no wider than an empty machine would have required.
`nri_numa.engine.align.hints` answers questions about that list, `nri_numa.engine.align.hints`
combines the lists of several demands.

The two kinds of empty answer of the kubelet's hint providers stay apart everywhere:

* *no wish* (a nil list): any placement suits; one hint without mask, preferred;
* *impossible* (an empty list): nothing suits; one hint without mask, not preferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import add, mul, sub

import msgspec

from nri_numa.engine.values.workload import DeviceRequest
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet

Amounts = Mapping[int, int]
"""Quantity by NUMA node; missing is none."""


class Hint(msgspec.Struct, frozen=True):
    """One answer of a provider.

    Attributes:
        affinity: the NUMA nodes to use, None when any placement suits.
        preferred: the mask is as narrow as an empty machine would allow.
    """

    affinity: NUMASet | None
    preferred: bool

    def __str__(self) -> str:
        where = "any" if self.affinity is None else f"{{{self.affinity}}}"
        return where + ("✓" if self.preferred else "✗")


class ResourceDemand(msgspec.Struct, frozen=True, kw_only=True):
    """A need for a quantity that NUMA nodes add up to: CPUs, memory, huge pages.

    The masks looked at are made of the NUMA nodes that ``capacity`` names, so a CPU demand names
    the NUMA nodes with CPUs and a memory demand those with memory. A mask is a hint when all of
    ``required`` lies in it and the sum of ``available`` over it reaches ``need``. It is preferred
    when its width is the least width at which ``capacity`` reaches ``need`` on some mask.

    A need of zero or less asks for nothing and counts as no wish.

    Attributes:
        resource: ``cpu``, ``memory``, ``hugepages-2Mi`` …
        need: in the same unit as the mappings.
        capacity: by NUMA node, what an empty machine has.
        available: by NUMA node, what is free now plus what the container may reuse; missing and
            negative mean none.
        required: NUMA nodes that must lie in every mask, because the container holds or reuses
            something there.
        sockets: NUMA node to socket; given, masks that touch as few sockets as the narrowest mask
            would are preferred too (the kubelet's ``align-by-socket``).
        groups: NUMA node to the group it is bound to, the kubelet's memory cells; None for no
            group rule. With it a node of a larger group is no mask of its own, and a wider mask
            may hold a node with assignments only if it is that node's group.
        assigned: NUMA nodes with assignments, for the group rule.
        near: NUMA nodes in ``capacity`` that are no part of masks themselves (memory without CPUs)
            to those that they serve: they count for a mask that holds any of these.
        share: demands with the same key are judged together: a mask suits all or none of them and
            they have one preferred width, as the memory types of the kubelet do.
        nothing_is_no_wish: when no mask suits, answer *no wish* instead of *impossible*. The
            kubelet's memory manager does, and fails at allocation.
        unit: for texts: ``bytes``, ``cpus``, ``millicpu``, or empty for a plain number; None is
            ``bytes`` for memory and huge pages and a plain number for the rest.
    """

    resource: str
    need: int
    capacity: Mapping[int, int]
    available: Mapping[int, int]
    required: NUMASet = NO_NUMA_NODES
    sockets: Mapping[int, int] | None = None
    groups: Mapping[int, NUMASet] | None = None
    assigned: NUMASet = NO_NUMA_NODES
    near: Mapping[int, NUMASet] = msgspec.field(default_factory=dict)
    share: str | None = None
    nothing_is_no_wish: bool = False
    unit: str | None = None


class DeviceDemand(msgspec.Struct, frozen=True, kw_only=True):
    """A need for devices, which may belong to no, one or several NUMA nodes.

    A device counts for a mask when *any* of its NUMA nodes lies in it. Devices without NUMA nodes
    count for no mask. When no device of the resource has a NUMA node there is no wish.

    Attributes:
        request: the count and every device of the resource that the container has.
    """

    request: DeviceRequest

    @property
    def resource(self) -> str:
        """The resource's name, such as ``example.com/gpu``."""
        return self.request.resource

    @property
    def need(self) -> int:
        """The number of devices asked for."""
        return self.request.count


def together(near: Mapping[int, NUMASet], amounts: Amounts) -> Amounts:
    """What each NUMA node by itself has of a resource, with what serves it.

    Args:
        near: see `ResourceDemand`.
        amounts: by NUMA node.
    """
    if not near:
        return amounts
    found = {i: amount for i, amount in amounts.items() if i not in near}
    for i, served in near.items():
        for home in served:
            found[home] = found.get(home, 0) + max(0, amounts.get(i, 0))
    return found


HintDemand = ResourceDemand | DeviceDemand


Weights = Mapping[int, int]
"""NUMA node to quantity; missing is none."""

# Resolution at which needs of different units are added up into one bound. Any value is correct; a
# larger one rounds less, and 2**20 keeps the sums in two machine words.
_SCALE = 1 << 20

# Fewest steps a search gets: enough to walk straight to a mask on a machine of 64 NUMA nodes.
_FLOOR = 64


class Steps:
    """A budget of steps, and whether it sufficed.

    Attributes:
        limit: steps allowed, None for no bound.
        used: steps taken so far.
        exact: False once some search had to stop early.
    """

    __slots__ = ("_parent", "exact", "limit", "used")

    def __init__(self, limit: int | None = None, parent: Steps | None = None) -> None:
        self.limit = limit
        self.used = 0
        self.exact = True
        self._parent = parent

    def share(self) -> Steps:
        """A budget for one search: half of what is left, so that no search starves the rest.

        A search gets `_FLOOR` steps even from an overdrawn budget, until it is overdrawn by as much
        again; so twice the limit and one such search is the most a merge can take.
        """
        if self.limit is None:
            return Steps(None, self)
        left = self.limit - self.used
        return Steps(max(left // 2, _FLOOR) if left > -self.limit else 0, self)

    def take(self) -> bool:
        """Count a step; False when there is none left."""
        self.used += 1
        if self.limit is None or self.used <= self.limit:
            return True
        self.exact = False
        return False

    def close(self) -> None:
        """Hand the count of a share back to where it came from."""
        parent = self._parent
        if parent is not None:
            parent.used += self.used
            parent.exact = parent.exact and self.exact


class Order:
    """The tie-break between masks of the same width and distance; smaller is better.

    Without ranks it is the mask's integer value, as in the kubelet: of two masks the one without
    the highest NUMA node in which they differ. With ranks it is the sorted tuple of the ranks of
    its NUMA nodes: of two masks the one with the best-ranked NUMA node in which they differ.
    NUMA nodes of equal rank, and those without one, are told apart by their number.
    """

    __slots__ = ("_place", "by_value", "nodes")

    def __init__(self, numa_nodes: Sequence[int], rank: Mapping[int, int] | None = None) -> None:
        self.by_value = rank is None
        if rank is None:
            self.nodes = sorted(numa_nodes)
        else:
            last = max(rank.values(), default=0) + 1
            # Order: rank, then number.
            self.nodes = sorted(numa_nodes, key=lambda i: (rank.get(i, last), i))
        self._place = {i: place for place, i in enumerate(self.nodes)}

    def key(self, mask: int) -> tuple[int, ...]:
        """Sort key; only to be compared between masks of one width."""
        places: list[int] = []
        while mask:
            low = mask & -mask
            places.append(self._place[low.bit_length() - 1])
            mask ^= low
        places.sort(reverse=self.by_value)
        return tuple(places)

    def within(self, mask: int) -> list[int]:
        """The NUMA nodes of a mask, in order."""
        return [i for i in self.nodes if mask >> i & 1]


class Distances:
    """Sums of SLIT distances, read once and only where needed.

    The kubelet compares averages over all ordered pairs of a mask, each node with itself included.
    Among masks of one width the sums order the same way and are exact.
    """

    __slots__ = ("_between", "_distance", "_here", "_tables")

    def __init__(self, distance: Callable[[int, int], int]) -> None:
        self._distance = distance
        self._here: dict[int, int] = {}
        self._between: dict[tuple[int, int], int] = {}
        self._tables: dict[tuple[int, ...], tuple[list[list[int]], list[list[int]]]] = {}

    def here(self, i: int) -> int:
        """Distance of a NUMA node to itself."""
        value = self._here.get(i)
        if value is None:
            value = self._here[i] = self._distance(i, i)
        return value

    def between(self, i: int, j: int) -> int:
        """Distance there and back (firmware may tell different ones)."""
        key = (i, j) if i < j else (j, i)
        value = self._between.get(key)
        if value is None:
            value = self._between[key] = self._distance(i, j) + self._distance(j, i)
        return value

    def tables(self, nodes: tuple[int, ...]) -> tuple[list[list[int]], list[list[int]]]:
        """What a search over these NUMA nodes looks up, by their places.

        Returns:
            Twice the distance between two of them, 0 to itself; and for k = 1, 2, … the least that
            each adds to k others.
        """
        tables = self._tables.get(nodes)
        if tables is None:
            rows = [[0 if i == j else self.between(i, j) for j in nodes] for i in nodes]
            least = [list(accumulate(sorted(row[:c] + row[c + 1 :]))) for c, row in enumerate(rows)]
            tables = self._tables[nodes] = (
                [[2 * v for v in row] for row in rows],
                [list(column) for column in zip(*least, strict=True)],
            )
        return tables

    def total(self, mask: int) -> int:
        """Sum over all ordered pairs of the mask."""
        total = 0
        members: list[int] = []
        while mask:
            low = mask & -mask
            i = low.bit_length() - 1
            mask ^= low
            total += self.here(i)
            for j in members:
                total += self.between(i, j)
            members.append(i)
        return total


def closeness(mask: int, order: Order, distances: Distances | None) -> tuple[int, tuple[int, ...]]:
    """Order of masks of one width: distance, then tie-break."""
    return (0 if distances is None else distances.total(mask), order.key(mask))


def pick(masks: Sequence[int], order: Order, distances: Distances | None) -> int:
    """The best of some masks of one width."""
    if len(masks) == 1:
        return masks[0]
    return min(masks, key=lambda m: closeness(m, order, distances))


@dataclass(slots=True)
class Cover:
    """What a mask must have.

    Attributes:
        within: the NUMA nodes it is made of.
        required: those it must hold.
        sums: pairs of weights and the sum they must reach over the mask.
        accept: judges a complete mask; None when the sums decide.
    """

    within: int
    required: int
    sums: Sequence[tuple[Weights, int]] = ()
    accept: Callable[[int], bool] | None = None

    @property
    def single(self) -> bool:
        """One sum alone decides."""
        return self.accept is None and len(self.sums) == 1

    def floor(self) -> int:
        """A width below which no mask can do: for each sum, the number of largest summands."""
        required, within = self.required, self.within
        if required & ~within:
            return within.bit_count() + 1
        least = max(required.bit_count(), 1)
        for weights, need in self.sums:
            have = 0
            rest: list[int] = []
            for i, weight in weights.items():
                if required >> i & 1:
                    have += weight
                elif within >> i & 1:
                    rest.append(weight)
            width = required.bit_count()
            if have < need:
                # Order: largest first; equal ones are interchangeable.
                rest.sort(reverse=True)
                for weight in rest:
                    have += weight
                    width += 1
                    if have >= need:
                        break
                else:
                    return within.bit_count() + 1
            least = max(least, width)
        return least

    def accepts(self, mask: int) -> bool:
        """Say whether a mask between ``required`` and ``within`` has everything."""
        for weights, need in self.sums:
            if sum(w for i, w in weights.items() if mask >> i & 1) < need:
                return False
        return self.accept is None or self.accept(mask)


def greedy_mask(cover: Cover, order: Order | None, width: int | None = None) -> int | None:
    """Grow a mask by the NUMA node that brings the needs forward most, until it is accepted.

    Args:
        cover: what is needed.
        order: tells equally useful NUMA nodes apart; by number when None.
        width: the width to end at, at least that of what is required; None for any.
    """
    nodes = list(_members(cover.within)) if order is None else order.within(cover.within)
    mask = cover.required
    limit = len(nodes) if width is None else width
    lacking = [
        need - sum(w for i, w in weights.items() if mask >> i & 1) for weights, need in cover.sums
    ]
    left = [i for i in nodes if not mask >> i & 1]
    while True:
        size = mask.bit_count()
        if mask and (width is None or size == width) and cover.accepts(mask):
            return mask
        if size == limit or not left:
            return None
        # Order: largest gain first, gain being the part of each lack that the NUMA node fills;
        # then the given order.
        active = [
            (weights, lack)
            for (weights, _), lack in zip(cover.sums, lacking, strict=True)
            if lack > 0
        ]
        best, most = left[0], -1
        for i in left:
            gain = 0
            for weights, lack in active:
                weight = weights.get(i, 0)
                gain += (weight if weight < lack else lack) * _SCALE // lack
            if gain > most:
                best, most = i, gain
        left.remove(best)
        mask |= 1 << best
        lacking = [
            lack - weights.get(best, 0)
            for (weights, _), lack in zip(cover.sums, lacking, strict=True)
        ]


def _members(mask: int) -> list[int]:
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


class _OutOfSteps(Exception):
    """Unwinds a search; never leaves this module."""


class _Search:
    """One walk over the masks of one width; lives for one call of `best_mask`.

    Attributes:
        nodes: NUMA nodes to choose from, in the order of the tie-break.
        sums: for each sum still lacking: weights by place in ``nodes``.
        far: best distance so far; None before the first mask, 0 without distances.
        best: best mask so far.
        here: what each of ``nodes`` adds to the distance of the mask chosen so far, twice the
            value, because `bound` halves what is between two new nodes; None without distances.
        between, near: see `Distances.tables`; near[0] is zeros.
    """

    __slots__ = (
        "_tops",
        "accept",
        "best",
        "between",
        "by_value",
        "far",
        "here",
        "near",
        "nodes",
        "required",
        "steps",
        "sums",
    )

    def __init__(
        self,
        cover: Cover,
        nodes: list[int],
        sums: list[list[int]],
        steps: Steps,
        by_value: bool,
    ) -> None:
        self.accept = cover.accept
        self.required = cover.required
        self.nodes = nodes
        self.sums = sums
        self.steps = steps
        self.by_value = by_value
        self.best: int | None = None
        self.far: int | None = None
        self.here: list[int] | None = None
        self.between: list[list[int]] = []
        self.near: list[list[int]] = []
        self._tops: dict[tuple[int, int], list[int]] = {}

    def measure(self, distances: Distances, held: list[int], choose: int) -> int:
        """Read the distances needed; returns the distance that the required nodes make."""
        nodes = self.nodes
        self.here = [
            2 * (distances.here(i) + sum(distances.between(i, j) for j in held)) for i in nodes
        ]
        self.near = [[0] * len(nodes)]
        if choose > 1:
            self.between, near = distances.tables(tuple(nodes))
            self.near += near
        return distances.total(self.required)

    def top(self, s: int, place: int, count: int) -> int:
        """The most that ``count`` of the NUMA nodes still open can add to sum ``s``."""
        tops = self._tops.get((s, place))
        if tops is None:
            weights = self.sums[s]
            rest = weights[:place] if self.by_value else weights[place:]
            rest.sort(reverse=True)
            tops = self._tops[s, place] = [0, *accumulate(rest)]
        return tops[count]

    def run(
        self, place: int, choose: int, mask: int, lack: list[int], far: int, least: int
    ) -> None:
        """Try every way to choose the rest.

        Args:
            place: the open NUMA nodes are those before it (by value) or from it on (by rank).
            choose: how many are still to be chosen.
            mask: chosen so far.
            lack: what each sum still lacks.
            far: distance of ``mask``.
            least: the least distance that a completion can have.
        """
        if not choose:
            self.offer(mask, far)
            return
        n = len(self.nodes)
        tries = range(choose - 1, place) if self.by_value else range(place, n - choose + 1)
        rest = choose - 1
        for c in tries:
            if not self.steps.take():
                raise _OutOfSteps
            after = [a - weights[c] for a, weights in zip(lack, self.sums, strict=True)]
            beyond = c if self.by_value else c + 1
            if any(a > 0 and self.top(s, beyond, rest) < a for s, a in enumerate(after)):
                continue
            here = self.here
            if here is None:
                self.run(beyond, rest, mask | 1 << self.nodes[c], after, 0, 0)
            else:
                reach = far + here[c] // 2
                if rest:
                    # What each open node adds grows by its distance to the one just chosen.
                    self.here = list(map(add, here, self.between[c]))
                nearest = max(least, self.bound(beyond, rest, reach))
                if self.far is None or nearest < self.far:
                    self.run(beyond, rest, mask | 1 << self.nodes[c], after, reach, nearest)
                self.here = here
            # Whatever comes later is at best as close, and later in the order.
            if self.far is not None and least >= self.far:
                return

    def bound(self, place: int, choose: int, far: int) -> int:
        """The least distance any completion can have."""
        if not choose or self.here is None:
            return far
        near = self.near[choose - 1]
        span = slice(0, place) if self.by_value else slice(place, None)
        adds: list[int] = sorted(map(add, self.here[span], near[span]))
        return far + -(-sum(adds[:choose]) // 2)

    def offer(self, mask: int, far: int) -> None:
        """Keep a complete mask if it is accepted and closer than the best so far."""
        if (self.far is None or far < self.far) and (self.accept is None or self.accept(mask)):
            self.best, self.far = mask, far


def best_mask(
    cover: Cover,
    width: int,
    order: Order | None,
    distances: Distances | None,
    steps: Steps,
) -> int | None:
    """The best mask of exactly ``width`` NUMA nodes that has everything; None when there is none.

    Order: least distance first (with ``distances``), then ``order``.

    Args:
        cover: what is needed; required NUMA nodes are part of the width.
        width: number of NUMA nodes.
        order: tie-break; by integer value when None.
        distances: None leaves distance out.
        steps: budget; ``steps.exact`` tells afterwards whether the search was complete.
    """
    required, within = cover.required, cover.within
    choose = width - required.bit_count()
    if choose < 0 or required & ~within or width > within.bit_count():
        return None
    by_value = order is None or order.by_value
    free = within & ~required
    nodes = _members(free) if order is None else order.within(free)
    held = _members(required)
    lack: list[int] = []
    sums: list[list[int]] = []
    for weights, need in cover.sums:
        rest = need - sum(weights.get(i, 0) for i in held)
        if rest > 0:
            lack.append(rest)
            sums.append([weights.get(i, 0) for i in nodes])
    if choose > 1 and len(sums) > 1:
        # Every sum alone may be reachable where all together are not: the sum of the parts that
        # a node fills, rounded up, must reach one whole for each.
        joint = [
            sum(
                -(-min(weights[c], need) * _SCALE // need)
                for weights, need in zip(sums, lack, strict=True)
            )
            for c in range(len(nodes))
        ]
        lack.append(_SCALE * len(sums))
        sums.append(joint)
    search = _Search(cover, nodes, sums, steps, by_value)
    far = 0 if distances is None else search.measure(distances, held, choose)
    start = len(nodes) if by_value else 0
    try:
        if all(search.top(s, start, choose) >= a for s, a in enumerate(lack)):
            search.run(start, choose, required, lack, far, search.bound(start, choose, far))
    except _OutOfSteps:
        guess = greedy_mask(cover, order, width)
        best = search.best
        if guess is not None and (
            best is None
            or (distances is not None and distances.total(guess) < distances.total(best))
        ):
            search.best = guess
    steps.close()
    return search.best


def bits_of(mask: int) -> Iterator[int]:
    """The NUMA nodes of a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Dimension:
    """One thing that a mask must have enough of.

    Attributes:
        weights: NUMA node to quantity, positive ones only. With ``kinds`` a node's weight is
            only an upper bound of what it adds.
        need: the quantity asked for.
        kinds: devices by the mask of their NUMA nodes, with how many there are of each, or memory
            by the mask of the NUMA nodes it serves; None when each has one NUMA node.
    """

    __slots__ = ("kinds", "need", "weights")

    def __init__(
        self, weights: Weights, need: int, kinds: tuple[tuple[int, int], ...] | None = None
    ) -> None:
        self.weights = weights
        self.need = need
        self.kinds = kinds

    def have(self, mask: int) -> int:
        """What the mask has of it."""
        if self.kinds is not None:
            return sum(count for nodes, count in self.kinds if nodes & mask)
        weights = self.weights
        total = 0
        while mask:
            low = mask & -mask
            total += weights.get(low.bit_length() - 1, 0)
            mask ^= low
        return total


def _cover(dimensions: Sequence[Dimension], within: int) -> Cover:
    exact = all(d.kinds is None for d in dimensions)

    def met(mask: int) -> bool:
        return all(d.have(mask) >= d.need for d in dimensions)

    return Cover(
        within=within,
        required=0,
        sums=[(d.weights, d.need) for d in dimensions],
        accept=None if exact else met,
    )


def _least_width(cover: Cover, at_least: int, otherwise: int, steps: Steps) -> int:
    """The least width with a mask that meets the cover; ``otherwise`` when there is none.

    With one sum it is the number of largest summands needed. With several that number, the largest
    of them, is where the search begins and a greedy mask is where it ends.
    """
    low = max(cover.floor(), at_least)
    if cover.single and low >= at_least:
        return low if low <= cover.within.bit_count() else otherwise
    if low > cover.within.bit_count() or not cover.accepts(cover.within):
        return otherwise
    greedy = greedy_mask(cover, None)
    high = (cover.within if greedy is None else greedy).bit_count()
    for width in range(low, high):
        if best_mask(cover, width, None, None, steps.share()) is not None:
            return width
    return max(high, low)


@dataclass(slots=True, eq=False)
class Family:
    """The hints of one demand, or the one list that several demands share.

    Attributes:
        resource: for texts.
        universe: NUMA nodes that masks are made of.
        free: dimensions by what is available; capacity: the same by what an empty machine has.
        required: NUMA nodes in every mask.
        alone: NUMA nodes that may be a mask of one.
        within: NUMA nodes that wider masks of the additive part are made of.
        groups: group rule, NUMA node with assignments to its group's mask; None without the rule.
        socket_bits: with ``align-by-socket``, one mask for each socket.
        nil: there is a hint without mask: True preferred, False not preferred; None none.
    """

    resource: str
    universe: int = 0
    free: tuple[Dimension, ...] = ()
    capacity: tuple[Dimension, ...] = ()
    required: int = 0
    alone: int = 0
    within: int = 0
    groups: Mapping[int, int] | None = None
    socket_bits: tuple[int, ...] = ()
    nil: bool | None = None
    width: int = 0
    aligned_sockets: int = 0

    @property
    def plain(self) -> bool:
        """It is upward closed and its sums alone decide."""
        return self.groups is None and all(d.kinds is None for d in self.free)

    @property
    def least(self) -> int:
        """Least width of the additive part; with groups, masks of one are explicit."""
        return 1 if self.groups is None else 2

    def contains(self, mask: int) -> bool:
        """Say whether the mask is a hint, preferred or not."""
        if self.nil is not None or not mask or mask & ~self.universe or self.required & ~mask:
            return False
        if self.groups is not None:
            if not mask & (mask - 1):
                if not mask & self.alone:
                    return False
            elif any(group != mask for i, group in self.groups.items() if mask >> i & 1):
                return False
        return all(d.have(mask) >= d.need for d in self.free)

    def widen(self, width: int) -> None:
        """Hints of this width are preferred."""
        self.width = width
        # The kubelet divides the machine's counts; fewer NUMA nodes than sockets switches it off.
        sockets = len(self.socket_bits)
        per_socket = self.universe.bit_count() // sockets if sockets else 0
        self.aligned_sockets = -(-width // per_socket) if per_socket else 0

    def prefers_width(self, mask: int) -> bool:
        """Say whether a hint of this mask would be preferred."""
        if mask.bit_count() == self.width:
            return True
        return bool(self.aligned_sockets) and self.aligned_sockets == sum(
            1 for s in self.socket_bits if s & mask
        )

    def prefers(self, mask: int) -> bool:
        """Say whether the mask is a preferred hint."""
        return self.prefers_width(mask) and self.contains(mask)

    def explicit(self) -> set[int]:
        """Masks outside the additive part that may be hints; `contains` decides."""
        if self.groups is None:
            return set()
        return {1 << i for i in bits_of(self.alone)}.union(self.groups.values())

    def cover(self) -> Cover:
        """The additive part as a search problem; accepts only real members."""
        return Cover(
            within=self.within,
            required=self.required,
            sums=[(d.weights, d.need) for d in self.free],
            accept=None if self.plain else self.contains,
        )

    def narrowest(self, steps: Steps) -> int:
        """Width of the narrowest hint with a mask, 0 when there is none."""
        widths = [m.bit_count() for m in self.explicit() if self.contains(m)]
        none = self.universe.bit_count() + 1
        width = _least_width(self.cover(), self.least, none, steps)
        if width < none:
            widths.append(width)
        return min(widths, default=0)

    def possible(self) -> bool:
        """Say whether there is any hint with a mask."""
        return self.contains(self.within) or any(map(self.contains, self.explicit()))


def _weights(amounts: Mapping[int, int], universe: int) -> dict[int, int]:
    return {i: v for i, v in amounts.items() if v > 0 and i >= 0 and universe >> i & 1}


def _dimension(demand: ResourceDemand, amounts: Mapping[int, int], universe: int) -> Dimension:
    """A quantity; what serves several NUMA nodes counts once, like a device that has several."""
    weights = _weights(amounts, universe)
    if not demand.near:
        return Dimension(weights, demand.need)
    kinds = [(1 << i, amount) for i, amount in weights.items()]
    several = False
    for i, served in demand.near.items():
        amount, mask = amounts.get(i, 0), served.bits & universe
        if amount > 0 and mask:
            kinds.append((mask, amount))
            several = several or bool(mask & (mask - 1))
            for home in bits_of(mask):
                weights[home] = weights.get(home, 0) + amount
    return Dimension(weights, demand.need, tuple(kinds) if several else None)


def _mask(numa_nodes: Iterable[int]) -> int:
    bits = 0
    for i in numa_nodes:
        if i >= 0:
            bits |= 1 << i
    return bits


def _resource_family(demands: Sequence[ResourceDemand], machine: int, steps: Steps) -> Family:
    """The family of one quantity, or of several that are judged together."""
    universe = machine
    required = 0
    for d in demands:
        universe &= _mask(d.capacity)
        required |= d.required.bits
    family = Family(
        resource="+".join(d.resource for d in demands),
        universe=universe,
        required=required,
        alone=universe,
        within=universe,
        free=tuple([_dimension(d, d.available, universe) for d in demands]),
        capacity=tuple([_dimension(d, d.capacity, universe) for d in demands]),
    )
    # Demands that share a list share its group rule: the first that states one.
    ruling = next((d for d in demands if d.groups is not None), None)
    if ruling is not None and ruling.groups is not None:
        groups = {i: g.bits for i, g in ruling.groups.items() if universe >> i & 1}
        family.alone &= ~_mask(i for i, g in groups.items() if g & (g - 1))
        # A NUMA node with assignments that nobody put into a group is a group of its own.
        family.groups = {i: groups.get(i, 1 << i) for i in ruling.assigned if universe >> i & 1}
        family.within &= ~ruling.assigned.bits
    width = _least_width(_cover(family.capacity, universe), 1, universe.bit_count(), steps)
    sockets = demands[0].sockets
    if sockets is not None:
        by_socket: dict[int, int] = {}
        for i, socket in sockets.items():
            if universe >> i & 1:
                by_socket[socket] = by_socket.get(socket, 0) | 1 << i
        family.socket_bits = tuple(by_socket.values())
    family.widen(width)
    if not family.possible():
        family.nil = any(d.nothing_is_no_wish for d in demands)
    return family


def _device_dimension(masks: Iterable[int], need: int) -> Dimension:
    kinds: dict[int, int] = {}
    for m in masks:
        if m:
            kinds[m] = kinds.get(m, 0) + 1
    weights: dict[int, int] = {}
    several = False
    for m, count in kinds.items():
        several = several or bool(m & (m - 1))
        for i in bits_of(m):
            weights[i] = weights.get(i, 0) + count
    return Dimension(weights, need, tuple(kinds.items()) if several else None)


def _device_family(demand: DeviceDemand, machine: int, steps: Steps) -> Family:
    request = demand.request
    masks = {d.id: _mask(d.numa_nodes) & machine for d in request.devices}
    if not any(d.numa_nodes for d in request.devices):
        return Family(resource=request.resource, nil=True)
    if len(masks) < request.count:
        return Family(resource=request.resource, nil=False)
    every = (_device_dimension(masks.values(), request.count),)
    family = Family(
        resource=request.resource,
        universe=machine,
        alone=machine,
        within=machine,
        free=every,
        capacity=every,
    )
    family.widen(_least_width(_cover(every, machine), 1, machine.bit_count(), steps))
    if not family.possible():
        family.nil = False
    return family


def families_of(
    demands: Sequence[HintDemand], numa_ids: NUMASet, steps: Steps, *, one_width: bool = False
) -> list[Family]:
    """One family for each demand, in order; demands that share a list share the object.

    Args:
        demands: what is asked.
        numa_ids: the machine's NUMA nodes.
        steps: bounds the searches for preferred widths.
        one_width: the width that the neediest of them needs on an empty machine is preferred by
            all, instead of each one's own, as the kubelet has it.
    """
    machine = numa_ids.bits
    shared: dict[str, list[ResourceDemand]] = {}
    for demand in demands:
        if isinstance(demand, ResourceDemand) and demand.share is not None and demand.need > 0:
            shared.setdefault(demand.share, []).append(demand)
    done: dict[str, Family] = {}
    families: list[Family] = []
    for demand in demands:
        if demand.need <= 0:
            family = Family(resource=demand.resource, nil=True)
        elif isinstance(demand, DeviceDemand):
            family = _device_family(demand, machine, steps)
        elif demand.share is None:
            family = _resource_family([demand], machine, steps)
        elif demand.share in done:
            family = done[demand.share]
        else:
            family = _resource_family(shared[demand.share], machine, steps)
            done[demand.share] = family
        families.append(family)
    if one_width:
        width = max((f.width for f in families), default=0)
        for family in families:
            if family.nil is None:
                family.widen(width)
    return families


def spread_masks(machine: int) -> list[int]:
    """Every subset of the machine's NUMA nodes, by its index.

    Bit *k* of the index stands for the *k*-th NUMA node; order by index is order by value.
    """
    masks = [0]
    for i in bits_of(machine):
        bit = 1 << i
        masks += [m | bit for m in masks]
    return masks


def hints_by_index(family: Family, masks: Sequence[int]) -> list[int]:
    """For each subset 1 when it is a hint of the family, else 0."""
    if not family.plain:
        return [1 if family.contains(m) else 0 for m in masks]
    flags = [1] * len(masks)
    members = [m for m in masks if m and not m & (m - 1)]
    for d in family.free:
        totals = [0]
        for m in members:
            weight = d.weights.get(m.bit_length() - 1, 0)
            totals += [t + weight for t in totals]
        need = d.need
        flags = [f if t >= need else 0 for f, t in zip(flags, totals, strict=True)]
    outside = ~family.universe
    required = family.required
    if required or masks[-1] & outside:
        return [
            1 if f and not (m & outside) and not (required & ~m) else 0
            for f, m in zip(flags, masks, strict=True)
        ]
    return flags


def _over_supersets(counts: list[int], with_higher: Callable[[int, int], int]) -> list[int]:
    """For each index the sum over all indexes that contain it, with ``add``; undone with ``sub``.

    One pass for each bit puts what the indexes with the bit have into those without it. The
    indexes are taken in runs or in strides, whichever are longer.
    """
    size = len(counts)
    half = 1
    while half < size:
        step = half * 2
        if half * half < size:
            for start in range(half):
                counts[start::step] = map(
                    with_higher, counts[start::step], counts[start + half :: step]
                )
        else:
            for start in range(0, size, step):
                middle = start + half
                counts[start:middle] = map(
                    with_higher, counts[start:middle], counts[middle : start + step]
                )
        half = step
    return counts


def reachable_masks(families: Sequence[Family], machine: int) -> tuple[list[int], int]:
    """All intersections of one hint of each list but the empty one, and *bnp*.

    The number of ways to reach at least a mask, by taking from each list a hint that contains it,
    is a product of sums over supersets; the ways to reach exactly it follow by subtraction.
    """
    masks = spread_masks(machine)
    neediest = 0
    ways = [1] * len(masks)
    done: dict[int, list[int]] = {}
    for family in families:
        if family.nil is not None:
            continue  # all of the machine: intersects nothing away
        sums = done.get(id(family))
        if sums is None:
            flags = hints_by_index(family, masks)
            neediest = max(neediest, min(m.bit_count() for m in compress(masks, flags)))
            sums = done[id(family)] = _over_supersets(flags, add)
        ways = list(map(mul, ways, sums))
    return [m for m in compress(masks, _over_supersets(ways, sub)) if m], neediest


def result_class(width: int, neediest: int) -> tuple[int, int]:
    """First two parts of the key of a result that is not preferred."""
    if width == neediest:
        return (0, 0)
    return (1, -width) if width < neediest else (2, width)


def best_by_counting(
    families: Sequence[Family], machine: int, order: Order, distances: Distances | None
) -> int | None:
    """The best intersection that is not preferred; None when every one is empty."""
    masks, neediest = reachable_masks(families, machine)
    if not masks:
        return None
    widths = {m.bit_count() for m in masks}
    # Order: the class of the result; one width has one class.
    width = min(widths, key=lambda w: result_class(w, neediest))
    return pick([m for m in masks if m.bit_count() == width], order, distances)


# Resolution of the parts of a slack; any value is correct, a larger one rounds less.
_SLACK_SCALE = 1 << 20


class Reach:
    """The best reachable intersection on a large machine; lives for one merge.

    Lists are resolved into alternatives (*states*): an intersection of explicit masks and additive
    universes, plus the lists whose additive part takes a share in giving up NUMA nodes.
    """

    def __init__(
        self,
        families: Sequence[Family],
        machine: int,
        order: Order,
        distances: Distances | None,
        steps: Steps,
    ) -> None:
        self.families = [f for f in families if f.nil is None]
        self.machine = machine
        self.order = order
        self.distances = distances
        self.steps = steps
        narrowest: dict[int, int] = {}
        for f in self.families:
            if id(f) not in narrowest:
                narrowest[id(f)] = f.narrowest(steps)
        self.neediest = max(narrowest.values())

    def best(self) -> int | None:
        """The best mask; None when every intersection is empty."""
        found = [self.within_state(base, parts) for base, parts in self.states()]
        if not found:
            return None
        width = min((m.bit_count() for m in found), key=lambda w: result_class(w, self.neediest))
        return pick([m for m in found if m.bit_count() == width], self.order, self.distances)

    def states(self) -> list[tuple[int, tuple[Family, ...]]]:
        """Every way to take an explicit mask or the additive part of each list."""
        states: dict[tuple[int, tuple[int, ...]], tuple[Family, ...]] = {(self.machine, ()): ()}
        for place, family in enumerate(self.families):
            masks = sorted(m for m in family.explicit() if family.contains(m))
            part = family.contains(family.within)
            after: dict[tuple[int, tuple[int, ...]], tuple[Family, ...]] = {}
            for (base, places), parts in states.items():
                if part and base & family.within:
                    after[base & family.within, (*places, place)] = (*parts, family)
                for mask in masks:
                    if base & mask:
                        after.setdefault((base & mask, places), parts)
            states = after
        return [(base, parts) for (base, _), parts in states.items()]

    def within_state(self, base: int, parts: tuple[Family, ...]) -> int:
        """The best mask reachable by giving up NUMA nodes of ``base``."""
        width = base.bit_count()
        if not parts or width <= self.neediest:
            return base
        for wanted in range(self.neediest, width):
            mask = self.of_width(wanted, base, parts)
            if mask is not None:
                return mask
        return base

    def of_width(self, width: int, base: int, parts: tuple[Family, ...]) -> int | None:
        """The best reachable mask of one width."""
        found: list[int] = []
        for part in dict.fromkeys(parts):
            # One list makes the mask by itself, the others keep everything.
            cover = part.cover()
            cover.within &= base
            mask = best_mask(cover, width, self.order, self.distances, self.steps.share())
            if mask is not None:
                found.append(mask)
        sharing = Sharing(base, parts)
        if sharing.worth_trying:
            steps = self.steps.share()
            cover = Cover(
                base, sharing.kept, [sharing.price], lambda mask: sharing.reaches(mask, steps)
            )
            mask = best_mask(cover, width, self.order, self.distances, steps)
            if mask is not None:
                found.append(mask)
        return pick(found, self.order, self.distances) if found else None


class Sharing:
    """Which NUMA nodes the lists can give up between them.

    Each list can do without NUMA nodes up to its *slack*, what all of its NUMA nodes have above
    the need. A mask is reachable when the NUMA nodes of ``base`` outside it can be dealt out so
    that no list gives up more than that.

    Attributes:
        kept: NUMA nodes that no list can give up.
        price: weights and the sum that a mask must at least hold: the part of a slack that giving
            up a NUMA node costs the list to which it costs least. All slacks together are worth
            one each.
    """

    def __init__(self, base: int, parts: Sequence[Family]) -> None:
        self.base = base
        self.parts = parts
        self.kept = 0
        # By part: its dimensions, when they and what is required decide alone.
        self.sums = [p.free if p.plain else None for p in parts]
        self.slacks = [[d.have(p.within) - d.need for d in p.free] for p in parts]
        self.offers: dict[int, list[tuple[int, int]]] = {}
        weights: dict[int, int] = {}
        for i in bits_of(base):
            offers: list[tuple[int, int]] = []
            for place, part in enumerate(parts):
                if not self.can_spare(place, i, part.within, self.slacks[place]):
                    continue
                # The mean over its dimensions: what a list gives up costs it one at most in each.
                # Devices on several NUMA nodes may stay in reach, so they cost nothing here.
                cost = sum(
                    d.weights.get(i, 0) * _SLACK_SCALE // slack
                    for d, slack in zip(part.free, self.slacks[place], strict=True)
                    if slack > 0 and d.kinds is None
                )
                offers.append((cost // len(part.free), place))
            if offers:
                # Order: cheapest first, then the list's place.
                offers.sort()
                self.offers[i] = offers
                weights[i] = offers[0][0]
            else:
                self.kept |= 1 << i
        self.price: tuple[Mapping[int, int], int] = (
            weights,
            sum(weights.values()) - _SLACK_SCALE * len(parts),
        )
        # Order: the dearest first, they have the fewest takers; then by number.
        self.dearest = sorted(weights, key=lambda i: (-weights[i], i))

    @property
    def worth_trying(self) -> bool:
        """More than one list could take part, or one that has NUMA nodes elsewhere."""
        return len(self.parts) > 1 or bool(self.parts[0].within & ~self.base)

    def can_spare(self, place: int, i: int, held: int, slacks: Sequence[int]) -> bool:
        """Say whether a list that holds ``held`` can do without one NUMA node more."""
        sums = self.sums[place]
        if sums is None:
            return self.parts[place].contains(held & ~(1 << i))
        if self.parts[place].required >> i & 1:
            return False
        for d, slack in zip(sums, slacks, strict=True):
            if d.weights.get(i, 0) > slack:
                return False
        return held != 1 << i

    def reaches(self, mask: int, steps: Steps) -> bool:
        """Say whether the mask is an intersection of the lists' masks."""
        if any(p.contains(mask) for p in self.parts):
            return True
        given_up = [i for i in self.dearest if not mask >> i & 1]
        return self._deal(given_up, 0, [p.within for p in self.parts], self.slacks[:], steps)

    def _deal(
        self,
        given_up: list[int],
        place: int,
        held: list[int],
        slacks: list[list[int]],
        steps: Steps,
    ) -> bool:
        """Hand out the NUMA nodes from ``place`` on; ``held`` and ``slacks`` are by list."""
        if place == len(given_up):
            return True
        i = given_up[place]
        for _, taker in self.offers[i]:
            if not steps.take():
                return False
            before, slack = held[taker], slacks[taker]
            if self.can_spare(taker, i, before, slack):
                held[taker] = before & ~(1 << i)
                slacks[taker] = [
                    s - d.weights.get(i, 0)
                    for s, d in zip(slack, self.parts[taker].free, strict=True)
                ]
                if self._deal(given_up, place + 1, held, slacks, steps):
                    return True
                held[taker], slacks[taker] = before, slack
        return False


EXACT_UPTO = 10
"""Up to this many NUMA nodes a merge is the kubelet's without exception."""

STEP_LIMIT = 2000
"""Steps of one merge on a larger machine; at 2 to 10 µs each the worst merge takes milliseconds."""


class Merged(msgspec.Struct, frozen=True):
    """The best result.

    Attributes:
        mask: its NUMA nodes; all of the machine's when nothing restricts it.
        preferred: whether it is a preferred result.
    """

    mask: int
    preferred: bool


def _devices_by_node(request: DeviceRequest) -> dict[int, int]:
    """How many devices each NUMA node has, which count on all of theirs; empty for no wish."""
    counts: dict[int, int] = {}
    for device in request.devices:
        for i in device.numa_nodes:
            counts[i] = counts.get(i, 0) + 1
    return counts


def one_numa_node(
    demands: Sequence[HintDemand],
    machine: int,
    distance: Callable[[int, int], int] | None,
    rank: Mapping[int, int] | None,
) -> int | None:
    """The best preferred mask of one NUMA node, the everyday case, fast: no lists, no groups.

    None says nothing but that `merge` has to look. A preferred mask of one node is narrower than
    any other result, so finding one ends the search.
    """
    fitting: list[int] | None = None
    shared: list[ResourceDemand] = []
    for d in demands:
        if not isinstance(d, ResourceDemand):
            need = d.request.count
            counts = _devices_by_node(d.request) if need > 0 else {}
            # Devices of which none has a NUMA node are no wish. Where enough are free on one NUMA
            # node, an empty machine has enough there as well.
            if counts:
                fitting = [
                    i
                    for i, free in counts.items()
                    if free >= need
                    and i >= 0
                    and machine >> i & 1
                    and (fitting is None or i in fitting)
                ]
                if not fitting:
                    return None
            continue
        need = d.need
        if need <= 0:
            continue
        if d.groups is not None:
            return None
        if d.share is not None:
            shared.append(d)
        capacity, available = together(d.near, d.capacity), together(d.near, d.available)
        required = d.required.bits
        among: Iterable[tuple[int, int]] = (
            available.items() if fitting is None else [(i, available.get(i, 0)) for i in fitting]
        )
        fitting = [
            i
            for i, free in among
            if free >= need
            and i in capacity
            and i >= 0
            and machine >> i & 1
            and not required & ~(1 << i)
        ]
        if not fitting:
            return None
        for i, amount in capacity.items():
            if amount >= need and i >= 0 and machine >> i & 1:
                break
        else:
            return None
    if fitting is None:
        return None
    # Demands with a common list have a common width: one NUMA node has to hold them all.
    if len(shared) > 1 and not any(
        all(together(d.near, d.capacity)[i] >= d.need for d in shared) for i in fitting
    ):
        return None
    if len(fitting) == 1:
        return 1 << fitting[0]
    if rank is None:
        return 1 << min(fitting, key=lambda i: (0 if distance is None else distance(i, i), i))
    last = max(rank.values(), default=0) + 1
    best = min([(0 if distance is None else distance(i, i), rank.get(i, last), i) for i in fitting])
    return 1 << best[-1]


def preferred_mask(
    families: Sequence[Family],
    machine: int,
    order: Order,
    distances: Distances | None,
    steps: Steps,
    but: frozenset[int] = frozenset(),
) -> int | None:
    """The best mask that every list prefers, None when there is none.

    Args:
        families: the lists.
        machine: mask of all NUMA nodes.
        order: tie-break.
        distances: None leaves distance out.
        steps: budget.
        but: masks to leave out, for "what would have been next".
    """
    if any(f.nil is False for f in families):
        return None
    asking = [f for f in families if f.nil is None]
    if not asking:
        return None if machine in but else machine
    named = {m for f in asking for m in f.explicit() if all(g.prefers(m) for g in asking)} - but
    fixed = {f.width for f in asking if not f.aligned_sockets}
    if len(fixed) > 1:
        return None
    within = required = -1
    for f in asking:
        within &= f.within
        required = f.required if required == -1 else required | f.required
    plain = not but and all(f.plain for f in asking)
    sums = [(d.weights, d.need) for f in asking for d in f.free]
    # Only socket alignment lets masks of several widths be preferred.
    for width in fixed or range(1, within.bit_count() + 1):
        masks = [m for m in named if m.bit_count() == width]
        if width > 1 or all(f.groups is None for f in asking):
            judges = [f for f in asking if not f.plain or f.width != width]

            def accept(mask: int, judges: list[Family] = judges) -> bool:
                return mask not in but and all(f.prefers(mask) for f in judges)

            cover = Cover(within, required, sums, None if plain and not judges else accept)
            found = best_mask(cover, width, order, distances, steps.share())
            if found is not None:
                masks.append(found)
        if masks:
            return pick(masks, order, distances)
    return None


def single_mask(families: Sequence[Family], order: Order) -> int | None:
    """The best one-node mask that every list prefers, -1 when nobody wants any, None when none is.

    Distances are left out, as in the kubelet's single-numa-node policy.
    """
    if any(f.nil is False for f in families):
        return None
    masks: list[int] | None = None
    for f in families:
        if f.nil is not None:
            continue
        among = [1 << i for i in order.nodes] if masks is None else masks
        masks = [m for m in among if f.prefers(m)]
    return -1 if masks is None else min(masks, key=order.key, default=None)


def merge(
    families: Sequence[Family],
    machine: int,
    order: Order,
    distances: Distances | None,
    steps: Steps,
    exact_upto: int = EXACT_UPTO,
) -> Merged:
    """The best result of all ways to combine the lists.

    Args:
        families: one for each resource; shared lists appear once for each.
        machine: mask of all NUMA nodes.
        order: tie-break.
        distances: None leaves distance out.
        steps: budget; it is not enforced on machines of up to ``exact_upto`` NUMA nodes.
        exact_upto: largest number of NUMA nodes at which all masks are looked at.
    """
    mask = preferred_mask(families, machine, order, distances, steps)
    if mask is not None:
        return Merged(mask, True)
    if all(f.nil is not None for f in families):
        return Merged(machine, False)
    if machine.bit_count() <= exact_upto:
        mask = best_by_counting(families, machine, order, distances)
    else:
        mask = Reach(families, machine, order, distances, steps).best()
    return Merged(machine if mask is None else mask, False)
