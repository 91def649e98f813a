"""Why a container is where it is, or why it was refused, as a plain document.

The document holds what was asked for and where each value came from, what the container needs and
how that was worked out, what each resource could have had, the best places and what separated the
winner from the losers, the shared pool before and after, and for a refusal the rule that refused.
`nri_numa.engine.explain_text` says the same in sentences.

Keys are camelCase, id sets are texts in the kernel's list format, CPU amounts are thousandths of a
CPU where the key ends in ``Milli``, sizes are bytes. Everything in it is text, number, truth value,
None, list or dict, so that it survives JSON.
"""

from __future__ import annotations

from typing import Any

from nri_numa.engine.decision import Admitted, Decision, Machine, Trace
from nri_numa.engine.demand import Demand
from nri_numa.engine.hint_reasons import Candidate, Problem, ResourceSummary
from nri_numa.engine.load import format_load
from nri_numa.engine.policies import Alignment
from nri_numa.engine.state import Allocation, Kind, effective_cpus
from nri_numa.engine.workload import Container, PodSandbox, QoSClass, Scope, Wishes

Document = dict[str, Any]

PLACED, WIDENED, UNPINNED, REFUSED = "placed", "widened", "unpinned", "refused"
"""Outcomes: as asked; on a wider set than ideal; started untouched after a failure; not at all."""


def of_decision(machine: Machine, decision: Decision) -> Document:
    """Explain a decision that was made just now."""
    if isinstance(decision, Admitted):
        cpus = effective_cpus(decision.allocation, decision.trace.pool_after, machine.topology)
        return of_allocation(decision.allocation, decision.trace, str(cpus))
    return of_refusal(decision.trace, decision.reason, decision.message)


def of_allocation(allocation: Allocation, trace: Trace | None, cpus: str) -> Document:
    """Explain what a container has.

    Args:
        allocation: what it has.
        trace: how that came about; None when it is not known any more, as after a restart.
        cpus: kernel list of the CPUs it runs on now; empty when they are left alone.
    """
    a = allocation
    outcome = PLACED
    if not a.preferred:
        outcome = UNPINNED if a.kind is Kind.UNBOUND else WIDENED
    return {
        "namespace": a.namespace,
        "pod": a.pod,
        "container": a.container,
        "outcome": outcome,
        "summary": a.reason,
        "qos": a.qos.value,
        "result": {
            "kind": a.kind.value,
            "cpus": cpus,
            "mems": str(a.mems),
            "numaNodes": str(a.numa_nodes),
            "idle": str(a.idle),
            "policy": a.policy.value,
            "preferred": a.preferred,
        },
        "refusal": None,
        "traced": trace is not None,
        **(_traced(trace) if trace is not None else {}),
    }


def of_refusal(trace: Trace, reason: str, message: str) -> Document:
    """Explain why a container was refused.

    Args:
        trace: how that came about.
        reason: the CamelCase reason.
        message: the one-line form.
    """
    return {
        "namespace": trace.pod.namespace,
        "pod": trace.pod.name,
        "container": trace.container.name,
        "outcome": REFUSED,
        "summary": message,
        "qos": trace.pod.qos.value,
        "result": None,
        "refusal": {"reason": reason, "rule": trace.rule, "message": message},
        "traced": True,
        **_traced(trace),
    }


def _traced(trace: Trace) -> Document:
    wishes, demand, alignment = trace.wishes, trace.demand, trace.alignment
    return {
        "asked": [] if wishes is None else _asked(wishes),
        "understood": wishes is not None,
        "demand": None
        if wishes is None or demand is None
        else _demand(trace.pod, trace.container, wishes, demand),
        "alignment": None
        if alignment is None
        else {
            "policy": alignment.problem.policy.value,
            "scope": wishes.scope.value if wishes is not None else Scope.CONTAINER.value,
            "admitted": alignment.admitted,
            "numaNodes": None if alignment.affinity is None else str(alignment.affinity),
            "preferred": alignment.preferred,
            "exact": alignment.exact,
            "reason": alignment.reason,
        },
        "resources": [] if alignment is None else [_resource(r) for r in alignment.resources],
        "candidates": [] if alignment is None else _candidates(alignment),
        "left": [
            {
                "numaNode": i,
                "cpuMilli": milli,
                **({"memoryBytes": trace.memory_left[i]} if i in trace.memory_left else {}),
            }
            for i, milli in sorted(trace.cpu_left.items())
        ],
        "pool": {"before": str(trace.pool_before), "after": str(trace.pool_after)},
        "steps": list(trace.steps),
    }


# --- what was asked ---------------------------------------------------------------------------


def asked_values(wishes: Wishes) -> dict[str, str]:
    """What a container asked for by key, in the annotations' grammar; defaults of ours left out."""
    values = {
        "numacpu": wishes.numacpu,
        "numamem": wishes.numamem,
        "policy": wishes.policy,
        "scope": wishes.scope,
        "bind": wishes.bind,
        "cpus": wishes.cpus,
        "smt": wishes.smt,
        "load": None if wishes.load is None else format_load(wishes.load),
        "on-failure": wishes.on_failure,
    }
    return {key: str(v) for key, v in values.items() if key in wishes.sources and v is not None}


def _asked(wishes: Wishes) -> list[Document]:
    return [
        {"key": key, "value": value, "source": wishes.sources[key]}
        for key, value in asked_values(wishes).items()
    ]


# --- what it needs ----------------------------------------------------------------------------


def _demand(pod: PodSandbox, container: Container, wishes: Wishes, demand: Demand) -> Document:
    return {
        "cpuMilli": demand.cpu_milli,
        "exclusiveCpus": demand.exclusive_cpus,
        "cpuFrom": demand.cpu_source,
        "cpuQuota": container.resources.cpu_quota,
        "cpuPeriod": container.resources.cpu_period,
        "cpuShares": container.resources.cpu_shares,
        "why": _why(pod, wishes, demand),
        "memoryBytes": demand.memory_bytes,
        "memoryFrom": demand.memory_source,
        "oomScore": container.oom_score_adj,
        "hugePages": [
            {"sizeBytes": size, "bytes": amount}
            for size, amount in sorted(demand.hugepages.items())
        ],
        "notes": list(demand.notes),
    }


def _why(pod: PodSandbox, wishes: Wishes, demand: Demand) -> str:
    """Why it owns or shares CPUs; a clause after *because*, empty where lists decide."""
    if wishes.numacpu is not None:
        return ""
    source = wishes.sources.get("cpus")
    if wishes.cpus is not None:
        return f"cpus: {wishes.cpus} is in force ({source})"
    if demand.exclusive_cpus:
        return f"the pod is {pod.qos} and the number is whole"
    if pod.qos is not QoSClass.GUARANTEED:
        return f"the pod is {pod.qos}, not Guaranteed"
    if demand.cpu_milli % 1000 or not demand.cpu_milli:
        return "the number of CPUs is not whole"
    return "nothing asks for CPUs of its own"


# --- what each resource could have had --------------------------------------------------------


def _resource(summary: ResourceSummary) -> Document:
    need = summary.need
    return {
        "resource": summary.resource,
        "needed": need,
        "unit": summary.unit,
        "wish": summary.wish.value,
        "idealNumaNodes": summary.preferred_width,
        "neededNumaNodes": summary.narrowest_width,
        "sets": [
            {"numaNodes": str(h.affinity), "preferred": h.preferred}
            for h in summary.hints
            if h.affinity is not None
        ],
        "setCount": summary.hint_count,
        "numaNodes": [
            {
                "numaNode": n.numa_node,
                "free": n.free,
                "capacity": n.capacity,
                "enough": need is not None and n.free >= need,
            }
            for n in summary.numa_nodes
        ],
        "text": summary.text,
    }


def _candidates(alignment: Alignment) -> list[Document]:
    return [
        {
            "numaNodes": str(c.affinity),
            "preferred": c.preferred,
            "separatedBy": _separated_by(alignment, c),
            "text": c.separated_by,
        }
        for c in alignment.candidates
    ]


def _separated_by(alignment: Alignment, loser: Candidate) -> str:
    """What put the winner before a loser: ``preferred``, ``width``, ``distance``, ``rank``, ``id``.

    The order in which the merge looks at them; see `nri_numa.engine.merge`.
    """
    problem: Problem = alignment.problem
    winner = problem.numa_ids if alignment.affinity is None else alignment.affinity
    if alignment.preferred and not loser.preferred:
        return "preferred"
    if len(winner) != len(loser.affinity):
        return "width"
    distances = problem.distances()
    if distances is not None and distances.total(winner.bits) != distances.total(
        loser.affinity.bits
    ):
        return "distance"
    return "id" if problem.rank is None else "rank"
