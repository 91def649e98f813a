"""Metrics of the extender."""

from __future__ import annotations

from typing import Final

from nri_numa.observe.metrics import ServiceMetrics

_DURATION_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
WATCHED_KINDS: Final = ("noderesourcetopologies", "pods")
"""Watched kinds, as metrics name them."""
_EVENT_AGE_BUCKETS_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class SchedulerMetrics(ServiceMetrics):
    """Metrics of the extender; names begin with ``nri_numa_scheduler_``."""

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_scheduler", version)
        self.calls = self.new_counter(
            "calls_total", "Calls of kube-scheduler, by verb and result.", "verb", "result"
        )
        self.call_duration = self.new_histogram(
            "call_duration_seconds",
            "Time to answer a call of kube-scheduler, in seconds.",
            "verb",
            buckets=_DURATION_BUCKETS,
        )
        self.nodes_filtered = self.new_counter(
            "nodes_filtered_total", "Nodes rejected for a pod by the verb filter."
        )
        self.nodes_by_sums = self.new_counter(
            "nodes_by_sums_total",
            "Nodes accepted by sums of free amounts alone: a full check of the pod takes too long.",
        )
        self.bind_failures = self.new_counter(
            "bind_failures_total", "Calls of bind after which the pod was not on the node."
        )
        self.pod_wakeups = self.new_counter(
            "pod_wakeups_total",
            "Updates of a Node's annotation that make kube-scheduler retry rejected pods.",
        )
        self.preemption_nodes_left_out = self.new_counter(
            "preemption_nodes_left_out_total",
            "Nodes proposed for preemption that are left out.",
        )
        self.preemption_victims_changed = self.new_counter(
            "preemption_victims_changed_total",
            "Nodes for which other victims are selected than proposed.",
        )
        self.pods_evicted_in_vain = self.new_counter(
            "pods_evicted_in_vain_total",
            "Evicted pods whose node did not get the pod within 60 s.",
        )
        self.nodes = self.new_gauge("nodes", "Nodes with a NodeResourceTopology.")
        self.unreadable_nodes = self.new_gauge(
            "unreadable_nodes", "Nodes whose NodeResourceTopology is missing, stale or invalid."
        )
        self.assumed_pods = self.new_gauge(
            "assumed_pods", "Pods that have a node and that the node's numbers do not count yet."
        )
        self.oldest_assumed_pod = self.new_gauge(
            "oldest_assumed_pod_seconds",
            "Age of the oldest assumed pod in seconds; 0 without one.",
        )
        self.uncounted_pods = self.new_gauge(
            "uncounted_pods",
            "Assumed pods, started over a minute ago, that their nodes do not count.",
        )
        self.leader = self.new_gauge("leader", "1 if this replica binds pods.")
        self.synced = self.new_gauge("synced", "1 if nodes and pods were read.")
        self.cache_age = self.new_gauge(
            "cache_age_seconds",
            "Seconds since the API server last sent this kind; up to 60 if nothing changes.",
            "kind",
        )
        self.event_age = self.new_histogram(
            "event_age_seconds",
            "Seconds from the write of an object until the extender read it, to within a second.",
            "kind",
            buckets=_EVENT_AGE_BUCKETS_S,
        )
