"""A NUMA node of which less is there, or nothing: who still gets something on it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Refused
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

SINGLE = {"policy": "single-numa-node"}
DRAINED = Settings(capacity_factor={0: 0.0})
LEFT, RIGHT = CPUSet.parse("0-15,32-47"), CPUSet.parse("16-31,48-63")
"""CPUs of the two NUMA nodes of `machines.dual_smt`."""


@pytest.mark.parametrize(
    ("annotations", "cpus", "qos"),
    [
        (SINGLE, 4, QoSClass.GUARANTEED),
        (SINGLE, 1.5, QoSClass.GUARANTEED),
        (SINGLE, 0.5, QoSClass.BURSTABLE),
        ({"policy": "restricted"}, 2, QoSClass.GUARANTEED),
        ({"policy": "best-effort"}, 2, QoSClass.GUARANTEED),
        ({"cpus": "exclusive"}, 2, QoSClass.GUARANTEED),
    ],
)
def test_nothing_new_lands_on_a_drained_numa_node(
    annotations: dict[str, str], cpus: float, qos: QoSClass
) -> None:
    world = World(machines.dual_smt(), DRAINED)
    got, _ = world.put("a", annotations, cpus, 1, qos)
    assert got
    assert CPUSet.parse(got) <= RIGHT


def test_what_is_listed_is_listed() -> None:
    """Whoever names CPUs decides himself, on a drained NUMA node too."""
    world = World(machines.dual_smt(), DRAINED)
    assert world.put("a", {"numacpu": "0-1"}, 2, 1, QoSClass.GUARANTEED)[0] == "0-1"


def test_half_a_numa_node_takes_half() -> None:
    world = World(machines.dual_smt(), Settings(capacity_factor={0: 0.5, 1: 0.0}))
    for name in "abcd":
        assert CPUSet.parse(world.put(name, SINGLE, 4, 1, QoSClass.GUARANTEED)[0]) <= LEFT
    assert world.refused("e", SINGLE, 4, 1, QoSClass.GUARANTEED).reason == "TopologyAffinityError"


@pytest.mark.parametrize(
    ("annotations", "cpus"),
    [(SINGLE, 1.5), (SINGLE, 2), ({"policy": "restricted"}, 2), ({"cpus": "exclusive"}, 2)],
)
def test_a_refusal_names_the_factor(annotations: dict[str, str], cpus: float) -> None:
    world = World(machines.dual_smt(), Settings(capacity_factor={0: 0.0, 1: 0.01}))
    message = world.refused("a", annotations, cpus, 1, QoSClass.GUARANTEED).message
    assert " (capacity factor 0: drained); NUMA node 1: " in message
    assert message.count(" (capacity factor 0.01)") == 1


@pytest.mark.parametrize("cpus", [1.5, 2])
def test_so_does_a_resize_that_is_refused(cpus: float) -> None:
    world = World(machines.dual_smt())
    of = pod("a", {**SINGLE, "on-failure": "reject"}, qos=QoSClass.GUARANTEED)
    app = container(of, wants=resources(cpus, 1))
    world.place(of, app)
    both = Settings(capacity_factor={0: 0.0, 1: 0.0})
    world.agent.retopology(replace(world.agent.machine, settings=both))
    refused = world.agent.update_container(of, app, resources(cpus + 2, 1))
    assert isinstance(refused, Refused)
    assert "(capacity factor 0: drained)" in refused.refusal.message
