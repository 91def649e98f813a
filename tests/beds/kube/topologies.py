"""NodeResourceTopology objects of a real API server."""

import contextlib
from collections.abc import Iterator

from nri_numa.model.counted_containers import COUNTED_CONTAINERS_NRT_ATTRIBUTE
from tests.beds.cri import poll
from tests.beds.kube.bed import MANIFESTS
from tests.beds.kube.client import Client, JsonObject
from tests.beds.kube.manifests import PREFIX


def zones(*free: int) -> list[JsonObject]:
    """NUMA nodes with so many free exclusive CPUs."""
    return [
        {
            "name": f"node-{i}",
            "type": "Node",
            "costs": [
                {"name": f"node-{j}", "value": 10 if i == j else 21} for j in range(len(free))
            ],
            "resources": [
                {"name": "cpu", "capacity": "16", "allocatable": "16", "available": str(n)},
                {"name": "memory", "capacity": "32Gi", "allocatable": "32Gi", "available": "32Gi"},
            ],
            "attributes": [{"name": f"{PREFIX}/free-exclusive-cpus", "value": str(n)}],
        }
        for i, n in enumerate(free)
    ]


def publish_topology(client: Client, node: str, *free: int, charged: str = "") -> None:
    """Write a node's object, or change it."""
    body = {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {"name": node},
        "attributes": [
            {"name": "topologyManagerPolicy", "value": "none"},
            {"name": f"{PREFIX}/{COUNTED_CONTAINERS_NRT_ATTRIBUTE}", "value": charged},
        ],
        "zones": zones(*free),
    }
    if client.get(f"{NRT}/{node}") is None:
        client.ask("POST", NRT, body)
    else:
        client.ask("PATCH", f"{NRT}/{node}", {key: body[key] for key in ("zones", "attributes")})


TOPOLOGY_MANIFESTS = [f"publish-topology/{name}.yaml" for name in ("role", "policies", "crd")]


NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"


@contextlib.contextmanager
def applied(client: Client, api: str, *files: str) -> Iterator[None]:
    """Shipped manifests until the end, once the API server serves the kind that is theirs."""
    names = [f"--filename={MANIFESTS / file}" for file in files]
    client.kubectl("apply", *names)
    try:
        poll(lambda: client.request("GET", api)[0] == 200, "the kind to be served")
        yield
    finally:
        client.kubectl("delete", "--ignore-not-found", *names)
