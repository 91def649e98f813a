"""A plugin that looks for devices: what messages say of them decides the NUMA node."""

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nri_numa.demo.runtime import DemoContainer
from nri_numa.kubelet.pb import podresources_pb2
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.beds.embedded_node import EmbeddedNode, until
from tests.beds.fake_kubelet import pod_resources

GPU = "0000:3b:00.0"
ALIGNED = {"policy": "single-numa-node"}


@pytest.fixture
def directory() -> Iterator[Path]:
    # Socket paths end at 107 bytes, which pytest's own directories may pass.
    with tempfile.TemporaryDirectory(prefix="dev-") as name:
        yield Path(name)


def node_with_a_gpu(directory: Path, **devices: object) -> EmbeddedNode:
    """Four NUMA nodes, a GPU on the third of them."""
    sources = {"enabled": True, "networkInterfaces": False, **devices}
    node = EmbeddedNode(directory, config={"devices": sources})
    tree = DeviceTree(node.sysfs_root)
    render = tree.child(tree.pci(GPU, 2, GPU_CLASS), "drm", "renderD128")
    tree.number("char", "226:128", render)
    return node


def run(
    node: EmbeddedNode, name: str, wishes: dict[str, str], *env: str, device: bool = False
) -> DemoContainer:
    return run_in(node, node.pod(name, wishes), *env, device=device)


def run_in(
    node: EmbeddedNode, pod: pb.PodSandbox, *env: str, device: bool = False
) -> DemoContainer:
    message = pb.Container(id=f"{pod.name}-app", name="app", env=env)
    message.linux.resources.cpu.quota.value = 100_000
    message.linux.resources.cpu.period.value = 100_000
    message.linux.resources.memory.limit.value = 1 << 28
    message.linux.cgroups_path = node.cgroup(message.id)
    if device:
        message.linux.devices.add(path="/dev/dri/renderD128", type="c", major=226, minor=128)
    container = node.call(node.runtime.create_container(pod.id, message))
    node.begin(container)
    return container


def mems(container: DemoContainer) -> str:
    found: str = container.message.linux.resources.cpu.mems
    return found


def test_memory_and_cpus_are_where_the_device_file_is(directory: Path) -> None:
    with node_with_a_gpu(directory, podResources=False) as node:
        node.start()
        assert mems(run(node, "gpu", ALIGNED, device=True)) == "2"
        assert mems(run(node, "variable", ALIGNED, f"PCIDEVICE_X={GPU}")) == "2"
        assert mems(run(node, "none", ALIGNED)) != "2"
        assert mems(run(node, "ignored", {**ALIGNED, "devices": "ignore"}, device=True)) != "2"
        forged = run(node, "forged", ALIGNED, "PCIDEVICE_X=0000:ff:00.0,../../../etc/passwd")
        assert mems(forged) != "2"
        told = node.plugin.json("/v1/explain/default/gpu/app")
        assert f"on NUMA node 2, because its GPU {GPU} is there" in str(told)
        said = str(node.plugin.json("/v1/explain/default/forged/app"))
        assert "names 0000:ff:00.0, which does not exist: no hint" in said
        assert node.plugin.json("/v1/topology")["devices"] == [
            {
                "address": GPU,
                "kind": "GPU",
                "vendor": "",
                "device": "",
                "numaNode": 2,
                "localCPUs": "",
            }
        ]
        node.keep()
        before = node.connections
        node.restart_runtime()
        node.reconnected(before)
        node.check()


def test_off_nothing_is_looked_at(directory: Path) -> None:
    with node_with_a_gpu(directory, enabled=False) as node:
        node.start()
        placed = {mems(run(node, f"gpu{i}", ALIGNED, device=True)) for i in range(4)}
        assert placed == {"0", "1", "2", "3"}
        assert "devices" not in node.plugin.json("/v1/topology")


def _an_fpga(request: Any, context: Any) -> Any:
    """The kubelet's answer: each pod has one, on the fourth NUMA node."""
    answer = podresources_pb2.GetPodResourcesResponse()
    container = answer.pod_resources.containers.add(name="app")
    device = container.devices.add(resource_name="x.com/fpga", device_ids=["f1"])
    device.topology.nodes.add(ID=3)
    return answer


def test_what_the_kubelet_gave_counts_once_it_has_said_so(directory: Path) -> None:
    """It has 50 ms, which a busy machine may take for less: so it is tried until it was in time."""
    with (
        pod_resources(directory / "kubelet", _an_fpga, lambda request, context: None),
        node_with_a_gpu(directory) as node,
    ):
        node.start()
        numbers = itertools.count()

        def said(pod: pb.PodSandbox) -> str:
            """Create the container in the pod, once more; what its explanation says, and where."""
            message = pb.Container(id=f"app-{next(numbers)}", name="app")
            message.linux.resources.memory.limit.value = 1 << 20
            message.linux.cgroups_path = node.cgroup(message.id)
            made = node.call(node.runtime.create_container(pod.id, message))
            name = pod.name
            steps = str(node.plugin.json(f"/v1/explain/default/{name}/app"))
            node.call(node.runtime.remove_container(made.id))
            return f"{steps} on {mems(made)}" if "has not said yet" not in steps else ""

        def beside() -> bool:
            pod = node.pod(f"fpga-{next(numbers)}", ALIGNED)
            steps = until(lambda: said(pod), "the kubelet answered, or was too late")
            node.call(node.runtime.remove_pod(pod.id))
            return "because its x.com/fpga f1 is there" in steps and steps.endswith(" on 3")

        until(beside, "the kubelet's word counts", 60.0)
