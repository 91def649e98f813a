"""Pods with resources of their own (KEP-2837), and with a list for all of their containers.

No more than the pod's sum is owned or allocated. The kubelet gives a container without limits those
of its pod, as its limits and its request.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.decision import Rejected
from nri_numa.machine.synthetic import Numbering
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import (
    CPUAmount,
    CPUWithholdingQuota,
    KubeletRules,
    NamespacePatternQuota,
    QuotasAndPoolFloor,
    Settings,
)
from nri_numa.model.workload import PodSandbox, QoSClass, Resources
from tests.beds.world import GIB, PREFIX, World, container, pod, resources, says
from tests.machines import named as machines
from tests.machines import pods

NARROW = {"policy": "single-numa-node"}


def sums(of: World) -> tuple[int, int, int]:
    """CPUs that are owned, thousandths of a CPU and bytes that are allocated."""
    state = of.agent.current.state
    charges = state.charges.values()
    return len(state.exclusive), sum(c.cpu_milli for c in charges), sum(c.memory for c in charges)


@pytest.mark.parametrize("scope", ["container", "pod"])
def test_three_containers_without_resources_have_their_pods_once(node: World, scope: str) -> None:
    of = pod("p", {**NARROW, "scope": scope}, total=resources(4, 4))
    for name in "abc":
        node.add(of, name, 4, 4)
    assert sums(node) == (4, 4000, 4 * GIB)


def test_a_sum_that_shares_cannot_say_bounds_nothing(node: World) -> None:
    """Shares end at 256 CPUs."""
    of = pod("p", NARROW, total=Resources(cpu_shares=262_144))
    node.add(of, "a", 4, 4)
    node.add(of, "b", 4, 4)
    assert sums(node) == (8, 8000, 8 * GIB)


def test_a_container_without_resources_beside_one_with_some_has_the_rest(node: World) -> None:
    of = pod("p", NARROW, total=resources(4, 4))
    node.add(of, "a", 2, 1)
    node.add(of, "b", 4, 4)
    assert sums(node) == (2, 4000, 4 * GIB)


def test_one_that_asks_for_cpus_of_its_own_is_rejected_what_its_pod_does_not_have() -> None:
    node = World(machines.dual_no_smt())
    of = pod("p", {**NARROW, "cpus.b": "exclusive"}, total=resources(4, 4))
    node.add(of, "a", 2, 1)
    rejected = node.reject(of, container(of, "b", resources(4, 4)))
    assert rejected.reason == "CPUsNotRequested"
    assert rejected.message.startswith(
        "pod default/p, container b: cpu request is 2 CPUs, expected 4 CPUs, or a permission with "
        "allowUnrequestedCPUs"
    )


def test_half_a_cpu_of_request_pays_for_no_whole_one(node: World) -> None:
    """A Guaranteed pod by its own resources; its container requests 500m and is limited to 1."""
    of = pod("p", NARROW, total=resources(4, 4))
    half = Resources(cpu_shares=512, cpu_quota=100_000, cpu_period=100_000, memory_limit=GIB)
    node.place(of, container(of, "a", half))
    assert sums(node)[:2] == (0, 500)


def test_a_pod_that_was_resized_before_the_runtime_knew_grows(node: World) -> None:
    node.add(pod("p", NARROW, total=resources(2, 2)), "a", 2, 2)
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
    topology = machines.dual_no_smt()
    result = pods.run(topology, pods.document("Pod", "p", spec, {**NARROW, "scope": "pod"}))
    (event,) = result.events
    found = {o.container: o.allocation for o in event.outcomes if o.allocation is not None}
    own = {name: len(one.cpus) for name, one in found.items()}
    assert own["main"] == 3
    assert own["log"] == 1
    assert found["main"].numa_nodes == found["log"].numa_nodes == found["proxy"].numa_nodes


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
    node = World(machines.dual_no_smt())
    of = pod("p", {"policy": policy, "scope": scope}, total=resources(total / 1000, total / 1000))
    for number, size in enumerate(own):
        milli = total if size is None else size
        wants = resources(milli / 1000, milli / 1000)
        answer = node.create(of, container(of, f"c{number}", wants))
        assert not isinstance(answer, Rejected), answer.message
        owned, milli, memory = sums(node)
        assert 1000 * owned <= milli <= total
        assert memory <= total * GIB // 1000
        node.check()
    before = node.agent.current.state
    node.synchronize()
    assert node.agent.current.state.allocations == before.allocations


BOTH = {**NARROW, "scope": "pod"}


def test_containers_without_cpus_of_their_own_share_what_others_leave(node: World) -> None:
    """As AllocatePod of the kubelet's static policy does, in the order of their start."""
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
    assert len(node.topology.numa_of(node.agent.current.state.exclusive)) == 1, "aligned as one"
    before = node.agent.current.state
    node.synchronize()
    assert node.agent.current.state.allocations == before.allocations
    node.stop("p-main")
    node.place(of, container(of, "main", every["main"]))
    assert CPUSet.parse(node.has("p-main")[0]) == own["main"]
    assert CPUSet.parse(node.has("p-log")[0]) == own["log"]


def test_one_with_cpus_of_its_own_comes_first_and_the_pool_is_the_rest(node: World) -> None:
    of = pod("p", BOTH, total=resources(4, 4))
    node.add(of, "main", 3, 1)
    node.add(of, "log", 4, 4)
    assert node.has("p-log")[0] == "3"
    rejected = node.create(of, container(of, "more", resources(1, 1)))
    assert not isinstance(rejected, Rejected)
    assert sums(node)[0] == 4, "the last CPU of those that share is nobody else's"


def test_a_pod_level_resize_changes_the_pool_for_all_who_share_it(node: World) -> None:
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


FLAT = machines.single_no_smt(cores_per_numa=8)
DUAL = machines.dual_smt(cores_per_numa=3, memory_gib=16, numbering=Numbering.ALTERNATING)

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
        kubelet=KubeletRules(cpu_order=True, cpus=True, ties=True, static_cpus=True),
        align_l3=False,
        reserved_cpus=CPUSet.parse("0"),
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


LIST = {"numacpu": "2-5", "cpus": "exclusive"}
KEEP = Settings(reservation_seconds=600.0)


def usual(settings: Settings = KEEP) -> World:
    """Two NUMA nodes of 8 CPUs, every CPU a core, and a pod that asks for nothing."""
    world = World(machines.dual_no_smt(), settings)
    world.put("plain", qos=QoSClass.BEST_EFFORT)
    return world


def two(world: World, annotations: dict[str, str] = LIST) -> PodSandbox:
    """A pod of two containers with two CPUs each, both created."""
    of = pod("db", annotations, total=resources(4, 2))
    for name in ("main", "log"):
        assert world.add(of, name, 2, 1) == ("2-5", "")
        world.check()
    return of


def test_two_containers_share_the_list_and_nobody_else_does(world: World) -> None:
    two(world)
    state = world.agent.current.state
    assert str(state.exclusive) == "2-5"
    assert sum(c.cpu_milli for c in state.charges.values()) == 4000, "counted once"
    assert world.has("plain-app")[0] == "0-1,6-15"
    says(
        world.rejected("other", {"numacpu": "5"}),
        "CPUExclusive",
        "default/db/log and default/db/main",
    )


def test_each_stays_within_its_own_limit() -> None:
    world = usual(replace(KEEP, disable_cfs_quota=True))
    of = pod("db", LIST, total=resources(5))
    for name, cpus in (("main", 4), ("log", 1)):
        world.add(of, name, cpus)
    assert world.live["db-main"].resources.cpu_quota == -1
    assert world.live["db-log"].resources.cpu_quota == 100_000
    assert world.update("db-log", resources(2)) is None
    assert world.live["db-log"].resources.cpu_quota == 200_000


def test_one_that_ends_takes_nothing_from_the_other(world: World) -> None:
    of = two(world)
    assert world.stop("db-log") == ()
    world.check()
    assert str(world.agent.current.state.exclusive) == "2-5"
    assert not world.agent.current.state.reservations_of(of.uid), "the other one has them"
    assert world.add(of, "log", 2, 1) == ("2-5", "")
    world.check()
    world.stop("db-main")
    world.stop("db-log")
    assert [str(a.cpus) for a in world.agent.current.state.reservations_of(of.uid)] == ["2-5"]
    assert sum(c.cpu_milli for c in world.agent.current.state.charges.values()) == 4000
    world.check()
    for name in ("log", "main"):
        assert world.add(of, name, 2, 1) == ("2-5", "")
        world.check()
    world.stop("db-main")
    world.stop("db-log")
    world.remove_pod(of)
    assert not world.agent.current.state.exclusive
    assert not any(c.cpu_milli for c in world.agent.current.state.charges.values())


@pytest.mark.parametrize("lost", ["nothing", "checkpoint", "checkpoint and key"])
def test_both_are_known_again_after_a_restart(world: World, lost: str) -> None:
    two(world)
    before = world.agent.current.state
    key = b"another key" if lost == "checkpoint and key" else None
    assert world.restart(lost=lost != "nothing", key=key) == ()
    world.check()
    after = world.agent.current.state
    assert (after.exclusive, after.charges) == (before.exclusive, before.charges)


def test_both_are_found_where_neither_was_seen_to_start(world: World) -> None:
    of = pod("db", LIST, total=resources(4, 2))
    for name in ("main", "log"):
        made = container(of, name, resources(2, 1))
        world.pods[of.id], world.live[made.id] = of, made
    world.synchronize()
    world.check()
    assert [world.has(i)[0] for i in ("db-main", "db-log")] == ["2-5", "2-5"]
    assert sum(c.cpu_milli for c in world.agent.current.state.charges.values()) == 4000


@pytest.mark.parametrize(
    "annotations",
    [
        {**LIST, "numacpu.log": "2-5"},
        {**LIST, "numacpu.main": "2-5"},
        {**LIST, "numacpu.log": "2-3"},
        {"numacpu": "2-5", "cpus.main": "exclusive"},
    ],
)
def test_a_list_of_one_container_is_its_own(world: World, annotations: dict[str, str]) -> None:
    of = pod("db", annotations, total=resources(8))
    world.add(of, "main", 4)
    says(world.reject(of, container(of, "log", resources(4))), "CPUExclusive", "default/db/main")


def test_requests_of_the_whole_pod_pay_for_its_list(world: World) -> None:
    """A small container may be the first, or the only one with the list so far."""
    of = pod("db", LIST, qos=QoSClass.BURSTABLE, total=resources(4.1))
    for name, cpus in (("init", 0.1), ("main", 4.0)):
        assert world.add(of, name, cpus) == ("2-5", "")
    world.check()
    poor = pod("poor", {"numacpu": "8-11", "cpus": "exclusive"}, total=resources(3))
    rejected = world.reject(poor, container(poor, "main", resources(2)))
    says(rejected, "CPUsNotRequested", "its pod requests 3 of 4 CPUs")


def test_what_others_of_the_pod_have_does_not_pay_for_its_list(world: World) -> None:
    of = pod("db", {**LIST, "numacpu.other": "6-7"}, total=resources(5))
    world.add(of, "other", 2)
    says(world.reject(of, container(of, "main", resources(3))), "CPUsNotRequested")


def test_where_the_sum_is_not_told_one_of_them_pays(world: World) -> None:
    of = pod("db", LIST)
    says(world.reject(of, container(of, "log", resources(1))), "CPUsNotRequested")
    world.add(of, "main", 4)
    assert world.add(of, "log", 1) == ("2-5", "")
    assert world.update("db-log", resources(2)) is None


def test_a_resize_keeps_the_list_while_the_pod_pays_for_it(world: World) -> None:
    two(world)
    assert world.update("db-log", resources(3, 2)) is None
    world.check()
    assert world.update("db-log", resources(2, 2)) is None
    says(world.update_rejected("db-log", resources(1, 2)), "CPUsNotRequested")
    world.check()
    assert sum(c.cpu_milli for c in world.agent.current.state.charges.values()) == 4000


def test_a_quota_counts_the_list_once() -> None:
    quota = NamespacePatternQuota(
        name="quotas.namespaces[0]",
        namespaces=("default",),
        quota=CPUWithholdingQuota(exclusive=CPUAmount(6)),
    )
    world = usual(replace(KEEP, limits=QuotasAndPoolFloor(namespaces=(quota,))))
    two(world)
    of = pod("own", {"cpus": "exclusive"})
    world.add(of, "main", 2)
    world.check()
    of = pod("more", {"cpus": "exclusive"})
    assert world.reject(of, container(of, "main", resources(1))).reason == "QuotaExceeded"


def test_a_third_container_has_what_the_pod_has_left(world: World) -> None:
    of = pod("db", {**LIST, "numacpu.own": "8", "cpus.own": "exclusive"}, total=resources(5))
    for name, cpus in (("main", 2), ("log", 2)):
        world.add(of, name, cpus)
    assert world.add(of, "own", 1) == ("8", "")


def test_the_prefix_of_crio_gives_a_list_for_the_pod_too(world: World) -> None:
    domain = PREFIX.removesuffix("/")
    of = pod("db", {"cpus": "exclusive"}, total=resources(4))
    of = replace(of, annotations={**of.annotations, f"numacpu.{domain}/pod": "2-5"})
    for name in ("main", "log"):
        assert world.add(of, name, 2) == ("2-5", "")


@pytest.fixture
def node() -> World:
    """CPUs 0-7 and 8-15, 16 GiB each."""
    return World(machines.dual_no_smt())
