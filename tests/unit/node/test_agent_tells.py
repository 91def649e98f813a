"""Who asked to hear of changes hears of each, and what the agent counts of them is counted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nri_numa.engine.decision import Resized
from nri_numa.engine.values.answers import ContainerUpdate
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import QoSClass, Resources
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.synthetic import synthetic
from tests.beds.world import World, container, pod, resources


@pytest.fixture(name="world")
def _world() -> World:
    world = World(synthetic(sockets=1, numa_per_socket=2, cores_per_numa=4, threads=1))
    world.synchronize()
    world.place(pod("free", qos=QoSClass.BEST_EFFORT))
    return world


def own(world: World, name: str = "owner") -> None:
    of = pod(name, {"cpus": "exclusive"})
    world.place(of, container(of, wants=resources(2, 1)))


def reserved(world: World, cpus: str) -> tuple[ContainerUpdate, ...]:
    """Other CPUs are reserved, which leave the shared pool."""
    settings = replace(world.settings, reserved_cpus=CPUSet.parse(cpus), strict_reserved=True)
    return world.agent.retopology(replace(world.agent.machine, settings=settings))


def test_every_change_is_told(world: World) -> None:
    heard: list[str] = []
    silent = world.agent.subscribe(lambda: heard.append(""))

    def tells() -> bool:
        told = bool(heard)
        heard.clear()
        return told

    own(world)
    assert tells()
    of = pod("big", {"cpus": "exclusive"})
    world.refuse(of, container(of, wants=resources(99)))
    assert tells()
    world.stop("owner-app")
    assert tells()
    world.apply(reserved(world, "0"))
    assert tells()
    silent()
    own(world, "another")
    assert not tells()


def test_the_pool_changes_where_somebody_takes_of_it_or_gives_back(world: World) -> None:
    """Containers of the pool are judged by it only when it has been the same for a while."""
    before = world.agent.pool_changes
    of = pod("shared", {"policy": "best-effort"})
    world.place(of, container(of, wants=resources(0.5, 1)))
    assert world.agent.pool_changes == before
    own(world)
    assert world.agent.pool_changes == before + 1
    world.stop("shared-app")
    assert world.agent.pool_changes == before + 1
    world.stop("owner-app")
    assert world.agent.pool_changes == before + 2
    world.apply(reserved(world, "0"))
    assert world.agent.pool_changes == before + 3


def test_what_other_settings_change_waits_until_it_was_sent(world: World) -> None:
    """Whoever sends these updates may fail, and then they ride on a reply."""
    updates = reserved(world, "0-1")
    assert [(one.container_id, one.cpus) for one in updates] == [("free-app", "2-7")]
    assert world.agent.is_pending("free-app")
    assert world.agent.take_pending() == updates


def test_an_update_without_cpus_overtakes_nothing(world: World) -> None:
    own(world)
    world.apply(world.agent.take_pending())
    world.agent.overtaken([ContainerUpdate("free-app", cpu_quota=1000)])
    assert not world.agent.has_pending
    world.agent.overtaken([ContainerUpdate("gone", cpus="0")])
    assert not world.agent.has_pending
    world.agent.overtaken([ContainerUpdate("free-app", cpus="0")])
    assert world.agent.is_pending("free-app")


def test_what_is_meant_for_somebody_who_is_gone_or_set_otherwise_is_overtaken(
    world: World,
) -> None:
    own(world)
    pool = world.has("free-app")[0]
    assert not world.agent.is_overtaken(ContainerUpdate("free-app", cpus=pool))
    assert not world.agent.is_overtaken(ContainerUpdate("free-app", mems="0"))
    assert world.agent.is_overtaken(ContainerUpdate("free-app", cpus="0-7"))
    assert world.agent.is_overtaken(ContainerUpdate("gone", cpus=pool))
    of = pod("foreign")
    world.place(of, container(of, wants=Resources(cpus="7")))
    assert world.agent.is_overtaken(ContainerUpdate("foreign-app", cpus="7"))


def test_the_same_gap_twice_is_one_refusal(world: World) -> None:
    """A container that nobody could place is told again at each synchronisation."""
    of = pod("big", {"cpus": "exclusive"})
    made = container(of, wants=resources(99))
    world.pods[of.id], world.live[made.id] = of, made
    for _ in range(3):
        world.boot()
        world.synchronize()
    first = len(world.agent.refusals)
    world.synchronize()
    assert len(world.agent.refusals) == first


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_in_which_strangers_are_told_decides_nothing(world: World, reverse: bool) -> None:
    """A runtime lists its containers as it likes."""
    made = []
    for name in ("a", "b", "c"):
        of = pod(name, {"cpus": "exclusive", "policy": "single-numa-node"})
        world.pods[of.id] = of
        made += [container(of, each, resources(1, 1)) for each in ("x", "y")]
    for one in reversed(made) if reverse else made:
        world.live[one.id] = one
    world.synchronize()
    state = world.agent.state
    got = {one.id: str(state.allocations[one.id].cpus) for one in made}
    assert got == {"a-x": "0", "a-y": "4", "b-x": "1", "b-y": "5", "c-x": "2", "c-y": "6"}


def test_a_pod_whose_sandbox_was_made_anew_is_known_by_the_new_one(world: World) -> None:
    """The kubelet makes another sandbox for the same pod, after a reboot of the runtime."""
    of = pod("group", {"policy": "single-numa-node", "scope": "pod"}, total=resources(2, 2))
    world.place(of, container(of, wants=resources(1, 1)))
    world.place(of, container(of, "second", resources(1, 1)))
    assert world.agent.state.pods[of.uid].pod_id == of.id
    affinity = world.agent.state.pods[of.uid].affinity
    again = replace(of, id="another-sandbox")
    del world.pods[of.id]
    world.pods[again.id] = again
    for name in ("group-app", "group-second"):
        world.live[name] = replace(world.live[name], pod_id=again.id)
    world.boot()
    world.synchronize()
    record = world.agent.state.pods[of.uid]
    assert (record.pod_id, record.affinity) == (again.id, affinity)


def test_each_state_has_a_number_of_its_own(world: World) -> None:
    """The state is compared by it, and so is what a reader has seen."""
    numbers = [world.agent.state.serial]
    own(world)
    numbers.append(world.agent.state.serial)
    of = pod("free-too", qos=QoSClass.BEST_EFFORT)
    world.place(of)
    numbers.append(world.agent.state.serial)
    world.stop("owner-app")
    numbers.append(world.agent.state.serial)
    for name in ("x", "y"):
        of = pod(name, qos=QoSClass.BEST_EFFORT)
        world.pods[of.id], world.live[f"{name}-app"] = of, container(of)
    world.synchronize()
    numbers.append(world.agent.state.serial)
    assert numbers == sorted(set(numbers))


def test_a_container_that_ends_is_said_with_what_it_gives_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    own(world)
    caplog.clear()
    world.stop("owner-app")
    said = [one for one in caplog.records if one.message == "container released"]
    assert len(said) == 1
    assert vars(said[0])["fields"]["cpus"] == "0-1"


def test_who_asks_for_cpus_of_an_owner_is_told_whose_they_are(world: World) -> None:
    """Somebody sets the cpuset of a container that nobody pinned."""
    own(world)
    made = world.live["free-app"]
    outcome = world.agent.update_container(world.pods[made.pod_id], made, Resources(cpus="1-3"))
    assert isinstance(outcome, Resized)
    assert outcome.trace.steps == (
        "CPUs 2-7, which everybody shares, instead of 1-3: CPU 1 is exclusive to others",
    )


@pytest.mark.parametrize("lifted", [True, False])
def test_an_owner_that_was_put_onto_the_cpus_of_another_is_put_back(
    world: World, lifted: bool
) -> None:
    """Somebody gave both the same CPUs while nobody looked."""
    world = World(world.topology, Settings(lift_quota=lifted))
    world.synchronize()
    own(world, "first")
    own(world, "second")
    had = {name: world.has(f"{name}-app") for name in ("first", "second")}
    assert had["first"] != had["second"]
    second = world.live["second-app"]
    cpus, mems = had["first"]
    world.live["second-app"] = replace(
        second, resources=replace(second.resources, cpus=cpus, mems=mems)
    )
    world.boot()
    updates = {one.container_id: one.cpus for one in world.synchronize()}
    assert updates == {"second-app": had["second"][0]}
    assert world.has("second-app")[0] == had["second"][0]
