"""What log lines say about containers: plain fields of the engine's values."""

from __future__ import annotations

from typing import Final

from nri_numa.engine.decision import Admitted
from nri_numa.engine.state import UNBOUND_GROUP, Allocation, group_cpus, group_of
from nri_numa.machine.model import Topology

NAMED: Final = 5
"""Neighbours of one line that are named; the others are counted."""


def fields_of(allocation: Allocation, cpus: str) -> dict[str, object]:
    """A container and what it has; ``cpus`` is the kernel list it should have now."""
    return {
        "pod": f"{allocation.namespace}/{allocation.pod}",
        "container": allocation.container,
        "id": allocation.container_id[:12],
        "kind": str(allocation.kind),
        "cpus": cpus,
        "mems": str(allocation.mems),
        "policy": str(allocation.policy),
        "reason": allocation.reason,
    }


def moved_neighbours(decision: Admitted, topology: Topology) -> str:
    """Whose CPUs a decision changed, with their old and new sets; the first few by name."""
    before, after = decision.trace.pool_before, decision.trace.pool_after
    takes, own = decision.state.withheld_bits, decision.allocation
    had = takes & ~(own.cpus | own.idle).bits if own.owned else takes
    named: list[str] = []
    for update in decision.updates[:NAMED]:
        allocation = decision.state.allocations.get(update.container_id)
        if allocation is None:
            continue
        key = group_of(allocation)
        key = UNBOUND_GROUP if key is None else key
        old = group_cpus(key, before, topology, had)
        new = group_cpus(key, after, topology, takes)
        named.append(f"{allocation.full_name} {old} -> {new}")
    more = len(decision.updates) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def sizes(before: Allocation | None, after: Allocation) -> dict[str, object]:
    """What a resize changed: CPU in thousandths, memory in bytes, each as ``old -> new``."""
    if before is None:
        return {}
    return {
        name: f"{old} -> {new}"
        for name, old, new in (
            ("cpu_milli", before.cpu_milli, after.cpu_milli),
            ("memory_bytes", before.memory_bytes, after.memory_bytes),
        )
        if old != new
    }
