"""What all our HTTP servers are behind: places by peer, deadlines, TLS, a reserve for probes.

A client pays for what it does before we pay for it: it gets a place before anything of it is read,
no TLS before its first byte, and no memory for a body before it may bring one. The agent's server
(`nri_numa.http.server`) and those of controller, scheduler and publisher (`Site`) stand on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import resource
import socket
import time
from asyncio import sslproto
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import h11

from nri_numa.http import connection as connections
from nri_numa.http.api import PROBES, APIError, Request, Response, matches, parse_target
from nri_numa.http.connection import MAX_HEADER_BYTES, Connection
from nri_numa.http.early_read import EarlyRead
from nri_numa.http.places import ConnectionPlace, ConnectionPlaces, Line
from nri_numa.http.security import Certificate, host_is_expected
from nri_numa.http.sockets import LOCAL, accept, close, forget, listen
from nri_numa.observe.logs import get_logger

log = get_logger("http")

PROBE_TIMEOUT = 2.0
"""Seconds for everything, TLS handshake included, on a connection for which there was no place."""
MAX_REQUESTS = 1000
"""Requests of one connection; whoever has more to ask connects again, and queues with the rest."""
TLS_RESERVE = 64
"""ConnectionPlaces of the reserve behind TLS, where one byte is enough to be looked at further."""
ALL_BODIES = 32 << 20
"""Bytes of all bodies that are read at a time."""
EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
EXHAUSTED_RETRY = 1.0
EXHAUSTED_SAID_EVERY = 60.0
sslproto.SSLProtocol.max_size = 32 << 10
# asyncio takes so many bytes for each TLS connection, 256 KiB unless told otherwise, and two of
# TLS's own records are enough: with 512 connections that is 16 MiB and not 128.
TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"


class GuardedServer:
    """Takes connections, and answers requests with what a kind of server makes of them.

    Args:
        host: that it listens on.
        version: named in the Server header.
        certificate: None for no TLS.
        line: called with whether newcomers stand in line.
        most: connections, where it is not the usual number.

    Attributes:
        address: where it listens.
    """

    def __init__(
        self,
        host: str,
        *,
        version: str,
        certificate: Certificate | None = None,
        line: Callable[[bool], object] = lambda there: None,
        most: int | None = None,
    ) -> None:
        self._host, self._certificate = host, certificate
        self._server_name = f"nri-numa/{version}"
        self._places = _places(most, tls=certificate is not None)
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._line = Line(line)
        self._exhausted_at = -EXHAUSTED_SAID_EVERY
        self._bodies = 0
        self._not_renewed = ""
        self.address: tuple[str, int] | None = None

    @property
    def port(self) -> int:
        """That it listens on; 0 as long as it does not."""
        return self.address[1] if self.address else 0

    # --- what a kind of server says -----------------------------------------------------------

    def admit(self, request: Request) -> int:
        """Bytes of a body that a request may bring.

        Raises:
            APIError: it may not be made.
        """
        raise NotImplementedError

    def respond(self, request: Request) -> Awaitable[Response] | Response:
        """The answer to a request that was admitted, its body read.

        Raises:
            APIError: there is none.
        """
        raise NotImplementedError

    def refusal(self, error: APIError) -> Response:
        """The answer that says an error."""
        return error.response()

    def answered(self, request: Request | None, status: int) -> None:
        """A request was answered; None when it was no HTTP."""

    def dropped(self) -> None:
        """A connection was closed because it had no place or was too slow."""

    def connected(self, count: int) -> None:
        """So many connections are open now."""

    # --- life ---------------------------------------------------------------------------------

    def listen(self, port: int) -> None:
        """Begin to serve.

        Raises:
            OSError: the address cannot be had.
        """
        self._listeners = listen(self._host, port)
        self.address = self._listeners[0].getsockname()[:2]
        self._accepting = [asyncio.create_task(self._accept(one)) for one in self._listeners]

    async def stop(self) -> None:
        """Close the listeners and every connection."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._accepting, self._listeners = [], []
        self._line.end()
        self._places.close()
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    # --- connections ----------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Take connections for ever; each gets a place before anything of it is looked at."""
        nobody = partial(self._line.nobody, listener)
        while True:
            try:
                sock, client = await accept(listener, nobody)
            except OSError as error:
                if error.errno in EXHAUSTED:
                    self._exhausted(error)
                    await asyncio.sleep(EXHAUSTED_RETRY)
                else:  # the client left the queue
                    await asyncio.sleep(0)
                continue
            self._begin(sock, client)
            self._line.came(listener)
            # Whoever is connected gets a turn before the next newcomer may take a place.
            await asyncio.sleep(self._places.pause())

    def _begin(self, sock: socket.socket, client: str) -> None:
        place = self._places.take(client)
        tls = self._certificate is not None and client != LOCAL
        if place.reserve or tls:
            # A TLS stream takes 300 kB: nobody gets one before a byte has come.
            early_read = EarlyRead(sock, tls=tls)
            place.close = early_read.close
            early_read.begin(
                PROBE_TIMEOUT if place.reserve else connections.REQUEST_TIMEOUT,
                heard=lambda said: self._start(sock, place, said),
                ended=lambda: self._dropped(place),
            )
        else:
            self._start(sock, place)
        self.connected(len(self._places))

    def _start(self, sock: socket.socket, place: ConnectionPlace, said: bytes = b"") -> None:
        task = asyncio.create_task(self._serve(sock, place, said))
        place.close = task.cancel
        self._connections.add(task)
        task.add_done_callback(lambda task: self._ended(task, sock, place))

    def _ended(self, task: asyncio.Task[None], sock: socket.socket, place: ConnectionPlace) -> None:
        self._connections.discard(task)
        if task.cancelled():
            sock.close()  # its transport does that, but it may not have got as far
            self._dropped(place)
            return
        if (error := task.exception()) is not None:
            log.error("http connection failed", error=repr(error))
        self._left(place)

    def _dropped(self, place: ConnectionPlace) -> None:
        self.dropped()
        self._left(place)

    def _left(self, place: ConnectionPlace) -> None:
        self._places.leave(place)
        self.connected(len(self._places))

    def _exhausted(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._exhausted_at >= EXHAUSTED_SAID_EVERY:
            self._exhausted_at = now
            log.warning(
                "no more connections can be taken",
                problem=error.strerror,
                open=len(self._places),
                remedy="raise the limit of open files (LimitNOFILE) to 1024 or more",
            )

    async def _serve(self, sock: socket.socket, place: ConnectionPlace, said: bytes) -> None:
        """One connection from the handshake to its end."""
        timeout = PROBE_TIMEOUT if place.reserve else connections.REQUEST_TIMEOUT
        deadline = asyncio.get_running_loop().time() + timeout
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout_at(deadline):
                reader, writer = await self._streams(sock, local=place.client == LOCAL)
            connection = Connection(
                reader,
                writer,
                self._server_name,
                deadline=deadline,
                initial=said,
            )
            while await self._exchange(connection, place):  # noqa: ASYNC110  # it is no polling
                # Requests that are there already would be answered without a pause otherwise:
                # here the loop looks whether the runtime wants something, and other clients.
                await asyncio.sleep(0)
        except TimeoutError as error:
            self.dropped()  # too slow: its loss, and nothing to report
            forget(error)
        except (OSError, EOFError, h11.LocalProtocolError) as error:
            forget(error)  # the client went away: its loss too
        except asyncio.CancelledError as error:
            if writer is not None:
                writer.transport.abort()
            forget(error)
            raise
        finally:
            if writer is not None:
                await close(writer)

    async def _streams(
        self, sock: socket.socket, *, local: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams of an accepted connection, behind the TLS handshake where there is one."""
        loop = asyncio.get_running_loop()
        context = None
        if self._certificate is not None and not local:
            problem = self._certificate.refresh()
            if problem and problem != self._not_renewed:
                log.warning("certificate not renewed", problem=problem)
            self._not_renewed = problem
            context = self._certificate.context
        reader = asyncio.StreamReader(limit=MAX_HEADER_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)

    async def _exchange(self, connection: Connection, place: ConnectionPlace) -> bool:
        """One request and its answer; False when the connection is finished."""
        request: Request | None = None
        try:
            event = await connection.request()
            place.idle_since = None
            if event is None:
                return False
            request = _request(event, local=place.client == LOCAL, certified=connection.certified)
            try:
                if place.reserve and request.path not in PROBES:
                    raise too_many("connections")
                largest = self.admit(request)
            except APIError:
                await connection.skip()  # a client that is still sending would not read why
                raise
            with self._room(connection.announced(largest)):
                body = await connection.body(largest)
                answer = self.respond(replace(request, body=body))
                response = await answer if inspect.isawaitable(answer) else answer
        except APIError as error:
            response = self.refusal(error)
        except h11.RemoteProtocolError as error:
            bad = APIError(error.error_status_hint, "BadRequest", f"not HTTP: {error}")
            response = self.refusal(bad)
        except (OSError, EOFError, TimeoutError):
            raise
        except Exception:
            log.exception("http request failed", path=request.path if request else "")
            response = self.refusal(APIError(500, "Internal", "a mistake of ours; see the log"))
        self.answered(request, response.status)
        place.answered += 1
        last = place.reserve or place.answered >= MAX_REQUESTS
        head = request is not None and request.method == "HEAD"
        await connection.send(response, head=head, last=last)
        place.idle_since = time.monotonic()
        return connection.next()

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Memory for a body while it is read and answered."""
        if self._bodies + size > ALL_BODIES:
            raise too_many("request bodies")
        self._bodies += size
        try:
            yield
        finally:
            self._bodies -= size


Handler = Callable[[Request], Awaitable[Response] | Response]


@dataclass(frozen=True, slots=True)
class Route:
    """What is done at a path.

    Attributes:
        path: with ``{name}`` for any one segment.
        largest: bytes of the body; 0 where it takes none.
        admit: called before the body is read; raises `APIError`.
    """

    method: str
    path: str
    answer: Handler
    largest: int = 0
    admit: Callable[[Request], object] = lambda request: None


class Site(GuardedServer):
    """Serves routes, metrics and probes.

    Args:
        host, version, certificate: as of `GuardedServer`.
        routes: beside /metrics, /healthz and /readyz.
        metrics: makes the text of /metrics.
        not_ready: why it is not ready, as a sentence; empty when it is.
        counted: called with path and status of each request to one of the routes.
        most: as of `GuardedServer`.
    """

    def __init__(
        self,
        host: str,
        *,
        version: str,
        metrics: Callable[[], bytes],
        not_ready: Callable[[], str],
        certificate: Certificate | None = None,
        routes: Iterable[Route] = (),
        counted: Callable[[str, int], object] = lambda path, status: None,
        most: int | None = None,
    ) -> None:
        super().__init__(host, version=version, certificate=certificate, most=most)
        self._counted = counted

        def ready(request: Request) -> Response:
            problem = not_ready()
            return Response(503 if problem else 200, f"{problem or 'ok'}\n".encode(), TEXT)

        self._routes = [
            *routes,
            Route("GET", "/metrics", lambda request: Response(200, metrics(), METRICS)),
            Route("GET", "/healthz", lambda request: Response(200, b"ok\n", TEXT)),
            Route("GET", "/readyz", ready),
        ]

    def admit(self, request: Request) -> int:
        """Bytes of a body that a request may bring."""
        host_must_be_expected(request, self._host)
        route = self._route(request)
        if route.method != "GET" and (origin := request.header(b"origin")):
            # Browsers send some requests for foreign pages, and our own page sends none of these.
            page = origin[:80].decode("latin-1")
            raise APIError(403, "Forbidden", f"the page {page} asks, expected no page")
        route.admit(request)
        return route.largest

    def respond(self, request: Request) -> Awaitable[Response] | Response:
        """The answer of the route."""
        return self._route(request).answer(request)

    def refusal(self, error: APIError) -> Response:
        """An error as a document with one sentence."""
        body = json.dumps({"error": error.message}).encode()
        return Response(error.status, body, headers=error.headers)

    def answered(self, request: Request | None, status: int) -> None:
        """Count it."""
        if request is not None and any(request.path == route.path for route in self._routes):
            self._counted(request.path, status)

    def _route(self, request: Request) -> Route:
        there = [r for r in self._routes if matches(tuple(r.path.split("/")[1:]), request.segments)]
        method = "GET" if request.method == "HEAD" else request.method
        for route in there:
            if route.method == method:
                return route
        if not there:
            raise APIError(404, "NotFound", "there is no such path")
        allowed = ", ".join("GET, HEAD" if r.method == "GET" else r.method for r in there)
        raise APIError(405, "MethodNotAllowed", f"expected {allowed}", [("Allow", allowed)])


def host_must_be_expected(request: Request, configured: str) -> None:
    """Refuse a request for a foreign name at a loopback address.

    Raises:
        APIError: 421.
    """
    if not host_is_expected(request.header(b"host"), configured):
        raise APIError(
            421,
            "MisdirectedRequest",
            "this server is only reachable as localhost or by its address",
        )


def _request(event: h11.Request, *, local: bool, certified: bool) -> Request:
    path, segments, query = parse_target(event.target)
    return Request(
        event.method.decode("ascii", "replace"),
        path,
        segments,
        query,
        dict(event.headers),
        local=local,
        certified=certified,
    )


def _places(most: int | None, *, tls: bool) -> ConnectionPlaces:
    """As many as there should be, and half of the files that may be open at most.

    The other half is for the runtime's socket and the checkpoint, which clients must not keep out.
    """
    share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    made = ConnectionPlaces(reserve=TLS_RESERVE) if tls else ConnectionPlaces()
    made.limit = most or made.limit
    if share > 0:  # not RLIM_INFINITY
        made.limit, made.reserve = min(made.limit, share), min(made.reserve, share)
    return made


def too_many(what: str) -> APIError:
    """The refusal where a limit is reached."""
    return APIError(503, "Busy", f"too many {what} are open", [("Retry-After", "5")])
