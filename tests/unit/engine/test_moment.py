"""A decision that was made ahead holds as long as everything that it depends on is the same."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from nri_numa.engine.ahead import Moment
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import Settings
from tests.beds.world import World, container, pod, resources
from tests.machines import named as machines

PARTS = sorted({field.name for field in fields(NodeState)} - {"pods", "serial"})
"""A decision looks at its own pod only, which is new, and a serial number decides nothing."""


def moment() -> Moment:
    world = World(machines.snc_smt(), Settings())
    world.synchronize()
    of = pod("own", {"policy": "single-numa-node"})
    world.place(of, container(of, wants=resources(2, 1)))
    return Moment(machine=world.agent.machine, state=world.agent.state, reading=None)


def test_a_moment_lasts_while_pods_come_and_go() -> None:
    then = moment()
    state = replace(then.state, pods={}, serial=then.state.serial + 5)
    assert then.lasts(then.machine, state, None)


@pytest.mark.parametrize("part", PARTS)
def test_a_moment_ends_with_any_part_of_the_state(part: str) -> None:
    then = moment()
    assert not then.lasts(then.machine, replace(then.state, **{part: object()}), None)


def test_a_moment_ends_with_the_machine_and_with_what_the_kernel_says_is_free() -> None:
    then = moment()
    other = Machine(topology=then.machine.topology, settings=then.machine.settings)
    assert not then.lasts(other, then.state, None)
    assert not then.lasts(then.machine, then.state, Reading(memory={0: 1}))
