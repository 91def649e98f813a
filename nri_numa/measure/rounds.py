"""Runs comparisons: each loop in a process of its own, the two sides turn by turn.

Turns are short and the sides alternate, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from nri_numa.machine import cpu_wait
from nri_numa.machine.usage import parse_busy_ticks
from nri_numa.measure.plan import Comparison, ImpossibleComparison, LoopWorker
from nri_numa.measure.results import MeasuredComparison, MeasuredOrImpossibleComparison
from nri_numa.model.cpuset import CPUSet

WORKER_READY_TIMEOUT_S: Final = 300.0
"""Seconds that a process may take to make its memory ready."""
_WORKER_ANSWER_SLACK_S: Final = 60.0
"""Seconds that an answer may be late on a machine that is busy."""
_THREAD_COUNT_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerFailed(Exception):
    """A process could not do its work; the message says why."""


def run_comparison(
    comparison: Comparison, *, rounds: int, seconds: float
) -> MeasuredOrImpossibleComparison:
    """Measure one comparison: so many rounds of each side, of so many seconds each."""
    try:
        return asyncio.run(_run_rounds(comparison, rounds, seconds))
    except (WorkerFailed, OSError) as error:
        return ImpossibleComparison(
            name=comparison.name, title=comparison.title, because=str(error)
        )


async def _run_rounds(comparison: Comparison, rounds: int, seconds: float) -> MeasuredComparison:
    figures: dict[str, list[float]] = {"good": [], "bad": []}
    sides: dict[str, list[tuple[LoopWorker, Process]]] = {"good": [], "bad": []}
    try:
        for name, side in (("good", comparison.good_side), ("bad", comparison.bad)):
            for worker in side.workers:
                sides[name].append((worker, await _start_worker(worker)))
        for _, process in (*sides["good"], *sides["bad"]):
            line = await _read_worker_line(process, WORKER_READY_TIMEOUT_S)
            if line != "ready":
                raise WorkerFailed(line.removeprefix("!") or "a process that measures said nothing")
        for number in range(rounds):
            # Who goes first changes: a machine that warms up favours neither.
            for name in ("good", "bad") if number % 2 == 0 else ("bad", "good"):
                figures[name].append(await _run_side(sides[name], seconds))
    finally:
        for _, process in (*sides["good"], *sides["bad"]):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return MeasuredComparison(comparison, tuple(figures["good"]), tuple(figures["bad"]))


async def _start_worker(worker: LoopWorker) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nri_numa.measure.worker", msgspec.json.encode(worker)),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        # A library that starts threads of its own would use other CPUs than it is given.
        env={**os.environ, **dict.fromkeys(_THREAD_COUNT_VARIABLES, "1")},
    )


async def _read_worker_line(process: Process, limit: float) -> str:
    assert process.stdout is not None  # noqa: S101  # made with a pipe
    try:
        line = await asyncio.wait_for(process.stdout.readline(), limit)
    except TimeoutError as error:
        text = f"a process that measures did not answer within {limit:.0f} s"
        raise WorkerFailed(text) from error
    if not line:
        raise WorkerFailed("a process that measures has ended")
    return line.decode(errors="replace").rstrip("\n")


async def _run_side(side: list[tuple[LoopWorker, Process]], seconds: float) -> float:
    """Have all of a side run, and add up what they found."""
    for _, process in side:
        assert process.stdin is not None  # noqa: S101  # made with a pipe
        process.stdin.write(f"{seconds}\n".encode())
    total = 0.0
    for worker, process in side:
        line = await _read_worker_line(process, seconds + _WORKER_ANSWER_SLACK_S)
        try:
            total += float(line) if worker.loop != "busy" else 0.0
        except ValueError as error:
            raise WorkerFailed("a process that measures gave no figure") from error
    return total


def read_last_level_cache_bytes(root: str = "/") -> int:
    """Size of the largest last-level cache; 0 when the kernel does not say."""
    found = 0
    for index in Path(root).glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "3":
                text = (index / "size").read_text().strip()
                unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
                found = max(found, int(text.rstrip("KM")) * unit)
    return found


def measure_mean_cpu_utilization(
    cpus: CPUSet, seconds: float = 0.5, pause: Callable[[float], None] = time.sleep
) -> float | None:
    """The part of these CPUs' time that is used now; None when the kernel does not say."""
    try:
        first = parse_busy_ticks(Path("/proc/stat").read_text())
        pause(seconds)
        second = parse_busy_ticks(Path("/proc/stat").read_text())
    except OSError:
        return None
    parts = [
        (second[cpu][0] - first[cpu][0]) / (second[cpu][1] - first[cpu][1])
        for cpu in cpus
        if cpu in first and cpu in second and second[cpu][1] > first[cpu][1]
    ]
    return sum(parts) / len(parts) if parts else None


def read_steal_ticks() -> tuple[int, int] | None:
    """Ticks that the host took for others, and all, since the start; None when not known."""
    try:
        ticks = cpu_wait.parse_steal_and_wait_times(
            Path("/proc/stat").read_text(), ""
        ).steal.values()
    except OSError:
        return None
    return (sum(one for one, _ in ticks), sum(all_ for _, all_ in ticks)) if ticks else None
