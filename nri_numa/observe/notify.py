"""Messages to systemd by the protocol of sd_notify(3), one datagram each.

Every call is a no-op if NOTIFY_SOCKET is not set, so callers need not check.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


class SystemdNotifier:
    """Sends changes of the service's state to the service manager named in ``environ``."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        address = environ.get("NOTIFY_SOCKET", "")
        # "@name" is an abstract socket: its real address begins with a zero byte (unix(7)).
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @property
    def is_enabled(self) -> bool:
        """True if NOTIFY_SOCKET names a socket."""
        return self._address.startswith(("/", "\0"))

    def notify_ready(self, status: str = "") -> None:
        """Report that start-up or a reload has finished."""
        self._send_message("READY=1", status)

    def notify_reloading(self) -> None:
        """Report the begin of a reload; `notify_ready` ends it (Type=notify-reload)."""
        # The manager compares this with its own clock to pair reload and READY.
        monotonic_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send_message(f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}")

    def notify_stopping(self) -> None:
        """Report that the service shuts down."""
        self._send_message("STOPPING=1")

    def notify_status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._send_message("", text)

    def notify_watchdog(self) -> None:
        """Reset the watchdog; due within half of the unit's ``WatchdogSec``."""
        self._send_message("WATCHDOG=1")

    def _send_message(self, message: str, status: str = "") -> None:
        if not self.is_enabled:
            return
        if status:
            line = "".join(c if c.isprintable() else " " for c in status)
            message = f"{message}\nSTATUS={line}".lstrip("\n")
        # An unreachable service manager must not fail or delay the agent.
        with (
            contextlib.suppress(OSError),
            socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sock,
        ):
            sock.sendto(message.encode(), self._address)
