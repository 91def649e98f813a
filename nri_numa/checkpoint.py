r"""What was meant for each container, kept over a death of the agent at any line.

The store knows nothing of the engine: it keeps one JSON document for each container id and one for
the node (*meta*). On disk it is a journal, one line for each request::

    <format> <sequence> <length> <crc32 of all of this line> <JSON>\n

    1 1 93 5b0d2a11 {"head":{"boot":"…","machine":"…","version":"0.1.0"},"at":1763683200.0}
    1 2 61 0f6c33d0 {"set":{"3f2a…":{"cpus":"2-3"}}}
    1 3 41 9a01e7bb {"del":["3f2a…"],"meta":{"serial":7}}

A line is written by a single write(2), which survives the death of the process; what it does not
survive, the death of the kernel, no container survives either. See docs/adr/0006-checkpoint.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import msgspec

from nri_numa.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointTooNew,
    StateDirectoryBusy,
)

FORMAT: Final = 1
JOURNAL: Final = "checkpoint"
LOCK: Final = "lock"

_ASIDE: Final = "checkpoint.corrupt-"
# 500 containers are below 1 MB; whatever is larger than this is not ours, and is not read.
_MAX_BYTES: Final = 256 * 1024 * 1024
# Compacting a smaller journal would not pay: it is read in a millisecond.
_MIN_COMPACT: Final = 64 * 1024

Document = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint says.

    Attributes:
        entries: document by container id.
        meta: the node's document, empty when none was recorded.
        problems: what was wrong and what was done about it, one sentence each.
        head: who wrote it; empty when nothing could be used.
        written_at: Unix time of the last compaction, 0 when nothing could be used.
        records: number of intact lines.
    """

    entries: dict[str, Document] = field(default_factory=dict)
    meta: Document = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    head: dict[str, str] = field(default_factory=dict)
    written_at: float = 0.0
    records: int = 0


# --- the format, without I/O ------------------------------------------------------------------


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, rename={"delete": "del"}):
    """The JSON part of one line."""

    head: dict[str, str] | None = None
    at: float = 0.0
    set: dict[str, msgspec.Raw] = {}
    delete: tuple[str, ...] = ()
    meta: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_encode: Final = msgspec.json.Encoder().encode
_decode_line: Final = msgspec.json.Decoder(_Line).decode
_decode_document: Final = msgspec.json.Decoder(Document).decode
_NOT_JSON: Final = (msgspec.MsgspecError, ValueError, RecursionError)
# All that later formats must keep: the first line starts with the number of the format.
_VERSION: Final = re.compile(rb"([0-9]{1,9}) ")
_FRAME: Final = re.compile(rb"([0-9]{1,9}) ([0-9]{1,18}) ([0-9]{1,9}) ([0-9a-f]{8}) ")


def _frame(sequence: int, line: _Line) -> bytes:
    payload = _encode(line)
    front = b"%d %d %d " % (FORMAT, sequence, len(payload))
    return b"%b%08x %b\n" % (front, crc32(payload, crc32(front)), payload)


@dataclass(slots=True)
class _Parsed:
    """Everything intact in a journal, and what was not."""

    head: dict[str, str] | None = None
    at: float = 0.0
    entries: dict[str, bytes] = field(default_factory=dict)
    meta: bytes | None = None
    records: int = 0
    torn: int = 0
    damage: list[str] = field(default_factory=list)
    newer: int = 0


def _parse(data: bytes) -> _Parsed:
    """Read a journal; never raises, whatever the bytes.

    An unfinished last line is *torn*: the writer was killed. Any other line that is not intact is
    *damage*; the intact lines after it still count, because each stands for itself and is newer.
    """
    parsed = _Parsed()
    lines = data.split(b"\n")
    expected = 1
    for number, line in enumerate(lines, 1):
        last = number == len(lines)
        if last and not line:
            break
        if number == 1 and (version := _VERSION.match(line)) and int(version[1]) > FORMAT:
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


def _apply(record: _Line, parsed: _Parsed) -> None:
    parsed.records += 1
    if record.head is not None:
        parsed.head, parsed.at = record.head, record.at
    for container_id, document in record.set.items():
        parsed.entries[container_id] = bytes(document)
    for container_id in record.delete:
        parsed.entries.pop(container_id, None)
    if record.meta is not msgspec.UNSET:
        parsed.meta = bytes(record.meta)


def _loaded(parsed: _Parsed, problems: list[str]) -> Loaded:
    entries: dict[str, Document] = {}
    for container_id, raw in parsed.entries.items():
        try:
            entries[container_id] = _decode_document(raw)
        except _NOT_JSON as error:
            problems.append(f"the entry of container {container_id} is left out: {error}")
    meta: Document = {}
    if parsed.meta is not None:
        try:
            meta = _decode_document(parsed.meta)
        except _NOT_JSON as error:
            problems.append(f"the node's entry is left out: {error}")
    return Loaded(
        entries=entries,
        meta=meta,
        problems=problems,
        head=parsed.head or {},
        written_at=parsed.at,
        records=parsed.records,
    )


def read(path: str) -> Loaded:
    """Read a checkpoint file without changing anything; for commands, beside a running agent.

    Raises:
        CheckpointTooNew: a newer version wrote it.
        CheckpointCorrupt: nothing in it can be used.
        CheckpointError: it cannot be read.
    """
    try:
        data = _read_bytes(path)
    except OSError as error:
        raise _explained(path, "read", error) from error
    parsed = _parse(data)
    unusable = _unusable(path, parsed)
    if unusable is not None:
        raise unusable
    problems = list(parsed.damage)
    if parsed.torn:
        problems.append(f"the last {parsed.torn} bytes are an unfinished record")
    return _loaded(parsed, problems)


def _unusable(path: str, parsed: _Parsed) -> CheckpointError | None:
    if parsed.newer:
        return CheckpointTooNew(
            path,
            f"is in format {parsed.newer}, expected at most {FORMAT}: "
            "a newer version of nri-numa wrote it",
        )
    if parsed.head is None:
        return CheckpointCorrupt(path, "is no checkpoint, expected a first line with who wrote it")
    return None


def _read_bytes(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"{size} bytes are more than any checkpoint has")
        chunks: list[bytes] = []
        while chunk := os.read(fd, 1 << 20):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


_MEMORY: Final = "running on with the state in memory only, every record tries again"
_ELSEWHERE: Final = "choose another directory with --state-dir"
_REMEDIES: Final[Mapping[int, str]] = {
    errno.EACCES: f"let this user write there, or {_ELSEWHERE}",
    errno.EPERM: f"let this user write there, or {_ELSEWHERE}",
    errno.EROFS: f"the file system is read-only, {_ELSEWHERE}",
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "raise the quota or free space on that file system",
    errno.ENOTDIR: f"a part of the path is no directory, {_ELSEWHERE}",
    errno.ENOENT: f"make the directory, or {_ELSEWHERE}",
    errno.ELOOP: f"the path holds a symbolic link where none may be, {_ELSEWHERE}",
}


def _explained(path: str, action: str, error: OSError) -> CheckpointError:
    remedy = _REMEDIES.get(error.errno or 0, f"look at that file system, or {_ELSEWHERE}")
    if action == "read" and error.errno in (errno.EACCES, errno.EPERM):
        remedy = "read it as the user that the agent runs as"
    return CheckpointError(path, f"cannot {action}: {error.strerror or error}; {remedy}")


# --- the store --------------------------------------------------------------------------------


class CheckpointStore:
    """The journal in one directory. Used from one thread.

    The store always remembers what it was told, also when it cannot write it: whatever is missing
    on disk goes out with the next record that can be written.

    Args:
        directory: made when it does not exist. On a tmpfs (``/run``) nothing is ever synced.
        identity: who writes. Every value but ``version`` must be the same for a checkpoint to be
            used again: machine, boot.
        clock: Unix time in seconds.
        fsync: sync every record to the device, for those who want it; milliseconds on a disk.
    """

    def __init__(
        self,
        directory: str,
        *,
        identity: Mapping[str, str],
        clock: Callable[[], float],
        fsync: bool = False,
    ) -> None:
        self.directory = directory
        self.path = os.path.join(directory, JOURNAL)
        self._identity = dict(identity)
        self._clock = clock
        self._fsync = fsync
        self._entries: dict[str, msgspec.Raw] = {}
        self._meta: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
        self._unsaved: dict[str, msgspec.Raw | None] = {}
        self._unsaved_meta = False
        self._lock_fd = -1
        self._fd = -1
        self._size = 0
        self._compacted_size = 0
        self._sequence = 0
        self._keep_aside = False
        self.error: CheckpointError | None = None

    @property
    def healthy(self) -> bool:
        """Whether everything recorded is on disk; `error` says why not."""
        return self.error is None and self._fd >= 0

    @property
    def size(self) -> int:
        """Bytes of the journal."""
        return self._size

    def __len__(self) -> int:
        """Count the containers remembered."""
        return len(self._entries)

    def load(self) -> Loaded:
        """Take the directory, read what is there, and start a clean journal.

        Nothing found on disk makes this fail: what cannot be used is said in ``problems`` and kept
        aside as ``checkpoint.corrupt-<n>``. A directory that cannot be written is said too; the
        store then runs on in memory, not `healthy`, and tries again with every record.

        Raises:
            StateDirectoryBusy: another agent uses the directory.
        """
        problems: list[str] = []
        try:
            self._take_lock()
        except StateDirectoryBusy:
            raise
        except CheckpointError as error:
            problems.append(f"{error}; {_MEMORY}")
        parsed = self._read(problems)
        so_far = len(problems)
        loaded = _loaded(parsed, problems)
        # Whatever is left out below must not be lost with the old file.
        self._keep_aside |= len(problems) > so_far
        self._entries = {key: msgspec.Raw(parsed.entries[key]) for key in loaded.entries}
        self._meta = msgspec.Raw(parsed.meta) if parsed.meta and loaded.meta else msgspec.UNSET
        if self._lock_fd >= 0:
            try:
                problems += self._rewrite()
            except CheckpointError as error:
                problems.append(f"{error}; {_MEMORY}")
        return loaded

    def _read(self, problems: list[str]) -> _Parsed:
        """Read the journal and decide what of it may be used."""
        try:
            parsed = _parse(_read_bytes(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return _Parsed()
        except OSError as error:
            problems.append(f"{_explained(self.path, 'read', error)}; it is not used")
            self._keep_aside = True
            return _Parsed()
        unusable = _unusable(self.path, parsed)
        if unusable is None:
            foreign = [
                f"its {key} is {_short((parsed.head or {}).get(key))}, expected {_short(value)}"
                for key, value in self._identity.items()
                if key != "version" and (parsed.head or {}).get(key) != value
            ]
            if foreign:
                unusable = CheckpointError(
                    self.path, "is of another machine or boot: " + ", ".join(foreign)
                )
        if unusable is not None:
            problems.append(f"{unusable}; it is not used")
            self._keep_aside = True
            return _Parsed()
        if parsed.damage:
            problems.append(
                f"{self.path}: {'; '.join(parsed.damage[:5])}"
                f"{' and more' if len(parsed.damage) > 5 else ''}; the intact lines are used"
            )
            self._keep_aside = True
        if parsed.torn:
            problems.append(
                f"{self.path}: the last {parsed.torn} bytes are an unfinished record, now cut off"
            )
        return parsed

    def record(self, changes: Mapping[str, Document | None], meta: Document | None = None) -> None:
        """Write down new documents by container id; None forgets the container.

        The documents are encoded at once and may be changed by the caller afterwards.

        Raises:
            CheckpointError: it is remembered but is not on disk; the next record tries again.
        """
        encoded: dict[str, msgspec.Raw | None] = {
            key: None if document is None else msgspec.Raw(_encode(document))
            for key, document in changes.items()
        }
        for key, raw in encoded.items():
            if raw is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = raw
        if meta is not None:
            self._meta = msgspec.Raw(_encode(meta))
        self._unsaved_meta |= meta is not None
        # In the order of the last change, as without a failure in between.
        self._unsaved = {**self._unsaved, **encoded} if self._unsaved else encoded
        if self._fd >= 0 and self._vanished():
            self._forget_file()
        if self._fd < 0:
            self._rewrite()
        elif self._unsaved or self._unsaved_meta:
            self._append()

    def compact_if_needed(self) -> bool:
        """Shrink the journal when it has outgrown what it says; call it between requests.

        Also notices that the file was taken away or replaced, and tries again what failed before.

        Returns:
            Whether a new journal was written.

        Raises:
            CheckpointError: it could not be written; the old one stays in use.
        """
        if self._fd >= 0 and self._vanished(by_name=True):
            self._forget_file()
        # Four times: with less, a node whose containers only ever change would compact all day.
        grown = self._size > max(_MIN_COMPACT, 4 * self._compacted_size)
        if self.healthy and not grown:
            return False
        self._rewrite()
        return True

    def close(self) -> None:
        """Let the directory go; the journal stays."""
        self._forget_file()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- files ---

    def _take_lock(self) -> None:
        """Become the only user of the directory.

        Raises:
            StateDirectoryBusy: somebody else is.
            CheckpointError: the directory cannot be made or written.
        """
        if self._lock_fd >= 0:
            if os.fstat(self._lock_fd).st_nlink:
                return
            # The directory was taken away: a lock on a file without a name keeps nobody out.
            os.close(self._lock_fd)
            self._lock_fd = -1
        path = os.path.join(self.directory, LOCK)
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self.error = _explained(self.directory, "use as state directory", error)
            raise self.error from error
        try:
            # The kernel lets go of it when we die, however we die.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = os.pread(fd, 32, 0).strip()
            os.close(fd)
            self.error = StateDirectoryBusy(self.directory, int(text) if text.isdigit() else None)
            raise self.error from error
        self._lock_fd = fd
        # On a full disk the lock holds all the same, only its owner's number is missing.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)

    def _vanished(self, *, by_name: bool = False) -> bool:
        """Say whether what we write to is still the file that the next start will read."""
        try:
            mine = os.fstat(self._fd)
            if not by_name:
                return mine.st_nlink == 0
            there = os.lstat(self.path)
        except OSError:
            return True
        return (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino)

    def _forget_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self) -> None:
        line = _frame(
            self._sequence + 1,
            _Line(
                set={key: raw for key, raw in self._unsaved.items() if raw is not None},
                delete=tuple(key for key, raw in self._unsaved.items() if raw is None),
                meta=self._meta if self._unsaved_meta else msgspec.UNSET,
            ),
        )
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._fsync:
                os.fsync(self._fd)
        except OSError as error:
            self._take_back()
            self.error = _explained(self.path, "write", error)
            raise self.error from error
        self._size += len(line)
        self._saved(self._sequence + 1)

    def _take_back(self) -> None:
        """Cut off a half-written line, so that the next one starts on a line of its own."""
        try:
            os.ftruncate(self._fd, self._size)
        except OSError:
            self._forget_file()  # the next record writes a new file

    def _saved(self, sequence: int) -> None:
        self._sequence = sequence
        self._unsaved = {}
        self._unsaved_meta = False
        self.error = None

    def _rewrite(self) -> list[str]:
        """Write everything to a new file and put it in place of the old one.

        A kill anywhere in here leaves either the old file or the new one under the name.

        Returns:
            Where an unusable old file is kept, as a sentence; usually nothing.
        """
        self._take_lock()
        lines = [_Line(head=self._identity, at=self._clock(), meta=self._meta)]
        # One line for each container: damage costs that container alone.
        lines += [_Line(set={key: raw}) for key, raw in self._entries.items()]
        data = b"".join(_frame(number, line) for number, line in enumerate(lines, 1))
        temporary = self.path + ".tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = -1
        said: list[str] = []
        try:
            fd = os.open(temporary, flags, 0o600)
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
            if self._keep_aside:
                said = self._set_aside()
            os.rename(temporary, self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self.error = _explained(self.path, "write", error)
            raise self.error from error
        self._forget_file()
        self._fd = fd
        self._size = self._compacted_size = len(data)
        self._saved(len(lines))
        self._sync_directory()
        return said

    def _set_aside(self) -> list[str]:
        """Give the old file a name under which it is never touched again."""
        numbers = [
            int(name.removeprefix(_ASIDE))
            for name in os.listdir(self.directory)
            if name.startswith(_ASIDE) and name.removeprefix(_ASIDE).isdecimal()
        ]
        aside = os.path.join(self.directory, f"{_ASIDE}{max(numbers, default=0) + 1}")
        try:
            # A second name first: whoever kills us now leaves the old file where it was.
            os.link(self.path, aside, follow_symlinks=False)
        except OSError:
            os.rename(self.path, aside)  # a directory, or a file system without hard links
        self._keep_aside = False
        return [f"the old checkpoint is kept as {aside}"]

    def _sync_directory(self) -> None:
        # Where this fails the file is in place; only its survival of a power cut is not certain.
        with contextlib.suppress(OSError):
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _short(value: str | None) -> str:
    return "not told" if value is None else f"{value[:60]!r}" + "…" * (len(value) > 60)
