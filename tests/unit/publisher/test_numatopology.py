"""Volcano's object from the agent's documents: which CPUs are free, and whose the others are."""

from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.view import zones_document
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import topology_document
from nri_numa.model.offline_capacity import CPU_ID_LIMIT, parse_id_list
from nri_numa.model.settings import Settings
from nri_numa.publisher import numatopology
from nri_numa.publisher.numatopology import build_numatopology_spec
from nri_numa.web.responses import Assignment
from tests.beds.http_view import assignment
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines


def assignments(world: World) -> list[Assignment]:
    return [
        replace(
            assignment(0, a.container),
            pod_uid=a.pod_uid, namespace=a.namespace, pod=a.pod,
            kind=a.kind.value, cpus=str(a.cpus), idle_siblings=str(a.idle_siblings),
        foreign_cpus=str(a.foreign_cpus),
        )
        for a in world.agent.current.state.allocations.values()
    ]  # fmt: skip


def spec(world: World, **changes: Any) -> dict[str, Any]:
    machine = world.agent.current.machine
    topology = topology_document(machine.topology, reserved=machine.settings.reserved_cpus)
    found = replace(zones_document(NodeSnapshot(machine, world.agent.current.state)), **changes)
    return build_numatopology_spec(topology, assignments(world), found)


def free(of: dict[str, Any]) -> set[int]:
    return set(parse_id_list(of["numares"]["cpu"]["allocatable"], CPU_ID_LIMIT))


def test_an_empty_machine() -> None:
    """One CPU stays with those that share: 31 of 32 are free, and 30 where one is reserved."""
    settings = Settings(reserved_cpus=CPUSet([0]), defaults={"policy": "restricted"})
    found = spec(World(machines.snc_smt(), settings))
    assert found["policies"] == {
        "CPUManagerPolicy": "static", "TopologyManagerPolicy": "restricted",
    }  # fmt: skip
    assert found["numares"]["cpu"]["capacity"] == 32
    assert 0 not in free(found)
    assert found["cpuDetail"]["20"] == {"numa": 1, "socket": 0, "core": 4}
    assert len(found["cpuDetail"]) == 32
    assert found["podAllocations"] == []


@pytest.mark.parametrize("reserved", [CPUSet(), CPUSet([0]), CPUSet([16, 20, 24, 28])])
def test_reserved_cpus_are_subtracted_once(reserved: CPUSet) -> None:
    """The plugin takes ``resReserved`` CPUs of its own choice, core by core, out of the free."""
    found = spec(World(machines.snc_smt(), Settings(reserved_cpus=reserved)))
    core_by_core = list(map(int, found["cpuDetail"]))
    admitted = free(found) - set(core_by_core[: int(found["resReserved"]["cpu"])])
    assert len(admitted) == 32 - max(1, len(reserved))


def test_what_containers_have_is_not_free_and_is_theirs() -> None:
    world = World(machines.snc_smt(), Settings(defaults={"policy": "single-numa-node"}))
    of, shares = pod("p", namespace="shop"), pod("web", {"cpus": "shared"})
    world.create(of, container(of, wants=resources(3, 2)))
    world.create(shares, container(shares, wants=resources(1, 1)))
    (theirs,) = (a.cpus for a in world.agent.current.state.allocations.values() if a.cpus)
    found = spec(world)
    assert not free(found) & set(theirs)
    together = zones_document(
        NodeSnapshot(world.agent.current.machine, world.agent.current.state)
    ).free_exclusive_cpus
    assert len(free(found)) == together
    by_name = {one["name"]: one["containerAllocations"] for one in found["podAllocations"]}
    (allocation,) = by_name["p"]
    assert allocation["allocations"] == {"cpu": str(theirs)}
    # It is named all the same: the scheduler waits for every pod that it sent.
    assert by_name["web"] == []


def test_no_more_is_free_than_a_container_could_have() -> None:
    world = World(machines.snc_smt())
    found = zones_document(NodeSnapshot(world.agent.current.machine, world.agent.current.state))
    two = tuple(replace(zone, free_exclusive_cpus=2) for zone in found.zones)
    few = free(spec(world, zones=two, free_exclusive_cpus=None))
    assert few == {0, 1, 4, 5, 8, 9, 12, 13}
    assert free(spec(world, zones=two, free_exclusive_cpus=6)) == {0, 1, 4, 5, 8, 12}
    assert free(spec(world, zones=two, free_exclusive_cpus=0)) == set()
    assert free(spec(world, zones=two[:1], free_exclusive_cpus=None)) == {0, 1}


def test_what_others_were_pinned_to_comes_last() -> None:
    """Such a list may be shared, so the agent's numbers say how many of its CPUs can be had."""
    world = World(machines.snc_smt())
    of = pod("p", {"numacpu": "0-1"})
    world.create(of, container(of, wants=resources(2, 1)))
    found = zones_document(NodeSnapshot(world.agent.current.machine, world.agent.current.state))
    two = tuple(replace(zone, free_exclusive_cpus=2) for zone in found.zones)
    assert {2, 3} <= free(spec(world, zones=two, free_exclusive_cpus=None))
    assert not free(spec(world, zones=two, free_exclusive_cpus=None)) & {0, 1}


@pytest.mark.parametrize("changes", [{"ready": False}, {"defaults_to_shared": True}])
def test_nodes_that_give_no_whole_cpus_now(changes: dict[str, bool]) -> None:
    found = spec(World(machines.snc_smt()), **changes)
    assert found["policies"]["CPUManagerPolicy"] == "none"


def test_an_agent_that_is_silent_has_nothing_free() -> None:
    found = spec(World(machines.snc_smt()))
    quiet = numatopology.stale_spec(found)
    assert free(quiet) == set()
    assert quiet["policies"]["CPUManagerPolicy"] == "none"
    assert quiet["numares"]["cpu"]["capacity"] == 32
