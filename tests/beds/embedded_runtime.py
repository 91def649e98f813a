"""The runtime in memory with what only tests need: versions, faults, several plugins, resizes.

`EmbeddedRuntime` asks plugins about every pod and container operation in the order and with the
consequences of containerd: plugins in index order, one operation at a time, two seconds for an
answer, and an operation that goes on unmodified when there is none. What a container "has" is what
its stored spec says after every adjustment and update, checked against the machine as the kernel
would, or what its cgroup says, where it has one.

::

    async with EmbeddedRuntime(path) as runtime:
        await runtime.wait_for_plugin()
        pod = await runtime.run_pod(pb.PodSandbox(name="web", namespace="default"))
        web = await runtime.create_container(pod.id, pb.Container(name="app"))
        await runtime.start_container(web.id)
        print(web.cpus, web.mems)
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from nri_numa.demo.runtime import (
    DemoContainer,
    DemoContainerState,
    DemoRuntime,
    PluginLost,
    PluginPeer,
    PodOperationFailed,
)
from nri_numa.machine.cgroups import cgroup_relative_path
from nri_numa.model.cpuset import CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import Topology
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire import ttrpc
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.session import Phase
from nri_numa.nri.wire.versions import Event, identity_problem
from tests.beds.cgroup_tree import CgroupTree
from tests.machines import named as machines

EVENTS_OF_0_2: Final = 0x07FF
"""What every runtime knows: the eleven events of NRI 0.2."""
EVENTS_OF_0_10: Final = 0x3FFF
"""With the pod updates and the validation of NRI 0.10."""
MAX_SLICE_BYTES: Final = ttrpc.MAX_MESSAGE_BODY_BYTES - 4096
"""Of one Synchronize message; the envelope needs a little."""
LEAST_SLICE: Final = 4
"""Objects of one kind in a slice that was made small because of its size."""
KEPT_RECORDS: Final = 10_000
"""Records that are remembered, of calls and of departures."""
REGISTRATION_TIMEOUT_S: Final = 5.0
FOUR_CPUS: Final = machines.single_no_smt()
_STATE_CHANGES: Final = {
    event.method_name: event.name
    for event in Event
    if event
    not in (
        Event.CREATE_CONTAINER,
        Event.UPDATE_CONTAINER,
        Event.STOP_CONTAINER,
        Event.UPDATE_POD_SANDBOX,
    )
}
"""Events without a result, by method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedProfile:
    """How a runtime of a certain version behaves.

    Attributes:
        nri_version: what it tells as the NRI release; empty before NRI 0.12.
        tells_timeouts: NRI 0.7 and later tell their timeouts.
        per_event: one method for each event; False sends StateChange, as older ones do.
        oci_create_event: see `DemoRuntime`.
        is_crio: it behaves as the recordings of CRI-O show (tests/golden/recordings).
        fills_names: containers have their name beside its label.
    """

    name: str = "containerd"
    version: str = "v2.4.0"
    nri_version: str = "v0.12.2"
    tells_timeouts: bool = True
    events: int = EVENTS_OF_0_10
    per_event: bool = True
    update_failures_as_list: bool = False
    oci_create_event: Event = Event.START_CONTAINER
    is_crio: bool = False
    fills_names: bool = True


CONTAINERD_2_4: Final = EmbeddedProfile()
CONTAINERD_2_1: Final = EmbeddedProfile(
    version="2.1.9+unknown", nri_version="", events=EVENTS_OF_0_2, per_event=False
)
CONTAINERD_1_7: Final = EmbeddedProfile(
    version="1.7.24~ds1",
    nri_version="",
    tells_timeouts=False,
    events=EVENTS_OF_0_2,
    per_event=False,
)
CRI_O_1_35: Final = EmbeddedProfile(
    name="cri-o",
    version="1.35.0",
    nri_version="",
    per_event=False,
    oci_create_event=Event.POST_CREATE_CONTAINER,
    is_crio=True,
    fills_names=False,
)
CRI_O_1_37: Final = replace(
    CRI_O_1_35, version="1.37.0", nri_version="v0.12.0", per_event=True, fills_names=True
)


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong on purpose. The defaults do nothing; change them while the runtime runs.

    Attributes:
        configure_first: Configure is sent before the registration is answered.
        delays: seconds to wait before a request of this method is sent, by method.
        drop_in: the method whose next request is cut in the middle, with the connection.
        unknown_fields: requests have a field 1000, as a peer of a later release may add one.
        reports_ignored: an update that fails fails UpdateContainers, whatever the plugin says.
        metadata: what is sent along with each request.
        fails_oci_create: the OCI runtime makes no container, as of a program that does not exist.
    """

    configure_first: bool = False
    delays: dict[str, float] = field(default_factory=dict)
    drop_in: str = ""
    unknown_fields: bool = False
    reports_ignored: bool = False
    fails_oci_create: bool = False
    metadata: dict[str, str] = field(
        default_factory=lambda: {"containerd-namespace-ttrpc": "k8s.io"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One request to a plugin, for reports and tests."""

    plugin: str
    method: str
    seconds: float
    outcome: str


class EmbeddedPeer(PluginPeer):
    """One plugin, and the faults of its connection.

    Attributes:
        launched: pre-installed; name and index come from the runtime.
    """

    def __init__(self, runtime: EmbeddedRuntime) -> None:
        super().__init__(runtime.request_timeout, runtime._on_plugin_request)
        self.name, self.index, self.launched = "", "", False
        self.config = ""
        self._runtime = runtime
        self._synchronize_until = 0.0

    @property
    def id(self) -> str:
        """``NN-name``, as in logs and conflict texts."""
        return f"{self.index}-{self.name}"

    def is_active(self) -> bool:
        """Whether the connection is neither closed nor about to be."""
        return not (self.transport.is_closing() or self.transport.ended.done())

    def reject(self, stream: int, message: str) -> None:
        self.session.reply_error(stream, message)
        self.transport.flush_session()

    def send_reply(self, stream: int, response: Message | None = None) -> None:
        if response is None and self._runtime.faults.configure_first:
            asyncio.get_running_loop().call_soon(super().send_reply, stream)
        else:
            super().send_reply(stream, response)

    async def call_method(self, method: str, request: Message) -> bytes:
        if method in _STATE_CHANGES and not self._runtime.profile.per_event:
            parts: Any = {part.name: message for part, message in request.ListFields()}
            request = pb.StateChangeEvent(event=_STATE_CHANGES[method], **parts)
            method = "StateChange"
        if self._runtime.faults.unknown_fields:
            request = type(request).FromString(request.SerializeToString() + b"\xc2\x3e\x05later")
        loop = asyncio.get_running_loop()
        begun, outcome = loop.time(), "ok"
        try:
            if delay := self._runtime.faults.delays.get(method, 0.0):
                await asyncio.sleep(delay)
            return await self._checked_call(method, request)
        except PodOperationFailed as error:
            outcome = str(error)
            if self._runtime.profile.is_crio and not isinstance(error, PluginLost):
                raise PodOperationFailed(outcome.partition(" desc = ")[2]) from None
            raise
        finally:
            seconds = loop.time() - begun
            self._runtime.calls.append(
                CallRecord(plugin=self.id, method=method, seconds=seconds, outcome=outcome)
            )

    async def _checked_call(self, method: str, request: Message) -> bytes:
        """Call, and check what a runtime does not forgive."""
        match request:
            case pb.SynchronizeRequest():  # the time is that of all slices
                now = asyncio.get_running_loop().time()
                self._synchronize_until = self._synchronize_until or now + self.timeout_s
                self.timeout_s = max(self._synchronize_until - now, 0.001)
                payload = await super().call_method(method, request)
                self.timeout_s = self._runtime.request_timeout
                response = pb.SynchronizeResponse.FromString(payload)
                if request.more and (response.update or not response.more):
                    raise PluginLost("plugin does not handle split sync requests")
            case pb.CreateContainerRequest():
                payload = await super().call_method(method, request)
                updates = pb.CreateContainerResponse.FromString(payload).update
                assert request.container.id not in {update.container_id for update in updates}
            case pb.ConfigureRequest():
                payload = await super().call_method(method, request)
                events = pb.ConfigureResponse.FromString(payload).events
                if events & ~self._runtime.profile.events:
                    raise PluginLost(f"invalid plugin events: {events:#x}")
                events = events or self._runtime.profile.events
                return pb.ConfigureResponse(events=events).SerializeToString()
            case _:
                payload = await super().call_method(method, request)
        return payload

    def _send_request(self, method: str, request: Message) -> int:
        faults = self._runtime.faults
        stream = self.session.call_plugin(
            method, request, timeout_nano=int(self.timeout_s * 1e9), metadata=faults.metadata
        )
        if faults.drop_in == method:
            faults.drop_in = ""
            data = self.session.data_to_send()
            assert self.transport._transport is not None
            self.transport._transport.write(data[: len(data) // 2])
            self.transport.close_or_abort("dropped on purpose")
        return stream


class _ById(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        raise PodOperationFailed(f"{key}: not found")


class EmbeddedRuntime(DemoRuntime):
    """The runtime role for tests.

    Attributes:
        faults: what goes wrong on purpose; may be changed at any time.
        stopped_pods: ids of pods whose sandbox has ended.
    """

    rejectable_events = (
        *DemoRuntime.rejectable_events,
        Event.UPDATE_POD_SANDBOX,
        Event.UPDATE_CONTAINER,
    )

    def __init__(
        self,
        socket_path: str,
        *,
        profile: EmbeddedProfile = CONTAINERD_2_4,
        topology: Topology = FOUR_CPUS,
        cgroups: CgroupTree | None = None,
        request_timeout: float = 2.0,
        slice_objects: int | None = None,
        faults: Faults | None = None,
    ) -> None:
        """Make a runtime; it listens from `start` on.

        `cgroups`: those of containers and pods; they have none when None.
        `request_timeout`: seconds for every answer, and for a whole synchronisation.
        `slice_objects`: pods and containers of one Synchronize message; None sends all in one
        and slices only above 4 MiB.
        """
        super().__init__(socket_path, topology, Path("/nowhere"))
        self.pods, self.containers = _ById(), _ById()
        self.faults = faults if faults is not None else Faults()
        self.profile, self.request_timeout = profile, request_timeout
        self.oci_create_event = profile.oci_create_event
        self.calls: deque[CallRecord] = deque(maxlen=KEPT_RECORDS)
        self.closed: deque[str] = deque(maxlen=KEPT_RECORDS)
        self.stopped_pods = set[str]()
        self._older_pods = set[str]()  # containerd tells nobody of their end (containerd#8426)
        self._failed_updates: list[pb.ContainerUpdate] = []
        self._created_resources: dict[str, pb.LinuxResources] = {}  # what CRI-O has on disk
        self._cgroup_tree, self._slice_objects = cgroups, slice_objects
        self._ids = itertools.count(1)

    async def __aenter__(self) -> EmbeddedRuntime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, whatever lies where the socket is to be."""
        Path(self._path).unlink(missing_ok=True)
        await super().start()

    async def stop(self) -> None:
        """Hang up on every plugin and stop listening; the world stays, as after a restart."""
        self._older_pods |= self.pods.keys()
        if self.profile.is_crio:
            for container_id, created in self._created_resources.items():
                if container_id in self.containers:
                    resources = self.containers[container_id].message.linux.resources
                    resources.CopyFrom(created)
        await super().stop()

    # --- plugins ----------------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[str, ...]:
        """The ids of the active plugins, in the order they are asked."""
        return tuple(_known(peer).id for peer in self._plugins if _known(peer).is_active())

    async def wait_for_plugin(self, *, limit: float = 60.0) -> None:
        """Wait until a plugin is active; TimeoutError after `limit` seconds."""
        async with asyncio.timeout(limit):
            while not self.plugins:
                self.connected.clear()
                await self.connected.wait()

    async def disconnect_plugins(self) -> None:
        for peer in list(self._peers):
            await peer.transport.close_and_wait("disconnected on purpose")

    async def adopt(self, sock: socket.socket, *, name: str, index: str, config: str = "") -> None:
        """Serve a plugin this runtime launched, over one end of a socket pair.

        `name`: plugin name; what the plugin registers with is ignored.
        """
        peer = _known(self._add_peer())
        peer.name, peer.index, peer.launched, peer.config = name, index, True, config
        await asyncio.get_running_loop().create_unix_connection(lambda: peer.transport, sock=sock)

    def _new_peer(self) -> PluginPeer:
        peer = EmbeddedPeer(self)
        asyncio.get_running_loop().call_later(
            REGISTRATION_TIMEOUT_S,
            lambda: (
                peer.session.phase is Phase.CONNECTED
                and peer.transport.close_or_abort("no registration")
            ),
        )
        return peer

    def _remove_peer(self, peer: PluginPeer) -> None:
        super()._remove_peer(peer)
        self.closed.append(f"{_known(peer).id}: {peer.transport.ended.result().detail}")

    async def _admit_plugin(self, peer: PluginPeer, registration: ev.RegisterRequested) -> None:
        peer = _known(peer)
        if not peer.launched:
            peer.name, peer.index = registration.name, registration.index
            if (problem := identity_problem(peer.name, peer.index)) is not None:
                # As in the real one the socket stays open; it is for the plugin to go.
                peer.reject(registration.stream, f"invalid plugin: {problem}")
                return
        await super()._admit_plugin(peer, registration)
        # By index as text; equal indices by name, so that tests see one order.
        self._plugins.sort(key=lambda each: (_known(each).index, _known(each).name))

    def _configure_request(self, peer: PluginPeer) -> pb.ConfigureRequest:
        timeouts = {
            "registration_timeout": int(REGISTRATION_TIMEOUT_S * 1000),
            "request_timeout": int(self.request_timeout * 1000),
        }
        return pb.ConfigureRequest(
            config=_known(peer).config,
            runtime_name=self.profile.name,
            runtime_version=self.profile.version,
            NRI_version=self.profile.nri_version,
            **(timeouts if self.profile.tells_timeouts else {}),
        )

    def _synchronize_requests(self, peer: PluginPeer) -> list[pb.SynchronizeRequest]:
        # NRI before 0.7, which tells no timeouts, never synchronises what it launched.
        if _known(peer).launched and not self.profile.tells_timeouts:
            return []
        (whole,) = super()._synchronize_requests(peer)
        pods, containers = whole.pods, whole.containers
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
        return requests

    async def _on_push(self, peer: PluginPeer, event: ev.UpdateContainersRequested) -> None:
        async with self._lock:
            self._failed_updates.clear()
            self._apply_updates(event.request.update)
            failed = [
                update
                for update in self._failed_updates
                if self.faults.reports_ignored or not update.ignore_failure
            ]
        peer = _known(peer)
        if not peer.is_active():
            return
        if failed and not self.profile.update_failures_as_list:
            peer.reject(event.stream, "NRI update of some containers failed")
        else:
            peer.send_reply(event.stream, pb.UpdateContainersResponse(failed=failed))

    # --- pods -------------------------------------------------------------------------------------

    async def run_pod(self, pod: pb.PodSandbox) -> pb.PodSandbox:
        """Run a pod sandbox.

        Args:
            pod: id and uid are made up when empty.
        """
        message = pb.PodSandbox()
        message.CopyFrom(pod)
        message.id = message.id or self._new_id()
        message.uid = message.uid or message.id[:36]
        if self.profile.is_crio:
            message.labels["io.kubernetes.container.name"] = "POD"
        else:
            message.pid = message.pid or os.getpid()
        if self._cgroup_tree is not None and message.linux.cgroups_path:
            self._cgroup_tree.write(self._sandbox_directory(message))
        try:
            await self.run_pod_sandbox(message)
        except PodOperationFailed:
            await self.remove_pod(message.id)
            raise
        return message

    async def update_pod(self, pod_id: str, resources: pb.LinuxResources) -> None:
        """Change the resources of a pod; nothing but the events happens."""
        async with self._lock:
            pod = self.pods[pod_id]
            await self._send_event(Event.UPDATE_POD_SANDBOX, pod, linux_resources=resources)
            pod.linux.pod_resources.CopyFrom(resources)
            await self._send_event(Event.POST_UPDATE_POD_SANDBOX, pod)

    async def stop_pod(self, pod_id: str) -> None:
        """Stop a pod: its containers first, then the sandbox. A second time does nothing."""
        async with self._lock:
            await self._stop_pod(self.pods[pod_id])

    async def _stop_pod(self, pod: pb.PodSandbox) -> None:
        if pod.id not in self.stopped_pods:
            if self.profile.is_crio:  # a created container has a process, too
                for container in self._containers_of(pod):
                    await self._stop_container(container)
            await super()._stop_pod(pod)

    def end_sandbox(self, pod_id: str) -> None:
        """End the process of a sandbox: that is no call, and no event."""
        pod = self.pods[pod_id]
        self.stopped_pods.add(pod_id)
        pod.pid = 0
        if self._cgroup_tree is not None and pod.linux.cgroups_path:
            self._cgroup_tree.remove(self._sandbox_directory(pod))

    @staticmethod
    def _sandbox_directory(pod: pb.PodSandbox) -> str:
        """Return the cgroup of a sandbox: without an infra container CRI-O makes no scope."""
        return cgroup_relative_path(pod.linux.cgroups_path).removesuffix(".scope")

    async def _send_event(
        self, event: Event, pod: pb.PodSandbox, container: pb.Container | None = None, **parts: Any
    ) -> list[pb.ContainerUpdate]:
        if event is Event.STOP_POD_SANDBOX:
            self.end_sandbox(pod.id)
        ends = event in (Event.STOP_POD_SANDBOX, Event.REMOVE_POD_SANDBOX)
        if ends and pod.id in self._older_pods:
            return []
        return await super()._send_event(event, pod, container, **parts)

    # --- containers -------------------------------------------------------------------------------

    async def create_container(self, pod_id: str, message: pb.Container) -> DemoContainer:
        """Create a container; plugins adjust it before anything of it exists."""
        pod = self.pods[pod_id]
        if pod_id in self.stopped_pods:
            raise PodOperationFailed(f"sandbox {pod_id} is not running")
        message = self._complete(pod, message)
        try:
            return await super().create_container(pod_id, message)
        except PodOperationFailed:
            if self.profile.is_crio:
                raise
            # Every plugin hears it, also those that were never asked.
            async with self._lock:
                gone = pb.Container(id=message.id, pod_sandbox_id=pod_id)
                self._apply_updates(await self._send_event(Event.STOP_CONTAINER, pod, gone))
                await self._send_event(Event.REMOVE_CONTAINER, pod, gone)
            raise

    async def start_container(self, container_id: str) -> None:
        container = self.containers[container_id]
        if container.state is not DemoContainerState.CREATED:
            raise PodOperationFailed(f"container {container_id} is {container.state.name}")
        # As with a real runtime: no StopContainer before the container is removed.
        if problem := self._cpuset_problem(container.message.linux.resources.cpu):
            container.state = DemoContainerState.EXITED
            raise PodOperationFailed(f"failed to create containerd task: OCI runtime: {problem}")
        try:
            await super().start_container(container_id)
        except PodOperationFailed:
            await self.stop_container(container_id)
            raise

    async def update_container(self, container_id: str, resources: pb.LinuxResources) -> None:
        """Change a container's resources, as CRI UpdateContainerResources does.

        `resources`: only what is to change; zero and empty mean "leave alone".
        """
        async with self._lock:
            container = self.containers[container_id]
            if container.state is DemoContainerState.EXITED:
                raise PodOperationFailed(f"container {container_id} is {container.state.name}")
            pod = self.pods[container.message.pod_sandbox_id]
            asked = pb.LinuxResources()
            asked.CopyFrom(resources)
            cpu = asked.cpu
            for wrapper in (cpu.shares, cpu.quota, cpu.period, asked.memory.limit):
                wrapper.SetInParent()  # converted from CRI they are always there
            updates = await self._send_event(
                Event.UPDATE_CONTAINER, pod, container.to_message(), linux_resources=asked
            )
            for own in updates:
                if own.container_id == container_id:
                    asked.MergeFrom(own.linux.resources)
            self._apply_updates(each for each in updates if each.container_id != container_id)
            final = pb.ContainerUpdate(
                container_id=container_id, linux=pb.LinuxContainerUpdate(resources=asked)
            )
            if problem := self._update_problem(final):
                raise PodOperationFailed(f"failed to update resources: {problem}")
            self._apply_updates([final])
            await self._send_container_event(Event.POST_UPDATE_CONTAINER, container)

    async def remove_container(self, container_id: str) -> None:
        async with self._lock:
            await self._remove_container(self.containers[container_id])

    async def _send_container_event(
        self, event: Event, container: DemoContainer
    ) -> list[pb.ContainerUpdate]:
        if event is self.oci_create_event:
            if self.faults.fails_oci_create:
                del self.containers[container.id]
                raise PodOperationFailed("container create failed: executable file not found")
            container.message.pid = os.getpid()
            self._created_resources[container.id] = pb.LinuxResources()
            self._created_resources[container.id].CopyFrom(container.message.linux.resources)
        if event is Event.POST_START_CONTAINER and self.profile.is_crio:
            message = container.to_message()
            message.state = pb.CONTAINER_CREATED
            return await self._send_event(event, self.pods[message.pod_sandbox_id], message)
        return await super()._send_container_event(event, container)

    async def _stop_container(self, container: DemoContainer) -> None:
        container.message.pid = 0
        await super()._stop_container(container)

    def _apply_adjustment(self, message: pb.Container, adjustment: pb.ContainerAdjustment) -> None:
        super()._apply_adjustment(message, adjustment)
        told = {variable.key: variable.value for variable in adjustment.env}
        kept = [each for each in message.env if each.partition("=")[0] not in told]
        message.env[:] = [*kept, *(f"{key}={value}" for key, value in told.items())]

    # --- what a kernel does -----------------------------------------------------------------------

    def _apply_updates(self, updates: Iterable[pb.ContainerUpdate]) -> None:
        """Do what a plugin wants; what fails containerd mostly only logs.

        NRI fails a request in whose answers a field of a container is set twice.
        """
        updates = list(updates)
        names = [update.container_id for update in updates]
        assert len(names) == len(set(names)), f"two updates for one container: {names}"
        for update in updates:
            if self._update_problem(update):
                self._failed_updates.append(update)
            else:
                super()._apply_updates([_given(update)])

    def _update_problem(self, update: pb.ContainerUpdate) -> str:
        """Return why the kernel would not take an update of a running container."""
        container = self.containers.get(update.container_id)
        if container is None or container.state is not DemoContainerState.RUNNING:
            return ""
        cpu = pb.LinuxCPU()
        cpu.CopyFrom(container.message.linux.resources.cpu)
        cpu.MergeFrom(update.linux.resources.cpu)
        return self._cpuset_problem(cpu)

    def _cpuset_problem(self, cpu: pb.LinuxCPU) -> str:
        """Return why the kernel would not take this cpuset; empty when it would."""
        try:
            cpus, mems = CPUSet.parse(cpu.cpus), NUMASet.parse(cpu.mems)
        except ListFormatError as error:
            return f"invalid argument: {error}"
        if not cpus <= self.machine.online:
            return f"cpuset.cpus {cpu.cpus}: numerical result out of range"
        if not mems <= self.machine.memory_nodes:
            return f"cpuset.mems {cpu.mems}: numerical result out of range"
        return ""

    def _new_container(self, message: pb.Container) -> DemoContainer:
        tree, path = self._cgroup_tree, message.linux.cgroups_path
        path = cgroup_relative_path(path)
        cgroup = Path("/nowhere") if tree is None or not path else tree.directory(path)
        return DemoContainer(message=message, machine=self.machine, cgroup=cgroup)

    def _write_cgroup(self, container: DemoContainer) -> None:
        cpu = container.message.linux.resources.cpu
        # A runtime that remembers no cpuset writes none.
        if self._cgroup_tree is not None and (cpu.cpus or not container.cgroup.exists()):
            path = cgroup_relative_path(container.message.linux.cgroups_path)
            self._cgroup_tree.write(path, cpu.cpus, cpu.mems)

    # --- what every container has -----------------------------------------------------------------

    def _complete(self, pod: pb.PodSandbox, container: pb.Container) -> pb.Container:
        """Return a copy with what every container has: ids, the kubelet's labels, sub-messages."""
        message = pb.Container()
        message.CopyFrom(container)
        message.id = message.id or self._new_id()
        message.pod_sandbox_id = pod.id
        for key, value in (
            ("io.kubernetes.container.name", message.name),
            ("io.kubernetes.pod.name", pod.name),
            ("io.kubernetes.pod.namespace", pod.namespace),
            ("io.kubernetes.pod.uid", pod.uid),
            *([] if self.profile.is_crio else [("io.cri-containerd.kind", "container")]),
        ):
            if key not in message.labels:
                message.labels[key] = value
        if not self.profile.fills_names:
            message.name = ""
        if self.profile.is_crio:
            message.annotations.MergeFrom(pod.annotations)
            message.annotations["io.kubernetes.cri-o.ContainerType"] = "container"
            message.linux.resources.cpu.quota.SetInParent()  # 0 where there is none
        # What plugins always find in a container.
        message.hooks.SetInParent()
        message.linux.resources.memory.SetInParent()
        message.linux.resources.cpu.SetInParent()
        return message

    def _new_id(self) -> str:
        """Return 64 hexadecimal digits, the same sequence in every run."""
        return hashlib.sha256(str(next(self._ids)).encode()).hexdigest()


def _known(peer: PluginPeer) -> EmbeddedPeer:
    assert isinstance(peer, EmbeddedPeer)
    return peer


def _given(update: pb.ContainerUpdate) -> pb.ContainerUpdate:
    """Return the update without the wrappers that are present and zero: not part of it."""
    given = pb.ContainerUpdate()
    given.CopyFrom(update)
    for part in (given.linux.resources.cpu, given.linux.resources.memory):
        for descriptor, value in part.ListFields():
            if descriptor.message_type is not None and not value.value:
                part.ClearField(descriptor.name)
    return given
