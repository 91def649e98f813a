"""The search for a mask: how wide it must be, and what is required counts."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.hints import (
    Cover,
    Order,
    Quantity,
    ResourceDemand,
    Steps,
    hints_of,
)
from nri_numa.model.cpuset import NUMASet


@pytest.mark.parametrize(
    ("cover", "floor"),
    [
        (Cover(within=0b11, quantities=()), 1),
        (Cover(within=0b111, quantities=(), required=0b101), 2),
        (Cover(within=0b111, quantities=(Quantity(9, {0: 3, 1: 4, 2: 5}),)), 2),
        # No mask will do: one more than there are.
        (Cover(within=0b11, quantities=(Quantity(8, {0: 3, 1: 4}),)), 3),
    ],
)
def test_no_mask_is_narrower_than_the_floor(cover: Cover, floor: int) -> None:
    assert cover.floor() == floor


@pytest.mark.parametrize("size", [4, 12])
def test_a_sum_that_the_required_ones_reach_asks_nothing_of_the_others(size: int) -> None:
    quantities = (Quantity(5, {0: 5, 1: 1}), Quantity(2, {2: 1, 3: 1}))
    cover = Cover(within=0b1111, required=0b1, quantities=quantities)
    assert cover.best(3, Order(range(size)), None, Steps()) == 0b1101


def preferred(sockets: dict[int, int]) -> list[int]:
    """The masks of four NUMA nodes that five CPUs prefer."""
    four = dict.fromkeys(range(4), 4)
    demand = ResourceDemand(resource="cpu", need=5, capacity=four, available=four, sockets=sockets)
    (family,) = hints_of([demand], NUMASet(four), Steps())
    return [mask for mask in range(1, 16) if family.contains(mask) and family.prefers(mask)]


@pytest.mark.parametrize("sockets", [{0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, {8: 1}])
def test_sockets_that_say_nothing_change_nothing(sockets: dict[int, int]) -> None:
    assert preferred(sockets) == preferred({})
