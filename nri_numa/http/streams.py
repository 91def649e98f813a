"""Tells open event streams that the state changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from nri_numa.http.source import AgentView

HEARTBEAT = 15.0
SETTLE = 0.25
"""Seconds in which several changes are told as one."""


class Changes:
    """The event streams; costs nothing while none is open.

    The agent tells of a change in the middle of a request of the runtime, in its own thread: what
    happens there is one flag, and once in a while a byte that wakes our loop.
    """

    def __init__(self, view: AgentView) -> None:
        self._view = view
        self._streams: set[asyncio.Event] = set()
        self._end: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = False

    def __len__(self) -> int:
        return len(self._streams)

    async def stream(self) -> AsyncIterator[bytes]:
        """Pieces of one event stream: where we are, then every change, then a heartbeat."""
        changed = asyncio.Event()
        changed.set()
        self._streams.add(changed)
        self._loop = asyncio.get_running_loop()
        if self._end is None:
            self._end = self._view.subscribe(self._tell)
        try:
            yield b"retry: 2000\n\n"
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                changed.clear()
                yield self._event()
                await asyncio.sleep(SETTLE)
        finally:
            self._streams.discard(changed)
            if not self._streams and self._end is not None:
                self._end()
                self._end = None

    def _tell(self) -> None:
        """Called in the agent's thread."""
        if self._told or self._loop is None:
            return
        self._told = True
        with contextlib.suppress(RuntimeError):  # our loop ended just now
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._told = False
        for changed in self._streams:
            changed.set()

    def _event(self) -> bytes:
        status = self._view.status()
        data = (
            f'{{"serial":{status.serial},"version":"{status.version}",'
            f'"ready":{"true" if status.ready else "false"},'
            f'"notices":{self._view.notice_number()}}}'
        )
        return f"id: {status.serial}\nevent: state\ndata: {data}\n\n".encode()
