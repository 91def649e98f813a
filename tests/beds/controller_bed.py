"""Replicas of the controller on objects in memory, and outputs that evict on their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from nri_numa.config import AgentConfig
from nri_numa.config.sections import Controller
from nri_numa.controller.service import LEASE_NAME, ControllerService
from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.stepped_loop import end, until

TOKEN = "0123456789abcdef0123456789abcdef"
KEY, IDS = "numa.kubernetes.io/offline-capacity", "numa.kubernetes.io/numa-ids"


def node(name: str, **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "annotations": annotations or {IDS: "0-1"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


class ControllerBed:
    """A replica on a cluster of the Nodes n1 and n2, and who asks it over HTTP.

    Time passes in `step` and `until` of `tests.beds.stepped_loop`.
    """

    def __init__(
        self, directory: Path, cluster: ClusterObjects | None = None, **controller: Any
    ) -> None:
        self.cluster = cluster or ClusterObjects()
        if cluster is None:
            self.cluster.put(Resource.NODES, node("n1"), node("n2"))
        (directory / "put-token").write_text(TOKEN)
        section = Controller(
            address="127.0.0.1:0",
            token_file=str(directory / "put-token"),
            credentials_dir=str(directory),
            smoothing_time=0,
            min_update_interval=0,
            api_qps=100.0,
        )
        self.config = AgentConfig(controller=replace(section, **controller))
        self.service: ControllerService
        self.session: aiohttp.ClientSession
        self._url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ControllerBed]:
        """While it is ready: leads, or hands on to who does."""
        self.service = ControllerService(
            self.config, self.cluster, clock=asyncio.get_running_loop().time
        )
        self._task = asyncio.create_task(self.service.run())
        # A certificate of its own: who asks here knows whom.
        connector = aiohttp.TCPConnector(ssl=False)
        async with aiohttp.ClientSession(connector=connector) as self.session:
            try:
                await until(lambda: self.service.unready_reason() == "" or self._task.done())
                scheme = "https" if self.config.controller.tls_cert else "http"
                self._url = f"{scheme}://127.0.0.1:{self.service.server.listening_port}"
                yield self
            finally:
                await self.stop()

    async def stop(self) -> None:
        await end(self._task)

    async def ask(
        self, method: str, path: str, body: object = None, token: str | None = TOKEN
    ) -> tuple[int, str]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.request(
            method, self._url + path, data=data, headers=headers
        ) as answer:
            return answer.status, await answer.text()

    async def get(self, path: str) -> tuple[int, str]:
        """As a probe or a scraper asks."""
        return await self.ask("GET", path, token=None)

    def zones(self, node: str) -> Any:
        """The factors that a Node's annotation has; None without one."""
        text = self.cluster.get(Resource.NODES, node)["metadata"]["annotations"].get(KEY)
        return json.loads(text)["zones"] if text else None

    def writes(self) -> list[Any]:
        """What was written to Nodes."""
        return [x.body for x in self.cluster.requests if x.method == "PATCH"]

    @property
    def lease(self) -> dict[str, Any]:
        return self.cluster.get(Resource.LEASES, LEASE_NAME, "default")

    def evicted(self) -> list[str]:
        """Names of the pods whose eviction was asked for."""
        sent = self.cluster.bodies("POST", "/eviction")
        return sorted(body["metadata"]["name"] for body in sent)


class EvictorBed:
    """An output that evicts, asked once a second as the controller does.

    Attributes:
        answers: the result where it is not the API server's: of an eviction by the pod's name, of
            all else by its kind, "pods" or "events".
        evicted: names and times.
        requests: all that were made.
    """

    output: Any

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.now = 0.0
        self.cluster = ClusterObjects()
        self.put_pods(*pods)
        self.answers: dict[str, OutcomeKind] = {}
        self.evicted: list[tuple[str, float]] = []
        self.requests: list[APIRequest] = []

    def put_pods(self, *pods: dict[str, Any]) -> None:
        """These pods are there."""
        self.cluster.put(Resource.PODS, *pods)

    def answer(self, request: APIRequest) -> Outcome:
        """As the API server would, where nothing else was told."""
        is_eviction = request.resource is Resource.EVICTIONS
        result = self.answers.get(request.name if is_eviction else request.resource.plural_name)
        return self.cluster.execute_at_once(request) if result is None else Outcome(result=result)

    def run(self, seconds: int) -> list[str]:
        """Tick once a second, answer what is due, and return the pods evicted so far."""
        for _ in range(seconds):
            self.output.on_tick(self.now, 1_795_000_000.0 + self.now)
            while (request := self.output.next_request(self.now)) is not None:
                self.requests.append(request)
                outcome = self.answer(request)
                if (request.resource, outcome.result) == (
                    Resource.EVICTIONS,
                    OutcomeKind.SUCCEEDED,
                ):
                    self.evicted.append((request.name, self.now))
                self.output.on_outcome(request, outcome, self.now, 0.5)
            self.now += 1
        return self.names

    @property
    def names(self) -> list[str]:
        """Pods that were evicted."""
        return [name for name, _ in self.evicted]

    def bodies(self, resource: Resource) -> list[Any]:
        return [request.body for request in self.requests if request.resource is resource]
