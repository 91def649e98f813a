"""Run comparisons: each loop in a process of its own, the two sides in turn.

Rounds are short and the sides alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Final

import msgspec

from nri_numa.machine.cpu_wait import parse_steal_and_wait_times
from nri_numa.machine.usage import parse_busy_ticks
from nri_numa.measure.plan import Comparison, ImpossibleComparison, LoopWorker
from nri_numa.measure.results import MeasuredComparison, MeasuredOrImpossibleComparison
from nri_numa.model.cpuset import CPUSet

WORKER_READY_TIMEOUT_S: Final = 300.0
"""Maximum seconds for a process to prepare its memory."""
_WORKER_ANSWER_SLACK_S: Final = 60.0
"""Additional seconds for an answer on a busy machine."""
_THREAD_COUNT_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerFailed(Exception):
    """Failure of a worker process; the message is the reason."""


def run_comparison(
    comparison: Comparison, *, rounds: int, seconds: float
) -> MeasuredOrImpossibleComparison:
    """Measure one comparison in ``rounds`` rounds of each side, ``seconds`` seconds each."""
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
            # The sides take turns at the start: a machine that warms up favours neither.
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
        # Threads that a library starts would run on other CPUs than the worker's.
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
    """Run all workers of a side and return the sum of their figures."""
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
    """Read the size of the largest last-level cache; 0 if the kernel does not report it."""
    max_bytes = 0
    for index in Path(root).glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if (index / "level").read_text().strip() == "3":
                text = (index / "size").read_text().strip()
                unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
                max_bytes = max(max_bytes, int(text.rstrip("KM")) * unit)
    return max_bytes


def measure_mean_cpu_utilization(cpus: CPUSet) -> float | None:
    """Measure the used part of these CPUs' time over half a second; None if unknown."""
    try:
        old_ticks = parse_busy_ticks(Path("/proc/stat").read_text())
        time.sleep(0.5)
        new_ticks = parse_busy_ticks(Path("/proc/stat").read_text())
    except OSError:
        return None
    parts = [
        (new_ticks[cpu][0] - old_ticks[cpu][0]) / (new_ticks[cpu][1] - old_ticks[cpu][1])
        for cpu in cpus
        if cpu in old_ticks and cpu in new_ticks and new_ticks[cpu][1] > old_ticks[cpu][1]
    ]
    return sum(parts) / len(parts) if parts else None


def read_steal_ticks() -> tuple[int, int] | None:
    """Read the ticks of steal and of all time since the machine started; None if unknown."""
    try:
        stat = Path("/proc/stat").read_text()
    except OSError:
        return None
    ticks = parse_steal_and_wait_times(stat, "").steal.values()
    return (sum(steal for steal, _ in ticks), sum(total for _, total in ticks)) if ticks else None
