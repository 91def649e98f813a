"""What of a machine can be given away: never less than nothing."""

from __future__ import annotations

from msgspec.structs import replace

from nri_numa.engine.decision import Machine
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import Settings
from tests.machines import named as machines

GIB = 1 << 30
HUGE_1G = GIB


def test_memory_that_our_cgroup_withholds_is_none_at_all() -> None:
    topology = replace(machines.huge_pages(), withheld_memory=NUMASet([1]))
    machine = Machine(topology=topology, settings=Settings())
    per_node = topology.numa_nodes[0].memory_bytes - 5 * GIB  # huge pages are counted apart
    assert machine.memory_capacity == {0: per_node, 1: 0}
    assert machine.hugepages_capacity(HUGE_1G) == {0: 4 * GIB, 1: 0}
    assert machine.hugepages_capacity(64 << 10) == {0: 0, 1: 0}
