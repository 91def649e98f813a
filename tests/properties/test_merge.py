"""The merge equals the kubelet's walk over the product of all hints.

``NRI_NUMA_ORACLE_CASES`` sets how many random problems are compared (for the long run: 120000).
"""

from __future__ import annotations

import os
from random import Random

import pytest
from msgspec.structs import replace

from nri_numa.engine.align import hints
from nri_numa.engine.align.policies import Problem, align
from nri_numa.model.workload import Policy
from tests.checks.merge_cases import POLICIES, additive_case, aligned, random_case, walked
from tests.checks.oracles import Verdict, hints_of, walk

CASES = int(os.environ.get("NRI_NUMA_ORACLE_CASES", "2400"))
CHUNKS = 12


def _check(case: Problem, seed: int) -> None:
    want = walked(case)
    got = aligned(case)
    assert got == want, f"seed {seed}: {case}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_kind_of_demand_merges_as_the_walk_does(chunk: int) -> None:
    size = CASES // CHUNKS
    for seed in range(chunk * size, (chunk + 1) * size):
        _check(random_case(Random(seed)), seed)


def test_the_search_for_large_machines_prefers_no_other_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On machines small enough to walk over: whether one is preferred, how wide and how near."""
    monkeypatch.setattr(hints, "EXACT_UPTO", 0)
    monkeypatch.setattr(hints, "STEP_LIMIT", 1_000_000)
    for seed in range(10_000_000, 10_000_000 + CASES // 2):
        case = random_case(Random(seed))
        want, got = walked(case), aligned(case)
        assert got.preferred == want.preferred, f"seed {seed}: {case}"
        if want.preferred and want.affinity is not None:
            assert got.affinity is not None
            assert len(got.affinity) == len(want.affinity), f"seed {seed}: {case}"
            if case.prefer_closest and case.policy is not Policy.SINGLE_NUMA_NODE:
                assert _far(case, got) == _far(case, want), f"seed {seed}: {case}"


def _far(case: Problem, verdict: Verdict) -> int:
    mask = verdict.affinity or ()
    return sum(case.distance(i, j) for i in mask for j in mask)


def test_six_to_eight_numa_nodes_merge_as_the_walk_does() -> None:
    for seed in range(20_000_000, 20_000_000 + max(CASES // 40, 30)):
        _check(additive_case(Random(seed), (6, 7, 8)), seed)


def test_the_order_of_demands_does_not_matter() -> None:
    for seed in range(30_000_000, 30_000_000 + CASES // 4):
        random = Random(seed)
        case = random_case(random)
        other = replace(case, demands=tuple(random.sample(case.demands, len(case.demands))))
        assert aligned(case) == aligned(other), seed


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


def test_admission_is_monotone_in_the_policy() -> None:
    """What restricted admits best-effort places equally; what it refuses was not preferred."""
    for seed in range(50_000_000, 50_000_000 + CASES // 4):
        case = random_case(Random(seed))
        easy, strict = (
            align(replace(case, policy=policy))
            for policy in (Policy.BEST_EFFORT, Policy.RESTRICTED)
        )
        assert easy.admitted
        assert easy.affinity == strict.affinity
        assert strict.admitted == strict.preferred == easy.preferred
