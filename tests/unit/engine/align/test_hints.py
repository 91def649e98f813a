"""What a demand means: which masks suit it, and how nil, empty and bad values are read."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.families import families_of
from nri_numa.engine.align.hints import DeviceDemand, FixedHints, Hint, HintDemand, ResourceDemand
from nri_numa.engine.align.search import Steps
from nri_numa.engine.values.workload import Device, DeviceRequest
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from tests.checks.oracles import as_hints, hints_of

TWO = NUMASet([0, 1])
FOUR = NUMASet(range(4))


def hints(demand: HintDemand, numa_ids: NUMASet = TWO) -> list[str] | None:
    """The masks of a demand in words; None is no wish, [] is impossible."""
    (family,) = families_of([demand], numa_ids, Steps())
    if family.nil is not None:
        return None if family.nil else []
    found: list[str] = []
    for hint in as_hints(hints_of([demand], numa_ids)[0]):
        assert hint.affinity is not None
        assert family.contains(hint.affinity.bits)
        assert family.prefers(hint.affinity.bits) == hint.preferred
        found.append(str(hint))
    return found


def cpu(need: int, capacity: dict[int, int], available: dict[int, int]) -> ResourceDemand:
    return ResourceDemand(resource="cpu", need=need, capacity=capacity, available=available)


def gpus(*numa_nodes: tuple[int, ...], count: int = 1, taken: str = "") -> DeviceRequest:
    return DeviceRequest(
        resource="example.com/gpu",
        count=count,
        devices=tuple(
            Device(id=f"{k}", numa_nodes=frozenset(nodes), available=f"{k}" not in taken)
            for k, nodes in enumerate(numa_nodes)
        ),
    )


def test_a_hint_reads_as_its_mask_and_a_tick() -> None:
    assert str(Hint(NUMASet([0, 1]), True)) == "{0-1}✓"
    assert str(Hint(None, False)) == "any✗"


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        ({0: 3, 1: 4}, ["{1}✓", "{0-1}✗"]),  # free CPUs decide whether, all CPUs how wide
        ({0: 3, 1: 0}, []),
        ({0: 2, 1: 2}, ["{0-1}✗"]),
        ({1: 4}, ["{1}✓", "{0-1}✗"]),  # missing means none
        ({0: -5, 1: 4}, ["{1}✓", "{0-1}✗"]),  # an over-committed node takes nothing from others
    ],
)
def test_preferred_looks_at_capacity_and_feasible_at_what_is_free(
    available: dict[int, int], expected: list[str]
) -> None:
    assert hints(cpu(4, {0: 4, 1: 4}, available)) == expected


def test_masks_are_made_of_the_numa_nodes_with_capacity_entries() -> None:
    """CPU masks leave out memory-only nodes, even when the machine has them."""
    assert hints(cpu(4, {0: 4}, {0: 4, 1: 9}), TWO) == ["{0}✓"]


def test_what_is_held_lies_in_every_mask() -> None:
    demand = ResourceDemand(
        resource="cpu",
        need=2,
        capacity={0: 4, 1: 4},
        available={0: 4, 1: 4},
        required=NUMASet([1]),
    )
    assert hints(demand) == ["{1}✓", "{0-1}✗"]


def test_something_held_on_a_numa_node_that_is_gone_is_impossible() -> None:
    demand = ResourceDemand(
        resource="cpu", need=2, capacity={0: 4}, available={0: 4}, required=NUMASet([7])
    )
    assert hints(demand) == []


@pytest.mark.parametrize("need", [0, -1, -(10**18)])
def test_a_need_of_nothing_is_no_wish(need: int) -> None:
    assert hints(cpu(need, {0: 4, 1: 4}, {})) is None
    request = DeviceRequest(resource="gpu", count=need, devices=(Device(id="a"),))
    assert hints(DeviceDemand(request=request)) is None


def test_more_than_the_machine_is_impossible() -> None:
    assert hints(cpu(9, {0: 4, 1: 4}, {0: 4, 1: 4})) == []


def test_memory_above_any_one_numa_node_takes_several() -> None:
    assert hints(cpu(6, {0: 4, 1: 4}, {0: 4, 1: 4})) == ["{0-1}✓"]


def test_a_huge_page_size_that_no_numa_node_has_is_impossible() -> None:
    demand = ResourceDemand(
        resource="hugepages-16Gi", need=1, capacity={0: 0, 1: 0}, available={0: 0, 1: 0}
    )
    assert hints(demand) == []
    demand = ResourceDemand(resource="hugepages-16Gi", need=1, capacity={}, available={})
    assert hints(demand) == []


def test_the_kubelets_memory_answers_no_wish_when_nothing_fits() -> None:
    demand = ResourceDemand(
        resource="memory",
        need=9,
        capacity={0: 4, 1: 4},
        available={0: 4, 1: 4},
        nothing_is_no_wish=True,
    )
    assert hints(demand) is None


class TestAlignBySocket:
    """NUMA nodes 0 and 1 on socket 0, 2 and 3 on socket 1."""

    CAPACITY = dict.fromkeys(range(4), 4)

    def demand(self, need: int, sockets: dict[int, int]) -> ResourceDemand:
        return ResourceDemand(
            resource="cpu",
            need=need,
            capacity=self.CAPACITY,
            available=self.CAPACITY,
            sockets=sockets,
        )

    def test_masks_within_as_few_sockets_are_preferred_too(self) -> None:
        found = hints(self.demand(4, {0: 0, 1: 0, 2: 1, 3: 1}), FOUR)
        assert found is not None
        assert [h for h in found if h.endswith("✓")] == [
            "{0}✓",
            "{1}✓",
            "{2}✓",
            "{3}✓",
            "{0-1}✓",
            "{2-3}✓",
        ]

    @pytest.mark.parametrize("sockets", [{}, {0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, {8: 1}])
    def test_sockets_that_say_nothing_change_nothing(self, sockets: dict[int, int]) -> None:
        plain = hints(self.demand(5, {}), FOUR)
        found = hints(self.demand(5, sockets), FOUR)
        assert found is not None
        assert plain is not None
        assert [h for h in found if h.endswith("✓")] == [h for h in plain if h.endswith("✓")]

    def test_more_sockets_than_numa_nodes_switches_it_off(self) -> None:
        demand = ResourceDemand(
            resource="cpu",
            need=1,
            capacity={0: 4},
            available={0: 4},
            sockets={0: 0},
        )
        assert hints(demand, NUMASet([0])) == ["{0}✓"]


class TestGroups:
    """A NUMA node serves single-node containers or one fixed group."""

    def demand(self, need: int, groups: list[set[int]], assigned: set[int]) -> ResourceDemand:
        return ResourceDemand(
            resource="memory",
            need=need,
            capacity=dict.fromkeys(range(4), 4),
            available=dict.fromkeys(range(4), 4),
            groups={i: NUMASet(g) for g in groups for i in g},
            assigned=NUMASet(assigned),
        )

    def test_a_member_of_a_group_is_no_mask_of_its_own(self) -> None:
        found = hints(self.demand(4, [{0, 1}, {2}, {3}], {0, 1}), FOUR)
        assert found == ["{2}✓", "{3}✓", "{0-1}✗", "{2-3}✗"]

    def test_a_wide_mask_is_free_of_others_assignments(self) -> None:
        assert hints(self.demand(6, [{0}, {1}, {2}, {3}], {0, 2}), FOUR) == ["{1,3}✓"]

    def test_nothing_but_the_group_itself(self) -> None:
        assert hints(self.demand(6, [{0, 1}, {2}, {3}], {0, 1, 2}), FOUR) == ["{0-1}✓"]

    def test_a_numa_node_that_no_group_names_is_one_of_its_own(self) -> None:
        assert hints(self.demand(6, [{0}], {1, 3}), FOUR) == ["{0,2}✓"]

    def test_memory_of_init_containers_counts_for_their_very_mask(self) -> None:
        demand = ResourceDemand(
            resource="memory",
            need=4,
            capacity={0: 4, 1: 4},
            available={0: 1, 1: 1},
            reusable={NUMASet([1]): 3},
        )
        assert hints(demand) == ["{1}✓"]


def test_demands_that_share_are_judged_together() -> None:
    """Memory fits on one node, the huge pages do not: both take two."""
    memory = ResourceDemand(
        resource="memory", need=1, capacity={0: 4, 1: 4}, available={0: 4, 1: 4}, share="m"
    )
    pages = ResourceDemand(
        resource="hugepages-2Mi", need=6, capacity={0: 4, 1: 4}, available={0: 4, 1: 4}, share="m"
    )
    first, second = families_of([memory, pages], TWO, Steps())
    assert first is second
    assert [first.contains(m) for m in (1, 2, 3)] == [False, False, True]
    assert first.prefers(3)


class TestDevices:
    """The rules of the kubelet's device manager."""

    def test_devices_without_numa_nodes_are_no_wish(self) -> None:
        assert hints(DeviceDemand(request=gpus((), (), count=2))) is None
        assert hints(DeviceDemand(request=gpus((), count=9))) is None

    def test_too_few_are_impossible(self) -> None:
        assert hints(DeviceDemand(request=gpus((0,), (1,), count=3))) == []
        assert hints(DeviceDemand(request=gpus((0,), (1,), count=2, taken="1"))) == []

    def test_a_device_counts_for_every_mask_that_touches_it(self) -> None:
        found = hints(DeviceDemand(request=gpus((0, 1), (1,), count=2)))
        assert found == ["{1}✓", "{0-1}✗"]

    def test_devices_in_use_make_a_mask_preferred_but_not_feasible(self) -> None:
        found = hints(DeviceDemand(request=gpus((0,), (0,), (1,), count=2, taken="1")))
        assert found == ["{0-1}✗"]

    def test_devices_without_numa_nodes_count_for_no_mask(self) -> None:
        """Two on node 0 and four anywhere cannot give three: as upstream."""
        request = gpus((0,), (0,), (), (), (), (), count=3)
        assert hints(DeviceDemand(request=request)) == []

    def test_owned_devices_alone_decide(self) -> None:
        request = gpus((0,), (1,), (1,), count=1, taken="0")
        assert hints(DeviceDemand(request=request, owned=frozenset("0"))) == ["{0}✓", "{0-1}✗"]

    def test_owning_another_number_is_impossible(self) -> None:
        request = gpus((0,), (1,), count=1)
        assert hints(DeviceDemand(request=request, owned=frozenset("01"))) == []

    def test_devices_of_init_containers_must_count(self) -> None:
        request = gpus((0,), (1,), (0, 1), count=1, taken="12")
        demand = DeviceDemand(request=request, reusable=frozenset("12"))
        assert hints(demand) == ["{1}✓", "{0-1}✗"]

    def test_a_reusable_device_on_an_unknown_numa_node_is_impossible(self) -> None:
        demand = DeviceDemand(request=gpus((0,), (9,)), reusable=frozenset("1"))
        assert hints(demand) == []

    def test_negative_numa_nodes_are_none(self) -> None:
        assert hints(DeviceDemand(request=gpus((-1,), (0,)))) == ["{0}✓", "{0-1}✗"]

    def test_it_names_its_resource_and_need(self) -> None:
        demand = DeviceDemand(request=gpus((0,), count=1))
        assert (demand.resource, demand.need) == ("example.com/gpu", 1)


class TestFixedHints:
    """Hints that repeat an existing allocation."""

    def test_nil_and_empty_stay_apart(self) -> None:
        assert hints(FixedHints("cpu", None)) is None
        assert hints(FixedHints("cpu", ())) == []
        assert hints(FixedHints("cpu", (Hint(None, True),))) is None
        assert hints(FixedHints("cpu", (Hint(None, False),))) == []

    def test_masks_the_machine_does_not_have_are_left_out(self) -> None:
        fixed = FixedHints(
            "cpu",
            (Hint(NUMASet([1]), True), Hint(NUMASet([5]), True), Hint(NO_NUMA_NODES, True)),
        )
        assert hints(fixed) == ["{1}✓"]
        assert hints(FixedHints("cpu", (Hint(NUMASet([5]), True),))) == []
