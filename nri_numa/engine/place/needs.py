"""What a computed placement looks at: what is free and what is asked for, also in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.accounting import (
    count_free_exclusive,
    exclusive_candidates,
    group_floor_cpus,
    max_exclusive_total,
    pool_floor_cpus,
)
from nri_numa.engine.align.hints import (
    AmountsByNode,
    DeviceDemand,
    HintProvider,
    ResourceDemand,
    Unit,
)
from nri_numa.engine.align.policies import Alignment, byte_shortage_clause, shortage_clause
from nri_numa.engine.cpus.allocator import NotEnoughCPUs, SMTMisaligned
from nri_numa.engine.decision import NodeModel, PlacementRequest, tier_text
from nri_numa.engine.place.memory import (
    MemoryTable,
    bytes_by_type,
    hugepages_resource_name,
    memory_table,
)
from nri_numa.engine.request.demand import (
    Demand,
    cpu_limit_milli,
    cpu_request_milli,
    hugepage_demand,
)
from nri_numa.engine.state import POD_RESERVATION_NAME
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.model.machine import (
    Topology,
    count_text,
    human_milli,
    inflect_for_ids,
    join_words,
    numa_text,
)
from nri_numa.model.settings import IsolatedCPUs
from nri_numa.model.workload import (
    SMT,
    Bind,
    Device,
    DeviceRequest,
    DeviceUse,
    PodSandbox,
    Policy,
    QoSClass,
    Scope,
)
from nri_numa.text import human_bytes


def exclusive_cpu_count_text(count: int) -> str:
    """``1 exclusive CPU``, ``4 exclusive CPUs``."""
    return count_text(count, "exclusive CPU")


def per_node_text(parts: Mapping[int, str]) -> str:
    """``NUMA node 0: 2 CPUs; NUMA node 1: …``, cut after eight NUMA nodes."""
    items = [f"NUMA node {i}: {text}" for i, text in sorted(parts.items())]
    cut = items[:8]
    if len(items) > 8:
        cut.append(f"and {len(items) - 8} more NUMA nodes")
    return "; ".join(cut)


@dataclass(slots=True, kw_only=True)
class FreeResources:
    """What one decision looks at; built once, filled as needed, dropped with the decision.

    Attributes:
        free_cpus: CPUs that may be owned: of the pool, or isolated.
        previous_cpus: CPUs of them that the pod had before; empty when the container owns none.
        free_exclusive_by_node: how many of them the container could own; see
            `nri_numa.engine.accounting.count_free_exclusive`. Empty when it owns none.
        kubelet_memory: the kubelet's memory state, where its rules are kept; else None.
    """

    free_cpu_milli: dict[int, int]
    free_memory: AmountsByNode
    free_hugepages: dict[int, Mapping[int, int]]
    pool: CPUSet
    free_cpus: CPUSet
    previous_cpus: CPUSet
    free_exclusive_by_node: dict[int, int]
    listed_mems: NUMASet | None = None
    kubelet_memory: MemoryTable | None = None


def free_resources(case: PlacementRequest) -> FreeResources:
    """Look up what is free, once for the whole decision."""
    machine, state, demand, requested = case.machine, case.state, case.demand, case.requested
    pool, free = case.desired.pool, exclusive_candidates(case.desired)
    exclusive = bool(demand.exclusive_cpus)
    cpu_left = case.desired.free_cpu_milli if exclusive else case.desired.free_shared_milli
    free_by_node: dict[int, int] = {}
    if exclusive:
        free = free - pool_floor_cpus(machine, state, pool, free)
        free = free - group_floor_cpus(
            machine, state, pool, free, pair=case.effective_smt is SMT.PAIR
        )
        free_by_node = count_free_exclusive(case.desired, free, case.effective_smt, cpu_left)
        if requested.slots is not None and (chosen := requested.slots.by_node):
            # The kubelet has chosen the NUMA nodes, and how many CPUs of each.
            free = free & machine.topology.cpus_of(NUMASet(chosen))
            free_by_node = {i: min(n, chosen.get(i, 0)) for i, n in free_by_node.items()}
    kubelet: MemoryTable | None = None
    memory_left: AmountsByNode = {}
    hugepages_left: dict[int, Mapping[int, int]] = {}
    if requested.bind is Bind.CPU_MEM:
        if machine.settings.kubelet_memory:
            kubelet = memory_table(machine, state, demand.hugepages)
            memory_left = kubelet.free["memory"]
            hugepages_left = {
                size: kubelet.free[hugepages_resource_name(size)] for size in demand.hugepages
            }
        else:
            memory_left = case.free_memory
            if demand.hugepages:
                hugepages_left = case.free_hugepages()
    return FreeResources(
        free_cpu_milli=cpu_left,
        free_memory=memory_left,
        free_hugepages=hugepages_left,
        pool=pool,
        free_cpus=free,
        previous_cpus=_previous_cpus(case, free) if demand.exclusive_cpus else NO_CPUS,
        free_exclusive_by_node=free_by_node,
        kubelet_memory=kubelet,
        listed_mems=None if requested.numamem is None else case.requested.listed_mems,
    )


def _previous_cpus(case: PlacementRequest, free: CPUSet) -> CPUSet:
    """Free CPUs to give back to a restarted container, else those a stopped one of its pod had.

    The second is the kubelet's reuse of init container CPUs; the runtime does not tell init
    containers from others, so every stopped container of the pod counts.
    """
    record = case.pod_record
    if record is None or not record.previous:
        return NO_CPUS
    own = record.previous.get(case.container.name)
    bits = 0
    alone = case.requested.scope is Scope.CONTAINER  # what its pod's sum keeps is anywhere
    every = {
        name: had
        for name, had in record.previous.items()
        if not (alone and name == POD_RESERVATION_NAME)
    }
    for former in every.values() if own is None else (own,):
        bits |= former.cpus.bits
    return CPUSet.from_bits(bits & free.bits)


def pod_demand(pod: PodSandbox, demand: Demand, *, fractions: bool = True) -> Demand:
    """What the whole pod needs, as far as the runtime tells it; at least what the container needs.

    The kubelet sends the peak over init and app containers with the sandbox. A first container with
    a fraction speaks for a pod that shares. Under the kubelet's rules (not ``fractions``) it does
    not: the whole CPUs of the sum are those of others.
    """
    resources = pod.resources
    # The sum of the limits leaves out containers without one; the sum of the requests does not.
    milli = max(demand.cpu_milli, cpu_limit_milli(resources, []), cpu_request_milli(resources, []))
    exclusive = demand.exclusive_cpus
    if pod.qos is QoSClass.GUARANTEED and (exclusive or not fractions):
        # Containers with a fraction stay in the shared pool and do not count.
        exclusive = max(exclusive, milli // 1000)
    pages = dict(demand.hugepages)
    for size, amount in hugepage_demand(resources, []).items():
        pages[size] = max(pages.get(size, 0), amount)
    return replace(
        demand,
        cpu_milli=milli,
        exclusive_cpus=exclusive,
        memory_bytes=max(demand.memory_bytes, resources.memory_limit or 0),
        hugepages=pages,
    )


def cpu_provider(case: PlacementRequest, table: FreeResources) -> ResourceDemand:
    """Exclusive CPUs, or a share; under the kubelet's rules a share asks for nothing."""
    machine, demand, topology = case.machine, case.demand, case.machine.topology
    sockets = None
    if machine.settings.align_by_socket:
        sockets = {i: s.id for s in topology.sockets.values() for i in s.numa_nodes}
    if demand.exclusive_cpus or case.uses_kubelet_rules:
        return ResourceDemand(
            resource="cpu",
            need=demand.exclusive_cpus,
            capacity=machine.exclusive_capacity,
            free_amounts=table.free_exclusive_by_node,
            required=topology.numa_of(case.current_cpus) if case.current_cpus else NO_NUMA_NODES,
            sockets=sockets,
            unit=Unit.CPUS,
        )
    return ResourceDemand(
        resource="cpu",
        need=max(1, demand.cpu_milli),  # without a request it still has to run somewhere
        capacity=machine.shared_pool_milli_by_node,
        free_amounts=table.free_cpu_milli,
        sockets=sockets,
        unit=Unit.MILLI_CPUS,
    )


def memory_providers(case: PlacementRequest, table: FreeResources) -> list[ResourceDemand]:
    """Memory and huge pages, judged together, unless memory is listed or not pinned."""
    machine, demand = case.machine, case.demand
    if case.requested.bind is not Bind.CPU_MEM or table.listed_mems is not None:
        return []
    if table.kubelet_memory is not None:
        # Under the kubelet the memory of other pods is not looked at.
        guaranteed = case.pod.qos is QoSClass.GUARANTEED
        return table.kubelet_memory.memory_demands(bytes_by_type(demand)) if guaranteed else []
    wanted: list[tuple[str, int, AmountsByNode, AmountsByNode]] = []
    if demand.memory_bytes:
        wanted.append(("memory", demand.memory_bytes, machine.usable_memory, table.free_memory))
    for size, amount in sorted(demand.hugepages.items()):
        pages = machine.hugepages_capacity(size)
        capacity = {i: pages[i] for i in machine.numa_ids}
        wanted.append((hugepages_resource_name(size), amount, capacity, table.free_hugepages[size]))
    return [
        ResourceDemand(
            resource=resource,
            need=need,
            capacity=capacity,
            free_amounts=left,
            attached=machine.memory_only_nodes.attached,
            joint_key="memory",
        )
        for resource, need, capacity, left in wanted
    ]


def device_providers(case: PlacementRequest) -> list[DeviceDemand]:
    """Devices, by resource."""
    return [DeviceDemand(request=request) for request in aligned_devices(case)]


def hint_providers(case: PlacementRequest, table: FreeResources) -> list[HintProvider]:
    """Register the resources that are aligned, in the order of explanations."""
    return [
        cpu_provider(case, table),
        *memory_providers(case, table),
        *device_providers(case),
    ]


def needed_text(case: PlacementRequest) -> str:
    """What a container needs, in words: ``2 exclusive CPUs and 4 GiB memory``."""
    demand = case.demand
    parts: list[str] = []
    if demand.exclusive_cpus:
        parts.append(exclusive_cpu_count_text(demand.exclusive_cpus))
    elif demand.cpu_milli:
        least = "at least " if demand.cpu_is_lower_bound else ""
        parts.append(f"{least}{human_milli(demand.cpu_milli)}")
    if case.requested.bind is Bind.CPU_MEM:
        if demand.memory_bytes:
            parts.append(f"{human_bytes(demand.memory_bytes)} memory")
        for size, amount in sorted(demand.hugepages.items()):
            parts.append(f"{human_bytes(amount)} in huge pages of {human_bytes(size)}")
    if not parts:
        return "a place to run"
    return join_words(parts)


def exclusive_mode_text(case: PlacementRequest) -> str:
    """Which settings make CPUs that are free no free ones for this container."""
    if not case.demand.exclusive_cpus:
        return ""
    strict = case.effective_smt in (SMT.ISOLATE, SMT.FULL_CORE)
    only = case.machine.settings.isolated is IsolatedCPUs.ONLY
    return (f" (smt: {case.effective_smt})" if strict else "") + (
        " (isolatedCPUs: only)" if only else ""
    )


def cpu_shortage_text(machine: NodeModel, failed: NotEnoughCPUs, within: NUMASet | None) -> str:
    """Exclusive CPUs that are not free, or that the machine does not have."""
    need = exclusive_cpu_count_text(failed.requested)
    has = sum(machine.exclusive_capacity.values())
    if has < failed.requested:
        return shortage_clause("cpu", need, f"this machine has {has} for containers")
    if within is None:
        free, where = len(failed.free_cpus), "on all NUMA nodes together"
    else:
        free, where = sum(failed.per_numa.get(i, 0) for i in within), f"on {numa_text(within)}"
    return shortage_clause(
        "cpu", need, f"{free + failed.current_count} free for exclusive use {where}"
    )


def smt_misaligned_text(case: PlacementRequest, failed: SMTMisaligned, smt: SMT) -> str:
    """A number of CPUs that is not one of whole cores, and the nearest that are."""
    each = human_milli(failed.threads_per_core * 1000)
    need = exclusive_cpu_count_text(failed.requested)
    most = max_exclusive_total(case.desired, smt)
    fitting = " or ".join(str(n) for n in failed.fitting if n <= most)
    would = f", so {fitting} would fit" if fitting else ""
    return f"{shortage_clause('cpu', need, f'whole cores have {each} each{would}')} (smt: {smt})"


def memory_shortage_text(demand: Demand, table: FreeResources, mems: NUMASet, where: str) -> str:
    """Which memory some memory nodes have too little of; ``where`` they are, for the text."""
    wanted: list[tuple[str, int, AmountsByNode]] = [
        ("memory", demand.memory_bytes, table.free_memory)
    ]
    wanted += [
        (hugepages_resource_name(size), amount, table.free_hugepages[size])
        for size, amount in sorted(demand.hugepages.items())
    ]
    lacking = []
    for name, amount, left in wanted:
        have = sum(left.get(i, 0) for i in mems)
        if amount > have:
            lacking.append(byte_shortage_clause(name, amount, have, f" {where}"))
    return " and ".join(lacking)


def kubelet_memory_shortage_text(
    table: MemoryTable, demand: Demand, affinity: NUMASet | None
) -> str:
    """Which memory the kubelet's table lacks: on the whole machine, else where it should be."""
    needs = bytes_by_type(demand)
    where = [(table.numa_ids, "on all NUMA nodes together")]
    if affinity is not None:
        where.append((affinity, f"on {numa_text(affinity)}"))
    for mask, place in where:
        for name, need in needs.items():
            have = sum(table.free[name].get(i, 0) for i in mask)
            if have < need:
                return byte_shortage_clause(name, need, have, f" {place}")
    # Enough is free, and tied to groups of other containers.
    name, need = next(iter(needs.items()))
    have = sum(table.free[name].values())
    return byte_shortage_clause(name, need, have, ", but not together by the kubelet's rules")


def free_resources_text(case: PlacementRequest, table: FreeResources) -> str:
    """What is free of what is needed: ``NUMA node 0: 3 CPUs for exclusive use, 1 GiB memory``."""
    machine, demand = case.machine, case.demand
    parts: dict[int, str] = {}
    most = max_exclusive_total(case.desired, case.effective_smt)
    for i in machine.numa_ids:
        texts: list[str] = []
        if demand.exclusive_cpus:
            count = min(table.free_exclusive_by_node.get(i, 0), most)
            texts.append(f"{human_milli(count * 1000)} for exclusive use")
        elif demand.cpu_milli:
            texts.append(human_milli(table.free_cpu_milli.get(i, 0)))
        if case.requested.bind is Bind.CPU_MEM:
            if demand.memory_bytes:
                texts.append(f"{human_bytes(table.free_memory.get(i, 0), free=True)} memory")
            for size in sorted(demand.hugepages):
                left = table.free_hugepages[size].get(i, 0)
                texts.append(f"{human_bytes(left, free=True)} in huge pages of {human_bytes(size)}")
        text = ", ".join(texts) or human_milli(table.free_cpu_milli.get(i, 0))
        parts[i] = text + lowered_capacity_factor_text(machine, (i,))
    return per_node_text(parts)


def lowered_capacity_factor_text(machine: NodeModel, numa_nodes: Iterable[int]) -> str:
    """That NUMA nodes give less than their CPUs: `` (capacity factor 0: drained)``."""
    lowest = min((machine.settings.capacity_factor.get(i, 1.0) for i in numa_nodes), default=1.0)
    if lowest >= 1:
        return ""
    return f" (capacity factor {lowest:g}{'' if lowest else ': drained'})"


def unused_memory_nodes_text(case: PlacementRequest, table: FreeResources) -> str:
    """Name the NUMA nodes without CPUs that could have served memory, had they been let in."""
    machine = case.machine
    outside = machine.memory_only_nodes.excluded
    if not outside:
        return ""
    left = [
        sum(
            table.free_memory.get(i, 0)
            for i in machine.memory_only_nodes.attached_to(place) | place
        )
        for place in (NUMASet([i]) for i in machine.alignable_nodes)
    ]
    single = case.policy is Policy.SINGLE_NUMA_NODE
    if (max(left) if single else sum(left)) >= case.demand.memory_bytes:
        return ""
    return f"; {excluded_memory_text(machine.topology, outside)}"


def excluded_memory_text(topology: Topology, numa_nodes: NUMASet) -> str:
    """``memory-only NUMA node 2 (memory tier 4) with 64 GiB is not allowed (…)``."""
    amount = sum(topology.numa_nodes[i].memory_bytes for i in numa_nodes)
    return (
        f"{tier_text(topology, numa_nodes)} with {human_bytes(amount)} "
        f"{inflect_for_ids(numa_nodes, 'is', 'are')} not allowed (memoryOnlyNodes, memoryTiers)"
    )


def affinity_text(case: PlacementRequest, table: FreeResources, alignment: Alignment) -> str:
    """One line: what was needed, on how many NUMA nodes, and what each had."""
    policy, found = case.policy, alignment.shortage
    whole = case.requested.scope is Scope.POD
    verb = "all its containers together need" if whole else "it needs"
    needs = f"{found.text}{exclusive_mode_text(case)}; {verb} {needed_text(case)}"
    left = free_resources_text(case, table)
    if policy is Policy.RESTRICTED and found.width_conflict:
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
    outside = unused_memory_nodes_text(case, table)
    return f"{needs} on {limit} (policy {policy}); free: {left}{outside}"


MAX_NAMED_DEVICES: Final = 4
"""Devices of one kind that a sentence names; the rest is a number."""


def aligned_devices(case: PlacementRequest) -> tuple[DeviceRequest, ...]:
    """The devices whose NUMA nodes are hints: none where the pod says ``devices: ignore``.

    Where a pod is placed as a whole, so are the devices of all its containers.
    """
    container, requested = case.container, case.requested
    if requested.devices is DeviceUse.IGNORE:
        return ()
    if requested.scope is Scope.POD:
        return container.pod_devices or container.devices
    return container.devices


def device_nodes_first(
    case: PlacementRequest, affinity: NUMASet, room: Mapping[int, int], need: int
) -> NUMASet:
    """The NUMA nodes of an affinity that are begun with: those with most of the devices."""
    devices = [device for request in aligned_devices(case) for device in request.devices]
    counts = Counter(i for device in devices for i in device.numa_nodes if i in affinity)
    if not counts:
        return affinity
    first: list[int] = []
    # Most devices first, then by id, until there are enough CPUs.
    for i in sorted(affinity, key=lambda i: (-counts[i], i)):
        if need > 0:
            first.append(i)
            need -= room.get(i, 0)
    return NUMASet(first)


def device_step_sentences(case: PlacementRequest, affinity: NUMASet | None) -> tuple[str, ...]:
    """What the devices had to do with it, in sentences."""
    container = case.container
    if case.requested.devices is DeviceUse.IGNORE:
        names = [
            _device_names_text(one.resource, one.devices)
            for one in container.devices
            if one.devices
        ]
        return (f"devices: ignore, so {join_words(names)} gave no hint",) if names else ()
    said: list[str] = []
    if affinity is not None:
        for request in aligned_devices(case):
            said += _device_request_sentences(request, affinity)
    return (*said, *container.device_notes)


def _device_request_sentences(request: DeviceRequest, affinity: NUMASet) -> list[str]:
    said: list[str] = []
    within = frozenset(affinity)
    inside = [d for d in request.devices if d.numa_nodes & within]
    outside = [d for d in request.devices if d.numa_nodes and not d.numa_nodes & within]
    if inside:
        verb = "are" if len(inside) > 1 else "is"
        what = _device_names_text(request.resource, inside)
        said.append(f"on {numa_text(affinity)} because its {what} {verb} there")
    if outside:
        nodes = NUMASet(i for d in outside for i in d.numa_nodes)
        verb = "are" if len(outside) > 1 else "is"
        said.append(
            f"although its {_device_names_text(request.resource, outside)} {verb} on "
            f"{numa_text(nodes)}, "
            f"which is not among them"
        )
    return said


def _device_names_text(kind: str, devices: tuple[Device, ...] | list[Device]) -> str:
    """``GPU 0000:3b:00.0``, ``GPU 0000:3b:00.0 and 3 more``."""
    if len(devices) == 1:
        return f"{kind} {devices[0].id}"
    ids = [d.id for d in devices]
    more = f" and {len(ids) - MAX_NAMED_DEVICES} more" if len(ids) > MAX_NAMED_DEVICES else ""
    return f"{kind} {', '.join(ids[:MAX_NAMED_DEVICES])}{more}"
