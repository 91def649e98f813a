"""Vectors of the kubelet's device manager, one class for each of its rules.

Written from the rules that its hint provider states (kubernetes ``pkg/kubelet/cm/devicemanager``,
``topology_hints.go``): no topology at all, too few devices, a device counting for every mask that
holds one of its NUMA nodes, and devices without topology that count for none. All devices of a
request are the container's already: which are taken is the kubelet's business.
"""

from __future__ import annotations

import pytest

from nri_numa.engine.align.hints import DeviceDemand, ResourceDemand, Steps, hints_of
from nri_numa.engine.align.hints import hints_of as engine_hints
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import Device, DeviceRequest

TWO = NUMASet((0, 1))
NOTHING, IMPOSSIBLE = "no wish", "impossible"


def hints(count: int, devices: dict[str, tuple[int, ...]]) -> dict[str, bool] | str:
    """The hints of a request on two NUMA nodes by mask, True for a preferred one."""
    request = DeviceRequest(
        resource="example.com/device",
        count=count,
        devices=tuple(Device(id=id, numa_nodes=frozenset(where)) for id, where in devices.items()),
    )
    (family,) = engine_hints([DeviceDemand(request=request)], TWO, Steps())
    if family.nil is not None:
        return NOTHING if family.nil else IMPOSSIBLE
    return {
        str(NUMASet.from_bits(mask)): family.prefers(mask)
        for mask in range(1, 4)
        if family.contains(mask)
    }


@pytest.mark.parametrize(
    ("count", "devices", "expected"),
    [
        # 1. Not one device of the resource says where it is: no wish, however many there are.
        (1, {"a": (), "b": ()}, NOTHING),
        (9, {"a": ()}, NOTHING),
        # 2. There are fewer than asked for.
        (3, {"a": (0,), "b": (1,)}, IMPOSSIBLE),
        # 3. A device counts for a mask that holds any of its NUMA nodes.
        (1, {"a": (0, 1)}, {"0": True, "1": True, "0-1": False}),
        (2, {"a": (0, 1), "b": (1,)}, {"1": True, "0-1": False}),
        # 4. The least width that holds as many is preferred.
        (2, {"a": (0,), "b": (0,), "c": (1,)}, {"0": True, "0-1": False}),
        (2, {"a": (0,), "b": (1,)}, {"0-1": True}),
        # 5. A device without topology counts for no mask.
        (2, {"a": (0,), "b": (), "c": ()}, IMPOSSIBLE),
        (1, {"a": (0,), "b": ()}, {"0": True, "0-1": False}),
        (1, {"a": (-1,), "b": (0,)}, {"0": True, "0-1": False}),
    ],
)
def test_a_request_has_the_hints_of_the_kubelet(
    count: int,
    devices: dict[str, tuple[int, ...]],
    expected: dict[str, bool] | str,
) -> None:
    assert hints(count, devices) == expected


def preferred(sockets: dict[int, int]) -> list[int]:
    """The masks of four NUMA nodes that five CPUs prefer."""
    four = dict.fromkeys(range(4), 4)
    demand = ResourceDemand(resource="cpu", need=5, capacity=four, available=four, sockets=sockets)
    (family,) = hints_of([demand], NUMASet(four), Steps())
    return [mask for mask in range(1, 16) if family.contains(mask) and family.prefers(mask)]


@pytest.mark.parametrize("sockets", [{0: 0, 1: 1, 2: 2, 3: 3, 9: 4}, {8: 1}])
def test_sockets_that_say_nothing_change_nothing(sockets: dict[int, int]) -> None:
    assert preferred(sockets) == preferred({})
