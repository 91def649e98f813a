"""Every intersection that several hint lists can reach, by counting over all masks at once.

For machines of up to `nri_numa.engine.align.merge.EXACT_UPTO` NUMA nodes: 2^n numbers for each
list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from operator import add, mul, sub

from nri_numa.engine.align.families import Family, bits_of
from nri_numa.engine.align.search import Distances, Order, pick


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
