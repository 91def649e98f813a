"""Explicit lists: ``numacpu`` and ``numamem``, taken as they are after checking.

CPUs and NUMA nodes must exist and be online, must not belong to another container exclusively,
and the memory must hold what the container may use. A bad value is refused with a message that
names pod, container, annotation, value and expectation.
"""

from __future__ import annotations

from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.demand import Demand
from nri_numa.engine.placement import Failed, Placed, human_bytes, per_node, spread_charges
from nri_numa.engine.state import Kind, NodeState
from nri_numa.engine.wishes import quoted
from nri_numa.engine.workload import Container, CPUMode, PodSandbox, Wishes
from nri_numa.topology.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet


def place_explicit(
    machine: Machine,
    state: NodeState,
    pod: PodSandbox,
    container: Container,
    wishes: Wishes,
    demand: Demand,
    reading: Reading | None,
) -> Placed | Failed:
    """Check the lists against machine and state, and take them."""
    who = f"pod {pod.full_name}, container {container.name}"
    cpus, mems = NO_CPUS, NO_NUMA_NODES
    owned = wishes.cpus is CPUMode.EXCLUSIVE
    if wishes.numacpu is not None:
        cpus = CPUSet.parse(wishes.numacpu)
        failed = _check_cpus(machine, state, who, wishes, cpus, owned=owned)
        if failed is not None:
            return failed
    if wishes.numamem is not None:
        mems = NUMASet.parse(wishes.numamem)
        failed = _check_mems(machine, state, who, wishes, mems, demand, reading)
        if failed is not None:
            return failed
    topology = machine.topology
    numa_nodes = topology.numa_of(cpus)
    milli = {}
    if cpus:
        # A shared reservation is spread over the NUMA nodes by how many of the CPUs lie there.
        want = len(cpus) * 1000 if owned else demand.cpu_milli
        for i in numa_nodes:
            milli[i] = want * len(topology.numa_nodes[i].cpus & cpus) // len(cpus)
    hugepages = demand.hugepages if mems else {}
    charges = spread_charges(
        numa_nodes,
        milli,
        mems,
        demand.memory_bytes if mems else 0,
        machine.memory_left(state, reading),
        hugepages,
        {size: machine.hugepages_left(size, state, reading) for size in hugepages},
    )
    # The sets, not the texts: these may be of any length.
    listed = " and ".join(
        f"{key} {ids}" for key, ids in (("numacpu", cpus), ("numamem", mems)) if ids
    )
    return Placed(
        kind=Kind.EXPLICIT if cpus else Kind.UNBOUND,
        cpus=cpus,
        owned=owned and bool(cpus),
        numa_nodes=numa_nodes,
        mems=mems,
        charges=charges,
        reason=f"listed: {listed}",
        steps=(f"taken as listed: {listed}",),
    )


def _source(wishes: Wishes, key: str) -> str:
    return wishes.sources.get(key, key)


def _check_cpus(
    machine: Machine, state: NodeState, who: str, wishes: Wishes, cpus: CPUSet, *, owned: bool
) -> Failed | None:
    topology, settings = machine.topology, machine.settings
    text = f"{who}: numacpu is {quoted(wishes.numacpu or '')} ({_source(wishes, 'numacpu')})"
    missing = cpus - topology.possible
    if missing:
        return Failed(
            reason="UnknownCPU",
            message=f"{text}, but CPU {missing} does not exist; "
            f"expected CPUs among {topology.online}",
            rule="listed CPUs must exist",
        )
    offline = cpus - topology.online
    if offline:
        return Failed(
            reason="CPUOffline",
            message=f"{text}, but CPU {offline} is offline; expected CPUs among {topology.online}",
            rule="listed CPUs must be online",
        )
    outside = cpus - topology.allowed
    if outside:
        return Failed(
            reason="CPUNotAllowed",
            message=f"{text}, but CPU {outside} is outside the CPUs containers may use; "
            f"expected CPUs among {topology.allowed}",
            rule="listed CPUs must be usable by containers",
        )
    if settings.strict_reserved and cpus & settings.reserved_cpus:
        return Failed(
            reason="CPUReserved",
            message=f"{text}, but CPU {cpus & settings.reserved_cpus} is reserved for the system; "
            f"expected CPUs among {topology.allowed - settings.reserved_cpus}",
            rule="strictly reserved CPUs are not given to containers",
        )
    taken = cpus & (state.owned | state.idle)
    if taken:
        return Failed(
            reason="CPUOwned",
            message=f"{text}, but CPU {taken} belongs exclusively to {_owner(state, taken)}; "
            f"expected CPUs among {state.pool(topology, settings)}",
            rule="listed CPUs must not belong to another container exclusively",
        )
    if owned:
        return _check_ownable(machine, state, text, cpus)
    return None


def _check_ownable(machine: Machine, state: NodeState, text: str, cpus: CPUSet) -> Failed | None:
    settings = machine.settings
    if cpus & settings.reserved_cpus:
        return Failed(
            reason="CPUReserved",
            message=f"{text} with cpus: exclusive, but CPU {cpus & settings.reserved_cpus} is "
            f"reserved; expected CPUs among {machine.topology.allowed - settings.reserved_cpus}",
            rule="reserved CPUs are never given exclusively",
        )
    both = cpus & state.listed_cpus
    if both:
        others = ", ".join(
            sorted(state.allocations[i].full_name for i, c in state.listed.items() if c & cpus)
        )
        return Failed(
            reason="CPUListed",
            message=f"{text} with cpus: exclusive, but CPU {both} is listed by {others} too; "
            "expected CPUs that no other container lists",
            rule="exclusive CPUs must not be listed by another container",
        )
    if not state.pool(machine.topology, settings) - cpus:
        return Failed(
            reason="SharedPoolEmpty",
            message=f"{text} with cpus: exclusive, but that leaves no CPU for other containers; "
            "expected at least one CPU to be left",
            rule="the shared pool is never empty",
        )
    return None


def _owner(state: NodeState, cpus: CPUSet) -> str:
    names = sorted(
        a.full_name
        for a in state.allocations.values()
        if (a.owned and a.cpus & cpus) or a.idle & cpus
    )
    return ", ".join(names) or "another container"


def _check_mems(
    machine: Machine,
    state: NodeState,
    who: str,
    wishes: Wishes,
    mems: NUMASet,
    demand: Demand,
    reading: Reading | None,
) -> Failed | None:
    topology = machine.topology
    text = f"{who}: numamem is {quoted(wishes.numamem or '')} ({_source(wishes, 'numamem')})"
    missing = mems - topology.numa_ids
    if missing:
        return Failed(
            reason="UnknownNUMANode",
            message=f"{text}, but NUMA node {missing} does not exist; "
            f"expected NUMA nodes among {topology.memory_nodes}",
            rule="listed NUMA nodes must exist",
        )
    withheld = mems & topology.withheld_memory
    if withheld:
        return Failed(
            reason="NUMANodeNotAllowed",
            message=f"{text}, but memory of NUMA node {withheld} is outside what containers may "
            f"use; expected NUMA nodes among {topology.memory_nodes}",
            rule="listed NUMA nodes must be usable by containers",
        )
    bare = mems - topology.memory_nodes
    if bare:
        return Failed(
            reason="NUMANodeWithoutMemory",
            message=f"{text}, but NUMA node {bare} has no memory; "
            f"expected NUMA nodes among {topology.memory_nodes}",
            rule="listed NUMA nodes must have memory",
        )
    left = machine.memory_left(state, reading)
    have = {i: left.get(i, topology.numa_nodes[i].memory_bytes) for i in mems}
    if demand.memory_bytes > sum(have.values()):
        return Failed(
            reason="NotEnoughMemory",
            message=f"{text}, but the container may use {human_bytes(demand.memory_bytes)} and "
            f"there is less left: "
            + per_node({i: human_bytes(amount) for i, amount in have.items()})
            + "; expected NUMA nodes that hold it, since a pin that does not fit ends in the "
            "OOM killer",
            rule="the memory limit must fit the listed NUMA nodes",
        )
    return None
