"""Container runtime in memory: the runtime's side of NRI, pods, containers, and their cgroups.

It starts no process, and a cgroup is a directory with two files, which the plugin writes like the
kernel's. As in a runtime, a container's stored spec has every adjustment and update of the plugin.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from nri_numa.model.machine import Topology
from nri_numa.nri.transport import SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PLUGIN_METHODS, RuntimeSession
from nri_numa.nri.wire.ttrpc import Code
from nri_numa.nri.wire.versions import Event

PLUGIN_ANSWER_TIMEOUT_S = 10.0
"""Seconds for one answer; long, because without one a container starts without the plugin."""


class PodOperationFailed(Exception):
    """A failed pod or container operation; the text is the error that a kubelet would get."""


class PluginLost(PodOperationFailed):
    """A call without an answer: the plugin ended or was too slow, and its connection is closed."""


class DemoContainerState(enum.Enum):
    """State of a container."""

    CREATED = pb.CONTAINER_CREATED
    RUNNING = pb.CONTAINER_RUNNING
    EXITED = pb.CONTAINER_STOPPED


@dataclass(slots=True, kw_only=True)
class DemoContainer:
    """A container: stored spec, cgroup and state; ``stop_sent`` if StopContainer was sent."""

    message: pb.Container
    machine: Topology
    cgroup: Path
    state: DemoContainerState = DemoContainerState.CREATED
    stop_sent: bool = False

    @property
    def id(self) -> str:
        """The ID."""
        return self.message.id

    @property
    def cpus(self) -> str:
        """CPU list of the CPUs it may run on; every CPU if its cpuset is empty."""
        spec = self.message.linux.resources.cpu.cpus
        return self._read_cgroup_file("cpuset.cpus", spec) or str(self.machine.online)

    @property
    def mems(self) -> str:
        """List of its memory nodes; every one if its cpuset is empty."""
        spec = self.message.linux.resources.cpu.mems
        return self._read_cgroup_file("cpuset.mems", spec) or str(self.machine.memory_nodes)

    def _read_cgroup_file(self, name: str, spec: str) -> str:
        with contextlib.suppress(FileNotFoundError):
            # Unlike the kernel's, a file is empty while it is written.
            while not (text := (self.cgroup / name).read_text().strip()) and spec:
                pass
            return text
        return spec

    def to_message(self) -> pb.Container:
        """Build the message that the plugin gets about it."""
        message = pb.Container()
        message.CopyFrom(self.message)
        message.state = self.state.value
        return message


class PluginPeer:
    """Connection to a plugin; ``events`` is the mask of the events that it subscribes to."""

    def __init__(self, timeout_s: float, on_request: Callable[[Any, Any], None]) -> None:
        self.events = 0
        self.timeout_s = timeout_s
        self.session = RuntimeSession()
        self.transport = SessionTransport(self.session, self._on_session_event)
        self._on_request = on_request
        self._calls: dict[int, asyncio.Future[ev.RequestAnswered]] = {}

    def _on_session_event(self, event: ev.RuntimeSessionEvent) -> None:
        if isinstance(event, ev.RegisterRequested | ev.UpdateContainersRequested):
            self._on_request(self, event)
        elif (answer := self._calls.pop(event.stream, None)) and not answer.done():
            answer.set_result(event)

    def send_reply(self, stream: int, response: Message | None = None) -> None:
        """Answer a request of the plugin."""
        self.session.reply(stream, response)
        self.transport.flush_session()

    async def call_method(self, method: str, request: Message) -> bytes:
        """Call the plugin; an error answer is `PodOperationFailed`, none is `PluginLost`."""
        if self.transport.is_closing() or self.transport.ended.done():
            raise PluginLost("the connection is closed")
        stream = self._send_request(method, request)
        answer: asyncio.Future[ev.RequestAnswered] = asyncio.get_running_loop().create_future()
        self._calls[stream] = answer
        self.transport.flush_session()
        futures: set[asyncio.Future[Any]] = {answer, self.transport.ended}
        await asyncio.wait(futures, timeout=self.timeout_s, return_when="FIRST_COMPLETED")
        if not answer.done():
            self.transport.close_or_abort(f"no answer to {method} within {self.timeout_s:g} s")
            raise PluginLost((await self.transport.wait_closed()).detail)
        if (status := answer.result().status) is not None:
            code = Code(status.code).name.title().replace("_", "")  # as gRPC prints it
            raise PodOperationFailed(f"rpc error: code = {code} desc = {status.message}")
        return answer.result().payload

    def _send_request(self, method: str, request: Message) -> int:
        return self.session.call_plugin(method, request)


class DemoRuntime:
    """The runtime's side of NRI over a unix socket; ``connected`` means a synchronized plugin.

    Its order of events is containerd's; ``oci_create_event`` is the one before which a container
    gets its cgroup. An error answer to one of ``rejectable_events`` fails the operation.
    """

    oci_create_event = Event.START_CONTAINER
    rejectable_events = (Event.RUN_POD_SANDBOX, Event.CREATE_CONTAINER, Event.START_CONTAINER)

    def __init__(self, socket_path: str, machine: Topology, cgroups: Path) -> None:
        self._cpusets = cgroups / "cpuset"
        self.pods: dict[str, pb.PodSandbox] = {}
        self.containers: dict[str, DemoContainer] = {}
        self.connected = asyncio.Event()
        self.machine, self._path = machine, socket_path
        self._peers: list[PluginPeer] = []
        self._plugins: list[PluginPeer] = []  # the synchronized peers, in the order of calls
        self._lock = asyncio.Lock()  # NRI's: one operation at a time on the whole node
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen for plugins."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: self._add_peer().transport, self._path)

    async def stop(self) -> None:
        """Close the connections and stop listening; pods and containers remain."""
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            await peer.transport.close_and_wait("the runtime stops")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- pods and containers ----------------------------------------------------------------------

    async def run_pod_sandbox(self, pod: pb.PodSandbox) -> None:
        """Run a sandbox.

        Raises:
            PodOperationFailed: the plugin rejected it.
        """
        async with self._lock:
            self.pods[pod.id] = pod
            await self._send_event(Event.RUN_POD_SANDBOX, pod)

    async def create_container(self, pod_id: str, message: pb.Container) -> DemoContainer:
        """Create a container with the adjustment of the plugin.

        Raises:
            PodOperationFailed: the plugin rejected it.
        """
        async with self._lock:
            pod = self.pods[pod_id]
            container = self._new_container(message)
            self._apply_updates(await self._send_event(Event.CREATE_CONTAINER, pod, message))
            self.containers[message.id] = container
            await self._send_container_event(Event.POST_CREATE_CONTAINER, container)
            return container

    async def start_container(self, container_id: str) -> None:
        """Start a created container."""
        async with self._lock:
            container = self.containers[container_id]
            await self._send_container_event(Event.START_CONTAINER, container)
            container.state = DemoContainerState.RUNNING
            await self._send_container_event(Event.POST_START_CONTAINER, container)

    async def stop_container(self, container_id: str) -> None:
        """End a container."""
        async with self._lock:
            await self._stop_container(self.containers[container_id])

    async def remove_pod(self, pod_id: str) -> None:
        """Stop a pod and remove it with its containers."""
        async with self._lock:
            pod = self.pods[pod_id]
            await self._stop_pod(pod)
            for container in self._containers_of(pod):
                await self._remove_container(container)
            await self._send_event(Event.REMOVE_POD_SANDBOX, pod)
            del self.pods[pod_id]

    def _containers_of(self, pod: pb.PodSandbox) -> list[DemoContainer]:
        return [c for c in self.containers.values() if c.message.pod_sandbox_id == pod.id]

    def _new_container(self, message: pb.Container) -> DemoContainer:
        message.linux.cgroups_path = f"/demo/{message.id}"
        cgroup = self._cpusets / "demo" / message.id
        return DemoContainer(message=message, machine=self.machine, cgroup=cgroup)

    async def _stop_container(self, container: DemoContainer) -> None:
        if not container.stop_sent:
            container.state, container.stop_sent = DemoContainerState.EXITED, True
            shutil.rmtree(container.cgroup, ignore_errors=True)
            self._apply_updates(await self._send_container_event(Event.STOP_CONTAINER, container))

    async def _stop_pod(self, pod: pb.PodSandbox) -> None:
        for container in self._containers_of(pod):
            if container.state is DemoContainerState.RUNNING:  # others stop at their removal
                await self._stop_container(container)
        await self._send_event(Event.STOP_POD_SANDBOX, pod)

    async def _remove_container(self, container: DemoContainer) -> None:
        await self._stop_container(container)
        await self._send_container_event(Event.REMOVE_CONTAINER, container)
        del self.containers[container.id]

    def _apply_adjustment(self, message: pb.Container, adjustment: pb.ContainerAdjustment) -> None:
        message.annotations.update(adjustment.annotations)
        message.linux.resources.MergeFrom(adjustment.linux.resources)

    def _apply_updates(self, updates: Iterable[pb.ContainerUpdate]) -> None:
        for update in updates:
            container = self.containers.get(update.container_id)
            if container is not None and container.state is not DemoContainerState.EXITED:
                container.message.linux.resources.MergeFrom(update.linux.resources)
                if container.cgroup.exists():
                    self._write_cgroup(container)

    def _write_cgroup(self, container: DemoContainer) -> None:
        """Write the cpuset as a runtime does at the start and for updates."""
        container.cgroup.mkdir(parents=True, exist_ok=True)
        cpu, machine = container.message.linux.resources.cpu, container.machine
        (container.cgroup / "cpuset.cpus").write_text(cpu.cpus or str(machine.online))
        (container.cgroup / "cpuset.mems").write_text(cpu.mems or str(machine.memory_nodes))

    # --- plugins ----------------------------------------------------------------------------------

    def _add_peer(self) -> PluginPeer:
        peer = self._new_peer()
        self._peers.append(peer)
        peer.transport.ended.add_done_callback(lambda _: self._remove_peer(peer))
        return peer

    def _new_peer(self) -> PluginPeer:
        return PluginPeer(PLUGIN_ANSWER_TIMEOUT_S, self._on_plugin_request)

    def _remove_peer(self, peer: PluginPeer) -> None:
        self._peers.remove(peer)
        if peer in self._plugins:
            self._plugins.remove(peer)
        if not self._plugins:
            self.connected.clear()

    def _on_plugin_request(self, peer: PluginPeer, request: Any) -> None:
        is_registration = isinstance(request, ev.RegisterRequested)
        serve = self._admit_plugin if is_registration else self._on_push
        task = asyncio.create_task(serve(peer, request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _admit_plugin(self, peer: PluginPeer, registration: ev.RegisterRequested) -> None:
        """Configure and synchronize a plugin that has registered."""
        peer.send_reply(registration.stream)
        try:
            payload = await peer.call_method("Configure", self._configure_request(peer))
            peer.events = pb.ConfigureResponse.FromString(payload).events
            async with self._lock:
                for request in self._synchronize_requests(peer):
                    payload = await peer.call_method("Synchronize", request)
                    self._apply_updates(pb.SynchronizeResponse.FromString(payload).update)
                self._plugins.append(peer)
        except PodOperationFailed as error:
            peer.transport.close_or_abort(str(error))
        else:
            self.connected.set()

    def _configure_request(self, peer: PluginPeer) -> pb.ConfigureRequest:
        return pb.ConfigureRequest(
            runtime_name="containerd",  # which it behaves like
            runtime_version="v2.4.0",
            NRI_version="v0.12.2",
            registration_timeout=int(PLUGIN_ANSWER_TIMEOUT_S * 1000),
            request_timeout=int(PLUGIN_ANSWER_TIMEOUT_S * 1000),
        )

    def _synchronize_requests(self, peer: PluginPeer) -> list[pb.SynchronizeRequest]:
        live = (c for c in self.containers.values() if c.state is not DemoContainerState.EXITED)
        containers = [container.to_message() for container in live]
        return [pb.SynchronizeRequest(pods=self.pods.values(), containers=containers)]

    async def _on_push(self, peer: PluginPeer, event: ev.UpdateContainersRequested) -> None:
        async with self._lock:
            self._apply_updates(event.request.update)
        if not peer.transport.is_closing():
            peer.send_reply(event.stream, pb.UpdateContainersResponse())

    async def _send_container_event(
        self, event: Event, container: DemoContainer
    ) -> list[pb.ContainerUpdate]:
        if event is self.oci_create_event:
            self._write_cgroup(container)
        pod = self.pods[container.message.pod_sandbox_id]
        return await self._send_event(event, pod, container.to_message())

    async def _send_event(
        self, event: Event, pod: pb.PodSandbox, container: pb.Container | None = None, **parts: Any
    ) -> list[pb.ContainerUpdate]:
        """Send an event to its subscribers; return the updates of those that answer."""
        updates: list[pb.ContainerUpdate] = []
        method = event.method_name
        for peer in [peer for peer in self._plugins if peer.events & event.mask_bit]:
            if container is not None:
                parts["container"] = container
            try:
                payload = await peer.call_method(method, PLUGIN_METHODS[method](pod=pod, **parts))
            except PodOperationFailed as error:
                if event in self.rejectable_events and not isinstance(error, PluginLost):
                    raise
                continue
            answer: Any = getattr(pb, f"{method}Response", pb.Empty).FromString(payload)
            updates += getattr(answer, "update", ())
            if container is not None and event is Event.CREATE_CONTAINER:
                self._apply_adjustment(container, answer.adjust)
        return updates
