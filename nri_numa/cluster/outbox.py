"""What waits to be written, and when each may be: bounded, fair, no faster than allowed. Pure.

Time is handed in, in seconds of a clock that only grows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0
"""Seconds: the pause after failures doubles from the first to the longest."""

K = TypeVar("K", bound=Hashable)


def pause(failures: int, jitter: float) -> float:
    """Seconds to wait after so many failures in a row.

    Args:
        failures: 1 after the first.
        jitter: from 0 to 1; thousands of nodes must not come back in the same moment.
    """
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    return longest * (0.5 + 0.5 * jitter)


class Bucket:
    """Requests as a token bucket.

    Args:
        rate: per second.
        burst: at once after a quiet time.
        now: the time.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._tokens, self._at = burst, now

    def wait(self, now: float) -> float:
        """Seconds until one more is allowed; 0 when it is."""
        self._fill(now)
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate

    def take(self, now: float) -> None:
        """One is made."""
        self._fill(now)
        self._tokens -= 1

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now


@dataclass(slots=True)
class _Item:
    wanted: object
    sent: object = None
    not_before: float = 0.0
    failures: int = 0

    @property
    def waiting(self) -> bool:
        return self.wanted != self.sent


class Shelf(Generic[K]):
    """Things by key, each wanted in one version, and sent in one.

    Only the newest version of a thing is ever sent. When there are more things than places, one
    that was sent makes room first; when none was, the newcomer finds no place.

    Args:
        places: for so many things.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._items: dict[K, _Item] = {}

    def __len__(self) -> int:
        return sum(item.waiting for item in self._items.values())

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def keys(self) -> list[K]:
        """All things, sent or not."""
        return list(self._items)

    def want(self, key: K, version: object) -> bool:
        """This is what it should be now; False when there is no place for it."""
        item = self._items.get(key)
        if item is not None:
            item.wanted = version
            return True
        if len(self._items) >= self._places:
            done = next((k for k, one in self._items.items() if not one.waiting), None)
            if done is None:
                return False
            del self._items[done]
        self._items[key] = _Item(version)
        return True

    def due(self, now: float) -> Iterator[K]:
        """What may be sent now, the longest waiting first."""
        ready = [(i.not_before, n, k) for n, (k, i) in enumerate(self._items.items()) if i.waiting]
        return (key for not_before, _, key in sorted(ready, key=lambda one: one[:2])
                if not_before <= now)  # fmt: skip

    def next_due(self) -> float:
        """When the next one may be sent; infinity when nothing waits."""
        return min((i.not_before for i in self._items.values() if i.waiting), default=float("inf"))

    def sent(self, key: K, version: object, again_at: float = 0.0) -> None:
        """It is there in this version; a newer one may be sent from ``again_at`` on."""
        if (item := self._items.get(key)) is not None:
            item.sent, item.not_before, item.failures = version, again_at, 0

    def wanted(self, key: K) -> object:
        """What it should be; None for nobody's business."""
        item = self._items.get(key)
        return None if item is None else item.wanted

    def version(self, key: K) -> object:
        """What was sent last; None when nothing was."""
        item = self._items.get(key)
        return None if item is None else item.sent

    def later(self, key: K, now: float, jitter: float) -> int:
        """It could not be sent; returns how often in a row."""
        item = self._items.get(key)
        if item is None:
            return 0
        item.failures += 1
        item.not_before = now + pause(item.failures, jitter)
        return item.failures

    def postpone(self, key: K, until: float) -> None:
        """It may not be sent before."""
        if (item := self._items.get(key)) is not None:
            item.not_before = max(item.not_before, until)

    def undo(self, key: K) -> None:
        """Somebody took it away: it is to be sent again."""
        if (item := self._items.get(key)) is not None:
            item.sent = None

    def drop(self, key: K) -> None:
        """It is nobody's business any more."""
        self._items.pop(key, None)
