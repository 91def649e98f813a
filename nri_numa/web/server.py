"""HTTP server of all processes: listeners, connection slots by peer, deadlines, TLS, probes.

Nothing is allocated for a client before it is due: a connection gets a slot before anything is read
from it, TLS and a stream only after its first byte, and memory for a body only after admission. So
the number of slots bounds the cost of all clients. If no slot is free, the longest idle connection
is closed, else the oldest one of the peer with the most connections. A new connection without a
slot is in the *reserve* for a moment, where only probes are answered: the kubelet must not restart
a plugin because it is under attack.

A connection in the kernel's queue may be a probe, so each round of the loop accepts all of them, up
to `MAX_ACCEPTS_PER_ROUND`, and reads their first bytes. A probe is answered at once. All others
pass a `TurnQueue`: each round starts one connection and answers one request.
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
)
from nri_numa.web.security import Certificate, is_expected_host

log = get_logger("http")

MAX_ORDINARY_CONNECTIONS = 128
MAX_RESERVE_CONNECTIONS = 1024
"""As many as the kernel's queue holds: a client with an ordinary request need not retry."""
MAX_TLS_RESERVE_CONNECTIONS: Final = 64
"""Slots of the reserve behind TLS, where one byte starts a handshake."""
PROBE_PATHS: Final = frozenset(("/healthz", "/readyz"))
"""Paths that need no token and are answered even if no slot is free."""
_PROBE_STARTS: Final = tuple(f"GET {path}".encode() for path in sorted(PROBE_PATHS))
_HEAD_END_PATTERN: Final = re.compile(rb"\n\r?\n")
_PROBE_REQUEST_PATTERN: Final = re.compile(
    rb"(?:%s)(?:\?[^ \r\n]*)? HTTP/1\.[01]\r?\n(?:[^\r\n]+\r?\n)*\r?\n" % b"|".join(_PROBE_STARTS)
)
"""A complete probe: a client that sends further requests is no kubelet."""
MAX_ACCEPTS_PER_ROUND: Final = 64
"""Connections in one round of the loop: 0.1 ms each."""
PROBE_TIMEOUT_S: Final = 2.0
"""Seconds for everything, TLS handshake included, on a connection in the reserve."""
RESERVE_GRACE_S: Final = 0.02
"""Minimum seconds of a connection in the reserve; accepting pauses if needed."""
MAX_PROBE_BYTES: Final = 4096
"""Bytes of a request in the reserve; a probe has a tenth of that."""
CLOSE_TIMEOUT_S: Final = 1.0
"""Seconds for the end of a connection: a TLS client may never send close_notify."""
MAX_REQUESTS_PER_CONNECTION = 1000
"""Requests of one connection; a client with more must connect again and queue."""
MAX_BODY_BYTES_TOTAL: Final = 32 << 20
"""Bytes of all bodies that are read at the same time."""
LISTEN_BACKLOG: Final = 1024
EXHAUSTION_ERRNOS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
EXHAUSTION_RETRY_S = 1.0
EXHAUSTION_LOG_INTERVAL_S: Final = 60.0
UNIX_PEER: Final = "unix"
"""Address of every client that connects over a unix socket."""
sslproto.SSLProtocol.max_size = 32 << 10
# Size of asyncio's buffers for each TLS connection, by default 256 KiB. Two records of TLS are
# enough: with 512 connections that is 16 MiB instead of 128.


@dataclass(eq=False, slots=True)
class ConnectionSlot:
    """Slot of one connection.

    Attributes:
        is_reserve: True if only probes are answered, and only one request.
        answered_at: time of the last response; None during a request and before the first one.
        first_bytes: bytes that were read before the stream exists.
        timer: closes the connection if no stream exists in time.
    """

    peer: str
    accepted_at: float
    close_connection: Callable[[], object] = lambda: None
    is_reserve: bool = False
    answered_at: float | None = None
    answered: int = 0
    first_bytes: bytes = b""
    timer: asyncio.TimerHandle | None = None


class ConnectionLimiter:
    """All slots: ``limit`` ordinary ones, and a ``reserve`` in which only probes are answered."""

    def __init__(self, limit: int, reserve: int, clock: Callable[[], float]) -> None:
        self.limit, self.reserve, self._clock = limit, reserve, clock
        self._ordinary: dict[ConnectionSlot, None] = {}
        self._reserve: dict[ConnectionSlot, None] = {}
        self._peers: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._reserve)

    @property
    def has_reserve_connections(self) -> bool:
        """True if connections are in the reserve; one of them may be a probe."""
        return bool(self._reserve)

    def accept_pause_s(self) -> float:
        """Return the seconds until the oldest connection in the reserve had its grace period."""
        if len(self._ordinary) < self.limit or len(self._reserve) < self.reserve:
            return 0.0
        return max(0.0, next(iter(self._reserve)).accepted_at + RESERVE_GRACE_S - self._clock())

    def acquire_slot(self, peer: str) -> ConnectionSlot:
        """Return a slot for a new connection; another connection may be closed for it."""
        slot = ConnectionSlot(peer, self._clock())
        if len(self._ordinary) >= self.limit:
            victim = self._longest_idle_slot() or self._oldest_slot_of_top_peer(peer)
            if victim is None:
                slot.is_reserve = True
                if len(self._reserve) >= self.reserve:
                    self._close_slot(next(iter(self._reserve)))
                self._reserve[slot] = None
                return slot
            self._close_slot(victim)
        self._ordinary[slot] = None
        self._peers[peer] += 1
        return slot

    def release_slot(self, slot: ConnectionSlot) -> None:
        """Release the slot of a connection that ended; a repeated call has no effect."""
        slot.close_connection = lambda: None  # breaks the reference cycle with the connection
        if slot.timer is not None:
            slot.timer.cancel()
        self._reserve.pop(slot, None)
        if slot in self._ordinary:
            del self._ordinary[slot]
            self._peers -= Counter((slot.peer,))

    def close_all_connections(self) -> None:
        """Close every connection."""
        for slot in [*self._ordinary, *self._reserve]:
            self._close_slot(slot)

    def _close_slot(self, slot: ConnectionSlot) -> None:
        close_connection = slot.close_connection
        self.release_slot(slot)
        close_connection()

    def _longest_idle_slot(self) -> ConnectionSlot | None:
        """Return the slot that is idle longest; its client can connect again."""
        idle_slots = [(p.answered_at, n, p) for n, p in enumerate(self._ordinary) if p.answered_at]
        return min(idle_slots)[2] if idle_slots else None

    def _oldest_slot_of_top_peer(self, newcomer: str) -> ConnectionSlot | None:
        """Return the oldest slot of the peer with the most, if the newcomer has fewer."""
        peer, count = self._peers.most_common(1)[0]
        if count <= self._peers[newcomer] + 1:
            return None
        return next(p for p in self._ordinary if p.peer == peer)


class TurnQueue:
    """Queue that runs one step in each round of the loop: priority steps first, then in order.

    It is one step only, because the agent's loop sleeps for a round's CPU time before the next one,
    and that sleep is bounded (`nri_numa.agent.loop`): longer rounds would exceed the CPU budget.
    """

    def __init__(self) -> None:
        self._priority_queue: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._queue: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._scheduled = False

    def enqueue_step(
        self, key: Hashable, callback: Callable[[], object], *, priority: bool = False
    ) -> None:
        """Call ``callback`` in one of the next rounds."""
        (self._priority_queue if priority else self._queue)[key] = callback
        self._schedule_next()

    def cancel_step(self, key: Hashable) -> None:
        """Remove a step from the queue; a repeated call has no effect."""
        self._priority_queue.pop(key, None)
        self._queue.pop(key, None)

    async def wait_for_round(self, *, priority: bool = False) -> None:
        """Wait until the queue reaches the caller."""
        event = asyncio.Event()
        self.enqueue_step(event, event.set, priority=priority)
        try:
            await event.wait()
        finally:
            self.cancel_step(event)

    def _schedule_next(self) -> None:
        if not self._scheduled and (self._priority_queue or self._queue):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run_next_step)

    def _run_next_step(self) -> None:
        self._scheduled = False
        if queue := self._priority_queue or self._queue:
            _, callback = queue.popitem(last=False)
            self._schedule_next()
            callback()


class Server:
    """A server that answers requests by its routes; subclasses override the methods below.

    ``host`` is the address to listen on; ``max_connections`` replaces `MAX_ORDINARY_CONNECTIONS`.
    """

    def __init__(
        self,
        host: str,
        routes: Iterable[Route],
        *,
        certificate: Certificate | None = None,
        max_connections: int | None = None,
    ) -> None:
        self._host, self._certificate = host, certificate
        self.routes = tuple(routes)
        self._limiter = ConnectionLimiter(
            max_connections or MAX_ORDINARY_CONNECTIONS,
            MAX_TLS_RESERVE_CONNECTIONS if certificate else MAX_RESERVE_CONNECTIONS,
            lambda: asyncio.get_running_loop().time(),  # deadlines are set by the loop's clock
        )
        # Half of the file descriptors are left for other uses, such as the checkpoint.
        fd_share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        if fd_share > 0:  # not RLIM_INFINITY
            self._limiter.limit = min(self._limiter.limit, fd_share)
            self._limiter.reserve = min(self._limiter.reserve, fd_share)
        self._listeners: dict[socket.socket, asyncio.TimerHandle | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_queue, self._answer_queue = TurnQueue(), TurnQueue()
        self._exhausted_at = -EXHAUSTION_LOG_INTERVAL_S
        self._body_bytes = 0
        self.address: tuple[str, int] | None = None

    @property
    def listening_port(self) -> int:
        """Port that it listens on; 0 before it does."""
        return self.address[1] if self.address else 0

    # --- methods for subclasses ---------------------------------------------------------------

    def check_request_allowed(self, request: HTTPRequest) -> None:
        """Raise `APIError` if a request is forbidden, whatever its path."""

    def error_response(self, error: APIError) -> Response:
        """Return the response for an error."""
        return error.error_response()

    def on_request_answered(self, request: HTTPRequest | None, status: int) -> None:
        """Handle an answered request; it is None if it was no HTTP."""

    def on_connection_dropped(self) -> None:
        """Handle a connection that was closed because it had no slot or was too slow."""

    def on_connection_count(self, count: int, *, crowded: bool) -> None:
        """Handle a new number of open connections; crowded as `has_reserve_connections`."""

    # --- listeners ----------------------------------------------------------------------------

    def listen_on_port(self, port: int) -> None:
        """Serve on all addresses of the host, of the machine if it is empty; raises `OSError`."""
        addresses = socket.getaddrinfo(
            self._host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(s) for s in take_systemd_sockets()]
            for host, n, *_ in (s.getsockname() for s in sockets):
                if (host, n) not in {address[:2] for *_, address in addresses}:
                    raise OSError(errno.EINVAL, f"ListenStream= of the socket unit is {host}:{n}")
            sockets = sockets or [
                stack.enter_context(
                    socket.create_server(address, family=family, backlog=LISTEN_BACKLOG)
                )
                for family, _, _, _, address in dict.fromkeys(addresses)
                # Each family has a socket of its own if the kernel supports both.
                if family == socket.AF_INET or socket.has_dualstack_ipv6()
            ]
            stack.pop_all()
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        self.address = sockets[0].getsockname()[:2]
        for sock in sockets:
            # Connections inherit it. asyncio sets it only if the protocol is named. Without it an
            # answer after a TLS handshake waits 40 ms for the client's acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve_at(sock)

    def listen_on_unix_socket(self, path: str) -> None:
        """Serve on a unix socket, for its user and the group of its directory; raises `OSError`.

        A socket that an earlier process left is removed.
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
        self._limiter.close_all_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept_connection(self, listener: socket.socket) -> None:
        """Accept all connections of the kernel's queue, up to `MAX_ACCEPTS_PER_ROUND`.

        A probe in the reserve has 16 rounds until new connections replace it. Behind TLS a probe is
        known only after the handshake, 2 ms of CPU time: so there one is accepted in each round.
        """
        limit = min(MAX_ACCEPTS_PER_ROUND, max(1, self._limiter.reserve // 16))
        for _ in range(1 if self._certificate and listener.family != socket.AF_UNIX else limit):
            try:
                sock, peer = listener.accept()
            except OSError as error:
                if error.errno in EXHAUSTION_ERRNOS:
                    self._report_exhaustion(error)
                    self._pause_listener(listener, EXHAUSTION_RETRY_S)
                break  # the queue is empty, or the client has left it
            self._assign_slot(sock, str(peer[0]) if peer else UNIX_PEER)
            if pause := self._limiter.accept_pause_s():
                self._pause_listener(listener, pause)
                break
        self.on_connection_count(len(self._limiter), crowded=self._limiter.has_reserve_connections)

    def _assign_slot(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        slot = self._limiter.acquire_slot(peer)
        slot.close_connection = partial(self._close_unserved, sock, slot)
        loop = asyncio.get_running_loop()
        slot.timer = loop.call_at(_first_request_deadline(slot), slot.close_connection)
        loop.add_reader(sock, self._receive_first_bytes, sock, slot)
        self._receive_first_bytes(sock, slot)  # most clients have sent their request already

    def _pause_listener(self, listener: socket.socket, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        self._listeners[listener] = loop.call_later(seconds, self._serve_at, listener)

    def _report_exhaustion(self, error: OSError) -> None:
        if time.monotonic() - self._exhausted_at >= EXHAUSTION_LOG_INTERVAL_S:
            self._exhausted_at = time.monotonic()
            log.warning(
                "connections not accepted",
                problem=error.strerror,
                connection_count=len(self._limiter),
                remedy="raise the limit of open files (LimitNOFILE) to 1024 or more",
            )

    # --- connections --------------------------------------------------------------------------

    def _receive_first_bytes(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        """Read the first bytes of a connection, for which nothing is allocated before.

        In the reserve they must be a whole request, up to `MAX_PROBE_BYTES`, because thousands of
        connections may pass it. So must a probe, which is served without the queue.
        """
        tls = self._uses_tls(slot)
        try:
            data = sock.recv(1, socket.MSG_PEEK) if tls else sock.recv(MAX_PROBE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not tls:
            slot.first_bytes += data
        is_complete = (
            _HEAD_END_PATTERN.search(slot.first_bytes) or len(slot.first_bytes) >= MAX_PROBE_BYTES
        )
        if not data or (slot.is_reserve and len(slot.first_bytes) >= MAX_PROBE_BYTES):
            self._close_unserved(sock, slot)
        elif tls or _PROBE_REQUEST_PATTERN.fullmatch(slot.first_bytes):
            self._begin_serving(sock, slot)
        elif is_complete or not (slot.is_reserve or _can_be_probe(slot.first_bytes)):
            asyncio.get_running_loop().remove_reader(sock)
            callback = partial(self._begin_serving, sock, slot)
            self._start_queue.enqueue_step(slot, callback, priority=not slot.is_reserve)

    def _begin_serving(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        """Serve a connection whose client has sent its first bytes."""
        asyncio.get_running_loop().remove_reader(sock)
        if slot.timer is not None:
            slot.timer.cancel()
        task = asyncio.create_task(self._serve_connection(sock, slot))
        slot.close_connection = task.cancel
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_done(task, sock, slot))

    def _close_unserved(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        """Close a connection that has sent too little, or that the queue did not reach in time."""
        self._start_queue.cancel_step(slot)
        asyncio.get_running_loop().remove_reader(sock)
        sock.close()
        self.on_connection_dropped()
        self._release_slot(slot)

    def _on_task_done(
        self, task: asyncio.Task[None], sock: socket.socket, slot: ConnectionSlot
    ) -> None:
        self._tasks.discard(task)
        sock.close()
        if task.cancelled():
            self.on_connection_dropped()
        elif (error := task.exception()) is not None:
            log.error("http connection failed", error=repr(error))
        self._release_slot(slot)

    def _release_slot(self, slot: ConnectionSlot) -> None:
        self._limiter.release_slot(slot)
        self.on_connection_count(len(self._limiter), crowded=self._limiter.has_reserve_connections)

    def _uses_tls(self, slot: ConnectionSlot) -> bool:
        return self._certificate is not None and slot.peer != UNIX_PEER

    async def _serve_connection(self, sock: socket.socket, slot: ConnectionSlot) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout_at(_first_request_deadline(slot)) as limit:
                reader, writer = await self._open_streams(sock, tls=self._uses_tls(slot))
                # A response that was started is completed first.
                next_round = partial(self._answer_queue.wait_for_round, priority=True)
                connection = HTTPConnection(reader, writer, limit, slot.first_bytes, next_round)
                while await self._serve_request(connection, slot):
                    pass
        except TimeoutError as error:
            self.on_connection_dropped()  # the client is too slow: nothing to log
            _clear_tracebacks(error)
        except (OSError, EOFError, h11.LocalProtocolError) as error:
            _clear_tracebacks(error)  # the client has disconnected
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
        """Open the streams of an accepted connection, after the TLS handshake if there is one."""
        loop = asyncio.get_running_loop()
        context = (
            self._certificate.current_context() if tls and self._certificate is not None else None
        )
        reader = asyncio.StreamReader(limit=protocol.MAX_HEADER_BYTES)
        streams = _Streams(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: streams, sock, ssl=context)
        except asyncio.CancelledError:
            # asyncio waits for the client's close_notify if the handshake is complete.
            if streams.transport is not None:
                streams.transport.abort()
            raise
        return reader, asyncio.StreamWriter(transport, streams, reader, loop)

    async def _serve_request(self, connection: HTTPConnection, slot: ConnectionSlot) -> bool:
        """Serve one request; False if it was the last one of the connection."""
        request: HTTPRequest | None = None
        try:
            event = await connection.read_request_head()
            slot.answered_at = None
            if event is None:
                return False
            # Not queued again: the only request of the reserve, and a probe.
            if slot.answered or not (slot.is_reserve or _path_of(event) in PROBE_PATHS):
                await self._answer_queue.wait_for_round()
            request = connection.parse_request_head(event, local=slot.peer == UNIX_PEER)
            try:
                if slot.is_reserve and request.path not in PROBE_PATHS:
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
        slot.answered += 1
        shutdown = slot.is_reserve or slot.answered >= MAX_REQUESTS_PER_CONNECTION
        head = request is not None and request.method == "HEAD"
        await connection.send_response(response, head=head, shutdown=shutdown)
        slot.answered_at = time.monotonic()
        return connection.prepare_next_request()

    def _admitted_route(self, request: HTTPRequest) -> Route:
        """Return the route of a request, or raise `APIError` if it is not allowed."""
        if not (request.local or is_expected_host(request.header_value(b"host"), self._host)):
            problem = "this server is only reachable as localhost or by its address"
            raise APIError(421, "MisdirectedRequest", problem)
        self.check_request_allowed(request)
        route = protocol.resolve_route(self.routes, request)
        if route.method != "GET" and (origin := request.header_value(b"origin")):
            # Browsers send such requests for foreign pages; the agent's own page never does.
            page = origin[:80].decode("latin-1")
            raise APIError(403, "Forbidden", f"the page {page} asks, expected no page")
        route.admit(request)
        return route

    @contextlib.contextmanager
    def _reserve_body(self, size: int) -> Iterator[None]:
        """Reserve memory for a body while it is read and answered."""
        if self._body_bytes + size > MAX_BODY_BYTES_TOTAL:
            raise protocol.too_many_open_error("request bodies")
        self._body_bytes += size
        try:
            yield
        finally:
            self._body_bytes -= size


class _Streams(asyncio.StreamReaderProtocol):
    """Stream protocol with its transport, while it has one."""

    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Drop the transport; a cycle would stay until garbage collection."""
        self.transport = None
        super().connection_lost(exc)


class MetricsAndProbeServer(Server):
    """A server of routes, metrics and probes; its errors are documents with one sentence.

    ``unready_reason`` returns an empty text if it is ready; ``count_request`` is called with path
    and status of each request to one of the routes.
    """

    def __init__(
        self,
        host: str,
        routes: Iterable[Route] = (),
        *,
        metrics: Callable[[], bytes],
        unready_reason: Callable[[], str],
        certificate: Certificate | None = None,
        count_request: Callable[[str, int], object] = lambda path, status: None,
        max_connections: int | None = None,
    ) -> None:
        def serve_readyz(request: HTTPRequest) -> Response:
            problem = unready_reason()
            return Response(
                503 if problem else 200, f"{problem or 'ok'}\n".encode(), TEXT_CONTENT_TYPE
            )

        routes = [
            *routes,
            Route("GET", "/metrics", lambda request: Response(200, metrics(), METRICS)),
            Route("GET", "/healthz", lambda request: Response(200, b"ok\n", TEXT_CONTENT_TYPE)),
            Route("GET", "/readyz", serve_readyz),
        ]
        super().__init__(host, routes, certificate=certificate, max_connections=max_connections)
        self._count_request = count_request

    def error_response(self, error: APIError) -> Response:
        """Return an error as a document with one sentence."""
        body = json.dumps({"error": error.message}).encode()
        return Response(error.status, body, headers=error.headers)

    def on_request_answered(self, request: HTTPRequest | None, status: int) -> None:
        """Count the request."""
        routes = protocol.routes_for_path(self.routes, request) if request is not None else ()
        for route in routes[:1]:
            self._count_request(route.path, status)


def take_systemd_sockets() -> list[socket.socket]:
    """Take over the sockets that the service manager has opened, sd_listen_fds(3)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    return [socket.socket(fileno=os.dup(3 + n)) for n in range(int(os.environ["LISTEN_FDS"]))]


def unix_listener(path: str) -> socket.socket:
    """Open a socket that listens at a path; `Server.listen_on_unix_socket`."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else than a socket", path)
        os.unlink(path)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        umask = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(umask)
        with contextlib.suppress(OSError):  # without CAP_CHOWN: the directory's setgid bit did it
            os.chown(path, -1, os.stat(os.path.dirname(path)).st_gid)
        os.chmod(path, 0o660)
        sock.listen(LISTEN_BACKLOG)
        stack.pop_all()
    return sock


def _can_be_probe(data: bytes) -> bool:
    return any(start[: len(data)] == data[: len(start)] for start in _PROBE_STARTS)


def _path_of(event: h11.Request) -> str:
    return event.target.partition(b"?")[0].decode("latin-1")


def _first_request_deadline(slot: ConnectionSlot) -> float:
    """Return the deadline of the first request, TLS handshake included, in the loop's time."""
    return slot.accepted_at + (PROBE_TIMEOUT_S if slot.is_reserve else protocol.REQUEST_TIMEOUT_S)


async def _close_writer(writer: asyncio.StreamWriter) -> None:
    """Close a connection gracefully, within `CLOSE_TIMEOUT_S`."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        _clear_tracebacks(error)
    finally:
        writer.transport.abort()


def _clear_tracebacks(error: BaseException) -> None:
    """Clear the frames of an exception and of its causes.

    asyncio leaves reference cycles of futures and exceptions to the garbage collector, and with
    them a connection with its buffers (300 kB behind TLS). Old cycles are not collected for
    minutes: a client that starts many handshakes and completes none would fill the memory.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
