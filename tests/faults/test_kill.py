"""Kill -9: at every change of the checkpoint's files, and at any moment of a busy node."""

import contextlib
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nri_numa.demo.runtime import DemoContainer, PodOperationFailed
from nri_numa.model.cpuset import CPUSet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.embedded_node import RUNTIMES, THOROUGH, EmbeddedNode, until

MOMENTS = ("before", "half", "after")


@contextlib.contextmanager
def fresh() -> Iterator[EmbeddedNode]:
    with (
        tempfile.TemporaryDirectory(prefix="nri-numa-kill-") as directory,
        EmbeddedNode(Path(directory)) as node,
    ):
        yield node


def started(node: EmbeddedNode) -> Callable[[], None]:
    """Start the plugin, which may die from now on; returns what brings it back after each step."""
    node.start(node.plugin.fault, wait=False)
    revived = False

    def go_on() -> None:
        """Bring the plugin back when it died, and look; the runtime never waits for that."""
        nonlocal revived
        # A killed process is there for a moment longer than its connection.
        until(
            lambda: not node.plugin.running or (node.plugin.ready() and node.runtime.plugins),
            "ready, or dead",
        )
        if not node.plugin.running:
            assert not revived, "it died only once"
            revived = True
            node.start()
        if revived:
            node.check()

    return go_on


def live_through(node: EmbeddedNode) -> None:
    """A life that changes the checkpoint in every way; the plugin may die anywhere in it."""
    go_on = started(node)
    go_on()
    free = node.free()
    go_on()
    node.note(node.listed(), "listed")
    go_on()
    owner = node.owner()
    node.note(owner, "exclusive")
    go_on()
    # A resize may change what it has, and may be finished only after the restart.
    node.pinned.pop(owner.id, None)
    more = pb.LinuxResources()
    more.cpu.quota.value, more.cpu.period.value, more.cpu.shares.value = 300_000, 100_000, 3072
    node.call(node.runtime.update_container(owner.id, more))
    go_on()
    node.note(owner, "exclusive")
    node.note(node.owner("second", 4), "exclusive")
    go_on()
    node.remove(owner)
    go_on()
    node.remove(free)
    go_on()


def killed(number: int, moment: str) -> str:
    """Live through a kill; says what went wrong."""
    with fresh() as node:
        node.plugin.fault = f"kill:{number}:{moment}"
        try:
            live_through(node)
            node.check()
            node.usable()
        except AssertionError as error:
            return f"killed {moment} step {number}: {error}"
    return ""


def test_at_every_change_of_a_file() -> None:
    """Before it, half way through a write, and after it; by default one of these for each."""
    with fresh() as node:
        counter = node.directory / "count"
        node.plugin.fault = f"count:{counter}"
        live_through(node)
        steps = int(counter.read_text())
        node.check()
        node.usable()
    assert steps >= 12
    cases = [
        (number, moment)
        for number in range(1, steps + 1)
        for moment in (MOMENTS if THOROUGH else (MOMENTS[number % 3],))
    ]
    with ThreadPoolExecutor(3) as pool:
        problems = [problem for problem in pool.map(lambda case: killed(*case), cases) if problem]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("bare", RUNTIMES.values(), indirect=True, ids=RUNTIMES)
@pytest.mark.parametrize("seed", range(6 if THOROUGH else 1))
def test_at_random_under_churn(node: EmbeddedNode, seed: int) -> None:
    """Pods come and go without pause while the plugin is killed and started."""
    rng = random.Random(seed)
    kept = node.live
    node.listed("other-list", "17", "3")
    stop, errors = threading.Event(), list[BaseException]()

    def churn() -> None:
        mine = random.Random(seed + 1)
        running: list[DemoContainer] = []
        number = 0
        try:
            while not stop.is_set():
                number += 1
                if len(running) > 6 or (running and mine.random() < 0.4):
                    node.remove(running.pop(mine.randrange(len(running))))
                    continue
                with contextlib.suppress(PodOperationFailed):
                    make = mine.choice((node.owner, node.shared, node.free))
                    running.append(make(f"churn{number}"))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20 if THOROUGH else 5):
            stop.wait(rng.uniform(0.05, 0.4))
            node.plugin.kill()
            stop.wait(rng.choice((0.0, 0.1)))
            node.start(wait=rng.random() < 0.7)
    finally:
        stop.set()
        thread.join(30)
    assert not errors, errors
    node.plugin.wait_ready()
    node.check()
    assert {c.id for c in kept} <= {c.id for c in node.live}
    node.usable()


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
