"""What the kubelet's static managers granted, and whether it stays.

The kubelet decides at the pod's admission, without knowing our annotations. What its static
managers granted is its own (docs/adr/0035-beside-the-kubelets-managers.md): the container is left
as the kubelet has it, unless its pod names CPUs or memory nodes itself and ``kubelet.override``
lets it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.request.annotations import is_from_annotation, quote_value
from nri_numa.engine.request.demand import CLAIM_SLOT_MARK
from nri_numa.engine.state import NodeState
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology, count_text, cpus_text, numa_text
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    Bind,
    Container,
    CPUMode,
    KubeletGrants,
    KubeletOverride,
    OnFailure,
    PlacementOptions,
    PodSandbox,
    Rejection,
    Slots,
    container_subject,
)

_GRANT_SOURCE: Final = "the kubelet's grant"


class KeepGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The container stays as the kubelet has it.

    Attributes:
        warnings: what its pod asks for and does not get.
    """

    reason: str
    warnings: tuple[str, ...] = ()


class OverrideGrant(msgspec.Struct, frozen=True, kw_only=True):
    """We place the container although the kubelet granted it something.

    Attributes:
        warnings: what the kubelet goes on believing.
        cpus: granted CPUs that it is to have, as the kubelet believes.
    """

    requested: PlacementOptions
    warnings: tuple[str, ...] = ()
    cpus: CPUSet = NO_CPUS


def keep_or_override_grant(
    topology: Topology,
    settings: Settings,
    grants: KubeletGrants,
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions,
) -> KeepGrant | OverrideGrant | Rejection | None:
    """Say whose a container is.

    None for a container that the kubelet granted nothing to, or nothing that matters: it is like
    any other. A `Rejection` where the pod insists on a list and may not.
    """
    cpus = grants.cpus_of(pod.uid, container.name, container.id)
    mems = grants.mems_of(pod.uid, container.name)
    if not cpus and not mems:
        return None
    if requested.is_unpinned:
        return KeepGrant(reason=kubelet_grant_reason_text(cpus, mems)) if cpus else None
    if cpus and requested.slots is not None and CLAIM_SLOT_MARK in requested.slots.ids:
        return _resolve_claim_grant(
            topology, settings, pod, container, requested, requested.slots, cpus, mems
        )
    listed = {
        key: text
        for key, text in (("numacpu", requested.numacpu), ("numamem", requested.numamem))
        if text is not None
    }
    if not listed:
        return _resolve_grant_without_list(cpus, mems, requested)
    against = [
        key
        for key, granted, wanted in (
            ("numacpu", cpus, requested.listed_cpus),
            ("numamem", mems, requested.listed_mems),
        )
        if key in listed and granted and wanted != granted
    ]
    if not against:
        return _resolve_grant_with_matching_list(cpus, mems, requested)
    believes = f"the kubelet granted it {_grant_text(cpus, mems)} and goes on believing so"
    by_pod = all(is_from_annotation(requested, key) for key in against)
    if by_pod and settings.kubelet_override is KubeletOverride.ANNOTATED:
        kept = _list_granted_cpus(requested, cpus)
        wants = " and ".join(f"{key} {listed[key]}" for key in against)
        return OverrideGrant(
            requested=kept, warnings=(f"{wants} overrides the kubelet: {believes}",)
        )
    key = against[0]
    source = requested.sources.get(key, key)
    expected = (
        "kubelet.override: annotated" if by_pod else f"annotation {key} of the pod itself"
    ) + ", or a container that the kubelet grants nothing to"
    wanted = mems if key == "numamem" else cpus
    text = (
        f"{key} is {quote_value(listed[key])} ({source}), but the kubelet granted it "
        f"{_grant_text(cpus, mems)} by its static policy, and kubelet.override is "
        f"{settings.kubelet_override}; expected {key} {wanted}, {expected}"
    )
    if by_pod and requested.on_failure in (None, OnFailure.REJECT):
        return Rejection(
            reason="KubeletPinned",
            message=f"{container_subject(pod, container)}: {text}",
            rule="what the kubelet granted stays the kubelet's",
        )
    return KeepGrant(reason=kubelet_grant_reason_text(cpus, mems), warnings=(text,))


def _resolve_claim_grant(
    topology: Topology,
    settings: Settings,
    pod: PodSandbox,
    container: Container,
    requested: PlacementOptions,
    slots: Slots,
    cpus: CPUSet,
    mems: NUMASet,
) -> KeepGrant | OverrideGrant | Rejection:
    """A ResourceClaim says how many CPUs on which NUMA nodes; the scheduler counts them there."""
    if topology.cpu_count_by_node(cpus) == slots.by_node:
        return OverrideGrant(requested=requested, cpus=cpus)
    has = " and ".join(f"{count} on NUMA node {i}" for i, count in slots.by_node.items())
    text = (
        f"its ResourceClaim has {count_text(slots.count, 'CPU')}, {has}, but the kubelet "
        "granted it "
        f"{_grant_text(cpus, mems)} by its static policy"
    )
    if settings.kubelet_override is KubeletOverride.ANNOTATED:
        return OverrideGrant(requested=requested, warnings=(f"{text} and goes on believing so",))
    if requested.on_failure is OnFailure.UNPINNED:
        return KeepGrant(reason=kubelet_grant_reason_text(cpus, mems), warnings=(text,))
    return Rejection(
        reason="KubeletPinned",
        message=f"{container_subject(pod, container)}: {text}, and kubelet.override is "
        f"{settings.kubelet_override}; expected cpuManagerPolicy none, a pod that is not "
        "Guaranteed, or kubelet.override: annotated",
        rule="what the kubelet granted stays the kubelet's",
    )


def _resolve_grant_without_list(
    cpus: CPUSet, mems: NUMASet, requested: PlacementOptions
) -> KeepGrant | OverrideGrant:
    """Asked for by policy: no list names what the container must have."""
    keys = ", ".join(k for k in ("policy", "cpus", "bind", "smt") if k in requested.explicit_keys)
    keys = keys or "what is asked for"
    if cpus:
        text = f"{keys}: not followed, since the kubelet granted it {_grant_text(cpus, mems)}"
        return KeepGrant(reason=kubelet_grant_reason_text(cpus, mems), warnings=(text,))
    if requested.bind is Bind.CPU:
        return OverrideGrant(requested=requested)
    text = f"{keys}: for CPUs only, since the kubelet granted it {_grant_text(cpus, mems)}"
    return OverrideGrant(requested=replace(requested, bind=Bind.CPU), warnings=(text,))


def _resolve_grant_with_matching_list(
    cpus: CPUSet, mems: NUMASet, requested: PlacementOptions
) -> KeepGrant | OverrideGrant:
    """No list says otherwise than the kubelet, as far as it granted the like."""
    if cpus and (requested.numamem is None or mems):
        return KeepGrant(reason=f"{kubelet_grant_reason_text(cpus, mems)}, as listed")
    return OverrideGrant(requested=_list_granted_cpus(requested, cpus))


def _list_granted_cpus(requested: PlacementOptions, cpus: CPUSet) -> PlacementOptions:
    """Memory alone is listed: its CPUs are those that the kubelet granted."""
    if requested.numacpu is not None or not cpus:
        return requested
    return replace(
        requested,
        numacpu=str(cpus),
        listed_cpus=cpus,
        cpus=None if requested.cpus is CPUMode.EXCLUSIVE else requested.cpus,
        sources={**requested.sources, "numacpu": _GRANT_SOURCE},
    )


def _grant_text(cpus: CPUSet, mems: NUMASet) -> str:
    parts = [cpus_text(cpus)] if cpus else []
    if mems:
        parts.append(f"memory of {numa_text(mems)}")
    return " and ".join(parts)


def kubelet_grant_reason_text(cpus: CPUSet, mems: NUMASet) -> str:
    """Why it is the kubelet's, one clause."""
    return f"the kubelet granted it {_grant_text(cpus, mems)} by its static policy"


def grant_holders(state: NodeState, cpus: CPUSet) -> list[str]:
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
