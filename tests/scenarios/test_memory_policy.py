"""Containers that ask for a memory policy: set with the creation, on the memory nodes they get."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.explain.explanation import explain_allocation
from nri_numa.engine.explain.sentences import explanation_sentences
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.settings import KubeletRules, Rule
from nri_numa.model.workload import MemoryPolicies, MemoryPolicy, MemoryPolicySetting, PodSandbox
from nri_numa.nri.conversion import create_response
from nri_numa.nri.wire.pb import nri_pb2 as pb
from tests.beds.world import GIB, World, container, pod, resources, says, two_by_four, two_nodes

OLD = MemoryPolicies(dict.fromkeys(MemoryPolicy, "oldd 1.0 hands none on; expected oldd 2"))

usual = two_nodes


def without(policies: MemoryPolicies = OLD, **settings: object) -> World:
    """Two NUMA nodes, and a runtime that cannot set all memory policies."""
    world = two_nodes(**settings)
    world.agent.current.machine = world.agent.current.machine.with_memory_policies(policies)
    return world


def admitted(world: World, of: PodSandbox, cpus: float = 1, memory: float = 1) -> Admitted:
    answer = world.admit(of, wants=resources(cpus, memory))
    world.check()
    return answer


def given(
    world: World, annotations: Mapping[str, str], **more: float
) -> MemoryPolicySetting | None:
    return admitted(world, pod("a", annotations), **more).adjustment.memory_policy


LISTED = {"numamem": "0-1"}


@pytest.mark.parametrize(
    ("asks", "mode", "nodes"),
    [
        (LISTED, "local", ""),
        ({}, "local", ""),
        (LISTED, "preferred", "0"),
        ({**LISTED, "numacpu": "4-5"}, "preferred", "1"),  # beside its CPUs
        (LISTED, "preferred-many", "0-1"),
        (LISTED, "bind", "0-1"),
        (LISTED, "interleave", "0-1"),
        (LISTED, "weighted-interleave", "0-1"),
    ],
)
def test_its_nodes_are_those_of_the_container(asks: dict[str, str], mode: str, nodes: str) -> None:
    found = given(two_nodes(), {**asks, "mempolicy": mode})
    assert found == MemoryPolicySetting(MemoryPolicy(mode), NUMASet.parse(nodes))


@pytest.mark.parametrize("own", [{"mempolicy": "default"}, {"bind": "none"}, {"bind": "cpu"}])
def test_one_container_may_go_without(own: dict[str, str]) -> None:
    """The stronger level wins: one that opts out of pins has no memory policy either."""
    asks = {"policy": "restricted", "mempolicy": "bind"}
    assert given(two_nodes(), asks | {f"{key}.app": value for key, value in own.items()}) is None


def booked(world: World, name: str = "a-app") -> dict[int, float]:
    charges = world.allocation(name).charges
    return {i: charge.memory / GIB for i, charge in charges.items()}


def test_interleaved_memory_is_booked_as_it_is_used(world: World) -> None:
    """8 of 2 x 8 GiB were booked on NUMA node 0, and the next pod was put onto node 1."""
    asks = {"numamem": "0-1", "mempolicy": "interleave"}
    admitted(world, pod("a", asks), memory=10)
    assert booked(world) == {0: 5, 1: 5}
    assert world.update("a-app", resources(1, 12)) is None
    assert booked(world) == {0: 6, 1: 6}
    assert world.update("a-app", resources(1, 12 + 1 / 64)) is None
    rejected = world.rejected("b", {"policy": "single-numa-node"}, 1, 2)
    assert "2 GiB needed, at most 1.9 GiB free" in rejected.message  # was: 2 GiB free


def test_weighted_interleave_is_booked_by_the_kernels_weights() -> None:
    world = without(MemoryPolicies(weights={0: 3}))
    admitted(world, pod("a", {"numamem": "0-1", "mempolicy": "weighted-interleave"}), memory=8)
    assert booked(world) == {0: 6, 1: 2}
    # What a NUMA node has no room for comes from the other.
    admitted(world, pod("b", {"numamem": "0-1", "mempolicy": "interleave"}), memory=6)
    assert booked(world, "b-app") == {0: 2, 1: 4}


def test_interleaved_huge_pages_are_booked_page_by_page() -> None:
    world = World(two_by_four(hugepages={GIB: 4 * GIB}))
    of = pod("a", {"numamem": "0-1", "mempolicy": "interleave"})
    made = container(of, wants=resources(1, 1, hugepages={GIB: 3 * GIB}))
    assert isinstance(world.create(of, made), Admitted)
    charges = world.allocation(made.id).charges
    assert [c.hugepages for c in charges.values()] == [{GIB: 2 * GIB}, {GIB: GIB}]


def test_without_its_policy_memory_is_booked_node_by_node() -> None:
    world = without()
    asks = {"policy": "best-effort", "mempolicy": "interleave", "on-failure": "best-effort"}
    admitted(world, pod("a", asks), cpus=6, memory=6)
    assert (booked(world)[0], booked(world).get(1, 0)) == (6, 0)
    kubelets = two_nodes(kubelet=KubeletRules(memory=True))
    admitted(kubelets, pod("a", {"numamem": "0-1", "mempolicy": "interleave"}), memory=6)
    assert booked(kubelets) == {0: 6}


def test_computed_memory_nodes_count_as_listed_ones_do(world: World) -> None:
    answer = admitted(world, pod("a", {"policy": "single-numa-node", "mempolicy": "bind"}))
    where = answer.allocation.mems
    assert answer.adjustment.memory_policy == MemoryPolicySetting(MemoryPolicy.BIND, where)
    wide = admitted(world, pod("b", {"policy": "best-effort", "mempolicy": "interleave"}), cpus=6)
    assert wide.adjustment.memory_policy is not None
    assert str(wide.adjustment.memory_policy.nodes) == "0-1"


def test_who_does_not_ask_gets_the_answer_that_was_always_given() -> None:
    of = {"policy": "single-numa-node"}
    plain = admitted(two_nodes(), pod("a", of)).adjustment
    asked = admitted(two_nodes(), pod("a", {**of, "mempolicy": "default"})).adjustment
    assert create_response(plain) == create_response(asked)
    assert not create_response(plain).adjust.linux.HasField("memory_policy")


@pytest.mark.parametrize("mode", [mode for mode in MemoryPolicy if mode != "default"])
def test_the_runtime_is_told_the_kernels_mode(mode: MemoryPolicy) -> None:
    answer = admitted(two_nodes(), pod("a", {"numamem": "1", "mempolicy": mode.value}))
    told = create_response(answer.adjustment).adjust.linux.memory_policy
    assert pb.MpolMode.Name(told.mode) == f"MPOL_{mode.name}"
    assert told.nodes == ("1" if mode.needs_nodes else "")
    assert not told.flags


def test_the_explanation_says_it(world: World) -> None:
    admitted(world, pod("a", {"numamem": "0-1", "mempolicy": "interleave"}))
    text = told(world)
    assert "mempolicy: interleave" in text
    assert "its memory in turn from each of its NUMA nodes" in text
    assert "interleave on NUMA nodes 0-1, from its first instruction." in text


def told(world: World) -> str:
    """What is explained of the container, with as much as is known by now."""
    allocation, known = world.allocation("a-app"), world.history.explanation_of("a-app")
    return "\n".join(explanation_sentences(explain_allocation(allocation, known, "")))


SAID = "starts it with the memory policy interleave: its memory in turn from each of its"


def test_it_is_kept_over_a_restart_and_over_a_resize(world: World) -> None:
    """Nobody changes it while the container runs, so whoever looks later is told the same."""
    world.put("a", {"policy": "best-effort", "mempolicy": "interleave"}, 1, 1)
    assert SAID in told(world)
    world.restart()
    assert world.history.explanation_of("a-app") is None
    assert SAID in told(world)
    assert world.update("a-app", resources(2, 1)) is None
    assert SAID in told(world)


def test_who_went_without_is_not_said_to_have_one() -> None:
    world = without()
    asks = {"policy": "restricted", "mempolicy": "interleave", "on-failure": "best-effort"}
    admitted(world, pod("a", asks))
    assert "asked to start it" not in told(world)


@pytest.mark.parametrize(
    "more", [{}, {"policy": "best-effort"}, {"policy": "restricted", "on-failure": "reject"}]
)
def test_a_list_of_memory_nodes_is_no_excuse_to_go_without(more: dict[str, str]) -> None:
    asks = {"numamem": "0-1", "mempolicy": "interleave"}
    says(without().rejected("a", {**asks, **more}), "MemoryPolicyUnsupported")
    says(
        without().rejected("a", {**asks, **more, "on-failure": "best-effort"}), "InvalidAnnotation"
    )
    untouched = admitted(without(), pod("a", {**asks, **more, "on-failure": "unpinned"}))
    assert untouched.adjustment.memory_policy is None


# --- without memory nodes ---------------------------------------------------------------------


@pytest.mark.parametrize("asks", [{}, {"numacpu": "1"}])
def test_a_policy_on_nodes_needs_memory_nodes(asks: dict[str, str]) -> None:
    rejected = two_nodes().rejected("a", {**asks, "mempolicy": "bind"})
    assert rejected.reason == "MemoryPolicyNeedsNodes"
    assert "mempolicy is 'bind' (annotation numa.kubernetes.io/mempolicy)" in rejected.message
    assert "expected numamem, or a policy that pins its memory" in rejected.message


def test_a_rule_or_a_default_stops_nobody_who_is_not_pinned() -> None:
    rule = Rule(values={"mempolicy": "bind"})
    for world in (two_nodes(rules=(rule,)), two_nodes(defaults={"mempolicy": "bind"})):
        answer = admitted(world, pod("a"))
        assert answer.adjustment.memory_policy is None
        assert answer.trace.decision_steps[-1] == (
            "mempolicy: bind has no effect: nothing pins the memory of the container"
        )
        pinned = admitted(world, pod("b", {"policy": "single-numa-node"}))
        assert pinned.adjustment.memory_policy is not None


@pytest.mark.parametrize("bind", ["none", "cpu"])
def test_it_contradicts_memory_that_is_left_alone(bind: str) -> None:
    rejected = two_nodes().rejected("a", {"bind": bind, "mempolicy": "local"})
    assert rejected.reason == "InvalidAnnotation"
    assert "expected no mempolicy 'local'" in rejected.message or "expected no bind" in (
        rejected.message
    )


def test_what_others_pin_is_left_to_them(world: World) -> None:
    answer = world.admit(pod("a", {"mempolicy": "bind"}), wants=replace(resources(1), cpus="3"))
    assert answer.adjustment.memory_policy is None
    assert (
        "mempolicy: bind has no effect: another program pins the container"
        in answer.trace.decision_steps
    )


# --- who cannot set one -----------------------------------------------------------------------


def test_a_runtime_without_it_rejects_with_what_is_needed() -> None:
    world = without()
    rejected = world.rejected("a", {"policy": "restricted", "mempolicy": "bind"})
    assert rejected.reason == "MemoryPolicyUnsupported"
    assert rejected.message == (
        "pod default/a, container app: mempolicy is 'bind' "
        "(annotation numa.kubernetes.io/mempolicy), but oldd 1.0 hands none on; expected oldd 2"
    )
    # Who asks for none, or for the kernel's own, is not concerned.
    admitted(world, pod("b", {"policy": "restricted"}))
    admitted(world, pod("c", {"policy": "restricted", "mempolicy": "default"}))


def test_on_failure_widen_goes_without_it_and_says_so() -> None:
    world = without()
    asks = {"policy": "restricted", "mempolicy": "bind", "on-failure": "best-effort"}
    answer = admitted(world, pod("a", asks))
    assert answer.allocation.mems
    assert answer.adjustment.memory_policy is None
    assert answer.warnings == ("mempolicy: bind has no effect: oldd 1.0 hands none on",)


def test_best_effort_widens_unless_told_otherwise() -> None:
    world = without()
    assert admitted(world, pod("a", {"policy": "best-effort", "mempolicy": "bind"})).warnings
    asks = {"policy": "best-effort", "mempolicy": "bind", "on-failure": "reject"}
    assert world.rejected("b", asks).reason == "MemoryPolicyUnsupported"


def test_a_single_policy_can_be_missing() -> None:
    weighted = MemoryPolicies({MemoryPolicy.WEIGHTED_INTERLEAVE: "Linux 6.1 does not have it; no"})
    world = without(weighted)
    assert world.rejected("a", {"numamem": "0", "mempolicy": "weighted-interleave"}).reason == (
        "MemoryPolicyUnsupported"
    )
    assert given(world, {"numamem": "0", "mempolicy": "interleave"}) is not None


def test_new_settings_do_not_forget_what_the_runtime_can_set() -> None:
    world = without()
    machine = replace(world.agent.current.machine, memory_policies=MemoryPolicies())
    world.apply(world.agent.apply_node_model(machine))
    assert isinstance(
        world.create(pod("a", {"numamem": "0", "mempolicy": "bind"}), container(pod("a"))), Rejected
    )


# --- what runs already ------------------------------------------------------------------------


def test_a_container_that_runs_already_is_pinned_without_it() -> None:
    world = without()
    world.meet(pod("a", {"policy": "restricted", "mempolicy": "bind"}), wants=resources(1, 1))
    world.synchronize()
    assert world.has("a-app")[1]
    assert "mempolicy: bind has no effect: the container runs already" in world.steps("a-app")
