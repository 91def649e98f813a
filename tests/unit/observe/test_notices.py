"""Notices: counted where they repeat, numbered, bounded."""

from __future__ import annotations

from nri_numa.observe.notices import (
    MAX_NOTICE_MESSAGE_CHARS,
    MERGE_WINDOW_S,
    Notice,
    NoticedEventKind,
    NoticeLog,
)

NOW = 1_700_000_000.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def add(notices: NoticeLog, n: int = 0, message: str = "no room") -> Notice:
    return notices.add_notice(
        NoticedEventKind.REJECTED,
        message,
        namespace="shop",
        pod=f"pod-{n}",
        pod_uid=f"uid-{n}",
        container="main",
        reason="NoRoom",
    )


def test_after_a_long_silence_it_is_news() -> None:
    clock = Clock()
    notices = NoticeLog(clock)
    first = add(notices)
    clock.now += MERGE_WINDOW_S
    later = add(notices)
    assert later.id != first.id
    assert later.count == 1


def test_the_oldest_make_room_and_are_counted() -> None:
    notices = NoticeLog(Clock(), limit=2)
    for n in range(3):
        add(notices, n)
    assert [one.pod for one in notices.notices_after()] == ["pod-1", "pod-2"]
    assert notices.evicted == 1


def test_a_message_is_not_longer_than_an_event_may_be() -> None:
    assert len(add(NoticeLog(Clock()), message="x" * 5000).message) == MAX_NOTICE_MESSAGE_CHARS
