"""Which devices a made-up kubelet can give (an inventory), and which pods have them.

An inventory is one YAML document of resources, each with its devices::

    nvidia.com/gpu:
      - 0000:3b:00.0                    # a PCI device of the machine, which says where it is
    intel.com/vf:
      - pci: "8086:154c"                # all PCI devices of a vendor, or of vendor and device
    example.com/card:
      - {id: card-a, numaNodes: 0-1}    # anything else, and the NUMA nodes it belongs to
      - {id: card-b, numaNodes: none}

It says what its author believes of a machine, so whatever it could not mean is a mistake: a guess
would place pods beside devices that are elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import yaml

from nri_numa import safe_yaml
from nri_numa.cluster.manifests import ManifestError, ManifestValue
from nri_numa.cluster.pods import ContainerRole, PodManifest
from nri_numa.devices.lookup import DeviceHints, build_hints
from nri_numa.devices.sysfs import LocatedDevice
from nri_numa.machine.pci import PCI_ADDRESS
from nri_numa.model.cpuset import ListFormatError, NUMASet
from nri_numa.model.machine import PCIDevice, Topology, numa_text
from nri_numa.model.workload import Device, KnownContainerDevices
from nri_numa.simulate.manifests import load_yaml_documents, read_input_text

DeviceInventory = Mapping[str, tuple[Device, ...]]
"""Devices by resource, in the order in which they are given away."""

MAX_INVENTORY_BYTES: Final = 1 << 20
MAX_INVENTORY_DEVICES: Final = 4096
"""Of all resources; no machine has a tenth of it."""
NO_NUMA_NODE_WORD: Final = "none"

_RESOURCE_NAME_PATTERN: Final = re.compile(
    # An extended resource's name: a domain and a name.
    r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
    re.ASCII,
)
_PCI_VENDOR_DEVICE_PATTERN: Final = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4})?", re.ASCII)
_DEVICE_ID_PATTERN: Final = re.compile(r"[!-~]{1,256}", re.ASCII)
_DEVICE_FORMS_TEXT: Final = "a PCI address, {id: NAME, numaNodes: 0} or {pci: VENDOR:DEVICE}"


def read_inventory(
    path: str, topology: Topology, pci: Sequence[PCIDevice], counted: str = ""
) -> DeviceInventory:
    """Read an inventory of the devices on a machine; none of one made up are PCI devices.

    ``counted`` is the extended resource that counts exclusive CPUs, which is no device.

    Raises:
        ManifestError: with every mistake.
    """
    problems: list[str] = []
    top = ManifestValue(path, "", _read_inventory_document(path), problems)
    numa_nodes, by_address = NUMASet(topology.numa_nodes), {one.address: one for one in pci}
    inventory: dict[str, tuple[Device, ...]] = {}
    for name, node in top.as_mapping(required=True).items():
        if name == counted:
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
    """The only document of the file."""
    text = ""
    try:
        text = read_input_text(path, MAX_INVENTORY_BYTES)
        documents = [one for one in load_yaml_documents(text) if one is not None]
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


def _inventory_file_error(path: str, what: str) -> ManifestError:
    return ManifestError((f"{path}: {what}",))


def _parse_inventory_entry(
    place: ManifestValue, there: NUMASet, pci: Mapping[str, PCIDevice]
) -> Iterator[Device]:
    """The devices of one entry; none after a complaint."""
    value = place.value
    if isinstance(value, str):
        address = value.lower()
        if not PCI_ADDRESS.fullmatch(address):
            place.add_expectation_problem(_DEVICE_FORMS_TEXT)
        elif address not in pci:
            place.add_expectation_problem(
                "a graphics card, network card, disk or accelerator of this machine"
            )
        else:
            yield from _device_from_pci(place, pci[address], there)
    elif not isinstance(value, Mapping):
        place.add_expectation_problem(_DEVICE_FORMS_TEXT)
    elif set(value) == {"pci"}:
        for one in _devices_with_pci_ids(place["pci"], value["pci"], pci):
            yield from _device_from_pci(place["pci"], one, there)
    elif set(value) == {"id", "numaNodes"}:
        id = _scalar_text(value["id"])  # ids of many plugins are numbers
        if not _DEVICE_ID_PATTERN.fullmatch(id):
            place["id"].add_expectation_problem(
                "a name without white space, at most 256 characters"
            )
        elif (nodes := _parse_numa_nodes(place["numaNodes"], there)) is not None:
            yield Device(id=id, numa_nodes=frozenset(nodes))
    elif set(value) == {"id"}:
        place.add_problem("says nothing of where it is, expected numaNodes: 0 or the like, or none")
    else:
        strange = ", ".join(str(key)[:40] for key in value) or "no keys"
        place.add_problem(f"has {strange}; expected {_DEVICE_FORMS_TEXT}")


def _devices_with_pci_ids(
    place: ManifestValue, value: object, pci: Mapping[str, PCIDevice]
) -> list[PCIDevice]:
    """Devices of a vendor, or of a vendor and device."""
    number = _scalar_text(value, "04d").lower()  # YAML takes 8086 for a number
    vendor, _, device = number.partition(":")
    if not _PCI_VENDOR_DEVICE_PATTERN.fullmatch(number):
        place.add_expectation_problem(
            "a PCI vendor, or vendor and device, such as 10de or 8086:154c"
        )
        return []
    devices = [o for o in pci.values() if o.vendor == vendor and device in ("", o.device)]
    if not devices:
        place.add_expectation_problem("ids of PCI devices that this machine has")
    return devices


def _scalar_text(value: object, form: str = "") -> str:
    """A word, or a whole number written as one; empty for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return format(value, form)
    return value if isinstance(value, str) else ""


def _device_from_pci(place: ManifestValue, one: PCIDevice, there: NUMASet) -> Iterator[Device]:
    if one.numa_node is None:
        place.add_problem(
            f"is {one.address}, whose NUMA node this machine does not report, expected "
            f"{{id: {one.address}, numaNodes: 0}} or the like"
        )
    elif one.numa_node not in there:
        place.add_problem(
            f"is {one.address} on NUMA node {one.numa_node}, expected one that is online: "
            f"{numa_text(there)}"
        )
    else:
        yield Device(id=one.address, numa_nodes=frozenset((one.numa_node,)))


def _parse_numa_nodes(at: ManifestValue, there: NUMASet) -> NUMASet | None:
    text = _scalar_text(at.value)
    if text == NO_NUMA_NODE_WORD:
        return NUMASet()
    try:
        nodes = NUMASet.parse(text)
    except ListFormatError:
        nodes = None
    if text == "-1":
        at.add_problem("is -1, by which a kernel says that it knows none, expected the word none")
    elif not nodes:
        at.add_expectation_problem("NUMA nodes such as 0 or 0-1, or none")
    elif not nodes <= there:
        at.add_expectation_problem(f"NUMA nodes that are online: {numa_text(there)}")
    else:
        return nodes
    return None


# --- Who has which ------------------------------------------------------------------------------

DEVICE_REJECTION_REASON: Final = "UnexpectedAdmissionError"
"""By which a kubelet says that it has too few devices (``pkg/kubelet/lifecycle/predicate.go``)."""

DevicesByResource = Mapping[str, tuple[Device, ...]]
"""Devices of one container, by resource."""


class DeviceShortageFinding(NamedTuple):
    """A container asks for more devices than are free."""

    container: str
    message: str


class KubeletDevices:
    """Which devices a made-up kubelet gave to which pods, and what that means for a place.

    A kubelet gives all containers of a pod their devices when it admits the pod, before nri-numa
    sees the first of them. Which ones it takes is left to its topology manager and the device
    plugin; here it is the first that are free, in the order of the inventory, so that for another
    choice one writes another order. ``places`` are NUMA nodes where containers can be placed.
    """

    def __init__(self, inventory: DeviceInventory, places: NUMASet) -> None:
        self._inventory = inventory
        self._places = places
        self._by_pod: dict[str, dict[str, DevicesByResource]] = {}

    def allocate_pod_or_find_shortage(self, pod: PodManifest) -> DeviceShortageFinding | None:
        """Give a pod's containers their devices, or none of them any.

        What an init container had is taken first for those after it, as it has ended by then.
        """
        free = self._free_devices_by_resource()
        ended: dict[str, list[Device]] = {resource: [] for resource in free}
        given: dict[str, DevicesByResource] = {}
        for container in pod.containers:
            own: dict[str, tuple[Device, ...]] = {}
            for resource, count in sorted(container.devices.items()):
                pool = [*ended[resource], *free[resource]]
                if len(pool) < count:
                    return DeviceShortageFinding(
                        container.name,
                        f"container {container.name}: {count} {resource} needed, {len(pool)} of "
                        f"the inventory's {len(self._inventory[resource])} are free",
                    )
                own[resource] = first = tuple(pool[:count])
                free[resource] = [one for one in free[resource] if one not in first]
                left = [one for one in ended[resource] if one not in first]
                ended[resource] = [*first, *left] if container.role is ContainerRole.INIT else left
            if own:
                given[container.name] = own
        if given:
            self._by_pod[pod.uid] = given
        return None

    def release_pod_devices(self, pod: PodManifest) -> None:
        """The pod was removed."""
        self._by_pod.pop(pod.uid, None)

    def devices_of(self, pod: PodManifest, container: str) -> DevicesByResource:
        """What a container was given."""
        return self._by_pod.get(pod.uid, {}).get(container, {})

    def known_devices_of_container(self, pod: PodManifest, container: str) -> KnownContainerDevices:
        """What the agent would know of a container's devices."""
        own = self._hints_of_given_devices([self.devices_of(pod, container)])
        together = self._hints_of_given_devices(self._by_pod.get(pod.uid, {}).values())
        return KnownContainerDevices(own.requests, together.requests, own.notes)

    def _hints_of_given_devices(self, of: Iterable[DevicesByResource]) -> DeviceHints:
        found = (
            LocatedDevice(resource, one.id, one.numa_nodes)
            for given in of
            for resource, had in given.items()
            for one in had
        )
        return build_hints(found, self._places)

    def total_free_by_numa_node(self) -> dict[int, int]:
        """By NUMA node, how many devices of all kinds are free."""
        free = [one for devices in self._free_devices_by_resource().values() for one in devices]
        return Counter(i for one in free for i in one.numa_nodes)

    def _free_devices_by_resource(self) -> dict[str, list[Device]]:
        used = {
            (resource, one.id)
            for pod in self._by_pod.values()
            for given in pod.values()
            for resource, devices in given.items()
            for one in devices
        }
        return {
            resource: [one for one in devices if (resource, one.id) not in used]
            for resource, devices in self._inventory.items()
        }
