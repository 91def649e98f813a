"""HTTP of the controller: PUT of capacity, metrics and probes. The one place with aiohttp."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

from aiohttp import web

from nri_numa.controller.nodes import UnknownNode
from nri_numa.http.security import Certificate, TokenFile
from nri_numa.offline_capacity import BadCapacity

LARGEST: Final = 65536
"""Bytes of a body; 1,024 NUMA nodes take less than half."""
PATH: Final = "/v1/nodes/{node}/offline-capacity"
METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Desk(Protocol):
    """What the server speaks for."""

    def put(self, node: str, document: object) -> str:
        """Take what a PUT says; a sentence about what may keep it from having an effect."""

    def delete(self, node: str) -> None:
        """What was PUT for a node does not count any more."""

    def shown(self, node: str) -> dict[str, Any]:
        """What holds for a node."""

    def not_ready(self) -> str:
        """Why this replica takes nothing, as a sentence; empty when it does."""

    def metrics(self) -> bytes:
        """In Prometheus' text format."""


class Server:
    """Serves until it is cancelled.

    Attributes:
        port: that it listens on.

    Args:
        desk: is asked.
        token_file: with the bearer token; empty: nothing can be PUT.
        certificate, key: PEM files; empty for no TLS.
        more: paths of others that are served too.

    Raises:
        ConfigError: token or certificate cannot be read.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        version: str,
        token_file: str,
        certificate: str,
        key: str,
        more: Iterable[web.RouteDef] = (),
    ) -> None:
        self._desk = desk
        self._token = TokenFile(token_file) if token_file else None
        self._context = Certificate(certificate, key).context if certificate else None
        self.port = 0
        self._name = f"nri-numa/{version}"
        self._app = web.Application(client_max_size=LARGEST, middlewares=[self._frame])
        self._app.add_routes(
            [
                web.put(PATH, self._put),
                web.delete(PATH, self._delete),
                web.get(PATH, self._get),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                *more,
            ]
        )

    async def start(self, host: str, port: int) -> web.AppRunner:
        """Listen; whoever calls cleans the runner up at the end.

        Raises:
            OSError: the address cannot be had.
        """
        runner = web.AppRunner(
            self._app, access_log=None, keepalive_timeout=30.0, shutdown_timeout=2.0
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, host or None, port, ssl_context=self._context)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self.port = int(runner.addresses[0][1])
        return runner

    @web.middleware
    async def _frame(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            # aiohttp's own words, in our form.
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = _problem(error.status, error.reason, headers)
        except BadCapacity as error:
            response = _problem(422, str(error))
        except UnknownNode as error:
            response = _problem(404, str(error))
        response.headers["Server"] = self._name
        response.headers["Cache-Control"] = "no-store"
        return response

    def _admit(self, request: web.Request) -> web.Response | None:
        """Why a request is not let in; None when it is."""
        if self._token is None:
            return _problem(403, "controller.tokenFile is not set, so nobody may PUT")
        if not self._token.admits(request.headers.get("Authorization", "").encode()):
            return _problem(
                401,
                "expected the header Authorization: Bearer with the token of controller.tokenFile",
                {"WWW-Authenticate": "Bearer"},
            )
        if problem := self._desk.not_ready():
            return _problem(503, problem, {"Retry-After": "2"})
        return None

    async def _put(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._admit(request)) is not None:
            return refused
        try:
            document = json.loads(await request.text())
        except (ValueError, RecursionError, LookupError) as error:
            return _problem(400, f"the body is no JSON: {str(error)[:100]}")
        node = request.match_info["node"]
        warning = self._desk.put(node, document)
        return web.json_response({**self._desk.shown(node), "warning": warning})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._admit(request)) is not None:
            return refused
        self._desk.delete(request.match_info["node"])
        return web.Response(status=204)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._admit(request)) is not None:
            return refused
        return web.json_response(self._desk.shown(request.match_info["node"]))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._desk.metrics(), headers={"Content-Type": METRICS})

    async def _healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        problem = self._desk.not_ready()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")


def _problem(status: int, detail: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": detail}, status=status, headers=headers)
