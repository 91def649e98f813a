"""Event loops: one that knows how long it kept others waiting, and one that gives way to it.

The first answers the runtime. The second serves HTTP in a thread of the same interpreter; it stands
still while the first one is at work, so that of the interpreter's lock the runtime's requests have
to wait for one small piece at most (docs/adr/0017); and most of the time, however much it is asked
for, so that they seldom have to wait at all (docs/adr/0017).
"""

from __future__ import annotations

import asyncio
import gc
import os
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final, cast

# --- How much of one CPU a thread may have ---

HTTP_CPU_SHARE: Final = 0.2
"""Of one CPU, in the long run. The runtime meets the thread at work in one request of five at most,
and on a machine of two CPUs a client who never stops leaves nine tenths to others."""
HTTP_CPU_BURST_S: Final = 0.05
"""Seconds of CPU time at once after a rest: a scrape of 1,000 containers (2 ms for its text), or
the page with its files and lists, also on a machine that is several times as slow."""
HURRIED_CPU_SHARE: Final = 0.5
"""The same while newcomers stand in line: a probe is found by accepting who stands before it, 0.1
ms for each of a thousand, and the kubelet waits for a second."""
MAX_BUDGET_PAUSE_S: Final = 0.02
"""Seconds of one pause. A probe is accepted, read and answered in some five rounds of the loop: all
its pauses together are a tenth of the second that the kubelet gives it, whatever else is served in
these rounds."""


@dataclass(slots=True)
class CPUBudget:
    """A bucket of CPU time, full at the start.

    What would take longer to pay back than `MAX_BUDGET_PAUSE_S` is forgiven.

    Attributes:
        hurry: whether there is a reason to now.
    """

    hurry: bool = False
    _last_charge: tuple[float, float] | None = None
    _saved: float = 0.0

    def set_hurry(self, hurry: bool) -> None:
        """Say whether there is a reason to hurry now."""
        self.hurry = hurry

    def required_pause_s(self, now: float, used: float) -> float:
        """Seconds to stand still before the next piece of work; 0 while something is saved up.

        ``used`` is CPU time of the thread so far.
        """
        if self._last_charge is None:
            self._last_charge, self._saved = (now, used), HTTP_CPU_BURST_S
        cpu_share = HURRIED_CPU_SHARE if self.hurry else HTTP_CPU_SHARE
        earned = cpu_share * (now - self._last_charge[0])
        spent = used - self._last_charge[1]
        self._last_charge = now, used
        self._saved = min(HTTP_CPU_BURST_S, self._saved + earned) - spent
        self._saved = max(self._saved, -cpu_share * MAX_BUDGET_PAUSE_S)
        return max(0.0, -self._saved / cpu_share)


# --- Time and event loops ---


class Clock:
    """Time, and the loop's next turn; tests have one of their own."""

    # Python's own, so that none of them costs a call more.
    monotonic = staticmethod(time.monotonic)
    """Seconds that only grow."""
    cpu_time = staticmethod(time.thread_time)
    """CPU time of this thread in seconds."""
    time = staticmethod(time.time)
    """Unix time in seconds."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call this when the loop has nothing more urgent."""
        asyncio.get_running_loop().call_soon(function)

    def call_later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call this after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, function)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


TASK_BATCH: Final = 25
"""Deferred tasks done, or cgroups widened, in one go: one to two milliseconds."""


class DeferredTasks:
    """What no request waits for: done in small pieces once the reply has left.

    Log lines keep the ``op`` of the request that they come from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Context, Callable[[], object]]] = deque()
        self._is_scheduled = False

    def add(self, *functions: Callable[[], object]) -> None:
        """Do this when the reply has left; what is added meanwhile has its turn a round later."""
        context = copy_context()
        for function in functions:
            self._waiting.append((context, function))
        if not self._is_scheduled:
            self._schedule()

    def _schedule(self) -> None:
        if self._waiting:
            self._is_scheduled = True
            self._clock.call_soon(self._run_task_batch)

    def _run_task_batch(self) -> None:
        try:
            for _ in range(min(len(self._waiting), TASK_BATCH)):
                context, function = self._waiting.popleft()
                context.run(function)
        finally:
            self._is_scheduled = False
            self._schedule()


class LoopMonitor(selectors.DefaultSelector):
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
            busy_s = self._clock() - self._woke
            if busy_s > self._longest:
                self._longest = busy_s
        self.busy = False
        events = super().select(timeout)
        self._woke = self._clock()
        self.busy = True
        return events

    def current_gap(self) -> float:
        """Seconds that the present round lasts already; 0 while the loop waits."""
        woke = self._woke
        return self._clock() - woke if self.busy and woke is not None else 0.0

    def pop_longest_gap(self) -> float:
        """The longest gap in seconds since this was asked last."""
        gap_s, self._longest = self._longest, 0.0
        return gap_s


def new_monitored_loop(
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[asyncio.SelectorEventLoop, LoopMonitor]:
    """An event loop, and who watches it."""
    watch = LoopMonitor(clock)
    return asyncio.SelectorEventLoop(watch), watch


class YieldingSelector(selectors.DefaultSelector):
    """Finds out what there is to do, and begins with it when the loop of another thread waits.

    After `STUCK` seconds a piece of work is done all the same: a probe may look whether a loop that
    is busy for long is still alive.
    """

    STUCK_AFTER_S: Final = 0.1
    YIELD_PAUSE_S: Final = 0.001
    MIN_GC_OBJECTS: Final = 1000
    MAX_GC_OBJECTS: Final = 10_000
    """New objects from which tidying up pays, and from which most of them are of a large request:
    they live, and looking at them would take long."""

    def __init__(
        self,
        watch: LoopMonitor,
        budget: CPUBudget | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self._watch = watch
        self._share = budget or CPUBudget()
        self._clock, self._used, self._sleep = clock, used, sleep

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As in the base class."""
        # Before it looks: what comes during the pause is served in the next round already.
        self.wait_for_budget()
        events = super().select(timeout)
        self.yield_to_loop()
        self.collect_garbage()
        return events

    def wait_for_budget(self) -> None:
        """Return when this thread may have CPU time again."""
        if pause := self._share.required_pause_s(self._clock(), self._used()):
            self._sleep(pause)

    def yield_to_loop(self) -> None:
        """Return when the other loop waits, or is stuck."""
        deadline: float | None = None
        while self._watch.busy:
            now = self._clock()
            deadline = now + self.STUCK_AFTER_S if deadline is None else deadline
            if now >= deadline:
                return
            self._sleep(self.YIELD_PAUSE_S)

    def collect_garbage(self) -> None:
        """Collect our own garbage while it is little.

        The collector is run by hand, once a second, by the thread that goes first. Connections
        leave circles (every transport of asyncio is one), and those of a thousand connections took
        it 50 ms.
        """
        if self.MIN_GC_OBJECTS <= gc.get_count()[0] < self.MAX_GC_OBJECTS and not self._watch.busy:
            gc.collect(0)


# --- Memory that is not used any more goes back to the kernel ---

MIN_HEAP_GROWTH_BYTES: Final = 2 << 20
"""Bytes of resident memory more than after the last time that make it worth a look."""
MIN_ROUNDS_BETWEEN_RELEASES: Final = 5
"""Rounds between two times at least: a busy node needs again what it gave back."""
_HEAP_RESERVE_BYTES: Final = 1 << 18
"""Bytes left at the end of the heap, for the requests that come next."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Bytes of resident memory; 0 where it is not known."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _find_malloc_trim() -> Callable[[int], object]:
    """The C library's ``malloc_trim(3)``; nothing where it is none of GNU's, or out of reach."""
    try:
        import ctypes

        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = (ctypes.c_size_t,)
    except (ImportError, OSError, AttributeError):
        return lambda kept: None
    return cast(Callable[[int], object], trim)


_trim: Final = _find_malloc_trim()


def release_heap() -> None:
    """Give free pages of the heap back."""
    _trim(_HEAP_RESERVE_BYTES)


class HeapReleaser:
    """Gives memory back after it was needed for a moment: milliseconds for ten megabytes."""

    def __init__(
        self,
        resident: Callable[[], int] = resident_bytes,
        release_heap: Callable[[], object] = release_heap,
    ) -> None:
        self._resident = resident
        self._release_heap = release_heap
        self._least = 0
        self._rest = 0

    def release_if_grown(self) -> None:
        """One round: look whether there is something to give back."""
        if self._rest:
            self._rest -= 1
            return
        size_bytes = self._resident()
        if size_bytes - self._least < MIN_HEAP_GROWTH_BYTES:
            self._least = min(self._least, size_bytes)
            return
        self._release_heap()
        self._least = self._resident()
        self._rest = MIN_ROUNDS_BETWEEN_RELEASES


def collect_generation(round_number: int) -> None:
    """Look for garbage between requests; the older it is, the more seldom, as the collector does.

    The youngest objects are those of one second. Everything takes 20 ms with 1,000 containers.
    """
    gc.collect(2 if round_number % 600 == 0 else 1 if round_number % 10 == 0 else 0)
