"""Why a container is rejected, as values; the sentences about it are made from them.

The kubelet repeats a rejection as ``Reason: message``, and that word is all that reaches those who
read the cluster and not the node: `read_rejection` is the one place where a text is read back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import msgspec

from nri_numa.model.workload import OptionSource


class RetryCondition(StrEnum):
    """What makes a later attempt of the same container succeed."""

    NEVER = "never"
    """Nothing on this node: the pod, the node or its software has to be changed."""
    ROOM = "room"
    """Another container of the node ends, shrinks or moves."""
    NODE_CHANGE = "node-change"
    """The node or its configuration changes, or a claim is prepared."""


class ResponsibleParty(StrEnum):
    """Whose turn it is."""

    TENANT = "tenant"
    OPERATOR = "operator"
    NODE = "node"
    """Nobody's: the node is full."""
    RUNTIME = "runtime"


_NEVER, _ROOM, _NODE_CHANGE = RetryCondition
_TENANT, _OPERATOR, _NODE, _RUNTIME = ResponsibleParty


class RejectionReason(StrEnum):
    """The reason of a rejection: metric label, first word of the message, anchor of its remedy.

    Attributes:
        retry: what has to happen for a later attempt to succeed.
        responsible: whose turn it is.
        meaning: what it says of the container, as a sentence.
        allows_moves: others are moved to make room for it.
    """

    retry: RetryCondition
    responsible: ResponsibleParty
    meaning: str
    allows_moves: bool

    def __new__(
        cls,
        word: str,
        retry: RetryCondition,
        responsible: ResponsibleParty,
        meaning: str,
        allows_moves: bool = False,
    ) -> Self:
        """Make a member of its word and its properties."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.retry, member.responsible = retry, responsible
        member.meaning, member.allows_moves = meaning, allows_moves
        return member

    TOPOLOGY_AFFINITY = (
        "TopologyAffinityError", _ROOM, _NODE,
        "No set of NUMA nodes that its policy admits has everything it needs.", True,
    )  # fmt: skip
    DEVICE_AFFINITY = (
        "DeviceAffinityError", _ROOM, _NODE,
        "It fits, but not on the NUMA nodes of the devices that the kubelet gave it.", True,
    )  # fmt: skip
    NOT_ENOUGH_CPUS = (
        "NotEnoughCPUs", _ROOM, _NODE, "Fewer CPUs are free than it needs.", True,
    )  # fmt: skip
    NOT_ENOUGH_MEMORY = (
        "NotEnoughMemory", _ROOM, _NODE,
        "Less memory, or fewer huge pages, are free on its NUMA nodes than it needs.", True,
    )  # fmt: skip
    SMT_ALIGNMENT = (
        "SMTAlignmentError", _ROOM, _TENANT,
        "Its CPUs cannot be whole cores.", True,
    )  # fmt: skip
    SHARED_POOL_FLOOR = (
        "SharedPoolFloor", _ROOM, _NODE, "Too few CPUs would stay in the shared pool.",
    )  # fmt: skip
    SHARED_POOL_EMPTY = (
        "SharedPoolEmpty", _ROOM, _NODE, "No CPU would stay in the shared pool.",
    )  # fmt: skip
    QUOTA_EXCEEDED = (
        "QuotaExceeded", _ROOM, _OPERATOR, "A quota of the configuration is used up.",
    )  # fmt: skip
    CPU_OWNED = (
        "CPUOwned", _ROOM, _NODE, "A CPU of its list belongs to another container.",
    )  # fmt: skip
    CPU_LISTED = (
        "CPUListed", _ROOM, _NODE, "A CPU that it wants exclusively is in another one's list.",
    )  # fmt: skip
    CLAIM_IN_USE = (
        "ClaimInUse", _ROOM, _TENANT, "Another container has the CPUs of its ResourceClaim.",
    )  # fmt: skip
    CLAIM_NOT_PREPARED = (
        "ClaimNotPrepared", _NODE_CHANGE, _TENANT,
        "Its ResourceClaim is not prepared on this node.",
    )  # fmt: skip
    CPU_OFFLINE = (
        "CPUOffline", _NODE_CHANGE, _OPERATOR, "A CPU of its list is offline.",
    )  # fmt: skip
    CPU_NOT_ALLOWED = (
        "CPUNotAllowed", _NODE_CHANGE, _OPERATOR,
        "A CPU of its list is not in the cgroup of all pods.",
    )  # fmt: skip
    CPU_RESERVED = (
        "CPUReserved", _NODE_CHANGE, _OPERATOR, "A CPU of its list is reserved.",
    )  # fmt: skip
    NUMA_NODE_NOT_ALLOWED = (
        "NUMANodeNotAllowed", _NODE_CHANGE, _OPERATOR,
        "A NUMA node of its list is not in the cgroup of all pods.",
    )  # fmt: skip
    NOT_PERMITTED = (
        "NotPermitted", _NODE_CHANGE, _OPERATOR, "Its namespace may not set this annotation so.",
    )  # fmt: skip
    KUBELET_PINNED = (
        "KubeletPinned", _NEVER, _OPERATOR,
        "The kubelet granted it other CPUs or memory than it lists.",
    )  # fmt: skip
    INVALID_ANNOTATION = (
        "InvalidAnnotation", _NEVER, _TENANT, "An annotation of its pod cannot be read.",
    )  # fmt: skip
    FRACTIONAL_CPUS = (
        "FractionalCPUs", _NEVER, _TENANT, "Exclusive CPUs are whole, and its number is not.",
    )  # fmt: skip
    NO_CPUS = (
        "NoCPUs", _NEVER, _TENANT, "It wants exclusive CPUs and requests none.",
    )  # fmt: skip
    UNKNOWN_CPUS = (
        "UnknownCPUs", _NEVER, _TENANT, "The runtime does not say how many CPUs it requests.",
    )  # fmt: skip
    UNPAID_CPUS = (
        "UnpaidCPUs", _NEVER, _TENANT, "Its CPU request is less than the CPUs it would own.",
    )  # fmt: skip
    SLOTS_MISMATCH = (
        "SlotsMismatch", _NEVER, _TENANT, "It holds another number of slots than of CPUs.",
    )  # fmt: skip
    SLOTS_CONFLICT = (
        "SlotsConflict", _NEVER, _TENANT, "Its annotations contradict the slots it holds.",
    )  # fmt: skip
    INVALID_SLOTS = (
        "InvalidSlots", _NEVER, _RUNTIME, "Another program wrote its slots, and not readably.",
    )  # fmt: skip
    UNKNOWN_CPU = (
        "UnknownCPU", _NEVER, _TENANT, "The machine does not have a CPU of its list.",
    )  # fmt: skip
    UNKNOWN_NUMA_NODE = (
        "UnknownNUMANode", _NEVER, _TENANT, "The machine does not have a NUMA node of its list.",
    )  # fmt: skip
    NUMA_NODE_WITHOUT_MEMORY = (
        "NUMANodeWithoutMemory", _NEVER, _TENANT, "A NUMA node of its list has no memory.",
    )  # fmt: skip
    MEMORY_POLICY_UNSUPPORTED = (
        "MemoryPolicyUnsupported", _NEVER, _RUNTIME,
        "Kernel, runtime or plugin do not know its memory policy.",
    )  # fmt: skip
    MEMORY_POLICY_WITHOUT_NODES = (
        "MemoryPolicyWithoutNodes", _NEVER, _TENANT,
        "Its memory policy needs memory nodes, and nothing pins its memory.",
    )  # fmt: skip

    @property
    def anchor(self) -> str:
        """Where its remedy stands, in the documentation and beside the page."""
        return self.lower()


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """What was found wrong with a request, or what there is too little of.

    Attributes:
        detail: one line for the pod's author, without pod and container: the thing, its value and
            what was expected, or what was needed, what there was, and which rule said no.
        key, value, source: the annotation, rule or default that cannot be read or granted, as it
            was given; empty where a number or a shortage is refused.
    """

    reason: RejectionReason
    detail: str
    rule: str
    key: str = ""
    value: str = ""
    source: OptionSource | None = None
    allows_best_effort: bool = False


def read_rejection(text: str, pod: str, container: str) -> tuple[str, str] | None:
    """Read a rejection's reason and detail out of what runtime and kubelet wrap around it.

    ``pod`` is ``namespace/name``. The reason is that of whatever version runs on the node.
    """
    before, found, detail = text.partition(f": pod {pod}, container {container}: ")
    reason = before.rpartition(" ")[2].rpartition('"')[2]
    return (reason, detail) if found and reason.isalpha() else None
