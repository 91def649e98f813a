"""What a session reports: small frozen events, for the plugin role and for the runtime role.

An event with a `stream` waits for an answer on it. `StateChange` and the methods of NRI 0.12 make
the same events; they do not differ above this line.
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
    """The runtime answered RegisterPlugin; may come after `ConfigureRequested`.

    Attributes:
        status: why it refuses; it leaves the socket open then, and waits for us to close. None when
            it does not.
    """

    status: CallStatus | None


class ConfigureRequested(msgspec.Struct, frozen=True):
    """The runtime introduces itself; answer with the event mask."""

    stream: int
    info: RuntimeInfo


class SynchronizeRequested(msgspec.Struct, frozen=True):
    """The whole picture of the node, all slices put together; answer with updates.

    Attributes:
        stream: of the last slice.
        pods: every pod sandbox the runtime knows, in no order.
        containers: every created or running container; its pod may be missing.
        traceparent: as of `nri_numa.nri.wire.ttrpc.Call`.
    """

    method: ClassVar[str] = "Synchronize"

    stream: int
    pods: Sequence[pb.PodSandbox]
    containers: Sequence[pb.Container]
    traceparent: str = ""


class EventRequested(msgspec.Struct, frozen=True):
    """Something happens to a pod or a container, or is about to.

    Attributes:
        event: what; to creating, updating and stopping a container the answer has a message of its
            own, to all others it is empty.
        message: has the ``pod``, the ``container`` if it is about one, and of an update the
            ``linux_resources``.
        traceparent: as of `nri_numa.nri.wire.ttrpc.Call`.
    """

    stream: int
    event: Event
    message: Any
    traceparent: str = ""

    @property
    def method(self) -> str:
        """Its name, as in logs."""
        return self.event.method_name


class ShutdownRequested(msgspec.Struct, frozen=True):
    """The runtime says goodbye; no released runtime does."""

    stream: int


class UpdateContainersAnswered(msgspec.Struct, frozen=True):
    """The runtime answered an unsolicited update of ours.

    Attributes:
        stream: what `PluginSession.update_containers` returned.
        failed: updates the runtime could not apply; containerd and CRI-O never fill it.
        status: why the call failed; None on success.
    """

    stream: int
    failed: Sequence[pb.ContainerUpdate]
    status: CallStatus | None


PluginSessionEvent = (
    RegistrationAnswered
    | ConfigureRequested
    | SynchronizeRequested
    | EventRequested
    | ShutdownRequested
    | UpdateContainersAnswered
)
"""Everything `PluginSession.next_event` returns."""


class RegisterRequested(msgspec.Struct, frozen=True):
    """A plugin introduces itself; answer with Empty or refuse."""

    stream: int
    name: str
    index: str
    nri_version: str


class UpdateContainersRequested(msgspec.Struct, frozen=True):
    """A plugin sends updates that answer no request."""

    stream: int
    request: pb.UpdateContainersRequest


class RequestAnswered(msgspec.Struct, frozen=True):
    """A plugin answered a request of ours.

    Attributes:
        stream: what `RuntimeSession.request` returned.
        method: of the request.
        payload: the serialised response; empty when the call failed.
        status: why the call failed; None on success.
    """

    stream: int
    method: str
    payload: bytes
    status: CallStatus | None


RuntimeSessionEvent = RegisterRequested | UpdateContainersRequested | RequestAnswered
"""Everything `RuntimeSession.next_event` returns."""
