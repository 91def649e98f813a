"""The kubelet's state files on disk: looked at often, read when they changed.

The kubelet writes a pod's grants before it creates the pod's first container. So whoever decides
about a container looks at the files first, at the cost of two ``stat`` calls; what was read is
good until a file is replaced.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from nri_numa.engine.values.workload import NO_GRANTS, KubeletGrants
from nri_numa.kubelet.state_documents import (
    CPUState,
    MemoryState,
    UnknownState,
    cpu_state,
    grants,
    memory_state,
)
from nri_numa.machine.cpuset import CPUSet, NUMASet

# --- A file of the kubelet, read whole; whatever else is in its place makes nobody wait -----------


MAX_BYTES: Final = 1 << 20
"""Sixty bytes a container and a hundred and fifty a block of memory: ten thousand containers. A
configuration has some thousand."""

Signature = tuple[int, int, int, int]


def signature(found: os.stat_result) -> Signature:
    """What tells a file from another one of its name, and from itself when it was written."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read(path: str) -> tuple[bytes, Signature]:
    """The whole file, and what tells it from another one.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer than `MAX_BYTES`.
    """
    # A pipe or a device in its place must not make anybody wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("is no regular file")
        if found.st_size > MAX_BYTES:
            raise OSError(f"has {found.st_size} bytes, expected at most {MAX_BYTES}")
        return file.read(MAX_BYTES), signature(found)


NAMES: Final = {"cpu": "cpu_manager_state", "memory": "memory_manager_state"}


class StateFiles:
    """What the kubelet granted, as its files say now.

    A file that is not there grants nothing: an operator who changes a policy removes it. One that
    cannot be read or understood changes nothing: what it said before still holds.

    Attributes:
        grants: as last read; another object when something changed.
        problems: sentences about what is wrong with the files, by file or subject.
    """

    def __init__(self, directory: str) -> None:
        """Know the directory; nothing is read yet.

        Args:
            directory: the kubelet's root directory.
        """
        self.directory = directory
        self.grants: KubeletGrants = NO_GRANTS
        self.problems: tuple[str, ...] = ()
        self._seen: dict[str, Signature | None] = {}
        self._cpu: CPUState | None = None
        self._memory: MemoryState | None = None
        self._machine: tuple[CPUSet, NUMASet] | None = None
        self._unread: dict[str, str] = {}

    def path(self, manager: str) -> str:
        """Of the state file of the ``cpu`` or ``memory`` manager."""
        return os.path.join(self.directory, NAMES[manager])

    def look(self, cpus: CPUSet, numa_nodes: NUMASet) -> bool:
        """Read what changed since the last look.

        Args:
            cpus: all CPUs that the machine can have.
            numa_nodes: all NUMA nodes that it has.

        Returns:
            Whether anything did: `grants`, or `problems`.
        """
        changed = self._machine != (cpus, numa_nodes)
        for manager in NAMES:
            changed |= self._look_at(manager)
        if not changed:
            return False
        self._machine = cpus, numa_nodes
        before = self.grants, self.problems
        made, odd = grants(self._cpu, self._memory, cpus, numa_nodes, self.grants)
        if made != self.grants:
            self.grants = made
        self.problems = (*self._unread.values(), *odd)
        return before != (self.grants, self.problems)

    def _look_at(self, manager: str) -> bool:
        """Whether one file changed; it is read then."""
        path = self.path(manager)
        before = self._seen.get(manager, ())
        try:
            if signature(os.stat(path)) == before:
                return False
            data, self._seen[manager] = read(path)
            self._keep(manager, data)
        except FileNotFoundError:
            self._seen[manager] = None
            self._keep(manager, None)
            return before is not None
        except OSError as error:
            self._seen.pop(manager, None)  # it may be readable as it is, later
            return self._unreadable(manager, f"cannot be read: {error.strerror or error}")
        except UnknownState as error:
            return self._unreadable(manager, str(error))
        return True

    def _keep(self, manager: str, data: bytes | None) -> None:
        if manager == "cpu":
            self._cpu = None if data is None else cpu_state(data)
        else:
            self._memory = None if data is None else memory_state(data)
        self._unread.pop(manager, None)

    def _unreadable(self, manager: str, what: str) -> bool:
        sentence = f"{self.path(manager)}: {what}; what it said before still holds"
        if self._unread.get(manager) == sentence:
            return False
        self._unread[manager] = sentence
        return True
