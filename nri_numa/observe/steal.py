"""Gauges of what the host takes from each NUMA node; only where that is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import Gauge

from nri_numa.observe.metrics import Metrics

_GAUGES: Final = (
    ("measured_capacity_factor", "The capacity factor that follows from steal."),
    ("steal_ratio", "The part of the CPUs' time that the host gave to others."),
    ("waiting_tasks", "Tasks that waited for each CPU, on average."),
    ("cpu_frequency_hertz", "Mean frequency of the CPUs when they were last looked at."),
)


class StealGauges:
    """One series for each NUMA node of which something is known.

    Args:
        metrics: exposes them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._gauges: list[Gauge] = []
        for name, text in _GAUGES:
            made = Gauge(
                f"nri_numa_numa_node_{name}", text, ("numa_node",), registry=metrics.registry
            )
            metrics.expose(made)
            self._gauges.append(made)
        self._shown: list[set[int]] = [set() for _ in _GAUGES]

    def set(
        self,
        factors: Mapping[int, float],
        steal: Mapping[int, float],
        waiting: Mapping[int, float],
        frequency: Mapping[int, float],
    ) -> None:
        """Record what was measured, by NUMA node; what is not known now has no series.

        Args:
            factors: capacity factors that follow.
            steal: part of the time that the host took.
            waiting: tasks that waited for each CPU on average.
            frequency: of its CPUs, in hertz.
        """
        for n, values in enumerate((factors, steal, waiting, frequency)):
            for i in self._shown[n] - values.keys():
                self._gauges[n].remove(str(i))
            for i, value in values.items():
                self._gauges[n].labels(str(i)).set(value)
            self._shown[n] = set(values)
