"""Actual use of CPU time and of memory on each NUMA node, as counted by the kernel.

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
# Fields of memory.numa_stat of version 2: memory of a container's processes and cache, each once.
_SUMMED_MEMORY_STATS_V2: Final = ("anon", "file", "kernel_stack", "pagetables", "slab_reclaimable")


class MachineUsage(msgspec.Struct, frozen=True):
    """Use of the machine at one moment.

    Attributes:
        cpus: by CPU, ``(busy, total)`` ticks since the machine started.
        memory: by NUMA node.
        pages: by NUMA node, pages on it allocated by its own programs and by those of other NUMA
            nodes (``local_node`` and ``other_node``), since the machine started; without NUMA nodes
            whose pages the kernel does not count.
    """

    cpus: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    memory: Mapping[int, NUMAMemoryReading] = msgspec.field(default_factory=dict)
    pages: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)


class ContainerUsage(msgspec.Struct, frozen=True):
    """Use of one container at one moment; None or empty if its cgroup does not count it.

    Attributes:
        cpu_seconds: CPU time used since the start.
        memory: bytes by NUMA node.
    """

    cpu_seconds: float | None = None
    memory: Mapping[int, int] = msgspec.field(default_factory=dict)


def parse_cpu_lines(text: str) -> dict[int, list[int]]:
    """Parse the first eight numbers of each CPU's line in /proc/stat or /proc/schedstat."""
    return {
        int(match[1]): [int(number) for number in match[2].split()[:8]]
        for match in _CPU_LINE_PATTERN.finditer(text)
    }


def parse_busy_ticks(stat: str) -> dict[int, tuple[int, int]]:
    """Parse ``(busy, total)`` ticks by CPU from the text of /proc/stat.

    Idle and iowait are not busy; guest time is part of user time.
    """
    return {
        cpu: (sum(ticks) - sum(ticks[3:5]), sum(ticks))
        for cpu, ticks in parse_cpu_lines(stat).items()
        if len(ticks) >= 4
    }


def read_usage(root: Path | str, topology: Topology) -> MachineUsage:
    """Read the current use of the machine: one file, and two for each NUMA node.

    Raises:
        TopologyError: ``root`` is no machine.
    """
    tree = open_tree(root)
    memory = read_memory(root, topology)
    pages: dict[int, tuple[int, int]] = {}
    for i in memory:
        stat = dict(
            _NUMASTAT_LINE_PATTERN.findall(tree.read_file(f"{NODE_DIR}/node{i}/numastat") or "")
        )
        if "local_node" in stat and "other_node" in stat:
            pages[i] = int(stat["local_node"]), int(stat["other_node"])
    return MachineUsage(parse_busy_ticks(tree.read_file("proc/stat") or ""), memory, pages)


def parse_memory_numa_stat(stat: str, *, unified: bool, page_size: int) -> dict[int, int]:
    """Parse bytes by NUMA node from the text of memory.numa_stat.

    Version 2 counts bytes of each kind. Version 1 counts pages, with a total that includes inner
    cgroups, like all other values of a container.
    """
    bytes_by_node: dict[int, int] = {}
    for line in stat.splitlines():
        name = re.split(r"[ =]", line, maxsplit=1)[0]
        if name not in (_SUMMED_MEMORY_STATS_V2 if unified else ("hierarchical_total",)):
            continue
        for numa_node, amount in _AMOUNT_BY_NODE_PATTERN.findall(line):
            bytes_ = int(amount) * (1 if unified else page_size)
            bytes_by_node[int(numa_node)] = bytes_by_node.get(int(numa_node), 0) + bytes_
    return bytes_by_node


def read_container_usage(
    reader: CgroupReader, cgroup: CgroupPlace, root: str, page_size: int
) -> ContainerUsage | None:
    """Read the current use of one container; None if it has no cgroup."""
    directory = reader.directory_of(cgroup)
    if not directory:
        return None
    if reader.unified:
        stat = read_text_or_empty(f"{directory}/cpu.stat")
        match = re.search(r"^usage_usec (\d{1,20})$", stat, re.MULTILINE)
        seconds = int(match[1]) / 1e6 if match else None
    else:
        path = os.path.relpath(directory, reader.hierarchy)
        files = [f"{root}/{name}/{path}/cpuacct.usage" for name in ("cpuacct", "cpu,cpuacct")]
        texts = filter(re.compile(r"\d{1,20}").fullmatch, map(read_text_or_empty, files))
        used = next(texts, "")
        seconds = int(used) / 1e9 if used else None
    memory, _ = _read_numa_stat(reader, directory, root, page_size)
    return ContainerUsage(seconds, memory or {})


# --- memory of a container by NUMA node -----------------------------------------------------------
# The cgroup counts it, in memory.numa_stat of version 2 (cgroup-v2.rst) or 1
# (cgroup-v1/memory.rst). Kernels without that file have /proc/PID/numa_maps (numa(7)), which is
# read for each process of the container. It walks page tables under the lock of the process's
# memory, so it comes second and has a time limit. A value that could not be read completely is
# unknown.


NUMA_STAT: Final = "memory.numa_stat"
NUMA_MAPS: Final = "numa_maps"

NUMA_MAPS_CPU_LIMIT_S: Final = 0.3
"""Maximum CPU seconds for numa_maps of one container: some 10⁵ lines, at 2.5 µs each."""
_MAX_PROCESSES_PER_CONTAINER: Final = 1024
"""Maximum number of processes of one container whose numa_maps are read."""
_MAX_INNER_CGROUPS: Final = 256
"""Maximum number of a container's cgroups that are searched for processes."""
_MAPPED_PAGES: Final = re.compile(rb" N(\d{1,4})=(\d{1,18})(?![\d=])", re.ASCII)
_PAGE_KIB: Final = re.compile(rb" kernelpagesize_kB=(\d{1,9})\b", re.ASCII)
# A process ended while it was read: its directory is empty, or the read fails.
PROCESS_GONE_ERRNOS: Final = frozenset((errno.ENOENT, errno.ESRCH, errno.ENODEV))


class ContainerMemoryNodes(msgspec.Struct, frozen=True):
    """Memory of one container by NUMA node.

    Attributes:
        by_numa_node: bytes by NUMA node; empty if unknown.
        source: the file with the values, ``memory.numa_stat`` or ``numa_maps``; empty if unknown.
        because: reason why they are unknown; else empty.
    """

    by_numa_node: Mapping[int, int] = msgspec.field(default_factory=dict)
    source: str = ""
    because: str = ""


class UsageUnknown(Exception):
    """Unknown use of a container; the message is the reason."""


def read_container_memory(
    reader: CgroupReader,
    cgroup: CgroupPlace,
    root: str,
    *,
    proc: str = "/proc",
    page_size: int,
    limit: float = NUMA_MAPS_CPU_LIMIT_S,
    clock: Callable[[], float] = time.thread_time,
) -> ContainerMemoryNodes:
    """Read the memory of one container by NUMA node; ``root`` has the cgroup file systems.

    ``limit`` is in seconds of ``clock``, the CPU time of this thread.
    """
    directory = reader.directory_of(cgroup)
    if not directory or not os.path.isdir(directory):
        return ContainerMemoryNodes(because="it has no cgroup that can be read")
    memory, problem = _read_numa_stat(reader, directory, root, page_size)
    if memory is not None:
        return ContainerMemoryNodes(memory, NUMA_STAT)
    deadline = clock() + limit
    try:
        return ContainerMemoryNodes(
            _read_numa_maps(directory, proc, lambda: clock() > deadline), NUMA_MAPS
        )
    except UsageUnknown as unknown:
        return ContainerMemoryNodes(because=f"{problem}, and {unknown}")


def local_bytes(by_numa_node: Mapping[int, int], numa_nodes: Container[int]) -> int:
    """Sum the bytes on ``numa_nodes``."""
    return sum(amount for i, amount in by_numa_node.items() if i in numa_nodes)


def add_mapped_bytes(lines: bytes, totals: dict[int, int]) -> None:
    """Add the bytes by NUMA node in whole lines of numa_maps to ``totals``.

    A line names its page size: a huge page of hugetlbfs counts as one page, a transparent huge page
    as many small ones (fs/proc/task_mmu.c).
    """
    for line in lines.split(b"\n"):
        # Address, policy, mapping, counts; blanks in the name of a file are escaped.
        pages = _MAPPED_PAGES.findall(line)
        if not pages:
            continue
        size = _PAGE_KIB.search(line)
        if size is None:
            continue
        unit = int(size[1]) * 1024
        for numa_node, amount in pages:
            totals[int(numa_node)] = totals.get(int(numa_node), 0) + int(amount) * unit


def _read_numa_stat(
    reader: CgroupReader, directory: str, root: str, page_size: int
) -> tuple[dict[int, int] | None, str]:
    """Read memory.numa_stat; return None and a problem if it is unreadable."""
    if reader.unified:
        files = [(f"{directory}/{NUMA_STAT}", True)]
    else:
        relative = os.path.relpath(directory, reader.hierarchy)
        # A machine with both versions has the memory controller in one of them.
        files = [
            (f"{root}/memory/{relative}/{NUMA_STAT}", False),
            (f"{root}/unified/{relative}/{NUMA_STAT}", True),
        ]
    problem = f"its cgroup has no {NUMA_STAT}"
    for path, unified in files:
        try:
            stat = read_text(path)
        except OSError as error:
            if error.errno not in PROCESS_GONE_ERRNOS:
                problem = f"{NUMA_STAT} cannot be read: {error.strerror}"
            continue
        memory = parse_memory_numa_stat(stat, unified=unified, page_size=page_size)
        if memory:
            return memory, ""
        problem = f"{NUMA_STAT} names no NUMA node"
    return None, problem


def _read_numa_maps(directory: str, proc: str, is_overdue: Callable[[], bool]) -> dict[int, int]:
    """Sum numa_maps of a container's processes.

    Memory that several processes share counts for each of them.

    Raises:
        UsageUnknown: numa_maps cannot be read.
    """
    pids = list_cgroup_processes(directory)
    if not pids:
        raise UsageUnknown(f"it has no process whose {NUMA_MAPS} could be read")
    if len(pids) > _MAX_PROCESSES_PER_CONTAINER:
        raise UsageUnknown(
            f"{len(pids)} processes are more than the {_MAX_PROCESSES_PER_CONTAINER} whose "
            f"{NUMA_MAPS} are read"
        )
    by_process = {pid: _read_process_numa_maps(pid, proc, is_overdue) for pid in sorted(pids)}
    # A pid may have been reused between the listing and the read.
    live_pids = list_cgroup_processes(directory)
    usages = [usage for pid, usage in by_process.items() if usage is not None and pid in live_pids]
    if not usages:
        raise UsageUnknown(f"its processes ended while their {NUMA_MAPS} were read")
    return dict(sum(usages, Counter()))


def _read_process_numa_maps(
    pid: int, proc: str, is_overdue: Callable[[], bool]
) -> Counter[int] | None:
    """Sum numa_maps of one process; None if it has ended.

    Raises:
        UsageUnknown: numa_maps cannot be read.
    """
    bytes_by_node: Counter[int] = Counter()
    try:
        with open(f"{proc}/{pid}/{NUMA_MAPS}", "rb", buffering=0) as file:
            partial_line = b""
            while chunk := file.read(_READ_BYTES):
                lines, line_end, partial_line = (partial_line + chunk).rpartition(b"\n")
                add_mapped_bytes(lines + line_end, bytes_by_node)
                if is_overdue():
                    raise UsageUnknown(f"reading {NUMA_MAPS} of its processes took too long")
            add_mapped_bytes(partial_line, bytes_by_node)
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
    return bytes_by_node


def list_cgroup_processes(directory: str) -> set[int]:
    """List the ids of the processes of a cgroup and its inner cgroups.

    Raises:
        UsageUnknown: there are too many cgroups, or the processes are invisible from here.
    """
    pids: set[int] = set()
    for count, (path, _, _) in enumerate(os.walk(directory), 1):
        if count > _MAX_INNER_CGROUPS:
            raise UsageUnknown(f"more than {_MAX_INNER_CGROUPS} cgroups are within its own")
        try:
            with open(f"{path}/cgroup.procs", "rb") as file:
                pids.update(int(text) for text in file.read().split() if text.isdigit())
        except OSError:
            continue  # a removed cgroup, or a threaded one
    if 0 in pids:
        raise UsageUnknown("its processes are in a PID namespace not seen from here")
    return pids
