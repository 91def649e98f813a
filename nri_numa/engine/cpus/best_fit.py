"""Our own order of CPUs: best fit, so that whole NUMA nodes, L3 groups and cores stay free.

Everything is judged by what the machine really has, never by averages. `select` goes down level by
level: which NUMA nodes, which L3 groups in each, and there a *filler* says which CPUs. CPU sets are
plain integers, see `nri_numa.engine.cpus.index`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import comb

import msgspec

from nri_numa.engine.cpus.index import NOWHERE, AllocatorIndex, Unit

# Up to this many combinations of NUMA nodes are all compared (C(12, 6) is 924). Beyond, one
# candidate set grows around each NUMA node: 64 nodes cost 64 sets instead of 10^18.
_COMBINATIONS = 1000

Filler = Callable[[int, int], int]
"""``(candidates, n)`` to the n CPUs to take from these candidates of one L3 group."""


class CorePlaces(msgspec.Struct, frozen=True, kw_only=True):
    """What `select` chooses from and how.

    Attributes:
        index: the machine.
        candidates: what may be chosen: CPUs, or lowest threads that stand for cores.
        free: every CPU that is free now, candidates or not; tells how used a unit is.
        own: CPUs the container has already: the rest is taken next to them.
        weight: CPUs that one candidate stands for (a lowest thread stands for its whole core).
        fill: see `Filler`.
        align_l3: look at L3 groups at all.
        align_by_socket: more NUMA nodes of one socket rather than fewer of several.
        distribute: share evenly between NUMA nodes when more than one is needed.
        hint: positions of the NUMA nodes that the policy chose, as bits; with ``distribute`` all
            that have a candidate are used, since devices may be on any of them.
    """

    index: AllocatorIndex
    candidates: int
    free: int
    own: int
    weight: int
    fill: Filler
    align_l3: bool
    align_by_socket: bool
    distribute: bool
    hint: int = 0


def select(places: CorePlaces, n: int) -> int:
    """Choose ``n`` of the candidates; there must be that many."""
    index, candidates = places.index, places.candidates
    room = {
        p: count
        for p, unit in enumerate(index.numa)
        if (count := (candidates & unit.bits).bit_count())
    }
    near = [p for p, unit in enumerate(index.numa) if places.own & unit.bits]
    near_room = {p: room[p] for p in near if p in room}
    chosen = 0
    if sum(near_room.values()) >= n:
        shares = _shares(places, near_room, n, near)
    else:
        # Not enough beside what the container has: all of that, and the rest as close as it goes.
        missing = n - sum(near_room.values())
        far_room = {p: count for p, count in room.items() if p not in near_room}
        shares = near_room | _shares(places, far_room, missing, near)
    for p, share in shares.items():
        chosen |= _inside_numa_node(places, p, candidates & index.numa[p].bits, share)
    return chosen


def lowest(candidates: int, n: int) -> int:
    """The ``n`` lowest of the candidates: the filler where all are equally good."""
    if candidates.bit_count() <= n:
        return candidates
    rest = candidates
    for _ in range(n):
        rest &= rest - 1
    return candidates ^ rest


def threads_filler(index: AllocatorIndex, own: int) -> Filler:
    """A filler for single threads that completes and uses whole cores, and breaks the fewest.

    1. cores that the container has a part of and that become wholly its own, by core id;
    2. wholly free cores that fit into what is needed, larger ones first, then by core id;
    3. for the rest half-used cores: the largest part that fits, then the smallest that does not;
       equal parts by core id;
    4. only then a wholly free core is broken: the smallest, then by core id.
    """
    sizes = range(1, index.threads + 1)

    def fill(candidates: int, n: int) -> int:
        if candidates.bit_count() <= n:
            return candidates
        touched = index.touched(candidates)
        mine = index.touched(own) & touched if own else 0
        whole = index.whole(candidates | own) & touched
        chosen = 0
        counts = index.by_count(candidates)
        for completes in (True, False):
            group = whole & mine if completes else whole & ~mine
            for size in range(index.threads, 0, -1):
                for first in _ids(group & counts[size]):
                    if size > n:
                        break
                    chosen |= index.core_bits[first] & candidates
                    n -= size
        half_used = touched & ~whole
        for size in range(index.threads, 0, -1):
            for first in _ids(half_used & counts[size]):
                if size > n:
                    break
                chosen |= index.core_bits[first] & candidates
                n -= size
        if not n:
            return chosen
        # Every core that is left has more threads free than are needed.
        left = touched & ~index.touched(chosen)
        rests = (left & group & counts[size] for group in (half_used, whole) for size in sizes)
        first = next(_first(rest) for rest in rests if rest)
        return chosen | lowest(index.core_bits[first] & candidates, n)

    return fill


def _shares(
    places: CorePlaces, room: dict[int, int], n: int, near: Sequence[int]
) -> dict[int, int]:
    """How many candidates to take from which NUMA nodes (positions)."""
    nodes = _choose_numa_nodes(places, room, n, near)
    if places.distribute:
        every = {*nodes, *(p for p in room if places.hint >> p & 1)}
        nodes = sorted(every) if len(every) <= n else nodes
        if len(nodes) > 1:
            return _even(room, nodes, n)
    # Largest room first, then by position: most of the container is together, and only the last
    # NUMA node is left with a remainder.
    shares = {}
    for p in sorted(nodes, key=lambda p: (-room[p], p)):
        shares[p] = min(room[p], n)
        n -= shares[p]
    return shares


def _even(room: dict[int, int], nodes: Sequence[int], n: int) -> dict[int, int]:
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
    places: CorePlaces, room: dict[int, int], n: int, near: Sequence[int]
) -> Sequence[int]:
    index = places.index
    fits = [p for p, count in room.items() if count >= n]
    if fits:
        # One NUMA node. Order: most of the container's own CPUs; closest to them; a NUMA node
        # rather than CPUs without one, which have no memory of their own; fewest L3 groups; not
        # breaking a wholly free NUMA node (unless all of it is used); most used; most used
        # socket; position, that is NUMA node id.
        def one(p: int) -> tuple[int, int, bool, int, bool, int, int, int]:
            unit = index.numa[p]
            free = (places.free & unit.bits).bit_count()
            return (
                -(places.own & unit.bits).bit_count(),
                sum(index.distances[q][p] for q in near),
                unit.id == NOWHERE,
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

        return [min(fits, key=one)]
    if places.align_by_socket:
        room = _one_socket(index, room, n)
    return min(
        _combinations(index, room, n), key=lambda nodes: _many_key(places, room, n, near, nodes)
    )


def _one_socket(index: AllocatorIndex, room: dict[int, int], n: int) -> dict[int, int]:
    """The NUMA nodes of the socket with the least room that suffices, then the lowest id.

    All of them when no socket suffices.
    """
    inside = [
        {p: count for p, count in room.items() if index.numa[p].sockets >> i & 1}
        for i in range(len(index.sockets))
    ]
    fits = [nodes for nodes in inside if sum(nodes.values()) >= n]
    return min(fits, key=lambda nodes: sum(nodes.values()), default=room)


def _many_key(
    places: CorePlaces, room: dict[int, int], n: int, near: Sequence[int], nodes: Sequence[int]
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


def _combinations(index: AllocatorIndex, room: dict[int, int], n: int) -> Sequence[tuple[int, ...]]:
    """Sets of as few NUMA nodes as can hold ``n``; all of them, or one around each node."""
    size = total = 0
    for count in sorted(room.values(), reverse=True):
        if total >= n:
            break
        total += count
        size += 1
    if comb(len(room), size) <= _COMBINATIONS:
        return [nodes for nodes in combinations(room, size) if sum(room[p] for p in nodes) >= n]
    grown = (_grow(index, room, n, size, seed) for seed in room)
    return sorted({nodes for nodes in grown if nodes})


def _grow(
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


def _l3_groups_needed(places: CorePlaces, p: int, n: int) -> int:
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


def _inside_numa_node(places: CorePlaces, p: int, candidates: int, n: int) -> int:
    groups = places.index.numa[p].l3_groups
    if len(groups) == 1 or not places.align_l3 or candidates.bit_count() == n:
        return places.fill(candidates, n)
    chosen = 0
    while True:
        live = [
            (g, count) for g in groups if (count := (candidates & ~chosen & g.bits).bit_count())
        ]
        live = [item for item in live if places.own & item[0].bits] or live
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


def _l3_key(places: CorePlaces, group: Unit, n: int) -> tuple[bool, int, int]:
    """Not breaking a wholly free group (unless all of it is used), most used, id."""
    free = (places.free & group.bits).bit_count()
    return (
        free == group.bits.bit_count() and free != n * places.weight,
        free,
        group.id,
    )


def _first(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _ids(bits: int) -> list[int]:
    ids = []
    while bits:
        low = bits & -bits
        ids.append(low.bit_length() - 1)
        bits ^= low
    return ids
