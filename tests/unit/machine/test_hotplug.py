"""CPUs that come and go: the kernel's events."""

from __future__ import annotations

import asyncio
import errno
import io
import socket
from collections.abc import Awaitable, Callable
from typing import NoReturn

import pytest

from nri_numa.agent.reload import no_kernel_events
from nri_numa.machine import hotplug
from nri_numa.machine.hotplug import concerns_cpus
from nri_numa.observe import logs


def uevent(action: str = "offline", subsystem: str = "cpu", path: str = "/devices/cpu3") -> bytes:
    return (
        f"{action}@{path}\0ACTION={action}\0DEVPATH={path}\0SUBSYSTEM={subsystem}\0SEQNUM=1\0"
    ).encode()


@pytest.mark.parametrize("action", ["add", "remove", "online", "offline"])
def test_events_of_cpus_are_recognised(action: str) -> None:
    assert concerns_cpus(uevent(action))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"offline@",
        b"libudev\0\xfe\xed\xca\xfe\0\0",
        uevent(subsystem="block"),
        uevent("change"),
        uevent().replace(b"offline@", b"offline "),
        b"x@y\0\xff=\xff\0SUBSYSTEM\0",
    ],
)
def test_other_events_and_rubbish_are_passed_over(data: bytes) -> None:
    assert not concerns_cpus(data)


class FakeKernel:
    """The two ends of a socket pair; what is written to one comes out as events of the kernel."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.theirs.setblocking(False)
        self.error: OSError | None = None
        self.sender: object = (0, 1)
        self.closed = False

    def fileno(self) -> int:
        return self.theirs.fileno()

    def recvfrom(self, size: int, /) -> tuple[bytes, object]:
        data, _ = self.theirs.recvfrom(size)
        if self.error is not None:
            raise self.error
        return data, self.sender

    def close(self) -> None:
        self.closed = True
        self.theirs.close()

    def say(self, data: bytes) -> None:
        self.ours.send(data)


async def watched(
    kernel: FakeKernel, play: Callable[[asyncio.Queue[None]], Awaitable[None]]
) -> None:
    """Run a watch around a play; each look puts an item into the queue."""
    looks: asyncio.Queue[None] = asyncio.Queue()

    async def changed() -> None:
        looks.put_nowait(None)

    task = asyncio.create_task(hotplug.watch(changed, no_kernel_events, lambda: kernel))
    try:
        await play(looks)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        kernel.ours.close()
    assert kernel.closed


def test_a_burst_of_events_is_one_look() -> None:
    kernel = FakeKernel()

    async def play(looks: asyncio.Queue[None]) -> None:
        await asyncio.sleep(0)
        kernel.say(uevent("add", "block"))
        for _ in range(20):
            kernel.say(uevent())
        await asyncio.wait_for(looks.get(), 180)
        assert looks.empty()
        kernel.say(uevent("online"))
        await asyncio.wait_for(looks.get(), 180)

    asyncio.run(watched(kernel, play))


def test_lost_events_are_a_reason_to_look_and_forged_ones_are_not() -> None:
    kernel = FakeKernel()

    async def play(looks: asyncio.Queue[None]) -> None:
        await asyncio.sleep(0)
        kernel.sender = (4711, 1)
        kernel.say(uevent())
        await asyncio.sleep(0.05)
        kernel.sender = (0, 1)
        kernel.error = OSError(errno.ENOBUFS, "lost")
        kernel.say(b"x")
        await asyncio.wait_for(looks.get(), 180)
        assert looks.empty()

    asyncio.run(watched(kernel, play))


def test_a_socket_that_breaks_is_said_and_polling_goes_on() -> None:
    kernel, stream = FakeKernel(), io.StringIO()
    logs.setup("info", stream=stream)
    kernel.error = OSError(errno.EIO, "broken")

    async def play(looks: asyncio.Queue[None]) -> None:
        await asyncio.sleep(0)
        kernel.say(uevent())
        while "polling only" not in stream.getvalue():
            await asyncio.sleep(0.01)
        assert looks.empty()

    asyncio.run(watched(kernel, play))


def test_without_events_the_watch_waits_and_ends_nothing() -> None:
    stream = io.StringIO()
    logs.setup("info", stream=stream)

    def none() -> NoReturn:
        raise PermissionError(errno.EPERM, "not here")

    async def main() -> bool:
        async def changed() -> None:
            raise AssertionError("nothing was heard")

        task = asyncio.create_task(hotplug.watch(changed, no_kernel_events, none))
        await asyncio.sleep(0.05)
        done = task.done()
        task.cancel()
        return done

    assert asyncio.run(main()) is False
    assert "polling only" in stream.getvalue()


def test_the_kernel_lets_us_listen_or_says_why_not() -> None:
    try:
        source = hotplug.kernel_source()
    except OSError as error:
        pytest.skip(f"no uevents here: {error}")
    with pytest.raises(BlockingIOError):
        source.recvfrom(1)
    source.close()
