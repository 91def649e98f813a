"""Protobuf ⇄ the engine's types, and the answers to the runtime's requests. Protobuf stops here.

What the runtimes really send differs from the field tables in small ways: names may be missing,
the QoS class is not given, and an update carries zeros for what it does not change. All of that is
evened out here. Messages with missing parts give values with missing parts, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from google.protobuf.message import Message

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
    inferred_qos,
    parse_page_bytes,
)

CONTAINER_NAME_LABEL: Final = "io.kubernetes.container.name"
POD_NAME_LABEL: Final = "io.kubernetes.pod.name"
POD_NAMESPACE_LABEL: Final = "io.kubernetes.pod.namespace"
POD_UID_LABEL: Final = "io.kubernetes.pod.uid"


# --- from the runtime -------------------------------------------------------------------------


def pods_from(
    pods: Iterable[pb.PodSandbox], containers: Iterable[pb.Container], *, mentions: bool = False
) -> PodTable:
    """All pods of a node; each is converted when it is used, which most are not.

    The first container of a pod counts where `pod_from` needs one.
    """
    messages = {pod.id: pod for pod in pods}
    first: dict[str, pb.Container] = {}

    def convert_pod(pod_id: str) -> PodSandbox:
        if not first:
            for container in containers:
                first.setdefault(container.pod_sandbox_id, container)
        return pod_from(messages[pod_id], first.get(pod_id), mentions=mentions)

    return PodTable(
        {
            pod_id: pod.uid or pod.labels.get(POD_UID_LABEL, "") or pod_id
            for pod_id, pod in messages.items()
        },
        convert_pod,
    )


def pod_from(
    pod: pb.PodSandbox, container: pb.Container | None = None, *, mentions: bool = False
) -> PodSandbox:
    """Convert a pod; one that is stopped may have an id and nothing else.

    Its container is read only where the QoS class does not follow from the pod's cgroup, and its
    network namespace only for ``mentions``.
    """
    labels = _copy_map(pod.labels)
    cgroup_parent, cgroups_path, resources, network = "", "", EMPTY_RESOURCES, ""
    if pod.HasField("linux"):
        linux = pod.linux
        cgroup_parent, cgroups_path = linux.cgroup_parent, linux.cgroups_path
        if linux.HasField("pod_resources"):
            resources = resources_from(linux.pod_resources)
        if mentions:
            network = next((n.path for n in linux.namespaces if n.type == "network"), "")
    qos = QoSClass.of_cgroup(cgroup_parent)
    if qos is None:
        qos = inferred_qos(resources, None if container is None else container_from(container))
    return PodSandbox(
        id=pod.id,
        uid=pod.uid or labels.get(POD_UID_LABEL, "") or pod.id,
        namespace=pod.namespace or labels.get(POD_NAMESPACE_LABEL, ""),
        name=pod.name or labels.get(POD_NAME_LABEL, ""),
        labels=labels,
        annotations=_copy_map(pod.annotations),
        qos=qos,
        runtime_handler=pod.runtime_handler,
        cgroup_parent=cgroup_parent,
        resources=resources,
        network_namespace=network,
        cgroups_path=cgroups_path,
    )


def container_from(container: pb.Container, *, mentions: bool = False) -> Container:
    """Convert a container; its name is that of the label where the runtime leaves it empty."""
    resources, score, cgroups_path = EMPTY_RESOURCES, None, ""
    if container.HasField("linux"):
        linux = container.linux
        cgroups_path = linux.cgroups_path
        if linux.HasField("resources"):
            resources = resources_from(linux.resources)
        if linux.HasField("oom_score_adj"):
            score = linux.oom_score_adj.value
    return Container(
        id=container.id,
        pod_id=container.pod_sandbox_id,
        name=container.name or container.labels.get(CONTAINER_NAME_LABEL, ""),
        annotations=_copy_map(container.annotations),
        resources=resources,
        oom_score_adj=score,
        pid=container.pid,
        cgroups_path=cgroups_path,
        mentions=read_device_mentions(container) if mentions else NO_DEVICE_MENTIONS,
        starting=container.state == pb.CONTAINER_CREATED,
    )


_MAX_CACHED_RESOURCES_BYTES: Final = 512
"""Bytes of resources that are worth remembering; far longer ones can be sent as well."""


def resources_from(resources: pb.LinuxResources, *, update: bool = False) -> Resources:
    """Convert resources.

    With ``update`` they are those of an UpdateContainer request, whose wrappers are always there
    and where 0 means *not part of this update*.
    """
    if not update:
        # Replicas have the same bytes: comparing them is quicker than looking at each field, and
        # their value is in memory once.
        data = resources.SerializeToString()
        if len(data) <= _MAX_CACHED_RESOURCES_BYTES:
            return _cached_resources(data)
    return _convert_resources(resources, update=update)


@lru_cache(maxsize=256)
def _cached_resources(data: bytes) -> Resources:
    return _convert_resources(pb.LinuxResources.FromString(data), update=False)


def _convert_resources(resources: pb.LinuxResources, *, update: bool) -> Resources:
    # Parts that are missing have the values of empty ones, and read like them.
    cpu, memory = resources.cpu, resources.memory
    shares, quota, period = (
        _optional_number(cpu, "shares"),
        _optional_number(cpu, "quota"),
        _optional_number(cpu, "period"),
    )
    limit = _optional_number(memory, "limit")
    if update:
        shares, quota, period, limit = shares or None, quota or None, period or None, limit or None
    return Resources(
        cpu_shares=shares,
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
    """A number that may be missing."""
    return getattr(message, name).value if message.HasField(name) else None


def _copy_map(texts: Mapping[str, str]) -> dict[str, str]:
    # dict() of a protobuf map goes through its Python side, at twice the time.
    return {key: texts[key] for key in texts}


_PCI_VARIABLE, _NVIDIA_VARIABLE, _CLAIM_VARIABLE = (
    name.encode() for name in DEVICE_VARIABLE_PREFIXES
)
_ENCODED_CDI_ANNOTATION_PREFIX: Final = CDI_ANNOTATION_PREFIX.encode()


def read_device_mentions(container: pb.Container) -> DeviceMentions:
    """What is said of a container's devices.

    Nearly all containers mention nothing, which a search through the message's bytes shows for less
    than the 30 strings of 30 variables.
    """
    # Parts that are missing have the values of empty ones, and read like them.
    linux, devices = container.linux, container.CDI_devices
    # What stands in a variable or an annotation stands in here, as UTF-8.
    everything = container.SerializeToString()
    has_variables = (
        _PCI_VARIABLE in everything
        or _NVIDIA_VARIABLE in everything
        or _CLAIM_VARIABLE in everything
    )
    has_names = _ENCODED_CDI_ANNOTATION_PREFIX in everything
    if not linux.devices and not has_variables and not has_names and not devices:
        return NO_DEVICE_MENTIONS
    privileged = any(_allows_all_devices(rule) for rule in linux.resources.devices)
    files = () if privileged else linux.devices
    return find_device_mentions(
        nodes=[DeviceFile(one.type, one.major, one.minor) for one in files],
        environment=container.env if has_variables else (),
        annotations=_copy_map(container.annotations) if has_names else {},
        names=[one.name for one in devices],
    )


def _allows_all_devices(rule: pb.LinuxDeviceCgroup) -> bool:
    """Whether it makes a container privileged: device files that are listed say nothing of it."""
    return (
        rule.allow
        and rule.type in ("", "a")
        and not (rule.HasField("major") and rule.major.value >= 0)
        and not (rule.HasField("minor") and rule.minor.value >= 0)
    )


# --- to the runtime ---------------------------------------------------------------------------

_MessageWithUpdates: TypeAlias = (
    pb.CreateContainerResponse
    | pb.UpdateContainerResponse
    | pb.StopContainerResponse
    | pb.SynchronizeResponse
    | pb.UpdateContainersRequest
)
"""The messages with a field ``update``."""

_MPOL_MODES: Final[Mapping[MemoryPolicy, pb.MpolMode]] = {
    MemoryPolicy.DEFAULT: pb.MPOL_DEFAULT,
    MemoryPolicy.LOCAL: pb.MPOL_LOCAL,
    MemoryPolicy.PREFERRED: pb.MPOL_PREFERRED,
    MemoryPolicy.PREFERRED_MANY: pb.MPOL_PREFERRED_MANY,
    MemoryPolicy.BIND: pb.MPOL_BIND,
    MemoryPolicy.INTERLEAVE: pb.MPOL_INTERLEAVE,
    MemoryPolicy.WEIGHTED_INTERLEAVE: pb.MPOL_WEIGHTED_INTERLEAVE,
}


def create_response(adjustment: ContainerAdjustment) -> pb.CreateContainerResponse:
    """Build the answer to CreateContainer; without changes it is the empty message."""
    response = pb.CreateContainerResponse()
    if adjustment.cpus or adjustment.mems or adjustment.quota is not None:
        cpu = response.adjust.linux.resources.cpu
        cpu.cpus = adjustment.cpus
        cpu.mems = adjustment.mems
        if adjustment.quota is not None:
            # -1 is what the kubelet itself sends for containers with exclusive CPUs: runc and
            # crun pass it on to cgroup v1 and write "max" for cgroup v2. Wrapped 0 would be
            # written too, and means something else to each of them.
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
        wanted = response.adjust.linux.memory_policy
        wanted.mode = _MPOL_MODES[policy.mode]
        wanted.nodes = str(policy.nodes)
    return response


def add_updates(
    response: _MessageWithUpdates, every: Sequence[ContainerUpdate], *, own: str = ""
) -> None:
    """Add updates to a response, one for each container, in their order.

    Failures are ignored but that of the container ``own``, which the request is about: one of
    another container that exits meanwhile must not fail it. CRI-O fails a whole Synchronize for it.

    Two updates of one container in one answer would be refused by the runtime as a conflict of
    the plugin with itself, so they are merged, the later value winning. Empty ones are left out.

    Raises:
        LocalProtocolError: an update names no container.
    """
    by_id: dict[str, ContainerUpdate] = {}
    for update in every:
        earlier = by_id.get(update[0])
        by_id[update[0]] = update if earlier is None else update.merge_onto(earlier)
    if "" in by_id:
        raise LocalProtocolError("a ContainerUpdate without container_id would change nothing")
    # A changed shared pool is one and the same change for hundreds of containers: made once.
    messages: dict[object, pb.ContainerUpdate] = {}
    for container_id, update in by_id.items():
        message = messages.get(update[1:])
        if message is None:
            if update.is_empty:
                continue
            message = messages[update[1:]] = pb.ContainerUpdate(linux=linux_update(update))
        message.container_id = container_id
        message.ignore_failure = container_id != own
        response.update.append(message)


def linux_update(update: ContainerUpdate) -> pb.LinuxContainerUpdate:
    """The changes of one update, without whose they are."""
    message = pb.LinuxContainerUpdate()
    cpu = message.resources.cpu
    if update.cpus:
        cpu.cpus = update.cpus
    if update.mems:
        cpu.mems = update.mems
    if update.cpu_quota is not None:
        cpu.quota.value = update.cpu_quota
    if update.cpu_period is not None:
        cpu.period.value = update.cpu_period
    if update.cpu_shares is not None:
        cpu.shares.value = update.cpu_shares
    if update.memory_limit is not None:
        message.resources.memory.limit.value = update.memory_limit
    return message


def answer_synchronize(
    plan: Planner,
    pods: Sequence[pb.PodSandbox],
    containers: Sequence[pb.Container],
    *,
    mentions: bool = False,
) -> pb.SynchronizeResponse:
    """Build the answer to Synchronize.

    A container without an id is left out: no update reaches it, and one would spoil the whole
    answer.
    """
    known = [container_from(one, mentions=mentions) for one in containers if one.id]
    response = pb.SynchronizeResponse()
    updates = plan(pods_from(pods, containers, mentions=mentions), known)
    add_updates(response, updates)
    return response


# --- requests ---------------------------------------------------------------------------------


def answer_request(
    handler: RuntimeHandler, request: ev.EventRequested | ev.SynchronizeRequested
) -> Message | None:
    """Have a request of the session answered; None is an empty response."""
    mentions = handler.reads_mentions
    if isinstance(request, ev.SynchronizeRequested):
        return answer_synchronize(
            handler.synchronize, request.pods, request.containers, mentions=mentions
        )
    event, message = request.event, request.message
    match event:
        case Event.POST_UPDATE_CONTAINER:
            handler.post_update_container(message.container.id)
            return None
        case Event.STOP_CONTAINER:
            stopped = pb.StopContainerResponse()
            add_updates(stopped, handler.stop_container(message.container.id))
            return stopped
        case Event.REMOVE_CONTAINER:
            handler.remove_container(message.container.id)
            return None
        case Event.RUN_POD_SANDBOX:
            handler.run_pod(pod_from(message.pod, mentions=mentions))
            return None
        case Event.UPDATE_POD_SANDBOX:
            total = resources_from(message.linux_resources, update=True)
            handler.update_pod(pod_from(message.pod), total)
            return None
        case Event.STOP_POD_SANDBOX:
            handler.stop_pod(pod_from(message.pod))
            return None
        case Event.REMOVE_POD_SANDBOX:
            handler.remove_pod(pod_from(message.pod))
            return None
        case _:  # all others are about a container in its pod
            pass
    pod = pod_from(message.pod, message.container, mentions=mentions)
    container = container_from(message.container, mentions=mentions)
    match event:
        case Event.CREATE_CONTAINER:
            adjustment, updates = handler.create_container(pod, container)
            created = create_response(adjustment)
            add_updates(created, updates)
            return created
        case Event.UPDATE_CONTAINER:
            # One for the container itself is set over the request, field by field; without one
            # the request passes as it is (which spares a containerd bug that loses its swap limit).
            requested = resources_from(message.linux_resources, update=True)
            updated = pb.UpdateContainerResponse()
            updates = handler.update_container(pod, container, requested)
            add_updates(updated, updates, own=container.id)
            return updated
        case Event.START_CONTAINER:
            handler.start_container(pod, container)
        case _:
            handler.post_start_container(pod, container)
    return None
