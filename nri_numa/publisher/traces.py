"""Spans of what the agent decided, sent to an OTLP receiver by OpenTelemetry's exporter.

One for each request of the runtime about which something was decided, below the runtime's own span
where it sent one and samples it. Ids follow from the request's number: sent twice it is one span.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING

from nri_numa import __version__
from nri_numa.errors import ConfigError
from nri_numa.publisher.source import AgentSource, AgentUnavailable
from nri_numa.web.responses import DecidedRequests

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from nri_numa.observe.notices import DecidedRequest


class SpanSender:
    """Sends one node's spans whenever `wake` is set; ``dropped`` is called with how many it missed.

    Raises:
        ConfigError: the exporter is not installed.
    """

    def __init__(
        self, endpoint: str, node: str, source: AgentSource, dropped: Callable[[int], object]
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            problem = f"publish.otlpEndpoint: {endpoint} needs {error.name}, which is not installed"
            raise ConfigError("configuration", [f"{problem}; expected nri-numa[otel]"]) from error
        self._exporter = OTLPSpanExporter(endpoint.rstrip("/") + "/v1/traces")
        names = {"service.name": "nri-numa", "service.version": __version__, "k8s.node.name": node}
        self._resource = Resource.create(names)
        self._node, self._source, self._dropped = node, source, dropped
        self._instance, self._number = "", 0
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Send until cancelled; what fails, which the library logs, is sent again."""
        try:
            while await self.wake.wait():
                self.wake.clear()
                with suppress(AgentUnavailable):  # what sets `wake` finds that out
                    if not await self._sent():
                        await asyncio.sleep(5.0)
                        self.wake.set()
        finally:
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    async def _sent(self) -> bool:
        found = await self._source.read(DecidedRequests, f"/v1/requests?after={self._number}")
        if found.instance != self._instance and self._number:
            self._number = 0
            found = await self._source.read(DecidedRequests, "/v1/requests?after=0")
        if spans := [span for one in found.requests if (span := self._span(one, found.instance))]:
            # The exporter waits for the receiver, in a thread for which nothing else waits.
            result = await asyncio.to_thread(self._exporter.export, spans)
            if result.name != "SUCCESS":
                return False
        if found.requests and found.instance == self._instance:
            self._dropped(found.requests[0].number - self._number - 1)
        self._instance, self._number = found.instance, found.number
        return True

    def _span(self, one: DecidedRequest, instance: str) -> ReadableSpan | None:
        """None where the runtime does not sample the trace that it is part of."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": one.traceparent})
        parent = trace.get_current_span(above).get_span_context()
        if parent.is_valid and not parent.trace_flags.sampled:
            return None
        named = sha256(f"{self._node} {instance} {one.number}".encode()).digest()
        trace_id = parent.trace_id if parent.is_valid else int.from_bytes(named[8:24])
        code = trace.StatusCode.ERROR if one.refused else trace.StatusCode.UNSET
        return ReadableSpan(
            one.method,
            trace.SpanContext(trace_id, int.from_bytes(named[:8]), False, trace.TraceFlags(1)),
            parent if parent.is_valid else None,
            self._resource,
            one.attributes,
            kind=trace.SpanKind.SERVER,
            status=trace.Status(code, one.refused or None),
            start_time=round(one.start * 1e9),
            end_time=round(one.end * 1e9),
        )
