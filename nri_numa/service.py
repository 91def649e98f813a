"""The life of a process that serves beside the agent: publisher, controller, extender.

It works until a signal stops it, and ends with an exit code that says why.
"""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from nri_numa.observe.logs import Logger

T = TypeVar("T")

EXIT_FAILED: Final = 1
EXIT_NO_ADDRESS: Final = 3


class Service(Protocol):
    """What is run."""

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            OSError: the address cannot be had.
        """
        ...

    def unfinished_work_fields(self) -> Mapping[str, object]:
        """What stays undone when it stops now, as fields of a log line."""
        ...


def run_service(make: Callable[[], Service], log: Logger, *, address: str) -> int:
    """Run a service until SIGTERM or SIGINT; the result is the exit code.

    Args:
        make: makes it, within the event loop.
        log: of the service.
        address: name of the setting that says where it serves.

    Returns:
        0 when a signal stopped it, 3 when the address cannot be had, 1 when it failed.

    Raises:
        ConfigError: by ``make``.
    """
    return asyncio.run(_until_stopped(make, log, address))


async def _until_stopped(make: Callable[[], Service], log: Logger, address: str) -> int:
    service = make()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if os.geteuid() == 0:
        log.warning("runs as root, and needs no rights", remedy="run it as another user")
    work = asyncio.create_task(service.run(), name="work")
    end = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return _report_failure(work, log, address)
        log.info("stopping", **service.unfinished_work_fields())
    finally:
        for task in (work, end):
            task.cancel()
        await asyncio.gather(work, end, return_exceptions=True)
    return 0


def _report_failure(work: asyncio.Task[None], log: Logger, address: str) -> int:
    error = work.exception()
    causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for cause in causes:
        if isinstance(cause, OSError):
            log.error(f"{address} cannot be had", problem=cause.strerror or str(cause))
        elif cause is not None:
            lines = "".join(traceback.format_exception(cause)).rstrip()
            log.error("failed", error=repr(cause), traceback=lines)
    return EXIT_NO_ADDRESS if all(isinstance(cause, OSError) for cause in causes) else EXIT_FAILED


async def run_in_turns(steps: Generator[None, None, T]) -> T:
    """An answer of many steps, between which all other tasks have their turn."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found
        await asyncio.sleep(0)
