"""Notices: counted where they repeat, numbered, bounded."""

from __future__ import annotations

from nri_numa.observe.notices import LONGEST, MERGE, Notice, Notices, What

NOW = 1_700_000_000.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def add(notices: Notices, n: int = 0, message: str = "no room") -> Notice:
    return notices.add(
        What.REFUSED,
        message,
        namespace="shop",
        pod=f"pod-{n}",
        pod_uid=f"uid-{n}",
        container="main",
        reason="NoRoom",
    )


def test_a_refusal_that_repeats_is_one_notice_with_the_latest_words() -> None:
    clock = Clock()
    notices = Notices(clock)
    first = add(notices)
    clock.now += 10
    again = add(notices, message="still no room")
    assert (again.id, again.count, again.number) == (first.id, 2, 2)
    assert (again.first, again.last) == (NOW, NOW + 10)
    assert [one.message for one in notices.after()] == ["still no room"]


def test_after_a_long_silence_it_is_news() -> None:
    clock = Clock()
    notices = Notices(clock)
    first = add(notices)
    clock.now += MERGE
    later = add(notices)
    assert later.id != first.id
    assert later.count == 1


def test_a_reader_asks_for_what_came_after() -> None:
    notices = Notices(Clock())
    for n in range(3):
        add(notices, n)
    seen = notices.number
    assert notices.after(seen) == []
    add(notices, 1)
    assert [one.pod for one in notices.after(seen)] == ["pod-1"]
    assert [one.number for one in notices.after()] == [1, 3, 4]


def test_the_oldest_make_room_and_are_counted() -> None:
    notices = Notices(Clock(), limit=2)
    for n in range(3):
        add(notices, n)
    assert [one.pod for one in notices.after()] == ["pod-1", "pod-2"]
    assert notices.evicted == 1


def test_a_message_is_not_longer_than_an_event_may_be() -> None:
    assert len(add(Notices(Clock()), message="x" * 5000).message) == LONGEST


def test_everybody_is_told_after_it_was_kept() -> None:
    told: list[str] = []
    notices = Notices(Clock())
    notices.keep = lambda notice: told.append(f"kept {notice.number}")
    notices.tell = lambda: told.append("told")
    add(notices)
    assert told == ["kept 1", "told"]
