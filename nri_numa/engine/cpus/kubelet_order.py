"""The kubelet's order of CPUs: packed, distributed over NUMA nodes, aligned to uncore caches.

Follows the static policy of the CPU manager (KEP-3570 and its successors KEP-2902 and KEP-4800),
averages included: a core or a socket counts as free when it has as many free CPUs as the machine's
average says. Where the kubelet would then hand out CPUs that are not free (a core larger than the
average), we hand out the free ones only; see docs/adr/0010-cpu-order.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import floor, sqrt

from nri_numa.engine.cpus.best_fit import lowest
from nri_numa.engine.cpus.index import AllocatorIndex, NUMAUnit, Unit

MOST_NUMA_NODES = 8
"""The kubelet refuses machines with more, and trying all combinations ends about here."""


def cores_in_order(index: AllocatorIndex, free: int) -> Iterator[Unit]:
    """Cores with something free, in the nested order: most used units first, then by id."""
    if _numa_first(index):
        units = [index.socket_cores[s] for s in _sockets(index, free)]
    else:
        units = [index.numa_cores[p] for p in _numa_nodes(index, free)]
    for cores in units:
        yield from _sorted(cores, free)


def take_packed(
    index: AllocatorIndex,
    free: int,
    n: int,
    *,
    align_l3: bool = False,
    across_cores: bool = False,
) -> int:
    """Take ``n`` CPUs of ``free``, which must hold that many.

    ``across_cores`` is the kubelet's ``distribute-cpus-across-cores``: no whole cores, and single
    CPUs socket by socket, in each by number. That is one thread of many cores where the kernel
    numbers all first threads before all second ones.
    """
    taker = _Packer(index, free, n)
    steps = [taker.whole_numa_nodes, taker.whole_sockets]
    if not _numa_first(index):
        steps.reverse()
    if align_l3:
        steps.append(taker.l3_groups)
    steps += [taker.cpus_by_socket] if across_cores else [taker.whole_cores, taker.single_cpus]
    for step in steps:
        if not taker.needed:
            break
        step()
    return taker.taken


def take_distributed(index: AllocatorIndex, free: int, n: int, group: int, least: int = 0) -> int:
    """Take ``n`` CPUs of ``free`` in groups, evenly from the fewest NUMA nodes that allow it.

    From no fewer than ``least`` where that many have any: the width of the hint, whose devices
    may be on all of them (kubernetes#139456). Packed when ``n`` is no multiple of the group size
    and when nothing works out evenly. For at most `MOST_NUMA_NODES`: it compares all combinations.
    """
    if n % group:
        return take_packed(index, free, n)
    order = _numa_nodes(index, free)
    counts = {p: (free & index.numa[p].bits).bit_count() for p in order}
    groups = -(-index.all.bit_count() // group)
    wanted = -(-n // group)
    fewest = -(-wanted // -(-groups // len(index.numa)))
    fewest = max(fewest, min(least, wanted, len(order)))
    for k in range(fewest, min(wanted, len(order)) + 1):
        found = _best_combination(order, counts, n, k, group)
        if found is not None:
            return _hand_out(index, free, n, group, *found)
    return take_packed(index, free, n)


def threads_per_core(index: AllocatorIndex) -> int:
    """The kubelet's average: CPUs divided by cores, rounded down."""
    return _average(index.all, len(index.core_bits))


class _Packer:
    """The state of one packed take: what is free still, what is taken, how much is missing."""

    def __init__(self, index: AllocatorIndex, free: int, n: int) -> None:
        self.index = index
        self.free = free
        self.needed = n
        self.taken = 0

    def take(self, bits: int) -> None:
        self.taken |= bits
        self.free &= ~bits
        self.needed -= bits.bit_count()

    def whole_numa_nodes(self) -> None:
        for p in _numa_nodes(self.index, self.free):
            bits = self.index.numa[p].bits
            if not bits & ~self.free and bits.bit_count() <= self.needed:
                self.take(bits)

    def whole_sockets(self) -> None:
        size = _average(self.index.all, len(self.index.sockets))
        for s in _sockets(self.index, self.free):
            self._take_if_free(self.index.sockets[s].bits, size)

    def l3_groups(self) -> None:
        index = self.index
        size = _average(index.all, len(index.l3_groups))
        for group in _l3_groups(index, self.free):
            if self.needed >= size:
                for whole in _l3_groups(index, self.free):
                    if not whole.bits & ~self.free and whole.bits.bit_count() <= self.needed:
                        self.take(whole.bits)
            if self.needed:
                self._finish_in(group)
            if not self.needed:
                return

    def _finish_in(self, group: Unit) -> None:
        threads = threads_per_core(self.index)
        cores = lowest(self.index.touched(self.free & group.bits), -(-self.needed // threads))
        cpus = self.free & self.index.members(cores)
        if self.needed % 2 and threads > 1 and cpus.bit_count() > self.needed:
            cpus ^= 1 << cpus.bit_length() - 1
        if cpus.bit_count() == self.needed:
            self.take(cpus)

    def whole_cores(self) -> None:
        size = threads_per_core(self.index)
        for core in cores_in_order(self.index, self.free):
            if self.needed < size:
                return
            self._take_if_free(core.bits, size)

    def single_cpus(self) -> None:
        cores = cores_in_order(self.index, self.free)
        while self.needed:
            self.take(lowest(next(cores).bits & self.free, self.needed))

    def cpus_by_socket(self) -> None:
        for s in _sockets(self.index, self.free):
            self.take(lowest(self.index.sockets[s].bits & self.free, self.needed))

    def _take_if_free(self, bits: int, average: int) -> None:
        here = bits & self.free
        if here.bit_count() == average <= self.needed:
            self.take(here)


def _best_combination(
    order: Sequence[int], counts: dict[int, int], n: int, k: int, group: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The first of the most balanced sets of ``k`` NUMA nodes, and who gives the remainder."""
    best: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    best_score = float("inf")
    for nodes in combinations(order, k):
        if sum(counts[p] // group * group for p in nodes) < n:
            continue
        each = n // k // group * group
        if any(counts[p] < each for p in nodes):
            continue
        left = {p: counts[p] - each if p in nodes else counts[p] for p in order}
        remainder = n - each * k
        givers = [p for p in nodes if left[p] >= group]
        subsets: Iterator[tuple[int, ...]] = iter([()])
        if remainder:
            subsets = (s for size in range(len(givers), 0, -1) for s in combinations(givers, size))
        for subset in subsets:
            after = _after_remainder(left, subset, remainder, group)
            if after is None:
                continue
            score = _imbalance(list(after.values()))
            if score < best_score:
                best, best_score = (nodes, subset), score
        if best_score == 0:
            break
    return best


def _after_remainder(
    left: dict[int, int], subset: Sequence[int], remainder: int, group: int
) -> dict[int, int] | None:
    """What is left everywhere after going round the subset, or None when it cannot give enough."""
    # By groups, not by CPUs: with three CPUs left on each of two nodes and groups of two, four
    # can be had and not six. The kubelet compares CPUs here and would go round for ever.
    if sum(left[p] // group for p in subset) * group < remainder:
        return None
    after = dict(left)
    while remainder:
        for p in subset:
            if remainder and after[p] >= group:
                after[p] -= group
                remainder -= group
    return after


def _hand_out(
    index: AllocatorIndex,
    free: int,
    n: int,
    group: int,
    nodes: Sequence[int],
    givers: Sequence[int],
) -> int:
    each = n // len(nodes) // group * group
    taken = 0
    for p in nodes:
        taken |= take_packed(index, free & index.numa[p].bits, each)
    while taken.bit_count() < n:
        for p in givers:
            here = free & ~taken & index.numa[p].bits
            if taken.bit_count() < n and here.bit_count() >= group:
                taken |= take_packed(index, here, group)
    return taken


def _imbalance(left: Sequence[int]) -> float:
    """Population standard deviation; mean and result rounded to three decimals, as ties need."""
    mean = _round3(sum(left) / len(left))
    return _round3(sqrt(sum((x - mean) * (x - mean) for x in left) / len(left)))


def _round3(x: float) -> float:
    # Halves go up, as in Go; Python's round() goes to the even neighbour.
    scaled = x * 1000
    down = floor(scaled)
    return (down + 1 if scaled - down >= 0.5 else down) / 1000


def _average(bits: int, units: int) -> int:
    return bits.bit_count() // max(units, 1)


def _numa_first(index: AllocatorIndex) -> bool:
    return len(index.sockets) >= len(index.numa)


def _free_order(units: Sequence[Unit] | Sequence[NUMAUnit], free: int) -> list[int]:
    """Positions of units with something free: fewest free CPUs first, then id."""
    counts = [(free & u.bits).bit_count() for u in units]
    return sorted((i for i, c in enumerate(counts) if c), key=lambda i: (counts[i], units[i].id))


def _sorted(units: Sequence[Unit], free: int) -> list[Unit]:
    return [units[i] for i in _free_order(units, free)]


def _numa_nodes(index: AllocatorIndex, free: int) -> list[int]:
    """Positions of NUMA nodes with something free, nested in sockets where these are larger."""
    order = _free_order(index.numa, free)
    if _numa_first(index):
        return order
    nested = (
        p
        for s in _free_order(index.sockets, free)
        for p in order
        if index.numa[p].bits & index.sockets[s].bits & free
    )
    return list(dict.fromkeys(nested))


def _sockets(index: AllocatorIndex, free: int) -> list[int]:
    """Positions of sockets with something free, nested in NUMA nodes where these are larger."""
    order = _free_order(index.sockets, free)
    if not _numa_first(index):
        return order
    nested = (
        s
        for p in _free_order(index.numa, free)
        for s in order
        if index.numa[p].bits & index.sockets[s].bits & free
    )
    return list(dict.fromkeys(nested))


def _l3_groups(index: AllocatorIndex, free: int) -> list[Unit]:
    nested = (
        group
        for p in _numa_nodes(index, free)
        for group in _sorted(index.l3_groups, free)
        if group.bits & index.numa[p].bits & free
    )
    return list(dict.fromkeys(nested))
