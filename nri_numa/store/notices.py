"""The file of notices: one line for each change, appended, written anew when it has grown.

A line is written after the answer to the runtime has left and before anybody else can have read the
notice, so a number that a reader saw is never given out again. The file is not synced: it need not
outlive the machine. What cannot be read begins a new sequence, which readers notice by its name.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from nri_numa.observe.notices import MAX_NOTICES, Notice, NoticeLog
from nri_numa.store.files import read_file, replace_file

NOTICES_FILE_NAME: Final = "notices"
MAX_NOTICES_FILE_BYTES: Final = 4 << 20
_NOTICE_REWRITE_LINES: Final = 8 * MAX_NOTICES
"""Lines after which the file is written anew."""


class _NoticesHeader(msgspec.Struct, frozen=True):
    """The first line.

    Attributes:
        nri_numa_notices: version of the form.
    """

    nri_numa_notices: int
    instance: str
    identity: dict[str, str]
    number: int


_encode = msgspec.json.Encoder().encode
_head = msgspec.json.Decoder(_NoticesHeader)
_line = msgspec.json.Decoder(Notice)


class NoticeFile:
    """Keeps the notices of one agent.

    The identity is the checkpoint's; but for ``version`` it must be the same for the file to be
    used again. ``trouble`` is called once with why the file is not written any more.
    """

    def __init__(
        self,
        directory: str,
        *,
        identity: Mapping[str, str],
        notices: NoticeLog,
        trouble: Callable[[str], object],
    ) -> None:
        self.path = os.path.join(directory, NOTICES_FILE_NAME)
        self._identity = {key: value for key, value in identity.items() if key != "version"}
        self._notices = notices
        self._trouble = trouble
        self._fd = -1
        self._lines = 0
        self._failed = False

    def restore_and_open(self, *, writable: bool = True) -> str:
        """Restore what the last run knew, and write from now on; why a new sequence begins, if so.

        It is not kept where the directory is not ours alone.
        """
        if not writable:
            self._notices.restore_notices(secrets.token_hex(4))
            return ""
        problem = self._load_notices()
        self._notices.keep = self._append_notice
        self._rewrite_file()
        return problem

    def close(self) -> None:
        """Write nothing any more."""
        self._notices.keep = lambda notice: None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def _load_notices(self) -> str:
        self._notices.restore_notices(secrets.token_hex(4))
        try:
            data = read_file(self.path, MAX_NOTICES_FILE_BYTES)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.path}: cannot be read: {error.strerror or error}; it is not used"
        first, *lines = data.split(b"\n")
        try:
            head = _head.decode(first)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"{self.path}: is damaged ({error}); it is not used"
        if head.nri_numa_notices != 1 or head.identity != self._identity:
            return ""  # of another boot: those containers are gone
        found: dict[str, Notice] = {}
        for line in lines:
            try:
                notice = _line.decode(line) if line else None
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break  # the process ended in the middle of it
            if notice is not None:
                found[notice.id] = notice
        self._notices.restore_notices(head.instance, found.values(), head.number)
        return ""

    def _append_notice(self, notice: Notice) -> None:
        if self._fd < 0 or self._lines >= _NOTICE_REWRITE_LINES:
            self._rewrite_file()  # holds the new one too
            return
        line = _encode(notice) + b"\n"
        try:
            if os.write(self._fd, line) != len(line):  # the next would be on the same line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._report_write_failure(error)
            os.close(self._fd)
            self._fd = -1
            return
        self._lines += 1

    def _rewrite_file(self) -> None:
        notices = self._notices.notices_after()
        head = _NoticesHeader(1, self._notices.instance, self._identity, self._notices.number)
        data = b"\n".join([_encode(head), *map(_encode, notices), b""])
        try:
            fd = replace_file(self.path, data)
        except OSError as error:
            self._report_write_failure(error)
            return
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._lines, self._failed = fd, len(notices), False

    def _report_write_failure(self, error: OSError) -> None:
        if not self._failed:
            self._trouble(f"{self.path}: cannot be written: {error.strerror or error}")
        self._failed = True
