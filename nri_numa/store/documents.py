"""`Allocation` and `PodRecord` as plain documents for the checkpoint, and back.

Keys are short because one document is written for every container start. Empty fields are left
out. Reading is strict about what is there and lenient about what is not: a missing field has its
default, so that older checkpoints load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nri_numa.engine.state import (
    Allocation,
    Charge,
    Former,
    Kind,
    NodeState,
    PodRecord,
    build,
    contradiction,
)
from nri_numa.engine.values.workload import SMT, Load, MemoryPolicy, Policy, QoSClass, StateChange
from nri_numa.machine.cpuset import CPUSet, NUMASet

Document = dict[str, Any]

LARGEST: Final = 1 << 53
"""Bytes, thousandths of a CPU and the like; JSON knows no larger whole numbers for sure."""
CONTAINER = "c/"
POD = "p/"


def allocation_document(a: Allocation) -> Document:
    """One container."""
    document: Document = {
        "pod_id": a.pod_id,
        "pod_uid": a.pod_uid,
        "namespace": a.namespace,
        "pod": a.pod,
        "container": a.container,
        "kind": str(a.kind),
        "qos": str(a.qos),
        "since": a.since,
        "reason": a.reason,
    }
    if a.cpus.bits:
        document["cpus"] = str(a.cpus)
    if a.idle.bits:
        document["idle"] = str(a.idle)
    if a.owned:
        document["owned"] = True
    if a.soft:
        document["soft"] = True
    if a.numa_nodes.bits:
        document["numa"] = str(a.numa_nodes)
    if a.mems.bits:
        document["mems"] = str(a.mems)
    if a.charges:
        document["charges"] = {
            str(i): [c.cpu_milli, c.memory, {str(k): v for k, v in c.hugepages.items()}]
            for i, c in a.charges.items()
        }
    if a.cpu_milli:
        document["cpu_milli"] = a.cpu_milli
    if a.memory_bytes:
        document["memory"] = a.memory_bytes
    if a.hugepages:
        document["hugepages"] = {str(k): v for k, v in a.hugepages.items()}
    if a.policy is not Policy.NONE:
        document["policy"] = str(a.policy)
    if a.smt is not SMT.ANY:
        document["smt"] = str(a.smt)
    if a.load is not None:
        document["load"] = a.load.busy
    if not a.preferred:
        document["preferred"] = False
    if a.pinned.bits:
        document["pinned"] = str(a.pinned)
    if a.quota is not None:
        document["quota"] = a.quota
    if a.slots:
        document["slots"] = a.slots
    if a.mempolicy is not MemoryPolicy.DEFAULT:
        document["mempolicy"] = a.mempolicy.value
    if a.ended:
        document["ended"] = a.ended
    return document


def allocation_from(container_id: str, document: Mapping[str, Any]) -> Allocation:
    """Read one container back.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError: the document is damaged.
    """
    load, quota = document.get("load"), document.get("quota")
    allocation = Allocation(
        container_id=container_id,
        pod_id=_text(document["pod_id"]),
        pod_uid=_text(document["pod_uid"]),
        namespace=_text(document["namespace"]),
        pod=_text(document["pod"]),
        container=_text(document["container"]),
        kind=Kind(document["kind"]),
        qos=QoSClass(document["qos"]),
        since=float(document["since"]),
        reason=_text(document["reason"]),
        cpus=CPUSet.parse(document.get("cpus", "")),
        idle=CPUSet.parse(document.get("idle", "")),
        owned=bool(document.get("owned", False)),
        soft=bool(document.get("soft", False)),
        numa_nodes=NUMASet.parse(document.get("numa", "")),
        mems=NUMASet.parse(document.get("mems", "")),
        charges={
            int(i): Charge(
                _amount(milli),
                _amount(memory),
                {_amount(k): _amount(v) for k, v in pages.items()},
            )
            for i, (milli, memory, pages) in document.get("charges", {}).items()
        },
        cpu_milli=_amount(document.get("cpu_milli", 0)),
        memory_bytes=_amount(document.get("memory", 0)),
        hugepages={_amount(k): _amount(v) for k, v in document.get("hugepages", {}).items()},
        policy=Policy(document.get("policy", "none")),
        smt=SMT(document.get("smt", "any")),
        load=None if load is None else Load(tuple((_amount(a), _amount(b)) for a, b in load)),
        preferred=bool(document.get("preferred", True)),
        pinned=CPUSet.parse(document.get("pinned", "")),
        quota=None if quota is None else _amount(quota, least=-1),
        slots=_text(document.get("slots", "")),
        mempolicy=MemoryPolicy(document.get("mempolicy", "default")),
        ended=float(document.get("ended", 0.0)),
    )
    problem = contradiction(allocation)
    if problem:
        raise ValueError(problem)
    return allocation


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, not {value!r}")
    return value


def _amount(value: Any, least: int = 0) -> int:
    """A number of something; sums of them stay within 64 bits."""
    found = int(value)
    if not least <= found <= LARGEST:
        raise ValueError(f"expected {least} to {LARGEST}, not {str(value)[:40]}")
    return found


def pod_document(record: PodRecord) -> Document | None:
    """What is worth remembering of a pod beyond its containers; None when nothing is."""
    if record.affinity is None and not record.former:
        return None
    document: Document = {"pod_id": record.pod_id}
    if record.affinity is not None:
        document["affinity"] = str(record.affinity)
        document["preferred"] = record.affinity_preferred
    if record.former:
        document["former"] = {
            name: [str(f.cpus), str(f.numa_nodes)] for name, f in record.former.items()
        }
    return document


def pod_from(uid: str, document: Mapping[str, Any]) -> PodRecord:
    """Read one pod back; damaged documents raise as in `allocation_from`."""
    affinity = document.get("affinity")
    return PodRecord(
        uid=uid,
        pod_id=_text(document["pod_id"]),
        affinity=None if affinity is None else NUMASet.parse(affinity),
        affinity_preferred=bool(document.get("preferred", True)),
        former={
            name: Former(CPUSet.parse(cpus), NUMASet.parse(numa_nodes))
            for name, (cpus, numa_nodes) in document.get("former", {}).items()
        },
    )


def changed_documents(before: NodeState, after: NodeState, change: StateChange) -> Document:
    """Documents to write for one step.

    Args:
        before: state before the step.
        after: state after it.
        change: the containers and pods that the step may have changed.

    Returns:
        Key to document, or to None where it goes away.
    """
    documents: Document = {}
    for container_id in change.containers:
        allocation = after.allocations.get(container_id)
        if allocation is not before.allocations.get(container_id):
            documents[CONTAINER + container_id] = (
                None if allocation is None else allocation_document(allocation)
            )
    for uid in change.pods:
        record, old = after.pods.get(uid), before.pods.get(uid)
        if record is old:
            continue
        document = None if record is None else pod_document(record)
        if document != (None if old is None else pod_document(old)):
            documents[POD + uid] = document
    return documents


def state_from(documents: Mapping[str, Mapping[str, Any]]) -> tuple[NodeState, list[str]]:
    """Put a state together again.

    Returns:
        The state, and a sentence for each document that was damaged and left out.
    """
    allocations: list[Allocation] = []
    records: list[PodRecord] = []
    problems: list[str] = []
    for key, document in documents.items():
        try:
            if key.startswith(CONTAINER):
                allocations.append(allocation_from(key[len(CONTAINER) :], document))
            elif key.startswith(POD):
                records.append(pod_from(key[len(POD) :], document))
            else:
                problems.append(f"checkpoint entry {key!r} is of no known sort and was left out")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            problems.append(f"checkpoint entry {key!r} is damaged and was left out: {error!r}")
    return build(allocations, records), problems
