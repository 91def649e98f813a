"""How much of the machine stays with the shared pool, and which CPUs those are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nri_numa.engine.decision import Machine
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.machine import Topology
from nri_numa.model.settings import CPUAmount, Limits, Settings
from tests.machines import named as machines


def machine(made: Callable[[], Topology], reserved: str = "", **limits: CPUAmount) -> Machine:
    return Machine(
        topology=made(),
        settings=Settings(reserved_cpus=CPUSet.parse(reserved), limits=Limits(**limits)),
    )


@pytest.mark.parametrize(
    ("amount", "cpus"),
    [(CPUAmount(5), 5), (CPUAmount(0), 1), (CPUAmount(percent=10), 25), (CPUAmount(percent=0), 1)],
)
def test_what_is_configured_beats_both(amount: CPUAmount, cpus: int) -> None:
    assert machine(machines.eight_by_32, pool=amount).floor == cpus
    assert machine(machines.eight_by_32, "0-3", pool=amount).floor == cpus
