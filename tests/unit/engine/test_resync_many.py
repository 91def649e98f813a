"""A node full of containers that nothing asks to pin is taken in at once, with the same result."""

from __future__ import annotations

from nri_numa.engine.decision import Admitted, Machine
from nri_numa.engine.resync import resync
from nri_numa.engine.state import Kind, NodeState, violations
from nri_numa.model.settings import Settings
from tests.beds.world import container, pod, resources
from tests.machines import named as machines


def test_of_two_containers_with_one_name_the_later_takes_the_place() -> None:
    machine = Machine(topology=machines.single_no_smt(), settings=Settings())
    of = pod("twice")
    told = resync(
        machine, NodeState(), [of], [container(of, id="a"), container(of, id="b")], now=7.0
    )
    assert list(told.state.allocations) == ["b"]
    assert told.state.allocations["b"].kind is Kind.UNBOUND
    assert violations(told.state, machine.topology, machine.settings) == []


def test_what_a_synchronisation_keeps_grows_with_the_containers_and_not_faster() -> None:
    """A state is made for each stranger; all of them at once would be megabytes."""
    machine = Machine(topology=machines.single_no_smt(), settings=Settings())
    kept = []
    for count in (50, 200, 800):
        pods = [pod(f"asks-{n}", {"policy": "best-effort"}) for n in range(count)]
        live = [container(p, wants=resources(0.001)) for p in pods]
        told = resync(machine, NodeState(), pods, live, now=7.0)
        assert len(told.gap) == len(told.decisions) == count
        states = {id(d.state): d.state for d in told.decisions if isinstance(d, Admitted)}
        kept.append(sum(len(state.allocations) for state in states.values()))
    assert kept == [0, 0, 0]
