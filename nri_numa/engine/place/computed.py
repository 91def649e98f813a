"""Computed assignments: resource demands → alignment → CPUs → memory nodes.

The sources of the rules: the kubelet's Topology, CPU and Memory Managers (KEP-693, KEP-3570,
KEP-1769), and the accounting

    cpu_allocatable(i) = total(i) × oversale × capacity_factor(i) − Σ requests bound to i
    mem_allocatable(i) = total(i) − Σ requests bound to i, at most what the kernel has free there

Among equally good NUMA nodes a strategy decides (`nri_numa.engine.place.strategy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nri_numa.engine.accounting import share_out, take_within
from nri_numa.engine.align.policies import Alignment, align
from nri_numa.engine.case import Case
from nri_numa.engine.cpus.allocator import (
    NotEnoughCPUs,
    SMTAlignmentRefused,
    Taken,
    TakeRequest,
)
from nri_numa.engine.decision import Machine
from nri_numa.engine.memory.grants import MemoryGrant, MemoryRefused
from nri_numa.engine.memory.memory_manager import charges_of, grant, needs_of, tied_text
from nri_numa.engine.others.elsewhere import given_last, listed_softly
from nri_numa.engine.others.holders import holders_text
from nri_numa.engine.place.device_words import device_steps, devices_first
from nri_numa.engine.place.explicit import all_isolated, check_numamem, doubtful
from nri_numa.engine.place.listed_memory import STRICT, by_distance, near, near_cpus
from nri_numa.engine.place.memory_nodes import choose_memory
from nri_numa.engine.place.needs import (
    ResourceTable,
    demands,
    loads_of,
    pod_demand,
    resource_table,
)
from nri_numa.engine.place.placement import (
    Placed,
    exclusive_text,
    spread_charges,
)
from nri_numa.engine.place.quotas import grant_refused
from nri_numa.engine.place.refusals import (
    affinity_message,
    left_text,
    memory_short,
    misaligned,
    mode_text,
    needed_text,
    too_few,
)
from nri_numa.engine.place.strategy import rank
from nri_numa.engine.place.strict import beside_its_pod, no_memory
from nri_numa.engine.state import Charge, Kind, group_cpus
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.settings import Settings
from nri_numa.engine.values.workload import (
    SMT,
    Bind,
    Policy,
    QoSClass,
    Scope,
)
from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.machine.model import agree, cpus_text, numa_text


@dataclass(frozen=True, slots=True)
class _Aligned:
    """What the policy chose, for the CPUs to be taken there.

    Attributes:
        affinity: NUMA nodes; None when any will do.
        preferred: it is no wider than an empty machine would need.
        steps: why, in sentences.
        warnings: of these, what an operator should know.
    """

    affinity: NUMASet | None
    preferred: bool = True
    alignment: Alignment | None = None
    steps: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _CPUs:
    """The CPUs that were chosen, for memory to be found beside them.

    Attributes:
        numa_nodes: where they are.
        cpus, idle: of an exclusive container.
    """

    kind: Kind
    numa_nodes: NUMASet = NO_NUMA_NODES
    cpus: CPUSet = NO_CPUS
    idle: CPUSet = NO_CPUS


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
        found = _Aligned(affinity, steps=(step,))
    else:
        found = _Aligned(None, steps=("no policy: any NUMA node will do",))
    if case.demand.exclusive_cpus:
        return _exclusive(case, table, found)
    if case.by_kubelet:
        # As under the kubelet: all shared CPUs, and no CPU time allocated anywhere.
        return _finish(case, table, found, _CPUs(Kind.UNBOUND))
    numa_nodes = found.affinity if found.affinity is not None else machine.places
    if not machine.topology.bits_of(numa_nodes.bits) & machine.topology.allowed.bits:
        numa_nodes = machine.topology.cpu_nodes
    numa_nodes = numa_nodes & machine.topology.cpu_nodes
    if not numa_nodes:
        why = "no NUMA node of this machine has CPUs"
        return Placed(kind=Kind.UNBOUND, preferred=False, reason=f"not pinned: {why}", steps=(why,))
    return _finish(case, table, found, _CPUs(Kind.SHARED, numa_nodes))


def _aligned(case: Case, table: ResourceTable, own: int) -> _Aligned | Refusal:
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
        return _Aligned(record.affinity, record.affinity_preferred, steps=(step,))
    asked = demands(case, table)
    ranks = rank(case, table)
    if table.listed is not None:
        ranks = by_distance(machine, table.listed, ranks)
        asked = near_cpus(asked, near(machine, table.listed), policy)
    alignment = align(
        asked,
        numa_ids=machine.places,
        policy=policy,
        distance=machine.topology.distance,
        prefer_closest=machine.settings.prefer_closest,
        rank=ranks,
        one_width=not machine.settings.kubelet_memory,
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
    return _Aligned(found, alignment.preferred, alignment, (*steps, *warnings), warnings)


def _who_has_them(case: Case) -> str:
    """Who has the CPUs that are missing, unless no empty NUMA node would have enough of them."""
    most = max(case.machine.whole_cpus.values(), default=0)
    if not case.demand.exclusive_cpus:
        return ""
    if case.policy is Policy.SINGLE_NUMA_NODE and case.demand.exclusive_cpus > most:
        return ""
    return holders_text(case.state, requests=True)


def _exclusive(case: Case, table: ResourceTable, found: _Aligned) -> Placed | Refusal:
    machine, state, affinity = case.machine, case.state, found.affinity
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
    taken = take_within(
        machine,
        TakeRequest(
            count=case.demand.exclusive_cpus,
            available=free,
            prefer=former,
            held=case.held,
            affinity=first,
            strict=strict,
            smt=case.smt,
            load=case.requested.load,
            loads=loads_of(state) if case.smt is SMT.PAIR else {},
            busy=state.withheld,
            last=given_last(state, machine.topology, machine.settings),
            listed=listed_softly(state, machine.topology),
            settings=settings,
        ),
        table.free_by_node,
    )
    if not isinstance(taken, Taken):
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
        _Aligned(affinity, preferred, found.alignment, tuple(steps), found.warnings),
        _CPUs(Kind.EXCLUSIVE, numa_nodes, taken.cpus, taken.idle),
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
    failed: NotEnoughCPUs | SMTAlignmentRefused, case: Case, table: ResourceTable, found: _Aligned
) -> Refusal:
    left, holders = left_text(case, table), holders_text(case.state, requests=True)
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


def _finish(case: Case, table: ResourceTable, found: _Aligned, chosen: _CPUs) -> Placed | Refusal:
    """Choose memory nodes, allocate everything, and say it."""
    machine, demand, policy = case.machine, case.demand, case.policy
    affinity, preferred, alignment = found.affinity, found.preferred, found.alignment
    kind, numa_nodes, steps = chosen.kind, chosen.numa_nodes, [*found.steps]
    # Neither CPUs nor memory to speak of: nothing to pin.
    loose = kind is Kind.UNBOUND and not needs_of(demand)
    mems = NO_NUMA_NODES
    warnings = found.warnings
    granted: MemoryGrant | MemoryRefused | None = None
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
            granted = grant(table.kubelet, demand, affinity, preferred=hinted)
            if isinstance(granted, MemoryRefused):
                return Refusal(
                    reason="NotEnoughMemory",
                    message=f"{case.who}: {memory_short(table.kubelet, demand, affinity)} "
                    f"(kubeletMemory); {granted.message}; it needs {needed_text(case)}; "
                    f"free: {left_text(case, table)}",
                    rule="the kubelet's memory rules: kubeletMemory is set",
                    widenable=True,
                    alignment=alignment,
                )
            mems = granted.mask
            if policy in STRICT and affinity is not None and not mems <= affinity:
                return no_memory(case, table, affinity, alignment)
            if affinity is not None and not mems <= affinity:
                steps.append(f"memory extended from {numa_text(affinity)} to {mems}")
                preferred = False
    elif case.requested.bind is Bind.CPU_MEM and not loose:
        base = numa_nodes if affinity is None else affinity | numa_nodes
        memory = choose_memory(case, table, base)
        if memory is None:
            return no_memory(case, table, base, alignment)
        mems = memory.mems
        preferred = preferred and not memory.widened
        steps += memory.steps
    milli = _milli(case, table, chosen)
    charges: Mapping[int, Charge]
    if isinstance(granted, MemoryGrant):
        charges = charges_of(granted, demand, milli)
    else:
        charges = spread_charges(
            numa_nodes, milli, mems,
            demand.memory_paid if mems else 0, table.memory_left,
            demand.hugepages if mems else {}, table.hugepages_left,
        )  # fmt: skip
    if kind is Kind.SHARED:
        shares = group_cpus(numa_nodes.bits, table.pool, machine.topology, 0)
        doubts = all_isolated(machine, shares)
        warnings += doubts
        steps += doubts
    what = exclusive_text(len(chosen.cpus)) if kind is Kind.EXCLUSIVE else "shared CPUs"
    where = f" on {numa_text(numa_nodes)}"
    if kind is Kind.UNBOUND:
        what, where = "not pinned to CPUs (kubeletCPUs)", f", memory of {numa_text(mems)}"
        where = where if mems else ""
    ideal = "" if preferred else ", wider than ideal"
    return Placed(
        kind=kind,
        cpus=chosen.cpus,
        idle=chosen.idle,
        owned=kind is Kind.EXCLUSIVE,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        policy=policy,
        preferred=preferred,
        reason=f"{what}{where}{ideal}",
        alignment=alignment,
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


def _milli(case: Case, table: ResourceTable, chosen: _CPUs) -> dict[int, int]:
    """Thousandths of a CPU to allocate on each NUMA node."""
    if chosen.cpus:
        bits, nodes = chosen.cpus.bits, case.machine.topology.numa_nodes
        return {i: 1000 * (nodes[i].cpus.bits & bits).bit_count() for i in chosen.numa_nodes}
    milli = min(case.demand.cpu_milli, case.demand.cpu_paid_milli)
    return share_out(milli, chosen.numa_nodes, table.cpu_left)
