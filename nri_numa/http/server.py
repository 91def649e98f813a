"""Serves the API over HTTP/1.1: listens, decides who may be there, and answers.

It is read-only, so a request is a path and a few headers; everything else is turned away early. It
runs in a loop and a thread of its own (`nri_numa.node.serving`). This loop gives way to the one
that answers the runtime whenever it looks for something to do: between any two answers, and between
any two pieces of one.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import h11

from nri_numa.config import HTTP as HTTPConfig
from nri_numa.config import split_address
from nri_numa.errors import ConfigError
from nri_numa.http import connection as connections
from nri_numa.http.api import API, PROBES, APIError, Request, parse_target
from nri_numa.http.connection import MAX_HEADER_BYTES, Connection
from nri_numa.http.early_read import EarlyRead
from nri_numa.http.places import ConnectionPlace, ConnectionPlaces, Line
from nri_numa.http.security import Certificate, TokenFile, host_is_expected
from nri_numa.http.sockets import LOCAL, accept, close, forget, listen, listen_at
from nri_numa.http.source import AgentView
from nri_numa.http.streams import Changes
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

log = get_logger("http")

RETRY = 10.0
"""Seconds between two attempts to get an address that somebody else has."""
PROBE_TIMEOUT = 2.0
"""Seconds for everything, TLS handshake included, on a connection for which there was no place."""
MAX_REQUESTS = 1000
"""Requests of one connection; whoever has more to ask connects again, and queues with the rest."""
MAX_STREAMS = 32
TLS_RESERVE = 64
"""ConnectionPlaces of the reserve behind TLS, where one byte is enough to be looked at further."""
EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
EXHAUSTED_RETRY = 1.0
EXHAUSTED_SAID_EVERY = 60.0


class HTTPServer:
    """Listens, and answers.

    Args:
        config: the ``http`` section, checked.
        view: the agent.
        metrics: exposed, and counted into.
        version: named in the Server header.
        busy_for: seconds that the loop of the runtime's requests is at work without a pause.
        line: told whether newcomers stand in line.

    Attributes:
        problem: why it does not listen; empty when it does, or is off.
        address: where it listens.

    Raises:
        ConfigError: when the token or the certificate cannot be read.
    """

    def __init__(
        self,
        config: HTTPConfig,
        view: AgentView,
        metrics: Metrics,
        *,
        version: str,
        busy_for: Callable[[], float] = lambda: 0.0,
        line: Callable[[bool], object] = lambda there: None,
    ) -> None:
        wanted = split_address(config.address)
        if wanted is None and not config.socket:
            raise ConfigError("configuration", ["http.address: is off; there is nothing to serve"])
        self._host, self._port = wanted or ("", -1)
        self._socket = config.socket
        self._token = TokenFile(config.token_file) if config.token_file else None
        self._certificate = (
            Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
        )
        self._metrics = metrics
        self._server_name = f"nri-numa/{version}"
        self._changes = Changes(view)
        self._api = API(view, metrics, self._changes.stream, busy_for)
        self._places = _places(tls=self._certificate is not None)
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._line = Line(line)
        self._exhausted_at = -EXHAUSTED_SAID_EVERY
        self.problem = ""
        self.address: tuple[str, int] | None = None

    async def run(self) -> None:
        """Serve until cancelled; while the address is taken, say so and try again."""
        try:
            while not await self.start():  # noqa: ASYNC110  # nobody tells when an address is free
                await asyncio.sleep(RETRY)
            await asyncio.gather(*self._accepting)
        finally:
            await self.stop()

    async def start(self) -> bool:
        """Begin to listen; False when that is not possible now."""
        try:
            self._listeners = listen(self._host, self._port) if self._port >= 0 else []
        except OSError as error:
            self._cannot_listen(error)
            return False
        self._accepting = [asyncio.create_task(self._accept(one)) for one in self._listeners]
        if self._socket:
            self._accepting.append(asyncio.create_task(self._accept_at_socket()))
        self.problem = ""
        if self._port >= 0:
            self.address = self._listeners[0].getsockname()[:2]
        self._metrics.http_up.set(1)
        self._tell_expired()
        log.info(
            "http listening",
            address=f"{self.address[0]}:{self.address[1]}" if self.address else "off",
            tls=self._certificate is not None,
            token=self._token is not None,
        )
        return True

    async def _accept_at_socket(self) -> None:
        """Serve on the unix socket too; what is served elsewhere does not depend on it."""
        told = ""
        listener: socket.socket | None = None
        while listener is None:
            try:
                listener = listen_at(self._socket)
            except OSError as error:
                problem = f"{self._socket}: {error.strerror or error}"
                if problem != told:
                    log.error("no unix socket", problem=problem, remedy="see http.socket")
                told = problem
                await asyncio.sleep(RETRY)
        log.info("http listening at the unix socket", path=self._socket)
        self._listeners.append(listener)
        await self._accept(listener)

    def _tell_expired(self) -> None:
        if self._certificate is not None and (problem := self._certificate.expired()):
            log.error("certificate expired", problem=problem, remedy="renew http.tlsCert")

    def _cannot_listen(self, error: OSError) -> None:
        self._metrics.http_up.set(0)
        reason = error.strerror or str(error)
        remedy = "set http.address to another one"
        if error.errno == errno.EADDRINUSE:
            reason, remedy = "another program has it", "stop it, or set http.address to a free one"
        elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            reason = "this machine has no such address"
        problem = f"cannot listen on {self._host}:{self._port}: {reason}"
        if problem != self.problem:  # said once, not every ten seconds
            log.error(
                "no http: containers are placed as usual",
                problem=problem,
                remedy=f"{remedy}; tried again every {RETRY:.0f} s",
            )
        self.problem = problem

    async def stop(self) -> None:
        """Close the listeners and every connection."""
        self._metrics.http_up.set(0)
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
        self._metrics.http_connections.set(len(self._places))

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
        self._metrics.http_dropped.inc()
        self._left(place)

    def _left(self, place: ConnectionPlace) -> None:
        self._places.leave(place)
        self._metrics.http_connections.set(len(self._places))

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
            self._metrics.http_dropped.inc()  # too slow: its loss, and nothing to report
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
            if problem := self._certificate.refresh():
                log.warning("certificate not renewed", problem=problem)
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
            request = self._admit(event, local=place.client == LOCAL)
            if place.reserve and request.path not in PROBES:
                raise _too_many("connections")
            answer = self._api.respond(request)
            response = await answer if inspect.isawaitable(answer) else answer
        except APIError as error:
            response = error.response()
        except h11.RemoteProtocolError as error:
            bad = APIError(error.error_status_hint, "BadRequest", f"not HTTP: {error}")
            response = bad.response()
        except (OSError, EOFError, TimeoutError):
            raise
        except Exception:
            log.exception("http request failed", path=request.path if request else "")
            response = APIError(500, "Internal", "a mistake of ours; see the log").response()
        route = self._api.route_of(request) if request is not None else "other"
        self._metrics.http_request(route, response.status)
        place.answered += 1
        last = place.reserve or place.answered >= MAX_REQUESTS
        head = request is not None and request.method == "HEAD"
        await connection.send(response, head=head, last=last)
        place.idle_since = time.monotonic()
        return connection.next()

    def _admit(self, event: h11.Request, *, local: bool) -> Request:
        """The request, when whoever sends it may ask; over the unix socket the file's mode said so.

        Raises:
            APIError: when not.
        """
        headers: dict[bytes, bytes] = dict(event.headers)
        if not local and not host_is_expected(headers.get(b"host", b""), self._host):
            raise APIError(
                421,
                "MisdirectedRequest",
                "this server is only reachable as localhost or by its address",
            )
        path, segments, query = parse_target(event.target)
        if (
            self._token is not None
            and not local
            and self._api.needs_token(path)
            and not self._token.admits(headers.get(b"authorization", b""))
        ):
            raise APIError(
                401,
                "Unauthorized",
                "expected the header Authorization: Bearer TOKEN with the token of http.tokenFile",
                [("WWW-Authenticate", 'Bearer realm="nri-numa"')],
            )
        if segments == ("v1", "events") and len(self._changes) >= MAX_STREAMS:
            raise _too_many("event streams")
        return Request(
            event.method.decode("ascii", "replace"),
            path,
            segments,
            query,
            headers.get(b"if-none-match", b"").decode("latin-1"),
        )


def _places(*, tls: bool) -> ConnectionPlaces:
    """As many as there should be, and half of the files that may be open at most.

    The other half is for the runtime's socket and the checkpoint, which clients must not keep out.
    """
    share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
    made = ConnectionPlaces(reserve=TLS_RESERVE) if tls else ConnectionPlaces()
    if share > 0:  # not RLIM_INFINITY
        made.limit, made.reserve = min(made.limit, share), min(made.reserve, share)
    return made


def _too_many(what: str) -> APIError:
    return APIError(503, "Busy", f"too many {what} are open", [("Retry-After", "5")])
