"""What of a machine can be given away: never less than nothing."""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import NUMASet
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


def test_what_is_reserved_beyond_all_there_is_leaves_nothing() -> None:
    reserved = Settings(
        reserved_memory={0: 1 << 60, 1: GIB}, reserved_hugepages={0: {HUGE_1G: 5 * GIB}}
    )
    machine = Machine(topology=machines.huge_pages(), settings=reserved)
    per_node = machine.topology.numa_nodes[1].memory_bytes - 5 * GIB
    assert machine.memory_capacity == {0: 0, 1: per_node - GIB}
    assert machine.hugepages_capacity(HUGE_1G) == {0: 0, 1: 4 * GIB}


def test_the_kubelets_rules_do_not_ask_what_the_kernel_has_left() -> None:
    reading = Reading(memory={0: 5, 1: 1 << 60}, hugepages={0: {HUGE_1G: 7}})
    for kubelet in (True, False):
        machine = Machine(topology=machines.huge_pages(), settings=Settings(kubelet_memory=kubelet))
        all_of_it = machine.memory_capacity
        left = machine.memory_left(NodeState(), reading)
        assert left == {0: all_of_it[0] if kubelet else 5, 1: all_of_it[1]}
        pages = machine.hugepages_left(HUGE_1G, NodeState(), reading)
        assert pages == {0: 4 * GIB if kubelet else 7, 1: 4 * GIB}
