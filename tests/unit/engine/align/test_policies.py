"""Policies: which hints count, who is admitted, and the reasons that are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from nri_numa.engine.align.hints import (
    SEARCH_STEP_LIMIT,
    DeviceDemand,
    HintProvider,
    Hints,
    NodeAmount,
    Obstacle,
    ObstacleKind,
    ResourceDemand,
    ResourceNeed,
    SearchBudget,
)
from nri_numa.engine.align.hints import compute_hints as engine_hints
from nri_numa.engine.align.policies import (
    Alignment,
    AlignmentRequest,
    align_demands,
    numa_node_sets_text,
)
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.machine import Unit
from nri_numa.model.workload import Device, DeviceRequest, Policy
from tests.checks.oracles import hints_of, walk

BEST_EFFORT, RESTRICTED, SINGLE = Policy.BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE
GIB = 1 << 30


def cpu(need: int, *free_of: tuple[int, int], unit: Unit | None = Unit.CPUS) -> ResourceDemand:
    return ResourceDemand(
        resource="cpu",
        need=need,
        capacity={i: capacity for i, (_, capacity) in enumerate(free_of)},
        free_amounts={i: free for i, (free, _) in enumerate(free_of)},
        unit=unit,
    )


def gpu(count: int, *numa_nodes: int | None) -> DeviceDemand:
    return DeviceDemand(
        request=DeviceRequest(
            resource="gpu",
            count=count,
            devices=tuple(
                Device(id=f"{k}", numa_nodes=frozenset() if node is None else frozenset({node}))
                for k, node in enumerate(numa_nodes)
            ),
        )
    )


TIGHT = cpu(4, (2, 4), (3, 4))
"""Two NUMA nodes of four CPUs; no one has four free."""


@pytest.mark.parametrize(
    ("policy", "demand", "expected"),
    [
        (
            RESTRICTED,
            TIGHT,
            "cpu: 4 exclusive CPUs needed, at most 3 CPUs free for exclusive use on one NUMA "
            "node; fits on 2 NUMA nodes, on an empty machine on 1 (NUMA node 0: 2 of "
            "4 CPUs free for exclusive use; NUMA node 1: 3 of 4 CPUs free for exclusive use)",
        ),
        (
            SINGLE,
            cpu(1500, (1000, 1000), (1000, 1000), unit=Unit.MILLI_CPUS),
            "cpu: 1.5 CPUs needed, more than the 1 CPU of any one NUMA node, even an empty "
            "one (NUMA node 0: 1 of 1 CPU free; NUMA node 1: 1 of 1 CPU free)",
        ),
    ],
)
def test_the_reason_has_each_numa_node(policy: Policy, demand: HintProvider, expected: str) -> None:
    """Others are in tests/golden/searches."""
    assert place(2, demand, policy=policy).reason_text == expected


def test_memory_types_that_need_several_numa_nodes_and_never_meet() -> None:
    """Judged together: each fits on two NUMA nodes, and on four only together."""
    amounts = dict.fromkeys(range(4), 4 * GIB)
    low, high = {0: 4 * GIB, 1: 4 * GIB}, {2: 4 * GIB, 3: 4 * GIB}
    kinds = [
        ResourceDemand(
            resource=name, need=need * GIB, capacity=amounts, free_amounts=free, joint_key="memory"
        )
        for name, need, free in (("memory", 8, low), ("hugepages-1Gi", 7, high))
    ]
    assert str(place(4, *kinds, policy=RESTRICTED).shortage) == (
        "memory and hugepages-1Gi: each fits, but not on the same NUMA nodes: 8 GiB on 2 NUMA "
        "nodes, 7 GiB on 2 NUMA nodes"
    )


class Licences(Struct, frozen=True):
    """A resource that no room of the engine knows: one NUMA node has all of it."""

    need: int
    node: int
    count: int
    resource: str = "licence"
    amount_unit: Unit = Unit.NUMBER
    joint_key: str | None = None

    def topology_hints(
        self, machine: int, judged_with: Sequence[Licences], budget: SearchBudget
    ) -> Hints:
        if self.count < self.need:
            return Hints(nil=False)
        needs = (ResourceNeed(self.need, {self.node: self.count}),)
        mask = 1 << self.node
        return Hints(universe=machine, quantities=needs, single_node_mask=mask, width=1)

    def amounts_by_node(self, numa_ids: NUMASet) -> list[NodeAmount]:
        return [NodeAmount(self.node, self.count, self.count, self.count >= self.need)]

    def max_amount_on(self, numa_ids: NUMASet, width: int, *, empty: bool) -> int | None:
        return None

    def confined_to(self, numa_nodes: NUMASet) -> Licences:
        return self

    def no_hint_text(self) -> str:
        return "which every NUMA node has"

    def find_obstacle(self, amounts: Sequence[NodeAmount]) -> Obstacle:
        return Obstacle(ObstacleKind.FREE_AMOUNT, f"{self.count} bought")


@pytest.mark.parametrize(
    ("licences", "expected"),
    [
        (Licences(1, 1, 1), "NUMA node 1 has room for everything"),
        (Licences(2, 1, 1), "licence: 2 needed, 1 bought (NUMA node 1: 1 of 1 free)"),
        (
            Licences(1, 0, 1),
            "cpu and licence: each fits, but not on the same NUMA nodes: 2 exclusive CPUs on NUMA "
            "node 1, 1 licence on NUMA node 0",
        ),
    ],
)
def test_a_resource_of_another_kind_is_explained(licences: Licences, expected: str) -> None:
    """A new resource is one provider: merge, policies and texts ask for nothing else."""
    assert place(2, cpu(2, (1, 2), (2, 2)), licences, policy=SINGLE).reason_text == expected


class TestCandidates:
    """Who lost, and by what."""

    def told(self, found: Alignment) -> list[tuple[str, bool, str]]:
        return [(str(c.affinity), c.preferred, c.text) for c in found.rejected_masks]

    def test_nothing_to_tell(self) -> None:
        assert place(2, TIGHT, policy=SINGLE).rejected_masks == ()
        assert place(2, policy=RESTRICTED).rejected_masks == ()
        assert place(2, gpu(2, 0), policy=BEST_EFFORT).rejected_masks == ()
        assert place(12, cpu(2, *[(1, 2)] * 12), policy=BEST_EFFORT).rejected_masks == ()

    def test_single_tells_no_wider_masks(self) -> None:
        """Both NUMA nodes of a socket are a preferred set as well, and no result of this policy."""
        found = place(2, replace(cpu(1, (1, 1), (1, 1)), sockets={0: 0, 1: 0}), policy=SINGLE)
        assert [told[0] for told in self.told(found)] == ["1"]


def test_sets_that_nothing_names_are_others() -> None:
    assert numa_node_sets_text([], False, None) == "other NUMA nodes"
    assert numa_node_sets_text(["1"], False, 1) == "NUMA node 1"


def far(i: int, j: int) -> int:
    return 10 if i == j else 12 if i // 4 == j // 4 else 32


def quantity(
    name: str, need: int, capacity: list[int], available: list[int] | None = None
) -> ResourceDemand:
    return ResourceDemand(
        resource=name,
        need=need,
        capacity=dict(enumerate(capacity)),
        free_amounts=dict(enumerate(capacity if available is None else available)),
    )


def place(
    n: int, *demands: HintProvider, policy: Policy = BEST_EFFORT, rank: dict[int, int] | None = None
) -> Alignment:
    return align_demands(AlignmentRequest(demands, NUMASet(range(n)), policy, far, True, rank))


def result(alignment: Alignment) -> tuple[str, bool]:
    return ("any" if alignment.affinity is None else str(alignment.affinity), alignment.preferred)


class TestOddNumbers:
    """More free than an empty machine has, NUMA nodes that do not exist: the definition decides."""

    def both(self, *demands: HintProvider) -> tuple[str, bool]:
        numa_ids = NUMASet([0, 1])
        verdict = walk(hints_of(demands, numa_ids), numa_ids, BEST_EFFORT, far)
        found = result(place(2, *demands))
        assert found == (str(NUMASet(verdict.affinity or ())), verdict.preferred)
        return found

    def test_more_free_than_there_is(self) -> None:
        assert self.both(quantity("cpu", 2, [1, 1], [2, 2])) == ("0-1", True)
        assert self.both(quantity("cpu", 3, [1, 1], [3, 2])) == ("0-1", True)

    def test_types_that_no_empty_numa_node_holds_together(self) -> None:
        memory = replace(quantity("memory", 4, [4, 1], [4, 4]), joint_key="m")
        pages = replace(quantity("pages", 4, [1, 4], [4, 4]), joint_key="m")
        assert self.both(memory, pages) == ("0-1", True)

    def test_resources_that_no_numa_node_has_both_of(self) -> None:
        memory = replace(quantity("memory", 2, []), capacity={1: 4}, free_amounts={1: 4})
        assert self.both(quantity("cpu", 2, [4]), memory) == ("0-1", False)

    def test_numa_nodes_that_do_not_exist_are_not_looked_at(self) -> None:
        cpu = ResourceDemand(
            resource="cpu", need=2, capacity={9: 4, -1: 4}, free_amounts={9: 4, -1: 4}
        )
        assert result(place(2, cpu)) == ("0-1", False)
        cpu = replace(cpu, capacity={9: 4, 1: 4}, free_amounts={9: 4, 1: 2})
        assert result(place(2, cpu)) == ("1", True)
        cpu = replace(cpu, capacity={1: 4, 9: 4}, free_amounts={9: 4})
        assert result(place(2, cpu)) == ("0-1", False)


def adversarial(random: Random, devices: bool) -> Iterator[HintProvider]:
    """Four resources on 64 NUMA nodes that are hard to bring together."""
    for name in "abcd":
        if not devices:
            available = [random.randint(0, 100) for _ in range(64)]
            yield quantity(name, 64 * 40, [100] * 64, available)
            continue
        where = [frozenset(random.sample(range(64), 4)) for _ in range(48)]
        several = tuple(Device(id=f"{d}", numa_nodes=at) for d, at in enumerate(where))
        yield DeviceDemand(request=DeviceRequest(resource=name, count=14, devices=several))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("devices", [False, True])
def test_the_work_on_64_numa_nodes_is_bounded(seed: int, devices: bool) -> None:
    """Steps, not time: at most twice the limit, whatever is asked; what is cut short says so."""
    demands = [*adversarial(Random(seed), devices)]
    rank = {i: (i * 37) % 64 for i in range(64)}
    for policy in (BEST_EFFORT, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE):
        assert (
            place(64, *demands, policy=policy, rank=rank).search_steps <= 2 * SEARCH_STEP_LIMIT + 64
        )
    found = place(64, *demands)
    assert found.affinity
    assert not found.exact
    assert "a better choice may exist" in found.reason_text


def preferred(sockets: dict[int, int]) -> list[int]:
    """The masks of four NUMA nodes that five CPUs prefer."""
    four = dict.fromkeys(range(4), 4)
    demand = ResourceDemand(
        resource="cpu", need=5, capacity=four, free_amounts=four, sockets=sockets
    )
    (family,) = engine_hints([demand], NUMASet(four), SearchBudget())
    return [
        mask for mask in range(1, 16) if family.contains_mask(mask) and family.prefers_mask(mask)
    ]


@pytest.mark.parametrize("sockets", [{0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, {8: 1}])
def test_sockets_that_say_nothing_change_nothing(sockets: dict[int, int]) -> None:
    assert preferred(sockets) == preferred({})
