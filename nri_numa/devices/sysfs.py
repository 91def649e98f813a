"""Where a device is, as sysfs says: by its number, its PCI address, or its name on a bus.

A device's directory is followed upwards to the first that names a NUMA node: a partition lies below
its disk, a queue below its card, a card below the port that knows. -1 is *unknown*, so one goes on.

What has been found is remembered. A device costs a few small files of sysfs once, which the kernel
answers from memory, and nothing afterwards. Whether all of it is still so is read by
`SysfsDevices.reresolve_cached_links`, in a thread: until then a device that was removed leads to a
hint that is out of date, and never to more than a hint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from nri_numa.machine.cgroups import read_text
from nri_numa.machine.pci import DEVICE, NIC, NVME, PCI_ADDRESS, RDMA, kind_of_class
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import MAX_CONTAINER_DEVICES

DISK_KIND: Final = "disk"


class LocatedDevice(NamedTuple):
    """One device.

    Attributes:
        kind: what people call it: ``GPU``, ``NIC``, or a resource name of the kubelet's.
        id: its PCI address where it has one, else its name in sysfs.
        numa_nodes: where it is; empty where that is not known.
    """

    kind: str
    id: str
    numa_nodes: frozenset[int] = frozenset()


_SYSFS_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,63}", re.ASCII)
_NVME_CONTROLLER_NAME: Final = re.compile(r"nvme[0-9]{1,6}", re.ASCII)
_NVME_SUBSYSTEM_NAME: Final = re.compile(r"nvme-subsys[0-9]{1,6}", re.ASCII)

_MAX_CACHED_LINKS: Final = 512
"""Links that are remembered, and looked at again with every sandbox."""
_MAX_ANCESTOR_DIRECTORIES: Final = 32
"""Directories above a device; bridges behind bridges are a dozen at most."""
_MAX_DISK_STACK_DEPTH: Final = 4
"""Layers of device mapper and md that are looked through: LUKS on LVM on RAID are three."""


class SysfsDevices:
    """Looks devices up below one root; safe to use from several threads."""

    def __init__(self, root: str) -> None:
        """Look below ``root``, which holds ``sys/``."""
        self._sys = os.path.join(os.path.realpath(root), "sys")
        self._top = os.path.join(self._sys, "devices")
        self._links: dict[str, tuple[LocatedDevice, ...]] = {}

    def by_number(self, type: str, major: int, minor: int) -> tuple[LocatedDevice, ...]:
        """The devices behind a device file; empty where it is none, or the kernel's own."""
        kind = {"c": "char", "u": "char", "b": "block"}.get(type)
        if kind is None or major < 0 or minor < 0:
            return ()
        return self._cached_devices_behind_link(
            os.path.join(self._sys, "dev", kind, f"{major}:{minor}")
        )

    def by_pci(self, address: str) -> tuple[LocatedDevice, ...]:
        """The device at a PCI address; empty where there is none."""
        address = address.strip().lower()
        if not PCI_ADDRESS.fullmatch(address):
            return ()
        return self._cached_devices_behind_link(
            os.path.join(self._sys, "bus", "pci", "devices", address)
        )

    def by_bus(self, bus: str, name: str) -> tuple[LocatedDevice, ...]:
        """A device by its name on a bus, as the kernel says of a network interface's parent."""
        if not _SYSFS_NAME_PATTERN.fullmatch(bus) or not _SYSFS_NAME_PATTERN.fullmatch(name):
            return ()
        return self._cached_devices_behind_link(
            os.path.join(self._sys, "bus", bus, "devices", name)
        )

    def by_interface(self, name: str) -> tuple[LocatedDevice, ...]:
        """The device of a network interface in the host's namespace."""
        if not _SYSFS_NAME_PATTERN.fullmatch(name):
            return ()
        return self._cached_devices_behind_link(os.path.join(self._sys, "class", "net", name))

    def reresolve_cached_links(self) -> None:
        """Look whether everything that is remembered is still so. Blocks."""
        for link in list(self._links):
            now = self._devices_behind_link(link)
            if now is None:
                self._links.pop(link, None)
            else:
                self._links[link] = now

    def _cached_devices_behind_link(self, link: str) -> tuple[LocatedDevice, ...]:
        known = self._links.get(link)
        if known is not None:
            return known
        found = self._devices_behind_link(link)
        if found is None:
            return ()  # not remembered: anybody can make up addresses
        if len(self._links) >= _MAX_CACHED_LINKS:
            self._links.clear()
        self._links[link] = found
        return found

    def _devices_behind_link(self, link: str) -> tuple[LocatedDevice, ...] | None:
        """The devices behind a link; None where there is nothing."""
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
            # A group of the IOMMU may hold several devices, which are only given together.
            group = parts[2].removeprefix("noiommu-")
            members = os.path.join(self._sys, "kernel", "iommu_groups", group, "devices")
            for address in _list_directory(members):
                yield from self.by_pci(address)
        elif parts[:2] == ["virtual", "block"] and len(parts) >= 3:
            nodes = self._nodes_of_stacked_disk(parts[2], stacked)
            if nodes:
                yield LocatedDevice(DISK_KIND, parts[2], nodes)
        elif parts[:2] == ["virtual", "nvme-subsystem"] and len(parts) >= 4:
            # With multipath the disk belongs to the subsystem, and its controllers are links there.
            directory = os.path.join(self._top, *parts[:3])
            if _NVME_SUBSYSTEM_NAME.fullmatch(parts[2]):
                for name in filter(_NVME_CONTROLLER_NAME.fullmatch, _list_directory(directory)):
                    yield self._nearest_pci_device(os.path.realpath(f"{directory}/{name}"), NVME)
        elif parts[:1] != ["virtual"]:
            yield self._nearest_pci_device(path, _kind_of_path(parts))

    def _nodes_of_stacked_disk(self, name: str, stacked: int) -> frozenset[int]:
        """NUMA nodes of the disks below a disk of dm or md."""
        if stacked >= _MAX_DISK_STACK_DEPTH:
            return frozenset()
        slaves = os.path.join(self._top, "virtual", "block", name, "slaves")
        paths = [os.path.realpath(f"{slaves}/{slave}") for slave in _list_directory(slaves)]
        disks = [one for path in paths for one in self._devices_at(path, stacked + 1) or ()]
        return frozenset().union(*(one.numa_nodes for one in disks))

    def _nearest_pci_device(self, path: str, kind: str) -> LocatedDevice:
        """The device that a directory belongs to: the nearest with a PCI address, or itself."""
        at, address, nodes = path, "", frozenset[int]()
        for _ in range(_MAX_ANCESTOR_DIRECTORIES):
            if not address and PCI_ADDRESS.fullmatch(os.path.basename(at)):
                address = os.path.basename(at)
                named = kind_of_class(_read_attribute(f"{at}/class"))
                if kind == DEVICE or (kind == DISK_KIND and named == NVME):
                    kind = named
            if not nodes:
                nodes = _read_numa_nodes(at)
            at = os.path.dirname(at)
            if (nodes and address) or len(at) <= len(self._top):
                break
        return LocatedDevice(kind, address or os.path.basename(path), nodes)


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
    number = _read_attribute(f"{directory}/numa_node") or ""
    if not (number.isascii() and number.isdigit()) or len(number) > 4:
        return frozenset()
    return frozenset((int(number),)) if int(number) < NUMASet.LIMIT else frozenset()


def _read_attribute(path: str) -> str | None:
    try:
        return read_text(path)
    except OSError:
        return None
