"""The machine as a value: sockets, NUMA nodes, caches, cores, threads.

A `Topology` is fixed until the machine is discovered again. Nothing here does I/O; see
`nri_numa.machine.sysfs`. Unusual machines are supported: ids with holes, NUMA nodes without CPUs or
without memory, CPUs that belong to no NUMA node, cores with different numbers of threads, several
NUMA nodes per socket and several sockets per NUMA node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

import msgspec

from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet, union_cpus
from nri_numa.text import human_bytes


class PCIDevice(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A PCI device.

    Attributes:
        address: its PCI address.
        kind: its kind in everyday language.
        vendor, device: PCI ids, four hexadecimal digits; empty if not known.
        numa_node: None if the kernel knows none.
        local_cpus: the CPUs beside its PCIe root; empty if unknown.
    """

    address: str
    kind: str
    vendor: str = ""
    device: str = ""
    numa_node: int | None = None
    local_cpus: CPUSet = msgspec.field(default=NO_CPUS, name="localCPUs")


class CoreKind(StrEnum):
    """Kind of a core of a hybrid processor, as the kernel reports it."""

    STANDARD = "standard"
    PERFORMANCE = "performance"
    EFFICIENT = "efficient"


class CPU(msgspec.Struct, frozen=True, kw_only=True):
    """One logical CPU: a hardware thread.

    Attributes:
        id: the kernel's number.
        core: id of its `Core` (unique over the machine; the lowest CPU id among its threads).
        socket: the kernel's physical package id.
        numa_node: its NUMA node, or None if the kernel reports none.
    """

    id: int
    core: int
    socket: int
    numa_node: int | None


class Core(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A physical core; `cpus` are its online thread siblings."""

    id: int
    cpus: CPUSet
    socket: int
    numa_node: int | None
    kind: CoreKind = CoreKind.STANDARD


class L3Group(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """CPUs that share one last level cache (the kubelet's *uncore cache*), the lowest its id."""

    id: int
    cpus: CPUSet


class Socket(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A physical package."""

    id: int
    cpus: CPUSet
    numa_nodes: NUMASet


class NUMANode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node.

    Attributes:
        id: the kernel's number.
        cpus: its online CPUs; empty for a memory-only node.
        memory_bytes: MemTotal; 0 for a node without memory.
        distances: SLIT distance to each NUMA node, itself included (10 is local).
        hugepages: bytes of pre-allocated huge pages, by page size in bytes.
        initiators: the NUMA nodes with CPUs that have the fastest access to its memory, if the
            kernel reports them (firmware's HMAT).
        tier: the kernel's memory tier; lower is faster. None if the kernel reports none.
    """

    id: int
    cpus: CPUSet
    memory_bytes: int
    distances: Mapping[int, int]
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)
    initiators: NUMASet = NO_NUMA_NODES
    tier: int | None = None


class CgroupPartitionKind(StrEnum):
    """Kind of a cgroup that has CPUs for itself.

    ROOT and ISOLATED are values of ``cpuset.cpus.partition`` (version 2), ISOLATED without load
    balancing. EXCLUSIVE has ``cpuset.cpu_exclusive`` (version 1).
    """

    ROOT = "root"
    ISOLATED = "isolated"
    EXCLUSIVE = "exclusive"


class Partition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A cgroup outside the pods' that has CPUs for itself, or should have.

    Attributes:
        cgroup: its path, without a leading slash.
        cpus: its CPUs; the desired ones if there is a problem.
        problem: why the kernel does not make it a partition, in the kernel's words; else empty.
    """

    cgroup: str
    kind: CgroupPartitionKind
    cpus: CPUSet
    problem: str = ""


class Topology(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The machine.

    Attributes:
        cpus: online CPUs by id.
        cores: by core id.
        l3_groups: by group id; empty if the kernel reports no caches.
        sockets: by id.
        numa_nodes: by id, never empty (a machine without NUMA has node 0 with everything).
        online, present, possible, isolated: as the files of /sys/devices/system/cpu say.
        allowed: the online CPUs that containers may use (the agent's own cpuset if it is smaller
            than the machine's).
        withheld_memory: NUMA nodes whose memory the same limit does not allow.
        nohz_full: CPUs whose timer tick stops while one thread runs (``nohz_full=`` of the kernel).
        partitions: cgroups that keep CPUs from containers, by path; `allowed` is without them.
        warnings: sentences about what is unusual about the machine.
    """

    cpus: Mapping[int, CPU]
    cores: Mapping[int, Core]
    l3_groups: Mapping[int, L3Group]
    sockets: Mapping[int, Socket]
    numa_nodes: Mapping[int, NUMANode]
    online: CPUSet
    present: CPUSet
    possible: CPUSet
    isolated: CPUSet
    allowed: CPUSet
    withheld_memory: NUMASet = NO_NUMA_NODES
    nohz_full: CPUSet = NO_CPUS
    partitions: tuple[Partition, ...] = ()
    warnings: tuple[str, ...] = ()

    @cached_property
    def numa_ids(self) -> NUMASet:
        """All NUMA nodes."""
        return NUMASet(self.numa_nodes)

    @cached_property
    def memory_nodes(self) -> NUMASet:
        """NUMA nodes with memory that containers may use; only these may be in cpuset.mems."""
        with_memory = NUMASet(i for i, n in self.numa_nodes.items() if n.memory_bytes > 0)
        return with_memory - self.withheld_memory

    @cached_property
    def cpu_nodes(self) -> NUMASet:
        """NUMA nodes that have online CPUs."""
        return NUMASet(i for i, n in self.numa_nodes.items() if n.cpus)

    @cached_property
    def threads_per_core(self) -> int:
        """Largest number of online threads on one core."""
        return max((len(c.cpus) for c in self.cores.values()), default=1)

    def cpus_of(self, numa_nodes: NUMASet) -> CPUSet:
        """Return the online CPUs of these NUMA nodes."""
        return CPUSet.from_bits(self.cpu_bits_of(numa_nodes.bits))

    def cpu_bits_of(self, numa_bits: int) -> int:
        """Return the bits of the online CPUs of NUMA nodes, which are bits too."""
        bits = 0
        for i in self.numa_nodes:
            if numa_bits >> i & 1:
                bits |= self.numa_nodes[i].cpus.bits
        return bits

    def numa_of(self, cpus: CPUSet) -> NUMASet:
        """Return the NUMA nodes of these CPUs (CPUs without a node add nothing)."""
        return NUMASet(self.cpu_count_by_node(cpus))

    def cpu_count_by_node(self, cpus: CPUSet) -> dict[int, int]:
        """Return the number of these CPUs by NUMA node; without nodes that have none."""
        counts = {i: (n.cpus.bits & cpus.bits).bit_count() for i, n in self.numa_nodes.items()}
        return {i: count for i, count in counts.items() if count}

    def cpus_by_node(self, cpus: CPUSet) -> dict[int, CPUSet]:
        """Return these CPUs by NUMA node; without nodes that have none."""
        return {i: cpus & self.numa_nodes[i].cpus for i in self.cpu_count_by_node(cpus)}

    def siblings_of(self, cpus: CPUSet) -> CPUSet:
        """Return all online threads of the cores of these CPUs, these CPUs included."""
        return union_cpus(self.cores[self.cpus[i].core].cpus for i in cpus if i in self.cpus)

    def distance(self, a: int, b: int) -> int:
        """Return the SLIT distance from ``a`` to ``b``; if unknown, 10 to itself, else 20."""
        try:
            return self.numa_nodes[a].distances[b]
        except KeyError:
            return 10 if a == b else 20

    @cached_property
    def fingerprint(self) -> str:
        """Text that changes when ids, siblings or NUMA membership change; checkpoints carry it."""
        nodes = ";".join(f"{i}={n.cpus}" for i, n in sorted(self.numa_nodes.items()))
        cores = ";".join(str(c.cpus) for _, c in sorted(self.cores.items()))
        return f"cpus {self.present} numa {nodes} cores {cores}"


class NUMAMemoryReading(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one NUMA node as the kernel reports it now.

    Attributes:
        total_bytes: MemTotal.
        free_bytes: MemFree; pages in huge page pools are not free.
        reclaimable_bytes: page cache and slab that the kernel would reclaim before it kills a
            process, less what it always keeps.
        free_hugepages: bytes of unused pre-allocated huge pages, by page size in bytes.
    """

    total_bytes: int
    free_bytes: int
    reclaimable_bytes: int
    free_hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)

    @property
    def available_bytes(self) -> int:
        """Bytes that a new container could use: free and reclaimable."""
        return self.free_bytes + self.reclaimable_bytes


# --- Numbers and lists in sentences: one CPU or several, one NUMA node or several -----------------


IdSetOrText = CPUSet | NUMASet | str
"""A set, or its text in the kernel's list format."""


def inflect_for_ids(ids: IdSetOrText, singular: str, plural: str) -> str:
    """Return the form of a word that goes with a list: ``is`` or ``are``."""
    return singular if str(ids).isdigit() else plural


def cpus_text(ids: IdSetOrText, *verb: str) -> str:
    """``CPU 3``, ``CPUs 3-5``; with a verb's two forms ``CPU 3 is``, ``CPUs 3-5 are``."""
    text = str(ids)
    text = f"CPU {text}" if text.isdigit() else f"CPUs {text}"
    return f"{text} {inflect_for_ids(ids, *verb)}" if verb else text


def numa_text(ids: IdSetOrText, *verb: str) -> str:
    """``NUMA node 1``, ``NUMA nodes 0-1``; with a verb's two forms as `cpus_text`."""
    # Digits alone mean one node: this is on the path of every request, so nothing is counted.
    text = str(ids) or "no NUMA node"
    if ids:
        text = f"NUMA node {text}" if text.isdigit() else f"NUMA nodes {text}"
    return f"{text} {inflect_for_ids(ids, *verb)}" if verb else text


def count_text(count: int, noun: str) -> str:
    """``1 CPU``, ``2 CPUs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def join_words(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


MAX_LISTED_WORDS: Final = 8
"""Items of a list that a sentence names."""


def listed_words_text(parts: Sequence[str], max_words: int = MAX_LISTED_WORDS) -> str:
    """``a, b and c``; after eight items (``max_words``) ``and 3 more``."""
    unlisted = len(parts) - max_words
    return join_words([*parts[:max_words], f"{unlisted} more"] if unlisted > 0 else parts)


def human_cpu_number(milli: int) -> str:
    """Format thousandths of CPUs as a number of CPUs: ``2``, ``0.25``."""
    return f"{milli / 1000:.3f}".rstrip("0").rstrip(".")


def human_milli(milli: int) -> str:
    """Format thousandths of CPUs with the noun: ``2 CPUs``, ``0.5 CPUs``."""
    text = human_cpu_number(milli)
    return f"{text} CPU" if text == "1" else f"{text} CPUs"


class Unit(StrEnum):
    """Unit of a resource's amounts, and their text."""

    CPUS = "cpus"
    MILLI_CPUS = "millicpu"
    BYTES = "bytes"
    DEVICES = "devices"
    NUMBER = ""

    @classmethod
    def _missing_(cls, value: object) -> Unit:
        """Treat a unit that only a later version knows as a plain number."""
        return cls.NUMBER

    def amount_text(self, amount: int, *, free: bool = False) -> str:
        """Format an amount: ``1.5 GiB``, ``0.5 CPUs``, ``3``; free amounts are rounded down."""
        if self in _MILLI_BY_UNIT:
            return human_milli(_MILLI_BY_UNIT[self] * amount)
        return human_bytes(amount, free=free) if self is Unit.BYTES else str(amount)

    def amount_text_without_cpu_noun(self, amount: int, *, free: bool = False) -> str:
        """Format an amount without the noun for CPUs: ``1.5 GiB``, ``0.5``, ``3``."""
        if self in _MILLI_BY_UNIT:
            return human_cpu_number(_MILLI_BY_UNIT[self] * amount)
        return self.amount_text(amount, free=free)

    @property
    def use_text(self) -> str:
        """Clause after a free amount: `` for exclusive use``; CPUs to share may be more."""
        return " for exclusive use" if self is Unit.CPUS else ""

    def free_text(self, amount: int) -> str:
        """Format a free amount: ``1.5 GiB free``, ``2 CPUs free for exclusive use``."""
        return f"{self.amount_text(amount, free=True)} free{self.use_text}"


_MILLI_BY_UNIT: Final = {Unit.CPUS: 1000, Unit.MILLI_CPUS: 1}


# --- One container's cgroup as the kernel reports it, as a value ----------------------------------


NO_CFS_QUOTA: Final = -1
"""CFS quota that means *no limit*: written as it is to cgroup v1, as ``max`` to cgroup v2."""


class ActualCgroup(msgspec.Struct, frozen=True, kw_only=True):
    """Cpuset of one container's cgroup as the kernel has it, and its CPU limit if needed.

    Attributes:
        cpus, mems: ``cpuset.cpus`` and ``cpuset.mems`` as written; on cgroup v2 empty means
            those of the parent.
        effective_cpus, effective_mems: those that it can use; on cgroup v1 the same.
        quota: CFS quota in microseconds per period, `NO_CFS_QUOTA` for none; None if it was not
            read.
        cfs_period: microseconds; None if it was not read.
        above: the ancestor cgroup that restricts it, in words; empty if none does, or if it was
            not read.
    """

    cpus: CPUSet
    mems: NUMASet
    effective_cpus: CPUSet
    effective_mems: NUMASet
    quota: int | None = None
    cfs_period: int | None = None
    above: str = ""


# --- a machine as a document, for the API and ``nri-numa topology -o json`` -----------------------


def topology_document(
    topology: Topology, *, reserved: CPUSet = NO_CPUS, devices: Sequence[PCIDevice] | None = None
) -> dict[str, Any]:
    """Describe a machine with field names that stay the same over versions.

    Id sets are texts in list format, sizes are bytes; every list is sorted by id. A NUMA node's
    ``distances`` are in the order of ``numaNodes``; without ``devices`` there are no devices in it.
    """
    return {
        "id": topology.fingerprint,
        "cpus": {
            "online": str(topology.online),
            "offline": str(topology.present - topology.online),
            "present": str(topology.present),
            "possible": str(topology.possible),
            "isolated": str(topology.isolated),
            "nohzFull": str(topology.nohz_full),
            "allowed": str(topology.allowed),
            "reserved": str(reserved),
        },
        "counts": {
            "sockets": len(topology.sockets),
            "numaNodes": len(topology.numa_nodes),
            "l3Groups": len(topology.l3_groups),
            "cores": len(topology.cores),
            "cpus": len(topology.online),
            "threadsPerCore": topology.threads_per_core,
        },
        "sockets": _documents_sorted_by_id(topology.sockets),
        "numaNodes": [
            {
                "id": n.id,
                "cpus": str(n.cpus),
                "memoryBytes": n.memory_bytes,
                "memoryAllowed": n.id in topology.memory_nodes,
                "hugePages": [
                    {"sizeBytes": size, "count": total // size}
                    for size, total in sorted(n.hugepages.items())
                ],
                "distances": [topology.distance(n.id, i) for i in topology.numa_ids],
            }
            for _, n in sorted(topology.numa_nodes.items())
        ],
        "l3Groups": _documents_sorted_by_id(topology.l3_groups),
        "cores": _documents_sorted_by_id(topology.cores),
        "partitions": msgspec.to_builtins([*topology.partitions], enc_hook=str),
        "warnings": list(topology.warnings),
        **({} if devices is None else {"devices": msgspec.to_builtins([*devices], enc_hook=str)}),
    }


def _documents_sorted_by_id(by_id: Mapping[int, object]) -> list[dict[str, Any]]:
    values = [value for _, value in sorted(by_id.items())]
    return list(msgspec.to_builtins(values, enc_hook=str))
