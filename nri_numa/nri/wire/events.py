"""What a session reports: small frozen events, for the plugin role and for the runtime role.

An event with a `stream` waits for an answer on it. `StateChange` and the methods of NRI 0.12 make
the same events; nobody above this line can tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.ttrpc import CallStatus
from nri_numa.nri.wire.versions import Event, RuntimeInfo


@dataclass(frozen=True, slots=True)
class Registered:
    """The runtime answered RegisterPlugin. May come after `ConfigureRequested`."""


@dataclass(frozen=True, slots=True)
class RegistrationRefused:
    """The runtime refused RegisterPlugin; it leaves the socket open and waits for us to close."""

    status: CallStatus


@dataclass(frozen=True, slots=True)
class ConfigureRequested:
    """The runtime introduces itself; answer with the event mask."""

    stream: int
    info: RuntimeInfo


@dataclass(frozen=True, slots=True)
class SynchronizeRequested:
    """The whole picture of the node, all slices put together; answer with updates.

    Attributes:
        stream: of the last slice.
        pods: every pod sandbox the runtime knows, in no order.
        containers: every created or running container; its pod may be missing.
        slices: number of messages the picture came in.
        size: its serialised size in bytes.
    """

    stream: int
    pods: Sequence[pb.PodSandbox]
    containers: Sequence[pb.Container]


@dataclass(frozen=True, slots=True)
class CreateContainerRequested:
    """A container is about to be created."""

    stream: int
    request: pb.CreateContainerRequest


@dataclass(frozen=True, slots=True)
class UpdateContainerRequested:
    """The resources of a container are about to be changed."""

    stream: int
    request: pb.UpdateContainerRequest


@dataclass(frozen=True, slots=True)
class StopContainerRequested:
    """A container exited or is about to be stopped; its id may be unknown to us."""

    stream: int
    request: pb.StopContainerRequest


@dataclass(frozen=True, slots=True)
class UpdatePodSandboxRequested:
    """The resources of a pod are about to be changed."""

    stream: int
    request: pb.UpdatePodSandboxRequest


@dataclass(frozen=True, slots=True)
class ValidateRequested:
    """The combined adjustment of all plugins is to be judged; an empty answer accepts it."""

    stream: int
    request: pb.ValidateContainerAdjustmentRequest


@dataclass(frozen=True, slots=True)
class PodEvent:
    """Something happened to a pod sandbox; the answer is empty."""

    stream: int
    event: Event
    pod: pb.PodSandbox


@dataclass(frozen=True, slots=True)
class ContainerEvent:
    """Something happened to a container; the answer is empty."""

    stream: int
    event: Event
    pod: pb.PodSandbox
    container: pb.Container


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """The runtime says goodbye; no released runtime does."""

    stream: int


@dataclass(frozen=True, slots=True)
class UpdateContainersAnswered:
    """The runtime answered an unsolicited update of ours.

    Attributes:
        stream: what `PluginSession.update_containers` returned.
        failed: updates the runtime could not apply; containerd and CRI-O never fill it.
        status: why the call failed; None on success.
    """

    stream: int
    failed: Sequence[pb.ContainerUpdate]
    status: CallStatus | None


PluginEvent = (
    Registered
    | RegistrationRefused
    | ConfigureRequested
    | SynchronizeRequested
    | CreateContainerRequested
    | UpdateContainerRequested
    | StopContainerRequested
    | UpdatePodSandboxRequested
    | ValidateRequested
    | PodEvent
    | ContainerEvent
    | ShutdownRequested
    | UpdateContainersAnswered
)
"""Everything `PluginSession.next_event` returns."""


@dataclass(frozen=True, slots=True)
class RegisterRequested:
    """A plugin introduces itself; answer with Empty or refuse."""

    stream: int
    name: str
    index: str
    nri_version: str


@dataclass(frozen=True, slots=True)
class UpdateContainersRequested:
    """A plugin sends updates nobody asked for."""

    stream: int
    request: pb.UpdateContainersRequest


@dataclass(frozen=True, slots=True)
class Answered:
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


RuntimeEvent = RegisterRequested | UpdateContainersRequested | Answered
"""Everything `RuntimeSession.next_event` returns."""
