"""Containers whose cpuset the runtime extends with CPUs of its own: CRI-O's ``shared_cpuset``."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from nri_numa.engine.decision import Admitted, Rejected
from tests.beds.world import World, container, pod, resources, says, two_nodes

SOURCE = "annotation cpu-shared.crio.io/app"


def create(world: World, asks: Mapping[str, str], cpus: float = 2) -> Admitted | Rejected | None:
    of = pod("web", asks)
    made = container(of, "app", wants=resources(cpus))
    return world.create(of, replace(made, added_cpus_source=SOURCE))


@pytest.mark.parametrize(
    "asks", [{"cpus": "exclusive"}, {"policy": "single-numa-node"}, {"numacpu": "2-3"}]
)
def test_cpus_of_its_own_are_rejected_at_the_creation(asks: Mapping[str, str]) -> None:
    """CRI-O's CPUs were taken out of its cpuset again within two seconds."""
    rejected = create(two_nodes(), asks)
    assert isinstance(rejected, Rejected)
    says(rejected, "RuntimeAddsCPUs", f"{SOURCE} is set", "cpus: shared and no numacpu")


@pytest.mark.parametrize(
    "asks", [{}, {"policy": "single-numa-node", "cpus": "shared"}, {"on-failure": "unpinned"}]
)
def test_whoever_shares_is_admitted(asks: Mapping[str, str]) -> None:
    asks = {"cpus": "exclusive", **asks} if "on-failure" in asks else asks
    decision = create(two_nodes(), asks)
    assert isinstance(decision, Admitted)
    assert not decision.allocation.exclusive
