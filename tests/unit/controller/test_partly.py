"""Whom Events name as refused in part, and who of them is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nri_numa.controller.partly import KEPT, MOST, Partly
from nri_numa.controller.stuck import LOOK
from nri_numa.kube_api import KubeAPI
from tests.beds.fake_api_server import Asked, FakeAPIServer, Said, fake, status
from tests.unit.controller.test_stuck import ROOM, SAID, Cluster, partly, pod


def event(name: str, said: str = "") -> dict[str, Any]:
    """What the kubelet tells of a container that cannot be created."""
    return {
        "involvedObject": {"kind": "Pod", "namespace": "shop", "name": name},
        "reason": "Failed",
        "message": said or f"Error: failed to create containerd container: {SAID.format(name)}",
    }


class Told:
    """Pods by name, and who looks at them.

    Attributes:
        pods: that the API server has.
        answer: that it gives instead, if any.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.pods: dict[str, dict[str, Any]] = {}
        self.answer: Said | None = None
        self.cluster = Cluster(ROOM)
        self.partly: Partly
        self.server: FakeAPIServer

    def __call__(self, asked: Asked) -> Said:
        if self.answer is not None:
            return self.answer
        path, _, query = unquote(asked.path).partition("?")
        assert path == "/api/v1/namespaces/shop/pods"
        found = self.pods.get(query.removeprefix("fieldSelector=metadata.name="))
        return Said(200, {"items": [found] if found else []})

    @property
    def waiting(self) -> int:
        return self.cluster.output.waiting()

    async def at(self, now: float) -> int:
        """Requests of a turn at some time."""
        before = len(self.server.asked)
        self.now = now
        await self.partly.turn()
        return len(self.server.asked) - before


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def made(talk: Callable[[Told], Awaitable[None]]) -> None:
        told = Told()

        async def work() -> None:
            connection = KubeAPI(str(tmp_path), "test")
            told.partly = Partly(connection, told.cluster.output, lambda: told.now)
            try:
                await talk(told)
            finally:
                await connection.close()

        with fake(tmp_path, monkeypatch, told) as told.server:
            asyncio.run(work())

    return made


def test_who_is_named_is_looked_at_until_it_runs_as_a_whole(run: Callable[..., None]) -> None:
    async def talk(told: Told) -> None:
        told.pods["web"] = partly("web")
        assert await told.at(0.0) == 0
        told.partly.told(event("web"))
        assert await told.at(1.0) == 1
        assert told.waiting == 1
        assert await told.at(LOOK) == 0
        assert await told.at(1.0 + LOOK) == 1
        assert await told.at(10 * KEPT) == 1, "as long as it waits"
        told.pods["web"]["status"]["containerStatuses"][0]["state"] = {"running": {}}
        assert await told.at(11 * KEPT) == 1
        assert told.waiting == 0
        assert await told.at(12 * KEPT) == 0, "nothing was told of it since"

    run(talk)


def test_a_status_may_come_after_the_event(run: Callable[..., None]) -> None:
    async def talk(told: Told) -> None:
        told.pods["web"] = pod("web")  # Pending: others look after it
        told.partly.told(event("web"))
        await told.at(0.0)
        assert told.waiting == 0
        told.pods["web"] = partly("web")
        await told.at(LOOK)
        assert told.waiting == 1
        del told.pods["web"]
        await told.at(2 * LOOK)
        assert told.waiting == 0
        assert await told.at(3 * LOOK) == 0

    run(talk)


def test_another_pod_of_that_name_is_another_pod(run: Callable[..., None]) -> None:
    async def talk(told: Told) -> None:
        told.pods["web"] = partly("web")
        told.partly.told(event("web"))
        await told.at(0.0)
        told.pods["web"] = partly("web")
        told.pods["web"]["metadata"]["uid"] = "uid-next"
        await told.at(LOOK)
        assert told.waiting == 1
        told.cluster.output.whole("uid-next")
        assert told.waiting == 0

    run(talk)


def test_what_is_not_of_ours_is_not_looked_at(run: Callable[..., None]) -> None:
    async def talk(told: Told) -> None:
        for one in (
            {}, {"involvedObject": 3}, event("web", "Error: ErrImagePull"),
            event("web", SAID.format("another")),
        ):  # fmt: skip
            told.partly.told(one)
        assert await told.at(0.0) == 0

    run(talk)


def test_no_more_than_so_many_are_looked_at(run: Callable[..., None]) -> None:
    async def talk(told: Told) -> None:
        told.answer = status(403, "no")
        for number in range(MOST + 10):
            told.partly.told(event(f"web-{number}"))
        told.partly.told(event("web-0"))
        assert len(told.partly._suspects) == MOST

    run(talk)


def test_without_an_answer_it_is_asked_again(run: Callable[..., None]) -> None:
    async def talk(told: Told) -> None:
        told.pods = {name: partly(name) for name in ("a", "b")}
        for name in told.pods:
            told.partly.told(event(name))
        for answer in (status(403, "cannot list pods"), Said(200, "{"), Said(200, {"items": 3})):
            told.answer = answer
            assert await told.at(told.now + 1) == 1
            assert told.partly.problem
        told.answer = None
        assert await told.at(told.now + 1) == 2
        assert told.partly.problem == ""
        assert told.waiting == 2

    run(talk)
