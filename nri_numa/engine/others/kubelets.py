"""Containers and CPUs that the kubelet's static managers granted, in our books.

Whose a container is, is decided in `nri_numa.engine.place.kubelet_claims`.
"""

from __future__ import annotations

from typing import Final

from nri_numa.engine.state import Allocation, Kind, NodeState
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.model import cpus_text

KUBELETS: Final = "kubelet"
KEPT_FOR_POD: Final = "kept"
"""How a container that the kubelet granted something to is called where kinds are shown."""


def taken_back(allocation: Allocation, cpus: CPUSet) -> Allocation:
    """A container of ours that the kubelet pins by now, and may."""
    return Allocation(
        container_id=allocation.container_id,
        pod_id=allocation.pod_id,
        pod_uid=allocation.pod_uid,
        namespace=allocation.namespace,
        pod=allocation.pod,
        container=allocation.container,
        qos=allocation.qos,
        kind=Kind.FOREIGN,
        pinned=cpus,
        reason=f"the kubelet took {cpus_text(cpus)} back by its static policy",
        since=allocation.since,
    )


def shown_kind(state: NodeState, allocation: Allocation) -> str:
    """The kind as users see it: a foreign container with a grant is the kubelet's.

    CPUs whose container ended are kept for its pod.
    """
    if allocation.ended:
        return KEPT_FOR_POD
    if allocation.kind is Kind.FOREIGN and state.kubelet.cpus_of(
        allocation.pod_uid, allocation.container, allocation.container_id
    ):
        return KUBELETS
    return allocation.kind.value


def granted_names(state: NodeState, cpus: CPUSet) -> list[str]:
    """Who has some of these CPUs by a grant, each as far as it is known here."""
    names = {(a.pod_uid, a.container): a.full_name for a in state.allocations.values()}
    pods = {a.pod_uid: f"pod {a.namespace}/{a.pod}" for a in state.allocations.values()}
    found = [
        names.get(holder) or f"container {' of pod UID '.join(filter(None, reversed(holder)))}"
        for holder, granted in state.kubelet.cpus.items()
        if granted & cpus
    ]
    if not found:
        found = [
            pods.get(uid, f"pod UID {uid}")
            for uid, granted in state.kubelet.pods.items()
            if granted & cpus
        ]
    return sorted(found)
