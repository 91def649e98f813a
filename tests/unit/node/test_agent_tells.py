"""Who asked to hear of changes hears of each, and what the agent counts of them is counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nri_numa.engine.values.answers import ContainerUpdate
from nri_numa.engine.values.workload import QoSClass, Resources
from nri_numa.machine.cpuset import CPUSet
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


def reserved(world: World, cpus: str) -> tuple[ContainerUpdate, ...]:
    """Other CPUs are reserved, which leave the shared pool."""
    settings = replace(world.settings, reserved_cpus=CPUSet.parse(cpus), strict_reserved=True)
    return world.agent.retopology(replace(world.agent.machine, settings=settings))


def test_every_change_is_told(world: World) -> None:
    heard: list[str] = []
    silent = world.agent.subscribe(lambda: heard.append(""))

    def tells() -> bool:
        told = bool(heard)
        heard.clear()
        return told

    own(world)
    assert tells()
    of = pod("big", {"cpus": "exclusive"})
    world.refuse(of, container(of, wants=resources(99)))
    assert tells()
    world.stop("owner-app")
    assert tells()
    world.apply(reserved(world, "0"))
    assert tells()
    silent()
    own(world, "another")
    assert not tells()


def test_what_other_settings_change_waits_until_it_was_sent(world: World) -> None:
    """Whoever sends these updates may fail, and then they ride on a reply."""
    updates = reserved(world, "0-1")
    assert [(one.container_id, one.cpus) for one in updates] == [("free-app", "2-7")]
    assert world.agent.is_pending("free-app")
    assert world.agent.take_pending() == updates


def test_an_update_without_cpus_overtakes_nothing(world: World) -> None:
    own(world)
    world.apply(world.agent.take_pending())
    world.agent.overtaken([ContainerUpdate("free-app", cpu_quota=1000)])
    assert not world.agent.has_pending
    world.agent.overtaken([ContainerUpdate("gone", cpus="0")])
    assert not world.agent.has_pending
    world.agent.overtaken([ContainerUpdate("free-app", cpus="0")])
    assert world.agent.is_pending("free-app")


def test_what_is_meant_for_somebody_who_is_gone_or_set_otherwise_is_overtaken(
    world: World,
) -> None:
    own(world)
    pool = world.has("free-app")[0]
    assert not world.agent.is_overtaken(ContainerUpdate("free-app", cpus=pool))
    assert not world.agent.is_overtaken(ContainerUpdate("free-app", mems="0"))
    assert world.agent.is_overtaken(ContainerUpdate("free-app", cpus="0-7"))
    assert world.agent.is_overtaken(ContainerUpdate("gone", cpus=pool))
    of = pod("foreign")
    world.place(of, container(of, wants=Resources(cpus="7")))
    assert world.agent.is_overtaken(ContainerUpdate("foreign-app", cpus="7"))
