"""Named machines for tests, as values and as written sysfs trees."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from nri_numa.machine.synthetic import Numbering, build_synthetic_topology, synthetic_sysfs_files
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import NUMAMemoryReading, Topology

MIB = 1 << 20
GIB = 1 << 30
HUGE_2M = 2 * MIB
HUGE_1G = GIB

_one = partial(build_synthetic_topology, sockets=1, numa_per_socket=1)
_dual = partial(build_synthetic_topology, sockets=2, numa_per_socket=1, cores_per_numa=4)
_adjacent = partial(_dual, numbering=Numbering.ADJACENT)

one_cpu = partial(_one, cores_per_numa=1, threads=1, memory_gib=1)
"""The smallest machine: one CPU, one NUMA node."""
single_smt = partial(_one, cores_per_numa=4)
"""One socket, one NUMA node, 4 cores, 8 CPUs: core 0 is CPUs 0,4."""
single_no_smt = partial(_one, cores_per_numa=4, threads=1)
"""One socket, one NUMA node, 4 CPUs that are 4 cores."""
dual_smt = partial(_dual, cores_per_numa=16, memory_gib=64)
"""Two sockets, 2 NUMA nodes, 64 CPUs: node 0 is 0-15,32-47; core 0 is CPUs 0,32."""
dual_no_smt = partial(_dual, cores_per_numa=8, threads=1)
"""Two sockets, 2 NUMA nodes, 8 cores each: node 0 is 0-7."""
dual_adjacent = partial(_adjacent)
"""Two sockets, 2 NUMA nodes, 16 CPUs with siblings side by side: core 0 is CPUs 0-1."""
dual_alternating = partial(_dual, numbering=Numbering.ALTERNATING)
"""Two sockets, 2 NUMA nodes, 16 CPUs: even numbers on node 0, odd ones on node 1."""
snc_smt = partial(_dual, numa_per_socket=2)
"""Two sockets with 2 NUMA nodes each, 32 CPUs: node 0 is 0-3,16-19; distances 10/12/21."""
snc_asymmetric = partial(
    snc_smt, distances=[[10, 12, 20, 22], [12, 10, 22, 24], [21, 23, 10, 12], [22, 24, 12, 10]]
)
"""As `snc_smt`, with distances that differ by direction."""
eight_by_32 = partial(_dual, sockets=8, cores_per_numa=16, memory_gib=128)
"""Eight sockets, 8 NUMA nodes, 256 CPUs."""
ten_nodes = partial(_dual, sockets=5, numa_per_socket=2, cores_per_numa=2, memory_gib=4)
"""Five sockets with 2 NUMA nodes each: beyond the kubelet's limit of 8; 40 CPUs."""
sixteen_nodes = partial(_dual, sockets=4, numa_per_socket=4, memory_gib=8)
"""Four sockets with 4 NUMA nodes each, 128 CPUs."""
sixty_four_nodes = partial(sixteen_nodes, sockets=16, cores_per_numa=8, memory_gib=32)
"""16 sockets with 4 NUMA nodes each, 1024 CPUs."""
hybrid = partial(
    _one, cores_per_numa=6, efficient_cores_per_numa=8, numbering=Numbering.ADJACENT, memory_gib=32
)
"""One socket: 6 performance cores with 2 threads (CPUs 0-11), 8 efficient ones (12-19)."""
memory_only = partial(_dual, memory_gib=16, memory_only_gib=(64, 64))
"""Two sockets with SMT, 16 CPUs, and NUMA nodes 2 and 3 with memory and no CPUs."""
cpu_only = partial(_dual, memory_gib=0, memory_only_gib=(32,))
"""Two NUMA nodes with CPUs and no memory of their own (0, 1), and 2 with all the memory."""
sparse_ids = partial(
    _adjacent, memory_only_gib=(8,), numa_ids=(0, 8, 252), skipped_cpus=CPUSet.parse("8-15")
)
"""NUMA nodes 0, 8 and 252 (memory only); CPUs 0-7 and 16-23, siblings side by side."""
offline_cpus = partial(_adjacent, offline=CPUSet.parse("3,6-7,12"))
"""As `dual_adjacent`, with CPUs 3, 6, 7 and 12 offline: cores of 2, 1 and 0 threads."""
joined_sockets = partial(_dual, sockets=4, sockets_per_numa=2, cores_per_numa=8)
"""Four sockets, two of them in each of 2 NUMA nodes; 32 CPUs."""
chiplets = partial(_dual, cores_per_numa=16, cores_per_l3=4)
"""Two sockets, 2 NUMA nodes, 64 CPUs, an L3 for every 4 cores."""
isolated_cpus = partial(_dual, isolated=CPUSet.parse("2-3,10-11"))
"""As `dual_smt` but 16 CPUs, booted with ``isolcpus=2-3,10-11``."""
nohz_full_cpus = partial(_dual, nohz_full=CPUSet.parse("1-3,7,9-11,15"))
"""As `dual_smt_16`, booted with ``nohz_full=1-3,7,9-11,15``."""
inside_cpuset = partial(_dual, allowed=CPUSet.parse("0-1,4-5,8-9,12-13"))
"""Two NUMA nodes, 16 CPUs, of which the agent's own cgroup allows 0-1,4-5,8-9,12-13."""
huge_pages = partial(_dual, hugepages={HUGE_2M: GIB, HUGE_1G: 4 * GIB})
"""Two NUMA nodes, each with 1 GiB of 2 MiB pages and 4 GiB of 1 GiB pages."""
no_caches = partial(_dual, cores_per_l3=0)
"""Two NUMA nodes; the kernel tells no caches (many virtual machines)."""

MACHINES: Mapping[str, Callable[[], Topology]] = {
    name: made
    for name, made in globals().items()
    if isinstance(made, partial) and not name.startswith("_")
}
"""Every machine above by name; call the value to build it."""
dual_smt_16 = partial(_dual)
"""Two sockets, 2 NUMA nodes of 4 cores, 16 CPUs: node 0 is 0-3,8-11; core 0 is CPUs 0,8."""
snc_no_smt = partial(snc_smt, threads=1)
"""Two sockets with 2 NUMA nodes each, 16 CPUs: node 0 is 0-3."""
snc_single = partial(snc_smt, sockets=1)
"""One socket with 2 NUMA nodes, 16 CPUs: node 0 is 0-3,8-11."""
snc_single_no_smt = partial(snc_single, threads=1)
"""One socket with 2 NUMA nodes, 8 CPUs: node 0 is 0-3."""
for _name, _made in MACHINES.items():
    _made.__name__ = _name


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    """Write text files below ``root``, with their directories, and return ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_sysfs(
    root: Path, topology: Topology, memory: Mapping[int, NUMAMemoryReading] = {}
) -> Path:
    """Write the machine below ``root`` so that ``discover(root)`` reads an equal one."""
    return write_tree(root, synthetic_sysfs_files(topology, memory))
