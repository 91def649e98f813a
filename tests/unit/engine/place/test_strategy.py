"""Which of two NUMA nodes is tried first, by what would be left of their scarcest resource."""

from __future__ import annotations

from nri_numa.machine.synthetic import synthetic
from nri_numa.model.workload import Strategy
from tests.beds.world import GIB, World, pod, resources

SPREAD, PACK, MOST = Strategy.SPREAD, Strategy.PACK, Strategy.MOST_LEFT


def test_with_spread_huge_pages_that_are_nearly_used_up_are_kept() -> None:
    """Node 0 has most CPUs left, and no huge pages beyond what is asked for."""
    pages = {GIB: 4 * GIB}
    world = World(
        synthetic(
            sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=64,
            hugepages=pages,
        )
    )  # fmt: skip
    one = {"policy": "single-numa-node", "cpus": "exclusive"}
    for name, cpus, gib, where in (("a", 1, 3, "0"), ("b", 2, 0, "1"), ("c", 1, 1, "1")):
        of = pod(name, one)
        wants = resources(cpus, 1, hugepages={GIB: gib * GIB} if gib else None)
        assert world.place(of, wants=wants)[1] == where
