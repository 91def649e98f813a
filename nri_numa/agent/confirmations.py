"""Table of writes that are not confirmed yet, were undone lately, or are abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from enum import Enum, auto
from typing import Final

import msgspec

TRY_COUNT_WINDOW_S: Final = 600.0
"""Seconds in which tries for one container are counted."""


class WriteTarget(Enum):
    """Target of a write."""

    CGROUP = auto()
    """Its cpuset, read back in the cgroup."""
    SYSTEMD = auto()
    """Properties of its scope, read back over D-Bus."""
    PAGES = auto()
    """Pages of its memory; remote ones are counted."""


class Confirmation(msgspec.Struct):
    """State of one container's write.

    Attributes:
        required_at: time when its confirmation was required, by the caller's clock; None once it is
            being checked.
        not_before: monotonic time of the next try.
        tries: monotonic times of repairs that were read back.
        finding: what was read instead, as last reported.
        is_abandoned: True once it was reported that another program keeps undoing it.
        is_without_effect: True once it was reported that the runtime's update changed nothing.
    """

    required_at: float | None = None
    not_before: float = 0.0
    tries: tuple[float, ...] = ()
    finding: str = ""
    is_abandoned: bool = False
    is_without_effect: bool = False

    def recent_tries(self, time_s: float) -> tuple[float, ...]:
        """Return the tries within `TRY_COUNT_WINDOW_S`."""
        return tuple(t for t in self.tries if t > time_s - TRY_COUNT_WINDOW_S)


class Confirmations:
    """The writes of one target, by container.

    Attributes:
        entries: by container id.
        wake: set when a confirmation is required; cleared by the task that checks.
    """

    def __init__(self) -> None:
        self.wake, self.entries = asyncio.Event(), dict[str, Confirmation]()

    def require_confirmation(self, container_ids: Iterable[str], time_s: float) -> None:
        """Require confirmation of these containers, and wake the task that checks."""
        for container_id in container_ids:
            entry = self.get_entry(container_id)
            if entry.required_at is None:
                entry.required_at = time_s
        self.wake.set()

    def required_ids(self) -> Iterator[str]:
        """Return the containers to be confirmed, in the order in which they were required."""
        return (i for i, entry in self.entries.items() if entry.required_at is not None)

    def take_required(self, container_ids: Iterable[str]) -> dict[str, float]:
        """Begin to check these; returns the times at which they were required, by id."""
        required: dict[str, float] = {}
        for container_id in container_ids:
            entry = self.entries.get(container_id)
            if entry is not None and entry.required_at is not None:
                required[container_id], entry.required_at = entry.required_at, None
        self._drop_empty(required)
        return required

    def get_entry(self, container_id: str) -> Confirmation:
        """Return the entry of a container, made if missing."""
        return self.entries.setdefault(container_id, Confirmation())

    def record_finding(self, container_id: str, finding: str) -> bool:
        """Record what was read instead; True if the last finding was another one."""
        entry = self.get_entry(container_id)
        prior_finding, entry.finding = entry.finding, finding
        return prior_finding != finding

    def count_tries(self, container_id: str, time_s: float) -> int:
        """Count its repairs within `TRY_COUNT_WINDOW_S`."""
        entry = self.entries.get(container_id)
        return len(entry.recent_tries(time_s)) if entry else 0

    def retain_drifting(
        self, drifting: Collection[str], live: Collection[str], time_s: float
    ) -> None:
        """Clear findings of containers without drift, and their tries after the window."""
        for container_id, entry in self.entries.items():
            if container_id not in drifting:
                entry.finding, entry.is_without_effect = "", False
                if container_id not in live or not entry.recent_tries(time_s):
                    entry.tries, entry.is_abandoned = (), False
        self._drop_empty(tuple(self.entries))

    def _drop_empty(self, container_ids: Iterable[str]) -> None:
        for container_id in container_ids:
            if self.entries[container_id] == Confirmation():
                del self.entries[container_id]
