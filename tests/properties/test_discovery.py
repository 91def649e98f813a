"""Whatever stands in /sys, discovery gives a consistent machine or a `TopologyError`."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nri_numa.errors import TopologyError
from nri_numa.machine.synthetic import Numbering, build_synthetic_topology, synthetic_sysfs_files
from nri_numa.machine.sysfs import discover_tree
from nri_numa.machine.tree import ArchiveTree
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from tests.machines import named as machines

cpu_lists = st.frozensets(st.integers(0, 20), max_size=8).map(lambda ids: str(CPUSet(ids)))
texts = st.one_of(
    cpu_lists,
    st.integers(-2, 2000).map(str),
    st.text(alphabet="0123456789abcdefx,- \n\0²٣", max_size=12),
    st.lists(st.integers(0, 300), max_size=5).map(lambda row: " ".join(map(str, row))),
    st.sampled_from(["9" * 5000, "-1", "", "0-8191", "Node 0 MemTotal: 99999999999999999 kB"]),
)

SMALL = [
    synthetic_sysfs_files(machine())
    for machine in (
        machines.single_smt,
        machines.dual_adjacent,
        machines.offline_cpus,
        machines.sparse_ids,
        machines.hybrid,
        machines.memory_only,
        machines.inside_cpuset,
        machines.huge_pages,
    )
]


def _consistent(machine: Topology) -> None:
    assert CPUSet(machine.cpus) == machine.online <= machine.present <= machine.possible
    assert machine.online
    assert machine.allowed
    assert machine.allowed <= machine.online
    assert machine.isolated <= machine.present
    assert machine.numa_nodes
    for i, cpu in machine.cpus.items():
        assert i in machine.cores[cpu.core].cpus
        assert i in machine.sockets[cpu.socket].cpus
        owners = [n.id for n in machine.numa_nodes.values() if i in n.cpus]
        assert owners == ([] if cpu.numa_node is None else [cpu.numa_node])
    for groups in (machine.cores, machine.sockets, machine.l3_groups):
        sets = [group.cpus for group in groups.values()]
        assert sum(len(cpus) for cpus in sets) == len(CPUSet(i for cpus in sets for i in cpus))
        assert all(cpus <= machine.online for cpus in sets)
    assert sum(len(core.cpus) for core in machine.cores.values()) == len(machine.online)
    for numa_node in machine.numa_nodes.values():
        assert set(numa_node.distances) == set(machine.numa_nodes)
        assert numa_node.memory_bytes >= 0
    assert all(warning and "\n" not in warning for warning in machine.warnings)


@given(st.data())
def test_any_damage_gives_a_consistent_machine_or_an_error(data: st.DataObject) -> None:
    files = dict(data.draw(st.sampled_from(SMALL)))
    names = st.sampled_from(sorted(files))
    for name in data.draw(st.lists(names, max_size=12)):
        files.pop(name, None)
    for name in data.draw(st.lists(names, max_size=12)):
        files[name] = data.draw(texts)
    files = {name: text.strip("\0 \t\r\n") for name, text in files.items()}  # as trees give them
    links = {
        f"sys/devices/system/cpu/cpu{cpu}/node{node}"
        for cpu, node in data.draw(
            st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=8)
        )
    }
    try:
        machine = discover_tree(ArchiveTree("root", files, links, set()))
    except TopologyError:
        return
    _consistent(machine)


MADE_UP = st.builds(
    build_synthetic_topology,
    sockets=st.integers(1, 4),
    numa_per_socket=st.integers(1, 3),
    cores_per_numa=st.integers(1, 5),
    threads=st.integers(1, 4),
    numbering=st.sampled_from(Numbering),
    cores_per_l3=st.none() | st.integers(0, 3),
    efficient_cores_per_numa=st.integers(0, 3),
    memory_only_gib=st.lists(st.integers(1, 9), max_size=2),
    offline=st.builds(CPUSet, st.frozensets(st.integers(1, 60), max_size=6)),
    skipped_cpus=st.builds(CPUSet, st.frozensets(st.integers(1, 30), max_size=6)),
)


@settings(deadline=None)
@given(MADE_UP)
def test_every_made_up_machine_is_read_back(machine: Topology) -> None:
    files = {name: text.strip() for name, text in synthetic_sysfs_files(machine).items()}
    assert discover_tree(ArchiveTree("root", files, set(), set())) == machine
    _consistent(machine)
