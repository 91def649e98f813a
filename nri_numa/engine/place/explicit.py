"""Explicit lists: ``numacpu`` and ``numamem``, taken as they are after checking.

CPUs and NUMA nodes must exist and be online, must not belong to another container exclusively,
and the memory must hold what the container may use. A bad value is refused with a message that
names pod, container, annotation, value and expectation.

A shared list that nothing pays for is *soft*: it gives way to containers that own CPUs
(docs/adr/0024-quotas-and-the-floor.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from nri_numa.engine.accounting import check_exclusive_limits, check_list_quota
from nri_numa.engine.decision import NodeModel, Placement, PlacementRequest, tier_text
from nri_numa.engine.desired import DesiredState
from nri_numa.engine.others import grant_holders
from nri_numa.engine.place.memory import charge_nodes, hugepages_resource_name
from nri_numa.engine.place.needs import per_node_text
from nri_numa.engine.request.annotations import is_from_annotation, quote_value
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import STRICT_POLICIES, Allocation, ContainerKind, NodeState
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, numa_text
from nri_numa.model.workload import CPUMode, PlacementOptions, Rejection
from nri_numa.text import human_bytes


def place_explicit(case: PlacementRequest) -> Placement | Rejection:
    """Check the lists against machine and state, and take them."""
    machine, requested, demand = case.machine, case.requested, case.demand
    cpus, mems = NO_CPUS, NO_NUMA_NODES
    owned, soft = requested.cpus is CPUMode.EXCLUSIVE, False
    ignored: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    if requested.numacpu is not None:
        cpus = requested.listed_cpus
        beside = owned and bool(exclusive_list_sharers(case, cpus))
        failed = _check_listed_cpus(case, NO_CPUS if beside else case.state.unavailable_cpus)
        if failed is not None:
            return failed
        if owned and not (beside or may_be_exclusive(requested, cpus, demand)):
            if not (requested.ignores_denied and is_from_annotation(requested, "cpus")):
                return unrequested_rejection(case, cpus)
            ignored = (
                f"cpus: exclusive is ignored: {_requested_text(case.requested, cpus, case.demand)}",
            )
            owned = False
        soft = not owned and is_yielding_list(requested, cpus, demand)
        if owned and not beside:
            failed = _check_exclusive_list(case, cpus)
        elif not (owned or soft) and is_from_annotation(requested, "numacpu"):
            failed = check_list_quota(case, f"{_list_subject(case)}, which", cpus)
        if failed is not None:
            return failed
        if soft:
            steps = (
                "the list gives way to exclusive CPUs of others: "
                f"{_requested_text(requested, cpus, demand)}",
            )
    if requested.numamem is not None:
        failed = check_numamem(case)
        if failed is not None:
            return failed
        mems = case.requested.listed_mems
    topology = machine.topology
    warnings = unattached_memory_warnings(machine, mems)
    if not owned:
        warnings += isolated_list_warnings(machine, cpus)
    numa_nodes = topology.numa_of(cpus)
    # A shared reservation is spread over the NUMA nodes by how many of the CPUs lie there.
    want = len(cpus) * 1000 if owned else min(demand.cpu_milli, demand.cpu_requested_milli)
    milli = {i: want * count // len(cpus) for i, count in topology.cpu_count_by_node(cpus).items()}
    charges = charge_nodes(
        numa_nodes, milli, mems,
        demand.memory_requested, case.free_memory, demand.hugepages, case.free_hugepages(),
    )  # fmt: skip
    # The sets, not the texts: these may be of any length.
    listed = " and ".join(
        f"{key} {ids}" for key, ids in (("numacpu", cpus), ("numamem", mems)) if ids
    )
    return replace(
        case.initial_placement,
        kind=ContainerKind.LISTED if cpus else ContainerKind.UNPINNED,
        cpus=cpus,
        exclusive=owned and bool(cpus),
        yields_to_exclusive=soft,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        reason=f"listed: {listed}",
        decision_steps=(f"taken as listed: {listed}", *steps, *warnings),
        warnings=warnings,
        ignored=ignored,
    )


def unattached_memory_warnings(machine: NodeModel, mems: NUMASet) -> tuple[str, ...]:
    """Warn of memory that is far from all CPUs and was not let in: a GPU's, or a slow tier."""
    topology, outside = machine.topology, mems & machine.memory_only_nodes.excluded
    found: list[str] = []
    for i in outside:
        near = min((topology.distance(c, i) for c in topology.cpu_nodes), default=0)
        text = tier_text(topology, NUMASet([i]))
        found.append(
            f"{text}, at distance {near} from the nearest CPUs, is not allowed for computed pins "
            "(memoryOnlyNodes, memoryTiers); it may be a device's memory or a slow tier"
        )
    return tuple(found)


def isolated_list_warnings(machine: NodeModel, cpus: CPUSet) -> tuple[str, ...]:
    """Warn of a shared set in which the kernel balances no load."""
    if len(cpus) < 2 or not cpus <= machine.topology.isolated:
        return ()
    return (
        f"{cpus_text(cpus, 'is', 'are')} isolated (isolcpus): the kernel moves no process between "
        "them, so that the container's processes may all run on one",
    )


def _list_subject(case: PlacementRequest) -> str:
    requested = case.requested
    source = requested.sources.get("numacpu", "numacpu")
    return f"{case.message_subject}: numacpu is {quote_value(requested.numacpu or '')} ({source})"


def exclusive_list(requested: PlacementOptions) -> CPUSet:
    """The list that containers of one pod own together: exclusive, and given for the pod."""
    own = requested.list_is_pods and requested.cpus is CPUMode.EXCLUSIVE
    return requested.listed_cpus if own else NO_CPUS


def exclusive_list_sharers(case: PlacementRequest, cpus: CPUSet) -> tuple[Allocation, ...]:
    """Other containers of its pod that own the pod's list, which this container has too."""
    if case.pod_record is None or exclusive_list(case.requested) != cpus:
        return ()
    found = []
    for container_id in sorted(case.pod_record.containers):
        a = case.state.allocations[container_id]
        if a.exclusive_list == (case.pod.uid, cpus):
            theirs = case.machine.resolve_options(
                case.pod, replace(case.container, name=a.container)
            )
            if isinstance(theirs, PlacementOptions) and theirs.list_is_pods:
                found.append(a)
    return tuple(found)


def _requested_milli(requested: PlacementOptions, demand: Demand) -> int:
    whole = demand.pod_requested_milli if requested.list_is_pods else None
    return demand.cpu_requested_milli if whole is None else whole


def may_be_exclusive(requested: PlacementOptions, cpus: CPUSet, demand: Demand) -> bool:
    """Whether listed CPUs may be owned: paid for, permitted, or asked for by the operator.

    The pod's list is paid for by the requests of all its containers.
    """
    return (
        _requested_milli(requested, demand) >= 1000 * len(cpus)
        or requested.unrequested_cpus
        or not (is_from_annotation(requested, "numacpu") or is_from_annotation(requested, "cpus"))
    )


def is_yielding_list(requested: PlacementOptions, cpus: CPUSet, demand: Demand) -> bool:
    """Whether a shared list is soft: a pod asked for it, and neither pays nor has a permission."""
    return (
        demand.cpu_requested_milli < 1000 * len(cpus)
        and not requested.unrequested_cpus
        and is_from_annotation(requested, "numacpu")
    )


def _requested_text(requested: PlacementOptions, cpus: CPUSet, demand: Demand) -> str:
    whole = requested.list_is_pods and demand.pod_requested_milli is not None
    who = "CPU requests of its pod pay" if whole else "the CPU request pays"
    return f"{who} for {_requested_milli(requested, demand)}m of {1000 * len(cpus)}m"


def unrequested_rejection(case: PlacementRequest, cpus: CPUSet) -> Rejection:
    """Listed CPUs that may not be owned, and what was expected."""
    paid = _requested_text(case.requested, cpus, case.demand)
    return Rejection(
        reason="UnpaidCPUs",
        message=f"{_list_subject(case)} with cpus: exclusive, but {paid}; expected a "
        "request for all of them, or a permission with unpaidCPUs "
        f"({case.requested.permission} has not)",
        rule="exclusive CPUs must be paid for by the CPU request",
    )


def _list_rejection(text: str, why: str, expected: str, rule: str, *, reason: str) -> Rejection:
    return Rejection(reason=reason, message=f"{text}, but {why}; expected {expected}", rule=rule)


def _check_listed_cpus(case: PlacementRequest, withheld: CPUSet) -> Rejection | None:
    """What is wrong with the list; ``withheld`` is what others have."""
    state, requested, topology = case.state, case.requested, case.machine.topology
    settings, text, cpus = case.machine.settings, _list_subject(case), requested.listed_cpus
    expected = f"CPUs among {topology.online}"
    if wrong := cpus - topology.possible:
        why = f"{cpus_text(wrong, 'does', 'do')} not exist"
        return _list_rejection(text, why, expected, "listed CPUs must exist", reason="UnknownCPU")
    if wrong := cpus - topology.online:
        why = f"{cpus_text(wrong, 'is', 'are')} offline"
        return _list_rejection(
            text, why, expected, "listed CPUs must be online", reason="CPUOffline"
        )
    if wrong := cpus - topology.allowed:
        why = f"{cpus_text(wrong, 'is', 'are')} outside the CPUs containers may use"
        rule = "listed CPUs must be usable by containers"
        return _list_rejection(
            text, why, f"CPUs among {topology.allowed}", rule, reason="CPUNotAllowed"
        )
    reserved = cpus & settings.reserved_cpus
    by_pod = settings.strict_reserved or is_from_annotation(requested, "numacpu")
    if reserved and by_pod and not requested.reserved_cpus:
        others = topology.allowed - settings.reserved_cpus
        return _list_rejection(
            text,
            f"{cpus_text(reserved, 'is', 'are')} reserved for the system",
            f"CPUs among {others}, or a permission with reservedCPUs ({requested.permission} "
            "has not)",
            "reserved CPUs are not given to containers by their annotations",
            reason="CPUReserved",
        )
    wrong = cpus & withheld
    shared = requested.cpus is not CPUMode.EXCLUSIVE
    if wrong and not (
        case.had_instance and shared and is_yielding_list(requested, cpus, case.demand)
    ):
        return _list_rejection(
            text,
            f"{cpus_text(wrong, 'is', 'are')} exclusive to {_exclusive_holder(state, wrong)}",
            f"CPUs among {CPUSet.from_bits(case.desired.exclusive_pool_bits)}",
            "listed CPUs must not be exclusive to another container",
            reason="CPUOwned",
        )
    return None


def _check_exclusive_list(case: PlacementRequest, cpus: CPUSet) -> Rejection | None:
    machine, state = case.machine, case.state
    settings, text = machine.settings, f"{_list_subject(case)} with cpus: exclusive"
    if reserved := cpus & settings.reserved_cpus:
        why = f"{cpus_text(reserved, 'is', 'are')} reserved"
        expected = f"CPUs among {machine.topology.allowed - settings.reserved_cpus}"
        rule = "reserved CPUs are never given exclusively"
        return _list_rejection(text, why, expected, rule, reason="CPUReserved")
    if both := cpus & state.listed_cpus:
        names = sorted(state.allocations[i].full_name for i, c in state.listed.items() if c & cpus)
        return _list_rejection(
            text,
            f"{cpus_text(both, 'is', 'are')} listed by {', '.join(names)} too",
            "CPUs that no other container lists",
            "exclusive CPUs must not be listed by another container",
            reason="CPUListed",
        )
    return check_exclusive_limits(
        case, f"{text}, which", cpus, NO_CPUS
    ) or _check_strict_shared_containers(case.desired, text, cpus)


def _check_strict_shared_containers(
    desired: DesiredState, text: str, cpus: CPUSet
) -> Rejection | None:
    """Containers that share under a strict policy have nowhere else to go."""
    state = desired.state
    for key, members in sorted(state.shared_groups.items()):
        if key < 0:
            continue
        numa_nodes = NUMASet.from_bits(key)
        theirs = desired.pool & desired.machine.topology.cpus_of(numa_nodes)
        strict = [i for i in sorted(members) if state.allocations[i].policy in STRICT_POLICIES]
        if strict and theirs and theirs <= cpus:
            first = state.allocations[strict[0]]
            return _list_rejection(
                text,
                f"that leaves no CPU on {numa_text(numa_nodes)} for {first.full_name}, which "
                f"shares CPUs there (policy {first.policy})",
                f"one of {theirs} to be free",
                "containers that share under a strict policy keep a CPU on their NUMA nodes",
                reason="SharedPoolEmpty",
            )
    return None


def _exclusive_holder(state: NodeState, cpus: CPUSet) -> str:
    names = sorted(
        a.full_name
        for a in state.allocations.values()
        if (a.exclusive and a.cpus & cpus) or a.idle_siblings & cpus
    )
    names += [f"{name} (by the kubelet)" for name in grant_holders(state, cpus)]
    return ", ".join(names) or "another container"


def check_numamem(case: PlacementRequest) -> Rejection | None:
    """Check ``numamem``, alone or beside computed CPUs; None when the list may be used."""
    topology, requested, mems = case.machine.topology, case.requested, case.requested.listed_mems
    source = requested.sources.get("numamem", "numamem")
    text = f"{case.message_subject}: numamem is {quote_value(requested.numamem or '')} ({source})"
    expected = f"NUMA nodes among {topology.memory_nodes}"
    if wrong := mems - topology.numa_ids:
        why = f"{numa_text(wrong, 'does', 'do')} not exist"
        return _list_rejection(
            text, why, expected, "listed NUMA nodes must exist", reason="UnknownNUMANode"
        )
    if wrong := mems & topology.withheld_memory:
        why = f"memory of {numa_text(wrong)} is outside what containers may use"
        rule = "listed NUMA nodes must be usable by containers"
        return _list_rejection(text, why, expected, rule, reason="NUMANodeNotAllowed")
    if wrong := mems - topology.memory_nodes:
        why, rule = (
            f"{numa_text(wrong, 'has', 'have')} no memory",
            "listed NUMA nodes must have memory",
        )
        return _list_rejection(text, why, expected, rule, reason="NUMANodeWithoutMemory")
    left = case.free_memory
    memory = {i: left.get(i, topology.numa_nodes[i].memory_bytes) for i in mems}
    needs: list[tuple[str, int, Mapping[int, int]]] = [("memory", case.demand.memory_bytes, memory)]
    if case.demand.hugepages:
        pages = case.free_hugepages()
        needs += [
            (hugepages_resource_name(size), amount, {i: pages[size].get(i, 0) for i in mems})
            for size, amount in sorted(case.demand.hugepages.items())  # by page size
        ]
    for what, need, have in needs:
        if need > sum(have.values()):
            return Rejection(
                reason="NotEnoughMemory",
                message=f"{text}, but {what}: {human_bytes(need)} needed, "
                f"{human_bytes(sum(have.values()), free=True)} free there; "
                + per_node_text({i: human_bytes(amount, free=True) for i, amount in have.items()})
                + "; expected NUMA nodes that hold it, since "
                + (
                    "a pin that does not fit ends in the OOM killer"
                    if what == "memory"
                    else "a page that is not there ends in SIGBUS"
                ),
                rule="the memory limit must fit the listed NUMA nodes",
            )
    return None
