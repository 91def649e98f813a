"""CPU pressure of containers, and steal and run queues of CPUs.

The pressure of a container is in cpu.pressure of its cgroup (Documentation/accounting/psi.rst): the
part of the last minute in which a task of the container was ready and had no CPU. Version 1 has no
such file. The time that each thread has waited on a run queue is the second number of
/proc/PID/task/TID/schedstat (Documentation/scheduler/sched-stats.rst); two readings show how many
threads waited on average. A value that could not be read completely is unknown.
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
"""Maximum CPU seconds for the threads of one container: some thousand, at 25 µs each."""
MAX_THREADS_READ: Final = 2048
"""Maximum number of threads read for one container; they are stored until the next reading."""
_READ_BYTES: Final = 4096

_PRESSURE_LINE: Final = re.compile(
    r"^some avg10=[\d.]+ avg60=(\d{1,3}(?:\.\d+)?) ", re.MULTILINE | re.ASCII
)
_SCHEDSTAT_PATTERN: Final = re.compile(rb"^(\d{1,20}) (\d{1,20}) (\d{1,20})$", re.ASCII)


class CPUWaits(msgspec.Struct, frozen=True):
    """One reading of one container.

    Attributes:
        pressure: part of the last minute in which a task of it waited, from 0 to 1; None if
            unknown.
        no_pressure: reason why it is unknown; else empty.
        threads: by thread id, the seconds that it has waited since it began; None if unknown.
        no_threads: reason why they are unknown; else empty.
    """

    pressure: float | None = None
    no_pressure: str = ""
    threads: Mapping[int, float] | None = None
    no_threads: str = ""


def read_cpu_waits(
    reader: CgroupReader,
    cgroup: CgroupPlace,
    *,
    limit: float = SCHEDSTAT_CPU_LIMIT_S,
    clock: Callable[[], float] = time.thread_time,
) -> CPUWaits:
    """Read the CPU waits of one container.

    ``limit`` is in seconds of ``clock``, the CPU time of this thread.
    """
    directory = reader.directory_of(cgroup)
    if not directory or not os.path.isdir(directory):
        problem = "it has no cgroup that can be read"
        return CPUWaits(no_pressure=problem, no_threads=problem)
    pressure = threads = None
    no_pressure = no_threads = ""
    try:
        pressure = _read_cpu_pressure(reader, directory)
    except UsageUnknown as unknown:
        no_pressure = str(unknown)
    try:
        threads = _read_thread_waits(directory, reader.proc, clock() + limit, clock)
    except UsageUnknown as unknown:
        no_threads = str(unknown)
    return CPUWaits(pressure, no_pressure, threads, no_threads)


def tasks_waiting(
    prior_seconds: Mapping[int, float], current_seconds: Mapping[int, float], seconds: float
) -> float | None:
    """Return the mean number of threads that waited for a CPU between two readings, or None.

    Threads in only one of the readings are left out: their waiting time is unknown.
    """
    increases = [
        waited - prior_seconds[thread]
        for thread, waited in current_seconds.items()
        if thread in prior_seconds and waited >= prior_seconds[thread]
    ]
    return sum(increases) / seconds if increases and seconds > 0 else None


def parse_cpu_pressure_avg60(pressure: str) -> float | None:
    """Parse the pressure of the last minute in the text of cpu.pressure; None in another text."""
    match = _PRESSURE_LINE.search(pressure)
    return min(1.0, float(match[1]) / 100) if match else None


def _read_cpu_pressure(reader: CgroupReader, directory: str) -> float:
    if reader.unified:
        path = f"{directory}/{PRESSURE_FILE}"
        problem = (
            f"its cgroup has no {PRESSURE_FILE}: this kernel has no pressure stall information"
        )
    else:
        # On a hybrid the runtime may have put the container into the unified hierarchy too.
        relative = os.path.relpath(directory, reader.hierarchy)
        path = f"{reader.root}/unified/{relative}/{PRESSURE_FILE}"
        problem = f"cgroup v1 has no {PRESSURE_FILE}"
    try:
        pressure = parse_cpu_pressure_avg60(read_text(path))
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            raise UsageUnknown(problem) from error
        # With psi=0 on the kernel's command line the file exists and cannot be opened.
        raise UsageUnknown(f"{PRESSURE_FILE} cannot be read: {error.strerror}") from error
    if pressure is None:
        raise UsageUnknown(f"{PRESSURE_FILE} has no pressure of the last minute")
    return pressure


def _read_thread_waits(
    directory: str, proc: str, deadline: float, clock: Callable[[], float]
) -> dict[int, float]:
    pids = list_cgroup_processes(directory)
    if not pids:
        raise UsageUnknown("it has no process")
    seconds_by_thread: dict[int, float] = {}
    run_count = missing_count = 0
    for pid in sorted(pids):
        for thread in _list_process_threads(proc, pid):
            if len(seconds_by_thread) >= MAX_THREADS_READ:
                raise UsageUnknown(f"it has more than the {MAX_THREADS_READ} threads that are read")
            read = _read_thread_schedstat(f"{proc}/{pid}/task/{thread}/{SCHEDSTAT_FILE}")
            if read is not None:
                seconds_by_thread[thread], times = read
                run_count += times
            elif os.path.exists(f"{proc}/{pid}/task/{thread}/stat"):
                missing_count += 1
            if clock() > deadline:
                raise UsageUnknown(f"reading {SCHEDSTAT_FILE} of its threads took too long")
    if not seconds_by_thread:
        if missing_count:
            raise UsageUnknown(f"this kernel has no {SCHEDSTAT_FILE} of threads")
        raise UsageUnknown(f"its processes ended while their {SCHEDSTAT_FILE} was read")
    if not run_count:
        # Without sched_info the file exists, and is 0 0 0 even for threads that ran.
        raise UsageUnknown(f"{SCHEDSTAT_FILE} of its threads counts nothing")
    return seconds_by_thread


def _list_process_threads(proc: str, pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"{proc}/{pid}/task") if name.isdigit())
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            return []
        text = f"threads of process {pid} cannot be listed: {error.strerror}"
        raise UsageUnknown(text) from error


def _read_thread_schedstat(path: str) -> tuple[float, int] | None:
    """Read the seconds that a thread waited and the times that it ran; None if unreadable."""
    try:
        with open(path, "rb", buffering=0) as file:
            match = _SCHEDSTAT_PATTERN.match(file.read(_READ_BYTES).strip())
    except OSError as error:
        if error.errno in PROCESS_GONE_ERRNOS:
            return None
        text = f"{SCHEDSTAT_FILE} of a thread cannot be read: {error.strerror}"
        raise UsageUnknown(text) from error
    return (int(match[2]) / 1e9, int(match[3])) if match else None


# --- steal, and tasks that wait for each CPU ------------------------------------------------------
# Sources: proc_stat(5), whose eighth number of a CPU is the time that the hypervisor gave to other
# guests (steal), and Documentation/scheduler/sched-stats.rst for /proc/schedstat, whose eighth
# number of a CPU is the time that tasks waited on its run queue.


class CPUStealAndWaitTimes(msgspec.Struct, frozen=True):
    """Counters of all CPUs at one moment.

    Attributes:
        steal: by CPU, ``(steal, total)`` ticks since the machine started; empty if the kernel does
            not count steal.
        waited: by CPU, the seconds that tasks waited for it since then; empty if unknown.
    """

    steal: Mapping[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    waited: Mapping[int, float] = msgspec.field(default_factory=dict)


def parse_steal_and_wait_times(stat: str, schedstat: str) -> CPUStealAndWaitTimes:
    """Parse the texts of /proc/stat and /proc/schedstat; another text has no times."""
    return CPUStealAndWaitTimes(
        {
            c: (ticks[7], sum(ticks))
            for c, ticks in parse_cpu_lines(stat).items()
            if len(ticks) == 8
        },
        {c: times[7] / 1e9 for c, times in parse_cpu_lines(schedstat).items() if len(times) == 8},
    )


def steal_by_node(
    prior: CPUStealAndWaitTimes, current: CPUStealAndWaitTimes, topology: Topology
) -> dict[int, float]:
    """Compute the steal of each NUMA node between two readings: a part of time, from 0 to 1.

    A NUMA node without known CPUs is left out. CPUs count only if they are in both readings and
    their counters advanced.
    """
    steal_by_cpu: dict[int, float] = {}
    for cpu in prior.steal.keys() & current.steal.keys():
        stolen_ticks = current.steal[cpu][0] - prior.steal[cpu][0]
        total = current.steal[cpu][1] - prior.steal[cpu][1]
        if total > 0 and 0 <= stolen_ticks <= total:
            steal_by_cpu[cpu] = stolen_ticks / total
    return _mean_by_node(steal_by_cpu, topology)


def runqueue_by_node(
    prior: CPUStealAndWaitTimes, current: CPUStealAndWaitTimes, topology: Topology, seconds: float
) -> dict[int, float]:
    """Compute the mean number of tasks that waited for each CPU, by NUMA node.

    Unknown NUMA nodes are left out, as in `steal_by_node`.
    """
    wait_seconds_by_cpu = {
        cpu: current.waited[cpu] - waited
        for cpu, waited in prior.waited.items()
        if current.waited.get(cpu, -1) >= waited
    }
    means = _mean_by_node(wait_seconds_by_cpu, topology) if seconds > 0 else {}
    return {i: wait_seconds / seconds for i, wait_seconds in means.items()}


def _mean_by_node(value_by_cpu: Mapping[int, float], topology: Topology) -> dict[int, float]:
    """Compute the mean of each NUMA node's CPUs; those without a value are left out."""
    values_by_node = {
        i: [value_by_cpu[cpu] for cpu in numa_node.cpus if cpu in value_by_cpu]
        for i, numa_node in topology.numa_nodes.items()
    }
    return {i: sum(values) / len(values) for i, values in values_by_node.items() if values}


class SmoothedStealFactors:
    """Capacity factors that follow steal, slowly and in steps.

    After ``half_life`` seconds half of a change counts. A factor changes only if the smoothed value
    differs from it by ``step``, and is never below ``floor``.

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
        """Update with the steal of the last seconds; return True if a factor changed.

        A NUMA node that is not in ``steal`` keeps its factor: its steal is unknown, not zero.
        """
        weight = 1 - 0.5 ** (seconds / self._half_life)
        old_factors = dict(self.factors)
        for i, node_steal in sorted(steal.items()):
            # It begins at 0: a short peak after the start is no reason to act.
            smooth = self._steal.get(i, 0.0)
            smooth = self._steal[i] = smooth + weight * (node_steal - smooth)
            factor = self.factors.get(i, 1.0)
            if smooth < self._step / 2:
                self.factors.pop(i, None)  # full capacity; half a step below the lowering limit
            elif abs(1 - smooth - factor) >= self._step:
                self.factors[i] = round(max(self._floor, 1 - smooth), 2)
        return self.factors != old_factors

    def retain_nodes(self, numa_nodes: frozenset[int] | set[int]) -> None:
        """Drop all NUMA nodes but these."""
        for i in [i for i in self._steal if i not in numa_nodes]:
            del self._steal[i]
            self.factors.pop(i, None)


# --- Current frequency of the CPUs of each NUMA node ----------------------------------------------
# Source: Documentation/admin-guide/pm/cpufreq.rst, ``scaling_cur_freq`` in kHz. Guests mostly have
# no cpufreq.


MAX_FREQUENCY_CPUS_PER_NODE: Final = 16
"""CPUs read on each NUMA node, evenly spaced; a mean of more CPUs is slower and no better."""


def read_frequency_by_node(tree: Tree, topology: Topology) -> dict[int, float]:
    """Read the mean CPU frequency by NUMA node, in hertz; unknown ones are left out."""
    hertz_by_cpu: dict[int, float] = {}
    for numa_node in topology.numa_nodes.values():
        cpus = list(numa_node.cpus)
        stride = max(1, -(-len(cpus) // MAX_FREQUENCY_CPUS_PER_NODE))
        hertz_by_cpu |= {c: hertz for c in cpus[::stride] if (hertz := _read_cpu_hertz(tree, c))}
    return _mean_by_node(hertz_by_cpu, topology)


def _read_cpu_hertz(tree: Tree, cpu: int) -> float:
    """Read the frequency of one CPU; 0 if unknown (no driver, ``<unknown>``, a removed CPU)."""
    khz = tree.read_file(f"{CPU_DIR}/cpu{cpu}/cpufreq/scaling_cur_freq") or ""
    return int(khz) * 1000.0 if khz.isascii() and khz.isdecimal() and len(khz) < 12 else 0.0
