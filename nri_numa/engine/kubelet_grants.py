"""Grants of the kubelet's static managers: kept or overridden.

The kubelet decides at the pod's admission, without knowing the annotations. What its static
managers granted is its own (docs/adr/0035-beside-the-kubelets-managers.md): the container is left
as the kubelet has it, unless its pod names CPUs or memory nodes itself and
``kubelet.overrideGrants`` lets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from nri_numa.engine.decision import PlacementRequest
from nri_numa.engine.request.annotations import quote_value
from nri_numa.engine.request.demand import CLAIM_SLOT_MARK
from nri_numa.engine.request.options import KUBELET_GRANT_SOURCE, HeldCPUSlots, PlacementOptions
from nri_numa.engine.state import NodeState
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import count_text, cpus_text, join_words, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import Bind, CPUMode, KubeletGrantOverriders, OnFailure


class KeepGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The container stays as the kubelet has it.

    Attributes:
        warnings: what its pod asks for and does not get.
    """

    reason: str
    warnings: tuple[str, ...] = ()


class OverrideGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The engine places the container although the kubelet granted it something.

    Attributes:
        warnings: what the kubelet goes on believing.
        cpus: granted CPUs that it is to have, as the kubelet believes.
    """

    requested: PlacementOptions
    warnings: tuple[str, ...] = ()
    cpus: CPUSet = NO_CPUS


class _Grant(msgspec.Struct, frozen=True):
    """CPUs and memory nodes that the kubelet's static managers granted one container."""

    cpus: CPUSet
    mems: NUMASet

    @property
    def text(self) -> str:
        """The grant in words: ``CPUs 2-3 and memory of NUMA node 0``."""
        parts = [cpus_text(self.cpus)] if self.cpus else []
        if self.mems:
            parts.append(f"memory of {numa_text(self.mems)}")
        return " and ".join(parts)

    @property
    def granted_by_kubelet_text(self) -> str:
        """The reason of a container that is the kubelet's, one clause."""
        return f"the kubelet granted it {self.text} by its static policy"


def keep_or_override_grant(case: PlacementRequest) -> KeepGrant | OverrideGrant | Rejection | None:
    """Decide whether a container stays as the kubelet has it.

    None for a container that the kubelet granted nothing relevant: it is like any other. A
    `Rejection` if the pod insists on a list and may not.
    """
    grants, pod, container = case.node.state.kubelet, case.pod, case.container
    requested = case.requested
    cpus = grants.cpus_of(pod.uid, container.name, container.id)
    grant = _Grant(cpus, grants.mems_of(pod.uid, container.name))
    if not grant.cpus and not grant.mems:
        return None
    if requested.is_unpinned:
        return KeepGrant(reason=grant.granted_by_kubelet_text) if grant.cpus else None
    if grant.cpus and requested.slots is not None and CLAIM_SLOT_MARK in requested.slots.ids:
        return _resolve_claim_grant(case, requested.slots, grant)
    if requested.numacpu is None and requested.numamem is None:
        return _resolve_grant_without_list(grant, requested)
    conflicts = []
    if requested.numacpu is not None and grant.cpus and requested.listed_cpus != grant.cpus:
        conflicts.append("numacpu")
    if requested.numamem is not None and grant.mems and requested.listed_mems != grant.mems:
        conflicts.append("numamem")
    if not conflicts:
        return _resolve_grant_with_matching_list(grant, requested)
    return _resolve_list_conflict(case, grant, conflicts)


def _resolve_list_conflict(
    case: PlacementRequest, grant: _Grant, keys: Sequence[str]
) -> KeepGrant | OverrideGrant | Rejection:
    """Resolve lists that differ from the kubelet's grant."""
    requested, settings, key = case.requested, case.node.machine.settings, keys[0]
    by_pod = all(map(requested.is_from_annotation, keys))
    if by_pod and settings.kubelet_override is KubeletGrantOverriders.ANNOTATED:
        lists = " and ".join(f"{key} {getattr(requested, key)}" for key in keys)
        warning = (
            f"{lists} overrides the kubelet: the kubelet granted it {grant.text} and still "
            "assumes so"
        )
        requested = _with_granted_cpus_listed(requested, grant)
        return OverrideGrant(requested=requested, warnings=(warning,))
    remedy = (
        "kubelet.overrideGrants: annotated" if by_pod else f"annotation {key} of the pod itself"
    )
    text = (
        f"{key} is {quote_value(getattr(requested, key))} ({requested.source_text(key)}), "
        f"but {grant.granted_by_kubelet_text}, and kubelet.overrideGrants is "
        f"{settings.kubelet_override}; expected {key} "
        f"{grant.mems if key == 'numamem' else grant.cpus}, {remedy}, or a container without a "
        "grant of the kubelet"
    )
    if by_pod and requested.on_failure in (None, OnFailure.REJECT):
        return Rejection(
            reason=RejectionReason.KUBELET_PINNED,
            detail=text,
            rule="nri-numa does not change what the kubelet granted",
        )
    return KeepGrant(reason=grant.granted_by_kubelet_text, warnings=(text,))


def _resolve_claim_grant(
    case: PlacementRequest, slots: HeldCPUSlots, grant: _Grant
) -> KeepGrant | OverrideGrant | Rejection:
    """Resolve a grant for a claim, whose CPUs the scheduler counts on their NUMA nodes."""
    requested, machine = case.requested, case.node.machine
    if machine.topology.cpu_count_by_node(grant.cpus) == slots.by_node:
        return OverrideGrant(requested=requested, cpus=grant.cpus)
    counts = join_words([f"{count} on NUMA node {i}" for i, count in slots.by_node.items()])
    text = f"its ResourceClaim has {count_text(slots.count, 'CPU')}, {counts}, but "
    text += grant.granted_by_kubelet_text
    if machine.settings.kubelet_override is KubeletGrantOverriders.ANNOTATED:
        return OverrideGrant(requested=requested, warnings=(f"{text} and still assumes so",))
    if requested.on_failure is OnFailure.UNPINNED:
        return KeepGrant(reason=grant.granted_by_kubelet_text, warnings=(text,))
    return Rejection(
        reason=RejectionReason.KUBELET_PINNED,
        detail=f"{text}, and kubelet.overrideGrants is "
        f"{machine.settings.kubelet_override}; expected cpuManagerPolicy none, a pod that is not "
        "Guaranteed, or kubelet.overrideGrants: annotated",
        rule="nri-numa does not change what the kubelet granted",
    )


def _resolve_grant_without_list(
    grant: _Grant, requested: PlacementOptions
) -> KeepGrant | OverrideGrant:
    """Resolve a grant for a container that requests a policy and no list."""
    keys = ", ".join(k for k in ("policy", "cpus", "bind", "smt") if k in requested.explicit_keys)
    keys = keys or "its options"
    if grant.cpus:
        text = f"{keys}: ignored, because the kubelet granted it {grant.text}"
        return KeepGrant(reason=grant.granted_by_kubelet_text, warnings=(text,))
    if requested.bind is Bind.CPU:
        return OverrideGrant(requested=requested)
    text = f"{keys}: for CPUs only, because the kubelet granted it {grant.text}"
    return OverrideGrant(requested=replace(requested, bind=Bind.CPU), warnings=(text,))


def _resolve_grant_with_matching_list(
    grant: _Grant, requested: PlacementOptions
) -> KeepGrant | OverrideGrant:
    """Resolve a grant that no list contradicts."""
    if grant.cpus and (requested.numamem is None or grant.mems):
        return KeepGrant(reason=f"{grant.granted_by_kubelet_text}, as listed")
    return OverrideGrant(requested=_with_granted_cpus_listed(requested, grant))


def _with_granted_cpus_listed(requested: PlacementOptions, grant: _Grant) -> PlacementOptions:
    """List the granted CPUs if memory alone is listed."""
    if requested.numacpu is not None or not grant.cpus:
        return requested
    return replace(
        requested,
        numacpu=str(grant.cpus),
        listed_cpus=grant.cpus,
        cpus=None if requested.cpus is CPUMode.EXCLUSIVE else requested.cpus,
        sources={**requested.sources, "numacpu": KUBELET_GRANT_SOURCE},
    )


def grant_holders(state: NodeState, cpus: CPUSet) -> list[str]:
    """Containers or pods that were granted some of these CPUs, by name if it is known here."""
    names = {(a.pod_uid, a.container): a.full_name for a in state.allocations.values()}
    pods = {a.pod_uid: f"pod {a.namespace}/{a.pod}" for a in state.allocations.values()}
    holders = [
        names.get(holder) or f"container {' of pod UID '.join(filter(None, reversed(holder)))}"
        for holder, granted in state.kubelet.cpus.items()
        if granted & cpus
    ]
    if not holders:
        holders = [
            pods.get(uid, f"pod UID {uid}")
            for uid, granted in state.kubelet.pods.items()
            if granted & cpus
        ]
    return sorted(holders)
