"""A small CRI client: what runs, what it was given, and changing its cpuset.

For the link to runtimes without NRI; only its few calls exist. ``grpc`` is imported by this module,
and this module only where CRI is used.

Public source of the protocol: github.com/kubernetes/cri-api, ``pkg/apis/runtime/v1/api.proto``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Annotated, Self, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from nri_numa.cri.pb import cri_pb2
from nri_numa.errors import RuntimeUnavailable
from nri_numa.model.workload import (
    Container,
    ContainerUpdate,
    DeviceFile,
    PodSandbox,
    QoSClass,
    Resources,
    find_device_mentions,
)
from nri_numa.runtime import RuntimeInfo, inferred_qos, parse_page_bytes

_RUNTIME_SERVICE_PATH = "/runtime.v1.RuntimeService/"
# The kubelet's own limit is two minutes, made for image pulls; none of our calls does more than a
# cgroup write.
DEFAULT_CALL_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = (
    # Go servers check the :authority header, which for a unix socket would be its path.
    ("grpc.default_authority", "localhost"),
    # A proxy from the environment is for the network, never for a local socket.
    ("grpc.enable_http_proxy", 0),
    # A node with a thousand pods answers ListContainers with more than the default of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
_UNREACHABLE_CODES = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED,  # something else than a CRI runtime serves the socket
    }
)


class UpdateFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime did not update a container.

    Attributes:
        unknown: the runtime does not know the container (any more).
        message: the runtime's own words.
    """

    container_id: str
    unknown: bool
    message: str


class CallRefused(RuntimeUnavailable):
    """The runtime answered one call with an error; others may well succeed.

    Attributes:
        unknown: the runtime does not know (any more) what the call is about.
        details: the runtime's own words.
    """

    def __init__(self, message: str, *, unknown: bool, details: str) -> None:
        super().__init__(message)
        self.unknown = unknown
        self.details = details


_Response = TypeVar("_Response", bound=Message)


class CRIClient:
    """Calls one runtime over its unix socket, with or without ``unix://``.

    Usable as an asynchronous context manager. Each call raises `RuntimeUnavailable` when the socket
    is absent, there is no answer in time, or the answer is an error that has no meaning here.
    """

    def __init__(self, socket_path: str, *, timeout_s: float = DEFAULT_CALL_TIMEOUT_S) -> None:
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

    def _open_channel(self) -> grpc.aio.Channel:
        # Made on the first call: a channel belongs to the event loop it was made in.
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                f"unix://{self.socket_path}", options=list(_CHANNEL_OPTIONS)
            )
        return self._channel

    def _error_from_rpc(self, method: str, error: grpc.aio.AioRpcError) -> RuntimeUnavailable:
        code, details = error.code(), error.details()
        where, why = f"CRI runtime at {self.socket_path}", f"{code.name}: {details or 'no details'}"
        if code in _UNREACHABLE_CODES:
            return RuntimeUnavailable(f"{where} does not answer: {method}: {why}")
        return CallRefused(
            f"{where} refused: {method}: {why}",
            unknown=code is grpc.StatusCode.NOT_FOUND,
            details=details or code.name,
        )

    async def _call_method(
        self, method: str, request: Message, response: type[_Response]
    ) -> _Response:
        call = self._open_channel().unary_unary(
            _RUNTIME_SERVICE_PATH + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            answer: _Response = await call(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error_from_rpc(method, error) from error
        return answer

    async def _call_or_none_if_unknown(
        self, method: str, request: Message, response: type[_Response]
    ) -> _Response | None:
        """A call about a thing; None when the runtime does not know it."""
        try:
            return await self._call_method(method, request, response)
        except CallRefused as refused:
            if refused.unknown:
                return None
            raise

    async def query_version(self) -> RuntimeInfo:
        """Name and version of the runtime."""
        answer = await self._call_method(
            "Version", cri_pb2.VersionRequest(version="0.1.0"), cri_pb2.VersionResponse
        )
        return RuntimeInfo(name=answer.runtime_name, version=answer.runtime_version)

    async def pod_sandbox_ids(self) -> list[str]:
        """Every pod sandbox, sorted."""
        answer = await self._call_method(
            "ListPodSandbox", cri_pb2.ListPodSandboxRequest(), cri_pb2.ListPodSandboxResponse
        )
        return sorted(item.id for item in answer.items)

    async def query_and_decode_pod(self, pod_sandbox_id: str) -> PodSandbox | None:
        """One pod sandbox; None when the runtime does not know it."""
        request = cri_pb2.PodSandboxStatusRequest(pod_sandbox_id=pod_sandbox_id, verbose=True)
        answer = await self._call_or_none_if_unknown(
            "PodSandboxStatus", request, cri_pb2.PodSandboxStatusResponse
        )
        return None if answer is None else pod_from(answer)

    async def list_all_containers(self) -> list[cri_pb2.Container]:
        """Containers, ordered by creation time and id."""
        answer = await self._call_method(
            "ListContainers", cri_pb2.ListContainersRequest(), cri_pb2.ListContainersResponse
        )
        return sorted(answer.containers, key=lambda each: (each.created_at, each.id))

    async def container_status(self, container_id: str) -> cri_pb2.ContainerStatusResponse | None:
        """A verbose status, for `container_from`; None when the runtime does not know it."""
        request = cri_pb2.ContainerStatusRequest(container_id=container_id, verbose=True)
        return await self._call_or_none_if_unknown(
            "ContainerStatus", request, cri_pb2.ContainerStatusResponse
        )

    async def update_container(self, update: ContainerUpdate) -> UpdateFailure | None:
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
            await self._call_method(
                "UpdateContainerResources", request, cri_pb2.UpdateContainerResourcesResponse
            )
        except CallRefused as refused:
            return UpdateFailure(
                container_id=update.container_id, unknown=refused.unknown, message=refused.details
            )
        return None

    async def container_events(self) -> AsyncIterator[cri_pb2.ContainerEventResponse]:
        """Container events from now on, until the runtime or the caller goes away.

        There is no replay: list the containers after the first step of this iterator was started.
        The ``pod_sandbox_status`` of an event is empty when the runtime does not say whose it is.
        """
        call = self._open_channel().unary_stream(
            _RUNTIME_SERVICE_PATH + "GetContainerEvents",
            request_serializer=cri_pb2.GetEventsRequest.SerializeToString,
            response_deserializer=cri_pb2.ContainerEventResponse.FromString,
        )
        try:
            async for event in call(cri_pb2.GetEventsRequest()):
                yield event
        except grpc.aio.AioRpcError as error:
            raise self._error_from_rpc("GetContainerEvents", error) from error


# --- what CRI reports, in the engine's types ------------------------------------------------------
# Most stands in the OCI spec that containerd and CRI-O show in a verbose status; where there is
# none, the few resources that CRI itself has must do. One that has not the form of the OCI runtime
# specification counts as none.


_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _OCI(msgspec.Struct, frozen=True, rename="camel"):
    pass


class _OCICPUResources(_OCI, frozen=True):
    cpu_shares: _Int64 | None = msgspec.field(default=None, name="shares")
    quota: _Int64 | None = None
    period: _Int64 | None = None
    cpus: str = ""
    mems: str = ""


class _Memory(_OCI, frozen=True):
    limit: _Int64 | None = None


class _Hugepages(_OCI, frozen=True):
    page_size: str = ""
    limit: _Int64 = 0


class _DeviceRule(_OCI, frozen=True):
    allow: bool = False
    type: str = ""
    major: _Int64 | None = None
    minor: _Int64 | None = None

    @property
    def allows_all(self) -> bool:
        """Whether it makes a container privileged: devices that are listed say nothing of it."""
        numbers = (self.major, self.minor)
        return self.allow and self.type in ("", "a") and all(n is None or n < 0 for n in numbers)


class _Resources(_OCI, frozen=True):
    cpu: _OCICPUResources = _OCICPUResources()
    memory: _Memory = _Memory()
    hugepage_limits: tuple[_Hugepages, ...] = ()
    devices: tuple[_DeviceRule, ...] = ()


class _Device(_OCI, frozen=True):
    type: str = ""
    major: _Int64 = 0
    minor: _Int64 = 0


class _Namespace(_OCI, frozen=True):
    type: str = ""
    path: str = ""


class _Linux(_OCI, frozen=True):
    cgroups_path: str = ""
    resources: _Resources = _Resources()
    devices: tuple[_Device, ...] = ()
    namespaces: tuple[_Namespace, ...] = ()


class _OCIProcess(_OCI, frozen=True):
    env: tuple[str, ...] = ()
    oom_score_adj: _Int64 | None = None


class _RuntimeSpec(_OCI, frozen=True):
    annotations: dict[str, str] = {}
    process: _OCIProcess = _OCIProcess()
    linux: _Linux = _Linux()


class _PodResources(msgspec.Struct, frozen=True):
    """What the kubelet gave the runtime for a pod, in the names of CRI."""

    cpu_shares: _Int64 | None = None
    cpu_quota: _Int64 | None = None
    cpu_period: _Int64 | None = None
    memory_limit_in_bytes: _Int64 | None = None


class _PodLinuxConfig(msgspec.Struct, frozen=True):
    cgroup_parent: str = ""
    resources: _PodResources = _PodResources()


class _KubeletPodConfig(msgspec.Struct, frozen=True):
    linux: _PodLinuxConfig = _PodLinuxConfig()


class _VerboseStatusInfo(_OCI, frozen=True):
    """The JSON in a verbose status: containerd and CRI-O put it under ``info``."""

    pid: _Int64 = 0
    sandbox_id: str = msgspec.field(default="", name="sandboxID")
    runtime_spec: _RuntimeSpec | None = None
    config: _KubeletPodConfig | None = None

    @classmethod
    def from_status(cls, info: Mapping[str, str]) -> _VerboseStatusInfo:
        try:
            return msgspec.json.decode(info.get("info", "{}"), type=cls)
        except (msgspec.DecodeError, RecursionError):
            return cls()


def pod_from(answer: cri_pb2.PodSandboxStatusResponse) -> PodSandbox:
    """A pod, with the resources that the kubelet gave the runtime for it.

    Its QoS class is that of its cgroup; see `nri_numa.runtime.inferred_qos` for pods without one.
    """
    status, info = answer.status, _VerboseStatusInfo.from_status(answer.info)
    config = (info.config or _KubeletPodConfig()).linux
    given = config.resources
    resources = Resources(
        cpu_shares=given.cpu_shares,
        cpu_quota=given.cpu_quota,
        cpu_period=given.cpu_period,
        memory_limit=given.memory_limit_in_bytes,
    )
    spec = (info.runtime_spec or _RuntimeSpec()).linux
    return PodSandbox(
        id=status.id,
        uid=status.metadata.uid or status.id,
        namespace=status.metadata.namespace,
        name=status.metadata.name,
        labels=dict(status.labels),
        annotations=dict(status.annotations),
        qos=QoSClass.of_cgroup(config.cgroup_parent) or inferred_qos(resources, None),
        runtime_handler=status.runtime_handler,
        cgroup_parent=config.cgroup_parent,
        resources=resources,
        network_namespace=next((one.path for one in spec.namespaces if one.type == "network"), ""),
        cgroups_path=spec.cgroups_path,
    )


def container_from(answer: cri_pb2.ContainerStatusResponse) -> Container:
    """A container as it is now.

    Its ``pod_id`` is empty when the runtime does not say; the protocol has no field for it.
    containerd reports resources that were *asked for* until the first update, so they are not the
    truth about a pinned container: its cgroup is.
    """
    status, info = answer.status, _VerboseStatusInfo.from_status(answer.info)
    spec = info.runtime_spec or _RuntimeSpec()
    annotations = {**status.annotations, **spec.annotations}
    given, score = spec.linux.resources, spec.process.oom_score_adj
    if given != _Resources():
        resources = Resources(
            cpu_shares=given.cpu.cpu_shares,
            cpu_quota=given.cpu.quota,
            cpu_period=given.cpu.period,
            memory_limit=given.memory.limit,
            hugepages={
                parse_page_bytes(one.page_size): one.limit
                for one in given.hugepage_limits
                if one.limit
            },
            cpus=given.cpu.cpus,
            mems=given.cpu.mems,
        )
    else:
        linux = status.resources.linux
        score = score if score is not None else linux.oom_score_adj or None
        resources = Resources(
            cpu_shares=linux.cpu_shares or None,
            cpu_quota=linux.cpu_quota or None,
            cpu_period=linux.cpu_period or None,
            memory_limit=linux.memory_limit_in_bytes or None,
            hugepages={parse_page_bytes(one.page_size): one.limit for one in linux.hugepage_limits},
            cpus=linux.cpuset_cpus,
            mems=linux.cpuset_mems,
        )
    privileged = any(rule.allows_all for rule in given.devices)
    return Container(
        id=status.id,
        pod_id=info.sandbox_id,
        name=status.metadata.name,
        annotations=annotations,
        resources=resources,
        oom_score_adj=score,
        pid=info.pid,
        cgroups_path=spec.linux.cgroups_path,
        mentions=find_device_mentions(
            nodes=[
                DeviceFile(one.type, one.major, one.minor)
                for one in (() if privileged else spec.linux.devices)
            ],
            environment=spec.process.env,
            annotations=annotations,
        ),
        starting=status.state == cri_pb2.CONTAINER_CREATED,
    )
