"""Whether files and directories of ours are ours: what somebody else may write is not trusted.

Whoever can write the state directory can say which container owns which CPUs, and whoever can put
a FIFO or a link there can make a start wait for ever or write elsewhere. Files are judged by the
descriptor that is used afterwards, so nothing can be put in their place in between.
"""

from __future__ import annotations

import os
import stat
from typing import Final

_SORTS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISLNK, "a symbolic link"),
)
_SHARED: Final = stat.S_IWGRP | stat.S_IWOTH


def file_problem(status: os.stat_result, *, ours: bool = True, secret: bool = False) -> str:
    """Say why an opened file is not used; empty when it is.

    Args:
        status: of its descriptor.
        ours: it must belong to us or to root, and nobody else may write it.
        secret: nobody else may read it either.

    Returns:
        What it is and what was expected, as the end of a sentence that starts with its path.
    """
    if not stat.S_ISREG(status.st_mode):
        return f"is {_sort(status.st_mode)}, expected a regular file"
    problem = _foreign(status) if ours else ""
    if not problem and secret and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        problem = f"has mode {mode:04o}, expected one that is for its owner only, such as 0600"
    return problem


def directory_problem(status: os.stat_result) -> str:
    """Say why a directory is not used for the state, as `file_problem`."""
    if not stat.S_ISDIR(status.st_mode):
        return f"is {_sort(status.st_mode)}, expected a directory"
    return _foreign(status)


def _foreign(status: os.stat_result) -> str:
    me = os.geteuid()
    if status.st_uid not in (0, me):
        whom = "root" if me == 0 else f"user {me} or root"
        return f"belongs to user {status.st_uid}, expected {whom}"
    if status.st_mode & _SHARED:
        mode = stat.S_IMODE(status.st_mode)
        return f"has mode {mode:04o}, expected one that only its owner may write, such as 0700"
    return ""


def _sort(mode: int) -> str:
    return next((name for is_it, name in _SORTS if is_it(mode)), "a regular file")
