"""One connection to a runtime over CRI: its containers, followed from creation to end.

Events only say where to look: they may be lost (containerd 1.7 gives each to one of its listeners),
come twice, or not exist at all. What a container is now is asked of the runtime each time, and
listings find what no event told of. A look at one container waits for the runtime while others go
on; decisions are made in one go between two waits, as for NRI.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from nri_numa.cri.client import (
    CallRefused,
    ContainerEventType,
    CRIClient,
    CRIContainerState,
    CRIContainerStatus,
    CRIResources,
    UpdateFailed,
)
from nri_numa.cri_link.messages import container_message, cri_resources, pod_message
from nri_numa.cri_link.outbox import Outbox, over
from nri_numa.errors import RuntimeUnavailable
from nri_numa.nri.handler import PluginHandler, RequestRefused
from nri_numa.nri.registration import Answer
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.observe.logs import get_logger

# --- The whole picture of a runtime over CRI; and updates made from it, once ----------------------


LIVE: Final = frozenset((CRIContainerState.CREATED, CRIContainerState.RUNNING))
"""States of containers that have, or will have, CPUs."""


async def picture(client: CRIClient) -> tuple[dict[str, pb.PodSandbox], list[pb.Container]]:
    """Ask for everything that lives.

    Returns:
        Pods by id, and containers that were created or run, as NRI would tell them.

    Raises:
        RuntimeUnavailable: the runtime cannot be asked.
    """
    listed = [c for c in await client.list_containers() if c.state in LIVE]
    pods: dict[str, pb.PodSandbox] = {}
    for pod in await client.list_pod_sandboxes():
        if (known := await client.pod_sandbox_status(pod.id)) is not None:
            pods[pod.id] = pod_message(known)
    containers: list[pb.Container] = []
    for found in listed:
        status = await client.container_status(found.id)
        if status is not None and status.state in LIVE:
            containers.append(container_message(status, found.pod_sandbox_id))
    return pods, containers


async def update_once(answer: Answer, *, socket_path: str) -> str:
    """Show what runs to a function, and send the updates that it answers.

    Args:
        answer: gives the updates, at most one for each container.
        socket_path: where the runtime serves CRI.

    Returns:
        Why the runtime could not be asked; empty when it was, whatever became of single updates.
    """
    try:
        async with CRIClient(socket_path) as client:
            pods, containers = await picture(client)
            outbox = Outbox(client)
            updates = answer(list(pods.values()), containers)
            await asyncio.gather(*(outbox.put(u.container_id, cri_resources(u)) for u in updates))
            return ""
    except RuntimeUnavailable as error:
        return str(error)


# --- How large containers are by the runtime's word, and what of a change somebody else asked for
# CRI tells nobody that a container's resources were changed, as the kubelet does for a resize in
# place. So running containers are looked at again, a few at a time, and compared with what was seen
# of them before; what we sent ourselves is no change that anybody asked for.


AT_ONCE: Final = 8
"""Containers that are looked at again with each listing."""


class Size(NamedTuple):
    """CPU shares, quota and period, and bytes of memory; 0 where nothing is told."""

    shares: int = 0
    quota: int = 0
    period: int = 0
    limit: int = 0


class Change(NamedTuple):
    """A change of a container: what somebody asked for, and its resources before that."""

    asked: pb.LinuxResources
    before: pb.LinuxResources


def size_of(resources: pb.LinuxResources) -> Size:
    """The size in a message."""
    cpu = resources.cpu
    return Size(cpu.shares.value, cpu.quota.value, cpu.period.value, resources.memory.limit.value)


class Sizes:
    """What was seen of the containers that live."""

    def __init__(self) -> None:
        self._seen: dict[str, Size] = {}
        self._sent: dict[str, int] = {}
        self._changes: dict[str, int] = {}
        self._round: list[str] = []

    def seen(self, container_id: str, resources: pb.LinuxResources) -> None:
        """A container was decided about as it was."""
        self._seen[container_id] = size_of(resources)

    def sent(self, container_id: str, resources: CRIResources) -> None:
        """An update of ours was applied; of a size only the quota is ever ours."""
        if resources.cpu_quota:
            self._sent[container_id] = resources.cpu_quota

    def forget(self, container_id: str) -> None:
        """A container is gone."""
        self._seen.pop(container_id, None)
        self._sent.pop(container_id, None)
        self._changes.pop(container_id, None)

    def changes(self, container_id: str) -> int:
        """How many changes of a container there were."""
        return self._changes.get(container_id, 0)

    def turn(self, whom: Iterable[str]) -> list[str]:
        """At most `AT_ONCE` of these to look at again now, so that everybody has a turn."""
        there = list(whom)
        if not self._round:
            self._round = there
        now, self._round = self._round[:AT_ONCE], self._round[AT_ONCE:]
        known = set(there)
        return [container_id for container_id in now if container_id in known]

    def changed(self, container_id: str, resources: pb.LinuxResources) -> Change | None:
        """What somebody asked for since the container was last seen; None for nothing.

        Args:
            container_id: whose.
            resources: as the runtime has them now.
        """
        now = size_of(resources)
        before = self._seen.get(container_id)
        self._seen[container_id] = now
        if before is None or before == now:
            return None
        asked = pb.LinuxResources()
        if now.shares > 0 and now.shares != before.shares:
            asked.cpu.shares.value = now.shares
        # Nobody but us lifts a quota; one that is there again was asked for, were it the same.
        if now.quota > 0 and now.quota != self._sent.get(container_id, before.quota):
            self._sent.pop(container_id, None)
            asked.cpu.quota.value = now.quota
            asked.cpu.period.value = now.period
        if now.limit > 0 and now.limit != before.limit:
            asked.memory.limit.value = now.limit
        if not asked.ByteSize():
            return None
        self._changes[container_id] = self.changes(container_id) + 1
        was = pb.LinuxResources()
        was.CopyFrom(resources)
        was.cpu.shares.value, was.cpu.quota.value, was.cpu.period.value = before[:3]
        was.memory.limit.value = before.limit
        return Change(asked, was)


log = get_logger("cri")

LOOKS_AT_ONCE: Final = 8
"""Containers that are looked at at the same time."""
LISTING_WITH_EVENTS: Final = 5.0
"""Seconds between two listings while events come; each finds what events did not tell."""
LISTEN_AGAIN: Final = 5.0
"""Seconds before the event stream is asked for again after it ended."""

_T = TypeVar("_T")


class _Phase(enum.Enum):
    MET = "met"
    RUNNING = "running"


_PHASES: Final = {
    CRIContainerState.CREATED: _Phase.MET,
    CRIContainerState.RUNNING: _Phase.RUNNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ears:
    """Who is told what NRI has no request for; all of it at once, on the loop.

    Attributes:
        refused: of a container that was refused and starts nevertheless: namespace, name and UID
            of its pod, its name, and why.
        begun: of a container that is seen to run: its id, when it started, and when the runtime
            took its update (Unix times; None when it has not).
        started: of it again, with its start, when the runtime has applied its update.
        resize_refused: the id of a container, and the CFS quota that is in force nevertheless.
        gone: the id of a container that ended.
    """

    refused: Callable[[str, str, str, str, str], object] = lambda *_: None
    begun: Callable[[str, float, float | None], object] = lambda *_: None
    started: Callable[[str, float], object] = lambda *_: None
    resize_refused: Callable[[str, int], object] = lambda *_: None
    gone: Callable[[str], object] = lambda _: None


class Connection:
    """What was seen of one runtime, and what is under way.

    Args:
        client: calls it; its owner closes it.
        handler: is told.
        ears: are told what no handler of NRI is.
        listing: seconds between two listings where no events come.
        now: Unix time.
    """

    def __init__(
        self,
        client: CRIClient,
        handler: PluginHandler,
        ears: Ears,
        *,
        listing: float = 1.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client = client
        self._handler = handler
        self._ears = ears
        self._listing = listing
        self._now = now
        self._open = False
        self._outbox = Outbox(client)
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._phases: dict[str, _Phase] = {}
        self._ended: set[str] = set()
        self._pods: dict[str, pb.PodSandbox] = {}
        self._pod_of: dict[str, str] = {}
        self._told_at: dict[str, float] = {}
        # What containers that are being started were told: an update that comes while the runtime
        # starts one is taken down and applied to nobody, so it is sent again when it runs.
        self._own: dict[str, CRIResources] = {}
        # Containers to look at once more when the look under way is over.
        self._again: set[str] = set()
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._sizes = Sizes()
        self._careful: set[asyncio.Task[UpdateFailed | None]] = set()
        self._listens = False
        self._failure: RuntimeUnavailable | None = None
        self._listener: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    async def begin(self) -> tuple[int, int]:
        """Listen, take the whole picture, and let the handler compare notes.

        Returns:
            How many pods and live containers there are.
        """
        # First: what happens from now on is told, and what was before is listed.
        self._listener = asyncio.create_task(self._listen(), name="cri events")
        pods, containers = await picture(self._client)
        for container in containers:
            running = container.state == pb.CONTAINER_RUNNING
            self._phases[container.id] = _Phase.RUNNING if running else _Phase.MET
            self._pod_of[container.id] = container.pod_sandbox_id
            self._sizes.seen(container.id, container.linux.resources)
        self._pods = pods
        updates = self._call(
            "Synchronize", lambda: self._handler.synchronize(list(pods.values()), containers)
        )
        self._send_all(updates or ())
        return len(pods), len(containers)

    async def go_on(self) -> None:
        """Watch until the runtime cannot be reached any more.

        Raises:
            RuntimeUnavailable: it cannot.
        """
        # What events told while the whole picture was taken.
        self._open = True
        for container_id in tuple(self._again):
            self._again.discard(container_id)
            self.look_at(container_id)
        while True:
            pause = LISTING_WITH_EVENTS if self._listens else self._listing
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._soon.wait()
            if self._failure is not None:
                raise self._failure
            self._soon.clear()
            await self._list()

    async def close(self) -> None:
        """End what is under way."""
        tasks: list[asyncio.Task[Any]] = [*self._looking.values(), *self._careful]
        tasks += [self._listener] if self._listener else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._outbox.close()

    def send(
        self, updates: Sequence[pb.ContainerUpdate]
    ) -> list[asyncio.Future[UpdateFailed | None]]:
        """Send updates; what becomes of each."""
        return [self._send(one.container_id, cri_resources(one)) for one in updates]

    def _send(
        self, container_id: str, resources: CRIResources
    ) -> asyncio.Future[UpdateFailed | None]:
        if not resources.cpu_quota or self._phases.get(container_id) is not _Phase.RUNNING:
            return self._put(container_id, resources)
        # Whoever gave back a quota that was lifted may have resized the container: what it has now
        # is looked at before it is written over.
        task = asyncio.create_task(self._send_after_look(container_id, resources), name="careful")
        self._careful.add(task)
        task.add_done_callback(self._careful.discard)
        return task

    async def _send_after_look(
        self, container_id: str, resources: CRIResources
    ) -> UpdateFailed | None:
        before = self._sizes.changes(container_id)
        self.look_at(container_id)
        if (looking := self._looking.get(container_id)) is not None:
            await asyncio.wait([looking])
        if self._sizes.changes(container_id) != before:
            return None  # decided anew, and what was decided is sent
        return await self._put(container_id, resources)

    def _put(
        self, container_id: str, resources: CRIResources, *, urgent: bool = False
    ) -> asyncio.Future[UpdateFailed | None]:
        if self._phases.get(container_id) is _Phase.MET:
            earlier = self._own.get(container_id)
            self._own[container_id] = over(earlier, resources) if earlier else resources
        outcome = self._outbox.put(container_id, resources, urgent=urgent)
        outcome.add_done_callback(partial(self._arrived, container_id, resources))
        return outcome

    def _arrived(
        self,
        container_id: str,
        resources: CRIResources,
        outcome: asyncio.Future[UpdateFailed | None],
    ) -> None:
        if not outcome.cancelled() and outcome.result() is None and container_id in self._phases:
            self._sizes.sent(container_id, resources)

    # --- what happens -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Follow the event stream for ever; without one, listings do."""
        said = ""
        while True:
            why = "the stream ended"
            try:
                self._listens = True
                async for event in self._client.container_events():
                    whose = event.pod_sandbox_id
                    if event.container_id == whose or event.container_id in self._pods:
                        # The pod's own container: nothing to place, but did the pod go away?
                        if event.type is ContainerEventType.DELETED:
                            self._soon.set()
                        continue
                    if whose:
                        self._pod_of.setdefault(event.container_id, whose)
                    self.look_at(event.container_id)
            except RuntimeUnavailable as error:
                why = str(error)
            except Exception as error:
                why = repr(error)
                self._mistake("GetContainerEvents", error)
            finally:
                self._listens = False
            if why != said:
                log.info("no container events: containers are listed instead", because=why)
                said = why
            self._soon.set()
            await asyncio.sleep(LISTEN_AGAIN)

    async def _list(self) -> None:
        """Find what no event told of."""
        containers = {c.id: c for c in await self._client.list_containers()}
        pods = {pod.id for pod in await self._client.list_pod_sandboxes()}
        for container_id in self._phases.keys() - containers.keys():
            self.look_at(container_id)
        for container_id, found in containers.items():
            self._pod_of.setdefault(container_id, found.pod_sandbox_id)
            phase = self._phases.get(container_id)
            if _PHASES.get(found.state) is not phase:
                self.look_at(container_id)
        running = (i for i, phase in self._phases.items() if phase is _Phase.RUNNING)
        for container_id in self._sizes.turn(running):
            self.look_at(container_id)
        self._ended &= containers.keys()
        for pod_id in self._pods.keys() - pods:
            pod = self._pods.pop(pod_id)
            self._call("RemovePodSandbox", partial(self._handler.remove_pod, pod))

    def look_at(self, container_id: str) -> None:
        """Find out what a container is now, soon."""
        if not self._open or container_id in self._looking:
            self._again.add(container_id)
            return
        self._looking[container_id] = asyncio.create_task(self._look(container_id), name="look")

    async def _look(self, container_id: str) -> None:
        try:
            async with self._looks:
                while True:
                    self._again.discard(container_id)
                    await self._look_once(container_id)
                    if container_id not in self._again:
                        break
        except CallRefused as error:
            # As for a container that is being made or removed just now: a listing comes back to it.
            log.debug("container not looked at", id=container_id[:12], problem=str(error))
        except RuntimeUnavailable as error:
            self._failure = error
            self._soon.set()
        except Exception as error:
            self._mistake("look", error)
        finally:
            self._looking.pop(container_id, None)

    async def _look_once(self, container_id: str) -> None:
        status = await self._client.container_status(container_id)
        if status is None or status.state not in LIVE:
            self._end(container_id, known=status is not None)
            return
        running = status.state is CRIContainerState.RUNNING
        phase = self._phases.get(container_id)
        if phase is _Phase.RUNNING:
            self._size(self._pods.get(self._pod_of.get(container_id, "")), status)
            return
        if phase is _Phase.MET and not running:
            return
        pod = await self._pod(status)
        if pod is None:
            return  # gone with all of its containers, or not there yet: a listing tells
        message = container_message(status, pod.id)
        if phase is None:
            self._phases[container_id] = _Phase.MET
            await self._meet(pod, message)
        if running and container_id in self._phases:
            await self._begin(pod, message, status.started_at_ns / 1e9)

    def _size(self, pod: pb.PodSandbox | None, status: CRIContainerStatus) -> None:
        """Have a resize decided about that nobody told of."""
        if pod is None:
            return  # gone with all of its containers: a listing tells
        container = container_message(status, pod.id)
        change = self._sizes.changed(status.id, container.linux.resources)
        if change is None:
            return
        container.linux.resources.CopyFrom(change.before)
        request = pb.UpdateContainerRequest(
            pod=pod, container=container, linux_resources=change.asked
        )
        try:
            response = self._call(
                "UpdateContainer", lambda: self._handler.update_container(request), refusals=True
            )
        except RequestRefused as refusal:
            log.warning(
                "refused resize is in force nevertheless",
                pod=f"{pod.namespace}/{pod.name}",
                container=container.name,
                problem=refusal.message,
            )
            if change.asked.cpu.quota.value:
                self._ears.resize_refused(status.id, change.asked.cpu.quota.value)
            return
        for one in () if response is None else response.update:
            self._put(one.container_id, cri_resources(one)).add_done_callback(
                lambda done: self._not_applied(done.result())
            )

    async def _begin(self, pod: pb.PodSandbox, container: pb.Container, started: float) -> None:
        """A container runs: have its cgroup put right, and the runtime told once more."""
        container_id = container.id
        self._call("StartContainer", lambda: self._handler.start_container(pod, container))
        self._ears.begun(container_id, started, self._told_at.pop(container_id, None))
        self._phases[container_id] = _Phase.RUNNING
        own = self._own.pop(container_id, None)
        if own is not None:
            self._not_applied(await self._put(container_id, own, urgent=True))
        if container_id in self._phases:
            self._call(
                "PostStartContainer", lambda: self._handler.post_start_container(pod, container)
            )
            self._ears.started(container_id, started)

    async def _pod(self, status: CRIContainerStatus) -> pb.PodSandbox | None:
        pod_id = status.pod_sandbox_id or self._pod_of.get(status.id, "")
        if pod_id not in self._pods:
            found = await self._client.pod_sandbox_status(pod_id) if pod_id else None
            if found is None:
                self._soon.set()
                return None
            pod = pod_message(found)
            if pod_id not in self._pods:  # another container of it may have been quicker
                self._pods[pod_id] = pod
                self._call("RunPodSandbox", lambda: self._handler.run_pod(pod))
        return self._pods[pod_id]

    async def _meet(self, pod: pb.PodSandbox, container: pb.Container) -> None:
        """Have a container decided about, and send what was decided."""
        self._sizes.seen(container.id, container.linux.resources)
        request = pb.CreateContainerRequest(pod=pod, container=container)
        try:
            response = self._call(
                "CreateContainer", lambda: self._handler.create_container(request), refusals=True
            )
        except RequestRefused as refusal:
            self._ears.refused(pod.namespace, pod.name, pod.uid, container.name, refusal.message)
            # It starts nevertheless: taken in as one that runs, where it disturbs nobody.
            self._call("StartContainer", lambda: self._handler.start_container(pod, container))
            return
        if response is None:
            return
        if not isinstance(response, pb.CreateContainerResponse):
            response = pb.CreateContainerResponse.FromString(response.SerializeToString())
        own = None
        if response.adjust.HasField("linux"):
            resources = cri_resources(response.adjust)
            if container.state == pb.CONTAINER_RUNNING:
                self._own[container.id] = resources  # sent when its cgroup is right
            else:
                own = self._put(container.id, resources, urgent=True)
        self._send_all(response.update)
        if own is not None:
            failed = await own
            if failed is None:
                self._told_at[container.id] = self._now()
            else:
                self._not_applied(failed)

    def _end(self, container_id: str, *, known: bool) -> None:
        """A container ended, or is gone altogether."""
        if self._phases.pop(container_id, None) is not None:
            self._ended.add(container_id)
            self._told_at.pop(container_id, None)
            self._own.pop(container_id, None)
            self._sizes.forget(container_id)
            request = pb.StopContainerRequest(container=pb.Container(id=container_id))
            response = self._call("StopContainer", lambda: self._handler.stop_container(request))
            self._ears.gone(container_id)
            if response is not None:
                if not isinstance(response, pb.StopContainerResponse):
                    response = pb.StopContainerResponse.FromString(response.SerializeToString())
                self._send_all(response.update)
        if not known and (container_id in self._ended or container_id in self._pod_of):
            self._ended.discard(container_id)
            self._pod_of.pop(container_id, None)
            container = pb.Container(id=container_id)
            self._call(
                "RemoveContainer",
                lambda: self._handler.remove_container(pb.PodSandbox(), container),
            )

    # --- the handler, and what it answers ---------------------------------------------------------

    def _call(self, name: str, handle: Callable[[], _T], *, refusals: bool = False) -> _T | None:
        """Ask the handler, whatever happens in it."""
        began = time.perf_counter()
        try:
            return handle()
        except RequestRefused:
            if refusals:
                raise
            return None
        except Exception as error:
            self._mistake(name, error)
            return None
        finally:
            self._handler.replied(name, time.perf_counter() - began)

    def _mistake(self, name: str, error: Exception) -> None:
        """One of ours; nothing can be refused because of it here."""
        with contextlib.suppress(RequestRefused):
            self._handler.internal_error(name, error)

    def _send_all(self, updates: Sequence[pb.ContainerUpdate]) -> None:
        for sent in self.send(updates):
            sent.add_done_callback(lambda done: self._not_applied(done.result()))

    def _not_applied(self, failed: UpdateFailed | None) -> None:
        """Say that an update failed; what the container really has is looked at anyway."""
        if failed is not None and not failed.gone:
            log.info(
                "update not applied", id=failed.container_id[:12], problem=failed.message[:300]
            )
