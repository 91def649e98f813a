"""The merge: worked examples, large machines, and a bound on its work."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

import pytest

from nri_numa.engine.align.hints import DeviceDemand, FixedHints, Hint, HintDemand, ResourceDemand
from nri_numa.engine.align.merge import STEP_LIMIT
from nri_numa.engine.align.policies import Alignment, align
from nri_numa.engine.values.workload import Device, DeviceRequest, Policy
from nri_numa.machine.cpuset import NUMASet
from tests.checks.oracles import hints_of, walk

BEST_EFFORT, RESTRICTED = Policy.BEST_EFFORT, Policy.RESTRICTED


def far(i: int, j: int) -> int:
    """Sockets of four NUMA nodes."""
    return 10 if i == j else 12 if i // 4 == j // 4 else 32


def fixed(name: str, *masks: str, preferred: bool = False) -> FixedHints:
    return FixedHints(name, tuple(Hint(NUMASet.parse(m), preferred) for m in masks))


def quantity(
    name: str,
    need: int,
    capacity: list[int],
    available: list[int] | None = None,
    *,
    required: NUMASet | None = None,
) -> ResourceDemand:
    return ResourceDemand(
        resource=name,
        need=need,
        capacity=dict(enumerate(capacity)),
        available=dict(enumerate(capacity if available is None else available)),
        required=required or NUMASet(),
    )


def gpu(*numa_nodes: set[int], name: str = "gpu", count: int | None = None) -> DeviceDemand:
    """A device for each set of NUMA nodes; all of them are asked for, unless ``count`` says."""
    devices = tuple(Device(id=f"d{k}", numa_nodes=frozenset(n)) for k, n in enumerate(numa_nodes))
    count = len(devices) if count is None else count
    return DeviceDemand(request=DeviceRequest(resource=name, count=count, devices=devices))


def place(
    n: int,
    *demands: HintDemand,
    policy: Policy = BEST_EFFORT,
    closest: bool = True,
    rank: dict[int, int] | None = None,
    exact_upto: int = 10,
    step_limit: int = STEP_LIMIT,
) -> Alignment:
    return align(
        demands,
        numa_ids=NUMASet(range(n)),
        policy=policy,
        distance=far,
        prefer_closest=closest,
        rank=rank,
        exact_upto=exact_upto,
        step_limit=step_limit,
    )


def result(alignment: Alignment) -> tuple[str, bool]:
    return ("any" if alignment.affinity is None else str(alignment.affinity), alignment.preferred)


def test_two_preferred_hints_of_different_masks_do_not_make_a_preferred_result() -> None:
    merged = place(2, fixed("a", "0", preferred=True), fixed("b", "0-1", preferred=True))
    assert result(merged) == ("0", False)


def test_the_neediest_list_says_how_wide_a_result_that_is_not_preferred_should_be() -> None:
    """CPUs need two nodes anyway; a mask of one would cut the CPU manager short."""
    merged = place(4, fixed("cpu", "0-1", "0-2"), fixed("device", "0", "0-1"))
    assert result(merged) == ("0-1", False)


def test_an_impossible_resource_leaves_the_others_their_place() -> None:
    merged = place(2, FixedHints("gpu", ()), quantity("cpu", 2, [4, 4], [0, 4]))
    assert result(merged) == ("1", False)


def test_nothing_asked_is_preferred_everywhere() -> None:
    assert result(place(3)) == ("0-2", True)
    assert result(place(3, FixedHints("a", None), quantity("cpu", 0, [1, 1, 1]))) == ("0-2", True)


def test_only_impossible_resources_give_all_numa_nodes_not_preferred() -> None:
    merged = place(3, FixedHints("a", ()), FixedHints("b", ()))
    assert result(merged) == ("0-2", False)


@pytest.mark.parametrize("exact_upto", [10, 0])
def test_masks_that_never_meet_give_all_numa_nodes_not_preferred(exact_upto: int) -> None:
    merged = place(3, fixed("a", "0"), fixed("b", "1"), exact_upto=exact_upto)
    assert result(merged) == ("0-2", False)


def test_of_two_preferred_hints_with_and_without_mask_the_narrower_wins() -> None:
    free = FixedHints("a", (Hint(None, True), Hint(NUMASet([1]), True)))
    assert result(place(3, free)) == ("1", True)


def test_a_hint_without_mask_goes_along_with_anything() -> None:
    free = FixedHints("a", (Hint(None, False), Hint(NUMASet([2]), False)))
    assert result(place(3, free, fixed("b", "0", "1"))) == ("0", False)


class TestTies:
    """Equally good masks: distance, then rank, then value."""

    CPU = quantity("cpu", 8, [4] * 8)

    def test_the_kubelet_takes_the_lowest_value(self) -> None:
        """Of {0,5} and {1,2} it is {1,2}: the values are 33 and 6."""
        options = fixed("a", "0,5", "1-2", preferred=True)
        assert result(place(8, options, closest=False)) == ("1-2", True)

    def test_ranks_compare_the_best_ranked_node_first(self) -> None:
        options = fixed("a", "0,5", "1-2", preferred=True)
        rank = {i: i for i in range(8)}
        assert result(place(8, options, closest=False, rank=rank)) == ("0,5", True)

    def test_the_strategy_ranks_numa_nodes(self) -> None:
        rank = dict(zip(range(8), (7, 6, 5, 4, 0, 3, 2, 1), strict=True))
        assert result(place(8, self.CPU, rank=rank)) == ("4,7", True)

    def test_closeness_comes_before_rank(self) -> None:
        rank = dict(zip(range(8), (0, 7, 6, 5, 1, 2, 3, 4), strict=True))
        assert result(place(8, self.CPU, rank=rank, closest=False)) == ("0,4", True)
        assert result(place(8, self.CPU, rank=rank)) == ("0,3", True)

    def test_equal_and_missing_ranks_go_by_number(self) -> None:
        one = quantity("cpu", 4, [4] * 4)
        assert result(place(4, one, rank={2: 0, 1: 0})) == ("1", True)
        assert result(place(4, one, rank={})) == ("0", True)
        two = quantity("cpu", 8, [4] * 4)
        assert result(place(4, two, rank={3: 0})) == ("0,3", True)

    def test_the_order_of_demands_does_not_matter(self) -> None:
        demands: list[HintDemand] = [
            quantity("cpu", 6, [4] * 5, [2, 1, 4, 3, 2]),
            quantity("memory", 3, [2] * 5, [1, 2, 0, 1, 2]),
            fixed("gpu", "1", "2-3", "4"),
        ]
        assert len({result(place(5, *p)) for p in permutations(demands)}) == 1


class TestLargeMachines:
    """More than ten NUMA nodes: no mask is enumerated, the meaning stays."""

    def test_the_everyday_case_looks_at_each_numa_node_once(self) -> None:
        merged = place(64, *(quantity(x, 1, [4] * 64) for x in "abcd"))
        assert (result(merged), merged.steps, merged.exact) == (("0", True), 64, True)

    def test_devices_beside_quantities_are_as_everyday(self) -> None:
        """Nothing is searched where one NUMA node has the device and all else."""
        beside = gpu({7})
        for closest in (True, False):
            merged = place(64, quantity("cpu", 1, [4] * 64), beside, closest=closest)
            assert (result(merged), merged.steps, merged.exact) == (("7", True), 64, True)
        either = gpu({3, 9})
        merged = place(64, either, gpu({9}, {40}, name="nic", count=1), quantity("m", 1, [4] * 64))
        assert (result(merged), merged.steps) == (("9", True), 64)
        nowhere = gpu(set())
        merged = place(64, nowhere, quantity("cpu", 1, [4] * 64))
        assert (result(merged), merged.steps) == (("0", True), 64)

    def test_a_preferred_mask_of_several_numa_nodes_is_the_closest(self) -> None:
        busy = [4] * 64
        busy[1] = busy[6] = 3
        merged = place(64, quantity("cpu", 16, [4] * 64, busy), quantity("memory", 16, [4] * 64))
        assert result(merged) == ("8-11", True)

    def test_results_that_are_not_preferred_are_as_wide_as_the_neediest(self) -> None:
        merged = place(64, *(quantity(x, 3, [4] * 64, [2] * 64) for x in "abcd"))
        assert (result(merged), merged.exact) == (("0-1", False), True)

    def test_lists_share_what_they_give_up(self) -> None:
        """Node 0 alone holds neither need, but each list can do without part of the others."""
        cpu = quantity("cpu", 3, [3] * 12, [0, 3] + [1] * 10)
        memory = quantity("memory", 3, [3] * 12, [0, 1, 3] + [1] * 9)
        for closest in (True, False):
            merged = place(12, cpu, memory, closest=closest)
            assert (result(merged), merged.exact) == (("0", False), True)

    def test_a_deal_that_does_not_work_out_is_tried_otherwise(self) -> None:
        """Cheapest first is only a guess; other ways to deal are tried before giving in."""
        cpu = quantity("cpu", 7, [9] * 4, [4, 2, 3, 3])
        memory = quantity("memory", 7, [9] * 4, [1, 3, 2, 4])
        for exact_upto in (10, 0):
            assert result(place(4, cpu, memory, exact_upto=exact_upto)) == ("0-1", False)

    def test_what_is_held_is_part_of_it(self) -> None:
        cpu = quantity("cpu", 8, [4] * 16, required=NUMASet([9]))
        memory = quantity("memory", 8, [4] * 16, required=NUMASet([2]))
        assert result(place(16, cpu, memory)) == ("2,9", True)
        # What {0,1,9} and {0,1,2} have in common: the walk does not ask what is held any more.
        third = quantity("pages", 8, [4] * 16, required=NUMASet([14]))
        merged = place(16, cpu, memory, third)
        assert (result(merged), merged.exact) == (("0-1", False), True)

    def test_devices_on_several_numa_nodes(self) -> None:
        devices = tuple(
            Device(id=f"{k}", numa_nodes=frozenset({k, (k + 1) % 16})) for k in range(16)
        )
        gpu = DeviceDemand(request=DeviceRequest(resource="gpu", count=3, devices=devices))
        merged = place(16, gpu, quantity("cpu", 8, [4] * 16))
        assert (result(merged), merged.exact) == (("0-1", True), True)
        busy = tuple(
            Device(id=d.id, numa_nodes=d.numa_nodes, available=int(d.id) % 2 == 0) for d in devices
        )
        gpu = DeviceDemand(request=DeviceRequest(resource="gpu", count=3, devices=busy))
        merged = place(16, gpu, quantity("cpu", 8, [4] * 16))
        assert (merged.preferred, len(merged.affinity or ()), merged.exact) == (False, 3, True)

    def test_memory_groups(self) -> None:
        """Each memory is on one node or group; the CPUs decide which."""
        memory = ResourceDemand(
            resource="memory",
            need=5,
            capacity=dict.fromkeys(range(12), 4),
            available=dict.fromkeys(range(12), 4),
            groups={i: NUMASet([2, 3] if i in (2, 3) else [i]) for i in range(12)},
            assigned=NUMASet([0, 1, 2, 3]),
        )
        cpu = quantity("cpu", 5, [4] * 12, [0, 0, 4, 4] + [1] * 8)
        assert result(place(12, cpu, memory)) == ("2-3", True)
        cpu = quantity("cpu", 5, [4] * 12, [4, 0, 0, 0] + [1] * 8)
        merged = place(12, cpu, memory)
        assert (result(merged), merged.exact) == (("2-3", False), True)
        cpu = quantity("cpu", 5, [5] * 12, [4, 0, 0, 0] + [1] * 8)
        assert result(place(12, cpu, memory)) == ("2-3", False)

    def test_a_fixed_place_narrows_what_others_may_give_up(self) -> None:
        cpu = quantity("cpu", 5, [8] * 12, [2] * 12)
        merged = place(12, cpu, fixed("gpu", "4-7"))
        assert (result(merged), merged.exact) == (("4-7", False), True)
        merged = place(12, cpu, fixed("gpu", "4-8", "9"))
        assert (result(merged), merged.exact) == (("4-6", False), True)
        either = FixedHints("gpu", (Hint(None, False), Hint(NUMASet([9]), False)))
        assert result(place(12, cpu, either)) == ("0-2", False)

    def test_very_many_fixed_masks_are_cut_and_it_is_said(self) -> None:
        random = Random(1)
        lists = [
            fixed(
                name,
                *sorted({str(NUMASet(random.sample(range(30), 12))) for _ in range(40)}),
            )
            for name in "abc"
        ]
        merged = place(30, *lists)
        assert not merged.exact
        assert merged.affinity

    @pytest.mark.parametrize("need", [3, 11])
    def test_a_single_numa_node_beats_many_free_ones(self, need: int) -> None:
        """The narrowest mask is node 0 alone; the free nodes only do three or eleven at a time."""
        memory = ResourceDemand(
            resource="memory",
            need=need,
            capacity={i: 11 if i == 0 else 1 for i in range(12)},
            available={i: 11 if i == 0 else 1 for i in range(12)},
            groups={},
            assigned=NUMASet([0]),
        )
        merged = place(12, memory, FixedHints("gpu", ()))
        assert (result(merged), merged.exact) == (("0", False), True)


class TestOddNumbers:
    """More free than an empty machine has, NUMA nodes that do not exist: the definition decides."""

    def both(self, *demands: HintDemand) -> tuple[str, bool]:
        numa_ids = NUMASet([0, 1])
        verdict = walk(hints_of(demands, numa_ids), numa_ids, BEST_EFFORT, far)
        found = result(place(2, *demands))
        assert found == (str(NUMASet(verdict.affinity or ())), verdict.preferred)
        return found

    def test_devices_as_nobody_would_list_them(self) -> None:
        cpu = quantity("cpu", 1, [4, 4])
        assert self.both(cpu, gpu({1})) == ("1", True)
        assert self.both(cpu, gpu({0}, {1})) == ("0-1", False)
        assert self.both(cpu, gpu({1}, {0, 1}, {0}, count=2)) == ("0", True)
        assert self.both(cpu, gpu({9}, {1}, count=1)) == ("1", True)
        assert self.both(cpu, gpu({9})) == ("0", False)
        assert self.both(cpu, gpu({1}, count=0)) == ("0", True)
        assert self.both(cpu, gpu({1}, count=2)) == ("0", False)
        assert self.both(quantity("cpu", 1, [4, 4], [4, 0]), gpu({1})) == ("0", False)
        one = gpu({1}).request.devices[0]
        for devices in (
            (replace(one, available=False), replace(one, id="d1", numa_nodes=frozenset({0}))),
            (one, replace(one, numa_nodes=frozenset({0}))),
        ):
            request = DeviceRequest(resource="gpu", count=1, devices=devices)
            assert self.both(cpu, DeviceDemand(request=request)) == ("0", True)
        held = replace(gpu({1}, {0}, count=1), owned=frozenset({"d0"}))
        assert self.both(cpu, held) == ("1", True)
        again = replace(gpu({1}, {0}, count=1), reusable=frozenset({"d0"}))
        assert self.both(cpu, again) == ("1", True)

    def test_more_free_than_there_is(self) -> None:
        assert self.both(quantity("cpu", 2, [1, 1], [2, 2])) == ("0-1", True)
        assert self.both(quantity("cpu", 3, [1, 1], [3, 2])) == ("0-1", True)

    def test_types_that_no_empty_numa_node_holds_together(self) -> None:
        memory = replace(quantity("memory", 4, [4, 1], [4, 4]), share="m")
        pages = replace(quantity("pages", 4, [1, 4], [4, 4]), share="m")
        assert self.both(memory, pages) == ("0-1", True)

    def test_numa_nodes_that_do_not_exist_are_not_looked_at(self) -> None:
        cpu = ResourceDemand(
            resource="cpu", need=2, capacity={9: 4, -1: 4}, available={9: 4, -1: 4}
        )
        assert result(place(2, cpu)) == ("0-1", False)
        cpu = replace(cpu, capacity={9: 4, 1: 4}, available={9: 4, 1: 2})
        assert result(place(2, cpu)) == ("1", True)
        cpu = replace(cpu, capacity={1: 4, 9: 4}, available={9: 4})
        assert result(place(2, cpu)) == ("0-1", False)


def adversarial(seed: int) -> list[HintDemand]:
    """Four resources on 64 NUMA nodes that are hard to bring together."""
    random = Random(seed)
    kind = seed % 4
    demands: list[HintDemand] = []
    for k, name in enumerate("abcd"):
        if kind == 0:
            available = [random.randint(0, 100) for _ in range(64)]
            demands.append(quantity(name, 64 * 40, [100] * 64, available))
        elif kind == 1:
            available = [random.randint(1, 3) for _ in range(64)]
            demands.append(quantity(name, 128, [4] * 64, available))
        elif kind == 2:
            available = [40 if i % 4 == k else random.randint(0, 9) for i in range(64)]
            demands.append(quantity(name, 320, [40] * 64, available))
        else:
            devices = tuple(
                Device(
                    id=f"{d}",
                    numa_nodes=frozenset(random.sample(range(64), 4)),
                    available=random.random() < 0.5,
                )
                for d in range(48)
            )
            request = DeviceRequest(resource=name, count=14, devices=devices)
            demands.append(DeviceDemand(request=request))
    return demands


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", [BEST_EFFORT, RESTRICTED, Policy.SINGLE_NUMA_NODE])
def test_the_work_on_64_numa_nodes_is_bounded(seed: int, policy: Policy) -> None:
    """Steps, not time: at most twice the limit, whatever is asked; and the same answer again."""
    demands = adversarial(seed)
    rank = {i: (i * 37) % 64 for i in range(64)}
    first = place(64, *demands, policy=policy, rank=rank)
    assert first.steps <= 2 * STEP_LIMIT + 64
    again = place(64, *demands, policy=policy, rank=rank)
    assert (result(first), first.steps) == (result(again), again.steps)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limit", [0, 1, 80, 400])
def test_a_search_cut_short_still_answers_and_says_so(seed: int, limit: int) -> None:
    demands = adversarial(seed)
    merged = place(64, *demands, step_limit=limit)
    assert merged.admitted
    assert merged.affinity
    assert merged.exact or "a better one may exist" in merged.reason
    if merged.preferred:
        for demand in demands:
            if isinstance(demand, ResourceDemand):
                assert sum(demand.available[i] for i in merged.affinity) >= demand.need
