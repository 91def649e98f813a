"""How much containers and CPUs wait, by the run queues' and the host's doing.

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

from nri_numa.machine.cgroups import CgroupPlace, CgroupReader, read_text
from nri_numa.machine.tree import CPU_DIR, Tree
from nri_numa.machine.usage import (
    PROCESS_GONE_ERRNOS,
    UsageUnknown,
    list_cgroup_processes,
    parse_cpu_lines,
)
from nri_numa.model.machine import Topology

PRESSURE_FILE: Final = "cpu.pressure"
SCHEDSTAT_FILE: Final = "schedstat"

SCHEDSTAT_CPU_LIMIT_S: Final = 0.1
"""Seconds of CPU time that the threads of one container may take: some thousand, at 25 µs each."""
MAX_THREADS_READ: Final = 2048
"""Threads of one container that are read; they are remembered until the next reading."""
_READ_BYTES: Final = 4096

_PRESSURE_LINE: Final = re.compile(
    r"^some avg10=[\d.]+ avg60=(\d{1,3}(?:\.\d+)?) ", re.MULTILINE | re.ASCII
)
_SCHEDSTAT_PATTERN: Final = re.compile(rb"^(\d{1,20}) (\d{1,20}) (\d{1,20})$", re.ASCII)


class CPUWaits(msgspec.Struct, frozen=True):
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


def read_cpu_waits(
    reader: CgroupReader,
    place: CgroupPlace,
    root: str,
    *,
    proc: str = "/proc",
    limit: float = SCHEDSTAT_CPU_LIMIT_S,
    clock: Callable[[], float] = time.thread_time,
) -> CPUWaits:
    """Read how much one container waits; ``root`` has the cgroup file systems.

    ``limit`` is in seconds of ``clock``, the CPU time of this thread.
    """
    directory = reader.directory_of(place)
    if not directory or not os.path.isdir(directory):
        gone = "it has no cgroup that can be read"
        return CPUWaits(no_pressure=gone, no_threads=gone)
    pressure = threads = None
    no_pressure = no_threads = ""
    try:
        pressure = _read_cpu_pressure(reader, directory, root)
    except UsageUnknown as unknown:
        no_pressure = str(unknown)
    try:
        threads = _read_thread_waits(directory, proc, clock() + limit, clock)
    except UsageUnknown as unknown:
        no_threads = str(unknown)
    return CPUWaits(pressure, no_pressure, threads, no_threads)


def tasks_waiting(
    before: Mapping[int, float], after: Mapping[int, float], seconds: float
) -> float | None:
    """How many threads waited for a CPU on average between two readings; None when none tells.

    Threads that were there at one of them only are left out: how long they waited is not known.
    """
    grown = [
        waited - before[thread]
        for thread, waited in after.items()
        if thread in before and waited >= before[thread]
    ]
    return sum(grown) / seconds if grown and seconds > 0 else None


def parse_cpu_pressure_avg60(pressure: str) -> float | None:
    """The part of the last minute, of the text of cpu.pressure; None in what is no such text."""
    match = _PRESSURE_LINE.search(pressure)
    return min(1.0, float(match[1]) / 100) if match else None


def _read_cpu_pressure(reader: CgroupReader, directory: str, root: str) -> float:
    if reader.unified:
        path = f"{directory}/{PRESSURE_FILE}"
        why_not = (
            f"its cgroup has no {PRESSURE_FILE}: this kernel has no pressure stall information"
        )
    else:
        # A hybrid has the container in the unified hierarchy too, where its runtime puts it there.
        path = f"{root}/unified/{os.path.relpath(directory, reader.hierarchy)}/{PRESSURE_FILE}"
        why_not = f"cgroup v1 has no {PRESSURE_FILE}"
    try:
        found = parse_cpu_pressure_avg60(read_text(path))
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            raise UsageUnknown(why_not) from error
        # With psi=0 on the kernel's command line the file is there and cannot be opened.
        raise UsageUnknown(f"{PRESSURE_FILE} cannot be read: {error.strerror}") from error
    if found is None:
        raise UsageUnknown(f"{PRESSURE_FILE} has no pressure of the last minute")
    return found


def _read_thread_waits(
    directory: str, proc: str, until: float, clock: Callable[[], float]
) -> dict[int, float]:
    pids = list_cgroup_processes(directory)
    if not pids:
        raise UsageUnknown("it has no process")
    found: dict[int, float] = {}
    turns = silent = 0
    for pid in sorted(pids):
        for thread in _list_process_threads(proc, pid):
            if len(found) >= MAX_THREADS_READ:
                raise UsageUnknown(f"it has more than the {MAX_THREADS_READ} threads that are read")
            read = _read_thread_schedstat(f"{proc}/{pid}/task/{thread}/{SCHEDSTAT_FILE}")
            if read is not None:
                found[thread], times = read
                turns += times
            elif os.path.exists(f"{proc}/{pid}/task/{thread}/stat"):
                silent += 1
            if clock() > until:
                raise UsageUnknown(f"reading {SCHEDSTAT_FILE} of its threads took too long")
    if not found:
        raise UsageUnknown(
            f"this kernel has no {SCHEDSTAT_FILE} of threads"
            if silent
            else f"its processes ended while their {SCHEDSTAT_FILE} was read"
        )
    if not turns:
        # Without sched_info the file is there, and says 0 0 0 of threads that ran.
        raise UsageUnknown(f"{SCHEDSTAT_FILE} of its threads counts nothing")
    return found


def _list_process_threads(proc: str, pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"{proc}/{pid}/task") if name.isdigit())
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            return []
        raise UsageUnknown(
            f"threads of process {pid} cannot be listed: {error.strerror}"
        ) from error


def _read_thread_schedstat(path: str) -> tuple[float, int] | None:
    """Seconds that a thread waited, and how often it ran; None when there is nothing to read."""
    try:
        with open(path, "rb", buffering=0) as file:
            match = _SCHEDSTAT_PATTERN.match(file.read(_READ_BYTES).strip())
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            return None
        raise UsageUnknown(
            f"{SCHEDSTAT_FILE} of a thread cannot be read: {error.strerror}"
        ) from error
    return (int(match[2]) / 1e9, int(match[3])) if match else None


# --- what a host gives to others, and how many tasks wait for each CPU ----------------------------
# Sources: proc_stat(5), whose eighth number of a CPU is the time that a host gave to others while
# this machine wanted to run (steal), and Documentation/scheduler/sched-stats.rst for
# /proc/schedstat, whose eighth number of a CPU is the time that tasks waited on its run queue.


class CPUStealAndWaitTimes(msgspec.Struct, frozen=True):
    """All CPUs at one moment.

    Attributes:
        steal: by CPU, ``(stolen, total)`` ticks since the machine started; empty where the kernel
            does not count steal.
        waited: by CPU, the seconds that tasks waited for it since then; empty where not known.
    """

    steal: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    waited: Mapping[int, float] = msgspec.field(default_factory=dict)


def parse_steal_and_wait_times(stat: str, schedstat: str) -> CPUStealAndWaitTimes:
    """The times in the texts of /proc/stat and /proc/schedstat; what is no such text tells none."""
    return CPUStealAndWaitTimes(
        {
            c: (ticks[7], sum(ticks))
            for c, ticks in parse_cpu_lines(stat).items()
            if len(ticks) == 8
        },
        {c: times[7] / 1e9 for c, times in parse_cpu_lines(schedstat).items() if len(times) == 8},
    )


def steal_by_node(
    before: CPUStealAndWaitTimes, after: CPUStealAndWaitTimes, topology: Topology
) -> dict[int, float]:
    """By NUMA node, the part of its CPUs' time that was stolen meanwhile, from 0 to 1.

    A NUMA node of which nothing is known is left out: there is no zero for it. CPUs that were away
    at one of the readings, whose counters did not move or went backwards, do not count.
    """
    found: dict[int, float] = {}
    for i, numa_node in topology.numa_nodes.items():
        parts = []
        for cpu in numa_node.cpus:
            if cpu in before.steal and cpu in after.steal:
                taken = after.steal[cpu][0] - before.steal[cpu][0]
                total = after.steal[cpu][1] - before.steal[cpu][1]
                if total > 0 and 0 <= taken <= total:
                    parts.append(taken / total)
        if parts:
            found[i] = sum(parts) / len(parts)
    return found


def runqueue_by_node(
    before: CPUStealAndWaitTimes, after: CPUStealAndWaitTimes, topology: Topology, seconds: float
) -> dict[int, float]:
    """By NUMA node, how many tasks waited for each of its CPUs on average.

    What is not known is left out, as for `steal_by_node`.
    """
    found: dict[int, float] = {}
    for i, numa_node in topology.numa_nodes.items():
        waits = [
            after.waited[cpu] - before.waited[cpu]
            for cpu in numa_node.cpus
            if cpu in before.waited
            and cpu in after.waited
            and after.waited[cpu] >= before.waited[cpu]
        ]
        if waits and seconds > 0:
            found[i] = sum(waits) / len(waits) / seconds
    return found


class SmoothedStealFactors:
    """Capacity factors that follow steal, slowly and in steps.

    Half of a change has arrived after ``half_life`` seconds; what is measured must be ``step`` from
    a factor before it changes, and no factor is below ``floor``.

    Attributes:
        factors: by NUMA node, the factors that are not 1.
    """

    def __init__(self, *, half_life: float, step: float, floor: float) -> None:
        self._half_life = half_life
        self._step = step
        self._floor = floor
        self._steal: dict[int, float] = {}
        self.factors: dict[int, float] = {}

    def update_steal(self, steal: Mapping[int, float], seconds: float) -> bool:
        """Take what was stolen within the last seconds; whether a factor changed.

        A NUMA node that is not in ``steal`` keeps what it has: it is not known to be whole.
        """
        weight = 1 - 0.5 ** (seconds / self._half_life)
        before = dict(self.factors)
        for i, now in sorted(steal.items()):
            # It begins with nothing stolen: one bad moment after the start is no reason to act.
            smooth = self._steal.get(i, 0.0)
            smooth = self._steal[i] = smooth + weight * (now - smooth)
            factor = self.factors.get(i, 1.0)
            if smooth < self._step / 2:
                self.factors.pop(i, None)  # whole again; half a step below what lowers it
            elif abs(1 - smooth - factor) >= self._step:
                self.factors[i] = round(max(self._floor, 1 - smooth), 2)
        return self.factors != before

    def retain_nodes(self, numa_nodes: frozenset[int] | set[int]) -> None:
        """Forget NUMA nodes that are none of these."""
        for i in [i for i in self._steal if i not in numa_nodes]:
            del self._steal[i]
            self.factors.pop(i, None)


# --- How fast the CPUs of each NUMA node run now, where the kernel tells it -----------------------
# Source: Documentation/admin-guide/pm/cpufreq.rst, ``scaling_cur_freq`` in kHz. Guests mostly have
# no cpufreq.


MAX_FREQUENCY_CPUS_PER_NODE: Final = 16
"""CPUs of a NUMA node that are read, evenly apart; a mean of more costs more and says the same."""


def read_frequency_by_node(tree: Tree, topology: Topology) -> dict[int, float]:
    """By NUMA node, the mean frequency of its CPUs in hertz.

    A NUMA node of which nothing is known is left out: there is no zero for it.
    """
    found: dict[int, float] = {}
    for i, numa_node in topology.numa_nodes.items():
        cpus = list(numa_node.cpus)
        step = max(1, -(-len(cpus) // MAX_FREQUENCY_CPUS_PER_NODE))
        known = [hertz for cpu in cpus[::step] if (hertz := _read_cpu_hertz(tree, cpu))]
        if known:
            found[i] = sum(known) / len(known)
    return found


def _read_cpu_hertz(tree: Tree, cpu: int) -> float:
    """Of one CPU; 0 where it is not known (no driver, ``<unknown>``, a CPU that just went away)."""
    khz = tree.read_file(f"{CPU_DIR}/cpu{cpu}/cpufreq/scaling_cur_freq") or ""
    return int(khz) * 1000.0 if khz.isascii() and khz.isdecimal() and len(khz) < 12 else 0.0
