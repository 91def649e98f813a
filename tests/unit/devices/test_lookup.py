"""What NVIDIA's names and numbers mean on a machine with its driver."""

from pathlib import Path

import pytest

from nri_numa.config.sections import Devices
from nri_numa.devices.lookup import (
    MAX_UNLOCATED_NOTES,
    DeviceFinder,
    GPUs,
    MissedHints,
    build_hints,
    read_nvidia_gpus,
)
from nri_numa.devices.sysfs import LocatedDevice
from nri_numa.model.cpuset import CPUSet, NUMASet
from nri_numa.model.workload import MAX_CONTAINER_DEVICES, DeviceMentions
from tests.beds.device_tree import DeviceTree

FIRST, SECOND = "0000:3b:00.0", "0000:d8:00.0"
UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def gpus(tmp_path: Path) -> GPUs:
    tree = DeviceTree(tmp_path)
    tree.nvidia(SECOND, UUID, 0)
    tree.nvidia(FIRST, "GPU-????????-????-????-????-????????????", 1)
    return read_nvidia_gpus(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "address"),
    [
        (UUID, SECOND),
        (UUID.upper(), SECOND),
        (f"{UUID}::3", SECOND),
        (f"MIG-{UUID}/1/0", SECOND),
        ("0", FIRST),
        ("1", SECOND),
        ("1:2", SECOND),
        ("2", None),
        ("-1", None),
        ("²", None),
        ("MIG-11111111-2222-3333-4444-555555555555", None),
        ("GPU-unknown", None),
        ("anything", None),
        ("", None),
    ],
)
def test_a_name_is_that_gpu_or_none(gpus: GPUs, name: str, address: str | None) -> None:
    assert gpus.address_of_name(name) == address


def test_a_device_file_is_its_gpu_and_control_files_are_none(gpus: GPUs) -> None:
    assert gpus.address_of_minor(0) == SECOND
    assert gpus.address_of_minor(1) == FIRST
    assert gpus.address_of_minor(9) is gpus.address_of_minor(255) is None


def test_what_is_not_as_expected_is_passed_over(tmp_path: Path) -> None:
    for name in ("not-an-address", FIRST, SECOND):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    information = tmp_path / f"proc/driver/nvidia/gpus/{FIRST}/information"
    information.write_bytes(b"\xff\xfe\nGPU UUID: nonsense\nDevice Minor: x\n")
    found = read_nvidia_gpus(str(tmp_path))
    assert found.addresses == (FIRST, SECOND)
    assert not found.by_uuid
    assert not found.by_minor


# --- what becomes of devices that were found: hints, and sentences about the rest -----------------


PLACES = NUMASet((0, 1))


def test_too_many_are_none_and_notes_are_few() -> None:
    many = [
        LocatedDevice("GPU", f"{i:04}", frozenset({0})) for i in range(MAX_CONTAINER_DEVICES + 1)
    ]
    assert build_hints(many, PLACES).requests == ()
    assert "more than" in build_hints(many, PLACES).notes[0]
    noted = build_hints([LocatedDevice("GPU", str(i)) for i in range(100)], PLACES).notes
    assert len(noted) == MAX_UNLOCATED_NOTES
    assert noted[-1] == "and 93 more such devices"


def test_the_cpus_beside_its_root_are_those_of_the_source_that_knows_them() -> None:
    """A device plugin reports NUMA nodes only, sysfs the CPUs beside the root, too."""
    cpus, at = CPUSet.parse("4-7"), frozenset({0})
    sources = [LocatedDevice("GPU", FIRST, at), LocatedDevice("device", FIRST, at, cpus)]
    for order in (sources, sources[::-1]):
        (request,) = build_hints(order, PLACES).requests
        assert [device.local_cpus for device in request.devices] == [cpus]


# --- variables of device plugins, which anybody may write -----------------------------------------


def notes(root: Path, sources: Devices | None = None, **variables: str) -> list[str]:
    """What is said of variables on a machine that has none of the devices."""
    missed = MissedHints()
    lookup = DeviceFinder(sources or Devices(), root=str(root), own_resource="")
    assert not list(lookup.find_mentioned(DeviceMentions(variables=variables), missed))
    return missed.notes


def test_what_is_no_address_is_said_and_gives_nothing(tmp_path: Path) -> None:
    found = notes(tmp_path, PCIDEVICE_X="../../etc, ,0000:3b:02.9," + "x" * 200)
    assert len(found) == 3
    assert all(len(note) < 200 and "not a PCI address" in note for note in found)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("GPU-1,0, 1:2", ["GPU 'GPU-1' is", "GPU '0' is", "GPU '1:2' is"]),
        ("void", []),
        ("none", []),
        ("", []),
        ("all", ["images set themselves"]),
        ("ALL", ["images set themselves"]),
    ],
)
def test_uuids_and_indices_are_read_words_not(tmp_path: Path, value: str, said: list[str]) -> None:
    found = notes(tmp_path, NVIDIA_VISIBLE_DEVICES=value, PATH="/bin")
    assert [words in note for words, note in zip(said, found, strict=True)] == [True] * len(said)
