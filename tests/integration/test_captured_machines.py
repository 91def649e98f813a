"""Machines that somebody captured, read by us.

The first files in `tests/golden/captured` agreed with a table that was written by looking at the
captured files, not by running discovery.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.cli.machine import topology_lines
from nri_numa.cli.machine import write_capture as capture
from nri_numa.cli.output import DEFAULT_WIDTH_COLUMNS
from nri_numa.machine.sysfs import discover_topology, read_memory, read_online
from nri_numa.machine.tree import CAPTURED_PATHS, LINK_PATHS
from tests.beds.captured_machines import FOLDER, MACHINES, captured, discovered

pytestmark = pytest.mark.slow

STATUS = "proc/self/status"
GOLDEN = Path(__file__).parents[1] / "golden/captured"


def told(name: str) -> Iterator[str]:
    """As the command tells it, and what it rounds or leaves out."""
    machine = discovered(name)
    yield from topology_lines(machine)
    yield f"{machine.present} present, {machine.possible} possible, {machine.allowed} allowed"
    yield f"cores: {' '.join(str(core.cpus) for core in machine.cores.values())}"
    for i, numa_node in read_memory(captured(name), machine).items():
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
    for i, numa_node in reading.items():
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
