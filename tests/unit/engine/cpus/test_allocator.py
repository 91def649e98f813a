"""Our own order: which NUMA nodes, L3 groups and cores an exclusive container gets."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.engine.cpus.allocator import (
    NOWHERE,
    ChosenCPUs,
    NotEnoughCPUs,
    SMTAlignmentRefused,
    TakeRequest,
    take_cpus,
)
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import CPU, Core, CoreKind, L3Group, NUMANode, Socket, Topology
from nri_numa.model.settings import CPUOrder, NohzFullCPUs, Settings
from nri_numa.model.workload import LOW, SMT
from tests.machines import named as machines


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def ask(
    topology: Topology,
    count: int,
    *,
    smt: SMT = SMT.ANY,
    without: str = "",
    held: str = "",
    prefer: str = "",
    settings: Settings | None = None,
    **more: Any,
) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
    """Everything is free but what it is without and what it holds."""
    request = TakeRequest(
        count=count,
        available=topology.online - cpus(without) - cpus(held),
        smt=smt,
        held=cpus(held),
        prefer=cpus(prefer),
        settings=settings or Settings(),
        **more,
    )
    return take_cpus(topology, request)


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
        take_cpus(topology, TakeRequest(count=-1, available=topology.online, smt=smt))


# -- NUMA nodes --------------------------------------------------------------------------------


def test_a_whole_numa_node_is_taken_when_the_request_is_just_that() -> None:
    topology = _uneven()
    # NUMA node 0 has 4 CPUs, all free; node 1 has 8, one is used. Four fit exactly into node 0.
    assert str(take(topology, 4, without="8").cpus) == "0-3"
    # Three would break node 0, so the used one gives them.
    assert str(take(topology, 3, without="8").cpus) == "9-11"


def test_align_by_socket_prefers_one_socket_to_fewer_numa_nodes() -> None:
    topology = machines.snc_smt()
    # Free: 3 and 3 CPUs in socket 0, 8 in NUMA node 2 and 1 in node 3 of socket 1.
    without = "0-2,16-17,4-6,20-21,12-15,28-30"
    free = topology.online - cpus(without)
    assert per_node(topology, free) == [3, 3, 8, 1]
    taken = take(topology, 9, without=without)
    assert per_node(topology, taken.cpus) == [0, 0, 8, 1]
    three = synthetic(sockets=2, numa_per_socket=3, cores_per_numa=2, threads=1)
    # Free: 1, 1 and 2 CPUs in socket 0; 2, 0 and 1 in socket 1.
    without = "0,2,8-9,10"
    assert per_node(three, three.online - cpus(without)) == [1, 1, 2, 2, 0, 1]
    assert per_node(three, take(three, 4, without=without).cpus) == [0, 0, 2, 2, 0, 0]
    by_socket = Settings(align_by_socket=True)
    taken = take(three, 4, without=without, settings=by_socket)
    assert per_node(three, taken.cpus) == [1, 1, 2, 0, 0, 0]
    taken = take(three, 3, without=without, settings=by_socket)
    assert per_node(three, taken.cpus) == [0, 0, 0, 2, 0, 1]  # the socket with less room
    # No socket has five: several it is.
    assert len(take(three, 5, without=without, settings=by_socket).cpus) == 5


def test_sixty_four_numa_nodes_of_which_one_has_little() -> None:
    topology = machines.sixty_four_nodes()
    without = str(topology.numa_nodes[0].cpus - CPUSet([0]))
    taken = take(topology, 48, without=without)  # just three whole NUMA nodes, not the first
    assert len(topology.numa_of(taken.cpus)) == 3
    assert 0 not in topology.numa_of(taken.cpus)


# -- what to prefer ----------------------------------------------------------------------------


def _nohz(count: int, smt: SMT, how: NohzFullCPUs, **more: Any) -> str:
    settings = Settings(nohz_full=how)
    return str(take(machines.nohz_full_cpus(), count, smt=smt, settings=settings, **more).cpus)


@pytest.mark.parametrize("smt", [SMT.ANY, SMT.FULL_CORE])
def test_a_tick_is_not_worth_another_numa_node(smt: SMT) -> None:
    """Seven threads of NUMA node 0 and two of NUMA node 1 would be without; it is kept to one."""
    assert _nohz(8, smt, NohzFullCPUs.PREFER) == "0-3,8-11"
    # Both NUMA nodes are needed: then those without a tick come first.
    twelve = cpus(_nohz(12, smt, NohzFullCPUs.PREFER))
    assert cpus("1-3,7,9-11,15") <= twelve


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
    refused = take_cpus(lying, TakeRequest(count=7, available=lying.online))
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.per_numa == {0: 4, 1: 1, NOWHERE: 1}
    assert len(take(lying, 6).cpus) == 6


def test_a_machine_without_a_single_cpu_refuses() -> None:
    topology = replace(
        machines.one_cpu(),
        cpus={},
        cores={0: Core(id=0, socket=0, numa_node=None, cpus=NO_CPUS)},
        l3_groups={},
        sockets={},
        numa_nodes={},
        online=NO_CPUS,
    )
    refused = take_cpus(topology, TakeRequest(count=1, available=cpus("0")))
    assert isinstance(refused, NotEnoughCPUs)


def _uneven() -> Topology:
    """Two NUMA nodes without SMT: 4 CPUs (0-3) and 8 CPUs (8-15)."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, offline=cpus("4-7"))


def _partly_without_numa() -> Topology:
    """Six single-threaded cores; 0-3 are NUMA node 0, the kernel names no node for 4 and 5."""
    ids = range(6)
    online = CPUSet(ids)
    node = {i: 0 if i < 4 else None for i in ids}
    return Topology(
        cpus={i: CPU(id=i, core=i, socket=0, numa_node=node[i], l3=None) for i in ids},
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


@pytest.mark.parametrize("order", list(CPUOrder))
def test_distribute_uses_all_numa_nodes_of_the_hint(order: CPUOrder) -> None:
    """22 CPUs on 0-3, where the GPUs are, of four NUMA nodes with 8 CPUs each."""
    even = Settings(distribute_across_numa=True, cpu_order=order)
    topology = machines.snc_smt()
    taken = take(topology, 22, affinity=NUMASet.parse("0-3"), settings=even)
    assert sorted(per_node(topology, taken.cpus)) == [5, 5, 6, 6]
    two = take(topology, 2, affinity=NUMASet([1, 2]), settings=even)
    assert per_node(topology, two.cpus) == [0, 1, 1, 0]
    one = take(topology, 1, affinity=NUMASet([1, 2]))
    assert sorted(per_node(topology, one.cpus)) == [0, 0, 0, 1]


# -- thread siblings ---------------------------------------------------------------------------


def _dual() -> Topology:
    """Two sockets, 2 NUMA nodes, 4 cores each: CPUs 0-3,8-11 and 4-7,12-15."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4)


def test_isolate_is_refused_with_the_free_cores_of_each_numa_node() -> None:
    refused = ask(_dual(), 8, smt=SMT.ISOLATE, without="1,8", busy=cpus("8"))
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.per_numa == {0: 2, 1: 4}


def test_full_core_refuses_what_is_no_multiple_of_the_threads() -> None:
    refused = ask(_dual(), 3, smt=SMT.FULL_CORE, without="8", busy=cpus("8"))
    assert isinstance(refused, SMTAlignmentRefused)
    assert refused.available == cpus("1-7,9-15")


def test_full_core_restarts_where_it_was() -> None:
    assert str(take(_dual(), 4, smt=SMT.FULL_CORE, prefer="5-6,13-14").cpus) == "5-6,13-14"
    # Not whole cores: only the core that they touch is preferred.
    assert str(take(_dual(), 2, smt=SMT.FULL_CORE, prefer="5-6").cpus) == "5,13"


def test_pair_never_busy_neighbours_before_unknown_ones() -> None:
    chosen = take(
        machines.single_smt(), 1, smt=SMT.PAIR, without="0-3", busy=cpus("0-3"), load=LOW,
        loads={1: LOW},
    )  # fmt: skip
    assert str(chosen.cpus) == "5"


def test_kubelet_order_grows_in_place_with_whole_cores() -> None:
    settings = Settings(cpu_order=CPUOrder.KUBELET)
    grown = take(_dual(), 4, smt=SMT.FULL_CORE, held="6,14", settings=settings)
    assert str(grown.cpus) == "4,6,12,14"
