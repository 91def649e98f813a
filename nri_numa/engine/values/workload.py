"""What the runtime tells about a pod and a container, and what they ask for.

These are the engine's own types; protobuf stops at `nri_numa.nri.conversion`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.values.memory_policy import MemoryPolicy
from nri_numa.engine.values.mentions import NO_MENTIONS, Mentions
from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


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
    WIDEN = "widen"
    UNPINNED = "unpinned"


class DeviceUse(StrEnum):
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
    MOST_LEFT = "most-left"


class Load(msgspec.Struct, frozen=True):
    """How busy a container is, and when.

    Attributes:
        busy: minutes of the day as half-open intervals ``(start, end)``, sorted, not wrapping;
            ``((0, 1440),)`` is always busy (``high``), ``()`` is never (``low``).
    """

    busy: tuple[tuple[int, int], ...]

    def overlaps(self, other: Load) -> bool:
        """Say whether both are busy at some same minute."""
        return any(a < d and c < b for a, b in self.busy for c, d in other.busy)


BUILT_IN_PERMISSION = "the built-in permission"

HIGH = Load(((0, 1440),))
LOW = Load(())


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """Linux resources of a container as the runtime reports them; None or empty is *not given*.

    Attributes:
        cpu_shares: cgroup v1 scale, 1024 is one CPU; 2 is the minimum and means no request.
        cpu_quota, cpu_period: microseconds; a quota of -1 or 0 is no limit.
        memory_limit: bytes; 0 or negative is no limit.
        hugepages: limit in bytes by page size in bytes.
        cpus, mems: kernel lists somebody set already.
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
        id: the runtime's sandbox id.
        uid: the Kubernetes pod UID (falls back to the sandbox id when the runtime tells none).
        runtime_handler: RuntimeClass handler, empty for the default.
        resources: the sum over the pod's containers as the kubelet told the runtime; nothing given
            when the runtime does not tell.
        network_namespace: its path, where it was read; empty for a pod on the host's network.
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

    @property
    def full_name(self) -> str:
        """``namespace/name``, as logs and commands show it."""
        return f"{self.namespace}/{self.name}"


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container as the runtime knows it.

    Attributes:
        labels: only of containers that are being made up; the runtime's are not read.
        oom_score_adj: encodes the memory request of Burstable pods (kubelet's formula).
        pid: init process, 0 before it exists.
        cgroups_path: the OCI cgroupsPath.
        mentions: what the runtime's message says of its devices, where that was read.
        devices: device requests, when some source tells them.
        pod_devices: those of all containers of its pod, where more is known than its own; they
            count where the pod is placed as a whole.
        device_notes: sentences about what it was said to have and gives no hint.
        starting: created, and its program did not run when we were told.
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
    mentions: Mentions = NO_MENTIONS
    devices: tuple[DeviceRequest, ...] = ()
    pod_devices: tuple[DeviceRequest, ...] = ()
    device_notes: tuple[str, ...] = ()
    starting: bool = False


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a resource and the NUMA nodes it belongs to (none, one or several ids)."""

    id: str
    numa_nodes: frozenset[int] = frozenset()


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for ``count`` devices of one resource: all that the container has, each id once."""

    resource: str
    count: int
    devices: tuple[Device, ...]


class KnownDevices(msgspec.Struct, frozen=True):
    """What is known of the devices of a container at some moment.

    Attributes:
        devices, pod_devices, notes: as `Container` has them (``device_notes``).
    """

    devices: tuple[DeviceRequest, ...] = ()
    pod_devices: tuple[DeviceRequest, ...] = ()
    notes: tuple[str, ...] = ()

    def on(self, container: Container) -> Container:
        """The container with them, in the place of what it had."""
        return replace(
            container,
            devices=self.devices,
            pod_devices=self.pod_devices,
            device_notes=self.notes,
        )


NO_DEVICES: Final = KnownDevices()
"""Nothing is known, and nothing is to be said of that."""


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """Exclusive CPUs that the scheduler counted; see `nri_numa.engine.request.slots`.

    Attributes:
        ids: as they were handed over, separated by commas.
        count: how many.
        by_node: how many on each NUMA node; empty where the kubelet has chosen none.
    """

    ids: str
    count: int
    by_node: Mapping[int, int] = msgspec.field(default_factory=dict)


class Requested(msgspec.Struct, frozen=True, kw_only=True):
    """What one container wants, after annotations, rules and defaults were put together.

    The three sources are resolved by `nri_numa.engine.request.annotations.resolve`; ``given`` names
    the keys that came from an annotation or a rule, not from the defaults.

    Attributes:
        numacpu, numamem: explicit kernel lists as they were written, checked for form only; None
            when not asked for.
        listed_cpus, listed_mems: the same lists as sets, so that they are read once.
        pods_list: ``numacpu`` is given for its whole pod, not for this container.
        cpus: None when nobody said: then a Guaranteed whole-number container that has a policy
            is exclusive and everything else is shared, as in the kubelet's static policy.
        on_failure: None when nobody said: then the policy decides.
        sources: key to where its value came from (``annotation numa.kubernetes.io/policy``,
            ``rule 2``, ``default``), for explanations.
        ignored: sentences about annotations that are not permitted and were passed over.
        unpaid_cpus: it may own CPUs that no request pays for.
        reserved_cpus: its list may name reserved CPUs.
        lenient: what is not permitted is ignored instead of refused.
        permission: name of the permission that says so, for sentences.
        slots: what the kubelet gave it of the extended resource; None where that is nothing.
        placed: NUMA nodes that the scheduler held for it; see `nri_numa.engine.request.placed`.
    """

    numacpu: str | None = None
    numamem: str | None = None
    bind: Bind = Bind.CPU_MEM
    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    cpus: CPUMode | None = None
    smt: SMT = SMT.SPREAD
    load: Load | None = None
    on_failure: OnFailure | None = None
    devices: DeviceUse = DeviceUse.ALIGN
    mempolicy: MemoryPolicy = MemoryPolicy.DEFAULT
    given: frozenset[str] = frozenset()
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unpaid_cpus: bool = False
    reserved_cpus: bool = False
    lenient: bool = False
    permission: str = BUILT_IN_PERMISSION
    listed_cpus: CPUSet = NO_CPUS
    listed_mems: NUMASet = NO_NUMA_NODES
    pods_list: bool = False
    slots: Slots | None = None
    placed: NUMASet = NO_NUMA_NODES

    @property
    def leave_alone(self) -> bool:
        """Whether nothing asks for CPUs or memory, so that the container is not bound."""
        if self.numacpu is not None or self.numamem is not None:
            return False
        if self.bind is Bind.NONE:
            return True
        return (
            self.policy is Policy.NONE
            and self.cpus is not CPUMode.EXCLUSIVE
            and "bind" not in self.given
            and not ("smt" in self.given and self.smt in (SMT.FULL_CORE, SMT.ISOLATE))
        )
