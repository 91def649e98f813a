"""The extender's process: composition of its parts, and their life."""

from __future__ import annotations

import asyncio
import random
import socket
import time
import uuid
from collections.abc import Callable

from lightkube.operators import not_equal

from nri_numa import __version__, service
from nri_numa import config as configuration
from nri_numa.cluster.election import Election
from nri_numa.cluster.kube import APIServer
from nri_numa.cluster.lease import Lease
from nri_numa.cluster.requests import Outcome, Request, Result
from nri_numa.config import AgentConfig, parse_duration, slots_resource, split_address
from nri_numa.config.sections import UnknownNodes
from nri_numa.http.security import Certificate
from nri_numa.kube_client import namespace
from nri_numa.observe.logs import get_logger
from nri_numa.scheduler import protocol
from nri_numa.scheduler.binder import Binder
from nri_numa.scheduler.fleet import Fleet
from nri_numa.scheduler.follow import Follower
from nri_numa.scheduler.kinds import RawPod, Topology
from nri_numa.scheduler.lean import LeanConnection
from nri_numa.scheduler.metrics import SchedulerMetrics
from nri_numa.scheduler.panel import Panel
from nri_numa.scheduler.pods import Reader
from nri_numa.scheduler.unseen import Unseen
from nri_numa.scheduler.waker import Waker
from nri_numa.scheduler.web import site
from nri_numa.scheduler.world import PARTLY, World, name_of, uid_of

log = get_logger("scheduler")

LEASE = 15.0
"""Seconds that the Lease is worth without being renewed; the usual value of client-go."""
_ELECTION = frozenset({Result.DONE, Result.MISSING, Result.EXISTS, Result.CONFLICT})
HOLD_LIMIT = 600.0
"""Seconds after which NUMA nodes are given back of a pod that never started."""
WAKE_INTERVAL = 2.0
"""Seconds between two touches of a Node's annotation at least, which wake refused pods."""
TICK = 0.5
"""Seconds between two looks at what has run out."""
CATCH_UP = 1.0
"""Seconds from the begin of leading until we bind: what the last leader wrote has come by then."""
_PENDING = {"status.phase": "Pending", "spec.nodeName": not_equal("")}


class Extender:
    """All of it.

    Args:
        config: checked.
        clock: seconds that only grow.
        wall: Unix time in seconds.

    Raises:
        ConfigError: a certificate cannot be read.
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        section, prefix = config.scheduler, config.annotation_prefix
        self._section, self._clock = section, clock
        self._certificate = (
            Certificate(section.tls_cert, section.tls_key, section.client_ca, setting="scheduler")
            if section.tls_cert
            else None
        )
        settings = configuration.settings(config)
        self.metrics = SchedulerMetrics(__version__)
        self.fleet = Fleet()
        self.reader = Reader(settings, slots_resource(config), claims=config.dra.enabled)
        self.panel = Panel(
            self.fleet,
            settings.strategy,
            unknown_fits=section.unknown_nodes is UnknownNodes.ALLOW,
            narrow=section.narrow,
        )
        self._connection = connection = LeanConnection(
            section.credentials,
            user_agent=f"nri-numa-scheduler/{__version__}",
            field_manager="nri-numa-scheduler",
        )
        # On a connection of its own: renewing must not wait behind lists and bindings.
        self._lease_api = APIServer(
            section.credentials,
            user_agent=f"nri-numa-scheduler/{__version__}",
            wall=wall,
            field_manager="nri-numa-scheduler",
        )
        self.election = self._elected(section.lease, wall) if section.lease else None
        self.waker = Waker(
            connection,
            prefix=prefix,
            interval=WAKE_INTERVAL,
            clock=clock,
            wall=wall,
            woken=self.metrics.wakes.inc,
        )
        self.world = World(
            self.fleet,
            self.reader,
            prefix=prefix,
            settle=parse_duration(section.settle),
            limit=HOLD_LIMIT,
            clock=clock,
            grown=self.waker.grown,
            settled=self.waker.settled,
        )
        self.unseen = Unseen(
            connection,
            self.world,
            seconds=PARTLY * parse_duration(section.settle),
            timeout=parse_duration(section.bind_timeout),
            clock=clock,
        )
        self.binder = Binder(
            connection,
            directory=section.credentials,
            fleet=self.fleet,
            panel=self.panel,
            reader=self.reader,
            prefix=prefix,
            timeout=parse_duration(section.bind_timeout),
            limit=HOLD_LIMIT,
            clock=clock,
            look=self.unseen.look,
        )
        self._nodes = Follower(
            connection,
            Topology,
            put=self.world.node,
            remove=self.world.node_gone,
            listed=self.world.nodes_listed,
            key=name_of,
            directory=section.credentials,
        )
        self._pods = Follower(
            connection,
            RawPod,
            put=self.world.pod,
            remove=self.world.pod_gone,
            listed=self.pods_listed,
            key=uid_of,
            fields=_PENDING,
            everywhere=True,
            directory=section.credentials,
        )
        self.port = 0
        self._lease_problem = ""

    def _elected(self, name: str, wall: Callable[[], float]) -> Election:
        lease = Lease(
            name,
            namespace(self._section.credentials),
            f"{socket.gethostname()[:60]}_{uuid.uuid4()}",
            LEASE,
        )
        return Election(
            lease,
            self._lease_api.ask,
            duration=LEASE,
            clock=self._clock,
            wall=wall,
            jitter=random.random,
            told=self._lease_told,
            changed=lambda leads, holder: log.info(
                "leads" if leads else "does not lead", holder=holder
            ),
        )

    # --- the verbs --------------------------------------------------------------------------------

    async def filter(self, body: bytes) -> bytes:
        """Which of the nodes have room."""
        asked = protocol.question(body)
        wish = self.reader.wish(asked.pod)
        if not wish.nothing and (problem := self._not_synced()):
            return protocol.error(problem)
        found = self.panel.filter(wish, asked.names)
        if found.failed or found.hopeless:
            self.metrics.refused.inc(len(found.failed) + len(found.hopeless))
        if found.failed and not found.fits:
            self.waker.refused(wish.uid)
            log.debug(
                "no node has room",
                pod=f"{wish.namespace}/{wish.name}",
                reasons="; ".join(sorted(set(found.failed.values())))[:500],
            )
        return protocol.filter_result(found.fits, found.failed, found.hopeless)

    async def prioritize(self, body: bytes) -> bytes:
        """How well the nodes suit."""
        asked = protocol.question(body)
        wish = self.reader.wish(asked.pod)
        return protocol.priorities(self.panel.prioritize(wish, asked.names))

    async def bind(self, body: bytes) -> bytes:
        """Bind a pod to the node that was chosen."""
        asked = protocol.binding(body)
        problem = self._not_ready_to_bind() or await self.binder.bind(asked)
        if problem:
            self.metrics.bind_failures.inc()
            log.info(
                "bind failed",
                pod=f"{asked.namespace}/{asked.name}",
                node=asked.node,
                problem=problem,
            )
        return protocol.error(problem)

    def pods_listed(self, uids: frozenset[str]) -> None:
        """These are all pods that are on their way."""
        self.world.pods_listed(uids)
        self.unseen.listed()

    # --- readiness --------------------------------------------------------------------------------

    def _not_synced(self) -> str:
        for follower, what in ((self._nodes, "NodeResourceTopology objects"), (self._pods, "pods")):
            if not follower.synced.is_set():
                return follower.problem or f"{what} are still being read"
        return ""

    def _leads(self) -> bool:
        return self.election is None or self.election.leads

    def _not_ready_to_bind(self) -> str:
        election = self.election
        if election is not None and not election.leads:
            return self._lease_problem or (
                f"another replica leads: {election.holder or 'nobody yet'}"
            )
        if election is not None and self._clock() - election.since < CATCH_UP:
            return "leads since a moment ago"
        return self._not_synced()

    def _lease_told(self, request: Request, outcome: Outcome) -> None:
        # Of two that write at once one is told so: that is the election, and no problem.
        well = outcome.result in _ELECTION
        problem = "" if well else f"the Lease cannot be used: {outcome.text}"
        if problem and problem != self._lease_problem:
            log.warning("cannot be elected", problem=outcome.text)
        self._lease_problem = problem

    def not_ready(self) -> str:
        """Why a Service must not send questions here; empty when it may."""
        return self._not_ready_to_bind()

    def refresh(self) -> None:
        """Set what is counted by looking."""
        metrics, now = self.metrics, self._clock()
        metrics.nodes.set(len(self.fleet))
        metrics.unreadable.set(self.fleet.unreadable)
        holds = self.fleet.holds
        metrics.held.set(len(holds))
        metrics.oldest.set(max((now - hold.since for hold in holds.values()), default=0))
        metrics.leader.set(self._leads())
        metrics.synced.set(not self._not_synced())

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
        server = site(
            host,
            {"filter": self.filter, "prioritize": self.prioritize, "bind": self.bind},
            self.metrics,
            self.not_ready,
            certificate=self._certificate,
            certified=bool(section.client_ca),
            refresh=self.refresh,
        )
        try:
            server.listen(port)
            self.port = server.port
            log.info("listening", address=section.address, tls=self._certificate is not None)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._nodes.run())
                group.create_task(self._follow_pods())
                if self.election is not None:
                    group.create_task(self.election.run())
                group.create_task(self.waker.run(self._leads))
                group.create_task(self._tick())
        finally:
            await server.stop()
            if self.election is not None:
                await self.election.give_back()
            await self._lease_api.close()
            await self._connection.close()

    def left(self) -> dict[str, object]:
        """Pods whose NUMA nodes are held."""
        return {"held": len(self.fleet.holds)}

    async def _follow_pods(self) -> None:
        # Pods are held on nodes that are known.
        await self._nodes.synced.wait()
        await self._pods.run()

    async def _tick(self) -> None:
        answers = False
        while True:
            await asyncio.sleep(TICK)
            self.world.tick()
            before, answers = answers, not self._not_ready_to_bind()
            if answers and not before:
                self.waker.anew(min(self.fleet.names, default=""))


def run(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code."""
    return service.run(lambda: Extender(config), log, address="scheduler.address")
