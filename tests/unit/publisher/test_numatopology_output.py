"""Volcano's object: when it is written, and what stands in the way."""

from __future__ import annotations

from typing import Any

from nri_numa.kube.requests import ContentType, Outcome, OutcomeKind
from nri_numa.publisher.numatopology import NumatopologyOutput
from nri_numa.publisher.outbox import BLOCKED_RETRY_S
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
    output.set_desired(None)  # an agent that never said anything
    world.work(100)
    assert world.server.requests == []
    for free in ("0-3", "0-3", "0-1"):
        output.set_desired(spec(free))
        world.later(60)
        assert output.pending_count() == 0
    assert world.server.verbs() == ["get", "patch", "patch"]
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    assert cluster.metadata["name"] == world.server.requests[-1].name == "n1"
    assert cluster.owner == owner
    assert {(one.form, one.force) for one in world.server.requests[1:]} == {
        (ContentType.APPLY, False)
    }
    assert cluster.there["spec"]["numares"]["cpu"]["allocatable"] == "0-1"
    output.set_desired(None)
    world.later(60)
    assert cluster.there["spec"]["numares"]["cpu"]["allocatable"] == ""
    cluster.node_uid = "node-2"
    output.schedule_resync()
    world.later(60)
    assert cluster.owner["uid"] == "node-2"


def test_what_stands_in_the_way_is_said_and_tried_again_slowly() -> None:
    world, output, cluster = world_of()
    output.set_desired(spec())
    for answer, text, said in (
        (OutcomeKind.UNKNOWN, "no such kind", "no such kind; Volcano brings its definition"),
        (
            OutcomeKind.CONFLICT,
            'conflict with "exporter": .spec',
            "its fields belong to exporter; stop",
        ),
        (OutcomeKind.CONFLICT, "conflict", "its fields belong to another field manager; stop"),
        (OutcomeKind.INVALID, "no such field", "no such field; is its definition another one?"),
    ):
        cluster.forced = Outcome(result=answer, text=text)
        world.later(2 * BLOCKED_RETRY_S)
        assert output.problem.startswith(said), answer
        assert output.pending_count() == 1
    cluster.forced = None
    world.later(2 * BLOCKED_RETRY_S)
    assert (output.problem, output.pending_count()) == ("", 0)
