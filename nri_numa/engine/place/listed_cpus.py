"""Lists: ``numacpu`` and ``numamem``, applied unchanged after checks.

CPUs and NUMA nodes must exist, be online and not be exclusive to another container, and the memory
must hold what the container may use. A rejection names pod, container, annotation, value and
expectation.

A shared list whose CPUs are not requested *yields* to containers with exclusive CPUs
(docs/adr/0024-quotas-and-the-floor.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from nri_numa.engine.accounting import check_exclusive_limits, check_listed_cpus_quota
from nri_numa.engine.decision import Placement, PlacementRequest
from nri_numa.engine.desired import NodeSnapshot
from nri_numa.engine.kubelet_grants import grant_holders
from nri_numa.engine.node_model import NodeModel, tier_text
from nri_numa.engine.place.memory import cpu_and_memory_charges
from nri_numa.engine.place.needs import per_node_text
from nri_numa.engine.request.annotations import quote_value
from nri_numa.engine.request.demand import Demand, requested_cpus_text
from nri_numa.engine.request.options import PlacementOptions
from nri_numa.engine.state import STRICT_POLICIES, Allocation, Charge, ContainerKind, NodeState
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, join_words, listed_words_text, numa_text
from nri_numa.model.reasons import Rejection, RejectionReason
from nri_numa.model.workload import Bind, CPUMode
from nri_numa.text import hugepages_resource_name, human_bytes


class _CPUList(NamedTuple):
    """CPUs of ``numacpu`` and their mode; empty without the list."""

    cpus: CPUSet = NO_CPUS
    is_exclusive: bool = False
    yields_to_exclusive: bool = False
    ignored: tuple[str, ...] = ()
    decision_steps: tuple[str, ...] = ()


def place_listed(case: PlacementRequest) -> Placement | Rejection:
    """Check the lists against machine and state, and apply them."""
    cpu_list, mems = _resolve_cpu_list(case), NO_NUMA_NODES
    if isinstance(cpu_list, Rejection):
        return cpu_list
    if case.requested.numamem is not None:
        rejection = check_numamem(case)
        if rejection is not None:
            return rejection
        mems = case.requested.listed_mems if case.requested.bind is Bind.CPU_MEM else mems
    machine, cpus = case.node.machine, cpu_list.cpus
    numa_nodes = machine.topology.numa_of(cpus)
    warnings = excluded_memory_warnings(machine, mems)
    if not cpu_list.is_exclusive:
        warnings += isolated_list_warnings(machine, cpus)
    # Sets instead of the annotation's texts, which may be long.
    lists = (("numacpu", cpus), ("numamem", mems))
    listed = join_words([f"{key} {ids}" for key, ids in lists if ids])
    return replace(
        case.initial_placement,
        kind=ContainerKind.LISTED if cpus else ContainerKind.UNPINNED,
        cpus=cpus,
        exclusive=cpu_list.is_exclusive,
        yields_to_exclusive=cpu_list.yields_to_exclusive,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=_list_charges(case, cpu_list, numa_nodes, mems),
        reason=f"listed: {listed}",
        decision_steps=(f"as listed: {listed}", *cpu_list.decision_steps, *warnings),
        warnings=warnings,
        ignored=cpu_list.ignored,
    )


def _resolve_cpu_list(case: PlacementRequest) -> _CPUList | Rejection:
    """Check the list of CPUs, and decide if they are exclusive to the container.

    Order of the checks: CPUs exist and are available, they may be exclusive, pool floors and other
    containers, the quota on lists.
    """
    requested, demand = case.requested, case.demand
    if requested.numacpu is None:
        return _CPUList()
    cpus, exclusive = requested.listed_cpus, requested.cpus is CPUMode.EXCLUSIVE
    joins_pod = exclusive and bool(exclusive_list_sharers(case, cpus))
    rejection = _check_listed_cpus(case, NO_CPUS if joins_pod else case.node.state.unavailable_cpus)
    if rejection is not None:
        return rejection
    if joins_pod:
        return _CPUList(cpus, is_exclusive=True)
    ignored: tuple[str, ...] = ()
    if exclusive and not may_be_exclusive(requested, cpus, demand):
        if not (requested.ignores_denied and requested.is_from_annotation("cpus")):
            return unpaid_cpus_rejection(case, cpus)
        cause = _requested_text(requested, cpus, demand)
        ignored = (f"cpus: exclusive is ignored, because {cause}",)
        exclusive = False
    if exclusive:
        rejection = _check_exclusive_list(case, cpus)
        return rejection or _CPUList(cpus, is_exclusive=True)
    if is_yielding_list(requested, cpus, demand):
        cause = _requested_text(requested, cpus, demand)
        texts = (f"the list yields CPUs that become exclusive to others, because {cause}",)
        return _CPUList(cpus, yields_to_exclusive=True, ignored=ignored, decision_steps=texts)
    if requested.is_from_annotation("numacpu"):
        rejection = check_listed_cpus_quota(case, f"{_list_subject(case)}, which", cpus)
    return rejection or _CPUList(cpus, ignored=ignored)


def _list_charges(
    case: PlacementRequest, cpu_list: _CPUList, numa_nodes: NUMASet, mems: NUMASet
) -> dict[int, Charge]:
    """Compute the charges of a list; shared CPUs are split by the list's CPUs on each NUMA node."""
    demand, cpus = case.demand, cpu_list.cpus
    milli = min(demand.cpu_milli, demand.cpu_requested_milli)
    if cpu_list.is_exclusive:
        milli = len(cpus) * 1000
    counts = case.node.machine.topology.cpu_count_by_node(cpus)
    by_node = {i: milli * count // len(cpus) for i, count in counts.items()}
    return cpu_and_memory_charges(
        numa_nodes, by_node, mems,
        demand.memory_requested, case.node.free_memory, demand.hugepages, case.free_hugepages(),
        kubelet_memory=case.node.machine.settings.kubelet.memory,
    )  # fmt: skip


def excluded_memory_warnings(machine: NodeModel, mems: NUMASet) -> tuple[str, ...]:
    """Warn about excluded memory-only NUMA nodes: a device's memory, or a slow tier."""
    topology, nodes_by_kind = machine.topology, dict[tuple[int, int | None], list[int]]()
    for i in mems & machine.memory_only_nodes.excluded:
        min_distance = min((topology.distance(c, i) for c in topology.cpu_nodes), default=0)
        nodes_by_kind.setdefault((min_distance, topology.numa_nodes[i].tier), []).append(i)
    return tuple(
        f"{tier_text(topology, NUMASet(ids))}, at distance {min_distance} from the nearest CPUs, "
        f"{'is' if len(ids) == 1 else 'are'} excluded from computed placements "
        "(memoryOnlyNUMANodes); it may be slow memory or memory of a device"
        for (min_distance, _), ids in nodes_by_kind.items()  # by the lowest NUMA node
    )


def isolated_list_warnings(machine: NodeModel, cpus: CPUSet) -> tuple[str, ...]:
    """Warn about shared CPUs that are isolated, where the kernel balances no load."""
    if len(cpus) < 2 or not cpus <= machine.topology.isolated:
        return ()
    return (
        f"{cpus_text(cpus, 'is', 'are')} isolated (isolcpus): the kernel moves no process between "
        "them, so all processes of the container may run on one of them",
    )


def _list_subject(case: PlacementRequest) -> str:
    requested = case.requested
    value = quote_value(requested.numacpu or "")
    return f"numacpu is {value} ({requested.source_text('numacpu')})"


def pod_exclusive_list_cpus(requested: PlacementOptions) -> CPUSet:
    """Exclusive list of a pod, which its containers share; empty without one."""
    is_shared = requested.list_is_pods and requested.cpus is CPUMode.EXCLUSIVE
    return requested.listed_cpus if is_shared else NO_CPUS


def exclusive_list_sharers(case: PlacementRequest, cpus: CPUSet) -> tuple[Allocation, ...]:
    """Find other containers of the pod with the same exclusive list."""
    if pod_exclusive_list_cpus(case.requested) != cpus:
        return ()
    sharers = []
    for a in case.node.state.allocations_of_pod(case.pod.uid):
        if a.exclusive_owners_key == (case.pod.uid, cpus):
            container = replace(case.container, name=a.container)
            options = case.node.machine.options_resolver(case.pod, container)
            if isinstance(options, PlacementOptions) and options.list_is_pods:
                sharers.append(a)
    return tuple(sharers)


def _requested_milli(requested: PlacementOptions, demand: Demand) -> int:
    pod_milli = demand.pod_requested_milli if requested.list_is_pods else None
    return demand.cpu_requested_milli if pod_milli is None else pod_milli


def may_be_exclusive(requested: PlacementOptions, cpus: CPUSet, demand: Demand) -> bool:
    """True if listed CPUs may be exclusive: requested, permitted, or asked for by the operator.

    For the pod's list the requests of all its containers count.
    """
    return (
        _requested_milli(requested, demand) >= 1000 * len(cpus)
        or requested.unrequested_cpus
        or not (requested.is_from_annotation("numacpu") or requested.is_from_annotation("cpus"))
    )


def is_yielding_list(requested: PlacementOptions, cpus: CPUSet, demand: Demand) -> bool:
    """True if a shared list yields: a pod set it, without requesting the CPUs or a permission."""
    return (
        demand.cpu_requested_milli < 1000 * len(cpus)
        and not requested.unrequested_cpus
        and requested.is_from_annotation("numacpu")
    )


def _requested_text(requested: PlacementOptions, cpus: CPUSet, demand: Demand) -> str:
    is_pods = requested.list_is_pods and demand.pod_requested_milli is not None
    subject = "its pod" if is_pods else "the container"
    return requested_cpus_text(subject, _requested_milli(requested, demand), len(cpus))


def unpaid_cpus_rejection(case: PlacementRequest, cpus: CPUSet) -> Rejection:
    """Reject an exclusive list whose CPUs are not requested."""
    cause = _requested_text(case.requested, cpus, case.demand)
    return Rejection(
        reason=RejectionReason.CPUS_NOT_REQUESTED,
        detail=f"{_list_subject(case)} with cpus: exclusive, but {cause}; expected a "
        "request for all of them, or a permission with allowUnrequestedCPUs "
        f"({case.requested.permission} does not have it)",
        rule="the CPU request must cover all exclusive CPUs",
    )


def _list_rejection(
    reason: RejectionReason, text: str, problem: str, remedy: str, rule: str
) -> Rejection:
    return Rejection(reason=reason, detail=f"{text}, but {problem}; expected {remedy}", rule=rule)


def _check_listed_cpus(case: PlacementRequest, withheld: CPUSet) -> Rejection | None:
    """Reject listed CPUs that do not exist, are not usable or are ``withheld`` by others."""
    state, requested, topology = case.node.state, case.requested, case.node.machine.topology
    settings, text, cpus = case.node.machine.settings, _list_subject(case), requested.listed_cpus
    remedy = f"CPUs among {topology.online}"
    if bad_cpus := cpus - topology.possible:
        problem, rule = f"{cpus_text(bad_cpus, 'does', 'do')} not exist", "listed CPUs must exist"
        return _list_rejection(RejectionReason.UNKNOWN_CPU, text, problem, remedy, rule)
    if bad_cpus := cpus - topology.online:
        problem, rule = f"{cpus_text(bad_cpus, 'is', 'are')} offline", "listed CPUs must be online"
        return _list_rejection(RejectionReason.CPU_OFFLINE, text, problem, remedy, rule)
    if bad_cpus := cpus - topology.allowed:
        problem = f"{cpus_text(bad_cpus, 'is', 'are')} outside the CPUs that containers may use"
        remedy = f"CPUs among {topology.allowed}"
        rule = "listed CPUs must be usable by containers"
        return _list_rejection(RejectionReason.CPU_NOT_ALLOWED, text, problem, remedy, rule)
    reserved = cpus & settings.reserved_cpus
    if reserved and requested.is_from_annotation("numacpu") and not requested.reserved_cpus:
        problem = f"{cpus_text(reserved, 'is', 'are')} reserved for the system"
        remedy = f"CPUs among {topology.allowed - settings.reserved_cpus}, or a permission with "
        remedy += f"reservedCPUs ({requested.permission} does not have it)"
        rule = "annotations cannot request reserved CPUs"
        return _list_rejection(RejectionReason.CPU_RESERVED, text, problem, remedy, rule)
    bad_cpus = cpus & withheld
    shared = requested.cpus is not CPUMode.EXCLUSIVE
    if bad_cpus and not (
        case.had_instance and shared and is_yielding_list(requested, cpus, case.demand)
    ):
        holder = _exclusive_holder(state, bad_cpus)
        problem = f"{cpus_text(bad_cpus, 'is', 'are')} exclusive to {holder}"
        remedy = f"CPUs among {CPUSet.from_bits(case.node.exclusive_pool_bits)}"
        rule = "listed CPUs must not be exclusive to another container"
        return _list_rejection(RejectionReason.CPU_EXCLUSIVE, text, problem, remedy, rule)
    return None


def _check_exclusive_list(case: PlacementRequest, cpus: CPUSet) -> Rejection | None:
    machine, state = case.node.machine, case.node.state
    settings, text = machine.settings, f"{_list_subject(case)} with cpus: exclusive"
    if reserved := cpus & settings.reserved_cpus:
        problem = f"{cpus_text(reserved, 'is', 'are')} reserved"
        remedy = f"CPUs among {machine.topology.allowed - settings.reserved_cpus}"
        rule = "reserved CPUs are never exclusive"
        return _list_rejection(RejectionReason.CPU_RESERVED, text, problem, remedy, rule)
    if common_cpus := cpus & state.listed_cpus:
        names = sorted(state.allocations[i].full_name for i, c in state.listed.items() if c & cpus)
        problem = f"{cpus_text(common_cpus, 'is', 'are')} also listed by {listed_words_text(names)}"
        remedy = "CPUs that no other container lists"
        rule = "exclusive CPUs must not be listed by another container"
        return _list_rejection(RejectionReason.CPU_LISTED, text, problem, remedy, rule)
    rejection = check_exclusive_limits(case, f"{text}, which", cpus, NO_CPUS)
    return rejection or _check_strict_shared_containers(case.node, text, cpus)


def _check_strict_shared_containers(
    node: NodeSnapshot, text: str, cpus: CPUSet
) -> Rejection | None:
    """Reject CPUs that shared containers with a strict policy need: they cannot move."""
    state = node.state
    for key, members in sorted(state.shared_groups.items()):
        if key < 0:
            continue
        numa_nodes = NUMASet.from_bits(key)
        group_cpus = node.pool & node.machine.topology.cpus_of(numa_nodes)
        strict = [i for i in sorted(members) if state.allocations[i].policy in STRICT_POLICIES]
        if strict and group_cpus and group_cpus <= cpus:
            sharer = state.allocations[strict[0]]
            problem = f"it leaves no CPU on {numa_text(numa_nodes)} for {sharer.full_name}, which "
            problem += f"shares CPUs there (policy {sharer.policy})"
            remedy = f"one of {group_cpus} to be free"
            rule = "containers that share under a strict policy keep a CPU on their NUMA nodes"
            return _list_rejection(RejectionReason.SHARED_POOL_EMPTY, text, problem, remedy, rule)
    return None


def _exclusive_holder(state: NodeState, cpus: CPUSet) -> str:
    names = sorted(
        a.full_name
        for a in state.allocations.values()
        if (a.exclusive and a.cpus & cpus) or a.idle_siblings & cpus
    )
    names += [f"{name} (by the kubelet)" for name in grant_holders(state, cpus)]
    return listed_words_text(names) or "another container"


def check_numamem(case: PlacementRequest) -> Rejection | None:
    """Check ``numamem``, alone or beside computed CPUs; None if the list may be used."""
    topology, requested = case.node.machine.topology, case.requested
    mems = requested.listed_mems
    value = quote_value(requested.numamem or "")
    text = f"numamem is {value} ({requested.source_text('numamem')})"
    remedy = f"NUMA nodes among {topology.memory_nodes}"
    if bad_nodes := mems - topology.numa_ids:
        problem = f"{numa_text(bad_nodes, 'does', 'do')} not exist"
        rule = "listed NUMA nodes must exist"
        return _list_rejection(RejectionReason.UNKNOWN_NUMA_NODE, text, problem, remedy, rule)
    if bad_nodes := mems & topology.withheld_memory:
        problem = f"memory of {numa_text(bad_nodes)} is outside what containers may use"
        rule = "listed NUMA nodes must be usable by containers"
        return _list_rejection(RejectionReason.NUMA_NODE_NOT_ALLOWED, text, problem, remedy, rule)
    if bad_nodes := mems - topology.memory_nodes:
        problem = f"{numa_text(bad_nodes, 'has', 'have')} no memory"
        rule = "listed NUMA nodes must have memory"
        reason = RejectionReason.NUMA_NODE_WITHOUT_MEMORY
        return _list_rejection(reason, text, problem, remedy, rule)
    if requested.bind is Bind.CPU:
        return None
    free_bytes = case.node.free_memory
    memory = {i: free_bytes.get(i, topology.numa_nodes[i].memory_bytes) for i in mems}
    rows: list[tuple[str, int, Mapping[int, int]]] = [("memory", case.demand.memory_bytes, memory)]
    if case.demand.hugepages:
        pages = case.free_hugepages()
        rows += [
            (hugepages_resource_name(size), amount, {i: pages[size].get(i, 0) for i in mems})
            for size, amount in sorted(case.demand.hugepages.items())  # by page size
        ]
    for resource, need, by_id in rows:
        if need > sum(by_id.values()):
            per_node = {i: human_bytes(amount, free=True) for i, amount in by_id.items()}
            problem = f"{resource}: {human_bytes(need)} needed, "
            problem += f"{human_bytes(sum(by_id.values()), free=True)} free there; "
            problem += per_node_text(per_node)
            killer = "the OOM killer" if resource == "memory" else "SIGBUS"
            remedy = f"NUMA nodes that hold it, because otherwise {killer} ends the container"
            rule = "the memory limit must fit the listed NUMA nodes"
            return _list_rejection(RejectionReason.NOT_ENOUGH_MEMORY, text, problem, remedy, rule)
    return None
