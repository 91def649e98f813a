"""A cgroup file system in a directory, of either version, with only the files of cpusets."""

from __future__ import annotations

import shutil
from pathlib import Path

from nri_numa.topology.cpuset import CPUSet, NUMASet


class CgroupTree:
    """Files that look like the kernel's.

    Args:
        root: becomes what is mounted at /sys/fs/cgroup.
        version: 1 or 2.
        cpus, mems: of the machine.
    """

    def __init__(self, root: Path, version: int, cpus: CPUSet, mems: NUMASet) -> None:
        self.root = root
        self.version = version
        self.cpus = cpus
        self.mems = mems
        self.base = root if version == 2 else root / "cpuset"
        self.base.mkdir(parents=True)
        if version == 2:
            (root / "cgroup.controllers").write_text("cpuset cpu memory\n")

    def directory(self, path: str) -> Path:
        """Where a cgroup is."""
        return self.base / path.strip("/")

    def write(self, path: str, cpus: str = "", mems: str = "", *, above: str = "") -> None:
        """Write a cpuset as anybody can; an empty list is what a new cgroup has.

        Args:
            path: of the cgroup, which is made.
            cpus: kernel list.
            mems: kernel list.
            above: CPUs that the parent leaves, on version 2; all when empty.
        """
        directory = self.directory(path)
        directory.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            cpus, mems = cpus or str(self.cpus), mems or str(self.mems)
        else:
            parent = CPUSet.parse(above) if above else self.cpus
            effective = (CPUSet.parse(cpus) & parent) or parent
            (directory / "cpuset.cpus.effective").write_text(f"{effective}\n")
            (directory / "cpuset.mems.effective").write_text(f"{mems or self.mems}\n")
        (directory / "cpuset.cpus").write_text(f"{cpus}\n")
        (directory / "cpuset.mems").write_text(f"{mems}\n")

    def remove(self, path: str) -> None:
        """The cgroup goes away."""
        shutil.rmtree(self.directory(path))

    def cpus_of(self, path: str) -> str:
        """``cpuset.cpus`` as written."""
        return (self.directory(path) / "cpuset.cpus").read_text().strip()

    def mems_of(self, path: str) -> str:
        """``cpuset.mems`` as written."""
        return (self.directory(path) / "cpuset.mems").read_text().strip()
