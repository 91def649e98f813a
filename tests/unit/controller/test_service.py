"""A replica: what is said to it over HTTP and what it writes, and what ends it."""

import asyncio
import json
import math
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.config import AgentConfig
from nri_numa.config.sections import (
    ClusterPageSection,
    Controller,
    EvictionSection,
    StuckPodEviction,
)
from nri_numa.config.sections import PrometheusCapacityQuery as Query
from nri_numa.controller.service import LEASE_NAME, ControllerService
from nri_numa.errors import ConfigError
from nri_numa.kube.requests import Resource
from tests.beds.certificates import make_certificate
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.controller_bed import TOKEN, ControllerBed
from tests.beds.objects import PREFIX, topology
from tests.beds.plugin_process import free_port
from tests.beds.stepped_loop import step, until
from tests.beds.watch_clients import event_line, watch_of


@pytest.fixture
async def bed(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ControllerBed]:
    bed, published = ControllerBed(tmp_path, **getattr(request, "param", {})), topology(8, 4)
    valid = {f"{PREFIX}/renewed-at": "12:00", f"{PREFIX}/validity-seconds": "1"}
    published["metadata"]["annotations"] = valid
    bed.cluster.put(Resource.TOPOLOGIES, published)
    async with bed.running():
        yield bed


def controller(section: Controller) -> ControllerService:
    return ControllerService(AgentConfig(controller=section), ClusterObjects())


PATH = "/v1/nodes/n1/offline-capacity"


async def test_what_is_put_is_written_shown_and_taken_away(bed: ControllerBed) -> None:
    code, text = await bed.ask("PUT", PATH, {"zones": {"0": 0.625}, "validity": 60})
    assert code == 200, text
    assert json.loads(text) == {
        "node": "n1", "zones": {"0": 0.625}, "seconds": 60, "source": "put", "warning": ""
    }  # fmt: skip
    await until(lambda: bed.zones("n1") == {"0": 0.625})
    whole = await bed.ask("PUT", PATH.replace("n1", "n2"), {"zones": {"0": 1}})
    assert whole[0] == 200
    code, text = await bed.ask("GET", PATH)
    assert json.loads(text)["zones"] == {"0": 0.625}
    _, metrics = await bed.get("/metrics")
    assert "nri_numa_controller_leader 1.0" in metrics
    assert "nri_numa_controller_reduced_capacity_nodes 1.0" in metrics
    assert 'source_reports_total{result="accepted",source="put"} 2.0' in metrics
    assert (await bed.ask("DELETE", PATH))[0] == 204
    await until(lambda: bed.zones("n1") is None)
    nothing = {"node": "n1", "zones": {}, "seconds": 0, "source": ""}
    assert json.loads((await bed.ask("GET", PATH))[1]) == nothing
    assert (await bed.get("/readyz"))[0] == 200
    assert len(bed.writes()) == 2
    await bed.stop()
    assert bed.lease["spec"]["holderIdentity"] == "", "given back at the end"


@pytest.mark.parametrize(
    ("bed", "whole"),
    [
        ({}, False),
        ({"page": ClusterPageSection(enabled=True, node_url="http://{address}:9890")}, True),
        ({"evictions": EvictionSection(stuck_pods=StuckPodEviction(evict=True))}, True),
    ],
    indirect=["bed"],
)
async def test_of_nodes_only_metadata_is_read_if_enough(bed: ControllerBed, whole: bool) -> None:
    def asked() -> set[tuple[str, str]]:
        return {
            (one.method, one.accept.replace(";g=meta.k8s.io;v=v1", ""))
            for one in bed.cluster.requests
            if one.path == "/api/v1/nodes"
        }

    await until(lambda: len(asked()) == 2)
    only = "application/json;as=PartialObjectMetadata"
    every = {("GET", "application/json"), ("WATCH", "application/json")}
    assert asked() == (every if whole else {("GET", f"{only}List"), ("WATCH", only)})


async def test_bad_requests_are_rejected_with_a_sentence(bed: ControllerBed) -> None:
    good = {"zones": {"0": 0.5}}
    cases: list[tuple[str, str, object, str | None, int, str]] = [
        ("PUT", PATH, good, None, 401, "expected the header Authorization"),
        ("PUT", PATH, good, "wrong", 401, "expected the header Authorization"),
        ("PUT", PATH, b"{", TOKEN, 400, "no JSON"),
        ("PUT", PATH, b"\xff\xfe", TOKEN, 400, "no JSON"),
        ("PUT", PATH, b"[" * 60_000, TOKEN, 400, "no JSON"),
        ("PUT", PATH, b"x" * 70_000, TOKEN, 413, "at most 65536 bytes"),
        ("PUT", PATH, [], TOKEN, 422, "expected a JSON object"),
        ("PUT", PATH, b'{"zones": {"0": NaN}}', TOKEN, 422, "nan, expected a number"),
        ("PUT", PATH, {"zones": {"0": -1}}, TOKEN, 422, "-1, expected a number"),
        ("PUT", PATH, {"zones": {"0": 1.5}}, TOKEN, 422, "1.5, expected a number"),
        ("PUT", PATH, {"zones": {"7": 1}}, TOKEN, 422, "has no NUMA node 7; it has 0-1"),
        ("PUT", PATH, {"zones": {"x": 1}}, TOKEN, 422, "'x' names no NUMA node"),
        ("PUT", PATH, {}, TOKEN, 422, "zones: None, expected a mapping"),
        ("PUT", PATH, {"zones": {}}, TOKEN, 422, "zones: is empty"),
        ("PUT", PATH, {**good, "valid": 1}, TOKEN, 422, "unknown key 'valid'"),
        ("PUT", PATH, {**good, "validity": "1m"}, TOKEN, 422, "validity: '1m', expected seconds"),
        ("PUT", PATH, {**good, "validity": 1}, TOKEN, 422, "expected 5 to 604800 seconds"),
        ("PUT", PATH, {**good, "validity": math.nan}, TOKEN, 422, "expected 5 to 604800 seconds"),
        ("PUT", "/v1/nodes/nobody/offline-capacity", good, TOKEN, 404, "no Node 'nobody'"),
        ("DELETE", "/v1/nodes/nobody/offline-capacity", None, TOKEN, 404, "no Node"),
        ("GET", "/v1/nodes/nobody/offline-capacity", None, TOKEN, 404, "no Node"),
        ("GET", PATH, None, None, 401, "expected the header"),
        ("POST", PATH, good, TOKEN, 405, "expected PUT, DELETE, GET, HEAD"),
        ("GET", "/v1/secrets", None, TOKEN, 404, "there is no such path"),
    ]
    for method, path, body, token, code, said in cases:
        found, text = await bed.ask(method, path, body, token)
        assert (found, said in text) == (code, True), (body, text)
    # Each of 13 sound documents; what document is not valid or has no token is no offer.
    metrics = (await bed.get("/metrics"))[1]
    assert 'source_reports_total{result="rejected",source="put"} 13.0' in metrics
    assert bed.writes() == []


@pytest.mark.parametrize("bed", [{"token_file": ""}], indirect=True)
async def test_without_a_token_nobody_puts(bed: ControllerBed) -> None:
    code, text = await bed.ask("PUT", PATH, {"zones": {"0": 0.5}})
    assert code == 403
    assert "controller.tokenFile is not set" in text
    assert (await bed.ask("GET", "/healthz"))[0] == 200


async def test_an_api_server_that_is_away_is_said_once_and_waited_for(
    bed: ControllerBed, caplog: pytest.LogCaptureFixture
) -> None:
    def said(text: str) -> int:
        return len([record for record in caplog.records if text in record.message])

    bed.cluster.fail(503, "shutting down", on="^PATCH")
    for factor in (0.5, 0.25):
        assert (await bed.ask("PUT", PATH, {"zones": {"0": factor}}))[0] == 200
        rejected = len(bed.writes())
        await until(lambda rejected=rejected: len(bed.writes()) > rejected)
    assert "nri_numa_controller_api_up 0.0" in (await bed.ask("GET", "/metrics"))[1]
    assert said("API server unavailable") == 1
    bed.cluster.recover()
    await until(lambda: bed.zones("n1") == {"0": 0.25})
    await until(lambda: said("API server available again"))


async def test_who_does_not_lead_takes_nothing(bed: ControllerBed) -> None:
    bed.cluster.patch(Resource.LEASES, LEASE_NAME, {"spec": {"holderIdentity": "other"}}, "default")
    await until(lambda: bed.service.unready_reason())
    code, text = await bed.ask("PUT", PATH, {"zones": {"0": 0.5}})
    assert code == 503
    assert "another replica leads, and says no address: other" in text
    assert (await bed.get("/readyz"))[0] == 503
    assert bed.writes() == []
    assert bed.lease["spec"]["holderIdentity"] == "other"


@pytest.mark.parametrize("secure", [False, True])
async def test_who_does_not_lead_is_ready_and_hands_on_what_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """With TLS to nobody but who shows the same certificate."""
    # On loopback a replica names no address, because in another pod that is another one.
    monkeypatch.setattr(
        "nri_numa.controller.service.reachable_address", lambda at: f"{at[0]}:{at[1]}"
    )
    files: dict[str, Any] = {}
    for name in ("ours", "another") if secure else ():
        (tmp_path / name).mkdir()
        make_certificate(tmp_path / name, name)
        files[name] = {
            "tls_cert": f"{tmp_path}/{name}/cert.pem", "tls_key": f"{tmp_path}/{name}/key.pem",
        }  # fmt: skip

    def follower(name: str) -> ControllerBed:
        address = f"127.0.0.1:{free_port()}"
        return ControllerBed(tmp_path, leader.cluster, address=address, **files.get(name, {}))

    at = f"127.0.0.1:{free_port()}"
    async with ControllerBed(tmp_path, address=at, **files.get("ours", {})).running() as leader:
        async with (one := follower("ours")).running():
            assert (one.service.lease.leader_address, one.service.lease.is_leader) == (at, False)
            assert (await one.get("/readyz"))[0] == 200
            code, text = await one.ask("PUT", PATH, {"zones": {"0": 0.5}})
            assert (code, json.loads(text)["zones"]) == (200, {"0": 0.5})
            await until(lambda: leader.zones("n1") == {"0": 0.5})
            assert (await one.ask("PUT", PATH, {"zones": {"0": 9}}))[0] == 422
            assert (await one.ask("PUT", PATH, {}, token="nobody's"))[0] == 401
            assert await one.ask("DELETE", PATH) == (204, "")
            # Nothing is handed on twice.
            one.session.headers["nri-numa-forwarded"] = "1"
            assert (await one.ask("GET", PATH))[0] == 503
        if secure:
            async with (stranger := follower("another")).running():
                code, text = await stranger.ask("PUT", PATH, {"zones": {"0": 0.25}})
                assert (code, "the leader, does not answer" in text) == (503, True)


async def test_a_changed_file_is_reread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "capacity.yaml"
    file.write_text("nodes:\n  n1: {0: 0.5}\n  n2: {0: 9}\n  nobody: {0: 1}\n")

    def put(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(file)

    async with ControllerBed(tmp_path, capacity_file=str(file)).running() as bed:
        await until(lambda: bed.zones("n1") == {"0": 0.5})
        said = [one for one in caplog.records if one.message == "capacity source faulty"]
        assert len(said) == 2, "n2 and nobody, once"
        put("nodes: {n2: {node-1: 0}}")
        await until(lambda: bed.zones("n2") == {"1": 0.0})
        await until(lambda: bed.zones("n1") is None)
        put("nodes: [")
        await until(lambda: not bed.service._metrics.source_up.labels("file")._value.get())
        assert bed.zones("n2") == {"1": 0.0}, "it counts until its time is over"


async def test_a_query_with_a_nonsense_answer(bed: ControllerBed, tmp_path: Path) -> None:
    """Each of many answers is survived, and a sound one counts."""
    sample = {"metric": {"node": "n1", "numa_node": "0"}, "value": [1, "0.25"]}
    sound = {"status": "success", "data": {"resultType": "vector", "result": [sample]}}
    answers = [
        (500, b""), (200, b""), (200, b"\xff"), (200, b"[" * 100_000), (302, b""),
        (200, b'{"status":"error","error":"x"}'), (200, json.dumps(sound).encode()),
    ]  # fmt: skip
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        code, body = answers.pop(0) if len(answers) > 1 else answers[0]
        head = f"HTTP/1.1 {code} x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        writer.write(head.encode() + b"Location: /\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    from nri_numa.controller.sources import PrometheusSource

    secret = tmp_path / "prometheus-token"
    secret.write_text("secret\n")
    query = Query(url=f"http://127.0.0.1:{port}/", query="x", token_file=str(secret))
    up: list[bool] = []
    source = PrometheusSource(query, bed.service._record_reports, up.append)
    for _ in range(7):
        await source.poll_once()
    server.close()
    assert up == [False] * 6 + [True]
    await source.poll_once()
    assert up[-1] is False, "nobody listens any more"
    await until(lambda: bed.zones("n1") == {"0": 0.25})
    assert b"Authorization: Bearer secret" in asked[0]
    assert b"GET /api/v1/query?query=x " in asked[0]


def test_a_token_that_is_not_there_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    section = Controller(token_file=str(tmp_path / "nothing"), credentials_dir=str(tmp_path))

    async def make() -> None:
        controller(section)

    with pytest.raises(ConfigError) as wrong:
        asyncio.run(make())
    assert wrong.value.problems[0].startswith("controller.tokenFile: ")


def test_an_address_that_somebody_has_ends_it(tmp_path: Path) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        section = Controller(address=f"127.0.0.1:{port}", credentials_dir=str(tmp_path))
        with pytest.raises(OSError, match="Address already in use"):
            await controller(section).run()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("bed", [{"page": ClusterPageSection(enabled=True)}], indirect=True)
async def test_the_page_of_the_cluster_is_there_where_switched_on(bed: ControllerBed) -> None:
    assert (await bed.get("/cluster/"))[0] == 200

    async def nodes() -> Any:
        while (found := await bed.get("/v1/cluster"))[0] != 200:
            assert found[0] == 503, found
            await step(0.05)
        return json.loads(found[1])["nodes"]

    one, other = await nodes()
    assert one["agentReady"]
    await step(2)
    assert not (await nodes())[0]["agentReady"], "nobody renewed what it publishes"
    assert (one["name"], one["maxExclusiveRequest"]) == ("n1", 8)
    assert (other["name"], other["zones"]) == ("n2", [])
    # The token of the PUT is not asked for, and nothing of it is told.
    assert TOKEN not in (await bed.get("/v1/cluster"))[1]


def test_an_object_is_read_once_for_page_and_rejected_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, it was 4,800 events in a second of CPU."""
    seen = list[Any]()
    monkeypatch.setattr(
        "nri_numa.cluster.topology_reader.decode_topology",
        lambda *of: seen.append(of) or decode_topology(*of),
    )
    name = "controller: noderesourcetopologies"
    watch = watch_of(name, ClusterObjects())
    watch._watched.on_update(json.loads(event_line(name, 1))["object"])
    assert len(seen) == 1


async def test_without_it_nothing_is_asked_of_the_api_server(bed: ControllerBed) -> None:
    for path in ("/cluster/", "/v1/cluster"):
        assert (await bed.ask("GET", path, token=None))[0] == 404


def test_a_renewed_certificate_is_served(tmp_path: Path) -> None:
    """Also one whose files are replaced one after the other."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    async def shown(port: int) -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(found).encode()

    async def run() -> None:
        make_certificate(tmp_path, "first")
        section = Controller(
            address="127.0.0.1:0",
            credentials_dir=str(tmp_path),
            tls_cert=str(cert),
            tls_key=str(key),
        )
        service = controller(section)
        service.server.listen_on_port(0)
        first = await shown(service.server.listening_port)
        assert first.strip() == cert.read_bytes().strip()
        (tmp_path / "new").mkdir()
        make_certificate(tmp_path / "new", "second")
        os.replace(tmp_path / "new" / "cert.pem", cert)
        assert await shown(service.server.listening_port) == first, "the key is still the old one"
        os.replace(tmp_path / "new" / "key.pem", key)
        assert (await shown(service.server.listening_port)).strip() == cert.read_bytes().strip()
        await service.server.stop()

    asyncio.run(run())


def test_files_that_are_no_certificate_end_it(tmp_path: Path) -> None:
    file = tmp_path / "no.pem"
    file.write_text("nothing")
    section = Controller(credentials_dir=str(tmp_path), tls_cert=str(file), tls_key=str(file))
    with pytest.raises(ConfigError, match=r"controller\.tlsCert: .* cannot be used"):
        controller(section)
