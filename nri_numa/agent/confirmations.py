"""Which writes are not confirmed yet, were undone lately, or are given up: one table for all."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from enum import Enum, auto
from typing import Final

import msgspec

TRY_COUNT_WINDOW_S: Final = 600.0
"""Seconds in which tries for one container are counted."""


class WriteTarget(Enum):
    """What is written of a container."""

    CGROUP = auto()
    """Its cpuset, read back in the cgroup."""
    SYSTEMD = auto()
    """Properties of its scope, read back over D-Bus."""
    PAGES = auto()
    """Where its memory is: what is left elsewhere is counted."""


class Confirmation(msgspec.Struct):
    """How far the write of one container is.

    Attributes:
        required_at: since when it is to be confirmed, by the clock of who requires it; None once
            somebody sees to it.
        not_before: monotonic time of the next try.
        tries: monotonic times of repairs that were read back.
        finding: what was there instead, as said last.
        is_abandoned: it was said that another program undoes it again and again.
        is_without_effect: it was said that the runtime took it, and that it is as before.
    """

    required_at: float | None = None
    not_before: float = 0.0
    tries: tuple[float, ...] = ()
    finding: str = ""
    is_abandoned: bool = False
    is_without_effect: bool = False

    def recent_tries(self, now: float) -> tuple[float, ...]:
        """Those within `TRY_COUNT_WINDOW_S`."""
        return tuple(t for t in self.tries if t > now - TRY_COUNT_WINDOW_S)


class Confirmations:
    """The writes of one target, by container.

    Attributes:
        entries: what is remembered of each.
        wake: set when a confirmation is required; cleared by who sees to it.
    """

    def __init__(self) -> None:
        self.wake, self.entries = asyncio.Event(), dict[str, Confirmation]()

    def require(self, container_ids: Iterable[str], now: float) -> None:
        """Have these confirmed, unless they are to be, and wake who does it."""
        for container_id in container_ids:
            entry = self.entry(container_id)
            if entry.required_at is None:
                entry.required_at = now
        self.wake.set()

    def required(self) -> Iterator[str]:
        """Those that are to be confirmed, in the order in which they came."""
        return (i for i, entry in self.entries.items() if entry.required_at is not None)

    def take(self, container_ids: Iterable[str]) -> dict[str, float]:
        """Somebody sees to these now; returns since when those of them are required that are."""
        required: dict[str, float] = {}
        for container_id in container_ids:
            entry = self.entries.get(container_id)
            if entry is not None and entry.required_at is not None:
                required[container_id], entry.required_at = entry.required_at, None
        self._drop_empty(required)
        return required

    def entry(self, container_id: str) -> Confirmation:
        """What is remembered of one."""
        return self.entries.setdefault(container_id, Confirmation())

    def record_finding(self, container_id: str, finding: str) -> bool:
        """Record what is there instead; whether something else was said last."""
        entry = self.entry(container_id)
        prior_finding, entry.finding = entry.finding, finding
        return prior_finding != finding

    def count_tries(self, container_id: str, now: float) -> int:
        """How often it was repaired within `TRY_COUNT_WINDOW_S`."""
        entry = self.entries.get(container_id)
        return len(entry.recent_tries(now)) if entry else 0

    def retain_drifting(self, drifting: Collection[str], live: Collection[str], now: float) -> None:
        """Forget what was said of those that are right again, and after a window their tries."""
        for container_id, entry in self.entries.items():
            if container_id not in drifting:
                entry.finding, entry.is_without_effect = "", False
                if container_id not in live or not entry.recent_tries(now):
                    entry.tries, entry.is_abandoned = (), False
        self._drop_empty(tuple(self.entries))

    def _drop_empty(self, container_ids: Iterable[str]) -> None:
        for container_id in container_ids:
            if self.entries[container_id] == Confirmation():
                del self.entries[container_id]
