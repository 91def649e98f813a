"""Cases 2 and 3 of the policies: strict means strict at every step, and in scope ``pod`` too."""

from __future__ import annotations

import pytest

from nri_numa.engine.decision import Reading
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import CPUAmount, Limits, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import GIB, World, container, pod, resources

TOGETHER = {"policy": "single-numa-node", "scope": "pod"}
PAGES = {GIB: 2 * GIB}


def two_nodes(reading: Reading | None = None, pages: int = 0) -> World:
    """CPUs 0-3 and 4-7, 8 GiB each."""
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=8,
        hugepages={GIB: pages * GIB} if pages else None,
    )  # fmt: skip
    return World(topology, reading=reading)


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_huge_pages_do_not_spill_in_scope_pod(policy: str) -> None:
    """Two containers of 2 GiB in pages of 1 GiB, 2 GiB of such pages on each NUMA node."""
    world = two_nodes(pages=2)
    of = pod("p", {**TOGETHER, "policy": policy})
    assert world.place(of, container(of, "a", resources(1, 1, hugepages=PAGES)))[1] == "0"
    refused = world.refuse(of, container(of, "b", resources(1, 1, hugepages=PAGES)))
    assert refused.reason == "NotEnoughMemory"
    assert refused.message == (
        "pod default/p, container b: hugepages-1Gi: 2 GiB needed, 0 B free on NUMA node 0 "
        f"(policy {policy}); free: NUMA node 0: 3 CPUs for exclusive use, 5 GiB memory, 0 B in "
        "huge pages of 1 GiB; NUMA node 1: 4 CPUs for exclusive use, 6 GiB memory, "
        "2 GiB in huge pages of 1 GiB"
    )
    # One that can do with them may follow.
    assert world.add(of, "c", 1, 1)[1] == "0"


def test_memory_does_not_spill_when_the_pods_sum_is_unknown() -> None:
    world = two_nodes()
    of = pod("p", TOGETHER)
    assert world.add(of, "a", 1, 5)[1] == "0"
    refused = world.refuse(of, container(of, "b", resources(1, 5)))
    assert "memory: 5 GiB needed, 3 GiB free on NUMA node 0" in refused.message


def test_memory_does_not_spill_when_the_kernel_has_less_than_before() -> None:
    world = two_nodes(Reading(memory={0: 8 * GIB, 1: 8 * GIB}))
    of = pod("p", TOGETHER, total=resources(2, 6))
    assert world.add(of, "a", 1, 3)[1] == "0"
    world.reading = Reading(memory={0: 2 * GIB, 1: 8 * GIB})
    assert world.refuse(of, container(of, "b", resources(1, 3))).reason == "NotEnoughMemory"
    world.reading = Reading(memory={0: 4 * GIB, 1: 8 * GIB})
    assert world.add(of, "b", 1, 3)[1] == "0"


def test_shared_cpus_do_not_spill_when_the_pods_sum_is_unknown() -> None:
    world = two_nodes()
    of = pod("p", {**TOGETHER, "bind": "cpu"}, qos=QoSClass.BURSTABLE)
    world.add(of, "a", 2.5)[1]
    refused = world.refuse(of, container(of, "b", resources(2.5)))
    assert refused.message.startswith(
        "pod default/p, container b: cpu: 2.5 CPUs needed, 1.5 CPUs free on NUMA node 0; it needs "
        "2.5 CPUs where its pod was placed (policy single-numa-node, scope pod)"
    )
    world.add(of, "c", 0.5)[1]
    assert (
        "2 CPUs needed, 1 CPU free on NUMA node 0"
        in world.refuse(of, container(of, "d", resources(2))).message
    )


def test_what_spills_by_permission_widens() -> None:
    world = two_nodes()
    of = pod("p", {**TOGETHER, "on-failure": "widen"})
    assert world.add(of, "a", 1, 5)[1] == "0"
    assert world.add(of, "b", 1, 5)[1] == "0-1"


def test_a_pod_that_was_placed_wide_by_one_container_is_no_place_for_a_strict_one() -> None:
    world = two_nodes()
    wishes = {"scope": "pod", "policy.a": "best-effort", "policy.b": "single-numa-node",
              "policy.c": "restricted", "policy.d": "best-effort"}  # fmt: skip
    of = pod("p", wishes)
    assert world.add(of, "a", 6.5, 12)[1] == "0-1"
    assert "not one NUMA node" in world.refuse(of, container(of, "b", resources(0.5, 1))).message
    assert world.add(of, "c", 0.5, 1)[1] == "0-1"
    assert world.add(of, "d", 0.5, 1)[1] == "0-1"
    world.stop("p-a")
    world.add(pod("s", {"policy": "best-effort"}), "a", 1.5, 1)[1]
    world.add(pod("t", {"policy": "best-effort"}), "a", 1.5, 1)[1]
    of = pod("r", wishes)
    assert world.add(of, "a", 2.5, 1)[1] == "0-1"
    refused = world.refuse(of, container(of, "c", resources(0.5, 1)))
    assert "wider than an empty machine would need" in refused.message


# --- case 3 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_scope_pod_on_one_numa_node_places_what_fits(policy: str) -> None:
    """2 + 5 of 8 CPUs, and 3 + 3 of 8 GiB: the sum is asked for once, not once for each."""
    topology = synthetic(sockets=1, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=8)
    world = World(topology)
    of = pod("p", {"policy": policy, "scope": "pod"}, total=resources(7, 6))
    world.add(of, "a", 2, 3)
    cpus, mems = world.add(of, "b", 5, 3)
    assert (len(CPUSet.parse(cpus)), mems) == (5, "0")
    world.check()


def test_scope_pod_without_a_policy_places_each_container_by_itself() -> None:
    world = World(synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1),
                  Settings())  # fmt: skip
    of = pod("p", {"scope": "pod", "cpus": "exclusive"}, total=resources(7, 6))
    world.add(of, "a", 2, 3)
    world.add(of, "b", 5, 3)
    assert world.agent.state.pods[of.uid].affinity is None


# --- others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wishes", [{}, {"smt": "isolate"}, {"smt": "full-core"}])
def test_nobody_takes_the_last_cpu_of_a_numa_node_that_is_shared(wishes: dict[str, str]) -> None:
    """Who shares that NUMA node would run on the others from then on."""
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=8)
    world = World(topology, Settings(limits=Limits(idle=CPUAmount(percent=100))))
    world.put("share", {"policy": "single-numa-node"}, 0.5, 1, QoSClass.BURSTABLE)
    there = topology.cpus_of(world.allocation("share-app").numa_nodes)
    for number in range(8):
        own = pod(f"own{number}", {"cpus": "exclusive", **wishes})
        world.create(own, container(own, wants=resources(2, 1)))
        assert world.cpus("share-app") <= there
    assert len(world.agent.state.owned) >= 6
    world.check()


def test_a_list_does_not_take_the_last_cpus_of_a_numa_node_from_a_strict_pod() -> None:
    world = two_nodes()
    for name, policy in (("mild", "best-effort"), ("strict", "restricted")):
        world.put(name, {"policy": policy, "numamem": "0"}, 0.5, 1, QoSClass.BURSTABLE)
    every = pod("list", {"numacpu": "0-3", "cpus": "exclusive"})
    refused = world.refuse(every, wants=resources(4, 1))
    assert refused.reason == "SharedPoolEmpty"
    assert refused.message == (
        "pod default/list, container app: numacpu is '0-3' (annotation numa.kubernetes.io/numacpu) "
        "with cpus: exclusive, but that leaves no CPU on NUMA node 0 for default/strict/app, which "
        "shares CPUs there (policy restricted); expected one of 0-3 to be free"
    )
    world.stop("strict-app")
    world.place(every, wants=resources(4, 1))
    world.check()
