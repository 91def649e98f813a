"""Cases 4 and 7 of the policies: the kubelet's rules for memory and CPUs, where they are set."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Reading, Refused
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import CPUOrder, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import GIB, World, container, pod, resources

SINGLE = {"policy": "single-numa-node"}


def two_nodes(reading: Reading | None = None, **settings: object) -> World:
    """CPUs 0-3 and 4-7, 8 GiB each."""
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=8,
        hugepages=settings.pop("pages", None),  # type: ignore[arg-type]
    )  # fmt: skip
    return World(topology, Settings(**settings), reading=reading)  # type: ignore[arg-type]


# --- case 4 -----------------------------------------------------------------------------------


def test_kubelet_memory_refuses_the_third_of_6_6_and_3_gib() -> None:
    """Also when the kernel says that all is free, since nobody touched it yet."""
    full = Reading(memory={0: 8 * GIB, 1: 8 * GIB})
    world = two_nodes(full, kubelet_memory=True)
    assert world.put("a", SINGLE, 1, 6)[1] == "0"
    assert world.put("b", SINGLE, 1, 6)[1] == "1"
    message = world.refused("c", SINGLE, 1, 3).message
    assert message == (
        "pod default/c, container app: memory: 3 GiB needed, 2 GiB free on NUMA node 0 "
        "(kubeletMemory); NUMA node 0 has too little memory, and no wider set that holds it fits; "
        "it needs 1 exclusive CPU and 3 GiB memory; free: NUMA node 0: 3 CPUs for exclusive "
        "use, 2 GiB memory; NUMA node 1: 3 CPUs for exclusive use, 2 GiB memory"
    )


def test_kubelet_memory_does_not_look_at_what_the_kernel_has() -> None:
    empty = Reading(memory={0: 0, 1: 0}, hugepages={0: {GIB: 0}, 1: {GIB: 0}})
    world = two_nodes(empty, kubelet_memory=True, pages={GIB: 2 * GIB})
    assert world.put("a", SINGLE, 1, 6, pages={GIB: 2 * GIB})[1] == "0"


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
def test_kubelet_memory_refuses_more_than_the_machine_has(policy: str) -> None:
    world = two_nodes(kubelet_memory=True)
    wishes = {"policy": policy, "cpus": "exclusive"}
    assert "100 GiB" in world.refused("a", wishes, 1, 100).message


def test_kubelet_memory_books_guaranteed_pods_only() -> None:
    world = two_nodes(kubelet_memory=True)
    best = {"policy": "best-effort"}
    assert world.put("a", best, 0.5, 8, QoSClass.BURSTABLE)[1] == ""
    assert world.put("own", {**best, "cpus": "exclusive"}, 1, 8, QoSClass.BURSTABLE)[1] == ""
    assert world.agent.state.charge(0).memory == 0
    assert world.put("b", SINGLE, 1, 8)[1] in ("0", "1")


def test_kubelet_memory_groups_never_overlap() -> None:
    world = two_nodes(kubelet_memory=True, kubelet_ties=True)
    best = {"policy": "best-effort"}
    assert world.put("pair", best, 1, 10)[1] == "0-1"
    # 6 GiB are left on NUMA node 1, but it is tied to NUMA node 0.
    message = world.refused("one", SINGLE, 1, 1).message
    assert "; other containers tie NUMA nodes 0-1 together (kubeletMemory)" in message
    assert world.put("two", best, 1, 2)[1] == "0-1"
    world.stop("pair-app")
    world.stop("two-app")
    assert world.put("one", SINGLE, 1, 1)[1] == "0"
    assert "no wider set" in world.refused("pair", best, 1, 10).message


def test_kubelet_memory_extends_what_a_pod_without_a_sum_was_given() -> None:
    """Its first container had no memory to speak of; strict policies do not extend."""
    for policy, mems in (("best-effort", "0-1"), ("single-numa-node", None)):
        world = two_nodes(kubelet_memory=True)
        of = pod("p", {"policy": policy, "scope": "pod"})
        assert world.add(of, "a", 1)[1] == ""
        answer = world.create(of, container(of, "b", resources(1, 10)))
        if mems is None:
            assert isinstance(answer, Refused)
            assert "memory: 10 GiB needed, 8 GiB free on NUMA node 0" in answer.message
            continue
        assert world.has("p-b")[1] == mems
        assert "memory extended from NUMA node 0 to 0-1" in world.steps("p-b")


def test_kubelet_memory_knows_every_size_of_huge_pages() -> None:
    size = 64 << 10
    world = two_nodes(kubelet_memory=True, pages={size: GIB})
    assert world.put("a", SINGLE, 1, 1, pages={size: GIB})[1] == "0"
    assert world.put("b", SINGLE, 1, 1, pages={size: size})[1] == "1"


def test_whole_cpus_of_a_later_container_need_none_of_its_pods_huge_pages() -> None:
    world, pages = two_nodes(kubelet_cpus=True, pages={GIB: 2 * GIB}), {GIB: GIB}
    of = pod("p", {"policy": "restricted", "scope": "pod"})
    of = replace(of, resources=resources(3.5, 2, hugepages=pages))
    assert world.place(of, container(of, "a", resources(1.5, 1, hugepages=pages))) == ("", "0")
    assert world.add(of, "b", 2, 1)[1] == "0"


def test_kubelet_memory_books_huge_pages_with_memory() -> None:
    world = two_nodes(kubelet_memory=True, kubelet_ties=True, pages={GIB: 2 * GIB})
    assert world.put("a", SINGLE, 1, 1, pages={GIB: GIB})[1] == "0"
    assert world.put("b", SINGLE, 1, 1, pages={GIB: 2 * GIB})[1] == "1"
    assert world.put("c", SINGLE, 1, 1, pages={GIB: GIB})[1] == "0"
    message = world.refused("d", SINGLE, 1, 1, pages={GIB: GIB}).message
    assert "hugepages-1Gi: 1 GiB needed, 0 B free on all NUMA nodes together" in message
    world.stop("a-app")
    assert world.put("d", SINGLE, 1, 1, pages={GIB: GIB})[1] == "0"
    small = {2 << 20: GIB}
    assert "2 MiB" in world.refused("e", SINGLE, 1, 1, pages=small).message


def test_kubelet_memory_of_a_list_is_booked_beside_the_others() -> None:
    world = two_nodes(kubelet_memory=True)
    assert world.put("a", {"numamem": "0"}, 1, 6)[1] == "0"
    assert world.put("b", SINGLE, 1, 6)[1] == "1"


# --- case 7 -----------------------------------------------------------------------------------


def test_kubelet_cpus_makes_no_cpu_hint_of_a_fraction() -> None:
    """The third 1500m pod on two NUMA nodes with two CPUs each was refused."""
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=2, threads=1)
    world = World(topology, Settings(kubelet_cpus=True))
    for name in "abc":
        assert world.put(name, SINGLE, 1.5, 1)[0] == ""
        assert world.allocation(f"{name}-app").kind is Kind.UNBOUND
    world = World(topology)
    world.put("a", SINGLE, 1.5, 1)
    world.put("b", SINGLE, 1.5, 1)
    assert "0.5 CPUs" in world.refused("c", SINGLE, 1.5, 1).message


def test_kubelet_cpus_lets_fractions_and_burstable_pods_take_nothing_from_owners() -> None:
    world = two_nodes(kubelet_cpus=True, reserved_cpus=CPUSet([0]))
    world.put("a", SINGLE, 2.5, 1)
    cpus, mems = world.put("b", SINGLE, 3, 1, QoSClass.BURSTABLE)
    assert (cpus, mems != "") == ("", True)
    assert len(CPUSet.parse(world.put("c", SINGLE, 4, 1)[0])) == 4
    # Nobody is bound to that NUMA node, so no CPU is kept back there either.
    assert len(CPUSet.parse(world.put("d", SINGLE, 3, 1)[0])) == 3
    assert world.has("a-app")[0] == "0"
    world.check()


def test_kubelet_cpus_hears_a_pod_that_asks_to_share_a_numa_node() -> None:
    world = two_nodes(kubelet_cpus=True)
    assert world.put("a", {**SINGLE, "cpus": "shared"}, 1.5, 1) == ("0-3", "0")


def test_kubelet_cpus_without_memory_to_align_pins_nothing() -> None:
    world = two_nodes(kubelet_cpus=True)
    assert world.put("a", {"policy": "best-effort"}, 1.5) == ("", "")
    assert world.put("b", SINGLE, 1.5) == ("", "")


@pytest.mark.parametrize("order", [(3, 1.5, 1.5), (1.5, 3, 1.5)])
def test_kubelet_cpus_counts_no_fraction_of_a_pod_as_exclusive(order: tuple[float, ...]) -> None:
    """3 + 1.5 + 1.5 on NUMA nodes with 4 CPUs needed 6."""
    world = two_nodes(kubelet_cpus=True)
    of = pod("p", {**SINGLE, "scope": "pod"}, total=resources(6, 3))
    for n, cpus in enumerate(order):
        world.add(of, f"c{n}", cpus, 1)
    assert {world.has(i)[1] for i in world.live} == {"0"}
    world.check()


def test_kubelet_cpus_places_a_pod_of_whole_cpus_where_all_of_it_fits() -> None:
    world = two_nodes(kubelet_cpus=True, kubelet_ties=True, cpu_order=CPUOrder.KUBELET)
    world.put("a", SINGLE, 1, 1)
    of = pod("p", {**SINGLE, "scope": "pod"}, total=resources(4, 2))
    world.add(of, "a", 2, 1)
    world.add(of, "b", 2, 1)
    assert (world.has("p-a"), world.has("p-b")) == (("4-5", "1"), ("6-7", "1"))


def test_kubelet_cpus_refuses_a_pod_when_no_part_of_it_fits() -> None:
    world = two_nodes(kubelet_cpus=True)
    for name in "ab":
        world.put(name, SINGLE, 2, 1)
    of = pod("p", {**SINGLE, "scope": "pod"}, total=resources(6, 2))
    refused = world.refuse(of, container(of, "a", resources(3, 1)))
    assert "all its containers together need 6 exclusive CPUs" in refused.message


def test_kubelet_cpus_refuses_a_pod_whose_cpus_and_memory_need_different_widths() -> None:
    """Known at its second container: the first had a fraction and the sum tells no more."""
    world = two_nodes(kubelet_cpus=True)
    of = pod("p", {"policy": "restricted", "scope": "pod"}, total=resources(1.5, 10))
    world.add(of, "a", 0.5, 5)
    refused = world.refuse(of, container(of, "b", resources(1, 5)))
    assert "more NUMA nodes than its CPUs need" in refused.message
