"""Our own order: which NUMA nodes, L3 groups and cores an exclusive container gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nri_numa.engine.cpus.allocator import (
    NOWHERE,
    AllocatorIndex,
    NotEnoughCPUs,
    Taken,
    TakeRequest,
    index,
    take_cpus,
)
from nri_numa.engine.values.settings import (
    CPUOrder,
    IsolatedCPUs,
    NohzFullCPUs,
    PreferredCores,
    Settings,
)
from nri_numa.engine.values.workload import SMT
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.machine.model import CPU, Core, CoreKind, L3Group, NUMANode, Socket, Topology
from nri_numa.machine.synthetic import synthetic
from tests.machines import named as machines


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def take(
    topology: Topology,
    count: int,
    *,
    smt: SMT = SMT.ANY,
    without: str = "",
    held: str = "",
    prefer: str = "",
    affinity: str | None = None,
    strict: bool = False,
    settings: Settings | None = None,
) -> Taken:
    result = take_cpus(
        topology,
        TakeRequest(
            count=count,
            available=topology.online - cpus(without) - cpus(held),
            smt=smt,
            held=cpus(held),
            prefer=cpus(prefer),
            affinity=None if affinity is None else NUMASet.parse(affinity),
            strict=strict,
            settings=settings or Settings(),
        ),
    )
    assert isinstance(result, Taken), str(result)
    return result


def per_node(topology: Topology, chosen: CPUSet) -> list[int]:
    return [len(n.cpus & chosen) for n in topology.numa_nodes.values() if n.cpus]


# -- counts ------------------------------------------------------------------------------------


def test_nothing_is_a_request_like_any_other() -> None:
    taken = take(machines.one_cpu(), 0)
    assert (taken.cpus, taken.idle, taken.notes) == (NO_CPUS, NO_CPUS, ())


@pytest.mark.parametrize("smt", list(SMT))
def test_a_negative_count_is_a_bug_of_the_caller(smt: SMT) -> None:
    topology = machines.one_cpu()
    with pytest.raises(ValueError, match="-1 CPUs were asked for; expected 0 or more"):
        take_cpus(topology, TakeRequest(count=-1, available=topology.online, smt=smt))


@pytest.mark.parametrize("smt", [SMT.ANY, SMT.SPREAD, SMT.PAIR])
def test_more_than_the_machine_is_refused_with_what_each_numa_node_has(smt: SMT) -> None:
    topology = machines.dual_adjacent()
    refused = take_cpus(topology, TakeRequest(count=17, available=cpus("0-11"), smt=smt))
    assert isinstance(refused, NotEnoughCPUs)
    assert refused == NotEnoughCPUs(
        requested=17, available=cpus("0-11"), per_numa={0: 8, 1: 4}, smt=smt
    )
    assert str(refused) == (
        "17 CPUs were asked for, 12 free CPUs are there: NUMA node 0 has 8, NUMA node 1 has 4"
    )


def test_strict_counts_the_affinity_only() -> None:
    topology = machines.dual_adjacent()
    request = TakeRequest(
        count=9, available=topology.online, affinity=NUMASet([1]), strict=True, smt=SMT.ANY
    )
    refused = take_cpus(topology, request)
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.per_numa == {0: 0, 1: 8}
    widened = take_cpus(topology, replace(request, strict=False))
    assert isinstance(widened, Taken)
    assert widened.notes == (
        "1 CPU of NUMA node 0",
        "8 CPUs of NUMA node 1 (4 whole cores)",
        "CPU 0 lies outside NUMA node 1, where no more could be taken",
    )


def test_cpus_that_are_offline_unknown_or_somebody_elses_are_never_taken() -> None:
    topology = machines.offline_cpus()  # 3, 6, 7 and 12 are offline
    request = TakeRequest(
        count=2, available=cpus("3,6-7,12-13,15,99"), busy=cpus("13"), smt=SMT.ANY
    )
    refused = take_cpus(topology, request)
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.available == cpus("15")


def test_a_held_cpu_that_went_offline_is_replaced() -> None:
    taken = take(machines.offline_cpus(), 2, held="2-3")  # CPU 3 is offline
    assert str(taken.cpus) == "0,2"


def test_tables_may_be_kept_by_the_caller() -> None:
    topology = machines.snc_smt()
    tables = index(topology)
    assert isinstance(tables, AllocatorIndex)
    request = TakeRequest(count=5, available=topology.online)
    assert take_cpus(topology, request, tables) == take_cpus(topology, request)


# -- NUMA nodes --------------------------------------------------------------------------------


def test_a_used_numa_node_is_filled_before_a_whole_one_is_broken() -> None:
    topology = machines.dual_adjacent()
    assert str(take(topology, 2, without="8-9").cpus) == "10-11"
    assert str(take(topology, 6, without="8-9").cpus) == "10-15"
    assert str(take(topology, 7, without="8-9").cpus) == "0-6"


def test_of_used_numa_nodes_the_most_used_one() -> None:
    topology = machines.dual_adjacent()
    assert str(take(topology, 2, without="0-1,8-11").cpus) == "12-13"
    assert str(take(topology, 2, without="0-3,8-9").cpus) == "4-5"
    # Of one socket, too.
    assert str(take(machines.snc_smt(), 2, without="0,4-5,8,12").cpus) == "6,22"


def test_a_whole_numa_node_is_taken_when_the_request_is_just_that() -> None:
    topology = _uneven()
    # NUMA node 0 has 4 CPUs, all free; node 1 has 8, one is used. Four fit exactly into node 0.
    assert str(take(topology, 4, without="8").cpus) == "0-3"
    # Three would break node 0, so the used one gives them.
    assert str(take(topology, 3, without="8").cpus) == "9-11"


def test_of_equally_used_numa_nodes_the_one_in_the_used_socket() -> None:
    topology = machines.snc_smt()
    assert str(take(topology, 2, without="8-11,24-27").cpus) == "12,28"


def test_several_numa_nodes_of_one_socket() -> None:
    topology = machines.snc_smt()
    taken = take(topology, 12, without="0")
    # The socket that is used already, and of it the untouched NUMA node whole.
    assert per_node(topology, taken.cpus) == [4, 8, 0, 0]
    taken = take(topology, 20)
    assert sorted(per_node(topology, taken.cpus)) == [0, 4, 8, 8]


def test_one_socket_where_distances_say_nothing() -> None:
    flat = [[10 if i == j else 20 for j in range(4)] for i in range(4)]
    topology = synthetic(sockets=2, numa_per_socket=2, cores_per_numa=4, distances=flat)
    without = str(topology.numa_nodes[0].cpus)
    assert per_node(topology, take(topology, 12, without=without).cpus) == [0, 0, 8, 4]


def test_several_numa_nodes_leave_whole_ones_whole() -> None:
    # NUMA nodes of 8, 4 and 8 CPUs; two of the last are used.
    topology = synthetic(
        sockets=1, numa_per_socket=3, cores_per_numa=8, threads=1, offline=cpus("12-15")
    )
    assert per_node(topology, take(topology, 11, without="16-17").cpus) == [8, 0, 3]
    # All of two whole ones, when that is just what is needed.
    assert per_node(topology, take(topology, 12, without="16-17").cpus) == [8, 4, 0]


def test_the_closest_numa_nodes_go_together() -> None:
    far = [[10, 30, 20, 30], [30, 10, 30, 20], [20, 30, 10, 30], [30, 20, 30, 10]]
    topology = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=2, distances=far)
    assert per_node(topology, take(topology, 6).cpus) == [4, 0, 2, 0]
    assert per_node(topology, take(topology, 6, without="0-1,8").cpus) == [0, 4, 0, 2]


def test_growing_stays_close() -> None:
    far = [[10, 30, 20, 30], [30, 10, 30, 20], [20, 30, 10, 30], [30, 20, 30, 10]]
    topology = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=2, distances=far)
    held = str(topology.numa_nodes[1].cpus)
    assert per_node(topology, take(topology, 6, held=held).cpus) == [0, 4, 0, 2]
    # Beside what it has while there is room, and everything there before anything else.
    assert str(take(topology, 2, held="2").cpus) == "2,10"
    assert per_node(topology, take(topology, 6, held="2", without="3").cpus) == [0, 3, 0, 3]


def test_growing_goes_where_most_of_the_container_is() -> None:
    topology = machines.dual_adjacent()
    taken = take(topology, 4, held="0,8,10", without="2-5")  # although node 0 is more used
    assert per_node(topology, taken.cpus) == [1, 3]


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


def test_align_by_socket_widens_the_affinity_to_its_sockets() -> None:
    topology = machines.snc_smt()
    by_socket = Settings(align_by_socket=True)
    taken = take(topology, 12, affinity="3", strict=True, settings=by_socket)
    assert per_node(topology, taken.cpus)[:2] == [0, 0]
    refused = take_cpus(
        topology,
        TakeRequest(
            count=12, available=topology.online, affinity=NUMASet([3]), strict=True, smt=SMT.ANY
        ),
    )
    assert isinstance(refused, NotEnoughCPUs)


def test_distribute_shares_evenly() -> None:
    even = Settings(distribute_across_numa=True)
    topology = machines.snc_smt()
    assert per_node(topology, take(topology, 12, settings=even).cpus) == [6, 6, 0, 0]
    # The smaller NUMA node gives all it has.
    without = "0-2,16-18"
    assert per_node(topology, take(topology, 15, without=without, settings=even).cpus) == [
        0,
        0,
        7,
        8,
    ]
    assert per_node(topology, take(topology, 8, settings=even).cpus) == [8, 0, 0, 0]
    spread = take(topology, 6, smt=SMT.SPREAD, settings=even)
    assert per_node(topology, spread.cpus) == [3, 3, 0, 0]


@pytest.mark.parametrize("order", list(CPUOrder))
def test_distribute_uses_all_numa_nodes_of_the_hint(order: CPUOrder) -> None:
    """22 CPUs on 0-3, where the GPUs are, of four NUMA nodes with 8 CPUs each."""
    even = Settings(distribute_across_numa=True, cpu_order=order)
    topology = machines.snc_smt()
    taken = take(topology, 22, affinity="0-3", settings=even)
    assert sorted(per_node(topology, taken.cpus)) == [5, 5, 6, 6]
    two = take(topology, 2, affinity="1-2", settings=even)
    assert per_node(topology, two.cpus) == [0, 1, 1, 0]
    assert sorted(per_node(topology, take(topology, 1, affinity="1-2").cpus)) == [
        0,
        0,
        0,
        1,
    ]


def test_distribute_where_one_numa_node_has_little() -> None:
    topology = _uneven()  # 4 and 8 CPUs
    even = Settings(distribute_across_numa=True)
    assert per_node(topology, take(topology, 9, settings=even).cpus) == [4, 5]
    assert per_node(topology, take(topology, 11, settings=even).cpus) == [4, 7]


def test_sixty_four_numa_nodes() -> None:
    topology = machines.sixty_four_nodes()  # 16 sockets of 4 NUMA nodes of 16 CPUs
    taken = take(topology, 40, without="0")
    assert len(topology.numa_of(taken.cpus)) == 3
    assert len({topology.cpus[i].socket for i in taken.cpus}) == 1


def test_sixty_four_numa_nodes_of_which_one_has_little() -> None:
    topology = machines.sixty_four_nodes()
    without = str(topology.numa_nodes[0].cpus - CPUSet([0]))
    taken = take(topology, 48, without=without)  # just three whole NUMA nodes, not the first
    assert len(topology.numa_of(taken.cpus)) == 3
    assert 0 not in topology.numa_of(taken.cpus)


# -- L3 groups ---------------------------------------------------------------------------------


def test_an_l3_group_is_not_split_while_the_request_fits_in_one() -> None:
    topology = machines.chiplets()  # groups of 4 cores: CPUs 0-3,32-35 and so on
    assert str(take(topology, 6).cpus) == "0-2,32-34"
    # The group with the least room that suffices.
    assert str(take(topology, 4, without="0,1,32,33,4,36").cpus) == "2-3,34-35"
    assert str(take(topology, 6, without="0,1,32,33,4,36").cpus) == "5-7,37-39"
    # A whole group, when it is just that.
    assert str(take(topology, 8, without="0").cpus) == "4-7,36-39"


def test_a_request_larger_than_an_l3_group_uses_few_of_them() -> None:
    topology = machines.chiplets()
    taken = take(topology, 12, without="0,32,5,37")
    groups = {topology.cpus[i].l3 for i in taken.cpus}
    assert len(groups) == 2
    # 8 of a whole group, and 4 of the most used one where they fit.
    assert str(taken.cpus) == "1-2,8-11,33-34,40-43"


def test_a_numa_node_is_passed_by_when_its_l3_groups_are_too_full() -> None:
    topology = machines.chiplets()
    # NUMA node 0 has 4 CPUs free in each group; eight of one group are only on node 1.
    without = ",".join(f"{i},{i + 1},{i + 32},{i + 33}" for i in range(0, 16, 4))
    assert str(take(topology, 8, without=without).cpus) == "16-19,48-51"
    off = Settings(align_l3=False)
    assert per_node(topology, take(topology, 8, without=without, settings=off).cpus) == [8, 0]


def test_growing_stays_in_the_l3_group() -> None:
    topology = machines.chiplets()
    assert str(take(topology, 4, held="8,40").cpus) == "8-9,40-41"
    assert str(take(topology, 4, held="8,40", without="0-1,32-33").cpus) == "8-9,40-41"
    assert cpus("8-11,40-43") <= take(topology, 10, held="8,40").cpus


def test_a_whole_l3_group_is_taken_when_the_request_is_just_that() -> None:
    # L3 groups of 4 (0-3) and 8 CPUs (8-15).
    topology = synthetic(
        sockets=1,
        numa_per_socket=1,
        cores_per_numa=16,
        cores_per_l3=8,
        threads=1,
        offline=cpus("4-7"),
    )
    assert str(take(topology, 4, without="8").cpus) == "0-3"
    assert str(take(topology, 3, without="8").cpus) == "9-11"


def test_no_l3_groups_told() -> None:
    assert str(take(machines.no_caches(), 3).cpus) == "0-1,8"


# -- what to prefer ----------------------------------------------------------------------------


def test_a_restarted_container_gets_its_old_cpus() -> None:
    topology = machines.dual_adjacent()
    taken = take(topology, 3, prefer="5,9,13", smt=SMT.SPREAD)
    assert str(taken.cpus) == "5,9,13"
    assert taken.notes[0] == "these are the CPUs it had before"


def test_old_cpus_outside_the_affinity_do_not_count() -> None:
    topology = machines.dual_adjacent()
    taken = take(topology, 2, prefer="2-3", affinity="1")
    assert str(taken.cpus) == "8-9"
    assert "before" not in " ".join(taken.notes)


def test_of_old_cpus_those_that_are_free() -> None:
    topology = machines.dual_adjacent()
    assert str(take(topology, 2, prefer="12-13", without="12").cpus) == "8,13"
    assert str(take(topology, 4, prefer="12-13").cpus) == "8-9,12-13"


def test_old_cpus_that_are_not_all_free_do_not_crowd_a_core() -> None:
    taken = take(machines.dual_adjacent(), 2, prefer="4-5,12", without="12", smt=SMT.SPREAD)
    assert str(taken.cpus) == "0,4"


def test_old_cpus_count_more_than_avoiding_isolated_ones() -> None:
    for smt in (SMT.SPREAD, SMT.ANY, SMT.FULL_CORE):
        taken = take(machines.isolated_cpus(), 6, prefer="2,10", smt=smt)
        assert 2 in taken.cpus


def test_old_cpus_say_nothing_when_the_container_holds_others() -> None:
    assert str(take(machines.dual_adjacent(), 3, held="4", prefer="5,12").cpus) == "4-5,12"


@pytest.mark.parametrize("smt", [SMT.ANY, SMT.SPREAD, SMT.FULL_CORE, SMT.ISOLATE])
def test_isolated_cpus_are_avoided_or_preferred(smt: SMT) -> None:
    topology = machines.isolated_cpus()  # cores 2 and 3 (CPUs 2-3,10-11) of NUMA node 0
    avoid = take(topology, 4, smt=smt, settings=Settings(isolated=IsolatedCPUs.AVOID))
    assert avoid.cpus.isdisjoint(topology.isolated)
    prefer = take(topology, 2, smt=smt, settings=Settings(isolated=IsolatedCPUs.PREFER))
    assert prefer.cpus <= topology.isolated
    anywhere = take(topology, 2, smt=smt, settings=Settings(isolated=IsolatedCPUs.ANY))
    assert anywhere.cpus <= cpus("0-1,8-9")


def test_isolated_cpus_are_used_when_nothing_else_is_left() -> None:
    topology = machines.isolated_cpus()
    assert len(take(topology, 16).cpus) == 16
    # Siblings that the kernel schedules on come before cores that it does not.
    taken = take(topology, 10, smt=SMT.SPREAD)
    assert taken.cpus.isdisjoint(topology.isolated)


def _nohz(count: int, smt: SMT, how: NohzFullCPUs, **more: Any) -> str:
    settings = Settings(nohz_full=how)
    return str(take(machines.nohz_full_cpus(), count, smt=smt, settings=settings, **more).cpus)


@pytest.mark.parametrize(
    ("smt", "count", "prefer", "avoid", "indifferent"),
    [
        # Cores 1-3 of NUMA node 0 and core 7 of NUMA node 1 have no tick, each with its sibling.
        (SMT.ANY, 2, "1,9", "0,8", "0,8"),
        (SMT.FULL_CORE, 2, "1,9", "0,8", "0,8"),
        (SMT.SPREAD, 1, "1", "0", "0"),
        (SMT.ISOLATE, 1, "1", "0", "0"),
        (SMT.PAIR, 1, "1", "0", "0"),
    ],
)
def test_cpus_without_a_tick_are_preferred_or_avoided(
    smt: SMT, count: int, prefer: str, avoid: str, indifferent: str
) -> None:
    assert _nohz(count, smt, NohzFullCPUs.PREFER) == prefer
    assert _nohz(count, smt, NohzFullCPUs.AVOID) == avoid
    assert _nohz(count, smt, NohzFullCPUs.ANY) == indifferent


@pytest.mark.parametrize("smt", [SMT.ANY, SMT.FULL_CORE])
def test_a_tick_is_not_worth_another_numa_node(smt: SMT) -> None:
    """Seven threads of NUMA node 0 and two of NUMA node 1 would be without; it is kept to one."""
    assert _nohz(8, smt, NohzFullCPUs.PREFER) == "0-3,8-11"
    # Both NUMA nodes are needed: then those without a tick come first.
    twelve = cpus(_nohz(12, smt, NohzFullCPUs.PREFER))
    assert cpus("1-3,7,9-11,15") <= twelve


def test_a_tick_is_not_worth_sharing_a_core() -> None:
    taken = cpus(_nohz(4, SMT.SPREAD, NohzFullCPUs.PREFER))
    assert str(taken) == "0-3"


def test_old_cpus_count_more_than_a_tick() -> None:
    for smt in (SMT.SPREAD, SMT.ANY, SMT.FULL_CORE):
        assert 4 in cpus(_nohz(4, smt, NohzFullCPUs.PREFER, prefer="4,12"))


def test_isolated_cpus_are_avoided_first_even_where_they_have_no_tick() -> None:
    topology = replace(machines.isolated_cpus(), nohz_full=cpus("2-3,10-11"))
    taken = take(topology, 4, smt=SMT.ANY)
    assert taken.cpus.isdisjoint(topology.isolated)
    assert topology.nohz_full.isdisjoint(taken.cpus)


def test_preferred_core_kinds() -> None:
    topology = machines.hybrid()  # 0-11 are six performance cores, 12-19 efficient ones
    efficient = Settings(cores=PreferredCores.EFFICIENT)
    performance = Settings(cores=PreferredCores.PERFORMANCE)
    assert str(take(topology, 4, settings=efficient).cpus) == "12-15"
    assert str(take(topology, 4, settings=performance).cpus) == "0-3"
    assert str(take(topology, 4, smt=SMT.SPREAD, settings=efficient).cpus) == "12-15"
    # An efficient core before the second thread of a performance core.
    assert str(take(topology, 8, smt=SMT.SPREAD, settings=performance).cpus) == (
        "0,2,4,6,8,10,12-13"
    )
    assert str(take(topology, 10, settings=efficient).cpus) == "0-1,12-19"


# -- odd machines ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(machines.MACHINES))
@pytest.mark.parametrize("smt", [SMT.ANY, SMT.SPREAD, SMT.FULL_CORE])
def test_every_machine_can_be_given_away_completely(name: str, smt: SMT) -> None:
    topology = machines.MACHINES[name]()
    assert take(topology, len(topology.online), smt=smt).cpus == topology.online


def test_cpus_without_a_numa_node_are_far_from_everything() -> None:
    topology = _partly_without_numa()
    assert str(take(topology, 2).cpus) == "0-1"
    taken = take(topology, 3, held="0")
    assert str(taken.cpus) == "0-2"
    assert take(topology, 5).notes == (
        "4 CPUs of NUMA node 0 (4 whole cores)",
        "1 CPU without a NUMA node (1 whole core)",
    )
    assert str(take(topology, 1, affinity="0", without="0-3").cpus) == "4"
    refused = take_cpus(topology, TakeRequest(count=9, available=topology.online))
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.per_numa == {0: 4, NOWHERE: 2}
    assert str(refused).endswith("NUMA node 0 has 4, CPUs without a NUMA node has 2")


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
    assert str(refused) == "1 CPUs were asked for, 0 free CPUs are there: no CPU at all"


def test_agents_own_cpuset_is_the_callers_business() -> None:
    topology = machines.inside_cpuset()
    taken = take_cpus(topology, TakeRequest(count=8, available=topology.allowed))
    assert isinstance(taken, Taken)
    assert taken.cpus == topology.allowed


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
