"""What an inventory of devices says, and what it cannot mean."""

from pathlib import Path

import pytest

from nri_numa.cluster.manifests import ManifestError
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import PCIDevice, Topology
from nri_numa.simulate.devices import DeviceInventory, read_device_inventory
from tests.machines import named as machines

CARDS = (
    PCIDevice(
        address="0000:3b:00.0",
        kind="GPU",
        vendor="10de",
        device="20b0",
        numa_node=1,
        local_cpus=CPUSet.parse("2"),
    ),
    PCIDevice(address="0000:3c:00.0", kind="NIC", vendor="8086", device="154c", numa_node=0),
    PCIDevice(address="0000:3c:00.1", kind="NIC", vendor="8086", device="154c", numa_node=1),
    PCIDevice(address="0000:3d:00.0", kind="NIC", vendor="8086", device="1572", numa_node=0),
    PCIDevice(address="0000:3e:00.0", kind="NIC", vendor="15b3", device="1017"),
    PCIDevice(address="0000:3f:00.0", kind="NIC", vendor="1077", device="1017", numa_node=5),
)


def machine() -> Topology:
    return machines.dual_no_smt(cores_per_numa=2, memory_gib=4)


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str | bytes, counted: str = "") -> DeviceInventory:
        file = tmp_path / "inventory.yaml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_device_inventory(str(file), machine(), CARDS, counted)

    return read


def places(inventory: DeviceInventory, resource: str) -> dict[str, set[int]]:
    return {one.id: set(one.numa_nodes) for one in inventory[resource]}


def test_devices_are_named_or_are_those_of_the_machine(read) -> None:
    found = read(
        """
nvidia.com/gpu: ["0000:3B:00.0"]
intel.com/vf: [{pci: "8086:154C"}]
intel.com/any: [{pci: 8086}]
example.com/card:
  - {id: b, numaNodes: 0-1}
  - {id: a, numaNodes: "1"}
  - {id: 7, numaNodes: 0}
  - {id: c, numaNodes: none}
"""
    )
    assert places(found, "nvidia.com/gpu") == {"0000:3b:00.0": {1}}
    assert [str(one.local_cpus) for one in found["nvidia.com/gpu"]] == ["2"]
    assert places(found, "intel.com/vf") == {"0000:3c:00.0": {0}, "0000:3c:00.1": {1}}
    assert len(found["intel.com/any"]) == 3
    assert places(found, "example.com/card") == {"b": {0, 1}, "a": {1}, "7": {0}, "c": set()}
    # They are given away in the order in which they stand there.
    assert [one.id for one in found["example.com/card"]] == ["b", "a", "7", "c"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{id: a, numaNodes: -1}", "numaNodes is -1, by which a kernel says that it knows none"),
        ("{id: a, numaNodes: 7}", "is 7, expected NUMA nodes that are online: NUMA nodes 0-1"),
        ("{id: a, numaNodes: 0-7}", "expected NUMA nodes that are online"),
        ("{id: a}", "says nothing of where it is"),
        ("{id: a, numaNodes: }", "is not set, expected NUMA nodes such as 0"),
        ("{id: a, numaNodes: true}", "is true, expected NUMA nodes such as 0"),
        ("{id: a, numaNodes: [0]}", "is a list, expected NUMA nodes such as 0"),
        ("{id: a, numaNodes: first}", "is 'first', expected NUMA nodes such as 0"),
        ("{id: a, numaNodes: 1.5}", "is 1.5, expected NUMA nodes such as 0"),
        ("{id: '', numaNodes: 0}", "expected a name without white space"),
        ("{id: true, numaNodes: 0}", "expected a name without white space"),
        ("{id: a b, numaNodes: 0}", "expected a name without white space"),
        ("{id: a, node: 0}", "has id, node; expected a PCI address"),
        ("{}", "has no keys; expected a PCI address"),
        ("7", "is 7, expected a PCI address"),
        ("gpu-0", "is 'gpu-0', expected a PCI address"),
        ("'0000:99:00.0'", "expected a graphics card, network card, disk or accelerator of this"),
        (
            "'0000:3e:00.0'",
            "whose NUMA node this machine does not report, expected {id: 0000:3e:00.0",
        ),
        ("'0000:3f:00.0'", "on NUMA node 5, expected one that is online"),
        ("{pci: 15b3}", "whose NUMA node this machine does not report"),
        ("{pci: cafe}", "expected ids of PCI devices that this machine has"),
        ("{pci: true}", "expected a PCI vendor, or vendor and device"),
        ("{pci: intel}", "expected a PCI vendor, or vendor and device"),
        ("{id: a, numaNodes: 0}, {id: a, numaNodes: 1}", "lists a again, expected each a.b/c once"),
        ("'0000:3b:00.0', {pci: 10de}", "lists 0000:3b:00.0 again"),
    ],
)
def test_a_device_that_cannot_be_is_told_with_its_place(read, entry: str, words: str) -> None:
    with pytest.raises(ManifestError) as raised:
        read(f"a.b/c: [{entry}]")
    assert words in str(raised.value)
    assert "inventory.yaml: [a.b/c][" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty, expected one mapping of resources"),
        ("a.b/c: [x]\n---\nd.e/f: [x]", "has 2 documents, expected one mapping"),
        ("kind: Pod\nspec: {}", "has a kind, as manifests have"),
        ("just text", "is 'just text', expected a mapping"),
        ("[1, 2]", "is a list, expected a mapping"),
        ("gpu: [a]", "has 'gpu', expected names of resources such as nvidia.com/gpu"),
        ("a.b/c: {}", "expected a list of at least one device"),
        ("a.b/c: []", "expected a list of at least one device"),
        ("a.b/c: [", "inventory.yaml: "),
        ("own.io/cpus: [{id: a, numaNodes: 0}]", "which counts exclusive CPUs"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"#" * (1 << 20) + b"#", "is larger than 1 MiB"),
    ],
)
def test_a_file_that_is_no_inventory_is_rejected(read, text: str | bytes, words: str) -> None:
    with pytest.raises(ManifestError) as raised:
        read(text, "own.io/cpus")
    assert words in str(raised.value)


def test_a_file_that_is_not_there_and_one_with_too_many_devices(read, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="cannot be read: No such file"):
        read_device_inventory(str(tmp_path / "none"), machine(), ())
    many = ", ".join(f"{{id: {n}, numaNodes: 0}}" for n in range(4097))
    with pytest.raises(ManifestError, match="has 4097 devices, expected at most 4096"):
        read(f"a.b/c: [{many}]")


def test_every_mistake_is_told_at_once(read) -> None:
    with pytest.raises(ManifestError) as raised:
        read("gpu: [a]\na.b/c: [{id: a}, {id: b, numaNodes: -1}]\nd.e/f: []")
    assert len(raised.value.problems) == 4
