"""CPUs and memory on different NUMA nodes: CXL, HBM, KNL in flat mode, POWER, virtual machines."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.explain.explanation import of_allocation
from nri_numa.engine.explain.sentences import sentences
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named as machines

SINGLE = {"policy": "single-numa-node"}
RESTRICTED = {"policy": "restricted"}
BEST_EFFORT = {"policy": "best-effort"}


def told(topology: Topology, homes: dict[int, set[int]], tiers: dict[int, int]) -> Topology:
    """A machine whose firmware tells initiators, and its kernel memory tiers."""
    nodes = {
        i: replace(n, initiators=NUMASet(homes.get(i, ())), tier=tiers.get(i))
        for i, n in topology.numa_nodes.items()
    }
    return replace(topology, numa_nodes=nodes)


def issue_machine() -> Topology:
    """``sockets=2,numa=1,cores=4,memory=8Gi,memory-only=64Gi+64Gi``."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=8, memory_only_gib=(64, 64)
    )


def test_case_9_best_effort_is_never_pinned_to_less_than_it_asked_for() -> None:
    world = World(issue_machine())
    of = pod("large", BEST_EFFORT, qos=QoSClass.BURSTABLE)
    cpus, mems = world.place(of, wants=resources(2, 20))
    assert (bool(cpus), mems) == (True, "")
    allocation = world.agent.state.allocations["large-app"]
    assert not allocation.preferred
    known = world.agent.grounds_of("large-app")
    assert known is not None
    assert any(
        "memory-only NUMA nodes 2-3 with 128 GiB are not allowed" in step
        for step in known.basis.steps
    )


def test_case_9_where_it_fits_without_the_tier_it_is_pinned_without_it() -> None:
    world = World(issue_machine())
    assert world.place(pod("a", BEST_EFFORT), wants=resources(2, 12))[1] == "0-1"


@pytest.mark.parametrize("policy", ["single-numa-node", "restricted", "best-effort"])
def test_case_9_a_tier_that_is_let_in_serves_the_numa_node_it_is_near_to(policy: str) -> None:
    """NUMA node 2 hangs at socket 0 and 3 at socket 1; 20 GiB take 0 and 2, or 1 and 3."""
    world = World(issue_machine(), Settings(memory_only_nodes=NUMASet([2, 3])))
    cpus, mems = world.place(pod("large", {"policy": policy}), wants=resources(2, 20))
    node = world.topology.numa_of(world.cpus("large-app"))
    assert mems == {"0": "0,2", "1": "1,3"}[str(node)]
    assert cpus
    assert world.agent.state.allocations["large-app"].preferred
    known = world.agent.grounds_of("large-app")
    assert known is not None
    assert any("memory-only NUMA node" in step and "serves" in step for step in known.basis.steps)
    assert known.alignment is not None
    memory = known.alignment.resources[1]
    assert [n.numa_node for n in memory.numa_nodes] == [0, 1, 2, 3]
    assert memory.hint_count == 3  # 0, 1 and 0-1, each with what serves it


def test_case_9_a_tier_that_is_full_serves_nobody() -> None:
    world = World(issue_machine(), Settings(memory_only_nodes=NUMASet([2, 3])))
    _, full = world.place(pod("all", SINGLE), wants=resources(2, 72))
    assert world.place(pod("large", SINGLE), wants=resources(2, 20))[1] == {
        "0,2": "1,3", "1,3": "0,2",
    }[full]  # fmt: skip


def test_case_9_small_needs_stay_off_the_tier() -> None:
    world = World(issue_machine(), Settings(memory_only_nodes=NUMASet([2, 3])))
    assert world.place(pod("small", SINGLE), wants=resources(2, 4))[1] in ("0", "1")


def test_case_9_a_strict_policy_names_the_tier_that_nobody_let_in() -> None:
    world = World(told(issue_machine(), {}, {0: 4, 1: 4, 2: 22, 3: 22}))
    refused = world.refuse(pod("large", SINGLE), wants=resources(2, 20))
    assert "memory-only NUMA nodes 2-3 (memory tier 22) with 128 GiB are not allowed" in (
        refused.message
    )


def test_case_9_a_tier_is_let_in_by_its_number() -> None:
    topology = told(issue_machine(), {}, {0: 4, 1: 4, 2: 22, 3: 1})
    world = World(topology, Settings(memory_tiers=frozenset({22})))
    assert world.place(pod("large", SINGLE), wants=resources(2, 20))[1] == "0,2"
    again = pod("again", SINGLE)
    made = container(again, wants=resources(2, 60))
    refused = world.refuse(again, made)
    assert "memory-only NUMA node 3 (memory tier 1)" in refused.message


@pytest.mark.parametrize("policy", ["single-numa-node", "restricted"])
def test_case_9_cpus_without_memory_are_served_by_what_is_near(policy: str) -> None:
    """CPUs on NUMA nodes 0 and 1, all memory on 2: it read "which this machine does not have"."""
    world = World(machines.cpu_only())
    for n in range(2):
        assert world.place(pod(f"p{n}", {"policy": policy}), wants=resources(4, 12))[1] == "2"
    nodes = {str(a.numa_nodes) for a in world.agent.state.allocations.values()}
    assert nodes == {"0", "1"}
    # It is one memory for both, not one for each.
    refused = world.refuse(pod("third", {"policy": policy}), wants=resources(2, 12))
    assert "NUMA node 2: 0 CPUs for exclusive use, 8 GiB memory" in refused.message


def test_case_9_shared_memory_counts_once_for_wide_containers() -> None:
    world = World(machines.cpu_only())
    refused = world.refuse(pod("wide", RESTRICTED), wants=resources(10, 40))
    assert refused.reason == "TopologyAffinityError"
    assert "40 GiB memory" in refused.message


def test_case_9_each_virtual_cpu_node_takes_its_own_memory_node() -> None:
    """Two NUMA nodes with CPUs and two with memory, told apart by distance only."""
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=0, memory_only_gib=(16, 16)
    )
    world = World(topology)
    seen = set()
    for n in range(2):
        _, mems = world.place(pod(f"p{n}", SINGLE), wants=resources(4, 10))
        seen.add((str(world.topology.numa_of(world.cpus(f"p{n}-app"))), mems))
    assert seen == {("0", "2"), ("1", "3")}


def test_case_9_initiators_beat_distances() -> None:
    topology = told(issue_machine(), {2: {1}, 3: {0}}, {})
    world = World(topology, Settings(memory_only_nodes=NUMASet([2, 3])))
    for n in range(2):
        _, mems = world.place(pod(f"p{n}", SINGLE), wants=resources(2, 20))
        node = str(world.topology.numa_of(world.cpus(f"p{n}-app")))
        assert mems == {"0": "0,3", "1": "1-2"}[node]


def test_case_9_knl_in_flat_mode() -> None:
    """CPUs and DDR4 on NUMA node 0, MCDRAM on 1: one place, not two."""
    topology = synthetic(
        sockets=1, numa_per_socket=1, cores_per_numa=16, threads=4, memory_gib=96,
        memory_only_gib=(16,), distances=[[10, 31], [31, 10]],
    )  # fmt: skip
    world = World(topology, Settings(memory_only_nodes=NUMASet([1])))
    assert world.place(pod("hpc", SINGLE), wants=resources(8, 100))[1] == "0-1"


def test_case_9_the_nearest_memory_needs_no_leave_and_other_tiers_do() -> None:
    """NUMA node 1 has CPUs and no memory; 2 beside it has the memory, 3 is far away."""
    base = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=16, memory_only_gib=(32, 64),
        distances=[[10, 21, 28, 60], [21, 10, 12, 60], [28, 12, 10, 60], [60, 60, 60, 10]],
    )  # fmt: skip
    nodes = {**base.numa_nodes, 1: replace(base.numa_nodes[1], memory_bytes=0)}
    world = World(replace(base, numa_nodes=nodes))
    assert str(world.agent.machine.tiers.outside) == "3"
    cpus, mems = world.place(pod("a", SINGLE), wants=resources(4, 20))
    assert (str(world.topology.numa_of(world.cpus("a-app"))), mems) == ("1", "2")
    assert cpus


def test_case_9_huge_pages_of_a_tier_count_too() -> None:
    base = issue_machine()
    pages = {2 << 20: 2 * GIB}
    nodes = {i: replace(n, hugepages=pages if i > 1 else {}) for i, n in base.numa_nodes.items()}
    world = World(replace(base, numa_nodes=nodes), Settings(memory_only_nodes=NUMASet([2, 3])))
    of = pod("a", SINGLE)
    wants = resources(2, 1, hugepages={2 << 20: GIB})
    _, mems = world.place(of, wants=wants)
    assert mems in ("0,2", "1,3")
    charges = world.agent.state.charges
    assert sum(c.hugepages.get(2 << 20, 0) for i, c in charges.items() if i > 1) == GIB


def test_case_10_lists_are_booked_on_memory_only_numa_nodes() -> None:
    """Two pods of 900 MiB do not fit 996 MiB; both were placed."""
    topology = synthetic(
        sockets=1, numa_per_socket=1, cores_per_numa=4, memory_only_gib=(996 / 1024,)
    )
    world = World(topology)
    assert world.place(pod("first", {"numamem": "1"}), wants=resources(1, 900 / 1024))[1] == "1"
    second = pod("second", {"numamem": "1"})
    refused = world.refuse(second, wants=resources(1, 900 / 1024))
    assert refused.reason == "NotEnoughMemory"
    assert "NUMA node 1: 96 MiB" in refused.message
    world.stop("first-app")
    assert world.place(second, wants=resources(1, 900 / 1024))[1] == "1"


def test_case_10_the_memory_of_a_gpu_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A POWER9 shows the memory of its GPUs as NUMA nodes far from all CPUs."""
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, threads=4, memory_gib=64,
        memory_only_gib=(16, 16), numa_ids=(0, 8, 250, 251),
        distances=[[10, 40, 80, 80], [40, 10, 80, 80], [80, 80, 10, 80], [80, 80, 80, 10]],
    )  # fmt: skip
    world = World(topology)
    assert world.place(pod("a", {"numamem": "250"}), wants=resources(1, 4))[1] == "250"
    known = world.agent.grounds_of("a-app")
    assert known is not None
    assert any("memory-only NUMA node 250, at distance 80" in step for step in known.basis.steps)
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "container placed as listed, which may not be meant"
    ]


def test_case_10_a_tier_that_was_let_in_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    world = World(issue_machine(), Settings(memory_only_nodes=NUMASet([2, 3])))
    world.place(pod("a", {"numamem": "2"}), wants=resources(1, 4))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_case_9_where_no_numa_node_has_both_there_is_one_tier() -> None:
    """CPUs on NUMA node 0, memory on 1 and, farther away, on 2."""
    topology = synthetic(
        sockets=1, numa_per_socket=1, cores_per_numa=4, memory_gib=0, memory_only_gib=(8, 8),
        distances=[[10, 20, 40], [20, 10, 40], [40, 40, 10]],
    )  # fmt: skip
    world = World(topology)
    of = pod("a", SINGLE)
    assert world.place(of, wants=resources(2, 12))[1] == "1-2"
    # Unless the kernel tells that it is another one.
    slow = World(told(topology, {}, {1: 4, 2: 22}))
    refused = slow.refuse(of, wants=resources(2, 12))
    assert "memory-only NUMA node 2 (memory tier 22) with 8 GiB is not allowed" in refused.message


def test_case_9_without_a_policy_memory_is_widened_to_where_it_fits() -> None:
    world = World(issue_machine())
    assert world.place(pod("a", {"cpus": "exclusive"}), wants=resources(2, 12))[1] == "0-1"
    assert not world.agent.state.allocations["a-app"].preferred


def test_case_9_a_refusal_for_cpus_says_nothing_of_tiers() -> None:
    world = World(issue_machine())
    refused = world.refuse(pod("a", SINGLE), wants=resources(12, 1))
    assert "not allowed" not in refused.message


def test_case_9_a_machine_that_tells_no_memory_pins_none() -> None:
    base = machines.dual_no_smt()
    nodes = {i: replace(n, memory_bytes=0) for i, n in base.numa_nodes.items()}
    world = World(replace(base, numa_nodes=nodes))
    assert world.place(pod("a", BEST_EFFORT), wants=resources(2))[1] == ""


def test_case_9_why_another_lost_counts_no_tier_as_its_own() -> None:
    world = World(issue_machine(), Settings(memory_only_nodes=NUMASet([2, 3])))
    for n in range(2):
        world.place(pod(f"p{n}", SINGLE), wants=resources(2, 20))
    known = world.agent.grounds_of("p1-app")
    allocation = world.agent.state.allocations["p1-app"]
    text = " ".join(sentences(of_allocation(allocation, known, "4-5")))
    assert "NUMA node 0 lost: the strategy ranks it lower." in text


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_case_9_listed_memory_has_its_cpus_where_its_initiators_are(policy: str) -> None:
    """Distances say otherwise. A list needs no leave, but that it had none is said."""
    world = World(told(issue_machine(), {2: {1}, 3: {0}}, {2: 22, 3: 22}))
    for numamem, numa_node in (("2", 1), ("3", 0)):
        of = pod(f"on-{numamem}", {"policy": policy, "numamem": numamem})
        made = container(of, wants=resources(2, 20))
        assert world.place(of, made)[1] == numamem
        allocation = world.agent.state.allocations[made.id]
        assert allocation.numa_nodes == NUMASet([numa_node])
        assert allocation.preferred
        known = world.agent.grounds_of(made.id)
        assert known is not None
        assert any(
            "(memory tier 22)" in step and "not allowed" in step for step in known.basis.steps
        )
    world.check()
