"""What the runtime says of a pod and a container, what they ask for, and what it is answered.

These are the engine's own types; protobuf stops at `nri_numa.nri.conversion`. In answers an empty
text or None means
*leave as it is*: the protocol has no way to take a cpuset back, only to write another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


class MemoryPolicy(StrEnum):
    """What annotations call the kernel's memory policies; ``default`` sets none."""

    DEFAULT = "default"
    LOCAL = "local"
    PREFERRED = "preferred"
    PREFERRED_MANY = "preferred-many"
    BIND = "bind"
    INTERLEAVE = "interleave"
    WEIGHTED_INTERLEAVE = "weighted-interleave"

    @property
    def needs_nodes(self) -> bool:
        """Whether it is about certain NUMA nodes; the others name none."""
        return self not in (MemoryPolicy.DEFAULT, MemoryPolicy.LOCAL)

    @property
    def is_interleaved(self) -> bool:
        """Whether memory comes from its NUMA nodes in turn."""
        return self in (MemoryPolicy.INTERLEAVE, MemoryPolicy.WEIGHTED_INTERLEAVE)


class MemoryPolicySetting(msgspec.Struct, frozen=True):
    """A memory policy for one container."""

    mode: MemoryPolicy
    nodes: NUMASet = NO_NUMA_NODES


class MemoryPolicies(msgspec.Struct, frozen=True):
    """Which memory policies containers can be given on this node.

    Attributes:
        refused: for those that cannot be had, who does not know it and what is needed, as a clause
            after *but*.
        weights: of the kernel for ``weighted-interleave``, by NUMA node; 1 where none is given.
    """

    refused: Mapping[MemoryPolicy, str] = msgspec.field(default_factory=dict)
    weights: Mapping[int, int] = msgspec.field(default_factory=dict)

    def interleave_weight(self, mode: MemoryPolicy, numa_node: int) -> int:
        """How many pages come from a NUMA node in its turn."""
        return self.weights.get(numa_node, 1) if mode is MemoryPolicy.WEIGHTED_INTERLEAVE else 1


MIN_RUNTIMES_TEXT: Final = (
    "containerd 2.3 or newer, or another runtime with NRI 0.12, and runc 1.4 or newer"
)
"""Who hands a memory policy on."""

MIN_KERNEL_VERSIONS: Final = {
    MemoryPolicy.PREFERRED_MANY: (5, 15),
    MemoryPolicy.WEIGHTED_INTERLEAVE: (6, 9),
}
"""Kernels that have what not every kernel has, set_mempolicy(2)."""

EVERY_MEMORY_POLICY: Final = MemoryPolicies()
"""Nothing says that any of them is missing."""


ENDED_POD_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Phases of pods that have nothing any more."""


class QoSClass(StrEnum):
    """The pod's quality of service class."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"

    @classmethod
    def of_cgroup(cls, cgroup_parent: str) -> QoSClass | None:
        """The class by the pod's cgroup; None when the kubelet did not make it.

        The kubelet puts pods under ``kubepods/burstable``, ``kubepods/besteffort`` or, Guaranteed,
        ``kubepods`` itself; with the systemd driver these are parts of slice names, joined by
        dashes, and only the last slice may be given.
        """
        _, found, below = cgroup_parent.partition("kubepods")
        if not found:
            return None
        if "burstable" in below:
            return cls.BURSTABLE
        return cls.BEST_EFFORT if "besteffort" in below else cls.GUARANTEED


class Policy(StrEnum):
    """The Topology Manager's policies, per pod."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    """Align each container by itself, or all containers of the pod together."""

    CONTAINER = "container"
    POD = "pod"


class Bind(StrEnum):
    """What a computed assignment may touch."""

    NONE = "none"
    CPU = "cpu"
    CPU_MEM = "cpu+mem"


class CPUMode(StrEnum):
    """Share the CPUs of the NUMA nodes, or own whole CPUs."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class SMT(StrEnum):
    """What to do about hyperthread siblings."""

    ANY = "any"
    SPREAD = "spread"
    FULL_CORE = "full-core"
    ISOLATE = "isolate"
    PAIR = "pair"


class OnFailure(StrEnum):
    """What happens when the request cannot be met."""

    REJECT = "reject"
    BEST_EFFORT = "widen"
    UNPINNED = "unpinned"


class DeviceAlignmentMode(StrEnum):
    """Whether the devices that a container has say where its CPUs and memory should be."""

    ALIGN = "align"
    IGNORE = "ignore"


class Strategy(StrEnum):
    """Which of several equally good NUMA nodes.

    ``spread``: the emptiest, ``pack``: the fullest that fits, both by what is scarcest there;
    ``most-left``: the one with the most memory free, or without memory the most CPU.
    """

    SPREAD = "spread"
    PACK = "pack"
    MOST_MEMORY = "most-left"


class BusySchedule(msgspec.Struct, frozen=True):
    """How busy a container is, and when.

    Attributes:
        busy_intervals: minutes of the day as half-open intervals ``(start, end)``, sorted, not
            wrapping; ``((0, 1440),)`` is always busy (``high``), ``()`` is never (``low``).
    """

    busy_intervals: tuple[tuple[int, int], ...]

    def overlaps(self, other: BusySchedule) -> bool:
        """Say whether both are busy at some same minute."""
        return any(a < d and c < b for a, b in self.busy_intervals for c, d in other.busy_intervals)


BUILT_IN_PERMISSION_NAME = "the built-in permission"

ALWAYS_BUSY_SCHEDULE = BusySchedule(((0, 1440),))
NEVER_BUSY_SCHEDULE = BusySchedule(())


MAX_CONTAINER_DEVICES: Final = 64
"""Devices of one container that are looked at; one with more has the machine's, not some."""

MAX_DEVICE_MENTION_CHARS: Final = 4096
"""Of one variable or annotation; 64 UUIDs are 2600."""

PCI_VARIABLE_PREFIX: Final = "PCIDEVICE_"
"""Variables of the SR-IOV network device plugin begin so; ``…_INFO`` holds JSON for programs."""
NVIDIA_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
CLAIM_VARIABLE_PREFIX: Final = "NRI_NUMA_CLAIM_"
"""How the variable begins by which a container is known to belong to a ResourceClaim of ours."""
DEVICE_VARIABLE_PREFIXES: Final = (PCI_VARIABLE_PREFIX, NVIDIA_VARIABLE, CLAIM_VARIABLE_PREFIX)
CDI_ANNOTATION_PREFIX: Final = "cdi.k8s.io/"


class DeviceFile(NamedTuple):
    """A device file: its OCI type (``c``, ``u``, ``b``, ``p``) and its number."""

    type: str
    major: int
    minor: int


class DeviceMentions(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a message mentions.

    Attributes:
        nodes: device files; empty for a privileged container, which gets those of the host.
        variables: environment variables that device plugins set, by name.
        cdi: names of the Container Device Interface, ``vendor/class=device``.
        claims: names of the variables of our ResourceClaims.
        unread: how many device files and names there were beyond `MAX_CONTAINER_DEVICES`.
    """

    nodes: tuple[DeviceFile, ...] = ()
    variables: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    unread: int = 0


NO_DEVICE_MENTIONS: Final = DeviceMentions()


def find_device_mentions(
    *,
    nodes: Sequence[DeviceFile],
    environment: Iterable[str],
    annotations: Mapping[str, str],
    names: Iterable[str] = (),
) -> DeviceMentions:
    """Read what a container has, at most `MAX_CONTAINER_DEVICES` of each sort.

    ``names`` are CDI names that the runtime gives beside those in annotations.
    """
    variables: dict[str, str] = {}
    claims: list[str] = []
    for item in environment:
        if not item.startswith(DEVICE_VARIABLE_PREFIXES) or len(item) > MAX_DEVICE_MENTION_CHARS:
            continue
        name, _, value = item.partition("=")
        if name.startswith(CLAIM_VARIABLE_PREFIX):
            claims.append(name)
        elif not name.endswith("_INFO") and (
            name in variables or len(variables) < MAX_CONTAINER_DEVICES
        ):
            variables[name] = value  # as in an environment, the last one counts
    cdi = list(names)
    for key, value in annotations.items():
        if key.startswith(CDI_ANNOTATION_PREFIX) and len(value) <= MAX_DEVICE_MENTION_CHARS:
            cdi += [name.strip() for name in value.split(",")]
    cdi = list(dict.fromkeys(filter(None, cdi)))
    if not nodes and not variables and not cdi and not claims:
        return NO_DEVICE_MENTIONS
    return DeviceMentions(
        nodes=tuple(nodes[:MAX_CONTAINER_DEVICES]),
        variables=variables,
        cdi=tuple(cdi[:MAX_CONTAINER_DEVICES]),
        claims=tuple(claims[:MAX_CONTAINER_DEVICES]),
        unread=max(0, len(nodes) - MAX_CONTAINER_DEVICES)
        + max(0, len(cdi) - MAX_CONTAINER_DEVICES),
    )


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Linux resources of a container as the runtime reports them; None or empty is *not given*.

    Attributes:
        cpu_shares: cgroup v1 scale, 1024 is one CPU; 2 is the minimum and means no request.
        cpu_quota, cpu_period: microseconds; a quota of -1 or 0 is no limit.
        memory_limit: bytes; 0 or negative is no limit.
    """

    cpu_shares: int | None = None
    cpu_quota: int | None = None
    cpu_period: int | None = None
    memory_limit: int | None = None
    hugepages: Mapping[int, int] = msgspec.field(default_factory=dict)
    cpus: str = ""
    mems: str = ""


class PodSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as the runtime knows it.

    Attributes:
        uid: the Kubernetes pod UID (falls back to the sandbox id when the runtime tells none).
        resources: the sum over the pod's containers as the kubelet gave it to the runtime; nothing
            when the runtime does not say.
        network_namespace: its path, where it was read; empty for a pod on the host's network.
        cgroups_path: where its own cgroup is, in the form of a container's; empty where the runtime
            does not say.
    """

    id: str
    uid: str
    namespace: str
    name: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    qos: QoSClass = QoSClass.BEST_EFFORT
    runtime_handler: str = ""
    cgroup_parent: str = ""
    resources: Resources = msgspec.field(default_factory=Resources)
    network_namespace: str = ""
    cgroups_path: str = ""

    @property
    def full_name(self) -> str:
        """``namespace/name``, as logs and commands show it."""
        return f"{self.namespace}/{self.name}"


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container as the runtime knows it.

    Attributes:
        labels: only of containers that are being made up; the runtime's are not read.
        oom_score_adj: encodes the memory request of Burstable pods (kubelet's formula).
        pod_devices: those of all containers of its pod, where more is known than its own; they
            count where the pod is placed as a whole.
        device_notes: sentences about what it was said to have and gives no hint.
        claim_problem: why the CPUs of its ResourceClaim are not its own; empty where they are.
        starting: created, and its program did not run when we were called.
    """

    id: str
    pod_id: str
    name: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    resources: Resources = msgspec.field(default_factory=Resources)
    oom_score_adj: int | None = None
    pid: int = 0
    cgroups_path: str = ""
    mentions: DeviceMentions = NO_DEVICE_MENTIONS
    devices: tuple[DeviceRequest, ...] = ()
    pod_devices: tuple[DeviceRequest, ...] = ()
    device_notes: tuple[str, ...] = ()
    claim_problem: str = ""
    starting: bool = False


def container_subject(pod: PodSandbox, container: Container) -> str:
    """The start of a message about a container."""
    return f"pod {pod.full_name}, container {container.name}"


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a resource and the NUMA nodes it belongs to (none, one or several ids)."""

    id: str
    numa_nodes: frozenset[int] = frozenset()


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for ``count`` devices of one resource: all that the container has, each id once."""

    resource: str
    count: int
    devices: tuple[Device, ...]


class KnownContainerDevices(msgspec.Struct, frozen=True):
    """What is known of the devices of a container at some moment."""

    devices: tuple[DeviceRequest, ...] = ()
    pod_devices: tuple[DeviceRequest, ...] = ()
    notes: tuple[str, ...] = ()

    def apply_to(self, container: Container) -> Container:
        """The container with them, in the place of what it had."""
        return replace(
            container,
            devices=self.devices,
            pod_devices=self.pod_devices,
            device_notes=self.notes,
        )


GrantHolder = tuple[str, str]
"""Pod UID and container name; of kubelets before 1.18 the empty text and the container's id."""

MAX_REMEMBERED_SHARED_CPUSETS = 8
"""Shared sets of the kubelet that are remembered: what it sends may be a few changes old."""


class KubeletGrantOverriders(StrEnum):
    """Who may take a container away from the kubelet's static managers.

    ``never``: no pod. ``annotated``: its pod, by the annotation ``numacpu`` or ``numamem``.
    """

    NEVER = "never"
    ANNOTATED = "annotated"


class KubeletGrants(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything the kubelet's CPU Manager and Memory Manager granted on this node.

    Attributes:
        shared: sets that the CPU Manager gives to containers without a grant, the one in force
            first, then those it gave before.
        cpus: granted CPUs by holder.
        pods: CPUs granted to whole pods, by pod UID; containers without a grant of their own run
            on what their pod has.
    """

    cpu_policy: str = ""
    memory_policy: str = ""
    shared: tuple[CPUSet, ...] = ()
    cpus: Mapping[GrantHolder, CPUSet] = msgspec.field(default_factory=dict)
    mems: Mapping[GrantHolder, NUMASet] = msgspec.field(default_factory=dict)
    pods: Mapping[str, CPUSet] = msgspec.field(default_factory=dict)
    pod_mems: Mapping[str, NUMASet] = msgspec.field(default_factory=dict)
    memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    hugepages: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)

    @cached_property
    def granted_cpus(self) -> CPUSet:
        """All granted CPUs."""
        bits = 0
        for cpus in (*self.cpus.values(), *self.pods.values()):
            bits |= cpus.bits
        return CPUSet.from_bits(bits)

    @cached_property
    def is_empty(self) -> bool:
        """Whether no container has CPUs or memory by a grant."""
        return not (self.cpus or self.mems or self.pods or self.pod_mems)

    def cpus_of(self, pod_uid: str, container: str, container_id: str) -> CPUSet:
        """CPUs granted to one container, or to its pod; empty when it shares with everybody."""
        if not self.granted_cpus:
            return NO_CPUS
        own = self.cpus.get((pod_uid, container)) or self.cpus.get(("", container_id))
        return own or self.pods.get(pod_uid, NO_CPUS)

    def mems_of(self, pod_uid: str, container: str) -> NUMASet:
        """NUMA nodes of the memory granted to one container, or to its pod."""
        own = self.mems.get((pod_uid, container))
        return own or self.pod_mems.get(pod_uid, NO_NUMA_NODES)

    def without_container(self, pod_uid: str, container: str, container_id: str) -> KubeletGrants:
        """The same without what this container, and its pod as a whole, was granted."""
        holders = (pod_uid, container), ("", container_id)
        return replace(
            self,
            cpus={who: cpus for who, cpus in self.cpus.items() if who not in holders},
            pods={uid: cpus for uid, cpus in self.pods.items() if uid != pod_uid},
        )


NO_GRANTS = KubeletGrants()


class PodTable:
    """The pods that the runtime reports, by sandbox id.

    A container that is known is compared with what is remembered of it, and of its pod nothing asks
    more than the UID. So a pod is made at the first question, and only once.
    """

    __slots__ = ("_made", "_make", "uids")

    def __init__(self, uids: Mapping[str, str], make: Callable[[str], PodSandbox]) -> None:
        """Name the pods."""
        self.uids = uids
        self._make = make
        self._made: dict[str, PodSandbox] = {}

    @classmethod
    def from_pods(cls, pods: Iterable[PodSandbox]) -> PodTable:
        """Pods that are made already; of two with one sandbox id the later counts."""
        by_id = {pod.id: pod for pod in pods}
        return cls({pod.id: pod.uid for pod in by_id.values()}, by_id.__getitem__)

    def __getitem__(self, pod_id: str) -> PodSandbox:
        """The pod with a sandbox id."""
        pod = self._made.get(pod_id)
        if pod is None:
            pod = self._made[pod_id] = self._make(pod_id)
        return pod


class ContainerAdjustment(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to the container that is being created.

    Attributes:
        cpus, mems: kernel lists; empty leaves what the request says.
        quota: CFS quota in microseconds per period, `NO_CFS_QUOTA` to lift it, None to leave it.
        mounts: paths in the container, and what of the host is bound there, read-only.
    """

    cpus: str = ""
    mems: str = ""
    quota: int | None = None
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    memory_policy: MemoryPolicySetting | None = None
    mounts: tuple[tuple[str, str], ...] = ()


class ContainerUpdate(NamedTuple):
    """Changes to a container that exists already.

    A tuple, since a changed shared pool makes hundreds of them within one request, each in a
    quarter of the time of a frozen dataclass.

    Attributes:
        cpu_quota, cpu_period: microseconds; `NO_CFS_QUOTA` lifts the quota, None leaves it.
        cpu_shares: cgroup v1 scale, None leaves them.
        memory_limit: bytes, None leaves it.
    """

    container_id: str
    cpus: str = ""
    mems: str = ""
    cpu_quota: int | None = None
    cpu_period: int | None = None
    cpu_shares: int | None = None
    memory_limit: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing at all."""
        return all(value in (None, "") for value in self[1:])

    def merge_onto(self, earlier: ContainerUpdate) -> ContainerUpdate:
        """Both in one; where both change something, this one counts."""
        rest = {k: v for k, v in earlier._asdict().items() if getattr(self, k) in (None, "")}
        return self._replace(**rest)


NO_ADJUSTMENT: Final = ContainerAdjustment()


class ChangedStateIds(msgspec.Struct, frozen=True):
    """What a step may have changed of the state; the store writes what really differs."""

    containers: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()


NO_CHANGED_IDS: Final = ChangedStateIds()
