"""A hearing before anything is spent: for whoever came when all places were taken, and before TLS.

Thousands may wait here one after the other, so it costs a descriptor and little else: no stream, no
task, no TLS. Only who has said a whole request (behind TLS: anything at all) is looked at further.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

LONGEST: Final = 4096
"""Bytes of a request; a probe has a tenth of that."""


class EarlyRead:
    """Listens to one connection until it has said enough.

    Args:
        sock: accepted and non-blocking; closed here unless it is handed on.
        tls: what it says cannot be read here.
    """

    def __init__(self, sock: socket.socket, *, tls: bool) -> None:
        self._sock = sock
        self._tls = tls
        self._said = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._heard: Callable[[bytes], object] = _nothing
        self._ended: Callable[[], object] = _nothing

    def begin(
        self, seconds: float, heard: Callable[[bytes], object], ended: Callable[[], object]
    ) -> None:
        """Begin to listen.

        Args:
            seconds: how long.
            heard: called with what was read when it has said enough; owns the socket from then on.
            ended: called when it has not, and the socket is closed.
        """
        self._heard, self._ended = heard, ended
        self._timer = self._loop.call_later(seconds, self.close)
        self._loop.add_reader(self._sock, self._listen)
        self._listen()  # a client that is in earnest has asked by now

    def close(self) -> None:
        """It has had its time."""
        ended = self._ended
        if self._stop():
            self._sock.close()
            ended()

    def _listen(self) -> None:
        try:
            said = self._sock.recv(1, socket.MSG_PEEK) if self._tls else self._sock.recv(LONGEST)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if not said:
            self.close()
        elif self._tls:
            self._hand_on(b"")
        else:
            self._said += said
            if b"\r\n\r\n" in self._said:
                self._hand_on(self._said)
            elif len(self._said) >= LONGEST:
                self.close()

    def _hand_on(self, said: bytes) -> None:
        heard = self._heard
        self._stop()
        heard(said)

    def _stop(self) -> bool:
        """Stop listening; False when that was done already."""
        if self._timer is None:
            return False
        self._timer.cancel()
        self._timer = None
        self._loop.remove_reader(self._sock)
        # Both know the place, which knows us; thousands of such circles are much to collect.
        self._heard, self._ended = _nothing, _nothing
        return True


def _nothing(*_: object) -> None:
    """Nobody is told any more."""
