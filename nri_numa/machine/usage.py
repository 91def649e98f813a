"""What is really used, as the kernel counts it: CPU time, memory, and on which NUMA node it is.

Sources: proc_stat(5) for each CPU's time, meminfo and numastat of each NUMA node
(Documentation/admin-guide/numastat.rst), and of a container's cgroup the files cpu.stat and
memory.numa_stat (cgroup-v2.rst), or cpuacct.usage and memory.numa_stat (cgroup-v1).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.model import Topology
from nri_numa.machine.sysfs import read_memory
from nri_numa.machine.tree import NODE_DIR, open_tree

_CPU: Final = re.compile(r"^cpu(\d{1,5}) ([\d ]+)$", re.MULTILINE | re.ASCII)
_NUMASTAT: Final = re.compile(r"^(\w+) (\d{1,20})$", re.MULTILINE | re.ASCII)
_PAGES: Final = re.compile(r"\bN(\d{1,4})=(\d{1,20})\b", re.ASCII)
_READ_BYTES: Final = 65_536
# Of memory.numa_stat of version 2: what a container's processes and its cache have, each once.
_MEMORY_OF_V2: Final = ("anon", "file", "kernel_stack", "pagetables", "slab_reclaimable")


class NUMAUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One NUMA node at one moment, in bytes and pages.

    Attributes:
        total, free, reclaimable: bytes of memory.
        here, elsewhere: pages that programs on this NUMA node got here, and that programs of other
            NUMA nodes got here (``local_node`` and ``other_node``), since the machine started; None
            where the kernel does not count them.
    """

    total: int
    free: int
    reclaimable: int
    here: int | None = None
    elsewhere: int | None = None


class MachineUsage(msgspec.Struct, frozen=True):
    """The machine at one moment.

    Attributes:
        cpus: by CPU, ``(busy, total)`` ticks since the machine started.
        numa_nodes: by id.
    """

    cpus: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    numa_nodes: Mapping[int, NUMAUsage] = msgspec.field(default_factory=dict)


class ContainerUsage(msgspec.Struct, frozen=True):
    """One container at one moment; what its cgroup does not have is None or empty.

    Attributes:
        cpu_seconds: CPU time used since it was started.
        memory: bytes by NUMA node.
    """

    cpu_seconds: float | None = None
    memory: Mapping[int, int] = msgspec.field(default_factory=dict)


def cpu_times(text: str) -> dict[int, tuple[int, int]]:
    """``(busy, total)`` ticks by CPU, of the text of /proc/stat.

    Idle and waiting for a disk are not busy; guest time is within user time already.
    """
    found: dict[int, tuple[int, int]] = {}
    for match in _CPU.finditer(text):
        ticks = [int(word) for word in match[2].split()[:8]]
        if len(ticks) >= 4:
            total = sum(ticks)
            found[int(match[1])] = total - sum(ticks[3:5]), total
    return found


def read_usage(root: Path | str, topology: Topology) -> MachineUsage:
    """Read what the machine uses now: one file, and two for each NUMA node.

    Raises:
        TopologyError: when ``root`` is no machine.
    """
    tree = open_tree(root)
    memory = read_memory(root, topology).numa_nodes
    numa_nodes: dict[int, NUMAUsage] = {}
    for i, one in memory.items():
        stat = dict(_NUMASTAT.findall(tree.read(f"{NODE_DIR}/node{i}/numastat") or ""))
        counted = "local_node" in stat and "other_node" in stat
        numa_nodes[i] = NUMAUsage(
            total=one.total_bytes,
            free=one.free_bytes,
            reclaimable=one.reclaimable_bytes,
            here=int(stat["local_node"]) if counted else None,
            elsewhere=int(stat["other_node"]) if counted else None,
        )
    return MachineUsage(cpu_times(tree.read("proc/stat") or ""), numa_nodes)


def memory_by_numa_node(text: str, *, unified: bool, page_size: int) -> dict[int, int]:
    """Bytes by NUMA node, of the text of memory.numa_stat.

    Args:
        text: of the file; version 2 counts bytes of each sort, version 1 pages, with a total.
        unified: whether it is of version 2.
        page_size: bytes of a page.
    """
    found: dict[int, int] = {}
    for line in text.splitlines():
        name = re.split(r"[ =]", line, maxsplit=1)[0]
        if name not in (_MEMORY_OF_V2 if unified else ("total",)):
            continue
        for numa_node, amount in _PAGES.findall(line):
            bytes_ = int(amount) * (1 if unified else page_size)
            found[int(numa_node)] = found.get(int(numa_node), 0) + bytes_
    return found


def read_container(
    reader: CgroupReader, place: CgroupPlace, root: str, page_size: int
) -> ContainerUsage | None:
    """Read what one container uses now; None when it has no cgroup.

    Args:
        reader: knows where cgroups are.
        place: of the container.
        root: where the cgroup file systems are mounted.
        page_size: bytes of a page.
    """
    directory = reader.directory_of(place)
    if not directory:
        return None
    if reader.unified:
        match = re.search(r"^usage_usec (\d{1,20})$", _text(f"{directory}/cpu.stat"), re.MULTILINE)
        seconds = int(match[1]) / 1e6 if match else None
        memory = _text(f"{directory}/memory.numa_stat")
    else:
        below = os.path.relpath(directory, reader.hierarchy)
        files = [f"{root}/{name}/{below}/cpuacct.usage" for name in ("cpuacct", "cpu,cpuacct")]
        text = next((text for text in map(_text, files) if re.fullmatch(r"\d{1,20}\n?", text)), "")
        seconds = int(text) / 1e9 if text else None
        memory = _text(f"{root}/memory/{below}/memory.numa_stat")
    return ContainerUsage(
        seconds, memory_by_numa_node(memory, unified=reader.unified, page_size=page_size)
    )


def _text(path: str) -> str:
    """Text of a file; empty when it is not there."""
    try:
        with open(path, "rb") as file:
            return file.read(_READ_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
