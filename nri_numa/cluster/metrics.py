"""Metrics of the publisher; names begin with ``nri_numa_publish_``."""

from __future__ import annotations

from nri_numa.observe.metrics import ServiceMetrics


class PublishMetrics(ServiceMetrics):
    """What is counted.

    Args:
        version: of nri-numa.
    """

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_publish", version)
        self.requests = self.counter(
            "requests_total",
            "Requests to the API server, by what they were for, verb and result.",
            "output",
            "verb",
            "result",
        )
        self.dropped = self.counter(
            "dropped_total",
            "What will never be written: refused as invalid, its namespace ending, or no place.",
            "output",
        )
        self.old = self.counter(
            "old_notices_total",
            "Notices of the agent that were an hour old when they were first seen.",
        )
        self.waiting = self.gauge("waiting", "What is still to be written.", "output")
        self.last_success = self.gauge(
            "last_success_timestamp_seconds",
            "When the API server last did what it was asked; 0 before the first time.",
        )
        self.api_up = self.gauge("api_up", "Whether the last request reached the API server.")
        self.agent_up = self.gauge("agent_up", "Whether the agent's socket answers.")
        self.clock_skew = self.gauge(
            "clock_skew_seconds", "How far this node's clock is ahead of the API server's."
        )
