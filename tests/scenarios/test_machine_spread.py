"""``strategy``: by the share that is scarcest once the container is there."""

from __future__ import annotations

from collections import Counter

from nri_numa.engine.decision import Reading
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Strategy
from tests.beds.world import GIB, World, pod, resources
from tests.machines import named as machines

POLICY = {"policy": "best-effort"}
BURSTABLE = QoSClass.BURSTABLE


def _six(strategy: Strategy, reading: Reading | None = None) -> list[str]:
    """Where six pods of one CPU and 256 MiB go."""
    world = World(machines.dual_no_smt(), Settings(strategy=strategy), reading=reading)
    pods = (pod(f"p{n}", POLICY, qos=BURSTABLE) for n in range(6))
    return [world.place(of, wants=resources(1, 0.25))[1] for of in pods]


# Page cache: node 1 has 3 GiB less of 16.
UNEVEN = Reading(memory={0: 15 * GIB, 1: 12 * GIB})


def test_case_17_six_small_pods_use_both_numa_nodes() -> None:
    """By memory left alone all six go to node 0, which has 3 GiB more."""
    assert Counter(_six(Strategy.MOST_LEFT, UNEVEN)) == {"0": 6}
    assert Counter(_six(Strategy.SPREAD, UNEVEN)) == {"0": 3, "1": 3}
    assert Counter(_six(Strategy.SPREAD)) == {"0": 3, "1": 3}


def test_case_17_pack_fills_one_by_the_same_measure() -> None:
    assert len(set(_six(Strategy.PACK))) == 1


def test_case_17_memory_counts_where_it_is_scarcest() -> None:
    """Node 0 has its memory nearly full and its CPUs free; node 1 the other way round, less so."""
    world = World(machines.dual_no_smt())
    world.put("memory", {"numamem": "0"}, 0, 13)
    world.put("cpus", {"numacpu": "8-11", "cpus": "exclusive"}, 4)
    assert world.put("a", POLICY, 1, 1, qos=BURSTABLE)[1] == "1"


def test_case_17_shares_and_not_amounts_decide() -> None:
    """A small NUMA node that is empty is emptier than a large one that is half full."""
    base = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=16)
    world = World(base, Settings(capacity_factor={1: 0.5}))
    world.put("first", {"numacpu": "0-3", "cpus": "exclusive"}, 4)
    world.put("a", {**POLICY, "bind": "cpu"}, 1, qos=BURSTABLE)
    assert str(world.allocation("a-app").numa_nodes) == "1"


def test_case_17_huge_pages_count_too() -> None:
    world = World(machines.huge_pages())
    pages = 2 << 20
    world.put("first", {"numamem": "0"}, 0, 0, pages={pages: GIB // 2})
    of = pod("a", POLICY, qos=BURSTABLE)
    wants = resources(1, 1, hugepages={pages: GIB // 4})
    assert world.place(of, wants=wants)[1] == "1"
