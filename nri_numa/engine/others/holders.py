"""Who has the CPUs that somebody else cannot get, for the end of a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nri_numa.engine.state import Allocation, NodeState
from nri_numa.machine.cpuset import CPUSet, NUMASet
from nri_numa.machine.model import cpus_text, human_milli

_MOST: Final = 4
"""Containers that are named: a refusal is one line of an event."""


def holders_text(state: NodeState, within: NUMASet | None = None, *, requests: bool = False) -> str:
    """Who owns or lists CPUs: ``; held: default/db/engine has exclusive CPUs 2-3``.

    A soft list is in no owner's way.

    Args:
        state: as it is.
        within: only who has some on these NUMA nodes; None for all.
        requests: also whose requests the shared pool has to serve.

    Returns:
        Those with the most CPUs first, then by name; empty when nobody has any.
    """
    return named(
        a
        for a in state.allocations.values()
        if (within is None or a.numa_nodes & within)
        and (a.owned or a.keeps_list or (requests and _requested(a)))
    )


def _requested(a: Allocation) -> int:
    return sum(charge.cpu_milli for charge in a.charges.values())


def named(allocations: Iterable[Allocation]) -> str:
    """The same about given containers."""
    # By number of CPUs, most first, then by name, then by id.
    found = sorted(
        allocations,
        key=lambda a: (
            -(1000 * len(a.cpus | a.idle) or _requested(a)),
            a.full_name,
            a.container_id,
        ),
    )
    if not found:
        return ""
    parts = [_part(a) for a in found[:_MOST]]
    if len(found) > _MOST:
        parts.append(f"and {len(found) - _MOST} more")
    return "; held: " + ", ".join(parts)


def _part(a: Allocation) -> str:
    if not a.cpus:
        return f"{a.full_name} requests {human_milli(_requested(a))} of the shared pool"
    idle = f" and keeps {_cut(a.idle)} idle" if a.idle else ""
    return f"{a.full_name} {'has exclusive' if a.owned else 'lists'} {_cut(a.cpus)}{idle}"


def _cut(cpus: CPUSet) -> str:
    text = cpus_text(cpus)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(cpus)} CPUs)"
