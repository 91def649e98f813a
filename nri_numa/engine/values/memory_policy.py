"""How the kernel chooses among the memory nodes of a container: ``set_mempolicy(2)``, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

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


@dataclass(frozen=True, slots=True)
class MemoryPolicySetting:
    """A memory policy for one container.

    Attributes:
        mode: never ``default``.
        nodes: which NUMA nodes it is about; empty for ``local``.
    """

    mode: MemoryPolicy
    nodes: NUMASet = NO_NUMA_NODES


@dataclass(frozen=True, slots=True)
class MemoryPolicies:
    """Which memory policies containers can be given on this node.

    Attributes:
        refused: for those that cannot be had, who does not know it and what is needed, as a clause
            after *but*.
    """

    refused: Mapping[MemoryPolicy, str] = field(default_factory=dict)


EVERY_MEMORY_POLICY: Final = MemoryPolicies()
"""Nobody said that any of them is missing."""
