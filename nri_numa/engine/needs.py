"""What a computed placement looks at: books of what is free, and what each resource asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.demand import Demand
from nri_numa.engine.hints import Demand as AnyDemand
from nri_numa.engine.hints import DeviceDemand, ResourceDemand
from nri_numa.engine.memory import Cells, cells
from nri_numa.engine.placement import (
    human_bytes,
)
from nri_numa.engine.smt import partners
from nri_numa.engine.state import NodeState
from nri_numa.engine.workload import (
    SMT,
    Bind,
    Container,
    Load,
    PodSandbox,
    QoSClass,
    Strategy,
    Wishes,
)
from nri_numa.topology.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


@dataclass(slots=True, kw_only=True)
class Books:
    """What one decision looks at; built once, filled as needed, dropped with the decision."""

    cpu_left: dict[int, int]
    memory_left: dict[int, int]
    hugepages_left: dict[int, Mapping[int, int]]
    pool: CPUSet
    free: CPUSet
    free_by_node: dict[int, int]


def open_books(
    machine: Machine, state: NodeState, demand: Demand, wishes: Wishes, reading: Reading | None
) -> Books:
    """Look up what is free, once for the whole decision."""
    pool = state.pool(machine.topology, machine.settings)
    free = pool - machine.settings.reserved_cpus - state.listed_cpus
    with_memory = wishes.bind is Bind.CPU_MEM
    free_by_node: dict[int, int] = {}
    if demand.exclusive_cpus:
        bits = free.bits
        for i, cpus in machine.node_cpus.items():
            free_by_node[i] = (cpus.bits & bits).bit_count()
        _keep_group_pools(machine, state, pool, free, free_by_node)
        if wishes.smt in (SMT.FULL_CORE, SMT.ISOLATE):
            _count_cores(machine, free, wishes.smt, free_by_node)
    return Books(
        cpu_left=machine.cpu_left(state),
        memory_left=machine.memory_left(state, reading) if with_memory else {},
        hugepages_left={
            size: machine.hugepages_left(size, state, reading) for size in demand.hugepages
        }
        if with_memory
        else {},
        pool=pool,
        free=free,
        free_by_node=free_by_node,
    )


def _keep_group_pools(
    machine: Machine, state: NodeState, pool: CPUSet, free: CPUSet, free_by_node: dict[int, int]
) -> None:
    """Leave one CPU where shared containers are bound and only free CPUs would serve them."""
    for key in state.groups:
        if key < 0:
            continue
        numa_nodes = NUMASet.from_bits(key)
        if len(numa_nodes) != 1:
            continue
        i = numa_nodes.first
        cpus = machine.node_cpus.get(i, NO_CPUS)
        if free_by_node.get(i) and not (pool & cpus) - free:
            free_by_node[i] -= 1


def _count_cores(machine: Machine, free: CPUSet, smt: SMT, free_by_node: dict[int, int]) -> None:
    """Replace free CPUs by what whole cores give: all their threads, or one each."""
    counts = dict.fromkeys(free_by_node, 0)
    bits = free.bits
    for core in machine.topology.cores.values():
        if core.numa_node in counts and not core.cpus.bits & ~bits:
            counts[core.numa_node] += len(core.cpus) if smt is SMT.FULL_CORE else 1
    for i, count in counts.items():
        free_by_node[i] = min(free_by_node[i], count)


def rank(
    machine: Machine,
    state: NodeState,
    wishes: Wishes,
    demand: Demand,
    books: Books,
    *,
    exclusive: bool,
) -> dict[int, int] | None:
    """Rank NUMA nodes by strategy: 0 is tried first among equally good ones.

    Order for spread: with memory, NUMA nodes whose CPU suffices before others, then (``smt: pair``)
    those with enough CPUs beside opposite loads, most memory left, most CPU left, lowest id;
    without memory the same but for the first and the third. Pack is the reverse in amounts.
    """
    settings = machine.settings
    if settings.kubelet_ties:
        return None
    sign = -1 if settings.strategy is Strategy.SPREAD else 1
    cpu = books.free_by_node if exclusive else books.cpu_left
    need = demand.exclusive_cpus if exclusive else demand.cpu_milli
    memory = books.memory_left if demand.memory_bytes else {}
    beside = _beside_opposite(machine, state, wishes, books) if exclusive else {}
    keys = sorted(
        [
            (
                bool(memory) and cpu.get(i, 0) < need,
                bool(beside) and beside.get(i, 0) < need,
                sign * memory.get(i, 0),
                sign * cpu.get(i, 0),
                i,
            )
            for i in machine.numa_ids
        ]
    )
    return {key[-1]: place for place, key in enumerate(keys)}


def _beside_opposite(
    machine: Machine, state: NodeState, wishes: Wishes, books: Books
) -> dict[int, int]:
    """By NUMA node, free CPUs of cores that run opposite loads only; for ``smt: pair``."""
    if wishes.smt is not SMT.PAIR:
        return {}
    known = partners(wishes.load, loads_of(state))
    index = machine.index
    cores = index.touched(known.opposite) & ~index.touched(known.same)
    bits = index.members(cores) & books.free.bits
    return (
        {i: (cpus.bits & bits).bit_count() for i, cpus in machine.node_cpus.items()} if bits else {}
    )


def pod_demand(pod: PodSandbox, demand: Demand) -> Demand:
    """What the whole pod needs, as far as the runtime tells it; at least what the container needs.

    The kubelet sends the peak over init and app containers with the sandbox.
    """
    resources = pod.resources
    milli = demand.cpu_milli
    if resources.cpu_quota and resources.cpu_period and resources.cpu_quota > 0:
        milli = max(milli, resources.cpu_quota * 1000 // resources.cpu_period)
    # The sum of the limits leaves out containers without one; the sum of the requests does not.
    if resources.cpu_shares and resources.cpu_shares > 2:
        milli = max(milli, -(-resources.cpu_shares * 1000 // 1024))
    exclusive = demand.exclusive_cpus
    if exclusive and pod.qos is QoSClass.GUARANTEED:
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


def demands(
    machine: Machine,
    pod: PodSandbox,
    container: Container,
    demand: Demand,
    books: Books,
    wishes: Wishes,
    held: CPUSet,
    state: NodeState,
) -> list[AnyDemand]:
    """What each resource asks for, CPU first, in a fixed order."""
    sockets = _sockets(machine) if machine.settings.align_by_socket else None
    if demand.exclusive_cpus:
        cpu = ResourceDemand(
            resource="cpu",
            need=demand.exclusive_cpus,
            capacity=machine.whole_cpus,
            available={
                i: min(books.free_by_node.get(i, 0), books.cpu_left.get(i, 0) // 1000)
                for i in machine.numa_ids
            },
            required=machine.topology.numa_of(held) if held else NO_NUMA_NODES,
            sockets=sockets,
            unit="cpus",
        )
    else:
        pool = books.pool.bits
        pool_empty = [i for i, cpus in machine.node_cpus.items() if not cpus.bits & pool]
        cpu = ResourceDemand(
            resource="cpu",
            # Something that asks for nothing still has to run somewhere.
            need=max(1, demand.cpu_milli),
            capacity=machine.cpu_milli,
            available=books.cpu_left | dict.fromkeys(pool_empty, 0)
            if pool_empty
            else books.cpu_left,
            sockets=sockets,
            unit="millicpu",
        )
    demands: list[AnyDemand] = [cpu]
    if wishes.bind is Bind.CPU_MEM:
        demands += _memory_demands(machine, state, pod, demand, books)
    demands += [DeviceDemand(request=request) for request in container.devices]
    return demands


def _memory_demands(
    machine: Machine, state: NodeState, pod: PodSandbox, demand: Demand, books: Books
) -> list[AnyDemand]:
    kubelet = machine.settings.kubelet_memory
    if kubelet and pod.qos is not QoSClass.GUARANTEED:
        return []
    tied: Cells | None = None
    if kubelet:
        tied = cells(
            machine.numa_ids,
            (
                a.mems
                for a in state.allocations.values()
                if a.mems and a.qos is QoSClass.GUARANTEED and (a.memory_bytes or a.hugepages)
            ),
        )
    groups = None if tied is None else tied.groups
    assigned = NO_NUMA_NODES if tied is None else tied.assigned
    found: list[AnyDemand] = []
    if demand.memory_bytes:
        found.append(
            ResourceDemand(
                resource="memory",
                need=demand.memory_bytes,
                capacity=machine.memory_capacity,
                available=books.memory_left,
                groups=groups,
                assigned=assigned,
                share="memory",
                nothing_is_no_wish=kubelet,
            )
        )
    for size, amount in sorted(demand.hugepages.items()):
        found.append(
            ResourceDemand(
                resource=f"hugepages-{human_bytes(size).replace('.0 ', '').replace('iB', 'i')}",
                need=amount,
                capacity=machine.hugepages_capacity(size),
                available=books.hugepages_left[size],
                groups=groups,
                assigned=assigned,
                share="memory",
                nothing_is_no_wish=kubelet,
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
