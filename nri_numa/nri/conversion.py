"""Protobuf ⇄ the engine's types. Beyond this module nobody sees protobuf.

What the runtimes really send differs from the field tables in small ways: names may be missing,
the QoS class is not told, and an update carries zeros for what it does not change. All of that is
evened out here. Messages with missing parts give values with missing parts, never an exception.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Final

from google.protobuf.message import Message

from nri_numa.engine.request.demand import limit_milli, request_milli
from nri_numa.engine.values.workload import (
    NO_DEVICES,
    Container,
    ContainerAdjustment,
    ContainerUpdate,
    KnownDevices,
    MemoryPolicy,
    Pods,
    PodSandbox,
    QoSClass,
    Resources,
)
from nri_numa.errors import LocalProtocolError
from nri_numa.nri.wire.pb import nri_pb2 as pb

CONTAINER_NAME: Final = "io.kubernetes.container.name"
POD_NAME: Final = "io.kubernetes.pod.name"
POD_NAMESPACE: Final = "io.kubernetes.pod.namespace"
POD_UID: Final = "io.kubernetes.pod.uid"

_GUARANTEED_SCORE: Final = -997
_BEST_EFFORT_SCORE: Final = 1000
# The kubelet never writes a quota below 1 ms in 100 ms, so small requests and limits differ.
_MILLI_TOLERANCE: Final = 10

NOTHING_GIVEN: Final = Resources()

_CREATE_UPDATE: Final = pb.CreateContainerResponse.DESCRIPTOR.fields_by_name["update"].number
_STOP_UPDATE: Final = pb.StopContainerResponse.DESCRIPTOR.fields_by_name["update"].number


# --- from the runtime -------------------------------------------------------------------------


def pods_from(pods: Iterable[pb.PodSandbox], containers: Iterable[pb.Container]) -> Pods:
    """All pods of a node; each is converted when it is asked for, which most are not.

    Args:
        pods: as the runtime sent them.
        containers: all containers, the first of a pod before its others; see `pod_from`.
    """
    messages = {pod.id: pod for pod in pods}
    first: dict[str, pb.Container] = {}

    def make(pod_id: str) -> PodSandbox:
        if not first:
            for container in containers:
                first.setdefault(container.pod_sandbox_id, container)
        return pod_from(messages[pod_id], first.get(pod_id))

    return Pods(
        {
            pod_id: pod.uid or pod.labels.get(POD_UID, "") or pod_id
            for pod_id, pod in messages.items()
        },
        make,
    )


def pod_from(pod: pb.PodSandbox, container: pb.Container | None = None) -> PodSandbox:
    """Convert a pod.

    Args:
        pod: as the runtime sent it; may carry an id and nothing else once it is stopped.
        container: one of its containers, looked at only where the QoS class cannot be told from
            the pod's cgroup.
    """
    labels = _copied(pod.labels)
    cgroup_parent, resources = "", NOTHING_GIVEN
    if pod.HasField("linux"):
        linux = pod.linux
        cgroup_parent = linux.cgroup_parent
        if linux.HasField("pod_resources"):
            resources = resources_from(linux.pod_resources)
    qos = qos_from_cgroup(cgroup_parent)
    if qos is None:
        qos = _infer_qos(resources, container)
    return PodSandbox(
        id=pod.id,
        uid=pod.uid or labels.get(POD_UID, "") or pod.id,
        namespace=pod.namespace or labels.get(POD_NAMESPACE, ""),
        name=pod.name or labels.get(POD_NAME, ""),
        labels=labels,
        annotations=_copied(pod.annotations),
        qos=qos,
        runtime_handler=pod.runtime_handler,
        cgroup_parent=cgroup_parent,
        resources=resources,
    )


def container_from(
    container: pb.Container,
    *,
    brief: bool = False,
    keep: Sequence[str] = (),
    devices: KnownDevices = NO_DEVICES,
) -> Container:
    """Convert a container; its name is taken from the label where the runtime leaves it empty.

    Args:
        container: as the runtime sent it.
        brief: leave annotations out. Nobody asks for what the kubelet put there, and copying it
            takes longer than the rest.
        keep: the annotations that stay in brief, where they are there; empty keys are passed over.
        devices: that it has.
    """
    resources, score, cgroups_path = NOTHING_GIVEN, None, ""
    annotations: dict[str, str] = {}
    if not brief:
        annotations = _copied(container.annotations)
    else:
        given = container.annotations
        for key in keep:
            if key and key in given:
                annotations[key] = given[key]
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
        name=container.name or container.labels.get(CONTAINER_NAME, ""),
        annotations=annotations,
        resources=resources,
        oom_score_adj=score,
        pid=container.pid,
        cgroups_path=cgroups_path,
        devices=devices.devices,
        pod_devices=devices.pod_devices,
        device_notes=devices.notes,
        starting=container.state == pb.CONTAINER_CREATED,
    )


def resources_from(resources: pb.LinuxResources, *, update: bool = False) -> Resources:
    """Convert resources.

    Args:
        resources: as the runtime sent them.
        update: they are those of an UpdateContainer request, whose wrappers are always there and
            where 0 means *not part of this update*.
    """
    if not update:
        # Replicas have the same bytes: comparing them is quicker than looking at each field.
        data = resources.SerializeToString()
        if len(data) <= _SHORT:
            return _known_resources(data)
    return _resources_in(resources, update=update)


_SHORT: Final = 512
"""Bytes of resources that are worth remembering; far longer ones can be sent as well."""


@lru_cache(maxsize=256)
def _known_resources(data: bytes) -> Resources:
    return _resources_in(pb.LinuxResources.FromString(data), update=False)


def _resources_in(resources: pb.LinuxResources, *, update: bool) -> Resources:
    shares = quota = period = limit = None
    cpus = mems = ""
    if resources.HasField("cpu"):
        cpu = resources.cpu
        cpus, mems = cpu.cpus, cpu.mems
        if cpu.HasField("shares"):
            shares = cpu.shares.value
        if cpu.HasField("quota"):
            quota = cpu.quota.value
        if cpu.HasField("period"):
            period = cpu.period.value
    if resources.HasField("memory"):
        memory = resources.memory
        if memory.HasField("limit"):
            limit = memory.limit.value
    if update:
        shares, quota, period, limit = shares or None, quota or None, period or None, limit or None
    hugepages: dict[int, int] = {}
    for item in resources.hugepage_limits:
        if item.limit:
            hugepages[page_size(item.page_size)] = item.limit
    if not hugepages:
        return _same_resources(shares, quota, period, limit, cpus, mems)
    return Resources(
        cpu_shares=shares,
        cpu_quota=quota,
        cpu_period=period,
        memory_limit=limit,
        hugepages=hugepages,
        cpus=cpus,
        mems=mems,
    )


@lru_cache(maxsize=256)
def _same_resources(
    shares: int | None, quota: int | None, period: int | None, limit: int | None, cpus: str,
    mems: str,
) -> Resources:  # fmt: skip
    """One value for all replicas: made once, and in memory once."""
    return Resources(
        cpu_shares=shares,
        cpu_quota=quota,
        cpu_period=period,
        memory_limit=limit,
        cpus=cpus,
        mems=mems,
    )


def _copied(texts: Mapping[str, str]) -> dict[str, str]:
    # dict() of a protobuf map goes through its Python side, at twice the time.
    return {key: texts[key] for key in texts}


_PAGE_SIZE = re.compile(r"([0-9]{1,12})([KMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_UNIT: Final[Mapping[str, int]] = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def page_size(text: str) -> int:
    """Bytes of a huge page size such as ``2MB`` (units of 1024); 0 when it is none."""
    match = _PAGE_SIZE.fullmatch(text)
    return 0 if match is None else int(match[1]) << _UNIT[match[2].upper()]


def qos_from_cgroup(cgroup_parent: str) -> QoSClass | None:
    """Tell the QoS class from the pod's cgroup; None when the kubelet did not make it.

    The kubelet puts pods under ``kubepods/burstable``, ``kubepods/besteffort`` or, Guaranteed,
    ``kubepods`` itself; with the systemd driver these are parts of slice names, joined by dashes,
    and only the last slice may be given.
    """
    _, found, below = cgroup_parent.partition("kubepods")
    if not found:
        return None
    if "burstable" in below:
        return QoSClass.BURSTABLE
    if "besteffort" in below:
        return QoSClass.BEST_EFFORT
    return QoSClass.GUARANTEED


def _infer_qos(pod_resources: Resources, container: pb.Container | None) -> QoSClass:
    """Guess the QoS class of a pod that the kubelet's cgroup tree does not tell.

    First the OOM score, which the kubelet derives from the class; then resources: limits that
    equal the requests make a Guaranteed pod, any other number a Burstable one.
    """
    resources = pod_resources
    if container is not None and container.HasField("linux"):
        linux = container.linux
        if linux.HasField("oom_score_adj"):
            score = linux.oom_score_adj.value
            if score == _GUARANTEED_SCORE:
                return QoSClass.GUARANTEED
            if score == _BEST_EFFORT_SCORE:
                return QoSClass.BEST_EFFORT
            if 2 <= score < _BEST_EFFORT_SCORE:
                return QoSClass.BURSTABLE
        if resources == NOTHING_GIVEN and linux.HasField("resources"):
            resources = resources_from(linux.resources)
    limit, request = limit_milli(resources, []), request_milli(resources, [])
    memory = resources.memory_limit or 0
    if limit and memory > 0 and (not request or abs(limit - request) <= _MILLI_TOLERANCE):
        return QoSClass.GUARANTEED
    return QoSClass.BURSTABLE if limit or request or memory > 0 else QoSClass.BEST_EFFORT


# --- to the runtime ---------------------------------------------------------------------------

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
    if (policy := adjustment.memory_policy) is not None:
        wanted = response.adjust.linux.memory_policy
        wanted.mode = _MPOL_MODES[policy.mode]
        wanted.nodes = str(policy.nodes)
    return response


class Told:
    """An answer that tells others, serialised as it is made.

    With hundreds of them, making messages first would take longer than all the rest.
    """

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return self._data


def create_answer(adjustment: ContainerAdjustment, others: Sequence[ContainerUpdate]) -> Told:
    """As `create_response`, with changes to other containers."""
    own = create_response(adjustment).SerializeToString()
    # Fields are serialised in the order of their numbers: that of the adjustment comes first.
    return Told(own + _told(_CREATE_UPDATE, others))


def update_response(
    own: ContainerUpdate | None, others: Sequence[ContainerUpdate] = ()
) -> pb.UpdateContainerResponse:
    """Build the answer to UpdateContainer.

    Args:
        own: what to set over the request for the container itself, field by field; None lets the
            request through as it is (and spares a containerd bug that loses its swap limit).
        others: changes to other containers.
    """
    response = pb.UpdateContainerResponse()
    _fill(response, others if own is None else (own, *others))
    return response


def stop_answer(others: Sequence[ContainerUpdate]) -> pb.StopContainerResponse | Told:
    """Build the answer to StopContainer."""
    return Told(_told(_STOP_UPDATE, others)) if others else pb.StopContainerResponse()


def updates_request(every: Iterable[ContainerUpdate]) -> pb.UpdateContainersRequest:
    """Build an unsolicited UpdateContainers request."""
    request = pb.UpdateContainersRequest()
    _fill(request, every)
    return request


def updates(every: Iterable[ContainerUpdate]) -> list[pb.ContainerUpdate]:
    """Build updates, one for each container; see `_fill`."""
    return list(updates_request(every).update)


def answering(
    plan: Callable[[Sequence[PodSandbox], Sequence[Container]], Iterable[ContainerUpdate]],
) -> Callable[[Sequence[pb.PodSandbox], Sequence[pb.Container]], list[pb.ContainerUpdate]]:
    """Let a function of the engine's types answer Synchronize."""

    def answer(
        pods: Sequence[pb.PodSandbox], containers: Sequence[pb.Container]
    ) -> list[pb.ContainerUpdate]:
        every = pods_from(pods, containers)
        return updates(
            plan(
                [every[pod.id] for pod in pods],
                [container_from(container) for container in containers],
            )
        )

    return answer


def _fill(message: Message, every: Iterable[ContainerUpdate]) -> None:
    """Add updates to a message's field ``update``; see `_told`."""
    data = _told(message.DESCRIPTOR.fields_by_name["update"].number, every)
    if data:
        message.MergeFromString(data)


_AFTER_ID: Final = itemgetter(slice(1, None))


def _told(field: int, every: Iterable[ContainerUpdate]) -> bytes:
    """Updates as bytes of a repeated field, one for each container, in order of appearance.

    Two updates of one container in one answer would be refused by the runtime as a conflict of
    the plugin with itself, so they are merged, the later value winning. Empty ones are left out.

    A changed shared pool is one and the same change for hundreds of containers. It is serialised
    once and put around all ids in one go. A container waits meanwhile.

    Args:
        field: number of the field.
        every: what to tell.

    Raises:
        LocalProtocolError: an update names no container.
    """
    told = every if isinstance(every, tuple | list) else list(every)
    if not told:
        return b""
    by_id = {update[0]: update for update in told}
    if "" in by_id:
        raise LocalProtocolError("a ContainerUpdate without container_id would change nothing")
    if len(by_id) < len(told):
        told = _merged(told)
    tag = _varint(field << 3 | _LENGTH_DELIMITED)
    pieces: list[bytes] = []
    # What stands around an id: it depends on the change, and on the length of the id.
    wraps: dict[tuple[object, int], tuple[bytes, bytes]] = {}
    for change, same in groupby(told, _AFTER_ID):
        run = list(same)
        if run[0].empty:
            continue
        names = [update[0].encode() for update in run]
        lengths = dict(zip(map(len, names), run, strict=True))
        for length, example in lengths.items():
            if (change, length) not in wraps:
                wraps[change, length] = _wrap(tag, example)
        if len(lengths) == 1:
            before, behind = wraps[change, len(names[0])]
            pieces += before, (behind + before).join(names), behind
        else:
            for name in names:
                before, behind = wraps[change, len(name)]
                pieces += before, name, behind
    return b"".join(pieces)


def _merged(every: Iterable[ContainerUpdate]) -> list[ContainerUpdate]:
    """One update for each container, in order of appearance."""
    by_id: dict[str, ContainerUpdate] = {}
    for update in every:
        earlier = by_id.get(update[0])
        by_id[update[0]] = update if earlier is None else _over(earlier, update)
    return list(by_id.values())


_LENGTH_DELIMITED: Final = 2
"""Wire type of strings and messages (protobuf.dev/programming-guides/encoding)."""


def _wrap(tag: bytes, update: ContainerUpdate) -> tuple[bytes, bytes]:
    """What stands before and behind the id of an update that changes something."""
    body = pb.ContainerUpdate(
        container_id=update.container_id,
        linux=linux_update(update),
        ignore_failure=update.ignore_failure,
    ).SerializeToString()
    # Fields are serialised in the order of their numbers, and the id has the first one.
    length = len(update.container_id.encode())
    start = 1 + len(_varint(length))
    return tag + _varint(len(body)) + body[:start], body[start + length :]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _over(earlier: ContainerUpdate, later: ContainerUpdate) -> ContainerUpdate:
    return later._replace(
        cpus=later.cpus or earlier.cpus,
        mems=later.mems or earlier.mems,
        cpu_quota=earlier.cpu_quota if later.cpu_quota is None else later.cpu_quota,
        cpu_period=earlier.cpu_period if later.cpu_period is None else later.cpu_period,
        cpu_shares=earlier.cpu_shares if later.cpu_shares is None else later.cpu_shares,
        memory_limit=earlier.memory_limit if later.memory_limit is None else later.memory_limit,
        # One of them being required makes the whole required.
        ignore_failure=earlier.ignore_failure and later.ignore_failure,
    )


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
