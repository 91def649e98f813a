"""Spans of the agent's decisions, sent to an OTLP receiver by OpenTelemetry's exporter.

Each decided request of the runtime has one, below the runtime's own span if that is sampled. Ids
are made from the request's number, so a span that is sent twice counts once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from nri_numa import __version__
from nri_numa.observe.logs import get_logger
from nri_numa.publisher.source import AgentSource, AgentUnavailable
from nri_numa.web.responses import DecidedRequests

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import ReadableSpan

    from nri_numa.observe.notices import DecidedRequest

log = get_logger("publish")

EXPORTER_LOGGER_NAME: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
SPAN_RETRY_S: Final = 5.0


class SpanSender:
    """Sends one node's spans whenever `wake` is set; no failure here ends the process.

    Args:
        dropped: called with the number of missed requests.
        report_up: called with True if the last attempt succeeded.
    """

    def __init__(
        self,
        endpoint: str,
        node: str,
        source: AgentSource,
        dropped: Callable[[int], object],
        report_up: Callable[[bool], object],
    ) -> None:
        self._endpoint = endpoint
        self._exporter: OTLPSpanExporter | None = None
        self._node, self._source, self._dropped, self._up = node, source, dropped, report_up
        self._instance, self._number = "", 0
        self._problem = self._logged = ""
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Send until cancelled; a failure is one log line, and is retried."""
        # The library logs each attempt, and has no other way to return its error.
        logging.getLogger(EXPORTER_LOGGER_NAME).addFilter(self._capture_exporter_log)
        try:
            while await self.wake.wait():
                self.wake.clear()
                try:
                    await self._send_spans()
                except AgentUnavailable:
                    continue  # the task that sets `wake` reports that
                except Exception as error:  # the library's, or an ImportError
                    self._report_problem(str(error) or repr(error))
                    await asyncio.sleep(SPAN_RETRY_S)
                    self.wake.set()
                else:
                    self._report_problem("")
        finally:
            logging.getLogger(EXPORTER_LOGGER_NAME).removeFilter(self._capture_exporter_log)
            if self._exporter is not None:
                self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _capture_exporter_log(self, record: logging.LogRecord) -> bool:
        self._logged = record.getMessage()
        return False

    def _report_problem(self, problem: str) -> None:
        self._up(not problem)
        if problem and not self._problem:
            url = self._endpoint
            log.warning("spans not sent", endpoint=url, problem=problem, retry_s=SPAN_RETRY_S)
        elif self._problem and not problem:
            log.info("spans sent again", endpoint=self._endpoint)
        self._problem = problem

    def _new_exporter(self) -> OTLPSpanExporter:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        names = {"service.name": "nri-numa", "service.version": __version__}
        self._resource = Resource.create({**names, "k8s.node.name": self._node})
        return OTLPSpanExporter(self._endpoint.rstrip("/") + "/v1/traces")

    async def _send_spans(self) -> None:
        exporter = self._exporter = self._exporter or self._new_exporter()
        document = await self._source.read_document(
            DecidedRequests, f"/v1/requests?after={self._number}"
        )
        if document.instance != self._instance and self._number:
            self._number = 0
            document = await self._source.read_document(DecidedRequests, "/v1/requests?after=0")
        spans = [self._build_span(r, document.instance) for r in document.requests]
        if sampled_spans := [span for span in spans if span is not None]:
            # The exporter blocks until the receiver answers, so it runs in a thread.
            result = await asyncio.to_thread(exporter.export, sampled_spans)
            if result.name != "SUCCESS":
                raise RuntimeError(self._logged)
        if document.requests and document.instance == self._instance:
            self._dropped(document.requests[0].number - self._number - 1)
        self._instance, self._number = document.instance, document.number

    def _build_span(self, request: DecidedRequest, instance: str) -> ReadableSpan | None:
        """Build a request's span; None if the runtime does not sample its trace."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        parent = trace.get_current_span(above).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return None
        named = sha256(f"{self._node} {instance} {request.number}".encode()).digest()
        trace_id = parent.trace_id if parent.is_valid else int.from_bytes(named[8:24])
        code = trace.StatusCode.ERROR if request.rejection else trace.StatusCode.UNSET
        return ReadableSpan(
            request.method,
            trace.SpanContext(trace_id, int.from_bytes(named[:8]), False, trace.TraceFlags(1)),
            parent if parent.is_valid else None,
            self._resource,
            request.attributes,
            kind=trace.SpanKind.SERVER,
            status=trace.Status(code, request.rejection or None),
            start_time=round(request.start * 1e9),
            end_time=round(request.end_time * 1e9),
        )
