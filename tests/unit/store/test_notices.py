"""Notices over a restart: ids and numbers go on, whatever became of the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_numa.store import notices as module
from nri_numa.store.notices import MAX_NOTICES_FILE_BYTES
from tests.unit.observe.test_notices import add
from tests.unit.store.conftest import IDENTITY, Opened
from tests.unit.store.test_checkpoint import BrokenOS


def test_a_killed_agent_goes_on_with_the_same_sequence(tmp_path: Path, opened: Opened) -> None:
    """Nothing is closed: every line is in the file already."""
    notices, _, _ = opened(tmp_path)
    first = add(notices, 1)
    add(notices, 2)
    again, _, problem = opened(tmp_path, {**IDENTITY, "version": "2"})
    assert problem == ""
    assert (again.instance, again.number) == (notices.instance, 2)
    assert again.notices_after() == notices.notices_after()
    assert add(again, 1).id == first.id
    assert add(again, 3).id not in {one.id for one in notices.notices_after()}


def test_numbers_go_on_when_nothing_is_kept(tmp_path: Path, opened: Opened) -> None:
    """A reader that asked for what comes after 5 must not miss a new 1."""
    notices, file, _ = opened(tmp_path, limit=1)
    for n in range(5):
        add(notices, n)
    file.close()
    again, _, _ = opened(tmp_path, limit=1)
    assert again.number == 5
    assert len(again.notices_after()) == 1


@pytest.mark.parametrize(
    ("spoilt", "kept", "said"),
    [
        # A line costs itself and what follows.
        (lambda good: good[:-20], 1, ""),
        (lambda good: good + b'{"id":"\xed\xa0"}\n', 2, ""),
        (lambda good: good.ljust(MAX_NOTICES_FILE_BYTES, b"\n"), 2, ""),
        # The head costs the whole sequence.
        (lambda good: good.replace(b'"instance":"', b'"instance":"\xff'), None, "is damaged"),
        (
            lambda good: good.ljust(MAX_NOTICES_FILE_BYTES + 1, b"\n"),
            None,
            f"larger than {MAX_NOTICES_FILE_BYTES} bytes",
        ),
        (lambda good: b"", None, "notices"),
        (lambda good: b"rubbish\n", None, "notices"),
        (lambda good: b"{}\n", None, "notices"),
        (lambda good: b"\xff" * 100, None, "notices"),
    ],
)
def test_of_a_spoilt_file_what_is_intact_counts(
    tmp_path: Path, opened: Opened, spoilt: Callable[[bytes], bytes], kept: int | None, said: str
) -> None:
    notices, _, _ = opened(tmp_path)
    add(notices, 1)
    add(notices, 2)
    path = tmp_path / "notices"
    path.write_bytes(spoilt(path.read_bytes()))
    found, _, problem = opened(tmp_path)
    assert said in problem if said else not problem
    assert len(found.notices_after()) == (kept or 0)
    assert (found.instance == notices.instance) is (kept is not None)
    add(found, 3)
    again, _, problem = opened(tmp_path)
    assert (again.instance, again.notices_after(), problem) == (
        found.instance,
        found.notices_after(),
        "",
    )


def test_after_a_reboot_a_new_sequence_begins(tmp_path: Path, opened: Opened) -> None:
    notices, _, _ = opened(tmp_path)
    add(notices)
    again, _, problem = opened(tmp_path, {**IDENTITY, "boot": "another"})
    assert problem == ""
    assert again.instance != notices.instance
    assert again.notices_after() == []


def test_a_fifo_or_a_link_is_not_read(tmp_path: Path, opened: Opened) -> None:
    os.mkfifo(tmp_path / "notices")
    assert "expected a regular file" in opened(tmp_path)[2]
    (tmp_path / "notices").unlink()
    (tmp_path / "notices").symlink_to("/etc/passwd")
    assert "cannot be read" in opened(tmp_path)[2]


def test_the_file_stays_small(tmp_path: Path, opened: Opened) -> None:
    notices, _, _ = opened(tmp_path, limit=4)
    for n in range(5000):
        add(notices, n % 4)
    assert (tmp_path / "notices").stat().st_size < 1 << 20
    again, _, _ = opened(tmp_path, limit=4)
    assert [one.count for one in again.notices_after()] == [1250] * 4


def test_a_directory_that_is_not_ours_alone_is_not_written(tmp_path: Path, opened: Opened) -> None:
    notices, _, problem = opened(tmp_path, writable=False)
    assert problem == ""
    assert len(notices.instance) == 8
    add(notices)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once(tmp_path: Path, opened: Opened) -> None:
    told: list[str] = []
    missing = tmp_path / "missing"
    notices, _, _ = opened(missing, trouble=told.append)
    add(notices, 1)
    add(notices, 2)
    assert len(told) == 1
    assert "cannot be written" in told[0]
    missing.mkdir()
    add(notices, 3)
    assert len(opened(missing)[0].notices_after()) == 3


def test_a_link_where_the_new_file_is_made_is_not_followed(tmp_path: Path, opened: Opened) -> None:
    told: list[str] = []
    theirs = tmp_path / "theirs"
    theirs.write_text("precious")
    (tmp_path / "notices.tmp").symlink_to(theirs)
    opened(tmp_path, trouble=told.append)
    assert told == []
    assert theirs.read_text() == "precious"
    assert not (tmp_path / "notices").is_symlink()


def test_a_disk_that_fills_is_said_with_the_first_notice_that_is_not_kept(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    notices, _, _ = opened(tmp_path, trouble=told.append)
    broken = BrokenOS()
    monkeypatch.setattr(module, "os", broken)
    for n, most in enumerate((None, 9)):
        broken.failing, broken.write_at_most = {} if most else {"write": errno.ENOSPC}, most
        add(notices, 2 * n)
        assert len(told) == n + 1
        assert "No space left on device" in told[-1]
        add(notices, 2 * n + 1)
        assert len(told) == n + 1
        broken.failing, broken.write_at_most = {}, None
        add(notices, 2 * n)
    assert len(opened(tmp_path)[0].notices_after()) == 4
