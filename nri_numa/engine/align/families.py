"""The hint list of a demand as a *family* of NUMA masks that is asked, not enumerated.

Masks are plain integers here, bit *i* for NUMA node *i*.

Nearly every family is *upward closed*: with a mask it contains every wider one, because needs are
met by sums. The exceptions are few and can be listed: the memory groups of the kubelet. So a family
consists of

* an additive part: all masks of at least ``least`` NUMA nodes within ``within`` that meet every
  `Dimension` and hold ``required``;
* ``explicit`` masks, which are tested one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nri_numa.engine.align.hints import DeviceDemand, HintDemand, ResourceDemand
from nri_numa.engine.align.search import Cover, Steps, Weights, best_mask, greedy_mask
from nri_numa.machine.cpuset import NUMASet


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
