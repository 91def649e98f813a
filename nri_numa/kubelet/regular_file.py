"""A file of the kubelet, read whole; whatever else is in its place makes nobody wait."""

from __future__ import annotations

import os
import stat
from typing import Final

MAX_BYTES: Final = 1 << 20
"""Sixty bytes a container and a hundred and fifty a block of memory: ten thousand containers. A
configuration has some thousand."""

Signature = tuple[int, int, int, int]


def signature(found: os.stat_result) -> Signature:
    """What tells a file from another one of its name, and from itself when it was written."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def read(path: str) -> tuple[bytes, Signature]:
    """The whole file, and what tells it from another one.

    Raises:
        OSError: it cannot be read, is no regular file, or is longer than `MAX_BYTES`.
    """
    # A pipe or a device in its place must not make anybody wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("is no regular file")
        if found.st_size > MAX_BYTES:
            raise OSError(f"has {found.st_size} bytes, expected at most {MAX_BYTES}")
        return file.read(MAX_BYTES), signature(found)
