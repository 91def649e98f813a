"""CPUs that come and go: the kernel's own word for it, uevents over netlink(7).

An event only says *look now*: what is online is always read from sysfs, and without events (no
permission, a network namespace the kernel does not tell) that is done every few seconds anyway.

One socket and twenty lines: pyroute2 would do the same, for 13 MiB of memory and a sixth of a
second with the interpreter held while requests wait.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

NETLINK_KOBJECT_UEVENT: Final = 15
KERNEL_GROUP: Final = 1
"""Multicast group of the kernel's own messages; udev's processed ones are in group 2."""
RECEIVE_BYTES: Final = 16_384
CALM_SECONDS: Final = 0.1
"""A package of CPUs goes in a burst of events; one look after it is enough."""
ACTIONS: Final = frozenset(("add", "remove", "online", "offline"))


def parse_uevent(data: bytes) -> dict[str, str]:
    """Read a kernel uevent: ``action@devpath`` and ``KEY=value`` fields, ended by NUL each.

    Anything else, such as udev's binary form, gives an empty mapping.
    """
    head, _, rest = data.partition(b"\0")
    if b"@" not in head:
        return {}
    fields: dict[str, str] = {}
    for item in rest.split(b"\0"):
        key, equals, value = item.partition(b"=")
        if equals:
            fields[key.decode("ascii", "replace")] = value.decode("utf-8", "replace")
    return fields


def concerns_cpus(fields: dict[str, str]) -> bool:
    """Whether an event says that a CPU came, went, or was switched on or off."""
    return fields.get("SUBSYSTEM") == "cpu" and fields.get("ACTION") in ACTIONS


class Source(Protocol):
    """Where uevents come from: the few methods of a socket that are used."""

    def fileno(self) -> int:
        """For the event loop to wait on."""
        ...

    def recvfrom(self, size: int, /) -> tuple[bytes, object]:
        """One datagram and its sender."""
        ...

    def close(self) -> None:
        """No more."""
        ...


def kernel_source() -> Source:
    """Open the kernel's socket of uevents.

    Raises:
        OSError: not here.
    """
    source = socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT
    )
    try:
        source.setblocking(False)
        source.bind((0, KERNEL_GROUP))
    except OSError:
        source.close()
        raise
    return source


async def watch(
    changed: Callable[[], Awaitable[None]],
    no_events: Callable[[OSError, bool], None],
    open_source: Callable[[], Source] = kernel_source,
) -> None:
    """Call ``changed`` after each burst of events about CPUs, until cancelled.

    Where there are no events this waits for ever; polling goes on without it.

    Args:
        changed: looks at the machine again.
        no_events: is told why there are none, and whether there were some before.
        open_source: of the events.
    """
    try:
        source = open_source()
    except OSError as error:
        no_events(error, False)
        await asyncio.get_running_loop().create_future()
        return
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()

    def readable() -> None:
        try:
            data, sender = source.recvfrom(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                heard.set()  # events were lost, so anything may have changed
                return
            loop.remove_reader(source.fileno())
            no_events(error, True)
            return
        # Only the kernel has port 0; a process that got hold of the group is not believed.
        if (not isinstance(sender, tuple) or sender[:1] == (0,)) and concerns_cpus(
            parse_uevent(data)
        ):
            heard.set()

    loop.add_reader(source.fileno(), readable)
    try:
        while True:
            await heard.wait()
            await asyncio.sleep(CALM_SECONDS)
            heard.clear()
            await changed()
    finally:
        loop.remove_reader(source.fileno())
        source.close()
