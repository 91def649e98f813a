"""Combines the hint lists of several resources into one NUMA mask, without their product.

The definition is the kubelet's: take one hint of each list in every possible way, intersect the
masks, call the result preferred when all hints are and all masks are equal, drop empty ones, and
keep the best. The best is the smallest by a total order (w width, d distance, t tie-break; *bnp*,
the width of the neediest list's narrowest mask):

===============================  ==================
result                           key
===============================  ==================
preferred (before all others)    (w, d, t)
not preferred, w = bnp           (0, 0, d, t)
not preferred, w < bnp           (1, -w, d, t)
not preferred, w > bnp           (2, w, d, t)
===============================  ==================

What makes it cheap (docs/adr/0004-hint-merge.md has the arguments):

* a preferred result is a mask that every list prefers: one search over masks of one width;
* whether a mask is a preferred result decides alone, so the rest is looked at only if none is;
* up to `EXACT_UPTO` NUMA nodes the reachable intersections are counted for all masks at once, by
  sums over supersets;
* beyond, lists are upward closed but for masks that can be named. An intersection ``m`` is then
  reachable when each NUMA node outside it can be *given up* by some list that does without it, and
  with ``m`` every wider mask is reachable too: one more search, over masks of width bnp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import add, mul, sub

from nri_numa.engine.families import Family, bits_of
from nri_numa.engine.hints import Demand, ResourceDemand
from nri_numa.engine.search import Cover, Distances, Order, Steps, best_mask

EXACT_UPTO = 10
"""Up to this many NUMA nodes a merge is the kubelet's without exception."""

STEP_LIMIT = 2000
"""Steps of one merge on a larger machine; at 2 to 10 µs each the worst merge takes milliseconds."""

# Alternatives kept while explicit masks of several lists are combined; beyond, the merge is
# reported as not exact. Real lists have a handful.
_STATES = 256

_SCALE = 1 << 20


@dataclass(frozen=True, slots=True)
class Merged:
    """The best result.

    Attributes:
        mask: its NUMA nodes; all of the machine's when nothing restricts it.
        preferred: whether it is a preferred result.
    """

    mask: int
    preferred: bool


def _key(mask: int, order: Order, distances: Distances | None) -> tuple[int, tuple[int, ...]]:
    """Order of masks of one width: distance, then tie-break."""
    return (0 if distances is None else distances.total(mask), order.key(mask))


def _pick(masks: Sequence[int], order: Order, distances: Distances | None) -> int:
    """The best of some masks of one width."""
    if len(masks) == 1:
        return masks[0]
    return min(masks, key=lambda m: _key(m, order, distances))


def _narrowest(masks: Iterable[int], order: Order, distances: Distances | None) -> int | None:
    """The best of some preferred masks."""
    return min(masks, key=lambda m: (m.bit_count(), _key(m, order, distances)), default=None)


def one_numa_node(
    demands: Sequence[Demand],
    machine: int,
    distance: Callable[[int, int], int] | None,
    rank: Mapping[int, int] | None,
) -> int | None:
    """The best preferred mask of one NUMA node, for quantities only: the everyday case, fast.

    None says nothing but that `merge` has to look. A preferred mask of one node is narrower than
    any other result, so finding one ends the search.
    """
    fitting: list[int] | None = None
    shared: list[ResourceDemand] = []
    for d in demands:
        if not isinstance(d, ResourceDemand):
            return None
        need = d.need
        if need <= 0:
            continue
        if d.groups is not None or d.reusable:
            return None
        if d.share is not None:
            shared.append(d)
        capacity, available, required = d.capacity, d.available, d.required.bits
        among: Iterable[int] = available if fitting is None else fitting
        fitting = [
            i
            for i in among
            if available.get(i, 0) >= need and i in capacity and not required & ~(1 << i)
        ]
        if not fitting:
            return None
        for i, amount in capacity.items():
            if amount >= need and machine >> i & 1:
                break
        else:
            return None
    if fitting is None:
        return None
    fitting = [i for i in fitting if i >= 0 and machine >> i & 1]
    # Demands with a common list have a common width: one NUMA node has to hold them all.
    if len(shared) > 1 and not any(all(d.capacity[i] >= d.need for d in shared) for i in fitting):
        return None
    if not fitting:
        return None
    if len(fitting) == 1:
        return 1 << fitting[0]
    if rank is None:
        return 1 << min(fitting, key=lambda i: (0 if distance is None else distance(i, i), i))
    last = max(rank.values(), default=0) + 1
    return 1 << min(
        fitting,
        key=lambda i: (0 if distance is None else distance(i, i), rank.get(i, last), i),
    )


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
    # A list with a preferred hint without mask goes along with anything.
    asking = [f for f in families if f.nil is None and not f.nil_too]
    if not asking:
        masks = {machine}.union(*(f.listed[0] for f in families if f.listed is not None)) - but
        return _narrowest(masks, order, distances)
    named: set[int] = set()
    for f in asking:
        if f.listed is not None:
            # Nothing outside this list can be preferred.
            named = {m for m in f.listed[0] if all(g.prefers(m) for g in asking)} - but
            return min(
                named, key=lambda m: (m.bit_count(), _key(m, order, distances)), default=None
            )
        named.update(f.explicit())
    return _preferred_additive(asking, named, order, distances, steps, but)


def _preferred_additive(
    asking: Sequence[Family],
    named: set[int],
    order: Order,
    distances: Distances | None,
    steps: Steps,
    but: frozenset[int],
) -> int | None:
    named = {m for m in named if all(f.prefers(m) for f in asking)} - but
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
            return _pick(masks, order, distances)
    return None


def single_mask(families: Sequence[Family], order: Order) -> int | None:
    """The best one-node mask that every list prefers, -1 when nobody wants any, None when none is.

    Distances are left out, as in the kubelet's single-numa-node policy.
    """
    if any(f.nil is False for f in families):
        return None
    masks: list[int] | None = None
    for f in families:
        if f.nil is not None or f.nil_too:
            continue
        among = [1 << i for i in order.nodes] if masks is None else masks
        masks = [m for m in among if f.prefers(m)]
    if masks is None:
        wished = {m for f in families if f.listed for m in f.listed[0] if not m & (m - 1)}
        return min(wished, key=order.key, default=-1)
    return min(masks, key=order.key, default=None)


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
        mask = _best_of_all(families, machine, order, distances)
    else:
        mask = _Reach(families, machine, order, distances, steps).best()
    return Merged(machine if mask is None else mask, False)


# --- up to EXACT_UPTO NUMA nodes -----------------------------------------------------------------


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
    if family.nil is not None:
        return [0] * (len(masks) - 1) + [1]
    if not family.plain or family.listed is not None:
        found = [1 if family.contains(m) else 0 for m in masks]
        if family.nil_too is not None:
            found[-1] = 1
        return found
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
            if family.nil_too is not None and not family.contains(machine):
                widths = [m.bit_count() for m in compress(masks, flags[:-1])]
            else:
                widths = [m.bit_count() for m in compress(masks, flags)]
            neediest = max(neediest, min(widths))
            sums = done[id(family)] = _over_supersets(flags, add)
        ways = list(map(mul, ways, sums))
    return [m for m in compress(masks, _over_supersets(ways, sub)) if m], neediest


def result_class(width: int, neediest: int) -> tuple[int, int]:
    """First two parts of the key of a result that is not preferred."""
    if width == neediest:
        return (0, 0)
    return (1, -width) if width < neediest else (2, width)


def _best_of_all(
    families: Sequence[Family], machine: int, order: Order, distances: Distances | None
) -> int | None:
    masks, neediest = reachable_masks(families, machine)
    if not masks:
        return None
    widths = {m.bit_count() for m in masks}
    # Order: the class of the result; one width has one class.
    width = min(widths, key=lambda w: result_class(w, neediest))
    return _pick([m for m in masks if m.bit_count() == width], order, distances)


# --- beyond EXACT_UPTO ---------------------------------------------------------------------------


class _Reach:
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
        return _pick([m for m in found if m.bit_count() == width], self.order, self.distances)

    def states(self) -> list[tuple[int, tuple[Family, ...]]]:
        """Every way to take an explicit mask or the additive part of each list."""
        states: dict[tuple[int, tuple[int, ...]], tuple[Family, ...]] = {(self.machine, ()): ()}
        for place, family in enumerate(self.families):
            masks = sorted(m for m in family.explicit() if family.contains(m))
            if family.nil_too is not None:
                masks.append(self.machine)
            part = family.additive and family.contains(family.within)
            after: dict[tuple[int, tuple[int, ...]], tuple[Family, ...]] = {}
            for (base, places), parts in states.items():
                if part and base & family.within:
                    after[base & family.within, (*places, place)] = (*parts, family)
                for mask in masks:
                    if base & mask:
                        after.setdefault((base & mask, places), parts)
            if len(after) > _STATES:
                self.steps.exact = False
                # Order: as built, which depends on the order of lists and masks' values only.
                after = dict(list(after.items())[:_STATES])
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
        sharing = _Sharing(base, parts)
        if sharing.worth_trying:
            steps = self.steps.share()
            cover = Cover(
                base, sharing.kept, [sharing.price], lambda mask: sharing.reaches(mask, steps)
            )
            mask = best_mask(cover, width, self.order, self.distances, steps)
            if mask is not None:
                found.append(mask)
        return _pick(found, self.order, self.distances) if found else None


class _Sharing:
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
                    d.weights.get(i, 0) * _SCALE // slack
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
            sum(weights.values()) - _SCALE * len(parts),
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
