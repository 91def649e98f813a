"""The number of exclusive CPUs in the Node's status: written when it changes, and put back."""

from __future__ import annotations

from typing import Any

from nri_numa.kube.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.publisher.outbox import LONGEST_PAUSE
from nri_numa.publisher.outputs import CapacityOutput
from tests.unit.publisher.test_outputs import World

CPU = "numa.example.com/exclusive-cpu"


class Node:
    """A Node's capacity behind the requests."""

    def __init__(self, **capacity: str) -> None:
        self.capacity: dict[str, str] = {"cpu": "4", **capacity}

    def __call__(self, request: Request) -> Outcome:
        if request.verb is Verb.PATCH:
            assert request.resource is Resource.NODE_STATUS
            self.capacity.update(request.body["status"]["capacity"])
        document: dict[str, Any] = {"metadata": {}, "status": {"capacity": dict(self.capacity)}}
        return Outcome(result=Result.DONE, documents=(document,))


def world_of(node: Node) -> tuple[World, CapacityOutput]:
    output = CapacityOutput("n1", CPU)
    return World(output, answer=node), output


def test_nothing_is_asked_before_the_agent_has_counted() -> None:
    world, output = world_of(Node())
    world.work(100)
    assert (world.server.requests, output.waiting()) == ([], 0)


def test_it_is_written_once_and_again_when_it_changes() -> None:
    node = Node()
    world, output = world_of(node)
    for count in (3, 3, 2):
        output.want(count)
        world.work()
        assert node.capacity == {"cpu": "4", CPU: str(count)}
    assert world.server.verbs() == ["get", "patch", "patch"]
    assert output.waiting() == 0


def test_what_the_kubelet_set_to_zero_is_put_back_at_the_next_look() -> None:
    node = Node()
    world, output = world_of(node)
    output.want(3)
    world.work()
    node.capacity[CPU] = "0"
    output.resync()
    world.work()
    assert node.capacity[CPU] == "3"
    output.resync()
    world.work()
    assert world.server.verbs() == ["get", "patch", "get", "patch", "get"]


def test_a_right_that_is_missing_and_a_node_that_is_not_there() -> None:
    world, output = world_of(Node())
    output.want(3)
    world.server.answer = lambda request: Outcome(result=Result.FORBIDDEN)
    world.work(LONGEST_PAUSE - 1)
    assert len(world.server.requests) == 1
    world.server.answer = lambda request: Outcome(result=Result.MISSING)
    world.work(LONGEST_PAUSE + 30)
    assert len(world.server.requests) > 2
    node = Node()
    world.server.answer = node
    world.work(LONGEST_PAUSE + 300)
    assert node.capacity[CPU] == "3"
