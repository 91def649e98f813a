"""The file of recorded decisions: notices, rejections, and traces of live containers.

It is a journal (`nri_numa.store.journal`) of one document a line, whose key begins with its kind.
Only damaged lines are lost; kinds and fields of other versions are skipped.

A notice is appended after the answer to the runtime was sent and before anybody else can read it,
so a number that a reader has seen is never used again. At intervals everything is encoded in a
thread and the file is rewritten. Rejections and traces are written only then, so a killed agent
loses those of the last seconds. The file is not synced: it need not survive a crash of the machine.
An unreadable file starts a new sequence of notices with another name, which readers detect.
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
from msgspec.structs import replace

from nri_numa.engine.old_records import with_old_names
from nri_numa.engine.state import FORMER_KINDS, Allocation
from nri_numa.model.reasons import FORMER_REASONS
from nri_numa.observe.logs import get_logger
from nri_numa.observe.notices import (
    FORMER_NOTICE_FIELDS,
    FORMER_NOTICE_KINDS,
    FORMER_NOTICE_REASONS,
    Notice,
    NoticeLog,
    Rejection,
)
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
"""Maximum size of a rewritten file, and of the lines appended to it; it holds the six thousand
youngest traces of the usual size."""
_MAX_HISTORY_FILE_BYTES: Final = 3 * MAX_HISTORY_BYTES
_PREVIOUS_FILE_NAMES: Final = ("notices", "explanations")
"""The two files of the previous version; they are read once."""


class RecordedDecisions(Protocol):
    """Source of the file's contents, and the target of their restoration."""

    @property
    def notices(self) -> NoticeLog:
        """Notices about containers."""

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """Rejections of existing pods, oldest first."""

    def packed_traces(self) -> dict[str, tuple[PackedTrace, Allocation]]:
        """Return traces by container id, with the allocations that they explain."""

    def restore_records(
        self, traces: Mapping[str, PackedTrace], rejections: tuple[Rejection, ...]
    ) -> None:
        """Restore the records of an earlier run; only before the first event."""


class _SavedTrace(msgspec.Struct, frozen=True):
    """A trace, with the digest of the allocation that it explains."""

    allocation_digest: int
    trace: PackedTrace


class HistorySnapshot(msgspec.Struct, frozen=True):
    """Contents to save; equal to the previous ones if nothing changed."""

    number: int
    notices: list[Notice]
    rejections: tuple[Rejection, ...]
    traces: dict[str, tuple[PackedTrace, Allocation]]

    def ranked_documents(self) -> Iterator[tuple[str, msgspec.Struct]]:
        """Yield documents by key, the most important first: of each kind the youngest first."""
        yield from ((f"notice/{notice.id}", notice) for notice in reversed(self.notices))
        yield from ((f"rejection/{n}", r) for n, r in enumerate(reversed(self.rejections)))
        # Latest first, then by container id.
        traces = sorted(self.traces.items(), key=lambda item: (-item[1][1].assigned_at, item[0]))
        for container_id, (trace, allocation) in traces:
            yield f"trace/{container_id}", _SavedTrace(_allocation_digest(allocation), trace)


class HistoryFile:
    """File of one agent's recorded decisions, which are restored at the next start.

    The identity is the checkpoint's: every value but ``version`` must be equal before the file is
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
        """Restore the records of the last run and open the file; a sentence if some are lost.

        Without ``writable``, if another agent has the directory, nothing is read or written.
        """
        self._notices.restore_notices(secrets.token_hex(4))
        self._writable = writable
        if not writable:
            return ""
        problem = self._load_file(allocations)
        self._notices.keep = self._keep_notice
        self._rewrite_file(self._current_snapshot())
        if not self._failed:
            for name in _PREVIOUS_FILE_NAMES:
                with suppress(OSError):
                    os.unlink(os.path.join(os.path.dirname(self.path), name))
        return problem

    def save_soon(self) -> None:
        """Rewrite the file in a task, if something changed and no other save is running."""
        if not self._is_saving() and (snapshot := self._unsaved_snapshot()) is not None:
            self._saving = asyncio.create_task(self._save_snapshot(snapshot), name="history")

    async def save_last_changes(self) -> None:
        """Write the changes since the last save, at the end of the agent."""
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        if (snapshot := self._unsaved_snapshot()) is not None:
            self._rewrite_file(snapshot)

    def stop_writing(self) -> None:
        """Stop writing."""
        self._notices.keep = lambda notice: None
        self._close_file()

    # --- reading ----------------------------------------------------------------------------------

    def _load_file(self, allocations: Mapping[str, Allocation]) -> str:
        try:
            contents = _read_previous_files(os.path.dirname(self.path))
            if not contents.head:
                contents = parse_journal(read_file(self.path, _MAX_HISTORY_FILE_BYTES))
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.path}: cannot be read: {error.strerror or error}; it is not used"
        if not contents.head:
            return f"{self.path}: is damaged or of a newer version; it is not used"
        if any(contents.head.get(k) != v for k, v in self._identity.items() if k != "version"):
            return f"{self.path}: is of another machine or boot; it is not used"
        damaged = len(contents.problems) + self._restore_documents(contents, allocations)
        return f"{self.path}: is damaged; {damaged} of its lines are left out" if damaged else ""

    def _restore_documents(
        self, contents: JournalContents, allocations: Mapping[str, Allocation]
    ) -> int:
        """Restore the documents; return the number of unreadable ones."""
        notices: list[Notice] = []
        rejections: list[Rejection] = []
        traces: dict[str, PackedTrace] = {}
        damaged = 0
        for key in contents.entries:
            kind, _, name = key.partition("/")
            try:
                if kind == "notice":
                    notices.append(_decode_notice(contents.raw[key]))
                elif kind == "rejection":
                    rejection = msgspec.json.decode(contents.raw[key], type=Rejection)
                    reason = _current_reason(rejection.reason)
                    rejections.append(replace(rejection, reason=reason))
                elif kind == "trace" and name in allocations:
                    saved = msgspec.json.decode(contents.raw[key], type=_SavedTrace)
                    # No trace explains an allocation that has changed since.
                    if saved.allocation_digest in _valid_digests(allocations[name]):
                        traces[name] = saved.trace
            except DECODE_ERRORS:
                damaged += 1
        instance, number = contents.head.get("instance"), contents.head.get("number", "")
        if instance and number.isdecimal() and int(number) <= MAX_JSON_INTEGER:
            self._notices.restore_notices(instance, notices, int(number))
        self._history.restore_records(traces, tuple(reversed(rejections)))
        return damaged

    # --- writing ----------------------------------------------------------------------------------

    def _current_snapshot(self) -> HistorySnapshot:
        return HistorySnapshot(
            self._notices.number,
            self._notices.notices_after(),
            self._history.rejections,
            self._history.packed_traces(),
        )

    def _unsaved_snapshot(self) -> HistorySnapshot | None:
        """Return the contents to save; None if nothing changed or nothing may be written."""
        snapshot = self._current_snapshot() if self._writable else None
        return None if snapshot == self._saved else snapshot

    def _is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def _keep_notice(self, notice: Notice) -> None:
        if self._appended_bytes > MAX_HISTORY_BYTES and not self._is_saving():
            self._rewrite_file(self._current_snapshot())  # it contains the new notice too
        elif self._fd >= 0:  # else the next save writes it
            self._append_notice(notice)

    def _append_notice(self, notice: Notice) -> None:
        line = _document_line(self._lines + 1, f"notice/{notice.id}", notice)
        try:
            if os.write(self._fd, line) != len(line):  # the next notice would continue this line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._close_file()
            self._report_failure(error)
            return
        self._lines += 1
        self._appended_bytes += len(line)

    def _rewrite_file(self, snapshot: HistorySnapshot) -> None:
        self._replace_file(self._encode_snapshot(snapshot), snapshot)

    async def _save_snapshot(self, snapshot: HistorySnapshot) -> None:
        self._replace_file(await asyncio.to_thread(self._encode_snapshot, snapshot), snapshot)

    def _encode_snapshot(self, snapshot: HistorySnapshot) -> list[bytes]:
        position = {"instance": self._notices.instance, "number": str(snapshot.number)}
        return encode_lines({**self._identity, **position}, snapshot)

    def _replace_file(self, lines: list[bytes], snapshot: HistorySnapshot) -> None:
        """Replace the file, with the notices since the snapshot appended."""
        for notice in self._notices.notices_after(snapshot.number):
            lines.append(_document_line(len(lines) + 1, f"notice/{notice.id}", notice))
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
        """Log once that not everything is saved; the next save retries."""
        if not self._failed:
            problem = f"{self.path}: cannot be written: {error.strerror or error}"
            log.warning("history not saved", problem=problem)
        self._saved, self._failed = None, True


def _read_previous_files(directory: str) -> JournalContents:
    """Read the two files of the previous version; without a head if they are unusable."""
    notices, explanations = (os.path.join(directory, name) for name in _PREVIOUS_FILE_NAMES)
    contents = JournalContents()
    with suppress(OSError, KeyError, TypeError, *DECODE_ERRORS):
        head, *lines = read_file(notices, MAX_HISTORY_BYTES).split(b"\n")
        document = msgspec.json.decode(head)
        contents.head = {"instance": document["instance"], "number": str(document["number"])}
        contents.head |= document["identity"]
        for line in filter(None, lines):
            document = msgspec.json.decode(line)
            contents.entries[f"notice/{document['id']}"] = document
    with suppress(OSError, TypeError, *DECODE_ERRORS):
        head, _, body = read_file(explanations, MAX_HISTORY_BYTES).partition(b"\n")
        if head.endswith(b" %08x" % crc32(body)):
            identity, traces, rejections, *_ = msgspec.msgpack.decode(body)
            contents.head |= identity
            for container_id, digest, trace in traces:
                document = {"allocation_digest": digest, "trace": trace}
                contents.entries[f"trace/{container_id}"] = document
            for number, rejection in enumerate(reversed(rejections)):
                contents.entries[f"rejection/{number}"] = rejection
    contents.raw = {key: msgspec.Raw(encode(value)) for key, value in contents.entries.items()}
    return contents


def encode_lines(
    head: dict[str, str], snapshot: HistorySnapshot, limit: int = MAX_HISTORY_BYTES
) -> list[bytes]:
    """Return the file's lines, at most ``limit`` bytes after the first line."""
    lines = [frame_line(1, JournalLine(head=head))]
    for key, document in snapshot.ranked_documents():
        line = _document_line(len(lines) + 1, key, document)
        limit -= len(line)
        if limit < 0:
            break
        lines.append(line)
    return lines


def _document_line(number: int, key: str, document: msgspec.Struct) -> bytes:
    return frame_line(number, JournalLine(updates={key: msgspec.Raw(encode(document))}))


def _current_reason(reason: str) -> str:
    """Return the reason as this version names it."""
    return FORMER_NOTICE_REASONS.get(reason, reason)


def _valid_digests(allocation: Allocation) -> Iterator[int]:
    """Yield the digests of an allocation by this version and by the one with former names."""
    yield _allocation_digest(allocation)
    document = with_old_names(allocation_document(allocation))
    for key, name_by_old_name in (("kind", FORMER_KINDS), ("unpinned_for", FORMER_REASONS)):
        for old_name, name in name_by_old_name.items():
            if document.get(key) == name:
                document[key] = old_name
    yield crc32(encode(document))


def _decode_notice(raw: bytes) -> Notice:
    """Decode a notice; fields, kind and reason may have the names of an older version."""
    document = msgspec.json.decode(raw, type=dict[str, object])
    for old_name, name in FORMER_NOTICE_FIELDS.items():
        if old_name in document:
            document[name] = document.pop(old_name)
    notice = msgspec.convert(document, Notice)
    kind = FORMER_NOTICE_KINDS.get(notice.notice_kind, notice.notice_kind)
    return replace(notice, notice_kind=kind, reason=_current_reason(notice.reason))


def _allocation_digest(allocation: Allocation) -> int:
    """Return a checksum that differs for each decision about a container, after a restart too."""
    return crc32(encode(allocation_document(allocation)))
