"""The kubelet's order, on the examples of its documentation and on the machines where it errs."""

from __future__ import annotations

import pytest

from nri_numa.engine.cpus.allocator import ChosenCPUs, NotEnoughCPUs, TakeRequest, take_cpus
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUOrder, Settings
from nri_numa.model.workload import SMT
from tests.machines import named as machines

PACKED = Settings(cpu_order=CPUOrder.KUBELET, align_l3=False)
CACHES = Settings(cpu_order=CPUOrder.KUBELET, align_l3=True)
DISTRIBUTED = Settings(cpu_order=CPUOrder.KUBELET, align_l3=False, distribute_across_numa=True)


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def take(
    topology: Topology,
    count: int,
    settings: Settings = PACKED,
    *,
    smt: SMT = SMT.ANY,
    without: str = "",
    affinity: NUMASet | None = None,
    prefer: str = "",
    held: str = "",
) -> str:
    gone = cpus(without) | cpus(held)
    result = take_cpus(
        topology,
        TakeRequest(
            count=count,
            available=topology.online - gone,
            smt=smt,
            settings=settings,
            affinity=affinity,
            prefer=cpus(prefer),
            held=cpus(held),
        ),
    )
    return str(result.cpus) if isinstance(result, ChosenCPUs) else str(result)


@pytest.mark.parametrize(
    ("count", "without", "expected"),
    [
        (8, "", "0-3,8-11"),  # a whole socket
        (9, "", "0-4,8-11"),  # and one thread of the other
        (1, "", "0"),
        (1, "1", "9"),  # the half-used core has the fewest free CPUs
        (2, "1", "0,8"),  # a whole core before the half-used one
        (3, "1", "0,8-9"),
        (4, "0-3,9", "4-5,12-13"),  # whole cores of any socket before single threads
        (16, "", "0-15"),
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


def test_packed_goes_socket_by_socket_and_numa_node_by_numa_node() -> None:
    topology = machines.snc_smt()
    # Socket 1 is the more used one, and of it NUMA node 3; there core 12 is half used.
    assert take(topology, 3, without="0,8,24,12,13,29") == "14,28,30"
    assert take(topology, 1, without="0,8,24,12,13,29") == "28"


def test_packed_takes_whole_numa_nodes_of_several_sockets_first() -> None:
    topology = machines.joined_sockets()  # NUMA node 0: CPUs 0-7 and 16-23… of two sockets
    chosen = take(topology, len(topology.numa_nodes[0].cpus), without=str(CPUSet([0])))
    assert chosen == str(topology.numa_nodes[1].cpus)


def test_distribution_leaves_the_machine_most_even() -> None:
    """The pair is chosen that leaves the free counts closest together."""
    topology = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=4, threads=1)
    # Free: 2, 4, 4, 3. Six from two nodes: 3 + 3 from nodes 1 and 2 leaves 2, 1, 1, 3; from 1 and
    # 3 leaves 2, 1, 4, 0; from 2 and 3 likewise; so 1 and 2.
    assert take(topology, 6, DISTRIBUTED, without="0-1,12") == "4-6,8-10"


def test_distribution_in_whole_cores_with_a_remainder() -> None:
    topology = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=2)
    # Five cores of three NUMA nodes: one each, and two of the three give a second one.
    chosen = cpus(take(topology, 10, DISTRIBUTED, smt=SMT.FULL_CORE))
    assert [len(n.cpus & chosen) for n in topology.numa_nodes.values()] == [4, 4, 2, 0]


def test_distribution_in_whole_cores_with_half_a_core_in_the_affinity() -> None:
    topology = machines.dual_adjacent()
    chosen = take(topology, 8, DISTRIBUTED, smt=SMT.FULL_CORE, affinity=NUMASet([1]), without="9")
    assert chosen == "0-1,10-15"


def test_distribution_packs_where_nothing_can_be_even() -> None:
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1)
    # Free: 4 and 1. Five CPUs of two nodes would be 2 + 2 and one more.
    assert take(topology, 5, DISTRIBUTED, without="5-7") == "0-4"


def test_distribution_over_more_numa_nodes_than_the_kubelet_supports() -> None:
    topology = machines.ten_nodes()  # 10 NUMA nodes of 4 CPUs
    chosen = cpus(take(topology, 9, DISTRIBUTED))
    assert sorted(len(n.cpus & chosen) for n in topology.numa_nodes.values())[-3:] == [3, 3, 3]


@pytest.mark.parametrize(
    ("count", "without", "expected"),
    [
        (8, "", "0-3,32-35"),  # a whole cache
        (8, "0", "4-7,36-39"),  # the next whole one, not the used one
        (6, "0,32", "1-3,33-35"),  # finished inside the used one
        (6, "0", "4-6,36-38"),  # of the lowest three cores there one is half used: only 5 CPUs
        (7, "0,32", "4-7,36-38"),  # six free are too few; odd: the last thread is left
        (12, "", "0-5,32-37"),  # a whole cache and part of another
    ],
)
def test_uncore_caches_of_eight_cpus(count: int, without: str, expected: str) -> None:
    assert take(machines.chiplets(), count, CACHES, without=without) == expected


def test_a_request_that_fits_no_cache_goes_on_with_cores() -> None:
    topology = machines.chiplets()
    # Of every cache only three cores are free: four cores come from two caches.
    used = ",".join(f"{i},{i + 32}" for i in range(0, 32, 4))
    assert take(topology, 8, CACHES, without=used) == "1-3,5,33-35,37"


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


def test_cores_are_judged_by_the_machines_average() -> None:
    """6 cores with two threads and 8 with one make 20 / 14 = 1 per core.

    The kubelet then takes cores with one thread as whole and the others thread by thread. No CPU
    is ever taken that is not free, though.
    """
    topology = machines.hybrid()
    assert take(topology, 2) == "12-13"
    assert take(topology, 2, without="0,2") == "1,3"


def test_a_machine_without_caches_has_nothing_to_align_to() -> None:
    assert take(machines.no_caches(), 3, CACHES) == "0-1,8"
    assert take(machines.no_caches(), 0, CACHES) == str(NO_CPUS)
