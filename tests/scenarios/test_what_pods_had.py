"""What was chosen for a pod outlives the agent: its later containers find it after a restart."""

from __future__ import annotations

from nri_numa.engine.decision import Reading
from nri_numa.machine.synthetic import synthetic
from tests.beds.world import GIB, World, container, pod, resources

OWN = {"cpus": "exclusive"}


def node() -> World:
    """Two NUMA nodes of eight CPUs without hyperthreads."""
    world = World(
        synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=64)
    )
    world.synchronize()
    return world


def restarted(world: World) -> None:
    """The agent comes back with its checkpoint."""
    world.restart()


def test_a_container_that_comes_back_after_a_restart_of_the_agent_has_its_cpus() -> None:
    """Not those that are first by then."""
    world = node()
    world.put("first", OWN, 2, 1)
    of = pod("web", OWN)
    world.place(of, container(of, wants=resources(2, 1), id="attempt-0"))
    assert world.has("attempt-0")[0] == "2-3"
    world.stop("first-app")
    world.stop("attempt-0")
    restarted(world)
    world.place(of, container(of, wants=resources(2, 1), id="attempt-1"))
    assert world.has("attempt-1")[0] == "2-3"
    world.check()


def test_the_next_container_of_a_pod_gets_what_the_one_before_it_had_where_memory_has_changed() -> (
    None
):
    """What an init container read lies in the page cache beside its CPUs: less is free there."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node"})
    world.reading = Reading(memory={0: 31 * GIB, 1: 30 * GIB})
    assert world.add(of, "init", 2, 1) == ("0-1", "0")
    world.stop("web-init")
    world.reading = Reading(memory={0: 20 * GIB, 1: 30 * GIB})
    assert world.add(of, "app", 2, 1) == ("0-1", "0")
    assert world.put("other", {**OWN, "policy": "single-numa-node"}, 2, 1)[1] == "1"
    world.check()


def test_what_a_pod_had_before_binds_nobody() -> None:
    """Where its NUMA node is too small for the next container, that goes elsewhere."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node"})
    world.add(of, "init", 2, 1)
    world.stop("web-init")
    world.put("other", {**OWN, "numacpu": "2-6"}, 5, 1)
    assert world.add(of, "app", 4, 1) == ("8-11", "1")
    world.check()


def test_a_pod_keeps_its_numa_node_after_a_restart_of_the_agent() -> None:
    """The other one has room for all of the pod by then, and its first container is not there."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node", "scope": "pod"}, total=resources(6, 4))
    assert world.add(of, "one", 3, 2)[0] == "0-2"
    restarted(world)
    assert world.add(of, "two", 3, 2)[0] == "3-5"
    world.check()


def test_a_pod_that_is_gone_is_forgotten_for_good() -> None:
    """A pod of the same name has another uid; nothing of the first one is left on the disk."""
    world = node()
    of = pod("web", {**OWN, "policy": "single-numa-node", "scope": "pod"}, total=resources(6, 4))
    world.add(of, "one", 3, 2)
    assert any("uid-web" in key for key in world.store.documents)
    world.stop("web-one")
    world.remove_pod(of)
    assert not any("web" in key for key in world.store.documents)
    restarted(world)
    assert not world.agent.state.pods
    world.check()
