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
LATE_START_BUCKETS_S = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

ROWS_PER_CHUNK: Final = 50
"""Rows rendered before the event loop gets a turn: well under a millisecond."""


class Registry:
    """Metrics of a process; each part adds its own.

    ``prefix`` begins every name (``nri_numa_publisher``); ``build`` are labels of build_info.
    """

    def __init__(self, prefix: str, version: str, **build: str) -> None:
        # Creation times would be one more series for each counter; resets show without them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prefix = prefix
        self.registry = CollectorRegistry(auto_describe=False)
        self._process = ProcessCollector(registry=self.registry)
        self.all: list[Counter | Gauge | Histogram] = []
        info = self.new_gauge("build_info", "Version of nri-numa; always 1.", "version", *build)
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
    free_cpus: float
    memory_bytes: int
    memory_allocated_bytes: int
    memory_free_bytes: int
    capacity_factor: float = 1.0
    free_exclusive_cpus: int = 0
    hugepages: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)


class MetricsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of the node at the time of a scrape.

    Attributes:
        container_counts: by kind, and True if aligned.
        checkpoint_written_timestamp_seconds: Unix time at which the state was last written; None
            before that.
    """

    node_name: str = ""
    numa_nodes: Iterable[NUMANodeSample] = ()
    container_counts: Mapping[tuple[str, bool], int] = msgspec.field(default_factory=dict)
    state: NodeState = NodeState()
    shared_pool_cpus: int = 0
    offline_cpus: int = 0
    checkpoint_written_timestamp_seconds: float | None = None
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
            "runtime_info",
            "Container runtime that the agent is registered with; always 1.",
            "name",
            "version",
        )
        self._requests = self.new_counter(
            "requests_total", "Requests of the container runtime, by event.", "event"
        )
        self._durations = self.new_histogram(
            "request_duration_seconds",
            "Time to answer a request of the runtime, in seconds.",
            "event",
            buckets=REQUEST_DURATION_BUCKETS_S,
        )
        self._decisions = self.new_counter(
            "decisions_total",
            "Placement decisions, by outcome, reason and policy.",
            "outcome",
            "reason",
            "policy",
        )
        self.internal_errors = self.new_counter(
            "internal_errors_total", "Requests of the runtime that hit a bug of nri-numa."
        )
        self.invariant_violations = self.new_counter(
            "invariant_violations_total",
            "Inconsistencies found in the node state; each is a bug of nri-numa.",
        )
        self.link_up = self.new_gauge(
            "link_up", "1 if the agent is registered with the container runtime."
        )
        self.link_registrations = self.new_counter(
            "link_registrations_total", "Registrations with the container runtime."
        )
        self.registration_pending = self.new_gauge(
            "registration_pending_seconds",
            "Seconds for which the runtime has not answered a registration; 0 if none is pending.",
        )
        self.protocol_errors = self.new_counter(
            "protocol_errors_total", "Links closed because the runtime broke the protocol."
        )
        self.missed_starts = self.new_counter(
            "missed_starts_total",
            "Containers that started while the agent was not registered, and were pinned later.",
        )
        self.start_corrections = self.new_counter(
            "start_corrections_total",
            "Starting containers whose cgroup was corrected before their program ran.",
        )
        self.undone_creations = self.new_counter(
            "undone_creations_total",
            "Admitted containers that the runtime removed before their start.",
        )
        self.container_moves = self.new_counter(
            "container_moves_total", "Running containers moved to other NUMA nodes."
        )
        self.memory_migrated_bytes = self.new_counter(
            "memory_migrated_bytes_total",
            "Bytes of memory of running containers migrated between NUMA nodes.",
        )
        self.undelivered_updates_repaired = self.new_counter(
            "undelivered_updates_repaired_total",
            "Updates that did not reach a running container and were repaired at once.",
        )
        self.cgroup_writes_slow = self.new_counter(
            "cgroup_writes_slow_total", "Cpuset writes that took more than 0.5 seconds."
        )
        self.exclusive_cpu_intruders = self.new_gauge(
            "exclusive_cpu_intruders",
            "Containers that can run on exclusive CPUs of another container, at the last check.",
        )
        self.exclusive_cpu_intrusions = self.new_counter(
            "exclusive_cpu_intrusions_total",
            "Times that a container could run on exclusive CPUs of another container.",
        )
        self.exclusive_cpu_intrusion_seconds = self.new_counter(
            "exclusive_cpu_intrusion_seconds_total",
            "Seconds for which containers could run on exclusive CPUs of another one.",
        )
        self.foreign_on_exclusive_cpus = self.new_gauge(
            "foreign_containers_on_exclusive_cpus",
            "Containers pinned by another program that can run on exclusive CPUs of others.",
        )
        self.foreign_overlaps = self.new_counter(
            "foreign_overlaps_total",
            "Times that CPUs of a container pinned by another program became exclusive.",
        )
        self.unknown_cpusets = self.new_counter(
            "unknown_cpusets_total",
            "Containers with a cpuset of unknown origin, treated as pinned by another program.",
        )
        self.assigned_annotations_rejected = self.new_counter(
            "assigned_annotations_rejected_total",
            "Assigned annotations rejected as forged, damaged or outdated.",
        )
        self.drift_found = self.new_counter(
            "drift_found_total", "Containers whose cgroup another program changed."
        )
        self.drift_repaired = self.new_counter(
            "drift_repaired_total",
            "Containers whose cgroup was corrected after another program changed it.",
        )
        self.drift_repairs_abandoned = self.new_counter(
            "drift_repairs_abandoned_total",
            "Containers no longer repaired because another program keeps changing their cgroup.",
        )
        self.kubelet_static_policy = self.new_gauge(
            "kubelet_static_policy",
            "1 if this manager of the kubelet (cpu, memory) pins containers by its static policy.",
            "manager",
        )
        self.kubelet_granted = self.new_gauge(
            "kubelet_granted_cpus", "CPUs that the kubelet's static policy granted exclusively."
        )
        self.kubelet_state_file_errors = self.new_gauge(
            "kubelet_state_file_errors",
            "Errors in the kubelet's state files; their last valid content still applies.",
        )
        self.kubelet_cpuset_conflicts = self.new_counter(
            "kubelet_cpuset_conflicts_total",
            "Containers whose cpuset the kubelet and nri-numa both wrote, by which yields.",
            "yields_to",
        )
        for side in ("kubelet", "nri-numa"):  # both series exist from the start, for alerts
            self.kubelet_cpuset_conflicts.labels(side)
        self.checkpoint_write = self.new_histogram(
            "checkpoint_write_duration_seconds",
            "Time to write the state to a file, in seconds.",
            buckets=CHECKPOINT_WRITE_BUCKETS_S,
        )
        self.checkpoint_errors = self.new_counter(
            "checkpoint_errors_total", "Failed writes and reads of the checkpoint."
        )
        self._reload_worked = self.new_gauge(
            "config_last_reload_successful",
            "1 if the configuration that was read last is in effect.",
        )
        self._reloaded_at = self.new_gauge(
            "config_last_reload_success_timestamp_seconds",
            "Unix time when a configuration last took effect.",
        )
        self._lag = self.new_gauge(
            "event_loop_lag_seconds",
            "Longest stall of the event loop within the last two minutes, in seconds.",
        )
        self._max_lag = self.new_gauge(
            "event_loop_max_lag_seconds",
            "Longest stall of the event loop since the start, in seconds.",
        )
        self._max_lag_s = 0.0
        self.http_up = self.new_gauge("http_up", "1 if the HTTP server accepts connections.")
        self.http_requests = self.new_counter(
            "http_requests_total", "HTTP requests, by route and status code.", "route", "code"
        )
        self.http_connections = self.new_gauge(
            "http_connections", "Open connections of HTTP clients."
        )
        self.http_connections_dropped = self.new_counter(
            "http_connections_dropped_total",
            "HTTP connections closed because the client was too slow or there were too many.",
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
        """Count one decision: admitted, misaligned, unpinned or rejected, and the short reason."""
        self._decisions.labels(outcome, reason, policy).inc()

    def record_registration(self, runtime: str, version: str) -> None:
        """Count a registration, and set the name and version of the runtime."""
        self.link_up.set(1)
        self.link_registrations.inc()
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
        if recent > self._max_lag_s:
            self._max_lag_s = recent
            self._max_lag.set(recent)

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


class LateStartMetrics:
    """Metrics of containers pinned after their start; only in CRI mode."""

    def __init__(self, metrics: Metrics) -> None:
        self.late_start = metrics.new_histogram(
            "late_start_seconds",
            "Seconds from the start of a container until its cgroup was written (CRI mode).",
            buckets=LATE_START_BUCKETS_S,
        )
        self.rejected_running = metrics.new_counter(
            "rejected_running_total",
            "Containers that were rejected and started nevertheless (CRI mode).",
        )


class CPUWaitGauges:
    """Gauges of each NUMA node's steal and waiting tasks; only if these are measured."""

    def __init__(self, metrics: Metrics) -> None:
        self._gauges = [
            metrics.new_gauge(name, text, "numa_node")
            for name, text in (
                ("measured_capacity_factor", "Capacity factor computed from CPU steal, 0 to 1."),
                (
                    "cpu_steal_ratio",
                    "Part of the CPU time that the hypervisor gave to other guests, 0 to 1.",
                ),
                ("cpu_waiting_tasks", "Mean number of tasks waiting for each CPU."),
                ("cpu_frequency_hertz", "Mean frequency of the CPUs at the last reading."),
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
    return f'namespace="{namespace}",pod="{pod}",container="{container}"'


def _node_gauge_lines(snapshot: MetricsSnapshot) -> Iterator[str]:
    if snapshot.node_name:
        text = "Name of the Kubernetes node; always 1."
        yield from _gauge_family_lines(
            "node_info", text, [(f'node_name="{escape_label(snapshot.node_name)}"', "1")]
        )
    yield from _gauge_family_lines(
        "containers",
        "Containers, by kind of assignment, and by whether they are aligned.",
        (
            (f'kind="{kind}",aligned="{_bool_label(aligned)}"', str(count))
            for (kind, aligned), count in sorted(snapshot.container_counts.items())
        ),
    )
    for name, text in _NODE_GAUGE_TEXTS.items():
        value = getattr(snapshot, name)
        if value is not None:
            value_text = f"{value:.3f}" if isinstance(value, float) else f"{value:d}"
            yield from _gauge_family_lines(name, text, [("", value_text)])


_NODE_GAUGE_TEXTS: Final = {
    "shared_pool_cpus": "CPUs of the shared pool.",
    "offline_cpus": "CPUs that are present but not online.",
    "ready": "1 if containers are placed and the state is saved, as /readyz answers.",
    "observe": "1 if the agent only decides and reports, and changes nothing.",
    "checkpoint_failing": "1 if the state cannot be saved at present.",
    "checkpoint_written_timestamp_seconds": "Unix time when the state was last saved.",
}
"""Texts of the gauges of the node, by field of `MetricsSnapshot`."""
_NUMA_NODE_GAUGE_TEXTS: Final = {
    "capacity_cpus": "CPUs that can be allocated to containers in all, overcommit included.",
    "allocated_cpus": "CPUs allocated to containers.",
    "free_cpus": "CPUs that can still be allocated.",
    "memory_bytes": "Bytes of memory of the NUMA node.",
    "memory_allocated_bytes": "Bytes of memory allocated to containers.",
    "memory_free_bytes": "Bytes of memory that can still be allocated.",
    "capacity_factor": "Part of the NUMA node's CPUs that is usable, 0 to 1; 0 if drained.",
    "free_exclusive_cpus": "Exclusive CPUs that one more container can get on the NUMA node.",
}
"""Texts of the gauges of a NUMA node, by field of `NUMANodeSample`."""
_HUGEPAGES_GAUGE_TEXTS: Final = {
    "hugepages_bytes": "Bytes of pre-allocated huge pages, by page size.",
    "hugepages_allocated_bytes": "Bytes of huge pages allocated to containers, by page size.",
}
"""Texts of the gauges of both amounts of `NUMANodeSample.hugepages`."""


def _numa_node_gauge_lines(samples: Sequence[NUMANodeSample]) -> Iterator[str]:
    yield from _gauge_family_lines(
        "cpus",
        "Online CPUs, by state; each CPU has one state.",
        (
            (f'numa_node="{n.numa_node}",state="{state}"', str(count))
            for n in samples
            for state, count in n.cpus.items()
        ),
    )
    for name, text in _NUMA_NODE_GAUGE_TEXTS.items():
        rows = ((f'numa_node="{n.numa_node}"', f"{getattr(n, name):.16g}") for n in samples)
        yield from _gauge_family_lines(name, text, rows)
    for index, (name, text) in enumerate(_HUGEPAGES_GAUGE_TEXTS.items()):
        pages = (
            (f'numa_node="{n.numa_node}",page_size="{size}"', str(amounts[index]))
            for n in samples
            for size, amounts in sorted(n.hugepages.items())
        )
        yield from _gauge_family_lines(name, text, pages)


def _container_info_lines(state: NodeState) -> Iterator[str]:
    def allocation_labels(allocation: Allocation) -> str:
        namespace, pod, container = map(
            escape_label, (allocation.namespace, allocation.pod, allocation.container)
        )
        numa_nodes = allocation.numa_nodes or allocation.mems  # numamem alone pins no CPUs
        return (
            f"{_container_labels(namespace, pod, container)},"
            f'kind="{shown_kind(state, allocation)}",policy="{allocation.policy}",'
            f'numa_nodes="{numa_nodes}",aligned="{_bool_label(allocation.aligned)}"'
        )

    text = "Placement of a container; always 1."
    live = (allocation for allocation in state.allocations.values() if not allocation.reserved_at)
    return _gauge_family_lines(
        "container_info", text, ((allocation_labels(allocation), "1") for allocation in live)
    )


_LOCAL_MEMORY_FAMILIES: Final = (
    (
        "local_memory_containers",
        "Containers by whether their local memory ratio is known; left out: beyond 100 series.",
    ),
    (
        "container_local_memory_ratio",
        "Part of the container's memory on its own NUMA nodes, 0 to 1.",
    ),
)
"""Names and texts of the states, and of each value of a `MeasuredValuesByContainer`."""
_CPU_WAITING_FAMILIES: Final = (
    (
        "cpu_pressure_containers",
        "Containers by whether their CPU pressure is known; left out: beyond 100 series.",
    ),
    (
        "container_cpu_pressure_ratio",
        "Part of the last minute in which a task of the container waited for a CPU, 0 to 1.",
    ),
    (
        "container_waiting_tasks",
        "Mean number of the container's threads that waited for a CPU since the last measurement.",
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
