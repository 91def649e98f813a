"""Main loop of the other server processes: publisher, controller, extender.

A service runs until a signal stops it, and its exit code tells why it ended.
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
    """A service that `run_service` runs."""

    async def run(self) -> None:
        """Run until cancelled; `OSError` if the address cannot be used."""

    def unfinished_work_fields(self) -> Mapping[str, object]:
        """Return the work that a stop would leave unfinished, as fields of a log line."""


def run_service(new_service: Callable[[], Service], log: Logger, *, address: str) -> int:
    """Run a service until SIGTERM or SIGINT; return the exit code.

    ``new_service`` builds it within the event loop and may raise `ConfigError`; ``address`` is the
    name of the setting that has its address. The code is 0 if a signal stopped it, 3 if the address
    cannot be used, 1 if it failed.
    """
    return asyncio.run(_until_stopped(new_service, log, address))


async def _until_stopped(new_service: Callable[[], Service], log: Logger, address: str) -> int:
    service = new_service()
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if os.geteuid() == 0:
        log.warning("service running as root", remedy="run it as another user")
    service_task = asyncio.create_task(service.run(), name="work")
    stop_task = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({service_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        if service_task.done():
            return _report_failure(service_task, log, address)
        log.info("service stopping", **service.unfinished_work_fields())
    finally:
        for task in (service_task, stop_task):
            task.cancel()
        await asyncio.gather(service_task, stop_task, return_exceptions=True)
    return 0


def _report_failure(work: asyncio.Task[None], log: Logger, address: str) -> int:
    error = work.exception()
    causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    for cause in causes:
        if isinstance(cause, OSError):
            log.error("address unavailable", key=address, problem=cause.strerror or str(cause))
        elif cause is not None:
            lines = "".join(traceback.format_exception(cause)).rstrip()
            log.error("service failed", error=repr(cause), traceback=lines)
    return EXIT_NO_ADDRESS if all(isinstance(cause, OSError) for cause in causes) else EXIT_FAILED


async def run_in_turns(generator: Generator[None, None, T]) -> T:
    """Return the result of a generator; all other tasks can run between its steps."""
    while True:
        try:
            next(generator)
        except StopIteration as stop:
            result: T = stop.value
            return result
        await asyncio.sleep(0)
