"""Computed CPUs beside memory that a list names: ``numamem`` with a policy or CPUs of one's own.

The list is taken as it is, and CPUs are computed near it. *Near* are the listed NUMA nodes that
have CPUs; for one without (HBM, CXL, PMEM) those it serves: its initiators as the kernel tells
them, else those with CPUs at the least distance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.align.hints import HintDemand, ResourceDemand
from nri_numa.engine.decision import Machine
from nri_numa.engine.memory.tiers import homes
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NUMASet

STRICT: Final = (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE)
"""Policies that refuse rather than use more NUMA nodes, for every resource."""


def near(machine: Machine, listed: NUMASet) -> NUMASet:
    """The listed NUMA nodes that have CPUs, and those that the others of the list serve."""
    with_cpus = NUMASet(machine.whole_cpus)
    distance = machine.topology.distance
    found = listed & with_cpus
    for i in listed - with_cpus:
        told = homes(machine.topology, i) & with_cpus
        least = min((distance(j, i) for j in with_cpus), default=0)
        found = found | (told or NUMASet(j for j in with_cpus if distance(j, i) == least))
    return found


def near_cpus(asked: Sequence[HintDemand], place: NUMASet, policy: Policy) -> list[HintDemand]:
    """Keep the demand for CPUs near the listed memory, where the policy is strict.

    CPUs and memory together are then no wider than they would be on an empty machine: inside
    ``place`` where that holds the need when empty, else all of ``place`` and more.

    Args:
        asked: what each resource asks for.
        place: what `near` gave.
        policy: those that are not strict only order NUMA nodes (`by_distance`).
    """
    return [
        _inside(demand, place)
        if policy in STRICT and isinstance(demand, ResourceDemand) and demand.resource == "cpu"
        else demand
        for demand in asked
    ]


def _inside(demand: ResourceDemand, place: NUMASet) -> ResourceDemand:
    if sum(demand.capacity.get(i, 0) for i in place) < demand.need:
        return replace(demand, required=demand.required | place)
    inside = {i: amount for i, amount in demand.available.items() if i in place}
    return replace(demand, available=inside)


def by_distance(
    machine: Machine, listed: NUMASet, rank: Mapping[int, int] | None
) -> dict[int, int]:
    """Rank NUMA nodes for CPUs beside listed memory.

    Order: those that are `near`, least distance to any of the list, the rank that is given, the id.
    """
    distance, ids = machine.topology.distance, machine.places
    ranks = dict.fromkeys(ids, 0) if rank is None else rank
    place = near(machine, listed)
    ordered = sorted(
        ids, key=lambda i: (i not in place, min(distance(i, m) for m in listed), ranks[i], i)
    )
    return {i: number for number, i in enumerate(ordered)}
