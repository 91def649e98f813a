"""The publisher's process: follows the agent, and writes the desired objects.

No state here is lost by a restart: the agent keeps its notices, and the API server the written
objects. A new process reads everything again and writes the differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from msgspec.structs import replace

from nri_numa import __version__, service
from nri_numa.config import AgentConfig, parse_duration, split_address
from nri_numa.dra.handover import ClaimFileResponder, write_file_atomically
from nri_numa.errors import ConfigError
from nri_numa.kube.api import KubeAPI, Watch, WatchHandler, name_of, uid_of
from nri_numa.kube.requests import (
    APIRequest,
    KubeClient,
    Outcome,
    OutcomeKind,
    Resource,
    text_in_section,
)
from nri_numa.observe.logs import get_logger
from nri_numa.observe.reports import ReportOnce
from nri_numa.publisher import desired_objects, numatopology, slices
from nri_numa.publisher.claims import ClaimRequestAnswerer
from nri_numa.publisher.numatopology import NumatopologyOutput
from nri_numa.publisher.outbox import Output, backoff_seconds
from nri_numa.publisher.outputs import (
    AgentOfflineCapacityOutput,
    EventOutput,
    NodeCapacityOutput,
    NodeMetadataOutput,
    PodAnnotationOutput,
)
from nri_numa.publisher.source import AgentChange, AgentSource, AgentUnavailable
from nri_numa.publisher.topology import GUARANTEED_QOS, SCHEDULER_CRASHING_ZONE_ID, TopologyOutput
from nri_numa.publisher.traces import SpanSender
from nri_numa.publisher.writer import Writer, WriterMetrics
from nri_numa.web.responses import (
    Assignments,
    ExclusiveCPUSlotsDocument,
    MachineNUMAInfo,
    NodePod,
    Notices,
    TopologyDocument,
    Zones,
)
from nri_numa.web.server import MetricsAndProbeServer

log = get_logger("publish")

REQUEST_BURST: Final = 10
"""Requests to the API server at once after an idle time."""
AGENT_CHANGE_DEBOUNCE_S: Final = 1.0
"""Seconds in which several changes of the agent are read as one, such as a pod's containers."""
TOPOLOGY_DEBOUNCE_S: Final = 0.7
"""The debounce if schedulers read the free amounts: within a second, with the wait for a turn."""
DEVICE_RECOUNT_S: Final = 5.0
"""Seconds between two counts of devices, if the agent counts them: the kubelet allocates devices
without a change of the agent's state."""
AGENT_MAX_FAILURES: Final = 4
"""Failed attempts, about ten seconds, after which the agent is gone; a restart is quicker."""
MAX_NODE_RECHECK_DELAY_S: Final = 60.0
"""Seconds after an outage within which the Node's UID is checked."""
BOUND_POD_TIMEOUT_S: Final = 60.0
"""Seconds for which a bound pod without a sandbox is listed: a pod that never starts must not keep
the node's numbers from the scheduler without limit."""
CLOCK_SKEW_LIMIT_S: Final = 60.0
"""Seconds by which the clock may differ from the API server's without a warning."""


class PublisherMetrics(WriterMetrics):
    """Metrics of the publisher; names begin with ``nri_numa_publisher_``."""

    def __init__(self, version: str) -> None:
        super().__init__("nri_numa_publisher", version)
        self.objects_dropped = self.new_counter(
            "objects_dropped_total",
            "Objects that are never written: invalid, namespace being deleted, or queue full.",
            "output",
        )
        self.expired_notices = self.new_counter(
            "expired_notices_total",
            "Notices of the agent too old for an Event when first read: over an hour.",
        )
        self.pending_objects = self.new_gauge(
            "pending_objects", "Objects that are still to be written, by output.", "output"
        )
        self.output_up = self.new_gauge(
            "output_up", "1 if an output that does not go to the API server can be sent.", "output"
        )
        self.last_success = self.new_gauge(
            "last_success_timestamp_seconds",
            "Unix time of the last successful request to the API server; 0 before the first.",
        )
        self.agent_up = self.new_gauge("agent_up", "1 if the agent's socket answers.")
        self.clock_skew = self.new_gauge(
            "clock_skew_seconds", "Seconds by which this node's clock is ahead of the API server's."
        )


class BoundPods(WatchHandler):
    """Guaranteed pods bound to this node; the agent only knows those with a sandbox.

    A scheduler that forgets its assumed pods when the object lists them must also find the pods
    that are not charged yet.
    """

    def __init__(
        self,
        api: KubeClient,
        node: str,
        changed: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        fields = f"spec.nodeName={node},status.phase=Pending"
        path = Resource.PODS.object_or_list_path()
        self.watch = Watch(api, path, self, fields=fields, key=uid_of)
        self._changed, self._clock = changed, clock
        self._pods: dict[str, tuple[float, NodePod]] = {}

    def on_update(self, document: Mapping[str, Any]) -> None:
        """Add a bound pod without a running container."""
        uid, qos = uid_of(document), text_in_section(document, "status", "qosClass")
        if qos == GUARANTEED_QOS and uid not in self._pods:
            namespace = text_in_section(document, "metadata", "namespace")
            pod = NodePod(namespace=namespace, name=name_of(document), qos=qos)
            self._pods[uid] = self._clock(), pod
            self._changed()
            asyncio.get_running_loop().call_later(BOUND_POD_TIMEOUT_S, self._changed)

    def on_every_deleted_key(self, key: str) -> None:
        """Drop a pod that runs or has ended."""
        if self._pods.pop(key, None) is not None:
            self._changed()

    def with_bound_pods(self, zones: Zones) -> Zones:
        """Return the agent's document with these pods, except those that fail to start."""
        min_bound_at = self._clock() - BOUND_POD_TIMEOUT_S
        starting_pods = [pod for bound_at, pod in self._pods.values() if bound_at > min_bound_at]
        pods = {(pod.namespace, pod.name): pod for pod in starting_pods}
        for pod in zones.pods:
            pods.pop((pod.namespace, pod.name), None)
        return replace(zones, pods=(*zones.pods, *(pods[name] for name in sorted(pods))))


class Publisher:
    """One node's publisher.

    Raises:
        ConfigError: there is no socket to read.
    """

    def __init__(
        self,
        config: AgentConfig,
        node: str,
        api: KubeClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not config.http.socket:
            problem = "http.socket: is empty; nri-numa publish reads the agent there"
            raise ConfigError("configuration", [problem])
        publish, prefix = config.publish, config.annotation_prefix
        self._publish, self._prefix = publish, prefix
        self._clock, self._wall, self._jitter = clock, wall, jitter
        self._debounce_s = (
            TOPOLOGY_DEBOUNCE_S if publish.node_resource_topology else AGENT_CHANGE_DEBOUNCE_S
        )
        self.metrics = PublisherMetrics(__version__)
        self._source = AgentSource(config.http.socket)
        self._api = api
        self._bound_changed = asyncio.Event()
        outputs = self._create_outputs(config, node)
        self._handover_file, self._handed = config.offline_capacity.file, ""
        self._writer = Writer(
            self._api,
            outputs,
            self.metrics,
            "publish",
            rate=publish.api_qps,
            burst=REQUEST_BURST,
            clock=clock,
            jitter=jitter,
        )
        self._writer.written, self._writer.again = self._on_request_done, self._schedule_recheck
        self.queue, self._wake = self._writer.queue, self._writer.wake
        self._zones_turn = asyncio.Lock()
        self._instance, self._number, self._serial = "", 0, -1
        self._machine_read = self._number_known = self._counted = False
        self._agent_problem = "the agent was not asked yet"
        self._unlisted_said, self._problems = False, ReportOnce(log)
        self._address = split_address(publish.address)
        self.probes = MetricsAndProbeServer(
            self._address[0] if self._address else "",
            metrics=self.metrics.render_metrics,
            unready_reason=lambda: self.problem,
        )
        for output in outputs:
            self._update_output_metrics(output)

    def _create_outputs(self, config: AgentConfig, node: str) -> list[Output]:
        """Create the outputs, the most important first, and their readers."""
        publish, prefix = config.publish, config.annotation_prefix
        self._topology = self._node = self._pods = self._capacity = self._numatopology = None
        self._slices = self._claims = self._events = self._handover = self._bound = None
        self._spans: SpanSender | None = None
        if publish.node_resource_topology:
            self._topology = TopologyOutput(node, prefix, publish)
            self._topology.renew_validity(self._wall())
        if publish.node_annotations or publish.node_labels:
            self._node = NodeMetadataOutput(
                node, prefix, annotations=publish.node_annotations, labels=publish.node_labels
            )
        if publish.pod_annotation:
            self._pods = PodAnnotationOutput(node, prefix)
            if self._topology is not None:
                self._bound = BoundPods(self._api, node, self._bound_changed.set, self._clock)
        if publish.node_capacity:
            self._capacity = NodeCapacityOutput(node, config.device_plugin.resource_name)
        if publish.numatopology:
            self._numatopology = NumatopologyOutput(node)
        if config.dra.enabled:
            self._driver, self._lists = config.dra.driver, config.dra.list_attributes
            self._slices = slices.SliceOutput(node, self._driver)
            handover = ClaimFileResponder(config.dra.handover_dir)
            self._claims = ClaimRequestAnswerer(handover, self._api, self._schedule_slice_rechecks)
        if publish.events:
            self._events = EventOutput(node, prefix)
        if publish.otlp_endpoint:
            dropped = self.metrics.objects_dropped.labels("traces").inc
            output_up = self.metrics.output_up.labels("traces").set
            self._spans = SpanSender(publish.otlp_endpoint, node, self._source, dropped, output_up)
        if config.offline_capacity.file:
            interval = parse_duration(config.offline_capacity.interval)
            self._handover = AgentOfflineCapacityOutput(node, prefix, interval)
        node_outputs = (self._topology, self._node, self._pods, self._capacity, self._numatopology)
        outputs = (*node_outputs, self._slices, self._events, self._handover)
        return [output for output in outputs if output is not None]

    @property
    def problem(self) -> str:
        """Sentence saying why nothing can be published now; empty without a problem."""
        return self._agent_problem or self._writer.problem

    async def run(self) -> None:
        """Publish until cancelled.

        Raises:
            OSError: the address cannot be bound.
        """
        if self._address is not None:
            self.probes.listen_on_port(self._address[1])
        tasks = [self._follow_agent(), self._writer.run(), self._run_resyncs()]
        if self._topology is not None:
            tasks.append(self._run_zone_refreshes())
        if self._bound is not None:
            tasks.append(self._bound.watch.run())
        tasks += [part.run() for part in (self._claims, self._spans) if part is not None]
        try:
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(task)
        finally:
            await self.probes.stop()
            await self._source.close()
            await self._api.close()

    # --- the agent's side -------------------------------------------------------------------------

    def unfinished_work_fields(self) -> dict[str, object]:
        """Return the number of unwritten items, for the log line at the end."""
        return {"pending_object_count": self.queue.pending_count()}

    async def _follow_agent(self) -> None:
        failures = 0
        while True:
            try:
                async for changed in self._source.watch_changes():
                    # The events of a sandbox and its containers become one write.
                    await asyncio.sleep(self._debounce_s)
                    await self._fetch_changed_documents(changed)
                    failures = 0
                    self._report_agent_state("")
            except AgentUnavailable as error:
                self._report_agent_state(str(error))
            # The agent may be a new process with another state.
            self._machine_read, self._serial, self._number_known = False, -1, False
            failures += 1
            if failures == AGENT_MAX_FAILURES:
                for output in (self._topology, self._numatopology):
                    if output is not None:
                        output.set_desired(None)
                        self._wake.set()
            await asyncio.sleep(min(10.0, backoff_seconds(failures, self._jitter())))

    async def _fetch_changed_documents(self, changed: AgentChange) -> None:
        if self._spans is not None:
            self._spans.wake.set()
        await self._fetch_zones()
        if self._node is not None and not self._machine_read:
            info = await self._source.read_document(MachineNUMAInfo)
            topology = await self._source.read_document(TopologyDocument)
            with _translate_topology_errors():
                labels = desired_objects.node_labels(self._prefix, topology)
            annotations = desired_objects.node_annotations(self._prefix, info)
            if self._handover is not None:
                annotations |= desired_objects.numa_ids_annotation(self._prefix, topology)
            self._node.set_desired(annotations, labels)
            self._machine_read = True
        if self._capacity is not None:
            document = await self._source.read_document(ExclusiveCPUSlotsDocument)
            free_cpus = sum(node.free for node in document.numa_nodes)
            # An agent that is not ready gets no new pods; the allocated CPUs still count.
            self._capacity.set_desired(document.exclusive + (free_cpus if document.ready else 0))
        if self._numatopology is not None:
            topology = await self._source.read_document(TopologyDocument)
            listed = await self._source.read_document(Assignments)
            zones = await self._source.read_document(Zones)
            if zones.serial == listed.serial:  # else the state changed in between, and is read next
                with _translate_topology_errors():
                    spec = numatopology.build_numatopology_spec(topology, listed.containers, zones)
                self._numatopology.set_desired(spec)
        if self._slices is not None:
            zones = await self._source.read_document(Zones)
            slots = await self._source.read_document(ExclusiveCPUSlotsDocument)
            devices = slices.build_slice_devices(zones, slots, self._driver, lists=self._lists)
            self._slices.set_desired(devices)
        if self._pods is not None and changed.serial != self._serial:
            listed = await self._source.read_document(Assignments)
            self._pods.set_desired(listed.containers)
            self._serial = listed.serial
        has_new_notices = not self._number_known or changed.notices != self._number
        if self._events is not None and has_new_notices:
            await self._fetch_notices(self._events)
        self._wake.set()

    async def _fetch_zones(self) -> None:
        if self._topology is None:
            return
        async with self._zones_turn:  # an older answer must not come after a newer one
            zones = await self._source.read_document(Zones)
            self._counted = zones.devices_problem is not None
            with_pods = zones if self._bound is None else self._bound.with_bound_pods(zones)
            self._topology.set_desired(with_pods)
        self._wake.set()
        ids = {zone.id for zone in zones.zones}
        if SCHEDULER_CRASHING_ZONE_ID in ids and not self._unlisted_said:
            self._unlisted_said = True
            log.warning(
                "NUMA node omitted from NodeResourceTopology",
                numa_node=SCHEDULER_CRASHING_ZONE_ID,
                problem="its zone would end a kube-scheduler with NodeResourceTopologyMatch",
            )

    def _schedule_slice_rechecks(self) -> None:
        if self._slices is not None:
            self._slices.schedule_rechecks(self._clock())
            self._wake.set()

    async def _fetch_notices(self, events: EventOutput) -> None:
        document = await self._source.read_document(Notices, f"/v1/notices?after={self._number}")
        if document.instance != self._instance and self._number:
            document = await self._source.read_document(Notices, "/v1/notices?after=0")
        old_count = events.expired_count
        events.add_notices(document.notices, self._wall())
        self.metrics.expired_notices.inc(events.expired_count - old_count)
        self._instance, self._number, self._number_known = document.instance, document.number, True

    def _report_agent_state(self, problem: str) -> None:
        self.metrics.agent_up.set(not problem)
        if problem and problem != self._agent_problem:
            log.warning("agent connection lost", problem=problem)
        elif self._agent_problem and not problem:
            log.info("agent connected")
        self._agent_problem = problem

    # --- the API server's side --------------------------------------------------------------------

    def _on_request_done(self, request: APIRequest, outcome: Outcome) -> None:
        self._report_clock_skew(self._wall() - self._api.server_time())
        for output in self.queue.outputs:
            self._update_output_metrics(output)
        if outcome.result in (OutcomeKind.SUCCEEDED, OutcomeKind.EXISTS):
            self.metrics.last_success.set(self._wall())
        if self._handover is not None and request.output == self._handover.name:
            self._write_agent_capacity_file(self._handover)

    def _write_agent_capacity_file(self, handover: AgentOfflineCapacityOutput) -> None:
        """Write the agent's file if it is missing or differs."""
        file, document = self._handover_file, handover.document
        if not document or (document == self._handed and os.path.exists(file)):
            return
        try:
            write_file_atomically(file, document)
        except OSError as error:
            location = f"offlineCapacity.file: {error.filename}"
            handover.problem = f"{location}: {error.strerror or error}"
        else:
            log.info("capacity handed to agent", document=document)
            self._handed = document

    def _schedule_recheck(self) -> None:
        # The Node may be another one; the delay spreads the checks of a cluster's nodes.
        asyncio.get_running_loop().call_later(
            MAX_NODE_RECHECK_DELAY_S * self._jitter(), self._request_topology_resync
        )

    def _request_topology_resync(self) -> None:
        if self._topology is not None:
            self._topology.schedule_resync()
            self._wake.set()

    def _update_output_metrics(self, output: Output) -> None:
        self.metrics.pending_objects.labels(output.name).set(output.pending_count())
        dropped = self.metrics.objects_dropped.labels(output.name)
        dropped.inc(output.dropped)
        output.dropped = 0

    def _report_clock_skew(self, seconds: float) -> None:
        self.metrics.clock_skew.set(round(seconds))
        self._problems.report(
            "node clock skewed",
            "skewed" if abs(seconds) > CLOCK_SKEW_LIMIT_S else "",
            clock_skew_s=round(seconds),
            remedy="set the clock of the node: tokens, certificates and the times of Events depend "
            "on it",
        )

    async def _run_resyncs(self) -> None:
        period = parse_duration(self._publish.resync_interval)
        while True:
            # Not all nodes of a cluster at the same moment.
            await asyncio.sleep(period * (0.9 + 0.2 * self._jitter()))
            self._machine_read = False
            if self._topology is not None:
                self._topology.renew_validity(self._wall())
            self.queue.schedule_resync()
            with contextlib.suppress(AgentUnavailable):  # `_follow_agent` reports that
                await self._fetch_zones()
            self._wake.set()

    async def _run_zone_refreshes(self) -> None:
        """Read the zones when a pod is bound, and periodically if devices are counted."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEVICE_RECOUNT_S):
                    await self._bound_changed.wait()
            if self._bound_changed.is_set() or self._counted:
                self._bound_changed.clear()
                with contextlib.suppress(AgentUnavailable):
                    await self._fetch_zones()


@contextlib.contextmanager
def _translate_topology_errors() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise AgentUnavailable(f"the agent's topology is not as expected: {error!r}") from error


def run_publisher(config: AgentConfig, node: str) -> int:
    """Run for the Node of this name until SIGTERM; the result is the exit code.

    Raises:
        ConfigError: there is no socket to read.
    """

    def create_publisher() -> Publisher:
        publisher = Publisher(
            config, node, KubeAPI(config.publish.credentials_dir, "nri-numa-publish")
        )
        log.info("publisher starting", version=__version__, node=node, socket=config.http.socket)
        return publisher

    return service.run_service(create_publisher, log, address="publish.address")
