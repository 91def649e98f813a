"""Brute force restatements of rules whose production form is clever.

`hints_of` looks at every mask of every demand, `walk` at every combination of hints, both as the
kubelet's managers do. They are slow, obvious, and share nothing with the engine but its types.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product

from nri_numa.engine.align.hints import DeviceDemand, HintProvider, ResourceDemand
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy

Mask = frozenset[int]
HintList = list[tuple[Mask | None, bool]]

PRODUCT_LIMIT = 20_000
"""Above this many combinations `walk` folds list by list over the set of results so far."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a merge under a policy."""

    admitted: bool
    affinity: Mask | None
    preferred: bool


def masks_of(nodes: Sequence[int]) -> Iterator[Mask]:
    """All non-empty masks, by width, then lexicographically."""
    ordered = sorted(nodes)
    for combination in chain.from_iterable(
        combinations(ordered, width) for width in range(1, len(ordered) + 1)
    ):
        yield frozenset(combination)


def _quantity_hints(demands: Sequence[ResourceDemand], numa_ids: Sequence[int]) -> HintList:
    nodes = [i for i in numa_ids if all(i in d.capacity for d in demands)]
    least = len(nodes)
    found: list[Mask] = []
    for mask in masks_of(nodes):
        if all(sum(max(d.capacity[i], 0) for i in mask) >= d.need for d in demands):
            least = min(least, len(mask))
        if any(not set(d.required) <= mask for d in demands):
            continue
        bound = False
        for d in demands:
            if d.groups is None:
                continue
            if len(mask) == 1:
                (one,) = mask
                bound = bound or len(d.groups.get(one, ())) > 1
            else:
                for i in mask:
                    if i in d.assigned and set(d.groups.get(i, (i,))) != mask:
                        bound = True
        if bound:
            continue
        if any(sum(max(d.free_amounts.get(i, 0), 0) for i in mask) < d.need for d in demands):
            continue
        found.append(mask)
    sockets = demands[0].sockets
    aligned = 0
    if sockets is not None:
        count = len({sockets[i] for i in nodes if i in sockets})
        per_socket = len(nodes) // count if count else 0
        aligned = math.ceil(least / per_socket) if per_socket else 0
    return [
        (
            mask,
            len(mask) == least
            or (
                sockets is not None
                and aligned > 0
                and len({sockets[i] for i in mask if i in sockets}) == aligned
            ),
        )
        for mask in found
    ]


def _device_hints(demand: DeviceDemand, numa_ids: Sequence[int]) -> HintList | None:
    devices = {d.id: set(d.numa_nodes) for d in demand.request.devices}
    count = demand.request.count
    if not any(devices.values()):
        return None
    if len(devices) < count:
        return []
    least = len(numa_ids)
    found: list[Mask] = []
    for mask in masks_of(numa_ids):
        if sum(1 for nodes in devices.values() if nodes & mask) >= count:
            least = min(least, len(mask))
            found.append(mask)
    return [(mask, len(mask) == least) for mask in found]


def hints_of(demands: Sequence[HintProvider], numa_ids: NUMASet) -> list[HintList]:
    """One list for each resource, as the merge sees them after nil and empty were read."""
    machine = list(numa_ids)
    lists: list[HintList] = []
    for demand in demands:
        answer: HintList | None
        if demand.need <= 0:
            answer = None
        elif isinstance(demand, DeviceDemand):
            answer = _device_hints(demand, machine)
        else:
            together = [
                d
                for d in demands
                if isinstance(d, ResourceDemand)
                and d.need > 0
                and (d is demand or (d.joint_key is not None and d.joint_key == demand.joint_key))
            ]
            answer = _quantity_hints(together, machine)
            if not answer and any(d.empty_is_nil for d in together):
                answer = None
        if answer is None:
            lists.append([(None, True)])
        elif not answer:
            lists.append([(None, False)])
        else:
            lists.append(answer)
    return lists


class _Comparison:
    """The comparison of two results, as a table over widths around bnp."""

    def __init__(
        self, bnp: int, distance: Callable[[int, int], int] | None, rank: Mapping[int, int] | None
    ) -> None:
        self.bnp = bnp
        self.distance = distance
        self.rank = rank
        self.averages: dict[Mask, float] = {}

    def average(self, mask: Mask) -> float:
        assert self.distance is not None
        known = self.averages.get(mask)
        if known is None:
            total = sum(self.distance(i, j) for i in mask for j in mask)
            known = self.averages[mask] = total / len(mask) ** 2
        return known

    def fitter(self, cur: Mask, cand: Mask) -> Mask:
        if cur == cand:
            return cur
        if len(cur) != len(cand):
            return cur if len(cur) < len(cand) else cand
        if self.distance is not None and self.average(cur) != self.average(cand):
            return cur if self.average(cur) < self.average(cand) else cand
        if self.rank is not None:
            rank = self.rank
            last = max(rank.values(), default=0) + 1
            ranks = [sorted((rank.get(i, last), i) for i in mask) for mask in (cur, cand)]
            return cur if ranks[0] < ranks[1] else cand
        values = [sum(1 << i for i in mask) for mask in (cur, cand)]
        return cur if values[0] < values[1] else cand

    def better(self, cur: tuple[Mask, bool], cand: tuple[Mask, bool]) -> tuple[Mask, bool]:
        if cur[1] != cand[1]:
            return cur if cur[1] else cand
        if cur[1]:
            return (self.fitter(cur[0], cand[0]), True)
        w_cur, w_cand, bnp = len(cur[0]), len(cand[0]), self.bnp
        if w_cur > bnp:
            return (self.fitter(cur[0], cand[0]), False)
        if w_cur == bnp:
            return (self.fitter(cur[0], cand[0]), False) if w_cand == bnp else cur
        if w_cand > bnp:
            return cur
        if w_cand == bnp or w_cand > w_cur:
            return cand
        if w_cand < w_cur:
            return cur
        return (self.fitter(cur[0], cand[0]), False)


def _results_by_product(lists: Sequence[HintList], everything: Mask) -> Iterator[tuple[Mask, bool]]:
    for combination in product(*lists):
        masks = [m for m, _ in combination if m is not None]
        merged = everything
        for mask in masks:
            merged &= mask
        if merged:
            yield merged, all(p for _, p in combination) and len(set(masks)) <= 1


def _results_by_fold(lists: Sequence[HintList], everything: Mask) -> Iterator[tuple[Mask, bool]]:
    # A state is what is left and, while all hints so far were preferred and equal, their mask.
    states: set[tuple[Mask, bool, Mask | None]] = {(everything, True, None)}
    for hints in lists:
        after: set[tuple[Mask, bool, Mask | None]] = set()
        for left, good, common in states:
            for mask, preferred in hints:
                rest = left if mask is None else left & mask
                if not rest:
                    continue
                still = good and preferred and (mask is None or common is None or common == mask)
                after.add((rest, still, (common if mask is None else mask) if still else None))
        states = after
    for left, good, _ in states:
        yield left, good


def walk(
    lists: Sequence[HintList],
    numa_ids: NUMASet,
    policy: Policy,
    distance: Callable[[int, int], int] | None = None,
    rank: Mapping[int, int] | None = None,
    by: str = "any",
) -> Verdict:
    """Merge hint lists by looking at every combination.

    `rank`: see `nri_numa.engine.align.hints.MaskOrder`.
    """
    everything = frozenset(numa_ids)
    if policy is Policy.SINGLE_NUMA_NODE:
        lists = [[(m, p) for m, p in hints if p and (m is None or len(m) == 1)] for hints in lists]
        distance = None
    widths = [[len(m) for m, _ in hints if m is not None] for hints in lists]
    compare = _Comparison(max((min(w) for w in widths if w), default=0), distance, rank)
    size = math.prod(len(hints) for hints in lists)
    product_way = by == "product" or (by == "any" and size <= PRODUCT_LIMIT)
    results = (_results_by_product if product_way else _results_by_fold)(lists, everything)
    best: tuple[Mask, bool] | None = None
    for result in results:
        best = result if best is None else compare.better(best, result)
    mask, preferred = best if best is not None else (everything, False)
    affinity: Mask | None = mask
    if policy is Policy.SINGLE_NUMA_NODE and mask == everything:
        affinity = None
    return Verdict(preferred or policy is Policy.BEST_EFFORT, affinity, preferred)
