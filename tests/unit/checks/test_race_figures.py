"""The race bed's arithmetic: what is wrong, for how long."""

from __future__ import annotations

import pytest

from nri_numa.model.cpuset import CPUSet
from tests.checks.race_figures import (
    Sighting,
    overlap_ms,
    wrong_intervals,
)

OWNED = CPUSet.parse("1")


def track(*sightings: tuple[float, str]) -> list[Sighting]:
    return [Sighting(at, CPUSet.parse(cpus)) for at, cpus in sightings]


def test_a_sighting_holds_until_the_next_one() -> None:
    seen = track((1.0, "0-1"), (1.1, "0"), (1.2, "0-1"), (1.3, "0"))
    assert wrong_intervals(seen, OWNED, 0.0, 2.0) == [(1.0, 1.1), (1.2, 1.3)]
    assert overlap_ms([seen], OWNED, 0.0, 2.0) == pytest.approx(200)


def test_only_what_lies_between_the_grant_and_the_last_look_counts() -> None:
    seen = track((1.0, "0-1"), (3.0, "0"))
    assert overlap_ms([seen], OWNED, 2.5, 9.0) == pytest.approx(500)
    assert overlap_ms([seen], OWNED, 0.0, 1.25) == pytest.approx(250)
    assert overlap_ms([seen], OWNED, 4.0, 9.0) == 0


def test_what_is_sure_needs_a_wrong_sighting_at_both_ends() -> None:
    """A look that came late does not make a wrong set last longer than it was seen."""
    seen = track((1.0, "0-1"), (1.1, "0-1"), (3.0, "0"), (3.1, "0-1"))
    assert overlap_ms([seen], OWNED, 0.0, 4.0, sure=True) == pytest.approx(100)
    assert overlap_ms([seen], OWNED, 0.0, 4.0) == pytest.approx(2900)


def test_never_put_right_counts_up_to_the_last_look() -> None:
    assert overlap_ms([track((1.0, "0-1"))], OWNED, 0.5, 2.5) == pytest.approx(1500)


def test_two_neighbours_at_once_count_once() -> None:
    """The owner does not care how many disturb it."""
    one, two = track((1.0, "0-1"), (2.0, "0")), track((1.5, "1"), (2.5, "0"))
    within = track((1.6, "1"), (1.7, "0"))
    assert overlap_ms([one, two, within], OWNED, 0.0, 9.0) == pytest.approx(1500)


def test_other_cpus_and_nobody_at_all_are_no_overlap() -> None:
    assert overlap_ms([track((1.0, "0,2-3"))], OWNED, 0.0, 9.0) == 0
    assert overlap_ms([[], track()], OWNED, 0.0, 9.0) == 0
