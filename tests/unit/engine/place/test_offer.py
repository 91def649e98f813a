"""What can be given away: exclusive CPUs as the scheduler is told of them, memory."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from nri_numa.engine.accounting import max_exclusive_by_node, slot_capacity, total_free_exclusive
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel
from nri_numa.engine.state import Charge, ContainerKind, NodeState
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.settings import CPUAmount, CPUWithholdingQuota, QuotasAndPoolFloor, Settings
from tests.beds.allocations import allocation
from tests.beds.world import GIB, World, pod, resources
from tests.machines import named as machines

FREE = NodeState()
THREE = CPUWithholdingQuota(exclusive=CPUAmount(3))


def machine(
    defaults: Mapping[str, str] | None = None, reserved: str = "", **limits: object
) -> NodeModel:
    """Node 0 is 0-3,8-11 and node 1 is 4-7,12-15; one CPU of 16 stays with the pool."""
    settings = Settings(
        defaults=dict(defaults or {}),
        reserved_cpus=CPUSet.parse(reserved),
        limits=replace(QuotasAndPoolFloor(), **limits),  # type: ignore[arg-type]
    )
    return NodeModel(topology=machines.dual_smt_16(), settings=settings)


def holder(
    cpus: str, *, slots: str = "", kind: ContainerKind = ContainerKind.EXCLUSIVE
) -> NodeState:
    some = CPUSet.parse(cpus)
    numa_nodes = machines.dual_smt_16().numa_nodes
    booked = {i: Charge(cpu_milli=1000 * len(node.cpus & some)) for i, node in numa_nodes.items()}
    return FREE.with_allocation(
        allocation(
            kind=kind,
            cpus=some,
            exclusive=kind is ContainerKind.EXCLUSIVE,
            numa_nodes=NUMASet([0, 1]),
            charges=booked if kind is ContainerKind.EXCLUSIVE else {},
            slots=slots,
        )
    )


def told(where: NodeModel, state: NodeState) -> tuple[dict[int, int], dict[int, int], int]:
    return (
        dict(slot_capacity(NodeSnapshot(where, state)).free),
        max_exclusive_by_node(NodeSnapshot(where, state)),
        total_free_exclusive(NodeSnapshot(where, state)),
    )


@pytest.mark.parametrize(
    ("where", "state", "free", "most", "all_together"),
    [
        # The CPU that stays is taken from the highest NUMA node.
        (machine(), FREE, {0: 8, 1: 7}, {0: 8, 1: 8}, 15),
        (machine(reserved="0"), FREE, {0: 7, 1: 8}, {0: 7, 1: 8}, 15),
        (machine(), holder("0-2"), {0: 5, 1: 7}, {0: 5, 1: 8}, 12),
        (machine(), holder("0-2", kind=ContainerKind.LISTED), {0: 5, 1: 8}, {0: 5, 1: 8}, 13),
        (machine({"smt": "full-core"}), FREE, {0: 7, 1: 7}, {0: 8, 1: 8}, 14),
        # A core each: its sibling is kept idle, and of those a quarter of the CPUs at most.
        (machine({"smt": "isolate"}), FREE, {0: 2, 1: 2}, {0: 4, 1: 4}, 4),
        (
            machine({"smt": "isolate"}, idle_siblings=CPUAmount(16)),
            FREE, {0: 4, 1: 3}, {0: 4, 1: 4}, 7,
        ),
        # Quotas and floors that are configured.
        (machine(quota=THREE), FREE, {0: 2, 1: 1}, {0: 3, 1: 3}, 3),
        (machine(quota=THREE), holder("0-3"), {0: 0, 1: 0}, {0: 0, 1: 0}, 0),
        (machine(numa_pool=CPUAmount(2)), FREE, {0: 6, 1: 6}, {0: 6, 1: 6}, 12),
        (machine(pool=CPUAmount(10)), FREE, {0: 3, 1: 3}, {0: 6, 1: 6}, 6),
    ],
)  # fmt: skip
def test_what_could_still_be_given(
    where: NodeModel,
    state: NodeState,
    free: dict[int, int],
    most: dict[int, int],
    all_together: int,
) -> None:
    assert told(where, state) == (free, most, all_together)


@pytest.mark.parametrize(
    ("amount", "cpus"),
    [(CPUAmount(5), 5), (CPUAmount(0), 1), (CPUAmount(percent=10), 25), (CPUAmount(percent=0), 1)],
)
@pytest.mark.parametrize("reserved", ["", "0-3"])
def test_configured_cpus_stay_with_the_pool(amount: CPUAmount, cpus: int, reserved: str) -> None:
    settings = Settings(
        reserved_cpus=CPUSet.parse(reserved), limits=QuotasAndPoolFloor(pool=amount)
    )
    assert NodeModel(topology=machines.eight_by_32(), settings=settings).pool_floor == cpus


def test_memory_that_our_cgroup_withholds_is_none_at_all() -> None:
    topology = replace(machines.huge_pages(), withheld_memory=NUMASet([1]))
    where = NodeModel(topology=topology, settings=Settings())
    per_node = topology.numa_nodes[0].memory_bytes - 5 * GIB  # huge pages are counted apart
    assert where.memory_capacity == {0: per_node, 1: 0}
    assert where.hugepages_capacity(GIB) == {0: 4 * GIB, 1: 0}
    assert where.hugepages_capacity(64 << 10) == {0: 0, 1: 0}


def test_with_spread_huge_pages_that_are_nearly_used_up_are_kept() -> None:
    """Node 0 has most CPUs left, and no huge pages beyond what is asked for."""
    pages = {GIB: 4 * GIB}
    world = World(
        machines.dual_no_smt(cores_per_numa=4, memory_gib=64, hugepages=pages)
    )  # fmt: skip
    one = {"policy": "single-numa-node", "cpus": "exclusive"}
    for name, cpus, gib, where in (("a", 1, 3, "0"), ("b", 2, 0, "1"), ("c", 1, 1, "1")):
        of = pod(name, one)
        wants = resources(cpus, 1, hugepages={GIB: gib * GIB} if gib else None)
        assert world.place(of, wants=wants)[1] == where
