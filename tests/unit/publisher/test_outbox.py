"""What waits, when it may go, and that nothing is faster than allowed."""

from __future__ import annotations

from nri_numa.publisher.outbox import Bucket, Shelf


def test_a_bucket_says_when() -> None:
    bucket = Bucket(2.0, 1, 0.0)
    bucket.take(0.0)
    assert bucket.wait(0.0) == 0.5
    assert bucket.wait(0.5) == 0


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
