"""NUMA nodes that the host takes away: when pods leave them, and when nobody does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.controller.evictions import Ledger
from nri_numa.controller.steal import StealOutput, StealRules

PREFIX = "numa.kubernetes.io"
TOLD = {f"{PREFIX}/numa-ids": "0-1", f"{PREFIX}/numacpu": "0-3|4-7"}


def topology(node: str, *factors: object) -> dict[str, Any]:
    """What a node publishes; None for a zone without the attribute."""
    return {
        "metadata": {"name": node},
        "zones": [
            {
                "name": f"node-{i}",
                "type": "Node",
                "attributes": [{"name": f"{PREFIX}/shared-cpus", "value": "4"}]
                + ([] if f is None else [{"name": f"{PREFIX}/measured-factor", "value": f}]),
            }
            for i, f in enumerate(factors)
        ]
        + [{"name": "socket-0", "type": "Socket"}],
    }


def pod(name: str, cpus: str, workload: str = "") -> dict[str, Any]:
    owner = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": "rs",
        "uid": workload or f"rs-{name}",
        "controller": True,
    }
    assigned = json.dumps({"main": {"cpus": cpus, "mems": ""}})
    return {
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "annotations": {f"{PREFIX}/assigned": assigned},
            "ownerReferences": [owner],
        },
        "status": {"phase": "Running"},
    }


class Cluster:
    """Pods of one node, and evictions that are answered as told.

    Attributes:
        evicted: names and times.
        requests: all that were made.
    """

    def __init__(self, *pods: dict[str, Any], most: int = 3, **rules: Any) -> None:
        self.pods = {p["metadata"]["name"]: p for p in pods}
        self.now = 0.0
        settled: dict[str, Any] = {
            "below": 0.7, "well": 0.9, "after": 60.0, "at_most": 0.5, "per_minute": 1.0,
        }  # fmt: skip
        self.output = StealOutput(
            PREFIX, StealRules(**{**settled, **rules}), Ledger(most, 3600.0), 0.0
        )
        self.answers: dict[str, Result] = {}
        self.evicted: list[tuple[str, float]] = []
        self.requests: list[Request] = []
        self.output.see("n", TOLD, 0.0)

    def says(self, *factors: object) -> None:
        self.output.topology(topology("n", *factors))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.output.tick(self.now, 1_795_000_000.0 + self.now)
            while (request := self.output.due(self.now)) is not None:
                assert self.output.next_due() <= self.now
                self.requests.append(request)
                self.output.done(request, self._answer(request), self.now, 0.5)
            self.now += 1

    def _answer(self, request: Request) -> Outcome:
        if request.verb is Verb.LIST:
            return Outcome(result=Result.DONE, documents=tuple(self.pods.values()))
        if request.resource is Resource.EVENTS:
            return Outcome(result=Result.DONE)
        result = self.answers.get(request.name, Result.DONE)
        if result is Result.DONE:
            self.evicted.append((request.name, self.now))
            del self.pods[request.name]
        return Outcome(result=result)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.evicted]


def test_pods_leave_one_by_one_when_it_stays_low() -> None:
    cluster = Cluster(pod("a", "0-1"), pod("b", "2"), pod("c", "4-5"))
    cluster.says("0.6", None)
    cluster.run(59)
    assert cluster.requests == []
    cluster.run(300)
    assert cluster.names == ["a", "b"], "c is on the other NUMA node"
    (_, first), (_, second) = cluster.evicted
    assert second - first >= 60
    (event, _) = [r.body for r in cluster.requests if r.resource is Resource.EVENTS]
    assert event["reason"] == "NUMANodeStolen"
    assert event["note"] == (
        "evicted: the host takes away CPU time of NUMA node 0 of node n "
        "(measured factor 0: 0.6, limit 0.7)"
    )


def test_it_ends_when_the_factor_is_well_again_and_not_before() -> None:
    """What wavers about the limit neither ends it nor begins it again."""
    cluster = Cluster(*(pod(f"p{i}", "0") for i in range(9)))
    cluster.says("0.6", None)
    cluster.run(90)
    cluster.says("0.8", None)
    assert cluster.names == ["p0"]
    cluster.run(60)
    assert cluster.names == ["p0", "p1"]
    assert cluster.output.poor() == 1
    cluster.says("0.9", None)
    cluster.run(300)
    assert cluster.output.poor() == 0
    cluster.says("0.8", None)
    cluster.run(300)
    assert len(cluster.names) == 2


def test_a_factor_that_flaps_moves_nobody() -> None:
    cluster = Cluster(pod("a", "0"))
    for second in range(600):
        cluster.says("0.5" if second % 2 else "0.75", None)
        cluster.run(1)
    assert cluster.requests == []


def test_where_many_are_low_nobody_moves() -> None:
    """The measurement errs, or there is no better place."""
    cluster = Cluster(pod("a", "0"))
    cluster.says("0.6", "0.6")
    cluster.run(300)
    assert (cluster.requests, cluster.output.poor()) == ([], 2)
    for name in ("m", "o"):
        cluster.output.topology(topology(name, None, None))
    cluster.run(60)
    assert cluster.names == ["a"]


def test_budgets_and_the_limit_of_one_workload_hold() -> None:
    cluster = Cluster(
        pod("a", "0"), pod("b1", "0", "b"), pod("b2", "0", "b"), pod("b3", "0", "b"), most=2
    )
    cluster.answers["a"] = Result.BLOCKED
    cluster.says("0.6", None)
    cluster.run(1200)
    assert cluster.names == ["b1", "b2"]
    assert cluster.output.blocked > 1


@pytest.mark.parametrize(
    "factor", ["NaN", "-1", "1.5", "inf", "", "x", "0" * 99, 0.5, None, [], {"a": 1}]
)
def test_nonsense_is_a_whole_factor(factor: object) -> None:
    cluster = Cluster(pod("a", "0"))
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
    cluster = Cluster(pod("a", "0"))
    cluster.output.topology({"metadata": {"name": "n"}, "zones": zones})
    cluster.run(200)
    assert cluster.requests == []


def test_a_node_that_is_gone_is_forgotten() -> None:
    cluster = Cluster(pod("a", "0"))
    cluster.says("0.6", None)
    cluster.run(70)
    assert cluster.output.emptied() == 1
    assert cluster.output.nodes == {"n"}
    cluster.output.topology_gone("n")
    cluster.output.gone("n")
    cluster.run(10)
    assert (cluster.output.emptied(), cluster.output.poor()) == (0, 0)
