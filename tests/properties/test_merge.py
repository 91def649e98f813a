"""The merge equals the kubelet's walk over all hints; memory counts with the NUMA nodes it serves.

``NRI_NUMA_ORACLE_CASES`` sets how many random problems are compared (for the long run: 120000).
"""

import os
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.engine.align import hints
from nri_numa.engine.align.hints import ResourceDemand, SearchBudget
from nri_numa.engine.align.hints import compute_hints as engine_hints
from nri_numa.engine.align.policies import AlignmentRequest, align_demands
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Policy
from tests.checks.merge_cases import POLICIES, additive_case, aligned, random_case, walked
from tests.checks.oracles import Verdict, hints_of, walk

CASES = int(os.environ.get("NRI_NUMA_ORACLE_CASES", "2400"))
CHUNKS = 12


def _check(case: AlignmentRequest, seed: int) -> None:
    want = walked(case)
    got = aligned(case)
    assert got == want, f"seed {seed}: {case}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_kind_of_demand_merges_as_the_walk_does(chunk: int) -> None:
    size = CASES // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        _check(random_case(Random(seed)), seed)


def test_the_search_for_large_machines_prefers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines small enough to walk over: whether one is preferred, how wide and how near."""
    monkeypatch.setattr(hints, "EXACT_MERGE_MAX_NODES", 0)
    monkeypatch.setattr(hints, "SEARCH_STEP_LIMIT", 1_000_000)
    for seed in range(10_000_000, 10_000_000 + CASES // 2):
        case = random_case(Random(seed))
        want, got = walked(case), aligned(case)
        assert got.preferred == want.preferred, f"seed {seed}: {case}"
        if want.preferred and want.affinity is not None:
            assert got.affinity is not None
            assert len(got.affinity) == len(want.affinity), f"seed {seed}: {case}"
            if case.prefer_closest_numa_nodes and case.policy is not Policy.SINGLE_NUMA_NODE:
                assert _far(case, got) == _far(case, want), f"seed {seed}: {case}"


def _far(case: AlignmentRequest, verdict: Verdict) -> int:
    mask = verdict.affinity or ()
    return sum(case.distance(i, j) for i in mask for j in mask)


def test_six_to_eight_numa_nodes_merge_as_the_walk_does() -> None:
    for seed in range(20_000_000, 20_000_000 + max(CASES // 40, 30)):
        _check(additive_case(Random(seed), (6, 7, 8)), seed)


def test_the_fold_of_the_oracle_equals_its_product() -> None:
    """The oracle's own shortcut for large products is not taken on trust."""
    compared = 0
    for seed in range(40_000_000, 40_000_000 + CASES // 4):
        case = random_case(Random(seed), sizes=(1, 2, 3))
        lists = hints_of(case.demands, case.numa_ids)
        for policy in POLICIES:
            arguments = (lists, case.numa_ids, policy, case.distance, case.rank)
            if len(lists) <= 4:
                compared += 1
                assert walk(*arguments, by="product") == walk(*arguments, by="fold"), seed
    assert compared


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
    return ResourceDemand(
        resource="memory", need=need, capacity=there, free_amounts=left, attached=near
    )


def _have(demand: ResourceDemand, amounts: dict[int, int], mask: tuple[int, ...]) -> int:
    own = sum(amounts[i] for i in mask)
    return own + sum(amounts[i] for i, homes in demand.attached.items() if homes & NUMASet(mask))


def _masks() -> list[tuple[int, ...]]:
    nodes = range(CPU_NODES)
    return [mask for size in range(1, CPU_NODES + 1) for mask in combinations(nodes, size)]


@given(st.integers(1, 20), amounts, amounts, serving)
def test_a_mask_has_its_own_memory_and_what_serves_it_once(
    need: int, capacity: list[int], used: list[int], extra: list[tuple[int, int, set[int]]]
) -> None:
    demand = _demand(need, capacity, used, extra)
    (family,) = engine_hints([demand], NUMASet(range(CPU_NODES)), SearchBudget())
    fits = [m for m in _masks() if _have(demand, dict(demand.free_amounts), m) >= need]
    if not fits:
        assert family.nil is False
        return
    assert [m for m in _masks() if family.contains_mask(NUMASet(m).bits)] == fits
    ever = [len(m) for m in _masks() if _have(demand, dict(demand.capacity), m) >= need]
    assert family.width == min(ever, default=CPU_NODES)


@given(st.integers(1, 12), amounts, amounts, serving)
def test_one_numa_node_is_found_when_there_is_one(
    need: int, capacity: list[int], used: list[int], extra: list[tuple[int, int, set[int]]]
) -> None:
    demand = _demand(need, capacity, used, extra)
    nodes, policy = NUMASet(range(CPU_NODES)), Policy.SINGLE_NUMA_NODE
    found = align_demands(
        AlignmentRequest((demand,), nodes, policy, lambda a, b: 10 if a == b else 20)
    )
    fits = [m for m in range(CPU_NODES) if _have(demand, dict(demand.free_amounts), (m,)) >= need]
    assert found.admitted is bool(fits)
    if fits:
        assert found.affinity == NUMASet([fits[0]])
    assert found.resource_summaries[0].text
