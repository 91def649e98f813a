"""Just enough of QEMU's machine protocol: one command, one answer."""

from __future__ import annotations

import json
import socket
from io import BufferedRWPair
from pathlib import Path
from typing import Any


class QMPError(RuntimeError):
    """QEMU refused a command, or its socket did not behave."""


def execute(
    path: Path, command: str, arguments: dict[str, object], *, timeout_s: float = 30.0
) -> Any:
    """Run one command.

    Returns:
        What QEMU returned.

    Raises:
        QMPError: QEMU refused, with its words, or went away.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            with connection.makefile("rwb") as stream:
                stream.readline()  # the greeting
                _ask(stream, "qmp_capabilities", {})
                return _ask(stream, command, arguments)
        except OSError as error:
            raise QMPError(f"{command}: {error}") from error


def _ask(stream: BufferedRWPair, command: str, arguments: dict[str, object]) -> Any:
    stream.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
    stream.flush()
    while True:
        line = stream.readline()
        if not line:
            raise QMPError("QEMU closed its control socket")
        message = json.loads(line)
        if "error" in message:
            raise QMPError(str(message["error"].get("desc", message["error"])))
        if "return" in message:
            return message["return"]
        # anything else is an event
