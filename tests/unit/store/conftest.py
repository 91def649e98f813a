"""Stores, and files of notices: all are closed at the end, and leave nothing open."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nri_numa.observe.notices import NoticeLog
from nri_numa.store.checkpoint import CheckpointStore
from nri_numa.store.notices import NoticeFile
from tests.unit.observe.test_notices import Clock

IDENTITY = {"version": "1", "boot": "b", "machine": "/"}
Stores = list[CheckpointStore | NoticeFile]
Opened = Callable[..., tuple[NoticeLog, NoticeFile, str]]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made: Stores = []
    yield made
    for store in made:
        store.close()
    still_open: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            still_open.append(os.readlink(f"/proc/self/fd/{number}"))
    assert [one for one in still_open if one.startswith(f"{tmp_path}/")] == []


@pytest.fixture
def opened(stores: Stores) -> Opened:
    """Notices, the file that keeps them in a directory, and what it said."""

    def made(
        directory: Path,
        identity: dict[str, str] = IDENTITY,
        *,
        limit: int = 256,
        trouble: Callable[[str], object] = print,
        writable: bool = True,
    ) -> tuple[NoticeLog, NoticeFile, str]:
        notices = NoticeLog(Clock(), limit)
        file = NoticeFile(str(directory), identity=identity, notices=notices, trouble=trouble)
        stores.append(file)
        return notices, file, file.restore_and_open(writable=writable)

    return made
