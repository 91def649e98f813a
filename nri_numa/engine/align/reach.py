"""The best intersection that several hint lists can reach, on machines too large to count masks.

A list is upward closed but for masks that can be named, so each list either takes one of its named
masks or takes part in *giving up* NUMA nodes: an intersection is reachable when each NUMA node
outside it can be given up by some list that does without it. With a mask every wider one (within
what all lists share) is reachable too, so the answer is as wide as the neediest list's narrowest
mask, unless named masks forbid it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nri_numa.engine.align.counting import result_class
from nri_numa.engine.align.families import Family, bits_of
from nri_numa.engine.align.search import Cover, Distances, Order, Steps, best_mask, pick

# Resolution of the parts of a slack; any value is correct, a larger one rounds less.
_SCALE = 1 << 20


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
