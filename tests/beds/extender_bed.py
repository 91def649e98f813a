"""An extender on objects in memory."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from nri_numa.config import AgentConfig
from nri_numa.config.sections import DRA, Scheduling
from nri_numa.kube.requests import KubeClient, Resource
from nri_numa.scheduler.extender import Extender
from nri_numa.scheduler.protocol import BindingArgs
from tests.beds.cluster_objects import ClusterObjects
from tests.beds.stepped_loop import end


class ExtenderBed:
    """One whose watches do not run: it knows what `publish` and `schedule` say.

    Time passes in `step` and `until` of `tests.beds.stepped_loop`.
    """

    def __init__(
        self,
        *,
        synced: bool = True,
        api: KubeClient | None = None,
        dra: DRA = DRA(),  # noqa: B008
        **section: Any,
    ) -> None:
        self.cluster = ClusterObjects()
        self.extender = Extender(
            AgentConfig(scheduler=Scheduling(address="127.0.0.1:0", **section), dra=dra),
            api or self.cluster,
            self.cluster,
            clock=asyncio.get_running_loop().time,
        )
        self.nodes = self.extender.nodes
        if synced:
            self.extender.topologies.synced.set()
            self.extender.pods.synced.set()

    def publish(self, *topologies: dict[str, Any]) -> None:
        """What nodes publish, as the watch brings it."""
        for document in topologies:
            self.extender.node_watcher.on_update(document)

    def schedule(self, *pods: dict[str, Any]) -> None:
        """Pods that exist and were asked about."""
        self.cluster.put(Resource.PODS, *pods)
        for pod in pods:
            self.extender.reader.read_pod_request(pod)

    async def filter(self, pod: dict[str, Any], *names: str) -> dict[str, Any]:
        """Which of these nodes have room, as kube-scheduler is told."""
        question = {"Pod": pod, "NodeNames": list(names)}
        answer: dict[str, Any] = json.loads(
            await self.extender.filter(json.dumps(question).encode())
        )
        return answer

    async def preempt(self, pod: dict[str, Any], **victims: list[str]) -> dict[str, list[str]]:
        """Names of the victims by node, of those that kube-scheduler proposes by node."""
        proposed = {
            node: {"Pods": [{"UID": f"uid-{name}"} for name in names], "NumPDBViolations": 0}
            for node, names in victims.items()
        }
        body = json.dumps({"Pod": pod, "NodeNameToMetaVictims": proposed})
        answer = json.loads(await self.extender.preempt(body.encode()))
        return {
            node: sorted(one["UID"].removeprefix("uid-") for one in found["Pods"])
            for node, found in answer["NodeNameToMetaVictims"].items()
        }

    async def bind(self, name: str = "p", node: str = "n1") -> str:
        """Bind a pod that was scheduled; the result is why not."""
        return await self.extender.binder.bind(BindingArgs("default", name, f"uid-{name}", node))

    async def filter_and_bind(self, pod: dict[str, Any], node: str = "n1") -> str:
        """Both verbs, as kube-scheduler asks them; the result is why it is not bound."""
        self.cluster.put(Resource.PODS, pod)
        await self.filter(pod, node)
        metadata = pod["metadata"]
        body = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"],
                "PodUID": metadata["uid"], "Node": node}  # fmt: skip
        return str(json.loads(await self.extender.bind(json.dumps(body).encode()))["Error"])

    def bindings(self) -> list[dict[str, Any]]:
        """The documents that were sent to bind pods."""
        return self.cluster.bodies("POST", "/binding")

    @property
    def assumed_nodes(self) -> list[str]:
        """Of the pods whose NUMA nodes are held, the nodes."""
        return [hold.node for hold in self.nodes.assumed_pods.values()]

    def metrics(self) -> str:
        return self.extender.render_metrics().decode()


@asynccontextmanager
async def working(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While it works."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        await end(*tasks)
