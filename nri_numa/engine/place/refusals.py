"""Needs and what is left, in the words of a refusal."""

from __future__ import annotations

from nri_numa.engine.align.hints import Amounts
from nri_numa.engine.align.policies import Alignment
from nri_numa.engine.align.shortage import short
from nri_numa.engine.case import Case
from nri_numa.engine.cpus.question import NotEnoughCPUs, SMTAlignmentRefused
from nri_numa.engine.decision import Machine
from nri_numa.engine.memory.grants import MemoryTable
from nri_numa.engine.memory.memory_manager import needs_of, pages_name
from nri_numa.engine.memory.tiers import tier_text
from nri_numa.engine.place.needs import ResourceTable
from nri_numa.engine.place.placement import (
    exclusive_text,
    human_bytes,
    per_node,
)
from nri_numa.engine.place.quotas import ownable_at_most
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.values.settings import IsolatedCPUs
from nri_numa.engine.values.workload import SMT, Bind, Policy, Scope
from nri_numa.machine.cpuset import NUMASet
from nri_numa.machine.model import agree, human_milli, numa_text


def needed_text(case: Case) -> str:
    """What a container needs, in words: ``2 exclusive CPUs and 4.0 GiB memory``."""
    demand = case.demand
    parts: list[str] = []
    if demand.exclusive_cpus:
        parts.append(exclusive_text(demand.exclusive_cpus))
    elif demand.cpu_milli:
        least = "at least " if demand.cpu_at_least else ""
        parts.append(f"{least}{human_milli(demand.cpu_milli)}")
    if case.requested.bind is Bind.CPU_MEM:
        if demand.memory_bytes:
            parts.append(f"{human_bytes(demand.memory_bytes)} memory")
        for size, amount in sorted(demand.hugepages.items()):
            parts.append(f"{human_bytes(amount)} in huge pages of {human_bytes(size)}")
    if not parts:
        return "a place to run"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def mode_text(case: Case) -> str:
    """Which settings make CPUs that are free no free ones for this container."""
    if not case.demand.exclusive_cpus:
        return ""
    strict = case.smt in (SMT.ISOLATE, SMT.FULL_CORE)
    only = case.machine.settings.isolated is IsolatedCPUs.ONLY
    return (f" (smt: {case.smt})" if strict else "") + (" (isolatedCPUs: only)" if only else "")


def too_few(machine: Machine, failed: NotEnoughCPUs, within: NUMASet | None) -> str:
    """Exclusive CPUs that are not free, or that the machine does not have."""
    need = exclusive_text(failed.requested)
    has = sum(machine.whole_cpus.values())
    if has < failed.requested:
        return short("cpu", need, f"this machine has {has} for containers")
    if within is None:
        free, where = len(failed.available), "on all NUMA nodes together"
    else:
        free, where = sum(failed.per_numa.get(i, 0) for i in within), f"on {numa_text(within)}"
    return short("cpu", need, f"{free + failed.held} free {where}")


def misaligned(case: Case, failed: SMTAlignmentRefused, smt: SMT) -> str:
    """A number of CPUs that is not one of whole cores, and the nearest that are."""
    each = human_milli(failed.threads_per_core * 1000)
    need = exclusive_text(failed.requested)
    most = ownable_at_most(case.machine, case.state, smt)
    fitting = " or ".join(str(n) for n in failed.fitting if n <= most)
    would = f", so {fitting} would fit" if fitting else ""
    return f"{short('cpu', need, f'whole cores have {each} each{would}')} (smt: {smt})"


def memory_lacking(demand: Demand, table: ResourceTable, mems: NUMASet, where: str) -> str:
    """Which memory some memory nodes have too little of; ``where`` they are, for the text."""
    wanted: list[tuple[str, int, Amounts]] = [("memory", demand.memory_bytes, table.memory_left)]
    wanted += [
        (pages_name(size), amount, table.hugepages_left[size])
        for size, amount in sorted(demand.hugepages.items())
    ]
    lacking = []
    for name, amount, left in wanted:
        have = sum(left.get(i, 0) for i in mems)
        if amount > have:
            lacking.append(short(name, human_bytes(amount), f"{human_bytes(have)} free {where}"))
    return " and ".join(lacking)


def memory_short(table: MemoryTable, demand: Demand, affinity: NUMASet | None) -> str:
    """Which memory the kubelet's table lacks: on the whole machine, else where it should be."""
    needs = needs_of(demand)
    where = [(table.numa_ids, "on all NUMA nodes together")]
    if affinity is not None:
        where.append((affinity, f"on {numa_text(affinity)}"))
    for mask, place in where:
        for name, need in needs.items():
            free = table.free(name)
            have = sum(free.get(i, 0) for i in mask)
            if have < need:
                return short(name, human_bytes(need), f"{human_bytes(have)} free {place}")
    # Enough is free, and tied to groups of other containers.
    name, need = next(iter(needs.items()))
    have = sum(table.free(name).values())
    free_text = f"{human_bytes(have)} free, but not together by the kubelet's rules"
    return short(name, human_bytes(need), free_text)


def left_text(case: Case, table: ResourceTable) -> str:
    """What is free of the things needed: ``NUMA node 0: 3 CPUs, 1.0 GiB memory; …``."""
    machine, demand = case.machine, case.demand
    parts: dict[int, str] = {}
    most = ownable_at_most(machine, case.state, case.smt)
    for i in machine.numa_ids:
        texts: list[str] = []
        if demand.exclusive_cpus:
            count = min(table.free_by_node.get(i, 0), most)
            texts.append(human_milli(count * 1000))
        elif demand.cpu_milli:
            texts.append(human_milli(table.cpu_left.get(i, 0)))
        if case.requested.bind is Bind.CPU_MEM:
            if demand.memory_bytes:
                texts.append(f"{human_bytes(table.memory_left.get(i, 0))} memory")
            for size in sorted(demand.hugepages):
                left = table.hugepages_left[size].get(i, 0)
                texts.append(f"{human_bytes(left)} in huge pages of {human_bytes(size)}")
        parts[i] = ", ".join(texts) or human_milli(table.cpu_left.get(i, 0))
    return per_node(parts)


def not_let_in(case: Case, table: ResourceTable) -> str:
    """Name the NUMA nodes without CPUs that could have served memory, had they been let in."""
    machine = case.machine
    outside = machine.tiers.outside
    if not outside:
        return ""
    left = [
        sum(table.memory_left.get(i, 0) for i in machine.tiers.serving(place) | place)
        for place in (NUMASet([i]) for i in machine.places)
    ]
    single = case.policy is Policy.SINGLE_NUMA_NODE
    if (max(left) if single else sum(left)) >= case.demand.memory_bytes:
        return ""
    amount = sum(machine.topology.numa_nodes[i].memory_bytes for i in outside)
    return (
        f"; {tier_text(machine.topology, outside)} with {human_bytes(amount)} "
        f"{agree(outside, 'is', 'are')} not allowed (memoryOnlyNodes, memoryTiers)"
    )


def affinity_message(case: Case, table: ResourceTable, alignment: Alignment) -> str:
    """One line: what was needed, on how many NUMA nodes, and what each had."""
    policy, found = case.policy, alignment.shortage
    whole = case.requested.scope is Scope.POD
    verb = "all its containers together need" if whole else "it needs"
    needs = f"{case.who}: {found.text}{mode_text(case)}; {verb} {needed_text(case)}"
    left = left_text(case, table)
    if policy is Policy.RESTRICTED and found.widths:
        # The kubelet's verdict. More free CPUs or memory would not change it.
        return (
            f"{needs}; policy {policy} wants one number of NUMA nodes for all, as the kubelet's "
            f"does (kubeletMemory), so take best-effort; free: {left}"
        )
    limit = (
        "one NUMA node"
        if policy is Policy.SINGLE_NUMA_NODE
        else "no more NUMA nodes than an empty machine would need"
    )
    outside = not_let_in(case, table)
    return f"{needs} on {limit} (policy {policy}); free: {left}{outside}"
