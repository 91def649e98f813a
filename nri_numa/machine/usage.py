"""What is really used, as the kernel counts it: CPU time, memory, and on which NUMA node it is.

Sources: proc_stat(5) for each CPU's time, meminfo and numastat of each NUMA node
(Documentation/admin-guide/numastat.rst), and of a container's cgroup the files cpu.stat and
memory.numa_stat (cgroup-v2.rst), or cpuacct.usage and memory.numa_stat (cgroup-v1).
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Final

import msgspec

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, read_text, read_text_or_empty
from nri_numa.machine.sysfs import read_memory
from nri_numa.machine.tree import NODE_DIR, open_tree
from nri_numa.model.machine import NUMAMemoryReading, Topology

_CPU_LINE_PATTERN: Final = re.compile(r"^cpu(\d{1,5}) ([\d ]+)$", re.MULTILINE | re.ASCII)
_NUMASTAT_LINE_PATTERN: Final = re.compile(r"^(\w+) (\d{1,20})$", re.MULTILINE | re.ASCII)
_AMOUNT_BY_NODE_PATTERN: Final = re.compile(r"\bN(\d{1,4})=(\d{1,20})\b", re.ASCII)
_READ_BYTES: Final = 65_536
# Of memory.numa_stat of version 2: what a container's processes and its cache have, each once.
_SUMMED_MEMORY_STATS_V2: Final = ("anon", "file", "kernel_stack", "pagetables", "slab_reclaimable")


class MachineUsage(msgspec.Struct, frozen=True):
    """The machine at one moment.

    Attributes:
        cpus: by CPU, ``(busy, total)`` ticks since the machine started.
        memory: by NUMA node.
        pages: by NUMA node, pages that programs on it got there, and that programs of other NUMA
            nodes got there (``local_node`` and ``other_node``), since the machine started; without
            those of which the kernel does not count them.
    """

    cpus: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    memory: Mapping[int, NUMAMemoryReading] = msgspec.field(default_factory=dict)
    pages: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)


class ContainerUsage(msgspec.Struct, frozen=True):
    """One container at one moment; what its cgroup does not have is None or empty.

    Attributes:
        cpu_seconds: CPU time used since it was started.
        memory: bytes by NUMA node.
    """

    cpu_seconds: float | None = None
    memory: Mapping[int, int] = msgspec.field(default_factory=dict)


def parse_cpu_lines(text: str) -> dict[int, list[int]]:
    """By CPU, the first eight numbers of its line in /proc/stat or /proc/schedstat."""
    return {
        int(match[1]): [int(word) for word in match[2].split()[:8]]
        for match in _CPU_LINE_PATTERN.finditer(text)
    }


def parse_busy_ticks(stat: str) -> dict[int, tuple[int, int]]:
    """``(busy, total)`` ticks by CPU, of the text of /proc/stat.

    Idle and waiting for a disk are not busy; guest time is within user time already.
    """
    return {
        cpu: (sum(ticks) - sum(ticks[3:5]), sum(ticks))
        for cpu, ticks in parse_cpu_lines(stat).items()
        if len(ticks) >= 4
    }


def read_usage(root: Path | str, topology: Topology) -> MachineUsage:
    """Read what the machine uses now: one file, and two for each NUMA node.

    Raises:
        TopologyError: when ``root`` is no machine.
    """
    tree = open_tree(root)
    memory = read_memory(root, topology).numa_nodes
    pages: dict[int, tuple[int, int]] = {}
    for i in memory:
        stat = dict(
            _NUMASTAT_LINE_PATTERN.findall(tree.read_file(f"{NODE_DIR}/node{i}/numastat") or "")
        )
        if "local_node" in stat and "other_node" in stat:
            pages[i] = int(stat["local_node"]), int(stat["other_node"])
    return MachineUsage(parse_busy_ticks(tree.read_file("proc/stat") or ""), memory, pages)


def parse_memory_numa_stat(stat: str, *, unified: bool, page_size: int) -> dict[int, int]:
    """Bytes by NUMA node, of the text of memory.numa_stat.

    Version 2 counts bytes of each sort, version 1 pages, with a total that has those of the cgroups
    within, as all else of a container.
    """
    found: dict[int, int] = {}
    for line in stat.splitlines():
        name = re.split(r"[ =]", line, maxsplit=1)[0]
        if name not in (_SUMMED_MEMORY_STATS_V2 if unified else ("hierarchical_total",)):
            continue
        for numa_node, amount in _AMOUNT_BY_NODE_PATTERN.findall(line):
            bytes_ = int(amount) * (1 if unified else page_size)
            found[int(numa_node)] = found.get(int(numa_node), 0) + bytes_
    return found


def read_container_usage(
    reader: CgroupReader, place: CgroupPlace, root: str, page_size: int
) -> ContainerUsage | None:
    """Read what one container uses now; None when it has no cgroup."""
    directory = reader.directory_of(place)
    if not directory:
        return None
    if reader.unified:
        stat = read_text_or_empty(f"{directory}/cpu.stat")
        match = re.search(r"^usage_usec (\d{1,20})$", stat, re.MULTILINE)
        seconds = int(match[1]) / 1e6 if match else None
    else:
        below = os.path.relpath(directory, reader.hierarchy)
        files = [f"{root}/{name}/{below}/cpuacct.usage" for name in ("cpuacct", "cpu,cpuacct")]
        found = filter(re.compile(r"\d{1,20}").fullmatch, map(read_text_or_empty, files))
        used = next(found, "")
        seconds = int(used) / 1e9 if used else None
    memory, _ = _read_numa_stat(reader, directory, root, page_size)
    return ContainerUsage(seconds, memory or {})


# --- on which NUMA nodes a container's memory is, and why that is not known where it is not -------
# The cgroup counts it, in memory.numa_stat of version 2 (cgroup-v2.rst) or 1
# (cgroup-v1/memory.rst). Kernels without that file have /proc/PID/numa_maps (numa(7)), which is
# read for each process of the container. It walks page tables under the lock of the process's
# memory, so it comes second and is ended when it takes too long. A number that could not be read
# to its end is none.


NUMA_STAT: Final = "memory.numa_stat"
NUMA_MAPS: Final = "numa_maps"

NUMA_MAPS_CPU_LIMIT_S: Final = 0.3
"""Seconds of CPU time that numa_maps of one container may take: some 10⁵ lines, at 2.5 µs each."""
_MAX_PROCESSES_PER_CONTAINER: Final = 1024
"""Processes of one container whose numa_maps are read."""
_MAX_INNER_CGROUPS: Final = 256
"""Cgroups within a container's own that are looked into for processes."""
_MAPPED_PAGES: Final = re.compile(rb" N(\d{1,4})=(\d{1,18})(?![\d=])", re.ASCII)
_PAGE_KIB: Final = re.compile(rb" kernelpagesize_kB=(\d{1,9})\b", re.ASCII)
# A process that ended while it was read: its directory is empty, or reading says so.
PROCESS_GONE_ERRNOS: Final = frozenset((errno.ENOENT, errno.ESRCH, errno.ENODEV))


class ContainerMemoryNodes(msgspec.Struct, frozen=True):
    """Where the memory of one container is.

    Attributes:
        by_numa_node: bytes by NUMA node; empty when not known.
        source: the file that tells it, ``memory.numa_stat`` or ``numa_maps``; empty when none does.
        because: why it is not known; empty when it is.
    """

    by_numa_node: Mapping[int, int] = msgspec.field(default_factory=dict)
    source: str = ""
    because: str = ""


class UsageUnknown(Exception):
    """What a container has is not known; the message is the reason."""


def read_container_memory(
    reader: CgroupReader,
    place: CgroupPlace,
    root: str,
    *,
    proc: str = "/proc",
    page_size: int,
    limit: float = NUMA_MAPS_CPU_LIMIT_S,
    clock: Callable[[], float] = time.thread_time,
) -> ContainerMemoryNodes:
    """Look where the memory of one container is; ``root`` has the cgroup file systems.

    ``limit`` is in seconds of ``clock``, the CPU time of this thread.
    """
    directory = reader.directory_of(place)
    if not directory or not os.path.isdir(directory):
        return ContainerMemoryNodes(because="it has no cgroup that can be read")
    found, why_not = _read_numa_stat(reader, directory, root, page_size)
    if found is not None:
        return ContainerMemoryNodes(found, NUMA_STAT)
    until = clock() + limit
    try:
        return ContainerMemoryNodes(
            _read_numa_maps(directory, proc, lambda: clock() > until), NUMA_MAPS
        )
    except UsageUnknown as unknown:
        return ContainerMemoryNodes(because=f"{why_not}, and {unknown}")


def local_bytes(by_numa_node: Mapping[int, int], home: Container[int]) -> int:
    """Bytes that are on the NUMA nodes ``home``."""
    return sum(amount for i, amount in by_numa_node.items() if i in home)


def add_mapped_bytes(lines: bytes, found: dict[int, int]) -> None:
    """Add to ``found`` what whole lines of numa_maps say, in bytes by NUMA node.

    Pages are of the size that their line names: huge pages of hugetlbfs count one each, transparent
    ones as many small ones (fs/proc/task_mmu.c).
    """
    for line in lines.split(b"\n"):
        # An address, a policy, what is mapped, its counts: the name of a file escapes its blanks.
        pages = _MAPPED_PAGES.findall(line)
        if not pages:
            continue
        size = _PAGE_KIB.search(line)
        if size is None:
            continue
        unit = int(size[1]) * 1024
        for numa_node, amount in pages:
            found[int(numa_node)] = found.get(int(numa_node), 0) + int(amount) * unit


def _read_numa_stat(
    reader: CgroupReader, directory: str, root: str, page_size: int
) -> tuple[dict[int, int] | None, str]:
    """What memory.numa_stat says; else None, and why not."""
    if reader.unified:
        files = [(f"{directory}/{NUMA_STAT}", True)]
    else:
        below = os.path.relpath(directory, reader.hierarchy)
        # A machine with both versions has the memory controller in either.
        files = [
            (f"{root}/memory/{below}/{NUMA_STAT}", False),
            (f"{root}/unified/{below}/{NUMA_STAT}", True),
        ]
    why_not = f"its cgroup has no {NUMA_STAT}"
    for path, unified in files:
        try:
            stat = read_text(path)
        except OSError as error:
            if error.errno not in PROCESS_GONE_ERRNOS:
                why_not = f"{NUMA_STAT} cannot be read: {error.strerror}"
            continue
        found = parse_memory_numa_stat(stat, unified=unified, page_size=page_size)
        if found:
            return found, ""
        why_not = f"{NUMA_STAT} names no NUMA node"
    return None, why_not


def _read_numa_maps(directory: str, proc: str, too_long: Callable[[], bool]) -> dict[int, int]:
    """What numa_maps of the container's processes say together.

    Memory that several processes share counts for each of them.

    Raises:
        UsageUnknown: it is not known.
    """
    pids = list_cgroup_processes(directory)
    if not pids:
        raise UsageUnknown(f"it has no process whose {NUMA_MAPS} could be read")
    if len(pids) > _MAX_PROCESSES_PER_CONTAINER:
        raise UsageUnknown(
            f"{len(pids)} processes are more than the {_MAX_PROCESSES_PER_CONTAINER} whose "
            f"{NUMA_MAPS} are read"
        )
    by_process = {pid: _read_process_numa_maps(pid, proc, too_long) for pid in sorted(pids)}
    # A number may have become another process's between the list and the reading.
    still = list_cgroup_processes(directory)
    known = [found for pid, found in by_process.items() if found is not None and pid in still]
    if not known:
        raise UsageUnknown(f"its processes ended while their {NUMA_MAPS} were read")
    return dict(sum(known, Counter()))


def _read_process_numa_maps(
    pid: int, proc: str, too_long: Callable[[], bool]
) -> Counter[int] | None:
    """What numa_maps of one process says; None when the process is gone.

    Raises:
        UsageUnknown: it is not known.
    """
    found: Counter[int] = Counter()
    try:
        with open(f"{proc}/{pid}/{NUMA_MAPS}", "rb", buffering=0) as file:
            rest = b""
            while piece := file.read(_READ_BYTES):
                whole, line_end, rest = (rest + piece).rpartition(b"\n")
                add_mapped_bytes(whole + line_end, found)
                if too_long():
                    raise UsageUnknown(f"reading {NUMA_MAPS} of its processes took too long")
            add_mapped_bytes(rest, found)
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            if os.path.exists(f"{proc}/{pid}/maps") and not os.path.exists(
                f"{proc}/{pid}/{NUMA_MAPS}"
            ):
                raise UsageUnknown(f"this kernel has no {NUMA_MAPS}") from error
            return None
        raise UsageUnknown(
            f"{NUMA_MAPS} of process {pid} cannot be read: {error.strerror}"
        ) from error
    return found


def list_cgroup_processes(directory: str) -> set[int]:
    """Ids of the processes of a cgroup and those within.

    Raises:
        UsageUnknown: there are too many cgroups, or processes that are not seen from here.
    """
    found: set[int] = set()
    for count, (path, _, _) in enumerate(os.walk(directory), 1):
        if count > _MAX_INNER_CGROUPS:
            raise UsageUnknown(f"more than {_MAX_INNER_CGROUPS} cgroups are within its own")
        try:
            with open(f"{path}/cgroup.procs", "rb") as file:
                found.update(int(word) for word in file.read().split() if word.isdigit())
        except OSError:
            continue  # a cgroup that went away, or that has threads only
    if 0 in found:
        raise UsageUnknown("its processes are in a PID namespace not seen from here")
    return found
