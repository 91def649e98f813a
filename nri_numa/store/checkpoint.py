"""What was meant for each container, kept over a death of the agent at any line.

On disk it is a journal (`nri_numa.store.journal`) of JSON documents by key, one for each container
and pod, and one line for each request. A line is written by a single write(2), which survives the
death of the process; what it does not survive, the death of the kernel, no container survives
either. See docs/adr/0006-checkpoint.md.
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
"""10,000 containers are 10 MB, and a journal is compacted at four times that; a larger file is not
ours, and is not read."""
_MIN_COMPACTED_BYTES: Final = 64 * 1024
"""Compacting a smaller journal would not pay: it is read in a millisecond."""


def read_checkpoint(path: str) -> JournalContents:
    """Read a checkpoint file without changing anything; for commands, beside a running agent.

    Raises:
        CheckpointTooNew: a newer version wrote it.
        CheckpointCorrupt: nothing in it can be used.
        CheckpointError: it cannot be read.
    """
    try:
        found = parse_journal(read_file(path, _MAX_CHECKPOINT_BYTES, ours=False))
    except OSError as error:
        raise _checkpoint_error(path, "read", error) from error
    unusable = _unusable_journal_error(path, found)
    if unusable is not None:
        raise unusable
    if found.torn:
        found.problems.append(f"the last {found.torn} bytes are an unfinished record")
    return found


def _unusable_journal_error(path: str, found: JournalContents) -> CheckpointError | None:
    if found.newer:
        return CheckpointTooNew(
            path,
            f"is in format {found.newer}, expected at most {JOURNAL_FORMAT}: "
            "a newer version of nri-numa wrote it",
        )
    if not found.head:
        return CheckpointCorrupt(
            path, "is no checkpoint, expected a first line with the version that wrote it"
        )
    return None


_STATE_IN_MEMORY_ONLY_TEXT: Final = (
    "running on with the state in memory only, every record tries again"
)
_STATE_DIR_HINT: Final = "choose another directory with --state-dir"
_REMEDY_BY_ERRNO: Final[Mapping[int, str]] = {
    errno.EACCES: f"let this user write there, or {_STATE_DIR_HINT}",
    errno.EPERM: f"let this user write there, or {_STATE_DIR_HINT}",
    errno.EROFS: f"the file system is read-only, {_STATE_DIR_HINT}",
    errno.ENOSPC: "free space on that file system",
    errno.EDQUOT: "raise the quota or free space on that file system",
    errno.ENOTDIR: f"a part of the path is no directory, {_STATE_DIR_HINT}",
    errno.ENOENT: f"make the directory, or {_STATE_DIR_HINT}",
    errno.EINVAL: f"take it away, or {_STATE_DIR_HINT}",
    errno.ELOOP: f"the path holds a symbolic link where none may be, {_STATE_DIR_HINT}",
}


def _checkpoint_error(path: str, action: str, error: OSError) -> CheckpointError:
    remedy = _REMEDY_BY_ERRNO.get(
        error.errno or 0, f"look at that file system, or {_STATE_DIR_HINT}"
    )
    if action == "read" and error.errno in (errno.EACCES, errno.EPERM):
        remedy = "read it as the user that the agent runs as"
    return CheckpointError(path, f"cannot {action}: {error.strerror or error}; {remedy}")


class CheckpointStore:
    """The journal in one directory, which is made. Used from one thread.

    It remembers what it could not write: the next record that can be written writes everything. A
    node without a checkpoint places containers as well as before; what is lost is the intent after
    a crash, and that is what the metric and the log line are for.

    The identity says who writes: every value but ``version`` (machine, boot) must be the same for a
    checkpoint to be used again.

    Attributes:
        trusted: only root and we can write to the directory; else nothing in it is used.
        error: why not everything is on disk; None when it is.
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
        self._keep_aside = False
        self.trusted = True
        self.error: CheckpointError | None = None

    @property
    def has_lock(self) -> bool:
        """Whether the directory is ours alone."""
        return self._lock_fd >= 0

    @property
    def is_healthy(self) -> bool:
        """Whether everything recorded is on disk; `error` says why not."""
        return self.error is None and self._fd >= 0

    @property
    def write_problem(self) -> str:
        """Why not everything is on disk; empty when it is."""
        return "" if self.error is None else str(self.error)

    def load(self) -> JournalContents:
        """Take the directory, read what is there, and start a clean journal.

        Nothing found on disk makes this fail: what cannot be used is said in ``problems`` and kept
        aside as ``checkpoint.corrupt-<n>``, unless another boot wrote it. A directory that cannot
        be written is said too; the store then runs on in memory, and tries with every record.

        Raises:
            StateDirectoryBusy: another agent uses the directory.
        """
        problems: list[str] = []
        try:
            self._take_lock()
        except StateDirectoryBusy:
            raise
        except CheckpointError as error:
            problems.append(f"{error}; {_STATE_IN_MEMORY_ONLY_TEXT}")
        loaded = self._read_journal()
        problems += loaded.problems
        self._entries = {key: loaded.raw[key] for key in loaded.entries}
        if self._lock_fd >= 0:
            try:
                problems += self._rewrite_journal()
            except CheckpointError as error:
                problems.append(f"{error}; {_STATE_IN_MEMORY_ONLY_TEXT}")
        loaded.problems = problems
        return loaded

    def _read_journal(self) -> JournalContents:
        """Read the journal and decide what of it may be used; it is kept aside where not all is."""
        if not self.trusted:
            self._keep_aside = True
            return JournalContents()
        unusable: CheckpointError | None
        try:
            found = parse_journal(read_file(self.path, _MAX_CHECKPOINT_BYTES))
            unusable = _unusable_journal_error(self.path, found)
        except (FileNotFoundError, NotADirectoryError):
            return JournalContents()
        except OSError as error:
            found, unusable = JournalContents(), _checkpoint_error(self.path, "read", error)
        foreign = {
            key: f"its {key} is {_value_text(found.head.get(key))}, expected {_value_text(value)}"
            for key, value in self._identity.items()
            if key != "version" and found.head.get(key) != value
        }
        if unusable is None and foreign:
            why = "is of another machine or boot: " + ", ".join(foreign.values())
            unusable = CheckpointError(self.path, why)
            if list(foreign) == ["boot"]:  # its containers ended with it
                return JournalContents(
                    problems=[f"{unusable}; it is not used, a new one replaces it"]
                )
        if unusable is not None:
            self._keep_aside = True
            return JournalContents(problems=[f"{unusable}; it is not used"])
        if found.problems:
            self._keep_aside = True
            said = "; ".join(found.problems[:5]) + " and more" * (len(found.problems) > 5)
            found.problems = [f"{self.path}: {said}; the intact lines are used"]
        if found.torn:
            found.problems.append(
                f"{self.path}: the last {found.torn} bytes are an unfinished record, now cut off"
            )
        return found

    def write_change(self, before: NodeState, after: NodeState, change: ChangedStateIds) -> None:
        """Write what one step changed, before it is answered; said once when it cannot be."""
        changes = changed_documents(before, after, change)
        if changes or self.error is not None:
            started = time.perf_counter()
            if self._attempt_write(partial(self.append_documents, changes)):
                self.written_at = self._clock()
                if self.metrics is not None:
                    self.metrics.checkpoint_write.observe(time.perf_counter() - started)

    def retry_or_compact(self) -> None:
        """Between requests: try again what failed, and shrink the journal when it has grown."""
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
                log.error("checkpoint not written", error=str(error))
            return False
        if failed:
            log.info("checkpoint written again")
        return True

    def append_documents(self, changes: Mapping[str, Document | None]) -> None:
        """Write down new documents by key, together with all that could not be written so far.

        The documents are encoded at once and may be changed by the caller afterwards; None forgets
        what stands under a key, and no changes only try again.

        Raises:
            CheckpointError: it is remembered but is not on disk; the next record tries again.
        """
        encoded: dict[str, msgspec.Raw | None] = {
            key: None if document is None else msgspec.Raw(encode(document))
            for key, document in changes.items()
        }
        for key, raw in encoded.items():
            if raw is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = raw
        self._close_replaced_file()
        if self._fd < 0:
            self._rewrite_journal()
        elif encoded:
            self._append_line(encoded)

    def compact_if_needed(self) -> bool:
        """Shrink the journal when it has outgrown what it says; whether a new one was written.

        Also notices that the file was taken away or replaced, and tries again what failed before.

        Raises:
            CheckpointError: it could not be written; the old one stays in use.
        """
        self._close_replaced_file()
        # Four times: with less, a node whose containers only ever change would compact all day.
        grown = self._size > max(_MIN_COMPACTED_BYTES, 4 * self._compacted_size)
        if self.is_healthy and not grown:
            return False
        self._rewrite_journal()
        return True

    def close(self) -> None:
        """Let the directory go; the journal stays."""
        self._close_journal_file()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- files ---

    def _take_lock(self) -> None:
        """Become the only user of the directory.

        Raises:
            StateDirectoryBusy: another agent is.
            CheckpointError: the directory cannot be made or written.
        """
        if self._lock_fd >= 0:
            if os.fstat(self._lock_fd).st_nlink:
                return
            # The directory was taken away: a lock on a file without a name keeps no agent out.
            os.close(self._lock_fd)
            self._lock_fd = -1
        path = os.path.join(self.directory, LOCK_FILE_NAME)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            os.makedirs(self.directory, mode=0o700, exist_ok=True)
            problem = directory_problem(os.stat(self.directory))
            self.trusted = not problem
            if problem:
                remedy = f"chown and chmod it, or {_STATE_DIR_HINT}"
                raise self._build_and_remember_error(self.directory, problem, remedy)
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            self.error = _checkpoint_error(self.directory, "use as state directory", error)
            raise self.error from error
        problem = file_obstacle(os.fstat(fd))
        if problem:
            os.close(fd)
            raise self._build_and_remember_error(
                path, problem, f"take it away, or {_STATE_DIR_HINT}"
            )
        try:
            # The kernel lets go of it when we die, however we die.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            number, _, pod = os.pread(fd, 400, 0).decode(errors="replace").strip().partition("\n")
            os.close(fd)
            process = f"process {number}" if number.isdigit() else ""
            owner = escape_unprintable(pod) if pod else process
            self.error = StateDirectoryBusy(self.directory, owner)
            raise self.error from error
        self._lock_fd = fd
        # In another pod the number of a process says nothing. On a full disk the lock holds all the
        # same, only its owner's name is missing.
        pod = "/".join(os.environ.get(name, "") for name in ("POD_NAMESPACE", "POD_NAME"))
        named = f"pod {pod}\n" if len(pod) > 1 else ""
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n{named}".encode(), 0)

    def _build_and_remember_error(self, path: str, problem: str, remedy: str) -> CheckpointError:
        self.error = CheckpointError(path, f"{problem}; {remedy}")
        return self.error

    def _close_replaced_file(self) -> None:
        """Let the file go that is no longer the one which the next start will read."""
        try:
            if self._fd < 0 or os.path.samestat(os.fstat(self._fd), os.lstat(self.path)):
                return
        except OSError:
            pass
        self._close_journal_file()

    def _close_journal_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append_line(self, encoded: Mapping[str, msgspec.Raw | None]) -> None:
        line = frame_line(
            self._sequence + 1,
            JournalLine(
                updates={key: raw for key, raw in encoded.items() if raw is not None},
                delete=tuple([key for key, raw in encoded.items() if raw is None]),
            ),
        )
        try:
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._close_journal_file()  # half a line may be in it: the next record writes a new one
            self.error = _checkpoint_error(self.path, "write", error)
            raise self.error from error
        self._size += len(line)
        self._sequence += 1

    def _rewrite_journal(self) -> list[str]:
        """Write everything to a new file and put it in place of the old one.

        A kill anywhere in here leaves either the old file or the new one under the name. Gives a
        sentence where an unusable old file is kept; usually none.
        """
        self._take_lock()
        lines = [JournalLine(head=self._identity, written_at=self._clock())]
        # One line for each container: damage costs that container alone.
        lines += [JournalLine(updates={key: raw}) for key, raw in self._entries.items()]
        data = b"".join(frame_line(number, line) for number, line in enumerate(lines, 1))
        said: list[str] = []
        try:
            if self._keep_aside:
                said = self._rename_corrupt()
            fd = replace_file(self.path, data)
        except OSError as error:
            self.error = _checkpoint_error(self.path, "write", error)
            raise self.error from error
        self._close_journal_file()
        self._fd = fd
        self._size = self._compacted_size = len(data)
        self._sequence = len(lines)
        self.error = None
        return said

    def _rename_corrupt(self) -> list[str]:
        """Give the old file a name under which it is never touched again."""
        numbers = [
            int(name.removeprefix(_CORRUPT_PREFIX))
            for name in os.listdir(self.directory)
            if name.startswith(_CORRUPT_PREFIX) and name.removeprefix(_CORRUPT_PREFIX).isdecimal()
        ]
        aside = os.path.join(self.directory, f"{_CORRUPT_PREFIX}{max(numbers, default=0) + 1}")
        try:
            # A second name first: a kill now leaves the old file where it was.
            os.link(self.path, aside, follow_symlinks=False)
        except OSError:
            os.rename(self.path, aside)  # a directory, or a file system without hard links
        self._keep_aside = False
        return [f"the old checkpoint is kept as {aside}"]


def _value_text(value: str | None) -> str:
    return "missing" if value is None else f"{value[:60]!r}" + "…" * (len(value) > 60)
