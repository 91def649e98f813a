"""Why a container is where it is, or why it was refused, as a plain document.

The document holds what was asked for and where each value came from, what the container needs and
how that was worked out, what each resource could have had, the best places and what separated the
winner from the losers, the shared pool before and after, and for a refusal the rule that refused.
`nri_numa.engine.explain.sentences` says the same in sentences.

Keys are camelCase, id sets are texts in the kernel's list format, CPU amounts are thousandths of a
CPU where the key ends in ``Milli``, sizes are bytes. Everything in it is text, number, truth value,
None, list or dict, so that it survives JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from nri_numa.engine.align.policies import Alignment, RejectedMask, ResourceSummary
from nri_numa.engine.decision import DecisionTrace
from nri_numa.engine.foreign_pins import RESERVATION_KIND
from nri_numa.engine.request.annotations import format_load
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.model.workload import MemoryPolicy, PlacementOptions, QoSClass, Scope

ExplanationDocument = dict[str, Any]

PLACED_OUTCOME, WIDENED_OUTCOME, UNPINNED_OUTCOME, REFUSED_OUTCOME = (
    "placed",
    "widened",
    "unpinned",
    "refused",
)
"""Outcomes: as asked; on a wider set than ideal; started untouched after a failure; not at all."""


class DemandSource(msgspec.Struct, array_like=True, frozen=True):
    """What a container needs, and the numbers of the runtime that say so; None is not given.

    Like `ExplanationInput` it is saved by position: a new field is the last one, and has a default.
    """

    cpu_milli: int = 0
    exclusive_cpus: int = 0
    cpu_from: str = ""
    cpu_quota: int | None = None
    cpu_period: int | None = None
    cpu_shares: int | None = None
    memory_bytes: int = 0
    memory_from: str = ""
    oom_score: int | None = None
    hugepages: dict[int, int] = {}
    notes: tuple[str, ...] = ()


class ExplanationInput(msgspec.Struct, array_like=True, frozen=True):
    """What an explanation is made from besides the alignment: texts and numbers that can be kept.

    Attributes:
        requested: value and source by annotation key; None when what was asked is not understood.
    """

    qos: str = ""
    requested: dict[str, tuple[str, str]] | None = None
    scope: str = ""
    demand: DemandSource | None = None
    free_cpu_milli: dict[int, int] = msgspec.field(default_factory=dict)
    free_memory: dict[int, int] = msgspec.field(default_factory=dict)
    pool_before: str = ""
    pool_after: str = ""
    decision_steps: tuple[str, ...] = ()
    rule: str = ""


class StoredExplanation(NamedTuple):
    """Why one container has what it has: whose, the basis, and the alignment to look at again.

    What each resource could have had is worked out of the alignment only on request: on
    eight NUMA nodes that takes milliseconds (`stored_explanation` takes microseconds).

    Attributes:
        basis: None when another version of nri-numa saved it in a form that this one cannot read.
    """

    namespace: str
    pod: str
    container: str
    basis: ExplanationInput | None
    alignment: Alignment | None


def stored_explanation(trace: DecisionTrace) -> StoredExplanation:
    """What stays of a decision for its explanation."""
    who = trace.pod.namespace, trace.pod.name, trace.container.name
    return StoredExplanation(*who, basis_of(trace), trace.alignment)


def basis_of(trace: DecisionTrace) -> ExplanationInput:
    """The texts and numbers of a decision that its explanation is made from."""
    requested, demand, resources = trace.requested, trace.demand, trace.container.resources
    needs = None
    if requested is not None and demand is not None:
        needs = DemandSource(
            cpu_milli=demand.cpu_milli,
            exclusive_cpus=demand.exclusive_cpus,
            cpu_from=demand.cpu_source,
            cpu_quota=resources.cpu_quota,
            cpu_period=resources.cpu_period,
            cpu_shares=resources.cpu_shares,
            memory_bytes=demand.memory_bytes,
            memory_from=demand.memory_source,
            oom_score=trace.container.oom_score_adj,
            hugepages=dict(demand.hugepages),
            notes=demand.notes,
        )
    return ExplanationInput(
        qos=str(trace.pod.qos),
        requested=None if requested is None else _requested_options(requested),
        scope=str(Scope.CONTAINER if requested is None else requested.scope),
        demand=needs,
        free_cpu_milli=dict(trace.free_cpu_milli),
        free_memory=dict(trace.free_memory),
        pool_before=str(trace.pool_before),
        pool_after=str(trace.pool_after),
        decision_steps=trace.decision_steps,
        rule=trace.rule,
    )


def explain_allocation(
    allocation: Allocation, known: StoredExplanation | None, cpus: str
) -> ExplanationDocument:
    """Explain what a container has."""
    a = allocation
    outcome = PLACED_OUTCOME
    if not a.aligned:
        outcome = UNPINNED_OUTCOME if a.kind is ContainerKind.UNPINNED else WIDENED_OUTCOME
    return {
        "namespace": a.namespace,
        "pod": a.pod,
        "container": a.container,
        "outcome": outcome,
        "summary": a.reason,
        "qos": a.qos.value,
        "result": {
            "kind": RESERVATION_KIND if a.reserved_at else a.kind.value,
            "cpus": cpus,
            "mems": str(a.mems),
            "numaNodes": str(a.numa_nodes),
            "idle": str(a.idle_siblings),
            "policy": a.policy.value,
            "preferred": a.aligned,
            **({"shortfall": True} if a.has_shortfall else {}),
            **({"unpinnedFor": str(a.unpinned_for)} if a.unpinned_for is not None else {}),
            **({"mempolicy": a.mempolicy.value} if a.mempolicy is not MemoryPolicy.DEFAULT else {}),
        },
        "refusal": None,
        "otherVersion": known is not None and known.basis is None,
        **_explain_trace(known),
    }


def explain_rejection(known: StoredExplanation, reason: str, message: str) -> ExplanationDocument:
    """Explain why a container was refused."""
    return {
        "namespace": known.namespace,
        "pod": known.pod,
        "container": known.container,
        "outcome": REFUSED_OUTCOME,
        "summary": message,
        "qos": "" if known.basis is None else known.basis.qos,
        "result": None,
        "refusal": {
            "reason": str(reason),
            "rule": "" if known.basis is None else known.basis.rule,
            "message": message,
        },
        "otherVersion": known.basis is None,
        **_explain_trace(known),
    }


def _explain_trace(known: StoredExplanation | None) -> ExplanationDocument:
    if known is None or known.basis is None:
        return {"traced": False}
    basis, alignment = known.basis, known.alignment
    asked, memory_left = basis.requested or {}, basis.free_memory
    return {
        "traced": True,
        "asked": [
            {"key": key, "value": value, "source": source} for key, (value, source) in asked.items()
        ],
        "understood": basis.requested is not None,
        "demand": None
        if basis.demand is None
        else _demand_document(basis.qos, asked, basis.demand),
        "alignment": None
        if alignment is None
        else {
            "policy": alignment.problem.policy.value,
            "scope": basis.scope,
            "admitted": alignment.admitted,
            "numaNodes": None if alignment.affinity is None else str(alignment.affinity),
            "preferred": alignment.preferred,
            "exact": alignment.exact,
            "reason": alignment.reason_text,
        },
        "resources": [] if alignment is None else _as_documents(alignment.resource_summaries),
        "candidates": [] if alignment is None else _as_documents(alignment.rejected_masks),
        "left": [
            {
                "numaNode": i,
                "cpuMilli": milli,
                **({"memoryBytes": memory_left[i]} if i in memory_left else {}),
            }
            for i, milli in sorted(basis.free_cpu_milli.items())
        ],
        "pool": {"before": basis.pool_before, "after": basis.pool_after},
        "steps": list(basis.decision_steps),
    }


# --- what was asked ---------------------------------------------------------------------------


def _requested_options(requested: PlacementOptions) -> dict[str, tuple[str, str]]:
    """Value and source by key, in the annotations' grammar; defaults of ours left out."""
    values = {
        "numacpu": requested.numacpu,
        "numamem": requested.numamem,
        "policy": requested.policy,
        "scope": requested.scope,
        "bind": requested.bind,
        "cpus": requested.cpus,
        "smt": requested.smt,
        "load": None if requested.load is None else format_load(requested.load),
        "on-failure": requested.on_failure,
        "devices": requested.devices,
        "mempolicy": requested.mempolicy,
        "movable": "true" if requested.movable else "false",
    }
    sources = requested.sources
    return {
        key: (str(v), sources[key].text)
        for key, v in values.items()
        if key in sources and v is not None
    }


# --- what it needs ----------------------------------------------------------------------------


def _demand_document(
    qos: str, requested: Mapping[str, tuple[str, str]], needs: DemandSource
) -> ExplanationDocument:
    return {
        "cpuMilli": needs.cpu_milli,
        "exclusiveCpus": needs.exclusive_cpus,
        "cpuFrom": needs.cpu_from,
        "cpuQuota": needs.cpu_quota,
        "cpuPeriod": needs.cpu_period,
        "cpuShares": needs.cpu_shares,
        "why": _cpu_mode_reason(qos, requested, needs),
        "memoryBytes": needs.memory_bytes,
        "memoryFrom": needs.memory_from,
        "oomScore": needs.oom_score,
        "hugePages": [
            {"sizeBytes": size, "bytes": amount} for size, amount in sorted(needs.hugepages.items())
        ],
        "notes": list(needs.notes),
    }


def shared_cpu_reason(basis: ExplanationInput) -> str:
    """Why a whole number of CPUs as a limit is no exclusive CPUs; else empty."""
    asked, needs = basis.requested or {}, basis.demand
    if needs is None or needs.cpu_from != "limit" or needs.cpu_milli % 1000 or "cpus" in asked:
        return ""
    return _cpu_mode_reason(basis.qos, asked, needs)


def _cpu_mode_reason(
    qos: str, requested: Mapping[str, tuple[str, str]], needs: DemandSource
) -> str:
    """Why it owns or shares CPUs; a clause after *because*, empty where lists decide."""
    if "numacpu" in requested:
        return ""
    value, source = requested.get("cpus", ("", ""))
    if value == "shared" or (value and needs.exclusive_cpus):
        return f"cpus: {value} is in force ({source})"
    if needs.exclusive_cpus:
        return f"the pod is {qos} and the number is whole"
    if value:  # a whole number that is not paid for is among the notes
        return "the number of CPUs is not whole" if needs.cpu_milli % 1000 else ""
    if qos != QoSClass.GUARANTEED:
        limits = needs.cpu_from == "limit" and needs.memory_from != "limit"
        cause = ": the container has no memory limit" if limits else ""
        return f"the pod is {qos}, not Guaranteed{cause}"
    if needs.cpu_milli % 1000 or not needs.cpu_milli:
        return "the number of CPUs is not whole"
    return "nothing asks for exclusive CPUs"


def _as_documents(values: Iterable[ResourceSummary | RejectedMask]) -> list[ExplanationDocument]:
    found: list[ExplanationDocument] = msgspec.to_builtins([*values], enc_hook=str)
    return found
