"""Computed assignments: resource demands → alignment → CPUs → memory nodes.

The sources of the rules: the kubelet's Topology, CPU and Memory Managers (KEP-693, KEP-3570,
KEP-1769), and the accounting

    cpu_allocatable(i) = total(i) × oversale × capacity_factor(i) − Σ requests bound to i
    mem_allocatable(i) = total(i) − Σ requests bound to i, at most what the kernel has free there

Among equally good NUMA nodes a strategy decides (docs/adr/0031-spread-by-the-scarcest-share.md).

``restricted`` and ``single-numa-node`` refuse rather than use more NUMA nodes than they promise.
The merge of hints keeps that for one container at the moment it is placed. What is checked here
besides is what comes after: further containers of a pod that was placed as a whole, and memory that
is no longer there by the time it is allocated.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from nri_numa.engine.accounting import (
    check_exclusive_limits,
    loads_by_cpu,
    pool_floor_text,
    split_cpu_milli,
    take_avoiding_contended,
)
from nri_numa.engine.align.hints import AmountsByNode, SearchBudget, compute_hints, sum_by_cpu_node
from nri_numa.engine.align.policies import (
    Alignment,
    AlignmentRequest,
    align_demands,
    shortage_clause,
)
from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTMisaligned,
    TakeRequest,
    classify_sibling_loads,
)
from nri_numa.engine.decision import NodeModel, Placement, PlacementRequest, tier_text
from nri_numa.engine.others import (
    exclusive_holders_text,
    foreign_or_grantable_cpus,
    yielding_list_cpus,
)
from nri_numa.engine.place.explicit import (
    check_numamem,
    isolated_list_warnings,
    unattached_memory_warnings,
)
from nri_numa.engine.place.memory import (
    bytes_by_type,
    charge_nodes,
    cpu_nodes_near,
    kubelet_memory_grant,
    memory_groups_text,
    rank_nodes_by_distance,
    restrict_cpu_demand_to_nodes,
    widen_for_memory,
)
from nri_numa.engine.place.needs import (
    FreeResources,
    affinity_message,
    cpu_hints,
    cpu_shortage_text,
    device_nodes_first,
    device_step_sentences,
    exclusive_cpu_count_text,
    exclusive_mode_text,
    free_resources,
    free_resources_text,
    kubelet_memory_shortage_text,
    memory_shortage_text,
    needed_text,
    pod_demand,
    resource_demands,
    smt_misaligned_text,
    unused_memory_nodes_text,
)
from nri_numa.engine.state import (
    STRICT_POLICIES,
    ContainerKind,
    PodRecord,
    shared_group_cpus,
    union_cpus,
)
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.model.machine import Topology, cpus_text, human_milli, inflect_for_ids, numa_text
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    SMT,
    Bind,
    Policy,
    QoSClass,
    Rejection,
    Scope,
    Strategy,
)
from nri_numa.text import human_bytes

USED_FRACTION_SCALE = 1 << 40
"""What a NUMA node has, when shares of it are compared; a larger number rounds less."""


def rank_numa_nodes(case: PlacementRequest, table: FreeResources) -> dict[int, int] | None:
    """Rank NUMA nodes by strategy: 0 is tried first among equally good ones.

    Order: NUMA nodes that would hold the container by themselves before others; those that the
    scheduler held for it; for CPUs of its own those with enough that no container is pinned to;
    those with enough isolated CPUs, or others, as set; for ``smt: pair`` those with enough beside
    opposite loads; those with CPUs that the pod had before (the kubelet's rule: its hints
    contain all CPUs of finished init containers); for containers without devices those without
    free ones; then by strategy, then the lowest id.

    * ``spread``: the least share in use, once the container is there, of whatever is scarcest
      there (CPUs, memory, huge pages); then of the next scarcest.
    * ``pack``: the reverse: the fullest that fits.
    * ``most-left``: the most memory left; without memory, and among equals, the most CPU left.

    None when ties are broken as the kubelet does.
    """
    machine, settings = case.machine, case.machine.settings
    if settings.kubelet_ties:
        return None
    asked = _amounts_by_resource(case, table)
    need, ids, free = case.demand.exclusive_cpus, machine.alignable_nodes, table.free_cpus.bits

    def nodes_short_of(cpus: int) -> Collection[int]:
        """NUMA nodes with too few of some CPUs."""
        return [i for i in ids if (machine.usable_cpus_by_node[i].bits & cpus).bit_count() < need]

    pinned: Collection[int] = ()
    unsuiting: Collection[int] = ()
    unpaired: Collection[int] = ()
    if need:
        last = foreign_or_grantable_cpus(case.state, machine.topology, settings)
        last = last | yielding_list_cpus(case.state, machine.topology)
        pinned = nodes_short_of(free & ~last.bits) if last else ()
        good = machine.allocator_index.cpus_suiting_isolation(settings) & free
        unsuiting = nodes_short_of(good) if good != free else ()
        if case.effective_smt is SMT.PAIR:
            unpaired = nodes_short_of(_opposite_load_cpus(case) & free)
    placed = case.requested.scheduled_nodes.bits
    former = table.previous_cpus.bits
    beside_devices: Collection[int] = ()
    if case.reading is not None and not (case.container.devices or case.container.pod_devices):
        beside_devices = [i for i, free in case.reading.devices.items() if free]
    short = {i for amount, left, _ in asked for i in ids if left[i] < amount}
    keys = [
        (
            i in short,
            placed != 0 and not placed >> i & 1,
            i in pinned,
            i in unsuiting,
            i in unpaired,
            former != 0 and not machine.usable_cpus_by_node[i].bits & former,
            i in beside_devices,
            measure,
            i,
        )
        for i, measure in zip(ids, strategy_keys(asked, ids, settings.strategy), strict=True)
    ]
    keys.sort()
    return {key[-1]: place for place, key in enumerate(keys)}


ResourceAmounts = tuple[int, AmountsByNode, AmountsByNode]
"""How much is needed, what is left and what there is, by NUMA node."""


def _amounts_by_resource(case: PlacementRequest, table: FreeResources) -> list[ResourceAmounts]:
    """Everything that is wanted for: CPUs, memory, huge pages."""
    machine, demand = case.machine, case.demand
    if demand.exclusive_cpus:
        wanted: list[ResourceAmounts] = [
            (demand.exclusive_cpus, table.free_exclusive_by_node, machine.usable_cpu_count_by_node)
        ]
    else:
        wanted = [(demand.cpu_milli, table.free_cpu_milli, machine.shared_capacity_milli)]
    near = machine.memory_only_nodes.attached
    if demand.memory_bytes and table.free_memory:
        left, there = (
            sum_by_cpu_node(near, table.free_memory),
            sum_by_cpu_node(near, machine.memory_capacity),
        )
        wanted.append((demand.memory_bytes, left, there))
    for size, left in sorted(table.free_hugepages.items()):
        there = sum_by_cpu_node(near, machine.hugepages_capacity(size))
        wanted.append((demand.hugepages[size], sum_by_cpu_node(near, left), there))
    return wanted


def strategy_keys(
    wanted: list[ResourceAmounts], ids: Collection[int], strategy: Strategy
) -> list[tuple[int, ...]]:
    """By NUMA node, what its place among others is worked out from; the least is tried first."""
    if strategy is Strategy.MOST_MEMORY:
        by = wanted[1:2] + wanted[:1]
        return [tuple([-left[i] for _, left, _ in by]) for i in ids]
    # The shares of each resource that would be in use, largest first.
    columns = [
        [
            (there[i] - left[i] + need) * USED_FRACTION_SCALE // there[i]
            if there[i] > 0
            else USED_FRACTION_SCALE
            for i in ids
        ]
        for need, left, there in wanted
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
    known, index = (
        classify_sibling_loads(case.requested.load, loads_by_cpu(case.state)),
        case.machine.allocator_index,
    )
    return index.threads_of(
        index.cores_touched(known.opposite) & ~index.cores_touched(known.same_hours)
    )


def check_pod_affinity(
    case: PlacementRequest, table: FreeResources, record: PodRecord
) -> Rejection | None:
    """Check that a further container may go where its pod was placed (scope ``pod``).

    What the first container left may be gone by now, and the runtime may not have told the pod's
    sum. Memory and CPUs of its own are checked where they are taken. Policies that are not strict
    always let it.
    """
    machine, demand, policy = case.machine, case.demand, case.policy
    affinity = record.affinity or NO_NUMA_NODES
    here = numa_text(affinity)
    near_list = None if table.listed_mems is None else cpu_nodes_near(machine, table.listed_mems)
    wrong = few = ""
    if policy is Policy.SINGLE_NUMA_NODE and len(affinity) > 1:
        wrong = "which is not one NUMA node"
    elif policy is Policy.RESTRICTED and not record.affinity_is_preferred:
        wrong = "which is wider than an empty machine would need"
    elif policy in STRICT_POLICIES and not _is_nested_with_listed_nodes(near_list, affinity):
        wrong = f"which is not where numamem {table.listed_mems} is"
    elif (
        policy is Policy.RESTRICTED
        and case.uses_kubelet_rules
        and demand.exclusive_cpus
        and not _is_preferred_affinity(case, table, affinity)
    ):
        # Its first container had a fraction, so these CPUs were not known then.
        wrong = "more NUMA nodes than its CPUs need on an empty machine"
    elif policy is Policy.RESTRICTED and case.uses_kubelet_rules and demand.exclusive_cpus:
        # They may come from all of its sockets, and would have had to fit there beforehand.
        has = union_cpus(case.state.allocations[i].cpus for i in record.containers)
        back = len(has & machine.topology.cpus_of(affinity)) - len(has)
        have = back + sum(table.free_exclusive_by_node.get(i, 0) for i in affinity)
        if have < demand.exclusive_cpus:
            need = exclusive_cpu_count_text(demand.exclusive_cpus)
            few = shortage_clause("cpu", need, f"{max(0, have)} free for exclusive use on {here}")
    elif policy in STRICT_POLICIES and not demand.exclusive_cpus and not case.uses_kubelet_rules:
        have = sum(table.free_cpu_milli.get(i, 0) for i in affinity)
        if have < demand.cpu_milli:
            few = shortage_clause(
                "cpu", human_milli(demand.cpu_milli), f"{human_milli(have)} free on {here}"
            )
    if wrong or few:
        first = few or f"policy {policy}: its pod was placed on {here}, {wrong}"
        return Rejection(
            reason="TopologyAffinityError",
            message=f"{case.message_subject}: {first}; it needs "
            f"{needed_text(case)} where its pod was placed (policy {policy}, scope pod); "
            f"free: {free_resources_text(case, table)}",
            rule=f"policy {policy} keeps every container of the pod where the pod was placed",
            allows_best_effort=True,
        )
    return None


def _is_nested_with_listed_nodes(near_list: NUMASet | None, affinity: NUMASet) -> bool:
    return near_list is None or affinity <= near_list or near_list <= affinity


def _is_preferred_affinity(case: PlacementRequest, table: FreeResources, affinity: NUMASet) -> bool:
    """Whether the kubelet's CPU Manager would prefer these NUMA nodes for the pod's whole CPUs."""
    whole = replace(case, demand=pod_demand(case.pod, case.demand))
    cpus = cpu_hints(whole, table)
    return compute_hints(cpus, case.machine.alignable_nodes, SearchBudget())[0].prefers_width(
        affinity.bits
    )


def memory_rejection(
    case: PlacementRequest, table: FreeResources, mems: NUMASet, alignment: Alignment | None
) -> Rejection:
    """Say which memory is short on the memory nodes ``mems``."""
    lacking = memory_shortage_text(case.demand, table, mems, f"on {numa_text(mems)}")
    return Rejection(
        reason="NotEnoughMemory",
        message=f"{case.message_subject}: {lacking} (policy {case.policy}); "
        f"free: {free_resources_text(case, table)}{unused_memory_nodes_text(case, table)}",
        rule=f"policy {case.policy} lets no memory spill to other NUMA nodes",
        allows_best_effort=True,
        alignment=alignment,
    )


def choose_memory(
    case: PlacementRequest, table: FreeResources, numa_nodes: NUMASet
) -> tuple[NUMASet, bool, tuple[str, ...]] | None:
    """Choose memory nodes for CPUs on some NUMA nodes; whether others than usual, and why.

    Their own memory, or the nearest where they have none; if that is too little, NUMA nodes without
    CPUs that serve them; then, unless the policy is strict, any other that may be used. Where even
    those do not hold it, a pin would bring the OOM killer sooner than none. None when a strict
    policy finds too little.
    """
    machine, demand = case.machine, case.demand
    topology, usable = machine.topology, machine.memory_nodes
    serving = machine.memory_only_nodes.attached_to(numa_nodes)
    mems = numa_nodes & usable
    if not mems:
        mems = memory_nodes_for(topology, numa_nodes, serving or usable)
    needs: list[tuple[int, AmountsByNode]] = []
    if demand.memory_bytes:
        needs.append((demand.memory_bytes, table.free_memory))
    needs += [(n, table.free_hugepages[size]) for size, n in demand.hugepages.items() if n]
    near = widen_for_memory(mems, needs, topology.distance, serving)
    if near is not None:
        return near, False, _memory_only_note(machine, near, numa_nodes)
    if case.policy in STRICT_POLICIES:
        return None
    wider = widen_for_memory(mems, needs, topology.distance, usable)
    if wider is not None:
        return wider, True, (f"memory widened from {numa_text(mems)} to {wider} so that it fits",)
    outside = machine.memory_only_nodes.excluded
    lacking = memory_shortage_text(demand, table, usable, "on all NUMA nodes that may be used")
    if not outside:
        # Nothing holds it: a pin would only bring the OOM killer sooner.
        return usable, True, (f"{lacking}: its memory may come from all of them",)
    amount = sum(topology.numa_nodes[i].memory_bytes for i in outside)
    step = (
        f"its memory is not pinned: {lacking}, and {tier_text(topology, outside)} with "
        f"{human_bytes(amount)} {inflect_for_ids(outside, 'is', 'are')} not allowed "
        "(memoryOnlyNodes, "
        "memoryTiers)"
    )
    return NO_NUMA_NODES, True, (step,)


def _memory_only_note(machine: NodeModel, mems: NUMASet, numa_nodes: NUMASet) -> tuple[str, ...]:
    """Say it when memory comes from NUMA nodes without CPUs."""
    near = machine.memory_only_nodes.attached
    alone = mems & NUMASet(near) if near else NO_NUMA_NODES
    if not alone:
        return ()
    serve = f"{tier_text(machine.topology, alone)} {inflect_for_ids(alone, 'serves', 'serve')}"
    return (f"{serve} {numa_text(numa_nodes)}",)


def memory_nodes_for(topology: Topology, numa_nodes: NUMASet, usable: NUMASet) -> NUMASet:
    """Memory nodes for CPUs on ``numa_nodes``: their own, or the nearest when they have none."""
    own = numa_nodes & usable
    if own or not usable:
        return own
    # Distance, then id: of equally near NUMA nodes the lowest.
    nearest = min(
        usable, key=lambda m: (min((topology.distance(i, m) for i in numa_nodes), default=0), m)
    )
    return NUMASet([nearest])


def place_computed(case: PlacementRequest) -> Placement | Rejection:
    """Choose NUMA nodes, CPUs and memory nodes for one container."""
    machine, whole = case.machine, case
    if case.requested.scope is Scope.POD:
        record = case.pod_record
        if record is None or record.affinity is None:
            together = pod_demand(case.pod, case.demand, fractions=not case.uses_kubelet_rules)
            whole = replace(case, demand=together)
    table = free_resources(whole)
    if table.listed_mems is not None:
        refused = check_numamem(case)
        if refused is not None:
            return refused
    if case.policy is not Policy.NONE:
        found = _place_aligned(whole, table, case.demand.exclusive_cpus)
        if isinstance(found, Rejection):
            return found
    elif table.listed_mems is not None:
        affinity = cpu_nodes_near(machine, table.listed_mems)
        step = f"no policy: CPUs near the memory that numamem lists, {numa_text(affinity)}"
        found = replace(case.initial_placement, affinity=affinity, decision_steps=(step,))
    else:
        found = replace(
            case.initial_placement, decision_steps=("no policy: any NUMA node will do",)
        )
    if case.demand.exclusive_cpus:
        return _place_exclusive(case, table, found)
    if case.uses_kubelet_rules:
        # As under the kubelet: all shared CPUs, and no CPU time allocated anywhere.
        return _build_placement(case, table, found)
    numa_nodes = found.affinity if found.affinity is not None else machine.alignable_nodes
    if not machine.topology.cpu_bits_of(numa_nodes.bits) & machine.topology.allowed.bits:
        numa_nodes = machine.topology.cpu_nodes
    numa_nodes = numa_nodes & machine.topology.cpu_nodes
    if not numa_nodes:
        why = "no NUMA node of this machine has CPUs"
        reason = f"not pinned: {why}"
        return replace(case.initial_placement, aligned=False, reason=reason, decision_steps=(why,))
    return _build_placement(
        case, table, replace(found, kind=ContainerKind.SHARED, numa_nodes=numa_nodes)
    )


def _place_aligned(case: PlacementRequest, table: FreeResources, own: int) -> Placement | Rejection:
    """Ask the policy for NUMA nodes, once for each pod under scope ``pod``.

    The demand of ``case`` is the pod's then, of which ``own`` exclusive CPUs are the container's.
    """
    machine, demand, policy = case.machine, case.demand, case.policy
    record = case.pod_record if case.requested.scope is Scope.POD else None
    if record is not None and record.affinity is not None:
        refused = check_pod_affinity(case, table, record)
        if refused is not None:
            return refused
        step = f"scope pod: the pod was placed on {numa_text(record.affinity)}"
        return replace(
            case.initial_placement,
            affinity=record.affinity,
            aligned=record.affinity_is_preferred,
            decision_steps=(step,),
        )
    asked = resource_demands(case, table)
    ranks = rank_numa_nodes(case, table)
    if table.listed_mems is not None:
        ranks = rank_nodes_by_distance(machine, table.listed_mems, ranks)
        asked = restrict_cpu_demand_to_nodes(
            asked, cpu_nodes_near(machine, table.listed_mems), policy
        )
    alignment = align_demands(
        AlignmentRequest(
            demands=tuple(asked),
            numa_ids=machine.alignable_nodes,
            policy=policy,
            distance=machine.topology.distance,
            prefer_closest=machine.settings.prefer_closest,
            rank=ranks,
            one_width=not machine.settings.kubelet_memory,
        )
    )
    if not alignment.admitted:
        if demand.exclusive_cpus > own and case.uses_kubelet_rules:
            # The rest of the pod's sum may be fractions, which need no CPUs of their own.
            rest = replace(case, demand=replace(demand, exclusive_cpus=own))
            alone = _place_aligned(rest, table, own)
            if not isinstance(alone, Rejection):
                return alone
        return Rejection(
            reason="TopologyAffinityError",
            message=affinity_message(case, table, alignment)
            + memory_groups_text(table.kubelet_memory)
            + _missing_cpu_holders(case),
            rule=f"policy {policy} admits no wider set than an empty machine would need"
            if policy is Policy.RESTRICTED
            else f"policy {policy} admits one NUMA node only",
            allows_best_effort=True,
            alignment=alignment,
        )
    where = "any NUMA node" if alignment.affinity is None else numa_text(alignment.affinity)
    ideal = "" if alignment.preferred else ", wider than ideal"
    step = f"policy {policy} chose {where}{ideal}"
    steps: tuple[str, ...] = (step,)
    its = case.container
    if its.devices or its.pod_devices or its.device_notes:
        steps = (step, *device_step_sentences(case, alignment.affinity))
    found = alignment.affinity
    warnings: tuple[str, ...] = ()
    if case.requested.scheduled_nodes.bits:
        held = f"the scheduler held {numa_text(case.requested.scheduled_nodes)}"
        if found is not None and found == case.requested.scheduled_nodes:
            steps += (f"{held}: taken",)
        elif found is not None:
            # It chose by what was published then; here is what is true now.
            warnings = (f"{held}, which no longer suits best: placed on {where} instead",)
    return replace(
        case.initial_placement,
        affinity=found,
        aligned=alignment.preferred,
        alignment=alignment,
        decision_steps=(*steps, *warnings),
        warnings=warnings,
    )


def _missing_cpu_holders(case: PlacementRequest) -> str:
    """Who has the CPUs that are missing, unless no empty NUMA node would have enough of them."""
    most = max(case.machine.exclusive_capacity.values(), default=0)
    if not case.demand.exclusive_cpus:
        return ""
    if case.policy is Policy.SINGLE_NUMA_NODE and case.demand.exclusive_cpus > most:
        return ""
    return _obstacles_text(case)


def _obstacles_text(case: PlacementRequest) -> str:
    count = case.demand.exclusive_cpus
    floor = pool_floor_text(case.desired, case.effective_smt, count)
    return floor + exclusive_holders_text(case.state, requests=True)


def _place_exclusive(
    case: PlacementRequest, table: FreeResources, found: Placement
) -> Placement | Rejection:
    machine, affinity = case.machine, found.affinity
    settings = machine.settings
    if case.policy is Policy.SINGLE_NUMA_NODE and settings.align_by_socket:
        # A socket may be several NUMA nodes. The kubelet refuses to start with both.
        settings = replace(settings, align_by_socket=False)
    former = table.previous_cpus
    if affinity is not None:
        former = former & machine.topology.cpus_of(_take_region(settings, machine, affinity))
    free, first, strict = table.free_cpus, affinity, case.policy in STRICT_POLICIES
    if table.listed_mems is not None and affinity is not None:
        # Near the listed memory first, then in the rest of the affinity.
        first = affinity & cpu_nodes_near(machine, table.listed_mems) or affinity
        if strict:
            free = free & machine.topology.cpus_of(affinity)
            strict = first == affinity
    elif (
        affinity is not None
        and len(affinity) > 1
        and not settings.kubelet_ties
        and not settings.distribute_across_numa
    ):
        first = device_nodes_first(
            case, affinity, table.free_exclusive_by_node, case.demand.exclusive_cpus
        )
        if strict and first != affinity:
            free, strict = free & machine.topology.cpus_of(affinity), False
    taken = take_avoiding_contended(
        case,
        TakeRequest(
            count=case.demand.exclusive_cpus,
            free_cpus=free,
            prefer=former,
            current_cpus=case.current_cpus,
            affinity=first,
            strict=strict,
            smt=case.effective_smt,
            load=case.requested.load,
            settings=settings,
        ),
        table.free_exclusive_by_node,
    )
    if not isinstance(taken, ChosenCPUs):
        return _take_rejection(taken, case, table, found)
    what = f"{case.message_subject}: cpu: {exclusive_cpu_count_text(case.demand.exclusive_cpus)}"
    refused = check_exclusive_limits(case, what, taken.cpus, taken.idle)
    if refused is not None:
        return replace(refused, alignment=found.alignment)
    steps = [*found.decision_steps, *taken.notes]
    back = former & taken.cpus
    if back:
        steps.append(f"{cpus_text(back)} {inflect_for_ids(back, 'was', 'were')} the pod's before")
    numa_nodes = machine.topology.numa_of(taken.cpus)
    preferred = found.aligned and (
        affinity is None or numa_nodes <= _take_region(settings, machine, affinity)
    )
    return _build_placement(
        case,
        table,
        replace(
            found,
            kind=ContainerKind.EXCLUSIVE,
            exclusive=True,
            numa_nodes=numa_nodes,
            cpus=taken.cpus,
            idle_siblings=taken.idle,
            aligned=preferred,
            decision_steps=tuple(steps),
        ),
    )


def _take_region(settings: Settings, machine: NodeModel, affinity: NUMASet) -> NUMASet:
    """Where CPUs are taken for an affinity: with ``alignBySocket`` from all of its sockets."""
    reach = affinity
    if settings.align_by_socket:
        for socket in machine.topology.sockets.values():
            if socket.numa_nodes & affinity:
                reach = reach | socket.numa_nodes
    return reach


def _take_rejection(
    failed: NotEnoughCPUs | SMTMisaligned,
    case: PlacementRequest,
    table: FreeResources,
    found: Placement,
) -> Rejection:
    left, holders = free_resources_text(case, table), _obstacles_text(case)
    if isinstance(failed, SMTMisaligned):
        return Rejection(
            reason="SMTAlignmentError",
            message=(
                f"{case.message_subject}: "
                f"{smt_misaligned_text(case, failed, case.effective_smt)}; free: {left}{holders}"
            ),
            rule="smt: full-core gives whole cores only",
            alignment=found.alignment,
        )
    within = found.affinity if case.policy in STRICT_POLICIES else None
    return Rejection(
        reason="NotEnoughCPUs",
        message=f"{case.message_subject}: "
        f"{cpu_shortage_text(case.machine, failed, within)}{exclusive_mode_text(case)}; "
        f"free: {left}{holders}",
        rule="exclusive CPUs must be free",
        allows_best_effort=found.affinity is not None,
        alignment=found.alignment,
    )


def _build_placement(
    case: PlacementRequest, table: FreeResources, found: Placement
) -> Placement | Rejection:
    """Choose memory nodes, allocate everything, and say it."""
    machine, demand, policy = case.machine, case.demand, case.policy
    affinity, preferred, alignment = found.affinity, found.aligned, found.alignment
    kind, numa_nodes, steps = found.kind, found.numa_nodes, [*found.decision_steps]
    # Neither CPUs nor memory to speak of: nothing to pin.
    loose = kind is ContainerKind.UNPINNED and not bytes_by_type(demand)
    mems = NO_NUMA_NODES
    warnings = found.warnings
    memory = demand.memory_requested
    if table.listed_mems is not None:
        mems = table.listed_mems
        doubts = unattached_memory_warnings(machine, mems)
        warnings += doubts
        steps.append(f"memory as listed: numamem {mems}")
        steps += doubts
        preferred = preferred and numa_nodes <= cpu_nodes_near(machine, mems)
    elif table.kubelet_memory is not None:
        if case.pod.qos is QoSClass.GUARANTEED and bytes_by_type(demand):
            # Without a policy there was no hint, which is not a preferred one.
            hinted = preferred and policy is not Policy.NONE
            granted = kubelet_memory_grant(
                table.kubelet_memory, bytes_by_type(demand), affinity, hinted
            )
            if isinstance(granted, str):
                return Rejection(
                    reason="NotEnoughMemory",
                    message=f"{case.message_subject}: "
                    f"{kubelet_memory_shortage_text(table.kubelet_memory, demand, affinity)} "
                    f"(kubeletMemory); {granted}; it needs {needed_text(case)}; "
                    f"free: {free_resources_text(case, table)}",
                    rule="the kubelet's memory rules: kubeletMemory is set",
                    allows_best_effort=True,
                    alignment=alignment,
                )
            mems, memory = granted, demand.memory_bytes
            if policy in STRICT_POLICIES and affinity is not None and not mems <= affinity:
                return memory_rejection(case, table, affinity, alignment)
            if affinity is not None and not mems <= affinity:
                steps.append(f"memory extended from {numa_text(affinity)} to {mems}")
                preferred = False
    elif case.requested.bind is Bind.CPU_MEM and not loose:
        base = numa_nodes if affinity is None else affinity | numa_nodes
        chosen = choose_memory(case, table, base)
        if chosen is None:
            return memory_rejection(case, table, base, alignment)
        mems, widened, said = chosen
        preferred = preferred and not widened
        steps += said
    charges = charge_nodes(
        numa_nodes, _charged_milli_by_node(case, table, found), mems,
        memory, table.free_memory, demand.hugepages, table.free_hugepages,
    )  # fmt: skip
    if kind is ContainerKind.SHARED:
        shares = shared_group_cpus(numa_nodes.bits, table.pool, machine.topology, 0)
        doubts = isolated_list_warnings(machine, shares)
        warnings += doubts
        steps += doubts
    what = (
        exclusive_cpu_count_text(len(found.cpus))
        if kind is ContainerKind.EXCLUSIVE
        else "shared CPUs"
    )
    where = f" on {numa_text(numa_nodes)}"
    if kind is ContainerKind.UNPINNED:
        what, where = "not pinned to CPUs (kubeletCPUs)", f", memory of {numa_text(mems)}"
        where = where if mems else ""
    ideal = "" if preferred else ", wider than ideal"
    return replace(
        found,
        mems=mems,
        charges=charges,
        policy=policy,
        aligned=preferred,
        reason=f"{what}{where}{ideal}",
        decision_steps=tuple(steps),
        warnings=warnings,
        pod_affinity=_pod_affinity(machine, affinity)
        if case.requested.scope is Scope.POD and policy is not Policy.NONE
        else None,
    )


def _pod_affinity(machine: NodeModel, affinity: NUMASet | None) -> NUMASet | None:
    """The place of a whole pod; on a machine with one NUMA node no affinity means that one."""
    only = machine.alignable_nodes if len(machine.alignable_nodes) == 1 else None
    return only if affinity is None else affinity


def _charged_milli_by_node(
    case: PlacementRequest, table: FreeResources, chosen: Placement
) -> dict[int, int]:
    """Thousandths of a CPU to allocate on each NUMA node."""
    if chosen.cpus:
        return {
            i: 1000 * n for i, n in case.machine.topology.cpu_count_by_node(chosen.cpus).items()
        }
    milli = min(case.demand.cpu_milli, case.demand.cpu_requested_milli)
    return split_cpu_milli(milli, chosen.numa_nodes, table.free_cpu_milli)
