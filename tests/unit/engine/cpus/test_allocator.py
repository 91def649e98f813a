"""CPUs on odd machines, and refusals; which a container gets is in tests/golden/choices."""

from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import (
    NO_UNIT,
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.cpus.index import build_allocator_index
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import CPU, Core, CoreKind, L3Group, NUMANode, Socket, Topology
from nri_numa.model.settings import KubeletRules, NohzFullCPUs, Settings
from nri_numa.model.workload import SMT
from tests.machines import named as machines


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def ask(
    topology: Topology,
    count: int,
    *,
    smt: SMT = SMT.ANY,
    without: str = "",
    settings: Settings | None = None,
    **more: Any,
) -> ChosenCPUs | NotEnoughCPUs | SMTMisaligned:
    """Everything is free but what it is without."""
    request = TakeRequest(
        count=count,
        free_cpus=topology.online - cpus(without),
        smt=smt,
        settings=settings or Settings(),
        **more,
    )
    return take_cpus(build_allocator_index(topology), request)


def take(topology: Topology, count: int, **more: Any) -> ChosenCPUs:
    result = ask(topology, count, **more)
    assert isinstance(result, ChosenCPUs), str(result)
    return result


def per_node(topology: Topology, chosen: CPUSet) -> list[int]:
    return [len(n.cpus & chosen) for n in topology.numa_nodes.values() if n.cpus]


# -- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("smt", list(SMT))
def test_a_negative_count_is_a_bug_of_the_caller(smt: SMT) -> None:
    topology = machines.one_cpu()
    with pytest.raises(ValueError, match="-1 CPUs were asked for; expected 0 or more"):
        take_cpus(
            build_allocator_index(topology),
            TakeRequest(count=-1, free_cpus=topology.online, smt=smt),
        )


# -- what to prefer ----------------------------------------------------------------------------


@pytest.mark.parametrize("smt", [SMT.ANY, SMT.FULL_CORE])
def test_a_tick_is_not_worth_another_numa_node(smt: SMT) -> None:
    """Seven threads of NUMA node 0 and two of NUMA node 1 would be without; it is kept to one."""
    topology, tickless = machines.nohz_full_cpus(), Settings(nohz_full=NohzFullCPUs.PREFER)
    assert str(take(topology, 8, smt=smt, settings=tickless).cpus) == "0-3,8-11"
    # Both NUMA nodes are needed: then those without a tick come first.
    assert cpus("1-3,7,9-11,15") <= take(topology, 12, smt=smt, settings=tickless).cpus


# -- odd machines ------------------------------------------------------------------------------


def test_overlapping_numa_nodes_and_caches_count_each_cpu_once() -> None:
    """Firmware that puts a CPU into two NUMA nodes: the lower one keeps it."""
    topology = _partly_without_numa()
    node = topology.numa_nodes[0]
    lying = replace(
        topology,
        numa_nodes={0: node, 1: replace(node, id=1, cpus=cpus("2-4"))},
        l3_groups={
            0: L3Group(id=0, cpus=cpus("0-3")),
            2: L3Group(id=2, cpus=cpus("2-5")),
            9: L3Group(id=9, cpus=NO_CPUS),
        },
    )
    rejected = take_cpus(build_allocator_index(lying), TakeRequest(count=7, free_cpus=lying.online))
    assert isinstance(rejected, NotEnoughCPUs)
    assert rejected.per_numa == {0: 4, 1: 1, NO_UNIT: 1}
    assert len(take(lying, 6).cpus) == 6


def test_a_machine_without_a_single_cpu_rejects() -> None:
    topology = replace(
        machines.one_cpu(),
        cpus={},
        cores={0: Core(id=0, socket=0, numa_node=None, cpus=NO_CPUS)},
        l3_groups={},
        sockets={},
        numa_nodes={},
        online=NO_CPUS,
    )
    rejected = take_cpus(build_allocator_index(topology), TakeRequest(count=1, free_cpus=cpus("0")))
    assert isinstance(rejected, NotEnoughCPUs)


def _partly_without_numa() -> Topology:
    """Six single-threaded cores; 0-3 are NUMA node 0, the kernel names no node for 4 and 5."""
    ids = range(6)
    online = CPUSet(ids)
    node = {i: 0 if i < 4 else None for i in ids}
    return Topology(
        cpus={i: CPU(id=i, core=i, socket=0, numa_node=node[i]) for i in ids},
        cores={
            i: Core(id=i, socket=0, numa_node=node[i], cpus=CPUSet([i]), kind=CoreKind.STANDARD)
            for i in ids
        },
        l3_groups={},
        sockets={0: Socket(id=0, cpus=online, numa_nodes=NUMASet([0]))},
        numa_nodes={0: NUMANode(id=0, cpus=cpus("0-3"), memory_bytes=1, distances={0: 10})},
        online=online,
        present=online,
        possible=online,
        isolated=NO_CPUS,
        allowed=online,
    )


def test_a_numa_node_that_is_nearly_full_is_the_middle_of_no_set() -> None:
    """Of more sets of four than are looked at one by one: all CPUs of four NUMA nodes."""
    topology = machines.sixteen_nodes()
    first = topology.numa_nodes[0].cpus
    taken = take(topology, 4 * len(first), without=str(first - CPUSet([first.first_id])))
    assert sorted(per_node(topology, taken.cpus)) == [0] * 12 + [len(first)] * 4


# -- the kubelet's order, on the examples of its documentation and where it errs ---------------

PACKED = Settings(kubelet=KubeletRules(cpu_order=True), align_l3=False)

DISTRIBUTED = Settings(
    kubelet=KubeletRules(cpu_order=True, distribute_cpus_across_numa=True), align_l3=False
)


def packed(topology: Topology, count: int, settings: Settings = PACKED, **more: Any) -> str:
    return str(take(topology, count, settings=settings, **more).cpus)


def test_distribution_in_whole_cores_with_a_remainder() -> None:
    topology = build_synthetic_topology(sockets=4, numa_per_socket=1, cores_per_numa=2)
    # Five cores of three NUMA nodes: one each, and two of the three give a second one.
    chosen = cpus(packed(topology, 10, DISTRIBUTED, smt=SMT.FULL_CORE))
    assert [len(n.cpus & chosen) for n in topology.numa_nodes.values()] == [4, 4, 2, 0]


def test_distribution_in_whole_cores_with_half_a_core_in_the_affinity() -> None:
    more = {"smt": SMT.FULL_CORE, "affinity": NUMASet([1]), "without": "9"}
    assert packed(machines.dual_adjacent(), 8, DISTRIBUTED, **more) == "0-1,10-15"


def test_distribution_packs_where_nothing_can_be_even() -> None:
    topology = machines.dual_no_smt(cores_per_numa=4)
    # Free: 4 and 1. Five CPUs of two nodes would be 2 + 2 and one more.
    assert packed(topology, 5, DISTRIBUTED, without="5-7") == "0-4"


def test_full_core_restarts_where_it_was() -> None:
    again = take(machines.dual_smt_16(), 4, smt=SMT.FULL_CORE, prefer=cpus("5-6,13-14"))
    assert str(again.cpus) == "5-6,13-14"


@pytest.mark.parametrize("settings", [PACKED, Settings(align_l3=False)])
def test_full_pcpus_only_counts_the_siblings_of_reserved_cpus(settings: Settings) -> None:
    """CPU 4 is the sibling of reserved CPU 0: six CPUs are the most that can be given."""
    topology = machines.single_smt()
    assert packed(topology, 6, settings, smt=SMT.FULL_CORE, without="0") == "1-3,5-7"
    rejected = ask(topology, 8, settings=settings, smt=SMT.FULL_CORE, without="0")
    assert isinstance(rejected, NotEnoughCPUs)
    assert rejected.free_cpus == cpus("1-3,5-7")
    assert rejected.per_numa == {0: 6}
