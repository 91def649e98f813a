"""Case 6 of the policies: an in-place resize never moves a running container."""

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Rejected, Resized
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.state import Charge, ContainerKind
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Rule, Settings
from nri_numa.model.workload import Resources, Strategy
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


# --- Resources that were changed while the plugin was away are caught up with at the next picture


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
