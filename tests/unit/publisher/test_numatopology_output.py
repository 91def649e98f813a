"""Volcano's object: when it is written, and what stands in the way."""

from __future__ import annotations

from typing import Any

from nri_numa.kube.requests import Form, Outcome, Result
from nri_numa.publisher.numatopology import NumatopologyOutput
from nri_numa.publisher.outbox import SLOWLY
from tests.unit.publisher.test_outputs import World
from tests.unit.publisher.test_topology_output import Cluster


def spec(free: str = "0-3") -> dict[str, Any]:
    return {
        "policies": {"CPUManagerPolicy": "static", "TopologyManagerPolicy": "none"},
        "numares": {"cpu": {"allocatable": free, "capacity": 4}},
    }


def world_of() -> tuple[World, NumatopologyOutput, Cluster]:
    output, cluster = NumatopologyOutput("n1"), Cluster()
    return World(output, answer=cluster), output, cluster


def test_it_is_written_when_it_changes_and_belongs_to_the_node() -> None:
    world, output, cluster = world_of()
    output.want(None)  # an agent that never said anything
    world.work(100)
    assert world.server.requests == []
    for free in ("0-3", "0-3", "0-1"):
        output.want(spec(free))
        world.later(60)
        assert output.waiting() == 0
    assert world.server.verbs() == ["get", "patch", "patch"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    assert cluster.metadata["name"] == world.server.requests[-1].name == "n1"
    assert cluster.owner == owner
    assert {(one.form, one.force) for one in world.server.requests[1:]} == {(Form.APPLY, False)}
    assert cluster.there["spec"]["numares"]["cpu"]["allocatable"] == "0-1"
    output.want(None)
    world.later(60)
    assert cluster.there["spec"]["numares"]["cpu"]["allocatable"] == ""
    cluster.node_uid = "node-2"
    output.resync()
    world.later(60)
    assert cluster.owner["uid"] == "node-2"


def test_what_stands_in_the_way_is_said_and_tried_again_slowly() -> None:
    world, output, cluster = world_of()
    output.want(spec())
    for answer, text, said in (
        (Result.UNKNOWN, "no such kind", "no such kind; Volcano brings its definition"),
        (Result.CONFLICT, 'conflict with "exporter": .spec', "its fields belong to exporter; stop"),
        (Result.CONFLICT, "conflict", "its fields belong to another field manager; stop"),
        (Result.INVALID, "no such field", "no such field; is its definition another one?"),
    ):
        cluster.forced = Outcome(result=answer, text=text)
        world.later(2 * SLOWLY)
        assert output.problem.startswith(said), answer
        assert output.waiting() == 1
    cluster.forced = None
    world.later(2 * SLOWLY)
    assert (output.problem, output.waiting()) == ("", 0)
