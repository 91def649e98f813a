"""Grants, returns, resizes, restarts: what happens to a container after it was placed."""

from functools import partial

import pytest
from msgspec.structs import replace

from nri_numa.engine import admit
from nri_numa.engine.decision import Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import (
    Charge,
    ContainerKind,
    NodeState,
    PodRecord,
    build_node_state,
    state_invariant_violations,
    step_invariant_violations,
)
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Resources
from tests.beds.allocations import allocation
from tests.beds.world import GIB, OWN, PREFIX, SINGLE, World, container, pod, resources
from tests.machines import named as machines

usual = partial(World, machines.single_no_smt())


def test_a_grant_shrinks_the_pool_before_the_reply_and_a_stop_returns_it(world: World) -> None:
    world.put("plain")
    answer = world.admit(pod("own", OWN), wants=resources(2))
    owned = world.cpus("own-app")
    assert answer.updates == (), "the runtime is slow at it"
    assert world.cpus("plain-app") == world.topology.online - owned
    assert world.stop("own-app") == ()
    assert world.has("plain-app")[0] == "0-3"


def test_only_containers_whose_set_changes_are_updated() -> None:
    world = World(machines.dual_no_smt())
    world.put("zero", {**SINGLE, "bind": "cpu"}, 1.5, qos=QoSClass.BURSTABLE)
    world.put("one", {**SINGLE, "bind": "cpu"}, 0.5, qos=QoSClass.BURSTABLE)
    assert not world.cpus("zero-app") & world.cpus("one-app")
    of = pod("own", OWN | {"policy": "single-numa-node"})
    world.sent.clear()
    world.place(of, wants=resources(2))
    assert len(world.sent) == 1


def test_a_failed_start_leaves_nothing_behind(world: World) -> None:
    """Containerd reports no stop for it until it is removed; the next attempt takes its place."""
    world.ends_whole = False
    of = pod("a", OWN)
    before = world.place(of, container(of, wants=resources(2), id="first"))
    assert world.place(of, container(of, wants=resources(2), id="second")) == before
    assert set(world.agent.current.state.allocations) == {"second"}
    assert world.store.documents.keys() >= {"c/second"}
    assert "c/first" not in world.store.documents


@pytest.mark.parametrize("reported", [True, False])
def test_a_creation_that_the_runtime_undid_is_said(world: World, reported: bool) -> None:
    """Another plugin's conflict: containerd reports an end, CRI-O nothing until the next try."""
    world.ends_whole = world.starts = False
    of = pod("a", OWN)
    world.place(of, container(of, wants=resources(2), id="first"))
    if reported:
        world.stop("first")
    else:
        world.place(of, container(of, wants=resources(2), id="second"))
    assert world.count("undone_creations_total") == 1
    (notice,) = world.history.notices.notices_after()
    assert (notice.notice_kind, notice.pod, notice.container) == ("undone", "a", "app")
    assert "not started by the runtime" in notice.message


@pytest.mark.parametrize("started", [True, False])
def test_an_ordinary_end_was_not_undone(world: World, started: bool) -> None:
    """A pod that is deleted before its container starts is no fault of anybody."""
    world.starts, of = started, pod("a", OWN)
    world.place(of, container(of, wants=resources(2)))
    if not started:
        world.agent.stop_pod(of.uid, of.id)
    world.stop("a-app")
    assert world.count("undone_creations_total") == 0


def test_the_same_create_twice_is_one_grant(world: World) -> None:
    of = pod("a", OWN)
    made = container(of, wants=resources(2))
    assert world.place(of, made) == world.place(of, made)
    assert len(world.agent.current.state.exclusive) == 2


def test_removing_a_pod_frees_what_was_never_reported_stopped(world: World) -> None:
    world.put("plain")
    of = pod("own", OWN)
    world.place(of, wants=resources(2, 1))
    world.live.pop("own-app")
    world.remove_pod(of)
    world.remove_pod(of)
    assert not world.agent.current.state.exclusive
    assert world.has("plain-app")[0] == "0-3"


def test_a_removed_sandbox_takes_nothing_from_the_one_that_replaced_it(world: World) -> None:
    """The kubelet makes another sandbox where one died, and removes the former one later."""
    world.ends_whole = False
    former = pod("own", OWN)
    world.place(former, wants=resources(2, 1))
    world.stop("own-app")
    world.agent.stop_pod(former.uid, former.id)
    latter = replace(former, id="another")
    had = world.place(latter, container(latter, wants=resources(2), id="again"))
    world.agent.stop_pod(former.uid, former.id)
    world.remove_pod(former)
    assert set(world.agent.current.state.exclusive) == set(CPUSet.parse(had[0]))
    world.remove_pod(latter)
    assert not world.agent.current.state.exclusive
    assert not world.agent.current.state.pods


# --- resize -----------------------------------------------------------------------------------


def test_best_effort_grows_where_it_is_and_says_what_that_node_lacks() -> None:
    world = World(machines.snc_smt())
    before = world.put("a", {"policy": "best-effort"}, 1.5, 10)
    assert world.update("a-app", resources(40.5, 20)) is None
    assert world.has("a-app") == before
    allocation = world.allocation("a-app")
    assert not allocation.aligned
    assert (allocation.cpu_milli, allocation.memory_bytes) == (40_500, 20 * GIB)
    assert world.agent.current.state.allocated_on(int(before[1])).memory == 20 * GIB
    assert any("memory: 20 GiB needed, " in step for step in world.steps("a-app"))


def test_a_cpuset_from_outside_does_not_move_a_pin() -> None:
    world = World(machines.dual_smt())
    world.put("a", SINGLE, 2, 1)
    before = world.has("a-app")
    assert world.update("a-app", Resources(cpus="5-9", mems="0-1")) is None
    assert world.has("a-app") == before
    assert world.update("a-app", Resources(cpus=before[0], mems=before[1])) is None
    assert world.update("a-app", Resources(cpus="x", mems="y")) is None
    assert world.has("a-app") == before


def test_an_unreadable_cpuset_from_outside_is_left_to_the_runtime(world: World) -> None:
    world.ends_whole = False
    world.put("plain")
    assert world.update("plain-app", Resources(cpus="3-1")) is None
    assert world.allocation("plain-app").kind is ContainerKind.UNPINNED


def test_a_rule_that_became_unreadable_does_not_break_what_runs() -> None:
    world = World(machines.dual_smt())
    of = pod("a", SINGLE)
    world.place(of, wants=resources(2, 1))
    before = world.has("a-app")
    world.pods[of.id] = replace(of, annotations={PREFIX + "policy": "nonsense"})
    assert world.update("a-app", resources(4, 1)) is None
    assert world.has("a-app") == before


def test_update_of_an_unknown_container_is_let_through() -> None:
    world = World(machines.dual_smt())
    of = pod("a")
    outcome = world.agent.update_container(of, container(of), resources(1))
    assert not isinstance(outcome, Rejected)
    assert outcome.container_update is None


# --- resync -----------------------------------------------------------------------------------


def test_what_started_while_we_were_away_is_pinned_and_counted() -> None:
    world = World(machines.dual_smt())
    of = pod("gap", SINGLE)
    world.pods[of.id] = of
    world.live["gap-app"] = replace(
        container(of), resources=replace(resources(2, 1), cpus="no list")
    )
    world.meet(pod("plain"))
    world.synchronize()
    assert len(world.cpus("gap-app")) == 2
    assert not world.cpus("plain-app") & world.cpus("gap-app")
    assert world.count("missed_starts_total") == 2, "the other one could run there"


def test_a_pin_that_was_lost_is_written_again() -> None:
    world = World(machines.dual_smt())
    world.put("own", SINGLE, 2, 1)
    before = world.has("own-app")
    world.unseen("own-app", cpus="0-63", mems="", cpu_quota=200_000)
    (update,) = world.synchronize()
    assert update.cpu_quota == -1
    assert world.has("own-app") == before


def test_a_container_whose_pod_is_unknown_is_no_containers_of_ours() -> None:
    world = World(machines.dual_smt())
    world.ends_whole = False
    world.live["ghost-app"] = container(pod("ghost", SINGLE), wants=resources(2))
    assert world.synchronize() == ()
    assert not world.agent.current.state.allocations


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind":"other"}',
        '{"kind":"exclusive","mems":"x"}',
        "null",
        '{"kind":3}',
        '{"kind":[]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_annotation_is_decided_anew(text: str) -> None:
    world = World(machines.dual_smt())
    of = pod("a", SINGLE)
    made = container(of, wants=resources(2, 1))
    world.meet(of, replace(made, annotations={PREFIX + "assigned": text}))
    world.synchronize()
    assert len(world.cpus("a-app")) == 2


def test_cpus_that_the_machine_lost_are_decided_anew() -> None:
    world = World(machines.dual_no_smt())
    world.put("own", OWN | {"policy": "single-numa-node"}, 2, 1)
    world.topology = machines.single_no_smt()
    world.restart()
    assert world.cpus("own-app") <= world.topology.online


# --- CPUs that come and go --------------------------------------------------------------------


def test_an_offline_cpu_leaves_the_set_and_comes_back(world: World) -> None:
    world.put("plain")
    world.put("own", OWN, 2, 1)
    world.put("list", {"numacpu": "3"})
    before = {i: world.has(i) for i in world.live}
    full = world.topology
    gone = CPUSet([max(world.cpus("own-app"))])
    world.becomes(machines.single_no_smt(offline=gone))
    assert not world.cpus("own-app") & gone
    world.becomes(full)
    assert {i: world.has(i) for i in world.live} == before


def test_who_fell_back_to_the_pool_makes_room_for_the_next_owner(world: World) -> None:
    world.put("plain")
    world.put("own", OWN, 1, 1)
    world.put("listed", {"numacpu": "3"})
    (own,) = world.cpus("own-app")
    offline = CPUSet([own, 3])
    world.becomes(machines.single_no_smt(offline=offline))
    world.put("next", OWN, 1, 1)
    (taken,) = world.cpus("next-app")
    left = CPUSet(range(4)) - offline - CPUSet([taken])
    assert world.cpus("own-app") == world.cpus("listed-app") == world.cpus("plain-app") == left
    world.stop("next-app")
    assert world.cpus("own-app") == world.cpus("listed-app") == left | CPUSet([taken])


# --- disk -------------------------------------------------------------------------------------


def test_a_full_disk_is_counted_once_and_caught_up_later(world: World) -> None:
    world.store.full = True
    of = pod("own", OWN)
    world.place(of, wants=resources(2, 1))
    assert world.agent.current.store.write_problem
    world.stop("own-app")
    world.put("next", OWN, 1, 1)
    world.store.full = False
    world.agent.current.store.retry_or_compact()
    assert set(world.store.documents) >= {"c/next-app"}
    assert "c/own-app" not in world.store.documents
    assert not world.agent.current.store.write_problem
    world.remove_pod(of)
    assert world.restart() == ()


# --- the state's own rules --------------------------------------------------------------------


def test_every_invariant_has_a_sentence() -> None:
    topology = machines.single_no_smt()
    settings = Settings(reserved_cpus=CPUSet([0]))
    good = build_node_state(
        [allocation("a", ContainerKind.EXCLUSIVE, cpus=CPUSet([1]), exclusive=True)]
    )
    assert state_invariant_violations(good, topology, settings) == []
    own = {"exclusive": True}
    twice = build_node_state(
        [
            allocation("a", ContainerKind.EXCLUSIVE, cpus=CPUSet([1, 2]), **own),
            allocation("b", ContainerKind.EXCLUSIVE, cpus=CPUSet([2, 3]), **own),
            allocation("c", ContainerKind.EXCLUSIVE, **own),
            allocation("d", ContainerKind.SHARED),
            allocation("e", ContainerKind.FOREIGN, mems=NUMASet([0])),
            allocation("f", ContainerKind.LISTED, cpus=CPUSet([1])),
        ]
    )
    text = " / ".join(state_invariant_violations(twice, topology, settings))
    for words in (
        "owned twice",
        "must own CPUs",
        "must have NUMA nodes",
        "memory nodes",
        "listed for",
    ):
        assert words in text
    wrong = replace(
        good,
        allocations={"x": good.allocations["a"], "a": good.allocations["a"]},
        pods={"u": PodRecord(uid="u", pod_id="s", containers=frozenset({"gone"}))},
        exclusive=CPUSet(range(5)),
        idle_siblings=CPUSet([4, 9]),
        listed={"q": CPUSet([1])},
        charges={0: Charge(1)},
        shared_groups={3: {"q": None}},
        foreign={3: 1},
    )
    text = " / ".join(state_invariant_violations(wrong, topology, settings))
    for words in (
        "filed under another id",
        "missing from its pod",
        "exclusive: counted as",
        "idle_siblings: counted as",
        "listed: counted as",
        "charges: counted as",
        "shared_groups: counted as",
        "foreign: counted as",
        "remembers containers that are gone",
        "both owned and kept idle",
        "the shared pool is empty",
        "does not exist",
    ):
        assert words in text, words
    step = step_invariant_violations(
        NodeState(), replace(good, exclusive=CPUSet([0])), topology, settings
    )
    assert "reserved CPU 0 was given exclusively" in step


def test_a_broken_rule_is_counted_and_never_stops_us(world: World) -> None:
    world.ends_whole = False
    world.put("plain")
    state = world.agent.current.state
    world.agent.current.restore_state(replace(state, exclusive=CPUSet(range(4))))
    world.stop("plain-app")
    value = world.metrics.registry.get_sample_value("nri_numa_invariant_violations_total")
    assert value
    assert value >= 1


def test_forgetting_what_is_not_there_changes_nothing() -> None:
    state = NodeState()
    machine = NodeModel(topology=machines.single_no_smt(), settings=Settings())
    assert admit.forget_pod(NodeSnapshot(machine, state), "u").state is state
    assert admit.release_container(NodeSnapshot(machine, state), "x").state is state
