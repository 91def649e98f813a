"""Notices, and the clock that they are dated by."""

from nri_numa.observe.notices import Notice, NoticedContainer, NoticedEventKind, NoticeLog

NOW = 1_700_000_000.0


class SetClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def add_rejection(notices: NoticeLog, n: int = 0, message: str = "no room") -> Notice:
    return notices.add_notice(
        NoticedContainer("shop", f"pod-{n}", f"uid-{n}", "main"),
        NoticedEventKind.REJECTED,
        message,
        reason="NoRoom",
    )
