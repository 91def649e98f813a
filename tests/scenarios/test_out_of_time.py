"""A Synchronize that takes too long: the answer leaves in time, the rest follows after it."""

import itertools
from collections.abc import Callable

import pytest

from nri_numa.agent.current_state import SYNCHRONIZE_BUDGET_S
from nri_numa.engine.state import ContainerKind
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.workload import MemoryPolicies, Resources
from tests.beds.world import SINGLE, World, container, pod, resources
from tests.machines import named as machines


def strangers(world: World, count: int) -> list[str]:
    """Containers that started while we were away, each with a policy and two CPUs of its own."""
    found = []
    for n in range(count):
        of = pod(f"p{n}", SINGLE)
        made = container(of, wants=resources(2, 1))
        world.meet(of, made)
        found.append(made.id)
    return found


def slow(steps: int) -> Callable[[], float]:
    """A clock that has shown its last second after ``steps`` looks."""
    looks = itertools.count()
    return lambda: SYNCHRONIZE_BUDGET_S * next(looks) / steps


def test_the_rest_is_decided_after_the_answer() -> None:
    world = World(machines.dual_smt(), clock=slow(4))
    ids = strangers(world, 8)
    counts = {u.container_id: len(CPUSet.parse(u.cpus)) for u in world.synchronize()}
    assert counts == dict.fromkeys(ids[:3], 2) | dict.fromkeys(ids[3:], 58), (
        "who was decided in time has its CPUs, the others make room"
    )
    world.check()
    kinds = {world.allocation(i).kind for i in ids}
    assert kinds == {ContainerKind.EXCLUSIVE}
    assert len(world.agent.current.state.exclusive) == 16
    assert world.count("missed_starts_total") == 8
    noted = [
        n.pod for n in world.history.notices.notices_after() if n.notice_kind == "missed-start"
    ]
    assert sorted(noted) == [f"p{n}" for n in range(8)]
    assert all(world.history.explanation_of(i) is not None for i in ids), "each can be explained"


@pytest.mark.parametrize(("told", "decided"), [(0.0, 3), (2.0, 3), (1.0, 1), (9.0, 3)])
def test_a_runtime_that_waits_less_is_answered_sooner(told: float, decided: int) -> None:
    """With half of what it tells left for everything else, and never later than otherwise."""
    world = World(machines.dual_smt(), clock=slow(4))
    world.agent.current.set_runtime(MemoryPolicies(), told)
    world.timing.later = lambda function: None
    ids = strangers(world, 8)
    world.synchronize()
    kinds = [world.allocation(i).kind for i in ids]
    assert kinds.count(ContainerKind.EXCLUSIVE) == decided


def test_a_stranger_that_is_rejected_late_runs_on_unpinned() -> None:
    world = World(machines.dual_smt(), clock=slow(1))
    world.meet(pod("big", SINGLE), wants=resources(60, 1))
    world.synchronize()
    assert [r.reason for r in world.history.rejections] == ["TopologyAffinityError"]
    assert world.has("big-app") == ("", "")


def test_what_is_undecided_at_a_crash_is_decided_at_the_next_start() -> None:
    world = World(machines.dual_smt(), clock=slow(1))
    ids = strangers(world, 2)
    world.timing.later = lambda function: None  # we die with the answer
    world.synchronize()
    assert {world.allocation(i).kind for i in ids} == {ContainerKind.UNPINNED}
    world.clock = lambda: 0.0
    world.restart()
    assert {world.allocation(i).kind for i in ids} == {ContainerKind.EXCLUSIVE}


def test_one_that_another_program_pins_while_it_waits_is_decided_at_the_next_start() -> None:
    """It was taken for that program's own, and never had the CPUs that it asks for."""
    world = World(machines.dual_smt(), clock=slow(1))
    (waiting,) = strangers(world, 1)
    world.timing.later = lambda function: None
    world.synchronize()
    world.update(waiting, Resources(cpus="2-3"))
    assert world.allocation(waiting).kind is ContainerKind.FOREIGN
    world.clock = lambda: 0.0
    world.restart()
    assert world.allocation(waiting).kind is ContainerKind.EXCLUSIVE


def test_who_waits_for_a_decision_with_every_cpu_is_nobodys_pin() -> None:
    """Else its CPUs were withheld from everybody; one that somebody pinned keeps its own."""
    world = World(machines.dual_smt(), clock=slow(1))
    wide, narrow, *_ = strangers(world, 4)
    for one, cpus in ((wide, "0-63"), (narrow, "3")):
        world.unseen(one, cpus=cpus)
    world.timing.later = lambda function: None
    world.synchronize()
    kinds = {one: world.allocation(one).kind for one in (wide, narrow)}
    assert kinds == {wide: ContainerKind.UNPINNED, narrow: ContainerKind.FOREIGN}


def test_one_that_stopped_while_it_waited_is_let_be() -> None:
    world = World(machines.dual_smt(), clock=slow(1))
    ids = strangers(world, 3)
    work: list[Callable[[], object]] = []
    world.timing.later = work.append
    world.synchronize()
    world.stop(ids[0])
    while work:
        work.pop()()
    assert len(world.agent.current.state.exclusive) == 4


def test_a_later_synchronize_that_has_time_leaves_nothing_to_do() -> None:
    world = World(machines.dual_smt(), clock=slow(1))
    strangers(world, 3)
    work: list[Callable[[], object]] = []
    world.timing.later = work.append
    world.synchronize()
    world.clock = lambda: 0.0
    world.synchronize()
    owned = world.agent.current.state.exclusive
    assert len(owned) == 6
    while work:
        work.pop()()
    assert world.agent.current.state.exclusive == owned
