"""The search for a mask: how wide it must be, and what it does without steps."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.hints import Cover, Steps, best_mask


@pytest.mark.parametrize(
    ("cover", "floor"),
    [
        (Cover(within=0b11, required=0), 1),
        (Cover(within=0b111, required=0b101), 2),
        (Cover(within=0b111, required=0, sums=[({0: 3, 1: 4, 2: 5}, 9)]), 2),
        # No mask will do: one more than there are.
        (Cover(within=0b11, required=0b100), 3),
        (Cover(within=0b11, required=0, sums=[({0: 3, 1: 4}, 8)]), 3),
    ],
)
def test_no_mask_is_narrower_than_the_floor(cover: Cover, floor: int) -> None:
    assert cover.floor() == floor


def test_a_sum_that_the_required_ones_reach_asks_nothing_of_the_others() -> None:
    cover = Cover(within=0b1111, required=0b1, sums=[({0: 5, 1: 1}, 5), ({2: 1, 3: 1}, 2)])
    assert best_mask(cover, 3, None, None, Steps()) == 0b1101
