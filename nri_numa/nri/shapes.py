"""What a request to create a container asks for, told apart from whose it is; without converting.

Two requests of one *shape* differ in nothing that a decision reads, apart from names. A shape is
made of the raw message, so that a container whose decision is ready costs no conversion; whatever
is read of the message by `nri_numa.nri.conversion` and then by a decision has to be in it.

What is the pod's part of a shape is known when its sandbox runs, before any of its containers. From
there the shape of a pod with one container can be foreseen (docs/adr/0072-foreseen.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from nri_numa.engine.ahead import Names
from nri_numa.engine.request.placed import PLACED, read_placed
from nri_numa.engine.values.answers import ContainerAdjustment, ContainerUpdate
from nri_numa.engine.values.workload import (
    NO_DEVICES,
    Container,
    KnownDevices,
    PodSandbox,
    QoSClass,
)
from nri_numa.machine.cgroups import CgroupPlace
from nri_numa.nri import conversion
from nri_numa.nri.conversion import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID
from nri_numa.nri.wire.pb import nri_pb2 as pb

Shape = tuple[tuple[object, ...], str | None, tuple[object, ...], int, str]
"""What tells containers apart for a decision: the pod's part, which its sandbox has as well; the
container's name, None where nothing that is asked for looks at it; its resources; its OOM score,
0 where a decision does not read it; the key of its devices, empty where nothing is known of any.
Two that are equal get the same decision. It is made of texts, numbers and tuples alone: looking
one up calls no Python function."""

_MOST_ANNOTATIONS: Final = 64
"""Annotations of a pod that are looked through for ours; with more, each is decided by itself."""
_MOST_CHARACTERS: Final = 4096
"""Characters of our annotations; whoever writes more plays with us, and would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What decisions read of a pod besides its resources.

    Attributes:
        marker: part of the names of our annotations: the prefix with its slash.
        slots_key: the annotation of containers that says which slots they hold.
        labels: names of labels.
        names: whether a rule looks at the names of containers.
        memory: bytes of the machine as the kubelet counts them (MemTotal).
    """

    marker: str
    slots_key: str
    labels: tuple[str, ...] = ()
    names: bool = False
    memory: int = 0


def shape_of(
    request: pb.CreateContainerRequest, reads: Reads, devices: KnownDevices = NO_DEVICES
) -> Shape | None:
    """The shape of a request; None where containers differ in more than their names.

    Args:
        request: the raw message.
        reads: what decisions read of it.
        devices: what is known of the container's devices.
    """
    pod, container = request.pod, request.container
    annotations = pod.annotations
    if len(annotations) > _MOST_ANNOTATIONS or reads.slots_key in container.annotations:
        return None
    marker, named = reads.marker, reads.names
    length, characters = len(marker), 0
    own: list[tuple[str, str]] = []
    for name in annotations:
        if marker in name:
            value = annotations[name]
            own.append((name, value))
            characters += len(value)
            # A container is named after a dot, or in the value; older keys precede the prefix.
            key = name[length:] if name[:length] == marker else "."
            named = named or "." in key or key == PLACED
    if characters > _MOST_CHARACTERS:
        return None
    own.sort()
    linux, sandbox, labels = container.linux, pod.linux, pod.labels
    resources = linux.resources
    # None where the cgroup does not tell; then the class follows from the other parts.
    qos = conversion.qos_from_cgroup(sandbox.cgroup_parent)
    # Parts that are missing have the values of empty ones, and read like them.
    score = linux.oom_score_adj.value
    if qos is not None and not (qos is QoSClass.BURSTABLE and 2 <= score < 999):
        score = 0  # see `nri_numa.engine.request.demand`
    pages = resources.hugepage_limits
    return (
        (
            tuple(own),
            pod.namespace or labels.get(POD_NAMESPACE, ""),
            qos,
            sandbox.pod_resources.SerializeToString(),
            pod.runtime_handler,
            tuple([labels.get(name) for name in reads.labels]) if reads.labels else (),
        ),
        (container.name or container.labels.get(CONTAINER_NAME, "")) if named else None,
        (
            # Nothing else of resources is converted: no devices, no swap.
            resources.cpu.SerializeToString(),
            resources.memory.limit.value,
            tuple([(page.page_size, page.limit) for page in pages if page.limit]) if pages else (),
        ),
        score,
        devices.key,
    )


class Foreseen(NamedTuple):
    """A container that is likely to come; which devices it has is not told by its sandbox."""

    shape: Shape
    pod: PodSandbox
    container: Container


def foreseen(pod: pb.PodSandbox, reads: Reads) -> Foreseen | None:
    """The container of a pod, if it has one only, from what is known when its sandbox runs.

    The kubelet tells the sum of the containers' resources with the sandbox, which is the one's own.
    Its name is told where an annotation gives it, and is left empty where nothing looks at it. Of
    the OOM score only that of Burstable pods is a guess: they request the memory that limits them.

    Returns:
        None where too little is known of it.
    """
    linux = pod.linux
    qos = conversion.qos_from_cgroup(linux.cgroup_parent)
    if qos is None or not linux.HasField("pod_resources"):
        return None
    request = pb.CreateContainerRequest(pod=pod)
    container = request.container
    container.pod_sandbox_id = pod.id
    # The sandbox has a wrapped 0 for what nobody asked for; the container has nothing there.
    given, cpu = linux.pod_resources, container.linux.resources.cpu
    for key in ("shares", "quota", "period"):
        if value := getattr(given.cpu, key).value:
            getattr(cpu, key).value = value
    limit = given.memory.limit.value
    if limit:
        container.linux.resources.memory.limit.value = limit
    container.linux.oom_score_adj.value = _score(qos, limit, reads.memory)
    shape = shape_of(request, reads)
    if shape is None:
        return None
    if shape[1] is not None:
        names = _names_in(pod.annotations, reads.marker)
        if reads.names or len(names) != 1:
            return None
        container.name = names.pop()
        shape = shape[0], container.name, *shape[2:]
    return Foreseen(
        shape,
        conversion.pod_from(pod, container),
        conversion.container_from(container, brief=True),
    )


def _names_in(annotations: Mapping[str, str], marker: str) -> set[str]:
    """The names of containers that annotations give."""
    names: set[str] = set()
    for annotation in annotations:
        before, _, key = annotation.partition(marker)
        if before or not key:
            continue
        _, dot, name = key.partition(".")
        if dot:
            names.add(name)
        elif key == PLACED:
            names.update(read_placed(annotations[annotation]) or ())
    return names


def _score(qos: QoSClass, memory: int, capacity: int) -> int:
    """The OOM score that the kubelet gives (pkg/kubelet/qos/policy.go)."""
    if qos is QoSClass.GUARANTEED:
        return -997
    if qos is QoSClass.BEST_EFFORT:
        return 1000
    return min(999, max(3, 1000 - 1000 * memory // max(capacity, 1)))


def whose(request: pb.CreateContainerRequest) -> tuple[Names, CgroupPlace]:
    """Whose a request is, and where the container's cgroup will be, as the conversion says."""
    pod, container = request.pod, request.container
    labels = pod.labels
    names = Names(
        container_id=container.id,
        pod_id=pod.id,
        pod_uid=pod.uid or labels.get(POD_UID, "") or pod.id,
        pod=pod.name or labels.get(POD_NAME, ""),
        container=container.name or container.labels.get(CONTAINER_NAME, ""),
    )
    return names, CgroupPlace(container.linux.cgroups_path, container.pid)


def answer_bytes(adjustment: ContainerAdjustment, others: Sequence[ContainerUpdate]) -> bytes:
    """The answer to CreateContainer as it goes out."""
    return conversion.create_response(adjustment, others).SerializeToString()


class ReadyAnswer:
    """An answer that is serialised already."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        """The bytes."""
        return self._data


class Ahead(Protocol):
    """Who keeps decisions ready; see `nri_numa.node.ahead.DecidedAhead`."""

    def reads(self) -> Reads:
        """What makes a shape, with the settings in force."""
        ...

    def answer(
        self,
        shape: Shape,
        whose: Callable[[], tuple[Names, CgroupPlace]],
        converted: Callable[[], tuple[PodSandbox, Container]],
    ) -> bytes | None:
        """Take a decision that is ready; None where there is none."""
        ...

    def decided(self, shape: Shape, pod: PodSandbox, container: Container) -> None:
        """One was decided about as usual."""
        ...

    def began(
        self,
        foresee: Callable[[Reads], Foreseen | None],
        devices: Callable[[str], KnownDevices | None] | None = None,
    ) -> None:
        """A sandbox runs, and its containers are to come; see to it later.

        Args:
            foresee: tells what is likely to come.
            devices: tells which devices a container of this name will have, None where that is
                not known; None where nobody looks for any.
        """
        ...
