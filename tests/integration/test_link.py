"""The link over a real unix socket, against the embedded runtime in all its versions."""

import asyncio
import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nri_numa.demo.runtime import DemoContainer, DemoContainerState, PodOperationFailed
from nri_numa.nri import link as nri
from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import ALL_EVENTS, Event
from nri_numa.runtime import LinkState, RequestRejected
from nri_numa.runtime_profile import PushPath
from tests.beds.embedded_runtime import (
    CONTAINERD_1_7,
    CONTAINERD_2_1,
    CONTAINERD_2_4,
    CRI_O_1_35,
    CRI_O_1_37,
    EVENTS_OF_0_2,
    EmbeddedProfile,
    EmbeddedRuntime,
    Faults,
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
from tests.beds.recording_plugin import RecordingPlugin, adjusted, pin, update
from tests.machines import named as machines

pytestmark = pytest.mark.asyncio

PROFILES = {
    "containerd-1.7": CONTAINERD_1_7,
    "containerd-2.1": CONTAINERD_2_1,
    "containerd-2.4": CONTAINERD_2_4,
    "cri-o-1.35": CRI_O_1_35,
    "cri-o-1.37": CRI_O_1_37,
}


def pinned(cpus: str, mems: str = "") -> Any:
    return lambda _pod, _container: adjusted(cpus, mems)


def web() -> pb.PodSandbox:
    return pb.PodSandbox(name="web", namespace="default")


async def whole_life(runtime: EmbeddedRuntime) -> None:
    """Take one pod with one container through everything that can happen to it."""
    pod = await runtime.run_pod(web())
    app = await runtime.create_container(pod.id, pb.Container(name="app"))
    assert (app.cpus, app.mems) == ("2-3", "0")
    await runtime.start_container(app.id)
    await runtime.update_container(app.id, pin("1"))
    assert (app.cpus, app.mems) == ("1", "0")
    await runtime.update_pod(pod.id, pin("0-1"))
    await runtime.stop_container(app.id)
    await runtime.stop_container(app.id)
    await runtime.stop_pod(pod.id)
    await runtime.remove_container(app.id)
    await runtime.remove_pod(pod.id)


LIFE = [
    "Configure",
    "Synchronize",
    "RunPodSandbox web",
    "CreateContainer app",
    "UpdateContainer app",
    "PostUpdateContainer app",
    "StopContainer app",
    "StopPodSandbox web",
    "RemoveContainer app",
    "RemovePodSandbox web",
]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
async def test_a_life_is_the_same_on_each_runtime(tmp_path: Path, profile: EmbeddedProfile) -> None:
    """StateChange or one method for each event: the handler cannot tell, but for new events."""
    plugin = RecordingPlugin(create_container=pinned("2-3", "0"))
    async with embedded(tmp_path, plugin, profile=profile) as (runtime, _):
        await whole_life(runtime)
        methods = {call.method for call in runtime.calls}
    assert plugin.log == LIFE
    assert ("StateChange" in methods) is not profile.per_event
    assert plugin.answered == [entry.split()[0] for entry in plugin.log]
    assert plugin.info is not None
    assert plugin.info.version == profile.version
    assert [state for state, _ in plugin.states] == [
        LinkState.REGISTERING,
        LinkState.CONFIGURED,
        LinkState.ACTIVE,
        LinkState.STOPPED,
    ]


@pytest.mark.parametrize(
    "faults",
    [
        Faults(configure_first=True),
        Faults(unknown_fields=True),
        Faults(metadata={}),
        Faults(delays={"CreateContainer": 0.02, "Synchronize": 0.02}),
    ],
    ids=lambda faults: ",".join(
        name for name in faults.__slots__ if getattr(faults, name) != getattr(Faults(), name)
    ),
)
async def test_oddities_of_a_runtime_change_nothing(tmp_path: Path, faults: Faults) -> None:
    plugin = RecordingPlugin(create_container=pinned("2-3", "0"))
    async with embedded(tmp_path, plugin, faults=faults) as (runtime, _):
        await whole_life(runtime)
    assert plugin.log == LIFE


@pytest.mark.parametrize("slice_objects", [1, 3, 1000])
async def test_a_picture_in_slices_is_one_picture(tmp_path: Path, slice_objects: int) -> None:
    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    async with EmbeddedRuntime(path, slice_objects=slice_objects) as runtime:
        for _ in range(3):
            pod = await runtime.run_pod(web())
            for name in ("a", "b", "c"):
                await runtime.create_container(pod.id, pb.Container(name=name))
        async with running(link_to(path, plugin)):
            await runtime.wait_for_plugin()
        assert plugin.pods.keys() == runtime.pods.keys()
        assert plugin.containers.keys() == runtime.containers.keys()
    assert plugin.log == ["Configure", "Synchronize"]


@pytest.mark.parametrize("profile", [CONTAINERD_2_4, CRI_O_1_37], ids=lambda one: one.name)
async def test_updates_ride_on_replies(tmp_path: Path, profile: EmbeddedProfile) -> None:
    """Creation, stop, synchronisation and the update itself can all change other containers."""
    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    topology = machines.dual_no_smt(cores_per_numa=4)
    async with EmbeddedRuntime(path, profile=profile, topology=topology) as runtime:
        pod = await runtime.run_pod(web())
        first = await runtime.create_container(pod.id, pb.Container(name="first"))
        await runtime.start_container(first.id)
        plugin.hooks["synchronize"] = lambda _pods, _containers: [
            update("no such container", "1"),  # impossible; must not fail the exchange
            update(first.id, "0-6"),
        ]
        async with running(link_to(path, plugin)):
            await runtime.wait_for_plugin()
            assert (first.cpus, first.mems) == ("0-6", "0-1")
            others = update(first.id, "0-3", "0")
            plugin.hooks["create_container"] = lambda *_: adjusted("4-7", "1", others)
            second = await runtime.create_container(pod.id, pb.Container(name="second"))
            assert (second.cpus, second.mems) == ("4-7", "1")
            assert (first.cpus, first.mems) == ("0-3", "0")
            plugin.hooks["update_container"] = lambda _pod, container, _asked: [
                update(container.id, "5"),
                update(first.id, "0-4"),
            ]
            await runtime.start_container(second.id)
            await runtime.update_container(second.id, pin("0-7"))
            assert (second.cpus, first.cpus) == ("5", "0-4")
            plugin.hooks["stop_container"] = lambda _id: [update(first.id, "0-7", "0-1")]
            await runtime.stop_container(second.id)
            assert (first.cpus, first.mems) == ("0-7", "0-1")


async def test_a_refusal_fails_the_operation_with_exactly_its_words(tmp_path: Path) -> None:
    text = "pod default/web, container app: numacpu «9»: CPU 9 is not on this machine, expected 0-3"

    def refuse(*_: object) -> Any:
        raise RequestRejected(text)

    plugin = RecordingPlugin()
    async with embedded(tmp_path, plugin) as (runtime, _):
        pod = await runtime.run_pod(web())
        app = await runtime.create_container(pod.id, pb.Container(name="app"))
        await runtime.start_container(app.id)
        plugin.hooks = dict.fromkeys(("create_container", "update_container"), refuse)
        with pytest.raises(PodOperationFailed) as creation:
            await runtime.create_container(pod.id, pb.Container(name="other"))
        assert str(creation.value) == (f"rpc error: code = Unknown desc = {text}")
        with pytest.raises(PodOperationFailed, match=r"rpc error: .*CPU 9 is not"):
            await runtime.update_container(app.id, pin("1"))
        assert app.cpus == "0-3"
        # Every plugin hears that the container does not exist, by an id without a name.
        assert [entry.split()[0] for entry in plugin.log[-3:]] == [
            "StopContainer",
            "RemoveContainer",
            "UpdateContainer",
        ]
        plugin.hooks = dict.fromkeys(("stop_container", "remove_container"), refuse)
        await runtime.remove_container(app.id)
        assert runtime.plugins == ("10-numapin",)
        plugin.hooks = {"run_pod": refuse}
        with pytest.raises(PodOperationFailed, match="rpc error: code = Unknown"):
            await runtime.run_pod(web())
        assert plugin.log[-2:] == ["StopPodSandbox web", "RemovePodSandbox web"]


@pytest.mark.parametrize("failure", ["plugin", "OCI runtime"])
async def test_of_a_creation_that_fails_cri_o_tells_nobody(tmp_path: Path, failure: str) -> None:
    def refuse(*_: object) -> Any:
        raise RequestRejected("UnknownCPU: no CPU 9")

    plugin = RecordingPlugin(**({"create_container": refuse} if failure == "plugin" else {}))
    async with embedded(tmp_path, plugin, profile=CRI_O_1_37) as (runtime, _):
        runtime.faults.fails_oci_create = failure != "plugin"
        pod = await runtime.run_pod(web())
        with pytest.raises(PodOperationFailed) as creation:
            await runtime.create_container(pod.id, pb.Container(name="app"))
        await runtime.remove_pod(pod.id)
    # CRI-O adds nothing to a plugin's words.
    assert str(creation.value).startswith("UnknownCPU" if failure == "plugin" else "container")
    assert plugin.log[3:] == ["CreateContainer app", "StopPodSandbox web", "RemovePodSandbox web"]


async def test_cri_o_tells_pid_and_cgroup_at_the_start_and_state_before(tmp_path: Path) -> None:
    plugin = RecordingPlugin()
    seen = []
    for hook in ("create_container", "start_container", "post_start_container"):
        plugin.hooks[hook] = lambda _pod, one, hook=hook: (
            seen.append((hook, one.pid > 0, one.starting)) or adjusted()
        )
    link = {"events": ALL_EVENTS}
    async with embedded(tmp_path, plugin, link, profile=CRI_O_1_37) as (runtime, _):
        pod = await runtime.run_pod(web())
        app = await runtime.create_container(pod.id, pb.Container(name="app"))
        await runtime.start_container(app.id)
    assert seen == [
        ("create_container", False, False),
        ("start_container", True, True),
        ("post_start_container", True, True),
    ]


async def test_a_bug_in_a_handler_is_answered_as_its_hook_decides(tmp_path: Path) -> None:
    def bug(*_: object) -> Any:
        raise ZeroDivisionError("a bug")

    def fail_closed(_name: str, error: Exception) -> Any:
        raise RequestRejected(f"internal error: {error}")

    plugin = RecordingPlugin(create_container=bug)
    async with embedded(tmp_path, plugin) as (runtime, _):
        pod = await runtime.run_pod(web())
        app = await runtime.create_container(pod.id, pb.Container(name="app"))
        assert app.cpus == "0-3"  # fail open: created without a word of ours
        assert [(name, str(error)) for name, error in plugin.errors] == [
            ("CreateContainer", "a bug")
        ]
        plugin.hooks["on_internal_error"] = fail_closed
        with pytest.raises(PodOperationFailed, match="internal error: a bug"):
            await runtime.create_container(pod.id, pb.Container(name="other"))
        plugin.hooks["on_internal_error"] = bug
        plugin.hooks["replied"] = bug
        plugin.hooks["on_link_changed"] = bug
        assert (await runtime.create_container(pod.id, pb.Container())).cpus == "0-3"
        assert runtime.plugins == ("10-numapin",)


async def test_a_bug_while_configuring_never_asks_for_every_event(tmp_path: Path) -> None:
    def bug(*_: object) -> Any:
        raise ZeroDivisionError

    plugin = RecordingPlugin(configured=bug, synchronize=bug)
    async with embedded(tmp_path, plugin) as (runtime, _):
        await runtime.run_pod(web())
        assert {call.method for call in runtime.calls} == {
            "Configure",
            "Synchronize",
            "RunPodSandbox",
        }
    assert [name for name, _ in plugin.errors] == ["Configure", "Synchronize"]


async def test_an_answer_too_large_for_the_wire_becomes_an_empty_one(tmp_path: Path) -> None:
    plugin = RecordingPlugin(create_container=lambda *_: adjusted(note="x" * (5 << 20)))
    async with embedded(tmp_path, plugin) as (runtime, _):
        pod = await runtime.run_pod(web())
        await runtime.create_container(pod.id, pb.Container(name="app"))
        assert runtime.plugins == ("10-numapin",)


@pytest.mark.parametrize("size", [4000, 4100, 100_000, 3_900_000])
async def test_answers_of_every_size_arrive(tmp_path: Path, size: int) -> None:
    """Below and above the 4096 bytes of the first frame, up to the limit of one message."""
    plugin = RecordingPlugin(create_container=lambda *_: adjusted("1", note="x" * size))
    async with embedded(tmp_path, plugin) as (runtime, _):
        pod = await runtime.run_pod(web())
        app = await runtime.create_container(pod.id, pb.Container(name="app"))
        assert len(app.message.annotations["k"]) == size


async def test_events_for_ids_nobody_knows_are_passed_on(tmp_path: Path) -> None:
    """A pod is gone before its container: the events come with an id and nothing else."""
    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    async with EmbeddedRuntime(path) as runtime:
        pod = await runtime.run_pod(web())
        app = await runtime.create_container(pod.id, pb.Container(name="app"))
        await runtime.start_container(app.id)
        async with running(link_to(path, plugin)):
            await runtime.wait_for_plugin()
            await runtime.stop_pod(pod.id)
            assert app.state is DemoContainerState.EXITED
            never = pb.Container(id="gone", pod_sandbox_id="gone too")
            await runtime._send_event(Event.STOP_CONTAINER, pb.PodSandbox(id="gone too"), never)
            await runtime.remove_pod(pod.id)
    assert plugin.log[2:] == [
        "StopContainer app",
        "StopPodSandbox web",
        "StopContainer gone",
        "RemoveContainer app",
        "RemovePodSandbox web",
    ]


# --- losing the link ------------------------------------------------------------------------------


async def test_a_restarted_runtime_is_found_again(tmp_path: Path) -> None:
    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    runtime = EmbeddedRuntime(path)
    await runtime.start()
    # The pause is far longer than the test: the new socket itself must end it.
    link = link_to(path, plugin, delays=lambda: iter([3600.0, 3600.0]))
    async with running(link):
        await runtime.wait_for_plugin()
        pod = await runtime.run_pod(web())
        await runtime.stop()
        await eventually(lambda: link.state is LinkState.DISCONNECTED)
        await runtime.start()
        await runtime.wait_for_plugin()
        assert list(plugin.pods) == [pod.id]
    await runtime.stop()


async def test_the_socket_may_appear_later(tmp_path: Path) -> None:
    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    async with running(link := link_to(path, plugin)):
        await eventually(lambda: bool(plugin.states))
        assert plugin.states[0] == (LinkState.DISCONNECTED, f"{path}: No such file or directory")
        assert link.watch.longest_pending() == ("", 0.0), "who is not there does not hang"
        async with EmbeddedRuntime(path) as runtime:
            await runtime.wait_for_plugin()
    # The same failure again and again is told once.
    assert [state for state, _ in plugin.states].count(LinkState.DISCONNECTED) <= 2


async def test_a_link_that_held_starts_its_pauses_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that breaks again at once waits longer and longer; a stable one does not."""
    made: list[int] = []

    def delays() -> Iterator[float]:
        made.append(0)
        return itertools.repeat(0.01)

    for stable, sequences in ((3600.0, 1), (0.0, 3)):
        monkeypatch.setattr(nri, "STABLE_LINK_S", stable)
        made.clear()
        plugin = RecordingPlugin()
        path = str(tmp_path / f"{stable}.sock")
        async with EmbeddedRuntime(path) as runtime, running(link_to(path, plugin, delays=delays)):
            for times in (1, 2, 3):
                await runtime.wait_for_plugin()
                await eventually(partial(became_active, plugin, times))
                if times < 3:
                    await runtime.disconnect_plugins()
        assert len(made) == sequences


async def test_a_held_link_redials_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime dropped a plugin that hung, and listens: whatever starts now starts unpinned."""
    monkeypatch.setattr(nri, "STABLE_LINK_S", 0.0)
    monkeypatch.setattr(nri, "MAX_RETRY_WHILE_LISTENING_S", 3600.0)
    plugin, path = RecordingPlugin(), str(tmp_path / "nri.sock")
    delays = partial(itertools.repeat, 3600.0)
    async with EmbeddedRuntime(path) as runtime, running(link_to(path, plugin, delays=delays)):
        for times in (1, 2):
            await eventually(partial(became_active, plugin, times))
            await runtime.disconnect_plugins()


async def test_a_registration_that_is_never_synchronised_is_watched(tmp_path: Path) -> None:
    """What a hung runtime looks like: it takes the connection, and nothing more comes of it."""
    hang = True

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.register()
        await runtime.configure(pb.ConfigureRequest(runtime_name="containerd"))
        if hang:
            await runtime.reader.read()
        else:
            await runtime.synchronize()
            await runtime.reader.read()

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve) as link:
        await eventually(lambda: LinkState.CONFIGURED in [s for s, _ in plugin.states])
        assert link.watch.longest_pending()[0] == "registration"
        waited = link.watch.longest_pending()[1]
        link._close_connection("dialled again by the test")  # from our side: no sign of life
        await eventually(lambda: [s for s, _ in plugin.states].count(LinkState.CONFIGURED) == 2)
        assert link.watch.longest_pending()[1] > waited
        hang = False
        link._close_connection("and once more")
        await eventually(lambda: became_active(plugin))
        assert link.watch.longest_pending() == ("", 0.0)


async def test_while_the_socket_takes_connections_a_pause_is_short(tmp_path: Path) -> None:
    """After two short-lived links the next dial would have been half a minute away."""
    path = str(tmp_path / "nri.sock")
    pauses: list[float] = []

    async def serve(runtime: RawRuntime, number: int) -> None:
        return

    class Told(NRILink):
        async def _wait_for_new_socket(self, delay: float, before: tuple[int, int] | None) -> None:
            pauses.append(delay)

    settings = LinkSettings(name="a", index="10", socket_path=path, delays=lambda: iter([30.0] * 9))
    async with raw_runtime(path, serve), running(Told(RecordingPlugin(), settings)):
        await eventually(lambda: len(pauses) >= 3)
    assert pauses[:3] == [2.0, 2.0, 2.0]


# --- Updates nobody asked for: the right way for each runtime, one at a time, never from a handler


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
async def test_pushes_go_safely(tmp_path: Path, profile: EmbeddedProfile, path: PushPath) -> None:
    """Plain UpdateContainers may hang the runtime before NRI 0.12.1 (containerd#13733)."""
    plugin = RecordingPlugin()
    async with embedded(tmp_path, plugin, profile=profile) as (runtime, link):
        container = await started(runtime)
        log = list(plugin.log)
        problem = await link.push_updates([update(container.id, "1-2", "0")])
        assert problem == ""
        assert (container.cpus, container.mems) == ("1-2", "0")
        # The main connection notices nothing, and the second one is gone.
        assert plugin.log == log
        await eventually(lambda: runtime.plugins == ("10-numapin",))
        used = {call.plugin for call in runtime.calls}
        assert ("10-numapin-push" in used) is (path is PushPath.ONE_SHOT)


async def test_nothing_is_pushed_where_no_way_is_safe(tmp_path: Path) -> None:
    async with embedded(tmp_path, RecordingPlugin(), profile=OLD_CONTAINERD) as (runtime, link):
        container = await started(runtime)
        problem = await link.push_updates([update(container.id, "1")])
        assert "no way to push is safe" in problem
        assert container.cpus == "0-3"


async def test_a_push_without_a_link_is_reported_and_not_raised(tmp_path: Path) -> None:
    link = link_to(str(tmp_path / "nri.sock"), RecordingPlugin())
    problem = await link.push_updates([update("c", "1")])
    assert problem == "the link is disconnected"


@pytest.mark.parametrize("as_list", [False, True])
async def test_failures_the_runtime_reports_are_handed_on(tmp_path: Path, as_list: bool) -> None:
    async with embedded(
        tmp_path, RecordingPlugin(), profile=EmbeddedProfile(update_failures_as_list=as_list)
    ) as (runtime, link):
        good, bad = await started(runtime), await started(runtime)
        problem = await link.push_updates([update(bad.id, "99"), update(good.id, "1")])
        assert (good.cpus, bad.cpus) == ("1", "0-3")  # the others are still applied
        assert problem == ""  # it is looked at who has what was meant
        runtime.faults.reports_ignored = True
        problem = await link.push_updates([update(bad.id, "99"), update(good.id, "2")])
        assert (problem == "") is as_list
        if not as_list:
            assert problem == "NRI update of some containers failed (code 2)"


async def test_a_container_that_has_just_gone_fails_no_second_registration(tmp_path: Path) -> None:
    """The others of the same push have what was meant for them."""
    async with embedded(tmp_path, RecordingPlugin(), profile=CRI_O_1_35) as (runtime, link):
        container = await started(runtime)
        problem = await link.push_updates([update("gone", "0"), update(container.id, "1-2")])
        assert problem == ""
        assert container.cpus == "1-2"


async def test_pushes_wait_for_each_other_and_for_their_interval(tmp_path: Path) -> None:
    async with embedded(tmp_path, RecordingPlugin(), {"push_interval": 0.03}) as (runtime, link):
        container = await started(runtime)
        begun = asyncio.get_running_loop().time()
        problems = await asyncio.gather(
            *(link.push_updates([update(container.id, cpus)]) for cpus in ("0", "1", "2"))
        )
        assert not any(problems)
        assert container.cpus == "2"  # in the order they were called
        passed = asyncio.get_running_loop().time() - begun
        assert passed >= 0.06
        assert await link.push_updates([]) == ""


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
        problem = await push_once(link_to(path, plugin, **settings), plugin)
    assert problem == detail


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
        problem = await push_once(link, plugin)
    assert (problem == "") is (fault == "event first")
    assert detail in problem
    assert bool(detail) is bool(problem)


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
        assert await push == ""
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
        problem = await link.push_updates([update(container.id, "1-2", "0")])
        assert container.cpus == before
        assert "pods are started or removed all the time" in problem


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
        assert "did not synchronise" in first
        second = await link.push_updates([update("c", "2")])
        assert second == "an earlier registration has no answer yet"
        assert connections == 2
        assert link.watch.longest_pending()[0] == "second registration"
        go_on.set()
        await answered.wait()
        await eventually(lambda: link.watch.longest_pending() == ("", 0.0))
        assert sent == [0, 0]
        assert await link.push_updates([update("c", "3")]) == ""
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
        problem = await push_once(link, plugin)
        assert problem
        await gone.wait()
