"""From a number and a set to CPUs: which CPUs an exclusive container gets.

`take_cpus` and `give_back` are the only doors. The order of levels, for one request:

1. CPUs inside the NUMA affinity before CPUs outside (never outside when ``strict``);
2. the kernel's isolated CPUs, as the settings say;
3. thread siblings (`nri_numa.engine.smt`), preferred CPUs, core kinds;
4. among equally good ones `nri_numa.engine.take_default` or `nri_numa.engine.take_kubelet`.

docs/adr/0010-cpu-order.md tells why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nri_numa.engine import take_kubelet
from nri_numa.engine.cpu_index import NOWHERE, AllocatorIndex, index
from nri_numa.engine.settings import CPUOrder, IsolatedCPUs, PreferredCores, Settings
from nri_numa.engine.smt import (
    CoreClass,
    Threads,
    counts_that_fit,
    next_threads,
    partners,
    whole_cores,
)
from nri_numa.engine.take_default import Filler, Places, lowest, select, threads_filler
from nri_numa.engine.workload import SMT, Load
from nri_numa.topology.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.topology.model import Topology

_MANY = 3  # shared cores that a note names one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeRequest:
    """What `take_cpus` is asked for.

    Attributes:
        count: whole CPUs wanted, ``held`` ones counted.
        available: CPUs free for exclusive use; reserved and owned ones are not in it.
        prefer: take these first: a restarted container's old CPUs, CPUs of finished init
            containers. When they are exactly as many as wanted, all free and inside the affinity,
            they are taken as they are.
        held: CPUs that the container owns already; all of them stay, unless they went offline.
        affinity: take from these NUMA nodes first; None is anywhere.
        strict: take nothing outside ``affinity``.
        smt: see `SMT`.
        load: of this container, for ``pair``; None counts as high.
        loads: CPU to the load of the exclusive container that owns it, for ``pair``.
        busy: CPUs owned by other containers, or kept idle for them.
        settings: order, distribution, L3 groups, sockets, isolated CPUs and core kinds.
    """

    count: int
    available: CPUSet
    prefer: CPUSet = NO_CPUS
    held: CPUSet = NO_CPUS
    affinity: NUMASet | None = None
    strict: bool = False
    smt: SMT = SMT.SPREAD
    load: Load | None = None
    loads: Mapping[int, Load] = field(default_factory=dict)
    busy: CPUSet = NO_CPUS
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """CPUs were found.

    Attributes:
        cpus: exactly as many as wanted, ``held`` ones included.
        idle: siblings of them that nobody may use (``isolate``).
        notes: why these, in sentences.
    """

    cpus: CPUSet
    idle: CPUSet = NO_CPUS
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotEnoughCPUs:
    """Fewer CPUs can be had than wanted.

    Attributes:
        requested: CPUs wanted.
        available: CPUs that could have been taken under the request's rules.
        per_numa: their number by NUMA node, for all NUMA nodes with CPUs (`NOWHERE` for CPUs
            without one).
        smt: the rule that was applied.
        held: CPUs the container had already; they count towards ``requested``.
    """

    requested: int
    available: CPUSet
    per_numa: Mapping[int, int]
    smt: SMT = SMT.ANY
    held: int = 0

    def __str__(self) -> str:
        what = {
            SMT.ISOLATE: "CPUs on wholly free cores",
            SMT.FULL_CORE: "CPUs of wholly free cores",
        }.get(self.smt, "free CPUs")
        nodes = ", ".join(
            f"{'CPUs without a NUMA node' if i == NOWHERE else f'NUMA node {i}'} has {c}"
            for i, c in self.per_numa.items()
        )
        had = f" besides the {self.held} it has" if self.held else ""
        return (
            f"{self.requested} CPUs were asked for, {len(self.available)} {what} are there"
            f"{had}: {nodes or 'no CPU at all'}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SMTAlignmentRefused:
    """``full-core``, and whole cores cannot make exactly the number wanted.

    Attributes:
        requested: CPUs wanted.
        threads_per_core: the largest number of threads on one core of the machine.
        available: CPUs of the wholly free cores.
    """

    requested: int
    threads_per_core: int
    available: CPUSet

    def __str__(self) -> str:
        return (
            f"{self.requested} CPUs were asked for as whole cores, which cannot be made of cores "
            f"with {self.threads_per_core} threads (CPUs of wholly free cores: "
            f"{self.available or 'none'})"
        )


def take_cpus(
    topology: Topology, request: TakeRequest, tables: AllocatorIndex | None = None
) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
    """Choose CPUs.

    Args:
        topology: the machine.
        request: what is wanted and what is there.
        tables: `index(topology)`, kept by the caller; built anew when left out, which costs more
            than the choice itself.

    Returns:
        The same value for equal arguments, whatever was decided before.

    Raises:
        ValueError: the count is negative: a bug in the caller.
    """
    if request.count < 0:
        raise ValueError(f"{request.count} CPUs were asked for; expected 0 or more")
    ix = index(topology) if tables is None else tables
    held = request.held.bits & ix.all
    if request.count < held.bit_count():
        return _shrink(ix, request, held)
    return _Take(ix, request, held).run()


def give_back(
    topology: Topology,
    held: CPUSet,
    count: int,
    *,
    smt: SMT = SMT.SPREAD,
    affinity: NUMASet | None = None,
    tables: AllocatorIndex | None = None,
) -> CPUSet:
    """Shrink in place: which ``count`` of the held CPUs stay.

    Order: with ``spread``, ``isolate`` and ``pair`` one thread of every core before second
    threads; NUMA nodes of ``affinity`` before others; the NUMA node with most of them, then the
    lower id; in it the L3 group with most of them, then the lower id; there whole cores before
    parts (other modes), lower CPUs first.

    Returns:
        ``count`` of the held CPUs, or all when there are not that many.
    """
    ix = index(topology) if tables is None else tables
    return CPUSet.from_bits(_keep(ix, held.bits & ix.all, count, smt, affinity))


def _keep(ix: AllocatorIndex, held: int, count: int, smt: SMT, affinity: NUMASet | None) -> int:
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


def _shrink(ix: AllocatorIndex, request: TakeRequest, held: int) -> Taken | SMTAlignmentRefused:
    if request.smt is SMT.FULL_CORE and counts_that_fit(_machine(ix), request.count) is None:
        return SMTAlignmentRefused(
            requested=request.count,
            threads_per_core=ix.threads,
            available=CPUSet.from_bits(ix.members(ix.whole(held))),
        )
    kept = _keep(ix, held, request.count, request.smt, request.affinity)
    idle = _idle(ix, request, kept)
    return Taken(
        cpus=CPUSet.from_bits(kept),
        idle=CPUSet.from_bits(idle),
        notes=(
            f"keeps {request.count} of the {held.bit_count()} CPUs it had",
            *_where(ix, kept),
        ),
    )


def _machine(ix: AllocatorIndex) -> list[CoreClass]:
    return [
        CoreClass(cores, size)
        for size, cores in reversed(list(enumerate(ix.by_count(ix.all))))
        if cores and size
    ]


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
        # The kubelet knows neither isolated CPUs nor core kinds.
        self.good_isolation = self.good_kind = ix.all
        if not self.kubelet:
            if settings.isolated is IsolatedCPUs.AVOID:
                self.good_isolation = ix.all & ~ix.isolated
            elif settings.isolated is IsolatedCPUs.PREFER:
                self.good_isolation = ix.isolated
            if settings.cores is PreferredCores.PERFORMANCE:
                self.good_kind = ix.all & ~ix.efficient
            elif settings.cores is PreferredCores.EFFICIENT:
                self.good_kind = ix.all & ~ix.performance
        inside = self._inside()
        self.regions = (inside,) if request.strict else (inside, ix.all & ~inside)
        self.room = self.free & (inside if request.strict else ix.all)

    def _inside(self) -> int:
        if self.request.affinity is None:
            return self.ix.all
        inside = 0
        for unit in self.ix.numa:
            if unit.id >= 0 and unit.id in self.request.affinity:
                inside |= unit.bits
        if self.settings.align_by_socket:
            for socket in self.ix.sockets:
                if socket.bits & inside:
                    inside |= socket.bits
        return inside

    def run(self) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
        request, smt = self.request, self.request.smt
        if smt is SMT.FULL_CORE and counts_that_fit(_machine(self.ix), request.count) is None:
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
            for tier in self._tiers(region):
                n = min(self.needed, (self.free & tier).bit_count())
                if n:
                    self._add(self._select(self.free & tier, n, fill=fill))

    def _tiers(self, region: int) -> Iterator[int]:
        yield region & self.prefer
        for isolation in (self.good_isolation, ~self.good_isolation):
            for kind in (self.good_kind, ~self.good_kind):
                yield region & isolation & kind

    def _kubelet_threads(self, region: int) -> None:
        for tier in (region & self.prefer, region):
            free = self.free & tier
            n = min(self.needed, free.bit_count())
            if n:
                self._add(self._kubelet_take(free, n, 1))

    def _kubelet_take(self, free: int, n: int, group: int) -> int:
        if self.settings.distribute_across_numa:
            if len(self.ix.numa) > take_kubelet.MOST_NUMA_NODES:
                return self._select(free, n, fill=threads_filler(self.ix, self.taken))
            return take_kubelet.take_distributed(self.ix, free, n, group)
        return take_kubelet.take_packed(self.ix, free, n, align_l3=self.settings.align_l3)

    def _threads_of_cores(self) -> None:
        known = partners(self.request.load, self.request.loads)
        for region in self.regions:
            for isolation in (self.good_isolation | self.prefer, self.ix.all):
                while self.needed:
                    threads = Threads(
                        index=self.ix,
                        free=self.free,
                        own=self.taken,
                        prefer=self.prefer,
                        good_kind=self.good_kind,
                        partners=known,
                    )
                    zone = self.free & region & isolation
                    candidates = next_threads(self.request.smt, threads, zone)
                    if not candidates:
                        break
                    self._add(self._pick(candidates, min(self.needed, candidates.bit_count())))

    def _pick(self, candidates: int, n: int, weight: int = 1) -> int:
        if not self.kubelet or self.settings.distribute_across_numa:
            return self._select(candidates, n, fill=lowest, weight=weight)
        chosen = 0
        for core in take_kubelet.cores_in_order(self.ix, self.free):
            if n and core.bits & candidates:
                chosen |= core.bits & candidates
                n -= 1
        return chosen

    def _select(self, candidates: int, n: int, *, fill: Filler, weight: int = 1) -> int:
        return select(
            Places(
                index=self.ix,
                candidates=candidates,
                free=self.free,
                own=self.taken,
                weight=weight,
                fill=fill,
                align_l3=self.settings.align_l3,
                align_by_socket=self.settings.align_by_socket,
                distribute=self.settings.distribute_across_numa,
            ),
            n,
        )

    def _full_cores(self) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
        ix = self.ix
        if self.kubelet and not self.held and not self.prefer:
            chosen = self._kubelet_full_cores()
            if chosen:
                self._add(chosen)
                return self._done()
        classes: list[CoreClass] = []
        for region in self.regions:
            tiers: list[Callable[[int], int]] = [
                lambda cores: cores & ix.touched(self.prefer),
                lambda cores: cores & ~ix.touched(self.free & ~self.good_isolation),
                lambda cores: cores & ix.touched(self.good_kind),
            ]
            classes += whole_cores(ix, self.free & region, self.held, tiers)
        counts = counts_that_fit(classes, self.needed)
        if counts is None:
            whole = sum(c.cores.bit_count() * c.size for c in classes)
            return self._not_enough() if whole < self.needed else self._misaligned()
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
                chosen |= self._kubelet_take(free, n, take_kubelet.threads_per_core(ix))
        return chosen if ix.members(ix.touched(chosen)) == chosen else 0

    # -- the answers -----------------------------------------------------------------------------

    def _add(self, cpus: int) -> None:
        self.taken |= cpus
        self.free &= ~cpus
        self.needed -= cpus.bit_count()

    def _done(self, *reasons: str) -> Taken:
        fresh = self.taken & ~self.held
        notes = [*reasons]
        if self.held:
            notes.append(f"keeps the {self.held.bit_count()} CPUs it had")
        notes += _where(self.ix, self.taken)
        outside = fresh & ~self.regions[0]
        if outside:
            notes.append(
                f"{_cpus(outside)} outside NUMA nodes {self.request.affinity}, "
                "where no more could be taken"
            )
        if self.request.smt is SMT.PAIR and self.request.load is None:
            notes.append("no load was given for it, so it counts as high")
        notes += self._shared_cores(fresh)
        return Taken(
            cpus=CPUSet.from_bits(self.taken),
            idle=CPUSet.from_bits(_idle(self.ix, self.request, self.taken)),
            notes=tuple(notes),
        )

    def _shared_cores(self, fresh: int) -> list[str]:
        """Whose threads sit beside the fresh CPUs, for a few cores."""
        ix = self.ix
        others = ix.all & ~self.free & ~self.taken
        cores = ix.touched(fresh) & ix.touched(others)
        notes = []
        for core in CPUSet.from_bits(lowest(cores, _MANY)):
            ours = CPUSet.from_bits(ix.core_bits[core] & fresh)
            theirs = ix.core_bits[core] & others
            owned = theirs & self.request.busy.bits
            whose = "of another container" if owned else "that is not free for exclusive use"
            notes.append(f"CPU {ours} shares a core with CPU {_list(owned or theirs)} {whose}")
        more = cores.bit_count() - _MANY
        if more > 0:
            notes.append(f"so it is on {more} more cores")
        twice = sum(cores.bit_count() for cores in ix.by_count(self.taken)[2:])
        if twice and self.request.smt in (SMT.SPREAD, SMT.PAIR):
            notes.append(f"{twice} cores hold more than one of its CPUs")
        return notes

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
            smt=smt,
            held=self.held.bit_count(),
        )

    def _misaligned(self) -> SMTAlignmentRefused:
        whole = self.ix.members(self.ix.whole(self.room | self.held))
        return SMTAlignmentRefused(
            requested=self.request.count,
            threads_per_core=self.ix.threads,
            available=CPUSet.from_bits(whole),
        )


def _where(ix: AllocatorIndex, cpus: int) -> Sequence[str]:
    """One sentence for each NUMA node: how many CPUs, and how many of its cores are whole."""
    whole = ix.whole(cpus)
    notes = []
    for unit in ix.numa:
        count = (cpus & unit.bits).bit_count()
        if not count:
            continue
        cores = (whole & unit.bits).bit_count()
        name = "without a NUMA node" if unit.id == NOWHERE else f"of NUMA node {unit.id}"
        notes.append(f"{_plural(count, 'CPU')} {name}, {_plural(cores, 'whole core')}")
    return notes


def _cpus(bits: int) -> str:
    cpus = CPUSet.from_bits(bits)
    return f"CPU {cpus} lies" if len(cpus) == 1 else f"CPUs {cpus} lie"


def _list(bits: int) -> str:
    return str(CPUSet.from_bits(bits))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
