"""Cpuset partitions: CPUs that one cgroup took for itself, so that no pod can have them.

Version 2 says so in ``cpuset.cpus.partition`` (cgroup-v2.rst): the CPUs of a partition leave the
effective set of the cgroup above it, and so of everybody beside it. Version 1 says so in
``cpuset.cpu_exclusive`` (cpuset(7)): nobody beside it may have these CPUs, which the kernel finds
out only when somebody tries.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from nri_numa.machine.cpuset import NO_CPUS, CPUSet, ListFormatError
from nri_numa.machine.model import Partition, PartitionKind, cpus_text
from nri_numa.machine.tree import Tree

USUAL: Final = ("sys/fs/cgroup", "sys/fs/cgroup/cpuset")
"""Where cpusets are mounted unless proc/mounts says otherwise."""
_PREFIXES: Final = ("cpuset.", "")
"""Of the files of version 1; without one where it is mounted with ``noprefix``."""
MOST: Final = 2000
"""Cgroups that are looked at; a node full of pods has as many, and nothing else has."""

_FILE: Final = re.compile(
    r"(cgroup|cpu|cpuset|cpuacct|memory|io|blkio|pids|hugetlb|rdma|misc|irq|dmem|net_cls|perf_event)"
    r"\.|notify_on_release$|tasks$|release_agent$"
)
"""Control files; systemd escapes names of units that begin like one (cg_needs_escape)."""
_STATE: Final = re.compile(r"(root|isolated)(?: invalid(?: \((.*)\))?)?")


@dataclass(slots=True)
class _Walk:
    """Cgroups that are still to be looked at, and how many have been."""

    waiting: deque[str]
    apart: Collection[str]
    seen: int = 0
    found: list[Partition] = field(default_factory=list)


def cpuset_mounts(tree: Tree) -> Iterator[str]:
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
        yield from USUAL


def read_partitions(tree: Tree, pods: Sequence[str], unexplained: CPUSet) -> tuple[Partition, ...]:
    """Find the cgroups that keep CPUs from pods, or were meant to.

    Args:
        tree: the machine.
        pods: where the cgroup of all pods may be, below a mount. It, and what it lies in, keep
            nothing from pods.
        unexplained: CPUs that are online and not for containers. Where no partition beside the
            pods has them, the pods' own cgroups are looked through as well.

    Returns:
        By cgroup. On version 1 only what lies directly below the root: a cgroup that is exclusive
        lies in one that is.
    """
    found: dict[str, Partition] = {}
    for mount in cpuset_mounts(tree):
        if tree.read(f"{mount}/cpuset.cpus.effective") is None:
            found |= {one.cgroup: one for one in exclusive(tree, mount, pods)}
            continue
        walk = _Walk(deque(_below(tree, mount)), [f"{mount}/{name}" for name in pods])
        _look(tree, mount, walk)
        if unexplained - taken(walk.found):
            walk.waiting.extend(walk.apart)
            walk.apart = ()
            _look(tree, mount, walk)
        found |= {one.cgroup: one for one in walk.found}
    # A pods' cgroup that is a partition, or lies in one, has these CPUs.
    around = {name[:end] for name in pods for end in _ends(name)}
    return tuple(one for name, one in sorted(found.items()) if name not in around)


def taken(partitions: Collection[Partition]) -> CPUSet:
    """The CPUs of all that are valid."""
    bits = 0
    for one in partitions:
        bits |= 0 if one.problem else one.cpus.bits
    return CPUSet.from_bits(bits)


def exclusive(tree: Tree, mount: str, pods: Sequence[str]) -> list[Partition]:
    """Of version 1: who directly below a mount has CPUs for itself, the pods left out."""
    found: list[Partition] = []
    for prefix in _PREFIXES:
        # Only a hierarchy with cpusets has the file at its root; the root is exclusive always.
        if tree.read(f"{mount}/{prefix}cpu_exclusive") is None:
            continue
        apart = {name.partition("/")[0] for name in pods}
        for directory in _below(tree, mount)[:MOST]:
            name = directory.removeprefix(f"{mount}/")
            if name not in apart and tree.read(f"{directory}/{prefix}cpu_exclusive") == "1":
                cpus = _listed(tree, f"{directory}/{prefix}cpus") or NO_CPUS
                found.append(Partition(cgroup=name, kind=PartitionKind.EXCLUSIVE, cpus=cpus))
    return found


def is_partition(tree: Tree, directory: str) -> bool:
    """Whether a cgroup has CPUs that those beside it have not."""
    match = _STATE.fullmatch(tree.read(f"{directory}/cpuset.cpus.partition") or "")
    if match is not None:
        return match[0] == match[1]
    return "1" in (tree.read(f"{directory}/{prefix}cpu_exclusive") for prefix in _PREFIXES)


def sentence(partition: Partition) -> str:
    """What a partition means for containers."""
    name, kind = partition.cgroup, partition.kind
    if partition.problem:
        return f"the cgroup {name} is meant to be a partition ({kind}) and is none: " + (
            partition.problem
        )
    whose = cpus_text(partition.cpus, "belongs", "belong")
    what = "cpu_exclusive" if kind is PartitionKind.EXCLUSIVE else kind.value
    return f"{whose} to the cpuset partition {name} ({what}), containers cannot have them"


def _look(tree: Tree, mount: str, walk: _Walk) -> None:
    while walk.waiting and walk.seen < MOST:
        directory = walk.waiting.popleft()
        if directory in walk.apart:
            continue
        walk.seen += 1
        state = tree.read(f"{directory}/cpuset.cpus.partition")
        if state is None:
            continue  # without the controller, and so is everything below
        match = _STATE.fullmatch(state)
        if match is not None:
            valid = match[0] == match[1]
            cpus = _listed(tree, f"{directory}/cpuset.cpus.exclusive.effective") if valid else None
            walk.found.append(
                Partition(
                    cgroup=directory.removeprefix(f"{mount}/"),
                    kind=PartitionKind(match[1]),
                    # Kernels before 6.7 have one set; what it gave on is that of the cgroups below.
                    cpus=cpus
                    or _listed(tree, f"{directory}/cpuset.cpus{'.effective' * valid}")
                    or NO_CPUS,
                    problem="" if valid else match[2] or "the kernel does not say why",
                )
            )
        walk.waiting.extend(_below(tree, directory))


def _below(tree: Tree, directory: str) -> list[str]:
    return [f"{directory}/{name}" for name in tree.entries(directory) if not _FILE.match(name)]


def _listed(tree: Tree, name: str) -> CPUSet | None:
    try:
        return CPUSet.parse(tree.read(name) or "")
    except ListFormatError:
        return None


def _ends(path: str) -> Iterator[int]:
    """Where the names of a path's ancestors end, and its own."""
    yield from (match.start() for match in re.finditer("/|$", path))
