"""Trees of devices as sysfs and NVIDIA's driver show them, made in a directory."""

import os
from pathlib import Path

NIC_CLASS, GPU_CLASS, NVME_CLASS = "0x020000", "0x030200", "0x010802"


class DeviceTree:
    """Devices below a root; every method makes what the kernel would show."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/devices").mkdir(parents=True, exist_ok=True)

    def pci(self, address: str, numa_node: int, kind: str = NIC_CLASS) -> Path:
        directory = self.root / "sys/devices" / f"pci{address[:7]}" / address
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "numa_node").write_text(f"{numa_node}\n")
        (directory / "class").write_text(f"{kind}\n")
        self.link(f"sys/bus/pci/devices/{address}", directory)
        return directory

    def child(self, parent: Path, *names: str) -> Path:
        """A device below another one, without a NUMA node of its own."""
        directory = parent.joinpath(*names)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def virtual(self, *names: str) -> Path:
        return self.child(self.root / "sys/devices/virtual", *names)

    def number(self, kind: str, number: str, device: Path) -> None:
        """Give a device a number, ``kind`` being ``char`` or ``block``."""
        self.link(f"sys/dev/{kind}/{number}", device)

    def link(self, name: str, target: Path) -> None:
        """A link as sysfs has them, relative."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(target, path.parent))

    def nvidia(self, address: str, uuid: str, minor: int) -> None:
        """A GPU as NVIDIA's driver tells of it."""
        directory = self.root / "proc/driver/nvidia/gpus" / address
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "information").write_text(
            f"Model: \t\t NVIDIA Example\nIRQ:   \t\t 35\nGPU UUID: \t {uuid}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {minor}\n"
        )
