"""Making room with faults on purpose: whatever happens on the way, it ends on one side."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.demo.runtime import DemoContainer, PodOperationFailed
from nri_numa.machine.cgroups import CgroupReader
from nri_numa.machine.migration import find_migration_problem
from nri_numa.model.cpuset import CPUSet, NUMASet
from tests.beds.embedded_node import EmbeddedNode, until
from tests.machines import named as machines

if problem := find_migration_problem(CgroupReader("/nowhere")):
    pytest.skip(f"no memory moves here: {problem}", allow_module_level=True)

SINGLE = {"policy": "single-numa-node"}
ON_THE_WAY = (
    "agent.agent:Agent._apply_moves:before",
    "agent.cgroup_updates:CgroupUpdates.write_updates:after",
    "agent.agent:Agent._apply_moves:after",
    "agent.memory_migration:MemoryMigrator._migrate_container:before",
    "agent.agent:Agent.finish_migration:before",
    "agent.agent:Agent.finish_migration:after",
    "observe.notices:NoticeLog.add_for_allocation:before",
)
"""Saved; neighbours narrowed; all written; answered; pages moved; booked on one side; written."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[EmbeddedNode]:
    """Two NUMA nodes of eight CPUs; on each a movable container has three, and one shares."""
    machine = machines.snc_single_no_smt(cores_per_numa=8)
    # What was not answered for is found by the look for drift, which is every half minute else.
    with EmbeddedNode(tmp_path, topology=machine, config={"reconcile": {"interval": "1s"}}) as node:
        node.start()
        for name in ("a", "b"):
            node.run(name, SINGLE | {"movable": "true"}, cpus=3)
        node.free()
        yield node


def mems(node: EmbeddedNode, container: DemoContainer) -> str:
    # Files are no cgroups: two that write at once leave 1-1.
    return str(NUMASet.parse(node.cgroups.mems_of(node.cgroup(container.id))))


def moved(node: EmbeddedNode) -> list[str]:
    told = node.assignments().values()
    return [one["id"] for one in told if "moved to make room" in one["reason"]]


def right(node: EmbeddedNode) -> None:
    """Nobody is on another's CPUs, and each owner has its CPUs and its memory on one NUMA node."""

    def settled() -> bool:
        told = node.assignments()
        owners = [c for c in node.live if told[c.id]["kind"] == "exclusive"]
        return all(
            mems(node, c) == told[c.id]["mems"] == str(node.topology.numa_of(CPUSet.parse(c.cpus)))
            for c in owners
        )

    until(settled, "all memory is where CPUs are")
    node.check()


@pytest.mark.parametrize("fault", ON_THE_WAY, ids=lambda fault: fault.split(":", 1)[1])
def test_killed_on_the_way(node: EmbeddedNode, fault: str) -> None:
    """The runtime makes the newcomer without us where no answer came; it has its CPUs later."""
    node.plugin.kill()
    node.start(f"call:nri_numa.{fault}")
    new = node.run("new", SINGLE, cpus=6)
    until(lambda: not node.plugin.running, "the plugin is dead")
    node.start()
    right(node)
    assert len(moved(node)) == 1
    assert len(CPUSet.parse(new.cpus)) == 6
    node.remove(new)
    node.usable()


@pytest.mark.parametrize("ends", ["the newcomer's creation fails", "the mover ends"])
def test_somebody_ends_on_the_way(node: EmbeddedNode, ends: str) -> None:
    pod = node.pod("new", SINGLE)
    new = node.create(pod, cpus=6)
    if ends == "the mover ends":
        node.begin(new)
        (mover,) = moved(node)
        node.remove(node.runtime.containers[mover])
    else:
        node.call(node.runtime.remove_pod(pod.id))
    right(node)
    node.usable()


def test_what_cannot_be_written_goes_back(node: EmbeddedNode) -> None:
    """The newcomer is refused, and everybody has what they had."""
    before = {i: one["cpus"] for i, one in node.assignments().items()}
    for container in node.live:
        if node.assignments()[container.id]["kind"] == "exclusive":
            file = node.cgroups.directory(node.cgroup(container.id)) / "cpuset.cpus"
            unwritable = file.with_name("unwritable")
            unwritable.symlink_to("/dev/null")
            unwritable.replace(file)
    with pytest.raises(PodOperationFailed, match=r"no container could be moved: .*cpuset.cpus"):
        node.run("new", SINGLE, cpus=6)
    assert {i: one["cpus"] for i, one in node.assignments().items()} == before


def test_the_checkpoint_is_lost_on_the_way(node: EmbeddedNode) -> None:
    """Who moved and who came stay where they are, and its memory still follows."""
    node.plugin.kill()
    node.start("call:nri_numa.agent.agent:Agent.finish_migration:before")
    new = node.run("new", SINGLE, cpus=6)
    until(lambda: not node.plugin.running, "the plugin is dead")
    for file in node.plugin.state_directory.glob("checkpoint*"):
        file.unlink()
    node.start()
    right(node)
    assert len(moved(node)) == 1
    assert len(CPUSet.parse(new.cpus)) == 6
    assert not [one for one in node.assignments().values() if "migration" in one]
