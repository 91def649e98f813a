"""Which memory policies this node's runtime and kernel can set.

A runtime hands a memory policy on to its OCI runtime from NRI 0.12 on, which is the first release
that tells its own version. What the OCI runtime does with it nobody tells: one that
does not know it leaves it out without a word, and `/proc/PID/numa_maps` alone shows it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from nri_numa.engine.values.workload import RUNTIMES, SINCE, MemoryPolicies, MemoryPolicy
from nri_numa.nri.wire.versions import RuntimeInfo, parse_version

_INSTEAD: Final = {
    MemoryPolicy.PREFERRED_MANY: MemoryPolicy.PREFERRED,
    MemoryPolicy.WEIGHTED_INTERLEAVE: MemoryPolicy.INTERLEAVE,
}


def memory_policies(
    info: RuntimeInfo, kernel: str, *, over_cri: bool, sysfs_root: Path = Path("/")
) -> MemoryPolicies:
    """What can be set here.

    Args:
        info: what the runtime said of itself.
        kernel: its release, ``6.1.0-18-amd64``; one that cannot be read is taken for a new one.
        sysfs_root: holds ``sys/``, where the weights of interleaving are.
        over_cri: containers are watched over CRI, and met when they exist.
    """
    if over_cri:
        clause = f"{info.name} {info.version} is watched over CRI, which knows none; expected NRI"
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    if not info.nri_version:
        clause = (
            f"{info.name} {info.version} hands none on (its NRI is older than 0.12); expected "
            f"{RUNTIMES}"
        )
        return MemoryPolicies(dict.fromkeys(MemoryPolicy, clause))
    release = parse_version(kernel)
    return MemoryPolicies(
        {
            mode: f"Linux {kernel} does not have it; expected Linux {since[0]}.{since[1]} or "
            f"newer, or {_INSTEAD[mode]}"
            for mode, since in SINCE.items()
            if release is not None and release[:2] < since
        },
        weights=_weights(sysfs_root / "sys/kernel/mm/mempolicy/weighted_interleave"),
    )


def _weights(folder: Path) -> dict[int, int]:
    """``node0`` and so on, each a number from 1 to 255; what cannot be read counts as 1."""
    found: dict[int, int] = {}
    for path in sorted(folder.glob("node*")):
        with suppress(OSError, ValueError):
            weight = int(path.read_text(encoding="ascii"))
            if 1 <= weight <= 255:
                found[int(path.name.removeprefix("node"))] = weight
    return found
