"""Directories of state, and stores that tests close."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nri_numa.observe.notices import NoticeLog
from nri_numa.store.checkpoint import CheckpointStore, JournalContents
from nri_numa.store.history_file import HistoryFile

IDENTITY = {"version": "0.1.0", "machine": "two sockets", "boot": "b1"}


Stores = list[Callable[[], None]]
"""What closes each."""


Opened = Callable[..., tuple[NoticeLog, HistoryFile, str]]


class StateDirectoryBed:
    """A state directory and the agents that use it one after the other."""

    def __init__(self, directory: Path, stores: Stores) -> None:
        self.directory = directory
        self.file = directory / "checkpoint"
        self._stores = stores

    def store(self, **identity: str) -> CheckpointStore:
        store = CheckpointStore(
            str(self.directory), identity={**IDENTITY, **identity}, clock=lambda: 1_700_000_000.0
        )
        self._stores.append(store.close)
        return store

    def start(self, **identity: str) -> tuple[CheckpointStore, JournalContents]:
        """Let the former agent go, as the kernel does when it dies, and start a new one."""
        for close in self._stores:
            close()
        store = self.store(**identity)
        return store, store.load()

    def recorded(self) -> CheckpointStore:
        """A store with one record."""
        store, _ = self.start()
        store.append_documents({"a": {"n": 1}})
        return store

    def kept(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in self.directory.glob("checkpoint.corrupt-*")}


class BrokenOS:
    """The ``os`` module with system calls that fail as told; everything else is real."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.write_at_most: int | None = None

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name in self.failing:

            def fail(*_: object, **__: object) -> None:
                number = self.failing[name]
                raise OSError(number, os.strerror(number))

            return fail
        if name == "write" and self.write_at_most is not None:
            return lambda fd, data: real(fd, data[: self.write_at_most])
        return real
