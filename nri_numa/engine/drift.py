"""Drift: what the real cgroups say against what was meant, and what to write to make them agree.

Every correction moves one container to exactly what the state means for it and touches no other.
So a plan may be cut off after any correction, the state may change meanwhile, and a new plan made
from a new look goes on from there: nothing that was put right is undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nri_numa.engine.decision import Machine
from nri_numa.engine.state import Allocation, Kind, NodeState, effective_cpus, group_of
from nri_numa.engine.values.answers import ContainerUpdate
from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.machine.model import NO_QUOTA, Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One container whose cgroup is not as meant.

    Attributes:
        cpus, mems: what to write; empty where that file is right or beyond repair.
        quota: `NO_QUOTA` where somebody gave back a quota that was lifted; None leaves it.
        meant_cpus, meant_mems: what it should be able to use; empty where it is so.
        has_cpus, has_mems: what it can really use.
        found: what the cgroup says, for people: ``cpuset.cpus is 0-3, meant 1``.
        obstacle: which cgroup above or below keeps it from what is meant; empty when none does.
        rank: 0 when it runs on CPUs that belong to another container, 1 when it owns CPUs itself,
            2 otherwise.
        follows_pool: what is meant for its CPUs changes with every owner that comes or goes.
    """

    container_id: str
    name: str
    cpus: CPUSet = NO_CPUS
    mems: NUMASet = NO_NUMA_NODES
    quota: int | None = None
    meant_cpus: CPUSet = NO_CPUS
    meant_mems: NUMASet = NO_NUMA_NODES
    has_cpus: CPUSet = NO_CPUS
    has_mems: NUMASet = NO_NUMA_NODES
    found: str
    obstacle: str = ""
    rank: int = 2
    follows_pool: bool = False

    @property
    def blocked(self) -> bool:
        """Whether there is nothing that could be written, only something to report."""
        return not (self.cpus or self.mems or self.quota)

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: whoever disturbs an owner first, then owners, then by id."""
        return self.rank, self.container_id

    def kept_from(self, cpus: str, mems: str) -> Correction:
        """Without the lists that the kernel would refuse, for the reasons given."""
        if not (cpus or mems):
            return self
        obstacle = "; ".join(dict.fromkeys(why for why in (cpus, mems) if why))
        return replace(
            self,
            cpus=NO_CPUS if cpus else self.cpus,
            mems=NO_NUMA_NODES if mems else self.mems,
            found=f"{self.found}; {obstacle}",
            obstacle=obstacle,
        )

    @property
    def update(self) -> ContainerUpdate:
        """What to send to the runtime."""
        return ContainerUpdate(
            container_id=self.container_id,
            cpus=str(self.cpus),
            mems=str(self.mems),
            cpu_quota=self.quota,
            ignore_failure=True,
        )


def plan_corrections(
    machine: Machine,
    state: NodeState,
    observed: Mapping[str, Observed],
    narrowed_at: float | None = None,
) -> tuple[Correction, ...]:
    """Compare real cgroups with what was meant.

    Foreign containers are nobody's business here. An unbound container is left alone while the
    shared pool is the whole machine, unless we may have narrowed it ourselves before: the update
    that widens it again can get lost like any other.

    Args:
        machine: topology and settings.
        state: what was meant.
        observed: by container id; containers without a cgroup are not in it, and ids that the
            state does not know are passed over (both come and go between two looks).
        narrowed_at: Unix time until which the shared pool was last narrower than the machine;
            None when it never was.

    Returns:
        Corrections, in the order in which to apply them (`Correction.order`).
    """
    pool = state.pool(machine.topology, machine.settings)
    found: list[Correction] = []
    for container_id, real in observed.items():
        allocation = state.allocations.get(container_id)
        if allocation is None or allocation.kind is Kind.FOREIGN:
            continue
        wanted = effective_cpus(allocation, pool, machine.topology, state.withheld_bits)
        meant_cpus, cpus, cpus_found = _cpus(machine, allocation, wanted, pool, real, narrowed_at)
        meant_mems, mems, mems_found = _mems(machine, allocation, real)
        quota, quota_found = _quota(allocation, real)
        if not (cpus_found or mems_found or quota_found):
            continue
        own = allocation.cpus | allocation.idle if allocation.owned else NO_CPUS
        own = own | state.kubelet.cpus_of(allocation.pod_uid, allocation.container, container_id)
        intrudes = bool(real.effective_cpus & (state.withheld - own))
        rank = 0 if intrudes else 1 if allocation.owned else 2
        found.append(
            Correction(
                container_id=container_id,
                name=allocation.full_name,
                cpus=cpus,
                mems=mems,
                quota=quota,
                meant_cpus=meant_cpus,
                meant_mems=meant_mems,
                has_cpus=real.effective_cpus,
                has_mems=real.effective_mems,
                found="; ".join(text for text in (cpus_found, mems_found, quota_found) if text),
                obstacle=real.above,
                rank=rank,
                follows_pool=bool(cpus) and group_of(allocation) is not None,
            )
        )
    return tuple(sorted(found, key=lambda correction: correction.order))


def _cpus(
    machine: Machine,
    allocation: Allocation,
    wanted: CPUSet,
    pool: CPUSet,
    real: Observed,
    narrowed_at: float | None,
) -> tuple[CPUSet, CPUSet, str]:
    """What is meant, what of it to write, and what was found; all empty where it is as meant.

    With nothing to write, a cgroup above is in the way.
    """
    topology = machine.topology
    if not wanted and allocation.kind is Kind.UNBOUND:
        ours = narrowed_at is not None and allocation.since <= narrowed_at
        wanted = pool if ours and real.cpus else NO_CPUS
    # The effective set is what counts: a list may name offline CPUs, and the kernel keeps them.
    if not wanted or real.effective_cpus == wanted:
        return NO_CPUS, NO_CPUS, ""
    if real.cpus & topology.online == wanted:
        return (
            wanted,
            NO_CPUS,
            f"cpuset.cpus is {real.cpus} as meant, but a cgroup above leaves "
            f"{real.effective_cpus or 'none'} of it" + (f" ({real.above})" if real.above else ""),
        )
    return wanted, wanted, f"cpuset.cpus is {real.cpus or 'empty'}, meant {wanted}"


def _mems(machine: Machine, allocation: Allocation, real: Observed) -> tuple[NUMASet, NUMASet, str]:
    """Memory nodes, as `_cpus`."""
    wanted = allocation.mems & machine.topology.memory_nodes
    if not wanted or real.effective_mems == wanted:
        return NO_NUMA_NODES, NO_NUMA_NODES, ""
    if real.mems & machine.topology.memory_nodes == wanted:
        return (
            wanted,
            NO_NUMA_NODES,
            f"cpuset.mems is {real.mems} as meant, but a cgroup above leaves "
            f"{real.effective_mems or 'none'} of it",
        )
    return wanted, wanted, f"cpuset.mems is {real.mems or 'empty'}, meant {wanted}"


def _quota(allocation: Allocation, real: Observed) -> tuple[int | None, str]:
    """A quota to lift again: whoever owns CPUs is not throttled on them."""
    if allocation.quota is None or real.quota is None or real.quota <= 0:
        return None, ""
    return NO_QUOTA, f"the CFS quota is {real.quota} µs, meant none"
