"""Serves the API over HTTP/1.1: one small server on h11 and asyncio streams.

It is read-only, so a request is a path and a few headers; everything else is turned away early.
Nothing here may keep the event loop for long, because the same loop answers the runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import socket
from collections.abc import AsyncIterator, Callable

import h11

from nri_numa.config import HTTP as HTTPConfig
from nri_numa.config import split_address
from nri_numa.errors import ConfigError
from nri_numa.http.api import API, EVENTS, APIError, Request, Response, parse_target
from nri_numa.http.security import Certificate, TokenFile, host_is_expected
from nri_numa.http.view import AgentView
from nri_numa.logs import get_logger
from nri_numa.metrics import Metrics

log = get_logger("http")

RETRY = 10.0
"""Seconds between two attempts to get an address that somebody else has."""
REQUEST_TIMEOUT = 10.0
IDLE_TIMEOUT = 60.0
WRITE_TIMEOUT = 30.0
HEARTBEAT = 15.0
MAX_CONNECTIONS = 128
MAX_STREAMS = 32
MAX_HEADER_BYTES = 16 * 1024
MAX_BODY_BYTES = 4 * 1024
SETTLE = 0.25
"""Seconds in which several changes are told as one."""


class Changes:
    """Tells open event streams that the state changed; costs nothing while none is open."""

    def __init__(self, view: AgentView) -> None:
        self._view = view
        self._streams: set[asyncio.Event] = set()
        self._end: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    async def stream(self) -> AsyncIterator[bytes]:
        """Pieces of one event stream: where we are, then every change, then a heartbeat."""
        changed = asyncio.Event()
        changed.set()
        self._streams.add(changed)
        if self._end is None:
            self._end = self._view.subscribe(self._wake)
        try:
            yield b"retry: 2000\n\n"
            while True:
                try:
                    async with asyncio.timeout(HEARTBEAT):
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                changed.clear()
                yield self._event()
                await asyncio.sleep(SETTLE)
        finally:
            self._streams.discard(changed)
            if not self._streams and self._end is not None:
                self._end()
                self._end = None

    def _wake(self) -> None:
        for changed in self._streams:
            changed.set()

    def _event(self) -> bytes:
        status = self._view.status()
        data = (
            f'{{"serial":{status.serial},"version":"{status.version}",'
            f'"ready":{"true" if status.ready else "false"}}}'
        )
        return f"id: {status.serial}\nevent: state\ndata: {data}\n\n".encode()


class HTTPServer:
    """Listens, and answers.

    Args:
        config: the ``http`` section, checked.
        view: the agent.
        metrics: exposed, and counted into.
        version: named in the Server header.

    Attributes:
        problem: why it does not listen; empty when it does, or is off.
        address: where it listens.

    Raises:
        ConfigError: when the token or the certificate cannot be read.
    """

    def __init__(
        self, config: HTTPConfig, view: AgentView, metrics: Metrics, *, version: str
    ) -> None:
        wanted = split_address(config.address)
        if wanted is None:
            raise ConfigError("configuration", ["http.address: is off; there is nothing to serve"])
        self._host, self._port = wanted
        self._token = TokenFile(config.token_file) if config.token_file else None
        self._certificate = (
            Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
        )
        self._view = view
        self._metrics = metrics
        self._server_name = f"nri-numa/{version}"
        self._changes = Changes(view)
        self._api = API(view, metrics, self._changes.stream)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.problem = ""
        self.address: tuple[str, int] | None = None

    async def run(self) -> None:
        """Serve until cancelled; while the address is taken, say so and try again."""
        try:
            while not await self.start():  # noqa: ASYNC110  # nobody tells when an address is free
                await asyncio.sleep(RETRY)
            await asyncio.Event().wait()
        finally:
            await self.stop()

    async def start(self) -> bool:
        """Begin to listen; False when that is not possible now."""
        try:
            self._server = await asyncio.start_server(
                self._accept,
                self._host or None,
                self._port,
                ssl=self._certificate.context if self._certificate else None,
                limit=MAX_HEADER_BYTES,
                reuse_address=True,
            )
        except OSError as error:
            self._cannot_listen(error)
            return False
        self.problem = ""
        sock = self._server.sockets[0]
        self.address = sock.getsockname()[:2]
        self._metrics.http_up.set(1)
        self._tell_expired()
        log.info(
            "http listening",
            address=f"{self.address[0]}:{self.address[1]}",
            tls=self._certificate is not None,
            token=self._token is not None,
        )
        return True

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
        """Close the listener and every connection."""
        self._metrics.http_up.set(0)
        if self._server is not None:
            self._server.close()
        self._server = None
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    # --- one connection -------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # streams run this in a task
        if self._certificate is not None and (problem := self._certificate.refresh()):
            log.warning("certificate not renewed", problem=problem)
        connection = _Connection(reader, writer, self._server_name)
        self._connections.add(task)
        try:
            if self._server is None:  # accepted while the listener was being closed
                return
            if len(self._connections) > MAX_CONNECTIONS:
                await connection.send(_busy("connections"), head=False)
                return
            while await self._exchange(connection):
                pass
        except (OSError, EOFError, TimeoutError, h11.LocalProtocolError):
            pass  # the client went away, or is too slow: its loss, and nothing to report
        except asyncio.CancelledError:
            if not task.cancelling():
                raise
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):
                    await writer.wait_closed()

    async def _exchange(self, connection: _Connection) -> bool:
        """One request and its answer; False when the connection is finished."""
        request: Request | None = None
        try:
            event = await connection.request()
            if event is None:
                return False
            request = self._admit(event)
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
        await connection.send(response, head=request is not None and request.method == "HEAD")
        return connection.next()

    def _admit(self, event: h11.Request) -> Request:
        """The request, when whoever sends it may ask.

        Raises:
            APIError: when not.
        """
        headers: dict[bytes, bytes] = dict(event.headers)
        if not host_is_expected(headers.get(b"host", b""), self._host):
            raise APIError(
                421,
                "MisdirectedRequest",
                "this server is only reachable as localhost or by its address",
            )
        path, segments, query = parse_target(event.target)
        if (
            self._token is not None
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


def _too_many(what: str) -> APIError:
    return APIError(503, "Busy", f"too many {what} are open", [("Retry-After", "5")])


def _busy(what: str) -> Response:
    return _too_many(what).response()


class _Connection:
    """h11 over a stream: requests in, answers out."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server_name: str
    ) -> None:
        self._reader, self._writer = reader, writer
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._server_name = server_name

    async def request(self) -> h11.Request | None:
        """The next request, its body read and thrown away; None when the client has no more."""
        request: h11.Request | None = None
        size = 0
        # A client may be idle between requests; once it begins one, it has to get on with it.
        timeout = IDLE_TIMEOUT
        while True:
            event = self._h11.next_event()
            if event is h11.NEED_DATA:
                if self._h11.they_are_waiting_for_100_continue:
                    raise APIError(413, "BodyTooLarge", "this API takes no request body")
                async with asyncio.timeout(timeout):
                    data = await self._reader.read(MAX_HEADER_BYTES)
                timeout = REQUEST_TIMEOUT
                self._h11.receive_data(data)
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > MAX_BODY_BYTES:
                    raise APIError(413, "BodyTooLarge", "this API takes no request body")
            elif isinstance(event, h11.EndOfMessage):
                return request
            else:  # ConnectionClosed, or PAUSED after a protocol switch that we never accept
                return None

    async def send(self, response: Response, *, head: bool) -> None:
        """Write an answer; a broken request makes it the last one."""
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = response.body
        headers = [
            ("Server", self._server_name),
            ("Content-Type", response.content_type),
            ("X-Content-Type-Options", "nosniff"),
            *response.headers,
        ]
        if not any(name == "Cache-Control" for name, _ in headers):
            headers.append(("Cache-Control", "no-store"))
        if isinstance(body, bytes):
            headers.append(("Content-Length", str(len(body))))
        if self._h11.their_state is not h11.DONE:
            headers.append(("Connection", "close"))
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]
        self._put(h11.Response(status_code=response.status, headers=raw))
        try:
            if isinstance(body, bytes):
                if not head and body:
                    self._put(h11.Data(data=body))
            elif not head:
                await self._send_pieces(body, flush=response.content_type == EVENTS)
        finally:
            if not isinstance(body, bytes):
                await body.aclose()  # type: ignore[attr-defined]  # ours are generators
        self._put(h11.EndOfMessage())
        await self._drain()

    async def _send_pieces(self, body: AsyncIterator[bytes], *, flush: bool) -> None:
        async for piece in body:
            if piece:
                self._put(h11.Data(data=piece))
            if flush and self._reader.at_eof():
                raise EOFError
            await self._drain()
            # drain() returns at once while the buffer has room; give others their turn. Once is not
            # enough: what was scheduled before the loop looked at its sockets runs before what it
            # found there, so a request of the runtime would wait for one more piece.
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    def next(self) -> bool:
        """Get ready for another request; False when the connection must be closed."""
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            return True
        return False

    def _put(self, event: h11.Event) -> None:
        data = self._h11.send(event)
        if data:
            self._writer.write(data)

    async def _drain(self) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT):
            await self._writer.drain()
