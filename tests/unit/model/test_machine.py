"""Questions that the engine asks the machine model."""

from msgspec.structs import replace

from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import listed_words_text
from tests.machines import named as machines


def test_numa_nodes_are_sorted_into_those_with_memory_and_those_with_cpus() -> None:
    machine = machines.memory_only()
    assert machine.numa_ids == NUMASet.parse("0-3")
    assert machine.memory_nodes == NUMASet.parse("0-3")
    assert machine.cpu_nodes == NUMASet.parse("0-1")
    machine = machines.cpu_only()
    assert machine.memory_nodes == NUMASet([2])
    assert machine.cpu_nodes == NUMASet([0, 1])


def test_memory_that_our_cpuset_forbids_is_no_memory_node() -> None:
    machine = replace(machines.snc_smt(), withheld_memory=NUMASet.parse("0-1"))
    assert machine.memory_nodes == NUMASet.parse("2-3")
    assert machine.numa_ids == NUMASet.parse("0-3")


def test_cpus_of_numa_nodes_and_back() -> None:
    machine = machines.snc_smt()
    assert machine.cpus_of(NUMASet([0, 2])) == CPUSet.parse("0-3,8-11,16-19,24-27")
    assert machine.cpus_of(NUMASet([99])) == NO_CPUS
    assert machine.numa_of(CPUSet([3, 31])) == NUMASet([0, 3])
    assert machine.numa_of(CPUSet([500])) == NUMASet()


def test_cpus_of_more_sets_of_numa_nodes_than_are_remembered() -> None:
    machine = build_synthetic_topology(sockets=2, numa_per_socket=5, cores_per_numa=1)
    alone = {i: machine.numa_nodes[i].cpus for i in machine.numa_ids}
    for _ in range(2):
        for bits in range(1 << 10):
            numa_nodes = NUMASet.from_bits(bits)
            found = machine.cpus_of(numa_nodes)
            assert found == CPUSet(cpu for i in numa_nodes for cpu in alone[i])


def test_cpus_without_a_numa_node_are_on_none() -> None:
    machine = machines.dual_adjacent()
    lost = replace(machine.cpus[0], numa_node=None)
    node = replace(machine.numa_nodes[0], cpus=machine.numa_nodes[0].cpus - CPUSet([0]))
    machine = replace(
        machine, cpus={**machine.cpus, 0: lost}, numa_nodes={**machine.numa_nodes, 0: node}
    )
    assert machine.numa_of(CPUSet([0])) == NUMASet()
    assert machine.numa_of(CPUSet([0, 1])) == NUMASet([0])


def test_siblings_include_the_cpus_themselves() -> None:
    machine = machines.dual_smt()
    assert machine.siblings_of(CPUSet([0, 17])) == CPUSet([0, 32, 17, 49])
    assert machine.siblings_of(CPUSet([8000])) == NO_CPUS


def test_threads_per_core_is_the_most_that_any_core_has() -> None:
    assert machines.dual_smt().threads_per_core == 2
    assert machines.dual_no_smt().threads_per_core == 1
    assert machines.offline_cpus().threads_per_core == 2
    assert replace(machines.one_cpu(), cores={}).threads_per_core == 1


def test_unknown_distances_are_the_kernels_defaults() -> None:
    machine = machines.snc_asymmetric()
    assert machine.distance(0, 3) == 22
    assert machine.distance(1, 3) == 24
    assert machine.distance(2, 1) == 23
    assert machine.distance(0, 77) == 20
    assert machine.distance(77, 77) == 10


def test_id_changes_with_ids_siblings_and_membership_only() -> None:
    machine = machines.dual_smt()
    assert machine.fingerprint == machines.dual_smt().fingerprint
    assert machine != machines.chiplets()  # other caches and distances
    assert machine.fingerprint == machines.chiplets().fingerprint
    assert machine.fingerprint != machines.snc_smt().fingerprint
    assert (
        build_synthetic_topology(memory_gib=1).fingerprint
        == build_synthetic_topology(memory_gib=2).fingerprint
    )
    assert (
        build_synthetic_topology(numbering="split").fingerprint
        != build_synthetic_topology(numbering="adjacent").fingerprint
    )
    assert (
        build_synthetic_topology(threads=1, cores_per_numa=8).fingerprint
        != build_synthetic_topology(threads=2).fingerprint
    )


def test_a_sentence_lists_eight_words_and_the_number_of_the_others() -> None:
    assert listed_words_text(["a", "b"]) == "a and b"
    assert listed_words_text([*"abcdefghijk"]) == "a, b, c, d, e, f, g, h and 3 more"
