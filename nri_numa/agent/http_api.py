"""The agent's API and page: routes over its view, and their server.

The API is read-only. Long answers are made in chunks, so a list of 1,000 containers does not delay
a container that is being created. The server has its own loop and thread
(`nri_numa.agent.serving`), which yields to the loop that answers the runtime between any two
answers, and between any two chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Final

import msgspec

from nri_numa.config import HTTP as HTTPConfig
from nri_numa.config import split_address
from nri_numa.errors import ConfigError
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import METRICS_CONTENT_TYPE, Metrics
from nri_numa.observe.reports import ReportOnce
from nri_numa.web import protocol
from nri_numa.web import responses as shown
from nri_numa.web.protocol import (
    EVENT_STREAM_CONTENT_TYPE,
    TEXT_CONTENT_TYPE,
    APIError,
    Handler,
    HTTPRequest,
    Response,
    Route,
)
from nri_numa.web.security import Certificate, TokenFile
from nri_numa.web.server import PROBE_PATHS, Server

if TYPE_CHECKING:
    from nri_numa.agent.view import LiveView

log = get_logger("http")

LISTEN_RETRY_S = 10.0
"""Seconds between two attempts to listen at an address in use."""
STUCK_LOOP_S: Final = 10.0
"""Seconds after which a busy loop counts as stuck."""
MAX_EVENT_STREAMS = 32
HEARTBEAT_INTERVAL_S = 15.0
CHANGE_DEBOUNCE_S = 0.25
"""Seconds in which several changes are one event."""
CONTAINERS_PER_CHUNK: Final = 10
"""Containers encoded before the event loop gets a turn: about a tenth of a millisecond, five times
as long with cold caches."""
SCRAPE_BLOCK_BYTES: Final = 64 << 10
"""Bytes of a scrape that are sent at once."""

_encode = msgspec.json.Encoder().encode

_NEW_PATH_OF: Final = {"/v1/refusals": "/v1/rejections"}
"""By old path, the one that replaced it. Deleted with the first release."""


class API:
    """The routes; ``busy_seconds`` returns how long the runtime's loop has been busy."""

    def __init__(
        self, view: LiveView, metrics: Metrics, busy_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._view, self._busy_for = view, busy_seconds
        self._scrape = SharedScrape(metrics.render_chunks)
        self._changes = ChangeStreams(view)

        def get_route(path: str, answer: Handler, *query: str) -> Route:
            return Route("GET", path, answer, query=query)

        def document_route(path: str, build_document: Callable[[], object]) -> Route:
            return get_route(path, lambda request: _json_response(build_document()))

        described = resources.files("nri_numa.web").joinpath("openapi.yaml")
        self.routes = (
            get_route(
                "/metrics",
                lambda request: Response(200, self._scrape.stream_text(), METRICS_CONTENT_TYPE),
            ),
            get_route("/healthz", self._serve_healthz, "verbose"),
            get_route("/readyz", self._serve_readyz, "verbose"),
            document_route("/v1/status", view.status_document),
            document_route("/v1/topology", view.machine_topology_document),
            get_route("/v1/assignments", self._serve_assignments, "namespace", "pod"),
            get_route("/v1/explain/{namespace}/{pod}", self._serve_explanations),
            get_route("/v1/explain/{namespace}/{pod}/{container}", self._serve_explanations),
            document_route(
                "/v1/rejections",
                lambda: shown.RejectionsDocument(rejections=tuple(view.list_rejections())),
            ),
            document_route("/v1/slots", view.slots_document),
            document_route("/v1/zones", view.scheduler_zones_document),
            document_route("/v1/kubelet", view.kubelet_status_document),
            get_route(
                "/v1/notices", partial(self._serve_after_number, view.notices_document), "after"
            ),
            get_route(
                "/v1/requests",
                partial(self._serve_after_number, view.decided_requests_document),
                "after",
            ),
            document_route("/v1/use", view.node_usage),
            get_route("/v1/use/{namespace}/{pod}/{container}", self._serve_container_use),
            Route(
                "GET",
                "/v1/events",
                self._serve_event_stream,
                admit=self._changes.check_stream_limit,
                query=(),
            ),
            get_route(
                "/v2/system/numa/info", lambda request: Response(200, _encode(view.numa_info()))
            ),
            get_route(
                "/openapi.yaml",
                lambda request: Response(200, described.read_bytes(), "application/yaml"),
            ),
            *(get_route(old, partial(_reject_old_path, new)) for old, new in _NEW_PATH_OF.items()),
        )
        self.page = tuple(protocol.page_routes("nri_numa.web"))

    def _serve_healthz(self, request: HTTPRequest) -> Response:
        if (busy_s := self._busy_for()) > STUCK_LOOP_S:
            text = f"the event loop is blocked for {busy_s:.0f} s\n"
            return Response(503, text.encode(), TEXT_CONTENT_TYPE)
        return Response(200, b"ok\n", TEXT_CONTENT_TYPE)

    def _serve_readyz(self, request: HTTPRequest) -> Response:
        readiness = self._view.readiness()
        return _json_response(readiness, 200 if readiness.ready else 503)

    def _serve_assignments(self, request: HTTPRequest) -> Response:
        return Response(200, self._assignment_chunks(request.query))

    async def _assignment_chunks(self, query: dict[str, str]) -> AsyncIterator[bytes]:
        head, containers = self._view.list_assignments()
        chunk = bytearray(_encode(head)[:-1] + b',"containers":[')
        separator = b""
        for n, assignment in enumerate(containers, 1):
            if query.get("namespace", assignment.namespace) == assignment.namespace and (
                query.get("pod", assignment.pod) == assignment.pod
            ):
                chunk += separator + _encode(assignment)
                separator = b","
            if n % CONTAINERS_PER_CHUNK == 0:
                yield bytes(chunk)
                chunk.clear()
        yield bytes(chunk) + b"]}\n"

    def _serve_explanations(self, request: HTTPRequest) -> Response:
        namespace, pod, *names = request.segments[2:]
        container = names[0] if names else None
        explanations = self._view.explain_pod(namespace, pod, container)
        if not explanations:
            container_text = f"container {container!r} of " if container is not None else ""
            raise APIError(
                404,
                "NotFound",
                f"nothing is known about {container_text}pod {namespace}/{pod}; "
                + (self._view.status_document().link.problem or "it does not run on this node"),
            )
        return _json_response(shown.PodExplanations(explanations=tuple(explanations)))

    def _serve_after_number(self, read: Callable[[int], object], request: HTTPRequest) -> Response:
        text = request.query.get("after", "0")
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise APIError(400, "BadRequest", f"after={text[:80]!r}, expected a number")
        return _json_response(read(int(text)))

    async def _serve_container_use(self, request: HTTPRequest) -> Response:
        namespace, pod, container = request.segments[2:]
        measurements = await self._view.container_use(namespace, pod, container)
        if not measurements:
            problem = f"container {container!r} of pod {namespace}/{pod} does not run on this node"
            raise APIError(404, "NotFound", problem)
        return _json_response(shown.MeasuredContainersOfName(containers=tuple(measurements)))

    def _serve_event_stream(self, request: HTTPRequest) -> Response:
        chunks, headers = self._changes.event_stream_chunks(), [("X-Accel-Buffering", "no")]
        return Response(200, chunks, EVENT_STREAM_CONTENT_TYPE, headers)


def _reject_old_path(new_path: str, request: HTTPRequest) -> Response:
    """Raise `APIError` with the path that replaced the requested one."""
    raise APIError(404, "NotFound", f"this path is gone, expected {new_path}")


def _json_response(document: object, status: int = 200) -> Response:
    return Response(status, _encode(document) + b"\n")


class SharedScrape:
    """Renders the metrics in chunks, once for all clients that wait for them.

    With 10,000 containers this takes a tenth of a second and a megabyte; twenty clients at once
    would take twenty times that for the same text.
    """

    def __init__(self, chunks: Callable[[], Iterator[bytes]]) -> None:
        self._chunks = chunks
        self._turn = asyncio.Lock()
        self._begun = self._made = 0
        self._text = b""

    async def stream_text(self) -> AsyncIterator[bytes]:
        """Yield the text; no part of it is older than this call."""
        begun_count = self._begun
        async with self._turn:
            if self._made <= begun_count:  # the last text was begun before this call
                self._begun += 1
                number, text = self._begun, bytearray()
                for chunk in self._chunks():
                    text += chunk
                    await asyncio.sleep(0)  # other tasks get a turn
                self._text, self._made = bytes(text), number
            full_text = self._text
        for start in range(0, len(full_text), SCRAPE_BLOCK_BYTES):
            yield full_text[start : start + SCRAPE_BLOCK_BYTES]


class ChangeStreams:
    """The event streams; free of cost while none is open.

    The agent reports changes within requests of the runtime, in its own thread: there only a flag
    is set, and sometimes a byte is sent that wakes the HTTP loop.
    """

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self._streams: set[asyncio.Event] = set()
        self._end: Callable[[], None] = lambda: None
        self._waking = False

    def check_stream_limit(self, request: HTTPRequest) -> None:
        """Raise `APIError` if too many streams are open."""
        if len(self._streams) >= MAX_EVENT_STREAMS:
            raise protocol.too_many_open_error("event streams")

    async def event_stream_chunks(self) -> AsyncIterator[bytes]:
        """Yield one event stream: the current state, then every change, with heartbeats."""
        changed = asyncio.Event()
        changed.set()
        if not self._streams:
            self._end = self._view.subscribe_to_changes(
                partial(self._on_agent_change, asyncio.get_running_loop())
            )
        self._streams.add(changed)
        try:
            yield b"retry: 2000\n\n"
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT_INTERVAL_S):
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                changed.clear()
                yield self._encode_state_event()
                await asyncio.sleep(CHANGE_DEBOUNCE_S)
        finally:
            self._streams.discard(changed)
            if not self._streams:
                self._end()

    def _on_agent_change(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the streams; called in the agent's thread."""
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the HTTP loop has just ended
                loop.call_soon_threadsafe(self._wake_streams)

    def _wake_streams(self) -> None:
        self._waking = False
        for changed in self._streams:
            changed.set()

    def _encode_state_event(self) -> bytes:
        status = self._view.status_document()
        data = {
            "serial": status.serial,
            "version": status.version,
            "ready": status.ready,
            "notices": self._view.notice_number(),
        }
        return b"id: %d\nevent: state\ndata: %s\n\n" % (status.serial, _encode(data))


# --- the server ---------------------------------------------------------------------------------


class AgentServer(Server):
    """The API, at ``http.address`` and at the unix socket ``http.socket``.

    ``crowded`` is called with True while new connections have no room, and with False after that.
    A token or certificate that cannot be read is a `ConfigError`.
    """

    def __init__(
        self,
        config: HTTPConfig,
        view: LiveView,
        metrics: Metrics,
        *,
        busy_seconds: Callable[[], float] = lambda: 0.0,
        crowded: Callable[[bool], object] = lambda crowded: None,
    ) -> None:
        address = split_address(config.address)
        if address is None and not config.socket:
            raise ConfigError("configuration", ["http.address: is off; there is nothing to serve"])
        host, self._port = address or ("", -1)
        self._socket = config.socket
        self._token = TokenFile(config.token_file) if config.token_file else None
        certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
        api = API(view, metrics, busy_seconds)
        self._open = PROBE_PATHS | {route.path for route in api.page}
        super().__init__(host, (*api.routes, *api.page), certificate=certificate)
        self._metrics, self._crowded = metrics, crowded

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            await self.start()
            await asyncio.get_running_loop().create_future()
        finally:
            await self.stop()

    async def start(self) -> None:
        """Return when the server listens at the address; the socket may follow later."""
        if self._certificate is not None and (problem := self._certificate.expired_problem()):
            log.error("certificate expired", problem=problem, remedy="renew http.tlsCert")
        if self._socket:
            listen = partial(self.listen_on_unix_socket, self._socket)
            self._tasks.add(
                asyncio.create_task(self._listen_with_retry(listen, self._socket, "http.socket"))
            )
        if self._port >= 0:
            address = f"{self._host}:{self._port}"
            await self._listen_with_retry(
                partial(self.listen_on_port, self._port), address, "http.address"
            )
        self._metrics.http_up.set(1)
        log.info(
            "http listening",
            address=f"{self.address[0]}:{self.address[1]}" if self.address else "off",
            socket=self._socket or "off",
            tls=self._certificate is not None,
            token=self._token is not None,
        )

    async def _listen_with_retry(self, listen: Callable[[], None], address: str, key: str) -> None:
        """Listen; while that fails, report it and try again."""
        problems = ReportOnce(log)
        while True:
            try:
                listen()
            except OSError as error:
                reason = error.strerror or str(error)
                if error.errno == errno.EADDRINUSE:
                    reason = "another program has it"
                elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                    reason = "this machine has no such address"
                elif error.errno == errno.EAFNOSUPPORT:
                    reason = "the service has no network of its own; install nri-numa.socket too"
                problems.report(
                    "http not listening",
                    reason,
                    log_function=log.error,
                    problem=f"cannot listen on {address}: {reason}",
                    remedy=f"see {key}; tried again every {LISTEN_RETRY_S:.0f} s",
                )
                await asyncio.sleep(LISTEN_RETRY_S)
            else:
                return

    async def stop(self) -> None:
        """Close the listeners and every connection."""
        self._metrics.http_up.set(0)
        await super().stop()
        self._crowded(False)

    def check_request_allowed(self, request: HTTPRequest) -> None:
        """Check the token; probes, the page and the unix socket need none."""
        if self._token is not None and not (request.local or request.path in self._open):
            self._token.check_request_token(request)

    def on_request_answered(self, request: HTTPRequest | None, status: int) -> None:
        """Count a request by the pattern of its path, so labels are bounded."""
        routes = protocol.routes_for_path(self.routes, request) if request is not None else []
        route = routes[0].path if routes else "other"
        label = "page" if route in self._open - PROBE_PATHS else route
        self._metrics.http_requests.labels(label, str(status)).inc()

    def on_connection_dropped(self) -> None:
        """Count a dropped connection."""
        self._metrics.http_connections_dropped.inc()

    def on_connection_count(self, count: int, *, crowded: bool) -> None:
        """Set the gauge of connections, and report if they are crowded."""
        self._metrics.http_connections.set(count)
        self._crowded(crowded)
