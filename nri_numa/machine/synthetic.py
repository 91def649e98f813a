"""Synthetic machines built from a few numbers, as values and as files of /sys and /proc.

They are for the demo, the simulation and the tests. `build_synthetic_topology` builds the
`Topology`; `synthetic_sysfs_files` turns any `Topology` into the files from which
`nri_numa.machine.sysfs.discover_topology` reads an equal one.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import (
    CPU,
    Core,
    CoreKind,
    L3Group,
    NUMAMemoryReading,
    NUMANode,
    Socket,
    Topology,
)

GIB = 1 << 30

_CPU_DIR = "sys/devices/system/cpu"
_NODE_DIR = "sys/devices/system/node"


class Numbering(StrEnum):
    """Order in which firmware numbers CPUs.

    SPLIT: the first threads of all cores, then the second threads (most servers).
    ADJACENT: the threads of one core in a row (virtual machines, POWER).
    ALTERNATING: like SPLIT, but with adjacent numbers on different NUMA nodes (some vendors).
    """

    SPLIT = "split"
    ADJACENT = "adjacent"
    ALTERNATING = "alternating"


def build_synthetic_topology(
    *,
    sockets: int = 2,
    numa_per_socket: int = 2,
    sockets_per_numa: int = 1,
    cores_per_numa: int = 4,
    threads: int = 2,
    memory_gib: float = 16,
    numbering: Numbering | str = Numbering.SPLIT,
    cores_per_l3: int | None = None,
    efficient_cores_per_numa: int = 0,
    memory_only_gib: Sequence[float] = (),
    hugepages: Mapping[int, int] | None = None,
    numa_ids: Sequence[int] | None = None,
    skipped_cpus: CPUSet = NO_CPUS,
    offline: CPUSet = NO_CPUS,
    isolated: CPUSet = NO_CPUS,
    nohz_full: CPUSet = NO_CPUS,
    allowed: CPUSet | None = None,
    distances: Sequence[Sequence[int]] | None = None,
) -> Topology:
    """Build a regular machine, with the requested irregularities.

    Args:
        sockets: physical packages.
        numa_per_socket: NUMA nodes in each package.
        sockets_per_numa: packages in each NUMA node; only with ``numa_per_socket=1``.
        cores_per_numa: cores with ``threads`` threads in each NUMA node.
        threads: threads of each such core.
        memory_gib: memory of each NUMA node with CPUs.
        numbering: order of the CPU numbers.
        cores_per_l3: cores that share a last-level cache; all of a NUMA node's cores in a socket
            if None; 0 for a machine that reports no caches.
        efficient_cores_per_numa: further cores with one thread each; makes the machine hybrid.
        memory_only_gib: memory of each further NUMA node that has no CPUs.
        hugepages: bytes of pre-allocated huge pages on each NUMA node with CPUs, by page size.
        numa_ids: the kernel's numbers of the NUMA nodes, memory-only ones last; 0, 1, … if None.
        skipped_cpus: CPU numbers that firmware leaves out.
        offline: CPUs that are present and offline.
        isolated: CPUs of the kernel parameter ``isolcpus``.
        nohz_full: CPUs of the kernel parameter ``nohz_full``.
        allowed: CPUs that containers may use; all online ones if None.
        distances: rows and columns in the order of ``numa_ids``. If None: 10 local, 12 in the
            socket, 21 to other sockets, 17 and 28 likewise from and to memory-only nodes, which
            are attached to the sockets in turn.

    Raises:
        ValueError: the numbers contradict each other.
    """
    if min(sockets, numa_per_socket, sockets_per_numa, cores_per_numa, threads) < 1:
        raise ValueError("sockets, NUMA nodes, cores and threads are at least 1")
    if sockets_per_numa > 1 and (numa_per_socket > 1 or sockets % sockets_per_numa):
        raise ValueError(
            f"{sockets} sockets with {numa_per_socket} NUMA nodes each cannot be joined "
            f"to {sockets_per_numa} sockets per NUMA node"
        )
    with_cpus = sockets * numa_per_socket // sockets_per_numa
    count = with_cpus + len(memory_only_gib)
    ids = list(range(count)) if numa_ids is None else list(numa_ids)
    if len(set(ids)) != count or len(ids) != count:
        raise ValueError(f"numa_ids {ids} must be {count} different numbers")
    if distances is not None and [len(row) for row in distances] != [count] * count:
        raise ValueError(f"distances must be {count} rows of {count} numbers")

    sockets_of = [
        [i * sockets_per_numa + k for k in range(sockets_per_numa)]
        if sockets_per_numa > 1
        else [i // numa_per_socket]
        for i in range(with_cpus)
    ]
    # One entry per core: position of its NUMA node, index in that node, kind.
    in_node = cores_per_numa + efficient_cores_per_numa
    usual = CoreKind.PERFORMANCE if efficient_cores_per_numa else CoreKind.STANDARD
    plan = [(n, c, usual) for n in range(with_cpus) for c in range(cores_per_numa)]
    efficient = [
        (n, c, CoreKind.EFFICIENT) for n in range(with_cpus) for c in range(cores_per_numa, in_node)
    ]
    numbers = (i for i in itertools.count() if i not in skipped_cpus)
    order = Numbering(numbering)
    members = _number_cpus([n for n, _, _ in plan], threads, order, numbers)
    members += _number_cpus([n for n, _, _ in efficient], 1, order, numbers)
    plan += efficient
    present = CPUSet(i for m in members for i in m)
    online = present - offline

    cores: dict[int, Core] = {}
    shared: dict[tuple[int, int, int], CPUSet] = {}
    for (n, index, kind), ids_of_core in zip(plan, members, strict=True):
        siblings = CPUSet(ids_of_core) & online
        if not siblings:
            continue
        socket = sockets_of[n][index * len(sockets_of[n]) // in_node]
        core = Core(id=siblings.first_id, socket=socket, numa_node=ids[n], cpus=siblings, kind=kind)
        cores[core.id] = core
        key = (n, socket, 0 if cores_per_l3 is None else index // max(cores_per_l3, 1))
        shared[key] = shared.get(key, NO_CPUS) | siblings
    groups = {} if cores_per_l3 == 0 else shared
    cpus = {
        i: CPU(id=i, core=core.id, socket=core.socket, numa_node=core.numa_node)
        for core in cores.values()
        for i in core.cpus
    }

    homes = [set(s) for s in sockets_of]
    homes += [{extra % sockets} for extra in range(len(memory_only_gib))]

    def numa_node_distance(a: int, b: int) -> int:
        if distances is not None:
            return distances[a][b]
        if a == b:
            return 10
        same_socket = bool(homes[a] & homes[b])
        if max(a, b) >= with_cpus:
            return 17 if same_socket else 28
        return 12 if same_socket else 21

    numa_nodes: dict[int, NUMANode] = {}
    for position, numa_id in enumerate(ids):
        extra = position - with_cpus
        gib = memory_gib if extra < 0 else memory_only_gib[extra]
        numa_nodes[numa_id] = NUMANode(
            id=numa_id,
            cpus=CPUSet(i for i, cpu in cpus.items() if cpu.numa_node == numa_id),
            memory_bytes=int(gib * GIB) // 1024 * 1024,  # the kernel counts in KiB
            distances={ids[i]: numa_node_distance(position, i) for i in range(count)},
            hugepages=dict(hugepages or {}) if extra < 0 else {},
        )
    return Topology(
        cpus=dict(sorted(cpus.items())),
        cores=dict(sorted(cores.items())),
        l3_groups={
            g.first_id: L3Group(id=g.first_id, cpus=g)
            for g in sorted(groups.values(), key=lambda g: g.first_id)
        },
        sockets=sockets_from(cores.values()),
        numa_nodes=dict(sorted(numa_nodes.items())),
        online=online,
        present=present,
        possible=present,
        isolated=isolated & present,
        nohz_full=nohz_full & present,
        allowed=online if allowed is None else allowed & online,
    )


def sockets_from(cores: Iterable[Core]) -> dict[int, Socket]:
    """Gather cores into their sockets, by id."""
    cpus: dict[int, int] = {}
    numa: dict[int, set[int]] = {}
    for core in cores:
        cpus[core.socket] = cpus.get(core.socket, 0) | core.cpus.bits
        nodes = numa.setdefault(core.socket, set())
        if core.numa_node is not None:
            nodes.add(core.numa_node)
    return {
        i: Socket(id=i, cpus=CPUSet.from_bits(cpus[i]), numa_nodes=NUMASet(numa[i]))
        for i in sorted(cpus)
    }


def synthetic_sysfs_files(
    topology: Topology, memory: Mapping[int, NUMAMemoryReading] = {}
) -> dict[str, str]:
    """Build the files of /sys and /proc that the kernel would show for a machine, by relative path.

    All memory of NUMA nodes without a reading is free.
    """
    files = {
        f"{_CPU_DIR}/online": f"{topology.online}\n",
        f"{_CPU_DIR}/present": f"{topology.present}\n",
        f"{_CPU_DIR}/possible": f"{topology.possible}\n",
        f"{_CPU_DIR}/offline": f"{topology.possible - topology.online}\n",
        f"{_CPU_DIR}/isolated": f"{topology.isolated}\n",
        f"{_CPU_DIR}/nohz_full": f"{topology.nohz_full}\n",
        f"{_NODE_DIR}/online": f"{topology.numa_ids}\n",
        f"{_NODE_DIR}/possible": f"{topology.numa_ids}\n",
        f"{_NODE_DIR}/has_memory": f"{topology.memory_nodes}\n",
        f"{_NODE_DIR}/has_cpu": f"{topology.cpu_nodes}\n",
    }
    files |= _cpu_files(topology)
    if topology.allowed != topology.online:
        files["proc/self/status"] = f"Name:\tnri-numa\nCpus_allowed_list:\t{topology.allowed}\n"
    for tier in {n.tier for n in topology.numa_nodes.values()} - {None}:
        nodes = NUMASet(i for i, n in topology.numa_nodes.items() if n.tier == tier)
        files[f"sys/devices/virtual/memory_tiering/memory_tier{tier}/nodelist"] = f"{nodes}\n"
    total_kib = free_kib = reclaimable_kib = 0
    for i, numa_node in topology.numa_nodes.items():
        reading = memory.get(i)
        if reading is None:
            pages_bytes = sum(numa_node.hugepages.values())
            reading = NUMAMemoryReading(
                total_bytes=numa_node.memory_bytes,
                free_bytes=max(numa_node.memory_bytes - pages_bytes, 0),
                reclaimable_bytes=0,
                free_hugepages=numa_node.hugepages,
            )
        files |= _numa_node_files(topology, numa_node, reading)
        total_kib += numa_node.memory_bytes // 1024
        free_kib += reading.free_bytes // 1024
        reclaimable_kib += reading.reclaimable_bytes // 1024
    files["proc/meminfo"] = (
        f"MemTotal: {total_kib:>14} kB\nMemFree: {free_kib:>14} kB\n"
        f"Active(file): {0:>14} kB\nInactive(file): {reclaimable_kib:>14} kB\n"
        f"SReclaimable: {0:>14} kB\n"
    )
    return files


def _cpu_files(topology: Topology) -> dict[str, str]:
    files: dict[str, str] = {}
    for i in topology.present - topology.online:
        files[f"{_CPU_DIR}/cpu{i}/online"] = "0\n"  # the only file of an offline CPU
    for core in topology.cores.values():
        for i in core.cpus:
            files[f"{_CPU_DIR}/cpu{i}/topology/physical_package_id"] = f"{core.socket}\n"
            files[f"{_CPU_DIR}/cpu{i}/topology/core_id"] = f"{core.id}\n"
            files[f"{_CPU_DIR}/cpu{i}/topology/thread_siblings_list"] = f"{core.cpus}\n"
    for group in topology.l3_groups.values():
        for i in group.cpus:
            files[f"{_CPU_DIR}/cpu{i}/cache/index3/level"] = "3\n"
            files[f"{_CPU_DIR}/cpu{i}/cache/index3/type"] = "Unified\n"
            files[f"{_CPU_DIR}/cpu{i}/cache/index3/shared_cpu_list"] = f"{group.cpus}\n"
    for kind, directory in ((CoreKind.PERFORMANCE, "cpu_core"), (CoreKind.EFFICIENT, "cpu_atom")):
        cpus = CPUSet(i for c in topology.cores.values() if c.kind is kind for i in c.cpus)
        if cpus:
            files[f"sys/devices/{directory}/cpus"] = f"{cpus}\n"
    return files


def _numa_node_files(
    topology: Topology, numa_node: NUMANode, reading: NUMAMemoryReading
) -> dict[str, str]:
    directory = f"{_NODE_DIR}/node{numa_node.id}"
    distances = " ".join(str(numa_node.distances[i]) for i in topology.numa_ids)
    files = {
        f"{directory}/cpulist": f"{numa_node.cpus}\n",
        f"{directory}/distance": f"{distances}\n",
        f"{directory}/meminfo": "".join(
            f"Node {numa_node.id} {name}: {value // 1024:>14} kB\n"
            for name, value in (
                ("MemTotal", numa_node.memory_bytes),
                ("MemFree", reading.free_bytes),
                ("Active(file)", 0),
                ("Inactive(file)", reading.reclaimable_bytes),
                ("SReclaimable", 0),
            )
        ),
    }
    for initiator in numa_node.initiators:
        files[f"{directory}/access1/initiators/node{initiator}"] = ""
    for size, allocated in numa_node.hugepages.items():
        pages = f"{directory}/hugepages/hugepages-{size // 1024}kB"
        files[f"{pages}/nr_hugepages"] = f"{allocated // size}\n"
        files[f"{pages}/free_hugepages"] = f"{reading.free_hugepages.get(size, 0) // size}\n"
    return files


def _number_cpus(
    positions: Sequence[int], threads: int, order: Numbering, numbers: Iterator[int]
) -> list[list[int]]:
    """Number the CPUs of every core; ``positions`` is the NUMA node of each core, ascending."""
    members: list[list[int]] = [[] for _ in positions]
    if order is Numbering.ADJACENT:
        for ids in members:
            ids.extend(itertools.islice(numbers, threads))
        return members
    sequence: Sequence[int] = range(len(positions))
    if order is Numbering.ALTERNATING:  # by rank in the NUMA node, then by NUMA node
        ranks = [core - bisect_left(positions, position) for core, position in enumerate(positions)]
        sequence = sorted(sequence, key=lambda core: (ranks[core], positions[core]))
    for _ in range(threads):
        for core in sequence:
            members[core].append(next(numbers))
    return members
