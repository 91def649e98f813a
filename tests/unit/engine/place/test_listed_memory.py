"""CPUs beside listed memory: as near as the list lets them be."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.hints import ResourceDemand
from nri_numa.engine.place.listed_memory import near_cpus
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NUMASet

PLACE = NUMASet([0, 1])


def asked(need: int, resource: str = "cpu") -> ResourceDemand:
    every = dict.fromkeys(range(4), 4)
    return ResourceDemand(resource=resource, need=need, capacity=every, available=every)


@pytest.mark.parametrize("policy", [Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
@pytest.mark.parametrize(("need", "inside"), [(1, True), (8, True), (9, False)])
def test_cpus_stay_beside_the_list_where_an_empty_machine_has_enough_there(
    policy: Policy, need: int, inside: bool
) -> None:
    """Else they take all of it and more: no wider than an empty machine would need."""
    (found,) = near_cpus([asked(need)], PLACE, policy)
    assert isinstance(found, ResourceDemand)
    assert found.required == (NUMASet() if inside else PLACE)
    assert set(found.available) == ({0, 1} if inside else {0, 1, 2, 3})


def test_other_resources_and_other_policies_are_left_as_they_are() -> None:
    demands = [asked(2), asked(2, "memory")]
    assert near_cpus(demands, PLACE, Policy.BEST_EFFORT) == demands
    assert near_cpus(demands, PLACE, Policy.RESTRICTED)[1] == demands[1]
