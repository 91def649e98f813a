"""Problems that are said once for as long as they stay the same, and once when they are over."""

from __future__ import annotations

from collections.abc import Callable

from nri_numa.observe.logs import Logger


class ReportOnce:
    """Logs problems, each by the event that says it."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._problems: dict[str, str] = {}

    def report(
        self,
        event: str,
        problem: str,
        over: str = "",
        /,
        *,
        say: Callable[..., None] | None = None,
        **fields: object,
    ) -> None:
        """Warn of ``event`` unless the ``problem`` is the same as before; an empty one ends it.

        ``over`` is the event that says the latter, ``say`` logs where it is no warning, and
        ``fields`` are those of the line, instead of the problem.
        """
        before = self._problems.pop(event, "")
        if not problem:
            if before and over:
                self._log.info(over)
            return
        self._problems[event] = problem
        if problem != before:
            (say or self._log.warning)(event, **(fields or {"problem": problem}))
