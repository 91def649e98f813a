"""What the operator may set about decisions, as the engine sees it.

The configuration file is read and checked by `nri_numa.config`, which builds a `Settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nri_numa.engine.workload import QoSClass, Strategy
from nri_numa.topology.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


class CPUOrder(StrEnum):
    """Which CPUs first, when several would do.

    ``default`` keeps whole NUMA nodes, L3 groups and cores free for the next pod, judged by what
    they really have; ``kubelet`` reproduces the kubelet's packed order, averages included.
    """

    DEFAULT = "default"
    KUBELET = "kubelet"


class IsolatedCPUs(StrEnum):
    """What to do with CPUs of the kernel's isolcpus list in exclusive assignments."""

    ANY = "any"
    PREFER = "prefer"
    AVOID = "avoid"


class PreferredCores(StrEnum):
    """Which cores of a hybrid processor exclusive assignments take first."""

    ANY = "any"
    PERFORMANCE = "performance"
    EFFICIENT = "efficient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Matches pods and sets annotation keys for them.

    Attributes:
        namespaces: shell-style patterns; empty matches every namespace.
        labels: label values that must be equal.
        qos: classes; empty matches every class.
        runtime_handlers: exact names; empty matches every handler.
        containers: shell-style patterns of container names; empty matches every container.
        values: annotation key (without prefix) to value, in the annotation's own grammar.
    """

    namespaces: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    qos: tuple[QoSClass, ...] = ()
    runtime_handlers: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a decision depends on besides machine, state and request.

    Attributes:
        prefix: annotation prefix, without the slash.
        defaults: annotation key to value, weakest source.
        rules: in order; of the matching ones the first that sets a key wins that key.
        strategy: among equally good NUMA nodes, the emptiest or the fullest that fits.
        oversale: factor on the CPUs of each NUMA node for shared accounting, at least 1.
        capacity_factor: by NUMA node, 0..1; missing is 1. 0 drains the node.
        reserved_cpus: never given exclusively.
        strict_reserved: reserved CPUs leave the shared pool too.
        reserved_memory: bytes by NUMA node that are never promised to containers.
        prefer_closest: compare equally wide masks by average distance first.
        kubelet_ties: equally good masks are told apart by their integer value only, as the kubelet
            does, instead of by ``strategy``.
        kubelet_memory: keep the kubelet's memory rules: groups of NUMA nodes never overlap, only
            Guaranteed pods are accounted, and a request that fits nowhere counts as *no wish*.
        cpu_order: see `CPUOrder`.
        distribute_across_numa: spread an exclusive request evenly over the NUMA nodes it needs.
        align_l3: try to keep an exclusive request inside few L3 groups.
        align_by_socket: prefer NUMA nodes of one socket, and take CPUs from all of that socket.
        isolated: see `IsolatedCPUs`.
        cores: see `PreferredCores`.
        memory_only_nodes: NUMA nodes without CPUs that computed assignments may use (HBM, CXL).
        lift_quota: run exclusive containers without CFS quota, as the kubelet does.
        tell_environment: put NUMA_CPUS and NUMA_MEMS into the container's environment.
    """

    prefix: str = "numa.kubernetes.io"
    defaults: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    strategy: Strategy = Strategy.SPREAD
    oversale: float = 1.0
    capacity_factor: Mapping[int, float] = field(default_factory=dict)
    reserved_cpus: CPUSet = NO_CPUS
    strict_reserved: bool = False
    reserved_memory: Mapping[int, int] = field(default_factory=dict)
    prefer_closest: bool = True
    kubelet_ties: bool = False
    kubelet_memory: bool = False
    cpu_order: CPUOrder = CPUOrder.DEFAULT
    distribute_across_numa: bool = False
    align_l3: bool = True
    align_by_socket: bool = False
    isolated: IsolatedCPUs = IsolatedCPUs.AVOID
    cores: PreferredCores = PreferredCores.ANY
    memory_only_nodes: NUMASet = NO_NUMA_NODES
    lift_quota: bool = True
    tell_environment: bool = True
