"""Thread siblings: which CPUs each mode takes, and beside whom."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nri_numa.engine.cpus.allocator import (
    NotEnoughCPUs,
    SMTAlignmentRefused,
    Taken,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.cpus.smt import CoreClass, counts_that_fit
from nri_numa.engine.request.load import parse_load
from nri_numa.engine.values.settings import CPUOrder, PreferredCores, Settings
from nri_numa.engine.values.workload import HIGH, LOW, SMT, Load
from nri_numa.machine.cpuset import CPUSet, NUMASet
from nri_numa.machine.model import Topology
from nri_numa.machine.synthetic import synthetic
from tests.machines import named as machines

DAY = parse_load("09:00-18:00")
NIGHT = parse_load("22:00-06:00")


def cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


def take(
    topology: Topology,
    count: int,
    smt: SMT,
    *,
    others: str = "",
    reserved: str = "",
    held: str = "",
    prefer: str = "",
    load: Load | None = None,
    loads: Mapping[int, Load] | None = None,
    affinity: NUMASet | None = None,
    settings: Settings | None = None,
) -> Taken:
    """Take with everything free but others' and reserved CPUs; fails on a refusal."""
    result = ask(
        topology,
        count,
        smt,
        others=others,
        reserved=reserved,
        held=held,
        prefer=prefer,
        load=load,
        loads=loads,
        affinity=affinity,
        settings=settings,
    )
    assert isinstance(result, Taken), str(result)
    return result


def ask(
    topology: Topology,
    count: int,
    smt: SMT,
    *,
    others: str = "",
    reserved: str = "",
    held: str = "",
    prefer: str = "",
    load: Load | None = None,
    loads: Mapping[int, Load] | None = None,
    affinity: NUMASet | None = None,
    settings: Settings | None = None,
) -> Taken | NotEnoughCPUs | SMTAlignmentRefused:
    return take_cpus(
        topology,
        TakeRequest(
            count=count,
            available=topology.online - cpus(others) - cpus(reserved) - cpus(held),
            smt=smt,
            held=cpus(held),
            prefer=cpus(prefer),
            load=load,
            loads=loads or {},
            busy=cpus(others),
            affinity=affinity,
            settings=settings or Settings(),
        ),
    )


# -- any ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "others", "expected"),
    [
        (1, "", "0"),
        (2, "", "0,8"),
        (3, "", "0-1,8"),
        (1, "1", "9"),  # a half-used core before a whole one
        (2, "1", "0,8"),  # a whole core before a half-used one
        (3, "1", "0,8-9"),
        (2, "0-2", "3,11"),
        (3, "0-2", "3,8,11"),
        (4, "0-3", "8-11"),
    ],
)
def test_any_takes_what_fits_best(count: int, others: str, expected: str) -> None:
    assert str(take(_dual(), count, SMT.ANY, others=others).cpus) == expected


def test_any_completes_its_own_core_when_it_grows() -> None:
    assert str(take(_dual(), 2, SMT.ANY, held="2", others="1").cpus) == "2,10"
    assert str(take(_dual(), 3, SMT.ANY, held="2").cpus) == "0,2,10"


def test_any_with_four_threads_per_core() -> None:
    """The largest parts that fit, then the smallest part that is larger, then a whole core."""
    topology = synthetic(
        sockets=1, numa_per_socket=1, cores_per_numa=4, threads=4, numbering="adjacent"
    )
    # Free: 1 of core 0, 2 of core 1, 3 of core 2, all of core 3.
    others = "0-2,4-5,8"
    assert str(take(topology, 1, SMT.ANY, others=others).cpus) == "3"
    assert str(take(topology, 2, SMT.ANY, others=others).cpus) == "6-7"
    assert str(take(topology, 3, SMT.ANY, others=others).cpus) == "9-11"
    assert str(take(topology, 4, SMT.ANY, others=others).cpus) == "12-15"
    assert str(take(topology, 5, SMT.ANY, others=others).cpus) == "3,12-15"
    assert str(take(topology, 2, SMT.ANY, others="0-2,4-6,8").cpus) == "3,7"
    assert str(take(topology, 1, SMT.ANY, others="0-3,4-7,8").cpus) == "9"
    assert str(take(topology, 1, SMT.ANY, others="0-11").cpus) == "12"


# -- spread ------------------------------------------------------------------------------------


def test_spread_takes_one_thread_of_each_core() -> None:
    assert str(take(_dual(), 4, SMT.SPREAD).cpus) == "0-3"


def test_spread_turns_away_from_a_core_that_somebody_uses() -> None:
    """Where the packed order would take CPU 9, beside the busy CPU 1."""
    assert str(take(_dual(), 1, SMT.SPREAD, others="1").cpus) == "0"
    assert str(take(_dual(), 1, SMT.SPREAD, others="0").cpus) == "1"
    assert str(take(_dual(), 3, SMT.SPREAD, others="0").cpus) == "1-3"


def test_spread_leaves_the_siblings_to_others() -> None:
    topology = machines.single_smt()
    first = take(topology, 4, SMT.SPREAD)
    assert not first.idle
    second = take(topology, 4, SMT.SPREAD, others=str(first.cpus))
    assert str(second.cpus) == "4-7"
    assert second.notes == (
        "4 CPUs of NUMA node 0",
        "no core is free: CPU 4 shares a core with CPU 0 of another container",
        "no core is free: CPU 5 shares a core with CPU 1 of another container",
        "no core is free: CPU 6 shares a core with CPU 2 of another container",
        "the same on 1 more core",
    )


def test_spread_shares_with_others_before_it_shares_with_itself() -> None:
    topology = machines.single_smt()
    chosen = take(topology, 5, SMT.SPREAD, others="0")
    assert str(chosen.cpus) == "1-5"
    assert chosen.notes[-1] == "more than one of its CPUs on 1 core, as no other core was free"
    assert "no core is free: CPU 4 shares a core with CPU 0 of another container" in chosen.notes


def test_a_sibling_that_is_reserved_is_a_neighbour_too() -> None:
    topology = machines.single_smt()
    assert str(take(topology, 1, SMT.SPREAD, reserved="0").cpus) == "1"
    chosen = take(topology, 4, SMT.SPREAD, reserved="0")
    assert str(chosen.cpus) == "1-4"
    assert chosen.notes[-1] == (
        "no core is free: CPU 4 shares a core with CPU 0, not free for exclusive use"
    )


def test_spread_with_adjacent_siblings() -> None:
    """Siblings are what the kernel says, not what the numbering usually is."""
    assert str(take(machines.dual_adjacent(), 4, SMT.SPREAD).cpus) == "0,2,4,6"


def test_spread_shares_cores_rather_than_collect_free_ones_from_all_numa_nodes() -> None:
    """Two NUMA nodes of four cores, two cores of each half used: four stay together."""
    topology = _dual()
    chosen = take(topology, 4, SMT.SPREAD, others="0,1,4,5")
    assert str(chosen.cpus) == "2-3,8-9"
    assert (
        "to stay on few NUMA nodes, CPU 8 shares a core with CPU 0 of another container"
        in chosen.notes
    )
    # Free cores of one NUMA node suffice: no sharing, although node 0 is the more used one.
    assert str(take(topology, 3, SMT.SPREAD, others="0,1,4").cpus) == "5-7"


def test_spread_takes_free_cores_of_as_many_numa_nodes_before_closer_half_used_ones() -> None:
    near = [[10, 30, 12, 30], [30, 10, 30, 30], [12, 30, 10, 30], [30, 30, 30, 10]]
    topology = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=4, distances=near)
    # Free cores: two of node 0, two of node 1. Node 2 has three half-used ones, node 3 nothing.
    others = "2-3,18-19,6-7,22-23,8-11,27,12-15,28-31"
    assert str(take(topology, 4, SMT.SPREAD, others=others).cpus) == "0-1,4-5"


def test_spread_grows_to_other_cores() -> None:
    assert str(take(_dual(), 3, SMT.SPREAD, held="5").cpus) == "4-6"
    assert str(take(_dual(), 2, SMT.SPREAD, held="5", others="4,6,7,12,14,15").cpus) == "0,5"


def test_spread_across_affinity_takes_siblings_inside_before_cores_outside() -> None:
    chosen = take(_dual(), 6, SMT.SPREAD, affinity=NUMASet([1]))
    assert str(chosen.cpus) == "4-7,12-13"


def test_spread_prefers_old_cpus_one_of_each_core() -> None:
    """CPUs of a finished init container, more than are needed."""
    assert str(take(_dual(), 2, SMT.SPREAD, prefer="5-6,13-14").cpus) == "5-6"
    assert str(take(_dual(), 3, SMT.SPREAD, prefer="5,13").cpus) == "4-6"


# -- isolate -----------------------------------------------------------------------------------


def test_isolate_keeps_the_siblings_idle() -> None:
    chosen = take(_dual(), 2, SMT.ISOLATE)
    assert str(chosen.cpus) == "0-1"
    assert str(chosen.idle) == "8-9"


def test_isolate_avoids_cores_with_a_busy_or_reserved_sibling() -> None:
    chosen = take(_dual(), 2, SMT.ISOLATE, others="8", reserved="1")
    assert str(chosen.cpus) == "2-3"
    assert str(chosen.idle) == "10-11"


def test_isolate_is_refused_with_the_free_cores_of_each_numa_node() -> None:
    refused = ask(_dual(), 8, SMT.ISOLATE, others="8", reserved="1")
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.per_numa == {0: 2, 1: 4}
    assert str(refused) == (
        "8 CPUs were asked for, 6 CPUs on wholly free cores are there: "
        "NUMA node 0 has 2, NUMA node 1 has 4"
    )


def test_isolate_on_cores_without_siblings_keeps_nothing_idle() -> None:
    chosen = take(machines.single_no_smt(), 4, SMT.ISOLATE)
    assert str(chosen.cpus) == "0-3"
    assert not chosen.idle


def test_isolate_grows_and_shrinks_with_its_idle_siblings() -> None:
    grown = take(_dual(), 3, SMT.ISOLATE, held="4-5")
    assert (str(grown.cpus), str(grown.idle)) == ("4-6", "12-14")
    shrunk = take(_dual(), 1, SMT.ISOLATE, held="4-5")
    assert (str(shrunk.cpus), str(shrunk.idle)) == ("4", "12")
    refused = ask(_dual(), 9, SMT.ISOLATE, held="4-5")
    assert isinstance(refused, NotEnoughCPUs)
    assert "6 CPUs on wholly free cores are there besides the 2 it has" in str(refused)


def test_isolate_does_not_call_a_sibling_idle_that_somebody_else_owns() -> None:
    """A container that was not isolated before may hold half of a shared core."""
    grown = take(_dual(), 2, SMT.ISOLATE, held="4", others="12")
    assert (str(grown.cpus), str(grown.idle)) == ("4-5", "13")


@pytest.mark.parametrize("prefer", ["5-6", "5,13", "5,12"])
def test_isolate_restarts_where_it_was_only_if_the_cores_are_free(prefer: str) -> None:
    chosen = take(_dual(), 2, SMT.ISOLATE, prefer=prefer, others="14" if prefer == "5-6" else "")
    assert len(chosen.cpus) == len(_dual().siblings_of(chosen.cpus)) // 2
    assert 5 in chosen.cpus
    assert chosen.idle.isdisjoint(cpus("14"))


# -- full-core ---------------------------------------------------------------------------------


def test_full_core_takes_whole_cores() -> None:
    chosen = take(_dual(), 4, SMT.FULL_CORE, others="8")
    assert str(chosen.cpus) == "1-2,9-10"
    assert chosen.notes == ("4 CPUs of NUMA node 0 (2 whole cores)",)


def test_full_core_refuses_what_is_no_multiple_of_the_threads() -> None:
    refused = ask(_dual(), 3, SMT.FULL_CORE, others="8")
    assert isinstance(refused, SMTAlignmentRefused)
    assert refused.available == cpus("1-7,9-15")
    assert str(refused) == (
        "3 CPUs were asked for as whole cores, which cannot be made of cores with 2 threads "
        "(CPUs of wholly free cores: 1-7,9-15)"
    )


def test_full_core_refuses_when_too_few_cores_are_whole() -> None:
    refused = ask(_dual(), 6, SMT.FULL_CORE, others="0-3,5,6")
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.available == cpus("4,7,12,15")
    assert "4 CPUs of wholly free cores are there" in str(refused)


def test_full_core_on_a_hybrid_processor_counts_real_cores() -> None:
    topology = machines.hybrid()
    assert str(take(topology, 2, SMT.FULL_CORE).cpus) == "0-1"
    assert str(take(topology, 3, SMT.FULL_CORE).cpus) == "0-1,12"
    efficient = Settings(cores=PreferredCores.EFFICIENT)
    assert str(take(topology, 3, SMT.FULL_CORE, settings=efficient).cpus) == "12-14"
    performance = Settings(cores=PreferredCores.PERFORMANCE)
    assert str(take(topology, 13, SMT.FULL_CORE, settings=performance).cpus) == "0-12"
    # All single-threaded cores are used: an odd number cannot be had just now.
    refused = ask(topology, 3, SMT.FULL_CORE, others="12-19")
    assert isinstance(refused, SMTAlignmentRefused)


def test_full_core_leaves_what_later_cores_need_to_make_the_count() -> None:
    """Three threads, two cores of two and none of one is possible only without the larger."""
    assert counts_that_fit([CoreClass(0b1, 4), CoreClass(0b110, 3)], 6) == [0, 2]
    assert counts_that_fit([CoreClass(0b11, 4), CoreClass(0b100, 3)], 7) == [1, 1]
    assert counts_that_fit([CoreClass(0b11, 4), CoreClass(0b100, 3)], 6) is None
    assert counts_that_fit([CoreClass(0b11111, 2)], 10) == [5]
    assert counts_that_fit([], 0) == []


def test_full_core_on_cores_with_offline_siblings() -> None:
    topology = machines.offline_cpus()  # cores 0-1, 2, 4-5, 8-9, 10-11, 13, 14-15
    assert str(take(topology, 1, SMT.FULL_CORE).cpus) == "2"
    assert str(take(topology, 3, SMT.FULL_CORE).cpus) == "0-2"
    assert str(take(topology, 12, SMT.FULL_CORE).cpus) == str(topology.online)


def test_full_core_grows_by_completing_its_core_first() -> None:
    assert str(take(_dual(), 4, SMT.FULL_CORE, held="5,6,14").cpus) == "5-6,13-14"
    assert str(take(_dual(), 4, SMT.FULL_CORE, held="6,14").cpus) == "4,6,12,14"
    assert str(take(_dual(), 6, SMT.FULL_CORE, held="5-6").cpus) == "4-6,12-14"


def test_full_core_shrinks_to_whole_cores_or_not_at_all() -> None:
    assert str(take(_dual(), 2, SMT.FULL_CORE, held="4-5,12-13").cpus) == "4,12"
    refused = ask(_dual(), 3, SMT.FULL_CORE, held="4-5,12-13")
    assert isinstance(refused, SMTAlignmentRefused)
    assert refused.available == cpus("4-5,12-13")


def test_full_core_restarts_where_it_was() -> None:
    assert str(take(_dual(), 4, SMT.FULL_CORE, prefer="5-6,13-14").cpus) == "5-6,13-14"
    # Not whole cores: only the core that they touch is preferred.
    assert str(take(_dual(), 2, SMT.FULL_CORE, prefer="5-6").cpus) == "5,13"


# -- pair --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "loads", "expected"),
    [
        (HIGH, {0: HIGH, 1: LOW}, "9"),  # high beside low
        (LOW, {0: LOW, 1: HIGH}, "9"),  # low beside high
        (DAY, {0: DAY, 1: NIGHT}, "9"),  # hours that do not overlap
        (DAY, {0: HIGH, 1: DAY}, "2"),  # a free core, as both would overlap
        (LOW, {0: LOW, 1: LOW}, "2"),  # nothing to gain: a free core
        (None, {0: HIGH, 1: LOW}, "9"),  # unknown counts as high
        (HIGH, {}, "2"),  # nobody said anything about the others
    ],
)
def test_pair_looks_for_the_opposite(
    load: Load | None, loads: dict[int, Load], expected: str
) -> None:
    chosen = take(_dual(), 1, SMT.PAIR, others="0-1", load=load, loads=loads)
    assert str(chosen.cpus) == expected


@pytest.mark.parametrize(
    ("load", "expected", "note"),
    [
        (HIGH, "5", "CPU 5 shares a core with CPU 1 of another container of unknown load"),
        (LOW, "4", "CPU 4 shares a core with CPU 0 of another container of the opposite load"),
    ],
)
def test_pair_when_no_core_is_free(load: Load, expected: str, note: str) -> None:
    """Never busy ones first, then unknown ones, and the same hours last."""
    topology = machines.single_smt()
    chosen = take(topology, 1, SMT.PAIR, others="0-3", load=load, loads={0: HIGH, 2: HIGH, 3: HIGH})
    assert str(chosen.cpus) == expected
    assert chosen.notes[-1] == note


def test_pair_never_busy_neighbours_before_unknown_ones() -> None:
    chosen = take(machines.single_smt(), 1, SMT.PAIR, others="0-3", load=LOW, loads={1: LOW})
    assert str(chosen.cpus) == "5"


def test_pair_names_the_same_hours_and_the_never_busy() -> None:
    topology = machines.single_smt()
    clash = take(topology, 1, SMT.PAIR, others="0-3", load=DAY, loads=dict.fromkeys(range(4), HIGH))
    assert clash.notes[-1].endswith("of another container that is busy at the same hours")
    quiet = take(topology, 1, SMT.PAIR, others="0-3", load=LOW, loads=dict.fromkeys(range(4), LOW))
    assert quiet.notes[-1].endswith("of another container that is never busy either")


def test_pair_without_a_load_says_what_it_assumed() -> None:
    assert "no load was given for it, so it counts as high" in take(_dual(), 1, SMT.PAIR).notes


def test_pair_never_joins_the_same_hours_while_a_core_elsewhere_is_free() -> None:
    """Staying on one NUMA node is no reason to sit beside somebody busy at the same time."""
    chosen = take(
        _dual(), 4, SMT.PAIR, others="0-1,4-5", load=HIGH, loads=dict.fromkeys((0, 1, 4, 5), HIGH)
    )
    assert str(chosen.cpus) == "2-3,6-7"


def test_pair_stays_on_one_numa_node_with_unknown_neighbours() -> None:
    chosen = take(_dual(), 4, SMT.PAIR, others="0-1,4-5", load=HIGH)
    assert str(chosen.cpus) == "2-3,8-9"


def test_pair_spreads_its_own_threads() -> None:
    assert str(take(_dual(), 4, SMT.PAIR, load=LOW).cpus) == "0-3"


# -- shrinking ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "count", "smt", "expected"),
    [
        ("0,8,1,9,4", 4, SMT.ANY, "0-1,8-9"),  # whole cores of the NUMA node with most
        ("0,8,1,9,4", 3, SMT.ANY, "0-1,8"),
        ("0,1,9", 2, SMT.ANY, "1,9"),  # the whole core and not the half
        ("0,8,1,9,4", 3, SMT.SPREAD, "0-1,4"),  # one of each core
        ("0-1,4-6", 3, SMT.SPREAD, "4-6"),
        ("0-1,4-5", 2, SMT.SPREAD, "0-1"),
        ("0-1", 0, SMT.SPREAD, ""),
    ],
)
def test_giving_back(held: str, count: int, smt: SMT, expected: str) -> None:
    assert str(take(_dual(), count, smt, held=held).cpus) == expected


def test_giving_back_keeps_what_is_inside_the_affinity() -> None:
    chosen = take(_dual(), 2, SMT.SPREAD, held="0-2,4", affinity=NUMASet([1]))
    assert str(chosen.cpus) == "0,4"


def test_giving_back_keeps_an_l3_group_together() -> None:
    chosen = take(machines.chiplets(), 3, SMT.ANY, held="0,4-6,36")
    assert str(chosen.cpus) == "4-5,36"


def test_kubelet_order_grows_in_place_with_whole_cores() -> None:
    settings = Settings(cpu_order=CPUOrder.KUBELET)
    grown = take(_dual(), 4, SMT.FULL_CORE, held="6,14", settings=settings)
    assert str(grown.cpus) == "4,6,12,14"


def _dual() -> Topology:
    """Two sockets, 2 NUMA nodes, 4 cores each: CPUs 0-3,8-11 and 4-7,12-15."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4)
