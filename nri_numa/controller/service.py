"""The controller's process: the leading replica receives capacity reports and writes them.

Reports are kept in memory only. A new leader keeps the annotations of the earlier one until they
expire; by then the sources have reported again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
from yarl import URL

from nri_numa import __version__, service
from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig, parse_duration, split_address
from nri_numa.controller.capacity import (
    CapacityReport,
    CapacityRules,
    OfflineCapacityAnnotationOutput,
    UnknownNode,
    parse_capacity_put,
)
from nri_numa.controller.evictor import (
    EvictionBudget,
    HostStealEvictor,
    NUMANodeDrainEvictor,
)
from nri_numa.controller.overview import ClusterPage, Overview
from nri_numa.controller.sources import CapacityFileSource, PrometheusSource
from nri_numa.controller.stuck_pods import (
    REJECTION_EVENT_SELECTOR,
    RELEASED_EVENT_REASON,
    StuckPodEvictor,
)
from nri_numa.controller.verdicts import PodVerdicts
from nri_numa.kube.api import KubeAPI, Watch, WatchHandler, name_of, read_pod_namespace, uid_of
from nri_numa.kube.lease import Lease, reachable_address
from nri_numa.kube.requests import APIRequest, KubeClient, Outcome, OutcomeKind, Resource
from nri_numa.model.offline_capacity import (
    MAX_CAPACITY_VALIDITY_S,
    BadCapacity,
    OfflineCapacity,
)
from nri_numa.observe.logs import get_logger
from nri_numa.publisher.writer import Writer, WriterMetrics
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.watcher import PODS_PATH, TOPOLOGIES_PATH
from nri_numa.web.protocol import APIError, Handler, HTTPRequest, Response, Route, not_ready_error
from nri_numa.web.security import Certificate, TokenFile
from nri_numa.web.server import MetricsAndProbeServer

log = get_logger("controller")

REQUEST_BURST: Final = 20
"""Requests to the API server at once after an idle time."""
FACTOR_HYSTERESIS: Final = 0.05
"""Minimum difference to the written factor for another write."""
LEASE_NAME: Final = "nri-numa-controller"
"""Name of the Lease, which the Role of the manifests names too."""
TICK_INTERVAL_S: Final = 1.0
"""Seconds between two checks for due writes."""
PUT_SOURCE: Final = "put"
FORWARDED_HEADER: Final = "nri-numa-forwarded"
"""Header of a request that another replica has forwarded."""
FORWARD_TIMEOUT_S: Final = 5.0
MAX_PUT_BODY_BYTES: Final = 65536
"""Bytes of a body; 1,024 NUMA nodes take less than half."""
NODE_OFFLINE_CAPACITY_PATH: Final = "/v1/nodes/{node}/offline-capacity"
NODES_PATH: Final = Resource.NODES.object_or_list_path()
EVENTS_PATH: Final = "/api/v1/events"


class ControllerMetrics(WriterMetrics):
    """Metrics of the controller; names begin with ``nri_numa_controller_``."""

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_controller", version)
        self.leader = self.new_gauge("leader", "1 if this replica holds the Lease.")
        self.nodes = self.new_gauge("nodes", "Nodes of the cluster.")
        self.reduced_capacity_nodes = self.new_gauge(
            "reduced_capacity_nodes", "Nodes for which a source reports reduced capacity."
        )
        self.drained_numa_nodes = self.new_gauge(
            "drained_numa_nodes",
            "NUMA nodes that the annotation drained names; 0 if these evictions are off.",
        )
        self.pods_to_evict = self.new_gauge(
            "pods_to_evict", "Pods on drained NUMA nodes that are still to be evicted."
        )
        self.stuck_pods = self.new_gauge(
            "stuck_pods", "Pods that their node keeps rejecting; 0 if these evictions are off."
        )
        self.resting_pods = self.new_gauge(
            "pods_with_misaligned_devices", "Stuck pods that keep misaligned devices for now."
        )
        self.device_evictions = self.new_counter(
            "device_evictions_total", "Evictions of pods for other devices."
        )
        self.degraded_numa_nodes = self.new_gauge(
            "degraded_numa_nodes",
            "NUMA nodes whose measured capacity factor stays low; 0 if these evictions are off.",
        )
        self.source_reports = self.new_counter(
            "source_reports_total",
            "Capacity reports for a Node, by source, accepted or rejected.",
            "source",
            "result",
        )
        self.source_up = self.new_gauge(
            "source_up", "1 if the source could be read at the last attempt.", "source"
        )


class _ObjectEventFanout(WatchHandler):
    """Passes the objects of one kind to several parts of the controller.

    Attributes:
        parts: by part what receives name, document and time, and what receives a deleted key.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.parts: list[
            tuple[Callable[[str, Mapping[str, Any], float], object], Callable[[str], object]]
        ] = []

    def on_update(self, document: Mapping[str, Any]) -> None:
        """Pass on a new or changed object."""
        for changed, _ in self.parts:
            changed(name_of(document), document, self._clock())

    def on_every_deleted_key(self, key: str) -> None:
        """Pass on the key of a deleted object."""
        for _, removed in self.parts:
            removed(key)


class ControllerService:
    """One replica of the controller.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """

    def __init__(
        self, config: AgentConfig, api: KubeClient, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        section, prefix = config.controller, config.annotation_prefix
        self._section, self._clock = section, clock
        self._api, self._metrics = api, ControllerMetrics(__version__)
        self.capacity = OfflineCapacityAnnotationOutput(
            prefix,
            CapacityRules(
                validity=parse_duration(section.validity),
                keep_last_value=section.on_stale_source == "last",
                smoothing=parse_duration(section.smoothing_time),
                hysteresis=FACTOR_HYSTERESIS,
                min_update_interval=parse_duration(section.min_update_interval),
            ),
        )
        now_s = clock()
        # One state for all parts that evaluate nodes.
        self._cluster, reader = ClusterState(prefix), PodReader(config)
        candidates = VerdictCache(self._cluster, config.strategy)
        self._overview = (
            Overview(config, self._cluster, candidates, reader) if section.page.enabled else None
        )
        self._watches: list[Watch] = []
        self._verdicts: PodVerdicts | None = None
        if section.verdicts.enabled:
            self._verdicts = PodVerdicts(self._cluster, candidates, reader, self._watches, clock)
        self.drained = self.stolen = self.stuck = None
        evictions = section.evictions
        budget = EvictionBudget(evictions, now_s)
        if (drains := evictions.drained_numa_nodes).evict:
            self.drained = NUMANodeDrainEvictor(prefix, budget, parse_duration(drains.delay), now_s)
        if (steal := evictions.cpu_steal).evict:
            self.stolen = HostStealEvictor(prefix, budget, steal, now_s)
        if (stuck := evictions.stuck_pods).evict:
            delay_s = parse_duration(stuck.delay)
            self.stuck = StuckPodEvictor(
                prefix, budget, delay_s, self._cluster, candidates, reader, now_s
            )
        self._evictors = [
            evictor for evictor in (self.drained, self.stolen, self.stuck) if evictor is not None
        ]
        self._writer = Writer(
            self._api,
            [self.capacity, *self._evictors],
            self._metrics,
            "controller",
            rate=section.api_qps,
            burst=REQUEST_BURST,
            clock=clock,
            jitter=random.random,
        )
        self._writer.may, self._writer.written = self._may_write, self._log_written
        self._address = split_address(section.address)
        namespace = read_pod_namespace(section.credentials_dir)
        address = reachable_address(self._address)
        self.lease = Lease(LEASE_NAME, namespace, api.execute_request, address=address, clock=clock)
        self.lease.answered, self.lease.changed = self._writer.record_outcome, self._writer.wake.set
        self._watches += self._build_watches(config)
        self._token = (
            TokenFile(section.token_file, setting="controller") if section.token_file else None
        )
        self._certificate: Certificate | None = None
        if section.tls_cert:
            self._certificate = Certificate(section.tls_cert, section.tls_key, setting="controller")
        self.server = MetricsAndProbeServer(
            self._address[0] if self._address else "",
            metrics=self.render_metrics,
            unready_reason=self.unready_reason,
            certificate=self._certificate,
            routes=[
                *(
                    Route(
                        method,
                        NODE_OFFLINE_CAPACITY_PATH,
                        self._forward_to_leader(answer),
                        MAX_PUT_BODY_BYTES,
                        self._check_write_allowed,
                    )
                    for method, answer in (
                        ("PUT", self._put_capacity),
                        ("DELETE", self._withdraw_capacity),
                        ("GET", self._get_node_capacity),
                    )
                ),
                *(self.page.http_routes() if self.page is not None else ()),
                *(self._verdicts.http_routes() if self._verdicts is not None else ()),
            ],
        )

    def _build_watches(self, config: AgentConfig) -> list[Watch]:
        watches: list[Watch] = []

        def add_watch(path: str, objects: WatchHandler, **more: Any) -> Watch:
            watches.append(Watch(self._api, path, objects, **more))
            return watches[-1]

        cluster, overview = self._cluster, self._overview
        steal, stuck = self.stolen, self.stuck
        nodes, topologies, pods, events = (_ObjectEventFanout(self._clock) for _ in range(4))
        for output in (self.capacity, self.drained, steal):
            if output is not None:
                nodes.parts.append((output.on_node_updated, output.on_node_removed))
        judges_pods = stuck is not None or self._verdicts is not None
        if judges_pods or overview is not None:
            nodes.parts.append(
                (lambda name, node, _: cluster.update_node(name, node), cluster.remove_node)
            )
            topologies.parts.append((cluster.update_topology, cluster.remove_topology))
        if steal is not None:
            topologies.parts.append((steal.on_topology_updated, steal.on_topology_removed))
        # Metadata is enough without these: specs of nodes, and the addresses of their pages.
        full_objects = judges_pods or (overview is not None and overview.needs_node_addresses)
        self._nodes = add_watch(NODES_PATH, nodes, metadata=not full_objects)
        self.page: ClusterPage | None = None
        if topologies.parts:
            topology_watch = add_watch(TOPOLOGIES_PATH, topologies)
            if overview is not None:
                self.page = ClusterPage(config, overview, topology_watch)
        if stuck is not None:
            pods.parts.append(
                (lambda _, pod, now_s: stuck.on_pod(pod, now_s), stuck.on_pod_removed)
            )
        if (verdicts := self._verdicts) is not None:
            pods.parts.append((lambda _, pod, now_s: verdicts.on_pod(pod), verdicts.on_pod_removed))
        if judges_pods:
            add_watch(PODS_PATH, pods, fields="status.phase=Pending", key=uid_of)
        if stuck is not None and self._section.evictions.stuck_pods.include_running:
            events.parts.append(
                (lambda _, event, now_s: stuck.on_rejection_event(event, now_s), lambda _: None)
            )
            add_watch(EVENTS_PATH, events, fields=REJECTION_EVENT_SELECTOR, key=uid_of)
        return watches

    async def run(self) -> None:
        """Run until cancelled; at the end the Lease is released.

        Raises:
            OSError: the address cannot be bound.
        """
        log.info("controller starting", version=__version__)
        section, source_up = self._section, self._metrics.source_up
        if self._address is not None:
            self.server.listen_on_port(self._address[1])
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._watches:
                    group.create_task(watch.run())
                group.create_task(self.lease.run_election())
                group.create_task(self._writer.run())
                group.create_task(self._run_ticks())
                if section.capacity_file:
                    readable = source_up.labels(CapacityFileSource.name).set
                    file = CapacityFileSource(section.capacity_file, self._record_reports, readable)
                    group.create_task(file.run())
                if section.prometheus.url:
                    readable = source_up.labels(PrometheusSource.name).set
                    query = PrometheusSource(section.prometheus, self._record_reports, readable)
                    group.create_task(query.run())
        finally:
            await self.server.stop()
            await self.lease.release_lease()
            await self._api.close()

    def unfinished_work_fields(self) -> dict[str, object]:
        """Return no fields: the sources report to the next leader, too."""
        return {}

    # --- capacity reports -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _count_report_outcome(self, source: str) -> Iterator[None]:
        try:
            yield
        except (BadCapacity, UnknownNode):
            self._metrics.source_reports.labels(source, "rejected").inc()
            raise
        self._metrics.source_reports.labels(source, "accepted").inc()

    def effective_capacity_document(self, node: str) -> dict[str, Any]:
        """Return the document of a Node's capacity."""
        self.capacity.require_node(node)
        now_s = self._clock()
        whole_capacity = OfflineCapacity(expires_at=now_s)
        current = self.capacity.effective_capacity(node, now_s) or whole_capacity
        return {
            "node": node,
            "zones": {str(i): round(f, 3) for i, f in sorted(current.zones.items())},
            "seconds": round(current.expires_at - now_s),
            "source": current.source,
        }

    def _check_write_allowed(self, request: HTTPRequest) -> None:
        if self._token is None:
            problem = "controller.tokenFile is not set, so PUT is not allowed"
            raise APIError(403, "Forbidden", problem)
        self._token.check_request_token(request)
        problem = self.unready_reason()
        if request.header_value(FORWARDED_HEADER.encode()) and not self.lease.is_leader:
            problem = "this replica is no longer the leader"
        if problem:
            raise not_ready_error(problem)

    def _forward_to_leader(self, answer: Callable[[HTTPRequest], Response]) -> Handler:
        """Build a handler that forwards to the leader, which alone keeps the PUT reports.

        Not a redirect: its address is not in the certificate, and clients send no token there.
        """

        async def handle(request: HTTPRequest) -> Response:
            if not (leader := self.lease.leader_address):
                return answer(request)
            try:
                return await forward_to_replica(request, leader, self._certificate)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise not_ready_error(f"{leader}, the leader, does not answer: {error}") from error

        return handle

    def _put_capacity(self, request: HTTPRequest) -> Response:
        try:
            document = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            raise APIError(400, "BadRequest", f"the body is no JSON: {str(error)[:100]}") from error
        node = request.segments[2]
        with _translate_api_errors(), self._count_report_outcome(PUT_SOURCE):
            measured = parse_capacity_put(node, document, limit_s=MAX_CAPACITY_VALIDITY_S)
            warning = self.capacity.record_report(PUT_SOURCE, measured, self._clock())
        return _json_response({"warning": warning, **self.effective_capacity_document(node)})

    def _withdraw_capacity(self, request: HTTPRequest) -> Response:
        node = request.segments[2]
        with _translate_api_errors():
            self.capacity.require_node(node)
        self.capacity.withdraw_source(PUT_SOURCE, node)
        return Response(204, b"")

    def _get_node_capacity(self, request: HTTPRequest) -> Response:
        with _translate_api_errors():
            return _json_response(self.effective_capacity_document(request.segments[2]))

    def unready_reason(self) -> str:
        """Return the reason why this replica can neither answer nor take over; empty if it can."""
        if problem := self.lease.standby_problem:
            return problem
        return "" if self._nodes.synced.is_set() else "the nodes are not known yet"

    def render_metrics(self) -> bytes:
        """Render the metrics in Prometheus' text format."""
        metrics, now_s = self._metrics, self._clock()
        metrics.leader.set(self.lease.is_leader)
        metrics.nodes.set(len(self.capacity.node_names()))
        currents = [
            self.capacity.effective_capacity(node, now_s) for node in self.capacity.reported_nodes()
        ]
        metrics.reduced_capacity_nodes.set(
            sum(1 for c in currents if c and min(c.zones.values()) < 1)
        )
        if self.drained is not None:
            metrics.drained_numa_nodes.set(self.drained.draining_count())
            metrics.pods_to_evict.set(self.drained.pending_count())
        if self.stuck is not None:
            metrics.stuck_pods.set(self.stuck.pending_count())
            metrics.resting_pods.set(self.stuck.resting_count())
        if self.stolen is not None:
            metrics.degraded_numa_nodes.set(self.stolen.degraded_count())
        return metrics.render_metrics()

    def _record_reports(self, source: str, measurements: Sequence[CapacityReport]) -> list[str]:
        """Record a source's reports about all Nodes; withdraw Nodes without a report."""
        if not self._nodes.synced.is_set():
            return []
        problems: list[str] = []
        now_s = self._clock()
        for report in measurements:
            try:
                with self._count_report_outcome(source):
                    self.capacity.record_report(source, report, now_s)
            except (BadCapacity, UnknownNode) as error:
                problems.append(str(error))
        for node in self.capacity.reported_nodes() - {report.node for report in measurements}:
            self.capacity.withdraw_source(source, node)
        return problems

    # --- the API server ---------------------------------------------------------------------------

    async def _run_ticks(self) -> None:
        while True:
            now_s, wall = self._clock(), time.time()
            self._cluster.expire_topologies(now_s)
            for evictor in self._evictors:
                # Also in replicas that do not lead: a new leader continues.
                evictor.on_tick(now_s, wall)
            if self._may_write():
                self.capacity.update_due_nodes(now_s, wall)
                self._writer.wake.set()
            await asyncio.sleep(TICK_INTERVAL_S)

    def _may_write(self) -> bool:
        return self._nodes.synced.is_set() and self.lease.is_leader

    def _log_written(self, request: APIRequest, outcome: Outcome) -> None:
        if outcome.result is not OutcomeKind.SUCCEEDED:
            return
        if request.output == self.capacity.name:
            log.info("capacity written", node=request.name, desired=_zone_factors_text(request))
        elif request.resource is Resource.EVICTIONS:
            dry_run = "dryRun" in request.body["deleteOptions"]
            log.info("pod evicted", pod=f"{request.namespace}/{request.name}", dry_run=dry_run)
        elif request.resource is Resource.EVENTS:
            body = request.body
            pod = f"{request.namespace}/{body['regarding']['name']}"
            log.info("eviction explained", pod=pod, reason=body["reason"], detail=body["note"])
            if body["reason"] == RELEASED_EVENT_REASON:
                self._metrics.device_evictions.inc()


async def forward_to_replica(
    request: HTTPRequest, address: str, certificate: Certificate | None
) -> Response:
    """Return another replica's answer; with TLS it must have the same certificate.

    Raises:
        aiohttp.ClientError, OSError, ValueError: the replica does not answer.
    """
    fingerprint = aiohttp.Fingerprint(certificate.certificate_sha256()) if certificate else True
    url = f"{'https' if certificate else 'http'}://{address}{request.path}"
    token = request.header_value(b"authorization").decode("latin-1")
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(FORWARD_TIMEOUT_S)) as client,
        client.request(
            request.method,
            URL(url, encoded=True),
            data=request.body,
            headers={"Authorization": token, FORWARDED_HEADER: "1"},
            ssl=fingerprint,
            allow_redirects=False,
        ) as answer,
    ):
        return Response(answer.status, await answer.read(), answer.content_type)


@contextlib.contextmanager
def _translate_api_errors() -> Iterator[None]:
    try:
        yield
    except BadCapacity as error:
        raise APIError(422, "BadCapacity", str(error)) from error
    except UnknownNode as error:
        raise APIError(404, "NotFound", str(error)) from error


def _json_response(document: Mapping[str, Any]) -> Response:
    return Response(200, json.dumps(document).encode())


def _zone_factors_text(request: APIRequest) -> str:
    zones = getattr(request.version, "zones", None)
    return "all" if zones is None else " ".join(f"{i}:{f:g}" for i, f in sorted(zones.items()))


def run_controller(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """

    def create_controller() -> ControllerService:
        return ControllerService(
            config, KubeAPI(config.controller.credentials_dir, "nri-numa-controller")
        )

    return service.run_service(create_controller, log, address="controller.address")
