"""The page of the cluster: its files, the document that it draws, and who may read that."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from nri_numa.config import AgentConfig
from nri_numa.controller.overview import BadQuery, Overview, parse_query
from nri_numa.kube.api import Watch
from nri_numa.web.protocol import (
    TEXT_CONTENT_TYPE,
    APIError,
    HTTPRequest,
    Response,
    Route,
    page_routes,
)
from nri_numa.web.security import TokenFile

CLUSTER_PAGE_PATH: Final = "/cluster/"
CLUSTER_DOCUMENT_PATH: Final = "/v1/cluster"
SHARED_PAGE_FILES: Final = ("page.css", "theme.js", "small.js", "icon.svg")
"""Files of the agent's page."""


class ClusterPage:
    """Serves the page.

    Raises:
        ConfigError: the token cannot be read.
    """

    def __init__(self, config: AgentConfig, overview: Overview, topologies: Watch) -> None:
        section = config.controller
        self._overview = overview
        self._topologies = topologies
        file = section.page.token_file
        self._token = TokenFile(file, setting="controller.page") if file else None
        # A revision belongs to one life of one replica.
        self._life = uuid.uuid4().hex[:12]

    def http_routes(self) -> Iterable[Route]:
        """What is added to the controller's server."""
        return [
            Route("GET", CLUSTER_DOCUMENT_PATH, self._get_overview),
            Route(
                "GET",
                CLUSTER_PAGE_PATH.rstrip("/"),
                lambda _: Response(308, b"", TEXT_CONTENT_TYPE, [("Location", CLUSTER_PAGE_PATH)]),
            ),
            *page_routes("nri_numa.web", *SHARED_PAGE_FILES, at=CLUSTER_PAGE_PATH),
            *page_routes("nri_numa.controller", at=CLUSTER_PAGE_PATH),
        ]

    async def _get_overview(self, request: HTTPRequest) -> Response:
        if self._token is not None:
            self._token.check_request_token(request)
        problem = self._topologies.problem
        if not self._topologies.synced.is_set():
            raise APIError(
                503, "NotReady", problem or "the nodes are not known yet", [("Retry-After", "2")]
            )
        said = repr((sorted(request.query.items()), problem))
        asked = hashlib.sha256(said.encode()).hexdigest()[:12]
        tag = f'"{self._life}-{self._overview.revision}-{asked}"'
        if request.header_value(b"if-none-match") == tag.encode():
            return Response(304, b"", headers=[("ETag", tag)])
        try:
            query = parse_query(request.query)
        except BadQuery as error:
            raise APIError(400, "BadRequest", str(error)) from error
        document: dict[str, Any] = await self._overview.overview_document(query)
        if problem:
            document["stale"] = problem
        return Response(200, msgspec.json.encode(document), headers=[("ETag", tag)])
