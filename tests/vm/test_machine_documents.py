"""Machine documents are read strictly and become exactly the command line that boots them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines.vm_machine import (
    MachineError,
    format_list,
    load_machines,
    parse_list,
    parse_machine,
    qemu_options,
    virtme_arguments,
)

DIRECTORY = Path(__file__).parent / "machines"
TWO_NODES = """
description: two nodes
sockets: 2
cores: 2
threads: 2
numa:
  - {cpus: 0-3, memory: 1G}
  - {cpus: 4-7, memory: 1G}
"""


@given(st.frozensets(st.integers(min_value=0, max_value=200)))
def test_a_list_survives_printing_and_reading(numbers: frozenset[int]) -> None:
    assert parse_list(format_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "3-1", "1,,2", "-1", "0x1", "999999"])
def test_a_bad_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number|backwards"):
        parse_list(text)


def test_every_machine_of_the_matrix_is_valid_and_different() -> None:
    machines = load_machines(DIRECTORY)
    shapes = {
        (
            *(len(m.numa), m.threads, m.offline, m.containerd, m.system),
            tuple(n.memory_mib for n in m.numa),
        )
        for m in machines.values()
    }
    assert len(shapes) == len(machines) >= 6


def test_the_matrix_covers_what_the_project_promises_to_prove() -> None:
    machines = load_machines(DIRECTORY).values()
    assert any(m.threads == 2 and len(m.numa) == 2 and m.core for m in machines)
    assert any(len(m.numa) >= 10 and m.core for m in machines)
    assert any(
        m.distances[i][j] != m.distances[j][i]
        for m in machines
        for i in range(len(m.numa))
        for j in range(i)
    )
    assert any(not node.cpus for m in machines for node in m.numa)
    assert any(m.offline for m in machines)
    assert any(m.unplugged for m in machines)
    assert any(m.pci for m in machines)
    assert any(m.threads == 1 for m in machines)
    assert {m.system for m in machines} == {"", "bookworm", "trixie"}
    assert {m.containerd for m in machines} == {"1.7", "2.3", "2.4"}


def test_cpus_are_numbered_threads_first_then_cores_then_sockets() -> None:
    machine = parse_machine("m", TWO_NODES)
    assert machine.core_of(0) == (0, 0, 0)
    assert machine.core_of(3) == (0, 1, 1)
    assert machine.core_of(4) == (1, 0, 0)
    assert machine.siblings(7) == {6, 7}
    assert machine.numa_node_of(5) == 1


def test_distances_that_are_not_given_are_left_to_the_firmware() -> None:
    machine = parse_machine("m", TWO_NODES)
    assert machine.distances == ((10, 20), (20, 10))
    assert not any("dist" in option for option in qemu_options(machine))


def test_the_command_line_says_all_of_the_machine() -> None:
    machine = parse_machine(
        "m",
        TWO_NODES
        + "  - {memory: 512M}\n"
        + "distances: [[10, 21, 17], [22, 10, 28], [17, 28, 10]]\n"
        + "offline: 3\nunplugged: 7\n"
        + "pci: [{numa_node: 1, device: e1000e}, {numa_node: 1, device: virtio-rng-pci}]\n",
    )
    assert qemu_options(machine) == [
        *("-accel", "tcg,thread=single"),
        *("-cpu", "Nehalem"),
        *("-object", "memory-backend-ram,id=numa0,size=1024M"),
        *("-numa", "node,nodeid=0,cpus=0-3,memdev=numa0"),
        *("-object", "memory-backend-ram,id=numa1,size=1024M"),
        *("-numa", "node,nodeid=1,cpus=4-7,memdev=numa1"),
        *("-object", "memory-backend-ram,id=numa2,size=512M"),
        *("-numa", "node,nodeid=2,memdev=numa2"),
        *("-numa", "dist,src=0,dst=1,val=21"),
        *("-numa", "dist,src=0,dst=2,val=17"),
        *("-numa", "dist,src=1,dst=0,val=22"),
        *("-numa", "dist,src=1,dst=2,val=28"),
        *("-numa", "dist,src=2,dst=0,val=17"),
        *("-numa", "dist,src=2,dst=1,val=28"),
        *("-device", "pxb-pcie,id=host1,bus=pcie.0,bus_nr=80,numa_node=1"),
        *("-device", "pcie-root-port,id=port0,bus=host1,chassis=1,slot=0"),
        *("-device", "e1000e,bus=port0"),
        *("-device", "pcie-root-port,id=port1,bus=host1,chassis=2,slot=1"),
        *("-device", "virtio-rng-pci,bus=port1"),
    ]
    arguments = virtme_arguments(
        machine,
        kernel=Path("/cache/vmlinuz"),
        shared=Path("/artifacts/m"),
        guest_shared=Path("/run/out"),
        command="sh /run/out/start",
        control=Path("/tmp/c/qmp"),
    )
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--cpus"] == "7,maxcpus=8,sockets=2,cores=2,threads=2"
    assert pairs["--memory"] == "2560M"
    assert pairs["--rwdir"] == "/run/out=/artifacts/m"
    (qemu,) = [a for a in arguments if a.startswith("--qemu-opts=")]
    assert qemu.endswith(
        "-device virtio-9p-pci,fsdev=cached,mount_tag=cached-root,bus=pcie.0"
        " -qmp unix:/tmp/c/qmp,server=on,wait=off"
    )


def test_a_disk_comes_with_an_iommu_and_holds_zeros() -> None:
    machine = parse_machine("m", TWO_NODES + "pci: [{numa_node: 1, device: nvme}]\n")
    options = qemu_options(machine)
    assert options[options.index("intel-iommu") :] == [
        "intel-iommu",
        *("-device", "pxb-pcie,id=host1,bus=pcie.0,bus_nr=80,numa_node=1"),
        *("-blockdev", "null-co,node-name=disk0,size=67108864,read-zeroes=on"),
        *("-device", "pcie-root-port,id=port0,bus=host1,chassis=1,slot=0"),
        *("-device", "nvme,bus=port0,drive=disk0,serial=disk0"),
    ]
    arguments = virtme_arguments(
        machine, kernel=Path("/k"), shared=Path("/s"), guest_shared=Path("/run/out"), command="sh"
    )
    assert {"intel_iommu=on", "irqfixup"} <= set(arguments)
    without = parse_machine("m", TWO_NODES)
    assert not without.iommu
    assert "intel-iommu" not in qemu_options(without)


def test_devices_that_are_on_each_numa_node() -> None:
    pci = "pci: [{numa_node: 0, device: igb}, {numa_node: 1, device: e1000e}]\n"
    machine = parse_machine("m", TWO_NODES + pci)
    assert machine.has_on_each_node("igb", "e1000e")
    assert not machine.has_on_each_node("igb")
    assert not parse_machine("m", TWO_NODES).has_on_each_node()


def test_a_list_of_cpus_with_gaps_becomes_several_ranges() -> None:
    machine = parse_machine(
        "m",
        "description: odd\nsockets: 1\ncores: 4\nthreads: 1\n"
        'numa: [{cpus: "0,2", memory: 1G}, {cpus: "1,3", memory: 1G}]\n',
    )
    options = qemu_options(machine)
    assert "node,nodeid=0,cpus=0,cpus=2,memdev=numa0" in options
    assert "node,nodeid=1,cpus=1,cpus=3,memdev=numa1" in options


def test_a_node_without_memory_has_no_memory_backend() -> None:
    machine = parse_machine(
        "m",
        "description: odd\nsockets: 1\ncores: 2\nthreads: 1\n"
        "numa: [{cpus: 0, memory: 2G}, {cpus: 1}]\n",
    )
    assert "node,nodeid=1,cpus=1" in qemu_options(machine)
    assert not any("id=numa1" in option for option in qemu_options(machine))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("threads: 2", "threads: 3"), "threads: 3, expected 1 to 2"),
        (("sockets: 2", "sockets: 0"), "sockets: 0, expected 1 to 8"),
        (("4-7", "4-6"), "numa: CPUs 7 are in no NUMA node"),
        (("4-7", "3-7"), "numa[1].cpus: CPU 3 is in numa[0] already"),
        (("4-7", "4-8"), "numa[1].cpus: CPUs 8 do not exist"),
        (("4-7", "4-x"), "numa[1].cpus: '4-x' is not a number or a range"),
        (("memory: 1G", "memory: 1T"), "numa[0].memory: '1T' is not a size"),
        (("memory: 1G", "memory: 64M"), "numa: 1088 MiB in all, expected 1536 MiB at least"),
        (("two nodes", "x\ndistances: [[10, 21]]"), "distances: expected 2 rows of 2 numbers"),
        (("two nodes", "x\ndistances: [[10, 9], [21, 10]]"), "distances[0][1]: 9, expected 11"),
        (("two nodes", "x\ndistances: [[11, 21], [21, 10]]"), "distances[0][0]: 11, expected 10"),
        (("two nodes", "x\nnohz_full: 0-1"), "nohz_full: CPU 0 keeps the time for the others"),
        (("two nodes", "x\noffline: 0"), "offline: CPU 0 cannot be switched off"),
        (("two nodes", "x\nunplugged: 3"), "unplugged: expected the last CPUs"),
        (("two nodes", "x\noffline: 7\nunplugged: 7"), "offline: CPUs 7 are unplugged as well"),
        (("two nodes", "x\npci: [{numa_node: 2, device: igb}]"), "pci[0].numa_node: 2"),
        (("two nodes", "x\npci: [{numa_node: 0, device: x}]"), "pci[0].device: 'x', expected"),
        (("two nodes", "x\ncolour: red"), "unknown field `colour`"),
        (("two nodes", "x\ncontainerd: '3'"), "Invalid enum value '3'"),
        (("cores: 2", "cores: two"), "Expected `int`, got `str`"),
        (("numa:", "numa:\n  - {}\n#"), "numa[0]: neither CPUs nor memory"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: tuple[str, str], expected: str) -> None:
    with pytest.raises(MachineError) as caught:
        parse_machine("m", TWO_NODES.replace(*change, 1))
    assert expected in str(caught.value)


def test_all_problems_are_named_at_once() -> None:
    text = TWO_NODES.replace("4-7", "4-6").replace("two nodes", "x\noffline: 0")
    with pytest.raises(MachineError) as caught:
        parse_machine("Bad Name", text)
    assert len(caught.value.problems) == 3
