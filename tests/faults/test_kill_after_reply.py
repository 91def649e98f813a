"""Kill -9 after the answer, before what is left to do, and after what was decided unasked.

Whatever comes after an answer, and whatever is decided ahead of a request, may be lost at any
moment: the runtime has the answer, and the journal was written before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nri_numa.machine.cpuset import CPUSet
from tests.beds.embedded.runtime import EmbeddedContainer, EmbeddedPod
from tests.beds.embedded_node import Node, limits, until

AHEAD = {"decideAhead": True}
PLACED = "container placed"
OWN = {"policy": "single-numa-node"}

DECIDED = "call:nri_numa.node.ahead:DecidedAhead._decide:after"
"""A decision is ready that nobody asked for."""
TOLD = "call:nri_numa.node.ahead:DecidedAhead._tell:before"
"""One was taken, and nothing that follows the answer was done."""

REST = (
    "call:nri_numa.observe.decisions:DecisionTeller.admitted:before",
    "call:nri_numa.node.traces_of:TracesOf._pack:after",
    "call:nri_numa.node.ahead:DecidedAhead._work:before",
    DECIDED,
)
"""Moments between the answer to a container that was decided about when it came, and the rest."""

RELEASED = "call:nri_numa.observe.decisions:DecisionTeller.released:before"


@pytest.fixture
def node(directory: Path) -> Iterator[Node]:
    """A node whose plugin decides ahead; it is not started yet."""
    with Node(directory, config=AHEAD) as node:
        yield node


def foretold(node: Node, name: str) -> EmbeddedPod:
    """A pod for two CPUs, whose sandbox runs and tells what its container will ask for."""
    return node.pod(name, OWN, given=limits(2))


def died(node: Node) -> None:
    """The plugin ended itself."""
    until(lambda: not node.plugin.running, "the plugin is dead")


def comes(node: Node, pod: EmbeddedPod) -> EmbeddedContainer:
    """The container of such a pod, until it runs."""
    container = node.create(pod, cpus=2)
    node.call(node.runtime.start_container(container.id))
    return container


def has_its_own(node: Node, container: EmbeddedContainer) -> CPUSet:
    """The two CPUs of a container, by what the runtime was answered."""
    cpus = CPUSet.parse(container.message.linux.resources.cpu.cpus)
    assert len(cpus) == 2
    node.note(container, "exclusive")
    return cpus


def journal(node: Node) -> dict[str, bytes]:
    """The files of the plugin's state; only while it does not run."""
    directory = node.plugin.state_directory
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def owned(node: Node) -> dict[str, CPUSet]:
    """CPUs that somebody owns, by container, as the plugin says."""
    return {
        container_id: CPUSet.parse(one["cpus"])
        for container_id, one in node.assignments().items()
        if one["kind"] == "exclusive"
    }


def test_what_was_foreseen_and_not_asked_for_yet_leaves_no_trace(node: Node) -> None:
    """Killed between RunPodSandbox and CreateContainer: the container is decided when it comes."""
    node.start()
    node.four()
    before = owned(node)
    node.plugin.kill()
    node.start(DECIDED)
    written = journal(node)
    pod = foretold(node, "foreseen")
    died(node)
    assert written
    assert journal(node) == written
    node.start()
    node.check()
    assert owned(node) == before
    has_its_own(node, comes(node, pod))
    node.check()
    node.usable()


def test_what_was_foreseen_and_is_never_asked_for_leaves_no_trace(node: Node) -> None:
    """Its pod goes while the plugin is away; whoever comes next gets the CPUs it would have had."""
    node.start()
    first = comes(node, foretold(node, "first"))
    cpus = has_its_own(node, first)
    node.remove(first)
    node.plugin.kill()
    node.start(DECIDED)
    pod = foretold(node, "foreseen")
    died(node)
    node.call(node.runtime.remove_pod(pod.id))
    node.start()
    node.check()
    assert not node.assignments()
    assert has_its_own(node, comes(node, foretold(node, "next"))) == cpus
    node.check()


def test_between_the_answer_that_was_ready_and_the_rest(node: Node) -> None:
    """Replicas come until one is answered with what is ready; then the plugin dies."""
    node.start(TOLD)
    # Between two of them the plugin has several rounds of its loop for the next decision.
    mine = [comes(node, foretold(node, f"replica{number}")) for number in range(6)]
    died(node)
    said = {record["pod"] for record in node.plugin.records() if record["msg"] == PLACED}
    answered = [c for c in mine if c.message.linux.resources.cpu.cpus]
    assert [
        c for c in answered if f"default/{node.runtime.pods[c.pod_id].message.name}" not in said
    ]
    has = {container.id: has_its_own(node, container) for container in answered}
    node.start()
    node.check()
    assert has.items() <= owned(node).items()
    node.usable()


@pytest.mark.parametrize("fault", REST, ids=lambda fault: fault.split(":", 2)[2])
def test_between_an_answer_and_the_rest(node: Node, fault: str) -> None:
    """What is said, counted, packed and decided next is lost; what was answered is not."""
    node.start(fault)
    mine = node.owner("mine")
    died(node)
    cpus = has_its_own(node, mine)
    node.start()
    node.check()
    assert owned(node) == {mine.id: cpus}


def test_between_the_answer_to_a_stop_and_the_rest(node: Node) -> None:
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
