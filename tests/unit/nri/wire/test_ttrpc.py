"""ttrpc: framing, stream numbers, and the answers to every mistake."""

import struct
import tracemalloc
from collections.abc import Callable

import pytest

from nri_numa.errors import LocalProtocolError
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import ttrpc_pb2

REQUEST = ttrpc.MessageType.REQUEST
RESPONSE = ttrpc.MessageType.RESPONSE


def request(method: str = "M", payload: bytes = b"", timeout_nano: int = 0) -> bytes:
    return ttrpc_pb2.Request(
        service="S", method=method, payload=payload, timeout_nano=timeout_nano
    ).SerializeToString()


def ask(made: ttrpc.TTRPCServer, stream: int) -> None:
    """Make a call that waits for its answer then."""
    made.receive_data(ttrpc.encode_message(stream, REQUEST, request()))
    assert made.next_call() is not None


def server(
    *calls: int,
) -> tuple[ttrpc.TTRPCServer, Callable[[], list[tuple[int, ttrpc_pb2.Response]]]]:
    """Return a server with these calls open and a function that reads the answers it has sent."""
    trunk = ttrpc.Trunk()
    made = ttrpc.TTRPCServer(trunk, 1)
    for stream in calls:
        ask(made, stream)

    def answers() -> list[tuple[int, ttrpc_pb2.Response]]:
        other, reader = ttrpc.Trunk(), ttrpc.MessageReader()
        other.receive_data(trunk.data_to_send())
        while (chunk := other.next_chunk()) is not None:
            reader.receive_data(chunk[1])
        found = []
        while (message := reader.next_message()) is not None:
            assert message[1] == RESPONSE
            found.append((message[0], ttrpc_pb2.Response.FromString(message[2])))
        return found

    return made, answers


def test_the_longest_body_travels_and_a_longer_one_is_refused_on_both_sides() -> None:
    longest = b"x" * ttrpc.MAX_MESSAGE_BODY_BYTES
    reader = ttrpc.MessageReader()
    reader.receive_data(ttrpc.encode_message(1, REQUEST, longest))
    assert reader.next_message() == (1, 1, longest)
    with pytest.raises(LocalProtocolError, match="4194305 bytes"):
        ttrpc.encode_message(1, REQUEST, longest + b"x")
    reader.receive_data(struct.pack(">IIBB", ttrpc.MAX_MESSAGE_BODY_BYTES + 1, 1, 1, 0))
    with pytest.raises(LocalProtocolError, match="4194305 bytes"):
        reader.next_message()


@pytest.mark.parametrize("timeout_nano", [0, 5_000_000_000, -212036])
def test_a_call_is_handed_on_whatever_time_is_left(timeout_nano: int) -> None:
    made, _ = server()
    made.receive_data(
        ttrpc.encode_message(1, REQUEST, request("Configure", b"payload", timeout_nano))
    )
    assert made.next_call() == ttrpc.Call(
        stream=1, service="S", method="Configure", payload=b"payload"
    )
    assert made.next_call() is None


@pytest.mark.parametrize(
    ("stream", "message_type", "body", "code", "text"),
    [
        (2, REQUEST, request(), 3, "StreamID must be odd for client initiated streams"),
        (0, REQUEST, request(), 3, "StreamID must be odd for client initiated streams"),
        (5, REQUEST, request(), 3, "StreamID cannot be re-used and must increment"),
        (3, REQUEST, request(), 3, "StreamID cannot be re-used and must increment"),
        (7, ttrpc.MessageType.DATA, b"", 3, "StreamID is no longer active"),
        (7, REQUEST, b"\xff\xff", 3, "unmarshal request error: "),
    ],
)
def test_a_mistake_is_answered_with_the_go_servers_code_and_text(
    stream: int, message_type: int, body: bytes, code: int, text: str
) -> None:
    made, answers = server(5)
    made.receive_data(ttrpc.encode_message(stream, message_type, body))
    assert made.next_call() is None
    ((answered, response),) = answers()
    assert answered == stream
    assert response.status.code == code
    assert response.status.message.startswith(text)
    # The connection goes on: gaps between numbers are allowed.
    ask(made, 101)


@pytest.mark.parametrize("message_type", [RESPONSE, 9, 255])
def test_a_server_ignores_message_types_it_does_not_know(message_type: int) -> None:
    made, answers = server()
    made.receive_data(ttrpc.encode_message(1, message_type, b"whatever"))
    ask(made, 1)
    assert answers() == []


def test_each_call_is_answered_once_and_in_any_order() -> None:
    made, answers = server(1, 3)
    assert made.unanswered_calls == 2
    made.reply_error(3, 2, "no")
    made.reply(1, b"yes")
    assert made.unanswered_calls == 0
    (refused, kept) = answers()
    assert (refused[0], refused[1].status.code, refused[1].status.message) == (3, 2, "no")
    assert (kept[0], kept[1].payload, kept[1].HasField("status")) == (1, b"yes", False)
    with pytest.raises(LocalProtocolError, match="not waiting"):
        made.reply(1, b"")
    with pytest.raises(LocalProtocolError, match="not waiting"):
        made.reply_error(9, 2, "never asked")


def test_a_refusal_needs_an_error_code_and_survives_any_text() -> None:
    made, answers = server(1)
    with pytest.raises(LocalProtocolError, match="other than 0"):
        made.reply_error(1, 0, "fine?")
    made.reply_error(1, 2, "half a character \ud800 and far too long " + "x" * 100_000)
    ((_, response),) = answers()
    assert response.status.message.startswith("half a character ? and")
    assert len(response.status.message) == ttrpc.MAX_STATUS_TEXT_CHARS


def test_an_answer_that_is_too_large_leaves_the_call_open() -> None:
    made, answers = server(1)
    with pytest.raises(LocalProtocolError, match="at most"):
        made.reply(1, b"x" * ttrpc.MAX_MESSAGE_BODY_BYTES)
    made.reply(1, b"smaller")
    assert len(answers()) == 1


def test_a_flood_of_calls_without_waiting_for_answers_is_refused() -> None:
    made, _ = server(*range(1, 2 * ttrpc.MAX_UNANSWERED_CALLS, 2))
    with pytest.raises(LocalProtocolError, match="unanswered"):
        ask(made, 2 * ttrpc.MAX_UNANSWERED_CALLS + 1)


def test_a_client_numbers_its_calls_with_odd_numbers_and_sorts_its_metadata() -> None:
    trunk = ttrpc.Trunk()
    client = ttrpc.TTRPCClient(trunk, 1)
    assert [client.send_call("S", "M", b"") for _ in range(3)] == [1, 3, 5]
    trunk.data_to_send()
    client.send_call("S", "M", b"p", timeout_nano=-5, metadata={"b": "2", "a": "1"})
    body = trunk.data_to_send()[18:]
    sent = ttrpc_pb2.Request.FromString(body)
    assert [(pair.key, pair.value) for pair in sent.metadata] == [("a", "1"), ("b", "2")]
    assert sent.timeout_nano == -5


def test_a_client_matches_answers_in_any_order_and_ignores_strange_ones() -> None:
    client = ttrpc.TTRPCClient(ttrpc.Trunk(), 1)
    first, second, forgotten = (client.send_call("S", "M", b"") for _ in range(3))
    client.abandon_call(forgotten)
    good = ttrpc_pb2.Response(payload=b"x").SerializeToString()
    bad = ttrpc_pb2.Response(status=ttrpc_pb2.Status(code=99, message="?")).SerializeToString()
    fine = ttrpc_pb2.Response(status=ttrpc_pb2.Status(), payload=b"y").SerializeToString()
    for stream, message_type, body in (
        (forgotten, RESPONSE, good),
        (777, RESPONSE, good),
        (777, 3, b"data nobody asked for"),
        (second, RESPONSE, bad),
        (first, RESPONSE, fine),
        (first, RESPONSE, good),
    ):
        client.receive_data(ttrpc.encode_message(stream, message_type, body))
    assert client.next_reply() == ttrpc.CallReply(
        stream=second, payload=b"", status=ttrpc.CallStatus(code=99, message="?")
    )
    assert client.next_reply() == ttrpc.CallReply(stream=first, payload=b"y", status=None)
    assert client.next_reply() is None


@pytest.mark.parametrize(
    ("message_type", "body", "text"),
    [(1, b"", "type 1"), (3, b"", "type 3"), (2, b"\xff", "cannot be read")],
)
def test_an_open_call_needs_a_response(message_type: int, body: bytes, text: str) -> None:
    client = ttrpc.TTRPCClient(ttrpc.Trunk(), 1)
    stream = client.send_call("S", "M", b"")
    client.receive_data(ttrpc.encode_message(stream, message_type, body))
    with pytest.raises(LocalProtocolError, match=text):
        client.next_reply()


def test_a_client_has_limits_of_its_own() -> None:
    client = ttrpc.TTRPCClient(ttrpc.Trunk(), 1)
    for _ in range(ttrpc.MAX_UNANSWERED_CALLS):
        client.send_call("S", "M", b"")
    with pytest.raises(LocalProtocolError, match="open already"):
        client.send_call("S", "M", b"")
    worn = ttrpc.TTRPCClient(ttrpc.Trunk(), 1)
    worn._next_stream = ttrpc.MAX_STREAM_ID
    assert worn.send_call("S", "M", b"") == ttrpc.MAX_STREAM_ID
    with pytest.raises(LocalProtocolError, match="no stream id left"):
        worn.send_call("S", "M", b"")


def test_a_status_reads_well_in_a_log() -> None:
    assert str(ttrpc.CallStatus(code=2, message="not enough CPUs")) == "not enough CPUs (code 2)"


def test_a_large_message_is_not_kept_once_it_was_read() -> None:
    """A Synchronize has megabytes, and the next request may be long in coming."""
    body = bytes(2 << 20)
    framed = ttrpc.encode_frames(ttrpc.PLUGIN_CONNECTION_ID, ttrpc.encode_message(1, 1, body))
    trunk, reader = ttrpc.Trunk(), ttrpc.MessageReader()
    lengths = []
    tracemalloc.start()
    try:
        for start in range(0, len(framed), 1 << 18):
            trunk.receive_data(framed[start : start + (1 << 18)])
            while (chunk := trunk.next_chunk()) is not None:
                reader.receive_data(chunk[1])
                while (message := reader.next_message()) is not None:
                    lengths.append(len(message[2]))
                    message = None
            chunk = None
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lengths == [len(body)]
    assert kept < 1 << 16


def chunks(trunk: ttrpc.Trunk) -> list[tuple[int, bytes]]:
    found = []
    while (chunk := trunk.next_chunk()) is not None:
        found.append(chunk)
    return found


@pytest.mark.parametrize(
    ("length", "frames"),
    [
        (4096, [4096]),
        (4097, [4096, 1]),
        (8192, [4096, 4096]),
        (607411, [4096, 603315]),  # as containerd 2.1.9 was seen to send it
        ((4 << 20) + 10, [4096, (4 << 20) + 10 - 4096]),
    ],
)
def test_a_message_is_4096_bytes_and_the_rest_in_a_second(length: int, frames: list[int]) -> None:
    """A first frame above 4096 bytes kills the Go reader, many frames overflow its queue."""
    wire = ttrpc.encode_frames(2, b"x" * length)
    seen = []
    while wire:
        connection, size = struct.unpack_from(">II", wire)
        assert connection == 2
        seen.append(size)
        wire = wire[8 + size :]
    assert seen == frames


def test_an_oversized_frame_is_refused_before_its_payload_arrives() -> None:
    trunk = ttrpc.Trunk()
    trunk.receive_data(struct.pack(">II", 1, ttrpc.MAX_FRAME_PAYLOAD_BYTES))
    assert chunks(trunk) == []
    trunk = ttrpc.Trunk()
    trunk.receive_data(struct.pack(">II", 1, ttrpc.MAX_FRAME_PAYLOAD_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="at most"):
        trunk.next_chunk()


def test_feeding_without_draining_is_refused_and_not_buffered_for_ever() -> None:
    trunk = ttrpc.Trunk()
    trunk.receive_data(b"\0" * (ttrpc.MAX_UNREAD_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="drain"):
        trunk.receive_data(b"x")
