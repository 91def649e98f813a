"""A replica on real sockets: an API server over TLS on one side, HTTP clients on the other."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import pytest
from msgspec.structs import replace

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller
from nri_numa.controller.service import ControllerService
from tests.beds.fake_api_server import Asked, LeaseServer, Said, fake, status

TOKEN = "0123456789abcdef0123456789abcdef"
KEY, IDS = "numa.kubernetes.io/offline-capacity", "numa.kubernetes.io/numa-ids"


def node(name: str, **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "resourceVersion": "1", "annotations": annotations or {IDS: "0-1"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


class Cluster:
    """What an API server keeps: Nodes, one Lease, what Nodes publish, pods, and what is told.

    Attributes:
        down: Nodes cannot be written.
        told: Events of the kubelet; `events` are those that were written here.
    """

    def __init__(self) -> None:
        self.nodes = {name: node(name) for name in ("n1", "n2")}
        self.patches: list[tuple[str, Any]] = []
        self.leases = LeaseServer()
        self.down = False
        self.refused = 0
        self.topologies: list[dict[str, Any]] = []
        self.pending: list[dict[str, Any]] = []
        self.running: list[dict[str, Any]] = []
        self.told: list[dict[str, Any]] = []
        self.evicted: list[str] = []
        self.events: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def __call__(self, asked: Asked) -> Said:
        with self._lock:
            return self._answer(asked)

    def _answer(self, asked: Asked) -> Said:
        path, _, query = asked.path.partition("?")
        if "/leases" in path:
            return self.leases.answer(asked)
        if "watch=true" in query:
            return status(503, "later")  # an empty answer would be asked for again at once
        if asked.method == "GET":
            items = self._listed(path.rpartition("/")[2], unquote(query))
            return Said(200, {"metadata": {"resourceVersion": "1"}, "items": items})
        if path.endswith("/eviction"):
            self.evicted.append(path.split("/")[-2])
            return Said(201, {"kind": "Status", "status": "Success"})
        if asked.method == "POST":
            self.events.append(asked.body)
            return Said(201, asked.body)
        if self.down:
            self.refused += 1
            return status(503, "shutting down")
        name = path.rpartition("/")[2]
        self.patches.append((name, asked.body["metadata"]["annotations"][KEY]))
        self.nodes[name]["metadata"]["annotations"][KEY] = self.patches[-1][1]
        return Said(200, self.nodes[name])

    def _listed(self, what: str, query: str) -> list[dict[str, Any]]:
        if what != "pods":
            nodes, objects = [*self.nodes.values()], self.topologies
            return {"nodes": nodes, "noderesourcetopologies": objects, "events": self.told}[what]
        if "metadata.name" in query:
            named = query.rpartition("metadata.name=")[2].partition("&")[0]
            return [one for one in self.running if one["metadata"]["name"] == named]
        return self.pending if "Pending" in query else self.running

    def zones(self, node: str) -> Any:
        text = self.nodes[node]["metadata"]["annotations"].get(KEY)
        return json.loads(text)["zones"] if text else None


class World:
    """A replica, its cluster, and a client."""

    def __init__(self, directory: Path, **controller: Any) -> None:
        self.cluster = Cluster()
        (directory / "put-token").write_text(TOKEN)
        section = Controller(
            address="127.0.0.1:0",
            token_file=str(directory / "put-token"),
            credentials=str(directory),
            smoothing=0,
            min_update_interval=0,
            rate=100.0,
        )
        self.config = AgentConfig(controller=replace(section, **controller))
        self.asked: list[Asked] = []
        self.service: ControllerService
        self.url = ""
        self.session: aiohttp.ClientSession

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.service = ControllerService(self.config)
        self.task = asyncio.create_task(self.service.run())
        # A certificate of its own: who asks here knows whom.
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            try:
                await until(lambda: self.service.unready_reason() == "" or self.task.done())
                scheme = "https" if self.config.controller.tls_cert else "http"
                self.url = f"{scheme}://127.0.0.1:{self.service.server.listening_port}"
                yield
            finally:
                await self.stop()

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def ask(
        self, method: str, path: str, body: object = None, token: str | None = TOKEN
    ) -> tuple[int, str]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.request(
            method, self.url + path, data=data, headers=headers
        ) as answer:
            return answer.status, await answer.text()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def started(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Cluster], object] = lambda cluster: None,
    **controller: Any,
) -> AsyncIterator[World]:
    """One that leads, or ended at once; its cluster is as `prepare` leaves it."""
    made = World(directory, **controller)
    prepare(made.cluster)
    with fake(directory, monkeypatch, made.cluster) as server:
        made.asked = server.asked
        async with made.running():
            yield made
