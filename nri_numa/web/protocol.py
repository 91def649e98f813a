"""Requests, responses and routes as plain values, and a connection that exchanges them over h11."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from typing import Final
from urllib.parse import parse_qsl, unquote

import h11
import msgspec

from nri_numa import __version__
from nri_numa.web.responses import Error, ErrorBody

JSON_CONTENT_TYPE: Final = "application/json"
TEXT_CONTENT_TYPE: Final = "text/plain; charset=utf-8"
EVENT_STREAM_CONTENT_TYPE: Final = "text/event-stream"
CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No inline code and no foreign sources: a hostile name stays text."""

REQUEST_TIMEOUT_S = 10.0
"""Seconds for a whole request from its first byte; the first one counts from the connection."""
IDLE_TIMEOUT_S: Final = 60.0
WRITE_TIMEOUT_S: Final = 30.0
MAX_HEADER_BYTES: Final = 16 << 10
MAX_IGNORED_BODY_BYTES: Final = 4 << 10
"""Maximum bytes of a discarded body of a request that should have none."""
MAX_DISCARDED_BODY_BYTES: Final = 1 << 20
"""The same for a rejected request: a client that is still sending does not read the answer."""

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class HTTPRequest:
    """A request in the form that handlers use.

    Attributes:
        segments: decoded segments of the path.
        query: parameters by name; the last of equal ones counts.
        headers: by name in lower case.
        local: True if it came over a unix socket.
        certified: True if the client has a certificate of the trusted authority.
    """

    method: str
    path: str
    segments: tuple[str, ...]
    query: dict[str, str]
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    local: bool = False
    certified: bool = False

    @classmethod
    def from_method_and_target(cls, method: str, target: bytes, **fields: object) -> HTTPRequest:
        """Parse the target of a request; `APIError` if no client may send it."""
        text = target.decode("latin-1")
        path, _, query = text.partition("?")
        if not path.startswith("/") or len(text) > 4096:
            raise bad_request_error("expected a path of at most 4096 characters")
        try:
            segments = tuple(unquote(s, errors="strict") for s in path.split("/")[1:])
            pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=16)
        except ValueError as error:
            problem = "path or query is not valid UTF-8, or has more than 16 parameters"
            raise bad_request_error(problem) from error
        return cls(method, path, segments, dict(pairs), **fields)  # type: ignore[arg-type]

    def header_value(self, name: bytes) -> bytes:
        """Return a header's value; empty if it is missing."""
        return self.headers.get(name, b"")


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; its body is bytes, or chunks that are sent as they are produced."""

    status: int
    body: bytes | AsyncIterator[bytes]
    content_type: str = JSON_CONTENT_TYPE
    headers: Headers = field(default_factory=list)


class APIError(Exception):
    """An error that is sent as the response to a request."""

    def __init__(self, status: int, reason: str, message: str, headers: Headers | None = None):
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.headers = headers or []

    def error_response(self) -> Response:
        """Return the response, an `Error` document."""
        body = msgspec.json.encode(Error(error=ErrorBody(reason=self.reason, message=self.message)))
        return Response(self.status, body + b"\n", headers=self.headers)


def bad_request_error(problem: str) -> APIError:
    """Return the error for a request that no client should send."""
    return APIError(400, "BadRequest", problem)


def not_ready_error(problem: str) -> APIError:
    """Return the error for a request that can be answered soon."""
    return APIError(503, "NotReady", problem, [("Retry-After", "2")])


def too_many_open_error(items: str) -> APIError:
    """Return the error for a limit that is reached."""
    return APIError(503, "Busy", f"too many {items} are open", [("Retry-After", "5")])


Handler = Callable[[HTTPRequest], Awaitable[Response] | Response]


@dataclass(frozen=True, slots=True)
class Route:
    """A handler of one method at one path.

    Attributes:
        path: with ``{name}`` for any one segment.
        max_body_bytes: maximum bytes of the body; 0 if it must have none.
        admit: called before the body is read; raises `APIError`.
        query: names of the known parameters; None if the handler checks them.
    """

    method: str
    path: str
    answer: Handler
    max_body_bytes: int = 0
    admit: Callable[[HTTPRequest], object] = lambda request: None
    query: tuple[str, ...] | None = None

    def matches_path(self, segments: tuple[str, ...]) -> bool:
        """Return True if a path belongs to this route, for any method."""
        pattern = self.path.split("/")[1:]
        return len(pattern) == len(segments) and all(
            bool(s) if p.startswith("{") else p == s for p, s in zip(pattern, segments, strict=True)
        )


def routes_for_path(routes: Iterable[Route], request: HTTPRequest) -> list[Route]:
    """Return the routes of the request's path, for all methods."""
    return [route for route in routes if route.matches_path(request.segments)]


def resolve_route(routes: Iterable[Route], request: HTTPRequest) -> Route:
    """Return the route of a request; `APIError` if there is none."""
    candidates = routes_for_path(routes, request)
    if not candidates:
        raise APIError(404, "NotFound", "there is no such path")
    method = "GET" if request.method == "HEAD" else request.method
    route = next((route for route in candidates if route.method == method), None)
    if route is None:
        allowed = ", ".join("GET, HEAD" if r.method == "GET" else r.method for r in candidates)
        raise APIError(405, "MethodNotAllowed", f"expected {allowed}", [("Allow", allowed)])
    for name in request.query if route.query is not None else ():
        if name not in (names := route.query or ()):
            hint = f"expected {' or '.join(names)}" if names else "this path has none"
            problem = f"unknown query parameter {name[:80]!r}; {hint}"
            raise bad_request_error(problem)
    return route


_FILE_CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


def page_routes(room: str, *names: str, prefix: str = "/") -> Iterator[Route]:
    """Yield a route for each file of a room's page, or for some; files are read once, here."""
    for file in resources.files(room).joinpath("static").iterdir():
        kind = _FILE_CONTENT_TYPES.get(file.name.rpartition(".")[2])
        if kind is not None and (not names or file.name in names):
            data = file.read_bytes()
            tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
            for name in ("", "index.html") if file.name == "index.html" else (file.name,):
                yield Route(
                    "GET", prefix + name, partial(_page_file_response, data, kind, tag), query=()
                )


def _page_file_response(data: bytes, kind: str, tag: str, request: HTTPRequest) -> Response:
    headers = [
        ("ETag", tag),
        ("Cache-Control", "no-cache"),
        ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
        ("Referrer-Policy", "no-referrer"),
    ]
    if request.header_value(b"if-none-match") == tag.encode():
        return Response(304, b"", kind, headers)
    return Response(200, data, kind, headers)


class HTTPConnection:
    """Requests in, responses out; ``limit`` is the deadline of the current step.

    ``first_bytes`` are those that were read before; ``next_round`` returns when the next chunk of a
    response may be produced.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limit: asyncio.Timeout,
        first_bytes: bytes = b"",
        next_round: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0),
    ) -> None:
        self._reader, self._writer, self._limit = reader, writer, limit
        self._next_round = next_round
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._head: dict[bytes, bytes] = {}
        self._idle = False
        if first_bytes:
            self._h11.receive_data(first_bytes)

    async def read_request_head(self) -> h11.Request | None:
        """Return the head of the next request; None if the client has no more.

        Raises:
            h11.RemoteProtocolError: it is no HTTP.
        """
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            await self._receive_data()
        # Else ConnectionClosed, or PAUSED after a protocol switch, which is never accepted.
        return event if isinstance(event, h11.Request) else None

    def parse_request_head(self, event: h11.Request, *, local: bool) -> HTTPRequest:
        """Return the request without its body.

        Raises:
            APIError: the head is too long, or its body has two lengths.
        """
        self._head = {bytes(name): bytes(value) for name, value in event.headers}
        size = len(event.target) + sum(len(n) + len(v) + 4 for n, v in event.headers)
        if size > MAX_HEADER_BYTES:  # h11 checks this only if the head comes in several reads
            problem = f"expected headers of at most {MAX_HEADER_BYTES} bytes"
            raise APIError(431, "BadRequest", problem)
        if b"content-length" in self._head and b"transfer-encoding" in self._head:
            # A proxy may use the other length and so see two requests (RFC 9112, section 6.1).
            raise bad_request_error("Content-Length and Transfer-Encoding, expected one")
        certified = bool(self._writer.get_extra_info("peercert"))
        method = event.method.decode("ascii", "replace")
        return HTTPRequest.from_method_and_target(
            method, event.target, headers=self._head, local=local, certified=certified
        )

    def body_bytes_to_reserve(self, max_bytes: int) -> int:
        """Return the bytes to reserve for the body of this request, at most ``max_bytes``."""
        if b"transfer-encoding" in self._head:
            return max_bytes
        return min(int(self._head.get(b"content-length", b"0")), max_bytes)

    async def read_body(self, max_bytes: int) -> bytes:
        """Read the body of the request, or raise `APIError`; with a limit of 0 it is discarded."""
        size_limit = max_bytes or MAX_IGNORED_BODY_BYTES
        expectation = f"a body of at most {max_bytes} bytes" if max_bytes else "no body"
        error = APIError(413, "BodyTooLarge", f"expected {expectation}")
        if int(self._head.get(b"content-length", b"0")) > size_limit:
            raise error
        if self._h11.they_are_waiting_for_100_continue:
            if not max_bytes:
                raise error
            self._write_h11_events(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        async for chunk in self._read_body_chunks():
            body += chunk
            if len(body) > size_limit:
                raise error
        self._limit.reschedule(None)
        return bytes(body) if max_bytes else b""

    async def discard_body(self) -> None:
        """Read the body of a rejected request, unless it is too long or was not sent."""
        size = 0
        if not self._h11.they_are_waiting_for_100_continue:
            async for chunk in self._read_body_chunks():
                if (size := size + len(chunk)) > MAX_DISCARDED_BODY_BYTES:
                    break

    async def _read_body_chunks(self) -> AsyncIterator[bytes]:
        while not isinstance(event := self._h11.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                await self._receive_data()
            elif isinstance(event, h11.Data):
                yield event.data

    async def _receive_data(self) -> None:
        """Read more bytes; a deadline does not move with each byte that arrives."""
        data = await self._reader.read(MAX_HEADER_BYTES)
        if self._idle and data:
            self._start_request_deadline()
        self._h11.receive_data(data)

    def _start_request_deadline(self) -> None:
        self._idle = False
        self._limit.reschedule(asyncio.get_running_loop().time() + REQUEST_TIMEOUT_S)

    async def send_response(self, response: Response, *, head: bool, shutdown: bool) -> None:
        """Write a response; after a broken request or with ``shutdown`` it is the last one."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = response.body
        headers = {
            "Server": f"nri-numa/{__version__}",
            "Content-Type": response.content_type,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            **dict(response.headers),
        }
        if isinstance(body, bytes) and response.status != 204:
            headers["Content-Length"] = str(len(body))
        if shutdown or self._h11.their_state is not h11.DONE:
            headers["Connection"] = "close"
        raw = [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
        start = h11.Response(status_code=response.status, headers=raw)
        if isinstance(body, bytes):
            data_events = () if head or not body else (h11.Data(data=body),)
            self._write_h11_events(start, *data_events, h11.EndOfMessage())
        else:
            self._write_h11_events(start)
            try:
                if not head:
                    await self._send_chunks(
                        body, flush=response.content_type == EVENT_STREAM_CONTENT_TYPE
                    )
            finally:
                await body.aclose()  # type: ignore[attr-defined]  # always a generator
            self._write_h11_events(h11.EndOfMessage())
        await self._drain_writer()

    async def _send_chunks(self, body: AsyncIterator[bytes], *, flush: bool) -> None:
        async for chunk in body:
            if chunk:
                self._write_h11_events(h11.Data(data=chunk))
            if flush and self._reader.at_eof():
                raise EOFError
            await self._drain_writer()
            # drain() returns at once while the buffer has room: this yields to the runtime
            # (`nri_numa.agent.loop`) and to other clients.
            await self._next_round()

    def prepare_next_request(self) -> bool:
        """Prepare for another request; False if the connection must be closed."""
        if not (self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE):
            return False
        if self._h11.trailing_data[0]:
            self._start_request_deadline()  # it was read together with the previous one
        else:
            self._idle = True
            self._limit.reschedule(asyncio.get_running_loop().time() + IDLE_TIMEOUT_S)
        self._h11.start_next_cycle()
        return True

    def _write_h11_events(self, *events: h11.Event) -> None:
        if data := b"".join(self._h11.send(event) or b"" for event in events):
            self._writer.write(data)

    async def _drain_writer(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + WRITE_TIMEOUT_S)
        await self._writer.drain()
        self._limit.reschedule(None)
