"""The registry of a process that serves beside the agent: publisher, controller, extender."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import disable_created_metrics as disable_created
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase


class ServiceMetrics:
    """Owns the registry of the process; what is counted is added by whoever knows it.

    Attributes:
        all: the metrics, in the order in which they were made.

    Args:
        prefix: of all names, ``nri_numa_publish``.
        version: of nri-numa.
    """

    def __init__(self, prefix: str, version: str) -> None:
        disable_created()  # type: ignore[no-untyped-call]
        self._prefix = prefix
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        self.all: list[MetricWrapperBase] = []
        build = self.gauge("build_info", "The running version; always 1.", "version")
        build.labels(version).set(1)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Make a counter; ``name`` is without the prefix."""
        made = Counter(f"{self._prefix}_{name}", text, labels, registry=self._registry)
        self.all.append(made)
        return made

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Make a gauge; ``name`` is without the prefix."""
        made = Gauge(f"{self._prefix}_{name}", text, labels, registry=self._registry)
        self.all.append(made)
        return made

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
        """Make a histogram; ``name`` is without the prefix."""
        made = Histogram(
            f"{self._prefix}_{name}", text, labels, registry=self._registry, buckets=buckets
        )
        self.all.append(made)
        return made

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)
