"""Which memory policies this node's runtime and kernel can set.

A runtime hands a memory policy on to its OCI runtime from NRI 0.12 on, which is the first release
that tells its own version. What the OCI runtime does with it nobody tells: one that
does not know it leaves it out without a word, and `/proc/PID/numa_maps` alone shows it.
"""

from __future__ import annotations

from typing import Final

from nri_numa.engine.values.memory_policy import MemoryPolicies, MemoryPolicy
from nri_numa.nri.wire.versions import RuntimeInfo, parse_version

SINCE: Final = {
    MemoryPolicy.PREFERRED_MANY: (5, 15),
    MemoryPolicy.WEIGHTED_INTERLEAVE: (6, 9),
}
"""Kernels that have what not every kernel has, set_mempolicy(2)."""

_INSTEAD: Final = {
    MemoryPolicy.PREFERRED_MANY: MemoryPolicy.PREFERRED,
    MemoryPolicy.WEIGHTED_INTERLEAVE: MemoryPolicy.INTERLEAVE,
}


def memory_policies(info: RuntimeInfo, kernel: str, *, over_cri: bool) -> MemoryPolicies:
    """What can be set here.

    Args:
        info: what the runtime said of itself.
        kernel: its release, ``6.1.0-18-amd64``; one that cannot be read is taken for a new one.
        over_cri: containers are watched over CRI, and met when they exist.
    """
    if over_cri:
        clause = f"{info.name} {info.version} is watched over CRI, which knows none; expected NRI"
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    if not info.nri_version:
        clause = (
            f"{info.name} {info.version} hands none on (its NRI is older than 0.12); expected "
            "containerd 2.3 or newer, or another runtime with NRI 0.12, and runc 1.4 or newer"
        )
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    release = parse_version(kernel)
    return MemoryPolicies(
        {
            mode: f"Linux {kernel} does not have it; expected Linux {since[0]}.{since[1]} or "
            f"newer, or {_INSTEAD[mode]}"
            for mode, since in SINCE.items()
            if release is not None and release[:2] < since
        }
    )
