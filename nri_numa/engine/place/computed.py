"""Computed assignments: resource demands → alignment → CPUs → memory nodes.

The sources of the rules: the kubelet's Topology, CPU and Memory Managers (KEP-693, KEP-3570,
KEP-1769), and the accounting

    cpu_allocatable(i) = total(i) × overcommit × capacity_factor(i) − Σ requests bound to i
    mem_allocatable(i) = total(i) − Σ requests bound to i, at most what the kernel has free there

Among equally good NUMA nodes a strategy decides (docs/adr/0031-spread-by-the-scarcest-share.md).

``restricted`` and ``single-numa-node`` refuse rather than use more NUMA nodes than they promise.
The merge of hints keeps that for one container at the moment it is placed. What is checked here
besides is what comes after: further containers of a pod that was placed as a whole, and memory that
is no longer there by the time it is allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from nri_numa.engine.accounting import (
    check_exclusive_limits,
    loads_by_cpu,
    pool_floor_text,
    split_cpu_milli,
    take_avoiding_contended,
)
from nri_numa.engine.align.hints import (
    AmountsByNode,
    SearchBudget,
    add_attached_to_cpu_nodes,
    compute_hints,
)
from nri_numa.engine.align.policies import (
    Alignment,
    AlignmentRequest,
    align_demands,
    shortage_clause,
)
from nri_numa.engine.captions import unpinned_caption, with_outcome
from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
    classify_cpus_by_load_overlap,
)
from nri_numa.engine.decision import Placement, PlacementRequest, RejectionWithAlignment
from nri_numa.engine.foreign_pins import (
    exclusive_holders_text,
    foreign_or_grantable_cpus,
    yielding_list_cpus,
)
from nri_numa.engine.node_model import NodeModel, closest_nodes, tier_text
from nri_numa.engine.place.distribution import (
    device_distribution,
    local_cpu_sentences,
    parts_for_devices,
)
from nri_numa.engine.place.listed_cpus import (
    check_numamem,
    excluded_memory_warnings,
    isolated_list_warnings,
)
from nri_numa.engine.place.memory import (
    MemoryTable,
    bytes_by_type,
    cpu_and_memory_charges,
    cpu_nodes_near,
    is_split_by_kernel,
    kubelet_memory_grant,
    memory_groups_text,
    rank_nodes_by_distance,
    widen_for_memory,
)
from nri_numa.engine.place.needs import (
    FreeResources,
    affinity_nodes_with_most_devices,
    alignment_shortage_text,
    cpu_provider,
    cpu_shortage_text,
    device_step_sentences,
    excluded_memory_nodes_text,
    excluded_memory_text,
    exclusive_cpu_count_text,
    exclusive_restrictions_text,
    free_resources,
    free_resources_text,
    hint_providers,
    kubelet_memory_shortage_text,
    memory_shortage_text,
    needed_text,
    pod_demand,
    smt_misaligned_text,
)
from nri_numa.engine.state import STRICT_POLICIES, ContainerKind, PodRecord, shared_group_cpus
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet, union_cpus
from nri_numa.model.machine import (
    Topology,
    cpus_text,
    human_milli,
    inflect_for_ids,
    join_words,
    numa_text,
)
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.settings import Settings
from nri_numa.model.workload import SMT, Bind, Policy, QoSClass, Scope, Strategy
from nri_numa.text import human_bytes

USED_FRACTION_SCALE = 1 << 40
"""What a NUMA node has, when shares of it are compared; a larger number rounds less."""
MIN_FREE_MEMORY_BYTES = 1 << 30
"""A NUMA node with less free, or less than a twentieth, is the last for who requests no memory."""
MIN_FREE_MEMORY_DIVISOR = 20


def rank_numa_nodes(case: PlacementRequest, table: FreeResources) -> dict[int, int] | None:
    """Rank NUMA nodes by strategy: 0 is tried first among equally good ones.

    Order: NUMA nodes that would hold the container by themselves before others, and for one that
    requests no memory those with some free; those that the scheduler held for it; for CPUs of its
    own those with enough that no container is pinned to; those with enough isolated CPUs, or
    others, as set; for ``smt: pair`` those with enough beside opposite loads; those with CPUs that
    the pod had before (the kubelet's rule: its hints contain all CPUs of finished init
    containers); for containers without devices those without free ones; then by strategy, then the
    lowest id.

    * ``spread``: the least share in use, once the container is there, of whatever is scarcest
      there (CPUs, memory, huge pages); then of the next scarcest.
    * ``pack``: the reverse: the fullest that fits.
    * ``most-memory``: the most memory left; without memory, and among equals, the most CPU left.

    For a container that requests nothing every share is what it was: unless it is to ``pack``, it
    goes where the fewest of its like are for each CPU that they may use, and only then by shares.

    None when ties are broken as the kubelet does.
    """
    machine, settings = case.node.machine, case.node.machine.settings
    if settings.kubelet.ties:
        return None
    amounts = _amounts_by_resource(case, table)
    need, ids, free_bits = case.demand.exclusive_cpus, machine.alignable_nodes, table.free_cpus.bits

    def nodes_short_of(cpus: int) -> Collection[int]:
        """NUMA nodes with too few of some CPUs."""
        return [i for i in ids if (machine.allowed_cpus_by_node[i].bits & cpus).bit_count() < need]

    pinned: Collection[int] = ()
    unsuiting: Collection[int] = ()
    unpaired: Collection[int] = ()
    if need:
        contended = foreign_or_grantable_cpus(case.node.state, machine.topology, settings)
        contended = contended | yielding_list_cpus(case.node.state, machine.topology)
        pinned = nodes_short_of(free_bits & ~contended.bits) if contended else ()
        suitable_cpus = machine.allocator_index.cpus_suiting_isolation(settings) & free_bits
        unsuiting = nodes_short_of(suitable_cpus) if suitable_cpus != free_bits else ()
        if case.effective_smt is SMT.PAIR:
            unpaired = nodes_short_of(_opposite_load_cpus(case) & free_bits)
    placed = case.requested.scheduled_nodes.bits
    previous_cpus = table.previous_cpus.bits
    beside_devices = _nodes_with_unused_devices(case)
    short_nodes = {i for amount, by_id, _ in amounts for i in ids if by_id[i] < amount}
    if not case.demand.memory_bytes:
        short_nodes |= _nodes_low_on_memory(case)
    measures = strategy_keys(amounts, ids, settings.strategy)
    if settings.strategy is not Strategy.PACK and not any(amount for amount, _, _ in amounts):
        densities = _uncharged_densities(case, ids)
        measures = [(n, *measure) for n, measure in zip(densities, measures, strict=True)]
    keys = [
        (
            i in short_nodes,
            placed != 0 and not placed >> i & 1,
            i in pinned,
            i in unsuiting,
            i in unpaired,
            previous_cpus != 0 and not machine.allowed_cpus_by_node[i].bits & previous_cpus,
            i in beside_devices,
            measure,
            i,
        )
        for i, measure in zip(ids, measures, strict=True)
    ]
    keys.sort()
    return {key[-1]: position for position, key in enumerate(keys)}


def _nodes_with_unused_devices(case: PlacementRequest) -> Collection[int]:
    """NUMA nodes with free devices, for a container that has none; else nothing."""
    if case.node.reading is None or case.container.devices or case.container.pod_devices:
        return ()
    return [i for i, count in case.node.reading.devices.items() if count]


def _nodes_low_on_memory(case: PlacementRequest) -> set[int]:
    """NUMA nodes whose free memory is so low that a new container may soon have none."""
    attached = case.node.machine.memory_only_nodes.attached
    free_bytes = add_attached_to_cpu_nodes(attached, case.node.free_memory)
    capacity = add_attached_to_cpu_nodes(attached, case.node.machine.memory_capacity)
    return {
        i
        for i, total in capacity.items()
        if total and free_bytes[i] < max(MIN_FREE_MEMORY_BYTES, total // MIN_FREE_MEMORY_DIVISOR)
    }


def _uncharged_densities(case: PlacementRequest, ids: Collection[int]) -> list[int]:
    """By NUMA node, containers without charges for each usable CPU, with one more there."""
    pool, topology = case.node.pool.bits, case.node.machine.topology

    def density_on(nodes: int, count: int) -> int:
        usable_count = (topology.cpu_bits_of(nodes) & pool).bit_count()
        return count * USED_FRACTION_SCALE // max(1, usable_count)

    counts = case.node.state.uncharged_counts
    densities = {key: density_on(key, count) for key, count in counts.items()}
    return [
        density_on(1 << i, 1) + sum(n for key, n in densities.items() if key >> i & 1) for i in ids
    ]


ResourceAmounts = tuple[int, AmountsByNode, AmountsByNode]
"""Amount needed; amounts free and on an empty machine, by NUMA node."""


def _amounts_by_resource(case: PlacementRequest, table: FreeResources) -> list[ResourceAmounts]:
    """Amounts of everything needed: CPUs, memory, huge pages."""
    machine, demand = case.node.machine, case.demand
    if demand.exclusive_cpus:
        amounts: list[ResourceAmounts] = [
            (demand.exclusive_cpus, table.free_exclusive_by_node, machine.usable_cpu_count_by_node)
        ]
    else:
        amounts = [(demand.cpu_milli, table.free_cpu_milli, machine.shared_capacity_milli)]
    attached = machine.memory_only_nodes.attached
    if demand.memory_bytes and table.free_memory:
        free_amounts = add_attached_to_cpu_nodes(attached, table.free_memory)
        capacity = add_attached_to_cpu_nodes(attached, machine.memory_capacity)
        amounts.append((demand.memory_bytes, free_amounts, capacity))
    for size, free_amounts in sorted(table.free_hugepages.items()):
        capacity = add_attached_to_cpu_nodes(attached, machine.hugepages_capacity(size))
        amounts.append(
            (demand.hugepages[size], add_attached_to_cpu_nodes(attached, free_amounts), capacity)
        )
    return amounts


def strategy_keys(
    amounts: list[ResourceAmounts], ids: Collection[int], strategy: Strategy
) -> list[tuple[int, ...]]:
    """Sort keys by NUMA node; the least is tried first."""
    if strategy is Strategy.MOST_MEMORY:
        ordered_amounts = amounts[1:2] + amounts[:1]
        return [tuple([-free_amounts[i] for _, free_amounts, _ in ordered_amounts]) for i in ids]
    # The shares of each resource that would be in use, largest first.
    columns = [
        [
            (capacity[i] - free_amounts[i] + need) * USED_FRACTION_SCALE // capacity[i]
            if capacity[i] > 0
            else USED_FRACTION_SCALE
            for i in ids
        ]
        for need, free_amounts, capacity in amounts
    ]
    rows: list[tuple[int, ...]]
    if len(columns) == 2:  # CPUs and memory: every second container
        rows = [(a, b) if a >= b else (b, a) for a, b in zip(*columns, strict=True)]
    else:
        rows = [tuple(sorted(row, reverse=True)) for row in zip(*columns, strict=True)]
    if strategy is Strategy.PACK:
        return [tuple([-share for share in row]) for row in rows]
    return rows


def _opposite_load_cpus(case: PlacementRequest) -> int:
    """CPUs of cores that run opposite loads only; for ``smt: pair``."""
    index = case.node.machine.allocator_index
    loads = classify_cpus_by_load_overlap(case.requested.load, loads_by_cpu(case.node.state))
    cores = index.cores_touched(loads.opposite) & ~index.cores_touched(loads.same_hours)
    return index.threads_of(cores)


def check_pod_affinity(
    case: PlacementRequest, table: FreeResources, record: PodRecord
) -> Rejection | None:
    """Check that a further container may go where its pod was placed (scope ``pod``).

    Free amounts may have changed since the first container, and the runtime may not have reported
    the pod's sum. Memory and exclusive CPUs are checked where they are taken. Policies that are not
    strict always allow it.
    """
    policy, affinity = case.policy, record.affinity or NO_NUMA_NODES
    if policy not in STRICT_POLICIES:
        return None
    misfit = _pod_affinity_misfit(case, table, record, affinity)
    shortage = "" if misfit else _pod_affinity_shortage(case, table, affinity)
    if misfit or shortage:
        nodes_text = numa_text(affinity)
        problem = shortage or f"policy {policy}: its pod was placed on {nodes_text}, {misfit}"
        return Rejection(
            reason=RejectionReason.TOPOLOGY_AFFINITY,
            detail=f"{problem}; it needs "
            f"{needed_text(case)} where its pod was placed (policy {policy}, scope pod); "
            f"free: {free_resources_text(case, table)}",
            rule=f"policy {policy} keeps every container of the pod where the pod was placed",
            allows_best_effort=True,
        )
    return None


def _has_exclusive_by_kubelet_rules(case: PlacementRequest) -> bool:
    """True for exclusive CPUs by the kubelet's rules, which may come from whole sockets."""
    return case.uses_kubelet_rules and case.demand.exclusive_cpus > 0


def _pod_affinity_misfit(
    case: PlacementRequest, table: FreeResources, record: PodRecord, affinity: NUMASet
) -> str:
    """Clause about the pod's NUMA nodes if the policy does not allow them; else empty."""
    restricted = case.policy is Policy.RESTRICTED
    if not restricted and len(affinity) > 1:
        return "more than one"
    if restricted and not record.affinity_is_preferred:
        return "more than an empty machine would need"
    if not _is_nested_near_listed_memory(case, table, affinity):
        return f"not near the memory of numamem {table.listed_mems}"
    # Its first container had a fraction, so these CPUs were not known then.
    has_new_cpus = restricted and _has_exclusive_by_kubelet_rules(case)
    if has_new_cpus and not _is_preferred_affinity(case, table, affinity):
        return "more than its CPUs need on an empty machine"
    return ""


def _pod_affinity_shortage(case: PlacementRequest, table: FreeResources, affinity: NUMASet) -> str:
    """Clause about CPUs that are short on the pod's NUMA nodes; else empty."""
    demand, nodes_text = case.demand, numa_text(affinity)
    if case.policy is Policy.RESTRICTED and _has_exclusive_by_kubelet_rules(case):
        # They may come from all of its sockets, and would have had to fit there beforehand.
        pod_cpus = union_cpus(a.cpus for a in case.node.state.allocations_of_pod(case.pod.uid))
        free_count = len(pod_cpus & case.node.machine.topology.cpus_of(affinity)) - len(pod_cpus)
        free_count += sum(table.free_exclusive_by_node.get(i, 0) for i in affinity)
        if free_count < demand.exclusive_cpus:
            need = exclusive_cpu_count_text(demand.exclusive_cpus)
            free_text = f"{max(0, free_count)} free for exclusive use on {nodes_text}"
            return shortage_clause("cpu", need, free_text)
    elif not (demand.exclusive_cpus or case.uses_kubelet_rules):
        milli = sum(table.free_cpu_milli.get(i, 0) for i in affinity)
        if milli < demand.cpu_milli:
            free_text = f"{human_milli(milli)} free on {nodes_text}"
            return shortage_clause("cpu", human_milli(demand.cpu_milli), free_text)
    return ""


def _is_nested_near_listed_memory(
    case: PlacementRequest, table: FreeResources, affinity: NUMASet
) -> bool:
    """True without listed memory, and if the CPUs near it are inside the affinity, or around it."""
    if table.listed_mems is None:
        return True
    near_list = cpu_nodes_near(case.node.machine, table.listed_mems)
    return affinity <= near_list or near_list <= affinity


def _is_preferred_affinity(case: PlacementRequest, table: FreeResources, affinity: NUMASet) -> bool:
    """True if the kubelet's CPU Manager would prefer these NUMA nodes for the pod's whole CPUs."""
    pod_case = replace(case, demand=pod_demand(case.pod, case.demand))
    providers, nodes = [cpu_provider(pod_case, table)], case.node.machine.alignable_nodes
    (hints,) = compute_hints(providers, nodes, SearchBudget())
    return hints.prefers_width(affinity.bits)


def memory_rejection(
    case: PlacementRequest, table: FreeResources, mems: NUMASet, alignment: Alignment | None
) -> Rejection:
    """Reject memory that is short on the memory nodes ``mems``."""
    lacking = memory_shortage_text(case.demand, table, mems, f"on {numa_text(mems)}")
    return RejectionWithAlignment(
        reason=RejectionReason.NOT_ENOUGH_MEMORY,
        detail=f"{lacking} (policy {case.policy}); "
        f"free: {free_resources_text(case, table)}{excluded_memory_nodes_text(case, table)}",
        rule=f"policy {case.policy} allows no memory of other NUMA nodes",
        allows_best_effort=True,
        alignment=alignment,
    )


def choose_memory(
    case: PlacementRequest, table: FreeResources, numa_nodes: NUMASet
) -> tuple[NUMASet, bool, tuple[str, ...]] | None:
    """Choose memory nodes for CPUs on some NUMA nodes; also return a flag and steps for others.

    Order: their own memory, or the closest if they have none; then memory-only NUMA nodes attached
    to them; then, unless the policy is strict, any other that may be used. If even those do not
    hold it, none is pinned, because the OOM killer would come sooner. None if a strict policy finds
    too little.
    """
    machine, demand = case.node.machine, case.demand
    topology, usable_nodes = machine.topology, machine.assignable_memory_nodes
    attached_nodes = machine.memory_only_nodes.attached_to(numa_nodes)
    mems = numa_nodes & usable_nodes
    if not mems:
        mems = _nearest_memory_node(topology, numa_nodes, attached_nodes or usable_nodes)
    byte_needs = [(demand.memory_bytes, table.free_memory)]
    byte_needs += [(n, table.free_hugepages[size]) for size, n in demand.hugepages.items()]
    near_mems = widen_for_memory(mems, byte_needs, topology.distance, attached_nodes)
    if near_mems is not None:
        return near_mems, False, _memory_only_note(machine, near_mems, numa_nodes)
    if case.policy in STRICT_POLICIES:
        return None
    wide_mems = widen_for_memory(mems, byte_needs, topology.distance, usable_nodes)
    if wide_mems is not None:
        note = f"memory extended from {numa_text(mems)} to {numa_text(wide_mems)}, so that it fits"
        return wide_mems, True, (note,)
    excluded = machine.memory_only_nodes.excluded
    nodes_text = "on all NUMA nodes that may be used"
    lacking = memory_shortage_text(demand, table, usable_nodes, nodes_text)
    if not excluded:
        # Nothing holds it: a pin would only bring the OOM killer sooner.
        return usable_nodes, True, (f"{lacking}, so its memory may come from all of them",)
    note = f"its memory is not pinned: {lacking}, and {excluded_memory_text(topology, excluded)}"
    return NO_NUMA_NODES, True, (note,)


def _memory_only_note(machine: NodeModel, mems: NUMASet, numa_nodes: NUMASet) -> tuple[str, ...]:
    """Build the note that memory comes from memory-only NUMA nodes."""
    attached = machine.memory_only_nodes.attached
    nodes = mems & NUMASet(attached) if attached else NO_NUMA_NODES
    if not nodes:
        return ()
    verb = inflect_for_ids(nodes, "is", "are")
    return (f"{tier_text(machine.topology, nodes)} {verb} attached to {numa_text(numa_nodes)}",)


def _nearest_memory_node(topology: Topology, numa_nodes: NUMASet, usable: NUMASet) -> NUMASet:
    """The usable memory node nearest to CPUs, of equally near ones the lowest; none without any."""
    distances = {m: min((topology.distance(i, m) for i in numa_nodes), default=0) for m in usable}
    return NUMASet(sorted(closest_nodes(distances))[:1])


def place_computed(case: PlacementRequest) -> Placement | Rejection:
    """Choose NUMA nodes, CPUs and memory nodes for one container."""
    pod_case = _whole_pod_request(case) if case.requested.scope is Scope.POD else case
    table = free_resources(pod_case)
    if table.listed_mems is not None:
        rejection = check_numamem(case)
        if rejection is not None:
            return rejection
    if case.policy is Policy.NONE:
        placement: Placement | Rejection = _place_unaligned(case, table)
    else:
        placement = _place_aligned(pod_case, table, case.demand.exclusive_cpus)
    if isinstance(placement, Rejection):
        return placement
    if case.demand.exclusive_cpus:
        return _place_exclusive(case, table, placement)
    placement = _with_device_sentences(case, placement, placement.affinity)
    if case.uses_kubelet_rules:
        # As under the kubelet: all shared CPUs, and no CPU time allocated anywhere.
        return _complete_placement(case, table, placement)
    return _place_shared(case, table, placement)


def _whole_pod_request(case: PlacementRequest) -> PlacementRequest:
    """The request of the whole pod, if this is the first of its containers."""
    if case.pod_record is not None and case.pod_record.affinity is not None:
        return case
    demand = pod_demand(case.pod, case.demand, fractions=not case.uses_kubelet_rules)
    return replace(case, demand=demand)


def _place_unaligned(case: PlacementRequest, table: FreeResources) -> Placement:
    """Policy ``none``: any NUMA node, or those near the listed memory."""
    affinity, note = None, "policy none: any NUMA node"
    if table.listed_mems is not None:
        affinity = cpu_nodes_near(case.node.machine, table.listed_mems)
        note = f"policy none: CPUs near the memory of numamem, {numa_text(affinity)}"
    return replace(case.initial_placement, affinity=affinity, decision_steps=(note,))


def _place_shared(
    case: PlacementRequest, table: FreeResources, placement: Placement
) -> Placement | Rejection:
    """Share the CPUs of the affinity, or of all NUMA nodes where it has none to share."""
    machine, topology = case.node.machine, case.node.machine.topology
    affinity = placement.affinity
    numa_nodes = machine.alignable_nodes if affinity is None else affinity
    if not topology.cpu_bits_of(numa_nodes.bits) & topology.allowed.bits:
        numa_nodes = topology.cpu_nodes
    numa_nodes = numa_nodes & topology.cpu_nodes
    if not numa_nodes:
        cause = "no NUMA node of this machine has CPUs"
        return replace(
            case.initial_placement,
            aligned=False,
            reason=unpinned_caption(cause),
            decision_steps=(cause,),
        )
    placement = replace(placement, kind=ContainerKind.SHARED, numa_nodes=numa_nodes)
    return _complete_placement(case, table, placement)


def _place_aligned(
    case: PlacementRequest, table: FreeResources, own_count: int
) -> Placement | Rejection:
    """Ask the policy for NUMA nodes, once for each pod under scope ``pod``.

    The demand of ``case`` is the pod's then; ``own_count`` exclusive CPUs are the container's.
    """
    record = case.pod_record if case.requested.scope is Scope.POD else None
    if record is not None and record.affinity is not None:
        note = f"scope pod: the pod was placed on {numa_text(record.affinity)}"
        return check_pod_affinity(case, table, record) or replace(
            case.initial_placement,
            affinity=record.affinity,
            aligned=record.affinity_is_preferred,
            decision_steps=(note,),
        )
    alignment = _align_resources(case, table)
    if alignment.admitted:
        return _affinity_placement(case, alignment)
    if case.demand.exclusive_cpus > own_count and case.uses_kubelet_rules:
        # The rest of the pod's sum may be fractions, which need no CPUs of their own.
        demand = replace(case.demand, exclusive_cpus=own_count)
        placement = _place_aligned(replace(case, demand=demand), table, own_count)
        if not isinstance(placement, Rejection):
            return placement
    return _alignment_rejection(case, table, alignment)


def _align_resources(case: PlacementRequest, table: FreeResources) -> Alignment:
    """Merge the hints of all resources; near listed memory, if the policy is strict."""
    machine, settings, policy = case.node.machine, case.node.machine.settings, case.policy
    providers, ranks = hint_providers(case, table), rank_numa_nodes(case, table)
    if table.listed_mems is not None:
        ranks = rank_nodes_by_distance(machine, table.listed_mems, ranks)
        if policy in STRICT_POLICIES:
            near_list = cpu_nodes_near(machine, table.listed_mems)
            providers = [provider.confined_to(near_list) for provider in providers]
    return align_demands(
        AlignmentRequest(
            demands=tuple(providers),
            numa_ids=machine.alignable_nodes,
            policy=policy,
            distance=machine.topology.distance,
            prefer_closest_numa_nodes=settings.prefer_closest_numa_nodes,
            rank=ranks,
            one_width=not settings.kubelet.memory,
        )
    )


def _alignment_rejection(
    case: PlacementRequest, table: FreeResources, alignment: Alignment
) -> Rejection:
    policy, misaligned = case.policy, alignment.misaligned_devices
    return RejectionWithAlignment(
        reason=RejectionReason.TOPOLOGY_AFFINITY
        if misaligned is None
        else RejectionReason.DEVICE_AFFINITY,
        detail=alignment_shortage_text(case, table, alignment)
        + ("" if misaligned is None or misaligned.apart else f"; {misaligned.clause}")
        + memory_groups_text(table.kubelet_memory)
        + _missing_cpu_holders(case),
        rule=f"policy {policy} admits no more NUMA nodes than an empty machine would need"
        if policy is Policy.RESTRICTED
        else f"policy {policy} admits one NUMA node only",
        allows_best_effort=True,
        alignment=alignment,
    )


def _affinity_placement(case: PlacementRequest, alignment: Alignment) -> Placement:
    """Start a placement on the NUMA nodes that the policy chose, with the steps."""
    affinity = alignment.affinity
    nodes_text = "any NUMA node" if affinity is None else numa_text(affinity)
    ideal = "" if alignment.preferred else ", misaligned"
    sentences = [f"policy {case.policy} chose {nodes_text}{ideal}"]
    warnings: tuple[str, ...] = ()
    scheduled_nodes = case.requested.scheduled_nodes
    if scheduled_nodes.bits and affinity is not None:
        hold_text = f"the scheduler chose {numa_text(scheduled_nodes)}"
        if affinity == scheduled_nodes:
            sentences.append(f"{hold_text}, too")
        else:
            # It chose by what was published then; here is what is true now.
            warnings = (f"{hold_text}, which no longer fits best: placed on {nodes_text} instead",)
    return replace(
        case.initial_placement,
        affinity=affinity,
        aligned=alignment.preferred,
        alignment=alignment,
        decision_steps=(*sentences, *warnings),
        warnings=warnings,
    )


def _with_device_sentences(
    case: PlacementRequest, placement: Placement, numa_nodes: NUMASet | None
) -> Placement:
    """Add sentences about devices on the chosen NUMA nodes and on others."""
    container, alignment = case.container, placement.alignment
    if alignment is None or not (
        container.devices or container.pod_devices or container.device_notes
    ):
        return placement
    if case.requested.scope is Scope.POD:
        numa_nodes = placement.affinity  # its other containers' devices count, too
    elif alignment.affinity is None:
        numa_nodes = None
    sentences = device_step_sentences(case, numa_nodes)
    return replace(placement, decision_steps=placement.decision_steps + sentences)


def _missing_cpu_holders(case: PlacementRequest) -> str:
    """Name holders of the missing CPUs, unless no empty NUMA node would have enough."""
    count = case.demand.exclusive_cpus
    capacity = max(case.node.machine.exclusive_capacity_for(count).values(), default=0)
    if not count or (case.policy is Policy.SINGLE_NUMA_NODE and count > capacity):
        return ""
    return _obstacles_text(case)


def _obstacles_text(case: PlacementRequest) -> str:
    count = case.demand.exclusive_cpus
    floor = pool_floor_text(case.node, case.effective_smt, count)
    return floor + exclusive_holders_text(case.node.state, requests=True)


def _place_exclusive(
    case: PlacementRequest, table: FreeResources, placement: Placement
) -> Placement | Rejection:
    """Take CPUs for one container, of the affinity first."""
    machine, affinity = case.node.machine, placement.affinity
    nodes = machine.alignable_nodes if affinity is None else affinity
    if table.listed_mems is not None:
        nodes = nodes & cpu_nodes_near(machine, table.listed_mems)
    distribution, limits = device_distribution(case, nodes), table.free_exclusive_by_node
    request = _take_request(case, table, affinity, is_distributed=distribution is not None)
    nodes = request.affinity or nodes
    parts = parts_for_devices(case, distribution, nodes, request.free_cpus, limits)
    request = replace(request, parts=parts)
    chosen_cpus = take_avoiding_contended(case, request, limits)
    if not isinstance(chosen_cpus, ChosenCPUs):
        return _take_rejection(chosen_cpus, case, table, placement)
    subject = f"cpu: {exclusive_cpu_count_text(case.demand.exclusive_cpus)}"
    rejection = check_exclusive_limits(case, subject, chosen_cpus.cpus, chosen_cpus.idle)
    if rejection is not None:
        return RejectionWithAlignment.with_alignment(rejection, placement.alignment)
    numa_nodes = machine.topology.numa_of(chosen_cpus.cpus)
    placement = _with_device_sentences(case, placement, numa_nodes)
    sentences = [*placement.decision_steps, *chosen_cpus.notes]
    returned = request.prefer & chosen_cpus.cpus
    if returned:
        verb = inflect_for_ids(returned, "was", "were")
        sentences.append(f"{cpus_text(returned)} {verb} the pod's before")
    aligned = placement.aligned and (
        affinity is None or numa_nodes <= _nodes_giving_cpus(request.settings, machine, affinity)
    )
    if distribution is not None:
        sentences += distribution.proportion_sentences(machine.topology, chosen_cpus.cpus)
        aligned = aligned and not distribution.cpu_shortfalls(machine.topology, chosen_cpus.cpus)
    sentences += local_cpu_sentences(case, numa_nodes, chosen_cpus.cpus)
    return _complete_placement(
        case,
        table,
        replace(
            placement,
            kind=ContainerKind.EXCLUSIVE,
            exclusive=True,
            numa_nodes=numa_nodes,
            cpus=chosen_cpus.cpus,
            idle_siblings=chosen_cpus.idle,
            aligned=aligned,
            decision_steps=tuple(sentences),
        ),
        None if distribution is None else distribution.device_counts,
    )


def _take_request(
    case: PlacementRequest, table: FreeResources, affinity: NUMASet | None, *, is_distributed: bool
) -> TakeRequest:
    """Build the request for CPUs of the affinity, or first of a part of it."""
    machine, settings = case.node.machine, case.node.machine.settings
    if case.policy is Policy.SINGLE_NUMA_NODE and settings.kubelet.align_by_socket:
        # A socket may be several NUMA nodes. The kubelet refuses to start with both.
        settings = settings.without_socket_alignment
    free_cpus, previous_cpus = table.free_cpus, table.previous_cpus
    nodes, strict = affinity, case.policy in STRICT_POLICIES
    if affinity is not None:
        region = _nodes_giving_cpus(settings, machine, affinity)
        previous_cpus = previous_cpus & machine.topology.cpus_of(region)
        first_nodes = _nodes_taken_first(case, table, affinity, is_distributed=is_distributed)
        if first_nodes is not None:
            nodes = first_nodes
            if strict:
                free_cpus = free_cpus & machine.topology.cpus_of(affinity)
                strict = nodes == affinity
    return TakeRequest(
        count=case.demand.exclusive_cpus,
        free_cpus=free_cpus,
        prefer=previous_cpus,
        current_cpus=case.current_cpus,
        affinity=nodes,
        strict=strict,
        smt=case.effective_smt,
        load=case.requested.load,
        settings=settings,
    )


def _nodes_taken_first(
    case: PlacementRequest, table: FreeResources, affinity: NUMASet, *, is_distributed: bool
) -> NUMASet | None:
    """The part of an affinity near listed memory, or with most of the devices; None without any."""
    settings = case.node.machine.settings
    if table.listed_mems is not None:
        return affinity & cpu_nodes_near(case.node.machine, table.listed_mems) or affinity
    has_kubelet_rule = settings.kubelet.ties or settings.kubelet.distribute_cpus_across_numa
    if len(affinity) < 2 or has_kubelet_rule or is_distributed:
        return None
    nodes = affinity_nodes_with_most_devices(
        case, affinity, table.free_exclusive_by_node, case.demand.exclusive_cpus
    )
    return None if nodes == affinity else nodes


def _nodes_giving_cpus(settings: Settings, machine: NodeModel, affinity: NUMASet) -> NUMASet:
    """NUMA nodes whose CPUs an affinity may use; with ``alignBySocket`` all of its sockets."""
    region = affinity
    if settings.kubelet.align_by_socket:
        for socket in machine.topology.sockets.values():
            if socket.numa_nodes & affinity:
                region = region | socket.numa_nodes
    return region


def _take_rejection(
    failed: NotEnoughCPUs | SMTMisaligned,
    case: PlacementRequest,
    table: FreeResources,
    placement: Placement,
) -> Rejection:
    text, holders = free_resources_text(case, table), _obstacles_text(case)
    if isinstance(failed, SMTMisaligned):
        clause = smt_misaligned_text(case, failed, case.effective_smt)
        return RejectionWithAlignment(
            reason=RejectionReason.SMT_ALIGNMENT,
            detail=f"{clause}; free: {text}{holders}",
            rule="smt: full-core gives whole cores only",
            alignment=placement.alignment,
        )
    affinity = placement.affinity if case.policy in STRICT_POLICIES else None
    return RejectionWithAlignment(
        reason=RejectionReason.NOT_ENOUGH_CPUS,
        detail=cpu_shortage_text(case.node.machine, failed, affinity)
        + f"{exclusive_restrictions_text(case)}; free: {text}{holders}",
        rule="exclusive CPUs must be free",
        allows_best_effort=placement.affinity is not None,
        alignment=placement.alignment,
    )


def _complete_placement(
    case: PlacementRequest,
    table: FreeResources,
    placement: Placement,
    device_counts: Mapping[int, int] | None = None,
) -> Placement | Rejection:
    """Choose memory nodes, charge everything (memory by ``device_counts``), write the caption."""
    placed = _with_memory(case, table, placement)
    if isinstance(placed, Rejection):
        return placed
    demand, policy = case.demand, case.policy
    takes_limit = table.kubelet_memory is not None and table.listed_mems is None
    charges = cpu_and_memory_charges(
        placed.numa_nodes, _charged_milli_by_node(case, table, placed), placed.mems,
        demand.memory_bytes if takes_limit else demand.memory_requested, table.free_memory,
        demand.hugepages, table.free_hugepages,
        kubelet_memory=case.node.machine.settings.kubelet.memory, weights=device_counts,
    )  # fmt: skip
    split_pages = [
        f"pages of {human_bytes(size)}"
        for size, amount in sorted(demand.hugepages.items())
        if not case.node.machine.settings.kubelet.memory
        and is_split_by_kernel(placed.mems, amount, table.free_hugepages.get(size, {}))
    ]
    if split_pages:
        text = f"the kernel chooses the NUMA node of its {join_words(split_pages)}, "
        text += f"so all that are free on {numa_text(placed.mems)} are charged to it"
        placed = replace(placed, decision_steps=(*placed.decision_steps, text))
    warnings: tuple[str, ...] = ()
    if placed.kind is ContainerKind.SHARED:
        topology = case.node.machine.topology
        cpus = shared_group_cpus(placed.numa_nodes.bits, case.node.pool, topology, 0)
        warnings = isolated_list_warnings(case.node.machine, cpus)
    return replace(
        placed,
        charges=charges,
        policy=policy,
        is_misaligned=not placed.aligned,
        reason=with_outcome(_placement_caption(placed), is_misaligned=not placed.aligned),
        decision_steps=placed.decision_steps + warnings,
        warnings=placed.warnings + warnings,
        pod_affinity=_affinity_to_record_for_pod(case, placed.affinity),
    )


def _placement_caption(placement: Placement) -> str:
    if placement.kind is ContainerKind.UNPINNED:
        memory = f", memory of {numa_text(placement.mems)}" if placement.mems else ""
        return f"CPUs unpinned (kubeletCompatibility: cpus){memory}"
    cpus = "shared CPUs"
    if placement.kind is ContainerKind.EXCLUSIVE:
        cpus = exclusive_cpu_count_text(len(placement.cpus))
    return f"{cpus} on {numa_text(placement.numa_nodes)}"


def _with_memory(
    case: PlacementRequest, table: FreeResources, placement: Placement
) -> Placement | Rejection:
    """Choose memory nodes: the listed ones, by the kubelet's rules, or near the CPUs."""
    if table.listed_mems is not None:
        return _with_listed_memory(case, table.listed_mems, placement)
    if table.kubelet_memory is not None:
        if case.pod.qos is QoSClass.GUARANTEED and bytes_by_type(case.demand):
            return _with_kubelet_memory(case, table, table.kubelet_memory, placement)
    elif case.requested.bind is Bind.CPU_MEM and (
        placement.kind is not ContainerKind.UNPINNED or bytes_by_type(case.demand)
    ):
        return _with_near_memory(case, table, placement)
    return placement


def _with_listed_memory(case: PlacementRequest, mems: NUMASet, placement: Placement) -> Placement:
    aligned = placement.aligned and placement.numa_nodes <= cpu_nodes_near(case.node.machine, mems)
    if case.requested.bind is Bind.CPU:
        return replace(placement, aligned=aligned)
    warnings = excluded_memory_warnings(case.node.machine, mems)
    note = f"memory as listed: numamem {mems}"
    return replace(
        placement,
        mems=mems,
        aligned=aligned,
        decision_steps=(*placement.decision_steps, note, *warnings),
        warnings=placement.warnings + warnings,
    )


def _with_kubelet_memory(
    case: PlacementRequest, table: FreeResources, memory: MemoryTable, placement: Placement
) -> Placement | Rejection:
    """Memory nodes as the kubelet's Memory Manager grants them to Guaranteed pods."""
    demand, policy = case.demand, case.policy
    affinity, alignment = placement.affinity, placement.alignment
    # Without a policy there was no hint, which is not a preferred one.
    is_preferred = placement.aligned and policy is not Policy.NONE
    granted = kubelet_memory_grant(memory, bytes_by_type(demand), affinity, is_preferred)
    if isinstance(granted, str):
        return RejectionWithAlignment(
            reason=RejectionReason.NOT_ENOUGH_MEMORY,
            detail=f"{kubelet_memory_shortage_text(memory, demand, affinity)} "
            f"(kubeletCompatibility: memory); {granted}; it needs {needed_text(case)}; "
            f"free: {free_resources_text(case, table)}",
            rule="kubeletCompatibility: memory applies the kubelet's memory rules",
            allows_best_effort=True,
            alignment=alignment,
        )
    if affinity is None or granted <= affinity:
        return replace(placement, mems=granted)
    if policy in STRICT_POLICIES:
        return memory_rejection(case, table, affinity, alignment)
    note = f"memory extended from {numa_text(affinity)} to {numa_text(granted)}"
    sentences = (*placement.decision_steps, note)
    return replace(placement, mems=granted, aligned=False, decision_steps=sentences)


def _with_near_memory(
    case: PlacementRequest, table: FreeResources, placement: Placement
) -> Placement | Rejection:
    numa_nodes = placement.numa_nodes
    if placement.affinity is not None:
        numa_nodes = placement.affinity | numa_nodes
    choice = choose_memory(case, table, numa_nodes)
    if choice is None:
        return memory_rejection(case, table, numa_nodes, placement.alignment)
    mems, is_widened, sentences = choice
    return replace(
        placement,
        mems=mems,
        aligned=placement.aligned and not is_widened,
        decision_steps=placement.decision_steps + sentences,
    )


def _affinity_to_record_for_pod(case: PlacementRequest, affinity: NUMASet | None) -> NUMASet | None:
    """Affinity of a pod that is placed as a whole; without any the only NUMA node of a machine."""
    if case.requested.scope is not Scope.POD or case.policy is Policy.NONE:
        return None
    nodes = case.node.machine.alignable_nodes
    return nodes if affinity is None and len(nodes) == 1 else affinity


def _charged_milli_by_node(
    case: PlacementRequest, table: FreeResources, placement: Placement
) -> dict[int, int]:
    """Thousandths of a CPU to allocate on each NUMA node."""
    if placement.cpus:
        counts = case.node.machine.topology.cpu_count_by_node(placement.cpus)
        return {i: 1000 * count for i, count in counts.items()}
    milli = min(case.demand.cpu_milli, case.demand.cpu_requested_milli)
    return split_cpu_milli(milli, placement.numa_nodes, table.free_cpu_milli)
