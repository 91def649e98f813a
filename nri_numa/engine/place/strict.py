"""Strict policies, for every resource at every step.

``restricted`` and ``single-numa-node`` refuse rather than use more NUMA nodes than they promise.
The merge of hints keeps that for one container at the moment it is placed. What is checked here
is what comes after: further containers of a pod that was placed as a whole, and memory that is
gone by the time it is taken.
"""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.align.families import families_of
from nri_numa.engine.align.policies import Alignment
from nri_numa.engine.align.search import Steps
from nri_numa.engine.align.shortage import short
from nri_numa.engine.case import Case
from nri_numa.engine.place.listed_memory import STRICT, near
from nri_numa.engine.place.needs import ResourceTable, demands, pod_demand
from nri_numa.engine.place.placement import exclusive_text
from nri_numa.engine.place.refusals import left_text, memory_lacking, needed_text, not_let_in
from nri_numa.engine.state import PodRecord, union
from nri_numa.engine.values.refusal import Refusal
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NO_NUMA_NODES, NUMASet
from nri_numa.machine.model import human_milli, numa_text


def beside_its_pod(case: Case, table: ResourceTable, record: PodRecord) -> Refusal | None:
    """Check that a further container may go where its pod was placed (scope ``pod``).

    What the first container left may be gone by now, and the runtime may not have told the pod's
    sum. Memory and CPUs of its own are checked where they are taken.

    Returns:
        None when it may; policies that are not strict always may.
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
        # Its first container had a fraction, so nobody knew of these CPUs then.
        wrong = "more NUMA nodes than its CPUs need on an empty machine"
    elif policy is Policy.RESTRICTED and case.by_kubelet and demand.exclusive_cpus:
        # They may come from all of its sockets, and would have had to fit there beforehand.
        has = union(case.state.allocations[i].cpus for i in record.containers)
        back = len(has & machine.topology.cpus_of(affinity)) - len(has)
        have = back + sum(table.free_by_node.get(i, 0) for i in affinity)
        if have < demand.exclusive_cpus:
            need = exclusive_text(demand.exclusive_cpus)
            few = short("cpu", need, f"{max(0, have)} free on {here}")
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
    cpus = demands(whole, table)[0]
    return families_of([cpus], case.machine.places, Steps())[0].prefers_width(affinity.bits)


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
