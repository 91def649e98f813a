"""Files of the state directory: checks of their owner, and the key that signs annotations.

A user who can write the state directory can assign exclusive CPUs, and one who can create a FIFO or
a link there can block a start without limit or redirect a write. Files are checked by the
descriptor that is used afterwards, so nobody can replace them in between.

The key is created once and lives as long as the directory: on ``/run`` until the next boot, as
containers do. If it is lost, the annotation of an older container is adopted only if its pod could
get the same assignment now (`nri_numa.engine.assigned`).
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


def file_obstacle(status: os.stat_result, *, check_owner: bool = True, secret: bool = False) -> str:
    """Return why an opened file is not used, as the end of a sentence; empty if it is.

    With ``check_owner`` it must belong to this user or root, and only they may write it. Only they
    may read a secret one.
    """
    if not stat.S_ISREG(status.st_mode):
        return f"is {_file_type(status.st_mode)}, expected a regular file"
    problem = _ownership_problem(status) if check_owner else ""
    if not problem and secret and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(status.st_mode)
        problem = f"has mode {mode:04o}, expected one that is for its owner only, such as 0600"
    return problem


def directory_problem(status: os.stat_result) -> str:
    """Return why a directory is not used for the state, as `file_obstacle`."""
    if not stat.S_ISDIR(status.st_mode):
        return f"is {_file_type(status.st_mode)}, expected a directory"
    return _ownership_problem(status)


def _ownership_problem(status: os.stat_result) -> str:
    euid = os.geteuid()
    if status.st_uid not in (0, euid):
        owners = "root" if euid == 0 else f"user {euid} or root"
        return f"belongs to user {status.st_uid}, expected {owners}"
    if status.st_mode & _SHARED_WRITE_BITS:
        mode = stat.S_IMODE(status.st_mode)
        return f"has mode {mode:04o}, expected one that only its owner may write, such as 0700"
    return ""


def _file_type(mode: int) -> str:
    return next((name for is_type, name in _FILE_TYPE_TEXTS if is_type(mode)), "a regular file")


def read_file(path: str, limit: int, *, check_owner: bool = True, secret: bool = False) -> bytes:
    """Read a file of at most ``limit`` bytes, see `file_obstacle`; a FIFO never blocks it.

    Raises:
        OSError: it cannot be read, is too large, or has an obstacle.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if problem := file_obstacle(status, check_owner=check_owner, secret=secret):
            raise OSError(errno.EINVAL, problem, path)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit} bytes", path)
        with open(fd, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(fd)


def replace_file(path: str, data: bytes, *, sync: bool = False, mode: int | None = None) -> int:
    """Create or replace a file and return its descriptor, for appending.

    A failure or a kill leaves the old file or the new one. With ``sync`` a crash of the machine
    does too; this is for files that a user names, and it replaces no device and no link, which may
    be another user's. Without a mode only the owner can access it.
    """
    if sync and os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise OSError(errno.EINVAL, "is not a regular file", path)
    temporary = f"{path}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        if mode is not None:  # the agent is not allowed to call fchmod(2)
            os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
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
    """Remove a directory that contains only files; `OSError` if that fails."""
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)


# --- The key that signs annotations of containers ---

SIGNING_KEY_FILE_NAME: Final = "key"
_SIGNING_KEY_BYTES: Final = 32
"""Length of the hash, as RFC 2104 recommends."""


def read_key(directory: str) -> bytes:
    """Read the key of a state directory; empty if there is no usable one."""
    with contextlib.suppress(OSError):
        return _read_signing_key_or_raise(os.path.join(directory, SIGNING_KEY_FILE_NAME))
    return b""


def load_or_create_signing_key(
    directory: str, *, trusted: bool, writable: bool
) -> tuple[bytes, list[str]]:
    """Read the key, or create one; also return a sentence for each problem.

    If the directory is not trusted, nothing is read or written. If it is not writable, a new key
    lasts as long as this process.
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
        problem = f"is not a key, expected {2 * _SIGNING_KEY_BYTES} hexadecimal digits"
        raise OSError(errno.EINVAL, problem, path)
    return key
