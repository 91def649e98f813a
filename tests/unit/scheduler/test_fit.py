"""Does a pod fit, where, and if not, why not."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nri_numa.cluster.node_resources import NodeResources
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.config import AgentConfig
from nri_numa.engine.align.hints import ResourceDemand
from nri_numa.engine.align.policies import AlignmentRequest, align_demands
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Unit
from nri_numa.model.workload import Policy, Strategy
from nri_numa.scheduler.fit import MAX_NODE_WORK, Fit, Unfit, WorkBudget, evaluate_fit
from tests.beds.objects import GIB, PREFIX, container, pod, single, table, topology

SPREAD, PACK = Strategy.SPREAD, Strategy.PACK


def request(document: dict[str, Any]) -> PodRequest:
    return PodReader(AgentConfig()).read_pod_request(document)


def places(found: Fit | Unfit) -> dict[str, str]:
    assert isinstance(found, Fit), found
    return {name: str(numa_nodes) for name, numa_nodes in found.numa_nodes}


def text(found: Fit | Unfit) -> str:
    assert isinstance(found, Unfit), found
    return found.reason_text(found.best_amount)


@pytest.mark.parametrize(
    ("document", "room", "expected"),
    [
        (single(12), table(8, 4),
         "needs 12 exclusive CPUs on one NUMA node; at most 8 free for exclusive use"),
        (single(20), table(8, 4), "needs 20 exclusive CPUs on one NUMA node; an empty node has 16"),
        (single(2, memory="20Gi"), table(8, 4, memory=(10, 12)),
         "needs 20 GiB of memory on one NUMA node; at most 12 GiB free"),
        (single(6, memory="20Gi"), table(8, 4, memory=(10, 30)),
         "needs 6 exclusive CPUs and 20 GiB of memory on one NUMA node; each is free, but not "
         "together"),
        (single(20, policy="restricted", bind="cpu"), table(8, 8),
         "needs 20 exclusive CPUs; at most 16 free for exclusive use"),
        (single(4, policy="restricted"), table(3, 3),
         "needs 4 exclusive CPUs on one NUMA node; at most 3 free for exclusive use"),
        (pod(container(cpu="2500m", memory="1Gi"), policy="single-numa-node"), table(2, 1),
         "needs 2.5 CPUs on one NUMA node; at most 2 free"),
        (single(3, smt="full-core"), table(8, zone={f"{PREFIX}/threads-per-core": "2"}),
         "needs 3 exclusive CPUs in whole cores of 2 threads"),
        (single(5, smt="isolate"), table(8, zone={f"{PREFIX}/threads-per-core": "2"}),
         "needs 5 exclusive CPUs with idle siblings (10 CPUs) on one NUMA node; "
         "at most 8 free for exclusive use"),
        (single(20, policy="best-effort"), table(8, 4),
         "needs 20 exclusive CPUs; at most 12 free for exclusive use"),
    ],
)  # fmt: skip
def test_reasons(document: dict[str, Any], room: NodeResources, expected: str) -> None:
    found = evaluate_fit(room, request(document), SPREAD)
    assert text(found) == expected
    assert isinstance(found, Unfit)
    assert found.unresolvable == any(w in expected for w in ("an empty node", "whole cores"))


def test_the_ladder_of_the_node() -> None:
    wide = evaluate_fit(table(4, 4), request(single(6, on_failure="best-effort")), SPREAD)
    assert places(wide) == {"main": "0-1"}
    assert isinstance(wide, Fit)
    assert wide.score_key >> 4 == 128 - 2 * 2 - 1, "more than an empty machine would need"
    unpinned = evaluate_fit(table(4, 4), request(single(12, on_failure="unpinned")), SPREAD)
    assert isinstance(unpinned, Fit)
    assert (unpinned.numa_nodes, unpinned.score_key) == ((), 0)


def test_containers_take_from_each_other_and_init_containers_give_back() -> None:
    both = pod(container("a", "3", "1Gi"), container("b", "3", "1Gi"),
               policy="single-numa-node", cpus="exclusive")  # fmt: skip
    assert places(evaluate_fit(table(4, 4), request(both), SPREAD)) == {"a": "0", "b": "1"}
    assert text(evaluate_fit(table(4, 2), request(both), SPREAD)).endswith(
        "at most 2 free for exclusive use"
    )
    first = pod(container("a", "3", "1Gi"), init=[container("first", "4", "1Gi")],
                policy="single-numa-node", cpus="exclusive")  # fmt: skip
    found = evaluate_fit(table(4, 0), request(first), SPREAD)
    assert isinstance(found, Fit)
    assert found.pod_charge is not None
    assert found.pod_charge.exclusive == (3, 0)


def test_a_pod_as_a_whole() -> None:
    document = pod(container("a", "3", "1Gi"), container("b", "3", "1Gi"),
                   policy="single-numa-node", cpus="exclusive", scope="pod")  # fmt: skip
    assert places(evaluate_fit(table(4, 8), request(document), SPREAD)) == {"a": "1", "b": "1"}
    assert "needs 6 exclusive CPUs on one" in text(
        evaluate_fit(table(4, 4), request(document), SPREAD)
    )


def test_the_kubelets_policy_counts_where_it_has_one() -> None:
    """An ordinary Guaranteed pod, which asks us for nothing."""
    document = request(pod(container(cpu="6", memory="1Gi")))
    plain = evaluate_fit(table(4, 4), document, SPREAD)
    assert isinstance(plain, Fit)
    assert plain.pod_charge is None
    strict = {"topologyManagerPolicy": "single-numa-node"}
    found = evaluate_fit(table(4, 4, attributes=strict), document, SPREAD)
    assert (
        text(found) == "needs 6 exclusive CPUs on one NUMA node; at most 4 free for exclusive use"
    )
    both = evaluate_fit(
        table(4, 4, attributes=strict), request(single(6, policy="best-effort")), SPREAD
    )
    assert isinstance(both, Unfit)
    fits = evaluate_fit(table(4, 6, attributes=strict), document, SPREAD)
    assert isinstance(fits, Fit)
    assert fits.numa_nodes == ()  # the kubelet chooses
    assert fits.pod_charge is not None
    shared = {**strict, "cpuManagerPolicy": "none"}
    assert isinstance(evaluate_fit(table(4, 4, attributes=shared), document, SPREAD), Fit)
    memory = {**shared, "memoryManagerPolicy": "Static"}
    wide = request(pod(container(cpu="6", memory="30Gi")))
    assert "30 GiB of memory" in text(
        evaluate_fit(table(4, 4, memory=(8, 8), attributes=memory), wide, SPREAD)
    )
    two = request(pod(container("a", "3", "1Gi"), container("b", "3", "1Gi")))
    whole = {**strict, "topologyManagerScope": "pod"}
    assert isinstance(evaluate_fit(table(4, 4, attributes=strict), two, SPREAD), Fit)
    assert isinstance(evaluate_fit(table(4, 4, attributes=whole), two, SPREAD), Unfit)


def test_promises_are_taken_away_and_never_below_nothing() -> None:
    room = table(4, 8)
    found = evaluate_fit(room, request(single(6)), SPREAD)
    assert isinstance(found, Fit)
    assert found.pod_charge is not None
    left = room.minus_pods([found.pod_charge])
    assert left.exclusive.free == (4, 2)
    assert left.other_resources[0].free == (32 * GIB, 31 * GIB)
    assert room.minus_pods([found.pod_charge] * 3).exclusive.free == (4, 0)
    assert room.minus_pods([]) is room
    # The machine is another one by now.
    assert table(4).minus_pods([found.pod_charge]).exclusive.free == (4,)


def wide(count: int, *last: dict[str, Any], policy: str = "best-effort") -> PodRequest:
    """A pod of containers that no NUMA node has memory for, whose requests leave it to others."""
    parts = [container(f"c{n}", cpu="1", memory=f"{33 + n}Gi") for n in range(count)]
    for part in parts:
        part["resources"]["requests"] = {"memory": "1Mi"}
    return request(pod(*parts, *last, policy=policy))


@pytest.mark.parametrize(
    ("numa_nodes", "containers", "least", "by_sums"),
    [(8, 1, 27, False), (8, 11, 297, False), (8, 64, 1728, False), (10, 64, MAX_NODE_WORK, True)],
)
def test_each_merge_is_work_and_one_node_costs_no_more_than_so_much(
    numa_nodes: int, containers: int, least: int, by_sums: bool
) -> None:
    """Containers beyond it are judged each by itself: one that fits nowhere is still refused."""
    room, work = table(*[16] * numa_nodes), WorkBudget()
    found = evaluate_fit(room, wide(containers), SPREAD, work)
    assert isinstance(found, Fit)
    assert found.by_sums is by_sums
    assert (len(found.numa_nodes) < containers) is by_sums
    assert least <= work.done <= MAX_NODE_WORK + 75 + containers
    never = container("z", cpu="1", memory="900Gi")
    assert "900 GiB" in text(evaluate_fit(room, wide(containers - 1, never), SPREAD))


def test_of_a_pod_with_more_containers_the_first_ones_are_judged() -> None:
    """As many as the annotation may name; the node decides about the others."""
    assert [len(wide(n).containers) for n in (64, 65, 500)] == [64, 64, 64]
    assert wide(501).invalid_reason == "cannot be read: it has 501 containers, expected at most 500"


@settings(max_examples=200)
@given(
    free=st.lists(st.integers(0, 16), min_size=1, max_size=4),
    asks=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=4),
    policy=st.sampled_from(["single-numa-node", "restricted", "best-effort"]),
    limit=st.integers(0, 30),
)
def test_sums_alone_reject_nothing_that_would_fit(
    free: list[int], asks: list[tuple[int, int]], policy: str, limit: int
) -> None:
    parts = [container(f"c{n}", str(cpus), f"{gib}Gi") for n, (cpus, gib) in enumerate(asks)]
    asked, room = request(pod(*parts, policy=policy, cpus="exclusive")), table(*free)
    if isinstance(evaluate_fit(room, asked, SPREAD), Fit):
        assert isinstance(evaluate_fit(room, asked, SPREAD, WorkBudget(limit)), Fit)
        assert isinstance(
            evaluate_fit(room, asked.without_duplicate_containers(2), SPREAD, WorkBudget(0)), Fit
        )


_FREE = st.lists(st.integers(0, 16), min_size=1, max_size=4)


@settings(max_examples=200)
@given(free=_FREE, cpus=st.integers(1, 20), strict=st.booleans())
def test_a_verdict_is_the_topology_managers(free: list[int], cpus: int, strict: bool) -> None:
    """Asked directly, with the same numbers."""
    room = table(*free)
    policy = Policy.SINGLE_NUMA_NODE if strict else Policy.RESTRICTED
    found = evaluate_fit(room, request(single(cpus, policy=policy.value, bind="cpu")), SPREAD)
    demand = ResourceDemand(
        resource="cpu", need=cpus, capacity=dict.fromkeys(room.ids, 16),
        free_amounts=dict(zip(room.ids, free, strict=True)), unit=Unit.CPUS,
    )  # fmt: skip
    verdict = align_demands(AlignmentRequest((demand,), NUMASet(room.ids), policy, room.distance))
    assert isinstance(found, Fit) == verdict.admitted


_GIBS = st.lists(st.integers(0, 32), min_size=4, max_size=4)


@settings(max_examples=200)
@given(
    free=st.lists(st.integers(0, 16), min_size=4, max_size=4),
    memory=_GIBS,
    whole=_GIBS,
    cpus=st.integers(1, 50),
    gib=st.integers(1, 100),
)
def test_sums_reject_nothing_that_the_topology_manager_admits(
    free: list[int], memory: list[int], whole: list[int], cpus: int, gib: int
) -> None:
    """Also where NUMA nodes have different amounts."""
    document = topology(*free, memory=memory)
    for zone, capacity in zip(document["zones"], whole, strict=True):
        zone["resources"][1]["allocatable"] = f"{capacity}Gi"
    room = decode_topology(document, PREFIX)
    assert isinstance(room, NodeResources)
    asked = request(single(cpus, policy="restricted", memory=f"{gib}Gi"))
    found = evaluate_fit(room, asked, SPREAD)
    demands = [
        ResourceDemand(
            resource=name, need=need, capacity=dict(enumerate(has.capacity)),
            free_amounts=dict(enumerate(has.free)),
        )
        for name, need, has in (
            ("cpu", cpus, room.exclusive), ("memory", gib * GIB, room.other_resources[0]),
        )
    ]  # fmt: skip
    problem = AlignmentRequest(
        tuple(demands), NUMASet(room.ids), Policy.RESTRICTED, room.distance, one_width=True
    )
    single_node = any(
        n >= cpus and m >= gib * GIB
        for n, m in zip(room.exclusive.free, room.other_resources[0].free, strict=True)
    )
    assert isinstance(found, Fit) == (single_node or align_demands(problem).admitted)
