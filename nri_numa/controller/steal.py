"""NUMA nodes whose CPUs the host keeps taking away: pods leave them, one after the other. Pure.

What counts is the factor that the node's own agent measured and put in force
(``measuredCapacity.mode: act``), which the publisher tells for each zone. Where that is switched
on, pods with pinned containers go while it stays low, as from a drained NUMA node. What somebody
says from outside (`nri_numa.controller.capacity`) moves nobody here either.

A NUMA node that is low for a while is *poor* until it is well again, which is another factor: so
one that wavers about a limit does not begin again and again. Where many are poor at the same time
nobody moves: there is no better place, or the measurement errs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nri_numa.cluster.node_topology import MEASURED_FACTOR
from nri_numa.controller.drain import Emptying, Pod
from nri_numa.controller.evictions import Ledger, Mover
from nri_numa.offline_capacity import BadCapacity, list_of, zone

REASON: Final = "NUMANodeStolen"
WELL: Final = 0.9
"""Evictions end at this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StealRules:
    """When pods leave.

    Attributes:
        below: a factor lower than this is low.
        well: one of this or more is well again; not less than `below`.
        after: seconds that it must be low.
        at_most: part of the cluster's NUMA nodes that may be poor; if more are, nobody moves.
        per_minute: evictions in the whole cluster; measuring takes a while to follow each.
        dry_run: the API server says what it would do, and does nothing.
    """

    below: float
    after: float
    at_most: float
    per_minute: float
    dry_run: bool = False
    well: float = WELL


@dataclass(slots=True)
class _Zone:
    factor: float
    since: float | None = None
    poor: bool = False


class StealOutput(Emptying):
    """Evictions from NUMA nodes that the host takes away, and an Event for each.

    Args:
        prefix: of annotations and attributes.
        rules: when pods leave.
        ledger: how often one workload may be moved.
        now: the time.
    """

    def __init__(self, prefix: str, rules: StealRules, ledger: Ledger, now: float) -> None:
        mover = Mover(
            output="steal", prefix=prefix, reason=REASON, end="stolen", dry_run=rules.dry_run
        )
        super().__init__(mover, rules.per_minute, now, ledger)
        self._rules = rules
        self._attribute = f"{prefix}/{MEASURED_FACTOR}"
        self._zones: dict[str, dict[int, _Zone]] = {}
        self._cpus: dict[str, dict[int, frozenset[int]]] = {}

    # --- what is there ----------------------------------------------------------------------------

    def see(self, node: str, annotations: Mapping[str, str], now: float) -> None:
        """A Node has these annotations."""
        del now
        self._cpus[node] = self.cpus(annotations)

    def gone(self, node: str) -> None:
        """A Node is away."""
        super().gone(node)
        self._cpus.pop(node, None)

    def topology(self, document: Mapping[str, Any]) -> None:
        """A NodeResourceTopology is there; what cannot be read of it is a whole factor."""
        node = str((document.get("metadata") or {}).get("name", ""))
        known = self._zones.get(node, {})
        found: dict[int, _Zone] = {}
        for i, factor in _factors(document, self._attribute).items():
            found[i] = known.get(i) or _Zone(factor)
            found[i].factor = factor
        self._zones[node] = found

    def topology_gone(self, node: str) -> None:
        """An object is gone."""
        self._zones.pop(node, None)
        super().gone(node)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes with an object."""
        return frozenset(self._zones)

    def tick(self, now: float, wall: float) -> None:
        """Find out which NUMA nodes are poor; `wall` is Unix time in seconds."""
        self.tell_time(wall)
        for zones in self._zones.values():
            for one in zones.values():
                self._judge(one, now)
        many = self.poor() > self._rules.at_most * sum(map(len, self._zones.values()))
        for node, zones in self._zones.items():
            poor = frozenset() if many else frozenset(i for i, one in zones.items() if one.poor)
            if poor:
                self.empty(node, poor, self._cpus.get(node, {}), now)
            else:
                super().gone(node)

    def _judge(self, one: _Zone, now: float) -> None:
        if one.factor >= self._rules.well:
            one.since, one.poor = None, False
        elif one.factor < self._rules.below:
            one.since = now if one.since is None else one.since
            one.poor = one.poor or now >= one.since + self._rules.after
        elif not one.poor:
            one.since = None

    def poor(self) -> int:
        """NUMA nodes that are poor, whether anybody moves or not."""
        return sum(one.poor for zones in self._zones.values() for one in zones.values())

    def why(self, pod: Pod) -> str:
        """The factors."""
        zones = self._zones.get(pod.node, {})
        factors = ", ".join(f"{i}: {zones[i].factor:g}" for i in sorted(pod.zones) if i in zones)
        return (
            f"the host takes away CPU time of NUMA node {list_of(pod.zones)} of node {pod.node} "
            f"(measured factor {factors or 'unknown'}, limit {self._rules.below:g})"
        )


def _factors(document: Mapping[str, Any], attribute: str) -> dict[int, float]:
    """By NUMA node, its measured factor; 1 where none is told, or nothing that can be read."""
    found: dict[int, float] = {}
    try:
        for one in document.get("zones") or ():
            if one.get("type") != "Node":
                continue
            texts = [a["value"] for a in one.get("attributes") or () if a["name"] == attribute]
            found[zone(one["name"])] = _factor(texts[0]) if texts else 1.0
    except (BadCapacity, TypeError, KeyError, AttributeError):
        return {}
    return found


def _factor(text: object) -> float:
    try:
        factor = float(text) if isinstance(text, str) and len(text) <= 32 else 1.0
    except ValueError:
        return 1.0
    return factor if 0 <= factor <= 1 else 1.0  # NaN is neither
