"""Computed assignments: policies, strategies, accounting, siblings, the degrade ladder."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Reading
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, Limits, Rule, Settings
from nri_numa.model.workload import Device, DeviceRequest, QoSClass, Strategy
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

GUARANTEED, BURSTABLE = QoSClass.GUARANTEED, QoSClass.BURSTABLE
SINGLE = {"policy": "single-numa-node"}


def test_bind_none_wins_over_a_rule() -> None:
    world = World(machines.snc_smt(), Settings(rules=(Rule(values=SINGLE),)))
    assert world.put("a", {"bind": "none"}, 2, 1) == ("", "")
    assert world.put("b", {}, 2, 1)[1] == "0"


def test_guaranteed_whole_cpus_with_a_policy_are_exclusive_one_thread_of_a_core_each() -> None:
    world = World(machines.dual_smt())
    cpus, mems = world.put("a", SINGLE, 4, 1)
    owned = CPUSet.parse(cpus)
    assert len(owned) == 4
    assert mems == "0"
    topology = world.topology
    assert len({topology.cpus[i].core for i in owned}) == 4, "two threads of one core"


def test_a_fraction_shares_and_gets_the_nodes_pool() -> None:
    world = World(machines.dual_smt())
    assert world.put("a", SINGLE, 1.5, 1) == ("0-15,32-47", "0")


def test_bind_cpu_leaves_memory_alone() -> None:
    world = World(machines.dual_smt())
    assert world.put("a", {**SINGLE, "bind": "cpu"}, 1.5, 100) == ("0-15,32-47", "")


def test_bind_alone_is_a_mild_computed_pin() -> None:
    world = World(machines.dual_smt())
    assert world.put("a", {"bind": "cpu+mem"}, 1.5, 1, BURSTABLE) == ("0-15,32-47", "0")


def test_spread_takes_the_node_with_most_cpu_left() -> None:
    world = World(machines.dual_smt())
    assert world.put("a", {"policy": "best-effort", "bind": "cpu"}, 3.5)[0] == "0-15,32-47"
    assert world.put("b", {"policy": "best-effort", "bind": "cpu"}, 1.5)[0] == "16-31,48-63"
    assert world.put("c", {"policy": "best-effort", "bind": "cpu"}, 1.5)[0] == "16-31,48-63"
    assert world.put("d", {"policy": "best-effort", "bind": "cpu"}, 1.5)[0] == "16-31,48-63"
    assert world.put("e", {"policy": "best-effort", "bind": "cpu"}, 1.5)[0] == "0-15,32-47"


def test_most_left_takes_most_memory_among_those_whose_cpu_suffices() -> None:
    """What spread did before it looked at the scarcest share."""
    # 64 GiB, 32 CPUs on each
    world = World(machines.dual_smt(), Settings(strategy=Strategy.MOST_LEFT))
    world.put("cpu", {"policy": "best-effort", "bind": "cpu"}, 31.5)  # NUMA node 0
    world.put("mem", {"policy": "best-effort"}, 0.5, 40)  # NUMA node 1
    assert world.has("mem-app")[1] == "1" or world.has("mem-app")[1] == "0"
    first = world.has("mem-app")[1]
    other = "1" if first == "0" else "0"
    # Most memory is on the other NUMA node, and it is taken as long as its CPU suffices.
    assert world.put("small", {"policy": "best-effort"}, 0.2, 1, BURSTABLE)[1] == other
    # With more CPU than NUMA node 0 has left, only NUMA node 1 will do.
    assert world.put("big", {"policy": "best-effort"}, 2.5, 1, BURSTABLE)[1] == "1"


def test_pack_takes_the_fullest_that_fits() -> None:
    world = World(machines.dual_smt(), Settings(strategy=Strategy.PACK))
    assert world.put("a", SINGLE, 2, 8)[1] == "0"
    assert world.put("b", SINGLE, 2, 8)[1] == "0"
    assert world.put("c", SINGLE, 29, 8)[1] == "1"


def test_single_numa_node_refuses_what_needs_two_and_says_what_there_was() -> None:
    world = World(machines.dual_smt())
    refused = world.refused("big", SINGLE, 33, 1)
    assert refused.reason == "TopologyAffinityError"
    for words in ("default/big", "app", "33 exclusive CPUs", "NUMA node 0: 32", "NUMA node 1: 32"):
        assert words in refused.message


def test_restricted_admits_what_an_empty_machine_would_split_and_no_more() -> None:
    world = World(machines.dual_smt())
    cpus, mems = world.put("two", {"policy": "restricted"}, 40, 100)
    assert len(CPUSet.parse(cpus)) == 40
    assert mems == "0-1"
    refused = world.refused("small", {"policy": "restricted"}, 25, 1)
    assert refused.reason == "TopologyAffinityError"


def test_best_effort_admits_wider_and_says_so() -> None:
    world = World(machines.dual_smt())
    world.put("a", SINGLE, 20, 1)
    world.put("b", SINGLE, 20, 1)
    cpus, _ = world.put("c", {"policy": "best-effort"}, 16, 1)
    assert len(CPUSet.parse(cpus)) == 16
    allocation = world.allocation("c-app")
    assert not allocation.preferred
    assert "wider than ideal" in allocation.reason


@pytest.mark.parametrize("policy", ["restricted", "best-effort"])
def test_restricted_goes_by_the_neediest_resource(policy: str) -> None:
    """CPUs need two NUMA nodes, memory and a device one each: two are no wider than needed."""
    world = World(machines.dual_smt())  # 2 x 32 CPUs
    device = DeviceRequest(
        resource="gpu", count=1, devices=(Device(id="g0", numa_nodes=frozenset([1])),)
    )
    of = pod("wide", {"policy": policy})
    made = replace(container(of, wants=resources(40, 1)), devices=(device,))
    assert world.place(of, made)[1] == "0-1"
    (allocation,) = world.agent.state.allocations.values()
    assert allocation.preferred


def test_restricted_admits_no_wider_set_than_the_neediest_resource_needs() -> None:
    world = World(machines.dual_smt())
    world.put("half", {"policy": "single-numa-node"}, 20, 1)
    world.put("other", {"policy": "single-numa-node"}, 20, 1)
    message = world.refused("one", {"policy": "restricted"}, 20, 1).message
    assert "at most 12 CPUs free for exclusive use on one NUMA node" in message


def test_the_kubelets_verdict_stays_behind_its_setting() -> None:
    world = World(machines.dual_smt(), Settings(kubelet_memory=True))
    message = world.refused("wide", {"policy": "restricted"}, 40, 1).message
    assert (
        "wants one number of NUMA nodes for all, as the kubelet's does (kubeletMemory)" in message
    )
    world.put("none", {"numamem": "0"}, 0.5, 0)  # without memory it is in no group
    world.put("even", {"policy": "restricted"}, 40, 100)


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_widen_takes_the_narrowest_that_works(policy: str) -> None:
    world = World(machines.dual_smt())
    world.put("a", SINGLE, 20, 1)
    world.put("b", SINGLE, 20, 1)
    cpus, _ = world.put("c", {"policy": policy, "on-failure": "widen"}, 16, 1)
    assert len(CPUSet.parse(cpus)) == 16
    allocation = world.allocation("c-app")
    assert not allocation.preferred
    assert allocation.policy == policy


def test_widen_still_refuses_what_the_machine_does_not_have() -> None:
    world = World(machines.dual_smt())
    assert world.refused("a", {"policy": "restricted", "on-failure": "widen"}, 65, 1)


def test_unpinned_starts_untouched() -> None:
    world = World(machines.dual_smt())
    assert world.put("a", {**SINGLE, "on-failure": "unpinned"}, 65, 1) == ("", "")
    assert "TopologyAffinityError" in world.allocation("a-app").reason


def test_a_fraction_of_own_cpus_is_refused_with_that_reason() -> None:
    world = World(machines.dual_smt())
    refused = world.refused("a", {"cpus": "exclusive"}, 1.5)
    assert "1500m" in refused.message
    assert "whole" in refused.message


@pytest.mark.parametrize(
    ("machine", "taken", "wanted", "fitting"),
    [
        (machines.dual_smt_16, 0, 5, (4, 6)),
        (machines.dual_smt_16, 10, 5, (4,)),  # the pool keeps one CPU
        (machines.dual_smt_16, 8, 5, (4, 6)),
        (machines.dual_smt_16, 0, 1, (2,)),
        (machines.dual_smt_16, 14, 1, ()),
        (machines.hybrid, 0, 25, ()),
    ],
)
def test_a_refusal_for_whole_cores_names_what_would_fit(
    machine: Callable[[], Topology], taken: int, wanted: int, fitting: tuple[int, ...]
) -> None:
    wishes = {"cpus": "exclusive", "smt": "full-core"}
    world = World(machine(), Settings(limits=Limits(pool=CPUAmount(1))))
    if taken:
        world.put("taken", wishes, taken)
    refused = world.refused("a", wishes, wanted)
    named = re.search(r"so ([\d or]+) would fit", refused.message)
    assert tuple(map(int, named[1].split(" or ") if named else ())) == fitting, refused.message
    for number in fitting:
        one = pod(f"b{number}", wishes)
        world.place(one, wants=resources(number))
        world.remove_pod(one)


def test_full_core_with_a_policy_looks_for_whole_cores() -> None:
    world = World(machines.dual_smt())
    world.put("half", {"cpus": "exclusive", "smt": "spread"}, 16)  # a thread of each core of one
    cpus = CPUSet.parse(world.put("full", {**SINGLE, "smt": "full-core"}, 8, 1)[0])
    assert world.topology.siblings_of(cpus) == cpus


def test_isolate_keeps_siblings_idle_and_out_of_every_pool() -> None:
    world = World(machines.single_smt())
    world.put("plain", {}, qos=BURSTABLE)
    cpus = CPUSet.parse(world.put("a", {"cpus": "exclusive", "smt": "isolate"}, 2)[0])
    siblings = world.topology.siblings_of(cpus)
    assert len(siblings) == 4
    assert world.cpus("plain-app") == world.topology.online - siblings
    assert world.refused("b", {"numacpu": str(siblings - cpus)}).reason == "CPUOwned"
    world.stop("a-app")
    assert world.cpus("plain-app") == world.topology.online


def test_pair_puts_low_beside_high() -> None:
    world = World(machines.single_smt())
    pair = {"cpus": "exclusive", "smt": "pair"}
    high = CPUSet.parse(world.put("high", {**pair, "load": "high"}, 1)[0])
    low = CPUSet.parse(world.put("low", {**pair, "load": "low"}, 1)[0])
    assert low | high == world.topology.siblings_of(high)
    other = CPUSet.parse(world.put("other", {**pair, "load": "high"}, 1)[0])
    assert other.isdisjoint(world.topology.siblings_of(high))


def test_oversale_admits_more_shared_cpus_than_there_are() -> None:
    tight, wide = World(machines.dual_smt()), World(machines.dual_smt(), Settings(oversale=2.0))
    of = pod("a", SINGLE, qos=BURSTABLE)
    made = container(of, wants=resources(40.5, 1))
    assert tight.refuse(of, made).reason == "TopologyAffinityError"
    assert wide.place(of, made)[1] == "0"


def test_hugepages_decide_the_node() -> None:
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, hugepages={2 << 20: 512 << 20}
    )
    world = World(
        topology,
        reading=Reading(hugepages={0: {2 << 20: 0}, 1: {2 << 20: 512 << 20}}),
    )
    assert world.put("a", SINGLE, 1.5, 1, pages={2 << 20: 256 << 20})[1] == "1"
    refused = world.refused("b", SINGLE, 1.5, 1, pages={2 << 20: 300 << 20})
    assert "huge pages" in refused.message


def test_pod_scope_puts_all_containers_on_one_choice() -> None:
    world = World(machines.dual_smt(), Settings(strategy=Strategy.PACK))
    world.put("filler", SINGLE, 20, 1)  # 12 CPUs stay on NUMA node 0
    of = pod("a", {**SINGLE, "scope": "pod"}, total=resources(16, 2))
    first = world.add(of, "one", 8, 1)
    second = world.add(of, "two", 8, 1)
    assert first[1] == second[1] == "1"
    container_scope = pod("b", SINGLE, total=resources(16, 2))
    assert world.add(container_scope, "one", 8, 1)


def test_pod_totals_without_quota_count_by_shares() -> None:
    from nri_numa.model.workload import Resources

    world = World(machines.dual_smt())
    total = Resources(cpu_shares=40 * 1024, hugepages={2 << 20: 1 << 30})
    of = pod("a", {**SINGLE, "scope": "pod"}, qos=BURSTABLE, total=total)
    refused = world.refuse(of, container(of, "one", resources(0.5)))
    assert "40 CPUs" in refused.message


def test_align_by_socket_prefers_nodes_of_one_socket() -> None:
    world = World(machines.snc_smt(), Settings(align_by_socket=True))
    _, mems = world.put("a", {"policy": "restricted"}, 10, 20)
    assert mems in ("0-1", "2-3")


def test_the_assigned_annotation_and_environment_tell_the_container() -> None:
    import json

    world = World(machines.dual_smt())
    answer = world.admit(pod("a", SINGLE), wants=resources(2, 1))
    cpus, mems = world.has("a-app")
    assert answer.adjustment.env == {"NUMA_CPUS": cpus, "NUMA_MEMS": mems}
    document = json.loads(answer.adjustment.annotations["numa.kubernetes.io/assigned"])
    assert document["cpus"] == cpus
    assert document["mems"] == mems
    assert document["policy"] == "single-numa-node"
    assert document["reason"]


def test_the_quota_is_lifted_for_owners_only() -> None:
    world = World(machines.dual_smt())
    world.put("own", SINGLE, 2, 1)
    world.put("shared", SINGLE, 1.5, 1)
    assert world.live["own-app"].resources.cpu_quota == -1
    assert world.live["shared-app"].resources.cpu_quota == 150_000
    kept = World(machines.dual_smt(), Settings(lift_quota=False))
    kept.put("own", SINGLE, 2, 1)
    assert kept.live["own-app"].resources.cpu_quota == 200_000


def test_observe_decides_and_changes_nothing() -> None:
    world = World(machines.dual_smt(), observe=True)
    assert world.put("a", SINGLE, 2, 1) == ("", "")
    assert world.allocation("a-app").kind is Kind.EXCLUSIVE
    assert world.put("b", {"numacpu": "99"}) == ("", "")
    assert world.agent.refusals[-1].reason == "UnknownCPU"
    assert world.stop("a-app") == ()
    assert world.synchronize() == ()


def test_a_refusal_on_a_large_machine_stays_readable() -> None:
    world = World(synthetic(sockets=4, numa_per_socket=4, cores_per_numa=2))
    refused = world.refused("a", SINGLE, 400, 1)
    assert "and 8 more NUMA nodes" in refused.message
    assert len(refused.message) < 1000


def test_best_effort_with_too_much_cpu_and_memory_only_a_tier_has_still_runs_where_cpus_are() -> (
    None
):
    topology = synthetic(
        sockets=1, numa_per_socket=1, cores_per_numa=2, memory_gib=4, memory_only_gib=[64]
    )
    tier = topology.memory_nodes - topology.cpu_nodes
    world = World(topology, Settings(memory_only_nodes=tier))
    cpus, mems = world.put("a", {"policy": "best-effort"}, 40.5, 60, BURSTABLE)
    assert cpus == "0-3"
    assert NUMASet.parse(mems) >= tier


def test_a_machine_whose_numa_nodes_have_no_cpus_runs_everything_unpinned() -> None:
    from msgspec.structs import replace

    topology = machines.single_no_smt()
    nodes = {i: replace(n, cpus=CPUSet()) for i, n in topology.numa_nodes.items()}
    cpus = {i: replace(c, numa_node=None) for i, c in topology.cpus.items()}
    world = World(replace(topology, numa_nodes=nodes, cpus=cpus))
    assert world.put("a", {"policy": "best-effort"}, 1.5, qos=BURSTABLE) == ("", "")
    world.check()


def test_huge_pages_widen_the_memory_nodes_too() -> None:
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, hugepages={2 << 20: 512 << 20}
    )
    world = World(topology)
    assert (
        world.put(
            "a", {"policy": "best-effort"}, 1.5, 1, qos=BURSTABLE, pages={2 << 20: 768 << 20}
        )[1]
        == "0-1"
    )


@pytest.mark.parametrize(
    ("cores", "cpus", "each"), [(8, 18, [9, 9]), (8, 24, [12, 12]), (14, 40, [20, 20])]
)
def test_distributed_cpus_are_as_many_on_each_numa_node(
    cores: int, cpus: int, each: list[int]
) -> None:
    """Whatever becomes of siblings: it was 10 and 8, 16 and 8, 26 and 14."""
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=cores)
    for smt in ("spread", "any", "pair", "full-core") if cpus % 4 == 0 else ("spread", "any"):
        world = World(topology, Settings(distribute_across_numa=True))
        owned = CPUSet.parse(world.put("a", {"cpus": "exclusive", "smt": smt}, cpus)[0])
        assert [len(owned & n.cpus) for n in topology.numa_nodes.values()] == each, smt
