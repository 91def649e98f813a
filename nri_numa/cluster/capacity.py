"""Exclusive CPUs in the capacity of the Node's status: what the scheduler counts by. Pure.

The kubelet takes a capacity that it does not know of over into allocatable, and sets it to 0 when
it registers the Node anew (kubernetes ``pkg/kubelet/nodestatus/setters.go`` and
``kubelet_node_status.go``), so it is looked at again at every resync.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nri_numa.cluster.one_node import OneNode
from nri_numa.cluster.requests import Request, Resource, Verb


class CapacityOutput(OneNode):
    """One extended resource in the status of one Node.

    Args:
        node: its name.
        resource: name of the extended resource.
    """

    def __init__(self, node: str, resource: str) -> None:
        super().__init__("capacity", node)
        self._resource = resource
        self._wanted = ""
        self._there: str | None = None

    def want(self, count: int) -> None:
        """So many exclusive CPUs may be counted."""
        self._wanted = str(count)
        self._ask()

    def _take(self, document: Mapping[str, Any]) -> None:
        self._there = (document.get("capacity") or {}).get(self._resource)

    def _write(self) -> Request | None:
        if self._there == self._wanted:
            return None
        return Request(
            output=self.name,
            verb=Verb.PATCH,
            resource=Resource.NODE_STATUS,
            name=self._node,
            body={"status": {"capacity": {self._resource: self._wanted}}},
        )
