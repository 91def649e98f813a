"""What one wrong word in the code would change, and rare ways that somebody will meet one day."""

import json
from functools import partial

import pytest
from msgspec.structs import replace

from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.explain import sentences
from nri_numa.engine.node_model import MeasuredFree, NodeModel
from nri_numa.engine.state import ContainerKind
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import (
    ALL_CPUS_AMOUNT,
    AnnotationPermission,
    CPUAmount,
    QuotasAndPoolFloor,
    Settings,
)
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.explained import of_decision
from tests.beds.world import GIB, OWN, PREFIX, SINGLE, World, container, pod, resources, says
from tests.machines import named as machines

ISOLATED = {**OWN, "smt": "isolate"}
BEST_EFFORT, BURSTABLE = QoSClass.BEST_EFFORT, QoSClass.BURSTABLE

usual = partial(World, machines.single_smt())


# --- siblings that are kept idle ----------------------------------------------------------------


def test_isolation_never_takes_the_last_cpus_of_the_shared_pool() -> None:
    """The siblings that are kept idle leave the pool like the CPUs that are owned."""
    world = World(
        machines.single_smt(), Settings(limits=QuotasAndPoolFloor(idle_siblings=ALL_CPUS_AMOUNT))
    )
    answer = world.rejected("all", ISOLATED, 4)
    says(answer, "SharedPoolEmpty", "would leave 0 of the 8 CPUs in the shared pool")
    world.put("own", ISOLATED, 3)
    world.check()
    says(world.update_rejected("own-app", resources(4)), "SharedPoolEmpty")


def test_isolation_leaves_the_shared_pool_its_floor() -> None:
    limits = QuotasAndPoolFloor(idle_siblings=ALL_CPUS_AMOUNT, pool=CPUAmount(4))
    world = World(machines.single_smt(), Settings(limits=limits))
    says(world.rejected("own", ISOLATED, 3), "SharedPoolFloor", "would leave 2 of the 8 CPUs")
    world.put("own", ISOLATED, 2)


def test_isolation_leaves_room_for_what_was_promised_to_those_who_share() -> None:
    """3.5 CPUs are promised; two isolated cores leave four CPUs for them, three would leave two."""
    world = World(
        machines.single_smt(), Settings(limits=QuotasAndPoolFloor(idle_siblings=ALL_CPUS_AMOUNT))
    )
    world.put("shared", SINGLE, 3.5, qos=BURSTABLE)
    says(world.rejected("own", {**ISOLATED, **SINGLE}, 3), "TopologyAffinityError")
    world.put("own", {**ISOLATED, **SINGLE}, 2)
    assert len(world.cpus("shared-app")) == 4


def test_somebody_elses_cpuset_does_not_lead_onto_an_idle_sibling(world: World) -> None:
    world.put("plain", qos=BEST_EFFORT)
    world.put("own", ISOLATED, 1)
    idle = world.agent.current.state.idle_siblings
    assert idle
    world.update("plain-app", Resources(cpus=str(idle)))
    assert world.allocation("plain-app").kind is ContainerKind.UNPINNED
    assert not world.cpus("plain-app") & idle


def test_a_foreign_container_on_an_idle_sibling_is_counted(world: World) -> None:
    world.put("plain", qos=BEST_EFFORT)
    world.update("plain-app", Resources(cpus="3"))
    world.put("own", ISOLATED, 1)
    idle = world.agent.current.state.idle_siblings
    world.update("plain-app", Resources(cpus=str(idle)))
    assert world.allocation("plain-app").kind is ContainerKind.FOREIGN
    assert world.count("foreign_containers_on_exclusive_cpus") == len(idle)


# --- what is given back -------------------------------------------------------------------------


@pytest.mark.parametrize("restart", ["", "restart", "loss"])
def test_huge_pages_are_given_back(restart: str) -> None:
    """Also by a plugin that knows of them from its checkpoint only, or has lost that too."""
    world = World(machines.snc_single(memory_gib=8, hugepages={GIB: 2 * GIB}))
    pages = {GIB: 2 * GIB}
    for name in "ab":
        world.put(name, SINGLE, 1, 1, pages=pages)
    mems = world.has("a-app")[1]
    if restart:
        world.restart(lost=restart == "loss")
    assert "hugepages-1Gi" in world.rejected("c", SINGLE, 1, 1, pages=pages).message
    world.stop("a-app")
    world.put("c", SINGLE, 1, 1, pages=pages)
    assert world.has("c-app")[1] == mems
    assert "hugepages-1Gi" in world.rejected("d", SINGLE, 1, 1, pages=pages).message


# --- who is told --------------------------------------------------------------------------------


def test_a_container_is_not_among_those_who_are_told_of_its_own_change() -> None:
    """The runtime would write it twice, once from its own request and once from the other list."""
    world = World(machines.single_no_smt())
    world.put("own", {"policy": "best-effort"}, 2)
    world.put("plain", qos=BEST_EFFORT)
    world.sent.clear()
    assert world.update("own-app", resources(1.5)) is None
    assert world.allocation("own-app").kind is ContainerKind.SHARED
    assert [u.container_id for u in world.sent] == ["plain-app"]


def test_a_container_that_does_not_exist_yet_is_not_updated() -> None:
    """It takes the place of an owner, which widens the pool that it will be in."""
    world = World(machines.single_no_smt())
    world.ends_whole = False
    of = pod("again", {"policy": "best-effort"})
    world.place(of, container(of, wants=resources(2), id="one"))
    world.put("plain", qos=BEST_EFFORT)
    world.sent.clear()
    world.place(of, container(of, wants=resources(1.5), id="two"))
    assert [u.container_id for u in world.sent] == ["plain-app"]


# --- taken in after a gap -----------------------------------------------------------------------


def test_a_plain_container_of_a_gap_does_not_push_its_neighbour_out_of_the_pod() -> None:
    """When the pod goes without a word, the CPUs of its owner are free again."""
    world = World(machines.single_no_smt())
    of = pod("both", {"cpus.app": "exclusive"})
    world.place(of, wants=resources(2))
    world.put("before", qos=BEST_EFFORT)
    late = container(of, "side", resources(0.5))
    world.live[late.id] = late
    world.restart()
    world.check()
    del world.live[late.id], world.live["both-app"]
    world.remove_pod(of)
    assert not world.agent.current.state.exclusive
    assert world.has("before-app")[0] == "0-3"


def test_an_owner_keeps_its_cpus_where_a_list_was_widened_onto_them() -> None:
    """Both carry our signature; the one that shares is decided anew, not the one that owns."""
    world = World(machines.single_no_smt())
    world.put("a", {"numacpu": "3"}, qos=BEST_EFFORT)
    world.put("z", OWN, 2)
    had = world.cpus("z-app")
    world.unseen("a-app", cpus=f"{had.first_id},3")
    world.restart(lost=True)
    assert world.cpus("z-app") == had
    assert world.cpus("a-app") == CPUSet.parse("3")


def test_a_list_that_was_widened_onto_an_idle_sibling_is_decided_anew(world: World) -> None:
    world.put("own", ISOLATED, 1)
    idle = world.agent.current.state.idle_siblings
    world.put("lists", {"numacpu": "3"}, qos=BEST_EFFORT)
    world.unseen("lists-app", cpus=f"3,{idle}")
    world.restart(lost=True)
    assert world.agent.current.state.idle_siblings == idle
    assert world.cpus("lists-app") == CPUSet.parse("3")
    assert world.allocation("own-app").kind is ContainerKind.EXCLUSIVE


# --- lifted quotas ------------------------------------------------------------------------------


def test_a_lifted_quota_is_not_forgotten_by_a_resize_of_memory() -> None:
    """The limit was 2 and the request 1, so the shares alone would say that it shrank."""
    permission = AnnotationPermission(name="permissions[0]", allow_unrequested_cpus=True)
    world = World(machines.single_no_smt(), Settings(permissions=(permission,)))
    wants = replace(resources(2, 1), cpu_shares=1024)
    world.place(pod("own", OWN, qos=BURSTABLE), wants=wants)
    had = world.cpus("own-app")
    assert len(had) == 2
    assert world.update("own-app", Resources(memory_limit=2 * GIB)) is None
    assert world.cpus("own-app") == had
    assert world.allocation("own-app").lifted_quota == 200_000
    assert world.live["own-app"].resources.cpu_quota == -1


@pytest.mark.parametrize("lost", [False, True])
def test_a_lifted_quota_is_no_resize_after_a_restart(lost: bool) -> None:
    """With a checkpoint the old quota counts; without one, the CPUs that the owner has."""
    permission = AnnotationPermission(name="permissions[0]", allow_unrequested_cpus=True)
    world = World(machines.single_no_smt(), Settings(permissions=(permission,)))
    world.place(pod("own", OWN, qos=BURSTABLE), wants=replace(resources(2, 1), cpu_shares=1024))
    had = world.cpus("own-app")
    if lost:
        world.restart(lost=True)
    for _ in range(2):
        assert world.restart() == ()
    assert world.cpus("own-app") == had


# --- Rare ways through decisions, each of which somebody will meet one day ----------------------


def test_widen_cannot_help_where_no_width_would(world: World) -> None:
    assert (
        world.rejected(
            "a", {"cpus": "exclusive", "smt": "full-core", "on-failure": "best-effort"}, 3
        ).reason
        == "SMTAlignmentError"
    )


def test_an_annotation_that_a_resize_made_stale_is_not_believed(world: World) -> None:
    """It says *owner of CPU 0*; by now it shares the pool, and must not be taken for its owner."""
    world.put("a", {"policy": "best-effort"}, 1, 1)
    assert json.loads(world.live["a-app"].annotations[PREFIX + "assigned"])["kind"] == "exclusive"
    assert world.update("a-app", resources(1.5, 1)) is None
    world.restart(lost=True)
    assert not world.agent.current.state.exclusive


def test_memory_nodes_that_were_widened_since_are_kept_from_the_runtime() -> None:
    """Somebody widened them after the annotation was written; the runtime is the truth."""
    world = World(machines.snc_smt())
    world.put("a", {"policy": "best-effort"}, 1.5, 4, qos=BURSTABLE)
    world.unseen("a-app", mems="0-1")
    world.restart(lost=True)
    assert world.has("a-app")[1] == "0-1"


def test_what_is_booked_on_a_numa_node_that_is_no_longer_used_does_not_count() -> None:
    """A memory tier was listed by hand; computed pins may not use it, and do not see its books."""
    topology = machines.single_smt(cores_per_numa=2, memory_only_gib=[8])
    tier = str(topology.memory_nodes - topology.cpu_nodes)
    world = World(topology, reading=MeasuredFree(memory={0: GIB, int(tier): GIB, 9: 0}))
    world.put("t", {"numacpu": "0", "numamem": tier}, 1, 1)
    assert world.put("a", {"policy": "best-effort"}, 0.5, 0.5, qos=BURSTABLE)[1] == "0"


def test_shared_containers_on_several_nodes_hold_back_no_single_cpu() -> None:
    world = World(machines.dual_no_smt())
    world.put("wide", {"policy": "best-effort", "bind": "cpu"}, 9.5, qos=BURSTABLE)
    assert (
        len(
            CPUSet.parse(
                world.put("own", {**SINGLE, "bind": "cpu", "on-failure": "best-effort"}, 2)[0]
            )
        )
        == 2
    )


def test_a_rejection_names_only_what_is_needed() -> None:
    world = World(machines.dual_smt(), Settings(capacity_factor={0: 0, 1: 0}))
    says(world.rejected("idle", SINGLE, qos=QoSClass.BEST_EFFORT), "", "needs a CPU")
    rejected = world.rejected("bare", {**SINGLE, "bind": "cpu"}, 1.5, 4, qos=BURSTABLE)
    assert "GiB" not in rejected.message
    memory = pod("memory", SINGLE, qos=BURSTABLE)
    rejected = world.reject(memory, wants=Resources(memory_limit=200 * GIB))
    assert "200 GiB memory" in rejected.message
    assert "0 CPUs" not in rejected.message


def test_pairing_across_numa_nodes_is_told_as_the_reason() -> None:
    world = World(machines.dual_smt())
    pair = {"policy": "best-effort", "smt": "pair"}
    world.put("high", {**pair, "load": "high"}, 2, 1)
    low = pod("low", {**pair, "load": "low"})
    decision = admit(world.agent.current.desired, low, container(low, wants=resources(2, 1)))
    assert isinstance(decision, Admitted)
    told = sentences.render_text(of_decision(world.agent.current.machine, decision))
    assert "beside containers of the opposite load" in " ".join(told.split())


def test_a_quota_comes_back_when_an_owner_becomes_shared_without_a_new_one() -> None:
    """A resize by shares alone: what was lifted is written again."""
    world = World(machines.dual_smt())
    world.put("a", SINGLE, 2, 1)
    assert world.live["a-app"].resources.cpu_quota == -1
    world.settings = Settings(disable_cfs_quota=False)
    world.agent.current.machine = NodeModel(topology=world.topology, settings=world.settings)
    assert world.update("a-app", Resources(memory_limit=2 * GIB)) is None
    assert world.live["a-app"].resources.cpu_quota == 200_000
