"""Volcano's Numatopology of a node, from the agent's documents, and when it is written. Pure.

The form is that of nodeinfo.volcano.sh/v1alpha1 (volcano-sh/apis, pkg/apis/nodeinfo), as Volcano's
resource exporter fills it and its plugin numaaware reads it. It is the one form that names single
CPUs: free ones, and whose the others are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nri_numa.kube.requests import Resource
from nri_numa.model.offline_capacity import CPU_ID_LIMIT, format_id_list, parse_id_list
from nri_numa.publisher.outbox import AppliedObjectOutput, node_owner_reference
from nri_numa.web.responses import Assignment, TopologyDocument, Zones

Object = dict[str, Any]

VOLCANO_NUMATOPOLOGY_API_VERSION: Final = "nodeinfo.volcano.sh/v1alpha1"
NUMATOPOLOGY_KIND: Final = "Numatopology"
STATIC_POLICY: Final = "static"
"""The plugin takes a node for one that gives whole CPUs where its CPU Manager has this policy."""
NO_POLICY: Final = "none"
_EXCLUSIVE_KINDS: Final = ("exclusive", "kubelet")
"""Kinds of containers that share their CPUs with no other."""
_POSSIBLY_SHARED_KINDS: Final = ("explicit", "foreign")
"""Kinds whose CPUs may be shared: the agent's numbers say how many of them can be had."""


def build_numatopology_spec(
    topology: TopologyDocument, assignments: Iterable[Assignment], found: Zones
) -> Object:
    """The object's ``spec``.

    Free CPUs are those that no container has, no more on each NUMA node than one container could
    have there, and no more in all than the node can give, so that the shared pool keeps its floor.
    Left out are those that a container was pinned to, then the highest. No reserved CPU is among
    them, and ``resReserved`` is 0: numaaware subtracts that many CPUs of its own choice.
    """
    containers = sorted(assignments, key=lambda one: (one.namespace, one.pod, one.container))
    reserved = _parse_cpu_list(topology["cpus"]["reserved"])
    own = reserved | {
        cpu
        for one in containers
        if one.kind in _EXCLUSIVE_KINDS
        for cpu in _cpus_of_assignment(one)
    }
    named = {
        cpu
        for one in containers
        if one.kind in _POSSIBLY_SHARED_KINDS
        for cpu in _cpus_of_assignment(one)
    }
    free = _free_cpus(topology, own, named, found)
    cpus = _parse_cpu_list(topology["cpus"]["online"])
    return {
        "policies": {
            "CPUManagerPolicy": (
                STATIC_POLICY if found.ready and not found.defaults_to_shared else NO_POLICY
            ),
            "TopologyManagerPolicy": found.policy,
        },
        "resReserved": {"cpu": "0"},
        "numares": {"cpu": {"allocatable": format_id_list(free), "capacity": len(cpus)}},
        "cpuDetail": {
            str(cpu): {
                "numa": core["numaNode"], "socket": core["socket"], "core": core["id"],
            }
            for core in topology["cores"]
            for cpu in sorted(_parse_cpu_list(core["cpus"]))
        },
        "podAllocations": _pod_allocations(containers),
    }  # fmt: skip


def _free_cpus(
    topology: TopologyDocument, own: frozenset[int], named: set[int], found: Zones
) -> set[int]:
    of = {
        node["id"]: sorted(_parse_cpu_list(node["cpus"]) - own, key=lambda cpu: (cpu in named, cpu))
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


def _parse_cpu_list(text: str) -> frozenset[int]:
    return parse_id_list(text, CPU_ID_LIMIT)  # CPUs are listed in the same form


def _cpus_of_assignment(one: Assignment) -> frozenset[int]:
    return (
        _parse_cpu_list(one.cpus)
        | _parse_cpu_list(one.foreign_cpus)
        | _parse_cpu_list(one.idle_siblings)
    )


def _pod_allocations(containers: Iterable[Assignment]) -> list[Object]:
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
        cpus = _parse_cpu_list(one.cpus) | _parse_cpu_list(one.foreign_cpus)
        if cpus and one.kind in (*_EXCLUSIVE_KINDS, *_POSSIBLY_SHARED_KINDS):
            allocations = {"cpu": format_id_list(cpus)}
            pod["containerAllocations"].append({"name": one.container, "allocations": allocations})
    return list(pods.values())


def stale_spec(spec: Object) -> Object:
    """The same for an agent that does not answer any more: nothing that a container could have."""
    policies = {**spec["policies"], "CPUManagerPolicy": NO_POLICY}
    cpu = {**spec["numares"]["cpu"], "allocatable": ""}
    return {**spec, "policies": policies, "numares": {"cpu": cpu}}


class NumatopologyOutput(AppliedObjectOutput):
    """The Numatopology of one Node; fields that Volcano's own exporter owns are not taken."""

    resource = Resource.NUMATOPOLOGIES
    failure_text = "the Numatopology is not written"
    missing_definition_hint = "Volcano brings its definition"
    alternative = "stop that, or leave publish.numatopology off"

    def __init__(self, node: str) -> None:
        super().__init__("numatopology", node)

    def set_desired(self, spec: Object | None) -> None:
        """It should be this; None when the agent has said nothing for a while."""
        self._wanted = spec or (self._wanted and stale_spec(self._wanted))

    def _build_object(self) -> Object:
        metadata = {
            "name": self._node,
            "ownerReferences": [node_owner_reference(self._node, self._owner_uid)],
        }
        return {
            "apiVersion": VOLCANO_NUMATOPOLOGY_API_VERSION,
            "kind": NUMATOPOLOGY_KIND,
            "metadata": metadata,
            "spec": self._wanted,
        }
