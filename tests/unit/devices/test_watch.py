"""The sources put together: what a container is said to have at the moment it is decided about."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.config.sections import Devices
from nri_numa.devices.watch import DeviceWatch
from nri_numa.kubelet.pb import podresources_pb2 as pb
from nri_numa.kubelet.pod_resources import NodeDevice
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import (
    NO_DEVICE_MENTIONS,
    Container,
    DeviceFile,
    DeviceMentions,
    PodSandbox,
    PodTable,
)
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.beds.fake_kubelet import pod_resources
from tests.beds.world import container, pod

GPU_AT, NIC_AT = "0000:3b:00.0", "0000:af:00.1"
UUID = "GPU-11111111-2222-3333-4444-555555555555"
LOCAL = Devices(network_interfaces=False, pod_resources=False)
NETWORK = "/proc/self/ns/net"
PATIENCE_S = 180.0
POD = pod("web")


@dataclass
class DeviceBed:
    """A machine with a GPU on NUMA node 1 and a card on 0, and a kubelet's directory."""

    root: Path
    tree: DeviceTree
    watches: list[DeviceWatch]

    def watch(self, sources: Devices = LOCAL, **kwargs: Any) -> DeviceWatch:
        kwargs.setdefault("alignable_nodes", lambda: NUMASet((0, 1)))
        made = DeviceWatch(
            replace(sources, cdi_spec_dirs=(str(self.root / "cdi"),)),
            root=str(self.root),
            kubelet_root=str(self.root),
            deadline=PATIENCE_S,
            **kwargs,
        )
        self.watches.append(made)
        made.start()
        made.wait_for_tasks()
        return made


@pytest.fixture
def bed(directory: Path) -> Iterator[DeviceBed]:
    tree = DeviceTree(directory)
    tree.pci(GPU_AT, 1, GPU_CLASS)
    tree.pci(NIC_AT, 0)
    tree.nvidia(GPU_AT, UUID, 0)
    (tree.root / "cdi").mkdir()
    made = DeviceBed(tree.root, tree, [])
    yield made
    for watch in made.watches:
        watch.close()


def has(found: Container) -> dict[str, dict[str, set[int]]]:
    """Devices by kind and id, with their NUMA nodes."""
    return {
        request.resource: {d.id: set(d.numa_nodes) for d in request.devices}
        for request in found.devices
    }


def seen(
    watch: DeviceWatch, of: PodSandbox, made: Container, mentions: DeviceMentions
) -> Container:
    """The container with the devices that are known at this moment."""
    _, completed = watch.complete_container(of, replace(made, mentions=mentions))
    return completed


def has_none(watch: DeviceWatch, of: PodSandbox, mentions: DeviceMentions) -> bool:
    """True if a container has neither devices nor notes about them."""
    found = seen(watch, of, container(of), mentions)
    return not (found.devices or found.pod_devices or found.device_notes)


ON_GPU = {"GPU": {GPU_AT: {1}}}


@pytest.mark.parametrize(
    "mentions",
    [
        DeviceMentions(nodes=(DeviceFile("c", 195, 0), DeviceFile("c", 195, 255))),
        DeviceMentions(variables={"NVIDIA_VISIBLE_DEVICES": UUID}),
        DeviceMentions(variables={"NVIDIA_VISIBLE_DEVICES": "0"}),
        DeviceMentions(variables={"PCIDEVICE_X": GPU_AT}),
        DeviceMentions(
            nodes=(DeviceFile("c", 195, 0),),
            variables={"NVIDIA_VISIBLE_DEVICES": UUID, "PCIDEVICE_X": GPU_AT},
        ),
    ],
    ids=["device file", "uuid", "index", "address", "all of them"],
)
def test_one_gpu_is_one_hint_whoever_tells_of_it(bed: DeviceBed, mentions: DeviceMentions) -> None:
    found = seen(bed.watch(), POD, container(POD), mentions)
    assert has(found) == ON_GPU
    assert found.device_notes == ()


def test_a_later_cdi_file_is_read_when_a_pod_begins_or_a_name_is_missed(bed: DeviceBed) -> None:
    watch = bed.watch()
    wanted = DeviceMentions(cdi=("x.com/gpu=g0",))
    missed = seen(watch, POD, container(POD), wanted)
    assert missed.devices == ()
    assert "CDI device 'x.com/gpu=g0' is in no CDI file" in missed.device_notes[0]
    card = bed.root / "sys/devices/pci0000:af" / NIC_AT
    bed.tree.link("sys/class/net/ens1", bed.tree.child(card, "net", "ens1"))
    node = {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}
    edits = {"deviceNodes": [node], "netDevices": [{"hostInterfaceName": "ens1"}]}
    device = {"name": "g0", "containerEdits": edits}
    (bed.root / "cdi/a.json").write_text(json.dumps({"kind": "x.com/gpu", "devices": [device]}))
    watch.on_run_pod(POD)
    watch.wait_for_tasks()
    found = seen(watch, POD, container(POD), wanted)
    assert has(found) == {**ON_GPU, "NIC": {NIC_AT: {0}}}


def test_what_a_variable_makes_up_is_no_hint_and_is_said(bed: DeviceBed) -> None:
    variables = {"PCIDEVICE_X": "0000:ff:1f.7", "NVIDIA_VISIBLE_DEVICES": "GPU-none"}
    found = seen(bed.watch(), POD, container(POD), DeviceMentions(variables=variables))
    assert found.devices == ()
    assert found.device_notes == (
        "GPU 'GPU-none' is not known to the driver: no hint",
        "variable PCIDEVICE_X names 0000:ff:1f.7, which does not exist: no hint",
    )


def test_a_gpu_that_came_later_is_read_after_it_was_missed(bed: DeviceBed) -> None:
    now = [100.0]
    watch = bed.watch(clock=lambda: now[0])
    other, uuid = "0000:d8:00.0", "GPU-99999999-2222-3333-4444-555555555555"
    bed.tree.pci(other, 0, GPU_CLASS)
    bed.tree.nvidia(other, uuid, 1)
    by_uuid = DeviceMentions(variables={"NVIDIA_VISIBLE_DEVICES": uuid})
    by_file = DeviceMentions(nodes=(DeviceFile("c", 195, 1),))
    assert seen(watch, POD, container(POD), by_file).devices == ()
    for mentions in (by_uuid, by_file):  # a thread may have read it meanwhile
        seen(watch, POD, container(POD), mentions)
    watch.wait_for_tasks()
    for mentions in (by_file, by_uuid, by_file):
        assert has(seen(watch, POD, container(POD), mentions)) == {"GPU": {other: {0}}}


def test_sources_that_are_off_are_not_looked_at(bed: DeviceBed) -> None:
    off = Devices(
        device_nodes=False,
        sriov_variables=False,
        nvidia=False,
        cdi=False,
        network_interfaces=False,
        pod_resources=False,
    )
    watch = bed.watch(off)
    mentions = DeviceMentions(
        nodes=(DeviceFile("c", 195, 0), DeviceFile("c", 240, 0)),
        variables={"NVIDIA_VISIBLE_DEVICES": UUID, "PCIDEVICE_X": GPU_AT},
        cdi=("x.com/gpu=g0",),
    )
    watch.on_run_pod(replace(POD, network_namespace=NETWORK))
    assert has_none(watch, POD, mentions)


def test_a_device_on_a_numa_node_without_cpus_is_no_hint(bed: DeviceBed) -> None:
    watch = bed.watch(alignable_nodes=lambda: NUMASet((0,)))
    found = seen(watch, POD, container(POD), DeviceMentions(variables={"PCIDEVICE_X": GPU_AT}))
    assert found.devices == ()
    assert found.device_notes == (
        f"its GPU {GPU_AT} is on NUMA node 1, which has no CPUs: no hint",
    )


def test_more_devices_than_are_looked_at_are_said(bed: DeviceBed) -> None:
    found = seen(bed.watch(), POD, container(POD), DeviceMentions(unread=3))
    assert found.device_notes == ("3 more devices than are read: no hint",)


# --- the kubelet ------------------------------------------------------------------------------

ASKED = Devices(network_interfaces=False)


def answer(*devices: tuple[str, str, str, tuple[int, ...]]) -> pb.GetPodResourcesResponse:
    """Container, resource, device id, NUMA nodes."""
    message = pb.GetPodResourcesResponse()
    by_name: dict[str, Any] = {}
    for name, resource, id, nodes in devices:
        if name not in by_name:
            by_name[name] = message.pod_resources.containers.add(name=name)
        one = by_name[name].devices.add(resource_name=resource, device_ids=[id])
        for node in nodes:
            one.topology.nodes.add(ID=node)
    return message


def asked(bed: DeviceBed, message: pb.GetPodResourcesResponse, **kwargs: Any) -> DeviceWatch:
    with pod_resources(bed.root, lambda request, context: message, lambda request, context: None):
        watch = bed.watch(ASKED, **kwargs)
        watch.on_run_pod(POD)
        watch.wait_for_tasks()
    return watch


def test_what_the_kubelet_gave_is_a_hint_for_the_container_that_has_it(bed: DeviceBed) -> None:
    bed.tree.pci("0000:20:00.0", -1)
    watch = asked(
        bed,
        answer(
            ("app", "x.com/fpga", "f1", (0, 1)),
            ("app", "y.com/card", "f1", (1,)),
            ("app", "intel.com/vm", "0000:20:00.0", (1,)),
            ("app", "nvidia.com/gpu", f"{UUID}::2", (0,)),
            ("app", "intel.com/sriov", NIC_AT, ()),
            ("helper", "x.com/fpga", "f2", (1,)),
        ),
    )
    found = seen(watch, POD, container(POD), NO_DEVICE_MENTIONS)
    # Where sysfs knows a device, it is that device on its NUMA node, whatever the plugin said.
    assert has(found) == {
        **ON_GPU,
        "NIC": {NIC_AT: {0}, "0000:20:00.0": {1}},
        "x.com/fpga": {"f1": {0, 1}},
        "y.com/card": {"f1": {1}},
    }
    assert found.device_notes == ()
    together = {d.id for request in found.pod_devices for d in request.devices}
    assert together == {GPU_AT, NIC_AT, "0000:20:00.0", "f1", "f2"}
    helper = seen(watch, POD, container(POD, "helper"), NO_DEVICE_MENTIONS)
    assert has(helper) == {"x.com/fpga": {"f2": {1}}}


# --- what the kubelet could have given ------------------------------------------------------------


def on_node(*devices: tuple[str, str, tuple[int, ...], bool]) -> tuple[NodeDevice, ...]:
    return tuple(
        NodeDevice(resource=resource, id=id, numa_nodes=frozenset(nodes), is_allocated=taken)
        for resource, id, nodes, taken in devices
    )


def stock_of(found: Container, resource: str) -> Any:
    (request,) = [request for request in found.devices if request.resource == resource]
    return request.stock


FPGA = "x.com/fpga"


def test_devices_that_exist_and_are_free_are_known_beside_grants(bed: DeviceBed) -> None:
    """The container's own are free for it; one of two NUMA nodes counts on both."""
    node = on_node(
        (FPGA, "f0", (0,), True),
        (FPGA, "f1", (1,), True),
        (FPGA, "f2", (1,), False),
        (FPGA, "f3", (0, 1), False),
        (FPGA, "f4", (), False),
        (FPGA, "f5", (7,), False),
        ("y.com/other", "o", (0,), False),
    )
    given = answer(("app", FPGA, "f0", (0,)), ("helper", "y.com/card", "c", (1,)))
    watch = asked(bed, given, node_devices=lambda: node)
    found = seen(watch, POD, container(POD), NO_DEVICE_MENTIONS)
    stock = stock_of(found, FPGA)
    assert dict(stock.capacity) == {0: 2, 1: 3}
    assert dict(stock.free) == {0: 2, 1: 2}
    assert [device.id for device in stock.choices] == ["f0", "f2", "f3"]
    together = {request.resource: request.stock for request in found.pod_devices}
    assert together[FPGA] == stock
    assert together["y.com/card"] is None, "the kubelet does not list it any more"
    helper = seen(watch, POD, container(POD, "helper"), NO_DEVICE_MENTIONS)
    assert stock_of(helper, "y.com/card") is None


def test_devices_that_sysfs_knows_are_the_same_among_those_that_exist(bed: DeviceBed) -> None:
    """Two replicas are one GPU, which is free if one of them is."""
    gpus = "nvidia.com/gpu"
    replicas = [(gpus, f"{UUID}::{n}", (0,), n == 0) for n in range(3)]
    watch = asked(
        bed,
        answer(("app", gpus, f"{UUID}::0", (0,))),
        node_devices=lambda: on_node(*replicas, (gpus, "0000:20:00.0", (0,), True)),
    )
    stock = stock_of(seen(watch, POD, container(POD), NO_DEVICE_MENTIONS), "GPU")
    assert dict(stock.capacity) == {1: 1}, "where sysfs says it is"
    assert [(device.id, set(device.numa_nodes)) for device in stock.choices] == [(GPU_AT, {1})]


def test_of_many_equal_devices_as_many_are_kept_as_were_given(bed: DeviceBed) -> None:
    node = on_node(*((FPGA, f"f{n:02}", (n % 2,), n == 9) for n in range(40)))
    watch = asked(
        bed,
        answer(("app", FPGA, "f00", (0,)), ("app", FPGA, "f09", (1,))),
        node_devices=lambda: node,
    )
    stock = stock_of(seen(watch, POD, container(POD), NO_DEVICE_MENTIONS), FPGA)
    assert dict(stock.free) == {0: 20, 1: 20}
    assert [d.id for d in stock.choices] == ["f00", "f01", "f02", "f03", "f04", "f09"]


@pytest.mark.parametrize(
    "known",
    [
        "the kubelet has not answered yet",
        (),
        on_node(("nvidia.com/gpu", "f1", (1,), True)),
        on_node((FPGA, "f2", (1,), False)),
    ],
)
def test_without_an_answer_about_devices_nothing_is_claimed(bed: DeviceBed, known: Any) -> None:
    watch = asked(bed, answer(("app", FPGA, "f1", (1,))), node_devices=lambda: known)
    found = seen(watch, POD, container(POD), NO_DEVICE_MENTIONS)
    assert has(found) == {FPGA: {"f1": {1}}}
    assert stock_of(found, FPGA) is None


def test_two_resources_of_one_kind_cannot_stand_in_for_each_other(bed: DeviceBed) -> None:
    """A virtual function of one pool is a NIC as one of another."""
    bed.tree.pci("0000:20:00.0", 1)
    pools = ("intel.com/fast", NIC_AT, (0,)), ("intel.com/slow", "0000:20:00.0", (1,))
    watch = asked(
        bed,
        answer(*(("app", *pool) for pool in pools)),
        node_devices=lambda: on_node(*((*pool, True) for pool in pools)),
    )
    assert stock_of(seen(watch, POD, container(POD), NO_DEVICE_MENTIONS), "NIC") is None


def test_a_device_from_another_source_is_not_the_kubelets_to_change(bed: DeviceBed) -> None:
    gpu = ("nvidia.com/gpu", UUID, (1,))
    bed.tree.pci("0000:20:00.0", 0, GPU_CLASS)
    watch = asked(bed, answer(("app", *gpu)), node_devices=lambda: on_node((*gpu, True)))
    mentions = DeviceMentions(variables={"PCIDEVICE_X": "0000:20:00.0"})
    assert stock_of(seen(watch, POD, container(POD), mentions), "GPU") is None


def test_where_the_kubelet_gave_nothing_nothing_is_said(bed: DeviceBed) -> None:
    watch = asked(bed, answer())
    assert has_none(watch, POD, NO_DEVICE_MENTIONS)


def test_our_own_resource_is_cpus_and_no_device(bed: DeviceBed) -> None:
    watch = asked(bed, answer(("app", "x.com/cpu", "n1-0", (1,))), own_resource="x.com/cpu")
    assert seen(watch, POD, container(POD), NO_DEVICE_MENTIONS).devices == ()


def test_a_kubelet_that_is_not_there_is_said_and_nothing_else(bed: DeviceBed) -> None:
    watch = bed.watch(ASKED)
    watch.on_run_pod(POD)
    watch.wait_for_tasks()
    found = seen(watch, POD, container(POD), DeviceMentions(variables={"PCIDEVICE_X": GPU_AT}))
    assert has(found) == ON_GPU
    assert len(found.device_notes) == 1
    assert "the kubelet does not report its devices: " in found.device_notes[0]


def test_while_the_kubelet_hangs_containers_are_seen_without_it(bed: DeviceBed) -> None:
    held = threading.Event()

    def hang(request: Any, context: Any) -> Any:
        held.wait(PATIENCE_S)
        return answer(("app", "x.com/fpga", "f1", (1,)))

    with pod_resources(bed.root, hang, lambda request, context: None):
        watch = bed.watch(ASKED)
        watch.on_run_pod(POD)
        found = seen(watch, POD, container(POD), NO_DEVICE_MENTIONS)
        assert found.devices == ()
        assert found.device_notes == ("the kubelet has not reported its devices yet: no hint",)
        held.set()
        watch.wait_for_tasks()
    assert has(seen(watch, POD, container(POD), NO_DEVICE_MENTIONS)) == {"x.com/fpga": {"f1": {1}}}


# --- pods that come and go --------------------------------------------------------------------


def test_a_pod_whose_namespace_is_gone_is_said(bed: DeviceBed) -> None:
    watch = bed.watch(Devices(pod_resources=False))
    watch.on_run_pod(replace(POD, network_namespace=str(bed.root / "gone")))
    watch.wait_for_tasks()
    (note,) = seen(watch, POD, container(POD), NO_DEVICE_MENTIONS).device_notes
    assert note.startswith("its network interfaces cannot be read: ")


def test_what_is_known_of_a_pod_goes_with_it_and_stays_over_a_comparison(bed: DeviceBed) -> None:
    watch = asked(bed, answer(("app", "x.com/fpga", "f1", (1,))))
    other = pod("other")
    watch.on_synchronize(PodTable.from_pods([POD, other]), [])
    watch.wait_for_tasks()
    assert has(seen(watch, POD, container(POD), NO_DEVICE_MENTIONS)) == {"x.com/fpga": {"f1": {1}}}
    assert "the kubelet" in seen(watch, other, container(other), NO_DEVICE_MENTIONS).device_notes[0]
    watch.on_remove_pod(POD.id, "")
    watch.on_remove_pod(POD.id, "")
    assert has_none(watch, POD, NO_DEVICE_MENTIONS)
    watch.on_synchronize(PodTable.from_pods([]), [])
    assert has_none(watch, other, NO_DEVICE_MENTIONS)


def test_after_the_end_nothing_is_asked_any_more(bed: DeviceBed) -> None:
    watch = bed.watch(ASKED)
    watch.close()
    watch.on_run_pod(POD)
    found = seen(watch, POD, replace(container(POD), pid=7), NO_DEVICE_MENTIONS)
    assert found.devices == ()
    assert found.pid == 7


# --- what is remembered -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mentions",
    [
        DeviceMentions(variables={"PCIDEVICE_X": GPU_AT}),
        DeviceMentions(nodes=(DeviceFile("c", 195, 0),)),
    ],
    ids=["variable", "device file"],
)
def test_places_of_containers_may_change(bed: DeviceBed, mentions: DeviceMentions) -> None:
    places = [NUMASet((0, 1))]
    watch = bed.watch(alignable_nodes=lambda: places[0])
    assert seen(watch, POD, container(POD), mentions).devices
    places[0] = NUMASet((0,))
    assert not seen(watch, POD, container(POD), mentions).devices


def test_what_is_out_of_date_is_noticed_with_the_next_sandbox(bed: DeviceBed) -> None:
    watch = bed.watch()
    mentions = DeviceMentions(variables={"PCIDEVICE_X": GPU_AT})
    assert has(seen(watch, POD, container(POD), mentions)) == ON_GPU
    (bed.root / f"sys/bus/pci/devices/{GPU_AT}").unlink()
    assert has(seen(watch, POD, container(POD), mentions)) == ON_GPU
    watch.on_run_pod(POD)
    watch.wait_for_tasks()
    assert has(seen(watch, POD, container(POD), mentions)) == {}
