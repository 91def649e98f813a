"""Which CPUs and which memory containers on this machine can have at all.

Three sources, the first that is there counts:

1. the cgroup of all pods: whatever is written into a container's cpuset, the kernel keeps it
   inside its parent's (cgroup-v2.rst, ``cpuset.cpus.effective``);
2. the cgroup that we ourselves run in, for a machine whose pods' cgroup does not exist yet;
3. the CPUs we may run on, from /proc/self/status, where no cgroup files can be seen. The kernel
   leaves isolated CPUs out there although a cpuset may name them, so they are added again.

The order matters: our own affinity may be narrow for reasons that do not concern containers
(``CPUAffinity=`` of systemd, ``taskset``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from nri_numa.topology.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.topology.tree import Tree

_AnySet = TypeVar("_AnySet", CPUSet, NUMASet)

_POD_CGROUPS = (
    "kubepods.slice",
    "kubepods",
    "kubelet.slice/kubelet-kubepods.slice",  # a cluster inside a container (kind)
    "kubelet/kubepods",
)
_MOUNT = "sys/fs/cgroup"
_CPU_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
_MEM_FILES = ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems", "mems")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What containers can have; None where nothing limits them.

    Attributes:
        source: who says so, as the subject of a sentence.
    """

    cpus: CPUSet | None
    mems: NUMASet | None
    source: str


def read_limits(tree: Tree, isolated: CPUSet) -> Limits:
    """Find the narrowest set that concerns all containers."""
    for mount in (_MOUNT, f"{_MOUNT}/cpuset"):
        for cgroup in _POD_CGROUPS:
            limits = _cgroup_limits(tree, f"{mount}/{cgroup}", f"the pods' cgroup {cgroup}")
            if limits is not None:
                return limits
    own = tree.read("proc/self/cpuset")
    # "/.." at its head: the cgroup lies outside of what our cgroup namespace shows.
    if own is not None and own.startswith("/") and ".." not in own.split("/"):
        for mount in _mounts(tree):
            for path in _upwards(own):
                limits = _cgroup_limits(tree, f"{mount}{path}", f"our cgroup {own}")
                if limits is not None:
                    return limits
    status = tree.read("proc/self/status") or ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    cpus = _parse(CPUSet, fields.get("Cpus_allowed_list"))
    return Limits(
        cpus=None if cpus is None else cpus | isolated,
        mems=_parse(NUMASet, fields.get("Mems_allowed_list")),
        source="/proc/self/status",
    )


def _cgroup_limits(tree: Tree, directory: str, source: str) -> Limits | None:
    for cpu_file, mem_file in zip(_CPU_FILES, _MEM_FILES, strict=True):
        cpus = _parse(CPUSet, tree.read(f"{directory}/{cpu_file}"))
        if cpus:
            mems = _parse(NUMASet, tree.read(f"{directory}/{mem_file}"))
            return Limits(cpus=cpus, mems=mems or None, source=source)
    return None


def _mounts(tree: Tree) -> Iterator[str]:
    """Where cpusets are mounted: as proc/mounts says, else the usual places."""
    found = False
    for line in (tree.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 4 or not words[1].startswith("/"):
            continue
        kind, options = words[2], words[3].split(",")
        if kind in ("cpuset", "cgroup2") or (kind == "cgroup" and "cpuset" in options):
            found = True
            yield words[1].strip("/")
    if not found:
        yield from (_MOUNT, f"{_MOUNT}/cpuset")


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
