"""Who asked to hear of changes hears of each, and what the agent counts of them is counted once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Resized
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import ContainerUpdate, QoSClass, Resources
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


def test_who_asks_for_cpus_of_an_owner_is_told_whose_they_are(world: World) -> None:
    """Somebody sets the cpuset of a container that nobody pinned."""
    own(world)
    made = world.live["free-app"]
    outcome = world.agent.update_container(world.pods[made.pod_id], made, Resources(cpus="1-3"))
    assert isinstance(outcome, Resized)
    assert outcome.trace.steps == (
        "CPUs 2-7, which everybody shares, instead of 1-3: CPU 1 is exclusive to others",
    )
