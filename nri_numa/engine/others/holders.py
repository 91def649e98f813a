"""Who has the CPUs that somebody else cannot get, for the end of a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nri_numa.engine.state import Allocation, NodeState
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.words import cpus_text

_MOST: Final = 4
"""Containers that are named: a refusal is one line of an event."""


def holders_text(state: NodeState, within: CPUSet | None = None) -> str:
    """Who owns or lists CPUs: ``; held: default/db/engine owns CPUs 2-3``.

    A soft list is in no owner's way.

    Args:
        state: as it is.
        within: only who has some of these CPUs; None for all.

    Returns:
        Those with the most CPUs first, then by name; empty when nobody owns or lists any.
    """
    return named(
        a
        for a in state.allocations.values()
        if (a.owned or a.keeps_list) and (within is None or (a.cpus | a.idle) & within)
    )


def named(allocations: Iterable[Allocation]) -> str:
    """The same about given containers."""
    # By number of CPUs, most first, then by name, then by id.
    found = sorted(allocations, key=lambda a: (-len(a.cpus | a.idle), a.full_name, a.container_id))
    if not found:
        return ""
    parts = [
        f"{a.full_name} {'has exclusive' if a.owned else 'lists'} {_cut(a.cpus)}"
        + (f" and keeps {_cut(a.idle)} idle" if a.idle else "")
        for a in found[:_MOST]
    ]
    if len(found) > _MOST:
        parts.append(f"and {len(found) - _MOST} more")
    return "; held: " + ", ".join(parts)


def _cut(cpus: CPUSet) -> str:
    text = cpus_text(cpus)
    return text if len(text) <= 60 else f"{text[:60]}… ({len(cpus)} CPUs)"
