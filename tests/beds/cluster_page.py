"""The controller's page on made-up nodes, served in a thread; no API server is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller
from nri_numa.config.sections import Page as Section
from nri_numa.controller.page import Page
from nri_numa.controller.server import Server

PREFIX = "numa.kubernetes.io"


class Nobody:
    """A desk that takes nothing."""

    def put(self, node: str, document: object) -> str:
        raise AssertionError(node)

    def delete(self, node: str) -> None:
        raise AssertionError(node)

    def shown(self, node: str) -> dict[str, Any]:
        raise AssertionError(node)

    def not_ready(self) -> str:
        return "this replica does not lead"

    def metrics(self) -> bytes:
        return b""


class ClusterPage:
    """The served page.

    Attributes:
        url: of the page.
    """

    def __init__(self, token_file: Path | None = None) -> None:
        section = Section(enabled=True, token_file=str(token_file or ""))
        config = AgentConfig(controller=Controller(address="127.0.0.1:0", page=section))
        self._page = Page(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = Server(
            "127.0.0.1",
            Nobody(),
            version="1",
            token_file="",
            certificate="",
            key="",
            more=self._page.routes(),
        )
        self.serve()
        self.url = f"http://127.0.0.1:{self._server.port}/cluster/"

    def serve(self) -> None:
        """Listen; on the same port as before after a stop."""

        async def listen() -> None:
            self._server.listen(self._server.port)

        self._do(listen())

    def hang_up(self) -> None:
        """Stop listening."""
        self._do(self._server.stop())

    def tell(self, *documents: Mapping[str, Any], drained: Mapping[str, str] | None = None) -> None:
        """Nodes with what they publish; the first time says that these are all."""

        async def told() -> None:
            for one in documents:
                name = one["metadata"]["name"]
                text = (drained or {}).get(name, "")
                self._page.overview.see(name, {f"{PREFIX}/drained": text} if text else {})
                if "zones" in one:
                    self._page.overview.put(one)
            self._page.follower.synced.set()

        self._do(told())

    def forget(self, name: str) -> None:
        """A Node and its object are gone."""

        async def told() -> None:
            self._page.overview.gone(name)
            self._page.overview.remove({"metadata": {"name": name}})

        self._do(told())

    def _do(self, action: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(action, self._loop).result(60)

    def close(self) -> None:
        """End the thread."""
        self.hang_up()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def cluster_page(token_file: Path | None = None) -> Iterator[ClusterPage]:
    """A page that is gone afterwards."""
    made = ClusterPage(token_file)
    try:
        yield made
    finally:
        made.close()
