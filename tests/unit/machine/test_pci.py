"""The devices of a machine, live or captured."""

from pathlib import Path

import pytest

from nri_numa.cli.machine import write_capture as capture
from nri_numa.machine.pci import (
    kind_of_class,
    list_pci_devices,
    list_pcie_roots_by_node,
    parse_cpu_list,
)
from nri_numa.machine.tree import DirectoryTree, open_tree
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import PCIDevice
from tests.beds.device_tree import GPU_CLASS, DeviceTree
from tests.machines import named as machines
from tests.machines.named import write_sysfs

GPU, NIC = "0000:3b:00.0", "0000:af:00.1"
EXPECTED = (
    PCIDevice(
        address=GPU,
        kind="GPU",
        vendor="10de",
        device="2331",
        numa_node=1,
        local_cpus=CPUSet.parse("4-5"),
    ),
    PCIDevice(address=NIC, kind="NIC"),
)


def machine(root: Path) -> DeviceTree:
    tree = DeviceTree(write_sysfs(root, machines.snc_smt()))
    gpu = tree.pci(GPU, 1, GPU_CLASS)
    (gpu / "vendor").write_text("0x10de\n")
    (gpu / "device").write_text("0x2331\n")
    (gpu / "local_cpulist").write_text("4-5\n")
    (tree.pci(NIC, -1) / "vendor").write_text("garbage\n")
    tree.pci("0000:3a:00.0", 1, "0x060400")
    (root / "sys/bus/pci/devices/what").mkdir()
    (root / "sys/bus/pci/devices/what/class").write_text(GPU_CLASS)
    return tree


def test_cards_are_told_with_their_numa_node_and_bridges_are_not(tmp_path: Path) -> None:
    machine(tmp_path)
    assert list_pci_devices(open_tree(tmp_path)) == EXPECTED


def test_a_captured_machine_carries_them(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    machine(tmp_path / "live")
    report = capture(tmp_path / "live", tmp_path / "it.tar.gz")
    assert f"sys/bus/pci/devices/{GPU}/numa_node" in report.files
    assert list_pci_devices(open_tree(tmp_path / "it.tar.gz")) == EXPECTED
    again = capture(tmp_path / "it.tar.gz", tmp_path / "again.tar.gz")
    assert again.files == report.files


def test_without_a_bus_there_are_none(tmp_path: Path) -> None:
    assert list_pci_devices(DirectoryTree(tmp_path)) == ()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("0x030200\n", "GPU"),
        ("0x030000", "GPU"),
        ("0x020000", "NIC"),
        ("0x020700", "RDMA device"),
        ("0x010802", "NVMe disk"),
        ("0x010601", "storage controller"),
        ("0x120000", "accelerator"),
        ("0x060400", "device"),
        ("0x03", "device"),
        ("", "device"),
        (None, "device"),
    ],
)
def test_a_pci_class_has_a_word(code: str | None, kind: str) -> None:
    assert kind_of_class(code) == kind


def test_roots_are_told_by_numa_node(tmp_path: Path) -> None:
    tree = machine(tmp_path)  # a bridge and a GPU on NUMA node 1, and a card of none
    tree.pci("0000:5d:00.0", 1)
    tree.pci("0000:00:1f.0", 0)
    vmd = tree.child(tmp_path / "sys/devices/pci10000:00", "10000:00:02.0")
    (vmd / "numa_node").write_text("0\n")  # a domain of Intel's VMD has five digits
    (tmp_path / "sys/devices/pci0000:3b/power").mkdir()
    (tmp_path / "sys/devices/platform").mkdir()
    assert list_pcie_roots_by_node(open_tree(tmp_path)) == {
        0: ("pci0000:00", "pci10000:00"),
        1: ("pci0000:3a", "pci0000:3b", "pci0000:5d"),
    }


@pytest.mark.parametrize("text", [None, "", "what"])
def test_cpus_beside_a_device_are_unknown_without_a_list(text: str | None) -> None:
    assert parse_cpu_list(text) == CPUSet()
