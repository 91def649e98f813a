"""Reasons for rejections, as values; the sentences are made from them.

The kubelet repeats a rejection as ``Reason: message``, and only that text reaches readers of the
cluster: `read_reason_and_detail` is the one place where a text is read back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Self

import msgspec


class RetryCondition(StrEnum):
    """Condition under which a later attempt of the same container can succeed."""

    NEVER = "never"
    """Nothing on this node: the pod, the node or its software must be changed."""
    ROOM = "room"
    """Another container of the node ends, shrinks or moves."""
    NODE_CHANGE = "node-change"
    """The node or its configuration changes, or a claim is prepared."""


_NEVER, _ROOM, _NODE_CHANGE = RetryCondition

FORMER_REASONS: Final = {
    "CPUOwned": "CPUExclusive",
    "MemoryPolicyWithoutNodes": "MemoryPolicyNeedsNodes",
    "NoCPUs": "NoCPURequest",
    "UnknownCPUs": "CPURequestUnknown",
    "UnpaidCPUs": "CPUsNotRequested",
}
"""Reason by the name that it had in checkpoints and histories of older versions."""


class RejectionReason(StrEnum):
    """Reason for a rejection: metric label, first word of the message, anchor of its remedy.

    docs/troubleshooting.md explains each of them.

    Attributes:
        retry: condition under which a later attempt can succeed.
        allows_moves: True if other containers are moved to make room.
    """

    retry: RetryCondition
    allows_moves: bool

    def __new__(cls, value: str, retry: RetryCondition, allows_moves: bool = False) -> Self:
        """Build a member with its properties."""
        member = str.__new__(cls, value)
        member._value_, member.retry, member.allows_moves = value, retry, allows_moves
        return member

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        """Find the member of a former reason."""
        current = FORMER_REASONS.get(str(value))
        return next((reason for reason in cls if reason == current), None)

    TOPOLOGY_AFFINITY = "TopologyAffinityError", _ROOM, True
    DEVICE_AFFINITY = "DeviceAffinityError", _ROOM, True
    NOT_ENOUGH_CPUS = "NotEnoughCPUs", _ROOM, True
    NOT_ENOUGH_MEMORY = "NotEnoughMemory", _ROOM, True
    SMT_ALIGNMENT = "SMTAlignmentError", _ROOM, True
    SHARED_POOL_FLOOR = "SharedPoolFloor", _ROOM
    SHARED_POOL_EMPTY = "SharedPoolEmpty", _ROOM
    QUOTA_EXCEEDED = "QuotaExceeded", _ROOM
    CPU_EXCLUSIVE = "CPUExclusive", _ROOM
    CPU_LISTED = "CPUListed", _ROOM
    CLAIM_IN_USE = "ClaimInUse", _ROOM
    CLAIM_NOT_PREPARED = "ClaimNotPrepared", _NODE_CHANGE
    CPU_OFFLINE = "CPUOffline", _NODE_CHANGE
    CPU_NOT_ALLOWED = "CPUNotAllowed", _NODE_CHANGE
    CPU_RESERVED = "CPUReserved", _NODE_CHANGE
    NUMA_NODE_NOT_ALLOWED = "NUMANodeNotAllowed", _NODE_CHANGE
    NOT_PERMITTED = "NotPermitted", _NODE_CHANGE
    KUBELET_PINNED = "KubeletPinned", _NEVER
    INVALID_ANNOTATION = "InvalidAnnotation", _NEVER
    FRACTIONAL_CPUS = "FractionalCPUs", _NEVER
    NO_CPU_REQUEST = "NoCPURequest", _NEVER
    CPU_REQUEST_UNKNOWN = "CPURequestUnknown", _NEVER
    CPUS_NOT_REQUESTED = "CPUsNotRequested", _NEVER
    SLOTS_MISMATCH = "SlotsMismatch", _NEVER
    SLOTS_CONFLICT = "SlotsConflict", _NEVER
    INVALID_SLOTS = "InvalidSlots", _NEVER
    UNKNOWN_CPU = "UnknownCPU", _NEVER
    UNKNOWN_NUMA_NODE = "UnknownNUMANode", _NEVER
    NUMA_NODE_WITHOUT_MEMORY = "NUMANodeWithoutMemory", _NEVER
    RUNTIME_ADDS_CPUS = "RuntimeAddsCPUs", _NEVER
    MEMORY_POLICY_UNSUPPORTED = "MemoryPolicyUnsupported", _NEVER
    MEMORY_POLICY_NEEDS_NODES = "MemoryPolicyNeedsNodes", _NEVER


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A mistake in a request, or a shortage.

    Attributes:
        detail: one line for the pod's author, without pod and container: the thing, its value and
            what was expected, or the demand, the free amount and the rule.
        allows_best_effort: True if more NUMA nodes may do, if ``on-failure`` permits it.
    """

    reason: RejectionReason
    detail: str
    rule: str
    allows_best_effort: bool = False


def read_reason_and_detail(text: str, pod: str, container: str) -> tuple[str, str] | None:
    """Read a rejection's reason and detail from the message of runtime and kubelet.

    ``pod`` is ``namespace/name``. The reason is that of the version that runs on the node.
    """
    prefix, separator, detail = text.partition(f": pod {pod}, container {container}: ")
    reason = prefix.rpartition(" ")[2].rpartition('"')[2]
    return (reason, detail) if separator and reason.isalpha() else None
