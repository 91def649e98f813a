"""What is known of a container's devices is a value, looked up by its key."""

from __future__ import annotations

from nri_numa.engine.values.workload import Device, DeviceRequest, KnownDevices


def of(count: int, *nodes: int) -> KnownDevices:
    device = Device(id="a", numa_nodes=frozenset(nodes))
    return KnownDevices((DeviceRequest(resource="GPU", count=count, devices=(device,)),))


def test_values_are_equal_however_their_sets_were_made() -> None:
    # 0 and 8 fall together in a small set, which tells them in the order in which they came.
    assert {of(1, 0, 8)} == {of(1, 8, 0)}
    assert of(1, 0, 8).key == of(1, 8, 0).key
