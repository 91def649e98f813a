"""The search for a mask: how wide it must be, and what is required counts."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.hints import (
    ResourceDemand,
    Steps,
    hints_of,
)
from nri_numa.model.cpuset import NUMASet


def preferred(sockets: dict[int, int]) -> list[int]:
    """The masks of four NUMA nodes that five CPUs prefer."""
    four = dict.fromkeys(range(4), 4)
    demand = ResourceDemand(resource="cpu", need=5, capacity=four, available=four, sockets=sockets)
    (family,) = hints_of([demand], NUMASet(four), Steps())
    return [mask for mask in range(1, 16) if family.contains(mask) and family.prefers(mask)]


@pytest.mark.parametrize("sockets", [{0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, {8: 1}])
def test_sockets_that_say_nothing_change_nothing(sockets: dict[int, int]) -> None:
    assert preferred(sockets) == preferred({})
