"""Bindings that come while the pods of their node are being read wait for one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httpx2
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


async def begun(*looks: Awaitable[None]) -> list[asyncio.Task[None]]:
    """Tasks that have come as far as they can."""
    tasks = [asyncio.ensure_future(one) for one in looks]
    await turns()
    return tasks


async def turns() -> None:
    """Let everybody go on who can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_comes_meanwhile_waits_for_the_same_answer() -> None:
    async def talk(made: Unseen, server: Slow) -> None:
        several = await begun(*(made.look(node) for node in ("n1", "n2", "n1", "n1")))
        assert len(server.asked) == 2, "one question for each node"
        assert not any(one.done() for one in several)
        server.asked[0].set_result([])
        await turns()
        assert [one.done() for one in several] == [True, False, True, True]
        server.asked[1].set_result([])
        await asyncio.gather(*several, made.look("n1"), made.look("n2"))
        assert len(server.asked) == 2

    run(talk)


def test_who_gives_up_takes_the_answer_from_nobody() -> None:
    async def talk(made: Unseen, server: Slow) -> None:
        first, second = await begun(made.look("n1"), made.look("n1"))
        first.cancel()
        await turns()
        assert (first.cancelled(), second.done()) == (True, False)
        server.asked[0].set_result([])
        await second
        assert len(server.asked) == 1

    run(talk)


def test_a_failure_is_told_to_all_who_wait_and_the_next_one_asks_anew() -> None:
    async def talk(made: Unseen, server: Slow) -> None:
        several = await begun(made.look("n1"), made.look("n1"))
        server.asked[0].set_exception(httpx2.ConnectError("nobody there"))
        found = await asyncio.gather(*several, return_exceptions=True)
        assert [str(one) for one in found] == ["nobody there", "nobody there"]
        (again,) = await begun(made.look("n1"))
        assert len(server.asked) == 2
        server.asked[1].set_result([])
        await again

    run(talk)


def test_an_answer_to_what_was_asked_before_another_list_does_not_do() -> None:
    """Somebody may have started between the question and that list, which names nobody who runs."""

    async def talk(made: Unseen, server: Slow) -> None:
        (early,) = await begun(made.look("n1"))
        made.listed()
        (late,) = await begun(made.look("n1"))
        assert len(server.asked) == 2, "the second one does not wait for the old question"
        server.asked[0].set_result([])
        await turns()
        assert not early.done(), "it waits for the newer one now"
        server.asked[1].set_result([])
        await asyncio.gather(early, late)
        assert len(server.asked) == 2

    run(talk)


def test_nobody_waits_longer_than_one_reading_may_take() -> None:
    async def talk(made: Unseen, server: Slow) -> None:
        with pytest.raises(TimeoutError):
            await made.look("n1")
        with pytest.raises(TimeoutError):
            await made.look("n1")
        assert len(server.asked) == 2

    run(talk, timeout=0)
