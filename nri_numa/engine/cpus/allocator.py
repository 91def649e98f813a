"""From a number and a set to CPUs: which CPUs an exclusive container gets.

`take_cpus` is the only door. The order of levels, for one request:

1. CPUs inside the NUMA affinity before CPUs outside (never outside when ``strict``);
2. CPUs that no other program pinned containers to before those of cores where one did;
3. the kernel's isolated CPUs, as the settings say;
4. thread siblings, preferred CPUs, CPUs whose timer tick may stop, core kinds;
5. among equally good ones one of `nri_numa.engine.cpus.orders`.

Three modes take single threads core by core (``spread``, ``isolate``, ``pair``):
`_CPUAccumulator._best_free_threads` says which cores are the best kind that is left. ``full-core``
takes whole cores: `whole_core_classes_by_tier` lists the kinds and `fitting_core_counts` how many
of each add up to the request. CPU sets are plain integers, see `nri_numa.engine.cpus.index`.

docs/adr/0010-cpu-order.md tells why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, product

import msgspec

from nri_numa.engine.cpus.index import NO_UNIT, AllocatorIndex
from nri_numa.engine.cpus.orders import (
    MAX_DISTRIBUTED_NUMA_NODES,
    CPUFiller,
    SelectionPool,
    cores_in_order,
    select_cpus,
    select_lowest_ids,
    take_distributed,
    take_packed,
    threads_per_core,
    whole_cores_first_filler,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import count_text, cpus_text, numa_text
from nri_numa.model.settings import NohzFullCPUs, PreferredCores, Settings
from nri_numa.model.workload import ALWAYS_BUSY_SCHEDULE, SMT, BusySchedule


class TakeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to `take_cpus`.

    Attributes:
        count: whole CPUs wanted, ``current_cpus`` ones counted.
        free_cpus: CPUs free for exclusive use; reserved and owned ones are not in it.
        prefer: take these first: a restarted container's old CPUs, CPUs of finished init
            containers. When they are exactly as many as wanted, all free and inside the affinity,
            they are taken as they are.
        current_cpus: CPUs that the container owns already; all stay, unless they went offline.
        affinity: take from these NUMA nodes first; None is anywhere.
        parts: CPUs with a number; in this order, so many of them come before anything else.
        load: of this container, for ``pair``; None counts as high.
        contended_cpus: CPUs to take when there are no others: another program pinned containers to
            them.
    """

    count: int
    free_cpus: CPUSet
    prefer: CPUSet = NO_CPUS
    current_cpus: CPUSet = NO_CPUS
    affinity: NUMASet | None = None
    parts: tuple[tuple[CPUSet, int], ...] = ()
    strict: bool = False
    smt: SMT = SMT.SPREAD
    load: BusySchedule | None = None
    loads: Mapping[int, BusySchedule] = msgspec.field(default_factory=dict)
    unavailable_cpus: CPUSet = NO_CPUS
    contended_cpus: CPUSet = NO_CPUS
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
    free_cpus: CPUSet
    per_numa: Mapping[int, int]
    current_count: int = 0


class SMTMisaligned(msgspec.Struct, frozen=True, kw_only=True):
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


TakeResult = ChosenCPUs | NotEnoughCPUs | SMTMisaligned


class SiblingLoads(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs of other containers, by what their load means beside ours.

    Attributes:
        opposite: one of the two is idle whenever the other is busy, and at least one is ever busy.
        unloaded: both are never busy.
        same_hours: busy at some same minute.
    """

    opposite: int = 0
    unloaded: int = 0
    same_hours: int = 0


def classify_cpus_by_load_overlap(
    load: BusySchedule | None, loads: Mapping[int, BusySchedule]
) -> SiblingLoads:
    """Classify CPUs of other containers by load against this one's; unknown counts as high."""
    own_load = ALWAYS_BUSY_SCHEDULE if load is None else load
    # The CPUs of one container carry the same object: comparing identities first saves hashing
    # and comparing intervals CPU by CPU.
    groups: dict[int, tuple[BusySchedule, list[int]]] = {}
    for cpu, other_load in loads.items():
        groups.setdefault(id(other_load), (other_load, []))[1].append(cpu)
    opposite = unloaded = same_hours = 0
    for other_load, cpus in groups.values():
        bits = CPUSet(cpus).bits
        if own_load.overlaps(other_load):
            same_hours |= bits
        elif own_load.busy_intervals or other_load.busy_intervals:
            opposite |= bits
        else:
            unloaded |= bits
    return SiblingLoads(opposite=opposite, unloaded=unloaded, same_hours=same_hours)


class CoreClass(msgspec.Struct, frozen=True):
    """Equally good whole cores (as lowest threads), each of which adds ``size`` CPUs."""

    cores: int
    size: int


def _cores_of_best_class(cores: int, classes: Iterable[int]) -> int:
    return next((class_cores for c in classes if (class_cores := cores & c)), 0)


def whole_core_classes_by_tier(
    index: AllocatorIndex, free_cpus: int, current: int, tiers: Iterable[int]
) -> list[CoreClass]:
    """Cores that would belong wholly to the container, best classes first.

    Order: cores that the container has a part of; then tier by tier (each has the cores that are
    good, and is compared before the next); then larger before smaller.
    """
    whole_cores = index.whole_cores(free_cpus | current) & index.cores_touched(free_cpus)
    mine = whole_cores & index.cores_touched(current)
    groups = [mine, whole_cores & ~mine]
    for good_cores in tiers:
        groups = [part for g in groups for part in (g & good_cores, g & ~good_cores) if part]
    adds = index.cores_by_thread_count(free_cpus)
    return [
        CoreClass(cores, size)
        for g in groups
        for size in range(index.threads, 0, -1)
        if (cores := g & adds[size])
    ]


def fitting_core_counts(classes: Sequence[CoreClass], n: int) -> list[int] | None:
    """Number of cores of each class that make exactly ``n`` CPUs, most of earlier ones, or None."""
    # reach[i]: bit s is set when classes i and later can make s CPUs.
    reach = [*accumulate(reversed(classes), _extend_reachable_cpu_counts, initial=1)][::-1]
    if not reach[0] >> n & 1:
        return None
    counts = []
    for c, reachable in zip(classes, reach[1:], strict=True):
        count = min(c.cores.bit_count(), n // c.size)
        while not reachable >> (n - count * c.size) & 1:
            count -= 1
        counts.append(count)
        n -= count * c.size
    return counts


def nearest_whole_core_counts(classes: Sequence[CoreClass], n: int) -> tuple[int, ...]:
    """The next lower and the next higher number of CPUs that whole cores make, where there are."""
    reach = reduce(_extend_reachable_cpu_counts, classes, 1)
    lower = (reach & ((1 << n) - 1)).bit_length() - 1
    higher = reach >> n + 1
    counts = (lower,) if lower > 0 else ()
    return (*counts, n + (higher & -higher).bit_length()) if higher else counts


def _extend_reachable_cpu_counts(reach: int, c: CoreClass) -> int:
    """Sums that can be made with up to all cores of a class added to those that could before."""
    cores_left, cores = c.cores.bit_count(), 1
    while cores_left:
        cores = min(cores, cores_left)
        reach |= reach << cores * c.size
        cores_left -= cores
        cores *= 2
    return reach


_MAX_NAMED_CORES = 3  # shared cores that are named one by one


def cpu_distribution_notes(index: AllocatorIndex, cpus: int) -> list[str]:
    """One sentence for each NUMA node: how many CPUs, and how many of its cores are whole."""
    whole_cores = index.whole_cores(cpus)
    notes = []
    for unit in index.numa:
        count = (cpus & unit.bits).bit_count()
        if count:
            cores = (whole_cores & unit.bits).bit_count()
            name = "without a NUMA node" if unit.id == NO_UNIT else f"of NUMA node {unit.id}"
            detail = f" ({count_text(cores, 'whole core')})" if cores else ""
            notes.append(f"{count_text(count, 'CPU')} {name}{detail}")
    return notes


def cpus_clause(cpus: int, *verb: str) -> str:
    """``CPU 3`` or ``CPUs 3,5``; with a verb as `cpus_text`."""
    return cpus_text(CPUSet.from_bits(cpus), *verb)


def take_cpus(ix: AllocatorIndex, request: TakeRequest) -> TakeResult:
    """Choose CPUs, the same for equal arguments; ValueError for a negative count."""
    if request.count < 0:
        raise ValueError(f"{request.count} CPUs were asked for; expected 0 or more")
    current = request.current_cpus.bits & ix.all_cpus
    if request.count < current.bit_count():
        return _shrink_held_cpus(ix, request, current)
    return _CPUAccumulator(ix, request, current).take_requested_cpus()


def _select_held_to_keep(
    ix: AllocatorIndex, current: int, count: int, smt: SMT, affinity: NUMASet | None
) -> int:
    """Shrink in place: which ``count`` of the held CPUs stay.

    Order: with ``spread``, ``isolate`` and ``pair`` one thread of every core before second
    threads; NUMA nodes of ``affinity`` before others; the NUMA node with most of them, then the
    lower id; in it the L3 group with most of them, then the lower id; there whole cores before
    parts (other modes), lower CPUs first.
    """
    remaining = 0
    while current and count > 0:
        layer, fill = current, whole_cores_first_filler(ix, 0)
        if smt not in (SMT.ANY, SMT.FULL_CORE):
            layer, fill = ix.lowest_threads(ix.cores_touched(current), current), select_lowest_ids
        inside = {u.id: (layer & u.bits).bit_count() for u in ix.numa}
        for unit in sorted(
            ix.numa,
            key=lambda u: (affinity is not None and u.id not in affinity, -inside[u.id], u.id),
        ):
            for group in sorted(
                unit.l3_groups, key=lambda g: (-(layer & g.bits).bit_count(), g.id)
            ):
                part = fill(layer & group.bits, count)
                remaining |= part
                count -= part.bit_count()
        current &= ~layer
    return remaining


def _shrink_held_cpus(
    ix: AllocatorIndex, request: TakeRequest, current: int
) -> ChosenCPUs | SMTMisaligned:
    if request.smt is SMT.FULL_CORE:
        # Cores of the machine, where a sibling that was offline is back and it has parts of cores.
        cores = current if ix.threads_of(ix.whole_cores(current)) == current else ix.all_cpus
        if fitting_core_counts(_core_classes(ix, cores), request.count) is None:
            return _smt_misaligned(ix, request.count, current)
    remaining = 0
    for cpus, count in (*request.parts, (CPUSet.from_bits(current), request.count)):
        kept_count = (remaining & cpus.bits).bit_count()
        count = min(count - kept_count, request.count - remaining.bit_count())
        part = current & cpus.bits & ~remaining
        remaining |= _select_held_to_keep(ix, part, count, request.smt, request.affinity)
    idle_siblings = _siblings_kept_idle(ix, request, remaining)
    return ChosenCPUs(
        cpus=CPUSet.from_bits(remaining),
        idle=CPUSet.from_bits(idle_siblings),
        notes=(
            f"keeps {request.count} of the {count_text(current.bit_count(), 'CPU')} it had",
            *cpu_distribution_notes(ix, remaining),
        ),
    )


def _core_classes(ix: AllocatorIndex, cpus: int) -> list[CoreClass]:
    """The cores that some CPUs make, larger before smaller."""
    return [
        CoreClass(cores, size)
        for size, cores in reversed(list(enumerate(ix.cores_by_thread_count(cpus))))
        if cores and size
    ]


def _smt_misaligned(ix: AllocatorIndex, count: int, free_cpus: int) -> SMTMisaligned:
    whole_cores = ix.threads_of(ix.whole_cores(free_cpus))
    fitting = nearest_whole_core_counts(_core_classes(ix, whole_cores), count)
    return SMTMisaligned(
        requested=count,
        threads_per_core=ix.threads,
        available=CPUSet.from_bits(whole_cores),
        fitting=fitting or nearest_whole_core_counts(_core_classes(ix, ix.all_cpus), count),
    )


def _siblings_kept_idle(ix: AllocatorIndex, request: TakeRequest, cpus: int) -> int:
    if request.smt is not SMT.ISOLATE:
        return 0
    return ix.threads_of(ix.cores_touched(cpus)) & ~cpus & ~request.unavailable_cpus.bits


class _CPUAccumulator:
    """One request on its way: what is free, what is taken, how many are missing."""

    def __init__(self, ix: AllocatorIndex, request: TakeRequest, current: int) -> None:
        settings = request.settings
        self.ix = ix
        self.request = request
        self.settings = settings
        self.held = current
        self.taken = current
        self.needed = request.count - current.bit_count()
        self.free = request.free_cpus.bits & ix.all_cpus & ~current & ~request.unavailable_cpus.bits
        self.prefer = request.prefer.bits & self.free
        self.kubelet = settings.kubelet.cpu_order
        # The kubelet knows neither isolated CPUs, ticks nor core kinds.
        self.good_isolation = self.good_tick = self.good_kind = ix.all_cpus
        if not self.kubelet:
            self.good_isolation = ix.cpus_suiting_isolation(settings)
            if ix.nohz_full and settings.nohz_full is not NohzFullCPUs.ANY:
                avoid = settings.nohz_full is NohzFullCPUs.AVOID
                self.good_tick = ix.all_cpus & ~ix.nohz_full if avoid else ix.nohz_full
            if settings.preferred_cores is PreferredCores.PERFORMANCE:
                self.good_kind = ix.all_cpus & ~ix.efficient
            elif settings.preferred_cores is PreferredCores.EFFICIENT:
                self.good_kind = ix.all_cpus & ~ix.performance
        uniform = self.good_tick == ix.all_cpus
        self.ticks = (ix.all_cpus,) if uniform else (self.good_tick, ix.all_cpus & ~self.good_tick)
        # The kubelet's order takes no notice of others either.
        self.last = 0 if self.kubelet else request.contended_cpus.bits & ix.all_cpus
        self.partners = classify_cpus_by_load_overlap(request.load, request.loads)
        affinity = 0 if request.affinity is None else request.affinity.bits
        self.hint = sum(
            [1 << p for p, u in enumerate(ix.numa) if u.id >= 0 and affinity >> u.id & 1]
        )
        inside = self._affinity_cpus()
        outside_cpus = 0 if request.strict else ix.all_cpus & ~inside
        self.regions = (inside, outside_cpus) if outside_cpus else (inside,)
        self.room = self.free & (inside if request.strict else ix.all_cpus)

    def _affinity_cpus(self) -> int:
        if self.request.affinity is None:
            return self.ix.all_cpus
        inside = sum([u.bits for p, u in enumerate(self.ix.numa) if self.hint >> p & 1])
        if self.settings.kubelet.align_by_socket:
            for socket in self.ix.sockets:
                if socket.bits & inside:
                    inside |= socket.bits
        return inside

    def take_requested_cpus(self) -> TakeResult:
        request, smt = self.request, self.request.smt
        if (
            smt is SMT.FULL_CORE
            and fitting_core_counts(_core_classes(self.ix, self.ix.all_cpus), request.count) is None
        ):
            return self._smt_misalignment()
        if not self.needed:
            return self._chosen_cpus()
        if self.room.bit_count() < self.needed:
            return self._cpu_shortage()
        if self._can_take_preferred():
            self._take_cpus(self.prefer)
            return self._chosen_cpus("these are the CPUs it had before")
        self._take_parts()
        failure = self._take_by_smt()
        if failure is not None:
            return failure
        return self._cpu_shortage() if self.needed else self._chosen_cpus()

    def _can_take_preferred(self) -> bool:
        prefer = self.prefer
        if (
            self.held
            or prefer.bit_count() != self.needed
            or prefer != self.request.prefer.bits
            or prefer & ~self.regions[0]
        ):
            return False
        if any(
            (prefer & cpus.bits).bit_count() < min(count, (self.free & cpus.bits).bit_count())
            for cpus, count in self.request.parts
        ):
            return False
        cores = self.ix.cores_touched(prefer)
        if self.request.smt is SMT.FULL_CORE:
            return self.ix.threads_of(cores) == prefer
        if self.request.smt is SMT.ISOLATE:
            has_own_cores = cores.bit_count() == prefer.bit_count()
            return has_own_cores and not self.ix.threads_of(cores) & ~self.free
        return True

    # -- the ways to take ------------------------------------------------------------------------

    def _take_parts(self) -> None:
        """Take what the request's parts name, as far as it is free; the rest remains needed."""
        regions, missing = self.regions, self.needed
        for cpus, count in self.request.parts:
            free_cpus, count = self.free & cpus.bits, count - (self.taken & cpus.bits).bit_count()
            count = min(missing, count, free_cpus.bit_count())
            if count > 0:
                self.regions, self.needed = (cpus.bits,), count
                self._take_by_smt()
                missing -= count - self.needed
        self.regions, self.needed = regions, missing

    def _take_by_smt(self) -> NotEnoughCPUs | SMTMisaligned | None:
        """Take what is needed from the regions; return a failure of whole cores."""
        if not self.needed:
            return None
        if self.request.smt is SMT.FULL_CORE:
            return self._take_full_cores()
        if self.request.smt is SMT.ANY:
            self._take_any_threads()
        else:
            self._take_threads_of_cores()
        return None

    def _take_any_threads(self) -> None:
        for region in self.regions:
            if self.kubelet:
                self._take_kubelet_threads(region)
                continue
            fill = whole_cores_first_filler(self.ix, self.taken)
            for zone in self._split_to_save_numa_nodes(region, self.free):
                for tier in self._candidate_regions(zone):
                    n = min(self.needed, (self.free & tier).bit_count())
                    if n:
                        self._take_cpus(self._select_cpus(self.free & tier, n, fill=fill))

    def _candidate_regions(self, region: int) -> Iterator[int]:
        yield region & self.prefer
        isolations = (self.good_isolation, ~self.good_isolation)
        kinds = (self.good_kind, ~self.good_kind)
        zones = self._zones_uncontended_first()
        for zone, isolation, tick, kind in product(zones, isolations, self.ticks, kinds):
            yield region & zone & isolation & tick & kind

    def _split_to_save_numa_nodes(self, region: int, candidates: int) -> tuple[int, ...]:
        """A region, split where the preferred tick would cost another NUMA node."""
        if len(self.ticks) == 1 or self.prefer:
            return (region,)
        candidates &= region & self.good_isolation & ~self.last
        nodes = self._sufficient_numa_nodes(candidates)
        tick_nodes = self._sufficient_numa_nodes(candidates & self.good_tick)
        if not nodes or (tick_nodes and tick_nodes.bit_count() <= nodes.bit_count()):
            return (region,)
        inside = sum([u.bits for p, u in enumerate(self.ix.numa) if nodes >> p & 1])
        return region & inside, region & ~inside

    def _zones_uncontended_first(self) -> tuple[int, ...]:
        """Cores that no others use, then CPUs that no others use, then all."""
        if not self.last:
            return (self.ix.all_cpus,)
        ix = self.ix
        return (
            ix.all_cpus & ~ix.threads_of(ix.cores_touched(self.last)),
            ix.all_cpus & ~self.last,
            ix.all_cpus,
        )

    def _take_kubelet_threads(self, region: int) -> None:
        for tier in (region & self.prefer, region):
            free_cpus = self.free & tier
            n = min(self.needed, free_cpus.bit_count())
            if n:
                self._take_cpus(self._select_as_kubelet(free_cpus, n, 1))

    def _select_as_kubelet(self, free_cpus: int, n: int, group: int) -> int:
        if self.settings.kubelet.distribute_cpus_across_numa:
            if len(self.ix.numa) > MAX_DISTRIBUTED_NUMA_NODES:
                fill = whole_cores_first_filler(self.ix, self.taken)
                return self._select_cpus(free_cpus, n, fill=fill)
            min_nodes = sum(
                1 for p, u in enumerate(self.ix.numa) if self.hint >> p & 1 and u.bits & free_cpus
            )
            return take_distributed(self.ix, free_cpus, n, group, min_nodes)
        across = self.settings.kubelet.distribute_cpus_across_cores and group == 1
        return take_packed(
            self.ix, free_cpus, n, align_l3=self.settings.align_l3, across_cores=across
        )

    def _take_threads_of_cores(self) -> None:
        for region in self.regions:
            for zone in self._fewest_nodes_first(region) if self.needed else ():
                for part, count in self._split_by_node(zone):
                    self._take_threads_of_cores_in(part, count)

    def _take_threads_of_cores_in(self, zone: int, count: int) -> None:
        stop = self.needed - count
        for foreign in self._zones_uncontended_first():
            for isolation in (self.good_isolation | self.prefer, self.ix.all_cpus):
                part = zone & (foreign | self.prefer) & isolation
                while self.needed > stop and (candidates := self._best_free_threads(part)):
                    self._take_cpus(
                        self._select_in_configured_order(
                            candidates, min(self.needed - stop, candidates.bit_count())
                        )
                    )

    def _split_by_node(self, zone: int) -> Iterator[tuple[int, int]]:
        """Parts of a zone, and how many CPUs to take from each.

        To distribute evenly over NUMA nodes, the numbers come first: thread kind by thread kind
        each round would be even and their sum would not.
        """
        if self.settings.kubelet.distribute_cpus_across_numa:
            ix, pools = self.ix, []
            for free_cpus in (
                self.free & zone & self.good_isolation & ~self.last,
                self.free & zone,
            ):
                pools.append(self._best_free_threads(free_cpus))
                if self.request.smt is not SMT.ISOLATE:
                    cores = ix.cores_touched(free_cpus) & ~ix.cores_touched(self.taken)
                    pools += [ix.lowest_threads(cores, free_cpus), free_cpus]
            pool = next((k for k in pools if k.bit_count() >= self.needed), 0)
            cpus = self._select_cpus(pool, self.needed, fill=select_lowest_ids) if pool else 0
            parts = [(u.bits & zone, (u.bits & cpus).bit_count()) for u in ix.numa]
            parts = [part for part in parts if part[1]]
            if len(parts) > 1:
                yield from parts
        if self.needed:
            yield zone, self.needed

    def _best_free_threads(self, zone: int) -> int:
        """The best kind of free CPUs in a zone, one for each core that is equally good; may be 0.

        Order of cores, for ``spread`` and ``pair``: fewest threads of this container; a preferred
        CPU; then by who has the other threads (``spread``: fewest taken by others; ``pair``: only
        opposite loads, none, only never busy ones, unknown ones, same hours); then the preferred
        timer tick; then the preferred core kind. ``isolate`` takes only cores that are wholly free,
        preferred CPUs, ticks and kinds first.
        """
        ix, smt = self.ix, self.request.smt
        zone &= self.free
        cores = ix.cores_touched(zone)
        if smt is SMT.ISOLATE:
            cores &= ix.whole_cores(self.free)
        elif self.taken:
            cores = _cores_of_best_class(cores, ix.cores_by_thread_count(self.taken))
        preferred = cores & ix.cores_touched(zone & self.prefer) if self.prefer else 0
        if preferred:
            cores, zone = preferred, zone & self.prefer
        if smt is SMT.SPREAD:
            cores = _cores_of_best_class(cores, ix.cores_by_thread_count(self._occupied_cpus()))
        elif smt is SMT.PAIR:
            cores = _cores_of_best_class(cores, self._cores_by_sibling_load())
        if self.good_tick != ix.all_cpus:
            threads = zone & ix.threads_of(cores) & self.good_tick
            cores, zone = (ix.cores_touched(threads), threads) if threads else (cores, zone)
        cores = cores & ix.cores_touched(self.good_kind) or cores
        return ix.lowest_threads(cores, zone)

    def _occupied_cpus(self) -> int:
        """CPUs that are neither free nor the container's."""
        return self.ix.all_cpus & ~self.free & ~self.taken

    def _cores_by_sibling_load(self) -> Sequence[int]:
        ix, occupied, partners = self.ix, self._occupied_cpus(), self.partners
        same_cores = ix.cores_touched(occupied & partners.same_hours)
        known_cpus = partners.same_hours | partners.opposite | partners.unloaded
        unknown = ix.cores_touched(occupied & ~known_cpus)
        usable = ix.first_threads & ~same_cores & ~unknown
        opposite = usable & ix.cores_touched(occupied & partners.opposite)
        empty = ix.first_threads & ~ix.cores_touched(occupied)
        return (opposite, empty, usable & ~opposite & ~empty, unknown & ~same_cores, same_cores)

    def _fewest_nodes_first(self, region: int) -> Iterator[int]:
        """A region, split where half-used cores would spare it another NUMA node.

        Taken kind by kind, the last wholly free cores would be collected from all over the
        machine. So the fewest NUMA nodes that have one thread on as many cores as are needed come
        first, whatever is on the other threads; for ``pair``, cores that are busy at the same hours
        do not count.
        """
        ix, zone = self.ix, self.free & region & self.good_isolation & ~self.last
        threads = self._best_free_threads(zone)
        if (
            self.kubelet
            or self.prefer
            or self.request.smt is SMT.ISOLATE
            or not threads
            # The usual case: one NUMA node has enough of the best kind.
            or (
                not self.held
                and any((threads & u.bits).bit_count() >= self.needed for u in ix.numa)
            )
        ):
            yield region
            return
        cores = ix.cores_touched(zone) & ~ix.cores_touched(self.taken)
        if self.request.smt is SMT.PAIR:
            cores &= ~ix.cores_touched(self.partners.same_hours & ~self.free & ~self.taken)
        any_thread = ix.lowest_threads(cores, zone)
        nodes = self._sufficient_numa_nodes(any_thread)
        kind = self._sufficient_numa_nodes(threads)
        if nodes and (not kind or nodes.bit_count() < kind.bit_count()):
            inside = sum([u.bits for p, u in enumerate(ix.numa) if nodes >> p & 1])
            yield region & inside
            yield region & ~inside
        else:
            yield region

    def _sufficient_numa_nodes(self, candidates: int) -> int:
        """Positions of the NUMA nodes that would give all that is missing; 0 when none can."""
        if candidates.bit_count() < self.needed:
            return 0
        cpus = self._select_cpus(candidates, self.needed, fill=select_lowest_ids)
        return sum([1 << p for p, u in enumerate(self.ix.numa) if cpus & u.bits])

    def _select_in_configured_order(self, candidates: int, n: int, weight: int = 1) -> int:
        if not self.kubelet or self.settings.kubelet.distribute_cpus_across_numa:
            return self._select_cpus(candidates, n, fill=select_lowest_ids, weight=weight)
        cpus = 0
        for core in cores_in_order(self.ix, self.free):
            if n and core.bits & candidates:
                cpus |= core.bits & candidates
                n -= 1
        return cpus

    def _select_cpus(self, candidates: int, n: int, *, fill: CPUFiller, weight: int = 1) -> int:
        return select_cpus(
            SelectionPool(
                index=self.ix,
                candidates=candidates,
                free=self.free,
                current=self.taken,
                weight=weight,
                fill=fill,
                settings=self.settings,
                hint=self.hint,
            ),
            n,
        )

    def _take_full_cores(self) -> NotEnoughCPUs | SMTMisaligned | None:
        ix = self.ix
        if self.kubelet and not self.held and not self.prefer:
            cpus = self._select_full_cores_as_kubelet()
            if cpus:
                self._take_cpus(cpus)
                return None
        classes: list[CoreClass] = []
        whole_cores = ix.threads_of(ix.whole_cores(self.free | self.held)) & self.free
        tiers = (
            ix.cores_touched(self.prefer),
            ~ix.cores_touched(self.last),
            ~ix.cores_touched(self.free & ~self.good_isolation),
            ~ix.cores_touched(self.free & ~self.good_tick),
            ix.cores_touched(self.good_kind),
        )
        for outer in self.regions:
            for region in self._split_to_save_numa_nodes(outer, whole_cores):
                classes += whole_core_classes_by_tier(ix, self.free & region, self.held, tiers)
        counts = fitting_core_counts(classes, self.needed)
        if counts is None:
            maximum = sum(c.cores.bit_count() * c.size for c in classes)
            return self._cpu_shortage() if maximum < self.needed else self._smt_misalignment()
        for c, n in zip(classes, counts, strict=True):
            if n:
                cores = self._select_in_configured_order(c.cores, n, c.size)
                self._take_cpus(ix.threads_of(cores) & self.free)
        return None

    def _select_full_cores_as_kubelet(self) -> int:
        """CPUs that the kubelet takes with full-pcpus-only, or 0 when these are not whole cores.

        It judges cores by the machine's average and rounds nothing when it fills the affinity
        first, so that on uneven machines, or with an odd number of CPUs inside the affinity, its
        answer can hold parts of cores.
        """
        ix, cpus = self.ix, 0
        for region in self.regions:
            free_cpus = self.free & region & ~cpus
            n = min(self.needed - cpus.bit_count(), free_cpus.bit_count())
            if n:
                cpus |= self._select_as_kubelet(free_cpus, n, threads_per_core(ix))
        return cpus if ix.threads_of(ix.cores_touched(cpus)) == cpus else 0

    # -- the answers -----------------------------------------------------------------------------

    def _take_cpus(self, cpus: int) -> None:
        self.taken |= cpus
        self.free &= ~cpus
        self.needed -= cpus.bit_count()

    def _chosen_cpus(self, *reasons: str) -> ChosenCPUs:
        ix, request = self.ix, self.request
        new_cpus = self.taken & ~self.held
        notes = [*reasons]
        if self.held:
            notes.append(f"keeps the {count_text(self.held.bit_count(), 'CPU')} it had")
        notes += cpu_distribution_notes(ix, self.taken)
        if outside := new_cpus & ~self.regions[0]:
            text = f"outside {numa_text(str(request.affinity))}, where no more could be taken"
            notes.append(f"{cpus_clause(outside, 'lies', 'lie')} {text}")
        if contended := new_cpus & request.contended_cpus.bits:
            used = "also used by containers that another program pinned there"
            notes.append(f"{cpus_clause(contended, 'is', 'are')} {used}")
        if request.smt is SMT.PAIR and request.load is None:
            notes.append("no load was given for it, so it counts as high")
        notes += self._shared_core_notes(new_cpus)
        crowded = sum(cores.bit_count() for cores in ix.cores_by_thread_count(self.taken)[2:])
        if crowded and request.smt in (SMT.SPREAD, SMT.PAIR):
            cores = count_text(crowded, "core")
            notes.append(f"more than one of its CPUs on {cores}, as no other core was free")
        return ChosenCPUs(
            cpus=CPUSet.from_bits(self.taken),
            idle=CPUSet.from_bits(_siblings_kept_idle(ix, request, self.taken)),
            notes=tuple(notes),
        )

    def _shared_core_notes(self, new_cpus: int) -> list[str]:
        """Name who has the threads beside the new CPUs, for a few cores."""
        ix, occupied, cause = self.ix, self._occupied_cpus(), ""
        cores = ix.cores_touched(new_cpus) & ix.cores_touched(occupied)
        if cores and self.request.smt is SMT.SPREAD:
            whole_cores = ix.whole_cores(self.free) & ix.cores_touched(self.room)
            cause = "to stay on few NUMA nodes, " if whole_cores else "no core is free: "
        notes = []
        for core in CPUSet.from_bits(select_lowest_ids(cores, _MAX_NAMED_CORES)):
            members = ix.core_bits[core]
            clause = cpus_clause(members & new_cpus, "shares", "share")
            notes.append(
                f"{cause}{clause} a core with {self._sibling_holder_text(members & occupied)}"
            )
        unnamed = cores.bit_count() - _MAX_NAMED_CORES
        if unnamed > 0:
            notes.append(f"the same on {count_text(unnamed, 'more core')}")
        return notes

    def _sibling_holder_text(self, siblings: int) -> str:
        owned, partners = siblings & self.request.unavailable_cpus.bits, self.partners
        if not owned:
            return f"{cpus_clause(siblings)}, not free for exclusive use"
        text = f"{cpus_clause(owned)} of another container"
        if self.request.smt is not SMT.PAIR:
            return text
        if owned & partners.same_hours:
            return f"{text} that is busy at the same hours"
        if owned & ~partners.opposite & ~partners.unloaded:
            return f"{text} of unknown load"
        if owned & partners.opposite:
            return f"{text} of the opposite load"
        return f"{text} that is never busy either"

    def _cpu_shortage(self) -> NotEnoughCPUs:
        ix, smt = self.ix, self.request.smt
        # What was taken on the way was free, too.
        free_cpus = (self.free | self.taken & ~self.held) & self.room
        if smt is SMT.FULL_CORE:
            free_cpus = ix.threads_of(ix.whole_cores(free_cpus | self.held)) & free_cpus
        elif smt is SMT.ISOLATE:
            cores = ix.whole_cores(free_cpus) & ~ix.cores_touched(self.held)
            free_cpus = ix.lowest_threads(cores, free_cpus)
        return NotEnoughCPUs(
            requested=self.request.count,
            free_cpus=CPUSet.from_bits(free_cpus),
            per_numa={u.id: (free_cpus & u.bits).bit_count() for u in ix.numa},
            current_count=self.held.bit_count(),
        )

    def _smt_misalignment(self) -> SMTMisaligned:
        return _smt_misaligned(self.ix, self.request.count, self.room | self.held)
