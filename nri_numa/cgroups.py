"""The real cpusets of containers, read from the cgroup file systems. Nothing is ever written here.

Used from a thread: a few files for each container, never on the path of a request. Version 1 is
read through cgroupspy; version 2, which that package does not know, by plain reads.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from nri_numa.engine.corrections import Observed
from nri_numa.topology.cpuset import CPUSet, ListFormatError, NUMASet

_READ_BYTES: Final = 65_536
"""Longer than any list the kernel writes for 8,192 CPUs."""

# The container went away between two reads, or its cgroup did while we had a file open.
_GONE: Final = frozenset((errno.ENOENT, errno.ENODEV, errno.ENOTDIR))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a container's cgroup is, as the runtime told.

    Attributes:
        cgroups_path: the OCI cgroupsPath, in the form of the cgroupfs or of the systemd driver.
        pid: its init process, 0 when it is not known.
    """

    cgroups_path: str = ""
    pid: int = 0


def relative_path(cgroups_path: str) -> str:
    """Turn an OCI cgroupsPath into a path below the hierarchy's root.

    Args:
        cgroups_path: ``/kubepods/pod1/abc``, or ``slice:prefix:name`` of the systemd driver, where
            each dash of a slice's name is one more level (systemd.slice(5)).

    Returns:
        The path without a leading slash; empty when it cannot be told: it is relative to a cgroup
        that only the runtime knows, or no such path at all.
    """
    if "\0" in cgroups_path or ".." in cgroups_path.split("/"):
        return ""
    if cgroups_path.startswith("/"):
        return cgroups_path.strip("/")
    parts = cgroups_path.split(":")
    if len(parts) != 3 or not parts[2]:
        return ""
    slice_name, prefix, name = parts
    if name.endswith(".slice"):
        unit = name
    else:
        unit = f"{prefix}-{name}.scope" if prefix else f"{name}.scope"
    if "/" in unit:
        return ""
    slices = _slices(slice_name or "system.slice")
    return "" if slices is None else "/".join((*slices, unit))


def _slices(name: str) -> list[str] | None:
    """``a-b.slice`` lies in ``a.slice``; None when it is no slice."""
    if not name.endswith(".slice") or "/" in name:
        return None
    stem = name.removesuffix(".slice")
    if stem == "-":
        return []
    steps = stem.split("-")
    if not all(steps):
        return None
    return ["-".join(steps[: n + 1]) + ".slice" for n in range(len(steps))]


class _CpuSetFiles(Protocol):
    """What is used of cgroupspy's controller."""

    def get_property(self, filename: str) -> str: ...


@dataclass(frozen=True, slots=True)
class _Node:
    """What cgroupspy's controllers want to know of a cgroup; its own would walk the whole tree."""

    full_path: str


class CgroupReader:
    """Reads cpusets below one root.

    Args:
        root: where the cgroup file systems are mounted.
        proc: the proc file system, for containers whose path is not known.

    Attributes:
        unified: whether cpusets are in a version 2 hierarchy.
    """

    def __init__(self, root: str = "/sys/fs/cgroup", *, proc: str = "/proc") -> None:
        self._root = root
        self._proc = proc
        self.unified = False
        self.available()

    def available(self) -> bool:
        """Whether there are cpusets to read; also looks anew which version they are of."""
        self.unified = os.path.exists(os.path.join(self._root, "cgroup.controllers"))
        return os.path.isdir(self.hierarchy)

    @property
    def hierarchy(self) -> str:
        """Directory that cgroup paths start from."""
        return self._root if self.unified else os.path.join(self._root, "cpuset")

    def observe(self, place: Place) -> Observed | None:
        """Look at one container; None when it has no cgroup (not yet, or not any more).

        Raises:
            OSError: the file system cannot be read at all.
        """
        path = relative_path(place.cgroups_path)
        if path and (found := self._read(path)) is not None:
            return found
        # The runtime's root may be another than ours (a cgroup namespace): ask the kernel.
        path = self._path_of(place.pid) if place.pid > 0 else ""
        return self._read(path) if path else None

    def _read(self, path: str) -> Observed | None:
        directory = os.path.join(self.hierarchy, path)
        try:
            return self._read_v2(directory) if self.unified else self._read_v1(directory)
        except OSError as error:
            if error.errno in _GONE:
                return None
            raise
        except ListFormatError:
            return None  # the kernel writes only lists: this is another file system

    def _read_v2(self, directory: str) -> Observed:
        return Observed(
            cpus=_cpus(_text(f"{directory}/cpuset.cpus")),
            mems=_mems(_text(f"{directory}/cpuset.mems")),
            effective_cpus=_cpus(_text(f"{directory}/cpuset.cpus.effective")),
            effective_mems=_mems(_text(f"{directory}/cpuset.mems.effective")),
        )

    def _read_v1(self, directory: str) -> Observed:
        controller: _CpuSetFiles = _cpuset_controller()(_Node(directory))
        cpus = _cpus(controller.get_property("cpuset.cpus"))
        mems = _mems(controller.get_property("cpuset.mems"))
        return Observed(cpus=cpus, mems=mems, effective_cpus=cpus, effective_mems=mems)

    def _path_of(self, pid: int) -> str:
        """Look up the cgroup of a process, see cgroups(7); empty when it cannot be told."""
        try:
            lines = _text(f"{self._proc}/{pid}/cgroup").splitlines()
        except OSError:
            return ""
        for line in lines:
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if self.unified:
                mine = number == "0" and not controllers
            else:
                mine = "cpuset" in controllers.split(",")
            # Outside of our cgroup namespace it begins with /.. and cannot be reached by us; the
            # root is not a container's.
            if mine and ".." not in path.split("/"):
                return path.strip("/")
        return ""


@functools.cache
def _cpuset_controller() -> type:
    """Return the package's reader of cpusets, imported when the first cgroup v1 is looked at."""
    from cgroupspy.controllers import CpuSetController

    controller: type = CpuSetController
    return controller


def _text(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _READ_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


# Hundreds of containers share a handful of lists.
@functools.lru_cache(maxsize=512)
def _cpus(text: str) -> CPUSet:
    return CPUSet.parse(text)


@functools.lru_cache(maxsize=128)
def _mems(text: str) -> NUMASet:
    return NUMASet.parse(text)


def observe_all(reader: CgroupReader, places: Iterable[tuple[str, Place]]) -> dict[str, Observed]:
    """Look at many containers; those without a cgroup are left out.

    Raises:
        OSError: the file system cannot be read at all.
    """
    found: dict[str, Observed] = {}
    for container_id, place in places:
        observed = reader.observe(place)
        if observed is not None:
            found[container_id] = observed
    return found
