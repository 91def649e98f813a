"""The serial number tells two states apart: whoever read one asks whether there is a newer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nri_numa.engine.state import Allocation, Kind, NodeState, PodRecord
from nri_numa.engine.values.kubelet import KubeletGrants
from nri_numa.machine.cpuset import CPUSet
from tests.beds.allocations import allocation


def held(name: str, kind: Kind = Kind.UNBOUND, cpus: str = "") -> Allocation:
    return allocation(
        name, kind, container=name, cpus=CPUSet.parse(cpus), owned=kind is Kind.EXCLUSIVE
    )


CHANGES: dict[str, Callable[[NodeState], NodeState]] = {
    "a container is placed": lambda state: state.with_allocation(held("new", Kind.EXCLUSIVE, "2")),
    "many are not bound": lambda state: state.with_unbound([held("new"), held("newer")]),
    "a container ends": lambda state: state.without("old"),
    "a pod is remembered": lambda state: state.with_pod(PodRecord(uid="v", pod_id="q")),
    "the kubelet granted CPUs": lambda state: state.with_kubelet(KubeletGrants()),
    "a pod is forgotten": lambda state: state.without("old").without_pod("u"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_has_the_next_number(change: str) -> None:
    before = NodeState().with_allocation(held("old", Kind.EXPLICIT, "0-1"))
    after = CHANGES[change](before)
    assert after.serial - before.serial == (2 if change == "a pod is forgotten" else 1)


def test_what_changes_nothing_is_the_same_state() -> None:
    before = NodeState().with_allocation(held("old", Kind.EXPLICIT, "0-1"))
    assert before.without_pod("unknown") is before
    assert before.with_unbound([]) is before


def test_many_that_are_not_bound_join_the_containers_of_their_pod() -> None:
    """A pod whose first container is known already keeps it."""
    before = NodeState().with_allocation(held("old", Kind.EXPLICIT, "0-1"))
    after = before.with_unbound([held("new"), held("newer")])
    assert after.pods["u"].containers == {"old", "new", "newer"}
    assert set(after.allocations) == {"old", "new", "newer"}


def test_a_list_that_goes_leaves_what_other_lists_name() -> None:
    state = NodeState()
    for name, cpus in (("a", "0-2"), ("b", "2-3")):
        state = state.with_allocation(held(name, Kind.EXPLICIT, cpus))
    assert str(state.without("a").listed_cpus) == "2-3"
    assert not state.without("a").without("b").listed_cpus
