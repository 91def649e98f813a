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
from collections.abc import Mapping
from types import MappingProxyType, TracebackType

from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from tests.beds.embedded.combine import (
    CreateMerge,
    MergeConflict,
    UpdateMerge,
    fill_in,
    merge_update,
)
from tests.beds.embedded.plugin_link import (
    CONTAINERD_1_7,
    CONTAINERD_2_1,
    CONTAINERD_2_4,
    CRI_O_1_35,
    CallRecord,
    Faults,
    PluginLost,
    PluginStatus,
    RuntimeProfile,
    parse_answer,
)
from tests.beds.embedded.plugins import PluginRegistry
from tests.beds.embedded.world import (
    ContainerState,
    CRIError,
    EmbeddedContainer,
    EmbeddedMachine,
    EmbeddedPod,
    World,
)

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
        self._plugins = PluginRegistry(
            profile=profile,
            world=self._world,
            lock=self._lock,
            faults=self.faults,
            request_timeout=request_timeout,
            slice_objects=slice_objects,
        )
        self.calls = self._plugins.calls
        self.closed = self._plugins.closed
        self._server: asyncio.AbstractServer | None = None
        self._ids = itertools.count(1)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._socket_path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._plugins.accept, self._socket_path)

    async def stop(self) -> None:
        """Hang up on every plugin and stop listening; the world stays, as after a restart."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._plugins.stop()

    async def __aenter__(self) -> EmbeddedRuntime:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def adopt(self, sock: socket.socket, *, name: str, index: str, config: str = "") -> None:
        """Serve a plugin this runtime launched, over one end of a socket pair.

        `name`: plugin name; what the plugin registers with is ignored.
        """
        await self._plugins.adopt(sock, name, index, config)

    @property
    def plugins(self) -> tuple[str, ...]:
        """The ids of the active plugins, in the order they are asked."""
        return tuple(peer.id for peer in self._plugins.active())

    @property
    def pods(self) -> Mapping[str, EmbeddedPod]:
        return MappingProxyType(self._world.pods)

    @property
    def containers(self) -> Mapping[str, EmbeddedContainer]:
        return MappingProxyType(self._world.containers)

    async def wait_for_plugin(self, count: int = 1, *, limit: float = 60.0) -> None:
        """Wait until at least `count` plugins are active."""
        await self._plugins.wait_for(count, limit)

    async def disconnect_plugins(self) -> None:
        """Hang up on every plugin, and keep listening."""
        await self._plugins.hang_up("disconnected on purpose")

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

    async def update_pod(
        self, pod_id: str, resources: pb.LinuxResources, overhead: pb.LinuxResources | None = None
    ) -> None:
        """Change the resources of a pod; nothing but the events happens."""
        async with self._lock:
            pod = self._pod(pod_id)
            request = pb.UpdatePodSandboxRequest(
                pod=pod.message, linux_resources=resources, overhead_linux_resources=overhead
            )
            for peer in self._plugins.subscribed(Event.UPDATE_POD_SANDBOX):
                try:
                    await peer.call("UpdatePodSandbox", request, limit=self._limit)
                except PluginLost:
                    continue
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
                merge = await self._ask_create(pod, message)
            except (PluginStatus, MergeConflict) as error:
                await self._creation_failed(pod, message.id)
                raise CRIError(f"failed to get NRI adjustment for container: {error}") from error
            for update in merge.updates.updates():
                self._apply(update)
            record = EmbeddedContainer(message=merge.container, machine=self._world.machine)
            self._world.containers[record.id] = record
            await self._tell(Event.POST_CREATE_CONTAINER, pod.message, record)
            return record

    async def start_container(self, container_id: str) -> None:
        async with self._lock:
            container = self._container(container_id)
            if container.state is not ContainerState.CREATED:
                raise CRIError(f"container {container_id} is {container.state.value}")
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
                raise CRIError(f"container {container_id} is {container.state.value}")
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
                merge = await self._ask_update(pod, container, asked)
            except (PluginStatus, MergeConflict) as error:
                raise CRIError(f"NRI container update failed: {error}") from error
            own = merge.take(container_id)
            for update in merge.updates():
                self._apply(update)
            final = pb.ContainerUpdate(
                container_id=container_id,
                linux=pb.LinuxContainerUpdate(resources=merge_update(asked, own)),
            )
            problem = self._world.apply(final)
            if problem is not None:
                raise CRIError(f"failed to update resources: {problem}")
            await self._tell(Event.POST_UPDATE_CONTAINER, pod, container)

    async def stop_container(self, container_id: str) -> None:
        """Stop a container on request; a second time does nothing."""
        async with self._lock:
            await self._ended(self._container(container_id))

    async def exit_container(self, container_id: str) -> None:
        """Let a container's process exit by itself; plugins see the same event."""
        await self.stop_container(container_id)

    async def remove_container(self, container_id: str) -> None:
        """Remove a container, stopping it first if needed."""
        async with self._lock:
            await self._remove_container(self._container(container_id))

    # ------------------------------------------------------------------ asking and telling

    async def _ask_create(self, pod: EmbeddedPod, message: pb.Container) -> CreateMerge:
        merge = CreateMerge(message)
        for peer in self._plugins.subscribed(Event.CREATE_CONTAINER):
            request = pb.CreateContainerRequest(pod=pod.message, container=merge.container)
            try:
                payload = await peer.call("CreateContainer", request, limit=self._limit)
            except PluginLost:
                continue  # created without this plugin's word
            merge.add(peer.id, parse_answer(pb.CreateContainerResponse, payload))
        return merge

    async def _ask_update(
        self, pod: pb.PodSandbox, container: EmbeddedContainer, asked: pb.LinuxResources
    ) -> UpdateMerge:
        merge = UpdateMerge()
        request = pb.UpdateContainerRequest(
            pod=pod, container=container.snapshot(), linux_resources=asked
        )
        for peer in self._plugins.subscribed(Event.UPDATE_CONTAINER):
            try:
                payload = await peer.call("UpdateContainer", request, limit=self._limit)
            except PluginLost:
                continue
            merge.add(peer.id, parse_answer(pb.UpdateContainerResponse, payload).update)
        return merge

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
        for peer in self._plugins.subscribed(event):
            try:
                await peer.notify(event, pod, shown, limit=self._limit)
            except PluginLost:
                continue
            except PluginStatus as error:
                if fatal:
                    raise CRIError(f"{fatal}: {error}") from error

    async def _stop_event(self, pod: pb.PodSandbox, shown: pb.Container) -> None:
        """Send StopContainer and apply what comes back for others."""
        merge = UpdateMerge()
        request = pb.StopContainerRequest(pod=pod, container=shown)
        for peer in self._plugins.subscribed(Event.STOP_CONTAINER):
            try:
                payload = await peer.call("StopContainer", request, limit=self._limit)
                merge.add(peer.id, parse_answer(pb.StopContainerResponse, payload).update)
            except (PluginLost, PluginStatus, MergeConflict):
                continue  # logged only: the container has ended whatever anyone says
        for update in merge.updates():
            self._apply(update)

    async def _creation_failed(self, pod: EmbeddedPod, container_id: str) -> None:
        """Tell every plugin, also those that were never asked, that there is no such container."""
        shown = pb.Container(id=container_id, pod_sandbox_id=pod.id)
        await self._stop_event(pod.message, shown)
        await self._tell(Event.REMOVE_CONTAINER, pod.message, shown)

    async def _ended(self, container: EmbeddedContainer) -> None:
        if container.stop_told:
            return
        container.stop_told = True
        pod = self._world.pods.get(container.pod_id)
        # A sandbox that is gone already is shown by its id alone.
        shown = pod.message if pod is not None else pb.PodSandbox(id=container.pod_id)
        if container.state is ContainerState.RUNNING:
            container.state = ContainerState.EXITED
            container.message.pid = 0
        elif container.state is ContainerState.CREATED:
            container.state = ContainerState.EXITED
        await self._stop_event(shown, container.snapshot())

    async def _remove_container(self, container: EmbeddedContainer) -> None:
        await self._ended(container)
        pod = self._world.pods.get(container.pod_id)
        shown = pod.message if pod is not None else pb.PodSandbox(id=container.pod_id)
        await self._tell(Event.REMOVE_CONTAINER, shown, container)
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
        await self._tell(Event.STOP_POD_SANDBOX, pod.message)

    async def _remove_pod(self, pod: EmbeddedPod) -> None:
        await self._tell(Event.REMOVE_POD_SANDBOX, pod.message)
        del self._world.pods[pod.id]

    # ------------------------------------------------------------------ the world

    def _apply(self, update: pb.ContainerUpdate) -> None:
        self._world.apply(update)  # a failure changes nothing and is only logged by containerd

    def _pod(self, pod_id: str) -> EmbeddedPod:
        pod = self._world.pods.get(pod_id)
        if pod is None:
            raise CRIError(f"sandbox {pod_id}: not found")
        return pod

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
        fill_in(message)
        return message

    def _new_id(self) -> str:
        """Return 64 hexadecimal digits, the same sequence in every run."""
        return hashlib.sha256(str(next(self._ids)).encode()).hexdigest()
