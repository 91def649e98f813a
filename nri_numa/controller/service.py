"""The controller's process: one of its replicas leads, hears what others measured, and writes it.

What was said is kept in memory only. A new leader lets stand what an earlier one wrote until its
time is over, and by then the sources have said it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from nri_numa import __version__, service
from nri_numa.cluster.desk import Desk
from nri_numa.cluster.election import Election
from nri_numa.cluster.kube import APIServer
from nri_numa.cluster.lease import Lease
from nri_numa.cluster.outputs import Output
from nri_numa.cluster.requests import WHOLE, Outcome, Request, Resource, Result
from nri_numa.config import AgentConfig, parse_duration, split_address
from nri_numa.controller.capacity import Rules
from nri_numa.controller.following import Following
from nri_numa.controller.metrics import ControllerMetrics
from nri_numa.controller.moving import Moving
from nri_numa.controller.nodes import NodeOutput, UnknownNode
from nri_numa.controller.offers import Offer, from_put
from nri_numa.controller.server import Server
from nri_numa.controller.sources import FileSource, PrometheusSource
from nri_numa.kube_client import namespace
from nri_numa.observe.logs import get_logger
from nri_numa.offline_capacity import LONGEST_VALIDITY, BadCapacity

if TYPE_CHECKING:
    from nri_numa.controller.page import Page

log = get_logger("controller")

BURST: Final = 20
"""Requests to the API server at once after a quiet time."""
HYSTERESIS: Final = 0.05
"""A factor is written again when it differs by so much from what is written."""
LEASE: Final = "nri-numa-controller"
"""Name of the Lease, which the Role of the manifests names too."""
LEASE_DURATION: Final = 15.0
"""Seconds after which a silent leader is replaced."""
TICK: Final = 1.0
"""Seconds between two looks at what should be written."""
LEAST: Final = 0.05
PUT: Final = "put"


class Service:
    """One replica.

    Args:
        config: checked.
        identity: in the Lease; another one for each replica.
        clock: seconds that only grow.
        wall: Unix time in seconds.
        jitter: from 0 to 1, another one each time.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        identity: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        controller = self._config = config.controller
        self._clock, self._wall, self._jitter = clock, wall, jitter
        self._metrics = ControllerMetrics(__version__)
        self._api = APIServer(
            controller.credentials,
            user_agent=f"nri-numa-controller/{__version__}",
            wall=wall,
            field_manager="nri-numa-controller",
        )
        self._rules = Rules(
            validity=parse_duration(controller.validity),
            keep_last=controller.silent == "last",
            smoothing=parse_duration(controller.smoothing),
            hysteresis=HYSTERESIS,
            least_time=parse_duration(controller.least_time),
        )
        self.nodes = NodeOutput(config.annotation_prefix, self._rules)
        self.lease = Lease(
            LEASE,
            namespace(controller.credentials),
            identity or f"{socket.gethostname()[:60]}_{uuid.uuid4()}",
            LEASE_DURATION,
        )
        now = clock()
        self._election = Election(
            self.lease,
            self._api.ask,
            duration=LEASE_DURATION,
            clock=clock,
            wall=wall,
            jitter=jitter,
            told=self._tell,
            changed=self._leads,
        )
        self.moving = Moving(config, clock=clock, jitter=jitter)
        outputs: list[Output] = [self.nodes, *self.moving.outputs]
        page = self._page = _page(config)
        self._desk = Desk(outputs, rate=controller.rate, burst=BURST, now=now)
        self._wake = asyncio.Event()
        self._following = Following(
            self._api,
            self.nodes,
            *self.moving.hears,
            *((page.overview,) if page is not None else ()),
            changed=self._wake.set,
            jitter=jitter,
            node=self.moving.node,
        )
        self._said: set[tuple[str, str]] = set()
        self._api_problem = ""
        self._address = split_address(controller.address)
        self.server = Server(
            self._address[0] if self._address else "",
            self,
            version=__version__,
            token_file=controller.token_file,
            certificate=controller.tls_cert,
            key=controller.tls_key,
            more=page.routes() if page is not None else (),
        )

    async def run(self) -> None:
        """Work until cancelled; at the end the Lease is given back.

        Raises:
            OSError: the address cannot be had.
        """
        log.info("controller", version=__version__)
        controller = self._config
        work: list[Coroutine[Any, Any, None]] = [
            self._following.run(),
            self._election.run(),
            self._write(),
            self._tick(),
            *self.moving.work(),
        ]
        if controller.capacity_file:
            up = self._metrics.source_up.labels(FileSource.name).set
            work.append(FileSource(controller.capacity_file, self._take, up).run())
        if controller.prometheus.url:
            up = self._metrics.source_up.labels(PrometheusSource.name).set
            work.append(PrometheusSource(controller.prometheus, self._take, up).run())
        if self._page is not None:
            work.append(self._page.follower.run())
        try:
            if self._address is not None:
                self.server.listen(self._address[1])
        except BaseException:
            for one in work:
                one.close()
            raise
        try:
            async with asyncio.TaskGroup() as group:
                for one in work:
                    group.create_task(one)
        finally:
            await self.server.stop()
            await self._election.give_back()
            await self._api.close()
            if self._page is not None:
                await self._page.connection.close()

    def left(self) -> dict[str, object]:
        """Nothing: the next leader hears it all again."""
        return {}

    # --- what others say --------------------------------------------------------------------------

    def put(self, node: str, document: object) -> str:
        """Take what a PUT says."""
        try:
            offer = from_put(node, document, longest=LONGEST_VALIDITY)
            warning = self.nodes.offer(PUT, offer, self._clock())
        except (BadCapacity, UnknownNode):
            self._metrics.offers.labels(PUT, "refused").inc()
            raise
        self._metrics.offers.labels(PUT, "accepted").inc()
        return warning

    def delete(self, node: str) -> None:
        """What was PUT for a node does not count any more."""
        if node not in self.nodes.nodes():
            raise UnknownNode(f"there is no Node {ascii(node)[:80]}")
        self.nodes.withdraw(PUT, node)

    def shown(self, node: str) -> dict[str, Any]:
        """What holds for a node."""
        if node not in self.nodes.nodes():
            raise UnknownNode(f"there is no Node {ascii(node)[:80]}")
        now = self._clock()
        current = self.nodes.current(node, now)
        if current is None:
            return {"node": node, "zones": {}, "seconds": 0, "source": ""}
        return {
            "node": node,
            "zones": {str(i): round(f, 3) for i, f in sorted(current.zones.items())},
            "seconds": round(current.until - now),
            "source": current.source,
        }

    def not_ready(self) -> str:
        """Why this replica takes nothing."""
        if not self.lease.leads(self._clock()):
            return f"this replica does not lead; {self.lease.holder or 'nobody'} does"
        return "" if self._following.known else "the nodes are not known yet"

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        now = self._clock()
        self._metrics.leader.set(self.lease.leads(now))
        self._metrics.nodes.set(len(self.nodes.nodes()))
        spoken = self.nodes.spoken_of()
        lowered = sum(
            1
            for node in spoken
            if (one := self.nodes.current(node, now)) and min(one.zones.values()) < 1
        )
        self._metrics.lowered.set(lowered)
        self.moving.measure(self._metrics)
        return self._metrics.text()

    def _take(self, source: str, offers: Sequence[Offer]) -> list[str]:
        """What a source says of all nodes: those it names no more are withdrawn."""
        if not self._following.known:
            return []
        problems: list[str] = []
        now = self._clock()
        for offer in offers:
            try:
                self.nodes.offer(source, offer, now)
            except (BadCapacity, UnknownNode) as error:
                self._metrics.offers.labels(source, "refused").inc()
                problems.append(str(error))
            else:
                self._metrics.offers.labels(source, "accepted").inc()
        for node in self.nodes.spoken_of() - {offer.node for offer in offers}:
            self.nodes.withdraw(source, node)
        return problems

    # --- the API server ---------------------------------------------------------------------------

    def _leads(self, leads: bool, holder: str) -> None:
        log.info("leading" if leads else "not leading", holder=holder)
        self._wake.set()

    async def _tick(self) -> None:
        while True:
            self.moving.tick(self._clock(), self._wall())  # a new leader goes on at once
            if self._may_write():
                self.nodes.tick(self._clock(), self._wall())
                self._wake.set()
            await asyncio.sleep(TICK)

    def _may_write(self) -> bool:
        return self._following.known and self.lease.leads(self._clock())

    async def _write(self) -> None:
        while True:
            now = self._clock()
            leads = self._may_write()
            request = self._desk.next(now) if leads else None
            if request is None:
                # `_tick` wakes when something is to be done.
                wait = self._desk.wait(now) if leads else TICK
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(LEAST, min(wait, TICK))):
                        await self._wake.wait()
                continue
            outcome = await self._api.ask(request)
            self._desk.done(request, outcome, self._clock(), self._jitter())
            self._tell(request, outcome)

    def _tell(self, request: Request, outcome: Outcome) -> None:
        metrics, result = self._metrics, outcome.result
        metrics.requests.labels(request.output, request.verb.value, result.value).inc()
        metrics.api_up.set(result not in WHOLE)
        if result in WHOLE:
            if not self._api_problem:
                log.warning("the API server cannot be used for now", problem=outcome.text)
            self._api_problem = outcome.text
            return
        if self._api_problem:
            log.info("the API server answers again")
        self._api_problem = ""
        key = request.verb.value, request.resource.plural
        if result is Result.DONE:
            self._said.discard(key)
            if request.output == self.nodes.name:
                log.info("capacity", node=request.name, wanted=_zones(request))
            elif request.resource is Resource.EVICTIONS:
                log.info("evicted", pod=f"{request.namespace}/{request.name}")
        elif result in (Result.FORBIDDEN, Result.INVALID, Result.FAILED):
            level = log.debug if key in self._said else log.warning
            level("not done", result=result.value, problem=outcome.text)
            self._said.add(key)


def _page(config: AgentConfig) -> Page | None:
    """The page of the cluster; what it needs is loaded only where it is switched on."""
    if not config.controller.page.enabled:
        return None
    from nri_numa.controller.page import Page

    return Page(config)


def _zones(request: Request) -> str:
    zones = getattr(request.version, "zones", None)
    return "all" if zones is None else " ".join(f"{i}:{f:g}" for i, f in sorted(zones.items()))


def run(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code.

    Raises:
        ConfigError: a file of the configuration cannot be used.
    """
    return service.run(lambda: Service(config), log, address="controller.address")
