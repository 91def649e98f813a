"""Capacity that others measure: documents, one Node's capacity out of them, its annotation. Pure.

A PUT carries the NUMA nodes of one Node::

    {"zones": {"0": 0.5, "1": 1}, "validity": 60}

A file holds those of many, and a query of Prometheus one sample for each NUMA node.

Each source has a value of its own for each NUMA node, which counts as long as it is valid; of
several the lowest counts: the source that knows of less is right. The values of a source are
averaged over time, and a factor is written again when it is different by more than the hysteresis:
a source that says something else every second moves no pod every second. Where nothing lowers a
node, it has no annotation.

Time is handed in, in seconds of a clock that only grows; `wall` is Unix time, for what is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb, annotations_of
from nri_numa.model.offline_capacity import (
    NODE_EXISTING_NUMA_IDS_ANNOTATION,
    OFFLINE_CAPACITY_KEY,
    BadCapacity,
    OfflineCapacity,
    encode_offline_capacity,
    format_id_list,
    parse_capacity_factor,
    parse_id_list,
    parse_offline_capacity,
    parse_zone_factors,
    parse_zone_id,
)
from nri_numa.publisher.outbox import Output, backoff_seconds

MAX_DOCUMENT_NODES: Final = 20_000
MAX_NAMED_PROBLEMS: Final = 20
"""Problems of one document that are named; the rest is counted."""
MIN_VALIDITY_S: Final = 5.0

CONVERGENCE_EPSILON: Final = 0.005
"""An average that is so near to what the source says is there: an average alone never arrives."""
FACTOR_DECIMALS: Final = 3
"""Decimals of what is written; a thousandth of a NUMA node is less than a CPU."""
REWRITE_VALIDITY_FRACTION: Final = 0.5
"""Part of the validity that is left when an unchanged value is written again."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """What one source says of one Node.

    Attributes:
        zones: by NUMA node, the part of its CPUs that is there.
        validity: seconds that this counts; None for the source's own.
    """

    node: str
    zones: Mapping[int, float]
    validity: float | None = None


def parse_capacity_put(node: str, document: object, *, longest: float) -> CapacityReport:
    """The body of a PUT about a node, with so many seconds of validity at most.

    Raises:
        BadCapacity: it is not as expected.
    """
    if not isinstance(document, Mapping):
        raise BadCapacity('expected a JSON object such as {"zones": {"0": 0.5}}')
    if unknown := sorted(str(key) for key in document if key not in ("zones", "validity")):
        raise BadCapacity(f"unknown key {ascii(unknown[0])[:60]}, expected zones and validity")
    found = parse_zone_factors(document.get("zones"))
    if not found:
        raise BadCapacity("zones: is empty, expected at least one NUMA node")
    validity = document.get("validity")
    if validity is None:
        return CapacityReport(node, found)
    if isinstance(validity, bool) or not isinstance(validity, int | float):
        raise BadCapacity(f"validity: {ascii(validity)[:60]}, expected seconds")
    if not MIN_VALIDITY_S <= validity <= longest:
        raise BadCapacity(
            f"validity: {ascii(validity)[:60]}, expected {MIN_VALIDITY_S:g} to {longest:g} seconds"
        )
    return CapacityReport(node, found, float(validity))


def parse_capacity_file(document: object) -> tuple[list[CapacityReport], list[str]]:
    """A file ``{nodes: {worker-1: {0: 0.5}}}``: what is sound of it, and what is wrong.

    Raises:
        BadCapacity: nothing of it can be used.
    """
    nodes = document.get("nodes") if isinstance(document, Mapping) else None
    if not isinstance(nodes, Mapping) or set(document) != {"nodes"}:  # type: ignore[call-overload]
        raise BadCapacity("expected a mapping with the one key nodes: {worker-1: {0: 0.5}}")
    if len(nodes) > MAX_DOCUMENT_NODES:
        raise BadCapacity(f"nodes: has {len(nodes)} entries, expected {MAX_DOCUMENT_NODES} at most")
    measurements: list[CapacityReport] = []
    problems: list[str] = []
    for name, one in nodes.items():
        try:
            measurements.append(CapacityReport(str(name), parse_zone_factors(one)))
        except BadCapacity as error:
            problems.append(f"nodes.{ascii(str(name))[:80]}: {error}")
    return measurements, truncate_problems(problems)


def parse_query_answer(
    document: object, *, node_label: str, numa_node_label: str
) -> tuple[list[CapacityReport], list[str]]:
    """The answer to an instant query (``/api/v1/query``): what is sound of it, and what is wrong.

    Raises:
        BadCapacity: it is no such answer.
    """
    if not isinstance(document, Mapping) or document.get("status") != "success":
        said = document.get("error") if isinstance(document, Mapping) else None
        raise BadCapacity(f"the query failed: {ascii(said)[:200]}")
    data = document.get("data")
    samples = data.get("result") if isinstance(data, Mapping) else None
    if not isinstance(samples, list) or data.get("resultType") != "vector":  # type: ignore[union-attr]
        raise BadCapacity("the query's result is no instant vector")
    found: dict[str, dict[int, float]] = {}
    problems: list[str] = []
    for sample in samples:
        try:
            node, i, value = _parse_sample(sample, node_label, numa_node_label)
            if i in found.setdefault(node, {}):
                raise BadCapacity(f"node {node}, NUMA node {i}: has more than one sample")
            found[node][i] = value
        except BadCapacity as error:
            problems.append(str(error))
    if len(found) > MAX_DOCUMENT_NODES:
        raise BadCapacity(
            f"the query has {len(found)} nodes, expected {MAX_DOCUMENT_NODES} at most"
        )
    measurements = [CapacityReport(node, zones) for node, zones in sorted(found.items()) if zones]
    return measurements, truncate_problems(problems)


def _parse_sample(sample: Any, node_label: str, numa_node_label: str) -> tuple[str, int, float]:
    labels = sample.get("metric") if isinstance(sample, Mapping) else None
    value = sample.get("value") if isinstance(sample, Mapping) else None
    if not isinstance(labels, Mapping) or not isinstance(value, list) or len(value) != 2:
        raise BadCapacity(f"a sample is not as expected: {ascii(sample)[:120]}")
    node, numa_node = labels.get(node_label), labels.get(numa_node_label)
    if not isinstance(node, str) or not node:
        raise BadCapacity(f"a sample has no label {node_label}: {ascii(dict(labels))[:120]}")
    where = f"node {ascii(node)[:80]}, {numa_node_label}={ascii(numa_node)[:40]}"
    try:
        # A text in JSON, so that NaN and infinities can be written.
        return node, parse_zone_id(numa_node), parse_capacity_factor(float(str(value[1])[:40]))
    except BadCapacity as error:
        raise BadCapacity(f"{where}: {error}") from None
    except ValueError:
        raise BadCapacity(f"{where}: {ascii(value[1])[:40]} is no number") from None


def truncate_problems(problems: Iterable[str]) -> list[str]:
    """The first problems, and how many more there are."""
    found = list(problems)
    more = len(found) - MAX_NAMED_PROBLEMS
    return [*found[:MAX_NAMED_PROBLEMS], f"and {more} more"] if more > 0 else found


# --- one Node -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRules:
    """How values are judged.

    Attributes:
        validity: seconds that a value counts which its source does not repeat.
        keep_last_value: whether the last value counts on when all sources are silent.
        smoothing: seconds of the average's time constant; 0 for none.
        hysteresis: what is written changes by so much at least.
        min_update_interval: seconds between two changes of a Node's annotation at least.
    """

    validity: float
    keep_last_value: bool = False
    smoothing: float = 0.0
    hysteresis: float = 0.0
    min_update_interval: float = 0.0


@dataclass(slots=True)
class _SmoothedCapacityFactor:
    reported: float
    average: float
    reported_at: float
    expires_at: float


@dataclass(slots=True)
class NodeCapacity:
    """What is known of one Node.

    Attributes:
        written: what the annotation says, as far as known; None for no annotation.
    """

    rules: CapacityRules
    written: OfflineCapacity | None = None
    _values: dict[tuple[str, int], _SmoothedCapacityFactor] = field(default_factory=dict)
    _changed_at: float = -math.inf
    _last_effective: OfflineCapacity | None = None
    _reported: bool = False
    _withdrawn: bool = False

    def record_report(
        self, source: str, zones: Mapping[int, float], now: float, validity: float | None = None
    ) -> None:
        """A source says this now of these NUMA nodes, and nothing of the others."""
        self._reported, self._withdrawn = True, False
        until = now + (self.rules.validity if validity is None else validity)
        for key in [k for k in self._values if k[0] == source and k[1] not in zones]:
            del self._values[key]
        for i, said in zones.items():
            value = self._values.get((source, i))
            if value is None or value.expires_at <= now:
                self._values[source, i] = _SmoothedCapacityFactor(said, said, now, until)
                continue
            value.average = self._smoothed_factor(value, now)
            value.reported, value.reported_at, value.expires_at = said, now, until

    def withdraw_source(self, source: str) -> None:
        """A source has nothing to say any more, which is not the same as being silent."""
        for key in [k for k in self._values if k[0] == source]:
            del self._values[key]
            self._withdrawn = True

    def _smoothed_factor(self, value: _SmoothedCapacityFactor, now: float) -> float:
        """The average of a value up to now: what was said last counts for the time since then."""
        if self.rules.smoothing <= 0:
            return value.reported
        weight = 1 - math.exp(-max(0.0, now - value.reported_at) / self.rules.smoothing)
        average = value.average + (value.reported - value.average) * weight
        return value.reported if abs(average - value.reported) < CONVERGENCE_EPSILON else average

    def effective_capacity(self, now: float) -> OfflineCapacity | None:
        """What holds now, with its end on the same clock; None when every source is silent."""
        zones: dict[int, float] = {}
        sources: set[str] = set()
        until = math.inf
        for (source, i), value in self._values.items():
            if value.expires_at <= now:
                continue
            zones[i] = min(zones.get(i, 1.0), self._smoothed_factor(value, now))
            sources.add(source)
            until = min(until, value.expires_at)
        if not zones:
            return None
        return OfflineCapacity(zones, until, ",".join(sorted(sources)))

    def desired_annotation(self, now: float, wall: float) -> OfflineCapacity | None:
        """What the annotation should say now; None for no annotation."""
        current = self.effective_capacity(now)
        if current is None:
            kept = self._last_effective or self.written
            if kept is None or self._withdrawn:
                return None
            if not self.rules.keep_last_value:
                # A new leader knows no source yet: what an earlier one wrote holds to its end.
                return self.written if not self._reported and wall < kept.expires_at else None
            return OfflineCapacity(kept.zones, wall + self.rules.validity, kept.source)
        before = self.written.zones if self.written is not None else {}
        zones = {
            i: self._apply_hysteresis(before.get(i, 1.0), f)
            for i, f in sorted(current.zones.items())
        }
        if all(f == 1 for f in zones.values()):
            self._last_effective = None
            return None
        made = OfflineCapacity(zones, wall + current.expires_at - now, current.source)
        self._last_effective = made
        return made

    def _apply_hysteresis(self, written: float, factor: float) -> float:
        """The factor to write: the written one, unless the difference is worth it."""
        factor = round(factor, FACTOR_DECIMALS)
        if factor in (0.0, 1.0) or abs(factor - written) >= max(self.rules.hysteresis, 0.5e-3):
            return factor
        return written

    def is_write_due(self, now: float, wall: float) -> bool:
        """Whether the annotation must be written now."""
        wanted, written = self.desired_annotation(now, wall), self.written
        if wanted is None or written is None:
            different = (wanted is None) != (written is None)
        else:
            different = wanted.zones != written.zones
            if not different:
                # An end that comes later is worth a write only when the written one is near; one
                # that comes sooner is not: what is not repeated is taken away when its time is up.
                left = written.expires_at - wall
                return (
                    left < self.rules.validity * REWRITE_VALIDITY_FRACTION
                    and wanted.expires_at > written.expires_at + 1
                )
        return different and now >= self._changed_at + self.rules.min_update_interval

    def record_written(self, what: OfflineCapacity | None, now: float) -> None:
        """The annotation says this since now."""
        before = self.written.zones if self.written is not None else None
        if before != (what.zones if what is not None else None):
            self._changed_at = now
        self.written = what


# --- all Nodes ------------------------------------------------------------------------------------

_UNREADABLE_CAPACITY: Final = OfflineCapacity({}, 0.0, "unreadable")
"""What stands for an annotation that cannot be read: different from whatever is wanted."""


class UnknownNode(Exception):
    """There is no Node of that name."""


class OfflineCapacityAnnotationOutput(Output):
    """The annotation ``offline-capacity`` of every Node that has less than everything.

    It is written as a merge patch of that one key, so that no other fields are touched.
    """

    def __init__(self, prefix: str, rules: CapacityRules) -> None:
        super().__init__("offline-capacity")
        self._key, self._ids_key = (
            f"{prefix}/{OFFLINE_CAPACITY_KEY}",
            f"{prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}",
        )
        self._rules = rules
        self._ids: dict[str, frozenset[int] | None] = {}
        self._capacity: dict[str, NodeCapacity] = {}
        self._ready: list[str] = []
        self._failures: dict[str, tuple[int, float]] = {}
        self._wall = 0.0

    # --- what is there ----------------------------------------------------------------------------

    def on_node_updated(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A Node exists, new or changed."""
        annotations = annotations_of(document)
        ids: frozenset[int] | None = None
        if text := annotations.get(self._ids_key):
            try:
                ids = parse_id_list(text)
            except BadCapacity:
                ids = None
        self._ids[name] = ids
        text = annotations.get(self._key)
        if text is None and name not in self._capacity:
            return
        try:
            written = None if text is None else parse_offline_capacity(text)
        except BadCapacity:
            written = _UNREADABLE_CAPACITY
        self._node_capacity(name).written = written

    def on_node_removed(self, name: str) -> None:
        """A Node does not exist any more."""
        self._ids.pop(name, None)
        self._capacity.pop(name, None)
        self._failures.pop(name, None)

    def node_names(self) -> frozenset[str]:
        """The names of all Nodes."""
        return frozenset(self._ids)

    # --- what is said -----------------------------------------------------------------------------

    def record_report(self, source: str, measured: CapacityReport, now: float) -> str:
        """A source says something of a Node.

        Returns:
            A sentence about what may keep it from having an effect; empty when nothing does.

        Raises:
            UnknownNode: there is no such Node.
            BadCapacity: it has no such NUMA node.
        """
        self.require_node(measured.node)
        ids = self._ids[measured.node]
        if ids is not None and (absent := measured.zones.keys() - ids):
            raise BadCapacity(
                f"Node {measured.node} has no NUMA node {format_id_list(set(absent))}; "
                f"it has {format_id_list(ids)}"
            )
        self._node_capacity(measured.node).record_report(
            source, measured.zones, now, measured.validity
        )
        if ids is None:
            return (
                f"Node {measured.node} does not publish its NUMA nodes (annotation "
                f"{self._ids_key}): is offlineCapacity.file "
                "set there, and does nri-numa publish run?"
            )
        return ""

    def require_node(self, node: str) -> None:
        """Raises UnknownNode where there is no such Node."""
        if node not in self._ids:
            raise UnknownNode(f"there is no Node {ascii(node)[:80]}")

    def withdraw_source(self, source: str, node: str) -> None:
        """A source has nothing to say of a Node any more."""
        if node in self._capacity:
            self._capacity[node].withdraw_source(source)

    def reported_nodes(self) -> frozenset[str]:
        """Nodes that anything is known of."""
        return frozenset(self._capacity)

    def effective_capacity(self, node: str, now: float) -> OfflineCapacity | None:
        """What holds for a Node; None for everything it has."""
        found = self._capacity.get(node)
        return None if found is None else found.effective_capacity(now)

    def _node_capacity(self, node: str) -> NodeCapacity:
        return self._capacity.setdefault(node, NodeCapacity(self._rules))

    # --- what is written --------------------------------------------------------------------------

    def update_due_nodes(self, now: float, wall: float) -> None:
        """Find out whose annotation must be written; once a second does."""
        self._wall = wall
        self._ready = sorted(
            (
                node
                for node, capacity in self._capacity.items()
                if self._failures.get(node, (0, 0.0))[1] <= now and capacity.is_write_due(now, wall)
            ),
            reverse=True,
        )

    def _next_request(self, now: float) -> APIRequest | None:
        while self._ready:
            node = self._ready.pop()
            capacity = self._capacity.get(node)
            if capacity is None or not capacity.is_write_due(now, self._wall):
                continue
            wanted = capacity.desired_annotation(now, self._wall)
            text = None if wanted is None else encode_offline_capacity(wanted)
            body = {"metadata": {"annotations": {self._key: text}}}
            return self._new_request(Verb.PATCH, Resource.NODES, node, body=body, version=wanted)
        return None

    def next_due_at(self) -> float:
        """When the next request may be made."""
        return self.hold_until if self._ready else float("inf")

    def _on_outcome(self, request: APIRequest, outcome: Outcome, now: float, jitter: float) -> None:
        node, wanted = request.name, request.version
        if outcome.result is OutcomeKind.SUCCEEDED:
            self._failures.pop(node, None)
            if node in self._capacity:
                self._capacity[node].record_written(wanted, now)
        elif outcome.result is OutcomeKind.MISSING:
            self.on_node_removed(node)
        else:
            failures = self._failures.get(node, (0, 0.0))[0] + 1
            self._failures[node] = failures, now + backoff_seconds(failures, jitter)

    def pending_count(self) -> int:
        """Nodes whose annotation is to be written now."""
        return len(self._ready)
