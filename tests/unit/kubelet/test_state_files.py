"""The kubelet's state files on disk: read when they change, and never waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nri_numa.kubelet import state_files
from nri_numa.kubelet.state_files import StateFiles
from nri_numa.machine.cpuset import CPUSet, NUMASet

MACHINE = CPUSet.parse("0-7"), NUMASet([0])


def write(directory: Path, text: str, name: str = "cpu_manager_state") -> None:
    """As the kubelet does: another file, renamed over the old one."""
    made = directory / ".new"
    made.write_text(text, encoding="utf-8")
    made.rename(directory / name)


def static(**entries: str) -> str:
    documents = {uid: {"app": cpus} for uid, cpus in entries.items()}
    return json.dumps({"policyName": "static", "defaultCpuSet": "0", "entries": documents})


def test_a_file_is_read_when_it_was_replaced_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    whole = state_files.read
    monkeypatch.setattr(state_files, "read", lambda path: (reads.append(path), whole(path))[1])
    files = StateFiles(str(tmp_path))
    assert not files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("", ())
    write(tmp_path, static(a="1-2"))
    reads.clear()
    assert files.refresh(*MACHINE)
    assert str(files.grants.granted) == "1-2"
    before = files.grants
    assert not files.refresh(*MACHINE)
    assert files.grants is before
    assert reads.count(str(tmp_path / "cpu_manager_state")) == 1
    write(tmp_path, static(a="1-2", b="3"))
    assert files.refresh(*MACHINE)
    assert str(files.grants.granted) == "1-3"


def test_a_file_that_goes_grants_nothing(tmp_path: Path) -> None:
    """An operator who changes the kubelet's policy removes it."""
    files = StateFiles(str(tmp_path))
    write(tmp_path, static(a="1"))
    files.refresh(*MACHINE)
    (tmp_path / "cpu_manager_state").unlink()
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.grants.cpu_policy) == ("", "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"policyName":"dynamic"}', "x" * (2 << 20)])
def test_a_damaged_file_changes_nothing_and_is_told_once(tmp_path: Path, text: str) -> None:
    files = StateFiles(str(tmp_path))
    write(tmp_path, static(a="1"))
    files.refresh(*MACHINE)
    write(tmp_path, text)
    assert files.refresh(*MACHINE)
    (problem,) = files.problems
    assert "cpu_manager_state" in problem
    assert "what it said before still holds" in problem
    assert str(files.grants.granted) == "1"
    assert not files.refresh(*MACHINE)
    write(tmp_path, static(b="2"))
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("2", ())


def test_nobody_waits_for_a_pipe_in_its_place(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cpu_manager_state")
    (tmp_path / "memory_manager_state").mkdir()
    files = StateFiles(str(tmp_path))
    assert files.refresh(*MACHINE)
    assert len(files.problems) == 2
    assert "is no regular file" in files.problems[0]


def test_a_file_that_cannot_be_reached_is_told_until_it_can(tmp_path: Path) -> None:
    directory = tmp_path / "kubelet"
    directory.write_text("no directory")
    files = StateFiles(str(directory))
    assert files.refresh(*MACHINE)
    assert "cannot be read: Not a directory" in files.problems[0]
    directory.unlink()
    directory.mkdir()
    write(directory, static(a="1"))
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("1", ())


def test_another_machine_judges_the_same_file_anew(tmp_path: Path) -> None:
    """CPUs can be plugged in while the agent runs."""
    files = StateFiles(str(tmp_path))
    write(tmp_path, static(a="7"))
    files.refresh(CPUSet.parse("0-3"), NUMASet([0]))
    assert "does not have" in files.problems[0]
    assert files.refresh(*MACHINE)
    assert (str(files.grants.granted), files.problems) == ("7", ())
