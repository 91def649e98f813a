"""Resources that the kubelet allocated to containers, from its PodResources socket.

One server answers all programs of the node, ten calls at once and a hundred a second (kubernetes
``pkg/kubelet/apis/grpc/ratelimit.go``), so nothing here is called in a loop. Nor is anything here
called during a container's start: a kubelet that hangs delays the caller by a second, and every
problem is a sentence.

``grpc`` is imported at the first call.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from nri_numa.model.cpuset import CPUSet, NUMASet

KUBELET_CALL_TIMEOUT_S: Final = 1.0
"""Maximum seconds for one call."""
_MAX_KUBELET_ANSWER_BYTES: Final = 16 << 20
"""Maximum bytes of an answer, as in the kubelet's own clients; dense nodes exceed grpc's 4 MiB."""
RATE_LIMITED_PROBLEM: Final = "programs on this node query the kubelet too often; try again"
_LISTER_SERVICE: Final = "/v1.PodResourcesLister/"


class AllocatedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one resource, with the NUMA nodes of each; empty if the kubelet knows none."""

    resource: str
    by_id: Mapping[str, NUMASet]

    @property
    def allocated_ids(self) -> tuple[str, ...]:
        """Ids of the devices, sorted and unique."""
        return tuple(sorted(self.by_id))

    @property
    def numa_nodes(self) -> NUMASet:
        """NUMA nodes of all devices."""
        return NUMASet(i for nodes in self.by_id.values() for i in nodes)


class AllocatedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Block of memory: its type (``memory``, ``hugepages-2Mi``), bytes, and NUMA nodes."""

    kind: str
    size: int
    numa_nodes: NUMASet


class ContainerResources(msgspec.Struct, frozen=True, kw_only=True):
    """Resources of one container, as allocated by the kubelet.

    Attributes:
        cpus: exclusive CPUs of its static policy.
        claims: devices of dynamic resource allocation, ``driver/pool/device``, sorted.
    """

    container: str
    cpus: CPUSet = msgspec.field(default_factory=CPUSet)
    memory: tuple[AllocatedMemory, ...] = ()
    devices: tuple[AllocatedDevices, ...] = ()
    claims: tuple[str, ...] = ()


class NodeDevice(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A healthy device of this node, with its NUMA nodes; empty if its plugin reports none."""

    resource: str
    id: str
    numa_nodes: frozenset[int]
    is_allocated: bool = False


class DeviceCount(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Number of devices of one resource on one NUMA node; a device on several counts on each.

    Attributes:
        allocatable: healthy devices, which the kubelet can allocate.
        available: allocatable devices that no pod has.
    """

    resource: str
    numa_node: int
    allocatable: int
    available: int


def preload_grpc() -> None:
    """Import the modules of a call, so that the first call is fast."""
    import grpc  # noqa: F401

    from nri_numa.kubelet.pb import podresources_pb2  # noqa: F401


def pod_resources_socket_path(kubelet_root: str) -> str:
    """Return the socket of the kubelet with this root directory."""
    return os.path.join(kubelet_root, "pod-resources", "kubelet.sock")


def query_pod(
    kubelet_root: str, namespace: str, pod: str, *, timeout_s: float = KUBELET_CALL_TIMEOUT_S
) -> tuple[ContainerResources, ...] | str:
    """Query the resources of a pod's containers, in their order; or return a problem.

    It takes one call, and a second one if the kubelet's feature gate for single pods is off.
    """
    from nri_numa.kubelet.pb import podresources_pb2 as pb

    request = pb.GetPodResourcesRequest(pod_namespace=namespace, pod_name=pod)
    answer = _call_kubelet(kubelet_root, "Get", request, pb.GetPodResourcesResponse, timeout_s)
    if not isinstance(answer, _CallFailure):
        return tuple(_decode_container(c) for c in answer.pod_resources.containers)
    if not answer.gated:
        return answer.text
    listing = _list_pod_resources(kubelet_root, timeout_s)
    if isinstance(listing, _CallFailure):
        return listing.text
    for pod_entry in listing.pod_resources:
        if (pod_entry.namespace, pod_entry.name) == (namespace, pod):
            return tuple(_decode_container(c) for c in pod_entry.containers)
    return "the kubelet knows no such pod"


def query_allocated_device_ids(kubelet_root: str, resource: str) -> set[str]:
    """Query the device ids of one resource that pods have; empty if the kubelet does not answer."""
    devices = _query_allocated_devices(kubelet_root)
    return set() if isinstance(devices, str) else {id for name, id in devices if name == resource}


def query_node_devices(kubelet_root: str) -> tuple[NodeDevice, ...] | str:
    """Query all healthy devices, sorted by resource and id; or return a problem.

    Two calls. The devices of pods come first: a device allocated in between counts as free until
    the next query, and one that its plugin removes does not count as allocated.
    """
    from nri_numa.kubelet.pb import podresources_pb2 as pb

    allocated = _query_allocated_devices(kubelet_root)
    if isinstance(allocated, str):
        return allocated
    request = pb.AllocatableResourcesRequest()
    answer = _call_kubelet(
        kubelet_root,
        "GetAllocatableResources",
        request,
        pb.AllocatableResourcesResponse,
        KUBELET_CALL_TIMEOUT_S,
    )
    if isinstance(answer, _CallFailure):
        return answer.text
    numa_nodes: dict[tuple[str, str], set[int]] = {}
    for entry in answer.devices:
        if "/" in entry.resource_name:  # without a slash it would be a second "cpu" or "memory"
            for id in entry.device_ids:
                # A device on two NUMA nodes is listed twice, once with each.
                ids = numa_nodes.setdefault((entry.resource_name, id), set())
                ids.update(node.ID for node in entry.topology.nodes)
    return tuple(
        NodeDevice(
            resource=key[0], id=key[1], numa_nodes=frozenset(ids), is_allocated=key in allocated
        )
        for key, ids in sorted(numa_nodes.items())
    )


def count_devices(devices: Iterable[NodeDevice]) -> tuple[DeviceCount, ...]:
    """Count the devices with a known NUMA node, sorted by resource and NUMA node."""
    allocatable: Counter[tuple[str, int]] = Counter()
    available: Counter[tuple[str, int]] = Counter()
    for device in devices:
        for numa_node in device.numa_nodes:
            allocatable[device.resource, numa_node] += 1
            available[device.resource, numa_node] += not device.is_allocated
    return tuple(
        DeviceCount(
            resource=resource,
            numa_node=numa_node,
            allocatable=count,
            available=available[resource, numa_node],
        )
        for (resource, numa_node), count in sorted(allocatable.items())
    )


def _query_allocated_devices(kubelet_root: str) -> set[tuple[str, str]] | str:
    """Query resource and id of every device that a pod has, or return a problem."""
    listing = _list_pod_resources(kubelet_root, KUBELET_CALL_TIMEOUT_S)
    if isinstance(listing, _CallFailure):
        return listing.text
    return {
        (devices.resource_name, id)
        for pod in listing.pod_resources
        for container in pod.containers
        for devices in container.devices
        for id in devices.device_ids
    }


def _list_pod_resources(kubelet_root: str, timeout_s: float) -> Any:
    from nri_numa.kubelet.pb import podresources_pb2 as pb

    request = pb.ListPodResourcesRequest()
    return _call_kubelet(kubelet_root, "List", request, pb.ListPodResourcesResponse, timeout_s)


class _CallFailure(msgspec.Struct, frozen=True):
    """Reason for a missing answer; ``gated`` if another method may have one."""

    text: str
    gated: bool = False


def _call_kubelet(
    kubelet_root: str, method: str, request: Any, response: Any, timeout_s: float
) -> Any:
    import grpc

    path = pod_resources_socket_path(kubelet_root)
    if not os.access(path, os.F_OK):
        # The directory belongs to root; other users see nothing in it.
        return _CallFailure(f"{path} does not exist or cannot be read")
    options = (
        # Go servers check the :authority header, which would be the path of the unix socket.
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", _MAX_KUBELET_ANSWER_BYTES),
    )
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        call = channel.unary_unary(
            _LISTER_SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        try:
            return call(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return _call_failure(error, path, timeout_s)


def _call_failure(error: Any, path: str, timeout_s: float) -> _CallFailure:
    import grpc

    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return _CallFailure(f"the kubelet did not answer within {timeout_s:g} s ({path})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "rate limit" in details:
        return _CallFailure(RATE_LIMITED_PROBLEM)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _CallFailure(f"no answer at {path}")
    if code is grpc.StatusCode.UNIMPLEMENTED or "disabled" in details:
        return _CallFailure(f"the kubelet does not serve this: {details}", gated=True)
    if "not found" in details:
        return _CallFailure("the kubelet knows no such pod")
    return _CallFailure(f"the kubelet refused: {code.name}: {details}")


def _decode_container(container: Any) -> ContainerResources:
    devices: dict[str, dict[str, set[int]]] = {}
    for entry in container.devices:
        # A device on two NUMA nodes is listed twice, once with each.
        ids = devices.setdefault(entry.resource_name, {})
        for id in entry.device_ids:
            ids.setdefault(id, set()).update(node.ID for node in entry.topology.nodes)
    return ContainerResources(
        container=container.name,
        cpus=_keep_valid_ids(CPUSet, container.cpu_ids),
        memory=tuple(
            AllocatedMemory(
                kind=block.memory_type,
                size=block.size,
                numa_nodes=_keep_valid_ids(NUMASet, (node.ID for node in block.topology.nodes)),
            )
            for block in container.memory
        ),
        devices=tuple(
            AllocatedDevices(
                resource=name,
                by_id={id: _keep_valid_ids(NUMASet, nodes) for id, nodes in ids.items()},
            )
            for name, ids in sorted(devices.items())
        ),
        claims=tuple(
            sorted(
                {
                    f"{entry.driver_name}/{entry.pool_name}/{entry.device_name}"
                    for claim in container.dynamic_resources
                    for entry in claim.claim_resources
                }
            )
        ),
    )


def _keep_valid_ids(kind: Any, ids: Iterable[int]) -> Any:
    """Build a set of ids without those that no machine can have."""
    return kind(id for id in ids if 0 <= id < kind.LIMIT)
