"""Where cpusets are: which hierarchy has them, and which cgroup of a container its programs are in.

Hosts mount cgroups in three ways (cgroups(7), systemd's hierarchies): version 1, one directory for
each controller or for several that go together; version 2 alone; or both, where the cpuset
controller is in one of them. OCI runtimes differ too: with the systemd driver on version 2, crun
makes one more cgroup in the container's scope and puts the programs there (crun(1),
``run.oci.systemd.subgroup``); runc does not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from nri_numa.machine.cpuset import NO_CPUS, CPUSet, ListFormatError
from nri_numa.machine.cpuset_files import cpuset_files, text

CRUN_CHILD: Final = "container"
"""What crun calls its cgroup in the scope, unless the container's annotation says otherwise."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The hierarchy that has the cpusets.

    Attributes:
        path: directory that cgroup paths start from.
        unified: it is of version 2.
        effective: of version 1, with an effective set of its own (mounted with
            ``cpuset_v2_mode``).
    """

    path: str
    unified: bool
    effective: bool = False


def find_hierarchy(root: str, *, proc: str = "/proc") -> Hierarchy:
    """Find the cpusets below the directory where cgroup file systems are mounted.

    Args:
        root: ``/sys/fs/cgroup``.
        proc: the proc file system, for the options of mounts.

    Returns:
        Where they are; where they would be on version 1 when there are none.
    """
    if os.path.exists(f"{root}/cgroup.controllers"):
        return Hierarchy(root, unified=True)
    v1 = _v1_mount(root)
    if not os.path.isdir(v1) and "cpuset" in _words(f"{root}/unified/cgroup.controllers"):
        return Hierarchy(f"{root}/unified", unified=True)
    return Hierarchy(v1, unified=False, effective=_v2_mode(v1, proc))


def _v1_mount(root: str) -> str:
    usual = os.path.join(root, "cpuset")
    if os.path.isdir(usual):
        return usual
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return usual
    together = [name for name in names if "cpuset" in name.split(",")]
    return os.path.join(root, together[0]) if together else usual


def _words(path: str) -> list[str]:
    try:
        return text(path).split()
    except OSError:
        return []


def _v2_mode(mount: str, proc: str) -> bool:
    try:
        with open(f"{proc}/self/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                words = line.split()
                if len(words) > 3 and words[1] == mount:
                    return "cpuset_v2_mode" in words[3].split(",")
    except OSError:
        pass
    return False


def inner(directory: str) -> str:
    """The cgroup that crun made in a container's scope, of version 2; empty when there is none."""
    if not directory.endswith(".scope"):
        return ""
    child = f"{directory}/{CRUN_CHILD}"
    return child if os.path.exists(f"{child}/cpuset.cpus.effective") else ""


def narrowed_by(hierarchy: str, directory: str, missing: CPUSet) -> str:
    """Which cgroup above keeps CPUs from one of version 2, in words; empty when none does.

    Where none does they are offline, or the container's own cgroup is no usable partition.

    Args:
        hierarchy: directory of the root.
        directory: of the container.
        missing: CPUs that it is given and cannot use.
    """
    culprit, leaves = "", ""
    above = os.path.dirname(directory)
    while len(above) > len(hierarchy):
        try:
            effective = CPUSet.parse(text(f"{above}/cpuset.cpus.effective"))
        except (OSError, ListFormatError):
            break
        if not missing - effective:
            break
        culprit, leaves = above, str(effective)
        above = os.path.dirname(above)
    else:
        if culprit and not _root_has(hierarchy, missing):
            return ""  # not even the machine has them
    if not culprit:
        return _partition(directory, "it")
    name = os.path.relpath(culprit, hierarchy)
    said = f"{name} has {leaves or 'none'}"
    try:
        given = CPUSet.parse(text(f"{culprit}/cpuset.cpus"))
    except (OSError, ListFormatError):
        given = NO_CPUS
    if given and not missing - given:
        said += f" of its {given}; the rest belongs to a partition"
    own = _partition(culprit, name)
    return f"{said}, {own}" if own else said


def _root_has(hierarchy: str, cpus: CPUSet) -> bool:
    try:
        return not cpus - CPUSet.parse(text(f"{hierarchy}/cpuset.cpus.effective"))
    except (OSError, ListFormatError):
        return True


def _partition(directory: str, name: str) -> str:
    try:
        state = text(f"{directory}/cpuset.cpus.partition")
    except OSError:
        return ""
    return "" if state == "member" or not state else f"{name} is a partition: {state}"


def in_the_way(hierarchy: str, directory: str, name: str, wanted: str) -> str:
    """Which cgroup keeps the kernel from taking a list on version 1, in words; empty: none does.

    A list must be part of the one above and have all of those below (cpuset(7), ERRORS).

    Args:
        hierarchy: directory of the root.
        directory: of the cgroup to write.
        name: of the file.
        wanted: kernel list.
    """
    meant = CPUSet.parse(wanted)
    culprit, above = "", os.path.dirname(directory)
    try:
        while len(above) > len(hierarchy) and meant - _list(above, name):
            culprit, above = above, os.path.dirname(above)
        if culprit:
            return _has("above", culprit, hierarchy, name)
        with os.scandir(directory) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir())
        for child in below:
            if _list(child, name) - meant:
                return _has("below", child, hierarchy, name)
    except (OSError, ListFormatError):
        pass  # gone meanwhile, or no cpusets
    return ""


def _list(directory: str, name: str) -> CPUSet:
    return CPUSet.parse(cpuset_files(directory, unified=False).get_property(name))


def _has(where: str, directory: str, hierarchy: str, name: str) -> str:
    path = os.path.relpath(directory, hierarchy)
    return f"the cgroup {where}, {path}, has {name} {_list(directory, name) or 'empty'}"
