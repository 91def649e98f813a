r"""The form of a checkpoint's journal: lines that can be judged one by one. Without I/O.

::

    <format> <sequence> <length> <crc32 of all of this line> <JSON>\n

    1 1 93 5b0d2a11 {"head":{"boot":"…","machine":"…","version":"0.1.0"},"at":1763683200.0}
    1 2 61 0f6c33d0 {"set":{"3f2a…":{"cpus":"2-3"}}}
    1 3 17 9a01e7bb {"del":["3f2a…"]}

See `nri_numa.store.checkpoint` for what is done with it, and docs/adr/0006-checkpoint.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import msgspec

FORMAT: Final = 1
# A device that fails damages a few lines. Listing millions would take more memory than the file.
_MAX_DAMAGE: Final = 1000

Document = dict[str, Any]


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says.

    Attributes:
        entries: document by container id.
        problems: what was wrong and what was done about it, one sentence each.
        head: who wrote it; empty when nothing could be used.
        written_at: Unix time of the last compaction, 0 when nothing could be used.
        records: number of intact lines.
    """

    entries: dict[str, Document] = msgspec.field(default_factory=dict)
    problems: list[str] = msgspec.field(default_factory=list)
    head: dict[str, str] = msgspec.field(default_factory=dict)
    written_at: float = 0.0
    records: int = 0


class Line(msgspec.Struct, frozen=True, omit_defaults=True, rename={"delete": "del"}):
    """The JSON part of one line: who wrote the journal and when, what is set and what deleted."""

    head: dict[str, str] | None = None
    at: float = 0.0
    set: dict[str, msgspec.Raw] = {}
    delete: tuple[str, ...] = ()


encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(Line).decode
_decode_document: Final = msgspec.json.Decoder(Document).decode
_NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)
# All that later formats must keep: the first line starts with the number of the format.
VERSION: Final = re.compile(rb"([0-9]{1,9}) ")
_FRAME: Final = re.compile(rb"([0-9]{1,9}) ([0-9]{1,18}) ([0-9]{1,9}) ([0-9a-f]{8}) ")


def frame(sequence: int, line: Line) -> bytes:
    """Put one record on a line."""
    payload = encode(line)
    front = b"%d %d %d " % (FORMAT, sequence, len(payload))
    return b"%b%08x %b\n" % (front, crc32(payload, crc32(front)), payload)


@dataclass(slots=True)
class Parsed:
    """Everything intact in a journal, and what was not."""

    head: dict[str, str] | None = None
    at: float = 0.0
    entries: dict[str, bytes] = field(default_factory=dict)
    records: int = 0
    torn: int = 0
    damage: list[str] = field(default_factory=list)
    newer: int = 0


def parse(data: bytes) -> Parsed:
    """Read a journal; never raises, whatever the bytes.

    An unfinished last line is *torn*: the writer was killed. Any other line that is not intact is
    *damage*; the intact lines after it still count, because each stands for itself and is newer.
    Nothing counts without the first line, and nothing after very much damage. Line by line, so
    that rubbish takes no more memory than its bytes.
    """
    parsed = Parsed()
    expected, number, end = 1, 0, -1
    while end < len(data):
        start, number = end + 1, number + 1
        found = data.find(b"\n", start)
        last = found < 0
        end = len(data) if last else found
        line = data[start:end]
        if last and not line:
            break
        if number == 2 and parsed.head is None:
            break
        if len(parsed.damage) >= _MAX_DAMAGE:
            parsed.damage.append(f"everything from line {number} on is not read")
            break
        if number == 1 and (version := VERSION.match(line)) and int(version[1]) > FORMAT:
            parsed.newer = int(version[1])
            break
        match = _FRAME.match(line)
        payload = b"" if match is None else line[match.end() :]
        if (
            match is None
            or len(payload) != int(match[3])
            or crc32(payload, crc32(line[: match.start(4)])) != int(match[4], 16)
        ):
            if last:
                parsed.torn = len(line)
            else:
                parsed.damage.append(f"line {number} is damaged")
            continue
        try:
            record = _decode_line(payload)
        except _NOT_JSON as error:
            parsed.damage.append(f"line {number} is intact but is no record: {error}")
            continue
        sequence = int(match[2])
        if sequence != expected and parsed.records and not parsed.damage:
            parsed.damage.append(f"line {number} has number {sequence} instead of {expected}")
        expected = sequence + 1
        _apply(record, parsed)
    return parsed


def _apply(record: Line, parsed: Parsed) -> None:
    parsed.records += 1
    if record.head is not None:
        parsed.head, parsed.at = record.head, record.at
    for container_id, document in record.set.items():
        parsed.entries[container_id] = bytes(document)
    for container_id in record.delete:
        parsed.entries.pop(container_id, None)


def loaded(parsed: Parsed, problems: list[str]) -> Loaded:
    """Read the documents of the intact lines; those that cannot be read are told and left out."""
    entries: dict[str, Document] = {}
    for container_id, raw in parsed.entries.items():
        try:
            entries[container_id] = _decode_document(raw)
        except _NOT_JSON as error:
            problems.append(f"the entry of container {container_id} is left out: {error}")
    return Loaded(
        entries=entries,
        problems=problems,
        head=parsed.head or {},
        written_at=parsed.at,
        records=parsed.records,
    )
