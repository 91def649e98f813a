"""Comparing notes with the runtime: adoption, gap containers, repairs.

The runtime is the truth for *what is*, the prior state (from memory or from the checkpoint) for
*what was meant*. No running container moves: what is known keeps what it has, and an update is
only sent where the runtime has something else than was meant.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from nri_numa.engine.answers import NO_QUOTA, ContainerUpdate
from nri_numa.engine.decide import ASSIGNED, admit, left_alone
from nri_numa.engine.decision import Decision, Machine, Reading, Refused, Resynced, Trace
from nri_numa.engine.demand import limit_milli, request_milli
from nri_numa.engine.placement import spread_charges
from nri_numa.engine.resize import resized_meanwhile
from nri_numa.engine.state import (
    Allocation,
    Kind,
    NodeState,
    build,
    contradiction,
    effective_cpus,
)
from nri_numa.engine.workload import Container, PodSandbox, Policy
from nri_numa.topology.cpuset import NO_CPUS, CPUSet, ListFormatError, NUMASet


def resync(
    machine: Machine,
    prior: NodeState,
    pods: Iterable[PodSandbox],
    containers: Iterable[Container],
    reading: Reading | None = None,
    now: float = 0.0,
) -> Resynced:
    """Build a fresh state from what really runs.

    Known containers first, owners of CPUs before others, then those that carry our ``assigned``
    annotation (the checkpoint was lost), then strangers, which are decided like new ones, in
    order of namespace, pod, container and id. A stranger that is refused keeps running unpinned:
    a running container cannot be refused any more.

    Args:
        machine: topology and settings.
        prior: what was meant.
        pods: all pods the runtime reports.
        containers: all containers it reports, with the cpus and mems they have now.
        reading: what the kernel has left, when known.
        now: Unix time in seconds.
    """
    by_pod = {pod.id: pod for pod in pods}
    live = {c.id: c for c in containers if c.pod_id in by_pod}
    problems: list[str] = []
    kept, strangers = _keep(machine, prior, by_pod, live, problems)
    uids = {pod.uid: pod.id for pod in by_pod.values()}
    records = [
        record if record.pod_id == uids[uid] else replace(record, pod_id=uids[uid])
        for uid, record in prior.pods.items()
        if uid in uids
    ]
    state = build(kept, records, prior.serial)
    adopted = [a.container_id for a in kept]
    resized: list[tuple[Allocation, Trace]] = []
    for allocation in kept:
        # One that carries the annotation alone was read from its present size.
        container = live[allocation.container_id]
        if container.id not in prior.allocations:
            continue
        found = resized_meanwhile(machine, state, by_pod[container.pod_id], container, reading, now)
        if isinstance(found, Refused):
            problems.append(f"resized while we were away and keeps what it has: {found.message}")
        elif found is not None:
            state = state.without(container.id).with_allocation(found[0])
            resized.append(found)
    pool = state.pool(machine.topology, machine.settings)
    gap: list[str] = []
    decisions: list[Decision] = []
    # A second container of that name in the pod would take the first one's place.
    names = Counter((c.pod_id, c.name) for c in live.values())
    calm: list[Allocation] = []
    for container in sorted(strangers, key=lambda c: (by_pod[c.pod_id].full_name, c.name, c.id)):
        pod = by_pod[container.pod_id]
        held = NO_CPUS
        if container.resources.cpus:
            held = _ownable(machine, state, container)
            if _same(CPUSet, container.resources.cpus, pool):
                # Nobody else's pin: we narrowed it to the pool before the checkpoint was lost.
                container = replace(container, resources=replace(container.resources, cpus=""))
        if names[container.pod_id, container.name] == 1:
            alone = left_alone(machine, pod, container, now)
            if alone is not None:
                calm.append(alone)
                continue
        decision = admit(machine, state, pod, container, reading, now, held)
        decisions.append(decision)
        if isinstance(decision, Refused):
            problems.append(f"started while we were away and stays unpinned: {decision.message}")
            state = state.with_allocation(_unpinned(pod, container, decision, now))
            gap.append(container.id)
            continue
        state = decision.state
        if decision.allocation.kind not in (Kind.UNBOUND, Kind.FOREIGN):
            gap.append(container.id)
    state = state.with_unbound(calm)
    updates, repaired = _updates(machine, state, live, frozenset(adopted))
    return Resynced(
        state=state,
        updates=updates,
        adopted=tuple(sorted(adopted)),
        repaired=repaired,
        gap=tuple(sorted(gap)),
        gone=tuple(sorted(i for i in prior.allocations if i not in live)),
        problems=tuple(problems),
        decisions=tuple(decisions),
        left_alone=tuple(calm),
        resized=tuple(resized),
    )


def _keep(
    machine: Machine,
    prior: NodeState,
    by_pod: Mapping[str, PodSandbox],
    live: Mapping[str, Container],
    problems: list[str],
) -> tuple[list[Allocation], list[Container]]:
    """Sort the live containers into what is known and strangers."""
    marker = f"{machine.settings.prefix}/{ASSIGNED}"
    candidates: list[tuple[bool, bool, str, Allocation]] = []
    strangers: list[Container] = []
    for container_id, container in live.items():
        pod = by_pod[container.pod_id]
        allocation = prior.allocations.get(container_id)
        known = allocation is not None
        if allocation is None and marker in container.annotations:
            allocation = _from_annotation(machine, container.annotations[marker], pod, container)
        if allocation is None:
            strangers.append(container)
            continue
        candidates.append((not known, not allocation.owned, container_id, allocation))
    # What the prior state knows before what only the annotation tells, owners first, then by id.
    candidates.sort(key=lambda c: c[:3])
    taken = listed = 0
    usable = NodeState().pool(machine.topology, machine.settings).bits
    kept: list[Allocation] = []
    for _, _, container_id, allocation in candidates:
        wants = allocation.cpus.bits | allocation.idle.bits
        clash = wants & taken
        if allocation.owned:
            clash |= wants & listed
        gone = allocation.cpus - machine.topology.possible
        last = allocation.owned and not usable & ~(taken | wants)
        if clash or gone or last:
            what = (
                f"CPUs {CPUSet.from_bits(clash)} that another container owns"
                if clash
                else f"CPUs {gone} that the machine does not have"
                if gone
                else "the last CPUs of the shared pool"
            )
            problems.append(f"{allocation.full_name} claims {what}: decided anew")
            strangers.append(live[container_id])
            continue
        if allocation.owned:
            taken |= wants
        elif allocation.kind is Kind.EXPLICIT:
            listed |= wants
        kept.append(allocation)
    return kept, strangers


def _from_annotation(
    machine: Machine, text: str, pod: PodSandbox, container: Container
) -> Allocation | None:
    """Read back what we wrote at creation; None when it is not ours, damaged or out of date.

    The annotation is as old as the container: a resize may have changed the CPUs since, or made a
    shared container of an owner. CPUs are believed to be owned only when they are those of the
    annotation or exactly as many as the container requests.
    """
    resources = container.resources
    try:
        document = json.loads(text)
        kind = Kind(document["kind"])
        mems = NUMASet.parse(document["mems"])
        if mems and resources.mems:
            mems = NUMASet.parse(resources.mems)
        numa_nodes = NUMASet.parse(document["numa"])
        idle = CPUSet.parse(document.get("idle", ""))
        policy = Policy(document["policy"])
        preferred = bool(document["preferred"])
        reason = str(document["reason"])
        cpus = CPUSet()
        if kind in (Kind.EXCLUSIVE, Kind.EXPLICIT):
            # The runtime is the truth for what is.
            cpus = CPUSet.parse(resources.cpus or document["cpus"])
        same = str(cpus) == document["cpus"]
    except (ValueError, KeyError, TypeError, ListFormatError, AttributeError, RecursionError):
        return None
    if not (numa_nodes | mems) <= machine.topology.numa_ids:
        return None
    owned = kind is Kind.EXCLUSIVE or bool(document.get("owned"))
    milli = limit_milli(resources, []) or request_milli(resources, [])
    if owned and not same and milli != 1000 * len(cpus):
        return None
    if kind is Kind.EXCLUSIVE:
        numa_nodes = machine.topology.numa_of(cpus)
    memory = max(0, resources.memory_limit or 0) if mems else 0
    on_node = {i: len(machine.topology.numa_nodes[i].cpus & cpus) * 1000 for i in numa_nodes}
    if not owned:
        on_node = dict.fromkeys(numa_nodes, milli // max(1, len(numa_nodes)))
    charges = spread_charges(numa_nodes, on_node, mems, memory, machine.memory_capacity, {}, {})
    allocation = Allocation(
        container_id=container.id,
        pod_id=pod.id,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        kind=kind,
        qos=pod.qos,
        cpus=cpus,
        idle=idle,
        owned=owned,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        cpu_milli=len(cpus) * 1000 if owned else milli,
        memory_bytes=memory,
        policy=policy,
        preferred=preferred,
        reason=reason,
        quota=0 if resources.cpu_quota == NO_QUOTA and owned else None,
    )
    return None if contradiction(allocation) else allocation


def _ownable(machine: Machine, state: NodeState, container: Container) -> CPUSet:
    """CPUs a running stranger has, if it could own all of them."""
    try:
        cpus = CPUSet.parse(container.resources.cpus)
    except ListFormatError:
        return NO_CPUS
    free = state.pool(machine.topology, machine.settings) - machine.settings.reserved_cpus
    return cpus if cpus <= free - state.listed_cpus else NO_CPUS


def _unpinned(pod: PodSandbox, container: Container, refused: Refused, now: float) -> Allocation:
    return Allocation(
        container_id=container.id,
        pod_id=pod.id,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        container=container.name,
        kind=Kind.UNBOUND,
        qos=pod.qos,
        preferred=False,
        reason=f"not pinned: {refused.reason}, and it was running already",
        since=now,
    )


def _updates(
    machine: Machine,
    state: NodeState,
    live: Mapping[str, Container],
    adopted: frozenset[str],
) -> tuple[tuple[ContainerUpdate, ...], tuple[str, ...]]:
    """What to send so that every container has what it should, and which known ones differed."""
    topology = machine.topology
    pool = state.pool(topology, machine.settings)
    updates: list[ContainerUpdate] = []
    repaired: list[str] = []
    for container_id, allocation in sorted(state.allocations.items()):
        update = difference(machine, allocation, pool, live[container_id])
        if update is not None:
            updates.append(update)
            if container_id in adopted:
                repaired.append(container_id)
    return tuple(updates), tuple(repaired)


def difference(
    machine: Machine, allocation: Allocation, pool: CPUSet, container: Container
) -> ContainerUpdate | None:
    """What to send for one container so that it has what it should; None when it has it."""
    if allocation.kind is Kind.FOREIGN:
        return None
    resources = container.resources
    wanted = effective_cpus(allocation, pool, machine.topology)
    if not wanted and allocation.kind is Kind.UNBOUND and resources.cpus:
        # It was narrowed while others owned CPUs; nobody does any more.
        wanted = pool
    cpus = str(wanted) if wanted and not _same(CPUSet, resources.cpus, wanted) else ""
    mems = (
        str(allocation.mems)
        if allocation.mems and not _same(NUMASet, resources.mems, allocation.mems)
        else ""
    )
    lift = allocation.quota is not None and (resources.cpu_quota or 0) > 0
    if not (cpus or mems or lift):
        return None
    return ContainerUpdate(
        container_id=allocation.container_id,
        cpus=cpus,
        mems=mems,
        cpu_quota=NO_QUOTA if lift else None,
        ignore_failure=True,
    )


def _same(kind: type[CPUSet] | type[NUMASet], text: str, wanted: CPUSet | NUMASet) -> bool:
    try:
        return kind.parse(text) == wanted
    except ListFormatError:
        return False
