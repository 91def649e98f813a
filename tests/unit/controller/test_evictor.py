"""Which pods leave NUMA nodes that are drained, or that the host takes away, and how fast."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller, DrainEviction, EvictionSection
from nri_numa.controller.evictor import (
    POD_LIST_INTERVAL_S,
    EvictionBudget,
    EvictionRules,
    HostStealEvictor,
    NUMANodeDrainEvictor,
    parse_assigned_numa_nodes,
)
from nri_numa.controller.service import ControllerService
from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb
from tests.beds import objects
from tests.beds.objects import PREFIX
from tests.unit.controller.evictions import EvictingCluster

TOLD = {f"{PREFIX}/numa-ids": "0-1", f"{PREFIX}/numacpu": "0-3|4-7"}
ONE = {**TOLD, f"{PREFIX}/drained": "1"}
CPUS = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


def node(annotations: Mapping[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "n", "annotations": annotations}}


def pod(
    name: str, cpus: str, mems: str = "", workload: str = "", **metadata: Any
) -> dict[str, Any]:
    assigned = json.dumps({"main": {"cpus": cpus, "mems": mems}})
    owner = {"kind": "ReplicaSet", "name": "rs", "uid": workload or f"rs-{name}"}
    return {
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "annotations": {f"{PREFIX}/assigned": assigned},
            "ownerReferences": [{**owner, "controller": True}],
            **metadata,
        },
        "status": {"phase": "Running"},
    }


class Cluster(EvictingCluster):
    """One Node with pods, whose evictions are answered as told."""

    output: NUMANodeDrainEvictor | HostStealEvictor

    def __init__(self, *pods: dict[str, Any]) -> None:
        super().__init__()
        self.pods = {p["metadata"]["name"]: p for p in pods}

    def see(self, annotations: Mapping[str, str]) -> None:
        self.output.on_node_updated("n", node(annotations), self.now)

    def answer(self, request: APIRequest) -> Outcome:
        if request.verb is Verb.LIST:
            assert request.field_selector == {"spec.nodeName": "n"}
            return Outcome(result=OutcomeKind.SUCCEEDED, documents=tuple(self.pods.values()))
        if request.resource is Resource.EVENTS:
            return Outcome(result=self.answers.get("events", OutcomeKind.SUCCEEDED))
        result = self.answers.get(request.name, OutcomeKind.SUCCEEDED)
        if result is OutcomeKind.SUCCEEDED:
            self.evicted.append((request.name, self.now))
            if "dryRun" not in request.body["deleteOptions"]:
                del self.pods[request.name]
        return Outcome(result=result)

    def bodies(self, resource: Resource) -> list[Any]:
        return [request.body for request in self.requests if request.resource is resource]


def drained(
    *pods: dict[str, Any],
    see: Mapping[str, str] = ONE,
    budget: EvictionBudget | None = None,
    delay_s: float = 30.0,
    **rules: Any,
) -> Cluster:
    cluster = Cluster(*pods)
    budget = budget or EvictionBudget(EvictionRules(**rules), 0.0)
    cluster.output = NUMANodeDrainEvictor(PREFIX, budget, delay_s, 0.0)
    cluster.see(see)
    return cluster


def test_who_is_there_goes_in_turn_after_a_while() -> None:
    cluster = drained(pod("b", "4-5"), pod("a", "", "1"), pod("c", "0-3", "0"), pod("d", "3-4"))
    assert isinstance(cluster.output, NUMANodeDrainEvictor)
    assert cluster.output.draining_count() == 1
    cluster.run(33)
    assert cluster.output.next_due_at() == 40.0, "nobody looks before the next may go"
    cluster.run(87)
    assert cluster.names == ["a", "b", "d"]
    times = [at for _, at in cluster.evicted]
    assert times[0] >= 30
    assert all(later - at >= 9 for at, later in itertools.pairwise(times))
    assert cluster.output.pending_count() == 0
    eviction, event = (cluster.bodies(of)[0] for of in (Resource.EVICTIONS, Resource.EVENTS))
    assert eviction["deleteOptions"] == {"preconditions": {"uid": "uid-a"}}
    assert event["metadata"]["name"] == "a.uid-a.drained"
    assert event["reason"] == "NUMANodeDrained"
    assert event["note"] == "evicted: NUMA node 1 of node n is drained"
    assert event["regarding"]["uid"] == "uid-a"


async def test_a_workload_leaves_a_drained_numa_node_as_a_whole(tmp_path: Path) -> None:
    """Of other evictions a workload has a number in a while; as the controller is configured."""
    section = Controller(
        credentials=str(tmp_path),
        evictions=EvictionSection(drained_numa_nodes=DrainEviction(evict=True)),
    )
    cluster = Cluster(*(pod(name, "4", workload="web") for name in "abc"))
    cluster.output = ControllerService(AgentConfig(controller=section), clock=lambda: 0.0).drained  # type: ignore[assignment]
    cluster.see(ONE)
    cluster.run(120)
    assert cluster.names == ["a", "b", "c"]


def test_a_dry_run_asks_once_and_says_so() -> None:
    cluster = drained(pod("a", "4"), dry_run=True)
    cluster.run(200)
    assert cluster.names == ["a"]
    assert "a" in cluster.pods
    (event,) = cluster.bodies(Resource.EVENTS)
    assert event["note"].startswith("would be evicted (dry run)")


@pytest.mark.parametrize("result", [OutcomeKind.BLOCKED, OutcomeKind.FORBIDDEN])
def test_a_budget_or_policy_is_asked_again_and_holds_up_nobody_else(result: OutcomeKind) -> None:
    cluster = drained(pod("a", "4"), pod("b", "5"))
    cluster.answers["a"] = result
    cluster.run(120)
    assert cluster.names == ["b"]
    assert len(cluster.bodies(Resource.EVICTIONS)) >= 3
    del cluster.answers["a"]
    cluster.run(120)
    assert cluster.names == ["b", "a"]


def test_an_event_that_may_not_be_written_is_left_out() -> None:
    cluster = drained(pod("a", "4"), pod("b", "5"))
    cluster.answers["events"] = OutcomeKind.FORBIDDEN
    cluster.run(120)
    assert cluster.names == ["a", "b"]


def test_undrained_is_left_alone() -> None:
    cluster = drained(pod("a", "4"))
    cluster.run(20)
    cluster.see(TOLD)
    cluster.run(100)
    assert cluster.requests == []
    assert cluster.output.draining_count() == 0


def test_a_list_of_nonsense_drains_nothing() -> None:
    cluster = drained(pod("a", "4"), see={**TOLD, f"{PREFIX}/drained": "all"})
    cluster.run(100)
    assert cluster.requests == []


def test_without_the_machines_cpus_memory_tells() -> None:
    """The publisher has not written them, or something else."""
    ids, cpus = f"{PREFIX}/numa-ids", f"{PREFIX}/numacpu"
    for told in ({}, {ids: "0-2", cpus: "0|1"}, {ids: "x"}):
        see = {**told, f"{PREFIX}/drained": "1"}
        cluster = drained(pod("a", "4"), pod("b", "4", "1"), see=see)
        cluster.run(100)
        assert cluster.names == ["b"]


def test_without_the_right_nothing_is_asked_for_a_minute() -> None:
    cluster = drained(pod("a", "4"))
    cluster.answers["a"] = OutcomeKind.FORBIDDEN
    cluster.run(80)
    assert len(cluster.requests) == 2


def test_who_is_gone_is_gone() -> None:
    cluster = drained(pod("a", "4"))
    cluster.answers["a"] = OutcomeKind.MISSING
    cluster.run(40)
    assert cluster.output.pending_count() == 0


def test_a_failed_look_comes_again() -> None:
    cluster = drained(pod("a", "4"), delay_s=0.0)
    request = cluster.output.next_request(0.0)
    assert request is not None
    cluster.output.on_outcome(request, Outcome(result=OutcomeKind.FAILED), 0.0, 0.0)
    assert cluster.output.next_due_at() == POD_LIST_INTERVAL_S
    cluster.output.on_node_removed("n")
    cluster.output.on_outcome(request, Outcome(result=OutcomeKind.SUCCEEDED), 0.0, 0.0)
    assert cluster.output.next_due_at() == float("inf")


@pytest.mark.parametrize("text", ["", "[]", "x", '{"a": 1}', '{"a": {"cpus": "x"}}', "[" * 50_000])
def test_an_annotation_of_nonsense_says_nothing(text: str) -> None:
    assert parse_assigned_numa_nodes(text, CPUS) == frozenset()


def test_cpus_of_the_numa_nodes_may_be_told_later() -> None:
    """A publisher that starts finds the annotation there before it tells what a node has."""
    cluster = drained(pod("web", "4-5"), see={f"{PREFIX}/drained": "1"})
    cluster.run(100)
    assert cluster.evicted == []
    cluster.see(ONE)
    cluster.run(200)
    assert [name for name, _ in cluster.evicted] == ["web"]


# --- NUMA nodes that the host takes away ----------------------------------------------------------


def topology(node: str, *factors: object) -> dict[str, Any]:
    """What a node publishes; None for a zone without the attribute."""
    made = objects.topology(*(4 for _ in factors), name=node, zone={f"{PREFIX}/shared-cpus": "4"})
    for zone, factor in zip(made["zones"], factors, strict=True):
        if factor is not None:
            zone["attributes"].append({"name": f"{PREFIX}/measured-factor", "value": factor})
    made["zones"].append({"name": "socket-0", "type": "Socket"})
    return made


class Host(Cluster):
    """The same Node, which the host takes away."""

    output: HostStealEvictor

    def __init__(
        self, *pods: dict[str, Any], most: int = 3, budget: EvictionBudget | None = None
    ) -> None:
        super().__init__(*pods)
        budget = budget or EvictionBudget(EvictionRules(max_per_workload_per_hour=most), 0.0)
        self.output = HostStealEvictor(PREFIX, budget, 60.0, 0.0, below=0.7, at_most=0.5)
        self.see(TOLD)

    def says(self, *factors: object) -> None:
        self.output.on_topology_updated("n", topology("n", *factors), self.now)


def test_pods_leave_one_by_one_when_it_stays_low() -> None:
    cluster = Host(pod("a", "0-1"), pod("b", "2"), pod("c", "4-5"))
    cluster.says("0.6", None)
    cluster.run(59)
    assert cluster.requests == []
    cluster.run(300)
    assert cluster.names == ["a", "b"], "c is on the other NUMA node"
    (_, first), (_, second) = cluster.evicted
    assert second - first >= 60
    (event, _) = cluster.bodies(Resource.EVENTS)
    assert event["reason"] == "NUMANodeStolen"
    assert event["note"] == (
        "evicted: the host takes away CPU time of NUMA node 0 of node n "
        "(measured factor 0: 0.6, limit 0.7)"
    )


def test_it_ends_when_the_factor_is_well_again_and_not_before() -> None:
    """What wavers about the limit neither ends it nor begins it again."""
    cluster = Host(*(pod(f"p{i}", "0") for i in range(9)))
    cluster.says("0.6", None)
    cluster.run(90)
    cluster.says("0.8", None)
    assert cluster.names == ["p0"]
    cluster.run(60)
    assert cluster.names == ["p0", "p1"]
    assert cluster.output.degraded_count() == 1
    cluster.says("0.9", None)
    cluster.run(300)
    assert cluster.output.degraded_count() == 0
    cluster.says("0.8", None)
    cluster.run(300)
    assert len(cluster.names) == 2


def test_a_factor_that_flaps_moves_nobody() -> None:
    cluster = Host(pod("a", "0"))
    for second in range(600):
        cluster.says("0.5" if second % 2 else "0.75", None)
        cluster.run(1)
    assert cluster.requests == []


def test_where_many_are_low_nobody_moves() -> None:
    """The measurement errs, or there is no better place."""
    cluster = Host(pod("a", "0"))
    cluster.says("0.6", "0.6")
    cluster.run(300)
    assert (cluster.requests, cluster.output.degraded_count()) == ([], 2)
    for name in ("m", "o"):
        cluster.output.on_topology_updated(name, topology(name, None, None), cluster.now)
    cluster.run(60)
    assert cluster.names == ["a"]


def test_budgets_and_the_limit_of_one_workload_hold() -> None:
    cluster = Host(
        pod("a", "0"),
        pod("b1", "0", workload="b"),
        pod("b2", "0", workload="b"),
        pod("b3", "0", workload="b"),
        most=2,
    )
    cluster.answers["a"] = OutcomeKind.BLOCKED
    cluster.says("0.6", None)
    cluster.run(1200)
    assert cluster.names == ["b1", "b2"]
    assert len(cluster.bodies(Resource.EVICTIONS)) > 3
    cluster.run(3600)
    assert cluster.names == ["b1", "b2", "b3"]


def test_all_reasons_share_a_minute_and_drains_count_for_no_workload() -> None:
    budget = EvictionBudget(EvictionRules(max_per_workload_per_hour=1), 0.0)
    drain = drained(*(pod(name, "4", workload="web") for name in "abcd"), budget=budget)
    host = Host(*(pod(name, "0", workload="web") for name in "yz"), budget=budget)
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
    cluster = Host(pod("a", "0"))
    cluster.says(factor, None)
    cluster.run(200)
    assert cluster.requests == []


@pytest.mark.parametrize(
    "zones",
    [
        "x", [1], [{"type": "Node"}], [{"type": "Node", "name": "numa0"}],
        [{"type": "Node", "name": "node-0", "attributes": [{"name": "x"}, 3]}],
    ],
)  # fmt: skip
def test_an_object_of_nonsense_says_nothing(zones: object) -> None:
    cluster = Host(pod("a", "0"))
    cluster.output.on_topology_updated("n", {"zones": zones}, 0.0)
    cluster.run(200)
    assert cluster.requests == []


def test_a_node_that_is_gone_is_forgotten() -> None:
    cluster = Host(pod("a", "0"))
    cluster.says("0.6", None)
    cluster.run(70)
    assert cluster.output.draining_count() == 1
    cluster.output.on_topology_removed("n")
    cluster.run(10)
    assert cluster.output.draining_count() == 0, "its Node is still there"
    cluster.output.on_node_removed("n")
    cluster.run(10)
    assert (cluster.output.draining_count(), cluster.output.degraded_count()) == (0, 0)
