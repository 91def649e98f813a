"""Files of the Container Device Interface, good and bad."""

import json
import os
from pathlib import Path

import pytest

from nri_numa.devices.cdi import MAX_CDI_SPEC_BYTES, CDIDevice, CDIRegistry
from nri_numa.model.workload import DeviceFile


def spec(kind: str, **devices: dict[str, object]) -> str:
    return json.dumps(
        {
            "cdiVersion": "0.6.0",
            "kind": kind,
            "containerEdits": {"env": ["A=1"]},
            "devices": [{"name": name, "containerEdits": edits} for name, edits in devices.items()],
        }
    )


def node(major: int, minor: int) -> dict[str, object]:
    return {"path": "/dev/x", "type": "c", "major": major, "minor": minor}


@pytest.fixture
def early(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    return tmp_path / "etc"


@pytest.fixture
def late(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def registry(*directories: Path) -> CDIRegistry:
    made = CDIRegistry(tuple(map(str, directories)))
    assert made.refresh_specs()
    return made


def test_a_name_stands_for_the_device_files_and_interfaces_of_its_device(early: Path) -> None:
    edits = {"deviceNodes": [node(195, 0)], "netDevices": [{"hostInterfaceName": "ens1"}]}
    (early / "a.json").write_text(spec("example.com/gpu", gpu0=edits))
    assert registry(early).devices == {
        "example.com/gpu=gpu0": CDIDevice((DeviceFile("c", 195, 0),), ("ens1",))
    }


def test_yaml_is_read_as_well(early: Path) -> None:
    (early / "a.yaml").write_text(
        "cdiVersion: 0.6.0\nkind: example.com/nic\ndevices:\n- name: '0'\n  containerEdits:\n"
        "    deviceNodes:\n    - {path: /dev/vfio/4, type: c, major: 240, minor: 4}\n"
    )
    assert registry(early).devices["example.com/nic=0"].nodes == (DeviceFile("c", 240, 4),)


def test_numbers_that_are_left_out_are_those_of_the_host(early: Path) -> None:
    edits = {"deviceNodes": [{"path": "/dev/inner", "hostPath": "/dev/null"}, {"path": "/tmp"}]}
    (early / "a.json").write_text(spec("example.com/x", a=edits))
    found = registry(early).devices["example.com/x=a"].nodes
    null = os.stat("/dev/null").st_rdev
    assert found == (DeviceFile("c", os.major(null), os.minor(null)),)


def test_the_later_directory_wins_and_a_conflict_in_one_is_void(early: Path, late: Path) -> None:
    (early / "a.json").write_text(spec("example.com/x", one={"deviceNodes": [node(1, 1)]}))
    (late / "a.json").write_text(spec("example.com/x", one={"deviceNodes": [node(2, 2)]}))
    (early / "b.json").write_text(spec("example.com/x", three={"deviceNodes": [node(1, 3)]}))
    (late / "b.json").write_text(spec("example.com/x", two={"deviceNodes": [node(3, 3)]}))
    (late / "c.json").write_text(spec("example.com/x", two={"deviceNodes": [node(4, 4)]}))
    found = CDIRegistry((f"{early}/", str(late)))
    found.refresh_specs()
    assert found.devices["example.com/x=one"].nodes == (DeviceFile("c", 2, 2),)
    assert "example.com/x=two" not in found.devices
    assert "example.com/x=three" in found.devices
    assert any("example.com/x=two is defined twice" in problem for problem in found.problems)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"kind": 1, "devices": []}',
        '{"kind": "a/b", "devices": {}}',
        '{"kind": "a/b", "devices": [{"name": 7}]}',
        '{"kind": "a/b", "devices": [{"name": "a", "containerEdits": "none"}]}',
        '{"kind": "a/b", "devices": [{"name": "a", "containerEdits": {"deviceNodes": "x"}}]}',
        '{"kind": "a/b", "devices": [{"name": "a", "containerEdits": {"netDevices": [1]}}]}',
        "[" * 100_000,
        '{"kind": "a/b", "devices": [' + "9" * 5000 + "]}",
    ],
)
def test_a_file_of_something_else_is_said_and_spoils_no_other(early: Path, text: str) -> None:
    (early / "a.json").write_text(text)
    (early / "b.json").write_text(spec("example.com/x", a={"deviceNodes": [node(1, 1)]}))
    found = registry(early)
    assert list(found.devices) == ["example.com/x=a"]
    assert len(found.problems) == 1
    assert "a.json: not used: " in found.problems[0]


def test_what_concerns_nobody_within_a_file_is_passed_over(early: Path) -> None:
    (early / "a.json").write_text(
        spec(
            "example.com/x",
            **{
                "n" * 1000: {},
                "b": {"unknownKey": {"a": [1]}, "netDevices": [{}]},
                "c": {"deviceNodes": [{"path": "/no\0where"}, node(5, 6)]},
            },
        )
    )
    found = registry(early)
    assert found.devices == {
        "example.com/x=b": CDIDevice(),
        "example.com/x=c": CDIDevice((DeviceFile("c", 5, 6),)),
    }
    assert found.problems == ()


def test_what_is_huge_no_file_or_not_utf8_is_not_read(early: Path) -> None:
    (early / "huge.json").write_bytes(b" " * (MAX_CDI_SPEC_BYTES + 1))
    (early / "bytes.yaml").write_bytes(b"\xff\xfe\xfd")
    (early / "note.txt").write_text("no CDI file")
    os.mkfifo(early / "pipe.json")
    (early / "gone.json").symlink_to(early / "nowhere")
    found = registry(early)
    assert not found.devices
    assert len(found.problems) == 2


def test_files_are_read_again_when_they_changed_and_only_then(early: Path, late: Path) -> None:
    found = registry(early, late / "not there yet")
    assert not found.refresh_specs()
    (early / "a.json").write_text(spec("example.com/x", a={"deviceNodes": [node(1, 1)]}))
    assert found.refresh_specs()
    assert found.devices
    assert not found.refresh_specs()
    (early / "a.json").unlink()
    assert found.refresh_specs()
    assert not found.devices
