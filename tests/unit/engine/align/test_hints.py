"""What a demand means: which masks suit it, and how nil, empty and bad values are read."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.hints import DeviceDemand, HintDemand, ResourceDemand, Steps
from nri_numa.engine.align.hints import hints_of as engine_hints
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Device, DeviceRequest
from tests.checks.oracles import as_hints, hints_of

TWO = NUMASet([0, 1])
FOUR = NUMASet(range(4))


def hints(demand: HintDemand, numa_ids: NUMASet = TWO) -> list[str] | None:
    """The masks of a demand in words; None is no wish, [] is impossible."""
    (family,) = engine_hints([demand], numa_ids, Steps())
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


def gpus(*numa_nodes: tuple[int, ...], count: int = 1) -> DeviceRequest:
    return DeviceRequest(
        resource="example.com/gpu",
        count=count,
        devices=tuple(
            Device(id=f"{k}", numa_nodes=frozenset(nodes)) for k, nodes in enumerate(numa_nodes)
        ),
    )


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

    @pytest.mark.parametrize("sockets", [{}, {0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, {8: 1}])
    def test_sockets_that_say_nothing_change_nothing(self, sockets: dict[int, int]) -> None:
        plain = hints(self.demand(5, {}), FOUR)
        found = hints(self.demand(5, sockets), FOUR)
        assert found is not None
        assert plain is not None
        assert [h for h in found if h.endswith("✓")] == [h for h in plain if h.endswith("✓")]


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


class TestDevices:
    """The rules of the kubelet's device manager."""

    def test_devices_without_numa_nodes_count_for_no_mask(self) -> None:
        """Two on node 0 and four anywhere cannot give three: as upstream."""
        request = gpus((0,), (0,), (), (), (), (), count=3)
        assert hints(DeviceDemand(request=request)) == []

    def test_negative_numa_nodes_are_none(self) -> None:
        assert hints(DeviceDemand(request=gpus((-1,), (0,)))) == ["{0}✓", "{0-1}✗"]
