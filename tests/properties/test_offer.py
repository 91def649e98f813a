"""What is offered to the scheduler is given, whatever else happened on the node before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.accounting import slot_capacity
from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Container, PodSandbox
from tests.beds.world import PREFIX, World, container, pod, resources
from tests.properties.test_accounting import MACHINES, Steps, lived, pods, setting

smts = st.sampled_from(["", "any", "spread", "isolate"])


def _lived(number: int, settings: Settings, steps: Steps, *, slots: bool) -> World:
    """Some of those with CPUs of their own have slots for them."""

    def change(n: int, made: Container) -> Container:
        _, cpus, _, milli, _ = steps[n]
        return with_slots(made, milli / 1000) if slots and cpus == "exclusive" else made

    return lived(World(MACHINES[number](), settings), steps, change)


def with_slots(made: Container, cpus: float, on: int | None = None) -> Container:
    if cpus != int(cpus):
        return made
    node = "" if on is None else f"numa{on}-"
    ids = ",".join(f"{node}slot-{n}" for n in range(int(cpus)))
    return replace(made, annotations={f"{PREFIX}slots": ids})


def _one(name: str, cpus: float, on: int | None = None) -> tuple[PodSandbox, Container]:
    of = pod(name, {})
    return of, with_slots(container(of, wants=resources(cpus, 0.01)), cpus, on)


@hypothesis_settings(deadline=None)
@given(st.integers(0, len(MACHINES) - 1), setting, pods, smts, st.booleans())
def test_every_slot_that_is_offered_is_given_one_by_one(
    number: int,
    settings: Settings,
    steps: Steps,
    smt: str,
    slots: bool,
) -> None:
    settings = replace(settings, defaults={"smt": smt, "bind": "cpu"} if smt else {"bind": "cpu"})
    world = _lived(number, settings, steps, slots=slots)
    machine, state = world.agent.machine, world.agent.state
    before = slot_capacity(machine, state)
    assert all(n >= 0 for n in (*before.free.values(), *before.held.values()))
    for n in range(sum(before.free.values())):
        decision = admit(machine, state, *_one(f"slot{n}", 1))
        assert isinstance(decision, Admitted), (n, before)
        state = decision.state
        if smt != "isolate":
            assert slot_capacity(machine, state).total == before.total


@hypothesis_settings(deadline=None)
@given(st.integers(0, len(MACHINES) - 1), setting, pods)
def test_and_on_the_numa_node_that_the_kubelet_chose(
    number: int, settings: Settings, steps: Steps
) -> None:
    settings = replace(settings, defaults={"bind": "cpu"})
    world = _lived(number, settings, steps, slots=True)
    machine, state = world.agent.machine, world.agent.state
    for i, count in slot_capacity(machine, state).free.items():
        if not count:
            continue
        decision = admit(machine, state, *_one("one-more", count, i))
        assert isinstance(decision, Admitted), (i, count)
        assert decision.allocation.cpus <= machine.node_cpus[i]
        assert len(decision.allocation.cpus) == count
