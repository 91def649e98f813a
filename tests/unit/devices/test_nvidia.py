"""What NVIDIA's names and numbers mean on a machine with its driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from nri_numa.devices.lookup import GPUs, read_gpus
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
