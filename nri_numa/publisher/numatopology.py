"""Volcano's Numatopology of a node, from the agent's documents, and when it is written. Pure.

The form is that of nodeinfo.volcano.sh/v1alpha1 (volcano-sh/apis, pkg/apis/nodeinfo), as Volcano's
resource exporter fills it and its plugin numaaware reads it. It alone names single CPUs: the free
ones, and the containers that have the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from nri_numa.kube.requests import Resource
from nri_numa.model.offline_capacity import CPU_ID_LIMIT, format_id_list, parse_id_list
from nri_numa.publisher.outbox import AppliedObjectOutput
from nri_numa.web.responses import Assignment, TopologyDocument, Zones

Object = dict[str, Any]

STATIC_POLICY: Final = "static"
"""CPU Manager policy of nodes that the plugin allocates whole CPUs on."""
NO_POLICY: Final = "none"
_EXCLUSIVE_KINDS: Final = ("exclusive", "kubelet")
"""Kinds of containers that share their CPUs with no other."""
_POSSIBLY_SHARED_KINDS: Final = ("listed", "foreign")
"""Kinds whose CPUs may be shared: the agent's numbers say how many of them are free."""


def build_numatopology_spec(
    topology: TopologyDocument, assignments: Iterable[Assignment], zones: Zones
) -> Object:
    """Build the object's ``spec``.

    Free CPUs are those that no container has: on each NUMA node at most as many as one container
    can get, and in all at most as many as the node can give without going below the pool floor.
    CPUs of pinned containers are omitted first, then the highest. Reserved CPUs are not free, and
    ``resReserved`` is 0: numaaware subtracts that many CPUs of its own choice.
    """
    containers = sorted(assignments, key=lambda c: (c.namespace, c.pod, c.container))
    reserved = _parse_cpu_list(topology["cpus"]["reserved"])
    exclusive_cpus = reserved | _cpus_of_kinds(containers, *_EXCLUSIVE_KINDS)
    named = _cpus_of_kinds(containers, *_POSSIBLY_SHARED_KINDS)
    free_cpus = _free_cpus(topology, exclusive_cpus, named, zones)
    cpus = _parse_cpu_list(topology["cpus"]["online"])
    allocates_whole_cpus = zones.ready and not zones.defaults_to_shared
    return {
        "policies": {
            "CPUManagerPolicy": STATIC_POLICY if allocates_whole_cpus else NO_POLICY,
            "TopologyManagerPolicy": zones.policy,
        },
        "resReserved": {"cpu": "0"},
        "numares": {"cpu": {"allocatable": format_id_list(free_cpus), "capacity": len(cpus)}},
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
    topology: TopologyDocument, exclusive_cpus: frozenset[int], named: frozenset[int], zones: Zones
) -> set[int]:
    max_cpus_by_node = {zone.id: zone.free_exclusive_cpus for zone in zones.zones}
    free_by_node: dict[int, list[int]] = {}
    for node in topology["numaNodes"]:
        cpus = _parse_cpu_list(node["cpus"]) - exclusive_cpus
        candidates = sorted(cpus, key=lambda cpu: (cpu in named, cpu))
        free_by_node[node["id"]] = candidates[: max_cpus_by_node.get(node["id"], 0)]
    total = zones.free_exclusive_cpus
    while total is not None and sum(map(len, free_by_node.values())) > max(0, total):
        # From the NUMA node with the most free CPUs, of equal ones the last.
        free_by_node[max(free_by_node, key=lambda i: (len(free_by_node[i]), i))].pop()
    return {cpu for cpus in free_by_node.values() for cpu in cpus}


def _parse_cpu_list(text: str) -> frozenset[int]:
    return parse_id_list(text, CPU_ID_LIMIT)  # CPUs are listed in the same form


def _cpus_of_kinds(containers: Iterable[Assignment], *kinds: str) -> frozenset[int]:
    """Return the CPUs of containers of some kinds, and their idle siblings."""
    assignments = [c for c in containers if c.kind in kinds]
    texts = [text for c in assignments for text in (c.cpus, c.foreign_cpus, c.idle_siblings)]
    return frozenset[int]().union(*map(_parse_cpu_list, texts))


def _pod_allocations(containers: Iterable[Assignment]) -> list[Object]:
    """Return all pods, so the scheduler releases its reservations for those that have arrived."""
    pods: dict[str, Object] = {}
    for c in containers:
        pod = pods.setdefault(
            c.pod_uid,
            {"uid": c.pod_uid, "name": c.pod, "namespace": c.namespace, "containerAllocations": []},
        )
        cpus = _parse_cpu_list(c.cpus) | _parse_cpu_list(c.foreign_cpus)
        if cpus and c.kind in (*_EXCLUSIVE_KINDS, *_POSSIBLY_SHARED_KINDS):
            allocations = {"cpu": format_id_list(cpus)}
            pod["containerAllocations"].append({"name": c.container, "allocations": allocations})
    return list(pods.values())


def stale_spec(spec: Object) -> Object:
    """Return the spec for an agent that no longer answers: no free CPU."""
    policies = {**spec["policies"], "CPUManagerPolicy": NO_POLICY}
    cpu = {**spec["numares"]["cpu"], "allocatable": ""}
    return {**spec, "policies": policies, "numares": {"cpu": cpu}}


class NumatopologyOutput(AppliedObjectOutput):
    """The Numatopology of one Node; fields of Volcano's own exporter are not overwritten."""

    name, resource, kind = "numatopology", Resource.NUMATOPOLOGIES, "Numatopology"
    failure_text = "Numatopology not written"
    missing_definition_hint = "Volcano brings its definition"
    alternative = "stop that, or leave publish.numatopology off"

    def set_desired(self, spec: Object | None) -> None:
        """Set the desired spec; None if the agent no longer answers."""
        self._wanted = spec or (self._wanted and stale_spec(self._wanted))

    def _build_contents(self) -> Object:
        return {"spec": self._wanted}
