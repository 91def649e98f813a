"""Link to a container runtime over CRI: connect, list, watch, update, reconnect.

CRI has no request before a container starts. So the agent decides when the runtime reports the
creation of a container, or when a listing shows it, and sends an update: before the start if that
is quick enough, after it otherwise. A rejection cannot stop a start.

Events are only triggers: they may be lost (containerd 1.7 delivers each to one of its listeners),
come twice, or not exist at all. The state of a container is queried from the runtime each time, and
listings find what no event reported. The query of one container does not block others. Decisions
are made without an await, as for NRI.
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
"""States of containers that use CPUs, or will."""
MAX_CONCURRENT_UPDATES: Final = 4
"""Updates of other containers at the same time; the runtime starts a process for each."""
SIZE_CHECKS_PER_LISTING: Final = 8
"""Containers whose size is queried again with each listing."""
MAX_CONCURRENT_QUERIES: Final = 8
"""Containers that are queried at the same time."""
LISTING_INTERVAL_WITH_EVENTS_S: Final = 5.0
"""Seconds between two listings while events arrive; a listing finds what no event reported."""
EVENT_STREAM_RETRY_S: Final = 5.0
"""Seconds from the end of the event stream to the next attempt to open it."""
RECONNECT_DELAYS: Final = partial(backoff_delays, random.random)
"""Creates the sequence of delays between attempts."""

_T = TypeVar("_T")


# --- listing of all pods and containers, and one round of updates ---------------------------------


async def list_pods_and_containers(
    client: CRIClient,
) -> tuple[dict[str, PodSandbox], list[Container]]:
    """List pods by id, and live containers; `RuntimeUnavailable` if the runtime does not answer."""
    entries = [c for c in await client.list_all_containers() if c.state in LIVE_STATES]
    pods = {
        pod_id: pod
        for pod_id in await client.pod_sandbox_ids()
        if (pod := await client.query_and_decode_pod(pod_id)) is not None
    }
    containers: list[Container] = []
    for entry in entries:
        answer = await client.container_status(entry.id)
        if answer is not None and answer.status.state in LIVE_STATES:
            containers.append(replace(container_from(answer), pod_id=entry.pod_sandbox_id))
    return pods, containers


def _pod_table(pods: dict[str, PodSandbox], containers: Iterable[Container]) -> PodTable:
    by_pod: dict[str, Container] = {}
    for container in containers:
        by_pod.setdefault(container.pod_id, container)
    return PodTable.from_pods(_with_inferred_qos(pod, by_pod.get(pod.id)) for pod in pods.values())


def _with_inferred_qos(pod: PodSandbox, container: Container | None) -> PodSandbox:
    """Return the pod, with the container's QoS class if the pod's cgroup does not show one."""
    if container is None or QoSClass.of_cgroup(pod.cgroup_parent) is not None:
        return pod
    return replace(pod, qos=inferred_qos(pod.resources, container))


async def plan_and_send_updates_once(plan: Planner, *, socket_path: str) -> str:
    """Send the updates that ``plan`` returns for all running containers.

    Returns the reason why the runtime could not be reached; empty if it was, even if single updates
    failed.
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
    """Queue of updates to the runtime over one connection, each a call of its own.

    CRI has no call for several containers, and the runtime starts a process for each call (runc,
    crun), so a call takes tens of milliseconds. Each container has at most one open call, so the
    newest values arrive last. Updates that come meanwhile are merged and sent after it.
    """

    def __init__(self, client: CRIClient, concurrency: int = MAX_CONCURRENT_UPDATES) -> None:
        self._client = client
        self._lane = asyncio.Semaphore(concurrency)
        self._pending: dict[str, _PendingUpdate] = {}
        self._workers: dict[str, asyncio.Task[None]] = {}

    def merge_and_enqueue_update(
        self, update: ContainerUpdate, *, urgent: bool = False
    ) -> asyncio.Future[UpdateFailure | None]:
        """Enqueue an update, merged with the pending update of the same container.

        An urgent update starts at once and does not wait for those of other containers. The outcome
        is None if it was applied. Cancelling one waiter does not cancel the outcome for others.
        """
        container_id = update.container_id
        pending = self._pending.get(container_id)
        if pending is not None:
            pending.update = update.merge_onto(pending.update)
        else:
            outcome = asyncio.get_running_loop().create_future()
            pending = self._pending[container_id] = _PendingUpdate(update, outcome)
        if container_id not in self._workers:
            work = self._send_pending_updates(container_id, urgent=urgent)
            self._workers[container_id] = asyncio.create_task(work, name="update")
        return asyncio.shield(pending.outcome)

    async def drop_pending_updates(self) -> None:
        """Drop pending updates, without waiting for open calls."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for container_id, pending in self._pending.items():
            pending.outcome.set_result(_closed_failure(container_id))
        self._pending.clear()

    async def _send_pending_updates(self, container_id: str, *, urgent: bool) -> None:
        try:
            async with contextlib.nullcontext() if urgent else self._lane:
                while (pending := self._pending.pop(container_id, None)) is not None:
                    failure: UpdateFailure | None = _closed_failure(container_id)
                    try:
                        failure = await self._client.update_container(pending.update)
                    except RuntimeUnavailable as error:
                        failure = UpdateFailure(container_id, str(error))
                    finally:
                        pending.outcome.set_result(failure)
        finally:
            self._workers.pop(container_id, None)


def _closed_failure(container_id: str) -> UpdateFailure:
    return UpdateFailure(container_id, "the connection was closed")


# --- sizes of containers, as the runtime reports them ---------------------------------------------
# CRI does not report changed resources, such as those of the kubelet's in-place resize. So running
# containers are queried again, a few at a time, and compared with the previous query. The agent's
# own updates are not such a change.


class ContainerSize(NamedTuple):
    """CPU shares, quota and period, and bytes of memory; 0 if not set."""

    cpu_shares: int = 0
    quota: int = 0
    period: int = 0
    limit: int = 0

    @classmethod
    def from_resources(cls, resources: Resources) -> ContainerSize:
        """Take the size out of resources."""
        return cls(
            resources.cpu_shares or 0,
            resources.cpu_quota or 0,
            resources.cpu_period or 0,
            resources.memory_limit or 0,
        )


class DetectedResize(NamedTuple):
    """Change of a container: the requested resources, and those before."""

    requested: Resources
    previous: Resources


@dataclass(slots=True)
class LiveContainer:
    """Created or running container.

    Attributes:
        state: the last state that the handler was told.
        size: as of the last query.
        sent_quota: CFS quota that the agent's update set; the agent sets no other part of a size.
        change_count: number of changes of its size.
        last_update: the update of a starting container. The runtime records an update during the
            start without applying it, so it is sent again when the container runs.
        updated_at: Unix time when the runtime accepted its update; None if it has not.
    """

    state: cri_pb2.ContainerState
    size: ContainerSize
    sent_quota: int | None = None
    change_count: int = 0
    last_update: ContainerUpdate | None = None
    updated_at: float | None = None

    def detect_change(self, resources: Resources) -> DetectedResize | None:
        """Detect what was requested since the last query; None if nothing was."""
        prior, size = self.size, ContainerSize.from_resources(resources)
        self.size = size
        if prior == size:
            return None
        cpu_shares = (
            size.cpu_shares if size.cpu_shares > 0 and size.cpu_shares != prior.cpu_shares else None
        )
        limit = size.limit if size.limit > 0 and size.limit != prior.limit else None
        quota = period = None
        # Only the agent removes a quota; one that reappears was requested, even if it is the same.
        if size.quota > 0 and size.quota != (self.sent_quota or prior.quota):
            self.sent_quota = None
            quota, period = size.quota, size.period
        requested = Resources(
            cpu_shares=cpu_shares, cpu_quota=quota, cpu_period=period, memory_limit=limit
        )
        if requested == EMPTY_RESOURCES:
            return None
        self.change_count += 1
        previous = replace(
            resources,
            cpu_shares=prior.cpu_shares,
            cpu_quota=prior.quota,
            cpu_period=prior.period,
            memory_limit=prior.limit,
        )
        return DetectedResize(requested, previous)


# --- one connection -------------------------------------------------------------------------------


class LifecycleCallbacks(Protocol):
    """Callbacks for what happens to containers over CRI only; called on the event loop."""

    def on_started_despite_rejection(
        self, namespace: str, pod: str, uid: str, container: str, message: str, /
    ) -> None:
        """Handle the start of a container that was rejected with this message."""

    def on_start(self, container_id: str, start_time: float, updated_at: float | None, /) -> None:
        """Handle the start of a container.

        ``start_time`` is the time of the start, ``updated_at`` the time when the runtime accepted
        its update (None if it has not), both as Unix time.
        """

    def on_start_update_applied(self, container_id: str, start_time: float, /) -> None:
        """Handle the applied update of a container that started at ``start_time``."""

    def on_rejected_resize_in_force(self, container_id: str, quota: int, /) -> None:
        """Handle a rejected resize whose CFS quota is in force nevertheless."""


class CRIConnection:
    """One connection: its containers from creation to removal, its queries and its updates."""

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
        self._is_synchronized = False
        self._outbox = UpdateQueue(client)
        self._queries = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)
        self._live: dict[str, LiveContainer] = {}
        self._pods: dict[str, PodSandbox] = {}
        self._pod_of: dict[str, str] = {}
        # Containers to query once more after the current query.
        self._requery_ids: set[str] = set()
        self._querying: dict[str, asyncio.Task[None]] = {}
        self._size_check_ids: list[str] = []
        self._checked_sends: set[asyncio.Task[UpdateFailure | None]] = set()
        self._has_event_stream = False
        self._failure: RuntimeUnavailable | None = None
        self._listener: asyncio.Task[None] | None = None
        self._listing_due = asyncio.Event()

    async def list_and_synchronize(self) -> tuple[int, int]:
        """Follow events, list what runs, and synchronize the handler.

        Returns the number of pods and of live containers.
        """
        # The event stream comes first, so that nothing is lost between it and the listing.
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
        """Follow events and listings until the runtime is unreachable: `RuntimeUnavailable`."""
        # Containers that events reported during the listing.
        self._is_synchronized = True
        for container_id in tuple(self._requery_ids):
            self._requery_ids.discard(container_id)
            self.request_query(container_id)
        while True:
            pause = LISTING_INTERVAL_WITH_EVENTS_S if self._has_event_stream else self._listing
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._listing_due.wait()
            if self._failure is not None:
                raise self._failure
            self._listing_due.clear()
            await self._query_unreported_changes()

    async def cancel_tasks(self) -> None:
        """Cancel all queries and updates."""
        await asyncio.sleep(0)  # cancelling a task that never ran would cancel its waiter
        tasks: list[asyncio.Task[Any]] = [*self._querying.values(), *self._checked_sends]
        tasks += [self._listener] if self._listener else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._outbox.drop_pending_updates()

    def send_update(self, update: ContainerUpdate) -> asyncio.Future[UpdateFailure | None]:
        """Send an update and return its outcome."""
        live = self._live.get(update.container_id)
        if not update.cpu_quota or live is None or live.state != RUNNING_STATE:
            return self._enqueue_update(update)
        # A quota that reappeared may be a resize: query the container before overwriting it.
        task = asyncio.create_task(self._send_after_query(live, update), name="careful")
        self._checked_sends.add(task)
        task.add_done_callback(self._checked_sends.discard)
        return task

    async def _send_after_query(
        self, live: LiveContainer, update: ContainerUpdate
    ) -> UpdateFailure | None:
        change_count = live.change_count
        self.request_query(update.container_id)
        try:
            if (querying := self._querying.get(update.container_id)) is not None:
                await asyncio.wait([querying])
            if live.change_count != change_count:
                return None  # a new decision was made and sent
            return await self._enqueue_update(update)
        except asyncio.CancelledError:  # the connection ends; the waiter goes on
            return _closed_failure(update.container_id)

    def _enqueue_update(
        self, update: ContainerUpdate, *, urgent: bool = False
    ) -> asyncio.Future[UpdateFailure | None]:
        live = self._live.get(update.container_id)
        if live is not None and live.state == CREATED_STATE:
            live.last_update = update.merge_onto(live.last_update) if live.last_update else update
        outcome = self._outbox.merge_and_enqueue_update(update, urgent=urgent)
        outcome.add_done_callback(partial(self._record_sent_quota, update))
        return outcome

    def _record_sent_quota(
        self, update: ContainerUpdate, outcome: asyncio.Future[UpdateFailure | None]
    ) -> None:
        is_applied = not outcome.cancelled() and outcome.result() is None
        if is_applied and update.cpu_quota and update.container_id in self._live:
            self._live[update.container_id].sent_quota = update.cpu_quota

    # --- events and listings ----------------------------------------------------------------------

    async def _follow_event_stream(self) -> None:
        """Follow the event stream and reopen it when it ends; listings replace it meanwhile."""
        reported_problem = ""
        while True:
            problem = "the stream ended"
            try:
                self._has_event_stream = True
                async for event in self._client.container_events():
                    pod_id = event.pod_sandbox_status.id
                    if event.container_id == pod_id or event.container_id in self._pods:
                        # The pod's own container: nothing to place, but the pod may be new or gone.
                        if event.container_event_type == cri_pb2.CONTAINER_DELETED_EVENT:
                            self._listing_due.set()
                    elif pod_id:
                        self._pod_of.setdefault(event.container_id, pod_id)
                    self.request_query(event.container_id)
            except RuntimeUnavailable as error:
                problem = str(error)
            except Exception as error:
                problem = repr(error)
                self._report_internal_error("GetContainerEvents", error)
            finally:
                self._has_event_stream = False
            if problem != reported_problem:
                log.info("container events unavailable", problem=problem)
                reported_problem = problem
            self._listing_due.set()
            await asyncio.sleep(EVENT_STREAM_RETRY_S)

    async def _query_unreported_changes(self) -> None:
        """Query the pods and containers whose changes no event reported."""
        prior_pod_ids = set(self._pods)  # one that is met during the listing is not gone
        containers = {c.id: c for c in await self._client.list_all_containers()}
        pod_ids = set(await self._client.pod_sandbox_ids())
        for container_id in self._pod_of.keys() - containers.keys():
            self.request_query(container_id)
        for container_id, entry in containers.items():
            self._pod_of.setdefault(container_id, entry.pod_sandbox_id)
            state = entry.state if entry.state in LIVE_STATES else None
            live = self._live.get(container_id)
            if state != (live.state if live is not None else None):
                self.request_query(container_id)
        # Sizes are queried in turn, some with each listing.
        running = [i for i, live in self._live.items() if live.state == RUNNING_STATE]
        self._size_check_ids = self._size_check_ids or running
        for container_id in self._size_check_ids[:SIZE_CHECKS_PER_LISTING]:
            if container_id in self._live:
                self.request_query(container_id)
        self._size_check_ids = self._size_check_ids[SIZE_CHECKS_PER_LISTING:]
        for pod_id in pod_ids - self._pods.keys():
            self.request_query(pod_id)
        for pod_id in prior_pod_ids - pod_ids:
            pod = self._pods.pop(pod_id)
            self._call_handler("RemovePodSandbox", partial(self._handler.remove_pod, pod))

    def request_query(self, container_id: str) -> None:
        """Start a query of a container, or another one after the current query."""
        if not self._is_synchronized or container_id in self._querying:
            self._requery_ids.add(container_id)
            return
        self._querying[container_id] = asyncio.create_task(
            self._query_container(container_id), name="query"
        )

    async def _query_container(self, container_id: str) -> None:
        try:
            async with self._queries:
                while True:
                    self._requery_ids.discard(container_id)
                    await self._query_and_apply_status(container_id)
                    if container_id not in self._requery_ids:
                        break
        except CallRefused as error:
            # As for a container during its creation or removal: a later listing queries it again.
            log.debug("container not queried", id=container_id[:12], problem=str(error))
        except RuntimeUnavailable as error:
            self._failure = error
            self._listing_due.set()
        except Exception as error:
            self._report_internal_error("query", error)
        finally:
            self._querying.pop(container_id, None)

    async def _query_and_apply_status(self, container_id: str) -> None:
        if container_id not in self._pod_of and await self._find_or_query_pod(container_id):
            return  # a pod, reported before its containers as over NRI
        answer = await self._client.container_status(container_id)
        if answer is None or answer.status.state not in LIVE_STATES:
            self._report_removed(container_id, has_status=answer is not None)
            return
        container, live = container_from(answer), self._live.get(container_id)
        if live is not None and live.state == RUNNING_STATE:
            self._decide_unreported_resize(live, container)
            return
        if live is not None and container.starting:
            return
        pod = await self._find_or_query_pod(container.pod_id or self._pod_of.get(container_id, ""))
        if pod is None:
            return  # removed with its containers, or not listed yet: a listing finds it
        container = replace(container, pod_id=pod.id)
        pod = _with_inferred_qos(pod, container)
        if live is None:
            live = self._live[container_id] = LiveContainer(
                CREATED_STATE, ContainerSize.from_resources(container.resources)
            )
            await self._decide_unreported_container(live, pod, container)
        if not container.starting and container_id in self._live:
            await self._on_container_started(live, pod, container, answer.status.started_at / 1e9)

    def _decide_unreported_resize(self, live: LiveContainer, container: Container) -> None:
        """Let the handler decide on a resize that the runtime did not report."""
        pod = self._pods.get(self._pod_of.get(container.id, ""))
        if pod is None:
            return  # removed with its containers: a listing finds it
        change = live.detect_change(container.resources)
        if change is None:
            return
        container = replace(container, pod_id=pod.id, resources=change.previous)
        pod = _with_inferred_qos(pod, container)
        try:
            updates = self._call_handler(
                "UpdateContainer",
                lambda: self._handler.update_container(pod, container, change.requested),
                rejections=True,
            )
        except RequestRejected as rejection:
            log.warning(
                "rejected resize applied by runtime",
                pod=pod.full_name,
                container=container.name,
                problem=rejection.message,
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
        self, live: LiveContainer, pod: PodSandbox, container: Container, start_time: float
    ) -> None:
        """Handle the start of a container: correct its cgroup and send its update once more."""
        container_id = container.id
        self._call_handler("StartContainer", lambda: self._handler.start_container(pod, container))
        self._callbacks.on_start(container_id, start_time, live.updated_at)
        live.state = RUNNING_STATE
        if live.last_update is not None:
            self._log_failed_update(await self._enqueue_update(live.last_update, urgent=True))
        if container_id in self._live:
            self._call_handler(
                "PostStartContainer", lambda: self._handler.post_start_container(pod, container)
            )
            self._callbacks.on_start_update_applied(container_id, start_time)

    async def _find_or_query_pod(self, pod_id: str) -> PodSandbox | None:
        if pod_id not in self._pods:
            pod = await self._client.query_and_decode_pod(pod_id) if pod_id else None
            if pod is None:
                return None
            if pod_id not in self._pods:  # another container of the pod may have been faster
                self._pods[pod_id] = pod
                self._call_handler("RunPodSandbox", lambda: self._handler.run_pod(pod))
        return self._pods[pod_id]

    async def _decide_unreported_container(
        self, live: LiveContainer, pod: PodSandbox, container: Container
    ) -> None:
        """Let the handler decide on a new container, and send the decision."""
        try:
            answer = self._call_handler(
                "CreateContainer",
                lambda: self._handler.create_container(pod, container),
                rejections=True,
            )
        except RequestRejected as rejection:
            self._callbacks.on_started_despite_rejection(
                pod.namespace, pod.name, pod.uid, container.name, rejection.message
            )
            # It starts nevertheless: admit it as a running one, where it disturbs no other.
            self._call_handler(
                "StartContainer", lambda: self._handler.start_container(pod, container)
            )
            return
        if answer is None:
            return
        adjustment, updates = answer
        period = None if adjustment.quota is None else container.resources.cpu_period
        update = ContainerUpdate(
            container.id, adjustment.cpus, adjustment.mems, adjustment.quota, period
        )
        outcome = None
        if not update.is_empty:
            if container.starting:
                outcome = self._enqueue_update(update, urgent=True)
            else:
                live.last_update = update  # sent after its cgroup is correct
        self._send_updates(updates)
        if outcome is not None:
            failure = await outcome
            if failure is None:
                live.updated_at = time.time()
            else:
                self._log_failed_update(failure)

    def _report_removed(self, container_id: str, *, has_status: bool) -> None:
        """Report a container that ended or was removed; ``has_status`` if it only ended."""
        if self._live.pop(container_id, None) is not None:
            updates = self._call_handler(
                "StopContainer", lambda: self._handler.stop_container(container_id)
            )
            self._send_updates(updates or ())
        if not has_status and self._pod_of.pop(container_id, ""):
            self._call_handler(
                "RemoveContainer", lambda: self._handler.remove_container(container_id)
            )

    # --- the handler and its answers --------------------------------------------------------------

    def _call_handler(
        self, name: str, handle: Callable[[], _T], *, rejections: bool = False
    ) -> _T | None:
        """Call the handler; return None if it fails, or rejects without ``rejections``."""
        start_time = time.perf_counter()
        try:
            return handle()
        except RequestRejected:
            if rejections:
                raise
            return None
        except Exception as error:
            self._report_internal_error(name, error)
            return None
        finally:
            self._handler.on_request_answered(name, time.perf_counter() - start_time)

    def _report_internal_error(self, name: str, error: Exception) -> None:
        """Report an internal error; over CRI it cannot reject anything."""
        with contextlib.suppress(RequestRejected):
            self._handler.on_internal_error(name, error)

    def _send_updates(self, updates: Sequence[ContainerUpdate]) -> None:
        for update in updates:
            self.send_update(update).add_done_callback(
                lambda done: self._log_failed_update(done.result())
            )

    def _log_failed_update(self, failure: UpdateFailure | None) -> None:
        """Log a failed update; the container's actual cpuset is read in any case."""
        if failure is not None and not failure.unknown:
            log.info(
                "update not applied", id=failure.container_id[:12], problem=failure.message[:300]
            )


# --- the link -------------------------------------------------------------------------------------


class CRILink(RuntimeLink):
    """Link to one runtime over CRI; see `nri_numa.runtime.RuntimeLink`.

    ``listing`` is the number of seconds between two listings without an event stream.
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
        """Keep the link connected until cancelled."""
        loop = asyncio.get_running_loop()
        delays = self._delays()
        try:
            while True:
                start_time = loop.time()
                detail = await self._follow_runtime_until_lost()
                if loop.time() - start_time >= STABLE_LINK_S:
                    delays = self._delays()
                self._set_link_state(LinkState.DISCONNECTED, detail)
                await asyncio.sleep(next(delays))
        finally:
            self._set_link_state(LinkState.STOPPED, "")

    async def push_updates(self, updates: Sequence[ContainerUpdate]) -> str:
        """Send updates that answer no request."""
        if not updates:
            return ""
        connection = self._connection
        if connection is None or self.state is not LinkState.ACTIVE:
            return f"the link is {self.state.value}"
        failures = await asyncio.gather(*map(connection.send_update, updates))
        messages = [f.message for f in failures if f is not None and not f.unknown]
        return "; ".join(messages[:3])

    async def ensure_containers_reported(self) -> str:
        """Do nothing: listings show all running containers."""
        return ""

    async def _follow_runtime_until_lost(self) -> str:
        """Serve one connection until it ends, and return the reason."""
        try:
            async with CRIClient(self._socket_path) as client:
                self.runtime = await client.query_version()
                self._set_link_state(LinkState.REGISTERING, self._socket_path)
                self._handler.on_runtime_configured(self.runtime)
                connection = CRIConnection(
                    client, self._handler, self._callbacks, listing=self._listing
                )
                try:
                    pods, containers = await connection.list_and_synchronize()
                    self._connection = connection
                    counts = f"{count_text(pods, 'pod')} and {count_text(containers, 'container')}"
                    detail = f"{counts} when it was made, over CRI"
                    self._set_link_state(LinkState.ACTIVE, detail)
                    await connection.follow_runtime_until_failure()
                finally:
                    self._connection = None
                    await connection.cancel_tasks()
        except RuntimeUnavailable as error:
            return str(error)
        return "the connection ended"
