"""The explanation of a decision that was made just now."""

from __future__ import annotations

from nri_numa.engine.decision import Admitted, Decision, Machine
from nri_numa.engine.explain.explanation import Document, grounds, of_allocation, of_refusal
from nri_numa.engine.state import effective_cpus


def of_decision(machine: Machine, decision: Decision) -> Document:
    known = grounds(decision.trace)
    if isinstance(decision, Admitted):
        pool, withheld = decision.trace.pool_after, decision.state.withheld_bits
        cpus = effective_cpus(decision.allocation, pool, machine.topology, withheld)
        return of_allocation(decision.allocation, known, str(cpus))
    return of_refusal(known, decision.reason, decision.message)
