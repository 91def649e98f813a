"""Pods that are evicted, and what says that they should be."""

import json
from collections.abc import Mapping
from typing import Any

from tests.beds.objects import PREFIX, container, single, topology

SAID = (
    "InsufficientCPUs: pod shop/{0}, container main: needs 4 exclusive CPUs; "
    "at most 2 free for exclusive use"
)


def stuck_pod(
    name: str,
    *,
    said: str = "",
    workload: str = "",
    version: str = "7",
    owners: list[dict[str, Any]] | None = None,
    annotations: Mapping[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod that `full` refuses, of a workload of its own where nothing else is said."""
    said = f"failed to create: {said or SAID.format(name)}"
    waiting = {"reason": "CreateContainerError", "message": said}
    owner = {"kind": "ReplicaSet", "uid": workload or f"rs-{name}", "controller": True}
    made = single(4, name=name, node="full")
    made["metadata"] |= {"namespace": "shop", "resourceVersion": version}
    made["metadata"]["ownerReferences"] = [owner] if owners is None else owners
    made["metadata"]["annotations"] |= annotations or {}
    made["spec"] |= spec
    made["status"]["containerStatuses"] = [{"name": "main", "state": {"waiting": waiting}}]
    return made


def partly_stuck_pod(name: str, *, phase: str = "Running", **keys: Any) -> dict[str, Any]:
    """The same, of which a container `helper` runs that has two exclusive CPUs.

    In the phase Running, unless the other one never ran.
    """
    made = stuck_pod(name, **keys)
    made["spec"]["containers"].append(container("helper", "2"))
    made["status"]["containerStatuses"].append({"name": "helper", "state": {"running": {}}})
    made["status"]["phase"] = phase
    return made


def rejection_event(name: str, said: str = "") -> dict[str, Any]:
    """What the kubelet tells of a container that cannot be created."""
    return {
        "involvedObject": {"kind": "Pod", "namespace": "shop", "name": name},
        "reason": "Failed",
        "message": said or f"Error: failed to create containerd container: {SAID.format(name)}",
    }


NODE_ANNOTATIONS = {f"{PREFIX}/numa-ids": "0-1", f"{PREFIX}/numacpu": "0-3|4-7"}
"""Of a Node with two NUMA nodes of four CPUs."""


def assigned_pod(
    name: str, cpus: str, mems: str = "", workload: str = "", **metadata: Any
) -> dict[str, Any]:
    """A pod on node n, whose container has these CPUs and memory nodes."""
    assigned = json.dumps({"main": {"cpus": cpus, "mems": mems}})
    owner = {"kind": "ReplicaSet", "name": "rs", "uid": workload or f"rs-{name}"}
    return {
        "metadata": {
            "name": name,
            "namespace": "shop",
            "uid": f"uid-{name}",
            "annotations": {f"{PREFIX}/assigned": assigned},
            "ownerReferences": [{**owner, "controller": True}],
            **metadata,
        },
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running"},
    }


def measured_topology(node: str, *factors: object) -> dict[str, Any]:
    """What a node publishes; None for a zone without the attribute."""
    made = topology(*(4 for _ in factors), name=node, zone={f"{PREFIX}/shared-cpus": "4"})
    for zone, factor in zip(made["zones"], factors, strict=True):
        if factor is not None:
            zone["attributes"].append(
                {"name": f"{PREFIX}/measured-capacity-factor", "value": factor}
            )
    made["zones"].append({"name": "socket-0", "type": "Socket"})
    return made
