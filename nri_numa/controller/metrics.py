"""Metrics of the controller; names begin with ``nri_numa_controller_``."""

from __future__ import annotations

from nri_numa.observe.metrics import ServiceMetrics


class ControllerMetrics(ServiceMetrics):
    """What is counted.

    Args:
        version: of nri-numa.
    """

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_controller", version)
        self.leader = self.gauge("leader", "Whether this replica holds the Lease.")
        self.requests = self.counter(
            "requests_total",
            "Requests to the API server, by what they were for, verb and result.",
            "output",
            "verb",
            "result",
        )
        self.api_up = self.gauge("api_up", "Whether the last request reached the API server.")
        self.nodes = self.gauge("nodes", "Nodes of the cluster.")
        self.lowered = self.gauge(
            "lowered_nodes", "Nodes of which a source says that less than everything is there."
        )
        self.drained = self.gauge(
            "drained_numa_nodes",
            "NUMA nodes that the annotation drained names; 0 without evictions.",
        )
        self.to_move = self.gauge(
            "pods_to_move", "Pods on drained NUMA nodes that are still to be evicted."
        )
        self.stuck = self.gauge(
            "stuck_pods",
            "Pods that wait for NUMA nodes of their node; 0 without stuck.evict.",
        )
        self.stolen = self.gauge(
            "stolen_numa_nodes",
            "NUMA nodes whose measured factor stays low; 0 without steal.evict.",
        )
        self.offers = self.counter(
            "offers_total",
            "What sources said of one Node, by source and by accepted or refused.",
            "source",
            "result",
        )
        self.source_up = self.gauge(
            "source_up", "Whether a source could be read the last time.", "source"
        )
