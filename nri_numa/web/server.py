"""The HTTP server of all our processes: listeners, places by peer, deadlines, TLS, probes.

A client pays for what it does before we pay for it: it gets a place before anything of it is read,
no TLS and no stream before its first byte, and no memory for a body before it may bring one. What
the process pays for clients is bounded by the number of places, whatever they do with them. When
there is no free one, a connection that waits between two requests makes room first, then one of the
client that has more than its share. A newcomer without a place is in the *reserve* for a moment,
where only probes are answered: a plugin under attack must not be restarted for it.

Who waits in the kernel's queue cannot be told from a probe, so each round of the loop accepts
whoever waits, up to `MAX_ACCEPTS_PER_ROUND`, and reads what they have said. A probe is answered at
once; everything else takes `TurnQueue`: one connection is begun in a round, and one request
answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import os
import re
import resource
import socket
import stat
import time
import traceback
from asyncio import sslproto
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

import h11

from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import METRICS_CONTENT_TYPE as METRICS
from nri_numa.web import protocol
from nri_numa.web.protocol import (
    TEXT_CONTENT_TYPE,
    APIError,
    HTTPConnection,
    HTTPRequest,
    Response,
    Route,
    Routes,
)
from nri_numa.web.security import Certificate, is_expected_host

log = get_logger("http")

MAX_ORDINARY_CONNECTIONS = 128
MAX_RESERVE_CONNECTIONS = 1024
"""As many as the kernel's queue has: who is here with an ordinary request does not come again."""
MAX_TLS_RESERVE_CONNECTIONS: Final = 64
"""Places of the reserve behind TLS, where one byte is enough for a handshake."""
PROBE_PATHS: Final = frozenset(("/healthz", "/readyz"))
"""Open to everybody, and answered even when there is no place for anything else."""
_PROBE_STARTS: Final = tuple(f"GET {path}".encode() for path in sorted(PROBE_PATHS))
_HEAD_END_PATTERN: Final = re.compile(rb"\n\r?\n")
_PROBE_REQUEST_PATTERN: Final = re.compile(
    rb"(?:%s)(?:\?[^ \r\n]*)? HTTP/1\.[01]\r?\n(?:[^\r\n]+\r?\n)*\r?\n" % b"|".join(_PROBE_STARTS)
)
"""All that the client of a probe says: whoever adds more requests is no kubelet."""
MAX_ACCEPTS_PER_ROUND: Final = 64
"""Connections in one round of the loop: 0.1 ms each."""
PROBE_TIMEOUT_S: Final = 2.0
"""Seconds for everything, TLS handshake included, on a connection in the reserve."""
RESERVE_GRACE_S: Final = 0.02
"""Seconds that a newcomer in the reserve has at least, if that needs a pause in accepting."""
MAX_PROBE_BYTES: Final = 4096
"""Bytes of a request in the reserve; a probe has a tenth of that."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Seconds for the end of a connection: a TLS client may never say good-bye."""
MAX_REQUESTS_PER_CONNECTION = 1000
"""Requests of one connection; a client that has more connects again, and queues with the rest."""
MAX_BODY_BYTES_TOTAL: Final = 32 << 20
"""Bytes of all bodies that are read at a time."""
LISTEN_BACKLOG: Final = 1024
EXHAUSTION_ERRNOS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
EXHAUSTION_RETRY_S = 1.0
EXHAUSTION_LOG_INTERVAL_S: Final = 60.0
UNIX_PEER: Final = "unix"
"""The address of every client that comes over a unix socket."""
sslproto.SSLProtocol.max_size = 32 << 10
# asyncio has buffers of so many bytes for each TLS connection, 256 KiB if nothing is set, and two
# of TLS's own records are enough: with 512 connections that is 16 MiB and not 128.


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    """One connection's right to be there.

    Attributes:
        is_reserve: only probes are answered, and one request.
        idle_since: when it began to wait for its next request; None while it has one, or has not
            made its first.
        first_bytes: what was read before there is a stream.
        timer: ends the connection until there is one.
    """

    peer: str
    accepted_at: float
    close_connection: Callable[[], object] = lambda: None
    is_reserve: bool = False
    idle_since: float | None = None
    answered: int = 0
    first_bytes: bytes = b""
    timer: asyncio.TimerHandle | None = None


class ConnectionLimiter:
    """All of them: ``limit`` for everybody, and a ``reserve`` in which probes are answered."""

    def __init__(self, limit: int, reserve: int, clock: Callable[[], float]) -> None:
        self.limit, self.reserve, self._clock = limit, reserve, clock
        self._ordinary: dict[ConnectionSlot, None] = {}
        self._reserve: dict[ConnectionSlot, None] = {}
        self._peers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._reserve)

    @property
    def has_reserve_connections(self) -> bool:
        """Whether there are newcomers without a place, and with them maybe a probe."""
        return bool(self._reserve)

    def accept_pause_s(self) -> float:
        """Seconds until one more newcomer can be in the reserve without cutting another short."""
        if len(self._ordinary) < self.limit or len(self._reserve) < self.reserve:
            return 0.0
        return max(0.0, next(iter(self._reserve)).accepted_at + RESERVE_GRACE_S - self._clock())

    def acquire_slot(self, peer: str) -> ConnectionSlot:
        """A place for a newcomer; another connection may lose its own for it."""
        place = ConnectionSlot(peer, self._clock())
        if len(self._ordinary) >= self.limit:
            victim = self._longest_idle_slot() or self._oldest_slot_of_top_peer(peer)
            if victim is None:
                place.is_reserve = True
                if len(self._reserve) >= self.reserve:
                    self._close_slot(next(iter(self._reserve)))
                self._reserve[place] = None
                return place
            self._close_slot(victim)
        self._ordinary[place] = None
        self._peers[peer] += 1
        return place

    def release_slot(self, place: ConnectionSlot) -> None:
        """A connection ended; once more does no harm."""
        place.close_connection = lambda: None  # it knows the connection, which knows its place
        if place.timer is not None:
            place.timer.cancel()
        self._reserve.pop(place, None)
        if place in self._ordinary:
            del self._ordinary[place]
            self._peers -= Counter((place.peer,))

    def close_all_connections(self) -> None:
        """End every connection."""
        for place in [*self._ordinary, *self._reserve]:
            self._close_slot(place)

    def _close_slot(self, place: ConnectionSlot) -> None:
        close = place.close_connection
        self.release_slot(place)
        close()

    def _longest_idle_slot(self) -> ConnectionSlot | None:
        """The one that waits longest for its next request; its client can connect again."""
        waiting = [(p.idle_since, n, p) for n, p in enumerate(self._ordinary) if p.idle_since]
        return min(waiting)[2] if waiting else None

    def _oldest_slot_of_top_peer(self, newcomer: str) -> ConnectionSlot | None:
        """The oldest connection of the peer with most of them, where a newcomer has fewer."""
        peer, most = self._peers.most_common(1)[0]
        if most <= self._peers[newcomer] + 1:
            return None
        return next(p for p in self._ordinary if p.peer == peer)


class TurnQueue:
    """One step of work in each round of the loop: what goes first, and then the rest, as they ask.

    One and no more, because the agent's loop pays back a round's CPU time before the next one, and
    that pause is bounded (`nri_numa.agent.loop`): what rounds cost beyond it would be forgiven.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._rest: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._scheduled = False

    def enqueue_step(
        self, who: Hashable, step: Callable[[], object], *, first: bool = False
    ) -> None:
        """Call ``step`` in its turn, which is in the next round or later."""
        (self._first if first else self._rest)[who] = step
        self._schedule_next()

    def withdraw(self, who: Hashable) -> None:
        """Take no turn after all; once more does no harm."""
        self._first.pop(who, None)
        self._rest.pop(who, None)

    async def wait_for_turn(self, *, first: bool = False) -> None:
        """Return in the caller's turn."""
        turn = asyncio.Event()
        self.enqueue_step(turn, turn.set, first=first)
        try:
            await turn.wait()
        finally:
            self.withdraw(turn)

    def _schedule_next(self) -> None:
        if not self._scheduled and (self._first or self._rest):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_next_step)

    def _run_next_step(self) -> None:
        self._scheduled = False
        if waiting := self._first or self._rest:
            _, step = waiting.popitem(last=False)
            self._schedule_next()
            step()


class Server:
    """Listens, and answers requests by its routes; a kind of server adds to `admit` and the like.

    ``host`` is where it listens; ``most`` are its connections, where that is not the usual number.
    """

    def __init__(
        self,
        host: str,
        routes: Iterable[Route],
        *,
        version: str,
        certificate: Certificate | None = None,
        most: int | None = None,
    ) -> None:
        self._host, self._certificate = host, certificate
        self._name = f"nri-numa/{version}"
        self.routes = Routes(tuple(routes))
        self._places = ConnectionLimiter(
            most or MAX_ORDINARY_CONNECTIONS,
            MAX_TLS_RESERVE_CONNECTIONS if certificate else MAX_RESERVE_CONNECTIONS,
            lambda: asyncio.get_running_loop().time(),  # deadlines are set by the loop's clock
        )
        # Half of the files that may be open are for other things than clients, as the checkpoint.
        share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        if share > 0:  # not RLIM_INFINITY
            self._places.limit = min(self._places.limit, share)
            self._places.reserve = min(self._places.reserve, share)
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts, self._answers = TurnQueue(), TurnQueue()
        self._exhausted_at = -EXHAUSTION_LOG_INTERVAL_S
        self._bodies = 0
        self.address: tuple[str, int] | None = None

    @property
    def listening_port(self) -> int:
        """That it listens on; 0 as long as it does not."""
        return self.address[1] if self.address else 0

    # --- what a kind of server adds -----------------------------------------------------------

    def check_request_allowed(self, request: HTTPRequest) -> None:
        """Raise `APIError` where a request may not be made, whatever its path."""

    def error_response(self, error: APIError) -> Response:
        """The answer that says an error."""
        return error.error_response()

    def on_request_answered(self, request: HTTPRequest | None, status: int) -> None:
        """A request was answered; None when it was no HTTP."""

    def on_connection_dropped(self) -> None:
        """A connection was closed because it had no place or was too slow."""

    def on_connection_count(self, count: int, *, crowded: bool) -> None:
        """So many connections are open now; `ConnectionLimiter.has_reserve_connections`."""

    # --- listeners ----------------------------------------------------------------------------

    def listen_on_port(self, port: int) -> None:
        """Serve on every address of the host, of the machine for an empty one; or `OSError`."""
        found = socket.getaddrinfo(
            self._host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.ExitStack() as made:
            sockets = [made.enter_context(one) for one in take_systemd_sockets()]
            for host, at, *_ in (one.getsockname() for one in sockets):
                if (host, at) not in {address[:2] for *_, address in found}:
                    raise OSError(errno.EINVAL, f"ListenStream= of the socket unit is {host}:{at}")
            sockets = sockets or [
                made.enter_context(
                    socket.create_server(address, family=family, backlog=LISTEN_BACKLOG)
                )
                for family, _, _, _, address in dict.fromkeys(found)
                # Each family has a socket of its own, where the kernel has both.
                if family == socket.AF_INET or socket.has_dualstack_ipv6()
            ]
            made.pop_all()
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        self.address = sockets[0].getsockname()[:2]
        for sock in sockets:
            # Connections inherit it. asyncio sets it only where the protocol is named, and without
            # it an answer after a TLS handshake waits 40 ms for the client's acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve_at(sock)

    def listen_on_unix_socket(self, path: str) -> None:
        """Serve on a unix socket, for its user and for the group of its directory; or `OSError`.

        One that an earlier process left behind is removed.
        """
        self._serve_at(unix_listener(path))

    def _serve_at(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners[listener] = None
        asyncio.get_running_loop().add_reader(listener, self._accept_connection, listener)

    async def stop(self) -> None:
        """Close the listeners and every connection."""
        for listener, paused in self._listeners.items():
            asyncio.get_running_loop().remove_reader(listener)
            if paused is not None:
                paused.cancel()
            listener.close()
        self._listeners.clear()
        self._places.close_all_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept_connection(self, listener: socket.socket) -> None:
        """Take whoever waits, up to `MAX_ACCEPTS_PER_ROUND`.

        A probe in the reserve has 16 rounds until newcomers end it. Behind TLS it is known after
        the handshake, 2 ms of CPU time: there the next one waits for its round.
        """
        most = min(MAX_ACCEPTS_PER_ROUND, max(1, self._places.reserve // 16))
        for _ in range(1 if self._certificate and listener.family != socket.AF_UNIX else most):
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTION_ERRNOS:
                    self._report_exhaustion(error)
                    self._pause_listener(listener, EXHAUSTION_RETRY_S)
                break  # nobody waits, or the client left the queue
            self._assign_slot(sock, str(peer[0]) if peer else UNIX_PEER)
            if pause := self._places.accept_pause_s():
                self._pause_listener(listener, pause)
                break
        self.on_connection_count(len(self._places), crowded=self._places.has_reserve_connections)

    def _assign_slot(self, sock: socket.socket, peer: str) -> None:
        """Give a place to a connection."""
        sock.setblocking(False)
        place = self._places.acquire_slot(peer)
        place.close_connection = partial(self._close_unserved, sock, place)
        loop = asyncio.get_running_loop()
        place.timer = loop.call_at(_first_request_deadline(place), place.close_connection)
        loop.add_reader(sock, self._receive_first_bytes, sock, place)
        self._receive_first_bytes(
            sock, place
        )  # a client that is in earnest has made its request by now

    def _pause_listener(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._listeners[listener] = loop.call_later(seconds, self._serve_at, listener)

    def _report_exhaustion(self, error: OSError) -> None:
        if time.monotonic() - self._exhausted_at >= EXHAUSTION_LOG_INTERVAL_S:
            self._exhausted_at = time.monotonic()
            log.warning(
                "no more connections can be taken",
                problem=error.strerror,
                open=len(self._places),
                remedy="raise the limit of open files (LimitNOFILE) to 1024 or more",
            )

    # --- connections --------------------------------------------------------------------------

    def _receive_first_bytes(self, sock: socket.socket, place: ConnectionSlot) -> None:
        """Nothing is made for a connection before its client has said something.

        In the reserve it must be a whole request, as far as that can be read: thousands may come
        there one after the other. So must a probe, which begins without waiting for a turn.
        """
        tls = self._uses_tls(place)
        try:
            said = sock.recv(1, socket.MSG_PEEK) if tls else sock.recv(MAX_PROBE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if not tls:
            place.first_bytes += said
        whole = (
            _HEAD_END_PATTERN.search(place.first_bytes) or len(place.first_bytes) >= MAX_PROBE_BYTES
        )
        if not said or (place.is_reserve and len(place.first_bytes) >= MAX_PROBE_BYTES):
            self._close_unserved(sock, place)
        elif tls or _PROBE_REQUEST_PATTERN.fullmatch(place.first_bytes):
            self._begin_serving(sock, place)
        elif whole or not (place.is_reserve or _can_be_probe(place.first_bytes)):
            asyncio.get_running_loop().remove_reader(sock)
            begin = partial(self._begin_serving, sock, place)
            self._starts.enqueue_step(place, begin, first=not place.is_reserve)

    def _begin_serving(self, sock: socket.socket, place: ConnectionSlot) -> None:
        """Serve a connection whose client has said something."""
        asyncio.get_running_loop().remove_reader(sock)
        if place.timer is not None:
            place.timer.cancel()
        task = asyncio.create_task(self._serve_connection(sock, place))
        place.close_connection = task.cancel
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_done(task, sock, place))

    def _close_unserved(self, sock: socket.socket, place: ConnectionSlot) -> None:
        """End a connection that has said too little, or had no turn in time."""
        self._starts.withdraw(place)
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()
        self.on_connection_dropped()
        self._release_slot(place)

    def _on_task_done(
        self, task: asyncio.Task[None], sock: socket.socket, place: ConnectionSlot
    ) -> None:
        self._tasks.discard(task)
        sock.close()
        if task.cancelled():
            self.on_connection_dropped()
        elif (error := task.exception()) is not None:
            log.error("http connection failed", error=repr(error))
        self._release_slot(place)

    def _release_slot(self, place: ConnectionSlot) -> None:
        self._places.release_slot(place)
        self.on_connection_count(len(self._places), crowded=self._places.has_reserve_connections)

    def _uses_tls(self, place: ConnectionSlot) -> bool:
        return self._certificate is not None and place.peer != UNIX_PEER

    async def _serve_connection(self, sock: socket.socket, place: ConnectionSlot) -> None:
        """One connection from its first byte to its end."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout_at(_first_request_deadline(place)) as limit:
                reader, writer = await self._open_streams(sock, tls=self._uses_tls(place))
                turn = partial(
                    self._answers.wait_for_turn, first=True
                )  # an answer that was begun is ended
                connection = HTTPConnection(reader, writer, limit, place.first_bytes, turn)
                while await self._serve_request(connection, place):
                    pass
        except TimeoutError as error:
            self.on_connection_dropped()  # too slow: its loss, and nothing to report
            _clear_tracebacks(error)
        except (OSError, EOFError, h11.LocalProtocolError) as error:
            _clear_tracebacks(error)  # the client went away: its loss too
        except asyncio.CancelledError as error:
            if writer is not None:
                writer.transport.abort()
                writer = None
            _clear_tracebacks(error)
            raise
        finally:
            if writer is not None:
                await _close_writer(writer)

    async def _open_streams(
        self, sock: socket.socket, *, tls: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The streams of an accepted connection, behind the TLS handshake where there is one."""
        loop = asyncio.get_running_loop()
        context = (
            self._certificate.current_context() if tls and self._certificate is not None else None
        )
        reader = asyncio.StreamReader(limit=protocol.MAX_HEADER_BYTES)
        streams = _Streams(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: streams, sock, ssl=context)
        except asyncio.CancelledError:
            # asyncio waits for the client's good-bye where the handshake is over already.
            if streams.transport is not None:
                streams.transport.abort()
            raise
        return reader, asyncio.StreamWriter(transport, streams, reader, loop)

    async def _serve_request(self, connection: HTTPConnection, place: ConnectionSlot) -> bool:
        """One request and its answer; False when the connection is finished."""
        request: HTTPRequest | None = None
        try:
            event = await connection.read_request_head()
            place.idle_since = None
            if event is None:
                return False
            # Without a turn: the only request of the reserve, which had one, and a probe.
            if place.answered or not (place.is_reserve or _path_of(event) in PROBE_PATHS):
                await self._answers.wait_for_turn()
            request = connection.parse_request_head(event, local=place.peer == UNIX_PEER)
            try:
                if place.is_reserve and request.path not in PROBE_PATHS:
                    raise protocol.too_many_open_error("connections")
                route = self._admitted_route(request)
            except APIError:
                await connection.discard_body()
                raise
            with self._reserve_body(connection.body_bytes_to_reserve(route.max_body_bytes)):
                body = await connection.read_body(route.max_body_bytes)
                answer = route.answer(replace(request, body=body))
                response = await answer if inspect.isawaitable(answer) else answer
        except APIError as error:
            response = self.error_response(error)
        except h11.RemoteProtocolError as error:
            bad = APIError(error.error_status_hint, "BadRequest", f"not HTTP: {error}")
            response = self.error_response(bad)
        except (OSError, EOFError):
            raise
        except Exception:
            log.exception("http request failed", path=request.path if request else "")
            response = self.error_response(
                APIError(500, "Internal", "a mistake of ours; see the log")
            )
        self.on_request_answered(request, response.status)
        place.answered += 1
        last = place.is_reserve or place.answered >= MAX_REQUESTS_PER_CONNECTION
        head = request is not None and request.method == "HEAD"
        await connection.send_response(response, self._name, head=head, last=last)
        place.idle_since = time.monotonic()
        return connection.prepare_next_request()

    def _admitted_route(self, request: HTTPRequest) -> Route:
        """The route of a request that may be made."""
        if not (request.local or is_expected_host(request.header_value(b"host"), self._host)):
            problem = "this server is only reachable as localhost or by its address"
            raise APIError(421, "MisdirectedRequest", problem)
        self.check_request_allowed(request)
        route = self.routes.resolve_route(request)
        if route.method != "GET" and (origin := request.header_value(b"origin")):
            # Browsers send some requests for foreign pages, and our own page sends none of these.
            page = origin[:80].decode("latin-1")
            raise APIError(403, "Forbidden", f"the page {page} asks, expected no page")
        route.admit(request)
        return route

    @contextlib.contextmanager
    def _reserve_body(self, size: int) -> Iterator[None]:
        """Memory for a body while it is read and answered."""
        if self._bodies + size > MAX_BODY_BYTES_TOTAL:
            raise protocol.too_many_open_error("request bodies")
        self._bodies += size
        try:
            yield
        finally:
            self._bodies -= size


class _Streams(asyncio.StreamReaderProtocol):
    """Knows its transport as long as it has one."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As in the base class."""
        self.transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As in the base class; a circle would wait for the collector (`_clear_tracebacks`)."""
        self.transport = None
        super().connection_lost(exc)


class MetricsAndProbeServer(Server):
    """A server of routes, metrics and probes; its errors are documents with one sentence.

    ``not_ready`` says why, and is empty when it is ready; ``counted`` is called with path and
    status of each request to one of the routes.
    """

    def __init__(
        self,
        host: str,
        routes: Iterable[Route] = (),
        *,
        version: str,
        metrics: Callable[[], bytes],
        not_ready: Callable[[], str],
        certificate: Certificate | None = None,
        counted: Callable[[str, int], object] = lambda path, status: None,
        most: int | None = None,
    ) -> None:
        def serve_readyz(request: HTTPRequest) -> Response:
            problem = not_ready()
            return Response(
                503 if problem else 200, f"{problem or 'ok'}\n".encode(), TEXT_CONTENT_TYPE
            )

        routes = [
            *routes,
            Route("GET", "/metrics", lambda request: Response(200, metrics(), METRICS)),
            Route("GET", "/healthz", lambda request: Response(200, b"ok\n", TEXT_CONTENT_TYPE)),
            Route("GET", "/readyz", serve_readyz),
        ]
        super().__init__(host, routes, version=version, certificate=certificate, most=most)
        self._counted = counted

    def error_response(self, error: APIError) -> Response:
        """An error as a document with one sentence."""
        body = json.dumps({"error": error.message}).encode()
        return Response(error.status, body, headers=error.headers)

    def on_request_answered(self, request: HTTPRequest | None, status: int) -> None:
        """Count it."""
        for route in self.routes.routes_for_path(request)[:1] if request is not None else ():
            self._counted(route.path, status)


def take_systemd_sockets() -> list[socket.socket]:
    """Those that the service manager opened for us: sd_listen_fds(3)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    return [socket.socket(fileno=os.dup(3 + n)) for n in range(int(os.environ["LISTEN_FDS"]))]


def unix_listener(path: str) -> socket.socket:
    """A socket that listens at a path; `Server.listen_on_unix_socket`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else than a socket", path)
        os.unlink(path)
    with contextlib.ExitStack() as made:
        sock = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        with contextlib.suppress(OSError):  # without CAP_CHOWN: the directory's setgid bit did it
            os.chown(path, -1, os.stat(os.path.dirname(path)).st_gid)
        os.chmod(path, 0o660)
        sock.listen(LISTEN_BACKLOG)
        made.pop_all()
    return sock


def _can_be_probe(said: bytes) -> bool:
    """Whether this may be the beginning of a probe."""
    return any(start[: len(said)] == said[: len(start)] for start in _PROBE_STARTS)


def _path_of(event: h11.Request) -> str:
    return event.target.partition(b"?")[0].decode("latin-1")


def _first_request_deadline(place: ConnectionSlot) -> float:
    """Of the first request of a connection, TLS handshake included, in the loop's time."""
    return place.accepted_at + (PROBE_TIMEOUT_S if place.is_reserve else protocol.REQUEST_TIMEOUT_S)


async def _close_writer(writer: asyncio.StreamWriter) -> None:
    """End a connection in good form, and in time."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        _clear_tracebacks(error)
    finally:
        writer.transport.abort()


def _clear_tracebacks(error: BaseException) -> None:
    """Let go of what the frames of an exception hold.

    asyncio leaves futures and exceptions that refer to each other, and with them a connection with
    its buffers (300 kB behind TLS), to the collector, which does not look at the older ones for
    minutes: a client that begins handshakes and ends none would fill the memory meanwhile.
    """
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
