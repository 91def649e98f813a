"""CPUs drawn for and chosen on many machines: which ones a container gets, line by line.

The oracle of `tests.checks.cpu_oracle` knows the kubelet's order; of our own order properties say
what must hold of every choice, and this which of those that would hold it is.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.cpus.index import build_allocator_index
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import (
    IsolatedCPUs,
    KubeletRules,
    NohzFullCPUs,
    PreferredCores,
    Settings,
)
from nri_numa.model.workload import ALWAYS_BUSY_SCHEDULE, NEVER_BUSY_SCHEDULE, SMT, BusySchedule
from tests.beds.lives import recorded_settings
from tests.machines import named

RECORDED: Final = Path(__file__).parents[1] / "golden" / "choices"
MACHINES: Final = (
    *("snc_smt", "dual_smt_16", "hybrid", "chiplets", "isolated_cpus", "nohz_full_cpus"),
    *("offline_cpus", "joined_sockets", "dual_adjacent", "dual_alternating", "sixteen_nodes"),
    *("sparse_ids", "no_caches", "dual_no_smt", "single_smt", "ten_nodes", "inside_cpuset"),
    *("snc_asymmetric", "memory_only", "one_cpu"),
)
CASES: Final = 48
_LOADS: Final = (
    ALWAYS_BUSY_SCHEDULE,
    NEVER_BUSY_SCHEDULE,
    BusySchedule(((540, 1080),)),
    BusySchedule(((0, 360), (1320, 1440))),
)


def told(machine: str) -> Iterator[str]:
    """One choice a line: what was asked of what was free, and what was taken."""
    topology = getattr(named, machine)()
    tables = build_allocator_index(topology)
    for number in range(CASES):
        asked = _request(Random(f"{machine} {number}"), topology)
        yield f"{number} {_asked(asked)}"
        yield f"    {_answer(take_cpus(tables, asked))}"


def _some(random: Random, cpus: CPUSet, chance: float) -> CPUSet:
    return CPUSet(i for i in cpus if random.random() < chance)


def _request(random: Random, topology: Topology) -> TakeRequest:
    allowed, nodes = topology.allowed, sorted(topology.numa_nodes)
    available = _some(random, allowed, random.choice((0.5, 0.8, 1.0, 1.0)))
    kubelet = random.random() < 0.3
    smt = SMT.ANY if kubelet else random.choice(list(SMT))
    count = random.choice((1, 2, 2, 3, 4, 5, 6, 8, len(available) // 2, len(available)))
    busy = allowed - available
    request = TakeRequest(
        count=count,
        free_cpus=available,
        affinity=NUMASet(random.sample(nodes, random.choice((1, 1, 2)) if nodes[1:] else 1))
        if random.random() < 0.6
        else None,
        strict=random.random() < 0.2,
        smt=smt,
        unavailable_cpus=busy,
    )
    across_numa = random.random() < 0.25
    across_cores = kubelet and random.random() < 0.25
    align_l3, by_socket = random.random() < 0.7, random.random() < 0.2
    settings = Settings(
        kubelet=KubeletRules(
            cpu_order=kubelet,
            distribute_cpus_across_numa=across_numa,
            distribute_cpus_across_cores=across_cores,
            align_by_socket=by_socket,
        ),
        align_l3=align_l3,
        isolated=random.choice((IsolatedCPUs.ANY, IsolatedCPUs.PREFER, IsolatedCPUs.AVOID)),
        nohz_full=random.choice(list(NohzFullCPUs)),
        preferred_cores=random.choice(list(PreferredCores)),
    )
    request = replace(request, settings=settings)
    if random.random() < 0.25:
        held = _some(random, allowed, 0.1)
        request = replace(request, current_cpus=held, free_cpus=available | held)
    if random.random() < 0.2:
        request = replace(request, prefer=_some(random, allowed, 0.2))
    if random.random() < 0.2:
        request = replace(request, contended_cpus=_some(random, available, 0.4))
    if smt is SMT.PAIR:
        loads = {i: random.choice(_LOADS) for i in busy if random.random() < 0.8}
        request = replace(request, load=random.choice((None, *_LOADS)), loads=loads)
    return request


def _asked(one: TakeRequest) -> str:
    words = [f"{one.count} of {one.free_cpus}", str(one.smt)]
    words += [
        f"{word} {value}"
        for word, name in (
            ("prefer", "prefer"),
            ("held", "current_cpus"),
            ("last", "contended_cpus"),
        )
        if (value := getattr(one, name))
    ]
    if one.affinity is not None:
        words.append(f"on {one.affinity}{' only' if one.strict else ''}")
    if one.loads:
        words.append(f"load {_load(one.load)}")
        words += [f"{i}={_load(load)}" for i, load in sorted(one.loads.items())]
    words += recorded_settings(one.settings)
    return " ".join(words)


def _load(load: BusySchedule | None) -> str:
    return (
        "-" if load is None else "+".join(f"{start}..{end}" for start, end in load.busy_intervals)
    )


def _answer(found: ChosenCPUs | NotEnoughCPUs | SMTMisaligned) -> str:
    if isinstance(found, ChosenCPUs):
        idle = f" idle {found.idle}" if found.idle else ""
        return f"{found.cpus or 'none'}{idle}: {'; '.join(found.notes)}"
    if isinstance(found, NotEnoughCPUs):
        per_numa = " ".join(f"{i}:{count}" for i, count in sorted(found.per_numa.items()))
        return f"{found.free_cpus or 'none'} could be had, {found.current_count} held, {per_numa}"
    return f"whole cores: {found.available or 'none'}"
