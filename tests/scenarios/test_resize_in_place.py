"""Case 6 of the policies: an in-place resize never moves a running container."""

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Rejected, Resized
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.request.demand import MIN_CPU_SHARES
from nri_numa.engine.state import Charge, ContainerKind
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Rule, Settings
from nri_numa.model.workload import PodSandbox, QoSClass, Resources, Strategy
from tests.beds.wire import captured_request
from tests.beds.world import GIB, OWN, SINGLE, World, pod, resources, says, two_by_four, two_nodes
from tests.machines import named as machines
from tests.machines import pods

usual = two_nodes


def test_resize_from_shared_to_exclusive_stays_on_its_numa_node_and_memory(world: World) -> None:
    """1500m to 2000m went from NUMA node 0 to 1, with new mems, while 1 had more left."""
    assert world.put("a", SINGLE, 1.5, 1) == ("0-3", "0")
    world.put("big", {**SINGLE, "numamem": "0"}, 0.5, 6)
    assert world.update("a-app", resources(2, 1)) is None
    assert world.allocation("a-app").kind is ContainerKind.EXCLUSIVE
    assert world.has("a-app") == ("0-1", "0")
    basis = world.grounds("a-app").basis
    assert (basis.pool_before, basis.pool_after) == ("0-7", "2-7")


def test_resize_from_shared_to_exclusive_that_does_not_fit_there_is_rejected(world: World) -> None:
    assert world.put("a", SINGLE, 0.5, 1) == ("0-3", "0")
    world.put("own", {**SINGLE, "numamem": "0"}, 3, 1)
    before = world.has("a-app")
    rejected = world.update_rejected("a-app", resources(2, 1))
    assert rejected.reason == "NotEnoughCPUs"
    assert rejected.message == (
        "resize rejected: pod default/a, container app: cpu: 2 exclusive CPUs needed, 1 free for "
        "exclusive use on NUMA node 0 for it (smt: spread); held: default/own/app has "
        "exclusive CPUs 0-2"
    )
    assert world.has("a-app") == before


def test_resize_from_shared_to_exclusive_shares_on_where_widening_would_move_it() -> None:
    world = two_nodes()
    world.put("a", {**SINGLE, "on-failure": "best-effort"}, 0.5, 1)
    world.put("own", {**SINGLE, "numamem": "0"}, 3, 1)
    before = world.has("a-app")
    assert world.update("a-app", resources(2, 1)) is None
    assert world.has("a-app") == before
    assert world.allocation("a-app").kind is ContainerKind.SHARED


def test_who_no_longer_has_exclusive_cpus_is_told_so_and_why(world: World) -> None:
    """An autoscaler's fraction: in explain, in a notice, which is an Event, and in the log."""
    world.put("a", SINGLE, 4, 1)
    assert world.update("a-app", resources(3.85, 1)) is None
    text = "no longer has its 4 exclusive CPUs, because 3.85 CPUs is not a whole number"
    assert text in world.steps("a-app")
    (notice,) = world.history.notices.notices_after()
    assert (notice.notice_kind, notice.message) == ("shared", text)
    assert world.update("a-app", resources(2.5, 1)) is None
    assert len(list(world.history.notices.notices_after())) == 1


def test_resize_from_exclusive_to_shared_stays_on_its_numa_node(world: World) -> None:
    assert world.put("first", SINGLE, 1, 4)[1] == "0"
    cpus, mems = world.put("a", SINGLE, 2, 1)
    assert mems == "1"
    world.put("more", {**SINGLE, "numamem": "1"}, 0.5, 6)
    assert world.update("a-app", resources(1.5, 1)) is None
    assert world.has("a-app") == ("4-7", "1")
    assert world.live["a-app"].resources.cpu_quota == 150_000
    assert not world.agent.current.state.exclusive & CPUSet.parse(cpus)


def test_resize_under_widen_adds_cpus_elsewhere_and_keeps_cpus_and_memory_nodes() -> None:
    world = two_nodes()
    world.put("a", {"policy": "best-effort"}, 3, 1)
    had = world.cpus("a-app")
    assert world.update("a-app", resources(5, 1)) is None
    assert had < world.cpus("a-app")
    assert world.allocation("a-app").numa_nodes == NUMASet([0, 1])
    assert world.has("a-app")[1] == "0"
    assert not world.allocation("a-app").aligned
    # More than the machine has: it keeps what it has.
    had = world.cpus("a-app")
    assert world.update("a-app", resources(20, 1)) is None
    assert world.cpus("a-app") == had
    assert world.update("a-app", resources(3, 1)) is None
    assert world.allocation("a-app").aligned, "on one NUMA node again"


def test_resize_under_widen_leaves_those_who_share_what_they_were_promised() -> None:
    """Also where its own CPU is not among the first."""
    world = two_nodes(strategy=Strategy.PACK)
    world.put("x", SINGLE, 3, 1)
    assert world.put("a", {"policy": "best-effort"}, 1, 1) == ("3", "0")
    world.stop("x-app")
    world.put("shares", {**SINGLE, "cpus": "shared"}, 2, 1)
    assert world.update("a-app", resources(3, 1)) is None
    assert world.has("a-app")[0] == "0,3-4"


def test_resize_whose_cpus_cannot_grow_books_its_new_memory(world: World) -> None:
    """What it may use is promised to nobody else, and a Synchronize finds nothing to change."""
    wishes = {"policy": "best-effort", "bind": "cpu+mem"}
    world.put("a", wishes, 2, 2)
    world.put("b", wishes, 5, 1)
    for cpus, memory in ((9, 5), (12, 6)):
        assert world.update("a-app", resources(cpus, memory)) is None
        allocation = world.allocation("a-app")
        assert sum(c.memory for c in allocation.charges.values()) == memory * GIB
        assert not allocation.aligned
        assert allocation.reason.endswith(", less than requested")
        world.synchronize()
        assert world.allocation("a-app") == allocation
    assert world.update("a-app", resources(1, 1)) is None
    assert "less" not in world.allocation("a-app").reason
    assert world.allocation("a-app").aligned


def test_simulate_says_that_a_resize_got_less() -> None:
    topology = machines.single_no_smt(cores_per_numa=8)
    wishes = {"policy": "best-effort"}
    result = pods.run(
        topology,
        pods.pod("a", 2, "2Gi", wishes),
        pods.pod("b", 4, "1Gi", wishes),
        pods.pod("a", 6, "11Gi", wishes),
    )
    outcome = pods.the(result)
    assert outcome.verdict.value == "shortfall"
    assert outcome.allocation is not None
    assert sum(c.memory for c in outcome.allocation.charges.values()) == 11 << 30
    assert "less than requested" in outcome.reason


def test_resize_never_takes_the_last_cpu_of_those_who_share_a_numa_node(world: World) -> None:
    """Without a CPU there, they would be moved to the rest of the machine."""
    world.put("a", SINGLE, 2, 1)
    world.put("share", {**SINGLE, "numamem": "0"}, 0.5, 1)
    assert world.has("share-app")[0] == "2-3"
    assert isinstance(world.update("a-app", resources(4, 1)), Rejected)
    assert world.update("a-app", resources(3, 1)) is None
    assert world.has("share-app")[0] == "3"
    world.put("b", {**SINGLE, "on-failure": "best-effort"}, 2, 1)
    world.put("beside", {**SINGLE, "numamem": "1"}, 0.5, 1)
    assert isinstance(world.update("b-app", resources(4, 1)), type(None))
    assert len(world.cpus("b-app")) == 2, "the others need what is left on both NUMA nodes"


def test_resize_of_memory_keeps_the_memory_nodes_or_is_rejected(world: World) -> None:
    world.put("a", SINGLE, 1, 4)
    rejected = world.update_rejected("a-app", resources(1, 10))
    assert rejected.reason == "NotEnoughMemory"
    assert rejected.message.endswith("memory: 10 GiB needed, 8 GiB free on NUMA node 0")
    world.put("b", {"policy": "best-effort"}, 1, 4)
    assert world.update("b-app", resources(1, 10)) is None
    assert world.has("b-app")[1] == "1"
    assert world.agent.current.state.allocated_on(1).memory == 10 * GIB
    for cpus in (1, 2, 1.5):  # of a resize the kubelet sends memory and CPUs one after the other
        assert world.update("b-app", resources(cpus, 10)) is None
        assert world.allocation("b-app").reason.endswith(", less than requested")


def test_resize_of_memory_counts_what_the_container_uses_already_as_its_own() -> None:
    """It uses 5 GiB of its 6; growing by 1 GiB needs 1 GiB more, not 7 GiB that are free."""
    world = two_nodes(MeasuredFree(memory={0: 8 * GIB, 1: 8 * GIB}))
    world.put("a", SINGLE, 1, 6)
    world.reading = MeasuredFree(memory={0: 3 * GIB, 1: 8 * GIB})
    assert world.update("a-app", resources(1, 7)) is None
    assert world.has("a-app")[1] == "0"
    world.reading = MeasuredFree(memory={0: 0, 1: 8 * GIB}, hugepages={0: {GIB: 0}})
    assert isinstance(world.update("a-app", resources(1, 8)), Rejected)


def test_resize_of_huge_pages_must_fit_where_it_is() -> None:
    topology = machines.dual_smt_16(memory_gib=8, hugepages={GIB: 2 * GIB})
    world = World(topology, reading=MeasuredFree(hugepages={0: {GIB: 2 * GIB}, 1: {GIB: 2 * GIB}}))
    world.put("a", SINGLE, 1, 1, pages={GIB: GIB})
    assert world.update("a-app", resources(1, 1, hugepages={GIB: 2 * GIB})) is None
    rejected = world.update_rejected("a-app", resources(1, 1, hugepages={GIB: 3 * GIB}))
    assert "hugepages-1Gi: 3 GiB needed, 2 GiB free on NUMA node 0" in rejected.message


def test_resize_after_a_rule_changed_does_not_apply_the_new_rule() -> None:
    """It was pinned by a list, or owned CPUs; the rule that says otherwise is for new pods."""
    rules = (Rule(values={"numacpu": "5", "numamem": "1"}, containers=("app",)),)
    world = two_nodes(rules=rules)
    assert world.put("listed", {}, 0.5, 1) == ("5", "1")
    assert world.put("owned", {"numacpu": "7", **OWN}, 1, 1) == ("7", "1")
    world.settings = Settings(rules=(Rule(values=SINGLE),))
    world.restart()
    world.put("a", {}, 2, 1)
    had = world.has("a-app")
    assert world.update("listed-app", resources(2, 1)) is None
    assert world.update("owned-app", resources(2, 1)) is None
    assert (world.has("listed-app"), world.has("owned-app")) == (("5", "1"), ("7", "1"))
    world.settings = Settings()
    world.restart()
    assert world.update("a-app", resources(2, 2)) is None
    assert world.has("a-app") == had


def test_resize_in_a_pod_that_was_placed_together_may_use_all_of_the_pods_numa_nodes() -> None:
    world = two_nodes()
    of = pod("p", {"policy": "restricted", "scope": "pod"}, total=resources(6, 10))
    world.add(of, "a", 3, 9)
    world.add(of, "b", 1, 1)
    assert world.has("p-a")[1] == "0-1"
    assert world.update("p-a", resources(5, 9)) is None
    assert len(world.cpus("p-a")) == 5
    assert world.allocation("p-a").aligned
    # The sum of now is not known; an owner stays one, and is told to be one.
    assert world.update("p-b", resources(2, 1)) is None
    assert "it shares" not in str(world.grounds("p-b").basis)


def test_resize_of_a_container_with_listed_memory_books_its_new_size_there(world: World) -> None:
    assert world.put("a", {"numamem": "1"}, 0.5, 1) == ("", "1")
    assert world.update("a-app", resources(2, 3)) is None
    assert world.has("a-app") == ("", "1")
    assert world.agent.current.state.allocated_on(1).memory == 3 * GIB
    assert isinstance(world.update("a-app", resources(2, 9)), Rejected)


@pytest.mark.parametrize(("single_threads", "cpus"), [(0, 2), (4, 4)])
def test_resize_that_whole_cores_cannot_make_is_rejected(single_threads: int, cpus: int) -> None:
    """Also where other cores of the machine could."""
    world = World(machines.snc_smt(memory_gib=8, efficient_cores_per_numa=single_threads))
    world.put("a", {**SINGLE, "smt": "full-core"}, cpus, 1)
    says(
        world.update_rejected("a-app", resources(3, 1)), "SMTAlignmentError", "so 2 or 4 would fit"
    )
    assert world.update("a-app", resources(4, 1)) is None
    assert len(world.cpus("a-app")) == 4


def test_resize_of_memory_alone_does_not_mind_a_cpu_that_is_offline(world: World) -> None:
    world.put("a", SINGLE, 2, 1)
    had = world.allocation("a-app").cpus
    world.topology = two_by_four(offline=CPUSet([max(had)]))
    world.restart()
    assert world.update("a-app", resources(2, 2)) is None
    assert world.allocation("a-app").cpus == had
    assert world.agent.current.state.allocated_on(0) == Charge(2000, 2 * GIB)
    world.put("list", {"numacpu": "6"}, 1)
    world.becomes(two_by_four(offline=CPUSet([max(had), 6])))
    assert world.update("list-app", resources(1, 1)) is None
    assert world.agent.current.state.allocated_on(1).cpu_milli == 1000


def test_resize_while_a_numa_node_is_offline_keeps_it_for_later(world: World) -> None:
    before = world.put("a", {"policy": "best-effort"}, 5.5, 10)
    assert before == ("0-7", "0-1")
    for topology in (two_by_four(offline=CPUSet.parse("4-7")), world.topology):
        world.becomes(topology)
        assert world.update("a-app", resources(3.5, 10)) is None
        world.check()
    assert world.has("a-app") == before


@pytest.mark.parametrize("on_failure", ["reject", "unpinned", "best-effort"])
def test_whole_cores_are_not_kept_when_the_request_stops_paying_for_them(on_failure: str) -> None:
    world = World(machines.dual_smt())
    world.put("a", {"cpus": "exclusive", "smt": "full-core", "on-failure": on_failure}, 2, 1)
    says(world.update_rejected("a-app", resources(1, 1)), "SMTAlignmentError")
    assert len(world.allocation("a-app").cpus) == 2


def test_resize_of_a_busy_container_takes_the_sibling_of_a_quiet_one() -> None:
    """What else runs on a core counts when it grows as it does when it is placed."""
    world = World(machines.single_smt())
    world.synchronize()
    for name, load in (("busy", "high"), ("quiet", "low"), ("calm", "low")):
        world.put(name, {"cpus": "exclusive", "smt": "pair", "load": load}, 1, 1)
    assert [world.has(f"{name}-app")[0] for name in ("busy", "quiet", "calm")] == ["0", "4", "1"]
    assert world.update("busy-app", resources(2, 1)) is None
    assert world.has("busy-app")[0] == "0,5"


@pytest.mark.parametrize(
    ("wishes", "before", "after"),
    [
        ({"policy": "single-numa-node"}, resources(0.5, 1), resources(1.5, 2)),
        ({"policy": "restricted", "bind": "cpu"}, resources(0.5, 1), resources(1.5, 1)),
        ({"numacpu": "1", "numamem": "0"}, resources(0.5, 1), resources(0.7, 2)),
        ({}, resources(0.5, 1), resources(2, 1)),
    ],
)
def test_a_resize_that_moves_nothing_overrides_nothing(
    world: World, wishes: dict[str, str], before: Resources, after: Resources
) -> None:
    """Any override makes containerd lose the swap limit of the request."""
    world.place(pod("a", wishes), wants=before)
    made = world.live["a-app"]
    outcome = world.agent.update_container(world.pods[made.pod_id], made, after)
    assert not isinstance(outcome, Rejected)
    assert outcome.container_update is None


@pytest.mark.parametrize("owner", [True, False])
@pytest.mark.parametrize(
    ("path", "remembered", "answered"),
    [
        ("/pods/plain", "0-3", "2-3"),
        ("/pods/plain", "2-3", ""),
        ("/pods/plain", "1", "2-3"),
        ("/pods/plain", "", ""),
        ("pods.slice:cri:plain", "", "2-3"),
    ],
    ids=["older", "same", "narrower", "none", "none, and systemd has one"],
)
def test_a_cpuset_that_the_runtime_remembers_does_not_come_back_with_an_update_of_memory(
    owner: bool, path: str, remembered: str, answered: str
) -> None:
    """It goes to the OCI runtime with any update, and what is meant may be newer."""
    world = World(machines.single_no_smt())
    of, listed = pod("plain"), pod("listed", {"numacpu": "3", "numamem": "0"})
    world.place(of)
    world.place(listed)
    world.put("own", {"cpus": "exclusive"}, 2, 1)
    if not owner:  # nobody owns any: all that is remembered was meant for one that is gone
        world.stop("own-app")
        answered = "0-3" if remembered not in ("", "0-3") else ""
    made = world.live["plain-app"]
    has = replace(made, cgroups_path=path, resources=Resources(cpus=remembered))
    asked = Resources(memory_limit=1 << 30)
    outcome = world.agent.update_container(of, has, asked)
    assert isinstance(outcome, Resized)
    assert (outcome.container_update.cpus if outcome.container_update else "") == answered
    has = replace(world.live["listed-app"], resources=Resources(cpus="0", mems="0-1"))
    outcome = world.agent.update_container(listed, has, asked)
    assert isinstance(outcome, Resized)
    assert outcome.container_update is not None
    assert outcome.container_update[:3] == ("listed-app", "3", "0")


def test_who_becomes_an_owner_is_not_throttled_on_its_cpus(world: World) -> None:
    """By a limit that the request does not name."""
    world.place(pod("a", SINGLE), wants=replace(resources(2), cpu_shares=1024))
    assert world.allocation("a-app").kind is ContainerKind.SHARED
    assert world.update("a-app", Resources(cpu_shares=2048)) is None
    assert world.allocation("a-app").exclusive
    assert world.live["a-app"].resources.cpu_quota == -1


def resize_unseen(world: World, container_id: str, wants: Resources) -> None:
    """The runtime changes a container while nobody listens; its cpuset stays."""
    old = world.live[container_id]
    kept = replace(wants, cpus=old.resources.cpus, mems=old.resources.mems)
    world.live[container_id] = replace(old, resources=kept)
    world.restart()


@pytest.mark.parametrize(("cpus", "expected"), [(3, "0-2"), (1, "0")])
def test_an_owner_grows_and_shrinks_around_the_cpus_it_has(cpus: float, expected: str) -> None:
    world = two_nodes()
    world.put("owner", OWN, 2, 1)
    world.put("other", {}, 0.5)
    assert world.live["owner-app"].resources.cpus == "0-1"
    resize_unseen(world, "owner-app", resources(cpus, 1))
    assert world.live["owner-app"].resources.cpus == expected
    allowed = {"0-2": "3-7", "0": "1-7"}[expected]
    assert world.live["other-app"].resources.cpus == allowed
    assert world.allocation("owner-app").cpu_milli == cpus * 1000
    assert world.history.explanation_of("owner-app") is not None


def test_a_shared_container_is_booked_by_its_new_size_where_it_is(world: World) -> None:
    world.put("web", {"policy": "best-effort", "cpus": "shared"}, 1, 4)
    before = world.allocation("web-app")
    resize_unseen(world, "web-app", resources(2, 8))
    after = world.allocation("web-app")
    same = replace(after, cpu_milli=1000, memory_bytes=4 * GIB, charges=before.charges)
    assert (same, after.kind) == (before, ContainerKind.SHARED)
    assert (after.cpu_milli, after.memory_bytes) == (2000, 8 * GIB)


def test_a_size_that_does_not_fit_leaves_a_running_container_what_it_has(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """And that is said: nobody else can know that it has less than its pod asks for."""
    world.put("first", {**OWN, "policy": "single-numa-node"}, 3, 1)
    world.put("second", {**OWN, "policy": "single-numa-node"}, 3, 1)
    had = world.live["first-app"].resources.cpus
    resize_unseen(world, "first-app", resources(6, 1))
    assert world.live["first-app"].resources.cpus == had
    assert world.allocation("first-app").cpu_milli == 3000
    (said,) = [vars(r)["fields"]["problem"] for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith("resized while we were away and keeps what it has: ")
    assert "default/first" in said


def test_what_was_not_changed_stays_and_nothing_is_sent(world: World) -> None:
    """A lifted quota, an unpinned container and a foreign pin look like changes, and are none."""
    world.put("owner", OWN, 2, 1)
    world.put("web", {}, 0.5)
    world.place(pod("kubelet"), wants=replace(resources(1), cpus="7"))
    assert world.live["owner-app"].resources.cpu_quota == -1
    state = world.agent.current.state
    assert world.restart() == ()
    assert world.agent.current.state.allocations == state.allocations


WHOLE = {"policy": "single-numa-node", "scope": "pod"}


def test_a_captured_resize_of_spec_resources_and_of_an_owner_beside_the_pool() -> None:
    """The kubelet sends the least shares beside the pod's quota, the runtime the sum of before."""
    of, c, of_the_pod = captured_request("update-container-with-pods-size")
    _, a, its_own = captured_request("update-container-beside-pods-pool")
    assert (of.resources.cpu_quota, of_the_pod.cpu_quota, of_the_pod.cpu_shares) == (
        400_000, 500_000, MIN_CPU_SHARES,
    )  # fmt: skip
    world = node_of_two()
    world.place(of, a)
    world.place(of, c)
    before = {one.id: world.cpus(one.id) for one in (a, c)}
    world.put("neighbour", {"policy": "single-numa-node"}, 2)
    assert had(world) == {"a": (1, 1000), "c": (3, 3000), "app": (2, 2000)}
    for update, id, expected in (
        (of_the_pod, c.id, {"a": (1, 1000), "c": (4, 4000)}),
        (its_own, a.id, {"a": (2, 2000), "c": (3, 3000)}),
    ):
        assert world.update(id, update) is None
        assert had(world) == expected | {"app": (2, 2000)}
        world.check()
    assert before[a.id] < world.cpus(a.id)


def test_an_owner_grows_before_the_pool_is_told_of_the_new_sum() -> None:
    """Both in one patch: the kubelet tells the sandbox, and nobody after one who is refused."""
    of, total = captured_request("update-pod-sandbox")
    world = node_of_two()
    world.agent.update_pod(of, total)
    assert not world.agent.current.state.pods  # none of ours yet
    world.add(of, "a", 3)
    world.add(of, "c", 4)
    grown = resources(4)
    says(world.update_rejected("p-a", grown), "NotEnoughCPUs", "its pod, which has 4 CPUs")
    world.agent.update_pod(of, total)
    world.restart()
    assert world.update("p-a", grown) is None
    assert world.update("p-c", replace(total, cpu_shares=MIN_CPU_SHARES)) is None
    assert had(world) == {"a": (4, 4000), "c": (1, 1000)}


def node_of_two() -> World:
    """CPUs 0-15 and 16-31."""
    return World(machines.dual_no_smt(cores_per_numa=16, memory_gib=32))


def told(world: World, of: PodSandbox, total: float, memory: float = 8) -> None:
    """From now on the runtime tells another sum."""
    world.pods[of.id] = replace(of, resources=resources(total, memory))


def had(world: World) -> dict[str, tuple[int, int]]:
    """By container, exclusive CPUs and thousandths of a CPU that are booked for it."""
    return {
        a.container: (len(a.cpus), sum(c.cpu_milli for c in a.charges.values()))
        for a in world.agent.current.state.allocations.values()
        if not a.reserved_at
    }


@pytest.mark.parametrize("scope", ["container", "pod"])
@pytest.mark.parametrize(
    ("total", "sizes", "steps", "expected"),
    [
        pytest.param(
            2.5, {"a": 2.0, "f": 0.5}, [("a", 4.0)], {"a": (4, 4000), "f": (0, 500)},
            id="own grows, no new sum",
        ),
        pytest.param(
            2, {"a": 1.0, "b": 1.0}, [("a", 3.0), ("b", 1.0)], {"a": (3, 3000), "b": (1, 1000)},
            id="the other one's memory afterwards",
        ),
        pytest.param(
            4, {"a": 2.0, "b": 2.0}, [6, ("a", 4.0)], {"a": (4, 4000), "b": (2, 2000)},
            id="own grows, sum first",
        ),
        pytest.param(
            4, {"a": 2.0, "b": 2.0}, [("a", 4.0)], {"a": (4, 4000), "b": (2, 2000)},
            id="own grows to the sum",
        ),
        pytest.param(
            8, {"a": 4.0, "b": 4.0}, [4, ("a", 2.0)], {"a": (2, 2000), "b": (4, 4000)},
            id="own shrinks, sum first",
        ),
        pytest.param(
            8, {"a": 4.0, "b": 4.0}, [4, ("a", 2.0), ("b", 2.0)], {"a": (2, 2000), "b": (2, 2000)},
            id="both shrink, sum first",
        ),
        pytest.param(
            8, {"a": 4.0, "b": 4.0}, [("a", 2.0)], {"a": (2, 2000), "b": (4, 4000)},
            id="own shrinks, container first",
        ),
        pytest.param(
            4, {"a": 4.0}, [("a", 3.85)], {"a": (0, 3850)}, id="own, to a fraction",
        ),
        pytest.param(4, {"a": 4.0}, [("a", 6.0)], {"a": (6, 6000)}, id="an only one grows"),
    ],
)  # fmt: skip
def test_an_owner_has_its_size_whenever_the_sum_is_told(
    scope: str, total: float, sizes: dict[str, float], steps: list[object], expected: object
) -> None:
    world = node_of_two()
    of = pod("p", {**WHOLE, "scope": scope}, total=resources(total, 8))
    for name, cpus in sizes.items():
        world.add(of, name, cpus, 1)
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            assert world.update(f"p-{step[0]}", resources(step[1], 1 + number)) is None
        else:
            told(world, of, float(str(step)))
        world.check()
    assert had(world) == expected
    world.restart()
    assert had(world) == expected


POOL_CASES = [
    ("the pool gives", {"a": 1, "c": 4}, [("a", 2)], {"a": (2, 2000), "c": (2, 2000)}),
    ("the pool takes", {"a": 2, "c": 4}, [("a", 1)], {"a": (1, 1000), "c": (3, 3000)}),
    ("spec.resources grow", {"a": 1, "c": 4}, [("c", 5)], {"a": (1, 1000), "c": (4, 4000)}),
    ("and shrink", {"a": 2, "c": 5}, [("c", 3)], {"a": (2, 2000), "c": (1, 1000)}),
    ("below its owners", {"a": 2, "c": 4}, [("c", 2)], {"a": (2, 2000), "c": (1, 1000)}),
    ("a fraction grows", {"f": 0.5, "c": 4}, [("f", 1.5)], {"f": (0, 1500), "c": (2, 2000)}),
    ("a fraction comes", {"c": 4, "f": 0.5}, [], {"f": (0, 500), "c": (3, 3000)}),
    (
        "spec.resources and an owner", {"a": 1, "c": 4}, [("c", 5), ("a", 2)],
        {"a": (2, 2000), "c": (3, 3000)},
    ),
    (
        "an owner and spec.resources", {"a": 1, "c": 4}, [("a", 2), ("c", 5)],
        {"a": (2, 2000), "c": (3, 3000)},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"), [pytest.param(*case[1:], id=case[0]) for case in POOL_CASES]
)
@pytest.mark.parametrize("lost", [False, True], ids=["", "without a checkpoint"])
def test_a_pods_pool_has_what_its_owners_leave(
    sizes: dict[str, float], steps: list[tuple[str, float]], expected: object, lost: bool
) -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(max(sizes.values()), 8))
    for name, cpus in sizes.items():
        world.add(of, name, cpus, 1)
    for name, cpus in steps:
        assert world.update(f"p-{name}", resources(cpus, 1)) is None
        world.check()
    assert had(world) == expected
    world.restart(lost=lost)
    assert had(world) == expected


def test_a_pool_of_an_older_checkpoint_is_known_by_its_cpus() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 8))
    for name, cpus in (("own", 1), ("x", 4), ("y", 4)):
        world.add(of, name, cpus, 1)
    for document in world.store.documents.values():
        for key in ("sum", "pool"):
            document.pop(key, None)
    world.restart()
    assert world.update("p-own", resources(2, 1)) is None
    assert had(world) == {"own": (2, 2000), "x": (2, 2000), "y": (2, 2000)}


@pytest.mark.parametrize("on_failure", ["reject", "best-effort"])
def test_the_last_cpu_of_a_pool_is_nobody_elses(on_failure: str) -> None:
    world = node_of_two()
    of = pod("p", {**WHOLE, "on-failure": on_failure}, total=resources(4, 8))
    world.add(of, "a", 3, 1)
    world.add(of, "c", 4, 1)
    if on_failure == "reject":
        says(
            world.update_rejected("p-a", resources(4, 1)), "NotEnoughCPUs",
            "cpu: 4 CPUs needed, 3 CPUs free in its pod, which has 4 CPUs",
        )  # fmt: skip
    else:
        assert world.update("p-a", resources(4, 1)) is None
    assert had(world) == {"a": (3, 3000), "c": (1, 1000)}
    assert world.allocation("p-a").has_shortfall == (on_failure == "best-effort")


def test_a_container_that_grew_and_comes_again_has_cpus_of_its_own() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 8))
    world.add(of, "a", 2, 1)
    world.add(of, "b", 2, 1)
    assert world.update("p-a", resources(4, 1)) is None
    world.restart()
    world.stop("p-a")
    world.add(of, "a", 4, 1)
    assert had(world) == {"a": (4, 4000), "b": (2, 2000)}


def test_a_burstable_owner_grows_though_its_pods_sum_is_old() -> None:
    world = node_of_two()
    of = pod("p", {"cpus": "exclusive"}, qos=QoSClass.BURSTABLE, total=resources(2))
    world.add(of, "a", 2)
    assert world.update("p-a", resources(4)) is None
    assert had(world) == {"a": (4, 4000)}


def test_a_resize_that_nobody_told_of_is_the_same() -> None:
    """The sum is the new one, and both containers are found with half their size."""
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(8, 8))
    for name in "ab":
        world.add(of, name, 4, 1)
    told(world, of, 4)
    for name in "ab":
        world.unseen(f"p-{name}", cpu_shares=2048, cpu_quota=200_000)
    world.restart()
    assert had(world) == {"a": (2, 2000), "b": (2, 2000)}


@pytest.mark.parametrize("away", [False, True], ids=["", "while the agent is away"])
def test_the_pool_grows_when_an_owner_of_its_pod_ends(away: bool) -> None:
    world = World(node_of_two().topology, Settings(reservation_seconds=600))
    of = pod("p", WHOLE, total=resources(4, 4))
    world.add(of, "proxy", 4, 4)
    world.add(of, "init", 3, 1)
    assert had(world) == {"init": (3, 3000), "proxy": (1, 1000)}
    if away:
        del world.live["p-init"]
        world.restart()
    else:
        world.stop("p-init")
    assert had(world) == {"proxy": (4, 4000)}
    assert sum(c.memory for c in world.agent.current.state.charges.values()) == 4 * GIB
    world.add(of, "log", 4, 4)
    world.add(of, "main", 2, 1)
    assert had(world) == {"proxy": (2, 2000), "log": (2, 2000), "main": (2, 2000)}
    assert sum(c.memory for c in world.agent.current.state.charges.values()) == 4 * GIB


def test_memory_of_those_who_share_a_pool_is_booked_once() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 4))
    for name, cpus, memory in (("x", 4, 4), ("y", 4, 4), ("own", 1, 1)):
        world.add(of, name, cpus, memory)
    for memory in (6, 3):
        for name in "xy":
            assert world.update(f"p-{name}", resources(4, memory)) is None
        assert sum(c.memory for c in world.agent.current.state.charges.values()) == memory * GIB
    for cpus in (1, 2):
        assert world.update("p-own", resources(cpus, 2)) is None
    assert had(world)["x"] == (2, 2000)
    assert sum(c.memory for c in world.agent.current.state.charges.values()) == 3 * GIB


def test_those_who_share_a_fraction_have_one_pool_again_when_it_is_whole() -> None:
    world = node_of_two()
    of = pod("p", WHOLE, total=resources(4, 4))
    for name in "xy":
        world.add(of, name, 4, 4)
    world.add(of, "own", 1, 1)
    for cpus in (4.5, 5):
        for name in "xy":
            assert world.update(f"p-{name}", resources(cpus, 4)) is None
    assert had(world) == {"own": (1, 1000), "x": (4, 4000), "y": (4, 4000)}
    assert world.cpus("p-x") == world.cpus("p-y")


def test_simulate_resizes_a_pod_whose_sum_is_smaller_by_now() -> None:
    limits = [{"limits": {"cpu": cpus, "memory": "1Gi"}} for cpus in (4, 2)]
    specs = [{"containers": [pods.container(name, one) for name in "ab"]} for one in limits]
    result = pods.run(node_of_two().topology, *(pods.document("Pod", "p", s, WHOLE) for s in specs))
    outcomes = [outcome for event in result.events for outcome in event.outcomes]
    assert [len(o.allocation.cpus) for o in outcomes if o.allocation] == [4, 4, 2, 2]


@pytest.mark.parametrize("key", ["smt", "smt.a"])
def test_a_pool_gives_whole_cores_if_it_has_them(key: str) -> None:
    """Else an owner's are free ones."""
    world = World(machines.dual_smt())
    of = pod("p", {**WHOLE, key: "full-core"}, total=resources(6, 4))
    world.add(of, "c", 6, 4)
    world.add(of, "a", 2, 1)
    before = world.cpus("p-c") | world.cpus("p-a")
    assert world.update("p-a", resources(4, 1)) is None
    own, topology = world.cpus("p-a"), world.topology
    assert (len(own), len(world.cpus("p-c"))) == (4, 2)
    assert topology.siblings_of(own) == own
    assert (own <= before) == (key == "smt")
