"""An event loop whose time passes when a test says so, and then as fast as its work is done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

STANDSTILL_LIMIT_S = 60.0
"""Real seconds in which a socket has to bring something while no time passes."""
UNTIL_LIMIT_S = 600.0
"""Seconds of the loop within which what `until` waits for must come."""
UNTIL_INTERVAL_S = 0.05
LEAST_STEP_S = 0.001
"""Enough for everything that waits for no timer."""


class _SteppedSelector(selectors.DefaultSelector):
    """Lets time pass where a real one would wait for a timer."""

    loop: SteppedLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is not None and self.loop.is_stepping:
            self.loop.now += timeout
            return []
        events = super().select(STANDSTILL_LIMIT_S)
        assert events, "no time passes, and nothing comes"
        return events


class _InlineExecutor(ThreadPoolExecutor):
    """Does in the loop's thread what is meant for another one: time does not run away from it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class SteppedLoop(asyncio.SelectorEventLoop):
    """Sockets and tasks are real; timers fire only within `step` and `until`."""

    def __init__(self) -> None:
        self.now, self.is_stepping = 0.0, False
        selector = _SteppedSelector()
        selector.loop = self
        super().__init__(selector)
        self.set_default_executor(_InlineExecutor())

    def time(self) -> float:
        return self.now


def pytest_asyncio_loop_factories(config: object, item: object) -> dict[str, type[SteppedLoop]]:
    """The hook of pytest-asyncio, which a room's conftest imports."""
    return {"stepped": SteppedLoop}


async def step(seconds: float = LEAST_STEP_S) -> None:
    """Let time pass, with everything that happens in it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop), "the room's conftest imports the hook"
    before, loop.is_stepping = loop.is_stepping, True
    try:
        await asyncio.sleep(seconds)
    finally:
        loop.is_stepping = before


async def until(condition: Callable[[], object]) -> None:
    """Let time pass until something is as it must become."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + UNTIL_LIMIT_S
    while not condition():
        assert loop.time() < limit, "it never comes"
        await step(UNTIL_INTERVAL_S)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and let them end what they began."""
    for task in tasks:
        task.cancel()
    await until(lambda: all(task.done() for task in tasks))
    await asyncio.gather(*tasks, return_exceptions=True)
