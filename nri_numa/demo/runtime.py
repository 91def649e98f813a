"""What the demo needs of a container runtime: NRI for one plugin, pods and containers in memory.

No process and no cgroup is made. What a container has is its stored spec after every adjustment and
update of the plugin, as a runtime keeps it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from nri_numa.model.machine import Topology
from nri_numa.nri.transport import SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PLUGIN_METHODS, RuntimeSession

ANSWER_SECONDS = 10.0
"""For one answer; a loaded machine must not make the demo start containers without the plugin."""


class CRIError(Exception):
    """A pod or container operation failed; the text is what the kubelet would be shown."""


class State(enum.Enum):
    """The life of a container."""

    CREATED = pb.CONTAINER_CREATED
    RUNNING = pb.CONTAINER_RUNNING
    EXITED = pb.CONTAINER_STOPPED


@dataclass(slots=True, kw_only=True)
class DemoContainer:
    """A container: its stored spec, and where it is in its life."""

    message: pb.Container
    machine: Topology
    state: State = State.CREATED

    @property
    def name(self) -> str:
        """The name within its pod."""
        return self.message.name

    @property
    def cpus(self) -> str:
        """The CPUs it may run on, as a list; every CPU when its cpuset is empty."""
        return self.message.linux.resources.cpu.cpus or str(self.machine.online)

    @property
    def mems(self) -> str:
        """The NUMA nodes its memory may come from, as a list."""
        return self.message.linux.resources.cpu.mems or str(self.machine.memory_nodes)

    def shown(self) -> pb.Container:
        """What the plugin is shown now."""
        message = pb.Container()
        message.CopyFrom(self.message)
        message.state = self.state.value
        return message


@dataclass(slots=True)
class _Plugin:
    """The connection of a plugin that has registered, and the calls that wait for its answer."""

    session: RuntimeSession
    calls: dict[int, asyncio.Future[ev.Answered]] = field(default_factory=dict)
    transport: SessionTransport[ev.RuntimeEvent] | None = None


class DemoRuntime:
    """The runtime's side of NRI over a unix socket; ``connected`` says of a synchronized plugin."""

    def __init__(self, socket_path: str, machine: Topology) -> None:
        self.pods: dict[str, pb.PodSandbox] = {}
        self.containers: dict[str, DemoContainer] = {}
        self.connected = asyncio.Event()
        self._path, self._machine = socket_path, machine
        self._plugin: _Plugin | None = None
        self._lock = asyncio.Lock()  # NRI's: one operation at a time on the whole node
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept, self._path)

    async def stop(self) -> None:
        """Hang up and stop listening."""
        if self._server is not None:
            self._server.close()
        if self._plugin is not None and self._plugin.transport is not None:
            await self._plugin.transport.aclose("the runtime stops")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- pods and containers ----------------------------------------------------------------------

    async def run_pod(self, pod: pb.PodSandbox) -> None:
        """Run a sandbox.

        Raises:
            CRIError: the plugin refused it.
        """
        async with self._lock:
            self.pods[pod.id] = pod
            await self._event("RunPodSandbox", pod=pod)

    async def create_container(self, message: pb.Container) -> DemoContainer:
        """Create a container; the plugin adjusts it before anything of it exists.

        Raises:
            CRIError: the plugin refused it.
        """
        async with self._lock:
            pod = self.pods[message.pod_sandbox_id]
            payload = await self._call(
                "CreateContainer", pb.CreateContainerRequest(pod=pod, container=message)
            )
            answer = pb.CreateContainerResponse.FromString(payload)
            message.annotations.update(answer.adjust.annotations)
            message.linux.resources.MergeFrom(answer.adjust.linux.resources)
            self._apply(answer.update)
            container = DemoContainer(message=message, machine=self._machine)
            self.containers[message.id] = container
            await self._event("PostCreateContainer", pod=pod, container=container.shown())
            return container

    async def start_container(self, container: DemoContainer) -> None:
        """Start a created container."""
        async with self._lock:
            pod = self.pods[container.message.pod_sandbox_id]
            await self._event("StartContainer", pod=pod, container=container.shown())
            container.state = State.RUNNING
            await self._event("PostStartContainer", pod=pod, container=container.shown())

    async def exit_container(self, container: DemoContainer) -> None:
        """Let a container end."""
        async with self._lock:
            await self._ended(container)

    async def remove_pod(self, pod_id: str) -> None:
        """Stop a pod and remove it with its containers."""
        async with self._lock:
            pod = self.pods[pod_id]
            own = [c for c in self.containers.values() if c.message.pod_sandbox_id == pod_id]
            for container in own:
                await self._ended(container)
            await self._event("StopPodSandbox", pod=pod)
            for container in own:
                await self._event("RemoveContainer", pod=pod, container=container.shown())
                del self.containers[container.message.id]
            await self._event("RemovePodSandbox", pod=pod)
            del self.pods[pod_id]

    async def _ended(self, container: DemoContainer) -> None:
        if container.state is State.EXITED:
            return
        container.state = State.EXITED
        pod = self.pods[container.message.pod_sandbox_id]
        request = pb.StopContainerRequest(pod=pod, container=container.shown())
        payload = await self._call("StopContainer", request)
        self._apply(pb.StopContainerResponse.FromString(payload).update)

    def _apply(self, updates: Iterable[pb.ContainerUpdate]) -> None:
        for update in updates:
            container = self.containers.get(update.container_id)
            if container is not None and container.state is not State.EXITED:
                container.message.linux.resources.MergeFrom(update.linux.resources)

    # --- the plugin -------------------------------------------------------------------------------

    def _accept(self) -> asyncio.BaseProtocol:
        plugin = _Plugin(RuntimeSession())

        def handle(event: ev.RuntimeEvent) -> None:
            match event:
                case ev.RegisterRequested():
                    plugin.session.reply(event.stream)
                    self._spawn(self._welcome(plugin))
                case ev.Answered():
                    if (waiting := plugin.calls.pop(event.stream, None)) and not waiting.done():
                        waiting.set_result(event)
                case ev.UpdateContainersRequested():
                    self._spawn(self._unsolicited(plugin, event))

        plugin.transport = SessionTransport(plugin.session, handle)
        plugin.transport.ended.add_done_callback(lambda _: self._left(plugin))
        return plugin.transport

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _left(self, plugin: _Plugin) -> None:
        if plugin is self._plugin:
            self._plugin = None
            self.connected.clear()
        for waiting in plugin.calls.values():
            if not waiting.done():
                waiting.set_exception(CRIError("the plugin ended"))

    async def _welcome(self, plugin: _Plugin) -> None:
        """Configure and synchronize a plugin that has registered."""
        async with self._lock:
            self._plugin = plugin
            await self._call(
                "Configure",
                pb.ConfigureRequest(
                    runtime_name="containerd",  # whose ways it has
                    runtime_version="v2.4.0",
                    NRI_version="v0.12.2",
                    registration_timeout=int(ANSWER_SECONDS * 1000),
                    request_timeout=int(ANSWER_SECONDS * 1000),
                ),
            )
            live = [c.shown() for c in self.containers.values() if c.state is not State.EXITED]
            request = pb.SynchronizeRequest(pods=list(self.pods.values()), containers=live)
            payload = await self._call("Synchronize", request)
            self._apply(pb.SynchronizeResponse.FromString(payload).update)
        self.connected.set()

    async def _unsolicited(self, plugin: _Plugin, event: ev.UpdateContainersRequested) -> None:
        async with self._lock:
            self._apply(event.request.update)
        if plugin is self._plugin and plugin.transport is not None:
            plugin.session.reply(event.stream, pb.UpdateContainersResponse())
            plugin.transport.flush()

    async def _event(self, method: str, **parts: Message) -> None:
        await self._call(method, PLUGIN_METHODS[method](**parts))

    async def _call(self, method: str, request: Message) -> bytes:
        """What the plugin answers; empty while none is connected, as with a real runtime.

        Raises:
            CRIError: it refused, or did not answer in time.
        """
        plugin = self._plugin
        if plugin is None or plugin.transport is None:
            return b""
        stream = plugin.session.request(method, request)
        answer: asyncio.Future[ev.Answered] = asyncio.get_running_loop().create_future()
        plugin.calls[stream] = answer
        plugin.transport.flush()
        try:
            answered = await asyncio.wait_for(answer, ANSWER_SECONDS)
        except TimeoutError:
            raise CRIError(f"no answer to {method} within {ANSWER_SECONDS:g} s") from None
        if answered.status is not None:
            code = answered.status.code
            raise CRIError(f"rpc error: code = {code} desc = {answered.status.message}")
        return answered.payload
