"""Which memory nodes a computed placement gets, once it is known where its CPUs are."""

from __future__ import annotations

from dataclasses import dataclass

from nri_numa.engine.case import Case
from nri_numa.engine.decision import Machine
from nri_numa.engine.memory.grants import Amounts, widen_for_memory
from nri_numa.engine.memory.tiers import tier_text
from nri_numa.engine.place.listed_memory import STRICT
from nri_numa.engine.place.needs import ResourceTable
from nri_numa.engine.place.placement import human_bytes, memory_nodes_for
from nri_numa.engine.place.refusals import memory_lacking
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.machine.model import agree, numa_text


@dataclass(frozen=True, slots=True)
class MemoryNodes:
    """What was chosen.

    Attributes:
        mems: cpuset.mems; empty leaves the memory alone.
        widened: other NUMA nodes than those of the CPUs and what serves them had to be taken.
        steps: why, in sentences.
    """

    mems: NUMASet
    widened: bool = False
    steps: tuple[str, ...] = ()


def choose_memory(case: Case, table: ResourceTable, numa_nodes: NUMASet) -> MemoryNodes | None:
    """Choose memory nodes for CPUs on some NUMA nodes.

    Their own memory, or the nearest where they have none; if that is too little, NUMA nodes
    without CPUs that serve them; then, unless the policy is strict, any other that may be used.
    Where even those do not hold it, a pin would bring the OOM killer sooner than none.

    Args:
        case: what is needed; a strict policy takes nothing from elsewhere.
        table: what is free.
        numa_nodes: of the CPUs, or as the policy chose them.

    Returns:
        None when a strict policy finds too little.
    """
    machine, demand = case.machine, case.demand
    topology, usable = machine.topology, machine.memory_nodes
    serving = machine.tiers.serving(numa_nodes)
    mems = numa_nodes & usable
    if not mems:
        mems = memory_nodes_for(topology, numa_nodes, serving or usable)
    needs: list[tuple[int, Amounts]] = []
    if demand.memory_bytes:
        needs.append((demand.memory_bytes, table.memory_left))
    needs += [(n, table.hugepages_left[size]) for size, n in demand.hugepages.items() if n]
    if _holds(needs, mems):
        return MemoryNodes(mems, steps=_served(machine, mems, numa_nodes))
    memory = demand.memory_bytes, table.memory_left
    pages = [need for need in needs if need[1] is not table.memory_left]
    near = widen_for_memory(mems, *memory, topology.distance, serving, also=pages)
    if near is not None:
        return MemoryNodes(near, steps=_served(machine, near, numa_nodes))
    if case.policy in STRICT:
        return None
    wider = widen_for_memory(mems, *memory, topology.distance, usable, also=pages)
    if wider is not None:
        return MemoryNodes(
            wider, True, (f"memory widened from {numa_text(mems)} to {wider} so that it fits",)
        )
    outside = machine.tiers.outside
    lacking = memory_lacking(demand, table, usable, "on all NUMA nodes that may be used")
    if not outside:
        # Nothing holds it: a pin would only bring the OOM killer sooner.
        return MemoryNodes(
            usable,
            True,
            (f"{lacking}: its memory may come from all of them",),
        )
    return MemoryNodes(
        NO_NUMA_NODES,
        True,
        (
            f"its memory is not pinned: {lacking}, and "
            f"{tier_text(topology, outside)} with "
            f"{human_bytes(sum(topology.numa_nodes[i].memory_bytes for i in outside))} "
            f"{agree(outside, 'is', 'are')} not allowed (memoryOnlyNodes, memoryTiers)",
        ),
    )


def _holds(needs: list[tuple[int, Amounts]], mems: NUMASet) -> bool:
    short = [amount for amount, left in needs if sum([left.get(i, 0) for i in mems]) < amount]
    return not short


def _served(machine: Machine, mems: NUMASet, numa_nodes: NUMASet) -> tuple[str, ...]:
    """Say it when memory comes from NUMA nodes without CPUs."""
    near = machine.tiers.near
    alone = mems & NUMASet(near) if near else NO_NUMA_NODES
    if not alone:
        return ()
    verb = "serves" if len(alone) == 1 else "serve"
    return (f"{tier_text(machine.topology, alone)} {verb} {numa_text(numa_nodes)}",)
