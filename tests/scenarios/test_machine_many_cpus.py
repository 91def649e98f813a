"""More CPUs than a machine has: what was asked is said, or that it cannot be known."""

from __future__ import annotations

import pytest

from nri_numa.engine.request.annotations import resolve
from nri_numa.engine.request.demand import Demand, demand
from nri_numa.machine.synthetic import synthetic
from nri_numa.model.cpuset import CPUSet
from nri_numa.model.settings import Settings
from nri_numa.model.workload import QoSClass, Refusal, Requested, Resources
from tests.beds.world import World, container, pod
from tests.machines import named as machines

MANY = 262_144
"""CPU shares of 256 CPUs, and of every number above."""


@pytest.mark.parametrize(
    "wish", [{"policy": "single-numa-node"}, {"cpus": "exclusive"}, {"policy": "restricted"}]
)
@pytest.mark.parametrize("large", [False, True])
def test_case_12_ten_thousand_cpus_are_asked_for(wish: dict[str, str], large: bool) -> None:
    """On a big machine they were placed as 256; elsewhere "needs 256" was refused."""
    big = synthetic(sockets=2, numa_per_socket=1, cores_per_numa=320, threads=1)
    world = World(big if large else machines.dual_smt())
    refused = world.refused("a", wish, 10_000, 1)
    assert "10000 exclusive CPUs" in refused.message


def _wants(total: float = 0) -> tuple[World, object, object]:
    world = World(machines.dual_smt())
    limits = Resources(cpu_quota=int(total * 100_000), cpu_period=100_000) if total else None
    of = pod("a", {"cpus": "exclusive"}, total=limits)
    return world, of, container(of, wants=Resources(cpu_shares=MANY))


@pytest.mark.parametrize("total", [0, 300])
def test_case_12_shares_that_saturate_are_no_number(total: float) -> None:
    world, of, made = _wants(total)
    refused = world.refuse(of, made)  # type: ignore[arg-type]
    assert refused.reason == "UnknownCPUs"
    assert "a request of 256 CPUs or more" in refused.message
    assert "cannot be known" in refused.message
    assert ("the whole pod's limit is 300 CPUs" in refused.message) is bool(total)


def test_case_12_shared_ones_need_at_least_that() -> None:
    world = World(machines.dual_smt())
    refused = world.refuse(
        pod("a", {"policy": "single-numa-node"}, qos=QoSClass.BURSTABLE),
        wants=Resources(cpu_shares=MANY),
    )
    assert "needs at least 256 CPUs" in refused.message


def test_a_list_names_every_second_of_a_thousand_cpus() -> None:
    """It has 2,000 characters; the kernel's lists of such machines are as long."""
    world = World(machines.sixty_four_nodes())
    cpus = CPUSet(range(0, 1024, 2))
    world.put("a", {"numacpu": str(cpus)})
    assert world.cpus("a-app") == cpus


def _demand(defaults: dict[str, str], annotations: dict[str, str]) -> Demand | Refusal:
    of = pod("a", annotations)
    made = container(of, wants=Resources(cpu_shares=MANY))
    requested = resolve(Settings(defaults=defaults), of, made)
    assert isinstance(requested, Requested)
    return demand(of, made, requested, 1 << 40)


def test_case_12_a_mere_default_makes_it_share() -> None:
    found = _demand({"cpus": "exclusive"}, {})
    assert isinstance(found, Demand)
    assert (found.exclusive_cpus, found.cpu_milli, found.cpu_at_least) == (0, 256_000, True)


def test_case_12_a_policy_of_a_guaranteed_pod_cannot_know_either() -> None:
    found = _demand({}, {"policy": "restricted"})
    assert isinstance(found, Refusal)
    assert found.reason == "UnknownCPUs"
