"""Extender, the controller's page and ``simulate --cluster`` have one verdict for one pod."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nri_numa.cluster.cluster_state import AssumedPod, ClusterState
from nri_numa.cluster.pod_reader import PodReader
from nri_numa.config import AgentConfig
from nri_numa.controller.overview import Overview, OverviewQuery
from nri_numa.scheduler.candidates import VerdictCache
from nri_numa.scheduler.fit import Fit
from tests.beds.cli import invoke
from tests.beds.objects import Watched, container, pod, single, topology

NODES, PODS = 6, 20
"""Nodes of a cluster, and pods that are judged there one after another."""
TAINT = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
SLOTS, GPU = "numa.example.com/exclusive-cpu", "x.io/gpu"


def random_cluster(random: Random) -> list[dict[str, Any]]:
    """Nodes, what they publish, and pods on their way there, in the midst of life, and ended."""
    documents: list[dict[str, Any]] = []
    for n in range(NODES):
        free, memory = ([random.randint(0, 16) for _ in range(2)] for _ in range(2))
        found = topology(*free, memory=memory, name=f"n{n}")
        for zone in found["zones"] if n % 2 else ():
            left = str(random.randint(0, 4))
            zone["resources"].append({"name": GPU, "allocatable": "4", "available": left})
        labels = {"disk": random.choice(("ssd", "hdd"))}
        spec = {"taints": [TAINT] * (n % 3 == 0), "unschedulable": n == 5}
        documents.append({"kind": "NodeResourceTopology", **found})
        documents.append({"kind": "Node", "metadata": {"name": f"n{n}", "labels": labels},
                          "spec": spec})  # fmt: skip
    for n, phase in enumerate(("Pending", "Pending", "Running", "Succeeded", "Failed")):
        one = single(random.randint(1, 6), name=f"there-{n}", scheduled_numa_nodes='{"main":"0"}',
                     node=f"n{random.randrange(NODES)}", phase=phase)  # fmt: skip
        documents.append({"kind": "Pod", **one})
    return documents


def random_pod(random: Random, name: str) -> dict[str, Any]:
    """A pod whose containers may ask for CPUs, shared or exclusive, memory, slots and devices."""
    containers = []
    for n in range(random.choice((1, 1, 1, 2))):
        one = container(f"c{n}", str(random.randint(1, 9)), f"{random.randint(1, 12)}Gi")
        if random.random() < 0.3:
            one["resources"]["limits"][GPU] = str(random.randint(1, 3))
        if random.random() < 0.1:
            one["resources"]["limits"][SLOTS] = one["resources"]["limits"]["cpu"]
        containers.append(one)
    asks = {"policy": random.choice(("single-numa-node", "restricted", "best-effort", "none"))}
    if random.random() < 0.6:
        asks["cpus"] = "exclusive"
    if random.random() < 0.2:
        asks["scope"] = "pod"
    made = pod(*containers, name=name, **(asks if random.random() < 0.9 else {}))
    if random.random() < 0.4:
        made["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}]
    if random.random() < 0.3:
        made["spec"]["nodeSelector"] = {"disk": "ssd"}
    return {"apiVersion": "v1", "kind": "Pod", **made}


def query_of(document: dict[str, Any]) -> OverviewQuery | None:
    """The same as the page asks it; None for what it cannot ask."""
    found = {key.partition("/")[2]: text for key, text in
             document["metadata"]["annotations"].items()}  # fmt: skip
    first, *more = document["spec"]["containers"]
    limits = first["resources"]["limits"]
    if more or len(limits) > 2 or found.keys() != {"policy", "cpus"}:
        return None
    memory = int(limits["memory"].removesuffix("Gi")) << 30
    return OverviewQuery(cpus=int(limits["cpu"]), memory=memory, policy=found["policy"])


def left_out(document: dict[str, Any], node: dict[str, Any]) -> bool:
    """Whether kube-scheduler leaves a Node out before it asks anybody."""
    spec, labels = document["spec"], node["metadata"]["labels"]
    tainted = node["spec"]["taints"] and "tolerations" not in spec
    chosen = spec.get("nodeSelector", {}).items() <= labels.items()
    return bool(node["spec"]["unschedulable"] or tainted or not chosen)


class World:
    """The documents of one cluster, as extender, page and ``simulate`` are given them."""

    def __init__(self, documents: list[dict[str, Any]]) -> None:
        self.nodes = [one for one in documents if one["kind"] == "Node"]
        config = AgentConfig()
        self.extender, self.reader = Watched(), PodReader(config)
        for one in documents:
            if one["kind"] == "NodeResourceTopology":
                self.extender.topologies.on_update(one)
            elif one.get("status") == {"phase": "Pending"}:  # as its watch selects
                self.extender.pods.on_update(one)
        self.page = ClusterState.from_documents(documents, self.reader)
        judges = VerdictCache(self.page, config.strategy)
        self.overview = Overview(config, self.page, judges, self.reader)
        self.judges = VerdictCache(self.extender.nodes, config.strategy)

    def by_extender(self, document: dict[str, Any], names: list[str]) -> dict[str, str]:
        """Reasons by node, or its NUMA nodes where it fits."""
        request = self.reader.read_pod_request(document)
        found = self.judges.filter_nodes(request, names)
        fits = {name: self.judges.evaluate_node(request, name) for name in found.feasible}
        assert all(isinstance(one, Fit) for one in fits.values())
        places = {name: str({c: str(i) for c, i in one.numa_nodes}) for name, one in fits.items()
                  if isinstance(one, Fit)}  # fmt: skip
        return {**found.failed, **found.unresolvable, **places}

    async def by_page(self, query: OverviewQuery) -> dict[str, str]:
        """The same as the page says it; it shows NUMA nodes of one container."""
        document = await self.overview.overview_document(query)
        return {
            one.name: one.reason or str({"c0": one.numa_nodes} if one.numa_nodes else {})
            for one in document["nodes"]
        }

    def bind(self, document: dict[str, Any], node: str) -> None:
        """The pod gets its node."""
        request = self.reader.read_pod_request(document)
        fit = self.judges.evaluate_node(request, node)
        assert isinstance(fit, Fit)
        for state in (self.extender.nodes, self.page):
            state.assume_pod(
                AssumedPod(request=request, node=node, numa_nodes=dict(fit.numa_nodes),
                           charge=fit.pod_charge, assumed_at=0)
            )  # fmt: skip


def names(nodes: list[dict[str, Any]]) -> list[str]:
    return [one["metadata"]["name"] for one in nodes]


def by_simulate(judged: dict[str, Any]) -> dict[str, str]:
    """The same as ``simulate`` says it, without nodes that it leaves out."""
    fits = {one["name"]: str(one["numaNodes"]) for one in judged["nodes"]}
    left = ("it is cordoned", "it has a taint", "the pod's node selector")
    rejected = {name: one["reason"] for one in judged["rejectedBy"] for name in one["nodes"]
               if not one["reason"].startswith(left)}  # fmt: skip
    return {**rejected, **fits}


@pytest.mark.parametrize("seed", range(10))
async def test_one_verdict(seed: int) -> None:
    random = Random(seed)
    documents = random_cluster(random)
    pods = [random_pod(random, f"p{n}") for n in range(PODS)]
    Path("cluster").write_text(json.dumps({"kind": "List", "items": documents}))
    Path("pods.yaml").write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))
    done = invoke("simulate", "--cluster", "cluster", "-o", "json", "pods.yaml")
    assert done.exit_code in (0, 1), done.output
    answer, world = json.loads(done.stdout), World(documents)
    assert answer["cluster"]["pods"] == 3, "those that have ended count nothing"
    assert len(answer["pods"]) == PODS
    for document, judged in zip(pods, answer["pods"], strict=True):
        admitted = [one for one in world.nodes if not left_out(document, one)]
        if judged["constrained"]:
            assert by_simulate(judged) == world.by_extender(document, names(admitted)), document
        if (query := query_of(document)) is not None:  # of all nodes: it knows no tolerations
            page = await world.by_page(query)
            assert page == world.by_extender(document, names(world.nodes)), document
        if judged["node"]:
            world.bind(document, judged["node"])
