"""The event loop: its own gaps, what its thread may have of one CPU, and memory that goes back."""

import asyncio
import gc
import selectors
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine

import pytest

from nri_numa.agent.loop import (
    MIN_HEAP_GROWTH_BYTES,
    MIN_ROUNDS_BETWEEN_RELEASES,
    CPUBudget,
    HeapReleaser,
    LoopMonitor,
    YieldingSelector,
    new_monitored_loop,
    release_heap,
    resident_bytes,
)


def test_a_gap_is_seen_whenever_it_happens_and_told_once() -> None:
    """A callback that took long is known, whatever timers there are."""
    now = [0.0]
    loop, watch = new_monitored_loop(lambda: now[0])

    async def work() -> list[float]:
        seen = []
        for busy in (0.5, 2.0, 1.0, 0.0):
            now[0] += busy
            await asyncio.sleep(0)
            if busy != 2.0:
                seen.append(watch.pop_longest_gap())
        return seen

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(work()) == [0.5, 2.0, 0.0]


def test_it_knows_whether_it_is_at_work_and_for_how_long() -> None:
    now = [0.0]
    loop, watch = new_monitored_loop(lambda: now[0])
    assert (watch.busy, watch.current_gap()) == (False, 0.0)

    async def work() -> tuple[bool, float]:
        await asyncio.sleep(0)
        now[0] += 3.0
        return watch.busy, watch.current_gap()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(work()) == (True, 3.0)


def test_another_thread_stands_back_while_the_loop_is_at_work() -> None:
    """Nothing that it finds to do is begun meanwhile; afterwards it goes on."""
    watch = LoopMonitor()
    selector = YieldingSelector(watch)
    selector.STUCK_AFTER_S = 60.0  # no machine is that slow
    other = asyncio.SelectorEventLoop(selector)
    done = threading.Event()
    watch.busy = True
    thread = threading.Thread(target=other.run_forever)
    thread.start()
    other.call_soon_threadsafe(done.set)
    assert not done.wait(0.1)
    watch.busy = False
    assert done.wait(30)
    other.call_soon_threadsafe(other.stop)
    thread.join(30)
    other.close()


class Clocks:
    """Time that passes when somebody stands still, and CPU time that is told."""

    def __init__(self) -> None:
        self.now, self.used = 0.0, 0.0
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.meanwhile()

    def courtesy(self, watch: LoopMonitor | None = None) -> YieldingSelector:
        return YieldingSelector(
            watch or LoopMonitor(), clock=lambda: self.now, used=lambda: self.used, sleep=self.sleep
        )

    def run(self, work: Coroutine[None, None, None]) -> None:
        loop = asyncio.SelectorEventLoop(self.courtesy())
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work)


def test_it_does_not_stand_back_for_ever() -> None:
    """Somebody may ask whether a loop that is stuck still lives."""
    clocks, watch = Clocks(), LoopMonitor()
    watch.busy = True
    clocks.courtesy(watch).yield_to_loop()
    assert clocks.now == pytest.approx(0.1, abs=0.002)
    clocks.courtesy(watch).yield_to_loop()
    assert clocks.now == pytest.approx(0.2, abs=0.004)


def test_a_loop_that_always_has_work_stands_still_most_of_the_time() -> None:
    """One second of work at a fifth of a CPU, less what was saved up."""
    clocks = Clocks()

    async def work() -> None:
        for _ in range(1000):
            clocks.work(0.001)
            await asyncio.sleep(0)

    clocks.run(work())
    assert clocks.now == pytest.approx(4.75, abs=0.02)


def test_time_for_which_it_gave_way_is_saved_up() -> None:
    """Where the runtime was busy meanwhile, it does not stand still once more for nobody."""
    clocks, watch = Clocks(), LoopMonitor()
    courtesy = clocks.courtesy(watch)
    courtesy.wait_for_budget()
    clocks.work(0.049)
    courtesy.wait_for_budget()
    watch.busy = True
    courtesy.yield_to_loop()
    clocks.pauses.clear()
    clocks.work(0.01)
    courtesy.wait_for_budget()
    assert clocks.pauses == []


def test_who_comes_while_it_stands_still_is_served_next() -> None:
    """A probe waits for one pause, not for two."""
    clocks = Clocks()
    ours, theirs = socket.socketpair()
    with ours, theirs, clocks.courtesy() as selector:
        selector.register(ours, selectors.EVENT_READ)
        assert selector.select(0) == []
        clocks.work(1.0)
        clocks.meanwhile = lambda: theirs.sendall(b"GET")
        assert [key.fileobj for key, _ in selector.select(0)] == [ours]
        assert len(clocks.pauses) == 1


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_the_other_thread_leaves_no_garbage_to_the_one_that_goes_first() -> None:
    """Connections leave circles, which with the collector off would wait for the first loop."""
    alive: set[int] = set()

    async def work() -> int:
        for n in range(20_000):
            alive.add(n)
            weakref.finalize(Circle(), alive.discard, n)
            if n % 10 == 0:
                await asyncio.sleep(0)
        return len(alive)

    watch = LoopMonitor()
    gc.disable()
    try:
        selector = YieldingSelector(watch)
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            assert runner.run(work()) < 2000
    finally:
        gc.enable()


def test_the_garbage_of_a_large_request_is_left_alone() -> None:
    """Its objects are alive, and looking at all of them would hold it up."""
    courtesy = YieldingSelector(LoopMonitor())
    gc.collect()
    gc.disable()
    try:
        before = gc.get_stats()[0]["collections"]
        kept = [Circle() for _ in range(YieldingSelector.MAX_GC_OBJECTS + 1000)]
        courtesy.collect_garbage()
        assert gc.get_stats()[0]["collections"] == before
        del kept
    finally:
        gc.enable()


# --- what a thread may have of one CPU ------------------------------------------------------------


def test_what_was_saved_up_is_used_at_once() -> None:
    """An ordinary scrape after seconds of rest is not interrupted."""
    share = CPUBudget()
    assert [share.required_pause_s(0.0, n / 100) for n in range(5)] == [0.0] * 5
    assert share.required_pause_s(0.0, 0.051) == pytest.approx(0.005)


def test_a_long_rest_saves_up_no_more_than_a_short_one() -> None:
    share = CPUBudget()
    share.required_pause_s(0.0, 0.0)
    assert share.required_pause_s(3600.0, 0.05) == 0.0
    assert share.required_pause_s(3600.0, 0.052) == pytest.approx(0.01)


def test_after_a_long_piece_it_stands_still_once_and_not_for_long() -> None:
    """An import, or a round with a thousand clients: a probe that comes now has a second."""
    share = CPUBudget()
    share.required_pause_s(0.0, 0.0)
    assert share.required_pause_s(3.0, 3.0) == pytest.approx(0.02)
    assert share.required_pause_s(3.02, 3.0) == pytest.approx(0.0)
    assert share.required_pause_s(3.02, 3.001) == pytest.approx(0.005)


def test_whoever_hurries_gets_more_until_there_is_no_reason_any_more() -> None:
    share = CPUBudget()
    assert share.required_pause_s(0.0, 0.0) == 0.0
    share.hurry = True
    assert share.required_pause_s(0.0, 0.052) == pytest.approx(0.004)
    share.hurry = False
    assert share.required_pause_s(0.0, 0.052) == pytest.approx(0.01)


# --- memory that was needed for a moment goes back ------------------------------------------------


MIB = 1 << 20


class Process:
    """Holds some memory, and some that it does not need."""

    def __init__(self, used: int, free: int = 0) -> None:
        self.used, self.free, self.given = used, free, 0
        self.trim = HeapReleaser(lambda: self.used + self.free, self.give_back)

    def give_back(self) -> None:
        self.given += 1
        self.free = 0

    def rounds(self, number: int) -> None:
        for _ in range(number):
            self.trim.release_if_grown()


def test_a_quiet_process_and_a_little_growth_are_left_alone() -> None:
    node = Process(40 * MIB)
    node.rounds(1)
    node.free = MIN_HEAP_GROWTH_BYTES - 1
    node.rounds(100)
    assert node.given == 1


def test_growth_counts_from_the_least_that_was_seen() -> None:
    node = Process(40 * MIB, free=3 * MIB)
    node.rounds(MIN_ROUNDS_BETWEEN_RELEASES + 1)
    node.used = 30 * MIB  # containers are gone
    node.rounds(1)
    node.free = MIN_HEAP_GROWTH_BYTES
    node.rounds(1)
    assert node.given == 2


def test_the_real_thing_works_on_this_machine() -> None:
    before = resident_bytes()
    assert before > MIB
    release_heap()
    assert resident_bytes() > MIB
