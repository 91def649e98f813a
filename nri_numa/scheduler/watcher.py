"""Watch handlers for NodeResourceTopology objects, and for bound pods that are still Pending."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

from msgspec.structs import replace
from prometheus_client import Counter

from nri_numa.cluster.cluster_state import AssumedPod, ClusterState, assumed_pod_of
from nri_numa.cluster.node_resources import NodeResources, UnreadableTopology
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.cluster.pods import is_finished
from nri_numa.config import AgentConfig, parse_duration
from nri_numa.kube.api import WatchHandler, name_of, uid_of
from nri_numa.kube.requests import (
    ContentType,
    KubeClient,
    KubeError,
    Resource,
    section_of,
    text_in_section,
)
from nri_numa.model.workload import ENDED_POD_PHASES
from nri_numa.observe.logs import get_logger
from nri_numa.text import escape_unprintable

log = get_logger("scheduler")

TOPOLOGIES_PATH: Final = Resource.TOPOLOGIES.object_or_list_path()
PODS_PATH: Final = Resource.PODS.object_or_list_path()
PENDING_BOUND_PODS_SELECTOR: Final = "status.phase=Pending,spec.nodeName!="
"""Pods that are bound and do not run yet."""
ASSUMED_POD_TIMEOUT_S: Final = 600.0
"""Seconds after which a binding of unknown outcome can no longer be written."""
MAX_RECHECK_PAUSE_S: Final = 60.0
"""Maximum seconds between two reads of a pod that its node does not count."""
MIN_WAKE_WRITE_INTERVAL_S: Final = 2.0
"""Minimum seconds between two writes of a Node's annotation, which wake rejected pods."""
PARTIAL_START_FACTOR: Final = 6.0
"""Factor on `topology_report_delay` for a pod with a container that may not run yet."""
MIN_WARNING_INTERVAL_S: Final = 60.0
"""Minimum seconds between two warnings about unreadable or expired objects."""
WAKE_ANNOTATION: Final = "wake-counter"
"""Key below the prefix of the annotation that wakes pods; its value is the time in milliseconds."""
MAX_UNSCHEDULABLE_POD_AGE_S: Final = 600.0
"""Seconds for which a rejected pod is thought to wait; kube-scheduler retries every 5 minutes."""
MAX_WAKE_ROUNDS: Final = 8.0
"""Rounds over all nodes for a pod that fits one of them. kube-scheduler asks twice at each attempt,
and other pods, too, advance its start node."""
_MAX_UNSCHEDULABLE_PODS: Final = 10_000


class PodActivator:
    """Wakes rejected pods when free resources increase.

    kube-scheduler retries a pod that an extender rejected on events of its own kinds, such as a
    changed annotation of a Node, but not on those of a custom resource. One write wakes all pods.
    """

    def __init__(
        self,
        api: KubeClient,
        config: AgentConfig,
        wakes: Counter,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._api, self._wakes, self._clock, self._wall = api, wakes, clock, wall
        self._annotation = f"{config.annotation_prefix}/{WAKE_ANNOTATION}"
        self._waiting: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._nodes: dict[str, None] = {}
        self._again = False
        self._due = asyncio.Event()

    def record_unschedulable(self, uid: str) -> None:
        """Remember a pod without a feasible node."""
        self._waiting.pop(uid, None)
        if len(self._waiting) >= _MAX_UNSCHEDULABLE_PODS:
            self._waiting.pop(next(iter(self._waiting)))
        self._waiting[uid] = self._clock()

    def drop_pod(self, uid: str) -> None:
        """Drop a pod that is bound or no longer exists."""
        self._waiting.pop(uid, None)
        self._seen.pop(uid, None)

    def should_wake_again(self, uid: str, fraction: float) -> bool:
        """Count the tried fraction of the nodes; return True up to `MAX_WAKE_ROUNDS`.

        The limit is for pods that kube-scheduler keeps from the fitting node for its own reasons.
        """
        if len(self._seen) >= _MAX_UNSCHEDULABLE_PODS:
            self._seen.pop(next(iter(self._seen)))
        rounds = self._seen[uid] = self._seen.pop(uid, 0.0) + fraction
        return rounds < MAX_WAKE_ROUNDS

    def on_free_increased(self, node: str) -> None:
        """Wake the waiting pods by a node whose free resources have increased."""
        now_s = self._clock()
        self._seen.clear()
        while self._waiting:
            uid, rejected_at = next(iter(self._waiting.items()))
            if now_s - rejected_at <= MAX_UNSCHEDULABLE_POD_AGE_S:
                return self.wake_pods(node)
            del self._waiting[uid]

    def wake_pods(self, *nodes: str) -> None:
        """Wake all pods by one of these nodes, including those that another replica rejected."""
        if nodes:
            self._nodes |= dict.fromkeys(nodes)
            self._due.set()

    @property
    def is_wake_due(self) -> bool:
        """True if pods are about to be woken."""
        return self._due.is_set()

    async def run(self, leads: Callable[[], bool]) -> None:
        """Wake pods until cancelled, while this replica leads."""
        while True:
            await self._due.wait()
            self._due.clear()
            nodes, self._nodes = self._nodes, {}
            if leads():
                await self._annotate_node_to_wake_pods(nodes)
            await asyncio.sleep(MIN_WAKE_WRITE_INTERVAL_S)

    async def _annotate_node_to_wake_pods(self, nodes: dict[str, None]) -> None:
        body = {"metadata": {"annotations": {self._annotation: str(int(self._wall() * 1000))}}}
        while nodes:
            node = next(reversed(nodes))
            try:
                await self._api.request_json(
                    "PATCH",
                    Resource.NODES.object_or_list_path(name=node),
                    body,
                    form=ContentType.MERGE,
                )
            except KubeError as error:
                level = log.debug if self._again else log.warning
                level("rejected pods not woken", node=node, problem=str(error)[:300])
                # Throttled or unreachable: retry, or the pods would wait for minutes.
                self._again = not error.code or error.code >= 429
                if self._again:
                    self.wake_pods(*nodes)
                if error.code != 404:
                    return
                del nodes[node]  # the Node does not exist: use another one
            else:
                self._again = False
                self._wakes.inc()
                log.debug("rejected pods woken", node=node)
                return


class SparseWarning:
    """A warning once a minute about many objects: their number, and the last object."""

    def __init__(self, text: str) -> None:
        self._text, self._count, self._due = text, 0, -inf
        self._last: dict[str, str] = {}

    def count_occurrence(self, **values: str) -> None:
        """Count one object; ``values`` are logged if it is the last."""
        self._count, self._last = self._count + 1, values

    def log_if_due(self, now_s: float) -> None:
        """Log the count if it is not 0 and the last line is a minute old."""
        if self._count and now_s >= self._due:
            log.warning(self._text, object_count=self._count, **self._last)
            self._count, self._due = 0, now_s + MIN_WARNING_INTERVAL_S


class NodeWatcher(WatchHandler):
    """Keeps the nodes' published resources up to date."""

    def __init__(
        self,
        nodes: ClusterState,
        activator: PodActivator,
        clock: Callable[[], float],
    ) -> None:
        self._nodes, self._activator, self._clock = nodes, activator, clock
        self._unreadable = SparseWarning("NodeResourceTopology objects unreadable")
        self._stale = SparseWarning("NodeResourceTopology objects not renewed")

    def on_update(self, document: Mapping[str, Any]) -> None:
        """Update the resources of a node from its new or changed object."""
        name = name_of(document)
        old_resources = self._nodes.published_resources(name)
        if self._nodes.update_topology(name, document, self._clock()):
            self._activator.on_free_increased(name)
        resources = self._nodes.published_resources(name)
        if isinstance(resources, UnreadableTopology) and resources != old_resources:
            self._unreadable.count_occurrence(
                node=name, problem=escape_unprintable(resources.reason)[:500]
            )

    def on_every_deleted_key(self, key: str) -> None:
        """Remove the resources of a node whose object was deleted."""
        self._nodes.remove_topology(key)

    def expire_topologies(self) -> None:
        """Mark nodes whose topology has expired, and log warnings that are due."""
        now_s = self._clock()
        for name in self._nodes.expire_topologies(now_s):
            self._stale.count_occurrence(node=name, remedy="look at nri-numa publish of that node")
        self._unreadable.log_if_due(now_s)
        self._stale.log_if_due(now_s)


class PodWatcher(WatchHandler):
    """Assumes pods that have a node, until the node counts them.

    Only bound pods in the phase Pending are watched; all pods would be too many. So a pod that has
    started and is not counted by its node is read by a query. A list of Pending pods does not have
    a pod that started just before it, while its node's object may be older than that start. So
    after each list the first binding to a node waits until the node's pods were read; the
    annotation of their own binding marks them. Concurrent bindings wait for the same answer
    (docs/adr/0049-held-until-the-node-counts-it.md).
    """

    def __init__(
        self,
        api: KubeClient,
        nodes: ClusterState,
        reader: PodReader,
        activator: PodActivator,
        config: AgentConfig,
        clock: Callable[[], float],
    ) -> None:
        self._api, self._nodes, self._reader, self._activator = api, nodes, reader, activator
        self._report_delay_s = parse_duration(config.scheduler.topology_report_delay)
        self._timeout = parse_duration(config.scheduler.bind_timeout)
        self._clock = clock
        self._read: set[str] | None = None
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._late: set[str] = set()

    def on_update(self, document: Mapping[str, Any]) -> None:
        """Assume a pod that has a node and no running container yet.

        A pod that is being deleted counts too: its container may have started, and has its CPUs
        until it ends.
        """
        uid, node = uid_of(document), text_in_section(document, "spec", "nodeName")
        self._activator.drop_pod(uid)
        assumed_pod = self._nodes.assumed_pods.get(uid)
        if assumed_pod is not None and assumed_pod.node == node:
            # A list from before its binding did not have it.
            self._nodes.pod_pending_again(uid)
        elif (assumed_pod is not None or self._reader.scheduled_numa_nodes(document)) and (
            hold := assumed_pod_of(document, self._reader, self._clock())
        ) is not None:
            # Bound by another replica, by an earlier process, or by a scheduler to another node.
            self._nodes.assume_pod(hold)

    def on_delete(self, document: Mapping[str, Any]) -> None:
        """Record that a pod left the phase Pending, or no longer exists.

        The document is the pod *before* that: a watch with a field selector ends with the last
        object that the selector matched. So it does not say if the pod runs now. A pod that was
        being deleted is read at once, another one if its node does not count it.
        """
        uid, now_s = uid_of(document), self._clock()
        self._activator.drop_pod(uid)
        self._reader.drop_pod(uid)
        deleted = text_in_section(document, "metadata", "deletionTimestamp")
        self._wake_waiting_pods(
            self._nodes.pod_left_pending(
                uid, now_s, now_s if deleted else self._expected_count_time(document)
            )
        )

    def on_list(self, keys: frozenset[str]) -> None:
        """Record that assumed pods without a key in the list may have left the phase Pending.

        Such a pod started, was deleted, or its binding is being written. A later read tells which.
        """
        now_s = self._clock()
        for uid in self._nodes.assumed_pods.keys() - keys:
            self._wake_waiting_pods(
                self._nodes.pod_left_pending(
                    uid, now_s, now_s + PARTIAL_START_FACTOR * self._report_delay_s
                )
            )
        self._read = set()
        self.require_node_rereads()

    def require_node_rereads(self) -> None:
        """Read the pods of each node again before the next binding to it.

        The earlier read may lack pods that another replica has bound since.
        """
        if self._read is not None:
            self._read, self._reading = set(), {}

    def expire_assumed_pods(self) -> None:
        """Forget assumed pods that are due, and log nodes that do not count a started pod."""
        now_s = self._clock()
        for hold in self._nodes.due_assumed_pods(now_s):
            if not self._needs_pod_query(hold):
                self._wake_waiting_pods(self._nodes.forget_pod(hold.uid))
        late_by_node = {hold.node: hold for hold in self._nodes.late_assumed_pods(now_s)}
        for node in sorted(late_by_node.keys() - self._late):
            request = late_by_node[node].request
            log.warning(
                "started pod not counted by node",
                node=node,
                pod=f"{request.namespace}/{request.name}",
                remedy="look at nri-numa publish of that node",
            )
        self._late = set(late_by_node)

    def _needs_pod_query(self, hold: AssumedPod) -> bool:
        """Return True if an assumed pod that is due must be read before it is forgotten.

        A pod that left the phase Pending is forgotten after `topology_report_delay` if no object
        can count it.
        """
        if not hold.left_pending:
            return True
        resources = self._nodes.published_resources(hold.node)
        if isinstance(resources, NodeResources):
            return hold.is_nameable_by(resources)
        return bool(hold.charge or hold.numa_nodes)

    async def query_overdue_pods(self) -> None:
        """Read pods that have been assumed for too long, one after the other."""
        for hold in self._nodes.due_assumed_pods(self._clock()):
            if self._needs_pod_query(hold):
                await self._check_held_pod(hold)

    async def _check_held_pod(self, hold: AssumedPod) -> None:
        request = hold.request
        path = Resource.PODS.object_or_list_path(request.namespace, request.name)
        document: Mapping[str, Any] | None = None
        try:
            async with asyncio.timeout(self._timeout):
                document = await self._api.request_json("GET", path)
        except KubeError as error:
            document = {} if error.code == 404 else None
        except TimeoutError:
            pass
        if self._nodes.assumed_pods.get(hold.uid) is hold:
            self._update_hold_from_pod(hold, document)

    def _update_hold_from_pod(self, hold: AssumedPod, document: Mapping[str, Any] | None) -> None:
        """Update an assumed pod from its current document, None if there was no answer."""
        now_s = self._clock()
        age = now_s - (hold.left_at if hold.left_pending else hold.assumed_at)
        recheck_at = now_s + min(MAX_RECHECK_PAUSE_S, max(self._report_delay_s, age))
        if document is None:
            return self._nodes.postpone_hold_check(hold.uid, recheck_at)
        node, phase = (
            text_in_section(document, "spec", "nodeName"),
            text_in_section(document, "status", "phase"),
        )
        on_other_node = node != hold.node if node else age >= ASSUMED_POD_TIMEOUT_S
        if uid_of(document) != hold.uid or is_finished(document) or on_other_node:
            self._wake_waiting_pods(self._nodes.forget_pod(hold.uid))
        elif phase == "Pending":
            self._nodes.pod_pending_again(hold.uid, recheck_at)
        else:
            self._wake_waiting_pods(self._nodes.pod_left_pending(hold.uid, now_s, recheck_at))
            self._nodes.postpone_hold_check(hold.uid, recheck_at)

    async def read_node(self, node: str) -> None:
        """Assume the pods on a node that the node may not count.

        Raises:
            TimeoutError: no answer within the time-out of one read.
            KubeError: the connection failed, or the server rejects the request.
        """
        # Repeated after a new list: the answer then belongs to an older question.
        while self._read is not None and node not in self._read:
            # A cancelled caller leaves the answer to the other callers.
            await asyncio.shield(
                self._reading.get(node) or self._start_reading_pods_of_node(node, self._read)
            )

    def _start_reading_pods_of_node(self, node: str, read_nodes: set[str]) -> asyncio.Task[None]:
        """Start to read the pods of a node.

        One question sent after the list serves all callers: a pod that started before the list is
        in its answer, and a pod that starts later comes by the watch.
        """
        reading = self._reading

        def on_read_done(task: asyncio.Task[None]) -> None:
            del reading[node]  # after a failure the next caller reads again
            if not task.cancelled():
                task.exception()  # possibly no caller is waiting

        task = reading[node] = asyncio.create_task(
            self._read_pods(node, read_nodes), name=f"pods of {node}"
        )
        task.add_done_callback(on_read_done)
        return task

    async def _read_pods(self, node: str, read_nodes: set[str]) -> None:
        selector = ",".join(f"status.phase!={phase}" for phase in sorted(ENDED_POD_PHASES))
        async with asyncio.timeout(self._timeout):
            documents = await self._api.list_objects(PODS_PATH, f"spec.nodeName={node},{selector}")
        for document in documents:
            self.on_pod_found(document)
        read_nodes.add(node)

    def on_pod_found(self, document: Mapping[str, Any]) -> None:
        """Assume a pod on a node that the watch may not have reported, unless the node counts it.

        The watch may be behind or ahead of this read. So a Pending pod is read again until the
        watch reports it, and another one is handled as if it had left the phase Pending now.
        """
        uid, now_s = uid_of(document), self._clock()
        assumed_pod = self._nodes.assumed_pods.get(uid)
        placed = self._reader.scheduled_numa_nodes(document)
        hold = assumed_pod_of(document, self._reader, now_s) if placed else None
        self._reader.drop_pod(uid)
        if hold is None or (assumed_pod is not None and assumed_pod.node == hold.node):
            return
        pending = text_in_section(document, "status", "phase") == "Pending"
        left_pending_at, expires_at = inf if pending else now_s, self._expected_count_time(document)
        self._nodes.assume_pod(replace(hold, left_at=left_pending_at, expires_at=expires_at))

    def _expected_count_time(self, document: Mapping[str, Any]) -> float:
        """Return the time by which a node counts a pod that leaves the phase Pending now.

        Its first container runs; the state of the others is unknown.
        """
        containers = section_of(document, "spec").get("containers")
        multi_container = isinstance(containers, list) and len(containers) > 1
        return (
            self._clock()
            + (PARTIAL_START_FACTOR if multi_container else 1.0) * self._report_delay_s
        )

    def _wake_waiting_pods(self, hold: AssumedPod | None) -> None:
        if hold is not None:
            self._activator.on_free_increased(hold.node)
