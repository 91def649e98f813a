"""Every watch that a service of ours follows, as the service makes it, and events for it."""

import json
from typing import Any

from nri_numa.config import AgentConfig
from nri_numa.config.sections import (
    ClusterPageSection,
    Controller,
    EvictionSection,
    StuckPodEviction,
)
from nri_numa.controller.service import ControllerService
from nri_numa.kube.api import Watch
from nri_numa.kube.requests import KubeClient
from nri_numa.publisher.publisher import BoundPods
from nri_numa.scheduler.extender import Extender

NAMES = (
    "extender: noderesourcetopologies",
    "extender: pods",
    "controller: nodes",
    "controller: noderesourcetopologies",
    "controller: pods",
    "controller: events",
    "publisher: pods",
)


def watch_of(name: str, api: KubeClient) -> Watch:
    """One of `NAMES`, with whatever its service does at each event."""
    service, _, kind = name.partition(": ")
    if service == "publisher":
        return BoundPods(api, "n1", lambda: None).watch
    if service == "extender":
        extender = Extender(AgentConfig(), api, api)
        return extender.topologies if kind != "pods" else extender.pods
    section = Controller(
        page=ClusterPageSection(enabled=True),
        evictions=EvictionSection(stuck_pods=StuckPodEviction(evict=True, include_running=True)),
    )
    watches = ControllerService(AgentConfig(controller=section), api)._watches
    return next(one for one in watches if one._path.endswith(f"/{kind}"))


def event_line(name: str, number: int, **annotations: str) -> bytes:
    """An event of about 1.5 KiB; each is about another object."""
    kind = name.partition(": ")[2]
    metadata = {
        "name": f"{kind}-{number}", "namespace": "default", "uid": f"uid-{number}",
        "resourceVersion": str(number + 2), "annotations": {"padding": "x" * 512, **annotations},
    }  # fmt: skip
    document = {"metadata": metadata, **_body(kind)}
    return json.dumps({"type": "ADDED", "object": document}).encode() + b"\n"


def _body(kind: str) -> dict[str, Any]:
    amounts = {"cpu": "2", "memory": "1Gi"}
    if kind == "pods":
        main = {"name": "main", "resources": {"requests": amounts, "limits": amounts}}
        return {
            "spec": {"nodeName": "n1", "containers": [main]},
            "status": {"phase": "Pending", "qosClass": "Guaranteed"},
        }
    if kind != "noderesourcetopologies":
        return {"spec": {}, "status": {}, "padding": "x" * 512}
    resources = [
        {"name": name, "capacity": "64", "allocatable": "64", "available": "64"}
        for name in ("cpu", "memory")
    ]
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "zones": [
            {
                "name": f"node-{i}", "type": "Node", "resources": resources,
                "costs": [{"name": f"node-{j}", "value": 10 if i == j else 21} for j in range(2)],
            }
            for i in range(2)
        ],
    }  # fmt: skip
