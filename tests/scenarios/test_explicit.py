"""Explicit lists: taken as they are, or refused with a sentence that says everything."""

from __future__ import annotations

import pytest

from nri_numa.engine.decision import Reading
from nri_numa.engine.state import Kind
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Rule, Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import named as machines


def test_memory_only_still_stays_off_owned_cpus() -> None:
    world = World(machines.single_smt())
    world.put("m", {"numamem": "0"})
    world.put("x", {"cpus": "exclusive"}, 2)
    assert world.cpus("m-app").isdisjoint(world.cpus("x-app"))
    assert world.has("m-app")[1] == "0"


def test_the_containers_own_key_beats_the_pods() -> None:
    world = World(machines.snc_smt())
    of = pod("a", {"numacpu": "0-3", "numacpu.db": "4-5", "numamem.db": "1"})
    assert world.place(of, container(of, "web")) == ("0-3", "")
    assert world.place(of, container(of, "db")) == ("4-5", "1")


def test_listed_and_exclusive_belongs_to_nobody_else() -> None:
    world = World(machines.single_no_smt())
    world.put("plain", {}, qos=QoSClass.BEST_EFFORT)
    assert world.put("a", {"numacpu": "1-2", "cpus": "exclusive"}, 2) == ("1-2", "")
    assert world.has("plain-app")[0] == "0,3"
    refused = world.refused("b", {"numacpu": "2"})
    assert refused.reason == "CPUOwned"
    assert "default/a/app" in refused.message
    world.stop("a-app")
    assert world.has("plain-app")[0] == "0-3"


def test_exclusive_grants_avoid_listed_cpus() -> None:
    world = World(machines.single_no_smt())
    world.put("a", {"numacpu": "0-1"})
    cpus, _ = world.put("b", {"cpus": "exclusive"}, 1)
    assert cpus in ("2", "3")


@pytest.mark.parametrize(
    ("annotations", "reason", "words"),
    [
        ({"numacpu": "64"}, "UnknownCPU", ("CPU 64 does not exist", "0-31")),
        ({"numacpu": "0,31-33"}, "UnknownCPU", ("CPUs 32-33 do not exist",)),
        ({"numamem": "4"}, "UnknownNUMANode", ("NUMA node 4 does not exist", "0-3")),
        ({"numacpu": "0", "numamem": "0,7"}, "UnknownNUMANode", ("NUMA node 7",)),
        (
            {"numacpu": "0-31", "cpus": "exclusive"},
            "SharedPoolEmpty",
            ("would leave 0 of the 32 CPUs",),
        ),
    ],
)
def test_what_does_not_exist_is_refused(
    annotations: dict[str, str], reason: str, words: tuple[str, ...]
) -> None:
    world = World(machines.snc_smt())
    refused = world.refused("bad", annotations, 32)
    assert refused.reason == reason
    for word in ("default/bad", "app", *annotations.values(), "expected", *words):
        if word != "exclusive":
            assert word in refused.message
    assert not world.agent.state.allocations


def test_an_offline_cpu_is_refused_as_offline() -> None:
    world = World(synthetic(sockets=1, numa_per_socket=1, cores_per_numa=4, offline=CPUSet([5])))
    refused = world.refused("a", {"numacpu": "4-5"})
    assert refused.reason == "CPUOffline"
    assert "CPU 5 is offline" in refused.message
    assert "0-4,6-7" in refused.message


def test_a_cpu_outside_our_own_cpuset_is_refused() -> None:
    world = World(
        synthetic(sockets=1, numa_per_socket=1, cores_per_numa=4, allowed=CPUSet(range(4)))
    )
    refused = world.refused("a", {"numacpu": "3-4"})
    assert refused.reason == "CPUNotAllowed"
    assert "CPU 4" in refused.message
    assert "0-3" in refused.message


def test_reserved_cpus_are_out_of_reach_of_lists_but_those_of_a_rule() -> None:
    topology = machines.single_no_smt()
    lenient = World(topology, Settings(reserved_cpus=CPUSet([0])))
    assert lenient.refused("a", {"numacpu": "0"}).reason == "CPUReserved"
    ruled = (Rule(namespaces=("system",), values={"numacpu": "0"}),)
    lenient = World(topology, Settings(reserved_cpus=CPUSet([0]), rules=ruled))
    assert lenient.place(pod("a", namespace="system")) == ("0", "")
    refused = lenient.refuse(
        pod("x", {"cpus": "exclusive"}, namespace="system"), wants=resources(1)
    )
    assert refused.reason == "CPUReserved"
    assert "expected CPUs among 1-3" in refused.message
    assert (
        "never given exclusively"
        in lenient.agent.grounds_of_refusal(lenient.agent.refusals[-1]).basis.rule
    )
    strict = World(topology, Settings(reserved_cpus=CPUSet([0]), strict_reserved=True, rules=ruled))
    assert strict.refuse(pod("a", namespace="system")).reason == "CPUReserved"
    refused = strict.refused("a", {"numacpu": "0-1"})
    assert refused.reason == "CPUReserved"
    assert "1-3" in refused.message


def test_exclusive_lists_may_not_overlap_other_lists() -> None:
    world = World(machines.single_no_smt())
    world.put("a", {"numacpu": "1"}, 1)
    refused = world.refused("b", {"numacpu": "1-2", "cpus": "exclusive"}, 2)
    assert refused.reason == "CPUListed"
    assert "default/a/app" in refused.message


def test_a_node_without_memory_is_refused() -> None:
    topology = synthetic(sockets=1, numa_per_socket=2, cores_per_numa=2, memory_gib=0)
    world = World(topology)
    refused = world.refused("a", {"numamem": "0"})
    assert refused.reason == "NUMANodeWithoutMemory"


def test_a_memory_limit_that_does_not_fit_is_refused_instead_of_left_to_the_oom_killer() -> None:
    world = World(machines.snc_smt())  # 16 GiB on each NUMA node
    refused = world.refused("a", {"numacpu": "0", "numamem": "0"}, 1, 17)
    assert refused.reason == "NotEnoughMemory"
    assert "17 GiB" in refused.message
    assert "NUMA node 0: 16 GiB" in refused.message


@pytest.mark.parametrize("wishes", [{}, {"policy": "best-effort"}])
def test_huge_pages_that_do_not_fit_are_refused_too(wishes: dict[str, str]) -> None:
    """Three pods of 2 GiB in pages of 1 GiB, and one NUMA node that has two of them."""
    topology = synthetic(
        sockets=2, numa_per_socket=1, cores_per_numa=4, memory_gib=16, hugepages={GIB: 2 * GIB}
    )
    world = World(topology)
    wants = resources(1, 1, hugepages={GIB: 2 * GIB})
    pods = [pod(name, {**wishes, "numamem": "1"}) for name in "abc"]
    world.place(pods[0], wants=wants)
    for of in pods[1:]:
        refused = world.refuse(of, wants=wants)
        assert refused.reason == "NotEnoughMemory"
        assert (
            "numamem is '1' (annotation numa.kubernetes.io/numamem), but hugepages-1Gi: 2 GiB "
            "needed, 0 B free there; NUMA node 1: 0 B; expected NUMA nodes that hold it, "
            "since a page that is not there ends in SIGBUS"
        ) in refused.message
    world.check()


def test_memory_that_the_kernel_does_not_have_counts_as_gone() -> None:
    world = World(machines.snc_smt(), reading=Reading(memory={0: GIB}))
    assert world.refused("a", {"numamem": "0"}, 1, 2).reason == "NotEnoughMemory"


def test_unpinned_starts_untouched_when_the_list_is_no_good() -> None:
    world = World(machines.snc_smt())
    assert world.put("a", {"numacpu": "99", "on-failure": "unpinned"}) == ("", "")
    allocation = world.allocation("a-app")
    assert allocation.kind is Kind.UNBOUND
    assert not allocation.preferred
    assert "UnknownCPU" in allocation.reason
