"""CPUs that containers without a right to them are pinned to, which are given to owners last.

Somebody else pinned them there, the kubelet's static policy or another plugin
(docs/adr/0018-foreign-containers.md), or their list is soft: both reserve nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from nri_numa.engine.state import UNBOUND_GROUP, NodeState
from nri_numa.engine.values.settings import Settings
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.model import Topology


def pinned_elsewhere(state: NodeState, topology: Topology) -> CPUSet:
    """The CPUs that cpusets of somebody else say something about.

    Under the kubelet's static policy every container has one, and most have its shared pool: a set
    of more than half of what containers may use is no pin to particular CPUs, and counts as none.
    """
    return _named(state.foreign, topology)


def listed_softly(state: NodeState, topology: Topology) -> CPUSet:
    """The CPUs of soft lists, as `pinned_elsewhere`."""
    return _named((~key for key in state.groups if key < UNBOUND_GROUP), topology)


def _named(sets: Iterable[int], topology: Topology) -> CPUSet:
    most = len(topology.allowed) // 2
    bits = 0
    for cpus in sets:
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
