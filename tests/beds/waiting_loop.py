"""A loop whose callbacks wait until a test lets them run."""

from collections.abc import Callable


class WaitingLoop:
    """Keeps callbacks until told to run them."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object], /) -> object:
        self.waiting.append(callback)
        return None

    def call_soon_threadsafe(self, callback: Callable[[], object], /) -> object:
        return self.call_soon(callback)

    def call_later(self, delay: float, callback: Callable[[], object], /) -> object:
        return self.call_soon(callback)

    def round(self) -> None:
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()
