"""Which of two NUMA nodes is tried first, by what would be left of their scarcest resource."""

from __future__ import annotations

import pytest

from nri_numa.engine.place.strategy import measures
from nri_numa.engine.values.workload import Strategy
from nri_numa.machine.synthetic import synthetic
from tests.beds.world import GIB, World, container, pod, resources

SPREAD, PACK, MOST = Strategy.SPREAD, Strategy.PACK, Strategy.MOST_LEFT
ALL = {0: 100, 1: 100}


@pytest.mark.parametrize(
    ("strategy", "left", "first"),
    [
        # CPUs, memory: what would be scarcest decides, whichever of the two it is.
        (SPREAD, ({0: 50, 1: 60}, {0: 90, 1: 90}), 1),
        (SPREAD, ({0: 90, 1: 40}, {0: 41, 1: 90}), 0),
        (SPREAD, ({0: 90, 1: 90}, {0: 40, 1: 41}), 1),
        (SPREAD, ({0: 20, 1: 90}, {0: 90, 1: 30}), 1),
        (PACK, ({0: 20, 1: 90}, {0: 90, 1: 30}), 0),
        (PACK, ({0: 50, 1: 60}, {0: 90, 1: 90}), 0),
        # Equally scarce: the next scarcest.
        (SPREAD, ({0: 30, 1: 80}, {0: 70, 1: 30}), 1),
        (PACK, ({0: 30, 1: 80}, {0: 70, 1: 30}), 0),
        # Memory first, then CPUs.
        (MOST, ({0: 90, 1: 10}, {0: 50, 1: 51}), 1),
        (MOST, ({0: 90, 1: 91}, {0: 50, 1: 50}), 1),
        # Huge pages do not count: CPUs do before them.
        (MOST, ({0: 91, 1: 90}, {0: 50, 1: 50}, {0: 20, 1: 21}), 0),
        # Without memory CPUs alone.
        (SPREAD, ({0: 50, 1: 60},), 1),
        (PACK, ({0: 50, 1: 60},), 0),
        (MOST, ({0: 50, 1: 60},), 1),
        # With huge pages too.
        (SPREAD, ({0: 90, 1: 90}, {0: 90, 1: 90}, {0: 20, 1: 21}), 1),
        (PACK, ({0: 90, 1: 90}, {0: 90, 1: 90}, {0: 20, 1: 21}), 0),
        (SPREAD, ({0: 90, 1: 80}, {0: 90, 1: 80}, {0: 20, 1: 70}), 1),
        (PACK, ({0: 90, 1: 80}, {0: 90, 1: 80}, {0: 20, 1: 70}), 0),
    ],
)
def test_the_scarcest_resource_decides(
    strategy: Strategy, left: tuple[dict[int, int], ...], first: int
) -> None:
    found = measures([(10, each, ALL) for each in left], (0, 1), strategy)
    assert found[first] < found[1 - first]


def test_what_a_numa_node_does_not_have_is_in_use_entirely() -> None:
    found = measures([(10, {0: 50, 1: 0}, {0: 100, 1: 0})], (0, 1), SPREAD)
    assert found[0] < found[1]
    assert found[1] == measures([(0, {0: 0}, {0: 100})], (0,), SPREAD)[0]


def test_shares_are_compared_and_not_amounts() -> None:
    """A tenth of a large NUMA node is less than a fifth of a small one."""
    found = measures([(10, {0: 50, 1: 100}, {0: 50, 1: 100})], (0, 1), SPREAD)
    assert found[1] < found[0]


def test_with_spread_huge_pages_that_are_nearly_used_up_are_kept() -> None:
    """Node 0 has most CPUs left, and no huge pages beyond what is asked for."""
    pages = {GIB: 4 * GIB}
    world = World(
        synthetic(
            sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=64,
            hugepages=pages,
        )
    )  # fmt: skip
    one = {"policy": "single-numa-node", "cpus": "exclusive"}
    for name, cpus, gib, where in (("a", 1, 3, "0"), ("b", 2, 0, "1"), ("c", 1, 1, "1")):
        of = pod(name, one)
        wants = resources(cpus, 1, hugepages={GIB: gib * GIB} if gib else None)
        assert world.place(of, container(of, wants=wants))[1] == where
