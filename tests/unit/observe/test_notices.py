"""Notices: counted where they repeat, numbered, bounded."""

from nri_numa.observe.notices import MAX_NOTICE_MESSAGE_CHARS, MERGE_WINDOW_S, NoticeLog
from tests.beds.notices import SetClock, add_rejection


def test_after_a_long_silence_it_is_news() -> None:
    clock = SetClock()
    notices = NoticeLog(clock)
    first = add_rejection(notices)
    clock.now += MERGE_WINDOW_S
    later = add_rejection(notices)
    assert later.id != first.id
    assert later.count == 1


def test_the_oldest_make_room_and_are_counted() -> None:
    notices = NoticeLog(SetClock(), limit=2)
    for n in range(3):
        add_rejection(notices, n)
    assert [one.pod for one in notices.notices_after()] == ["pod-1", "pod-2"]
    assert notices.evicted == 1


def test_a_message_is_not_longer_than_an_event_may_be() -> None:
    assert (
        len(add_rejection(NoticeLog(SetClock()), message="x" * 5000).message)
        == MAX_NOTICE_MESSAGE_CHARS
    )
