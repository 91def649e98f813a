"""How a machine is shown."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from nri_numa.cli.machine import topology_lines
from nri_numa.cli.output import DEFAULT_WIDTH_COLUMNS
from nri_numa.machine.synthetic import Numbering, build_synthetic_topology
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.machine import (
    CgroupPartitionKind,
    L3Group,
    Partition,
    PCIDevice,
    Topology,
    topology_document,
)
from tests.machines import named as machines

GOLDEN = Path(__file__).parents[2] / "golden/machines"


def _table(machine: Topology) -> str:
    return "\n".join([*topology_lines(machine), ""])


def test_the_worst_machine_fits_a_terminal() -> None:
    """1,024 CPUs dealt out over 64 NUMA nodes with high numbers and four sizes of huge pages."""
    machine = build_synthetic_topology(
        sockets=16,
        numa_per_socket=4,
        cores_per_numa=8,
        numbering=Numbering.ALTERNATING,
        numa_ids=[2 * i + 3 for i in range(64)],
        hugepages={1 << 16: 9 << 30, 1 << 21: 9 << 30, 1 << 25: 9 << 30, 1 << 30: 9 << 30},
        cores_per_l3=2,
    )
    machine = replace(
        machine,
        withheld_memory=NUMASet([3, 5]),
        warnings=("a very long sentence about something that is odd " * 9,),
    )
    text = _table(machine)
    assert max(len(line) for line in text.splitlines()) <= DEFAULT_WIDTH_COLUMNS


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_tables_look_as_agreed(name: str) -> None:
    """The files are read by people who change the view: look at the difference, then renew."""
    assert _table(machines.MACHINES[name]()) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.json")))
def test_documents_keep_their_fields(name: str) -> None:
    """Programs of users read these names."""
    document = topology_document(machines.MACHINES[name](), reserved=CPUSet([0]))
    assert document == json.loads((GOLDEN / f"{name}.json").read_text())


def test_what_is_out_of_reach_is_shown() -> None:
    machine = replace(machines.inside_cpuset(), withheld_memory=NUMASet([1]))
    assert "1          16 GiB (not for containers)  8     4-7,12-15" in _table(machine).splitlines()
    assert topology_document(machine)["numaNodes"][1]["memoryAllowed"] is False


def test_partitions_are_part_of_the_document() -> None:
    one = Partition(cgroup="rt.slice", kind=CgroupPartitionKind.ISOLATED, cpus=CPUSet([6, 7]))
    machine = replace(machines.dual_smt_16(), partitions=(one,))
    assert topology_document(machine)["partitions"] == [
        {"cgroup": "rt.slice", "kind": "isolated", "cpus": "6-7", "problem": ""}
    ]


def test_cpus_without_numa_node_and_odd_facts_are_shown() -> None:
    machine = machines.dual_adjacent()
    numa_node = replace(machine.numa_nodes[1], cpus=machine.numa_nodes[1].cpus - CPUSet([8, 9]))
    machine = replace(
        machine,
        numa_nodes={**machine.numa_nodes, 1: numa_node},
        warnings=("CPUs 8-9 belong to no NUMA node",),
    )
    lines = _table(machine).splitlines()
    assert "none       -       2     8-9" in lines
    assert lines[-2:] == ["Warnings about this machine:", "  - CPUs 8-9 belong to no NUMA node"]
    pages = replace(numa_node, hugepages={1 << 21: 1 << 30})
    lines = _table(replace(machine, numa_nodes={**machine.numa_nodes, 1: pages})).splitlines()
    assert "0          16 GiB  none         8     0-7" in lines
    assert "none       -       -            2     8-9" in lines


def test_a_cache_of_a_high_number_fits() -> None:
    alone = L3Group(id=9000, cpus=CPUSet([8000]))
    text = _table(replace(machines.one_cpu(), l3_groups={9000: alone}))
    assert "9000      -           1     8000" in text.splitlines()


def test_devices_are_told_by_kind_and_numa_node_and_only_where_somebody_looked() -> None:
    machine = machines.MACHINES["offline_cpus"]()
    devices = (
        PCIDevice(address="0000:3b:00.0", kind="GPU", vendor="10de", device="2331", numa_node=1),
        *(PCIDevice(address=f"0000:af:02.{i}", kind="NIC", numa_node=0) for i in range(8)),
        PCIDevice(address="0000:00:03.0", kind="NIC"),
    )
    text = "\n".join(topology_lines(machine, devices=devices))
    shown = text.split("DEVICES", 1)[1].splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["GPU", "1", "1", "0000:3b:00.0"],
        ["NIC", "0", "8", "0000:af:02.0,0000:af:02.1,0000:af:02.2,0000:af:02.3,"],
        ["0000:af:02.4,0000:af:02.5,0000:af:02.6,0000:af:02.7"],
        ["NIC", "unknown", "1", "0000:00:03.0"],
    ]
    assert "DEVICES" not in _table(machine)
    document = topology_document(machine, devices=devices)
    assert document["devices"][0] == {
        "address": "0000:3b:00.0",
        "kind": "GPU",
        "vendor": "10de",
        "device": "2331",
        "numaNode": 1,
        "localCPUs": "",
    }
    assert document["devices"][-1]["numaNode"] is None
    assert "devices" not in topology_document(machine)
