"""Discovery of the machine in /sys and /proc.

The files are documented in Documentation/admin-guide/cputopology.rst, Documentation/ABI/stable/
sysfs-devices-node and Documentation/ABI/testing/sysfs-devices-system-cpu of the kernel, and in
cpuset(7). Old kernels lack some files, and others have wrong values of firmware. Assumptions and
contradictions are in `Topology.warnings`; only a root without any CPU is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import isqrt
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from nri_numa.errors import TopologyError
from nri_numa.machine.allowed import find_partitions, partition_sentence, read_usable_ids
from nri_numa.machine.synthetic import sockets_from
from nri_numa.machine.tree import CPU_DIR, NODE_DIR, TIER_DIR, Tree, open_tree
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import (
    CPU,
    Core,
    CoreKind,
    L3Group,
    NUMAMemoryReading,
    NUMANode,
    Topology,
    cpus_text,
    inflect_for_ids,
    numa_text,
)

_SOCKET_SIBLING_FILES = ("package_cpus", "core_siblings", "book_siblings", "drawer_siblings")
_LOCAL, _REMOTE = 10, 20
"""LOCAL_DISTANCE and REMOTE_DISTANCE of the kernel, for distances that firmware does not report."""
_MAX_SLIT_DISTANCE = 255  # ACPI's SLIT has one byte for each

_CPU_NAME = re.compile(r"cpu([0-9]{1,5})", re.ASCII)
_NODE_NAME = re.compile(r"node([0-9]{1,5})", re.ASCII)
_TIER_NAME = re.compile(r"memory_tier([0-9]{1,9})", re.ASCII)
_HUGE_NAME = re.compile(r"hugepages-([0-9]{1,12})kB", re.ASCII)
_MEMINFO_PATTERN = re.compile(
    r"^(?:Node\s+\d+\s+)?([\w()]+):\s+(\d+)\s*kB", re.ASCII | re.MULTILINE
)


def discover_topology(root: Path | str) -> Topology:
    """Read the machine below ``root``; see `nri_numa.machine.tree.open_tree`.

    Raises:
        TopologyError: no CPU can be found there; odd machines are not errors.
    """
    return discover_tree(open_tree(root))


def discover_tree(tree: Tree) -> Topology:
    """Read the machine from files that are open already; see `discover_topology`."""
    return _Discovery(tree).read_topology()


def read_online(root: Path | str) -> CPUSet:
    """Read the online CPUs; cheap enough to poll for hot-plug every second.

    Raises:
        TopologyError: they cannot be read.
    """
    return _Discovery(open_tree(root)).read_online_cpus()


def read_memory(root: Path | str, topology: Topology) -> dict[int, NUMAMemoryReading]:
    """Read the current memory of each NUMA node, by id; a few files per NUMA node.

    A removed NUMA node reads as all zero.

    Raises:
        TopologyError: ``root`` is no machine.
    """
    tree = open_tree(root)
    total = sum(n.memory_bytes for n in topology.numa_nodes.values())
    watermark = _machine_low_watermark_bytes(tree, total)
    readings: dict[int, NUMAMemoryReading] = {}
    for i, info, directory in _meminfo_by_numa_node(tree, topology):
        node_watermark = watermark * topology.numa_nodes[i].memory_bytes // max(total, 1)
        readings[i] = NUMAMemoryReading(
            total_bytes=info.get("MemTotal", 0),
            free_bytes=info.get("MemFree", 0),
            reclaimable_bytes=_reclaimable_bytes(info, node_watermark),
            free_hugepages=_read_hugepage_bytes(tree, directory, "free_hugepages"),
        )
    return readings


def read_memory_totals(tree: Tree, topology: Topology) -> dict[int, tuple[int, dict[int, int]]]:
    """Read the current MemTotal and bytes of huge pages by page size, by NUMA node."""
    return {
        i: (info.get("MemTotal", 0), _read_hugepage_bytes(tree, directory, "nr_hugepages"))
        for i, info, directory in _meminfo_by_numa_node(tree, topology)
    }


def _meminfo_by_numa_node(
    tree: Tree, topology: Topology
) -> Iterator[tuple[int, dict[str, int], str]]:
    """Read the meminfo of each NUMA node, and the directory with its huge pages."""
    has_nodes = bool(tree.list_directory(NODE_DIR))
    for i in sorted(topology.numa_nodes):
        directory = f"{NODE_DIR}/node{i}" if has_nodes else "sys/kernel/mm"
        yield (
            i,
            _read_meminfo(tree, f"{directory}/meminfo" if has_nodes else "proc/meminfo"),
            directory,
        )


def _reclaimable_bytes(info: dict[str, int], watermark: int) -> int:
    """Compute the reclaimable bytes of page cache and slab, as MemAvailable counts them (proc(5)).

    The kernel retains half of each, at most its low watermark, and keeps the watermark free.
    """
    if "Inactive(file)" in info:
        cache = info.get("Active(file)", 0) + info["Inactive(file)"]
    else:  # kernels before 2.6.28
        cache = max(info.get("FilePages", info.get("Cached", 0)) - info.get("Shmem", 0), 0)
    slab = info.get("SReclaimable", 0)
    sum_ = cache - min(cache // 2, watermark) + slab - min(slab // 2, watermark)
    return max(sum_ - watermark, 0)


def _machine_low_watermark_bytes(tree: Tree, total: int) -> int:
    """Read the bytes that the kernel keeps free on the machine: 5/4 of vm.min_free_kbytes."""
    text = tree.read_file("proc/sys/vm/min_free_kbytes")
    if text is not None and text.isascii() and text.isdigit() and len(text) < 12:
        kib = int(text)
    else:  # the kernel's default: the square root of 16 times the memory, within bounds
        kib = min(max(isqrt(total // 1024 * 16), 128), 262_144)
    return kib * 1024 * 5 // 4


_IdSetT = TypeVar("_IdSetT", CPUSet, NUMASet)


class _Discovery:
    """One pass over a tree, which collects warnings."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._warnings: list[str] = []
        self._nodes_by_remark: dict[tuple[str, str, str], list[int]] = {}

    def read_topology(self) -> Topology:
        online = self.read_online_cpus()
        present = self._read_id_list(f"{CPU_DIR}/present", CPUSet)
        present = online | (self._cpus_with_directory() if present is None else present)
        possible = self._read_id_list(f"{CPU_DIR}/possible", CPUSet)
        isolated = self._read_id_list(f"{CPU_DIR}/isolated", CPUSet) or NO_CPUS

        claims = self._read_node_directories(online)
        node_by_cpu = self._numa_node_by_cpu(online, claims)
        cores = self._read_cores(online, node_by_cpu)
        core_of = {i: core for core in cores.values() for i in core.cpus}
        groups = self._read_l3_groups(online, cores)
        cpus = {
            i: CPU(id=i, core=core.id, socket=core.socket, numa_node=node_by_cpu.get(i))
            for i, core in sorted(core_of.items())
        }
        memory_nodes = NUMASet(i for i, claim in claims.items() if claim.memory_bytes)
        limits = read_usable_ids(self._tree, isolated)
        allowed, withheld = limits.allowed_cpus(online), limits.withheld_memory_nodes(memory_nodes)
        if limits.cpus is not None and not online & limits.cpus:
            named = cpus_text(str(limits.cpus))
            self._add_warning(f"{limits.source} allows {named}, none of them online; ignored")
        elif allowed != online:
            self._add_warning(f"{limits.source} allows only {cpus_text(allowed)} of {online}")
        partitions = find_partitions(self._tree, online - allowed)
        self._warnings.extend(map(partition_sentence, partitions))
        if withheld:
            self._add_warning(f"{limits.source} does not allow memory of {numa_text(withheld)}")
        return Topology(
            cpus=cpus,
            cores=cores,
            l3_groups=groups,
            sockets=sockets_from(cores.values()),
            numa_nodes=self._build_numa_nodes(claims, node_by_cpu),
            online=online,
            present=present,
            possible=present if possible is None else possible | present,
            isolated=isolated & present,
            allowed=allowed,
            withheld_memory=withheld,
            nohz_full=self._read_nohz_full() & present,
            partitions=partitions,
            warnings=tuple(self._warnings),
        )

    def _read_nohz_full(self) -> CPUSet:
        """Read the CPUs of the kernel parameter ``nohz_full``; some kernels print NULL."""
        name = f"{CPU_DIR}/nohz_full"
        untold = self._tree.read_file(name) == "(null)"
        return (None if untold else self._read_id_list(name, CPUSet)) or NO_CPUS

    def read_online_cpus(self) -> CPUSet:
        """Read the online CPUs from the list or, on kernels without it, from each CPU's file."""
        name = f"{CPU_DIR}/online"
        text = self._tree.read_file(name)
        if text is None:
            online = CPUSet(
                i
                for i in self._cpus_with_directory()
                if self._tree.read_file(f"{CPU_DIR}/cpu{i}/online") != "0"
            )
            problem = "no CPU is listed in it"
        else:
            try:
                online = CPUSet.parse(text)
            except ListFormatError as e:
                raise TopologyError(self._source_path(name), f"is not a list of CPUs: {e}") from e
            problem = "lists no CPU"
        if not online:
            raise TopologyError(self._source_path(CPU_DIR if text is None else name), problem)
        return online

    # -- NUMA nodes -----------------------------------------------------------------------------

    def _read_node_directories(self, online: CPUSet) -> dict[int, NUMANode]:
        """Read every online NUMA node, by id; a synthetic node 0 if the kernel has none.

        Their CPUs are those of their directories, and several may list the same CPU.
        """
        tree = self._tree
        listed = self._read_id_list(f"{NODE_DIR}/online", NUMASet)
        directories = _ids_in_names(_NODE_NAME, tree.list_directory(NODE_DIR), NUMASet)
        ids = directories if listed is None else listed & directories
        if listed is not None and listed != ids:
            missing = listed - ids
            subject = numa_text(missing, "is online but has", "are online but have")
            self._add_warning(f"{subject} no directory; ignored")
        if not ids:
            self._add_warning("the kernel reports no NUMA nodes; everything belongs to NUMA node 0")
            info = _read_meminfo(tree, "proc/meminfo")
            if not info.get("MemTotal"):
                self._add_warning(
                    "the size of the memory is not known: proc/meminfo has no MemTotal"
                )
            return {
                0: NUMANode(
                    id=0,
                    cpus=online,
                    memory_bytes=info.get("MemTotal", 0),
                    distances={0: _LOCAL},
                    hugepages=_read_hugepage_bytes(tree, "sys/kernel/mm", "nr_hugepages"),
                )
            }
        claims: dict[int, NUMANode] = {}
        tiers = self._read_memory_tiers()
        for i in ids:
            directory = f"{NODE_DIR}/node{i}"
            cpus = self._read_cpu_list_or_mask(f"{directory}/cpulist", f"{directory}/cpumap")
            if cpus is None:
                self._remark_on_node(i, "no readable list of CPUs")
            memory = _read_meminfo(tree, f"{directory}/meminfo").get("MemTotal")
            if memory is None:
                self._remark_on_node(i, "no readable memory size; 0 is assumed")
            claims[i] = NUMANode(
                id=i,
                cpus=(cpus or NO_CPUS) & online,
                memory_bytes=memory or 0,
                distances=self._read_node_distances(i, ids),
                hugepages=_read_hugepage_bytes(tree, directory, "nr_hugepages"),
                initiators=self._read_memory_initiators(directory) & ids,
                tier=tiers.get(i),
            )
        for i, claim in claims.items():
            if not claim.memory_bytes:
                remark = "CPUs but no memory" if claim.cpus else "neither CPUs nor memory"
                self._remark_on_node(i, remark)
        for (text, *verb), remarked in self._nodes_by_remark.items():
            self._add_warning(f"{numa_text(NUMASet(remarked), *verb)} {text}")
        return claims

    def _read_memory_initiators(self, directory: str) -> NUMASet:
        """Read the initiators with the best access to memory: NUMA nodes with CPUs, else any.

        See numaperf: ``access1`` is ``access0`` without devices that access memory too.
        """
        for access in ("access1", "access0"):
            names = self._tree.list_directory(f"{directory}/{access}/initiators")
            initiators = _ids_in_names(_NODE_NAME, names, NUMASet)
            if initiators:
                return initiators
        return NO_NUMA_NODES

    def _read_memory_tiers(self) -> dict[int, int]:
        """Read the memory tiers by NUMA node; empty on kernels before 6.1."""
        tier_by_node: dict[int, int] = {}
        for name in self._tree.list_directory(TIER_DIR):
            match = _TIER_NAME.fullmatch(name)
            if match:
                nodes = self._read_id_list(f"{TIER_DIR}/{name}/nodelist", NUMASet)
                tier_by_node.update(dict.fromkeys(nodes or NO_NUMA_NODES, int(match[1])))
        return tier_by_node

    def _read_node_distances(self, numa_id: int, ids: NUMASet) -> dict[int, int]:
        """Read the distances of one NUMA node, which are to each *online* NUMA node in order."""
        text = self._tree.read_file(f"{NODE_DIR}/node{numa_id}/distance")
        values, count = (text or "").split(), len(ids)
        row = [int(w) for w in values if w.isascii() and w.isdigit() and len(w) <= 3]
        if len(row) == len(values) == count and all(_LOCAL <= d <= _MAX_SLIT_DISTANCE for d in row):
            return dict(zip(ids, row, strict=True))
        distances_text = f"the distances {text[:60]!r}" if text else "no distances"
        text = (
            f"{distances_text}, not {count} numbers from 10 to 255; "
            f"{_LOCAL} to itself and {_REMOTE} to others are assumed"
        )
        self._remark_on_node(numa_id, text, "reports", "report")
        return {i: _LOCAL if i == numa_id else _REMOTE for i in ids}

    def _numa_node_by_cpu(self, online: CPUSet, claims: dict[int, NUMANode]) -> dict[int, int]:
        """Assign one NUMA node to each CPU."""
        claimants: dict[int, list[int]] = {}
        for numa_id, claim in claims.items():  # ascending, so that the lists are too
            for i in claim.cpus:
                claimants.setdefault(i, []).append(numa_id)
        shared = CPUSet(i for i, nodes in claimants.items() if len(nodes) > 1)
        node_by_cpu = {i: nodes[0] for i, nodes in claimants.items()}
        if shared:
            # The kernel creates the link from the table by which it selects the local node.
            # Order: a linked NUMA node before others, then the lowest id.
            for i in shared:
                linked = [n for n in claimants[i] if self._tree.exists(f"{CPU_DIR}/cpu{i}/node{n}")]
                node_by_cpu[i] = (linked or claimants[i])[0]
            nodes = NUMASet(n for i in shared for n in claimants[i])
            self._add_warning(
                f"{numa_text(nodes)} all claim {cpus_text(shared)}; each CPU is counted for the "
                "one that its own directory links to, else the lowest"
            )
        unassigned = online - CPUSet(node_by_cpu)
        subject = f"{cpus_text(unassigned, 'belongs', 'belong')}"
        possible = self._read_id_list(f"{NODE_DIR}/possible", NUMASet) or NUMASet(claims)
        if unassigned and len(claims) == 1 and possible <= NUMASet(claims):
            (numa_node,) = claims
            self._add_warning(f"{subject} to no NUMA node; the only one, {numa_node}, is assumed")
            node_by_cpu.update(dict.fromkeys(unassigned, numa_node))
        elif unassigned:
            # Their NUMA node may be offline, and an unknown one is not local.
            self._add_warning(f"{subject} to no NUMA node")
        return node_by_cpu

    def _build_numa_nodes(
        self, claims: dict[int, NUMANode], node_by_cpu: dict[int, int]
    ) -> dict[int, NUMANode]:
        members: dict[int, int] = dict.fromkeys(claims, 0)
        for i, numa_id in node_by_cpu.items():
            members[numa_id] |= 1 << i
        ids = list(claims)
        table = {i: claim.distances for i, claim in claims.items()}
        pairs = [(a, b) for a in ids for b in ids if a < b]
        asymmetric = [(a, b) for a, b in pairs if table[a][b] != table[b][a]]
        if asymmetric:
            a, b = asymmetric[0]
            suffix = f", and {len(asymmetric) - 1} more pairs differ" if len(asymmetric) > 1 else ""
            self._add_warning(
                f"the distance from NUMA node {a} to {b} is {table[a][b]} and back "
                f"{table[b][a]}{suffix}"
            )
        if pairs and any(table[a][b] <= table[a][a] for a in ids for b in ids if a != b):
            self._add_warning(
                "the firmware says that some NUMA nodes are no farther away than the local one"
            )
        return {i: replace(claim, cpus=CPUSet.from_bits(members[i])) for i, claim in claims.items()}

    # -- cores and caches -----------------------------------------------------------------------

    def _read_cores(self, online: CPUSet, node_by_cpu: dict[int, int]) -> dict[int, Core]:
        """Read cores, by id, from the files of their first threads."""
        siblings_of: dict[int, CPUSet] = {}
        core_bits = 0
        unlisted_cpus, split_cpus, conflict_cpus = [], [], []
        for i in online:
            if core_bits >> i & 1:
                continue
            directory = f"{CPU_DIR}/cpu{i}/topology"
            siblings = self._read_cpu_list_or_mask(
                f"{directory}/thread_siblings_list", f"{directory}/thread_siblings"
            )
            if siblings is None:
                siblings = self._read_cpu_list_or_mask(
                    f"{directory}/core_cpus_list", f"{directory}/core_cpus"
                )
            if siblings is None:
                unlisted_cpus.append(i)
            claimed = CPUSet.from_bits((siblings or NO_CPUS).bits | 1 << i) & online
            if claimed.bits & core_bits:
                conflict_cpus.append(i)
                claimed = CPUSet.from_bits(claimed.bits & ~core_bits)
            core_bits |= claimed.bits
            siblings_of[i] = claimed
            if len({node_by_cpu.get(c) for c in claimed}) > 1:
                split_cpus.append(i)
        if unlisted_cpus:
            cpus = CPUSet(unlisted_cpus)
            self._add_warning(
                f"{cpus_text(cpus, 'reports', 'report')} no siblings; each is taken for a core"
            )
        if conflict_cpus:
            self._add_warning(
                f"the siblings of {cpus_text(CPUSet(conflict_cpus))} contradict those of lower CPUs"
            )
        socket_of = self._read_core_sockets(siblings_of, online)
        if split_cpus:
            self._add_warning(
                f"the {inflect_for_ids(CPUSet(split_cpus), 'core', 'cores')} of "
                f"{cpus_text(CPUSet(split_cpus))} "
                f"{inflect_for_ids(CPUSet(split_cpus), 'has', 'have')} threads on several NUMA "
                "nodes; the lowest thread's counts"
            )
        kind_by_core = self._read_hybrid_core_kinds(siblings_of)
        return {
            i: Core(
                id=i,
                socket=socket_of[i],
                numa_node=node_by_cpu.get(i),
                cpus=siblings,
                kind=kind_by_core.get(i, CoreKind.STANDARD),
            )
            for i, siblings in siblings_of.items()
        }

    def _read_core_sockets(
        self, siblings_of: Mapping[int, CPUSet], online: CPUSet
    ) -> dict[int, int]:
        """Read the socket of each core.

        The usual file is ``physical_package_id``. It is -1 if firmware reports none (s390, some Arm
        and virtual machines), and on s390 it is only unique within a book and a drawer. The lists
        of siblings show the same in another way.
        """
        number = self._read_number
        is_s390 = any(
            number(f"{CPU_DIR}/cpu{i}/topology/{level}_id") is not None
            for i in list(siblings_of)[:1]
            for level in ("book", "drawer")
        )
        key_of: dict[int, tuple[int, ...]] = {}
        unplaced_cores: list[int] = []
        without_id: list[int] = []
        for i, threads in siblings_of.items():
            directory = f"{CPU_DIR}/cpu{i}/topology"
            package = number(f"{directory}/physical_package_id")
            if package is not None:
                ids = (number(f"{directory}/{level}_id") for level in ("drawer", "book"))
                key_of[i] = (
                    (*((-1 if n is None else n) for n in ids), package) if is_s390 else (package,)
                )
                continue
            for name in _SOCKET_SIBLING_FILES:
                siblings = self._read_cpu_list_or_mask(
                    f"{directory}/{name}_list", f"{directory}/{name}"
                )
                # A list with nothing but the core means that the socket is unknown.
                if siblings is not None and len(siblings & online) > len(threads):
                    key_of[i] = ((siblings & online).bits, 0, 0, 0)
                    without_id.append(i)
                    break
            else:
                unplaced_cores.append(i)
        if unplaced_cores:
            subject = cpus_text(CPUSet(unplaced_cores), "reports", "report")
            self._add_warning(f"{subject} no socket; socket 0 is assumed")
        if without_id:
            subject = cpus_text(CPUSet(without_id), "reports", "report")
            self._add_warning(
                f"{subject} no package id that can be read; the socket is taken from its siblings"
            )
        # The kernel's number if it is unique, else the lowest unused one.
        keys = list(dict.fromkeys(key_of.values()))  # in order of their lowest CPU
        package_ids = [k[-1] for k in keys if len(k) < 4]
        numbers: dict[tuple[int, ...], int] = {}
        if len(set(package_ids)) == len(package_ids):
            numbers = {k: k[-1] for k in keys if len(k) < 4}
        unused = (n for n in range(len(keys) + len(package_ids) + 1) if n not in numbers.values())
        for key in keys:
            if key not in numbers:
                numbers[key] = next(unused)
        return {i: numbers[key_of[i]] if i in key_of else 0 for i in siblings_of}

    def _read_hybrid_core_kinds(self, siblings_of: dict[int, CPUSet]) -> dict[int, CoreKind]:
        """Read the kind of each core, performance or efficient; empty on uniform machines."""
        kind_by_core: dict[int, CoreKind] = {}
        for kind, unit in ((CoreKind.PERFORMANCE, "core"), (CoreKind.EFFICIENT, "atom")):
            cpus = self._read_id_list(f"sys/devices/cpu_{unit}/cpus", CPUSet) or NO_CPUS
            kind_by_core.update({i: kind for i in siblings_of if i in cpus})
        if kind_by_core:
            return kind_by_core
        first_core = next(iter(siblings_of))
        if self._tree.exists(f"{CPU_DIR}/cpu{first_core}/cpu_capacity"):
            # Arm: 1024 is the fastest core at its highest frequency. Equal cores differ by a few
            # percent; another micro-architecture has three quarters or less.
            capacity = {
                i: self._read_number(f"{CPU_DIR}/cpu{i}/cpu_capacity") or 0 for i in siblings_of
            }
            slow = {i for i, c in capacity.items() if 0 < c <= max(capacity.values()) * 3 // 4}
        else:
            # x86 without the performance counters' files: efficient cores have one thread and a
            # lower top speed than any core with several, unlike a core with an offline thread.
            slow = {i for i, cpus in siblings_of.items() if len(cpus) == 1}
            if len(slow) in (0, len(siblings_of)):
                return {}
            speed = {i: self._read_cpu_speed(i) for i in siblings_of}
            min_speed = min(speed[i] for i in siblings_of if i not in slow)
            if max(speed[i] for i in slow) >= min_speed:
                return {}
        if not slow:
            return {}
        return {i: CoreKind.EFFICIENT if i in slow else CoreKind.PERFORMANCE for i in siblings_of}

    def _read_cpu_speed(self, i: int) -> int:
        return (
            self._read_number(f"{CPU_DIR}/cpu{i}/acpi_cppc/highest_perf")
            or self._read_number(f"{CPU_DIR}/cpu{i}/cpufreq/cpuinfo_max_freq")
            or 0
        )

    def _read_l3_groups(self, online: CPUSet, cores: dict[int, Core]) -> dict[int, L3Group]:
        """Read groups of CPUs with one level 3 cache, by id."""
        groups: dict[int, L3Group] = {}
        grouped_cpus = NO_CPUS
        usual = "index3"
        conflicts = []
        for i in online:
            if i in grouped_cpus:
                continue
            directory = f"{CPU_DIR}/cpu{i}/cache"
            if self._tree.read_file(f"{directory}/{usual}/level") == "3":
                index = usual
            else:  # the number in "index3" is a serial number and not the level
                for index in self._tree.list_directory(directory):
                    if self._tree.read_file(f"{directory}/{index}/level") == "3":
                        usual = index
                        break
                else:
                    continue
            shared = self._read_cpu_list_or_mask(
                f"{directory}/{index}/shared_cpu_list", f"{directory}/{index}/shared_cpu_map"
            )
            if not shared:
                continue  # an empty map means no cache
            members = CPUSet.from_bits(shared.bits | 1 << i) & online
            if members & grouped_cpus:
                conflicts.append(i)
                members -= grouped_cpus
            groups[i] = L3Group(id=i, cpus=members)
            grouped_cpus |= members
        if conflicts:
            self._add_warning(
                f"the L3 caches of {cpus_text(CPUSet(conflicts))} contradict those of lower CPUs"
            )
        return groups or self._read_l3_substitutes(online, cores)

    def _read_l3_substitutes(self, online: CPUSet, cores: dict[int, Core]) -> dict[int, L3Group]:
        """Read groups that stand for L3 caches if the kernel reports none: dies, else clusters.

        They count if a group is larger than a core and smaller than its socket.
        """
        sockets = sockets_from(cores.values())
        for noun, name in (("dies", "die_cpus"), ("clusters of cores", "cluster_cpus")):
            groups: dict[int, L3Group] = {}
            grouped_cpus = NO_CPUS
            has_groups = False
            for i, core in cores.items():
                if i in grouped_cpus:
                    continue
                directory = f"{CPU_DIR}/cpu{i}/topology"
                siblings = (
                    self._read_cpu_list_or_mask(f"{directory}/{name}_list", f"{directory}/{name}")
                    or NO_CPUS
                )
                members = ((siblings | core.cpus) & online) - grouped_cpus
                groups[i] = L3Group(id=i, cpus=members)
                grouped_cpus |= members
                other_cpus = sockets[core.socket].cpus - members
                has_groups = has_groups or (members != core.cpus and bool(other_cpus))
            if has_groups:
                self._add_warning(f"the kernel reports no L3 caches; {noun} are taken for them")
                return groups
        return {}

    # -- files ----------------------------------------------------------------------------------

    def _add_warning(self, sentence: str) -> None:
        self._warnings.append(sentence)

    def _remark_on_node(
        self, numa_id: int, text: str, verb: str = "has", plural_verb: str = "have"
    ) -> None:
        """Record a warning, one sentence for all NUMA nodes with the same text."""
        self._nodes_by_remark.setdefault((text, verb, plural_verb), []).append(numa_id)

    def _source_path(self, name: str) -> str:
        return f"{self._tree.source.rstrip('/')}/{name}"

    def _cpus_with_directory(self) -> CPUSet:
        return _ids_in_names(_CPU_NAME, self._tree.list_directory(CPU_DIR), CPUSet)

    def _read_id_list(self, name: str, kind: type[_IdSetT]) -> _IdSetT | None:
        """Read a file in list format; None if it is missing, or invalid, which is a warning."""
        text = self._tree.read_file(name)
        if text is None:
            return None
        try:
            return kind.parse(text)
        except ListFormatError as e:
            self._add_warning(f"{name} is ignored: {e}")
            return None

    def _read_cpu_list_or_mask(self, list_name: str, mask_name: str) -> CPUSet | None:
        """Read CPUs from a list, or from the mask that older kernels have instead.

        The mask counts if the list is empty: some virtual file systems have such lists.
        """
        cpus = self._read_id_list(list_name, CPUSet)
        if cpus:
            return cpus
        text = self._tree.read_file(mask_name)
        if text is None:
            return cpus
        digits = text.replace(",", "")
        if len(digits) > CPUSet.LIMIT // 4 or not re.fullmatch("[0-9a-fA-F]+", digits):
            self._add_warning(f"{mask_name} is ignored: it is not a mask of hexadecimal digits")
            return cpus
        return CPUSet.from_bits(int(digits, 16))

    def _read_number(self, name: str) -> int | None:
        """Read a number that is not negative; None if the file is missing or has something else."""
        text = self._tree.read_file(name)
        return int(text) if text is not None and re.fullmatch("[0-9]{1,12}", text) else None


def _ids_in_names(pattern: re.Pattern[str], names: Iterable[str], kind: type[_IdSetT]) -> _IdSetT:
    matches = (pattern.fullmatch(name) for name in names)
    return kind(int(m[1]) for m in matches if m and int(m[1]) < kind.LIMIT)


def _read_meminfo(tree: Tree, name: str) -> dict[str, int]:
    """Read a meminfo file, the machine's or a NUMA node's: bytes by field."""
    text = tree.read_file(name) or ""
    return {m[1]: int(m[2][:15]) * 1024 for m in _MEMINFO_PATTERN.finditer(text)}


def _read_hugepage_bytes(tree: Tree, directory: str, name: str) -> dict[int, int]:
    """Read bytes of huge pages by page size in bytes; sizes without pages are left out."""
    pages: dict[int, int] = {}
    for entry in tree.list_directory(f"{directory}/hugepages"):
        match = _HUGE_NAME.fullmatch(entry)
        text = tree.read_file(f"{directory}/hugepages/{entry}/{name}") if match else None
        if match and text and re.fullmatch("[0-9]{1,12}", text) and int(text) > 0:
            size = int(match[1]) * 1024
            pages[size] = int(text) * size
    return dict(sorted(pages.items()))
