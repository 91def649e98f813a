"""Recorded exchanges of a runtime with a plugin, played to another plugin.

A recording has the bytes of both sides with their times. The runtime's are sent again in their
order; each line of the plugin waits until the plugin under test has sent the messages that end in
it. What it sends instead, or beside them, is what the test compares.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.pb import ttrpc_pb2
from nri_numa.nri.wire.session import PLUGIN_METHODS

RECORDINGS = Path(__file__).parents[1] / "golden/recordings"


@dataclass(frozen=True)
class Part:
    """One message of either side.

    Attributes:
        key: connection of the multiplexer, stream, and type; the two sides have their own.
        method: of a request; empty in an answer.
        error: of an answer.
    """

    key: tuple[int, int, int]
    method: str
    payload: bytes
    error: str = ""

    @property
    def is_request(self) -> bool:
        return self.key[2] == ttrpc.MessageType.REQUEST


class PartReader:
    """Messages out of the bytes of one side of one connection."""

    def __init__(self) -> None:
        self._trunk = ttrpc.Trunk()
        self._readers: dict[int, ttrpc.MessageReader] = {}

    def parts(self, data: bytes) -> Iterator[Part]:
        """Messages that end in these bytes."""
        self._trunk.receive_data(data)
        while (chunk := self._trunk.next_chunk()) is not None:
            connection, body = chunk
            limit = ttrpc.MAX_REQUEST_TO_PLUGIN_BYTES
            reader = self._readers.setdefault(connection, ttrpc.MessageReader(limit))
            reader.receive_data(body)
            while (message := reader.next_message()) is not None:
                yield self._part(connection, *message)

    @staticmethod
    def _part(connection: int, stream: int, kind: int, body: bytes) -> Part:
        key = (connection, stream, kind)
        if kind == ttrpc.MessageType.REQUEST:
            request = ttrpc_pb2.Request.FromString(body)
            return Part(key, request.method, request.payload)
        response = ttrpc_pb2.Response.FromString(body)
        return Part(key, "", response.payload, response.status.message)


@dataclass(frozen=True)
class Answer:
    """A message of the plugin under test, and the recorded one.

    Attributes:
        method: of the request, of whichever side.
        request: what the runtime asked; None where the plugin asks.
        recorded, actual: a message, or the text of an error.
    """

    method: str
    request: Message | None
    recorded: Message | str
    actual: Message | str


@dataclass(frozen=True)
class Line:
    """One read of the socket, or the end of the connection.

    Attributes:
        seconds: since the recording began.
        sender: ``runtime`` or ``plugin``.
    """

    seconds: float
    sender: str
    data: bytes


@dataclass(frozen=True)
class Recording:
    """One recording.

    Attributes:
        steps: what was done from outside, on the clock of the lines.
        connections: lines of each connection that was accepted, in the order of dialling.
    """

    folder: str
    name: str
    plugin: str
    steps: list[dict[str, Any]]
    connections: list[list[Line]]

    def __str__(self) -> str:
        return f"{self.folder}-{self.name}"


def recordings() -> list[Recording]:
    """All recordings, in the order of their descriptions."""
    return [
        Recording(
            folder=each["folder"],
            name=entry["file"].removesuffix(".jsonl"),
            plugin=entry["plugin"],
            steps=entry["steps"],
            connections=_connections(description.parent / each["folder"] / entry["file"]),
        )
        for description in sorted(RECORDINGS.glob("*/description.json"))
        for each in json.loads(description.read_text())["sets"]
        for entry in each["recordings"]
    ]


def _connections(path: Path) -> list[list[Line]]:
    connections: dict[int, list[Line]] = {}
    for text in path.read_text().splitlines()[1:]:
        line = json.loads(text)
        if "bytes" in line:
            read = Line(line["t"], line["from"], bytes.fromhex(line["bytes"]))
            connections.setdefault(line["connection"], []).append(read)
    return [connections[number] for number in sorted(connections)]


class RecordedRuntime:
    """The runtime's end of one recorded connection.

    Args:
        pass_time: called with the time of each line before it is played.
        on_request: called with each request of the runtime before it is sent.
        on_answer: called with each message of the plugin.
    """

    def __init__(
        self,
        lines: list[Line],
        pass_time: Callable[[float], None],
        on_request: Callable[[str, Any], None],
        on_answer: Callable[[Answer], None],
    ) -> None:
        self._lines, self._pass_time = lines, pass_time
        self._on_request, self._on_answer = on_request, on_answer
        self._sent, self._recorded, self._actual = PartReader(), PartReader(), PartReader()
        self._requests: dict[int, Part] = {}
        self._received: dict[tuple[int, int, int], Part] = {}

    @property
    def is_push(self) -> bool:
        """True if the recorded plugin made this connection for updates that answer no event."""
        data = b"".join(line.data for line in self._lines if line.sender == "plugin")
        registration = pb.RegisterPluginRequest.FromString(next(PartReader().parts(data)).payload)
        return registration.plugin_name.endswith("-push")

    async def play(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the runtime's bytes, and receive what the plugin sends at these points."""
        for line in self._lines:
            self._pass_time(line.seconds)
            if line.sender == "runtime":
                for part in self._sent.parts(line.data):
                    if part.is_request:
                        self._requests[part.key[1]] = part
                        self._on_request(part.method, _request_of(part))
                writer.write(line.data)
                continue
            for recorded in self._recorded.parts(line.data):
                actual = await self._receive(recorded.key, reader)
                self._on_answer(self._answer(recorded, actual))

    async def read_unexpected(self, reader: asyncio.StreamReader) -> list[Part]:
        """Read until the plugin has closed; return what was not recorded."""
        while data := await reader.read(1 << 16):
            self._received |= {part.key: part for part in self._actual.parts(data)}
        return list(self._received.values())

    async def _receive(self, key: tuple[int, int, int], reader: asyncio.StreamReader) -> Part:
        while key not in self._received:
            data = await reader.read(1 << 16)
            if not data:
                raise EOFError(f"the plugin hung up before {key}")
            self._received |= {part.key: part for part in self._actual.parts(data)}
        return self._received.pop(key)

    def _answer(self, recorded: Part, actual: Part) -> Answer:
        if recorded.is_request:
            message = getattr(pb, f"{recorded.method}Request")
            payloads = message.FromString(recorded.payload), message.FromString(actual.payload)
            return Answer(recorded.method, None, *payloads)
        request = self._requests[recorded.key[1]]
        message = getattr(pb, f"{request.method}Response", pb.Empty)
        return Answer(
            method=request.method,
            request=_request_of(request),
            recorded=recorded.error or message.FromString(recorded.payload),
            actual=actual.error or message.FromString(actual.payload),
        )


def _request_of(part: Part) -> Any:
    return PLUGIN_METHODS[part.method].FromString(part.payload)
