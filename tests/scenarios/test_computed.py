"""Computed assignments: policies, strategies, accounting, siblings, the degrade ladder."""

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.accounting import max_exclusive_by_node, total_free_exclusive
from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.request.annotations import (
    MAX_SCHEDULED_NODES_CHARS,
    format_scheduled_nodes,
    parse_scheduled_nodes,
    scheduled_nodes,
)
from nri_numa.engine.state import ContainerKind
from nri_numa.machine.synthetic import build_synthetic_topology
from nri_numa.model.cpuset import NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import (
    CPUAmount,
    IsolatedCPUs,
    KubeletRules,
    QuotasAndPoolFloor,
    Rule,
    Settings,
)
from nri_numa.model.workload import Device, DeviceRequest, QoSClass, Resources, Strategy
from tests.beds.world import (
    GIB,
    OWN,
    PREFIX,
    SINGLE,
    World,
    container,
    pod,
    resources,
    says,
    two_by_four,
    two_nodes,
)
from tests.machines import named as machines

GUARANTEED, BURSTABLE = QoSClass.GUARANTEED, QoSClass.BURSTABLE

usual = partial(World, machines.dual_smt())


@pytest.mark.parametrize("policy", ["restricted", "best-effort"])
def test_restricted_goes_by_the_neediest_resource(world: World, policy: str) -> None:
    """CPUs need two NUMA nodes, memory and a device one each: two are no wider than needed."""
    device = DeviceRequest(
        resource="gpu", count=1, devices=(Device(id="g0", numa_nodes=frozenset([1])),)
    )
    of = pod("wide", {"policy": policy})
    made = replace(container(of, wants=resources(40, 1)), devices=(device,))
    assert world.place(of, made)[1] == "0-1"
    (allocation,) = world.agent.current.state.allocations.values()
    assert allocation.aligned


def test_the_kubelets_verdict_stays_behind_its_setting() -> None:
    world = World(machines.dual_smt(), Settings(kubelet=KubeletRules(memory=True)))
    message = world.rejected("wide", {"policy": "restricted"}, 40, 1).message
    assert (
        "requires the same number of NUMA nodes for all, as the kubelet's does "
        "(kubeletCompatibility: "
        "memory)" in message
    )
    world.put("none", {"numamem": "0"}, 0.5, 0)  # without memory it is in no group
    world.put("even", {"policy": "restricted"}, 40, 100)


def test_unpinned_starts_untouched(world: World) -> None:
    assert world.put("a", {**SINGLE, "on-failure": "unpinned"}, 65, 1) == ("", "")
    assert "TopologyAffinityError" in world.allocation("a-app").reason


@pytest.mark.parametrize(
    ("machine", "taken", "wanted", "fitting"),
    [
        (machines.dual_smt_16, 0, 5, (4, 6)),
        (machines.dual_smt_16, 10, 5, (4,)),  # the pool keeps one CPU
        (machines.dual_smt_16, 8, 5, (4, 6)),
        (machines.dual_smt_16, 0, 1, (2,)),
        (machines.dual_smt_16, 14, 1, ()),
        (machines.hybrid, 0, 25, ()),
    ],
)
def test_a_rejection_for_whole_cores_names_what_would_fit(
    machine: Callable[[], Topology], taken: int, wanted: int, fitting: tuple[int, ...]
) -> None:
    wishes = {"cpus": "exclusive", "smt": "full-core"}
    world = World(machine(), Settings(limits=QuotasAndPoolFloor(pool=CPUAmount(1))))
    if taken:
        world.put("taken", wishes, taken)
    rejected = world.rejected("a", wishes, wanted)
    named = re.search(r"so ([\d or]+) would fit", rejected.message)
    assert tuple(map(int, named[1].split(" or ") if named else ())) == fitting, rejected.message
    for number in fitting:
        world.place(pod(f"b{number}", wishes), wants=resources(number))
        world.stop(f"b{number}-app")


@given(st.sets(st.integers(0, 19), max_size=18), st.integers(1, 6), st.booleans())
@example({16, 17}, 1, True)
def test_whole_cores_are_of_the_fitting_numa_node(listed: set[int], count: int, pack: bool) -> None:
    """On hybrid cores, though another has more CPUs: cores of two threads never make one CPU."""
    topology = machines.dual_smt_16(efficient_cores_per_numa=2)
    world = World(topology, Settings(strategy=Strategy.PACK if pack else Strategy.SPREAD))
    if listed:
        world.put("listed", {"numacpu": str(CPUSet(listed)), "cpus": "exclusive"}, len(listed))
    of = pod("a", SINGLE | {"cpus": "exclusive", "smt": "full-core"})
    answer = world.create(of, container(of, wants=resources(count)))
    cores: dict[int, list[int]] = {0: [], 1: []}
    for core in topology.cores.values():
        if not core.cpus & CPUSet(listed):
            cores[core.numa_node].append(len(core.cpus))
    fits = any(
        sum(some) == count
        for sizes in cores.values()
        for size in range(len(sizes) + 1)
        for some in combinations(sizes, size)
    )
    assert isinstance(answer, Admitted) is (fits and len(listed) + count < 20)


@pytest.mark.parametrize(
    ("asks", "cpus"),
    [
        ({}, "4-7"),
        ({"cpus": "exclusive"}, "4-5"),
        ({"policy": "single-numa-node"}, "4-5"),
        ({"numacpu": "0"}, "0"),
    ],
)
def test_numamem_with_bind_cpu_names_numa_nodes_for_cpus(asks: dict[str, str], cpus: str) -> None:
    """Its memory, more than NUMA node 1 has, is left alone."""
    world = two_nodes()
    assert world.put("a", {"bind": "cpu", "numamem": "1"} | asks, 2, 20) == (cpus, "")
    says(world.rejected("b", {"bind": "cpu", "numamem": "7"}), "UnknownNUMANode", "numamem is '7'")
    world.restart(lost=True)
    assert world.has("a-app") == (cpus, "")


def test_a_default_of_bind_cpu_takes_no_pin_of_memory() -> None:
    world = two_nodes(defaults={"bind": "cpu"})
    assert world.put("a", {"numamem": "1"}, 0.5, 1)[1] == "1"


def test_isolate_keeps_siblings_idle_and_out_of_every_pool() -> None:
    world = World(machines.single_smt())
    world.put("plain", {}, qos=BURSTABLE)
    cpus = CPUSet.parse(world.put("a", {"cpus": "exclusive", "smt": "isolate"}, 2)[0])
    siblings = world.topology.siblings_of(cpus)
    assert len(siblings) == 4
    assert world.cpus("plain-app") == world.topology.online - siblings
    assert world.rejected("b", {"numacpu": str(siblings - cpus)}).reason == "CPUExclusive"
    world.stop("a-app")
    assert world.cpus("plain-app") == world.topology.online


def test_hugepages_decide_the_node() -> None:
    topology = machines.dual_smt_16(hugepages={2 << 20: 512 << 20})
    world = World(
        topology, reading=MeasuredFree(hugepages={0: {2 << 20: 0}, 1: {2 << 20: 512 << 20}})
    )
    assert world.put("a", SINGLE, 1.5, 1, pages={2 << 20: 256 << 20})[1] == "1"
    says(world.rejected("b", SINGLE, 1.5, 1, pages={2 << 20: 300 << 20}), "", "huge pages")


def test_pod_totals_without_quota_count_by_shares() -> None:
    world = World(machines.dual_smt())
    total = Resources(cpu_shares=40 * 1024, hugepages={2 << 20: 1 << 30})
    of = pod("a", {**SINGLE, "scope": "pod"}, qos=BURSTABLE, total=total)
    says(world.reject(of, container(of, "one", resources(0.5))), "", "40 CPUs")


def test_the_assigned_annotation_and_environment_tell_the_container() -> None:
    world = World(machines.dual_smt())
    answer = world.admit(pod("a", SINGLE), wants=resources(2, 1))
    cpus, mems = world.has("a-app")
    assert answer.adjustment.env == {"NUMA_CPUS": cpus, "NUMA_MEMS": mems}
    document = json.loads(answer.adjustment.annotations["numa.kubernetes.io/assigned"])
    assert document["cpus"] == cpus
    assert document["mems"] == mems
    assert document["policy"] == "single-numa-node"
    assert document["reason"]


def test_the_quota_is_lifted_for_owners_only(world: World) -> None:
    world.put("own", SINGLE, 2, 1)
    world.put("shared", SINGLE, 1.5, 1)
    assert world.live["own-app"].resources.cpu_quota == -1
    assert world.live["shared-app"].resources.cpu_quota == 150_000
    kept = World(machines.dual_smt(), Settings(disable_cfs_quota=False))
    kept.put("own", SINGLE, 2, 1)
    assert kept.live["own-app"].resources.cpu_quota == 200_000


def test_observe_decides_and_changes_nothing() -> None:
    world = World(machines.dual_smt(), observe=True)
    assert world.put("a", SINGLE, 2, 1) == ("", "")
    assert world.allocation("a-app").kind is ContainerKind.EXCLUSIVE
    assert world.put("b", {"numacpu": "99"}) == ("", "")
    assert world.history.rejections[-1].reason == "UnknownCPU"
    assert world.stop("a-app") == ()
    assert world.synchronize() == ()


def test_a_rejection_on_a_large_machine_stays_readable() -> None:
    world = World(build_synthetic_topology(sockets=4, numa_per_socket=4, cores_per_numa=2))
    rejected = world.rejected("a", SINGLE, 400, 1)
    assert "and 8 more NUMA nodes" in rejected.message
    assert len(rejected.message) < 1000


def test_best_effort_with_too_much_cpu_and_memory_of_only_a_tier_runs_where_cpus_are() -> None:
    topology = machines.single_smt(cores_per_numa=2, memory_gib=4, memory_only_gib=[64])
    tier = topology.memory_nodes - topology.cpu_nodes
    world = World(topology, Settings(memory_only_numa_nodes=tier))
    cpus, mems = world.put("a", {"policy": "best-effort"}, 40.5, 60, BURSTABLE)
    assert cpus == "0-3"
    assert NUMASet.parse(mems) >= tier


def test_a_machine_whose_numa_nodes_have_no_cpus_runs_everything_unpinned() -> None:
    topology = machines.single_no_smt()
    nodes = {i: replace(n, cpus=CPUSet()) for i, n in topology.numa_nodes.items()}
    cpus = {i: replace(c, numa_node=None) for i, c in topology.cpus.items()}
    world = World(replace(topology, numa_nodes=nodes, cpus=cpus))
    assert world.put("a", {"policy": "best-effort"}, 1.5, qos=BURSTABLE) == ("", "")
    world.put("own", {"cpus": "exclusive"}, 2)
    says(world.update_rejected("own-app", resources(3)), "", "0 free for", "on no NUMA node for it")


@pytest.mark.parametrize(
    ("cores", "cpus", "each"), [(8, 18, [9, 9]), (8, 24, [12, 12]), (14, 40, [20, 20])]
)
def test_distributed_cpus_are_even_on_numa_nodes(cores: int, cpus: int, each: list[int]) -> None:
    """Whatever becomes of siblings: it was 10 and 8, 16 and 8, 26 and 14."""
    topology = machines.dual_smt(cores_per_numa=cores, memory_gib=16)
    for smt in ("spread", "any", "pair", "full-core") if cpus % 4 == 0 else ("spread", "any"):
        world = World(topology, Settings(kubelet=KubeletRules(distribute_cpus_across_numa=True)))
        owned = CPUSet.parse(world.put("a", {"cpus": "exclusive", "smt": smt}, cpus)[0])
        assert [len(owned & n.cpus) for n in topology.numa_nodes.values()] == each, smt


@pytest.mark.parametrize(
    ("strategy", "mems"),
    [(Strategy.SPREAD, "1313"), (Strategy.MOST_MEMORY, "1313"), (Strategy.PACK, "1111")],
)
def test_no_requests_means_no_numa_node_without_memory(strategy: Strategy, mems: str) -> None:
    """What the kernel has free counts, since nothing of it was requested: 5 %, at least 1 GiB."""
    for memory_gib, free in (
        (64, {0: 195 << 20, 1: 64 * GIB, 2: 3 * GIB, 3: 4 * GIB}),
        (8, {0: 600 << 20, 1: 8 * GIB, 2: 1000 << 20, 3: 1 * GIB}),
    ):
        topology = machines.snc_no_smt(memory_gib=memory_gib)
        world = World(topology, Settings(strategy=strategy), reading=MeasuredFree(memory=free))
        policy = {"policy": "best-effort"}
        places = [world.put(f"p{n}", policy, qos=QoSClass.BEST_EFFORT)[1] for n in range(4)]
        assert "".join(places) == mems


# --- Cases 2 and 3 of the policies: strict means strict at every step, and in scope ``pod`` too -


TOGETHER = {"policy": "single-numa-node", "scope": "pod"}
PAGES = {GIB: 2 * GIB}


def test_huge_pages_of_two_numa_nodes_are_withheld_on_each_as_far_as_they_may_be_taken() -> None:
    """The kernel takes them where they are touched first: two to four on each."""
    world = World(two_by_four(hugepages={GIB: 4 * GIB}))
    of, pages = pod("wide", {"policy": "best-effort"}), {GIB: 6 * GIB}
    admitted = world.admit(of, wants=resources(1, 1, hugepages=pages))
    free = world.agent.current.desired.free_hugepages(GIB)
    assert free == {0: 0, 1: 0}
    assert any("the kernel chooses" in step for step in admitted.trace.decision_steps)
    more = world.rejected("more", SINGLE, 1, 1, pages={GIB: 2 * GIB})
    assert "hugepages-1Gi: 2 GiB needed, 0 B free" in more.message
    assert world.update("wide-app", resources(1, 2)) is None
    world.stop("wide-app")
    world.put("more", SINGLE, 1, 1, pages={GIB: 4 * GIB})


@pytest.mark.parametrize("policy", ["restricted", "single-numa-node"])
def test_huge_pages_do_not_spill_in_scope_pod(policy: str) -> None:
    """Two containers of 2 GiB in pages of 1 GiB, 2 GiB of such pages on each NUMA node."""
    world = two_nodes(pages=PAGES)
    of = pod("p", {**TOGETHER, "policy": policy})
    assert world.place(of, container(of, "a", resources(1, 1, hugepages=PAGES)))[1] == "0"
    rejected = world.reject(of, container(of, "b", resources(1, 1, hugepages=PAGES)))
    assert rejected.reason == "NotEnoughMemory"
    assert rejected.message == (
        "pod default/p, container b: hugepages-1Gi: 2 GiB needed, 0 B free on NUMA node 0 "
        f"(policy {policy}); free: NUMA node 0: 3 CPUs for exclusive use, 5 GiB memory, 0 B in "
        "huge pages of 1 GiB; NUMA node 1: 4 CPUs for exclusive use, 6 GiB memory, "
        "2 GiB in huge pages of 1 GiB"
    )
    # One that can do with them may follow.
    assert world.add(of, "c", 1, 1)[1] == "0"


def test_memory_does_not_spill_when_the_pods_sum_is_unknown() -> None:
    world = two_nodes()
    of = pod("p", TOGETHER)
    assert world.add(of, "a", 1, 5)[1] == "0"
    rejected = world.reject(of, container(of, "b", resources(1, 5)))
    assert "memory: 5 GiB needed, 3 GiB free on NUMA node 0" in rejected.message


def test_memory_does_not_spill_when_the_kernel_has_less_than_before() -> None:
    world = two_nodes(MeasuredFree(memory={0: 8 * GIB, 1: 8 * GIB}))
    of = pod("p", TOGETHER, total=resources(2, 6))
    assert world.add(of, "a", 1, 3)[1] == "0"
    world.reading = MeasuredFree(memory={0: 2 * GIB, 1: 8 * GIB})
    assert world.reject(of, container(of, "b", resources(1, 3))).reason == "NotEnoughMemory"
    world.reading = MeasuredFree(memory={0: 4 * GIB, 1: 8 * GIB})
    assert world.add(of, "b", 1, 3)[1] == "0"


def test_shared_cpus_do_not_spill_when_the_pods_sum_is_unknown() -> None:
    world = two_nodes()
    of = pod("p", {**TOGETHER, "bind": "cpu"}, qos=QoSClass.BURSTABLE)
    world.add(of, "a", 2.5)[1]
    rejected = world.reject(of, container(of, "b", resources(2.5)))
    assert rejected.message.startswith(
        "pod default/p, container b: cpu: 2.5 CPUs needed, 1.5 CPUs free on NUMA node 0; it needs "
        "2.5 CPUs where its pod was placed (policy single-numa-node, scope pod)"
    )
    world.add(of, "c", 0.5)[1]
    assert (
        "2 CPUs needed, 1 CPU free on NUMA node 0"
        in world.reject(of, container(of, "d", resources(2))).message
    )


def test_what_spills_by_permission_widens() -> None:
    world = two_nodes()
    of = pod("p", {**TOGETHER, "on-failure": "best-effort"})
    assert world.add(of, "a", 1, 5)[1] == "0"
    assert world.add(of, "b", 1, 5)[1] == "0-1"


def test_a_pod_that_was_placed_wide_by_one_container_is_no_place_for_a_strict_one() -> None:
    world = two_nodes()
    wishes = {"scope": "pod", "policy.a": "best-effort", "policy.b": "single-numa-node",
              "policy.c": "restricted", "policy.d": "best-effort"}  # fmt: skip
    of = pod("p", wishes)
    assert world.add(of, "a", 6.5, 12)[1] == "0-1"
    assert "more than one" in world.reject(of, container(of, "b", resources(0.5, 1))).message
    assert world.add(of, "c", 0.5, 1)[1] == "0-1"
    assert world.add(of, "d", 0.5, 1)[1] == "0-1"
    world.stop("p-a")
    world.add(pod("s", {"policy": "best-effort"}), "a", 1.5, 1)[1]
    world.add(pod("t", {"policy": "best-effort"}), "a", 1.5, 1)[1]
    of = pod("r", wishes)
    assert world.add(of, "a", 2.5, 1)[1] == "0-1"
    rejected = world.reject(of, container(of, "c", resources(0.5, 1)))
    assert "more than an empty machine would need" in rejected.message


# --- case 3 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_scope_pod_on_one_numa_node_places_what_fits(policy: str) -> None:
    """2 + 5 of 8 CPUs, and 3 + 3 of 8 GiB: the sum is asked for once, not once for each."""
    world = World(machines.single_no_smt(cores_per_numa=8, memory_gib=8))
    of = pod("p", {"policy": policy, "scope": "pod"}, total=resources(7, 6))
    world.add(of, "a", 2, 3)
    cpus, mems = world.add(of, "b", 5, 3)
    assert (len(CPUSet.parse(cpus)), mems) == (5, "0")


def test_scope_pod_without_a_policy_places_each_container_by_itself() -> None:
    world = World(two_by_four(), Settings())
    of = pod("p", {"scope": "pod", "cpus": "exclusive"}, total=resources(7, 6))
    world.add(of, "a", 2, 3)
    world.add(of, "b", 5, 3)
    assert world.agent.current.state.pods[of.uid].affinity is None


# --- others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wishes", [{}, {"smt": "isolate"}, {"smt": "full-core"}])
def test_nobody_takes_the_last_cpu_of_a_numa_node_that_is_shared(wishes: dict[str, str]) -> None:
    """Who shares that NUMA node would run on the others from then on."""
    topology = machines.dual_smt_16(memory_gib=8)
    world = World(
        topology, Settings(limits=QuotasAndPoolFloor(idle_siblings=CPUAmount(percent=100)))
    )
    world.put("share", {"policy": "single-numa-node"}, 0.5, 1, QoSClass.BURSTABLE)
    there = topology.cpus_of(world.allocation("share-app").numa_nodes)
    for number in range(8):
        own = pod(f"own{number}", {"cpus": "exclusive", **wishes})
        world.create(own, container(own, wants=resources(2, 1)))
        assert world.cpus("share-app") <= there
    assert len(world.agent.current.state.exclusive) >= 6


def test_a_list_does_not_take_the_last_cpus_of_a_numa_node_from_a_strict_pod() -> None:
    world = two_nodes()
    for name, policy in (("mild", "best-effort"), ("strict", "restricted")):
        world.put(name, {"policy": policy, "numamem": "0"}, 0.5, 1, QoSClass.BURSTABLE)
    every = pod("list", {"numacpu": "0-3", "cpus": "exclusive"})
    rejected = world.reject(every, wants=resources(4, 1))
    assert rejected.reason == "SharedPoolEmpty"
    assert rejected.message == (
        "pod default/list, container app: numacpu is '0-3' (annotation numa.kubernetes.io/numacpu) "
        "with cpus: exclusive, but it leaves no CPU on NUMA node 0 for default/strict/app, which "
        "shares CPUs there (policy restricted); expected one of 0-3 to be free"
    )
    world.stop("strict-app")
    world.place(every, wants=resources(4, 1))


# --- Isolated CPUs (isolcpus): containers that share stay off them, and who owns CPUs gets them -


MILD = {"policy": "best-effort"}
HOUSEKEEPING = CPUSet.parse("0-1,16-17")


def isolating(isolated: str = "2-15,18-31") -> Topology:
    """Two NUMA nodes of 8 cores with 2 threads; node 0 is 0-7,16-23."""
    return machines.dual_smt(cores_per_numa=8, isolated=CPUSet.parse(isolated), memory_gib=16)


def test_containers_that_share_stay_off_isolated_cpus() -> None:
    world = World(isolating())
    for name in ("a", "b"):
        assert world.put(name, MILD, 0.5, 1, QoSClass.BURSTABLE)[0] == "0-1,16-17"
    assert world.put("c", {}, 0.5, 1, QoSClass.BURSTABLE)[0] == "0-1,16-17", "it asks for nothing"


@pytest.mark.parametrize(("strict", "shared"), [(True, "2-15,18-31"), (False, "0-1,16-17")])
def test_where_all_others_are_reserved_isolated_cpus_are_shared(strict: bool, shared: str) -> None:
    world = World(isolating(), Settings(reserved_cpus=HOUSEKEEPING, strict_cpu_reservation=strict))
    assert world.put("c", {}, 0.5, 1, QoSClass.BURSTABLE)[0] == shared


PREFER = Settings(isolated=IsolatedCPUs.PREFER)


def test_owners_leave_the_pool_a_cpu_that_is_not_isolated() -> None:
    world = World(isolating(), PREFER)
    world.put("idle", qos=QoSClass.BURSTABLE)
    owned = CPUSet.parse(world.put("own", OWN, 6)[0])
    assert len(owned) == 6
    left = world.cpus("idle-app")
    assert left
    assert left <= HOUSEKEEPING - owned
    assert len(CPUSet.parse(world.put("more", OWN, 20)[0])) == 20
    assert world.cpus("idle-app") == left


def test_isolated_cpus_can_be_owned_whatever_floor_the_pool_has() -> None:
    floor = QuotasAndPoolFloor(pool=CPUAmount(8))
    world = World(isolating(), replace(PREFER, limits=floor))
    owned = CPUSet.parse(world.put("own", OWN, 6)[0])
    assert not owned & HOUSEKEEPING


def test_what_sharers_were_promised_is_not_owned() -> None:
    world = World(isolating())
    world.put("shares", MILD, 3, 1, QoSClass.BURSTABLE)
    owned = [CPUSet.parse(world.put(f"own{n}", OWN, 1)[0]) for n in range(4)]
    assert sum(len(cpus & HOUSEKEEPING) for cpus in owned) <= 1


def test_avoid_gives_isolated_cpus_to_containers_of_one_cpu_alone() -> None:
    """The kernel would run both busy threads of two CPUs on one of them."""
    world = World(isolating())
    assert world.put("own", OWN, 3)[0] == "0-1,16"
    says(world.rejected("two", OWN, 2), "NotEnoughCPUs", "0 free for exclusive use", "avoid)")
    assert not CPUSet.parse(world.put("one", OWN, 1)[0]) & HOUSEKEEPING
    says(world.update_rejected("one-app", resources(2)), "", "is isolated")
    assert max_exclusive_by_node(world.agent.current.desired) == {0: 0, 1: 0}


def test_avoid_counts_the_other_cpus_of_an_empty_machine() -> None:
    """Six need both NUMA nodes, which have four each that are not isolated."""
    world = World(isolating("4-7,12-15,16-31"))
    assert world.put("wide", {"policy": "restricted"}, 6, 1)[1] == "0-1"


def test_only_gives_owners_isolated_cpus_and_nothing_else() -> None:
    world = World(isolating("2-3,18-19"), Settings(isolated=IsolatedCPUs.ONLY))
    assert max_exclusive_by_node(world.agent.current.desired) == {0: 4, 1: 0}
    assert total_free_exclusive(world.agent.current.desired) == 4
    says(world.rejected("many", OWN, 5), "", "5 exclusive CPUs needed, this machine has 4")
    assert world.put("own", OWN, 4)[0] == "2-3,18-19"
    assert "(isolatedCPUs: only)" in world.rejected("late", OWN, 1).message


@pytest.mark.parametrize(
    ("isolated", "busy", "expected"),
    [(IsolatedCPUs.PREFER, "8-9", "1"), (IsolatedCPUs.AVOID, "0-1", "0")],
)
def test_the_setting_chooses_a_numa_node(isolated: IsolatedCPUs, busy: str, expected: str) -> None:
    """By the strategy it would be the other one, which is less in use."""
    world = World(isolating("8-15,24-31"), Settings(isolated=isolated))
    world.put("busy", {"numacpu": busy, "cpus": "exclusive"}, 2)
    assert world.put("own", {"policy": "single-numa-node"}, 4, 1)[1] == expected


@pytest.mark.parametrize("policy", ["single-numa-node", "restricted", "best-effort"])
def test_a_container_that_shares_is_near_its_listed_memory(policy: str) -> None:
    """Which CPUs may be owned is nothing to it: they are all on NUMA node 0."""
    world = World(two_by_four(isolated=CPUSet([2, 3])), Settings(isolated=IsolatedCPUs.ONLY))
    wishes = {"policy": policy, "numamem": "1"}
    assert world.put("shares", wishes, 0.5, 1, QoSClass.BURSTABLE) == ("4-7", "1")
    if policy != "best-effort":
        message = world.rejected("owns", wishes, 1, 1).message
        assert "0 CPUs free for exclusive use on NUMA node 1, near the listed memory" in message


def test_a_rejection_counts_the_cpus_near_the_listed_memory() -> None:
    """Not those of all NUMA nodes, of which another line says that they are free."""
    world = World(two_by_four())
    wishes = {"policy": "single-numa-node", "numamem": "0"}
    world.put("full", wishes, 3.5, 1, QoSClass.BURSTABLE)
    says(
        world.rejected("more", wishes, 1, 1, QoSClass.BURSTABLE), "TopologyAffinityError",
        "0.5 CPUs free on NUMA node 0, near the listed memory", "NUMA node 1: 4 CPUs",
    )  # fmt: skip


def test_any_takes_isolated_cpus_as_any_and_warns_of_a_set_without_others() -> None:
    world = World(isolating("8-15,24-31"), Settings(isolated=IsolatedCPUs.ANY))
    assert world.put("a", MILD, 0.5, 1, QoSClass.BURSTABLE)[0] == "0-7,16-23"
    admitted = world.admit(pod("b", MILD, qos=QoSClass.BURSTABLE), wants=resources(0.5, 1))
    assert admitted.adjustment.cpus == "8-15,24-31"
    assert [w for w in admitted.warnings if "isolated (isolcpus)" in w]


def test_a_shared_list_of_isolated_cpus_is_taken_and_warned_of() -> None:
    world = World(isolating())
    admitted = world.admit(pod("listed", {"numacpu": "4-5"}), wants=resources(2))
    assert admitted.allocation.kind is ContainerKind.LISTED
    assert [w for w in admitted.warnings if w.startswith("CPUs 4-5 are isolated")]


def test_growing_takes_isolated_cpus_before_the_last_of_the_pool() -> None:
    world = World(isolating(), PREFER)
    world.put("own", OWN, 2)
    assert world.update("own-app", resources(6)) is None
    assert len(world.cpus("own-app")) == 6
    assert HOUSEKEEPING - world.cpus("own-app")


def test_a_machine_of_isolated_cpus_shares_them() -> None:
    world = World(isolating("0-31"))
    assert world.put("a", MILD, 0.5, 1, QoSClass.BURSTABLE)[0] == "0-7,16-23"
    assert world.put("own", OWN, 2)[0]


# --- cpus: exclusive for a whole pod: for those containers that request whole CPUs --------------


@pytest.mark.parametrize("is_rule", [False, True])
def test_exclusive_for_a_whole_pod_rejects_no_sidecar(is_rule: bool) -> None:
    """Neither a fraction, nor a limit above the request, nor kubectl debug."""
    rules = (Rule(values={"cpus": "exclusive"}),) if is_rule else ()
    world = World(machines.dual_no_smt(), Settings(rules=rules))
    annotations = {} if is_rule else {"cpus": "exclusive"}
    of = pod("db", annotations, qos=QoSClass.BURSTABLE, total=resources(2.6))
    above = Resources(cpu_shares=512, cpu_quota=200_000, cpu_period=100_000)
    for name, wants, cause in (
        ("proxy", resources(0.1), "0.1 CPUs"), ("main", resources(2), ""),
        ("burst", above, "0.5 of 2 CPUs"), ("debugger", resources(), "not set"),
    ):  # fmt: skip
        admitted = world.admit(of, container(of, name, wants))
        kind = ContainerKind.SHARED if cause else ContainerKind.EXCLUSIVE
        assert admitted.allocation.kind is kind, name
        assert [text for text in admitted.trace.ignored if cause in text] == list(
            admitted.trace.ignored
        )
        assert bool(admitted.trace.ignored) == bool(cause)
    notices = [n for n in world.history.notices.notices_after() if n.notice_kind == "ignored"]
    assert [n.container for n in notices] == ["proxy", "burst", "debugger"]
    assert all("it shares CPUs despite cpus: exclusive" in n.message for n in notices)
    says(world.update_rejected("db-main", resources(1.5)), "FractionalCPUs")


def test_exclusive_of_one_container_or_of_a_pod_without_a_whole_cpu_is_strict() -> None:
    world = World(machines.dual_no_smt())
    for key, total in (("cpus.app", 2), ("cpus", 0.5)):
        of = pod("strict", {key: "exclusive"}, total=resources(total))
        says(world.reject(of, wants=resources(0.5)), "FractionalCPUs")


# --- What the scheduler held: taken where it suits as well, decided again where it does not -----


@pytest.mark.parametrize(
    ("ties", "text", "mems"),
    [
        (False, '{"app":"1"}', "1"),  # by itself it would go to the other NUMA node
        (True, '{"app":"1"}', "0"),
        *((False, f'{{"app":"{held}"}}', "0") for held in ("0-1", "7", "1023")),
        *((False, text, "0") for text in ("", "{", "3", '{"app":3}', '{"app":"x"}', "[" * 100_000)),
        (False, '{"other":"1"}', "0"),
        (False, '{"app":"' + "1," * MAX_SCHEDULED_NODES_CHARS + '1"}', "0"),
    ],
)
def test_what_the_scheduler_held_is_a_preference(ties: bool, text: str, mems: str) -> None:
    """Among NUMA nodes that suit as well: no way around a policy, and nothing if it is not read."""
    world = World(machines.dual_smt(), Settings(kubelet=KubeletRules(ties=ties)))
    assert world.put("a", {**SINGLE, "scheduled-numa-nodes": text}, 4, 1)[1] == mems
    assert world.put("plain", {"scheduled-numa-nodes": text}, 4, 1)[1] == ""


def test_a_pod_bound_before_the_upgrade_is_placed_where_the_scheduler_reserved() -> None:
    """Its annotation has the old key."""
    world = World(machines.dual_smt())
    assert world.put("a", {**SINGLE, "placed": '{"app":"1"}'}, 4, 1)[1] == "1"


def test_text_and_back() -> None:
    places = {"b": NUMASet([1]), "a": NUMASet([0, 1]), "none": NO_NUMA_NODES}
    text = format_scheduled_nodes(places)
    assert text == '{"a":"0-1","b":"1"}'
    assert parse_scheduled_nodes(text) == {"a": NUMASet([0, 1]), "b": NUMASet([1])}
    assert scheduled_nodes({f"{PREFIX}scheduled-numa-nodes": text}, PREFIX[:-1], "b") == NUMASet(
        [1]
    )
    assert scheduled_nodes({}, PREFIX[:-1], "b") == NO_NUMA_NODES


def test_it_is_said(world: World) -> None:
    """In what explains the container, and as a warning where it came otherwise."""
    for name, cpus in (("first", 28), ("second", 8)):
        of = pod(name, {**SINGLE, "scheduled-numa-nodes": '{"app":"1"}'}, qos=QoSClass.GUARANTEED)
        made = container(of, wants=resources(cpus, 1))
        found = admit(world.agent.current.desired, of, made)
        assert isinstance(found, Admitted)
        said = [step for step in found.trace.decision_steps if "the scheduler chose" in step]
        if name == "first":
            assert said == ["the scheduler chose NUMA node 1, too"]
            assert found.warnings == ()
            world.place(of, made)
        else:
            (warning,) = found.warnings
            assert warning == (
                "the scheduler chose NUMA node 1, which no longer fits best: placed on NUMA node 0 "
                "instead"
            )
            assert said == [warning]


def test_on_one_numa_node_there_is_nothing_to_choose() -> None:
    world = World(machines.single_smt())
    of = pod("a", {**SINGLE, "scheduled-numa-nodes": '{"app":"0"}'}, qos=QoSClass.GUARANTEED)
    found = admit(world.agent.current.desired, of, container(of, wants=resources(2, 1)))
    assert isinstance(found, Admitted)
    assert found.warnings == ()
