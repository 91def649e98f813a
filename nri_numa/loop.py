"""The event loop, which knows how long it kept others waiting."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable


class GapWatch(selectors.DefaultSelector):
    """Waits for sockets, and notes how long the loop was busy in between.

    The time from one return of ``select`` to its next call is what a request that came in just
    then had to wait for. A timer that looks whether it is late would miss all gaps but those that
    happen to be under way when it is due.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._longest = 0.0
        self._woke: float | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in the base class."""
        if self._woke is not None:
            busy = self._clock() - self._woke
            if busy > self._longest:
                self._longest = busy
        ready = super().select(timeout)
        self._woke = self._clock()
        return ready

    def take(self) -> float:
        """The longest gap in seconds since this was asked last."""
        longest, self._longest = self._longest, 0.0
        return longest


def watched_loop(
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[asyncio.SelectorEventLoop, GapWatch]:
    """An event loop, and who watches it."""
    watch = GapWatch(clock)
    return asyncio.SelectorEventLoop(watch), watch
