"""Computed assignments: resource demands → alignment → CPUs → memory nodes.

The sources of the rules: the kubelet's Topology, CPU and Memory Managers (KEP-693, KEP-3570,
KEP-1769), and the accounting

    cpu_allocatable(i) = total(i) × oversale × capacity_factor(i) − Σ requests bound to i
    mem_allocatable(i) = total(i) − Σ requests bound to i, at most what the kernel has free there

A strategy decides among equally good NUMA nodes: for CPU only by the CPU left, with memory by the
memory left among the NUMA nodes whose CPU suffices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nri_numa.engine.allocator import (
    NotEnoughCPUs,
    SMTAlignmentRefused,
    Taken,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.demand import Demand
from nri_numa.engine.hints import Demand as AnyDemand
from nri_numa.engine.hints import DeviceDemand, ResourceDemand
from nri_numa.engine.memory import Cells, cells, widen_for_memory
from nri_numa.engine.placement import (
    Failed,
    Placed,
    human_bytes,
    human_milli,
    memory_nodes_for,
    per_node,
    spread_charges,
)
from nri_numa.engine.policies import Alignment, align
from nri_numa.engine.settings import CPUOrder
from nri_numa.engine.smt import partners
from nri_numa.engine.state import Former, Kind, NodeState, PodRecord
from nri_numa.engine.workload import (
    SMT,
    Bind,
    Container,
    Load,
    PodSandbox,
    Policy,
    QoSClass,
    Scope,
    Strategy,
    Wishes,
)
from nri_numa.topology.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


@dataclass(slots=True, kw_only=True)
class _Books:
    """What one decision looks at; built once, filled as needed, dropped with the decision."""

    cpu_left: dict[int, int]
    memory_left: dict[int, int]
    hugepages_left: dict[int, Mapping[int, int]]
    pool: CPUSet
    free: CPUSet
    free_by_node: dict[int, int]


def place_computed(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    reading: Reading | None,
    policy: Policy,
    *,
    held: CPUSet = NO_CPUS,
) -> Placed | Failed:
    """Choose NUMA nodes, CPUs and memory nodes for one container.

    Args:
        machine: where.
        state: as it is without this container.
        pod: its pod.
        container: the container.
        wishes: what was asked for; ``wishes.policy`` is overridden by ``policy``.
        demand: what it needs.
        reading: what the kernel has left, when known.
        policy: the policy to apply (the degrade ladder tries a weaker one).
        held: CPUs it has already and must keep (a resize in place).
    """
    record = state.pods.get(pod.uid)
    if (
        machine.settings.cpu_order is CPUOrder.KUBELET
        and wishes.smt is SMT.SPREAD
        and "smt" not in wishes.given
    ):
        # Nobody asked to avoid siblings, and the kubelet's order does not.
        wishes = replace(wishes, smt=SMT.ANY)
    together = demand
    if wishes.scope is Scope.POD and (record is None or record.affinity is None):
        together = pod_demand(pod, demand)
    books = _books(machine, state, together, wishes, reading)
    who = f"pod {pod.full_name}, container {container.name}"
    if policy is Policy.NONE:
        affinity, alignment, steps = None, None, ["no policy: any NUMA node will do"]
        preferred = True
    else:
        found = _aligned(
            machine, state, pod, container, wishes, together, books, policy, record, held
        )
        if isinstance(found, Failed):
            return found
        affinity, preferred, alignment, steps = found
    if demand.exclusive_cpus:
        return _exclusive(
            machine, state, who, container, wishes, demand, policy, books, record,
            affinity, preferred, alignment, steps, held,
        )  # fmt: skip
    numa_nodes = affinity if affinity is not None else machine.numa_ids
    if not machine.topology.cpus_of(numa_nodes) & machine.topology.allowed:
        numa_nodes = machine.topology.cpu_nodes
    numa_nodes = numa_nodes & machine.topology.cpu_nodes
    if not numa_nodes:
        why = "no NUMA node of this machine has CPUs"
        return Placed(kind=Kind.UNBOUND, preferred=False, reason=f"not pinned: {why}", steps=(why,))
    return _finish(
        machine, state, who, wishes, demand, policy, books,
        kind=Kind.SHARED, cpus=NO_CPUS, idle=NO_CPUS, numa_nodes=numa_nodes,
        preferred=preferred, alignment=alignment, steps=steps, affinity=affinity,
    )  # fmt: skip


def _books(
    machine: Machine, state: NodeState, demand: Demand, wishes: Wishes, reading: Reading | None
) -> _Books:
    pool = state.pool(machine.topology, machine.settings)
    free = pool - machine.settings.reserved_cpus
    if state.listed:
        free = free - state.listed_cpus()
    with_memory = wishes.bind is Bind.CPU_MEM
    free_by_node: dict[int, int] = {}
    if demand.exclusive_cpus:
        bits = free.bits
        for i, cpus in machine.node_cpus.items():
            free_by_node[i] = (cpus.bits & bits).bit_count()
        _keep_group_pools(machine, state, pool, free, free_by_node)
        if wishes.smt in (SMT.FULL_CORE, SMT.ISOLATE):
            _count_cores(machine, free, wishes.smt, free_by_node)
    return _Books(
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


def _rank(
    machine: Machine,
    state: NodeState,
    wishes: Wishes,
    demand: Demand,
    books: _Books,
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
    if memory:
        order = sorted(
            machine.numa_ids,
            key=lambda i: (
                cpu.get(i, 0) < need,
                beside.get(i, 0) < need if beside else False,
                sign * memory.get(i, 0),
                sign * cpu.get(i, 0),
                i,
            ),
        )
    else:
        order = sorted(
            machine.numa_ids,
            key=lambda i: (
                beside.get(i, 0) < need if beside else False,
                sign * cpu.get(i, 0),
                i,
            ),
        )
    return {i: rank for rank, i in enumerate(order)}


def _beside_opposite(
    machine: Machine, state: NodeState, wishes: Wishes, books: _Books
) -> dict[int, int]:
    """By NUMA node, free CPUs of cores that run opposite loads only; for ``smt: pair``."""
    if wishes.smt is not SMT.PAIR:
        return {}
    known = partners(wishes.load, _loads(state))
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


def _demands(
    machine: Machine,
    pod: PodSandbox,
    container: Container,
    demand: Demand,
    books: _Books,
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
            capacity={i: len(cpus) for i, cpus in machine.node_cpus.items() if cpus},
            available={
                i: min(books.free_by_node.get(i, 0), books.cpu_left.get(i, 0) // 1000)
                for i in machine.numa_ids
            },
            required=machine.topology.numa_of(held),
            sockets=sockets,
            unit="cpus",
        )
    else:
        pool = books.pool.bits
        pool_empty = {i for i, cpus in machine.node_cpus.items() if not cpus.bits & pool}
        cpu = ResourceDemand(
            resource="cpu",
            # Something that asks for nothing still has to run somewhere.
            need=max(1, demand.cpu_milli),
            capacity={i: n for i, n in machine.cpu_capacity.items() if n},
            available={i: 0 if i in pool_empty else n for i, n in books.cpu_left.items()},
            sockets=sockets,
            unit="millicpu",
        )
    demands: list[AnyDemand] = [cpu]
    if wishes.bind is Bind.CPU_MEM:
        demands += _memory_demands(machine, state, pod, demand, books)
    demands += [DeviceDemand(request=request) for request in container.devices]
    return demands


def _memory_demands(
    machine: Machine, state: NodeState, pod: PodSandbox, demand: Demand, books: _Books
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


_Aligned = tuple[NUMASet | None, bool, Alignment | None, list[str]]


def _aligned(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    books: _Books,
    policy: Policy,
    record: PodRecord | None,
    held: CPUSet,
) -> _Aligned | Failed:
    """Ask the policy for NUMA nodes, once for each pod under scope ``pod``."""
    if wishes.scope is Scope.POD and record is not None and record.affinity is not None:
        return (
            record.affinity,
            record.affinity_preferred,
            None,
            [f"scope pod: the pod was placed on NUMA node {record.affinity}"],
        )
    demands = _demands(machine, pod, container, demand, books, wishes, held, state)
    alignment = align(
        demands,
        numa_ids=machine.numa_ids,
        policy=policy,
        distance=machine.topology.distance,
        prefer_closest=machine.settings.prefer_closest,
        rank=_rank(machine, state, wishes, demand, books, exclusive=bool(demand.exclusive_cpus)),
    )
    if not alignment.admitted:
        return Failed(
            reason="TopologyAffinityError",
            message=_affinity_message(machine, pod, container, wishes, demand, books, policy),
            rule=f"policy {policy} admits no wider set than an empty machine would need"
            if policy is Policy.RESTRICTED
            else f"policy {policy} admits one NUMA node only",
            widenable=True,
            alignment=alignment,
        )
    where = "any NUMA node" if alignment.affinity is None else f"NUMA node {alignment.affinity}"
    ideal = "" if alignment.preferred else ", wider than ideal"
    return (
        alignment.affinity,
        alignment.preferred,
        alignment,
        [f"policy {policy} chose {where}{ideal}"],
    )


def needed_text(demand: Demand, wishes: Wishes) -> str:
    """What a container needs, in words: ``2 exclusive CPUs and 4.0 GiB memory``."""
    parts: list[str] = []
    if demand.exclusive_cpus:
        parts.append(_exclusive_text(demand.exclusive_cpus))
    elif demand.cpu_milli:
        parts.append(human_milli(demand.cpu_milli))
    if wishes.bind is Bind.CPU_MEM:
        if demand.memory_bytes:
            parts.append(f"{human_bytes(demand.memory_bytes)} memory")
        for size, amount in sorted(demand.hugepages.items()):
            parts.append(f"{human_bytes(amount)} in huge pages of {human_bytes(size)}")
    if not parts:
        return "a place to run"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _exclusive_text(count: int) -> str:
    return f"{count} exclusive CPU{'' if count == 1 else 's'}"


def _left_text(machine: Machine, demand: Demand, wishes: Wishes, books: _Books) -> str:
    """What is free of the things needed: ``NUMA node 0: 3 CPUs, 1.0 GiB memory; …``."""
    parts: dict[int, str] = {}
    for i in machine.numa_ids:
        texts: list[str] = []
        if demand.exclusive_cpus:
            count = min(books.free_by_node.get(i, 0), books.cpu_left.get(i, 0) // 1000)
            texts.append(human_milli(count * 1000))
        elif demand.cpu_milli:
            texts.append(human_milli(books.cpu_left.get(i, 0)))
        if wishes.bind is Bind.CPU_MEM:
            if demand.memory_bytes:
                texts.append(f"{human_bytes(books.memory_left.get(i, 0))} memory")
            for size in sorted(demand.hugepages):
                left = books.hugepages_left[size].get(i, 0)
                texts.append(f"{human_bytes(left)} in huge pages of {human_bytes(size)}")
        parts[i] = ", ".join(texts) or human_milli(books.cpu_left.get(i, 0))
    return per_node(parts)


def _affinity_message(
    machine: Machine,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    books: _Books,
    policy: Policy,
) -> str:
    whose = "all its containers together" if wishes.scope is Scope.POD else "it"
    limit = (
        "one NUMA node"
        if policy is Policy.SINGLE_NUMA_NODE
        else "no more NUMA nodes than an empty machine would need"
    )
    return (
        f"pod {pod.full_name}, container {container.name}: {whose} "
        f"{'need' if wishes.scope is Scope.POD else 'needs'} {needed_text(demand, wishes)} on "
        f"{limit} (policy {policy}); free: {_left_text(machine, demand, wishes, books)}"
    )


def _exclusive(
    machine: Machine,
    state: NodeState,
    who: str,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    policy: Policy,
    books: _Books,
    record: PodRecord | None,
    affinity: NUMASet | None,
    preferred: bool,
    alignment: Alignment | None,
    steps: list[str],
    held: CPUSet,
) -> Placed | Failed:
    settings = machine.settings
    former = _former(record, container, books.free, affinity, machine)
    taken = take_cpus(
        machine.topology,
        TakeRequest(
            count=demand.exclusive_cpus,
            available=books.free,
            prefer=former,
            held=held,
            affinity=affinity,
            strict=policy in (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE),
            smt=wishes.smt,
            load=wishes.load,
            loads=_loads(state) if wishes.smt is SMT.PAIR else {},
            busy=state.owned | state.idle,
            settings=settings,
        ),
        machine.index,
    )
    if not isinstance(taken, Taken):
        return _take_failed(taken, machine, who, wishes, demand, policy, books, affinity, alignment)
    pool = books.pool
    if not pool - taken.cpus - taken.idle:
        return Failed(
            reason="SharedPoolEmpty",
            message=f"{who}: {_exclusive_text(demand.exclusive_cpus)} would leave no CPU for other "
            f"containers; {len(pool)} are in the shared pool and one must stay",
            rule="the shared pool is never empty",
            alignment=alignment,
        )
    steps += taken.notes
    if former and former & taken.cpus:
        steps.append(f"CPUs {former & taken.cpus} were the pod's before")
    numa_nodes = machine.topology.numa_of(taken.cpus)
    return _finish(
        machine, state, who, wishes, demand, policy, books,
        kind=Kind.EXCLUSIVE, cpus=taken.cpus, idle=taken.idle, numa_nodes=numa_nodes,
        preferred=preferred and (affinity is None or numa_nodes <= affinity),
        alignment=alignment, steps=steps, affinity=affinity,
    )  # fmt: skip


def _former(
    record: PodRecord | None,
    container: Container,
    free: CPUSet,
    affinity: NUMASet | None,
    machine: Machine,
) -> CPUSet:
    """CPUs to give back to a restarted container, else those a stopped one of its pod had.

    The second is the kubelet's reuse of init container CPUs; the runtime does not tell init
    containers from others, so every stopped container of the pod counts.
    """
    if record is None or not record.former:
        return NO_CPUS
    own = record.former.get(container.name)
    formers: list[Former] = (
        [own] if own is not None else [f for _, f in sorted(record.former.items())]
    )
    bits = 0
    for former in formers:
        bits |= former.cpus.bits
    cpus = CPUSet.from_bits(bits) & free
    return cpus if affinity is None else cpus & machine.topology.cpus_of(affinity)


def _loads(state: NodeState) -> dict[int, Load]:
    return {
        cpu: a.load
        for a in state.allocations.values()
        if a.owned and a.load is not None
        for cpu in a.cpus
    }


def _take_failed(
    failed: NotEnoughCPUs | SMTAlignmentRefused,
    machine: Machine,
    who: str,
    wishes: Wishes,
    demand: Demand,
    policy: Policy,
    books: _Books,
    affinity: NUMASet | None,
    alignment: Alignment | None,
) -> Failed:
    left = _left_text(machine, demand, wishes, books)
    if isinstance(failed, SMTAlignmentRefused):
        return Failed(
            reason="SMTAlignmentError",
            message=f"{who}: {_exclusive_text(demand.exclusive_cpus)} cannot be made of whole "
            f"cores, which have {human_milli(failed.threads_per_core * 1000)} each "
            f"(smt: {wishes.smt}); free: {left}",
            rule="smt: full-core gives whole cores only",
            alignment=alignment,
        )
    where = "" if affinity is None else f" on NUMA node {affinity}"
    return Failed(
        reason="NotEnoughCPUs",
        message=f"{who}: needs {_exclusive_text(demand.exclusive_cpus)}{where} "
        f"(smt: {wishes.smt}); free: {left}",
        rule="exclusive CPUs must be free",
        widenable=affinity is not None,
        alignment=alignment,
    )


def _finish(
    machine: Machine,
    state: NodeState,
    who: str,
    wishes: Wishes,
    demand: Demand,
    policy: Policy,
    books: _Books,
    *,
    kind: Kind,
    cpus: CPUSet,
    idle: CPUSet,
    numa_nodes: NUMASet,
    preferred: bool,
    alignment: Alignment | None,
    steps: list[str],
    affinity: NUMASet | None,
) -> Placed | Failed:
    """Choose memory nodes, book everything, and say it."""
    topology = machine.topology
    mems = NO_NUMA_NODES
    if wishes.bind is Bind.CPU_MEM:
        usable = machine.numa_ids & topology.memory_nodes
        base = numa_nodes if affinity is None else affinity | numa_nodes
        mems = memory_nodes_for(topology, base, usable)
        pages = [(amount, books.hugepages_left[size]) for size, amount in demand.hugepages.items()]
        if any(
            sum(left.get(i, 0) for i in mems) < amount
            for amount, left in ((demand.memory_bytes, books.memory_left), *pages)
        ):
            wider = widen_for_memory(
                mems,
                demand.memory_bytes,
                books.memory_left,
                topology.distance,
                usable,
                also=pages,
            )
            if wider is None:
                if policy in (Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE):
                    return _no_memory(machine, who, wishes, demand, books, alignment)
                # Nothing holds it: a pin would only bring the OOM killer sooner.
                steps.append("no set of NUMA nodes has enough memory left: all may be used")
                wider = usable
            if wider != mems:
                steps.append(f"memory widened from NUMA node {mems} to {wider} so that it fits")
                preferred = False
            mems = wider
    milli = _milli(machine, numa_nodes, cpus, demand)
    charges = spread_charges(
        numa_nodes, milli, mems,
        demand.memory_bytes if mems else 0, books.memory_left,
        demand.hugepages if mems else {}, books.hugepages_left,
    )  # fmt: skip
    what = f"{len(cpus)} own CPUs" if kind is Kind.EXCLUSIVE else "shared CPUs"
    ideal = "" if preferred else ", wider than ideal"
    return Placed(
        kind=kind,
        cpus=cpus,
        idle=idle,
        owned=kind is Kind.EXCLUSIVE,
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        policy=policy,
        preferred=preferred,
        reason=f"{what} on NUMA node {numa_nodes}{ideal}",
        alignment=alignment,
        steps=tuple(steps),
        pod_affinity=affinity if wishes.scope is Scope.POD else None,
    )


def _no_memory(
    machine: Machine,
    who: str,
    wishes: Wishes,
    demand: Demand,
    books: _Books,
    alignment: Alignment | None,
) -> Failed:
    return Failed(
        reason="NotEnoughMemory",
        message=f"{who}: needs {human_bytes(demand.memory_bytes)} memory, and no set of NUMA nodes "
        f"has it; free: {_left_text(machine, demand, wishes, books)}",
        rule="memory that is pinned must fit",
        alignment=alignment,
    )


def _milli(machine: Machine, numa_nodes: NUMASet, cpus: CPUSet, demand: Demand) -> dict[int, int]:
    """Thousandths of a CPU to book on each NUMA node."""
    if cpus:
        bits = cpus.bits
        return {
            i: 1000 * (machine.topology.numa_nodes[i].cpus.bits & bits).bit_count()
            for i in numa_nodes
        }
    # A shared container may run on any of them: book evenly, the remainder on the lowest ids.
    each, rest = divmod(demand.cpu_milli, len(numa_nodes))
    return {i: each + (1 if n < rest else 0) for n, i in enumerate(numa_nodes)}
