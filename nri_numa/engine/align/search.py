"""The best mask of a given width that covers several needs at once.

The question "which `width` NUMA nodes together have at least this much of each thing, and are
closest to one another" is a covering problem with a quadratic goal, so there is no algorithm that
is fast on every input. On real machines the answer is near the first candidates looked at. The
search walks masks in the order of the tie-break, so that the first of equally close ones found is
the best, and leaves a branch when even its most generous continuation lacks something or is
farther apart than the best mask so far. Work is counted in *steps* (NUMA nodes tried); a search
that runs out of them says so and returns the best it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

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
