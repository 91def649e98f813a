"""Which patches follow from what is said of many Nodes."""

from __future__ import annotations

import json

import pytest

from nri_numa.controller.capacity import CapacityOutput, Measurement, Rules, UnknownNode
from nri_numa.kube.requests import Outcome, Request, Result
from nri_numa.model.offline_capacity import BadCapacity

WALL = 1_795_000_000.0
KEY, IDS = "numa.kubernetes.io/offline-capacity", "numa.kubernetes.io/numa-ids"


class Cluster:
    """Nodes that are patched once a second."""

    def __init__(self, **nodes: str) -> None:
        self.output = CapacityOutput("numa.kubernetes.io", Rules(validity=60.0))
        self.now = 0.0
        self.requests: list[Request] = []
        self.result = Result.DONE
        for name, ids in nodes.items():
            self.see(name, {IDS: ids} if ids else {})

    def see(self, name: str, annotations: dict[str, str]) -> None:
        self.output.node(name, {"metadata": {"annotations": annotations}}, self.now)

    def second(self, count: int = 1) -> None:
        for _ in range(count):
            self.output.tick(self.now, WALL + self.now)
            while (request := self.output.due(self.now)) is not None:
                self.requests.append(request)
                self.output.done(request, Outcome(result=self.result), self.now, 0.5)
            self.now += 1

    def offer(self, node: str, **zones: float) -> str:
        given = {int(name[1:]): factor for name, factor in zones.items()}
        return self.output.report("put", Measurement(node, given), self.now)

    def texts(self) -> list[tuple[str, str | None]]:
        return [(r.name, r.body["metadata"]["annotations"][KEY]) for r in self.requests]


def test_one_patch_for_each_node_that_has_less_and_then_quiet() -> None:
    cluster = Cluster(a="0-1", b="0-1", c="0-1")
    assert cluster.offer("b", n0=0.5) == ""
    assert cluster.offer("a", n1=0) == ""
    assert cluster.offer("c", n1=1) == ""
    cluster.second(20)
    assert [name for name, _ in cluster.texts()] == ["a", "b"]
    text = cluster.texts()[1][1]
    assert text is not None
    assert json.loads(text) == {
        "zones": {"0": 0.5}, "until": "2026-11-18T11:07:40Z", "source": "put"
    }  # fmt: skip
    assert cluster.output.waiting() == 0


def test_when_the_time_is_over_the_annotation_goes() -> None:
    cluster = Cluster(a="0")
    cluster.offer("a", n0=0.5)
    cluster.second(70)
    assert [text is None for _, text in cluster.texts()] == [False, True]
    cluster.see("a", {IDS: "0"})
    cluster.second(10)
    assert len(cluster.requests) == 2


def test_an_annotation_that_nobody_can_read_goes() -> None:
    cluster = Cluster()
    cluster.see("a", {KEY: "nonsense"})
    cluster.second()
    assert cluster.texts() == [("a", None)]


def test_what_somebody_removed_is_written_again() -> None:
    cluster = Cluster(a="0")
    cluster.offer("a", n0=0.5)
    cluster.second()
    cluster.see("a", {IDS: "0"})
    cluster.second()
    assert len(cluster.requests) == 2


def test_unknown_nodes_and_numa_nodes_are_refused_with_what_there_is() -> None:
    cluster = Cluster(a="0-1,4", old="", odd="x")
    with pytest.raises(UnknownNode, match="there is no Node 'z'"):
        cluster.offer("z", n0=1)
    with pytest.raises(BadCapacity, match="Node a has no NUMA node 2-3; it has 0-1,4"):
        cluster.offer("a", n2=1, n3=1)
    assert "does not publish its NUMA nodes" in cluster.offer("old", n0=0.5)
    assert "does not publish its NUMA nodes" in cluster.offer("odd", n0=0.5)


def test_a_node_that_is_gone_is_forgotten() -> None:
    cluster = Cluster(a="0", b="0")
    cluster.offer("a", n0=0.5)
    cluster.output.node_removed("a")
    cluster.second(5)
    assert cluster.requests == []
    cluster.offer("b", n0=0.5)
    cluster.result = Result.MISSING
    cluster.second(5)
    assert len(cluster.requests) == 1
    assert cluster.output.nodes() == frozenset()


def test_failures_are_tried_again_ever_more_seldom() -> None:
    cluster = Cluster(a="0")
    cluster.offer("a", n0=0.5)
    cluster.result = Result.FAILED
    cluster.second(30)
    assert 4 <= len(cluster.requests) <= 8
    cluster.result = Result.DONE
    cluster.second(30)
    assert cluster.texts()[-1][0] == "a"


def test_without_the_right_everybody_waits() -> None:
    cluster = Cluster(a="0", b="0")
    cluster.offer("a", n0=0.5)
    cluster.offer("b", n0=0.5)
    cluster.result = Result.FORBIDDEN
    cluster.second(30)
    assert len(cluster.requests) == 1
    assert cluster.output.next_due() == 60.0


def test_what_holds_can_be_asked() -> None:
    cluster = Cluster(a="0")
    assert cluster.output.current("a", 0.0) is None
    cluster.offer("a", n0=0.25)
    current = cluster.output.current("a", 1.0)
    assert current is not None
    assert current.zones == {0: 0.25}
    cluster.output.withdraw("put", "a")
    cluster.output.withdraw("put", "b")
    assert cluster.output.current("a", 1.0) is None
