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

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.machine.tree import Tree
from nri_numa.model.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import CgroupPartitionKind, Partition, cpus_text

_IdSetT = TypeVar("_IdSetT", CPUSet, NUMASet)

_POD_CGROUPS = (
    "kubepods.slice",
    "kubepods",
    "kubelet.slice/kubelet-kubepods.slice",  # a cluster inside a container (kind)
    "kubelet/kubepods",
)
_PODS_CGROUP_PATTERN: Final = re.compile(r"/((?:.*?/)?(?:[^/]+-)?kubepods(?:\.slice)?)/")
"""The pods' cgroup in the path of ours, wherever the kubelet's cgroupRoot is."""
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

    def allowed_cpus(self, online: CPUSet) -> CPUSet:
        """CPUs that containers can have; a limit that leaves none of those online is none."""
        return online if self.cpus is None else online & self.cpus or online

    def withheld_memory_nodes(self, with_memory: NUMASet) -> NUMASet:
        """NUMA nodes whose memory they cannot have; never all: we run, so we have some."""
        left = with_memory if self.mems is None else with_memory & self.mems
        return with_memory - left if left else NUMASet()


def read_usable_ids(tree: Tree, isolated: CPUSet) -> UsableIds:
    """Find the narrowest set that concerns all containers."""
    own = tree.read_file("proc/self/cpuset") or ""
    # "/.." at its head: the cgroup lies outside of what our cgroup namespace shows.
    own = own if own.startswith("/") and ".." not in own.split("/") else ""
    ours = _PODS_CGROUP_PATTERN.match(own)
    for mount in USUAL_CPUSET_MOUNTS:
        for cgroup in (ours[1], *_POD_CGROUPS) if ours else _POD_CGROUPS:
            limits = _cgroup_usable_ids(tree, f"{mount}/{cgroup}", f"the pods' cgroup {cgroup}")
            if limits is not None:
                return limits
    if own:
        for mount in cpuset_mounts(tree):
            paths, source = _own_cgroups_outside_partition(tree, mount, own)
            for path in paths:
                limits = _cgroup_usable_ids(tree, f"{mount}{path}", source)
                if limits is not None:
                    left = (limits.cpus or NO_CPUS) - cpus_of_valid_partitions(
                        _find_exclusive_cgroups(tree, mount)
                    )
                    return replace(limits, cpus=left) if left else limits
    status = tree.read_file("proc/self/status") or ""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    cpus = _parse_ids(CPUSet, fields.get("Cpus_allowed_list"))
    if cpus is not None and isolated:
        cpus |= isolated - cpus_of_valid_partitions(find_partitions(tree, NO_CPUS))
    return UsableIds(
        cpus=cpus,
        mems=_parse_ids(NUMASet, fields.get("Mems_allowed_list")),
        source="/proc/self/status",
    )


def _own_cgroups_outside_partition(tree: Tree, mount: str, own: str) -> tuple[list[str], str]:
    """Our cgroup and those around it, from the first that is in no partition; and who speaks."""
    paths = list(_cgroup_and_ancestors(own))
    within = [n for n, path in enumerate(paths) if path and is_partition(tree, f"{mount}{path}")]
    if not within:
        return paths, f"our cgroup {own}"
    left = paths[within[-1] + 1 :]
    return left, f"the cgroup {left[0] or '/'} (ours, {own}, is in a partition)"


def _cgroup_usable_ids(tree: Tree, directory: str, source: str) -> UsableIds | None:
    for cpu_file, mem_file in zip(_CPU_FILES, _MEM_FILES, strict=True):
        cpus = _parse_ids(CPUSet, tree.read_file(f"{directory}/{cpu_file}"))
        if cpus:
            mems = _parse_ids(NUMASet, tree.read_file(f"{directory}/{mem_file}"))
            return UsableIds(cpus=cpus, mems=mems or None, source=source)
    return None


def _cgroup_and_ancestors(path: str) -> Iterator[str]:
    """Give a cgroup and its ancestors; the cpuset controller may not reach down to the leaf."""
    path = path.rstrip("/")
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _parse_ids(kind: type[_IdSetT], text: str | None) -> _IdSetT | None:
    if text is None:
        return None
    try:
        return kind.parse(text.strip())
    except ListFormatError:
        return None  # nothing can be concluded, which is the same as no limit


# --- cpuset partitions: CPUs that one cgroup has for itself, so that no pod can have them ---------
# Version 2 says so in ``cpuset.cpus.partition`` (cgroup-v2.rst): the CPUs of a partition leave
# the effective set of the cgroup above it, and so of all beside it. Version 1 says so in
# ``cpuset.cpu_exclusive`` (cpuset(7)): none beside it may have these CPUs, which the kernel finds
# out only when that is tried.


USUAL_CPUSET_MOUNTS: Final = ("sys/fs/cgroup", "sys/fs/cgroup/cpuset")
"""Where cpusets are mounted unless proc/mounts says otherwise."""
_CPUSET_FILE_PREFIXES: Final = ("cpuset.", "")
"""Of the files of version 1; without one where it is mounted with ``noprefix``."""
MAX_SEARCHED_CGROUPS: Final = 2000
"""Cgroups that are looked at; a node full of pods has as many, and nothing else has."""

_CONTROL_FILE_PATTERN: Final = re.compile(
    r"(cgroup|cpu|cpuset|cpuacct|memory|io|blkio|pids|hugetlb|rdma|misc|irq|dmem|net_cls|perf_event)"
    r"\.|notify_on_release$|tasks$|release_agent$"
)
"""Control files; systemd escapes names of units that begin like one (cg_needs_escape)."""
_PARTITION_STATE_PATTERN: Final = re.compile(r"(root|isolated)(?: invalid(?: \((.*)\))?)?")


def cpuset_mounts(tree: Tree) -> Iterator[str]:
    """Where cpusets are mounted: as proc/mounts says, else the usual places."""
    found = False
    for line in (tree.read_file("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 4 or not words[1].startswith("/"):
            continue
        kind, options = words[2], words[3].split(",")
        if kind in ("cpuset", "cgroup2") or (kind == "cgroup" and "cpuset" in options):
            found = True
            yield words[1].strip("/")
    if not found:
        yield from USUAL_CPUSET_MOUNTS


def find_partitions(tree: Tree, unexplained: CPUSet) -> tuple[Partition, ...]:
    """Find the cgroups that keep CPUs from pods, or were meant to, in the order of their paths.

    The cgroup of all pods, and what it lies in, keep nothing from pods. Where no partition beside
    them has the CPUs that are ``unexplained`` (online and not for containers), they are looked
    through as well. On version 1 only what lies directly below the root counts: a cgroup that is
    exclusive lies in one that is.
    """
    found: dict[str, Partition] = {}
    for mount in cpuset_mounts(tree):
        if tree.read_file(f"{mount}/cpuset.cpus.effective") is None:
            here = _find_exclusive_cgroups(tree, mount)
        else:
            pods = [f"{mount}/{name}" for name in _POD_CGROUPS]
            here = _search_partitions(tree, mount, _list_child_cgroups(tree, mount), apart=pods)
            if unexplained - cpus_of_valid_partitions(here):
                here += _search_partitions(tree, mount, pods)
        found |= {one.cgroup: one for one in here}
    # A pods' cgroup that is a partition, or lies in one, has these CPUs.
    around = {path for name in _POD_CGROUPS for path in _cgroup_and_ancestors(name)}
    return tuple(one for name, one in sorted(found.items()) if name not in around)


def cpus_of_valid_partitions(partitions: Collection[Partition]) -> CPUSet:
    """The CPUs of all that are valid."""
    bits = 0
    for one in partitions:
        bits |= 0 if one.problem else one.cpus.bits
    return CPUSet.from_bits(bits)


def _find_exclusive_cgroups(tree: Tree, mount: str) -> list[Partition]:
    """Of version 1: who directly below a mount has CPUs for itself, the pods left out."""
    found: list[Partition] = []
    for prefix in _CPUSET_FILE_PREFIXES:
        # Only a hierarchy with cpusets has the file at its root; the root is exclusive always.
        if tree.read_file(f"{mount}/{prefix}cpu_exclusive") is None:
            continue
        apart = {name.partition("/")[0] for name in _POD_CGROUPS}
        for directory in _list_child_cgroups(tree, mount)[:MAX_SEARCHED_CGROUPS]:
            name = directory.removeprefix(f"{mount}/")
            if name not in apart and tree.read_file(f"{directory}/{prefix}cpu_exclusive") == "1":
                cpus = _parse_ids(CPUSet, tree.read_file(f"{directory}/{prefix}cpus")) or NO_CPUS
                found.append(Partition(cgroup=name, kind=CgroupPartitionKind.EXCLUSIVE, cpus=cpus))
    return found


def is_partition(tree: Tree, directory: str) -> bool:
    """Whether a cgroup has CPUs that those beside it have not."""
    match = _PARTITION_STATE_PATTERN.fullmatch(
        tree.read_file(f"{directory}/cpuset.cpus.partition") or ""
    )
    if match is not None:
        return match[0] == match[1]
    return "1" in (
        tree.read_file(f"{directory}/{prefix}cpu_exclusive") for prefix in _CPUSET_FILE_PREFIXES
    )


def partition_sentence(partition: Partition) -> str:
    """What a partition means for containers."""
    name, kind = partition.cgroup, partition.kind
    if partition.problem:
        return f"the cgroup {name} is meant to be a partition ({kind}) and is none: " + (
            partition.problem
        )
    whose = cpus_text(partition.cpus, "belongs", "belong")
    what = "cpu_exclusive" if kind is CgroupPartitionKind.EXCLUSIVE else kind.value
    return f"{whose} to the cpuset partition {name} ({what}), containers cannot have them"


def _search_partitions(
    tree: Tree, mount: str, start: Sequence[str], apart: Collection[str] = ()
) -> list[Partition]:
    """Look through cgroups of version 2 and all within them, but those that are ``apart``."""
    waiting, seen = deque(start), 0
    found: list[Partition] = []
    while waiting and seen < MAX_SEARCHED_CGROUPS:
        directory = waiting.popleft()
        if directory in apart:
            continue
        seen += 1
        state = tree.read_file(f"{directory}/cpuset.cpus.partition")
        if state is None:
            continue  # without the controller, and so is everything below
        match = _PARTITION_STATE_PATTERN.fullmatch(state)
        if match is not None:
            valid = match[0] == match[1]
            # Kernels before 6.7 have one set; what it gave on is that of the cgroups below.
            exclusive = f"{directory}/cpuset.cpus.exclusive.effective" if valid else ""
            names = (exclusive, f"{directory}/cpuset.cpus{'.effective' * valid}")
            lists = (_parse_ids(CPUSet, tree.read_file(name)) for name in names if name)
            found.append(
                Partition(
                    cgroup=directory.removeprefix(f"{mount}/"),
                    kind=CgroupPartitionKind(match[1]),
                    cpus=next(filter(None, lists), NO_CPUS),
                    problem="" if valid else match[2] or "the kernel does not say why",
                )
            )
        waiting.extend(_list_child_cgroups(tree, directory))
    return found


def _list_child_cgroups(tree: Tree, directory: str) -> list[str]:
    return [
        f"{directory}/{name}"
        for name in tree.list_directory(directory)
        if not _CONTROL_FILE_PATTERN.match(name)
    ]
