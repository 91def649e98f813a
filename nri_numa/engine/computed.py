"""Computed assignments: resource demands → alignment → CPUs → memory nodes.

The sources of the rules: the kubelet's Topology, CPU and Memory Managers (KEP-693, KEP-3570,
KEP-1769), and the accounting

    cpu_allocatable(i) = total(i) × oversale × capacity_factor(i) − Σ requests bound to i
    mem_allocatable(i) = total(i) − Σ requests bound to i, at most what the kernel has free there

A strategy decides among equally good NUMA nodes: for CPU only by the CPU left, with memory by the
memory left among the NUMA nodes whose CPU suffices.
"""

from __future__ import annotations

from dataclasses import replace

from nri_numa.engine.allocator import (
    NotEnoughCPUs,
    SMTAlignmentRefused,
    Taken,
    TakeRequest,
    take_cpus,
)
from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.demand import Demand
from nri_numa.engine.memory import widen_for_memory
from nri_numa.engine.need_texts import affinity_message, exclusive_text, left_text
from nri_numa.engine.needs import Books, demands, loads_of, open_books, pod_demand, rank
from nri_numa.engine.placement import (
    Failed,
    Placed,
    human_bytes,
    human_milli,
    memory_nodes_for,
    own_cpus,
    spread_charges,
)
from nri_numa.engine.policies import Alignment, align
from nri_numa.engine.settings import CPUOrder
from nri_numa.engine.state import Former, Kind, NodeState, PodRecord
from nri_numa.engine.workload import (
    SMT,
    Bind,
    Container,
    PodSandbox,
    Policy,
    Scope,
    Wishes,
)
from nri_numa.topology.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


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
    books = open_books(machine, state, together, wishes, reading)
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


_Aligned = tuple[NUMASet | None, bool, Alignment | None, list[str]]


def _aligned(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    books: Books,
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
    asked = demands(machine, pod, container, demand, books, wishes, held, state)
    alignment = align(
        asked,
        numa_ids=machine.numa_ids,
        policy=policy,
        distance=machine.topology.distance,
        prefer_closest=machine.settings.prefer_closest,
        rank=rank(machine, state, wishes, demand, books, exclusive=bool(demand.exclusive_cpus)),
    )
    if not alignment.admitted:
        return Failed(
            reason="TopologyAffinityError",
            message=affinity_message(
                machine, pod, container, wishes, demand, books, policy, alignment
            ),
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


def _exclusive(
    machine: Machine,
    state: NodeState,
    who: str,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    policy: Policy,
    books: Books,
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
            loads=loads_of(state) if wishes.smt is SMT.PAIR else {},
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
            message=f"{who}: {exclusive_text(demand.exclusive_cpus)} would leave no CPU for other "
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


def _take_failed(
    failed: NotEnoughCPUs | SMTAlignmentRefused,
    machine: Machine,
    who: str,
    wishes: Wishes,
    demand: Demand,
    policy: Policy,
    books: Books,
    affinity: NUMASet | None,
    alignment: Alignment | None,
) -> Failed:
    left = left_text(machine, demand, wishes, books)
    if isinstance(failed, SMTAlignmentRefused):
        return Failed(
            reason="SMTAlignmentError",
            message=f"{who}: {exclusive_text(demand.exclusive_cpus)} cannot be made of whole "
            f"cores, which have {human_milli(failed.threads_per_core * 1000)} each "
            f"(smt: {wishes.smt}); free: {left}",
            rule="smt: full-core gives whole cores only",
            alignment=alignment,
        )
    where = "" if affinity is None else f" on NUMA node {affinity}"
    return Failed(
        reason="NotEnoughCPUs",
        message=f"{who}: needs {exclusive_text(demand.exclusive_cpus)}{where} "
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
    books: Books,
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
        usable = machine.memory_nodes
        base = numa_nodes if affinity is None else affinity | numa_nodes
        mems = memory_nodes_for(topology, base, usable)
        pages = [(amount, books.hugepages_left[size]) for size, amount in demand.hugepages.items()]
        if any(
            amount and sum([left.get(i, 0) for i in mems]) < amount
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
    what = own_cpus(cpus) if kind is Kind.EXCLUSIVE else "shared CPUs"
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
    books: Books,
    alignment: Alignment | None,
) -> Failed:
    return Failed(
        reason="NotEnoughMemory",
        message=f"{who}: needs {human_bytes(demand.memory_bytes)} memory, and no set of NUMA nodes "
        f"has it; free: {left_text(machine, demand, wishes, books)}",
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
