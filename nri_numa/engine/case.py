"""The case that a placement decides: one container, what it asks for, and where it could go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from nri_numa.engine.accounting import shared_left
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import NodeState, PodRecord
from nri_numa.engine.values.settings import CPUOrder
from nri_numa.engine.values.workload import (
    SMT,
    Container,
    CPUMode,
    OnFailure,
    PodSandbox,
    Policy,
    Requested,
)
from nri_numa.machine.cpuset import NO_CPUS, CPUSet

NO_DEMAND: Final = Demand()
"""Of a container whose needs nobody looked at, since it is not pinned or they make no sense."""


@dataclass(frozen=True)
class Case:
    """One container that is being placed, with everything that is looked at for it.

    Attributes:
        machine: topology and settings.
        state: as it is without the container.
        pod: its pod.
        container: the container.
        requested: what its pod, the rules and the defaults ask for.
        demand: what it needs; for a pod that is placed as a whole, what the pod needs.
        reading: what the kernel has left, when known.
        policy: to align by. The degrade ladder tries a weaker one than was asked for.
        held: CPUs that a running container has already and must keep.
        again: it runs, or one of its name and pod did: a soft list may have given way already.
    """

    machine: Machine
    state: NodeState
    pod: PodSandbox
    container: Container
    requested: Requested
    demand: Demand = NO_DEMAND
    reading: Reading | None = None
    policy: Policy = Policy.NONE
    held: CPUSet = NO_CPUS
    again: bool = False

    @property
    def who(self) -> str:
        """The start of a message: pod and container."""
        return f"pod {self.pod.full_name}, container {self.container.name}"

    @property
    def record(self) -> PodRecord | None:
        """What is remembered of the pod."""
        return self.state.pods.get(self.pod.uid)

    @cached_property
    def cpu_left(self) -> dict[int, int]:
        """By NUMA node, thousandths of a CPU that can be promised."""
        return self.machine.cpu_left(self.state)

    @cached_property
    def shared_left(self) -> dict[int, int]:
        """By NUMA node, of these what a container without CPUs of its own can be promised."""
        return shared_left(self.machine, self.state, self.cpu_left)

    @cached_property
    def memory_left(self) -> dict[int, int]:
        """By NUMA node, bytes of memory that can be allocated."""
        return self.machine.memory_left(self.state, self.reading)

    def hugepages_left(self) -> dict[int, Mapping[int, int]]:
        """By page size that is needed and NUMA node, bytes of huge pages that can be allocated."""
        left, state, reading = self.machine.hugepages_left, self.state, self.reading
        return {size: left(size, state, reading) for size in self.demand.hugepages}

    @property
    def smt(self) -> SMT:
        """What to do about siblings; with the kubelet's order nothing, unless somebody asks."""
        requested = self.requested
        if requested.smt is SMT.SPREAD and "smt" not in requested.given:
            kubelet = self.machine.settings.cpu_order is CPUOrder.KUBELET
            return SMT.ANY if kubelet else SMT.SPREAD
        return requested.smt

    @property
    def by_kubelet(self) -> bool:
        """As `by_kubelet` says."""
        return by_kubelet(self.machine, self.requested)

    @property
    def on_failure(self) -> OnFailure:
        """The degrade ladder's step, also where nobody named one."""
        requested = self.requested
        if requested.on_failure is not None:
            return requested.on_failure
        listed = requested.numacpu is not None or requested.numamem is not None
        if not listed and requested.policy is Policy.BEST_EFFORT:
            return OnFailure.WIDEN
        return OnFailure.REJECT


def by_kubelet(machine: Machine, requested: Requested) -> bool:
    """Whether CPUs are the kubelet's business: none but whole ones of one's own are looked at.

    A container that asks to share the CPUs of its NUMA nodes is heard all the same.
    """
    shares = requested.cpus is CPUMode.SHARED and "cpus" in requested.given
    return machine.settings.kubelet_cpus and not shares
