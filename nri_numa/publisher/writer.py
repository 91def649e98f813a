"""Brings outputs to the API server: one request at a time, no faster than configured."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from nri_numa.kube.requests import (
    SERVER_WIDE_RESULTS,
    APIRequest,
    KubeClient,
    Outcome,
    OutcomeKind,
    Resource,
    Verb,
)
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import ServiceMetrics
from nri_numa.publisher.outbox import Output, OutputQueue

MIN_PAUSE_S: Final = 0.05
"""Seconds of the shortest pause while nothing may be sent."""
PAUSED_RECHECK_S: Final = 1.0
"""Seconds until it is looked at again whether this process may write."""


class WriterMetrics(ServiceMetrics):
    """Metrics of every process that writes to the API server."""

    def __init__(self, prefix: str, version: str) -> None:
        super().__init__(prefix, version)
        self.requests = self.new_counter(
            "requests_total",
            "Requests to the API server, by what they were for, verb and result.",
            "output",
            "verb",
            "result",
        )
        self.api_up = self.new_gauge("api_up", "Whether the last request reached the API server.")


class Writer:
    """Writes what outputs want.

    Attributes:
        wake: is set when an output wants something.
        problem: why nothing can be written now, as a sentence; empty when all is well.
        may: whether this process may write now.
        written: is called after each request.
        again: is called when the API server answers after a time without.
    """

    def __init__(
        self,
        api: KubeClient,
        outputs: Sequence[Output],
        metrics: WriterMetrics,
        service: str,
        *,
        rate: float,
        burst: float,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.queue = OutputQueue(outputs, rate=rate, burst=burst, now=clock())
        self.wake = asyncio.Event()
        self.problem = ""
        self._api, self._metrics, self._log = api, metrics, get_logger(service)
        self._clock, self._jitter = clock, jitter
        self.may: Callable[[], bool] = lambda: True
        self.written: Callable[[APIRequest, Outcome], object] = lambda request, outcome: None
        self.again: Callable[[], object] = lambda: None
        self._said: set[tuple[str, str]] = set()
        self._complaints: dict[str, str] = {}

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            may, now = self.may(), self._clock()
            request = self.queue.next_request(now) if may else None
            if request is None:
                wait = (
                    max(MIN_PAUSE_S, self.queue.seconds_until_request(now))
                    if may
                    else PAUSED_RECHECK_S
                )
                self.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait if wait < float("inf") else None):
                        await self.wake.wait()
                continue
            outcome = await self._api.execute(request)
            self.queue.on_outcome(request, outcome, self._clock(), self._jitter())
            self.record_outcome(request, outcome)
            self.written(request, outcome)
            self.report_output_problems()

    def record_outcome(self, request: APIRequest, outcome: Outcome) -> None:
        """Count and log what came of a request, also of one that was no output's."""
        result, log = outcome.result, self._log
        self._metrics.requests.labels(request.output, request.verb.value, result.value).inc()
        self._metrics.api_up.set(result not in SERVER_WIDE_RESULTS)
        if result in SERVER_WIDE_RESULTS:
            if not self.problem:
                log.warning("the API server cannot be used for now", problem=outcome.text)
            self.problem = outcome.text
            return
        if self.problem:
            log.info("the API server answers again")
            self.again()
        self.problem = ""
        log.debug(
            "request", target=request.target_text, verb=request.verb.value, result=result.value
        )
        key = request.verb.value, request.resource.plural
        if result in (OutcomeKind.SUCCEEDED, OutcomeKind.EXISTS):
            self._said.discard(key)
        elif result in (OutcomeKind.FORBIDDEN, OutcomeKind.INVALID, OutcomeKind.FAILED) or (
            result is OutcomeKind.MISSING
            and request.verb is Verb.GET
            and request.resource is Resource.NODES
        ):
            level = log.debug if key in self._said else log.warning
            level("not written", result=result.value, problem=outcome.text)
            self._said.add(key)

    def report_output_problems(self) -> None:
        """Log the problems of outputs, each once."""
        for output in self.queue.outputs:
            problem, before = output.problem, self._complaints.get(output.name, "")
            if problem and problem != before:
                self._log.warning(output.failure_text, problem=problem)
            elif before and not problem:
                self._log.info("written again", output=output.name)
            self._complaints[output.name] = problem
