"""Event loops: one that knows how long it kept others waiting, and one that gives way to it.

The first answers the runtime. The second serves HTTP in a thread of the same interpreter; it stands
still while the first one is at work, so that of the interpreter's lock the runtime's requests have
to wait for one small piece at most (docs/adr/0017); and most of the time, however much it is asked
for, so that they seldom have to wait at all (docs/adr/0017).
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import time
from collections.abc import Callable
from typing import Final

from nri_numa.node.cpu_share import CPUShare


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
        self.busy = False
        """Whether the loop is at work, and does not wait for something to do."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in the base class."""
        if self._woke is not None:
            busy = self._clock() - self._woke
            if busy > self._longest:
                self._longest = busy
        self.busy = False
        ready = super().select(timeout)
        self._woke = self._clock()
        self.busy = True
        return ready

    def busy_for(self) -> float:
        """Seconds that the present round lasts already; 0 while the loop waits."""
        woke = self._woke
        return self._clock() - woke if self.busy and woke is not None else 0.0

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


class Courtesy:
    """Lets one thread stand back while the loop of another is at work.

    Args:
        watch: of the loop that goes first.
        longest: seconds after which a piece of work is done all the same: somebody may ask
            whether a loop that is busy for long is still alive.
        share: what the thread may have of one CPU.
        clock: seconds that only grow.
        used: CPU time of the thread that asks, in seconds.
        sleep: stands still for so many seconds.
    """

    PAUSE: Final = 0.001
    UNTIDY: Final = 1000
    NOT_OURS: Final = 10_000
    """New objects from which tidying up pays, and from which most of them are of a large request:
    they live, and looking at them would take long."""

    def __init__(
        self,
        watch: GapWatch,
        longest: float = 0.1,
        *,
        share: CPUShare | None = None,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._watch = watch
        self._longest = longest
        self._share = share or CPUShare()
        self._clock, self._used, self._sleep = clock, used, sleep

    def rest(self) -> None:
        """Return when this thread may have CPU time again."""
        if pause := self._share.pause(self._clock(), self._used()):
            self._sleep(pause)

    def give_way(self) -> None:
        """Return when the other loop waits, or after ``longest``."""
        end: float | None = None
        while self._watch.busy:
            now = self._clock()
            end = now + self._longest if end is None else end
            if now >= end:
                return
            self._sleep(self.PAUSE)

    def tidy_up(self) -> None:
        """Collect our own garbage while it is little.

        The collector is run by hand, once a second, by the thread that goes first. Connections
        leave circles (every transport of asyncio is one), and those of a thousand connections took
        it 50 ms.
        """
        if self.UNTIDY <= gc.get_count()[0] < self.NOT_OURS and not self._watch.busy:
            gc.collect(0)


class CourteousSelector(selectors.DefaultSelector):
    """Finds out what there is to do, and begins with it when the other loop waits."""

    def __init__(self, courtesy: Courtesy) -> None:
        super().__init__()
        self._courtesy = courtesy

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in the base class."""
        # Before it looks: whoever comes during the pause is served in the next round already.
        self._courtesy.rest()
        ready = super().select(timeout)
        self._courtesy.give_way()
        self._courtesy.tidy_up()
        return ready
