"""What the kubelet says that it gave to containers: its PodResources socket.

One server answers all of the node, ten calls at once and a hundred a second (kubernetes
``pkg/kubelet/apis/grpc/ratelimit.go``), so nothing here is called in a loop. Nothing here is on the
way of a container's start either: a kubelet that hangs costs the caller a second, and whatever is
wrong is a sentence.

``grpc`` is imported when a call is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from nri_numa.model.cpuset import CPUSet, NUMASet

KUBELET_CALL_TIMEOUT_S: Final = 1.0
"""Seconds for one call."""
_MAX_KUBELET_ANSWER_BYTES: Final = 16 << 20
"""Bytes of an answer, as the kubelet's own clients take; grpc's 4 MiB are few for a dense node."""
RATE_LIMITED_PROBLEM: Final = "the kubelet is asked too often by programs on this node; ask again"
_LISTER_SERVICE: Final = "/v1.PodResourcesLister/"


class AllocatedDevices(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one resource: the NUMA nodes of each, empty where the kubelet knows none."""

    resource: str
    by_id: Mapping[str, NUMASet]

    @property
    def allocated_ids(self) -> tuple[str, ...]:
        """Sorted, each once."""
        return tuple(sorted(self.by_id))

    @property
    def numa_nodes(self) -> NUMASet:
        """Of all of them together."""
        return NUMASet(i for nodes in self.by_id.values() for i in nodes)


class AllocatedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One block of memory: its type (``memory``, ``hugepages-2Mi``), bytes, and NUMA nodes."""

    kind: str
    size: int
    numa_nodes: NUMASet


class ContainerResources(msgspec.Struct, frozen=True, kw_only=True):
    """What one container has by the kubelet's books.

    Attributes:
        cpus: exclusive ones of its static policy.
        claims: devices of dynamic resource allocation, ``driver/pool/device``, sorted.
    """

    container: str
    cpus: CPUSet = msgspec.field(default_factory=CPUSet)
    memory: tuple[AllocatedMemory, ...] = ()
    devices: tuple[AllocatedDevices, ...] = ()
    claims: tuple[str, ...] = ()


class DeviceCount(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Devices of one resource on one NUMA node; one of several NUMA nodes counts on each.

    Attributes:
        allocatable: those that the kubelet can give, which are the healthy ones.
        available: those of them that no pod has.
    """

    resource: str
    numa_node: int
    allocatable: int
    available: int


def preload_grpc() -> None:
    """Import what a call needs, so that the first one is quick."""
    import grpc  # noqa: F401

    from nri_numa.kubelet.pb import podresources_pb2  # noqa: F401


def pod_resources_socket_path(kubelet_root: str) -> str:
    """Where the kubelet with this root serves."""
    return os.path.join(kubelet_root, "pod-resources", "kubelet.sock")


def query_pod(
    kubelet_root: str, namespace: str, pod: str, *, timeout_s: float = KUBELET_CALL_TIMEOUT_S
) -> tuple[ContainerResources, ...] | str:
    """What the containers of a pod have, in their order; or why that is not known.

    One call, and a second one to kubelets whose gate for asking about one pod is off.
    """
    from nri_numa.kubelet.pb import podresources_pb2 as pb

    request = pb.GetPodResourcesRequest(pod_namespace=namespace, pod_name=pod)
    answer = _call_kubelet(kubelet_root, "Get", request, pb.GetPodResourcesResponse, timeout_s)
    if not isinstance(answer, _CallFailure):
        return tuple(_decode_container(one) for one in answer.pod_resources.containers)
    if not answer.gated:
        return answer.text
    listed = _list_pod_resources(kubelet_root, timeout_s)
    if isinstance(listed, _CallFailure):
        return listed.text
    for one in listed.pod_resources:
        if (one.namespace, one.name) == (namespace, pod):
            return tuple(_decode_container(each) for each in one.containers)
    return "the kubelet knows no such pod"


def query_allocated_device_ids(kubelet_root: str, resource: str) -> set[str]:
    """Ids of one resource that pods have; empty where the kubelet does not tell."""
    held = _query_allocated_devices(kubelet_root)
    return set() if isinstance(held, str) else {id for name, id in held if name == resource}


def query_device_counts(kubelet_root: str) -> tuple[DeviceCount, ...] | str:
    """All devices whose NUMA node the kubelet knows, sorted; or why that is not known.

    Two calls. What pods have comes first: a device that is given in between counts as free until
    the next look, and one that its plugin removes is not counted as given.
    """
    from nri_numa.kubelet.pb import podresources_pb2 as pb

    held = _query_allocated_devices(kubelet_root)
    if isinstance(held, str):
        return held
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
    places: dict[tuple[str, int], set[str]] = {}
    for one in answer.devices:
        if "/" in one.resource_name:  # else it would be a second "cpu" or "memory"
            for node in one.topology.nodes:
                places.setdefault((one.resource_name, node.ID), set()).update(one.device_ids)
    return tuple(
        DeviceCount(
            resource=resource,
            numa_node=numa_node,
            allocatable=len(ids),
            available=sum((resource, id) not in held for id in ids),
        )
        for (resource, numa_node), ids in sorted(places.items())
    )


def _query_allocated_devices(kubelet_root: str) -> set[tuple[str, str]] | str:
    """Resource and id of every device that a pod has, or why that is not known."""
    listed = _list_pod_resources(kubelet_root, KUBELET_CALL_TIMEOUT_S)
    if isinstance(listed, _CallFailure):
        return listed.text
    return {
        (devices.resource_name, id)
        for pod in listed.pod_resources
        for container in pod.containers
        for devices in container.devices
        for id in devices.device_ids
    }


def _list_pod_resources(kubelet_root: str, timeout_s: float) -> Any:
    from nri_numa.kubelet.pb import podresources_pb2 as pb

    request = pb.ListPodResourcesRequest()
    return _call_kubelet(kubelet_root, "List", request, pb.ListPodResourcesResponse, timeout_s)


class _CallFailure(msgspec.Struct, frozen=True):
    """Why there is no answer; ``gated`` where another method may know."""

    text: str
    gated: bool = False


def _call_kubelet(
    kubelet_root: str, method: str, request: Any, response: Any, timeout_s: float
) -> Any:
    import grpc

    path = pod_resources_socket_path(kubelet_root)
    if not os.access(path, os.F_OK):
        # The directory is root's: for others nothing in it is there.
        return _CallFailure(f"{path} is not there, or may not be looked at")
    options = (
        # Go servers check the :authority header, which for a unix socket would be its path.
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
    for one in container.devices:
        # A device on two NUMA nodes comes twice, once with each.
        ids = devices.setdefault(one.resource_name, {})
        for id in one.device_ids:
            ids.setdefault(id, set()).update(node.ID for node in one.topology.nodes)
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
                    f"{one.driver_name}/{one.pool_name}/{one.device_name}"
                    for claim in container.dynamic_resources
                    for one in claim.claim_resources
                }
            )
        ),
    )


def _keep_valid_ids(kind: Any, ids: Iterable[int]) -> Any:
    """A set of ids; what no machine has is left out."""
    found = set()
    for id in ids:
        if 0 <= id < kind.LIMIT:
            found.add(id)
    return kind(found)
