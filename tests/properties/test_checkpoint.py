"""Whatever is cut, flipped or killed: no intact record is lost, and nothing raises."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nri_numa.store import checkpoint, files
from nri_numa.store.checkpoint import CheckpointStore, JournalContents

State = dict[str, dict[str, Any]]
Step = dict[str, dict[str, Any] | None]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
documents = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
steps = st.dictionaries(st.sampled_from(["a", "b", "c", "ä\n"]), st.none() | documents, max_size=3)


def state_directory() -> tempfile.TemporaryDirectory[str]:
    """Use a tmpfs where there is one, like /run: syncing costs nothing there."""
    shm = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None)


def open_store(directory: str) -> CheckpointStore:
    return CheckpointStore(
        directory, identity={"version": "1", "machine": "m", "boot": "b"}, clock=lambda: 0.0
    )


def after(state: State, step: Step) -> State:
    """Say what the store must hold after a step."""
    entries = dict(state)
    for key, document in step.items():
        if document is None:
            entries.pop(key, None)
        else:
            entries[key] = document
    return entries


def reloaded(directory: str) -> JournalContents:
    store = open_store(directory)
    try:
        return store.load()
    finally:
        store.close()


def written(directory: str, history: list[Step]) -> tuple[bytes, list[tuple[int, State]]]:
    """Write a history; return the journal, and what holds from each of its lengths on."""
    store = open_store(directory)
    store.load()
    state: State = {}
    held = [(store._size, state)]
    for step in history:
        store.append_documents(step)
        state = after(state, step)
        held.append((store._size, state))
    store.close()
    return Path(directory, "checkpoint").read_bytes(), held


@settings(max_examples=6, deadline=None)  # some hundred starts for each
@given(st.lists(steps, max_size=4))
@example([{"a": {"cpus": "0-1"}}, {"b": {"cpus": "2"}, "a": None}])
def test_truncation_at_any_byte_never_loses_an_intact_earlier_record(history: list[Step]) -> None:
    with state_directory() as directory:
        data, held = written(directory, history)
        file = Path(directory, "checkpoint")
        for length in range(len(data) + 1):
            file.write_bytes(data[:length])
            loaded = reloaded(directory)
            # Without its line end a record is whole all the same.
            states = [state for size, state in held if size - 1 <= length]
            expected: State = states[-1] if states else {}
            assert loaded.entries == expected
            for kept in Path(directory).glob("checkpoint.corrupt-*"):
                kept.unlink()


@settings(deadline=None)
@given(
    history=st.lists(steps, min_size=1, max_size=5),
    where=st.integers(0),
    mask=st.integers(1, 255),
    inserted=st.binary(max_size=3),
)
def test_a_flipped_byte_costs_at_most_its_own_line(
    history: list[Step], where: int, mask: int, inserted: bytes
) -> None:
    with state_directory() as directory:
        data, _ = written(directory, history)
        where %= len(data)
        spoilt = data[:where] + bytes([data[where] ^ mask]) + inserted + data[where + 1 :]
        Path(directory, "checkpoint").write_bytes(spoilt)
        loaded = reloaded(directory)
        assert loaded.problems
        ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
        if where < ends[0]:
            return  # without its first line nobody knows whose it is
        # A damaged line end spoils the line after it as well, unless another end came in its place.
        spoilt_steps = {n for n, end in enumerate(ends[1:]) if ends[n] <= where < end}
        if data[where] == 10 and not inserted.endswith(b"\n"):
            spoilt_steps |= {n + 1 for n in spoilt_steps}
        # A record of nothing writes no line.
        real = [step for step in history if step]
        state: State = {}
        for number, step in enumerate(real):
            if number not in spoilt_steps:
                state = after(state, step)
        assert loaded.entries == state


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_at_all_make_loading_fail(data: bytes) -> None:
    with state_directory() as directory:
        Path(directory, "checkpoint").write_bytes(data)
        loaded = reloaded(directory)
        assert loaded.entries == {}
        assert loaded.problems
        assert Path(directory, "checkpoint.corrupt-1").read_bytes() == data
        assert reloaded(directory).problems == []


class KilledError(BaseException):
    """Stands for kill -9: nothing after it runs."""


class DyingOS:
    """The ``os`` module of a process that is killed at its n-th call that changes a file.

    A write that is killed has put some of its bytes on the device, or none, or all.
    """

    CHANGING = frozenset({"write", "rename", "link", "fsync", "ftruncate", "open"})

    def __init__(self, calls_left: int, share: float) -> None:
        self.calls_left = calls_left
        self.share = share
        self.opened: set[int] = set()

    def open(self, *args: Any, **kwargs: Any) -> int:
        """Open a file, and remember that it is open."""
        fd: int = self._call("open", *args, **kwargs)
        return fd

    def close(self, fd: int) -> None:
        self.opened.discard(fd)
        os.close(fd)

    def die(self) -> None:
        """Close what is still open, as the kernel does for the dead."""
        while self.opened:
            os.close(self.opened.pop())

    def __getattr__(self, name: str) -> Any:
        if name not in self.CHANGING:
            return getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, *args, **kwargs)

        return call

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        real = getattr(os, name)
        self.calls_left -= 1
        if self.calls_left < 0 and name == "write":
            fd, data = args
            real(fd, data[: int(len(data) * self.share)])
        elif self.calls_left >= 0 or self.share > 0.5:
            done = real(*args, **kwargs)
            if name == "open":
                self.opened.add(done)
            if self.calls_left >= 0:
                return done
        raise KilledError


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_killed_at_any_system_call_the_state_is_that_before_or_after(share: float) -> None:
    history: list[Step] = [
        {"a": {"cpus": "0-1"}, "b": {"cpus": "2"}},
        {"c": {"cpus": "3"}, "a": None},
        {"a": {"cpus": "4-5"}},
    ]
    calls = 0
    while True:
        with state_directory() as directory, pytest.MonkeyPatch.context() as patch:
            dying = DyingOS(calls, share)
            for module in (checkpoint, files):
                patch.setattr(module, "os", dying)
            store = open_store(directory)
            state: State = {}
            following = state
            killed = True
            try:
                store.load()
                for step in history:
                    following = after(state, step)
                    store.append_documents(step)
                    state = following
                    store._rewrite_journal()  # a compaction between any two records
                killed = False
            except KilledError:
                pass
            patch.undo()
            dying.die()
            loaded = reloaded(directory)
            assert loaded.entries in (state, following)
            assert not list(Path(directory).glob("checkpoint.corrupt-*"))
            if not killed:
                assert dying.calls_left >= 0
                break
        calls += 1
    assert calls > 15
