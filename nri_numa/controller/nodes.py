"""All Nodes with what is said of their capacity, and the patches that follow. Pure.

An output in the sense of `nri_numa.cluster.outputs`: one annotation on each Node that has less than
everything, written as a merge patch of that one key, so that nobody else's fields are touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nri_numa.cluster.outbox import pause
from nri_numa.cluster.outputs import FORBIDDEN_PAUSE
from nri_numa.cluster.requests import Outcome, Request, Resource, Result, Verb
from nri_numa.controller.capacity import NodeCapacity, Rules
from nri_numa.controller.offers import Offer
from nri_numa.offline_capacity import (
    NUMA_IDS,
    OFFLINE_CAPACITY,
    BadCapacity,
    OfflineCapacity,
    list_of,
    numa_nodes,
    parsed,
    text_of,
)

_UNREADABLE: Final = OfflineCapacity({}, 0.0, "unreadable")
"""What stands for an annotation that nobody can read: different from whatever is wanted."""


class UnknownNode(Exception):
    """There is no Node of that name."""


class NodeOutput:
    """The annotation ``offline-capacity`` of every Node.

    Args:
        prefix: of the annotations.
        rules: how values are judged.
    """

    def __init__(self, prefix: str, rules: Rules) -> None:
        self.name = "offline-capacity"
        self.dropped = 0
        self.hold_until = 0.0
        self._key, self._ids_key = f"{prefix}/{OFFLINE_CAPACITY}", f"{prefix}/{NUMA_IDS}"
        self._rules = rules
        self._ids: dict[str, frozenset[int] | None] = {}
        self._capacity: dict[str, NodeCapacity] = {}
        self._ready: list[str] = []
        self._failures: dict[str, tuple[int, float]] = {}
        self._wall = 0.0

    # --- what is there ----------------------------------------------------------------------------

    def see(self, node: str, annotations: Mapping[str, str]) -> None:
        """A Node is there, with these annotations."""
        ids: frozenset[int] | None = None
        if text := annotations.get(self._ids_key):
            try:
                ids = numa_nodes(text)
            except BadCapacity:
                ids = None
        self._ids[node] = ids
        text = annotations.get(self._key)
        if text is None and node not in self._capacity:
            return
        try:
            written = None if text is None else parsed(text)
        except BadCapacity:
            written = _UNREADABLE
        self._of(node).read(written)

    def gone(self, node: str) -> None:
        """A Node is not there any more."""
        self._ids.pop(node, None)
        self._capacity.pop(node, None)
        self._failures.pop(node, None)

    def nodes(self) -> frozenset[str]:
        """The names of all Nodes."""
        return frozenset(self._ids)

    # --- what is said -----------------------------------------------------------------------------

    def offer(self, source: str, offer: Offer, now: float) -> str:
        """A source says something of a Node.

        Returns:
            A sentence about what may keep it from having an effect; empty when nothing does.

        Raises:
            UnknownNode: there is no such Node.
            BadCapacity: it has no such NUMA node.
        """
        if offer.node not in self._ids:
            raise UnknownNode(f"there is no Node {ascii(offer.node)[:80]}")
        ids = self._ids[offer.node]
        if ids is not None and (absent := offer.zones.keys() - ids):
            raise BadCapacity(
                f"Node {offer.node} has no NUMA node {list_of(set(absent))}; it has {list_of(ids)}"
            )
        self._of(offer.node).offer(source, offer.zones, now, offer.validity)
        if ids is None:
            return (
                f"Node {offer.node} does not tell its NUMA nodes (annotation {self._ids_key}): "
                "is offlineCapacity.file set there, and does nri-numa publish run?"
            )
        return ""

    def withdraw(self, source: str, node: str) -> None:
        """A source has nothing to say of a Node any more."""
        if node in self._capacity:
            self._capacity[node].withdraw(source)

    def spoken_of(self) -> frozenset[str]:
        """Nodes that anything is known of."""
        return frozenset(self._capacity)

    def current(self, node: str, now: float) -> OfflineCapacity | None:
        """What holds for a Node; None for everything it has."""
        found = self._capacity.get(node)
        return None if found is None else found.current(now)

    def _of(self, node: str) -> NodeCapacity:
        return self._capacity.setdefault(node, NodeCapacity(self._rules))

    # --- what is written --------------------------------------------------------------------------

    def tick(self, now: float, wall: float) -> None:
        """Find out whose annotation must be written; once a second does."""
        self._wall = wall
        self._ready = sorted(
            (
                node
                for node, capacity in self._capacity.items()
                if self._failures.get(node, (0, 0.0))[1] <= now and capacity.due(now, wall)
            ),
            reverse=True,
        )

    def due(self, now: float) -> Request | None:
        """The next patch."""
        if self.hold_until > now:
            return None
        while self._ready:
            node = self._ready.pop()
            capacity = self._capacity.get(node)
            if capacity is None or not capacity.due(now, self._wall):
                continue
            wanted = capacity.wanted(now, self._wall)
            text = None if wanted is None else text_of(wanted)
            return Request(
                output=self.name,
                verb=Verb.PATCH,
                resource=Resource.NODES,
                name=node,
                body={"metadata": {"annotations": {self._key: text}}},
                key=node,
                version=wanted,
            )
        return None

    def next_due(self) -> float:
        """When the next request may be made."""
        return self.hold_until if self._ready else float("inf")

    def done(self, request: Request, outcome: Outcome, now: float, jitter: float) -> None:
        """This came of a patch."""
        node, wanted = str(request.key), request.version
        if outcome.result is Result.DONE:
            self._failures.pop(node, None)
            if node in self._capacity:
                assert wanted is None or isinstance(wanted, OfflineCapacity)  # noqa: S101
                self._capacity[node].wrote(wanted, now)
        elif outcome.result is Result.FORBIDDEN:
            self.hold_until = now + FORBIDDEN_PAUSE
        elif outcome.result is Result.MISSING:
            self.gone(node)
        else:
            failures = self._failures.get(node, (0, 0.0))[0] + 1
            self._failures[node] = failures, now + pause(failures, jitter)

    def waiting(self) -> int:
        """Nodes whose annotation is to be written now."""
        return len(self._ready)

    def resync(self) -> None:
        """What is there is watched."""
