"""The life of the device plugin beside a kubelet that comes, goes, and is odd."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from msgspec.structs import replace

from nri_numa.device_plugin.plugin import PLUGIN_SOCKET_NAME, DevicePlugin, PluginTiming
from nri_numa.device_plugin.slots import SlotList
from nri_numa.errors import DevicePluginBusy, RuntimeUnavailable
from tests.beds.fake_kubelet import FakeKubelet
from tests.beds.link_bed import eventually

RESOURCE = "numa.example.com/exclusive-cpu"
QUICK = PluginTiming(
    agent_interval_s=0.02,
    poll=0.02,
    agent_timeout_s=0.1,
    settle=0.01,
    watched=0.3,
    retry_delays_s=(0.02,),
)


class FakeAgent:
    """What ``/v1/slots`` says, or that nobody answers."""

    def __init__(self, free: int = 3) -> None:
        self.free = free
        self.held: list[str] = []
        self.ready = True
        self.gone = False
        self.asked = 0
        self.document: dict[str, Any] | None = None

    def ask(self) -> dict[str, Any]:
        self.asked += 1
        if self.gone:
            raise RuntimeUnavailable("no answer from 127.0.0.1:9891")
        if self.document is not None:
            return self.document
        return {
            "ready": self.ready,
            "reason": "" if self.ready else "the link to the runtime is closed",
            "annotation": "numa.kubernetes.io/slots",
            "numaNodes": [{"id": 0, "allocated": len(self.held), "free": self.free}],
            "ids": self.held,
            "serial": 1,
            "total": self.free + len(self.held),
            "exclusive": 0,
        }


@asynccontextmanager
async def running(
    directory: Path,
    agent: FakeAgent,
    allocated: Callable[[], set[str]] = set,
    pace: PluginTiming = QUICK,
) -> AsyncIterator[DevicePlugin]:
    plugin = DevicePlugin(
        str(directory), RESOURCE, agent.ask, SlotList(), allocated=allocated, times=pace
    )
    task = asyncio.create_task(plugin.run())
    try:
        yield plugin
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_it_serves_registers_and_hands_over(directory: Path) -> None:
    agent = FakeAgent()
    async with FakeKubelet(directory) as kubelet, running(directory, agent):
        first = await kubelet.listed(lambda it: len(it) == 3)
        assert first == {f"slot-{n}": ("Healthy", None) for n in range(3)}
        assert kubelet.resources == [RESOURCE]
        assert kubelet.options is not None
        assert kubelet.options.get_preferred_allocation_available
        assert await kubelet.preferred(["slot-2", "slot-1"], [], 1) == ["slot-1"]
        assert await kubelet.allocate("slot-1", "slot-0") == {
            "numa.kubernetes.io/slots": "slot-0,slot-1"
        }
        # Somebody takes two by annotation: what was handed over stays.
        agent.free = 1
        assert set(await kubelet.listed(lambda it: len(it) == 2)) == {"slot-0", "slot-1"}


async def test_unknown_ids_are_refused_in_words(directory: Path) -> None:
    async with FakeKubelet(directory) as kubelet, running(directory, FakeAgent()):
        await kubelet.listed(lambda it: len(it) == 3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kubelet.allocate("slot-77")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "Allocate of 'slot-77', expected ids that were offered" in (
            refused.value.details() or ""
        )
        assert await kubelet.allocate("slot-0")


async def test_a_kubelet_that_restarts_is_told_again(directory: Path) -> None:
    async with running(directory, FakeAgent()) as plugin:
        for life in range(1, 4):
            async with FakeKubelet(directory) as kubelet:
                assert len(await kubelet.listed(lambda it: len(it) == 3)) == 3
                assert kubelet.resources == [RESOURCE]
            assert plugin.registered == life


async def test_a_kubelet_that_is_not_there_yet_and_an_agent_that_is_not(directory: Path) -> None:
    agent = FakeAgent()
    agent.gone = True
    async with running(directory, agent) as plugin, FakeKubelet(directory) as kubelet:
        await eventually(lambda: agent.asked > 5)
        assert (plugin.registered, kubelet.resources) == (0, [])
        agent.gone = False
        await kubelet.listed(lambda it: len(it) == 3)


async def test_an_agent_that_goes_takes_no_slot_from_who_holds_it(directory: Path) -> None:
    agent = FakeAgent()
    async with FakeKubelet(directory) as kubelet, running(directory, agent):
        await kubelet.listed(lambda it: len(it) == 3)
        await kubelet.allocate("slot-2")
        for break_it in ("gone", "ready", "document"):
            value = {"gone": True, "ready": False, "document": {"odd": 1}}[break_it]
            setattr(agent, break_it, value)
            found = await kubelet.listed(lambda it: it["slot-0"][0] == "Unhealthy")
            assert found["slot-2"][0] == "Healthy"
            setattr(agent, break_it, {"gone": False, "ready": True}.get(break_it))
            await kubelet.listed(lambda it: it["slot-0"][0] == "Healthy")


async def test_a_refused_registration_is_tried_again(directory: Path) -> None:
    async with running(directory, FakeAgent()) as plugin:
        async with FakeKubelet(directory, refuses="the ResourceName is invalid"):
            await eventually(lambda: not (directory / PLUGIN_SOCKET_NAME).exists())
            assert plugin.registered == 0
        async with FakeKubelet(directory) as kubelet:
            await kubelet.listed(lambda it: len(it) == 3)


async def test_a_kubelet_that_does_not_watch_and_a_socket_taken_away(directory: Path) -> None:
    async with running(directory, FakeAgent()) as plugin:
        async with FakeKubelet(directory, watches=False):
            await eventually(lambda: plugin.registered >= 2)
        async with FakeKubelet(directory) as kubelet:
            await kubelet.listed(lambda it: len(it) == 3)
            before = plugin.registered
            (directory / PLUGIN_SOCKET_NAME).unlink()
            await eventually(lambda: plugin.registered > before)


async def test_two_on_one_node_and_none_left_behind(directory: Path) -> None:
    other = DevicePlugin(str(directory), RESOURCE, FakeAgent().ask, SlotList(), allocated=set)
    async with FakeKubelet(directory) as kubelet:
        async with running(directory, FakeAgent()):
            await kubelet.listed(lambda it: len(it) == 3)
            with pytest.raises(DevicePluginBusy, match="another nri-numa device-plugin"):
                await other.run()
        # A killed one leaves its socket; the next one takes it over.
        (directory / PLUGIN_SOCKET_NAME).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(directory / PLUGIN_SOCKET_NAME))
        async with running(directory, FakeAgent(), allocated=lambda: {"slot-9"}):
            assert set(await kubelet.listed(lambda it: "slot-9" in it)) == {
                "slot-0", "slot-1", "slot-9",
            }  # fmt: skip


async def test_something_else_in_place_of_the_socket_is_left_alone(directory: Path) -> None:
    (directory / PLUGIN_SOCKET_NAME).write_text("precious")
    agent = FakeAgent()
    async with FakeKubelet(directory) as kubelet, running(directory, agent) as plugin:
        await eventually(lambda: agent.asked > 5)
        assert (plugin.registered, kubelet.resources) == (0, [])
        assert (directory / PLUGIN_SOCKET_NAME).read_text() == "precious"
        (directory / PLUGIN_SOCKET_NAME).unlink()
        await kubelet.listed(lambda it: len(it) == 3)


async def test_a_kubelet_whose_socket_is_removed_goes_on_watching(directory: Path) -> None:
    """Somebody tidied up; the kubelet still has the list, and a new one is told again."""
    agent = FakeAgent()
    async with running(directory, agent) as plugin:
        async with FakeKubelet(directory) as kubelet:
            await kubelet.listed(lambda it: len(it) == 3)
            (directory / "kubelet.sock").unlink()
            agent.free = 2
            await kubelet.listed(lambda it: len(it) == 2)
            assert plugin.registered == 1
        async with FakeKubelet(directory) as kubelet:
            await kubelet.listed(lambda it: len(it) == 2)
        assert plugin.registered == 2


async def test_a_new_kubelet_does_not_wait_for_failures_of_the_old(directory: Path) -> None:
    async with running(directory, FakeAgent(), pace=replace(QUICK, retry_delays_s=(3600.0,))):
        async with FakeKubelet(directory, refuses="not now") as refusing:
            await eventually(lambda: refusing.refused > 0)
        async with FakeKubelet(directory) as kubelet:
            await kubelet.listed(lambda it: len(it) == 3)
