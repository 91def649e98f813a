"""The embedded runtime's end of one plugin connection, and the faults it can put into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import Message

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
        drop_in: the method whose next request is cut in the middle, with the connection.
        unknown_fields: requests have a field 1000, as a peer of a later release may add one.
        reports_ignored: an update that fails fails UpdateContainers, whatever the plugin says.
    """

    configure_first: bool = False
    delays: dict[str, float] = field(default_factory=dict)
    drop_in: str = ""
    unknown_fields: bool = False
    reports_ignored: bool = False
    metadata: dict[str, str] = field(default_factory=lambda: dict(CONTAINERD_NAMESPACE))


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
        name = ttrpc.Code(status.code).name.title().replace("_", "")  # as gRPC prints it
        super().__init__(f"rpc error: code = {name} desc = {status.message}")


class PluginPeer:
    """One plugin, from the runtime's side.

    Attributes:
        launched: pre-installed; name and index come from the runtime.
    """

    def __init__(
        self,
        profile: RuntimeProfile,
        faults: Faults,
        limit: float,
        on_updates: Callable[[PluginPeer, ev.UpdateContainersRequested], None],
        on_call: Callable[[CallRecord], None],
    ) -> None:
        """Make the peer of a connection that is being accepted; needs a running loop."""
        self.name = ""
        self.index = ""
        self.mask = 0
        self.launched = False
        self.session = RuntimeSession()
        self.connection = SessionTransport(self.session, self._on_event)
        loop = asyncio.get_running_loop()
        self.registration: asyncio.Future[ev.RegisterRequested] = loop.create_future()
        self._per_event = profile.per_event
        self._faults, self._limit = faults, limit
        self._on_updates = on_updates
        self._on_call = on_call
        self._calls: dict[int, asyncio.Future[ev.RequestAnswered]] = {}

    @property
    def id(self) -> str:
        """``NN-name``, as in logs and conflict texts."""
        return f"{self.index}-{self.name}"

    def is_open(self) -> bool:
        """Whether the connection is neither closed nor about to be."""
        return not (self.connection.is_closing() or self.connection.ended.done())

    def subscribes(self, event: Event) -> bool:
        return bool(self.mask & event.mask_bit)

    def _on_event(self, event: ev.RuntimeSessionEvent) -> None:
        match event:
            case ev.RegisterRequested():
                if not self.registration.done():
                    self.registration.set_result(event)
            case ev.RequestAnswered():
                future = self._calls.pop(event.stream, None)
                if future is not None and not future.done():
                    future.set_result(event)
            case ev.UpdateContainersRequested():
                self._on_updates(self, event)

    def answer(self, stream: int, response: Message | None = None) -> None:
        self.session.reply(stream, response)
        self.connection.flush_session()

    def refuse(self, stream: int, message: str) -> None:
        self.session.reply_error(stream, message)
        self.connection.flush_session()

    async def ask(self, event: Event, **parts: Any) -> Any:
        """The plugin's answer to one of the events that have a result."""
        payload = await self.call(event.method_name, PLUGIN_METHODS[event.method_name](**parts))
        return getattr(pb, f"{event.method_name}Response").FromString(payload)

    async def call(self, method: str, request: Message, *, limit: float | None = None) -> bytes:
        """Send a request and return the serialised response.

        `limit`: seconds the plugin has; as long as for any when None.

        Raises:
            PluginLost: no answer; the connection is closed.
            PluginStatus: an error answer.
        """
        loop = asyncio.get_running_loop()
        begun, outcome = loop.time(), "ok"
        try:
            return await self._call(method, request, self._limit if limit is None else limit)
        except (PluginLost, PluginStatus) as error:
            outcome = str(error)
            raise
        finally:
            seconds = loop.time() - begun
            self._on_call(
                CallRecord(plugin=self.id, method=method, seconds=seconds, outcome=outcome)
            )

    async def _call(self, method: str, request: Message, limit: float) -> bytes:
        faults = self._faults
        if delay := faults.delays.get(method, 0.0):
            await asyncio.sleep(delay)
        if not self.is_open():
            raise PluginLost("the connection is closed")
        if faults.unknown_fields:
            later = request.SerializeToString() + b"\xc2\x3e\x05later"
            request = PLUGIN_METHODS[method].FromString(later)
        stream = self.session.call_plugin(
            method, request, timeout_nano=int(limit * 1e9), metadata=faults.metadata
        )
        future: asyncio.Future[ev.RequestAnswered] = asyncio.get_running_loop().create_future()
        self._calls[stream] = future
        if faults.drop_in == method:
            faults.drop_in = ""
            data = self.session.data_to_send()
            assert self.connection._transport is not None
            self.connection._transport.write(data[: len(data) // 2])
            self.connection.close_or_abort("dropped on purpose")
        self.connection.flush_session()
        ended = self.connection.ended
        try:
            waited: set[asyncio.Future[Any]] = {future, ended}
            await asyncio.wait(waited, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._calls.pop(stream, None)
            if not ended.done():
                self.session.abandon_call(stream)
        if not future.done():
            if ended.done():
                raise PluginLost(ended.result().detail)
            self.connection.close_or_abort(f"no answer to {method} within {limit:g} s")
            raise PluginLost(f"no answer to {method} within {limit:g} s")
        if (status := future.result().status) is not None:
            raise PluginStatus(status)
        return future.result().payload

    async def notify(
        self, event: Event, pod: pb.PodSandbox, container: pb.Container | None
    ) -> None:
        """Send one of the nine events without a result, in the style of this connection.

        Raises:
            PluginLost: no answer.
            PluginStatus: an error answer.
        """
        parts = {"pod": pod} if container is None else {"pod": pod, "container": container}
        if self._per_event:
            await self.call(event.method_name, PLUGIN_METHODS[event.method_name](**parts))
        else:
            await self.call("StateChange", pb.StateChangeEvent(event=event.name, **parts))
