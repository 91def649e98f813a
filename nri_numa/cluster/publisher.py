"""The publisher's process: follows the agent, and writes what follows from it.

Nothing is kept here that a restart would lose: what happened is the agent's to remember, what is
written is the API server's. A new process asks for everything again and finds most of it done.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from nri_numa import __version__, service
from nri_numa.cluster import numatopology, slices, wanted
from nri_numa.cluster.capacity import CapacityOutput
from nri_numa.cluster.claims import ClaimDesk
from nri_numa.cluster.desk import Desk
from nri_numa.cluster.handover import HandoverOutput
from nri_numa.cluster.handover_file import HandoverFile
from nri_numa.cluster.kube import SKEW, APIServer
from nri_numa.cluster.metrics import PublishMetrics
from nri_numa.cluster.node_topology import UNLISTED
from nri_numa.cluster.numatopology_output import NumatopologyOutput
from nri_numa.cluster.outbox import pause
from nri_numa.cluster.outputs import EventOutput, NodeOutput, Output, PodOutput
from nri_numa.cluster.requests import WHOLE, Outcome, Request, Resource, Result
from nri_numa.cluster.source import AgentGone, AgentSource, Changed
from nri_numa.cluster.topology_output import TopologyOutput
from nri_numa.config import AgentConfig, parse_duration, split_address
from nri_numa.config.node_name import node_name
from nri_numa.dra.handover import Teller
from nri_numa.errors import ConfigError
from nri_numa.http.responses import Zones
from nri_numa.http.server import Site
from nri_numa.observe.logs import get_logger

log = get_logger("publish")

SETTLE = 1.0
"""Seconds in which several changes of the agent are read as one: a pod's containers, say."""
SOONER = 0.7
"""The same where schedulers read what is free: within a second, the wait for a turn included."""
COUNTED = 5.0
"""Seconds until devices are counted again, where the agent counts them: the kubelet's book changes
without the agent's."""
SILENT = 4
"""Attempts in vain, some ten seconds, after which the agent is gone; a restart is quicker."""
LEAST = 0.05
"""Seconds of the shortest pause while nothing may be sent."""


class Publisher:
    """One node's publisher.

    Args:
        config: checked; ``http.socket`` is set.
        node: name of the Node.
        clock: seconds that only grow.
        wall: Unix time in seconds.
        jitter: from 0 to 1, another one each time.
        settle: see `SETTLE`.

    Raises:
        ConfigError: there is no socket to read.
    """

    def __init__(
        self,
        config: AgentConfig,
        node: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
        settle: float = SETTLE,
    ) -> None:
        if not config.http.socket:
            problem = "http.socket: is empty; nri-numa publish reads the agent there"
            raise ConfigError("configuration", [problem])
        publish, prefix = config.publish, config.annotation_prefix
        self._publish = publish
        self._prefix = prefix
        self._clock, self._wall, self._jitter = clock, wall, jitter
        self._settle = min(settle, SOONER) if publish.node_resource_topology else settle
        self.metrics = PublishMetrics(__version__)
        self._source = AgentSource(config.http.socket)
        agent = f"nri-numa-publish/{__version__}"
        self._api = APIServer(publish.credentials, user_agent=agent, wall=wall, skewed=self._skewed)
        self._node = self._pods = self._events = self._capacity = self._topology = None
        outputs: list[Output] = []
        if publish.node_resource_topology:
            force = publish.node_resource_topology_force
            validity = parse_duration(publish.node_resource_topology_validity)
            self._topology = TopologyOutput(node, prefix, force=force, validity=validity)
            self._topology.renew(wall())
            outputs.append(self._topology)
        if publish.node_annotations or publish.node_labels:
            self._node = NodeOutput(
                node, prefix, annotations=publish.node_annotations, labels=publish.node_labels
            )
            outputs.append(self._node)
        if publish.pod_annotation:
            self._pods = PodOutput(node, prefix)
            outputs.append(self._pods)
        if publish.capacity:
            self._capacity = CapacityOutput(node, config.device_plugin.resource_name)
            outputs.append(self._capacity)
        self._numatopology: NumatopologyOutput | None = None
        if publish.numatopology:
            self._numatopology = NumatopologyOutput(node)
            outputs.append(self._numatopology)
        self._slices: slices.SliceOutput | None = None
        self._claims: ClaimDesk | None = None
        if config.dra.enabled:
            self._driver, self._lists = config.dra.driver, config.dra.list_attributes
            self._slices = slices.SliceOutput(node, self._driver)
            outputs.append(self._slices)
            # Its own connection: pods wait for a claim, whatever else is being written.
            api = APIServer(publish.credentials, user_agent=agent, wall=wall)
            self._claims = ClaimDesk(Teller(config.dra.handover), api, self._driver_taken)
        if publish.events:
            self._events = EventOutput(node, prefix)
            outputs.append(self._events)
        self._handover: HandoverOutput | None = None
        if config.offline_capacity.file:
            interval = parse_duration(config.offline_capacity.interval)
            self._handover = HandoverOutput(node, prefix, interval)
            outputs.append(self._handover)
        self._handover_file = HandoverFile(config.offline_capacity.file)
        self._handover_problem = ""
        self.desk = Desk(outputs, rate=publish.rate, burst=publish.burst, now=clock())
        self._wake, self._zones_turn = asyncio.Event(), asyncio.Lock()
        self._instance, self._number, self._serial = "", 0, -1
        self._machine_read = self._number_known = self._counted = False
        self._agent_problem = "the agent was not asked yet"
        self._api_problem = ""
        self._unlisted_said = False
        self._topology_problem = self._slices_problem = self._numatopology_problem = ""
        self._said: set[tuple[str, str]] = set()
        self._skew_said = False
        self._address = split_address(publish.address)
        self.probes = Site(
            self._address[0] if self._address else "",
            version=__version__,
            metrics=self.metrics.text,
            not_ready=lambda: self.problem,
        )
        for output in outputs:
            self._count(output)

    @property
    def problem(self) -> str:
        """Why nothing can be published now, as a sentence; empty when all is well."""
        return self._agent_problem or self._api_problem

    async def run(self) -> None:
        """Publish until cancelled.

        Raises:
            OSError: the address cannot be had.
        """
        if self._address is not None:
            self.probes.listen(self._address[1])
        tasks = [self._follow(), self._write(), self._look_again()]
        if self._topology is not None:
            tasks.append(self._count_again())
        if self._claims is not None:
            tasks.append(self._claims.run())
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(task)
        finally:
            await self.probes.stop()
            await self._source.close()
            await self._api.close()

    # --- the agent's side -------------------------------------------------------------------------

    def left(self) -> dict[str, object]:
        """What stays unwritten."""
        return {"waiting": self.desk.waiting()}

    async def _follow(self) -> None:
        failures = 0
        while True:
            try:
                async for changed in self._source.changes():
                    await self._read(changed)
                    failures = 0
                    self._agent_answers("")
                    await asyncio.sleep(self._settle)
            except AgentGone as error:
                self._agent_answers(str(error))
            # It may be another process by now, of another machine state.
            self._machine_read, self._serial, self._number_known = False, -1, False
            failures += 1
            if self._topology is not None and failures == SILENT:
                self._topology.want(None)
                self._wake.set()
            if self._numatopology is not None and failures == SILENT:
                self._numatopology.want(None)
                self._wake.set()
            await asyncio.sleep(min(10.0, pause(failures, self._jitter())))

    async def _read(self, changed: Changed) -> None:
        """Read what changed, and want what follows from it."""
        await self._read_zones()
        if self._node is not None and not self._machine_read:
            info, topology = await self._source.numa_info(), await self._source.topology()
            try:
                labels = wanted.node_labels(self._prefix, topology)
            except (KeyError, TypeError, ValueError) as error:
                raise AgentGone(f"the agent's topology is not as expected: {error!r}") from error
            annotations = wanted.node_annotations(self._prefix, info)
            if self._handover is not None:
                annotations |= wanted.numa_ids(self._prefix, topology)
            self._node.want(annotations, labels)
            self._machine_read = True
        if self._capacity is not None:
            found = await self._source.slots()
            free = sum(one.free for one in found.numa_nodes)
            # Nothing new comes to a node that would not pin it; what is there goes on counting.
            self._capacity.want(found.exclusive + (free if found.ready else 0))
        if self._numatopology is not None:
            await self._read_numatopology(self._numatopology)
        if self._slices is not None:
            zones, slots = await self._source.zones(), await self._source.slots()
            self._slices.want(slices.devices(zones, slots, self._driver, lists=self._lists))
        if self._pods is not None and changed.serial != self._serial:
            listed = await self._source.assignments()
            self._pods.want(listed.containers)
            self._serial = listed.serial
        if self._events is not None and not (
            self._number_known and changed.notices == self._number
        ):
            await self._read_notices(self._events)
        self._wake.set()

    async def _read_zones(self) -> None:
        if self._topology is None:
            return
        async with self._zones_turn:  # an older answer must not come after a newer one
            found = await self._source.zones()
            self._counted = found.devices_problem is not None
            self._topology.want(found)
            self._say_unlisted(found)
        self._wake.set()

    def _say_unlisted(self, found: Zones) -> None:
        if not self._unlisted_said and any(zone.id == UNLISTED for zone in found.zones):
            self._unlisted_said = True
            log.warning(
                "NUMA node left out of the NodeResourceTopology",
                numa_node=UNLISTED,
                why="its zone would end a kube-scheduler with the plugin NodeResourceTopologyMatch",
            )

    async def _read_numatopology(self, output: NumatopologyOutput) -> None:
        topology, listed = await self._source.topology(), await self._source.assignments()
        zones = await self._source.zones()
        if zones.serial != listed.serial:
            return  # of two moments: the change that came between is read next
        try:
            output.want(numatopology.contents(topology, listed.containers, zones))
        except (KeyError, TypeError, ValueError) as error:
            raise AgentGone(f"the agent's topology is not as expected: {error!r}") from error

    def _driver_taken(self) -> None:
        if self._slices is not None:
            self._slices.look(self._clock())
            self._wake.set()

    async def _read_notices(self, events: EventOutput) -> None:
        found = await self._source.notices(self._number)
        if found.instance != self._instance and self._number:
            found = await self._source.notices(0)
        old = events.old
        events.want(found.notices, self._wall())
        self.metrics.old.inc(events.old - old)
        self._instance, self._number, self._number_known = found.instance, found.number, True

    def _agent_answers(self, problem: str) -> None:
        self.metrics.agent_up.set(not problem)
        if problem and problem != self._agent_problem:
            log.warning("the agent does not answer", problem=problem)
        elif self._agent_problem and not problem:
            log.info("the agent answers")
        self._agent_problem = problem

    # --- the API server's side --------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            request = self.desk.next(self._clock())
            if request is None:
                wait = max(LEAST, self.desk.wait(self._clock()))
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait if wait < float("inf") else None):
                        await self._wake.wait()
                continue
            outcome = await self._api.ask(request)
            self.desk.done(request, outcome, self._clock(), self._jitter())
            self._tell(request, outcome)
            if self._handover is not None and request.output == self._handover.name:
                self._hand_over(self._handover)

    def _hand_over(self, handover: HandoverOutput) -> None:
        problem = handover.problem
        try:
            if handover.document and self._handover_file.write(handover.document):
                log.info("capacity handed to the agent", document=handover.document)
        except OSError as error:
            problem = f"offlineCapacity.file: {error.filename}: {error.strerror or error}"
        if problem and problem != self._handover_problem:
            log.warning("capacity not handed to the agent", problem=problem)
        self._handover_problem = problem

    def _tell(self, request: Request, outcome: Outcome) -> None:
        metrics, result = self.metrics, outcome.result
        metrics.requests.labels(request.output, request.verb.value, result.value).inc()
        metrics.api_up.set(result not in WHOLE)
        for output in self.desk.outputs:
            self._count(output)
        if result in WHOLE:
            if not self._api_problem:
                log.warning("nothing can be published for now", problem=outcome.text)
            self._api_problem = outcome.text
            return
        if self._api_problem:
            log.info("the API server answers again")
            if self._topology is not None:
                self._topology.resync()  # the Node may be another one by now
        self._api_problem = ""
        self._tell_topology()
        self._tell_slices()
        self._tell_numatopology()
        log.debug("request", target=request.target, verb=request.verb.value, result=result.value)
        if result in (Result.DONE, Result.EXISTS):
            metrics.last_success.set(self._wall())
            self._said.discard((request.verb.value, request.resource.plural))
        elif result in (Result.FORBIDDEN, Result.INVALID, Result.FAILED) or (
            result is Result.MISSING
            and request.output in ("node", "handover", "slices")
            and request.resource is not Resource.SLICES
        ):
            self._say_once(request, outcome)

    def _tell_topology(self) -> None:
        problem = "" if self._topology is None else self._topology.problem
        if problem and problem != self._topology_problem:
            log.warning("the NodeResourceTopology is not written", problem=problem)
        elif self._topology_problem and not problem:
            log.info("the NodeResourceTopology is written")
        self._topology_problem = problem

    def _tell_slices(self) -> None:
        problem = "" if self._slices is None else self._slices.problem
        if problem and problem != self._slices_problem:
            log.warning("the ResourceSlice is without effect", problem=problem)
        self._slices_problem = problem

    def _tell_numatopology(self) -> None:
        problem = "" if self._numatopology is None else self._numatopology.problem
        if problem and problem != self._numatopology_problem:
            log.warning("the Numatopology is not written", problem=problem)
        self._numatopology_problem = problem

    def _say_once(self, request: Request, outcome: Outcome) -> None:
        key = request.verb.value, request.resource.plural
        level = log.debug if key in self._said else log.warning
        level("not published", result=outcome.result.value, problem=outcome.text)
        self._said.add(key)

    def _count(self, output: Output) -> None:
        self.metrics.waiting.labels(output.name).set(output.waiting())
        dropped = self.metrics.dropped.labels(output.name)
        dropped.inc(output.dropped)
        output.dropped = 0

    def _skewed(self, seconds: float) -> None:
        self.metrics.clock_skew.set(round(seconds))
        wrong = abs(seconds) > SKEW
        if wrong and not self._skew_said:
            log.warning(
                "this node's clock differs from the API server's",
                seconds=round(seconds),
                remedy="set the clock of the node: tokens, certificates and the times of Events "
                "depend on it",
            )
        self._skew_said = wrong

    async def _look_again(self) -> None:
        period = parse_duration(self._publish.resync)
        while True:
            # Not all nodes of a cluster in the same moment.
            await asyncio.sleep(period * (0.9 + 0.2 * self._jitter()))
            self._machine_read = False
            if self._topology is not None:
                self._topology.renew(self._wall())
            self.desk.resync()
            with contextlib.suppress(AgentGone):  # `_follow` finds that out
                await self._read_zones()
            self._wake.set()

    async def _count_again(self) -> None:
        while True:
            await asyncio.sleep(COUNTED)
            if self._counted:
                with contextlib.suppress(AgentGone):
                    await self._read_zones()


def run(config: AgentConfig) -> int:
    """Run until SIGTERM; the result is the exit code.

    Raises:
        ConfigError: there is no socket to read.
    """
    node = node_name(config)

    def make() -> Publisher:
        publisher = Publisher(config, node)
        log.info("publishing", version=__version__, node=node, socket=config.http.socket)
        return publisher

    return service.run(make, log, address="publish.address")
