"""What the kernel's files say about use."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.errors import TopologyError
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.synthetic import synthetic, sysfs_files
from nri_numa.machine.usage import (
    ContainerUsage,
    cpu_times,
    memory_by_numa_node,
    read_container,
    read_usage,
)

STAT = """cpu  300 0 100 1600 0 0 0 0 0 0
cpu0 100 0 50 800 50 0 0 0 20 0
cpu1 200 0 50 700 50 0 0 0 0 0
intr 1 2 3
cpu7 5 5
"""


def test_a_cpu_is_busy_when_it_neither_idles_nor_waits_for_a_disk() -> None:
    assert cpu_times(STAT) == {0: (150, 1000), 1: (250, 1000)}


@pytest.mark.parametrize("text", ["", "cpu0", "cpu0 a b c d", "cpux 1 2 3 4", "cpu0 1 2 3"])
def test_what_is_no_stat_tells_nothing(text: str) -> None:
    assert cpu_times(text) == {}


def test_a_machine(tmp_path: Path) -> None:
    topology = synthetic(sockets=1, numa_per_socket=2, cores_per_numa=1)
    for name, text in sysfs_files(topology).items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "proc").mkdir(exist_ok=True)
    (tmp_path / "proc/stat").write_text(STAT)
    stat = tmp_path / "sys/devices/system/node/node1/numastat"
    stat.write_text("numa_hit 10\nlocal_node 7\nother_node 3\n")
    usage = read_usage(tmp_path, topology)
    assert usage.cpus[1] == (250, 1000)
    zero, one = usage.numa_nodes[0], usage.numa_nodes[1]
    assert (zero.here, zero.elsewhere) == (None, None)
    assert (one.here, one.elsewhere) == (7, 3)
    assert one.total == topology.numa_nodes[1].memory_bytes
    (tmp_path / "proc/stat").unlink()
    assert read_usage(tmp_path, topology).cpus == {}
    with pytest.raises(TopologyError):
        read_usage(tmp_path / "nowhere", topology)


V2 = """anon N0=4096 N1=8192
file N0=0 N1=100
anon_thp N0=999
shmem N0=999
"""
V1 = """total=3 N0=1 N1=2
file=3 N0=1 N1=2
hierarchical_total=9 N0=9
"""


def test_memory_is_counted_once() -> None:
    assert memory_by_numa_node(V2, unified=True, page_size=4096) == {0: 4096, 1: 8292}
    assert memory_by_numa_node(V1, unified=False, page_size=4096) == {0: 4096, 1: 8192}
    assert memory_by_numa_node("total N0=x\n\n=", unified=False, page_size=4096) == {}


def test_a_container_of_each_version(tmp_path: Path) -> None:
    place = CgroupPlace("/pods/a")
    two = tmp_path / "two"
    (two / "pods/a").mkdir(parents=True)
    (two / "cgroup.controllers").touch()
    (two / "pods/a/cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    (two / "pods/a/memory.numa_stat").write_text(V2)
    reader = CgroupReader(str(two))
    assert read_container(reader, place, str(two), 4096) == ContainerUsage(1.5, {0: 4096, 1: 8292})

    one = tmp_path / "one"
    for controller in ("cpuset", "memory", "cpu,cpuacct"):
        (one / controller / "pods/a").mkdir(parents=True)
    (one / "cpu,cpuacct/pods/a/cpuacct.usage").write_text("2500000000\n")
    (one / "memory/pods/a/memory.numa_stat").write_text(V1)
    reader = CgroupReader(str(one))
    assert read_container(reader, place, str(one), 4096) == ContainerUsage(2.5, {0: 4096, 1: 8192})


def test_a_container_without_those_files_and_one_without_a_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").touch()
    (tmp_path / "pods/a").mkdir(parents=True)
    reader = CgroupReader(str(tmp_path))
    there = read_container(reader, CgroupPlace("/pods/a"), str(tmp_path), 4096)
    assert there == ContainerUsage(None, {})
    assert read_container(reader, CgroupPlace("/pods/b"), str(tmp_path), 4096) is None
    (tmp_path / "cgroup.controllers").unlink()
    (tmp_path / "cpuset/pods/a").mkdir(parents=True)
    reader = CgroupReader(str(tmp_path))
    there = read_container(reader, CgroupPlace("/pods/a"), str(tmp_path), 4096)
    assert there == ContainerUsage(None, {})
