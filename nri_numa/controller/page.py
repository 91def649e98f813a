"""The page of the cluster: its files, the document that it draws, and who may read that."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from functools import partial
from importlib import resources
from typing import Any, Final

import msgspec

from nri_numa import __version__
from nri_numa.config import AgentConfig
from nri_numa.controller.overview import BadQuery, Overview, query_of
from nri_numa.http.protocol import (
    CONTENT_SECURITY_POLICY,
    TEXT,
    APIError,
    Request,
    Response,
    Route,
)
from nri_numa.http.security import TokenFile
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
        self._token = TokenFile(file, setting="controller.page") if file else None
        # A revision belongs to one life of one replica.
        self._life = uuid.uuid4().hex[:12]
        self._files = {name: _read(name) for name in (*SHARED, *OWN)}

    def routes(self) -> Iterable[Route]:
        """What is added to the controller's server."""
        return [
            Route("GET", DOCUMENT, self._document),
            Route("GET", PATH.rstrip("/"), self._moved),
            *(
                Route("GET", PATH + shown, partial(self._file, name))
                for name in self._files
                for shown in ((name, "") if name == "index.html" else (name,))
            ),
        ]

    def _moved(self, request: Request) -> Response:
        return Response(308, b"", TEXT, [("Location", PATH)])

    def _file(self, name: str, request: Request) -> Response:
        headers = [
            ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
            ("Referrer-Policy", "no-referrer"),
        ]
        kind = f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8"
        return Response(200, self._files[name], kind, headers)

    async def _document(self, request: Request) -> Response:
        if self._token is not None and not self._token.admits(request.header(b"authorization")):
            raise APIError(
                401,
                "Unauthorized",
                "expected the header Authorization: Bearer with the token of "
                "controller.page.tokenFile",
                [("WWW-Authenticate", "Bearer")],
            )
        if not self.follower.synced.is_set():
            problem = self.follower.problem or "the nodes are not known yet"
            raise APIError(503, "NotReady", problem, [("Retry-After", "2")])
        asked = hashlib.sha256(repr(sorted(request.query.items())).encode()).hexdigest()[:12]
        tag = f'"{self._life}-{self.overview.revision}-{asked}"'
        if request.header(b"if-none-match") == tag.encode():
            return Response(304, b"", headers=[("ETag", tag)])
        try:
            query = query_of(request.query)
        except BadQuery as error:
            raise APIError(400, "BadRequest", str(error)) from error
        document: dict[str, Any] = await self.overview.document(query)
        if self.follower.problem:
            document["stale"] = self.follower.problem
        return Response(200, msgspec.json.encode(document), headers=[("ETag", tag)])


def _read(name: str) -> bytes:
    room = "nri_numa.controller" if name in OWN else "nri_numa.http"
    return resources.files(room).joinpath("web", name).read_bytes()
