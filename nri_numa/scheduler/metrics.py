"""Metrics of the extender; names begin with ``nri_numa_scheduler_``."""

from __future__ import annotations

from typing import Final

from nri_numa.observe.metrics import ServiceMetrics

_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)


class SchedulerMetrics(ServiceMetrics):
    """What is counted.

    Args:
        version: of nri-numa.
    """

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_scheduler", version)
        self.calls = self.counter("calls_total", "Calls of kube-scheduler.", "verb", "result")
        self.seconds = self.histogram(
            "call_seconds", "Time to answer a call.", "verb", buckets=_SECONDS
        )
        self.refused = self.counter("refused_nodes_total", "Nodes that had no room for a pod.")
        self.bind_failures = self.counter(
            "bind_failures_total", "Calls of bind after which the pod was not on that node."
        )
        self.wakes = self.counter(
            "wakes_total", "Touches of a Node's annotation to wake refused pods."
        )
        self.nodes = self.gauge("nodes", "Nodes with a NodeResourceTopology.")
        self.unreadable = self.gauge("unreadable_nodes", "Nodes whose object says nothing certain.")
        self.held = self.gauge("held_pods", "Pods whose NUMA nodes are held.")
        self.oldest = self.gauge("oldest_hold_seconds", "Age of the oldest of these.")
        self.leader = self.gauge("leader", "Whether this replica binds.")
        self.synced = self.gauge("synced", "Whether nodes and pods were read.")
