"""Cases 4, 5, 7 and 8 of the policies: the kubelet's rules and options, where they are set."""

import pytest
from msgspec.structs import replace

from nri_numa import config
from nri_numa.engine.decision import Rejected
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.state import ContainerKind
from nri_numa.errors import ConfigError
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import KubeletRules, Settings
from nri_numa.model.workload import Device, DeviceRequest, QoSClass
from tests.beds.world import GIB, SINGLE, World, container, pod, resources, two_nodes
from tests.machines import named as machines

# --- case 4 -----------------------------------------------------------------------------------


def test_kubelet_memory_rejects_the_third_of_6_6_and_3_gib() -> None:
    """Also when the kernel says that all is free, since nobody touched it yet."""
    full = MeasuredFree(memory={0: 8 * GIB, 1: 8 * GIB})
    world = two_nodes(full, kubelet=KubeletRules(memory=True))
    assert world.put("a", SINGLE, 1, 6)[1] == "0"
    assert world.put("b", SINGLE, 1, 6)[1] == "1"
    message = world.rejected("c", SINGLE, 1, 3).message
    assert message == (
        "pod default/c, container app: memory: 3 GiB needed, 2 GiB free on NUMA node 0 "
        "(kubeletCompatibility: memory); NUMA node 0 has too little memory, and no larger set "
        "fits; it needs 1 exclusive CPU and 3 GiB memory; free: NUMA node 0: 3 CPUs for "
        "exclusive use, 2 GiB memory; NUMA node 1: 3 CPUs for exclusive use, 2 GiB memory"
    )


def test_kubelet_memory_does_not_look_at_what_the_kernel_has() -> None:
    empty = MeasuredFree(memory={0: 0, 1: 0}, hugepages={0: {GIB: 0}, 1: {GIB: 0}})
    world = two_nodes(empty, kubelet=KubeletRules(memory=True), pages={GIB: 2 * GIB})
    assert world.put("a", SINGLE, 1, 6, pages={GIB: 2 * GIB})[1] == "0"


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
def test_kubelet_memory_rejects_more_than_the_machine_has(policy: str) -> None:
    world = two_nodes(kubelet=KubeletRules(memory=True))
    wishes = {"policy": policy, "cpus": "exclusive"}
    assert "100 GiB" in world.rejected("a", wishes, 1, 100).message


def test_kubelet_memory_books_guaranteed_pods_only() -> None:
    world = two_nodes(kubelet=KubeletRules(memory=True))
    best = {"policy": "best-effort"}
    assert world.put("a", best, 0.5, 8, QoSClass.BURSTABLE)[1] == ""
    assert world.put("own", {**best, "cpus": "exclusive"}, 1, 8, QoSClass.BURSTABLE)[1] == ""
    assert world.agent.current.state.allocated_on(0).memory == 0
    assert world.put("b", SINGLE, 1, 8)[1] in ("0", "1")


def test_kubelet_memory_groups_never_overlap() -> None:
    world = two_nodes(kubelet=KubeletRules(memory=True, ties=True))
    best = {"policy": "best-effort"}
    assert world.put("pair", best, 1, 10)[1] == "0-1"
    # 6 GiB are left on NUMA node 1, but it is tied to NUMA node 0.
    message = world.rejected("one", SINGLE, 1, 1).message
    assert (
        "; other containers tie NUMA nodes 0-1 together (kubeletCompatibility: memory)" in message
    )
    assert world.put("two", best, 1, 2)[1] == "0-1"
    world.stop("pair-app")
    world.stop("two-app")
    assert world.put("one", SINGLE, 1, 1)[1] == "0"
    assert "no larger set" in world.rejected("pair", best, 1, 10).message


def test_kubelet_memory_extends_what_a_pod_without_a_sum_was_given() -> None:
    """Its first container had no memory to speak of; strict policies do not extend."""
    for policy, mems in (("best-effort", "0-1"), ("single-numa-node", None)):
        world = two_nodes(kubelet=KubeletRules(memory=True))
        of = pod("p", {"policy": policy, "scope": "pod"})
        assert world.add(of, "a", 1)[1] == ""
        answer = world.create(of, container(of, "b", resources(1, 10)))
        if mems is None:
            assert isinstance(answer, Rejected)
            assert "memory: 10 GiB needed, 8 GiB free on NUMA node 0" in answer.message
            continue
        assert world.has("p-b")[1] == mems
        assert "memory extended from NUMA node 0 to NUMA nodes 0-1" in world.steps("p-b")


def test_kubelet_memory_knows_every_size_of_huge_pages() -> None:
    size = 64 << 10
    world = two_nodes(kubelet=KubeletRules(memory=True), pages={size: GIB})
    assert world.put("a", SINGLE, 1, 1, pages={size: GIB})[1] == "0"
    assert world.put("b", SINGLE, 1, 1, pages={size: size})[1] == "1"


def test_whole_cpus_of_a_later_container_need_none_of_its_pods_huge_pages() -> None:
    world, pages = two_nodes(kubelet=KubeletRules(cpus=True), pages={GIB: 2 * GIB}), {GIB: GIB}
    of = pod("p", {"policy": "restricted", "scope": "pod"})
    of = replace(of, resources=resources(3.5, 2, hugepages=pages))
    assert world.place(of, container(of, "a", resources(1.5, 1, hugepages=pages))) == ("", "0")
    assert world.add(of, "b", 2, 1)[1] == "0"


def test_kubelet_memory_books_huge_pages_with_memory() -> None:
    world = two_nodes(kubelet=KubeletRules(memory=True, ties=True), pages={GIB: 2 * GIB})
    assert world.put("a", SINGLE, 1, 1, pages={GIB: GIB})[1] == "0"
    assert world.put("b", SINGLE, 1, 1, pages={GIB: 2 * GIB})[1] == "1"
    assert world.put("c", SINGLE, 1, 1, pages={GIB: GIB})[1] == "0"
    message = world.rejected("d", SINGLE, 1, 1, pages={GIB: GIB}).message
    assert "hugepages-1Gi: 1 GiB needed, 0 B free on all NUMA nodes together" in message
    world.stop("a-app")
    assert world.put("d", SINGLE, 1, 1, pages={GIB: GIB})[1] == "0"
    assert "2 MiB" in world.rejected("e", SINGLE, 1, 1, pages={2 << 20: GIB}).message


def test_kubelet_memory_of_a_list_is_booked_beside_the_others() -> None:
    world = two_nodes(kubelet=KubeletRules(memory=True))
    assert world.put("a", {"numamem": "0"}, 1, 6)[1] == "0"
    assert world.put("b", SINGLE, 1, 6)[1] == "1"


# --- case 7 -----------------------------------------------------------------------------------


def test_kubelet_cpus_makes_no_cpu_hint_of_a_fraction() -> None:
    """The third 1500m pod on two NUMA nodes with two CPUs each was refused."""
    topology = machines.dual_no_smt(cores_per_numa=2)
    world = World(topology, Settings(kubelet=KubeletRules(cpus=True)))
    for name in "abc":
        assert world.put(name, SINGLE, 1.5, 1)[0] == ""
        assert world.allocation(f"{name}-app").kind is ContainerKind.UNPINNED
    world = World(topology)
    world.put("a", SINGLE, 1.5, 1)
    world.put("b", SINGLE, 1.5, 1)
    assert "0.5 CPUs" in world.rejected("c", SINGLE, 1.5, 1).message


def test_kubelet_cpus_lets_fractions_and_burstable_pods_take_nothing_from_owners() -> None:
    world = two_nodes(kubelet=KubeletRules(cpus=True), reserved_cpus=CPUSet([0]))
    world.put("a", SINGLE, 2.5, 1)
    cpus, mems = world.put("b", SINGLE, 3, 1, QoSClass.BURSTABLE)
    assert (cpus, mems != "") == ("", True)
    assert len(CPUSet.parse(world.put("c", SINGLE, 4, 1)[0])) == 4
    # Nobody is bound to that NUMA node, so no CPU is kept back there either.
    assert len(CPUSet.parse(world.put("d", SINGLE, 3, 1)[0])) == 3
    assert world.has("a-app")[0] == "0"


def test_kubelet_cpus_hears_a_pod_that_asks_to_share_a_numa_node() -> None:
    world = two_nodes(kubelet=KubeletRules(cpus=True))
    assert world.put("a", {**SINGLE, "cpus": "shared"}, 1.5, 1) == ("0-3", "0")


def test_kubelet_cpus_without_memory_to_align_pins_nothing() -> None:
    world = two_nodes(kubelet=KubeletRules(cpus=True))
    assert world.put("a", {"policy": "best-effort"}, 1.5) == ("", "")
    assert world.put("b", SINGLE, 1.5) == ("", "")


@pytest.mark.parametrize("order", [(3, 1.5, 1.5), (1.5, 3, 1.5)])
def test_kubelet_cpus_counts_no_fraction_of_a_pod_as_exclusive(order: tuple[float, ...]) -> None:
    """3 + 1.5 + 1.5 on NUMA nodes with 4 CPUs needed 6."""
    world = two_nodes(kubelet=KubeletRules(cpus=True))
    of = pod("p", {**SINGLE, "scope": "pod"}, total=resources(6, 3))
    for n, cpus in enumerate(order):
        world.add(of, f"c{n}", cpus, 1)
    assert {world.has(i)[1] for i in world.live} == {"0"}


def test_kubelet_cpus_rejects_a_pod_when_no_part_of_it_fits() -> None:
    world = two_nodes(kubelet=KubeletRules(cpus=True))
    for name in "ab":
        world.put(name, SINGLE, 2, 1)
    of = pod("p", {**SINGLE, "scope": "pod"}, total=resources(6, 2))
    rejected = world.reject(of, container(of, "a", resources(3, 1)))
    assert "all its containers together need 6 exclusive CPUs" in rejected.message


def test_kubelet_cpus_rejects_a_pod_whose_cpus_and_memory_need_different_widths() -> None:
    """Known at its second container: the first had a fraction and the sum tells no more."""
    world = two_nodes(kubelet=KubeletRules(cpus=True))
    of = pod("p", {"policy": "restricted", "scope": "pod"}, total=resources(1.5, 10))
    world.add(of, "a", 0.5, 5)
    rejected = world.reject(of, container(of, "b", resources(1, 5)))
    assert "more than its CPUs need" in rejected.message


# --- Cases 5 and 8 of the policies: options of the kubelet's, and which do not go together ------


STATIC = Settings(kubelet=KubeletRules(static_cpus=True))


def complaints(text: str) -> list[str]:
    """What is wrong with a configuration."""
    with pytest.raises(ConfigError) as caught:
        config.load_config(text=text)
    return [
        one.removesuffix(" (from the runtime's Configure text)") for one in caught.value.problems
    ]


# --- case 5 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("defaults.policy", "defaults: {policy: single-numa-node}"),
        (
            "rules[1].set.policy",
            "rules: [{set: {policy: none}}, {set: {policy: single-numa-node}}]",
        ),
    ],
)
def test_align_by_socket_with_single_numa_node_is_rejected(where: str, text: str) -> None:
    assert complaints(f"kubeletCompatibility: {{except: {{alignBySocket: true}}}}\n{text}") == [
        "kubeletCompatibility.except.alignBySocket: true takes CPUs from all NUMA nodes of a "
        f"socket, and {where} is single-numa-node; expected only one of them, as the kubelet does"
    ]


def test_align_by_socket_does_not_split_a_pod_that_asks_for_one_numa_node() -> None:
    """What an annotation asks for cannot be known when the configuration is read."""
    world = World(machines.snc_smt(), Settings(kubelet=KubeletRules(align_by_socket=True)))
    cpus, mems = world.put("a", {"policy": "single-numa-node"}, 6, 1)
    assert len(world.topology.numa_of(CPUSet.parse(cpus))) == 1
    assert world.topology.numa_of(CPUSet.parse(cpus)) == NUMASet.parse(mems)


def test_align_by_socket_needs_numa_nodes_in_sockets() -> None:
    """The kubelet refuses machines with more sockets than NUMA nodes."""
    one = machines.dual_smt_16(sockets_per_numa=2)
    assert len(one.sockets) > len(one.numa_nodes)
    by_socket = config.load_config(text="kubeletCompatibility: {except: {alignBySocket: true}}")
    (found,) = config.validate_config(by_socket, one)
    assert found.startswith(
        "kubeletCompatibility.except.alignBySocket: this machine has 2 sockets and"
    )
    assert config.validate_config(by_socket, machines.snc_smt()) == []


# --- case 8 -----------------------------------------------------------------------------------


def test_distribute_cpus_across_cores_takes_one_thread_of_each_core() -> None:
    settings = Settings(kubelet=KubeletRules(cpu_order=True), align_l3=False)
    assert World(machines.dual_smt(), settings).put("a", {"policy": "best-effort"}, 4, 1)[0] == (
        "0-1,32-33"
    )
    settings = Settings(
        kubelet=KubeletRules(cpu_order=True, distribute_cpus_across_cores=True), align_l3=False
    )
    world = World(machines.dual_smt(), settings)
    assert world.put("a", {"policy": "best-effort"}, 4, 1)[0] == "0-3"
    assert world.put("b", {"policy": "best-effort"}, 3, 1)[0] == "16-18"
    # A whole socket is still taken as a whole.
    world = World(machines.dual_smt(), settings)
    assert world.put("c", {"policy": "best-effort"}, 33, 1)[0] == "0-16,32-47"
    # Who asks for whole cores gets them.
    world = World(machines.dual_smt(), settings)
    assert world.put("d", {"policy": "best-effort", "smt": "full-core"}, 4, 1)[0] == "0-1,32-33"


def test_distribute_cpus_across_cores_does_not_go_with_other_options() -> None:
    found = complaints(
        "kubeletCompatibility: {except: {distributeCPUsAcrossCores: true, "
        "distributeCPUsAcrossNUMA: true}}\nrules: [{set: {smt: full-core}}]"
    )
    assert [one.partition(", expected ")[2] for one in found[:3]] == [
        "cpuOrder: true beside it; without it smt: spread takes one thread of each core",
        "distributeCPUsAcrossNUMA: false beside it, as the kubelet does",
        "alignL3: false beside it, as the kubelet does",
    ]
    assert "rules[0].set.smt is full-core" in found[3]
    good = "{kubeletCompatibility: {mode: full, except: {distributeCPUsAcrossCores: true}}}"
    made = config.derive_settings(config.load_config(text=good))
    assert made.kubelet.distribute_cpus_across_cores


def test_reserved_huge_pages_are_promised_to_nobody() -> None:
    topology = machines.dual_smt_16(memory_gib=8, hugepages={GIB: 2 * GIB})
    text = "reservedMemory: {0: {hugepages-1Gi: 1Gi, memory: 512Mi}, 1: 1Gi}"
    loaded = config.load_config(text=text)
    assert config.validate_config(loaded, topology) == []
    settings = config.derive_settings(loaded)
    assert settings.reserved_memory == {0: GIB // 2, 1: GIB}
    assert settings.reserved_hugepages == {0: {GIB: GIB}}
    world = World(topology, settings)
    for name, node in (("a", "1"), ("b", "0")):
        of = pod(name, {"policy": "single-numa-node"})
        size = {GIB: 2 * GIB if name == "a" else GIB}
        assert world.place(of, wants=resources(1, 1, hugepages=size))[1] == node
    of = pod("c", {"policy": "best-effort", "on-failure": "reject"})
    rejected = world.reject(
        pod("c", {"policy": "single-numa-node"}),
        container(of, wants=resources(1, 1, hugepages={GIB: GIB})),
    )
    assert "0 B in huge pages of 1 GiB" in rejected.message


def test_reserved_huge_pages_that_make_no_sense_are_mistakes() -> None:
    found = complaints(
        "reservedMemory: {0: {hugepages-3Mi: 1Gi}, 1: {memory: lots, pages: 1}, 2: {}}"
    )
    assert [one.partition(":")[0] for one in found] == [
        "reservedMemory.0.hugepages-3Mi",
        "reservedMemory.1.memory",
        "reservedMemory.1.pages",
    ]
    loaded = config.load_config(
        text="reservedMemory: {0: {hugepages-1Gi: 3Gi, hugepages-2Mi: 2Mi}}"
    )
    topology = machines.single_smt(hugepages={GIB: 2 * GIB})
    assert config.validate_config(loaded, topology) == [
        "reservedMemory.0.hugepages-1Gi: 3Gi is more than the 2147483648 bytes of NUMA node 0 in "
        "hugepages-1Gi",
        "reservedMemory.0.hugepages-2Mi: 2Mi is more than the 0 bytes of NUMA node 0 in "
        "hugepages-2Mi",
    ]


def test_static_cpus_gives_guaranteed_pods_cpus_without_a_policy() -> None:
    world = World(machines.dual_no_smt(), STATIC)
    cpus, mems = world.put("a", {}, 10, 1)
    assert (len(CPUSet.parse(cpus)), mems) == (10, ""), "not aligned, and memory left alone"
    assert world.allocation("a-app").kind is ContainerKind.EXCLUSIVE
    assert world.update("a-app", resources(9, 1)) is None
    assert len(world.cpus("a-app")) == 9
    world.stop("a-app")
    assert world.put("fraction", {}, 1.5, 1) == ("", "")
    assert world.put("burstable", {}, 2, 1, QoSClass.BURSTABLE) == ("", "")
    assert world.put("out", {"bind": "none"}, 2, 1) == ("", "")
    assert world.put("shares", {"cpus": "shared"}, 2, 1) == ("", "")
    assert world.put("aligned", {"policy": "single-numa-node"}, 2, 1)[1] == "0"
    assert world.put("memory", {"bind": "cpu+mem"}, 2, 1)[1] == "0"
    assert world.put("listed", {"numamem": "1"}, 2, 1)[1] == "1"


def test_static_cpus_with_the_kubelets_memory_manager_gives_memory_nodes_too() -> None:
    world = World(
        machines.dual_no_smt(), Settings(kubelet=KubeletRules(static_cpus=True, memory=True))
    )
    assert world.put("a", {}, 2, 12)[1] == "0"
    assert world.put("b", {}, 2, 12)[1] == "1"
    assert world.rejected("c", {}, 2, 12).reason == "NotEnoughMemory"


def test_static_cpus_says_where_it_comes_from() -> None:
    world = World(machines.dual_no_smt(), STATIC)
    world.put("a", {}, 2, 1)
    known = world.grounds("a-app")
    assert known.basis.requested is not None
    assert known.basis.requested["cpus"][1] == "staticCPUs"


# --- distribute-cpus-across-numa --------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_cpus_are_on_every_numa_node_that_the_hint_has_for_devices(order: bool) -> None:
    """22 CPUs fit three of four NUMA nodes, and the eight GPUs are on all of them."""
    world = World(
        machines.snc_smt(),
        Settings(kubelet=KubeletRules(distribute_cpus_across_numa=True, cpu_order=order)),
    )
    gpus = tuple(Device(id=f"gpu{n}", numa_nodes=frozenset([n // 2])) for n in range(8))
    of = pod("p", {"policy": "best-effort", "smt": "any"})
    made = container(of, wants=resources(22, 1))
    request = DeviceRequest(resource="example.org/gpu", count=8, devices=gpus)
    world.place(of, replace(made, devices=(request,)))
    nodes = world.topology.numa_nodes.values()
    cpus = world.cpus(made.id)
    assert sorted(len(node.cpus & cpus) for node in nodes) == [5, 5, 6, 6]


# --- align-by-socket --------------------------------------------------------------------------


def one_socket() -> World:
    """Two NUMA nodes of one socket, CPUs 0-3 and 4-7, 8 GiB each; as under the kubelet."""
    topology = machines.snc_single_no_smt(memory_gib=8)
    return World(
        topology,
        Settings(
            kubelet=KubeletRules(
                align_by_socket=True, cpus=True, memory=True, ties=True, cpu_order=True
            )
        ),
    )


RESTRICTED_POD = {"policy": "restricted", "scope": "pod"}


def test_a_pod_as_wide_as_its_socket_is_as_wide_as_it_needs_to_be() -> None:
    """12 GiB take both NUMA nodes; one socket is what the kubelet's option asks for."""
    world = one_socket()
    of = pod("p", RESTRICTED_POD, total=resources(2.5, 12))
    world.add(of, "a", 0.5, 4)
    for name in "bc":
        assert world.add(of, name, 1, 4)[1] == "0-1"


def test_cpus_from_elsewhere_in_the_socket_make_a_pod_no_wider() -> None:
    world = one_socket()
    world.put("o", {"numacpu": "4-5", "cpus": "exclusive"}, 2)
    of = pod("p", RESTRICTED_POD, total=resources(2, 2))
    for name in "ab":
        world.add(of, name, 1, 1)
    assert world.agent.current.state.pods[of.uid].affinity_is_preferred


def test_cpus_that_its_pod_would_not_have_had_are_rejected() -> None:
    """Four and four CPUs of which three are free each, as the pod comes that needs two and two."""
    world = one_socket()
    for number, listed in enumerate(("0", "4")):
        world.put(f"o{number}", {"numacpu": listed, "cpus": "exclusive"}, 1)
    of = pod("p", RESTRICTED_POD, total=resources(4, 2))
    world.add(of, "a", 2, 1)
    rejected = world.reject(of, container(of, "b", resources(2, 1)))
    assert (
        "cpu: 2 exclusive CPUs needed, 1 free for exclusive use on NUMA node 0" in rejected.message
    )
