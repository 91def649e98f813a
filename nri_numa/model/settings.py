"""The operator's settings for decisions, in the form that the engine uses.

`nri_numa.config` reads and checks the configuration file and builds a `Settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.workload import (
    BUILT_IN_PERMISSION_NAME,
    KubeletGrantOverriders,
    QoSClass,
    Strategy,
)

ANY_ANNOTATION_KEY: Final = "*"


class OnDenied(StrEnum):
    """Treatment of an annotation that is not permitted."""

    REJECT = "reject"
    IGNORE = "ignore"


class AnnotationPermission(msgspec.Struct, frozen=True, kw_only=True):
    """Annotations that the matching pods may use.

    Attributes:
        name: for sentences: ``permissions[1]``.
        namespaces: shell-style patterns; empty matches every namespace.
        allowed_keys: annotation keys without prefix; `ANY_ANNOTATION_KEY` for all.
        allowed_values: permitted values by key. Lists of CPUs and NUMA nodes may only name ids of
            the union of these.
    """

    name: str
    namespaces: tuple[str, ...] = ()
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    qos: tuple[QoSClass, ...] = ()
    allowed_keys: tuple[str, ...] = (ANY_ANNOTATION_KEY,)
    allowed_values: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    allow_unrequested_cpus: bool = False
    allow_reserved_cpus: bool = False
    on_denied: OnDenied = OnDenied.REJECT


DEFAULT_PERMISSION: Final = AnnotationPermission(name=BUILT_IN_PERMISSION_NAME)
"""Permission of pods that no entry matches: every key, but only CPUs that are requested."""


class CPUAmount(msgspec.Struct, frozen=True):
    """A number of CPUs, or a part of those that containers may use.

    Attributes:
        percent: of the machine's CPUs, rounded down.
    """

    cpus: int = 0
    percent: float | None = None

    def cpus_of_total(self, total: int) -> int:
        """Return the number of CPUs on a machine where containers may use ``total``."""
        return self.cpus if self.percent is None else int(total * self.percent / 100)

    def __str__(self) -> str:
        return f"{self.cpus}" if self.percent is None else f"{self.percent:g}%"


ALL_CPUS_AMOUNT: Final = CPUAmount(percent=100)


class CPUWithholdingQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of CPUs that are unavailable to other containers.

    Attributes:
        exclusive: exclusive CPUs, their idle siblings included.
        listed: CPUs in shared lists (``numacpu``), which cannot become exclusive.
    """

    exclusive: CPUAmount = ALL_CPUS_AMOUNT
    listed: CPUAmount = ALL_CPUS_AMOUNT


class NamespacePatternQuota(msgspec.Struct, frozen=True, kw_only=True):
    """Quota of each single namespace that one of the patterns matches."""

    name: str
    namespaces: tuple[str, ...]
    quota: CPUWithholdingQuota


class QuotasAndPoolFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Quotas and the floor of the shared pool.

    Attributes:
        quota: limit of all namespaces together. Lists that a CPU request covers are counted and
            never rejected.
        idle_siblings: limit of idle siblings of all namespaces together: no request covers them.
        pool: CPUs that stay in the shared pool of the machine, at least 1; None for the result of
            `nri_numa.engine.node_model.NodeModel.pool_floor`.
    """

    quota: CPUWithholdingQuota = CPUWithholdingQuota(listed=CPUAmount(percent=50))
    idle_siblings: CPUAmount = CPUAmount(percent=25)
    namespaces: tuple[NamespacePatternQuota, ...] = ()
    pool: CPUAmount | None = None
    numa_pool: CPUAmount = CPUAmount(0)


class KubeletRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of the kubelet that apply instead of the agent's own.

    Attributes:
        ties: order equally good masks by their integer value only, instead of by ``strategy``.
        cpus: align and count exclusive CPUs only; all other containers run on all shared CPUs.
        memory: groups of NUMA nodes never overlap, only Guaranteed pods are charged, and a request
            that fits nowhere gives no hint.
        static_cpus: assign exclusive CPUs to Guaranteed containers with a whole number of CPUs
            without a policy, too.
        cpu_order: the kubelet's packed order of CPUs, averages included. Without it whole NUMA
            nodes, L3 groups and cores are kept free for the next pod, by their actual sizes.
        distribute_cpus_across_numa: spread an exclusive request evenly over the NUMA nodes it
            needs.
        distribute_cpus_across_cores: with the kubelet's order, take single CPUs by number instead
            of whole cores.
        align_by_socket: prefer NUMA nodes of one socket, and take CPUs from all of that socket.
    """

    ties: bool = False
    cpus: bool = False
    memory: bool = False
    static_cpus: bool = False
    cpu_order: bool = False
    distribute_cpus_across_numa: bool = False
    distribute_cpus_across_cores: bool = False
    align_by_socket: bool = False


class IsolatedCPUs(StrEnum):
    """Treatment of CPUs of the kernel's isolcpus list.

    Except with ``any`` they are not in the shared pool while it has others. With ``only`` exclusive
    containers get no other CPUs.
    """

    ANY = "any"
    PREFER = "prefer"
    AVOID = "avoid"
    ONLY = "only"


class NohzFullCPUs(StrEnum):
    """Treatment of CPUs of the kernel's nohz_full list in exclusive assignments."""

    ANY = "any"
    PREFER = "prefer"
    AVOID = "avoid"


class PreferredCores(StrEnum):
    """Cores of a hybrid processor that exclusive assignments take first."""

    ANY = "any"
    PERFORMANCE = "performance"
    EFFICIENT = "efficient"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that sets annotation keys for the pods that it matches.

    Attributes:
        namespaces: shell-style patterns; empty matches every namespace.
        runtime_handlers: exact names; empty matches every handler.
        containers: shell-style patterns of container names; empty matches every container.
        values: annotation key (without prefix) to value, in the annotation's own grammar.
    """

    namespaces: tuple[str, ...] = ()
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    qos: tuple[QoSClass, ...] = ()
    runtime_handlers: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    values: Mapping[str, str] = msgspec.field(default_factory=dict)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a decision other than machine, state and request.

    Attributes:
        defaults: annotation key to value, the weakest source.
        cpu_overcommit: factor on the CPUs of each NUMA node for shared containers, at least 1.
        capacity_factor: by NUMA node, 0..1; missing is 1. 0 drains the node.
        strict_cpu_reservation: True if reserved CPUs leave the shared pool too.
        reserved_memory: bytes by NUMA node that are never allocated to containers.
        reserved_hugepages: by NUMA node, bytes by page size that are never allocated either.
        prefer_closest_numa_nodes: compare equally wide masks by average distance first.
        memory_only_numa_nodes: NUMA nodes without CPUs that computed assignments may use.
        memory_tiers: memory tiers of the kernel whose NUMA nodes without CPUs may be used.
        rebalance_moves: maximum number of movable containers that move to make room for one.
        kubelet_reserved: CPUs that the kubelet's static CPU Manager never grants, if known.
    """

    prefix: str = "numa.kubernetes.io"
    defaults: Mapping[str, str] = msgspec.field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    strategy: Strategy = Strategy.SPREAD
    cpu_overcommit: float = 1.0
    capacity_factor: Mapping[int, float] = msgspec.field(default_factory=dict)
    reserved_cpus: CPUSet = NO_CPUS
    strict_cpu_reservation: bool = False
    reserved_memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    reserved_hugepages: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)
    prefer_closest_numa_nodes: bool = True
    kubelet: KubeletRules = KubeletRules()
    align_l3: bool = True
    isolated: IsolatedCPUs = IsolatedCPUs.AVOID
    nohz_full: NohzFullCPUs = NohzFullCPUs.ANY
    preferred_cores: PreferredCores = PreferredCores.ANY
    memory_only_numa_nodes: NUMASet = NO_NUMA_NODES
    memory_tiers: frozenset[int] = frozenset()
    disable_cfs_quota: bool = True
    inject_environment: bool = True
    permissions: tuple[AnnotationPermission, ...] = ()
    limits: QuotasAndPoolFloor = msgspec.field(default_factory=QuotasAndPoolFloor)
    kubelet_override: KubeletGrantOverriders = KubeletGrantOverriders.NEVER
    reservation_seconds: float = 0.0
    rebalance_moves: int = 0
    kubelet_reserved: CPUSet = NO_CPUS

    @property
    def without_socket_alignment(self) -> Settings:
        """Settings for containers that stay on single NUMA nodes of a socket."""
        return replace(self, kubelet=replace(self.kubelet, align_by_socket=False))
