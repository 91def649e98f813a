"""An inventory: which devices a made-up kubelet can give, of which resources, and where they are.

One YAML document of resources, each with its devices::

    nvidia.com/gpu:
      - 0000:3b:00.0                    # a PCI device of the machine, which says where it is
    intel.com/vf:
      - pci: "8086:154c"                # all PCI devices of a vendor, or of vendor and device
    example.com/card:
      - {id: card-a, numaNodes: 0-1}    # anything else, and the NUMA nodes it belongs to
      - {id: card-b, numaNodes: none}

It says what somebody believes of a machine, so whatever it could not mean is a mistake: a guess
would place pods beside devices that are elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from nri_numa import safe_yaml
from nri_numa.engine.values.workload import Device
from nri_numa.machine.cpuset import ListFormatError, NUMASet
from nri_numa.machine.model import Topology, numa_text
from nri_numa.machine.pci import PCI_ADDRESS, PCIDevice
from nri_numa.simulate.manifests.yaml_documents import ManifestError, Spot, parse_all

Inventory = Mapping[str, tuple[Device, ...]]
"""Devices by resource, in the order in which they are given away."""

MAX_BYTES: Final = 1 << 20
MOST_DEVICES: Final = 4096
"""Of all resources; no machine has a tenth of it."""
NONE: Final = "none"

_RESOURCE: Final = re.compile(
    # An extended resource's name: a domain and a name.
    r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
_PCI_IDS: Final = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4})?", re.ASCII)
_ID: Final = re.compile(r"[!-~]{1,256}", re.ASCII)
_FORMS: Final = "a PCI address, {id: NAME, numaNodes: 0} or {pci: VENDOR:DEVICE}"


def read_inventory(
    path: str, topology: Topology, pci: Sequence[PCIDevice], counted: str = ""
) -> Inventory:
    """Read an inventory.

    Args:
        path: of the file.
        topology: the machine on which the devices are.
        pci: the machine's PCI devices, by address; none of a machine made up.
        counted: the extended resource that counts exclusive CPUs, which is no device.

    Raises:
        ManifestError: with every mistake.
    """
    problems: list[str] = []
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _mistake(path, f"cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(data) > MAX_BYTES:
        raise _mistake(path, f"is larger than {MAX_BYTES >> 20} MiB, expected an inventory")
    try:
        documents = [one for one in parse_all(data.decode("utf-8-sig")) if one is not None]
    except UnicodeDecodeError as error:
        raise _mistake(path, f"is not UTF-8: byte {error.start}") from error
    except yaml.YAMLError as error:
        raise _mistake(path, safe_yaml.problem_of(error)) from error
    if len(documents) != 1:
        found = f"has {len(documents)} documents" if documents else "is empty"
        raise _mistake(path, f"{found}, expected one mapping of resources to lists of devices")
    top = Spot(path, "", documents[0], problems)
    if isinstance(top.value, Mapping) and "kind" in top.value:
        raise _mistake(
            path, "has a kind, as manifests have, expected a mapping of resources to devices"
        )
    reader = _Reader(topology, pci)
    inventory = {
        name: reader.devices(name, spot)
        for name, spot in top.mapping(required=True).items()
        if _is_resource(top, name, counted)
    }
    if reader.count > MOST_DEVICES:
        top.complain(f"has {reader.count} devices, expected at most {MOST_DEVICES}")
    if problems:
        raise ManifestError(tuple(problems))
    return inventory


def _mistake(path: str, what: str) -> ManifestError:
    return ManifestError((f"{path}: {what}",))


def _is_resource(top: Spot, name: str, counted: str) -> bool:
    if name == counted and name:
        top.complain(f"has {name!r}, which counts exclusive CPUs, expected resources of devices")
    elif not _RESOURCE.fullmatch(name):
        top.complain(f"has {name[:80]!r}, expected names of resources such as nvidia.com/gpu")
    else:
        return True
    return False


class _Reader:
    """Turns entries into devices of one machine.

    Attributes:
        count: how many there were so far.
    """

    def __init__(self, topology: Topology, pci: Sequence[PCIDevice]) -> None:
        self._there = NUMASet(topology.numa_nodes)
        self._pci = {one.address: one for one in pci}
        self.count = 0

    def devices(self, resource: str, spot: Spot) -> tuple[Device, ...]:
        """The devices of one resource; without those that were complained about."""
        found: dict[str, Device] = {}
        for entry in spot.items("one device", required=True):
            for device in self._entry(entry):
                if device.id in found:
                    entry.complain(f"lists {device.id} again, expected each {resource} once")
                found[device.id] = device
                self.count += 1
        return tuple(found.values())

    def _entry(self, spot: Spot) -> Iterator[Device]:
        if isinstance(spot.value, str):
            address = spot.value.lower()
            if not PCI_ADDRESS.fullmatch(address):
                spot.expected(_FORMS)
            elif address not in self._pci:
                spot.expected("a graphics card, network card, disk or accelerator of this machine")
            else:
                yield from self._of_pci(spot, self._pci[address])
            return
        if not isinstance(spot.value, Mapping):
            spot.expected(_FORMS)
            return
        keys = set(spot.value)
        if keys == {"pci"}:
            yield from self._chosen(spot["pci"])
        elif keys == {"id", "numaNodes"}:
            yield from self._named(spot)
        elif keys == {"id"}:
            spot.complain("says nothing of where it is, expected numaNodes: 0 or the like, or none")
        else:
            strange = ", ".join(str(key)[:40] for key in spot.value) or "no keys"
            spot.complain(f"has {strange}; expected {_FORMS}")

    def _chosen(self, spot: Spot) -> Iterator[Device]:
        number = spot.value
        if isinstance(number, int) and not isinstance(number, bool):
            number = f"{number:04d}"  # YAML takes 8086 for a number
        if not isinstance(number, str) or not _PCI_IDS.fullmatch(number.lower()):
            spot.expected("a PCI vendor, or vendor and device, such as 10de or 8086:154c")
            return
        vendor, _, device = number.lower().partition(":")
        chosen = [
            one for one in self._pci.values() if one.vendor == vendor and device in ("", one.device)
        ]
        if not chosen:
            spot.expected("ids of PCI devices that this machine has")
        for one in chosen:
            yield from self._of_pci(spot, one)

    def _of_pci(self, spot: Spot, one: PCIDevice) -> Iterator[Device]:
        if one.numa_node is None:
            spot.complain(
                f"is {one.address}, of which this machine tells no NUMA node, expected "
                f"{{id: {one.address}, numaNodes: 0}} or the like"
            )
        elif one.numa_node not in self._there:
            spot.complain(
                f"is {one.address} on NUMA node {one.numa_node}, expected one that is online: "
                f"{numa_text(self._there)}"
            )
        else:
            yield Device(id=one.address, numa_nodes=frozenset((one.numa_node,)))

    def _named(self, spot: Spot) -> Iterator[Device]:
        id = spot["id"].value
        if isinstance(id, int) and not isinstance(id, bool):
            id = str(id)  # ids of many plugins are numbers
        if not isinstance(id, str) or not _ID.fullmatch(id):
            spot["id"].expected("a name without white space, at most 256 characters")
            return
        at = spot["numaNodes"]
        text = str(at.value) if at.value is not None else ""
        if text == NONE:
            yield Device(id=id)
            return
        if text == "-1":
            at.complain("is -1, by which a kernel says that it knows none, expected the word none")
            return
        try:
            if isinstance(at.value, bool) or not text:
                raise ListFormatError("")
            nodes = NUMASet.parse(text)
        except ListFormatError:
            at.expected("NUMA nodes such as 0 or 0-1, or none")
            return
        if not nodes <= self._there:
            at.expected(f"NUMA nodes that are online: {numa_text(self._there)}")
            return
        yield Device(id=id, numa_nodes=frozenset(nodes))
