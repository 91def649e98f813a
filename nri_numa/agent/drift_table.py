"""Actual cpusets of containers that differ from the desired ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

import msgspec

from nri_numa.agent.current_state import CurrentState
from nri_numa.engine.desired import Drift
from nri_numa.observe.metrics import Metrics


class DriftStatus(msgspec.Struct, frozen=True):
    """Observed drift of one container.

    Attributes:
        drift: actual and desired values.
        observed_at: Unix time since when it differs.
        repairs_abandoned: True if it was repaired too often, and is left.
    """

    drift: Drift
    observed_at: float
    repairs_abandoned: bool = False

    @property
    def on_exclusive_cpus(self) -> bool:
        """True if it can run on exclusive CPUs of another container."""
        return self.drift.rank == 0

    @property
    def difference_text(self) -> str:
        """Text of both sides: ``desired 4-7, actual 0-7; memory nodes: desired 0, actual 0-1``.

        Any other difference is the finding.
        """
        drift, actual, parts = self.drift, self.drift.actual, list[str]()
        if drift.desired_cpus:
            parts.append(f"desired {drift.desired_cpus}, actual {actual.effective_cpus or 'none'}")
        if drift.desired_mems:
            mems = actual.effective_mems or "none"
            parts.append(f"memory nodes: desired {drift.desired_mems}, actual {mems}")
        if parts and drift.obstacle:
            parts.append(drift.obstacle)
        return "; ".join(parts) or drift.finding


DriftById = Mapping[str, DriftStatus]
"""By container id; never changes, so that it can be read from any thread."""


class DriftTable:
    """Drift of containers, by id.

    `status`, `explain`, the API and the page show it beside the decision, and metrics count how
    long a container could run on exclusive CPUs of another one. Every change replaces `known` as a
    whole, so any thread can read it.

    Attributes:
        known: current drift, by container id.
    """

    def __init__(self, current: CurrentState, metrics: Metrics) -> None:
        self._current, self._metrics = current, metrics
        self._counted = current.clock.time()
        self.known: DriftById = MappingProxyType({})

    def update_drift(
        self,
        container_ids: Iterable[str],
        corrections: Iterable[Drift],
        starts: Mapping[str, float],
        abandoned: Collection[str] = (),
    ) -> None:
        """Record the corrections found for some containers; the others of them have no drift.

        ``starts`` are the earliest Unix times of their drift; ``abandoned`` are containers that are
        no longer repaired.
        """
        self.accumulate_seconds()
        drifts = {c.container_id: c for c in corrections}
        table = dict(self.known)
        for container_id in container_ids:
            if container_id not in drifts:
                table.pop(container_id, None)
        for container_id, drift in drifts.items():
            prior = table.get(container_id)
            start = prior.observed_at if prior else starts[container_id]
            intruder = drift.rank == 0
            if prior and prior.on_exclusive_cpus != intruder:
                start = self._counted
            if intruder and not (prior and prior.on_exclusive_cpus):
                self._metrics.exclusive_cpu_intrusions.inc()
                self._metrics.exclusive_cpu_intrusion_seconds.inc(max(0.0, self._counted - start))
            table[container_id] = DriftStatus(drift, start, container_id in abandoned)
        self._replace_drift(table)

    def remove_repaired(self, *container_ids: str) -> None:
        """Remove containers that have no drift any longer, or ended."""
        ids = self.known.keys() & set(container_ids)
        if not ids:
            return
        self.accumulate_seconds()
        self._replace_drift({i: d for i, d in self.known.items() if i not in ids})

    def accumulate_seconds(self) -> None:
        """Count the seconds that intruders were on exclusive CPUs since the last call."""
        time_s = self._current.clock.time()
        seconds, self._counted = max(0.0, time_s - self._counted), time_s
        self._metrics.exclusive_cpu_intrusion_seconds.inc(
            seconds * sum(d.on_exclusive_cpus for d in self.known.values())
        )

    def _replace_drift(self, table: dict[str, DriftStatus]) -> None:
        if table == self.known:
            return
        self.known = MappingProxyType(table)
        self._metrics.exclusive_cpu_intruders.set(sum(d.on_exclusive_cpus for d in table.values()))
        self._current.notify()
