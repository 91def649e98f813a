"""The checkpoint store: whatever happens to the file or to us, nothing intact is lost."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

import pytest

from nri_numa.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew, StateDirectoryBusy
from nri_numa.store import checkpoint, files
from nri_numa.store.checkpoint import CheckpointStore, read_checkpoint
from tests.beds.stores import IDENTITY, BrokenOS, StateDirectoryBed, Stores

GOLDEN = Path(__file__).parents[2] / "golden" / "checkpoints"


def healthy(store: CheckpointStore) -> bool:
    """Ask anew: mypy takes a property for something that does not change."""
    return store.is_healthy


@pytest.fixture(autouse=True)
def as_the_product_writes() -> Iterator[None]:
    """What these tests put down is the owner's alone, as what the product puts down."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture(name="node")
def _node(tmp_path: Path, stores: Stores) -> StateDirectoryBed:
    return StateDirectoryBed(tmp_path / "state", stores)


# --- the ordinary -----------------------------------------------------------------------------


def test_what_was_recorded_is_there_after_a_restart(node: StateDirectoryBed) -> None:
    store, loaded = node.start()
    assert (loaded.entries, loaded.problems) == ({}, [])
    store.append_documents({"a": {"cpus": "0-1", "näme": "→"}, "b": {"cpus": ""}})
    store.append_documents({"a": None, "c": {"deep": [{"x": None, "y": 1.5}]}})
    assert healthy(store)
    for _ in range(3):
        store, loaded = node.start()
        assert loaded.entries == {"b": {"cpus": ""}, "c": {"deep": [{"x": None, "y": 1.5}]}}
        assert loaded.problems == []
    assert node.kept() == {}


def test_the_caller_may_change_its_document_afterwards(node: StateDirectoryBed) -> None:
    store, _ = node.start()
    document = {"cpus": "0"}
    store.append_documents({"a": document})
    document["cpus"] = "changed"
    store.compact_if_needed()
    assert node.start()[1].entries == {"a": {"cpus": "0"}}


def test_recording_nothing_writes_nothing(node: StateDirectoryBed) -> None:
    store, _ = node.start()
    before = node.file.read_bytes()
    store.append_documents({})
    assert node.file.read_bytes() == before
    store.append_documents({"unknown": None})
    assert node.start()[1].entries == {}


def test_one_request_is_one_line_and_one_write(node: StateDirectoryBed) -> None:
    store, _ = node.start()
    before = node.file.read_bytes()
    store.append_documents({"a": {"n": 1}, "b": None})
    added = node.file.read_bytes().removeprefix(before)
    assert added.count(b"\n") == 1
    assert added.endswith(b'{"set":{"a":{"n":1}},"del":["b"]}\n')


def test_a_new_version_takes_over_the_old_ones_checkpoint(node: StateDirectoryBed) -> None:
    node.recorded()
    _, loaded = node.start(version="0.2.0")
    assert loaded.entries == {"a": {"n": 1}}
    assert loaded.problems == []
    assert loaded.head["version"] == "0.1.0"
    assert read_checkpoint(str(node.file)).head["version"] == "0.2.0"


def test_the_files_are_for_the_agents_user_only(node: StateDirectoryBed) -> None:
    store, _ = node.start()
    store.append_documents({"a": {}})
    assert node.directory.stat().st_mode & 0o777 == 0o700
    assert node.file.stat().st_mode & 0o777 == 0o600


# --- compaction -------------------------------------------------------------------------------


def test_the_journal_shrinks_when_it_has_outgrown_what_it_says(node: StateDirectoryBed) -> None:
    store, _ = node.start()
    assert not store.compact_if_needed()
    for number in range(2000):
        store.append_documents({"a": {"n": number, "filler": "x" * 50}})
    grown = node.file.stat().st_size
    assert store.compact_if_needed()
    assert node.file.stat().st_size < grown / 100
    assert not store.compact_if_needed()
    store.append_documents({"b": {"n": 1}})
    _, loaded = node.start()
    assert loaded.entries == {"a": {"n": 1999, "filler": "x" * 50}, "b": {"n": 1}}


def test_a_journal_grows_to_four_times_what_it_says(node: StateDirectoryBed) -> None:
    filler = {"filler": "x" * 30_000}
    node.start()[0].append_documents({"a": filler})
    store, _ = node.start()
    compacted: list[bool] = []
    for _ in range(4):
        store.append_documents({"a": filler})
        compacted.append(store.compact_if_needed())
    assert compacted == [False, False, False, True]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_taken_away_is_written_again(node: StateDirectoryBed, replaced: bool) -> None:
    store = node.recorded()
    node.file.unlink()
    if replaced:
        node.file.write_text("somebody else's\n")
        assert store.compact_if_needed()
    else:
        store.append_documents({"b": {"n": 2}})
        assert healthy(store)
    assert read_checkpoint(str(node.file)).entries.keys() >= {"a"}


def test_a_directory_taken_away_is_made_anew_with_its_lock(node: StateDirectoryBed) -> None:
    """A lock on a file without a name would keep no other agent out."""
    store = node.recorded()
    node.file.unlink()
    (node.directory / "lock").unlink()
    node.directory.rmdir()
    store.append_documents({"b": {"n": 2}})
    assert healthy(store)
    assert read_checkpoint(str(node.file)).entries == {"a": {"n": 1}, "b": {"n": 2}}
    with pytest.raises(StateDirectoryBusy):
        node.store().load()


# --- what is wrong with a file ----------------------------------------------------------------


def journal(node: StateDirectoryBed) -> bytes:
    store = node.recorded()
    store.append_documents({"b": {"n": 2}})
    store.append_documents({"c": {"n": 3}, "a": None})
    store.close()
    return node.file.read_bytes()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data.replace(b'"n":2', b'"n":7'), "line 3 is damaged"),
        (lambda data: re.sub(rb'.*"n":2.*\n', b"", data), "line 3 has number 4 instead of 3"),
    ],
)
def test_damage_in_the_middle_costs_one_line_and_is_kept_aside(
    node: StateDirectoryBed, spoil: Callable[[bytes], bytes], said: str
) -> None:
    spoilt = spoil(journal(node))
    node.file.write_bytes(spoilt)
    _, loaded = node.start()
    assert loaded.entries == {"c": {"n": 3}}
    assert said in loaded.problems[0]
    assert "checkpoint.corrupt-1" in loaded.problems[1]
    assert node.kept() == {"checkpoint.corrupt-1": spoilt}
    # The second start finds a clean file.
    assert node.start()[1].problems == []


def framed(number: int, payload: bytes, version: int = 1) -> bytes:
    front = b"%d %d %d " % (version, number, len(payload))
    return b"%b%08x %b\n" % (front, crc32(payload, crc32(front)), payload)


HEAD = framed(1, json.dumps({"head": IDENTITY, "at": 1.0}).encode())


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"[]", "line 2 is intact but not a record"),
        (b'{"set":[]}', "line 2 is intact but not a record"),
        (b'{"set":{"\xff":{}}}', "line 2 is intact but not a record"),
        (b'{"set":{"x":{"\xff":1}}}', "the entry of container x is left out"),
        (
            b'{"set":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
            "line 2 is intact but|container x is left out",
        ),  # Python 3.14 reads so deep ones
        (b'{"set":{"x":7}}', "the entry of container x is left out"),
    ],
)
def test_intact_nonsense_is_left_out(node: StateDirectoryBed, payload: bytes, said: str) -> None:
    node.directory.mkdir()
    node.file.write_bytes(HEAD + framed(2, payload) + framed(3, b'{"set":{"a":{"n":1}}}'))
    store, loaded = node.start()
    assert loaded.entries == {"a": {"n": 1}}
    assert re.search(said, "; ".join(loaded.problems))
    store.append_documents({"b": {}})
    assert node.start()[1].entries == {"a": {"n": 1}, "b": {}}


@pytest.mark.parametrize(
    ("data", "said", "kind"),
    [
        (b"", "is not a checkpoint", CheckpointCorrupt),
        (b"\x00" * 4096, "is not a checkpoint", CheckpointCorrupt),
        (b'{"policyName":"static"}', "is not a checkpoint", CheckpointCorrupt),
        (b"1 1 5 00000000 {}\n", "is not a checkpoint", CheckpointCorrupt),
        (framed(1, b'{"set":{"a":{}}}'), "is not a checkpoint", CheckpointCorrupt),
        # What a later line says of its writer does not count: it may be of another journal.
        (b"1 rubbish\n" * 2 + HEAD, "is not a checkpoint", CheckpointCorrupt),
        (framed(1, b'{"head":{"boot":"b1"}}', version=3), "is in format 3", CheckpointTooNew),
        (b"7 whatever comes then\n", "is in format 7", CheckpointTooNew),
    ],
)
def test_what_is_no_checkpoint_of_ours_is_said_and_kept_aside(
    node: StateDirectoryBed, data: bytes, said: str, kind: type[CheckpointError]
) -> None:
    node.directory.mkdir()
    node.file.write_bytes(data)
    with pytest.raises(kind, match=said):
        read_checkpoint(str(node.file))
    store, loaded = node.start()
    assert loaded.entries == {}
    assert said in loaded.problems[0]
    assert node.kept() == {"checkpoint.corrupt-1": data}
    assert healthy(store)
    store.append_documents({"a": {"n": 1}})
    assert node.start()[1].entries == {"a": {"n": 1}}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"boot": "b2"}, "its boot is 'b1', expected 'b2'"),
        ({}, {"machine": "x" * 1000}, "its machine is 'two sockets', expected 'xxx"),
        ({"machine": "a" * 99}, {}, f"its machine is '{'a' * 60}'…, expected 'two sockets'"),
        ({}, {"cluster": "c1"}, "its cluster is missing, expected 'c1'"),
    ],
)
def test_a_checkpoint_of_another_machine_or_boot_is_not_used(
    node: StateDirectoryBed, before: dict[str, str], now: dict[str, str], said: str
) -> None:
    store, _ = node.start(**before)
    store.append_documents({"a": {"n": 1}})
    data = node.file.read_bytes()
    _, loaded = node.start(**now)
    assert loaded.entries == {}
    assert "another machine or boot" in loaded.problems[0]
    assert said in loaded.problems[0]
    assert len(loaded.problems[0]) < 500
    assert node.kept() == ({} if list(now) == ["boot"] else {"checkpoint.corrupt-1": data})


def test_kept_files_are_never_overwritten(node: StateDirectoryBed) -> None:
    node.directory.mkdir()
    (node.directory / "checkpoint.corrupt-9").write_text("old")
    (node.directory / "checkpoint.corrupt-x").write_text("not ours")
    for text in ("first", "second"):
        node.file.unlink(missing_ok=True)
        node.file.write_text(text)
        node.start()
    assert {name: data.decode() for name, data in node.kept().items()} == {
        "checkpoint.corrupt-9": "old",
        "checkpoint.corrupt-x": "not ours",
        "checkpoint.corrupt-10": "first",
        "checkpoint.corrupt-11": "second",
    }


def test_sixty_four_mebibytes_are_read_and_not_a_byte_more(node: StateDirectoryBed) -> None:
    """10,000 containers are 10 MB, and a journal grows to four times that."""
    node.directory.mkdir()
    with pytest.raises(CheckpointError, match="cannot read: No such file"):
        read_checkpoint(str(node.file))
    with node.file.open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(CheckpointError, match="is larger than 67108864 bytes"):
        read_checkpoint(str(node.file))
    os.truncate(node.file, 64 << 20)
    with pytest.raises(CheckpointCorrupt, match="is not a checkpoint"):
        read_checkpoint(str(node.file))
    os.truncate(node.file, 1 << 40)
    assert "is larger than 67108864 bytes" in node.start()[1].problems[0]


def test_reading_beside_a_running_agent_changes_nothing(node: StateDirectoryBed) -> None:
    node.recorded()
    with node.file.open("ab") as file:
        file.write(b"1 4 unfini")
    before = node.file.read_bytes()
    found = read_checkpoint(str(node.file))
    assert (found.entries, found.records) == ({"a": {"n": 1}}, 2)
    assert found.written_at == 1_700_000_000.0
    assert found.problems == ["the last 10 bytes are an unfinished record"]
    assert node.file.read_bytes() == before


# --- what is wrong with the directory ---------------------------------------------------------


@pytest.mark.parametrize("pod", ["", "numa/nri-numa-x7k2p"])
def test_two_agents_at_once_are_rejected_by_the_name_of_the_first(
    node: StateDirectoryBed, monkeypatch: pytest.MonkeyPatch, pod: str
) -> None:
    for name, value in zip(("POD_NAMESPACE", "POD_NAME"), pod.split("/"), strict=False):
        monkeypatch.setenv(name, value)
    store, _ = node.start()
    second = node.store()
    owner = f"pod {pod}" if pod else f"process {os.getpid()}"
    with pytest.raises(StateDirectoryBusy, match=f": {owner} uses this state") as caught:
        second.load()
    assert (caught.value.owner, caught.value.reason) == (owner, "StateDirectoryBusy")
    store.close()
    assert second.load().problems == []


def test_a_lock_without_a_number_still_locks(node: StateDirectoryBed) -> None:
    node.start()
    (node.directory / "lock").write_text("")
    with pytest.raises(StateDirectoryBusy, match="another process uses"):
        node.store().load()


def test_a_path_below_a_file_leaves_the_store_in_memory(tmp_path: Path, stores: Stores) -> None:
    (tmp_path / "file").write_text("")
    node = StateDirectoryBed(tmp_path / "file" / "state", stores)
    store, loaded = node.start()
    assert "not a directory, choose another directory with --state-dir" in loaded.problems[0]
    assert "in memory only" in loaded.problems[0]
    assert not healthy(store)
    with pytest.raises(CheckpointError, match="--state-dir"):
        store.append_documents({"a": {"n": 1}})
    with pytest.raises(CheckpointError, match="--state-dir"):
        store.compact_if_needed()
    (tmp_path / "file").unlink()
    store.append_documents({"b": {"n": 2}})
    assert healthy(store)
    assert store.error is None
    assert read_checkpoint(str(node.file)).entries == {"a": {"n": 1}, "b": {"n": 2}}


@pytest.fixture(name="broken")
def _broken(monkeypatch: pytest.MonkeyPatch) -> BrokenOS:
    broken = BrokenOS()
    for module in (checkpoint, files):
        monkeypatch.setattr(module, "os", broken)
    return broken


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
        (errno.EIO, "look at that file system"),
    ],
)
def test_a_failing_write_is_told_with_its_remedy_and_made_up_for(
    node: StateDirectoryBed, broken: BrokenOS, number: int, remedy: str
) -> None:
    store, _ = node.start()
    store.append_documents({"a": {"n": 1}, "b": {"n": 1}})
    broken.failing = {"write": number}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=remedy):
            store.append_documents({"a": None, "c": {"n": 3}})
    assert not healthy(store)
    assert read_checkpoint(str(node.file)).entries == {"a": {"n": 1}, "b": {"n": 1}}
    with pytest.raises(CheckpointError, match=remedy):
        store.compact_if_needed()
    broken.failing = {}
    assert store.compact_if_needed()  # by itself; the next test records instead
    assert healthy(store)
    store.append_documents({"d": {"n": 4}})
    _, loaded = node.start()
    assert loaded.entries == {"b": {"n": 1}, "c": {"n": 3}, "d": {"n": 4}}
    assert loaded.problems == []


@pytest.mark.parametrize("failing", [{}, {"ftruncate": errno.EIO}])
def test_half_a_line_written_on_a_full_disk_is_taken_back(
    node: StateDirectoryBed, broken: BrokenOS, failing: dict[str, int]
) -> None:
    store = node.recorded()
    broken.write_at_most, broken.failing = 10, failing
    with pytest.raises(CheckpointError, match="No space left on device; free space"):
        store.append_documents({"b": {"n": 2}})
    broken.write_at_most, broken.failing = None, {}
    store.append_documents({"c": {"n": 3}})
    assert healthy(store)
    _, loaded = node.start()
    assert loaded.entries == {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}
    assert loaded.problems == []


def test_a_slow_device_that_takes_a_few_bytes_at_a_time_gets_a_whole_snapshot(
    node: StateDirectoryBed, broken: BrokenOS
) -> None:
    broken.write_at_most = 7
    store, _ = node.start()
    assert healthy(store)
    assert read_checkpoint(str(node.file)).head == IDENTITY


def test_a_directory_that_may_be_read_but_not_written_still_tells_what_was_meant(
    node: StateDirectoryBed, broken: BrokenOS
) -> None:
    journal(node)
    # The lock cannot be opened for writing; the journal can be read.
    real_open = os.open

    def read_only(path: str, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *mode)

    broken.open = read_only  # type: ignore[attr-defined]
    store, loaded = node.start()
    assert loaded.entries.keys() == {"b", "c"}
    assert "read-only" in loaded.problems[0]
    assert not healthy(store)


@pytest.mark.parametrize("call", ["rename", "link"])
def test_a_file_system_that_lacks_a_call_leaves_the_old_or_the_new_file(
    node: StateDirectoryBed, broken: BrokenOS, call: str
) -> None:
    data = journal(node)
    node.file.write_bytes(data.replace(b'"n":2', b'"n":7'))
    broken.failing = {call: errno.EPERM}
    _, loaded = node.start()
    assert loaded.entries == {"c": {"n": 3}}
    broken.failing = {}
    assert node.start()[1].entries == {"c": {"n": 3}}


def test_failing_to_name_the_owner_is_no_failure(node: StateDirectoryBed, broken: BrokenOS) -> None:
    broken.failing = {"pwrite": errno.ENOSPC}
    store, loaded = node.start()
    assert loaded.problems == []
    assert healthy(store)


WITHOUT_INPUT = """
import errno, os, sys
from nri_numa.errors import CheckpointError
from nri_numa.store.checkpoint import CheckpointStore, read_checkpoint

def store(name):
    return CheckpointStore(
        os.path.join(sys.argv[1], name), identity={"version": "0.1.0"}, clock=lambda: 0.0
    )

def free():
    try:
        os.fstat(0)
    except OSError:
        return True
    return False

os.close(0)
first = store("lock")
first.load()
assert first.has_lock and not free(), "the lock has the first free number"
first.close()
assert free(), "and gives it back"

os.open(os.devnull, os.O_RDONLY)
second = store("journal")
second.load()
os.close(0)
os.unlink(second.path)
real, os.rename = os.rename, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
try:
    second.compact_if_needed()
except CheckpointError:
    pass
else:
    raise AssertionError("a full disk")
assert free(), "what was not finished is closed"
os.rename = real
assert second.compact_if_needed() and not free()
assert second.is_healthy
os.unlink(second.path)
second.append_documents({"a": {"n": 1}})
assert read_checkpoint(second.path).entries == {"a": {"n": 1}}, "a journal taken away is noticed"
print("good")
"""


def test_an_agent_started_without_an_input_keeps_its_state(node: StateDirectoryBed) -> None:
    """`nri-numa run <&-`: the kernel gives the number 0 to a file of ours."""
    command = [sys.executable, "-c", WITHOUT_INPUT, str(node.directory)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.stdout == "good\n", done.stderr


def test_a_descriptor_that_went_bad_is_replaced(node: StateDirectoryBed, broken: BrokenOS) -> None:
    store, _ = node.start()
    broken.failing = {"lstat": errno.EIO}
    assert store.compact_if_needed()
    broken.failing = {}
    store.append_documents({"a": {"n": 1}})
    assert node.start()[1].entries == {"a": {"n": 1}}


# --- golden files -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("v*/*.checkpoint")), ids=lambda p: p.stem)
def test_the_checkpoints_of_every_version_load(node: StateDirectoryBed, path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    node.directory.mkdir()
    node.file.write_bytes(path.read_bytes())
    _, loaded = node.start()
    assert loaded.entries == expected["entries"]
    assert list(loaded.entries) == list(expected["entries"])
    assert len(loaded.problems) == len(expected["problems"])
    for problem, said in zip(loaded.problems, expected["problems"], strict=True):
        assert said in problem
