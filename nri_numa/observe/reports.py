"""Reports of problems: once while a problem stays the same, and once when it ends."""

from __future__ import annotations

from collections.abc import Callable

from nri_numa.observe.logs import Logger


class ReportOnce:
    """Logs problems, one at a time for each event."""

    def __init__(self, log: Logger) -> None:
        self._log = log
        self._problems: dict[str, str] = {}

    def report_problem(
        self,
        event: str,
        problem: str,
        end_event: str = "",
        /,
        *,
        log_function: Callable[..., None] | None = None,
        **fields: object,
    ) -> None:
        """Warn of ``event`` unless ``problem`` is the same as before; an empty one ends it.

        ``end_event`` is logged at the end. ``log_function`` replaces the warning, and ``fields``
        replace the problem in the line.
        """
        earlier_problem = self._problems.pop(event, "")
        if not problem:
            if earlier_problem and end_event:
                self._log.info(end_event)
            return
        self._problems[event] = problem
        if problem != earlier_problem:
            (log_function or self._log.warning)(event, **(fields or {"problem": problem}))
