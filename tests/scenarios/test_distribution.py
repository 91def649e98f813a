"""Containers with devices on several NUMA nodes: CPUs and memory in proportion to them."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from nri_numa.engine.place.distribution import apportion_cpus
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import KubeletRules, Settings
from nri_numa.model.workload import Container, Device, DeviceRequest, PodSandbox
from tests.beds.world import GIB, SINGLE, World, container, pod, resources
from tests.machines import named as machines

WIDE = {"policy": "best-effort"}


def node_of(numa_nodes: int = 2, settings: Settings | None = None) -> World:
    """32 cores of two threads and 64 GiB on each NUMA node."""
    topology = build_synthetic_topology(
        sockets=numa_nodes, numa_per_socket=1, cores_per_numa=32, threads=2, memory_gib=64
    )
    return World(topology, settings)


def devices_of(resource: str, *counts: int, local_cpus: str = "") -> DeviceRequest:
    """So many devices on NUMA node 0, on 1 and so on."""
    devices = tuple(
        Device(
            id=f"{resource[-3:]}-{i}-{k}",
            numa_nodes=frozenset({i}),
            local_cpus=CPUSet.parse(local_cpus),
        )
        for i, count in enumerate(counts)
        for k in range(count)
    )
    return DeviceRequest(resource=resource, count=len(devices), devices=devices)


def with_devices(
    of: PodSandbox, cpus: float, *requests: DeviceRequest, name: str = "app", memory: float = 8
) -> Container:
    made = container(of, name, resources(cpus, memory))
    return replace(made, devices=requests, pod_devices=requests)


def cpu_counts(world: World, name: str = "job-app") -> dict[int, int]:
    return world.topology.cpu_count_by_node(world.allocation(name).cpus)


def placed_counts(
    world: World, asks: Mapping[str, str], cpus: int, *requests: DeviceRequest
) -> dict[int, int]:
    of = pod("job", asks)
    world.place(of, with_devices(of, cpus, *requests))
    return cpu_counts(world)


@pytest.mark.parametrize(
    ("gpus", "cpus", "asks", "counts"),
    [
        # Half a job on each NUMA node: all 48 CPUs were on the first one, in silence.
        ((4, 4), 48, {}, {0: 24, 1: 24}),
        ((6, 2), 48, {}, {0: 36, 1: 12}),
        ((4, 4), 48, {"policy": "restricted"}, {0: 24, 1: 24}),
        # A largest remainder, and of equal ones that of the lower id.
        ((1, 1), 7, {}, {0: 4, 1: 3}),
        ((1, 2), 7, {}, {0: 2, 1: 5}),
        # Whole cores where threads may share one; the last NUMA node has what is no whole core.
        ((1, 1), 7, {"smt": "any"}, {0: 4, 1: 3}),
        ((1, 1), 6, {"smt": "full-core"}, {0: 4, 1: 2}),
        ((3, 1), 8, {"smt": "full-core"}, {0: 6, 1: 2}),
        ((1, 1), 7, {"smt": "isolate"}, {0: 4, 1: 3}),
        ((1, 1), 7, {"smt": "pair", "load": "low"}, {0: 4, 1: 3}),
        ((1, 1), 1, {}, {0: 1}),
        # As few NUMA nodes as possible, if the pod says so; devices that do not matter.
        ((4, 4), 24, {"distribute": "none"}, {0: 24}),
        ((4, 4), 24, {"devices": "ignore"}, {0: 24}),
        # Without a policy devices bind nothing, unless the pod says so.
        ((4, 4), 24, {"policy": "none", "cpus": "exclusive"}, {0: 24}),
        (
            (4, 4),
            24,
            {"policy": "none", "cpus": "exclusive", "distribute": "devices"},
            {0: 12, 1: 12},
        ),
    ],
)
def test_cpus_are_in_proportion_to_the_gpus(
    gpus: tuple[int, ...], cpus: int, asks: dict[str, str], counts: dict[int, int]
) -> None:
    world = node_of()
    requests = devices_of("nvidia.com/gpu", *gpus)
    assert placed_counts(world, WIDE | asks, cpus, requests) == counts
    assert world.allocation("job-app").aligned


def test_memory_is_charged_in_the_same_proportion_as_far_as_it_is_free() -> None:
    world = node_of()
    of = pod("job", WIDE)
    gpus = devices_of("nvidia.com/gpu", 6, 2)
    made = with_devices(of, 48, gpus, memory=72)
    assert world.place(of, made)[1] == "0-1", "it may use the memory of both"
    charges = world.allocation("job-app").charges
    assert {i: charge.memory / GIB for i, charge in charges.items()} == {0: 54, 1: 18}
    world.stop("job-app")
    # 30 GiB of NUMA node 0 are another's.
    world.put("other", {"numamem": "0", "policy": "single-numa-node"}, 1, 30)
    world.place(of, with_devices(of, 48, gpus, memory=72))
    charges = world.allocation("job-app").charges
    in_gib = {i: round(charge.memory / GIB) for i, charge in charges.items()}
    assert in_gib == {0: 34, 1: 38}


def test_huge_pages_are_charged_in_whole_pages() -> None:
    world = World(machines.huge_pages())
    pages = {machines.HUGE_1G: 3 * machines.HUGE_1G}
    of = pod("job", WIDE)
    made = with_devices(of, 2, devices_of("nvidia.com/gpu", 1, 1), memory=1)
    made = replace(made, resources=resources(2, 1, hugepages=pages))
    world.place(of, made)
    charges = world.allocation("job-app").charges
    assert {i: c.hugepages[machines.HUGE_1G] >> 30 for i, c in charges.items()} == {0: 2, 1: 1}


def test_the_resource_with_most_devices_counts_and_of_equal_ones_the_first_by_name() -> None:
    gpus, nics = devices_of("nvidia.com/gpu", 3, 1), devices_of("intel.com/vf", 1, 3)
    assert placed_counts(node_of(), WIDE, 8, gpus, nics) == {0: 2, 1: 6}
    gpus = devices_of("nvidia.com/gpu", 4, 1)
    assert placed_counts(node_of(), WIDE, 10, gpus, nics) == {0: 8, 1: 2}


def test_what_does_not_fit_is_taken_elsewhere_and_said() -> None:
    world = node_of()
    world.put("other", {"numacpu": "0-26,64-90", "cpus": "exclusive"}, 54, 1)
    gpus = devices_of("nvidia.com/gpu", 4, 4)
    assert placed_counts(world, {"policy": "restricted"}, 48, gpus) == {0: 10, 1: 38}
    assert not world.allocation("job-app").aligned
    steps = world.steps("job-app")
    assert (
        "its CPUs are not in proportion to its nvidia.com/gpu devices, 4 on NUMA node 0 and 4 on "
        "NUMA node 1"
    ) in steps
    assert "10 of 24 CPUs beside those on NUMA node 0 could be taken" in steps
    # It starts again when there is room: not on the CPUs that it had.
    world.stop("other-app")
    world.stop("job-app")
    assert placed_counts(world, {"policy": "restricted"}, 48, gpus) == {0: 24, 1: 24}
    assert world.allocation("job-app").aligned


def test_a_restart_gives_back_cpus_that_are_in_proportion() -> None:
    world = node_of()
    world.put("other", {"numacpu": "0-3", "cpus": "exclusive"}, 4, 1)
    gpus = devices_of("nvidia.com/gpu", 1, 1)
    placed_counts(world, WIDE, 4, gpus)
    cpus = world.allocation("job-app").cpus
    world.stop("job-app")
    world.stop("other-app")
    assert placed_counts(world, WIDE, 4, gpus) == {0: 2, 1: 2}
    assert world.allocation("job-app").cpus == cpus


def test_a_resize_stays_in_proportion() -> None:
    world = node_of()
    gpus = devices_of("nvidia.com/gpu", 4, 4)
    assert placed_counts(world, WIDE, 48, gpus) == {0: 24, 1: 24}
    assert world.update("job-app", resources(24, 16)) is None
    assert cpu_counts(world) == {0: 12, 1: 12}
    charges = world.allocation("job-app").charges
    assert {i: charge.memory / GIB for i, charge in charges.items()} == {0: 8, 1: 8}
    assert world.update("job-app", resources(30, 16)) is None
    assert cpu_counts(world) == {0: 15, 1: 15}
    world.put("other", {"numacpu": "20-31,84-95", "cpus": "exclusive"}, 24, 1)
    assert world.update("job-app", resources(80, 16)) is None
    assert cpu_counts(world) == {0: 40, 1: 40}


def test_a_resize_that_cannot_stay_in_proportion_is_misaligned() -> None:
    world = node_of()
    gpus = devices_of("nvidia.com/gpu", 4, 4)
    placed_counts(world, WIDE, 24, gpus)
    world.put("other", {"numacpu": "16-31,64-95", "cpus": "exclusive"}, 48, 1)
    assert world.update("job-app", resources(40, 16)) is None
    assert cpu_counts(world) == {0: 16, 1: 24}
    assert not world.allocation("job-app").aligned
    assert "16 of 20 CPUs beside those on NUMA node 0 could be taken" in world.steps("job-app")


def test_shared_cpus_are_not_distributed() -> None:
    world = node_of()
    of = pod("job", WIDE | {"cpus": "shared"})
    world.place(of, with_devices(of, 2, devices_of("nvidia.com/gpu", 1, 1)))
    assert world.update("job-app", resources(3, 8)) is None
    assert not world.allocation("job-app").cpus
    # It becomes exclusive on the NUMA nodes that it has.
    of = pod("later", WIDE)
    world.place(of, with_devices(of, 1.5, devices_of("nvidia.com/gpu", 1, 1)))
    assert world.update("later-app", resources(4, 8)) is None
    assert cpu_counts(world, "later-app") == {0: 2, 1: 2}


def test_in_a_pod_placed_as_a_whole_each_container_is_beside_its_own_devices() -> None:
    world = node_of()
    both = devices_of("nvidia.com/gpu", 2, 2)
    of = pod("job", WIDE | {"scope": "pod"}, total=resources(50, 8))
    for name, devices in (("a", both.devices[:2]), ("b", both.devices[2:]), ("side", ())):
        own = (replace(both, count=len(devices), devices=devices),) if devices else ()
        made = container(of, name, resources(16 if devices else 2, 1))
        world.place(of, replace(made, devices=own, pod_devices=(both,)))
    assert cpu_counts(world, "job-a") == {0: 16}
    assert cpu_counts(world, "job-b") == {1: 16}
    assert cpu_counts(world, "job-side") == {0: 2}, "without devices on as few as possible"


def test_in_a_pod_placed_as_a_whole_one_container_has_all_devices() -> None:
    world = node_of()
    of = pod("job", WIDE | {"scope": "pod"}, total=resources(24, 8))
    world.place(of, with_devices(of, 24, devices_of("nvidia.com/gpu", 4, 4)))
    assert cpu_counts(world) == {0: 12, 1: 12}


@pytest.mark.parametrize(
    "rules",
    [
        KubeletRules(ties=True),
        KubeletRules(cpu_order=True),
        KubeletRules(distribute_cpus_across_numa=True, cpu_order=True),
    ],
)
def test_the_kubelets_rules_stay_unless_the_pod_says_otherwise(rules: KubeletRules) -> None:
    gpus = devices_of("nvidia.com/gpu", 3, 1)
    compatible = Settings(kubelet=rules)
    without = placed_counts(node_of(settings=compatible), WIDE, 16, gpus)
    assert without == ({0: 8, 1: 8} if rules.distribute_cpus_across_numa else {0: 16})
    asks = WIDE | {"distribute": "devices"}
    for smt in ("spread", "any", "full-core"):
        world = node_of(settings=compatible)
        assert placed_counts(world, asks | {"smt": smt}, 16, gpus) == {0: 12, 1: 4}


def test_a_kubelets_memory_is_charged_as_the_kubelet_does() -> None:
    world = node_of(settings=Settings(kubelet=KubeletRules(memory=True)))
    placed_counts(world, WIDE | {"policy": "best-effort"}, 16, devices_of("nvidia.com/gpu", 1, 1))
    charges = world.allocation("job-app").charges
    assert {i: charge.memory / GIB for i, charge in charges.items()} == {0: 8, 1: 0}


def test_listed_memory_confines_the_proportion() -> None:
    gpus = devices_of("nvidia.com/gpu", 2, 2)
    assert placed_counts(node_of(), WIDE | {"numamem": "1"}, 8, gpus) == {1: 8}
    gpus = devices_of("nvidia.com/gpu", 2, 2, 4)
    assert placed_counts(node_of(3), WIDE | {"numamem": "0-1"}, 8, gpus) == {0: 4, 1: 4}


def test_a_device_of_several_numa_nodes_does_not_count() -> None:
    world = node_of()
    gpus = devices_of("nvidia.com/gpu", 1, 1)
    both = Device(id="bridge", numa_nodes=frozenset({0, 1}))
    gpus = replace(gpus, devices=(*gpus.devices, both), count=3)
    assert placed_counts(world, WIDE, 8, gpus) == {0: 4, 1: 4}
    assert (
        "its nvidia.com/gpu bridge is of NUMA nodes 0-1, so it does not count in the proportion"
    ) in world.steps("job-app")
    only = replace(gpus, devices=(both,), count=1)
    assert placed_counts(node_of(), WIDE, 8, only) == {0: 8}


def test_slots_of_the_scheduler_are_where_the_kubelet_chose_them() -> None:
    """Its NUMA nodes, and how many CPUs of each, are chosen already."""
    world = node_of()
    of = pod("job", WIDE | {"distribute": "devices"})
    made = with_devices(of, 4, devices_of("nvidia.com/gpu", 1, 1))
    slots = ",".join(f"numa{i}-slot-{i}" for i in (0, 1)) + ",numa1-slot-2,numa1-slot-3"
    world.place(of, replace(made, annotations={"numa.kubernetes.io/slots": slots}))
    assert cpu_counts(world) == {0: 1, 1: 3}


def test_variables_name_the_cpus_of_each_numa_node() -> None:
    world = node_of()
    of = pod("job", WIDE)
    answer = world.admit(of, with_devices(of, 4, devices_of("nvidia.com/gpu", 1, 1)))
    assert answer.adjustment.env == {
        "NUMA_CPUS": "0-1,32-33",
        "NUMA_MEMS": "0-1",
        "NUMA_CPUS_0": "0-1",
        "NUMA_CPUS_1": "32-33",
    }


@pytest.mark.parametrize(
    ("asks", "cpus", "beside"),
    [
        (SINGLE, 4, "8-11"),
        (SINGLE | {"smt": "full-core"}, 10, "8-12,40-44"),
        # A core for each CPU is worth more than the root, and goes on with the next cache.
        (SINGLE, 10, "0-1,8-15"),
        (SINGLE | {"smt": "isolate"}, 12, "0-3,8-15"),
        (SINGLE | {"devices": "ignore"}, 4, "0-3"),
        ({"policy": "none", "cpus": "exclusive"}, 4, "0-3"),
    ],
)
def test_cpus_beside_the_pcie_root_come_first(asks: dict[str, str], cpus: int, beside: str) -> None:
    """Four caches for each NUMA node; the GPU's root is beside the third and fourth."""
    world = World(machines.chiplets())
    of = pod("job", asks)
    gpu = devices_of("nvidia.com/gpu", 1, local_cpus="8-15,40-47")
    where, _ = world.place(of, with_devices(of, cpus, gpu))
    assert where == beside


def test_the_explanation_says_what_the_pcie_root_was_good_for() -> None:
    world = World(machines.chiplets())
    of = pod("job", SINGLE)
    world.place(of, with_devices(of, 4, devices_of("gpu", 1, local_cpus="8-15,40-47")))
    roots = [step for step in world.steps("job-app") if "root" in step]
    text = "of its CPUs on NUMA node 0, 4 are beside the PCIe roots of its devices, CPUs 8-15,40-47"
    assert roots == [text]
    of = pod("all", SINGLE)
    world.place(of, with_devices(of, 4, devices_of("gpu", 1, local_cpus="0-63")))
    roots = [step for step in world.steps("all-app") if "root" in step]
    assert roots == [
        "all CPUs of NUMA node 0 are beside the PCIe roots of its devices, so the roots make no "
        "difference"
    ]
    world = World(machines.dual_smt_16())  # one cache for each NUMA node: nothing to say
    of = pod("job", SINGLE)
    world.place(of, with_devices(of, 2, devices_of("gpu", 1, local_cpus="0-63")))
    assert not [step for step in world.steps("job-app") if "root" in step]


def test_each_numa_nodes_part_begins_beside_its_own_root() -> None:
    world = World(machines.chiplets())
    of = pod("job", WIDE)
    here, there = devices_of("gpu", 1, 1).devices
    gpus = DeviceRequest(
        resource="gpu",
        count=2,
        devices=(
            replace(here, local_cpus=CPUSet.parse("4-7,36-39")),
            replace(there, local_cpus=CPUSet.parse("28-31,60-63")),
        ),
    )
    where, _ = world.place(of, with_devices(of, 6, gpus))
    assert where == "4-6,28-30"
    # The kubelet's order of CPUs knows no roots.
    world = World(machines.chiplets(), Settings(kubelet=KubeletRules(cpu_order=True)))
    where, _ = world.place(of, with_devices(of, 6, gpus))
    assert not CPUSet.parse(where) & CPUSet.parse("4-7,28-31")


def test_on_one_of_several_numa_nodes_roots_do_not_add_a_second_one() -> None:
    world = World(machines.chiplets())
    of = pod("job", WIDE | {"distribute": "none"})
    gpus = devices_of("gpu", 1, 1, local_cpus="12-15,28-31,44-47,60-63")
    world.place(of, with_devices(of, 6, gpus))
    assert len(cpu_counts(world)) == 1


def test_parts_are_whole_and_sum_up() -> None:
    assert apportion_cpus(5, {3: 1, 1: 1}, 2) == {1: 4, 3: 1}
