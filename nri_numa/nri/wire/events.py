"""Events of a session, for the plugin role and for the runtime role.

An event with a `stream` waits for an answer on it. `StateChange` and the methods of NRI 0.12 become
the same events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.ttrpc import CallStatus
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import RuntimeInfo


class RegistrationAnswered(msgspec.Struct, frozen=True):
    """Answer of the runtime to RegisterPlugin; may come after `ConfigureRequested`.

    After an error the runtime waits for the plugin to close the socket; None means success.
    """

    status: CallStatus | None


class ConfigureRequested(msgspec.Struct, frozen=True):
    """Configure: the runtime introduces itself; answer with the event mask."""

    stream: int
    info: RuntimeInfo


class SynchronizeRequested(msgspec.Struct, frozen=True):
    """Synchronize: all pods and containers of the node, in one event; answer with updates.

    Attributes:
        stream: of the last slice.
        pods: every pod sandbox of the runtime, in no order.
        containers: every created or running container; its pod may be missing.
        traceparent: as of `nri_numa.nri.wire.ttrpc.Call`.
    """

    method: ClassVar[str] = "Synchronize"

    stream: int
    pods: Sequence[pb.PodSandbox]
    containers: Sequence[pb.Container]
    traceparent: str = ""


class EventRequested(msgspec.Struct, frozen=True):
    """Event of a pod or a container that happened or is about to happen.

    Attributes:
        event: its kind; the answers to creating, updating and stopping a container have messages of
            their own, all others are empty.
        message: has the ``pod``, the ``container`` if the event concerns one, and the
            ``linux_resources`` of an update.
        traceparent: as of `nri_numa.nri.wire.ttrpc.Call`.
    """

    stream: int
    event: Event
    message: Any
    traceparent: str = ""

    @property
    def method(self) -> str:
        """Name of the method, as in logs."""
        return self.event.method_name


class ShutdownRequested(msgspec.Struct, frozen=True):
    """Shutdown of the runtime; no released runtime sends it."""

    stream: int


class UpdateContainersAnswered(msgspec.Struct, frozen=True):
    """Answer of the runtime to an unsolicited update.

    Attributes:
        stream: as returned by `PluginSession.update_containers`.
        status: error of a failed call; None on success.
    """

    stream: int
    status: CallStatus | None


PluginSessionEvent = (
    RegistrationAnswered
    | ConfigureRequested
    | SynchronizeRequested
    | EventRequested
    | ShutdownRequested
    | UpdateContainersAnswered
)
"""Events that `PluginSession.next_event` returns."""


class RegisterRequested(msgspec.Struct, frozen=True):
    """RegisterPlugin: a plugin introduces itself; answer with Empty or an error."""

    stream: int
    name: str
    index: str
    nri_version: str


class UpdateContainersRequested(msgspec.Struct, frozen=True):
    """Updates of a plugin that answer no request."""

    stream: int
    request: pb.UpdateContainersRequest


class RequestAnswered(msgspec.Struct, frozen=True):
    """Answer of a plugin to a request of the runtime.

    Attributes:
        stream: as returned by `RuntimeSession.call_plugin`.
        method: of the request.
        payload: the serialised response; empty if the call failed.
        status: error of a failed call; None on success.
    """

    stream: int
    method: str
    payload: bytes
    status: CallStatus | None


RuntimeSessionEvent = RegisterRequested | UpdateContainersRequested | RequestAnswered
"""Events that `RuntimeSession.next_event` returns."""
