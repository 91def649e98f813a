"""The key that signs what is written on containers, in the state directory.

It is made once and lives as long as the directory: on ``/run``, until the next boot, as containers
do. Where it is lost, the annotations of older containers are believed only as far as their pods
could be given the same today (`nri_numa.engine.adopt`).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from nri_numa.store.files import file_problem

KEY: Final = "key"
_BYTES: Final = 32
"""As long as the hash, what RFC 2104 recommends."""


def known_key(directory: str) -> bytes:
    """The key of a state directory; empty where there is none that can be used."""
    with contextlib.suppress(OSError):
        return _read(os.path.join(directory, KEY))[0]
    return b""


def signing_key(directory: str, *, trusted: bool, writable: bool) -> tuple[bytes, list[str]]:
    """Read the key, or make one.

    Args:
        directory: the state directory.
        trusted: nobody else can write there; else nothing is read nor written.
        writable: it is ours to write; else a new key lasts as long as this process.

    Returns:
        The key, and a sentence for each thing that was wrong.
    """
    path, problems = os.path.join(directory, KEY), []
    if trusted:
        try:
            key, why = _read(path)
            if key:
                return key, []
            problems.append(f"{path}: {why}; another key is made")
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(f"{path}: cannot read: {error.strerror}; another key is made")
    key = os.urandom(_BYTES)
    if trusted and writable:
        try:
            _write(path, key)
        except OSError as error:
            problems.append(
                f"{path}: cannot write: {error.strerror}; the key is lost when this process ends"
            )
    return key, problems


def _read(path: str) -> tuple[bytes, str]:
    """The key, or nothing and why it is not used.

    Raises:
        OSError: it cannot be read.
    """
    # Without waiting for whoever may write into a FIFO.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        problem = file_problem(os.fstat(fd), secret=True)
        if problem:
            return b"", problem
        text = os.read(fd, 4 * _BYTES).strip()
    finally:
        os.close(fd)
    try:
        key = bytes.fromhex(text.decode())
    except ValueError:
        key = b""
    if len(key) != _BYTES:
        return b"", f"is no key, expected {2 * _BYTES} hexadecimal digits"
    return key, ""


def _write(path: str, key: bytes) -> None:
    """Put a new key in place; whoever kills us leaves the old one or none."""
    temporary = path + ".tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, key.hex().encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
