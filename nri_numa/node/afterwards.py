"""What nobody waits for: done in small pieces once the reply has left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Final

from nri_numa.observe import logs

AT_ONCE: Final = 25
"""Things done in one go once the reply has left: one to two milliseconds."""


class Afterwards:
    """A queue of small jobs; log lines keep the ``op`` of the request they come from.

    Args:
        later: calls a function when the loop has nothing more urgent.
    """

    def __init__(self, later: Callable[[Callable[[], object]], object]) -> None:
        self._later = later
        self._waiting: deque[tuple[Context, Callable[[], object]]] = deque()

    def do(self, *functions: Callable[[], object]) -> None:
        """Do this when the reply has left."""
        context, idle = copy_context(), not self._waiting
        for function in functions:
            self._waiting.append((context, function))
        if idle:
            self._later(self._work)

    def _work(self) -> None:
        logs.hold()  # lines are written with the rest, and not in a round of their own
        try:
            for _ in range(min(len(self._waiting), AT_ONCE)):
                context, function = self._waiting.popleft()
                context.run(function)
        finally:
            logs.release()
            if self._waiting:
                self._later(self._work)
