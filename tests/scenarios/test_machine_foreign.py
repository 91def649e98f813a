"""CPUs that somebody else pinned are given away last, and it is said."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.others import pinned_elsewhere
from nri_numa.engine.state import Kind, violations
from nri_numa.machine.synthetic import Numbering, synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import Resources
from tests.beds.world import World, container, pod
from tests.machines import named as machines

SINGLE = {"policy": "single-numa-node"}


def _elsewhere(world: World) -> CPUSet:
    return pinned_elsewhere(world.agent.state, world.topology)


def foreign(world: World, name: str, cpus: str) -> None:
    """A container that the kubelet's static policy pinned."""
    of = pod(name)
    made = container(of)
    world.create(of, replace(made, resources=replace(made.resources, cpus=cpus)))
    assert world.allocation(made.id).kind is Kind.FOREIGN


@pytest.mark.parametrize("smt", ["any", "spread", "isolate", "full-core", "pair"])
def test_case_15_cpus_that_somebody_else_pinned_are_the_last(smt: str) -> None:
    """Four cores with siblings side by side; the first has a foreign container."""
    world = World(
        synthetic(sockets=1, numa_per_socket=1, cores_per_numa=4, numbering=Numbering.ADJACENT)
    )
    foreign(world, "kubelets", "0-1")
    world.put("a", {**SINGLE, "smt": smt}, 2, 1)
    assert not world.cpus("a-app") & world.topology.siblings_of(world.cpus("kubelets-app"))


def test_case_15_when_there_are_no_others_they_are_given_and_it_is_said() -> None:
    world = World(machines.single_no_smt())
    foreign(world, "kubelets", "0-1")
    assert world.put("a", SINGLE, 3, 1)[0] == "0,2-3"
    assert "CPU 0 is also used by containers that another component pinned there" in world.steps(
        "a-app"
    )


def test_case_15_another_numa_node_comes_first() -> None:
    world = World(machines.dual_no_smt())
    foreign(world, "kubelets", "0-3")
    # More of the memory of NUMA node 1 is in use.
    world.put("other", {"numamem": "1"}, 0, 4)
    assert world.put("a", SINGLE, 6, 1)[1] == "1"


def test_case_15_the_kubelets_shared_pool_is_no_pin() -> None:
    """Nearly every container has it: it says nothing about particular CPUs."""
    world = World(machines.dual_no_smt())
    foreign(world, "pool", "0-13")
    assert not _elsewhere(world)
    assert world.put("a", SINGLE, 2, 1)[0] == "0-1"


def test_case_15_it_is_known_after_a_restart_and_forgotten_with_the_container() -> None:
    world = World(machines.single_no_smt())
    foreign(world, "kubelets", "0-1")
    world.restart()
    assert str(_elsewhere(world)) == "0-1"
    world.stop("kubelets-app")
    assert not _elsewhere(world)


def test_case_15_another_cpuset_from_them_counts() -> None:
    world = World(machines.single_no_smt())
    foreign(world, "kubelets", "0-1")
    assert world.update("kubelets-app", Resources(cpus="2-3")) is None
    assert str(_elsewhere(world)) == "2-3"
    assert world.update("kubelets-app", Resources(cpu_shares=512)) is None
    assert str(_elsewhere(world)) == "2-3"


def test_case_15_books_that_do_not_add_up_are_found() -> None:
    world = World(machines.single_no_smt())
    foreign(world, "kubelets", "0-1")
    state, settings = world.agent.state, world.settings
    assert violations(state, world.topology, settings) == []
    wrong = replace(state, foreign={})
    assert violations(wrong, world.topology, settings) == [
        "foreign: counted as {}, and the allocations add up to {3: 1}"
    ]
