"""What the agent remembers of containers, and whom it tells of changes."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from nri_numa.agent.agent import DeferredTasks
from nri_numa.engine.decision import Resized
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.world import StillClock, World, container, pod, resources
from tests.machines import named as machines


@pytest.fixture
def world() -> World:
    """An unpinned container beside an owner."""
    world = World(machines.single_no_smt())
    world.synchronize()
    world.place(pod("free", qos=QoSClass.BEST_EFFORT))
    world.place(pod("owner", {"cpus": "exclusive"}), wants=resources(2))
    assert world.has("free-app")[0] == "2-3"
    return world


def test_a_removal_has_no_reply_that_could_widen_others_and_they_are_widened(world: World) -> None:
    del world.live["owner-app"]
    world.agent.remove_container("owner-app")
    assert world.has("free-app")[0] == "0-3"


def test_who_asks_for_cpus_of_an_owner_is_told_whose_they_are(world: World) -> None:
    """Somebody sets the cpuset of a container that nobody pinned."""
    made = world.live["free-app"]
    outcome = world.agent.update_container(world.pods[made.pod_id], made, Resources(cpus="1-3"))
    assert isinstance(outcome, Resized)
    assert outcome.trace.decision_steps == (
        "the shared pool, CPUs 2-3, instead of 1-3: CPU 1 is exclusive to others",
    )


def test_a_container_that_replaced_another_leaves_nothing_of_it_behind(world: World) -> None:
    """The runtime reports the end of the first one only after the second was made."""
    again = pod("again", {"numacpu": "2"})
    world.place(again, container(again, id="first"))
    world.place(again, replace(container(again, id="second"), cgroups_path="/pods/second"))
    assert "first" not in world.agent.containers.cgroup_places, (
        "from then on it is looked at by nobody"
    )
    world.stop("first")
    assert "first" not in world.agent.containers.cgroup_places
    assert world.agent.containers.cgroup_places["second"].cgroups_path == "/pods/second"
    assert world.history.explanation_of("first") is None


CHANGES: dict[str, Callable[[World], object]] = {
    "placed": lambda world: world.place(pod("more", {"numacpu": "2"})),
    "ended": lambda world: world.stop("free-app"),
    "refused": lambda world: world.reject(pod("wrong", {"numacpu": "63"})),
    "settings": lambda world: world.agent.apply_node_model(world.agent.current.machine),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_shows_the_node_is_told_of_every_change(world: World, change: str) -> None:
    told: list[str] = []
    stop = world.agent.current.subscribe(lambda: told.append(change))
    CHANGES[change](world)
    assert told
    stop()
    told.clear()
    world.place(pod("unseen"))
    assert told == []


def test_what_a_task_adds_has_its_turn_a_round_later() -> None:
    """Each of them began two rounds, so that one that follows itself left no time for others."""
    rounds, turns = list[Callable[[], object]](), list[int]()

    def work() -> None:
        turns.append(len(turns))
        tasks.add(work)

    tasks = DeferredTasks(StillClock(later=rounds.append))
    tasks.add(work)
    for _ in range(8):
        waiting, rounds[:] = rounds[:], []
        for one in waiting:
            one()
    assert len(turns) == 8
