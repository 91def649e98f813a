"""The life of a process that serves: told to stop, without an address, failed."""

import asyncio
import os
import signal
from typing import Any

import pytest

from nri_numa import service
from nri_numa.observe.logs import get_logger

log = get_logger("test")


class Worker:
    """Does one thing, and waits to be cancelled."""

    def __init__(self, *raised: Exception, number: int = 0) -> None:
        self._raised, self._number = raised, number
        self.ended = False

    async def run(self) -> None:
        try:
            if len(self._raised) == 1:
                raise self._raised[0]
            if self._raised:
                raise ExceptionGroup("several", self._raised)
            os.kill(os.getpid(), self._number)
            await asyncio.Event().wait()
        finally:
            self.ended = True

    def unfinished_work_fields(self) -> dict[str, object]:
        return {"waiting": 3}


def fields(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [getattr(r, "fields", {}) for r in caplog.records if r.message == message]


def lived(worker: Worker) -> int:
    return service.run_service(lambda: worker, log, address="controller.address")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_in_order(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    worker = Worker(number=number)
    assert lived(worker) == 0
    assert worker.ended
    assert [of["waiting"] for of in fields(caplog, "service stopping")] == [3]


def test_an_address_that_cannot_be_had_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert lived(Worker(OSError(98, "Address already in use"))) == 3
    (said,) = fields(caplog, "address unavailable")
    assert said["problem"] == "Address already in use"


@pytest.mark.parametrize(
    "raised", [(ValueError("a bug"),), (ValueError("a bug"), OSError(98, "Address already in use"))]
)
def test_failures_are_told(raised: tuple[Exception, ...], caplog: pytest.LogCaptureFixture) -> None:
    assert lived(Worker(*raised)) == 1
    (said,) = fields(caplog, "service failed")
    assert said["error"] == "ValueError('a bug')"
    assert "ValueError: a bug" in said["traceback"]
