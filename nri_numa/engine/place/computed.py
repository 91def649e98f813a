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
    floor_text,
    grant_refused,
    loads_of,
    share_out,
    take_beside_others,
)
from nri_numa.engine.align.hints import Amounts, Steps, hints_of, together
from nri_numa.engine.align.policies import Alignment, Problem, align, short
from nri_numa.engine.cpus.allocator import (
    ChosenCPUs,
    NotEnoughCPUs,
    SMTAlignmentRefused,
    TakeRequest,
    partners,
)
from nri_numa.engine.decision import Case, Machine, Placed, tier_text
from nri_numa.engine.others import given_last, holders_text, listed_softly
from nri_numa.engine.place.explicit import all_isolated, check_numamem, doubtful
from nri_numa.engine.place.memory import (
    by_distance,
    kubelet_grant,
    near,
    near_cpus,
    needs_of,
    spread_charges,
    tied_text,
    widen_for_memory,
)
from nri_numa.engine.place.needs import (
    ResourceTable,
    affinity_message,
    cpu_hints,
    demands,
    device_steps,
    devices_first,
    exclusive_text,
    left_text,
    memory_lacking,
    memory_short,
    misaligned,
    mode_text,
    needed_text,
    not_let_in,
    pod_demand,
    resource_table,
    too_few,
)
from nri_numa.engine.state import STRICT, Kind, PodRecord, group_cpus, union
from nri_numa.model.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.model.machine import Topology, agree, cpus_text, human_milli, numa_text
from nri_numa.model.settings import Settings
from nri_numa.model.workload import (
    SMT,
    Bind,
    Policy,
    QoSClass,
    Refusal,
    Scope,
    Strategy,
)
from nri_numa.text import human_bytes

WHOLE = 1 << 40
"""What a NUMA node has, when shares of it are compared; a larger number rounds less."""


def rank(case: Case, table: ResourceTable) -> dict[int, int] | None:
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
    asked = _wanted(case, table)
    need, ids, free = case.demand.exclusive_cpus, machine.places, table.free.bits

    def few(cpus: int) -> Collection[int]:
        """NUMA nodes with too few of some CPUs."""
        return [i for i in ids if (machine.node_cpus[i].bits & cpus).bit_count() < need]

    pinned: Collection[int] = ()
    unsuiting: Collection[int] = ()
    unpaired: Collection[int] = ()
    if need:
        last = given_last(case.state, machine.topology, settings)
        last = last | listed_softly(case.state, machine.topology)
        pinned = few(free & ~last.bits) if last else ()
        good = machine.index.suiting_isolation(settings) & free
        unsuiting = few(good) if good != free else ()
        if case.smt is SMT.PAIR:
            unpaired = few(_beside_opposite(case) & free)
    placed = case.requested.placed.bits
    former = table.former.bits
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
            former != 0 and not machine.node_cpus[i].bits & former,
            i in beside_devices,
            measure,
            i,
        )
        for i, measure in zip(ids, measures(asked, ids, settings.strategy), strict=True)
    ]
    keys.sort()
    return {key[-1]: place for place, key in enumerate(keys)}


Asked = tuple[int, Amounts, Amounts]
"""How much is needed, what is left and what there is, by NUMA node."""


def _wanted(case: Case, table: ResourceTable) -> list[Asked]:
    """Everything that is wanted for: CPUs, memory, huge pages."""
    machine, demand = case.machine, case.demand
    if demand.exclusive_cpus:
        wanted: list[Asked] = [(demand.exclusive_cpus, table.free_by_node, machine.cpu_counts)]
    else:
        wanted = [(demand.cpu_milli, table.cpu_left, machine.shared_total)]
    near = machine.tiers.near
    if demand.memory_bytes and table.memory_left:
        left, there = together(near, table.memory_left), together(near, machine.memory_capacity)
        wanted.append((demand.memory_bytes, left, there))
    for size, left in sorted(table.hugepages_left.items()):
        there = together(near, machine.hugepages_capacity(size))
        wanted.append((demand.hugepages[size], together(near, left), there))
    return wanted


def measures(
    wanted: list[Asked], ids: Collection[int], strategy: Strategy
) -> list[tuple[int, ...]]:
    """By NUMA node, what its place among others is worked out from; the least is tried first."""
    if strategy is Strategy.MOST_LEFT:
        by = wanted[1:2] + wanted[:1]
        return [tuple([-left[i] for _, left, _ in by]) for i in ids]
    # The shares of each resource that would be in use, largest first.
    columns = [
        [(there[i] - left[i] + need) * WHOLE // there[i] if there[i] > 0 else WHOLE for i in ids]
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


def _beside_opposite(case: Case) -> int:
    """CPUs of cores that run opposite loads only; for ``smt: pair``."""
    known, index = partners(case.requested.load, loads_of(case.state)), case.machine.index
    return index.members(index.touched(known.opposite) & ~index.touched(known.same))


def beside_its_pod(case: Case, table: ResourceTable, record: PodRecord) -> Refusal | None:
    """Check that a further container may go where its pod was placed (scope ``pod``).

    What the first container left may be gone by now, and the runtime may not have told the pod's
    sum. Memory and CPUs of its own are checked where they are taken. Policies that are not strict
    always let it.
    """
    machine, demand, policy = case.machine, case.demand, case.policy
    affinity = record.affinity or NO_NUMA_NODES
    here = numa_text(affinity)
    near_list = None if table.listed is None else near(machine, table.listed)
    wrong = few = ""
    if policy is Policy.SINGLE_NUMA_NODE and len(affinity) > 1:
        wrong = "which is not one NUMA node"
    elif policy is Policy.RESTRICTED and not record.affinity_preferred:
        wrong = "which is wider than an empty machine would need"
    elif policy in STRICT and not _beside(near_list, affinity):
        wrong = f"which is not where numamem {table.listed} is"
    elif (
        policy is Policy.RESTRICTED
        and case.by_kubelet
        and demand.exclusive_cpus
        and not _ideal(case, table, affinity)
    ):
        # Its first container had a fraction, so these CPUs were not known then.
        wrong = "more NUMA nodes than its CPUs need on an empty machine"
    elif policy is Policy.RESTRICTED and case.by_kubelet and demand.exclusive_cpus:
        # They may come from all of its sockets, and would have had to fit there beforehand.
        has = union(case.state.allocations[i].cpus for i in record.containers)
        back = len(has & machine.topology.cpus_of(affinity)) - len(has)
        have = back + sum(table.free_by_node.get(i, 0) for i in affinity)
        if have < demand.exclusive_cpus:
            need = exclusive_text(demand.exclusive_cpus)
            few = short("cpu", need, f"{max(0, have)} free for exclusive use on {here}")
    elif policy in STRICT and not demand.exclusive_cpus and not case.by_kubelet:
        have = sum(table.cpu_left.get(i, 0) for i in affinity)
        if have < demand.cpu_milli:
            few = short("cpu", human_milli(demand.cpu_milli), f"{human_milli(have)} free on {here}")
    if wrong or few:
        first = few or f"policy {policy}: its pod was placed on {here}, {wrong}"
        return Refusal(
            reason="TopologyAffinityError",
            message=f"{case.who}: {first}; it needs "
            f"{needed_text(case)} where its pod was placed (policy {policy}, scope pod); "
            f"free: {left_text(case, table)}",
            rule=f"policy {policy} keeps every container of the pod where the pod was placed",
            widenable=True,
        )
    return None


def _beside(near_list: NUMASet | None, affinity: NUMASet) -> bool:
    return near_list is None or affinity <= near_list or near_list <= affinity


def _ideal(case: Case, table: ResourceTable, affinity: NUMASet) -> bool:
    """Whether the kubelet's CPU Manager would prefer these NUMA nodes for the pod's whole CPUs."""
    whole = replace(case, demand=pod_demand(case.pod, case.demand))
    cpus = cpu_hints(whole, table)
    return hints_of(cpus, case.machine.places, Steps())[0].prefers_width(affinity.bits)


def no_memory(
    case: Case, table: ResourceTable, mems: NUMASet, alignment: Alignment | None
) -> Refusal:
    """Say which memory is short on the memory nodes ``mems``."""
    lacking = memory_lacking(case.demand, table, mems, f"on {numa_text(mems)}")
    return Refusal(
        reason="NotEnoughMemory",
        message=f"{case.who}: {lacking} (policy {case.policy}); "
        f"free: {left_text(case, table)}{not_let_in(case, table)}",
        rule=f"policy {case.policy} lets no memory spill to other NUMA nodes",
        widenable=True,
        alignment=alignment,
    )


def choose_memory(
    case: Case, table: ResourceTable, numa_nodes: NUMASet
) -> tuple[NUMASet, bool, tuple[str, ...]] | None:
    """Choose memory nodes for CPUs on some NUMA nodes; whether others than usual, and why.

    Their own memory, or the nearest where they have none; if that is too little, NUMA nodes without
    CPUs that serve them; then, unless the policy is strict, any other that may be used. Where even
    those do not hold it, a pin would bring the OOM killer sooner than none. None when a strict
    policy finds too little.
    """
    machine, demand = case.machine, case.demand
    topology, usable = machine.topology, machine.memory_nodes
    serving = machine.tiers.serving(numa_nodes)
    mems = numa_nodes & usable
    if not mems:
        mems = memory_nodes_for(topology, numa_nodes, serving or usable)
    needs: list[tuple[int, Amounts]] = []
    if demand.memory_bytes:
        needs.append((demand.memory_bytes, table.memory_left))
    needs += [(n, table.hugepages_left[size]) for size, n in demand.hugepages.items() if n]
    near = widen_for_memory(mems, needs, topology.distance, serving)
    if near is not None:
        return near, False, _served(machine, near, numa_nodes)
    if case.policy in STRICT:
        return None
    wider = widen_for_memory(mems, needs, topology.distance, usable)
    if wider is not None:
        return wider, True, (f"memory widened from {numa_text(mems)} to {wider} so that it fits",)
    outside = machine.tiers.outside
    lacking = memory_lacking(demand, table, usable, "on all NUMA nodes that may be used")
    if not outside:
        # Nothing holds it: a pin would only bring the OOM killer sooner.
        return usable, True, (f"{lacking}: its memory may come from all of them",)
    amount = sum(topology.numa_nodes[i].memory_bytes for i in outside)
    step = (
        f"its memory is not pinned: {lacking}, and {tier_text(topology, outside)} with "
        f"{human_bytes(amount)} {agree(outside, 'is', 'are')} not allowed (memoryOnlyNodes, "
        "memoryTiers)"
    )
    return NO_NUMA_NODES, True, (step,)


def _served(machine: Machine, mems: NUMASet, numa_nodes: NUMASet) -> tuple[str, ...]:
    """Say it when memory comes from NUMA nodes without CPUs."""
    near = machine.tiers.near
    alone = mems & NUMASet(near) if near else NO_NUMA_NODES
    if not alone:
        return ()
    serve = f"{tier_text(machine.topology, alone)} {agree(alone, 'serves', 'serve')}"
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


def place_computed(case: Case) -> Placed | Refusal:
    """Choose NUMA nodes, CPUs and memory nodes for one container."""
    machine, whole = case.machine, case
    if case.requested.scope is Scope.POD:
        record = case.record
        if record is None or record.affinity is None:
            together = pod_demand(case.pod, case.demand, fractions=not case.by_kubelet)
            whole = replace(case, demand=together)
    table = resource_table(whole)
    if table.listed is not None:
        refused = check_numamem(case)
        if refused is not None:
            return refused
    if case.policy is not Policy.NONE:
        found = _aligned(whole, table, case.demand.exclusive_cpus)
        if isinstance(found, Refusal):
            return found
    elif table.listed is not None:
        affinity = near(machine, table.listed)
        step = f"no policy: CPUs near the memory that numamem lists, {numa_text(affinity)}"
        found = replace(case.unplaced, affinity=affinity, steps=(step,))
    else:
        found = replace(case.unplaced, steps=("no policy: any NUMA node will do",))
    if case.demand.exclusive_cpus:
        return _exclusive(case, table, found)
    if case.by_kubelet:
        # As under the kubelet: all shared CPUs, and no CPU time allocated anywhere.
        return _finish(case, table, found)
    numa_nodes = found.affinity if found.affinity is not None else machine.places
    if not machine.topology.bits_of(numa_nodes.bits) & machine.topology.allowed.bits:
        numa_nodes = machine.topology.cpu_nodes
    numa_nodes = numa_nodes & machine.topology.cpu_nodes
    if not numa_nodes:
        why = "no NUMA node of this machine has CPUs"
        reason = f"not pinned: {why}"
        return replace(case.unplaced, preferred=False, reason=reason, steps=(why,))
    return _finish(case, table, replace(found, kind=Kind.SHARED, numa_nodes=numa_nodes))


def _aligned(case: Case, table: ResourceTable, own: int) -> Placed | Refusal:
    """Ask the policy for NUMA nodes, once for each pod under scope ``pod``.

    The demand of ``case`` is the pod's then, of which ``own`` exclusive CPUs are the container's.
    """
    machine, demand, policy = case.machine, case.demand, case.policy
    record = case.record if case.requested.scope is Scope.POD else None
    if record is not None and record.affinity is not None:
        refused = beside_its_pod(case, table, record)
        if refused is not None:
            return refused
        step = f"scope pod: the pod was placed on {numa_text(record.affinity)}"
        return replace(
            case.unplaced,
            affinity=record.affinity,
            preferred=record.affinity_preferred,
            steps=(step,),
        )
    asked = demands(case, table)
    ranks = rank(case, table)
    if table.listed is not None:
        ranks = by_distance(machine, table.listed, ranks)
        asked = near_cpus(asked, near(machine, table.listed), policy)
    alignment = align(
        Problem(
            demands=tuple(asked),
            numa_ids=machine.places,
            policy=policy,
            distance=machine.topology.distance,
            prefer_closest=machine.settings.prefer_closest,
            rank=ranks,
            one_width=not machine.settings.kubelet_memory,
        )
    )
    if not alignment.admitted:
        if demand.exclusive_cpus > own and case.by_kubelet:
            # The rest of the pod's sum may be fractions, which need no CPUs of their own.
            rest = replace(case, demand=replace(demand, exclusive_cpus=own))
            alone = _aligned(rest, table, own)
            if not isinstance(alone, Refusal):
                return alone
        return Refusal(
            reason="TopologyAffinityError",
            message=affinity_message(case, table, alignment)
            + tied_text(table.kubelet)
            + _who_has_them(case),
            rule=f"policy {policy} admits no wider set than an empty machine would need"
            if policy is Policy.RESTRICTED
            else f"policy {policy} admits one NUMA node only",
            widenable=True,
            alignment=alignment,
        )
    where = "any NUMA node" if alignment.affinity is None else numa_text(alignment.affinity)
    ideal = "" if alignment.preferred else ", wider than ideal"
    step = f"policy {policy} chose {where}{ideal}"
    steps: tuple[str, ...] = (step,)
    its = case.container
    if its.devices or its.pod_devices or its.device_notes:
        steps = (step, *device_steps(case, alignment.affinity))
    found = alignment.affinity
    warnings: tuple[str, ...] = ()
    if case.requested.placed.bits:
        held = f"the scheduler held {numa_text(case.requested.placed)}"
        if found is not None and found == case.requested.placed:
            steps += (f"{held}: taken",)
        elif found is not None:
            # It chose by what was published then; here is what is true now.
            warnings = (f"{held}, which no longer suits best: placed on {where} instead",)
    return replace(
        case.unplaced,
        affinity=found,
        preferred=alignment.preferred,
        alignment=alignment,
        steps=(*steps, *warnings),
        warnings=warnings,
    )


def _who_has_them(case: Case) -> str:
    """Who has the CPUs that are missing, unless no empty NUMA node would have enough of them."""
    most = max(case.machine.whole_cpus.values(), default=0)
    if not case.demand.exclusive_cpus:
        return ""
    if case.policy is Policy.SINGLE_NUMA_NODE and case.demand.exclusive_cpus > most:
        return ""
    return _obstacles_text(case)


def _obstacles_text(case: Case) -> str:
    count = case.demand.exclusive_cpus
    floor = floor_text(case.machine, case.state, case.smt, count)
    return floor + holders_text(case.state, requests=True)


def _exclusive(case: Case, table: ResourceTable, found: Placed) -> Placed | Refusal:
    machine, affinity = case.machine, found.affinity
    settings = machine.settings
    if case.policy is Policy.SINGLE_NUMA_NODE and settings.align_by_socket:
        # A socket may be several NUMA nodes. The kubelet refuses to start with both.
        settings = replace(settings, align_by_socket=False)
    former = table.former
    if affinity is not None:
        former = former & machine.topology.cpus_of(_reach(settings, machine, affinity))
    free, first, strict = table.free, affinity, case.policy in STRICT
    if table.listed is not None and affinity is not None:
        # Near the listed memory first, then in the rest of the affinity.
        first = affinity & near(machine, table.listed) or affinity
        if strict:
            free = free & machine.topology.cpus_of(affinity)
            strict = first == affinity
    elif (
        affinity is not None
        and len(affinity) > 1
        and not settings.kubelet_ties
        and not settings.distribute_across_numa
    ):
        first = devices_first(case, affinity, table.free_by_node, case.demand.exclusive_cpus)
        if strict and first != affinity:
            free, strict = free & machine.topology.cpus_of(affinity), False
    taken = take_beside_others(
        case,
        TakeRequest(
            count=case.demand.exclusive_cpus,
            available=free,
            prefer=former,
            held=case.held,
            affinity=first,
            strict=strict,
            smt=case.smt,
            load=case.requested.load,
            settings=settings,
        ),
        table.free_by_node,
    )
    if not isinstance(taken, ChosenCPUs):
        return _take_failed(taken, case, table, found)
    what = f"{case.who}: cpu: {exclusive_text(case.demand.exclusive_cpus)}"
    refused = grant_refused(case, what, taken.cpus, taken.idle)
    if refused is not None:
        return replace(refused, alignment=found.alignment)
    steps = [*found.steps, *taken.notes]
    back = former & taken.cpus
    if back:
        steps.append(f"{cpus_text(back)} {agree(back, 'was', 'were')} the pod's before")
    numa_nodes = machine.topology.numa_of(taken.cpus)
    preferred = found.preferred and (
        affinity is None or numa_nodes <= _reach(settings, machine, affinity)
    )
    return _finish(
        case,
        table,
        replace(
            found,
            kind=Kind.EXCLUSIVE,
            owned=True,
            numa_nodes=numa_nodes,
            cpus=taken.cpus,
            idle=taken.idle,
            preferred=preferred,
            steps=tuple(steps),
        ),
    )


def _reach(settings: Settings, machine: Machine, affinity: NUMASet) -> NUMASet:
    """Where CPUs are taken for an affinity: with ``alignBySocket`` from all of its sockets."""
    reach = affinity
    if settings.align_by_socket:
        for socket in machine.topology.sockets.values():
            if socket.numa_nodes & affinity:
                reach = reach | socket.numa_nodes
    return reach


def _take_failed(
    failed: NotEnoughCPUs | SMTAlignmentRefused, case: Case, table: ResourceTable, found: Placed
) -> Refusal:
    left, holders = left_text(case, table), _obstacles_text(case)
    if isinstance(failed, SMTAlignmentRefused):
        return Refusal(
            reason="SMTAlignmentError",
            message=f"{case.who}: {misaligned(case, failed, case.smt)}; free: {left}{holders}",
            rule="smt: full-core gives whole cores only",
            alignment=found.alignment,
        )
    within = found.affinity if case.policy in STRICT else None
    return Refusal(
        reason="NotEnoughCPUs",
        message=f"{case.who}: {too_few(case.machine, failed, within)}{mode_text(case)}; "
        f"free: {left}{holders}",
        rule="exclusive CPUs must be free",
        widenable=found.affinity is not None,
        alignment=found.alignment,
    )


def _finish(case: Case, table: ResourceTable, found: Placed) -> Placed | Refusal:
    """Choose memory nodes, allocate everything, and say it."""
    machine, demand, policy = case.machine, case.demand, case.policy
    affinity, preferred, alignment = found.affinity, found.preferred, found.alignment
    kind, numa_nodes, steps = found.kind, found.numa_nodes, [*found.steps]
    # Neither CPUs nor memory to speak of: nothing to pin.
    loose = kind is Kind.UNBOUND and not needs_of(demand)
    mems = NO_NUMA_NODES
    warnings = found.warnings
    memory = demand.memory_paid
    if table.listed is not None:
        mems = table.listed
        doubts = doubtful(machine, mems)
        warnings += doubts
        steps.append(f"memory as listed: numamem {mems}")
        steps += doubts
        preferred = preferred and numa_nodes <= near(machine, mems)
    elif table.kubelet is not None:
        if case.pod.qos is QoSClass.GUARANTEED and needs_of(demand):
            # Without a policy there was no hint, which is not a preferred one.
            hinted = preferred and policy is not Policy.NONE
            granted = kubelet_grant(table.kubelet, needs_of(demand), affinity, hinted)
            if isinstance(granted, str):
                return Refusal(
                    reason="NotEnoughMemory",
                    message=f"{case.who}: {memory_short(table.kubelet, demand, affinity)} "
                    f"(kubeletMemory); {granted}; it needs {needed_text(case)}; "
                    f"free: {left_text(case, table)}",
                    rule="the kubelet's memory rules: kubeletMemory is set",
                    widenable=True,
                    alignment=alignment,
                )
            mems, memory = granted, demand.memory_bytes
            if policy in STRICT and affinity is not None and not mems <= affinity:
                return no_memory(case, table, affinity, alignment)
            if affinity is not None and not mems <= affinity:
                steps.append(f"memory extended from {numa_text(affinity)} to {mems}")
                preferred = False
    elif case.requested.bind is Bind.CPU_MEM and not loose:
        base = numa_nodes if affinity is None else affinity | numa_nodes
        chosen = choose_memory(case, table, base)
        if chosen is None:
            return no_memory(case, table, base, alignment)
        mems, widened, said = chosen
        preferred = preferred and not widened
        steps += said
    charges = spread_charges(
        numa_nodes, _milli(case, table, found), mems,
        memory, table.memory_left, demand.hugepages, table.hugepages_left,
    )  # fmt: skip
    if kind is Kind.SHARED:
        shares = group_cpus(numa_nodes.bits, table.pool, machine.topology, 0)
        doubts = all_isolated(machine, shares)
        warnings += doubts
        steps += doubts
    what = exclusive_text(len(found.cpus)) if kind is Kind.EXCLUSIVE else "shared CPUs"
    where = f" on {numa_text(numa_nodes)}"
    if kind is Kind.UNBOUND:
        what, where = "not pinned to CPUs (kubeletCPUs)", f", memory of {numa_text(mems)}"
        where = where if mems else ""
    ideal = "" if preferred else ", wider than ideal"
    return replace(
        found,
        mems=mems,
        charges=charges,
        policy=policy,
        preferred=preferred,
        reason=f"{what}{where}{ideal}",
        steps=tuple(steps),
        warnings=warnings,
        pod_affinity=_remembered(machine, affinity)
        if case.requested.scope is Scope.POD and policy is not Policy.NONE
        else None,
    )


def _remembered(machine: Machine, affinity: NUMASet | None) -> NUMASet | None:
    """The place of a whole pod; on a machine with one NUMA node no affinity means that one."""
    only = machine.places if len(machine.places) == 1 else None
    return only if affinity is None else affinity


def _milli(case: Case, table: ResourceTable, chosen: Placed) -> dict[int, int]:
    """Thousandths of a CPU to allocate on each NUMA node."""
    if chosen.cpus:
        return {i: 1000 * n for i, n in case.machine.topology.counts(chosen.cpus).items()}
    milli = min(case.demand.cpu_milli, case.demand.cpu_paid_milli)
    return share_out(milli, chosen.numa_nodes, table.cpu_left)
