"""Which pods leave NUMA nodes that are drained, or that the host takes away, and how fast."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller, CPUStealEviction, DrainEviction, EvictionSection
from nri_numa.controller.evictor import (
    POD_LIST_INTERVAL_S,
    EvictionBudget,
    HostStealEvictor,
    NUMANodeDrainEvictor,
    parse_assigned_numa_nodes,
)
from nri_numa.controller.service import ControllerService
from nri_numa.kube.requests import Outcome, OutcomeKind, Resource
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.controller_bed import EvictorBed
from tests.beds.evicted_pods import NODE_ANNOTATIONS
from tests.beds.evicted_pods import assigned_pod as pod
from tests.beds.evicted_pods import measured_topology as topology
from tests.beds.objects import PREFIX

ONE = {**NODE_ANNOTATIONS, f"{PREFIX}/drained": "1"}
CPUS = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


def node(annotations: Mapping[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "n", "annotations": annotations}}


class DrainBed(EvictorBed):
    """One Node with pods."""

    output: NUMANodeDrainEvictor | HostStealEvictor

    def see(self, annotations: Mapping[str, str]) -> None:
        self.output.on_node_updated("n", node(annotations), self.now)


def drained(
    *pods: dict[str, Any],
    see: Mapping[str, str] = ONE,
    budget: EvictionBudget | None = None,
    delay_s: float = 30.0,
    **rules: Any,
) -> DrainBed:
    bed = DrainBed(*pods)
    budget = budget or EvictionBudget(EvictionSection(**rules), 0.0)
    bed.output = NUMANodeDrainEvictor(PREFIX, budget, delay_s, 0.0)
    bed.see(see)
    return bed


def test_who_is_there_goes_in_turn_after_a_while() -> None:
    bed = drained(pod("b", "4-5"), pod("a", "", "1"), pod("c", "0-3", "0"), pod("d", "3-4"))
    assert isinstance(bed.output, NUMANodeDrainEvictor)
    assert bed.output.draining_count() == 1
    bed.run(33)
    assert bed.output.next_due_at() == 40.0, "nobody looks before the next may go"
    assert bed.run(87) == ["a", "b", "d"]
    times = [at for _, at in bed.evicted]
    assert times[0] >= 30
    assert all(later - at >= 9 for at, later in itertools.pairwise(times))
    assert bed.output.pending_count() == 0
    eviction, event = (bed.bodies(of)[0] for of in (Resource.EVICTIONS, Resource.EVENTS))
    assert eviction["deleteOptions"] == {"preconditions": {"uid": "uid-a"}}
    assert event["metadata"]["name"] == "a.uid-a.drained"
    assert event["reason"] == "NUMANodeDrained"
    assert event["note"] == "evicted: NUMA node 1 of node n is drained"
    assert event["regarding"]["uid"] == "uid-a"


async def test_a_workload_leaves_a_drained_numa_node_as_a_whole(tmp_path: Path) -> None:
    """Of other evictions a workload has a number in a while; as the controller is configured."""
    section = Controller(
        credentials_dir=str(tmp_path),
        evictions=EvictionSection(drained_numa_nodes=DrainEviction(evict=True)),
    )
    bed = DrainBed(*(pod(name, "4", workload="web") for name in "abc"))
    service = ControllerService(
        AgentConfig(controller=section), ClusterObjects(), clock=lambda: 0.0
    )
    bed.output = service.drained  # type: ignore[assignment]
    bed.see(ONE)
    assert bed.run(120) == ["a", "b", "c"]


def test_a_dry_run_asks_once_and_says_so() -> None:
    bed = drained(pod("a", "4"), dry_run=True)
    assert bed.run(200) == ["a"]
    assert bed.cluster.get(Resource.PODS, "a", "shop")
    (event,) = bed.bodies(Resource.EVENTS)
    assert event["note"].startswith("would be evicted (dry run)")


@pytest.mark.parametrize("result", [OutcomeKind.BLOCKED, OutcomeKind.FORBIDDEN])
def test_a_budget_or_policy_is_asked_again_and_holds_up_nobody_else(result: OutcomeKind) -> None:
    bed = drained(pod("a", "4"), pod("b", "5"))
    bed.answers["a"] = result
    assert bed.run(120) == ["b"]
    assert len(bed.bodies(Resource.EVICTIONS)) >= 3
    del bed.answers["a"]
    assert bed.run(120) == ["b", "a"]


def test_an_event_that_may_not_be_written_is_left_out() -> None:
    bed = drained(pod("a", "4"), pod("b", "5"))
    bed.answers["events"] = OutcomeKind.FORBIDDEN
    assert bed.run(120) == ["a", "b"]


def test_undrained_is_left_alone() -> None:
    bed = drained(pod("a", "4"))
    bed.run(20)
    bed.see(NODE_ANNOTATIONS)
    bed.run(100)
    assert bed.requests == []
    assert bed.output.draining_count() == 0


def test_a_list_of_nonsense_drains_nothing() -> None:
    bed = drained(pod("a", "4"), see={**NODE_ANNOTATIONS, f"{PREFIX}/drained": "all"})
    bed.run(100)
    assert bed.requests == []


def test_without_the_machines_cpus_memory_tells() -> None:
    """The publisher has not written them, or something else."""
    ids, cpus = f"{PREFIX}/numa-ids", f"{PREFIX}/numacpu"
    for told in ({}, {ids: "0-2", cpus: "0|1"}, {ids: "x"}):
        see = {**told, f"{PREFIX}/drained": "1"}
        bed = drained(pod("a", "4"), pod("b", "4", "1"), see=see)
        assert bed.run(100) == ["b"]


def test_without_the_right_nothing_is_asked_for_a_minute() -> None:
    bed = drained(pod("a", "4"))
    bed.answers["a"] = OutcomeKind.FORBIDDEN
    bed.run(80)
    assert len(bed.requests) == 2


def test_who_is_gone_is_gone() -> None:
    bed = drained(pod("a", "4"))
    bed.answers["a"] = OutcomeKind.MISSING
    bed.run(40)
    assert bed.output.pending_count() == 0


def test_a_failed_look_comes_again() -> None:
    bed = drained(pod("a", "4"), delay_s=0.0)
    request = bed.output.next_request(0.0)
    assert request is not None
    bed.output.on_outcome(request, Outcome(result=OutcomeKind.FAILED), 0.0, 0.0)
    assert bed.output.next_due_at() == POD_LIST_INTERVAL_S
    bed.output.on_node_removed("n")
    bed.output.on_outcome(request, Outcome(result=OutcomeKind.SUCCEEDED), 0.0, 0.0)
    assert bed.output.next_due_at() == float("inf")


@pytest.mark.parametrize("text", ["", "[]", "x", '{"a": 1}', '{"a": {"cpus": "x"}}', "[" * 50_000])
def test_an_annotation_of_nonsense_says_nothing(text: str) -> None:
    assert parse_assigned_numa_nodes(text, CPUS) == frozenset()


def test_cpus_of_the_numa_nodes_may_be_told_later() -> None:
    """A publisher that starts finds the annotation there before it tells what a node has."""
    bed = drained(pod("web", "4-5"), see={f"{PREFIX}/drained": "1"})
    bed.run(100)
    assert bed.evicted == []
    bed.see(ONE)
    bed.run(200)
    assert [name for name, _ in bed.evicted] == ["web"]


class StealBed(DrainBed):
    """The same Node, which the host takes away."""

    output: HostStealEvictor

    def __init__(
        self, *pods: dict[str, Any], most: int = 3, budget: EvictionBudget | None = None
    ) -> None:
        super().__init__(*pods)
        budget = budget or EvictionBudget(EvictionSection(max_per_workload_per_hour=most), 0.0)
        config = CPUStealEviction(delay=60.0, below_factor=0.7, max_affected_fraction=0.5)
        self.output = HostStealEvictor(PREFIX, budget, config, 0.0)
        self.see(NODE_ANNOTATIONS)

    def says(self, *factors: object) -> None:
        self.output.on_topology_updated("n", topology("n", *factors), self.now)


def test_pods_leave_one_by_one_when_it_stays_low() -> None:
    bed = StealBed(pod("a", "0-1"), pod("b", "2"), pod("c", "4-5"))
    bed.says("0.6", None)
    bed.run(59)
    assert bed.requests == []
    assert bed.run(300) == ["a", "b"], "c is on the other NUMA node"
    (_, first), (_, second) = bed.evicted
    assert second - first >= 60
    (event, _) = bed.bodies(Resource.EVENTS)
    assert event["reason"] == "NUMANodeStolen"
    assert event["note"] == (
        "evicted: the host steals CPU time of NUMA node 0 of node n "
        "(measured factor 0: 0.6, limit 0.7)"
    )


def test_it_ends_when_the_factor_is_well_again_and_not_before() -> None:
    """What wavers about the limit neither ends it nor begins it again."""
    bed = StealBed(*(pod(f"p{i}", "0") for i in range(9)))
    bed.says("0.6", None)
    bed.run(90)
    bed.says("0.8", None)
    assert bed.names == ["p0"]
    assert bed.run(60) == ["p0", "p1"]
    assert bed.output.degraded_count() == 1
    bed.says("0.9", None)
    bed.run(300)
    assert bed.output.degraded_count() == 0
    bed.says("0.8", None)
    bed.run(300)
    assert len(bed.names) == 2


def test_a_factor_that_flaps_moves_nobody() -> None:
    bed = StealBed(pod("a", "0"))
    for second in range(600):
        bed.says("0.5" if second % 2 else "0.75", None)
        bed.run(1)
    assert bed.requests == []


def test_where_many_are_low_nobody_moves() -> None:
    """The measurement errs, or there is no better place."""
    bed = StealBed(pod("a", "0"))
    bed.says("0.6", "0.6")
    bed.run(300)
    assert (bed.requests, bed.output.degraded_count()) == ([], 2)
    for name in ("m", "o"):
        bed.output.on_topology_updated(name, topology(name, None, None), bed.now)
    assert bed.run(60) == ["a"]


def test_budgets_and_the_limit_of_one_workload_hold() -> None:
    bed = StealBed(
        pod("a", "0"),
        pod("b1", "0", workload="b"),
        pod("b2", "0", workload="b"),
        pod("b3", "0", workload="b"),
        most=2,
    )
    bed.answers["a"] = OutcomeKind.BLOCKED
    bed.says("0.6", None)
    assert bed.run(1200) == ["b1", "b2"]
    assert len(bed.bodies(Resource.EVICTIONS)) > 3
    assert bed.run(3600) == ["b1", "b2", "b3"]


def test_all_reasons_share_a_minute_and_drains_count_for_no_workload() -> None:
    budget = EvictionBudget(EvictionSection(max_per_workload_per_hour=1), 0.0)
    drain = drained(*(pod(name, "4", workload="web") for name in "abcd"), budget=budget)
    host = StealBed(*(pod(name, "0", workload="web") for name in "yz"), budget=budget)
    host.says("0.6", None)
    for _ in range(300):
        drain.run(1)
        host.run(1)
    assert (drain.names, host.names) == (["a", "b", "c", "d"], ["y"])
    times = sorted(at for _, at in [*drain.evicted, *host.evicted])
    assert all(later - at >= 10 for at, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    "factor", ["NaN", "-1", "1.5", "inf", "", "x", "0" * 99, 0.5, None, [], {"a": 1}]
)
def test_nonsense_is_a_whole_factor(factor: object) -> None:
    bed = StealBed(pod("a", "0"))
    bed.says(factor, None)
    bed.run(200)
    assert bed.requests == []


@pytest.mark.parametrize(
    "zones",
    [
        "x", [1], [{"type": "Node"}], [{"type": "Node", "name": "numa0"}],
        [{"type": "Node", "name": "node-0", "attributes": [{"name": "x"}, 3]}],
    ],
)  # fmt: skip
def test_an_object_of_nonsense_says_nothing(zones: object) -> None:
    bed = StealBed(pod("a", "0"))
    bed.output.on_topology_updated("n", {"zones": zones}, 0.0)
    bed.run(200)
    assert bed.requests == []


def test_a_node_that_is_gone_is_forgotten() -> None:
    bed = StealBed(pod("a", "0"))
    bed.says("0.6", None)
    bed.run(70)
    assert bed.output.draining_count() == 1
    bed.output.on_topology_removed("n")
    bed.run(10)
    assert bed.output.draining_count() == 0, "its Node is still there"
    bed.output.on_node_removed("n")
    bed.run(10)
    assert (bed.output.draining_count(), bed.output.degraded_count()) == (0, 0)
