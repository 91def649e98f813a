"""What the kernel's files say about use."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_numa.errors import TopologyError
from nri_numa.machine import migration
from nri_numa.machine import usage as usage_module
from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.usage import (
    NUMA_MAPS,
    NUMA_STAT,
    ContainerMemoryNodes,
    ContainerUsage,
    add_mapped_bytes,
    local_bytes,
    parse_busy_ticks,
    parse_memory_numa_stat,
    read_container_memory,
    read_container_usage,
    read_usage,
)
from nri_numa.model.cpuset import NUMASet
from tests.beds.cgroup_tree import ContainerTree
from tests.machines import named as machines
from tests.machines.named import write_sysfs, write_tree

PLACE = CgroupPlace("/pods/a")
STAT = """cpu  300 0 100 1600 0 0 0 0 0 0
cpu0 100 0 50 800 50 0 0 0 20 0
cpu1 200 0 50 700 50 0 0 0 0 0
intr 1 2 3
cpu7 5 5
"""


def test_a_cpu_is_busy_when_it_neither_idles_nor_waits_for_a_disk() -> None:
    assert parse_busy_ticks(STAT) == {0: (150, 1000), 1: (250, 1000)}


@pytest.mark.parametrize("text", ["", "cpu0", "cpu0 a b c d", "cpux 1 2 3 4", "cpu0 1 2 3"])
def test_what_is_no_stat_tells_nothing(text: str) -> None:
    assert parse_busy_ticks(text) == {}


def test_a_machine(tmp_path: Path) -> None:
    topology = machines.snc_single(cores_per_numa=1)
    numastat = "numa_hit 10\nlocal_node 7\nother_node 3\n"
    files = {"proc/stat": STAT, "sys/devices/system/node/node1/numastat": numastat}
    write_tree(write_sysfs(tmp_path, topology), files)
    usage = read_usage(tmp_path, topology)
    assert usage.cpus[1] == (250, 1000)
    assert usage.pages == {1: (7, 3)}
    assert usage.memory[1].total_bytes == topology.numa_nodes[1].memory_bytes
    (tmp_path / "proc/stat").unlink()
    assert read_usage(tmp_path, topology).cpus == {}
    with pytest.raises(TopologyError):
        read_usage(tmp_path / "nowhere", topology)


V2 = """anon N0=4096 N1=8192
file N0=0 N1=100
anon_thp N0=999
shmem N0=999
"""
V1 = """total=1 N0=1 N1=0
hierarchical_file=3 N0=1 N1=2
hierarchical_total=3 N0=1 N1=2
"""


@pytest.fixture(autouse=True)
def pages_of_4_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 counts pages of the machine."""
    monkeypatch.setattr(usage_module, "PAGE_BYTES", 4096)


def test_memory_is_counted_once() -> None:
    assert parse_memory_numa_stat(V2, unified=True) == {0: 4096, 1: 8292}
    assert parse_memory_numa_stat(V1, unified=False) == {0: 4096, 1: 8192}
    assert parse_memory_numa_stat("hierarchical_total N0=x\n\n=", unified=False) == {}


@pytest.mark.parametrize(
    ("version", "usage", "stat", "text", "found"),
    [
        (2, "pods/a/cpu.stat:usage_usec 1500000\nuser_usec 1\n", "pods/a", V2,
         ContainerUsage(1.5, {0: 4096, 1: 8292})),
        (1, "cpu,cpuacct/pods/a/cpuacct.usage:2500000000\n", "memory/pods/a", V1,
         ContainerUsage(2.5, {0: 4096, 1: 8192})),
    ],
)  # fmt: skip
def test_a_container_of_each_version(
    tmp_path: Path, version: int, usage: str, stat: str, text: str, found: ContainerUsage
) -> None:
    root = ContainerTree(tmp_path, version).root
    reader = CgroupReader(str(root))
    assert read_container_usage(reader, PLACE) == ContainerUsage(None, {})
    assert read_container_usage(reader, CgroupPlace("/pods/b")) is None
    name, _, number = usage.partition(":")
    write_tree(root, {name: number, f"{stat}/{NUMA_STAT}": text})
    assert read_container_usage(CgroupReader(str(root)), PLACE) == found


MAPS = b"""5576dd821000 default file=/usr/bin/head mapped=2 N0=2 kernelpagesize_kB=4
7f0000000000 bind:1 anon=6 dirty=6 active=0 N0=1 N1=5 kernelpagesize_kB=4
7f0010000000 default file=/a\\040N1\\0759 mapped=1 N1=1 kernelpagesize_kB=4
7f0020000000 default file=/dev/hugepages/x\\040(deleted) huge dirty=2 N1=2 kernelpagesize_kB=2048
7f0030000000 default heap
7ffc00000000 default stack anon=3 N0=3
"""


class Tree(ContainerTree):
    """With the processes of the container."""

    def maps(self, pid: int, data: bytes | None) -> None:
        (self.proc / str(pid)).mkdir()
        (self.proc / str(pid) / "maps").touch()
        if data is not None:
            (self.proc / str(pid) / NUMA_MAPS).write_bytes(data)

    def look(
        self, limit: float = 10**6, clock: Callable[[], float] | None = None
    ) -> ContainerMemoryNodes:
        reader = CgroupReader(str(self.root), proc=str(self.proc))
        ticks = iter(range(10**9))
        return read_container_memory(
            reader, PLACE, limit=limit, clock=clock or (lambda: float(next(ticks)))
        )


def test_the_cgroup_of_version_2_tells_bytes(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    (tree.home / NUMA_STAT).write_text("anon N0=4096 N1=8192\nfile N0=0 N1=4096\n")
    found = tree.look()
    assert found == ContainerMemoryNodes({0: 4096, 1: 12288}, NUMA_STAT)
    assert local_bytes(found.by_numa_node, {1}) == 12288


@pytest.mark.parametrize("unified_controller", [False, True])
def test_version_1_tells_pages_and_a_hybrid_may_have_the_file_in_either(
    tmp_path: Path, unified_controller: bool
) -> None:
    tree = Tree(tmp_path, 1)
    where = "unified" if unified_controller else "memory"
    text = "anon N0=4096 N1=8192\n" if unified_controller else V1
    (tree.root / where / "pods/a").mkdir(parents=True)
    (tree.root / where / "pods/a" / NUMA_STAT).write_text(text)
    assert tree.look() == ContainerMemoryNodes({0: 4096, 1: 8192}, NUMA_STAT)


def test_lines_of_numa_maps_count_pages_of_the_size_they_name() -> None:
    found: dict[int, int] = {}
    add_mapped_bytes(MAPS, found)
    huge = 2 * 2048 * 1024
    assert found == {0: 3 * 4096, 1: 6 * 4096 + huge}, "a line without a page size says nothing"


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\xff\x00 N=1", b"N0=5", b"x N99999=1 y"])
def test_what_is_no_numa_maps_tells_nothing(text: bytes) -> None:
    found: dict[int, int] = {}
    add_mapped_bytes(text, found)
    assert found == {}


@pytest.mark.parametrize("version", [1, 2])
def test_without_that_file_the_processes_are_asked_those_of_inner_cgroups_too(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(tmp_path, version)
    tree.processes(10)
    (tree.home / "inner").mkdir()
    (tree.home / "inner/cgroup.procs").write_text("11\n")
    tree.maps(10, b"a default anon=1 N0=1 kernelpagesize_kB=4\n")
    tree.maps(11, b"a default anon=2 N1=2 kernelpagesize_kB=4")  # cut off before the line feed
    assert tree.look() == ContainerMemoryNodes({0: 4096, 1: 8192}, NUMA_MAPS)
    # Their pages move, too.
    monkeypatch.setattr(migration, "_migrate_process_pages", lambda pid, *_: iter([pid]))
    reader = CgroupReader(str(tree.root))
    assert list(migration.migrate_pages(reader, PLACE, NUMASet([0]), 1)) == [10, 11]
    tree.processes(0)
    with pytest.raises(OSError, match="not seen from here"):
        next(migration.migrate_pages(reader, PLACE, NUMASet([0]), 1))


def test_a_hundred_thousand_lines_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    tree.processes(10)
    tree.maps(10, b"7f0000000000 default anon=1 dirty=1 N1=1 kernelpagesize_kB=4\n" * 100_000)
    assert tree.look() == ContainerMemoryNodes({1: 4096 * 100_000}, NUMA_MAPS)
    # The clock of this test goes on by one with each piece that was read.
    found = tree.look(limit=5)
    assert found.by_numa_node == {}
    assert "took too long" in found.because


def test_processes_that_end_meanwhile_are_left_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    tree.processes(10, 11)
    tree.maps(10, b"a default anon=1 N0=1 kernelpagesize_kB=4\n")
    assert tree.look().by_numa_node == {0: 4096}
    tree.processes(11)
    found = tree.look()
    assert (found.by_numa_node, found.source) == ({}, "")
    assert "its processes ended" in found.because


def test_a_number_that_became_somebody_elses_is_left_out(tmp_path: Path) -> None:
    """Process 11 leaves the container while it is read: its number may be another's by then."""
    tree = Tree(tmp_path, 2)
    tree.processes(10, 11)
    tree.maps(10, b"a default anon=1 N0=1 kernelpagesize_kB=4\n")
    tree.maps(11, b"a default anon=9 N1=9 kernelpagesize_kB=4\n")

    looks = iter(range(100))

    def leaving() -> float:
        if next(looks) == 1:  # the first look is before the list of processes is read
            tree.processes(10)
        return 0.0

    assert tree.look(clock=leaving) == ContainerMemoryNodes({0: 4096}, NUMA_MAPS)


def test_each_reason_is_told_and_no_zero(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    assert "no process" in tree.look().because
    tree.processes(0, 10)
    assert "a PID namespace" in tree.look().because
    tree.processes(10)
    tree.maps(10, None)
    assert tree.look().because == (
        "its cgroup has no memory.numa_stat, and this kernel has no numa_maps"
    )
    (tree.home / NUMA_STAT).write_text("")
    assert tree.look().because.startswith("memory.numa_stat names no NUMA node")
    (tree.home / NUMA_STAT).unlink()
    (tree.proc / "10" / NUMA_MAPS).mkdir()
    assert "of process 10 cannot be read: Is a directory" in tree.look().because
    (tree.home / NUMA_STAT).mkdir()
    assert tree.look().because.startswith("memory.numa_stat cannot be read: Is a directory")
    tree.processes(*range(1, 2000))
    assert "1999 processes are more than" in tree.look().because
    gone = read_container_memory(CgroupReader(str(tree.root)), CgroupPlace("/pods/b"))
    assert gone.because == "it has no cgroup that can be read"


def test_too_many_cgroups_are_not_walked(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    for n in range(300):
        (tree.home / f"inner{n}").mkdir()
    assert "more than 256 cgroups" in tree.look().because


@pytest.mark.skipif(
    not Path("/proc/self/numa_maps").exists(), reason="this kernel has no numa_maps"
)
def test_a_real_process(tmp_path: Path) -> None:
    tree = Tree(tmp_path, 2)
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        try:
            tree.processes(process.pid, os.getpid())
            reader = CgroupReader(str(tree.root))
            found = read_container_memory(reader, PLACE, limit=60)
        finally:
            process.kill()
    assert found.source == NUMA_MAPS
    assert sum(found.by_numa_node.values()) > 1 << 20
