"""Devices are classed by the NUMA nodes inside the affinity first."""

from __future__ import annotations

import pytest

from nri_numa.engine.align.policies import filter_devices_by_affinity
from nri_numa.engine.values.workload import Device, DeviceRequest
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet


def classes(
    affinity: NUMASet | None, taken: str = "", /, **devices: tuple[int, ...]
) -> tuple[str, str, str]:
    request = DeviceRequest(
        resource="example.com/nic",
        count=1,
        devices=tuple(
            Device(id=name, numa_nodes=frozenset(nodes), available=name not in taken)
            for name, nodes in devices.items()
        ),
    )
    aligned, unaligned, no_affinity = filter_devices_by_affinity(request, affinity)
    return (
        "".join(d.id for d in aligned),
        "".join(d.id for d in unaligned),
        "".join(d.id for d in no_affinity),
    )


def test_a_device_on_several_numa_nodes_is_aligned_when_one_is_inside() -> None:
    """Node 0 has fewer devices than node 1; sorting by count alone called a unaligned."""
    found = classes(NUMASet([1]), a=(0, 1), b=(1,), c=(1,), d=(0,), e=())
    assert found == ("abc", "d", "e")


@pytest.mark.parametrize("affinity", [NUMASet([0]), NUMASet([1]), NUMASet([0, 1])])
def test_it_does_not_depend_on_how_many_devices_a_numa_node_has(affinity: NUMASet) -> None:
    for extra in range(5):
        others = {f"x{k}": (k % 2 * 3,) for k in range(extra)}
        assert "a" in classes(affinity, "", a=(0, 1), **others)[0]


def test_numa_nodes_with_few_devices_are_emptied_first() -> None:
    assert classes(NUMASet([0, 1]), a=(0,), b=(0,), c=(1,), d=(2,), e=(3,), f=(3,)) == (
        "cab",
        "def",
        "",
    )


def test_without_affinity_every_device_is_as_good() -> None:
    assert classes(None, b=(1,), a=(0,), c=()) == ("", "", "abc")


def test_a_resource_without_numa_nodes_has_no_affinity() -> None:
    assert classes(NUMASet([0]), b=(), a=()) == ("", "", "ab")


def test_no_inside_means_nothing_aligned() -> None:
    assert classes(NO_NUMA_NODES, a=(0,)) == ("", "a", "")


def test_devices_in_use_are_left_out() -> None:
    assert classes(NUMASet([0]), "ac", a=(0,), b=(0,), c=()) == ("b", "", "")


def test_nothing_free_is_three_empty_classes() -> None:
    assert classes(NUMASet([0]), "a", a=(0,)) == ("", "", "")
