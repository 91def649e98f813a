"""What a computed placement looks at: a table of what is free, and what each resource asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from nri_numa.engine.accounting import exclusive_left
from nri_numa.engine.align.hints import DeviceDemand, HintDemand, ResourceDemand
from nri_numa.engine.case import Case
from nri_numa.engine.decision import Machine
from nri_numa.engine.memory.grants import MemoryTable
from nri_numa.engine.memory.memory_manager import memory_table, needs_of, pages_name
from nri_numa.engine.place.device_words import aligned_devices
from nri_numa.engine.place.quotas import kept_for_pool, ownable
from nri_numa.engine.request.demand import Demand
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.workload import (
    SMT,
    Bind,
    Load,
    PodSandbox,
    QoSClass,
)
from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


@dataclass(slots=True, kw_only=True)
class ResourceTable:
    """What one decision looks at; built once, filled as needed, dropped with the decision.

    Attributes:
        cpu_left: by NUMA node, thousandths of a CPU that can be promised.
        memory_left, hugepages_left: bytes.
        pool: the shared pool.
        free: CPUs that may be owned: of the pool, or isolated.
        former: CPUs of them that the pod had before; empty when the container owns none.
        free_by_node: how many of them the container could own; see
            `nri_numa.engine.accounting.exclusive_left`. Empty when it owns none.
        listed: the memory nodes that ``numamem`` names; None when memory is computed.
        kubelet: the kubelet's memory state, where its rules are kept; else None.
    """

    cpu_left: dict[int, int]
    memory_left: dict[int, int]
    hugepages_left: dict[int, Mapping[int, int]]
    pool: CPUSet
    free: CPUSet
    former: CPUSet
    free_by_node: dict[int, int]
    listed: NUMASet | None = None
    kubelet: MemoryTable | None = None


def resource_table(case: Case) -> ResourceTable:
    """Look up what is free, once for the whole decision."""
    machine, state, demand, requested = case.machine, case.state, case.demand, case.requested
    pool = state.pool(machine.topology, machine.settings)
    free = ownable(machine, state)
    cpu_left = case.cpu_left if demand.exclusive_cpus else case.shared_left
    free_by_node: dict[int, int] = {}
    if demand.exclusive_cpus:
        free = free - kept_for_pool(machine, state, pool, free)
        free = free - kept_for_groups(machine, state, pool, free, pair=case.smt is SMT.PAIR)
        free_by_node = exclusive_left(machine, state, free, case.smt, cpu_left)
        if requested.slots is not None and (chosen := requested.slots.by_node):
            # The kubelet has chosen the NUMA nodes, and how many CPUs of each.
            free = free & machine.topology.cpus_of(NUMASet(chosen))
            free_by_node = {i: min(n, chosen.get(i, 0)) for i, n in free_by_node.items()}
    kubelet: MemoryTable | None = None
    memory_left: dict[int, int] = {}
    hugepages_left: dict[int, Mapping[int, int]] = {}
    if requested.bind is Bind.CPU_MEM:
        if machine.settings.kubelet_memory:
            kubelet = memory_table(machine, state, demand.hugepages)
            memory_left = kubelet.free("memory")
            hugepages_left = {size: kubelet.free(pages_name(size)) for size in demand.hugepages}
        else:
            memory_left = case.memory_left
            if demand.hugepages:
                hugepages_left = case.hugepages_left()
    return ResourceTable(
        cpu_left=cpu_left,
        memory_left=memory_left,
        hugepages_left=hugepages_left,
        pool=pool,
        free=free,
        former=_former(case, free) if demand.exclusive_cpus else NO_CPUS,
        free_by_node=free_by_node,
        kubelet=kubelet,
        listed=None if requested.numamem is None else case.requested.listed_mems,
    )


def kept_for_groups(
    machine: Machine,
    state: NodeState,
    pool: CPUSet,
    free: CPUSet,
    held: CPUSet = NO_CPUS,
    *,
    pair: bool = False,
) -> CPUSet:
    """CPUs that are not given away, so that no group of shared containers leaves its NUMA nodes.

    One for each group that has nothing there but free CPUs; one may do for several.

    Args:
        machine: where.
        state: whose containers share.
        pool: the shared pool.
        free: CPUs that may be owned.
        held: CPUs of a container that keeps them.
        pair: the other threads of cores in use are what the container looks for.
    """
    kept = 0
    for key in sorted(state.groups):
        if key < 0:
            continue
        theirs = pool & machine.topology.cpus_of(NUMASet.from_bits(key))
        spare = theirs - held
        if not spare or theirs - free or spare.bits & kept:
            continue
        # The least loss is a thread whose core is in use already, or one of a whole core where
        # such threads are wanted; then the highest number.
        whole = machine.index.members(machine.index.whole(free.bits))
        bits = spare.bits & (whole if pair else ~whole) or spare.bits
        kept |= 1 << bits.bit_length() - 1
    return CPUSet.from_bits(kept)


def _former(case: Case, free: CPUSet) -> CPUSet:
    """Free CPUs to give back to a restarted container, else those a stopped one of its pod had.

    The second is the kubelet's reuse of init container CPUs; the runtime does not tell init
    containers from others, so every stopped container of the pod counts.
    """
    record = case.record
    if record is None or not record.former:
        return NO_CPUS
    own = record.former.get(case.container.name)
    bits = 0
    for former in record.former.values() if own is None else (own,):
        bits |= former.cpus.bits
    return CPUSet.from_bits(bits & free.bits)


def pod_demand(pod: PodSandbox, demand: Demand, *, fractions: bool = True) -> Demand:
    """What the whole pod needs, as far as the runtime tells it; at least what the container needs.

    The kubelet sends the peak over init and app containers with the sandbox.

    Args:
        pod: for the sum.
        demand: of its first container.
        fractions: a first container with a fraction speaks for a pod that shares. Under the
            kubelet's rules it does not: the whole CPUs of the sum are those of others.
    """
    resources = pod.resources
    milli = demand.cpu_milli
    if resources.cpu_quota and resources.cpu_period and resources.cpu_quota > 0:
        milli = max(milli, resources.cpu_quota * 1000 // resources.cpu_period)
    # The sum of the limits leaves out containers without one; the sum of the requests does not.
    if resources.cpu_shares and resources.cpu_shares > 2:
        milli = max(milli, -(-resources.cpu_shares * 1000 // 1024))
    exclusive = demand.exclusive_cpus
    if pod.qos is QoSClass.GUARANTEED and (exclusive or not fractions):
        # Containers with a fraction stay in the shared pool and do not count.
        exclusive = max(exclusive, milli // 1000)
    memory = demand.memory_bytes
    if resources.memory_limit and resources.memory_limit > 0:
        memory = max(memory, resources.memory_limit)
    hugepages = dict(demand.hugepages)
    for size, amount in resources.hugepages.items():
        hugepages[size] = max(hugepages.get(size, 0), amount)
    return replace(
        demand,
        cpu_milli=milli,
        exclusive_cpus=exclusive,
        memory_bytes=memory,
        hugepages=hugepages,
    )


def demands(case: Case, table: ResourceTable) -> list[HintDemand]:
    """What each resource asks for, CPU first, in a fixed order."""
    machine, demand = case.machine, case.demand
    sockets = _sockets(machine) if machine.settings.align_by_socket else None
    if demand.exclusive_cpus:
        cpu = ResourceDemand(
            resource="cpu",
            need=demand.exclusive_cpus,
            capacity=machine.whole_cpus,
            available=table.free_by_node,
            required=machine.topology.numa_of(case.held) if case.held else NO_NUMA_NODES,
            sockets=sockets,
            unit="cpus",
        )
    elif case.by_kubelet:
        cpu = ResourceDemand(
            resource="cpu", need=0, capacity=machine.whole_cpus, available={}, unit="cpus"
        )
    else:
        cpu = ResourceDemand(
            resource="cpu",
            # Something that asks for nothing still has to run somewhere.
            need=max(1, demand.cpu_milli),
            capacity=machine.cpu_milli,
            available=table.cpu_left,
            sockets=sockets,
            unit="millicpu",
        )
    demands: list[HintDemand] = [cpu]
    if case.requested.bind is Bind.CPU_MEM and table.listed is None:
        demands += _memory_demands(case, table)
    if case.container.devices or case.container.pod_devices:
        demands += [DeviceDemand(request=request) for request in aligned_devices(case)]
    return demands


def _memory_demands(case: Case, table: ResourceTable) -> list[HintDemand]:
    machine, demand = case.machine, case.demand
    if table.kubelet is not None:
        # The others' memory is nobody's business, under the kubelet.
        guaranteed = case.pod.qos is QoSClass.GUARANTEED
        return [*table.kubelet.demands(needs_of(demand))] if guaranteed else []
    found: list[HintDemand] = []
    if demand.memory_bytes:
        found.append(
            ResourceDemand(
                resource="memory",
                need=demand.memory_bytes,
                capacity=machine.usable_memory,
                available=table.memory_left,
                near=machine.tiers.near,
                share="memory",
            )
        )
    for size, amount in sorted(demand.hugepages.items()):
        pages = machine.hugepages_capacity(size)
        found.append(
            ResourceDemand(
                resource=pages_name(size),
                need=amount,
                capacity={i: pages[i] for i in machine.numa_ids},
                available=table.hugepages_left[size],
                near=machine.tiers.near,
                share="memory",
            )
        )
    return found


def _sockets(machine: Machine) -> dict[int, int]:
    return {i: socket.id for socket in machine.topology.sockets.values() for i in socket.numa_nodes}


def loads_of(state: NodeState) -> dict[int, Load]:
    """CPU to the load of the exclusive container that owns it, where it told one."""
    return {
        cpu: a.load
        for a in state.allocations.values()
        if a.owned and a.load is not None
        for cpu in a.cpus
    }
