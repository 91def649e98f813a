"""What can be compared on which machine."""

from collections.abc import Mapping

from nri_numa.measure.plan import (
    MIB,
    Comparison,
    ImpossibleComparison,
    PlannedComparison,
    plan_comparisons,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.machine import Topology
from tests.machines import named as machines

GIB = 1 << 30
PLENTY = dict.fromkeys(range(64), 64 * GIB)


def planned(
    topology: Topology,
    *,
    usable: CPUSet | None = None,
    available: Mapping[int, int] = PLENTY,
    l3_bytes: int = 32 * MIB,
) -> dict[str, PlannedComparison]:
    cpus = topology.online if usable is None else usable
    return {
        one.name: one
        for one in plan_comparisons(topology, cpus, available=available, l3_bytes=l3_bytes)
    }


def shown(one: PlannedComparison) -> Comparison:
    assert isinstance(one, Comparison), one
    return one


def because(one: PlannedComparison) -> str:
    assert isinstance(one, ImpossibleComparison), one
    return one.because


def test_a_machine_with_everything_shows_everything() -> None:
    topology = machines.snc_smt(cores_per_l3=2)
    found = planned(topology)
    memory = shown(found["memory-bandwidth"])
    (good,), (bad,) = memory.good_side.workers, memory.bad.workers
    assert good.cpu == bad.cpu
    assert good.numa_node == topology.cpus[good.cpu].numa_node
    assert bad.numa_node is not None
    assert good.numa_node is not None
    farthest = max(topology.distance(good.numa_node, i) for i in topology.numa_ids)
    assert topology.distance(good.numa_node, bad.numa_node) == farthest
    assert good.size == bad.size == 4 * 32 * MIB
    assert f"at distance {farthest}" in memory.bad.placed
    siblings = shown(found["siblings"])
    (first, second), (same, sibling) = siblings.good_side.workers, siblings.bad.workers
    assert first == same
    assert topology.cpus[first.cpu].core == topology.cpus[sibling.cpu].core
    assert topology.cpus[first.cpu].core != topology.cpus[second.cpu].core
    caches = shown(found["shared-l3"])
    (first, second), (same, other) = caches.good_side.workers, caches.bad.workers
    assert first == same
    l3_of = {i: group.id for group in topology.l3_groups.values() for i in group.cpus}
    assert l3_of[first.cpu] == l3_of[other.cpu] != l3_of[second.cpu]
    assert topology.cpus[first.cpu].numa_node == topology.cpus[second.cpu].numa_node
    assert topology.cpus[first.cpu].core != topology.cpus[other.cpu].core


def test_a_plain_machine_says_why_not_and_shows_the_rest() -> None:
    found = planned(machines.single_no_smt(cores_per_numa=2))
    assert because(found["memory-latency"]) == (
        "this machine has one NUMA node with memory, NUMA node 0"
    )
    assert "no hyperthreads" in because(found["siblings"])
    assert "share one L3 cache" in because(found["shared-l3"])
    neighbour = shown(found["busy-neighbour"])
    assert [one.loop for one in neighbour.bad.workers] == ["compute", "busy"]
    assert len({one.cpu for one in neighbour.bad.workers}) == 1


def test_only_cpus_that_may_be_used_are_used() -> None:
    topology = machines.dual_smt(cores_per_numa=2, memory_gib=16)
    core = next(iter(topology.cores.values()))
    found = planned(topology, usable=core.cpus)
    assert "two cores" in because(found["siblings"])
    assert "share one L3 cache" in because(found["shared-l3"])
    assert shown(found["memory-bandwidth"]).good_side.workers[0].cpu in core.cpus
    nothing = planned(topology, usable=NO_CPUS)
    assert all(isinstance(one, ImpossibleComparison) for one in nothing.values())
    assert because(nothing["busy-neighbour"]) == "no CPU may be used here"
    assert because(nothing["memory-bandwidth"]).startswith("no CPU that may be used here")


def test_buffers_leave_memory_to_others_and_are_larger_than_the_cache() -> None:
    topology = machines.dual_smt(cores_per_numa=2, memory_gib=16)
    scarce = planned(topology, available={0: GIB, 1: 64 * GIB})
    assert shown(scarce["memory-bandwidth"]).good_side.workers[0].size == GIB // 8
    none = planned(topology, available={0: 100 * MIB, 1: 64 * GIB})
    assert because(none["memory-bandwidth"]).endswith("512 MiB on each are needed")
    large = planned(topology, l3_bytes=384 * MIB)
    assert shown(large["memory-bandwidth"]).good_side.workers[0].size == GIB
    assert "L3 cache of 384 MiB" in because(large["memory-latency"])


def test_caches_that_are_not_told_or_lie_on_other_numa_nodes() -> None:
    topology = machines.dual_smt(cores_per_numa=2, memory_gib=16)
    assert "the kernel reports no L3" in because(planned(topology, l3_bytes=0)["shared-l3"])
    assert "no NUMA node has two L3 caches" in because(planned(topology)["shared-l3"])
