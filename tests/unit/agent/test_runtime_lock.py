"""Who works on a runtime is seen across state directories, and by nobody's file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nri_numa.agent.runtime_lock import RuntimeLock, holder
from nri_numa.errors import RuntimeBusy


def claim(directory: Path) -> RuntimeLock:
    """A claim on the runtime whose socket lies in a directory."""
    return RuntimeLock(str(directory / "nri.sock"))


def test_agents_share_a_runtime_and_a_release_wants_it_alone(tmp_path: Path) -> None:
    first, second, release = claim(tmp_path), claim(tmp_path), claim(tmp_path)
    assert first.share()
    assert second.share()
    with pytest.raises(RuntimeBusy, match="stop it first"):
        release.alone()
    first.close()
    with pytest.raises(RuntimeBusy):
        release.alone()
    second.close()
    release.alone()
    assert not first.share()
    release.close()
    assert first.share()
    assert first.share()  # asking again changes nothing
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_two_releases_do_not_run_at_once(tmp_path: Path) -> None:
    first, second = claim(tmp_path), claim(tmp_path)
    first.alone()
    with pytest.raises(RuntimeBusy):
        second.alone()
    first.close()


def test_runtimes_in_different_directories_know_nothing_of_each_other(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = claim(tmp_path / "a"), claim(tmp_path / "b")
    assert here.share()
    there.alone()
    here.close()
    there.close()


def test_a_directory_that_comes_later_or_anew_is_held_when_it_is_there(tmp_path: Path) -> None:
    """A runtime makes its directory when it starts for the first time."""
    directory = tmp_path / "nri"
    agent, release = claim(directory), claim(directory)
    assert not agent.share()
    release.alone()  # nothing there that anybody could hold
    release.close()
    directory.mkdir()
    assert agent.share()
    directory.rename(tmp_path / "old")
    assert not agent.share()
    directory.mkdir()
    assert agent.share()
    with pytest.raises(RuntimeBusy):
        release.alone()
    agent.close()


def test_the_holder_is_named_where_the_kernel_tells(tmp_path: Path) -> None:
    status = tmp_path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    locks = tmp_path / "locks"
    locks.write_text(
        "1: POSIX  ADVISORY  WRITE 7 00:19:5 0 EOF\n"
        f"2: FLOCK  ADVISORY  READ 0 {device}:{status.st_ino} 0 EOF\n"
        f"3: FLOCK  ADVISORY  READ 4711 {device}:{status.st_ino} 0 EOF\n"
    )
    assert holder(str(tmp_path), str(locks)) == 4711
    locks.write_text("nonsense\n")
    assert holder(str(tmp_path), str(locks)) is None
    assert holder(str(tmp_path), str(tmp_path / "absent")) is None
    assert holder(str(tmp_path / "absent"), str(locks)) is None
