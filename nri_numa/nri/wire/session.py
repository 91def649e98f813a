"""One NRI connection without its socket: bytes in, events out; answers in, bytes out.

Use of either role::

    session.receive_data(data)                          # only buffers
    while (event := session.next_event()) is not None:  # parses one event
        ...                                             # session.reply(event.stream, response)
        transport.write(session.data_to_send())

Answer each event before asking for the next one: the answer moves the phase, and a runtime may have
put Synchronize into the same packet as Configure.

Phases. `PHASE_TRANSITIONS` has every change of phase, for both sides, since both see the same
steps. A connection begins `CONNECTED`. The plugin registers; the runtime configures it,
synchronises it in one or more slices, and then sends events for ever. The *answer* to
RegisterPlugin is not in the
table: containerd sends it from another thread, and it was seen to arrive after Configure.

Events are legal from `CONFIGURED` on, because NRI before 0.7 never synchronises the plugins it
launches itself. A second Synchronize is legal too; it replaces the picture.

Any error, local or remote, ends in `DEAD`, and the end of the socket in `CLOSED`; nothing leads out
of either.

Errors. What a caller may not do raises `LocalProtocolError`. What the peer may not do is raised
inside as the same error, and turned into `RemoteProtocolError` in one place, `next_event`. After
either from `next_event` the session is dead and every call raises. Any other exception is a bug
here. Calls that a caller can correct (an answer too large, a stream that is not open) leave the
session alive.

Memory. Besides the bytes just fed a session holds at most one unfinished message for each of the
two connections (4 MiB; 16 MiB for requests to a plugin), 64 open calls each way, and the slices of
one Synchronize (`PluginSession.max_objects` and `max_bytes`).
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

MILLISECONDS_PER_SECOND: Final = 1000

PLUGIN_METHODS: Final[Mapping[str, type[Message]]] = {
    "Configure": pb.ConfigureRequest,
    "Synchronize": pb.SynchronizeRequest,
    "Shutdown": pb.Empty,
    "CreateContainer": pb.CreateContainerRequest,
    "UpdateContainer": pb.UpdateContainerRequest,
    "StopContainer": pb.StopContainerRequest,
    "StateChange": pb.StateChangeEvent,
    "UpdatePodSandbox": pb.UpdatePodSandboxRequest,
    "ValidateContainerAdjustment": pb.ValidateContainerAdjustmentRequest,
    "RunPodSandbox": pb.RunPodSandboxRequest,
    "StopPodSandbox": pb.StopPodSandboxRequest,
    "RemovePodSandbox": pb.RemovePodSandboxRequest,
    "PostUpdatePodSandbox": pb.PostUpdatePodSandboxRequest,
    "PostCreateContainer": pb.PostCreateContainerRequest,
    "StartContainer": pb.StartContainerRequest,
    "PostStartContainer": pb.PostStartContainerRequest,
    "PostUpdateContainer": pb.PostUpdateContainerRequest,
    "RemoveContainer": pb.RemoveContainerRequest,
}
"""Methods of the Plugin service and what they are asked with."""

RUNTIME_METHODS: Final[
    Mapping[str, type[pb.RegisterPluginRequest | pb.UpdateContainersRequest]]
] = {
    "RegisterPlugin": pb.RegisterPluginRequest,
    "UpdateContainers": pb.UpdateContainersRequest,
}
"""Methods of the Runtime service and what they are asked with."""

_EVENT_BY_METHOD: Final[Mapping[str, Event]] = {
    event.method_name: event for event in Event if event.mask_bit & ALL_EVENTS
}
"""Events by method; the others are never subscribed to."""
_STATE_CHANGE_EVENT_BY_NUMBER: Final[Mapping[int, Event]] = {
    event.value: event
    for event in _EVENT_BY_METHOD.values()
    if event.mask_bit & AGENT_EVENTS
    and event not in (Event.CREATE_CONTAINER, Event.UPDATE_CONTAINER, Event.STOP_CONTAINER)
}
"""Events that have a method of their own from NRI 0.12 on; before, StateChange reports them."""


class Phase(enum.Enum):
    """Where a connection stands."""

    CONNECTED = "connected"
    REGISTERING = "registering"
    CONFIGURING = "configuring"
    CONFIGURED = "configured"
    SYNCHRONIZING = "synchronizing"
    ACTIVE = "active"
    CLOSED = "closed"
    DEAD = "dead"


class ConnectionPhaseTrigger(enum.Enum):
    """What moves a connection on."""

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
        # Once registered: real runtimes accept a second registration and ignore it, and a goodbye
        # is followed by the end of the socket.
        **(
            {}
            if phase is Phase.CONNECTED
            else {ConnectionPhaseTrigger.REGISTER: phase, ConnectionPhaseTrigger.SHUTDOWN: phase}
        ),
        **steps,
    }
    for phase, steps in _PROGRESS_TRANSITIONS.items()
} | {Phase.CLOSED: {}, Phase.DEAD: {}}
"""Phase and step to the next phase; what is missing is illegal."""


EventT = TypeVar("EventT")
RequestT = TypeVar("RequestT", bound=Message)


class SessionBase(ABC, Generic[EventT]):
    """What both roles share: the trunk, the phase, and the one place where errors turn remote."""

    _serves: int
    _calls: int
    _max_request = ttrpc.MAX_MESSAGE_BODY_BYTES

    def __init__(self) -> None:
        self._trunk = ttrpc.Trunk()
        self._server = ttrpc.TTRPCServer(self._trunk, self._serves, max_body=self._max_request)
        self._client = ttrpc.TTRPCClient(self._trunk, self._calls)
        self._phase = Phase.CONNECTED
        self._ready: int | None = None  # connection whose reader may hold whole messages

    @property
    def phase(self) -> Phase:
        """Where the connection stands."""
        return self._phase

    def receive_data(self, data: bytes) -> None:
        """Take bytes from the socket. Nothing is parsed before `next_event`.

        Raises:
            LocalProtocolError: the session is closed or dead, or its events were not fetched.
        """
        self._check_alive()
        self._trunk.receive_data(data)

    def receive_eof(self) -> None:
        """Note that the socket has ended; further calls but `data_to_send` raise."""
        if self._phase is not Phase.DEAD:
            self._phase = Phase.CLOSED

    def next_event(self) -> EventT | None:
        """Return the next event; None when more bytes are needed.

        Raises:
            RemoteProtocolError: the peer broke the protocol. The session is dead.
            LocalProtocolError: the session was closed or dead already.
        """
        self._check_alive()
        try:
            return self._decode_next_event()
        except LocalProtocolError as error:
            self._phase = Phase.DEAD
            raise RemoteProtocolError(str(error)) from error
        except BaseException:
            self._phase = Phase.DEAD  # a bug in here: nothing can be said of the state any more
            raise

    def data_to_send(self) -> bytes:
        """Return the bytes to write to the socket, and forget them. Whole messages, in order."""
        return self._trunk.data_to_send()

    def reply_error(self, stream: int, message: str, code: int = ttrpc.Code.UNKNOWN) -> None:
        """Answer a request with an error. Code 2 is how a handler's plain error travels.

        Raises:
            LocalProtocolError: nothing waits on this stream.
        """
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
        ...

    @abstractmethod
    def _event_from_reply(self, reply: ttrpc.CallReply) -> EventT:
        """Turn the answer to a call of ours into an event."""
        ...

    def _parse_request(
        self, call: ttrpc.Call, service: str, methods: Mapping[str, type[RequestT]]
    ) -> RequestT | None:
        """Return the request message of a call; None when it was answered with an error here.

        The codes and texts are those of the Go server; runtimes act upon code 12.
        """
        kind = methods.get(call.method) if call.service == service else None
        if kind is None:
            known = call.service == service
            unknown = f"method {call.method}" if known else f"service {call.service}"
            self._server.reply_error(call.stream, ttrpc.Code.UNIMPLEMENTED, unknown)
            return None
        try:
            return kind.FromString(call.payload)
        except DecodeError as error:
            self._server.reply_error(
                call.stream, ttrpc.Code.INTERNAL, f"ttrpc: error unmarshalling payload: {error}"
            )
            return None

    def _advance_phase(self, step: ConnectionPhaseTrigger) -> None:
        following = PHASE_TRANSITIONS[self._phase].get(step)
        if following is None:
            raise LocalProtocolError(f"{step.value} is illegal while {self._phase.value}")
        self._phase = following

    def _check_alive(self) -> None:
        if self._phase is Phase.DEAD or self._phase is Phase.CLOSED:
            raise LocalProtocolError(f"the session is {self._phase.value}")


class PluginSession(SessionBase[ev.PluginSessionEvent]):
    """The plugin's side: registers, serves the Plugin service, may call UpdateContainers."""

    _serves = PLUGIN_CONNECTION_ID
    _calls = RUNTIME_CONNECTION_ID
    _max_request = ttrpc.MAX_REQUEST_TO_PLUGIN_BYTES

    # What one Synchronize may bring over all slices before the peer is called broken, far above a
    # node: 110 pods is the usual maximum, a container with its environment, mounts and devices
    # takes 5 to 200 kB.
    max_objects = 50_000
    max_bytes = 256 << 20

    def __init__(self) -> None:
        super().__init__()
        self._registration: int | None = None
        # The requests whose answer moves the phase, by stream.
        self._configure: int | None = None
        self._synchronize: int | None = None
        # Slices of a Synchronize that has not ended yet.
        self._pods: list[pb.PodSandbox] = []
        self._containers: list[pb.Container] = []
        self._size = 0

    def register_plugin(
        self, name: str, index: str, *, nri_version: str = NRI_VERSION, timeout: float = 0.0
    ) -> None:
        """Send RegisterPlugin; once for each connection.

        The name has no index in it; runtimes call plugins in ascending order of their indices, and
        only log ``nri_version``. A ``timeout`` of 0 seconds is none.

        Raises:
            LocalProtocolError: registered already, or the name or index cannot be accepted.
        """
        self._check_alive()
        if self._phase is not Phase.CONNECTED:
            raise LocalProtocolError("this connection is registered already")
        if (problem := identity_problem(name, index)) is not None:
            raise LocalProtocolError(problem)
        request = pb.RegisterPluginRequest(
            plugin_name=name, plugin_idx=index, NRI_version=nri_version
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
        """Send UpdateContainers; returns the stream its answer will carry.

        Never while a request waits for our answer: the runtime holds the lock this call needs. A
        ``timeout`` of 0 seconds is none.

        Raises:
            LocalProtocolError: not configured yet, or a request is unanswered.
        """
        self._check_alive()
        if self._server.unanswered_calls:
            raise LocalProtocolError("UpdateContainers before the open request is answered")
        self._advance_phase(ConnectionPhaseTrigger.UPDATE_CONTAINERS)
        stream = self._client.send_call(
            RUNTIME_SERVICE,
            "UpdateContainers",
            request.SerializeToString(),
            timeout_nano=int(timeout * 1e9),
        )
        return stream

    def abandon_call(self, stream: int) -> None:
        """Give up waiting for the answer to an update; a late one makes no event."""
        self._client.abandon_call(stream)

    def reply(self, stream: int, response: Message | None = None) -> None:
        """Answer a request; None is the empty response.

        Raises:
            LocalProtocolError: nothing waits on this stream, or the response is over 4 MiB.
        """
        self._check_alive()
        self._server.reply(stream, b"" if response is None else response.SerializeToString())
        if stream == self._configure:
            self._configure = None
            self._advance_phase(ConnectionPhaseTrigger.CONFIGURE_ANSWERED)
        elif stream == self._synchronize:
            self._synchronize = None
            self._advance_phase(ConnectionPhaseTrigger.SYNCHRONIZE_ANSWERED)

    def _event_from_reply(self, reply: ttrpc.CallReply) -> ev.PluginSessionEvent:
        if reply.stream == self._registration:
            return ev.RegistrationAnswered(reply.status)
        # The client reports answers to open calls only, and updates are all the others.
        try:
            response = pb.UpdateContainersResponse.FromString(reply.payload)
        except DecodeError as error:
            raise LocalProtocolError(f"UpdateContainersResponse: {error}") from error
        return ev.UpdateContainersAnswered(reply.stream, response.failed, reply.status)

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
        """Collect one slice; the last one makes the event, the others are answered here.

        Slices with nothing in them arrive by the thousand from runtimes up to NRI 0.12 that have
        few pods with big containers; they cost one parse and one 22-byte answer each.
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
    """The runtime's side: serves the Runtime service, calls the Plugin service."""

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
        """Call a method of the Plugin service; returns the stream its answer will carry.

        Raises:
            LocalProtocolError: unknown method, or not legal in this phase.
        """
        self._check_alive()
        if method not in PLUGIN_METHODS:
            raise LocalProtocolError(f"the Plugin service has no method {method}")
        step = _TRANSITION_BY_METHOD.get(method, ConnectionPhaseTrigger.EVENT)
        if step not in PHASE_TRANSITIONS[self._phase]:
            raise LocalProtocolError(f"{step.value} is illegal while {self._phase.value}")
        stream = self._client.send_call(
            PLUGIN_SERVICE,
            method,
            request.SerializeToString(),
            timeout_nano=timeout_nano,
            metadata=metadata,
        )
        self._advance_phase(step)
        last = isinstance(request, pb.SynchronizeRequest) and not request.more
        self._methods[stream] = (method, last)
        return stream

    def abandon_call(self, stream: int) -> None:
        """Give up waiting for an answer; a late one makes no event."""
        self._methods.pop(stream, None)
        self._client.abandon_call(stream)

    def reply(self, stream: int, response: Message | None = None) -> None:
        """Answer a request of the plugin; None for an empty response.

        Raises:
            LocalProtocolError: nothing waits on this stream, or the response is over 4 MiB.
        """
        self._check_alive()
        self._server.reply(stream, b"" if response is None else response.SerializeToString())

    def _event_from_reply(self, reply: ttrpc.CallReply) -> ev.RuntimeSessionEvent:
        method, last = self._methods.pop(reply.stream)
        if reply.status is None:
            if method == "Configure":
                self._advance_phase(ConnectionPhaseTrigger.CONFIGURE_ANSWERED)
            elif last:
                self._advance_phase(ConnectionPhaseTrigger.SYNCHRONIZE_ANSWERED)
        return ev.RequestAnswered(reply.stream, method, reply.payload, reply.status)

    def _event_from_call(self, call: ttrpc.Call) -> ev.RuntimeSessionEvent | None:
        request = self._parse_request(call, RUNTIME_SERVICE, RUNTIME_METHODS)
        if request is None:
            return None
        if isinstance(request, pb.RegisterPluginRequest):
            first = self._phase is Phase.CONNECTED
            self._advance_phase(ConnectionPhaseTrigger.REGISTER)
            if not first:  # as real runtimes do: accepted and ignored
                self._server.reply(call.stream, b"")
                return None
            return ev.RegisterRequested(
                call.stream, request.plugin_name, request.plugin_idx, request.NRI_version
            )
        self._advance_phase(ConnectionPhaseTrigger.UPDATE_CONTAINERS)
        return ev.UpdateContainersRequested(call.stream, request)


_TRANSITION_BY_METHOD: Final = {
    "Configure": ConnectionPhaseTrigger.CONFIGURE,
    "Synchronize": ConnectionPhaseTrigger.SYNCHRONIZE,
    "Shutdown": ConnectionPhaseTrigger.SHUTDOWN,
}


def _runtime_info(request: pb.ConfigureRequest) -> RuntimeInfo:
    return RuntimeInfo(
        name=request.runtime_name,
        version=request.runtime_version,
        nri_version=request.NRI_version,
        registration_timeout=request.registration_timeout / MILLISECONDS_PER_SECOND,
        request_timeout=request.request_timeout / MILLISECONDS_PER_SECOND,
        config=request.config,
    )
