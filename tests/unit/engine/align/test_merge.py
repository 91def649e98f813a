"""The merge: numbers that make no sense, and a bound on its work."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from msgspec.structs import replace

from nri_numa.engine.align.hints import STEP_LIMIT, DeviceDemand, HintDemand, ResourceDemand
from nri_numa.engine.align.policies import Alignment, Problem, align
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Device, DeviceRequest, Policy
from tests.checks.oracles import hints_of, walk

BEST_EFFORT = Policy.BEST_EFFORT


def far(i: int, j: int) -> int:
    return 10 if i == j else 12 if i // 4 == j // 4 else 32


def quantity(
    name: str,
    need: int,
    capacity: list[int],
    available: list[int] | None = None,
) -> ResourceDemand:
    return ResourceDemand(
        resource=name,
        need=need,
        capacity=dict(enumerate(capacity)),
        available=dict(enumerate(capacity if available is None else available)),
    )


def place(
    n: int,
    *demands: HintDemand,
    policy: Policy = BEST_EFFORT,
    rank: dict[int, int] | None = None,
) -> Alignment:
    return align(Problem(demands, NUMASet(range(n)), policy, far, True, rank))


def result(alignment: Alignment) -> tuple[str, bool]:
    return ("any" if alignment.affinity is None else str(alignment.affinity), alignment.preferred)


class TestOddNumbers:
    """More free than an empty machine has, NUMA nodes that do not exist: the definition decides."""

    def both(self, *demands: HintDemand) -> tuple[str, bool]:
        numa_ids = NUMASet([0, 1])
        verdict = walk(hints_of(demands, numa_ids), numa_ids, BEST_EFFORT, far)
        found = result(place(2, *demands))
        assert found == (str(NUMASet(verdict.affinity or ())), verdict.preferred)
        return found

    def test_more_free_than_there_is(self) -> None:
        assert self.both(quantity("cpu", 2, [1, 1], [2, 2])) == ("0-1", True)
        assert self.both(quantity("cpu", 3, [1, 1], [3, 2])) == ("0-1", True)

    def test_types_that_no_empty_numa_node_holds_together(self) -> None:
        memory = replace(quantity("memory", 4, [4, 1], [4, 4]), share="m")
        pages = replace(quantity("pages", 4, [1, 4], [4, 4]), share="m")
        assert self.both(memory, pages) == ("0-1", True)

    def test_resources_that_no_numa_node_has_both_of(self) -> None:
        memory = replace(quantity("memory", 2, []), capacity={1: 4}, available={1: 4})
        assert self.both(quantity("cpu", 2, [4]), memory) == ("0-1", False)

    def test_numa_nodes_that_do_not_exist_are_not_looked_at(self) -> None:
        cpu = ResourceDemand(
            resource="cpu", need=2, capacity={9: 4, -1: 4}, available={9: 4, -1: 4}
        )
        assert result(place(2, cpu)) == ("0-1", False)
        cpu = replace(cpu, capacity={9: 4, 1: 4}, available={9: 4, 1: 2})
        assert result(place(2, cpu)) == ("1", True)
        cpu = replace(cpu, capacity={1: 4, 9: 4}, available={9: 4})
        assert result(place(2, cpu)) == ("0-1", False)


def adversarial(random: Random, devices: bool) -> Iterator[HintDemand]:
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
        assert place(64, *demands, policy=policy, rank=rank).steps <= 2 * STEP_LIMIT + 64
    found = place(64, *demands)
    assert found.affinity
    assert not found.exact
    assert "a better one may exist" in found.reason
