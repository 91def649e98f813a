"""What the API and the metrics say of each NUMA node: one look, in the units of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.state import Charge, NodeState
from nri_numa.http.responses import HugePages, NUMANodeUse
from nri_numa.machine.cpuset import CPUSet
from nri_numa.machine.model import NUMANode
from nri_numa.observe.metrics import NUMANodeSample


def uses(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> tuple[NUMANodeUse, ...]:
    """For the API: every NUMA node by id, who has its CPUs and what the accounting has left.

    Args:
        machine: topology and settings.
        state: what is decided.
        pool: the shared pool of that state.
        reading: what the kernel had left when it was last asked.
    """
    reserved = machine.settings.reserved_cpus
    return tuple(_use(facts, reserved) for facts in _facts(machine, state, pool, reading))


def samples(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> tuple[NUMANodeSample, ...]:
    """For a scrape: the same in counts of CPUs; arguments as in `uses`."""
    reserved = machine.settings.reserved_cpus
    return tuple(_sample(facts, reserved) for facts in _facts(machine, state, pool, reading))


class _Facts(NamedTuple):
    """One NUMA node; CPU amounts are thousandths of a CPU, memory is bytes."""

    node: NUMANode
    charge: Charge
    exclusive: CPUSet
    idle: CPUSet
    kubelet: CPUSet
    shared: CPUSet
    cpu_total: int
    cpu_left: int
    memory_left: int
    capacity_factor: float


def _facts(
    machine: Machine, state: NodeState, pool: CPUSet, reading: Reading | None
) -> Iterator[_Facts]:
    """Every NUMA node, by id."""
    cpu_left, memory_left = machine.cpu_left(state), machine.memory_left(state, reading)
    for i, node in sorted(machine.topology.numa_nodes.items()):
        yield _Facts(
            node=node,
            charge=state.charge(i),
            exclusive=node.cpus & state.owned,
            idle=node.cpus & state.idle,
            kubelet=(node.cpus & state.kubelet.taken) - state.owned - state.idle,
            shared=node.cpus & pool,
            cpu_total=machine.cpu_total.get(i, 0),
            cpu_left=cpu_left.get(i, 0),
            memory_left=memory_left.get(i, 0),
            capacity_factor=machine.settings.capacity_factor.get(i, 1.0),
        )


def _use(facts: _Facts, reserved: CPUSet) -> NUMANodeUse:
    node, charge = facts.node, facts.charge
    return NUMANodeUse(
        id=node.id,
        cpus=str(node.cpus),
        exclusive=str(facts.exclusive),
        idle=str(facts.idle),
        kubelet=str(facts.kubelet),
        shared=str(facts.shared),
        reserved=str(node.cpus & reserved),
        cpu_capacity_milli=facts.cpu_total,
        cpu_allocated_milli=charge.cpu_milli,
        cpu_available_milli=facts.cpu_left,
        memory_bytes=node.memory_bytes,
        memory_allocated_bytes=charge.memory,
        memory_available_bytes=facts.memory_left,
        huge_pages=tuple(
            HugePages(
                size_bytes=size,
                total_bytes=total,
                allocated_bytes=charge.hugepages.get(size, 0),
            )
            for size, total in sorted(node.hugepages.items())
        ),
        capacity_factor=facts.capacity_factor,
    )


def _sample(facts: _Facts, reserved: CPUSet) -> NUMANodeSample:
    node, charge = facts.node, facts.charge
    shared = facts.shared - reserved - facts.kubelet
    return NUMANodeSample(
        numa_node=node.id,
        exclusive_cpus=len(facts.exclusive),
        idle_cpus=len(facts.idle),
        kubelet_cpus=len(facts.kubelet),
        shared_cpus=len(shared),
        # What is left: reserved CPUs, and those that our own cpuset keeps from containers.
        reserved_cpus=len(node.cpus - facts.exclusive - facts.idle - facts.kubelet - shared),
        capacity_cpus=facts.cpu_total / 1000,
        allocated_cpus=charge.cpu_milli / 1000,
        available_cpus=facts.cpu_left / 1000,
        memory_bytes=node.memory_bytes,
        memory_allocated_bytes=charge.memory,
        memory_available_bytes=facts.memory_left,
        capacity_factor=facts.capacity_factor,
        hugepages={
            size: (total, charge.hugepages.get(size, 0)) for size, total in node.hugepages.items()
        },
    )
