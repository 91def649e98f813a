"""The explanation of a decision that was made just now."""

from nri_numa.engine.decision import Admitted, Decision
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.explain.explanation import (
    ExplanationDocument,
    explain_allocation,
    explain_rejection,
    stored_explanation,
)
from nri_numa.engine.node_model import NodeModel


def of_decision(machine: NodeModel, decision: Decision) -> ExplanationDocument:
    known = stored_explanation(decision.trace)
    if isinstance(decision, Admitted):
        cpus = NodeSnapshot(machine, decision.state).cpuset_of(decision.allocation)
        return explain_allocation(decision.allocation, known, str(cpus))
    return explain_rejection(known, decision.reason, decision.message)
