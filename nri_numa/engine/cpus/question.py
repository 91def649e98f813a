"""What the allocator is asked and what it answers; see `nri_numa.engine.cpus.allocator`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nri_numa.engine.cpus.index import NOWHERE
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import SMT, Load
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet


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
        last: CPUs to take when there are no others: somebody else pinned containers to them.
        listed: CPUs of lists that give way: others are taken where they are as good.
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
    last: CPUSet = NO_CPUS
    listed: CPUSet = NO_CPUS
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
        fitting: the next lower and the next higher number that these make; where they make none,
            that all cores of the machine make.
    """

    requested: int
    threads_per_core: int
    available: CPUSet
    fitting: tuple[int, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.requested} CPUs were asked for as whole cores, which cannot be made of cores "
            f"with {self.threads_per_core} threads (CPUs of wholly free cores: "
            f"{self.available or 'none'})"
        )
