"""Vectors of the kubelet's device manager, one class for each of its rules.

Written from the rules that its hint provider states (kubernetes ``pkg/kubelet/cm/devicemanager``,
``topology_hints.go``): no topology at all, devices owned already, too few free, a device counting
for every mask that holds one of its NUMA nodes, the width that counts taken devices too, and
devices without topology that count for none.
"""

from __future__ import annotations

import pytest

from nri_numa.engine.align.families import families_of
from nri_numa.engine.align.hints import DeviceDemand
from nri_numa.engine.align.search import Steps
from nri_numa.engine.values.workload import Device, DeviceRequest
from nri_numa.machine.cpuset import NUMASet

FOUR = NUMASet(range(4))

NOTHING, IMPOSSIBLE = "no wish", "impossible"


def hints(
    count: int,
    devices: dict[str, tuple[int, ...]],
    *,
    taken: str = "",
    owned: str = "",
    reusable: str = "",
    nodes: NUMASet = FOUR,
) -> dict[str, bool] | str:
    """The hints of a request by mask, True for a preferred one; masks of up to four NUMA nodes."""
    request = DeviceRequest(
        resource="example.com/device",
        count=count,
        devices=tuple(
            Device(id=id, numa_nodes=frozenset(where), available=id not in taken + owned)
            for id, where in devices.items()
        ),
    )
    demand = DeviceDemand(request=request, owned=frozenset(owned), reusable=frozenset(reusable))
    (family,) = families_of([demand], nodes, Steps())
    if family.nil is not None:
        return NOTHING if family.nil else IMPOSSIBLE
    return {
        str(NUMASet.from_bits(mask)): family.prefers(mask)
        for mask in range(1, 1 << len(nodes))
        if family.contains(mask)
    }


TWO = NUMASet((0, 1))


@pytest.mark.parametrize(
    ("count", "devices", "kwargs", "expected"),
    [
        # 1. Not one device of the resource says where it is: no wish, however many are free.
        (1, {"a": (), "b": ()}, {}, NOTHING),
        (9, {"a": ()}, {}, NOTHING),
        # 2. Owned already: as many as asked for give hints of themselves, another number none.
        (1, {"a": (0,), "b": (1,)}, {"owned": "b"}, {"1": True, "0-1": False}),
        (2, {"a": (0,), "b": (1,)}, {"owned": "ab"}, {"0-1": True}),
        (2, {"a": (0,), "b": (1,)}, {"owned": "a"}, IMPOSSIBLE),
        # 3. Free and reusable together are fewer than asked for.
        (2, {"a": (0,), "b": (0,)}, {"taken": "a"}, IMPOSSIBLE),
        (3, {"a": (0,), "b": (1,)}, {}, IMPOSSIBLE),
        (2, {"a": (0,), "b": (0,)}, {"taken": "a", "reusable": "a"}, {"0": True, "0-1": False}),
        # 4. A device counts for a mask that holds any of its NUMA nodes; reusable ones must.
        (1, {"a": (0, 1)}, {}, {"0": True, "1": True, "0-1": False}),
        (2, {"a": (0, 1), "b": (1,)}, {}, {"1": True, "0-1": False}),
        (1, {"a": (0,), "b": (1,)}, {"reusable": "b"}, {"1": True, "0-1": False}),
        (1, {"a": (0,), "b": (0, 1)}, {"reusable": "b"}, {"0": True, "1": True, "0-1": False}),
        # 5. The least width counts taken devices too, so what is left may not be preferred.
        (2, {"a": (0,), "b": (0,), "c": (1,)}, {"taken": "a"}, {"0-1": False}),
        (2, {"a": (0,), "b": (1,)}, {}, {"0-1": True}),
        # 6. A device without topology counts for no mask, though it is free.
        (2, {"a": (0,), "b": (), "c": ()}, {}, IMPOSSIBLE),
        (1, {"a": (0,), "b": ()}, {}, {"0": True, "0-1": False}),
    ],
)
def test_a_request_has_the_hints_of_the_kubelet(
    count: int,
    devices: dict[str, tuple[int, ...]],
    kwargs: dict[str, str],
    expected: dict[str, bool] | str,
) -> None:
    assert hints(count, devices, nodes=TWO, **kwargs) == expected  # type: ignore[arg-type]


def test_on_four_numa_nodes_the_masks_are_those_that_hold_enough() -> None:
    found = hints(2, {"a": (0,), "b": (0, 2), "c": (3,)})
    assert isinstance(found, dict)
    assert {mask for mask, preferred in found.items() if preferred} == {"0"}
    assert "2" not in found
    assert {"0,2", "2-3", "0-3"} <= set(found)
    assert "1-2" not in found
