"""Container runtime of the demo: NRI for one plugin, pods and containers in memory.

It starts no process, and a cgroup is a directory with two files, which the plugin writes like the
kernel's. As in a runtime, a container's stored spec has every adjustment and update of the plugin.
"""

from __future__ import annotations

import asyncio
import enum
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nri_numa.model.machine import Topology
from nri_numa.nri.transport import SessionTransport
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import PLUGIN_METHODS, RuntimeSession

PLUGIN_ANSWER_TIMEOUT_S = 10.0
"""Seconds for one answer; long, because without one a container starts without the plugin."""


class PodOperationFailed(Exception):
    """A failed pod or container operation; the text is the error that a kubelet would get."""


class DemoContainerState(enum.Enum):
    """State of a container."""

    CREATED = pb.CONTAINER_CREATED
    RUNNING = pb.CONTAINER_RUNNING
    EXITED = pb.CONTAINER_STOPPED


@dataclass(slots=True, kw_only=True)
class DemoContainer:
    """A container: stored spec, cgroup and state."""

    message: pb.Container
    machine: Topology
    cgroup: Path
    state: DemoContainerState = DemoContainerState.CREATED

    @property
    def name_in_pod(self) -> str:
        """The name within its pod."""
        return self.message.name

    @property
    def cpus(self) -> str:
        """CPU list of the CPUs it may run on; every CPU if its cpuset is empty."""
        spec = self.message.linux.resources.cpu.cpus or str(self.machine.online)
        return self._read_cgroup_file("cpuset.cpus", spec)

    @property
    def mems(self) -> str:
        """List of its memory nodes; every one if its cpuset is empty."""
        spec = self.message.linux.resources.cpu.mems or str(self.machine.memory_nodes)
        return self._read_cgroup_file("cpuset.mems", spec)

    def _read_cgroup_file(self, name: str, spec: str) -> str:
        path = self.cgroup / name
        while path.exists():
            if text := path.read_text().strip():  # unlike the kernel's, empty while written
                return text
        return spec

    def write_cgroup_cpuset(self) -> None:
        """Write the cpuset as a runtime does at the start and for updates."""
        self.cgroup.mkdir(parents=True, exist_ok=True)
        cpu = self.message.linux.resources.cpu
        for name, spec in (("cpuset.cpus", cpu.cpus), ("cpuset.mems", cpu.mems)):
            default = self.machine.online if name == "cpuset.cpus" else self.machine.memory_nodes
            (self.cgroup / name).write_text(spec or str(default))

    def to_message(self) -> pb.Container:
        """Build the message that the plugin gets about it."""
        message = pb.Container()
        message.CopyFrom(self.message)
        message.state = self.state.value
        return message


class DemoRuntime:
    """The runtime's side of NRI over a unix socket; ``connected`` means a synchronized plugin."""

    def __init__(self, socket_path: str, machine: Topology, cgroups: Path) -> None:
        self._cpusets = cgroups / "cpuset"
        self._cpusets.mkdir(parents=True)
        self.pods: dict[str, pb.PodSandbox] = {}
        self.containers: dict[str, DemoContainer] = {}
        self.connected = asyncio.Event()
        self._path, self._machine = socket_path, machine
        # Session of the registered plugin, and calls without an answer.
        self._session = RuntimeSession()
        self._transport: SessionTransport[ev.RuntimeSessionEvent] | None = None
        self._calls: dict[int, asyncio.Future[ev.RequestAnswered]] = {}
        self._lock = asyncio.Lock()  # NRI's: one operation at a time on the whole node
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listen for the plugin."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._accept_plugin, self._path)

    async def stop(self) -> None:
        """Close the connection and stop listening."""
        if self._server is not None:
            self._server.close()
        if self._transport is not None:
            await self._transport.close_and_wait("the runtime stops")
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
            await self._call_plugin_for_payload("RunPodSandbox", pod=pod)

    async def create_container(self, message: pb.Container) -> DemoContainer:
        """Create a container with the adjustment of the plugin.

        Raises:
            PodOperationFailed: the plugin rejected it.
        """
        async with self._lock:
            pod = self.pods[message.pod_sandbox_id]
            message.linux.cgroups_path = f"/demo/{message.id}"
            payload = await self._call_plugin_for_payload(
                "CreateContainer", pod=pod, container=message
            )
            answer = pb.CreateContainerResponse.FromString(payload)
            message.annotations.update(answer.adjust.annotations)
            message.linux.resources.MergeFrom(answer.adjust.linux.resources)
            self._apply_updates(answer.update)
            container = DemoContainer(
                message=message, machine=self._machine, cgroup=self._cpusets / "demo" / message.id
            )
            self.containers[message.id] = container
            await self._call_plugin_about_container("PostCreateContainer", container)
            return container

    async def start_container(self, container: DemoContainer) -> None:
        """Start a created container."""
        async with self._lock:
            container.write_cgroup_cpuset()
            await self._call_plugin_about_container("StartContainer", container)
            container.state = DemoContainerState.RUNNING
            await self._call_plugin_about_container("PostStartContainer", container)

    async def exit_container(self, container: DemoContainer) -> None:
        """End a container."""
        async with self._lock:
            await self._exit_container_under_lock(container)

    async def remove_pod(self, pod_id: str) -> None:
        """Stop a pod and remove it with its containers."""
        async with self._lock:
            pod = self.pods[pod_id]
            members = [c for c in self.containers.values() if c.message.pod_sandbox_id == pod_id]
            for container in members:
                await self._exit_container_under_lock(container)
            await self._call_plugin_for_payload("StopPodSandbox", pod=pod)
            for container in members:
                await self._call_plugin_about_container("RemoveContainer", container)
                del self.containers[container.message.id]
            await self._call_plugin_for_payload("RemovePodSandbox", pod=pod)
            del self.pods[pod_id]

    async def _exit_container_under_lock(self, container: DemoContainer) -> None:
        if container.state is not DemoContainerState.EXITED:
            container.state = DemoContainerState.EXITED
            payload = await self._call_plugin_about_container("StopContainer", container)
            shutil.rmtree(container.cgroup, ignore_errors=True)
            self._apply_updates(pb.StopContainerResponse.FromString(payload).update)

    def _apply_updates(self, updates: Iterable[pb.ContainerUpdate]) -> None:
        for update in updates:
            container = self.containers.get(update.container_id)
            if container is not None and container.state is not DemoContainerState.EXITED:
                container.message.linux.resources.MergeFrom(update.linux.resources)
                if container.state is DemoContainerState.RUNNING:
                    container.write_cgroup_cpuset()

    # --- the plugin -------------------------------------------------------------------------------

    def _accept_plugin(self) -> asyncio.BaseProtocol:
        session = RuntimeSession()

        def on_session_event(event: ev.RuntimeSessionEvent) -> None:
            match event:
                case ev.RegisterRequested():
                    session.reply(event.stream)
                    self._run_in_background(self._configure_plugin(session, transport))
                case ev.RequestAnswered():
                    if (answer := self._calls.pop(event.stream, None)) and not answer.done():
                        answer.set_result(event)
                case ev.UpdateContainersRequested():
                    self._run_in_background(self._on_pushed_updates(event))

        transport = SessionTransport(session, on_session_event)
        transport.ended.add_done_callback(lambda _: self._on_plugin_exit(transport))
        return transport

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_plugin_exit(self, transport: SessionTransport[ev.RuntimeSessionEvent]) -> None:
        if transport is not self._transport:
            return
        self._transport = None
        self.connected.clear()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(PodOperationFailed("the plugin ended"))
        self._calls.clear()

    async def _configure_plugin(
        self, session: RuntimeSession, transport: SessionTransport[ev.RuntimeSessionEvent]
    ) -> None:
        """Configure and synchronize a plugin that has registered."""
        async with self._lock:
            self._session, self._transport = session, transport
            await self._call_plugin_for_payload(
                "Configure",
                runtime_name="containerd",  # which it behaves like
                runtime_version="v2.4.0",
                NRI_version="v0.12.2",
                registration_timeout=int(PLUGIN_ANSWER_TIMEOUT_S * 1000),
                request_timeout=int(PLUGIN_ANSWER_TIMEOUT_S * 1000),
            )
            live = [
                c.to_message()
                for c in self.containers.values()
                if c.state is not DemoContainerState.EXITED
            ]
            pods = list(self.pods.values())
            payload = await self._call_plugin_for_payload("Synchronize", pods=pods, containers=live)
            self._apply_updates(pb.SynchronizeResponse.FromString(payload).update)
        self.connected.set()

    async def _on_pushed_updates(self, event: ev.UpdateContainersRequested) -> None:
        async with self._lock:
            self._apply_updates(event.request.update)
        if self._transport is not None:
            self._session.reply(event.stream, pb.UpdateContainersResponse())
            self._transport.flush_session()

    async def _call_plugin_about_container(self, method: str, container: DemoContainer) -> bytes:
        pod = self.pods[container.message.pod_sandbox_id]
        return await self._call_plugin_for_payload(
            method, pod=pod, container=container.to_message()
        )

    async def _call_plugin_for_payload(self, method: str, **parts: Any) -> bytes:
        """Call the plugin; an empty payload without one, as with a real runtime.

        Raises:
            PodOperationFailed: the plugin rejected it, or did not answer in time.
        """
        if self._transport is None:
            return b""
        stream = self._session.call_plugin(method, PLUGIN_METHODS[method](**parts))
        answer: asyncio.Future[ev.RequestAnswered] = asyncio.get_running_loop().create_future()
        self._calls[stream] = answer
        self._transport.flush_session()
        try:
            answered = await asyncio.wait_for(answer, PLUGIN_ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise PodOperationFailed(
                f"no answer to {method} within {PLUGIN_ANSWER_TIMEOUT_S:g} s"
            ) from None
        if answered.status is not None:
            code = answered.status.code
            raise PodOperationFailed(f"rpc error: code = {code} desc = {answered.status.message}")
        return answered.payload
