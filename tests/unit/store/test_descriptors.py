"""An agent runs for months: whatever a store does to its files, no descriptor stays behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nri_numa.errors import CheckpointError
from nri_numa.observe.notices import Notices
from nri_numa.store import notices as notices_module
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.files import KEY, signing_key
from nri_numa.store.notices import NoticeFile
from tests.unit.observe.test_notices import Clock, add

IDENTITY = {"version": "1", "boot": "b", "machine": "/"}


def opened(directory: Path) -> list[str]:
    """The files below a directory that this process has open, deleted ones too."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # of the listing itself
            continue
        if name.startswith(f"{directory}/"):
            found.append(name.removeprefix(f"{directory}/"))
    return sorted(found)


def test_a_file_of_notices_that_is_written_anew_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is written anew after as many lines as said, not at each of them."""
    monkeypatch.setattr(notices_module, "_GROWN", 4)
    notices = Notices(Clock(), 256)
    file = NoticeFile(str(tmp_path), identity=IDENTITY, notices=notices, trouble=print)
    file.open()
    files = []
    for n in range(8):
        add(notices, n)
        assert opened(tmp_path) == ["notices"]
        files.append((tmp_path / "notices").stat().st_ino)
    assert len(set(files[:4])) == 1
    assert files[4] != files[3]
    file.close()
    file.close()
    assert opened(tmp_path) == []


def test_a_checkpoint_leaves_files_that_are_gone(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    store = CheckpointStore(str(directory), identity=IDENTITY, clock=lambda: 0.0)
    store.load()
    for n in range(3):
        store.record({f"c/{n}": {"n": n}})
        assert opened(directory) == ["checkpoint", "lock"]
        (directory / "checkpoint").unlink()
        store.compact_if_needed()
        assert opened(directory) == ["checkpoint", "lock"]
    shutil.rmtree(directory)
    store.record({"c/9": {"n": 9}})
    assert opened(directory) == ["checkpoint", "lock"]
    store.close()
    store.close()
    assert opened(directory) == []


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_open(tmp_path: Path) -> None:
    """A directory is where the new journal would be written."""
    (tmp_path / "checkpoint.tmp").mkdir()
    (tmp_path / "checkpoint.tmp" / "full").touch()
    store = CheckpointStore(str(tmp_path), identity=IDENTITY, clock=lambda: 0.0)
    store.load()
    for n in range(3):
        with pytest.raises(CheckpointError):
            store.record({f"c/{n}": {"n": n}})
    assert opened(tmp_path) == ["lock"]
    store.close()
    assert opened(tmp_path) == []


def test_a_key_is_made_and_read_without_a_descriptor_left(tmp_path: Path) -> None:
    made, problems = signing_key(str(tmp_path), trusted=True, writable=True)
    assert problems == []
    assert signing_key(str(tmp_path), trusted=True, writable=True) == (made, [])
    (tmp_path / KEY).write_text("no key")
    assert signing_key(str(tmp_path), trusted=True, writable=False)[0] != made
    assert opened(tmp_path) == []
