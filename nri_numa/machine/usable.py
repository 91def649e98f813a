"""Which CPUs and which memory containers on this machine can have at all.

Three sources, the first that is there counts:

1. the cgroup of all pods: whatever is written into a container's cpuset, the kernel keeps it
   inside its parent's (cgroup-v2.rst, ``cpuset.cpus.effective``);
2. the cgroup that we ourselves run in, for a machine whose pods' cgroup does not exist yet;
3. the CPUs we may run on, from /proc/self/status, where no cgroup files can be seen. The kernel
   leaves isolated CPUs out there although a cpuset may name them, so they are added again.

The order matters: our own affinity may be narrow for reasons that do not concern containers
(``CPUAffinity=`` of systemd, ``taskset``).

On version 2 each of them is without the CPUs of cpuset partitions already; where ours is one, or
lies in one, what is left outside of it counts. On version 1 exclusive cpusets are taken off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.machine.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet
from nri_numa.machine.model import Partition
from nri_numa.machine.partitions import (
    USUAL,
    cpuset_mounts,
    exclusive,
    is_partition,
    read_partitions,
    taken,
)
from nri_numa.machine.tree import Tree

_AnySet = TypeVar("_AnySet", CPUSet, NUMASet)

_POD_CGROUPS = (
    "kubepods.slice",
    "kubepods",
    "kubelet.slice/kubelet-kubepods.slice",  # a cluster inside a container (kind)
    "kubelet/kubepods",
)
_CPU_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
_MEM_FILES = ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems", "mems")


class UsableIds(msgspec.Struct, frozen=True, kw_only=True):
    """What containers can have; None where nothing limits them.

    Attributes:
        source: who says so, as the subject of a sentence.
    """

    cpus: CPUSet | None
    mems: NUMASet | None
    source: str


def read_limits(tree: Tree, isolated: CPUSet) -> UsableIds:
    """Find the narrowest set that concerns all containers."""
    for mount in USUAL:
        for cgroup in _POD_CGROUPS:
            limits = _cgroup_limits(tree, f"{mount}/{cgroup}", f"the pods' cgroup {cgroup}")
            if limits is not None:
                return limits
    own = tree.read("proc/self/cpuset")
    # "/.." at its head: the cgroup lies outside of what our cgroup namespace shows.
    if own is not None and own.startswith("/") and ".." not in own.split("/"):
        for mount in cpuset_mounts(tree):
            paths, source = _outside(tree, mount, own)
            for path in paths:
                limits = _cgroup_limits(tree, f"{mount}{path}", source)
                if limits is not None:
                    return _less(limits, exclusive(tree, mount, _POD_CGROUPS))
    status = tree.read("proc/self/status") or ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    cpus = _parse(CPUSet, fields.get("Cpus_allowed_list"))
    if cpus is not None and isolated:
        cpus |= isolated - taken(partitions(tree, NO_CPUS))
    return UsableIds(
        cpus=cpus,
        mems=_parse(NUMASet, fields.get("Mems_allowed_list")),
        source="/proc/self/status",
    )


def partitions(tree: Tree, unexplained: CPUSet) -> tuple[Partition, ...]:
    """The cgroups that keep CPUs from containers; see `read_partitions`."""
    return read_partitions(tree, _POD_CGROUPS, unexplained)


def _outside(tree: Tree, mount: str, own: str) -> tuple[list[str], str]:
    """Our cgroup and those around it, from the first that is in no partition; and who speaks."""
    paths = list(_upwards(own))
    within = [n for n, path in enumerate(paths) if path and is_partition(tree, f"{mount}{path}")]
    if not within:
        return paths, f"our cgroup {own}"
    left = paths[within[-1] + 1 :]
    return left, f"the cgroup {left[0] or '/'} (ours, {own}, is in a partition)"


def _less(limits: UsableIds, found: list[Partition]) -> UsableIds:
    """What version 1 lets nobody else have; everything, where that would leave nothing."""
    left = (limits.cpus or NO_CPUS) - taken(found)
    return replace(limits, cpus=left) if left else limits


def _cgroup_limits(tree: Tree, directory: str, source: str) -> UsableIds | None:
    for cpu_file, mem_file in zip(_CPU_FILES, _MEM_FILES, strict=True):
        cpus = _parse(CPUSet, tree.read(f"{directory}/{cpu_file}"))
        if cpus:
            mems = _parse(NUMASet, tree.read(f"{directory}/{mem_file}"))
            return UsableIds(cpus=cpus, mems=mems or None, source=source)
    return None


def _upwards(path: str) -> Iterator[str]:
    """Give a cgroup and its ancestors; the cpuset controller may not reach down to the leaf."""
    path = path.rstrip("/")
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _parse(kind: type[_AnySet], text: str | None) -> _AnySet | None:
    if text is None:
        return None
    try:
        return kind.parse(text.strip())
    except ListFormatError:
        return None  # nothing can be concluded, which is the same as no limit
