"""Runs comparisons: each loop in a process of its own, the two sides turn by turn.

Turns are short and the sides alternate, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from nri_numa.machine import waiting
from nri_numa.machine.usage import cpu_times
from nri_numa.measure.plan import Comparison, NotShown, Worker
from nri_numa.measure.results import Measured, Outcome
from nri_numa.model.cpuset import CPUSet

READY_S: Final = 300.0
"""Seconds that a process may take to make its memory ready."""
_SLACK_S: Final = 60.0
"""Seconds that an answer may be late on a machine that is busy."""
_ONE_THREAD: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerFailed(Exception):
    """A process could not do its work; the message says why."""


class WorkerProcess:
    """One loop in a process; every method may raise `WorkerFailed`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        argument = msgspec.json.encode(worker)
        self._process = subprocess.Popen(  # noqa: S603  # ourselves
            [sys.executable, "-m", "nri_numa.measure.worker", argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A library that starts threads of its own would use other CPUs than it is given.
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
        )
        self._rest = b""

    def close(self) -> None:
        """End it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.wait()

    def wait_ready(self) -> None:
        """Wait until it can begin."""
        line = self._line(READY_S)
        if line != "ready":
            raise WorkerFailed(line.removeprefix("!") or "a process that measures said nothing")

    def begin(self, seconds: float) -> None:
        """Have it run."""
        assert self._process.stdin is not None  # noqa: S101  # made with a pipe
        try:
            self._process.stdin.write(f"{seconds}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed("a process that measures has ended") from error

    def figure(self, seconds: float) -> float:
        """Wait for what it found."""
        try:
            return float(self._line(seconds + _SLACK_S))
        except ValueError as error:
            raise WorkerFailed("a process that measures gave no figure") from error

    def _line(self, limit: float) -> str:
        assert self._process.stdout is not None  # noqa: S101  # made with a pipe
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + limit
        while b"\n" not in self._rest:
            readable, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise WorkerFailed(f"a process that measures did not answer within {limit:.0f} s")
            piece = os.read(descriptor, 65_536)
            if not piece:
                raise WorkerFailed("a process that measures has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")


def run(comparison: Comparison, *, rounds: int, seconds: float) -> Outcome:
    """Measure one comparison: so many rounds of each side, of so many seconds each."""
    figures: dict[str, list[float]] = {"good": [], "bad": []}
    try:
        with contextlib.ExitStack() as stack:
            sides = {
                name: [
                    stack.enter_context(contextlib.closing(WorkerProcess(one)))
                    for one in side.workers
                ]
                for name, side in (("good", comparison.good), ("bad", comparison.bad))
            }
            for processes in sides.values():
                for one in processes:
                    one.wait_ready()
            for number in range(rounds):
                # Who goes first changes: a machine that warms up favours neither.
                for name in ("good", "bad") if number % 2 == 0 else ("bad", "good"):
                    figures[name].append(_turn(sides[name], seconds))
    except (WorkerFailed, OSError) as error:
        return NotShown(name=comparison.name, title=comparison.title, because=str(error))
    return Measured(comparison, tuple(figures["good"]), tuple(figures["bad"]))


def _turn(processes: list[WorkerProcess], seconds: float) -> float:
    for one in processes:
        one.begin(seconds)
    found = [(one.worker.loop, one.figure(seconds)) for one in processes]
    return sum(figure for loop, figure in found if loop != "busy")


def l3_bytes(root: str = "/") -> int:
    """Size of the largest last-level cache; 0 when the kernel does not say."""
    found = 0
    for index in Path(root).glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "3":
                text = (index / "size").read_text().strip()
                unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
                found = max(found, int(text.rstrip("KM")) * unit)
    return found


def busy_before(
    cpus: CPUSet, seconds: float = 0.5, pause: Callable[[float], None] = time.sleep
) -> float | None:
    """The part of these CPUs' time that is used now; None when the kernel does not say."""
    try:
        first = cpu_times(Path("/proc/stat").read_text())
        pause(seconds)
        second = cpu_times(Path("/proc/stat").read_text())
    except OSError:
        return None
    parts = [
        (second[cpu][0] - first[cpu][0]) / (second[cpu][1] - first[cpu][1])
        for cpu in cpus
        if cpu in first and cpu in second and second[cpu][1] > first[cpu][1]
    ]
    return sum(parts) / len(parts) if parts else None


def stolen() -> tuple[int, int] | None:
    """Ticks that the host took for others, and all, since the start; None when not known."""
    try:
        ticks = waiting.cpu_times(Path("/proc/stat").read_text(), "").steal.values()
    except OSError:
        return None
    return (sum(one for one, _ in ticks), sum(all_ for _, all_ in ticks)) if ticks else None
