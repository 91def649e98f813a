"""Isolated CPUs (isolcpus): containers that share stay off them, and who owns CPUs gets them."""

from __future__ import annotations

import pytest

from nri_numa.engine.accounting import largest, together
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, IsolatedCPUs, Limits, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import World, pod, resources

BURSTABLE = QoSClass.BURSTABLE
MILD = {"policy": "best-effort"}
OWN = {"cpus": "exclusive"}
HOUSEKEEPING = CPUSet.parse("0-1,16-17")


def machine(isolated: str = "2-15,18-31") -> Topology:
    """Two NUMA nodes of 8 cores with 2 threads; node 0 is 0-7,16-23."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=8, isolated=CPUSet.parse(isolated)
    )


def test_containers_that_share_stay_off_isolated_cpus() -> None:
    world = World(machine())
    for name in ("a", "b"):
        assert world.put(name, MILD, 0.5, 1, BURSTABLE)[0] == "0-1,16-17"
    assert world.put("c", {}, 0.5, 1, BURSTABLE)[0] == "0-1,16-17", "it asks for nothing"
    world.check()


def test_owners_leave_the_pool_a_cpu_that_is_not_isolated() -> None:
    world = World(machine())
    world.put("idle", qos=BURSTABLE)
    owned = CPUSet.parse(world.put("own", OWN, 6)[0])
    assert len(owned) == 6
    left = world.cpus("idle-app")
    assert left
    assert left <= HOUSEKEEPING - owned
    assert len(CPUSet.parse(world.put("more", OWN, 20)[0])) == 20
    assert world.cpus("idle-app") == left
    world.check()


def test_isolated_cpus_can_be_owned_whatever_floor_the_pool_has() -> None:
    world = World(machine(), Settings(limits=Limits(pool=CPUAmount(8))))
    owned = CPUSet.parse(world.put("own", OWN, 6)[0])
    assert not owned & HOUSEKEEPING
    world.check()


def test_what_sharers_were_promised_is_not_owned() -> None:
    world = World(machine())
    world.put("shares", MILD, 3, 1, BURSTABLE)
    assert len(CPUSet.parse(world.put("own", OWN, 4)[0]) & HOUSEKEEPING) <= 1
    world.check()


def test_only_gives_owners_isolated_cpus_and_nothing_else() -> None:
    world = World(machine("2-3,18-19"), Settings(isolated=IsolatedCPUs.ONLY))
    assert largest(world.agent.machine, world.agent.state) == {0: 4, 1: 0}
    assert together(world.agent.machine, world.agent.state) == 4
    answer = world.refused("many", OWN, 5)
    assert "5 exclusive CPUs needed, this machine has 4" in answer.message
    assert world.put("own", OWN, 4)[0] == "2-3,18-19"
    assert "(isolatedCPUs: only)" in world.refused("late", OWN, 1).message
    world.check()


@pytest.mark.parametrize(
    ("isolated", "busy", "expected"),
    [(IsolatedCPUs.PREFER, "8-9", "1"), (IsolatedCPUs.AVOID, "0-1", "0")],
)
def test_the_setting_decides_between_numa_nodes(
    isolated: IsolatedCPUs, busy: str, expected: str
) -> None:
    """By the strategy it would be the other one, which is less in use."""
    world = World(machine("8-15,24-31"), Settings(isolated=isolated))
    world.put("busy", {"numacpu": busy, "cpus": "exclusive"}, 2)
    assert world.put("own", {"policy": "single-numa-node"}, 4, 1)[1] == expected


def test_any_takes_isolated_cpus_as_any_and_warns_of_a_set_without_others() -> None:
    world = World(machine("8-15,24-31"), Settings(isolated=IsolatedCPUs.ANY))
    assert world.put("a", MILD, 0.5, 1, BURSTABLE)[0] == "0-7,16-23"
    admitted = world.admit(pod("b", MILD, qos=BURSTABLE), wants=resources(0.5, 1))
    assert admitted.adjustment.cpus == "8-15,24-31"
    assert [w for w in admitted.warnings if "isolated (isolcpus)" in w]


def test_a_shared_list_of_isolated_cpus_is_taken_and_warned_of() -> None:
    world = World(machine())
    admitted = world.admit(pod("listed", {"numacpu": "4-6"}), wants=resources(3))
    assert admitted.allocation.kind is Kind.EXPLICIT
    assert [w for w in admitted.warnings if w.startswith("CPUs 4-6 are isolated")]


def test_growing_takes_isolated_cpus_before_the_last_of_the_pool() -> None:
    world = World(machine())
    world.put("own", OWN, 2)
    assert world.update("own-app", resources(6)) is None
    assert len(world.cpus("own-app")) == 6
    assert HOUSEKEEPING - world.cpus("own-app")
    world.check()


def test_a_machine_of_isolated_cpus_shares_them() -> None:
    world = World(machine("0-31"))
    assert world.put("a", MILD, 0.5, 1, BURSTABLE)[0] == "0-7,16-23"
    assert world.put("own", OWN, 2)[0]
    world.check()
