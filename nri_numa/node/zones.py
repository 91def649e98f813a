"""What the API says of each NUMA node to who schedules: capacity, allocatable, available."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from nri_numa.engine.decision import Machine, Reading
from nri_numa.engine.place.offer import largest, together
from nri_numa.engine.state import NodeState
from nri_numa.engine.values.workload import CPUMode, Policy, QoSClass, Scope
from nri_numa.http.responses import (
    Distance,
    Zone,
    ZoneContainer,
    ZoneDevices,
    ZoneHugePages,
    ZonePod,
    Zones,
)
from nri_numa.machine.model import CoreKind

if TYPE_CHECKING:
    from nri_numa.devices.counts import Counted

EMPTY = NodeState()
NO_ROOTS: Final[Mapping[int, tuple[str, ...]]] = {}
MIXED: Final = "mixed"
"""Kind of a NUMA node's cores where it has several."""


def document(
    machine: Machine,
    state: NodeState,
    reading: Reading | None,
    *,
    reason: str = "",
    measured: Mapping[int, float] | None = None,
    devices: Counted | None = None,
    roots_of_pcie: Mapping[int, tuple[str, ...]] = NO_ROOTS,
    coming: Iterable[tuple[str, str]] = (),
) -> Zones:
    """Count everything in one state; a pod of which nothing is charged yet is named all the same.

    Args:
        machine: topology and settings.
        state: what is decided.
        reading: what the kernel had left when it was last asked.
        reason: why nothing is to be counted on now; empty when nothing speaks against it.
        measured: by NUMA node, capacity factors that were measured and are acted upon; 1 for the
            others.
        devices: how many the kubelet can give, or why that is not known; None where nobody asks.
        roots_of_pcie: by NUMA node; empty where nobody asks for them.
        coming: namespace and name of Guaranteed pods that have no container yet.
    """
    defaults = machine.settings.defaults
    charged = {(a.pod_uid, a.container) for a in state.allocations.values() if a.charges}
    pods = dict.fromkeys(coming, QoSClass.GUARANTEED.value)
    pods |= {(a.namespace, a.pod): a.qos.value for a in state.allocations.values()}
    return Zones(
        serial=state.serial,
        ready=not reason,
        reason=reason,
        policy=defaults.get("policy", Policy.NONE.value),
        scope=defaults.get("scope", Scope.CONTAINER.value),
        shares=defaults.get("cpus") == CPUMode.SHARED.value,
        threads_per_core=machine.topology.threads_per_core,
        free_exclusive_cpus=together(machine, state),
        zones=_zones(
            machine, state, reading, measured or {}, _by_numa_node(devices), roots_of_pcie
        ),
        devices_problem=devices if devices is None or isinstance(devices, str) else "",
        pods=tuple(
            ZonePod(namespace=namespace, name=name, qos=qos)
            for (namespace, name), qos in sorted(pods.items())
        ),
        charged=tuple(ZoneContainer(pod_uid=uid, name=name) for uid, name in sorted(charged)),
    )


def _zones(
    machine: Machine,
    state: NodeState,
    reading: Reading | None,
    measured: Mapping[int, float],
    devices: Mapping[int, tuple[ZoneDevices, ...]],
    roots_of_pcie: Mapping[int, tuple[str, ...]],
) -> tuple[Zone, ...]:
    topology = machine.topology
    pool = state.pool(topology, machine.settings)
    cpu_left, memory_left = machine.cpu_left(state), machine.memory_left(state, reading)
    free, whole = largest(machine, state), largest(machine, EMPTY)
    sizes = sorted({size for node in topology.numa_nodes.values() for size in node.hugepages})
    capacity = {size: machine.hugepages_capacity(size) for size in sizes}
    left = {size: machine.hugepages_left(size, state, reading) for size in sizes}
    return tuple(
        Zone(
            id=i,
            socket=_socket(machine, i),
            distances=tuple(
                Distance(id=other, value=topology.distance(i, other)) for other in topology.numa_ids
            ),
            cpus=len(node.cpus),
            cpu_allocatable_milli=machine.cpu_total.get(i, 0),
            cpu_available_milli=cpu_left.get(i, 0),
            exclusive_cpus=whole.get(i, 0),
            free_exclusive_cpus=free.get(i, 0),
            shared_cpus=len(node.cpus & pool),
            memory_bytes=node.memory_bytes,
            memory_allocatable_bytes=machine.memory_capacity[i],
            memory_available_bytes=memory_left[i],
            huge_pages=tuple(
                ZoneHugePages(
                    size_bytes=size,
                    capacity_bytes=node.hugepages.get(size, 0),
                    allocatable_bytes=capacity[size][i],
                    available_bytes=left[size][i],
                )
                for size in sizes
            ),
            capacity_factor=machine.settings.capacity_factor.get(i, 1.0),
            measured_factor=measured.get(i, 1.0),
            devices=devices.get(i, ()),
            core_kind=_core_kind(machine, i),
            pcie_roots=roots_of_pcie.get(i, ()),
        )
        for i, node in sorted(topology.numa_nodes.items())
    )


def _by_numa_node(counts: Counted | None) -> dict[int, tuple[ZoneDevices, ...]]:
    """Devices by NUMA node, in the order of their resources; none where they are not known."""
    found: dict[int, tuple[ZoneDevices, ...]] = {}
    for one in () if counts is None or isinstance(counts, str) else counts:
        devices = ZoneDevices(
            resource=one.resource, allocatable=one.allocatable, available=one.available
        )
        found[one.numa_node] = (*found.get(one.numa_node, ()), devices)
    return found


def _socket(machine: Machine, numa_node: int) -> int | None:
    sockets = [s.id for s in machine.topology.sockets.values() if numa_node in s.numa_nodes]
    return sockets[0] if len(sockets) == 1 else None


def _core_kind(machine: Machine, numa_node: int) -> str:
    """The kind of a NUMA node's cores on a hybrid machine; empty on all others."""
    cores = machine.topology.cores.values()
    kinds = {core.kind for core in cores if core.numa_node == numa_node}
    if not kinds or CoreKind.STANDARD in kinds:
        return ""
    return MIXED if len(kinds) > 1 else kinds.pop().value
