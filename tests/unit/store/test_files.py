"""What lies in the state directory and is not ours: refused in a sentence, never waited for."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_numa.agent import preflight
from nri_numa.errors import CheckpointError
from nri_numa.store.checkpoint import CheckpointStore, JournalContents, read_checkpoint
from nri_numa.store.files import (
    SIGNING_KEY_FILE_NAME,
    directory_problem,
    file_obstacle,
    load_or_create_signing_key,
    read_key,
)
from tests.beds.stores import StateDirectoryBed, Stores

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="giving files to other users needs root")


@pytest.fixture
def state(tmp_path: Path, stores: Stores) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


Start = Callable[[], tuple[CheckpointStore, JournalContents]]


@pytest.fixture
def start(state: Path, stores: Stores) -> Start:
    return StateDirectoryBed(state, stores).start


SORTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (lambda path: os.mkfifo(path, 0o600), "is a FIFO, expected a regular file"),
    "directory": (lambda path: path.mkdir(), "is a directory, expected a regular file"),
    "link": (lambda path: path.symlink_to("/etc/passwd"), "symbolic link"),
    "device": (
        lambda path: os.mknod(path, 0o20600, os.makedev(1, 5)),
        "is a character device, expected a regular file",
    ),
}


def planted(sort: str, path: Path) -> str:
    make, said = SORTS[sort]
    try:
        make(path)
    except PermissionError:
        pytest.skip("no device can be made here")
    return said


@pytest.mark.parametrize("sort", SORTS)
def test_what_is_no_file_in_place_of_the_checkpoint(state: Path, start: Start, sort: str) -> None:
    """It is named and put aside, nobody waits for it, and the state is durable again."""
    said = planted(sort, state / "checkpoint")
    with pytest.raises(CheckpointError, match=said):
        read_checkpoint(str(state / "checkpoint"))
    store, loaded = start()
    assert said in loaded.problems[0]
    assert str(state / "checkpoint") in loaded.problems[0]
    assert os.path.lexists(state / "checkpoint.corrupt-1")
    store.append_documents({"a": {"n": 1}})
    assert start()[1].entries == {"a": {"n": 1}}


@pytest.mark.parametrize("sort", SORTS)
def test_what_is_no_file_in_place_of_the_lock(state: Path, start: Start, sort: str) -> None:
    """Without a lock nothing is written; as soon as it is gone, all of it is."""
    said = planted(sort, state / "lock")
    store, loaded = start()
    assert "in memory only" in loaded.problems[0]
    if sort != "directory":
        assert said in loaded.problems[0]
    assert not store.has_lock
    with pytest.raises(CheckpointError):
        store.append_documents({"a": {"n": 1}})
    if sort == "directory":
        (state / "lock").rmdir()
    else:
        (state / "lock").unlink()
    store.append_documents({"b": {"n": 2}})
    assert store.has_lock
    assert start()[1].entries == {"a": {"n": 1}, "b": {"n": 2}}
    assert Path("/etc/passwd").stat().st_size


@pytest.mark.parametrize("sort", ["fifo", "link", "device"])
def test_what_is_no_file_in_the_temporary_place(state: Path, start: Start, sort: str) -> None:
    """A new file is made, through which nothing else is written."""
    planted(sort, state / "checkpoint.tmp")
    store, loaded = start()
    assert loaded.problems == []
    assert store.is_healthy


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_directory_others_may_write_is_not_used(state: Path, start: Start, mode: int) -> None:
    """Nothing in it is believed and nothing is written, until only its owner may write there."""
    store, _ = start()
    store.append_documents({"a": {"n": 1}})
    state.chmod(mode)
    store, loaded = start()
    assert loaded.entries == {}
    (problem,) = loaded.problems
    assert problem.startswith(f"{state}: has mode {mode:04o}, expected one that only its owner")
    assert "chmod" in problem
    assert not store.trusted
    with pytest.raises(CheckpointError, match="has mode"):
        store.append_documents({"b": {"n": 2}})
    state.chmod(0o755)
    store.append_documents({"c": {"n": 3}})
    assert store.is_healthy
    assert start()[1].entries == {"b": {"n": 2}, "c": {"n": 3}}
    assert (state / "checkpoint.corrupt-1").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            lambda state: os.chown(state, 1234, 0), "user 1234, expected root", marks=ROOT
        ),
        # Another user's file in a directory of ours, as after a careless copy.
        pytest.param(
            lambda state: os.chown(state / "checkpoint", 1234, 0),
            "user 1234, expected root",
            marks=ROOT,
        ),
        (
            lambda state: (state / "checkpoint").chmod(0o666),
            "has mode 0666, expected one that only its owner may write",
        ),
    ],
)
def test_what_others_may_have_written_is_not_used(
    state: Path, start: Start, change: Callable[[Path], None], said: str
) -> None:
    store, _ = start()
    store.append_documents({"a": {"n": 1}})
    change(state)
    assert read_checkpoint(str(state / "checkpoint")).entries  # a command only shows it
    _, loaded = start()
    assert said in loaded.problems[0]
    assert loaded.entries == {}


def test_other_users_expect_themselves_or_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """What root left is as good as their own, and a third one's is as strange as to root."""
    roots, mine, status = (
        os.stat_result((0o100600, 0, 0, 1, owner, 0, 0, 0, 0, 0)) for owner in (0, 1000, 77)
    )
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert file_obstacle(roots) == file_obstacle(mine) == ""
    assert file_obstacle(status) == "belongs to user 77, expected user 1000 or root"
    assert file_obstacle(status, check_owner=False) == ""
    assert directory_problem(status) == "is a regular file, expected a directory"


MEASURE = """
import resource, sys
from nri_numa.store.checkpoint import CheckpointStore
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = CheckpointStore(sys.argv[1], identity={"version": "1"}, clock=lambda: 1.0)
problems = store.load().problems
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) // 1024, len(" ".join(problems)), problems[0])
"""


@pytest.mark.parametrize("beginning", [b"", b"1 1 40 "])
@pytest.mark.parametrize("headed", [False, True])
def test_20_mb_of_line_ends(state: Path, start: Start, beginning: bytes, headed: bool) -> None:
    """Less memory than a few copies of the file, and a sentence that can be read."""
    first = b""
    if headed:
        start()[0].close()
        first = (state / "checkpoint").read_bytes()
    (state / "checkpoint").write_bytes(first + beginning + b"\n" * 20_000_000)
    command = [sys.executable, "-c", MEASURE, str(state)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    mebibytes, length, said = done.stdout.split(" ", 2)
    assert int(mebibytes) < 64
    assert int(length) < 1000
    assert "checkpoint" in said


def test_much_damage_ends_the_reading(state: Path, start: Start) -> None:
    store, _ = start()
    store.append_documents({"a": {"n": 1}})
    store.close()
    file = state / "checkpoint"
    file.write_bytes(file.read_bytes() + b"x\n" * 5000)
    loaded = read_checkpoint(str(file))
    assert loaded.entries == {"a": {"n": 1}}
    assert len(loaded.problems) == 1001
    assert loaded.problems[-1] == "everything from line 1003 on is not read"


# --- the key ------------------------------------------------------------------------------------


def key_of(state: Path, *, trusted: bool = True, writable: bool = True) -> tuple[bytes, list[str]]:
    return load_or_create_signing_key(str(state), trusted=trusted, writable=writable)


def test_the_key_is_made_once_and_for_the_owner_only(state: Path) -> None:
    assert read_key(str(state)) == b""
    key, problems = key_of(state)
    assert (len(key), problems) == (32, [])
    assert (state / SIGNING_KEY_FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert key_of(state) == (key, [])
    assert key_of(state, writable=False) == (key, [])
    assert read_key(str(state)) == key


@pytest.mark.parametrize(("trusted", "writable"), [(False, False), (False, True), (True, False)])
def test_without_a_directory_a_key_ends_with_us(state: Path, trusted: bool, writable: bool) -> None:
    first, problems = key_of(state, trusted=trusted, writable=writable)
    assert problems == []
    assert not list(state.iterdir())
    assert key_of(state, trusted=trusted, writable=writable)[0] != first


def test_a_key_that_lies_in_an_untrusted_directory_is_not_used(state: Path) -> None:
    key, _ = key_of(state)
    assert key_of(state, trusted=False)[0] != key


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "is not a key, expected 64 hexadecimal digits"),
        (b"zz" * 32, 0o600, "is not a key"),
        (b"\xff" * 64, 0o600, "is not a key"),
        (b"ab" * 400_000, 0o600, "is larger than 128 bytes"),
        (b"ab" * 32, 0o644, "has mode 0644, expected one that is for its owner only"),
    ],
)
def test_an_unusable_key_is_replaced(state: Path, content: bytes, mode: int, said: str) -> None:
    (state / SIGNING_KEY_FILE_NAME).write_bytes(content)
    (state / SIGNING_KEY_FILE_NAME).chmod(mode)
    key, (problem,) = key_of(state)
    assert problem.startswith(f"{state / SIGNING_KEY_FILE_NAME}: {said}")
    assert key.hex().encode() != content
    assert key_of(state) == (key, [])


@pytest.mark.parametrize("sort", ["fifo", "link", "device"])
def test_what_is_no_file_in_place_of_the_key_is_replaced(state: Path, sort: str) -> None:
    said = planted(sort, state / SIGNING_KEY_FILE_NAME)
    os.symlink("/etc/passwd", state / "key.tmp")
    key, (problem,) = key_of(state)
    assert said in problem or "symbolic links" in problem
    assert key_of(state) == (key, [])
    assert Path("/etc/passwd").is_file()


def test_a_key_that_cannot_be_written_is_said(state: Path) -> None:
    (state / SIGNING_KEY_FILE_NAME).mkdir()
    key, problems = key_of(state)
    assert len(key) == 32
    assert "is a directory" in problems[0]
    assert "the key is lost when this process ends" in problems[1]


# --- check --------------------------------------------------------------------------------------


def test_check_names_a_state_directory_that_others_may_write(state: Path) -> None:
    state.chmod(0o777)
    (found,) = preflight.check_state_directory(state)
    assert found.level is preflight.FindingLevel.FAIL
    assert "has mode 0777" in found.message
