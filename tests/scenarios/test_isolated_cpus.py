"""Isolated CPUs (isolcpus): containers that share stay off them, and who owns CPUs gets them."""

from __future__ import annotations

import pytest

from nri_numa.engine.accounting import largest, together
from nri_numa.engine.decision import Admitted
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, IsolatedCPUs, Limits, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import World, container, pod, resources
from tests.scenarios.test_computed import put

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
        assert put(world, name, MILD, 0.5, 1, BURSTABLE)[0] == "0-1,16-17"
    assert put(world, "c", {}, 0.5, 1, BURSTABLE)[0] == "0-1,16-17", "it asks for nothing"
    world.check()


def test_owners_leave_the_pool_a_cpu_that_is_not_isolated() -> None:
    world = World(machine())
    of = pod("idle", qos=BURSTABLE)
    idle = container(of)
    world.place(of, idle)
    owned = CPUSet.parse(put(world, "own", OWN, 6)[0])
    assert len(owned) == 6
    left = world.cpus(idle.id)
    assert left
    assert left <= HOUSEKEEPING - owned
    assert len(CPUSet.parse(put(world, "more", OWN, 20)[0])) == 20
    assert world.cpus(idle.id) == left
    world.check()


def test_isolated_cpus_can_be_owned_whatever_floor_the_pool_has() -> None:
    world = World(machine(), Settings(limits=Limits(pool=CPUAmount(8))))
    owned = CPUSet.parse(put(world, "own", OWN, 6)[0])
    assert not owned & HOUSEKEEPING
    world.check()


def test_what_sharers_were_promised_is_not_owned() -> None:
    world = World(machine())
    put(world, "shares", MILD, 3, 1, BURSTABLE)
    assert len(CPUSet.parse(put(world, "own", OWN, 4)[0]) & HOUSEKEEPING) <= 1
    world.check()


def test_only_gives_owners_isolated_cpus_and_nothing_else() -> None:
    world = World(machine("2-3,18-19"), Settings(isolated=IsolatedCPUs.ONLY))
    assert largest(world.agent.machine, world.agent.state) == {0: 4, 1: 0}
    assert together(world.agent.machine, world.agent.state) == 4
    answer = world.refuse(pod("many", OWN), wants=resources(5))
    assert "5 exclusive CPUs needed, this machine has 4" in answer.message
    assert put(world, "own", OWN, 4)[0] == "2-3,18-19"
    assert "(isolatedCPUs: only)" in world.refuse(pod("late", OWN), wants=resources(1)).message
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
    put(world, "busy", {"numacpu": busy, "cpus": "exclusive"}, 2)
    assert put(world, "own", {"policy": "single-numa-node"}, 4, 1)[1] == expected


def test_any_takes_isolated_cpus_as_any_and_warns_of_a_set_without_others() -> None:
    world = World(machine("8-15,24-31"), Settings(isolated=IsolatedCPUs.ANY))
    assert put(world, "a", MILD, 0.5, 1, BURSTABLE)[0] == "0-7,16-23"
    of = pod("b", MILD, qos=BURSTABLE)
    admitted = world.create(of, container(of, wants=resources(0.5, 1)))
    assert isinstance(admitted, Admitted)
    assert admitted.adjustment.cpus == "8-15,24-31"
    assert [w for w in admitted.warnings if "isolated (isolcpus)" in w]


def test_a_shared_list_of_isolated_cpus_is_taken_and_warned_of() -> None:
    world = World(machine())
    of = pod("listed", {"numacpu": "4-6"})
    admitted = world.create(of, container(of, wants=resources(3)))
    assert isinstance(admitted, Admitted)
    assert admitted.allocation.kind is Kind.EXPLICIT
    assert [w for w in admitted.warnings if w.startswith("CPUs 4-6 are isolated")]


def test_growing_takes_isolated_cpus_before_the_last_of_the_pool() -> None:
    world = World(machine())
    of = pod("own", OWN)
    made = container(of, wants=resources(2))
    world.place(of, made)
    assert world.update(made.id, resources(6)) is None
    assert len(world.cpus(made.id)) == 6
    assert HOUSEKEEPING - world.cpus(made.id)
    world.check()


def test_a_machine_of_isolated_cpus_shares_them() -> None:
    world = World(machine("0-31"))
    assert put(world, "a", MILD, 0.5, 1, BURSTABLE)[0] == "0-7,16-23"
    assert put(world, "own", OWN, 2)[0]
    world.check()
