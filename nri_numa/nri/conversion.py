"""Conversion between protobuf and engine types, and the answers to the runtime's requests.

No other module of the agent sees protobuf. What runtimes send differs from the field tables in
small ways: names may be missing, the QoS class is not set, and an update has zeros for fields that
it does not change. This module evens that out. A missing message reads like an empty one, so
missing parts become values with missing parts, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from google.protobuf.message import Message
from msgspec.structs import replace

from nri_numa.engine.request.demand import DEFAULT_CFS_PERIOD_US
from nri_numa.errors import LocalProtocolError
from nri_numa.model.workload import (
    CDI_ANNOTATION_PREFIX,
    DEVICE_VARIABLE_PREFIXES,
    NO_DEVICE_MENTIONS,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    DeviceFile,
    DeviceMentions,
    MemoryPolicy,
    PodSandbox,
    PodTable,
    QoSClass,
    Resources,
    find_device_mentions,
)
from nri_numa.nri.wire import events as ev
from nri_numa.nri.wire.pb import nri_pb2 as pb
from nri_numa.nri.wire.versions import Event
from nri_numa.runtime import (
    EMPTY_RESOURCES,
    Planner,
    RuntimeHandler,
    allows_all_devices,
    inferred_qos,
    parse_page_bytes,
)
from nri_numa.runtime_profile import CRI_O_SHARED_CPUS_ANNOTATION, CRI_O_SHARED_CPUS_VARIABLE

CONTAINER_NAME_LABEL: Final = "io.kubernetes.container.name"
POD_NAME_LABEL: Final = "io.kubernetes.pod.name"
POD_NAMESPACE_LABEL: Final = "io.kubernetes.pod.namespace"
POD_UID_LABEL: Final = "io.kubernetes.pod.uid"


# --- from the runtime -------------------------------------------------------------------------


def pods_from(
    pods: Iterable[pb.PodSandbox], containers: Iterable[pb.Container], *, mentions: bool
) -> PodTable:
    """Build the table of all pods; each pod is converted when it is first used, and most never are.

    `pod_from` gets the first container of a pod.
    """
    messages = {pod.id: pod for pod in pods}
    container_by_pod: dict[str, pb.Container] = {}

    def convert_pod(pod_id: str) -> PodSandbox:
        if not container_by_pod:
            for container in containers:
                container_by_pod.setdefault(container.pod_sandbox_id, container)
        return pod_from(messages[pod_id], container_by_pod.get(pod_id), mentions=mentions)

    return PodTable({pod_id: _pod_uid(pod) for pod_id, pod in messages.items()}, convert_pod)


def _pod_uid(pod: pb.PodSandbox) -> str:
    return pod.uid or pod.labels.get(POD_UID_LABEL, "") or pod.id


def pod_from(
    pod: pb.PodSandbox, container: pb.Container | None = None, *, mentions: bool = False
) -> PodSandbox:
    """Convert a pod; a stopped one may have nothing but an id.

    The container is read only if the pod's cgroup does not show the QoS class, and the network
    namespace only for ``mentions``.
    """
    labels, linux = _copy_map(pod.labels), pod.linux
    resources, network = EMPTY_RESOURCES, ""
    if linux.HasField("pod_resources"):
        resources = resources_from(linux.pod_resources)
    if mentions:
        network = next((n.path for n in linux.namespaces if n.type == "network"), "")
    qos = QoSClass.of_cgroup(linux.cgroup_parent)
    if qos is None:
        qos = inferred_qos(resources, None if container is None else container_from(container))
    return PodSandbox(
        id=pod.id,
        uid=_pod_uid(pod),
        namespace=pod.namespace or labels.get(POD_NAMESPACE_LABEL, ""),
        name=pod.name or labels.get(POD_NAME_LABEL, ""),
        labels=labels,
        annotations=_copy_map(pod.annotations),
        qos=qos,
        runtime_handler=pod.runtime_handler,
        cgroup_parent=linux.cgroup_parent,
        resources=resources,
        network_namespace=network,
        cgroups_path=linux.cgroups_path,
    )


def container_from(container: pb.Container, *, mentions: bool = False) -> Container:
    """Convert a container; the label has its name if the runtime leaves the field empty."""
    linux = container.linux
    return Container(
        id=container.id,
        pod_id=container.pod_sandbox_id,
        name=container.name or container.labels.get(CONTAINER_NAME_LABEL, ""),
        annotations=_copy_map(container.annotations),
        resources=resources_from(linux.resources),
        oom_score_adj=_optional_number(linux, "oom_score_adj"),
        pid=container.pid,
        cgroups_path=linux.cgroups_path,
        mentions=read_device_mentions(container) if mentions else NO_DEVICE_MENTIONS,
        starting=container.state == pb.CONTAINER_CREATED,
    )


_MAX_CACHED_RESOURCES_BYTES: Final = 512
"""Maximum bytes of resources that are cached; a message may be far longer."""


def resources_from(resources: pb.LinuxResources, *, update: bool = False) -> Resources:
    """Convert resources.

    With ``update`` they belong to an UpdateContainer request, whose wrappers are always set and in
    which 0 means *not part of this update*.
    """
    if not update:
        # Replicas have the same bytes. Comparing bytes is faster than reading each field, and the
        # value is in memory once.
        data = resources.SerializeToString()
        if len(data) <= _MAX_CACHED_RESOURCES_BYTES:
            return _cached_resources(data)
    return _convert_resources(resources, update=update)


@lru_cache(maxsize=256)
def _cached_resources(data: bytes) -> Resources:
    return _convert_resources(pb.LinuxResources.FromString(data), update=False)


def _convert_resources(resources: pb.LinuxResources, *, update: bool) -> Resources:
    cpu, memory = resources.cpu, resources.memory
    fields = ((cpu, "shares"), (cpu, "quota"), (cpu, "period"), (memory, "limit"))
    values = [_optional_number(message, name) for message, name in fields]
    cpu_shares, quota, period, limit = [v or None for v in values] if update else values
    return Resources(
        cpu_shares=cpu_shares,
        cpu_quota=quota,
        cpu_period=period,
        memory_limit=limit,
        hugepages={
            parse_page_bytes(item.page_size): item.limit
            for item in resources.hugepage_limits
            if item.limit
        },
        cpus=cpu.cpus,
        mems=cpu.mems,
    )


def _optional_number(message: Message, name: str) -> int | None:
    """Return an optional number; None if it is not set."""
    return getattr(message, name).value if message.HasField(name) else None


def _copy_map(texts: Mapping[str, str]) -> dict[str, str]:
    # dict() of a protobuf map iterates in Python, in twice the time.
    return {key: texts[key] for key in texts}


_PCI_VARIABLE, _NVIDIA_VARIABLE, _CLAIM_VARIABLE = (
    name.encode() for name in DEVICE_VARIABLE_PREFIXES
)
_ENCODED_CDI_ANNOTATION_PREFIX: Final = CDI_ANNOTATION_PREFIX.encode()


def read_device_mentions(container: pb.Container) -> DeviceMentions:
    """Read the device mentions of a container.

    Nearly all containers have none. A search in the message's bytes shows that for less than the
    decoding of its variables.
    """
    linux, devices = container.linux, container.CDI_devices
    # Has every variable and annotation, in UTF-8.
    encoded = container.SerializeToString()
    has_variables = (
        _PCI_VARIABLE in encoded or _NVIDIA_VARIABLE in encoded or _CLAIM_VARIABLE in encoded
    )
    has_names = _ENCODED_CDI_ANNOTATION_PREFIX in encoded
    if not linux.devices and not has_variables and not has_names and not devices:
        return NO_DEVICE_MENTIONS
    privileged = any(
        allows_all_devices(
            rule.allow, rule.type, *(_optional_number(rule, name) for name in ("major", "minor"))
        )
        for rule in linux.resources.devices
    )
    files = () if privileged else linux.devices
    return find_device_mentions(
        nodes=[DeviceFile(device.type, device.major, device.minor) for device in files],
        environment=container.env if has_variables else (),
        annotations=_copy_map(container.annotations) if has_names else {},
        names=[device.name for device in devices],
    )


def find_added_cpus_source(
    pod: PodSandbox, container: Container, environment: Iterable[str]
) -> str:
    """Find the annotation or variable by which CRI-O adds CPUs of its own; empty if none."""
    key = f"{CRI_O_SHARED_CPUS_ANNOTATION}/{container.name}"
    if "enable" in (pod.annotations.get(key), container.annotations.get(key)):
        return f"annotation {key}"
    has_variable = any(v.startswith(f"{CRI_O_SHARED_CPUS_VARIABLE}=") for v in environment)
    return f"variable {CRI_O_SHARED_CPUS_VARIABLE}" if has_variable else ""


# --- to the runtime ---------------------------------------------------------------------------

_MPOL_MODES: Final[Mapping[MemoryPolicy, pb.MpolMode]] = {
    policy: getattr(pb, f"MPOL_{policy.name}") for policy in MemoryPolicy
}


def create_response(adjustment: ContainerAdjustment) -> pb.CreateContainerResponse:
    """Build the answer to CreateContainer; the empty message if nothing changes."""
    response = pb.CreateContainerResponse()
    if adjustment.cpus or adjustment.mems or adjustment.quota is not None:
        cpu = response.adjust.linux.resources.cpu
        cpu.cpus = adjustment.cpus
        cpu.mems = adjustment.mems
        if adjustment.quota is not None:
            # The kubelet itself sends -1 for containers with exclusive CPUs: runc and crun pass
            # it on to cgroup v1 and write "max" for cgroup v2. A wrapped 0 would be written too,
            # with a different meaning in each.
            cpu.quota.value = adjustment.quota
    if adjustment.annotations:
        response.adjust.annotations.update(adjustment.annotations)
    for key, value in adjustment.env.items():
        response.adjust.env.add(key=key, value=value)
    for inside, outside in adjustment.mounts:
        response.adjust.mounts.add(
            destination=inside, type="bind", source=outside, options=["bind", "ro", "nosuid"]
        )
    if (policy := adjustment.memory_policy) is not None:
        memory_policy = response.adjust.linux.memory_policy
        memory_policy.mode = _MPOL_MODES[policy.mode]
        memory_policy.nodes = str(policy.nodes)
    return response


def update_messages(
    updates: Sequence[ContainerUpdate], *, own_id: str = ""
) -> Iterator[pb.ContainerUpdate]:
    """Yield a message for each container, in their order, to be copied before the next one.

    The runtime ignores a failed update, except that of the request's own container ``own_id``:
    another container that exits meanwhile must not fail the request. CRI-O would fail a whole
    Synchronize.

    The runtime treats two updates of one container in one answer as a conflict and refuses them, so
    they are merged, and the later value counts. Empty updates are left out.

    Raises:
        LocalProtocolError: an update names no container.
    """
    by_id: dict[str, ContainerUpdate] = {}
    for update in updates:
        earlier = by_id.get(update[0])
        by_id[update[0]] = update if earlier is None else update.merge_onto(earlier)
    if "" in by_id:
        raise LocalProtocolError("a ContainerUpdate without container_id would change nothing")
    # A changed shared pool is the same change for hundreds of containers: its message is shared.
    messages: dict[object, pb.ContainerUpdate] = {}
    for container_id, update in by_id.items():
        message = messages.get(update[1:])
        if message is None:
            if update.is_empty:
                continue
            message = messages[update[1:]] = pb.ContainerUpdate(linux=linux_update(update))
        message.container_id = container_id
        message.ignore_failure = container_id != own_id
        yield message


def linux_update(update: ContainerUpdate) -> pb.LinuxContainerUpdate:
    """Convert the changes of one update, without the container id."""
    message = pb.LinuxContainerUpdate()
    cpu = message.resources.cpu
    if update.cpus:
        cpu.cpus = update.cpus
    if update.mems:
        cpu.mems = update.mems
    if update.cpu_quota is not None:
        cpu.quota.value = update.cpu_quota
        # crun ignores a quota that has no period.
        cpu.period.value = update.cpu_period or DEFAULT_CFS_PERIOD_US
    elif update.cpu_period is not None:
        cpu.period.value = update.cpu_period
    if update.cpu_shares is not None:
        cpu.shares.value = update.cpu_shares
    if update.memory_limit is not None:
        message.resources.memory.limit.value = update.memory_limit
    return message


def answer_synchronize(
    plan: Planner, request: ev.SynchronizeRequested, *, mentions: bool
) -> pb.SynchronizeResponse:
    """Build the answer to Synchronize.

    A container without an id is left out: its update would make the whole answer invalid.
    """
    pods = pods_from(request.pods, request.containers, mentions=mentions)
    reported = [container_from(c, mentions=mentions) for c in request.containers if c.id]
    return pb.SynchronizeResponse(update=update_messages(plan(pods, reported)))


# --- requests ---------------------------------------------------------------------------------


def answer_request(
    handler: RuntimeHandler, request: ev.EventRequested | ev.SynchronizeRequested
) -> Message | None:
    """Let the handler answer a request of the session; None is the empty response."""
    mentions = handler.reads_mentions
    if isinstance(request, ev.SynchronizeRequested):
        return answer_synchronize(handler.synchronize, request, mentions=mentions)
    event, message = request.event, request.message
    match event:
        case Event.POST_UPDATE_CONTAINER:
            handler.post_update_container(message.container.id)
        case Event.STOP_CONTAINER:
            updates = handler.stop_container(message.container.id)
            return pb.StopContainerResponse(update=update_messages(updates))
        case Event.REMOVE_CONTAINER:
            handler.remove_container(message.container.id)
        case Event.RUN_POD_SANDBOX:
            handler.run_pod(pod_from(message.pod, mentions=mentions))
        case Event.UPDATE_POD_SANDBOX:
            total = resources_from(message.linux_resources, update=True)
            handler.update_pod(pod_from(message.pod), total)
        case Event.STOP_POD_SANDBOX:
            handler.stop_pod(pod_from(message.pod))
        case Event.REMOVE_POD_SANDBOX:
            handler.remove_pod(pod_from(message.pod))
        case _:
            return _answer_container_event(handler, event, message, mentions=mentions)
    return None


def _answer_container_event(
    handler: RuntimeHandler, event: Event, message: Any, *, mentions: bool
) -> Message | None:
    pod = pod_from(message.pod, message.container, mentions=mentions)
    container = container_from(message.container, mentions=mentions)
    match event:
        case Event.CREATE_CONTAINER:
            return _answer_create(handler, pod, container, message.container.env)
        case Event.UPDATE_CONTAINER:
            # The container's own update overrides the request field by field. Without one the
            # request passes unchanged, which avoids a containerd bug that loses the swap limit.
            requested = resources_from(message.linux_resources, update=True)
            updates = handler.update_container(pod, container, requested)
            messages = update_messages(updates, own_id=container.id)
            return pb.UpdateContainerResponse(update=messages)
        case Event.START_CONTAINER:
            handler.start_container(pod, container)
        case Event.POST_START_CONTAINER:
            handler.post_start_container(pod, container)
        case _:
            pass  # a runtime that sends more than was subscribed to
    return None


def _answer_create(
    handler: RuntimeHandler, pod: PodSandbox, container: Container, environment: Iterable[str]
) -> pb.CreateContainerResponse:
    if source := find_added_cpus_source(pod, container, environment):
        container = replace(container, added_cpus_source=source)
    adjustment, updates = handler.create_container(pod, container)
    response = create_response(adjustment)
    response.update.extend(update_messages(updates))
    return response
