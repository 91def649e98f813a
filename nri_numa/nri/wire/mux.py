"""The connection multiplexer: several byte streams over one stream socket.

A frame is eight bytes of header (connection id and payload length, both unsigned, 32 bit, big
endian) and the payload. There is no handshake and no closing of a single connection: both sides
assume that connections 1 and 2 exist, and the end of the socket ends everything.

Receiving is lenient. The payloads of one connection are a continuous byte stream, so a payload is
handed on piece by piece as it arrives and at most seven bytes of a header wait here. Frames may be
empty.

Sending is strict, because the Go side is. It reads frames through a buffer of 4096 bytes and fails
when the *first* frame of a message does not fit; it queues 256 frames for each connection and
closes everything when they overflow. One message therefore becomes one frame of at most 4096 bytes
and, if there is more, exactly one further frame (github.com/containerd/nri, pkg/net/multiplex, and
the write buffer of github.com/containerd/ttrpc, channel.go). `Trunk.write` takes a whole message
and appends both frames in one step, so no caller can interleave them.
"""

from __future__ import annotations

import struct
from typing import Final

from nri_numa.errors import LocalProtocolError

PLUGIN_CONNECTION: Final = 1
"""The Plugin service: the runtime calls, the plugin answers."""

RUNTIME_CONNECTION: Final = 2
"""The Runtime service: the plugin calls, the runtime answers."""

HEADER_LENGTH: Final = 8
FIRST_FRAME_LIMIT: Final = 4096

MAX_FRAME_PAYLOAD: Final = (16 << 20) + 10 + 4096
"""The largest payload that any release of NRI writes (16 MiB up to 0.6.1, 4 MiB since), a ttrpc
header, and one read buffer of slack."""

MAX_UNREAD: Final = 8 << 20
"""Bytes that may wait for `Trunk.next_chunk`; a reader that drains never comes near."""

_HEADER: Final = struct.Struct(">II")


def encode_frames(connection: int, message: bytes) -> bytes:
    """Frame one ttrpc message the way the Go implementation does.

    Args:
        connection: logical connection id, 1 or 2.
        message: header and body of one ttrpc message.

    Returns:
        One frame, or two when the message is longer than 4096 bytes.
    """
    length = len(message)
    if length <= FIRST_FRAME_LIMIT:
        return _HEADER.pack(connection, length) + message
    return b"".join(
        (
            _HEADER.pack(connection, FIRST_FRAME_LIMIT),
            message[:FIRST_FRAME_LIMIT],
            _HEADER.pack(connection, length - FIRST_FRAME_LIMIT),
            message[FIRST_FRAME_LIMIT:],
        )
    )


class Trunk:
    """Both directions of one multiplexed socket, without the socket."""

    __slots__ = ("_buffer", "_connection", "_left", "_out", "_start")

    def __init__(self) -> None:
        self._buffer = b""
        self._start = 0  # first unread byte of the buffer
        self._connection = 0  # of the frame being read
        self._left = 0  # payload bytes of that frame still to come
        self._out: list[bytes] = []

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the socket; parse nothing yet.

        Raises:
            LocalProtocolError: `next_chunk` was not called often enough.
        """
        unread = len(self._buffer) - self._start
        if unread == 0:
            self._buffer = data
        elif unread > MAX_UNREAD:
            raise LocalProtocolError(f"{unread} bytes wait unread; drain before feeding more")
        else:
            self._buffer = self._buffer[self._start :] + data
        self._start = 0

    def next_chunk(self) -> tuple[int, bytes] | None:
        """Return (connection id, bytes) of the next piece of payload; None when bytes are needed.

        Raises:
            LocalProtocolError: a frame announces more than `MAX_FRAME_PAYLOAD` bytes. The session
                turns it into the remote error.
        """
        while self._left == 0:
            body = self._start + HEADER_LENGTH
            if body > len(self._buffer):
                return None
            self._connection, self._left = _HEADER.unpack_from(self._buffer, self._start)
            if self._left > MAX_FRAME_PAYLOAD:
                raise LocalProtocolError(
                    f"a frame of {self._left} bytes on connection {self._connection};"
                    f" at most {MAX_FRAME_PAYLOAD} are allowed"
                )
            self._start = body
        chunk = self._buffer[self._start : self._start + self._left]
        if not chunk:
            return None
        self._start += len(chunk)
        self._left -= len(chunk)
        if self._start == len(self._buffer):
            # A quarter of a megabyte is not kept until the next request comes.
            self._buffer, self._start = b"", 0
        return self._connection, chunk

    def write(self, connection: int, message: bytes) -> None:
        """Queue one whole ttrpc message."""
        self._out.append(encode_frames(connection, message))

    def data_to_send(self) -> bytes:
        """Return what is queued, in order, and forget it; empty when there is nothing."""
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data
