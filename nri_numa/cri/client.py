"""A small CRI client: what runs, what it was given, and changing its cpuset.

CRI serves three purposes here: reading what the runtime thinks a container has, the mode for
runtimes without NRI, and ``nri-numa check``. Only those few calls exist. ``grpc`` is imported by
this module alone, and this module only by the parts that want CRI.

Public source of the protocol: github.com/kubernetes/cri-api, ``pkg/apis/runtime/v1/api.proto``.
"""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, TypeVar

import grpc
import grpc.aio

from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable

_SERVICE = "/runtime.v1.RuntimeService/"
# The kubelet's own limit is two minutes, made for image pulls; none of our calls does more than a
# cgroup write.
DEFAULT_TIMEOUT_S = 10.0
_OPTIONS = (
    # Go servers check the :authority header, which for a unix socket would be its path.
    ("grpc.default_authority", "localhost"),
    # A proxy from the environment is for the network, never for a local socket.
    ("grpc.enable_http_proxy", 0),
    # A node with a thousand pods answers ListContainers with more than the default of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
_UNREACHABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED,  # something else than a CRI runtime serves the socket
    }
)


class CRIContainerState(enum.Enum):
    """State of a container; the values are CRI's numbers."""

    CREATED = 0
    RUNNING = 1
    EXITED = 2
    UNKNOWN = 3

    @classmethod
    def _missing_(cls, value: object) -> CRIContainerState:
        """Take a state that a later CRI adds for unknown."""
        return cls.UNKNOWN


class ContainerEventType(enum.Enum):
    """Kind of a container event; the values are CRI's numbers."""

    CREATED = 0
    STARTED = 1
    STOPPED = 2
    DELETED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeVersion:
    """Who answers: ``containerd``, ``2.1.9``."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CRIPodSandbox:
    """One pod sandbox as ListPodSandbox reports it."""

    id: str
    name: str
    namespace: str
    uid: str
    ready: bool
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    runtime_handler: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CRIPodSandboxStatus:
    """One pod sandbox as a verbose PodSandboxStatus reports it.

    Attributes:
        config: the PodSandboxConfig that the runtime was given, as its JSON (field names as in the
            protocol); empty when the runtime does not say.
        spec: the OCI spec of the sandbox's own container, as its JSON; empty likewise.
    """

    pod: CRIPodSandbox
    config: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CRIContainer:
    """One container as ListContainers reports it.

    Attributes:
        created_at_ns: nanoseconds since the epoch.
    """

    id: str
    pod_sandbox_id: str
    name: str
    state: CRIContainerState
    created_at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CRIResources:
    """Linux resources of a container; 0 and the empty string mean "not set".

    Attributes:
        cpu_quota: microseconds in each period, ``cpu_period`` microseconds long.
        memory_limit_bytes: limit of the memory cgroup.
        cpus: CPUs in kernel list format.
        mems: NUMA nodes in kernel list format.
        hugepage_limits: bytes by page size, ``{"2MB": 4194304}``.
    """

    cpu_shares: int = 0
    cpu_quota: int = 0
    cpu_period: int = 0
    memory_limit_bytes: int = 0
    oom_score_adj: int = 0
    cpus: str = ""
    mems: str = ""
    hugepage_limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CRIContainerStatus:
    """One container as ContainerStatus reports it.

    Attributes:
        pid: process id of its first process, 0 when the runtime does not say or it does not run.
        resources: what the runtime says it applied; None when it says nothing. containerd reports
            what was *asked for* until the first update, so this is not the truth about a pinned
            container: ``/proc/<pid>/status`` is.
        pod_sandbox_id: empty when the runtime does not say; the protocol has no field for it.
        started_at_ns: nanoseconds since the epoch, 0 when it did not start yet.
        spec: its OCI spec at present, as its JSON; empty when the runtime does not say.
    """

    id: str
    name: str
    state: CRIContainerState
    pid: int
    resources: CRIResources | None
    pod_sandbox_id: str = ""
    started_at_ns: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CRIContainerEvent:
    """Something happened to a container.

    Attributes:
        pod_sandbox_id: whose it is; empty when the runtime does not say.
    """

    container_id: str
    type: ContainerEventType
    pod_sandbox_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFailed:
    """The runtime did not update a container.

    Attributes:
        gone: the runtime does not know the container (any more).
        message: the runtime's own words.
    """

    container_id: str
    gone: bool
    message: str


class CallRefused(RuntimeUnavailable):
    """The runtime answered one call with an error; others may well succeed."""


class _Message(Protocol):
    """What we need of a protobuf message class to call a method with it."""

    def SerializeToString(self) -> bytes:
        """Encode."""
        ...


_Request = TypeVar("_Request", bound=_Message)
_Response = TypeVar("_Response")


class CRIClient:
    """Calls one runtime over its unix socket.

    Usable as an asynchronous context manager. Each call raises `RuntimeUnavailable` when the
    socket is absent, nobody answers in time, or the answer is an error that has no meaning here.

    Args:
        socket_path: the runtime's socket, with or without ``unix://``.
        timeout_s: limit of each call, in seconds.
    """

    def __init__(self, socket_path: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.socket_path = socket_path.removeprefix("unix://")
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way fail."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    def _connected(self) -> grpc.aio.Channel:
        # Made on the first call: a channel belongs to the event loop it was made in.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                f"unix://{self.socket_path}", options=list(_OPTIONS)
            )
        return self._channel

    def _raise(self, method: str, error: grpc.aio.AioRpcError) -> NoReturn:
        code = error.code()
        what = "refused"
        kind: type[RuntimeUnavailable] = CallRefused
        if code in _UNREACHABLE:
            what, kind = "does not answer", RuntimeUnavailable
        raise kind(
            f"CRI runtime at {self.socket_path} {what}: {method}: "
            f"{code.name}: {error.details() or 'no details'}"
        ) from error

    async def _call(self, method: str, request: _Request, response: type[_Response]) -> _Response:
        """One unary call; gRPC's own errors pass through."""
        call = self._connected().unary_unary(
            _SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,  # type: ignore[attr-defined]  # every message class has it
        )
        answer: _Response = await call(request, timeout=self._timeout_s)
        return answer

    async def version(self) -> RuntimeVersion:
        """Name and version of the runtime."""
        try:
            answer = await self._call(
                "Version", cri_pb2.VersionRequest(version="0.1.0"), cri_pb2.VersionResponse
            )
        except grpc.aio.AioRpcError as error:
            self._raise("Version", error)
        return RuntimeVersion(name=answer.runtime_name, version=answer.runtime_version)

    async def list_pod_sandboxes(self) -> tuple[CRIPodSandbox, ...]:
        """Every pod sandbox, ordered by id."""
        try:
            answer = await self._call(
                "ListPodSandbox", cri_pb2.ListPodSandboxRequest(), cri_pb2.ListPodSandboxResponse
            )
        except grpc.aio.AioRpcError as error:
            self._raise("ListPodSandbox", error)
        pods = (
            CRIPodSandbox(
                id=item.id,
                name=item.metadata.name,
                namespace=item.metadata.namespace,
                uid=item.metadata.uid,
                ready=item.state == cri_pb2.SANDBOX_READY,
                labels=dict(item.labels),
                annotations=dict(item.annotations),
                runtime_handler=item.runtime_handler,
            )
            for item in answer.items
        )
        return tuple(sorted(pods, key=lambda pod: pod.id))

    async def pod_sandbox_status(self, pod_sandbox_id: str) -> CRIPodSandboxStatus | None:
        """Status of one pod sandbox; None when the runtime does not know it."""
        request = cri_pb2.PodSandboxStatusRequest(pod_sandbox_id=pod_sandbox_id, verbose=True)
        try:
            answer = await self._call("PodSandboxStatus", request, cri_pb2.PodSandboxStatusResponse)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            self._raise("PodSandboxStatus", error)
        status, info = answer.status, _info(answer.info)
        return CRIPodSandboxStatus(
            pod=CRIPodSandbox(
                id=status.id,
                name=status.metadata.name,
                namespace=status.metadata.namespace,
                uid=status.metadata.uid,
                ready=status.state == cri_pb2.SANDBOX_READY,
                labels=dict(status.labels),
                annotations=dict(status.annotations),
                runtime_handler=status.runtime_handler,
            ),
            config=_object(info, "config"),
            spec=_object(info, "runtimeSpec"),
        )

    async def list_containers(self) -> tuple[CRIContainer, ...]:
        """Containers, ordered by creation time and id."""
        try:
            answer = await self._call(
                "ListContainers", cri_pb2.ListContainersRequest(), cri_pb2.ListContainersResponse
            )
        except grpc.aio.AioRpcError as error:
            self._raise("ListContainers", error)
        containers = (
            CRIContainer(
                id=item.id,
                pod_sandbox_id=item.pod_sandbox_id,
                name=item.metadata.name,
                state=CRIContainerState(item.state),
                created_at_ns=item.created_at,
            )
            for item in answer.containers
        )
        return tuple(sorted(containers, key=lambda each: (each.created_at_ns, each.id)))

    async def container_status(self, container_id: str) -> CRIContainerStatus | None:
        """Status of one container; None when the runtime does not know it."""
        request = cri_pb2.ContainerStatusRequest(container_id=container_id, verbose=True)
        try:
            answer = await self._call("ContainerStatus", request, cri_pb2.ContainerStatusResponse)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            self._raise("ContainerStatus", error)
        status, info = answer.status, _info(answer.info)
        return CRIContainerStatus(
            id=status.id,
            name=status.metadata.name,
            state=CRIContainerState(status.state),
            pid=_pid(info),
            resources=(
                _resources(status.resources.linux)
                if status.HasField("resources") and status.resources.HasField("linux")
                else None
            ),
            pod_sandbox_id=_word(info, "sandboxID"),
            started_at_ns=status.started_at,
            labels=dict(status.labels),
            annotations=dict(status.annotations),
            spec=_object(info, "runtimeSpec"),
        )

    async def update_resources(
        self, container_id: str, resources: CRIResources
    ) -> UpdateFailed | None:
        """Change resources of a container that was created or runs.

        Fields that are not set keep what they were; nothing can be unset. The runtime asks its NRI
        plugins first, ourselves among them when we are connected: the event loop must be free.

        Args:
            container_id: the whole id.
            resources: what to change.

        Returns:
            None when it was applied, else why not.

        Raises:
            RuntimeUnavailable: no answer, so nobody knows whether it was applied.
        """
        request = cri_pb2.UpdateContainerResourcesRequest(
            container_id=container_id,
            linux=cri_pb2.LinuxContainerResources(
                cpu_shares=resources.cpu_shares,
                cpu_quota=resources.cpu_quota,
                cpu_period=resources.cpu_period,
                memory_limit_in_bytes=resources.memory_limit_bytes,
                oom_score_adj=resources.oom_score_adj,
                cpuset_cpus=resources.cpus,
                cpuset_mems=resources.mems,
                hugepage_limits=[
                    cri_pb2.HugepageLimit(page_size=size, limit=limit)
                    for size, limit in sorted(resources.hugepage_limits.items())
                ],
            ),
        )
        try:
            await self._call(
                "UpdateContainerResources", request, cri_pb2.UpdateContainerResourcesResponse
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _UNREACHABLE:
                self._raise("UpdateContainerResources", error)
            return UpdateFailed(
                container_id=container_id,
                gone=error.code() is grpc.StatusCode.NOT_FOUND,
                message=error.details() or error.code().name,
            )
        return None

    async def container_events(self) -> AsyncIterator[CRIContainerEvent]:
        """Container events from now on, until the runtime or the caller goes away.

        There is no replay: list the containers after the first step of this iterator was started.
        """
        call = self._connected().unary_stream(
            _SERVICE + "GetContainerEvents",
            request_serializer=cri_pb2.GetEventsRequest.SerializeToString,
            response_deserializer=cri_pb2.ContainerEventResponse.FromString,
        )
        try:
            async for event in call(cri_pb2.GetEventsRequest()):
                try:
                    kind = ContainerEventType(event.container_event_type)
                except ValueError:
                    continue  # of a later CRI, nothing we know how to act on
                yield CRIContainerEvent(
                    container_id=event.container_id,
                    type=kind,
                    pod_sandbox_id=event.pod_sandbox_status.id,
                )
        except grpc.aio.AioRpcError as error:
            self._raise("GetContainerEvents", error)


def _info(info: Mapping[str, str]) -> Mapping[str, Any]:
    """The JSON in a verbose status: containerd and CRI-O put it under ``info``."""
    try:
        document = json.loads(info.get("info", "{}"))
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _object(info: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = info.get(key)
    return value if isinstance(value, dict) else {}


def _word(info: Mapping[str, Any], key: str) -> str:
    value = info.get(key)
    return value if isinstance(value, str) else ""


def _pid(info: Mapping[str, Any]) -> int:
    pid = info.get("pid", 0)
    return pid if isinstance(pid, int) and pid > 0 else 0


def _resources(message: cri_pb2.LinuxContainerResources) -> CRIResources:
    return CRIResources(
        cpu_shares=message.cpu_shares,
        cpu_quota=message.cpu_quota,
        cpu_period=message.cpu_period,
        memory_limit_bytes=message.memory_limit_in_bytes,
        oom_score_adj=message.oom_score_adj,
        cpus=message.cpuset_cpus,
        mems=message.cpuset_mems,
        hugepage_limits={limit.page_size: limit.limit for limit in message.hugepage_limits},
    )
