"""What one wrong word in the code would change, and what nobody would see before it hurts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

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


def written(world: World, container_id: str, cpus: str) -> None:
    """Somebody else writes a cpuset, and nobody tells us."""
    world.unseen(container_id, cpus=cpus)


def four() -> World:
    return World(machines.single_no_smt())


# --- siblings that are kept idle ------------------------------------------------------------------


def test_isolation_never_takes_the_last_cpus_of_the_shared_pool() -> None:
    """The siblings that are kept idle leave the pool like the CPUs that are owned."""
    world = World(machines.single_smt(), Settings(limits=Limits(idle=EVERYTHING)))
    answer = world.refused("all", ISOLATED, 4)
    assert answer.reason == "SharedPoolEmpty"
    assert "would leave 0 of the 8 CPUs in the shared pool" in answer.message
    world.put("own", ISOLATED, 3)
    world.check()
    grown = world.update_refused("own-app", resources(4))
    assert grown.reason == "SharedPoolEmpty"
    world.check()


def test_isolation_leaves_the_shared_pool_its_floor() -> None:
    limits = Limits(idle=EVERYTHING, pool=CPUAmount(4))
    world = World(machines.single_smt(), Settings(limits=limits))
    answer = world.refused("own", ISOLATED, 3)
    assert answer.reason == "SharedPoolFloor"
    assert "would leave 2 of the 8 CPUs" in answer.message
    world.put("own", ISOLATED, 2)
    world.check()


def test_isolation_leaves_room_for_what_was_promised_to_those_who_share() -> None:
    """3.5 CPUs are promised; two isolated cores leave four CPUs for them, three would leave two."""
    world = World(machines.single_smt(), Settings(limits=Limits(idle=EVERYTHING)))
    world.put("shared", SINGLE, 3.5, qos=BURSTABLE)
    answer = world.refused("own", {**ISOLATED, **SINGLE}, 3)
    assert answer.reason == "TopologyAffinityError"
    world.put("own", {**ISOLATED, **SINGLE}, 2)
    assert len(world.cpus("shared-app")) == 4


def test_somebody_elses_cpuset_does_not_lead_onto_an_idle_sibling() -> None:
    world = World(machines.single_smt())
    world.put("plain", qos=BEST_EFFORT)
    world.put("own", ISOLATED, 1)
    idle = world.agent.state.idle
    assert idle
    world.update("plain-app", Resources(cpus=str(idle)))
    assert world.allocation("plain-app").kind is Kind.UNBOUND
    assert not world.cpus("plain-app") & idle
    world.check()


def test_a_foreign_container_on_an_idle_sibling_is_counted() -> None:
    world = World(machines.single_smt())
    world.put("plain", qos=BEST_EFFORT)
    world.update("plain-app", Resources(cpus="3"))
    world.put("own", ISOLATED, 1)
    idle = world.agent.state.idle
    world.update("plain-app", Resources(cpus=str(idle)))
    assert world.allocation("plain-app").kind is Kind.FOREIGN
    assert world.count("foreign_on_owned_cpus") == len(idle)


# --- what is given back ---------------------------------------------------------------------------


@pytest.mark.parametrize("restart", ["", "restart", "loss"])
def test_huge_pages_are_given_back(restart: str) -> None:
    """Also by a plugin that knows of them from its checkpoint only, or has lost that too."""
    world = World(
        synthetic(
            sockets=1, numa_per_socket=2, cores_per_numa=4, memory_gib=8, hugepages={GIB: 2 * GIB}
        )
    )
    pages = {GIB: 2 * GIB}
    for name in "ab":
        world.put(name, SINGLE, 1, 1, pages=pages)
    mems = world.has("a-app")[1]
    if restart == "loss":
        world.store.documents.clear()
    if restart:
        world.restart()
    assert "hugepages-1Gi" in world.refused("c", SINGLE, 1, 1, pages=pages).message
    world.stop("a-app")
    world.put("c", SINGLE, 1, 1, pages=pages)
    assert world.has("c-app")[1] == mems
    assert "hugepages-1Gi" in world.refused("d", SINGLE, 1, 1, pages=pages).message
    world.check()


# --- who is told ----------------------------------------------------------------------------------


def test_a_container_is_not_among_those_who_are_told_of_its_own_change() -> None:
    """The runtime would write it twice, once from its own request and once from the other list."""
    world = four()
    world.put("own", {"policy": "best-effort"}, 2)
    world.put("plain", qos=BEST_EFFORT)
    world.sent.clear()
    assert world.update("own-app", resources(1.5)) is None
    assert world.allocation("own-app").kind is Kind.SHARED
    assert [u.container_id for u in world.sent] == ["plain-app"]


def test_a_container_that_does_not_exist_yet_is_not_updated() -> None:
    """It takes the place of an owner, which widens the pool that it will be in."""
    world = four()
    of = pod("again", {"policy": "best-effort"})
    world.place(of, container(of, wants=resources(2), id="one"))
    world.put("plain", qos=BEST_EFFORT)
    world.sent.clear()
    world.place(of, container(of, wants=resources(1.5), id="two"))
    assert [u.container_id for u in world.sent] == ["plain-app"]


# --- taken in after a gap -------------------------------------------------------------------------


def test_a_plain_container_of_a_gap_does_not_push_its_neighbour_out_of_the_pod() -> None:
    """When the pod goes without a word, the CPUs of its owner are free again."""
    world = four()
    of = pod("both", {"cpus.app": "exclusive"})
    world.place(of, wants=resources(2))
    world.put("before", qos=BEST_EFFORT)
    late = container(of, "side", resources(0.5))
    world.live[late.id] = late
    world.restart()
    world.check()
    del world.live[late.id], world.live["both-app"]
    world.remove_pod(of)
    assert not world.agent.state.owned
    assert world.has("before-app")[0] == "0-3"
    world.check()


def test_an_owner_keeps_its_cpus_where_a_list_was_widened_onto_them() -> None:
    """Both carry our signature; the one that shares is decided anew, not the one that owns."""
    world = four()
    world.put("a", {"numacpu": "3"}, qos=BEST_EFFORT)
    world.put("z", OWN, 2)
    had = world.cpus("z-app")
    written(world, "a-app", f"{had.first},3")
    world.restart(lost=True)
    assert world.cpus("z-app") == had
    assert world.cpus("a-app") == CPUSet.parse("3")
    world.check()


def test_a_list_that_was_widened_onto_an_idle_sibling_is_decided_anew() -> None:
    world = World(machines.single_smt())
    world.put("own", ISOLATED, 1)
    idle = world.agent.state.idle
    world.put("lists", {"numacpu": "3"}, qos=BEST_EFFORT)
    written(world, "lists-app", f"3,{idle}")
    world.restart(lost=True)
    assert world.agent.state.idle == idle
    assert world.cpus("lists-app") == CPUSet.parse("3")
    assert world.allocation("own-app").kind is Kind.EXCLUSIVE
    world.check()


# --- lifted quotas --------------------------------------------------------------------------------


def test_a_lifted_quota_is_not_forgotten_by_a_resize_of_memory() -> None:
    """The limit was 2 and the request 1, so the shares alone would say that it shrank."""
    permission = Permission(name="permissions[0]", unpaid_cpus=True)
    world = World(machines.single_no_smt(), Settings(permissions=(permission,)))
    wants = replace(resources(2, 1), cpu_shares=1024)
    world.place(pod("own", OWN, qos=BURSTABLE), wants=wants)
    had = world.cpus("own-app")
    assert len(had) == 2
    assert world.update("own-app", Resources(memory_limit=2 * GIB)) is None
    assert world.cpus("own-app") == had
    assert world.allocation("own-app").quota == 200_000
    assert world.live["own-app"].resources.cpu_quota == -1
    world.check()


@pytest.mark.parametrize("lost", [False, True])
def test_a_lifted_quota_is_no_resize_after_a_restart(lost: bool) -> None:
    """With a checkpoint the old quota counts; without one, the CPUs that the owner has."""
    permission = Permission(name="permissions[0]", unpaid_cpus=True)
    world = World(machines.single_no_smt(), Settings(permissions=(permission,)))
    world.place(pod("own", OWN, qos=BURSTABLE), wants=replace(resources(2, 1), cpu_shares=1024))
    had = world.cpus("own-app")
    if lost:
        world.restart(lost=True)
    for _ in range(2):
        assert world.restart() == ()
    assert world.cpus("own-app") == had
    world.check()
