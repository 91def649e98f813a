"""What firmware and kernel leave out or get wrong, and what a container then gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nri_numa.machine.synthetic import synthetic, sysfs_files
from nri_numa.machine.sysfs import discover
from nri_numa.model.machine import Topology
from tests.beds.world import World
from tests.machines import named as machines
from tests.machines.named import write_tree

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
SINGLE = {"policy": "single-numa-node"}

Change = Callable[[dict[str, str]], None]


def _read(root: Path, topology: Topology, change: Change) -> Topology:
    files = sysfs_files(topology)
    change(files)
    return discover(write_tree(root, files))


def _without_node(numa_node: int) -> Change:
    """As the kernel shows a NUMA node whose memory is offline: not at all."""

    def change(files: dict[str, str]) -> None:
        for name in [n for n in files if n.startswith(f"{NODE}/node{numa_node}/")]:
            del files[name]
        files[f"{NODE}/online"] = "0\n"
        files[f"{NODE}/node0/distance"] = "10\n"

    return change


def test_case_13_cpus_of_an_offline_numa_node_are_not_near_the_only_online_one(
    tmp_path: Path,
) -> None:
    """They joined NUMA node 0, at a distance of 21, and were reported as its own."""
    machine = _read(tmp_path, machines.dual_no_smt(), _without_node(1))
    assert str(machine.numa_nodes[0].cpus) == "0-7"
    assert {machine.cpus[i].numa_node for i in range(8, 16)} == {None}
    assert "CPUs 8-15 belong to no NUMA node" in machine.warnings
    world = World(machine)
    assert world.put("a", SINGLE, 7, 1)[0] == "0-6"
    refused = world.refused("wide", SINGLE, 4, 1)
    assert "free: NUMA node 0: 1 CPU" in refused.message


def _siblings(
    files: dict[str, str], groups: Mapping[str, str], name: str = "core_siblings_list"
) -> None:
    for cpus, told in groups.items():
        low, _, high = cpus.partition("-")
        for i in range(int(low), int(high or low) + 1):
            files[f"{CPU}/cpu{i}/topology/physical_package_id"] = "-1\n"
            files[f"{CPU}/cpu{i}/topology/{name}"] = f"{told}\n"


EIGHT = {f"{i * 2}-{i * 2 + 1}": f"{i * 2}-{i * 2 + 1}" for i in range(8)}


def test_case_14_siblings_tell_the_sockets_where_package_ids_are_minus_one(tmp_path: Path) -> None:
    """An s390 in a partition: 16 CPUs in 8 sockets were read as one."""
    base = synthetic(sockets=8, numa_per_socket=1, cores_per_numa=2, threads=1)
    machine = _read(tmp_path, base, lambda files: _siblings(files, EIGHT))
    assert [str(s.cpus) for s in machine.sockets.values()] == list(EIGHT.values())
    assert list(machine.sockets) == list(range(8))
    assert machine.warnings == (
        "CPUs 0-15 report no package id that can be read; the socket is taken from its siblings",
    )


@pytest.mark.parametrize("level", ["book", "drawer"])
def test_case_14_books_and_drawers_tell_it_too(tmp_path: Path, level: str) -> None:
    base = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1)

    def change(files: dict[str, str]) -> None:
        _siblings(files, {"0-3": "0-3", "4-7": "4-7"}, f"{level}_siblings_list")
        for i in range(8):  # nothing is known of the socket: each CPU by itself
            files[f"{CPU}/cpu{i}/topology/core_siblings_list"] = f"{i}\n"

    machine = _read(tmp_path, base, change)
    assert [str(s.cpus) for s in machine.sockets.values()] == ["0-3", "4-7"]


def test_case_14_package_ids_are_unique_in_a_book_only(tmp_path: Path) -> None:
    base = synthetic(sockets=4, numa_per_socket=1, cores_per_numa=2, threads=1)

    def change(files: dict[str, str]) -> None:
        for i in range(8):
            files[f"{CPU}/cpu{i}/topology/book_id"] = f"{i // 4}\n"
            files[f"{CPU}/cpu{i}/topology/physical_package_id"] = f"{i // 2 % 2}\n"

    machine = _read(tmp_path, base, change)
    assert [str(s.cpus) for s in machine.sockets.values()] == ["0-1", "2-3", "4-5", "6-7"]


def test_case_14_unknown_and_known_packages_keep_apart(tmp_path: Path) -> None:
    base = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1)
    machine = _read(tmp_path, base, lambda files: _siblings(files, {"4-7": "4-7"}))
    assert {i: str(s.cpus) for i, s in machine.sockets.items()} == {0: "0-3", 1: "4-7"}


def test_case_14_sockets_count_before_ids_where_no_cache_is_told() -> None:
    """Two sockets in one NUMA node, even and odd numbers; 4 CPUs were 0-3, two of each."""
    base = synthetic(
        sockets=2, numa_per_socket=1, sockets_per_numa=2, cores_per_numa=8, threads=1,
        cores_per_l3=0,
    )  # fmt: skip
    world = World(base)
    world.put("first", {"numacpu": "0,2", "cpus": "exclusive"}, 2)
    world.put("a", SINGLE, 3, 1)
    assert {base.cpus[i].socket for i in world.cpus("a-app")} == {1}


def test_case_14_an_empty_map_is_no_cache(tmp_path: Path) -> None:
    """Each CPU was taken for an L3 cache of its own."""

    def change(files: dict[str, str]) -> None:
        for name in [n for n in files if n.endswith("shared_cpu_list")]:
            files[name] = "\n"
            files[name.replace("_list", "_map")] = "00000000\n"

    machine = _read(tmp_path, machines.dual_no_smt(), change)
    assert machine.l3_groups == {}


def test_case_14_a_good_mask_beats_an_empty_list(tmp_path: Path) -> None:
    def change(files: dict[str, str]) -> None:
        files[f"{NODE}/node0/cpulist"] = "\n"
        files[f"{NODE}/node0/cpumap"] = "000000ff\n"

    machine = _read(tmp_path, machines.dual_no_smt(), change)
    assert str(machine.numa_nodes[0].cpus) == "0-7"


def _grouped(files: dict[str, str], name: str, size: int, count: int = 16) -> None:
    for i in range(count):
        low = i // size * size
        files[f"{CPU}/cpu{i}/topology/{name}"] = f"{low}-{low + size - 1}\n"


@pytest.mark.parametrize(
    ("name", "noun"), [("cluster_cpus_list", "clusters of cores"), ("die_cpus_list", "dies")]
)
def test_case_14_clusters_and_dies_stand_in_for_caches(
    tmp_path: Path, name: str, noun: str
) -> None:
    """An Arm machine that tells clusters of 4 cores and no cache."""
    base = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, cores_per_l3=0)
    machine = _read(tmp_path, base, lambda files: _grouped(files, name, 4))
    assert [str(g.cpus) for g in machine.l3_groups.values()] == ["0-3", "4-7", "8-11", "12-15"]
    assert f"the kernel reports no L3 caches; {noun} are taken for them" in machine.warnings
    world = World(machine)
    world.put("first", {"numacpu": "0-1", "cpus": "exclusive"}, 2)
    world.put("other", {"numamem": "1"}, 1, 12)
    assert world.put("a", SINGLE, 4, 1)[0] == "4-7"


def test_case_14_groups_that_tell_nothing_are_not_taken(tmp_path: Path) -> None:
    """A die that is the socket, a cluster that is a core."""
    base = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, cores_per_l3=0)

    def change(files: dict[str, str]) -> None:
        _grouped(files, "die_cpus_list", 8)
        _grouped(files, "cluster_cpus_list", 1)

    assert _read(tmp_path, base, change).l3_groups == {}
