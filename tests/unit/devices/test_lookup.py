"""What NVIDIA's names and numbers mean on a machine with its driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.devices.lookup import MOST_NOTES, GPUs, hints, named_by, read_gpus
from nri_numa.devices.sysfs import Found
from nri_numa.model.cpuset import NUMASet
from nri_numa.model.workload import MOST_DEVICES
from tests.beds.device_tree import DeviceTree

FIRST, SECOND = "0000:3b:00.0", "0000:d8:00.0"
UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def gpus(tmp_path: Path) -> GPUs:
    tree = DeviceTree(tmp_path)
    tree.nvidia(SECOND, UUID, 0)
    tree.nvidia(FIRST, "GPU-????????-????-????-????-????????????", 1)
    return read_gpus(str(tmp_path))


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
def test_a_name_is_the_gpu_that_it_names_or_none(
    gpus: GPUs, name: str, address: str | None
) -> None:
    assert gpus.of_name(name) == address


def test_a_device_file_is_its_gpu_and_control_files_are_none(gpus: GPUs) -> None:
    assert gpus.of_minor(0) == SECOND
    assert gpus.of_minor(1) == FIRST
    assert gpus.of_minor(9) is gpus.of_minor(255) is None


def test_what_is_not_as_expected_is_passed_over(tmp_path: Path) -> None:
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    (gpus / "not-an-address").mkdir(parents=True)
    (gpus / FIRST).mkdir()
    (gpus / FIRST / "information").write_bytes(b"\xff\xfe\nGPU UUID: nonsense\nDevice Minor: x\n")
    (gpus / SECOND).mkdir()
    found = read_gpus(str(tmp_path))
    assert found.addresses == (FIRST, SECOND)
    assert not found.by_uuid
    assert not found.by_minor


# --- what becomes of devices that were found: hints, and sentences about the rest -----------------


PLACES = NUMASet((0, 1))


def test_too_many_are_none_and_notes_are_few() -> None:
    many = [Found("GPU", f"{i:04}", frozenset({0})) for i in range(MOST_DEVICES + 1)]
    assert hints(many, PLACES).requests == ()
    assert "more than" in hints(many, PLACES).notes[0]
    noted = hints([Found("GPU", str(i)) for i in range(100)], PLACES).notes
    assert len(noted) == MOST_NOTES
    assert noted[-1] == "and 93 more such devices"


# --- variables of device plugins, which anybody may write -----------------------------------------


def test_what_is_no_address_is_said_and_gives_nothing() -> None:
    found = named_by({"PCIDEVICE_X": "../../etc, ,0000:3b:02.9," + "x" * 200})
    assert not found.addresses
    assert len(found.notes) == 3
    assert all(len(note) < 200 and "no PCI address" in note for note in found.notes)


def test_uuids_and_indices_are_read_and_words_of_images_are_not() -> None:
    def of(value: str) -> tuple[str, ...]:
        return named_by({"NVIDIA_VISIBLE_DEVICES": value}).gpus

    assert of("GPU-1,0, 1:2") == ("GPU-1", "0", "1:2")
    assert of("void") == of("none") == of("") == of("all") == of("ALL") == ()
    assert "images set it" in named_by({"NVIDIA_VISIBLE_DEVICES": "all"}).notes[0]


def test_a_source_that_is_off_is_not_read() -> None:
    variables = {"PCIDEVICE_X": "0000:3b:02.1", "NVIDIA_VISIBLE_DEVICES": "0"}
    assert named_by(variables, pci=False).addresses == ()
    assert named_by(variables, nvidia=False).gpus == ()
    assert named_by({"PATH": "/bin"}) == ((), (), ())
