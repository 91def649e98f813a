"""A plugin the runtime launched: an inherited descriptor, drop-in configuration, no second life."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from nri_numa.errors import ConfigError
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.runtime import LinkState
from tests.beds.embedded_runtime import CONTAINERD_1_7, CONTAINERD_2_1, EmbeddedRuntime
from tests.beds.link_bed import eventually, link_to
from tests.beds.recording_plugin import RecordingPlugin, adjusted

pytestmark = pytest.mark.asyncio


async def test_a_launched_plugin_serves_its_descriptor_and_ends_with_it(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    plugin = RecordingPlugin(create_container=lambda *_: adjusted("2"))
    link = link_to("", plugin, index="15", descriptor=theirs.detach())
    async with EmbeddedRuntime(str(tmp_path / "nri.sock"), profile=CONTAINERD_2_1) as runtime:
        serving = asyncio.create_task(link.run())
        await runtime.adopt(ours, name="numapin", index="15", config="mode: pack\n")
        await runtime.wait_for_plugin()
        assert runtime.plugins == ("15-numapin",)
        pod = await runtime.run_pod(pb.PodSandbox(name="web"))
        assert (await runtime.create_container(pod.id, pb.Container(name="a"))).cpus == "2"
    await asyncio.wait_for(serving, 180)
    assert plugin.info is not None
    assert plugin.info.config == "mode: pack\n"
    assert plugin.states[-1] == (LinkState.STOPPED, "")


async def test_an_old_runtime_that_never_synchronises_what_it_launched(tmp_path: Path) -> None:
    """Active at once, and no empty picture is made up: there may be containers already."""
    ours, theirs = socket.socketpair()
    plugin = RecordingPlugin()
    link = link_to("", plugin, descriptor=theirs.detach())
    async with EmbeddedRuntime(str(tmp_path / "nri.sock"), profile=CONTAINERD_1_7) as runtime:
        serving = asyncio.create_task(link.run())
        await runtime.adopt(ours, name="numapin", index="10")
        await eventually(lambda: link.state is LinkState.ACTIVE)
        await runtime.wait_for_plugin()
        assert link.watch.longest_pending() == ("", 0.0), "no Synchronize is owed"
        await runtime.run_pod(pb.PodSandbox(name="web"))
    await asyncio.wait_for(serving, 180)
    assert plugin.log == ["Configure", "RunPodSandbox web"]


async def test_it_can_look_by_a_second_registration(tmp_path: Path) -> None:
    """What an old runtime does not tell a launched plugin, it tells one that dials."""
    ours, theirs = socket.socketpair()
    path = str(tmp_path / "nri.sock")
    plugin = RecordingPlugin()
    plugin.reads_mentions = True
    link = link_to(path, plugin, descriptor=theirs.detach())
    async with EmbeddedRuntime(path, profile=CONTAINERD_1_7) as runtime:
        pod = await runtime.run_pod(pb.PodSandbox(name="web"))
        disk = pb.LinuxDevice(path="/dev/nvme0n1", type="b", major=259, minor=1)
        asks = pb.Container(name="a", linux=pb.LinuxContainer(devices=[disk]))
        await runtime.create_container(pod.id, asks)
        serving = asyncio.create_task(link.run())
        await runtime.adopt(ours, name="numapin", index="10")
        await eventually(lambda: link.state is LinkState.ACTIVE)
        assert await link.ensure_containers_reported() == ""
        assert link.state is LinkState.ACTIVE
    # From Python 3.13 on a server takes its socket away with it.
    said = (await link.ensure_containers_reported()).lower()
    assert "connection refused" in said or "no such file" in said
    await asyncio.wait_for(serving, 180)
    (found,) = plugin.containers.values()
    assert [(one.major, one.minor) for one in found.mentions.nodes] == [(259, 1)]


async def test_a_descriptor_that_is_no_socket_is_named() -> None:
    reading, writing = os.pipe()
    try:
        link = link_to("", RecordingPlugin(), descriptor=reading)
        with pytest.raises(ConfigError, match=f"descriptor {reading} is not a socket"):
            await link.run()
    finally:
        os.close(reading)
        os.close(writing)
