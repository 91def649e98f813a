"""Who would have to be elsewhere so that a refused container fits, and who moves there."""

import asyncio
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.agent.containers import StartingCpuset
from nri_numa.agent.memory_migration import MemoryMigrator
from nri_numa.agent.view import zones_document
from nri_numa.cluster.cluster_state import AssumedPod, ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.topology_reader import decode_topology
from nri_numa.config import AgentConfig
from nri_numa.engine.assigned import ASSIGNED_KEY, encode_assignment, sign_document
from nri_numa.engine.decision import Admitted, Rejected
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import MeasuredFree
from nri_numa.engine.rebalance import MAX_MOVES, StepwiseSearch, plan_moves
from nri_numa.engine.state import ContainerKind, NodeState, state_invariant_violations
from nri_numa.machine.migration import MigrationStep
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device, DeviceRequest, QoSClass, Strategy
from nri_numa.publisher.topology import build_topology_contents
from nri_numa.scheduler.candidates import VerdictCache, run_to_end
from nri_numa.scheduler.fit import Fit
from tests.beds.objects import PREFIX, single
from tests.beds.objects import container as container_object
from tests.beds.objects import pod as pod_object
from tests.beds.room_cases import (
    A_AND_B,
    MIB,
    MOVABLE,
    SINGLE,
    SteppingClock,
    create_new,
    machine,
    movable_world,
)
from tests.beds.world import GIB, World, container, pod, resources


def hint(rejection: Rejected) -> str:
    """What the message ends with."""
    _, said, who = rejection.message.partition("; it would fit if ")
    return said.removeprefix("; ") + who


def filled(
    topology: Topology,
    *there: tuple[str, float, float, dict[str, str]],
    strategy: Strategy = Strategy.SPREAD,
    reading: MeasuredFree | None = None,
    pages: tuple[str, ...] = (),
) -> World:
    """A node with these pods: name, CPUs, GiB, what they ask for beside one NUMA node."""
    world = World(topology, Settings(strategy=strategy), reading=reading)
    for name, cpus, memory, wishes in there:
        wants = resources(cpus, memory, hugepages={GIB: GIB} if name in pages else None)
        world.place(pod(name, SINGLE | wishes), wants=wants)
    return world


def rejected(world: World, cpus: float, memory: float = 1, **wishes: str) -> str:
    return hint(
        world.rejected(
            "new",
            SINGLE | {key.replace("_", "-"): value for key, value in wishes.items()},
            cpus,
            memory,
        )
    )


def test_the_smaller_one_would_have_to_be_elsewhere() -> None:
    """Bytes count before the number of CPUs."""
    world = filled(machine(2, 8), *A_AND_B)
    before = world.agent.current.state
    text = (
        "it would fit if default/b/app (4 exclusive CPUs, 1 GiB) were on NUMA node 0 instead of 1"
    )
    assert rejected(world, 6) == text
    assert world.agent.current.state.allocations == before.allocations
    assert rejected(world, 12) == rejected(world, 6, smt="none") == ""


@pytest.mark.parametrize(
    ("wishes", "named"),
    [
        ({}, "default/b/app"),
        ({"numacpu": "12-15", "policy": "none"}, "default/a/app"),
        ({"numamem": "1"}, "default/a/app"),
        ({"mempolicy": "bind"}, "default/a/app"),
    ],
)
def test_what_is_tied_to_its_numa_nodes_is_not_named(wishes: dict[str, str], named: str) -> None:
    (a, b) = A_AND_B
    assert named in rejected(filled(machine(2, 8), a, (*b[:3], wishes)), 6)


def test_nor_is_what_has_devices() -> None:
    world = filled(machine(2, 8), A_AND_B[0])
    of = pod("b", SINGLE)
    gpu = DeviceRequest(
        resource="gpu", count=1, devices=(Device(id="g", numa_nodes=frozenset({1})),)
    )
    made = container(of, wants=resources(4, 1))
    world.place(of, replace(made, devices=(gpu,)))
    assert "default/a/app" in rejected(world, 6)


def test_bytes_count_before_the_number_and_one_makes_room_for_another() -> None:
    """One container of 8 GiB would do; two of 1 GiB are less to migrate.

    What leaves NUMA node 0 fits nowhere until c leaves NUMA node 2.
    """
    world = filled(
        machine(3, 8), ("a", 4, 1, {}), ("b", 5, 8, {}), ("c", 2, 1, {}), ("e", 4, 8, {})
    )
    assert [world.has(f"{name}-app")[1] for name in "abce"] == ["0", "1", "2", "2"]
    assert rejected(world, 5) == (
        "it would fit if default/a/app (4 exclusive CPUs, 1 GiB) were on NUMA node 2 instead of 0"
        " and default/c/app (2 exclusive CPUs, 1 GiB) were on NUMA node 1 instead of 2"
    )


def test_whole_cores_come_together_on_the_same_numa_node() -> None:
    """Nothing has to migrate: only CPUs change."""
    world = World(machine(1, 4, threads=2))
    for name in "abc":
        world.put(name, SINGLE | {"smt": "spread"}, 1, 1)
    assert rejected(world, 4, smt="full-core") == (
        "it would fit if default/a/app (1 exclusive CPU, 1 GiB) had CPU 5 instead of 0"
    )


def test_what_only_sums_up_is_tried_and_not_said() -> None:
    """Idle siblings take two moves. Whole cores elsewhere are none where each has a thread left."""
    world = World(machine(1, 6, threads=2))
    for name in "abcde":
        world.put(name, SINGLE, 1, 0)
    assert rejected(world, 3, smt="isolate").count(" had CPU") == 2
    world = World(machine(2, 2, threads=2))
    world.put("a", SINGLE | {"smt": "full-core"}, 2, 0)
    for name in "bc":
        world.put(name, SINGLE | {"numacpu": {"b": "2", "c": "3"}[name], "policy": "none"}, 1, 0)
    assert rejected(world, 4, smt="full-core") == ""


def test_shared_ones_and_huge_pages_count() -> None:
    shared = {"cpus": "shared"}
    world = filled(
        machine(2, 8, pages=1), ("a", 3.5, 2, shared), ("b", 3.5, 2, shared), pages=("a",)
    )
    wants = resources(6, 1, hugepages={GIB: GIB})
    assert hint(world.reject(pod("new", SINGLE), wants=wants)) == (
        "it would fit if default/b/app (3.5 CPUs, 2 GiB) were on NUMA node 0 instead of 1"
    )


def test_what_the_kernel_has_free_counts_with_what_leaves() -> None:
    """Both are on NUMA node 0, of which 5 GiB are free."""
    reading = MeasuredFree(memory={0: 5 * GIB, 1: 4 * GIB})
    world = filled(machine(2, 8), ("a", 1, 3, {}), ("b", 1, 2, {}), reading=reading)
    assert "default/b/app" in rejected(world, 1, 6)
    assert rejected(world, 1, 11) == ""
    # What leaves and comes back does not leave its memory to another.
    world.reading = MeasuredFree(memory={0: GIB, 1: GIB})
    assert rejected(world, 1, 3) == ""


@pytest.mark.parametrize(("names", "found"), [(("one", "two"), ""), (("one",), "default/a/one")])
def test_a_pod_that_is_placed_as_a_whole_is_not_parted(names: tuple[str, ...], found: str) -> None:
    world = World(machine(2, 8))
    wants = resources(4 / len(names), 1)
    of = pod("a", SINGLE | {"scope": "pod"}, total=resources(4, len(names)))
    for name in names:
        world.place(of, container(of, name, wants))
    world.put("b", SINGLE | {"numacpu": "8-9", "policy": "none"}, 2, 1)
    text = rejected(world, 7, scope="pod")
    assert found in text if found else not text


MACHINES = [machine(2, 4), machine(4, 4, gib=4), machine(2, 4, threads=2)]
PODS = st.lists(
    st.tuples(
        st.sampled_from([0.5, 1, 2, 3]),
        st.sampled_from([0, 0.5, 1, 3]),
        st.fixed_dictionaries(
            {"policy": st.sampled_from(["best-effort", "restricted", "single-numa-node"])},
            optional={
                "smt": st.sampled_from(["any", "spread", "full-core", "isolate"]),
                "scope": st.sampled_from(["container", "pod"]),
                "bind": st.sampled_from(["cpu", "cpu+mem"]),
                "on-failure": st.just("reject"),
                "movable": st.just("true"),
            },
        ),
        st.sampled_from(list(QoSClass)),
    ),
    max_size=14,
)


AWAY_AND_BACK = [
    (2, 3, {"policy": "single-numa-node"}, QoSClass.GUARANTEED),
    (2, 1, {"policy": "restricted", "cpus": "shared"}, QoSClass.GUARANTEED),
    (0.5, 3, {"policy": "best-effort", "movable": "true"}, QoSClass.GUARANTEED),
    (3, 3, {"policy": "single-numa-node", "cpus": "shared"}, QoSClass.BURSTABLE),
]
"""The last would fit only while the third, which goes back to its place, is nowhere."""


@given(st.sampled_from(MACHINES), PODS, st.booleans(), st.booleans(), st.booleans())
@hypothesis_settings(deadline=None)
def test_after_a_plan_everything_holds(
    topology: Topology,
    pods: list[tuple[float, float, dict[str, str], QoSClass]],
    pack: bool,
    still: bool,
    running: bool,
) -> None:
    world = World(topology, Settings(strategy=Strategy.PACK if pack else Strategy.SPREAD))
    for number, (cpus, memory, wishes, qos) in enumerate(pods):
        of = pod(f"p{number}", wishes, qos=qos)
        answer = world.create(of, container(of, wants=resources(cpus, memory)))
        if not isinstance(answer, Rejected):
            continue
        state, node = world.agent.current.state, world.agent.current.machine
        stays = set(list(state.allocations)[::2]) if still else set()
        at = NodeSnapshot(node, state)
        plan, again = (
            StepwiseSearch(plan_moves(at, answer, exempt=stays, running=running)).run_steps(10**6)
            for _ in range(2)
        )
        assert plan == again
        if plan is None:
            continue
        if running:
            for i, most in node.usable_memory.items():
                charged = plan.state.allocated_on(i).memory
                assert charged <= max(most, state.allocated_on(i).memory)
        assert state_invariant_violations(plan.state, topology, node.settings) == []
        assert 1 <= len(plan.moves) <= MAX_MOVES
        moved = {move.before.container_id: move for move in plan.moves}
        assert not stays & set(moved)
        after = dict(plan.state.allocations)
        newcomer = plan.admitted.allocation
        assert after.pop(newcomer.container_id) == newcomer
        assert newcomer.aligned
        for id, before in state.allocations.items():
            now = after.pop(id).with_migration_finished
            if id not in moved:
                assert now == before
                continue
            assert len(now.numa_nodes | now.mems) == 1
            assert (now.kind, len(now.cpus), now.policy) == (
                before.kind,
                len(before.cpus),
                before.policy,
            )
            assert bool(now.mems) == bool(before.mems)
            assert now.aligned >= before.aligned
        assert not after


# --- it happens -----------------------------------------------------------------------------------


def booked(world: World) -> dict[int, int]:
    return {i: charge.memory // GIB for i, charge in world.agent.current.state.charges.items()}


@pytest.mark.parametrize("reading", [None, MeasuredFree(memory={0: 14 * GIB, 1: 13 * GIB})])
def test_a_movable_container_makes_room(reading: MeasuredFree | None) -> None:
    """Its CPUs at once; its memory is booked on both sides until it has moved, over a restart."""
    (a, b) = A_AND_B
    world = movable_world((*a[:3], {"movable": "false"}), b, reading=reading)
    world.ends_whole = False
    world.put("free", {}, qos=QoSClass.BEST_EFFORT)
    answer = create_new(world)
    assert isinstance(answer, Admitted)
    assert world.has("new-app") == ("8-13", "1")
    assert world.has("b-app") == ("3-6", "0-1")
    assert world.live["free-app"].resources.cpus == "7,14-15"
    assert booked(world) == {0: 3, 1: 2}
    reason = world.allocation("new-app").reason
    assert reason.endswith("; fits after moving default/b/app (1 GiB) from NUMA node 1 to 0")
    moved = world.allocation("b-app")
    assert moved.reason.endswith("; moved to make room for default/new/app")
    world.restart()
    assert world.has("b-app") == ("3-6", "0-1")
    assert world.allocation("b-app").migrating_from == NUMASet([1])
    # A new size leaves both sides as they are.
    world.agent.update_container(world.pods["sandbox-b"], world.live["b-app"], resources(4, 2))
    assert booked(world) == {0: 4, 1: 2}
    wanted = world.agent.finish_migration("b-app")
    # Not its CPUs: those of one that shares may be another's before the kernel is through.
    assert (wanted.cpus, wanted.mems, booked(world)) == ("", "0", {0: 4, 1: 1})
    assert (
        state_invariant_violations(world.agent.current.state, world.topology, world.settings) == []
    )


def test_only_cpus_move_on_one_numa_node() -> None:
    world = World(machine(1, 4, threads=2), Settings(rebalance_moves=1))
    world.agent.containers.moves_memory = True
    for name in "abc":
        asks = SINGLE | MOVABLE | {"smt": "spread"}
        world.put(name, asks, 1, 1)
    of = pod("new", SINGLE | {"smt": "full-core"})
    assert isinstance(world.create(of, container(of, wants=resources(4, 1))), Admitted)
    assert world.has("a-app") == ("5", "0")
    (notice,) = world.history.notices.notices_after()
    assert notice.message == "moved from CPU 0 to 5 to make room for default/new/app"


def test_what_is_only_observed_is_rejected_once_and_known() -> None:
    world = movable_world(*A_AND_B, moves=0, observe=True)
    assert create_new(world) is None
    assert (world.history.rejected_count, world.allocation("new-app").kind) == (
        1,
        ContainerKind.UNPINNED,
    )
    assert world.steps("new-app") == (world.history.rejections[0].message,)
    assert world.count("missed_starts_total") == 0


@pytest.mark.parametrize(
    ("moves", "b", "memory", "said"),
    [
        (0, {}, 1, "default/b/app (4 exclusive CPUs, 4 GiB) were on NUMA node 0 instead of 1"),
        (2, {"movable": "false"}, 1, "default/b/app (4 exclusive CPUs, 4 GiB) were movable"),
        (2, {"numamem": "1"}, 1, ""),
        (
            2,
            {},
            13,
            "instead of 1; all are movable, but their memory becomes free only after the move",
        ),
        (2, {"movable": "false"}, 13, "(4 exclusive CPUs, 4 GiB) were on NUMA node 0 instead of 1"),
    ],
)
def test_it_is_rejected_as_before_and_says_what_is_in_the_way(
    moves: int, b: dict[str, str], memory: float, said: str
) -> None:
    there = (("a", 3, 12, {"numamem": "0"}), ("b", 4, 4, b))
    world = movable_world(*there, moves=moves)
    before = world.agent.current.state
    answer = create_new(world, memory=memory)
    assert isinstance(answer, Rejected)
    assert hint(answer).endswith(said)
    assert bool(hint(answer)) is bool(said)
    assert world.agent.current.state.allocations == before.allocations


@given(st.sampled_from(MACHINES), PODS, st.integers(1, 3))
@example(machine(2, 4, gib=4), AWAY_AND_BACK, 3)
@hypothesis_settings(deadline=None, max_examples=3 * hypothesis_settings().max_examples)
def test_made_movable_it_fits(
    topology: Topology, pods: list[tuple[float, float, dict[str, str], QoSClass]], moves: int
) -> None:
    """What is said to be in the way is elsewhere then, or has other CPUs."""
    world = World(topology, Settings(rebalance_moves=moves))
    world.agent.containers.moves_memory = True
    for number, (cpus, memory, wishes, qos) in enumerate(pods):
        of = pod(f"p{number}", wishes, qos=qos)
        made, agent = container(of, wants=resources(cpus, memory)), world.agent
        answer = world.create(of, made)
        text = hint(answer) if isinstance(answer, Rejected) else ""
        assert "instead of ." not in text
        if not text.endswith("were movable"):
            continue
        named = set(re.findall("default/(p[0-9]+)/app", text))
        there = {
            i: replace(a, movable=a.movable or a.pod in named)
            for i, a in agent.current.state.allocations.items()
        }
        agent.current.state = replace(agent.current.state, allocations=there)
        assert isinstance(world.create(of, made), Admitted), text


@pytest.mark.parametrize(("moves", "b", "fits"), [(2, 4, ["n"]), (0, 4, []), (2, 6, [])])
def test_the_extender_sends_pods_where_room_is_made(moves: int, b: int, fits: list[str]) -> None:
    """Last of all nodes, for one container on one NUMA node, and none while another comes."""
    world = movable_world(A_AND_B[0], ("b", b, 1, {}), moves=moves)
    found = zones_document(NodeSnapshot(world.agent.current.machine, world.agent.current.state))
    nodes = ClusterState(PREFIX)
    for name in ("n", "empty"):
        nodes.update_resources(
            name, decode_topology(build_topology_contents(PREFIX, found), PREFIX)
        )
        found = zones_document(NodeSnapshot(world.agent.current.machine, NodeState()))
    judges = VerdictCache(nodes, Strategy.SPREAD, filter_to_best=True)
    request = PodReader(AgentConfig()).read_pod_request
    asked = request(single(6))
    assert judges.filter_nodes(asked, ["n"]).feasible == fits
    assert judges.filter_nodes(asked, ["n", "empty"]).feasible == ["empty"]
    assert dict(run_to_end(judges.prioritize_steps(asked, ["n"])))["n"] == 0
    two = pod_object(container_object("a", "6"), container_object("b", "2"), **SINGLE)
    assert judges.filter_nodes(request(two), ["n"]).feasible == []
    if fits:
        there = judges.evaluate_node(asked, "n")
        assert isinstance(there, Fit)
        coming = request(single(1, name="coming"))
        nodes.assume_pod(
            AssumedPod(
                request=coming, node="n", charge=there.pod_charge, assumed_at=0, expires_at=9
            )
        )
        assert judges.filter_nodes(asked, ["n"]).feasible == []
        assert nodes.update_resources(
            "n", decode_topology(build_topology_contents(PREFIX, found), PREFIX)
        )
    assert isinstance(create_new(world), Admitted if fits else Rejected)
    still = zones_document(
        NodeSnapshot(world.agent.current.machine, world.agent.current.state),
        immovable_ids=["a-app", "b-app"],
    )
    assert {zone.exclusive_cpus_after_moves for zone in still.zones} == {None}


def test_what_starts_has_huge_pages_or_is_the_kubelets_stays() -> None:
    a, b = (("a", 3, 1, {"movable": "false"}), ("b", 4, 1, {}))
    world = movable_world(a, b)
    world.agent.containers.starting["b-app"] = StartingCpuset("", "")
    assert isinstance(create_new(world), Rejected)
    world = movable_world(a, b)
    world.agent.containers.moves_memory = False
    assert isinstance(create_new(world), Rejected)
    world = movable_world(a, b)
    world.kubelet({("b", "app"): "8-11"})
    assert isinstance(create_new(world), Rejected)


def test_a_pod_is_still_admitted_whole() -> None:
    """Room for its first container alone is none."""
    world = movable_world(*A_AND_B)
    others = {"container-resources": '{"app":{"cpu":"6"},"other":{"cpu":"6"}}'}
    of = pod("new", SINGLE | others, total=resources(12, 2))
    answer = world.create(of, container(of, wants=resources(6, 1)))
    assert isinstance(answer, Rejected)
    assert set(world.agent.current.state.allocations) == {"a-app", "b-app"}


def test_a_list_does_not_move_and_says_so() -> None:
    world = movable_world()
    answer = world.admit(pod("listed", MOVABLE | {"numacpu": "0-1"}), wants=resources(2, 1))
    assert answer.warnings == (
        "movable: true has no effect, because a container with a list is not moved",
    )
    assert not answer.allocation.movable
    assert world.admit(pod("free", MOVABLE), wants=resources(2, 1)).warnings == ()


def test_without_the_checkpoint_it_is_still_on_its_way() -> None:
    """By what its cgroup carries, of an agent that also moved ahead of need as well."""
    world = movable_world(*A_AND_B)
    create_new(world)
    before, made = world.allocation("b-app"), world.live["b-app"]
    text = encode_assignment(before, made.resources.cpus, b"")
    text = sign_document(f'{text[:-1]},"ahead":true', "b-app", world.key)
    carried = {f"{PREFIX}/{ASSIGNED_KEY}": text}
    world.live["b-app"] = replace(made, annotations={**made.annotations, **carried})
    world.restart(lost=True)
    after = world.allocation("b-app")
    assert (after.movable, after.migrating_from, after.mems) == (
        True,
        NUMASet([1]),
        NUMASet([0, 1]),
    )
    assert (after.charges, world.has("new-app")) == (before.charges, ("8-13", "1"))


def test_one_that_stays_though_the_sums_said_otherwise_is_charged_as_it_stays() -> None:
    """An idle sibling was free by the sums, and is none: its memory was not booked for staying."""
    world = World(machine(2, 4, threads=2), Settings(rebalance_moves=3))
    world.agent.containers.moves_memory = True
    shared, isolate = {"cpus": "shared"}, {"smt": "isolate"}
    one = [(2, 0, {}), (3, 3, {}), (3, 3, {}), (2, 1, {}), (2, 3, {"smt": "any"}), (1, 1, shared)]
    for number, (cpus, memory, wishes) in enumerate([*one, (0.5, 3, {})]):
        asks = {"policy": "single-numa-node"} | MOVABLE | wishes
        world.put(f"p{number}", asks, cpus, memory)
    of = pod("new", SINGLE | isolate)
    assert isinstance(world.create(of, container(of, wants=resources(1, 3))), Admitted)
    assert (
        state_invariant_violations(world.agent.current.state, world.topology, world.settings) == []
    )


def test_each_move_is_timed_by_itself() -> None:
    """The smaller one moves, and an hour later back."""
    world, clock = movable_world(("a", 5, 2, {}), ("b", 2, 1, {})), SteppingClock()
    world.ends_whole = False
    world.synchronize()

    def said() -> str:
        return "".join(
            n.message for n in world.history.notices.notices_after() if " in " in n.message
        )

    async def live() -> None:
        world.agent.current.clock = clock
        mover = MemoryMigrator(world.agent)
        world.agent.containers.moves_memory = True
        work = asyncio.create_task(mover.run_migrations())
        for over, name, cpus, where in (
            ((), "first", 7, "1 to 0"),
            (("first", "a"), "second", 2, "1 to 0"),
            ((), "third", 7, "0 to 1"),
        ):
            for one in over:
                world.stop(f"{one}-app")
                world.remove_pod(pod(one, SINGLE))
            world.put(name, SINGLE, cpus, 1)
            while where not in said():
                await asyncio.sleep(0.002)
            assert said().startswith(f"moved from NUMA node {where} in 0.0 s to make room for")
            clock.passed += 3600.0
        work.cancel()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "nri_numa.agent.memory_migration.migrate_pages",
            lambda *_: iter([MigrationStep(MIB, 0)]),
        )
        asyncio.run(live())


# --- what goes on after the answer ----------------------------------------------------------------

TRY_WORK = 400
"""Units of work: more than an admission on two NUMA nodes of eight CPUs, and less than a plan."""


class DeferredWorld:
    """A world whose deferred tasks wait for `round`, as in a loop; a request has little work."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch, **limits: int) -> None:
        for name, limit in ({"SEARCH_UNITS_PER_PIECE": 1} | limits).items():
            patch.setattr(f"nri_numa.agent.room_searches.{name}", limit)
        patch.setattr("nri_numa.engine.rebalance.MAX_SEARCH_WORK", TRY_WORK)
        self.world, self.rounds = world, 0
        self.tasks: list[Callable[[], object]] = []
        world.ends_whole = False
        world.timing.later = self.tasks.append

    def round(self) -> bool:
        tasks, self.tasks[:] = self.tasks[:], []
        for task in tasks:
            task()
        self.rounds += 1
        return bool(self.tasks)

    def ends(self) -> list[str]:
        """What is noted of room by the time when nothing waits any more."""
        while self.round():
            assert self.rounds < 300
        return [
            n.message for n in self.world.history.notices.notices_after() if n.notice_kind == "room"
        ]


def test_a_search_without_work_in_a_request_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces: the refusal says nothing of it, and the next try finds the room."""
    (a, b) = A_AND_B
    world = movable_world((*a[:3], {"movable": "false"}), b)
    later = DeferredWorld(world, monkeypatch)
    answer = create_new(world)
    assert isinstance(answer, Rejected)
    assert (answer.is_search_spent, answer.room_text) == (True, "")
    text = "fits after moving default/b/app (1 GiB) from NUMA node 1 to 0"
    assert later.ends() == [text]
    assert later.rounds > 3
    assert world.history.rejections[0].message == f"{answer.message}; {text}"
    assert world.has("b-app") == ("3-6", "0-1")
    assert world.allocation("b-app").reason.endswith("; moved to make room for default/new/app")
    world.check()
    assert isinstance(create_new(world), Admitted)
    assert world.has("new-app") == ("8-13", "1")


@pytest.mark.parametrize(
    ("moves", "b", "memory", "said"),
    [
        (2, {"movable": "false"}, 1, "default/b/app (4 exclusive CPUs, 4 GiB) were movable"),
        (0, {"movable": "false"}, 1, ""),
        (2, {}, 13, ""),
        (2, {"movable": "false"}, 13, ""),
    ],
)
def test_what_is_in_the_way_is_said_later_where_it_would_move(
    monkeypatch: pytest.MonkeyPatch, moves: int, b: dict[str, str], memory: float, said: str
) -> None:
    text = [f"it would fit if {said}"] if said else []
    world = movable_world(("a", 3, 12, {"numamem": "0"}), ("b", 4, 4, b), moves=moves)
    later = DeferredWorld(world, monkeypatch)
    before = world.agent.current.state
    answer = create_new(world, memory=memory)
    assert isinstance(answer, Rejected)
    assert hint(answer) == ""
    assert later.ends() == text
    assert world.history.rejections[0].message == "; ".join([answer.message, *text])
    assert world.agent.current.state.allocations == before.allocations


def test_a_search_is_about_one_state_and_ends_with_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    (a, b) = A_AND_B
    there = (*a[:3], {"movable": "false"}), b
    world = movable_world(*there)
    later = DeferredWorld(world, monkeypatch)
    create_new(world)
    later.round()
    world.put("c", SINGLE, 1, 1)  # it begins anew
    assert len(later.ends()) == 1
    for changes in ("it begins too often", "it moves no more", "it is gone", "it is placed"):
        world = movable_world(*there)
        later = DeferredWorld(world, monkeypatch)
        create_new(world)
        for n in range(4):
            later.round()
            if changes == "it begins too often":
                world.put(f"c{n}", {}, qos=QoSClass.BEST_EFFORT)
        if changes == "it moves no more":
            world.agent.containers.unconfirmed_ids.add("b-app")
        elif changes == "it is gone":
            world.remove_pod(pod("new", SINGLE))
        elif changes == "it is placed":
            world.put("new", SINGLE, 1, 1)
        assert later.ends() == [], changes
        assert world.has("b-app")[1] == "1"


def test_there_is_no_search_where_one_try_is_too_much_or_another_container_is_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = movable_world(*A_AND_B)
    of = pod(
        "whole",
        SINGLE | {"container-resources": '{"app":{"cpu":"2"},"other":{"cpu":"6"}}'},
        total=resources(8, 1),
    )
    answer = world.create(of, container(of, wants=resources(2, 1)))
    assert isinstance(answer, Rejected)
    assert (answer.is_about_later_container, answer.is_search_spent) == (True, False)
    later = DeferredWorld(world, monkeypatch)
    monkeypatch.setattr("nri_numa.engine.rebalance.MAX_SEARCH_WORK", 100)
    answer = create_new(world)
    assert isinstance(answer, Rejected)
    assert (answer.is_search_spent, later.ends()) == (False, [])


def test_of_many_searches_the_oldest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = movable_world(*A_AND_B)
    later = DeferredWorld(world, monkeypatch, MAX_WAITING_SEARCHES=1)
    for name in ("first", "second"):
        world.rejected(name, SINGLE, 6, 1)
    assert len(later.ends()) == 1
    assert [" fits " in one.message for one in world.history.rejections] == [False, True]


def test_movers_that_differ_by_little_are_one() -> None:
    """A page more or less made another plan of each; whether it was tried is seen by the work."""
    work = []
    for page in (0, 1 / (1 << 18)):
        world = World(machine(2, 8, threads=2))
        for n in range(16):
            world.put(f"p{n}", SINGLE | {"smt": "spread"}, 1, 0.5 + n * page)
        answer = world.rejected("new", SINGLE | {"smt": "isolate"}, 9, 1)
        search = StepwiseSearch(plan_moves(world.agent.current.desired, answer))
        assert search.run_steps(10**6) is None
        work.append(search.used)
    assert work[0] == work[1]
