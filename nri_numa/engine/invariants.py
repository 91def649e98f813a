"""What must hold of allocations and of the node's state; a sentence for each thing that does not.

Two checks of the state: one of what a single step can break, quick enough for each request, and one
of everything, which adds up all containers and compares that with the books.
"""

from __future__ import annotations

from collections.abc import Mapping

from nri_numa.engine.state import (
    Allocation,
    Charge,
    Kind,
    NodeState,
    charged,
    counted,
    grouped,
    union,
    without_cpus,
)
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import NO_CPUS, CPUSet
from nri_numa.machine.model import Topology, cpus_text


def contradiction(a: Allocation) -> str:
    """Say what cannot be true of any allocation; empty when nothing is wrong.

    For allocations that were read back from somewhere: everything else relies on none of these.
    """
    if a.kind is Kind.EXCLUSIVE and not (a.owned and a.cpus):
        return "an exclusive container must own CPUs"
    if a.kind is Kind.SHARED and not a.numa_nodes:
        return "a shared container must have NUMA nodes"
    if a.owned and a.kind not in (Kind.EXCLUSIVE, Kind.EXPLICIT):
        return f"a container that is {a.kind} cannot own CPUs"
    if a.soft and (a.owned or a.kind is not Kind.EXPLICIT or not a.cpus):
        return "only a list of shared CPUs can be soft"
    if a.idle & a.cpus or (a.idle and not a.owned):
        return "only siblings of owned CPUs are kept idle"
    if a.kind is Kind.FOREIGN and a.mems:
        return "a foreign container has no memory nodes of ours"
    if a.pinned and a.kind is not Kind.FOREIGN:
        return "only a foreign container is pinned by somebody else"
    return ""


def step_violations(
    before: NodeState, after: NodeState, topology: Topology, settings: Settings
) -> list[str]:
    """Check what one step can break, at a cost that does not grow with the number of containers."""
    found: list[str] = []
    if not after.pool(topology, settings):
        found.append("the shared pool is empty")
    owned, reserved = after.owned.bits, settings.reserved_cpus.bits
    if owned & after.idle.bits:
        found.append(f"{cpus_text(after.owned & after.idle, 'is', 'are')} both owned and kept idle")
    if owned & ~topology.possible.bits:
        gone = after.owned - topology.possible
        found.append(f"{cpus_text(gone, 'is owned but does', 'are owned but do')} not exist")
    newly = owned & ~before.owned.bits & reserved
    if newly:
        taken = cpus_text(CPUSet.from_bits(newly), "was", "were")
        found.append(f"reserved {taken} given exclusively")
    return found


def violations(state: NodeState, topology: Topology, settings: Settings) -> list[str]:
    """Check every invariant, over all containers; one sentence for each that does not hold."""
    found = step_violations(state, state, topology, settings)
    owned, idle = NO_CPUS, NO_CPUS
    listed: dict[str, CPUSet] = {}
    charges: Mapping[int, Charge] = {}
    groups: Mapping[int, Mapping[str, None]] = {}
    foreign: Mapping[int, int] = {}
    lists: set[tuple[str, CPUSet]] = set()
    for container_id, allocation in sorted(state.allocations.items()):
        if allocation.container_id != container_id:
            found.append(f"{container_id} is filed under another id: {allocation.container_id}")
        exclusive_list = allocation.exclusive_list
        shared = exclusive_list in lists
        if exclusive_list is not None:
            lists.add(exclusive_list)
        if allocation.owned:
            if allocation.cpus & owned and not shared:
                both = cpus_text(allocation.cpus & owned)
                found.append(f"owned twice: {both} of {allocation.full_name}")
            owned = owned | allocation.cpus
        elif allocation.keeps_list:
            listed[container_id] = allocation.cpus
        if allocation.kind is Kind.EXCLUSIVE and not allocation.cpus:
            found.append(f"{allocation.full_name} is exclusive and has no CPUs")
        if allocation.kind is Kind.SHARED and not allocation.numa_nodes:
            found.append(f"{allocation.full_name} is shared and has no NUMA nodes")
        if allocation.kind is Kind.FOREIGN and allocation.mems:
            found.append(f"{allocation.full_name} is {allocation.kind} and has memory nodes")
        idle = idle | allocation.idle
        foreign = counted(foreign, allocation, 1)
        theirs = without_cpus(allocation.charges) if shared else allocation.charges
        charges = charged(charges, theirs, 1)
        groups = grouped(groups, allocation, present=True)
        record = state.pods.get(allocation.pod_uid)
        if record is None or container_id not in record.containers:
            found.append(f"{allocation.full_name} is missing from its pod's record")
    for container_id, cpus in listed.items():
        if cpus & owned:
            name = state.allocations[container_id].full_name
            both = cpus_text(cpus & owned)
            found.append(f"listed for {name}, but owned by another container: {both}")
    if owned != state.owned:
        found.append(f"owned CPUs are booked as {state.owned} and add up to {owned}")
    if idle != state.idle:
        found.append(f"idle CPUs are booked as {state.idle} and add up to {idle}")
    if listed != dict(state.listed) or union(listed.values()) != state.listed_cpus:
        found.append("explicit lists are booked differently from the allocations")
    if dict(foreign) != dict(state.foreign):
        found.append("foreign CPUs are booked differently from the allocations")
    if dict(charges) != dict(state.charges):
        found.append(f"charges are booked as {state.charges} and add up to {charges}")
    if {k: set(v) for k, v in groups.items()} != {k: set(v) for k, v in state.groups.items()}:
        found.append("groups are booked differently from the allocations")
    for uid, record in state.pods.items():
        missing = [i for i in record.containers if i not in state.allocations]
        if missing:
            found.append(f"pod {uid} remembers containers that are gone: {', '.join(missing)}")
    return found
