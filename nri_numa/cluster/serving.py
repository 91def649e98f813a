"""Metrics and probes of the publisher, on loopback, over the connections of the HTTP room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import h11

from nri_numa.http.api import APIError, Response, parse_target
from nri_numa.http.connection import REQUEST_TIMEOUT, Connection
from nri_numa.http.sockets import close

MOST: Final = 16
"""Connections at a time; a probe and a scraper need two."""
TEXT: Final = "text/plain; charset=utf-8"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"


class ProbeServer:
    """Answers /metrics, /healthz and /readyz.

    Args:
        version: for the Server header.
        metrics: makes the text.
        not_ready: why it is not ready, as a sentence; empty when it is.
    """

    def __init__(
        self, version: str, *, metrics: Callable[[], bytes], not_ready: Callable[[], str]
    ) -> None:
        self._name = f"nri-numa/{version}"
        self._metrics = metrics
        self._not_ready = not_ready
        self._open = 0
        self.port = 0

    async def run(self, host: str, port: int) -> None:
        """Serve until cancelled.

        Raises:
            OSError: the address cannot be had.
        """
        server = await asyncio.start_server(self._serve, host, port)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MOST:
                return
            deadline = asyncio.get_running_loop().time() + REQUEST_TIMEOUT
            connection = Connection(reader, writer, self._name, deadline=deadline)
            while (request := await connection.request()) is not None:
                await connection.send(self._answer(request), head=request.method == b"HEAD")
                if not connection.next():
                    return
        except (OSError, EOFError, TimeoutError, APIError, h11.ProtocolError):
            pass  # its loss
        finally:
            self._open -= 1
            await close(writer)

    def _answer(self, request: h11.Request) -> Response:
        if request.method not in (b"GET", b"HEAD"):
            return Response(405, b"expected GET or HEAD\n", TEXT, [("Allow", "GET, HEAD")])
        try:
            path, _, _ = parse_target(request.target)
        except APIError as error:
            return error.response()
        match path:
            case "/metrics":
                return Response(200, self._metrics(), METRICS)
            case "/healthz":
                return Response(200, b"ok\n", TEXT)
            case "/readyz":
                problem = self._not_ready()
                return Response(503 if problem else 200, f"{problem or 'ok'}\n".encode(), TEXT)
            case _:
                return Response(404, b"expected /metrics, /healthz or /readyz\n", TEXT)
