"""From a request to an answer: routes and their handlers, without sockets.

Long answers are made piece by piece; between two pieces the event loop may do something else, so
that a list of 1,000 containers does not hold up the container that is just being created.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Final
from urllib.parse import parse_qsl, unquote

import msgspec

from nri_numa.http.responses import (
    ContainerUses,
    Error,
    ErrorBody,
    Explanations,
    Refusals,
)
from nri_numa.http.scrape import SharedScrape
from nri_numa.http.source import AgentView
from nri_numa.observe.metrics import CONTENT_TYPE as METRICS_TYPE
from nri_numa.observe.metrics import Metrics

JSON = "application/json"
EVENTS = "text/event-stream"
_PIECE = 10
"""Containers between two chances for the event loop: about a tenth of a millisecond, five times as
long when other work had the caches meanwhile."""

PROBES: Final = frozenset(("/healthz", "/readyz"))
"""Open to everybody, and answered even when there is no place for anything else."""
STUCK = 10.0
"""Seconds after which a loop that never waits is not at work but lost."""

_encoder = msgspec.json.Encoder()

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as far as handlers care.

    Attributes:
        segments: the path's segments, decoded.
        query: parameters; the last of equal ones wins.
        headers: by name in small letters.
        local: it came over a unix socket.
        certified: its client has shown a certificate that we trust.
    """

    method: str
    path: str
    segments: tuple[str, ...] = ()
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    local: bool = False
    certified: bool = False

    def header(self, name: bytes) -> bytes:
        """A header's value; empty when it is not there."""
        return self.headers.get(name, b"")


@dataclass(frozen=True, slots=True)
class Response:
    """An answer.

    Attributes:
        body: whole, or pieces to be sent as they are made.
    """

    status: int
    body: bytes | AsyncIterator[bytes]
    content_type: str = JSON
    headers: Headers = field(default_factory=list)


class APIError(Exception):
    """Becomes an answer with an `Error` document."""

    def __init__(self, status: int, reason: str, message: str, headers: Headers | None = None):
        super().__init__(message)
        self.status, self.reason, self.message = status, reason, message
        self.headers = headers or []

    def response(self) -> Response:
        """The answer."""
        body = Error(error=ErrorBody(reason=self.reason, message=self.message))
        return Response(self.status, _encoder.encode(body) + b"\n", headers=self.headers)


def parse_target(target: bytes) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Path, decoded segments and query of a request target.

    Raises:
        APIError: when it is not what a client of ours sends.
    """
    text = target.decode("latin-1")
    path, _, query = text.partition("?")
    if not path.startswith("/") or len(text) > 4096:
        raise APIError(400, "BadRequest", "expected a path of at most 4096 characters")
    try:
        segments = tuple(unquote(s, errors="strict") for s in path.split("/")[1:])
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError as error:
        raise APIError(400, "BadRequest", "the path or the query is not valid UTF-8") from error
    return path, segments, dict(pairs)


Handler = Callable[[Request], Awaitable[Response] | Response]


class API:
    """The routes.

    Args:
        view: the agent.
        metrics: exposed on /metrics.
        events: makes the pieces of the event stream.
        busy_for: seconds that the runtime's loop is at work without a pause.
    """

    def __init__(
        self,
        view: AgentView,
        metrics: Metrics,
        events: Callable[[], AsyncIterator[bytes]],
        busy_for: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._view = view
        self._busy_for = busy_for
        self._events = events
        self._scrapes = SharedScrape(metrics.chunks)
        self._topology: tuple[object, bytes] | None = None
        self._listed: tuple[_Listed, bytes] | None = None
        self._assets: dict[str, _Asset] | None = None
        self._routes: list[tuple[str, tuple[str, ...], Handler]] = [
            (pattern, tuple(pattern.split("/")[1:]), handler)
            for pattern, handler in (
                ("/metrics", self._scrape),
                ("/healthz", self._health),
                ("/readyz", self._ready),
                ("/v1/status", self._status),
                ("/v1/topology", self._machine),
                ("/v1/assignments", self._assignments),
                ("/v1/explain/{namespace}/{pod}", self._explain),
                ("/v1/explain/{namespace}/{pod}/{container}", self._explain),
                ("/v1/refusals", self._refused),
                ("/v1/slots", self._slots),
                ("/v1/zones", self._zones),
                ("/v1/kubelet", self._kubelet),
                ("/v1/notices", self._notices),
                ("/v1/use", self._use),
                ("/v1/use/{namespace}/{pod}/{container}", self._container_use),
                ("/v1/events", self._stream),
                ("/v2/system/numa/info", self._numa_info),
                ("/openapi.yaml", self._openapi),
            )
        ]

    def needs_token(self, path: str) -> bool:
        """Probes and the page itself are open; everything that tells of pods is not."""
        return path not in PROBES and self._asset(path) is None

    def respond(self, request: Request) -> Awaitable[Response] | Response:
        """The answer to a request; `APIError` when there is none."""
        if request.method not in ("GET", "HEAD"):
            raise APIError(
                405,
                "MethodNotAllowed",
                f"{request.method[:20]} is not allowed, this API only reads",
                [("Allow", "GET, HEAD")],
            )
        for _, pattern, handler in self._routes:
            if matches(pattern, request.segments):
                return handler(request)
        asset = self._asset(request.path)
        if asset is not None:
            return asset.answer(request)
        raise APIError(404, "NotFound", "there is no such path; /openapi.yaml lists them")

    def route_of(self, request: Request) -> str:
        """The pattern of a path, for the metric's label: bounded, whatever clients send."""
        for name, pattern, _ in self._routes:
            if matches(pattern, request.segments):
                return name
        return "page" if self._asset(request.path) is not None else "other"

    # --- handlers -------------------------------------------------------------------------------

    def _scrape(self, request: Request) -> Response:
        _expect_query(request)
        return Response(200, self._scrapes.pieces(), METRICS_TYPE)

    def _health(self, request: Request) -> Response:
        _expect_query(request, "verbose")
        if (busy := self._busy_for()) > STUCK:
            text = f"the loop that answers the runtime is stuck for {busy:.0f} s\n"
            return Response(503, text.encode(), "text/plain; charset=utf-8")
        return Response(200, b"ok\n", "text/plain; charset=utf-8")

    def _ready(self, request: Request) -> Response:
        _expect_query(request, "verbose")
        readiness = self._view.readiness()
        return _json(readiness, 200 if readiness.ready else 503)

    def _status(self, request: Request) -> Response:
        _expect_query(request)
        return _json(self._view.status())

    def _machine(self, request: Request) -> Response:
        _expect_query(request)
        key = self._view.topology_key()
        if self._topology is None or self._topology[0] is not key:
            self._topology = key, _encoder.encode(self._view.topology()) + b"\n"
        return Response(200, self._topology[1])

    def _assignments(self, request: Request) -> Response:
        _expect_query(request, "namespace", "pod")
        return Response(200, self._listing(request.query))

    async def _listing(self, query: dict[str, str]) -> AsyncIterator[bytes]:
        listing = self._view.listing()
        head = _encoder.encode(listing.head)
        yield head[:-1] + b',"containers":['
        serial = listing.head.serial
        if not query and self._listed is not None and self._listed[0].same(serial, listing.key):
            yield self._listed[1] + b"]}\n"
            return
        pieces: list[bytes] = []
        piece: list[bytes] = []
        for n, one in enumerate(listing.containers, 1):
            if query.get("namespace", one.namespace) == one.namespace and (
                query.get("pod", one.pod) == one.pod
            ):
                piece.append(_encoder.encode(one))
            if n % _PIECE == 0 and piece:
                pieces.append(b",".join(piece))
                piece.clear()
                yield (b"," if len(pieces) > 1 else b"") + pieces[-1]
            elif n % _PIECE == 0:
                yield b""
        if piece:
            pieces.append(b",".join(piece))
            yield (b"," if len(pieces) > 1 else b"") + pieces[-1]
        if not query:
            self._listed = _Listed(serial, listing.key), b",".join(pieces)
        yield b"]}\n"

    def _explain(self, request: Request) -> Response:
        _expect_query(request)
        namespace, pod = request.segments[2:4]
        container = request.segments[4] if len(request.segments) > 4 else None
        found = self._view.explain(namespace, pod, container)
        if not found:
            what = f"container {container!r} of " if container is not None else ""
            raise APIError(
                404,
                "NotFound",
                f"nothing is known about {what}pod {namespace}/{pod}; it does not run on this node",
            )
        return _json(Explanations(explanations=tuple(found)))

    def _refused(self, request: Request) -> Response:
        _expect_query(request)
        return _json(Refusals(refusals=tuple(self._view.refusals())))

    def _slots(self, request: Request) -> Response:
        _expect_query(request)
        return _json(self._view.slots())

    def _zones(self, request: Request) -> Response:
        _expect_query(request)
        return _json(self._view.zones())

    def _kubelet(self, request: Request) -> Response:
        _expect_query(request)
        return _json(self._view.kubelet())

    def _notices(self, request: Request) -> Response:
        _expect_query(request, "after")
        text = request.query.get("after", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise APIError(400, "BadRequest", f"after={text[:80]!r}, expected a number")
        return _json(self._view.notices(int(text)))

    def _use(self, request: Request) -> Response:
        _expect_query(request)
        return _json(self._view.use())

    async def _container_use(self, request: Request) -> Response:
        _expect_query(request)
        namespace, pod, container = request.segments[2:5]
        found = await self._view.container_use(namespace, pod, container)
        if not found:
            raise APIError(
                404,
                "NotFound",
                f"container {container!r} of pod {namespace}/{pod} does not run on this node",
            )
        return _json(ContainerUses(containers=tuple(found)))

    def _stream(self, request: Request) -> Response:
        _expect_query(request)
        if request.method == "HEAD":
            return Response(200, b"", EVENTS)
        return Response(200, self._events(), EVENTS, [("X-Accel-Buffering", "no")])

    def _numa_info(self, request: Request) -> Response:
        _expect_query(request)
        return Response(200, _encoder.encode(self._view.numa_info()))

    def _openapi(self, request: Request) -> Response:
        _expect_query(request)
        data = resources.files("nri_numa.http").joinpath("openapi.yaml").read_bytes()
        return Response(200, data, "application/yaml")

    # --- the page -------------------------------------------------------------------------------

    def _asset(self, path: str) -> _Asset | None:
        if self._assets is None:
            self._assets = dict(_load_assets())
        return self._assets.get(path)


@dataclass(frozen=True, slots=True)
class _Listed:
    """What a finished list was made from."""

    serial: int
    key: tuple[object, ...]

    def same(self, serial: int, key: tuple[object, ...]) -> bool:
        return serial == self.serial and all(a is b for a, b in zip(key, self.key, strict=True))


CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No inline code and nothing from elsewhere: a hostile name stays text."""


@dataclass(frozen=True, slots=True)
class _Asset:
    """A file of the page."""

    data: bytes
    content_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        headers = [
            ("ETag", self.tag),
            ("Cache-Control", "no-cache"),
            ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
        ]
        if request.header(b"if-none-match").decode("latin-1") == self.tag:
            return Response(304, b"", self.content_type, headers)
        return Response(200, self.data, self.content_type, headers)


_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": JSON,
}


def _load_assets() -> Iterator[tuple[str, _Asset]]:
    """The page's files by URL path; read once, so that no request names a file of the disk."""
    for entry in resources.files("nri_numa.http").joinpath("web").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES and entry.is_file():
            data = entry.read_bytes()
            asset = _Asset(data, _TYPES[suffix], f'"{hashlib.sha256(data).hexdigest()[:20]}"')
            yield f"/{entry.name}", asset
            if entry.name == "index.html":
                yield "/", asset


def _json(document: object, status: int = 200) -> Response:
    return Response(status, _encoder.encode(document) + b"\n")


def matches(pattern: tuple[str, ...], segments: tuple[str, ...]) -> bool:
    """Say whether a path is one of a pattern, whose ``{name}`` is any one segment."""
    if len(pattern) != len(segments):
        return False
    return all(
        bool(s) if p.startswith("{") else p == s for p, s in zip(pattern, segments, strict=True)
    )


def _expect_query(request: Request, *known: str) -> None:
    for name in request.query:
        if name not in known:
            expected = f"expected {' or '.join(known)}" if known else "this path takes none"
            raise APIError(400, "BadRequest", f"unknown query parameter {name[:80]!r}; {expected}")
