"""What the kernel says of one container's cgroup, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nri_numa.machine.cpuset import CPUSet, NUMASet

NO_QUOTA: Final = -1
"""CFS quota that means *no limit*: written as it is to cgroup v1, as ``max`` to cgroup v2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cpuset, and where it matters the CPU limit, of one container's real cgroup.

    Attributes:
        cpus, mems: ``cpuset.cpus`` and ``cpuset.mems`` as written; on cgroup v2 empty means
            whatever the parent has.
        effective_cpus, effective_mems: what it can really use; on cgroup v1 the same.
        quota: CFS quota in microseconds per period, `NO_QUOTA` for none; None where it was not
            read.
        above: which cgroup above leaves less of it, in words; empty when none does, or where
            nobody looked.
    """

    cpus: CPUSet
    mems: NUMASet
    effective_cpus: CPUSet
    effective_mems: NUMASet
    quota: int | None = None
    above: str = ""
