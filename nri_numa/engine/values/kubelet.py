"""What the kubelet's static managers granted exclusively: facts from outside, like the machine.

Read from the kubelet's state files (`nri_numa.kubelet.state_files`). A grant counts for as
long as it is there: the kubelet makes it at the pod's admission, before the container exists, and
takes it back some time after the pod has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property

import msgspec
from msgspec.structs import replace

from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet

Holder = tuple[str, str]
"""Pod UID and container name; of kubelets before 1.18 the empty text and the container's id."""

SHARED_SETS = 8
"""Shared sets of the kubelet that are remembered: what it sends may be a few changes old."""


class KubeletOverride(StrEnum):
    """Who may take a container away from the kubelet's static managers.

    ``never``: nobody. ``annotated``: its pod, by the annotation ``numacpu`` or ``numamem``.
    """

    NEVER = "never"
    ANNOTATED = "annotated"


class KubeletGrants(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything the kubelet's CPU Manager and Memory Manager granted on this node.

    Attributes:
        cpu_policy, memory_policy: as the state files name them; empty when unknown.
        shared: sets that the CPU Manager gives to containers without a grant, the one in force
            first, then those it gave before.
        cpus: granted CPUs by holder.
        mems: NUMA nodes of granted memory by holder.
        pods: CPUs granted to whole pods, by pod UID; containers without a grant of their own run
            on what their pod has.
        pod_mems: the same for memory.
        memory: granted bytes by NUMA node.
        hugepages: granted bytes by NUMA node and page size.
    """

    cpu_policy: str = ""
    memory_policy: str = ""
    shared: tuple[CPUSet, ...] = ()
    cpus: Mapping[Holder, CPUSet] = msgspec.field(default_factory=dict)
    mems: Mapping[Holder, NUMASet] = msgspec.field(default_factory=dict)
    pods: Mapping[str, CPUSet] = msgspec.field(default_factory=dict)
    pod_mems: Mapping[str, NUMASet] = msgspec.field(default_factory=dict)
    memory: Mapping[int, int] = msgspec.field(default_factory=dict)
    hugepages: Mapping[int, Mapping[int, int]] = msgspec.field(default_factory=dict)

    @cached_property
    def taken(self) -> CPUSet:
        """All granted CPUs."""
        bits = 0
        for cpus in (*self.cpus.values(), *self.pods.values()):
            bits |= cpus.bits
        return CPUSet.from_bits(bits)

    @cached_property
    def nothing(self) -> bool:
        """Whether no container has CPUs or memory by a grant."""
        return not (self.cpus or self.mems or self.pods or self.pod_mems)

    def cpus_of(self, pod_uid: str, container: str, container_id: str) -> CPUSet:
        """CPUs granted to one container, or to its pod; empty when it shares with everybody."""
        if not self.taken:
            return NO_CPUS
        own = self.cpus.get((pod_uid, container)) or self.cpus.get(("", container_id))
        return own or self.pods.get(pod_uid, NO_CPUS)

    def mems_of(self, pod_uid: str, container: str) -> NUMASet:
        """NUMA nodes of the memory granted to one container, or to its pod."""
        own = self.mems.get((pod_uid, container))
        return own or self.pod_mems.get(pod_uid, NO_NUMA_NODES)

    def without(self, pod_uid: str, container: str, container_id: str) -> KubeletGrants:
        """The same without what this container, and its pod as a whole, was granted."""
        holders = (pod_uid, container), ("", container_id)
        return replace(
            self,
            cpus={who: cpus for who, cpus in self.cpus.items() if who not in holders},
            pods={uid: cpus for uid, cpus in self.pods.items() if uid != pod_uid},
        )


NO_GRANTS = KubeletGrants()
