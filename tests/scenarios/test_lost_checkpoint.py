"""The checkpoint is lost: what runs, and what we wrote into it, is all there is to go by."""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.state import Kind
from tests.support import machines
from tests.support.world import World, container, pod, resources

OWN = {"cpus": "exclusive"}


def grown(world: World, name: str, cpus: float, annotations: dict[str, str] | None = None) -> str:
    """Place one pod with one container and return the container's id."""
    of = pod(name, annotations)
    made = container(of, wants=resources(cpus, 1))
    world.place(of, made)
    return made.id


def test_containers_we_narrowed_stay_in_the_shared_pool() -> None:
    """They carry a cpuset that we wrote, and are not taken for somebody else's pins."""
    world = World(machines.single_no_smt())
    shared = grown(world, "shared", 0.5)
    first = grown(world, "first", 1, OWN)
    assert world.live[shared].resources.cpus == "1-3"
    world.store.documents.clear()
    world.boot()
    assert world.synchronize() == ()
    second = grown(world, "second", 1, OWN)
    assert [world.live[i].resources.cpus for i in (first, second, shared)] == ["0", "1", "2-3"]


def test_a_pin_that_is_not_the_pool_is_somebody_elses() -> None:
    world = World(machines.single_no_smt())
    grown(world, "first", 1, OWN)
    of = pod("kubelet")
    world.pods[of.id] = of
    made = container(of, wants=replace(resources(1), cpus="2"))
    world.live[made.id] = made
    world.store.documents.clear()
    world.boot()
    world.synchronize()
    assert world.agent.state.allocations[made.id].kind is Kind.FOREIGN
    assert world.live[made.id].resources.cpus == "2"
