"""Case 1 of the policies: ``numamem`` beside ``policy`` or ``cpus: exclusive``.

Memory is as listed, and CPUs are computed near that memory.
"""

from __future__ import annotations

import pytest

from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Strategy
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named as machines


def two_nodes(**settings: object) -> World:
    """CPUs 0-3 and 4-7, 8 GiB each."""
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=8)
    return World(topology, Settings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("ties", [False, True])
def test_numamem_with_best_effort_and_exclusive_owns_cpus_near_that_memory(
    strategy: Strategy, ties: bool
) -> None:
    world = two_nodes(strategy=strategy, kubelet_ties=ties)
    wishes = {"policy": "best-effort", "cpus": "exclusive", "numamem": "1"}
    cpus, mems = world.put("a", wishes, 2, 1)
    assert (CPUSet.parse(cpus) <= CPUSet.parse("4-7"), mems) == (True, "1")
    allocation = world.allocation("a-app")
    assert allocation.kind is Kind.EXCLUSIVE
    assert allocation.owned
    assert allocation.preferred
    assert world.agent.state.charge(1).memory == GIB
    assert "memory as listed: numamem 1" in world.steps("a-app")
    world.check()


def test_numamem_with_best_effort_takes_cpus_elsewhere_when_none_are_near() -> None:
    world = two_nodes()
    world.put("own", {"numacpu": "4-6", "cpus": "exclusive"}, 3, 1)
    cpus, mems = world.put("a", {"policy": "best-effort", "numamem": "1"}, 3, 1)
    assert (CPUSet.parse(cpus) <= CPUSet.parse("0-3"), mems) == (True, "1")
    assert not world.allocation("a-app").preferred


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_numamem_with_a_strict_policy_refuses_cpus_that_are_not_near(policy: str) -> None:
    world = two_nodes()
    assert world.put("a", {"policy": policy, "numamem": "1"}, 1.5, 1) == ("4-7", "1")
    world.put("own", {"numacpu": "4-5", "cpus": "exclusive"}, 2, 1)
    refused = world.refused("b", {"policy": policy, "numamem": "1"}, 3, 1)
    assert refused.reason == "TopologyAffinityError"
    assert world.put("c", {"policy": policy, "numamem": "0"}, 3, 1)[1] == "0"


def test_numamem_with_restricted_may_use_more_cpus_than_are_near_as_on_an_empty_machine() -> None:
    world = two_nodes()
    cpus, mems = world.put("a", {"policy": "restricted", "numamem": "1"}, 6, 1)
    assert len(CPUSet.parse(cpus)) == 6
    assert CPUSet.parse("4-7") <= CPUSet.parse(cpus)
    assert mems == "1"
    assert world.refused("b", {"policy": "single-numa-node", "numamem": "1"}, 6, 1)  # fmt: skip


def test_numamem_with_exclusive_and_no_policy_prefers_cpus_near_it() -> None:
    world = two_nodes()
    cpus, mems = world.put("a", {"cpus": "exclusive", "numamem": "1"}, 2, 1, QoSClass.BURSTABLE)
    assert (CPUSet.parse(cpus) <= CPUSet.parse("4-7"), mems) == (True, "1")
    cpus, _ = world.put("b", {"cpus": "exclusive", "numamem": "1"}, 4, 1)
    assert len(CPUSet.parse(cpus) & CPUSet.parse("4-7")) == 2


def test_numamem_of_memory_without_cpus_puts_cpus_at_the_least_distance() -> None:
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_only_gib=[8],
        distances=[[10, 20, 30], [20, 10, 15], [30, 15, 10]],
    )  # fmt: skip
    world = World(topology)
    assert world.put("a", {"policy": "single-numa-node", "numamem": "2"}, 1.5, 1) == ("4-7", "2")
    assert world.allocation("a-app").numa_nodes == NUMASet([1])


def test_numamem_alone_still_leaves_cpus_alone() -> None:
    world = two_nodes()
    assert world.put("a", {"numamem": "1"}, 2, 1) == ("", "1")


def test_numamem_that_does_not_hold_the_memory_is_refused_with_a_policy_too() -> None:
    world = two_nodes()
    assert (
        world.refused("a", {"policy": "best-effort", "numamem": "1"}, 2, 20).reason
        == "NotEnoughMemory"
    )
    assert (
        world.refused("b", {"policy": "best-effort", "numamem": "7"}, 2, 20).reason
        == "UnknownNUMANode"
    )


def test_numamem_of_one_container_must_be_where_its_pod_is() -> None:
    world = World(machines.dual_no_smt())
    of = pod("p", {"policy": "single-numa-node", "scope": "pod", "numamem.b": "1",
                   "numamem.c": "0"}, total=resources(4, 4))  # fmt: skip
    assert world.add(of, "a", 1, 1)[1] == "0"
    assert "not where numamem 1 is" in world.refuse(of, container(of, "b", resources(1, 1))).message
    assert world.add(of, "c", 1, 1)[1] == "0"
