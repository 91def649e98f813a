"""Reasons of rejections, and when the kubelet's next attempt can succeed.

Generated from nri_numa/model/reasons.py: ``python -m tools.docs_regions``.
"""

RETRY_CONDITIONS = {
    "TopologyAffinityError": "room",
    "DeviceAffinityError": "room",
    "NotEnoughCPUs": "room",
    "NotEnoughMemory": "room",
    "SMTAlignmentError": "room",
    "SharedPoolFloor": "room",
    "SharedPoolEmpty": "room",
    "QuotaExceeded": "room",
    "CPUOwned": "room",
    "CPUListed": "room",
    "ClaimInUse": "room",
    "ClaimNotPrepared": "node-change",
    "CPUOffline": "node-change",
    "CPUNotAllowed": "node-change",
    "CPUReserved": "node-change",
    "NUMANodeNotAllowed": "node-change",
    "NotPermitted": "node-change",
    "KubeletPinned": "never",
    "InvalidAnnotation": "never",
    "FractionalCPUs": "never",
    "NoCPUs": "never",
    "UnknownCPUs": "never",
    "UnpaidCPUs": "never",
    "SlotsMismatch": "never",
    "SlotsConflict": "never",
    "InvalidSlots": "never",
    "UnknownCPU": "never",
    "UnknownNUMANode": "never",
    "NUMANodeWithoutMemory": "never",
    "MemoryPolicyUnsupported": "never",
    "MemoryPolicyWithoutNodes": "never",
}
