"""Kubelets with a static policy, and what they granted."""

import json
from typing import Any

from nri_numa.model.cpuset import CPUSet
from tests.beds.cri import poll
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.node import KubeNode

# Half a CPU makes one that the static policy does not give away; the rest of it can be requested.
STATIC = {
    "cpuManagerPolicy": "static",
    "systemReserved": {"cpu": "500m"},
    "cpuManagerReconcilePeriod": "2s",
}


NONE = {
    "cpuManagerPolicy": "none",
    "memoryManagerPolicy": "None",
    "systemReserved": {},
    "reservedMemory": [],
}


# A pod may list the CPU that the kubelet reserves, which is reserved for us as well then.
MAY_LIST = {"permissions": [{"allowReservedCPUs": True}]}


def configure(node: KubeNode, plugin: dict[str, Any]) -> None:
    """Have nri-numa run with this configuration."""
    begin = len(node.plugin.records())
    node.plugin.reload(plugin)
    poll(
        lambda: [r for r in node.plugin.records()[begin:] if "reloaded" in r.get("msg", "")],
        "reloaded",
    )


def granted(node: KubeNode, of: JsonObject) -> CPUSet:
    """What the kubelet's state file says that it granted a pod's container."""
    notes = json.loads((node.kubelet_root / "cpu_manager_state").read_text("utf-8"))
    entries = notes.get("entries", {}).get(of["metadata"]["uid"], {})
    return CPUSet.parse(entries.get("main", ""))


def first_line(client: Client, name: str) -> CPUSet:
    """CPUs of a container's first instruction."""
    line = client.said(name).split()[0]
    return CPUSet.parse(line.removeprefix("cpus="))
