"""PCI devices of a machine that a container may be aligned with, and their NUMA nodes."""

from __future__ import annotations

import re
from typing import Final

from nri_numa.machine.tree import PCI_DIR, Tree
from nri_numa.model.cpuset import NO_CPUS, CPUSet
from nri_numa.model.machine import PCIDevice

PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)
"""``domain:bus:slot.function`` as sysfs writes it, in lower case."""

MAX_PCI_DEVICES: Final = 4096

DEVICE, GPU, NIC = "device", "GPU", "NIC"
NVME, RDMA = "NVMe disk", "RDMA device"
STORAGE, ACCELERATOR = "storage controller", "accelerator"

_DEVICE_CLASSES: Final = (
    # Base class and subclass of PCI, https://pci-ids.ucw.cz/read/PD; the first match counts.
    ("0108", NVME),
    ("01", STORAGE),
    ("0207", RDMA),
    ("02", NIC),
    ("03", GPU),
    ("0b40", ACCELERATOR),
    ("12", ACCELERATOR),
)
_SYSFS_DEVICES_DIR: Final = "sys/devices"
_PCI_ROOT_PATTERN: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.ASCII)
_PCI_ID_PATTERN: Final = re.compile(r"0x([0-9a-f]{4})", re.ASCII)
_NUMA_ID_PATTERN: Final = re.compile(r"[0-9]{1,4}", re.ASCII)


def kind_of_class(code: str | None) -> str:
    """Name the kind of a PCI class such as ``0x030200``; ``device`` for bridges and all others."""
    digits = (code or "").strip().lower().removeprefix("0x")
    for start, kind in _DEVICE_CLASSES:
        if digits.startswith(start) and len(digits) == 6:
            return kind
    return DEVICE


def parse_cpu_list(text: str | None) -> CPUSet:
    """Parse ``local_cpulist``: CPUs beside the root of a PCI device; empty if unknown.

    Linux with NUMA lists the CPUs of its NUMA node, or all CPUs (``drivers/pci/pci-sysfs.c``).
    """
    return CPUSet.parse_or_none(text or "") or NO_CPUS


def list_pci_devices(tree: Tree) -> tuple[PCIDevice, ...]:
    """List network cards, GPUs, disks and accelerators by address, without bridges and such."""
    devices: list[PCIDevice] = []
    for address in tree.list_directory(PCI_DIR)[:MAX_PCI_DEVICES]:
        directory = f"{PCI_DIR}/{address}"
        kind = kind_of_class(tree.read_file(f"{directory}/class"))
        if kind == DEVICE or not PCI_ADDRESS.fullmatch(address):
            continue
        node = tree.read_file(f"{directory}/numa_node") or ""
        devices.append(
            PCIDevice(
                address=address,
                kind=kind,
                vendor=_parse_pci_id(tree.read_file(f"{directory}/vendor")),
                device=_parse_pci_id(tree.read_file(f"{directory}/device")),
                numa_node=int(node) if _NUMA_ID_PATTERN.fullmatch(node) else None,
                local_cpus=parse_cpu_list(tree.read_file(f"{directory}/local_cpulist")),
            )
        )
    return tuple(devices)


def list_pcie_roots_by_node(tree: Tree) -> dict[int, tuple[str, ...]]:
    """List the PCIe root complexes by NUMA node, in the order of their names.

    A root has no NUMA node of its own in sysfs, so those of the devices directly below it count. If
    firmware reports none for them, the root has no NUMA node. Names are those of
    `resource.kubernetes.io/pcieRoot`, such as ``pci0000:00``.
    """
    roots_by_node: dict[int, set[str]] = {}
    for root in tree.list_directory(_SYSFS_DEVICES_DIR):
        if not _PCI_ROOT_PATTERN.fullmatch(root):
            continue
        for address in tree.list_directory(f"{_SYSFS_DEVICES_DIR}/{root}")[:MAX_PCI_DEVICES]:
            node = PCI_ADDRESS.fullmatch(address) and tree.read_file(
                f"{_SYSFS_DEVICES_DIR}/{root}/{address}/numa_node"
            )
            if node and _NUMA_ID_PATTERN.fullmatch(node):
                roots_by_node.setdefault(int(node), set()).add(root)
    return {node: tuple(sorted(roots)) for node, roots in sorted(roots_by_node.items())}


def _parse_pci_id(text: str | None) -> str:
    match = _PCI_ID_PATTERN.fullmatch(text or "")
    return match[1] if match else ""
