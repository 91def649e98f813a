"""Volcano's Numatopology of a node, from the agent's documents. Pure.

The form is that of nodeinfo.volcano.sh/v1alpha1 (volcano-sh/apis, pkg/apis/nodeinfo), as Volcano's
resource exporter fills it and its plugin numaaware reads it. It is the one form that names single
CPUs: free ones, and whose the others are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nri_numa.http.responses import Assignment, TopologyDocument, Zones

Object = dict[str, Any]

API_VERSION: Final = "nodeinfo.volcano.sh/v1alpha1"
KIND: Final = "Numatopology"
STATIC: Final = "static"
"""The plugin takes a node for one that gives whole CPUs where its CPU Manager has this policy."""
NONE: Final = "none"
_OWN: Final = ("exclusive", "kubelet")
"""Kinds of containers whose CPUs are nobody else's."""
_NAMED: Final = ("explicit", "foreign")
"""Kinds whose CPUs may be shared: the agent's numbers say how many of them can be had."""


def contents(topology: TopologyDocument, assignments: Iterable[Assignment], found: Zones) -> Object:
    """The object's ``spec``.

    Free CPUs are those that no container has, no more on each NUMA node than one container could
    have there, and no more in all than the node can give, so that the shared pool keeps its floor.
    Left out are those that somebody was pinned to, then the highest. No reserved CPU is among
    them, and ``resReserved`` is 0: numaaware subtracts that many CPUs of its own choice.

    Args:
        topology: the machine.
        assignments: all containers.
        found: NUMA nodes as who schedules counts them.
    """
    containers = sorted(assignments, key=lambda one: (one.namespace, one.pod, one.container))
    reserved = numbers(topology["cpus"]["reserved"])
    own = reserved | {cpu for one in containers if one.kind in _OWN for cpu in _cpus(one)}
    named = {cpu for one in containers if one.kind in _NAMED for cpu in _cpus(one)}
    free = _free(topology, own, named, found)
    cpus = numbers(topology["cpus"]["online"])
    return {
        "policies": {
            "CPUManagerPolicy": STATIC if found.ready and not found.shares else NONE,
            "TopologyManagerPolicy": found.policy,
        },
        "resReserved": {"cpu": "0"},
        "numares": {"cpu": {"allocatable": text_of(free), "capacity": len(cpus)}},
        "cpuDetail": {
            str(cpu): {
                "numa": core["numaNode"], "socket": core["socket"], "core": core["id"],
            }
            for core in topology["cores"]
            for cpu in sorted(numbers(core["cpus"]))
        },
        "podAllocations": _pods(containers),
    }  # fmt: skip


def _free(topology: TopologyDocument, own: set[int], named: set[int], found: Zones) -> set[int]:
    of = {
        node["id"]: sorted(numbers(node["cpus"]) - own, key=lambda cpu: (cpu in named, cpu))
        for node in topology["numaNodes"]
    }
    for zone in found.zones:
        del of.get(zone.id, [])[zone.free_exclusive_cpus :]
    known = {zone.id for zone in found.zones}
    left = {i: cpus for i, cpus in of.items() if i in known}
    together = found.free_exclusive_cpus
    while together is not None and sum(map(len, left.values())) > max(0, together):
        # From the NUMA node with most, of equal ones the last.
        left[max(left, key=lambda i: (len(left[i]), i))].pop()
    return {cpu for cpus in left.values() for cpu in cpus}


def _cpus(one: Assignment) -> set[int]:
    return numbers(one.cpus) | numbers(one.pinned) | numbers(one.idle)


def _pods(containers: Iterable[Assignment]) -> list[Object]:
    """Every pod, so that the scheduler lets go of what it keeps for those that came."""
    pods: dict[str, Object] = {}
    for one in containers:
        pod = pods.setdefault(
            one.pod_uid,
            {
                "uid": one.pod_uid,
                "name": one.pod,
                "namespace": one.namespace,
                "containerAllocations": [],
            },
        )
        cpus = numbers(one.cpus) | numbers(one.pinned)
        if cpus and one.kind in (*_OWN, *_NAMED):
            allocations = {"cpu": text_of(cpus)}
            pod["containerAllocations"].append({"name": one.container, "allocations": allocations})
    return list(pods.values())


def silent(spec: Object) -> Object:
    """The same for an agent that does not answer any more: nothing that anybody could have."""
    policies = {**spec["policies"], "CPUManagerPolicy": NONE}
    cpu = {**spec["numares"]["cpu"], "allocatable": ""}
    return {**spec, "policies": policies, "numares": {"cpu": cpu}}


def body(node: str, uid: str, spec: Object) -> Object:
    """The whole object, as it is applied; see `nri_numa.cluster.node_topology.body`."""
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}
    metadata = {"name": node, "ownerReferences": [owner]}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}


def numbers(text: str) -> set[int]:
    """The CPUs of a kernel list such as ``0-3,8``, as the agent writes it."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def text_of(cpus: Iterable[int]) -> str:
    """A kernel list of CPUs; empty for none."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
