"""Memory of NUMA nodes: what is free, where a grant is, what if it is short, and its policy.

Every quantity is bytes by NUMA node, one mapping for each memory *type*: ``memory`` and one for
each huge page size. Two ways of accounting live here:

* the agent's: a NUMA node has its capacity less charges, and never more than the kernel reports as
  free or reclaimable there, because unpinned containers use memory too;
* the kubelet's memory manager (KEP-1769, ``pkg/kubelet/cm/memorymanager/policy_static.go``), for
  operators who want its verdicts (``kubeletCompatibility``): only what it handed
  out counts, and a NUMA node serves either containers on it alone or one fixed *group* of NUMA
  nodes.

A list of memory (``numamem``) is taken as it is, and CPUs are computed *near* it: on the listed
NUMA nodes that have CPUs; for one without (HBM, CXL, PMEM) on those it serves. A memory policy
(``mempolicy``) is set before the program runs or never: nothing can change that of a running
process from outside. So a container that runs already goes without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from nri_numa.engine.align.hints import (
    AmountsByNode,
    DistanceSums,
    HintMerge,
    MaskOrder,
    MaskRequirement,
    ResourceDemand,
    ResourceNeed,
    SearchBudget,
    compute_hints,
)
from nri_numa.engine.decision import Placement, PlacementRequest
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.node_model import NodeModel, closest_nodes, cpu_nodes_of
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import NO_CHARGE, Charge, ContainerKind
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.model.machine import join_words, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import MemoryPolicy, MemoryPolicySetting, OnFailure, QoSClass
from nri_numa.text import hugepages_resource_name


def widen_for_memory(
    mask: NUMASet,
    demands: Sequence[tuple[int, AmountsByNode]],
    distance: Callable[[int, int], int],
    candidates: NUMASet,
) -> NUMASet | None:
    """Grow a mask until it holds what is needed, so that a pin does not end at the OOM killer.

    Order of the masks that hold it: fewest NUMA nodes, least average distance, least integer value.
    All of the mask is kept; it may be empty. Needs are bytes with what is left for them by NUMA
    node. None when not even all candidates hold it.
    """
    allowed_nodes = mask | candidates
    quantities = [
        ResourceNeed(need, {i: v for i, v in free_amounts.items() if v > 0})
        for need, free_amounts in demands
        if need > 0
    ]
    cover = MaskRequirement(
        allowed_mask=allowed_nodes.bits, required=mask.bits, quantities=tuple(quantities)
    )
    if not quantities or (mask and cover.satisfied_by(mask.bits)):
        return mask
    order, distances = MaskOrder(allowed_nodes), DistanceSums(distance)
    bits = cover.narrowest_mask(order, distances, SearchBudget())
    return None if bits is None else NUMASet.from_bits(bits)


# --- the kubelet's rules -------------------------------------------------------------------------


class MemoryTable(msgspec.Struct, frozen=True, kw_only=True):
    """The kubelet's memory state, reduced to what decisions need.

    Attributes:
        capacity, free: by type, what each NUMA node has, and has left.
        groups: NUMA node to those that assignments tie it to; every one has a group, at first
            itself alone.
    """

    capacity: Mapping[str, AmountsByNode]
    free: Mapping[str, AmountsByNode]
    groups: Mapping[int, NUMASet]
    assigned: NUMASet

    @classmethod
    def from_assignments(
        cls,
        capacity: Mapping[str, AmountsByNode],
        assignments: Iterable[tuple[NUMASet, Mapping[str, AmountsByNode]]] = (),
    ) -> MemoryTable:
        """Work it out from the live assignments: the mask of each, and by type what it has.

        Masks that overlap without being equal, which the kubelet never makes but a change of
        settings can leave behind, are put together into one group.
        """
        free_amounts = {resource: dict(amounts) for resource, amounts in capacity.items()}
        groups = {i: NUMASet([i]) for amounts in capacity.values() for i in amounts}
        assigned = NO_NUMA_NODES
        for mask, charges in assignments:
            known_nodes = group = mask & NUMASet(groups)
            assigned = assigned | known_nodes
            for i in known_nodes:
                group = group | groups[i]
            groups.update(dict.fromkeys(group, group))
            for resource, amounts in charges.items():
                for i in free_amounts[resource].keys() & amounts.keys():
                    free_amounts[resource][i] = max(0, free_amounts[resource][i] - amounts[i])
        return cls(capacity=capacity, free=free_amounts, groups=groups, assigned=assigned)

    @property
    def numa_ids(self) -> NUMASet:
        """The NUMA nodes of any type."""
        return NUMASet(self.groups)

    def memory_demands(self, bytes_needed: Mapping[str, int]) -> list[ResourceDemand]:
        """Providers of a Guaranteed container's memory, judged as the kubelet does."""
        nothing = dict.fromkeys(self.groups, 0)  # a type the machine does not have cannot be met
        return [
            ResourceDemand(
                resource=resource,
                need=need,
                capacity=nothing | dict(self.capacity[resource]),
                free_amounts=self.free[resource],
                groups=self.groups,
                assigned=self.assigned,
                joint_key="memory",
                empty_is_nil=True,
            )
            # By type: the result never depends on it.
            for resource, need in sorted(bytes_needed.items())
        ]


def _best_hint(demands: Sequence[ResourceDemand], machine: NUMASet) -> tuple[NUMASet, bool] | None:
    """The kubelet's default hint: preferred before not, then narrower, then the lower value."""
    budget = SearchBudget()
    hints = compute_hints(demands, machine, budget)[0]
    if hints.nil is not None:
        return None
    mask, preferred = HintMerge(
        hint_lists=[hints],
        all_nodes_mask=machine.bits,
        order=MaskOrder(machine),
        distances=None,
        single=False,
        budget=budget,
    ).best_affinity()
    return NUMASet.from_bits(mask), preferred


def kubelet_memory_grant(
    table: MemoryTable, bytes_needed: Mapping[str, int], affinity: NUMASet | None, preferred: bool
) -> NUMASet | str:
    """Choose memory nodes as the kubelet's memory manager does, or return the problem."""
    machine, demands = table.numa_ids, table.memory_demands(bytes_needed)
    if affinity is None:
        default = _best_hint(demands, machine)
        if default is None:
            return (
                "failed to get the default NUMA affinity, no NUMA nodes with enough memory is "
                "available"
            )
        if preferred and not default[1]:
            return "failed to find the default preferred hint"
        affinity = default[0]
    if not _is_sufficient(demands, affinity):
        extended = _best_hint([replace(d, required=affinity) for d in demands], machine)
        if extended is None:
            return f"{numa_text(affinity, 'has', 'have')} too little memory, and no larger set fits"
        affinity = extended[0]
    for i in affinity:
        group = table.groups[i]
        if group != affinity and (len(group) > 1 or (len(affinity) > 1 and i in table.assigned)):
            return f"NUMA node {i} is tied to the group of {numa_text(group)}, expected {affinity}"
    return affinity


def _is_sufficient(demands: Sequence[ResourceDemand], mask: NUMASet) -> bool:
    return all(sum(d.free_amounts.get(i, 0) for i in mask) >= d.need for d in demands)


def memory_table(node: NodeSnapshot, sizes: Iterable[int]) -> MemoryTable:
    """The kubelet's memory state: Guaranteed containers with memory nodes, and no others."""
    machine = node.machine
    names = {size: hugepages_resource_name(size) for size in sizes}
    capacity: dict[str, AmountsByNode] = {"memory": machine.usable_memory}
    for size, name in names.items():
        pages = machine.hugepages_capacity(size)
        capacity[name] = {i: pages[i] for i in machine.assignable_numa_nodes}
    assignments: list[tuple[NUMASet, Mapping[str, AmountsByNode]]] = []
    for a in node.state.allocations.values():
        # What is kept for a pod would tie its next container's NUMA nodes to those of the last one.
        if a.qos is not QoSClass.GUARANTEED or a.reserved_at or not a.mems:
            continue
        if not (a.memory_bytes or a.hugepages):
            continue
        amounts: dict[str, AmountsByNode] = {"memory": {i: c.memory for i, c in a.charges.items()}}
        for size, name in names.items():
            amounts[name] = {i: c.hugepages.get(size, 0) for i, c in a.charges.items()}
        assignments.append((a.mems, amounts))
    return MemoryTable.from_assignments(capacity, assignments)


def bytes_by_type(demand: Demand) -> dict[str, int]:
    """Requested bytes by type, without types that are not requested."""
    amounts = {"memory": demand.memory_bytes} if demand.memory_bytes else {}
    return amounts | {
        hugepages_resource_name(size): amount for size, amount in demand.hugepages.items()
    }


def memory_groups_text(table: MemoryTable | None) -> str:
    """Clause about groups of NUMA nodes, as the end of a rejection; empty without groups."""
    if table is None:
        return ""
    groups = sorted({str(group) for group in table.groups.values() if len(group) > 1})
    if not groups:
        return ""
    return (
        f"; other containers tie NUMA nodes {join_words(groups)} together "
        "(kubeletCompatibility: memory)"
    )


def cpu_nodes_near(machine: NodeModel, listed: NUMASet) -> NUMASet:
    """Listed NUMA nodes with CPUs, and those that listed memory-only NUMA nodes serve."""
    with_cpus = NUMASet(i for i, count in machine.usable_cpu_count_by_node.items() if count)
    distance = machine.topology.distance
    cpu_nodes = listed & with_cpus
    for i in listed - with_cpus:
        served = cpu_nodes_of(machine.topology, i) & with_cpus
        cpu_nodes = cpu_nodes | (served or closest_nodes({j: distance(j, i) for j in with_cpus}))
    return cpu_nodes


def rank_nodes_by_distance(
    machine: NodeModel, listed: NUMASet, rank: Mapping[int, int] | None
) -> dict[int, int]:
    """Rank NUMA nodes for CPUs beside listed memory.

    Order: those that are `cpu_nodes_near`, least distance to any of the list, the rank that is
    given, the id.
    """
    distance, ids = machine.topology.distance, machine.alignable_nodes
    ranks = dict.fromkeys(ids, 0) if rank is None else rank
    near_nodes = cpu_nodes_near(machine, listed)
    ordered = sorted(
        ids, key=lambda i: (i not in near_nodes, min(distance(i, m) for m in listed), ranks[i], i)
    )
    return {i: number for number, i in enumerate(ordered)}


def cpu_and_memory_charges(
    numa_nodes: NUMASet,
    cpu_milli: Mapping[int, int],
    mems: NUMASet,
    memory: int,
    memory_left: Mapping[int, int],
    hugepages: Mapping[int, int],
    hugepages_left: Mapping[int, Mapping[int, int]],
    *,
    kubelet_memory: bool,
    weights: Mapping[int, int] | None = None,
) -> dict[int, Charge]:
    """Book a grant on its NUMA nodes, bytes node by node in id order, as the kubelet does.

    With ``weights`` bytes are in proportion to them, as far as they are free.
    Which huge pages a container gets where no NUMA node has all of them is the kernel's choice,
    when they are first touched. So each is charged with the most that it may take there, unless the
    kubelet's rules count (``kubelet_memory``). What does not fit anywhere (a request that was
    widened past what is free) is allocated on the first memory node, so that nothing goes
    unaccounted.
    """
    weights_of_mems = {}
    if weights and not kubelet_memory:
        weights_of_mems = {i: weights.get(i, 0) for i in mems}
    memory_split = _split_bytes(mems, memory, memory_left, weights_of_mems)
    pages: dict[int, dict[int, int]] = {}
    for size, amount in sorted(hugepages.items()):
        free_amounts = hugepages_left.get(size, {})
        split = _split_bytes(mems, amount, free_amounts, weights_of_mems, size)
        if not kubelet_memory and is_split_by_kernel(mems, amount, free_amounts):
            split = {i: part for i in mems if (part := free_amounts.get(i, 0)) > 0}
        for i, part in split.items():
            pages.setdefault(i, {})[size] = part
    charges: dict[int, Charge] = {}
    for i in numa_nodes | mems:
        milli = cpu_milli.get(i, 0)
        charge = Charge(milli, memory_split.get(i, 0), pages.get(i, {}))
        if milli or charge.memory or charge.hugepages:
            charges[i] = charge
    return charges


def is_split_by_kernel(mems: NUMASet, amount: int, free_amounts: Mapping[int, int]) -> bool:
    """True if several memory nodes hold so many huge pages and none of them does by itself."""
    parts = [free_amounts.get(i, 0) for i in mems]
    return max(parts, default=0) < amount <= sum(parts)


def _split_bytes(
    mems: NUMASet,
    amount: int,
    free_amounts: Mapping[int, int],
    weights: Mapping[int, int],
    unit: int = 1,
) -> dict[int, int]:
    """Split bytes by weight in whole units as far as they are free there, the rest in id order."""
    units_free = {i: free_amounts.get(i, 0) // unit for i, weight in weights.items() if weight}
    count = min(amount // unit, sum(units_free.values()))
    if not count:
        return _split_bytes_in_id_order(mems, amount, free_amounts)
    split = _split_bytes_by_weight(count, {i: weights[i] for i in units_free}, units_free)
    by_weight = {i: n * unit for i, n in split.items() if n}
    remaining = {i: free_amounts.get(i, 0) - by_weight.get(i, 0) for i in mems}
    in_id_order = _split_bytes_in_id_order(mems, amount - count * unit, remaining)
    return Counter(by_weight) + Counter(in_id_order)


def _split_bytes_in_id_order(
    mems: NUMASet, amount: int, free_amounts: Mapping[int, int]
) -> dict[int, int]:
    if not amount or not mems:
        return {}
    split: dict[int, int] = {}
    for i in mems:
        part = min(amount, free_amounts.get(i, 0))
        if part > 0:
            split[i] = part
            amount -= part
        if not amount:
            return split
    first_node = mems.first_id
    split[first_node] = split.get(first_node, 0) + amount
    return split


MEMPOLICY_KEY: Final = "mempolicy"


def with_memory_policy(case: PlacementRequest, placed: Placement) -> Placement | Rejection:
    """Add the memory policy that was asked for, or say why there is none.

    A refusal where the runtime or the kernel does not have the policy, unless the container may be
    widened; and where an annotation asks for a policy on memory nodes that the container does not
    have. A rule or a default speaks for many containers, so there it has no effect.
    """
    mode = case.requested.mempolicy
    if case.is_running:
        return _memory_policy_without_effect(placed, mode, "the container runs already")
    if placed.kind is ContainerKind.FOREIGN:
        return _memory_policy_without_effect(placed, mode, "another program pins the container")
    if mode.needs_nodes and not placed.mems:
        if case.requested.is_from_annotation(MEMPOLICY_KEY):
            return unpinned_memory_policy_rejection(case.requested)
        reason = "nothing pins the memory of the container"
        return _memory_policy_without_effect(placed, mode, reason)
    missing = case.node.machine.memory_policies.refused.get(mode)
    if missing is None:
        charges = interleaved_charges(case, mode, placed.mems, placed.charges)
        setting = MemoryPolicySetting(mode, _memory_policy_nodes(mode, placed))
        nodes_text = f" on {numa_text(setting.nodes)}" if setting.nodes else ""
        note = f"mempolicy: {mode}{nodes_text}, from its first instruction"
        steps = (*placed.decision_steps, note)
        return replace(placed, charges=charges, memory_policy=setting, decision_steps=steps)
    if case.on_failure is OnFailure.BEST_EFFORT:
        placement = _memory_policy_without_effect(placed, mode, missing.partition(";")[0])
        return replace(placement, warnings=(*placed.warnings, placement.decision_steps[-1]))
    return Rejection(
        reason=RejectionReason.MEMORY_POLICY_UNSUPPORTED,
        detail=f"{_memory_policy_text(case.requested)}, but {missing}",
        rule="a memory policy must be known to the kernel, the runtime and the plugin",
    )


def interleaved_charges(
    case: PlacementRequest, mode: MemoryPolicy, mems: NUMASet, charges: Mapping[int, Charge]
) -> Mapping[int, Charge]:
    """Memory as it will be used where it comes from its NUMA nodes in turn, by their weights.

    The kubelet's rules know no memory policies.
    """
    if not mode.is_interleaved or len(mems) < 2 or case.node.machine.settings.kubelet.memory:
        return charges
    weights = {i: case.node.machine.memory_policies.interleave_weight(mode, i) for i in mems}
    total = NO_CHARGE
    for charge in charges.values():
        total = total.add(charge)
    memory = _split_bytes_by_weight(total.memory, weights, case.node.free_memory)
    pages: dict[int, dict[int, int]] = {}
    for size, amount in case.demand.hugepages.items():
        free_amounts = case.free_hugepages()[size]
        split = _split_bytes_by_weight(
            amount // size, weights, {i: n // size for i, n in free_amounts.items()}
        )
        for i, count in split.items():
            pages.setdefault(i, {})[size] = count * size
    new_charges = {
        i: Charge(charges.get(i, NO_CHARGE).cpu_milli, memory.get(i, 0), pages.get(i, {}))
        for i in sorted({*charges, *mems})
    }
    return {i: charge for i, charge in new_charges.items() if charge != NO_CHARGE}


def _split_bytes_by_weight(
    amount: int, weights: Mapping[int, int], free_amounts: Mapping[int, int]
) -> dict[int, int]:
    """Split bytes by weight; the excess of one NUMA node goes to others, the rest to one."""
    split: dict[int, int] = {}
    # Least room for its weight first, then by id: what it cannot give is shared by the others.
    order = sorted(weights, key=lambda i: (free_amounts.get(i, 0) // weights[i], i))
    for n, i in enumerate(order):
        weight_sum = sum(weights[j] for j in order[n:])
        split[i] = min(free_amounts.get(i, 0), -(-amount * weights[i] // weight_sum))
        amount -= split[i]
    split[min(order)] += amount
    return split


def unpinned_memory_policy_rejection(requested: PlacementOptions) -> Rejection:
    """Reject a memory policy for a container without memory nodes."""
    return Rejection(
        reason=RejectionReason.MEMORY_POLICY_NEEDS_NODES,
        detail=f"{_memory_policy_text(requested)}, but nothing pins the memory of the "
        "container; expected numamem, or a policy that pins its memory",
        rule="a memory policy applies to pinned memory only",
    )


def _memory_policy_nodes(mode: MemoryPolicy, placed: Placement) -> NUMASet:
    if not mode.needs_nodes:
        return NO_NUMA_NODES
    if mode is not MemoryPolicy.PREFERRED:
        return placed.mems
    # The kernel would take the first of several: of those beside its CPUs, if there are such.
    return NUMASet([(placed.numa_nodes & placed.mems or placed.mems).first_id])


def _memory_policy_without_effect(placed: Placement, mode: MemoryPolicy, reason: str) -> Placement:
    note = f"mempolicy: {mode} has no effect: {reason}"
    return replace(placed, decision_steps=(*placed.decision_steps, note))


def _memory_policy_text(requested: PlacementOptions) -> str:
    return f"{MEMPOLICY_KEY} is '{requested.mempolicy}' ({requested.source_text(MEMPOLICY_KEY)})"
