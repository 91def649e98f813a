"""Where memory comes from and what is booked for it, NUMA node by NUMA node."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nri_numa.engine.place.needs import pod_demand
from nri_numa.engine.place.placement import (
    exclusive_text,
    human_bytes,
    human_milli,
    memory_nodes_for,
    per_node,
    spread_charges,
)
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import Charge
from nri_numa.machine.cpuset import NUMASet
from tests.beds.world import pod, resources
from tests.machines import named as machines

MIB2 = 2 << 20


def pages_only(amount: int) -> Charge:
    return Charge(0, 0, {MIB2: amount})


@pytest.mark.parametrize(
    ("cpus", "memory", "left", "pages", "pages_left", "booked"),
    [
        # In the order of ids, each gives what it has.
        ({0: 500}, 5, {0: 3, 1: 9}, {}, {}, {0: Charge(500, 3), 1: Charge(0, 2)}),
        ({0: 500}, 3, {0: 3, 1: 9}, {}, {}, {0: Charge(500, 3)}),
        ({}, 2, {1: 9}, {}, {}, {1: Charge(0, 2)}),
        # What fits nowhere is booked on the first.
        ({}, 9, {0: 3, 1: 2}, {}, {}, {0: Charge(0, 7), 1: Charge(0, 2)}),
        ({}, 9, {}, {}, {}, {0: Charge(0, 9)}),
        # Huge pages by themselves, with or without memory beside them.
        ({}, 0, {}, {MIB2: 5}, {MIB2: {0: 4, 1: 4}}, {0: pages_only(4), 1: pages_only(1)}),
        ({1: 10}, 1, {1: 1}, {MIB2: 2}, {}, {0: pages_only(2), 1: Charge(10, 1)}),
        ({}, 0, {0: 3}, {}, {}, {}),
    ],
)  # fmt: skip
def test_a_grant_is_booked_node_by_node(
    cpus: Mapping[int, int],
    memory: int,
    left: Mapping[int, int],
    pages: Mapping[int, int],
    pages_left: Mapping[int, Mapping[int, int]],
    booked: Mapping[int, Charge],
) -> None:
    both = NUMASet([0, 1])
    assert spread_charges(both, cpus, both, memory, left, pages, pages_left) == booked


def test_nothing_is_booked_where_no_memory_is_touched() -> None:
    booked = spread_charges(NUMASet([1]), {1: 250}, NUMASet(), 9, {0: 9}, {MIB2: 2}, {})
    assert booked == {1: Charge(250)}


def test_memory_is_that_of_the_cpus_or_the_nearest() -> None:
    topology = machines.memory_only()  # 2 and 3 have no CPUs
    everywhere, far = NUMASet([0, 1, 2, 3]), NUMASet([2, 3])
    assert memory_nodes_for(topology, NUMASet([0, 1]), everywhere) == NUMASet([0, 1])
    assert memory_nodes_for(topology, NUMASet([0]), NUMASet()) == NUMASet()
    for numa_node in (0, 1):
        nearest = memory_nodes_for(topology, NUMASet([numa_node]), far)
        least = min(topology.distance(numa_node, other) for other in far)
        assert len(nearest) == 1
        assert topology.distance(numa_node, nearest.first) == least
    # Of equally near ones the lowest; and without any CPUs too.
    assert memory_nodes_for(topology, NUMASet(), far) == NUMASet([2])
    snc = machines.snc_smt()
    assert memory_nodes_for(snc, NUMASet([0]), NUMASet([2, 3])) == NUMASet([2])
    assert memory_nodes_for(snc, NUMASet([0]), NUMASet([1, 2, 3])) == NUMASet([1])


def test_many_numa_nodes_are_cut() -> None:
    some = dict.fromkeys(range(10), "x")
    assert per_node(some, 2) == "NUMA node 0: x; NUMA node 1: x; and 8 more NUMA nodes"
    assert per_node({1: "b", 0: "a"}) == "NUMA node 0: a; NUMA node 1: b"
    assert per_node(dict.fromkeys(range(8), "x")).endswith("NUMA node 7: x")
    assert per_node(dict.fromkeys(range(9), "x")).endswith("NUMA node 7: x; and 1 more NUMA nodes")


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 CPUs"), (1, "0.001 CPUs"), (500, "0.5 CPUs"), (1000, "1 CPU"), (20_000, "20 CPUs")],
)
def test_thousandths_are_said_as_cpus(amount: int, text: str) -> None:
    assert human_milli(amount) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1 << 10, "1.0 KiB"),
        ((1 << 20) - 1, "1024.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
    ],
)
def test_bytes_are_said_in_the_largest_unit(amount: int, text: str) -> None:
    assert human_bytes(amount) == text


def test_one_exclusive_cpu_is_one() -> None:
    assert (exclusive_text(1), exclusive_text(2)) == ("1 exclusive CPU", "2 exclusive CPUs")


@pytest.mark.parametrize(
    ("total", "own", "whole"),
    [(1.998, 1, 1), (1.999, 1, 1), (2, 1, 2), (3.5, 1, 3), (1, 2, 2)],
)
def test_of_the_sum_of_a_pod_only_whole_cpus_are_exclusive(
    total: float, own: int, whole: int
) -> None:
    """What a container with a fraction adds stays in the shared pool."""
    of = pod("p", total=resources(total))
    assert pod_demand(of, Demand(cpu_milli=1000 * own, exclusive_cpus=own)).exclusive_cpus == whole
