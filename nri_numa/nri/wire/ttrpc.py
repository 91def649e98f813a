"""ttrpc over NRI's multiplexer: unary calls, several byte streams on one stream socket.

A frame is eight bytes of header (connection id and payload length, both unsigned, 32 bit, big
endian) and the payload. There is no handshake and no closing of a single connection: both sides
assume that connections 1 and 2 exist, and the end of the socket ends everything.

Receiving is lenient. The payloads of one connection are a continuous byte stream, so a payload is
passed on piece by piece as it arrives, and at most seven bytes of a header are buffered. Frames may
be empty.

Sending is strict, because the Go side is. It reads frames through a buffer of 4096 bytes and fails
when the *first* frame of a message does not fit; it queues 256 frames for each connection and
closes everything when they overflow. One message therefore becomes one frame of at most 4096 bytes
and, if there is more, exactly one further frame (github.com/containerd/nri, pkg/net/multiplex, and
the write buffer of github.com/containerd/ttrpc, channel.go). `Trunk.queue_message` takes a whole
message and appends both frames in one step, so no caller can interleave them.

A ttrpc message is ten bytes of header (body length and stream id, 32 bit big endian; type; flags)
and the body, a protobuf `Request` or `Response`. The client numbers its calls 1, 3, 5 and so on;
the answer has the same number, and answers may come in any order. There is no cancel message: a
client that abandons a call drops its number and ignores a late answer.
(github.com/containerd/ttrpc, PROTOCOL.md.)

Only unary calls are supported. A data message (type 3) belongs to streaming; this module cannot
send one, which matters, because ttrpc up to 1.2.7 inside containerd panics on it
(containerd#12977).

The server answers invalid calls itself, with the codes and texts of the Go server, so that a peer
can rely on them: an NRI runtime falls back to StateChange on code 12 alone.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from nri_numa.errors import LocalProtocolError
from nri_numa.nri.wire.pb import ttrpc_pb2

# --- frames ---------------------------------------------------------------------------------------

PLUGIN_CONNECTION_ID: Final = 1
"""Connection of the Plugin service: the runtime calls, the plugin answers."""
RUNTIME_CONNECTION_ID: Final = 2
"""Connection of the Runtime service: the plugin calls, the runtime answers."""
FRAME_HEADER_BYTES: Final = 8
MAX_SENT_FIRST_FRAME_BYTES: Final = 4096

MAX_FRAME_PAYLOAD_BYTES: Final = (16 << 20) + 10 + 4096
"""Largest payload that any release of NRI writes (16 MiB up to 0.6.1, 4 MiB since), plus a ttrpc
header and one read buffer."""
MAX_UNREAD_BYTES: Final = 8 << 20
"""Maximum bytes that wait for `Trunk.next_chunk`; a reader that drains stays far below."""
_FRAME_HEADER: Final = struct.Struct(">II")


def encode_frames(connection: int, message: bytes) -> bytes:
    """Frame one ttrpc message like the Go implementation: two frames if it has over 4096 bytes."""
    length = len(message)
    if length <= MAX_SENT_FIRST_FRAME_BYTES:
        return _FRAME_HEADER.pack(connection, length) + message
    return b"".join(
        (
            _FRAME_HEADER.pack(connection, MAX_SENT_FIRST_FRAME_BYTES),
            message[:MAX_SENT_FIRST_FRAME_BYTES],
            _FRAME_HEADER.pack(connection, length - MAX_SENT_FIRST_FRAME_BYTES),
            message[MAX_SENT_FIRST_FRAME_BYTES:],
        )
    )


class Trunk:
    """Multiplexer of one socket, both directions, without the socket itself."""

    def __init__(self) -> None:
        self._buffer = b""
        self._start = 0  # first unread byte of the buffer
        self._connection = 0  # of the frame being read
        self._remaining = 0  # payload bytes of that frame that have not arrived
        self._queued_messages: list[bytes] = []

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the socket; parse nothing yet. `LocalProtocolError` if too many wait."""
        unread = len(self._buffer) - self._start
        if unread == 0:
            self._buffer = data
        elif unread > MAX_UNREAD_BYTES:
            raise LocalProtocolError(f"{unread} bytes wait unread; drain before feeding more")
        else:
            self._buffer = self._buffer[self._start :] + data
        self._start = 0

    def next_chunk(self) -> tuple[int, bytes] | None:
        """Return (connection id, bytes) of the next piece of payload; None when bytes are needed.

        Raises:
            LocalProtocolError: a frame announces more than `MAX_FRAME_PAYLOAD_BYTES` bytes. The
                session turns it into the remote error.
        """
        while self._remaining == 0:
            body = self._start + FRAME_HEADER_BYTES
            if body > len(self._buffer):
                return None
            self._connection, self._remaining = _FRAME_HEADER.unpack_from(self._buffer, self._start)
            if self._remaining > MAX_FRAME_PAYLOAD_BYTES:
                raise LocalProtocolError(
                    f"a frame of {self._remaining} bytes on connection {self._connection};"
                    f" at most {MAX_FRAME_PAYLOAD_BYTES} are allowed"
                )
            self._start = body
        chunk = self._buffer[self._start : self._start + self._remaining]
        if not chunk:
            return None
        self._start += len(chunk)
        self._remaining -= len(chunk)
        if self._start == len(self._buffer):
            # Free a quarter of a megabyte that would be held until the next request.
            self._buffer, self._start = b"", 0
        return self._connection, chunk

    def queue_message(self, connection: int, message: bytes) -> None:
        """Queue one whole ttrpc message."""
        self._queued_messages.append(encode_frames(connection, message))

    def data_to_send(self) -> bytes:
        """Return the queued bytes, in order, and drop them; empty if nothing is queued."""
        data = b"".join(self._queued_messages)
        self._queued_messages.clear()
        return data


# --- messages -------------------------------------------------------------------------------------

MESSAGE_HEADER_BYTES: Final = 10

MAX_MESSAGE_BODY_BYTES: Final = 4 << 20
"""Maximum body of one message, by PROTOCOL.md; never exceeded when sending."""
MAX_REQUEST_TO_PLUGIN_BYTES: Final = 16 << 20
"""Maximum request that a plugin accepts. ttrpc before 1.2.6 does not check what it sends, and NRI
before 0.7 has no slices, so containerd up to 1.7.25 describes a large node in one message above
4 MiB."""
MAX_UNANSWERED_CALLS: Final = 64
"""Maximum open calls of one peer; an NRI runtime has one event and a few validations."""
MAX_STATUS_TEXT_CHARS: Final = 16 << 10
"""Maximum characters of an error message; the rest is cut off."""
MAX_STREAM_ID: Final = (1 << 32) - 1

_MESSAGE_HEADER: Final = struct.Struct(">IIBB")


class MessageType(enum.IntEnum):
    """Type byte of a message; data messages are recognised and not supported."""

    REQUEST = 1
    RESPONSE = 2
    DATA = 3


class Code(enum.IntEnum):
    """Codes of google.rpc that this module uses."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    UNIMPLEMENTED = 12
    INTERNAL = 13


class CallStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Error of a failed call; `code` is a plain int, since a peer may send any number."""

    code: int
    message: str

    def __str__(self) -> str:
        return f"{self.message} (code {self.code})"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Request to answer on ``stream``.

    Attributes:
        traceparent: the caller's span in W3C Trace Context; empty from a runtime without tracing.
    """

    stream: int
    service: str
    method: str
    payload: bytes
    traceparent: str = ""


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to an own call: a payload, or the error status."""

    stream: int
    payload: bytes
    status: CallStatus | None


def encode_message(stream: int, message_type: int, body: bytes) -> bytes:
    """Encode a message: header and body.

    Raises:
        LocalProtocolError: the body is longer than 4 MiB; the Go peer could not recover from it.
    """
    if len(body) > MAX_MESSAGE_BODY_BYTES:
        raise LocalProtocolError(
            f"a message body of {len(body)} bytes; at most {MAX_MESSAGE_BODY_BYTES} fit"
        )
    return _MESSAGE_HEADER.pack(len(body), stream, message_type, 0) + body


class MessageReader:
    """Reader that cuts the byte stream of one logical connection into messages.

    It holds at most one unfinished message (`max_body` and its header) besides the last chunk.
    """

    def __init__(self, max_body: int = MAX_MESSAGE_BODY_BYTES) -> None:
        self._buffer: bytes | bytearray = b""
        self._start = 0
        self._max_body = max_body

    def receive_data(self, chunk: bytes) -> None:
        """Take a piece of payload from the multiplexer."""
        if self._start == len(self._buffer):
            self._buffer = chunk
        else:
            if isinstance(self._buffer, bytearray):
                del self._buffer[: self._start]
            else:
                self._buffer = bytearray(memoryview(self._buffer)[self._start :])
            self._buffer += chunk
        self._start = 0

    def next_message(self) -> tuple[int, int, bytes] | None:
        """Return (stream id, type, body) of the next message; None when bytes are needed.

        Raises:
            LocalProtocolError: a message announces more than `max_body` bytes.
        """
        body = self._start + MESSAGE_HEADER_BYTES
        if body > len(self._buffer):
            return None
        length, stream, message_type, _flags = _MESSAGE_HEADER.unpack_from(
            self._buffer, self._start
        )
        if length > self._max_body:
            raise LocalProtocolError(
                f"a message of {length} bytes on stream {stream};"
                f" at most {self._max_body} are allowed"
            )
        message_end = body + length
        if message_end > len(self._buffer):
            return None
        payload = bytes(memoryview(self._buffer)[body:message_end])
        if message_end == len(self._buffer):
            # Free the buffer: some requests have megabytes, and the next one may come much later.
            self._buffer, self._start = b"", 0
        else:
            self._start = message_end
        return stream, message_type, payload


class TTRPCServer:
    """The answering side of one logical connection."""

    def __init__(
        self, trunk: Trunk, connection: int, *, max_body: int = MAX_MESSAGE_BODY_BYTES
    ) -> None:
        self._trunk = trunk
        self._connection = connection
        self._reader = MessageReader(max_body)
        self._last_stream = 0
        self._unanswered: set[int] = set()

    @property
    def unanswered_calls(self) -> int:
        """Number of calls that wait for an answer."""
        return len(self._unanswered)

    def receive_data(self, chunk: bytes) -> None:
        """Take a piece of payload of this connection."""
        self._reader.receive_data(chunk)

    def next_call(self) -> Call | None:
        """Return the next call to answer; None when bytes are needed.

        Invalid requests are answered here and not returned. `LocalProtocolError` means that the
        peer exceeded a limit.
        """
        while (message := self._reader.next_message()) is not None:
            stream, message_type, body = message
            if stream % 2 == 0:
                problem = "StreamID must be odd for client initiated streams"
            elif message_type == MessageType.DATA:
                problem = "StreamID is no longer active"
            elif message_type != MessageType.REQUEST:
                continue  # unknown types are not an error
            elif stream <= self._last_stream:
                problem = "StreamID cannot be re-used and must increment"
            else:
                self._last_stream = stream
                try:
                    request = ttrpc_pb2.Request.FromString(body)
                except DecodeError as error:
                    problem = f"unmarshal request error: {error}"
                else:
                    if len(self._unanswered) >= MAX_UNANSWERED_CALLS:
                        raise LocalProtocolError(
                            f"more than {MAX_UNANSWERED_CALLS} calls unanswered"
                        )
                    self._unanswered.add(stream)
                    metadata = {item.key: item.value for item in request.metadata}
                    return Call(
                        stream=stream,
                        service=request.service,
                        method=request.method,
                        payload=request.payload,
                        traceparent=metadata.get("traceparent", ""),
                    )
            self._send_status(stream, Code.INVALID_ARGUMENT, problem)
        return None

    def reply(self, stream: int, payload: bytes) -> None:
        """Answer a call with success.

        Raises:
            LocalProtocolError: no such call is open, or the payload is too large. The call then
                stays open and needs another answer.
        """
        self._check_stream_unanswered(stream)
        # An empty payload has an empty body, as in captures of successful calls.
        body = ttrpc_pb2.Response(payload=payload).SerializeToString() if payload else b""
        self._trunk.queue_message(
            self._connection, encode_message(stream, MessageType.RESPONSE, body)
        )
        self._unanswered.discard(stream)

    def reply_error(self, stream: int, code: int, message: str) -> None:
        """Answer a call with an error status.

        Raises:
            LocalProtocolError: no such call is open, or the code means success.
        """
        self._check_stream_unanswered(stream)
        if code == Code.OK:
            raise LocalProtocolError("an error status needs a code other than 0")
        self._send_status(stream, code, message)
        self._unanswered.discard(stream)

    def _check_stream_unanswered(self, stream: int) -> None:
        if stream not in self._unanswered:
            raise LocalProtocolError(f"stream {stream} is not waiting for an answer")

    def _send_status(self, stream: int, code: int, message: str) -> None:
        # A lone surrogate cannot be encoded; an error message must not fail because of it.
        text = message[:MAX_STATUS_TEXT_CHARS].encode("utf-8", "replace").decode()
        status = ttrpc_pb2.Status(code=code, message=text)
        body = ttrpc_pb2.Response(status=status).SerializeToString()
        self._trunk.queue_message(
            self._connection, encode_message(stream, MessageType.RESPONSE, body)
        )


class TTRPCClient:
    """The calling side of one logical connection."""

    def __init__(self, trunk: Trunk, connection: int) -> None:
        self._trunk = trunk
        self._connection = connection
        self._reader = MessageReader()
        self._next_stream = 1
        self._open: set[int] = set()

    def send_call(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        timeout_nano: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Send a request and return the stream id of its answer.

        Raises:
            LocalProtocolError: too many calls are open, the stream ids are used up, or the request
                is too large.
        """
        if len(self._open) >= MAX_UNANSWERED_CALLS:
            raise LocalProtocolError(f"{MAX_UNANSWERED_CALLS} calls are open already")
        stream = self._next_stream
        if stream > MAX_STREAM_ID:
            raise LocalProtocolError("this connection has no stream id left")
        request = ttrpc_pb2.Request(
            service=service, method=method, payload=payload, timeout_nano=timeout_nano
        )
        if metadata:
            # Sorted by key: equal calls have equal bytes.
            request.metadata.extend(
                ttrpc_pb2.KeyValue(key=key, value=metadata[key]) for key in sorted(metadata)
            )
        message = encode_message(stream, MessageType.REQUEST, request.SerializeToString())
        self._trunk.queue_message(self._connection, message)
        self._next_stream += 2
        self._open.add(stream)
        return stream

    def abandon_call(self, stream: int) -> None:
        """Abandon a call; a late answer is ignored."""
        self._open.discard(stream)

    def receive_data(self, chunk: bytes) -> None:
        """Take a piece of payload of this connection."""
        self._reader.receive_data(chunk)

    def next_reply(self) -> CallReply | None:
        """Return the next answer to an open call; None when bytes are needed.

        Raises:
            LocalProtocolError: the answer to an open call is not a response.
        """
        while (message := self._reader.next_message()) is not None:
            stream, message_type, body = message
            if stream not in self._open:
                continue  # late, or for no call: Go ignores both
            if message_type != MessageType.RESPONSE:
                raise LocalProtocolError(
                    f"stream {stream} is answered by a message of type {message_type};"
                    f" a response is type {MessageType.RESPONSE.value}"
                )
            try:
                response = ttrpc_pb2.Response.FromString(body)
            except DecodeError as error:
                raise LocalProtocolError(
                    f"the response on stream {stream} cannot be read: {error}"
                ) from error
            self._open.discard(stream)
            status = None
            if response.HasField("status") and response.status.code != Code.OK:
                status = CallStatus(code=response.status.code, message=response.status.message)
            return CallReply(stream=stream, payload=response.payload, status=status)
        return None
