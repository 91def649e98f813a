"""Pins of other programs, and holders of CPUs.

A cpuset does not say who wrote it nor why. One that holds the whole shared pool keeps a container
off nothing but exclusive CPUs, so it pins nothing: such a container is unpinned like one without a
cpuset, and follows the pool. Any narrower one is a pin; its container is *foreign*, left alone,
and reserves nothing (docs/adr/0018-foreign-containers.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import nsmallest
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.captions import foreign_caption, unpinned_caption
from nri_numa.engine.state import (
    UNPINNED_GROUP_KEY,
    Allocation,
    ContainerIdentity,
    ContainerKind,
    NodeState,
)
from nri_numa.model.cpuset import NO_CPUS, CPUSet, NUMASet
from nri_numa.model.machine import Topology, cpus_text, human_milli, join_words
from nri_numa.model.settings import Settings


def parse_foreign_cpuset(text: str) -> CPUSet:
    """CPUs of a cpuset that another program wrote; empty when it cannot be read."""
    return CPUSet.parse_or_none(text) or NO_CPUS


def is_shared_pool_cpuset(text: str, pool: CPUSet, shared: Collection[CPUSet]) -> bool:
    """True if a cpuset pins nothing.

    Such is an empty one, one that holds the whole shared pool, and one that the kubelet's static
    policy gives, or gave a moment ago, to everybody who shares (``shared``).
    """
    if not text:
        return True
    cpus = parse_foreign_cpuset(text)
    return (bool(pool) and pool <= cpus) or cpus in shared


def reclassify_cpuset(
    allocation: Allocation, text: str, pool: CPUSet, shared: Collection[CPUSet]
) -> Allocation:
    """Reclassify a foreign or unpinned container by its new cpuset; itself if nothing differs."""
    cpus = parse_foreign_cpuset(text)
    if is_shared_pool_cpuset(text, pool, shared):
        if allocation.kind is ContainerKind.UNPINNED:
            return allocation
        holds_pool = not text or (pool and pool <= cpus)
        cpuset_text = "holds the whole shared pool" if holds_pool else "is the kubelet's shared one"
        return replace(
            allocation,
            kind=ContainerKind.UNPINNED,
            foreign_cpus=NO_CPUS,
            reason=unpinned_caption(f"its cpuset {cpuset_text}"),
        )
    if allocation.kind is ContainerKind.FOREIGN and (allocation.foreign_cpus == cpus or not cpus):
        return allocation
    return replace(
        allocation,
        kind=ContainerKind.FOREIGN,
        foreign_cpus=cpus,
        reason=foreign_caption(cpus or text),
    )


def foreign_overlaps(state: NodeState) -> Mapping[str, CPUSet]:
    """Find by id the CPUs of foreign containers that are exclusive to others.

    The cost grows with the number of containers, so no request may wait for it.
    """
    unavailable = state.exclusive | state.idle_siblings
    if not unavailable:
        return {}
    return {
        container_id: allocation.foreign_cpus & unavailable
        for container_id, allocation in state.allocations.items()
        if allocation.kind is ContainerKind.FOREIGN and allocation.foreign_cpus & unavailable
    }


def foreign_pinned_cpus(state: NodeState, topology: Topology) -> CPUSet:
    """The CPUs that cpusets of other programs say something about.

    Under the kubelet's static policy every container has one, and most have its shared pool: a set
    of more than half of what containers may use is no pin to particular CPUs, and counts as none.
    """
    return _cpus_of_narrow_sets(state.foreign, topology)


def yielding_list_cpus(state: NodeState, topology: Topology) -> CPUSet:
    """CPUs of yielding lists, as in `foreign_pinned_cpus`."""
    lists = (~key for key in state.shared_groups if key < UNPINNED_GROUP_KEY)
    return _cpus_of_narrow_sets(lists, topology)


def _cpus_of_narrow_sets(sets: Iterable[int], topology: Topology) -> CPUSet:
    allowed, bits = topology.allowed.bits, 0
    for cpus in sets:
        if 2 * (cpus & allowed).bit_count() <= allowed.bit_count():
            bits |= cpus & allowed
    return CPUSet.from_bits(bits) if bits else NO_CPUS


def foreign_or_grantable_cpus(state: NodeState, topology: Topology, settings: Settings) -> CPUSet:
    """CPUs that others are pinned to, and those that the kubelet's static policy may still grant.

    The kubelet does not know the agent's allocations. It never grants its reserved CPUs, so
    these become exclusive first, if they are known and not reserved in the agent as well.
    """
    pinned = foreign_pinned_cpus(state, topology)
    if state.kubelet.cpu_policy != "static" or not settings.kubelet_reserved:
        return pinned
    return pinned | (topology.allowed - settings.kubelet_reserved)


_MAX_NAMED_HOLDERS: Final = 4
"""Containers that are named: a refusal is one line of an event."""


def exclusive_holders_text(
    state: NodeState, numa_nodes: NUMASet | None = None, *, requests: bool = False
) -> str:
    """Name holders of CPUs: ``; held: default/db/engine has exclusive CPUs 2-3``.

    Yielding lists are left out. With ``requests`` also containers with requests to the shared pool,
    those with yielding lists included. Most CPUs first, then by name.
    """
    return holder_list_text(
        a
        for a in state.allocations.values()
        if (numa_nodes is None or a.numa_nodes & numa_nodes)
        and (a.exclusive or a.blocks_exclusive or (requests and _charged_milli(a)))
    )


def _charged_milli(a: Allocation) -> int:
    return sum([charge.cpu_milli for charge in a.charges.values()])


def _holder_sort_key(a: Allocation) -> tuple[int, str, str]:
    """Most CPUs that it keeps from others, else requests, first; then by name, then by id."""
    withheld = 0 if a.yields_to_exclusive else (a.cpus.bits | a.idle_siblings.bits).bit_count()
    return -(1000 * withheld or _charged_milli(a)), a.full_name, a.container_id


def holder_list_text(allocations: Iterable[Allocation]) -> str:
    """Name the holders among some containers."""
    holders = [*allocations]
    if not holders:
        return ""
    largest_holders = nsmallest(_MAX_NAMED_HOLDERS, holders, key=_holder_sort_key)
    parts = [_holder_text(a) for a in largest_holders]
    if len(holders) > _MAX_NAMED_HOLDERS:
        parts.append(f"{len(holders) - _MAX_NAMED_HOLDERS} more")
    return f"; held: {join_words(parts)}"


def _holder_text(a: Allocation) -> str:
    if a.yields_to_exclusive or not a.cpus:
        return f"{a.full_name} requests {human_milli(_charged_milli(a))} of the shared pool"
    idle_text = f" and keeps {_short_cpus_text(a.idle_siblings)} idle" if a.idle_siblings else ""
    return (
        f"{a.full_name} {'has exclusive' if a.exclusive else 'lists'} "
        f"{_short_cpus_text(a.cpus)}{idle_text}"
    )


def _short_cpus_text(cpus: CPUSet) -> str:
    text = cpus_text(cpus)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(cpus)} CPUs)"


KUBELET_KIND: Final = "kubelet"
RESERVATION_KIND: Final = "reservation"
"""How a container that the kubelet granted something to is called where kinds are shown."""


def to_kubelet_allocation(allocation: Allocation, cpus: CPUSet) -> Allocation:
    """Convert an allocation of the agent into one that the kubelet pins."""
    identity = {field: getattr(allocation, field) for field in ContainerIdentity.__annotations__}
    return Allocation(
        **identity,
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
