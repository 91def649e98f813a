"""What the scheduler held: taken where it suits as well, decided again where it does not."""

from __future__ import annotations

import pytest

from nri_numa.engine.admit import admit
from nri_numa.engine.decision import Admitted
from nri_numa.engine.request.annotations import LONGEST_PLACED, placed_for, placed_text, read_placed
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass
from tests.beds.world import PREFIX, World, container, pod, resources
from tests.machines import named as machines

SINGLE = {"policy": "single-numa-node"}


def put(
    world: World, name: str, annotations: dict[str, str], cpus: float, memory: float = 1
) -> str:
    """Place a Guaranteed pod with one container; its memory nodes."""
    of = pod(name, annotations, qos=QoSClass.GUARANTEED)
    return world.add(of, "main", cpus, memory)[1]


def test_what_was_held_is_taken() -> None:
    """By itself the container would go to the other NUMA node."""
    assert put(World(machines.dual_smt()), "a", SINGLE, 4) == "0"
    assert put(World(machines.dual_smt()), "a", {**SINGLE, "placed": '{"main":"1"}'}, 4) == "1"


def test_it_is_decided_again_where_there_is_no_room() -> None:
    world = World(machines.dual_smt())
    put(world, "big", {**SINGLE, "placed": '{"main":"1"}'}, 28)
    assert put(world, "late", {**SINGLE, "placed": '{"main":"1"}'}, 8) == "0"


def test_nothing_wider_is_had_by_it() -> None:
    """It is a preference among NUMA nodes that suit as well, and no way around a policy."""
    for held in ("0-1", "7", "1023"):
        world = World(machines.dual_smt())
        assert put(world, "a", {**SINGLE, "placed": f'{{"main":"{held}"}}'}, 4) in ("0", "1")
    world = World(machines.dual_smt())
    assert put(world, "plain", {"placed": '{"main":"1"}'}, 4) == ""


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", '{"main":3}', '{"main":"x"}', "[" * 100_000, '{"other":"1"}'),
        '{"main":"' + "1," * LONGEST_PLACED + '1"}',
    ],
)
def test_what_cannot_be_read_is_nothing(text: str) -> None:
    assert put(World(machines.dual_smt()), "a", {**SINGLE, "placed": text}, 4) == "0"


def test_with_the_kubelets_ties_it_decides_nothing() -> None:
    world = World(machines.dual_smt(), Settings(kubelet_ties=True))
    assert put(world, "a", {**SINGLE, "placed": '{"main":"1"}'}, 4) == "0"


def test_text_and_back() -> None:
    places = {"b": NUMASet([1]), "a": NUMASet([0, 1]), "none": NO_NUMA_NODES}
    text = placed_text(places)
    assert text == '{"a":"0-1","b":"1"}'
    assert read_placed(text) == {"a": NUMASet([0, 1]), "b": NUMASet([1])}
    assert placed_for({f"{PREFIX}placed": text}, PREFIX[:-1], "b") == NUMASet([1])
    assert placed_for({}, PREFIX[:-1], "b") == NO_NUMA_NODES


def test_it_is_said() -> None:
    """In what explains the container, and as a warning where it came otherwise."""
    world = World(machines.dual_smt())
    for name, cpus in (("first", 28), ("second", 8)):
        of = pod(name, {**SINGLE, "placed": '{"main":"1"}'}, qos=QoSClass.GUARANTEED)
        made = container(of, name="main", wants=resources(cpus, 1))
        found = admit(world.agent.machine, world.agent.state, of, made)
        assert isinstance(found, Admitted)
        said = [step for step in found.trace.steps if "the scheduler held" in step]
        if name == "first":
            assert said == ["the scheduler held NUMA node 1: taken"]
            assert found.warnings == ()
            world.place(of, made)
        else:
            (warning,) = found.warnings
            assert warning == (
                "the scheduler held NUMA node 1, which no longer suits best: placed on NUMA node 0 "
                "instead"
            )
            assert said == [warning]


def test_on_one_numa_node_there_is_nothing_to_choose() -> None:
    world = World(machines.single_smt())
    of = pod("a", {**SINGLE, "placed": '{"main":"0"}'}, qos=QoSClass.GUARANTEED)
    found = admit(
        world.agent.machine, world.agent.state, of,
        container(of, name="main", wants=resources(2, 1)),
    )  # fmt: skip
    assert isinstance(found, Admitted)
    assert found.warnings == ()
