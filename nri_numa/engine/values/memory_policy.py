"""How the kernel chooses among the memory nodes of a container: ``set_mempolicy(2)``, as values."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet


class MemoryPolicy(StrEnum):
    """What annotations call the kernel's memory policies; ``default`` sets none."""

    DEFAULT = "default"
    LOCAL = "local"
    PREFERRED = "preferred"
    PREFERRED_MANY = "preferred-many"
    BIND = "bind"
    INTERLEAVE = "interleave"
    WEIGHTED_INTERLEAVE = "weighted-interleave"

    @property
    def on_nodes(self) -> bool:
        """Whether it is about certain NUMA nodes; the others name none."""
        return self not in (MemoryPolicy.DEFAULT, MemoryPolicy.LOCAL)

    @property
    def in_turn(self) -> bool:
        """Whether memory comes from its NUMA nodes in turn."""
        return self in (MemoryPolicy.INTERLEAVE, MemoryPolicy.WEIGHTED_INTERLEAVE)


class MemoryPolicySetting(msgspec.Struct, frozen=True):
    """A memory policy for one container.

    Attributes:
        mode: never ``default``.
        nodes: which NUMA nodes it is about; empty for ``local``.
    """

    mode: MemoryPolicy
    nodes: NUMASet = NO_NUMA_NODES


class MemoryPolicies(msgspec.Struct, frozen=True):
    """Which memory policies containers can be given on this node.

    Attributes:
        refused: for those that cannot be had, who does not know it and what is needed, as a clause
            after *but*.
        weights: of the kernel for ``weighted-interleave``, by NUMA node; 1 where none is given.
    """

    refused: Mapping[MemoryPolicy, str] = msgspec.field(default_factory=dict)
    weights: Mapping[int, int] = msgspec.field(default_factory=dict)

    def weight(self, mode: MemoryPolicy, numa_node: int) -> int:
        """How many pages come from a NUMA node in its turn."""
        return self.weights.get(numa_node, 1) if mode is MemoryPolicy.WEIGHTED_INTERLEAVE else 1


RUNTIMES: Final = "containerd 2.3 or newer, or another runtime with NRI 0.12, and runc 1.4 or newer"
"""Who hands a memory policy on."""

SINCE: Final = {
    MemoryPolicy.PREFERRED_MANY: (5, 15),
    MemoryPolicy.WEIGHTED_INTERLEAVE: (6, 9),
}
"""Kernels that have what not every kernel has, set_mempolicy(2)."""

EVERY_MEMORY_POLICY: Final = MemoryPolicies()
"""Nobody said that any of them is missing."""
