"""Machines that somebody captured, read by us.

The first files in `tests/golden/captured` agreed with a table that was written by looking at the
captured files, not by running discovery.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.cli.machine import topology_lines
from nri_numa.cli.machine import write_capture as capture
from nri_numa.cli.output import DEFAULT_WIDTH_COLUMNS
from nri_numa.machine.sysfs import discover_topology, read_memory, read_online
from nri_numa.machine.tree import CAPTURED_PATHS, LINK_PATHS
from nri_numa.model.machine import Topology

pytestmark = pytest.mark.slow

STATUS = "proc/self/status"
FOLDER = Path(__file__).parents[3] / "shared/machines"
GOLDEN = Path(__file__).parents[1] / "golden/captured"
MACHINES = (
    # Two Arm packages with two NUMA nodes each; package ids are firmware offsets.
    "128arm-2pa2n8cluster4co",
    # Captured inside the cpuset /prout, which has CPUs 0-3 and memory of NUMA nodes 2-3.
    "16amd64-4n4c-cgroup-distance-merge",
    "16amd64-8n2c",
    # No lists but masks, no file of online CPUs; 2, 5, 13 and 14 have nothing but online=0.
    "16em64t-4s2c2t-offlines",
    # Six cores with two threads and eight with one; the files that name the kinds were not
    # captured, top performance 64 against 39 tells them apart.
    "20em64t-hybrid-1p6c2t+2ca4co1t",
    "2arm-2c",
    # 16 CPUs more could be plugged in; captured inside a batch system's cgroup.
    "32amd64-4s2n4c-cgroup2",
    # CPU numbers dealt out over the sockets; core ids within a socket have holes.
    "40intel64-2g2n4c+pcilocality",
    # Two integer cores of one module call each other thread siblings, with core ids of their own.
    "64amd64-4s2n4ca2co",
    # Every NUMA node claims every CPU; the links say one each.
    "8em64t-2s2ca2c-buggynuma",
    # Four sockets in each NUMA node; masks only, no file of online CPUs. Sockets 0 and 1 are not
    # in the order of the CPU numbers.
    "96em64t-4no4pa3ca2co",
    # Memory-only NUMA nodes 4, 6, 8, 9 and holes between the numbers.
    "fakeheteromemtiers",
)


def captured(name: str) -> Path:
    path = FOLDER / f"{name}.tar.bz2"
    if not path.exists():
        pytest.skip("the captured machines are not beside this repository")
    return path


@cache
def discovered(name: str) -> Topology:
    """What a captured machine is; thousands of members are unpacked for it."""
    return discover_topology(captured(name))


def told(name: str) -> Iterator[str]:
    """As the command tells it, and what it rounds or leaves out."""
    machine = discovered(name)
    yield from topology_lines(machine)
    yield f"{machine.present} present, {machine.possible} possible, {machine.allowed} allowed"
    yield f"cores: {' '.join(str(core.cpus) for core in machine.cores.values())}"
    for i, numa_node in read_memory(captured(name), machine).numa_nodes.items():
        total, free = machine.numa_nodes[i].memory_bytes, numa_node.free_bytes
        yield f"NUMA node {i}: {free >> 10} of {total >> 10} KiB free"


@pytest.mark.parametrize("name", MACHINES)
def test_a_captured_machine_is_read_as_it_is(name: str) -> None:
    """Look at the difference, then renew."""
    assert list(told(name)) == (GOLDEN / f"{name}.txt").read_text().splitlines()
    assert read_online(captured(name)) == discovered(name).online
    assert max(map(len, topology_lines(discovered(name)))) <= DEFAULT_WIDTH_COLUMNS


@pytest.mark.parametrize("name", MACHINES)
def test_its_memory_is_read_and_packed_again_it_is_the_same(name: str, tmp_path: Path) -> None:
    path, again, machine = captured(name), tmp_path / "again.tar.gz", discovered(name)
    reading = read_memory(path, machine)
    for i, numa_node in reading.numa_nodes.items():
        assert numa_node.total_bytes == machine.numa_nodes[i].memory_bytes
        assert numa_node.reclaimable_bytes >= 0
        assert 0 < numa_node.available_bytes <= numa_node.total_bytes
    report = capture(path, again)
    packed = discover_topology(again)
    # Of warnings the words may differ: they name the file.
    assert replace(packed, warnings=()) == replace(machine, warnings=())
    assert len(packed.warnings) == len(machine.warnings)
    assert read_memory(again, packed) == reading
    assert all(
        CAPTURED_PATHS.fullmatch(n) or LINK_PATHS.fullmatch(n) for n in report.files if n != STATUS
    )
    assert report.unreadable == ()


def test_no_captured_machine_is_left_unread() -> None:
    if not FOLDER.is_dir():
        pytest.skip("the captured machines are not beside this repository")
    assert {p.name.removesuffix(".tar.bz2") for p in FOLDER.iterdir()} == set(MACHINES)
