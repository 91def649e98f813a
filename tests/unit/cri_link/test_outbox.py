"""Updates on their way: one call for each container at a time, the newest values last."""

from __future__ import annotations

import asyncio

import pytest

from nri_numa.cri.client import CRIResources, UpdateFailed
from nri_numa.cri_link.outbox import Outbox
from nri_numa.errors import RuntimeUnavailable


class Runtime:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.down = False

    async def update_resources(
        self, container_id: str, resources: CRIResources
    ) -> UpdateFailed | None:
        self.calls.append((container_id, resources.cpus, resources.mems))
        await self.gates.setdefault(container_id, asyncio.Event()).wait()
        if self.down:
            raise RuntimeUnavailable("no answer")
        return None

    def open(self, *ids: str) -> None:
        for container_id in ids:
            self.gates.setdefault(container_id, asyncio.Event()).set()


async def turns() -> None:
    """Let everything that can go on go on."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_what_comes_during_a_call_is_put_together_and_sent_after_it() -> None:
    runtime = Runtime()
    outbox = Outbox(runtime)
    first = outbox.put("a", CRIResources(cpus="0"))
    await turns()
    second = outbox.put("a", CRIResources(cpus="1"))
    third = outbox.put("a", CRIResources(mems="1"))
    assert second is third
    await turns()
    assert runtime.calls == [("a", "0", "")]
    runtime.open("a")
    assert (await first, await second) == (None, None)
    assert runtime.calls == [("a", "0", ""), ("a", "1", "1")]


@pytest.mark.asyncio
async def test_an_urgent_one_does_not_wait_behind_neighbours() -> None:
    runtime = Runtime()
    outbox = Outbox(runtime, at_once=2)
    for name in "abcd":
        outbox.put(name, CRIResources(cpus="0"))
    await turns()
    assert [call[0] for call in runtime.calls] == ["a", "b"]
    runtime.open("own")
    assert await outbox.put("own", CRIResources(cpus="1"), urgent=True) is None
    runtime.open(*"abcd")
    await turns()
    assert [call[0] for call in runtime.calls] == ["a", "b", "own", "c", "d"]


@pytest.mark.asyncio
async def test_a_lost_runtime_and_a_closed_connection_are_failures_not_exceptions() -> None:
    runtime = Runtime()
    runtime.down = True
    outbox = Outbox(runtime, at_once=1)
    lost = outbox.put("a", CRIResources(cpus="0"))
    runtime.open("a")
    failed = await lost
    assert failed is not None
    assert (failed.gone, failed.message) == (False, "no answer")
    under_way = outbox.put("b", CRIResources(cpus="0"))
    await turns()
    waiting = [outbox.put(name, CRIResources(cpus="0")) for name in "bc"]
    await outbox.close()
    for one in (under_way, *waiting):
        failed = await one
        assert failed is not None
        assert failed.message == "the connection was closed"
