"""HTTP of the controller: PUT of capacity, metrics and probes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, Protocol

from nri_numa.controller.nodes import UnknownNode
from nri_numa.http.protocol import APIError, Request, Response, Route
from nri_numa.http.security import Certificate, TokenFile
from nri_numa.http.server import Site
from nri_numa.offline_capacity import BadCapacity

LARGEST: Final = 65536
"""Bytes of a body; 1,024 NUMA nodes take less than half."""
PATH: Final = "/v1/nodes/{node}/offline-capacity"


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


class Server(Site):
    """The controller's server.

    Args:
        host: that it listens on.
        desk: is asked.
        token_file: with the bearer token; empty: nothing can be PUT.
        certificate, key: PEM files; empty for no TLS.
        more: paths of others that are served too.

    Raises:
        ConfigError: token or certificate cannot be read.
    """

    def __init__(
        self,
        host: str,
        desk: Desk,
        *,
        version: str,
        token_file: str,
        certificate: str,
        key: str,
        more: Iterable[Route] = (),
    ) -> None:
        self._desk = desk
        self._token = TokenFile(token_file, setting="controller") if token_file else None
        super().__init__(
            host,
            version=version,
            metrics=desk.metrics,
            not_ready=desk.not_ready,
            certificate=(
                Certificate(certificate, key, setting="controller") if certificate else None
            ),
            routes=[
                Route("PUT", PATH, self._put, LARGEST, self._may),
                Route("DELETE", PATH, self._delete, LARGEST, self._may),
                Route("GET", PATH, self._get, LARGEST, self._may),
                *more,
            ],
        )

    def _may(self, request: Request) -> None:
        if self._token is None:
            raise APIError(403, "Forbidden", "controller.tokenFile is not set, so nobody may PUT")
        if not self._token.admits(request.header(b"authorization")):
            raise APIError(
                401,
                "Unauthorized",
                "expected the header Authorization: Bearer with the token of controller.tokenFile",
                [("WWW-Authenticate", "Bearer")],
            )
        if problem := self._desk.not_ready():
            raise APIError(503, "NotReady", problem, [("Retry-After", "2")])

    def _put(self, request: Request) -> Response:
        try:
            document = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            raise APIError(400, "BadRequest", f"the body is no JSON: {str(error)[:100]}") from error
        node = request.segments[2]
        try:
            warning = self._desk.put(node, document)
        except BadCapacity as error:
            raise APIError(422, "BadCapacity", str(error)) from error
        except UnknownNode as error:
            raise _unknown(error) from error
        return self._shown(node, warning=warning)

    def _delete(self, request: Request) -> Response:
        try:
            self._desk.delete(request.segments[2])
        except UnknownNode as error:
            raise _unknown(error) from error
        return Response(204, b"")

    def _get(self, request: Request) -> Response:
        return self._shown(request.segments[2])

    def _shown(self, node: str, **more: str) -> Response:
        try:
            shown: dict[str, Any] = self._desk.shown(node)
        except UnknownNode as error:
            raise _unknown(error) from error
        return Response(200, json.dumps({**shown, **more}).encode())


def _unknown(error: UnknownNode) -> APIError:
    return APIError(404, "NotFound", str(error))
