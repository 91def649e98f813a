"""Capacity from external sources: documents, the capacity of a Node, its annotation. Pure.

A PUT carries the NUMA nodes of one Node::

    {"zones": {"0": 0.5, "1": 1}, "validity": 60}

A file has the NUMA nodes of many Nodes, and a Prometheus query one sample for each NUMA node.

Each source has its own value for each NUMA node while that is valid; the lowest of several values
counts. The values of a source are averaged over time, and a factor is written again if it differs
by more than the hysteresis, so a fluctuating source does not cause a write every second. A Node
with its whole capacity has no annotation.

Times are parameters: `now_s` in seconds of a monotonic clock, `wall` as Unix time for annotations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nri_numa.kube.requests import APIRequest, Outcome, OutcomeKind, Resource, Verb, annotations_of
from nri_numa.model.offline_capacity import (
    NODE_EXISTING_NUMA_IDS_ANNOTATION,
    OFFLINE_CAPACITY_ANNOTATION,
    BadCapacity,
    OfflineCapacity,
    encode_offline_capacity,
    format_id_list,
    parse_capacity_factor,
    parse_ids_or_empty,
    parse_offline_capacity,
    parse_zone_factors,
    parse_zone_id,
)
from nri_numa.publisher.outbox import Output, backoff_seconds

MAX_DOCUMENT_NODES: Final = 20_000
MAX_NAMED_PROBLEMS: Final = 20
"""Problems of one document that are named; the others are counted."""
MIN_VALIDITY_S: Final = 5.0

CONVERGENCE_EPSILON: Final = 0.005
"""Difference at which an average takes the reported value, which it would never reach."""
FACTOR_DECIMALS: Final = 3
"""Decimals of a written factor; a thousandth of a NUMA node is less than a CPU."""
REWRITE_VALIDITY_FRACTION: Final = 0.5
"""Remaining part of the validity at which an unchanged value is written again."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """Report of one source about one Node.

    Attributes:
        zones: usable part of the CPUs by NUMA node.
        validity: seconds for which the report counts; None for the source's own.
    """

    node: str
    zones: Mapping[int, float]
    validity: float | None = None


def parse_capacity_put(node: str, document: object, *, limit_s: float) -> CapacityReport:
    """Parse the body of a PUT about a node, with at most ``limit_s`` seconds of validity.

    Raises:
        BadCapacity: the body is not as expected.
    """
    if not isinstance(document, Mapping):
        raise BadCapacity('expected a JSON object such as {"zones": {"0": 0.5}}')
    if unknown := sorted(str(key) for key in document if key not in ("zones", "validity")):
        raise BadCapacity(f"unknown key {ascii(unknown[0])[:60]}, expected zones and validity")
    zones = parse_zone_factors(document.get("zones"))
    if not zones:
        raise BadCapacity("zones: is empty, expected at least one NUMA node")
    validity = document.get("validity")
    if validity is None:
        return CapacityReport(node, zones)
    if isinstance(validity, bool) or not isinstance(validity, int | float):
        raise BadCapacity(f"validity: {ascii(validity)[:60]}, expected seconds")
    if not MIN_VALIDITY_S <= validity <= limit_s:
        raise BadCapacity(
            f"validity: {ascii(validity)[:60]}, expected {MIN_VALIDITY_S:g} to {limit_s:g} seconds"
        )
    return CapacityReport(node, zones, float(validity))


def parse_capacity_file(document: object) -> tuple[list[CapacityReport], list[str]]:
    """Parse a file ``{nodes: {worker-1: {0: 0.5}}}`` into its valid reports and its problems.

    Raises:
        BadCapacity: no part of the file can be used.
    """
    nodes = document.get("nodes") if isinstance(document, Mapping) else None
    if not isinstance(nodes, Mapping) or set(document) != {"nodes"}:  # type: ignore[call-overload]
        raise BadCapacity("expected a mapping with the one key nodes: {worker-1: {0: 0.5}}")
    if len(nodes) > MAX_DOCUMENT_NODES:
        raise BadCapacity(f"nodes: has {len(nodes)} entries, expected {MAX_DOCUMENT_NODES} at most")
    measurements: list[CapacityReport] = []
    problems: list[str] = []
    for name, factors in nodes.items():
        try:
            measurements.append(CapacityReport(str(name), parse_zone_factors(factors)))
        except BadCapacity as error:
            problems.append(f"nodes.{ascii(str(name))[:80]}: {error}")
    return measurements, truncate_problems(problems)


def parse_query_answer(
    document: object, *, node_label: str, numa_node_label: str
) -> tuple[list[CapacityReport], list[str]]:
    """Parse the answer to an instant query (``/api/v1/query``) into valid reports and problems.

    Raises:
        BadCapacity: the document is no such answer.
    """
    if not isinstance(document, Mapping) or document.get("status") != "success":
        error_text = document.get("error") if isinstance(document, Mapping) else None
        raise BadCapacity(f"the query failed: {ascii(error_text)[:200]}")
    data = document.get("data")
    samples = data.get("result") if isinstance(data, Mapping) else None
    if not isinstance(samples, list) or data.get("resultType") != "vector":  # type: ignore[union-attr]
        raise BadCapacity("the result of the query is not an instant vector")
    nodes: dict[str, dict[int, float]] = {}
    problems: list[str] = []
    for sample in samples:
        try:
            node, i, value = _parse_sample(sample, node_label, numa_node_label)
            if i in nodes.setdefault(node, {}):
                raise BadCapacity(f"node {node}, NUMA node {i}: has more than one sample")
            nodes[node][i] = value
        except BadCapacity as error:
            problems.append(str(error))
    if len(nodes) > MAX_DOCUMENT_NODES:
        raise BadCapacity(
            f"the query has {len(nodes)} nodes, expected {MAX_DOCUMENT_NODES} at most"
        )
    measurements = [CapacityReport(node, zones) for node, zones in sorted(nodes.items()) if zones]
    return measurements, truncate_problems(problems)


def _parse_sample(sample: Any, node_label: str, numa_node_label: str) -> tuple[str, int, float]:
    labels = sample.get("metric") if isinstance(sample, Mapping) else None
    value = sample.get("value") if isinstance(sample, Mapping) else None
    if not isinstance(labels, Mapping) or not isinstance(value, list) or len(value) != 2:
        raise BadCapacity(f"a sample is not valid: {ascii(sample)[:120]}")
    node, numa_node = labels.get(node_label), labels.get(numa_node_label)
    if not isinstance(node, str) or not node:
        raise BadCapacity(f"a sample has no label {node_label}: {ascii(dict(labels))[:120]}")
    subject = f"node {ascii(node)[:80]}, {numa_node_label}={ascii(numa_node)[:40]}"
    try:
        # A string in JSON, because JSON has no NaN or infinities.
        return node, parse_zone_id(numa_node), parse_capacity_factor(float(str(value[1])[:40]))
    except BadCapacity as error:
        raise BadCapacity(f"{subject}: {error}") from None
    except ValueError:
        raise BadCapacity(f"{subject}: {ascii(value[1])[:40]} is no number") from None


def truncate_problems(problems: Iterable[str]) -> list[str]:
    """Return the first problems, and the number of the others."""
    texts = list(problems)
    surplus = len(texts) - MAX_NAMED_PROBLEMS
    return [*texts[:MAX_NAMED_PROBLEMS], f"and {surplus} more"] if surplus > 0 else texts


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRules:
    """Rules for the values of sources.

    Attributes:
        validity: seconds for which a value counts if its source does not repeat it.
        keep_last_value: keep the last value if no source has a valid one.
        smoothing: time constant of the average in seconds; 0 for none.
        hysteresis: minimum change of a written factor.
        min_update_interval: minimum seconds between two changes of a Node's annotation.
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
    """Capacity of one Node, from all sources.

    Attributes:
        written: last known value of the annotation; None for no annotation.
        failures, retry_at: failed writes one after another, and the time of the next attempt.
    """

    rules: CapacityRules
    written: OfflineCapacity | None = None
    failures: int = 0
    retry_at: float = -math.inf
    _values: dict[tuple[str, int], _SmoothedCapacityFactor] = field(default_factory=dict)
    _changed_at: float = -math.inf
    _last_effective: OfflineCapacity | None = None
    _reported: bool = False
    _withdrawn: bool = False

    def record_report(
        self, source: str, zones: Mapping[int, float], now_s: float, validity: float | None = None
    ) -> None:
        """Record a source's report; it replaces the source's values for all NUMA nodes."""
        self._reported, self._withdrawn = True, False
        expires_at = now_s + (self.rules.validity if validity is None else validity)
        for key in [k for k in self._values if k[0] == source and k[1] not in zones]:
            del self._values[key]
        for i, factor in zones.items():
            value = self._values.get((source, i))
            if value is None or value.expires_at <= now_s:
                self._values[source, i] = _SmoothedCapacityFactor(factor, factor, now_s, expires_at)
                continue
            value.average = self._smoothed_factor(value, now_s)
            value.reported, value.reported_at, value.expires_at = factor, now_s, expires_at

    def withdraw_source(self, source: str) -> None:
        """Withdraw the values of a source; unlike stale values they are not kept."""
        for key in [k for k in self._values if k[0] == source]:
            del self._values[key]
            self._withdrawn = True

    def _smoothed_factor(self, value: _SmoothedCapacityFactor, now_s: float) -> float:
        """Compute the average of a value; the last report counts for the time since then."""
        if self.rules.smoothing <= 0:
            return value.reported
        weight = 1 - math.exp(-max(0.0, now_s - value.reported_at) / self.rules.smoothing)
        average = value.average + (value.reported - value.average) * weight
        return value.reported if abs(average - value.reported) < CONVERGENCE_EPSILON else average

    def effective_capacity(self, now_s: float) -> OfflineCapacity | None:
        """Compute the capacity, `expires_at` by the same clock; None if no value is valid."""
        zones: dict[int, float] = {}
        sources: set[str] = set()
        expires_at = math.inf
        for (source, i), value in self._values.items():
            if value.expires_at <= now_s:
                continue
            zones[i] = min(zones.get(i, 1.0), self._smoothed_factor(value, now_s))
            sources.add(source)
            expires_at = min(expires_at, value.expires_at)
        if not zones:
            return None
        return OfflineCapacity(zones, expires_at, ",".join(sorted(sources)))

    def desired_annotation(self, now_s: float, wall: float) -> OfflineCapacity | None:
        """Compute the desired annotation; None for no annotation."""
        current = self.effective_capacity(now_s)
        if current is None:
            prior = self._last_effective or self.written
            if prior is None or self._withdrawn:
                return None
            if not self.rules.keep_last_value:
                # A new leader has no reports yet: the earlier value stays until it expires.
                return self.written if not self._reported and wall < prior.expires_at else None
            return OfflineCapacity(prior.zones, wall + self.rules.validity, prior.source)
        old_zones = self.written.zones if self.written is not None else {}
        zones = {
            i: self._apply_hysteresis(old_zones.get(i, 1.0), f)
            for i, f in sorted(current.zones.items())
        }
        if all(f == 1 for f in zones.values()):
            self._last_effective = None
            return None
        annotation = OfflineCapacity(zones, wall + current.expires_at - now_s, current.source)
        self._last_effective = annotation
        return annotation

    def _apply_hysteresis(self, written: float, factor: float) -> float:
        """Return the factor to write: the written one if the difference is below hysteresis."""
        factor = round(factor, FACTOR_DECIMALS)
        if factor in (0.0, 1.0) or abs(factor - written) >= max(self.rules.hysteresis, 0.5e-3):
            return factor
        return written

    def is_write_due(self, now_s: float, wall: float) -> bool:
        """Return True if the annotation must be written now."""
        desired, written = self.desired_annotation(now_s, wall), self.written
        if now_s < self.retry_at or (desired is None and written is None):
            return False
        if desired is not None and written is not None and desired.zones == written.zones:
            # A later expiry is written only when the written one is near. An earlier expiry is
            # not written: the annotation is removed when the values expire.
            remaining_s = written.expires_at - wall
            expires_soon = remaining_s < self.rules.validity * REWRITE_VALIDITY_FRACTION
            return expires_soon and desired.expires_at > written.expires_at + 1
        return now_s >= self._changed_at + self.rules.min_update_interval

    def record_written(self, annotation: OfflineCapacity | None, now_s: float) -> None:
        """Record the value that was written now; None for a removed annotation."""
        old_zones = self.written.zones if self.written is not None else None
        if old_zones != (annotation.zones if annotation is not None else None):
            self._changed_at = now_s
        self.written, self.failures, self.retry_at = annotation, 0, -math.inf


_UNREADABLE_CAPACITY: Final = OfflineCapacity({}, 0.0, "unreadable")
"""Stands for an unreadable annotation: it differs from every desired value."""


class UnknownNode(Exception):
    """A Node of that name does not exist."""


class OfflineCapacityAnnotationOutput(Output):
    """The annotation ``offline-capacity`` of every Node with reduced capacity.

    It is written as a merge patch of that one key, which changes no other field.
    """

    name = "offline-capacity"

    def __init__(self, prefix: str, rules: CapacityRules) -> None:
        super().__init__()
        self._key = f"{prefix}/{OFFLINE_CAPACITY_ANNOTATION}"
        self._ids_key = f"{prefix}/{NODE_EXISTING_NUMA_IDS_ANNOTATION}"
        self._rules = rules
        self._ids: dict[str, frozenset[int] | None] = {}
        self._capacity: dict[str, NodeCapacity] = {}
        self._ready: list[str] = []
        self._wall = 0.0

    # --- Nodes ------------------------------------------------------------------------------------

    def on_node_updated(self, name: str, document: Mapping[str, Any], now_s: float) -> None:
        """Read NUMA nodes and annotation of a new or changed Node."""
        annotations = annotations_of(document)
        self._ids[name] = parse_ids_or_empty(annotations.get(self._ids_key)) or None
        text = annotations.get(self._key)
        if text is None and name not in self._capacity:
            return
        try:
            written = None if text is None else parse_offline_capacity(text)
        except BadCapacity:
            written = _UNREADABLE_CAPACITY
        self._node_capacity(name).written = written

    def on_node_removed(self, name: str) -> None:
        """Drop a Node that no longer exists."""
        self._ids.pop(name, None)
        self._capacity.pop(name, None)

    def node_names(self) -> frozenset[str]:
        """Return the names of all Nodes."""
        return frozenset(self._ids)

    # --- reports ----------------------------------------------------------------------------------

    def record_report(self, source: str, measured: CapacityReport, now_s: float) -> str:
        """Record a source's report about a Node.

        Returns:
            A warning if the report may have no effect; else an empty text.

        Raises:
            UnknownNode: the Node does not exist.
            BadCapacity: the Node has no such NUMA node.
        """
        self.require_node(measured.node)
        ids = self._ids[measured.node]
        if ids is not None and (absent := measured.zones.keys() - ids):
            raise BadCapacity(
                f"Node {measured.node} has no NUMA node {format_id_list(set(absent))}; "
                f"it has {format_id_list(ids)}"
            )
        self._node_capacity(measured.node).record_report(
            source, measured.zones, now_s, measured.validity
        )
        if ids is None:
            return (
                f"Node {measured.node} does not publish its NUMA nodes (annotation "
                f"{self._ids_key}): is offlineCapacity.file set there, and does nri-numa publish "
                "run?"
            )
        return ""

    def require_node(self, node: str) -> None:
        """Raise UnknownNode if the Node does not exist."""
        if node not in self._ids:
            raise UnknownNode(f"there is no Node {ascii(node)[:80]}")

    def withdraw_source(self, source: str, node: str) -> None:
        """Withdraw a source's values for a Node."""
        if node in self._capacity:
            self._capacity[node].withdraw_source(source)

    def reported_nodes(self) -> frozenset[str]:
        """Return the Nodes with a report or an annotation."""
        return frozenset(self._capacity)

    def effective_capacity(self, node: str, now_s: float) -> OfflineCapacity | None:
        """Return the capacity of a Node; None for its whole capacity."""
        capacity = self._capacity.get(node)
        return None if capacity is None else capacity.effective_capacity(now_s)

    def _node_capacity(self, node: str) -> NodeCapacity:
        return self._capacity.setdefault(node, NodeCapacity(self._rules))

    # --- writes -----------------------------------------------------------------------------------

    def update_due_nodes(self, now_s: float, wall: float) -> None:
        """Update which annotations must be written; called once a second."""
        self._wall = wall
        due_nodes = [n for n, c in self._capacity.items() if c.is_write_due(now_s, wall)]
        self._ready = sorted(due_nodes, reverse=True)

    def _next_request(self, now_s: float) -> APIRequest | None:
        while self._ready:
            node = self._ready.pop()
            capacity = self._capacity.get(node)
            if capacity is None or not capacity.is_write_due(now_s, self._wall):
                continue
            desired = capacity.desired_annotation(now_s, self._wall)
            text = None if desired is None else encode_offline_capacity(desired)
            body = {"metadata": {"annotations": {self._key: text}}}
            return self._new_request(Verb.PATCH, Resource.NODES, node, body=body, version=desired)
        return None

    def next_due_at(self) -> float:
        """Return the time of the next request."""
        return self.hold_until if self._ready else float("inf")

    def _on_outcome(
        self, request: APIRequest, outcome: Outcome, now_s: float, jitter: float
    ) -> None:
        capacity = self._capacity.get(request.name)
        if outcome.result is OutcomeKind.MISSING:
            self.on_node_removed(request.name)
        elif capacity is not None and outcome.result is OutcomeKind.SUCCEEDED:
            capacity.record_written(request.version, now_s)
        elif capacity is not None:
            capacity.failures += 1
            capacity.retry_at = now_s + backoff_seconds(capacity.failures, jitter)

    def pending_count(self) -> int:
        """Return the number of Nodes whose annotation must be written now."""
        return len(self._ready)
