"""Who works on a runtime, whatever state directory they use: a lock on its NRI socket's directory.

A running agent shares the lock, ``release`` wants it alone. It is flock(2) on the directory itself,
opened for reading: that makes no file, needs no writable mount (the service and the DaemonSet have
none there), means the same inode inside and outside of containers, and ends with its process
however that dies, so there is nothing stale to force. See docs/adr/0033-who-works-on-a-runtime.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Final

from nri_numa.errors import RuntimeBusy

_LOCKS: Final = "/proc/locks"


class RuntimeLock:
    """Our lock on one runtime's socket, which need not be there yet. Nothing here ever waits."""

    def __init__(self, nri_socket: str) -> None:
        self.directory = os.path.dirname(os.path.abspath(nri_socket))
        self._fd = -1

    def share(self) -> bool:
        """Say that an agent works here; again and again, since the directory may come and go.

        False while that cannot be seen: there is no such directory, it may not be opened, or
        another process has the runtime alone.
        """
        try:
            if self._fd >= 0:
                if os.path.samestat(os.fstat(self._fd), os.stat(self.directory)):
                    return True
                self.close()  # a new directory under the old name
            return self._lock(fcntl.LOCK_SH)
        except OSError:
            return False

    def alone(self) -> None:
        """Keep every other away until `close`; without the directory there is nothing to keep.

        Raises:
            RuntimeBusy: an agent works on this runtime, or another release does.
        """
        try:
            taken = self._lock(fcntl.LOCK_EX)
        except OSError:
            return  # an agent that could not open it either cannot be found this way
        if not taken:
            raise RuntimeBusy(self.directory, holder(self.directory))

    def close(self) -> None:
        """Let go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock(self, kind: int) -> bool:
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True


def holder(directory: str, locks: str = _LOCKS) -> int | None:
    """Find the process that has a directory locked, see proc_locks(5).

    None when it is not known: some file systems lock under another device number, and processes
    of other containers are not shown.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = os.stat(directory)
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        with open(locks, encoding="ascii", errors="replace") as file:
            for line in file:
                # 1: FLOCK  ADVISORY  READ 1234 00:19:123 0 EOF; with "->" for those who wait
                words = line.split()
                if words[1] == "FLOCK" and words[5] == wanted and int(words[4]) > 0:
                    return int(words[4])
    return None
