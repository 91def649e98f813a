"""A container runtime's side of NRI over a real unix socket, with a world in memory.

`EmbeddedRuntime` accepts plugins, configures and synchronises them, and asks them about every pod
and container operation in the order and with the consequences of containerd: plugins in index
order, one operation at a time, two seconds for an answer, and an operation that goes on unmodified
when there is none. It is what ``nri-numa demo`` shows and what the tests of the link run against.

No process and no cgroup is made. What a container "has" is what its stored spec says after every
adjustment and update, checked against the machine as the kernel would.

::

    async with EmbeddedRuntime(path, cpus="0-7", mems="0-1") as runtime:
        await runtime.wait_for_plugin()
        pod = await runtime.run_pod(pb.PodSandbox(name="web", namespace="default"))
        web = await runtime.create_container(pod.id, pb.Container(name="app"))
        await runtime.start_container(web.id)
        print(web.cpus, web.mems)
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event, identity_problem
from tests.beds.embedded.plugin_link import (
    CONTAINERD_1_7,
    CONTAINERD_2_1,
    CONTAINERD_2_4,
    CRI_O_1_35,
    CallRecord,
    Faults,
    PluginLost,
    PluginPeer,
    PluginStatus,
    RuntimeProfile,
)
from tests.beds.embedded.world import (
    ContainerState,
    CRIError,
    EmbeddedContainer,
    EmbeddedMachine,
    EmbeddedPod,
    World,
)

MAX_SLICE_BYTES: Final = ttrpc.MAX_MESSAGE_BODY_BYTES - 4096
"""Of one Synchronize message; the envelope needs a little."""
LEAST_SLICE: Final = 4
"""Objects of one kind in a slice that was made small because of its size."""
KEPT_RECORDS: Final = 10_000
"""Records that are remembered, of calls and of departures."""
REGISTRATION_TIMEOUT_S: Final = 5.0
UPDATE_FAILED: Final = "NRI update of some containers failed"

__all__ = [
    "CONTAINERD_1_7",
    "CONTAINERD_2_1",
    "CONTAINERD_2_4",
    "CRI_O_1_35",
    "CRIError",
    "CallRecord",
    "ContainerState",
    "EmbeddedContainer",
    "EmbeddedPod",
    "EmbeddedRuntime",
    "Faults",
    "RuntimeProfile",
]


class EmbeddedRuntime:
    """The runtime role, for demonstration and tests.

    Attributes:
        faults: what goes wrong on purpose; may be changed at any time.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        profile: RuntimeProfile = CONTAINERD_2_4,
        cpus: str = "0-3",
        mems: str = "0",
        request_timeout: float = 2.0,
        slice_objects: int | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Make a runtime; it listens from `start` on.

        `socket_path`: where plugins dial; a file that is there is removed.
        `request_timeout`: seconds for every answer, and for a whole synchronisation.
        `slice_objects`: pods and containers of one Synchronize message; None sends all in one
        and slices only above 4 MiB.
        `faults`: see `Faults`.
        """
        self.faults = faults if faults is not None else Faults()
        self._socket_path = socket_path
        self._limit = request_timeout
        self._world = World(
            machine=EmbeddedMachine(cpus=CPUSet.parse(cpus), mems=NUMASet.parse(mems))
        )
        self._lock = asyncio.Lock()  # NRI's: one operation at a time on the whole node
        self._profile, self._slice_objects = profile, slice_objects
        self.calls: deque[CallRecord] = deque(maxlen=KEPT_RECORDS)
        self.closed: deque[str] = deque(maxlen=KEPT_RECORDS)
        self._plugins: list[PluginPeer] = []
        self._peers: set[PluginPeer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._server: asyncio.AbstractServer | None = None
        self._ids = itertools.count(1)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._socket_path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept, self._socket_path)

    async def stop(self) -> None:
        """Hang up on every plugin and stop listening; the world stays, as after a restart."""
        for pod in self._world.pods.values():
            pod.older = True
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._hang_up("the runtime stops")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._plugins.clear()

    async def __aenter__(self) -> EmbeddedRuntime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def adopt(self, sock: socket.socket, *, name: str, index: str, config: str = "") -> None:
        """Serve a plugin this runtime launched, over one end of a socket pair.

        `name`: plugin name; what the plugin registers with is ignored.
        """
        peer = self._new_peer()
        peer.name, peer.index, peer.launched = name, index, True
        await asyncio.get_running_loop().create_unix_connection(lambda: peer.connection, sock=sock)
        self._spawn(self._serve(peer, config))

    @property
    def plugins(self) -> tuple[str, ...]:
        """The ids of the active plugins, in the order they are asked."""
        return tuple(peer.id for peer in self._active())

    @property
    def pods(self) -> Mapping[str, EmbeddedPod]:
        return MappingProxyType(self._world.pods)

    @property
    def containers(self) -> Mapping[str, EmbeddedContainer]:
        return MappingProxyType(self._world.containers)

    async def wait_for_plugin(self, *, limit: float = 60.0) -> None:
        """Wait until a plugin is active; TimeoutError after `limit` seconds."""
        async with asyncio.timeout(limit), self._changed:
            await self._changed.wait_for(self._active)

    async def disconnect_plugins(self) -> None:
        await self._hang_up("disconnected on purpose")

    # ------------------------------------------------------------------ pods

    async def run_pod(self, pod: pb.PodSandbox) -> EmbeddedPod:
        """Run a pod sandbox.

        Args:
            pod: id and uid are made up when empty.
        """
        async with self._lock:
            message = pb.PodSandbox()
            message.CopyFrom(pod)
            message.id = message.id or self._new_id()
            message.uid = message.uid or message.id[:36]
            message.pid = message.pid or os.getpid()
            record = EmbeddedPod(message=message)
            self._world.pods[record.id] = record
            try:
                await self._tell(Event.RUN_POD_SANDBOX, message, fatal="failed to run sandbox")
            except CRIError:
                await self._stop_pod(record)
                await self._remove_pod(record)
                raise
            return record

    async def update_pod(self, pod_id: str, resources: pb.LinuxResources) -> None:
        """Change the resources of a pod; nothing but the events happens."""
        async with self._lock:
            pod = self._pod(pod_id)
            try:
                await self._ask(
                    Event.UPDATE_POD_SANDBOX, pod=pod.message, linux_resources=resources
                )
            except PluginStatus as error:
                raise CRIError(f"failed to update sandbox: {error}") from error
            pod.message.linux.pod_resources.CopyFrom(resources)
            await self._tell(Event.POST_UPDATE_POD_SANDBOX, pod.message)

    async def stop_pod(self, pod_id: str) -> None:
        """Stop a pod: its containers first, then the sandbox. A second time does nothing."""
        async with self._lock:
            await self._stop_pod(self._pod(pod_id))

    async def remove_pod(self, pod_id: str) -> None:
        """Stop a pod if needed and remove its containers and itself."""
        async with self._lock:
            pod = self._pod(pod_id)
            await self._stop_pod(pod)
            for container in self._world.containers_of(pod_id):
                await self._remove_container(container)
            await self._remove_pod(pod)

    # ------------------------------------------------------------------ containers

    async def create_container(self, pod_id: str, container: pb.Container) -> EmbeddedContainer:
        """Create a container; plugins adjust it before anything of it exists."""
        async with self._lock:
            pod = self._pod(pod_id)
            if pod.stopped:
                raise CRIError(f"sandbox {pod_id} is not running")
            message = self._complete(pod, container)
            try:
                updates = await self._ask_create(pod, message)
            except PluginStatus as error:
                await self._creation_failed(pod, message.id)
                raise CRIError(f"failed to get NRI adjustment for container: {error}") from error
            self._apply(updates)
            record = EmbeddedContainer(message=message, machine=self._world.machine)
            self._world.containers[record.id] = record
            await self._tell(Event.POST_CREATE_CONTAINER, pod.message, record)
            return record

    async def start_container(self, container_id: str) -> None:
        async with self._lock:
            container = self._container(container_id)
            if container.state is not ContainerState.CREATED:
                raise CRIError(f"container {container_id} is {container.state.name}")
            # As with a real runtime: no StopContainer before the container is removed.
            problem = self._world.machine.problem(container.message.linux.resources.cpu)
            if problem is not None:
                container.state = ContainerState.EXITED
                raise CRIError(f"failed to create containerd task: OCI runtime: {problem}")
            pod = self._pod(container.pod_id).message
            try:
                await self._tell(
                    Event.START_CONTAINER, pod, container, fatal="failed to start container"
                )
            except CRIError:
                await self._ended(container)
                raise
            container.state = ContainerState.RUNNING
            container.message.pid = os.getpid()
            await self._tell(Event.POST_START_CONTAINER, pod, container)

    async def update_container(self, container_id: str, resources: pb.LinuxResources) -> None:
        """Change a container's resources, as CRI UpdateContainerResources does.

        `resources`: only what is to change; zero and empty mean "leave alone".
        """
        async with self._lock:
            container = self._container(container_id)
            if container.state is ContainerState.EXITED:
                raise CRIError(f"container {container_id} is {container.state.name}")
            pod = self._pod(container.pod_id).message
            asked = pb.LinuxResources()
            asked.CopyFrom(resources)
            for wrapper in (
                asked.cpu.shares,
                asked.cpu.quota,
                asked.cpu.period,
                asked.memory.limit,
            ):
                wrapper.SetInParent()  # converted from CRI they are always there
            try:
                updates = await self._ask(
                    Event.UPDATE_CONTAINER,
                    pod=pod,
                    container=container.snapshot(),
                    linux_resources=asked,
                )
            except PluginStatus as error:
                raise CRIError(f"NRI container update failed: {error}") from error
            for own in updates:
                if own.container_id == container_id:
                    asked.MergeFrom(own.linux.resources)
            self._apply(each for each in updates if each.container_id != container_id)
            final = pb.ContainerUpdate(
                container_id=container_id, linux=pb.LinuxContainerUpdate(resources=asked)
            )
            problem = self._world.apply(final)
            if problem is not None:
                raise CRIError(f"failed to update resources: {problem}")
            await self._tell(Event.POST_UPDATE_CONTAINER, pod, container)

    async def stop_container(self, container_id: str) -> None:
        """Stop a container on request; a second time does nothing."""
        async with self._lock:
            await self._ended(self._container(container_id))

    async def remove_container(self, container_id: str) -> None:
        async with self._lock:
            await self._remove_container(self._container(container_id))

    # ------------------------------------------------------------------ plugins come and go

    def _active(self) -> list[PluginPeer]:
        """Return the active plugins in the order they are asked, without those that left."""
        return [peer for peer in self._plugins if peer.is_open()]

    def _subscribed(self, event: Event) -> list[PluginPeer]:
        return [peer for peer in self._active() if peer.subscribes(event)]

    def _accept(self) -> asyncio.BaseProtocol:
        peer = self._new_peer()
        self._spawn(self._serve(peer, ""))
        return peer.connection

    async def _hang_up(self, detail: str) -> None:
        for peer in list(self._peers):
            await peer.connection.close_and_wait(detail)

    def _new_peer(self) -> PluginPeer:
        peer = PluginPeer(
            self._profile,
            self.faults,
            self._limit,
            lambda peer, event: self._spawn(self._unsolicited(peer, event)),
            self.calls.append,
        )
        self._peers.add(peer)
        peer.connection.ended.add_done_callback(lambda _: self._gone(peer))
        return peer

    def _gone(self, peer: PluginPeer) -> None:
        self._peers.discard(peer)
        if peer in self._plugins:
            self._plugins.remove(peer)
        self.closed.append(f"{peer.id}: {peer.connection.ended.result().detail}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: PluginPeer, config: str) -> None:
        """Bring one plugin from its connection into the list of active plugins."""
        waited: set[asyncio.Future[Any]] = {peer.registration, peer.connection.ended}
        await asyncio.wait(
            waited, timeout=REGISTRATION_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not peer.registration.done():
            peer.connection.close_or_abort("no registration")
            return
        registration = peer.registration.result()
        if not peer.launched:
            peer.name, peer.index = registration.name, registration.index
            problem = identity_problem(peer.name, peer.index)
            if problem is not None:
                # As in the real one the socket stays open; it is for the plugin to go.
                peer.refuse(registration.stream, f"invalid plugin: {problem}")
                return
        try:
            await self._configure(peer, registration, config)
            async with self._lock:
                # NRI before 0.7, which tells no timeouts, never synchronises what it launched.
                if not peer.launched or self._profile.tells_timeouts:
                    await self._synchronize(peer)
                self._plugins.append(peer)
                # By index as text; equal indices by name, so that tests see one order.
                self._plugins.sort(key=lambda each: (each.index, each.name))
        except (PluginLost, PluginStatus) as error:
            peer.connection.close_or_abort(str(error))
            return
        async with self._changed:
            self._changed.notify_all()

    async def _configure(
        self, peer: PluginPeer, registration: ev.RegisterRequested, config: str
    ) -> None:
        profile = self._profile
        request = pb.ConfigureRequest(
            config=config,
            runtime_name=profile.name,
            runtime_version=profile.version,
            NRI_version=profile.nri_version,
        )
        if profile.tells_timeouts:
            request.registration_timeout = int(REGISTRATION_TIMEOUT_S * 1000)
            request.request_timeout = int(self._limit * 1000)
        call = asyncio.ensure_future(peer.call("Configure", request))
        if self.faults.configure_first:
            await asyncio.sleep(0)  # the task writes its request, then waits
        peer.answer(registration.stream)
        response = pb.ConfigureResponse.FromString(await call)
        if response.events & ~profile.events:
            raise PluginLost(f"invalid plugin events: {response.events:#x}")
        peer.mask = response.events or profile.events

    async def _synchronize(self, peer: PluginPeer) -> None:
        pods = [pod.message for pod in self._world.pods.values()]
        containers = [
            container.snapshot()
            for container in self._world.containers.values()
            if container.state is not ContainerState.EXITED
        ]
        deadline = asyncio.get_running_loop().time() + self._limit
        for request in self._slices(pods, containers):
            left = deadline - asyncio.get_running_loop().time()
            payload = await peer.call("Synchronize", request, limit=max(left, 0.001))
            response = pb.SynchronizeResponse.FromString(payload)
            if request.more and (response.update or not response.more):
                raise PluginLost("plugin does not handle split sync requests")
            self._apply(response.update)

    def _slices(
        self, pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> Iterator[pb.SynchronizeRequest]:
        size = self._slice_objects or max(len(pods), len(containers), 1)
        while True:
            requests = [
                pb.SynchronizeRequest(
                    pods=pods[start : start + size], containers=containers[start : start + size]
                )
                for start in range(0, max(len(pods), len(containers), 1), size)
            ]
            largest = max(request.ByteSize() for request in requests)
            if largest <= MAX_SLICE_BYTES or size <= LEAST_SLICE:
                break
            size = max(LEAST_SLICE, int(size * min(0.9, MAX_SLICE_BYTES / largest)))
        for request in requests[:-1]:
            request.more = True
        yield from requests

    async def _unsolicited(self, peer: PluginPeer, event: ev.UpdateContainersRequested) -> None:
        async with self._lock:
            failed = self._apply(event.request.update)
            if not self.faults.reports_ignored:
                failed = [each for each in failed if not each.ignore_failure]
        if not peer.is_open():
            return
        if failed and not self._profile.update_failures_as_list:
            peer.refuse(event.stream, UPDATE_FAILED)
        else:
            peer.answer(event.stream, pb.UpdateContainersResponse(failed=failed))

    # ------------------------------------------------------------------ asking and telling

    async def _answers(self, event: Event, **parts: Any) -> AsyncIterator[Any]:
        """What the plugins that want an event say to it, one after the other.

        The operation goes on without the word of one that is lost.
        """
        for peer in self._subscribed(event):
            try:
                answer = await peer.ask(event, **parts)
            except PluginLost:
                continue
            yield answer

    async def _ask(self, event: Event, **parts: Any) -> list[pb.ContainerUpdate]:
        """The updates that all plugins answer with."""
        return [
            update
            async for answer in self._answers(event, **parts)
            for update in getattr(answer, "update", ())
        ]

    async def _ask_create(
        self, pod: EmbeddedPod, container: pb.Container
    ) -> list[pb.ContainerUpdate]:
        """Have a container adjusted; each plugin is shown what those before it made of it."""
        updates: list[pb.ContainerUpdate] = []
        async for answer in self._answers(
            Event.CREATE_CONTAINER, pod=pod.message, container=container
        ):
            adjust = answer.adjust
            container.annotations.update(adjust.annotations)
            told = {variable.key: variable.value for variable in adjust.env}
            kept = [each for each in container.env if each.partition("=")[0] not in told]
            container.env[:] = [*kept, *(f"{key}={value}" for key, value in told.items())]
            container.linux.resources.MergeFrom(adjust.linux.resources)
            updates += answer.update
        assert container.id not in {update.container_id for update in updates}
        return updates

    async def _tell(
        self,
        event: Event,
        pod: pb.PodSandbox,
        container: EmbeddedContainer | pb.Container | None = None,
        *,
        fatal: str = "",
    ) -> None:
        """Send an event without a result to everyone who wants it.

        `fatal`: what failed when a plugin refuses; empty for events whose errors are only logged.
        """
        shown = container.snapshot() if isinstance(container, EmbeddedContainer) else container
        for peer in self._subscribed(event):
            try:
                await peer.notify(event, pod, shown)
            except PluginLost:
                continue
            except PluginStatus as error:
                if fatal:
                    raise CRIError(f"{fatal}: {error}") from error

    async def _stop_event(self, pod: pb.PodSandbox, shown: pb.Container) -> None:
        """Send StopContainer and apply what comes back for others."""
        # An error is logged only: the container has ended whatever anyone says.
        with contextlib.suppress(PluginStatus):
            self._apply(await self._ask(Event.STOP_CONTAINER, pod=pod, container=shown))

    async def _creation_failed(self, pod: EmbeddedPod, container_id: str) -> None:
        """Tell every plugin, also those that were never asked, that there is no such container."""
        shown = pb.Container(id=container_id, pod_sandbox_id=pod.id)
        await self._stop_event(pod.message, shown)
        await self._tell(Event.REMOVE_CONTAINER, pod.message, shown)

    async def _ended(self, container: EmbeddedContainer) -> None:
        if container.stop_told:
            return
        container.stop_told = True
        container.state, container.message.pid = ContainerState.EXITED, 0
        await self._stop_event(self._sandbox_of(container), container.snapshot())

    async def _remove_container(self, container: EmbeddedContainer) -> None:
        await self._ended(container)
        await self._tell(Event.REMOVE_CONTAINER, self._sandbox_of(container), container)
        del self._world.containers[container.id]

    async def _stop_pod(self, pod: EmbeddedPod) -> None:
        if pod.stopped:
            return
        for container in self._world.containers_of(pod.id):
            # One that never started is only reported when it is removed.
            if container.state is ContainerState.RUNNING:
                await self._ended(container)
        pod.stopped = True
        pod.message.pid = 0
        if not pod.older:
            await self._tell(Event.STOP_POD_SANDBOX, pod.message)

    async def _remove_pod(self, pod: EmbeddedPod) -> None:
        if not pod.older:
            await self._tell(Event.REMOVE_POD_SANDBOX, pod.message)
        del self._world.pods[pod.id]

    # ------------------------------------------------------------------ the world

    def _apply(self, updates: Iterable[pb.ContainerUpdate]) -> list[pb.ContainerUpdate]:
        """Do what a plugin wants; returns what failed, which containerd mostly only logs.

        NRI fails a request in whose answers a field of a container is set twice.
        """
        updates = list(updates)
        names = [update.container_id for update in updates]
        assert len(names) == len(set(names)), f"two updates for one container: {names}"
        return [update for update in updates if self._world.apply(update) is not None]

    def _pod(self, pod_id: str) -> EmbeddedPod:
        pod = self._world.pods.get(pod_id)
        if pod is None:
            raise CRIError(f"sandbox {pod_id}: not found")
        return pod

    def _sandbox_of(self, container: EmbeddedContainer) -> pb.PodSandbox:
        """One that is gone already is shown by its id alone."""
        pod = self._world.pods.get(container.pod_id)
        return pb.PodSandbox(id=container.pod_id) if pod is None else pod.message

    def _container(self, container_id: str) -> EmbeddedContainer:
        container = self._world.containers.get(container_id)
        if container is None:
            raise CRIError(f"container {container_id}: not found")
        return container

    def _complete(self, pod: EmbeddedPod, container: pb.Container) -> pb.Container:
        """Return a copy with what every container has: ids, the kubelet's labels, sub-messages."""
        message = pb.Container()
        message.CopyFrom(container)
        message.id = message.id or self._new_id()
        message.pod_sandbox_id = pod.id
        for key, value in (
            ("io.kubernetes.container.name", message.name),
            ("io.kubernetes.pod.name", pod.message.name),
            ("io.kubernetes.pod.namespace", pod.message.namespace),
            ("io.kubernetes.pod.uid", pod.message.uid),
            ("io.cri-containerd.kind", "container"),
        ):
            if key not in message.labels:
                message.labels[key] = value
        # What plugins always find in a container.
        message.hooks.SetInParent()
        message.linux.resources.memory.SetInParent()
        message.linux.resources.cpu.SetInParent()
        return message

    def _new_id(self) -> str:
        """Return 64 hexadecimal digits, the same sequence in every run."""
        return hashlib.sha256(str(next(self._ids)).encode()).hexdigest()
