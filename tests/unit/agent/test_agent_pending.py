"""Updates that no reply could carry wait, and are not lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from nri_numa.machine.synthetic import synthetic
from nri_numa.model.workload import QoSClass
from tests.beds.world import World, container, pod, resources


def node() -> World:
    """An unbound container beside an owner whose removal has no reply to widen the former."""
    world = World(synthetic(sockets=1, numa_per_socket=1, cores_per_numa=4, threads=1))
    world.synchronize()
    world.place(pod("free", qos=QoSClass.BEST_EFFORT))
    own = pod("owner", {"cpus": "exclusive"})
    world.place(own, container(own, wants=resources(2)))
    assert world.has("free-app")[0] == "2-3"
    del world.live["owner-app"]
    world.agent.remove_container("owner-app")
    assert world.has("free-app")[0] == "0-3"
    return world


def test_a_container_that_replaced_another_leaves_nothing_of_it_behind() -> None:
    """The runtime reports the end of the first one only after the second was made."""
    world = node()
    again = pod("again", {"numacpu": "1"})
    world.place(again, container(again, id="first"))
    made = replace(container(again, id="second"), cgroups_path="/pods/second")
    world.place(again, made)
    assert "first" not in world.agent.places, "from then on it is looked at by nobody"
    world.stop("first")
    assert "first" not in world.agent.places
    assert world.agent.places["second"].cgroups_path == "/pods/second"
    assert world.agent.grounds_of("first") is None


CHANGES: dict[str, Callable[[World], object]] = {
    "placed": lambda world: world.place(pod("more", {"numacpu": "1"})),
    "ended": lambda world: world.stop("free-app"),
    "refused": lambda world: world.refuse(pod("wrong", {"numacpu": "63"})),
    "settings": lambda world: world.agent.retopology(world.agent.machine),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_shows_the_node_is_told_of_every_change(change: str) -> None:
    world = node()
    told: list[str] = []
    stop = world.agent.subscribe(lambda: told.append(change))
    CHANGES[change](world)
    assert told
    stop()
    told.clear()
    world.place(pod("unseen"))
    assert told == []
