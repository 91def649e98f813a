"""The writer of outputs to the API server: one request at a time, no faster than configured."""

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
)
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import ServiceMetrics
from nri_numa.publisher.outbox import Output, OutputQueue

MIN_PAUSE_S: Final = 0.05
"""Minimum seconds of a pause while nothing may be sent."""
PAUSED_RECHECK_S: Final = 1.0
"""Seconds between two checks of a process that may not write."""


class WriterMetrics(ServiceMetrics):
    """Metrics of every process that writes to the API server."""

    def __init__(self, prefix: str, version: str) -> None:
        super().__init__(prefix, version)
        self.requests = self.new_counter(
            "requests_total",
            "Requests to the API server, by output, verb and result.",
            "output",
            "verb",
            "result",
        )
        self.api_up = self.new_gauge("api_up", "1 if the last request reached the API server.")


class Writer:
    """Writes the requests of outputs.

    Attributes:
        wake: set when an output has a new request.
        problem: sentence saying why nothing can be written now; empty without a problem.
        may: returns True if this process may write now.
        written: called after each request.
        again: called when the API server answers after an outage.
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
        self.queue = OutputQueue(outputs, rate=rate, burst=burst, now_s=clock())
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
            may_write, now_s = self.may(), self._clock()
            request = self.queue.next_request(now_s) if may_write else None
            if request is None:
                pause_s = (
                    max(MIN_PAUSE_S, self.queue.seconds_until_request(now_s))
                    if may_write
                    else PAUSED_RECHECK_S
                )
                self.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s if pause_s < float("inf") else None):
                        await self.wake.wait()
                continue
            outcome = await self._api.execute_request(request)
            self.queue.on_outcome(request, outcome, self._clock(), self._jitter())
            self.record_outcome(request, outcome)
            self.written(request, outcome)
            self.report_output_problems()

    def record_outcome(self, request: APIRequest, outcome: Outcome) -> None:
        """Count and log the outcome of a request, also of one without an output."""
        result, log = outcome.result, self._log
        self._metrics.requests.labels(request.output, request.verb.value, result.value).inc()
        self._metrics.api_up.set(result not in SERVER_WIDE_RESULTS)
        if result in SERVER_WIDE_RESULTS:
            if not self.problem:
                log.warning("API server unavailable", problem=outcome.text)
            self.problem = outcome.text
            return
        if self.problem:
            log.info("API server available again")
            self.again()
        self.problem = ""
        verb = request.verb.value
        log.debug("request sent", target=request.target_text, verb=verb, result=result.value)
        key = verb, request.resource.plural_name
        if result in (OutcomeKind.SUCCEEDED, OutcomeKind.EXISTS):
            self._said.discard(key)
        elif result in (OutcomeKind.FORBIDDEN, OutcomeKind.INVALID, OutcomeKind.FAILED) or (
            result is OutcomeKind.MISSING and request.reads_node
        ):
            level = log.debug if key in self._said else log.warning
            level("object not written", result=result.value, problem=outcome.text)
            self._said.add(key)

    def report_output_problems(self) -> None:
        """Log the problems of outputs, each once."""
        for output in self.queue.outputs:
            problem, old_problem = output.problem, self._complaints.get(output.name, "")
            if problem and problem != old_problem:
                self._log.warning(output.failure_text, problem=problem)
            elif old_problem and not problem:
                self._log.info("output written again", output=output.name)
            self._complaints[output.name] = problem
