"""Which containers' cpusets were written: inotify(7) reports it of both versions of cgroups.

It reports what programs write, and not what the kernel changes by itself: a CPU that goes offline,
a cgroup above that leaves less.
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
"""struct inotify_event of a file that is watched itself: it has no name."""
_READ_BYTES: Final = 65_536
_CPUSET_FILES: Final = ("cpuset.cpus", "cpuset.mems")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class CpusetWatch:
    """Watches the cpusets of containers until it is left as a context.

    Args:
        reader: knows where cgroups are.

    Attributes:
        fd: is readable when something was written; negative where nothing can be watched.
        problem: why some are not watched; empty where all are.
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
        """It watches already."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        if self.fd >= 0:
            os.close(self.fd)

    def watch_containers(self, places: Mapping[str, CgroupPlace]) -> None:
        """Watch these, by container id, and no others."""
        if self.fd < 0:
            return
        # The kernel keeps the watch of a cgroup that was removed.
        for container_id in self._watches.keys() - places.keys():
            for watch in self._watches.pop(container_id):
                _LIBC.inotify_rm_watch(self.fd, watch)
                self._ids.pop(watch, None)
        for container_id in places.keys() - self._watches.keys():
            directory = self._reader.directory_of(places[container_id])
            watches = self._add_watch(directory) if directory else []
            self._watches[container_id] = watches
            self._ids.update(dict.fromkeys(watches, container_id))

    def pop_written(self) -> set[str]:
        """Containers whose cpuset was written since the last call, by us as well."""
        found: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                for watch, *_ in _INOTIFY_EVENT_STRUCT.iter_unpack(os.read(self.fd, _READ_BYTES)):
                    if watch in self._ids:
                        found.add(self._ids[watch])
        return found

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
