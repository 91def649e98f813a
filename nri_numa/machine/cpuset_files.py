"""The files of one cgroup's cpuset, in one shape for both versions.

Version 1 goes through cgroupspy's controller; version 2, which that package does not know, through
a class with the same two methods. See cgroups(7) and Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import functools
import os
from typing import Final, Protocol

import msgspec

_READ_BYTES: Final = 65_536
"""Longer than any list the kernel writes for 8,192 CPUs."""


class CpusetFiles(Protocol):
    """What is used of cgroupspy's controllers."""

    def get_property(self, filename: str) -> str:
        """Text of a file, without white space at its ends."""
        ...

    def set_property(self, filename: str, value: str) -> object:
        """Write a file."""
        ...


class Node(msgspec.Struct, frozen=True):
    """What cgroupspy's controllers want to know of a cgroup; its own would walk the whole tree."""

    full_path: str


class UnifiedCpuset(msgspec.Struct, frozen=True):
    """The cpuset of a cgroup of version 2."""

    node: Node

    def filepath(self, filename: str) -> str:
        """Where a file is."""
        return f"{self.node.full_path}/{filename}"

    def get_property(self, filename: str) -> str:
        """Text of a file, without white space at its ends."""
        return text(self.filepath(filename))

    def set_property(self, filename: str, value: str) -> None:
        """Write a file, in one write as the kernel wants it."""
        fd = os.open(self.filepath(filename), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)


@functools.cache
def v1_controller() -> type:
    """Return the package's files of a cpuset, imported when cgroup v1 is first looked at."""
    from cgroupspy.controllers import CpuSetController

    controller: type = CpuSetController
    return controller


def cpuset_files(directory: str, *, unified: bool) -> CpusetFiles:
    """The files of the cgroup with this directory, of version 2 where ``unified``."""
    files: CpusetFiles = (UnifiedCpuset if unified else v1_controller())(Node(directory))
    return files


def text(path: str) -> str:
    """Text of a small file, without white space at its ends."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _READ_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
