"""Bindings that come while the pods of their node are being read wait for one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from nri_numa.scheduler.lean import LeanConnection
from nri_numa.scheduler.unseen import Unseen
from nri_numa.scheduler.world import World


class Slow:
    """An API server that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[list[dict[str, Any]]]] = []

    async def objects(self, path: str) -> list[dict[str, Any]]:
        assert "fieldSelector=spec.nodeName" in path
        answer = asyncio.get_running_loop().create_future()
        self.asked.append(answer)
        return cast(list[dict[str, Any]], await answer)


def run(talk: Callable[[Unseen, Slow], Awaitable[None]], *, timeout: float = 60) -> None:
    async def all_of_it() -> None:
        server = Slow()
        made = Unseen(
            cast(LeanConnection, server),
            World.__new__(World),  # of nobody who runs it is told nothing
            seconds=60,
            timeout=timeout,
            clock=lambda: 0.0,
        )
        made.listed()
        async with asyncio.timeout(180):
            await talk(made, server)

    asyncio.run(all_of_it())


def test_nobody_waits_longer_than_one_reading_may_take() -> None:
    async def talk(made: Unseen, server: Slow) -> None:
        with pytest.raises(TimeoutError):
            await made.look("n1")
        with pytest.raises(TimeoutError):
            await made.look("n1")
        assert len(server.asked) == 2

    run(talk, timeout=0)
