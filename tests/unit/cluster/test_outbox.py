"""What waits, when it may go, and that nothing is faster than allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nri_numa.cluster.outbox import FIRST_PAUSE, LONGEST_PAUSE, Bucket, Shelf, pause


def test_pauses_double_up_to_a_minute_and_are_spread() -> None:
    assert [pause(n, 1.0) for n in (1, 2, 3, 99)] == [1, 2, 4, LONGEST_PAUSE]
    assert pause(1, 0.0) == FIRST_PAUSE / 2


@given(st.lists(st.floats(0, 10), max_size=200), st.floats(0.1, 20), st.integers(1, 20))
def test_never_more_than_rate_and_burst(steps: list[float], rate: float, burst: int) -> None:
    bucket, now, taken = Bucket(rate, burst, 0.0), 0.0, 0
    for step in steps:
        now += step
        while bucket.wait(now) == 0:
            bucket.take(now)
            taken += 1
    assert taken <= burst + rate * now + 1e-6


def test_a_bucket_says_when() -> None:
    bucket = Bucket(2.0, 1, 0.0)
    bucket.take(0.0)
    assert bucket.wait(0.0) == 0.5
    assert bucket.wait(0.5) == 0


def test_only_the_newest_version_is_sent() -> None:
    shelf: Shelf[str] = Shelf(4)
    for version in (1, 2, 3):
        shelf.want("a", version)
    assert list(shelf.due(0.0)) == ["a"]
    shelf.sent("a", 3)
    assert list(shelf.due(0.0)) == []
    assert shelf.next_due() == float("inf")


def test_what_changed_while_it_was_sent_is_sent_again() -> None:
    shelf: Shelf[str] = Shelf(4)
    shelf.want("a", 1)
    shelf.want("a", 2)
    shelf.sent("a", 1, again_at=9.0)
    assert list(shelf.due(8.0)) == []
    assert list(shelf.due(9.0)) == ["a"]


def test_a_failure_does_not_hold_up_the_others() -> None:
    shelf: Shelf[str] = Shelf(4)
    shelf.want("bad", 1)
    shelf.want("good", 1)
    shelf.later("bad", 0.0, 1.0)
    assert list(shelf.due(0.0)) == ["good"]
    assert list(shelf.due(1.0)) == ["good", "bad"]


def test_places_are_bounded_and_what_is_sent_makes_room() -> None:
    shelf: Shelf[int] = Shelf(2)
    assert shelf.want(1, "a")
    assert shelf.want(2, "a")
    assert not shelf.want(3, "a")
    shelf.sent(1, "a")
    assert shelf.want(3, "a")
    assert shelf.keys() == [2, 3]


def test_what_nobody_wants_any_more_does_no_harm() -> None:
    shelf: Shelf[str] = Shelf(2)
    shelf.sent("gone", 1)
    shelf.postpone("gone", 1.0)
    shelf.undo("gone")
    assert shelf.later("gone", 0.0, 0.0) == 0
    assert (shelf.version("gone"), shelf.wanted("gone"), len(shelf)) == (None, None, 0)


def test_what_somebody_took_away_is_sent_again() -> None:
    shelf: Shelf[str] = Shelf(2)
    shelf.want("a", 1)
    shelf.sent("a", 1)
    shelf.undo("a")
    assert list(shelf.due(0.0)) == ["a"]
