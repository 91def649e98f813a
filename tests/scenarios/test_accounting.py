"""What is free: one figure for admission, refusals, API, metrics and page."""

from collections import Counter
from functools import partial

import pytest
from msgspec.structs import replace

from nri_numa.engine.accounting import take_avoiding_contended, total_free_exclusive
from nri_numa.engine.cpus.allocator import ChosenCPUs, TakeRequest
from nri_numa.engine.decision import PlacementRequest, Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import NodeState
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import CPUAmount, QuotasAndPoolFloor, Settings
from nri_numa.model.workload import SMT, QoSClass, Strategy
from tests.beds.views import live_view
from tests.beds.world import GIB, SINGLE, World, container, pod, resources, says, two_by_four
from tests.machines import named as machines

MANY_IDLE = Settings(
    limits=QuotasAndPoolFloor(idle_siblings=CPUAmount(percent=50), pool=CPUAmount(1))
)
"""How many siblings may be kept idle is another matter; see test_tenants.py."""


ISOLATE = {"policy": "single-numa-node", "smt": "isolate"}

usual = partial(World, machines.dual_no_smt())


def test_case_11_idle_siblings_are_not_free_for_shared_containers() -> None:
    """Two NUMA nodes of 4 cores; 3 cores of each are isolated, so 2 CPUs of each are left."""
    world = World(machines.dual_smt_16(), MANY_IDLE)
    for n in range(6):
        world.put(f"isolated{n}", ISOLATE, 1, 1)
    for n in range(2):
        world.put(f"shared{n}", SINGLE, 1.5, 1)

    rejected = world.rejected("shared2", SINGLE, 1.5, 1)

    says(rejected, "TopologyAffinityError", "free: NUMA node 0: 0.5 CPUs", "NUMA node 1: 0.5 CPUs")
    view = live_view(world.agent, memory=world.reading)
    nodes = view.list_assignments().head.numa_nodes
    assert [n.cpu_free_milli for n in nodes] == [500, 500]
    assert [n.free_cpus for n in view.metrics_snapshot().numa_nodes] == [0.5, 0.5]


def test_case_11_owners_leave_what_shared_containers_were_promised(world: World) -> None:
    """An owner of several NUMA nodes takes from each what it can spare."""
    _, mems = world.put("shared", SINGLE, 6, 1)
    world.put("wide", {"policy": "best-effort", "cpus": "exclusive"}, 9, 1)

    own = world.cpus("wide-app")
    left = world.topology.numa_nodes[int(mems)].cpus - own
    assert len(left) >= 6


def test_case_11_oversold_cpus_cannot_be_owned_and_promised() -> None:
    """With 8 CPUs sold twice and 7 of them owned, 2 are promised and not 9."""
    world = World(machines.single_smt(), Settings(cpu_overcommit=2.0))
    world.put("owner", SINGLE, 7, 1)
    rejected = world.rejected("shared", {"policy": "restricted", "cpus": "shared"}, 2.5, 1)
    assert "free: NUMA node 0: 2 CPUs" in rejected.message


def test_what_could_be_isolated_is_bound_by_siblings_that_may_still_be_idle() -> None:
    limits = QuotasAndPoolFloor(idle_siblings=CPUAmount(2), pool=CPUAmount(1))
    topology = machines.snc_single(cores_per_numa=8)
    world = World(topology, Settings(defaults={"smt": "isolate"}, limits=limits))
    world.put("one", SINGLE, 1, 1)
    assert total_free_exclusive(world.agent.current.desired) == 1


def test_case_11_the_last_cpu_of_the_pool_is_not_said_to_be_free() -> None:
    """The text of a refusal counts what could be owned."""
    world = World(machines.single_no_smt())
    says(world.rejected("all", {"policy": "restricted"}, 5, 1), "", "free: NUMA node 0: 3 CPUs")


def test_case_11_a_shared_container_is_booked_where_there_is_room(world: World) -> None:
    """Half of it on each NUMA node would promise more of the fuller one than it has."""
    world.put("first", SINGLE, 6.5, 1)
    world.put("wide", {"policy": "best-effort"}, 9, 1)
    left = world.agent.current.desired.free_cpu_milli
    assert sorted(left.values()) == [0, 500]
    assert all(c.cpu_milli <= 8000 for c in world.agent.current.state.charges.values())


def test_case_11_whole_cores_come_from_where_they_can_be_spared() -> None:
    """Of NUMA node 0 one CPU may be owned, which makes no whole core."""
    topology = machines.dual_adjacent()
    machine, of = NodeModel(topology=topology, settings=Settings()), pod("own")
    take = partial(
        take_avoiding_contended,
        PlacementRequest(NodeSnapshot(machine, NodeState()), of, container(of), PlacementOptions()),
    )
    request = TakeRequest(
        count=4, free_cpus=topology.online, affinity=NUMASet([0, 1]), smt=SMT.FULL_CORE
    )
    taken = take(request, {0: 1, 1: 8})
    assert isinstance(taken, ChosenCPUs)
    assert str(taken.cpus) == "8-11"
    some = take(replace(request, count=10), {0: 2, 1: 8})
    assert isinstance(some, ChosenCPUs)
    assert len(some.cpus & topology.numa_nodes[0].cpus) == 2


def test_a_rejection_says_whose_requests_the_shared_pool_serves(world: World) -> None:
    for name, cpus in (("big", 7.5), ("other", 8), ("small", 0.25)):
        world.put(name, {"policy": "single-numa-node"}, cpus, qos=QoSClass.BURSTABLE)
    idle = pod("idle", {"policy": "single-numa-node"}, qos=QoSClass.BEST_EFFORT)
    world.place(idle, container(idle, "none"))
    for asks in ({}, {"policy": "best-effort"}, {"policy": "single-numa-node"}):
        rejected = world.rejected("own", {**asks, "cpus": "exclusive"}, 2)
        assert rejected.message.endswith(
            "; held: default/other/app requests 8 CPUs of the shared pool, "
            "default/big/app requests 7.5 CPUs of the shared pool "
            "and default/small/app requests 0.25 CPUs of the shared pool"
        ), rejected.message


def test_a_resize_that_is_rejected_says_who_has_its_numa_node(world: World) -> None:
    mine = {"policy": "single-numa-node"}
    world.put("own", mine, 2, 1)
    for name, cpus in (("near", 5), ("far", 5)):
        world.put(name, mine, cpus, qos=QoSClass.BURSTABLE)
    where = {a.pod: a.numa_nodes for a in world.agent.current.state.allocations.values()}
    near = next(name for name in ("near", "far") if where[name] == where["own"])
    rejected = world.update_rejected("own-app", resources(8, 1))
    says(rejected, "NotEnoughCPUs", f"held: default/{near}/app requests")
    assert rejected.message.count("requests") == 1
    rejected = world.update_rejected(f"{near}-app", resources(8, 0))
    assert "held: default/own/app has exclusive CPUs" in rejected.message


# --- ``strategy``: by the share that is scarcest once the container is there --------------------


POLICY = {"policy": "best-effort"}


def _six(strategy: Strategy, reading: MeasuredFree | None = None) -> list[str]:
    """Where six pods of one CPU and 256 MiB go."""
    world = World(machines.dual_no_smt(), Settings(strategy=strategy), reading=reading)
    pods = (pod(f"p{n}", POLICY, qos=QoSClass.BURSTABLE) for n in range(6))
    return [world.place(of, wants=resources(1, 0.25))[1] for of in pods]


# Page cache: node 1 has 3 GiB less of 16.
UNEVEN = MeasuredFree(memory={0: 15 * GIB, 1: 12 * GIB})


def test_case_17_six_small_pods_use_both_numa_nodes() -> None:
    """By memory left alone all six go to node 0, which has 3 GiB more."""
    assert Counter(_six(Strategy.MOST_MEMORY, UNEVEN)) == {"0": 6}
    assert Counter(_six(Strategy.SPREAD, UNEVEN)) == {"0": 3, "1": 3}
    assert Counter(_six(Strategy.SPREAD)) == {"0": 3, "1": 3}


def test_case_17_pack_fills_one_by_the_same_measure() -> None:
    assert len(set(_six(Strategy.PACK))) == 1


def test_case_17_memory_counts_where_it_is_scarcest(world: World) -> None:
    """Node 0 has its memory nearly full and its CPUs free; node 1 the other way round, less so."""
    world.put("memory", {"numamem": "0"}, 0, 13)
    world.put("cpus", {"numacpu": "8-11", "cpus": "exclusive"}, 4)
    assert world.put("a", POLICY, 1, 1, qos=QoSClass.BURSTABLE)[1] == "1"


def test_case_17_shares_and_not_amounts_decide() -> None:
    """A small NUMA node that is empty is emptier than a large one that is half full."""
    world = World(machines.dual_no_smt(), Settings(capacity_factor={1: 0.5}))
    world.put("first", {"numacpu": "0-3", "cpus": "exclusive"}, 4)
    world.put("a", {**POLICY, "bind": "cpu"}, 1, qos=QoSClass.BURSTABLE)
    assert str(world.allocation("a-app").numa_nodes) == "1"


def test_case_17_huge_pages_count_too() -> None:
    world = World(machines.huge_pages())
    pages = 2 << 20
    world.put("first", {"numamem": "0"}, 0, 0, pages={pages: GIB // 2})
    of = pod("a", POLICY, qos=QoSClass.BURSTABLE)
    assert world.place(of, wants=resources(1, 1, hugepages={pages: GIB // 4}))[1] == "1"


# --- A NUMA node of which less is there, or nothing: who still gets something on it -------------


DRAINED = Settings(capacity_factor={0: 0.0})
LEFT, RIGHT = CPUSet.parse("0-15,32-47"), CPUSet.parse("16-31,48-63")
"""CPUs of the two NUMA nodes of `machines.dual_smt`."""


@pytest.mark.parametrize(
    ("annotations", "cpus", "qos"),
    [
        (SINGLE, 4, QoSClass.GUARANTEED),
        (SINGLE, 1.5, QoSClass.GUARANTEED),
        ({"policy": "restricted"}, 2, QoSClass.GUARANTEED),
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
    assert world.rejected("e", SINGLE, 4, 1, QoSClass.GUARANTEED).reason == "TopologyAffinityError"
    world = World(machines.single_smt(), Settings(capacity_factor={0: 0.4}))
    message = world.rejected("cores", {**SINGLE, "smt": "full-core"}, 4).message
    assert "NUMA node 0: 2 CPUs for exclusive use (" in message, "whole cores of 3.2 CPUs"


@pytest.mark.parametrize(
    ("annotations", "cpus"),
    [(SINGLE, 1.5), (SINGLE, 2), ({"policy": "restricted"}, 2), ({"cpus": "exclusive"}, 2)],
)
def test_a_rejection_names_the_factor(annotations: dict[str, str], cpus: float) -> None:
    world = World(machines.dual_smt(), Settings(capacity_factor={0: 0.0, 1: 0.01}))
    message = world.rejected("a", annotations, cpus, 1, QoSClass.GUARANTEED).message
    assert " (capacity factor 0: drained); NUMA node 1: " in message
    assert message.count(" (capacity factor 0.01)") == 1


@pytest.mark.parametrize("cpus", [1.5, 2])
def test_so_does_a_resize_that_is_rejected(cpus: float) -> None:
    world = World(machines.dual_smt())
    of = pod("a", {**SINGLE, "on-failure": "reject"}, qos=QoSClass.GUARANTEED)
    app = container(of, wants=resources(cpus, 1))
    world.place(of, app)
    both = Settings(capacity_factor={0: 0.0, 1: 0.0})
    world.agent.apply_node_model(replace(world.agent.current.machine, settings=both))
    rejected = world.agent.update_container(of, app, resources(cpus + 2, 1))
    assert isinstance(rejected, Rejected)
    assert "(capacity factor 0: drained)" in rejected.message


# --- Memory that nothing pins: it is used somewhere all the same --------------------------------


def _free_gib(world: World) -> list[float]:
    """As NodeResourceTopology and the extender have it, which is what is admitted."""
    zones = live_view(world.agent, memory=world.reading).scheduler_zones_document().zones
    return [round(zone.memory_available_bytes / GIB, 1) for zone in zones]


@pytest.mark.parametrize(
    ("asks", "left"),
    [
        ({"bind": "cpu", "policy": "single-numa-node"}, [4, 64]),  # where its CPUs are
        ({"numacpu": "0-1,16-17"}, [4, 64]),
        ({"numacpu": "1,9"}, [34, 34]),
        ({}, [34, 34]),
        ({"bind": "none"}, [34, 34]),
    ],
)
def test_unpinned_memory_counts_where_expected(asks: dict[str, str], left: list[float]) -> None:
    world = World(machines.dual_smt(cores_per_numa=8))
    world.put("big", asks, 4, 60)
    assert _free_gib(world) == left
    message = world.rejected("more", SINGLE, 1, max(left) + 1).message
    assert f"{max(left)} GiB" in message
    for lost in (False, True):
        world.restart(lost=lost)
        assert _free_gib(world) == left
    world.reading = MeasuredFree(memory={0: 3 * GIB, 1: 70 * GIB})  # touched by now: counted once
    assert _free_gib(world) == [3, left[1]]
    if not asks:
        assert world.update("big-app", resources(4, 20)) is None
        assert _free_gib(world) == [3, 54]
    world.stop("big-app")
    assert _free_gib(world) == [3, 64]


def test_limits_that_nobody_requested_are_not_counted() -> None:
    world = World(machines.dual_no_smt())
    before = _free_gib(world)
    world.put("limit", {}, 1, 8, QoSClass.BURSTABLE)
    assert _free_gib(world) == before


def test_what_a_pod_has_in_all_is_expected_once() -> None:
    """The kubelet gives containers without resources of their own the pod's limits (KEP-2837)."""
    world = World(two_by_four())
    of = pod("shared", total=resources(2, 4))
    for name in ("a", "b"):
        world.place(of, container(of, name, resources(2, 4)))
    assert _free_gib(world) == [6, 6]
    strangers = World(two_by_four())
    for name in ("a", "b"):
        strangers.meet(of, container(of, name, resources(2, 4)))
    strangers.synchronize()
    assert _free_gib(strangers) == [6, 6]
