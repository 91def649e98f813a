"""Whose a container is to which the kubelet's static managers granted CPUs or memory.

The kubelet decides at the pod's admission, without knowing our annotations. What it granted is its
own (docs/adr/0035-beside-the-kubelets-managers.md): the container is left as the kubelet has it,
unless its pod names CPUs or memory nodes itself and ``kubelet.override`` lets it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from nri_numa.engine.request.annotations import quoted
from nri_numa.engine.request.claims import CLAIM
from nri_numa.engine.request.permissions import asked_by_pod
from nri_numa.engine.values.kubelet import KubeletGrants, KubeletOverride
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import (
    Bind,
    Container,
    CPUMode,
    OnFailure,
    PodSandbox,
    Requested,
    Slots,
)
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.machine.model import Topology, counted, cpus_text, numa_text

_SOURCE: Final = "the kubelet's grant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubelets:
    """The container stays as the kubelet has it.

    Attributes:
        reason: one clause.
        warnings: what its pod asks for and does not get.
    """

    reason: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """We place the container although the kubelet granted it something.

    Attributes:
        requested: what is asked for, without what stays as the kubelet has it.
        warnings: what the kubelet goes on believing.
        cpus: granted CPUs that it is to have, as the kubelet believes.
    """

    requested: Requested
    warnings: tuple[str, ...] = ()
    cpus: CPUSet = NO_CPUS


def whose(
    topology: Topology,
    settings: Settings,
    grants: KubeletGrants,
    pod: PodSandbox,
    container: Container,
    requested: Requested,
) -> Kubelets | Ours | Refusal | None:
    """Say whose a container is.

    Returns:
        None for a container that the kubelet granted nothing to, or nothing that matters: it is
        like any other. A `Refusal` where the pod insists on a list and may not.
    """
    cpus = grants.cpus_of(pod.uid, container.name, container.id)
    mems = grants.mems_of(pod.uid, container.name)
    if not cpus and not mems:
        return None
    if requested.leave_alone:
        return Kubelets(reason=reason_text(cpus, mems)) if cpus else None
    if cpus and requested.slots is not None and CLAIM in requested.slots.ids:
        return _claimed(topology, settings, pod, container, requested, requested.slots, cpus, mems)
    listed = {
        key: text
        for key, text in (("numacpu", requested.numacpu), ("numamem", requested.numamem))
        if text is not None
    }
    if not listed:
        return _computed(cpus, mems, requested)
    against = [
        key
        for key, granted, wanted in (
            ("numacpu", cpus, requested.listed_cpus),
            ("numamem", mems, requested.listed_mems),
        )
        if key in listed and granted and wanted != granted
    ]
    if not against:
        return _agreed(cpus, mems, requested)
    believes = f"the kubelet granted it {_granted(cpus, mems)} and goes on believing so"
    by_pod = all(asked_by_pod(requested, key) for key in against)
    if by_pod and settings.kubelet_override is KubeletOverride.ANNOTATED:
        kept = _with_granted_cpus(requested, cpus)
        wants = " and ".join(f"{key} {listed[key]}" for key in against)
        return Ours(requested=kept, warnings=(f"{wants} overrides the kubelet: {believes}",))
    key = against[0]
    source = requested.sources.get(key, key)
    expected = (
        "kubelet.override: annotated" if by_pod else f"annotation {key} of the pod itself"
    ) + ", or a container that the kubelet grants nothing to"
    wanted = mems if key == "numamem" else cpus
    text = (
        f"{key} is {quoted(listed[key])} ({source}), but the kubelet granted it "
        f"{_granted(cpus, mems)} by its static policy, and kubelet.override is "
        f"{settings.kubelet_override}; expected {key} {wanted}, {expected}"
    )
    if by_pod and requested.on_failure in (None, OnFailure.REJECT):
        return Refusal(
            reason="KubeletPinned",
            message=f"pod {pod.full_name}, container {container.name}: {text}",
            rule="what the kubelet granted stays the kubelet's",
        )
    return Kubelets(reason=reason_text(cpus, mems), warnings=(text,))


def _claimed(
    topology: Topology,
    settings: Settings,
    pod: PodSandbox,
    container: Container,
    requested: Requested,
    slots: Slots,
    cpus: CPUSet,
    mems: NUMASet,
) -> Kubelets | Ours | Refusal:
    """A ResourceClaim says how many CPUs on which NUMA nodes; the scheduler counts them there."""
    on = {i: len(node.cpus & cpus) for i, node in topology.numa_nodes.items()}
    if {i: count for i, count in on.items() if count} == slots.by_node:
        return Ours(requested=requested, cpus=cpus)
    has = " and ".join(f"{count} on NUMA node {i}" for i, count in slots.by_node.items())
    text = (
        f"its ResourceClaim has {counted(slots.count, 'CPU')}, {has}, but the kubelet granted it "
        f"{_granted(cpus, mems)} by its static policy"
    )
    if settings.kubelet_override is KubeletOverride.ANNOTATED:
        return Ours(requested=requested, warnings=(f"{text} and goes on believing so",))
    if requested.on_failure is OnFailure.UNPINNED:
        return Kubelets(reason=reason_text(cpus, mems), warnings=(text,))
    return Refusal(
        reason="KubeletPinned",
        message=f"pod {pod.full_name}, container {container.name}: {text}, and kubelet.override is "
        f"{settings.kubelet_override}; expected cpuManagerPolicy none, a pod that is not "
        "Guaranteed, or kubelet.override: annotated",
        rule="what the kubelet granted stays the kubelet's",
    )


def _computed(cpus: CPUSet, mems: NUMASet, requested: Requested) -> Kubelets | Ours:
    """Asked for by policy: no list names what the container must have."""
    keys = ", ".join(k for k in ("policy", "cpus", "bind", "smt") if k in requested.given)
    keys = keys or "what is asked for"
    if cpus:
        text = f"{keys}: not followed, since the kubelet granted it {_granted(cpus, mems)}"
        return Kubelets(reason=reason_text(cpus, mems), warnings=(text,))
    if requested.bind is Bind.CPU:
        return Ours(requested=requested)
    text = f"{keys}: for CPUs only, since the kubelet granted it {_granted(cpus, mems)}"
    return Ours(requested=replace(requested, bind=Bind.CPU), warnings=(text,))


def _agreed(cpus: CPUSet, mems: NUMASet, requested: Requested) -> Kubelets | Ours:
    """No list says otherwise than the kubelet, as far as it granted the like."""
    if cpus and (requested.numamem is None or mems):
        return Kubelets(reason=f"{reason_text(cpus, mems)}, as listed")
    return Ours(requested=_with_granted_cpus(requested, cpus))


def _with_granted_cpus(requested: Requested, cpus: CPUSet) -> Requested:
    """Memory alone is listed: its CPUs are those that the kubelet granted."""
    if requested.numacpu is not None or not cpus:
        return requested
    return replace(
        requested,
        numacpu=str(cpus),
        listed_cpus=cpus,
        cpus=None if requested.cpus is CPUMode.EXCLUSIVE else requested.cpus,
        sources={**requested.sources, "numacpu": _SOURCE},
    )


def _granted(cpus: CPUSet, mems: NUMASet) -> str:
    parts = [cpus_text(cpus)] if cpus else []
    if mems:
        parts.append(f"memory of {numa_text(mems)}")
    return " and ".join(parts)


def reason_text(cpus: CPUSet, mems: NUMASet) -> str:
    """Why it is the kubelet's, one clause."""
    return f"the kubelet granted it {_granted(cpus, mems)} by its static policy"
