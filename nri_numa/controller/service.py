"""The controller's process: one of its replicas leads, takes what others measured, and writes it.

What was said is kept in memory only. A new leader lets stand what an earlier one wrote until its
time is over, and by then the sources have said it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import aiohttp
from yarl import URL

from nri_numa import __version__, service
from nri_numa import config as configuration
from nri_numa.config import AgentConfig, parse_duration, slots_resource, split_address
from nri_numa.config.sections import Drain, Steal, Stuck
from nri_numa.controller import capacity, evictor
from nri_numa.controller.capacity import CapacityOutput, Measurement, UnknownNode, from_put
from nri_numa.controller.evictor import Drained, Stolen
from nri_numa.controller.overview import Overview
from nri_numa.controller.page import Page
from nri_numa.controller.refused import FIELDS, Refused
from nri_numa.controller.sources import FileSource, PrometheusSource
from nri_numa.kube.api import KubeAPI, Watch, Watched, name_of, namespace, uid_of
from nri_numa.kube.lease import Lease, own_address
from nri_numa.kube.requests import Outcome, Request, Resource, Result
from nri_numa.model.offline_capacity import LONGEST_VALIDITY, BadCapacity
from nri_numa.observe.logs import get_logger
from nri_numa.publisher.writer import Writer, WriterMetrics
from nri_numa.scheduler.candidates import CandidateIndex
from nri_numa.scheduler.nodes import Nodes
from nri_numa.scheduler.pod_reader import PodReader
from nri_numa.scheduler.published import Freshness
from nri_numa.scheduler.watcher import PODS, TOPOLOGIES
from nri_numa.web.protocol import APIError, Handler, Response, Route
from nri_numa.web.protocol import Request as HTTPRequest
from nri_numa.web.security import Certificate, TokenFile
from nri_numa.web.server import Site

log = get_logger("controller")

BURST: Final = 20
"""Requests to the API server at once after a quiet time."""
HYSTERESIS: Final = 0.05
"""A factor is written again when it differs by so much from what is written."""
LEASE: Final = "nri-numa-controller"
"""Name of the Lease, which the Role of the manifests names too."""
TICK: Final = 1.0
"""Seconds between two looks at what should be written."""
PUT: Final = "put"
FORWARDED: Final = "nri-numa-forwarded"
"""Header of what another replica has got."""
FORWARD_S: Final = 5.0
LARGEST: Final = 65536
"""Bytes of a body; 1,024 NUMA nodes take less than half."""
PATH: Final = "/v1/nodes/{node}/offline-capacity"
NODES: Final = Resource.NODES.path()
EVENTS: Final = "/api/v1/events"


class ControllerMetrics(WriterMetrics):
    """Metrics of the controller; names begin with ``nri_numa_controller_``."""

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_controller", version)
        self.leader = self.gauge("leader", "Whether this replica holds the Lease.")
        self.nodes = self.gauge("nodes", "Nodes of the cluster.")
        self.lowered = self.gauge(
            "lowered_nodes", "Nodes of which a source says that less than everything is there."
        )
        self.drained = self.gauge(
            "drained_numa_nodes",
            "NUMA nodes that the annotation drained names; 0 without evictions.",
        )
        self.to_move = self.gauge(
            "pods_to_move", "Pods on drained NUMA nodes that are still to be evicted."
        )
        self.stuck = self.gauge(
            "stuck_pods",
            "Pods that wait for NUMA nodes of their node; 0 without stuck.evict.",
        )
        self.stolen = self.gauge(
            "stolen_numa_nodes",
            "NUMA nodes whose measured factor stays low; 0 without steal.evict.",
        )
        self.offers = self.counter(
            "offers_total",
            "What sources said of one Node, by source and by accepted or refused.",
            "source",
            "result",
        )
        self.source_up = self.gauge(
            "source_up", "Whether a source could be read the last time.", "source"
        )


class _Objects(Watched):
    """Objects of one kind by their key, as several parts of the controller follow them."""

    def __init__(
        self,
        clock: Callable[[], float],
        changed: Iterable[Callable[[str, Mapping[str, Any], float], object]],
        removed: Iterable[Callable[[str], object]] = (),
    ) -> None:
        self._clock, self._changed, self._removed = clock, tuple(changed), tuple(removed)

    def put(self, document: Mapping[str, Any]) -> None:
        """One exists, new or changed."""
        for changed in self._changed:
            changed(name_of(document), document, self._clock())

    def removed(self, key: str) -> None:
        """One does not exist any more."""
        for removed in self._removed:
            removed(key)


class _Rooms:
    """What nodes publish, read once for all parts of the controller that judge by it."""

    def __init__(self, prefix: str, parts: Sequence[Refused | Overview]) -> None:
        self._fresh, self._parts = Freshness(prefix), parts

    def topology(self, name: str, document: Mapping[str, Any], now: float) -> None:
        """A NodeResourceTopology exists, new or changed."""
        room = self._fresh.read(name, document, now)
        for part in self._parts:
            part.put_room(name, room)

    def topology_removed(self, name: str) -> None:
        """A NodeResourceTopology does not exist any more."""
        self._fresh.remove(name)
        for part in self._parts:
            part.topology_removed(name)

    def tick(self, now: float, wall: float) -> None:
        """Time has passed."""
        for name in self._fresh.stale(now):
            for part in self._parts:
                part.silence(name)


class Service:
    """One replica.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        section, prefix = config.controller, config.annotation_prefix
        self._section, self._clock = section, clock
        self._metrics = ControllerMetrics(__version__)
        self._api = KubeAPI(section.credentials, "nri-numa-controller")
        self.capacity = CapacityOutput(
            prefix,
            capacity.Rules(
                validity=parse_duration(section.validity),
                keep_last=section.silent == "last",
                smoothing=parse_duration(section.smoothing),
                hysteresis=HYSTERESIS,
                least_time=parse_duration(section.least_time),
            ),
        )
        now = clock()
        self.drained = self.stolen = self.refused = None
        if section.drain.evict:
            self.drained = Drained(prefix, _rules(section.drain), now)
        if (steal := section.steal).evict:
            self.stolen = Stolen(
                prefix, _rules(steal), now, below=steal.below, at_most=steal.at_most
            )
        if section.stuck.evict:
            settings, nodes = configuration.settings(config), Nodes()
            self.refused = Refused(
                prefix,
                _rules(section.stuck),
                nodes,
                CandidateIndex(nodes, settings.strategy),
                PodReader(settings, slots_resource(config), claims=config.dra.enabled).request,
                now,
            )
        self._evictors = [
            one for one in (self.drained, self.stolen, self.refused) if one is not None
        ]
        self._writer = Writer(
            self._api,
            [self.capacity, *self._evictors],
            self._metrics,
            "controller",
            rate=section.rate,
            burst=BURST,
            clock=clock,
            jitter=random.random,
        )
        self._writer.may, self._writer.written = self._may_write, self._written
        self._address = split_address(section.address)
        self.lease = Lease(
            LEASE,
            namespace(section.credentials),
            self._api.do,
            address=own_address(self._address),
            clock=clock,
        )
        self.lease.answered, self.lease.changed = self._writer.answered, self._writer.wake.set
        self._watches = self._followed(config)
        self._token = (
            TokenFile(section.token_file, setting="controller") if section.token_file else None
        )
        self._certificate = (
            Certificate(section.tls_cert, section.tls_key, setting="controller")
            if section.tls_cert
            else None
        )
        self.server = Site(
            self._address[0] if self._address else "",
            version=__version__,
            metrics=self.metrics,
            not_ready=self.not_ready,
            certificate=self._certificate,
            routes=[
                Route("PUT", PATH, self._at_leader(self._put), LARGEST, self._may),
                Route("DELETE", PATH, self._at_leader(self._delete), LARGEST, self._may),
                Route("GET", PATH, self._at_leader(self._get), LARGEST, self._may),
                *(self.page.routes() if self.page is not None else ()),
            ],
        )

    def _followed(self, config: AgentConfig) -> list[Watch]:
        """Watches of the objects that are needed; what is off is not asked for."""
        watches: list[Watch] = []

        def follow(path: str, objects: Watched, **more: Any) -> Watch:
            watches.append(Watch(self._api, path, objects, **more))
            return watches[-1]

        clock = self._clock
        overview = Overview(config) if self._section.page.enabled else None
        shown = [overview] if overview is not None else []
        every = [self.capacity, *self._evictors, *shown]
        judging = [one for one in (self.refused, overview) if one is not None]
        rooms = [_Rooms(config.annotation_prefix, judging)] if judging else []
        self._ticking = [*rooms, *self._evictors]
        nodes = _Objects(clock, [one.node for one in every], [one.node_removed for one in every])
        # Annotations, but for these two: specs of nodes, and the addresses of their pages.
        whole = self.refused is not None or (overview is not None and overview.addresses)
        self._nodes = follow(NODES, nodes, metadata=not whole)
        self.page: Page | None = None
        published: list[_Rooms | Stolen] = [*rooms]
        if self.stolen is not None:
            published.append(self.stolen)
        if published:
            changed = [one.topology for one in published]
            removed = [one.topology_removed for one in published]
            topologies = follow(TOPOLOGIES, _Objects(clock, changed, removed))
            if overview is not None:
                self.page = Page(config, overview, topologies)
        if (refused := self.refused) is not None:
            pods = _Objects(
                clock, [lambda _, pod, now: refused.pod(pod, now)], [refused.pod_removed]
            )
            follow(PODS, pods, fields="status.phase=Pending", key=uid_of)
            if self._section.stuck.partly_running:
                events = _Objects(clock, [lambda _, event, now: refused.event(event, now)])
                follow(EVENTS, events, fields=FIELDS, key=uid_of)
        return watches

    async def run(self) -> None:
        """Work until cancelled; at the end the Lease is given back.

        Raises:
            OSError: the address cannot be had.
        """
        log.info("controller", version=__version__)
        section, up = self._section, self._metrics.source_up
        if self._address is not None:
            self.server.listen(self._address[1])
        try:
            async with asyncio.TaskGroup() as group:
                for watch in self._watches:
                    group.create_task(watch.run())
                group.create_task(self.lease.run())
                group.create_task(self._writer.run())
                group.create_task(self._tick())
                if section.capacity_file:
                    readable = up.labels(FileSource.name).set
                    file = FileSource(section.capacity_file, self._take, readable)
                    group.create_task(file.run())
                if section.prometheus.url:
                    readable = up.labels(PrometheusSource.name).set
                    query = PrometheusSource(section.prometheus, self._take, readable)
                    group.create_task(query.run())
        finally:
            await self.server.stop()
            await self.lease.release()
            await self._api.close()

    def left(self) -> dict[str, object]:
        """Nothing: the sources say everything to the next leader, too."""
        return {}

    # --- what others say --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _counted(self, source: str) -> Iterator[None]:
        """Count what a source says of one Node."""
        try:
            yield
        except (BadCapacity, UnknownNode):
            self._metrics.offers.labels(source, "refused").inc()
            raise
        self._metrics.offers.labels(source, "accepted").inc()

    def shown(self, node: str) -> dict[str, Any]:
        """What holds for a node."""
        self.capacity.known(node)
        now = self._clock()
        current = self.capacity.current(node, now)
        if current is None:
            return {"node": node, "zones": {}, "seconds": 0, "source": ""}
        return {
            "node": node,
            "zones": {str(i): round(f, 3) for i, f in sorted(current.zones.items())},
            "seconds": round(current.until - now),
            "source": current.source,
        }

    def _may(self, request: HTTPRequest) -> None:
        if self._token is None:
            raise APIError(403, "Forbidden", "controller.tokenFile is not set, so PUT is refused")
        self._token.check(request)
        problem = self.not_ready()
        if request.header(FORWARDED.encode()) and not self.lease.leads:
            problem = "this replica does not lead any more"
        if problem:
            raise _not_ready(problem)

    def _at_leader(self, answer: Callable[[HTTPRequest], Response]) -> Handler:
        """Answer here, or with what the replica says that leads: it alone keeps what is PUT.

        Not by a redirect: its address is not in the certificate, and clients send no token there.
        """

        async def handle(request: HTTPRequest) -> Response:
            if not (leader := self.lease.leader_address):
                return answer(request)
            try:
                return await forward(request, leader, self._certificate)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                raise _not_ready(f"{leader}, which leads, cannot be asked: {error}") from error

        return handle

    def _put(self, request: HTTPRequest) -> Response:
        try:
            document = json.loads(request.body)
        except (ValueError, RecursionError) as error:
            raise APIError(400, "BadRequest", f"the body is no JSON: {str(error)[:100]}") from error
        node = request.segments[2]
        with _refusals(), self._counted(PUT):
            measured = from_put(node, document, longest=LONGEST_VALIDITY)
            warning = self.capacity.report(PUT, measured, self._clock())
        return _json({"warning": warning, **self.shown(node)})

    def _delete(self, request: HTTPRequest) -> Response:
        node = request.segments[2]
        with _refusals():
            self.capacity.known(node)
        self.capacity.withdraw(PUT, node)
        return Response(204, b"")

    def _get(self, request: HTTPRequest) -> Response:
        with _refusals():
            return _json(self.shown(request.segments[2]))

    def not_ready(self) -> str:
        """Why this replica can neither take what is PUT nor take over; empty when it can."""
        if problem := self.lease.standby_problem:
            return problem
        return "" if self._nodes.synced.is_set() else "the nodes are not known yet"

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        metrics, now = self._metrics, self._clock()
        metrics.leader.set(self.lease.leads)
        metrics.nodes.set(len(self.capacity.nodes()))
        currents = [self.capacity.current(node, now) for node in self.capacity.spoken_of()]
        metrics.lowered.set(sum(1 for one in currents if one and min(one.zones.values()) < 1))
        if self.drained is not None:
            metrics.drained.set(self.drained.emptied())
            metrics.to_move.set(self.drained.waiting())
        if self.refused is not None:
            metrics.stuck.set(self.refused.waiting())
        if self.stolen is not None:
            metrics.stolen.set(self.stolen.poor())
        return metrics.text()

    def _take(self, source: str, measurements: Sequence[Measurement]) -> list[str]:
        """What a source says of all nodes: those it names no more are withdrawn."""
        if not self._nodes.synced.is_set():
            return []
        problems: list[str] = []
        now = self._clock()
        for one in measurements:
            try:
                with self._counted(source):
                    self.capacity.report(source, one, now)
            except (BadCapacity, UnknownNode) as error:
                problems.append(str(error))
        for node in self.capacity.spoken_of() - {one.node for one in measurements}:
            self.capacity.withdraw(source, node)
        return problems

    # --- the API server ---------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            now, wall = self._clock(), time.time()
            for one in self._ticking:
                one.tick(now, wall)  # also where this replica does not lead: a new leader goes on
            if self._may_write():
                self.capacity.tick(now, wall)
                self._writer.wake.set()
            await asyncio.sleep(TICK)

    def _may_write(self) -> bool:
        return self._nodes.synced.is_set() and self.lease.leads

    def _written(self, request: Request, outcome: Outcome) -> None:
        if outcome.result is not Result.DONE:
            return
        if request.output == self.capacity.name:
            log.info("capacity", node=request.name, wanted=_zones(request))
        elif request.resource is Resource.EVICTIONS:
            dry_run = "dryRun" in request.body["deleteOptions"]
            said = evictor.WOULD if dry_run else "evicted"
            log.info(said, pod=f"{request.namespace}/{request.name}")


async def forward(request: HTTPRequest, address: str, certificate: Certificate | None) -> Response:
    """What another replica answers to a request; with TLS it must show our own certificate.

    Raises:
        aiohttp.ClientError, OSError, ValueError: it cannot be asked.
    """
    expected = aiohttp.Fingerprint(certificate.fingerprint()) if certificate else True
    url = f"{'https' if certificate else 'http'}://{address}{request.path}"
    token = request.header(b"authorization").decode("latin-1")
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(FORWARD_S)) as client,
        client.request(
            request.method,
            URL(url, encoded=True),
            data=request.body,
            headers={"Authorization": token, FORWARDED: "1"},
            ssl=expected,
            allow_redirects=False,
        ) as answer,
    ):
        return Response(answer.status, await answer.read(), answer.content_type)


def _not_ready(problem: str) -> APIError:
    return APIError(503, "NotReady", problem, [("Retry-After", "2")])


def _rules(section: Drain | Stuck | Steal) -> evictor.Rules:
    return evictor.Rules(
        after=parse_duration(section.after),
        per_minute=section.per_minute,
        dry_run=section.dry_run,
        per_workload=0 if isinstance(section, Drain) else section.per_workload,
    )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """What is wrong with a request, as an answer."""
    try:
        yield
    except BadCapacity as error:
        raise APIError(422, "BadCapacity", str(error)) from error
    except UnknownNode as error:
        raise APIError(404, "NotFound", str(error)) from error


def _json(document: Mapping[str, Any]) -> Response:
    return Response(200, json.dumps(document).encode())


def _zones(request: Request) -> str:
    zones = getattr(request.version, "zones", None)
    return "all" if zones is None else " ".join(f"{i}:{f:g}" for i, f in sorted(zones.items()))


def run(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """
    return service.run(lambda: Service(config), log, address="controller.address")
