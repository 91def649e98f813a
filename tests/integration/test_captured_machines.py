"""Machines that somebody captured, read by us.

The expectations were written by looking at the captured files, not by running discovery.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.cli.machine import pack as capture
from nri_numa.cli.machine import topology_lines
from nri_numa.cli.output import WIDTH
from nri_numa.machine.sysfs import discover, read_memory, read_online
from nri_numa.machine.tree import LINKS, NEEDED
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import CoreKind, Topology

pytestmark = pytest.mark.slow

STATUS = "proc/self/status"
FOLDER = Path(__file__).parents[3] / "shared/machines"


def _every(step: int, start: int, stop: int) -> str:
    return ",".join(str(i) for i in range(start, stop, step))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one capture shows.

    Attributes:
        nodes: by NUMA node, its CPUs and MemTotal in KiB.
        l3: CPUs of the L3 groups; a number where they are many and alike.
    """

    online: str
    nodes: dict[int, tuple[str, int]]
    distances: list[list[int]]
    sockets: dict[int, str]
    cores: dict[int, int]
    siblings: tuple[str, ...] = ()
    l3: tuple[str, ...] = ()
    present: str | None = None
    possible: str | None = None
    allowed: str | None = None
    withheld: str = ""
    hugepages: dict[int, int] = field(default_factory=dict)
    free_kib: dict[int, int] = field(default_factory=dict)
    efficient: str = ""
    warnings: tuple[str, ...] = ()


def _uniform(count: int, remote: int) -> list[list[int]]:
    return [[10 if a == b else remote for b in range(count)] for a in range(count)]


G8, G16 = 8_388_608, 16_777_216

MACHINES = {
    # Two Arm packages with two NUMA nodes each; package ids are firmware offsets.
    "128arm-2pa2n8cluster4co": Expected(
        online="0-127",
        nodes={
            0: ("0-31", 131_732_940),
            1: ("32-63", 132_117_940),
            2: ("64-95", 132_117_936),
            3: ("96-127", 131_062_408),
        },
        distances=[[10, 16, 32, 33], [16, 10, 25, 32], [32, 25, 10, 16], [33, 32, 16, 10]],
        sockets={36: "0-63", 8442: "64-127"},
        cores={1: 128},
        siblings=("0", "127"),
        l3=("0-31", "32-63", "64-95", "96-127"),
        free_kib={0: 130_167_340, 1: 131_884_112},
    ),
    # Captured inside the cpuset /prout, which has CPUs 0-3 and memory of NUMA nodes 2-3.
    "16amd64-4n4c-cgroup-distance-merge": Expected(
        online="0-15",
        nodes={0: ("0-3", 8_387_892), 1: ("4-7", G8), 2: ("8-11", G8), 3: ("12-15", G8)},
        distances=_uniform(4, 20),
        sockets={0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"},
        cores={1: 16},
        l3=("0-3", "4-7", "8-11", "12-15"),
        allowed="0-3",
        withheld="0-1",
        hugepages={2 << 20: 512},
        free_kib={0: 6_739_740},
        warnings=(
            "our cgroup /prout allows only CPUs 0-3 of 0-15",
            "our cgroup /prout does not allow memory of NUMA nodes 0-1",
        ),
    ),
    "16amd64-8n2c": Expected(
        online="0-15",
        nodes={0: ("0-1", 8_386_704)} | {i: (f"{2 * i}-{2 * i + 1}", G8) for i in range(1, 8)},
        distances=_uniform(8, 20),
        sockets={i: f"{2 * i}-{2 * i + 1}" for i in range(8)},
        cores={1: 16},
        free_kib={0: 6_895_672, 1: 8_226_932},
    ),
    # No lists but masks, no file of online CPUs; 2, 5, 13 and 14 have nothing but online=0.
    "16em64t-4s2c2t-offlines": Expected(
        online="0-1,3-4,6-12,15",
        present="0-15",
        nodes={0: ("0-1,3-4,6-12,15", 16_772_456)},
        distances=[[10]],
        sockets={0: "0,4,8,12", 1: "1,9", 2: "6,10", 3: "3,7,11,15"},
        cores={2: 5, 1: 2},
        siblings=("0,8", "1,9", "3,11", "4,12", "7,15", "6", "10"),
        l3=("0,4,8,12", "1,9", "3,7,11,15", "6,10"),
        free_kib={0: 13_079_628},
    ),
    # Six cores with two threads and eight with one; the files that name the kinds were not
    # captured, top performance 64 against 39 tells them apart.
    "20em64t-hybrid-1p6c2t+2ca4co1t": Expected(
        online="0-19",
        nodes={0: ("0-19", 32_489_480)},
        distances=[[10]],
        sockets={0: "0-19"},
        cores={2: 6, 1: 8},
        siblings=("0-1", "10-11", "12", "19"),
        l3=("0-19",),
        free_kib={0: 28_133_012},
        efficient="12-19",
    ),
    "2arm-2c": Expected(
        online="0-1",
        nodes={0: ("0-1", 280_840)},
        distances=[[10]],
        sockets={3: "0-1"},
        cores={1: 2},
        free_kib={0: 250_460},
        warnings=("the kernel reports no NUMA nodes; everything belongs to NUMA node 0",),
    ),
    # 16 CPUs more could be plugged in; captured inside a batch system's cgroup.
    "32amd64-4s2n4c-cgroup2": Expected(
        online="0-31",
        possible="0-47",
        nodes={0: ("0-3", 16_775_084)} | {i: (f"{4 * i}-{4 * i + 3}", G16) for i in range(1, 8)},
        distances=[
            [10, 16, 16, 22, 16, 22, 16, 22],
            [16, 10, 22, 16, 22, 16, 22, 16],
            [16, 22, 10, 16, 16, 22, 16, 22],
            [22, 16, 16, 10, 22, 16, 22, 16],
            [16, 22, 16, 22, 10, 16, 16, 22],
            [22, 16, 22, 16, 16, 10, 22, 16],
            [16, 22, 16, 22, 16, 22, 10, 16],
            [22, 16, 22, 16, 22, 16, 16, 10],
        ],
        sockets={0: "0-7", 1: "8-15", 2: "16-23", 3: "24-31"},
        cores={1: 32},
        l3=tuple(f"{4 * i}-{4 * i + 3}" for i in range(8)),
        allowed="0-5",
        withheld="6-7",
        free_kib={0: 15_394_716, 1: 16_048_340},
        warnings=(
            "our cgroup /uid_2008/job_15389/step_0 allows only CPUs 0-5 of 0-31",
            "our cgroup /uid_2008/job_15389/step_0 does not allow memory of NUMA nodes 6-7",
        ),
    ),
    # CPU numbers dealt out over the sockets; core ids within a socket have holes.
    "40intel64-2g2n4c+pcilocality": Expected(
        online="0-39",
        possible="0-79",
        nodes={i: (_every(4, i, 40), 134_204_252 if i == 0 else 134_217_728) for i in range(4)},
        distances=_uniform(4, 20),
        sockets={i: _every(4, i, 40) for i in range(4)},
        cores={1: 40},
        l3=tuple(_every(4, i, 40) for i in range(4)),
        free_kib={0: 75_631_516, 1: 85_242_572},
    ),
    # Two integer cores of one module call each other thread siblings, with core ids of their own.
    "64amd64-4s2n4ca2co": Expected(
        online="0-63",
        nodes={
            i: (f"{8 * i}-{8 * i + 7}", {0: 16_769_836, 5: G8, 7: 16_760_832}.get(i, G16))
            for i in range(8)
        },
        distances=[
            [10, 16, 16, 22, 16, 22, 16, 22],
            [16, 10, 22, 16, 16, 22, 22, 16],
            [16, 22, 10, 16, 16, 16, 16, 16],
            [22, 16, 16, 10, 16, 16, 22, 22],
            [16, 16, 16, 16, 10, 16, 16, 22],
            [22, 22, 16, 16, 16, 10, 22, 16],
            [16, 22, 16, 22, 16, 22, 10, 16],
            [22, 16, 16, 22, 22, 16, 16, 10],
        ],
        sockets={i: f"{16 * i}-{16 * i + 15}" for i in range(4)},
        cores={2: 32},
        siblings=("0-1", "62-63"),
        l3=tuple(f"{8 * i}-{8 * i + 7}" for i in range(8)),
        free_kib={0: 16_087_204, 1: 16_190_248},
    ),
    # Every NUMA node claims every CPU; the links say one each.
    "8em64t-2s2ca2c-buggynuma": Expected(
        online="0-7",
        nodes={i: (str(i), {0: 2_096_684, 1: 2_096_128}.get(i, 2_097_152)) for i in range(8)},
        distances=_uniform(8, 10),
        sockets={0: "0,2,4,6", 1: "1,3,5,7"},
        cores={1: 8},
        free_kib={0: 935_712, 1: 996_472},
        warnings=(
            "NUMA nodes 0-7 all claim CPUs 0-7; each CPU is counted for the one that its own "
            "directory links to, else the lowest",
            "the firmware says that some NUMA nodes are no farther away than the local one",
        ),
    ),
    # Four sockets in each NUMA node; masks only, no file of online CPUs. Sockets 0 and 1 are not
    # in the order of the CPU numbers.
    "96em64t-4no4pa3ca2co": Expected(
        online="0-95",
        nodes={
            i: (f"{24 * i}-{24 * i + 23}", 132_101_504 if i == 0 else 132_124_160) for i in range(4)
        },
        distances=_uniform(4, 26),
        sockets={
            4 * n + (k if n else (1, 0, 2, 3)[k]): _every(4, 24 * n + k, 24 * n + 24)
            for n in range(4)
            for k in range(4)
        },
        cores={1: 96},
        l3=tuple(_every(4, 24 * n + k, 24 * n + 24) for n in range(4) for k in range(4)),
        free_kib={0: 43_793_752, 1: 131_947_924},
    ),
    # Memory-only NUMA nodes 4, 6, 8, 9 and holes between the numbers.
    "fakeheteromemtiers": Expected(
        online="0-5",
        nodes={
            0: ("0-1", 3_005_392),
            1: ("2-3", 1_002_460),
            2: ("4-5", 524_288),
            4: ("", 524_288),
            6: ("", 393_216),
            8: ("", 393_216),
            9: ("", 393_216),
        },
        distances=_uniform(7, 20),
        sockets={0: "0-5"},
        cores={1: 6},
        l3=("0-5",),
        free_kib={0: 2_814_956, 1: 949_304},
    ),
}


def captured(name: str) -> Path:
    path = FOLDER / f"{name}.tar.bz2"
    if not path.exists():
        pytest.skip("the captured machines are not beside this repository")
    return path


@cache
def discovered(name: str) -> Topology:
    """What a captured machine is; thousands of members are unpacked for it."""
    return discover(captured(name))


@pytest.mark.parametrize("name", MACHINES)
def test_a_captured_machine_is_read_as_it_is(name: str) -> None:
    path, machine, expected = captured(name), discovered(name), MACHINES[name]
    assert str(machine.online) == expected.online == str(read_online(path))
    assert str(machine.present) == (expected.present or expected.online)
    assert str(machine.possible) == (expected.possible or expected.present or expected.online)
    assert str(machine.isolated) == ""
    assert {
        i: (str(n.cpus), n.memory_bytes // 1024) for i, n in machine.numa_nodes.items()
    } == expected.nodes
    ids = list(expected.nodes)
    assert [[machine.distance(a, b) for b in ids] for a in ids] == expected.distances
    assert {i: str(s.cpus) for i, s in machine.sockets.items()} == expected.sockets
    assert Counter(len(c.cpus) for c in machine.cores.values()) == expected.cores
    assert set(expected.siblings) <= {str(c.cpus) for c in machine.cores.values()}
    assert tuple(str(g.cpus) for g in machine.l3_groups.values()) == expected.l3
    assert str(machine.allowed) == (expected.allowed or expected.online)
    assert str(machine.withheld_memory) == expected.withheld
    for numa_node in machine.numa_nodes.values():
        pages = {size: total // size for size, total in numa_node.hugepages.items()}
        assert pages == expected.hugepages
    assert _of_kind(machine, CoreKind.EFFICIENT) == expected.efficient
    assert bool(_of_kind(machine, CoreKind.PERFORMANCE)) == bool(expected.efficient)
    assert machine.warnings == expected.warnings
    assert max(map(len, topology_lines(machine))) <= WIDTH


def _of_kind(machine: Topology, kind: CoreKind) -> str:
    return str(CPUSet(i for c in machine.cores.values() if c.kind is kind for i in c.cpus))


@pytest.mark.parametrize("name", MACHINES)
def test_its_memory_is_read_and_packed_again_it_is_the_same(name: str, tmp_path: Path) -> None:
    path, again = captured(name), tmp_path / "again.tar.gz"
    machine, expected = discovered(name), MACHINES[name]
    reading = read_memory(path, machine)
    assert list(reading.numa_nodes) == list(expected.nodes)
    for i, numa_node in reading.numa_nodes.items():
        assert numa_node.total_bytes == machine.numa_nodes[i].memory_bytes
        assert numa_node.reclaimable_bytes >= 0
        assert 0 < numa_node.available_bytes <= numa_node.total_bytes
        if i in expected.free_kib:
            assert numa_node.free_bytes == expected.free_kib[i] * 1024
    report = capture(path, again)
    packed = discover(again)
    # Of warnings the words may differ: they name the file.
    assert replace(packed, warnings=()) == replace(machine, warnings=())
    assert len(packed.warnings) == len(machine.warnings)
    assert read_memory(again, packed) == reading
    assert all(NEEDED.fullmatch(n) or LINKS.fullmatch(n) for n in report.files if n != STATUS)
    assert report.unreadable == ()


def test_no_captured_machine_is_left_unread() -> None:
    if not FOLDER.is_dir():
        pytest.skip("the captured machines are not beside this repository")
    assert {p.name.removesuffix(".tar.bz2") for p in FOLDER.iterdir()} == set(MACHINES)
