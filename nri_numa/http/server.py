"""Serves the API over HTTP/1.1: listens, decides who may be there, and answers.

It is read-only, so a request is a path and a few headers; everything else is turned away early. It
runs in a loop and a thread of its own (`nri_numa.node.serving`). This loop gives way to the one
that answers the runtime whenever it looks for something to do: between any two answers, and between
any two pieces of one.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from nri_numa.config import HTTP as HTTPConfig
from nri_numa.config import split_address
from nri_numa.errors import ConfigError
from nri_numa.http.api import API, APIError, Request, Response
from nri_numa.http.guarded import GuardedServer, host_must_be_expected, too_many
from nri_numa.http.security import Certificate, TokenFile
from nri_numa.http.sockets import listen_at
from nri_numa.http.source import AgentView
from nri_numa.http.streams import Changes
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics

log = get_logger("http")

RETRY = 10.0
"""Seconds between two attempts to get an address that somebody else has."""
MAX_STREAMS = 32


class HTTPServer(GuardedServer):
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
        host, self._port = wanted or ("", -1)
        self._socket = config.socket
        self._token = TokenFile(config.token_file) if config.token_file else None
        certificate = Certificate(config.tls_cert, config.tls_key) if config.tls_cert else None
        super().__init__(host, version=version, certificate=certificate, line=line)
        self._metrics = metrics
        self._changes = Changes(view)
        self._api = API(view, metrics, self._changes.stream, busy_for)
        self.problem = ""

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
            if self._port >= 0:
                self.listen(self._port)
        except OSError as error:
            self._cannot_listen(error)
            return False
        if self._socket:
            self._accepting.append(asyncio.create_task(self._accept_at_socket()))
        self.problem = ""
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
        await super().stop()

    # --- requests -------------------------------------------------------------------------------

    def admit(self, request: Request) -> int:
        """No body; over the unix socket its mode has said who may ask."""
        if not request.local:
            host_must_be_expected(request, self._host)
            if (
                self._token is not None
                and self._api.needs_token(request.path)
                and not self._token.admits(request.header(b"authorization"))
            ):
                raise APIError(
                    401,
                    "Unauthorized",
                    "expected the header Authorization: Bearer TOKEN "
                    "with the token of http.tokenFile",
                    [("WWW-Authenticate", 'Bearer realm="nri-numa"')],
                )
        if request.segments == ("v1", "events") and len(self._changes) >= MAX_STREAMS:
            raise too_many("event streams")
        return 0

    def respond(self, request: Request) -> Awaitable[Response] | Response:
        """The API's answer."""
        return self._api.respond(request)

    def answered(self, request: Request | None, status: int) -> None:
        """Count it."""
        route = self._api.route_of(request) if request is not None else "other"
        self._metrics.http_request(route, status)

    def dropped(self) -> None:
        """Count it."""
        self._metrics.http_dropped.inc()

    def connected(self, count: int) -> None:
        """Show it."""
        self._metrics.http_connections.set(count)
