"""The publisher between a real HTTP server on a unix socket and an API server over TLS."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.agent.http_api import AgentServer
from nri_numa.config import HTTP, AgentConfig
from nri_numa.config.sections import DRA, CapacityFromNodeAnnotationsSection, Publish
from nri_numa.observe.metrics import Metrics
from nri_numa.publisher import traces
from nri_numa.publisher.publisher import Publisher
from nri_numa.web.responses import Assignments
from tests.beds.fake_api_server import Asked, Said, fake, status
from tests.beds.http_view import FakeView, get
from tests.unit.publisher.test_desired_objects import NOTICE
from tests.unit.publisher.test_topology_output import OURS

NOW = 1_700_000_010.0
WAS_GOOD = '{"type":"BOOKMARK","object":{"metadata":{}}}\n{"type":"ERROR","object":{"code":410}}'


class Cluster:
    """What an API server keeps: one Node, and Events."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = {"metadata": {"name": "n1", "annotations": {}, "labels": {}}}
        self.events: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.topology: dict[str, Any] = {}
        self.topologies: list[dict[str, Any]] = []
        self.bound: list[dict[str, Any]] = []
        self.asked_bound: list[str] = []
        self.slices: list[str] = []
        self.defined = True
        self.down = False
        self.invalid = False

    def attribute(self, name: str) -> object:
        """Of the object; None before it is there."""
        return {a["name"]: a["value"] for a in self.topology.get("attributes", ())}.get(name)

    def __call__(self, asked: Asked) -> Said:
        if self.down:
            return status(503, "shutting down")
        path = asked.path.partition("?")[0]
        if path == "/api/v1/nodes/n1":
            for part, values in asked.body.get("metadata", {}).items():
                self.node["metadata"][part].update(values)
            return Said(200, self.node)
        if "/noderesourcetopologies/" in path:
            if not self.defined:
                return status(404, "the server could not find the requested resource")
            if asked.method == "PATCH":
                self.topology = {**asked.body, "metadata": {"managedFields": [OURS]}}
                self.topologies.append(asked.body)
            found = self.topology or None
            return Said(200, found) if found else status(404, 'noderesourcetopologies "n1" gone')
        if path == "/api/v1/pods":
            self.asked_bound.append(asked.path)
            listed = {"metadata": {"resourceVersion": "7"}, "items": self.bound}
            return Said(200, WAS_GOOD if "watch=true" in asked.path else listed)
        if "/resourceslices/" in path:
            self.slices.append(asked.path)
            return Said(200, asked.body)
        if "/resourceclaims/" in path:
            return status(404, "no such claim")
        if "/pods/" in path:
            self.pods[path] = asked.body["metadata"]["annotations"]
            return Said(200, {"metadata": {"name": "p"}})
        if asked.method == "POST":
            if self.invalid:
                return status(422, "note: too long")
            name = asked.body["metadata"]["name"]
            if name in self.events:
                return status(409, "exists")
            self.events[name] = asked.body
            return Said(201, asked.body)
        name = path.rpartition("/")[2]
        self.events[name].update(asked.body)
        return Said(200, self.events[name])


class World:
    """All three."""

    def __init__(self, directory: Path, **publish: Any) -> None:
        self.directory = directory
        self.socket = directory / "agent.sock"
        self.view = FakeView(noted=[NOTICE])
        self.cluster = Cluster()
        self._publish = {"address": "off", "rate": 100.0, **publish}
        self.offline_capacity, self.dra = CapacityFromNodeAnnotationsSection(), DRA()
        self.settle = 0.01
        self.agent: AgentServer | None = None
        self._task: asyncio.Task[None] | None = None
        self.publisher: Publisher

    async def start_agent(self) -> None:
        config = HTTP(address="off", socket=str(self.socket))
        self.agent_metrics = Metrics("1")
        self.agent = AgentServer(config, self.view, self.agent_metrics, version="1")
        await self.agent.start()
        await until(self.socket.exists)

    async def stop_agent(self) -> None:
        assert self.agent is not None
        await self.agent.stop()

    def start_publisher(self) -> None:
        config = AgentConfig(
            http=HTTP(socket=str(self.socket)),
            publish=Publish(credentials=str(self.directory), **self._publish),
            offline_capacity=self.offline_capacity,
            dra=self.dra,
        )
        self.publisher = Publisher(
            config, "n1", wall=lambda: NOW, settle=self.settle, jitter=lambda: 0.0
        )
        self._task = asyncio.create_task(self.publisher.run())

    async def stop_publisher(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def text(self) -> str:
        return self.publisher.metrics.render_metrics().decode()

    def asked(self, route: str) -> int:
        """How often the agent was."""
        found = re.findall(
            f'requests_total{{.*route="{route}"}} (\\d+)', self.agent_metrics.render_metrics()
        )
        return sum(map(int, found))


async def until(true: Callable[[], object]) -> None:
    """Wait for something that must come."""
    async with asyncio.timeout(180):
        while not true():  # nobody tells
            await asyncio.sleep(0.01)


@pytest.fixture
async def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    made = World(tmp_path, **getattr(request, "param", {}))
    with fake(tmp_path, monkeypatch, made.cluster):
        await made.start_agent()
        made.start_publisher()
        try:
            yield made
        finally:
            await made.stop_publisher()
            await made.stop_agent()


async def test_what_the_agent_says_is_written(world: World) -> None:
    await until(lambda: world.cluster.events and world.cluster.node["metadata"]["labels"])
    (event,) = world.cluster.events.values()
    assert event["note"] == "NoSuchCPU: CPU 63 is not here"
    assert "numa.kubernetes.io/numacpu" in world.cluster.node["metadata"]["annotations"]
    created = 'requests_total{output="events",result="done",verb="create"} 1.0'
    await until(lambda: created in world.text())
    await until(lambda: not world.publisher.problem)


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The problems of the lines that have a text."""
    return [vars(r)["fields"].get("problem", "") for r in caplog.records if text in r.message]


async def test_restarts_of_either_side_lose_and_double_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await until(lambda: world.cluster.events)
    await world.stop_publisher()
    world.view.noted = [replace(NOTICE, count=4, number=32)]
    world.start_publisher()
    await until(lambda: "series" in next(iter(world.cluster.events.values())))
    await world.stop_agent()
    await until(lambda: world.publisher.problem)
    world.view.noted.append(replace(NOTICE, id="0a0b0c0d21", number=33, container="other"))
    await world.start_agent()
    await until(lambda: len(world.cluster.events) == 2)
    assert world.cluster.events["web-0.0a0b0c0d1f"]["series"]["count"] == 4
    problems = said(caplog, "the agent does not answer")
    assert len(problems) == len(set(problems)) > 0
    await until(lambda: len(said(caplog, "the agent answers")) == 3)


async def test_an_agent_that_lost_its_notices_begins_anew(world: World) -> None:
    """Its numbers are small again; what is new among them must not be taken for old."""
    await until(lambda: world.cluster.events)
    await world.stop_agent()
    world.view.instance = "ffffffff"
    world.view.noted = [replace(NOTICE, id="ffffffff1", number=1, container="new")]
    await world.start_agent()
    await until(lambda: len(world.cluster.events) == 2)


async def test_what_happens_while_the_api_server_is_away_is_told_later(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.cluster.down = True
    await until(lambda: "503" in world.publisher.problem)
    world.view.noted.append(replace(NOTICE, id="0a0b0c0d20", number=32, container="b"))
    world.view.changed()
    world.cluster.down = False
    await until(lambda: len(world.cluster.events) == 2)
    await until(lambda: not world.publisher.problem)
    assert len(said(caplog, "cannot be used for now")) == 1


async def test_what_waits_and_what_will_never_be_written_is_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await until(lambda: 'output="events",result="done",verb="create"} 1.0' in world.text())
    world.cluster.down = True
    world.view.noted.append(replace(NOTICE, id="0a0b0c0d20", number=32, container="b"))
    world.view.changed()
    await until(lambda: 'publish_waiting{output="events"} 1.0' in world.text())
    world.cluster.invalid = True
    world.cluster.down = False
    await until(lambda: 'publish_waiting{output="events"} 0.0' in world.text())
    assert len(said(caplog, "not written")) == 1
    world.view.noted.append(replace(NOTICE, id="0a0b0c0d22", number=33, container="d"))
    world.view.changed()
    await until(lambda: 'publish_dropped_total{output="events"} 2.0' in world.text())
    world.cluster.invalid = False
    world.view.noted.append(replace(NOTICE, id="0a0b0c0d21", number=34, container="c"))
    world.view.changed()
    await until(lambda: len(world.cluster.events) == 2)
    await until(lambda: 'result="done",verb="create"} 2.0' in world.text())
    assert len(said(caplog, "not written")) == 1


def test_somebody_else_at_the_socket(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def run() -> None:
        world = World(tmp_path)
        async with await asyncio.start_unix_server(answer, world.socket):
            world.start_publisher()
            await until(lambda: "status 404" in world.publisher.problem)
            await world.stop_publisher()

    asyncio.run(run())


@pytest.mark.parametrize("world", [{"address": "127.0.0.1:0"}], indirect=True)
async def test_probes_and_metrics(world: World) -> None:
    await until(lambda: world.cluster.events and world.publisher.probes.listening_port)
    address = ("127.0.0.1", world.publisher.probes.listening_port)
    assert (await get(address, "/healthz")).status == 200
    assert (await get(address, "/readyz")).body == b"ok\n"
    metrics = (await get(address, "/metrics")).body.decode()
    assert "nri_numa_publish_agent_up 1.0" in metrics
    assert (await get(address, "/secret")).status == 404
    await world.stop_agent()
    await until(lambda: world.publisher.problem)
    not_ready = await get(address, "/readyz")
    assert not_ready.status == 503
    assert b"agent" in not_ready.body
    await world.start_agent()


@pytest.mark.parametrize(
    ("world", "least", "most"),
    [({}, 0, 0), ({"otlp_endpoint": "http://127.0.0.1:1"}, 1, 2)],
    indirect=["world"],
)
async def test_decisions_are_read_for_a_receiver_of_spans_when_something_changed(
    world: World, least: int, most: int
) -> None:
    await until(lambda: world.asked("/v1/requests") >= least)
    for _ in range(10):
        await world.publisher._source.read_document(Assignments)
    assert world.asked("/v1/requests") <= most


async def test_without_an_exporter_all_else_is_written(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, a metric, and tried again."""
    await world.stop_publisher()
    monkeypatch.setattr(traces, "SPAN_RETRY_S", 0.01)
    monkeypatch.setitem(sys.modules, traces.EXPORTER_LOGGER_NAME, None)
    world._publish["otlp_endpoint"] = "http://127.0.0.1:1"
    world.start_publisher()
    await until(lambda: 'publish_output_up{output="traces"} 0.0' in world.text())
    await until(lambda: world.cluster.events)
    monkeypatch.undo()
    await until(lambda: 'publish_output_up{output="traces"} 1.0' in world.text())
    assert len(said(caplog, "spans are not sent")) == len(said(caplog, "sent again")) == 1


@pytest.mark.parametrize(
    "world", [{"node_annotations": False, "node_labels": False}], indirect=True
)
async def test_what_is_off_is_not_asked_for(world: World) -> None:
    await until(lambda: world.cluster.events)
    assert world.cluster.node["metadata"]["annotations"] == {}


@pytest.mark.parametrize("world", [{"pod_annotation": True}], indirect=True)
async def test_pods_are_annotated_where_that_is_wanted(world: World) -> None:
    await until(lambda: world.cluster.pods)
    text = next(iter(world.cluster.pods.values()))["numa.kubernetes.io/assigned"]
    assert "cpus" in next(iter(json.loads(text).values()))
    asked = world.asked("/v1/assignments")
    world.view.noted.append(replace(NOTICE, id="0a0b0c0d20", number=32, container="b"))
    world.view.serial -= 1  # containers are the same
    world.view.changed()
    await until(lambda: len(world.cluster.events) == 2)
    assert world.asked("/v1/assignments") == asked
    await world.stop_publisher()
    world.view.serial, world.cluster.pods = 1, {}  # an agent that has just started
    world.start_publisher()
    await until(lambda: world.cluster.pods)


@pytest.mark.parametrize("world", [{"node_resource_topology": True}], indirect=True)
async def test_the_topology_follows_the_agent(world: World) -> None:
    def left(world: World) -> object:
        found = world.cluster.topology
        return found and found["zones"][0]["resources"][0]["available"]

    agent = partial(world.cluster.attribute, "numa.kubernetes.io/agent")
    await until(lambda: left(world) == "3")
    world.view.free_cpus = 1
    world.view.changed()
    await until(lambda: left(world) == "1")
    assert agent() == "ready"
    world.view.ready = False
    world.view.changed()
    await until(lambda: agent() == "not-ready")
    assert 'requests_total{output="topology",result="done",verb="patch"}' in world.text()
    world.view.ready = True
    world.view.changed()
    await until(lambda: agent() == "ready")
    before = world.cluster.topology
    await world.stop_agent()
    await until(lambda: agent() == "not-ready")
    await world.stop_publisher()
    world.cluster.topology = before  # left by one that died with its agent
    world.start_publisher()
    await until(lambda: agent() == "not-ready")
    assert left(world) == "1"
    await world.start_agent()


@pytest.mark.parametrize(
    "world", [{"node_resource_topology": True, "pod_annotation": True}], indirect=True
)
async def test_guaranteed_pods_are_named_from_their_binding_on(world: World) -> None:
    """What the plugin set aside for them stays as long as the names differ from what it counts."""
    named = partial(world.cluster.attribute, "nodeTopologyPodsFingerprint")
    await until(lambda: named() and len(world.cluster.asked_bound) > 1)
    before = named()

    def pod(name: str, qos: str) -> dict[str, Any]:
        metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}"}
        return {"metadata": metadata, "status": {"phase": "Pending", "qosClass": qos}}

    world.cluster.bound = [pod("plain", "Burstable"), pod("coming", "Guaranteed")]
    await until(lambda: named() != before)
    assert any("nodeName%3Dn1,status.phase%3DPending" in one for one in world.cluster.asked_bound)
    world.cluster.bound = []  # it runs, or was refused
    await until(lambda: named() == before)


@pytest.mark.parametrize("world", [{"node_resource_topology": True}], indirect=True)
async def test_what_changes_within_a_moment_is_one_write(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container comes a third of a second after its sandbox."""
    await until(lambda: world.cluster.topology)
    await world.stop_publisher()
    waits, sleep = [0.0625], asyncio.sleep

    async def meanwhile(seconds: float) -> None:
        if seconds in waits:
            waits.clear()
            world.view.free_cpus = 1
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", meanwhile)
    world.view.free_cpus = 2
    world.settle, world.cluster.topologies = waits[0], []
    world.start_publisher()
    await until(lambda: world.cluster.topologies)
    (written,) = world.cluster.topologies
    assert written["zones"][0]["resources"][0]["available"] == "1"


@pytest.mark.parametrize("world", [{"node_resource_topology": True}], indirect=True)
async def test_after_an_outage_nodes_are_looked_at_one_after_another(world: World) -> None:
    await until(lambda: world.cluster.topology)
    world.cluster.down = True
    world.view.free_cpus = 2
    world.view.changed()
    await until(lambda: "503" in world.publisher.problem)
    assert world.publisher._topology is not None
    world.publisher._jitter = lambda: 1.0
    world.cluster.topologies = []
    world.cluster.down = False
    await until(lambda: world.cluster.topologies)
    assert not world.publisher._topology.is_node_read_due(time.monotonic()), "a minute later"


@pytest.mark.parametrize("world", [{"node_resource_topology": True}], indirect=True)
async def test_a_numa_node_that_is_left_out_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.view.zone_id = 64
    world.view.changed()
    await until(lambda: len(world.cluster.topology.get("zones", ())) > 60)
    world.view.ready = False
    world.view.changed()
    await until(lambda: {"not-ready"} & {a["value"] for a in world.cluster.topology["attributes"]})
    assert "node-64" not in {zone["name"] for zone in world.cluster.topology["zones"]}
    assert len(said(caplog, "left out")) == 1


@pytest.mark.parametrize("world", [{"node_resource_topology": True}], indirect=True)
async def test_a_missing_definition_is_said_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nri_numa.publisher.outbox.BLOCKED_RETRY_S", 0.1)
    world.cluster.defined = False
    await until(lambda: said(caplog, "is not written"))
    await until(lambda: re.search(r'result="unknown".*} ([3-9]|\d\d)', world.text()))
    assert not said(caplog, "written again")
    world.cluster.defined = True
    await until(lambda: said(caplog, "written again"))
    assert len(said(caplog, "is not written")) == 1


async def test_what_the_node_says_of_its_capacity_is_handed_to_the_agent(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole or not at all, again when it differs or was taken away; a link is not followed."""
    await world.stop_publisher()
    handed = world.directory / "handover" / "capacity.json"
    world.offline_capacity = CapacityFromNodeAnnotationsSection(file=str(handed), interval="0.05s")
    annotations = world.cluster.node["metadata"]["annotations"]
    annotations["numa.kubernetes.io/drained"] = "0"
    world.start_publisher()
    await until(lambda: said(caplog, "not handed"))
    handed.parent.mkdir()
    (handed.parent / "other").write_text("kept")
    handed.symlink_to("other")
    await until(lambda: not handed.is_symlink())
    assert json.loads(handed.read_text()) == {"offline-capacity": "", "drained": "0"}
    assert (handed.parent / "other").read_text() == "kept"
    handed.unlink()
    await until(handed.exists)
    annotations["numa.kubernetes.io/drained"] = "1"
    await until(lambda: '"1"' in handed.read_text())
    assert sorted(one.name for one in handed.parent.iterdir()) == ["capacity.json", "other"]
    assert len(said(caplog, "capacity not handed")) == 1


async def test_numa_nodes_are_published_and_claims_handed_to_the_agent(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields of the slice that another one took are taken back; the same problem is said once."""
    await world.stop_publisher()
    handover = world.directory / "claims"
    handover.mkdir()
    world.dra = DRA(enabled=True, handover=str(handover))
    for number in "01":
        question = {"namespace": "shop", "name": "gone"}
        (handover / f"ask-{number:0>16}.json").write_text(json.dumps(question))
    world.start_publisher()
    for number in "01":
        answer = handover / f"answer-{number:0>16}.json"
        await until(answer.exists)
        assert "no such claim" in answer.read_text()
    assert len(said(caplog, "a claim is not handed over")) == 1
    await until(lambda: world.cluster.slices)
    assert "force=true" in world.cluster.slices[0]


async def test_a_clock_that_differs_is_shown_and_said(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of this publisher stands at `NOW`; the API server's answers have another date."""
    await until(lambda: "clock differs from the API server's" in caplog.text)
    assert re.search(r"nri_numa_publish_clock_skew_seconds -\d", world.text())
