"""Event loops: one that measures its gaps, and one that yields to it.

The first answers the runtime. The second serves HTTP in a thread of the same interpreter. It pauses
while the first one is busy, so a request of the runtime waits for the interpreter's lock only for
one small step; and it pauses most of the time under load, so requests seldom wait (docs/adr/0017).
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

# --- CPU budget of a thread ---

HTTP_CPU_SHARE: Final = 0.2
"""Part of one CPU, in the long run. At most one request of five finds the thread busy, and on a
machine of two CPUs a client who never stops leaves nine tenths to others."""
HTTP_CPU_BURST_S: Final = 0.05
"""Seconds of CPU time in a burst: a scrape of 1,000 containers (2 ms for its text), or the page
with its files and lists, also on a machine that is several times as slow."""
HURRIED_CPU_SHARE: Final = 0.5
"""The same while new connections queue: a probe is reached by accepting those before it, 0.1 ms for
each of a thousand, and the kubelet waits for a second."""
MAX_BUDGET_PAUSE_S: Final = 0.02
"""Seconds of one pause. A probe is accepted, read and answered in some five rounds of the loop: all
its pauses together are a tenth of the second that the kubelet gives it, whatever else is served in
these rounds."""


@dataclass(slots=True)
class CPUBudget:
    """A bucket of CPU time, full at the start.

    Debt that would need a longer pause than `MAX_BUDGET_PAUSE_S` is dropped.

    Attributes:
        hurry: True while new connections queue.
    """

    hurry: bool = False
    _last_charge: tuple[float, float] | None = None
    _saved: float = 0.0

    def set_hurry(self, hurry: bool) -> None:
        """Set `hurry`."""
        self.hurry = hurry

    def required_pause_s(self, time_s: float, used: float) -> float:
        """Return the seconds to pause before the next step; 0 while the bucket is not empty.

        ``used`` is CPU time of the thread so far.
        """
        if self._last_charge is None:
            self._last_charge, self._saved = (time_s, used), HTTP_CPU_BURST_S
        cpu_share = HURRIED_CPU_SHARE if self.hurry else HTTP_CPU_SHARE
        earned = cpu_share * (time_s - self._last_charge[0])
        spent = used - self._last_charge[1]
        self._last_charge = time_s, used
        self._saved = min(HTTP_CPU_BURST_S, self._saved + earned) - spent
        self._saved = max(self._saved, -cpu_share * MAX_BUDGET_PAUSE_S)
        return max(0.0, -self._saved / cpu_share)


# --- Time and event loops ---


class Clock:
    """Time, and the loop's next turn; tests replace it."""

    # Python's own functions, without the cost of another call.
    monotonic = staticmethod(time.monotonic)
    """Seconds that only grow."""
    cpu_time = staticmethod(time.thread_time)
    """CPU time of this thread in seconds."""
    time = staticmethod(time.time)
    """Unix time in seconds."""

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` in the loop's next round."""
        asyncio.get_running_loop().call_soon(function)

    def call_later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call ``function`` after ``seconds``."""
        asyncio.get_running_loop().call_later(seconds, function)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


TASK_BATCH: Final = 25
"""Deferred tasks done, or cgroups widened, in one go: one to two milliseconds."""


class DeferredTasks:
    """Tasks that no request waits for: done in small batches after the reply was sent.

    Log lines keep the ``op`` of the request that they come from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[tuple[Context, Callable[[], object]]] = deque()
        self._is_scheduled = False

    def add(self, *functions: Callable[[], object]) -> None:
        """Run these after the reply was sent; tasks added meanwhile run a round later."""
        context = copy_context()
        for function in functions:
            self._waiting.append((context, function))
        if not self._is_scheduled:
            self._schedule_batch()

    def _schedule_batch(self) -> None:
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
            self._schedule_batch()


class LoopMonitor(selectors.DefaultSelector):
    """Waits for sockets, and measures how long the loop is busy in between.

    A request waits at most for the time from one return of ``select`` to its next call. A timer
    that checks if it is late would miss all gaps except those that last when it is due.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._longest = 0.0
        self._woke: float | None = None
        self.busy = False
        """True while the loop is busy and does not wait."""

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
        """Return the seconds that the current round has lasted; 0 while the loop waits."""
        woke = self._woke
        return self._clock() - woke if self.busy and woke is not None else 0.0

    def pop_longest_gap(self) -> float:
        """Return the longest gap in seconds since the last call."""
        gap_s, self._longest = self._longest, 0.0
        return gap_s


def new_monitored_loop(
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[asyncio.SelectorEventLoop, LoopMonitor]:
    """Return an event loop and its monitor."""
    watch = LoopMonitor(clock)
    return asyncio.SelectorEventLoop(watch), watch


class YieldingSelector(selectors.DefaultSelector):
    """Waits for sockets, and returns them once the loop of another thread is idle.

    After `STUCK_AFTER_S` seconds it returns in any case: a probe must be able to check if a busy
    loop is still alive.
    """

    STUCK_AFTER_S: Final = 0.1
    YIELD_PAUSE_S: Final = 0.001
    MIN_GC_OBJECTS: Final = 1000
    MAX_GC_OBJECTS: Final = 10_000
    """New objects above which a collection is worthwhile, and above which most belong to a large
    request: they are alive, and visiting them would take long."""

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
        # Before the call, so events that arrive during the pause are served in this round.
        self.wait_for_budget()
        events = super().select(timeout)
        self.yield_to_loop()
        self.collect_garbage()
        return events

    def wait_for_budget(self) -> None:
        """Return when this thread may use CPU time again."""
        if pause := self._share.required_pause_s(self._clock(), self._used()):
            self._sleep(pause)

    def yield_to_loop(self) -> None:
        """Return when the other loop is idle, or stuck."""
        deadline: float | None = None
        while self._watch.busy:
            time_s = self._clock()
            deadline = time_s + self.STUCK_AFTER_S if deadline is None else deadline
            if time_s >= deadline:
                return
            self._sleep(self.YIELD_PAUSE_S)

    def collect_garbage(self) -> None:
        """Collect this thread's garbage while it is little.

        The agent's thread runs the collector once a second. Connections leave cycles (every
        transport of asyncio is one), and those of a thousand connections took it 50 ms.
        """
        if self.MIN_GC_OBJECTS <= gc.get_count()[0] < self.MAX_GC_OBJECTS and not self._watch.busy:
            gc.collect(0)


# --- Return of unused memory to the kernel ---

MIN_HEAP_GROWTH_BYTES: Final = 2 << 20
"""Growth of resident memory, in bytes, above which the heap is released."""
MIN_ROUNDS_BETWEEN_RELEASES: Final = 5
"""Minimum rounds between two releases: a busy node soon needs the memory again."""
_HEAP_RESERVE_BYTES: Final = 1 << 18
"""Bytes left at the end of the heap, for the requests that come next."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Read the bytes of resident memory; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _find_malloc_trim() -> Callable[[int], object]:
    """Find the C library's ``malloc_trim(3)``; a no-op if it is missing."""
    try:
        import ctypes

        trim = ctypes.CDLL(None).malloc_trim
        trim.argtypes = (ctypes.c_size_t,)
    except (ImportError, OSError, AttributeError):
        return lambda kept: None
    return cast(Callable[[int], object], trim)


_trim: Final = _find_malloc_trim()


def release_heap() -> None:
    """Return free pages of the heap to the kernel."""
    _trim(_HEAP_RESERVE_BYTES)


class HeapReleaser:
    """Releases memory after a peak; takes milliseconds for ten megabytes."""

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
        """Release the heap if it has grown; called once a round."""
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
    """Collect garbage between requests, older generations less often.

    The youngest objects are one second old. A full collection takes 20 ms with 1,000 containers.
    """
    gc.collect(2 if round_number % 600 == 0 else 1 if round_number % 10 == 0 else 0)
