"""Devices are classed by the NUMA nodes inside the affinity first."""

from __future__ import annotations

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


def test_without_affinity_every_device_is_as_good() -> None:
    assert classes(None, b=(1,), a=(0,), c=()) == ("", "", "abc")


def test_a_resource_without_numa_nodes_has_no_affinity() -> None:
    assert classes(NUMASet([0]), b=(), a=()) == ("", "", "ab")


def test_no_inside_means_nothing_aligned() -> None:
    assert classes(NO_NUMA_NODES, a=(0,)) == ("", "a", "")


def test_devices_in_use_are_left_out() -> None:
    assert classes(NUMASet([0]), "ac", a=(0,), b=(0,), c=()) == ("b", "", "")
