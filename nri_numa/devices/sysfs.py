"""NUMA nodes of devices in sysfs: by number, PCI address, or name on a bus.

The search goes from a device's directory upwards to the first one with a NUMA node: a partition is
below its disk, a queue below its card, a card below its port. -1 is *unknown*, so it goes on.

Results are cached. A device costs a few small files of sysfs once, which the kernel answers from
memory, and nothing afterwards. `SysfsDevices.reresolve_cached_links` reads them again in a thread:
until then a removed device gives an outdated hint, and never more than a hint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from nri_numa.machine.cgroups import read_text_or_empty
from nri_numa.machine.pci import DEVICE, NIC, NVME, PCI_ADDRESS, RDMA, kind_of_class, parse_cpu_list
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.workload import MAX_CONTAINER_DEVICES

DISK_KIND: Final = "disk"


class LocatedDevice(NamedTuple):
    """One device.

    Attributes:
        kind: ``GPU``, ``NIC``, … or the kubelet's resource name.
        id: the PCI address if it has one, else the name in sysfs.
        numa_nodes: the NUMA nodes of the device; empty if unknown.
        local_cpus: the CPUs beside its PCIe root; empty if unknown.
    """

    kind: str
    id: str
    numa_nodes: frozenset[int] = frozenset()
    local_cpus: CPUSet = NO_CPUS


_SYSFS_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}", re.ASCII)
_NVME_CONTROLLER_NAME: Final = re.compile(r"nvme[0-9]{1,6}", re.ASCII)
_NVME_SUBSYSTEM_NAME: Final = re.compile(r"nvme-subsys[0-9]{1,6}", re.ASCII)

_MAX_CACHED_LINKS: Final = 512
"""Cached links, which are resolved again with every sandbox."""
_MAX_ANCESTOR_DIRECTORIES: Final = 32
"""Directories above a device; nested bridges are a dozen at most."""
_MAX_DISK_STACK_DEPTH: Final = 4
"""Layers of device mapper and md that are followed: LUKS on LVM on RAID are three."""


class SysfsDevices:
    """Looks up devices below one root; safe to use from several threads."""

    def __init__(self, root: str) -> None:
        """Look up devices below ``root``, which contains ``sys/``."""
        self._sys = os.path.join(os.path.realpath(root), "sys")
        self._top = os.path.join(self._sys, "devices")
        self._links: dict[str, tuple[LocatedDevice, ...]] = {}

    def by_number(self, type: str, major: int, minor: int) -> tuple[LocatedDevice, ...]:
        """Return the devices behind a device file; empty for the kernel's own and for none."""
        kind = {"c": "char", "u": "char", "b": "block"}.get(type)
        if kind is None or major < 0 or minor < 0:
            return ()
        return self._cached_devices_behind_link(f"dev/{kind}/{major}:{minor}")

    def by_pci(self, address: str) -> tuple[LocatedDevice, ...]:
        """Return the device at a PCI address; empty if there is none."""
        address = address.strip().lower()
        if not PCI_ADDRESS.fullmatch(address):
            return ()
        return self._cached_devices_behind_link(f"bus/pci/devices/{address}")

    def by_bus(self, bus: str, name: str) -> tuple[LocatedDevice, ...]:
        """Return a device by its name on a bus, as the kernel names an interface's parent."""
        if not _SYSFS_NAME_PATTERN.fullmatch(bus) or not _SYSFS_NAME_PATTERN.fullmatch(name):
            return ()
        return self._cached_devices_behind_link(f"bus/{bus}/devices/{name}")

    def by_interface(self, name: str) -> tuple[LocatedDevice, ...]:
        """Return the device of a network interface in the host's namespace."""
        if not _SYSFS_NAME_PATTERN.fullmatch(name):
            return ()
        return self._cached_devices_behind_link(f"class/net/{name}")

    def reresolve_cached_links(self) -> None:
        """Resolve all cached links again. Blocks."""
        for link in list(self._links):
            devices = self._devices_behind_link(link)
            if devices is None:
                self._links.pop(link, None)
            else:
                self._links[link] = devices

    def _cached_devices_behind_link(self, name: str) -> tuple[LocatedDevice, ...]:
        link = f"{self._sys}/{name}"
        cached_devices = self._links.get(link)
        if cached_devices is not None:
            return cached_devices
        devices = self._devices_behind_link(link)
        if devices is None:
            return ()  # not cached: anybody can make up addresses
        if len(self._links) >= _MAX_CACHED_LINKS:
            self._links.clear()
        self._links[link] = devices
        return devices

    def _devices_behind_link(self, link: str) -> tuple[LocatedDevice, ...] | None:
        """Return the devices behind a link; None if it does not exist."""
        try:
            target = os.readlink(link)
        except OSError:
            # A captured machine has directories where the kernel has links.
            return self._devices_at(link) if os.path.isdir(link) else None
        return self._devices_at(os.path.normpath(os.path.join(os.path.dirname(link), target)))

    def _devices_at(self, path: str, stacked: int = 0) -> tuple[LocatedDevice, ...] | None:
        if not path.startswith(self._sys + "/") or not os.path.isdir(path):
            return None
        return tuple(self._read_devices(path, stacked))

    def _read_devices(self, path: str, stacked: int) -> Iterator[LocatedDevice]:
        parts = path[len(self._top) + 1 :].split("/")
        if parts[:2] == ["virtual", "vfio"] and len(parts) == 3:
            # An IOMMU group may contain several devices, which are only assigned together.
            group = parts[2].removeprefix("noiommu-")
            members = os.path.join(self._sys, "kernel", "iommu_groups", group, "devices")
            for address in _list_directory(members):
                yield from self.by_pci(address)
        elif parts[:2] == ["virtual", "block"] and len(parts) >= 3:
            nodes = self._nodes_of_stacked_disk(parts[2], stacked)
            if nodes:
                yield LocatedDevice(DISK_KIND, parts[2], nodes)
        elif parts[:2] == ["virtual", "nvme-subsystem"] and len(parts) >= 4:
            # With multipath the disk belongs to the subsystem, which has links to its controllers.
            directory = os.path.join(self._top, *parts[:3])
            if _NVME_SUBSYSTEM_NAME.fullmatch(parts[2]):
                for name in filter(_NVME_CONTROLLER_NAME.fullmatch, _list_directory(directory)):
                    yield self._nearest_pci_device(os.path.realpath(f"{directory}/{name}"), NVME)
        elif parts[:1] != ["virtual"]:
            yield self._nearest_pci_device(path, _kind_of_path(parts))

    def _nodes_of_stacked_disk(self, name: str, stacked: int) -> frozenset[int]:
        """Return the NUMA nodes of the disks below a disk of dm or md."""
        if stacked >= _MAX_DISK_STACK_DEPTH:
            return frozenset()
        slaves = os.path.join(self._top, "virtual", "block", name, "slaves")
        paths = [os.path.realpath(f"{slaves}/{slave}") for slave in _list_directory(slaves)]
        disks = [disk for path in paths for disk in self._devices_at(path, stacked + 1) or ()]
        return frozenset().union(*(disk.numa_nodes for disk in disks))

    def _nearest_pci_device(self, path: str, kind: str) -> LocatedDevice:
        """Return the device of a directory: the nearest with a PCI address, or itself."""
        directory, address, nodes, local_cpus = path, "", frozenset[int](), NO_CPUS
        for _ in range(_MAX_ANCESTOR_DIRECTORIES):
            if not address and PCI_ADDRESS.fullmatch(os.path.basename(directory)):
                address = os.path.basename(directory)
                local_cpus = parse_cpu_list(read_text_or_empty(f"{directory}/local_cpulist"))
                named = kind_of_class(read_text_or_empty(f"{directory}/class"))
                if kind == DEVICE or (kind == DISK_KIND and named == NVME):
                    kind = named
            if not nodes:
                nodes = _read_numa_nodes(directory)
            directory = os.path.dirname(directory)
            if (nodes and address) or len(directory) <= len(self._top):
                break
        return LocatedDevice(kind, address or os.path.basename(path), nodes, local_cpus)


def _kind_of_path(parts: list[str]) -> str:
    if "infiniband_verbs" in parts or "infiniband" in parts:
        return RDMA
    if "net" in parts:
        return NIC
    return DISK_KIND if "block" in parts else DEVICE


def _list_directory(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))[:MAX_CONTAINER_DEVICES]
    except OSError:
        return []


def _read_numa_nodes(directory: str) -> frozenset[int]:
    number = read_text_or_empty(f"{directory}/numa_node")
    if not (number.isascii() and number.isdigit()) or len(number) > 4:
        return frozenset()
    return frozenset((int(number),)) if int(number) < NUMASet.LIMIT else frozenset()
