"""Named machines for tests, as values and as written sysfs trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nri_numa.machine.synthetic import Numbering, synthetic, sysfs_files
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import MemoryReading, Topology

MIB = 1 << 20
GIB = 1 << 30
HUGE_2M = 2 * MIB
HUGE_1G = GIB


def single_smt() -> Topology:
    """One socket, one NUMA node, 4 cores, 8 CPUs: core 0 is CPUs 0,4."""
    return synthetic(sockets=1, numa_per_socket=1, cores_per_numa=4)


def single_no_smt() -> Topology:
    """One socket, one NUMA node, 4 CPUs that are 4 cores."""
    return synthetic(sockets=1, numa_per_socket=1, cores_per_numa=4, threads=1)


def dual_smt() -> Topology:
    """Two sockets, 2 NUMA nodes, 64 CPUs: node 0 is 0-15,32-47; core 0 is CPUs 0,32."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=16, memory_gib=64)


def dual_no_smt() -> Topology:
    """Two sockets, 2 NUMA nodes, 8 cores each: node 0 is 0-7."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1)


def dual_adjacent() -> Topology:
    """Two sockets, 2 NUMA nodes, 16 CPUs with siblings side by side: core 0 is CPUs 0-1."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, numbering=Numbering.ADJACENT)


def dual_alternating() -> Topology:
    """Two sockets, 2 NUMA nodes, 16 CPUs: even numbers on node 0, odd ones on node 1."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, numbering=Numbering.ALTERNATING
    )


def snc_smt() -> Topology:
    """Two sockets with 2 NUMA nodes each, 32 CPUs: node 0 is 0-3,16-19; distances 10/12/21."""
    return synthetic(sockets=2, numa_per_socket=2, cores_per_numa=4)


def snc_asymmetric() -> Topology:
    """As `snc_smt`, with distances that differ by direction."""
    return synthetic(
        sockets=2,
        numa_per_socket=2,
        cores_per_numa=4,
        distances=[[10, 12, 20, 22], [12, 10, 22, 24], [21, 23, 10, 12], [22, 24, 12, 10]],
    )


def eight_by_32() -> Topology:
    """Eight sockets, 8 NUMA nodes, 256 CPUs."""
    return synthetic(sockets=8, numa_per_socket=1, cores_per_numa=16, memory_gib=128)


def ten_nodes() -> Topology:
    """Five sockets with 2 NUMA nodes each: beyond the kubelet's limit of 8; 40 CPUs."""
    return synthetic(sockets=5, numa_per_socket=2, cores_per_numa=2, memory_gib=4)


def sixteen_nodes() -> Topology:
    """Four sockets with 4 NUMA nodes each, 128 CPUs."""
    return synthetic(sockets=4, numa_per_socket=4, cores_per_numa=4, memory_gib=8)


def sixty_four_nodes() -> Topology:
    """16 sockets with 4 NUMA nodes each, 1024 CPUs."""
    return synthetic(sockets=16, numa_per_socket=4, cores_per_numa=8, memory_gib=32)


def hybrid() -> Topology:
    """One socket: 6 performance cores with 2 threads (CPUs 0-11), 8 efficient ones (12-19)."""
    return synthetic(
        sockets=1,
        numa_per_socket=1,
        cores_per_numa=6,
        efficient_cores_per_numa=8,
        numbering=Numbering.ADJACENT,
        memory_gib=32,
    )


def memory_only() -> Topology:
    """Two sockets with SMT, 16 CPUs, and NUMA nodes 2 and 3 with memory and no CPUs."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=16, memory_only_gib=(64, 64)
    )


def cpu_only() -> Topology:
    """Two NUMA nodes with CPUs and no memory of their own (0, 1), and 2 with all the memory."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=0, memory_only_gib=(32,)
    )


def sparse_ids() -> Topology:
    """NUMA nodes 0, 8 and 252 (memory only); CPUs 0-7 and 16-23, siblings side by side."""
    return synthetic(
        sockets=2,
        numa_per_socket=1,
        cores_per_numa=4,
        numbering=Numbering.ADJACENT,
        memory_only_gib=(8,),
        numa_ids=(0, 8, 252),
        skipped_cpus=CPUSet.parse("8-15"),
    )


def offline_cpus() -> Topology:
    """As `dual_adjacent`, with CPUs 3, 6, 7 and 12 offline: cores of 2, 1 and 0 threads."""
    return synthetic(
        sockets=2,
        numa_per_socket=1,
        cores_per_numa=4,
        numbering=Numbering.ADJACENT,
        offline=CPUSet.parse("3,6-7,12"),
    )


def joined_sockets() -> Topology:
    """Four sockets, two of them in each of 2 NUMA nodes; 32 CPUs."""
    return synthetic(sockets=4, numa_per_socket=1, sockets_per_numa=2, cores_per_numa=8)


def chiplets() -> Topology:
    """Two sockets, 2 NUMA nodes, 64 CPUs, an L3 for every 4 cores."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=16, cores_per_l3=4)


def dual_smt_16() -> Topology:
    """Two sockets, 2 NUMA nodes of 4 cores, 16 CPUs: node 0 is 0-3,8-11; core 0 is CPUs 0,8."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4)


def nohz_full_cpus() -> Topology:
    """As `dual_smt_16`, booted with ``nohz_full=1-3,7,9-11,15``."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, nohz_full=CPUSet.parse("1-3,7,9-11,15")
    )


def isolated_cpus() -> Topology:
    """As `dual_smt` but 16 CPUs, booted with ``isolcpus=2-3,10-11``."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, isolated=CPUSet.parse("2-3,10-11")
    )


def inside_cpuset() -> Topology:
    """Two NUMA nodes, 16 CPUs, of which the agent's own cgroup allows 0-1,4-5,8-9,12-13."""
    return synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, allowed=CPUSet.parse("0-1,4-5,8-9,12-13")
    )


def huge_pages() -> Topology:
    """Two NUMA nodes, each with 1 GiB of 2 MiB pages and 4 GiB of 1 GiB pages."""
    return synthetic(
        sockets=2,
        numa_per_socket=1,
        cores_per_numa=4,
        hugepages={HUGE_2M: GIB, HUGE_1G: 4 * GIB},
    )


def no_caches() -> Topology:
    """Two NUMA nodes; the kernel tells no caches (many virtual machines)."""
    return synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, cores_per_l3=0)


def one_cpu() -> Topology:
    """The smallest machine: one CPU, one NUMA node."""
    return synthetic(sockets=1, numa_per_socket=1, cores_per_numa=1, threads=1, memory_gib=1)


MACHINES: Mapping[str, Callable[[], Topology]] = {
    f.__name__: f
    for f in (
        one_cpu,
        single_smt,
        single_no_smt,
        dual_smt,
        dual_no_smt,
        dual_adjacent,
        dual_alternating,
        snc_smt,
        snc_asymmetric,
        eight_by_32,
        ten_nodes,
        sixteen_nodes,
        sixty_four_nodes,
        hybrid,
        memory_only,
        cpu_only,
        sparse_ids,
        offline_cpus,
        joined_sockets,
        chiplets,
        isolated_cpus,
        nohz_full_cpus,
        inside_cpuset,
        huge_pages,
        no_caches,
    )
}
"""Every machine above by name; call the value to build it."""


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write text files below ``root``, with their directories, and return ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_sysfs(root: Path, topology: Topology, memory: MemoryReading | None = None) -> Path:
    """Write the machine below ``root`` so that ``discover(root)`` reads an equal one."""
    return write_tree(root, sysfs_files(topology, memory))
