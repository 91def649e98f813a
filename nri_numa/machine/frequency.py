"""How fast the CPUs of each NUMA node run now, where the kernel tells it.

Source: Documentation/admin-guide/pm/cpufreq.rst, ``scaling_cur_freq`` in kHz. Guests mostly have no
cpufreq.
"""

from __future__ import annotations

from typing import Final

from nri_numa.machine.model import Topology
from nri_numa.machine.tree import CPU_DIR, Tree

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
