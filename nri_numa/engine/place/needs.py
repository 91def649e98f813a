"""Free resources and needs of a computed placement, as hint providers and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from nri_numa.engine.accounting import (
    count_free_exclusive_by_node,
    cpus_above_floors,
    exclusive_candidate_cpus,
    max_exclusive_above_pool_floor,
    whole_core_counts,
)
from nri_numa.engine.align.hints import (
    AmountsByNode,
    DeviceDemand,
    HintProvider,
    ResourceDemand,
    add_attached_to_cpu_nodes,
)
from nri_numa.engine.align.policies import Alignment, byte_shortage_clause, shortage_clause
from nri_numa.engine.cpus.allocator import NotEnoughCPUs, SMTMisaligned
from nri_numa.engine.decision import PlacementRequest
from nri_numa.engine.node_model import NodeModel, tier_text
from nri_numa.engine.place.memory import (
    MemoryTable,
    bytes_by_type,
    memory_table,
)
from nri_numa.engine.request.demand import (
    Demand,
    cpu_limit_milli,
    cpu_request_milli,
    hugepage_demand,
)
from nri_numa.engine.state import POD_RESERVATION_NAME
from nri_numa.model.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet, union_cpus
from nri_numa.model.machine import (
    Topology,
    Unit,
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
    DeviceAlignmentMode,
    DeviceRequest,
    PodSandbox,
    Policy,
    QoSClass,
    Scope,
)
from nri_numa.text import hugepages_resource_name, human_bytes


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
    """Everything free that one decision looks at; built once and dropped with the decision.

    Attributes:
        free_cpus: CPUs that may be owned: of the pool, or isolated.
        previous_cpus: CPUs of them that the pod had before; empty when the container owns none.
        free_exclusive_by_node: how many of them the container could own; see
            `nri_numa.engine.accounting.count_free_exclusive_by_node`. Empty when it owns none.
        kubelet_memory: the kubelet's memory state, where its rules are kept; else None.
    """

    free_cpu_milli: dict[int, int]
    free_memory: AmountsByNode
    free_hugepages: dict[int, Mapping[int, int]]
    free_cpus: CPUSet
    previous_cpus: CPUSet
    free_exclusive_by_node: dict[int, int]
    listed_mems: NUMASet | None = None
    kubelet_memory: MemoryTable | None = None


def free_resources(case: PlacementRequest) -> FreeResources:
    """Compute free resources, once for the whole decision."""
    node, demand, requested = case.node, case.demand, case.requested
    # One that runs keeps what it has.
    free_cpus = exclusive_candidate_cpus(node, 1 if case.current_cpus else demand.exclusive_cpus)
    cpu_left = node.free_cpu_milli if demand.exclusive_cpus else node.free_shared_milli
    free_by_node: dict[int, int] = {}
    if demand.exclusive_cpus:
        free_cpus = cpus_above_floors(node, free_cpus, pair=case.effective_smt is SMT.PAIR)
        free_by_node = count_free_exclusive_by_node(node, free_cpus, case.effective_smt, cpu_left)
        if case.effective_smt is SMT.FULL_CORE and not case.uses_kubelet_rules:
            need = demand.exclusive_cpus
            free_by_node = whole_core_counts(node.machine, free_cpus, free_by_node, need)
        if requested.slots is not None and (slot_counts := requested.slots.by_node):
            # The kubelet has chosen the NUMA nodes, and how many CPUs of each.
            free_cpus = free_cpus & node.machine.topology.cpus_of(NUMASet(slot_counts))
            free_by_node = {i: min(n, slot_counts.get(i, 0)) for i, n in free_by_node.items()}
    kubelet: MemoryTable | None = None
    memory_left: AmountsByNode = {}
    hugepages_left: dict[int, Mapping[int, int]] = {}
    if requested.bind is Bind.CPU_MEM:
        if node.machine.settings.kubelet.memory:
            kubelet = memory_table(node, demand.hugepages)
            memory_left = kubelet.free["memory"]
            hugepages_left = {
                size: kubelet.free[hugepages_resource_name(size)] for size in demand.hugepages
            }
        else:
            memory_left = node.free_memory
            if demand.hugepages:
                hugepages_left = case.free_hugepages()
    return FreeResources(
        free_cpu_milli=cpu_left,
        free_memory=memory_left,
        free_hugepages=hugepages_left,
        free_cpus=free_cpus,
        previous_cpus=_previous_cpus(case, free_cpus) if demand.exclusive_cpus else NO_CPUS,
        free_exclusive_by_node=free_by_node,
        kubelet_memory=kubelet,
        listed_mems=None if requested.numamem is None else requested.listed_mems,
    )


def _previous_cpus(case: PlacementRequest, free_cpus: CPUSet) -> CPUSet:
    """Free CPUs to give back to a restarted container, else those a stopped one of its pod had.

    The second is the kubelet's reuse of init container CPUs; the runtime does not tell init
    containers from others, so every stopped container of the pod counts.
    """
    record = case.pod_record
    if record is None or not record.previous:
        return NO_CPUS
    instance = record.previous.get(case.container.name)
    # What the pod's sum keeps is anywhere, which is no place for scope container.
    ignored = POD_RESERVATION_NAME if case.requested.scope is Scope.CONTAINER else None
    instances = [p for name, p in record.previous.items() if name != ignored]
    return free_cpus & union_cpus(p.cpus for p in (instances if instance is None else [instance]))


def pod_demand(pod: PodSandbox, demand: Demand, *, fractions: bool = True) -> Demand:
    """Demand of the whole pod, as far as the runtime tells it; at least that of the container.

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
    """Build the provider of CPUs; under the kubelet's rules shared CPUs have no hint."""
    machine, demand, topology = case.node.machine, case.demand, case.node.machine.topology
    sockets = None
    if machine.settings.kubelet.align_by_socket:
        sockets = {i: s.id for s in topology.sockets.values() for i in s.numa_nodes}
    if demand.exclusive_cpus or case.uses_kubelet_rules:
        return ResourceDemand(
            resource="cpu",
            need=demand.exclusive_cpus,
            capacity=machine.exclusive_capacity_for(demand.exclusive_cpus),
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
    machine, demand = case.node.machine, case.demand
    if case.requested.bind is not Bind.CPU_MEM or table.listed_mems is not None:
        return []
    if table.kubelet_memory is not None:
        # Under the kubelet the memory of other pods is not looked at.
        guaranteed = case.pod.qos is QoSClass.GUARANTEED
        return table.kubelet_memory.memory_demands(bytes_by_type(demand)) if guaranteed else []
    amounts: list[tuple[str, int, AmountsByNode, AmountsByNode]] = []
    if demand.memory_bytes:
        amounts.append(("memory", demand.memory_bytes, machine.usable_memory, table.free_memory))
    for size, amount in sorted(demand.hugepages.items()):
        pages = machine.hugepages_capacity(size)
        capacity = {i: pages[i] for i in machine.assignable_numa_nodes}
        name = hugepages_resource_name(size)
        amounts.append((name, amount, capacity, table.free_hugepages[size]))
    return [
        ResourceDemand(
            resource=resource,
            need=need,
            capacity=capacity,
            free_amounts=free_amounts,
            attached=machine.memory_only_nodes.attached,
            joint_key="memory",
        )
        for resource, need, capacity, free_amounts in amounts
    ]


def hint_providers(case: PlacementRequest, table: FreeResources) -> list[HintProvider]:
    """Register the resources that are aligned, in the order of explanations."""
    return [
        cpu_provider(case, table),
        *memory_providers(case, table),
        *[DeviceDemand(request=request) for request in devices_giving_hints(case)],
    ]


def needed_text(case: PlacementRequest) -> str:
    """The needs of a container, in words: ``2 exclusive CPUs and 4 GiB memory``."""
    demand = case.demand
    parts: list[str] = []
    if demand.exclusive_cpus:
        parts.append(exclusive_cpu_count_text(demand.exclusive_cpus))
    elif demand.cpu_milli:
        bound_text = "at least " if demand.cpu_is_lower_bound else ""
        parts.append(f"{bound_text}{human_milli(demand.cpu_milli)}")
    if case.requested.bind is Bind.CPU_MEM:
        if demand.memory_bytes:
            parts.append(f"{human_bytes(demand.memory_bytes)} memory")
        for size, amount in sorted(demand.hugepages.items()):
            parts.append(f"{human_bytes(amount)} in huge pages of {human_bytes(size)}")
    return join_words(parts) or "a CPU"


def exclusive_restrictions_text(case: PlacementRequest) -> str:
    """Clause about settings that keep free CPUs from this container."""
    if not case.demand.exclusive_cpus:
        return ""
    strict = case.effective_smt in (SMT.ISOLATE, SMT.FULL_CORE)
    return (f" (smt: {case.effective_smt})" if strict else "") + isolated_mode_text(case)


def isolated_mode_text(case: PlacementRequest) -> str:
    """Clause about the setting that keeps isolated, or other, free CPUs from this container."""
    isolated = case.node.machine.settings.isolated
    avoided = case.node.machine.avoided_isolated_cpus(case.demand.exclusive_cpus)
    if isolated is IsolatedCPUs.ONLY or exclusive_candidate_cpus(case.node) & avoided:
        return f" (isolatedCPUs: {isolated})"
    return ""


def cpu_shortage_text(machine: NodeModel, failed: NotEnoughCPUs, affinity: NUMASet | None) -> str:
    """Clause about exclusive CPUs that are not free, or that the machine does not have."""
    need = exclusive_cpu_count_text(failed.requested)
    capacity = sum(machine.exclusive_capacity_for(failed.requested).values())
    if capacity < failed.requested:
        return shortage_clause("cpu", need, f"this machine has {capacity} for containers")
    if affinity is None:
        free_count, nodes_text = len(failed.free_cpus), "on all NUMA nodes together"
    else:
        free_count = sum(failed.per_numa.get(i, 0) for i in affinity)
        nodes_text = f"on {numa_text(affinity)}"
    free_count += failed.current_count
    return shortage_clause("cpu", need, f"{free_count} free for exclusive use {nodes_text}")


def smt_misaligned_text(case: PlacementRequest, failed: SMTMisaligned, smt: SMT) -> str:
    """Clause about a number of CPUs that is not whole cores, and the nearest numbers."""
    core_size = human_milli(failed.threads_per_core * 1000)
    need = exclusive_cpu_count_text(failed.requested)
    max_count = max_exclusive_above_pool_floor(case.node, smt, failed.requested)
    fitting = " or ".join(str(n) for n in failed.fitting if n <= max_count)
    fitting_text = f", so {fitting} would fit" if fitting else ""
    clause = shortage_clause("cpu", need, f"whole cores have {core_size} each{fitting_text}")
    return f"{clause} (smt: {smt})"


def memory_shortage_text(
    demand: Demand, table: FreeResources, mems: NUMASet, nodes_text: str
) -> str:
    """Which memory some memory nodes have too little of; ``nodes_text`` says where they are."""
    amounts = [("memory", demand.memory_bytes, table.free_memory)]
    for size, amount in sorted(demand.hugepages.items()):
        amounts.append((hugepages_resource_name(size), amount, table.free_hugepages[size]))
    clauses = []
    for name, amount, free_amounts in amounts:
        free_bytes = sum(free_amounts.get(i, 0) for i in mems)
        if amount > free_bytes:
            clauses.append(byte_shortage_clause(name, amount, free_bytes, f" {nodes_text}"))
    return join_words(clauses)


def kubelet_memory_shortage_text(
    table: MemoryTable, demand: Demand, affinity: NUMASet | None
) -> str:
    """Which memory the kubelet's table lacks: on the whole machine, else where it should be."""
    bytes_needed = bytes_by_type(demand)
    masks = [(table.numa_ids, "on all NUMA nodes together")]
    if affinity is not None:
        masks.append((affinity, f"on {numa_text(affinity)}"))
    for mask, nodes_text in masks:
        for name, need in bytes_needed.items():
            free_bytes = sum(table.free[name].get(i, 0) for i in mask)
            if free_bytes < need:
                return byte_shortage_clause(name, need, free_bytes, f" {nodes_text}")
    # Enough is free, and tied to groups of other containers.
    name, need = next(iter(bytes_needed.items()))
    free_bytes = sum(table.free[name].values())
    return byte_shortage_clause(name, need, free_bytes, ", but not together by the kubelet's rules")


def free_resources_text(case: PlacementRequest, table: FreeResources) -> str:
    """Free amounts of what is needed: ``NUMA node 0: 3 CPUs for exclusive use, 1 GiB memory``."""
    machine, demand = case.node.machine, case.demand
    parts: dict[int, str] = {}
    max_count = max_exclusive_above_pool_floor(case.node, case.effective_smt, demand.exclusive_cpus)
    for i in machine.assignable_numa_nodes:
        texts: list[str] = []
        if demand.exclusive_cpus:
            count = min(table.free_exclusive_by_node.get(i, 0), max_count)
            texts.append(f"{human_milli(count * 1000)} for exclusive use")
        elif demand.cpu_milli:
            texts.append(human_milli(table.free_cpu_milli.get(i, 0)))
        if case.requested.bind is Bind.CPU_MEM:
            if demand.memory_bytes:
                texts.append(f"{human_bytes(table.free_memory.get(i, 0), free=True)} memory")
            for size in sorted(demand.hugepages):
                free_text = human_bytes(table.free_hugepages[size].get(i, 0), free=True)
                texts.append(f"{free_text} in huge pages of {human_bytes(size)}")
        text = ", ".join(texts) or human_milli(table.free_cpu_milli.get(i, 0))
        parts[i] = text + lowered_capacity_factor_text(machine, (i,))
    return per_node_text(parts)


def lowered_capacity_factor_text(machine: NodeModel, numa_nodes: Iterable[int]) -> str:
    """Say that NUMA nodes give less than their CPUs: `` (capacity factor 0: drained)``."""
    factors = machine.settings.capacity_factor
    factor = min((factors.get(i, 1.0) for i in numa_nodes), default=1.0)
    if factor >= 1:
        return ""
    return f" (capacity factor {factor:g}{'' if factor else ': drained'})"


def excluded_memory_nodes_text(case: PlacementRequest, table: FreeResources) -> str:
    """Name excluded memory-only NUMA nodes that could have provided memory."""
    machine = case.node.machine
    excluded = machine.memory_only_nodes.excluded
    if not excluded:
        return ""
    by_node = add_attached_to_cpu_nodes(machine.memory_only_nodes.attached, table.free_memory)
    free_bytes = [by_node.get(i, 0) for i in machine.alignable_nodes]
    single = case.policy is Policy.SINGLE_NUMA_NODE
    if (max(free_bytes) if single else sum(free_bytes)) >= case.demand.memory_bytes:
        return ""
    return f"; {excluded_memory_text(machine.topology, excluded)}"


def excluded_memory_text(topology: Topology, numa_nodes: NUMASet) -> str:
    """``memory-only NUMA node 2 (memory tier 4) with 64 GiB is excluded (…)``."""
    amount = sum(topology.numa_nodes[i].memory_bytes for i in numa_nodes)
    return (
        f"{tier_text(topology, numa_nodes)} with {human_bytes(amount)} "
        f"{inflect_for_ids(numa_nodes, 'is', 'are')} excluded (memoryOnlyNUMANodes)"
    )


def alignment_shortage_text(
    case: PlacementRequest, table: FreeResources, alignment: Alignment
) -> str:
    """One line: what was needed, on how many NUMA nodes, and what each had."""
    policy, shortage = case.policy, alignment.shortage
    is_pod = case.requested.scope is Scope.POD
    verb = "all its containers together need" if is_pod else "it needs"
    needs_text = f"{shortage.text}{exclusive_restrictions_text(case)}; {verb} {needed_text(case)}"
    free_text = free_resources_text(case, table)
    if policy is Policy.RESTRICTED and shortage.width_conflict:
        # The kubelet's verdict. More free CPUs or memory would not change it.
        return (
            f"{needs_text}; policy {policy} requires the same number of NUMA nodes for all, as the "
            "kubelet's does (kubeletCompatibility: memory); waiting does not help, best-effort "
            f"does; free: {free_text}"
        )
    limit = "no more NUMA nodes than an empty machine would need"
    if policy is Policy.SINGLE_NUMA_NODE:
        limit = "one NUMA node"
    outside = excluded_memory_nodes_text(case, table)
    return f"{needs_text} on {limit} (policy {policy}); free: {free_text}{outside}"


MAX_NAMED_DEVICES: Final = 4
"""Devices of one kind that a sentence names; the rest is a number."""


def devices_giving_hints(case: PlacementRequest) -> tuple[DeviceRequest, ...]:
    """The devices whose NUMA nodes are hints: none where the pod says ``devices: ignore``.

    Where a pod is placed as a whole, so are the devices of all its containers.
    """
    container, requested = case.container, case.requested
    if requested.devices is DeviceAlignmentMode.IGNORE:
        return ()
    if requested.scope is Scope.POD:
        return container.pod_devices or container.devices
    return container.devices


def affinity_nodes_with_most_devices(
    case: PlacementRequest, affinity: NUMASet, room: Mapping[int, int], need: int
) -> NUMASet:
    """NUMA nodes of an affinity to take first: those with most of the devices."""
    devices = [device for request in devices_giving_hints(case) for device in request.devices]
    counts = Counter(i for device in devices for i in device.numa_nodes if i in affinity)
    if not counts:
        return affinity
    nodes: list[int] = []
    # Most devices first, then by id, until there are enough CPUs.
    for i in sorted(affinity, key=lambda i: (-counts[i], i)):
        if need > 0:
            nodes.append(i)
            need -= room.get(i, 0)
    return NUMASet(nodes)


def device_step_sentences(case: PlacementRequest, affinity: NUMASet | None) -> tuple[str, ...]:
    """Build sentences about devices and the chosen NUMA nodes."""
    container = case.container
    if case.requested.devices is DeviceAlignmentMode.IGNORE:
        names = [_device_names_text(r.resource, r.devices) for r in container.devices if r.devices]
        return (f"devices: ignore, so {join_words(names)} are ignored",) if names else ()
    sentences: list[str] = []
    if affinity is not None:
        for request in devices_giving_hints(case):
            sentences += _device_request_sentences(request, affinity)
    return (*sentences, *container.device_notes)


def _device_request_sentences(request: DeviceRequest, affinity: NUMASet) -> list[str]:
    sentences: list[str] = []
    node_ids = frozenset(affinity)
    inside = [d for d in request.devices if d.numa_nodes & node_ids]
    outside = [d for d in request.devices if d.numa_nodes and not d.numa_nodes & node_ids]
    if inside:
        verb = "are" if len(inside) > 1 else "is"
        names = _device_names_text(request.resource, inside)
        sentences.append(f"on {numa_text(affinity)}, because its {names} {verb} there")
    if outside:
        nodes = NUMASet(i for d in outside for i in d.numa_nodes)
        verb = "are" if len(outside) > 1 else "is"
        names = _device_names_text(request.resource, outside)
        sentences.append(
            f"its {names} {verb} on {numa_text(nodes)}, outside of {numa_text(affinity)}"
        )
    return sentences


def _device_names_text(kind: str, devices: tuple[Device, ...] | list[Device]) -> str:
    """``GPU 0000:3b:00.0``, ``GPU 0000:3b:00.0 and 3 more``."""
    if len(devices) == 1:
        return f"{kind} {devices[0].id}"
    ids = [d.id for d in devices]
    rest_text = f" and {len(ids) - MAX_NAMED_DEVICES} more" if len(ids) > MAX_NAMED_DEVICES else ""
    return f"{kind} {', '.join(ids[:MAX_NAMED_DEVICES])}{rest_text}"
