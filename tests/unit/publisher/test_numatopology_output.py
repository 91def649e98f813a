"""Volcano's object: when it is written, and what stands in the way."""

from __future__ import annotations

from typing import Any

from nri_numa.kube.requests import Form, Outcome, Request, Resource, Result
from nri_numa.publisher.numatopology import NumatopologyOutput
from nri_numa.publisher.outbox import LONGEST_PAUSE, SLOWLY
from tests.unit.publisher.test_outputs import World


class Server:
    """Node and object behind the requests."""

    def __init__(self) -> None:
        self.there: dict[str, Any] | None = None
        self.node: str | None = "node-1"
        self.answer: Result | None = None
        self.text = "no"

    def __call__(self, request: Request) -> Outcome:
        if request.resource is Resource.NODES:
            if self.node is None:
                return Outcome(result=Result.MISSING)
            return Outcome(result=Result.DONE, documents=({"metadata": {"uid": self.node}},))
        if self.answer is not None:
            return Outcome(result=self.answer, text=self.text)
        assert (request.form, request.name, request.force) == (Form.APPLY, "n1", False)
        self.there = request.body
        return Outcome(result=Result.DONE, documents=({"metadata": {}},))


def spec(free: str = "0-3") -> dict[str, Any]:
    return {
        "policies": {"CPUManagerPolicy": "static", "TopologyManagerPolicy": "none"},
        "numares": {"cpu": {"allocatable": free, "capacity": 4}},
    }


def world_of(server: Server) -> tuple[World, NumatopologyOutput]:
    output = NumatopologyOutput("n1")
    world = World(output)
    world.server.answer = server
    return world, output


def test_it_is_written_when_it_changes_and_belongs_to_the_node() -> None:
    server = Server()
    world, output = world_of(server)
    output.want(None)  # an agent that never said anything
    world.work(100)
    assert world.server.requests == []
    for free in ("0-3", "0-3", "0-1"):
        output.want(spec(free))
        world.work(world.now + 60)
        assert output.waiting() == 0
    assert world.server.verbs() == ["get", "patch", "patch"]
    assert server.there is not None
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "node-1"}
    assert server.there["metadata"] == {"name": "n1", "ownerReferences": [owner]}
    assert server.there["spec"]["numares"]["cpu"]["allocatable"] == "0-1"
    output.want(None)
    world.work(world.now + 60)
    assert server.there["spec"]["numares"]["cpu"]["allocatable"] == ""
    server.node = "node-2"
    output.resync()
    world.work(world.now + 60)
    assert server.there["metadata"]["ownerReferences"][0]["uid"] == "node-2"


def test_it_waits_for_its_node() -> None:
    server = Server()
    server.node = None
    world, output = world_of(server)
    output.want(spec())
    world.work(20)
    assert server.there is None
    server.node = "node-1"
    world.work(200)
    assert server.there is not None


def test_what_stands_in_the_way_is_said_and_tried_again_slowly() -> None:
    server = Server()
    world, output = world_of(server)
    output.want(spec())
    for answer, text, said in (
        (Result.UNKNOWN, "no such kind", "no such kind; Volcano brings its definition"),
        (Result.CONFLICT, 'conflict with "exporter": .spec', "its fields belong to exporter; stop"),
        (Result.CONFLICT, "conflict", "its fields belong to somebody; stop"),
        (Result.INVALID, "no such field", "no such field; is its definition another one?"),
    ):
        server.answer, server.text = answer, text
        world.work(world.now + 2 * SLOWLY)
        assert output.problem.startswith(said), answer
        assert output.waiting() == 1
    server.answer = Result.FORBIDDEN
    before = len(world.server.requests)
    world.work(world.now + 3 * LONGEST_PAUSE + 2 * SLOWLY)
    assert 1 <= len(world.server.requests) - before < 20
    server.answer = Result.FAILED
    world.work(world.now + 60)
    server.answer = None
    world.work(world.now + 2 * SLOWLY)
    assert (output.problem, output.waiting()) == ("", 0)
