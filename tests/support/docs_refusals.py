"""A refusal of every kind, from the real engine, for the texts of docs/troubleshooting.md.

``python -m tests.support.docs_refusals`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

from nri_numa.engine.decision import Reading, Refused
from nri_numa.engine.settings import Settings
from nri_numa.engine.workload import QoSClass
from nri_numa.topology.cpuset import CPUSet, NUMASet
from nri_numa.topology.model import Topology
from nri_numa.topology.synthetic import synthetic
from tests.support.world import GIB, World, container, pod, resources


def machine(*, offline: CPUSet | None = None, allowed: CPUSet | None = None) -> Topology:
    """Two NUMA nodes with four cores of two threads each: CPUs 0-3,8-11 and 4-7,12-15."""
    return synthetic(
        sockets=2,
        numa_per_socket=1,
        cores_per_numa=4,
        memory_gib=16,
        offline=offline or CPUSet(),
        allowed=allowed,
    )


def refuse(
    annotations: Mapping[str, str],
    *,
    cpus: float = 0,
    memory: float = 0,
    topology: Topology | None = None,
    settings: Settings | None = None,
    before: Callable[[World], object] | None = None,
    reading: Reading | None = None,
) -> Refused:
    """Ask for a container ``app`` of a Guaranteed pod ``default/web``."""
    world = World(topology or machine(), settings, reading=reading)
    if before is not None:
        before(world)
    of = pod("web", annotations)
    return world.refuse(of, container(of, wants=resources(cpus, memory)))


def owner(cpus: str) -> Callable[[World], object]:
    """A container that owns these CPUs."""
    of = pod("db", {"numacpu": cpus, "cpus": "exclusive"})
    return lambda world: world.place(of, container(of, "engine", wants=resources(2)))


def _bare_node() -> Refused:
    topology = machine()
    nodes = dict(topology.numa_nodes)
    nodes[1] = replace(nodes[1], memory_bytes=0)
    return refuse({"numamem": "1"}, topology=replace(topology, numa_nodes=nodes))


def _listed(world: World) -> object:
    return world.place(pod("db", {"numacpu": "2-3"}, qos=QoSClass.BURSTABLE))


SINGLE = {"policy": "single-numa-node"}

REFUSALS: dict[str, Callable[[], Refused]] = {
    "InvalidAnnotation": lambda: refuse({"policy": "single-node"}),
    "TopologyAffinityError": lambda: refuse(SINGLE, cpus=12, memory=4),
    "NotEnoughCPUs": lambda: refuse(
        {"cpus": "exclusive", "smt": "isolate"}, cpus=8, before=owner("0-1")
    ),
    "NotEnoughMemory": lambda: refuse(
        {"numamem": "0"}, cpus=2, memory=12, reading=Reading(memory={0: 5 * GIB, 1: 15 * GIB})
    ),
    "SMTAlignmentError": lambda: refuse({"cpus": "exclusive", "smt": "full-core"}, cpus=3),
    "SharedPoolEmpty": lambda: refuse({"cpus": "exclusive"}, cpus=16),
    "FractionalCPUs": lambda: refuse({"cpus": "exclusive"}, cpus=1.5),
    "NoCPUs": lambda: refuse({"cpus": "exclusive"}),
    "UnknownCPU": lambda: refuse({"numacpu": "14-17"}),
    "CPUOffline": lambda: refuse({"numacpu": "4-7"}, topology=machine(offline=CPUSet([5]))),
    "CPUNotAllowed": lambda: refuse(
        {"numacpu": "3-4"}, topology=machine(allowed=CPUSet([0, 1, 2, 3]))
    ),
    "CPUReserved": lambda: refuse(
        {"numacpu": "0-1", "cpus": "exclusive"},
        cpus=2,
        settings=Settings(reserved_cpus=CPUSet([0, 8])),
    ),
    "CPUOwned": lambda: refuse({"numacpu": "2-4"}, before=owner("2-3")),
    "CPUListed": lambda: refuse({"numacpu": "2-4", "cpus": "exclusive"}, cpus=3, before=_listed),
    "UnknownNUMANode": lambda: refuse({"numamem": "2"}),
    "NUMANodeNotAllowed": lambda: refuse(
        {"numamem": "1"}, topology=replace(machine(), withheld_memory=NUMASet([1]))
    ),
    "NUMANodeWithoutMemory": _bare_node,
}
"""By reason, how to come by one."""


def line(refused: Refused) -> str:
    """What the pod's author reads."""
    return f"{refused.reason}: {refused.message}"


if __name__ == "__main__":
    for _reason, _make in REFUSALS.items():
        sys.stdout.write(f"{_reason}\n    {line(_make())}\n")
