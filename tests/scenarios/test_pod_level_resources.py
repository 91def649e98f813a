"""Pods with resources of their own (KEP-2837): no more than the pod's sum is owned or allocated.

The kubelet gives a container without limits those of its pod, as its limits and its request.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.decision import Refused
from nri_numa.machine.synthetic import Numbering, synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUOrder, Settings
from nri_numa.model.workload import Resources
from tests.beds.world import GIB, World, container, pod, resources
from tests.machines import pods

NARROW = {"policy": "single-numa-node"}


def world() -> World:
    """CPUs 0-7 and 8-15, 16 GiB each."""
    return World(
        synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=16)
    )


def sums(of: World) -> tuple[int, int, int]:
    """CPUs that are owned, thousandths of a CPU and bytes that are allocated."""
    state = of.agent.state
    charges = state.charges.values()
    return len(state.owned), sum(c.cpu_milli for c in charges), sum(c.memory for c in charges)


@pytest.mark.parametrize("scope", ["container", "pod"])
def test_three_containers_without_resources_have_their_pods_once(scope: str) -> None:
    node = world()
    of = pod("p", {**NARROW, "scope": scope}, total=resources(4, 4))
    for name in "abc":
        node.add(of, name, 4, 4)
    assert sums(node) == (4, 4000, 4 * GIB)
    node.check()


def test_a_sum_that_shares_cannot_say_bounds_nothing() -> None:
    """Shares end at 256 CPUs."""
    node = world()
    of = pod("p", NARROW, total=Resources(cpu_shares=262_144))
    node.add(of, "a", 4, 4)
    node.add(of, "b", 4, 4)
    assert sums(node) == (8, 8000, 8 * GIB)
    node.check()


def test_a_container_without_resources_beside_one_with_some_has_the_rest() -> None:
    node = world()
    of = pod("p", NARROW, total=resources(4, 4))
    node.add(of, "a", 2, 1)
    node.add(of, "b", 4, 4)
    assert sums(node) == (2, 4000, 4 * GIB)
    node.check()


def test_one_that_asks_for_cpus_of_its_own_is_refused_what_its_pod_does_not_have() -> None:
    node = world()
    of = pod("p", {**NARROW, "cpus": "exclusive"}, total=resources(4, 4))
    node.add(of, "a", 2, 1)
    refused = node.refuse(of, container(of, "b", resources(4, 4)))
    assert refused.reason == "UnpaidCPUs"
    assert refused.message.startswith(
        "pod default/p, container b: cpu request is 2000m, expected 4000m, because exclusive CPUs "
        "must be paid for"
    )


def test_half_a_cpu_of_request_pays_for_no_whole_one() -> None:
    """A Guaranteed pod by its own resources; its container requests 500m and is limited to 1."""
    node = world()
    of = pod("p", NARROW, total=resources(4, 4))
    half = Resources(cpu_shares=512, cpu_quota=100_000, cpu_period=100_000, memory_limit=GIB)
    node.place(of, container(of, "a", half))
    assert sums(node)[:2] == (0, 500)


def test_a_pod_that_was_resized_before_the_runtime_knew_grows() -> None:
    node = world()
    of = pod("p", NARROW, total=resources(2, 2))
    node.add(of, "a", 2, 2)
    assert node.update("p-a", resources(3, 3)) is None
    assert sums(node) == (3, 3000, 3 * GIB)


def test_simulate_shows_the_pool_of_the_pod() -> None:
    sidecar = pods.container("proxy", {}, restartPolicy="Always")
    spec = {
        "resources": {"limits": {"cpu": 4, "memory": "4Gi"}},
        "initContainers": [pods.container("prepare", {}), sidecar],
        "containers": [
            pods.container("main", {"limits": {"cpu": 3, "memory": "1Gi"}}),
            pods.container("log", {}),
        ],
    }
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=16)
    result = pods.run(topology, pods.document("Pod", "p", spec, {**NARROW, "scope": "pod"}))
    (event,) = result.events
    found = {o.container: o.allocation for o in event.outcomes if o.allocation is not None}
    own = {name: len(one.cpus) for name, one in found.items()}
    assert own["main"] == 3
    assert own["log"] == 1
    assert found["main"].numa_nodes == found["log"].numa_nodes == found["proxy"].numa_nodes


def test_simulate_says_the_same() -> None:
    spec = {
        "resources": {"limits": {"cpu": 4, "memory": "4Gi"}},
        "containers": [pods.container(name, {}) for name in "ab"],
    }
    documents = [pods.document("Pod", f"p{i}", spec, NARROW) for i in range(6)]
    topology = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=4, threads=1, memory_gib=16)
    result = pods.run(topology, *documents, keep_going=True)
    verdicts = [outcome.verdict.value for outcome in pods.outcomes(result).values()]
    assert verdicts.count("refused") >= 4


@given(
    whole=st.integers(1, 6),
    own=st.lists(st.none() | st.integers(100, 2000), min_size=1, max_size=4),
    scope=st.sampled_from(["container", "pod"]),
    policy=st.sampled_from(["best-effort", "restricted", "single-numa-node"]),
    given_level=st.booleans(),
)
def test_no_pod_has_more_than_its_sum(
    whole: int, own: list[int | None], scope: str, policy: str, given_level: bool
) -> None:
    sizes = [s for s in own if s is not None]
    if given_level:
        total = max(1000 * whole, sum(sizes))
    else:
        own, total = [*sizes], sum(sizes)
    node = world()
    of = pod("p", {"policy": policy, "scope": scope}, total=resources(total / 1000, total / 1000))
    for number, size in enumerate(own):
        milli = total if size is None else size
        wants = resources(milli / 1000, milli / 1000)
        answer = node.create(of, container(of, f"c{number}", wants))
        assert not isinstance(answer, Refused), answer.message
        owned, milli, memory = sums(node)
        assert 1000 * owned <= milli <= total
        assert memory <= total * GIB // 1000
        node.check()
    before = node.agent.state
    node.synchronize()
    assert node.agent.state.allocations == before.allocations


BOTH = {**NARROW, "scope": "pod"}


def test_containers_without_cpus_of_their_own_share_what_others_leave() -> None:
    """As AllocatePod of the kubelet's static policy does, in the order of their start."""
    node = world()
    of = pod("p", BOTH, total=resources(6, 6))
    every = {}
    for name, wants in (
        ("sidecar", resources(6, 6)), ("main", resources(3, 2)), ("log", resources(6, 6)),
        ("second", resources(2, 1)),
    ):  # fmt: skip
        node.place(of, container(of, name, wants))
        node.check()
        every[name] = wants
    own = {name: CPUSet.parse(node.has(f"p-{name}")[0]) for name in every}
    assert {name: len(cpus) for name, cpus in own.items()} == {
        "sidecar": 1, "main": 3, "log": 1, "second": 2,
    }  # fmt: skip
    assert own["sidecar"] == own["log"]
    assert sums(node)[:2] == (6, 6000)
    assert len(node.topology.numa_of(node.agent.state.owned)) == 1, "aligned as one"
    before = node.agent.state
    node.synchronize()
    assert node.agent.state.allocations == before.allocations
    node.stop("p-main")
    node.place(of, container(of, "main", every["main"]))
    assert CPUSet.parse(node.has("p-main")[0]) == own["main"]
    assert CPUSet.parse(node.has("p-log")[0]) == own["log"]
    node.check()


def test_one_with_cpus_of_its_own_comes_first_and_the_pool_is_the_rest() -> None:
    node = world()
    of = pod("p", BOTH, total=resources(4, 4))
    node.add(of, "main", 3, 1)
    node.add(of, "log", 4, 4)
    assert node.has("p-log")[0] == "3"
    refused = node.create(of, container(of, "more", resources(1, 1)))
    assert not isinstance(refused, Refused)
    assert sums(node)[0] == 4, "the last CPU of those that share is nobody else's"
    node.check()


def test_a_pod_level_resize_changes_the_pool_for_all_who_share_it() -> None:
    node = world()
    of = pod("p", BOTH, total=resources(4, 4))
    for name, cpus in (("a", 4), ("main", 2), ("b", 4)):
        node.add(of, name, cpus, 4)
    for total, left in ((6, 4), (3, 1)):
        node.pods[of.id] = replace(of, resources=resources(total, 4))
        for name in "ab":
            node.update(f"p-{name}", resources(total, 4))
            node.check()
        own = {CPUSet.parse(node.has(f"p-{name}")[0]) for name in "ab"}
        assert [len(cpus) for cpus in own] == [left]
    assert len(CPUSet.parse(node.has("p-main")[0])) == 2


FLAT = synthetic(sockets=1, numa_per_socket=1, cores_per_numa=8, threads=1, memory_gib=16)
DUAL = synthetic(
    sockets=2, numa_per_socket=1, cores_per_numa=3, memory_gib=16, numbering=Numbering.ALTERNATING
)
INIT_SIDECAR = {"i1": "2,6,8", "s2:1": "6", "i3": "2,8", "c1:1": "2", "c2": "8"}
SHARED_SIDECAR = {"i1": "2,6,8", "s2": "2,8", "i3": "2,6,8", "c1:1": "6", "c2": "2,8"}


@pytest.mark.parametrize(
    ("topology", "total", "expected", "kubelets"),
    [  # TestStaticPolicyRestorePodAllocation
        (FLAT, 4, {"c1:2": "1-2", "c2:2": "3-4"}, {}),
        (FLAT, 3, {"c1:2": "1-2", "c2": "3"}, {}),
        (FLAT, 2, {"i1:2": "1-2", "c1:2": "1-2"}, {}),
        (FLAT, 4, {"s1:2": "1-2", "c1:2": "3-4"}, {}),
        (FLAT, 6, {"s1:2": "1-2", "s2:2": "3-4", "c1:2": "5-6"}, {}),
        (FLAT, 3, {"s1": "3", "c1:2": "1-2"}, {}),
        (FLAT, 4, {"s1:2": "1-2", "i1": "3-4", "c1:2": "3-4"}, {}),
        (FLAT, 2, {"i1:2": "1-2", "i2:2": "1-2", "c1:2": "1-2"}, {}),
        # TestStaticPolicyAllocatePod
        (DUAL, 1, {"c1": "6"}, {}),
        (DUAL, 3, {"c1:1": "6", "c2:1": "2", "c3": "8"}, {}),
        (DUAL, 3, INIT_SIDECAR, {}),
        (DUAL, 3, SHARED_SIDECAR, {}),
        # It takes whole cores for the pod first.
        (DUAL, 2, {"c1:1": "6"}, {"c1:1": "2"}),
        (
            DUAL,
            2,
            {"i1:1": "6", "i2:1": "6", "c1:1": "6", "c2:1": "2"},
            {"i1:1": "2", "i2:1": "2", "c1:1": "2", "c2:1": "8"},
        ),
        # EmptyPodSharedPoolError
        (DUAL, 2, {"c1:1": "6", "c2:1": "2", "c3": "0-1,3-5,7-11"}, {"": "refused"}),
    ],
)
def test_vectors_of_the_kubelets_unit_tests(
    topology: Topology, total: int, expected: dict[str, str], kubelets: dict[str, str]
) -> None:
    """``NAME:CPUS``, without a number one without resources; init containers end, sidecars stay."""
    settings = Settings(
        cpu_order=CPUOrder.KUBELET, kubelet_cpus=True, kubelet_ties=True, align_l3=False,
        static_cpus=True, reserved_cpus=CPUSet.parse("0"),
    )  # fmt: skip
    node = World(topology, settings)
    of = pod("p", {"policy": "restricted", "scope": "pod"}, total=resources(total, total))
    node.agent.run_pod(of)
    found, live = {}, []
    for key in expected:
        name, _, cpus = key.partition(":")
        node.add(of, name, int(cpus or total), 1)
        found[key] = node.has(f"p-{name}")[0]
        if name.startswith("i"):
            node.stop(f"p-{name}")
        else:
            live.append((key, f"p-{name}"))
    found |= {key: node.has(container_id)[0] for key, container_id in live}
    assert found == expected != kubelets
    node.check()
