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

from nri_numa.engine.accounting import grant_refused, list_refused
from nri_numa.engine.decision import Case, Machine, Placed, tier_text
from nri_numa.engine.others import granted_names
from nri_numa.engine.place.memory import pages_name, spread_charges
from nri_numa.engine.place.needs import per_node
from nri_numa.engine.request.annotations import by_annotation, quoted
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import STRICT, Allocation, Kind, NodeState
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import cpus_text, numa_text
from nri_numa.model.workload import CPUMode, Refusal, Requested
from nri_numa.text import human_bytes


def place_explicit(case: Case) -> Placed | Refusal:
    """Check the lists against machine and state, and take them."""
    machine, requested, demand = case.machine, case.requested, case.demand
    cpus, mems = NO_CPUS, NO_NUMA_NODES
    owned, soft = requested.cpus is CPUMode.EXCLUSIVE, False
    ignored: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    if requested.numacpu is not None:
        cpus = requested.listed_cpus
        beside = owned and bool(owned_by_pod(case, cpus))
        failed = _check_cpus(case, NO_CPUS if beside else case.state.withheld)
        if failed is not None:
            return failed
        if owned and not (beside or may_own(requested, cpus, demand)):
            if not (requested.lenient and by_annotation(requested, "cpus")):
                return unpaid(case, cpus)
            ignored = (f"cpus: exclusive is ignored: {_pays(case.requested, cpus, case.demand)}",)
            owned = False
        soft = not owned and gives_way(requested, cpus, demand)
        if owned and not beside:
            failed = _check_ownable(case, cpus)
        elif not (owned or soft) and by_annotation(requested, "numacpu"):
            failed = list_refused(case, f"{_text(case)}, which", cpus)
        if failed is not None:
            return failed
        if soft:
            steps = (
                f"the list gives way to exclusive CPUs of others: {_pays(requested, cpus, demand)}",
            )
    if requested.numamem is not None:
        failed = check_numamem(case)
        if failed is not None:
            return failed
        mems = case.requested.listed_mems
    topology = machine.topology
    warnings = doubtful(machine, mems)
    if not owned:
        warnings += all_isolated(machine, cpus)
    numa_nodes = topology.numa_of(cpus)
    # A shared reservation is spread over the NUMA nodes by how many of the CPUs lie there.
    want = len(cpus) * 1000 if owned else min(demand.cpu_milli, demand.cpu_paid_milli)
    milli = {i: want * count // len(cpus) for i, count in topology.counts(cpus).items()}
    charges = spread_charges(
        numa_nodes, milli, mems,
        demand.memory_paid, case.memory_left, demand.hugepages, case.hugepages_left(),
    )  # fmt: skip
    # The sets, not the texts: these may be of any length.
    listed = " and ".join(
        f"{key} {ids}" for key, ids in (("numacpu", cpus), ("numamem", mems)) if ids
    )
    return replace(
        case.unplaced,
        kind=Kind.EXPLICIT if cpus else Kind.UNBOUND,
        cpus=cpus,
        owned=owned and bool(cpus),
        soft=soft,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        reason=f"listed: {listed}",
        steps=(f"taken as listed: {listed}", *steps, *warnings),
        warnings=warnings,
        ignored=ignored,
    )


def doubtful(machine: Machine, mems: NUMASet) -> tuple[str, ...]:
    """Warn of memory that is far from all CPUs and was not let in: a GPU's, or a slow tier."""
    topology, outside = machine.topology, mems & machine.tiers.outside
    found: list[str] = []
    for i in outside:
        near = min((topology.distance(c, i) for c in topology.cpu_nodes), default=0)
        text = tier_text(topology, NUMASet([i]))
        found.append(
            f"{text}, at distance {near} from the nearest CPUs, is not allowed for computed pins "
            "(memoryOnlyNodes, memoryTiers); it may be a device's memory or a slow tier"
        )
    return tuple(found)


def all_isolated(machine: Machine, cpus: CPUSet) -> tuple[str, ...]:
    """Warn of a shared set in which the kernel balances no load."""
    if len(cpus) < 2 or not cpus <= machine.topology.isolated:
        return ()
    return (
        f"{cpus_text(cpus, 'is', 'are')} isolated (isolcpus): the kernel moves no process between "
        "them, so that the container's processes may all run on one",
    )


def _text(case: Case) -> str:
    requested = case.requested
    source = requested.sources.get("numacpu", "numacpu")
    return f"{case.who}: numacpu is {quoted(requested.numacpu or '')} ({source})"


def exclusive_list(requested: Requested) -> CPUSet:
    """The list that containers of one pod own together: exclusive, and given for the pod."""
    own = requested.pods_list and requested.cpus is CPUMode.EXCLUSIVE
    return requested.listed_cpus if own else NO_CPUS


def owned_by_pod(case: Case, cpus: CPUSet) -> tuple[Allocation, ...]:
    """Other containers of its pod that own the pod's list, which this container has too."""
    if case.record is None or exclusive_list(case.requested) != cpus:
        return ()
    found = []
    for container_id in sorted(case.record.containers):
        a = case.state.allocations[container_id]
        if a.exclusive_list == (case.pod.uid, cpus):
            theirs = case.machine.resolve(case.pod, replace(case.container, name=a.container))
            if isinstance(theirs, Requested) and theirs.pods_list:
                found.append(a)
    return tuple(found)


def _paid(requested: Requested, demand: Demand) -> int:
    whole = demand.pod_paid_milli if requested.pods_list else None
    return demand.cpu_paid_milli if whole is None else whole


def may_own(requested: Requested, cpus: CPUSet, demand: Demand) -> bool:
    """Whether listed CPUs may be owned: paid for, permitted, or asked for by the operator.

    The pod's list is paid for by the requests of all its containers.
    """
    return (
        _paid(requested, demand) >= 1000 * len(cpus)
        or requested.unpaid_cpus
        or not (by_annotation(requested, "numacpu") or by_annotation(requested, "cpus"))
    )


def gives_way(requested: Requested, cpus: CPUSet, demand: Demand) -> bool:
    """Whether a shared list is soft: a pod asked for it, and neither pays nor has a permission."""
    return (
        demand.cpu_paid_milli < 1000 * len(cpus)
        and not requested.unpaid_cpus
        and by_annotation(requested, "numacpu")
    )


def _pays(requested: Requested, cpus: CPUSet, demand: Demand) -> str:
    whole = requested.pods_list and demand.pod_paid_milli is not None
    who = "CPU requests of its pod pay" if whole else "the CPU request pays"
    return f"{who} for {_paid(requested, demand)}m of {1000 * len(cpus)}m"


def unpaid(case: Case, cpus: CPUSet) -> Refusal:
    """Listed CPUs that may not be owned, and what was expected."""
    paid = _pays(case.requested, cpus, case.demand)
    return Refusal(
        reason="UnpaidCPUs",
        message=f"{_text(case)} with cpus: exclusive, but {paid}; expected a "
        "request for all of them, or a permission with unpaidCPUs "
        f"({case.requested.permission} has not)",
        rule="exclusive CPUs must be paid for by the CPU request",
    )


def _wrong(text: str, why: str, expected: str, rule: str, *, reason: str) -> Refusal:
    return Refusal(reason=reason, message=f"{text}, but {why}; expected {expected}", rule=rule)


def _check_cpus(case: Case, withheld: CPUSet) -> Refusal | None:
    """What is wrong with the list; ``withheld`` is what others have."""
    state, requested, topology = case.state, case.requested, case.machine.topology
    settings, text, cpus = case.machine.settings, _text(case), requested.listed_cpus
    expected = f"CPUs among {topology.online}"
    if wrong := cpus - topology.possible:
        why = f"{cpus_text(wrong, 'does', 'do')} not exist"
        return _wrong(text, why, expected, "listed CPUs must exist", reason="UnknownCPU")
    if wrong := cpus - topology.online:
        why = f"{cpus_text(wrong, 'is', 'are')} offline"
        return _wrong(text, why, expected, "listed CPUs must be online", reason="CPUOffline")
    if wrong := cpus - topology.allowed:
        why = f"{cpus_text(wrong, 'is', 'are')} outside the CPUs containers may use"
        rule = "listed CPUs must be usable by containers"
        return _wrong(text, why, f"CPUs among {topology.allowed}", rule, reason="CPUNotAllowed")
    reserved = cpus & settings.reserved_cpus
    by_pod = settings.strict_reserved or by_annotation(requested, "numacpu")
    if reserved and by_pod and not requested.reserved_cpus:
        others = topology.allowed - settings.reserved_cpus
        return _wrong(
            text,
            f"{cpus_text(reserved, 'is', 'are')} reserved for the system",
            f"CPUs among {others}, or a permission with reservedCPUs ({requested.permission} "
            "has not)",
            "reserved CPUs are not given to containers by their annotations",
            reason="CPUReserved",
        )
    wrong = cpus & withheld
    shared = requested.cpus is not CPUMode.EXCLUSIVE
    if wrong and not (case.again and shared and gives_way(requested, cpus, case.demand)):
        return _wrong(
            text,
            f"{cpus_text(wrong, 'is', 'are')} exclusive to {_owner(state, wrong)}",
            f"CPUs among {CPUSet.from_bits(state.grantable(topology, settings))}",
            "listed CPUs must not be exclusive to another container",
            reason="CPUOwned",
        )
    return None


def _check_ownable(case: Case, cpus: CPUSet) -> Refusal | None:
    machine, state = case.machine, case.state
    settings, text = machine.settings, f"{_text(case)} with cpus: exclusive"
    if reserved := cpus & settings.reserved_cpus:
        why = f"{cpus_text(reserved, 'is', 'are')} reserved"
        expected = f"CPUs among {machine.topology.allowed - settings.reserved_cpus}"
        rule = "reserved CPUs are never given exclusively"
        return _wrong(text, why, expected, rule, reason="CPUReserved")
    if both := cpus & state.listed_cpus:
        names = sorted(state.allocations[i].full_name for i, c in state.listed.items() if c & cpus)
        return _wrong(
            text,
            f"{cpus_text(both, 'is', 'are')} listed by {', '.join(names)} too",
            "CPUs that no other container lists",
            "exclusive CPUs must not be listed by another container",
            reason="CPUListed",
        )
    return grant_refused(case, f"{text}, which", cpus, NO_CPUS) or _check_sharers(
        machine, state, text, cpus
    )


def _check_sharers(machine: Machine, state: NodeState, text: str, cpus: CPUSet) -> Refusal | None:
    """Containers that share under a strict policy have nowhere else to go."""
    pool = state.pool(machine.topology, machine.settings)
    for key, members in sorted(state.groups.items()):
        if key < 0:
            continue
        numa_nodes = NUMASet.from_bits(key)
        theirs = pool & machine.topology.cpus_of(numa_nodes)
        strict = [i for i in sorted(members) if state.allocations[i].policy in STRICT]
        if strict and theirs and theirs <= cpus:
            first = state.allocations[strict[0]]
            return _wrong(
                text,
                f"that leaves no CPU on {numa_text(numa_nodes)} for {first.full_name}, which "
                f"shares CPUs there (policy {first.policy})",
                f"one of {theirs} to be free",
                "containers that share under a strict policy keep a CPU on their NUMA nodes",
                reason="SharedPoolEmpty",
            )
    return None


def _owner(state: NodeState, cpus: CPUSet) -> str:
    names = sorted(
        a.full_name
        for a in state.allocations.values()
        if (a.owned and a.cpus & cpus) or a.idle & cpus
    )
    names += [f"{name} (by the kubelet)" for name in granted_names(state, cpus)]
    return ", ".join(names) or "another container"


def check_numamem(case: Case) -> Refusal | None:
    """Check ``numamem``, alone or beside computed CPUs; None when the list may be used."""
    topology, requested, mems = case.machine.topology, case.requested, case.requested.listed_mems
    source = requested.sources.get("numamem", "numamem")
    text = f"{case.who}: numamem is {quoted(requested.numamem or '')} ({source})"
    expected = f"NUMA nodes among {topology.memory_nodes}"
    if wrong := mems - topology.numa_ids:
        why = f"{numa_text(wrong, 'does', 'do')} not exist"
        return _wrong(text, why, expected, "listed NUMA nodes must exist", reason="UnknownNUMANode")
    if wrong := mems & topology.withheld_memory:
        why = f"memory of {numa_text(wrong)} is outside what containers may use"
        rule = "listed NUMA nodes must be usable by containers"
        return _wrong(text, why, expected, rule, reason="NUMANodeNotAllowed")
    if wrong := mems - topology.memory_nodes:
        why, rule = (
            f"{numa_text(wrong, 'has', 'have')} no memory",
            "listed NUMA nodes must have memory",
        )
        return _wrong(text, why, expected, rule, reason="NUMANodeWithoutMemory")
    left = case.memory_left
    memory = {i: left.get(i, topology.numa_nodes[i].memory_bytes) for i in mems}
    needs: list[tuple[str, int, Mapping[int, int]]] = [("memory", case.demand.memory_bytes, memory)]
    if case.demand.hugepages:
        pages = case.hugepages_left()
        needs += [
            (pages_name(size), amount, {i: pages[size].get(i, 0) for i in mems})
            for size, amount in sorted(case.demand.hugepages.items())  # by page size
        ]
    for what, need, have in needs:
        if need > sum(have.values()):
            return Refusal(
                reason="NotEnoughMemory",
                message=f"{text}, but {what}: {human_bytes(need)} needed, "
                f"{human_bytes(sum(have.values()), free=True)} free there; "
                + per_node({i: human_bytes(amount, free=True) for i, amount in have.items()})
                + "; expected NUMA nodes that hold it, since "
                + (
                    "a pin that does not fit ends in the OOM killer"
                    if what == "memory"
                    else "a page that is not there ends in SIGBUS"
                ),
                rule="the memory limit must fit the listed NUMA nodes",
            )
    return None
