"""``nri-numa scheduler``: the extender's process, its answers, and its life."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final

from nri_numa import __version__, service
from nri_numa import config as configuration
from nri_numa.config import AgentConfig, split_address
from nri_numa.config.derived import slots_resource
from nri_numa.config.sections import UnknownNodes
from nri_numa.kube.api import KubeAPI, Watch, namespace, uid_of
from nri_numa.kube.lease import Lease, own_address
from nri_numa.kube.requests import KubeError
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import ServiceMetrics
from nri_numa.scheduler import protocol
from nri_numa.scheduler.binder import Binder
from nri_numa.scheduler.candidates import CandidateIndex
from nri_numa.scheduler.nodes import Nodes
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.pod_request import PodRequest
from nri_numa.scheduler.watcher import (
    PENDING,
    PODS,
    TOPOLOGIES,
    NodeWatcher,
    PodActivator,
    PodWatcher,
)
from nri_numa.web.protocol import APIError, Handler, Response, Route
from nri_numa.web.protocol import Request as HTTPRequest
from nri_numa.web.security import Certificate
from nri_numa.web.server import Site

log = get_logger("scheduler")

LARGEST: Final = 4 << 20
"""Bytes of a question: a pod has at most 1.5 MiB (etcd's limit), 5,000 names a quarter of one."""
CONNECTIONS: Final = 512
"""kube-scheduler has one for each binding that is under way, and hundreds are after a burst."""
SAMPLE: Final = 100
"""Names that kube-scheduler sends at least where it did not look at all nodes
(minFeasibleNodesToFind)."""
_MAX_SAMPLED: Final = 1000
"""Kinds of refused pods for which other nodes are still to be looked for, one in each tick."""
TICK = 0.5
"""Seconds between two looks at what has run out."""
PROBE: Final = 4.0
"""Seconds between two questions whether the API server answers."""
SILENT: Final = 10.0
"""Seconds without the API server after which we are not ready."""
QUIET: Final = 1.0
"""Seconds without a question after which another replica may have been asked meanwhile, where there
is no Lease: kube-schedulers take longer for two changes of their leader (their retryPeriod is 2 s).
"""
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
KINDS: Final = ("noderesourcetopologies", "pods")
"""What is watched, as metrics name it."""
_AGES: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)

Verb = Callable[[bytes], Awaitable[bytes]]


class SchedulerMetrics(ServiceMetrics):
    """Metrics of the extender; names begin with ``nri_numa_scheduler_``."""

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_scheduler", version)
        self.calls = self.counter("calls_total", "Calls of kube-scheduler.", "verb", "result")
        self.seconds = self.histogram(
            "call_seconds", "Time to answer a call.", "verb", buckets=_SECONDS
        )
        self.refused = self.counter("refused_nodes_total", "Nodes that had no room for a pod.")
        self.by_sums = self.counter(
            "nodes_by_sums_total",
            "Nodes that passed by sums alone, because a pod asked for too much work.",
        )
        self.bind_failures = self.counter(
            "bind_failures_total", "Calls of bind after which the pod was not on that node."
        )
        self.wakes = self.counter(
            "wakes_total", "Touches of a Node's annotation to wake refused pods."
        )
        self.nodes = self.gauge("nodes", "Nodes with a NodeResourceTopology.")
        self.unreadable = self.gauge(
            "unreadable_nodes", "Nodes whose object is missing, too old or cannot be read."
        )
        self.held = self.gauge("held_pods", "Pods whose NUMA nodes are held.")
        self.oldest = self.gauge("oldest_hold_seconds", "Age of the oldest of these.")
        self.uncounted = self.gauge(
            "uncounted_pods", "Those that started a minute ago and that their nodes do not count."
        )
        self.leader = self.gauge("leader", "Whether this replica binds.")
        self.synced = self.gauge("synced", "Whether nodes and pods were read.")
        self.age = self.gauge(
            "known_age_seconds",
            "Since the API server last said what there is; up to a minute where nothing changes.",
            "kind",
        )
        self.event_age = self.histogram(
            "event_age_seconds",
            "From the write of an object to our reading of it, a second off at most.",
            "kind",
            buckets=_AGES,
        )


class Extender:
    """All of it.

    Raises:
        ConfigError: a certificate cannot be read.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        section = config.scheduler
        self._section, self._clock = section, clock
        self._certificate = (
            Certificate(section.tls_cert, section.tls_key, section.client_ca, setting="scheduler")
            if section.tls_cert
            else None
        )
        settings = configuration.settings(config)
        self.metrics = SchedulerMetrics(__version__)
        self.api = KubeAPI(section.credentials, "nri-numa-scheduler")
        # On a connection of its own: renewing must not wait behind lists and bindings.
        self.lease_api = KubeAPI(section.credentials, "nri-numa-scheduler")
        self.election = (
            Lease(
                section.lease,
                namespace(section.credentials),
                self.lease_api.do,
                address=own_address(split_address(section.address)),
                clock=clock,
            )
            if section.lease
            else None
        )
        self.nodes = Nodes()
        self.reader = PodReader(settings, slots_resource(config), claims=config.dra.enabled)
        self.candidates = CandidateIndex(
            self.nodes,
            settings.strategy,
            unknown_fits=section.unknown_nodes is UnknownNodes.ALLOW,
            narrow=section.narrow,
        )
        self.activator = PodActivator(
            self.api, config, self.metrics.wakes, clock=clock, wall=time.time
        )
        self.node_watcher = NodeWatcher(self.nodes, self.activator, config.annotation_prefix, clock)
        self.pod_watcher = PodWatcher(
            self.api, self.nodes, self.reader, self.activator, config, clock
        )
        self.binder = Binder(
            self.api, self.nodes, self.candidates, self.reader, self.pod_watcher, config, clock
        )
        topologies, pods = (self.metrics.event_age.labels(kind).observe for kind in KINDS)
        self.topologies = Watch(
            self.api, TOPOLOGIES, self.node_watcher, aged=topologies, clock=clock
        )
        self.pods = Watch(
            self.api, PODS, self.pod_watcher, fields=PENDING, key=uid_of, aged=pods, clock=clock
        )
        self._sampled: dict[tuple[object, ...], tuple[PodRequest, list[str]]] = {}
        self._answered = self._asked = clock()
        self._elected = asyncio.Event()
        if self.election is not None:
            self.election.changed = self._leads_or_not
        self.port = 0

    # --- the verbs --------------------------------------------------------------------------------

    async def filter(self, body: bytes) -> bytes:
        """Which of the nodes have room."""
        self._note_question()
        question = protocol.question(body)
        request = self.reader.request(question.pod)
        if not request.nothing and (problem := self._not_synced()):
            return protocol.error(problem)
        found = await service.in_turns(self.candidates.filtering(request, question.names))
        reasons = found.failed | found.hopeless
        if reasons:
            self.metrics.refused.inc(len(reasons))
        if found.by_sums:
            self.metrics.by_sums.inc(found.by_sums)
            log.info(
                "nodes passed by sums alone: the pod asks for too much work to judge all in full",
                pod=f"{request.namespace}/{request.name}",
                containers=len(request.aligned) + len(request.kubelets),
                by_sums=found.by_sums,
                asked=len(question.names),
            )
        if not found.fits and reasons:
            self._refused(request, question.names)
            log.debug(
                "no node has room",
                pod=f"{request.namespace}/{request.name}",
                reasons="; ".join(sorted(set(reasons.values())))[:500],
            )
        return protocol.filter_result(found.fits, found.failed, found.hopeless)

    def _refused(self, request: PodRequest, names: list[str]) -> None:
        """No node has room: the pod waits, or for its next turn where kube-scheduler sampled.

        It waits too where an empty node has too little: a node that is new, or not drained any
        more, may be tried before its object says so.
        """
        if request.wrong:
            return
        self.activator.refused(request.uid)
        if SAMPLE <= len(names) < len(self.nodes):
            self._sampled.pop(request.key, None)
            if len(self._sampled) >= _MAX_SAMPLED:
                del self._sampled[next(iter(self._sampled))]
            self._sampled[request.key] = request, names

    async def look_elsewhere(self) -> None:
        """Wake pods of one kind that no node of a sample had room for, if another node has."""
        if not self._sampled:
            return
        request, names = self._sampled.pop(next(iter(self._sampled)))
        other = await service.in_turns(self.candidates.elsewhere(request, names))
        if other and self.activator.once_more(request.uid, len(names) / len(self.nodes)):
            self.activator.wake(other)

    async def prioritize(self, body: bytes) -> bytes:
        """How well the nodes suit."""
        question = protocol.question(body)
        request = self.reader.request(question.pod)
        scores = await service.in_turns(self.candidates.prioritizing(request, question.names))
        return protocol.priorities(scores)

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod to the node that was chosen."""
        self._note_question()
        binding = protocol.binding(body)
        problem = self.not_ready() or await self.binder.bind(binding)
        if problem:
            self.metrics.bind_failures.inc()
            log.info(
                "bind failed",
                pod=f"{binding.namespace}/{binding.name}",
                node=binding.node,
                problem=problem,
            )
        return protocol.error(problem)

    def _note_question(self) -> None:
        """kube-scheduler asks, and nobody says whether another replica was asked before."""
        before, self._asked = self._asked, self._clock()
        if self.election is None and self._asked - before > QUIET:
            self.pod_watcher.read_anew()

    # --- readiness --------------------------------------------------------------------------------

    def _not_synced(self) -> str:
        for watch, what in (
            (self.topologies, "NodeResourceTopology objects"),
            (self.pods, "pods"),
        ):
            if not watch.synced.is_set():
                return watch.problem or f"{what} are still being read"
        return ""

    def leads(self) -> bool:
        """Whether this replica binds."""
        return self.election is None or self.election.leads

    def not_ready(self) -> str:
        """Why nothing can be bound here; else empty."""
        election = self.election
        if election is not None and not election.leads:
            return election.problem or (
                f"another replica leads: {election.holder or 'none is elected yet'}"
            )
        return self._not_synced()

    def unready(self) -> str:
        """Why this replica can neither serve nor take over, or why what is known may be old.

        With old knowledge pods are bound all the same: what is held is certain, and a binding fails
        by itself where nothing answers.
        """
        election = self.election
        problem = election.standby_problem if election is not None else ""
        return problem or self._not_synced() or self._old()

    def _old(self) -> str:
        now = self._clock()
        for watch in (self.topologies, self.pods):
            if watch.failing is not None and now - watch.failing > SILENT:
                return f"{watch.problem}; what is known is {now - watch.seen:.0f} s old"
        if now - self._answered > SILENT:
            return f"the API server has not answered for {now - self._answered:.0f} s"
        return ""

    async def _probe(self) -> None:
        """Ask whether the API server answers: a watch of one that stands still says nothing."""
        while True:
            with contextlib.suppress(KubeError):
                await self.lease_api.ask("GET", "/version", seconds=PROBE)
                self._answered = self._clock()
            await asyncio.sleep(PROBE)

    def measured(self) -> bytes:
        """The metrics, with those set that are counted when they are read."""
        metrics, now = self.metrics, self._clock()
        metrics.nodes.set(len(self.nodes))
        metrics.unreadable.set(self.nodes.unreadable)
        holds = self.nodes.holds
        metrics.held.set(len(holds))
        metrics.oldest.set(max((now - hold.since for hold in holds.values()), default=0))
        metrics.uncounted.set(len(self.nodes.late(now)))
        metrics.leader.set(self.leads())
        metrics.synced.set(not self._not_synced())
        for kind, watch in zip(KINDS, (self.topologies, self.pods), strict=True):
            metrics.age.labels(kind).set(round(now - watch.seen, 1))
        return metrics.text()

    # --- the HTTP side ----------------------------------------------------------------------------

    def site(self, host: str) -> Site:
        """The server: kube-scheduler's verbs, metrics and probes."""
        verbs: dict[str, Verb] = {
            "/filter": self.filter,
            "/prioritize": self.prioritize,
            "/bind": self.bind,
        }
        certified, metrics = bool(self._section.client_ca), self.metrics
        scheme = "https://" if self._certificate is not None else "http://"

        def admit(request: HTTPRequest) -> None:
            if certified and not request.certified:
                raise APIError(
                    403, "Forbidden", "a client certificate is expected (scheduler.clientCA)"
                )

        def handler(path: str, answer: Verb) -> Handler:
            seconds = metrics.seconds.labels(path[1:])  # looked up once, which is what costs

            async def handle(request: HTTPRequest) -> Response:
                # The leader alone knows what is held. Whoever asked goes there, with its body.
                if self.election is not None and (leader := self.election.leader_address):
                    return Response(307, b"", headers=[("Location", f"{scheme}{leader}{path}")])
                began = time.perf_counter()
                try:
                    return Response(200, await answer(request.body))
                except protocol.BadRequest as error:
                    return Response(400, protocol.error(str(error)))
                finally:
                    seconds.observe(time.perf_counter() - began)

            return handle

        def counted(path: str, status: int) -> None:
            if path in verbs:
                result = "answered" if status == 200 else str(status)
                metrics.calls.labels(path[1:], result).inc()

        return Site(
            host,
            version=__version__,
            metrics=self.measured,
            not_ready=self.unready,
            certificate=self._certificate,
            routes=[
                Route("POST", path, handler(path, verb), LARGEST, admit)
                for path, verb in verbs.items()
            ],
            counted=counted,
            most=CONNECTIONS,
        )

    # --- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            OSError: the address cannot be had.
        """
        section = self._section
        log.info("starting", version=__version__, lease=section.lease)
        address = split_address(section.address)
        assert address is not None, section.address  # noqa: S101  # the configuration was checked
        host, port = address
        server = self.site(host)
        try:
            server.listen(port)
            self.port = server.port
            log.info("listening", address=section.address, tls=self._certificate is not None)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                if self.election is not None:
                    group.create_task(self.election.run())
                group.create_task(self.activator.run(self.leads))
                group.create_task(self.tick())
                group.create_task(self._look_elsewhere())
                group.create_task(self._ask_after_pods())
                group.create_task(self._probe())
        finally:
            await server.stop()
            await self.binder.finish()  # who leads next must find them written
            if self.election is not None:
                await self.election.release()
            await self.lease_api.close()
            await self.api.close()

    def left(self) -> dict[str, object]:
        """Pods whose NUMA nodes are held."""
        return {"held": len(self.nodes.holds)}

    def _leads_or_not(self) -> None:
        """This replica begins to lead, or ends: what it knows is not good enough to begin."""
        if self.leads():
            self.topologies.synced.clear()
            self.pods.synced.clear()
            self._elected.set()

    async def _follow(self) -> None:
        """Follow nodes and pods, from a list that is newer than the Lease where we lead.

        How far a watch is behind cannot be told (a bookmark comes once in a minute, and before
        Kubernetes 1.35 versions may not be compared); a list without a version is of this moment.
        """
        while True:
            self._elected.clear()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.topologies.run()),
                         group.create_task(self._follow_pods())]  # fmt: skip
                await self._elected.wait()
                for task in tasks:
                    task.cancel()

    async def _follow_pods(self) -> None:
        # Pods are held on nodes that are known.
        await self.topologies.synced.wait()
        await self.pods.run()

    async def _look_elsewhere(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            await self.look_elsewhere()

    async def _ask_after_pods(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            await self.pod_watcher.ask_after_pods()

    async def tick(self) -> None:
        """Let time pass."""
        answers = False
        while True:
            await asyncio.sleep(TICK)
            self.node_watcher.tick()
            self.pod_watcher.tick()
            before, answers = answers, not self.not_ready()
            if answers and not before:
                # Others may have refused pods before.
                self.activator.wake(*self.nodes.names)


def run(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code."""
    return service.run(lambda: Extender(config), log, address="scheduler.address")
