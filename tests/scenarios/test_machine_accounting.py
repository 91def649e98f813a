"""What is free: one figure for admission, refusals, API, metrics and page."""

from __future__ import annotations

from msgspec.structs import replace

from nri_numa.agent.view import LiveView
from nri_numa.engine.accounting import take_within
from nri_numa.engine.cpus.allocator import ChosenCPUs, TakeRequest
from nri_numa.engine.decision import Machine
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import CPUAmount, Limits, Settings
from nri_numa.model.workload import SMT, QoSClass
from tests.beds.views import live_view
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

MANY_IDLE = Settings(limits=Limits(idle=CPUAmount(percent=50), pool=CPUAmount(1)))
"""How many siblings may be kept idle is another matter; see test_tenants.py."""

ISOLATE = {"policy": "single-numa-node", "smt": "isolate"}
SINGLE = {"policy": "single-numa-node"}


def _view(world: World) -> LiveView:
    return live_view(world.agent, memory=world.reading)


def _isolated(world: World, count: int) -> None:
    for n in range(count):
        world.put(f"isolated{n}", ISOLATE, 1, 1)


def test_case_11_idle_siblings_are_not_free_for_shared_containers() -> None:
    """Two NUMA nodes of 4 cores; 3 cores of each are isolated, so 2 CPUs of each are left."""
    world = World(synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4), MANY_IDLE)
    _isolated(world, 6)
    for n in range(2):
        world.put(f"shared{n}", SINGLE, 1.5, 1)

    refused = world.refused("shared2", SINGLE, 1.5, 1)

    assert refused.reason == "TopologyAffinityError"
    assert "free: NUMA node 0: 0.5 CPUs" in refused.message
    assert "NUMA node 1: 0.5 CPUs" in refused.message
    nodes = _view(world).listing().head.numa_nodes
    assert [n.cpu_available_milli for n in nodes] == [500, 500]
    assert [n.available_cpus for n in _view(world).snapshot().numa_nodes] == [0.5, 0.5]


def test_case_11_owners_leave_what_shared_containers_were_promised() -> None:
    """An owner of several NUMA nodes takes from each what it can spare."""
    world = World(machines.dual_no_smt())
    _, mems = world.put("shared", SINGLE, 6, 1)
    world.put("wide", {"policy": "best-effort", "cpus": "exclusive"}, 9, 1)

    own = world.cpus("wide-app")
    left = world.topology.numa_nodes[int(mems)].cpus - own
    assert len(left) >= 6


def test_case_11_oversold_cpus_cannot_be_owned_and_promised() -> None:
    """With 8 CPUs sold twice and 7 of them owned, 2 are promised and not 9."""
    world = World(machines.single_smt(), Settings(oversale=2.0))
    world.put("owner", SINGLE, 7, 1)
    refused = world.refused("shared", {"policy": "restricted", "cpus": "shared"}, 2.5, 1)
    assert "free: NUMA node 0: 2 CPUs" in refused.message


def test_case_11_the_last_cpu_of_the_pool_is_not_said_to_be_free() -> None:
    """The text of a refusal counts what could be owned."""
    world = World(machines.single_no_smt())
    refused = world.refused("all", {"policy": "restricted"}, 5, 1)
    assert "free: NUMA node 0: 3 CPUs" in refused.message


def test_case_11_a_shared_container_is_booked_where_there_is_room() -> None:
    """Half of it on each NUMA node would promise more of the fuller one than it has."""
    world = World(machines.dual_no_smt())
    world.put("first", SINGLE, 6.5, 1)
    world.put("wide", {"policy": "best-effort"}, 9, 1)
    left = world.agent.machine.cpu_left(world.agent.state)
    assert sorted(left.values()) == [0, 500]
    assert all(c.cpu_milli <= 8000 for c in world.agent.state.charges.values())


def test_case_11_whole_cores_come_from_where_they_can_be_spared() -> None:
    """Of NUMA node 0 one CPU may be owned, which makes no whole core."""
    topology = machines.dual_adjacent()
    machine = Machine(topology=topology, settings=Settings())
    request = TakeRequest(
        count=4, available=topology.online, affinity=NUMASet([0, 1]), smt=SMT.FULL_CORE
    )
    taken = take_within(machine, request, {0: 1, 1: 8})
    assert isinstance(taken, ChosenCPUs)
    assert str(taken.cpus) == "8-11"
    some = take_within(machine, replace(request, count=10), {0: 2, 1: 8})
    assert isinstance(some, ChosenCPUs)
    assert len(some.cpus & topology.numa_nodes[0].cpus) == 2


def test_a_refusal_says_whose_requests_the_shared_pool_serves() -> None:
    world = World(machines.dual_no_smt())
    for name, cpus in (("big", 7.5), ("other", 8), ("small", 0.25)):
        world.put(name, {"policy": "single-numa-node"}, cpus, qos=QoSClass.BURSTABLE)
    idle = pod("idle", {"policy": "single-numa-node"}, qos=QoSClass.BEST_EFFORT)
    world.place(idle, container(idle, "none"))
    for asks in ({}, {"policy": "best-effort"}, {"policy": "single-numa-node"}):
        refused = world.refused("own", {**asks, "cpus": "exclusive"}, 2)
        assert refused.message.endswith(
            "; held: default/other/app requests 8 CPUs of the shared pool, "
            "default/big/app requests 7.5 CPUs of the shared pool, "
            "default/small/app requests 0.25 CPUs of the shared pool"
        ), refused.message


def test_a_resize_that_is_refused_says_who_has_its_numa_node() -> None:
    world = World(machines.dual_no_smt())
    mine = {"policy": "single-numa-node"}
    world.put("own", mine, 2, 1)
    for name, cpus in (("near", 5), ("far", 5)):
        world.put(name, mine, cpus, qos=QoSClass.BURSTABLE)
    where = {a.pod: a.numa_nodes for a in world.agent.state.allocations.values()}
    near = next(name for name in ("near", "far") if where[name] == where["own"])
    refused = world.update_refused("own-app", resources(8, 1))
    assert refused.reason == "NotEnoughCPUs"
    assert f"held: default/{near}/app requests" in refused.message
    assert refused.message.count("requests") == 1
    refused = world.update_refused(f"{near}-app", resources(8, 0))
    assert "held: default/own/app has exclusive CPUs" in refused.message
