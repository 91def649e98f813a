"""Own calls that the runtime does not answer: a runtime that hangs says nothing at all.

containerd up to 2.1 hangs for good when a plugin registers while a sandbox is removed together
with containers in it (docs/reliability.md). No pod starts from then on, and no request reaches us,
which looks like a quiet node. What tells is a call of ours: a registration that is not answered.
"""

from __future__ import annotations

from collections.abc import Callable


class AnswerWatch:
    """Calls that wait for the runtime, and since when.

    Args:
        now: seconds of a clock that never jumps.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._since: dict[str, float] = {}

    def called(self, what: str) -> None:
        """A call was made; one that waits already keeps its time, also over a new connection."""
        self._since.setdefault(what, self._now())

    def answered(self, what: str) -> None:
        """The runtime answered, hung up, or is not there: it does not hang."""
        self._since.pop(what, None)

    def waiting(self) -> tuple[str, float]:
        """The call that waits longest, and its seconds; empty and 0 when none does."""
        if not self._since:
            return "", 0.0
        what, since = min(self._since.items(), key=lambda item: item[1])
        return what, self._now() - since
