"""All exceptions of nri-numa, with one base, `AgentError`; their names are reasons that users see.

A *rejection* of a container is an ordinary outcome and therefore a value
(`nri_numa.engine.decision.Rejected`), never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class AgentError(Exception):
    """Base of all errors of nri-numa; their names are reasons in logs, labels and annotations."""

    reason: ClassVar[str] = "AgentError"

    def __init_subclass__(cls) -> None:
        cls.reason = cls.__dict__.get("reason", cls.__name__)


class ConfigError(AgentError):
    """An unusable configuration; the command line catches it.

    Attributes:
        source: file name or other origin of the document.
        problems: all problems, each ``path: what is wrong, what was expected``.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(f"{source}: " + "; ".join(self.problems))


class TopologyError(AgentError):
    """A machine description that cannot be read at all (unusual machines are no errors)."""

    def __init__(self, path: str, finding: str) -> None:
        super().__init__(f"{path}: {finding}")


class ProtocolError(AgentError):
    """Base of the two protocol errors."""


class LocalProtocolError(ProtocolError):
    """A call that the protocol does not allow: a bug in the caller."""


class RemoteProtocolError(ProtocolError):
    """A violation of the protocol by the peer; the connection cannot be used any more."""


class CheckpointError(AgentError):
    """Base of the checkpoint errors; caught at start, which renames the file."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")


class CheckpointCorrupt(CheckpointError):
    """A file that is no checkpoint, damaged, or truncated."""


class CheckpointTooNew(CheckpointError):
    """A file that a newer version of nri-numa wrote."""


class StateDirectoryBusy(CheckpointError):
    """A state directory that another agent uses.

    Attributes:
        owner: the other agent, as it wrote itself into the lock; empty if not known.
    """

    def __init__(self, path: str, owner: str) -> None:
        self.owner = owner
        super().__init__(
            path,
            f"{owner or 'another process'} uses this state directory; stop it, or choose another "
            "with --state-dir",
        )


class RuntimeUnavailable(AgentError):
    """A missing NRI or CRI endpoint, or a broken link; retried without limit."""


class RuntimeBusy(AgentError):
    """A runtime that another agent or a release uses; its ``pid`` is None if not known."""

    def __init__(self, directory: str, pid: int | None, pod: str = "") -> None:
        self.pid = pid
        location = "in a container that is not visible here" if pid is None else f"process {pid}"
        agent_text = f"another agent ({location}{pod and f', pod {pod}'})"
        super().__init__(
            f"{directory}: {agent_text} works on the runtime of this socket, with whatever state "
            "directory, and a runtime takes one; stop it first, for instance: systemctl stop "
            "nri-numa, or helm uninstall (helm list -A names the releases)"
        )


class DevicePluginBusy(AgentError):
    """A node that another nri-numa device plugin serves; the kubelet would mix up two of them."""


class UnknownSlots(AgentError):
    """Allocated ids that were never announced; the message is for the pod's events."""
