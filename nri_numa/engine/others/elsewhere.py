"""CPUs that somebody else pinned containers to: the kubelet's static policy, another plugin.

They reserve nothing (docs/adr/0018-foreign-containers.md), but they are given to owners last.
"""

from __future__ import annotations

from nri_numa.engine.state import NodeState
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.model import Topology


def pinned_elsewhere(state: NodeState, topology: Topology) -> CPUSet:
    """The CPUs that cpusets of somebody else say something about.

    Under the kubelet's static policy every container has one, and most have its shared pool: a set
    of more than half of what containers may use is no pin to particular CPUs, and counts as none.
    """
    most = len(topology.allowed) // 2
    bits = 0
    for cpus in state.foreign:
        here = cpus & topology.allowed.bits
        if here.bit_count() <= most:
            bits |= here
    return CPUSet.from_bits(bits)


def given_last(state: NodeState, topology: Topology, settings: Settings) -> CPUSet:
    """CPUs that others are pinned to, and those that the kubelet's static policy may still grant.

    The kubelet knows nothing of what we give away. Only its reserved CPUs are safe from it, so
    owners get those first, where they are known and not reserved for us as well.
    """
    pinned = pinned_elsewhere(state, topology)
    if state.kubelet.cpu_policy != "static" or not settings.kubelet_reserved:
        return pinned
    return pinned | (topology.allowed - settings.kubelet_reserved)
