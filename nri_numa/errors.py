"""Every exception of nri-numa: one base, `AgentError`, whose names are reasons that users see.

A *refusal* of a container is an ordinary outcome and travels as a value
(`nri_numa.engine.decision.Rejected`), never as an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class AgentError(Exception):
    """Base of all errors of nri-numa; their names are the reasons in logs, labels, annotations."""

    reason: ClassVar[str] = "AgentError"

    def __init_subclass__(cls) -> None:
        cls.reason = cls.__dict__.get("reason", cls.__name__)


class ConfigError(AgentError):
    """The configuration cannot be used; expected to be caught by the command line.

    Attributes:
        source: file name or other origin of the document.
        problems: every problem found, each ``path: what is wrong, what was expected``.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(f"{source}: " + "; ".join(self.problems))


class TopologyError(AgentError):
    """A machine description cannot be read at all (odd machines are not errors).

    Attributes:
        path: the file or directory.
        found: what was there instead.
    """

    def __init__(self, path: str, found: str) -> None:
        self.path = path
        self.found = found
        super().__init__(f"{path}: {found}")


class ProtocolError(AgentError):
    """Base of the two protocol errors; cannot be raised itself."""

    def __init__(self, message: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError")
        super().__init__(message)


class LocalProtocolError(ProtocolError):
    """Our side asked for something the protocol does not allow: a bug in the caller."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is dead from here on."""


class CheckpointError(AgentError):
    """Base of the checkpoint errors; caught at start, where the file is set aside.

    Attributes:
        path: the checkpoint file.
    """

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(f"{path}: {message}")


class CheckpointCorrupt(CheckpointError):
    """The file is not a checkpoint, is damaged, or was cut short."""


class CheckpointTooNew(CheckpointError):
    """A newer version of nri-numa wrote the file."""


class StateDirectoryBusy(CheckpointError):
    """Another agent uses the state directory.

    Attributes:
        owner: the other agent, as it wrote itself into the lock; empty when it is not known.
    """

    def __init__(self, path: str, owner: str) -> None:
        self.owner = owner
        super().__init__(
            path,
            f"{owner or 'another process'} uses this state directory; stop it, or choose another "
            "with --state-dir",
        )


class RuntimeUnavailable(AgentError):
    """The NRI or CRI endpoint is absent or the link broke; retried for ever."""


class RuntimeBusy(AgentError):
    """Another agent, or a release, works on the runtime; its process is None when not known."""

    def __init__(self, directory: str, pid: int | None, pod: str = "") -> None:
        self.pid = pid
        known = "in a container that is not visible here" if pid is None else f"process {pid}"
        who = f"another agent ({known}{pod and f', pod {pod}'})"
        super().__init__(
            f"{directory}: {who} works on the runtime of this socket, with whatever state "
            "directory, and a runtime takes one; stop it first, for instance: systemctl stop "
            "nri-numa, or helm uninstall (helm list -A names the releases)"
        )


class DevicePluginBusy(AgentError):
    """Another device plugin of ours serves this node; the kubelet would mix up two of them."""


class UnknownSlots(AgentError):
    """The kubelet gives away ids that were never announced; the message is for the pod's events."""
