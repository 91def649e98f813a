"""Which pods are moved away from drained NUMA nodes, and how fast."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.controller.drain import LOOK, DrainOutput, DrainRules, zones_of
from nri_numa.controller.evictions import movable

PREFIX = "numa.kubernetes.io"
TOLD = {f"{PREFIX}/numa-ids": "0-1", f"{PREFIX}/numacpu": "0-3|4-7"}
ONE = {**TOLD, f"{PREFIX}/drained": "1"}
CPUS = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


def pod(name: str, cpus: str, mems: str = "", **metadata: Any) -> dict[str, Any]:
    assigned = json.dumps({"main": {"cpus": cpus, "mems": mems}})
    return {
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "annotations": {f"{PREFIX}/assigned": assigned},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "rs", "controller": True}],
            **metadata,
        },
        "status": {"phase": "Running"},
    }


class Cluster:
    """One Node with pods, whose evictions are answered as told.

    Attributes:
        answers: result of an eviction by the pod's name; done where none is told.
        evicted: names and times.
        requests: all that were made.
    """

    def __init__(self, *pods: dict[str, Any], **rules: Any) -> None:
        self.pods = {p["metadata"]["name"]: p for p in pods}
        self.now = 0.0
        self.output = DrainOutput(
            PREFIX, DrainRules(**{"after": 30.0, "per_minute": 6.0, **rules}), 0.0
        )
        self.answers: dict[str, Result] = {}
        self.evicted: list[tuple[str, float]] = []
        self.requests: list[Request] = []

    def answer(self, request: Request) -> Outcome:
        if request.verb is Verb.LIST:
            assert request.field_selector == {"spec.nodeName": "n"}
            return Outcome(result=Result.DONE, documents=tuple(self.pods.values()))
        if request.resource is Resource.EVENTS:
            return Outcome(result=self.answers.get("event", Result.DONE))
        result = self.answers.get(request.name, Result.DONE)
        if result is Result.DONE:
            self.evicted.append((request.name, self.now))
            if "dryRun" not in request.body["deleteOptions"]:
                del self.pods[request.name]
        return Outcome(result=result)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.output.tell_time(1_795_000_000.0 + self.now)
            while (request := self.output.due(self.now)) is not None:
                assert self.output.next_due() <= self.now
                self.requests.append(request)
                self.output.done(request, self.answer(request), self.now, 0.5)
            self.now += 1

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.evicted]


def test_who_is_there_goes_in_turn_after_a_while() -> None:
    cluster = Cluster(pod("b", "4-5"), pod("a", "", "1"), pod("c", "0-3", "0"), pod("d", "3-4"))
    cluster.output.see("n", ONE, 0.0)
    assert cluster.output.emptied() == 1
    cluster.run(120)
    assert cluster.names == ["a", "b", "d"]
    times = [at for _, at in cluster.evicted]
    assert times[0] >= 30
    assert all(later - at >= 9 for at, later in itertools.pairwise(times))
    assert cluster.output.waiting() == 0


def test_each_gets_an_event_that_says_why() -> None:
    cluster = Cluster(pod("a", "4"))
    cluster.output.see("n", ONE, 0.0)
    cluster.run(60)
    (event,) = [r.body for r in cluster.requests if r.resource is Resource.EVENTS]
    assert event["reason"] == "NUMANodeDrained"
    assert event["note"] == "evicted: NUMA node 1 of node n is drained"
    assert event["regarding"]["uid"] == "uid-a"


def test_an_eviction_names_the_pod_by_its_uid() -> None:
    cluster = Cluster(pod("a", "4"))
    cluster.output.see("n", ONE, 0.0)
    cluster.run(60)
    (eviction,) = [r.body for r in cluster.requests if r.resource is Resource.EVICTIONS]
    assert eviction["deleteOptions"] == {"preconditions": {"uid": "uid-a"}}


def test_a_dry_run_asks_once_and_says_so() -> None:
    cluster = Cluster(pod("a", "4"), dry_run=True)
    cluster.output.see("n", ONE, 0.0)
    cluster.run(200)
    assert cluster.names == ["a"]
    assert "a" in cluster.pods
    (event,) = [r.body for r in cluster.requests if r.resource is Resource.EVENTS]
    assert event["note"].startswith("would be evicted (dry run)")


def test_a_budget_is_asked_again_and_holds_up_nobody_else() -> None:
    cluster = Cluster(pod("a", "4"), pod("b", "5"))
    cluster.answers["a"] = Result.BLOCKED
    cluster.output.see("n", ONE, 0.0)
    cluster.run(120)
    assert cluster.names == ["b"]
    assert cluster.output.blocked >= 2
    del cluster.answers["a"]
    cluster.run(120)
    assert cluster.names == ["b", "a"]


def test_undrained_is_left_alone() -> None:
    cluster = Cluster(pod("a", "4"))
    cluster.output.see("n", ONE, 0.0)
    cluster.run(20)
    cluster.output.see("n", TOLD, 20.0)
    cluster.run(100)
    assert cluster.requests == []
    assert cluster.output.emptied() == 0


def test_a_list_of_nonsense_drains_nothing() -> None:
    cluster = Cluster(pod("a", "4"))
    cluster.output.see("n", {**TOLD, f"{PREFIX}/drained": "all"}, 0.0)
    cluster.run(100)
    assert cluster.requests == []


def test_without_the_machines_cpus_memory_tells() -> None:
    """The publisher has not written them, or something else."""
    ids, cpus = f"{PREFIX}/numa-ids", f"{PREFIX}/numacpu"
    for told in ({}, {ids: "0-2", cpus: "0|1"}, {ids: "x"}):
        cluster = Cluster(pod("a", "4"), pod("b", "4", "1"))
        cluster.output.see("n", {**told, f"{PREFIX}/drained": "1"}, 0.0)
        cluster.run(100)
        assert cluster.names == ["b"]


def test_without_the_right_nothing_is_asked_for_a_minute() -> None:
    cluster = Cluster(pod("a", "4"))
    cluster.answers["a"] = Result.FORBIDDEN
    cluster.output.see("n", ONE, 0.0)
    cluster.run(80)
    assert len(cluster.requests) == 2


def test_who_is_gone_is_gone() -> None:
    cluster = Cluster(pod("a", "4"))
    cluster.answers["a"] = Result.MISSING
    cluster.output.see("n", ONE, 0.0)
    cluster.run(40)
    assert cluster.output.waiting() == 0


def test_a_failed_look_comes_again() -> None:
    cluster = Cluster(pod("a", "4"), after=0.0)
    cluster.output.see("n", ONE, 0.0)
    request = cluster.output.due(0.0)
    assert request is not None
    cluster.output.done(request, Outcome(result=Result.FAILED), 0.0, 0.0)
    assert cluster.output.next_due() == LOOK
    cluster.output.gone("n")
    cluster.output.done(request, Outcome(result=Result.DONE), 0.0, 0.0)
    assert cluster.output.next_due() == float("inf")


@pytest.mark.parametrize(
    "change",
    [
        {"ownerReferences": []},
        {"ownerReferences": [{"kind": "ReplicaSet", "name": "rs"}]},
        {"ownerReferences": [{"kind": "DaemonSet", "name": "ds", "controller": True}]},
        {"ownerReferences": [{"kind": "Node", "name": "n", "controller": True}]},
        {"deletionTimestamp": "2026-11-22T15:00:00Z"},
        {"annotations": {"kubernetes.io/config.mirror": "x"}},
        {"namespace": "kube-system"},
    ],
)
def test_who_does_not_come_back_elsewhere_stays(change: dict[str, Any]) -> None:
    assert movable(pod("a", "4"))
    assert not movable(pod("a", "4", **change))


def test_finished_pods_stay() -> None:
    assert not movable({**pod("a", "4"), "status": {"phase": "Succeeded"}})


@pytest.mark.parametrize("text", ["", "[]", "x", '{"a": 1}', '{"a": {"cpus": "x"}}', "[" * 50_000])
def test_an_annotation_of_nonsense_says_nothing(text: str) -> None:
    assert zones_of(text, CPUS) == frozenset()


def test_cpus_of_the_numa_nodes_may_be_told_later() -> None:
    """A publisher that starts finds the annotation there before it tells what a node has."""
    cluster = Cluster(pod("web", "4-5"))
    cluster.output.see("n", {f"{PREFIX}/drained": "1"}, 0.0)
    cluster.run(100)
    assert cluster.evicted == []
    cluster.output.see("n", ONE, cluster.now)
    cluster.run(200)
    assert [name for name, _ in cluster.evicted] == ["web"]
