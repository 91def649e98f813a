"""Updates nobody asked for: the right way for each runtime, one at a time, never from a handler."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from nri_numa.demo.runtime import DemoContainer
from nri_numa.nri.link import NRILink
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.runtime import LinkState
from nri_numa.runtime_profile import PushPath
from tests.beds.embedded_runtime import (
    CONTAINERD_1_7,
    CONTAINERD_2_1,
    CONTAINERD_2_4,
    CRI_O_1_35,
    EVENTS_OF_0_2,
    EmbeddedProfile,
    EmbeddedRuntime,
)
from tests.beds.link_bed import (
    RawRuntime,
    became_active,
    embedded,
    eventually,
    link_to,
    linked,
    raw_runtime,
    running,
)
from tests.beds.recording_plugin import RecordingPlugin, update

pytestmark = pytest.mark.asyncio

OLD_CONTAINERD = EmbeddedProfile(
    version="1.7.13", nri_version="", tells_timeouts=False, events=EVENTS_OF_0_2, per_event=False
)


async def started(runtime: EmbeddedRuntime) -> DemoContainer:
    pod = await runtime.run_pod(pb.PodSandbox(name="web"))
    container = await runtime.create_container(pod.id, pb.Container(name="app"))
    await runtime.start_container(container.id)
    return container


@pytest.mark.parametrize(
    ("profile", "path"),
    [
        (CONTAINERD_2_4, PushPath.UPDATE_CONTAINERS),
        (CONTAINERD_2_1, PushPath.ONE_SHOT),
        (CONTAINERD_1_7, PushPath.ONE_SHOT),
        (CRI_O_1_35, PushPath.ONE_SHOT),
    ],
    ids=["containerd-2.4", "containerd-2.1", "containerd-1.7", "cri-o-1.35"],
)
async def test_a_push_arrives_by_the_way_that_is_safe(
    tmp_path: Path, profile: EmbeddedProfile, path: PushPath
) -> None:
    """Plain UpdateContainers may hang the runtime before NRI 0.12.1 (containerd#13733)."""
    plugin = RecordingPlugin()
    async with embedded(tmp_path, plugin, profile=profile) as (runtime, link):
        container = await started(runtime)
        log = list(plugin.log)
        result = await link.push_updates([update(container.id, "1-2", "0")])
        assert (result.succeeded, result.detail) == (True, "")
        assert (container.cpus, container.mems) == ("1-2", "0")
        # The main connection notices nothing, and the second one is gone.
        assert plugin.log == log
        await eventually(lambda: runtime.plugins == ("10-numapin",))
        used = {call.plugin for call in runtime.calls}
        assert ("10-numapin-push" in used) is (path is PushPath.ONE_SHOT)


async def test_nothing_is_pushed_where_no_way_is_safe(tmp_path: Path) -> None:
    async with embedded(tmp_path, RecordingPlugin(), profile=OLD_CONTAINERD) as (runtime, link):
        container = await started(runtime)
        result = await link.push_updates([update(container.id, "1")])
        assert not result.succeeded
        assert "no way to push is safe" in result.detail
        assert container.cpus == "0-3"


async def test_a_push_without_a_link_is_reported_and_not_raised(tmp_path: Path) -> None:
    link = link_to(str(tmp_path / "nri.sock"), RecordingPlugin())
    result = await link.push_updates([update("c", "1")])
    assert (result.succeeded, result.detail) == (False, "the link is disconnected")


@pytest.mark.parametrize("as_list", [False, True])
async def test_failures_the_runtime_reports_are_handed_on(tmp_path: Path, as_list: bool) -> None:
    async with embedded(
        tmp_path, RecordingPlugin(), profile=EmbeddedProfile(update_failures_as_list=as_list)
    ) as (runtime, link):
        good, bad = await started(runtime), await started(runtime)
        result = await link.push_updates([update(bad.id, "99"), update(good.id, "1")])
        assert (good.cpus, bad.cpus) == ("1", "0-3")  # the others are still applied
        assert result.succeeded  # it is looked at who has what was meant
        runtime.faults.reports_ignored = True
        result = await link.push_updates([update(bad.id, "99"), update(good.id, "2")])
        assert result.succeeded is as_list
        if not as_list:
            assert result.detail == "NRI update of some containers failed (code 2)"


async def test_a_container_that_has_just_gone_fails_no_second_registration(tmp_path: Path) -> None:
    """The others of the same push have what was meant for them."""
    async with embedded(tmp_path, RecordingPlugin(), profile=CRI_O_1_35) as (runtime, link):
        container = await started(runtime)
        result = await link.push_updates([update("gone", "0"), update(container.id, "1-2")])
        assert (result.succeeded, result.detail) == (True, "")
        assert container.cpus == "1-2"


async def test_pushes_wait_for_each_other_and_for_their_interval(tmp_path: Path) -> None:
    async with embedded(tmp_path, RecordingPlugin(), {"push_interval": 0.03}) as (runtime, link):
        container = await started(runtime)
        begun = asyncio.get_running_loop().time()
        results = await asyncio.gather(
            *(link.push_updates([update(container.id, cpus)]) for cpus in ("0", "1", "2"))
        )
        assert all(result.succeeded for result in results)
        assert container.cpus == "2"  # in the order they were called
        passed = asyncio.get_running_loop().time() - begun
        assert passed >= 0.06
        assert (await link.push_updates([])).succeeded


def describe(minor: int) -> pb.ConfigureRequest:
    return pb.ConfigureRequest(
        runtime_name="containerd",
        runtime_version="v2.4.0",
        NRI_version=f"v0.12.{minor}",
        request_timeout=2000,
    )


async def push_once(link: NRILink, plugin: RecordingPlugin) -> Any:
    async with running(link):
        await eventually(lambda: became_active(plugin))
        return await link.push_updates([update("c", "1")])


@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        ({"push_timeout": 0.02}, "no answer within 0.02 s"),
        ({}, "the link broke before the answer came"),
    ],
)
async def test_a_push_without_an_answer_ends(
    tmp_path: Path, settings: dict[str, float], detail: str
) -> None:
    """After one timeout, or with the link that breaks meanwhile."""

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.handshake(describe(2))
        assert isinstance(await runtime.next_event(), ev.UpdateContainersRequested)
        if settings:
            await runtime.reader.read()

    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    async with raw_runtime(path, serve):
        result = await push_once(link_to(path, plugin, **settings), plugin)
    assert (result.succeeded, result.detail) == (False, detail)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("refuse", "the second registration was refused: invalid plugin (code 2)"),
        ("hang up", "the second connection ended: "),
        ("silence", "the runtime did not synchronise the second registration within 0.2 s"),
        ("event first", ""),
        ("gone", "No such file or directory"),
    ],
)
async def test_outcomes_of_a_second_registration(tmp_path: Path, fault: str, detail: str) -> None:
    path = str(tmp_path / "nri.sock")

    async def serve(runtime: RawRuntime, number: int) -> None:
        if number == 1:
            await runtime.handshake(describe(0))
            await runtime.reader.read()
        elif fault == "refuse":
            event = await runtime.next_event()
            assert isinstance(event, ev.RegisterRequested)
            runtime.session.reply_error(event.stream, "invalid plugin")
            await runtime.send()
            await runtime.reader.read()
        elif fault == "silence":
            await runtime.reader.read()
            await runtime.reader.read()
        elif fault == "event first":
            await runtime.register()
            assert await runtime.configure(describe(0)) == 0x0004
            runtime.session.call_plugin("RemovePodSandbox", pb.RemovePodSandboxRequest())
            await runtime.send()
            await runtime.next_event()
            runtime.session.call_plugin("Synchronize", pb.SynchronizeRequest())
            await runtime.send()
            answer = await runtime.next_event()
            assert isinstance(answer, ev.RequestAnswered)
            (sent,) = pb.SynchronizeResponse.FromString(answer.payload).update
            assert (sent.container_id, sent.ignore_failure) == ("c", True)
            await runtime.reader.read()

    def active(state: LinkState) -> None:
        if fault == "gone" and state is LinkState.ACTIVE:
            Path(path).unlink()

    plugin = RecordingPlugin(on_link_changed=active)
    async with raw_runtime(path, serve):
        link = link_to(path, plugin, push_timeout=0.2 if fault == "silence" else 10.0)
        result = await push_once(link, plugin)
    assert result.succeeded is (fault == "event first")
    assert detail in result.detail
    assert bool(detail) is bool(result.detail)


async def test_a_push_waits_until_nothing_else_is_under_way(tmp_path: Path) -> None:
    """A registration beside the removal of a sandbox hangs containerd 2.1."""
    async with embedded(
        tmp_path, RecordingPlugin(), {"quiet_seconds": 0.0}, profile=CONTAINERD_2_1
    ) as (runtime, link):
        container = await started(runtime)
        other = await runtime.run_pod(pb.PodSandbox(name="other"))
        await runtime.stop_pod(other.id)
        push = asyncio.create_task(link.push_updates([update(container.id, "1-2", "0")]))
        done, _ = await asyncio.wait({push}, timeout=0.05)
        assert not done
        await runtime.remove_pod(other.id)
        assert (await push).succeeded
        assert container.cpus == "1-2"


async def test_a_node_that_is_never_quiet_is_told_by_replies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nri_numa.nri.link.QUIET_WAIT_TIMEOUT_S", 0.0)
    async with embedded(
        tmp_path, RecordingPlugin(), {"quiet_seconds": 3600.0}, profile=CONTAINERD_2_1
    ) as (runtime, link):
        container = await started(runtime)
        before = container.cpus
        result = await link.push_updates([update(container.id, "1-2", "0")])
        assert (result.succeeded, container.cpus) == (False, before)
        assert "pods are started or removed all the time" in result.detail


async def test_a_registration_without_an_answer_is_not_followed_by_another(tmp_path: Path) -> None:
    """A runtime that hangs gets no more to hang on; what it answers late is not applied."""
    connections = 0
    go_on, answered = asyncio.Event(), asyncio.Event()
    sent: list[int] = []

    async def serve(runtime: RawRuntime, number: int) -> None:
        nonlocal connections
        connections = number
        await runtime.register()
        await runtime.configure(describe(0))
        if number == 2:
            await go_on.wait()
        runtime.session.call_plugin("Synchronize", pb.SynchronizeRequest())
        await runtime.send()
        answer = await runtime.next_event()
        assert isinstance(answer, ev.RequestAnswered)
        sent.append(len(pb.SynchronizeResponse.FromString(answer.payload).update))
        if number == 2:
            answered.set()
        await runtime.reader.read()

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve, push_timeout=0.5) as link:
        await eventually(lambda: became_active(plugin))
        first = await link.push_updates([update("c", "1")])
        assert "did not synchronise" in first.detail
        second = await link.push_updates([update("c", "2")])
        assert second.detail == "an earlier registration has no answer yet"
        assert connections == 2
        assert link.watch.longest_pending()[0] == "second registration"
        go_on.set()
        await answered.wait()
        await eventually(lambda: link.watch.longest_pending() == ("", 0.0))
        assert sent == [0, 0]
        assert (await link.push_updates([update("c", "3")])).succeeded
        assert sent == [0, 0, 1]


async def test_a_link_that_ends_gives_up_what_is_not_answered(tmp_path: Path) -> None:
    path = str(tmp_path / "nri.sock")
    gone = asyncio.Event()

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.register()
        await runtime.configure(describe(0))
        if number == 1:
            await runtime.synchronize()
        await runtime.reader.read()
        if number == 2:
            gone.set()

    plugin = RecordingPlugin()
    link = link_to(path, plugin, push_timeout=0.05)
    async with raw_runtime(path, serve):
        result = await push_once(link, plugin)
        assert not result.succeeded
        await gone.wait()
