"""Bindings and watches without a client library: what comes back, and what goes wrong."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from itertools import repeat
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from nri_numa.kube.api import WATCH_COALESCE_S, WATCH_OPENED, KubeAPI, error_from_response
from nri_numa.kube.requests import KubeError
from tests.beds.fake_api_server import Asked, FakeAPIServer, Said, fake, status
from tests.beds.watch_clients import NAMES, event_line, watch_of

PATH = "/api/v1/namespaces/default/pods/p/binding"
PODS = "/api/v1/pods"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAPIServer]:
    with fake(tmp_path, monkeypatch, lambda asked: Said(200, {})) as made:
        yield made


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[KubeAPI]:
    made = KubeAPI(str(tmp_path), "test")
    async with asyncio.timeout(180):
        yield made
    await made.close()


async def events(made: KubeAPI, **parameters: str) -> list[tuple[str, Any]]:
    return [one async for one in made.watch_events(PODS, parameters, 300) if one[0] != WATCH_OPENED]


async def test_a_renewed_token_is_read_when_the_old_one_is_denied(
    made: KubeAPI, server: FakeAPIServer, tmp_path: Path
) -> None:
    def answer(asked: Asked) -> Said:
        good = asked.authorization == "Bearer second"
        return Said(201, {}) if good else status(401, "Unauthorized")

    server.answer = answer
    with pytest.raises(KubeError) as denied:
        await made.request_json("POST", PATH, {})
    assert denied.value.code == 401
    (tmp_path / "token").write_text("second\n")
    for _ in range(2):
        assert await made.request_json("POST", PATH, {}) == {}
    said = [asked.authorization.removeprefix("Bearer ") for asked in server.asked]
    assert said == ["first", "first", "first", "second", "second"]


async def test_credentials_that_are_written_anew_end_no_request(
    made: KubeAPI, server: FakeAPIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet writes all files anew with each token, which is once an hour."""
    monkeypatch.setattr("nri_numa.kube.api._CA_CHECK_INTERVAL_S", -1.0)
    asked_it, over = threading.Event(), threading.Event()

    def answer(asked: Asked) -> Said:
        asked_it.set()
        over.wait(0 if asked.path == PODS else 60)
        return Said(201, {})

    server.answer = answer
    post = asyncio.create_task(made.request_json("POST", PATH, {}))
    await asyncio.to_thread(asked_it.wait, 60)
    for name, text in (("ca.crt", (tmp_path / "ca.crt").read_text()), ("token", "second")):
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(tmp_path / name)
    try:
        await made.request_json("GET", PODS)
    finally:
        over.set()
    assert await post == {}
    assert server.asked[-1].authorization == "Bearer second"
    with (tmp_path / "ca.crt").open("a") as file:
        file.write("\n")  # another authority, which two requests see at once
    assert await asyncio.gather(*(made.request_json("GET", PODS) for _ in range(2))) == [{}, {}]


async def test_an_abandoned_request_is_closed(made: KubeAPI, server: FakeAPIServer) -> None:
    asked_it, over = threading.Event(), threading.Event()

    def answer(asked: Asked) -> Said:
        asked_it.set()
        over.wait(60)
        return Said(201, {})

    server.answer = answer
    post = asyncio.create_task(made.request_json("POST", PATH, {}))
    try:
        await asyncio.to_thread(asked_it.wait, 60)
        (connection,) = made._sockets
        post.cancel()
        await asyncio.wait([post])
        await made.close()
        assert connection.fileno() == -1
    finally:
        over.set()


async def test_a_watch_is_read_by_lines_in_any_form(made: KubeAPI, server: FakeAPIServer) -> None:
    """Long lines come in pieces, short ones together, and the last may not be ended."""
    sizes = (10, 300_000, 10, 10, 70_000)
    said = [{"type": "ADDED", "object": {"n": n, "x": "x" * size}} for n, size in enumerate(sizes)]
    server.answer = lambda asked: Said(200, "\n".join(json.dumps(one) for one in said))
    found = await events(made, fieldSelector="a=b,c!=", resourceVersion="7")
    assert [(kind, document["n"]) for kind, document in found] == [("ADDED", n) for n in range(5)]
    assert [len(document["x"]) for _, document in found] == list(sizes)
    path, _, query = server.asked[0].path.partition("?")
    assert path == PODS
    assert {"watch=true", "timeoutSeconds=300", "resourceVersion=7"} <= {*query.split("&")}
    assert parse_qs(query)["fieldSelector"] == ["a=b,c!="]


class Gated(KubeAPI):
    """A client that reads on when the server has sent everything."""

    sent: threading.Event

    async def watch_events(self, *asked: Any, **how: Any) -> AsyncGenerator[tuple[str, Any]]:
        async with aclosing(super().watch_events(*asked, **how)) as followed:
            async for one in followed:
                yield one
                if one[0] == WATCH_OPENED:
                    assert await asyncio.to_thread(self.sent.wait, 60)


@pytest.mark.parametrize("name", NAMES)
async def test_events_that_wait_are_read_without_a_pause(
    server: FakeAPIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each pause is 20 ms, so one in a hundred events lets 5,000 of them come in a second."""
    Gated.sent, watched = threading.Event(), list[str]()
    bookmark = b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"999"}}}\n'

    def stream() -> Iterator[bytes]:
        yield from (event_line(name, number) for number in range(300))
        Gated.sent.set()
        yield bookmark

    def answer(asked: Asked) -> Said:
        if "watch=true" not in asked.path:
            return Said(200, {"metadata": {"resourceVersion": "1"}, "items": []})
        watched.append(asked.path)
        return Said(200, stream=stream()) if len(watched) == 1 else status(503, "later")

    server.answer = answer
    pauses, loop = list[float](), asyncio.get_running_loop()
    later = loop.call_later
    monkeypatch.setattr(
        loop,
        "call_later",
        lambda delay, *more, **how: pauses.append(delay) or later(delay, *more, **how),
    )
    watch = watch_of(name, Gated(str(tmp_path), "test"))
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(180):
        while len(watched) < 2:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    await watch._api.close()
    assert "resourceVersion=999" in watched[1], "all were read"
    assert pauses.count(WATCH_COALESCE_S) <= 3


async def test_little_waits_for_a_client_that_is_slow(made: KubeAPI, server: FakeAPIServer) -> None:
    """8 MiB of events, and the loop turns at each: whatever may be read ahead is."""
    piece = event_line("extender: pods", 1) * 10
    server.answer = lambda asked: Said(200, stream=repeat(piece, (8 << 20) // len(piece)))
    most = 0
    tracemalloc.start()
    try:
        async for _ in made.watch_events(PODS, {}, 300):
            await asyncio.sleep(0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4 << 20


@pytest.mark.parametrize(
    "text", ["nonsense", '{"type": "ADDED", "object": 3}', '{"type": "ADDED"}']
)
async def test_what_is_no_watch_is_said(made: KubeAPI, server: FakeAPIServer, text: str) -> None:
    server.answer = lambda asked: Said(200, text)
    with pytest.raises(KubeError, match="cannot read an event of a watch"):
        await events(made)


async def test_an_error_ends_a_watch_after_its_events(made: KubeAPI, server: FakeAPIServer) -> None:
    gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
    server.answer = lambda asked: Said(200, event_line(NAMES[0], 1).decode() + json.dumps(gone))
    kinds: list[str] = []

    async def follow() -> None:
        async for kind, _ in made.watch_events(PODS, {}):
            kinds.append(kind)

    with pytest.raises(KubeError, match="too old") as error:
        await follow()
    assert (kinds, error.value.code) == ([WATCH_OPENED, "ADDED"], 410)


async def test_a_long_list_is_read_page_by_page(made: KubeAPI, server: FakeAPIServer) -> None:
    pages = [{"metadata": {"continue": "a=b&c"}, "items": [{"n": 1}]}, {"items": [{"n": 2}]}]
    server.answer = lambda asked: Said(200, pages[len(server.asked) - 1])
    assert await made.list_objects(PODS, "x!=") == [{"n": 1}, {"n": 2}]
    queries = [parse_qs(asked.path.partition("?")[2]) for asked in server.asked]
    first = {"fieldSelector": ["x!="], "limit": ["500"]}
    assert queries == [first, {**first, "continue": ["a=b&c"]}]


def test_an_answer_of_something_in_between_is_shown() -> None:
    found = error_from_response(502, b"<html>Bad Gateway\xff")
    assert found.code == 502
    assert "Bad Gateway" in str(found)


@pytest.mark.parametrize("body", ["{", "[]", '{"items": 3}', '{"items": [3]}'])
async def test_what_is_no_list_is_an_error(made: KubeAPI, server: FakeAPIServer, body: str) -> None:
    server.answer = lambda asked: Said(200, body)
    with pytest.raises(KubeError, match="cannot read the answer"):
        await made.list_objects(PODS)
