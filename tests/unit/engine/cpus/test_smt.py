"""Thread siblings: which CPUs each mode takes, and beside whom."""

from __future__ import annotations

from collections.abc import Mapping

from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTAlignmentRefused,
    TakeRequest,
    take_cpus,
)
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUOrder, Settings
from nri_numa.model.workload import LOW, SMT, Load
from tests.machines import named as machines


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
) -> ChosenCPUs:
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
    assert isinstance(result, ChosenCPUs), str(result)
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
) -> ChosenCPUs | NotEnoughCPUs | SMTAlignmentRefused:
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


# -- isolate -----------------------------------------------------------------------------------


def test_isolate_is_refused_with_the_free_cores_of_each_numa_node() -> None:
    refused = ask(_dual(), 8, SMT.ISOLATE, others="8", reserved="1")
    assert isinstance(refused, NotEnoughCPUs)
    assert refused.per_numa == {0: 2, 1: 4}


# -- full-core ---------------------------------------------------------------------------------


def test_full_core_refuses_what_is_no_multiple_of_the_threads() -> None:
    refused = ask(_dual(), 3, SMT.FULL_CORE, others="8")
    assert isinstance(refused, SMTAlignmentRefused)
    assert refused.available == cpus("1-7,9-15")


def test_full_core_restarts_where_it_was() -> None:
    assert str(take(_dual(), 4, SMT.FULL_CORE, prefer="5-6,13-14").cpus) == "5-6,13-14"
    # Not whole cores: only the core that they touch is preferred.
    assert str(take(_dual(), 2, SMT.FULL_CORE, prefer="5-6").cpus) == "5,13"


# -- pair --------------------------------------------------------------------------------------


def test_pair_never_busy_neighbours_before_unknown_ones() -> None:
    chosen = take(machines.single_smt(), 1, SMT.PAIR, others="0-3", load=LOW, loads={1: LOW})
    assert str(chosen.cpus) == "5"


# -- shrinking ---------------------------------------------------------------------------------


def test_kubelet_order_grows_in_place_with_whole_cores() -> None:
    settings = Settings(cpu_order=CPUOrder.KUBELET)
    grown = take(_dual(), 4, SMT.FULL_CORE, held="6,14", settings=settings)
    assert str(grown.cpus) == "4,6,12,14"


def _dual() -> Topology:
    """Two sockets, 2 NUMA nodes, 4 cores each: CPUs 0-3,8-11 and 4-7,12-15."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4)
