"""What is counted where containers get their CPUs after their start; only in CRI mode."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from nri_numa.observe.metrics import Metrics

LATE_BUCKETS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class LateCounts:
    """Figures of late containers.

    Args:
        metrics: exposes them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.late = Histogram(
            "nri_numa_late_seconds",
            "From the start of a container until its cgroup had what was decided (CRI mode).",
            buckets=LATE_BUCKETS,
            registry=metrics.registry,
        )
        self.refused_running = Counter(
            "nri_numa_refused_running_total",
            "Containers that were refused and started nevertheless (CRI mode).",
            registry=metrics.registry,
        )
        metrics.expose(self.late)
        metrics.expose(self.refused_running)
