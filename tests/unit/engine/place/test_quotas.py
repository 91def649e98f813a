"""How much of the machine stays with the shared pool, and which CPUs those are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nri_numa.engine.decision import Machine
from nri_numa.engine.place.quotas import cpu_count, floor, kept_for_pool
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.limits import CPUAmount, Limits
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.model import Topology
from tests.machines import named as machines


def machine(
    made: Callable[[], Topology], reserved: str = "", *, strict: bool = False, **limits: CPUAmount
) -> Machine:
    return Machine(
        topology=made(),
        settings=Settings(
            reserved_cpus=CPUSet.parse(reserved), strict_reserved=strict, limits=Limits(**limits)
        ),
    )


def test_percentages_are_of_the_cpus_that_containers_may_use() -> None:
    """One that is offline counts: it may come back."""
    topology = machines.dual_smt()
    allowed = replace(topology, allowed=CPUSet(range(60)))
    away = replace(allowed, online=CPUSet(range(62)))
    for found, count in ((topology, 64), (allowed, 60), (away, 62)):
        assert cpu_count(Machine(topology=found, settings=Settings())) == count


@pytest.mark.parametrize(
    ("made", "cpus"),
    [
        (machines.one_cpu, 1),
        (machines.dual_smt_16, 1),
        (machines.ten_nodes, 2),  # of 40
        (machines.dual_smt, 3),  # of 64
        (machines.eight_by_32, 12),  # of 256
    ],
)
def test_a_twentieth_stays_and_one_cpu_at_least(made: Callable[[], Topology], cpus: int) -> None:
    assert floor(machine(made)) == cpus
    # CPUs kept for the system that are no part of the pool say nothing about it.
    assert floor(machine(made, "0", strict=True)) == cpus


def test_where_cpus_of_the_pool_are_reserved_one_is_enough() -> None:
    assert floor(machine(machines.eight_by_32, "0-3")) == 1


@pytest.mark.parametrize(
    ("amount", "cpus"),
    [(CPUAmount(5), 5), (CPUAmount(0), 1), (CPUAmount(percent=10), 25), (CPUAmount(percent=0), 1)],
)
def test_what_is_configured_beats_both(amount: CPUAmount, cpus: int) -> None:
    assert floor(machine(machines.eight_by_32, pool=amount)) == cpus
    assert floor(machine(machines.eight_by_32, "0-3", pool=amount)) == cpus


@pytest.mark.parametrize(
    ("numa_pool", "owned", "listed", "kept"),
    [
        # Node 0 is 0-3,8-11 and node 1 the rest; core 0 is CPUs 0 and 8, core 4 is 4 and 12.
        (0, "", "", ""),
        (1, "", "", "11,15"),
        (2, "", "", "3,7,11,15"),
        (3, "", "", "3,7,10-11,14-15"),
        # Threads of cores in use come before whole cores, the highest of them first.
        (1, "0", "", "8,15"),
        (2, "0-1", "", "7-9,15"),
        # What nobody can own counts: it stays anyway.
        (2, "", "8", "0,7,15"),
        (1, "", "8", "15"),
    ],
)
def test_each_numa_node_keeps_its_part_and_spares_whole_cores(
    numa_pool: int, owned: str, listed: str, kept: str
) -> None:
    where = machine(machines.dual_smt_16, numa_pool=CPUAmount(numa_pool))
    pool = where.topology.allowed - CPUSet.parse(owned)
    free = pool - CPUSet.parse(listed)
    assert str(kept_for_pool(where, NodeState(), pool, free)) == kept


def test_siblings_kept_idle_are_a_quarter_unless_configured() -> None:
    assert Limits().idle.of(100) == 25
