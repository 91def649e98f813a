"""What the real runtime's messages say of a container's devices, and where it runs then."""

from pathlib import Path

import pytest

from tests.beds.cri import CRI, guaranteed
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.beds.plugin_process import StartPlugin
from tests.machines import named as machines
from tests.machines.named import write_sysfs

GPU = "0000:3b:00.0"
SOURCES = {"enabled": True, "podResources": False}
# bind: cpu, because the real kernel has not got the second NUMA node's memory.
WISHES = {"numa.kubernetes.io/policy": "single-numa-node", "numa.kubernetes.io/bind": "cpu"}


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A machine of two NUMA nodes made of this machine's first two CPUs."""
    topology = machines.dual_no_smt(cores_per_numa=1)
    return write_sysfs(tmp_path / "machine", topology)


def test_a_container_runs_where_the_device_is_that_the_runtime_gives_it(
    cri: CRI, start_plugin: StartPlugin, two_nodes: Path
) -> None:
    """The files are those of a machine with a GPU whose device file has the number of /dev/full."""
    tree = DeviceTree(two_nodes)
    tree.number("char", "1:7", tree.child(tree.pci(GPU, 1, GPU_CLASS), "drm", "renderD128"))
    plugin = start_plugin({"devices": SOURCES}, sysfs_root=two_nodes)
    pod = cri.run_pod("devices", annotations=WISHES)
    container = cri.create(pod, resources=guaranteed(0.2), devices=["/dev/full"])
    cri.start(container)
    seen = cri.first_line(container)
    named = cri.run(pod, "named", resources=guaranteed(0.2), env={"PCIDEVICE_EXAMPLE_COM_GPU": GPU})
    other = cri.run(pod, "other", resources=guaranteed(0.2))
    assert (seen.cpus, cri.first_line(named).cpus, cri.first_line(other).cpus) == ("1", "1", "0")
    assert f"on NUMA node 1, because its GPU {GPU} is there" in str(
        plugin.json("/v1/explain/default/devices/main")
    )
