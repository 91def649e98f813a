"""Files of the state directory: whether they are ours, and the key that signs annotations.

Who can write the state directory can say which container owns which CPUs, and who can put
a FIFO or a link there can make a start wait for ever or write elsewhere. Files are judged by the
descriptor that is used afterwards, so nothing can be put in their place in between.

The key is made once and lives as long as the directory: on ``/run``, until the next boot, as
containers do. Where it is lost, the annotations of older containers are believed only as far as
their pods could be given the same today (`nri_numa.engine.assigned`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

_FILE_TYPE_TEXTS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISLNK, "a symbolic link"),
)
_SHARED_WRITE_BITS: Final = stat.S_IWGRP | stat.S_IWOTH


def file_obstacle(status: os.stat_result, *, ours: bool = True, secret: bool = False) -> str:
    """Why an opened file is not used, as the end of a sentence; empty when it is.

    One of ours belongs to us or to root, and only they may write it; a secret one only they read.
    """
    if not stat.S_ISREG(status.st_mode):
        return f"is {_file_type(status.st_mode)}, expected a regular file"
    problem = _ownership_problem(status) if ours else ""
    if not problem and secret and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        problem = f"has mode {mode:04o}, expected one that is for its owner only, such as 0600"
    return problem


def directory_problem(status: os.stat_result) -> str:
    """Say why a directory is not used for the state, as `file_obstacle`."""
    if not stat.S_ISDIR(status.st_mode):
        return f"is {_file_type(status.st_mode)}, expected a directory"
    return _ownership_problem(status)


def _ownership_problem(status: os.stat_result) -> str:
    me = os.geteuid()
    if status.st_uid not in (0, me):
        whom = "root" if me == 0 else f"user {me} or root"
        return f"belongs to user {status.st_uid}, expected {whom}"
    if status.st_mode & _SHARED_WRITE_BITS:
        mode = stat.S_IMODE(status.st_mode)
        return f"has mode {mode:04o}, expected one that only its owner may write, such as 0700"
    return ""


def _file_type(mode: int) -> str:
    return next((name for is_it, name in _FILE_TYPE_TEXTS if is_it(mode)), "a regular file")


def read_file(path: str, most: int, *, ours: bool = True, secret: bool = False) -> bytes:
    """A file of at most so many bytes, see `file_obstacle`; never waits for a FIFO's writer.

    Raises:
        OSError: it cannot be read, or it is another file than that.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if problem := file_obstacle(status, ours=ours, secret=secret):
            raise OSError(errno.EINVAL, problem, path)
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"is larger than {most} bytes", path)
        with open(fd, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes, *, sync: bool = False, mode: int | None = None) -> int:
    """Put a file in place of another, or of none; its descriptor, for more at its end.

    A failure or a kill leaves the old one or the new one; with ``sync`` so does the end of the
    machine, which no container outlives: for files that a user names, where no device is replaced,
    and no link, which may be another user's. Without a mode it is its owner's alone.
    """
    if sync and os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise OSError(errno.EINVAL, "is no regular file", path)
    temporary = f"{path}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        if mode is not None:  # the agent is not allowed to call fchmod(2)
            os.fchmod(fd, mode)
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        if sync:
            os.fsync(fd)
        os.rename(temporary, path)
    except OSError:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return fd


def remove_flat_directory(path: str) -> None:
    """Remove a directory that holds nothing but files; `OSError` where that cannot be."""
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)


# --- The key that signs what is written on containers ---

SIGNING_KEY_FILE_NAME: Final = "key"
_SIGNING_KEY_BYTES: Final = 32
"""As long as the hash, what RFC 2104 recommends."""


def read_key(directory: str) -> bytes:
    """The key of a state directory; empty where there is none that can be used."""
    with contextlib.suppress(OSError):
        return _read_signing_key_or_raise(os.path.join(directory, SIGNING_KEY_FILE_NAME))
    return b""


def load_or_create_signing_key(
    directory: str, *, trusted: bool, writable: bool
) -> tuple[bytes, list[str]]:
    """Read the key, or make one; and a sentence for each thing that was wrong.

    Where the directory is not trusted nothing is read nor written; where it is not ours to write, a
    new key lasts as long as this process.
    """
    path, problems = os.path.join(directory, SIGNING_KEY_FILE_NAME), []
    if trusted:
        try:
            return _read_signing_key_or_raise(path), []
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(f"{path}: {error.strerror}; another key is made")
    key = os.urandom(_SIGNING_KEY_BYTES)
    if trusted and writable:
        try:
            os.close(replace_file(path, key.hex().encode() + b"\n"))
        except OSError as error:
            problems.append(
                f"{path}: cannot write: {error.strerror}; the key is lost when this process ends"
            )
    return key, problems


def _read_signing_key_or_raise(path: str) -> bytes:
    try:
        key = bytes.fromhex(read_file(path, 4 * _SIGNING_KEY_BYTES, secret=True).strip().decode())
    except ValueError:
        key = b""
    if len(key) != _SIGNING_KEY_BYTES:
        raise OSError(
            errno.EINVAL, f"is no key, expected {2 * _SIGNING_KEY_BYTES} hexadecimal digits", path
        )
    return key
