"""What others did to CPUs of this machine: pins and grants that are not ours, and who holds what.

A cpuset does not say who wrote it nor why. One that holds the whole shared pool keeps a container
off nothing but what others own, so it pins nothing: such a container is unbound like one without a
cpuset, and follows the pool. Any narrower one is a pin; its container is *foreign*, left alone,
and reserves nothing (docs/adr/0018-foreign-containers.md).

The kubelet decides at the pod's admission, without knowing our annotations. What its static
managers granted is its own (docs/adr/0035-beside-the-kubelets-managers.md): the container is left
as the kubelet has it, unless its pod names CPUs or memory nodes itself and ``kubelet.override``
lets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.request.annotations import quote_value
from nri_numa.engine.request.demand import CLAIM_SLOT_MARK
from nri_numa.engine.state import (
    UNPINNED_GROUP_KEY,
    Allocation,
    ContainerIdentity,
    ContainerKind,
    NodeState,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet
from nri_numa.model.machine import Topology, count_text, cpus_text, human_milli, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    KUBELET_GRANT_SOURCE,
    Bind,
    Container,
    CPUMode,
    KubeletGrants,
    KubeletOverride,
    OnFailure,
    PlacementOptions,
    PodSandbox,
    Slots,
)


def parse_foreign_cpuset(text: str) -> CPUSet:
    """CPUs of a cpuset that another program wrote; empty when it cannot be read."""
    try:
        return CPUSet.parse(text)
    except ListFormatError:
        return NO_CPUS


def is_list_of_same_set(text: str, wanted: CPUSet | NUMASet) -> bool:
    """Whether a kernel list says the same set."""
    if text == str(wanted):  # as we write it ourselves: mostly so, and quicker than reading it
        return True
    try:
        return bool(text) and type(wanted).parse(text) == wanted
    except ListFormatError:
        return False


def is_shared_pool_cpuset(text: str, pool: CPUSet, shared: Collection[CPUSet] = ()) -> bool:
    """Whether a cpuset pins nothing.

    Such is an empty one, one that holds the whole shared pool, and one that the kubelet's static
    policy gives, or gave a moment ago, to everybody who shares (``shared``).
    """
    if not text:
        return True
    cpus = parse_foreign_cpuset(text)
    return (bool(pool) and pool <= cpus) or cpus in shared


def reclassify_cpuset(
    allocation: Allocation, text: str, pool: CPUSet, shared: Collection[CPUSet] = ()
) -> Allocation:
    """A foreign or unbound container whose cpuset another program changed.

    The same object when nothing is different.
    """
    if is_shared_pool_cpuset(text, pool, shared):
        if allocation.kind is ContainerKind.UNPINNED:
            return allocation
        holds = bool(pool) and pool <= parse_foreign_cpuset(text)
        what = "holds the whole shared pool" if holds or not text else "is the kubelet's shared one"
        return replace(
            allocation,
            kind=ContainerKind.UNPINNED,
            foreign_cpus=NO_CPUS,
            reason=f"not pinned: its cpuset {what}",
        )
    cpus = parse_foreign_cpuset(text)
    if allocation.kind is ContainerKind.FOREIGN and (allocation.foreign_cpus == cpus or not cpus):
        return allocation
    return replace(
        allocation,
        kind=ContainerKind.FOREIGN,
        foreign_cpus=cpus,
        reason=f"pinned by another component to {cpus_text(cpus or text)}",
    )


def foreign_overlaps(state: NodeState) -> Mapping[str, CPUSet]:
    """By id, the CPUs that foreign containers may run on although others own them.

    Costs a look at every container, so nothing that a request waits for may call it.
    """
    taken = state.exclusive | state.idle_siblings
    if not taken:
        return {}
    return {
        container_id: allocation.foreign_cpus & taken
        for container_id, allocation in state.allocations.items()
        if allocation.kind is ContainerKind.FOREIGN and allocation.foreign_cpus & taken
    }


def foreign_pinned_cpus(state: NodeState, topology: Topology) -> CPUSet:
    """The CPUs that cpusets of other programs say something about.

    Under the kubelet's static policy every container has one, and most have its shared pool: a set
    of more than half of what containers may use is no pin to particular CPUs, and counts as none.
    """
    return _cpus_of_narrow_sets(state.foreign, topology)


def yielding_list_cpus(state: NodeState, topology: Topology) -> CPUSet:
    """The CPUs of soft lists, as `foreign_pinned_cpus`."""
    return _cpus_of_narrow_sets(
        (~key for key in state.shared_groups if key < UNPINNED_GROUP_KEY), topology
    )


def _cpus_of_narrow_sets(sets: Iterable[int], topology: Topology) -> CPUSet:
    allowed, bits = topology.allowed.bits, 0
    for cpus in sets:
        if 2 * (cpus & allowed).bit_count() <= allowed.bit_count():
            bits |= cpus & allowed
    return CPUSet.from_bits(bits) if bits else NO_CPUS


def foreign_or_grantable_cpus(state: NodeState, topology: Topology, settings: Settings) -> CPUSet:
    """CPUs that others are pinned to, and those that the kubelet's static policy may still grant.

    The kubelet knows nothing of what we give away. Only its reserved CPUs are safe from it, so
    owners get those first, where they are known and not reserved for us as well.
    """
    pinned = foreign_pinned_cpus(state, topology)
    if state.kubelet.cpu_policy != "static" or not settings.kubelet_reserved:
        return pinned
    return pinned | (topology.allowed - settings.kubelet_reserved)


_MAX_NAMED_HOLDERS: Final = 4
"""Containers that are named: a refusal is one line of an event."""


def exclusive_holders_text(
    state: NodeState, within: NUMASet | None = None, *, requests: bool = False
) -> str:
    """Who owns or lists CPUs: ``; held: default/db/engine has exclusive CPUs 2-3``.

    A soft list is in no owner's way. With ``requests`` also whose requests the shared pool has to
    serve, soft lists' too. Those with the most CPUs first, then by name.
    """
    return holder_list_text(
        a
        for a in state.allocations.values()
        if (within is None or a.numa_nodes & within)
        and (a.exclusive or a.blocks_exclusive or (requests and _charged_milli(a)))
    )


def _charged_milli(a: Allocation) -> int:
    return sum([charge.cpu_milli for charge in a.charges.values()])


def holder_list_text(allocations: Iterable[Allocation]) -> str:
    """The same about given containers."""
    found = [*allocations]
    if not found:
        return ""
    # By number of CPUs, most first, then by name, then by id.
    most = nsmallest(
        _MAX_NAMED_HOLDERS,
        found,
        key=lambda a: (
            -(
                (
                    not a.yields_to_exclusive
                    and 1000 * (a.cpus.bits | a.idle_siblings.bits).bit_count()
                )
                or _charged_milli(a)
            ),
            a.full_name,
            a.container_id,
        ),
    )
    parts = [_holder_text(a) for a in most]
    if len(found) > _MAX_NAMED_HOLDERS:
        parts.append(f"and {len(found) - _MAX_NAMED_HOLDERS} more")
    return "; held: " + ", ".join(parts)


def _holder_text(a: Allocation) -> str:
    if a.yields_to_exclusive or not a.cpus:
        return f"{a.full_name} requests {human_milli(_charged_milli(a))} of the shared pool"
    idle = f" and keeps {_short_cpus_text(a.idle_siblings)} idle" if a.idle_siblings else ""
    return (
        f"{a.full_name} {'has exclusive' if a.exclusive else 'lists'} "
        f"{_short_cpus_text(a.cpus)}{idle}"
    )


def _short_cpus_text(cpus: CPUSet) -> str:
    text = cpus_text(cpus)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(cpus)} CPUs)"


KUBELET_KIND: Final = "kubelet"
RESERVATION_KIND: Final = "kept"
"""How a container that the kubelet granted something to is called where kinds are shown."""


def to_kubelet_allocation(allocation: Allocation, cpus: CPUSet) -> Allocation:
    """A container of ours that the kubelet pins by now, and may."""
    kept = {field: getattr(allocation, field) for field in ContainerIdentity.__annotations__}
    return Allocation(
        **kept,
        kind=ContainerKind.FOREIGN,
        foreign_cpus=cpus,
        reason=f"the kubelet took {cpus_text(cpus)} back by its static policy",
        assigned_at=allocation.assigned_at,
    )


def shown_kind(state: NodeState, allocation: Allocation) -> str:
    """The kind as users see it: a foreign container with a grant is the kubelet's.

    CPUs whose container ended are kept for its pod.
    """
    if allocation.reserved_at:
        return RESERVATION_KIND
    if allocation.kind is ContainerKind.FOREIGN and state.kubelet.cpus_of(
        allocation.pod_uid, allocation.container, allocation.container_id
    ):
        return KUBELET_KIND
    return allocation.kind.value


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
    by_pod = all(requested.is_from_annotation(key) for key in against)
    if by_pod and settings.kubelet_override is KubeletOverride.ANNOTATED:
        kept = _list_granted_cpus(requested, cpus)
        wants = " and ".join(f"{key} {listed[key]}" for key in against)
        return OverrideGrant(
            requested=kept, warnings=(f"{wants} overrides the kubelet: {believes}",)
        )
    key = against[0]
    expected = (
        "kubelet.override: annotated" if by_pod else f"annotation {key} of the pod itself"
    ) + ", or a container that the kubelet grants nothing to"
    wanted = mems if key == "numamem" else cpus
    text = (
        f"{key} is {quote_value(listed[key])} ({requested.source_text(key)}), but the kubelet "
        f"granted it {_grant_text(cpus, mems)} by its static policy, and kubelet.override is "
        f"{settings.kubelet_override}; expected {key} {wanted}, {expected}"
    )
    if by_pod and requested.on_failure in (None, OnFailure.REJECT):
        return Rejection(
            reason=RejectionReason.KUBELET_PINNED,
            detail=text,
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
        reason=RejectionReason.KUBELET_PINNED,
        detail=f"{text}, and kubelet.override is "
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
        sources={**requested.sources, "numacpu": KUBELET_GRANT_SOURCE},
    )


def _grant_text(cpus: CPUSet, mems: NUMASet) -> str:
    parts = [cpus_text(cpus)] if cpus else []
    if mems:
        parts.append(f"memory of {numa_text(mems)}")
    return " and ".join(parts)


def kubelet_grant_reason_text(cpus: CPUSet, mems: NUMASet) -> str:
    """Why it is the kubelet's, one clause."""
    return f"the kubelet granted it {_grant_text(cpus, mems)} by its static policy"
