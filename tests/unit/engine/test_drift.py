"""Corrections: what counts as drift, what is written, and that any interruption is harmless."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.decision import Admitted
from nri_numa.engine.desired import NodeSnapshot, plan_corrections
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.resync import rebuild_node_state
from nri_numa.engine.state import ContainerKind, NodeState, state_invariant_violations
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import ActualCgroup
from nri_numa.model.settings import Settings
from nri_numa.model.workload import PodTable, QoSClass, Resources
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

TOPOLOGY = machines.snc_single_no_smt()  # 0-3, 4-7


def seen(
    cpus: str = "", mems: str = "", effective: str = "", effective_mems: str = ""
) -> ActualCgroup:
    """A cgroup of version 2 unless the effective sets are given: everything where empty."""
    return ActualCgroup(
        cpus=CPUSet.parse(cpus),
        mems=NUMASet.parse(mems),
        effective_cpus=CPUSet.parse(effective or cpus or "0-7"),
        effective_mems=NUMASet.parse(effective_mems or mems or "0-1"),
    )


def node(*, owner: bool = True) -> World:
    """An unpinned, a listed and a sharing container, and one that owns two CPUs."""
    world = World(TOPOLOGY)
    world.synchronize()
    world.place(pod("free", qos=QoSClass.BEST_EFFORT))
    world.place(pod("listed", {"numacpu": "1", "numamem": "0"}))
    shared = pod("shared", {"policy": "best-effort", "cpus": "shared"}, qos=QoSClass.BURSTABLE)
    world.place(shared, wants=resources(0.5, 1))
    if owner:
        world.place(pod("owner", {"policy": "single-numa-node"}), wants=resources(2, 1))
    return world


def as_meant(world: World) -> dict[str, ActualCgroup]:
    """What the cgroups say when nobody touched them."""
    return {i: seen(*world.has(i)) for i in world.live}


def plan(world: World, observed: dict[str, ActualCgroup]) -> tuple[tuple[str, str, str, bool], ...]:
    corrections = plan_corrections(world.agent.current.desired, observed)
    return tuple((c.container_id, str(c.cpus), str(c.mems), c.is_report_only) for c in corrections)


def test_a_rewritten_cpuset_is_written_back_and_only_the_file_that_differs() -> None:
    world = node()
    observed = {**as_meant(world), "listed-app": seen("0-7", "0")}
    assert plan(world, observed) == (("listed-app", "1", "", False),)
    observed["listed-app"] = seen("1", "1")
    assert plan(world, observed) == (("listed-app", "", "0", False),)
    observed["listed-app"] = seen("", "")
    (correction,) = plan_corrections(world.agent.current.desired, observed)
    assert correction.finding == "cpuset.cpus is empty, desired 1; cpuset.mems is empty, desired 0"
    assert (correction.pod, correction.container) == ("default/listed", "app")
    assert (str(correction.desired_cpus), str(correction.desired_mems)) == ("1", "0")
    update = correction.to_update
    assert (update.container_id, update.cpus, update.mems) == ("listed-app", "1", "0")


def test_a_finding_says_what_differs_and_nothing_else() -> None:
    world = node()
    observed = {
        **as_meant(world),
        "listed-app": seen("1", "1"),
        "shared-app": seen("0-7", "0"),
        "owner-app": replace(seen(*world.has("owner-app")), quota=150_000),
    }
    corrections = plan_corrections(world.agent.current.desired, observed)
    findings = {c.container_id: c.finding for c in corrections}
    assert findings["listed-app"] == "cpuset.mems is 1, desired 0"
    assert findings["shared-app"].startswith("cpuset.cpus is 0-7, desired ")
    assert "mems" not in findings["shared-app"]
    assert findings["owner-app"] == "the CFS quota is 150000 µs, desired none"


def test_what_a_container_may_use_is_known_also_where_it_is_left_alone() -> None:
    world = node(owner=False)
    world.place(pod("pinned", qos=QoSClass.BEST_EFFORT), wants=Resources(cpus="5"))
    desired = world.agent.current.desired
    usable = {i: str(desired.usable_cpus_of(world.allocation(i))) for i in world.live}
    assert usable == {"free-app": "0-7", "listed-app": "1", "shared-app": "0-3", "pinned-app": "5"}
    assert not any(desired.has_all_cpus_offline(world.allocation(i)) for i in world.live)


def test_whoever_runs_on_owned_cpus_comes_first_then_owners_then_by_id() -> None:
    world = node()
    owned = world.cpus("owner-app")
    assert len(owned) == 2
    observed = {
        "listed-app": seen("2", "0"),
        "owner-app": seen("0", "0"),
        "shared-app": seen("0-7"),
        "free-app": seen("0-7"),
    }
    order = [c[0] for c in plan(world, observed)]
    assert order[:2] == ["free-app", "shared-app"]
    assert order[2] == "owner-app"
    assert order[3] == "listed-app"


def test_an_owner_is_not_disturbed_by_its_own_cpus_and_idle_siblings() -> None:
    world = World(machines.single_smt())
    world.place(pod("owner", {"cpus": "exclusive", "smt": "isolate"}), wants=resources(2))
    allocation = world.agent.current.state.allocations["owner-app"]
    everything = str(allocation.cpus | allocation.idle_siblings)
    (correction,) = plan_corrections(world.agent.current.desired, {"owner-app": seen(everything)})
    assert correction.rank == 1
    assert correction.cpus == allocation.cpus


def test_a_cgroup_above_that_takes_cpus_or_memory_is_reported_and_not_fought() -> None:
    world = node()
    above = "kubepods.slice has 3"
    listed = replace(seen("1", "0", effective="3", effective_mems="1"), above=above)
    (correction,) = plan_corrections(world.agent.current.desired, {"listed-app": listed})
    assert correction.is_report_only
    assert correction.to_update.is_empty
    assert correction.finding == (
        "cpuset.cpus is 1 as desired, but a parent cgroup leaves 3 of it "
        "(kubepods.slice has 3); "
        "cpuset.mems is 0 as desired, but a parent cgroup leaves 1 of it"
    )


def test_a_list_that_the_kernel_would_refuse_is_not_written_and_the_reason_is_said() -> None:
    world = node()
    (one,) = plan_corrections(world.agent.current.desired, {"listed-app": seen("0", "1")})
    assert one.without_blocked_lists("", "") is one
    half = one.without_blocked_lists("", "pods has 1")
    assert (str(half.cpus), str(half.mems), half.is_report_only) == ("1", "", False)
    none = one.without_blocked_lists("pods has 0", "pods has 1")
    assert (none.is_report_only, none.obstacle) == (True, "pods has 0; pods has 1")
    assert none.finding == (
        "cpuset.cpus is 0, desired 1; cpuset.mems is 1, desired 0; pods has 0; pods has 1"
    )
    assert (str(none.desired_cpus), str(none.desired_mems)) == ("1", "0")


def test_cpus_that_are_offline_in_a_list_are_no_drift() -> None:
    """The kernel keeps them in cpuset.cpus of version 2, and out of the effective set."""
    world = World(TOPOLOGY)
    world.place(pod("listed", {"numacpu": "1,5"}))
    smaller = machines.snc_single_no_smt(offline=CPUSet.parse("5"))
    world.agent.apply_node_model(NodeModel(topology=smaller, settings=world.settings))
    assert plan(world, {"listed-app": seen("1,5", effective="1")}) == ()


def test_an_unbound_container_is_left_alone_unless_we_narrowed_it() -> None:
    world = node(owner=False)
    assert plan(world, {"free-app": seen("2-3")}) == (), "nobody asked us anything"
    assert plan(world, {"free-app": seen("")}) == ()
    world.place(pod("owner", {"cpus": "exclusive"}), wants=resources(2))
    narrow = world.has("free-app")[0]
    world.stop("owner-app")
    # The update that widened it again may have been lost.
    assert plan(world, {"free-app": seen(narrow)}) == (("free-app", "0-7", "", False),)
    assert plan(world, {"free-app": seen("")}) == ()
    world.place(pod("late", qos=QoSClass.BEST_EFFORT))
    machine, state = world.agent.current.machine, world.agent.current.state
    since = state.allocations["late-app"].assigned_at
    corrections = plan_corrections(
        NodeSnapshot(machine, state, since - 1), {"late-app": seen("2-3")}
    )
    assert corrections == (), "it never knew the narrow pool"


def test_strangers_and_foreign_containers_are_nobodys_business() -> None:
    world = node()
    world.place(pod("foreign"), wants=Resources(cpus="0-1"))
    assert plan(world, {"foreign-app": seen("5"), "unknown": seen("5")}) == ()


def test_a_memory_node_that_went_away_is_no_drift() -> None:
    world = World(TOPOLOGY)
    world.place(pod("listed", {"numacpu": "1", "numamem": "1"}))
    one = machines.single_no_smt()
    world.agent.apply_node_model(NodeModel(topology=one, settings=world.settings))
    assert plan(world, {"listed-app": seen("1", "0")}) == ()


lists = st.sampled_from(["", "0-7", "0", "1", "4-7", "2-3", "7"])
mems = st.sampled_from(["", "0", "1", "0-1"])


@given(st.lists(st.tuples(lists, mems), min_size=4, max_size=4))
def test_single_corrections_put_nobody_on_owned_cpus_and_end(drift: list[tuple[str, str]]) -> None:
    """However a plan is cut off: what is left of it is planned again."""
    world = node()
    (owner,) = (i for i, a in world.agent.current.state.allocations.items() if a.exclusive)
    real = {i: seen(*found) for i, found in zip(sorted(world.live), drift, strict=True)}

    def intruders() -> set[str]:
        owned = world.cpus(owner)
        return {i for i, one in real.items() if i != owner and one.effective_cpus & owned}

    for _ in range(4 * len(real)):
        disturbed = intruders()
        corrections = plan_corrections(world.agent.current.desired, real)
        for one in corrections[:1]:
            was = real[one.container_id]
            now = seen(str(one.cpus) or str(was.cpus), str(one.mems) or str(was.mems))
            real[one.container_id] = now
        assert intruders() <= disturbed
    assert not corrections
    assert not intruders()
    for container_id, observed in real.items():
        cpus, memory = world.has(container_id)
        assert observed.effective_cpus == CPUSet.parse(cpus or "0-7")
        assert observed.effective_mems == NUMASet.parse(memory) or not memory


def test_only_a_quota_that_was_lifted_is_lifted_again() -> None:
    world = node()
    meant = as_meant(world)
    limited = {i: replace(one, quota=200_000) for i, one in meant.items()}
    (correction,) = plan_corrections(world.agent.current.desired, limited)
    assert (correction.container_id, correction.to_update.cpu_quota) == ("owner-app", -1)
    assert (correction.cpus, correction.mems, correction.is_report_only) == (
        NO_CPUS,
        NO_NUMA_NODES,
        False,
    )
    for none in (None, -1, 0):
        free = {i: replace(one, quota=none) for i, one in meant.items()}
        assert plan_corrections(world.agent.current.desired, free) == ()


def test_of_two_containers_with_one_name_the_later_takes_the_place() -> None:
    machine = NodeModel(topology=machines.single_no_smt(), settings=Settings())
    of = pod("twice")
    pods, live = PodTable.from_pods([of]), [container(of, id="a"), container(of, id="b")]
    told = rebuild_node_state(NodeSnapshot(machine, NodeState(), now=7.0), pods, live)
    assert list(told.state.allocations) == ["b"]
    assert told.state.allocations["b"].kind is ContainerKind.UNPINNED
    assert state_invariant_violations(told.state, machine.topology, machine.settings) == []


def test_cpus_that_the_machine_does_not_have_are_decided_anew() -> None:
    """As of a virtual machine that had more."""
    wants, world = resources(3, 1), World(TOPOLOGY)
    pods = [pod(name, {"policy": "single-numa-node"}) for name in ("first", "second")]
    for of in pods:
        world.place(of, wants=wants)
    topology = machines.single_no_smt()
    machine, live = (
        NodeModel(topology=topology, settings=Settings()),
        container(pods[1], wants=wants),
    )
    prior, table = world.agent.current.state, PodTable.from_pods(pods[1:])
    told = rebuild_node_state(NodeSnapshot(machine, prior, now=7.0), table, [live])
    (problem,) = told.problems
    assert problem.endswith("4-6, which the machine does not have: decided anew")
    assert told.state.allocations[live.id].cpus == CPUSet.parse("0-2")


def test_what_a_synchronisation_keeps_grows_with_the_containers_and_not_faster() -> None:
    """A state is made for each stranger; all of them at once would be megabytes."""
    machine = NodeModel(topology=machines.single_no_smt(), settings=Settings())
    kept = []
    for count in (50, 200, 800):
        pods = [pod(f"asks-{n}", {"policy": "best-effort"}) for n in range(count)]
        live = [container(p, wants=resources(0.001)) for p in pods]
        told = rebuild_node_state(
            NodeSnapshot(machine, NodeState(), now=7.0), PodTable.from_pods(pods), live
        )
        assert len(told.missed_starts) == len(told.decisions) == count
        states = {id(d.state): d.state for d in told.decisions if isinstance(d, Admitted)}
        kept.append(sum(len(state.allocations) for state in states.values()))
    assert kept == [0, 0, 0]
