"""Processes of a bed: started, ended, and what /proc says of those that have to be cleaned up."""

import abc
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.beds.cri import poll

_T = TypeVar("_T")


def prioritize(pid: int, nice: int) -> None:
    """Of a new session, whose processes share its own share of the CPUs (sched(7), autogroup)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, nice)
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


class ProcessBed(abc.ABC):
    """Starts on entry and is closed at the end, also where the start fails."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start all of it; returns when it serves."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it, whatever it does."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Daemon(ProcessBed):
    """A program that writes into a log file: started, asked whether it lives, and ended by its id.

    Args:
        command: its command line; must become the program without a fork.

    Attributes:
        folder: where it runs; None for here.
    """

    folder: Path | None = None

    def __init__(
        self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_file = directory / f"{name}.log"
        self.environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def start(self) -> None:
        """Start it, and do not wait until it serves."""
        assert not self.running, f"{self.name} runs already"
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        """Not of our process group: Ctrl-C ends the test run, which then cleans up in order."""
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                self.command,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise `RuntimeError` with the end of its log if it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise RuntimeError(f"{self.name} ended with {code}:\n{self.log()[-4000:]}")

    def end(self, number: signal.Signals = signal.SIGTERM, *, timeout_s: float = 180.0) -> int:
        """Send a signal, and SIGKILL where it is not heard in time; the exit status, 0 for none."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def kill(self) -> int:
        """SIGKILL: nothing it holds in memory survives."""
        return self.end(signal.SIGKILL)

    def close(self) -> None:
        self.end()

    def log(self, since: int = 0) -> str:
        """What it wrote so far, from a byte of its log file on."""
        with contextlib.suppress(FileNotFoundError):
            return self.log_file.read_bytes()[since:].decode(errors="replace")
        return ""

    def records(self, message: str = "", *, since: int = 0) -> list[dict[str, Any]]:
        """Its log lines as documents, of one message where one is named."""
        found = []
        for line in self.log(since).splitlines():
            with contextlib.suppress(ValueError):  # half written, or a traceback
                record = json.loads(line)
                if isinstance(record, dict) and message in ("", record.get("msg")):
                    found.append(record)
        return found


def wait_for(
    daemons: Sequence[Daemon], probe: Callable[[], _T | None], what: str, timeout_s: float = 180.0
) -> _T:
    """Wait until the answer of `probe` is true while all daemons live."""

    def ask() -> _T | None:
        for daemon in daemons:
            daemon.check()
        return probe()

    try:
        return poll(ask, what, timeout_s=timeout_s)
    except TimeoutError as error:
        logs = "\n".join(f"--- {daemon.name}\n{daemon.log()[-3000:]}" for daemon in daemons)
        raise TimeoutError(f"{error}\n{logs}") from None


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def commands() -> Iterator[tuple[int, bytes]]:
    """(process id, command line with NUL bytes) of every process."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes()


def _stat(pid: int) -> tuple[str, int, int]:
    """State, parent and group of a process; X, 0 and 0 of one that is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "X", 0, 0
    # The command name in parentheses may hold anything, also blanks and parentheses.
    state, parent, group = text.rpartition(")")[2].split()[:3]
    return state, int(parent), int(group)


def described(pid: int) -> str:
    """What a process that does not end is, and where the kernel holds it."""
    facts = [f"process {pid}"]
    for name in ("comm", "stat", "cgroup", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
            facts.append(f"{name}: {text.strip()}")
    return "\n  ".join(facts)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return _stat(pid)[0] not in "ZX"


def group_alive(group: int) -> bool:
    """Whether a process group has a member that still runs.

    Signal 0 does not tell: where nobody reaps orphans, as in many containers, the dead count.
    """
    return any(of == group and state not in "ZX" for state, _, of in map(_stat, _pids()))


def descendants(pid: int) -> list[int]:
    """Process ids of its children, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for each in _pids():
        children.setdefault(_stat(each)[1], []).append(each)
    found: list[int] = []
    wait = [pid]
    while wait:
        below = children.get(wait.pop(), [])
        found += below
        wait += below
    return found


def listening(pid: int) -> set[Path]:
    """Paths of the unix sockets that a process has bound."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if match := re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink())):
                    inodes.add(match.group(1))
    found = set()
    with contextlib.suppress(OSError):
        # Its own list: the process may have a network namespace of its own.
        text = Path(f"/proc/{pid}/net/unix").read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            fields = line.split(maxsplit=7)  # …, inode, path
            if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("/"):
                found.add(Path(fields[7]))
    return found


def mounts_below(*directories: Path) -> list[str]:
    """Mount points below these directories, oldest first."""
    prefixes = tuple(f"{directory.resolve()}/" for directory in directories)
    found = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        # Blanks and the like are octal escapes, \040.
        target = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), line.split(" ")[4])
        if target.startswith(prefixes):
            found.append(target)
    return found
