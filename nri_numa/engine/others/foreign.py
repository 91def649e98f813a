"""What somebody else wrote: cpusets that are not ours, judged anew at each of their changes.

A cpuset does not say who wrote it nor why. One that holds the whole shared pool keeps a container
off nothing but what others own, so it pins nobody: such a container is unbound like one without a
cpuset, and follows the pool. Any narrower one is a pin; its container is *foreign*, left alone,
and reserves nothing (docs/adr/0018-foreign-containers.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from nri_numa.engine.state import Allocation, Kind, NodeState
from nri_numa.machine.cpuset import NO_CPUS, CPUSet, ListFormatError
from nri_numa.machine.model import cpus_text


def pinned_to(text: str) -> CPUSet:
    """CPUs of a cpuset that somebody else wrote; empty when nobody can read it."""
    try:
        return CPUSet.parse(text)
    except ListFormatError:
        return NO_CPUS


def covers(text: str, pool: CPUSet, shared: Collection[CPUSet] = ()) -> bool:
    """Whether a cpuset pins nobody.

    Such is an empty one, one that holds the whole shared pool, and one that the kubelet's static
    policy gives, or gave a moment ago, to everybody who shares (``shared``).
    """
    if not text:
        return True
    cpus = pinned_to(text)
    return (bool(pool) and pool <= cpus) or cpus in shared


def judged(
    allocation: Allocation, text: str, pool: CPUSet, shared: Collection[CPUSet] = ()
) -> Allocation:
    """A foreign or unbound container whose cpuset somebody else changed.

    Args:
        allocation: as it is; one that is bound by nothing of ours.
        text: the cpuset it has or is about to have.
        pool: the shared pool.
        shared: see `covers`.

    Returns:
        The same object when nothing is different.
    """
    if covers(text, pool, shared):
        if allocation.kind is Kind.UNBOUND:
            return allocation
        holds = bool(pool) and pool <= pinned_to(text)
        what = "holds the whole shared pool" if holds or not text else "is the kubelet's shared one"
        return replace(
            allocation,
            kind=Kind.UNBOUND,
            pinned=NO_CPUS,
            reason=f"not pinned: its cpuset {what}",
        )
    cpus = pinned_to(text)
    if allocation.kind is Kind.FOREIGN and (allocation.pinned == cpus or not cpus):
        return allocation
    return replace(
        allocation,
        kind=Kind.FOREIGN,
        pinned=cpus,
        reason=f"pinned by somebody else to {cpus_text(cpus or text)}",
    )


def overlapping(state: NodeState) -> Mapping[str, CPUSet]:
    """By id, the CPUs that foreign containers may run on although they belong to somebody.

    Costs a look at every container, so nothing that a request waits for may call it.
    """
    taken = state.owned | state.idle
    if not taken:
        return {}
    return {
        container_id: allocation.pinned & taken
        for container_id, allocation in state.allocations.items()
        if allocation.kind is Kind.FOREIGN and allocation.pinned & taken
    }
