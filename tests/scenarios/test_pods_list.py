"""A list that is given for the pod and exclusive belongs to all containers of the pod."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.model.settings import CPUAmount, Limits, NamespaceQuota, Quota, Settings
from nri_numa.model.workload import PodSandbox, QoSClass
from tests.beds.world import PREFIX, World, container, pod, resources
from tests.machines import named as machines

LIST = {"numacpu": "2-5", "cpus": "exclusive"}
KEEP = Settings(kept_seconds=600.0)


def sixteen(settings: Settings = KEEP) -> World:
    """Two NUMA nodes of 8 CPUs, every CPU a core, and a pod that asks for nothing."""
    world = World(machines.dual_no_smt(), settings)
    world.put("plain", qos=QoSClass.BEST_EFFORT)
    return world


def two(world: World, annotations: dict[str, str] = LIST) -> PodSandbox:
    """A pod of two containers with two CPUs each, both created."""
    of = pod("db", annotations, total=resources(4, 2))
    for name in ("main", "log"):
        assert world.add(of, name, 2, 1) == ("2-5", "")
        world.check()
    return of


def others(world: World) -> str:
    return world.has("plain-app")[0]


def test_two_containers_share_the_list_and_nobody_else_does() -> None:
    world = sixteen()
    two(world)
    state = world.agent.state
    assert str(state.owned) == "2-5"
    assert sum(c.cpu_milli for c in state.charges.values()) == 4000, "counted once"
    assert others(world) == "0-1,6-15"
    refused = world.refused("other", {"numacpu": "5"})
    assert refused.reason == "CPUOwned"
    assert "default/db/log, default/db/main" in refused.message


def test_each_stays_within_its_own_limit() -> None:
    world = sixteen(replace(KEEP, lift_quota=True))
    of = pod("db", LIST, total=resources(5))
    for name, cpus in (("main", 4), ("log", 1)):
        world.add(of, name, cpus)
    assert world.live["db-main"].resources.cpu_quota == -1
    assert world.live["db-log"].resources.cpu_quota == 100_000
    assert world.update("db-log", resources(2)) is None
    assert world.live["db-log"].resources.cpu_quota == 200_000


def test_one_that_ends_takes_nothing_from_the_other() -> None:
    world = sixteen()
    of = two(world)
    assert world.stop("db-log") == ()
    world.check()
    assert str(world.agent.state.owned) == "2-5"
    assert not world.agent.state.kept_for(of.uid), "the other one has them"
    assert world.add(of, "log", 2, 1) == ("2-5", "")
    world.check()
    world.stop("db-main")
    world.stop("db-log")
    assert [str(a.cpus) for a in world.agent.state.kept_for(of.uid)] == ["2-5"]
    assert sum(c.cpu_milli for c in world.agent.state.charges.values()) == 4000
    world.check()
    for name in ("log", "main"):
        assert world.add(of, name, 2, 1) == ("2-5", "")
        world.check()
    world.stop("db-main")
    world.stop("db-log")
    world.agent.stop_pod(of.uid, of.id)
    assert not world.agent.state.owned
    assert not any(c.cpu_milli for c in world.agent.state.charges.values())


@pytest.mark.parametrize("lost", ["nothing", "checkpoint", "checkpoint and key"])
def test_both_are_known_again_after_a_restart(lost: str) -> None:
    world = sixteen()
    two(world)
    before = world.agent.state
    if lost != "nothing":
        world.store.documents.clear()
    if lost == "checkpoint and key":
        world.key = b"another key"
    assert world.restart() == ()
    world.check()
    after = world.agent.state
    assert (after.owned, after.charges) == (before.owned, before.charges)


def test_both_are_found_where_neither_was_seen_to_start() -> None:
    world = sixteen()
    of = pod("db", LIST, total=resources(4, 2))
    for name in ("main", "log"):
        made = container(of, name, resources(2, 1))
        world.pods[of.id], world.live[made.id] = of, made
    world.synchronize()
    world.check()
    assert [world.has(i)[0] for i in ("db-main", "db-log")] == ["2-5", "2-5"]
    assert sum(c.cpu_milli for c in world.agent.state.charges.values()) == 4000


@pytest.mark.parametrize(
    "annotations",
    [
        {**LIST, "numacpu.log": "2-5"},
        {**LIST, "numacpu.main": "2-5"},
        {**LIST, "numacpu.log": "2-3"},
        {"numacpu": "2-5", "cpus.main": "exclusive"},
    ],
)
def test_a_list_of_one_container_is_its_own(annotations: dict[str, str]) -> None:
    world = sixteen()
    of = pod("db", annotations, total=resources(8))
    world.add(of, "main", 4)
    refused = world.refuse(of, container(of, "log", resources(4)))
    assert refused.reason == "CPUOwned"
    assert "default/db/main" in refused.message
    world.check()


def test_requests_of_the_whole_pod_pay_for_its_list() -> None:
    """A small container may be the first, or the only one with the list so far."""
    world = sixteen()
    of = pod("db", LIST, qos=QoSClass.BURSTABLE, total=resources(4.1))
    for name, cpus in (("init", 0.1), ("main", 4.0)):
        assert world.add(of, name, cpus) == ("2-5", "")
    world.check()
    poor = pod("poor", {"numacpu": "8-11", "cpus": "exclusive"}, total=resources(3))
    refused = world.refuse(poor, container(poor, "main", resources(2)))
    assert refused.reason == "UnpaidCPUs"
    assert "CPU requests of its pod pay for 3000m of 4000m" in refused.message


def test_what_others_of_the_pod_have_does_not_pay_for_its_list() -> None:
    world = sixteen()
    own = {**LIST, "numacpu.other": "6-7"}
    of = pod("db", own, total=resources(5))
    world.add(of, "other", 2)
    refused = world.refuse(of, container(of, "main", resources(3)))
    assert refused.reason == "UnpaidCPUs"


def test_where_the_sum_is_not_told_one_of_them_pays() -> None:
    world = sixteen()
    of = pod("db", LIST)
    refused = world.refuse(of, container(of, "log", resources(1)))
    assert refused.reason == "UnpaidCPUs"
    world.add(of, "main", 4)
    assert world.add(of, "log", 1) == ("2-5", "")
    assert world.update("db-log", resources(2)) is None
    world.check()


def test_a_resize_keeps_the_list_while_the_pod_pays_for_it() -> None:
    world = sixteen()
    two(world)
    assert world.update("db-log", resources(3, 2)) is None
    world.check()
    assert world.update("db-log", resources(2, 2)) is None
    less = world.update_refused("db-log", resources(1, 2))
    assert less.reason == "UnpaidCPUs"
    world.check()
    assert sum(c.cpu_milli for c in world.agent.state.charges.values()) == 4000


def test_a_quota_counts_the_list_once() -> None:
    quota = NamespaceQuota(
        name="quotas.namespaces[0]", namespaces=("default",), quota=Quota(exclusive=CPUAmount(6))
    )
    world = sixteen(replace(KEEP, limits=Limits(namespaces=(quota,))))
    two(world)
    of = pod("own", {"cpus": "exclusive"})
    world.add(of, "main", 2)
    world.check()
    of = pod("more", {"cpus": "exclusive"})
    assert world.refuse(of, container(of, "main", resources(1))).reason == "QuotaExceeded"


def test_a_third_container_has_what_the_pod_has_left() -> None:
    world = sixteen()
    of = pod("db", {**LIST, "numacpu.own": "8", "cpus.own": "exclusive"}, total=resources(5))
    for name, cpus in (("main", 2), ("log", 2)):
        world.add(of, name, cpus)
    assert world.add(of, "own", 1) == ("8", "")
    world.check()


def test_the_prefix_of_crio_gives_a_list_for_the_pod_too() -> None:
    world = sixteen()
    domain = PREFIX.removesuffix("/")
    of = pod("db", {"cpus": "exclusive"}, total=resources(4))
    of = replace(of, annotations={**of.annotations, f"numacpu.{domain}/pod": "2-5"})
    for name in ("main", "log"):
        assert world.add(of, name, 2) == ("2-5", "")
    world.check()
