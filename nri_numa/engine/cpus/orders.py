"""The two orders of CPUs: the agent's best fit, and the kubelet's.

*Best fit* keeps whole NUMA nodes, L3 groups and cores free. Everything is judged by what the
machine really has, never by averages. `select_cpus` goes down level by level: which NUMA nodes,
which L3 groups in each, and there a *filler* says which CPUs.

*The kubelet's* follows the static policy of the CPU manager (KEP-3570 and its successors KEP-2902
and KEP-4800), averages included: a core or a socket counts as free when it has as many free CPUs as
the machine's average says. Where the kubelet would then hand out CPUs that are not free (a core
larger than the average), we hand out the free ones only; see docs/adr/0010-cpu-order.md.

CPU sets are plain integers, see `nri_numa.engine.cpus.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import comb, floor, sqrt

import msgspec

from nri_numa.engine.cpus.index import NO_UNIT, AllocatorIndex, TopologyUnit
from nri_numa.model.cpuset import ids_of
from nri_numa.model.settings import Settings

# Up to this many combinations of NUMA nodes are all compared (C(12, 6) is 924). Beyond, one
# candidate set grows around each NUMA node: 64 nodes cost 64 sets instead of 10^18.
_MAX_NODE_COMBINATIONS = 1000

CPUFiller = Callable[[int, int], int]
"""``(candidates, n)`` to the n CPUs to take from these candidates of one L3 group."""


class SelectionPool(msgspec.Struct, frozen=True, kw_only=True):
    """The CPUs that `select_cpus` chooses from, and the order.

    Attributes:
        candidates: what may be chosen: CPUs, or lowest threads that stand for cores.
        free: every CPU that is free now, candidates or not; tells how used a unit is.
        current: CPUs the container has already: the rest is taken next to them.
        weight: CPUs that one candidate stands for (a lowest thread stands for its whole core).
        hint: positions of the NUMA nodes that the policy chose, as bits; if CPUs are distributed,
            all that have a candidate are used, since devices may be on any of them.
    """

    index: AllocatorIndex
    candidates: int
    free: int
    current: int
    weight: int
    fill: CPUFiller
    settings: Settings
    hint: int


def select_cpus(pool: SelectionPool, n: int) -> int:
    """Choose ``n`` of the candidates; there must be that many."""
    index, candidates = pool.index, pool.candidates
    room = {
        p: count
        for p, unit in enumerate(index.numa)
        if (count := (candidates & unit.bits).bit_count())
    }
    current = [p for p, unit in enumerate(index.numa) if pool.current & unit.bits]
    near_room = {p: room[p] for p in current if p in room}
    cpus = 0
    if sum(near_room.values()) >= n:
        counts = _split_cpu_count_by_node(pool, near_room, n, current)
    else:
        # Not enough beside what the container has: all of that, and the rest as close as it goes.
        missing = n - sum(near_room.values())
        far_room = {p: count for p, count in room.items() if p not in near_room}
        counts = near_room | _split_cpu_count_by_node(pool, far_room, missing, current)
    for p, node_count in counts.items():
        cpus |= _select_in_node(pool, p, candidates & index.numa[p].bits, node_count)
    return cpus


def select_lowest_ids(candidates: int, n: int) -> int:
    """The ``n`` lowest of the candidates: the filler where all are equally good."""
    if candidates.bit_count() <= n:
        return candidates
    remaining = candidates
    for _ in range(n):
        remaining &= remaining - 1
    return candidates ^ remaining


def whole_cores_first_filler(index: AllocatorIndex, current: int) -> CPUFiller:
    """A filler for single threads that completes and uses whole cores, and breaks the fewest.

    1. cores that the container has a part of and that become wholly its own, by core id;
    2. wholly free cores that fit into what is needed, larger ones first, then by core id;
    3. for the rest half-used cores: the largest part that fits, then the smallest that does not;
       equal parts by core id;
    4. only then a wholly free core is broken: the smallest, then by core id.
    """
    sizes = range(1, index.threads + 1)

    def fill_threads(candidates: int, n: int) -> int:
        if candidates.bit_count() <= n:
            return candidates
        touched = index.cores_touched(candidates)
        mine = index.cores_touched(current) if current else 0
        whole_cores = index.whole_cores(candidates | current) & touched
        half_used = touched & ~whole_cores
        cpus = 0
        counts = index.cores_by_thread_count(candidates)
        for group in (whole_cores & mine, whole_cores & ~mine, half_used):
            for size in reversed(sizes):
                for first_id in ids_of(group & counts[size]):
                    if size > n:
                        break
                    cpus |= index.core_bits[first_id] & candidates
                    n -= size
        if not n:
            return cpus
        # Every core that is left has more threads free than are needed.
        remaining = touched & ~index.cores_touched(cpus)
        rests = (
            remaining & group & counts[size] for group in (half_used, whole_cores) for size in sizes
        )
        first_id = next(ids_of(next(filter(None, rests))))
        return cpus | select_lowest_ids(index.core_bits[first_id] & candidates, n)

    return fill_threads


def _split_cpu_count_by_node(
    pool: SelectionPool, room: dict[int, int], n: int, current: Sequence[int]
) -> dict[int, int]:
    """Numbers of candidates to take, by position of the NUMA node."""
    nodes = _choose_numa_nodes(pool, room, n, current)
    if pool.settings.kubelet.distribute_cpus_across_numa:
        candidates = {*nodes, *(p for p in room if pool.hint >> p & 1)}
        nodes = sorted(candidates) if len(candidates) <= n else nodes
        if len(nodes) > 1:
            return _level_nodes(room, nodes, n)
    # Largest room first, then by position: most of the container is together, and only the last
    # NUMA node is left with a remainder.
    counts = {}
    for p in sorted(nodes, key=lambda p: (-room[p], p)):
        counts[p] = min(room[p], n)
        n -= counts[p]
    return counts


def _level_nodes(room: dict[int, int], nodes: Sequence[int], n: int) -> dict[int, int]:
    """Fill all NUMA nodes to one level; a node with less room gives all it has.

    By (room, position), so that what a small node cannot give is shared by all larger ones; a
    remainder goes to the roomiest, and among equals to the last.
    """
    counts = {}
    unfilled = sorted(nodes, key=lambda p: (room[p], p))
    while unfilled:
        p = unfilled.pop(0)
        counts[p] = min(room[p], n // (len(unfilled) + 1))
        n -= counts[p]
    return counts


def _choose_numa_nodes(
    pool: SelectionPool, room: dict[int, int], n: int, current: Sequence[int]
) -> Sequence[int]:
    index = pool.index
    fits = [p for p, count in room.items() if count >= n]
    if fits:
        # One NUMA node. Order: most of the container's own CPUs; closest to them; a NUMA node
        # rather than CPUs without one, which have no memory of their own; fewest L3 groups; not
        # breaking a wholly free NUMA node (unless all of it is used); most used; most used
        # socket; position, that is NUMA node id.
        def numa_node_key(p: int) -> tuple[int, int, bool, int, bool, int, int, int]:
            unit = index.numa[p]
            free_count = (pool.free & unit.bits).bit_count()
            return (
                -(pool.current & unit.bits).bit_count(),
                sum(index.distances[q][p] for q in current),
                unit.id == NO_UNIT,
                _l3_groups_needed(pool, p, n),
                free_count == unit.bits.bit_count() and free_count != n * pool.weight,
                free_count,
                sum(
                    (pool.free & s.bits).bit_count()
                    for i, s in enumerate(index.sockets)
                    if unit.sockets >> i & 1
                ),
                p,
            )

        return [min(fits, key=numa_node_key)]
    if pool.settings.kubelet.align_by_socket:
        # More NUMA nodes of one socket rather than fewer of several.
        room = _room_in_tightest_socket(index, room, n)
    return min(
        _smallest_node_sets(index, room, n),
        key=lambda nodes: _node_set_sort_key(pool, room, n, current, nodes),
    )


def _room_in_tightest_socket(index: AllocatorIndex, room: dict[int, int], n: int) -> dict[int, int]:
    """NUMA nodes of the socket with the least room that suffices, then the lowest id; or all."""
    inside = [
        {p: count for p, count in room.items() if index.numa[p].sockets >> i & 1}
        for i in range(len(index.sockets))
    ]
    fits = [nodes for nodes in inside if sum(nodes.values()) >= n]
    return min(fits, key=lambda nodes: sum(nodes.values()), default=room)


def _node_set_sort_key(
    pool: SelectionPool, room: dict[int, int], n: int, current: Sequence[int], nodes: Sequence[int]
) -> tuple[int, int, int, int, int, Sequence[int]]:
    """Order of equally small sets of NUMA nodes.

    Closest to what the container has; fewest sockets; closest to one another; fewest wholly free
    nodes broken; least room (best fit); positions.
    """
    index = pool.index
    sockets = broken = 0
    for p in nodes:
        unit = index.numa[p]
        sockets |= unit.sockets
        broken += pool.free & unit.bits == unit.bits
    total = sum(room[p] for p in nodes)
    return (
        sum(index.distances[q][p] for q in current for p in nodes),
        sockets.bit_count(),
        sum(index.distances[p][q] for p in nodes for q in nodes),
        broken if total > n else 0,
        total,
        nodes,
    )


def _smallest_node_sets(
    index: AllocatorIndex, room: dict[int, int], n: int
) -> Sequence[tuple[int, ...]]:
    """Sets of as few NUMA nodes as can hold ``n``; all of them, or one around each node."""
    size = total = 0
    for count in sorted(room.values(), reverse=True):
        if total >= n:
            break
        total += count
        size += 1
    if comb(len(room), size) <= _MAX_NODE_COMBINATIONS:
        return [nodes for nodes in combinations(room, size) if sum(room[p] for p in nodes) >= n]
    node_sets = (_grow_node_set(index, room, n, size, seed) for seed in room)
    return sorted({nodes for nodes in node_sets if nodes})


def _grow_node_set(
    index: AllocatorIndex, room: dict[int, int], n: int, size: int, seed: int
) -> tuple[int, ...]:
    """The set of ``size`` NUMA nodes around a seed within the smallest distance; may be empty."""
    row = index.distances[seed]
    for radius in sorted({row[p] for p in room}):
        # Roomiest first, then closest, then by position.
        candidates = sorted(
            (p for p in room if p != seed and row[p] <= radius), key=lambda p: (-room[p], row[p], p)
        )[: size - 1]
        if room[seed] + sum(room[p] for p in candidates) >= n and len(candidates) == size - 1:
            return tuple(sorted([seed, *candidates]))
    return ()


def _l3_groups_needed(pool: SelectionPool, p: int, n: int) -> int:
    """The fewest L3 groups of a NUMA node with room for ``n``: the roomiest ones."""
    if not pool.settings.align_l3:
        return 1
    groups = pool.index.numa[p].l3_groups
    groups_needed = 0
    for room in sorted(((pool.candidates & g.bits).bit_count() for g in groups), reverse=True):
        if n <= 0:
            break
        groups_needed += 1
        n -= room
    return groups_needed


def _select_in_node(pool: SelectionPool, p: int, candidates: int, n: int) -> int:
    groups = pool.index.numa[p].l3_groups
    if len(groups) == 1 or not pool.settings.align_l3 or candidates.bit_count() == n:
        return pool.fill(candidates, n)
    cpus = 0
    while True:
        live = [(g, count) for g in groups if (count := (candidates & ~cpus & g.bits).bit_count())]
        live = [item for item in live if pool.current & item[0].bits] or live
        fits = [item for item in live if item[1] >= n]
        if fits:
            group, _ = min(fits, key=lambda item: _l3_group_sort_key(pool, item[0], n))
            return cpus | pool.fill(candidates & ~cpus & group.bits, n)
        # It must be split: the roomiest groups whole, then the most used, then by id, so that
        # the fewest groups are needed.
        group, count = min(
            live, key=lambda item: (-item[1], (pool.free & item[0].bits).bit_count(), item[0].id)
        )
        cpus |= candidates & group.bits
        n -= count


def _l3_group_sort_key(pool: SelectionPool, group: TopologyUnit, n: int) -> tuple[bool, int, int]:
    """Not breaking a wholly free group (unless all of it is used), most used, id."""
    free_count = (pool.free & group.bits).bit_count()
    return (
        free_count == group.bits.bit_count() and free_count != n * pool.weight,
        free_count,
        group.id,
    )


MAX_DISTRIBUTED_NUMA_NODES = 8
"""The kubelet refuses machines with more, and trying all combinations ends about here."""


def cores_in_order(index: AllocatorIndex, free_cpus: int) -> Iterator[TopologyUnit]:
    """Cores with something free, in the nested order: most used units first, then by id."""
    if _are_sockets_in_numa_nodes(index):
        units = [index.socket_cores[s] for s in _sockets_by_free_cpus(index, free_cpus)]
    else:
        units = [index.numa_cores[p] for p in _numa_nodes_by_free_cpus(index, free_cpus)]
    for cores in units:
        yield from _units_by_free_cpus(cores, free_cpus)


def take_packed(
    index: AllocatorIndex,
    free_cpus: int,
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
    taker = _PackedTake(index, free_cpus, n)
    stages = [taker.take_whole_numa_nodes, taker.take_whole_sockets]
    if not _are_sockets_in_numa_nodes(index):
        stages.reverse()
    if align_l3:
        stages.append(taker.take_l3_groups)
    stages += (
        [taker.take_cpus_by_socket]
        if across_cores
        else [taker.take_whole_cores, taker.take_single_cpus]
    )
    for stage in stages:
        if not taker.needed:
            break
        stage()
    return taker.taken


def take_distributed(
    index: AllocatorIndex, free_cpus: int, n: int, group: int, min_nodes: int
) -> int:
    """Take ``n`` CPUs of ``free`` in groups, evenly from the fewest NUMA nodes that allow it.

    From no fewer than ``min_nodes`` where that many have any: the width of the hint, whose devices
    may be on all of them (kubernetes#139456). Packed when ``n`` is no multiple of the group size
    and when nothing works out evenly. For at most `MAX_DISTRIBUTED_NUMA_NODES`: it compares all
    combinations.
    """
    if n % group:
        return take_packed(index, free_cpus, n)
    order = _numa_nodes_by_free_cpus(index, free_cpus)
    counts = {p: (free_cpus & index.numa[p].bits).bit_count() for p in order}
    groups = -(-index.all_cpus.bit_count() // group)
    group_count = -(-n // group)
    fewest = -(-group_count // -(-groups // len(index.numa)))
    fewest = max(fewest, min(min_nodes, group_count, len(order)))
    for k in range(fewest, min(group_count, len(order)) + 1):
        distribution = _most_balanced_numa_nodes(order, counts, n, k, group)
        if distribution is not None:
            return _take_round_robin(index, free_cpus, n, group, *distribution)
    return take_packed(index, free_cpus, n)


def threads_per_core(index: AllocatorIndex) -> int:
    """The kubelet's average: CPUs divided by cores, rounded down."""
    return _average_unit_cpus(index.all_cpus, len(index.core_bits))


class _PackedTake:
    """The state of one packed take: what is free still, what is taken, how much is missing."""

    def __init__(self, index: AllocatorIndex, free_cpus: int, n: int) -> None:
        self.index = index
        self.free = free_cpus
        self.needed = n
        self.taken = 0

    def add_cpus(self, bits: int) -> None:
        self.taken |= bits
        self.free &= ~bits
        self.needed -= bits.bit_count()

    def take_whole_numa_nodes(self) -> None:
        for p in _numa_nodes_by_free_cpus(self.index, self.free):
            bits = self.index.numa[p].bits
            if not bits & ~self.free and bits.bit_count() <= self.needed:
                self.add_cpus(bits)

    def take_whole_sockets(self) -> None:
        size = _average_unit_cpus(self.index.all_cpus, len(self.index.sockets))
        for s in _sockets_by_free_cpus(self.index, self.free):
            self._take_unit(self.index.sockets[s].bits, size)

    def take_l3_groups(self) -> None:
        index = self.index
        size = _average_unit_cpus(index.all_cpus, len(index.l3_groups))
        for group in _l3_groups_by_free_cpus(index, self.free):
            if self.needed >= size:
                for l3_group in _l3_groups_by_free_cpus(index, self.free):
                    if not l3_group.bits & ~self.free and l3_group.bits.bit_count() <= self.needed:
                        self.add_cpus(l3_group.bits)
            if self.needed:
                self._take_remainder_in_group(group)
            if not self.needed:
                return

    def _take_remainder_in_group(self, group: TopologyUnit) -> None:
        threads = threads_per_core(self.index)
        count = -(-self.needed // threads)
        cores = select_lowest_ids(self.index.cores_touched(self.free & group.bits), count)
        cpus = self.free & self.index.threads_of(cores)
        if self.needed % 2 and threads > 1 and cpus.bit_count() > self.needed:
            cpus ^= 1 << cpus.bit_length() - 1
        if cpus.bit_count() == self.needed:
            self.add_cpus(cpus)

    def take_whole_cores(self) -> None:
        size = threads_per_core(self.index)
        for core in cores_in_order(self.index, self.free):
            if self.needed < size:
                return
            self._take_unit(core.bits, size)

    def take_single_cpus(self) -> None:
        cores = cores_in_order(self.index, self.free)
        while self.needed:
            self.add_cpus(select_lowest_ids(next(cores).bits & self.free, self.needed))

    def take_cpus_by_socket(self) -> None:
        for s in _sockets_by_free_cpus(self.index, self.free):
            self.add_cpus(select_lowest_ids(self.index.sockets[s].bits & self.free, self.needed))

    def _take_unit(self, bits: int, average: int) -> None:
        unit_cpus = bits & self.free
        if unit_cpus.bit_count() == average <= self.needed:
            self.add_cpus(unit_cpus)


def _most_balanced_numa_nodes(
    order: Sequence[int], counts: dict[int, int], n: int, k: int, group: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The first of the most balanced sets of ``k`` NUMA nodes, and who gives the remainder."""
    best_key: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    best_score = float("inf")
    for nodes in combinations(order, k):
        if sum(counts[p] // group * group for p in nodes) < n:
            continue
        part = n // k // group * group
        if any(counts[p] < part for p in nodes):
            continue
        free_counts = {p: counts[p] - part if p in nodes else counts[p] for p in order}
        remainder = n - part * k
        givers = [p for p in nodes if free_counts[p] >= group]
        subsets: Iterator[tuple[int, ...]] = iter([()])
        if remainder:
            subsets = (s for size in range(len(givers), 0, -1) for s in combinations(givers, size))
        for subset in subsets:
            counts_after = _free_after_remainder(free_counts, subset, remainder, group)
            if counts_after is None:
                continue
            score = _standard_deviation(list(counts_after.values()))
            if score < best_score:
                best_key, best_score = (nodes, subset), score
        if best_score == 0:
            break
    return best_key


def _free_after_remainder(
    free_counts: dict[int, int], subset: Sequence[int], remainder: int, group: int
) -> dict[int, int] | None:
    """Free CPUs everywhere after going round the subset, or None when it cannot give enough."""
    # By groups, not by CPUs: with three CPUs left on each of two nodes and groups of two, four
    # can be had and not six. The kubelet compares CPUs here and would go round for ever.
    if sum(free_counts[p] // group for p in subset) * group < remainder:
        return None
    counts_after = dict(free_counts)
    while remainder:
        for p in subset:
            if remainder and counts_after[p] >= group:
                counts_after[p] -= group
                remainder -= group
    return counts_after


def _take_round_robin(
    index: AllocatorIndex,
    free_cpus: int,
    n: int,
    group: int,
    nodes: Sequence[int],
    givers: Sequence[int],
) -> int:
    part = n // len(nodes) // group * group
    cpus = 0
    for p in nodes:
        cpus |= take_packed(index, free_cpus & index.numa[p].bits, part)
    while cpus.bit_count() < n:
        for p in givers:
            node_cpus = free_cpus & ~cpus & index.numa[p].bits
            if cpus.bit_count() < n and node_cpus.bit_count() >= group:
                cpus |= take_packed(index, node_cpus, group)
    return cpus


def _standard_deviation(counts: Sequence[int]) -> float:
    """Population standard deviation; mean and result rounded to three decimals, as ties need."""
    average = _round3(sum(counts) / len(counts))
    return _round3(sqrt(sum((x - average) * (x - average) for x in counts) / len(counts)))


def _round3(x: float) -> float:
    # Halves go up, as in Go; Python's round() goes to the even neighbour.
    scaled = x * 1000
    floor_value = floor(scaled)
    return (floor_value + 1 if scaled - floor_value >= 0.5 else floor_value) / 1000


def _average_unit_cpus(bits: int, units: int) -> int:
    return bits.bit_count() // max(units, 1)


def _are_sockets_in_numa_nodes(index: AllocatorIndex) -> bool:
    return len(index.sockets) >= len(index.numa)


def _positions_by_free_cpus(units: Sequence[TopologyUnit], free_cpus: int) -> list[int]:
    """Positions of units with something free: fewest free CPUs first, then id."""
    counts = [(free_cpus & u.bits).bit_count() for u in units]
    return sorted((i for i, c in enumerate(counts) if c), key=lambda i: (counts[i], units[i].id))


def _units_by_free_cpus(units: Sequence[TopologyUnit], free_cpus: int) -> list[TopologyUnit]:
    return [units[i] for i in _positions_by_free_cpus(units, free_cpus)]


def _numa_nodes_by_free_cpus(index: AllocatorIndex, free_cpus: int) -> list[int]:
    """Positions of NUMA nodes with something free, nested in sockets where these are larger."""
    outer = () if _are_sockets_in_numa_nodes(index) else index.sockets
    return _nested_unit_positions(index.numa, outer, free_cpus)


def _sockets_by_free_cpus(index: AllocatorIndex, free_cpus: int) -> list[int]:
    """Positions of sockets with something free, nested in NUMA nodes where these are larger."""
    outer = index.numa if _are_sockets_in_numa_nodes(index) else ()
    return _nested_unit_positions(index.sockets, outer, free_cpus)


def _nested_unit_positions(
    units: Sequence[TopologyUnit], outer: Sequence[TopologyUnit], free_cpus: int
) -> list[int]:
    order = _positions_by_free_cpus(units, free_cpus)
    nested = (
        i
        for o in _positions_by_free_cpus(outer, free_cpus)
        for i in order
        if units[i].bits & outer[o].bits & free_cpus
    )
    return list(dict.fromkeys(nested)) if outer else order


def _l3_groups_by_free_cpus(index: AllocatorIndex, free_cpus: int) -> list[TopologyUnit]:
    nested = (
        group
        for p in _numa_nodes_by_free_cpus(index, free_cpus)
        for group in _units_by_free_cpus(index.l3_groups, free_cpus)
        if group.bits & index.numa[p].bits & free_cpus
    )
    return list(dict.fromkeys(nested))
