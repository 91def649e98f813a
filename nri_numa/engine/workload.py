"""What the runtime tells about a pod and a container, and what they ask for.

These are the engine's own types; protobuf stops at `nri_numa.runtime.convert`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class QoSClass(StrEnum):
    """The pod's quality of service class."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


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


class Strategy(StrEnum):
    """Which of several equally good NUMA nodes: the emptiest or the fullest that fits."""

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a container is, and when.

    Attributes:
        busy: minutes of the day as half-open intervals ``(start, end)``, sorted, not wrapping;
            ``((0, 1440),)`` is always busy (``high``), ``()`` is never (``low``).
    """

    busy: tuple[tuple[int, int], ...]

    def overlaps(self, other: Load) -> bool:
        """Say whether both are busy at some same minute."""
        return any(a < d and c < b for a, b in self.busy for c, d in other.busy)


HIGH = Load(((0, 1440),))
LOW = Load(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
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
    hugepages: Mapping[int, int] = field(default_factory=dict)
    cpus: str = ""
    mems: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSandbox:
    """A pod as the runtime knows it.

    Attributes:
        id: the runtime's sandbox id.
        uid: the Kubernetes pod UID (falls back to the sandbox id when the runtime tells none).
        runtime_handler: RuntimeClass handler, empty for the default.
        resources: the sum over the pod's containers as the kubelet told the runtime; nothing given
            when the runtime does not tell.
    """

    id: str
    uid: str
    namespace: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    qos: QoSClass = QoSClass.BEST_EFFORT
    runtime_handler: str = ""
    cgroup_parent: str = ""
    resources: Resources = field(default_factory=Resources)

    @property
    def full_name(self) -> str:
        """``namespace/name``, as logs and commands show it."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container as the runtime knows it.

    Attributes:
        labels: only of containers that are being made up; the runtime's are not read.
        oom_score_adj: encodes the memory request of Burstable pods (kubelet's formula).
        pid: init process, 0 before it exists.
        cgroups_path: the OCI cgroupsPath.
        devices: device requests, when some source tells them.
    """

    id: str
    pod_id: str
    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    oom_score_adj: int | None = None
    pid: int = 0
    cgroups_path: str = ""
    devices: tuple[DeviceRequest, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a resource and the NUMA nodes it belongs to (none, one or several ids)."""

    id: str
    numa_nodes: frozenset[int] = frozenset()
    available: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """A request for ``count`` devices of one resource, with all devices known of it."""

    resource: str
    count: int
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What one container wants, after annotations, rules and defaults were put together.

    The three sources are resolved by `nri_numa.engine.wishes.resolve`; ``given`` names the keys
    that came from an annotation or a rule, not from the defaults.

    Attributes:
        numacpu, numamem: explicit kernel lists, checked for form only; None when not asked for.
        cpus: None when nobody said: then a Guaranteed whole-number container that has a policy
            is exclusive and everything else is shared, as in the kubelet's static policy.
        on_failure: None when nobody said: then the policy decides.
        sources: key to where its value came from (``annotation numa.kubernetes.io/policy``,
            ``rule 2``, ``default``), for explanations.
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
    given: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
