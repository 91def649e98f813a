"""CPUs and memory nodes that containers on this machine are allowed to use.

The first available of three sources counts:

1. the cgroup of all pods: the kernel limits a container's cpuset to that of its parent
   (cgroup-v2.rst, ``cpuset.cpus.effective``);
2. the cgroup of this process, on a machine whose pods' cgroup does not exist yet;
3. the CPU affinity of this process, from /proc/self/status, if no cgroup files are visible. The
   kernel leaves isolated CPUs out of it although a cpuset may have them, so they are added.

The order matters: the affinity of this process may be narrow for reasons that do not concern
containers (``CPUAffinity=`` of systemd, ``taskset``).

On version 2 the CPUs of cpuset partitions are not in any of them. If this process's own cgroup is a
partition or is inside one, the CPUs outside of the partition count. On version 1 exclusive cpusets
are subtracted.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from nri_numa.machine.tree import Tree
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet, union_cpus
from nri_numa.model.machine import CgroupPartitionKind, Partition, cpus_text

_IdSetT = TypeVar("_IdSetT", CPUSet, NUMASet)

_POD_CGROUPS = (
    "kubepods.slice",
    "kubepods",
    "kubelet.slice/kubelet-kubepods.slice",  # a cluster inside a container (kind)
    "kubelet/kubepods",
)
_PODS_CGROUP_PATTERN: Final = re.compile(r"/((?:.*?/)?(?:[^/]+-)?kubepods(?:\.slice)?)/")
"""The pods' cgroup in the path of this process's cgroup, whatever the kubelet's cgroupRoot is."""
_CPU_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
_MEM_FILES = ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems", "mems")


class UsableIds(msgspec.Struct, frozen=True, kw_only=True):
    """CPUs and memory nodes that containers can have; None without a limit.

    Attributes:
        source: origin of the limit, as the subject of a sentence.
    """

    cpus: CPUSet | None
    mems: NUMASet | None
    source: str

    def allowed_cpus(self, online: CPUSet) -> CPUSet:
        """Return the online CPUs that containers can have; a limit without any is ignored."""
        return online if self.cpus is None else online & self.cpus or online

    def withheld_memory_nodes(self, with_memory: NUMASet) -> NUMASet:
        """Return the NUMA nodes whose memory is not allowed; a limit without any is ignored."""
        allowed = with_memory if self.mems is None else with_memory & self.mems
        return with_memory - allowed if allowed else NUMASet()


def read_usable_ids(tree: Tree, isolated: CPUSet) -> UsableIds:
    """Read the limits of all containers from the first available source."""
    self_path = tree.read_file("proc/self/cpuset") or ""
    # A path with "/.." is outside of this process's cgroup namespace.
    self_path = self_path if self_path.startswith("/") and ".." not in self_path.split("/") else ""
    match = _PODS_CGROUP_PATTERN.match(self_path)
    for mount in USUAL_CPUSET_MOUNTS:
        for cgroup in (match[1], *_POD_CGROUPS) if match else _POD_CGROUPS:
            limits = _cgroup_usable_ids(tree, f"{mount}/{cgroup}", f"the pods' cgroup {cgroup}")
            if limits is not None:
                return limits
    if self_path:
        for mount in cpuset_mounts(tree):
            paths, source = _own_cgroups_outside_partition(tree, mount, self_path)
            for path in paths:
                limits = _cgroup_usable_ids(tree, f"{mount}{path}", source)
                if limits is not None:
                    remaining_cpus = (limits.cpus or NO_CPUS) - cpus_of_valid_partitions(
                        _find_exclusive_cgroups(tree, mount)
                    )
                    return replace(limits, cpus=remaining_cpus) if remaining_cpus else limits
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


def _own_cgroups_outside_partition(tree: Tree, mount: str, self_path: str) -> tuple[list[str], str]:
    """List this process's cgroup and its ancestors outside of any partition, and their source."""
    paths = list(_cgroup_and_ancestors(self_path))
    indices = [n for n, path in enumerate(paths) if path and is_partition(tree, f"{mount}{path}")]
    if not indices:
        return paths, f"our cgroup {self_path}"
    outer_paths = paths[indices[-1] + 1 :]
    return outer_paths, f"the cgroup {outer_paths[0] or '/'} (ours, {self_path}, is in a partition)"


def _cgroup_usable_ids(tree: Tree, directory: str, source: str) -> UsableIds | None:
    for cpu_file, mem_file in zip(_CPU_FILES, _MEM_FILES, strict=True):
        cpus = _parse_ids(CPUSet, tree.read_file(f"{directory}/{cpu_file}"))
        if cpus:
            mems = _parse_ids(NUMASet, tree.read_file(f"{directory}/{mem_file}"))
            return UsableIds(cpus=cpus, mems=mems or None, source=source)
    return None


def _cgroup_and_ancestors(path: str) -> Iterator[str]:
    """List a cgroup and its ancestors; the cpuset controller may be off in the leaf."""
    path = path.rstrip("/")
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _parse_ids(kind: type[_IdSetT], text: str | None) -> _IdSetT | None:
    # None is unknown, which counts as no limit.
    return None if text is None else kind.parse_or_none(text.strip())


# --- cpuset partitions: CPUs of one cgroup that no pod can have -----------------------------------
# On version 2 ``cpuset.cpus.partition`` marks them (cgroup-v2.rst): the CPUs of a partition leave
# the effective set of its parent, and so of its siblings. On version 1 ``cpuset.cpu_exclusive``
# does (cpuset(7)): no sibling may have these CPUs, which the kernel checks only when a sibling's
# list is written.


USUAL_CPUSET_MOUNTS: Final = ("sys/fs/cgroup", "sys/fs/cgroup/cpuset")
"""Usual mounts of cpusets, if proc/mounts has none."""
_CPUSET_FILE_PREFIXES: Final = ("cpuset.", "")
"""Prefixes of version 1 files; empty for a mount with ``noprefix``."""
MAX_SEARCHED_CGROUPS: Final = 2000
"""Maximum number of cgroups that are searched; only a node full of pods has as many."""

_CONTROL_FILE_PATTERN: Final = re.compile(
    r"(cgroup|cpu|cpuset|cpuacct|memory|io|blkio|pids|hugetlb|rdma|misc|irq|dmem|net_cls|perf_event)"
    r"\.|notify_on_release$|tasks$|release_agent$"
)
"""Control files; systemd escapes unit names that begin like one (cg_needs_escape)."""
_PARTITION_STATE_PATTERN: Final = re.compile(r"(root|isolated)(?: invalid(?: \((.*)\))?)?")


def cpuset_mounts(tree: Tree) -> Iterator[str]:
    """List the mounts of cpusets in proc/mounts, or the usual ones if it has none."""
    is_listed = False
    for line in (tree.read_file("proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) < 4 or not fields[1].startswith("/"):
            continue
        kind, options = fields[2], fields[3].split(",")
        if kind in ("cpuset", "cgroup2") or (kind == "cgroup" and "cpuset" in options):
            is_listed = True
            yield fields[1].strip("/")
    if not is_listed:
        yield from USUAL_CPUSET_MOUNTS


def find_partitions(tree: Tree, unexplained: CPUSet) -> tuple[Partition, ...]:
    """Find the partitions that withhold CPUs from pods, valid or not, in the order of their paths.

    The cgroup of all pods and its ancestors withhold nothing from pods. The pods' cgroup is also
    searched if no partition outside of it has the ``unexplained`` CPUs (online and not allowed). On
    version 1 only children of the root count: the parent of an exclusive cgroup is exclusive too.
    """
    by_cgroup: dict[str, Partition] = {}
    for mount in cpuset_mounts(tree):
        if tree.read_file(f"{mount}/cpuset.cpus.effective") is None:
            partitions = _find_exclusive_cgroups(tree, mount)
        else:
            pods = [f"{mount}/{name}" for name in _POD_CGROUPS]
            partitions = _search_partitions(tree, mount, _list_child_cgroups(tree, mount), pods)
            if unexplained - cpus_of_valid_partitions(partitions):
                partitions += _search_partitions(tree, mount, pods)
        by_cgroup |= {p.cgroup: p for p in partitions}
    # A pods' cgroup that is a partition, or is inside one, has these CPUs itself.
    pod_paths = {path for name in _POD_CGROUPS for path in _cgroup_and_ancestors(name)}
    return tuple(p for name, p in sorted(by_cgroup.items()) if name not in pod_paths)


def cpus_of_valid_partitions(partitions: Collection[Partition]) -> CPUSet:
    """Return the CPUs of all valid partitions."""
    return union_cpus(p.cpus for p in partitions if not p.problem)


def _find_exclusive_cgroups(tree: Tree, mount: str) -> list[Partition]:
    """Find the exclusive cgroups of version 1 directly below a mount, except those of pods."""
    result: list[Partition] = []
    for prefix in _CPUSET_FILE_PREFIXES:
        # Only a hierarchy with cpusets has the file in its root, which is always exclusive.
        if tree.read_file(f"{mount}/{prefix}cpu_exclusive") is None:
            continue
        pods = {name.partition("/")[0] for name in _POD_CGROUPS}
        for directory in _list_child_cgroups(tree, mount)[:MAX_SEARCHED_CGROUPS]:
            name = directory.removeprefix(f"{mount}/")
            if name not in pods and tree.read_file(f"{directory}/{prefix}cpu_exclusive") == "1":
                cpus = _parse_ids(CPUSet, tree.read_file(f"{directory}/{prefix}cpus")) or NO_CPUS
                result.append(Partition(cgroup=name, kind=CgroupPartitionKind.EXCLUSIVE, cpus=cpus))
    return result


def is_partition(tree: Tree, directory: str) -> bool:
    """True if a cgroup has CPUs that its siblings do not have."""
    match = _PARTITION_STATE_PATTERN.fullmatch(
        tree.read_file(f"{directory}/cpuset.cpus.partition") or ""
    )
    if match is not None:
        return match[0] == match[1]
    return "1" in (
        tree.read_file(f"{directory}/{prefix}cpu_exclusive") for prefix in _CPUSET_FILE_PREFIXES
    )


def partition_sentence(partition: Partition) -> str:
    """State the effect of a partition on containers."""
    name, kind = partition.cgroup, partition.kind
    if partition.problem:
        return f"the cgroup {name} should be a partition ({kind}) and is not: " + (
            partition.problem
        )
    subject = cpus_text(partition.cpus, "belongs", "belong")
    kind_text = "cpu_exclusive" if kind is CgroupPartitionKind.EXCLUSIVE else kind.value
    return f"{subject} to the cpuset partition {name} ({kind_text}), containers cannot have them"


def _search_partitions(
    tree: Tree, mount: str, start: Sequence[str], excluded: Collection[str] = ()
) -> list[Partition]:
    """Search cgroups of version 2 and their descendants, except those in ``excluded``."""
    queue, count = deque(start), 0
    partitions: list[Partition] = []
    while queue and count < MAX_SEARCHED_CGROUPS:
        directory = queue.popleft()
        if directory in excluded:
            continue
        count += 1
        state = tree.read_file(f"{directory}/cpuset.cpus.partition")
        if state is None:
            continue  # no cpuset controller here, nor in any descendant
        match = _PARTITION_STATE_PATTERN.fullmatch(state)
        if match is not None:
            valid = match[0] == match[1]
            # Kernels before 6.7 have no exclusive set; delegated CPUs are those of the children.
            exclusive = f"{directory}/cpuset.cpus.exclusive.effective" if valid else ""
            names = (exclusive, f"{directory}/cpuset.cpus{'.effective' * valid}")
            lists = (_parse_ids(CPUSet, tree.read_file(name)) for name in names if name)
            partitions.append(
                Partition(
                    cgroup=directory.removeprefix(f"{mount}/"),
                    kind=CgroupPartitionKind(match[1]),
                    cpus=next(filter(None, lists), NO_CPUS),
                    problem="" if valid else match[2] or "the kernel gives no reason",
                )
            )
        queue.extend(_list_child_cgroups(tree, directory))
    return partitions


def _list_child_cgroups(tree: Tree, directory: str) -> list[str]:
    return [
        f"{directory}/{name}"
        for name in tree.list_directory(directory)
        if not _CONTROL_FILE_PATTERN.match(name)
    ]
