"""What a thread may have of one CPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nri_numa.agent.loop import CPUShare

SMALL = st.lists(st.floats(0.0001, 0.004), min_size=1, max_size=200)
"""Pieces of work that one pause pays back: 4 ms of a fifth of a CPU are 20 ms."""


def test_what_was_saved_up_is_used_at_once() -> None:
    """An ordinary scrape after seconds of rest is not interrupted."""
    share = CPUShare()
    assert [share.pause(0.0, n / 100) for n in range(5)] == [0.0] * 5
    assert share.pause(0.0, 0.051) == pytest.approx(0.005)


@given(pieces=SMALL)
def test_in_the_long_run_it_gets_its_share_and_no_more(pieces: list[float]) -> None:
    share, now, used = CPUShare(), 0.0, 0.0
    for piece in pieces:
        now += share.pause(now, used)
        now, used = now + piece, used + piece
        assert used <= 0.05 + 0.2 * now + piece


@given(pieces=SMALL)
def test_whoever_needs_less_never_stands_still(pieces: list[float]) -> None:
    share, now, used = CPUShare(), 0.0, 0.0
    for piece in pieces:
        assert share.pause(now, used) == 0.0
        now, used = now + 5.01 * piece, used + piece


def test_a_long_rest_saves_up_no_more_than_a_short_one() -> None:
    share = CPUShare()
    share.pause(0.0, 0.0)
    assert share.pause(3600.0, 0.05) == 0.0
    assert share.pause(3600.0, 0.052) == pytest.approx(0.01)


def test_after_a_long_piece_it_stands_still_once_and_not_for_long() -> None:
    """An import, or a round with a thousand clients: a probe that comes now has a second."""
    share = CPUShare()
    share.pause(0.0, 0.0)
    assert share.pause(3.0, 3.0) == pytest.approx(0.02)
    assert share.pause(3.02, 3.0) == pytest.approx(0.0)
    assert share.pause(3.02, 3.001) == pytest.approx(0.005)


@given(pieces=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=200))
def test_no_pause_is_longer_than_was_said(pieces: list[float]) -> None:
    """So every round of the loop comes, and everybody is served in the end."""
    share, now, used = CPUShare(), 0.0, 0.0
    for piece in pieces:
        pause = share.pause(now, used)
        assert 0.0 <= pause <= 0.020001
        now, used = now + pause + piece, used + piece


def test_whoever_hurries_gets_more_until_there_is_no_reason_any_more() -> None:
    share = CPUShare()
    assert share.pause(0.0, 0.0) == 0.0
    share.hurry = True
    assert share.pause(0.0, 0.052) == pytest.approx(0.004)
    share.hurry = False
    assert share.pause(0.0, 0.052) == pytest.approx(0.01)
