"""Explicit lists: taken as they are, or refused with a sentence that says everything.

What is offline, not allowed or without memory is in tests/shipped/test_docs_reference.py.
"""

import pytest
from msgspec.structs import replace

from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.state import ContainerKind
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import KubeletRules, Rule, Settings
from nri_numa.model.workload import QoSClass, Strategy
from tests.beds.world import GIB, World, container, pod, resources, says, two_nodes
from tests.machines import named as machines

usual = two_nodes


def test_listed_and_exclusive_belongs_to_nobody_else() -> None:
    world = World(machines.single_no_smt())
    world.put("plain", {}, qos=QoSClass.BEST_EFFORT)
    assert world.put("a", {"numacpu": "1-2", "cpus": "exclusive"}, 2) == ("1-2", "")
    assert world.has("plain-app")[0] == "0,3"
    says(world.rejected("b", {"numacpu": "2"}), "CPUExclusive", "default/a/app")
    world.stop("a-app")
    assert world.has("plain-app")[0] == "0-3"


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
def test_what_does_not_exist_is_rejected(
    annotations: dict[str, str], reason: str, words: tuple[str, ...]
) -> None:
    world = World(machines.snc_smt())
    rejected = world.rejected("bad", annotations, 32)
    assert rejected.reason == reason
    for word in ("default/bad", "app", *annotations.values(), "expected", *words):
        if word != "exclusive":
            assert word in rejected.message
    assert not world.agent.current.state.allocations


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(rules=(Rule(namespaces=("system",), values={"numacpu": "0"}),)),
        Settings(defaults={"numacpu": "0"}),
    ],
    ids=["rule", "default"],
)
def test_reserved_cpus_are_in_no_list_but_the_operators(settings: Settings, strict: bool) -> None:
    settings = replace(settings, reserved_cpus=CPUSet([0]), strict_cpu_reservation=strict)
    world = World(machines.single_no_smt(), settings)
    says(world.rejected("a", {"numacpu": "0-1"}), "CPUReserved", "1-3")
    assert world.place(pod("a", namespace="system")) == ("0", "")
    world.check()
    rejected = world.reject(pod("x", {"cpus": "exclusive"}, namespace="system"), wants=resources(1))
    says(rejected, "CPUReserved", "expected CPUs among 1-3")
    assert (
        "never exclusive"
        in world.history.explanation_of_rejection(world.history.rejections[-1]).basis.rule
    )


def test_exclusive_lists_may_not_overlap_other_lists() -> None:
    world = World(machines.single_no_smt())
    world.put("a", {"numacpu": "1"}, 1)
    rejected = world.rejected("b", {"numacpu": "1-2", "cpus": "exclusive"}, 2)
    says(rejected, "CPUListed", "default/a/app")


@pytest.mark.parametrize("wishes", [{}, {"policy": "best-effort"}])
def test_huge_pages_that_do_not_fit_are_rejected_too(wishes: dict[str, str]) -> None:
    """Three pods of 2 GiB in pages of 1 GiB, and one NUMA node that has two of them."""
    world = World(machines.dual_smt_16(hugepages={GIB: 2 * GIB}))
    wants = resources(1, 1, hugepages={GIB: 2 * GIB})
    pods = [pod(name, {**wishes, "numamem": "1"}) for name in "abc"]
    world.place(pods[0], wants=wants)
    for of in pods[1:]:
        rejected = world.reject(of, wants=wants)
        assert rejected.reason == "NotEnoughMemory"
        assert (
            "numamem is '1' (annotation numa.kubernetes.io/numamem), but hugepages-1Gi: 2 GiB "
            "needed, 0 B free there; NUMA node 1: 0 B; expected NUMA nodes that hold it, "
            "because otherwise SIGBUS ends the container"
        ) in rejected.message


def test_memory_that_the_kernel_does_not_have_counts_as_gone() -> None:
    world = World(machines.snc_smt(), reading=MeasuredFree(memory={0: GIB}))
    assert world.rejected("a", {"numamem": "0"}, 1, 2).reason == "NotEnoughMemory"


def test_unpinned_starts_untouched_when_the_list_is_no_good() -> None:
    world = World(machines.snc_smt())
    assert world.put("a", {"numacpu": "99", "on-failure": "unpinned"}) == ("", "")
    allocation = world.allocation("a-app")
    assert allocation.kind is ContainerKind.UNPINNED
    assert not allocation.aligned
    assert "UnknownCPU" in allocation.reason


# --- Case 1 of the policies: ``numamem`` beside ``policy`` or ``cpus: exclusive`` ---------------


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("ties", [False, True])
def test_numamem_with_best_effort_owns_cpus_near_its_memory(strategy: Strategy, ties: bool) -> None:
    world = two_nodes(strategy=strategy, kubelet=KubeletRules(ties=ties))
    wishes = {"policy": "best-effort", "cpus": "exclusive", "numamem": "1"}
    cpus, mems = world.put("a", wishes, 2, 1)
    assert (CPUSet.parse(cpus) <= CPUSet.parse("4-7"), mems) == (True, "1")
    allocation = world.allocation("a-app")
    assert allocation.kind is ContainerKind.EXCLUSIVE
    assert allocation.exclusive
    assert allocation.aligned
    assert world.agent.current.state.allocated_on(1).memory == GIB
    assert "memory as listed: numamem 1" in world.steps("a-app")


def test_numamem_with_best_effort_takes_cpus_elsewhere_when_none_are_near(world: World) -> None:
    world.put("own", {"numacpu": "4-6", "cpus": "exclusive"}, 3, 1)
    cpus, mems = world.put("a", {"policy": "best-effort", "numamem": "1"}, 3, 1)
    assert (CPUSet.parse(cpus) <= CPUSet.parse("0-3"), mems) == (True, "1")
    assert not world.allocation("a-app").aligned


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_numamem_with_a_strict_policy_rejects_cpus_that_are_not_near(policy: str) -> None:
    world = two_nodes()
    assert world.put("a", {"policy": policy, "numamem": "1"}, 1.5, 1) == ("4-7", "1")
    world.put("own", {"numacpu": "4-5", "cpus": "exclusive"}, 2, 1)
    says(world.rejected("b", {"policy": policy, "numamem": "1"}, 3, 1), "TopologyAffinityError")
    assert world.put("c", {"policy": policy, "numamem": "0"}, 3, 1)[1] == "0"


def test_numamem_with_restricted_may_use_more_cpus_than_are_near_as_on_an_empty_machine() -> None:
    world = two_nodes()
    cpus, mems = world.put("a", {"policy": "restricted", "numamem": "1"}, 6, 1)
    assert len(CPUSet.parse(cpus)) == 6
    assert CPUSet.parse("4-7") <= CPUSet.parse(cpus)
    assert mems == "1"
    assert world.rejected("b", {"policy": "single-numa-node", "numamem": "1"}, 6, 1)  # fmt: skip


def test_numamem_with_exclusive_and_no_policy_prefers_cpus_near_it(world: World) -> None:
    cpus, mems = world.put("a", {"cpus": "exclusive", "numamem": "1"}, 2, 1, QoSClass.BURSTABLE)
    assert (CPUSet.parse(cpus) <= CPUSet.parse("4-7"), mems) == (True, "1")
    cpus, _ = world.put("b", {"cpus": "exclusive", "numamem": "1"}, 4, 1)
    assert len(CPUSet.parse(cpus) & CPUSet.parse("4-7")) == 2


def test_numamem_of_memory_without_cpus_puts_cpus_at_the_least_distance() -> None:
    topology = machines.dual_no_smt(
        cores_per_numa=4, memory_only_gib=[8], distances=[[10, 20, 30], [20, 10, 15], [30, 15, 10]]
    )
    world = World(topology)
    assert world.put("a", {"policy": "single-numa-node", "numamem": "2"}, 1.5, 1) == ("4-7", "2")
    assert world.allocation("a-app").numa_nodes == NUMASet([1])


def test_memory_of_one_kind_that_no_computed_pin_may_use_is_one_warning() -> None:
    world = World(machines.dual_smt_16(memory_only_gib=[8] * 4))
    placed = world.admit(pod("a", {"numamem": "0,2-5"}))
    (warning,) = placed.warnings
    assert warning.startswith("memory-only NUMA nodes 2-5, at distance 17 from the nearest CPUs, a")


def test_numamem_that_does_not_hold_the_memory_is_rejected_with_a_policy_too(world: World) -> None:
    assert (
        world.rejected("a", {"policy": "best-effort", "numamem": "1"}, 2, 20).reason
        == "NotEnoughMemory"
    )
    assert (
        world.rejected("b", {"policy": "best-effort", "numamem": "7"}, 2, 20).reason
        == "UnknownNUMANode"
    )


def test_numamem_of_one_container_must_be_where_its_pod_is() -> None:
    world = World(machines.dual_no_smt())
    of = pod("p", {"policy": "single-numa-node", "scope": "pod", "numamem.b": "1",
                   "numamem.c": "0"}, total=resources(4, 4))  # fmt: skip
    assert world.add(of, "a", 1, 1)[1] == "0"
    assert (
        "not near the memory of numamem 1"
        in world.reject(of, container(of, "b", resources(1, 1))).message
    )
    assert world.add(of, "c", 1, 1)[1] == "0"
