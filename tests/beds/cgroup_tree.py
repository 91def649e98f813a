"""A cgroup file system in a directory, of either version, with only the files of cpusets."""

import shutil
from pathlib import Path

from nri_numa.model.cpuset import CPUSet, NUMASet


class CgroupTree:
    """Files that look like the kernel's.

    Args:
        version: 1 or 2.
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
        return self.base / path.strip("/")

    def write(self, path: str, cpus: str = "", mems: str = "", *, above: str = "") -> None:
        """Write a cpuset as anybody can; an empty list is what a new cgroup has.

        `above`: CPUs that the parent leaves, on version 2; all when empty.
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

    def settle(self, path: str) -> None:
        """Do what the kernel does when somebody wrote ``cpuset.cpus`` or ``cpuset.mems``."""
        if self.version == 1:
            return
        directory = self.directory(path)
        for name, every in (("cpus", str(self.cpus)), ("mems", str(self.mems))):
            wanted = (directory / f"cpuset.{name}").read_text().strip() or every
            effective = directory / f"cpuset.{name}.effective"
            if effective.read_text().strip() != wanted:
                effective.write_text(f"{wanted}\n")

    def limit(self, path: str, quota: int) -> None:
        """Write a CFS quota in microseconds per 100 ms as anybody can, -1 for none."""
        if self.version == 2:
            word = "max" if quota < 0 else str(quota)
            (self.directory(path) / "cpu.max").write_text(f"{word} 100000\n")
            return
        directory = self.root / "cpu,cpuacct" / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (directory / "cpu.cfs_period_us").write_text("100000\n")

    def remove(self, path: str) -> None:
        shutil.rmtree(self.directory(path))

    def cpus_of(self, path: str) -> str:
        return (self.directory(path) / "cpuset.cpus").read_text().strip()

    def mems_of(self, path: str) -> str:
        return (self.directory(path) / "cpuset.mems").read_text().strip()


class ContainerTree:
    """A cgroup file system of version 1 or 2 with the cgroup ``/pods/a``, and an empty proc."""

    def __init__(self, root: Path, version: int = 2) -> None:
        self.root = root / "cgroup"
        self.proc = root / "proc"
        self.proc.mkdir(parents=True)
        self.home = self.root / ("pods/a" if version == 2 else "cpuset/pods/a")
        self.home.mkdir(parents=True)
        if version == 2:
            (self.root / "cgroup.controllers").touch()

    def processes(self, *pids: int) -> None:
        (self.home / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
