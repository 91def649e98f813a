"""Lookup of the devices that a message or the kubelet names, in sysfs, the driver and CDI files.

Threads read the driver's GPUs and the CDI files, and replace them as a whole. A lookup reads only
links and small files of sysfs, each once (`nri_numa.devices.sysfs`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nri_numa.devices.cdi import CDIDevice, CDIRegistry
from nri_numa.devices.sysfs import LocatedDevice, SysfsDevices
from nri_numa.machine.cgroups import read_text_or_empty
from nri_numa.machine.pci import GPU, PCI_ADDRESS
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import numa_text
from nri_numa.model.workload import (
    MAX_CONTAINER_DEVICES,
    NVIDIA_VARIABLE,
    PCI_VARIABLE_PREFIX,
    Device,
    DeviceFile,
    DeviceMentions,
    DeviceRequest,
    DeviceStock,
)
from nri_numa.text import truncate_text

if TYPE_CHECKING:
    from nri_numa.config.sections import Devices as Sources
    from nri_numa.kubelet.pod_resources import NodeDevice


@dataclass(slots=True)
class MissedHints:
    """Devices that give no hint.

    Attributes:
        gpu: True if a GPU is unknown to the driver, whose GPUs are then read again.
        cdi: True if a name is in no CDI file; the files are then read again.
        notes: sentences for explanations.
    """

    gpu: bool = False
    cdi: bool = False
    notes: list[str] = field(default_factory=list)


class DeviceFinder:
    """Finds devices by name; safe to use from several threads.

    Attributes:
        sysfs: devices by number, PCI address or bus.
        gpus: the driver's GPUs, replaced as a whole.
        cdi: the CDI files.
    """

    def __init__(self, sources: Sources, *, root: str, own_resource: str) -> None:
        """Read nothing yet; see `nri_numa.devices.watch.DeviceWatch` for the arguments."""
        self._sources = sources
        self._own_resource = own_resource
        self.sysfs = SysfsDevices(root)
        self.gpus = GPUs()
        self.cdi = CDIRegistry(sources.cdi_spec_dirs)

    def find_mentioned(
        self, mentions: DeviceMentions, missed: MissedHints
    ) -> Iterator[LocatedDevice]:
        """Find the devices that a message mentions; ``missed`` collects those without a hint."""
        sources = self._sources
        if mentions.unread:
            missed.notes.append(f"{mentions.unread} more devices than are read: no hint")
        for node in mentions.nodes:
            yield from self._find_by_device_file(node)
        for variable, value in sorted(mentions.variables.items()):
            if sources.sriov_variables and variable.startswith(PCI_VARIABLE_PREFIX):
                for part in value.split(",")[:MAX_CONTAINER_DEVICES]:
                    yield from self._find_by_pci_variable(variable, part, missed)
            elif sources.nvidia and variable == NVIDIA_VARIABLE:
                yield from self._gpus_of_nvidia_variable(value, missed)
        if sources.cdi:
            for name in mentions.cdi:
                yield from self._find_by_cdi_name(name, missed)

    def _find_by_device_file(self, node: DeviceFile) -> Iterator[LocatedDevice]:
        if node.major == NVIDIA_MAJOR and node.type in ("c", "u"):
            address = self.gpus.address_of_minor(node.minor) if self._sources.nvidia else None
            if address is not None:
                yield self._gpu_at(address)
        elif self._sources.device_nodes:
            yield from self.sysfs.by_number(node.type, node.major, node.minor)

    def _find_by_pci_variable(
        self, variable: str, text: str, missed: MissedHints
    ) -> Iterator[LocatedDevice]:
        """Find the device of a variable of the SR-IOV network device plugin.

        Any pod may set such a variable by hand; it affects only where its own container is placed.
        """
        address = text.strip().lower()
        if PCI_ADDRESS.fullmatch(address):
            devices = self.sysfs.by_pci(address)
            yield from devices
            if not devices:
                missed.notes.append(
                    f"variable {variable} names {address}, which does not exist: no hint"
                )
        elif address:
            name = truncate_text(variable, _MAX_NOTE_VALUE_CHARS)
            value = truncate_text(text, _MAX_NOTE_VALUE_CHARS)
            missed.notes.append(
                f"variable {name} is {value!r}, which is not a PCI address: no hint"
            )

    def _gpus_of_nvidia_variable(self, value: str, missed: MissedHints) -> Iterator[LocatedDevice]:
        """Find the GPUs of the variable of NVIDIA's device plugin: UUIDs or indices."""
        keyword = value.strip().lower()
        if keyword == ALL_DEVICES:
            missed.notes.append(
                f"variable {NVIDIA_VARIABLE} is 'all', which images set themselves: no hint"
            )
        if keyword == ALL_DEVICES or keyword in NO_DEVICE_VALUES:
            return
        for name in [part.strip() for part in value.split(",") if part.strip()][
            :MAX_CONTAINER_DEVICES
        ]:
            gpu = self.gpus.address_of_name(name)
            if gpu is None:
                missed.gpu = True
                missed.notes.append(f"GPU {name[:60]!r} is not known to the driver: no hint")
            else:
                yield self._gpu_at(gpu)

    def _find_by_cdi_name(self, name: str, missed: MissedHints) -> Iterator[LocatedDevice]:
        device = self.cdi.devices.get(name)
        if device is None:
            missed.cdi = True
            missed.notes.append(
                f"CDI device {name[:80]!r} is in no CDI file that was read: no hint"
            )
            device = CDIDevice()
        for node in device.nodes:
            yield from self._find_by_device_file(node)
        for interface in device.interfaces:
            yield from self.sysfs.by_interface(interface)

    def _gpu_at(self, address: str) -> LocatedDevice:
        """Return the NVIDIA GPU at a PCI address, without NUMA nodes if sysfs lacks it."""
        devices = self.sysfs.by_pci(address)
        return devices[0]._replace(kind=GPU) if devices else LocatedDevice(GPU, address)

    def match_kubelet_devices(self, devices: Iterable[LocatedDevice]) -> Iterator[LocatedDevice]:
        """Replace devices of the kubelet by those of sysfs if their ids identify them."""
        for device in devices:
            if device.kind == self._own_resource:
                continue
            is_gpu = device.id.lower().startswith("gpu-")
            address = self.gpus.address_of_name(device.id) if is_gpu else None
            gpus = () if address is None else (self._gpu_at(address),)
            for match in gpus or self.sysfs.by_pci(device.id) or (device,):
                # sysfs often has no NUMA node in a virtual machine; the device plugin may have one.
                yield match if match.numa_nodes else match._replace(numa_nodes=device.numa_nodes)


# --- devices that the kubelet could give ----------------------------------------------------------

MAX_STOCK_DEVICES: Final = 512
"""Devices of a container's resources that are looked up while it waits, about a millisecond."""


def with_stocks(
    requests: Iterable[DeviceRequest],
    held_devices: Iterable[LocatedDevice],
    node_devices: Iterable[NodeDevice],
    finder: DeviceFinder,
    alignable_nodes: NUMASet,
) -> tuple[DeviceRequest, ...]:
    """Return requests with the stock of each that the kubelet satisfied from one resource.

    ``held_devices`` are those that the kubelet gave, which are free for their own container.
    """
    held_keys = {(device.kind, device.id) for device in held_devices}
    held_resources = {resource for resource, _ in held_keys}
    stocks: dict[str, _StockEntries] = {}
    candidates = (device for device in node_devices if device.resource in held_resources)
    for device in islice(candidates, MAX_STOCK_DEVICES):
        is_of_container = (device.resource, device.id) in held_keys
        located = LocatedDevice(device.resource, device.id, device.numa_nodes)
        for match in finder.match_kubelet_devices((located,)):
            if nodes := match.numa_nodes.intersection(alignable_nodes):
                stock = stocks.setdefault(match.kind, _StockEntries())
                stock.resources.add(device.resource)
                stock.devices[match.id] = Device(id=match.id, numa_nodes=nodes)
                # One of several replicas is free if any of them is.
                if is_of_container or not device.is_allocated:
                    stock.free_ids.add(match.id)
                if is_of_container:
                    stock.held_ids.add(match.id)
    return tuple(
        replace(request, stock=stocks[request.resource].build_stock(request.count))
        if request.resource in stocks and stocks[request.resource].can_satisfy(request)
        else request
        for request in requests
    )


@dataclass(slots=True)
class _StockEntries:
    """Devices of one kind while they are collected, and the resources that they belong to."""

    resources: set[str] = field(default_factory=set)
    devices: dict[str, Device] = field(default_factory=dict)
    free_ids: set[str] = field(default_factory=set)
    held_ids: set[str] = field(default_factory=set)

    def can_satisfy(self, request: DeviceRequest) -> bool:
        """Return True if all devices of a request are of this kind and of one resource."""
        return len(self.resources) == 1 and self.held_ids >= {d.id for d in request.devices}

    def build_stock(self, count: int) -> DeviceStock:
        """Build the stock; of free devices on equal NUMA nodes ``count`` are enough."""
        capacity, free_counts = Counter[int](), Counter[int]()
        choice_counts = Counter[frozenset[int]]()
        choices: list[Device] = []
        for id, device in sorted(self.devices.items()):
            capacity.update(device.numa_nodes)
            if id not in self.free_ids:
                continue
            free_counts.update(device.numa_nodes)
            if id in self.held_ids or choice_counts[device.numa_nodes] < count:
                choice_counts[device.numa_nodes] += id not in self.held_ids
                choices.append(device)
        return DeviceStock(capacity=dict(capacity), free=dict(free_counts), choices=tuple(choices))


# --- hints from devices ---------------------------------------------------------------------------
# A device is a hint for the placement of its container, and no grant: without a hint it can be
# used, too. So an unknown device gives no hint, and a sentence.


MAX_UNLOCATED_NOTES: Final = 8
_MAX_NOTE_VALUE_CHARS: Final = 60
"""Characters of a value from a pod in a note."""


class DeviceHints(NamedTuple):
    """Input of the engine: requests by kind, and sentences about devices without a hint."""

    requests: tuple[DeviceRequest, ...] = ()
    notes: tuple[str, ...] = ()


def build_hints(
    located_devices: Iterable[LocatedDevice], alignable_nodes: NUMASet, notes: Iterable[str] = ()
) -> DeviceHints:
    """Build hints from devices, ordered by how reliable their source is, and from ``notes``.

    A device named by several sources counts once, under its first kind, on the NUMA nodes of all of
    them; an id that a plugin made up belongs to its resource only. NUMA nodes outside of
    ``alignable_nodes`` (offline, without CPUs, or of another machine) give no hint.
    """
    device_by_key: dict[tuple[str, str], LocatedDevice] = {}
    for device in located_devices:
        key = device.kind if "/" in device.kind else "", device.id
        first_device = device_by_key.setdefault(key, device)
        device_by_key[key] = first_device._replace(
            numa_nodes=first_device.numa_nodes | device.numa_nodes,
            local_cpus=first_device.local_cpus or device.local_cpus,
        )
    sentences = list(dict.fromkeys(notes))
    by_kind: dict[str, list[Device]] = {}
    for kind, id, nodes, local_cpus in device_by_key.values():
        usable = nodes.intersection(alignable_nodes)
        if usable:
            device_with_nodes = Device(id=id, numa_nodes=usable, local_cpus=local_cpus)
            by_kind.setdefault(kind, []).append(device_with_nodes)
        elif nodes:
            nodes_text = numa_text(NUMASet(nodes))
            sentences.append(f"its {kind} {id} is on {nodes_text}, which has no CPUs: no hint")
        else:
            sentences.append(f"its {kind} {id} has no known NUMA node: no hint")
    total = sum(len(devices) for devices in by_kind.values())
    if total > MAX_CONTAINER_DEVICES:
        by_kind = {}
        sentences.insert(0, f"it has {total} devices, more than {MAX_CONTAINER_DEVICES}: no hint")
    if len(sentences) > MAX_UNLOCATED_NOTES:
        sentences[MAX_UNLOCATED_NOTES - 1 :] = [
            f"and {len(sentences) - MAX_UNLOCATED_NOTES + 1} more such devices"
        ]
    # Order: by kind, then by id.
    return DeviceHints(
        tuple(
            DeviceRequest(
                resource=kind,
                count=len(devices),
                devices=tuple(sorted(devices, key=lambda d: d.id)),
            )
            for kind, devices in sorted(by_kind.items())
        ),
        tuple(sentences),
    )


# --- NVIDIA's GPUs: names, and device files of major 195 ------------------------------------------
# The driver makes its device files by mknod, so sysfs does not know their numbers
# (opencontainers/runc #3708); its directory in /proc maps them to PCI addresses. Reading it may
# wake a GPU, so a thread reads it, at start and when an unknown GPU is named.
# Source: NVIDIA/open-gpu-kernel-modules, ``nv-procfs.c``.


NVIDIA_MAJOR: Final = 195
_NVIDIA_CONTROL_MINORS: Final = (254, 255)
"""nvidia-modeset and nvidiactl, which belong to all GPUs."""
NO_DEVICE_VALUES: Final = frozenset(("", "void", "none"))
ALL_DEVICES: Final = "all"
"""Value that images set themselves; it says nothing about the pod."""

_MAX_GPUS: Final = 64


class GPUs(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of a machine, by name.

    Attributes:
        addresses: PCI addresses in ascending order, which is the order of indices.
        by_uuid: ``GPU-…``, in lower case, to PCI address.
        by_minor: minor number of the device file to PCI address.
    """

    addresses: tuple[str, ...] = ()
    by_uuid: Mapping[str, str] = msgspec.field(default_factory=dict)
    by_minor: Mapping[int, str] = msgspec.field(default_factory=dict)

    def address_of_minor(self, minor: int) -> str | None:
        """Return the PCI address of a device file's GPU; None for control and unknown devices."""
        return None if minor in _NVIDIA_CONTROL_MINORS else self.by_minor.get(minor)

    def address_of_name(self, name: str) -> str | None:
        """Return the PCI address of a GPU by UUID or index; None if it is unknown.

        ``MIG-GPU-<uuid>/<instance>/…`` and ``<index>:<instance>`` are parts of the GPU they name.
        The newer ``MIG-<uuid>`` does not name its GPU. ``::N`` is a replica (time slicing).
        """
        name = name.strip().lower().partition("::")[0]
        name = name.removeprefix("mig-") if name.startswith("mig-gpu-") else name
        name = name.partition("/")[0]
        if name.startswith("gpu-"):
            return self.by_uuid.get(name)
        index = name.partition(":")[0]
        if index.isascii() and index.isdigit() and len(index) <= 3:
            return self.addresses[int(index)] if int(index) < len(self.addresses) else None
        return None


def read_nvidia_gpus(root: str) -> GPUs:
    """Read the GPUs below ``proc/driver/nvidia``; none without the driver."""
    directory = os.path.join(root, "proc", "driver", "nvidia", "gpus")
    try:
        names = sorted(name.lower() for name in os.listdir(directory))[:_MAX_GPUS]
    except OSError:
        return GPUs()
    addresses = tuple(name for name in names if PCI_ADDRESS.fullmatch(name))
    by_uuid: dict[str, str] = {}
    by_minor: dict[int, str] = {}
    for address in addresses:
        facts = _read_gpu_information(os.path.join(directory, address, "information"))
        uuid, minor = facts.get("gpu uuid", "").lower(), facts.get("device minor", "")
        if uuid.startswith("gpu-") and "?" not in uuid:  # not known before the first use
            by_uuid[uuid] = address
        if minor.isascii() and minor.isdigit() and len(minor) <= 3:
            by_minor[int(minor)] = address
    return GPUs(addresses=addresses, by_uuid=by_uuid, by_minor=by_minor)


def _read_gpu_information(path: str) -> dict[str, str]:
    fields = (line.partition(":") for line in read_text_or_empty(path).splitlines())
    return {key.strip().lower(): value.strip() for key, colon, value in fields if colon}
