"""The file of what is remembered of decisions: notices, rejections, and traces of live containers.

A journal (`nri_numa.store.journal`) of one document a line, whose key begins with its kind. Damage
costs the lines that it is in; kinds and fields of other versions are passed over.

A notice is appended after the answer to the runtime has left and before anybody else can have read
it, so a number that a reader saw is never given out again. Now and then everything is encoded in a
thread and written anew: rejections and traces come into the file only then, so a killed agent loses
those of the last seconds. The file is not synced: it need not outlive the machine. What cannot be
read begins a new sequence of notices, which readers notice by its name.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final, Protocol
from zlib import crc32

import msgspec

from nri_numa.engine.state import Allocation
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import Notice, NoticeLog, Rejection
from nri_numa.observe.traces import PackedTrace
from nri_numa.store.files import read_file, replace_file
from nri_numa.store.journal import (
    DECODE_ERRORS,
    MAX_JSON_INTEGER,
    JournalContents,
    JournalLine,
    allocation_document,
    encode,
    frame_line,
    parse_journal,
)

log = get_logger("history")

HISTORY_FILE_NAME: Final = "history"
MAX_HISTORY_BYTES: Final = 4 << 20
"""Of a file written anew, and of what is appended until then; the youngest traces are kept, six
thousand of the usual size."""
_MAX_HISTORY_FILE_BYTES: Final = 3 * MAX_HISTORY_BYTES
_PREVIOUS_FILE_NAMES: Final = ("notices", "explanations")
"""Files of the version before, which had two; they are read once."""


class RecordedDecisions(Protocol):
    """What the file keeps, and where it is restored to."""

    @property
    def notices(self) -> NoticeLog:
        """What happened to containers."""

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Rejections of pods that are there, oldest first."""

    def packed_traces(self) -> dict[str, tuple[PackedTrace, Allocation]]:
        """Traces by container id, with the allocations that they explain."""

    def restore(self, traces: Mapping[str, PackedTrace], rejections: tuple[Rejection, ...]) -> None:
        """Know again what an earlier run kept; only before the first event."""


class _SavedTrace(msgspec.Struct, frozen=True):
    """A trace; ``allocation_digest`` is of the allocation that it explains."""

    allocation_digest: int
    trace: PackedTrace


class HistorySnapshot(msgspec.Struct, frozen=True):
    """What there is to save; equal to another one when nothing changed."""

    number: int
    notices: list[Notice]
    rejections: tuple[Rejection, ...]
    traces: dict[str, tuple[PackedTrace, Allocation]]

    def documents(self) -> Iterator[tuple[str, msgspec.Struct]]:
        """By key, in the order in which they are missed: of each kind the youngest first."""
        yield from ((f"notice/{one.id}", one) for one in reversed(self.notices))
        yield from ((f"rejection/{n}", one) for n, one in enumerate(reversed(self.rejections)))
        # Latest first, then by container id.
        traces = sorted(self.traces.items(), key=lambda item: (-item[1][1].assigned_at, item[0]))
        for container_id, (trace, allocation) in traces:
            yield f"trace/{container_id}", _SavedTrace(_allocation_digest(allocation), trace)


class HistoryFile:
    """Keeps what one agent remembers of decisions, and restores it at the next start.

    The identity is the checkpoint's; but for ``version`` it must be the same for the file to be
    used again.
    """

    def __init__(
        self, directory: str, *, identity: Mapping[str, str], history: RecordedDecisions
    ) -> None:
        self.path = os.path.join(directory, HISTORY_FILE_NAME)
        self._identity = dict(identity)
        self._history, self._notices = history, history.notices
        self._fd = -1
        self._lines = self._appended_bytes = 0
        self._saved: HistorySnapshot | None = None
        self._saving: asyncio.Task[None] | None = None
        self._writable = self._failed = False

    def restore_and_open(
        self, allocations: Mapping[str, Allocation], *, writable: bool = True
    ) -> str:
        """Restore what the last run knew, and write from now on; a sentence if not all is used.

        Nothing is read nor kept where the directory is not ours alone.
        """
        self._notices.restore_notices(secrets.token_hex(4))
        self._writable = writable
        if not writable:
            return ""
        problem = self._load(allocations)
        self._notices.keep = self._keep_notice
        self._rewrite(self._snapshot())
        if not self._failed:
            for name in _PREVIOUS_FILE_NAMES:
                with suppress(OSError):
                    os.unlink(os.path.join(os.path.dirname(self.path), name))
        return problem

    def save_soon(self) -> None:
        """Write the file anew, if something changed and the last time is over."""
        if not self._is_saving() and (snapshot := self._unsaved_snapshot()) is not None:
            self._saving = asyncio.create_task(self._save(snapshot), name="history")

    async def save_last_changes(self) -> None:
        """Write what changed since the last time; the agent ends."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        if (snapshot := self._unsaved_snapshot()) is not None:
            self._rewrite(snapshot)

    def close(self) -> None:
        """Write nothing any more."""
        self._notices.keep = lambda notice: None
        self._close_file()

    # --- reading ----------------------------------------------------------------------------------

    def _load(self, allocations: Mapping[str, Allocation]) -> str:
        try:
            found = _read_previous_files(os.path.dirname(self.path))
            if not found.head:
                found = parse_journal(read_file(self.path, _MAX_HISTORY_FILE_BYTES))
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.path}: cannot be read: {error.strerror or error}; it is not used"
        if not found.head:
            return f"{self.path}: is damaged or of a newer version; it is not used"
        if any(found.head.get(k) != v for k, v in self._identity.items() if k != "version"):
            return f"{self.path}: is of another machine or boot; it is not used"
        damaged = len(found.problems) + self._restore(found, allocations)
        return f"{self.path}: is damaged; {damaged} of its lines are left out" if damaged else ""

    def _restore(self, found: JournalContents, allocations: Mapping[str, Allocation]) -> int:
        """Hand on what was found; how many of the documents could not be read."""
        notices: list[Notice] = []
        rejections: list[Rejection] = []
        traces: dict[str, PackedTrace] = {}
        damaged = 0
        for key in found.entries:
            kind, _, name = key.partition("/")
            try:
                if kind == "notice":
                    notices.append(msgspec.json.decode(found.raw[key], type=Notice))
                elif kind == "rejection":
                    rejections.append(msgspec.json.decode(found.raw[key], type=Rejection))
                elif kind == "trace" and name in allocations:
                    saved = msgspec.json.decode(found.raw[key], type=_SavedTrace)
                    # One that has changed since is explained by nothing that we know.
                    if saved.allocation_digest == _allocation_digest(allocations[name]):
                        traces[name] = saved.trace
            except DECODE_ERRORS:
                damaged += 1
        instance, number = found.head.get("instance"), found.head.get("number", "")
        if instance and number.isdecimal() and int(number) <= MAX_JSON_INTEGER:
            self._notices.restore_notices(instance, notices, int(number))
        self._history.restore(traces, tuple(reversed(rejections)))
        return damaged

    # --- writing ----------------------------------------------------------------------------------

    def _snapshot(self) -> HistorySnapshot:
        return HistorySnapshot(
            self._notices.number,
            self._notices.notices_after(),
            self._history.rejections,
            self._history.packed_traces(),
        )

    def _unsaved_snapshot(self) -> HistorySnapshot | None:
        """What there is to save; None if nothing changed or nothing may be written."""
        snapshot = self._snapshot() if self._writable else None
        return None if snapshot == self._saved else snapshot

    def _is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def _keep_notice(self, notice: Notice) -> None:
        if self._appended_bytes > MAX_HISTORY_BYTES and not self._is_saving():
            self._rewrite(self._snapshot())  # holds the new one too
        elif self._fd >= 0:  # else it is written with everything
            self._append_notice(notice)

    def _append_notice(self, notice: Notice) -> None:
        line = _document_line(self._lines + 1, f"notice/{notice.id}", notice)
        try:
            if os.write(self._fd, line) != len(line):  # the next would be on the same line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._close_file()
            self._report_failure(error)
            return
        self._lines += 1
        self._appended_bytes += len(line)

    def _rewrite(self, snapshot: HistorySnapshot) -> None:
        self._replace(self._encode(snapshot), snapshot)

    async def _save(self, snapshot: HistorySnapshot) -> None:
        self._replace(await asyncio.to_thread(self._encode, snapshot), snapshot)

    def _encode(self, snapshot: HistorySnapshot) -> list[bytes]:
        place = {"instance": self._notices.instance, "number": str(snapshot.number)}
        return encode_lines({**self._identity, **place}, snapshot)

    def _replace(self, lines: list[bytes], snapshot: HistorySnapshot) -> None:
        """Put a new file in place of the old one, with what was noted since its snapshot."""
        for one in self._notices.notices_after(snapshot.number):
            lines.append(_document_line(len(lines) + 1, f"notice/{one.id}", one))
        try:
            fd = replace_file(self.path, b"".join(lines))
        except OSError as error:
            self._report_failure(error)
            return
        self._close_file()
        self._fd, self._lines, self._appended_bytes = fd, len(lines), 0
        self._saved, self._failed = snapshot, False

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _report_failure(self, error: OSError) -> None:
        """Say once that not everything is kept; the next save tries again."""
        if not self._failed:
            problem = f"{self.path}: cannot be written: {error.strerror or error}"
            log.warning("history not saved", problem=problem)
        self._saved, self._failed = None, True


def _read_previous_files(directory: str) -> JournalContents:
    """What the version before left in two files; without a head if that is nothing to use."""
    notices, explanations = (os.path.join(directory, name) for name in _PREVIOUS_FILE_NAMES)
    found = JournalContents()
    with suppress(OSError, KeyError, TypeError, *DECODE_ERRORS):
        head, *lines = read_file(notices, MAX_HISTORY_BYTES).split(b"\n")
        document = msgspec.json.decode(head)
        found.head = {"instance": document["instance"], "number": str(document["number"])}
        found.head |= document["identity"]
        for line in filter(None, lines):
            document = msgspec.json.decode(line)
            found.entries[f"notice/{document['id']}"] = document
    with suppress(OSError, TypeError, *DECODE_ERRORS):
        head, _, rest = read_file(explanations, MAX_HISTORY_BYTES).partition(b"\n")
        if head.endswith(b" %08x" % crc32(rest)):
            identity, traces, rejections, *_ = msgspec.msgpack.decode(rest)
            found.head |= identity
            for container_id, digest, trace in traces:
                document = {"allocation_digest": digest, "trace": trace}
                found.entries[f"trace/{container_id}"] = document
            for number, rejection in enumerate(reversed(rejections)):
                found.entries[f"rejection/{number}"] = rejection
    found.raw = {key: msgspec.Raw(encode(one)) for key, one in found.entries.items()}
    return found


def encode_lines(
    head: dict[str, str], snapshot: HistorySnapshot, limit: int = MAX_HISTORY_BYTES
) -> list[bytes]:
    """The file's lines, at most ``limit`` bytes after the first."""
    lines = [frame_line(1, JournalLine(head=head))]
    for key, document in snapshot.documents():
        line = _document_line(len(lines) + 1, key, document)
        limit -= len(line)
        if limit < 0:
            break
        lines.append(line)
    return lines


def _document_line(number: int, key: str, document: msgspec.Struct) -> bytes:
    return frame_line(number, JournalLine(updates={key: msgspec.Raw(encode(document))}))


def _allocation_digest(allocation: Allocation) -> int:
    """Another one for each decision about a container, also after a restart."""
    return crc32(encode(allocation_document(allocation)))
