"""The HTTP side on real sockets: what a scheduler sends, and what it never would."""

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout

from nri_numa.cluster.node_resources import NodeResources
from nri_numa.scheduler.candidates import MAX_QUESTION_WORK
from nri_numa.scheduler.extender import MAX_QUESTION_BYTES, Extender
from nri_numa.scheduler.fit import evaluate_fit
from tests.beds.certificates import make_certificate
from tests.beds.extender_bed import ExtenderBed
from tests.beds.objects import container, pod, single, topology

GPU = "nvidia.com/gpu"
Ask = Callable[..., Coroutine[Any, Any, tuple[int, Any]]]


def extender(*, synced: bool = True, **section: Any) -> Extender:
    """One that no API server was asked for."""
    bed = ExtenderBed(synced=synced, **section)
    bed.publish(topology(4, 4, name="a"), topology(8, 8, name="b"))
    return bed.extender


@asynccontextmanager
async def served(made: Extender) -> AsyncIterator[int]:
    """Its port on loopback."""
    server = made.build_server("127.0.0.1")
    server.listen_on_port(0)
    try:
        yield server.listening_port
    finally:
        await server.stop()


@pytest.fixture
async def made(request: pytest.FixtureRequest) -> Extender:
    return extender(**getattr(request, "param", {}))


@pytest.fixture
async def ask(made: Extender) -> AsyncIterator[Ask]:
    """Asks it on loopback."""
    async with served(made) as port, ClientSession(timeout=ClientTimeout(60)) as session:

        async def answer_to(path: str, body: bytes = b"") -> tuple[int, Any]:
            url = f"http://127.0.0.1:{port}{path}"
            data = io.BytesIO(body) if body else None
            async with session.request("POST" if body else "GET", url, data=data) as answer:
                text = await answer.read()
                assert answer.headers["Content-Length"] == str(len(text))
                plain = "json" not in answer.headers["Content-Type"]
                return answer.status, text.decode() if plain else json.loads(text)

        yield answer_to


def question(document: object, *names: str) -> bytes:
    return json.dumps({"Pod": document, "Nodes": None, "NodeNames": list(names)}).encode()


async def test_a_scheduler_is_answered(ask: Ask) -> None:
    status, found = await ask("/filter", question(single(6), "a", "b", "nobody"))
    assert status == 200
    assert found["NodeNames"] == ["b"]
    assert found["FailedNodes"] == {
        "a": "needs 6 exclusive CPUs on one NUMA node; at most 4 free for exclusive use"
    }
    assert list(found["FailedAndUnresolvableNodes"]) == ["nobody"]
    status, scores = await ask("/prioritize", question(single(2), "a", "b"))
    assert [one["Host"] for one in scores] == ["a", "b"]
    assert scores[1]["Score"] > scores[0]["Score"]
    status, text = await ask("/metrics")
    assert 'nri_numa_scheduler_calls_total{result="answered",verb="filter"} 1.0' in text
    assert "nri_numa_scheduler_nodes 2.0" in text
    assert (await ask("/healthz")) == (200, "ok\n")
    assert (await ask("/readyz")) == (200, "ok\n")


async def test_who_does_not_lead_sends_to_the_leader_and_is_ready(tmp_path: Path) -> None:
    """With method and body, as Go's client does; the leader alone knows what is held."""
    leader = extender()
    async with served(leader) as port, ClientSession() as session:
        made = extender(lease_name="l")
        assert made.election is not None
        assert made.health_problem() == "no replica leads yet"
        made.election.holder = f"pod_1_127.0.0.1:{port}"
        assert made.health_problem() == ""
        async with served(made) as other:
            url = f"http://127.0.0.1:{other}/filter"
            body = question(single(6), "a", "b")
            async with session.post(url, data=body, allow_redirects=False) as answer:
                assert answer.status == 307
                assert answer.headers["Location"] == f"http://127.0.0.1:{port}/filter"
            async with session.post(url, data=io.BytesIO(body)) as answer:
                assert (await answer.json())["NodeNames"] == ["b"]
            preempt = url.replace("filter", "preempt")
            async with session.post(preempt, data=b"{}", allow_redirects=False) as answer:
                assert answer.headers["Location"] == f"http://127.0.0.1:{port}/preempt"
        made.election.holder = "pod_1_"
        assert "says no address" in made.health_problem()


def with_devices(document: dict[str, Any], *free: int) -> dict[str, Any]:
    """The same with two GPUs on each NUMA node, and so many of them free."""
    for zone, count in zip(document["zones"], free, strict=True):
        gpus = {"name": GPU, "capacity": 2, "allocatable": "2", "available": str(count)}
        zone["resources"].append(gpus)
    return document


def gpu_pod(gpus: object, **asks: str) -> dict[str, Any]:
    document = single(6, **asks)
    document["spec"]["containers"][0]["resources"]["limits"][GPU] = gpus
    return document


@pytest.mark.parametrize(
    ("document", "fits", "reason"),
    [
        (gpu_pod("2"), ["uncounted", "beside"], f"6 exclusive CPUs, 1 GiB of memory and 2 {GPU}"),
        (gpu_pod(3), ["uncounted"], f"needs 3 {GPU} on one NUMA node; an empty node has 2"),
        (gpu_pod("2", devices="ignore"), ["uncounted", "beside", "apart"], ""),
        (gpu_pod("3", policy="best-effort"), ["uncounted", "beside", "apart"], ""),
        (gpu_pod("1.5"), [], f"limits[{GPU}] is '1.5', expected a whole number of devices"),
    ],
    ids=["beside", "too-many", "ignored", "mild", "no-number"],
)
async def test_devices_are_on_the_numa_node_of_the_cpus(
    document: dict[str, Any], fits: list[str], reason: str
) -> None:
    made = extender(filter_to_best=False)
    made.node_watcher.on_update(topology(8, 8, name="uncounted"))
    made.node_watcher.on_update(with_devices(topology(4, 8, name="beside"), 1, 2))
    made.node_watcher.on_update(with_devices(topology(4, 8, name="apart"), 2, 1))
    body = question(document, "uncounted", "beside", "apart")
    found = json.loads(await made.filter(body))
    assert found["NodeNames"] == fits
    said = {**found["FailedNodes"], **found["FailedAndUnresolvableNodes"]}.get("apart", "")
    assert reason in said


async def test_devices_of_a_pod_on_its_way_are_taken() -> None:
    made = extender()
    made.node_watcher.on_update(with_devices(topology(16, 16, name="n1"), 2, 2))
    first = gpu_pod("2", scheduled_numa_nodes='{"main":"1"}')
    first["spec"]["nodeName"] = "n1"
    made.pod_watcher.on_update(first)
    second, third = gpu_pod("2", name="q"), gpu_pod("3", name="r", policy="best-effort")
    assert json.loads(await made.filter(question(second, "n1")))["NodeNames"] == ["n1"]
    found = json.loads(await made.filter(question(third, "n1")))
    assert found["FailedNodes"] == {"n1": f"needs 3 {GPU}; at most 2 free"}


async def test_filter_names_all_nodes_with_room_where_prioritize_is_asked() -> None:
    """By default it names the best ones: the configuration that is shipped asks nothing else."""
    for narrow, named in ((True, ["b"]), (False, ["a", "b"])):
        made = extender(filter_to_best=narrow)
        # Two NUMA nodes of a would hold it, and one of b.
        body = question(single(6, policy="best-effort"), "a", "b")
        found = json.loads(await made.filter(body))
        assert found["NodeNames"] == named
        assert not found["FailedNodes"]
        assert not found["FailedAndUnresolvableNodes"]
        scores = json.loads(await made.prioritize(body))
        assert [one["Host"] for one in scores] == ["a", "b"]


async def test_a_pod_without_room_in_a_sample_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question itself costs no more than the nodes that it names."""
    made, names = extender(), [f"n{n}" for n in range(150)]
    judged: list[NodeResources] = []
    monkeypatch.setattr(
        "nri_numa.scheduler.candidates.evaluate_fit",
        lambda room, *rest: judged.append(room) or evaluate_fit(room, *rest),
    )
    for name in names:
        made.node_watcher.on_update(topology(2, 2, name=name))
    made.node_watcher.on_update(topology(2, 12, name="room"))
    for cpus, asked, woken in ((12, names[:99], False), (13, names, False), (12, names, True)):
        found = json.loads(await made.filter(question(single(cpus), *asked)))
        assert not found["NodeNames"]
        assert not {max(room.exclusive.free) for room in judged} - {2}
        await made.wake_sampled_pods()
        assert made.activator.is_wake_due is woken, (cpus, len(asked))
        judged.clear()


async def test_an_answer_names_so_many_nodes_for_one_reason() -> None:
    """Of a whole cluster where none has room it had 400 kB."""
    names = [f"n{n}" for n in range(3000)]
    answer = await extender().filter(question(single(3), *names))
    found = json.loads(answer)["FailedAndUnresolvableNodes"]
    assert list(found) == names[:500]
    assert found["n0"].endswith("object for this node (also on 2500 more nodes)")


async def test_what_is_judged_by_sums_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Eleven containers that are wider than a NUMA node, on nodes with eight that all differ."""
    made, names = extender(filter_to_best=False), [f"n{n}" for n in range(30)]
    limited = partial(made.candidates.filter_steps, limit=MAX_QUESTION_WORK / 10)
    made.candidates.filter_steps = limited  # type: ignore[method-assign]
    for n, name in enumerate(names):
        free, memory = [4] * 7 + [n % 17], [4 + n // 17] * 8
        made.node_watcher.on_update(topology(*free, name=name, memory=memory))
    parts = [container(f"c{n}", cpu="1", memory="30Gi") for n in range(11)]
    for part in parts:
        part["resources"]["requests"] = {"memory": "1Mi"}
    body = question(pod(*parts, policy="best-effort"), *names)
    found = json.loads(await made.filter(body))
    assert found["NodeNames"] == names
    text = made.render_metrics().decode()
    (line,) = [x for x in text.splitlines() if x.startswith("nri_numa_scheduler_nodes_by_sums_t")]
    assert 0 < float(line.split()[-1]) < 30
    assert "passed by sums alone" in caplog.text


async def test_a_pod_is_woken_when_a_new_node_says_what_it_has() -> None:
    """kube-scheduler tries it there before the node's object exists."""
    made = extender()
    found = json.loads(await made.filter(question(single(6), "new")))
    assert list(found["FailedAndUnresolvableNodes"]) == ["new"]
    assert not made.activator.is_wake_due
    made.node_watcher.on_update(topology(8, 8, name="new"))
    assert made.activator.is_wake_due


async def test_bindings_have_their_turn_while_nodes_are_judged() -> None:
    made, turns = extender(filter_to_best=False), 0
    names = [f"n{n}" for n in range(100)]
    for number, name in enumerate(names):
        made.node_watcher.on_update(topology(8, 8, name=name, memory=(number % 10, number // 10)))

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = await made.filter(question(single(9, policy="best-effort", memory="1Mi"), *names))
    counting.cancel()
    assert len(json.loads(found)["NodeNames"]) == 99
    assert turns >= 9, "of a thousand times the work of one node"


@pytest.mark.parametrize("made", [{"synced": False}], indirect=True)
async def test_before_nodes_are_known_ordinary_pods_pass_and_ours_wait(ask: Ask) -> None:
    ordinary = pod(container(cpu="250m", memory="1Gi"))
    assert (await ask("/filter", question(ordinary, "a")))[1]["NodeNames"] == ["a"]
    assert "still being read" in (await ask("/filter", question(single(2), "a")))[1]["Error"]
    assert (await ask("/readyz"))[0] == 503
    binding = {"PodName": "p", "PodNamespace": "n", "PodUID": "u", "Node": "a"}
    found = await ask("/bind", json.dumps(binding).encode())
    assert "still being read" in found[1]["Error"]


async def test_what_is_no_question_is_an_answer_too(ask: Ask) -> None:
    for body in (b"{", b"null", b'{"Pod":{},"Nodes":{"items":[]}}'):
        for verb in ("/filter", "/prioritize", "/preempt", "/bind"):
            status, found = await ask(verb, body)
            assert (status, bool(found["Error"])) == (400, True)
    with contextlib.suppress(ClientError):  # it need not hear all of it
        assert (await ask("/filter", b"x" * (10 << 20)))[0] == 413
    # Pods of nonsense are nobody's, and what asks is told what is wrong.
    for document in ({}, {"spec": {"containers": 3}}, {"metadata": {"annotations": 3}}):
        assert (await ask("/filter", question(document, "a")))[1]["NodeNames"] == ["a"]
    wrong = question(single(6, policy="near"), "a")
    (why,) = (await ask("/filter", wrong))[1]["FailedAndUnresolvableNodes"].values()
    assert "policy is 'near'" in why
    large = single(2)
    large["metadata"]["annotations"]["example.com/note"] = "x" * (MAX_QUESTION_BYTES - 100_000)
    assert (await ask("/filter", question(large, "a")))[1]["NodeNames"] == ["a"]
    assert (await ask("/nothing", b"{}"))[0] == 404
    # And it still answers.
    assert (await ask("/filter", question(single(2), "a")))[1]["NodeNames"] == ["a"]


async def test_a_mistake_of_ours_is_an_answer(ask: Ask, made: Extender) -> None:
    def broken(document: object) -> NoReturn:
        raise RuntimeError("boom")

    made.reader.read_pod_request = broken  # type: ignore[method-assign]
    status, found = await ask("/filter", question({}))
    assert status == 500
    assert "boom" not in str(found)


async def test_with_an_authority_only_who_has_a_certificate_may_ask(tmp_path: Path) -> None:
    """Probes and scrapers have none."""
    make_certificate(tmp_path, "test")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    found, body = [], question(single(2), "a")
    async with served(extender(tls_cert=cert, tls_key=key, client_ca=cert)) as port:
        for known in (True, False):
            context = ssl.create_default_context(cafile=cert)
            if known:
                context.load_cert_chain(cert, key)
            async with ClientSession(f"https://127.0.0.1:{port}") as session:
                for method, path in (("POST", "/filter"), ("GET", "/readyz")):
                    async with session.request(method, path, data=body, ssl=context) as answer:
                        found.append(answer.status)
    assert found == [200, 200, 403, 200]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: example.com\r\n", 421),
        ("Host: localhost\r\nOrigin: https://example.com\r\n", 403),
        ("Host: localhost\r\nOrigin: null\r\n", 403),
        ("Host: localhost\r\nContent-Length: 5000000\r\nExpect: 100-continue\r\n", 413),
        ("Host: localhost\r\nExpect: 100-continue\r\nContent-Length: 4\r\n", 100),
        ("Host: localhost\r\n", 400),
    ],
)
async def test_no_web_page_binds_a_pod(headers: str, status: int) -> None:
    """A browser on the machine sends requests of foreign pages to loopback."""
    async with served(extender()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"POST /bind HTTP/1.1\r\n{headers}\r\n".encode())
        assert int((await reader.readline()).split()[1]) == status
        writer.close()


async def test_bodies_have_a_sum() -> None:
    """Of many clients that announce large bodies and send nothing, some wait for nothing."""
    head = f"POST /filter HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_QUESTION_BYTES}\r\n"
    found, streams = [], []
    async with served(extender()) as port:
        for _ in range(9):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            streams.append(writer)
            writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
            found.append(int((await reader.readline()).split()[1]))
        for writer in streams:
            writer.close()
    assert found == [100] * 8 + [503]
