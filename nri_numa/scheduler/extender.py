"""``nri-numa scheduler``: the extender's process, its verbs, readiness and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

from nri_numa import __version__, service
from nri_numa.cluster.cluster_state import ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pod_request import PodRequest
from nri_numa.config import AgentConfig, split_address
from nri_numa.config.sections import MissingTopologyAction, Scheduling
from nri_numa.kube.api import KubeAPI, Watch, read_pod_namespace, uid_of
from nri_numa.kube.lease import Lease, reachable_address
from nri_numa.kube.requests import KubeClient, KubeError
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler import protocol
from nri_numa.scheduler.binder import Binder
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.metrics import WATCHED_KINDS, SchedulerMetrics
from nri_numa.scheduler.pending_evictions import PendingEvictions
from nri_numa.scheduler.preemption import Preemption
from nri_numa.scheduler.watcher import (
    PENDING_BOUND_PODS_SELECTOR,
    PODS_PATH,
    TOPOLOGIES_PATH,
    NodeWatcher,
    PodActivator,
    PodWatcher,
)
from nri_numa.web.protocol import APIError, Handler, HTTPRequest, Response, Route
from nri_numa.web.security import Certificate
from nri_numa.web.server import MetricsAndProbeServer

log = get_logger("scheduler")

MAX_QUESTION_BYTES: Final = 4 << 20
"""Bytes of a question: a pod has at most 1.5 MiB (etcd's limit), 5,000 names 0.25 MiB."""
MAX_EXTENDER_CONNECTIONS: Final = 512
"""Connections; kube-scheduler opens one for each binding in progress, hundreds after a burst."""
MIN_FEASIBLE_NODES_TO_FIND: Final = 100
"""Fewest names that kube-scheduler sends if it did not try all nodes (minFeasibleNodesToFind)."""
_MAX_SAMPLED_REQUESTS: Final = 1000
"""Kinds of rejected pods that still need a search for another node, one in each tick."""
TICK_INTERVAL_S = 0.5
"""Seconds between two checks for expired topologies and assumed pods."""
PROBE_INTERVAL_S: Final = 4.0
"""Seconds between two probes of the API server."""
API_UNREACHABLE_LIMIT_S: Final = 10.0
"""Seconds without the API server after which the extender is not ready."""
REREAD_AFTER_IDLE_S: Final = 1.0
"""Seconds without a question after which another replica may have been asked, if there is no Lease:
kube-schedulers need longer for two changes of their leader (their retryPeriod is 2 s).
"""

VerbHandler = Callable[[bytes], Awaitable[bytes]]


class Extender:
    """The extender's parts, verbs and tasks.

    Args:
        api: for lists, watches and bindings.
        lease_api: a client with its own connections, so a renewal never queues behind these.

    Raises:
        ConfigError: a certificate cannot be read.
    """

    def __init__(
        self,
        config: AgentConfig,
        api: KubeClient,
        lease_api: KubeClient,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        section = config.scheduler
        self._section, self._clock = section, clock
        self._certificate = _load_certificate(section)
        self.metrics = SchedulerMetrics(__version__)
        self.api, self.lease_api = api, lease_api
        self.election = _create_lease(section, lease_api, clock)
        self.nodes = ClusterState(config.annotation_prefix)
        self.reader = PodReader(config)
        self.candidates = VerdictCache(
            self.nodes,
            config.strategy,
            unknown_fits=section.on_missing_topology is MissingTopologyAction.ALLOW,
            filter_to_best=section.filter_to_best,
        )
        self.activator = PodActivator(
            api, config, self.metrics.pod_wakeups, clock=clock, wall=time.time
        )
        self.node_watcher = NodeWatcher(self.nodes, self.activator, clock)
        self.pod_watcher = PodWatcher(api, self.nodes, self.reader, self.activator, config, clock)
        self.binder = Binder(
            api, self.nodes, self.candidates, self.reader, self.pod_watcher, config, clock
        )
        self.evictions = PendingEvictions(
            self.nodes, clock, self.metrics, self.activator.on_free_increased
        )
        self.preemption = Preemption(
            api, self.nodes, self.candidates, self.reader, self.evictions, config, self.metrics
        )
        topologies, pods = (self.metrics.event_age.labels(kind).observe for kind in WATCHED_KINDS)
        self.topologies = Watch(
            api, TOPOLOGIES_PATH, self.node_watcher, aged=topologies, clock=clock
        )
        self.pods = Watch(
            api,
            PODS_PATH,
            self.pod_watcher,
            fields=PENDING_BOUND_PODS_SELECTOR,
            key=uid_of,
            aged=pods,
            clock=clock,
        )
        self._sampled: dict[tuple[object, ...], tuple[PodRequest, list[str]]] = {}
        self._answered = self._asked = clock()
        self._elected = asyncio.Event()
        if self.election is not None:
            self.election.changed = self._on_leadership_change
        self.port = 0

    # --- the verbs --------------------------------------------------------------------------------

    async def filter(self, body: bytes) -> bytes:
        """Answer with the feasible nodes, and the reasons of the others."""
        self._require_rereads_after_idle()
        question = protocol.parse_extender_args(body)
        request = self.reader.read_pod_request(question.pod)
        if not request.is_unconstrained and (problem := self._unsynced_problem()):
            return protocol.encode_error(problem)
        result = await service.run_in_turns(
            self.candidates.filter_steps(request, question.node_names)
        )
        self.evictions.record_nomination(question.pod)
        self.evictions.explain_rejections(request.uid, result)
        reasons = result.failed | result.unresolvable
        if reasons:
            self.metrics.nodes_filtered.inc(len(reasons))
        if result.by_sums:
            self.metrics.nodes_by_sums.inc(result.by_sums)
            log.info(
                "nodes passed by sums alone",
                pod=f"{request.namespace}/{request.name}",
                container_count=len(request.plugin_aligned_requests) + len(request.kubelet_aligned),
                sums_node_count=result.by_sums,
                node_count=len(question.node_names),
            )
        if not result.feasible and reasons:
            self._record_unschedulable(request, question.node_names)
            log.debug(
                "all nodes filtered",
                pod=f"{request.namespace}/{request.name}",
                problem="; ".join(sorted(set(reasons.values())))[:500],
            )
        return protocol.encode_filter_result(result.feasible, result.failed, result.unresolvable)

    def _record_unschedulable(self, request: PodRequest, names: list[str]) -> None:
        """Remember a pod without a feasible node, and the sample that kube-scheduler tried.

        A pod that no empty node fits is remembered too: a new or undrained node may be tried before
        its object says so.
        """
        if request.invalid_reason:
            return
        self.activator.record_unschedulable(request.uid)
        if MIN_FEASIBLE_NODES_TO_FIND <= len(names) < len(self.nodes):
            self._sampled.pop(request.verdict_key, None)
            if len(self._sampled) >= _MAX_SAMPLED_REQUESTS:
                del self._sampled[next(iter(self._sampled))]
            self._sampled[request.verdict_key] = request, names

    async def wake_sampled_pods(self) -> None:
        """Wake pods of one kind that no node of a sample fits, if another node fits."""
        if not self._sampled:
            return
        request, names = self._sampled.pop(next(iter(self._sampled)))
        other_node = await service.run_in_turns(self.candidates.find_other_node(request, names))
        if other_node and self.activator.should_wake_again(
            request.uid, len(names) / len(self.nodes)
        ):
            self.activator.wake_pods(other_node)

    async def prioritize(self, body: bytes) -> bytes:
        """Answer with a score for each node."""
        question = protocol.parse_extender_args(body)
        request = self.reader.read_pod_request(question.pod)
        scores = await service.run_in_turns(
            self.candidates.prioritize_steps(request, question.node_names)
        )
        return protocol.encode_priorities(scores)

    async def preempt(self, body: bytes) -> bytes:
        """Answer with the pods to evict by node; a node where no eviction helps is left out."""
        question = protocol.parse_preemption_args(body)
        if self._unsynced_problem():
            return protocol.encode_victims({})
        return protocol.encode_victims(await self.preemption.select_victims(question))

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod to the node that was chosen."""
        self._require_rereads_after_idle()
        binding = protocol.parse_binding_args(body)
        problem = self.unready_reason() or await self.binder.bind(binding)
        if not problem:
            self.evictions.on_bound(binding.uid, binding.node)
        else:
            self.metrics.bind_failures.inc()
            log.info(
                "pod not bound",
                pod=f"{binding.namespace}/{binding.name}",
                node=binding.node,
                problem=problem,
            )
        return protocol.encode_error(problem)

    def _require_rereads_after_idle(self) -> None:
        """Require node rereads if another replica may have answered since the last question."""
        last_question_at, self._asked = self._asked, self._clock()
        if self.election is None and self._asked - last_question_at > REREAD_AFTER_IDLE_S:
            self.pod_watcher.require_node_rereads()

    # --- readiness --------------------------------------------------------------------------------

    def _unsynced_problem(self) -> str:
        for watch, objects in (
            (self.topologies, "NodeResourceTopology objects"),
            (self.pods, "pods"),
        ):
            if not watch.synced.is_set():
                return watch.problem or f"{objects} are still being read"
        return ""

    def is_leader(self) -> bool:
        """Return True if this replica binds."""
        return self.election is None or self.election.is_leader

    def unready_reason(self) -> str:
        """Return the reason why this replica cannot bind; empty if it can."""
        election = self.election
        if election is not None and not election.is_leader:
            return election.problem or (
                f"another replica leads: {election.holder or 'none is elected yet'}"
            )
        return self._unsynced_problem()

    def health_problem(self) -> str:
        """Return the problem that keeps this replica from serving or from having fresh data.

        Pods are bound even with stale data: assumed pods are certain, and a binding fails by itself
        if the API server does not answer.
        """
        election = self.election
        problem = election.standby_problem if election is not None else ""
        return problem or self._unsynced_problem() or self._staleness_problem()

    def _staleness_problem(self) -> str:
        now_s = self._clock()
        for watch in (self.topologies, self.pods):
            if watch.failing is not None and now_s - watch.failing > API_UNREACHABLE_LIMIT_S:
                return f"{watch.problem}; what is known is {now_s - watch.seen:.0f} s old"
        if now_s - self._answered > API_UNREACHABLE_LIMIT_S:
            return f"the API server has not answered for {now_s - self._answered:.0f} s"
        return ""

    async def _probe_api_server(self) -> None:
        """Probe the API server: a watch does not notice a server that hangs."""
        while True:
            with contextlib.suppress(KubeError):
                await self.lease_api.request_json("GET", "/version", seconds=PROBE_INTERVAL_S)
                self._answered = self._clock()
            await asyncio.sleep(PROBE_INTERVAL_S)

    def render_metrics(self) -> bytes:
        """Render the metrics, after setting those that are counted on demand."""
        metrics, now_s = self.metrics, self._clock()
        metrics.nodes.set(len(self.nodes))
        metrics.unreadable_nodes.set(self.nodes.unreadable_count)
        assumed_pods = self.nodes.assumed_pods
        metrics.assumed_pods.set(len(assumed_pods))
        metrics.oldest_assumed_pod.set(
            max((now_s - hold.assumed_at for hold in assumed_pods.values()), default=0)
        )
        metrics.uncounted_pods.set(len(self.nodes.late_assumed_pods(now_s)))
        metrics.leader.set(self.is_leader())
        metrics.synced.set(not self._unsynced_problem())
        for kind, watch in zip(WATCHED_KINDS, (self.topologies, self.pods), strict=True):
            metrics.cache_age.labels(kind).set(round(now_s - watch.seen, 1))
        return metrics.render_metrics()

    # --- the HTTP side ----------------------------------------------------------------------------

    def build_server(self, host: str) -> MetricsAndProbeServer:
        """Build the server for kube-scheduler's verbs, metrics and probes."""
        verbs: dict[str, VerbHandler] = {
            "/filter": self.filter,
            "/prioritize": self.prioritize,
            "/preempt": self.preempt,
            "/bind": self.bind,
        }

        def count_call(path: str, status: int) -> None:
            if path in verbs:
                result = "answered" if status == 200 else str(status)
                self.metrics.calls.labels(path[1:], result).inc()

        return MetricsAndProbeServer(
            host,
            metrics=self.render_metrics,
            unready_reason=self.health_problem,
            certificate=self._certificate,
            routes=[
                Route(
                    "POST",
                    path,
                    self._build_handler(path, verb),
                    MAX_QUESTION_BYTES,
                    self._require_client_certificate,
                )
                for path, verb in verbs.items()
            ],
            count_request=count_call,
            max_connections=MAX_EXTENDER_CONNECTIONS,
        )

    def _require_client_certificate(self, request: HTTPRequest) -> None:
        if self._section.client_ca and not request.certified:
            raise APIError(
                403, "Forbidden", "a client certificate is expected (scheduler.clientCA)"
            )

    def _build_handler(self, path: str, answer: VerbHandler) -> Handler:
        """Build the handler of a verb: followers redirect to the leader, with the body.

        The leader alone knows the assumed pods.
        """
        # One lookup, which is the expensive part.
        seconds = self.metrics.call_duration.labels(path[1:])
        scheme = "https://" if self._certificate is not None else "http://"

        async def handle_request(request: HTTPRequest) -> Response:
            if self.election is not None and (leader := self.election.leader_address):
                return Response(307, b"", headers=[("Location", f"{scheme}{leader}{path}")])
            start_time = time.perf_counter()
            try:
                return Response(200, await answer(request.body))
            except protocol.BadRequest as error:
                return Response(400, protocol.encode_error(str(error)))
            finally:
                seconds.observe(time.perf_counter() - start_time)

        return handle_request

    # --- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            OSError: the address cannot be bound.
        """
        section = self._section
        log.info("extender starting", version=__version__, lease=section.lease_name)
        address = split_address(section.address)
        assert address is not None, section.address  # noqa: S101  # the configuration was checked
        host, port = address
        server = self.build_server(host)
        try:
            server.listen_on_port(port)
            self.port = server.listening_port
            log.info(
                "extender listening", address=section.address, tls=self._certificate is not None
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(self._run_watches())
                if self.election is not None:
                    group.create_task(self.election.run_election())
                group.create_task(self.activator.run(self.is_leader))
                group.create_task(self.run_ticks())
                group.create_task(_run_repeatedly(self.wake_sampled_pods))
                group.create_task(_run_repeatedly(self.pod_watcher.query_overdue_pods))
                group.create_task(self._probe_api_server())
        finally:
            await server.stop()
            await self.binder.wait_for_bindings()  # the next leader must find them written
            if self.election is not None:
                await self.election.release_lease()
            await self.lease_api.close()
            await self.api.close()

    def unfinished_work_fields(self) -> dict[str, object]:
        """Return the number of assumed pods, for the log line at the end."""
        return {"assumed_pod_count": len(self.nodes.assumed_pods)}

    def _on_leadership_change(self) -> None:
        """Require new lists when this replica becomes the leader: its data may be stale."""
        if self.is_leader():
            self.topologies.synced.clear()
            self.pods.synced.clear()
            self._elected.set()

    async def _run_watches(self) -> None:
        """Watch nodes and pods; a leader starts with lists that are newer than its Lease.

        The delay of a watch is unknown (a bookmark comes once a minute, and before Kubernetes 1.35
        versions may not be compared). A list without a version is current.
        """
        while True:
            self._elected.clear()
            async with asyncio.TaskGroup() as group:
                watches = self.topologies.run(), self._run_pod_watch()
                tasks = list(map(group.create_task, watches))
                await self._elected.wait()
                for task in tasks:
                    task.cancel()

    async def _run_pod_watch(self) -> None:
        # A pod is assumed on a known node.
        await self.topologies.synced.wait()
        await self.pods.run()

    async def run_ticks(self) -> None:
        """Expire topologies and assumed pods; wake pods when this replica becomes ready."""
        answers = False
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.node_watcher.expire_topologies()
            self.pod_watcher.expire_assumed_pods()
            self.evictions.expire_evictions()
            answered_before, answers = answers, not self.unready_reason()
            if answers and not answered_before:
                # Other replicas may have rejected pods before.
                self.activator.wake_pods(*self.nodes.node_names)


async def _run_repeatedly(step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(TICK_INTERVAL_S)
        await step()


def _load_certificate(section: Scheduling) -> Certificate | None:
    if not section.tls_cert:
        return None
    return Certificate(section.tls_cert, section.tls_key, section.client_ca, setting="scheduler")


def _create_lease(section: Scheduling, api: KubeClient, clock: Callable[[], float]) -> Lease | None:
    if not section.lease_name:
        return None
    return Lease(
        section.lease_name,
        read_pod_namespace(section.credentials_dir),
        api.execute_request,
        address=reachable_address(split_address(section.address)),
        clock=clock,
    )


def run_extender(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code."""

    def create_extender() -> Extender:
        apis = (KubeAPI(config.scheduler.credentials_dir, "nri-numa-scheduler") for _ in range(2))
        return Extender(config, *apis)

    return service.run_service(create_extender, log, address="scheduler.address")
