"""The link to a container runtime over CRI: connect, list, watch, update, connect again.

CRI has no request before a container starts. So each container is met when the runtime reports that
it was created, or when a listing shows it, and gets what was decided by an update: before its start
where that is quick enough, after it otherwise. A refusal cannot stop a start.

Events only say where to look: they may be lost (containerd 1.7 gives each to one of its listeners),
come twice, or not exist at all. What a container is now is read from the runtime each time, and
listings find what no event reported. A look at one container waits for the runtime while others go
on; decisions are made in one go between two waits, as for NRI.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from nri_numa.cri.client import CallRefused, CRIClient, UpdateFailure, container_from
from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable
from nri_numa.model.machine import count_text
from nri_numa.model.workload import (
    Container,
    ContainerUpdate,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
)
from nri_numa.observe.logs import get_logger
from nri_numa.runtime import (
    EMPTY_RESOURCES,
    STABLE_LINK_S,
    LinkState,
    Planner,
    PushResult,
    RequestRejected,
    RuntimeHandler,
    RuntimeLink,
    backoff_delays,
    inferred_qos,
)

log = get_logger("cri")

CREATED_STATE: Final = cri_pb2.CONTAINER_CREATED
RUNNING_STATE: Final = cri_pb2.CONTAINER_RUNNING
LIVE_STATES: Final = frozenset((CREATED_STATE, RUNNING_STATE))
"""States of containers that have, or will have, CPUs."""
MAX_CONCURRENT_UPDATES: Final = 4
"""Updates of neighbours under way; each is a process of the runtime's, on a node that works."""
SIZE_CHECKS_PER_LISTING: Final = 8
"""Containers whose size is looked at again with each listing."""
MAX_CONCURRENT_QUERIES: Final = 8
"""Containers that are looked at at the same time."""
LISTING_INTERVAL_WITH_EVENTS_S: Final = 5.0
"""Seconds between two listings while events come; each finds what no event reported."""
EVENT_STREAM_RETRY_S: Final = 5.0
"""Seconds before the event stream is opened again after it ended."""

RECONNECT_DELAYS: Final = partial(backoff_delays, random.random)
"""Makes the sequence of pauses between attempts."""

_T = TypeVar("_T")


# --- everything that runs; and updates made from it, once -----------------------------------------


async def list_pods_and_containers(
    client: CRIClient,
) -> tuple[dict[str, PodSandbox], list[Container]]:
    """All pods by id, and all containers that were created or run.

    Raises:
        RuntimeUnavailable: the runtime does not answer.
    """
    listed = [c for c in await client.list_all_containers() if c.state in LIVE_STATES]
    pods: dict[str, PodSandbox] = {}
    for pod_id in await client.pod_sandbox_ids():
        if (pod := await client.query_and_decode_pod(pod_id)) is not None:
            pods[pod_id] = pod
    containers: list[Container] = []
    for found in listed:
        answer = await client.container_status(found.id)
        if answer is not None and answer.status.state in LIVE_STATES:
            containers.append(replace(container_from(answer), pod_id=found.pod_sandbox_id))
    return pods, containers


def _pod_table(pods: dict[str, PodSandbox], containers: Iterable[Container]) -> PodTable:
    first: dict[str, Container] = {}
    for container in containers:
        first.setdefault(container.pod_id, container)
    return PodTable.from_pods(_with_inferred_qos(pod, first.get(pod.id)) for pod in pods.values())


def _with_inferred_qos(pod: PodSandbox, container: Container | None) -> PodSandbox:
    """The pod; where its cgroup does not show its QoS class, this container may."""
    if container is None or QoSClass.of_cgroup(pod.cgroup_parent) is not None:
        return pod
    return replace(pod, qos=inferred_qos(pod.resources, container))


async def plan_and_send_updates_once(plan: Planner, *, socket_path: str) -> str:
    """Send the updates that a function returns for everything that runs.

    Returns why the runtime could not be reached; empty when it was, whatever became of single
    updates.
    """
    try:
        async with CRIClient(socket_path) as client:
            pods, containers = await list_pods_and_containers(client)
            outbox = UpdateQueue(client)
            updates = plan(_pod_table(pods, containers), containers)
            await asyncio.gather(*map(outbox.merge_and_enqueue_update, updates))
            return ""
    except RuntimeUnavailable as error:
        return str(error)


@dataclass(slots=True)
class _PendingUpdate:
    update: ContainerUpdate
    outcome: asyncio.Future[UpdateFailure | None]


class UpdateQueue:
    """Updates on their way to the runtime over one connection, each a call of its own.

    CRI has no call for several containers, and the runtime starts a process for each (runc, crun),
    so that one takes tens of milliseconds. For each container at most one call is under way, so the
    newest values arrive last; what comes meanwhile is put together and sent after it.
    """

    def __init__(self, client: CRIClient, at_once: int = MAX_CONCURRENT_UPDATES) -> None:
        self._client = client
        self._lane = asyncio.Semaphore(at_once)
        self._waiting: dict[str, _PendingUpdate] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}

    def merge_and_enqueue_update(
        self, update: ContainerUpdate, *, urgent: bool = False
    ) -> asyncio.Future[UpdateFailure | None]:
        """Send an update soon, together with what waits for this container already.

        Urgent ones start right now, and do not wait behind updates of others. The outcome is None
        when it was applied; whoever is cancelled while waiting for it takes it from no other.
        """
        container_id = update.container_id
        waiting = self._waiting.get(container_id)
        if waiting is not None:
            waiting.update = update.merge_onto(waiting.update)
        else:
            outcome = asyncio.get_running_loop().create_future()
            waiting = self._waiting[container_id] = _PendingUpdate(update, outcome)
        if container_id not in self._workers:
            work = (
                self._send_pending_updates(container_id)
                if urgent
                else self._send_within_limit(container_id)
            )
            self._workers[container_id] = asyncio.create_task(work, name="update")
        return asyncio.shield(waiting.outcome)

    async def close(self) -> None:
        """Give up what was not sent; a call under way is not waited for."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for container_id, waiting in self._waiting.items():
            waiting.outcome.set_result(_closed_failure(container_id))
        self._waiting.clear()

    async def _send_within_limit(self, container_id: str) -> None:
        async with self._lane:
            await self._send_pending_updates(container_id)

    async def _send_pending_updates(self, container_id: str) -> None:
        try:
            while (waiting := self._waiting.pop(container_id, None)) is not None:
                failed: UpdateFailure | None = _closed_failure(container_id)
                try:
                    failed = await self._client.update_container(waiting.update)
                except RuntimeUnavailable as error:
                    failed = UpdateFailure(
                        container_id=container_id, unknown=False, message=str(error)
                    )
                finally:
                    waiting.outcome.set_result(failed)
        finally:
            self._workers.pop(container_id, None)


def _closed_failure(container_id: str) -> UpdateFailure:
    return UpdateFailure(
        container_id=container_id, unknown=False, message="the connection was closed"
    )


# --- how large containers are by the runtime's word -----------------------------------------------
# CRI reports no change of a container's resources, as the kubelet makes for a resize in place. So
# running containers are looked at again, a few at a time, and compared with what was seen of them
# before; what we sent ourselves is not such a change.


class ContainerSize(NamedTuple):
    """CPU shares, quota and period, and bytes of memory; 0 where nothing is given."""

    cpu_shares: int = 0
    quota: int = 0
    period: int = 0
    limit: int = 0

    @classmethod
    def from_resources(cls, resources: Resources) -> ContainerSize:
        """The size in resources."""
        return cls(
            resources.cpu_shares or 0,
            resources.cpu_quota or 0,
            resources.cpu_period or 0,
            resources.memory_limit or 0,
        )


class DetectedResize(NamedTuple):
    """A change of a container: what was asked for, and its resources before that."""

    requested: Resources
    previous: Resources


@dataclass(slots=True)
class LiveContainer:
    """A live container.

    Attributes:
        state: as far as the handler has seen it.
        size: when it was last seen.
        sent: CFS quota that an update of ours set; of a size only the quota is ever ours.
        changes: how many changes of its size there were.
        last_update: its update, while it is being started: one that comes while the runtime starts
            it is recorded and not applied, so it is sent again when the container runs.
        updated: Unix time when the runtime took its update; None when it has not.
    """

    state: cri_pb2.ContainerState
    size: ContainerSize
    sent: int | None = None
    changes: int = 0
    last_update: ContainerUpdate | None = None
    updated: float | None = None

    def detect_change(self, resources: Resources) -> DetectedResize | None:
        """What was asked for since the container was last seen; None for nothing."""
        before, now = self.size, ContainerSize.from_resources(resources)
        self.size = now
        if before == now:
            return None
        shares = (
            now.cpu_shares if now.cpu_shares > 0 and now.cpu_shares != before.cpu_shares else None
        )
        limit = now.limit if now.limit > 0 and now.limit != before.limit else None
        quota = period = None
        # Only we lift a quota; one that is there again was asked for, were it the same.
        if now.quota > 0 and now.quota != (self.sent or before.quota):
            self.sent = None
            quota, period = now.quota, now.period
        requested = Resources(
            cpu_shares=shares, cpu_quota=quota, cpu_period=period, memory_limit=limit
        )
        if requested == EMPTY_RESOURCES:
            return None
        self.changes += 1
        was = replace(
            resources,
            cpu_shares=before.cpu_shares,
            cpu_quota=before.quota,
            cpu_period=before.period,
            memory_limit=before.limit,
        )
        return DetectedResize(requested, was)


# --- one connection -------------------------------------------------------------------------------


class LifecycleCallbacks(Protocol):
    """What happens to containers over CRI and not over NRI; called on the loop."""

    def on_started_despite_rejection(
        self, namespace: str, pod: str, uid: str, container: str, message: str, /
    ) -> None:
        """A container was refused, with this message, and starts nevertheless."""
        ...

    def on_start(self, container_id: str, started: float, updated: float | None, /) -> None:
        """A container is seen to run.

        ``started`` is when it did, ``updated`` when the runtime took its update (None when it has
        not), both as Unix time.
        """
        ...

    def on_start_update_applied(self, container_id: str, started: float, /) -> None:
        """The runtime has applied the update of a container that began so."""
        ...

    def on_rejected_resize_in_force(self, container_id: str, quota: int, /) -> None:
        """A resize was refused, and its CFS quota is in force nevertheless."""
        ...


class CRIConnection:
    """One connection: its containers, followed from creation to end, and what is under way."""

    def __init__(
        self,
        client: CRIClient,
        handler: RuntimeHandler,
        callbacks: LifecycleCallbacks,
        *,
        listing: float,
    ) -> None:
        self._client = client
        self._handler = handler
        self._callbacks = callbacks
        self._listing = listing
        self._open = False
        self._outbox = UpdateQueue(client)
        self._queries = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._live: dict[str, LiveContainer] = {}
        self._pods: dict[str, PodSandbox] = {}
        self._pod_of: dict[str, str] = {}
        # Containers to look at once more when the look under way is over.
        self._again: set[str] = set()
        self._querying: dict[str, asyncio.Task[None]] = {}
        self._round: list[str] = []
        self._careful: set[asyncio.Task[UpdateFailure | None]] = set()
        self._listens = False
        self._failure: RuntimeUnavailable | None = None
        self._listener: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    async def connect(self) -> tuple[int, int]:
        """Listen, read everything that runs, and have it compared with what is known.

        Returns how many pods and live containers there are.
        """
        # First: what happens from now on is reported, and what was before is listed.
        self._listener = asyncio.create_task(self._follow_event_stream(), name="cri events")
        pods, containers = await list_pods_and_containers(self._client)
        for container in containers:
            state = CREATED_STATE if container.starting else RUNNING_STATE
            self._live[container.id] = LiveContainer(
                state, ContainerSize.from_resources(container.resources)
            )
            self._pod_of[container.id] = container.pod_id
        self._pods = pods
        updates = self._call_handler(
            "Synchronize",
            lambda: self._handler.synchronize(_pod_table(pods, containers), containers),
        )
        self._send_updates(updates or ())
        return len(pods), len(containers)

    async def follow_runtime_until_failure(self) -> None:
        """Watch until the runtime cannot be reached any more.

        Raises:
            RuntimeUnavailable: it cannot.
        """
        # What events reported while everything was read.
        self._open = True
        for container_id in tuple(self._again):
            self._again.discard(container_id)
            self.request_query(container_id)
        while True:
            pause = LISTING_INTERVAL_WITH_EVENTS_S if self._listens else self._listing
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._soon.wait()
            if self._failure is not None:
                raise self._failure
            self._soon.clear()
            await self._query_unreported_changes()

    async def close(self) -> None:
        """End what is under way."""
        await asyncio.sleep(0)  # a task that never began would end who waits for it
        tasks: list[asyncio.Task[Any]] = [*self._querying.values(), *self._careful]
        tasks += [self._listener] if self._listener else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._outbox.close()

    def send_update(self, update: ContainerUpdate) -> asyncio.Future[UpdateFailure | None]:
        """Send an update; what becomes of it."""
        one = self._live.get(update.container_id)
        if not update.cpu_quota or one is None or one.state != RUNNING_STATE:
            return self._enqueue_update(update)
        # What gave back a quota that was lifted may be a resize: what the container has now is
        # looked at before it is written over.
        task = asyncio.create_task(self._send_after_query(one, update), name="careful")
        self._careful.add(task)
        task.add_done_callback(self._careful.discard)
        return task

    async def _send_after_query(
        self, one: LiveContainer, update: ContainerUpdate
    ) -> UpdateFailure | None:
        before = one.changes
        self.request_query(update.container_id)
        try:
            if (querying := self._querying.get(update.container_id)) is not None:
                await asyncio.wait([querying])
            if one.changes != before:
                return None  # decided anew, and what was decided is sent
            return await self._enqueue_update(update)
        except asyncio.CancelledError:  # the connection ends, and not who waits for this
            return _closed_failure(update.container_id)

    def _enqueue_update(
        self, update: ContainerUpdate, *, urgent: bool = False
    ) -> asyncio.Future[UpdateFailure | None]:
        one = self._live.get(update.container_id)
        if one is not None and one.state == CREATED_STATE:
            one.last_update = update.merge_onto(one.last_update) if one.last_update else update
        outcome = self._outbox.merge_and_enqueue_update(update, urgent=urgent)
        outcome.add_done_callback(partial(self._record_sent_quota, update))
        return outcome

    def _record_sent_quota(
        self, update: ContainerUpdate, outcome: asyncio.Future[UpdateFailure | None]
    ) -> None:
        taken = not outcome.cancelled() and outcome.result() is None
        if taken and update.cpu_quota and update.container_id in self._live:
            self._live[update.container_id].sent = update.cpu_quota

    # --- what happens -----------------------------------------------------------------------------

    async def _follow_event_stream(self) -> None:
        """Follow the event stream for ever; without one, listings do."""
        said = ""
        while True:
            why = "the stream ended"
            try:
                self._listens = True
                async for event in self._client.container_events():
                    whose = event.pod_sandbox_status.id
                    if event.container_id == whose or event.container_id in self._pods:
                        # The pod's own container: nothing to place, but did the pod come or go?
                        if event.container_event_type == cri_pb2.CONTAINER_DELETED_EVENT:
                            self._soon.set()
                    elif whose:
                        self._pod_of.setdefault(event.container_id, whose)
                    self.request_query(event.container_id)
            except RuntimeUnavailable as error:
                why = str(error)
            except Exception as error:
                why = repr(error)
                self._report_internal_error("GetContainerEvents", error)
            finally:
                self._listens = False
            if why != said:
                log.info("no container events: containers are listed instead", because=why)
                said = why
            self._soon.set()
            await asyncio.sleep(EVENT_STREAM_RETRY_S)

    async def _query_unreported_changes(self) -> None:
        """Find what no event reported."""
        known = set(self._pods)  # one that is met during the listing is not gone
        containers = {c.id: c for c in await self._client.list_all_containers()}
        pods = set(await self._client.pod_sandbox_ids())
        for container_id in self._pod_of.keys() - containers.keys():
            self.request_query(container_id)
        for container_id, found in containers.items():
            self._pod_of.setdefault(container_id, found.pod_sandbox_id)
            state = found.state if found.state in LIVE_STATES else None
            one = self._live.get(container_id)
            if state != (one.state if one is not None else None):
                self.request_query(container_id)
        # Sizes are looked at again, some each time, so that each has a turn.
        running = [i for i, one in self._live.items() if one.state == RUNNING_STATE]
        self._round = self._round or running
        for container_id in self._round[:SIZE_CHECKS_PER_LISTING]:
            if container_id in self._live:
                self.request_query(container_id)
        self._round = self._round[SIZE_CHECKS_PER_LISTING:]
        for pod_id in pods - self._pods.keys():
            self.request_query(pod_id)
        for pod_id in known - pods:
            pod = self._pods.pop(pod_id)
            self._call_handler("RemovePodSandbox", partial(self._handler.remove_pod, pod))

    def request_query(self, container_id: str) -> None:
        """Find out what a container is now, soon."""
        if not self._open or container_id in self._querying:
            self._again.add(container_id)
            return
        self._querying[container_id] = asyncio.create_task(
            self._query_container(container_id), name="query"
        )

    async def _query_container(self, container_id: str) -> None:
        try:
            async with self._queries:
                while True:
                    self._again.discard(container_id)
                    await self._query_and_apply_status(container_id)
                    if container_id not in self._again:
                        break
        except CallRefused as error:
            # As for a container that is being made or removed just now: a listing comes back to it.
            log.debug("container not looked at", id=container_id[:12], problem=str(error))
        except RuntimeUnavailable as error:
            self._failure = error
            self._soon.set()
        except Exception as error:
            self._report_internal_error("query", error)
        finally:
            self._querying.pop(container_id, None)

    async def _query_and_apply_status(self, container_id: str) -> None:
        if (
            container_id not in self._pod_of
            and await self._find_or_query_pod(container_id) is not None
        ):
            return  # it is a pod, ahead of its containers as over NRI
        answer = await self._client.container_status(container_id)
        if answer is None or answer.status.state not in LIVE_STATES:
            self._report_removed(container_id, known=answer is not None)
            return
        container, one = container_from(answer), self._live.get(container_id)
        if one is not None and one.state == RUNNING_STATE:
            self._decide_unreported_resize(one, container)
            return
        if one is not None and container.starting:
            return
        pod = await self._find_or_query_pod(container.pod_id or self._pod_of.get(container_id, ""))
        if pod is None:
            return  # removed with all of its containers, or not there yet: a listing finds it
        container = replace(container, pod_id=pod.id)
        pod = _with_inferred_qos(pod, container)
        if one is None:
            one = self._live[container_id] = LiveContainer(
                CREATED_STATE, ContainerSize.from_resources(container.resources)
            )
            await self._decide_unreported_container(one, pod, container)
        if not container.starting and container_id in self._live:
            await self._on_container_started(one, pod, container, answer.status.started_at / 1e9)

    def _decide_unreported_resize(self, one: LiveContainer, container: Container) -> None:
        """Have a resize decided about that is not reported."""
        pod = self._pods.get(self._pod_of.get(container.id, ""))
        if pod is None:
            return  # removed with all of its containers: a listing finds it
        change = one.detect_change(container.resources)
        if change is None:
            return
        container = replace(container, pod_id=pod.id, resources=change.previous)
        pod = _with_inferred_qos(pod, container)
        try:
            updates = self._call_handler(
                "UpdateContainer",
                lambda: self._handler.update_container(pod, container, change.requested),
                refusals=True,
            )
        except RequestRejected as refusal:
            log.warning(
                "refused resize is in force nevertheless",
                pod=pod.full_name,
                container=container.name,
                problem=refusal.message,
            )
            if change.requested.cpu_quota:
                self._callbacks.on_rejected_resize_in_force(
                    container.id, change.requested.cpu_quota
                )
            return
        for update in updates or ():
            self._enqueue_update(update).add_done_callback(
                lambda done: self._log_failed_update(done.result())
            )

    async def _on_container_started(
        self, one: LiveContainer, pod: PodSandbox, container: Container, started: float
    ) -> None:
        """A container runs: have its cgroup put right, and its update sent once more."""
        container_id = container.id
        self._call_handler("StartContainer", lambda: self._handler.start_container(pod, container))
        self._callbacks.on_start(container_id, started, one.updated)
        one.state = RUNNING_STATE
        if one.last_update is not None:
            self._log_failed_update(await self._enqueue_update(one.last_update, urgent=True))
        if container_id in self._live:
            self._call_handler(
                "PostStartContainer", lambda: self._handler.post_start_container(pod, container)
            )
            self._callbacks.on_start_update_applied(container_id, started)

    async def _find_or_query_pod(self, pod_id: str) -> PodSandbox | None:
        if pod_id not in self._pods:
            pod = await self._client.query_and_decode_pod(pod_id) if pod_id else None
            if pod is None:
                return None
            if pod_id not in self._pods:  # another container of it may have been quicker
                self._pods[pod_id] = pod
                self._call_handler("RunPodSandbox", lambda: self._handler.run_pod(pod))
        return self._pods[pod_id]

    async def _decide_unreported_container(
        self, one: LiveContainer, pod: PodSandbox, container: Container
    ) -> None:
        """Have a container decided about, and send what was decided."""
        try:
            answer = self._call_handler(
                "CreateContainer",
                lambda: self._handler.create_container(pod, container),
                refusals=True,
            )
        except RequestRejected as refusal:
            self._callbacks.on_started_despite_rejection(
                pod.namespace, pod.name, pod.uid, container.name, refusal.message
            )
            # It starts nevertheless: adopted as one that runs, where it disturbs no other.
            self._call_handler(
                "StartContainer", lambda: self._handler.start_container(pod, container)
            )
            return
        if answer is None:
            return
        adjustment, updates = answer
        update = ContainerUpdate(
            container.id, adjustment.cpus, adjustment.mems, cpu_quota=adjustment.quota
        )
        own = None
        if not update.is_empty:
            if container.starting:
                own = self._enqueue_update(update, urgent=True)
            else:
                one.last_update = update  # sent when its cgroup is right
        self._send_updates(updates)
        if own is not None:
            failed = await own
            if failed is None:
                one.updated = time.time()
            else:
                self._log_failed_update(failed)

    def _report_removed(self, container_id: str, *, known: bool) -> None:
        """A container ended, or is gone altogether."""
        if self._live.pop(container_id, None) is not None:
            updates = self._call_handler(
                "StopContainer", lambda: self._handler.stop_container(container_id)
            )
            self._send_updates(updates or ())
        if not known and self._pod_of.pop(container_id, ""):
            self._call_handler(
                "RemoveContainer", lambda: self._handler.remove_container(container_id)
            )

    # --- the handler, and what it answers ---------------------------------------------------------

    def _call_handler(
        self, name: str, handle: Callable[[], _T], *, refusals: bool = False
    ) -> _T | None:
        """Call the handler, whatever happens in it."""
        began = time.perf_counter()
        try:
            return handle()
        except RequestRejected:
            if refusals:
                raise
            return None
        except Exception as error:
            self._report_internal_error(name, error)
            return None
        finally:
            self._handler.on_request_answered(name, time.perf_counter() - began)

    def _report_internal_error(self, name: str, error: Exception) -> None:
        """One of ours; nothing can be refused because of it here."""
        with contextlib.suppress(RequestRejected):
            self._handler.on_internal_error(name, error)

    def _send_updates(self, updates: Sequence[ContainerUpdate]) -> None:
        for update in updates:
            self.send_update(update).add_done_callback(
                lambda done: self._log_failed_update(done.result())
            )

    def _log_failed_update(self, failed: UpdateFailure | None) -> None:
        """Say that an update failed; what the container really has is looked at anyway."""
        if failed is not None and not failed.unknown:
            log.info(
                "update not applied", id=failed.container_id[:12], problem=failed.message[:300]
            )


# --- the link -------------------------------------------------------------------------------------


class CRILink(RuntimeLink):
    """Follows one runtime; see `nri_numa.runtime.RuntimeLink`.

    ``listing`` is the time in seconds between two listings where no events come.
    """

    def __init__(
        self,
        handler: RuntimeHandler,
        callbacks: LifecycleCallbacks,
        *,
        socket_path: str,
        listing: float = 1.0,
        delays: Callable[[], Iterator[float]] = RECONNECT_DELAYS,
    ) -> None:
        super().__init__(handler, time.monotonic)
        self._socket_path = socket_path.removeprefix("unix://")
        self._listing = listing
        self._callbacks = callbacks
        self._delays = delays
        self._connection: CRIConnection | None = None

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        loop = asyncio.get_running_loop()
        delays = self._delays()
        try:
            while True:
                began = loop.time()
                detail = await self._follow_runtime_until_lost()
                if loop.time() - began >= STABLE_LINK_S:
                    delays = self._delays()
                self._set_link_state(LinkState.DISCONNECTED, detail)
                await asyncio.sleep(next(delays))
        finally:
            self._set_link_state(LinkState.STOPPED, "")

    async def push_updates(self, updates: Sequence[ContainerUpdate]) -> PushResult:
        """Send updates that answer no request."""
        if not updates:
            return PushResult()
        connection = self._connection
        if connection is None or self.state is not LinkState.ACTIVE:
            return PushResult(f"the link is {self.state.value}")
        failed = await asyncio.gather(*map(connection.send_update, updates))
        broken = [one.message for one in failed if one is not None and not one.unknown]
        return PushResult("; ".join(broken[:3]))

    async def ensure_containers_reported(self) -> str:
        """Nothing to do: listings show what runs."""
        return ""

    async def _follow_runtime_until_lost(self) -> str:
        """Serve one connection until it ends; why it did."""
        try:
            async with CRIClient(self._socket_path) as client:
                self.runtime = await client.query_version()
                self._set_link_state(LinkState.REGISTERING, self._socket_path)
                self._handler.on_runtime_configured(self.runtime)
                connection = CRIConnection(
                    client, self._handler, self._callbacks, listing=self._listing
                )
                try:
                    pods, containers = await connection.connect()
                    self._connection = connection
                    self._set_link_state(
                        LinkState.ACTIVE,
                        f"{count_text(pods, 'pod')} and {count_text(containers, 'container')} "
                        "when it "
                        "was made, over CRI",
                    )
                    await connection.follow_runtime_until_failure()
                finally:
                    self._connection = None
                    await connection.close()
        except RuntimeUnavailable as error:
            return str(error)
        return "the connection ended"
