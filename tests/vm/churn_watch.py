"""Reads what every container may use, over and over: ``python -m tests.vm.churn_watch CGROUP OUT``.

A process of its own, so that neither the driver nor the plugin keeps it waiting. It finds the
containers below a cgroup by itself, the moment their directory is there, reads the first process's
``/proc/PID/status`` and ``cpuset.cpus.effective``, and writes a span each time the words change
(`tests.checks.churn_figures`). SIGTERM ends it.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_ID = re.compile(r"[0-9a-f]{64}")
_SAY_EVERY_S = 30.0
_PART = 5  # sleeps at least so many times as long as it looks
_CPUS, _MEMS = b"\nCpus_allowed_list:\t", b"\nMems_allowed_list:\t"


def serial_of(command: bytes) -> int:
    """The container's number from the command line ``sleep 1000000 SERIAL``; 0: none."""
    words = command.rstrip(b"\0").split(b"\0")
    if len(words) == 3 and words[0].endswith(b"sleep") and words[2].isdigit():
        return int(words[2])
    return 0


def _field(text: bytes, name: bytes) -> str:
    start = text.index(name) + len(name)
    return text[start : text.index(b"\n", start)].decode()


class Watched:
    """One container's cgroup."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._status = -1
        self._group = os.open(f"{directory}/cpuset.cpus.effective", os.O_RDONLY)
        self._pid = 0
        self.serial = 0
        self.words: tuple[int, str, str, str] | None = None
        self.before = self.start = self.end = 0.0
        self.samples = 0

    def look(self) -> tuple[int, str, str, str] | None:
        """(serial, cpus, mems, group) now; None when no process lives in it."""
        try:
            if self._status < 0 and not self._open():
                return None
            text = os.pread(self._status, 4096, 0)
            state = text[text.index(b"\nState:\t") + 8 :][:1]
            if state in b"ZX":
                self._close_status()
                return None
            if not self.serial:
                self.serial = serial_of(Path(f"/proc/{self._pid}/cmdline").read_bytes())
            group = os.pread(self._group, 4096, 0).decode().strip()
            return self.serial, _field(text, _CPUS), _field(text, _MEMS), group
        except (OSError, ValueError):
            # It ended this moment.
            self._close_status()
            return None

    def _open(self) -> bool:
        pids = Path(f"{self._directory}/cgroup.procs").read_text().split()
        if not pids:
            return False
        self._pid = int(pids[0])
        self.serial = 0
        self._status = os.open(f"/proc/{self._pid}/status", os.O_RDONLY)
        return True

    def _close_status(self) -> None:
        if self._status >= 0:
            os.close(self._status)
            self._status = -1

    def close(self) -> None:
        self._close_status()
        os.close(self._group)


class Watcher:
    """All containers below one cgroup directory."""

    def __init__(self, top: str, out: TextIO) -> None:
        self._top = top
        self._out = out
        self._known: dict[str, Watched] = {}
        self._last = 0.0
        self.gaps: list[float] = []
        self.reads = 0

    def sweep(self) -> None:
        now = time.time()
        if self._last:
            self.gaps.append(now - self._last)
        self._last = now
        there = dict(self._find(self._top, 0))
        for name in [name for name in self._known if name not in there]:
            gone = self._known.pop(name)
            self._end(gone, time.time())
            gone.close()
        for name, directory in there.items():
            if name not in self._known:
                try:
                    self._known[name] = Watched(directory)
                except OSError:
                    continue
            self._take(self._known[name])

    def _find(self, directory: str, depth: int) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if _ID.fullmatch(entry.name):
                        found.append((entry.name, entry.path))
                    elif depth < 3:
                        found += self._find(entry.path, depth + 1)
        return found

    def _take(self, watched: Watched) -> None:
        words = watched.look()
        now = time.time()
        if words is not None:
            self.reads += 1
        if words != watched.words:
            self._end(watched, now)
            watched.words = words
            watched.before = watched.end or now
            watched.start = now
            watched.samples = 0
        watched.end = now
        watched.samples += 1

    def _end(self, watched: Watched, now: float) -> None:
        if watched.words is not None and watched.words[0]:
            row = [*watched.words, watched.before, watched.start, watched.end, now, watched.samples]
            self._out.write(json.dumps(row) + "\n")

    def say(self) -> None:
        """Write how often it looked so far."""
        gaps = sorted(self.gaps) or [0.0]
        summary = {
            "sweeps": len(self.gaps),
            "reads": self.reads,
            "gap_p50": gaps[len(gaps) // 2],
            "gap_p99": gaps[int(len(gaps) * 0.99)],
            "gap_max": gaps[-1],
        }
        self._out.write(json.dumps(summary) + "\n")

    def close(self) -> None:
        for watched in self._known.values():
            self._end(watched, watched.end)


def main(arguments: Sequence[str]) -> int:
    """Watch until SIGTERM; lines in between and the last one are about the samples."""
    top, target, every = arguments[0], Path(arguments[1]), float(arguments[2])
    ending = False

    def end(number: int, frame: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    with target.open("w", encoding="ascii", buffering=1) as out:
        watcher = Watcher(top, out)
        said = time.monotonic()
        while not ending:
            begin = time.monotonic()
            watcher.sweep()
            if begin > said + _SAY_EVERY_S:
                said = begin
                watcher.say()
            # On a slow machine it must not take the time that the others need.
            time.sleep(max(every, _PART * (time.monotonic() - begin)))
        watcher.close()
        watcher.say()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
