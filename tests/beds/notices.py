"""Notices, and the clock that they are dated by."""

from nri_numa.observe.notices import Notice, NoticedEventKind, NoticeLog

NOW = 1_700_000_000.0


class SetClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def add_rejection(notices: NoticeLog, n: int = 0, message: str = "no room") -> Notice:
    return notices.add_notice(
        NoticedEventKind.REJECTED,
        message,
        namespace="shop",
        pod=f"pod-{n}",
        pod_uid=f"uid-{n}",
        container="main",
        reason="NoRoom",
    )
