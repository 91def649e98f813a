"""Watch of writes to containers' cpusets with inotify(7), for both versions of cgroups.

It reports writes of programs, and not changes by the kernel itself: a CPU that goes offline, an
ancestor that has fewer CPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Final, Self

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader

_IN_MODIFY: Final = 0x2
_INOTIFY_EVENT_STRUCT: Final = struct.Struct("iIII")
"""struct inotify_event of a file with a watch of its own, which has no name."""
_INOTIFY_READ_BYTES: Final = 65_536
_CPUSET_FILES: Final = ("cpuset.cpus", "cpuset.mems")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class CpusetWatch:
    """Watch of the cpusets of containers; a context manager.

    Args:
        reader: finds their cgroups.

    Attributes:
        fd: readable after a write; negative if nothing can be watched.
        problem: reason why some cpusets are not watched; empty if all are.
    """

    def __init__(self, reader: CgroupReader) -> None:
        self._reader = reader
        self._watches: dict[str, list[int]] = {}
        self._ids: dict[int, str] = {}
        self.problem = ""
        self.fd: int = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            self.problem = f"{os.strerror(ctypes.get_errno())} (fs.inotify.max_user_instances)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def watch_containers(self, cgroups: Mapping[str, CgroupPlace]) -> None:
        """Watch these containers, by id, and no others."""
        if self.fd < 0:
            return
        # The kernel does not remove the watch of a removed cgroup.
        for container_id in self._watches.keys() - cgroups.keys():
            for watch in self._watches.pop(container_id):
                _LIBC.inotify_rm_watch(self.fd, watch)
                self._ids.pop(watch, None)
        for container_id in cgroups.keys() - self._watches.keys():
            directory = self._reader.directory_of(cgroups[container_id])
            watches = self._add_watch(directory) if directory else []
            self._watches[container_id] = watches
            self._ids.update(dict.fromkeys(watches, container_id))

    def pop_written(self) -> set[str]:
        """Return the containers whose cpuset was written since the last call, also by the agent."""
        container_ids: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                for watch, *_ in _INOTIFY_EVENT_STRUCT.iter_unpack(
                    os.read(self.fd, _INOTIFY_READ_BYTES)
                ):
                    if watch in self._ids:
                        container_ids.add(self._ids[watch])
        return container_ids

    def _add_watch(self, directory: str) -> list[int]:
        watches = []
        for name in _CPUSET_FILES:
            path = os.fsencode(f"{directory}/{name}")
            watch = _LIBC.inotify_add_watch(self.fd, path, _IN_MODIFY)
            if watch >= 0:
                watches.append(watch)
            elif os.path.exists(path):
                self.problem = f"{os.strerror(ctypes.get_errno())} (fs.inotify.max_user_watches)"
        return watches
