"""What placing one container comes to, before it is turned into a new state.

`Placed` says what the container gets, a `Refusal` why it cannot; the degrade ladder in
`nri_numa.engine.admit` turns that into an answer, a wider set, or no pin at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nri_numa.engine.align.policies import Alignment
from nri_numa.engine.state import Charge, Kind
from nri_numa.engine.values.memory_policy import MemoryPolicySetting
from nri_numa.engine.values.workload import Policy
from nri_numa.machine.cpuset import NO_CPUS, NO_NUMA_NODES, CPUSet, NUMASet
from nri_numa.machine.model import Topology, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What a container gets; the fields are those of `nri_numa.engine.state.Allocation`.

    Attributes:
        warnings: what is probably not meant, one clause each; among ``steps`` too.
        ignored: sentences about requests that are not permitted and were passed over.
        memory_policy: set before the program runs; None sets none.
    """

    kind: Kind
    cpus: CPUSet = NO_CPUS
    idle: CPUSet = NO_CPUS
    owned: bool = False
    soft: bool = False
    numa_nodes: NUMASet = NO_NUMA_NODES
    mems: NUMASet = NO_NUMA_NODES
    charges: Mapping[int, Charge] = field(default_factory=dict)
    policy: Policy = Policy.NONE
    preferred: bool = True
    reason: str = ""
    alignment: Alignment | None = None
    steps: tuple[str, ...] = ()
    pod_affinity: NUMASet | None = None
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    memory_policy: MemoryPolicySetting | None = None


def human_bytes(amount: int) -> str:
    """``1.5 GiB`` and the like; exact below 1 KiB."""
    value = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            return f"{amount} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")  # pragma: no cover


def exclusive_text(count: int) -> str:
    """``1 exclusive CPU``, ``4 exclusive CPUs``."""
    return counted(count, "exclusive CPU")


def per_node(parts: Mapping[int, str]) -> str:
    """``NUMA node 0: 2 CPUs; NUMA node 1: …``, cut after eight NUMA nodes."""
    items = [f"NUMA node {i}: {text}" for i, text in sorted(parts.items())]
    cut = items[:8]
    if len(items) > 8:
        cut.append(f"and {len(items) - 8} more NUMA nodes")
    return "; ".join(cut)


def memory_nodes_for(topology: Topology, numa_nodes: NUMASet, usable: NUMASet) -> NUMASet:
    """Memory nodes for CPUs on ``numa_nodes``: their own, or the nearest when they have none.

    Args:
        topology: the machine.
        numa_nodes: where the CPUs are.
        usable: NUMA nodes with memory that may be used.
    """
    own = numa_nodes & usable
    if own or not usable:
        return own
    # Distance, then id: of equally near NUMA nodes the lowest.
    nearest = min(
        usable, key=lambda m: (min((topology.distance(i, m) for i in numa_nodes), default=0), m)
    )
    return NUMASet([nearest])


def spread_charges(
    numa_nodes: NUMASet,
    cpu_milli: Mapping[int, int],
    mems: NUMASet,
    memory: int,
    memory_left: Mapping[int, int],
    hugepages: Mapping[int, int],
    hugepages_left: Mapping[int, Mapping[int, int]],
) -> dict[int, Charge]:
    """Book a grant on its NUMA nodes, bytes node by node in id order, as the kubelet does.

    What does not fit anywhere (a request that was widened past what is free) is allocated on the
    first memory node, so that nothing goes unaccounted.
    """
    taken = _node_by_node(mems, memory, memory_left)
    pages: dict[int, dict[int, int]] = {}
    for size, amount in sorted(hugepages.items()):
        for i, part in _node_by_node(mems, amount, hugepages_left.get(size, {})).items():
            pages.setdefault(i, {})[size] = part
    charges: dict[int, Charge] = {}
    for i in numa_nodes | mems:
        milli = cpu_milli.get(i, 0)
        charge = Charge(milli, taken.get(i, 0), pages.get(i, {}))
        if milli or charge.memory or charge.hugepages:
            charges[i] = charge
    return charges


def _node_by_node(mems: NUMASet, amount: int, left: Mapping[int, int]) -> dict[int, int]:
    if not amount or not mems:
        return {}
    taken: dict[int, int] = {}
    for i in mems:
        part = min(amount, left.get(i, 0))
        if part > 0:
            taken[i] = part
            amount -= part
        if not amount:
            return taken
    first = mems.first
    taken[first] = taken.get(first, 0) + amount
    return taken
