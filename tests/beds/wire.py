"""Captured frames, and two sessions joined back to back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nri_numa.errors import RemoteProtocolError
from nri_numa.nri.conversion import answer_request
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.events import ConfigureRequested, RequestAnswered
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.pb import ttrpc_pb2
from nri_numa.nri.wire.session import PluginSession, RuntimeSession
from tests.beds.recording_plugin import RecordingPlugin

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "wire"


def golden(name: str) -> bytes:
    """Return the bytes of one captured exchange."""
    lines = (GOLDEN / f"{name}.hex").read_text().splitlines()
    return bytes.fromhex("".join(line for line in lines if not line.startswith("#")))


def drain(session: Any) -> list[Any]:
    events = []
    while (event := session.next_event()) is not None:
        events.append(event)
    return events


def request_frame(
    stream: int,
    method: str,
    payload: bytes = b"",
    *,
    service: str = "nri.pkg.api.v1alpha1.Plugin",
    connection: int = ttrpc.PLUGIN_CONNECTION_ID,
) -> bytes:
    """Return a request as the peer might send it, legal or not."""
    body = ttrpc_pb2.Request(service=service, method=method, payload=payload)
    message = ttrpc.encode_message(stream, ttrpc.MessageType.REQUEST, body.SerializeToString())
    return ttrpc.encode_frames(connection, message)


class SessionPair:
    """A plugin and a runtime with no socket between them.

    What one side queues reaches the other with `to_plugin` and `to_runtime`; `mangle` may change
    the way the bytes are cut.
    """

    def __init__(self) -> None:
        self.plugin = PluginSession()
        self.runtime = RuntimeSession()

    def to_plugin(self) -> list[Any]:
        """Carry the runtime's bytes over; returns what the plugin sees."""
        self.plugin.receive_data(self.runtime.data_to_send())
        return drain(self.plugin)

    def to_runtime(self) -> list[Any]:
        """Carry the plugin's bytes over; returns what the runtime sees."""
        self.runtime.receive_data(self.plugin.data_to_send())
        return drain(self.runtime)

    def configured(self, request: pb.ConfigureRequest | None = None) -> SessionPair:
        """Bring both to the phase after Configure."""
        self.plugin.register_plugin("numapin", "10")
        (registration,) = self.to_runtime()
        self.runtime.reply(registration.stream)
        self.runtime.call_plugin("Configure", request or pb.ConfigureRequest())
        _, configure = self.to_plugin()
        assert isinstance(configure, ConfigureRequested)
        self.plugin.reply(configure.stream, pb.ConfigureResponse(events=0x68F))
        assert len(self.to_runtime()) == 1
        return self

    def active(self) -> SessionPair:
        """Bring both to the phase after Synchronize."""
        self.configured()
        self.runtime.call_plugin("Synchronize", pb.SynchronizeRequest())
        (event,) = self.to_plugin()
        self.plugin.reply(event.stream)
        assert len(self.to_runtime()) == 1
        return self

    def ask(self, method: str, request: Any, answer: Callable[[Any], None]) -> RequestAnswered:
        """Send a request, let the plugin answer its one event, return what the runtime got."""
        self.runtime.call_plugin(method, request)
        (event,) = self.to_plugin()
        answer(event)
        (answered,) = self.to_runtime()
        assert isinstance(answered, RequestAnswered)
        return answered


def captured_request(name: str) -> tuple[Any, ...]:
    """Return what the agent is asked by one captured request."""
    session = SessionPair().active().plugin
    session.receive_data(golden(name))
    (event,) = drain(session)
    asked: list[Any] = []
    hook = {event.event.name.lower().removesuffix("_sandbox"): lambda *of: asked.extend(of) or ()}
    answer_request(RecordingPlugin(**hook), event)
    return tuple(asked)


def answer(session: Any, event: Any) -> None:
    """Answer the way a plugin or a runtime would, so that the phases move on."""
    if isinstance(event, ev.ConfigureRequested):
        session.reply(event.stream, pb.ConfigureResponse(events=1))
    elif not isinstance(
        event, ev.RegistrationAnswered | ev.UpdateContainersAnswered | ev.RequestAnswered
    ):
        session.reply(event.stream)


def feed(session: Any, packets: list[bytes]) -> tuple[list[str], str, bytes]:
    """Return (events, how it ended, bytes sent) of a session fed with packets."""
    seen: list[str] = []
    try:
        for packet in packets:
            session.receive_data(packet)
            while (event := session.next_event()) is not None:
                seen.append(repr(event))
                answer(session, event)
    except RemoteProtocolError as error:
        return seen, str(error), session.data_to_send()
    return seen, "", session.data_to_send()
