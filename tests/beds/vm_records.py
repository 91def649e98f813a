"""What the guest and the host tell each other through one directory that both see.

The guest appends one JSON document per line to ``records.jsonl``; the host reads them while the
machine runs, so that a guest that dies has still reported the cases before. The guest may ask the
host for a command of QEMU's machine protocol (plugging a CPU) with a file ``ask-N.json`` and gets
``answer-N.json``.
"""

import enum
from pathlib import Path

import msgspec

RECORDS = "records.jsonl"
ROOM_SECONDS = "NRI_NUMA_REBALANCING_SECONDS"
"""Of making room again and again; 0 or empty: once."""


class Outcome(enum.Enum):
    """How one case ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The guest runs programs; `cases` are the names to come, in order."""

    machine: str
    kernel: str
    cases: list[str]


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A case starts."""

    case: str


class Result(msgspec.Struct, frozen=True, tag="result"):
    """A case ended; `detail` is the traceback or the reason to skip, `notes` what was measured.

    `final`: it has failed, whatever the machine did meanwhile.
    """

    case: str
    outcome: Outcome
    seconds: float
    detail: str = ""
    notes: list[str] = []
    final: bool = False


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The guest could not set up what all cases need."""

    detail: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """All cases were run."""


Record = Begin | Started | Result | Broken | End


class Ask(msgspec.Struct, frozen=True):
    """A command for QEMU's machine protocol."""

    execute: str
    arguments: dict[str, object]


class Answer(msgspec.Struct, frozen=True):
    """QEMU's answer; `error` is empty when it agreed."""

    error: str = ""


class Writer:
    """The guest's end: each record is in the file when `write` returns."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / RECORDS).open("ab", buffering=0)

    def write(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


class Reader:
    """The host's end: hands out each whole record once."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / RECORDS
        self._offset = 0

    def read(self) -> list[Record]:
        """Records that were written since the last call.

        Raises:
            msgspec.DecodeError: the file holds something else.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        # The last line may be half written: leave it for the next call.
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [msgspec.json.decode(line, type=Record) for line in whole.splitlines()]
