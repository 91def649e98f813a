"""Made-up machines have the shape that was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from nri_numa.machine.cpuset import CPUSet, NUMASet
from nri_numa.machine.model import Core, CoreKind, MemoryReading, NUMAMemory, Topology
from nri_numa.machine.synthetic import GIB, sockets_from, synthetic, sysfs_files
from tests.machines import named as machines


@pytest.mark.parametrize("name", machines.MACHINES)
def test_every_named_machine_is_consistent(name: str) -> None:
    """Ids refer to what exists, and sets that describe the same thing agree."""
    machine = machines.MACHINES[name]()
    assert CPUSet(machine.cpus) == machine.online <= machine.present <= machine.possible
    assert machine.allowed <= machine.online
    assert list(machine.cpus) == sorted(machine.cpus)
    assert list(machine.numa_nodes) == sorted(machine.numa_nodes)
    assert sum(len(c.cpus) for c in machine.cores.values()) == len(machine.online)
    assert sum(len(s.cpus) for s in machine.sockets.values()) == len(machine.online)
    for i, cpu in machine.cpus.items():
        assert cpu.id == i
        assert i in machine.cores[cpu.core].cpus
        assert i in machine.sockets[cpu.socket].cpus
        assert cpu.core == machine.cores[cpu.core].cpus.first
        assert cpu.numa_node is not None
        assert i in machine.numa_nodes[cpu.numa_node].cpus
        assert cpu.numa_node in machine.sockets[cpu.socket].numa_nodes
        assert machine.cores[cpu.core].numa_node == cpu.numa_node
        if cpu.l3 is not None:
            assert i in machine.l3_groups[cpu.l3].cpus
            assert machine.l3_groups[cpu.l3].cpus.first == cpu.l3
    for numa_node in machine.numa_nodes.values():
        assert list(numa_node.distances) == list(machine.numa_nodes)
        assert numa_node.distances[numa_node.id] == 10


def test_split_numbering_puts_all_first_threads_first() -> None:
    machine = machines.dual_smt()
    assert str(machine.numa_nodes[0].cpus) == "0-15,32-47"
    assert str(machine.numa_nodes[1].cpus) == "16-31,48-63"
    assert str(machine.cores[0].cpus) == "0,32"


def test_adjacent_numbering_puts_siblings_side_by_side() -> None:
    machine = machines.dual_adjacent()
    assert str(machine.numa_nodes[0].cpus) == "0-7"
    assert str(machine.cores[2].cpus) == "2-3"


def test_alternating_numbering_deals_cpus_out_to_numa_nodes() -> None:
    machine = machines.dual_alternating()
    assert str(machine.numa_nodes[0].cpus) == "0,2,4,6,8,10,12,14"
    assert str(machine.cores[1].cpus) == "1,9"
    assert machine.cpus[1].numa_node == machine.cpus[9].numa_node == 1


def test_distances_are_larger_the_farther_away() -> None:
    machine = machines.snc_smt()
    assert [machine.distance(0, i) for i in range(4)] == [10, 12, 21, 21]
    machine = machines.memory_only()
    assert [machine.distance(0, i) for i in range(4)] == [10, 21, 17, 28]
    assert [machine.distance(3, i) for i in range(4)] == [28, 17, 28, 10]


def test_several_sockets_can_share_a_numa_node() -> None:
    machine = machines.joined_sockets()
    assert len(machine.sockets) == 4
    assert [str(s.numa_nodes) for s in machine.sockets.values()] == ["0", "0", "1", "1"]
    assert str(machine.sockets[1].cpus) == "4-7,20-23"
    assert len(machine.l3_groups) == 4  # a cache does not span sockets


def test_offline_cpus_leave_cores_with_fewer_threads_or_none() -> None:
    machine = machines.offline_cpus()
    assert str(machine.online) == "0-2,4-5,8-11,13-15"
    assert str(machine.present - machine.online) == "3,6-7,12"
    assert {str(c.cpus) for c in machine.cores.values()} == {
        *("0-1", "2", "4-5", "8-9", "10-11", "13", "14-15")
    }


def test_ids_may_have_holes() -> None:
    machine = machines.sparse_ids()
    assert str(machine.numa_ids) == "0,8,252"
    assert str(machine.online) == "0-7,16-23"
    assert machine.memory_nodes == NUMASet([0, 8, 252])


def test_hybrid_machines_have_two_kinds_of_cores() -> None:
    machine = machines.hybrid()
    kinds = {i: c.kind for i, c in machine.cores.items()}
    assert kinds[0] is CoreKind.PERFORMANCE
    assert kinds[12] is CoreKind.EFFICIENT
    assert len(machine.cores[12].cpus) == 1
    assert machines.dual_smt().cores[0].kind is CoreKind.STANDARD


def test_chiplets_share_caches_in_groups_of_cores() -> None:
    machine = machines.chiplets()
    assert len(machine.l3_groups) == 8
    assert str(machine.l3_groups[4].cpus) == "4-7,36-39"
    assert machines.no_caches().l3_groups == {}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sockets": 0}, "at least 1"),
        ({"threads": 0}, "at least 1"),
        ({"cores_per_numa": -1}, "at least 1"),
        ({"sockets": 2, "numa_per_socket": 2, "sockets_per_numa": 2}, "cannot be joined"),
        ({"sockets": 3, "numa_per_socket": 1, "sockets_per_numa": 2}, "cannot be joined"),
        ({"numa_ids": (0, 1)}, "must be 4 different numbers"),
        ({"numa_ids": (0, 1, 2, 2)}, "must be 4 different numbers"),
        ({"distances": [[10]]}, "4 rows of 4 numbers"),
        ({"numbering": "random"}, "random"),
    ],
)
def test_contradicting_numbers_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthetic(**wrong)


def test_files_are_what_the_kernel_would_show() -> None:
    files = sysfs_files(machines.huge_pages())
    assert files["sys/devices/system/cpu/online"] == "0-15\n"
    assert files["sys/devices/system/cpu/cpu9/topology/thread_siblings_list"] == "1,9\n"
    assert files["sys/devices/system/node/node1/cpulist"] == "4-7,12-15\n"
    assert files["sys/devices/system/node/node1/distance"] == "21 10\n"
    huge = "sys/devices/system/node/node0/hugepages/hugepages-2048kB"
    assert files[f"{huge}/nr_hugepages"] == files[f"{huge}/free_hugepages"] == "512\n"
    meminfo = files["sys/devices/system/node/node0/meminfo"].splitlines()
    assert meminfo[0].split() == ["Node", "0", "MemTotal:", str(16 * GIB // 1024), "kB"]
    assert meminfo[1].split() == ["Node", "0", "MemFree:", str(11 * GIB // 1024), "kB"]
    assert "proc/self/status" not in files


def test_hybrid_cores_and_our_own_cpuset_have_files() -> None:
    files = sysfs_files(machines.hybrid())
    assert files["sys/devices/cpu_core/cpus"] == "0-11\n"
    assert files["sys/devices/cpu_atom/cpus"] == "12-19\n"
    files = sysfs_files(machines.inside_cpuset())
    assert "Cpus_allowed_list:\t0-1,4-5,8-9,12-13\n" in files["proc/self/status"]


def test_a_core_that_belongs_to_no_numa_node_counts_for_its_socket() -> None:
    cores = [
        Core(id=0, socket=3, numa_node=None, cpus=CPUSet([0, 1])),
        Core(id=2, socket=3, numa_node=5, cpus=CPUSet([2])),
    ]
    (socket,) = sockets_from(cores).values()
    assert socket.id == 3
    assert str(socket.cpus) == "0-2"
    assert str(socket.numa_nodes) == "5"


def test_offline_cpus_have_no_other_files() -> None:
    files = sysfs_files(machines.offline_cpus())
    assert files["sys/devices/system/cpu/cpu3/online"] == "0\n"
    assert [name for name in files if "/cpu3/" in name] == ["sys/devices/system/cpu/cpu3/online"]


def test_a_memory_reading_can_be_written() -> None:
    machine = machines.huge_pages()
    memory = MemoryReading(
        numa_nodes={
            0: NUMAMemory(
                total_bytes=16 * GIB,
                free_bytes=3 * GIB,
                reclaimable_bytes=GIB,
                free_hugepages={machines.HUGE_2M: GIB // 2},
            )
        }
    )
    files = sysfs_files(machine, memory)
    directory = "sys/devices/system/node/node0"
    assert f"MemFree: {3 * GIB // 1024:>14} kB" in files[f"{directory}/meminfo"]
    assert files[f"{directory}/hugepages/hugepages-2048kB/free_hugepages"] == "256\n"
    assert files[f"{directory}/hugepages/hugepages-1048576kB/free_hugepages"] == "0\n"
    # NUMA nodes that the reading leaves out are unused.
    assert "MemFree" in files["sys/devices/system/node/node1/meminfo"]


def test_memory_sizes_are_whole_kibibytes() -> None:
    machine: Topology = synthetic(memory_gib=0.3)
    assert machine.numa_nodes[0].memory_bytes % 1024 == 0


def test_no_core_may_be_left_of_a_socket() -> None:
    machine = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=1, offline=CPUSet([1, 3]))
    assert list(machine.sockets) == [0]
    assert machine.cpu_nodes == NUMASet([0])
    assert machine.numa_ids == NUMASet([0, 1])
