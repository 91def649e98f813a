"""A runtime that speaks as much CRI as the CRI link asks for, in memory, on a real gRPC socket.

It has what containerd has where it matters: the OCI spec in a verbose status, events without
replay, and updates that change the spec of a container that was created, and of one that runs.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from nri_numa.cri.pb import cri_pb2

Json = dict[str, Any]
_T = TypeVar("_T")


@dataclass
class SmallContainer:
    """One container; ``cpu`` is that of its OCI spec."""

    id: str
    pod: str
    name: str = "main"
    state: int = cri_pb2.CONTAINER_CREATED
    started_at: int = 0
    cpu: Json = field(default_factory=dict)
    memory: int = 1 << 20
    spec: Json = field(default_factory=dict)


class SmallCRI:
    """The runtime; usable as an asynchronous context manager."""

    def __init__(self, socket: Path, *, events: bool = True, verbose: bool = True) -> None:
        self.socket = socket
        self.events = events
        self.verbose = verbose
        self.pods: dict[str, cri_pb2.PodSandbox] = {}
        self.containers: dict[str, SmallContainer] = {}
        self.updates: list[tuple[str, str]] = []
        self.refuse_updates: set[str] = set()
        self.refuse_status: set[str] = set()
        self.hangs = False
        self.listeners: list[asyncio.Queue[Any]] = []
        self.listings = 0
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handlers = {
            name: unary(getattr(self, f"_{name}"), getattr(cri_pb2, f"{name}Request"))
            for name in (
                "Version", "ListPodSandbox", "PodSandboxStatus", "ListContainers",
                "ContainerStatus", "UpdateContainerResources",
            )
        }  # fmt: skip
        if self.events:
            handlers["GetContainerEvents"] = grpc.unary_stream_rpc_method_handler(
                self._GetContainerEvents,
                cri_pb2.GetEventsRequest.FromString,
                lambda message: message.SerializeToString(),
            )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("runtime.v1.RuntimeService", handlers),)
        )
        self.socket.unlink(missing_ok=True)
        self._server.add_insecure_port(f"unix://{self.socket}")
        await self._server.start()

    async def stop(self) -> None:
        """End; what runs is there again after `start`."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    # -- what happens ------------------------------------------------------------------------------

    def pod(self, pod_id: str, name: str = "", **annotations: str) -> None:
        """RunPodSandbox, with annotations of ours."""
        self.pods[pod_id] = cri_pb2.PodSandbox(
            id=pod_id,
            metadata=cri_pb2.PodSandboxMetadata(name=name or pod_id, namespace="ns", uid=pod_id),
            annotations={f"numa.kubernetes.io/{k}": v for k, v in annotations.items()},
        )
        self._tell(pod_id, pod_id, cri_pb2.CONTAINER_CREATED_EVENT)

    def create(self, container_id: str, pod_id: str, *, milli: int = 0, **more: Any) -> None:
        cpu = {"shares": milli * 1024 // 1000, "quota": milli * 100, "period": 100_000}
        one = SmallContainer(container_id, pod_id, cpu=cpu if milli else {}, **more)
        self.containers[container_id] = one
        self._tell(container_id, pod_id, cri_pb2.CONTAINER_CREATED_EVENT)

    def run(self, container_id: str, *, at: float = 1.0) -> None:
        """StartContainer, at a Unix time."""
        one = self.containers[container_id]
        one.state, one.started_at = cri_pb2.CONTAINER_RUNNING, int(at * 1e9)
        self._tell(container_id, one.pod, cri_pb2.CONTAINER_STARTED_EVENT)

    def resize(self, container_id: str, *, milli: int, memory: int = 1 << 20) -> None:
        """UpdateContainerResources by somebody else, as the kubelet resizes; no event tells."""
        one = self.containers[container_id]
        one.cpu |= {"shares": milli * 1024 // 1000, "quota": milli * 100, "period": 100_000}
        one.memory = memory

    def end(self, container_id: str) -> None:
        one = self.containers[container_id]
        one.state = cri_pb2.CONTAINER_EXITED
        self._tell(container_id, one.pod, cri_pb2.CONTAINER_STOPPED_EVENT)

    def remove(self, container_id: str) -> None:
        one = self.containers.pop(container_id)
        self._tell(container_id, one.pod, cri_pb2.CONTAINER_DELETED_EVENT)

    def cpus(self, container_id: str) -> str:
        return str(self.containers[container_id].cpu.get("cpus", ""))

    def _tell(self, container_id: str, pod_id: str, kind: int) -> None:
        for listener in self.listeners:
            event = cri_pb2.ContainerEventResponse(container_id=container_id)
            event.container_event_type = kind  # type: ignore[assignment]  # a number of the enum
            event.pod_sandbox_status.id = pod_id
            listener.put_nowait(event)

    # -- calls -------------------------------------------------------------------------------------

    async def _Version(self, request: Any, context: Any) -> Any:
        return cri_pb2.VersionResponse(
            runtime_name="small", runtime_version="1.0", runtime_api_version="v1"
        )

    async def _ListPodSandbox(self, request: Any, context: Any) -> Any:
        return cri_pb2.ListPodSandboxResponse(items=self.pods.values())

    async def _PodSandboxStatus(self, request: Any, context: Any) -> Any:
        pod = await _found(self.pods, request.pod_sandbox_id, context, "pod")
        status = cri_pb2.PodSandboxStatus(
            id=pod.id, metadata=pod.metadata, annotations=pod.annotations
        )
        info = {"config": {"linux": {"cgroup_parent": f"/kubepods/pod{pod.id}"}}}
        return cri_pb2.PodSandboxStatusResponse(status=status, info={"info": json.dumps(info)})

    async def _ListContainers(self, request: Any, context: Any) -> Any:
        self.listings += 1
        if self.hangs:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it hangs")
        return cri_pb2.ListContainersResponse(
            containers=[
                cri_pb2.Container(
                    id=one.id,
                    pod_sandbox_id=one.pod,
                    metadata=cri_pb2.ContainerMetadata(name=one.name),
                    state=cri_pb2.ContainerState.Name(one.state),  # type: ignore[arg-type]
                )
                for one in self.containers.values()
            ]
        )

    async def _ContainerStatus(self, request: Any, context: Any) -> Any:
        one = await _found(self.containers, request.container_id, context)
        if one.id in self.refuse_status:
            self.refuse_status.discard(one.id)
            await context.abort(grpc.StatusCode.UNKNOWN, "it is being made")
        status = cri_pb2.ContainerStatus(
            id=one.id, metadata=cri_pb2.ContainerMetadata(name=one.name), started_at=one.started_at
        )
        status.state = one.state  # type: ignore[assignment]  # a number of the enum
        if not self.verbose:
            linux = status.resources.linux
            linux.cpu_shares = one.cpu.get("shares", 0)
            linux.cpu_quota = one.cpu.get("quota", 0)
            linux.cpu_period = one.cpu.get("period", 0)
            linux.cpuset_cpus = one.cpu.get("cpus", "")
            return cri_pb2.ContainerStatusResponse(status=status)
        spec = {
            **one.spec,
            "process": {"oomScoreAdj": -997},
            "linux": {
                "cgroupsPath": f"/kubepods/pod{one.pod}/{one.id}",
                "resources": {"cpu": one.cpu, "memory": {"limit": one.memory}},
            },
        }
        running = one.state == cri_pb2.CONTAINER_RUNNING
        info = {"sandboxID": one.pod, "pid": 4711 if running else 0, "runtimeSpec": spec}
        return cri_pb2.ContainerStatusResponse(status=status, info={"info": json.dumps(info)})

    async def _UpdateContainerResources(self, request: Any, context: Any) -> Any:
        one = await _found(self.containers, request.container_id, context)
        if one.id in self.refuse_updates:
            await context.abort(grpc.StatusCode.UNKNOWN, "permission denied")
        self.updates.append((one.id, request.linux.cpuset_cpus))
        while self.hangs:
            await asyncio.sleep(0.01)
        if request.linux.cpuset_cpus:
            one.cpu["cpus"] = request.linux.cpuset_cpus
        if request.linux.cpuset_mems:
            one.cpu["mems"] = request.linux.cpuset_mems
        if request.linux.cpu_quota:
            one.cpu["quota"] = request.linux.cpu_quota
        return cri_pb2.UpdateContainerResourcesResponse()

    async def _GetContainerEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.listeners.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self.listeners.remove(queue)


async def _found(among: dict[str, _T], wanted: str, context: Any, kind: str = "container") -> _T:
    if wanted not in among:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no such {kind}")
    return among[wanted]


def unary(handler: Callable[[Any, Any], Any], request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        handler, request.FromString, lambda message: message.SerializeToString()
    )
