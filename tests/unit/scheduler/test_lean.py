"""Bindings and watches without a client library: what comes back, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from lightkube.core.exceptions import ConfigError

from nri_numa.kube_client import unreachable
from nri_numa.scheduler.lean import LeanConnection, refused
from tests.beds.fake_api_server import Asked, FakeAPIServer, Said, fake, status

PATH = "/api/v1/namespaces/default/pods/p/binding"
PODS = "/api/v1/pods"


def run(directory: Path, talk: Callable[[LeanConnection], Awaitable[Any]]) -> Any:
    async def all_of_it() -> Any:
        made = LeanConnection(str(directory), user_agent="test", field_manager="test")
        try:
            async with asyncio.timeout(180):
                return await talk(made)
        finally:
            await made.close()

    return asyncio.run(all_of_it())


async def events(made: LeanConnection, **parameters: str) -> list[tuple[str, Any]]:
    return [one async for one in made.events(PODS, parameters, 300)]


def test_a_renewed_token_is_read_when_the_old_one_is_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(asked: Asked) -> Said:
        good = asked.authorization == "Bearer second"
        return Said(201, {}) if good else status(401, "Unauthorized")

    async def talk(made: LeanConnection) -> list[int]:
        first, _ = await made.post(PATH, {})
        (tmp_path / "token").write_text("second\n")
        return [first, (await made.post(PATH, {}))[0], (await made.post(PATH, {}))[0]]

    with fake(tmp_path, monkeypatch, answer) as server:
        assert run(tmp_path, talk) == [401, 201, 201]
    said = [asked.authorization.removeprefix("Bearer ") for asked in server.asked]
    assert said == ["first", "first", "first", "second", "second"]


def test_a_renewed_authority_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(made: LeanConnection) -> None:
        with fake(tmp_path, monkeypatch, lambda asked: Said(201, {})):
            assert (await made.post(PATH, {}))[0] == 201
        with fake(tmp_path, monkeypatch, lambda asked: Said(202, {})):
            answered = 0
            while answered != 202:  # it looks once a second, and the old one answers until then
                with contextlib.suppress(httpx2.HTTPError):
                    answered, _ = await made.post(PATH, {})
                await asyncio.sleep(0.05)

    run(tmp_path, talk)


def test_a_request_that_was_given_up_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_it, over = threading.Event(), threading.Event()

    def answer(asked: Asked) -> Said:
        asked_it.set()
        over.wait(60)
        return Said(201, {})

    async def talk(made: LeanConnection) -> None:
        post = asyncio.create_task(made.post(PATH, {}))
        await asyncio.to_thread(asked_it.wait, 60)
        (connection,) = made._sockets
        post.cancel()
        await asyncio.wait([post])
        await made.close()
        assert connection.fileno() == -1

    with fake(tmp_path, monkeypatch, answer):
        try:
            run(tmp_path, talk)
        finally:
            over.set()


def test_a_watch_is_read_line_by_line_however_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long lines come in pieces, short ones together, and the last may not be ended."""
    sizes = (10, 300_000, 10, 10, 70_000)
    said = [{"type": "ADDED", "object": {"n": n, "x": "x" * size}} for n, size in enumerate(sizes)]
    text = "\n".join(json.dumps(one) for one in said)
    with fake(tmp_path, monkeypatch, lambda asked: Said(200, text)) as server:
        found = run(
            tmp_path, lambda made: events(made, fieldSelector="a=b,c!=", resourceVersion="7")
        )
    assert [(kind, document["n"]) for kind, document in found] == [("ADDED", n) for n in range(5)]
    assert [len(document["x"]) for _, document in found] == list(sizes)
    path, _, query = server.asked[0].path.partition("?")
    assert path == PODS
    assert {"watch=true", "timeoutSeconds=300", "resourceVersion=7"} <= {*query.split("&")}
    assert httpx2.QueryParams(query)["fieldSelector"] == "a=b,c!="


@pytest.mark.parametrize(
    "text", ["nonsense", '{"type": "ADDED", "object": 3}', '{"type": "ADDED"}']
)
def test_what_is_no_watch_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with (
        fake(tmp_path, monkeypatch, lambda asked: Said(200, text)),
        pytest.raises(ValueError, match="an event of a watch"),
    ):
        run(tmp_path, events)


def test_an_answer_of_something_in_between_is_shown() -> None:
    found = refused(502, b"<html>Bad Gateway\xff")
    assert found.status.code == 502
    assert "Bad Gateway" in str(found)


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake(tmp_path, monkeypatch, lambda asked: Said()):
        pass  # it is gone, and its port and certificate stay known
    with pytest.raises(httpx2.HTTPError) as found:
        run(tmp_path, lambda made: made.post(PATH, {}))
    assert "no answer from the API server" in unreachable(found.value, tmp_path)


def test_the_server_of_another_cluster_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    FakeAPIServer(ours, lambda asked: Said())._server.server_close()
    with fake(theirs, monkeypatch, lambda asked: Said()), pytest.raises(httpx2.HTTPError) as found:
        run(ours, lambda made: made.post(PATH, {}))
    assert "certificate is not accepted" in unreachable(found.value, ours)


def test_without_a_token_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake(tmp_path, monkeypatch, lambda asked: Said()):
        (tmp_path / "token").unlink()
        with pytest.raises((ConfigError, OSError)) as found:
            run(tmp_path, lambda made: made.post(PATH, {}))
        assert "expected token and ca.crt" in unreachable(found.value, tmp_path)
