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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

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
        exclusive_cpus, idle_cpus, shared_cpus, reserved_cpus: every online CPU is in one of them.
        allocatable_cpus: what the accounting still has to give, in CPUs.
        hugepages: by page size in bytes, ``(total, allocated)``.
    """

    numa_node: int
    exclusive_cpus: int
    idle_cpus: int
    shared_cpus: int
    reserved_cpus: int
    allocatable_cpus: float
    memory: int
    memory_allocated: int
    memory_available: int
    capacity_factor: float = 1.0
    hugepages: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSample:
    """The labels of one container.

    Attributes:
        kind: exclusive, shared, explicit or unpinned.
        numa_nodes: kernel list of its memory nodes, or of the NUMA nodes of its CPUs.
    """

    namespace: str
    pod: str
    container: str
    kind: str
    policy: str
    numa_nodes: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The node's state at the moment of a scrape.

    Attributes:
        container_kinds: number of containers by kind.
        containers: consumed while the answer is written; it must stay valid over loop rounds.
        checkpoint_age: seconds since the state was last written, None before the first time.
        checkpoint_failing: the state cannot be written now.
        ready: what ``/readyz`` answers.
        observe: decides, but changes nothing.
    """

    numa_nodes: Iterable[NUMANodeSample] = ()
    container_kinds: Mapping[str, int] = field(default_factory=dict)
    containers: Iterable[ContainerSample] = ()
    shared_pool_cpus: int = 0
    offline_cpus: int = 0
    checkpoint_age: float | None = None
    checkpoint_failing: bool = False
    ready: bool = False
    observe: bool = False


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

        self._requests = counter("requests_total", "Requests from the runtime.", "event")
        self._durations = histogram(
            "request_duration_seconds",
            "From the whole request read to the answer written.",
            DURATION_BUCKETS,
            "event",
        )
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
        self.protocol_errors = counter(
            "protocol_errors_total", "Links closed because the runtime broke the protocol."
        )
        self.gap_containers = counter(
            "gap_containers_total", "Containers that started while we were away, found and pinned."
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

        self.checkpoint_write = histogram(
            "checkpoint_write_seconds", "Time to make the state durable.", WRITE_BUCKETS
        )
        self.checkpoint_errors = counter(
            "checkpoint_errors_total", "Writes or reads of the checkpoint that failed."
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

        self._by_event: dict[str, tuple[Counter, Histogram]] = {}
        self._by_decision: dict[tuple[str, str, str], Counter] = {}

    # --- the request path -----------------------------------------------------------------------

    def request(self, event: str, seconds: float) -> None:
        """Count one request and how long it took."""
        children = self._by_event.get(event)
        if children is None:
            children = self._requests.labels(event), self._durations.labels(event)
            self._by_event[event] = children
        children[0].inc()
        children[1].observe(seconds)

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
                yield _text(rows)
        rows += _head("container_info", "A container and how it is placed; always 1.")
        for one in snapshot.containers:
            rows.append(
                f'nri_numa_container_info{{namespace="{_label(one.namespace)}",'
                f'pod="{_label(one.pod)}",container="{_label(one.container)}",'
                f'kind="{one.kind}",policy="{one.policy}",numa_nodes="{one.numa_nodes}"}} 1\n'
            )
            if len(rows) >= _CHUNK_ROWS:
                yield _text(rows)
        yield _text(rows)

    def text(self) -> str:
        """The whole answer to a scrape."""
        return b"".join(self.chunks()).decode()


def _text(rows: list[str]) -> bytes:
    data = "".join(rows).encode(errors="backslashreplace")
    rows.clear()
    return data


def _head(name: str, text: str) -> list[str]:
    return [f"# HELP nri_numa_{name} {text}\n", f"# TYPE nri_numa_{name} gauge\n"]


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _totals(snapshot: Snapshot) -> Iterator[list[str]]:
    rows = _head("containers", "Containers we know, by kind of assignment.")
    for kind, count in sorted(snapshot.container_kinds.items()):
        rows.append(f'nri_numa_containers{{kind="{kind}"}} {count}\n')
    yield rows
    yield [
        *_head("shared_pool_cpus", "CPUs of the shared pool."),
        f"nri_numa_shared_pool_cpus {snapshot.shared_pool_cpus}\n",
    ]
    yield [
        *_head("offline_cpus", "CPUs that are present and not online."),
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
        yield [*_head(name, text), f"nri_numa_{name} {value:d}\n"]
    if snapshot.checkpoint_age is not None:
        yield [
            *_head("checkpoint_age_seconds", "Time since the state was last made durable."),
            f"nri_numa_checkpoint_age_seconds {snapshot.checkpoint_age:.3f}\n",
        ]


def _node_families(samples: Iterable[NUMANodeSample]) -> Iterator[list[str]]:
    nodes = sorted(samples, key=lambda sample: sample.numa_node)
    rows = _head("numa_node_cpus", "Online CPUs of a NUMA node; each is in one state.")
    for n in nodes:
        label = f'nri_numa_numa_node_cpus{{numa_node="{n.numa_node}",state='
        rows += [
            f'{label}"exclusive"}} {n.exclusive_cpus}\n',
            f'{label}"idle"}} {n.idle_cpus}\n',
            f'{label}"shared"}} {n.shared_cpus}\n',
            f'{label}"reserved"}} {n.reserved_cpus}\n',
        ]
    yield rows
    plain: tuple[tuple[str, str, Callable[[NUMANodeSample], float]], ...] = (
        (
            "numa_node_allocatable_cpus",
            "CPUs that the accounting can still promise.",
            lambda n: n.allocatable_cpus,
        ),
        ("numa_node_memory_bytes", "Memory of a NUMA node.", lambda n: n.memory),
        (
            "numa_node_memory_allocated_bytes",
            "Memory promised to containers.",
            lambda n: n.memory_allocated,
        ),
        (
            "numa_node_memory_available_bytes",
            "Memory that can still be promised.",
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
            *_head(name, text),
            *(f'nri_numa_{name}{{numa_node="{n.numa_node}"}} {get(n):.16g}\n' for n in nodes),
        ]
    for index, (name, text) in enumerate(
        (
            ("numa_node_hugepages_bytes", "Pre-allocated huge pages by page size in bytes."),
            ("numa_node_hugepages_allocated_bytes", "Huge pages promised to containers."),
        )
    ):
        yield [
            *_head(name, text),
            *(
                f'nri_numa_{name}{{numa_node="{n.numa_node}",page_size="{size}"}} {pages[index]}\n'
                for n in nodes
                for size, pages in sorted(n.hugepages.items())
            ),
        ]
