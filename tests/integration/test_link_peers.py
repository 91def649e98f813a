"""The link against peers that behave in ways no embedded runtime would."""

import asyncio
import socket
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from nri_numa.model.workload import ContainerUpdate
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.runtime import LinkState, PermanentlyRejected, RequestRejected
from tests.beds.embedded_runtime import EmbeddedRuntime
from tests.beds.link_bed import (
    RawRuntime,
    became_active,
    eventually,
    link_to,
    linked,
    raw_runtime,
    running,
)
from tests.beds.recording_plugin import RecordingPlugin, adjusted
from tests.beds.wire import request_frame

pytestmark = pytest.mark.asyncio


async def proper(runtime: RawRuntime) -> None:
    """Be a good runtime until the other side hangs up."""
    await runtime.handshake()
    while True:
        await runtime.next_event()


OVERSIZED_FRAME = struct.pack(">II", 1, 0x7FFFFFFF)
OVERSIZED_MESSAGE = ttrpc.encode_frames(1, struct.pack(">IIBB", 0x7FFFFFFF, 1, 1, 0))
DATA_FOR_A_RESPONSE = ttrpc.encode_frames(2, ttrpc.encode_message(1, 3, b""))
OUT_OF_TURN = request_frame(1, "CreateContainer")
NOISE = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@pytest.mark.parametrize(
    ("wire", "detail"),
    [
        (OVERSIZED_FRAME, "a frame of 2147483647 bytes"),
        (OVERSIZED_MESSAGE, "a message of 2147483647 bytes"),
        (DATA_FOR_A_RESPONSE, "answered by a message of type 3"),
        (OUT_OF_TURN, "an event is illegal while registering"),
        (NOISE, "a frame of"),
    ],
    ids=["frame", "message", "data", "out-of-turn", "noise"],
)
async def test_a_broken_protocol_is_reported_and_the_runtime_dialled_again(
    tmp_path: Path, wire: bytes, detail: str
) -> None:
    async def serve(runtime: RawRuntime, number: int) -> None:
        if number > 1:
            await proper(runtime)
        await runtime.send(wire)
        assert await runtime.reader.read() != b"", "the registration, and then the end"

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve):
        await eventually(lambda: became_active(plugin))
    # The second connection is broken as well, when it is in use.
    broken = [detail for _, detail in plugin.states if "broke the protocol" in detail]
    assert plugin.broken == len(broken) >= 1
    assert plugin.states[1][0] is LinkState.DISCONNECTED
    assert plugin.states[1][1].startswith("the peer broke the protocol: ")
    assert detail in plugin.states[1][1]


@pytest.mark.parametrize("step", ["connect", "register", "configure", "synchronize", "active"])
async def test_a_runtime_that_hangs_up_anywhere_is_dialled_again(tmp_path: Path, step: str) -> None:
    async def serve(runtime: RawRuntime, number: int) -> None:
        if number > 1:
            await proper(runtime)
        if step == "connect":
            return
        await runtime.register()
        if step == "register":
            return
        await runtime.configure()
        if step == "configure":
            return
        await runtime.synchronize()
        if step == "synchronize":
            return
        runtime.session.call_plugin("CreateContainer", pb.CreateContainerRequest())
        await runtime.send()

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve):
        times = 2 if step in ("synchronize", "active") else 1
        await eventually(lambda: became_active(plugin, times))


async def test_half_a_message_and_silence_is_waited_for(tmp_path: Path) -> None:
    """No timeout of ours after Configure: a long container stop may delay Synchronize."""
    ready = asyncio.Event()

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.register()
        await runtime.configure()
        runtime.session.call_plugin("Synchronize", pb.SynchronizeRequest())
        data = runtime.session.data_to_send()
        await runtime.send(data[:20])
        await ready.wait()
        await runtime.send(data[20:])
        await runtime.next_event()

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve) as link:
        await eventually(lambda: link.state is LinkState.CONFIGURED)
        ready.set()
        await eventually(lambda: became_active(plugin))


async def test_a_runtime_that_never_answers_the_registration_is_left(tmp_path: Path) -> None:
    async def serve(runtime: RawRuntime, number: int) -> None:
        if number > 1:
            await proper(runtime)
        await runtime.reader.read()

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve, registration_wait=0.02):
        await eventually(lambda: became_active(plugin))
    assert (LinkState.DISCONNECTED, "no answer to the registration within 0.02 s") in plugin.states


async def test_a_refused_registration_is_fatal_if_it_would_repeat_for_ever(tmp_path: Path) -> None:
    async def serve(runtime: RawRuntime, number: int) -> None:
        event = await runtime.next_event()
        assert isinstance(event, ev.RegisterRequested)
        words = "invalid plugin index: 10" if number == 2 else "out of memory"
        runtime.session.reply_error(event.stream, words)
        await runtime.send()
        await runtime.reader.read()

    plugin = RecordingPlugin()
    path = str(tmp_path / "nri.sock")
    async with raw_runtime(path, serve):
        with pytest.raises(PermanentlyRejected, match="10-numapin: invalid plugin index: 10"):
            await asyncio.wait_for(link_to(path, plugin).run(), 180)
    assert plugin.states[1] == (
        LinkState.DISCONNECTED,
        "registration refused: out of memory (code 2)",
    )
    assert plugin.states[-1] == (LinkState.STOPPED, "")


async def test_a_configuration_the_handler_rejects_is_fatal(tmp_path: Path) -> None:
    def reject(*_: object) -> Any:
        raise RequestRejected("the drop-in file: unknown key 'cpu'")

    plugin = RecordingPlugin(configured=reject)
    path = str(tmp_path / "nri.sock")
    async with EmbeddedRuntime(path) as runtime:
        with pytest.raises(PermanentlyRejected, match="unknown key 'cpu'"):
            await asyncio.wait_for(link_to(path, plugin).run(), 180)
        assert runtime.plugins == ()


async def test_a_synchronisation_the_handler_rejects_is_tried_again(tmp_path: Path) -> None:
    def refuse_once(*_: object) -> list[ContainerUpdate]:
        if plugin.log.count("Synchronize") == 1:
            raise RequestRejected("not yet")
        return []

    plugin = RecordingPlugin(synchronize=refuse_once)
    path = str(tmp_path / "nri.sock")
    async with EmbeddedRuntime(path), running(link_to(path, plugin)):
        await eventually(lambda: became_active(plugin))
    assert any("not yet" in detail for _, detail in plugin.states)


async def test_a_synchronisation_that_took_too_long_is_not_trusted(tmp_path: Path) -> None:
    """Runtimes before NRI 0.7 keep such a connection open and never use it."""

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.handshake(pb.ConfigureRequest(request_timeout=20 if number == 1 else 0))
        while True:
            await runtime.next_event()

    def slow_once(*_: object) -> list[ContainerUpdate]:
        if plugin.log.count("Synchronize") == 1:
            time.sleep(0.03)
        return []

    plugin = RecordingPlugin(synchronize=slow_once)
    async with linked(tmp_path, plugin, serve):
        await eventually(lambda: became_active(plugin))
    assert any(
        detail.startswith("synchronisation took") and detail.endswith("the runtime waits 0.02 s")
        for _, detail in plugin.states
    )


async def test_events_that_were_not_asked_for_are_answered_and_do_nothing(tmp_path: Path) -> None:
    answers: list[ev.RuntimeSessionEvent] = []

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.handshake()
        for method, request in (
            ("PostCreateContainer", pb.PostCreateContainerRequest()),
            ("StartContainer", pb.StartContainerRequest()),
            ("PostStartContainer", pb.PostStartContainerRequest()),
            ("PostUpdatePodSandbox", pb.PostUpdatePodSandboxRequest()),
            ("ValidateContainerAdjustment", pb.ValidateContainerAdjustmentRequest()),
            ("Shutdown", pb.Empty()),
        ):
            runtime.session.call_plugin(method, request)
            await runtime.send()
            answers.append(await runtime.next_event())
        await runtime.reader.read()

    plugin = RecordingPlugin()
    async with linked(tmp_path, plugin, serve):
        await eventually(lambda: len(answers) == 6)
    assert all(
        isinstance(answer, ev.RequestAnswered) and answer.status is None and answer.payload == b""
        for answer in answers
    )
    # The handler is told what it has a method for, asked for or not.
    assert plugin.log == ["Configure", "Synchronize", "StartContainer ", "PostStartContainer "]


async def test_a_flood_of_slices_leaves_memory_flat(tmp_path: Path) -> None:
    """Ten thousand empty slices, as livelocked runtimes send them, and not one kept."""
    done = asyncio.Event()

    async def serve(runtime: RawRuntime, number: int) -> None:
        await runtime.register()
        await runtime.configure()
        flood = [request_frame(3 + 2 * n, "Synchronize", b"\x18\x01") for n in range(10_000)]
        answers = 0

        async def count_answers() -> None:
            nonlocal answers
            while answers < 10_000 * 22 - 100:
                answers += len(await runtime.reader.read(1 << 16))

        counting = asyncio.create_task(count_answers())
        for start in range(0, len(flood), 100):
            await runtime.send(b"".join(flood[start : start + 100]))
        await counting
        done.set()
        await runtime.reader.read()

    async with linked(tmp_path, RecordingPlugin(), serve):
        tracemalloc.start()
        try:
            await asyncio.wait_for(done.wait(), 180)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert held < 8 << 20


async def test_a_runtime_that_reads_no_answers_is_not_served_for_ever(tmp_path: Path) -> None:
    """Answers pile up on our side only as far as the limit; then requests are left unread."""
    total, size = 400, 200_000
    stalled = asyncio.Event()
    resume = asyncio.Event()
    answered = 0

    async def serve(runtime: RawRuntime, number: int) -> None:
        nonlocal answered
        await runtime.handshake()
        sock = runtime.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        runtime.reader._transport.pause_reading()  # type: ignore[attr-defined]
        for number in range(total):
            runtime.writer.write(request_frame(5 + 2 * number, "CreateContainer"))
        stalled.set()
        await resume.wait()
        runtime.reader._transport.resume_reading()  # type: ignore[attr-defined]
        received = 0
        while received < total * size:
            received += len(await runtime.reader.read(1 << 20))
        answered = received
        await runtime.reader.read()

    plugin = RecordingPlugin(create_container=lambda *_: adjusted("1", note="x" * size))
    async with linked(tmp_path, plugin, serve):
        await asyncio.wait_for(stalled.wait(), 180)
        served = -1
        while served != len(plugin.log):  # until nothing moves any more
            served = len(plugin.log)
            await asyncio.sleep(0.05)
        assert len(plugin.log) - 2 < total
        resume.set()
        await eventually(lambda: answered >= total * size)
        assert len(plugin.log) - 2 == total
