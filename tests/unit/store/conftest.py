"""Stores, and files of history: all are closed at the end, and leave nothing open."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from nri_numa.engine.state import Allocation
from nri_numa.observe.notices import NoticeLog, Rejection
from nri_numa.observe.traces import PackedTrace
from nri_numa.store.history_file import HistoryFile
from tests.beds.notices import SetClock
from tests.beds.stores import IDENTITY, Opened, Stores


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    made: Stores = []
    yield made
    for close in made:
        close()
    still_open: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            still_open.append(os.readlink(f"/proc/self/fd/{number}"))
    assert [one for one in still_open if one.startswith(f"{tmp_path}/")] == []


class NoticesOnly:
    """The history of an agent that decided nothing."""

    rejections: tuple[Rejection, ...] = ()

    def __init__(self, limit: int) -> None:
        self.notices = NoticeLog(SetClock(), limit)

    def packed_traces(self) -> dict[str, tuple[PackedTrace, Allocation]]:
        return {}

    def restore_records(
        self, traces: Mapping[str, PackedTrace], rejections: tuple[Rejection, ...]
    ) -> None:
        assert not traces
        assert not rejections


@pytest.fixture
def opened(stores: Stores) -> Opened:
    """Notices, the file that keeps them in a directory, and what it said."""

    def made(
        directory: Path,
        identity: dict[str, str] = IDENTITY,
        *,
        limit: int = 256,
        writable: bool = True,
    ) -> tuple[NoticeLog, HistoryFile, str]:
        history = NoticesOnly(limit)
        file = HistoryFile(str(directory), identity=identity, history=history)
        stores.append(file.stop_writing)
        return history.notices, file, file.restore_and_open({}, writable=writable)

    return made
