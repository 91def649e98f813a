"""Which devices a message or the kubelet means, by what sysfs, the driver and CDI files say.

The driver's GPUs and CDI files are read in threads and replaced as a whole. A lookup reads nothing
but links and small files of sysfs, and those once (`nri_numa.devices.sysfs`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from nri_numa.devices.cdi import CDIDevice, CDIRegistry
from nri_numa.devices.sysfs import LocatedDevice, SysfsDevices
from nri_numa.machine.cgroups import read_text
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
)

if TYPE_CHECKING:
    from nri_numa.config.sections import Devices as Sources


@dataclass(slots=True)
class MissedHints:
    """What gives no hint.

    Attributes:
        gpu, cdi: a GPU is not known to the driver; a name stands in no CDI file. Either is read
            again because of that.
        notes: sentences for explanations.
    """

    gpu: bool = False
    cdi: bool = False
    notes: list[str] = field(default_factory=list)


class DeviceFinder:
    """Knows devices by what they are called; safe to use from several threads.

    Attributes:
        sysfs: where devices are.
        gpus: the driver's, replaced as a whole.
        cdi: the files.
    """

    def __init__(self, sources: Sources, *, root: str, own_resource: str) -> None:
        """Know nothing yet; see `nri_numa.devices.watch.DeviceWatch` for the arguments."""
        self._sources = sources
        self._own_resource = own_resource
        self.sysfs = SysfsDevices(root)
        self.gpus = GPUs()
        self.cdi = CDIRegistry(sources.cdi_directories)

    def find_mentioned(
        self, mentions: DeviceMentions, missed: MissedHints
    ) -> Iterator[LocatedDevice]:
        """The devices that a message mentions; what gives no hint is put into ``missed``."""
        sources = self._sources
        if mentions.unread:
            missed.notes.append(
                f"{mentions.unread} more devices than are looked at: no hint of them"
            )
        for node in mentions.nodes:
            yield from self._find_by_device_file(node)
        for variable, value in sorted(mentions.variables.items()):
            if sources.variables and variable.startswith(PCI_VARIABLE_PREFIX):
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
        elif self._sources.nodes:
            yield from self.sysfs.by_number(node.type, node.major, node.minor)

    def _find_by_pci_variable(
        self, variable: str, text: str, missed: MissedHints
    ) -> Iterator[LocatedDevice]:
        """Of a variable of the SR-IOV network device plugin's; anybody may write one into a pod.

        It costs no other pod anything: a container is placed where it says that its device is.
        """
        address = text.strip().lower()
        if PCI_ADDRESS.fullmatch(address):
            at = self.sysfs.by_pci(address)
            yield from at
            if not at:
                missed.notes.append(
                    f"variable {variable} names {address}, which is not there: no hint"
                )
        elif address:
            missed.notes.append(
                f"variable {_truncate_text(variable)} is {_truncate_text(text)!r}, which is no "
                "PCI address: no hint"
            )

    def _gpus_of_nvidia_variable(self, value: str, missed: MissedHints) -> Iterator[LocatedDevice]:
        """Of the variable of NVIDIA's device plugin: UUIDs or indices."""
        word = value.strip().lower()
        if word == ALL_DEVICES:
            missed.notes.append(
                f"variable {NVIDIA_VARIABLE} is 'all', as images set it themselves: no hint"
            )
        if word == ALL_DEVICES or word in NO_DEVICE_VALUES:
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
                f"CDI device {name[:80]!r} stands in no file that was read: no hint of it"
            )
            device = CDIDevice()
        for node in device.nodes:
            yield from self._find_by_device_file(node)
        for interface in device.interfaces:
            yield from self.sysfs.by_interface(interface)

    def _gpu_at(self, address: str) -> LocatedDevice:
        """A GPU of NVIDIA's at a PCI address, on no NUMA node where sysfs does not have it."""
        found = self.sysfs.by_pci(address)
        return found[0]._replace(kind=GPU) if found else LocatedDevice(GPU, address)

    def match_kubelet_devices(self, devices: Iterable[LocatedDevice]) -> Iterator[LocatedDevice]:
        """Devices by the kubelet's books, as those that sysfs knows where their ids tell which."""
        for device in devices:
            if device.kind == self._own_resource:
                continue
            address = (
                self.gpus.address_of_name(device.id)
                if device.id.lower().startswith("gpu-")
                else None
            )
            known = (
                (self._gpu_at(address),) if address is not None else self.sysfs.by_pci(device.id)
            )
            for one in known or (device,):
                # Where sysfs knows no NUMA node, as in many a virtual machine, the plugin may.
                yield one if one.numa_nodes else one._replace(numa_nodes=device.numa_nodes)


# --- what becomes of the devices that were found --------------------------------------------------
# Whatever is found is a hint where its container should be, and no grant: the device is used or
# not whatever is said here. So a device of which nothing is known gives no hint, and a sentence.


MAX_UNLOCATED_NOTES: Final = 8


class DeviceHints(NamedTuple):
    """What the engine is given: requests by kind, and sentences about what gives no hint."""

    requests: tuple[DeviceRequest, ...] = ()
    notes: tuple[str, ...] = ()


def build_hints(
    found: Iterable[LocatedDevice], places: NUMASet, notes: Iterable[str] = ()
) -> DeviceHints:
    """Make hints of devices, the surest sources first, and of what is to be said besides.

    A device that several sources tell of counts once, under its first kind, on the NUMA nodes of
    all of them; an id of a plugin's own is one of its resource alone. NUMA nodes that are none of
    ``places`` (offline, without CPUs, or of another machine) are no hint.
    """
    known: dict[tuple[str, str], LocatedDevice] = {}
    for one in found:
        key = one.kind if "/" in one.kind else "", one.id
        had = known.setdefault(key, one)
        known[key] = had._replace(numa_nodes=had.numa_nodes | one.numa_nodes)
    said = list(dict.fromkeys(notes))
    by_kind: dict[str, list[Device]] = {}
    for kind, id, nodes in known.values():
        usable = nodes.intersection(places)
        if usable:
            by_kind.setdefault(kind, []).append(Device(id=id, numa_nodes=usable))
        elif nodes:
            where = numa_text(NUMASet(nodes))
            said.append(f"its {kind} {id} is on {where}, where no CPUs are: no hint")
        else:
            said.append(f"its {kind} {id} has no known NUMA node: no hint")
    total = sum(len(devices) for devices in by_kind.values())
    if total > MAX_CONTAINER_DEVICES:
        by_kind = {}
        said.insert(0, f"it has {total} devices, more than {MAX_CONTAINER_DEVICES}: no hint")
    if len(said) > MAX_UNLOCATED_NOTES:
        said[MAX_UNLOCATED_NOTES - 1 :] = [
            f"and {len(said) - MAX_UNLOCATED_NOTES + 1} more such devices"
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
        tuple(said),
    )


def _truncate_text(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"


# --- NVIDIA's GPUs: what their names and device files of major 195 mean ---------------------------
# The driver makes its device files by mknod, so sysfs does not know their numbers
# (opencontainers/runc #3708); its own directory in /proc joins them with PCI addresses. Reading
# that may wake a GPU, so it is done in a thread, at start and when a GPU is named that is not
# known. Source: NVIDIA/open-gpu-kernel-modules, ``nv-procfs.c``.


NVIDIA_MAJOR: Final = 195
_NVIDIA_CONTROL_MINORS: Final = (254, 255)
"""nvidia-modeset and nvidiactl, which belong to all GPUs."""
NO_DEVICE_VALUES: Final = frozenset(("", "void", "none"))
ALL_DEVICES: Final = "all"
"""Images set it for themselves; it says nothing about the pod."""

_MAX_GPUS: Final = 64


class GPUs(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs of a machine, by what they are called.

    Attributes:
        addresses: PCI addresses in ascending order, which is the order of indices.
        by_uuid: ``GPU-…``, in lower case, to PCI address.
        by_minor: minor number of the device file to PCI address.
    """

    addresses: tuple[str, ...] = ()
    by_uuid: Mapping[str, str] = msgspec.field(default_factory=dict)
    by_minor: Mapping[int, str] = msgspec.field(default_factory=dict)

    def address_of_minor(self, minor: int) -> str | None:
        """The GPU of a device file; None for control devices and unknown ones."""
        return None if minor in _NVIDIA_CONTROL_MINORS else self.by_minor.get(minor)

    def address_of_name(self, name: str) -> str | None:
        """The GPU that a UUID or an index names; None where it is not known.

        ``MIG-GPU-<uuid>/<instance>/…`` and ``<index>:<instance>`` are parts of the GPU they name.
        The newer ``MIG-<uuid>`` does not say whose part it is. ``::N`` is a replica (time slicing).
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
    """Read what the driver says below ``proc/driver/nvidia``; without the driver there is none."""
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
        if uuid.startswith("gpu-") and "?" not in uuid:  # unknown before the first use
            by_uuid[uuid] = address
        if minor.isascii() and minor.isdigit() and len(minor) <= 3:
            by_minor[int(minor)] = address
    return GPUs(addresses=addresses, by_uuid=by_uuid, by_minor=by_minor)


def _read_gpu_information(path: str) -> dict[str, str]:
    facts: dict[str, str] = {}
    try:
        lines = read_text(path).splitlines()
    except OSError:
        return facts
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            facts[key.strip().lower()] = value.strip()
    return facts
