"""Somebody else writes cpusets: what they make of a container is judged anew at each change."""

from functools import partial

import pytest

from nri_numa.engine.foreign_pins import foreign_pinned_cpus
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.synthetic import Numbering
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Resources
from nri_numa.store import journal
from tests.beds.views import live_view
from tests.beds.world import OWN, SINGLE, World, container, pod
from tests.machines import named as machines

usual = partial(World, machines.single_no_smt())


def plain(world: World, name: str = "plain", cpus: str = "") -> str:
    """A container that asks for nothing, perhaps with a cpuset from somebody else."""
    of = pod(name, qos=QoSClass.BEST_EFFORT)
    made = container(of, wants=Resources(cpus=cpus))
    world.place(of, made)
    return made.id


def test_a_pin_that_is_taken_back_is_no_pin_any_more(world: World) -> None:
    """It was foreign for ever once, and then stayed on the CPU of a later owner."""
    one = plain(world)
    world.update(one, Resources(cpus="2"))
    assert world.allocation(one).kind is ContainerKind.FOREIGN
    world.update(one, Resources(cpus="0-3"))
    assert world.allocation(one).kind is ContainerKind.UNPINNED
    world.put("own", OWN, 1, 1)
    assert world.has(one)[0] == "1-3"
    world.check()
    world.stop("own-app")
    assert world.has(one)[0] == "0-3"


def test_a_pin_on_exclusive_cpus_is_said_when_its_container_is_created(world: World) -> None:
    """Another plugin, called before us, writes a CPU that is exclusive to somebody."""
    world.put("own", OWN, 1, 1)
    assert (world.has("own-app")[0], world.count("foreign_containers_on_exclusive_cpus")) == (
        "0",
        0,
    )
    one = plain(world, cpus="0")
    assert world.allocation(one).kind is ContainerKind.FOREIGN
    assert world.count("foreign_containers_on_exclusive_cpus") == 1
    assert world.count("foreign_overlaps_total") == 1
    actual = {a.id: a.actual for a in live_view(world.agent).list_assignments().containers}
    real = actual[one]
    assert real is not None
    assert (real.cpus, real.on_exclusive_cpus, real.holders) == ("0", True, ("default/own/app",))
    assert real.text == "pinned by another program to CPU 0"
    assert actual["own-app"] is None
    world.stop(one)
    assert world.count("foreign_containers_on_exclusive_cpus") == 0


def test_all_cpus_are_the_shared_pool_while_somebody_owns_some(world: World) -> None:
    one = plain(world)
    world.update(one, Resources(cpus="2-3"))
    world.put("own", OWN, 1, 1)
    world.update(one, Resources(cpus="0-3"))
    assert world.allocation(one).kind is ContainerKind.UNPINNED
    assert world.has(one)[0] == "1-3"
    assert not world.cpus(one) & world.cpus("own-app")
    assert "holds the whole shared pool" in world.allocation(one).reason


def test_the_shared_pool_itself_pins_nobody(world: World) -> None:
    world.put("own", OWN, 1, 1)
    one = plain(world)
    before = world.agent.current.state
    world.update(one, Resources(cpus="1-3"))
    assert world.agent.current.state is before
    world.stop("own-app")
    assert world.has(one)[0] == "0-3"


def test_a_foreign_container_may_go_where_its_manager_says(world: World) -> None:
    """Also onto an owner's CPU: it is left alone, and said and counted."""
    one = plain(world)
    world.put("own", OWN, 1, 1)
    world.update(one, Resources(cpus="3"))
    assert world.count("foreign_containers_on_exclusive_cpus") == 0
    world.update(one, Resources(cpus="0"))
    assert (world.allocation(one).kind, world.has(one)[0]) == (ContainerKind.FOREIGN, "0")
    assert world.cpus("own-app") == CPUSet.parse("0")
    assert world.count("foreign_containers_on_exclusive_cpus") == 1
    world.update(one, Resources(cpus="0-3"))
    assert (world.allocation(one).kind, world.has(one)[0]) == (ContainerKind.UNPINNED, "1-3")
    assert world.count("foreign_containers_on_exclusive_cpus") == 0


@pytest.mark.parametrize("asked", [Resources(cpu_shares=512), Resources(cpus="x"), Resources()])
def test_what_says_nothing_of_cpus_changes_nothing(world: World, asked: Resources) -> None:
    one = plain(world)
    world.update(one, Resources(cpus="3"))
    before = world.agent.current.state
    world.agent.update_container(world.pods["sandbox-plain"], world.live[one], asked)
    assert world.agent.current.state is before


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("now", ["0-3", "1-3", ""])
def test_a_pin_that_was_taken_back_in_a_gap(world: World, now: str, restart: bool) -> None:
    """The plugin is away while somebody writes; the runtime tells afterwards."""
    one = plain(world)
    world.update(one, Resources(cpus="0-2"))  # wide: not kept for last
    world.put("own", OWN, 1, 1)
    assert world.count("foreign_containers_on_exclusive_cpus") == 1
    world.unseen(one, cpus=now)
    if restart:
        world.boot()
    world.synchronize()
    assert (world.allocation(one).kind, world.has(one)[0]) == (ContainerKind.UNPINNED, "1-3")
    assert world.count("foreign_containers_on_exclusive_cpus") == 0


def test_a_pin_that_was_changed_in_a_gap_is_known_as_it_is(world: World) -> None:
    one = plain(world, cpus="3")
    world.put("own", OWN, 1, 1)
    world.unseen(one, cpus="0")
    world.synchronize()
    assert world.has(one)[0] == "0"
    allocation = world.allocation(one)
    assert (allocation.kind, allocation.foreign_cpus) == (ContainerKind.FOREIGN, CPUSet.parse("0"))
    assert world.count("foreign_containers_on_exclusive_cpus") == 1
    assert journal.state_from(world.store.documents)[0].allocations[one] == allocation


def test_a_cpuset_nobody_can_read_stays_as_it_is(world: World) -> None:
    one = plain(world, cpus="3")
    before = world.allocation(one)
    world.unseen(one, cpus="?")
    world.synchronize()
    assert world.allocation(one) == before


@pytest.mark.parametrize(
    ("cpus", "expected"), [("0-3", ContainerKind.UNPINNED), ("1-3", ContainerKind.FOREIGN)]
)
def test_containers_created_with_a_cpuset(world: World, cpus: str, expected: ContainerKind) -> None:
    """All CPUs are what the kubelet's static policy gives to everybody while it pins nobody."""
    one = plain(world, cpus=cpus)
    assert world.allocation(one).kind is expected
    world.put("own", OWN, 1, 1)
    assert world.has(one)[0] == "1-3"
    world.synchronize()
    if expected is ContainerKind.UNPINNED:
        world.check()


def test_all_cpus_do_not_reach_those_that_are_strictly_reserved() -> None:
    settings = Settings(reserved_cpus=CPUSet.parse("0"), strict_cpu_reservation=True)
    world = World(machines.single_no_smt(), settings)
    one = plain(world)
    assert world.has(one)[0] == "1-3"
    world.update(one, Resources(cpus="0-3"))
    assert (world.allocation(one).kind, world.has(one)[0]) == (ContainerKind.UNPINNED, "1-3")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"pinned": "1"}, "only a foreign container is pinned by another program"),
        ({"yieldingCPUs": True}, "only a list of shared CPUs can be soft"),
    ],
)
def test_what_the_checkpoint_says_of_the_wrong_kind_of_container_is_left_out(
    world: World, field: dict[str, object], said: str
) -> None:
    document = world.store.documents["c/" + plain(world)] | field
    _, (problem,) = journal.state_from({"c/plain-app": document})
    assert said in problem


def test_a_cpuset_on_a_container_whose_memory_we_bind_is_answered_with_the_pool() -> None:
    world = World(machines.single_smt())
    world.synchronize()
    world.put("a", {"numamem": "0"})
    assert world.update("a-app", Resources(cpus="0")) is None
    assert world.has("a-app") == (str(world.topology.allowed), "0")


def _elsewhere(world: World) -> CPUSet:
    return foreign_pinned_cpus(world.agent.current.state, world.topology)


@pytest.mark.parametrize("smt", ["any", "spread", "isolate", "full-core", "pair"])
def test_case_15_cpus_that_somebody_else_pinned_are_the_last(smt: str) -> None:
    """Four cores with siblings side by side; the first has a foreign container."""
    world = World(machines.single_smt(numbering=Numbering.ADJACENT))
    plain(world, "kubelets", "0-1")
    world.put("a", {**SINGLE, "smt": smt}, 2, 1)
    assert not world.cpus("a-app") & world.topology.siblings_of(world.cpus("kubelets-app"))


def test_case_15_when_there_are_no_others_they_are_given_and_it_is_said(world: World) -> None:
    plain(world, "kubelets", "0-1")
    assert world.put("a", SINGLE, 3, 1)[0] == "0,2-3"
    assert "CPU 0 is also used by containers that another program pinned there" in world.steps(
        "a-app"
    )


def test_case_15_another_numa_node_comes_first() -> None:
    world = World(machines.dual_no_smt())
    plain(world, "kubelets", "0-3")
    # More of the memory of NUMA node 1 is in use.
    world.put("other", {"numamem": "1"}, 0, 4)
    assert world.put("a", SINGLE, 6, 1)[1] == "1"


def test_case_15_the_kubelets_shared_pool_is_no_pin() -> None:
    """Nearly every container has it: it says nothing about particular CPUs."""
    world = World(machines.dual_no_smt())
    plain(world, "pool", "0-13")
    assert not _elsewhere(world)
    assert world.put("a", SINGLE, 2, 1)[0] == "0-1"


def test_case_15_it_is_known_after_a_restart_and_forgotten_with_the_container(world: World) -> None:
    plain(world, "kubelets", "0-1")
    world.restart()
    assert str(_elsewhere(world)) == "0-1"
    world.stop("kubelets-app")
    assert not _elsewhere(world)


def test_case_15_another_cpuset_from_them_counts(world: World) -> None:
    plain(world, "kubelets", "0-1")
    assert world.update("kubelets-app", Resources(cpus="2-3")) is None
    assert str(_elsewhere(world)) == "2-3"
    assert world.update("kubelets-app", Resources(cpu_shares=512)) is None
    assert str(_elsewhere(world)) == "2-3"
