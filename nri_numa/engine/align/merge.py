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

* a preferred result is a mask that every list prefers: one search over masks of one width. When
  there is one, nothing else is looked at;
* up to `EXACT_UPTO` NUMA nodes the reachable intersections are counted for all masks at once
  (`nri_numa.engine.align.counting`);
* beyond, one more search over masks of width bnp finds the best (`nri_numa.engine.align.reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nri_numa.engine.align.counting import best_by_counting
from nri_numa.engine.align.families import Family
from nri_numa.engine.align.hints import HintDemand, ResourceDemand, together
from nri_numa.engine.align.reach import Reach
from nri_numa.engine.align.search import Cover, Distances, Order, Steps, best_mask, pick
from nri_numa.engine.values.workload import DeviceRequest

EXACT_UPTO = 10
"""Up to this many NUMA nodes a merge is the kubelet's without exception."""

STEP_LIMIT = 2000
"""Steps of one merge on a larger machine; at 2 to 10 µs each the worst merge takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Merged:
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
