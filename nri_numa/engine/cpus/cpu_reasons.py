"""Why these CPUs, in sentences for people; see `nri_numa.engine.cpus.allocator`.

CPU sets are plain integers, see `nri_numa.engine.cpus.index`.
"""

from __future__ import annotations

from nri_numa.engine.cpus.best_fit import lowest
from nri_numa.engine.cpus.index import NOWHERE, AllocatorIndex
from nri_numa.engine.cpus.smt import Partners
from nri_numa.engine.values.workload import SMT
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.model import counted, cpus_text, numa_text

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


def outside(cpus: int, affinity: object) -> list[str]:
    """That some of the CPUs are not where they should be."""
    if not cpus:
        return []
    verb = "lies" if cpus.bit_count() == 1 else "lie"
    return [
        f"{named(cpus)} {verb} outside {numa_text(str(affinity))}, where no more could be taken"
    ]


def beside_others(cpus: int) -> list[str]:
    """That somebody else pinned containers to some of the CPUs."""
    if not cpus:
        return []
    verb = "is" if cpus.bit_count() == 1 else "are"
    return [f"{named(cpus)} {verb} used by containers that somebody else pinned there, too"]


def shared_cores(
    index: AllocatorIndex,
    smt: SMT,
    *,
    fresh: int,
    others: int,
    busy: int,
    known: Partners,
    free_core_left: bool,
) -> list[str]:
    """Who has the threads beside the fresh CPUs, for a few cores.

    Args:
        index: the machine.
        smt: the mode that was asked for.
        fresh: CPUs that were taken just now.
        others: CPUs that are neither free nor the container's.
        busy: those of them that belong to other containers.
        known: loads, for ``pair``.
        free_core_left: there was a wholly free core elsewhere.
    """
    cores = index.touched(fresh) & index.touched(others)
    why = ""
    if smt is SMT.SPREAD:
        why = "to stay on few NUMA nodes, " if free_core_left else "no core is free: "
    notes = []
    for core in CPUSet.from_bits(lowest(cores, _MANY)):
        members = index.core_bits[core]
        whose = _whose(smt, members & others, members & others & busy, known)
        verb = "shares" if (members & fresh).bit_count() == 1 else "share"
        notes.append(f"{why}{named(members & fresh)} {verb} a core with {whose}")
    more = cores.bit_count() - _MANY
    if more > 0:
        notes.append(f"the same on {counted(more, 'more core')}")
    return notes


def crowded_cores(index: AllocatorIndex, smt: SMT, cpus: int) -> list[str]:
    """That some cores had to give two threads although the mode spreads."""
    twice = sum(cores.bit_count() for cores in index.by_count(cpus)[2:])
    if not twice or smt not in (SMT.SPREAD, SMT.PAIR):
        return []
    return [f"more than one of its CPUs on {counted(twice, 'core')}, as no other core was free"]


def named(cpus: int) -> str:
    """``CPU 3`` or ``CPUs 3,5``."""
    return cpus_text(CPUSet.from_bits(cpus))


def _whose(smt: SMT, theirs: int, owned: int, known: Partners) -> str:
    if not owned:
        return f"{named(theirs)}, not free for exclusive use"
    text = f"{named(owned)} of another container"
    if smt is not SMT.PAIR:
        return text
    if owned & known.same:
        return f"{text} that is busy at the same hours"
    if owned & ~known.opposite & ~known.idle:
        return f"{text} of unknown load"
    if owned & known.opposite:
        return f"{text} of the opposite load"
    return f"{text} that is never busy either"
