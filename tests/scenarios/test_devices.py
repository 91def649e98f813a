"""Containers that have devices: CPUs and memory beside them, unless their pod says otherwise."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.agent.agent import Agent
from nri_numa.agent.handler import AgentHandler
from nri_numa.config.sections import Devices
from nri_numa.devices.watch import DeviceWatch
from nri_numa.engine.decision import RejectionWithAlignment
from nri_numa.engine.explain.explanation import (
    explain_allocation,
    explain_rejection,
    stored_explanation,
)
from nri_numa.engine.explain.sentences import explanation_sentences
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import (
    Container,
    Device,
    DeviceAlignmentMode,
    DeviceRequest,
    DeviceStock,
    PodSandbox,
)
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.beds.nri_requests import NRIRequests
from tests.beds.world import SINGLE, World, container, pod, resources, says, two_nodes
from tests.machines import named as machines


class Watch(DeviceWatch):
    """What threads would do is done when the test says so."""

    def __init__(self, root: Path, agent: Agent) -> None:
        super().__init__(
            Devices(network_interfaces=False, cdi=False),
            root=str(root),
            kubelet_root="",
            alignable_nodes=lambda: agent.current.machine.alignable_nodes,
        )
        self.jobs: deque[Callable[[], object]] = deque()

    def _submit_task(self, pool: object, function: Callable[..., object], *args: object) -> None:
        self.jobs.append(partial(function, *args))

    def wait_for_tasks(self) -> None:
        while self.jobs:
            self.jobs.popleft()()


GPU = "0000:3b:00.0"
ON_0, ON_1 = CPUSet.parse("0-3"), CPUSet.parse("4-7")

usual = two_nodes


def request(kind: str, devices: Mapping[str, tuple[int, ...]]) -> DeviceRequest:
    made = tuple(Device(id=id, numa_nodes=frozenset(nodes)) for id, nodes in devices.items())
    return DeviceRequest(resource=kind, count=len(made), devices=made)


def with_gpus(
    of: PodSandbox, cpus: float = 2, *, notes: tuple[str, ...] = (), **gpus: tuple[int, ...]
) -> Container:
    made = container(of, wants=resources(cpus, 1))
    devices = (request("GPU", gpus or {GPU: (1,)}),)
    return replace(made, devices=devices, device_notes=notes)


POLICIES = ("single-numa-node", "restricted", "best-effort")
MANY = {f"gpu{i}": (1,) for i in range(9)}


@pytest.mark.parametrize(
    ("asks", "gpus", "numa_node", "said"),
    [
        *(
            ({"policy": policy, "cpus": cpus}, {GPU: (1,)}, 1, f"{GPU} is there")
            for policy in POLICIES
            for cpus in ("shared", "exclusive")
        ),
        (SINGLE, MANY, 1, "gpu0, gpu1, gpu2, gpu3 and 5 more are there"),
        (SINGLE, {"gpu": ()}, 0, ""),  # of no NUMA node
        ({"cpus": "exclusive"}, {GPU: (1,)}, 0, ""),  # without a policy they do not bind
    ],
)
def test_a_container_is_placed_where_its_gpus_are(
    world: World, asks: dict[str, str], gpus: dict[str, tuple[int, ...]], numa_node: int, said: str
) -> None:
    of = pod("a", asks)
    where, mems = world.place(of, with_gpus(of, **gpus))
    assert CPUSet.parse(where) <= (ON_0, ON_1)[numa_node]
    assert mems == str(numa_node)
    because = [step for step in world.steps("a-app") if "GPU" in step]
    assert because == [f"on NUMA node {numa_node}, because its GPU {said}"] * bool(said)


def test_gpus_with_no_cpu_near_are_named() -> None:
    """Its CPUs are on two of the five NUMA nodes that were chosen for its GPUs."""
    topology = build_synthetic_topology(sockets=8, numa_per_socket=1, cores_per_numa=4)
    world = World(topology)
    of = pod("a", {"policy": "restricted", "cpus": "exclusive", "distribute": "none"})
    world.place(of, with_gpus(of, 10, **{f"g{i}": (i,) for i in range(5)}))
    assert [step for step in world.steps("a-app") if "GPU" in step] == [
        "on NUMA nodes 0-1, because its GPU g0, g1 are there",
        "its GPU g2, g3, g4 are on NUMA nodes 2-4, outside of NUMA nodes 0-1",
    ]


def test_nics_apart_are_tied_by_nothing(world: World) -> None:
    of = pod("a", {"policy": "single-numa-node"})
    rejected = world.reject(of, with_gpus(of, n0=(0,), n1=(1,)))
    says(rejected, "DeviceAffinityError", "it has GPU n0 (NUMA node 0) and GPU n1 (NUMA node 1);")


def test_listed_memory_confines_the_cpus_and_not_the_devices(world: World) -> None:
    asks = SINGLE | {"cpus": "exclusive", "numamem": "0"}
    where, mems = world.place(near := pod("a", asks), with_gpus(near, **{GPU: (0,)}))
    assert (CPUSet.parse(where) <= ON_0, mems) == (True, "0")
    rejected = world.reject(far := pod("b", asks), with_gpus(far))
    each = "each fits, but not on the same NUMA nodes: 2 exclusive CPUs on NUMA node 0, 1 GPU on"
    says(rejected, "DeviceAffinityError", f"{each} NUMA node 1")


def test_the_explanation_says_so_in_a_sentence(world: World) -> None:
    of = pod("a", SINGLE)
    world.place(of, with_gpus(of, notes=("variable PCIDEVICE_X names nothing: no hint",)))
    allocation = world.allocation("a-app")
    document = explain_allocation(allocation, world.history.explanation_of("a-app"), "4-7")
    text = "\n".join(explanation_sentences(document))
    assert f"On NUMA node 1, because its GPU {GPU} is there." in text
    assert "Variable PCIDEVICE_X names nothing: no hint." in text
    (gpu,) = [r for r in document["resources"] if r["resource"] == "GPU"]
    assert gpu["demand"] == 1


def test_devices_ignore_places_as_if_there_were_none_and_says_so(world: World) -> None:
    of = pod("a", {"policy": "single-numa-node", "devices": "ignore"})
    made = with_gpus(of)
    kinds = (*made.devices, request("NIC", {"nic0": (1,)}), request("disk", {"sda": (1,)}))
    where, mems = world.place(of, replace(made, devices=kinds))
    assert CPUSet.parse(where) <= ON_0
    assert mems == "0"
    expected = f"devices: ignore, so GPU {GPU}, NIC nic0 and disk sda are ignored"
    assert expected in world.steps("a-app")
    asked = world.grounds("a-app")
    assert asked.basis.requested is not None
    assert asked.basis.requested["devices"] == ("ignore", "annotation numa.kubernetes.io/devices")


def test_devices_is_a_key_of_rules_and_defaults_and_its_values_are_checked() -> None:
    world = two_nodes(defaults={"devices": "ignore", "policy": "restricted"})
    of = pod("a")
    assert CPUSet.parse(world.place(of, with_gpus(of))[0]) <= ON_0
    rejected = world.rejected("b", {"devices": "alined"})
    assert "expected one of align, ignore (did you mean align?)" in rejected.message
    assert DeviceAlignmentMode("align") is DeviceAlignmentMode.ALIGN


def test_a_single_container_may_ignore_what_the_pod_aligns(world: World) -> None:
    of = pod("a", {"policy": "single-numa-node", "devices.app": "ignore"})
    assert CPUSet.parse(world.place(of, with_gpus(of))[0]) <= ON_0
    helper = replace(with_gpus(of), id="a-helper", name="helper")
    assert CPUSet.parse(world.place(of, helper)[0]) <= ON_1


def test_where_the_gpus_numa_node_is_full_it_is_rejected_with_both_reasons(world: World) -> None:
    world.put("full", {"numacpu": "4-7", "cpus": "exclusive"}, 4, 1)
    of = pod("a", {"policy": "single-numa-node", "cpus": "exclusive"})
    says(world.reject(of, with_gpus(of)), "DeviceAffinityError", "GPU")


def test_a_device_of_several_numa_nodes_suits_each_of_them(world: World) -> None:
    world.put("full", {"numacpu": "0-3", "cpus": "exclusive"}, 4, 1)
    of = pod("a", {"policy": "single-numa-node", "cpus": "exclusive"})
    assert CPUSet.parse(world.place(of, with_gpus(of, gpu=(0, 1)))[0]) <= ON_1


def test_devices_on_two_numa_nodes_have_no_single_one(world: World) -> None:
    of = pod("a", SINGLE)
    says(world.reject(of, with_gpus(of, a=(0,), b=(1,))), "", "GPU")
    of = pod("b", {"policy": "best-effort"})
    assert world.place(of, with_gpus(of, a=(0,), b=(1,)))[1] in ("0", "1", "0-1")
    assert [step for step in world.steps("b-app") if "GPU" in step]


@pytest.mark.parametrize(("scope", "numa_node"), [("pod", "1"), ("container", "0")])
def test_a_pod_as_a_whole_goes_where_the_devices_of_all_its_containers_are(
    world: World, scope: str, numa_node: str
) -> None:
    """The first container has none; with its pod it goes where the second one's is."""
    of = pod("a", {**SINGLE, "scope": scope}, total=resources(2, 2))
    theirs = (request("GPU", {GPU: (1,)}),)
    first = replace(container(of, "first", resources(1, 1)), pod_devices=theirs)
    assert world.place(of, first)[1] == numa_node
    assert world.place(of, replace(with_gpus(of, 1), id="a-second", name="second"))[1] == "1"


def test_what_gives_no_hint_is_said_of_a_container_without_any_other_device(world: World) -> None:
    of = pod("a", SINGLE)
    note = "variable PCIDEVICE_X names nothing: no hint"
    world.place(of, replace(container(of, wants=resources(1, 1)), device_notes=(note,)))
    assert note in world.steps("a-app")


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ({"a": (1,)}, "its GPU a is on NUMA node 1, outside of NUMA node 0"),
        ({"a": (1,), "b": (1,)}, "its GPU a, b are on NUMA node 1, outside of NUMA node 0"),
    ],
)
def test_devices_that_are_elsewhere_are_named(gpus: dict[str, tuple[int, ...]], said: str) -> None:
    """All CPUs beside them belong to somebody else."""
    world = two_nodes()
    other = pod("other", {"cpus": "exclusive", "policy": "single-numa-node"})
    world.place(other, with_gpus(other, 4))
    of = pod("late", {"cpus": "exclusive", "policy": "best-effort"})
    world.place(of, with_gpus(of, 2, **gpus))
    assert said in " ".join(world.steps("late-app"))


# --- CPUs beside most of the devices, and away from those of others -------------------------------


@pytest.mark.parametrize("policy", ["best-effort", "restricted"])
def test_cpus_begin_beside_most_of_the_devices(policy: str) -> None:
    """Two GPUs on NUMA node 1 and one on 0: CPUs went to NUMA node 0."""
    three = request("GPU", {"a": (0,), "b": (1,), "c": (1,)})
    world = World(machines.dual_smt_16())
    of = pod("gpus", {"policy": policy, "distribute": "none"})
    made = replace(container(of, wants=resources(3, 1)), devices=(three,))
    world.place(of, made)
    assert world.topology.numa_of(CPUSet.parse(world.has(made.id)[0])) == NUMASet([1])


def test_gpus_without_cpus_near_them_are_named() -> None:
    """Two of four: all CPUs fit beside the others."""
    world = usual()
    gpus = {"a": (0,), "b": (0,), "c": (1,), "d": (1,)}
    of = pod("p", {"policy": "best-effort", "distribute": "none"})
    steps = world.admit(of, with_gpus(of, **gpus)).trace.decision_steps
    assert "its GPU c, d are on NUMA node 1, outside of NUMA node 0" in steps
    of = pod("q", {"policy": "best-effort"})
    steps = world.admit(of, with_gpus(of, 5, **gpus)).trace.decision_steps
    assert not [step for step in steps if "although its GPU" in step]


def test_pods_without_devices_keep_away_from_free_ones() -> None:
    """Both went to NUMA nodes in turn, until nothing was left beside the GPUs."""
    world = World(machines.dual_smt_16(), reading=MeasuredFree(devices={0: 2, 1: 0}))
    for name in ("a", "b"):
        assert world.put(name, SINGLE, 3, 1)[1] == "1"
    assert world.put("c", SINGLE, 3, 1)[1] == "0", "it fits nowhere else"


def test_a_device_of_two_numa_nodes_counts_on_the_one_that_was_chosen() -> None:
    world = World(machines.snc_smt())
    of = pod("gpus", {"policy": "best-effort"})
    both = request("GPU", {"a": (0,), "b": (0, 3)})
    world.place(of, replace(container(of, wants=resources(9, 1)), devices=(both,)))
    cpus = CPUSet.parse(world.has("gpus-app")[0])
    assert [len(node.cpus & cpus) for node in world.topology.numa_nodes.values()] == [5, 4, 0, 0]


def test_containers_of_a_synchronize_are_beside_the_devices_that_their_messages_mention(
    world: World, tmp_path: Path
) -> None:
    """Found running after a restart: a device file in the message of the one, none in the other."""
    world.ends_whole = False
    tree = DeviceTree(tmp_path)
    tree.number("char", "226:0", tree.pci(GPU, 1, GPU_CLASS))
    devices = Watch(tmp_path, world.agent)
    handler = AgentHandler(world.agent, sources=[devices])
    sandbox = pb.PodSandbox(id="s", uid="u", namespace="shop", name="train")
    sandbox.annotations["numa.kubernetes.io/policy"] = "single-numa-node"
    running = [
        pb.Container(id=name, pod_sandbox_id="s", name=name, state=pb.CONTAINER_RUNNING)
        for name in ("beside", "without", "orphan")
    ]
    for one in running:
        one.linux.resources.cpu.shares.value = 1024
        one.linux.resources.memory.limit.value = 1 << 28
    running[0].linux.devices.add(path="/dev/dri/renderD128", type="c", major=226, minor=0)
    running[2].pod_sandbox_id = "gone"
    NRIRequests(handler).synchronize([sandbox], running)
    has = world.agent.current.state.allocations
    assert str(has["beside"].numa_nodes) == "1"
    assert str(has["without"].numa_nodes) == "0"
    assert "orphan" not in has


# --- devices that the kubelet could have given ----------------------------------------------------

NIC_KIND, GPU_KIND = "example.com/nic", "example.com/gpu"


def given(kind: str, *ids: int, free: tuple[int, ...] = (), known: bool = True) -> DeviceRequest:
    """Devices ``kind-0``, … of which each NUMA node has two; these are given, and those free."""
    name = kind.rpartition("/")[2]
    each = [Device(id=f"{name}-{n}", numa_nodes=frozenset([n // 2])) for n in range(4)]
    choices = tuple(each[n] for n in sorted({*ids, *free}))
    stock = DeviceStock(
        capacity={0: 2, 1: 2},
        free={i: sum(i in device.numa_nodes for device in choices) for i in (0, 1)},
        choices=choices,
    )
    return DeviceRequest(
        resource=kind,
        count=len(ids),
        devices=tuple(each[n] for n in ids),
        stock=stock if known else None,
    )


def with_devices(of: PodSandbox, *requests: DeviceRequest, cpus: float = 2) -> Container:
    return replace(container(of, wants=resources(cpus, 1)), devices=requests)


ALTERNATIVE = (
    "gpu-2 and nic-2 would both be on NUMA node 1 "
    "(the kubelet aligns devices with topologyManagerPolicy: best-effort)"
)


def test_better_devices_are_named_where_the_kubelet_gave_misaligned_ones(world: World) -> None:
    of = pod("a", SINGLE)
    made = with_devices(of, given(GPU_KIND, 0, free=(2, 3)), given(NIC_KIND, 2))
    rejected = world.reject(of, made)
    says(
        rejected,
        "DeviceAffinityError",
        f"container app: {GPU_KIND} and {NIC_KIND}: the kubelet gave gpu-0 (NUMA node 0) and nic-2 "
        f"(NUMA node 1); {ALTERNATIVE}; it needs",
    )
    alignment = RejectionWithAlignment.alignment_of(rejected.rejection)
    assert alignment is not None
    assert alignment.misaligned_devices is not None
    alternative = alignment.misaligned_devices.alternative or ()
    assert [(d.resource, d.id) for d in alternative] == [(GPU_KIND, "gpu-2"), (NIC_KIND, "nic-2")]
    document = explain_rejection(
        stored_explanation(rejected.trace), rejected.reason, rejected.message
    )
    assert document["misalignedDevices"] == {
        "given": [
            {"resource": GPU_KIND, "id": "gpu-0", "numaNodes": "0"},
            {"resource": NIC_KIND, "id": "nic-2", "numaNodes": "1"},
        ],
        "apart": True,
        "isKubeletChoice": True,
        "alternative": [
            {"resource": GPU_KIND, "id": "gpu-2", "numaNodes": "1"},
            {"resource": NIC_KIND, "id": "nic-2", "numaNodes": "1"},
        ],
        "numaNodes": "1",
        "remedy": "topologyManagerPolicy: best-effort",
        "text": "the kubelet gave gpu-0 (NUMA node 0) and nic-2 (NUMA node 1); " + ALTERNATIVE,
    }
    text = "\n".join(explanation_sentences(document))
    assert f"rejects it: {document['misalignedDevices']['text']}." in text
    free = [line for line in text.splitlines() if line.startswith("Free on NUMA node")]
    assert [line.partition("of memory, ")[2] for line in free] == [
        "1 of 2 of example.com/gpu and 0 of 2 of example.com/nic (1 needed).",
        "2 of 2 of example.com/gpu and 1 of 2 of example.com/nic.",
    ]


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        (
            (given(GPU_KIND, 0), given(NIC_KIND, 2)),
            "the kubelet gave gpu-0 (NUMA node 0) and nic-2 (NUMA node 1), and no free ones are "
            "better aligned;",
        ),
        (
            (given(GPU_KIND, 0, known=False), given(NIC_KIND, 2, known=False)),
            "it has gpu-0 (NUMA node 0) and nic-2 (NUMA node 1); it needs",
        ),
        (
            (given(GPU_KIND, 0, free=(2,)), given(NIC_KIND, 2, known=False)),
            "it has gpu-0 (NUMA node 0) and nic-2 (NUMA node 1); gpu-2 and nic-2 would both be on "
            "NUMA node 1 (",
        ),
        (
            (given(GPU_KIND, 0, 2, free=(1,)),),
            "the kubelet gave gpu-0 (NUMA node 0) and gpu-2 (NUMA node 1); gpu-0 and gpu-1 would "
            "both be on NUMA node 0 (",
        ),
        (
            (given(GPU_KIND, 0, 2, free=(3,)), given(NIC_KIND, 2)),
            "; gpu-2, gpu-3 and nic-2 would all be on NUMA node 1 (",
        ),
        ((request(GPU_KIND, {"0": (0,), "1": (1,)}),), "it has example.com/gpu 0 (NUMA node 0)"),
        (
            (request(GPU_KIND, {f"g{n}": (n % 2,) for n in range(12)}),),
            "g5 (NUMA node 1) and 4 more; it needs",
        ),
        (
            (request(GPU_KIND, {"a": (0,)}), request(NIC_KIND, {"b": (1,), "c": (0, 1)})),
            "it has a (NUMA node 0), b (NUMA node 1) and c (NUMA nodes 0-1); it needs",
        ),
    ],
)
def test_what_the_kubelet_gave_is_said_as_far_as_it_is_known(
    world: World, requests: tuple[DeviceRequest, ...], said: str
) -> None:
    of = pod("a", SINGLE)
    says(world.reject(of, with_devices(of, *requests)), "DeviceAffinityError", said)


def test_a_device_beside_full_cpus_is_named_with_one_beside_free_ones(world: World) -> None:
    world.put("full", {"numacpu": "4-7", "cpus": "exclusive"}, 4, 1)
    of = pod("a", {**SINGLE, "cpus": "exclusive"})
    rejected = world.reject(of, with_devices(of, given(GPU_KIND, 2, free=(0,))))
    says(
        rejected,
        "DeviceAffinityError",
        "each fits, but not on the same NUMA nodes: 2 exclusive CPUs on NUMA node 0",
        "; the kubelet gave gpu-2 (NUMA node 1); gpu-0 would be on NUMA node 0 (",
    )
    document = explain_rejection(
        stored_explanation(rejected.trace), rejected.reason, rejected.message
    )
    text = "\n".join(explanation_sentences(document))
    assert "\nThe kubelet gave gpu-2 (NUMA node 1); gpu-0 would be on NUMA node 0 (" in text


def test_a_container_that_starts_with_misaligned_devices_is_told_so(world: World) -> None:
    of = pod("a", {"policy": "best-effort"})
    world.place(of, with_devices(of, given(GPU_KIND, 0, free=(2,)), given(NIC_KIND, 2)))
    stored = world.history.explanation_of("a-app")
    document = explain_allocation(world.allocation("a-app"), stored, "0-3")
    text = "\n".join(explanation_sentences(document))
    assert f"the kubelet gave gpu-0 (NUMA node 0) and nic-2 (NUMA node 1); {ALTERNATIVE}." in text


def test_aligned_devices_say_nothing_and_count_what_is_free(world: World) -> None:
    of = pod("a", {"policy": "restricted"})
    world.place(of, with_devices(of, given(GPU_KIND, 0, 2, free=(1, 3))))
    stored = world.history.explanation_of("a-app")
    document = explain_allocation(world.allocation("a-app"), stored, "4-7")
    assert document["misalignedDevices"] is None
    text = "\n".join(explanation_sentences(document))
    assert "2 of 2 of example.com/gpu" in text
    assert "its example.com/gpu is elsewhere" in text


def test_devices_apart_are_named_where_cpus_and_memory_do_not_go_together_either() -> None:
    """CPUs are free on NUMA node 1 only, memory on NUMA node 0 only."""
    world = two_nodes()
    assert world.put("cpus", SINGLE | {"cpus": "exclusive"}, 3, 0.25)[0] == "0-2"
    assert world.put("memory", SINGLE, 0.5, 7.5)[1] == "1"
    of = pod("late", SINGLE)
    says(world.reject(of, with_gpus(of, 3, g0=(0,), g1=(1,))), "", "2 needed, at most 1", "GPU")
