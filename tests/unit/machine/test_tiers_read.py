"""Initiators and memory tiers: what the kernel tells of memory without CPUs."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from nri_numa.cli.machine import pack as capture
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.synthetic import sysfs_files
from nri_numa.machine.sysfs import discover
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree


def test_initiators_and_tiers_are_read_and_survive_a_capture(tmp_path: Path) -> None:
    base = machines.memory_only()
    nodes = {
        i: replace(n, initiators=NUMASet([i % 2]), tier=4 if n.cpus else 22)
        for i, n in base.numa_nodes.items()
    }
    machine = replace(base, numa_nodes=nodes)
    root = write_sysfs(tmp_path / "root", machine)
    assert discover(root).numa_nodes == nodes
    # As the kernel has it: a link to the NUMA node's directory.
    link = root / "sys/devices/system/node/node2/access1/initiators/node0"
    link.unlink()
    link.symlink_to("../../../node0")
    assert discover(root).numa_nodes == nodes
    report = capture(root, tmp_path / "machine.tar.gz")
    assert "sys/devices/system/node/node2/access1/initiators/node0" in report.files
    packed = discover(tmp_path / "machine.tar.gz")
    assert packed.numa_nodes[2].initiators == NUMASet([0])
    assert packed.numa_nodes[2].tier == 22


def test_access0_is_believed_where_there_is_no_access1(tmp_path: Path) -> None:
    files = sysfs_files(machines.memory_only())
    files["sys/devices/system/node/node2/access0/initiators/node1"] = ""
    files["sys/devices/virtual/memory_tiering/uevent"] = ""
    read = discover(write_tree(tmp_path, files))
    assert read.numa_nodes[2].initiators == NUMASet([1])
    assert read.numa_nodes[2].tier is None
