"""One Node's capacity out of what several sources say, and when its annotation is written. Pure.

Each source has a value of its own for each NUMA node, which counts as long as it is valid; of
several the lowest counts: whoever knows of less is right. The values of a source are averaged over
time, and a factor is written again when it is different by more than the hysteresis: a source that
says something else every second moves nobody every second. Where nothing lowers a node, it has no
annotation.

Time is handed in, in seconds of a clock that only grows; `wall` is Unix time, for what is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nri_numa.offline_capacity import OfflineCapacity

END: Final = 0.005
"""An average that is so near to what the source says is there: an average alone never arrives."""
DIGITS: Final = 3
"""Decimals of what is written; a thousandth of a NUMA node is less than a CPU."""
RENEW: Final = 0.5
"""Part of the validity that is left when an unchanged value is written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How values are judged.

    Attributes:
        validity: seconds that a value counts which its source does not repeat.
        keep_last: whether the last value counts on when all sources are silent.
        smoothing: seconds of the average's time constant; 0 for none.
        hysteresis: what is written changes by so much at least.
        least_time: seconds between two changes of a Node's annotation at least.
    """

    validity: float
    keep_last: bool = False
    smoothing: float = 0.0
    hysteresis: float = 0.0
    least_time: float = 0.0


@dataclass(slots=True)
class _Value:
    said: float
    average: float
    at: float
    until: float


@dataclass(slots=True)
class NodeCapacity:
    """What is known of one Node.

    Attributes:
        written: what the annotation says, as far as known; None for no annotation.
    """

    rules: Rules
    written: OfflineCapacity | None = None
    _values: dict[tuple[str, int], _Value] = field(default_factory=dict)
    _changed_at: float = -math.inf
    _last: OfflineCapacity | None = None
    _heard: bool = False
    _withdrawn: bool = False

    def offer(
        self, source: str, zones: Mapping[int, float], now: float, validity: float | None = None
    ) -> None:
        """A source says this now of these NUMA nodes, and nothing of the others."""
        self._heard, self._withdrawn = True, False
        until = now + (self.rules.validity if validity is None else validity)
        for key in [k for k in self._values if k[0] == source and k[1] not in zones]:
            del self._values[key]
        for i, said in zones.items():
            value = self._values.get((source, i))
            if value is None or value.until <= now:
                self._values[source, i] = _Value(said, said, now, until)
                continue
            value.average = self._average(value, now)
            value.said, value.at, value.until = said, now, until

    def withdraw(self, source: str) -> None:
        """A source has nothing to say any more, which is not the same as being silent."""
        for key in [k for k in self._values if k[0] == source]:
            del self._values[key]
            self._withdrawn = True

    def _average(self, value: _Value, now: float) -> float:
        """The average of a value up to now: what was said last counts for the time since then."""
        if self.rules.smoothing <= 0:
            return value.said
        weight = 1 - math.exp(-max(0.0, now - value.at) / self.rules.smoothing)
        average = value.average + (value.said - value.average) * weight
        return value.said if abs(average - value.said) < END else average

    def current(self, now: float) -> OfflineCapacity | None:
        """What holds now, with its end on the same clock; None when every source is silent."""
        zones: dict[int, float] = {}
        sources: set[str] = set()
        until = math.inf
        for (source, i), value in self._values.items():
            if value.until <= now:
                continue
            zones[i] = min(zones.get(i, 1.0), self._average(value, now))
            sources.add(source)
            until = min(until, value.until)
        if not zones:
            return None
        return OfflineCapacity(zones, until, ",".join(sorted(sources)))

    def wanted(self, now: float, wall: float) -> OfflineCapacity | None:
        """What the annotation should say now; None for no annotation."""
        current = self.current(now)
        if current is None:
            kept = self._last or self.written
            if kept is None or self._withdrawn:
                return None
            if not self.rules.keep_last:
                # A new leader has heard nobody yet: what an earlier one wrote holds to its end.
                return self.written if not self._heard and wall < kept.until else None
            return OfflineCapacity(kept.zones, wall + self.rules.validity, kept.source)
        before = self.written.zones if self.written is not None else {}
        zones = {i: self._settled(before.get(i, 1.0), f) for i, f in sorted(current.zones.items())}
        if all(f == 1 for f in zones.values()):
            self._last = None
            return None
        made = OfflineCapacity(zones, wall + current.until - now, current.source)
        self._last = made
        return made

    def _settled(self, written: float, factor: float) -> float:
        """The factor to write: the written one, unless the difference is worth it."""
        factor = round(factor, DIGITS)
        if factor in (0.0, 1.0) or abs(factor - written) >= max(self.rules.hysteresis, 0.5e-3):
            return factor
        return written

    def due(self, now: float, wall: float) -> bool:
        """Whether the annotation must be written now."""
        wanted, written = self.wanted(now, wall), self.written
        if wanted is None or written is None:
            different = (wanted is None) != (written is None)
        else:
            different = wanted.zones != written.zones
            if not different:
                # An end that comes later is worth a write only when the written one is near; one
                # that comes sooner is not: what is not repeated is taken away when its time is up.
                left = written.until - wall
                return left < self.rules.validity * RENEW and wanted.until > written.until + 1
        return different and now >= self._changed_at + self.rules.least_time

    def wrote(self, what: OfflineCapacity | None, now: float) -> None:
        """The annotation says this since now."""
        before = self.written.zones if self.written is not None else None
        if before != (what.zones if what is not None else None):
            self._changed_at = now
        self.written = what

    def read(self, what: OfflineCapacity | None) -> None:
        """The annotation says this, whoever wrote it."""
        self.written = what
