"""Sockets that listen, and connections that end without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import traceback
from collections.abc import Callable

CLOSE_TIMEOUT = 1.0
"""Seconds for the end of a connection: a TLS client may never say good-bye."""
BACKLOG = 1024
LOCAL = "unix"
"""The address of every client that comes over a unix socket."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of a host; on all of the machine for an empty one.

    Raises:
        OSError: when one of the addresses cannot be had.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError:  # a kernel without IPv6
                continue
            made.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:  # IPv4 has a socket of its own
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
    except BaseException:
        for sock in made:
            sock.close()
        raise
    if not made:
        raise OSError(errno.EADDRNOTAVAIL, "no address")
    return made


def listen_at(path: str) -> socket.socket:
    """A unix socket that listens, for its user and for the group of its directory.

    One that an earlier process left behind is taken away.

    Raises:
        OSError: it cannot be had.
    """
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else than a socket", path)
        os.unlink(path)
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        with contextlib.suppress(OSError):  # without CAP_CHOWN: the directory's setgid bit did it
            os.chown(path, -1, os.stat(os.path.dirname(path)).st_gid)
        os.chmod(path, 0o660)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def accept(
    listener: socket.socket, nobody: Callable[[], object] = lambda: None
) -> tuple[socket.socket, str]:
    """The next connection, non-blocking, and its client's address.

    The loop's own `sock_accept` loses a connection when it is cancelled in the moment between.

    Args:
        listener: where clients connect to.
        nobody: called when none stands in line.

    Raises:
        OSError: there is none to be had.
    """
    while True:
        try:
            sock, peer = listener.accept()
        except BlockingIOError:
            nobody()
            await _readable(listener)
            continue
        sock.setblocking(False)
        return sock, str(peer[0]) if peer else LOCAL


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)


async def close(writer: asyncio.StreamWriter) -> None:
    """End a connection in good form, and in time."""
    writer.close()
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await writer.wait_closed()
    except (OSError, TimeoutError) as error:
        writer.transport.abort()
        forget(error)
    except asyncio.CancelledError:
        writer.transport.abort()
        raise


def forget(error: BaseException) -> None:
    """Let go of what the frames of an exception hold.

    asyncio leaves futures and exceptions that refer to each other, and with them a connection with
    its buffers (300 kB behind TLS), to the collector, which does not look at the older ones for
    minutes: a client that begins handshakes and ends none would fill the memory meanwhile.
    """
    one: BaseException | None = error
    while one is not None:
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__
