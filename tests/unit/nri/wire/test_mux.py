"""The multiplexer: lenient in, exact out."""

from __future__ import annotations

import struct

import pytest

from nri_numa.errors import LocalProtocolError
from nri_numa.nri.wire import ttrpc


def chunks(trunk: ttrpc.Trunk) -> list[tuple[int, bytes]]:
    found = []
    while (chunk := trunk.next_chunk()) is not None:
        found.append(chunk)
    return found


def streams(pieces: list[tuple[int, bytes]]) -> dict[int, bytes]:
    """Join the pieces of each connection, which is all that a receiver may rely on."""
    joined: dict[int, bytes] = {}
    for connection, data in pieces:
        joined[connection] = joined.get(connection, b"") + data
    return joined


@pytest.mark.parametrize(
    ("length", "frames"),
    [
        (1, [1]),
        (10, [10]),
        (4095, [4095]),
        (4096, [4096]),
        (4097, [4096, 1]),
        (8192, [4096, 4096]),
        (607411, [4096, 603315]),  # as containerd 2.1.9 was seen to send it
        ((4 << 20) + 10, [4096, (4 << 20) + 10 - 4096]),
    ],
)
def test_a_message_is_one_frame_of_4096_bytes_and_the_rest_in_a_second(
    length: int, frames: list[int]
) -> None:
    """A first frame above 4096 bytes kills the Go reader, many frames overflow its queue."""
    wire = ttrpc.encode_frames(2, b"x" * length)
    seen = []
    while wire:
        connection, size = struct.unpack_from(">II", wire)
        assert connection == 2
        seen.append(size)
        wire = wire[8 + size :]
    assert seen == frames


def test_a_stream_is_the_same_however_the_socket_cuts_it() -> None:
    wire = (
        ttrpc.encode_frames(1, b"hello ")
        + ttrpc.encode_frames(2, b"other")
        + ttrpc.encode_frames(1, b"")
        + ttrpc.encode_frames(1, b"world")
    )
    expected = {1: b"hello world", 2: b"other"}
    for cut in range(len(wire) + 1):
        trunk = ttrpc.Trunk()
        trunk.receive_data(wire[:cut])
        seen = chunks(trunk)
        trunk.receive_data(wire[cut:])
        assert streams(seen + chunks(trunk)) == expected
    trunk, seen = ttrpc.Trunk(), []
    for byte in wire:
        trunk.receive_data(bytes([byte]))
        seen += chunks(trunk)
    assert streams(seen) == expected


def test_the_trailing_half_of_a_frame_waits_for_its_other_half() -> None:
    trunk = ttrpc.Trunk()
    trunk.receive_data(ttrpc.encode_frames(1, b"abc") + b"\0\0\0")
    assert chunks(trunk) == [(1, b"abc")]
    trunk.receive_data(b"\1\0\0\0\1Z")
    assert chunks(trunk) == [(1, b"Z")]


def test_an_oversized_frame_is_refused_before_its_payload_arrives() -> None:
    trunk = ttrpc.Trunk()
    trunk.receive_data(struct.pack(">II", 1, ttrpc.MAX_FRAME_PAYLOAD))
    assert chunks(trunk) == []
    trunk = ttrpc.Trunk()
    trunk.receive_data(struct.pack(">II", 1, ttrpc.MAX_FRAME_PAYLOAD + 1))
    with pytest.raises(LocalProtocolError, match="at most"):
        trunk.next_chunk()


def test_feeding_without_draining_is_refused_and_not_buffered_for_ever() -> None:
    trunk = ttrpc.Trunk()
    trunk.receive_data(b"\0" * (ttrpc.MAX_UNREAD + 1))
    with pytest.raises(LocalProtocolError, match="drain"):
        trunk.receive_data(b"x")


def test_what_is_queued_leaves_whole_and_in_order() -> None:
    trunk = ttrpc.Trunk()
    assert trunk.data_to_send() == b""
    trunk.write(1, b"one")
    assert trunk.data_to_send() == ttrpc.encode_frames(1, b"one")
    trunk.write(1, b"two")
    trunk.write(2, b"3" * 5000)
    assert trunk.data_to_send() == ttrpc.encode_frames(1, b"two") + ttrpc.encode_frames(
        2, b"3" * 5000
    )
    assert trunk.data_to_send() == b""
