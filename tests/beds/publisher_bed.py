"""A publisher between an agent and objects in memory, and its outputs on their own."""

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nri_numa.agent.http_api import AgentServer
from nri_numa.config import HTTP, AgentConfig
from nri_numa.config.sections import Publish
from nri_numa.kube.requests import APIRequest, ContentType, Outcome, OutcomeKind, Resource, Verb
from nri_numa.observe.metrics import Metrics
from nri_numa.observe.notices import Notice
from nri_numa.publisher.outbox import Output, OutputQueue
from nri_numa.publisher.publisher import Publisher
from nri_numa.publisher.topology import SERVER_PRUNE_ERROR_TEXT
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.http_view import FakeView
from tests.beds.stepped_loop import end, until

NOW = 1_700_000_010.0
"""Unix time by the clocks of this node."""
MANAGER = "nri-numa-publish"
NOTICE = Notice(
    id="0a0b0c0d1f",
    number=31,
    notice_kind="rejected",
    reason="NoSuchCPU",
    message="CPU 63 is not here",
    namespace="shop",
    pod="web-0",
    pod_uid="8d7c",
    container="main",
    count=1,
    first_time=1_700_000_000.25,
    last_time=1_700_000_000.25,
)
OURS = {"manager": MANAGER, "operation": "Apply", "fieldsV1": {"f:zones": {}}}
NFD = {"manager": "nfd-topology-updater", "operation": "Update", "fieldsV1": {"f:zones": {}}}


class OutputBed:
    """Outputs in front of an API server, and a clock.

    Attributes:
        answer: what is answered instead of the API server, where it is not None.
        requests: all that were made.
    """

    def __init__(
        self,
        *outputs: Output,
        cluster: ClusterObjects | None = None,
        rate: float = 1000.0,
        burst: float = 1000.0,
    ) -> None:
        self.now = 0.0
        self.cluster = cluster or ClusterObjects(manager=MANAGER)
        self.answer: Callable[[APIRequest], Outcome | None] = lambda request: None
        self.requests: list[APIRequest] = []
        self.queue = OutputQueue(outputs, rate=rate, burst=burst, now_s=0.0)

    def _execute(self, request: APIRequest) -> Outcome:
        self.requests.append(request)
        return self.answer(request) or self.cluster.execute_at_once(request)

    def work(self, until: float = 0.0) -> None:
        """Everything that may be done up to a moment."""
        for _ in range(10_000):
            request = self.queue.next_request(self.now)
            if request is not None:
                self.queue.on_outcome(request, self._execute(request), self.now, 1.0)
                continue
            wait = self.queue.seconds_until_request(self.now)
            if self.now + wait > until:
                break
            self.now += max(wait, 0.001)
        else:
            raise AssertionError("it never ends")
        self.now = max(self.now, until)

    def later(self, seconds: float = 0.0) -> None:
        """Everything that may be done in the next seconds."""
        self.work(self.now + seconds)

    def verbs(self) -> list[str]:
        return [request.verb.value for request in self.requests]

    def put_node(self, **metadata: Any) -> None:
        """The Node n1 is there."""
        self.cluster.put(Resource.NODES, {"metadata": {"name": "n1", **metadata}})

    @property
    def node(self) -> dict[str, Any]:
        """Metadata of the Node."""
        metadata: dict[str, Any] = self.cluster.get(Resource.NODES, "n1")["metadata"]
        return metadata


class ObjectBed(OutputBed):
    """An output that keeps one object, which its Node owns.

    Attributes:
        forced: what every request for the object is answered.
        broken: the server cannot apply, until its entries of managed fields are taken away.
    """

    def __init__(
        self,
        output: Any,
        resource: Resource,
        name: str = "n1",
        cluster: ClusterObjects | None = None,
    ) -> None:
        super().__init__(output, cluster=cluster)
        self.output, self._resource, self._name = output, resource, name
        self.forced: Outcome | None = None
        self.broken = False
        self.answer = self.forced_answer
        if cluster is None:
            self.put_node(uid="node-1")

    def forced_answer(self, request: APIRequest) -> Outcome | None:
        """As `forced` and `broken` say."""
        if request.resource is Resource.NODES or self.forced is not None:
            return self.forced if request.resource is not Resource.NODES else None
        if request.form is ContentType.JSON:
            self.broken = False
        elif self.broken and request.verb is not Verb.GET:
            return Outcome(result=OutcomeKind.FAILED, text=f"500: {SERVER_PRUNE_ERROR_TEXT} of us")
        return None

    @property
    def object(self) -> dict[str, Any]:
        """The object; empty where there is none."""
        return self.cluster.get(self._resource, self._name)

    def put_object(self, **document: Any) -> None:
        """Another one is there instead; with nothing said none is."""
        self.cluster.remove(self._resource, self._name)
        if document:
            metadata = {"name": self._name, **document.get("metadata", {})}
            self.cluster.put(self._resource, {**document, "metadata": metadata})

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self.object["metadata"]
        return metadata

    @property
    def owner(self) -> dict[str, Any]:
        (owner,) = self.metadata["ownerReferences"]
        return dict(owner)


class PublisherBed:
    """An agent that serves a view on a unix socket, its publisher, and the API server.

    Time passes in `step` and `until` of `tests.beds.stepped_loop`.
    """

    def __init__(self, directory: Path, **publish: Any) -> None:
        self._socket = directory / "agent.sock"
        self.view = FakeView(noted=[NOTICE])
        self.cluster = ClusterObjects(wall=lambda: NOW, manager=MANAGER)
        self.cluster.put(
            Resource.NODES, {"metadata": {"name": "n1", "annotations": {}, "labels": {}}}
        )
        for one in self.view.containers:
            metadata = {"namespace": one.namespace, "name": one.pod, "uid": one.pod_uid}
            self.cluster.put(Resource.PODS, {"metadata": metadata})
        self.publish = {"address": "off", "api_qps": 100.0, **publish}
        self.sections: dict[str, Any] = {}
        self.publisher: Publisher

    async def start_agent(self) -> None:
        config = HTTP(address="off", socket=str(self._socket))
        self._agent_metrics = Metrics("1")
        self._agent = AgentServer(config, self.view, self._agent_metrics)
        await self._agent.start()
        await until(self._socket.exists)

    async def stop_agent(self) -> None:
        await self._agent.stop()

    def start_publisher(self) -> None:
        config = AgentConfig(
            http=HTTP(socket=str(self._socket)), publish=Publish(**self.publish), **self.sections
        )
        self.publisher = Publisher(
            config,
            "n1",
            self.cluster,
            clock=asyncio.get_running_loop().time,
            wall=lambda: NOW,
            jitter=lambda: 0.0,
        )
        self._task = asyncio.create_task(self.publisher.run())

    async def stop_publisher(self) -> None:
        await end(self._task)

    def metrics(self) -> str:
        return self.publisher.metrics.render_metrics().decode()

    def agent_requests(self, route: str) -> int:
        """How often the agent was asked."""
        counts = re.findall(
            f'requests_total{{.*route="{route}"}} (\\d+)', self._agent_metrics.render_metrics()
        )
        return sum(map(int, counts))

    def events(self) -> list[dict[str, Any]]:
        return self.cluster.all(Resource.EVENTS)

    @property
    def node(self) -> dict[str, Any]:
        """Metadata of the Node."""
        metadata: dict[str, Any] = self.cluster.get(Resource.NODES, "n1")["metadata"]
        return metadata

    @property
    def topology(self) -> dict[str, Any]:
        """The NodeResourceTopology; empty where there is none."""
        return self.cluster.get(Resource.TOPOLOGIES, "n1")

    def attribute(self, name: str) -> object:
        """Of the NodeResourceTopology; None before it is there."""
        attributes: list[Mapping[str, str]] = self.topology.get("attributes", [])
        return {one["name"]: one["value"] for one in attributes}.get(name)
