"""How many CPUs one more container could own: whole cores, and never those that others need."""

from __future__ import annotations

import pytest

from nri_numa.engine.accounting import exclusive_left, share_out
from nri_numa.engine.decision import Machine
from nri_numa.engine.place.quotas import ownable_at_most
from nri_numa.engine.state import Charge, Kind, NodeState
from nri_numa.engine.values.limits import CPUAmount, Limits
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import SMT
from nri_numa.machine.cpuset import CPUSet, NUMASet
from tests.beds.allocations import allocation
from tests.machines import named as machines


def shared(milli: int) -> NodeState:
    """A container on NUMA node 0 that has been promised so much there."""
    return NodeState().with_allocation(
        allocation(kind=Kind.SHARED, numa_nodes=NUMASet([0]), charges={0: Charge(cpu_milli=milli)})
    )


@pytest.mark.parametrize(
    ("smt", "milli", "here"),
    [
        # Eight CPUs, four cores of two threads.
        (SMT.ANY, 0, 8),
        (SMT.ANY, 500, 7),
        (SMT.ANY, 1000, 7),
        (SMT.ANY, 1001, 6),
        (SMT.FULL_CORE, 0, 8),
        (SMT.FULL_CORE, 1000, 6),
        (SMT.FULL_CORE, 3000, 4),
        (SMT.ISOLATE, 0, 4),
        (SMT.ISOLATE, 1000, 3),
        (SMT.ISOLATE, 2000, 3),
        (SMT.ISOLATE, 9000, 0),
    ],
)
def test_what_is_promised_to_others_stays_with_the_pool(smt: SMT, milli: int, here: int) -> None:
    machine = Machine(topology=machines.dual_smt_16(), settings=Settings())
    plenty = {0: 8000, 1: 8000}
    found = exclusive_left(machine, shared(milli), machine.topology.allowed, smt, plenty)
    assert found == {0: here, 1: 4 if smt is SMT.ISOLATE else 8}


def test_no_more_is_owned_than_the_accounting_has() -> None:
    machine = Machine(topology=machines.dual_smt_16(), settings=Settings())
    found = exclusive_left(machine, NodeState(), CPUSet.parse("0-7"), SMT.ANY, {0: 2999})
    assert found == {0: 2, 1: 0}


@pytest.mark.parametrize(
    ("smt", "floor", "most"),
    [
        (SMT.ANY, 1, 15),
        (SMT.FULL_CORE, 1, 14),
        (SMT.ISOLATE, 1, 7),
        (SMT.ANY, 16, 0),
        (SMT.ANY, 20, 0),
    ],
)
def test_the_pool_keeps_its_floor(smt: SMT, floor: int, most: int) -> None:
    settings = Settings(limits=Limits(pool=CPUAmount(floor)))
    machine = Machine(topology=machines.dual_smt_16(), settings=settings)
    assert ownable_at_most(machine, NodeState(), smt) == most


@pytest.mark.parametrize(
    ("milli", "left", "booked"),
    [
        (1000, {0: 8000, 1: 8000}, {0: 500, 1: 500}),
        (1001, {0: 8000, 1: 8000}, {0: 501, 1: 500}),
        (4000, {0: 1000, 1: 8000}, {0: 1000, 1: 3000}),
        (4000, {0: 8000, 1: 1000}, {0: 3000, 1: 1000}),
        # What fits nowhere is spread evenly over what is full.
        (5001, {0: 1000, 1: 1000}, {0: 2501, 1: 2500}),
        (5000, {}, {0: 2500, 1: 2500}),
    ],
)
def test_a_shared_container_is_booked_where_there_is_room(
    milli: int, left: dict[int, int], booked: dict[int, int]
) -> None:
    assert share_out(milli, NUMASet([0, 1]), left) == booked


def test_on_one_numa_node_everything_is_booked_there() -> None:
    assert share_out(4000, NUMASet([1]), {1: 1000}) == {1: 4000}
    assert share_out(4000, NUMASet(), {}) == {}
