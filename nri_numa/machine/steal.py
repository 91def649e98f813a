"""How much of the CPUs' time is not there: what the host took, and what waited for its turn. Pure.

Sources: proc_stat(5), whose eighth number is the time that a host gave to others while this machine
wanted to run (steal), and Documentation/scheduler/sched-stats.rst for /proc/schedstat, whose
eighth number of a CPU is the time that tasks waited on its run queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from nri_numa.machine.model import Topology
from nri_numa.machine.tree import CPU_DIR, Tree

_CPU: Final = re.compile(r"^cpu(\d{1,5}) ([\d ]+)$", re.MULTILINE | re.ASCII)


@dataclass(frozen=True, slots=True)
class CPUTimes:
    """All CPUs at one moment.

    Attributes:
        steal: by CPU, ``(stolen, total)`` ticks since the machine started; empty where the kernel
            does not count steal.
        waited: by CPU, the seconds that tasks waited for it since then; empty where not told.
    """

    steal: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    waited: Mapping[int, float] = field(default_factory=dict)


def cpu_times(stat: str, schedstat: str) -> CPUTimes:
    """The times in the texts of /proc/stat and /proc/schedstat; what is no such text tells none."""
    steal: dict[int, tuple[int, int]] = {}
    for match in _CPU.finditer(stat):
        # Guest time, which follows, is within user time already.
        ticks = [int(word) for word in match[2].split()[:8]]
        if len(ticks) == 8:
            steal[int(match[1])] = ticks[7], sum(ticks)
    waited: dict[int, float] = {}
    for match in _CPU.finditer(schedstat):
        words = match[2].split()
        if len(words) >= 9:
            waited[int(match[1])] = int(words[7]) / 1e9
    return CPUTimes(steal, waited)


def stolen(before: CPUTimes, after: CPUTimes, topology: Topology) -> dict[int, float]:
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


def waiting(
    before: CPUTimes, after: CPUTimes, topology: Topology, seconds: float
) -> dict[int, float]:
    """By NUMA node, how many tasks waited for each of its CPUs on average.

    What is not known is left out, as for `stolen`.
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


class Smoothed:
    """Capacity factors that follow steal, slowly and in steps.

    Args:
        half_life: seconds after which half of a change has arrived.
        step: how far what is measured must be from a factor before it changes.
        floor: no factor is lower.

    Attributes:
        factors: by NUMA node, the factors that are not 1.
    """

    def __init__(self, *, half_life: float, step: float, floor: float) -> None:
        self._half_life = half_life
        self._step = step
        self._floor = floor
        self._steal: dict[int, float] = {}
        self.factors: dict[int, float] = {}

    def take(self, steal: Mapping[int, float], seconds: float) -> bool:
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

    def keep(self, numa_nodes: frozenset[int] | set[int]) -> None:
        """Forget NUMA nodes that are none of these."""
        for i in [i for i in self._steal if i not in numa_nodes]:
            del self._steal[i]
            self.factors.pop(i, None)


# --- How fast the CPUs of each NUMA node run now, where the kernel tells it -----------------------
# Source: Documentation/admin-guide/pm/cpufreq.rst, ``scaling_cur_freq`` in kHz. Guests mostly have
# no cpufreq.


MOST: Final = 16
"""CPUs of a NUMA node that are read, evenly apart; a mean of more costs more and says the same."""


def frequencies(tree: Tree, topology: Topology) -> dict[int, float]:
    """By NUMA node, the mean frequency of its CPUs in hertz.

    A NUMA node of which nothing is known is left out: there is no zero for it.
    """
    found: dict[int, float] = {}
    for i, numa_node in topology.numa_nodes.items():
        cpus = list(numa_node.cpus)
        step = max(1, -(-len(cpus) // MOST))
        told = [_hertz(tree, cpu) for cpu in cpus[::step]]
        known = [hertz for hertz in told if hertz]
        if known:
            found[i] = sum(known) / len(known)
    return found


def _hertz(tree: Tree, cpu: int) -> float:
    """Of one CPU; 0 where it is not known (no driver, ``<unknown>``, a CPU that just went away)."""
    text = tree.read(f"{CPU_DIR}/cpu{cpu}/cpufreq/scaling_cur_freq") or ""
    return int(text) * 1000.0 if text.isascii() and text.isdecimal() and len(text) < 12 else 0.0
