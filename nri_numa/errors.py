"""Every exception of nri-numa.

::

    AgentError                     base; has ``reason``, a short CamelCase name
    ├── ConfigError                the configuration cannot be used; carries all problems
    ├── TopologyError              a machine description cannot be read
    ├── ManifestError              a Pod manifest cannot be read (`nri_numa.simulate.manifests`)
    ├── ProtocolError              never raised itself
    │   ├── LocalProtocolError     we asked the protocol layer for something illegal: a bug
    │   └── RemoteProtocolError    the peer broke the protocol: close the link and dial again
    ├── CheckpointError
    │   ├── CheckpointCorrupt      not ours, damaged, or cut short
    │   ├── CheckpointTooNew       written by a newer version
    │   └── StateDirectoryBusy     another agent uses the state directory
    ├── RuntimeUnavailable         the NRI or CRI endpoint is absent or went away
    ├── RuntimeBusy                another agent works on the runtime
    ├── DevicePluginBusy           another device plugin of ours serves this node
    └── UnknownSlots               the kubelet gives away ids that were never offered

A *refusal* of a container is an ordinary outcome and travels as a value
(`nri_numa.engine.admit.Refused`), never as an exception.
"""

from __future__ import annotations

from collections.abc import Sequence


class AgentError(Exception):
    """Base of all errors of nri-numa.

    Attributes:
        reason: short CamelCase name, the same in logs, metric labels and annotations.
    """

    reason: str = "AgentError"


class ConfigError(AgentError):
    """The configuration cannot be used; expected to be caught by the command line.

    Attributes:
        source: file name or other origin of the document.
        problems: every problem found, each ``path: what is wrong, what was expected``.
    """

    reason = "ConfigError"

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

    reason = "TopologyError"

    def __init__(self, path: str, found: str) -> None:
        self.path = path
        self.found = found
        super().__init__(f"{path}: {found}")


class ProtocolError(AgentError):
    """Base of the two protocol errors; cannot be raised itself."""

    reason = "ProtocolError"

    def __init__(self, message: str) -> None:
        if type(self) is ProtocolError:
            raise TypeError("raise LocalProtocolError or RemoteProtocolError")
        super().__init__(message)


class LocalProtocolError(ProtocolError):
    """Our side asked for something the protocol does not allow: a bug in the caller."""

    reason = "LocalProtocolError"


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is dead from here on."""

    reason = "RemoteProtocolError"


class CheckpointError(AgentError):
    """Base of the checkpoint errors; caught at start, where the file is set aside.

    Attributes:
        path: the checkpoint file.
    """

    reason = "CheckpointError"

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__(f"{path}: {message}")


class CheckpointCorrupt(CheckpointError):
    """The file is not a checkpoint, is damaged, or was cut short."""

    reason = "CheckpointCorrupt"


class CheckpointTooNew(CheckpointError):
    """A newer version of nri-numa wrote the file."""

    reason = "CheckpointTooNew"


class StateDirectoryBusy(CheckpointError):
    """Another agent uses the state directory.

    Attributes:
        pid: of the other agent, None when it is not known.
    """

    reason = "StateDirectoryBusy"

    def __init__(self, path: str, pid: int | None) -> None:
        self.pid = pid
        who = "another process" if pid is None else f"process {pid}"
        super().__init__(
            path, f"{who} uses this state directory; stop it, or choose another with --state-dir"
        )


class RuntimeUnavailable(AgentError):
    """The NRI or CRI endpoint is absent or the link broke; retried for ever."""

    reason = "RuntimeUnavailable"


class RuntimeBusy(AgentError):
    """Somebody else works on the runtime that we want alone.

    Attributes:
        pid: of them, None when it is not known.
    """

    reason = "RuntimeBusy"

    def __init__(self, directory: str, pid: int | None) -> None:
        self.pid = pid
        who = "an agent" if pid is None else f"an agent (process {pid})"
        super().__init__(
            f"{directory}: {who} works on the runtime of this NRI socket, with whatever state "
            "directory, and would pin everything again; stop it first, for instance: systemctl "
            "stop nri-numa"
        )


class DevicePluginBusy(AgentError):
    """Another device plugin of ours serves this node; the kubelet would mix up two of them."""

    reason = "DevicePluginBusy"


class UnknownSlots(AgentError):
    """The kubelet gives away ids that were never offered; the message is for the pod's events."""

    reason = "UnknownSlots"
