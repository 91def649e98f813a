"""Slow, plain models of CPU assignment for differential tests.

Written with sets and dictionaries from the description of the kubelet's static CPU policy (its
documentation, KEP-2902 and KEP-4800), sharing no code with the allocator. Only for machines on
which every CPU has a NUMA node.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

from nri_numa.model.machine import Topology

Ids = frozenset[int]
Units = Mapping[int, Ids]


class KubeletOracle:
    """What the kubelet's CPU manager would take on one machine."""

    def __init__(self, topology: Topology) -> None:
        self.all: Ids = frozenset(topology.cpus)
        self.cores: Units = {i: frozenset(c.cpus) for i, c in topology.cores.items()}
        self.sockets: Units = {i: frozenset(s.cpus) for i, s in topology.sockets.items() if s.cpus}
        self.numa: Units = {i: frozenset(n.cpus) for i, n in topology.numa_nodes.items() if n.cpus}
        self.caches: Units = {i: frozenset(g.cpus) for i, g in topology.l3_groups.items()}
        self.per_core = len(self.all) // len(self.cores)
        self.per_socket = len(self.all) // len(self.sockets)
        self.per_cache = len(self.all) // len(self.caches) if self.caches else len(self.all)
        self.numa_outside = len(self.sockets) >= len(self.numa)

    # -- order ---------------------------------------------------------------------------------

    def _by_use(self, units: Units, free: Ids, within: Ids | None = None) -> list[int]:
        """Units with free CPUs (inside ``within``): fewest free first, then by id."""
        inside = self.all if within is None else within
        return sorted(
            (i for i, cpus in units.items() if cpus & free & inside),
            key=lambda i: (len(units[i] & free), i),
        )

    def _nested(self, outer: Units, inner: Units, free: Ids) -> list[int]:
        found: dict[int, None] = {}
        for o in self._by_use(outer, free):
            for i in self._by_use(inner, free, outer[o]):
                found.setdefault(i)
        return list(found)

    def numa_order(self, free: Ids) -> list[int]:
        if self.numa_outside:
            return self._by_use(self.numa, free)
        return self._nested(self.sockets, self.numa, free)

    def socket_order(self, free: Ids) -> list[int]:
        if self.numa_outside:
            return self._nested(self.numa, self.sockets, free)
        return self._by_use(self.sockets, free)

    def core_order(self, free: Ids) -> list[int]:
        order, units = (
            (self.socket_order(free), self.sockets)
            if self.numa_outside
            else (self.numa_order(free), self.numa)
        )
        found: dict[int, None] = {}
        for u in order:
            for c in self._by_use(self.cores, free, units[u]):
                found.setdefault(c)
        return list(found)

    def cache_order(self, free: Ids) -> list[int]:
        found: dict[int, None] = {}
        for v in self.numa_order(free):
            for g in self._by_use(self.caches, free, self.numa[v]):
                found.setdefault(g)
        return list(found)

    # -- packed --------------------------------------------------------------------------------

    def packed(
        self, free: Iterable[int], n: int, *, caches: bool = False, across: bool = False
    ) -> Ids:
        left, taken = set(free), set[int]()
        assert n <= len(left)

        def missing() -> int:
            return n - len(taken)

        def take(cpus: Iterable[int]) -> None:
            for cpu in list(cpus):
                left.remove(cpu)
                taken.add(cpu)

        def now() -> Ids:
            return frozenset(left)

        def whole_numa() -> None:
            for v in self.numa_order(now()):
                if self.numa[v] <= left and len(self.numa[v]) <= missing():
                    take(self.numa[v])

        def whole_sockets() -> None:
            for s in self.socket_order(now()):
                here = self.sockets[s] & left
                if len(here) == self.per_socket <= missing():
                    take(here)

        def whole_caches() -> None:
            for g in self.cache_order(now()):
                if self.caches[g] <= left and len(self.caches[g]) <= missing():
                    take(self.caches[g])

        def by_cache() -> None:
            for g in self.cache_order(now()):
                if missing() >= self.per_cache:
                    whole_caches()
                if not missing():
                    return
                cores = sorted(c for c, cpus in self.cores.items() if cpus & left & self.caches[g])
                count = -(-missing() // self.per_core)
                cpus = sorted(set().union(*(self.cores[c] & left for c in cores[:count])))
                if missing() % 2 == 1 and self.per_core > 1 and len(cpus) > missing():
                    cpus.pop()
                if len(cpus) == missing():
                    take(cpus)

        def whole_cores() -> None:
            for c in self.core_order(now()):
                here = self.cores[c] & left
                if len(here) == self.per_core <= missing():
                    take(here)

        def singles() -> None:
            for c in self.core_order(now()):
                for cpu in sorted(self.cores[c] & left):
                    if missing():
                        take([cpu])

        def by_number() -> None:
            for s in self.socket_order(now()):
                take(sorted(self.sockets[s] & left)[: missing()])

        outer, inner = whole_numa, whole_sockets
        if not self.numa_outside:
            outer, inner = inner, outer
        steps: list[Callable[[], None]] = [outer, inner]
        if caches:
            steps.append(by_cache)
        steps += [by_number] if across else [whole_cores, singles]
        for step in steps:
            if missing():
                step()
        return frozenset(taken)

    # -- distributed ---------------------------------------------------------------------------

    def distributed(self, free: Iterable[int], n: int, group: int, hint: Iterable[int] = ()) -> Ids:
        free = frozenset(free)
        if n % group or not n:
            return self.packed(free, n)
        nodes = self.numa_order(free)
        have = {v: len(self.numa[v] & free) for v in nodes}
        want = -(-n // group)
        groups = math.ceil(len(self.all) / group)
        per_node = math.ceil(groups / len(self.numa))
        # As wide as the hint, where so many of its NUMA nodes have anything.
        wide = min(sum(1 for v in hint if have.get(v)), want)
        for k in range(max(-(-want // per_node), wide), min(want, len(nodes)) + 1):
            plans = [
                p for c in itertools.combinations(nodes, k) for p in self._plans(have, c, n, group)
            ]
            if plans:
                # min() keeps the first of equals, which is the rule for ties.
                _, combo, givers = min(plans, key=lambda p: p[0])
                return self._carry_out(free, combo, givers, n, group)
        return self.packed(free, n)

    def _plans(
        self, have: Mapping[int, int], combo: tuple[int, ...], n: int, group: int
    ) -> Iterable[tuple[Decimal, tuple[int, ...], tuple[int, ...]]]:
        if sum(have[v] for v in combo) < n or sum(have[v] // group for v in combo) * group < n:
            return
        each = n // len(combo) // group * group
        if min(have[v] for v in combo) < each:
            return
        left = {v: c - (each if v in combo else 0) for v, c in have.items()}
        rest = n - each * len(combo)
        if not rest:
            yield _spread(left.values()), combo, ()
            return
        able = [v for v in combo if left[v] >= group]
        for size in range(len(able), 0, -1):
            for givers in itertools.combinations(able, size):
                after = dict(left)
                turns = itertools.cycle(givers)
                owed = rest
                while owed and any(after[v] >= group for v in givers):
                    v = next(turns)
                    if after[v] >= group:
                        after[v] -= group
                        owed -= group
                if not owed:
                    yield _spread(after.values()), combo, givers

    def _carry_out(
        self, free: Ids, combo: tuple[int, ...], givers: tuple[int, ...], n: int, group: int
    ) -> Ids:
        each = n // len(combo) // group * group
        taken: Ids = frozenset()
        for v in combo:
            taken |= self.packed(self.numa[v] & free, each)
        turns = itertools.cycle(givers)
        while len(taken) < n:
            here = (self.numa[next(turns)] & free) - taken
            if len(here) >= group:
                taken |= self.packed(here, group)
        return taken


def _thousandths(x: Decimal) -> Decimal:
    return x.quantize(Decimal("0.001"), ROUND_HALF_UP)


def _spread(counts: Iterable[int]) -> Decimal:
    """Population standard deviation around the mean of three decimals, itself of three."""
    values = list(counts)
    mean = Fraction(_thousandths(Decimal(sum(values)) / len(values)))
    variance = Fraction(0)
    for v in values:
        variance += (Fraction(v) - mean) ** 2 / len(values)
    return _thousandths((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())


def can_make(sizes: Iterable[int], n: int) -> bool:
    """Whether some of these core sizes add up to exactly ``n``."""
    sums = {0}
    for size in sizes:
        sums |= {s + size for s in sums}
    return n in sums
