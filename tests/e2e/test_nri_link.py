"""The NRI link alone, with a handler of a few lines, against real runtimes: what is on the wire."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from nri_numa.model.workload import (
    NO_ADJUSTMENT,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    Pods,
    PodSandbox,
)
from nri_numa.model.workload import Resources as WantedResources
from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.nri.wire.versions import AGENT_EVENTS
from nri_numa.runtime import LinkState, PushResult, RequestRefused, RuntimeInfo
from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, CRIError, Resources, allowed, poll
from tests.machines.cpus import FIRST, LAST

pytestmark = [pytest.mark.e2e, pytest.mark.every_series]

_T = TypeVar("_T")


class Handler:
    """Pins to the CPUs in annotation ``cpus``, refuses where there is ``refuse``, keeps notes."""

    def __init__(self) -> None:
        self.info: RuntimeInfo | None = None
        self.calls: list[str] = []
        self.pods: list[str] = []
        self.containers: list[str] = []
        self.on_create: dict[str, str] = {}
        self.on_stop: dict[str, str] = {}
        self.on_synchronize: dict[str, str] = {}
        self.states: list[LinkState] = []

    reads_mentions = False

    def configured(self, info: RuntimeInfo) -> None:
        self.info = info

    def synchronize(self, pods: Pods, containers: Sequence[Container]) -> Sequence[ContainerUpdate]:
        self.pods = list(pods.uids)
        self.containers = [container.id for container in containers]
        return updates(self.on_synchronize)

    def create_container(
        self, pod: PodSandbox, container: Container
    ) -> tuple[ContainerAdjustment, Sequence[ContainerUpdate]]:
        self.calls.append("create")
        wanted = pod.annotations
        if "refuse" in wanted:
            raise RequestRefused(f"no: {wanted['refuse']}")
        adjustment = NO_ADJUSTMENT
        if "cpus" in wanted:
            note = "n" * int(wanted.get("note", "0"))
            adjustment = ContainerAdjustment(cpus=wanted["cpus"], annotations={"note": note})
        return adjustment, updates(self.on_create)

    def update_container(
        self, pod: PodSandbox, container: Container, requested: WantedResources
    ) -> Sequence[ContainerUpdate]:
        self.calls.append("update")
        return ()

    def stop_container(self, container_id: str) -> Sequence[ContainerUpdate]:
        self.calls.append("stop")
        return updates(self.on_stop)

    def remove_container(self, container_id: str) -> None:
        self.calls.append("remove")

    def start_container(self, pod: PodSandbox, container: Container) -> None:
        self.calls.append("start")

    def post_start_container(self, pod: PodSandbox, container: Container) -> None:
        self.calls.append("started")

    def run_pod(self, pod: PodSandbox) -> None:
        self.calls.append("run-pod")

    def stop_pod(self, pod: PodSandbox) -> None:
        self.calls.append("stop-pod")

    def remove_pod(self, pod: PodSandbox) -> None:
        self.calls.append("remove-pod")

    def replied(self, event_name: str, seconds: float) -> None:
        pass

    def link_changed(self, state: LinkState, detail: str) -> None:
        self.states.append(state)

    def protocol_broken(self) -> None:
        raise AssertionError("the runtime broke the protocol")

    def internal_error(self, event_name: str, error: Exception) -> None:
        raise error


def updates(wanted: dict[str, str]) -> list[ContainerUpdate]:
    return [ContainerUpdate(container_id, cpus) for container_id, cpus in wanted.items()]


class Plugin:
    """A link that runs in a thread with a loop of its own."""

    def __init__(self, containerd: Containerd) -> None:
        self.handler = Handler()
        self._containerd = containerd
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.link: NRILink = self.call(self._make())
        self._run: asyncio.Task[None] = self.call(self._start())

    async def _make(self) -> NRILink:
        settings = LinkSettings(
            name="link-test",
            index="50",
            socket_path=str(self._containerd.nri_socket),
            events=AGENT_EVENTS,
            push_interval=0.05,
            # Pushes in the middle of everything: that they lock nothing is what is tried.
            quiet_seconds=0.0,
        )
        return NRILink(self.handler, settings)

    async def _start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.link.run())

    async def _stop(self) -> None:
        self._run.cancel()
        await asyncio.wait({self._run})

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float = 180.0) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def wait_active(self) -> None:
        poll(lambda: self.link.state is LinkState.ACTIVE, f"active, {self.handler.states}")

    def push(self, wanted: dict[str, str]) -> PushResult:
        async def work() -> PushResult:
            return await self.link.push(updates(wanted))

        return self.call(work())

    def close(self) -> None:
        self.call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def linked(containerd: Containerd) -> Iterator[Plugin]:
    plugin = Plugin(containerd)
    try:
        plugin.wait_active()
        yield plugin
    finally:
        plugin.close()


@pytest.fixture
def link(containerd: Containerd) -> Iterator[Plugin]:
    with linked(containerd) as plugin:
        yield plugin


def test_the_runtime_is_known_by_name_and_version(containerd: Containerd, link: Plugin) -> None:
    info = link.handler.info
    assert info is not None
    assert info.name == "containerd"
    assert containerd.binaries.version in info.version


def test_an_adjustment_holds_from_the_first_instruction(cri: CRI, link: Plugin) -> None:
    pod = cri.run_pod(annotations={"cpus": LAST})
    assert cri.first_line(cri.run(pod)).cpus == LAST


def test_a_long_answer_arrives_whole(cri: CRI, link: Plugin) -> None:
    """100 kB leave as one frame of 4,096 bytes and one for the rest, as the Go side wants it."""
    pod = cri.run_pod(annotations={"cpus": "1", "note": "100000"})
    container = cri.run(pod)
    assert len(cri.spec_annotations(container)["note"]) == 100_000
    assert cri.first_line(container).cpus == "1"


def test_a_refusal_is_in_the_cri_error(cri: CRI, link: Plugin) -> None:
    pod = cri.run_pod(annotations={"refuse": "because of the – “rules”"})
    with pytest.raises(CRIError, match="no: because of the – “rules”"):
        cri.create(pod)


def test_updates_of_others_ride_on_answers(cri: CRI, link: Plugin) -> None:
    first = cri.run(cri.run_pod("first"))
    link.handler.on_create = {first.id: FIRST}
    second = cri.create(cri.run_pod("second"))
    assert cri.allowed(first).cpus == FIRST
    link.handler.on_create, link.handler.on_stop = {}, {first.id: LAST}
    cri.start(second)
    cri.stop(second)
    poll(lambda: cri.allowed(first).cpus == LAST, "update in the answer to a stop")


def test_every_event_of_a_life_is_seen(cri: CRI, link: Plugin) -> None:
    pod = cri.run_pod()
    container = cri.run(pod)
    cri.update(container, Resources(shares=512))
    cri.remove_pod(pod)
    wanted = ["run-pod", "create", "update", "stop", "stop-pod", "remove", "remove-pod"]
    poll(lambda: set(wanted) <= set(link.handler.calls), f"events {link.handler.calls}")
    assert link.handler.calls[:2] == ["run-pod", "create"]


def test_synchronize_shows_what_runs_and_takes_updates(containerd: Containerd, cri: CRI) -> None:
    pod = cri.run_pod()
    container = cri.run(pod)
    plugin = Plugin(containerd)
    try:
        plugin.handler.on_synchronize = {container.id: LAST}
        plugin.wait_active()
        assert plugin.handler.pods == [pod.id]
        assert plugin.handler.containers == [container.id]
    finally:
        plugin.close()
    with linked(containerd) as again:
        again.handler.on_synchronize = {}
        poll(lambda: cri.allowed(container).cpus == LAST, "update in the synchronisation")


def test_a_picture_of_many_megabytes_is_taken(containerd: Containerd, cri: CRI) -> None:
    """6 MB of annotations: sliced by 2.1, and by 1.7 sent as one message above ttrpc's 4 MiB."""
    for number in range(10):
        pod = cri.run_pod(f"big{number}", annotations={"big": "x" * 200_000})
        for name in ("a", "b"):
            cri.create(pod, name, annotations={"big": "y" * 200_000})
    with linked(containerd) as plugin:
        assert len(plugin.handler.pods) == 10
        assert len(plugin.handler.containers) == 20
        assert cri.first_line(cri.run(cri.run_pod(annotations={"cpus": "1"}))).cpus == "1"


def test_a_runtime_that_restarts_is_found_again(
    containerd: Containerd, cri: CRI, link: Plugin
) -> None:
    for kill in (False, True):
        containerd.restart(kill=kill)
        link.wait_active()
        assert cri.first_line(cri.run(cri.run_pod(annotations={"cpus": "1"}))).cpus == "1"
        cri.remove_all()


def test_pushes_arrive_and_never_lock_the_runtime(cri: CRI, link: Plugin) -> None:
    """Pushes and CRI updates at once; with plain UpdateContainers 2.1.9 hangs within 3 s."""
    pod = cri.run_pod()
    pushed = [cri.run(pod, f"pushed{i}") for i in range(3)]
    updated = [cri.run(pod, f"updated{i}") for i in range(3)]
    begin = time.monotonic()
    errors: list[BaseException] = []
    done = {"push": 0, "update": 0}

    def over() -> bool:
        """Six seconds, and more on a machine that did little in them."""
        after = time.monotonic() - begin
        return after > 60 or (after > 6 and done["push"] > 5 and done["update"] > 50)

    def count(name: str) -> Iterator[int]:
        while not over() and not errors:
            done[name] += 1
            yield done[name]

    def push() -> None:
        for number in count("push"):
            result = link.push({each.id: str(number % 2) for each in pushed})
            assert result.ok, result

    def update() -> None:
        for number in count("update"):
            cri.update(updated[number % 3], Resources(shares=100 + number))

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(w,)) for w in (push, update, update)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    assert errors == []
    assert done["push"] > 5
    assert done["update"] > 50
    expected = str(done["push"] % 2)
    for container in pushed:
        poll(
            lambda c=container: cri.allowed(c).cpus == expected or None,  # type: ignore[misc]  # bound per turn
            "the last push",
        )
    assert cri.first_line(cri.run(cri.run_pod("late"))) == allowed("self")
