"""What happened to containers is noted for whoever looks from outside the node."""

from __future__ import annotations

import pytest

from nri_numa.machine.synthetic import synthetic
from nri_numa.model.workload import QoSClass
from tests.beds.world import World, container, pod

SMALL = synthetic(sockets=1, numa_per_socket=2, cores_per_numa=2, threads=1)


@pytest.fixture
def world() -> World:
    made = World(SMALL)
    made.synchronize()
    return made


def noted(world: World) -> list[tuple[str, str, str, int]]:
    return [(n.what, n.reason, n.pod, n.count) for n in world.agent.notices.after()]


def test_what_went_as_asked_is_nobodys_news(world: World) -> None:
    world.put("plain")
    world.put("listed", {"numacpu": "1"})
    assert noted(world) == []


def test_a_refusal_is_noted_once_however_often_the_kubelet_asks(world: World) -> None:
    for attempt in range(3):
        of = pod("web", {"numacpu": "63"})
        refused = world.refuse(of, container(of, id=f"attempt-{attempt}"))
    assert noted(world) == [("refused", refused.reason, "web", 3)]
    assert world.agent.refused == 3
    (notice,) = world.agent.notices.after()
    assert notice.message == refused.message
    assert (notice.pod_uid, notice.container) == ("uid-web", "app")


def test_wider_than_ideal_is_noted(world: World) -> None:
    world.put("first", {"numacpu": "0,2"}, 2)
    world.put("wide", {"policy": "best-effort"}, 2, 1)
    assert noted(world) == [("widened", "", "wide", 1)]


def test_not_pinned_is_noted(world: World) -> None:
    world.put("loose", {"policy": "single-numa-node", "on-failure": "unpinned"}, 3, 1)
    assert noted(world) == [("unpinned", "", "loose", 1)]


def test_a_container_that_started_without_us_is_noted_when_it_is_placed() -> None:
    world = World(SMALL)
    world.meet(pod("early", {"numacpu": "1"}, qos=QoSClass.BURSTABLE))
    world.synchronize()
    assert noted(world) == [("gap", "", "early", 1)]
    assert "started while the agent could not place it" in world.agent.notices.after()[0].message


def test_observing_notes_nothing_because_nothing_happens() -> None:
    world = World(SMALL, observe=True)
    world.synchronize()
    of = pod("web", {"numacpu": "63"})
    world.create(of, container(of))
    assert world.agent.refusals
    assert noted(world) == []
