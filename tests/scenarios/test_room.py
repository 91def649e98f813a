"""Who would have to be elsewhere so that a refused container fits; nothing moves by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nri_numa.engine.decision import Reading, Refused
from nri_numa.engine.room import MOST_MOVES, make_room
from nri_numa.engine.state import violations
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.machine import Topology
from nri_numa.model.settings import Settings
from nri_numa.model.workload import Device, DeviceRequest, QoSClass, Strategy
from tests.beds.world import GIB, World, container, pod, resources

SINGLE = {"policy": "single-numa-node", "cpus": "exclusive"}


def machine(nodes: int, cores: int, threads: int = 1, gib: int = 16, pages: int = 0) -> Topology:
    return synthetic(
        sockets=nodes, numa_per_socket=1, cores_per_numa=cores, threads=threads, memory_gib=gib,
        hugepages={GIB: pages * GIB} if pages else None,
    )  # fmt: skip


def hint(refusal: Refused) -> str:
    """What the message ends with."""
    _, said, who = refusal.message.partition("; it would fit if ")
    return said.removeprefix("; ") + who


def filled(
    topology: Topology,
    *there: tuple[str, float, float, dict[str, str]],
    strategy: Strategy = Strategy.SPREAD,
    reading: Reading | None = None,
    pages: tuple[str, ...] = (),
) -> World:
    """A node with these pods: name, CPUs, GiB, what they ask for beside one NUMA node."""
    world = World(topology, Settings(strategy=strategy), reading=reading)
    for name, cpus, memory, wishes in there:
        wants = resources(cpus, memory, hugepages={GIB: GIB} if name in pages else None)
        world.place(pod(name, SINGLE | wishes), wants=wants)
    return world


def refused(world: World, cpus: float, memory: float = 1, **wishes: str) -> str:
    of = pod("new", SINGLE | {key.replace("_", "-"): value for key, value in wishes.items()})
    return hint(world.refuse(of, wants=resources(cpus, memory)))


A_AND_B = (("a", 3, 2, {}), ("b", 4, 1, {}))
"""On a NUMA node each: 8 CPUs, of which 5 and 4 are free then."""


def test_the_smaller_one_would_have_to_be_elsewhere() -> None:
    """Bytes count before the number of CPUs."""
    world = filled(machine(2, 8), *A_AND_B)
    before = world.agent.state
    text = (
        "it would fit if default/b/app (4 exclusive CPUs, 1 GiB) were on NUMA node 0 instead of 1"
    )
    assert refused(world, 6) == text
    assert world.agent.state.allocations == before.allocations
    assert refused(world, 12) == refused(world, 6, smt="none") == ""


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
    assert named in refused(filled(machine(2, 8), a, (*b[:3], wishes)), 6)


def test_nor_is_what_has_devices() -> None:
    world = filled(machine(2, 8), A_AND_B[0])
    of = pod("b", SINGLE)
    gpu = DeviceRequest(
        resource="gpu", count=1, devices=(Device(id="g", numa_nodes=frozenset({1})),)
    )
    made = container(of, wants=resources(4, 1))
    world.place(of, replace(made, devices=(gpu,)))
    assert "default/a/app" in refused(world, 6)


def test_bytes_count_before_the_number_and_one_makes_room_for_another() -> None:
    """One container of 8 GiB would do; two of 1 GiB are less to migrate.

    What leaves NUMA node 0 fits nowhere until c leaves NUMA node 2.
    """
    world = filled(
        machine(3, 8), ("a", 4, 1, {}), ("b", 5, 8, {}), ("c", 2, 1, {}), ("e", 4, 8, {})
    )
    assert [world.has(f"{name}-app")[1] for name in "abce"] == ["0", "1", "2", "2"]
    assert refused(world, 5) == (
        "it would fit if default/a/app (4 exclusive CPUs, 1 GiB) were on NUMA node 2 instead of 0"
        " and default/c/app (2 exclusive CPUs, 1 GiB) were on NUMA node 1 instead of 2"
    )


def test_whole_cores_come_together_on_the_same_numa_node() -> None:
    """Nothing has to migrate: only CPUs change."""
    world = World(machine(1, 4, threads=2))
    for name in "abc":
        world.place(pod(name, SINGLE | {"smt": "spread"}), wants=resources(1, 1))
    assert refused(world, 4, smt="full-core") == (
        "it would fit if default/a/app (1 exclusive CPU, 1 GiB) had CPU 5 instead of 0"
    )


def test_what_only_sums_up_is_tried_and_not_said() -> None:
    """Idle siblings take two moves. Whole cores elsewhere are none where each has a thread left."""
    world = World(machine(1, 6, threads=2))
    for name in "abcde":
        world.place(pod(name, SINGLE), wants=resources(1, 0))
    assert refused(world, 3, smt="isolate").count(" had CPU") == 2
    world = World(machine(2, 2, threads=2))
    world.place(pod("a", SINGLE | {"smt": "full-core"}), wants=resources(2, 0))
    for name in "bc":
        world.place(
            pod(name, SINGLE | {"numacpu": {"b": "2", "c": "3"}[name], "policy": "none"}),
            wants=resources(1, 0),
        )
    assert refused(world, 4, smt="full-core") == ""


def test_shared_ones_and_huge_pages_count() -> None:
    shared = {"cpus": "shared"}
    world = filled(
        machine(2, 8, pages=1), ("a", 3.5, 2, shared), ("b", 3.5, 2, shared), pages=("a",)
    )
    wants = resources(6, 1, hugepages={GIB: GIB})
    assert hint(world.refuse(pod("new", SINGLE), wants=wants)) == (
        "it would fit if default/b/app (3.5 CPUs, 2 GiB) were on NUMA node 0 instead of 1"
    )


def test_what_the_kernel_has_free_counts_with_what_leaves() -> None:
    """Both are on NUMA node 0, of which 5 GiB are free."""
    reading = Reading(memory={0: 5 * GIB, 1: 4 * GIB})
    world = filled(machine(2, 8), ("a", 1, 3, {}), ("b", 1, 2, {}), reading=reading)
    assert "default/b/app" in refused(world, 1, 6)
    assert refused(world, 1, 11) == ""
    # What leaves and comes back does not leave its memory to another.
    world.reading = Reading(memory={0: GIB, 1: GIB})
    assert refused(world, 1, 3) == ""


@pytest.mark.parametrize(("names", "found"), [(("one", "two"), ""), (("one",), "default/a/one")])
def test_a_pod_that_is_placed_as_a_whole_is_not_parted(names: tuple[str, ...], found: str) -> None:
    world = World(machine(2, 8))
    wants = resources(4 / len(names), 1)
    of = pod("a", SINGLE | {"scope": "pod"}, total=resources(4, len(names)))
    for name in names:
        world.place(of, container(of, name, wants))
    world.place(pod("b", SINGLE | {"numacpu": "8-9", "policy": "none"}), wants=resources(2, 1))
    text = refused(world, 7, scope="pod")
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
            },
        ),
        st.sampled_from(list(QoSClass)),
    ),
    max_size=14,
)


@given(topology=st.sampled_from(MACHINES), pods=PODS, pack=st.booleans(), still=st.booleans())
@hypothesis_settings(deadline=None)
def test_after_a_plan_everything_holds(
    topology: Topology,
    pods: list[tuple[float, float, dict[str, str], QoSClass]],
    pack: bool,
    still: bool,
) -> None:
    world = World(topology, Settings(strategy=Strategy.PACK if pack else Strategy.SPREAD))
    for number, (cpus, memory, wishes, qos) in enumerate(pods):
        of = pod(f"p{number}", wishes, qos=qos)
        answer = world.create(of, container(of, wants=resources(cpus, memory)))
        if not isinstance(answer, Refused):
            continue
        state, node = world.agent.state, world.agent.machine
        stays = set(list(state.allocations)[::2]) if still else set()
        plan = make_room(node, state, answer, still=stays)
        assert plan == make_room(node, state, answer, still=stays)
        if plan is None:
            continue
        assert violations(plan.state, topology, node.settings) == []
        assert 1 <= len(plan.moves) <= MOST_MOVES
        moved = {move.before.container_id: move for move in plan.moves}
        assert not stays & set(moved)
        after = dict(plan.state.allocations)
        assert after.pop(plan.newcomer.container_id) == plan.newcomer
        assert plan.newcomer.preferred
        for id, before in state.allocations.items():
            now = after.pop(id)
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
            assert now.preferred >= before.preferred
        assert not after
