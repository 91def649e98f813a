"""Who has other CPUs because the machine changed, or the settings did."""

from __future__ import annotations

from nri_numa.engine.decision import Machine
from nri_numa.engine.state import Kind, NodeState, effective_cpus
from nri_numa.engine.values.workload import ContainerUpdate


def moved(state: NodeState, old: Machine, new: Machine) -> tuple[list[ContainerUpdate], bool]:
    """Updates for everybody who has other CPUs by now, and whether the shared pool changed.

    Args:
        state: who has what; a change of the machine does not change it.
        old: topology and settings before.
        new: topology and settings after.
    """
    before = old.topology, state.pool(old.topology, old.settings)
    after = new.topology, state.pool(new.topology, new.settings)
    updates: list[ContainerUpdate] = []
    for container_id, allocation in sorted(state.allocations.items()):
        had = effective_cpus(allocation, before[1], before[0], state.withheld_bits)
        has = effective_cpus(allocation, after[1], after[0], state.withheld_bits)
        if not has and had and allocation.kind is Kind.UNBOUND:
            has = after[1]
        if has and has != had:
            updates.append(
                ContainerUpdate(container_id=container_id, cpus=str(has), ignore_failure=True)
            )
    return updates, before[1] != after[1]
