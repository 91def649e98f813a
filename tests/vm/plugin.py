"""`nri-numa run` as a process of its own, started, killed and asked from inside the guest."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path


class Plugin:
    """The plugin under test.

    Args:
        socket: the runtime's NRI socket.
        directory: for its configuration and state.
        log: where its output goes.
    """

    def __init__(self, *, socket: Path, directory: Path, log: Path) -> None:
        self.socket = socket
        self.directory = directory
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    def ensure_ready(self) -> None:
        """Start it unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self.start()

    def start(self) -> None:
        """Start it and wait until it is connected to the runtime."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL, as the kernel's OOM killer does it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, as the kubelet and systemd do it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
