"""A node full of containers that nothing asks to pin is taken in at once, with the same result."""

from __future__ import annotations

from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted, Machine
from nri_numa.engine.invariants import violations
from nri_numa.engine.resync import resync
from nri_numa.engine.state import Kind, NodeState
from nri_numa.engine.values.settings import Settings
from tests.beds.world import container, pod, resources
from tests.machines import named as machines


def test_containers_nothing_asks_to_pin_get_what_a_decision_each_would_give_them() -> None:
    machine = Machine(topology=machines.single_no_smt(), settings=Settings())
    owner = pod("owner", {"cpus": "exclusive"})
    pods = [owner, *(pod(f"plain-{n}") for n in range(5))]
    live = [
        container(owner, wants=resources(1, 1)),
        *(container(p, name, resources(0.5)) for p in pods[1:] for name in ("app", "side")),
    ]
    told = resync(machine, NodeState(), pods, live, now=7.0)
    state = NodeState()
    for one in sorted(live, key=lambda c: c.id):
        decision = admit(machine, state, next(p for p in pods if p.id == one.pod_id), one, now=7.0)
        assert isinstance(decision, Admitted)
        state = decision.state
    assert told.state.allocations == state.allocations
    assert told.state.pods == state.pods
    assert {k: set(v) for k, v in told.state.groups.items()} == {
        k: set(v) for k, v in state.groups.items()
    }
    assert len(told.left_alone) == 10
    assert [d.allocation.container_id for d in told.decisions if isinstance(d, Admitted)] == [
        "owner-app"
    ]
    # The owner's CPU left the pool, which all others are told.
    assert {u.container_id for u in told.updates} == {c.id for c in live}
    assert violations(told.state, machine.topology, machine.settings) == []


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


def test_no_mark_is_made_for_a_container_that_runs_already() -> None:
    """An annotation can only be written on a container that is being created."""
    machine = Machine(topology=machines.single_no_smt(), settings=Settings(), key=b"signs")
    of = pod("asks", {"policy": "best-effort"})
    one = container(of, wants=resources(0.5))
    created = admit(machine, NodeState(), of, one)
    told = resync(machine, NodeState(), [of], [one])
    assert isinstance(created, Admitted)
    (found,) = told.decisions
    assert isinstance(found, Admitted)
    assert list(created.adjustment.annotations) == ["numa.kubernetes.io/assigned"]
    assert found.adjustment.annotations == {}
    assert found.adjustment.cpus == created.adjustment.cpus
