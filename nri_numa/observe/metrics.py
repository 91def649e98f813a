"""Metrics: names, texts and exposition.

Metrics of the node's state (per NUMA node, per container) are computed when they are scraped, from
a `MetricsSnapshot`, and rendered here: with 1,000 containers the library's exposition would block
the event loop for tens of milliseconds.

Names are ``nri_numa_<thing>_<unit>``; labels are bounded, and no gauge carries a pod's name or a
CPU list. Facts of one container are in ``nri_numa_container_info`` only.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from types import ModuleType
from typing import Final

import msgspec

from nri_numa.engine.foreign_pins import shown_kind
from nri_numa.engine.state import Allocation, NodeState
from nri_numa.observe import logs
from nri_numa.text import escape_unprintable

UNUSED_MODULES: Final = (
    *("gzip", "http.server", "socketserver", "urllib.error", "urllib.request"),
    "wsgiref.simple_server",
)
"""Modules that `prometheus_client.exposition` imports for its servers and its push client."""


class _PlaceholderModule(ModuleType):
    """Placeholder for a module; it has a class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _import_prometheus_client() -> None:
    """Import prometheus_client without the HTTP servers and clients that it imports.

    They take 2.5 MiB and are never used: after a Synchronize of 500 containers the agent had
    46.0 MiB with them and 43.5 without, and its budget is 45 (python -m bench --only resources,
    2026-11-30). If a version needs more of them than their names, it is imported unchanged.
    """
    unused = {name: _PlaceholderModule(name) for name in UNUSED_MODULES if name not in sys.modules}
    sys.modules.update(unused)
    try:
        import prometheus_client  # noqa: F401
    except Exception:
        for name in [n for n in sys.modules if n.partition(".")[0] == "prometheus_client"]:
            del sys.modules[name]
    finally:
        for name, module in unused.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


_import_prometheus_client()

from prometheus_client import (  # noqa: E402
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest  # noqa: E402

METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

# The budget is 0.5 ms; the runtime's timeout is 2 s.
REQUEST_DURATION_BUCKETS_S = (
    0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2,
)  # fmt: skip
CHECKPOINT_WRITE_BUCKETS_S = (
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
)
LATE_PINNING_BUCKETS_S = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

ROWS_PER_CHUNK: Final = 50
"""Rows rendered before the event loop gets a turn: well under a millisecond."""


class Registry:
    """Metrics of a process; each part adds its own.

    ``prefix`` begins every name (``nri_numa_publish``); ``build`` are labels of build_info.
    """

    def __init__(self, prefix: str, version: str, **build: str) -> None:
        # Creation times would be one more series for each counter; resets show without them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prefix = prefix
        self.registry = CollectorRegistry(auto_describe=False)
        self._process = ProcessCollector(registry=self.registry)
        self.all: list[Counter | Gauge | Histogram] = []
        info = self.new_gauge("build_info", "The running version; always 1.", "version", *build)
        info.labels(version, *build.values()).set(1)

    def new_counter(self, name: str, text: str, *labels: str) -> Counter:
        """Create and register a counter; ``name`` is without the prefix."""
        counter = Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)
        self.all.append(counter)
        return counter

    def new_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Create and register a gauge; ``name`` is without the prefix."""
        gauge = Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)
        self.all.append(gauge)
        return gauge

    def new_histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float]
    ) -> Histogram:
        """Create and register a histogram; ``name`` is without the prefix."""
        name = f"{self._prefix}_{name}"
        histogram = Histogram(name, text, labels, registry=self.registry, buckets=buckets)
        self.all.append(histogram)
        return histogram


class ServiceMetrics(Registry):
    """Metrics of the other processes: publisher, controller, extender."""

    def render_metrics(self) -> bytes:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class MeasuredValuesByContainer(msgspec.Struct, frozen=True):
    """Values measured per container, for at most as many as may be series.

    Attributes:
        values: by namespace, pod and container; None if a value is not known.
        states: number of containers by state: ``known`` if any value is, ``unknown``, and
            ``left out`` beyond the limit of series.
    """

    values: Mapping[tuple[str, str, str], Sequence[float | None]]
    states: Mapping[str, int]


class NUMANodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """One NUMA node at the time of a scrape; CPU fields are numbers of CPUs, the rest bytes.

    Attributes:
        cpus: by state (exclusive, idle, kubelet, shared, reserved); each online CPU has one.
        hugepages: by page size in bytes, ``(total, allocated)``.
    """

    numa_node: int
    cpus: Mapping[str, int]
    capacity_cpus: float
    allocated_cpus: float
    available_cpus: float
    memory_bytes: int
    memory_allocated_bytes: int
    memory_available_bytes: int
    capacity_factor: float = 1.0
    free_exclusive_cpus: int = 0
    hugepages: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node at the time of a scrape.

    Attributes:
        container_counts: by kind, and True if aligned.
        checkpoint_written: Unix time at which the state was last written; None before that.
    """

    node_name: str = ""
    numa_nodes: Iterable[NUMANodeSample] = ()
    container_counts: Mapping[tuple[str, bool], int] = msgspec.field(default_factory=dict)
    state: NodeState = NodeState()
    shared_pool_cpus: int = 0
    offline_cpus: int = 0
    checkpoint_written: float | None = None
    checkpoint_failing: bool = False
    ready: bool = False
    observe: bool = False
    local_memory: MeasuredValuesByContainer | None = None
    cpu_waiting: MeasuredValuesByContainer | None = None


class Metrics(Registry):
    """Metrics of the agent, shared by its parts."""

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa", version, python=platform.python_version())
        self.snapshot: Callable[[], MetricsSnapshot] = MetricsSnapshot
        self._runtime_info = self.new_gauge(
            "runtime_info", "The container runtime we are registered with; 1.", "name", "version"
        )
        self._requests = self.new_counter("requests_total", "Requests from the runtime.", "event")
        self._durations = self.new_histogram(
            "request_duration_seconds",
            "From the whole request read to the answer written.",
            "event",
            buckets=REQUEST_DURATION_BUCKETS_S,
        )
        self._decisions = self.new_counter(
            "decisions_total",
            "Decisions about containers, by outcome, by the reason of a refusal, and by policy.",
            "outcome",
            "reason",
            "policy",
        )
        self.internal_errors = self.new_counter(
            "internal_errors_total", "Mistakes of our own that a request ran into."
        )
        self.invariant_violations = self.new_counter(
            "invariant_violations_total", "Rules that the node state was found to break."
        )
        self.link_up = self.new_gauge("link_up", "Whether we are registered with the runtime.")
        self.link_connects = self.new_counter(
            "link_connects_total", "Registrations with the runtime."
        )
        self.runtime_unanswered = self.new_gauge(
            "runtime_unanswered_seconds",
            "How long the runtime has not answered a registration of ours; 0 when none waits.",
        )
        self.protocol_errors = self.new_counter(
            "protocol_errors_total", "Links closed because the runtime broke the protocol."
        )
        self.gap_containers = self.new_counter(
            "gap_containers_total",
            "Containers that started while we were away, found and given their CPUs.",
        )
        self.start_corrections = self.new_counter(
            "start_corrections_total",
            "Starting containers whose cgroup was put right before their program ran.",
        )
        self.undone_creations = self.new_counter(
            "undone_creations_total",
            "Containers that were admitted and ended without a start: undone by the runtime.",
        )
        self.moves = self.new_counter(
            "moves_total", "Running movable containers that made room for another."
        )
        self.migrated_bytes = self.new_counter(
            "migrated_bytes_total", "Memory of running containers moved between NUMA nodes."
        )
        self.late_repairs = self.new_counter(
            "late_repairs_total",
            "Running containers that an update had not reached, found at once and put right.",
        )
        self.writes_held_up = self.new_counter(
            "cgroup_writes_held_up_total",
            "Writes of cpusets that took more than half a second.",
        )
        self.neighbours = self.new_gauge(
            "neighbours_on_owned_cpus",
            "Containers that can run on exclusive CPUs of another container, as last seen.",
        )
        self.neighbours_seen = self.new_counter(
            "neighbours_on_owned_cpus_seen_total",
            "Times that a container was seen to have exclusive CPUs of another container.",
        )
        self.neighbour_seconds = self.new_counter(
            "neighbours_on_owned_cpus_seconds_total",
            "How long containers had exclusive CPUs of another container, as far as seen.",
        )
        self.foreign_on_owned = self.new_gauge(
            "foreign_on_owned_cpus",
            "Containers pinned by another program that may run on exclusive CPUs of others.",
        )
        self.foreign_overlaps = self.new_counter(
            "foreign_overlaps_total",
            "Times that CPUs of a container pinned by another program became exclusive.",
        )
        self.unexplained_pins = self.new_counter(
            "unexplained_pins_total",
            "Containers found with a cpuset of unknown origin, treated as another program's pin.",
        )
        self.claims_disbelieved = self.new_counter(
            "claims_disbelieved_total",
            "Containers whose assigned annotation was rejected: forged, damaged or outdated.",
        )
        self.drift_found = self.new_counter(
            "drift_found_total", "Containers whose cgroup was not as decided."
        )
        self.drift_repaired = self.new_counter("drift_repaired_total", "Cgroups put right again.")
        self.drift_fights = self.new_counter(
            "drift_fights_total",
            "Containers given up because another program keeps rewriting them.",
        )
        self.kubelet_static = self.new_gauge(
            "kubelet_static",
            "Whether a manager of the kubelet pins containers itself, by its static policy.",
            "manager",
        )
        self.kubelet_granted = self.new_gauge(
            "kubelet_granted_cpus", "CPUs that the kubelet's static policy granted exclusively."
        )
        self.kubelet_state_problems = self.new_gauge(
            "kubelet_state_problems",
            "What is wrong with the kubelet's state files; what they said before still holds.",
        )
        self.kubelet_contests = self.new_counter(
            "kubelet_contests_total",
            "Containers whose cpuset the kubelet and nri-numa both wrote, by who yielded.",
            "yields_to",
        )
        for side in ("kubelet", "nri-numa"):
            self.kubelet_contests.labels(side)  # both series exist from the start, for alerts
        self.checkpoint_write = self.new_histogram(
            "checkpoint_write_seconds",
            "Time to make the state durable.",
            buckets=CHECKPOINT_WRITE_BUCKETS_S,
        )
        self.checkpoint_errors = self.new_counter(
            "checkpoint_errors_total", "Writes or reads of the checkpoint that failed."
        )
        self._reload_worked = self.new_gauge(
            "config_last_reload_successful",
            "Whether the configuration that was read last is in force.",
        )
        self._reloaded_at = self.new_gauge(
            "config_last_reload_success_timestamp_seconds",
            "When a configuration was last put in force, at the start or by a reload; Unix time.",
        )
        self._lag = self.new_gauge(
            "loop_lag_seconds", "Longest gap of the event loop within the last two minutes."
        )
        self._lag_longest = self.new_gauge(
            "loop_lag_longest_seconds", "Longest gap of the event loop since the start."
        )
        self._longest = 0.0
        self.http_up = self.new_gauge("http_up", "Whether the HTTP server listens.")
        self.http_requests = self.new_counter(
            "http_requests_total", "HTTP requests by route and status.", "route", "code"
        )
        self.http_connections = self.new_gauge(
            "http_connections", "Open connections of HTTP clients."
        )
        self.http_dropped = self.new_counter(
            "http_dropped_total",
            "Connections closed on clients that were too slow, or had to make room for others.",
        )
        self._lines = self.new_counter(
            "log_lines_dropped_total", "Log lines dropped because stderr was not read."
        )
        self._lines_dropped = 0

    def set_snapshot(self, snapshot: Callable[[], MetricsSnapshot]) -> None:
        """Set the function that returns the node's state for a scrape."""
        self.snapshot = snapshot

    def record_request(self, event: str, seconds: float) -> None:
        """Count one request of the runtime."""
        self._requests.labels(event).inc()
        self._durations.labels(event).observe(seconds)

    def record_decision(self, outcome: str, reason: str = "", policy: str = "none") -> None:
        """Count one decision: admitted, widened, unpinned or refused, and the short reason."""
        self._decisions.labels(outcome, reason, policy).inc()

    def record_registration(self, runtime: str, version: str) -> None:
        """Count a registration, and set the name and version of the runtime."""
        self.link_up.set(1)
        self.link_connects.inc()
        self._runtime_info.clear()
        self._runtime_info.labels(runtime, version).set(1)

    def record_config_reload(self, *, loaded_at: float | None) -> None:
        """Record the Unix time when a configuration was applied; None if it was invalid."""
        self._reload_worked.set(loaded_at is not None)
        if loaded_at is not None:
            self._reloaded_at.set(loaded_at)

    def record_loop_lag(self, recent: float) -> None:
        """Record the longest gap within the recent window."""
        self._lag.set(recent)
        if recent > self._longest:
            self._longest = recent
            self._lag_longest.set(recent)

    def render_chunks(self) -> Iterator[bytes]:
        """Render the answer to a scrape, in chunks that each take well under 5 ms."""
        dropped = logs.count_dropped_lines()
        self._lines.inc(dropped - self._lines_dropped)
        self._lines_dropped = dropped
        for collector in (self._process, *self.all):
            yield generate_latest(collector)
        snapshot = self.snapshot()
        rows = chain(
            _numa_node_gauge_lines(sorted(snapshot.numa_nodes, key=lambda one: one.numa_node)),
            _node_gauge_lines(snapshot),
            _container_info_lines(snapshot.state),
            _container_series_lines(_LOCAL_MEMORY_FAMILIES, snapshot.local_memory),
            _container_series_lines(_CPU_WAITING_FAMILIES, snapshot.cpu_waiting),
        )
        while lines := list(islice(rows, ROWS_PER_CHUNK)):
            yield "".join(lines).encode(errors="backslashreplace")

    def render_metrics(self) -> str:
        """Render the whole answer to a scrape."""
        return b"".join(self.render_chunks()).decode()


class LatePinningMetrics:
    """Metrics of containers pinned after their start; only in CRI mode."""

    def __init__(self, metrics: Metrics) -> None:
        self.late = metrics.new_histogram(
            "late_seconds",
            "From the start of a container until its cgroup had what was decided (CRI mode).",
            buckets=LATE_PINNING_BUCKETS_S,
        )
        self.refused_running = metrics.new_counter(
            "refused_running_total",
            "Containers that were refused and started nevertheless (CRI mode).",
        )


class CPUWaitGauges:
    """Gauges of each NUMA node's steal and waiting tasks; only if these are measured."""

    def __init__(self, metrics: Metrics) -> None:
        self._gauges = [
            metrics.new_gauge(f"numa_node_{name}", text, "numa_node")
            for name, text in (
                ("measured_capacity_factor", "The capacity factor that follows from steal."),
                ("steal_ratio", "The part of the CPUs' time that the host gave to others."),
                ("waiting_tasks", "Tasks that waited for each CPU, on average."),
                ("cpu_frequency_hertz", "Mean frequency of the CPUs when they were last read."),
            )
        ]

    def update_gauges(self, *measured: Mapping[int, float]) -> None:
        """Set capacity factors, steal, waiting tasks and frequency, in the order of the gauges."""
        for gauge, values in zip(self._gauges, measured, strict=True):
            gauge.clear()
            for numa_node, value in values.items():
                gauge.labels(str(numa_node)).set(value)


# --- rows of Prometheus' text format --------------------------------------------------------------


def escape_label(value: str) -> str:
    """Escape the value of a label, for the terminal and then for the format."""
    return escape_unprintable(value).replace("\\", "\\\\").replace('"', '\\"')


def _gauge_family_lines(name: str, text: str, samples: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Render a gauge; each sample is its labels as text, and a value."""
    yield f"# HELP nri_numa_{name} {text}\n# TYPE nri_numa_{name} gauge\n"
    for labels, value in samples:
        yield f"nri_numa_{name}{{{labels}}} {value}\n" if labels else f"nri_numa_{name} {value}\n"


def _bool_label(value: bool) -> str:
    return "true" if value else "false"


def _container_labels(namespace: str, pod: str, container: str) -> str:
    """Render the labels of a container from escaped values."""
    return f'pod_namespace="{namespace}",pod_name="{pod}",container_name="{container}"'


def _node_gauge_lines(snapshot: MetricsSnapshot) -> Iterator[str]:
    if snapshot.node_name:
        text = "The node by the name that Kubernetes has for it; always 1."
        yield from _gauge_family_lines(
            "node_info", text, [(f'node_name="{escape_label(snapshot.node_name)}"', "1")]
        )
    yield from _gauge_family_lines(
        "containers",
        "Containers we know, by kind of assignment, and by whether they have what is ideal or a "
        "wider set.",
        (
            (f'kind="{kind}",preferred="{_bool_label(preferred)}"', str(count))
            for (kind, preferred), count in sorted(snapshot.container_counts.items())
        ),
    )
    for name, text, value in (
        ("shared_pool_cpus", "CPUs of the shared pool.", snapshot.shared_pool_cpus),
        ("offline_cpus", "CPUs that are present and not online.", snapshot.offline_cpus),
        ("ready", "Whether containers are placed and remembered, as /readyz says.", snapshot.ready),
        (
            "observe",
            "Whether the agent only decides and reports, and changes nothing.",
            snapshot.observe,
        ),
        (
            "checkpoint_failing",
            "Whether the state cannot be made durable now.",
            snapshot.checkpoint_failing,
        ),
        (
            "checkpoint_written_timestamp_seconds",
            "When the state was last made durable; Unix time.",
            snapshot.checkpoint_written,
        ),
    ):
        if value is not None:
            value_text = f"{value:.3f}" if isinstance(value, float) else f"{value:d}"
            yield from _gauge_family_lines(name, text, [("", value_text)])


_NUMA_NODE_GAUGE_TEXTS: Final = {
    "capacity_cpus": "CPUs that can be allocated in all: with oversale and capacity factor.",
    "allocated_cpus": "CPUs allocated to containers.",
    "available_cpus": "Free CPUs: what can still be allocated.",
    "memory_bytes": "Memory of a NUMA node.",
    "memory_allocated_bytes": "Memory allocated to containers.",
    "memory_available_bytes": "Free memory: what can still be allocated.",
    "capacity_factor": "The part of the node's CPUs that is really there.",
    "free_exclusive_cpus": "CPUs that one more container could have exclusively there.",
}
"""Texts of the gauges of a NUMA node, by field of `NUMANodeSample`."""


def _numa_node_gauge_lines(samples: Sequence[NUMANodeSample]) -> Iterator[str]:
    yield from _gauge_family_lines(
        "numa_node_cpus",
        "Online CPUs of a NUMA node; each is in one state.",
        (
            (f'numa_node="{n.numa_node}",state="{state}"', str(count))
            for n in samples
            for state, count in n.cpus.items()
        ),
    )
    for name, text in _NUMA_NODE_GAUGE_TEXTS.items():
        rows = ((f'numa_node="{n.numa_node}"', f"{getattr(n, name):.16g}") for n in samples)
        yield from _gauge_family_lines(f"numa_node_{name}", text, rows)
    for index, (name, text) in enumerate(
        (
            ("hugepages_bytes", "Pre-allocated huge pages by page size in bytes."),
            ("hugepages_allocated_bytes", "Huge pages allocated to containers."),
        )
    ):
        pages = (
            (f'numa_node="{n.numa_node}",page_size="{size}"', str(amounts[index]))
            for n in samples
            for size, amounts in sorted(n.hugepages.items())
        )
        yield from _gauge_family_lines(f"numa_node_{name}", text, pages)


def _container_info_lines(state: NodeState) -> Iterator[str]:
    def allocation_labels(allocation: Allocation) -> str:
        namespace, pod, container = map(
            escape_label, (allocation.namespace, allocation.pod, allocation.container)
        )
        numa_nodes = allocation.numa_nodes or allocation.mems  # numamem alone pins no CPUs
        return (
            f"{_container_labels(namespace, pod, container)},"
            f'kind="{shown_kind(state, allocation)}",policy="{allocation.policy}",'
            f'numa_nodes="{numa_nodes}",preferred="{_bool_label(allocation.aligned)}"'
        )

    text = "A container and how it is placed; always 1."
    live = (allocation for allocation in state.allocations.values() if not allocation.reserved_at)
    return _gauge_family_lines(
        "container_info", text, ((allocation_labels(allocation), "1") for allocation in live)
    )


_LOCAL_MEMORY_FAMILIES: Final = (
    (
        "local_memory_containers",
        "Containers by whether the part of their memory on their own NUMA nodes is known, and "
        "exposed.",
    ),
    (
        "container_local_memory_ratio",
        "The part of a container's memory that is on its own NUMA nodes; none where not known.",
    ),
)
"""Names and texts of the states, and of each value of a `MeasuredValuesByContainer`."""
_CPU_WAITING_FAMILIES: Final = (
    (
        "cpu_waiting_containers",
        "Containers by whether it is known how much they wait for CPUs, and exposed.",
    ),
    (
        "container_cpu_pressure_ratio",
        "The part of the last minute in which something of a container was ready and had no CPU; "
        "none where not known.",
    ),
    (
        "container_waiting_tasks",
        "Threads of a container that waited for a CPU, on average since the round before; none "
        "where not known.",
    ),
)


def _container_series_lines(
    families: Sequence[tuple[str, str]], watched: MeasuredValuesByContainer | None
) -> Iterator[str]:
    if watched is None:
        return
    states = ((f'state="{state}"', str(n)) for state, n in sorted(watched.states.items()))
    yield from _gauge_family_lines(*families[0], states)
    for index, family in enumerate(families[1:]):
        rows = (
            (_container_labels(*map(escape_label, name)), f"{value:.4g}")
            for name, values in watched.values.items()
            if (value := values[index]) is not None
        )
        yield from _gauge_family_lines(*family, rows)
