"""The two orders of CPUs: our own best fit, and the kubelet's.

*Best fit* keeps whole NUMA nodes, L3 groups and cores free. Everything is judged by what the
machine really has, never by averages. `select_cpus` goes down level by level: which NUMA nodes,
which L3 groups in each, and there a *filler* says which CPUs.

*The kubelet's* follows the static policy of the CPU manager (KEP-3570 and its successors KEP-2902
and KEP-4800),
averages included: a core or a socket counts as free when it has as many free CPUs as the machine's
average says. Where the kubelet would then hand out CPUs that are not free (a core larger than the
average), we hand out the free ones only; see docs/adr/0010-cpu-order.md.

CPU sets are plain integers, see `nri_numa.engine.cpus.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import comb, floor, sqrt

import msgspec

from nri_numa.engine.cpus.index import NO_UNIT, AllocatorIndex, NUMAUnit, TopologyUnit
from nri_numa.model.cpuset import ids_of

# Up to this many combinations of NUMA nodes are all compared (C(12, 6) is 924). Beyond, one
# candidate set grows around each NUMA node: 64 nodes cost 64 sets instead of 10^18.
_MAX_NODE_COMBINATIONS = 1000

CPUFiller = Callable[[int, int], int]
"""``(candidates, n)`` to the n CPUs to take from these candidates of one L3 group."""


class SelectionPool(msgspec.Struct, frozen=True, kw_only=True):
    """What `select_cpus` chooses from and how.

    Attributes:
        candidates: what may be chosen: CPUs, or lowest threads that stand for cores.
        free: every CPU that is free now, candidates or not; tells how used a unit is.
        current: CPUs the container has already: the rest is taken next to them.
        weight: CPUs that one candidate stands for (a lowest thread stands for its whole core).
        align_by_socket: more NUMA nodes of one socket rather than fewer of several.
        hint: positions of the NUMA nodes that the policy chose, as bits; with ``distribute`` all
            that have a candidate are used, since devices may be on any of them.
    """

    index: AllocatorIndex
    candidates: int
    free: int
    current: int
    weight: int
    fill: CPUFiller
    align_l3: bool
    align_by_socket: bool
    distribute: bool
    hint: int = 0


def select_cpus(places: SelectionPool, n: int) -> int:
    """Choose ``n`` of the candidates; there must be that many."""
    index, candidates = places.index, places.candidates
    room = {
        p: count
        for p, unit in enumerate(index.numa)
        if (count := (candidates & unit.bits).bit_count())
    }
    near = [p for p, unit in enumerate(index.numa) if places.current & unit.bits]
    near_room = {p: room[p] for p in near if p in room}
    chosen = 0
    if sum(near_room.values()) >= n:
        shares = _split_cpu_count_by_node(places, near_room, n, near)
    else:
        # Not enough beside what the container has: all of that, and the rest as close as it goes.
        missing = n - sum(near_room.values())
        far_room = {p: count for p, count in room.items() if p not in near_room}
        shares = near_room | _split_cpu_count_by_node(places, far_room, missing, near)
    for p, share in shares.items():
        chosen |= _select_in_node(places, p, candidates & index.numa[p].bits, share)
    return chosen


def lowest_ids(candidates: int, n: int) -> int:
    """The ``n`` lowest of the candidates: the filler where all are equally good."""
    if candidates.bit_count() <= n:
        return candidates
    rest = candidates
    for _ in range(n):
        rest &= rest - 1
    return candidates ^ rest


def threads_filler(index: AllocatorIndex, own: int) -> CPUFiller:
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
        mine = index.cores_touched(own) & touched if own else 0
        whole = index.whole_cores(candidates | own) & touched
        chosen = 0
        counts = index.cores_by_thread_count(candidates)
        for completes in (True, False):
            group = whole & mine if completes else whole & ~mine
            for size in range(index.threads, 0, -1):
                for first in ids_of(group & counts[size]):
                    if size > n:
                        break
                    chosen |= index.core_bits[first] & candidates
                    n -= size
        half_used = touched & ~whole
        for size in range(index.threads, 0, -1):
            for first in ids_of(half_used & counts[size]):
                if size > n:
                    break
                chosen |= index.core_bits[first] & candidates
                n -= size
        if not n:
            return chosen
        # Every core that is left has more threads free than are needed.
        left = touched & ~index.cores_touched(chosen)
        rests = (left & group & counts[size] for group in (half_used, whole) for size in sizes)
        first = next(ids_of(next(filter(None, rests))))
        return chosen | lowest_ids(index.core_bits[first] & candidates, n)

    return fill_threads


def _split_cpu_count_by_node(
    places: SelectionPool, room: dict[int, int], n: int, near: Sequence[int]
) -> dict[int, int]:
    """How many candidates to take from which NUMA nodes (positions)."""
    nodes = _choose_numa_nodes(places, room, n, near)
    if places.distribute:
        every = {*nodes, *(p for p in room if places.hint >> p & 1)}
        nodes = sorted(every) if len(every) <= n else nodes
        if len(nodes) > 1:
            return _level_nodes(room, nodes, n)
    # Largest room first, then by position: most of the container is together, and only the last
    # NUMA node is left with a remainder.
    shares = {}
    for p in sorted(nodes, key=lambda p: (-room[p], p)):
        shares[p] = min(room[p], n)
        n -= shares[p]
    return shares


def _level_nodes(room: dict[int, int], nodes: Sequence[int], n: int) -> dict[int, int]:
    """Fill all NUMA nodes to one level; a node with less room gives all it has.

    By (room, position), so that what a small node cannot give is shared by all larger ones; a
    remainder goes to the roomiest, and among equals to the last.
    """
    shares = {}
    left = sorted(nodes, key=lambda p: (room[p], p))
    while left:
        p = left.pop(0)
        shares[p] = min(room[p], n // (len(left) + 1))
        n -= shares[p]
    return shares


def _choose_numa_nodes(
    places: SelectionPool, room: dict[int, int], n: int, near: Sequence[int]
) -> Sequence[int]:
    index = places.index
    fits = [p for p, count in room.items() if count >= n]
    if fits:
        # One NUMA node. Order: most of the container's own CPUs; closest to them; a NUMA node
        # rather than CPUs without one, which have no memory of their own; fewest L3 groups; not
        # breaking a wholly free NUMA node (unless all of it is used); most used; most used
        # socket; position, that is NUMA node id.
        def numa_node_key(p: int) -> tuple[int, int, bool, int, bool, int, int, int]:
            unit = index.numa[p]
            free = (places.free & unit.bits).bit_count()
            return (
                -(places.current & unit.bits).bit_count(),
                sum(index.distances[q][p] for q in near),
                unit.id == NO_UNIT,
                _l3_groups_needed(places, p, n),
                free == unit.bits.bit_count() and free != n * places.weight,
                free,
                sum(
                    (places.free & s.bits).bit_count()
                    for i, s in enumerate(index.sockets)
                    if unit.sockets >> i & 1
                ),
                p,
            )

        return [min(fits, key=numa_node_key)]
    if places.align_by_socket:
        room = _room_in_tightest_socket(index, room, n)
    return min(
        _smallest_node_sets(index, room, n),
        key=lambda nodes: _node_set_key(places, room, n, near, nodes),
    )


def _room_in_tightest_socket(index: AllocatorIndex, room: dict[int, int], n: int) -> dict[int, int]:
    """The NUMA nodes of the socket with the least room that suffices, then the lowest id.

    All of them when no socket suffices.
    """
    inside = [
        {p: count for p, count in room.items() if index.numa[p].sockets >> i & 1}
        for i in range(len(index.sockets))
    ]
    fits = [nodes for nodes in inside if sum(nodes.values()) >= n]
    return min(fits, key=lambda nodes: sum(nodes.values()), default=room)


def _node_set_key(
    places: SelectionPool, room: dict[int, int], n: int, near: Sequence[int], nodes: Sequence[int]
) -> tuple[int, int, int, int, int, Sequence[int]]:
    """Order of equally small sets of NUMA nodes.

    Closest to what the container has; fewest sockets; closest to one another; fewest wholly free
    nodes broken; least room (best fit); positions.
    """
    index = places.index
    sockets = broken = 0
    for p in nodes:
        unit = index.numa[p]
        sockets |= unit.sockets
        broken += places.free & unit.bits == unit.bits
    total = sum(room[p] for p in nodes)
    return (
        sum(index.distances[q][p] for q in near for p in nodes),
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
    grown = (_grow_node_set(index, room, n, size, seed) for seed in room)
    return sorted({nodes for nodes in grown if nodes})


def _grow_node_set(
    index: AllocatorIndex, room: dict[int, int], n: int, size: int, seed: int
) -> tuple[int, ...]:
    """The set of ``size`` NUMA nodes around a seed within the smallest distance; may be empty."""
    row = index.distances[seed]
    for radius in sorted({row[p] for p in room}):
        # Roomiest first, then closest, then by position.
        others = sorted(
            (p for p in room if p != seed and row[p] <= radius),
            key=lambda p: (-room[p], row[p], p),
        )[: size - 1]
        if room[seed] + sum(room[p] for p in others) >= n and len(others) == size - 1:
            return tuple(sorted([seed, *others]))
    return ()


def _l3_groups_needed(places: SelectionPool, p: int, n: int) -> int:
    """The fewest L3 groups of a NUMA node with room for ``n``: the roomiest ones."""
    if not places.align_l3:
        return 1
    groups = places.index.numa[p].l3_groups
    needed = 0
    for room in sorted(((places.candidates & g.bits).bit_count() for g in groups), reverse=True):
        if n <= 0:
            break
        needed += 1
        n -= room
    return needed


def _select_in_node(places: SelectionPool, p: int, candidates: int, n: int) -> int:
    groups = places.index.numa[p].l3_groups
    if len(groups) == 1 or not places.align_l3 or candidates.bit_count() == n:
        return places.fill(candidates, n)
    chosen = 0
    while True:
        live = [
            (g, count) for g in groups if (count := (candidates & ~chosen & g.bits).bit_count())
        ]
        live = [item for item in live if places.current & item[0].bits] or live
        fits = [item for item in live if item[1] >= n]
        if fits:
            group, _ = min(fits, key=lambda item: _l3_key(places, item[0], n))
            return chosen | places.fill(candidates & ~chosen & group.bits, n)
        # It must be split: the roomiest groups whole, then the most used, then by id, so that
        # the fewest groups are needed.
        group, count = min(
            live, key=lambda item: (-item[1], (places.free & item[0].bits).bit_count(), item[0].id)
        )
        chosen |= candidates & group.bits
        n -= count


def _l3_key(places: SelectionPool, group: TopologyUnit, n: int) -> tuple[bool, int, int]:
    """Not breaking a wholly free group (unless all of it is used), most used, id."""
    free = (places.free & group.bits).bit_count()
    return (
        free == group.bits.bit_count() and free != n * places.weight,
        free,
        group.id,
    )


MAX_DISTRIBUTED_NUMA_NODES = 8
"""The kubelet refuses machines with more, and trying all combinations ends about here."""


def cores_in_order(index: AllocatorIndex, free: int) -> Iterator[TopologyUnit]:
    """Cores with something free, in the nested order: most used units first, then by id."""
    if _are_sockets_in_numa_nodes(index):
        units = [index.socket_cores[s] for s in _sockets_by_free_cpus(index, free)]
    else:
        units = [index.numa_cores[p] for p in _numa_nodes_by_free_cpus(index, free)]
    for cores in units:
        yield from _units_by_free_cpus(cores, free)


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
    taker = _PackedTake(index, free, n)
    steps = [taker.take_whole_numa_nodes, taker.take_whole_sockets]
    if not _are_sockets_in_numa_nodes(index):
        steps.reverse()
    if align_l3:
        steps.append(taker.take_l3_groups)
    steps += (
        [taker.take_cpus_by_socket]
        if across_cores
        else [taker.take_whole_cores, taker.take_single_cpus]
    )
    for step in steps:
        if not taker.needed:
            break
        step()
    return taker.taken


def take_distributed(index: AllocatorIndex, free: int, n: int, group: int, least: int = 0) -> int:
    """Take ``n`` CPUs of ``free`` in groups, evenly from the fewest NUMA nodes that allow it.

    From no fewer than ``least`` where that many have any: the width of the hint, whose devices
    may be on all of them (kubernetes#139456). Packed when ``n`` is no multiple of the group size
    and when nothing works out evenly. For at most `MAX_DISTRIBUTED_NUMA_NODES`: it compares all
    combinations.
    """
    if n % group:
        return take_packed(index, free, n)
    order = _numa_nodes_by_free_cpus(index, free)
    counts = {p: (free & index.numa[p].bits).bit_count() for p in order}
    groups = -(-index.all_cpus.bit_count() // group)
    wanted = -(-n // group)
    fewest = -(-wanted // -(-groups // len(index.numa)))
    fewest = max(fewest, min(least, wanted, len(order)))
    for k in range(fewest, min(wanted, len(order)) + 1):
        found = _most_balanced_numa_nodes(order, counts, n, k, group)
        if found is not None:
            return _take_round_robin(index, free, n, group, *found)
    return take_packed(index, free, n)


def threads_per_core(index: AllocatorIndex) -> int:
    """The kubelet's average: CPUs divided by cores, rounded down."""
    return _average_unit_cpus(index.all_cpus, len(index.core_bits))


class _PackedTake:
    """The state of one packed take: what is free still, what is taken, how much is missing."""

    def __init__(self, index: AllocatorIndex, free: int, n: int) -> None:
        self.index = index
        self.free = free
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
                for whole in _l3_groups_by_free_cpus(index, self.free):
                    if not whole.bits & ~self.free and whole.bits.bit_count() <= self.needed:
                        self.add_cpus(whole.bits)
            if self.needed:
                self._take_remainder_in_group(group)
            if not self.needed:
                return

    def _take_remainder_in_group(self, group: TopologyUnit) -> None:
        threads = threads_per_core(self.index)
        cores = lowest_ids(
            self.index.cores_touched(self.free & group.bits), -(-self.needed // threads)
        )
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
            self.add_cpus(lowest_ids(next(cores).bits & self.free, self.needed))

    def take_cpus_by_socket(self) -> None:
        for s in _sockets_by_free_cpus(self.index, self.free):
            self.add_cpus(lowest_ids(self.index.sockets[s].bits & self.free, self.needed))

    def _take_unit(self, bits: int, average: int) -> None:
        here = bits & self.free
        if here.bit_count() == average <= self.needed:
            self.add_cpus(here)


def _most_balanced_numa_nodes(
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
            after = _free_after_remainder(left, subset, remainder, group)
            if after is None:
                continue
            score = _standard_deviation(list(after.values()))
            if score < best_score:
                best, best_score = (nodes, subset), score
        if best_score == 0:
            break
    return best


def _free_after_remainder(
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


def _take_round_robin(
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


def _standard_deviation(left: Sequence[int]) -> float:
    """Population standard deviation; mean and result rounded to three decimals, as ties need."""
    mean = _round3(sum(left) / len(left))
    return _round3(sqrt(sum((x - mean) * (x - mean) for x in left) / len(left)))


def _round3(x: float) -> float:
    # Halves go up, as in Go; Python's round() goes to the even neighbour.
    scaled = x * 1000
    down = floor(scaled)
    return (down + 1 if scaled - down >= 0.5 else down) / 1000


def _average_unit_cpus(bits: int, units: int) -> int:
    return bits.bit_count() // max(units, 1)


def _are_sockets_in_numa_nodes(index: AllocatorIndex) -> bool:
    return len(index.sockets) >= len(index.numa)


def _positions_by_free_cpus(
    units: Sequence[TopologyUnit] | Sequence[NUMAUnit], free: int
) -> list[int]:
    """Positions of units with something free: fewest free CPUs first, then id."""
    counts = [(free & u.bits).bit_count() for u in units]
    return sorted((i for i, c in enumerate(counts) if c), key=lambda i: (counts[i], units[i].id))


def _units_by_free_cpus(units: Sequence[TopologyUnit], free: int) -> list[TopologyUnit]:
    return [units[i] for i in _positions_by_free_cpus(units, free)]


def _numa_nodes_by_free_cpus(index: AllocatorIndex, free: int) -> list[int]:
    """Positions of NUMA nodes with something free, nested in sockets where these are larger."""
    return _nested_order(
        index.numa, () if _are_sockets_in_numa_nodes(index) else index.sockets, free
    )


def _sockets_by_free_cpus(index: AllocatorIndex, free: int) -> list[int]:
    """Positions of sockets with something free, nested in NUMA nodes where these are larger."""
    return _nested_order(
        index.sockets, index.numa if _are_sockets_in_numa_nodes(index) else (), free
    )


_Units = Sequence[TopologyUnit] | Sequence[NUMAUnit]


def _nested_order(units: _Units, outer: _Units, free: int) -> list[int]:
    order = _positions_by_free_cpus(units, free)
    nested = (
        i
        for o in _positions_by_free_cpus(outer, free)
        for i in order
        if units[i].bits & outer[o].bits & free
    )
    return list(dict.fromkeys(nested)) if outer else order


def _l3_groups_by_free_cpus(index: AllocatorIndex, free: int) -> list[TopologyUnit]:
    nested = (
        group
        for p in _numa_nodes_by_free_cpus(index, free)
        for group in _units_by_free_cpus(index.l3_groups, free)
        if group.bits & index.numa[p].bits & free
    )
    return list(dict.fromkeys(nested))
