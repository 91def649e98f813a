"""What becomes of devices that were found: hints, and sentences about the rest."""

from __future__ import annotations

from nri_numa.devices.found import MOST_NOTES, Found, hints
from nri_numa.engine.values.mentions import MOST_DEVICES
from nri_numa.engine.values.workload import Device, DeviceRequest
from nri_numa.machine.cpuset import NUMASet

PLACES = NUMASet((0, 1))


def test_devices_are_asked_for_by_kind() -> None:
    found = hints(
        [
            Found("NIC", "b", frozenset({1})),
            Found("GPU", "d", frozenset({0})),
            Found("GPU", "c", frozenset({0, 1})),
        ],
        PLACES,
    )
    gpus = (Device(id="c", numa_nodes=frozenset({0, 1})), Device(id="d", numa_nodes=frozenset({0})))
    assert found.requests == (
        DeviceRequest(resource="GPU", count=2, devices=gpus),
        DeviceRequest(
            resource="NIC", count=1, devices=(Device(id="b", numa_nodes=frozenset({1})),)
        ),
    )
    assert not found.notes


def test_a_device_of_several_sources_counts_once_by_its_first_kind() -> None:
    found = hints([Found("GPU", "a", frozenset({1})), Found("example.com/gpu", "a")], PLACES)
    device = Device(id="a", numa_nodes=frozenset({1}))
    assert found.requests == (DeviceRequest(resource="GPU", count=1, devices=(device,)),)


def test_numa_nodes_without_cpus_and_unknown_ones_are_no_hint_and_said() -> None:
    found = hints(
        [
            Found("GPU", "a", frozenset({7})),
            Found("GPU", "b"),
            Found("NIC", "c", frozenset({1, 7})),
        ],
        PLACES,
        ["said before"],
    )
    assert [(r.resource, r.devices[0].numa_nodes) for r in found.requests] == [("NIC", {1})]
    assert found.notes == (
        "said before",
        "its GPU a is on NUMA node 7, where no CPUs are: no hint",
        "its GPU b tells no NUMA node: no hint",
    )


def test_too_many_are_none_and_notes_are_few() -> None:
    many = [Found("GPU", f"{i:04}", frozenset({0})) for i in range(MOST_DEVICES + 1)]
    assert hints(many, PLACES).requests == ()
    assert "more than" in hints(many, PLACES).notes[0]
    noted = hints([Found("GPU", str(i)) for i in range(100)], PLACES).notes
    assert len(noted) == MOST_NOTES
    assert noted[-1] == "and 93 more such devices"
