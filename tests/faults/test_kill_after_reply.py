"""Kill -9 after the answer, before what is left to do.

Whatever comes after an answer may be lost at any moment: the runtime has the answer, and the
journal was written before it.
"""

import pytest

from nri_numa.demo.runtime import DemoContainer
from nri_numa.model.cpuset import CPUSet
from tests.beds.embedded_node import EmbeddedNode, until

REST = (
    "call:nri_numa.observe.decisions:DecisionReporter.log_placed_with_neighbours:before",
    "call:nri_numa.agent.history:DecisionHistory._pack_trace:after",
)
"""Moments between the answer to a container that was decided about when it came, and the rest."""

RELEASED = "call:nri_numa.observe.decisions:DecisionReporter.log_released:before"


@pytest.fixture
def node(bare: EmbeddedNode) -> EmbeddedNode:
    return bare


def died(node: EmbeddedNode) -> None:
    until(lambda: not node.plugin.running, "the plugin is dead")


def has_its_own(node: EmbeddedNode, container: DemoContainer) -> CPUSet:
    """The two CPUs of a container, by what the runtime was answered."""
    cpus = CPUSet.parse(container.message.linux.resources.cpu.cpus)
    assert len(cpus) == 2
    node.note(container, "exclusive")
    return cpus


def owned(node: EmbeddedNode) -> dict[str, CPUSet]:
    """CPUs that somebody owns, by container, as the plugin says."""
    return {
        container_id: CPUSet.parse(one["cpus"])
        for container_id, one in node.assignments().items()
        if one["kind"] == "exclusive"
    }


@pytest.mark.parametrize("fault", REST, ids=lambda fault: fault.split(":", 2)[2])
def test_between_an_answer_and_the_rest(node: EmbeddedNode, fault: str) -> None:
    """What is said, counted and packed is lost; what was answered is not."""
    node.start(fault)
    mine = node.owner("mine")
    died(node)
    cpus = has_its_own(node, mine)
    node.start()
    node.check()
    assert owned(node) == {mine.id: cpus}


def test_between_the_answer_to_a_stop_and_the_rest(node: EmbeddedNode) -> None:
    """Its CPUs are free, and the runtime was told so."""
    node.start()
    mine = node.owner("mine")
    cpus = has_its_own(node, mine)
    node.plugin.kill()
    node.start(RELEASED)
    node.remove(mine)
    died(node)
    node.start()
    node.check()
    assert not node.assignments()
    assert has_its_own(node, node.owner("next")) == cpus
    node.check()


def restarted(node: EmbeddedNode, fault: str) -> DemoContainer:
    """A neighbour runs, and the plugin has a fault from now on."""
    node.start()
    free = node.free()
    node.plugin.kill()
    node.start(fault)
    return free


def test_between_the_write_of_neighbours_and_the_answer(node: EmbeddedNode) -> None:
    """The runtime makes the container without us; it has its CPUs when we are back."""
    free = restarted(node, "call:nri_numa.agent.cgroup_updates:CgroupUpdates.write_updates:after")
    mine = node.owner("mine")
    died(node)
    node.start()
    node.check()
    assert len(owned(node)[mine.id]) == 2
    assert CPUSet.parse(free.cpus) == node.topology.online - owned(node)[mine.id]


@pytest.mark.parametrize("fails", [False, True])
def test_between_an_answer_and_the_widening(node: EmbeddedNode, fails: bool) -> None:
    """Whether the owner ended, or its creation failed after the answer."""
    free = restarted(
        node, "call:nri_numa.agent.cgroup_updates:CgroupUpdates._return_cpus_batch:before"
    )
    pod = node.pod("mine", {"policy": "single-numa-node"})
    mine = node.create(pod, cpus=2)
    if not fails:
        node.begin(mine)
    assert len(CPUSet.parse(free.cpus)) == len(node.topology.online) - 2
    node.call(node.runtime.remove_pod(pod.id))
    died(node)
    node.start()
    until(lambda: CPUSet.parse(free.cpus) == node.topology.online, "it has all CPUs again")
    node.check()
    assert node.metric("nri_numa_undelivered_updates_repaired_total") == 0
