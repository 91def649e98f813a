"""Replays of pods that come and go: the trace, the checks of each answer, the optimum."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from bench.replay.__main__ import optimum_parts, report, series, withheld
from bench.replay.optimum import Optimum, fewest_refused
from bench.replay.placements import PLACEMENTS, Got, Node, Placement
from bench.replay.run import Ledger, Wrong, replay
from bench.replay.trace import GIB, LIFE_LONGEST_H, SIZES, Pod, generate, possible_sizes
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology

HOURS = 96.0


@pytest.fixture(scope="module")
def machine() -> Topology:
    """Two NUMA nodes of 8 CPUs and 16 GiB; CPUs 0 and 8 are one core and reserved."""
    return build_synthetic_topology(sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=16)


def trace(machine: Topology, seed: int, load: float = 1.5) -> tuple[Pod, ...]:
    reserved = withheld(machine)
    sizes = possible_sizes(machine, len(reserved))
    cpus = len(machine.online) - len(reserved)
    return generate(seed, sizes=sizes, cpus=cpus, load=load, hours=HOURS)


def test_a_trace_has_the_shape_that_it_says() -> None:
    pods = generate(0, sizes=SIZES, cpus=2000, load=1.0, hours=480)
    small = sum(pod.cpus <= 2 for pod in pods) / len(pods)
    short = sum(pod.ends - pod.begins < 24 for pod in pods) / len(pods)
    little = sum(pod.memory < 4 * GIB for pod in pods) / len(pods)
    assert 0.75 < small < 0.83
    assert 0.88 < short < 0.92
    assert 0.7 < little < 0.82
    assert max(pod.ends - pod.begins for pod in pods) <= LIFE_LONGEST_H * (1 + 1e-9)
    assert [p.begins for p in pods] == sorted(p.begins for p in pods)
    asked = sum(pod.cpus * (pod.ends - pod.begins) for pod in pods) / 480
    assert 1600 < asked < 2400, "the load is what was asked for"


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_answer_is_one_that_may_be_given_and_the_same_again(
    machine: Topology, name: str
) -> None:
    """`replay` itself refuses to go on when a CPU is given twice or a pod that fits is refused."""
    reserved, pods = withheld(machine), trace(machine, 3)
    first = replay(machine, reserved, PLACEMENTS[name], pods, HOURS)
    assert first == replay(machine, reserved, PLACEMENTS[name], trace(machine, 3), HOURS)
    assert 0 < first.refused < first.pods == len(pods)
    assert 0 < first.given < 1
    assert first.given + first.stranded <= 1
    if PLACEMENTS[name].one_node:
        assert first.crossing == 0


class Told:
    """A node that answers what it was told to."""

    moved: Mapping[int, Got] = {}

    def __init__(self, answers: Sequence[Got | None]) -> None:
        self._answers = iter(answers)

    def start(self, pod: Pod) -> Got | None:
        return next(self._answers)

    def end(self, pod: Pod) -> None:
        pass


def told(*answers: Got | None) -> Placement:
    def make(topology: Topology, reserved: CPUSet) -> Node:
        return Told(answers)

    return Placement("told", True, make)


def pod(number: int, cpus: int, memory: int, begins: float, ends: float) -> Pod:
    return Pod(number, cpus, memory * GIB, begins, ends)


ON_1 = frozenset([1])


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([Got(frozenset([5]), ON_1), Got(frozenset([5]), ON_1)], "CPU 5, which is reserved or"),
        ([Got(frozenset([0]), ON_1)], "CPU 0, which is reserved or another's"),
        ([Got(frozenset([5, 6]), ON_1)], "asked for 1 CPUs and got"),
        ([Got(frozenset([5]), ON_1), None], "was refused, and would have fitted"),
        ([Got(frozenset([5]), ON_1), Got(frozenset([6]), ON_1)], r"that NUMA nodes \[1\] do not"),
    ],
)
def test_a_wrong_answer_is_found(
    machine: Topology, answers: Sequence[Got | None], words: str
) -> None:
    pods = [pod(0, 1, 10, 0, 9), pod(1, 1, 10, 1, 9)]
    with pytest.raises(Wrong, match=words):
        replay(machine, withheld(machine), told(*answers), pods, 10)


def test_memory_of_several_numa_nodes_is_counted_by_sets(machine: Topology) -> None:
    ledger = Ledger(machine, withheld(machine))
    both = frozenset([0, 1])
    assert ledger.take(pod(0, 1, 20, 0, 9), Got(frozenset([5]), both))
    assert not ledger.take(pod(1, 1, 10, 0, 9), Got(frozenset([6]), ON_1))
    assert not ledger.enough(pod(2, 1, 3, 0, 9))
    assert ledger.enough(pod(2, 1, 2, 0, 9))


def test_cpus_without_memory_are_stranded(machine: Topology) -> None:
    reserved = withheld(machine)
    ledger = Ledger(machine, reserved)
    # 6 CPUs on NUMA node 0 and 8 on 1: three pods of 4 CPUs, and two CPUs over.
    assert ledger.stranded() == 2
    ledger.take(pod(0, 1, 15, 0, 9), Got(frozenset([5]), ON_1))
    assert ledger.stranded() == 2 + 7
    ledger.give_back(pod(0, 1, 15, 0, 9))
    assert ledger.stranded() == 2


def test_averages_are_over_the_time(machine: Topology) -> None:
    """Of 14 CPUs 7 are given for half of the time; who ends in the same moment makes room."""
    cpus = Got(frozenset([4, 5, 6, 7, 12, 13, 14]), ON_1)
    pods = [pod(0, 7, 1, 0, 5), pod(1, 14, 1, 2, 9), pod(2, 7, 1, 5, 5)]
    found = replay(machine, withheld(machine), told(cpus, cpus), pods, 10)
    assert found.given == pytest.approx(0.25)
    assert (found.refused, found.scattered) == (1, 0), "in sum there was not enough for the second"


def by_trying(machine: Topology, reserved: CPUSet, pods: Sequence[Pod]) -> int:
    """The fewest refusals, by trying every assignment."""
    nodes = sorted(machine.numa_nodes)
    least = len(pods)
    for chosen in itertools.product([None, *nodes], repeat=len(pods)):
        refused = chosen.count(None)
        if refused < least and all(
            sum(p.cpus for p in there) <= len(set(machine.numa_nodes[n].cpus) - set(reserved))
            and sum(p.memory for p in there) <= machine.numa_nodes[n].memory_bytes
            for moment in [p.begins for p in pods]
            for n in nodes
            for there in [
                [
                    p
                    for p, where in zip(pods, chosen, strict=True)
                    if where == n and p.begins <= moment < p.ends
                ]
            ]
        ):
            least = refused
    return least


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_is_what_trying_everything_finds(machine: Topology, seed: int) -> None:
    reserved = withheld(machine)
    long = [replace(p, ends=p.ends + 12) for p in trace(machine, seed, load=3.0)]
    pods = [replace(p, number=n) for n, p in enumerate([p for p in long if p.cpus > 1][:8])]
    found = fewest_refused(machine, reserved, pods, seconds=60)
    assert found.proven
    assert found.refused == by_trying(machine, reserved, pods)


def test_an_optimum_that_was_not_found_in_time_is_a_range(machine: Topology) -> None:
    """The best that anybody found is the upper end: a search that gave up is no optimum."""
    one = series("small", machine, load=1.5, seeds=1, hours=24, search_s=0)
    assert optimum_parts(one) == []
    unproven = replace(one, optima=[Optimum(refused=10**6, at_least=0)])
    ((least, most),) = optimum_parts(unproven)
    best = min(one.found[key][0].refused_part for key in PLACEMENTS if PLACEMENTS[key].one_node)
    assert (least, most) == (0, best)
    assert f"0.0% to {best:.1%}" in report([unproven])
    assert "proven for 0 of 1" in report([unproven])
