"""From a number and a set to CPUs: which CPUs an exclusive container gets.

`take_cpus` is the only door. The order of levels, for one request:

1. CPUs inside the NUMA affinity before CPUs outside (never outside when ``strict``);
2. CPUs that no other program pinned containers to before those of cores where one did;
3. the kernel's isolated CPUs, as the settings say;
4. thread siblings, preferred CPUs, CPUs whose timer tick may stop, core kinds;
5. among equally good ones one of `nri_numa.engine.cpus.orders`.

Three modes take single threads core by core (``spread``, ``isolate``, ``pair``): `_Take._next` says
which cores are the best kind that is left. ``full-core`` takes whole cores: `whole_cores` lists the
kinds and `counts_that_fit` how many of each add up to the request. CPU sets are plain
integers, see `nri_numa.engine.cpus.index`.

docs/adr/0010-cpu-order.md tells why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from nri_numa.engine.cpus.index import NOWHERE, AllocatorIndex, index
from nri_numa.engine.cpus.orders import (
    MOST_NUMA_NODES,
    CorePlaces,
    Filler,
    cores_in_order,
    lowest,
    select,
    take_distributed,
    take_packed,
    threads_filler,
    threads_per_core,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology, counted, cpus_text, numa_text
from nri_numa.model.settings import CPUOrder, NohzFullCPUs, PreferredCores, Settings
from nri_numa.model.workload import HIGH, SMT, Load


class TakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What `take_cpus` is asked for.

    Attributes:
        count: whole CPUs wanted, ``held`` ones counted.
        available: CPUs free for exclusive use; reserved and owned ones are not in it.
        prefer: take these first: a restarted container's old CPUs, CPUs of finished init
            containers. When they are exactly as many as wanted, all free and inside the affinity,
            they are taken as they are.
        held: CPUs that the container owns already; all of them stay, unless they went offline.
        affinity: take from these NUMA nodes first; None is anywhere.
        load: of this container, for ``pair``; None counts as high.
        last: CPUs to take when there are no others: another program pinned containers to them.
        listed: CPUs of lists that give way: others are taken where they are as good.
    """

    count: int
    available: CPUSet
    prefer: CPUSet = NO_CPUS
    held: CPUSet = NO_CPUS
    affinity: NUMASet | None = None
    strict: bool = False
    smt: SMT = SMT.SPREAD
    load: Load | None = None
    loads: Mapping[int, Load] = msgspec.field(default_factory=dict)
    busy: CPUSet = NO_CPUS
    last: CPUSet = NO_CPUS
    listed: CPUSet = NO_CPUS
    settings: Settings = msgspec.field(default_factory=Settings)


class ChosenCPUs(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs were found.

    Attributes:
        idle: siblings of them that no container may use (``isolate``).
    """

    cpus: CPUSet
    idle: CPUSet = NO_CPUS
    notes: tuple[str, ...] = ()


class NotEnoughCPUs(msgspec.Struct, frozen=True, kw_only=True):
    """Fewer CPUs can be had than wanted.

    Attributes:
        per_numa: their number by NUMA node, for all NUMA nodes with CPUs (`NOWHERE` for CPUs
            without one).
    """

    requested: int
    available: CPUSet
    per_numa: Mapping[int, int]
    held: int = 0


class SMTAlignmentRefused(msgspec.Struct, frozen=True, kw_only=True):
    """``full-core``, and whole cores cannot make exactly the number wanted.

    Attributes:
        threads_per_core: the largest number of threads on one core of the machine.
        fitting: the next lower and the next higher number that these make; where they make none,
            that all cores of the machine make.
    """

    requested: int
    threads_per_core: int
    available: CPUSet
    fitting: tuple[int, ...] = ()


class Partners(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs of other containers, by what their load means beside ours.

    Attributes:
        opposite: one of the two is idle whenever the other is busy, and at least one is ever busy.
        idle: both are never busy.
        same: busy at some same minute.
    """

    opposite: int = 0
    idle: int = 0
    same: int = 0


def partners(load: Load | None, loads: Mapping[int, Load]) -> Partners:
    """Sort the CPUs of other containers by their load against ours; ours unknown counts as high."""
    ours = HIGH if load is None else load
    # The CPUs of one container carry the same object: comparing identities first saves hashing
    # and comparing intervals CPU by CPU.
    groups: dict[int, tuple[Load, list[int]]] = {}
    for cpu, theirs in loads.items():
        groups.setdefault(id(theirs), (theirs, []))[1].append(cpu)
    opposite = idle = same = 0
    for theirs, cpus in groups.values():
        bits = CPUSet(cpus).bits
        if ours.overlaps(theirs):
            same |= bits
        elif ours.busy or theirs.busy:
            opposite |= bits
        else:
            idle |= bits
    return Partners(opposite=opposite, idle=idle, same=same)


class CoreClass(msgspec.Struct, frozen=True):
    """Equally good whole cores (as lowest threads), each of which adds ``size`` CPUs."""

    cores: int
    size: int


def _best(cores: int, classes: Iterable[int]) -> int:
    return next((found for c in classes if (found := cores & c)), 0)


def whole_cores(
    index: AllocatorIndex, free: int, own: int, tiers: Sequence[Callable[[int], int]]
) -> list[CoreClass]:
    """Cores that would belong wholly to the container, best classes first.

    Order: cores that the container has a part of; then tier by tier (each tier says which of some
    cores are good, and is compared before the next); then larger before smaller.
    """
    whole = index.whole(free | own) & index.touched(free)
    mine = whole & index.touched(own)
    groups = [mine, whole & ~mine]
    for good in tiers:
        groups = [part for g in groups for part in (good(g), g & ~good(g)) if part]
    adds = index.by_count(free)
    return [
        CoreClass(cores, size)
        for g in groups
        for size in range(index.threads, 0, -1)
        if (cores := g & adds[size])
    ]


def counts_that_fit(classes: Sequence[CoreClass], n: int) -> list[int] | None:
    """How many cores of each class make exactly ``n`` CPUs, as many as can be of earlier ones.

    None when whole cores cannot make ``n``.
    """
    # reach[i]: bit s is set when classes i and later can make s CPUs.
    reach = [1]
    for c in reversed(classes):
        reach.append(_add(reach[-1], c))
    reach.reverse()
    if not reach[0] >> n & 1:
        return None
    counts = []
    for c, after in zip(classes, reach[1:], strict=True):
        count = min(c.cores.bit_count(), n // c.size)
        while not after >> (n - count * c.size) & 1:
            count -= 1
        counts.append(count)
        n -= count * c.size
    return counts


def nearest_counts(classes: Sequence[CoreClass], n: int) -> tuple[int, ...]:
    """The next lower and the next higher number of CPUs that whole cores make, where there are."""
    reach = 1
    for c in classes:
        reach = _add(reach, c)
    lower = (reach & ((1 << n) - 1)).bit_length() - 1
    higher = reach >> n + 1
    found = (lower,) if lower > 0 else ()
    return (*found, n + (higher & -higher).bit_length()) if higher else found


def _add(reach: int, c: CoreClass) -> int:
    """Sums that can be made with up to all cores of a class added to those that could before."""
    left, step = c.cores.bit_count(), 1
    while left:
        step = min(step, left)
        reach |= reach << step * c.size
        left -= step
        step *= 2
    return reach


_MANY = 3  # shared cores that are named one by one


def where(index: AllocatorIndex, cpus: int) -> list[str]:
    """One sentence for each NUMA node: how many CPUs, and how many of its cores are whole."""
    whole = index.whole(cpus)
    notes = []
    for unit in index.numa:
        count = (cpus & unit.bits).bit_count()
        if count:
            cores = (whole & unit.bits).bit_count()
            name = "without a NUMA node" if unit.id == NOWHERE else f"of NUMA node {unit.id}"
            detail = f" ({counted(cores, 'whole core')})" if cores else ""
            notes.append(f"{counted(count, 'CPU')} {name}{detail}")
    return notes


def named(cpus: int, *verb: str) -> str:
    """``CPU 3`` or ``CPUs 3,5``; with a verb as `cpus_text`."""
    return cpus_text(CPUSet.from_bits(cpus), *verb)


def take_cpus(
    topology: Topology, request: TakeRequest, tables: AllocatorIndex | None = None
) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
    """Choose CPUs.

    The same for equal arguments, whatever was decided before. Building the tables anew costs more
    than the choice itself. A negative count is a bug in the caller: ValueError.
    """
    if request.count < 0:
        raise ValueError(f"{request.count} CPUs were asked for; expected 0 or more")
    ix = index(topology) if tables is None else tables
    held = request.held.bits & ix.all
    if request.count < held.bit_count():
        return _shrink(ix, request, held)
    return _Take(ix, request, held).run()


def _keep(ix: AllocatorIndex, held: int, count: int, smt: SMT, affinity: NUMASet | None) -> int:
    """Shrink in place: which ``count`` of the held CPUs stay.

    Order: with ``spread``, ``isolate`` and ``pair`` one thread of every core before second
    threads; NUMA nodes of ``affinity`` before others; the NUMA node with most of them, then the
    lower id; in it the L3 group with most of them, then the lower id; there whole cores before
    parts (other modes), lower CPUs first.
    """
    kept = 0
    while held and count > 0:
        layer, fill = held, threads_filler(ix, 0)
        if smt not in (SMT.ANY, SMT.FULL_CORE):
            layer, fill = ix.lowest_threads(ix.touched(held), held), lowest
        inside = {u.id: (layer & u.bits).bit_count() for u in ix.numa}
        for unit in sorted(
            ix.numa,
            key=lambda u: (affinity is not None and u.id not in affinity, -inside[u.id], u.id),
        ):
            for group in sorted(
                unit.l3_groups, key=lambda g: (-(layer & g.bits).bit_count(), g.id)
            ):
                part = fill(layer & group.bits, count)
                kept |= part
                count -= part.bit_count()
        held &= ~layer
    return kept


def _shrink(
    ix: AllocatorIndex, request: TakeRequest, held: int
) -> ChosenCPUs | SMTAlignmentRefused:
    if request.smt is SMT.FULL_CORE:
        # Cores of the machine, where a sibling that was offline is back and it has parts of cores.
        cores = held if ix.members(ix.whole(held)) == held else ix.all
        if counts_that_fit(_cores(ix, cores), request.count) is None:
            return _misaligned(ix, request.count, held)
    kept = _keep(ix, held, request.count, request.smt, request.affinity)
    idle = _idle(ix, request, kept)
    return ChosenCPUs(
        cpus=CPUSet.from_bits(kept),
        idle=CPUSet.from_bits(idle),
        notes=(
            f"keeps {request.count} of the {counted(held.bit_count(), 'CPU')} it had",
            *where(ix, kept),
        ),
    )


def _cores(ix: AllocatorIndex, cpus: int) -> list[CoreClass]:
    """The cores that some CPUs make, larger before smaller."""
    return [
        CoreClass(cores, size)
        for size, cores in reversed(list(enumerate(ix.by_count(cpus))))
        if cores and size
    ]


def _misaligned(ix: AllocatorIndex, count: int, free: int) -> SMTAlignmentRefused:
    whole = ix.members(ix.whole(free))
    fitting = nearest_counts(_cores(ix, whole), count)
    return SMTAlignmentRefused(
        requested=count,
        threads_per_core=ix.threads,
        available=CPUSet.from_bits(whole),
        fitting=fitting or nearest_counts(_cores(ix, ix.all), count),
    )


def _idle(ix: AllocatorIndex, request: TakeRequest, cpus: int) -> int:
    if request.smt is not SMT.ISOLATE:
        return 0
    return ix.members(ix.touched(cpus)) & ~cpus & ~request.busy.bits


class _Take:
    """One request on its way: what is free, what is taken, how many are missing."""

    def __init__(self, ix: AllocatorIndex, request: TakeRequest, held: int) -> None:
        settings = request.settings
        self.ix = ix
        self.request = request
        self.settings = settings
        self.held = held
        self.taken = held
        self.needed = request.count - held.bit_count()
        self.free = request.available.bits & ix.all & ~held & ~request.busy.bits
        self.prefer = request.prefer.bits & self.free
        self.kubelet = settings.cpu_order is CPUOrder.KUBELET
        # The kubelet knows neither isolated CPUs, ticks nor core kinds.
        self.good_isolation = self.good_tick = self.good_kind = ix.all
        if not self.kubelet:
            self.good_isolation = ix.suiting_isolation(settings)
            if ix.nohz_full and settings.nohz_full is not NohzFullCPUs.ANY:
                avoid = settings.nohz_full is NohzFullCPUs.AVOID
                self.good_tick = ix.all & ~ix.nohz_full if avoid else ix.nohz_full
            if settings.cores is PreferredCores.PERFORMANCE:
                self.good_kind = ix.all & ~ix.efficient
            elif settings.cores is PreferredCores.EFFICIENT:
                self.good_kind = ix.all & ~ix.performance
        uniform = self.good_tick == ix.all
        self.ticks = (ix.all,) if uniform else (self.good_tick, ix.all & ~self.good_tick)
        # The kubelet's order takes no notice of others either.
        self.last = 0 if self.kubelet else request.last.bits & ix.all
        self.partners = (
            partners(request.load, request.loads) if request.smt is SMT.PAIR else Partners()
        )
        within = 0 if request.affinity is None else request.affinity.bits
        self.hint = sum(1 << p for p, u in enumerate(ix.numa) if u.id >= 0 and within >> u.id & 1)
        inside = self._inside()
        elsewhere = 0 if request.strict else ix.all & ~inside
        self.regions = (inside, elsewhere) if elsewhere else (inside,)
        self.room = self.free & (inside if request.strict else ix.all)

    def _inside(self) -> int:
        if self.request.affinity is None:
            return self.ix.all
        inside = sum(u.bits for p, u in enumerate(self.ix.numa) if self.hint >> p & 1)
        if self.settings.align_by_socket:
            for socket in self.ix.sockets:
                if socket.bits & inside:
                    inside |= socket.bits
        return inside

    def run(self) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
        request, smt = self.request, self.request.smt
        if (
            smt is SMT.FULL_CORE
            and counts_that_fit(_cores(self.ix, self.ix.all), request.count) is None
        ):
            return self._misaligned()
        if not self.needed:
            return self._done()
        if self.room.bit_count() < self.needed:
            return self._not_enough()
        if self._fits_as_preferred():
            self._add(self.prefer)
            return self._done("these are the CPUs it had before")
        if smt is SMT.FULL_CORE:
            return self._full_cores()
        if smt is SMT.ANY:
            self._any_threads()
        else:
            self._threads_of_cores()
        return self._not_enough() if self.needed else self._done()

    def _fits_as_preferred(self) -> bool:
        prefer = self.prefer
        if (
            self.held
            or prefer.bit_count() != self.needed
            or prefer != self.request.prefer.bits
            or prefer & ~self.regions[0]
        ):
            return False
        cores = self.ix.touched(prefer)
        if self.request.smt is SMT.FULL_CORE:
            return self.ix.members(cores) == prefer
        if self.request.smt is SMT.ISOLATE:
            return (
                cores.bit_count() == prefer.bit_count() and not self.ix.members(cores) & ~self.free
            )
        return True

    # -- the ways to take ------------------------------------------------------------------------

    def _any_threads(self) -> None:
        for region in self.regions:
            if self.kubelet:
                self._kubelet_threads(region)
                continue
            fill = threads_filler(self.ix, self.taken)
            for zone in self._by_tick(region, self.free):
                for tier in self._tiers(zone):
                    n = min(self.needed, (self.free & tier).bit_count())
                    if n:
                        self._add(self._select(self.free & tier, n, fill=fill))

    def _tiers(self, region: int) -> Iterator[int]:
        yield region & self.prefer
        for zone in self._foreign_last():
            for isolation in (self.good_isolation, ~self.good_isolation):
                for tick in self.ticks:
                    for kind in (self.good_kind, ~self.good_kind):
                        yield region & zone & isolation & tick & kind

    def _by_tick(self, region: int, candidates: int) -> tuple[int, ...]:
        """A region, split where the preferred tick would cost another NUMA node."""
        if len(self.ticks) == 1 or self.prefer:
            return (region,)
        candidates &= region & self.good_isolation & ~self.last
        narrow = self._numa_nodes_for(candidates)
        good = self._numa_nodes_for(candidates & self.good_tick)
        if not narrow or (good and good.bit_count() <= narrow.bit_count()):
            return (region,)
        inside = sum(u.bits for p, u in enumerate(self.ix.numa) if narrow >> p & 1)
        return region & inside, region & ~inside

    def _foreign_last(self) -> tuple[int, ...]:
        """Cores that no others use, then CPUs that no others use, then all."""
        if not self.last:
            return (self.ix.all,)
        ix = self.ix
        return (ix.all & ~ix.members(ix.touched(self.last)), ix.all & ~self.last, ix.all)

    def _kubelet_threads(self, region: int) -> None:
        for tier in (region & self.prefer, region):
            free = self.free & tier
            n = min(self.needed, free.bit_count())
            if n:
                self._add(self._kubelet_take(free, n, 1))

    def _kubelet_take(self, free: int, n: int, group: int) -> int:
        if self.settings.distribute_across_numa:
            if len(self.ix.numa) > MOST_NUMA_NODES:
                return self._select(free, n, fill=threads_filler(self.ix, self.taken))
            least = sum(
                1 for p, u in enumerate(self.ix.numa) if self.hint >> p & 1 and u.bits & free
            )
            return take_distributed(self.ix, free, n, group, least)
        across = self.settings.distribute_across_cores and group == 1
        return take_packed(self.ix, free, n, align_l3=self.settings.align_l3, across_cores=across)

    def _threads_of_cores(self) -> None:
        for region in self.regions:
            for zone in self._narrowest_first(region) if self.needed else ():
                for part, count in self._shares(zone):
                    self._threads_of_cores_in(part, count)

    def _threads_of_cores_in(self, zone: int, count: int) -> None:
        stop = self.needed - count
        for foreign in self._foreign_last():
            for isolation in (self.good_isolation | self.prefer, self.ix.all):
                part = zone & (foreign | self.prefer) & isolation
                while self.needed > stop and (candidates := self._next(part)):
                    self._add(
                        self._pick(candidates, min(self.needed - stop, candidates.bit_count()))
                    )

    def _shares(self, zone: int) -> Iterator[tuple[int, int]]:
        """Parts of a zone, and how many CPUs to take from each.

        To distribute evenly over NUMA nodes, the numbers come first: thread kind by thread kind
        each round would be even and their sum would not.
        """
        if self.settings.distribute_across_numa:
            ix, kinds = self.ix, []
            for free in (self.free & zone & self.good_isolation & ~self.last, self.free & zone):
                kinds.append(self._next(free))
                if self.request.smt is not SMT.ISOLATE:
                    cores = ix.touched(free) & ~ix.touched(self.taken)
                    kinds += [ix.lowest_threads(cores, free), free]
            enough = next((k for k in kinds if k.bit_count() >= self.needed), 0)
            chosen = self._select(enough, self.needed, fill=lowest) if enough else 0
            parts = [(u.bits & zone, (u.bits & chosen).bit_count()) for u in ix.numa]
            parts = [part for part in parts if part[1]]
            if len(parts) > 1:
                yield from parts
        if self.needed:
            yield zone, self.needed

    def _next(self, zone: int) -> int:
        """The best kind of free CPUs in a zone, one for each core that is equally good; may be 0.

        Order of cores, for ``spread`` and ``pair``: fewest threads of this container; a preferred
        CPU; then by who has the other threads (``spread``: fewest taken by others; ``pair``: only
        opposite loads, none, only never busy ones, unknown ones, same hours); then the preferred
        timer tick; then the preferred core kind. ``isolate`` takes only cores that are wholly free,
        preferred CPUs, ticks and kinds first.
        """
        ix, smt = self.ix, self.request.smt
        zone &= self.free
        cores = ix.touched(zone)
        if smt is SMT.ISOLATE:
            cores &= ix.whole(self.free)
        elif self.taken:
            cores = _best(cores, ix.by_count(self.taken))
        preferred = cores & ix.touched(zone & self.prefer) if self.prefer else 0
        if preferred:
            cores, zone = preferred, zone & self.prefer
        if smt is SMT.SPREAD:
            cores = _best(cores, ix.by_count(self._others()))
        elif smt is SMT.PAIR:
            cores = _best(cores, self._pair_classes())
        if self.good_tick != ix.all:
            best = zone & ix.members(cores) & self.good_tick
            cores, zone = (ix.touched(best), best) if best else (cores, zone)
        cores = cores & ix.touched(self.good_kind) or cores
        return ix.lowest_threads(cores, zone)

    def _others(self) -> int:
        """CPUs that are neither free nor the container's."""
        return self.ix.all & ~self.free & ~self.taken

    def _pair_classes(self) -> Sequence[int]:
        ix, others, known = self.ix, self._others(), self.partners
        same = ix.touched(others & known.same)
        unknown = ix.touched(others & ~known.same & ~known.opposite & ~known.idle)
        quiet = ix.firsts & ~same & ~unknown
        opposite = quiet & ix.touched(others & known.opposite)
        none = ix.firsts & ~ix.touched(others)
        return (opposite, none, quiet & ~opposite & ~none, unknown & ~same, same)

    def _narrowest_first(self, region: int) -> Iterator[int]:
        """A region, split where half-used cores would spare it another NUMA node.

        ChosenCPUs kind by kind, the last wholly free cores would be collected from all over the
        machine. So the fewest NUMA nodes that have one thread on as many cores as are needed come
        first, whatever is on the other threads; for ``pair``, cores that are busy at the same hours
        do not count.
        """
        ix, zone = self.ix, self.free & region & self.good_isolation & ~self.last
        best = self._next(zone)
        if (
            self.kubelet
            or self.prefer
            or self.request.smt is SMT.ISOLATE
            or not best
            # The usual case: one NUMA node has enough of the best kind.
            or (not self.held and any((best & u.bits).bit_count() >= self.needed for u in ix.numa))
        ):
            yield region
            return
        cores = ix.touched(zone) & ~ix.touched(self.taken)
        if self.request.smt is SMT.PAIR:
            cores &= ~ix.touched(self.partners.same & ~self.free & ~self.taken)
        any_thread = ix.lowest_threads(cores, zone)
        narrow = self._numa_nodes_for(any_thread)
        kind = self._numa_nodes_for(best)
        if narrow and (not kind or narrow.bit_count() < kind.bit_count()):
            inside = sum(u.bits for p, u in enumerate(ix.numa) if narrow >> p & 1)
            yield region & inside
            yield region & ~inside
        else:
            yield region

    def _numa_nodes_for(self, candidates: int) -> int:
        """Positions of the NUMA nodes that would give all that is missing; 0 when none can."""
        if candidates.bit_count() < self.needed:
            return 0
        chosen = self._select(candidates, self.needed, fill=lowest)
        return sum(1 << p for p, u in enumerate(self.ix.numa) if chosen & u.bits)

    def _pick(self, candidates: int, n: int, weight: int = 1) -> int:
        if not self.kubelet or self.settings.distribute_across_numa:
            return self._select(candidates, n, fill=lowest, weight=weight)
        chosen = 0
        for core in cores_in_order(self.ix, self.free):
            if n and core.bits & candidates:
                chosen |= core.bits & candidates
                n -= 1
        return chosen

    def _select(self, candidates: int, n: int, *, fill: Filler, weight: int = 1) -> int:
        return select(
            CorePlaces(
                index=self.ix,
                candidates=candidates,
                free=self.free,
                own=self.taken,
                weight=weight,
                fill=fill,
                align_l3=self.settings.align_l3,
                align_by_socket=self.settings.align_by_socket,
                distribute=self.settings.distribute_across_numa,
                hint=self.hint,
            ),
            n,
        )

    def _full_cores(self) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
        ix = self.ix
        if self.kubelet and not self.held and not self.prefer:
            chosen = self._kubelet_full_cores()
            if chosen:
                self._add(chosen)
                return self._done()
        classes: list[CoreClass] = []
        whole = 0 if len(self.ticks) == 1 else ix.members(ix.whole(self.free | self.held))
        for region in (
            zone for one in self.regions for zone in self._by_tick(one, whole & self.free)
        ):
            tiers: list[Callable[[int], int]] = [
                lambda cores: cores & ix.touched(self.prefer),
                lambda cores: cores & ~ix.touched(self.last),
                lambda cores: cores & ~ix.touched(self.free & ~self.good_isolation),
                lambda cores: cores & ix.touched(self.good_kind),
            ]
            if len(self.ticks) > 1:
                tiers.insert(-1, lambda cores: cores & ~ix.touched(self.free & ~self.good_tick))
            classes += whole_cores(ix, self.free & region, self.held, tiers)
        counts = counts_that_fit(classes, self.needed)
        if counts is None:
            most = sum(c.cores.bit_count() * c.size for c in classes)
            return self._not_enough() if most < self.needed else self._misaligned()
        for c, n in zip(classes, counts, strict=True):
            if n:
                cores = self._pick(c.cores, n, c.size)
                self._add(ix.members(cores) & self.free)
        return self._done()

    def _kubelet_full_cores(self) -> int:
        """What the kubelet takes with full-pcpus-only, or 0 when these are not whole cores.

        It judges cores by the machine's average and rounds nothing when it fills the affinity
        first, so that on uneven machines, or with an odd number of CPUs inside the affinity, its
        answer can hold parts of cores.
        """
        ix, chosen = self.ix, 0
        for region in self.regions:
            free = self.free & region & ~chosen
            n = min(self.needed - chosen.bit_count(), free.bit_count())
            if n:
                chosen |= self._kubelet_take(free, n, threads_per_core(ix))
        return chosen if ix.members(ix.touched(chosen)) == chosen else 0

    # -- the answers -----------------------------------------------------------------------------

    def _add(self, cpus: int) -> None:
        self.taken |= cpus
        self.free &= ~cpus
        self.needed -= cpus.bit_count()

    def _done(self, *reasons: str) -> ChosenCPUs:
        ix, request = self.ix, self.request
        fresh = self.taken & ~self.held
        notes = [*reasons]
        if self.held:
            notes.append(f"keeps the {counted(self.held.bit_count(), 'CPU')} it had")
        notes += where(ix, self.taken)
        if outside := fresh & ~self.regions[0]:
            away = f"outside {numa_text(str(request.affinity))}, where no more could be taken"
            notes.append(f"{named(outside, 'lies', 'lie')} {away}")
        if beside := fresh & request.last.bits:
            used = "also used by containers that another component pinned there"
            notes.append(f"{named(beside, 'is', 'are')} {used}")
        if request.smt is SMT.PAIR and request.load is None:
            notes.append("no load was given for it, so it counts as high")
        notes += self._shared_cores(fresh)
        crowded = sum(cores.bit_count() for cores in ix.by_count(self.taken)[2:])
        if crowded and request.smt in (SMT.SPREAD, SMT.PAIR):
            cores = counted(crowded, "core")
            notes.append(f"more than one of its CPUs on {cores}, as no other core was free")
        return ChosenCPUs(
            cpus=CPUSet.from_bits(self.taken),
            idle=CPUSet.from_bits(_idle(ix, request, self.taken)),
            notes=tuple(notes),
        )

    def _shared_cores(self, fresh: int) -> list[str]:
        """Who has the threads beside the fresh CPUs, for a few cores."""
        ix, others, why = self.ix, self._others(), ""
        cores = ix.touched(fresh) & ix.touched(others)
        if cores and self.request.smt is SMT.SPREAD:
            free_left = ix.whole(self.free) & ix.touched(self.room)
            why = "to stay on few NUMA nodes, " if free_left else "no core is free: "
        notes = []
        for core in CPUSet.from_bits(lowest(cores, _MANY)):
            members = ix.core_bits[core]
            share = named(members & fresh, "shares", "share")
            notes.append(f"{why}{share} a core with {self._whose(members & others)}")
        more = cores.bit_count() - _MANY
        if more > 0:
            notes.append(f"the same on {counted(more, 'more core')}")
        return notes

    def _whose(self, theirs: int) -> str:
        owned, known = theirs & self.request.busy.bits, self.partners
        if not owned:
            return f"{named(theirs)}, not free for exclusive use"
        text = f"{named(owned)} of another container"
        if self.request.smt is not SMT.PAIR:
            return text
        if owned & known.same:
            return f"{text} that is busy at the same hours"
        if owned & ~known.opposite & ~known.idle:
            return f"{text} of unknown load"
        if owned & known.opposite:
            return f"{text} of the opposite load"
        return f"{text} that is never busy either"

    def _not_enough(self) -> NotEnoughCPUs:
        ix, smt = self.ix, self.request.smt
        # What was taken on the way was free, too.
        free = (self.free | self.taken & ~self.held) & self.room
        if smt is SMT.FULL_CORE:
            free = ix.members(ix.whole(free | self.held)) & free
        elif smt is SMT.ISOLATE:
            cores = ix.whole(free) & ~ix.touched(self.held)
            free = ix.lowest_threads(cores, free)
        return NotEnoughCPUs(
            requested=self.request.count,
            available=CPUSet.from_bits(free),
            per_numa={u.id: (free & u.bits).bit_count() for u in ix.numa},
            held=self.held.bit_count(),
        )

    def _misaligned(self) -> SMTAlignmentRefused:
        return _misaligned(self.ix, self.request.count, self.room | self.held)
