"""The table of docs/troubleshooting.md, from the enumeration of reasons.

``python -m tools.docs_reasons`` writes it.
"""

from __future__ import annotations

from typing import Final

from nri_numa.model.reasons import RejectionReason, RetryCondition
from tools.docs_regions import code, table, write

WAITING: Final = {
    RetryCondition.ROOM: "yes: room",
    RetryCondition.NODE_CHANGE: "yes: node",
    RetryCondition.NEVER: "no",
}

MEANING_AND_REMEDY: Final = {
    "TopologyAffinityError": (
        "no set of NUMA nodes that the policy admits has room",
        "request less, another node, or `best-effort`",
    ),
    "DeviceAffinityError": (
        "everything fits but the devices that the kubelet chose",
        "delete the pod, or `devices: ignore`",
    ),
    "NotEnoughCPUs": (
        "too few CPUs are free for exclusive use, in the form that `smt` needs",
        "fewer CPUs, `smt: spread`, or another node",
    ),
    "NotEnoughMemory": (
        "the memory does not fit the NUMA nodes that it would be pinned to",
        "more NUMA nodes, a lower limit, or `bind: cpu`",
    ),
    "SMTAlignmentError": (
        "not a multiple of whole cores (`smt: full-core`)",
        "one of the numbers in the message",
    ),
    "SharedPoolFloor": (
        "fewer CPUs than `sharedPool` would remain in the shared pool",
        "fewer CPUs; the operator can lower the floor",
    ),
    "SharedPoolEmpty": (
        "it would take the last CPU of the shared pool",
        "fewer CPUs; the operator can set `reservedCPUs`",
    ),
    "QuotaExceeded": ("a quota is used up", "fewer CPUs; the operator can raise it"),
    "CPUExclusive": (
        "`numacpu` names a CPU that is exclusive to another container",
        "wait for that container to end, or list others",
    ),
    "CPUListed": (
        "`numacpu` with `cpus: exclusive` names a CPU of a list that does not yield",
        "list others, or share",
    ),
    "ClaimInUse": (
        "another container has the CPUs of this claim's request",
        "one request for each container",
    ),
    "ClaimNotPrepared": (
        "the claim was not prepared for this pod",
        "one claim for each pod, by a template",
    ),
    "CPUOffline": ("`numacpu` names an offline CPU", "bring it online, or list others"),
    "CPUNotAllowed": (
        "`numacpu` names a CPU outside the cgroup of all pods",
        "list others; the operator can widen that cgroup",
    ),
    "CPUReserved": (
        "`numacpu` names one of `reservedCPUs`",
        "list others; the operator can change `reservedCPUs`",
    ),
    "NUMANodeNotAllowed": (
        "`numamem` names a NUMA node outside the cgroup of all pods",
        "list others; the operator can widen that cgroup",
    ),
    "NotPermitted": (
        "`permissions` forbid this key or value",
        "use what is allowed, or ask the operator",
    ),
    "KubeletPinned": (
        "the kubelet granted this container other CPUs or memory",
        "drop the list; the operator can set `kubelet.overrideGrants`",
    ),
    "InvalidAnnotation": (
        "a key or value is wrong, or two exclude each other",
        "correct what the message names",
    ),
    "FractionalCPUs": (
        "exclusive CPUs, and the number is not whole",
        "a whole number of CPUs, or share",
    ),
    "NoCPURequest": ("exclusive CPUs, and no limit or request says how many", "set a CPU limit"),
    "CPURequestUnknown": ("a request of 256 CPUs or more without a limit", "set a CPU limit"),
    "CPUsNotRequested": (
        "the CPU request covers fewer CPUs than would be exclusive",
        "request all of them, or share",
    ),
    "SlotsMismatch": ("extended resource and CPU limit differ", "make them equal"),
    "SlotsConflict": (
        "the extended resource, beside an annotation that contradicts it",
        "leave one of the two out",
    ),
    "InvalidSlots": (
        "another program wrote the annotation with the slots",
        "the operator finds that program",
    ),
    "UnknownCPU": (
        "`numacpu` names a CPU that does not exist",
        "correct the list, or select such nodes",
    ),
    "UnknownNUMANode": (
        "`numamem` names a NUMA node that does not exist",
        "correct the list; numbers may have gaps",
    ),
    "NUMANodeWithoutMemory": (
        "`numamem` names a NUMA node without memory",
        "name one with memory",
    ),
    "RuntimeAddsCPUs": (
        "CRI-O would add its shared CPUs to CPUs of the container's own",
        "leave its annotation out, or share",
    ),
    "MemoryPolicyUnsupported": (
        "runtime or kernel cannot set the `mempolicy`",
        "leave it out; the operator can upgrade what is named",
    ),
    "MemoryPolicyNeedsNodes": (
        "`mempolicy`, and nothing pins the memory",
        "`numamem`, or a policy",
    ),
}
"""By reason, what it means and what to do; the sections of the page have an example of each."""


def text() -> str:
    """One row for each reason, in the order of the enumeration."""
    rows = []
    for reason in RejectionReason:
        meaning, remedy = MEANING_AND_REMEDY[reason]
        rows.append(
            (f"[{code(reason)}](#{reason.lower()})", meaning, WAITING[reason.retry], remedy)
        )
    return "\n".join(table(("reason", "meaning", "can waiting help?", "what to do"), rows))


if __name__ == "__main__":
    write("troubleshooting.md", "tools.docs_reasons", text())
