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
    shelf[1].done("a")
    assert shelf.want(3, "a")
    assert list(shelf) == [2, 3]
