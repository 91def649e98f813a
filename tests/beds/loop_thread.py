"""An asyncio loop in a thread of its own, for tests that read as plain steps."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs from the beginning until `end`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 180.0) -> T:
        return self.submit(work).result(timeout_s)

    def do(self, action: Callable[[], T]) -> T:
        """Run something there that does not wait, as events do."""

        async def run() -> T:
            return action()

        return self.call(run())

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
