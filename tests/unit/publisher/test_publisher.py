"""The publisher between an agent that serves on a unix socket and the API server."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nri_numa.config.sections import DRA, CapacityFromNodeAnnotationsSection
from nri_numa.kube.requests import Resource
from nri_numa.publisher import traces
from nri_numa.publisher.outbox import BLOCKED_RETRY_S
from nri_numa.web.responses import Assignments
from tests.beds.http_view import get
from tests.beds.publisher_bed import NOTICE, NOW, PublisherBed
from tests.beds.stepped_loop import step, until


@pytest.fixture
async def bed(directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[PublisherBed]:
    bed = PublisherBed(directory, **getattr(request, "param", {}))
    await bed.start_agent()
    bed.start_publisher()
    try:
        yield bed
    finally:
        await bed.stop_publisher()
        await bed.stop_agent()


TOPOLOGY = pytest.mark.parametrize("bed", [{"node_resource_topology": True}], indirect=True)


def notice(bed: PublisherBed, **fields: Any) -> None:
    """Something else happened to a container."""
    bed.view.noted.append(replace(NOTICE, **fields))
    bed.view.changed()


async def test_what_the_agent_says_is_written(bed: PublisherBed) -> None:
    await until(lambda: bed.events() and bed.node["labels"])
    (event,) = bed.events()
    assert event["note"] == "NoSuchCPU: CPU 63 is not here"
    assert "numa.kubernetes.io/numacpu" in bed.node["annotations"]
    created = 'requests_total{output="events",result="done",verb="create"} 1.0'
    await until(lambda: created in bed.metrics())
    await until(lambda: not bed.publisher.problem)


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The problems of the lines that have a text."""
    return [vars(r)["fields"].get("problem", "") for r in caplog.records if text in r.message]


async def test_restarts_lose_nothing(bed: PublisherBed, caplog: pytest.LogCaptureFixture) -> None:
    await until(lambda: bed.events())
    await bed.stop_publisher()
    bed.view.noted = [replace(NOTICE, count=4, number=32)]
    bed.start_publisher()
    await until(lambda: "series" in bed.events()[0])
    await bed.stop_agent()
    await until(lambda: bed.publisher.problem)
    bed.view.noted.append(replace(NOTICE, id="0a0b0c0d21", number=33, container="other"))
    await bed.start_agent()
    await until(lambda: len(bed.events()) == 2)
    event = bed.cluster.get(Resource.EVENTS, "web-0.0a0b0c0d1f", "shop")
    assert event["series"]["count"] == 4
    problems = said(caplog, "agent connection lost")
    assert len(problems) == len(set(problems)) > 0
    await until(lambda: len(said(caplog, "agent connected")) == 3)


async def test_an_agent_that_lost_its_notices_begins_anew(bed: PublisherBed) -> None:
    """Its numbers are small again; what is new among them must not be taken for old."""
    await until(lambda: bed.events())
    await bed.stop_agent()
    bed.view.instance = "ffffffff"
    bed.view.noted = [replace(NOTICE, id="ffffffff1", number=1, container="new")]
    await bed.start_agent()
    await until(lambda: len(bed.events()) == 2)


async def test_what_happens_while_the_api_server_is_away_is_told_later(
    bed: PublisherBed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.cluster.fail(503, "shutting down")
    await until(lambda: "503" in bed.publisher.problem)
    notice(bed, id="0a0b0c0d20", number=32, container="b")
    bed.cluster.recover()
    await until(lambda: len(bed.events()) == 2)
    await until(lambda: not bed.publisher.problem)
    assert len(said(caplog, "API server unavailable")) == 1


async def test_what_waits_and_what_will_never_be_written_is_counted(
    bed: PublisherBed, caplog: pytest.LogCaptureFixture
) -> None:
    await until(lambda: 'output="events",result="done",verb="create"} 1.0' in bed.metrics())
    bed.cluster.fail(503, "shutting down")
    notice(bed, id="0a0b0c0d20", number=32, container="b")
    await until(lambda: 'publisher_pending_objects{output="events"} 1.0' in bed.metrics())
    bed.cluster.recover()
    bed.cluster.fail(422, "note: too long", on="^POST")
    await until(lambda: 'publisher_pending_objects{output="events"} 0.0' in bed.metrics())
    assert len(said(caplog, "object not written")) == 1
    notice(bed, id="0a0b0c0d22", number=33, container="d")
    await until(lambda: 'publisher_objects_dropped_total{output="events"} 2.0' in bed.metrics())
    bed.cluster.recover()
    notice(bed, id="0a0b0c0d21", number=34, container="c")
    await until(lambda: len(bed.events()) == 2)
    await until(lambda: 'result="done",verb="create"} 2.0' in bed.metrics())
    assert len(said(caplog, "object not written")) == 1


async def test_somebody_else_at_the_socket(directory: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    bed = PublisherBed(directory)
    async with await asyncio.start_unix_server(answer, directory / "agent.sock"):
        bed.start_publisher()
        await until(lambda: "status 404" in bed.publisher.problem)
        await bed.stop_publisher()


@pytest.mark.parametrize("bed", [{"address": "127.0.0.1:0"}], indirect=True)
async def test_probes_and_metrics(bed: PublisherBed) -> None:
    await until(lambda: bed.events() and bed.publisher.probes.listening_port)
    address = ("127.0.0.1", bed.publisher.probes.listening_port)
    assert (await get(address, "/healthz")).status == 200
    assert (await get(address, "/readyz")).body == b"ok\n"
    metrics = (await get(address, "/metrics")).body.decode()
    assert "nri_numa_publisher_agent_up 1.0" in metrics
    assert (await get(address, "/secret")).status == 404
    await bed.stop_agent()
    await until(lambda: bed.publisher.problem)
    not_ready = await get(address, "/readyz")
    assert not_ready.status == 503
    assert b"agent" in not_ready.body
    await bed.start_agent()


@pytest.mark.parametrize(
    ("bed", "least", "most"),
    [({}, 0, 0), ({"otlp_endpoint": "http://127.0.0.1:1"}, 1, 2)],
    indirect=["bed"],
)
async def test_decisions_are_read_for_a_receiver_of_spans_when_something_changed(
    bed: PublisherBed, least: int, most: int
) -> None:
    await until(lambda: bed.agent_requests("/v1/requests") >= least)
    for _ in range(10):
        await bed.publisher._source.read_document(Assignments)
    assert bed.agent_requests("/v1/requests") <= most


async def test_without_an_exporter_all_else_is_written(
    bed: PublisherBed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, a metric, and tried again."""
    await bed.stop_publisher()
    monkeypatch.setattr(traces, "SPAN_RETRY_S", 0.01)
    monkeypatch.setitem(sys.modules, traces.EXPORTER_LOGGER_NAME, None)
    bed.publish["otlp_endpoint"] = "http://127.0.0.1:1"
    bed.start_publisher()
    await until(lambda: 'publisher_output_up{output="traces"} 0.0' in bed.metrics())
    await until(lambda: bed.events())
    monkeypatch.undo()
    await until(lambda: 'publisher_output_up{output="traces"} 1.0' in bed.metrics())
    assert len(said(caplog, "spans not sent")) == len(said(caplog, "sent again")) == 1


@pytest.mark.parametrize("bed", [{"node_annotations": False, "node_labels": False}], indirect=True)
async def test_what_is_off_is_not_asked_for(bed: PublisherBed) -> None:
    await until(lambda: bed.events())
    assert bed.node["annotations"] == {}


@pytest.mark.parametrize("bed", [{"pod_annotation": True}], indirect=True)
async def test_pods_are_annotated_where_that_is_wanted(bed: PublisherBed) -> None:
    def texts() -> list[str]:
        annotations = (one["metadata"].get("annotations") for one in bed.cluster.all(Resource.PODS))
        return [one["numa.kubernetes.io/assigned"] for one in annotations if one]

    await until(texts)
    assert "cpus" in next(iter(json.loads(texts()[0]).values()))
    asked = bed.agent_requests("/v1/assignments")
    bed.view.serial -= 1  # containers are the same
    notice(bed, id="0a0b0c0d20", number=32, container="b")
    await until(lambda: len(bed.events()) == 2)
    assert bed.agent_requests("/v1/assignments") == asked
    await bed.stop_publisher()
    bed.view.serial, written = 1, len(bed.cluster.requests)  # an agent that has just started
    bed.start_publisher()
    await until(lambda: any("/pods/" in one.path for one in bed.cluster.requests[written:]))


@TOPOLOGY
async def test_the_topology_follows_the_agent(bed: PublisherBed) -> None:
    def left(bed: PublisherBed) -> object:
        return bed.topology and bed.topology["zones"][0]["resources"][0]["available"]

    agent = partial(bed.attribute, "numa.kubernetes.io/agent-state")
    await until(lambda: left(bed) == "3")
    bed.view.free_cpus = 1
    bed.view.changed()
    await until(lambda: left(bed) == "1")
    assert agent() == "ready"
    bed.view.ready = False
    bed.view.changed()
    await until(lambda: agent() == "not-ready")
    assert 'requests_total{output="topology",result="done",verb="patch"}' in bed.metrics()
    bed.view.ready = True
    bed.view.changed()
    await until(lambda: agent() == "ready")
    before = bed.topology
    await bed.stop_agent()
    await until(lambda: agent() == "not-ready")
    await bed.stop_publisher()
    bed.cluster.put(Resource.TOPOLOGIES, before)  # left by one that died with its agent
    bed.start_publisher()
    await until(lambda: agent() == "not-ready")
    assert left(bed) == "1"
    await bed.start_agent()


@pytest.mark.parametrize(
    "bed", [{"node_resource_topology": True, "pod_annotation": True}], indirect=True
)
async def test_guaranteed_pods_are_named_from_their_binding_on(bed: PublisherBed) -> None:
    """What the plugin set aside for them stays as long as the names differ from what it counts."""
    named = partial(bed.attribute, "nodeTopologyPodsFingerprint")
    await until(named)
    before = named()

    def pod(name: str, qos: str) -> dict[str, Any]:
        metadata = {"namespace": "default", "name": name, "uid": f"uid-{name}"}
        status = {"phase": "Pending", "qosClass": qos}
        return {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": status}

    elsewhere = {**pod("elsewhere", "Guaranteed"), "spec": {"nodeName": "n2"}}
    bed.cluster.put(Resource.PODS, pod("plain", "Burstable"), elsewhere)
    await step(10)
    assert named() == before
    bed.cluster.put(Resource.PODS, pod("coming", "Guaranteed"))
    await until(lambda: named() != before)
    bed.cluster.patch(Resource.PODS, "coming", {"status": {"phase": "Running"}}, "default")
    await until(lambda: named() == before)


def topologies(bed: PublisherBed) -> list[Any]:
    """All that were written."""
    return bed.cluster.bodies("PATCH", "/noderesourcetopologies/n1")


@TOPOLOGY
async def test_what_changes_within_a_moment_is_one_write(bed: PublisherBed) -> None:
    """A container comes a third of a second after its sandbox."""
    await until(lambda: bed.topology)
    await step(10)
    before = len(topologies(bed))
    for free_cpus in (2, 1):
        bed.view.free_cpus = free_cpus
        bed.view.changed()
        await step(0.3)
    await step(10)
    (written,) = topologies(bed)[before:]
    assert written["zones"][0]["resources"][0]["available"] == "1"


@TOPOLOGY
async def test_after_an_outage_nodes_are_looked_at_one_after_another(bed: PublisherBed) -> None:
    await until(lambda: bed.topology)
    bed.cluster.fail(503, "shutting down")
    bed.view.free_cpus = 2
    bed.view.changed()
    await until(lambda: "503" in bed.publisher.problem)
    assert bed.publisher._topology is not None
    bed.publisher._jitter = lambda: 1.0
    before = len(topologies(bed))
    bed.cluster.recover()
    await until(lambda: len(topologies(bed)) > before)
    now = asyncio.get_running_loop().time()
    assert not bed.publisher._topology.is_node_read_due(now), "a minute later"


@TOPOLOGY
async def test_a_numa_node_that_is_left_out_is_said_once(
    bed: PublisherBed, caplog: pytest.LogCaptureFixture
) -> None:
    bed.view.zone_id = 64
    bed.view.changed()
    await until(lambda: len(bed.topology.get("zones", ())) > 60)
    bed.view.ready = False
    bed.view.changed()
    await until(lambda: bed.attribute("numa.kubernetes.io/agent-state") == "not-ready")
    assert "node-64" not in {zone["name"] for zone in bed.topology["zones"]}
    assert len(said(caplog, "omitted")) == 1


async def test_an_absent_type_is_said(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    bed = PublisherBed(directory, node_resource_topology=True)
    missing = "the server could not find the requested resource"
    bed.cluster.fail(404, missing, on="noderesourcetopologies")
    await bed.start_agent()
    bed.start_publisher()
    await until(lambda: said(caplog, "not written"))
    await step(3 * BLOCKED_RETRY_S)
    assert re.search(r'result="unknown".*} ([3-9]|\d\d)', bed.metrics())
    assert not said(caplog, "written again")
    bed.cluster.recover()
    await until(lambda: said(caplog, "written again"))
    assert len(said(caplog, "not written")) == 1
    await bed.stop_publisher()
    await bed.stop_agent()


def drain(bed: PublisherBed, numa_nodes: str) -> None:
    annotations = {"numa.kubernetes.io/drained": numa_nodes}
    bed.cluster.patch(Resource.NODES, "n1", {"metadata": {"annotations": annotations}})


async def test_what_the_node_says_of_its_capacity_is_handed_to_the_agent(
    bed: PublisherBed, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole or not at all, again when it differs or was taken away; a link is not followed."""
    await bed.stop_publisher()
    handed = directory / "handover" / "capacity.json"
    section = CapacityFromNodeAnnotationsSection(file=str(handed), interval="15s")
    bed.sections = {"offline_capacity": section}
    drain(bed, "0")
    bed.start_publisher()
    await until(lambda: said(caplog, "not handed"))
    handed.parent.mkdir()
    (handed.parent / "other").write_text("kept")
    handed.symlink_to("other")
    await until(lambda: not handed.is_symlink())
    assert json.loads(handed.read_text()) == {"offline-capacity": "", "drained": "0"}
    assert (handed.parent / "other").read_text() == "kept"
    handed.unlink()
    await until(handed.exists)
    drain(bed, "1")
    await until(lambda: '"1"' in handed.read_text())
    assert sorted(one.name for one in handed.parent.iterdir()) == ["capacity.json", "other"]
    assert len(said(caplog, "capacity not handed")) == 1


async def test_numa_nodes_are_published_and_claims_handed_to_the_agent(
    bed: PublisherBed, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields of the slice that another one took are taken back; the same problem is said once."""
    await bed.stop_publisher()
    handover = directory / "claims"
    handover.mkdir()
    bed.sections = {"dra": DRA(enabled=True, handover_dir=str(handover))}
    for number in "01":
        question = {"namespace": "shop", "name": "gone"}
        (handover / f"ask-{number:0>16}.json").write_text(json.dumps(question))
    bed.start_publisher()
    for number in "01":
        answer = handover / f"answer-{number:0>16}.json"
        await until(answer.exists)
        assert "resourceclaims" in answer.read_text()
    assert len(said(caplog, "claim not handed over")) == 1
    await until(lambda: bed.cluster.all(Resource.SLICES))
    (applied,) = (one for one in bed.cluster.requests if one.method == "PATCH"
                  and "resourceslices" in one.path)  # fmt: skip
    assert applied.query["force"] == "true"


async def test_a_wrong_clock_is_shown(bed: PublisherBed, caplog: pytest.LogCaptureFixture) -> None:
    """Once, and not where it is right."""
    await until(bed.events)
    assert "clock skewed" not in caplog.text
    bed.cluster.wall = lambda: NOW + 600
    for number in (32, 33):
        notice(bed, id=f"0a0b0c0d{number}", number=number, container=f"c{number}")
        await until(lambda number=number: len(bed.events()) == number - 30)
    assert caplog.text.count("node clock skewed") == 1
    assert "nri_numa_publisher_clock_skew_seconds -600.0" in bed.metrics()
