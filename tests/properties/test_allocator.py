"""What must hold for every choice of CPUs, on regular and on odd machines."""

import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.cpus.index import build_allocator_index
from nri_numa.machine.synthetic import Numbering, build_synthetic_topology
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import (
    IsolatedCPUs,
    KubeletRules,
    NohzFullCPUs,
    PreferredCores,
    Settings,
)
from nri_numa.model.workload import ALWAYS_BUSY_SCHEDULE, NEVER_BUSY_SCHEDULE, SMT, BusySchedule
from tests.checks.cpu_oracle import KubeletOracle, can_make

_T = TypeVar("_T")
_SLOW = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])

DAY, NIGHT = BusySchedule(((540, 1080),)), BusySchedule(((0, 360), (1320, 1440)))


@st.composite
def machines(draw: st.DrawFn, *, odd: bool = True) -> Topology:
    """Small machines; odd ones have offline, isolated and tickless CPUs, efficient cores, holes."""
    sockets = draw(st.sampled_from([1, 2, 4]))
    joined = draw(st.booleans()) and sockets > 1
    numa_per_socket = 1 if joined else draw(st.sampled_from([1, 2]))
    cores = draw(st.integers(1, 4))
    threads = draw(st.sampled_from([1, 2, 2, 4]))
    efficient = draw(st.sampled_from([0, 0, 2])) if odd else 0
    groups = sockets // 2 if joined else sockets * numa_per_socket
    size = groups * (cores * threads + efficient)
    if size > 64:
        cores = efficient = 1
        size = groups * (threads + 1) if odd else groups * threads
        efficient = 1 if odd else 0
    ids = st.sets(st.integers(0, size - 1), max_size=size // 2)
    return build_synthetic_topology(
        sockets=sockets,
        numa_per_socket=numa_per_socket,
        sockets_per_numa=2 if joined else 1,
        cores_per_numa=cores,
        threads=threads,
        numbering=draw(st.sampled_from(list(Numbering))),
        cores_per_l3=draw(st.sampled_from([None, 0, 1, 2])),
        efficient_cores_per_numa=efficient,
        offline=CPUSet(draw(ids) - {0}) if odd and draw(st.booleans()) else NO_CPUS,
        isolated=CPUSet(draw(ids)) if odd and draw(st.booleans()) else NO_CPUS,
        nohz_full=CPUSet(draw(ids)) if odd and draw(st.booleans()) else NO_CPUS,
        numa_ids=[i * 3 for i in range(groups)] if odd and draw(st.booleans()) else None,
    )


def subsets(cpus: CPUSet) -> st.SearchStrategy[CPUSet]:
    return st.sets(st.sampled_from(list(cpus)) if cpus else st.nothing()).map(CPUSet)


Case: TypeAlias = tuple[Topology, TakeRequest]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A machine and any request at all on it."""
    topology = draw(machines())
    online = topology.online
    free = draw(st.one_of(st.just(online), subsets(online)))
    held = draw(st.one_of(st.just(NO_CPUS), subsets(online - free)))
    busy = draw(subsets(online - free - held))
    loads = draw(
        st.fixed_dictionaries(
            {
                i: st.sampled_from([ALWAYS_BUSY_SCHEDULE, NEVER_BUSY_SCHEDULE, DAY, NIGHT])
                for i in busy
            }
        )
    )
    unknown = draw(subsets(busy))
    request = TakeRequest(
        count=draw(st.integers(0, len(online) + 2)),
        free_cpus=free,
        prefer=draw(st.one_of(st.just(NO_CPUS), subsets(online))),
        current_cpus=held,
        affinity=draw(st.none() | st.sets(st.sampled_from(list(topology.numa_nodes))).map(NUMASet)),
        strict=draw(st.booleans()),
        smt=draw(st.sampled_from(list(SMT))),
        load=draw(st.sampled_from([None, ALWAYS_BUSY_SCHEDULE, NEVER_BUSY_SCHEDULE, DAY])),
        loads={i: load for i, load in loads.items() if i not in unknown},
        unavailable_cpus=busy,
        settings=Settings(
            kubelet=KubeletRules(
                cpu_order=draw(st.booleans()),
                distribute_cpus_across_numa=draw(st.booleans()),
                align_by_socket=draw(st.booleans()),
            ),
            align_l3=draw(st.booleans()),
            isolated=draw(st.sampled_from(list(IsolatedCPUs))),
            nohz_full=draw(st.sampled_from(list(NohzFullCPUs))),
            preferred_cores=draw(st.sampled_from(list(PreferredCores))),
        ),
    )
    return topology, request


def every_case(test: Callable[[Case], None]) -> Callable[[], None]:
    return _SLOW(given(cases())(test))


def aligned(topology: Topology, request: TakeRequest) -> CPUSet:
    """The CPUs of the affinity, by sockets where that is asked for."""
    if request.affinity is None:
        return topology.online
    inside = topology.cpus_of(request.affinity)
    if request.settings.kubelet.align_by_socket:
        for socket in topology.sockets.values():
            if socket.cpus & inside:
                inside = inside | socket.cpus
    return inside


def alone(request: TakeRequest, smt: SMT, **changes: object) -> TakeRequest:
    """The same for a container that has and had nothing; isolated CPUs are as any."""
    changes = {"settings": Settings(isolated=IsolatedCPUs.ANY)} | changes
    return replace(request, smt=smt, current_cpus=NO_CPUS, prefer=NO_CPUS, **changes)  # type: ignore[arg-type]


def chosen(topology: Topology, request: TakeRequest) -> CPUSet:
    """Nothing where it is refused."""
    result = take_cpus(build_allocator_index(topology), request)
    return result.cpus if isinstance(result, ChosenCPUs) else NO_CPUS


def own_counts(topology: Topology, cpus: CPUSet) -> dict[int, int]:
    return {i: len(core.cpus & cpus) for i, core in topology.cores.items() if core.cpus & cpus}


def fewest(topology: Topology, cpus: CPUSet, count: int) -> int:
    """How many NUMA nodes are needed for so many of these CPUs."""
    room = sorted((len(n.cpus & cpus) for n in topology.numa_nodes.values()), reverse=True)
    totals = enumerate(itertools.accumulate(room, initial=0))
    return next(k for k, total in totals if total >= count)


@every_case
def test_what_is_taken_is_free_exact_and_keeps_what_is_held(case: Case) -> None:
    topology, request = case
    result = take_cpus(build_allocator_index(topology), request)
    if not isinstance(result, ChosenCPUs):
        return
    assert len(result.cpus) == request.count
    if request.count >= len(request.current_cpus):
        assert request.current_cpus <= result.cpus
        assert result.cpus - request.current_cpus <= request.free_cpus
        if request.strict:
            assert result.cpus - request.current_cpus <= aligned(topology, request)
    else:
        assert result.cpus <= request.current_cpus
    assert not result.idle & (result.cpus | request.unavailable_cpus)
    assert (request.smt is SMT.ISOLATE) or not result.idle


@every_case
def test_affinity_is_used_up_before_anything_outside(case: Case) -> None:
    topology, request = case
    request = replace(request, smt=SMT.ANY)
    result = take_cpus(build_allocator_index(topology), request)
    if isinstance(result, ChosenCPUs) and request.count > len(request.current_cpus):
        inside = aligned(topology, request)
        if result.cpus - request.current_cpus - inside:
            assert (request.free_cpus & inside) <= result.cpus


@every_case
def test_rejections_are_right(case: Case) -> None:
    """A refusal happens exactly when a plain count says that it cannot be done."""
    topology, request = case
    if request.count < len(request.current_cpus):
        request = replace(request, count=len(request.current_cpus))
    result = take_cpus(build_allocator_index(topology), request)
    room = request.free_cpus & (aligned(topology, request) if request.strict else topology.online)
    need = request.count - len(request.current_cpus)
    cores = topology.cores.values()
    if request.smt is SMT.FULL_CORE:
        # Cores that a strict affinity cuts in two (lying firmware) do not occur here.
        sizes = [len(c.cpus & room) for c in cores if c.cpus <= room | request.current_cpus]
        possible = can_make(sizes, need) and can_make((len(c.cpus) for c in cores), request.count)
    elif request.smt is SMT.ISOLATE:
        possible = need <= sum(c.cpus <= request.free_cpus and bool(c.cpus & room) for c in cores)
    else:
        possible = need <= len(room)
    assert isinstance(result, ChosenCPUs) == possible
    if isinstance(result, NotEnoughCPUs):
        assert result.requested == request.count
        assert result.free_cpus <= request.free_cpus
        assert len(result.free_cpus) < need
        assert sum(result.per_numa.values()) == len(result.free_cpus)
        assert str(request.count) in str(result)
    elif isinstance(result, SMTMisaligned):
        assert request.smt is SMT.FULL_CORE
        assert result.threads_per_core == topology.threads_per_core
        assert str(request.count) in str(result)


@every_case
def test_full_core_gives_whole_cores_only(case: Case) -> None:
    topology, request = case
    result = take_cpus(build_allocator_index(topology), replace(request, smt=SMT.FULL_CORE))
    if isinstance(result, ChosenCPUs) and request.count >= len(request.current_cpus):
        fresh = result.cpus - request.current_cpus
        assert topology.siblings_of(fresh) <= result.cpus


@every_case
def test_isolate_gives_one_thread_of_each_core_and_an_idle_sibling(case: Case) -> None:
    topology, request = case
    request = replace(request, smt=SMT.ISOLATE, current_cpus=NO_CPUS)
    result = take_cpus(build_allocator_index(topology), request)
    if isinstance(result, ChosenCPUs):
        assert set(own_counts(topology, result.cpus).values()) <= {1}
        assert result.idle == topology.siblings_of(result.cpus) - result.cpus
        assert result.idle <= request.free_cpus


@_SLOW
@given(cases(), st.sampled_from([SMT.SPREAD, SMT.PAIR]))
def test_no_core_gives_two_threads_while_another_could_give_one(case: Case, smt: SMT) -> None:
    """Inside the affinity, and inside it before anything outside.

    Where CPUs are distributed how many each NUMA node gives comes first.
    """
    topology, request = case
    settings = replace(request.settings, isolated=IsolatedCPUs.ANY)
    request = alone(request, smt, settings=settings)
    taken = chosen(topology, request)
    inside = aligned(topology, request)
    parts = [topology.online]
    if request.settings.kubelet.distribute_cpus_across_numa:
        parts = [node.cpus for node in topology.numa_nodes.values()]
    for region in (where & part for where in (inside, topology.online - inside) for part in parts):
        counts = own_counts(topology, taken & region)
        if max(counts.values(), default=0) > 1:
            spare = request.free_cpus & region - topology.siblings_of(taken)
            assert not spare


@every_case
def test_spread_shares_no_core_while_a_free_one_is_near(case: Case) -> None:
    """A thread beside somebody else is taken only when its NUMA node has no wholly free core."""
    topology, request = case
    request = alone(request, SMT.SPREAD)
    taken = chosen(topology, request)
    free = request.free_cpus - request.unavailable_cpus
    for core in topology.cores.values():
        if core.cpus & taken and not core.cpus <= free:
            numa_node = topology.cpus[core.cpus.first_id].numa_node
            assert numa_node is not None
            here = topology.numa_nodes[numa_node].cpus
            for other in topology.cores.values():
                if other.cpus <= free & here:
                    assert other.cpus & taken, f"core {other.id} is free"


@every_case
def test_pair_never_joins_the_same_hours_while_another_core_is_free(case: Case) -> None:
    topology, request = case
    settings = replace(request.settings, isolated=IsolatedCPUs.ANY)
    request = alone(request, SMT.PAIR, affinity=None, strict=False, settings=settings)
    taken = chosen(topology, request)
    ours = request.load or ALWAYS_BUSY_SCHEDULE
    free = request.free_cpus - request.unavailable_cpus

    def clashes(cpus: CPUSet) -> bool:
        return any(i in request.loads and ours.overlaps(request.loads[i]) for i in cpus - free)

    cores = topology.cores.values()
    if any(clashes(c.cpus) for c in cores if c.cpus & taken):
        assert not [c for c in cores if c.cpus <= free and not c.cpus & taken]


@every_case
def test_any_leaves_whole_cores_whole(case: Case) -> None:
    """At most one wholly free core of an L3 group in a NUMA node is taken in part."""
    topology, request = case
    request = alone(request, SMT.ANY)
    taken = chosen(topology, request)
    broken = [
        c
        for c in topology.cores.values()
        if c.cpus <= request.free_cpus and c.cpus & taken and not c.cpus <= taken
    ]
    assert len(broken) <= 1
    l3_of = {i: group.id for group in topology.l3_groups.values() for i in group.cpus}
    for core in broken:
        cpu = topology.cpus[core.cpus.first_id]
        near = [
            i
            for i in request.free_cpus - taken - core.cpus
            if topology.cpus[i].numa_node == cpu.numa_node
            and topology.cpus[i].socket == cpu.socket  # no cache reaches over two of them
            and l3_of.get(i) == l3_of.get(cpu.id)  # None where the machine tells none
        ]
        half_used = [i for i in near if not topology.siblings_of(CPUSet([i])) <= request.free_cpus]
        if request.affinity is None:
            assert not half_used


@every_case
def test_default_uses_the_fewest_numa_nodes_and_one_l3_group_where_one_suffices(case: Case) -> None:
    topology, request = case
    request = alone(request, SMT.ANY, affinity=None)
    taken = chosen(topology, request)
    if not taken:
        return
    count, free = request.count, request.free_cpus
    assert len(topology.numa_of(taken)) == fewest(topology, free, count)
    groups, nodes = topology.l3_groups.values(), topology.numa_nodes.values()
    if any(len(g.cpus & n.cpus & free) >= count for g in groups for n in nodes):
        assert any(taken <= g.cpus for g in groups)


@_SLOW
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_inputs_does_not_matter(case: Case, random: Random) -> None:
    """Mappings built in any order, and tables built again or kept, give the same answer."""
    topology, request = case

    def shuffled(mapping: Mapping[int, _T]) -> dict[int, _T]:
        items = list(mapping.items())
        random.shuffle(items)
        return dict(items)

    other = replace(
        topology,
        cpus=shuffled(topology.cpus),
        cores=shuffled(topology.cores),
        l3_groups=shuffled(topology.l3_groups),
        sockets=shuffled(topology.sockets),
        numa_nodes=shuffled(topology.numa_nodes),
    )
    tables = build_allocator_index(topology)
    first = take_cpus(tables, request)
    assert (
        take_cpus(build_allocator_index(other), replace(request, loads=shuffled(request.loads)))
        == first
    )
    assert take_cpus(tables, request) == first


@every_case
def test_taking_in_steps_keeps_everything(case: Case) -> None:
    """Growing by one keeps what is held, and shrinking by one keeps all but one."""
    topology, request = case
    first = take_cpus(build_allocator_index(topology), request)
    if not isinstance(first, ChosenCPUs):
        return
    grown = take_cpus(
        build_allocator_index(topology),
        replace(
            request,
            current_cpus=first.cpus,
            free_cpus=request.free_cpus - first.cpus,
            count=len(first.cpus) + 1,
        ),
    )
    if isinstance(grown, ChosenCPUs):
        assert first.cpus < grown.cpus
    less = max(0, request.count - 1)
    shrunk = take_cpus(
        build_allocator_index(topology), replace(request, current_cpus=first.cpus, count=less)
    )
    if isinstance(shrunk, ChosenCPUs):
        assert len(shrunk.cpus) == less
        assert shrunk.cpus <= first.cpus
    else:
        assert request.smt is SMT.FULL_CORE


def shrunk(topology: Topology, held: CPUSet, count: int, smt: SMT) -> CPUSet:
    """Let an owner of CPUs shrink; nothing is free beside them."""
    request = TakeRequest(count=count, free_cpus=CPUSet(), current_cpus=held, smt=smt)
    taken = take_cpus(build_allocator_index(topology), request)
    assert isinstance(taken, ChosenCPUs)
    return taken.cpus


@_SLOW
@given(machines(), st.data())
def test_releases_keep_few_numa_nodes_whole_cores(topology: Topology, data: st.DataObject) -> None:
    held = data.draw(subsets(topology.online))
    count = data.draw(st.integers(0, len(held)))
    kept = shrunk(topology, held, count, SMT.ANY)
    assert len(kept) == count
    assert len(topology.numa_of(kept)) == fewest(topology, held, count)
    spread = shrunk(topology, held, count, SMT.SPREAD)
    if max(own_counts(topology, spread).values(), default=0) > 1:
        assert topology.siblings_of(spread) >= held


@_SLOW
@given(machines(), st.data())
def test_packed_equals_the_kubelet(topology: Topology, data: st.DataObject) -> None:
    """Averages included: cores of another size than the average are taken thread by thread."""
    free = data.draw(st.one_of(st.just(topology.online), subsets(topology.online)))
    count = data.draw(st.integers(0, len(free)))
    caches = data.draw(st.booleans()) and bool(topology.l3_groups)
    across = not caches and data.draw(st.booleans())
    order = Settings(
        kubelet=KubeletRules(cpu_order=True, distribute_cpus_across_cores=across), align_l3=caches
    )
    request = TakeRequest(count=count, free_cpus=free, smt=SMT.ANY, settings=order)
    result = take_cpus(build_allocator_index(topology), request)
    assert isinstance(result, ChosenCPUs)
    expected = KubeletOracle(topology).packed(free, count, caches=caches, across=across)
    assert set(result.cpus) == expected


@_SLOW
@given(machines(), st.data())
def test_distributed_equals_the_kubelet(topology: Topology, data: st.DataObject) -> None:
    free = data.draw(st.one_of(st.just(topology.online), subsets(topology.online)))
    count = data.draw(st.integers(0, len(free)))
    hint = data.draw(st.sets(st.sampled_from(sorted(topology.cpu_nodes)), min_size=1))
    aligned = free & topology.cpus_of(NUMASet(hint))
    count = min(count, len(aligned))
    request = TakeRequest(
        count=count,
        free_cpus=free,
        smt=SMT.ANY,
        affinity=NUMASet(hint),
        settings=Settings(kubelet=KubeletRules(cpu_order=True, distribute_cpus_across_numa=True)),
    )
    result = take_cpus(build_allocator_index(topology), request)
    assert isinstance(result, ChosenCPUs)
    assert set(result.cpus) == KubeletOracle(topology).distributed(aligned, count, 1, hint)


@_SLOW
@given(machines(odd=False), st.data(), st.booleans())
def test_full_cores_equal_the_kubelet_on_even_machines(
    topology: Topology, data: st.DataObject, distribute: bool
) -> None:
    """With any CPUs missing, reserved siblings for instance, as long as the kubelet admits it."""
    free = data.draw(st.one_of(st.just(topology.online), subsets(topology.online)))
    threads = topology.threads_per_core
    whole = sum(len(c.cpus) for c in topology.cores.values() if c.cpus <= free)
    count = threads * data.draw(st.integers(0, whole // threads))
    request = TakeRequest(
        count=count,
        free_cpus=free,
        smt=SMT.FULL_CORE,
        settings=Settings(
            kubelet=KubeletRules(cpu_order=True, distribute_cpus_across_numa=distribute),
            align_l3=False,
        ),
    )
    result = take_cpus(build_allocator_index(topology), request)
    assert isinstance(result, ChosenCPUs)
    oracle = KubeletOracle(topology)
    expected = (
        oracle.distributed(free, count, threads) if distribute else oracle.packed(free, count)
    )
    if topology.siblings_of(CPUSet(expected)) <= CPUSet(expected):
        assert set(result.cpus) == expected
    assert topology.siblings_of(result.cpus) == result.cpus


BIG: dict[str, Callable[[], Topology]] = {
    "64 NUMA nodes": lambda: build_synthetic_topology(
        sockets=16, numa_per_socket=4, cores_per_numa=2
    ),
    "16 NUMA nodes in one socket": lambda: build_synthetic_topology(
        sockets=1, numa_per_socket=16, cores_per_numa=2
    ),
}


@pytest.mark.parametrize("machine", BIG)
@settings(deadline=None)
@given(data=st.data())
@example(data=None)
def test_many_numa_nodes_are_ordinary(machine: str, data: st.DataObject | None) -> None:
    """Beyond the number of combinations that can be tried: exact, few NUMA nodes, deterministic."""
    topology = BIG[machine]()
    if data is None:
        free, count, distribute, order = topology.online, 30, True, True
    else:
        free = topology.online - data.draw(subsets(topology.online))
        count = data.draw(st.integers(0, len(free)))
        distribute = data.draw(st.booleans())
        order = data.draw(st.booleans())
    request = TakeRequest(
        count=count,
        free_cpus=free,
        smt=SMT.ANY,
        settings=Settings(
            kubelet=KubeletRules(distribute_cpus_across_numa=distribute, cpu_order=order)
        ),
    )
    result = take_cpus(build_allocator_index(topology), request)
    assert isinstance(result, ChosenCPUs)
    assert result.cpus <= free
    assert len(result.cpus) == count
    if not order:
        assert len(topology.numa_of(result.cpus)) == fewest(topology, free, count)
