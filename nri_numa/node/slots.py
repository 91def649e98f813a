"""What the API says of exclusive CPUs that the scheduler may count."""

from __future__ import annotations

from nri_numa.engine.accounting import slot_capacity
from nri_numa.engine.decision import Machine
from nri_numa.engine.state import NodeState
from nri_numa.http.responses import NUMANodeSlots, Slots


def document(machine: Machine, state: NodeState, reason: str) -> Slots:
    """Count what is held with slots and what is free.

    Args:
        machine: topology and settings.
        state: what is decided.
        reason: why nothing is to be counted on now; empty when nothing speaks against it.
    """
    offered = slot_capacity(machine, state)
    return Slots(
        serial=state.serial,
        ready=not reason,
        reason=reason,
        annotation=machine.slots_key,
        total=offered.total,
        exclusive=len(state.owned),
        numa_nodes=tuple(
            NUMANodeSlots(id=i, held=offered.held[i], free=free)
            for i, free in sorted(offered.free.items())
        ),
        ids=tuple(id for a in offered.holders for id in a.slots.split(",")),
    )
