"""A receiver of spans over OTLP."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.beds.embedded_node import until


class TraceReceiver:
    """What came, and the resource that it came from; ``refuses`` answers with an error."""

    def __init__(self) -> None:
        self.spans: dict[bytes, Span] = {}
        self.resource: dict[str, Any] = {}
        self.refused = 0
        self.refuses = False
        self.url = ""

    def take(self, body: bytes) -> int:
        if self.refuses:
            self.refused += 1
            return 400
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = values(resource.resource)
            for scope in resource.scope_spans:
                self.spans |= {span.span_id: span for span in scope.spans}
        return 200

    def named(self, method: str, **attributes: str) -> Span:
        """The span of a request, as soon as it is there."""

        def found() -> list[Span]:
            wanted = {name.replace("_", "."): text for name, text in attributes.items()}.items()
            every = tuple(self.spans.values())
            return [one for one in every if one.name == method and wanted <= values(one).items()]

        until(found, f"a span of {method} {attributes}")
        (one,) = found()
        return one


def values(message: Any) -> dict[str, Any]:
    """Attributes of a span or a resource."""
    return {
        each.key: getattr(each.value, str(each.value.WhichOneof("value")))
        for each in message.attributes
    }


@contextmanager
def receive_traces() -> Iterator[TraceReceiver]:
    receiver = TraceReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            self.send_response(receiver.take(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
