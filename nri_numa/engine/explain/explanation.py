"""The explanation of a placement or a refusal, as a plain document.

`nri_numa.engine.explain.sentences` makes its sentences.

Keys are camelCase, id sets are texts in the kernel's list format, CPU amounts are thousandths of a
CPU where the key ends in ``Milli``, sizes are bytes. Everything in it is text, number, truth value,
None, list or dict, so that it survives JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from nri_numa.engine.align.policies import Alignment, NamedDevice, RejectedMask, ResourceSummary
from nri_numa.engine.decision import DecisionTrace
from nri_numa.engine.foreign_pins import RESERVATION_KIND
from nri_numa.engine.request import options
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import Allocation, ContainerKind
from nri_numa.model.workload import MemoryPolicy, QoSClass, Scope

ExplanationDocument = dict[str, Any]

PLACED_OUTCOME = "placed"
MISALIGNED_OUTCOME = "misaligned"
UNPINNED_OUTCOME = "unpinned"
"""It started without a pin, because its demand did not fit."""
REJECTED_OUTCOME = "rejected"


class DemandSource(msgspec.Struct, array_like=True, frozen=True):
    """The demand of a container, and the numbers of the runtime that say so; None is not given.

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
    own_cpu_milli: int = 0
    own_memory_bytes: int = 0


class ExplanationInput(msgspec.Struct, array_like=True, frozen=True):
    """The basis of an explanation besides the alignment: texts and numbers that can be kept.

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
    """One explanation: of which container, the basis, and the alignment to look at again.

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
    """Keep of a decision what its explanation needs."""
    names = trace.pod.namespace, trace.pod.name, trace.container.name
    return StoredExplanation(*names, explanation_input_of(trace), trace.alignment)


def explanation_input_of(trace: DecisionTrace) -> ExplanationInput:
    """The texts and numbers of a decision that its explanation is made from."""
    requested, demand, resources = trace.requested, trace.demand, trace.container.resources
    demand_source = None
    if requested is not None and demand is not None:
        demand_source = DemandSource(
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
            own_cpu_milli=demand.own_cpu_milli,
            own_memory_bytes=demand.own_memory_bytes,
        )
    return ExplanationInput(
        qos=str(trace.pod.qos),
        requested=None if requested is None else _requested_options(requested),
        scope=str(Scope.CONTAINER if requested is None else requested.scope),
        demand=demand_source,
        free_cpu_milli=dict(trace.free_cpu_milli),
        free_memory=dict(trace.free_memory),
        pool_before=str(trace.pool_before),
        pool_after=str(trace.pool_after),
        decision_steps=trace.decision_steps,
        rule=trace.rule,
    )


def explain_allocation(
    allocation: Allocation, stored: StoredExplanation | None, cpus: str
) -> ExplanationDocument:
    """Explain what a container has."""
    a = allocation
    outcome = PLACED_OUTCOME
    if not a.aligned:
        outcome = UNPINNED_OUTCOME if a.kind is ContainerKind.UNPINNED else MISALIGNED_OUTCOME
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
            "idleSiblings": str(a.idle_siblings),
            "policy": a.policy.value,
            "aligned": a.aligned,
            **({"shortfall": True} if a.has_shortfall else {}),
            **({"unpinnedFor": str(a.unpinned_for)} if a.unpinned_for is not None else {}),
            **({"mempolicy": a.mempolicy.value} if a.mempolicy is not MemoryPolicy.DEFAULT else {}),
        },
        "rejection": None,
        "otherVersion": stored is not None and stored.basis is None,
        **_explain_trace(stored),
    }


def explain_rejection(stored: StoredExplanation, reason: str, message: str) -> ExplanationDocument:
    """Explain why a container was refused."""
    return {
        "namespace": stored.namespace,
        "pod": stored.pod,
        "container": stored.container,
        "outcome": REJECTED_OUTCOME,
        "summary": message,
        "qos": "" if stored.basis is None else stored.basis.qos,
        "result": None,
        "rejection": {
            "reason": str(reason),
            "rule": "" if stored.basis is None else stored.basis.rule,
            "message": message,
        },
        "otherVersion": stored.basis is None,
        **_explain_trace(stored),
    }


def _explain_trace(stored: StoredExplanation | None) -> ExplanationDocument:
    if stored is None or stored.basis is None:
        return {"traced": False}
    basis, alignment = stored.basis, stored.alignment
    requested, free_memory = basis.requested or {}, basis.free_memory
    return {
        "traced": True,
        "options": [
            {"key": key, "value": value, "source": source}
            for key, (value, source) in requested.items()
        ],
        "understood": basis.requested is not None,
        "demand": None
        if basis.demand is None
        else _demand_document(basis.qos, requested, basis.demand),
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
        "misalignedDevices": _misaligned_devices_document(alignment),
        "resources": [] if alignment is None else _as_documents(alignment.resource_summaries),
        "rejectedMasks": [] if alignment is None else _as_documents(alignment.rejected_masks),
        "free": [
            {
                "numaNode": i,
                "cpuMilli": milli,
                **({"memoryBytes": free_memory[i]} if i in free_memory else {}),
            }
            for i, milli in sorted(basis.free_cpu_milli.items())
        ],
        "pool": {"before": basis.pool_before, "after": basis.pool_after},
        "decisionSteps": list(basis.decision_steps),
    }


def _misaligned_devices_document(alignment: Alignment | None) -> ExplanationDocument | None:
    devices = None if alignment is None else alignment.misaligned_devices
    if devices is None:
        return None
    return {
        "given": _as_documents(devices.given),
        "apart": devices.apart,
        "isKubeletChoice": devices.is_kubelet_choice,
        "alternative": None if devices.alternative is None else _as_documents(devices.alternative),
        "numaNodes": str(devices.numa_nodes),
        "remedy": devices.remedy,
        "text": devices.clause,
    }


def _requested_options(requested: PlacementOptions) -> dict[str, tuple[str, str]]:
    """Value and source by key, in the annotations' grammar, without built-in defaults."""
    sources = requested.sources
    return {
        key: (option.format(value), sources[key].text)
        for key, option in options.TABLE.by_key.items()
        if key in sources and (value := getattr(requested, option.field)) is not None
    }


def _demand_document(
    qos: str, requested: Mapping[str, tuple[str, str]], demand: DemandSource
) -> ExplanationDocument:
    return {
        "cpuMilli": demand.cpu_milli,
        "ownCpuMilli": demand.own_cpu_milli or demand.cpu_milli,
        "exclusiveCpus": demand.exclusive_cpus,
        "cpuFrom": demand.cpu_from,
        "cpuQuota": demand.cpu_quota,
        "cpuPeriod": demand.cpu_period,
        "cpuShares": demand.cpu_shares,
        "cpuModeReason": _cpu_mode_reason(qos, requested, demand),
        "memoryBytes": demand.memory_bytes,
        "ownMemoryBytes": demand.own_memory_bytes or demand.memory_bytes,
        "memoryFrom": demand.memory_from,
        "oomScore": demand.oom_score,
        "hugePages": [
            {"sizeBytes": size, "bytes": amount}
            for size, amount in sorted(demand.hugepages.items())
        ],
        "notes": list(demand.notes),
    }


def shared_cpu_reason(basis: ExplanationInput) -> str:
    """The reason why a whole number of CPUs as a limit is no exclusive CPUs; else empty."""
    options, demand = basis.requested or {}, basis.demand
    if demand is None or demand.cpu_from != "limit" or demand.cpu_milli % 1000 or "cpus" in options:
        return ""
    return _cpu_mode_reason(basis.qos, options, demand)


def _cpu_mode_reason(
    qos: str, requested: Mapping[str, tuple[str, str]], demand: DemandSource
) -> str:
    """The reason why it owns or shares CPUs, after *because*; empty where lists decide."""
    if "numacpu" in requested:
        return ""
    value, source = requested.get("cpus", ("", ""))
    if value == "shared" or (value and demand.exclusive_cpus):
        return f"{source} sets cpus: {value}"
    if demand.exclusive_cpus:
        return f"the pod is {qos} and the number is whole"
    if value:  # a whole number that is not paid for is among the notes
        return "the number of CPUs is not whole" if demand.cpu_milli % 1000 else ""
    if qos != QoSClass.GUARANTEED:
        limits = demand.cpu_from == "limit" and demand.memory_from != "limit"
        cause = ": the container has no memory limit" if limits else ""
        return f"the pod is {qos}, not Guaranteed{cause}"
    if not demand.cpu_milli:
        return "it requests no CPUs"
    if demand.cpu_milli % 1000:
        return "the number of CPUs is not whole"
    return "no option requests exclusive CPUs"


def _as_documents(
    values: Iterable[ResourceSummary | RejectedMask | NamedDevice],
) -> list[ExplanationDocument]:
    return list(msgspec.to_builtins([*values], enc_hook=str))
