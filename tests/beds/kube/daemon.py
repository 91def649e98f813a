"""One program of the bed as a process with a log file."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.beds import processes
from tests.beds.cri import poll


class Daemon(processes.Bed):
    """A process that is started, asked whether it lives, and ended by its id.

    Args:
        command: its command line; must become the program without a fork.
    """

    def __init__(
        self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_file = directory / f"{name}.log"
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it; `wait` says when it serves."""
        assert not self.running, f"{self.name} runs already"
        self._process = processes.spawn(self.command, self.log_file, self._environment)

    def log(self) -> str:
        return processes.logged(self.log_file)

    def check(self) -> None:
        """Raise `RuntimeError` with the end of its log if it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RuntimeError(f"{self.name} ended with {code}:\n{self.log()[-3000:]}")

    def end(self, number: signal.Signals = signal.SIGTERM, *, timeout_s: float = 180.0) -> None:
        """End it; by SIGKILL where the signal is not heard in time."""
        process, self._process = self._process, None
        if process is not None:
            processes.end(process, number, timeout_s)

    def close(self) -> None:
        self.end()

    def records(self, message: str = "") -> list[dict[str, Any]]:
        """Its log lines that are JSON, of one message where one is named."""
        found = [json.loads(line) for line in self.log().splitlines() if line[:1] == "{"]
        return [each for each in found if message in ("", each.get("msg"))]


def wait_for(
    daemons: Sequence[Daemon],
    probe: Callable[[], bool],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.1,
) -> None:
    """Wait until `probe` is true while all daemons live."""

    def ask() -> bool | None:
        for daemon in daemons:
            daemon.check()
        return True if probe() else None

    try:
        poll(ask, what, timeout_s=timeout_s)
    except TimeoutError as error:
        logs = "\n".join(f"--- {daemon.name}\n{daemon.log()[-1500:]}" for daemon in daemons)
        raise TimeoutError(f"{error}\n{logs}") from None
