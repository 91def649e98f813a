"""What is watched: nodes by their NodeResourceTopology, and pods on their way to them."""

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
    mapping_or_empty,
    text_in_section,
)
from nri_numa.model.workload import ENDED_POD_PHASES
from nri_numa.observe.logs import get_logger
from nri_numa.text import escape_unprintable

log = get_logger("scheduler")

TOPOLOGIES_PATH: Final = Resource.TOPOLOGIES.object_or_list_path()
PODS_PATH: Final = Resource.PODS.object_or_list_path()
PENDING_BOUND_PODS_SELECTOR: Final = "status.phase=Pending,spec.nodeName!="
"""Pods that have a node and do not run yet."""
ASSUMED_POD_TIMEOUT_S: Final = 600.0
"""Seconds after which a binding of which nothing is known is not going to be written any more."""
MAX_RECHECK_PAUSE_S: Final = 60.0
"""Seconds between two questions after a pod that its node does not count, at most."""
MIN_POD_WAKE_INTERVAL_S: Final = 2.0
"""Seconds between two touches of a Node's annotation at least, which wake refused pods."""
PARTIAL_START_FACTOR: Final = 6.0
"""How many times `settle` a pod is held of which some container may not run yet."""
MIN_WARNING_INTERVAL_S: Final = 60.0
"""Seconds between two lines about objects that cannot be read, or are not renewed."""
WAKE_ANNOTATION: Final = "room"
"""Key of the annotation that wakes pods, below the prefix; its value is a number that is another
one each time."""
MAX_UNSCHEDULABLE_POD_AGE_S: Final = 600.0
"""Seconds in which a pod that was refused is thought to wait; it is tried again every 5 minutes."""
MAX_WAKE_ROUNDS: Final = 8.0
"""How often all nodes may be tried for a pod that one of them has room for. kube-scheduler asks
twice at each attempt, and which nodes are next is not up to one pod alone."""
_MAX_UNSCHEDULABLE_PODS: Final = 10_000


class PodActivator:
    """Wakes pods that were refused, when room appears.

    kube-scheduler tries a pod that an extender refused again at events of its own kinds, among them
    a changed annotation of a Node, and not at those of a custom resource. One write wakes all of
    them, so one at a time is enough.
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
        """A pod found no node."""
        self._waiting.pop(uid, None)
        if len(self._waiting) >= _MAX_UNSCHEDULABLE_PODS:
            self._waiting.pop(next(iter(self._waiting)))
        self._waiting[uid] = self._clock()

    def drop_pod(self, uid: str) -> None:
        """A pod has its node, or does not exist any more."""
        self._waiting.pop(uid, None)
        self._seen.pop(uid, None)

    def should_wake_again(self, uid: str, share: float) -> bool:
        """Whether to wake a pod that was tried on a share of the nodes, and fits on another one.

        Not for ever: of that one something may keep it away that kube-scheduler alone knows.
        """
        if len(self._seen) >= _MAX_UNSCHEDULABLE_PODS:
            self._seen.pop(next(iter(self._seen)))
        seen = self._seen[uid] = self._seen.pop(uid, 0.0) + share
        return seen < MAX_WAKE_ROUNDS

    def on_free_increased(self, node: str) -> None:
        """A node has more room than before."""
        now = self._clock()
        self._seen.clear()
        while self._waiting:
            uid, at = next(iter(self._waiting.items()))
            if now - at <= MAX_UNSCHEDULABLE_POD_AGE_S:
                return self.wake_pods(node)
            del self._waiting[uid]

    def wake_pods(self, *nodes: str) -> None:
        """Wake all pods by one of these nodes, also those that another replica refused."""
        if nodes:
            self._nodes |= dict.fromkeys(nodes)
            self._due.set()

    @property
    def is_wake_due(self) -> bool:
        """Whether pods are about to be woken."""
        return self._due.is_set()

    async def run(self, leads: Callable[[], bool]) -> None:
        """Wake pods until cancelled, while we lead."""
        while True:
            await self._due.wait()
            self._due.clear()
            nodes, self._nodes = self._nodes, {}
            if leads():
                await self._annotate_node_to_wake_pods(nodes)
            await asyncio.sleep(MIN_POD_WAKE_INTERVAL_S)

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
                level("refused pods are not woken", node=node, problem=str(error)[:300])
                # Busy or away: once more, or they would wait for minutes.
                self._again = not error.code or error.code >= 429
                if self._again:
                    self.wake_pods(*nodes)
                if error.code != 404:
                    return
                del nodes[node]  # that Node is gone: by another one
            else:
                self._again = False
                self._wakes.inc()
                log.debug("refused pods are woken", node=node)
                return


class SparseWarning:
    """A line a minute of what befalls many objects at once: how often it did, and the last one."""

    def __init__(self, text: str) -> None:
        self._text, self._count, self._due = text, 0, -inf
        self._last: dict[str, str] = {}

    def count_occurrence(self, **values: str) -> None:
        """It befell an object, of which these are shown."""
        self._count, self._last = self._count + 1, values

    def log_if_due(self, now: float) -> None:
        """Write the line where there is something to say and the last one is a minute old."""
        if self._count and now >= self._due:
            log.warning(self._text, count=self._count, **self._last)
            self._count, self._due = 0, now + MIN_WARNING_INTERVAL_S


class NodeWatcher(WatchHandler):
    """Keeps what nodes publish up to date."""

    def __init__(
        self,
        nodes: ClusterState,
        activator: PodActivator,
        clock: Callable[[], float],
    ) -> None:
        self._nodes, self._activator, self._clock = nodes, activator, clock
        self._unreadable = SparseWarning(
            "NodeResourceTopology objects cannot be read: nothing is known of their nodes"
        )
        self._stale = SparseWarning(
            "NodeResourceTopology objects are not renewed: no pod is sent to their nodes"
        )

    def on_update(self, document: Mapping[str, Any]) -> None:
        """An object exists, new or changed."""
        name = name_of(document)
        before = self._nodes.published_resources(name)
        if self._nodes.update_topology(name, document, self._clock()):
            self._activator.on_free_increased(name)
        known = self._nodes.published_resources(name)
        if isinstance(known, UnreadableTopology) and known != before:
            self._unreadable.count_occurrence(
                node=name, problem=escape_unprintable(known.reason)[:500]
            )

    def on_every_deleted_key(self, key: str) -> None:
        """An object does not exist any more."""
        self._nodes.remove_topology(key)

    def expire_topologies(self) -> None:
        """Time has passed."""
        now = self._clock()
        for name in self._nodes.expire_topologies(now):
            self._stale.count_occurrence(node=name, remedy="look at nri-numa publish of that node")
        self._unreadable.log_if_due(now)
        self._stale.log_if_due(now)


class PodWatcher(WatchHandler):
    """Holds room for pods that have a node, until that counts them.

    Pods that are on their way are watched, and no others: there are too many. So of a pod that
    started and that its node does not count yet nothing more is heard, and it is asked after. And
    a list of those on their way does not name one that started just before it, while the object of
    its node may be older than that start. So after each list the first binding to a node waits
    until the pods that are there were read, by the annotation that their own binding wrote.
    Bindings that come meanwhile wait for the same answer
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
        self._settle = parse_duration(config.scheduler.settle)
        self._timeout = parse_duration(config.scheduler.bind_timeout)
        self._clock = clock
        self._read: set[str] | None = None
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._late: set[str] = set()

    def on_update(self, document: Mapping[str, Any]) -> None:
        """A pod has a node, and none of its containers runs yet, as far as is known.

        One that is being deleted too: its container may have started, and has its CPUs until it
        ends.
        """
        uid, node = uid_of(document), text_in_section(document, "spec", "nodeName")
        self._activator.drop_pod(uid)
        held = self._nodes.assumed_pods.get(uid)
        if held is not None and held.node == node:
            # A list from before its binding did not name it.
            self._nodes.pod_pending_again(uid)
        elif (held is not None or self._reader.scheduled_numa_nodes(document)) and (
            hold := assumed_pod_of(document, self._reader, self._clock())
        ) is not None:
            # Of another replica, of our life before, or of a scheduler that sent it elsewhere.
            self._nodes.assume_pod(hold)

    def on_delete(self, document: Mapping[str, Any]) -> None:
        """A pod left the phase Pending, or does not exist any more.

        The document is the pod as it was *before*: a watch with a field selector ends with the last
        object that the selector took. So it does not say whether the pod runs now. One that was
        being deleted is asked after at once, another one where its node does not count it.
        """
        uid, now = uid_of(document), self._clock()
        self._activator.drop_pod(uid)
        self._reader.drop_pod(uid)
        deleted = text_in_section(document, "metadata", "deletionTimestamp")
        self._wake_waiting_pods(
            self._nodes.pod_left_pending(
                uid, now, now if deleted else self._expected_count_time(document)
            )
        )

    def on_list(self, keys: frozenset[str]) -> None:
        """These are all that are on their way.

        Another one that is held started, was deleted, or its binding is being written. Time shows
        them apart.
        """
        now = self._clock()
        for uid in self._nodes.assumed_pods.keys() - keys:
            self._wake_waiting_pods(
                self._nodes.pod_left_pending(uid, now, now + PARTIAL_START_FACTOR * self._settle)
            )
        self._read = set()
        self.require_node_rereads()

    def require_node_rereads(self) -> None:
        """Read the pods of each node once more before something is bound there.

        What was read before may lack pods that another replica bound since.
        """
        if self._read is not None:
            self._read, self._reading = set(), {}

    def expire_assumed_pods(self) -> None:
        """Time has passed."""
        now = self._clock()
        for hold in self._nodes.due_assumed_pods(now):
            if not self._needs_pod_query(hold):
                self._wake_waiting_pods(self._nodes.forget_pod(hold.uid))
        late = {hold.node: hold for hold in self._nodes.late_assumed_pods(now)}
        for node in sorted(late.keys() - self._late):
            request = late[node].request
            log.warning(
                "a node does not count a pod that started: its NUMA nodes stay held",
                node=node,
                pod=f"{request.namespace}/{request.name}",
                remedy="look at nri-numa publish of that node",
            )
        self._late = set(late)

    def _needs_pod_query(self, hold: AssumedPod) -> bool:
        """Whether only its pod can end a hold that is due.

        That of a pod that left ends by `settle` where no object says when it is counted.
        """
        if not hold.left_pending:
            return True
        known = self._nodes.published_resources(hold.node)
        if isinstance(known, NodeResources):
            return hold.is_nameable_by(known)
        return bool(hold.charge or hold.numa_nodes)

    async def query_overdue_pods(self) -> None:
        """Ask what became of pods that are held for too long, one after the other."""
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
        """Go by what a pod is now, `None` where nothing answered."""
        now = self._clock()
        age = now - (hold.left_at if hold.left_pending else hold.assumed_at)
        again = now + min(MAX_RECHECK_PAUSE_S, max(self._settle, age))
        if document is None:
            return self._nodes.postpone_hold_check(hold.uid, again)
        node, phase = (
            text_in_section(document, "spec", "nodeName"),
            text_in_section(document, "status", "phase"),
        )
        elsewhere = node != hold.node if node else age >= ASSUMED_POD_TIMEOUT_S
        if uid_of(document) != hold.uid or is_finished(document) or elsewhere:
            self._wake_waiting_pods(self._nodes.forget_pod(hold.uid))
        elif phase == "Pending":
            self._nodes.pod_pending_again(hold.uid, again)
        else:
            self._wake_waiting_pods(self._nodes.pod_left_pending(hold.uid, now, again))
            self._nodes.postpone_hold_check(hold.uid, again)

    async def read_node(self, node: str) -> None:
        """Hold room for pods that are on a node, where it is not certain that it counts them.

        Raises:
            TimeoutError: no answer within the seconds of one reading.
            KubeError: nothing came back, or the server says no.
        """
        # Again where another list came meanwhile: then the answer was to an older question.
        while self._read is not None and node not in self._read:
            # A caller that is cancelled leaves the answer to the others.
            await asyncio.shield(self._reading.get(node) or self._start_read(node, self._read))

    def _start_read(self, node: str, done: set[str]) -> asyncio.Task[None]:
        """Begin to read a node.

        Any answer to a question that was sent after the list will do for all: a pod that started
        before the list is in it, and one that starts after it comes by the watch.
        """
        reading = self._reading

        def on_read_done(task: asyncio.Task[None]) -> None:
            del reading[node]  # after a failure the next one asks anew
            if not task.cancelled():
                task.exception()  # no caller may wait any more

        task = reading[node] = asyncio.create_task(
            self._read_pods(node, done), name=f"pods of {node}"
        )
        task.add_done_callback(on_read_done)
        return task

    async def _read_pods(self, node: str, done: set[str]) -> None:
        ended = ",".join(f"status.phase!={phase}" for phase in sorted(ENDED_POD_PHASES))
        async with asyncio.timeout(self._timeout):
            found = await self._api.list_objects(PODS_PATH, f"spec.nodeName={node},{ended}")
        for document in found:
            self.on_pod_found(document)
        done.add(node)

    def on_pod_found(self, document: Mapping[str, Any]) -> None:
        """A pod is on a node, and may not have been seen on its way.

        It is held unless its node counts it. What is watched may be behind or ahead of this: so one
        that is on its way is asked after until that is told, and another one as if it had left the
        phase Pending now.
        """
        uid, now = uid_of(document), self._clock()
        held = self._nodes.assumed_pods.get(uid)
        placed = self._reader.scheduled_numa_nodes(document)
        hold = assumed_pod_of(document, self._reader, now) if placed else None
        self._reader.drop_pod(uid)
        if hold is None or (held is not None and held.node == hold.node):
            return
        pending = text_in_section(document, "status", "phase") == "Pending"
        left_at, until = inf if pending else now, self._expected_count_time(document)
        self._nodes.assume_pod(replace(hold, left_at=left_at, expires_at=until))

    def _expected_count_time(self, document: Mapping[str, Any]) -> float:
        """When a node has counted a pod that leaves the phase Pending now.

        The first of its containers runs; whether the others do is not known here.
        """
        containers = mapping_or_empty(document.get("spec")).get("containers")
        several = isinstance(containers, list) and len(containers) > 1
        return self._clock() + (PARTIAL_START_FACTOR if several else 1.0) * self._settle

    def _wake_waiting_pods(self, hold: AssumedPod | None) -> None:
        if hold is not None:
            self._activator.on_free_increased(hold.node)
