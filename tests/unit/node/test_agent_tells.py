"""Who asked to hear of changes hears of each, and what the agent counts of them is counted once."""

from __future__ import annotations

import pytest

from nri_numa.engine.values.answers import ContainerUpdate
from nri_numa.engine.values.workload import QoSClass
from nri_numa.machine.synthetic import synthetic
from tests.beds.world import World, container, pod, resources


@pytest.fixture(name="world")
def _world() -> World:
    world = World(synthetic(sockets=1, numa_per_socket=2, cores_per_numa=4, threads=1))
    world.synchronize()
    world.place(pod("free", qos=QoSClass.BEST_EFFORT))
    return world


def own(world: World, name: str = "owner") -> None:
    of = pod(name, {"cpus": "exclusive"})
    world.place(of, container(of, wants=resources(2, 1)))


def test_an_update_without_cpus_overtakes_nothing(world: World) -> None:
    own(world)
    world.apply(world.agent.take_pending())
    world.agent.overtaken([ContainerUpdate("free-app", cpu_quota=1000)])
    assert not world.agent.has_pending
    world.agent.overtaken([ContainerUpdate("gone", cpus="0")])
    assert not world.agent.has_pending
    world.agent.overtaken([ContainerUpdate("free-app", cpus="0")])
    assert world.agent.is_pending("free-app")
