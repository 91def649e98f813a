"""What the host took of each NUMA node, and the capacity factors that follow."""

from __future__ import annotations

import pytest

from nri_numa.machine.waiting import CPUTimes, Smoothed, cpu_times, stolen, waiting
from tests.machines import named as machines

STAT = """cpu  1 1 1 1 1 1 1 1 0 0
cpu0 10 0 10 60 0 0 0 20 5 0
cpu1 0 0 0 100 0 0 0 0
cpu2 1 2 3 4
"""
SCHEDSTAT = """version 15
timestamp 4294
cpu0 0 0 0 0 0 0 5000000000 2500000000 9
domain0 00000003 1 2 3
cpu1 0 0 0
"""


def test_the_kernels_texts() -> None:
    times = cpu_times(STAT, SCHEDSTAT)
    assert times.steal == {0: (20, 100), 1: (0, 100)}, "cpu2 is of a kernel without steal"
    assert times.waited == {0: 2.5}
    assert cpu_times("", "") == CPUTimes()


def test_a_numa_node_of_which_nothing_is_known_is_left_out() -> None:
    topology = machines.dual_no_smt()  # node 0 is 0-7, node 1 is 8-15
    before = CPUTimes(
        {0: (0, 0), 1: (0, 0), 2: (50, 100), 3: (0, 100), 8: (0, 100)}, {0: 1.0, 1: 9.0, 8: 5.0}
    )
    after = CPUTimes(
        {0: (50, 100), 1: (0, 100), 2: (40, 200), 3: (0, 100), 8: (0, 100), 9: (0, 1)},
        {0: 2.0, 1: 8.0, 2: 1.0, 9: 1.0},
    )
    assert stolen(before, after, topology) == {0: 0.25}, "2 went back, 3 and 8 stood still"
    assert waiting(before, after, topology, 2.0) == {0: 0.5}
    assert waiting(before, after, topology, 0.0) == {}


def smoothed(floor: float = 0.5) -> Smoothed:
    return Smoothed(half_life=10, step=0.1, floor=floor)


def test_a_factor_follows_slowly_and_in_steps() -> None:
    made = smoothed()
    assert not made.take({0: 0.16, 1: 0.0}, 10), "half of it has arrived: 0.08"
    assert made.take({0: 0.16, 1: 0.0}, 10)
    assert made.factors == {0: 0.88}
    assert not made.take({0: 0.16}, 1000), "0.84 is no step from 0.88"
    assert not made.take({}, 10), "not known is not whole"
    assert not made.take({0: 0.07}, 1000)
    assert made.take({0: 0.0}, 1000)
    assert made.factors == {}


def test_no_factor_is_lower_than_the_floor() -> None:
    made = smoothed()
    assert made.take({0: 1.0}, 1000)
    assert made.factors == {0: 0.5}
    assert not made.take({0: 1.0}, 1000)
    drained = smoothed(floor=0)
    assert drained.take({0: 1.0}, 10_000)
    assert drained.factors == {0: 0}


def test_one_bad_moment_is_no_reason() -> None:
    made = smoothed()
    for _ in range(20):
        assert not made.take({0: 0.5}, 1)
        assert not made.take({0: 0.0}, 9)


def test_steal_that_goes_up_and_down_around_a_step_changes_nothing_again_and_again() -> None:
    made = smoothed()
    changes = sum(made.take({0: 0.14 if n % 2 else 0.07}, 5) for n in range(200))
    assert changes <= 1


@pytest.mark.parametrize("gone", [{0}, {0, 1}])
def test_numa_nodes_that_go_are_forgotten(gone: set[int]) -> None:
    made = smoothed()
    made.take({0: 0.4, 1: 0.4}, 1000)
    made.keep({0, 1} - gone)
    assert set(made.factors) == {0, 1} - gone
