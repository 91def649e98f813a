"""What changes on a machine that runs is seen; what does not costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.machine.hotplug import differences, reread
from nri_numa.machine.synthetic import synthetic, sysfs_files
from nri_numa.machine.sysfs import discover
from nri_numa.model.cpuset import CPUSet
from tests.machines import named as machines
from tests.machines.named import GIB, HUGE_2M, write_sysfs, write_tree

NODE = "sys/devices/system/node"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two NUMA nodes of 8 GiB."""
    return write_sysfs(tmp_path, synthetic(sockets=2, numa_per_socket=1, memory_gib=8))


def test_nothing_changed_is_the_same_object(root: Path) -> None:
    machine = discover(root)
    assert reread(root, machine) is machine


def test_case_16_huge_pages_that_are_allocated_later_are_seen(root: Path) -> None:
    machine = discover(root)
    pages = f"{NODE}/node1/hugepages/hugepages-2048kB"
    write_tree(root, {f"{pages}/nr_hugepages": "512\n", f"{pages}/free_hugepages": "512\n"})
    after = reread(root, machine)
    assert after.numa_nodes[1].hugepages == {HUGE_2M: GIB}
    assert differences(machine, after) == {"hugepages": "1=512x2048Ki"}
    assert reread(root, after) is after
    write_tree(root, {f"{pages}/nr_hugepages": "0\n"})
    gone = reread(root, after)
    assert differences(after, gone) == {"hugepages": "1=none"}


def test_case_16_memory_that_is_added_is_seen(root: Path) -> None:
    machine = discover(root)
    meminfo = "Node 1 MemTotal: 12582912 kB\nNode 1 MemFree: 12582912 kB\n"
    write_tree(root, {f"{NODE}/node1/meminfo": meminfo})
    after = reread(root, machine)
    assert after.numa_nodes[1].memory_bytes == 12 * GIB
    assert differences(machine, after) == {"memory": f"1={12 * GIB}"}


def test_case_16_a_numa_node_that_gets_its_first_memory_is_discovered(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, machines.cpu_only())
    machine = discover(root)
    write_tree(root, {f"{NODE}/node0/meminfo": "Node 0 MemTotal: 1048576 kB\n"})
    assert reread(root, machine).numa_nodes[0].memory_bytes == GIB


@pytest.mark.parametrize(
    ("file", "text", "changed"),
    [
        ("cpuset.cpus.effective", "0-7\n", {"allowed": "0-7"}),
        ("cpuset.cpus.effective", "99\n", {}),
        ("cpuset.mems.effective", "0\n", {"memory_withheld": "1"}),
    ],
)
def test_case_16_the_pods_cgroup_counts_as_it_is_now(
    root: Path, file: str, text: str, changed: dict[str, str]
) -> None:
    pods = "sys/fs/cgroup/kubepods.slice"
    write_tree(
        root, {f"{pods}/cpuset.cpus.effective": "0-31\n", f"{pods}/cpuset.mems.effective": "0-1\n"}
    )
    machine = discover(root)
    write_tree(root, {f"{pods}/{file}": text})
    after = reread(root, machine)
    assert differences(machine, after) == changed
    if not changed:
        assert after is machine


def test_case_16_a_numa_node_that_comes_online_is_discovered(tmp_path: Path) -> None:
    both = synthetic(sockets=2, numa_per_socket=1, memory_gib=8)
    files = sysfs_files(both)
    files[f"{NODE}/online"] = "0\n"
    files[f"{NODE}/node0/distance"] = "10\n"
    machine = discover(write_tree(tmp_path, files))
    assert str(machine.numa_ids) == "0"
    write_sysfs(tmp_path, both)
    after = reread(tmp_path, machine)
    assert differences(machine, after) == {"numa_nodes": "0-1"}


def test_cpus_that_come_and_go_are_told(root: Path) -> None:
    machine = discover(root)
    write_tree(root, {"sys/devices/system/cpu/online": "0-14\n"})
    after = reread(root, machine)
    assert differences(machine, after) == {"gone": "15"}
    assert differences(after, machine) == {"new": "15"}


@pytest.mark.parametrize("text", ["", "x\n"])
def test_a_machine_without_numa_nodes_stays_as_it_is(tmp_path: Path, text: str) -> None:
    files = {n: t for n, t in sysfs_files(machines.single_smt()).items() if not n.startswith(NODE)}
    root = write_tree(tmp_path, files)
    machine = discover(root)
    assert reread(root, machine) is machine
    if text:
        write_tree(root, {f"{NODE}/online": text})
        assert reread(root, machine).numa_ids == machine.numa_ids


def test_what_discovery_would_read_the_same_way_is_no_change(root: Path) -> None:
    """Somebody else's idea of the machine: discovered anew, and found to be equal."""
    machine = replace(discover(root), isolated=CPUSet())
    write_tree(root, {f"{NODE}/online": "0-1,7\n"})
    assert reread(root, machine) is machine
