"""Writes lines for somebody who may have stopped reading.

A pipe whose reader stands still blocks whoever writes to it. Here what cannot be written at once
waits, up to a limit; beyond it lines are dropped and counted.

The descriptor is often shared (containerd and its plugins, a shell and its jobs), and O_NONBLOCK
belongs to the open file that all of them share: set here, it would break the others. So a pipe or a
terminal is opened once more by its name in /proc, which makes an open file of our own, and a socket
is sent to with MSG_DONTWAIT.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TextIO

LIMIT: Final = 512 * 1024
"""Bytes that wait at most."""
PATIENCE: Final = 5.0
"""Seconds that a program at its start, or a command, waits once for a reader that stands still."""


class Outlet:
    """Where lines go.

    Args:
        stream: written to by its descriptor, if it has one.

    Attributes:
        patient: wait for the reader; taken back when it needs longer than `PATIENCE`.
        dropped: lines given up so far.
    """

    def __init__(self, stream: TextIO) -> None:
        self.patient = True
        self.dropped = 0
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._stream: TextIO | None = None
        self._close: Callable[[], None] = _nothing
        self._poll: select.poll | None = None
        try:
            descriptor = stream.fileno()
            stream.flush()
            mode = os.fstat(descriptor).st_mode
        except (OSError, ValueError, AttributeError):
            self._stream = stream
            return
        self._write = self._writer(descriptor, mode)

    def _writer(self, descriptor: int, mode: int) -> Callable[[bytes], int]:
        """What writes some of the bytes given, and raises BlockingIOError when it can none."""
        if stat.S_ISSOCK(mode):
            sock = socket.socket(fileno=os.dup(descriptor))
            self._close = sock.close
            self._poll = _poll(sock.fileno())
            return lambda data: sock.send(data, socket.MSG_DONTWAIT)
        if not (stat.S_ISFIFO(mode) or os.isatty(descriptor)):
            return partial(os.write, descriptor)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            own = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:
            # Somebody else's pipe, or no /proc. Room for this much is there when poll(2) says so,
            # and only another writer of the same moment could take it.
            self._poll = poll = _poll(descriptor)

            def write(data: bytes) -> int:
                if not poll.poll(0):
                    raise BlockingIOError
                return os.write(descriptor, data[: select.PIPE_BUF])

            return write
        self._close = lambda: os.close(own)
        self._poll = _poll(own)
        return partial(os.write, own)

    @property
    def blocked(self) -> bool:
        """Whether lines wait for the reader."""
        return bool(self._waiting)

    def put(self, line: str) -> None:
        """Write a line, or keep it, or drop it.

        Raises:
            OSError, ValueError: nobody will ever read it.
        """
        if self._stream is not None:
            self._stream.write(line)
            self._stream.flush()
            return
        data = line.encode(errors="backslashreplace")
        size = len(data)
        if self._size + size > LIMIT:
            self.dropped += 1
            return
        if not self._waiting and not self.patient:
            # Nothing waits before it, and nobody waits for the reader: so it is as good as always.
            try:
                written = self._write(data)
            except BlockingIOError:
                written = 0
            except OSError:
                self.dropped += 1
                raise
            if written == size:
                return
            data = data[written:]
        self._waiting.append(data)
        self._size += len(data)
        self.drain(PATIENCE if self.patient else 0.0)
        self.patient = self.patient and not self._waiting

    def drain(self, seconds: float = 0.0) -> None:
        """Write what waits, as far as the reader takes it within this time.

        Raises:
            OSError: nobody will ever read it; it is given up.
        """
        end = time.monotonic() + seconds
        while self._waiting:
            data = self._waiting[0]
            try:
                written = self._write(data)
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0 or self._poll is None:
                    return
                self._poll.poll(left * 1000)
                continue
            except OSError:
                self.dropped += len(self._waiting)
                self._waiting.clear()
                self._size = 0
                raise
            self._size -= written
            if written < len(data):
                self._waiting[0] = data[written:]
            else:
                self._waiting.popleft()

    def close(self) -> None:
        """Give back what was opened; the stream itself stays open."""
        self._close()
        self._close = _nothing


def _poll(descriptor: int) -> select.poll:
    made = select.poll()
    with contextlib.suppress(OSError):
        made.register(descriptor, select.POLLOUT)
    return made


def _nothing() -> None:
    """Nothing to close."""
