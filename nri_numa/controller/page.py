"""The page of the cluster: its files, the document that it draws, and who may read that."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from importlib import resources
from typing import Any, Final

import msgspec
from aiohttp import web

from nri_numa import __version__
from nri_numa.config import AgentConfig, split_address
from nri_numa.controller.overview import BadQuery, Overview, query_of
from nri_numa.http.api import CONTENT_SECURITY_POLICY
from nri_numa.http.security import TokenFile, host_is_expected
from nri_numa.scheduler.follow import Follower
from nri_numa.scheduler.kinds import Topology
from nri_numa.scheduler.lean import LeanConnection
from nri_numa.scheduler.world import name_of

PATH: Final = "/cluster/"
DOCUMENT: Final = "/v1/cluster"
SHARED: Final = ("page.css", "theme.js", "small.js", "icon.svg")
"""Files of the agent's page."""
OWN: Final = ("index.html", "cluster.js", "cluster.css")
_TYPES: Final = {
    "html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml",
}  # fmt: skip


class Page:
    """Serves the page, and follows what it shows.

    Attributes:
        overview: what it shows.
        follower: of the NodeResourceTopology objects.
        connection: to the API server.

    Args:
        config: with the section ``controller``.

    Raises:
        ConfigError: the token cannot be read.
    """

    def __init__(self, config: AgentConfig) -> None:
        section = config.controller
        self.connection = LeanConnection(
            section.credentials,
            user_agent=f"nri-numa-controller/{__version__}",
            field_manager="nri-numa-controller",
        )
        self.overview = Overview(config)
        self.follower = Follower(
            self.connection,
            Topology,
            put=self.overview.put,
            remove=self.overview.remove,
            listed=self.overview.listed,
            key=name_of,
            directory=section.credentials,
        )
        file = section.page.token_file
        self._token = TokenFile(file) if file else None
        address = split_address(section.address)
        self._host = address[0] if address else ""
        # A revision belongs to one life of one replica.
        self._life = uuid.uuid4().hex[:12]
        self._files = {name: _read(name) for name in (*SHARED, *OWN)}

    def routes(self) -> Iterable[web.RouteDef]:
        """What is added to the controller's server."""
        return [
            web.get(DOCUMENT, self._document),
            web.get(PATH, self._file),
            web.get(PATH.rstrip("/"), self._moved),
            web.get(PATH + "{name}", self._file),
        ]

    async def _moved(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": PATH})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        data = self._files.get(name)
        if data is None:
            raise web.HTTPNotFound
        headers = {
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)

    async def _document(self, request: web.Request) -> web.StreamResponse:
        if not host_is_expected(request.headers.get("Host", "").encode(), self._host):
            return _said(421, "this server is only reachable as localhost or by its address")
        given = request.headers.get("Authorization", "").encode()
        if self._token is not None and not self._token.admits(given):
            return _said(
                401,
                "expected the header Authorization: Bearer with the token of "
                "controller.page.tokenFile",
                {"WWW-Authenticate": "Bearer"},
            )
        if not self.follower.synced.is_set():
            problem = self.follower.problem or "the nodes are not known yet"
            return _said(503, problem, {"Retry-After": "2"})
        asked = hashlib.sha256(request.query_string.encode()).hexdigest()[:12]
        tag = f'"{self._life}-{self.overview.revision}-{asked}"'
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers={"ETag": tag})
        try:
            query = query_of(request.query)
        except BadQuery as error:
            return _said(400, str(error))
        document: dict[str, Any] = await self.overview.document(query)
        if self.follower.problem:
            document["stale"] = self.follower.problem
        body = msgspec.json.encode(document)
        return web.Response(body=body, content_type="application/json", headers={"ETag": tag})


def _said(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=headers)


def _read(name: str) -> bytes:
    room = "nri_numa.controller" if name in OWN else "nri_numa.http"
    return resources.files(room).joinpath("web", name).read_bytes()
