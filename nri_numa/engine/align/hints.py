"""What a container asks of each resource, and which NUMA masks suit it.

A *demand* states the facts: how much is needed, what each NUMA node could give when empty
(capacity) and what it can give now (available). A demand stands for a list of the kubelet's *hints*
without spelling the list out: a mask of NUMA nodes is a hint when it covers the need with what is
available, and a *preferred* one when it is also no wider than an empty machine would have required.
`nri_numa.engine.align.families` answers questions about that list, `nri_numa.engine.align.merge`
combines the lists of several demands.

The two kinds of empty answer of the kubelet's hint providers stay apart everywhere:

* *no wish* (a nil list): any placement suits; one hint without mask, preferred;
* *impossible* (an empty list): nothing suits; one hint without mask, not preferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nri_numa.engine.values.workload import DeviceRequest
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet

Amounts = Mapping[int, int]
"""Quantity by NUMA node; missing is none."""


@dataclass(frozen=True, slots=True)
class Hint:
    """One answer of a provider.

    Attributes:
        affinity: the NUMA nodes to use, None when any placement suits.
        preferred: the mask is as narrow as an empty machine would allow.
    """

    affinity: NUMASet | None
    preferred: bool

    def __str__(self) -> str:
        where = "any" if self.affinity is None else f"{{{self.affinity}}}"
        return where + ("✓" if self.preferred else "✗")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceDemand:
    """A need for a quantity that NUMA nodes add up to: CPUs, memory, huge pages.

    The masks looked at are made of the NUMA nodes that ``capacity`` names, so a CPU demand names
    the NUMA nodes with CPUs and a memory demand those with memory. A mask is a hint when all of
    ``required`` lies in it and the sum of ``available`` over it reaches ``need``. It is preferred
    when its width is the least width at which ``capacity`` reaches ``need`` on some mask.

    A need of zero or less asks for nothing and counts as no wish.

    Attributes:
        resource: ``cpu``, ``memory``, ``hugepages-2Mi`` …
        need: in the same unit as the mappings.
        capacity: by NUMA node, what an empty machine has.
        available: by NUMA node, what is free now plus what the container may reuse; missing and
            negative mean none.
        required: NUMA nodes that must lie in every mask, because the container holds or reuses
            something there.
        sockets: NUMA node to socket; given, masks that touch as few sockets as the narrowest mask
            would are preferred too (the kubelet's ``align-by-socket``).
        groups: NUMA node to the group it is bound to, the kubelet's memory cells; None for no
            group rule. With it a node of a larger group is no mask of its own, and a wider mask
            may hold a node with assignments only if it is that node's group.
        assigned: NUMA nodes with assignments, for the group rule.
        near: NUMA nodes in ``capacity`` that are no part of masks themselves (memory without CPUs)
            to those that they serve: they count for a mask that holds any of these.
        share: demands with the same key are judged together: a mask suits all or none of them and
            they have one preferred width, as the memory types of the kubelet do.
        nothing_is_no_wish: when no mask suits, answer *no wish* instead of *impossible*. The
            kubelet's memory manager does, and fails at allocation.
        unit: for texts: ``bytes``, ``cpus``, ``millicpu``, or empty for a plain number; None is
            ``bytes`` for memory and huge pages and a plain number for the rest.
    """

    resource: str
    need: int
    capacity: Mapping[int, int]
    available: Mapping[int, int]
    required: NUMASet = NO_NUMA_NODES
    sockets: Mapping[int, int] | None = None
    groups: Mapping[int, NUMASet] | None = None
    assigned: NUMASet = NO_NUMA_NODES
    near: Mapping[int, NUMASet] = field(default_factory=dict)
    share: str | None = None
    nothing_is_no_wish: bool = False
    unit: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDemand:
    """A need for devices, which may belong to no, one or several NUMA nodes.

    A device counts for a mask when *any* of its NUMA nodes lies in it. Devices without NUMA nodes
    count for no mask. When no device of the resource has a NUMA node there is no wish.

    Attributes:
        request: the count and every device of the resource that the container has.
    """

    request: DeviceRequest

    @property
    def resource(self) -> str:
        """The resource's name, such as ``example.com/gpu``."""
        return self.request.resource

    @property
    def need(self) -> int:
        """The number of devices asked for."""
        return self.request.count


def together(near: Mapping[int, NUMASet], amounts: Amounts) -> Amounts:
    """What each NUMA node by itself has of a resource, with what serves it.

    Args:
        near: see `ResourceDemand`.
        amounts: by NUMA node.
    """
    if not near:
        return amounts
    found = {i: amount for i, amount in amounts.items() if i not in near}
    for i, served in near.items():
        for home in served:
            found[home] = found.get(home, 0) + max(0, amounts.get(i, 0))
    return found


HintDemand = ResourceDemand | DeviceDemand
