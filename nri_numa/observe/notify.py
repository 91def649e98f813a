"""Tells systemd how we are: the protocol of sd_notify(3), in one datagram per message.

Everything is a no-op when NOTIFY_SOCKET is not set, so callers never ask.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


class SystemdNotifier:
    """Sends state changes to the service manager that ``environ`` names."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        address = environ.get("NOTIFY_SOCKET", "")
        # "@name" is an abstract socket: its real address begins with a zero byte (unix(7)).
        self._address = f"\0{address[1:]}" if address.startswith("@") else address

    @property
    def is_enabled(self) -> bool:
        """Whether a service manager listens."""
        return self._address.startswith(("/", "\0"))

    def notify_ready(self, status: str = "") -> None:
        """Start-up, or a reload, is finished."""
        self._send_message("READY=1", status)

    def notify_reloading(self) -> None:
        """A reload begins; `ready` ends it (Type=notify-reload)."""
        # The manager compares this with its own clock to pair reload and READY.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send_message(f"RELOADING=1\nMONOTONIC_USEC={now}")

    def notify_stopping(self) -> None:
        """The service shuts down."""
        self._send_message("STOPPING=1")

    def notify_status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send_message("", text)

    def notify_watchdog(self) -> None:
        """Still alive; due within half of the unit's ``WatchdogSec``."""
        self._send_message("WATCHDOG=1")

    def _send_message(self, message: str, status: str = "") -> None:
        if not self.is_enabled:
            return
        if status:
            line = "".join(c if c.isprintable() else " " for c in status)
            message = f"{message}\nSTATUS={line}".lstrip("\n")
        # A manager that went away is no reason to fail, nor to wait.
        with (
            contextlib.suppress(OSError),
            socket.socket(
                socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            ) as sock,
        ):
            sock.sendto(message.encode(), self._address)
