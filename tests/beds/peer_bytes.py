"""Byte streams a peer might send: legal, nearly legal, and noise. Shared by properties and fuzzing.

Each stream is built from a `random.Random`, so that a seed is a whole test case.
"""

import random
import struct

from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.pb import ttrpc_pb2
from nri_numa.nri.wire.session import PLUGIN_METHODS, RUNTIME_METHODS
from tests.beds.wire import request_frame

METHODS = sorted({*PLUGIN_METHODS, *RUNTIME_METHODS, "Nope", ""})
EVENTS = [name for name in METHODS if name not in ("Configure", "RegisterPlugin")]
SERVICES = ("nri.pkg.api.v1alpha1.Plugin", "nri.pkg.api.v1alpha1.Runtime", "", "x.y")


def payload(rng: random.Random, method: str) -> bytes:
    """Return a request payload: mostly of the right type, sometimes damaged."""
    kind = PLUGIN_METHODS.get(method) or RUNTIME_METHODS.get(method)
    choice = rng.randrange(20)
    if kind is None or choice == 0:
        return rng.randbytes(rng.randrange(40))
    if kind is pb.SynchronizeRequest:
        data = pb.SynchronizeRequest(
            pods=[pb.PodSandbox(id=str(rng.randrange(9))) for _ in range(rng.randrange(4))],
            more=rng.random() < 0.5,
        ).SerializeToString()
    elif kind is pb.StateChangeEvent:
        data = bytes((8, rng.randrange(18)))
    elif kind is pb.CreateContainerRequest:
        data = pb.CreateContainerRequest(
            container=pb.Container(id="c", args=["a" * rng.randrange(5000)])
        ).SerializeToString()
    else:
        data = b""
    if choice == 1 and data:
        return data[: rng.randrange(len(data))]
    if choice == 2:
        return data + b"\xc2\x3e\x05later"
    return data


def frame(rng: random.Random, streams: dict[int, int]) -> bytes:
    """Return one multiplexer frame or message, with a mistake now and then."""
    connection = rng.choice((1, 1, 1, 2, 2, 0, 7))
    kind = rng.randrange(80)
    if kind == 0:
        return rng.randbytes(rng.randrange(30))
    if kind == 1:
        return struct.pack(">II", connection, 0)
    stream = streams.get(connection, 1)
    streams[connection] = stream + 2
    if kind == 2:
        stream = rng.choice((0, 2, 1, 0xFFFFFFFF))
    method = rng.choice(METHODS if rng.random() < 0.05 else EVENTS)
    if connection == 2 and rng.random() < 0.6:
        message_type = ttrpc.MessageType.RESPONSE.value
        body = ttrpc_pb2.Response(
            status=ttrpc_pb2.Status(code=rng.randrange(4)) if rng.random() < 0.3 else None,
            payload=rng.randbytes(rng.randrange(4)),
        ).SerializeToString()
    else:
        message_type = rng.choice((1, 1, 1, 1, 1, 1, 2, 3, 9))
        body = ttrpc_pb2.Request(
            service=rng.choice((*SERVICES[:1] * 6, *SERVICES)),
            method=method,
            payload=payload(rng, method),
            timeout_nano=rng.choice((0, 2_000_000_000, -212036)),
        ).SerializeToString()
    message = ttrpc.encode_message(stream, message_type, body)
    if kind == 3:
        message = rng.randbytes(1) + message[1:]
    if kind == 4:  # one message in many frames
        step = rng.randrange(1, 20)
        return b"".join(
            ttrpc.encode_frames(connection, message[start : start + step])
            for start in range(0, len(message), step)
        )
    return ttrpc.encode_frames(connection, message)


def conversation(rng: random.Random, length: int) -> bytes:
    """Return a peer's side of a conversation; most begin with a proper handshake."""
    streams: dict[int, int] = {}
    data = b""
    if rng.random() < 0.8:
        data += _plain(1, 1, "Configure") + _plain(1, 3, "Synchronize")
        streams[1] = 5
    return data + b"".join(frame(rng, streams) for _ in range(length))


def _plain(connection: int, stream: int, method: str) -> bytes:
    return request_frame(stream, method, connection=connection)


def cuts(rng: random.Random, data: bytes) -> list[bytes]:
    """Cut data into packets, from single bytes to everything at once."""
    largest = rng.choice((1, 3, 50, 5000, len(data) + 1))
    pieces, start = [], 0
    while start < len(data):
        size = rng.randrange(1, largest + 1)
        pieces.append(data[start : start + size])
        start += size
    return pieces
