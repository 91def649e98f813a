"""In-place resizes of containers whose pod has a sum, which a runtime may tell late or never."""

from __future__ import annotations

from msgspec.structs import replace

from nri_numa.engine.state import ContainerKind
from tests.beds.world import World, pod, resources
from tests.machines import named as machines

WHOLE = {"policy": "single-numa-node", "scope": "pod"}


def usual() -> World:
    """CPUs 0-7 and 8-15, 16 GiB each."""
    return World(machines.dual_no_smt())


def test_the_kubelets_update_of_spec_resources_has_shares_of_two_beside_the_quota(
    world: World,
) -> None:
    """The container requests nothing of its own, and the quota is its pod's."""
    of = pod("p", WHOLE, total=resources(4, 4))
    world.add(of, "a", 1, 1)
    world.add(of, "c", 4, 4)
    world.put("neighbour", {"policy": "single-numa-node"}, 2)
    grown = replace(resources(5, 4), cpu_shares=2)
    assert world.update("p-c", grown) is None
    assert world.allocation("p-c").kind is ContainerKind.EXCLUSIVE
    assert (len(world.cpus("p-a")), len(world.cpus("p-c"))) == (1, 4)
