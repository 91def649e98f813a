"""What one wrong word in the code would change, and what nobody would see before it hurts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Refused
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import EVERYTHING, CPUAmount, Limits, Permission, Settings
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named as machines

OWN = {"cpus": "exclusive"}
ISOLATED = {**OWN, "smt": "isolate"}
SINGLE = {"policy": "single-numa-node"}
BEST_EFFORT, BURSTABLE = QoSClass.BEST_EFFORT, QoSClass.BURSTABLE


def start(
    world: World,
    name: str,
    wishes: dict[str, str] | None = None,
    wants: Resources | None = None,
    qos: QoSClass = QoSClass.GUARANTEED,
) -> str:
    """Place one pod with one container and return the container's id."""
    of = pod(name, wishes, qos=qos)
    made = container(of, wants=wants)
    world.place(of, made)
    return made.id


def refused(world: World, name: str, wishes: dict[str, str], wants: Resources) -> Refused:
    return world.refuse(pod(name, wishes), wants=wants)


def written(world: World, container_id: str, cpus: str) -> None:
    """Somebody else writes a cpuset, and nobody tells us."""
    made = world.live[container_id]
    world.live[container_id] = replace(made, resources=replace(made.resources, cpus=cpus))


def four() -> World:
    return World(machines.single_no_smt())


# --- siblings that are kept idle ------------------------------------------------------------------


def test_isolation_never_takes_the_last_cpus_of_the_shared_pool() -> None:
    """The siblings that are kept idle leave the pool like the CPUs that are owned."""
    world = World(machines.single_smt(), Settings(limits=Limits(idle=EVERYTHING)))
    answer = refused(world, "all", ISOLATED, resources(4))
    assert answer.reason == "SharedPoolEmpty"
    assert "would leave 0 of the 8 CPUs in the shared pool" in answer.message
    own = start(world, "own", ISOLATED, resources(3))
    world.check()
    grown = world.update(own, resources(4))
    assert isinstance(grown, Refused)
    assert grown.reason == "SharedPoolEmpty"
    world.check()


def test_isolation_leaves_the_shared_pool_its_floor() -> None:
    limits = Limits(idle=EVERYTHING, pool=CPUAmount(4))
    world = World(machines.single_smt(), Settings(limits=limits))
    answer = refused(world, "own", ISOLATED, resources(3))
    assert answer.reason == "SharedPoolFloor"
    assert "would leave 2 of the 8 CPUs" in answer.message
    start(world, "own", ISOLATED, resources(2))
    world.check()


def test_isolation_leaves_room_for_what_was_promised_to_those_who_share() -> None:
    """3.5 CPUs are promised; two isolated cores leave four CPUs for them, three would leave two."""
    world = World(machines.single_smt(), Settings(limits=Limits(idle=EVERYTHING)))
    start(world, "shared", SINGLE, resources(3.5), BURSTABLE)
    answer = refused(world, "own", {**ISOLATED, **SINGLE}, resources(3))
    assert answer.reason == "TopologyAffinityError"
    start(world, "own", {**ISOLATED, **SINGLE}, resources(2))
    assert len(world.cpus("shared-app")) == 4


def test_somebody_elses_cpuset_does_not_lead_onto_an_idle_sibling() -> None:
    world = World(machines.single_smt())
    plain = start(world, "plain", qos=BEST_EFFORT)
    start(world, "own", ISOLATED, resources(1))
    idle = world.agent.state.idle
    assert idle
    world.update(plain, Resources(cpus=str(idle)))
    assert world.agent.state.allocations[plain].kind is Kind.UNBOUND
    assert not world.cpus(plain) & idle
    world.check()


def test_a_foreign_container_on_an_idle_sibling_is_counted() -> None:
    world = World(machines.single_smt())
    plain = start(world, "plain", qos=BEST_EFFORT)
    world.update(plain, Resources(cpus="3"))
    start(world, "own", ISOLATED, resources(1))
    idle = world.agent.state.idle
    world.update(plain, Resources(cpus=str(idle)))
    assert world.agent.state.allocations[plain].kind is Kind.FOREIGN
    value = world.metrics.registry.get_sample_value("nri_numa_foreign_on_owned_cpus")
    assert value == len(idle)


# --- what is given back ---------------------------------------------------------------------------


@pytest.mark.parametrize("restart", ["", "restart", "loss"])
def test_huge_pages_are_given_back(restart: str) -> None:
    """Also by a plugin that knows of them from its checkpoint only, or has lost that too."""
    world = World(
        synthetic(
            sockets=1, numa_per_socket=2, cores_per_numa=4, memory_gib=8, hugepages={GIB: 2 * GIB}
        )
    )
    pages = resources(1, 1, hugepages={GIB: 2 * GIB})
    ids = [start(world, name, SINGLE, pages) for name in ("a", "b")]
    mems = world.has(ids[0])[1]
    if restart == "loss":
        world.store.documents.clear()
    if restart:
        world.boot()
        world.synchronize()
    assert "hugepages-1Gi" in refused(world, "c", SINGLE, pages).message
    world.stop(ids[0])
    start(world, "c", SINGLE, pages)
    assert world.has("c-app")[1] == mems
    assert "hugepages-1Gi" in refused(world, "d", SINGLE, pages).message
    world.check()


# --- who is told ----------------------------------------------------------------------------------


def test_a_container_is_not_among_those_who_are_told_of_its_own_change() -> None:
    """The runtime would write it twice, once from its own request and once from the other list."""
    world = four()
    own = start(world, "own", {"policy": "best-effort"}, resources(2))
    plain = start(world, "plain", qos=BEST_EFFORT)
    world.sent.clear()
    assert world.update(own, resources(1.5)) is None
    assert world.agent.state.allocations[own].kind is Kind.SHARED
    assert [u.container_id for u in world.sent] == [plain]


def test_a_container_that_does_not_exist_yet_is_not_updated() -> None:
    """It takes the place of an owner, which widens the pool that it will be in."""
    world = four()
    of = pod("again", {"policy": "best-effort"})
    world.place(of, container(of, wants=resources(2), id="one"))
    plain = start(world, "plain", qos=BEST_EFFORT)
    world.sent.clear()
    world.place(of, container(of, wants=resources(1.5), id="two"))
    assert [u.container_id for u in world.sent] == [plain]


# --- taken in after a gap -------------------------------------------------------------------------


def test_a_plain_container_of_a_gap_does_not_push_its_neighbour_out_of_the_pod() -> None:
    """When the pod goes without a word, the CPUs of its owner are free again."""
    world = four()
    of = pod("both", {"cpus.app": "exclusive"})
    world.place(of, wants=resources(2))
    before = start(world, "before", qos=BEST_EFFORT)
    late = container(of, "side", resources(0.5))
    world.live[late.id] = late
    world.boot()
    world.synchronize()
    world.check()
    del world.live[late.id], world.live["both-app"]
    world.remove_pod(of)
    assert not world.agent.state.owned
    assert world.has(before)[0] == "0-3"
    world.check()


def test_an_owner_keeps_its_cpus_where_a_list_was_widened_onto_them() -> None:
    """Both carry our signature; the one that shares is decided anew, not the one that owns."""
    world = four()
    lists = start(world, "a", {"numacpu": "3"}, qos=BEST_EFFORT)
    own = start(world, "z", OWN, resources(2))
    had = world.cpus(own)
    written(world, lists, f"{had.first},3")
    world.store.documents.clear()
    world.boot()
    world.synchronize()
    assert world.cpus(own) == had
    assert world.cpus(lists) == CPUSet.parse("3")
    world.check()


def test_a_list_that_was_widened_onto_an_idle_sibling_is_decided_anew() -> None:
    world = World(machines.single_smt())
    own = start(world, "own", ISOLATED, resources(1))
    idle = world.agent.state.idle
    lists = start(world, "lists", {"numacpu": "3"}, qos=BEST_EFFORT)
    written(world, lists, f"3,{idle}")
    world.store.documents.clear()
    world.boot()
    world.synchronize()
    assert world.agent.state.idle == idle
    assert world.cpus(lists) == CPUSet.parse("3")
    assert world.agent.state.allocations[own].kind is Kind.EXCLUSIVE
    world.check()


# --- lifted quotas --------------------------------------------------------------------------------


def test_a_lifted_quota_is_not_forgotten_by_a_resize_of_memory() -> None:
    """The limit was 2 and the request 1, so the shares alone would say that it shrank."""
    permission = Permission(name="permissions[0]", unpaid_cpus=True)
    world = World(machines.single_no_smt(), Settings(permissions=(permission,)))
    wants = replace(resources(2, 1), cpu_shares=1024)
    own = start(world, "own", OWN, wants, BURSTABLE)
    had = world.cpus(own)
    assert len(had) == 2
    assert world.update(own, Resources(memory_limit=2 * GIB)) is None
    assert world.cpus(own) == had
    assert world.agent.state.allocations[own].quota == 200_000
    assert world.live[own].resources.cpu_quota == -1
    world.check()


@pytest.mark.parametrize("lost", [False, True])
def test_a_lifted_quota_is_no_resize_after_a_restart(lost: bool) -> None:
    """With a checkpoint the old quota counts; without one, the CPUs that the owner has."""
    permission = Permission(name="permissions[0]", unpaid_cpus=True)
    world = World(machines.single_no_smt(), Settings(permissions=(permission,)))
    own = start(world, "own", OWN, replace(resources(2, 1), cpu_shares=1024), BURSTABLE)
    had = world.cpus(own)
    if lost:
        world.store.documents.clear()
        world.boot()
        world.synchronize()
    for _ in range(2):
        world.boot()
        assert world.synchronize() == ()
    assert world.cpus(own) == had
    world.check()
