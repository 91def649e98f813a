"""The embedded runtime's end of one plugin connection, and the faults it can put into it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from nri_numa.nri.transport import SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PLUGIN_METHODS, RuntimeSession
from nri_numa.nri.wire.versions import Event

EVENTS_OF_0_2: Final = 0x07FF
"""What every runtime knows: the eleven events of NRI 0.2."""

EVENTS_OF_0_10: Final = 0x3FFF
"""With the pod updates and the validation of NRI 0.10."""

CONTAINERD_NAMESPACE: Final = {"containerd-namespace-ttrpc": "k8s.io"}
"""The metadata containerd sends along."""

MessageT = TypeVar("MessageT", bound=Message)

_UNKNOWN_FIELD: Final = b"\xc2\x3e\x05later"
"""Field 1000, a string: what a peer of a later release may add to any message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeProfile:
    """How a runtime of a certain version behaves.

    Attributes:
        nri_version: what it tells as the NRI release; empty before NRI 0.12.
        tells_timeouts: NRI 0.7 and later tell their timeouts.
        per_event: one method for each event; False sends StateChange, as older ones do.
    """

    name: str = "containerd"
    version: str = "v2.4.0"
    nri_version: str = "v0.12.2"
    tells_timeouts: bool = True
    events: int = EVENTS_OF_0_10
    per_event: bool = True
    update_failures_as_list: bool = False


CONTAINERD_2_4: Final = RuntimeProfile()
CONTAINERD_2_1: Final = RuntimeProfile(
    version="2.1.9+unknown", nri_version="", events=EVENTS_OF_0_2, per_event=False
)
CONTAINERD_1_7: Final = RuntimeProfile(
    version="1.7.24~ds1",
    nri_version="",
    tells_timeouts=False,
    events=EVENTS_OF_0_2,
    per_event=False,
)
CRI_O_1_35: Final = RuntimeProfile(name="cri-o", version="1.35.0", nri_version="", per_event=False)


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong on purpose. The defaults do nothing; change them while the runtime runs.

    Attributes:
        delays: seconds to wait before a request of this method is sent, by method.
        empty_slices: number of empty Synchronize slices before the real ones.
        unknown_connection: before each request send frames of connections nobody knows, and an
            empty frame.
        split: write in pieces of this many bytes, with the loop running in between; 0 for whole.
    """

    configure_first: bool = False
    delays: dict[str, float] = field(default_factory=dict)
    drop_in: str = ""
    bogus_replies: bool = False
    empty_slices: int = 0
    unknown_fields: bool = False
    metadata: dict[str, str] = field(default_factory=lambda: dict(CONTAINERD_NAMESPACE))
    negative_timeout: bool = False
    even_stream: bool = False
    unknown_connection: bool = False
    split: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One request to a plugin, for reports and tests."""

    plugin: str
    method: str
    seconds: float
    outcome: str


class PluginLost(Exception):
    """The plugin did not answer in time, hung up, or broke the protocol; it is closed now."""


class PluginStatus(Exception):
    """The plugin answered with an error."""

    def __init__(self, status: ttrpc.CallStatus) -> None:
        super().__init__(f"rpc error: code = {_code_name(status.code)} desc = {status.message}")
        self.status = status


class _FaultyTransport(SessionTransport[ev.RuntimeEvent]):
    """Writes in pieces when asked to; otherwise a plain transport."""

    def __init__(
        self,
        session: RuntimeSession,
        on_event: Callable[[ev.RuntimeEvent], None],
        faults: Faults,
    ) -> None:
        super().__init__(session, on_event)
        self._faults = faults
        self._pieces = b""
        self._writer: asyncio.Task[None] | None = None

    def flush(self) -> None:
        """Write what is queued, whole or in pieces."""
        if not self._faults.split and self._writer is None:
            super().flush()
            return
        self._pieces += self._session.data_to_send()
        if self._writer is None and self._pieces:
            self._writer = asyncio.get_running_loop().create_task(self._write_pieces())

    async def _write_pieces(self) -> None:
        while self._pieces and self._transport is not None:
            size = self._faults.split or len(self._pieces)
            piece, self._pieces = self._pieces[:size], self._pieces[size:]
            if not self._transport.is_closing():
                self._transport.write(piece)
            await asyncio.sleep(0)
        self._writer = None

    def write_raw(self, data: bytes) -> None:
        """Write bytes the session did not make."""
        if self._faults.split or self._writer is not None:
            self._pieces += data
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


class PluginPeer:
    """One plugin, from the runtime's side.

    Attributes:
        launched: pre-installed; name and index come from the runtime.
    """

    def __init__(
        self,
        profile: RuntimeProfile,
        faults: Faults,
        on_updates: Callable[[PluginPeer, ev.UpdateContainersRequested], None],
        on_call: Callable[[CallRecord], None],
    ) -> None:
        """Make the peer of a connection that is being accepted; needs a running loop."""
        self.name = ""
        self.index = ""
        self.mask = 0
        self.launched = False
        self.session = RuntimeSession()
        self.connection = _FaultyTransport(self.session, self._on_event, faults)
        loop = asyncio.get_running_loop()
        self.registration: asyncio.Future[ev.RegisterRequested] = loop.create_future()
        self._per_event = profile.per_event
        self._faults = faults
        self._on_updates = on_updates
        self._on_call = on_call
        self._calls: dict[int, asyncio.Future[ev.Answered]] = {}
        self._even = itertools.count(2, 2)

    @property
    def id(self) -> str:
        """``NN-name``, as in logs and conflict texts."""
        return f"{self.index}-{self.name}"

    def is_open(self) -> bool:
        """Whether the connection is neither closed nor about to be."""
        return not (self.connection.is_closing() or self.connection.ended.done())

    def subscribes(self, event: Event) -> bool:
        """Tell whether the plugin wants this event."""
        return bool(self.mask & event.bit)

    def _on_event(self, event: ev.RuntimeEvent) -> None:
        match event:
            case ev.RegisterRequested():
                if not self.registration.done():
                    self.registration.set_result(event)
            case ev.Answered():
                future = self._calls.pop(event.stream, None)
                if future is not None and not future.done():
                    future.set_result(event)
            case ev.UpdateContainersRequested():
                self._on_updates(self, event)

    def answer(self, stream: int, response: Message | None = None) -> None:
        self._bogus(stream + 1000)
        self.session.reply(stream, response)
        self.connection.flush()
        self._bogus(stream)

    def refuse(self, stream: int, message: str) -> None:
        """Answer a call of the plugin with an error."""
        self.session.refuse(stream, message)
        self.connection.flush()

    def _bogus(self, stream: int) -> None:
        if self._faults.bogus_replies:
            message = ttrpc.encode_message(stream, ttrpc.MessageType.RESPONSE, b"")
            self.connection.write_raw(ttrpc.encode_frames(ttrpc.RUNTIME_CONNECTION, message))

    async def call(self, method: str, request: Message, *, limit: float) -> bytes:
        """Send a request and return the serialised response.

        `limit`: seconds the plugin has.

        Raises:
            PluginLost: no answer; the connection is closed.
            PluginStatus: an error answer.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        outcome = "ok"
        try:
            return await self._call(method, request, limit)
        except (PluginLost, PluginStatus) as error:
            outcome = str(error)
            raise
        finally:
            self._on_call(
                CallRecord(
                    plugin=self.id, method=method, seconds=loop.time() - begun, outcome=outcome
                )
            )

    async def _call(self, method: str, request: Message, limit: float) -> bytes:
        faults = self._faults
        if delay := faults.delays.get(method, 0.0):
            await asyncio.sleep(delay)
        if not self.is_open():
            raise PluginLost("the connection is closed")
        if faults.unknown_fields:
            request = PLUGIN_METHODS[method].FromString(
                request.SerializeToString() + _UNKNOWN_FIELD
            )
        self._noise()
        stream = self.session.request(
            method,
            request,
            timeout_nano=-212036 if faults.negative_timeout else int(limit * 1e9),
            metadata=faults.metadata,
        )
        future: asyncio.Future[ev.Answered] = asyncio.get_running_loop().create_future()
        self._calls[stream] = future
        if faults.drop_in == method:
            faults.drop_in = ""
            data = self.session.data_to_send()
            self.connection.write_raw(data[: len(data) // 2])
            self.connection.close("dropped on purpose")
        self.connection.flush()
        try:
            waited: set[asyncio.Future[Any]] = {future, self.connection.ended}
            await asyncio.wait(
                waited,
                timeout=limit,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._calls.pop(stream, None)
            if not self.connection.ended.done():
                self.session.forget(stream)
        if not future.done():
            if not self.connection.ended.done():
                self.connection.close(f"no answer to {method} within {limit:g} s")
                raise PluginLost(f"no answer to {method} within {limit:g} s")
            raise PluginLost(self.connection.ended.result().detail)
        answered = future.result()
        if answered.status is not None:
            raise PluginStatus(answered.status)
        return answered.payload

    def _noise(self) -> None:
        if self._faults.even_stream:
            body = b""
            message = ttrpc.encode_message(next(self._even), ttrpc.MessageType.REQUEST, body)
            self.connection.write_raw(ttrpc.encode_frames(ttrpc.PLUGIN_CONNECTION, message))
        if self._faults.unknown_connection:
            self.connection.write_raw(ttrpc.encode_frames(0, b"nobody reads this"))
            self.connection.write_raw(ttrpc.encode_frames(7, b"nor this"))
            self.connection.write_raw(ttrpc.encode_frames(ttrpc.PLUGIN_CONNECTION, b""))

    async def notify(
        self,
        event: Event,
        pod: pb.PodSandbox,
        container: pb.Container | None,
        *,
        limit: float,
    ) -> None:
        """Send one of the nine events without a result, in the style of this connection.

        Raises:
            PluginLost: no answer.
            PluginStatus: an error answer.
        """
        if self._per_event:
            method = event.method
            kind = PLUGIN_METHODS[method]
            parts = {"pod": pod} if container is None else {"pod": pod, "container": container}
            await self.call(method, kind(**parts), limit=limit)
            return
        change = pb.StateChangeEvent(event=event.name, pod=pod)
        if container is not None:
            change.container.CopyFrom(container)
        await self.call("StateChange", change, limit=limit)


def parse_answer(kind: type[MessageT], payload: bytes) -> MessageT:
    """Parse the payload of an answer.

    Raises:
        PluginStatus: the payload cannot be parsed; the operation fails, the plugin stays.
    """
    try:
        return kind.FromString(payload)
    except DecodeError as error:
        raise PluginStatus(
            ttrpc.CallStatus(code=ttrpc.Code.UNKNOWN, message=f"unreadable response: {error}")
        ) from error


def _code_name(code: int) -> str:
    """Return a code the way gRPC prints it: ``Unknown``, ``InvalidArgument``."""
    try:
        return ttrpc.Code(code).name.title().replace("_", "")
    except ValueError:
        return f"Code({code})"
