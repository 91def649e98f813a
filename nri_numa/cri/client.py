"""Small CRI client: list pods and containers, read their status, update their resources.

It has only the few calls that the link to runtimes without NRI needs. ``grpc`` is imported by this
module, and this module only where CRI is used.

Public source of the protocol: github.com/kubernetes/cri-api, ``pkg/apis/runtime/v1/api.proto``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Self, TypeVar

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message

from nri_numa.cri.pb import cri_pb2
from nri_numa.engine.request.demand import DEFAULT_CFS_PERIOD_US
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
from nri_numa.runtime import RuntimeInfo, allows_all_devices, inferred_qos, parse_page_bytes

_RUNTIME_SERVICE_PATH = "/runtime.v1.RuntimeService/"
# The kubelet's own limit of two minutes is meant for image pulls; no call here does more than a
# cgroup write.
DEFAULT_CALL_TIMEOUT_S = 10.0
_CHANNEL_OPTIONS = (
    # Go servers check the :authority header, which would be the path of the unix socket.
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
        grpc.StatusCode.UNIMPLEMENTED,  # the server of the socket is not a CRI runtime
    }
)


class UpdateFailure(msgspec.Struct, frozen=True):
    """Failed update, with the runtime's text; ``unknown`` if it knows the container no longer."""

    container_id: str
    message: str
    unknown: bool = False


class CallRefused(RuntimeUnavailable):
    """Error that the runtime answered to one call; other calls may succeed.

    ``unknown`` is true if it does not know the pod or container of the call, or no longer;
    ``details`` is its own text.
    """

    def __init__(self, message: str, *, unknown: bool, details: str) -> None:
        super().__init__(message)
        self.unknown = unknown
        self.details = details


_Response = TypeVar("_Response", bound=Message)


class CRIClient:
    """Client of one runtime on a unix socket, whose path may start with ``unix://``.

    It is an asynchronous context manager, at whose end open calls fail. Each call raises
    `RuntimeUnavailable` if the socket is missing, the answer is late, or the answer is an error
    without a meaning here.
    """

    def __init__(self, socket_path: str, *, timeout_s: float = DEFAULT_CALL_TIMEOUT_S) -> None:
        self.socket_path = socket_path.removeprefix("unix://")
        self._timeout_s = timeout_s
        self._channel: grpc.aio.Channel

    async def __aenter__(self) -> Self:
        # Opened here: a channel belongs to the event loop that opened it.
        self._channel = grpc.aio.insecure_channel(
            f"unix://{self.socket_path}", options=_CHANNEL_OPTIONS
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close(None)

    def _error_from_rpc(self, method: str, error: grpc.aio.AioRpcError) -> RuntimeUnavailable:
        code, details = error.code(), error.details()
        peer, text = f"CRI runtime at {self.socket_path}", f"{code.name}: {details or 'no details'}"
        if code in _UNREACHABLE_CODES:
            return RuntimeUnavailable(f"{peer} does not answer: {method}: {text}")
        return CallRefused(
            f"{peer} refused: {method}: {text}",
            unknown=code is grpc.StatusCode.NOT_FOUND,
            details=details or code.name,
        )

    async def _call_method(
        self, method: str, request: Message, response: type[_Response]
    ) -> _Response:
        call = self._channel.unary_unary(
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
        """Call a method; None if the runtime does not know the pod or container."""
        try:
            return await self._call_method(method, request, response)
        except CallRefused as refused:
            if refused.unknown:
                return None
            raise

    async def query_version(self) -> RuntimeInfo:
        """Query the name and version of the runtime."""
        answer = await self._call_method(
            "Version", cri_pb2.VersionRequest(version="0.1.0"), cri_pb2.VersionResponse
        )
        return RuntimeInfo(name=answer.runtime_name, version=answer.runtime_version)

    async def pod_sandbox_ids(self) -> list[str]:
        """List the ids of all pod sandboxes, sorted."""
        answer = await self._call_method(
            "ListPodSandbox", cri_pb2.ListPodSandboxRequest(), cri_pb2.ListPodSandboxResponse
        )
        return sorted(item.id for item in answer.items)

    async def query_and_decode_pod(self, pod_sandbox_id: str) -> PodSandbox | None:
        """Query one pod sandbox; None if the runtime does not know it."""
        request = cri_pb2.PodSandboxStatusRequest(pod_sandbox_id=pod_sandbox_id, verbose=True)
        answer = await self._call_or_none_if_unknown(
            "PodSandboxStatus", request, cri_pb2.PodSandboxStatusResponse
        )
        return None if answer is None else pod_from(answer)

    async def list_all_containers(self) -> list[cri_pb2.Container]:
        """List containers, ordered by creation time and id."""
        answer = await self._call_method(
            "ListContainers", cri_pb2.ListContainersRequest(), cri_pb2.ListContainersResponse
        )
        return sorted(answer.containers, key=lambda each: (each.created_at, each.id))

    async def container_status(self, container_id: str) -> cri_pb2.ContainerStatusResponse | None:
        """Query a verbose status for `container_from`; None if the runtime does not know it."""
        request = cri_pb2.ContainerStatusRequest(container_id=container_id, verbose=True)
        return await self._call_or_none_if_unknown(
            "ContainerStatus", request, cri_pb2.ContainerStatusResponse
        )

    async def update_container(self, update: ContainerUpdate) -> UpdateFailure | None:
        """Update the resources of a created or running container; None if it was applied.

        Fields that the update leaves empty keep their values; no value can be removed. The runtime
        first calls its NRI plugins, a connected agent included, so the event loop must be free.

        Raises:
            RuntimeUnavailable: no answer; the update may have been applied.
        """
        # crun ignores a quota that has no period.
        period = update.cpu_period or (DEFAULT_CFS_PERIOD_US if update.cpu_quota else 0)
        request = cri_pb2.UpdateContainerResourcesRequest(
            container_id=update.container_id,
            linux=cri_pb2.LinuxContainerResources(
                cpu_shares=update.cpu_shares or 0,
                cpu_quota=update.cpu_quota or 0,
                cpu_period=period,
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
            return UpdateFailure(update.container_id, refused.details, unknown=refused.unknown)
        return None

    async def container_events(self) -> AsyncIterator[cri_pb2.ContainerEventResponse]:
        """Stream container events from now on, until the runtime or the caller ends the call.

        Events are not replayed: list the containers after the first step of this iterator started.
        The ``pod_sandbox_status`` of an event is empty if the runtime does not name the pod.
        """
        call = self._channel.unary_stream(
            _RUNTIME_SERVICE_PATH + "GetContainerEvents",
            request_serializer=cri_pb2.GetEventsRequest.SerializeToString,
            response_deserializer=cri_pb2.ContainerEventResponse.FromString,
        )
        try:
            async for event in call(cri_pb2.GetEventsRequest()):
                yield event
        except grpc.aio.AioRpcError as error:
            raise self._error_from_rpc("GetContainerEvents", error) from error


# --- CRI messages as engine types -----------------------------------------------------------------
# Most values are in the OCI spec that containerd and CRI-O show in a verbose status. If there is
# none, or it does not follow the OCI runtime specification, the few resources of CRI are used.


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
    """Resources that the kubelet sent to the runtime for a pod, in the names of CRI."""

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
    """JSON document of a verbose status; containerd and CRI-O put it under ``info``."""

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
    """Convert a pod, with the resources that the kubelet sent to the runtime for it.

    Its QoS class is that of its cgroup; see `nri_numa.runtime.inferred_qos` for pods without one.
    """
    status, info = answer.status, _VerboseStatusInfo.from_status(answer.info)
    config = (info.config or _KubeletPodConfig()).linux
    values = config.resources
    resources = Resources(
        cpu_shares=values.cpu_shares,
        cpu_quota=values.cpu_quota,
        cpu_period=values.cpu_period,
        memory_limit=values.memory_limit_in_bytes,
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
        network_namespace=next((n.path for n in spec.namespaces if n.type == "network"), ""),
        cgroups_path=spec.cgroups_path,
    )


def container_from(answer: cri_pb2.ContainerStatusResponse) -> Container:
    """Convert the status of a container.

    Its ``pod_id`` is empty if the runtime does not report it; the protocol has no field for it.
    containerd reports the *requested* resources until the first update, so only the cgroup shows
    the actual cpuset of a pinned container.
    """
    status, info = answer.status, _VerboseStatusInfo.from_status(answer.info)
    spec = info.runtime_spec or _RuntimeSpec()
    annotations = {**status.annotations, **spec.annotations}
    oci, score = spec.linux.resources, spec.process.oom_score_adj
    if oci != _Resources():
        resources = Resources(
            cpu_shares=oci.cpu.cpu_shares,
            cpu_quota=oci.cpu.quota,
            cpu_period=oci.cpu.period,
            memory_limit=oci.memory.limit,
            hugepages={
                parse_page_bytes(entry.page_size): entry.limit
                for entry in oci.hugepage_limits
                if entry.limit
            },
            cpus=oci.cpu.cpus,
            mems=oci.cpu.mems,
        )
    else:
        linux = status.resources.linux
        score = score if score is not None else linux.oom_score_adj or None
        resources = Resources(
            cpu_shares=linux.cpu_shares or None,
            cpu_quota=linux.cpu_quota or None,
            cpu_period=linux.cpu_period or None,
            memory_limit=linux.memory_limit_in_bytes or None,
            hugepages={parse_page_bytes(h.page_size): h.limit for h in linux.hugepage_limits},
            cpus=linux.cpuset_cpus,
            mems=linux.cpuset_mems,
        )
    privileged = any(allows_all_devices(r.allow, r.type, r.major, r.minor) for r in oci.devices)
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
                DeviceFile(entry.type, entry.major, entry.minor)
                for entry in (() if privileged else spec.linux.devices)
            ],
            environment=spec.process.env,
            annotations=annotations,
        ),
        starting=status.state == cri_pb2.CONTAINER_CREATED,
    )
