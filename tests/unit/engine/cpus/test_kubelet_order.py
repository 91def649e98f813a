"""The kubelet's order, on the examples of its documentation and on the machines where it errs."""

from __future__ import annotations

from typing import Any

import pytest

from nri_numa.engine.cpus.allocator import NotEnoughCPUs, TakeRequest, take_cpus
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NO_CPUS, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUOrder, Settings
from nri_numa.model.workload import SMT
from tests.machines import named as machines
from tests.unit.engine.cpus.test_allocator import cpus
from tests.unit.engine.cpus.test_allocator import take as taken

PACKED = Settings(cpu_order=CPUOrder.KUBELET, align_l3=False)
CACHES = Settings(cpu_order=CPUOrder.KUBELET, align_l3=True)
DISTRIBUTED = Settings(cpu_order=CPUOrder.KUBELET, align_l3=False, distribute_across_numa=True)


def take(topology: Topology, count: int, settings: Settings = PACKED, **more: Any) -> str:
    return str(taken(topology, count, settings=settings, **more).cpus)


@pytest.mark.parametrize(
    ("count", "without", "expected"),
    [
        (8, "", "0-3,8-11"),  # a whole socket
        (9, "", "0-4,8-11"),  # and one thread of the other
        (1, "", "0"),
        (1, "1", "9"),  # the half-used core has the fewest free CPUs
        (2, "1", "0,8"),  # a whole core before the half-used one
        (4, "0-3,9", "4-5,12-13"),  # whole cores of any socket before single threads
        (0, "", ""),
    ],
)
def test_packed_on_two_sockets_of_four_cores(count: int, without: str, expected: str) -> None:
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4)
    assert take(topology, count, without=without) == expected


def test_packed_takes_whole_sockets_before_whole_numa_nodes_under_them() -> None:
    topology = machines.snc_smt()  # sockets of two NUMA nodes of 8 CPUs
    assert take(topology, 16, without="0") == "8-15,24-31"
    assert take(topology, 24) == "0-11,16-27"
    # The used socket comes first, and in it its untouched NUMA node is taken whole.
    assert take(topology, 8, without="0") == "4-7,20-23"


def test_distribution_in_whole_cores_with_a_remainder() -> None:
    topology = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=2)
    # Five cores of three NUMA nodes: one each, and two of the three give a second one.
    chosen = cpus(take(topology, 10, DISTRIBUTED, smt=SMT.FULL_CORE))
    assert [len(n.cpus & chosen) for n in topology.numa_nodes.values()] == [4, 4, 2, 0]


def test_distribution_in_whole_cores_with_half_a_core_in_the_affinity() -> None:
    topology = machines.dual_adjacent()
    chosen = take(topology, 8, DISTRIBUTED, smt=SMT.FULL_CORE, affinity=NUMASet([1]), without="9")
    assert chosen == "0-1,10-15"


@pytest.mark.parametrize(
    ("count", "without", "expected"),
    [
        (8, "", "0-3,32-35"),  # a whole cache
        (8, "0", "4-7,36-39"),  # the next whole one, not the used one
        (6, "0,32", "1-3,33-35"),  # finished inside the used one
        (6, "0", "4-6,36-38"),  # of the lowest three cores there one is half used: only 5 CPUs
        (7, "0,32", "4-7,36-38"),  # six free are too few; odd: the last thread is left
    ],
)
def test_uncore_caches_of_eight_cpus(count: int, without: str, expected: str) -> None:
    assert take(machines.chiplets(), count, CACHES, without=without) == expected


@pytest.mark.parametrize("settings", [PACKED, Settings(align_l3=False)])
def test_full_pcpus_only_counts_the_siblings_of_reserved_cpus(settings: Settings) -> None:
    """CPU 4 is the sibling of reserved CPU 0: six CPUs are the most that can be given."""
    topology = machines.single_smt()
    assert take(topology, 6, settings, smt=SMT.FULL_CORE, without="0") == "1-3,5-7"
    refused = take_cpus(
        topology,
        TakeRequest(count=8, available=cpus("1-7"), smt=SMT.FULL_CORE, settings=settings),
    )
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.available == cpus("1-3,5-7")
    assert refused.per_numa == {0: 6}


def test_half_a_core_inside_the_affinity_does_not_break_a_core_outside() -> None:
    """The kubelet would fill the affinity with its single CPU and then miss one outside."""
    topology = machines.dual_adjacent()
    chosen = take(topology, 4, smt=SMT.FULL_CORE, affinity=NUMASet([1]), without="9-13")
    assert chosen == "0-1,14-15"
    assert take(topology, 2, smt=SMT.FULL_CORE, affinity=NUMASet([1])) == "8-9"


def test_a_machine_without_caches_has_nothing_to_align_to() -> None:
    assert take(machines.no_caches(), 3, CACHES) == "0-1,8"
    assert take(machines.no_caches(), 0, CACHES) == str(NO_CPUS)
