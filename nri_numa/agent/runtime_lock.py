"""Lock on a runtime: one agent for each NRI socket, whatever its state directory is.

An agent holds it from before it registers, ``release`` until it is done: with two nri-numa plugins
the runtime fails every container, since both set the same annotation. It is flock(2) on the
directory of the socket, opened for reading: that creates no file, needs no writable mount (the
service and the DaemonSet have none there), is the same inode inside and outside of containers, and
ends with its process, so it is never stale. See
docs/adr/0033-who-works-on-a-runtime.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from nri_numa.errors import RuntimeBusy

_PROC_LOCKS_PATH: Final = "/proc/locks"


class RuntimeLock:
    """Lock on one runtime's socket, which need not exist yet. Never blocks."""

    def __init__(self, nri_socket: str) -> None:
        self.directory = os.path.dirname(os.path.abspath(nri_socket))
        self._fd = -1

    def acquire(self) -> None:
        """Lock until `close`; call it periodically, since the directory may be replaced.

        Without a directory that can be opened, this does nothing.

        Raises:
            RuntimeBusy: an agent works on this runtime, or a release does.
        """
        try:
            if self._fd >= 0:
                if os.path.samestat(os.fstat(self._fd), os.stat(self.directory)):
                    return
                self.close()  # a new directory under the old name
            self._lock_directory()
        except BlockingIOError:
            pid = find_lock_holder(self.directory)
            raise RuntimeBusy(self.directory, pid, _agent_pod_of_pid(pid)) from None
        except OSError:
            return

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock_directory(self) -> None:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd


def find_lock_holder(directory: str, locks: str = _PROC_LOCKS_PATH) -> int | None:
    """Find the process that has a directory or file locked, see proc_locks(5).

    None if unknown: some file systems lock under another device number, and processes of other
    containers are not listed.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = os.stat(directory)
        inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with open(locks, encoding="ascii", errors="replace") as file:
            for line in file:
                # 1: FLOCK  ADVISORY  READ 1234 00:19:123 0 EOF; with "->" for those who wait
                fields = line.split()
                if fields[1] == "FLOCK" and fields[5] == inode and int(fields[4]) > 0:
                    return int(fields[4])
    return None


def _agent_pod_of_pid(pid: int | None) -> str:
    """Read the pod of an agent from its environment; empty if unknown."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        environment = dict(entry.partition("=")[::2] for entry in text.split("\0"))
        return "/".join(filter(None, map(environment.get, ("POD_NAMESPACE", "POD_NAME"))))
    return ""
