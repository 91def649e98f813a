"""What the NRI link asks of its handler, in one structural type; and how a handler refuses."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import Message

from nri_numa.errors import AgentError
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import Answer
from nri_numa.nri.wire.versions import RuntimeInfo


class LinkState(enum.StrEnum):
    """Where the link stands."""

    DISCONNECTED = "disconnected"
    REGISTERING = "registering"
    CONFIGURED = "configured"
    """Known to the runtime; Synchronize may wait for a long container stop."""
    ACTIVE = "active"
    STOPPED = "stopped"


class RequestRefused(Exception):
    """Raised by a handler to fail the runtime's operation, with this message as its reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RefusedForGood(AgentError):
    """The runtime will never accept this plugin as it is; raised out of `NRILink.run`."""

    reason = "RegistrationRefused"


class PluginHandler(Protocol):
    """What the link asks. All methods are synchronous and quick; see `RequestRefused`."""

    def configured(self, info: RuntimeInfo) -> None:
        """The runtime introduced itself. A refusal here ends `NRILink.run`."""
        ...

    def synchronize(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Sequence[pb.ContainerUpdate]:
        """Take the whole picture of the node; return updates, at most one for each container.

        The link sets `ignore_failure` on them: CRI-O fails the whole exchange otherwise.
        """
        ...

    def create_container(self, request: pb.CreateContainerRequest) -> Answer:
        """Place a container that is about to be created."""
        ...

    def update_container(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse:
        """Judge a change of a container's resources."""
        ...

    def stop_container(self, request: pb.StopContainerRequest) -> Answer:
        """A container ended or will; ids may be unknown."""
        ...

    def remove_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """A container is gone; ids may be unknown."""
        ...

    def start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """A container's cgroup is there and its program does not run yet."""
        ...

    def post_start_container(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """A container's program runs."""
        ...

    def run_pod(self, pod: pb.PodSandbox) -> None:
        """A pod sandbox runs. Refusing here leaks sandboxes on older runtimes."""
        ...

    def stop_pod(self, pod: pb.PodSandbox) -> None:
        """A pod sandbox was stopped."""
        ...

    def remove_pod(self, pod: pb.PodSandbox) -> None:
        """A pod sandbox is gone."""
        ...

    def replied(self, event_name: str, seconds: float) -> None:
        """The answer to a request was written; the place for logging and other slow things.

        Args:
            event_name: ``CreateContainer``, ``Synchronize`` and so on.
            seconds: from the parsed request to the written answer.
        """
        ...

    def link_changed(self, state: LinkState, detail: str) -> None:
        """The link changed its state."""
        ...

    def internal_error(self, event_name: str, error: Exception) -> Message | None:
        """A handler raised; decide the answer.

        Returns:
            The response of that request, or None for an empty one.

        Raises:
            RequestRefused: to fail the operation.
        """
        ...
