"""Memory of NUMA nodes: what is free, where a grant is, and what to do when it is short.

Every quantity is bytes by NUMA node, one mapping for each memory *type*: ``memory`` and one for
each huge page size. Two ways of accounting live here:

* ours: a NUMA node has what is allocatable less what is bound to it, and never more than the kernel
  says is free or reclaimable there, because containers that are not bound use memory too;
* the kubelet's memory manager (KEP-1769), for operators who want its verdicts: only what it handed
  out counts, and a NUMA node serves either containers on it alone or one fixed *group* of NUMA
  nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nri_numa.engine.align.families import Family, families_of
from nri_numa.engine.align.hints import ResourceDemand
from nri_numa.engine.align.merge import EXACT_UPTO, STEP_LIMIT, preferred_mask
from nri_numa.engine.align.search import Cover, Distances, Order, Steps, best_mask
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.machine.model import numa_text

Amounts = Mapping[int, int]
"""Bytes by NUMA node; missing is none."""


def available(capacity: Amounts, bound: Amounts, kernel: Amounts | None) -> dict[int, int]:
    """What is left for a new container.

    Args:
        capacity: all, less what is reserved and what pools of huge pages took.
        bound: what the grants so far are allocated with.
        kernel: free and reclaimable bytes as the kernel tells them; None to trust the table alone,
            and NUMA nodes that it does not tell are trusted too.
    """
    left: dict[int, int] = {}
    for i, amount in capacity.items():
        rest = max(0, amount - bound.get(i, 0))
        left[i] = rest if kernel is None else min(rest, max(0, kernel.get(i, rest)))
    return left


def charge(mask: NUMASet, amount: int, left: Amounts) -> dict[int, int] | None:
    """Book an amount on a mask: NUMA node by NUMA node in id order, each gives what it has.

    Returns:
        Positive bytes by NUMA node, or None when the mask has too little.
    """
    allocated: dict[int, int] = {}
    for i in mask:
        if amount <= 0:
            break
        part = min(amount, left.get(i, 0))
        if part > 0:
            allocated[i] = part
            amount -= part
    return allocated if amount <= 0 else None


def widen_for_memory(
    mask: NUMASet,
    need: int,
    available: Amounts,
    distance: Callable[[int, int], int],
    candidates: NUMASet,
    also: Sequence[tuple[int, Amounts]] = (),
) -> NUMASet | None:
    """Grow a mask until it holds what is needed, so that a pin does not end at the OOM killer.

    Order of the masks that hold it: fewest NUMA nodes, least average distance, least integer value.

    Args:
        mask: what was chosen; all of it is kept. May be empty.
        need: bytes.
        available: bytes left by NUMA node.
        distance: SLIT distance between two NUMA nodes.
        candidates: NUMA nodes that may be added.
        also: further needs with what is left for them, for huge pages.

    Returns:
        The mask itself when it suffices; None when not even all candidates do.
    """
    whole = mask | candidates
    sums = [
        ({i: v for i, v in left.items() if v > 0}, amount)
        for amount, left in ((need, available), *also)
        if amount > 0
    ]
    cover = Cover(whole.bits, mask.bits, sums)
    if mask and cover.accepts(mask.bits):
        return mask
    if not sums:
        return mask
    order = Order(tuple(whole))
    distances = Distances(distance)
    steps = Steps(None if len(whole) <= EXACT_UPTO else STEP_LIMIT)
    for width in range(cover.floor(), len(whole)):
        found = best_mask(cover, width, order, distances, steps.share())
        if found is not None:
            return NUMASet.from_bits(found)
    return whole if cover.accepts(whole.bits) else None


# --- the kubelet's rules -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Which NUMA nodes are tied together by assignments.

    Attributes:
        groups: NUMA node to its group; every NUMA node has one, at first itself alone.
        assigned: NUMA nodes with assignments.
    """

    groups: Mapping[int, NUMASet]
    assigned: NUMASet


def cells(numa_ids: NUMASet, masks: Iterable[NUMASet]) -> Cells:
    """Work the groups out from the masks of the live assignments.

    Masks that overlap without being equal, which the kubelet never makes but a change of settings
    can leave behind, are put together into one group.
    """
    groups = {i: NUMASet([i]) for i in numa_ids}
    assigned = NO_NUMA_NODES
    for mask in masks:
        known = mask & numa_ids
        assigned = assigned | known
        together = known
        for i in known:
            together = together | groups[i]
        for i in together:
            groups[i] = together
    return Cells(groups=groups, assigned=assigned)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """The kubelet's memory state, as far as decisions need it.

    Attributes:
        capacity: by type, what is allocatable on each NUMA node.
        masks: the mask of each live assignment, by any key.
        charges: by the same key and type, what it is allocated with.
    """

    capacity: Mapping[str, Amounts]
    masks: Mapping[str, NUMASet] = field(default_factory=dict)
    charges: Mapping[str, Mapping[str, Amounts]] = field(default_factory=dict)

    @property
    def numa_ids(self) -> NUMASet:
        """The NUMA nodes of any type."""
        return NUMASet(i for amounts in self.capacity.values() for i in amounts)

    def free(self, resource: str) -> dict[int, int]:
        """What is left of a type."""
        bound: dict[int, int] = {}
        for allocated in self.charges.values():
            for i, amount in allocated.get(resource, {}).items():
                bound[i] = bound.get(i, 0) + amount
        return available(self.capacity.get(resource, {}), bound, None)

    def demands(self, needs: Mapping[str, int]) -> list[ResourceDemand]:
        """What a Guaranteed container asks of memory, judged as the kubelet does.

        Args:
            needs: bytes by type; a type the machine does not have cannot be met.
        """
        tied = cells(self.numa_ids, self.masks.values())
        nothing = dict.fromkeys(self.numa_ids, 0)
        return [
            ResourceDemand(
                resource=resource,
                need=need,
                capacity={**nothing, **self.capacity.get(resource, {})},
                available=self.free(resource),
                groups=tied.groups,
                assigned=tied.assigned,
                share="memory",
                nothing_is_no_wish=True,
            )
            for resource, need in sorted(needs.items())  # by type: the result never depends on it
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrant:
    """What a container got: its mask and, by type, the bytes allocated on each NUMA node."""

    mask: NUMASet
    charges: Mapping[str, Amounts]


@dataclass(frozen=True, slots=True)
class MemoryRefused:
    """Why there is no grant, in one sentence."""

    message: str


def _best_hint(family: Family, order: Order, steps: Steps) -> tuple[int, bool] | None:
    """The kubelet's default hint: preferred before not, then narrower, then the lower value."""
    machine = family.universe
    preferred = (
        None if family.nil is not None else preferred_mask([family], machine, order, None, steps)
    )
    if preferred is not None:
        return preferred, True
    width = 0 if family.nil is not None else family.narrowest(steps)
    if not width:
        return None
    masks = [m for m in family.explicit() if m.bit_count() == width and family.contains(m)]
    found = best_mask(family.cover(), width, order, None, steps)
    if found is not None:
        masks.append(found)
    return min(masks), False


def kubelet_grant(
    table: MemoryTable, needs: Mapping[str, int], affinity: NUMASet | None, preferred: bool
) -> MemoryGrant | MemoryRefused:
    """Turn the merged affinity into a grant, as the kubelet's memory manager does.

    Args:
        table: before the grant.
        needs: bytes by type.
        affinity: the merged mask; None for no wish.
        preferred: whether the merged result was a preferred one.
    """
    wanted = {r: n for r, n in needs.items() if n > 0}
    if not wanted:
        return MemoryRefused("no memory was asked for")
    machine = table.numa_ids
    demands = table.demands(wanted)
    steps = Steps()
    order = Order(tuple(machine))
    family = families_of(demands, machine, steps)[0]
    if affinity is None:
        default = _best_hint(family, order, steps)
        if default is None:
            return MemoryRefused(
                "failed to get the default NUMA affinity, no NUMA nodes with enough memory is "
                "available"
            )
        if preferred and not default[1]:
            return MemoryRefused("failed to find the default preferred hint")
        affinity = NUMASet.from_bits(default[0])
    if not _has(demands, affinity):
        wider = families_of([replace(d, required=affinity) for d in demands], machine, steps)[0]
        extended = _best_hint(wider, order, steps)
        if extended is None:
            return MemoryRefused(
                f"{numa_text(affinity, 'has', 'have')} too little memory, and no "
                "wider set that holds it fits"
            )
        affinity = NUMASet.from_bits(extended[0])
    tied = cells(machine, table.masks.values())
    for i in affinity:
        group = tied.groups[i]
        if group != affinity and (len(group) > 1 or (len(affinity) > 1 and i in tied.assigned)):
            return MemoryRefused(
                f"NUMA node {i} is tied to the group of {numa_text(group)}, expected {affinity}"
            )
    charges: dict[str, Amounts] = {}
    for d in demands:
        allocated = charge(affinity, d.need, d.available)
        charges[d.resource] = {} if allocated is None else allocated
    return MemoryGrant(mask=affinity, charges=charges)


def _has(demands: Sequence[ResourceDemand], mask: NUMASet) -> bool:
    return all(sum(d.available.get(i, 0) for i in mask) >= d.need for d in demands)
