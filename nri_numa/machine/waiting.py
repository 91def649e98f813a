"""How much a container waits for CPUs, and why that is not known where it is not.

The pressure of its cgroup is in cpu.pressure (Documentation/accounting/psi.rst): the part of the
last minute in which something of the container was ready and had no CPU. Version 1 has no such
file. How long each of its threads waited on a run queue since it began is the second number of
/proc/PID/task/TID/schedstat (Documentation/scheduler/sched-stats.rst); two readings tell how many
waited on average. A number that could not be read to its end is none.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader
from nri_numa.machine.locality import GONE, Unknown, processes_of

PRESSURE: Final = "cpu.pressure"
SCHEDSTAT: Final = "schedstat"

LIMIT: Final = 0.1
"""Seconds of CPU time that the threads of one container may take: some thousand, at 25 µs each."""
THREADS: Final = 2048
"""Threads of one container that are read; they are remembered until the next reading."""
_READ_BYTES: Final = 4096

_SOME: Final = re.compile(r"^some avg10=[\d.]+ avg60=(\d{1,3}(?:\.\d+)?) ", re.MULTILINE | re.ASCII)
_SCHEDSTAT: Final = re.compile(rb"^(\d{1,20}) (\d{1,20}) (\d{1,20})$", re.ASCII)


class Waits(msgspec.Struct, frozen=True):
    """What one reading of one container tells.

    Attributes:
        pressure: part of the last minute in which something of it waited, from 0 to 1; None when
            not known.
        no_pressure: why it is not known; empty when it is.
        threads: by thread id, the seconds that it has waited since it began; None when not known.
        no_threads: why they are not known; empty when they are.
    """

    pressure: float | None = None
    no_pressure: str = ""
    threads: Mapping[int, float] | None = None
    no_threads: str = ""


def waits(
    reader: CgroupReader,
    place: CgroupPlace,
    root: str,
    *,
    proc: str = "/proc",
    limit: float = LIMIT,
    clock: Callable[[], float] = time.thread_time,
) -> Waits:
    """Read how much one container waits.

    Args:
        reader: knows where cgroups are.
        place: of the container.
        root: where the cgroup file systems are mounted.
        proc: the proc file system.
        limit: seconds, by ``clock``, that its threads may take.
        clock: CPU time of this thread.
    """
    directory = reader.directory_of(place)
    if not directory or not os.path.isdir(directory):
        gone = "it has no cgroup that can be read"
        return Waits(no_pressure=gone, no_threads=gone)
    pressure = threads = None
    no_pressure = no_threads = ""
    try:
        pressure = _pressure(reader, directory, root)
    except Unknown as unknown:
        no_pressure = str(unknown)
    try:
        threads = _threads(directory, proc, clock() + limit, clock)
    except Unknown as unknown:
        no_threads = str(unknown)
    return Waits(pressure, no_pressure, threads, no_threads)


def tasks_waiting(
    before: Mapping[int, float], after: Mapping[int, float], seconds: float
) -> float | None:
    """How many threads waited for a CPU on average between two readings; None when none tells.

    Threads that were there at one of them only are left out: nobody knows how long they waited.
    """
    grown = [
        waited - before[thread]
        for thread, waited in after.items()
        if thread in before and waited >= before[thread]
    ]
    return sum(grown) / seconds if grown and seconds > 0 else None


def pressure_in(text: str) -> float | None:
    """The part of the last minute, of the text of cpu.pressure; None in what is no such text."""
    match = _SOME.search(text)
    return min(1.0, float(match[1]) / 100) if match else None


def _pressure(reader: CgroupReader, directory: str, root: str) -> float:
    if reader.unified:
        path = f"{directory}/{PRESSURE}"
        why_not = f"its cgroup has no {PRESSURE}: this kernel has no pressure stall information"
    else:
        # A hybrid has the container in the unified hierarchy too, where its runtime puts it there.
        path = f"{root}/unified/{os.path.relpath(directory, reader.hierarchy)}/{PRESSURE}"
        why_not = f"cgroup v1 has no {PRESSURE}"
    try:
        with open(path, "rb") as file:
            text = file.read(_READ_BYTES).decode("ascii", "replace")
    except OSError as error:
        if error.errno in GONE:
            raise Unknown(why_not) from error
        # With psi=0 on the kernel's command line the file is there and cannot be opened.
        raise Unknown(f"{PRESSURE} cannot be read: {error.strerror}") from error
    found = pressure_in(text)
    if found is None:
        raise Unknown(f"{PRESSURE} tells no pressure of the last minute")
    return found


def _threads(
    directory: str, proc: str, until: float, clock: Callable[[], float]
) -> dict[int, float]:
    pids = processes_of(directory)
    if 0 in pids:
        raise Unknown("its processes are in a PID namespace not seen from here")
    if not pids:
        raise Unknown("it has no process")
    found: dict[int, float] = {}
    turns = silent = 0
    for pid in sorted(pids):
        for thread in _listed(proc, pid):
            if len(found) >= THREADS:
                raise Unknown(f"it has more than the {THREADS} threads that are read")
            told = _thread(f"{proc}/{pid}/task/{thread}/{SCHEDSTAT}")
            if told is not None:
                found[thread], times = told
                turns += times
            elif os.path.exists(f"{proc}/{pid}/task/{thread}/stat"):
                silent += 1
            if clock() > until:
                raise Unknown(f"reading {SCHEDSTAT} of its threads took too long")
    if not found:
        raise Unknown(
            f"this kernel has no {SCHEDSTAT} of threads"
            if silent
            else f"its processes ended while their {SCHEDSTAT} was read"
        )
    if not turns:
        # Without sched_info the file is there, and says 0 0 0 of threads that ran.
        raise Unknown(f"{SCHEDSTAT} of its threads counts nothing")
    return found


def _listed(proc: str, pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"{proc}/{pid}/task") if name.isdigit())
    except OSError as error:
        if error.errno in GONE:
            return []
        raise Unknown(f"threads of process {pid} cannot be listed: {error.strerror}") from error


def _thread(path: str) -> tuple[float, int] | None:
    """Seconds that a thread waited, and how often it ran; None when there is nothing to read."""
    try:
        with open(path, "rb", buffering=0) as file:
            match = _SCHEDSTAT.match(file.read(_READ_BYTES).strip())
    except OSError as error:
        if error.errno in GONE:
            return None
        raise Unknown(f"{SCHEDSTAT} of a thread cannot be read: {error.strerror}") from error
    return (int(match[2]) / 1e9, int(match[3])) if match else None
