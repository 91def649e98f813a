"""Devices that a simulated kubelet can allocate (an inventory), and their allocation to pods.

An inventory is one YAML document of resources, each with its devices::

    nvidia.com/gpu:
      - 0000:3b:00.0                    # a PCI device of the machine, with its NUMA node
    intel.com/vf:
      - pci: "8086:154c"                # all PCI devices of a vendor, or of vendor and device
    example.com/card:
      - {id: card-a, numaNodes: 0-1}    # anything else, and the NUMA nodes it belongs to
      - {id: card-b, numaNodes: none}

Anything ambiguous in an inventory is an error: a guess would place pods beside devices that are on
other NUMA nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import yaml
from msgspec.structs import replace

from nri_numa import safe_yaml
from nri_numa.cluster.manifests import ManifestError, ManifestValue
from nri_numa.cluster.pods import ContainerRole, PodManifest
from nri_numa.devices.lookup import DeviceHints, build_hints
from nri_numa.devices.sysfs import LocatedDevice
from nri_numa.machine.pci import PCI_ADDRESS
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import PCIDevice, Topology, numa_text
from nri_numa.model.workload import Container, Device
from nri_numa.simulate.manifests import load_yaml_documents, read_input_text

DeviceInventory = Mapping[str, tuple[Device, ...]]
"""Devices by resource, in the order in which they are allocated."""

MAX_INVENTORY_BYTES: Final = 1 << 20
MAX_INVENTORY_DEVICES: Final = 4096
"""Devices of all resources; no machine has a tenth of it."""
NO_NUMA_NODE_WORD: Final = "none"

_RESOURCE_NAME_PATTERN: Final = re.compile(
    # An extended resource's name: a domain and a name.
    r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
_PCI_VENDOR_DEVICE_PATTERN: Final = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4})?", re.ASCII)
_DEVICE_ID_PATTERN: Final = re.compile(r"[!-~]{1,256}", re.ASCII)
_DEVICE_FORMS_TEXT: Final = "a PCI address, {id: NAME, numaNodes: 0} or {pci: VENDOR:DEVICE}"


def read_device_inventory(
    path: str, topology: Topology, pci: Sequence[PCIDevice], slots_resource: str = ""
) -> DeviceInventory:
    """Read an inventory of the devices on a machine; a synthetic machine has no PCI devices.

    ``slots_resource`` is the extended resource that counts exclusive CPUs, which are no devices.

    Raises:
        ManifestError: lists every problem.
    """
    problems: list[str] = []
    top = ManifestValue(path, "", _read_inventory_document(path), problems)
    numa_nodes, by_address = NUMASet(topology.numa_nodes), {d.address: d for d in pci}
    inventory: dict[str, tuple[Device, ...]] = {}
    for name, node in top.as_mapping(required=True).items():
        if name == slots_resource:
            top.add_problem(
                f"has {name!r}, which counts exclusive CPUs, expected resources of devices"
            )
        elif not _RESOURCE_NAME_PATTERN.fullmatch(name):
            top.add_problem(
                f"has {name[:80]!r}, expected names of resources such as nvidia.com/gpu"
            )
        else:
            devices: dict[str, Device] = {}
            for entry in node.as_list("one device", required=True):
                for device in _parse_inventory_entry(entry, numa_nodes, by_address):
                    if device.id in devices:
                        entry.add_problem(f"lists {device.id} again, expected each {name} once")
                    devices[device.id] = device
            inventory[name] = tuple(devices.values())
    count = sum(map(len, inventory.values()))
    if count > MAX_INVENTORY_DEVICES:
        top.add_problem(f"has {count} devices, expected at most {MAX_INVENTORY_DEVICES}")
    if problems:
        raise ManifestError(tuple(problems))
    return inventory


def _read_inventory_document(path: str) -> object:
    """Read the only document of a file."""
    text = ""
    try:
        text = read_input_text(path, MAX_INVENTORY_BYTES)
        documents = [document for document in load_yaml_documents(text) if document is not None]
    except OSError as error:
        raise _inventory_file_error(path, f"cannot be read: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise _inventory_file_error(path, safe_yaml.yaml_problem_text(error, text)) from error
    if len(documents) != 1:
        count = f"has {len(documents)} documents" if documents else "is empty"
        raise _inventory_file_error(
            path, f"{count}, expected one mapping of resources to lists of devices"
        )
    if isinstance(documents[0], Mapping) and "kind" in documents[0]:
        raise _inventory_file_error(
            path, "has a kind, as manifests have, expected a mapping of resources to devices"
        )
    return documents[0]


def _inventory_file_error(path: str, problem: str) -> ManifestError:
    return ManifestError((f"{path}: {problem}",))


def _parse_inventory_entry(
    entry: ManifestValue, online: NUMASet, pci: Mapping[str, PCIDevice]
) -> Iterator[Device]:
    """Yield the devices of one entry; none if it has a problem."""
    value = entry.value
    if isinstance(value, str):
        address = value.lower()
        if not PCI_ADDRESS.fullmatch(address):
            entry.add_expectation_problem(_DEVICE_FORMS_TEXT)
        elif address not in pci:
            entry.add_expectation_problem(
                "a graphics card, network card, disk or accelerator of this machine"
            )
        else:
            yield from _device_from_pci(entry, pci[address], online)
    elif not isinstance(value, Mapping):
        entry.add_expectation_problem(_DEVICE_FORMS_TEXT)
    elif set(value) == {"pci"}:
        for device in _devices_with_pci_ids(entry["pci"], value["pci"], pci):
            yield from _device_from_pci(entry["pci"], device, online)
    elif set(value) == {"id", "numaNodes"}:
        id = _scalar_text(value["id"])  # ids of many plugins are numbers
        if not _DEVICE_ID_PATTERN.fullmatch(id):
            entry["id"].add_expectation_problem(
                "a name without white space, at most 256 characters"
            )
        elif (nodes := _parse_numa_nodes(entry["numaNodes"], online)) is not None:
            yield Device(id=id, numa_nodes=frozenset(nodes))
    elif set(value) == {"id"}:
        entry.add_problem("says nothing of where it is, expected numaNodes: 0 or the like, or none")
    else:
        strange = ", ".join(str(key)[:40] for key in value) or "no keys"
        entry.add_problem(f"has {strange}; expected {_DEVICE_FORMS_TEXT}")


def _devices_with_pci_ids(
    entry: ManifestValue, value: object, pci: Mapping[str, PCIDevice]
) -> list[PCIDevice]:
    """Return the PCI devices of a vendor, or of a vendor and device."""
    number = _scalar_text(value, "04d").lower()  # YAML reads 8086 as a number
    vendor, _, device = number.partition(":")
    if not _PCI_VENDOR_DEVICE_PATTERN.fullmatch(number):
        entry.add_expectation_problem(
            "a PCI vendor, or vendor and device, such as 10de or 8086:154c"
        )
        return []
    devices = [o for o in pci.values() if o.vendor == vendor and device in ("", o.device)]
    if not devices:
        entry.add_expectation_problem("ids of PCI devices that this machine has")
    return devices


def _scalar_text(value: object, form: str = "") -> str:
    """Return a text, or a whole number as text; empty for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return format(value, form)
    return value if isinstance(value, str) else ""


def _device_from_pci(entry: ManifestValue, device: PCIDevice, online: NUMASet) -> Iterator[Device]:
    if device.numa_node is None:
        entry.add_problem(
            f"is {device.address}, whose NUMA node this machine does not report, expected "
            f"{{id: {device.address}, numaNodes: 0}} or the like"
        )
    elif device.numa_node not in online:
        entry.add_problem(
            f"is {device.address} on NUMA node {device.numa_node}, expected one that is online: "
            f"{numa_text(online)}"
        )
    else:
        nodes = frozenset((device.numa_node,))
        yield Device(id=device.address, numa_nodes=nodes, local_cpus=device.local_cpus)


def _parse_numa_nodes(item: ManifestValue, online: NUMASet) -> NUMASet | None:
    text = _scalar_text(item.value)
    if text == NO_NUMA_NODE_WORD:
        return NUMASet()
    nodes = NUMASet.parse_or_none(text)
    if text == "-1":
        item.add_problem("is -1, by which a kernel says that it knows none, expected the word none")
    elif not nodes:
        item.add_expectation_problem("NUMA nodes such as 0 or 0-1, or none")
    elif not nodes <= online:
        item.add_expectation_problem(f"NUMA nodes that are online: {numa_text(online)}")
    else:
        return nodes
    return None


# --- Allocation to pods ---------------------------------------------------------------------------

DEVICE_REJECTION_REASON: Final = "UnexpectedAdmissionError"
"""The kubelet's reason for too few devices (``pkg/kubelet/lifecycle/predicate.go``)."""

DevicesByResource = Mapping[str, tuple[Device, ...]]
"""Devices of one container, by resource."""


class DeviceShortageFinding(NamedTuple):
    """A container that requests more devices than are free."""

    container: str
    message: str


class KubeletDevices:
    """Devices that a simulated kubelet has allocated to pods, and their NUMA hints.

    A kubelet allocates the devices of all containers when it admits the pod, before nri-numa sees
    the first one. Its Topology Manager and the device plugin select them; here the first free ones
    of the inventory are taken. ``numa_nodes`` are those where containers can be placed.
    """

    def __init__(self, inventory: DeviceInventory, numa_nodes: NUMASet) -> None:
        self._inventory = inventory
        self._places = numa_nodes
        self._by_pod: dict[str, dict[str, DevicesByResource]] = {}

    def allocate_pod_or_find_shortage(self, pod: PodManifest) -> DeviceShortageFinding | None:
        """Allocate devices to all containers of a pod, or to none and return the shortage.

        Devices of an init container are reused first: it ends before later containers start.
        """
        free_devices = self._free_devices_by_resource()
        spares: dict[str, list[Device]] = {resource: [] for resource in free_devices}
        by_container: dict[str, DevicesByResource] = {}
        for container in pod.containers:
            devices: dict[str, tuple[Device, ...]] = {}
            for resource, count in sorted(container.devices.items()):
                pool = [*spares[resource], *free_devices[resource]]
                if len(pool) < count:
                    return DeviceShortageFinding(
                        container.name,
                        f"container {container.name}: {count} {resource} needed, {len(pool)} of "
                        f"the inventory's {len(self._inventory[resource])} are free",
                    )
                devices[resource] = batch = tuple(pool[:count])
                free_devices[resource] = [d for d in free_devices[resource] if d not in batch]
                tail = [d for d in spares[resource] if d not in batch]
                spares[resource] = [*batch, *tail] if container.role is ContainerRole.INIT else tail
            if devices:
                by_container[container.name] = devices
        if by_container:
            self._by_pod[pod.uid] = by_container
        return None

    def release_pod_devices(self, pod: PodManifest) -> None:
        """Release the devices of a removed pod."""
        self._by_pod.pop(pod.uid, None)

    def devices_of(self, pod: PodManifest, container: str) -> DevicesByResource:
        """Devices of one container."""
        return self._by_pod.get(pod.uid, {}).get(container, {})

    def complete(self, pod: PodManifest, container: Container) -> Container:
        """Return the container with the devices that the agent would know."""
        hints = self._hints_of_given_devices([self.devices_of(pod, container.name)])
        requests = self._hints_of_given_devices(self._by_pod.get(pod.uid, {}).values()).requests
        return replace(
            container, devices=hints.requests, pod_devices=requests, device_notes=hints.notes
        )

    def _hints_of_given_devices(self, allocations: Iterable[DevicesByResource]) -> DeviceHints:
        located_devices = (
            LocatedDevice(resource, device.id, device.numa_nodes, device.local_cpus)
            for by_resource in allocations
            for resource, devices in by_resource.items()
            for device in devices
        )
        return build_hints(located_devices, self._places)

    def total_free_by_numa_node(self) -> dict[int, int]:
        """Count free devices of all resources by NUMA node."""
        free_devices = [d for devices in self._free_devices_by_resource().values() for d in devices]
        return Counter(i for d in free_devices for i in d.numa_nodes)

    def _free_devices_by_resource(self) -> dict[str, list[Device]]:
        used = {
            (resource, device.id)
            for pod in self._by_pod.values()
            for by_resource in pod.values()
            for resource, devices in by_resource.items()
            for device in devices
        }
        return {
            resource: [device for device in devices if (resource, device.id) not in used]
            for resource, devices in self._inventory.items()
        }
