"""Running an NRI link against an embedded runtime or a hand-written peer."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from nri_numa.nri.link import LinkSettings, NRILink
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import RuntimeSession
from nri_numa.nri.wire.versions import AGENT_EVENTS, Event
from nri_numa.runtime import LinkState
from tests.beds.embedded_runtime import EmbeddedRuntime
from tests.beds.recording_plugin import RecordingPlugin

PLUGIN_EVENTS = AGENT_EVENTS & ~(
    Event.START_CONTAINER.mask_bit | Event.POST_START_CONTAINER.mask_bit
)
"""What a plugin of these tests subscribes to, unless it says otherwise."""


def link_to(socket_path: str, plugin: RecordingPlugin, **settings: Any) -> NRILink:
    """Return a link that dials again almost at once."""
    settings.setdefault("delays", lambda: itertools.repeat(0.01))
    settings.setdefault("push_interval", 0.0)
    settings.setdefault("events", PLUGIN_EVENTS)
    named = {"name": "numapin", "index": "10", "socket_path": socket_path} | settings
    return NRILink(plugin, LinkSettings(**named))


@asynccontextmanager
async def running(link: NRILink) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def embedded(
    directory: Path, plugin: RecordingPlugin, link: Mapping[str, Any] = {}, **runtime: Any
) -> AsyncIterator[tuple[EmbeddedRuntime, NRILink]]:
    path = str(directory / "nri.sock")
    made = link_to(path, plugin, **link)
    async with EmbeddedRuntime(path, **runtime) as there, running(made):
        await there.wait_for_plugin()
        yield there, made


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, however long that takes on a busy machine."""
    async with asyncio.timeout(180):
        while not condition():
            await asyncio.sleep(0.002)


def became_active(plugin: RecordingPlugin, times: int = 1) -> bool:
    return [state for state, _ in plugin.states].count(LinkState.ACTIVE) >= times


class RawRuntime:
    """A runtime written by hand, for what a well-behaved one never does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.session = RuntimeSession()
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes = b"") -> None:
        """Send what the session has queued, and then these bytes."""
        self.writer.write(self.session.data_to_send() + data)
        await self.writer.drain()

    async def next_event(self) -> ev.RuntimeSessionEvent:
        while (event := self.session.next_event()) is None:
            data = await self.reader.read(1 << 16)
            if not data:
                raise EOFError
            self.session.receive_data(data)
        return event

    async def register(self) -> None:
        event = await self.next_event()
        assert isinstance(event, ev.RegisterRequested)
        self.session.reply(event.stream)
        await self.send()

    async def configure(self, request: pb.ConfigureRequest | None = None) -> int:
        self.session.call_plugin("Configure", request or pb.ConfigureRequest())
        await self.send()
        answer = await self.next_event()
        assert isinstance(answer, ev.RequestAnswered)
        return pb.ConfigureResponse.FromString(answer.payload).events

    async def handshake(self, request: pb.ConfigureRequest | None = None) -> None:
        """All that comes before the first event."""
        await self.register()
        await self.configure(request)
        await self.synchronize()

    async def synchronize(self) -> None:
        self.session.call_plugin("Synchronize", pb.SynchronizeRequest())
        await self.send()
        await self.next_event()


@asynccontextmanager
async def linked(
    directory: Path,
    plugin: RecordingPlugin,
    serve: Callable[[RawRuntime, int], Any],
    **settings: Any,
) -> AsyncIterator[NRILink]:
    """The link of a plugin, and a `raw_runtime`."""
    path = str(directory / "nri.sock")
    link = link_to(path, plugin, **settings)
    async with raw_runtime(path, serve), running(link):
        yield link


@asynccontextmanager
async def raw_runtime(
    socket_path: str, serve: Callable[[RawRuntime, int], Any]
) -> AsyncIterator[None]:
    """Listen, and call `serve(runtime, number)` for each connection, from number 1."""
    numbers = itertools.count(1)
    connections: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await serve(RawRuntime(reader, writer), next(numbers))
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            connections.discard(task)

    server = await asyncio.start_unix_server(connected, socket_path)
    try:
        yield
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
