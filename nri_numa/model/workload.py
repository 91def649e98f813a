"""Pods and containers as the runtime reports them, their placement options, and the answers to it.

These are the engine's own types; protobuf stops at `nri_numa.nri.conversion`. In answers an empty
text or None means *leave as it is*: the protocol cannot reset a cpuset, only write another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import cache, cached_property
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet, union_cpus


class MemoryPolicy(StrEnum):
    """Memory policy of the kernel, by its name in annotations; ``default`` sets none."""

    DEFAULT = "default"
    LOCAL = "local"
    PREFERRED = "preferred"
    PREFERRED_MANY = "preferred-many"
    BIND = "bind"
    INTERLEAVE = "interleave"
    WEIGHTED_INTERLEAVE = "weighted-interleave"

    @property
    def needs_nodes(self) -> bool:
        """True if the policy is for certain NUMA nodes."""
        return self not in (MemoryPolicy.DEFAULT, MemoryPolicy.LOCAL)

    @property
    def is_interleaved(self) -> bool:
        """True if pages are taken from the NUMA nodes in turn."""
        return self in (MemoryPolicy.INTERLEAVE, MemoryPolicy.WEIGHTED_INTERLEAVE)


class MemoryPolicySetting(msgspec.Struct, frozen=True):
    """A memory policy for one container."""

    mode: MemoryPolicy
    nodes: NUMASet = NO_NUMA_NODES


class MemoryPolicies(msgspec.Struct, frozen=True):
    """Memory policies that containers can have on this node.

    Attributes:
        refused: by unsupported policy, what does not support it and what is needed, as a clause
            after *but*.
        weights: the kernel's weights for ``weighted-interleave``, by NUMA node; 1 if missing.
    """

    refused: Mapping[MemoryPolicy, str] = msgspec.field(default_factory=dict)
    weights: Mapping[int, int] = msgspec.field(default_factory=dict)

    def interleave_weight(self, mode: MemoryPolicy, numa_node: int) -> int:
        """Return the number of pages that are taken from a NUMA node at a time."""
        return self.weights.get(numa_node, 1) if mode is MemoryPolicy.WEIGHTED_INTERLEAVE else 1


MIN_RUNTIMES_TEXT: Final = (
    "containerd 2.3, CRI-O 1.37 or another runtime with NRI 0.12, and runc 1.4 or crun 1.28, or "
    "newer"
)
"""Runtimes that apply a memory policy."""

MIN_KERNEL_VERSIONS: Final = {
    MemoryPolicy.PREFERRED_MANY: (5, 15),
    MemoryPolicy.WEIGHTED_INTERLEAVE: (6, 9),
}
"""First kernels that support a memory policy, set_mempolicy(2); the others are older."""

EVERY_MEMORY_POLICY: Final = MemoryPolicies()
"""Every policy is supported, as far as known."""

ENDED_POD_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Phases of pods that no longer use resources."""


class QoSClass(StrEnum):
    """The pod's quality of service class."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"

    @classmethod
    def of_cgroup(cls, cgroup_parent: str) -> QoSClass | None:
        """Return the class that follows from the pod's cgroup; None if the kubelet did not make it.

        The kubelet puts pods under ``kubepods/burstable``, ``kubepods/besteffort`` or, Guaranteed,
        ``kubepods`` itself. With the systemd driver these are parts of slice names, joined by
        dashes, and sometimes only the last slice is given.
        """
        _, kubepods, path = cgroup_parent.partition("kubepods")
        if not kubepods:
            return None
        if "burstable" in path:
            return cls.BURSTABLE
        return cls.BEST_EFFORT if "besteffort" in path else cls.GUARANTEED


class Policy(StrEnum):
    """The Topology Manager's policies, per pod."""

    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    """Scope of an alignment: each container by itself, or all containers of the pod together."""

    CONTAINER = "container"
    POD = "pod"


class Bind(StrEnum):
    """Parts of a cgroup that a computed assignment may write."""

    NONE = "none"
    CPU = "cpu"
    CPU_MEM = "cpu+mem"


class CPUMode(StrEnum):
    """Use of CPUs: the shared pool of the NUMA nodes, or exclusive CPUs."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class SMT(StrEnum):
    """Treatment of hyperthread siblings."""

    ANY = "any"
    SPREAD = "spread"
    FULL_CORE = "full-core"
    ISOLATE = "isolate"
    PAIR = "pair"


class OnFailure(StrEnum):
    """Outcome if the request cannot be met."""

    REJECT = "reject"
    BEST_EFFORT = "best-effort"
    UNPINNED = "unpinned"


class DeviceAlignmentMode(StrEnum):
    """Influence of a container's devices on the placement of its CPUs and memory."""

    ALIGN = "align"
    IGNORE = "ignore"


class Distribution(StrEnum):
    """Distribution of exclusive CPUs over the NUMA nodes of a container."""

    DEVICES = "devices"
    NONE = "none"


class Strategy(StrEnum):
    """Choice among equally good NUMA nodes.

    ``spread`` takes the emptiest and ``pack`` the fullest that fits, both by the scarcest resource.
    ``most-memory`` takes the one with the most free memory, or without memory the most free CPU.
    """

    SPREAD = "spread"
    PACK = "pack"
    MOST_MEMORY = "most-memory"


class BusySchedule(msgspec.Struct, frozen=True):
    """Minutes of the day in which a container is busy.

    Attributes:
        busy_intervals: minutes of the day as half-open intervals ``(start, end)``, sorted, not
            wrapping; ``((0, 1440),)`` is always busy (``high``), ``()`` is never (``low``).
    """

    busy_intervals: tuple[tuple[int, int], ...]

    def overlaps(self, load: BusySchedule) -> bool:
        """Return True if both are busy in at least one minute."""
        return any(a < d and c < b for a, b in self.busy_intervals for c, d in load.busy_intervals)


BUILT_IN_PERMISSION_NAME = "the built-in permission"

ALWAYS_BUSY_SCHEDULE = BusySchedule(((0, 1440),))
NEVER_BUSY_SCHEDULE = BusySchedule(())

MAX_CONTAINER_DEVICES: Final = 64
"""Devices that are read of one container; one with more has all of the machine's."""

MAX_DEVICE_MENTION_CHARS: Final = 4096
"""Length of one variable or annotation; 64 UUIDs are 2600."""

PCI_VARIABLE_PREFIX: Final = "PCIDEVICE_"
"""Prefix of the SR-IOV network device plugin's variables; ``…_INFO`` holds JSON for programs."""
NVIDIA_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
CLAIM_VARIABLE_PREFIX: Final = "NRI_NUMA_CLAIM_"
"""Prefix of the variable that ties a container to a ResourceClaim of this driver."""
DEVICE_VARIABLE_PREFIXES: Final = (PCI_VARIABLE_PREFIX, NVIDIA_VARIABLE, CLAIM_VARIABLE_PREFIX)
CDI_ANNOTATION_PREFIX: Final = "cdi.k8s.io/"


class DeviceFile(NamedTuple):
    """A device file: its OCI type (``c``, ``u``, ``b``, ``p``) and its number."""

    type: str
    major: int
    minor: int


class DeviceMentions(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that a message mentions.

    Attributes:
        nodes: device files; empty for a privileged container, which gets those of the host.
        variables: environment variables that device plugins set, by name.
        cdi: names of the Container Device Interface, ``vendor/class=device``.
        claims: names of the variables of ResourceClaims, `CLAIM_VARIABLE_PREFIX`.
        unread: number of device files and names beyond `MAX_CONTAINER_DEVICES`.
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
    """Find the devices that a container mentions, at most `MAX_CONTAINER_DEVICES` of each kind.

    ``names`` are CDI names that the runtime sends in addition to those in annotations.
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
            variables[name] = value  # the last one counts, as in an environment
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
        uid: the Kubernetes pod UID, or the sandbox id if the runtime does not report one.
        resources: the sum over the pod's containers as the kubelet sent it to the runtime; empty
            if the runtime does not report it.
        network_namespace: its path, if it was read; empty for a pod on the host's network.
        cgroups_path: path of its own cgroup, in the form of a container's; empty if the runtime
            does not report it.
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
        labels: only of simulated containers; the runtime's are not read.
        oom_score_adj: encodes the memory request of Burstable pods (kubelet's formula).
        pod_devices: devices of all containers of its pod, if more than its own are known; they
            count if the pod is placed as a whole.
        device_notes: sentences about devices that it mentions and that give no hint.
        claim_problem: why the CPUs of its ResourceClaim are not its own; empty if they are.
        starting: True if it is created and its program did not run yet when the event was sent.
        added_cpus_source: annotation or variable by which the runtime adds CPUs to its cpuset;
            empty if it adds none.
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
    added_cpus_source: str = ""


def container_subject(pod: PodSandbox, container: Container) -> str:
    """Return the start of a message about a container."""
    return f"pod {pod.full_name}, container {container.name}"


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device of a resource and the NUMA nodes it belongs to (none, one or several ids).

    Attributes:
        local_cpus: as the kernel reports them for its PCIe root; empty if unknown.
    """

    id: str
    numa_nodes: frozenset[int] = frozenset()
    local_cpus: CPUSet = NO_CPUS


class DeviceStock(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one resource on this node, as one container could get them from the kubelet.

    Attributes:
        capacity: healthy devices by NUMA node; a device of several counts on each.
        free: those that no other container has, by NUMA node.
        choices: free ones, and those of the container itself, by id; some of many.
    """

    capacity: Mapping[int, int] = {}
    free: Mapping[int, int] = {}
    choices: tuple[Device, ...] = ()


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for ``count`` devices of one resource: all of the container's, each id once.

    Attributes:
        stock: None if the kubelet did not allocate the devices, or does not list what there is.
    """

    resource: str
    count: int
    devices: tuple[Device, ...]
    stock: DeviceStock | None = None


GrantHolder = tuple[str, str]
"""Pod UID and container name; for kubelets before 1.18 the empty text and the container's id."""

MAX_REMEMBERED_SHARED_CPUSETS = 8
"""Shared sets of the kubelet that are remembered: its updates may be a few changes old."""


class KubeletGrantOverriders(StrEnum):
    """Pods that may override a grant of the kubelet's static managers.

    ``never``: no pod. ``annotated``: a pod with the annotation ``numacpu`` or ``numamem``.
    """

    NEVER = "never"
    ANNOTATED = "annotated"


class KubeletGrants(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All grants of the kubelet's CPU Manager and Memory Manager on this node.

    Attributes:
        shared: sets that the CPU Manager assigns to containers without a grant, the current one
            first, then the previous ones.
        cpus: granted CPUs by holder.
        pods: CPUs granted to whole pods, by pod UID; containers without a grant of their own run
            on their pod's CPUs.
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
        return union_cpus((*self.cpus.values(), *self.pods.values()))

    @cached_property
    def is_empty(self) -> bool:
        """True if no container has granted CPUs or memory."""
        return not (self.cpus or self.mems or self.pods or self.pod_mems)

    def cpus_of(self, pod_uid: str, container: str, container_id: str) -> CPUSet:
        """Return the CPUs granted to one container or its pod; empty if it uses shared CPUs."""
        if not self.granted_cpus:
            return NO_CPUS
        cpus = self.cpus.get((pod_uid, container)) or self.cpus.get(("", container_id))
        return cpus or self.pods.get(pod_uid, NO_CPUS)

    def mems_of(self, pod_uid: str, container: str) -> NUMASet:
        """Return the NUMA nodes of the memory granted to one container or its pod."""
        mems = self.mems.get((pod_uid, container))
        return mems or self.pod_mems.get(pod_uid, NO_NUMA_NODES)

    def without_container(self, pod_uid: str, container: str, container_id: str) -> KubeletGrants:
        """Return the grants without those of this container and of its whole pod."""
        holders = (pod_uid, container), ("", container_id)
        return replace(
            self,
            cpus={holder: cpus for holder, cpus in self.cpus.items() if holder not in holders},
            pods={uid: cpus for uid, cpus in self.pods.items() if uid != pod_uid},
        )


NO_GRANTS = KubeletGrants()


class PodTable:
    """Pods that the runtime reports, by sandbox id.

    A known container is compared with its record, which needs only the UID of its pod. So a pod is
    built on first access, and only once.
    """

    def __init__(self, uids: Mapping[str, str], build_pod: Callable[[str], PodSandbox]) -> None:
        """Name the pods."""
        self.uids = uids
        self._find_pod = cache(build_pod)

    @classmethod
    def from_pods(cls, pods: Iterable[PodSandbox]) -> PodTable:
        """Return a table of built pods; of two with one sandbox id the later counts."""
        by_id = {pod.id: pod for pod in pods}
        return cls({pod.id: pod.uid for pod in by_id.values()}, by_id.__getitem__)

    def __getitem__(self, pod_id: str) -> PodSandbox:
        """Return the pod with a sandbox id."""
        return self._find_pod(pod_id)


class ContainerAdjustment(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to the container that is being created.

    Attributes:
        cpus, mems: kernel lists; empty leaves those of the request.
        quota: CFS quota in microseconds per period, `NO_CFS_QUOTA` to lift it, None to leave it.
        mounts: paths in the container and host paths that are bound there, read-only.
    """

    cpus: str = ""
    mems: str = ""
    quota: int | None = None
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    memory_policy: MemoryPolicySetting | None = None
    mounts: tuple[tuple[str, str], ...] = ()


class ContainerUpdate(NamedTuple):
    """Changes to an existing container.

    It is a tuple because a change of the shared pool builds hundreds of them within one request,
    each in a quarter of the time of a frozen dataclass.

    Attributes:
        cpu_quota, cpu_period: microseconds; `NO_CFS_QUOTA` lifts the quota, None leaves it.
        cpu_shares: on the cgroup v1 scale, None leaves them.
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
        """True if it changes nothing."""
        return all(value in (None, "") for value in self[1:])

    def merge_onto(self, earlier: ContainerUpdate) -> ContainerUpdate:
        """Merge two updates. This one wins where both set a field."""
        fields = {k: v for k, v in earlier._asdict().items() if getattr(self, k) in (None, "")}
        return self._replace(**fields)


NO_ADJUSTMENT: Final = ContainerAdjustment()


class ChangedStateIds(msgspec.Struct, frozen=True):
    """Ids that a step may have changed in the state; the store writes those that differ."""

    containers: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()


NO_CHANGED_IDS: Final = ChangedStateIds()
