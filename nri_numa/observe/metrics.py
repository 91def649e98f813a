"""All metrics, their names and their cost.

Counters and histograms are incremented on the request path, through children that are bound once.
Everything that describes the node's state (per NUMA node, per container) is computed when somebody
scrapes, from a `Snapshot`, and written as text by our own code: at 1,000 containers the library's
exposition would hold the event loop for tens of milliseconds.

Names are ``nri_numa_<thing>_<unit>``; labels are bounded, and no gauge carries a pod's name or a
CPU list. Facts of one container stand in ``nri_numa_container_info`` only.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from nri_numa.observe import logs
from nri_numa.observe.client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    CounterMetricFamily,
    Gauge,
    Histogram,
    HistogramMetricFamily,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    floatToGoString,
    generate_latest,
)
from nri_numa.text import harmless

# --- Rows of Prometheus' text format. Pure --------------------------------------------------------


def text(rows: list[str]) -> bytes:
    """The rows as bytes; the list is empty afterwards."""
    data = "".join(rows).encode(errors="backslashreplace")
    rows.clear()
    return data


def head(name: str, text: str) -> list[str]:
    """What stands above the rows of a gauge of ours."""
    return [f"# HELP nri_numa_{name} {text}\n", f"# TYPE nri_numa_{name} gauge\n"]


def label(value: str) -> str:
    """The value of a label, escaped: for the format, and before that for whoever reads it."""
    return harmless(value).replace("\\", "\\\\").replace('"', '\\"')


# --- How many requests of each event there were, and how long they took ---------------------------
# Every request is counted, so counting is an addition to one of a few numbers: the library's own
# counters take twenty calls for what takes three here. They become metrics when somebody scrapes.


class RequestTimes:
    """Counts requests by event.

    Args:
        buckets: upper limits in seconds, ascending; a time that equals one is in it.
    """

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(map(float, buckets))
        # By event, the sum of the seconds and then how many were in each bucket and in none.
        self._times: dict[str, list[float]] = {}

    def add(self, event: str, seconds: float) -> None:
        """Count one request."""
        try:
            times = self._times[event]
        except KeyError:
            times = self._times[event] = [0.0] * (len(self.buckets) + 2)
        times[0] += seconds
        times[1 + bisect_left(self.buckets, seconds)] += 1

    def items(self) -> list[tuple[str, list[float]]]:
        """A copy; whoever scrapes is in another thread."""
        return [(event, times[:]) for event, times in list(self._times.items())]


class _ByEvent:
    """A metric with a label for the event; the underscored names are those of the library's own."""

    def __init__(self, times: RequestTimes, name: str, text: str) -> None:
        self._times = times
        self._name = name
        self._text = text
        self._labelnames = ("event",)


class RequestCounter(_ByEvent):
    """The counter of requests by event."""

    def collect(self) -> Iterator[Metric]:
        """As the library wants it."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labelnames)
        for event, times in self._times.items():
            family.add_metric((event,), sum(times[1:]))
        yield family


class RequestDurations(_ByEvent):
    """The histogram of their times."""

    def collect(self) -> Iterator[Metric]:
        """As the library wants it."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labelnames)
        limits = [*map(floatToGoString, self._times.buckets), "+Inf"]
        for event, times in self._times.items():
            so_far, buckets = 0.0, []
            for limit, number in zip(limits, times[1:], strict=True):
                so_far += number
                buckets.append((limit, so_far))
            family.add_metric((event,), buckets, times[0])
        yield family


CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

DEPRECATED: Final = {
    "nri_numa_numa_node_allocatable_cpus": "nri_numa_numa_node_available_cpus",
    "nri_numa_checkpoint_age_seconds": "nri_numa_checkpoint_written_timestamp_seconds",
}
"""Former names of metrics and what has replaced each; exposed for one release more."""

# The budget is 0.5 ms, the runtime gives up at 2 s.
DURATION_BUCKETS = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2,
)  # fmt: skip
WRITE_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

_CHUNK_ROWS = 50
"""Rows between two chances for the event loop: well under a millisecond."""


_CHUNK_METRICS = 1


class _Collects(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class _DroppedLines:
    """What the log counts by itself: a line cannot know of anybody's metrics."""

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "nri_numa_log_lines_dropped",
            "Log lines dropped because nobody read them.",
            value=logs.dropped(),
        )


class _Some(CollectorRegistry):
    """A few metrics, as the library's exposition wants to see them."""

    def __init__(self, metrics: list[_Collects]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for one in self._metrics:
            yield from one.collect()


@dataclass(frozen=True, slots=True, kw_only=True)
class NUMANodeSample:
    """One NUMA node at the moment of a scrape; CPU fields count CPUs, the rest is in bytes.

    Attributes:
        exclusive_cpus, idle_cpus, kubelet_cpus, shared_cpus, reserved_cpus: every online CPU is in
            one of them.
        capacity_cpus: what the accounting has to give in all, in CPUs.
        allocated_cpus: what is given, in CPUs.
        available_cpus: what can still be given, in CPUs.
        hugepages: by page size in bytes, ``(total, allocated)``.
    """

    numa_node: int
    exclusive_cpus: int
    idle_cpus: int
    kubelet_cpus: int = 0
    shared_cpus: int
    reserved_cpus: int
    capacity_cpus: float
    allocated_cpus: float
    available_cpus: float
    memory: int
    memory_allocated: int
    memory_available: int
    capacity_factor: float = 1.0
    hugepages: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSample:
    """The labels of one container.

    Attributes:
        kind: exclusive, shared, explicit, unbound, foreign or kubelet.
        numa_nodes: kernel list of its memory nodes, or of the NUMA nodes of its CPUs.
        preferred: False when it has a wider set than ideal, or none of what it asked for.
    """

    namespace: str
    pod: str
    container: str
    kind: str
    policy: str
    numa_nodes: str
    preferred: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The node's state at the moment of a scrape.

    Attributes:
        node_name: of the node, as Kubernetes has it.
        container_kinds: number of containers by kind, and by whether each has the narrowest set.
        containers: consumed while the answer is written; it must stay valid over loop rounds.
        checkpoint_written: Unix time at which the state was last written; None before that.
        checkpoint_age: seconds since then.
        checkpoint_failing: the state cannot be written now.
        ready: what ``/readyz`` answers.
        observe: decides, but changes nothing.
        local_memory: None unless it is to be exposed.
        waiting: None unless it is to be exposed.
    """

    node_name: str = ""
    numa_nodes: Iterable[NUMANodeSample] = ()
    container_kinds: Mapping[tuple[str, bool], int] = field(default_factory=dict)
    containers: Iterable[ContainerSample] = ()
    shared_pool_cpus: int = 0
    offline_cpus: int = 0
    checkpoint_written: float | None = None
    checkpoint_age: float | None = None
    checkpoint_failing: bool = False
    ready: bool = False
    observe: bool = False
    local_memory: LocalMemory | None = None
    waiting: Waiting | None = None


class Metrics:
    """Owns the registry; one per process, handed to whoever counts.

    Args:
        version: of nri-numa.
    """

    def __init__(self, version: str) -> None:
        # Every counter's birthday would be a series of its own; resets show without them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry(auto_describe=False)
        self._own: list[_Collects] = [ProcessCollector(registry=registry)]
        self.snapshot: Callable[[], Snapshot] = Snapshot

        def counter(name: str, text: str, *labels: str) -> Counter:
            made = Counter(f"nri_numa_{name}", text, labels, registry=registry)
            self._own.append(made)
            return made

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            made = Gauge(f"nri_numa_{name}", text, labels, registry=registry)
            self._own.append(made)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            made = Histogram(f"nri_numa_{name}", text, labels, buckets=buckets, registry=registry)
            self._own.append(made)
            return made

        gauge("build_info", "The running version; always 1.", "version", "python").labels(
            version, platform.python_version()
        ).set(1)
        self._runtime_info = gauge(
            "runtime_info", "The container runtime we are registered with; 1.", "name", "version"
        )

        times = RequestTimes(DURATION_BUCKETS)
        self.request = times.add  # counts one request of an event, and its seconds
        text = "From the whole request read to the answer written."
        for made in (
            RequestCounter(times, "nri_numa_requests", "Requests from the runtime."),
            RequestDurations(times, "nri_numa_request_duration_seconds", text),
        ):
            registry.register(made)
            self._own.append(made)
        self._decisions = counter(
            "decisions_total",
            "Decisions about containers, by outcome, by the reason of a refusal, and by policy.",
            "outcome",
            "reason",
            "policy",
        )
        self.internal_errors = counter(
            "internal_errors_total", "Mistakes of our own that a request ran into."
        )
        self.invariant_violations = counter(
            "invariant_violations_total", "Rules that the node state was found to break."
        )

        self.link_up = gauge("link_up", "Whether we are registered with the runtime.")
        self.link_connects = counter("link_connects_total", "Registrations with the runtime.")
        self.runtime_unanswered = gauge(
            "runtime_unanswered_seconds",
            "How long the runtime has not answered a registration of ours; 0 when none waits.",
        )
        self.protocol_errors = counter(
            "protocol_errors_total", "Links closed because the runtime broke the protocol."
        )
        self.gap_containers = counter(
            "gap_containers_total",
            "Containers that started while we were away, found and given their CPUs.",
        )

        self.start_corrections = counter(
            "start_corrections_total",
            "Starting containers whose cgroup was put right before their program ran.",
        )
        self.late_repairs = counter(
            "late_repairs_total",
            "Running containers that an update had not reached, found at once and put right.",
        )
        self.writes_held_up = counter(
            "cgroup_writes_held_up_total",
            "Writes of cpusets that took the kernel more than half a second.",
        )
        self.neighbours = gauge(
            "neighbours_on_owned_cpus",
            "Containers that can run on exclusive CPUs of another container, as last seen.",
        )
        self.neighbours_seen = counter(
            "neighbours_on_owned_cpus_seen_total",
            "Times that a container was seen to have exclusive CPUs of another container.",
        )
        self.neighbour_seconds = counter(
            "neighbours_on_owned_cpus_seconds_total",
            "How long containers had exclusive CPUs of another container, as far as seen.",
        )
        self.foreign_on_owned = gauge(
            "foreign_on_owned_cpus",
            "Containers pinned by somebody else that may run on exclusive CPUs of others.",
        )
        self.foreign_overlaps = counter(
            "foreign_overlaps_total",
            "Times that CPUs of a container pinned by somebody else became exclusive to others.",
        )
        self.unexplained_pins = counter(
            "unexplained_pins_total",
            "Containers found with a cpuset that nothing explains, taken for somebody else's pin.",
        )
        self.claims_disbelieved = counter(
            "claims_disbelieved_total",
            "Containers whose assigned annotation was not believed: forged, damaged or outdated.",
        )

        self.drift_found = counter(
            "drift_found_total", "Containers whose cgroup was not as decided."
        )
        self.drift_repaired = counter("drift_repaired_total", "Cgroups put right again.")
        self.drift_fights = counter(
            "drift_fights_total", "Containers given up because somebody keeps rewriting them."
        )

        self._kubelet_static = gauge(
            "kubelet_static",
            "Whether a manager of the kubelet pins containers itself, by its static policy.",
            "manager",
        )
        self.kubelet_granted = gauge(
            "kubelet_granted_cpus", "CPUs that the kubelet's static policy granted exclusively."
        )
        self.kubelet_state_problems = gauge(
            "kubelet_state_problems",
            "What is wrong with the kubelet's state files; what they said before still holds.",
        )
        self._kubelet_contests = counter(
            "kubelet_contests_total",
            "Containers whose cpuset the kubelet and nri-numa both wrote, by who had its way.",
            "yields_to",
        )
        for side in ("kubelet", "nri-numa"):
            self._kubelet_contests.labels(side)  # both are there from the start, for alerts

        self.checkpoint_write = histogram(
            "checkpoint_write_seconds", "Time to make the state durable.", WRITE_BUCKETS
        )
        self.checkpoint_errors = counter(
            "checkpoint_errors_total", "Writes or reads of the checkpoint that failed."
        )

        self._reload_worked = gauge(
            "config_last_reload_successful",
            "Whether the configuration that was read last is in force.",
        )
        self._reloaded_at = gauge(
            "config_last_reload_success_timestamp_seconds",
            "When a configuration was last put in force, at the start or by a reload; Unix time.",
        )

        self._lag = gauge(
            "loop_lag_seconds", "Longest gap of the event loop within the last two minutes."
        )
        self._lag_longest = gauge(
            "loop_lag_longest_seconds", "Longest gap of the event loop since the start."
        )
        self._longest = 0.0

        self.http_up = gauge("http_up", "Whether the HTTP server listens.")
        self._http_requests = counter(
            "http_requests_total", "HTTP requests by route and status.", "route", "code"
        )

        lines = _DroppedLines()
        registry.register(lines)
        self._own.append(lines)

        self.http_connections = gauge("http_connections", "Open connections of HTTP clients.")
        self.http_dropped = counter(
            "http_dropped_total",
            "Connections closed on clients that were too slow, or had to make room for others.",
        )

        self._by_decision: dict[tuple[str, str, str], Counter] = {}

    # --- the request path -----------------------------------------------------------------------

    def decision(self, outcome: str, reason: str = "", policy: str = "none") -> None:
        """Count one decision: admitted, widened, unpinned or refused, and the short reason."""
        key = (outcome, reason, policy)
        child = self._by_decision.get(key)
        if child is None:
            child = self._by_decision[key] = self._decisions.labels(outcome, reason, policy)
        child.inc()

    # --- elsewhere ------------------------------------------------------------------------------

    def connected(self, runtime: str, version: str) -> None:
        """The link stands."""
        self.link_up.set(1)
        self.link_connects.inc()
        self._runtime_info.clear()
        self._runtime_info.labels(runtime, version).set(1)

    def kubelet_static(self, manager: str, pins: bool) -> None:
        """Record whether the kubelet's ``cpu`` or ``memory`` manager pins containers."""
        self._kubelet_static.labels(manager).set(pins)

    def kubelet_contest(self, yields_to: str) -> None:
        """Count a container that both write; ``yields_to`` is ``kubelet`` or ``nri-numa``."""
        self._kubelet_contests.labels(yields_to).inc()

    def config_read(self, *, at: float | None) -> None:
        """A configuration was put in force at this Unix time; None when it was not usable."""
        self._reload_worked.set(at is not None)
        if at is not None:
            self._reloaded_at.set(at)

    def expose(self, one: Gauge | Counter | Histogram) -> None:
        """Expose one more, which is made in our registry when it is first needed."""
        self._own.append(one)

    def loop_lag(self, recent: float) -> None:
        """Record the longest gap within the recent window."""
        self._lag.set(recent)
        if recent > self._longest:
            self._longest = recent
            self._lag_longest.set(recent)

    def http_request(self, route: str, code: int) -> None:
        """Count one HTTP request; ``route`` is the pattern, not the path."""
        self._http_requests.labels(route, str(code)).inc()

    # --- scraping -------------------------------------------------------------------------------

    def chunks(self) -> Iterator[bytes]:
        """The answer to a scrape, in pieces that each take well under 5 ms to make."""
        for start in range(0, len(self._own), _CHUNK_METRICS):
            yield generate_latest(_Some(self._own[start : start + _CHUNK_METRICS]))
        snapshot = self.snapshot()
        rows: list[str] = []
        for family in (*_node_families(snapshot.numa_nodes), *_totals(snapshot)):
            rows += family
            if len(rows) >= _CHUNK_ROWS:
                yield text(rows)
        rows += head("container_info", "A container and how it is placed; always 1.")
        for one in snapshot.containers:
            namespace, pod, container = map(label, (one.namespace, one.pod, one.container))
            rows.append(
                f'nri_numa_container_info{{pod_namespace="{namespace}",pod_name="{pod}",'
                f'container_name="{container}",'
                # The former names, which a scrape of pods renames to exported_*.
                f'namespace="{namespace}",pod="{pod}",container="{container}",'
                f'kind="{one.kind}",policy="{one.policy}",numa_nodes="{one.numa_nodes}",'
                f'preferred="{_truth(one.preferred)}"}} 1\n'
            )
            if len(rows) >= _CHUNK_ROWS:
                yield text(rows)
        yield text(rows)
        if snapshot.local_memory is not None:
            yield from pieces(snapshot.local_memory, _CHUNK_ROWS)
        if snapshot.waiting is not None:
            yield from waiting_pieces(snapshot.waiting, _CHUNK_ROWS)

    def text(self) -> str:
        """The whole answer to a scrape."""
        return b"".join(self.chunks()).decode()


def _truth(value: bool) -> str:
    return "true" if value else "false"


def _totals(snapshot: Snapshot) -> Iterator[list[str]]:
    if snapshot.node_name:
        yield [
            *head("node_info", "The node by the name that Kubernetes has for it; always 1."),
            f'nri_numa_node_info{{node_name="{label(snapshot.node_name)}"}} 1\n',
        ]
    rows = head(
        "containers",
        "Containers we know, by kind of assignment, and by whether they have what is ideal or a "
        "wider set.",
    )
    for (kind, preferred), count in sorted(snapshot.container_kinds.items()):
        rows.append(
            f'nri_numa_containers{{kind="{kind}",preferred="{_truth(preferred)}"}} {count}\n'
        )
    yield rows
    yield [
        *head("shared_pool_cpus", "CPUs of the shared pool."),
        f"nri_numa_shared_pool_cpus {snapshot.shared_pool_cpus}\n",
    ]
    yield [
        *head("offline_cpus", "CPUs that are present and not online."),
        f"nri_numa_offline_cpus {snapshot.offline_cpus}\n",
    ]
    for name, text, value in (
        ("ready", "Whether containers are placed and remembered, as /readyz says.", snapshot.ready),
        ("observe", "Whether nothing is changed, only decided and told.", snapshot.observe),
        (
            "checkpoint_failing",
            "Whether the state cannot be made durable now.",
            snapshot.checkpoint_failing,
        ),
    ):
        yield [*head(name, text), f"nri_numa_{name} {value:d}\n"]
    for name, text, seconds in (
        (
            "checkpoint_written_timestamp_seconds",
            "When the state was last made durable; Unix time.",
            snapshot.checkpoint_written,
        ),
        (
            "checkpoint_age_seconds",
            _former("nri_numa_checkpoint_age_seconds"),
            snapshot.checkpoint_age,
        ),
    ):
        if seconds is not None:
            yield [*head(name, text), f"nri_numa_{name} {seconds:.3f}\n"]


def _former(name: str) -> str:
    return f"Deprecated, gone after one more release; {DEPRECATED[name]} has replaced it."


def _node_families(samples: Iterable[NUMANodeSample]) -> Iterator[list[str]]:
    nodes = sorted(samples, key=lambda sample: sample.numa_node)
    rows = head("numa_node_cpus", "Online CPUs of a NUMA node; each is in one state.")
    for n in nodes:
        if len(rows) > 200:
            yield rows
            rows = []
        label = f'nri_numa_numa_node_cpus{{numa_node="{n.numa_node}",state='
        rows += [
            f'{label}"exclusive"}} {n.exclusive_cpus}\n',
            f'{label}"idle"}} {n.idle_cpus}\n',
            f'{label}"kubelet"}} {n.kubelet_cpus}\n',
            f'{label}"shared"}} {n.shared_cpus}\n',
            f'{label}"reserved"}} {n.reserved_cpus}\n',
        ]
    yield rows
    plain: tuple[tuple[str, str, Callable[[NUMANodeSample], float]], ...] = (
        (
            "numa_node_capacity_cpus",
            "CPUs that can be allocated in all: with oversale and capacity factor.",
            lambda n: n.capacity_cpus,
        ),
        (
            "numa_node_allocated_cpus",
            "CPUs allocated to containers.",
            lambda n: n.allocated_cpus,
        ),
        (
            "numa_node_available_cpus",
            "Free CPUs: what can still be allocated.",
            lambda n: n.available_cpus,
        ),
        (
            "numa_node_allocatable_cpus",
            _former("nri_numa_numa_node_allocatable_cpus"),
            lambda n: n.available_cpus,
        ),
        ("numa_node_memory_bytes", "Memory of a NUMA node.", lambda n: n.memory),
        (
            "numa_node_memory_allocated_bytes",
            "Memory allocated to containers.",
            lambda n: n.memory_allocated,
        ),
        (
            "numa_node_memory_available_bytes",
            "Free memory: what can still be allocated.",
            lambda n: n.memory_available,
        ),
        (
            "numa_node_capacity_factor",
            "The part of the node's CPUs that is really there.",
            lambda n: n.capacity_factor,
        ),
    )
    for name, text, get in plain:
        yield [
            *head(name, text),
            *(f'nri_numa_{name}{{numa_node="{n.numa_node}"}} {get(n):.16g}\n' for n in nodes),
        ]
    for index, (name, text) in enumerate(
        (
            ("numa_node_hugepages_bytes", "Pre-allocated huge pages by page size in bytes."),
            ("numa_node_hugepages_allocated_bytes", "Huge pages allocated to containers."),
        )
    ):
        yield [
            *head(name, text),
            *(
                f'nri_numa_{name}{{numa_node="{n.numa_node}",page_size="{size}"}} {pages[index]}\n'
                for n in nodes
                for size, pages in sorted(n.hugepages.items())
            ),
        ]


# --- What is counted where containers get their CPUs after their start; only in CRI mode ----------


LATE_BUCKETS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class LateCounts:
    """Figures of late containers.

    Args:
        metrics: exposes them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.late = Histogram(
            "nri_numa_late_seconds",
            "From the start of a container until its cgroup had what was decided (CRI mode).",
            buckets=LATE_BUCKETS,
            registry=metrics.registry,
        )
        self.refused_running = Counter(
            "nri_numa_refused_running_total",
            "Containers that were refused and started nevertheless (CRI mode).",
            registry=metrics.registry,
        )
        metrics.expose(self.late)
        metrics.expose(self.refused_running)


# --- What a scrape tells of where containers' memory is; only where that is looked for ------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMemory:
    """What part of containers' memory is on their own NUMA nodes.

    Attributes:
        ratios: ``(namespace, pod, container, ratio)``, as many as may be series.
        states: number of containers by whether they have a ratio: ``known``, ``unknown``, and
            ``left out`` for those beyond the limit of series.
    """

    ratios: Sequence[tuple[str, str, str, float]]
    states: Mapping[str, int]


def pieces(told: LocalMemory, at_once: int) -> Iterator[bytes]:
    """The rows, in pieces.

    Args:
        told: what is exposed.
        at_once: rows of a piece.
    """
    rows = head(
        "local_memory_containers",
        "Containers by whether the part of their memory on their own NUMA nodes is known, and "
        "exposed.",
    )
    rows += (
        f'nri_numa_local_memory_containers{{state="{state}"}} {count}\n'
        for state, count in sorted(told.states.items())
    )
    rows += head(
        "container_local_memory_ratio",
        "The part of a container's memory that is on its own NUMA nodes; none where not known.",
    )
    for namespace, pod, container, ratio in told.ratios:
        rows.append(
            f'nri_numa_container_local_memory_ratio{{pod_namespace="{label(namespace)}",'
            f'pod_name="{label(pod)}",container_name="{label(container)}"}} {ratio:.4g}\n'
        )
        if len(rows) >= at_once:
            yield text(rows)
    yield text(rows)


# --- Gauges of what the host takes from each NUMA node; only where that is measured ---------------


_GAUGES: Final = (
    ("measured_capacity_factor", "The capacity factor that follows from steal."),
    ("steal_ratio", "The part of the CPUs' time that the host gave to others."),
    ("waiting_tasks", "Tasks that waited for each CPU, on average."),
    ("cpu_frequency_hertz", "Mean frequency of the CPUs when they were last looked at."),
)


class StealGauges:
    """One series for each NUMA node of which something is known.

    Args:
        metrics: exposes them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._gauges: list[Gauge] = []
        for name, text in _GAUGES:
            made = Gauge(
                f"nri_numa_numa_node_{name}", text, ("numa_node",), registry=metrics.registry
            )
            metrics.expose(made)
            self._gauges.append(made)
        self._shown: list[set[int]] = [set() for _ in _GAUGES]

    def set(
        self,
        factors: Mapping[int, float],
        steal: Mapping[int, float],
        waiting: Mapping[int, float],
        frequency: Mapping[int, float],
    ) -> None:
        """Record what was measured, by NUMA node; what is not known now has no series.

        Args:
            factors: capacity factors that follow.
            steal: part of the time that the host took.
            waiting: tasks that waited for each CPU on average.
            frequency: of its CPUs, in hertz.
        """
        for n, values in enumerate((factors, steal, waiting, frequency)):
            for i in self._shown[n] - values.keys():
                self._gauges[n].remove(str(i))
            for i, value in values.items():
                self._gauges[n].labels(str(i)).set(value)
            self._shown[n] = set(values)


# --- What a scrape tells of how much containers wait for CPUs; only where that is looked for ------


Named: TypeAlias = tuple[str, str, str, float]
"""Namespace, pod, container, and the value."""

_PRESSURE: Final = (
    "container_cpu_pressure_ratio",
    "The part of the last minute in which something of a container was ready and had no CPU; none "
    "where not known.",
)
_WAITING: Final = (
    "container_waiting_tasks",
    "Threads of a container that waited for a CPU, on average since the round before; none where "
    "not known.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How much containers wait, as many as may be series.

    Attributes:
        pressure: parts from 0 to 1.
        tasks: threads that waited on average.
        states: number of containers by whether something is known of them: ``known``, ``unknown``,
            and ``left out`` for those beyond the limit of series.
    """

    pressure: Sequence[Named]
    tasks: Sequence[Named]
    states: Mapping[str, int]


def waiting_pieces(told: Waiting, at_once: int) -> Iterator[bytes]:
    """The rows, in pieces.

    Args:
        told: what is exposed.
        at_once: rows of a piece.
    """
    rows = head(
        "cpu_waiting_containers",
        "Containers by whether it is known how much they wait for CPUs, and exposed.",
    )
    rows += (
        f'nri_numa_cpu_waiting_containers{{state="{state}"}} {count}\n'
        for state, count in sorted(told.states.items())
    )
    for (name, meaning), samples in ((_PRESSURE, told.pressure), (_WAITING, told.tasks)):
        rows += head(name, meaning)
        for namespace, pod, container, value in samples:
            rows.append(
                f'nri_numa_{name}{{pod_namespace="{label(namespace)}",'
                f'pod_name="{label(pod)}",container_name="{label(container)}"}} {value:.4g}\n'
            )
            if len(rows) >= at_once:
                yield text(rows)
    yield text(rows)
