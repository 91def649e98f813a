"""The kubelet's Memory Manager in a decision, for ``kubeletMemory: true``.

The rules are in `nri_numa.engine.memory.grants` (`MemoryTable`, `kubelet_grant`). Here they meet
the node's state: which containers are allocated, and what a grant comes to.

Source: kubernetes ``pkg/kubelet/cm/memorymanager/policy_static.go``, KEP-1769.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from nri_numa.engine.memory.grants import (
    Amounts,
    MemoryGrant,
    MemoryRefused,
    MemoryTable,
    cells,
    kubelet_grant,
)
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import Charge, NodeState
from nri_numa.engine.values.workload import QoSClass
from nri_numa.machine.cpuset import NUMASet

if TYPE_CHECKING:
    from nri_numa.engine.decision import Machine


def pages_name(size: int) -> str:
    """The resource name of huge pages of one size: ``hugepages-2Mi``, ``hugepages-1Gi``."""
    for power, unit in ((30, "Gi"), (20, "Mi")):
        if size >= 1 << power:
            return f"hugepages-{size >> power}{unit}"
    return f"hugepages-{size >> 10}Ki"


def memory_table(machine: Machine, state: NodeState, sizes: Iterable[int]) -> MemoryTable:
    """The kubelet's memory state: Guaranteed containers with memory nodes, and nobody else.

    Args:
        machine: for what is allocatable.
        state: whose containers are allocated.
        sizes: huge page sizes that the decision looks at.
    """
    names = {size: pages_name(size) for size in sizes}
    capacity: dict[str, Amounts] = {"memory": machine.usable_memory}
    for size, name in names.items():
        pages = machine.hugepages_capacity(size)
        capacity[name] = {i: pages[i] for i in machine.numa_ids}
    masks: dict[str, NUMASet] = {}
    charges: dict[str, Mapping[str, Amounts]] = {}
    for key, a in state.allocations.items():
        if a.qos is not QoSClass.GUARANTEED or not a.mems or not (a.memory_bytes or a.hugepages):
            continue
        masks[key] = a.mems
        allocated: dict[str, dict[int, int]] = {}
        for i, charge in a.charges.items():
            allocated.setdefault("memory", {})[i] = charge.memory
            for size, name in names.items():
                allocated.setdefault(name, {})[i] = charge.hugepages.get(size, 0)
        charges[key] = allocated
    return MemoryTable(capacity=capacity, masks=masks, charges=charges)


def needs_of(demand: Demand) -> dict[str, int]:
    """Bytes by type; nothing for a type that is not asked for."""
    needs = {"memory": demand.memory_bytes} if demand.memory_bytes else {}
    return needs | {pages_name(size): amount for size, amount in demand.hugepages.items()}


def tied_text(table: MemoryTable | None) -> str:
    """Which NUMA nodes are tied together, as the end of a refusal; empty when none are."""
    if table is None:
        return ""
    tied = cells(table.numa_ids, table.masks.values())
    groups = sorted({str(group) for group in tied.groups.values() if len(group) > 1})
    if not groups:
        return ""
    return f"; other containers tie NUMA nodes {' and '.join(groups)} together (kubeletMemory)"


def grant(
    table: MemoryTable, demand: Demand, affinity: NUMASet | None, *, preferred: bool
) -> MemoryGrant | MemoryRefused:
    """What the Memory Manager's ``Allocate`` gives for an affinity; see `kubelet_grant`."""
    return kubelet_grant(table, needs_of(demand), affinity, preferred)


def charges_of(
    granted: MemoryGrant, demand: Demand, cpu_milli: Mapping[int, int]
) -> dict[int, Charge]:
    """A grant as the state books it, with the CPUs beside it."""
    charges: dict[int, Charge] = {}
    for i in granted.mask | NUMASet(cpu_milli):
        pages = {
            size: granted.charges[pages_name(size)].get(i, 0)
            for size in demand.hugepages
            if granted.charges[pages_name(size)].get(i, 0)
        }
        memory = granted.charges.get("memory", {}).get(i, 0)
        charges[i] = Charge(cpu_milli.get(i, 0), memory, pages)
    return charges
