"""Processes of a bed: started, ended, and what /proc says of those that have to be cleaned up."""

from __future__ import annotations

import abc
import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class Bed(abc.ABC):
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def spawn(
    command: Sequence[str],
    log_file: Path,
    environment: Mapping[str, str],
    *,
    directory: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program that writes into a log file.

    It is not of our process group: Ctrl-C ends the test run, which then cleans up in order.
    """
    with log_file.open("ab") as log:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], number: signal.Signals, timeout_s: float) -> int | None:
    """Send a signal and wait; the exit status, or None where SIGKILL had to follow."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def logged(log_file: Path, since: int = 0) -> str:
    """What a program wrote so far, from a byte of its log file on."""
    with contextlib.suppress(FileNotFoundError):
        return log_file.read_bytes()[since:].decode(errors="replace")
    return ""


def commands() -> Iterator[tuple[int, bytes]]:
    """(process id, command line with NUL bytes) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes()


def state_and_parent(pid: int) -> tuple[str, int] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command name in parentheses may hold anything, also blanks and parentheses.
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


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
    stat = state_and_parent(pid)
    return stat is not None and stat[0] not in "ZX"


def descendants(pid: int) -> list[int]:
    """Process ids of its children, of theirs, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := state_and_parent(int(entry.name))) is not None:
            children.setdefault(stat[1], []).append(int(entry.name))
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
