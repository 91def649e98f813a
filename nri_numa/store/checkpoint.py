"""Checkpoint: the allocation of each container, which survives a crash of the agent at any line.

On disk it is a journal (`nri_numa.store.journal`) of JSON documents by key, one for each container
and pod, and one line for each request. A line is written by a single write(2), which survives a
crash of the process. It does not survive a crash of the kernel, but neither does a container. See
docs/adr/0006-checkpoint.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from nri_numa.engine.state import NodeState
from nri_numa.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointTooNew,
    StateDirectoryBusy,
)
from nri_numa.model.workload import ChangedStateIds
from nri_numa.observe.logs import get_logger
from nri_numa.observe.metrics import Metrics
from nri_numa.store.files import directory_problem, file_obstacle, read_file, replace_file
from nri_numa.store.journal import (
    JOURNAL_FORMAT,
    Document,
    JournalContents,
    JournalLine,
    changed_documents,
    encode,
    frame_line,
    parse_journal,
)
from nri_numa.text import escape_unprintable

log = get_logger("agent")

CHECKPOINT_FILE_NAME: Final = "checkpoint"
LOCK_FILE_NAME: Final = "lock"

_CORRUPT_PREFIX: Final = "checkpoint.corrupt-"
_MAX_CHECKPOINT_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a file that is read; 10,000 containers are 10 MB, and a journal is compacted at
four times that."""
_MIN_COMPACTED_BYTES: Final = 64 * 1024
"""Size below which a journal is not compacted: it is read in a millisecond."""


def read_checkpoint(path: str) -> JournalContents:
    """Read a checkpoint file and change nothing; for commands, while an agent may run.

    Raises:
        CheckpointTooNew: a newer version wrote the file.
        CheckpointCorrupt: nothing in the file can be used.
        CheckpointError: the file cannot be read.
    """
    try:
        contents = parse_journal(read_file(path, _MAX_CHECKPOINT_BYTES, check_owner=False))
    except OSError as error:
        raise _checkpoint_error(path, "read", error) from error
    unusable = _unusable_journal_error(path, contents)
    if unusable is not None:
        raise unusable
    if contents.torn:
        contents.problems.append(f"the last {contents.torn} bytes are an unfinished record")
    return contents


def _unusable_journal_error(path: str, contents: JournalContents) -> CheckpointError | None:
    if contents.newer:
        return CheckpointTooNew(
            path,
            f"is in format {contents.newer}, expected at most {JOURNAL_FORMAT}: "
            "a newer version of nri-numa wrote it",
        )
    if not contents.head:
        return CheckpointCorrupt(
            path, "is not a checkpoint, expected a first line with the version that wrote it"
        )
    return None


_STATE_IN_MEMORY_ONLY_TEXT: Final = "the state is in memory only, and every record tries again"
_STATE_DIR_HINT: Final = "choose another directory with --state-dir"
_REMEDY_BY_ERRNO: Final[Mapping[int, str]] = {
    errno.EACCES: f"let this user write there, or {_STATE_DIR_HINT}",
    errno.EPERM: f"let this user write there, or {_STATE_DIR_HINT}",
    errno.EROFS: f"the file system is read-only, {_STATE_DIR_HINT}",
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "raise the quota or free space on that file system",
    errno.ENOTDIR: f"a part of the path is not a directory, {_STATE_DIR_HINT}",
    errno.ENOENT: f"create the directory, or {_STATE_DIR_HINT}",
    errno.EINVAL: f"remove it, or {_STATE_DIR_HINT}",
    errno.ELOOP: f"the path holds a symbolic link where none may be, {_STATE_DIR_HINT}",
}


def _checkpoint_error(path: str, action: str, error: OSError) -> CheckpointError:
    remedy = _REMEDY_BY_ERRNO.get(
        error.errno or 0, f"look at that file system, or {_STATE_DIR_HINT}"
    )
    if action == "read" and error.errno in (errno.EACCES, errno.EPERM):
        remedy = "read it as the user that the agent runs as"
    if action == "read" and error.errno == errno.ENOENT:
        remedy = f"no agent has written it, or {_STATE_DIR_HINT}"
    return CheckpointError(path, f"cannot {action}: {error.strerror or error}; {remedy}")


class CheckpointStore:
    """Journal in one directory, which is created. Used from one thread.

    It retains documents that it could not write: the next successful write includes them. Without a
    checkpoint a node places containers as well as before, but after a crash it does not know their
    desired CPUs: so a metric and a log line report it.

    The identity names the writer: every value but ``version`` (machine, boot) must be equal before
    a checkpoint is used again.

    Attributes:
        trusted: True if only root and this user can write to the directory; else nothing in it is
            used.
        error: why not everything is on disk; None if it is.
        written_at: Unix time of the last record of a step; None before the first.
    """

    def __init__(
        self,
        directory: str,
        *,
        identity: Mapping[str, str],
        clock: Callable[[], float],
        metrics: Metrics | None = None,
    ) -> None:
        self.directory = directory
        self.path = os.path.join(directory, CHECKPOINT_FILE_NAME)
        self._identity = dict(identity)
        self._clock = clock
        self.metrics = metrics
        self.written_at: float | None = None
        self._entries: dict[str, msgspec.Raw] = {}
        self._lock_fd = -1
        self._fd = -1
        self._size = 0
        self._compacted_size = 0
        self._sequence = 0
        self._keep_corrupt = False
        self.trusted = True
        self.error: CheckpointError | None = None

    @property
    def has_lock(self) -> bool:
        """True if this agent has the lock of the directory."""
        return self._lock_fd >= 0

    @property
    def is_healthy(self) -> bool:
        """True if everything is on disk; else `error` has the reason."""
        return self.error is None and self._fd >= 0

    @property
    def write_problem(self) -> str:
        """Reason why not everything is on disk; empty if it is."""
        return "" if self.error is None else str(self.error)

    def load(self) -> JournalContents:
        """Lock the directory, read the journal, and start a clean one.

        No content on disk makes this fail: an unusable file is reported in ``problems`` and renamed
        to ``checkpoint.corrupt-<n>``, unless another boot wrote it. A directory that cannot be
        written is reported too; the store then runs in memory, and retries with every record.

        Raises:
            StateDirectoryBusy: another agent uses the directory.
        """
        lock_problems: list[str] = []
        try:
            self._take_lock()
        except StateDirectoryBusy:
            raise
        except CheckpointError as error:
            lock_problems.append(f"{error}; {_STATE_IN_MEMORY_ONLY_TEXT}")
        loaded = self._read_journal()
        loaded.problems[:0] = lock_problems
        self._entries = {key: loaded.raw[key] for key in loaded.entries}
        if self.has_lock:
            try:
                loaded.problems += self._rewrite_journal()
            except CheckpointError as error:
                loaded.problems.append(f"{error}; {_STATE_IN_MEMORY_ONLY_TEXT}")
        return loaded

    def _read_journal(self) -> JournalContents:
        """Read the usable part of the journal; the file is kept if not everything is usable."""
        if not self.trusted:
            self._keep_corrupt = True
            return JournalContents()
        unusable: CheckpointError | None
        try:
            journal = parse_journal(read_file(self.path, _MAX_CHECKPOINT_BYTES))
            unusable = _unusable_journal_error(self.path, journal)
        except (FileNotFoundError, NotADirectoryError):
            return JournalContents()
        except OSError as error:
            journal, unusable = JournalContents(), _checkpoint_error(self.path, "read", error)
        foreign = {
            key: f"its {key} is {_value_text(journal.head.get(key))}, expected {_value_text(value)}"
            for key, value in self._identity.items()
            if key != "version" and journal.head.get(key) != value
        }
        if unusable is None and foreign:
            problem = "is of another machine or boot: " + ", ".join(foreign.values())
            unusable = CheckpointError(self.path, problem)
            if list(foreign) == ["boot"]:  # its containers ended with that boot
                return JournalContents(
                    problems=[f"{unusable}; it is not used, a new one replaces it"]
                )
        if unusable is not None:
            self._keep_corrupt = True
            return JournalContents(problems=[f"{unusable}; it is not used"])
        if journal.problems:
            self._keep_corrupt = True
            text = "; ".join(journal.problems[:5]) + " and more" * (len(journal.problems) > 5)
            journal.problems = [f"{self.path}: {text}; the intact lines are used"]
        if journal.torn:
            journal.problems.append(
                f"{self.path}: the last {journal.torn} bytes are an unfinished record, now cut off"
            )
        return journal

    def write_change(self, previous: NodeState, state: NodeState, change: ChangedStateIds) -> None:
        """Write the changes of one step, before it is answered; a failure is logged once."""
        changes = changed_documents(previous, state, change)
        if changes or self.error is not None:
            start_time = time.perf_counter()
            if self._attempt_write(partial(self.append_documents, changes)):
                self.written_at = self._clock()
                if self.metrics is not None:
                    self.metrics.checkpoint_write.observe(time.perf_counter() - start_time)

    def retry_or_compact(self) -> None:
        """Retry a failed write, or compact the journal if it is too large; between requests."""
        failed = self.error is not None
        if self._attempt_write(self.compact_if_needed) and failed:
            self.written_at = self._clock()

    def _attempt_write(self, action: Callable[[], object]) -> bool:
        failed = self.error is not None
        try:
            action()
        except CheckpointError as error:
            if self.metrics is not None:
                self.metrics.checkpoint_errors.inc()
            if not failed:
                log.error("checkpoint not written", problem=str(error))
            return False
        if failed:
            log.info("checkpoint written again")
        return True

    def append_documents(self, changes: Mapping[str, Document | None]) -> None:
        """Write new documents by key, together with those that could not be written so far.

        The documents are encoded at once and may be changed by the caller afterwards. None removes
        a key; without changes only the failed write is retried. After a `CheckpointError` they are
        in memory but not on disk, and the next record retries.
        """
        updates = {
            key: msgspec.Raw(encode(document))
            for key, document in changes.items()
            if document is not None
        }
        deleted_keys = tuple(key for key, document in changes.items() if document is None)
        self._entries |= updates
        for key in deleted_keys:
            self._entries.pop(key, None)
        self._close_replaced_file()
        if self._fd < 0:
            self._rewrite_journal()
        elif changes:
            self._append_line(JournalLine(updates=updates, delete=deleted_keys))

    def compact_if_needed(self) -> bool:
        """Compact the journal if it is much larger than its contents; True if it was rewritten.

        It also detects a removed or replaced file, and retries a failed write. After a
        `CheckpointError` the old one stays in use.
        """
        self._close_replaced_file()
        # Four times: with less, a node with frequent changes would compact all the time.
        is_oversized = self._size > max(_MIN_COMPACTED_BYTES, 4 * self._compacted_size)
        if self.is_healthy and not is_oversized:
            return False
        self._rewrite_journal()
        return True

    def close(self) -> None:
        """Release the directory; the journal stays."""
        self._close_journal_file()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- files ---

    def _take_lock(self) -> None:
        """Lock the directory, or raise `StateDirectoryBusy` or another `CheckpointError`."""
        if self._lock_fd >= 0:
            if os.fstat(self._lock_fd).st_nlink:
                return
            # The directory was removed: a lock on an unlinked file excludes no agent.
            os.close(self._lock_fd)
            self._lock_fd = -1
        path = os.path.join(self.directory, LOCK_FILE_NAME)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            problem = directory_problem(os.stat(self.directory))
            self.trusted = not problem
            if problem:
                text = f"{problem}; chown and chmod it, or {_STATE_DIR_HINT}"
                raise self._record_error(CheckpointError(self.directory, text))
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._record_error(
                _checkpoint_error(self.directory, "use as state directory", error)
            ) from error
        if problem := file_obstacle(os.fstat(fd)):
            os.close(fd)
            text = f"{problem}; remove it, or {_STATE_DIR_HINT}"
            raise self._record_error(CheckpointError(path, text))
        try:
            # The kernel releases it when this process ends for any reason.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            number, _, pod = os.pread(fd, 400, 0).decode(errors="replace").strip().partition("\n")
            os.close(fd)
            process = f"process {number}" if number.isdigit() else ""
            owner = escape_unprintable(pod) if pod else process
            raise self._record_error(StateDirectoryBusy(self.directory, owner)) from error
        self._lock_fd = fd
        # In another pod the pid means nothing. On a full disk the lock works too, only the name of
        # its owner is missing.
        pod = "/".join(os.environ.get(name, "") for name in ("POD_NAMESPACE", "POD_NAME"))
        pod_line = f"pod {pod}\n" if len(pod) > 1 else ""
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n{pod_line}".encode(), 0)

    def _record_error(self, error: CheckpointError) -> CheckpointError:
        self.error = error
        return error

    def _close_replaced_file(self) -> None:
        """Close the file if it is no longer the one that the next start will read."""
        with contextlib.suppress(OSError):
            if self._fd < 0 or os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                return
        self._close_journal_file()

    def _close_journal_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append_line(self, record: JournalLine) -> None:
        line = frame_line(self._sequence + 1, record)
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._close_journal_file()  # it may have half a line: the next record rewrites it
            raise self._record_error(_checkpoint_error(self.path, "write", error)) from error
        self._size += len(line)
        self._sequence += 1

    def _rewrite_journal(self) -> list[str]:
        """Write everything to a new file and replace the old one with it.

        A kill at any point leaves either the old file or the new one. Return a sentence if an
        unusable old file is kept; usually none.
        """
        self._take_lock()
        lines = [JournalLine(head=self._identity, written_at=self._clock())]
        # One line for each container: damage costs that container alone.
        lines += [JournalLine(updates={key: raw}) for key, raw in self._entries.items()]
        data = b"".join(frame_line(number, line) for number, line in enumerate(lines, 1))
        notes: list[str] = []
        try:
            if self._keep_corrupt:
                notes = self._rename_corrupt()
            fd = replace_file(self.path, data)
        except OSError as error:
            raise self._record_error(_checkpoint_error(self.path, "write", error)) from error
        self._close_journal_file()
        self._fd = fd
        self._size = self._compacted_size = len(data)
        self._sequence = len(lines)
        self.error = None
        return notes

    def _rename_corrupt(self) -> list[str]:
        """Rename the old file to a name that is never written again."""
        numbers = [
            int(name.removeprefix(_CORRUPT_PREFIX))
            for name in os.listdir(self.directory)
            if name.startswith(_CORRUPT_PREFIX) and name.removeprefix(_CORRUPT_PREFIX).isdecimal()
        ]
        path = os.path.join(self.directory, f"{_CORRUPT_PREFIX}{max(numbers, default=0) + 1}")
        try:
            # A link first: a kill now leaves the old file in place.
            os.link(self.path, path, follow_symlinks=False)
        except OSError:
            os.rename(self.path, path)  # a directory, or a file system without hard links
        self._keep_corrupt = False
        return [f"the old checkpoint is kept as {path}"]


def _value_text(value: str | None) -> str:
    return "missing" if value is None else f"{value[:60]!r}" + "…" * (len(value) > 60)
