"""The NRI link alone against real runtimes: what is on the wire."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.beds.containerd import Containerd
from tests.beds.cri import CRI, Resources, allowed, poll
from tests.beds.link_thread import LinkThread

pytestmark = pytest.mark.every_series


@contextmanager
def linked(containerd: Containerd) -> Iterator[LinkThread]:
    plugin = LinkThread(containerd)
    try:
        plugin.wait_active()
        yield plugin
        assert (plugin.handler.errors, plugin.handler.broken) == ([], 0)
    finally:
        plugin.close()


@pytest.fixture
def link(containerd: Containerd) -> Iterator[LinkThread]:
    with linked(containerd) as plugin:
        yield plugin


def test_a_long_answer_arrives_whole(cri: CRI, link: LinkThread) -> None:
    """100 kB leave as one frame of 4,096 bytes and one for the rest, as the Go side wants it."""
    pod = cri.run_pod(annotations={"cpus": "1", "note": "100000"})
    container = cri.run(pod)
    assert len(cri.spec_annotations(container)["k"]) == 100_000
    assert cri.first_line(container).cpus == "1"


def test_every_event_of_a_life_is_seen(cri: CRI, link: LinkThread) -> None:
    pod = cri.run_pod()
    container = cri.run(pod)
    cri.update(container, Resources(shares=512))
    cri.remove_pod(pod)
    heard = link.handler.log
    wanted = {
        *(
            f"{event} {pod.name}"
            for event in ("RunPodSandbox", "StopPodSandbox", "RemovePodSandbox")
        ),
        *(f"{event}Container main" for event in ("Create", "Update", "Stop", "Remove")),
    }
    poll(lambda: wanted <= set(heard), f"events {heard}")
    begin = heard.index(f"RunPodSandbox {pod.name}")
    assert heard[begin + 1] == "CreateContainer main"


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


def test_pushes_arrive_and_never_lock_the_runtime(cri: CRI, link: LinkThread) -> None:
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
            problem = link.push({each.id: str(number % 2) for each in pushed})
            assert not problem

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
    assert cri.first_line(cri.pod("late")) == allowed("self")
