"""The search for victims: against a model that tries every set of pods, and its bounds."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from nri_numa.cluster.node_resources import NodeResources, ResourceCounts
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.model.workload import Strategy
from nri_numa.scheduler.eviction_search import (
    MAX_SEARCH_WORK,
    CandidateNode,
    EvictablePod,
    Eviction,
    select_victims,
)
from nri_numa.scheduler.fit import Fit, Unfit, WorkBudget, evaluate_fit
from tests.beds.eviction_model import EVICTABLE, RandomNode
from tests.beds.objects import GIB, container, pod, single, table

NODES = int(os.environ.get("NRI_NUMA_EVICTION_NODES", "400"))
"""Random nodes; 10,000 take a minute."""


def test_the_eviction_is_the_cheapest_one_of_the_model() -> None:
    evictions, work = 0, WorkBudget()
    for seed in range(NODES):
        node = RandomNode(seed)
        if node.lacking(()) and not node.proposed:
            continue  # kube-scheduler would not name this node
        outcome, cheapest = select_victims(node.candidate(), EVICTABLE, work), node.cheapest()
        if not isinstance(outcome, Eviction):
            assert cheapest is None, seed
            alone = node.room_without(node.pods if node.may_change else node.proposed)
            verdict = evaluate_fit(alone, node.request, EVICTABLE)
            assert isinstance(verdict, Unfit), seed
            assert outcome == verdict, seed
            continue
        uids = [pod.uid for pod in outcome.pods]
        evicted = [pod for pod in node.pods if pod.uid in uids]
        assert node.fits_without(evicted), seed
        assert (node.cost(evicted), outcome.violations) == (cheapest, node.cost(evicted)[0]), seed
        assert uids == [p.uid for p in sorted(evicted, key=lambda p: (-p.priority, p.uid))], seed
        assert not node.may_change or node.required() <= set(uids), seed
        verdict = evaluate_fit(node.room_without(evicted), node.request, EVICTABLE)
        assert isinstance(verdict, Fit), seed
        assert outcome.fit.numa_nodes == verdict.numa_nodes, seed
        assert outcome.fit.pod_charge == verdict.pod_charge, seed
        evictions += bool(evicted)
    assert evictions > NODES // 4
    assert work.done < 14 * NODES, "sets that cannot be better are not tried"


# --- one node with two NUMA nodes of 16 CPUs ------------------------------------------------------


def victim(
    name: str, cpus: int = 2, numa_node: int = 0, gib: int = 1, **fields: Any
) -> EvictablePod:
    def column(amount: int) -> tuple[int, ...]:
        return (amount, 0) if numa_node == 0 else (0, amount)

    released = ResourceCounts(column(cpus), column(1000 * cpus), {"memory": column(gib * GIB)})
    sums = Counter({"cpu": 1000 * cpus, "memory": gib * GIB, "pods": 1})
    ordinary = {"uid": name, "full_name": name, "released": released, "sums": sums, "priority": 0,
                "is_movable": False, "budgets": (), "repels_others": False}  # fmt: skip
    return EvictablePod(**ordinary | fields)


def candidate(
    *pods: EvictablePod,
    cpus: int = 8,
    free: tuple[int, int] = (0, 0),
    wanted: dict[str, Any] | None = None,
    room: NodeResources | None = None,
    **fields: Any,
) -> CandidateNode:
    document = wanted or single(cpus, memory="1Gi")
    ordinary = {"missing": {}, "allowed": (), "proposed": (), "may_change": True}
    return CandidateNode(
        room=room or table(*free, of=16, memory=(64, 64)),
        request=PodReader(AgentConfig()).read_pod_request(document),
        pods=pods,
        **ordinary | fields,
    )


def names_of(outcome: object) -> Sequence[str]:
    assert isinstance(outcome, Eviction)
    return [pod.uid for pod in outcome.pods]


def evict(node: CandidateNode, **limit: int) -> Sequence[str]:
    return names_of(select_victims(node, Strategy.PACK, WorkBudget(), **limit))


def test_equal_pods_are_chosen_by_uid_and_a_pod_that_fits_needs_none() -> None:
    pods = [victim(f"v{n:02}", numa_node=n % 2) for n in range(16)]
    assert evict(candidate(*pods, free=(2, 4))) == ["v01", "v03"]
    assert evict(candidate(*pods, free=(8, 0))) == []


def test_the_highest_priority_comes_first_and_decides_before_the_number() -> None:
    pods = [victim(f"low{n}", numa_node=0, priority=n) for n in range(4)]
    large = victim("large", 8, 1, priority=4)
    assert evict(candidate(large, *pods)) == ["low3", "low2", "low1", "low0"]
    assert evict(candidate(large, *pods[:3])) == ["large"]


def test_a_budget_decides_before_priorities() -> None:
    protected = [victim(f"p{n}", 4, 0, budgets=(0,)) for n in range(2)]
    other = [victim(f"o{n}", 4, 1, priority=9) for n in range(2)]
    for allowed, uids in ((0, ["o0", "o1"]), (1, ["o0", "o1"]), (2, ["p0", "p1"])):
        assert evict(candidate(*protected, *other, allowed=(allowed,))) == uids
    outcome = select_victims(candidate(*protected, allowed=(1,)), Strategy.PACK, WorkBudget())
    assert isinstance(outcome, Eviction)
    assert outcome.violations == 1


def test_the_least_memory_decides_last() -> None:
    pods = [victim(f"v{n}", 8, n % 2, gib=9 - n) for n in range(4)]
    assert evict(candidate(*pods)) == ["v3"]


def test_sums_that_nobody_gives_are_left_to_kube_scheduler() -> None:
    pods = [victim("a", 8), victim("b", 8, 1)]
    missing = {"cpu": 16_000, "example.com/nic": 1}
    assert evict(candidate(*pods, missing=missing)) == ["a", "b"]
    assert evict(candidate(*pods, missing=missing, proposed=(pods[0],))) == ["a"]


def test_a_pod_of_which_nothing_is_known_goes_for_the_sums_alone() -> None:
    unknown, pods = victim("u", 8, released=None), [victim("a", 8, priority=1)]
    assert evict(candidate(unknown, *pods)) == ["a"]
    assert evict(candidate(unknown, *pods, missing={"pods": 2})) == ["a", "u"]
    assert isinstance(select_victims(candidate(unknown), Strategy.PACK, WorkBudget()), Unfit)


def test_movable_victims_free_no_more_after_moves() -> None:
    """Eight CPUs are free after moves of a pod with six: its end adds none to them."""
    room = table(2, 0, of=16)
    moved = (8, 0)
    node = candidate(
        victim("movable", 6, 0, is_movable=True),
        victim("fixed", 2, 0),
        cpus=10,
        room=NodeResources(**{
            **{name: getattr(room, name) for name in room.__struct_fields__},
            "exclusive_after_moves": moved,
        }),
    )  # fmt: skip
    assert evict(node) == ["fixed"], "the other one moves"


def test_containers_that_share_no_numa_node_are_searched_too() -> None:
    wanted = pod(container("a", "6"), container("b", "6"), cpus="exclusive")
    pods = [victim(f"v{n}", 6, n % 2, priority=n) for n in range(4)]
    assert evict(candidate(*pods, wanted=wanted)) == ["v1", "v0"]


# --- the work -------------------------------------------------------------------------------------


def distinct(count: int) -> list[EvictablePod]:
    """Pods of which no two can replace each other."""
    return [victim(f"v{n:02}", 1, n % 2, gib=1 + n % 5, priority=n % 7) for n in range(count)]


@pytest.mark.parametrize(("cpus", "units"), [(2, 49), (4, 178), (8, MAX_SEARCH_WORK)])
def test_the_work_is_bounded(cpus: int, units: int) -> None:
    work = WorkBudget()
    outcome = select_victims(candidate(*distinct(30), cpus=cpus), Strategy.PACK, work)
    assert len(names_of(outcome)) == cpus
    assert work.done == units


@pytest.mark.parametrize(
    ("pods", "victims"),
    [
        ([victim("a", 8, priority=0), victim("b", 8, priority=1)], ["a"]),
        ([victim("a", 8, priority=0, budgets=(0,)), victim("b", 8, priority=1)], ["b"]),
        ([victim("a", 8, priority=0, budgets=(1,)), victim("b", 8, priority=1)], ["a"]),
        ([victim("a", 4), victim("b", 4), victim("c", 8)], ["c"]),
        ([victim("a", 8, gib=2), victim("b", 8, gib=1)], ["b"]),
        ([victim("b", 8), victim("a", 8)], ["a"]),
    ],
)
def test_the_first_set_spares_the_most_costly(pods: list[EvictablePod], victims: list[str]) -> None:
    """Spent budgets, high priorities, few CPUs, much memory; the work ends then."""
    node = candidate(*pods, allowed=(0, 1))
    assert evict(node, limit=4 + 2 * len(pods)) == victims


def test_one_more_pod_of_the_lowest_priority_costs_no_less_than_none() -> None:
    pods = [victim("one", 8, 0), victim("two", 4, 1), victim("three", 4, 1, priority=-(2**31))]
    assert evict(candidate(*pods)) == ["one"]


def test_shared_cpus_of_a_numa_node_are_freed() -> None:
    shared = pod(container("a", "4", "1Gi"), policy="single-numa-node", cpus="shared")
    pods = [victim("a", 4, 0, priority=1), victim("b", 2, 1), victim("c", 2, 1)]
    assert evict(candidate(*pods, wanted=shared)) == ["b", "c"]


def test_a_numa_node_that_lacks_memory_alone() -> None:
    """It has the CPUs, so one pod without any may suffice; the other NUMA node needs two."""
    pods = [victim("a", 4, 1), victim("b", 4, 1), victim("memory", 0, 0, gib=30)]
    room = table(8, 0, of=16, memory=(0, 32))
    assert evict(candidate(*pods, room=room)) == ["memory"]


def test_free_cpus_of_a_numa_node_make_one_victim_enough() -> None:
    """The first set is of the other NUMA node, because these two have less memory."""
    pods = [victim("b", 4, 1), victim("c", 4, 1), victim("a", 4, 0, gib=9)]
    assert evict(candidate(*pods, free=(4, 0))) == ["a"]


def test_equal_pods_take_little_work() -> None:
    work = WorkBudget()
    pods = [victim(f"v{n:02}", 1, n % 2) for n in range(30)]
    assert len(names_of(select_victims(candidate(*pods), Strategy.PACK, work))) == 8
    assert work.done == 33


@pytest.mark.parametrize("limit", [0, 1, 2, 10, 30])
def test_a_search_that_ends_early_answers_what_is_known_or_nothing(limit: int) -> None:
    pods, work = distinct(30), WorkBudget()
    work.done = 5
    node = candidate(*pods)
    assert select_victims(node, Strategy.PACK, work, limit=limit) is None
    assert work.done <= 5 + limit + 2 * 2, "of two evaluations"
    proposed = tuple(pods[:16])
    node = candidate(*pods, proposed=proposed, missing={"cpu": 16_000})
    assert set(evict(node, limit=min(limit, 10))) == {pod.uid for pod in proposed}
