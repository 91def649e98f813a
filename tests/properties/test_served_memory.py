"""Memory without CPUs, as part of the NUMA nodes it serves: against walking over all masks."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from nri_numa.engine.align.hints import ResourceDemand, Steps
from nri_numa.engine.align.hints import hints_of as engine_hints
from nri_numa.engine.align.policies import Problem, align
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy

CPU_NODES = 4

amounts = st.lists(st.integers(0, 6), min_size=CPU_NODES, max_size=CPU_NODES)
serving = st.lists(
    st.tuples(
        st.integers(0, 8), st.integers(0, 8), st.sets(st.integers(0, CPU_NODES - 1), min_size=1)
    ),
    max_size=3,
)


def _demand(
    need: int, capacity: list[int], used: list[int], extra: list[tuple[int, int, set[int]]]
) -> ResourceDemand:
    there = dict(enumerate(capacity))
    left = {i: max(0, amount - used[i]) for i, amount in there.items()}
    near = {}
    for n, (total, taken, homes) in enumerate(extra):
        there[10 + n], left[10 + n] = total, max(0, total - taken)
        near[10 + n] = NUMASet(homes)
    return ResourceDemand(resource="memory", need=need, capacity=there, available=left, near=near)


def _have(demand: ResourceDemand, amounts: dict[int, int], mask: tuple[int, ...]) -> int:
    own = sum(amounts[i] for i in mask)
    return own + sum(amounts[i] for i, homes in demand.near.items() if homes & NUMASet(mask))


def _masks() -> list[tuple[int, ...]]:
    nodes = range(CPU_NODES)
    return [mask for size in range(1, CPU_NODES + 1) for mask in combinations(nodes, size)]


@given(st.integers(1, 20), amounts, amounts, serving)
def test_a_mask_has_its_own_memory_and_what_serves_it_once(
    need: int, capacity: list[int], used: list[int], extra: list[tuple[int, int, set[int]]]
) -> None:
    demand = _demand(need, capacity, used, extra)
    machine = NUMASet(range(CPU_NODES))
    (family,) = engine_hints([demand], machine, Steps())
    fits = [m for m in _masks() if _have(demand, dict(demand.available), m) >= need]
    if not fits:
        assert family.nil is False
        return
    assert [m for m in _masks() if family.contains(NUMASet(m).bits)] == fits
    ever = [len(m) for m in _masks() if _have(demand, dict(demand.capacity), m) >= need]
    assert family.width == min(ever, default=CPU_NODES)


@given(st.integers(1, 12), amounts, amounts, serving)
def test_one_numa_node_is_found_when_there_is_one(
    need: int, capacity: list[int], used: list[int], extra: list[tuple[int, int, set[int]]]
) -> None:
    demand = _demand(need, capacity, used, extra)
    nodes, policy = NUMASet(range(CPU_NODES)), Policy.SINGLE_NUMA_NODE
    found = align(Problem((demand,), nodes, policy, lambda a, b: 10 if a == b else 20))
    fits = [m for m in range(CPU_NODES) if _have(demand, dict(demand.available), (m,)) >= need]
    assert found.admitted is bool(fits)
    if fits:
        assert found.affinity == NUMASet([fits[0]])
    assert found.resources[0].text
