"""One NRI connection without its socket: bytes in, events out; answers in, bytes out.

Use of either role::

    session.receive_data(data)                          # only buffers
    while (event := session.next_event()) is not None:  # parses one event
        ...                                             # session.reply(event.stream, response)
        transport.write(session.data_to_send())

Answer each event before fetching the next one: the answer changes the phase, and a runtime may send
Synchronize in the same packet as Configure.

Phases. `PHASE_TRANSITIONS` has every change of phase, for both sides, since both see the same
triggers. A connection begins `CONNECTED`. The plugin registers; the runtime configures it,
synchronizes it in one or more slices, and then sends events. The *answer* to RegisterPlugin is not
in the table: containerd sends it from another thread, and it can arrive after Configure.

Events are legal from `CONFIGURED` on, because NRI before 0.7 does not synchronize the plugins that
it launches. A second Synchronize is legal too; it replaces the first one.

Any error, local or remote, ends in `DEAD`, and the end of the socket in `CLOSED`; both are final.

Errors. An illegal call raises `LocalProtocolError`. An illegal message of the peer raises the same
error inside, and `next_event` alone turns it into `RemoteProtocolError`. After either from
`next_event` the session is dead and every call raises. Any other exception is a bug in this module.
Errors that a caller can correct (an answer too large, a stream that is not open) leave the session
alive.

Memory. Besides the bytes just received a session holds at most one unfinished message for each of
the two connections (4 MiB; 16 MiB for requests to a plugin), 64 open calls each way, and the slices
of one Synchronize (`PluginSession.max_objects` and `max_bytes`).
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from nri_numa.errors import LocalProtocolError, RemoteProtocolError
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.ttrpc import PLUGIN_CONNECTION_ID, RUNTIME_CONNECTION_ID
from nri_numa.nri.wire.versions import (
    AGENT_EVENTS,
    ALL_EVENTS,
    NRI_VERSION,
    Event,
    identity_problem,
)
from nri_numa.runtime import RuntimeInfo

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"

PLUGIN_METHODS: Final[Mapping[str, type[Message]]] = {
    "Configure": pb.ConfigureRequest,
    "Synchronize": pb.SynchronizeRequest,
    "Shutdown": pb.Empty,
    "StateChange": pb.StateChangeEvent,
    **{event.method_name: getattr(pb, f"{event.method_name}Request") for event in Event},
}
"""Methods of the Plugin service, with their request messages."""
RUNTIME_METHODS: Final[
    Mapping[str, type[pb.RegisterPluginRequest | pb.UpdateContainersRequest]]
] = {
    "RegisterPlugin": pb.RegisterPluginRequest,
    "UpdateContainers": pb.UpdateContainersRequest,
}
"""Methods of the Runtime service, with their request messages."""
_EVENT_BY_METHOD: Final[Mapping[str, Event]] = {
    event.method_name: event for event in Event if event.mask_bit & ALL_EVENTS
}
"""Subscribed events, by method."""
_STATE_CHANGE_EVENT_BY_NUMBER: Final[Mapping[int, Event]] = {
    event.value: event
    for event in _EVENT_BY_METHOD.values()
    if event.mask_bit & AGENT_EVENTS
    and event not in (Event.CREATE_CONTAINER, Event.UPDATE_CONTAINER, Event.STOP_CONTAINER)
}
"""Events with a method of their own since NRI 0.12; before, StateChange reports them."""


class Phase(enum.Enum):
    """Phase of a connection."""

    CONNECTED = "connected"
    REGISTERING = "registering"
    CONFIGURING = "configuring"
    CONFIGURED = "configured"
    SYNCHRONIZING = "synchronizing"
    ACTIVE = "active"
    CLOSED = "closed"
    DEAD = "dead"


class ConnectionPhaseTrigger(enum.Enum):
    """Trigger of a change of phase."""

    REGISTER = "RegisterPlugin"
    CONFIGURE = "Configure"
    CONFIGURE_ANSWERED = "the answer to Configure"
    SYNCHRONIZE = "Synchronize"
    SYNCHRONIZE_ANSWERED = "the answer to Synchronize"
    EVENT = "an event"
    UPDATE_CONTAINERS = "UpdateContainers"
    SHUTDOWN = "Shutdown"


_PROGRESS_TRANSITIONS: Final[Mapping[Phase, Mapping[ConnectionPhaseTrigger, Phase]]] = {
    Phase.CONNECTED: {ConnectionPhaseTrigger.REGISTER: Phase.REGISTERING},
    Phase.REGISTERING: {ConnectionPhaseTrigger.CONFIGURE: Phase.CONFIGURING},
    Phase.CONFIGURING: {ConnectionPhaseTrigger.CONFIGURE_ANSWERED: Phase.CONFIGURED},
    Phase.CONFIGURED: {
        ConnectionPhaseTrigger.SYNCHRONIZE: Phase.SYNCHRONIZING,
        ConnectionPhaseTrigger.EVENT: Phase.CONFIGURED,
        ConnectionPhaseTrigger.UPDATE_CONTAINERS: Phase.CONFIGURED,
    },
    Phase.SYNCHRONIZING: {
        ConnectionPhaseTrigger.SYNCHRONIZE: Phase.SYNCHRONIZING,
        ConnectionPhaseTrigger.SYNCHRONIZE_ANSWERED: Phase.ACTIVE,
        # The update and the first slice may cross on the wire.
        ConnectionPhaseTrigger.UPDATE_CONTAINERS: Phase.SYNCHRONIZING,
    },
    Phase.ACTIVE: {
        ConnectionPhaseTrigger.SYNCHRONIZE: Phase.SYNCHRONIZING,
        ConnectionPhaseTrigger.EVENT: Phase.ACTIVE,
        ConnectionPhaseTrigger.UPDATE_CONTAINERS: Phase.ACTIVE,
    },
}

PHASE_TRANSITIONS: Final[Mapping[Phase, Mapping[ConnectionPhaseTrigger, Phase]]] = {
    phase: {
        # Once registered: real runtimes accept a second registration and ignore it, and the end of
        # the socket follows a Shutdown.
        **(
            {}
            if phase is Phase.CONNECTED
            else {ConnectionPhaseTrigger.REGISTER: phase, ConnectionPhaseTrigger.SHUTDOWN: phase}
        ),
        **steps,
    }
    for phase, steps in _PROGRESS_TRANSITIONS.items()
} | {Phase.CLOSED: {}, Phase.DEAD: {}}
"""Next phase by phase and trigger; missing triggers are illegal."""


EventT = TypeVar("EventT")
RequestT = TypeVar("RequestT", bound=Message)


class SessionBase(ABC, Generic[EventT]):
    """Common part of both roles: trunk, phase, and the conversion of errors to remote ones."""

    _serves: int
    _calls: int
    _max_request = ttrpc.MAX_MESSAGE_BODY_BYTES

    def __init__(self) -> None:
        self._trunk = ttrpc.Trunk()
        self._server = ttrpc.TTRPCServer(self._trunk, self._serves, max_body=self._max_request)
        self._client = ttrpc.TTRPCClient(self._trunk, self._calls)
        self._phase = Phase.CONNECTED
        self._ready: int | None = None  # connection whose reader may have whole messages

    @property
    def phase(self) -> Phase:
        """Phase of the connection."""
        return self._phase

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the socket. Nothing is parsed before `next_event`."""
        self._check_alive()
        self._trunk.receive_data(data)

    def receive_eof(self) -> None:
        """Note that the socket has ended; further calls but `data_to_send` raise."""
        if self._phase is not Phase.DEAD:
            self._phase = Phase.CLOSED

    def next_event(self) -> EventT | None:
        """Return the next event; None when more bytes are needed."""
        self._check_alive()
        try:
            return self._decode_next_event()
        except LocalProtocolError as error:
            self._phase = Phase.DEAD
            raise RemoteProtocolError(str(error)) from error
        except BaseException:
            self._phase = Phase.DEAD  # an internal error: the state is no longer known
            raise

    def data_to_send(self) -> bytes:
        """Return the bytes to write to the socket, whole messages in order, and drop them."""
        return self._trunk.data_to_send()

    def abandon_call(self, stream: int) -> None:
        """Stop waiting for an answer; a late answer is no event."""
        self._client.abandon_call(stream)

    def reply(self, stream: int, response: Message | None = None) -> None:
        """Answer a request with at most 4 MiB; None is the empty response."""
        self._check_alive()
        self._server.reply(stream, b"" if response is None else response.SerializeToString())

    def reply_error(self, stream: int, message: str, code: int = ttrpc.Code.UNKNOWN) -> None:
        """Answer a request with an error. A handler's plain error has code 2."""
        self._check_alive()
        self._server.reply_error(stream, code, message)

    def _decode_next_event(self) -> EventT | None:
        while True:
            if self._ready == self._serves:
                while (call := self._server.next_call()) is not None:
                    if (event := self._event_from_call(call)) is not None:
                        return event
            elif self._ready == self._calls and (reply := self._client.next_reply()) is not None:
                return self._event_from_reply(reply)
            self._ready = None
            chunk = self._trunk.next_chunk()
            if chunk is None:
                return None
            self._ready, data = chunk
            if self._ready == self._serves:
                self._server.receive_data(data)
            elif self._ready == self._calls:
                self._client.receive_data(data)
            # Any other connection: dropped, as the Go multiplexer does.

    @abstractmethod
    def _event_from_call(self, call: ttrpc.Call) -> EventT | None:
        """Turn a call into an event, or answer it here and return None."""

    @abstractmethod
    def _event_from_reply(self, reply: ttrpc.CallReply) -> EventT:
        """Turn the answer to an own call into an event."""

    def _parse_request(
        self, call: ttrpc.Call, service: str, methods: Mapping[str, type[RequestT]]
    ) -> RequestT | None:
        """Return the request message of a call; None if it was answered with an error here.

        Codes and texts are those of the Go server; runtimes act on code 12.
        """
        kind = methods.get(call.method) if call.service == service else None
        if kind is None:
            is_served = call.service == service
            subject = f"method {call.method}" if is_served else f"service {call.service}"
            self._server.reply_error(call.stream, ttrpc.Code.UNIMPLEMENTED, subject)
            return None
        try:
            return kind.FromString(call.payload)
        except DecodeError as error:
            self._server.reply_error(
                call.stream, ttrpc.Code.INTERNAL, f"ttrpc: error unmarshalling payload: {error}"
            )
            return None

    def _advance_phase(self, trigger: ConnectionPhaseTrigger) -> None:
        self._phase = self._phase_after(trigger)

    def _phase_after(self, trigger: ConnectionPhaseTrigger) -> Phase:
        next_phase = PHASE_TRANSITIONS[self._phase].get(trigger)
        if next_phase is None:
            raise LocalProtocolError(f"{trigger.value} is illegal while {self._phase.value}")
        return next_phase

    def _check_alive(self) -> None:
        if self._phase is Phase.DEAD or self._phase is Phase.CLOSED:
            raise LocalProtocolError(f"the session is {self._phase.value}")


class PluginSession(SessionBase[ev.PluginSessionEvent]):
    """Session of a plugin: registers, serves the Plugin service, may call UpdateContainers."""

    _serves = PLUGIN_CONNECTION_ID
    _calls = RUNTIME_CONNECTION_ID
    _max_request = ttrpc.MAX_REQUEST_TO_PLUGIN_BYTES

    # Limits of one Synchronize over all slices, far above a node: 110 pods is the usual maximum, a
    # container with its environment, mounts and devices takes 5 to 200 kB.
    max_objects = 50_000
    max_bytes = 256 << 20

    def __init__(self) -> None:
        super().__init__()
        self._registration: int | None = None
        # Streams of the requests whose answer changes the phase.
        self._configure: int | None = None
        self._synchronize: int | None = None
        # Slices of a Synchronize that has not ended yet.
        self._pods: list[pb.PodSandbox] = []
        self._containers: list[pb.Container] = []
        self._size = 0

    def register_plugin(self, name: str, index: str, *, timeout: float = 0.0) -> None:
        """Send RegisterPlugin; once for each connection.

        The name does not include the index. Runtimes call plugins in ascending order of their
        indices, and only log the release of NRI. A ``timeout`` of 0 seconds means none.

        Raises:
            LocalProtocolError: registered already, or the name or index cannot be accepted.
        """
        self._check_alive()
        if self._phase is not Phase.CONNECTED:
            raise LocalProtocolError("this connection is registered already")
        if (problem := identity_problem(name, index)) is not None:
            raise LocalProtocolError(problem)
        request = pb.RegisterPluginRequest(
            plugin_name=name, plugin_idx=index, NRI_version=NRI_VERSION
        )
        self._registration = self._client.send_call(
            RUNTIME_SERVICE,
            "RegisterPlugin",
            request.SerializeToString(),
            timeout_nano=int(timeout * 1e9),
        )
        self._advance_phase(ConnectionPhaseTrigger.REGISTER)

    def update_containers(
        self, request: pb.UpdateContainersRequest, *, timeout: float = 0.0
    ) -> int:
        """Send UpdateContainers and return the stream of its answer.

        Never while a request waits for an answer: the runtime holds the lock that this call needs.
        A ``timeout`` of 0 seconds means none.

        Raises:
            LocalProtocolError: not configured yet, or a request is unanswered.
        """
        self._check_alive()
        if self._server.unanswered_calls:
            raise LocalProtocolError("UpdateContainers before the open request is answered")
        self._advance_phase(ConnectionPhaseTrigger.UPDATE_CONTAINERS)
        return self._client.send_call(
            RUNTIME_SERVICE,
            "UpdateContainers",
            request.SerializeToString(),
            timeout_nano=int(timeout * 1e9),
        )

    def reply(self, stream: int, response: Message | None = None) -> None:
        """Answer a request; the answers to Configure and Synchronize change the phase."""
        super().reply(stream, response)
        if stream == self._configure:
            self._configure = None
            self._advance_phase(ConnectionPhaseTrigger.CONFIGURE_ANSWERED)
        elif stream == self._synchronize:
            self._synchronize = None
            self._advance_phase(ConnectionPhaseTrigger.SYNCHRONIZE_ANSWERED)

    def _event_from_reply(self, reply: ttrpc.CallReply) -> ev.PluginSessionEvent:
        if reply.stream == self._registration:
            return ev.RegistrationAnswered(reply.status)
        # The client reports answers to open calls only, and all other calls are updates.
        try:
            pb.UpdateContainersResponse.FromString(reply.payload)
        except DecodeError as error:
            raise LocalProtocolError(f"UpdateContainersResponse: {error}") from error
        return ev.UpdateContainersAnswered(reply.stream, reply.status)

    def _event_from_call(self, call: ttrpc.Call) -> ev.PluginSessionEvent | None:
        request = self._parse_request(call, PLUGIN_SERVICE, PLUGIN_METHODS)
        stream = call.stream
        match request:
            case None:
                return None
            case pb.SynchronizeRequest():
                self._advance_phase(ConnectionPhaseTrigger.SYNCHRONIZE)
                return self._collect_slice(call, request)
            case pb.ConfigureRequest():
                self._advance_phase(ConnectionPhaseTrigger.CONFIGURE)
                self._configure = stream
                return ev.ConfigureRequested(stream, _runtime_info(request))
            case pb.Empty():
                self._advance_phase(ConnectionPhaseTrigger.SHUTDOWN)
                return ev.ShutdownRequested(stream)
            case _:
                self._advance_phase(ConnectionPhaseTrigger.EVENT)
                if isinstance(request, pb.StateChangeEvent):
                    event = _STATE_CHANGE_EVENT_BY_NUMBER.get(request.event)
                else:
                    event = _EVENT_BY_METHOD.get(call.method)
                if event is None:
                    # Never subscribed to, or of a later release: no reason to fail the runtime.
                    self._server.reply(stream, b"")
                    return None
                return ev.EventRequested(stream, event, request, call.traceparent)

    def _collect_slice(
        self, call: ttrpc.Call, request: pb.SynchronizeRequest
    ) -> ev.PluginSessionEvent | None:
        """Collect one slice; the last one becomes the event, the others are answered here.

        Runtimes up to NRI 0.12 with few pods and big containers send thousands of empty slices;
        each takes one parse and one 22-byte answer.
        """
        self._size += len(call.payload)
        self._pods.extend(request.pods)
        self._containers.extend(request.containers)
        objects = len(self._pods) + len(self._containers)
        if objects > self.max_objects or self._size > self.max_bytes:
            raise LocalProtocolError(
                f"Synchronize brought {objects} pods and containers in {self._size} bytes; at most"
                f" {self.max_objects} in {self.max_bytes} are taken"
            )
        if request.more:
            self._server.reply(call.stream, pb.SynchronizeResponse(more=True).SerializeToString())
            return None
        event = ev.SynchronizeRequested(call.stream, self._pods, self._containers, call.traceparent)
        self._pods, self._containers, self._size = [], [], 0
        self._synchronize = call.stream
        return event


class RuntimeSession(SessionBase[ev.RuntimeSessionEvent]):
    """Session of a runtime: serves the Runtime service, calls the Plugin service."""

    _serves = RUNTIME_CONNECTION_ID
    _calls = PLUGIN_CONNECTION_ID

    def __init__(self) -> None:
        super().__init__()
        self._methods: dict[int, tuple[str, bool]] = {}

    def call_plugin(
        self,
        method: str,
        request: Message,
        *,
        timeout_nano: int = 0,
        metadata: Mapping[str, str] | None = None,
    ) -> int:
        """Call a method of the Plugin service and return the stream of its answer."""
        self._check_alive()
        if method not in PLUGIN_METHODS:
            raise LocalProtocolError(f"the Plugin service has no method {method}")
        trigger = _TRIGGER_BY_METHOD.get(method, ConnectionPhaseTrigger.EVENT)
        next_phase = self._phase_after(trigger)
        stream = self._client.send_call(
            PLUGIN_SERVICE,
            method,
            request.SerializeToString(),
            timeout_nano=timeout_nano,
            metadata=metadata,
        )
        self._phase = next_phase
        is_last_slice = isinstance(request, pb.SynchronizeRequest) and not request.more
        self._methods[stream] = (method, is_last_slice)
        return stream

    def abandon_call(self, stream: int) -> None:
        """Stop waiting for an answer; a late answer is no event."""
        self._methods.pop(stream, None)
        super().abandon_call(stream)

    def _event_from_reply(self, reply: ttrpc.CallReply) -> ev.RuntimeSessionEvent:
        method, is_last_slice = self._methods.pop(reply.stream)
        if reply.status is None:
            if method == "Configure":
                self._advance_phase(ConnectionPhaseTrigger.CONFIGURE_ANSWERED)
            elif is_last_slice:
                self._advance_phase(ConnectionPhaseTrigger.SYNCHRONIZE_ANSWERED)
        return ev.RequestAnswered(reply.stream, method, reply.payload, reply.status)

    def _event_from_call(self, call: ttrpc.Call) -> ev.RuntimeSessionEvent | None:
        request = self._parse_request(call, RUNTIME_SERVICE, RUNTIME_METHODS)
        if request is None:
            return None
        if isinstance(request, pb.RegisterPluginRequest):
            is_first_registration = self._phase is Phase.CONNECTED
            self._advance_phase(ConnectionPhaseTrigger.REGISTER)
            if not is_first_registration:  # accepted and ignored, as by real runtimes
                self._server.reply(call.stream, b"")
                return None
            return ev.RegisterRequested(
                call.stream, request.plugin_name, request.plugin_idx, request.NRI_version
            )
        self._advance_phase(ConnectionPhaseTrigger.UPDATE_CONTAINERS)
        return ev.UpdateContainersRequested(call.stream, request)


_TRIGGER_BY_METHOD: Final = {trigger.value: trigger for trigger in ConnectionPhaseTrigger}
"""Triggers by method; every other method of the Plugin service is an event."""


def _runtime_info(request: pb.ConfigureRequest) -> RuntimeInfo:
    # The protocol has milliseconds.
    return RuntimeInfo(
        name=request.runtime_name,
        version=request.runtime_version,
        nri_version=request.NRI_version,
        registration_timeout=request.registration_timeout / 1000,
        request_timeout=request.request_timeout / 1000,
        config=request.config,
    )
