"""A small CRI client: what runs, what it was given, and changing its cpuset.

For the link to runtimes without NRI; only its few calls exist. ``grpc`` is imported by this module,
and this module only where CRI is used.

Public source of the protocol: github.com/kubernetes/cri-api, ``pkg/apis/runtime/v1/api.proto``.
"""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable
from nri_numa.model.workload import (
    Container,
    ContainerUpdate,
    DeviceNode,
    PodSandbox,
    QoSClass,
    Resources,
    mentions_in,
)
from nri_numa.runtime import (
    NOTHING_GIVEN,
    RuntimeInfo,
    inferred_qos,
    page_size,
)

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


class ListedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """One container as ListContainers reports it."""

    id: str
    pod_sandbox_id: str
    state: CRIContainerState


class ContainerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One container as a verbose ContainerStatus reports it.

    Attributes:
        container: its ``pod_id`` is empty when the runtime does not say; the protocol has no field
            for it. containerd reports resources that were *asked for* until the first update, so
            they are not the truth about a pinned container: its cgroup is.
        started_at: Unix time, 0 when it did not start yet.
    """

    container: Container
    state: CRIContainerState
    started_at: float = 0.0


class CRIContainerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened to a container.

    Attributes:
        pod_sandbox_id: whose it is; empty when the runtime does not say.
    """

    container_id: str
    type: ContainerEventType
    pod_sandbox_id: str = ""


class UpdateFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime did not update a container.

    Attributes:
        unknown: the runtime does not know the container (any more).
        message: the runtime's own words.
    """

    container_id: str
    unknown: bool
    message: str


class CallRefused(RuntimeUnavailable):
    """The runtime answered one call with an error; others may well succeed."""


_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


class CRIClient:
    """Calls one runtime over its unix socket, with or without ``unix://``.

    Usable as an asynchronous context manager. Each call raises `RuntimeUnavailable` when the socket
    is absent, there is no answer in time, or the answer is an error that has no meaning here.
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
            response_deserializer=response.FromString,
        )
        answer: _Response = await call(request, timeout=self._timeout_s)
        return answer

    async def _answer(self, method: str, request: _Request, response: type[_Response]) -> _Response:
        """One unary call."""
        try:
            return await self._call(method, request, response)
        except grpc.aio.AioRpcError as error:
            self._raise(method, error)

    async def _known(
        self, method: str, request: _Request, response: type[_Response]
    ) -> _Response | None:
        """One unary call about a thing; None when the runtime does not know it."""
        try:
            return await self._call(method, request, response)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            self._raise(method, error)

    async def version(self) -> RuntimeInfo:
        """Name and version of the runtime."""
        answer = await self._answer(
            "Version", cri_pb2.VersionRequest(version="0.1.0"), cri_pb2.VersionResponse
        )
        return RuntimeInfo(name=answer.runtime_name, version=answer.runtime_version)

    async def pod_sandbox_ids(self) -> list[str]:
        """Every pod sandbox, sorted."""
        answer = await self._answer(
            "ListPodSandbox", cri_pb2.ListPodSandboxRequest(), cri_pb2.ListPodSandboxResponse
        )
        return sorted(item.id for item in answer.items)

    async def pod_sandbox(self, pod_sandbox_id: str) -> PodSandbox | None:
        """One pod sandbox; None when the runtime does not know it."""
        request = cri_pb2.PodSandboxStatusRequest(pod_sandbox_id=pod_sandbox_id, verbose=True)
        answer = await self._known("PodSandboxStatus", request, cri_pb2.PodSandboxStatusResponse)
        return None if answer is None else pod_from(answer.status, _info(answer.info))

    async def list_containers(self) -> tuple[ListedContainer, ...]:
        """Containers, ordered by creation time and id."""
        answer = await self._answer(
            "ListContainers", cri_pb2.ListContainersRequest(), cri_pb2.ListContainersResponse
        )
        return tuple(
            ListedContainer(
                id=item.id,
                pod_sandbox_id=item.pod_sandbox_id,
                state=CRIContainerState(item.state),
            )
            for item in sorted(answer.containers, key=lambda each: (each.created_at, each.id))
        )

    async def container_status(self, container_id: str) -> ContainerStatus | None:
        """Status of one container; None when the runtime does not know it."""
        request = cri_pb2.ContainerStatusRequest(container_id=container_id, verbose=True)
        answer = await self._known("ContainerStatus", request, cri_pb2.ContainerStatusResponse)
        if answer is None:
            return None
        return ContainerStatus(
            container=container_from(answer.status, _info(answer.info)),
            state=CRIContainerState(answer.status.state),
            started_at=answer.status.started_at / 1e9,
        )

    async def update(self, update: ContainerUpdate) -> UpdateFailed | None:
        """Change resources of a container that was created or runs; None when it was applied.

        What the update leaves keeps what it was; nothing can be unset. The runtime calls its NRI
        plugins first, ourselves among them when we are connected: the event loop must be free.

        Raises:
            RuntimeUnavailable: no answer, so it is unknown whether it was applied.
        """
        request = cri_pb2.UpdateContainerResourcesRequest(
            container_id=update.container_id,
            linux=cri_pb2.LinuxContainerResources(
                cpu_shares=update.cpu_shares or 0,
                cpu_quota=update.cpu_quota or 0,
                cpu_period=update.cpu_period or 0,
                memory_limit_in_bytes=update.memory_limit or 0,
                cpuset_cpus=update.cpus,
                cpuset_mems=update.mems,
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
                container_id=update.container_id,
                unknown=error.code() is grpc.StatusCode.NOT_FOUND,
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


# --- what CRI reports, in the engine's types ------------------------------------------------------
# Most stands in the OCI spec that containerd and CRI-O show in a verbose status; where there is
# none, the few resources that CRI itself has must do. A spec is JSON of the runtime, read
# leniently: what has another form than the OCI runtime specification says is left out.


Json = Mapping[str, Any]


def _info(info: Mapping[str, str]) -> Json:
    """The JSON in a verbose status: containerd and CRI-O put it under ``info``."""
    try:
        document = json.loads(info.get("info", "{}"))
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def pod_from(status: cri_pb2.PodSandboxStatus, info: Json) -> PodSandbox:
    """A pod, with the resources that the kubelet gave the runtime for it.

    Its QoS class is that of its cgroup; see `nri_numa.runtime.inferred_qos` for pods without one.
    """
    config = _object(_object(info, "config"), "linux")
    given = _object(config, "resources")
    resources = NOTHING_GIVEN
    if given:
        resources = Resources(
            cpu_shares=_positive(given, "cpu_shares"),
            cpu_quota=_number(given, "cpu_quota"),
            cpu_period=_positive(given, "cpu_period"),
            memory_limit=_number(given, "memory_limit_in_bytes"),
        )
    cgroup_parent = _text(config, "cgroup_parent")
    namespaces = _objects(_object(_object(info, "runtimeSpec"), "linux"), "namespaces")
    return PodSandbox(
        id=status.id,
        uid=status.metadata.uid or status.id,
        namespace=status.metadata.namespace,
        name=status.metadata.name,
        labels=dict(status.labels),
        annotations=dict(status.annotations),
        qos=QoSClass.of_cgroup(cgroup_parent) or inferred_qos(resources, None),
        runtime_handler=status.runtime_handler,
        cgroup_parent=cgroup_parent,
        resources=resources,
        network_namespace=next(
            (_text(one, "path") for one in namespaces if _text(one, "type") == "network"), ""
        ),
    )


def container_from(status: cri_pb2.ContainerStatus, info: Json) -> Container:
    """A container as it is now."""
    spec = _object(info, "runtimeSpec")
    process, linux = _object(spec, "process"), _object(spec, "linux")
    annotations = {**status.annotations, **_texts(_object(spec, "annotations"))}
    score = _number(process, "oomScoreAdj")
    resources = NOTHING_GIVEN
    given = _object(linux, "resources")
    if given:
        resources = _from_spec(given)
    elif status.HasField("resources") and status.resources.HasField("linux"):
        resources = _from_cri(status.resources.linux)
        if score is None:
            score = status.resources.linux.oom_score_adj or None
    environment = process.get("env")
    privileged = any(_allows_all(rule) for rule in _objects(given, "devices"))
    return Container(
        id=status.id,
        pod_id=_text(info, "sandboxID"),
        name=status.metadata.name,
        annotations=annotations,
        resources=resources,
        oom_score_adj=score,
        pid=max(0, _number(info, "pid") or 0),
        cgroups_path=_text(linux, "cgroupsPath"),
        mentions=mentions_in(
            nodes=[
                DeviceNode(
                    _text(one, "type"), _number(one, "major") or 0, _number(one, "minor") or 0
                )
                for one in (() if privileged else _objects(linux, "devices"))
            ],
            environment=[item for item in environment if isinstance(item, str)]
            if isinstance(environment, list)
            else (),
            annotations=annotations,
        ),
        starting=status.state == cri_pb2.CONTAINER_CREATED,
    )


def _from_spec(resources: Json) -> Resources:
    cpu, memory = _object(resources, "cpu"), _object(resources, "memory")
    hugepages = {}
    for limit in _objects(resources, "hugepageLimits"):
        size, bytes_ = _text(limit, "pageSize"), _number(limit, "limit") or 0
        if size and bytes_ > 0:
            hugepages[page_size(size)] = bytes_
    return Resources(
        cpu_shares=_positive(cpu, "shares"),
        cpu_quota=_number(cpu, "quota"),
        cpu_period=_positive(cpu, "period"),
        memory_limit=_number(memory, "limit"),
        hugepages=hugepages,
        cpus=_text(cpu, "cpus"),
        mems=_text(cpu, "mems"),
    )


def _from_cri(resources: cri_pb2.LinuxContainerResources) -> Resources:
    return Resources(
        cpu_shares=resources.cpu_shares or None,
        cpu_quota=resources.cpu_quota or None,
        cpu_period=resources.cpu_period or None,
        memory_limit=resources.memory_limit_in_bytes or None,
        hugepages={page_size(one.page_size): one.limit for one in resources.hugepage_limits},
        cpus=resources.cpuset_cpus,
        mems=resources.cpuset_mems,
    )


def _allows_all(rule: Json) -> bool:
    """Whether it makes a container privileged: device files that are listed say nothing of it."""
    return (
        rule.get("allow") is True
        and _text(rule, "type") in ("", "a")
        and _positive(rule, "major") is None
        and _positive(rule, "minor") is None
    )


def _object(document: Json, key: str) -> Json:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _objects(document: Json, key: str) -> Iterator[Json]:
    value = document.get(key)
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _text(document: Json, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


def _texts(document: Json) -> dict[str, str]:
    return {key: value for key, value in document.items() if isinstance(value, str)}


def _number(document: Json, key: str) -> int | None:
    """A number of 64 bits; JSON has others too."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -(2**63) <= value < 2**63 else None


def _positive(document: Json, key: str) -> int | None:
    value = _number(document, key)
    return None if value is None or value < 0 else value
